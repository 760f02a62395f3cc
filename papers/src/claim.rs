//! Figures of a paper compared with ours. `claims/*.toml` have the printed figures and the names of the
//! quantities that are computed for them.

use crate::printed::Printed;
use moec_base::{Error, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Largest distance of ours that agrees, as a share.
pub const CLOSE: f64 = 0.10;

/// Verdict on a figure that a constant was found from.
const FITTED: &str = "fitted: a constant was found from it";

/// A file of `claims/`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Paper {
    /// Reasons that figures miss, by the names that `misses` has; the name `""` says that no reason is known.
    #[serde(default)]
    reasons: BTreeMap<String, String>,
    /// Notes on claims, by the names that `note` has.
    #[serde(default)]
    notes: BTreeMap<String, String>,
    figure: Vec<Figure>,
}

/// A figure, a table or a section of the paper, with its claims.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Figure {
    place: String,
    #[serde(default)]
    claims: Vec<Stated>,
    #[serde(default)]
    not_modelled: Vec<Absent>,
}

/// A figure that no simulation gives.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Absent {
    what: String,
    paper: String,
    why: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stated {
    /// The claim in words.
    what: String,
    paper: Printed,
    /// The computed quantity; by default it is named as the claim is.
    of: Option<String>,
    #[serde(default = "times")]
    unit: String,
    #[serde(default)]
    used: bool,
    /// Given where the run of the page is not within [`CLOSE`].
    misses: Option<String>,
    note: Option<String>,
}

fn times() -> String {
    "×".to_owned()
}

/// Computed quantities, by name: with the paper's policies, and with moec's if they differ.
#[derive(Clone, Debug, Default)]
pub struct Quantities(BTreeMap<String, (f64, Option<f64>)>);

impl Quantities {
    /// Adds one.
    pub fn put(&mut self, name: impl Into<String>, ours: f64) {
        self.0.insert(name.into(), (ours, None));
    }

    /// Adds one that moec's policies change.
    pub fn both(&mut self, name: impl Into<String>, [ours, moec]: [f64; 2]) {
        self.0.insert(name.into(), (ours, Some(moec)));
    }
}

/// A figure of the paper and ours.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// Place in the paper.
    pub place: String,
    /// Description.
    pub what: String,
    /// Its unit.
    pub unit: String,
    /// Printed value.
    pub paper: Printed,
    /// Name of the quantity.
    pub of: String,
    /// With the paper's policies.
    pub ours: f64,
    /// With moec's, if they differ.
    pub moec: Option<f64>,
    /// A constant was found from it: it checks nothing.
    pub used: bool,
    /// Reason of a miss; empty if unknown, `None` if no miss is expected.
    pub misses: Option<String>,
    /// Note.
    pub note: Option<String>,
}

impl Claim {
    /// Whether our figure with the paper's policies is close to the paper's.
    pub fn agrees(&self) -> bool {
        self.paper.error(self.ours).abs() <= CLOSE
    }

    /// Whether our figure with moec's policies is close to the paper's.
    pub fn agrees_with_moec(&self) -> bool {
        self.moec.is_some_and(|m| self.paper.error(m).abs() <= CLOSE)
    }

    /// One line.
    pub fn verdict(&self) -> String {
        if self.used {
            return FITTED.to_owned();
        }
        if self.agrees() {
            return "agrees".to_owned();
        }
        let moec = if self.agrees_with_moec() { ", moec's agrees" } else { "" };
        let why =
            self.misses.as_deref().filter(|w| !w.is_empty()).map_or_else(String::new, |w| format!(": {w}"));
        format!("{:+.0} %{moec}{why}", self.paper.error(self.ours) * 100.0)
    }
}

/// A figure of the paper that no simulation gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotModelled {
    /// Place in the paper.
    pub place: String,
    /// Description.
    pub what: String,
    /// Printed value, with its unit.
    pub paper: String,
    /// Reason.
    pub why: String,
}

/// The claims of a paper.
#[derive(Clone, Debug, PartialEq)]
pub struct Claims {
    /// Those with a figure of ours.
    pub compared: Vec<Claim>,
    /// Those without one.
    pub not_modelled: Vec<NotModelled>,
}

impl Claims {
    /// Compares computed quantities with a file of `claims/`.
    ///
    /// # Errors
    /// Our bug: a file that does not parse, or that names a quantity or a reason that does not exist.
    pub fn new(file: &str, computed: &Quantities) -> Result<Self> {
        let all = Self::of_computed(file, computed)?;
        let missing = printed(file)?.into_keys().find(|of| !computed.0.contains_key(of));
        missing.map_or(Ok(all), |of| Err(Error::bug(format!("a claim names the quantity `{of}`"))))
    }

    /// The same for only those claims whose quantities were computed.
    ///
    /// # Errors
    /// Our bug: a file that does not parse, or that names a reason that does not exist.
    pub fn of_computed(file: &str, computed: &Quantities) -> Result<Self> {
        let paper = read(file)?;
        let (mut all, mut not_modelled) = (Vec::new(), Vec::new());
        for figure in paper.figure {
            not_modelled.extend(figure.not_modelled.into_iter().map(|a| NotModelled {
                place: figure.place.clone(),
                what: a.what,
                paper: a.paper,
                why: a.why,
            }));
            for s in figure.claims {
                let of = s.of.unwrap_or_else(|| s.what.clone());
                let Some(&(ours, moec)) = computed.0.get(&of) else { continue };
                let misses = s.misses.map(|name| named(&paper.reasons, &name)).transpose()?;
                let note = s.note.map(|name| named(&paper.notes, &name)).transpose()?;
                let (place, what, unit) = (figure.place.clone(), s.what, s.unit);
                all.push(Claim {
                    place,
                    what,
                    unit,
                    paper: s.paper,
                    of,
                    ours,
                    moec,
                    used: s.used,
                    misses,
                    note,
                });
            }
        }
        Ok(Self { compared: all, not_modelled })
    }

    /// Those that were not used to fit a constant.
    pub fn unfitted(&self) -> Vec<&Claim> {
        self.compared.iter().filter(|c| !c.used).collect()
    }

    /// A sentence with the numbers of figures that are no check.
    pub fn unchecked(&self) -> String {
        let used = self.compared.len() - self.unfitted().len();
        match self.not_modelled.len() {
            0 => format!("Not counted: {used} fitted."),
            n => format!("Not counted: {used} fitted, {n} not modelled."),
        }
    }

    /// The first claim about a quantity.
    pub fn find(&self, of: &str) -> Option<&Claim> {
        self.compared.iter().find(|c| c.of == of)
    }

    /// Printed value of a quantity; NaN, which shows, where the paper prints nothing.
    pub fn printed(&self, of: &str) -> f64 {
        self.find(of).map_or(f64::NAN, |c| c.paper.value())
    }

    /// All of them as a Markdown table, those that are not modelled last; `ours` heads the column of the simulation with the paper's policies.
    pub fn table(&self, ours: &str) -> String {
        let with_moec = self.compared.iter().any(|c| c.moec.is_some());
        let [head, line] = if with_moec { [" moec |", "---|"] } else { [""; 2] };
        let mut out = format!(
            "## Every figure beside ours\n\n| where | what | the paper's | {ours} |{head} |\n|---|---|---|---|{line}---|\n"
        );
        for c in &self.compared {
            let _ = write!(out, "| {} | {} | {} {} | {} |", c.place, c.what, c.paper, c.unit, digits(c.ours));
            if with_moec {
                let _ = write!(out, " {} |", c.moec.map_or_else(String::new, digits));
            }
            let _ = writeln!(out, " {} |", c.verdict());
        }
        let empty = if with_moec { "  |" } else { "" };
        for n in &self.not_modelled {
            let NotModelled { place, what, paper, why } = n;
            let _ = writeln!(out, "| {place} | {what} | {paper} | not modelled |{empty} {why} |");
        }
        out + "\n"
    }
}

/// Printed quantities of a file of `claims/`, by their names.
///
/// # Errors
/// Our bug: a file that does not parse.
pub fn printed(file: &str) -> Result<BTreeMap<String, Printed>> {
    let all = read(file)?.figure.into_iter().flat_map(|figure| figure.claims);
    Ok(all.map(|c| (c.of.unwrap_or(c.what), c.paper)).collect())
}

fn read(file: &str) -> Result<Paper> {
    toml::from_str(file).map_err(|e| Error::bug("a file of claims").because(e))
}

/// A text by its name; none has no name.
fn named(texts: &BTreeMap<String, String>, name: &str) -> Result<String> {
    let text = if name.is_empty() { Some(String::new()) } else { texts.get(name).cloned() };
    text.ok_or_else(|| Error::bug(format!("a claim names the text `{name}`")))
}

/// Three digits that count, and no more than three after the point.
pub fn digits(x: f64) -> String {
    match x.abs() {
        a if a >= 99.95 => format!("{x:.0}"),
        a if a >= 9.995 => format!("{x:.1}"),
        a if a >= 1.0 => format!("{x:.2}"),
        _ => format!("{x:.3}"),
    }
}

/// Every claim has its row on a page, and every plot is a drawing that is linked there and is in `docs/`.
#[cfg(test)]
pub(crate) fn check_page(folder: &str, page: &str, claims: &Claims, plots: &[(&str, String)]) {
    for c in &claims.compared {
        let row = format!("| {} | {} | {} {} |", c.place, c.what, c.paper, c.unit);
        assert!(page.contains(&row) && c.ours.is_finite(), "{c:?}");
    }
    for n in &claims.not_modelled {
        assert!(page.contains(&format!("| {} | {} | {} |", n.place, n.what, n.paper)), "{n:?}");
    }
    let docs = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs"));
    for (name, text) in plots {
        let file = format!("{folder}/{name}");
        assert!(page.contains(&format!("({file})")) && docs.join(&file).is_file(), "{file}");
        assert!(text.starts_with("<svg") && text.ends_with("</svg>\n") && !text.contains("NaN"), "{file}");
    }
    assert!(!page.contains("NaN") && !page.contains("inf "), "{page}");
}

#[cfg(test)]
mod tests {
    use super::{FITTED, digits, named, read};

    /// Each claim of a full run's page is as in the file: it agrees, or it misses with a reason.
    #[test]
    fn every_claim_holds_or_misses_as_recorded() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/claims");
        let mut papers = 0;
        for file in std::fs::read_dir(folder).expect("the folder") {
            let file = file.expect("an entry").path();
            let page = std::path::Path::new(folder)
                .join("../../docs")
                .join(file.with_extension("md").file_name().expect("a name"));
            let [text, page] = [&file, &page].map(|path| std::fs::read_to_string(path).expect("a file"));
            let paper = read(&text).expect("claims");
            for figure in &paper.figure {
                for a in &figure.not_modelled {
                    let prefix = format!("| {} | {} | {} |", figure.place, a.what, a.paper);
                    let why = format!(" {} |", a.why);
                    let is_there = page.lines().any(|row| row.starts_with(&prefix) && row.ends_with(&why));
                    assert!(is_there, "{prefix}");
                }
                for c in &figure.claims {
                    let prefix = format!("| {} | {} | {}", figure.place, c.what, c.paper);
                    let row = page.lines().find(|line| line.starts_with(&prefix)).expect(&prefix);
                    let cells: Vec<&str> = row.trim_end_matches(" |").rsplit(" | ").collect();
                    // NPUMoE's page has ours over the paper's, rounded, in place of a verdict.
                    let times = cells[0].parse::<f64>().ok();
                    let agrees = match (times, &c.misses) {
                        (Some(_), misses) if c.used => misses.is_none(),
                        (Some(times), None) => (0.895..=1.105).contains(&times),
                        (Some(times), Some(_)) => (times - 1.0).abs() > 0.095,
                        (None, misses) if c.used => cells[0] == FITTED && misses.is_none(),
                        (None, None) => cells[0] == "agrees",
                        (None, Some(name)) => {
                            let why = named(&paper.reasons, name).expect(name);
                            cells[0].contains(" %") && cells[0].ends_with(&why)
                        }
                    };
                    assert!(agrees, "{row}");
                }
            }
            let is_named = |name: &String| {
                paper.figure.iter().flat_map(|f| &f.claims).any(|c| c.misses.as_ref() == Some(name))
            };
            assert!(paper.reasons.keys().all(is_named), "{}: a reason that no claim names", file.display());
            papers += 1;
        }
        assert_eq!(papers, 5);
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!(
            [0.0471, 1.0, 23.456, 1234.5, 9.996].map(digits),
            ["0.047", "1.00", "23.5", "1234", "10.0"]
        );
    }
}
