//! Ways in which a bundle gets its `run`: from the runtime that moec carries, with a C compiler alone, or by
//! cargo from the sources in the bundle; and what a build requires of the machine before it computes
//! anything.
#![cfg(target_os = "linux")]
#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::unnecessary_debug_formatting,
    reason = "a test fails by panicking"
)]

use crate::support;
use crate::support::pty;

use moec_testing::PREBUILT;
use pty::{left, on_terminal};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Setup, checkpoint, clean, fails, ferris, finish, moec, ok, tree};
use tempfile::TempDir;

/// A folder with a `model.toml`.
struct Case(TempDir);

impl Case {
    fn new() -> Self {
        let case = Self(tempfile::tempdir().unwrap());
        Setup { format: "bf16", chunk: 16, batch: &[1, 2], context: 64 }
            .write(&checkpoint("olmoe"), case.0.path());
        case
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `moec build` into the bundle of that name.
    fn build(&self, bundle: &str, more: &[&str]) -> Command {
        let mut command = moec();
        command.arg("build").arg(self.path("model.toml")).arg("-o").arg(self.path(bundle)).args(more);
        command
    }

    /// A folder for `PATH` that has these programs of this machine and no others.
    fn only(&self, programs: &[&str]) -> PathBuf {
        let folder = self.path("only");
        fs::create_dir(&folder).unwrap();
        let path = std::env::var_os("PATH").unwrap();
        for program in programs {
            let found = std::env::split_paths(&path).map(|p| p.join(program)).find(|p| p.is_file());
            std::os::unix::fs::symlink(found.expect(program), folder.join(program)).unwrap();
        }
        folder
    }

    /// A program of that name below the folder `bin`.
    fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path("bin").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }
}

/// Whether the moec under test carries a runtime (its feature `prebuilt`).
fn carries() -> bool {
    PREBUILT.by(moec_bundle::link::is_prebuilt())
}

fn stderr(command: &mut Command) -> String {
    String::from_utf8(ok(command).stderr).unwrap()
}

/// Logits and tokens of a program.
fn answers(run: &Path, folder: &Path) -> (Vec<u8>, Vec<u8>) {
    let out = folder.join("logits.safetensors");
    ok(clean(Command::new(run)).args(["logits", "--ids", "5,9,33,2,7", "--out"]).arg(&out));
    let tokens = ok(clean(Command::new(run)).args(["generate", "--ids", "5,9,33", "-n", "12"])).stdout;
    (fs::read(out).unwrap(), tokens)
}

#[test]
fn a_c_compiler_is_enough() {
    if !carries() {
        return;
    }
    let case = Case::new();
    // No Rust, no home, and a cache that nothing can be written to.
    let mut build = case.build("b", &[]);
    build.env_clear().env("PATH", case.only(&["cc", "ld"])).env("MOEC_CACHE", "/proc/moec");
    let said = stderr(&mut build);
    assert!(!said.contains("warning"), "{said}");
    let bundle = case.path("b");
    let (_, tokens) = answers(&bundle.join("run"), case.0.path());
    let in_process = ok(moec().arg("run").arg(&bundle).args(["generate", "--ids", "5,9,33", "-n", "12"]));
    assert!(!tokens.is_empty() && tokens == in_process.stdout, "{}", String::from_utf8_lossy(&tokens));
    assert!(!bundle.join(".link").exists());
    // The generated crate travels all the same, without the runtime's sources.
    assert!(bundle.join("runner/src/plan.rs").is_file() && !bundle.join("runner/vendor").exists());
}

#[test]
fn both_ways_give_the_same_answers() {
    if !carries() {
        return;
    }
    let case = Case::new();
    stderr(&mut case.build("linked", &["--with-sources"]));
    stderr(&mut case.build("compiled", &["--run-from-source"]));
    let [linked, compiled] = ["linked", "compiled"].map(|b| case.path(b));
    let of = |bundle: &Path| answers(&bundle.join("run"), case.0.path());
    let (logits, tokens) = of(&linked);
    assert!(!tokens.is_empty() && (logits, tokens) == of(&compiled), "the two programs answer differently");
    let (a, b) = (tree(&linked), tree(&compiled));
    let differ: Vec<_> = a.iter().zip(&b).filter(|(a, b)| a != b).map(|(a, _)| a.0.as_str()).collect();
    assert_eq!(differ, ["manifest.json", "run"], "only `run` comes from elsewhere");
    assert_eq!(a.len(), b.len());
}

#[test]
fn a_linked_program_behaves_as_one_of_rust() {
    if !carries() {
        return;
    }
    let case = Case::new();
    stderr(&mut case.build("b", &[]));
    let run = case.path("b/run");
    let status = |script: &str| {
        let mut sh = clean(Command::new("sh"));
        let said = finish(sh.args(["-c", script]).env("RUN", &run).current_dir("/"));
        let [err, out] = [said.stderr, said.stdout].map(|s| String::from_utf8_lossy(&s).into_owned());
        let said = err + &out;
        (said.lines().last().unwrap_or_default().to_owned(), said)
    };
    // A reader that closes the pipe early causes no failure, and no end by a signal.
    assert_eq!(status("(sleep 0.5; \"$RUN\" generate --ids 5 -n 50; echo $? >&2) | true").0, "0");
    // Closed streams are no files of the bundle.
    assert_eq!(status("\"$RUN\" generate --ids 5 -n 2 <&- >&- 2>&-; echo $?").0, "0");
    // Bad use and failures.
    let (last, said) = status("\"$RUN\" genrate; echo $?");
    assert!(last == "2" && said.contains("hint: "), "{said}");
    let (last, said) = status("\"$RUN\" generate --ids 999999; echo $?");
    assert!(last == "2" && said.contains("error: "), "{said}");
    fs::remove_file(case.path("b/weights/dense.bin")).unwrap();
    let (last, said) = status("\"$RUN\" generate --ids 5; echo $?");
    assert!(last == "1" && said.contains("dense.bin"), "{said}");
}

#[test]
fn without_a_c_compiler_there_is_a_bundle_all_the_same() {
    if !carries() {
        return;
    }
    let case = Case::new();
    let said = stderr(case.build("b", &[]).env("PATH", case.only(&[])));
    assert!(
        said.contains("has no `run`: there is no C compiler here to link it (looked for cc, gcc, clang)"),
        "{said}"
    );
    assert!(said.contains("`moec doctor` says what to install"), "{said}");
    let bundle = case.path("b");
    assert!(!bundle.join("run").exists());
    ok(moec().arg("run").arg(&bundle).args(["generate", "--ids", "5", "-n", "2"]));
}

#[test]
fn a_linker_that_fails_is_quoted_with_a_way_out() {
    if !carries() {
        return;
    }
    let case = Case::new();
    let cc = "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'ld: cannot find crt1.o' >&2\nexit 1\n";
    let path = case.script("cc", cc);
    let (code, said) = fails(case.build("b", &[]).env("PATH", path.parent().unwrap()));
    assert_eq!(code, 1, "{said}");
    for part in ["`cc` could not link `run`", "cannot find crt1.o", "hint: ", "libc6-dev", "--no-run"] {
        assert!(said.contains(part), "no `{part}` in:\n{said}");
    }
    assert!(!case.path("b").exists());
    let left: Vec<_> = fs::read_dir(case.0.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|n| !n.to_string_lossy().starts_with(".b")), "{left:?}");
}

/// A cargo that says what the real one says, to a terminal its bar, too, and makes a program.
const CARGO: &str = "#!/bin/sh
[ \"$1\" = --version ] && exec echo 'cargo 1.95.0'
while [ \"$1\" != --target-dir ]; do shift; done
echo '   Compiling tokenizers v0.22.2' >&2
echo '   Compiling moec-runner v0.1.0 (/moec/runner)' >&2
[ \"$CARGO_TERM_PROGRESS_WHEN\" = always ] && printf '    Building [==>   ] 41/80: tokenizers, clap\\r' >&2 && sleep 1
mkdir -p \"$2/release\"
echo program > \"$2/release/moec-runner\"
";

#[test]
fn what_cargo_does_is_said() {
    let case = Case::new();
    let cargo = case.script("cargo", CARGO);
    let build = |bundle: &str| {
        let mut build = case.build(bundle, &["--run-from-source"]);
        build.env("CARGO", &cargo).env("MOEC_CACHE", case.path("cache"));
        build
    };
    let first = stderr(&mut build("first"));
    assert!(
        first.contains(
            "Once the runtime is compiled for this machine's own kind, which takes one to six minutes"
        ),
        "{first}"
    );
    assert!(first.contains("(`--no-run` leaves it out)"), "{first}");
    assert!(first.contains("   Compiling tokenizers v0.22.2\n") && !first.contains("moec-runner"), "{first}");
    let second = stderr(&mut build("second"));
    assert!(!second.contains("Once"), "{second}");
    // On a terminal there is a bar, which goes away.
    let (status, said) = on_terminal(&mut build("third"));
    assert!(status.success(), "{said}");
    assert!(said.contains("41/80 crates") && said.contains("tokenizers, clap"), "{said}");
    let left = left(&said);
    assert!(is_the_end(&left), "{left:?}");
}

#[test]
fn a_cache_that_cannot_be_written_is_found_before_anything_is_computed() {
    let case = Case::new();
    let file = case.path("file");
    fs::write(&file, "").unwrap();
    let text = fs::read_to_string(case.path("model.toml")).unwrap();
    fs::write(case.path("text.txt"), "Some text.").unwrap();
    fs::write(case.path("read.toml"), format!("{text}[calibrate]\ntext = [\"text.txt\"]\n")).unwrap();
    // The question, and the way around it.
    let cases: [(&str, &[&str], &str, &str); 3] = [
        (
            "model.toml",
            &["--tune", "--no-run"],
            "`--tune`, whose times are kept for later builds, needs",
            "without `--tune`",
        ),
        ("model.toml", &["--run-from-source"], "building `run` with cargo needs", "`--no-run`"),
        ("read.toml", &["--no-run"], "calibration on `text` under `[calibrate]` needs", "`moec calibrate`"),
    ];
    for (toml, more, what, way) in cases {
        let build = |cache: Option<&Path>| {
            let mut build = moec();
            build.arg("build").arg(case.path(toml)).arg("-o").arg(case.path("b")).args(more);
            match cache {
                Some(cache) => build.env("MOEC_CACHE", cache),
                None => build.env_remove("MOEC_CACHE").env_remove("HOME").env_remove("XDG_CACHE_HOME"),
            };
            fails(&mut build)
        };
        for cache in [&*file, &file.join("below"), Path::new("/proc/moec")] {
            let (code, said) = build(Some(cache));
            let named = format!("{what} the cache folder `{}`, which cannot be written", cache.display());
            assert!(code == 1 && said.contains(&named), "no `{named}` in:\n{said}");
            let hint = "hint: set `MOEC_CACHE` to a folder that you can write, or ";
            let hint = said.lines().find(|l| l.starts_with(hint)).unwrap_or_else(|| panic!("{said}"));
            assert!(hint.contains(way), "{hint}");
            for phase in ["Importing", "Planning", "Compiling", "warning"] {
                assert!(!said.contains(phase), "it had begun:\n{said}");
            }
        }
        let (code, said) = build(None);
        assert!(code == 1 && said.contains(&format!("{what} a cache folder")), "{said}");
        assert!(said.contains("hint: set `MOEC_CACHE` to a folder") && !said.contains("Importing"), "{said}");
        assert!(!case.path("b").exists());
    }
    // The program that writes packages is in the cache folder, and is only read.
    let mut static_graphs = case.build("b", &["--no-run", "--target", "m2-ultra"]);
    let (code, said) =
        fails(static_graphs.env_remove("MOEC_CACHE").env_remove("HOME").env_remove("XDG_CACHE_HOME"));
    assert!(
        code == 1 && said.contains("what writes artifacts for its units is installed in the cache folder"),
        "{said}"
    );
    assert!(said.contains("hint: set `MOEC_CACHE` to one") && !said.contains("Importing"), "{said}");
    // A build that does not need the cache folder does not read its setting.
    ok(case.build("b", &["--no-run"]).env("MOEC_CACHE", &file));
}

/// Whether lines are those that remain after a build: figures to compare it by, and the line that it is done.
fn is_the_end(lines: &[String]) -> bool {
    let words: Vec<&str> = lines.iter().filter_map(|l| l.split_whitespace().next()).collect();
    words == ["Note", "Manifest", "Finished"]
}

#[test]
fn a_phase_is_a_line_and_passes_are_for_the_curious() {
    let case = Case::new();
    let lines = |more: &[&str]| {
        let said = stderr(&mut case.build("b", more));
        let lines = said
            .lines()
            .map(str::trim_start)
            .filter(|l| !l.starts_with("Finished") && !l.starts_with("Note"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let usual = lines(&[]);
    let words =
        |lines: &[String]| lines.iter().map(|l| l.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(words(&usual)[..4], ["Importing", "Planning", "Compiling", "Packing"], "{usual:?}");
    assert!(!moec_bundle::link::is_prebuilt() || usual[4] == "Linking `run`", "{usual:?}");
    assert!(usual.last().unwrap().starts_with("Manifest SHA-256 "), "{usual:?}");
    assert_eq!(usual[1], "Planning 10 passes");
    assert!(usual[2].ends_with(" kernels for native") && usual[3].ends_with("iB"), "{usual:?}");
    let passes = |lines: &[String]| {
        let names = lines.iter().filter_map(|l| l.strip_prefix("Running pass `")?.strip_suffix('`'));
        names.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(passes(&usual), Vec::<String>::new());
    // Passes that are for Macs, or for models that memory does not hold, have nothing to do here.
    let all = lines(&["--verbose"]);
    let here =
        ["lower", "format", "rewrite", "cluster", "layout", "fuse", "tune", "schedule", "memory", "barriers"];
    assert_eq!(passes(&all), here);
    let toml = fs::read_to_string(case.path("model.toml")).unwrap();
    fs::write(case.path("model.toml"), toml + "[memory]\nbudget = \"1 GiB\"\n").unwrap();
    let budgeted = passes(&lines(&["-v"]));
    assert!(
        budgeted.contains(&"prefetch_experts".to_owned())
            && budgeted.contains(&"size_expert_cache".to_owned()),
        "{budgeted:?}"
    );
    assert_eq!(lines(&["--quiet"]), Vec::<String>::new());
    let (code, said) = fails(&mut case.build("b", &["-v", "-q"]));
    assert!(code == 2 && said.contains("--quiet"), "{said}");
}

#[test]
fn on_a_terminal_nothing_stays_but_the_end() {
    let case = Case::new();
    let (status, said) = on_terminal(&mut case.build("b", &[]));
    assert!(status.success(), "{said}");
    assert!(said.contains("Planning") && said.contains("/10 passes"), "{said}");
    let lines = left(&said);
    assert!(is_the_end(&lines), "{lines:?}");
    // Without progress bars there are lines, too.
    let (_, said) = on_terminal(case.build("b", &["-v"]).env("TERM", "dumb"));
    assert!(left(&said).iter().any(|l| l.trim_start() == "Running pass `barriers`"), "{said}");
    // An error stands alone.
    let (status, said) = on_terminal(&mut case.build("b", &["--print-after", "nothing"]));
    assert!(!status.success());
    let left = left(&said);
    let first = left.iter().find(|l| !l.trim_start().starts_with("Note ")).unwrap();
    assert!(first.starts_with("error: there is no pass `nothing`"), "{left:?}");
}

#[test]
fn lines_say_what_they_count() {
    let case = Case::new();
    Setup { format: "bf16", chunk: 32, batch: &[1], context: 512 }.write(&ferris(), case.0.path());
    ok(&mut case.build("b", &["--no-run"]));
    let questions = ferris().join("eval/needle.jsonl");
    let all = fs::read_to_string(questions).unwrap();
    let few: String = all.split_inclusive('\n').take(2).collect();
    fs::write(case.path("two.jsonl"), few).unwrap();
    let mut eval = moec();
    eval.arg("eval").arg(case.path("b")).arg("--text").arg(ferris().join("eval/text.txt"));
    eval.args(["--windows", "1", "--window", "64", "--qa"]).arg(case.path("two.jsonl"));
    let said = stderr(&mut eval);
    assert!(said.contains("Reading 1 window of text\n"), "{said}");
    assert!(said.contains("Asking 2 questions\n"), "{said}");
    let said = stderr(moec().arg("verify").arg(case.path("b")));
    let line = said.lines().find(|l| l.contains("Verifying")).unwrap_or_else(|| panic!("{said}"));
    assert!(line.ends_with(" nodes"), "{line}");
}
