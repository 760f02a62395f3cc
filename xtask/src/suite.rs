//! `cargo xtask test`: everything that must hold before a change goes in.

mod programs;
mod report;
mod run;
mod tables;
mod usage;

pub(crate) use programs::files;

use crate::llvm::Llvm;
use crate::shell::{self, Failed, cargo, output, program, shown, stage};
use crate::{apple, cross, prebuilt, setup, tools, words};
use moec_testing::REQUIRE;
use report::Stages;
use std::process::Command;
use std::time::Instant;
use usage::Usage;

/// Options, and what they do.
const OPTIONS: [(&str, &str); 4] = [
    (
        "NAME…",
        "tests with such a part in their name, or all of a program: `golden`, `moec-ir`, `moec-runtime/disk`",
    ),
    ("--all", "run the slow tests, too, which are left out otherwise and named at the end"),
    ("--fast", "check that everything compiles, and run a test or some of every stage"),
    ("--jobs", "N: how many programs run side by side [default: one for each core, while memory is free]"),
];

/// Selection of tests.
#[derive(Debug, Default, PartialEq, Eq)]
struct Selection {
    /// Names of programs and parts of tests' names; empty: all.
    names: Vec<String>,
    fast: bool,
    all: bool,
    workers: Option<usize>,
}

impl Selection {
    fn read(words: &[String]) -> Result<Self, Failed> {
        let mut selection = Self::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--fast" => selection.fast = true,
                "--all" => selection.all = true,
                "--jobs" => {
                    let n = words.next().and_then(|n| n.parse().ok()).filter(|n| *n > 0);
                    selection.workers = Some(n.ok_or_else(|| Failed::new("`--jobs` needs a number"))?);
                }
                option if option.starts_with('-') => {
                    return Err(Failed::new(format!("there is no option `{option}`"))
                        .hint("`cargo xtask test --help` lists them"));
                }
                name => selection.names.push(name.to_owned()),
            }
        }
        Ok(selection)
    }

    /// Names that programs may have; empty: all.
    fn programs(&self) -> Vec<&str> {
        let fast = tables::FAST.iter().filter(|_| self.fast && self.names.is_empty()).map(|(name, ..)| *name);
        self.names.iter().map(String::as_str).chain(fast).collect()
    }

    /// True if all tests of a program are selected.
    fn takes_all(&self, program: &str) -> bool {
        let fast = || tables::FAST.iter().any(|(p, tests, _)| *p == program && tests.is_empty());
        (self.names.is_empty() || self.names.iter().any(|n| n == program)) && (!self.fast || fast())
    }

    /// True if one of its tests is. `parts` are the names that are not a program's.
    fn takes(&self, program: &str, test: &str, parts: &[&str]) -> bool {
        let fast =
            |(p, tests, _): &(&str, &[&str], _)| *p == program && tests.iter().any(|t| test.contains(t));
        let named = self.names.is_empty() || self.names.iter().any(|n| n == program);
        let selected = named || parts.iter().any(|part| test.contains(part));
        self.takes_all(program) || selected && (!self.fast || tables::FAST.iter().any(fast))
    }
}

/// Formatting, lints, a check for macOS, documentation, tests, in this order: the quickest first. With names,
/// only those tests.
pub(crate) fn run(words: &[String]) -> Result<(), Failed> {
    if words.iter().any(|w| w == "--help" || w == "-h") {
        println!("Usage: cargo xtask test [OPTIONS] [NAME…]\n");
        for (name, what) in OPTIONS {
            println!("  {name:<7} {what}");
        }
        return Ok(());
    }
    let selection = Selection::read(words)?;
    let required = std::env::var(REQUIRE).unwrap_or_default();
    moec_testing::check(&required).map_err(|name| {
        let names: Vec<_> = moec_testing::NEEDS.iter().map(|n| n.name).collect();
        Failed::new(format!("{REQUIRE} names `{name}`")).hint(format!("the names are {}", names.join(", ")))
    })?;
    let start = Instant::now();
    let (usage, mut stages) = (Usage::start(), Stages::default());
    let llvm = stages.timed("setup", setup::run)?;
    let mut skipped = Vec::new();
    stages.timed("what moec embeds", || prebuilt::share("dev", &llvm))?;
    if selection.names.is_empty() {
        stages.timed("words", words::check)?;
    }
    if selection.fast {
        let mut check = cargo("check", Some(&llvm));
        check.args(["--workspace", "--all-targets", "--locked"]);
        stages.timed("check", || step(&mut check))?;
    } else if selection.names.is_empty() {
        // Tools are fetched while cores check: no check needs any.
        skipped.extend(std::thread::scope(|scope| {
            let tools = scope.spawn(|| cross::run().into_iter().chain(tools::run()).collect::<Vec<_>>());
            let mut skipped = checks(&llvm, &mut stages)?;
            let missing = stages.timed("waiting for tools", || tools.join());
            skipped.extend(missing.map_err(|_| Failed::new("what installs tools panicked"))?);
            Ok::<_, Failed>(skipped)
        })?);
    }
    let programs = stages.timed("build", || programs::build(&llvm, &selection))?;
    let (jobs, mut left_out) = programs::jobs(&programs, &selection)?;
    let every = selection.all || !selection.names.is_empty();
    if !every {
        left_out.extend(tables::PARTIAL.iter().map(|(program, what)| format!("{what} of {program}")));
    }
    if selection.names.is_empty() && !selection.fast {
        // Examples in documentation, which have no program that could be started.
        let mut examples = cargo("test", Some(&llvm));
        examples.args(["--workspace", "--locked", "--doc", "--quiet"]);
        stages.timed("examples in documentation", || step(&mut examples))?;
    }
    let workers = selection.workers.unwrap_or_else(run::workers);
    stage("Testing", &format!("{} jobs, {workers} side by side", jobs.len()));
    let outcomes = stages.timed("tests", || run::all(jobs, workers, every))?;
    let missed = std::fs::read_to_string(run::skips()).unwrap_or_default();
    print!("{}", stages.table(&usage.stop()));
    let (text, good) = report::closing(&outcomes, &missed);
    for what in skipped {
        stage("Skipped", &what);
    }
    let left_out = if left_out.is_empty() {
        "nothing left out".to_owned()
    } else {
        format!("left out (`--all` runs them): {}", left_out.join(", "))
    };
    println!("{text}; {left_out}; everything in {:.0}s", start.elapsed().as_secs_f64());
    if good { Ok(()) } else { Err(Failed::new("tests failed")) }
}

/// Runs the checks that need no test. Gives those that could not run.
fn checks(llvm: &Llvm, stages: &mut Stages) -> Result<Vec<String>, Failed> {
    let mut skipped = Vec::new();
    if has("fmt") {
        stages.timed("formatting", formatting)?;
    } else {
        skipped.push("formatting (rustup component add rustfmt)".into());
    }
    if has("clippy") {
        let mut clippy = cargo("clippy", Some(llvm));
        clippy.args(["--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]);
        stages.timed("lints", || step(&mut clippy))?;
    } else {
        skipped.push("lints (rustup component add clippy)".into());
    }
    skipped.extend(stages.timed("check for macOS", apple::check_if_quick)?);
    let mut doc = cargo("doc", Some(llvm));
    doc.args(["--workspace", "--no-deps", "--locked"]).env("RUSTDOCFLAGS", "-D warnings");
    stages.timed("documentation", || step(&mut doc))?;
    Ok(skipped)
}

/// `cargo fmt --check`.
pub(crate) fn formatting() -> Result<(), Failed> {
    step(cargo("fmt", None).args(["--all", "--check"])).map_err(|f| f.hint("`cargo fmt` does it"))
}

/// Whether cargo has a component.
fn has(component: &str) -> bool {
    output(program(format!("cargo-{component}")).arg("--version")).is_some()
        || output(cargo(component, None).arg("--version")).is_some()
}

fn step(command: &mut Command) -> Result<(), Failed> {
    stage("Running", &shown(command));
    shell::run(command)
}

#[cfg(test)]
mod tests {
    use super::Selection;

    fn read(words: &[&str]) -> Selection {
        Selection::read(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn filters_match_programs_or_parts_of_test_names() {
        let golden = read(&["golden", "a_full"]);
        assert!(golden.takes_all("golden") && golden.takes("golden", "any", &["a_full"]));
        assert!(!golden.takes_all("bad_input") && golden.takes("bad_input", "a_full_disk", &["a_full"]));
        assert!(!golden.takes("bad_input", "golden_weeks", &["a_full"]));
        let all = read(&[]);
        assert!(all.takes_all("golden") && all.takes("golden", "any", &[]));
        let fast = read(&["--fast"]);
        assert!(
            fast.takes_all("moec-ir")
                && !fast.takes_all("golden")
                && !fast.takes("fault_injection", "any", &[])
        );
        assert!(fast.takes("golden", "the_demo_model_in_its_own_format", &[]));
    }

    #[test]
    fn options_are_known() {
        assert_eq!(read(&["--jobs", "3"]).workers, Some(3));
        for wrong in [&["--jobs"][..], &["--jobs", "0"], &["--quick"]] {
            assert!(Selection::read(&wrong.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>()).is_err());
        }
    }
}
