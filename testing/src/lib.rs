//! Needs of tests on a machine, and reports that one is missing.
//!
//! A test that cannot run here has not passed. It checks a [`Need`] first, and returns if that is not met:
//!
//! ```no_run
//! # fn test() {
//! if !moec_testing::STRACE.met_or_skip() {
//!     return;
//! }
//! # }
//! ```
//!
//! A skipped test is a line of the file that `MOEC_SKIPPED` names, which `cargo xtask test` sums up, or
//! otherwise a line on stderr. Needs that `MOEC_REQUIRE` lists (`coreml,aarch64`) fail the test instead.
//!
//! Tests of servers start them as [`server::Server`]s and query them by [`http`].

pub mod checkpoints;
pub mod http;
mod needs;
pub mod server;

pub use needs::*;

use std::fmt::Display;
use std::io::Write as _;
use std::path::Path;

/// The variable with the names of required needs, separated by commas.
pub const REQUIRE: &str = "MOEC_REQUIRE";
/// The variable with the path of the file that gets a line for everything that was skipped.
pub const SKIPPED: &str = "MOEC_SKIPPED";

/// The variable for tests of every combination, in place of a part that covers each pair.
pub const ALL: &str = "MOEC_ALL";

/// True if tests try every combination: `cargo xtask test` sets it for `--all` and for named tests.
pub fn all() -> bool {
    std::env::var_os(ALL).is_some_and(|value| !value.is_empty())
}

/// Every `n`-th row of a table in a plain run, all rows where [`all`] is set.
pub fn every_nth<T>(n: usize, table: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    table.into_iter().step_by(if all() { 1 } else { n })
}

/// Something that was skipped: a line of the file, fields between tabs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Skip {
    /// Name of the need.
    pub need: String,
    /// Test program and test.
    pub test: String,
    /// Reason that it is missing, if known; else empty.
    pub why: String,
}

impl Need {
    /// The need of that name.
    pub fn find(name: &str) -> Option<&'static Self> {
        NEEDS.into_iter().find(|n| n.name == name)
    }

    /// Whether it is here; says nothing.
    pub fn is_met(&self) -> bool {
        (self.find)()
    }

    /// Whether it is here. If not, the test is reported as skipped, or in part.
    ///
    /// # Panics
    /// If it is missing and `MOEC_REQUIRE` names it.
    pub fn met_or_skip(&self) -> bool {
        let met = self.is_met();
        if !met {
            self.missed("");
        }
        met
    }

    /// The same for a condition of the test itself.
    pub fn holds_or_skip(&self, met: bool) -> bool {
        if !met {
            self.missed("");
        }
        met
    }

    /// The same for a need that is found by trying it.
    pub fn ok_or_skip<T>(&self, tried: Result<T, impl Display>) -> Option<T> {
        tried.map_err(|why| self.missed(&why.to_string())).ok()
    }

    fn missed(&self, why: &str) {
        let required = std::env::var(REQUIRE).unwrap_or_default();
        let test = test();
        let line = self.line(&test, why);
        assert!(
            !required.split(',').any(|n| n.trim() == self.name),
            "{line}\n{REQUIRE} names `{}`",
            self.name
        );
        let skip = Skip { need: self.name.into(), test, why: why.replace(['\t', '\n'], " ") };
        let file = std::env::var_os(SKIPPED).filter(|path| !path.is_empty());
        let Some(file) =
            file.and_then(|path| std::fs::File::options().append(true).create(true).open(path).ok())
        else {
            // Not by `eprintln`, which the harness captures if a test passes.
            let _ = writeln!(std::io::stderr(), "{line}");
            return;
        };
        // One write, so that lines of several processes do not mix.
        let _ = (&file).write_all(format!("{skip}\n").as_bytes());
    }

    /// Report of a test.
    fn line(&self, test: &str, why: &str) -> String {
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        format!("skipped: {test}: needs {} ({}){why}", self.what, self.help)
    }
}

/// Whether `names`, as in `MOEC_REQUIRE`, are names of needs.
///
/// # Errors
/// The first that is invalid.
pub fn check(names: &str) -> Result<(), String> {
    let unknown = names.split(',').map(str::trim).find(|n| !n.is_empty() && Need::find(n).is_none());
    unknown.map_or(Ok(()), |name| Err(name.to_owned()))
}

impl Display for Skip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\t{}\t{}", self.need, self.test, self.why)
    }
}

impl std::str::FromStr for Skip {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let mut fields = line.splitn(3, '\t').map(str::to_owned);
        let mut next = || fields.next().ok_or(());
        Ok(Self { need: next()?, test: next()?, why: next()? })
    }
}

/// Program and name of the test that this thread runs: the harness gives every test a thread of its name.
fn test() -> String {
    let program = std::env::args_os().next().unwrap_or_default();
    let program = Path::new(&program).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    // Cargo puts a hash after the name.
    let program = program.rsplit_once('-').map_or(program.as_str(), |(name, _)| name);
    let thread = std::thread::current();
    format!("{program} {}", thread.name().unwrap_or("(a thread of a test)"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_checked() {
        assert_eq!(NEEDS.map(|n| n.name).iter().collect::<BTreeSet<_>>().len(), NEEDS.len());
        assert_eq!(check("coreml, aarch64"), Ok(()));
        assert_eq!(check(""), Ok(()));
        assert_eq!(check("coreml,qemo"), Err("qemo".to_owned()));
    }

    #[test]
    fn a_test_is_named_by_its_thread() {
        assert_eq!(test(), "moec_testing tests::a_test_is_named_by_its_thread");
    }

    #[test]
    fn lines_are_read_as_they_were_written() {
        let skip = Skip { need: "mount".into(), test: "bad_input a_full_disk".into(), why: String::new() };
        assert_eq!(skip.to_string().parse(), Ok(skip));
        assert_eq!("mount\tx".parse::<Skip>(), Err(()));
    }

    #[test]
    fn skipped_test_names_the_missing_tool() {
        assert_eq!(
            STRACE.line("replace every", "not permitted"),
            "skipped: replace every: needs strace, and leave to trace (apt-get install strace): not permitted"
        );
    }
}
