//! The life of environments under faults: real decisions, real index and watch handlers of two control
//! processes at once, between a simulated API server, hosts and guests.
//!
//! A schedule is drawn from a seed. After each of its steps the invariants of the design hold
//! ([`ledger`]); then the faults end, time goes on, and every pod must run, be finished, or wait for a
//! reason that is true, and in the end nothing may be left ([`calm`]). Of the eight, one is half for a model:
//! no node may be given another pod's credentials (7); that no byte of a workload reaches the platform link or
//! the metadata endpoint is the guest's and the VPC's rulesets, which packets prove.
//!
//! `cargo xtask chaos model --schedules 100000` runs more than the tests do. A schedule that breaks
//! something is made as short as it can be; kept in `regressions/`, it runs with the tests for ever.

mod api;
mod calm;
mod control;
mod drain;
mod guest;
mod ledger;
mod machine;
mod schedule;
mod tests;
mod world;
