//! Entries that are not regular files, and files that do not belong to a checkpoint, are refused at once.
//! Signals are handled from the start.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use support::{Setup, clean, copy_checkpoint, fails, ferris, moec, ok};
use tempfile::TempDir;
use wait_timeout::ChildExt as _;

/// Time limit of a refusal, which takes milliseconds alone on a machine.
const SOON: Duration = Duration::from_mins(1);

/// A folder with a copy of the demo model, a `model.toml`, a text and a device file.
struct Case(TempDir);

impl Case {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("hf");
        copy_checkpoint(&ferris(), &source);
        Setup { format: "bf16", chunk: 16, batch: &[1], context: 64 }.write(&source, folder.path());
        fs::write(folder.path().join("text.txt"), "once upon a time").unwrap();
        let device = ok(moec().args(["targets", "x86-64-v3"])).stdout;
        fs::write(folder.path().join("device.toml"), device).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn build(&self) -> Command {
        let mut command = moec();
        command.arg("build").arg(self.path("model.toml")).args(["--quiet", "--no-run", "-o"]);
        command.arg(self.path("out.moec"));
        command
    }

    fn on_bundle(&self, args: &[&str]) -> Command {
        let mut command = moec();
        command.arg(args[0]).arg(self.path("out.moec")).args(&args[1..]);
        command
    }

    /// Changes `model.toml`.
    fn settings(&self, more: &str) {
        let path = self.path("model.toml");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{text}{more}")).unwrap();
    }

    fn nothing_left(&self) {
        let all = fs::read_dir(self.0.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let left: Vec<_> = all.filter(|name| name.contains(".moec") && name != "out.moec").collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

/// Puts something else in place of a file.
type Replace = fn(&Path);

const REPLACEMENTS: [(&str, Replace); 5] = [
    ("a FIFO", |path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success())),
    ("a character device", |path| symlink("/dev/zero", path).unwrap()),
    ("a folder", |path| fs::create_dir(path).unwrap()),
    ("a socket", |path| drop(std::os::unix::net::UnixListener::bind(path).unwrap())),
    ("nowhere", |path| symlink("gone", path).unwrap()),
];

/// Checks that each command ends soon if `file` is replaced, with an error that names it.
fn refused(case: &Case, file: &str, commands: &dyn Fn() -> Vec<Command>) {
    let path = case.path(file);
    let name = path.file_name().unwrap().to_str().unwrap().to_owned();
    let aside = case.path("aside");
    let there = path.exists();
    if there {
        fs::rename(&path, &aside).unwrap();
    }
    for (what, replace) in REPLACEMENTS {
        replace(&path);
        for mut command in commands() {
            let start = Instant::now();
            let (code, stderr) = fails(&mut command);
            assert!(start.elapsed() < SOON, "{what} as {file}: {command:?} took {:?}", start.elapsed());
            assert!(code == 1 || code == 2, "{what} as {file}: {command:?} ended with {code}: {stderr}");
            // Exceptions: a device file outside of the checkpoint, and a bundle that is not a folder.
            assert!(
                stderr.contains(&name) || stderr.contains("neither a bundle"),
                "{what} as {file}: {stderr}"
            );
        }
        case.nothing_left();
        if path.is_dir() && !path.is_symlink() {
            fs::remove_dir(&path).unwrap();
        } else {
            fs::remove_file(&path).unwrap();
        }
    }
    if there {
        fs::rename(&aside, &path).unwrap();
    }
}

#[test]
fn non_regular_files_are_refused_in_a_checkpoint() {
    let case = Case::new();
    let build = || vec![case.build()];
    for file in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ] {
        refused(&case, &format!("hf/{file}"), &build);
    }
    fs::rename(case.path("hf/model.safetensors"), case.path("hf/other.safetensors")).unwrap();
    refused(&case, "hf/model.safetensors.index.json", &build);
    fs::rename(case.path("hf/other.safetensors"), case.path("hf/model.safetensors")).unwrap();
    refused(&case, "model.toml", &build);
    refused(&case, "device.toml", &|| {
        let mut build = case.build();
        build.arg("--target").arg(case.path("device.toml"));
        vec![build]
    });
    case.settings("[calibrate]\nprofile = \"my.trace\"\n");
    refused(&case, "my.trace", &build);
}

#[test]
fn non_regular_files_are_refused_in_a_bundle_and_as_texts() {
    let case = Case::new();
    ok(&mut case.build());
    let generate = ["run", "generate", "--ids", "1,2", "-n", "1"];
    let subcommands = || ["verify", "explain", "inspect"].map(|subcommand| case.on_bundle(&[subcommand]));
    refused(&case, "out.moec/manifest.json", &|| {
        subcommands().into_iter().chain([case.on_bundle(&generate)]).collect()
    });
    for file in ["plan.bin", "artifacts/kernels.o", "artifacts/graph.moe", "weights/dense.bin"] {
        refused(&case, &format!("out.moec/{file}"), &|| vec![case.on_bundle(&generate)]);
    }
    refused(&case, "out.moec/artifacts/tokenizer.json", &|| {
        vec![case.on_bundle(&["run", "generate", "--prompt", "a", "-n", "1"])]
    });
    for option in ["--text", "--qa"] {
        refused(&case, "text.txt", &|| {
            let mut eval = case.on_bundle(&["eval", option]);
            eval.arg(case.path("text.txt"));
            vec![eval]
        });
    }
    refused(&case, "text.txt", &|| {
        let mut calibrate = moec();
        calibrate.arg("calibrate").arg(case.path("model.toml")).arg("--text").arg(case.path("text.txt"));
        calibrate.arg("-o").arg(case.path("x.trace"));
        vec![calibrate]
    });
}

#[test]
fn huge_sparse_files_are_refused() {
    let case = Case::new();
    // Sparse files take no room on the disk.
    for (file, bytes) in
        [("hf/config.json", 1_u64 << 40), ("hf/tokenizer.json", 1 << 40), ("model.toml", 1 << 40)]
    {
        let path = case.path(file);
        let whole = fs::read(&path).unwrap();
        fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        let (code, stderr) = fails(&mut case.build());
        assert!(code == 1 && stderr.contains("bytes are too many for"), "{file}: {stderr}");
        fs::write(&path, whole).unwrap();
    }
}

/// Checks that the build is refused with all `words`.
fn check_error(case: &Case, words: &[&str]) {
    let (code, stderr) = fails(&mut case.build());
    assert_eq!(code, 1, "{stderr}");
    for word in words.iter().chain(&["hint"]) {
        assert!(stderr.contains(word), "`{word}` is not in:\n{stderr}");
    }
    case.nothing_left();
}

#[test]
fn a_tokenizer_is_checked_before_it_is_built_in() {
    let case = Case::new();
    let path = case.path("hf/tokenizer.json");
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    check_error(&case, &["`tokenizer.json` is not a usable tokenizer"]);
    fs::write(&path, "{}").unwrap();
    check_error(&case, &["`tokenizer.json` is not a usable tokenizer"]);

    let mut more: serde_json::Value = serde_json::from_slice(&whole).unwrap();
    let added = serde_json::json!({"id": 2048, "content": "<|more|>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true});
    more["added_tokens"].as_array_mut().unwrap().push(added);
    fs::write(&path, more.to_string()).unwrap();
    check_error(
        &case,
        &["tokenizer.json", "token ids up to 2048 (`<|more|>`)", "the model has 2048 tokens", "vocab_size"],
    );

    // Many tokenizers have fewer tokens than the model, whose vocabulary is padded.
    let vocab = |ids: u32| {
        let vocab: serde_json::Map<_, _> = (0..ids).map(|i| (format!("w{i}"), i.into())).collect();
        let model = serde_json::json!({"type": "WordLevel", "vocab": vocab, "unk_token": "w0"});
        fs::write(
            &path,
            serde_json::json!({"version": "1.0", "added_tokens": [], "model": model}).to_string(),
        )
        .unwrap();
    };
    vocab(100);
    ok(&mut case.build());
    vocab(2048);
    ok(&mut case.build());
    vocab(2049);
    fs::remove_dir_all(case.path("out.moec")).unwrap();
    check_error(&case, &["token ids up to 2048 (`w2048`)"]);
    // A model without a tokenizer takes token ids.
    fs::remove_file(&path).unwrap();
    ok(&mut case.build());
    assert!(!case.path("out.moec/artifacts/tokenizer.json").exists());
}

#[test]
fn links_out_of_the_checkpoint_are_refused() {
    let case = Case::new();
    fs::write(case.path("secret"), "{}").unwrap();
    for file in ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"] {
        let path = case.path("hf").join(file);
        let whole = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        symlink("../secret", &path).unwrap();
        check_error(&case, &[file, "outside of the checkpoint's folder", "it is a link to"]);
        fs::remove_file(&path).unwrap();
        symlink("../nowhere", &path).unwrap();
        check_error(&case, &[file, "a link that leads nowhere"]);
        // A link that stays inside of the checkpoint is accepted.
        fs::write(case.path("hf/blob"), whole).unwrap();
        fs::remove_file(&path).unwrap();
        symlink("blob", &path).unwrap();
        ok(&mut case.build());
        fs::remove_file(&path).unwrap();
        fs::rename(case.path("hf/blob"), &path).unwrap();
        fs::remove_dir_all(case.path("out.moec")).unwrap();
    }
}

#[test]
fn special_tokens_are_those_of_the_model() {
    let case = Case::new();
    let path = case.path("hf/generation_config.json");
    fs::write(&path, "{\"eos_token_id\": ").unwrap();
    check_error(&case, &["`generation_config.json` is not valid JSON"]);
    fs::write(&path, "{\"eos_token_id\": \"end\"}").unwrap();
    let (_, stderr) = fails(&mut case.build());
    assert!(stderr.contains("`eos_token_id` in `generation_config.json`"), "{stderr}");
    // An end token that the model lacks is reported, and ignored.
    fs::write(&path, "{\"eos_token_id\": [5, 2048]}").unwrap();
    let stderr = String::from_utf8(ok(&mut case.build()).stderr).unwrap();
    assert!(stderr.contains("`eos_token_id` names token 2048, but the model has 2048 tokens"), "{stderr}");
    fs::remove_dir_all(case.path("out.moec")).unwrap();
    // A token that would be added before every text must exist.
    fs::write(&path, "{\"bos_token_id\": 2048}").unwrap();
    fs::write(case.path("hf/tokenizer_config.json"), "{\"add_bos_token\": true}").unwrap();
    check_error(&case, &["`bos_token_id` is 2048, but the model has 2048 tokens", "add_bos_token"]);
}

fn signal(child: &Child, name: &str) {
    assert!(
        Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().unwrap().success()
    );
}

/// Waits for the process, which must end soon.
fn end(mut child: Child) -> Output {
    if child.wait_timeout(SOON).unwrap().is_none() {
        child.kill().unwrap();
        panic!("it does not end: {:?}", child.wait_with_output());
    }
    child.wait_with_output().unwrap()
}

#[test]
fn a_signal_ends_a_build_at_any_moment() {
    let case = Case::new();
    for (i, name) in ["INT", "TERM"].into_iter().cycle().enumerate().take(12) {
        let child = case.build().stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(16 * i as u64 * i as u64));
        signal(&child, name);
        let done = end(child);
        let stderr = String::from_utf8(done.stderr).unwrap();
        let (code, number) = if name == "INT" { (130, 2) } else { (143, 15) };
        // Before `main` begins the operating system ends the process; after the build it is too late.
        let early = done.status.signal() == Some(number) && stderr.is_empty();
        let interrupted = done.status.code() == Some(code) && stderr == "error: interrupted\n";
        let late = done.status.success() && case.path("out.moec/manifest.json").exists();
        assert!(early || interrupted || late, "SIG{name}: {:?}: {stderr}", done.status);
        case.nothing_left();
    }
}

#[test]
fn signal_interrupts_a_build_that_waits_for_cargo() {
    use std::os::unix::fs::PermissionsExt as _;
    let case = Case::new();
    let cargo = case.path("cargo");
    let real = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let waiting = case.path("waiting");
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = build ] || exec '{real}' \"$@\"\n: > '{}'\nexec sleep 600\n",
        waiting.display()
    );
    fs::write(&cargo, script).unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let mut build = moec();
        build
            .arg("build")
            .arg(case.path("model.toml"))
            .args(["-q", "--run-from-source", "-o"])
            .arg(case.path("out.moec"));
        build.env("CARGO", &cargo).env("MOEC_CACHE", case.path("cache"));
        let child = build.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let start = Instant::now();
        while !waiting.exists() {
            assert!(start.elapsed() < SOON, "cargo was never started");
            std::thread::sleep(Duration::from_millis(10));
        }
        signal(&child, name);
        let done = end(child);
        let stderr = String::from_utf8(done.stderr).unwrap();
        assert_eq!((done.status.code(), stderr.as_str()), (Some(code), "error: interrupted\n"));
        case.nothing_left();
        fs::remove_file(&waiting).unwrap();
    }
}

#[test]
fn signal_interrupts_reading_a_prompt() {
    let case = Case::new();
    ok(&mut case.build());
    let mut run = case.on_bundle(&["run", "generate", "--prompt", "-", "-n", "1"]);
    let mut child = run.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    // After this input the program waits for more.
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"once").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    signal(&child, "INT");
    let done = end(child);
    let stderr = String::from_utf8(done.stderr).unwrap();
    assert!(
        done.status.code() == Some(130) && stderr == "error: interrupted\n",
        "{:?}: {stderr}",
        done.status
    );
    drop(input);
}

#[test]
fn weight_file_truncated_during_a_run_is_named() {
    let case = Case::new();
    ok(&mut case.build());
    for check in [false, true] {
        let mut run = case.on_bundle(&["run", "bench", "--weights", "mmap", "--stdin"]);
        if check {
            run.arg("--check");
        }
        let mut child =
            run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        input.write_all(b"4 4 1\n").unwrap();
        let mut first = [0];
        output.read_exact(&mut first).unwrap();
        let path = case.path("out.moec/weights/experts.bin");
        let whole = fs::read(&path).unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
        input.write_all(b"4 4 1\n").unwrap();
        let done = end(child);
        let stderr = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(1), "{:?}: {stderr}", done.status);
        assert!(stderr.contains("experts.bin` was changed or cut while it was in use\nhint: "), "{stderr}");
        fs::write(&path, whole).unwrap();
    }
    // Errors of the bundle's own `run` are tested in `linking`.
    ok(&mut clean(case.on_bundle(&["run", "generate", "--ids", "1", "-n", "1"])));
}
