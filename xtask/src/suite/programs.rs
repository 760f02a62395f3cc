//! The test programs that cargo builds, and the tests in them.

use super::Selection;
use super::tables::{ALONE, ONE_BY_ONE, SLOW};
use crate::llvm::Llvm;
use crate::prebuilt;
use crate::shell::{Failed, cargo, output, root, shown, stage};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The program of all tests from end to end, a module for each file of `tests/`.
const END_TO_END: &str = "end_to_end";
/// Name of the unit tests of a binary whose library also has unit tests.
const MAIN: &str = "main";

/// A program that cargo has built of tests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Program {
    /// Package.
    pub(super) package: String,
    /// `golden` of `tests/golden.rs`; [`MAIN`] for the unit tests of a binary with a library, else empty.
    pub(super) test: String,
    /// Folder of the package, where tests run.
    folder: PathBuf,
    executable: PathBuf,
}

/// Job of a worker: a program, or a test of it.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) program: Program,
    /// The only test; `None`: all of them.
    pub(super) only: Option<String>,
    /// True if it must run alone.
    pub(super) alone: bool,
}

impl Program {
    /// Name for people: `golden`, `moec-ir`, `moec-runtime/disk`.
    pub(super) fn name(&self) -> String {
        match (&*self.package, &*self.test) {
            ("moec", test) if !test.is_empty() && test != MAIN => test.to_owned(),
            (package, "") => package.to_owned(),
            (package, test) => format!("{package}/{test}"),
        }
    }

    /// The program in the environment that cargo gives it.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command.current_dir(&self.folder).stdin(Stdio::null());
        command.env("CARGO", std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.env("CARGO_MANIFEST_DIR", &self.folder).env("CARGO_PKG_NAME", &self.package);
        command.envs(prebuilt::environment());
        if let Some(folder) = lld() {
            command.env("COMPILER_PATH", folder);
        }
        command
    }

    /// Name for people of a group of its tests: a module of the end-to-end program counts as a program.
    fn group(&self, test: &str) -> String {
        match test.split_once("::") {
            Some((module, _)) if self.test == END_TO_END => module.to_owned(),
            _ => self.name(),
        }
    }

    /// Names of its tests, those that are ignored among them.
    fn tests(&self) -> Result<Vec<String>, Failed> {
        let listing = output(self.command().args(["--list", "--format", "terse"]))
            .ok_or_else(|| Failed::new(format!("`{}` does not list its tests", self.executable.display())))?;
        Ok(listing.lines().filter_map(|l| Some(l.strip_suffix(": test")?.to_owned())).collect())
    }

    /// True if its tests are started one by one, because they are slow. Those of the libraries end sooner
    /// than a program starts.
    fn is_split(&self) -> bool {
        self.test == END_TO_END || ONE_BY_ONE.iter().any(|(name, _)| *name == self.name())
    }
}

/// Folder of the linker that rustc carries. C compilers that look there link `run` of the tests' bundles, of
/// which there are hundreds, in a fifth of the time.
fn lld() -> Option<&'static PathBuf> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let find = || {
        let libraries = output(Command::new("rustc").args(["--print", "target-libdir"]))?;
        Some(Path::new(libraries.trim()).with_file_name("bin").join("gcc-ld")).filter(|f| f.is_dir())
    };
    FOLDER.get_or_init(find).as_ref()
}

impl Job {
    /// Program or module, and the test: `moec-ir`, `golden a_full_disk`.
    pub(super) fn name(&self) -> String {
        let (program, test) = (self.program(), self.test());
        if test.is_empty() { program } else { format!("{program} {test}") }
    }

    /// Its test without the module that counts as a program; empty for all tests.
    fn test(&self) -> &str {
        let test = self.only.as_deref().unwrap_or_default();
        let module = self.program();
        test.strip_prefix(&*module).and_then(|t| t.strip_prefix("::")).unwrap_or(test)
    }

    /// Whether a row of a table is about it: program, test (empty: all of its tests), why.
    fn is_in(&self, (program, test, _): &(&str, &str, &str)) -> bool {
        self.program() == *program && (test.is_empty() || self.test() == *test)
    }

    /// Its program, or its module of the end-to-end program.
    pub(super) fn program(&self) -> String {
        self.only.as_ref().map_or_else(|| self.program.name(), |test| self.program.group(test))
    }

    /// The command of a worker, with one thread for tests: the workers are what runs side by side.
    pub(super) fn command(&self) -> Command {
        let mut command = self.program.command();
        match &self.only {
            Some(test) => command.args(["--exact", test]),
            // Alone it may use all there is.
            None if self.alone => &mut command,
            None => command.arg("--test-threads=1"),
        };
        command
    }

    /// Command that repeats it.
    pub(super) fn again(&self, test: &str, ignored: bool) -> String {
        let Program { package, test: program, .. } = &self.program;
        let which = match program.as_str() {
            "" => String::new(),
            MAIN => " --bins".to_owned(),
            program => format!(" --test {program}"),
        };
        let ignored = if ignored { "--ignored " } else { "" };
        format!("cargo test -p {package}{which} -- {ignored}--exact {test}")
    }
}

/// Builds the tests that may be selected, and returns the programs.
pub(super) fn build(llvm: &Llvm, selection: &Selection) -> Result<Vec<Program>, Failed> {
    let mut command = cargo("test", Some(llvm));
    command.args(["--workspace", "--locked", "--no-run", "--message-format=json-render-diagnostics"]);
    command.args(targets(&selection.programs()));
    stage("Running", &shown(&command));
    let failed = |e: std::io::Error| Failed::new(format!("cargo does not start: {e}"));
    let done = command.stderr(Stdio::inherit()).output().map_err(failed)?;
    if !done.status.success() {
        return Err(Failed::new("the tests do not compile"));
    }
    let stdout = String::from_utf8_lossy(&done.stdout);
    let mut programs: Vec<Program> = stdout.lines().filter_map(program).collect();
    programs.sort_by_key(Program::name);
    Ok(programs)
}

/// Builds the test programs of these names with the tests' options; returns the file of each.
pub(crate) fn files(llvm: &Llvm, names: &[&str]) -> Result<Vec<PathBuf>, Failed> {
    let selection =
        Selection { names: names.iter().map(|&name| name.to_owned()).collect(), ..Selection::default() };
    let programs = build(llvm, &selection)?;
    let file = |name: &&str| {
        let found = programs.iter().find(|program| program.name() == **name);
        found
            .map(|program| program.executable.clone())
            .ok_or_else(|| Failed::new(format!("cargo builds no test program `{name}`")))
    };
    names.iter().map(file).collect()
}

/// Cargo's arguments for the programs with these names; none, which means all, if a name may be a test's.
fn targets(names: &[&str]) -> Vec<String> {
    let (mut tests, mut units) = (BTreeSet::new(), false);
    for name in names {
        let is_test = |folder: &str| {
            let path = root().join(folder).join(name);
            path.is_dir() || path.with_added_extension("rs").is_file()
        };
        match name.split_once('/') {
            Some((_, test)) => _ = tests.insert(test),
            None if is_test("tests") => _ = tests.insert(END_TO_END),
            None if is_test("compiler/cli/tests") => _ = tests.insert(name),
            None if *name == "xtask" || name.starts_with("moec") => units = true,
            None => return Vec::new(),
        }
    }
    // For all packages, so that their features stay the same; targets with their own `main` have no unit
    // tests.
    let units = if units { &["--exclude", "moec-prebuilt", "--lib", "--bins"][..] } else { &[] };
    let tests = tests.into_iter().flat_map(|test| ["--test", test]);
    units.iter().copied().chain(tests).map(str::to_owned).collect()
}

/// The program in one of cargo's messages.
fn program(message: &str) -> Option<Program> {
    let executable = string(message, "executable")?;
    let (_, profile) = message.split_once("\"profile\":{")?;
    if !profile.split('}').next()?.contains("\"test\":true") {
        return None;
    }
    let (_, target) = message.split_once("\"target\":{")?;
    let (folder, id) = (string(message, "manifest_path")?, string(message, "package_id")?);
    let folder = Path::new(&folder).parent()?.to_owned();
    // `path+file:///…/compiler#moec@0.1.0`, and without the name where the folder has it.
    let (path, version) = id.split_once('#')?;
    let package = version.split_once('@').map_or_else(|| path.rsplit('/').next(), |(name, _)| Some(name))?;
    let is = |kind: &str| target.starts_with(&format!("\"kind\":[\"{kind}\"]"));
    let test = if is("test") {
        string(target, "name")?
    } else if is("bin") && folder.join("src/lib.rs").is_file() {
        MAIN.to_owned()
    } else {
        String::new()
    };
    Some(Program { package: package.to_owned(), test, folder, executable: executable.into() })
}

/// The first string of a key in JSON of cargo's, which puts no space after the colon.
fn string(json: &str, key: &str) -> Option<String> {
    let (_, rest) = json.split_once(&format!("\"{key}\":\""))?;
    let mut chars = rest.chars();
    let mut value = String::new();
    loop {
        match chars.next()? {
            '"' => return Some(value),
            // Paths have no other escapes.
            '\\' => value.push(chars.next()?),
            c => value.push(c),
        }
    }
}

/// The requested jobs, and the names of those that only `--all` runs.
pub(super) fn jobs(programs: &[Program], selection: &Selection) -> Result<(Vec<Job>, Vec<String>), Failed> {
    let (mut jobs, mut groups) = (Vec::new(), BTreeSet::new());
    for program in programs {
        let all = |only: Option<String>| Job { program: program.clone(), only, alone: false };
        let found: Vec<Job> = if program.is_split() || !selection.takes_all(&program.name()) {
            program.tests()?.into_iter().map(|test| all(Some(test))).collect()
        } else {
            vec![all(None)]
        };
        groups.extend(found.iter().map(Job::program));
        jobs.extend(found);
    }
    let parts: Vec<&str> = selection.names.iter().map(|n| &**n).filter(|n| !groups.contains(*n)).collect();
    jobs.retain(|job| job.only.is_none() || selection.takes(&job.program(), job.test(), &parts));
    if jobs.is_empty() {
        let names: Vec<_> = groups.into_iter().collect();
        return Err(Failed::new("no test has such a name")
            .hint(format!("a name is a part of a test's, or a program's: {}", names.join(", "))));
    }
    for job in &mut jobs {
        job.alone = ALONE.iter().any(|row| job.is_in(row));
    }
    // Tests that are named are run in any case.
    let left_out = |job: &Job| !selection.all && parts.is_empty() && SLOW.iter().any(|row| job.is_in(row));
    let (left_out, jobs): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(left_out);
    Ok((jobs, left_out.iter().map(Job::name).collect()))
}

/// A name as the name of a file of a report.
pub(super) fn file_name(name: &str) -> String {
    name.replace(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '-', ".")
}

/// Folder of reports.
pub(super) fn reports() -> PathBuf {
    let target = crate::shell::target_dir();
    (if target.is_absolute() { target } else { root().join(target) }).join("tests")
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLDEN: &str = r#"{"reason":"compiler-artifact","package_id":"path+file:///w/compiler/cli#moec@0.1.0","manifest_path":"/w/compiler/cli/Cargo.toml","target":{"kind":["test"],"crate_types":["bin"],"name":"end_to_end","src_path":"/w/compiler/cli/../../tests/end_to_end.rs"},"profile":{"opt_level":"1","test":true},"executable":"/w/target/debug/deps/end_to_end-a7"}"#;

    #[test]
    fn programs_are_parsed_from_cargo_messages() {
        let golden = program(GOLDEN).unwrap();
        assert_eq!((golden.group("golden::a_full_disk").as_str(), golden.is_split()), ("golden", true));
        assert_eq!(golden.folder, Path::new("/w/compiler/cli"));
        let library = GOLDEN
            .replace("[\"test\"]", "[\"lib\"]")
            .replace("/../../tests", "/src")
            .replace("compiler/cli#moec@", "xtask#");
        let library = program(&library).unwrap();
        assert_eq!((library.name().as_str(), library.is_split()), ("xtask", false));
        // A binary, a library without an executable, and other output.
        assert_eq!(program(&GOLDEN.replace("\"test\":true", "\"test\":false")), None);
        assert_eq!(program(&GOLDEN.replace("\"/w/target/debug/deps/end_to_end-a7\"", "null")), None);
        assert_eq!(program("{\"reason\":\"build-finished\",\"success\":true}"), None);
    }

    #[test]
    fn only_requested_programs_are_built() {
        let tests = ["--test", "cli", "--test", "end_to_end", "--test", "it"];
        assert_eq!(targets(&["golden", "moec-ir/it", "cli", "moec-runtime/cli"]), tests);
        assert_eq!(targets(&["moec-ir", "xtask"]), ["--exclude", "moec-prebuilt", "--lib", "--bins"]);
        assert_eq!(targets(&["golden", "a_full_disk"]), [] as [&str; 0]);
    }

    #[test]
    fn rerun_command_names_the_program() {
        let job = Job { program: program(GOLDEN).unwrap(), only: Some("golden::a".into()), alone: false };
        let again = "cargo test -p moec --test end_to_end -- --exact golden::a";
        assert_eq!(job.again("golden::a", false), again);
        assert_eq!(file_name(&job.name()), "golden.a");
        assert!(job.is_in(&("golden", "a", "")) && job.is_in(&("golden", "", "")));
        assert!(!job.is_in(&("golden", "b", "")) && !job.is_in(&("hub", "a", "")));
    }
}
