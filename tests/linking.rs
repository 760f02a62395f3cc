//! The ways in which a bundle gets its `run`: from the embedded runtime with a C compiler, or by cargo from
//! the sources in the bundle. Also the tools that a build checks before it starts.
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
use pty::{on_terminal, screen_lines};
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

    /// `moec build` to the bundle of this name.
    fn build(&self, bundle: &str, more: &[&str]) -> Command {
        let mut command = moec();
        command.arg("build").arg(self.path("model.toml")).arg("-o").arg(self.path(bundle)).args(more);
        command
    }

    /// A folder for `PATH` with only these programs.
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

    /// Writes a program of this name to the folder `bin`.
    fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path("bin").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }
}

/// Whether moec has an embedded runtime (feature `prebuilt`).
fn carries() -> bool {
    PREBUILT.holds_or_skip(moec_bundle::link::is_prebuilt())
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
    // No Rust, no home folder, and a cache that cannot be written.
    let mut build = case.build("b", &[]);
    build.env_clear().env("PATH", case.only(&["cc", "ld"])).env("MOEC_CACHE", "/proc/moec");
    let output = stderr(&mut build);
    assert!(!output.contains("warning"), "{output}");
    let bundle = case.path("b");
    let (_, tokens) = answers(&bundle.join("run"), case.0.path());
    let in_process = ok(moec().arg("run").arg(&bundle).args(["generate", "--ids", "5,9,33", "-n", "12"]));
    assert!(!tokens.is_empty() && tokens == in_process.stdout, "{}", String::from_utf8_lossy(&tokens));
    assert!(!bundle.join(".link").exists());
    // The bundle still has the generated crate, but not the runtime's sources.
    assert!(bundle.join("runner/src/plan.rs").is_file() && !bundle.join("runner/vendor").exists());
}

#[test]
fn linked_and_compiled_programs_give_the_same_answers() {
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
fn linked_program_behaves_like_a_rust_program() {
    if !carries() {
        return;
    }
    let case = Case::new();
    stderr(&mut case.build("b", &[]));
    let run = case.path("b/run");
    let status = |script: &str| {
        let mut sh = clean(Command::new("sh"));
        let result = finish(sh.args(["-c", script]).env("RUN", &run).current_dir("/"));
        let [err, out] = [result.stderr, result.stdout].map(|s| String::from_utf8_lossy(&s).into_owned());
        let all = err + &out;
        (all.lines().last().unwrap_or_default().to_owned(), all)
    };
    // A reader that closes the pipe early causes no failure, and no end by a signal.
    assert_eq!(status("(sleep 0.5; \"$RUN\" generate --ids 5 -n 50; echo $? >&2) | true").0, "0");
    // Closed standard streams do not become files of the bundle.
    assert_eq!(status("\"$RUN\" generate --ids 5 -n 2 <&- >&- 2>&-; echo $?").0, "0");
    // Wrong usage, and failures.
    let (last, output) = status("\"$RUN\" genrate; echo $?");
    assert!(last == "2" && output.contains("hint: "), "{output}");
    let (last, output) = status("\"$RUN\" generate --ids 999999; echo $?");
    assert!(last == "2" && output.contains("error: "), "{output}");
    fs::remove_file(case.path("b/weights/dense.bin")).unwrap();
    let (last, output) = status("\"$RUN\" generate --ids 5; echo $?");
    assert!(last == "1" && output.contains("dense.bin"), "{output}");
}

#[test]
fn without_a_c_compiler_the_bundle_has_no_run() {
    if !carries() {
        return;
    }
    let case = Case::new();
    let output = stderr(case.build("b", &[]).env("PATH", case.only(&[])));
    assert!(
        output.contains("has no `run` program: no C compiler was found (looked for cc, gcc, clang)"),
        "{output}"
    );
    assert!(output.contains("`moec doctor` shows what to install"), "{output}");
    let bundle = case.path("b");
    assert!(!bundle.join("run").exists());
    ok(moec().arg("run").arg(&bundle).args(["generate", "--ids", "5", "-n", "2"]));
}

#[test]
fn linker_errors_are_quoted_with_a_hint() {
    if !carries() {
        return;
    }
    let case = Case::new();
    let cc = "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'ld: cannot find crt1.o' >&2\nexit 1\n";
    let path = case.script("cc", cc);
    let (code, output) = fails(case.build("b", &[]).env("PATH", path.parent().unwrap()));
    assert_eq!(code, 1, "{output}");
    for part in ["`cc` could not link `run`", "cannot find crt1.o", "hint: ", "libc6-dev", "--no-run"] {
        assert!(output.contains(part), "no `{part}` in:\n{output}");
    }
    assert!(!case.path("b").exists());
    let left: Vec<_> = fs::read_dir(case.0.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|n| !n.to_string_lossy().starts_with(".b")), "{left:?}");
}

/// A fake cargo with the output of the real one, including its progress bar; it writes a program.
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
fn progress_of_cargo_is_reported() {
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
    assert!(first.contains("(`--no-run` skips it)"), "{first}");
    assert!(first.contains("   Compiling tokenizers v0.22.2\n") && !first.contains("moec-runner"), "{first}");
    let second = stderr(&mut build("second"));
    assert!(!second.contains("Once"), "{second}");
    // On a terminal there is a progress bar, which disappears at the end.
    let (status, output) = on_terminal(&mut build("third"));
    assert!(status.success(), "{output}");
    assert!(output.contains("41/80 crates") && output.contains("tokenizers, clap"), "{output}");
    let left = screen_lines(&output);
    assert!(is_the_end(&left), "{left:?}");
}

#[test]
fn unwritable_cache_is_reported_before_the_build_starts() {
    let case = Case::new();
    let file = case.path("file");
    fs::write(&file, "").unwrap();
    let text = fs::read_to_string(case.path("model.toml")).unwrap();
    fs::write(case.path("text.txt"), "Some text.").unwrap();
    fs::write(case.path("read.toml"), format!("{text}[calibrate]\ntext = [\"text.txt\"]\n")).unwrap();
    // The message, and the option that avoids the error.
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
            let (code, output) = build(Some(cache));
            let named = format!("{what} the cache folder `{}`, which cannot be written", cache.display());
            assert!(code == 1 && output.contains(&named), "no `{named}` in:\n{output}");
            let hint = "hint: set `MOEC_CACHE` to a folder that you can write, or ";
            let hint = output.lines().find(|l| l.starts_with(hint)).unwrap_or_else(|| panic!("{output}"));
            assert!(hint.contains(way), "{hint}");
            for phase in ["Importing", "Planning", "Compiling", "warning"] {
                assert!(!output.contains(phase), "it had begun:\n{output}");
            }
        }
        let (code, output) = build(None);
        assert!(code == 1 && output.contains(&format!("{what} a cache folder")), "{output}");
        assert!(
            output.contains("hint: set `MOEC_CACHE` to a folder") && !output.contains("Importing"),
            "{output}"
        );
        assert!(!case.path("b").exists());
    }
    // The program that writes packages is in the cache folder, which is only read for it.
    let mut static_graphs = case.build("b", &["--no-run", "--target", "m2-ultra"]);
    let (code, output) =
        fails(static_graphs.env_remove("MOEC_CACHE").env_remove("HOME").env_remove("XDG_CACHE_HOME"));
    assert!(
        code == 1
            && output
                .contains("the tools that write artifacts for its units are installed in the cache folder"),
        "{output}"
    );
    assert!(
        output.contains("hint: set `MOEC_CACHE` to a folder that you can write")
            && !output.contains("Importing"),
        "{output}"
    );
    // A build that does not need the cache folder does not read its setting.
    ok(case.build("b", &["--no-run"]).env("MOEC_CACHE", &file));
}

/// Whether the lines are those that remain after a build: a note, the manifest, and the end.
fn is_the_end(lines: &[String]) -> bool {
    let words: Vec<&str> = lines.iter().filter_map(|l| l.split_whitespace().next()).collect();
    words == ["Note", "Manifest", "Finished"]
}

#[test]
fn phases_print_a_line_and_passes_only_if_verbose() {
    let case = Case::new();
    let lines = |more: &[&str]| {
        let output = stderr(&mut case.build("b", more));
        let lines = output
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
    // Passes for Macs, or for experts on disk, have nothing to do here.
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
    let (code, output) = fails(&mut case.build("b", &["-v", "-q"]));
    assert!(code == 2 && output.contains("--quiet"), "{output}");
}

#[test]
fn on_a_terminal_only_the_last_lines_remain() {
    let case = Case::new();
    let (status, output) = on_terminal(&mut case.build("b", &[]));
    assert!(status.success(), "{output}");
    assert!(output.contains("Planning") && output.contains("/10 passes"), "{output}");
    let lines = screen_lines(&output);
    assert!(is_the_end(&lines), "{lines:?}");
    // Without progress bars there are lines instead.
    let (_, output) = on_terminal(case.build("b", &["-v"]).env("TERM", "dumb"));
    assert!(screen_lines(&output).iter().any(|l| l.trim_start() == "Running pass `barriers`"), "{output}");
    // An error is printed without other lines.
    let (status, output) = on_terminal(&mut case.build("b", &["--print-after", "nothing"]));
    assert!(!status.success());
    let left = screen_lines(&output);
    let first = left.iter().find(|l| !l.trim_start().starts_with("Note ")).unwrap();
    assert!(first.starts_with("error: there is no pass `nothing`"), "{left:?}");
}

#[test]
fn progress_lines_name_what_they_count() {
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
    let output = stderr(&mut eval);
    assert!(output.contains("Reading 1 window of text\n"), "{output}");
    assert!(output.contains("Asking 2 questions\n"), "{output}");
    let output = stderr(moec().arg("verify").arg(case.path("b")));
    let line = output.lines().find(|l| l.contains("Verifying")).unwrap_or_else(|| panic!("{output}"));
    assert!(line.ends_with(" nodes"), "{line}");
}
