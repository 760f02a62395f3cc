//! A figure that a paper prints, beside ours.

use crate::printed::Printed;
use std::fmt::Write as _;

/// How far ours may be off to agree.
pub const CLOSE: f64 = 0.10;

/// A figure of the paper.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// Where it stands.
    pub place: &'static str,
    /// What it is.
    pub what: String,
    /// Its unit.
    pub unit: &'static str,
    /// What is printed.
    pub paper: Printed,
    /// With the paper's policies.
    pub ours: f64,
    /// With moec's, where that makes a difference.
    pub moec: Option<f64>,
    /// A constant was found from it: it checks nothing.
    pub used: bool,
    /// Why it does not come out, if it does not.
    pub why: &'static str,
}

impl Claim {
    /// A speedup: its unit is `×`.
    pub fn new(place: &'static str, what: impl Into<String>, paper: Printed, ours: f64) -> Self {
        Self { place, what: what.into(), unit: "×", paper, ours, moec: None, used: false, why: "" }
    }

    /// Whether the paper's policies give it.
    pub fn agrees(&self) -> bool {
        self.paper.error(self.ours).abs() <= CLOSE
    }

    /// One line.
    pub fn verdict(&self) -> String {
        match (self.used, self.agrees()) {
            (true, _) => "a constant was found from it".to_owned(),
            (_, true) => "agrees".to_owned(),
            _ => format!("{:+.0} %: {}", self.paper.error(self.ours) * 100.0, self.why),
        }
    }
}

/// Three digits of a number.
pub fn digits(x: f64) -> String {
    let places = if x >= 100.0 { 0 } else { 2 - (x.max(1.0).log10().floor() as usize).min(1) };
    format!("{x:.*}", places + usize::from(x < 1.0))
}

/// All of them as a table in Markdown; `ours` is the head of the column of what is simulated with the paper's policies.
pub fn table(claims: &[Claim], ours: &str) -> String {
    let mut out = format!(
        "## Every figure beside ours\n\n| where | what | the paper's | {ours} | moec | |\n|---|---|---|---|---|---|\n"
    );
    for c in claims {
        let moec = c.moec.map_or_else(String::new, digits);
        let _ = writeln!(
            out,
            "| {} | {} | {} {} | {} | {moec} | {} |",
            c.place,
            c.what,
            c.paper,
            c.unit,
            digits(c.ours),
            c.verdict()
        );
    }
    out + "\n"
}
