//! A figure that a paper prints, beside ours.

use crate::printed::Printed;
use std::fmt::Write as _;

/// How far ours may be off to agree.
pub const CLOSE: f64 = 0.10;
/// How far to be near.
pub const NEAR: f64 = 0.25;

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

    /// With moec's policies beside the paper's.
    #[must_use]
    pub fn moec(self, moec: f64) -> Self {
        Self { moec: Some(moec), ..self }
    }

    /// In this unit.
    #[must_use]
    pub fn unit(self, unit: &'static str) -> Self {
        Self { unit, ..self }
    }

    /// With the reason why it does not come out.
    #[must_use]
    pub fn why(self, why: &'static str) -> Self {
        Self { why, ..self }
    }

    /// A constant was found from it.
    #[must_use]
    pub fn used(self) -> Self {
        Self { used: true, ..self }
    }

    /// Whether the paper's policies give it.
    pub fn agrees(&self) -> bool {
        self.within(CLOSE)
    }

    /// Whether they nearly do.
    pub fn near(&self) -> bool {
        self.within(NEAR)
    }

    /// Whether moec's give it.
    pub fn agrees_with_moec(&self) -> bool {
        self.moec.is_some_and(|moec| self.paper.error(moec).abs() <= CLOSE)
    }

    fn within(&self, error: f64) -> bool {
        self.paper.error(self.ours).abs() <= error
    }

    /// One line.
    pub fn verdict(&self) -> String {
        let error = format!("{:+.0} %", 100.0 * self.paper.error(self.ours));
        match (self.used, self.agrees(), self.why) {
            (true, ..) => "a constant was found from it".to_owned(),
            (_, true, _) => "agrees".to_owned(),
            (.., "") => error,
            (.., why) if self.agrees_with_moec() => format!("{error}, moec's agrees: {why}"),
            (.., why) => format!("{error}: {why}"),
        }
    }
}

/// Three digits that count; of what is below 1, three places.
pub fn digits(x: f64) -> String {
    match x.abs() {
        a if a >= 99.95 => format!("{x:.0}"),
        a if a >= 9.995 => format!("{x:.1}"),
        a if a >= 0.995 => format!("{x:.2}"),
        _ => format!("{x:.3}"),
    }
}

/// All of them as a table in Markdown; `ours` is the head of the column of what is simulated with the paper's policies. There is
/// one of moec's where any claim has it.
pub fn table(claims: &[Claim], ours: &str) -> String {
    let moec = claims.iter().any(|c| c.moec.is_some());
    let (head, rule) = if moec { (" moec |", "---|") } else { ("", "") };
    let mut out = format!(
        "## Every figure beside ours\n\n| where | what | the paper's | {ours} |{head} |\n|---|---|---|---|{rule}---|\n"
    );
    for c in claims {
        let moec =
            if moec { format!(" {} |", c.moec.map_or_else(String::new, digits)) } else { String::new() };
        let [place, unit, ours, verdict] = [c.place, c.unit, &digits(c.ours), &c.verdict()];
        let _ = writeln!(out, "| {place} | {} | {} {unit} | {ours} |{moec} {verdict} |", c.what, c.paper);
    }
    out + "\n"
}
