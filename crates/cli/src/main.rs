//! The `monopod` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    monopod_cli::main()
}
