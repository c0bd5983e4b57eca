//! What was measured, for people and for scripts.

use crate::machine::Machine;
use serde::Serialize;
use std::fmt;

/// The result of one run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) bench: &'static str,
    pub(crate) machine: Machine,
    pub(crate) figures: Vec<Figure>,
    pub(crate) ratios: Vec<Ratio>,
    /// What could have leaked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) counts: Vec<Count>,
    pub(crate) notes: Vec<String>,
}

/// One thing, measured some times on one of the two nodes.
#[derive(Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) what: String,
    /// `monopod` or `peer`, and how it was set up.
    pub(crate) subject: String,
    pub(crate) unit: &'static str,
    pub(crate) min: f64,
    pub(crate) median: f64,
    pub(crate) max: f64,
    /// In the order in which they were taken.
    pub(crate) values: Vec<f64>,
}

/// A figure of Monopod's divided by one that it is compared with.
#[derive(Debug, Serialize)]
pub(crate) struct Ratio {
    pub(crate) what: String,
    pub(crate) value: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) goal: Option<Goal>,
}

/// How many there were of something before and after the run.
#[derive(Debug, Serialize)]
pub(crate) struct Count {
    pub(crate) what: &'static str,
    pub(crate) before: f64,
    pub(crate) after: f64,
}

/// What a ratio should be.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Goal {
    AtMost(f64),
    AtLeast(f64),
}

impl Goal {
    fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtMost(limit) => value <= limit,
            Self::AtLeast(limit) => value >= limit,
        }
    }
}

impl Report {
    pub(crate) fn new(bench: &'static str, machine: Machine) -> Self {
        Self {
            bench,
            machine,
            figures: Vec::new(),
            ratios: Vec::new(),
            counts: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Adds a figure, unless nothing was measured, and gives its median.
    pub(crate) fn figure(
        &mut self,
        what: &str,
        subject: &str,
        unit: &'static str,
        values: Vec<f64>,
    ) -> Option<f64> {
        let median = median(&values)?;
        self.figures.push(Figure {
            what: what.to_owned(),
            subject: subject.to_owned(),
            unit,
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            median,
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            values,
        });
        Some(median)
    }

    /// Adds the ratio of two figures that were both taken.
    pub(crate) fn ratio(
        &mut self,
        what: &str,
        of: Option<f64>,
        to: Option<f64>,
        goal: Option<Goal>,
    ) {
        if let (Some(of), Some(to)) = (of, to) {
            self.ratios.push(Ratio {
                what: what.to_owned(),
                value: of / to,
                goal,
            });
        }
    }
}

/// The middle value, or the mean of the two in the middle.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = *sorted.get((sorted.len() - 1) / 2)?;
    Some(f64::midpoint(lower, upper))
}

/// The value below which this part of all values lies.
pub(crate) fn quantile(values: &[f64], part: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an index into the values, of which there are few"
    )]
    let at = ((sorted.len() as f64 * part).ceil() as usize).saturating_sub(1);
    sorted.get(at).copied()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = &self.machine;
        writeln!(
            f,
            "\nbench {} on {} cores of {}, {} MiB, Linux {}",
            self.bench, machine.cores, machine.processor, machine.memory_mib, machine.kernel
        )?;
        writeln!(f, "VMs: {}", machine.accelerator)?;
        writeln!(
            f,
            "load {:.1} before, {:.1} after\n",
            machine.load_before, machine.load_after
        )?;
        let width = |cells: &mut dyn Iterator<Item = usize>| cells.max().unwrap_or(0);
        let what = width(&mut self.figures.iter().map(|figure| figure.what.len()));
        let subject = width(&mut self.figures.iter().map(|figure| figure.subject.len()));
        writeln!(
            f,
            "{:<what$}   {:<subject$}   {:>9} {:>9} {:>9}",
            "FIGURE", "NODE", "MIN", "MEDIAN", "MAX"
        )?;
        for figure in &self.figures {
            writeln!(
                f,
                "{:<what$}   {:<subject$}   {:>9} {:>9} {:>9}  {}",
                figure.what,
                figure.subject,
                number(figure.min),
                number(figure.median),
                number(figure.max),
                figure.unit
            )?;
        }
        if !self.ratios.is_empty() {
            writeln!(f)?;
        }
        let what = width(&mut self.ratios.iter().map(|ratio| ratio.what.len()));
        for ratio in &self.ratios {
            write!(f, "{:<what$}   {:>6.2}", ratio.what, ratio.value)?;
            if let Some(goal) = ratio.goal {
                let verdict = if goal.is_met(ratio.value) {
                    "met"
                } else {
                    "MISSED"
                };
                match goal {
                    Goal::AtMost(limit) => write!(f, "   goal at most {limit}: {verdict}")?,
                    Goal::AtLeast(limit) => write!(f, "   goal at least {limit}: {verdict}")?,
                }
            }
            writeln!(f)?;
        }
        if !self.counts.is_empty() {
            let what = width(&mut self.counts.iter().map(|count| count.what.len()));
            writeln!(f, "\n{:<what$}   {:>9} {:>9}", "COUNT", "BEFORE", "AFTER")?;
            for count in &self.counts {
                let (before, after) = (number(count.before), number(count.after));
                writeln!(f, "{:<what$}   {before:>9} {after:>9}", count.what)?;
            }
        }
        for note in &self.notes {
            writeln!(f, "\n{note}")?;
        }
        Ok(())
    }
}

/// Three digits that mean something, and no more.
fn number(value: f64) -> String {
    match value.abs() {
        whole if whole.fract() == 0.0 => format!("{value:.0}"),
        0.0..10.0 => format!("{value:.3}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_an_even_number_of_values_is_between_two() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn a_quantile_is_a_value_that_was_measured() {
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(quantile(&hundred, 0.99), Some(99.0));
        assert_eq!(quantile(&hundred, 0.5), Some(50.0));
        assert_eq!(quantile(&[7.0], 0.99), Some(7.0));
        assert_eq!(quantile(&[], 0.99), None);
    }
}
