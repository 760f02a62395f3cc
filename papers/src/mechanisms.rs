//! The mechanisms of the five papers that moec unites, as a page of the documentation. `mechanisms.toml` has
//! the code, the tests and the state of each.

use moec_base::{Error, Result};
use serde::Deserialize;
use std::fmt::{self, Write as _};

/// The extent to which moec has a mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MechanismState {
    /// A bundle does it.
    Executed,
    /// A simulation alone has it.
    Simulated,
    /// moec does it in another way.
    Different,
    /// moec does not have it.
    Missing,
}

impl MechanismState {
    /// All, in the order of the page's columns.
    pub const ALL: [Self; 4] = [Self::Executed, Self::Simulated, Self::Different, Self::Missing];

    /// Its meaning in words.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Executed => {
                "A build or a run of a bundle does it, and a test that runs by default shows it. Where the paper's hardware is not at \
                 hand, the test emulates it: packages, networks, PTX and NDP command streams are executed on the host."
            }
            Self::Simulated => {
                "It is part of a simulation, a cost model or a study. No bundle does it, or only a model gives its time."
            }
            Self::Different => "moec does the same in another way, or only a part of it, given in the row.",
            Self::Missing => "moec does not have it; the row gives the alternative.",
        }
    }
}

impl fmt::Display for MechanismState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Executed => "executed",
            Self::Simulated => "simulated",
            Self::Different => "different",
            Self::Missing => "missing",
        })
    }
}

/// A mechanism of a paper.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mechanism {
    /// Section, equation or figure of the paper.
    pub section: String,
    /// The paper's mechanism.
    pub what: String,
    /// Its places in moec's code: `FILE` or `FILE#ITEM`, from the root of the tree on.
    #[serde(default)]
    pub code: Vec<String>,
    /// Tests that show it: `FILE::FUNCTION`.
    #[serde(default)]
    pub tests: Vec<String>,
    /// The extent to which moec has it.
    pub state: MechanismState,
    /// Difference of moec from the paper, or the missing part.
    pub why: Option<String>,
}

/// A paper with its mechanisms, in the order of its sections.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paper {
    /// Name of the system.
    pub name: String,
    /// Page of its evaluation, in `docs/`.
    pub page: String,
    /// Its mechanisms.
    pub mechanism: Vec<Mechanism>,
}

impl Paper {
    /// Number of mechanisms of a state.
    pub fn count(&self, state: MechanismState) -> usize {
        self.mechanism.iter().filter(|m| m.state == state).count()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    paper: Vec<Paper>,
}

/// Reads `mechanisms.toml`.
///
/// # Errors
/// Our bug: a file that does not parse.
pub fn papers() -> Result<Vec<Paper>> {
    let file: File = toml::from_str(include_str!("../mechanisms.toml"))
        .map_err(|e| Error::bug("the file of mechanisms").because(e))?;
    Ok(file.paper)
}

/// Writes `docs/mechanisms.md`.
///
/// # Errors
/// Those of [`papers`].
pub fn page() -> Result<String> {
    let papers = papers()?;
    let mut out = "# Mechanisms of the five papers\n\n\
         What each paper does, where moec has it, which test shows it, and how far moec is. The list is\n\
         [papers/mechanisms.toml](../papers/mechanisms.toml); `cargo xtask docs` writes this page of it, and `cargo xtask test moec-papers` checks\n\
         that every file, item and test is there. Results of the papers are on the pages of their evaluations.\n\n\
         | paper | mechanisms |"
        .to_owned();
    for state in MechanismState::ALL {
        let _ = write!(out, " {state} |");
    }
    out += "\n|---|---|---|---|---|---|\n";
    let mut row = |name: &str, of: &[Paper]| {
        let all: usize = of.iter().map(|p| p.mechanism.len()).sum();
        let _ = write!(out, "| {name} | {all} |");
        for state in MechanismState::ALL {
            let _ = write!(out, " {} |", of.iter().map(|p| p.count(state)).sum::<usize>());
        }
        out += "\n";
    };
    for paper in &papers {
        row(&format!("[{}](#{})", paper.name, paper.name.to_lowercase()), std::slice::from_ref(paper));
    }
    row("all", &papers);
    out += "\n| state | meaning |\n|---|---|\n";
    for state in MechanismState::ALL {
        let _ = writeln!(out, "| {state} | {} |", state.meaning());
    }
    for paper in &papers {
        let _ = write!(
            out,
            "\n## {}\n\nIts [evaluation]({}), simulated.\n\n| section | mechanism | state | how moec differs | code | tests |\n|---|---|---|---|---|---|\n",
            paper.name, paper.page
        );
        for m in &paper.mechanism {
            let why = m.why.as_deref().unwrap_or_default();
            let [code, tests] = [places(&m.code, "#"), places(&m.tests, "::")];
            let _ = writeln!(out, "| {} | {} | {} | {why} | {code} | {tests} |", m.section, m.what, m.state);
        }
    }
    Ok(out)
}

/// Links to files, each with its item.
fn places(all: &[String], between: &str) -> String {
    let place = |place: &String| {
        let (file, item) = place.split_once(between).unwrap_or((place, ""));
        // Enough of the path to distinguish files.
        let mut parts: Vec<&str> = file.split('/').filter(|part| *part != "src").collect();
        let most = if parts.iter().rev().nth(1) == Some(&"tests") { 3 } else { 2 };
        let shown = parts.split_off(parts.len().saturating_sub(most)).join("/");
        let link = format!("[{shown}](../{file})");
        if item.is_empty() { link } else { format!("{link} `{item}`") }
    };
    all.iter().map(place).collect::<Vec<_>>().join(", ")
}
