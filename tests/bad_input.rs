//! Bad input from a user's view: a clear error, exit code 1 or 2, and no half-written files.
//!
//! Errors in a checkpoint's files are tested case by case in `compiler/import/tests/import`. Here a few of
//! them go through the binary, together with errors that only a whole run can show.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking")]

use crate::support;

use moec_testing::MOUNT;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use support::{Setup, checkpoint, clean, copy_checkpoint, fails, ferris, finish, moec, ok, tree};
use tempfile::TempDir;

/// A folder with a copy of a checkpoint and a `model.toml` for it.
struct Case {
    folder: TempDir,
    source: PathBuf,
    toml: PathBuf,
}

impl Case {
    fn new(family: &str) -> Self {
        Self::of(&checkpoint(family))
    }

    fn of(original: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("hf");
        copy_checkpoint(original, &source);
        let toml =
            Setup { format: "bf16", chunk: 16, batch: &[1], context: 64 }.write(&source, folder.path());
        Self { folder, source, toml }
    }

    fn output(&self) -> PathBuf {
        self.folder.path().join("out.moec")
    }

    fn build(&self) -> Command {
        let mut command = moec();
        command.arg("build").arg(&self.toml).args(["--quiet", "--no-run", "-o"]).arg(self.output());
        command
    }

    /// Checks that the build fails with all of these `words`, and leaves no files.
    fn refused(&self, words: &[&str]) {
        let (code, stderr) = fails(&mut self.build());
        assert!(code == 1 || code == 2, "exit code {code}: {stderr}");
        for word in words {
            assert!(stderr.contains(word), "`{word}` is not in:\n{stderr}");
        }
        self.nothing_left();
    }

    fn nothing_left(&self) {
        let left: Vec<_> = fs::read_dir(self.folder.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .filter(|n| n != "hf" && n != "model.toml")
            .collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }

    fn edit(&self, file: &str, change: impl FnOnce(String) -> String) {
        let path = self.source.join(file);
        fs::write(&path, change(fs::read_to_string(&path).unwrap())).unwrap();
    }

    fn weights(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let path = self.source.join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
    }
}

/// Length of a safetensors header, including its eight bytes of length.
fn header_len(bytes: &[u8]) -> usize {
    8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}

#[test]
fn damaged_checkpoints() {
    type Damage = fn(&mut Vec<u8>);
    let cases: [(&[&str], Damage); 4] = [
        (&["model.safetensors"], |b| b.truncate(b.len() - 100)),
        (&["model.safetensors", "header"], |b| b[..8].copy_from_slice(&u64::MAX.to_le_bytes())),
        (&["model.safetensors"], |b| {
            // One digit of the first offset in the header is changed.
            let end = header_len(b);
            let at = b[..end].windows(15).position(|w| w == b"data_offsets\":[").unwrap() + 15;
            b[at] = b'9';
        }),
        (&["lm_head.weight", "model.safetensors"], |b| {
            let end = header_len(b);
            let at = b[..end].windows(14).position(|w| w == b"lm_head.weight").unwrap();
            b[at] = b'L';
        }),
    ];
    for (words, change) in cases {
        let case = Case::new("qwen3_moe");
        case.weights(change);
        case.refused(words);
    }
}

#[test]
fn missing_shards_and_paths_outside_of_the_folder_are_refused() {
    for (file, words) in [
        ("gone.safetensors", ["gone.safetensors", "model.safetensors.index.json"]),
        ("../elsewhere.safetensors", ["../elsewhere.safetensors", "model.safetensors.index.json"]),
        ("/etc/passwd", ["/etc/passwd", "model.safetensors.index.json"]),
    ] {
        let case = Case::new("qwen3_moe");
        fs::remove_file(case.source.join("model.safetensors")).unwrap();
        let index = serde_json::json!({"weight_map": {"lm_head.weight": file}});
        fs::write(case.source.join("model.safetensors.index.json"), index.to_string()).unwrap();
        case.refused(&words);
    }
}

#[test]
fn a_config_that_disagrees_with_the_tensors() {
    let case = Case::new("qwen3_moe");
    case.edit("config.json", |t| t.replace("\"hidden_size\": 64", "\"hidden_size\": 80"));
    case.refused(&["config.json", "hidden_size", "[48, 64]", "[48, 80]"]);

    let case = Case::new("qwen3_moe");
    case.edit("config.json", |t| t.replace("\"num_local_experts\": 16", "\"num_local_experts\": 17"));
    case.refused(&["experts.16", "config.json"]);

    let case = Case::new("qwen3_moe");
    case.edit("config.json", |t| {
        t.replace("Qwen3MoeForCausalLM", "Qwen9MoeForCausalLM").replace("qwen3_moe", "qwen9")
    });
    case.refused(&["Qwen9MoeForCausalLM"]);

    let case = Case::new("deepseek_v2");
    case.edit("config.json", |t| t.replace("\"greedy\"", "\"greediest\""));
    case.refused(&["topk_method", "greediest", "group_limited_greedy"]);
}

#[test]
fn weights_with_nan_are_refused_or_allowed_on_request() {
    let case = Case::new("qwen3_moe");
    case.weights(|b| {
        // A bf16 NaN in the last tensor.
        let end = b.len();
        b[end - 2..].copy_from_slice(&[0xc0, 0x7f]);
    });
    case.refused(&["NaN", "model.safetensors", "allow_nonfinite"]);
    let text = fs::read_to_string(&case.toml).unwrap();
    fs::write(&case.toml, text.replace("[shapes]", "allow_nonfinite = true\n[shapes]")).unwrap();
    ok(&mut case.build());
    // If all weights are NaN, the error names the first router without valid scores.
    case.weights(|b| {
        let first = header_len(b);
        b[first..].chunks_exact_mut(2).for_each(|number| number.copy_from_slice(&[0xc0, 0x7f]));
    });
    ok(&mut case.build());
    let (code, stderr) =
        fails(moec().arg("run").arg(case.output()).args(["generate", "--ids", "1,2", "-n", "1"]));
    assert!(code == 1 && stderr.contains("the router of layer 0 cannot choose experts"), "{stderr}");
    assert!(stderr.contains("hint: ") && stderr.contains("moec verify"), "{stderr}");
}

/// Rates of decay are read as every other tensor: a NaN in them is named.
#[test]
fn nan_in_a_rate_of_decay_is_refused_by_name() {
    for (family, tensor) in [
        ("qwen3_next", "model.layers.1.linear_attn.A_log"),
        ("kimi_linear", "model.layers.0.self_attn.dt_bias"),
        ("nemotron_h", "backbone.layers.4.mixer.A_log"),
        ("granitemoehybrid", "model.layers.0.mamba.dt_bias"),
        ("jamba", "model.layers.1.mamba.A_log"),
    ] {
        let case = Case::new(family);
        case.weights(|bytes| {
            let from = header_len(bytes);
            let header: serde_json::Value = serde_json::from_slice(&bytes[8..from]).unwrap();
            assert_eq!(header[tensor]["dtype"], "BF16", "{family}");
            let at = from + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
            bytes[at..at + 2].copy_from_slice(&[0xc0, 0x7f]);
        });
        case.refused(&["NaN", tensor, "model.safetensors", "allow_nonfinite"]);
    }
}

#[test]
fn a_model_toml_with_mistakes() {
    let cases: [(&str, &str, &[&str]); 4] = [
        ("prefill_chunk", "prefil_chunk", &["prefil_chunk", "prefill_chunk", "model.toml"]),
        ("prefill_chunk = 16", "prefill_chunk = 0", &["prefill_chunk", "0"]),
        ("\"bf16\"", "\"q3\"", &["q3", "bf16"]),
        ("max_context = 64", "max_context = 100000", &["max_context", "100000", "512"]),
    ];
    for (from, to, words) in cases {
        let case = Case::new("qwen3_moe");
        let text = fs::read_to_string(&case.toml).unwrap();
        fs::write(&case.toml, text.replace(from, to)).unwrap();
        case.refused(words);
    }
    let case = Case::new("qwen3_moe");
    let (code, stderr) = fails(case.build().args(["--target", "x86-64-v33"]));
    assert_eq!(code, 2);
    assert!(stderr.contains("x86-64-v33") && stderr.contains("did you mean `x86-64-v3`"), "{stderr}");
    let (code, stderr) = fails(case.build().args(["--print-after", "rewrit"]));
    assert_eq!(code, 2);
    assert!(stderr.contains("rewrit") && stderr.contains("barriers"), "{stderr}");
    case.nothing_left();
}

#[test]
fn output_folder_that_is_not_a_bundle_is_kept() {
    let case = Case::new("qwen3_moe");
    fs::create_dir(case.output()).unwrap();
    fs::write(case.output().join("thesis.txt"), "years of work").unwrap();
    let (code, stderr) = fails(&mut case.build());
    assert_eq!(code, 2);
    assert!(stderr.contains("is not a moec bundle"), "{stderr}");
    assert_eq!(tree(&case.output()), [("thesis.txt".to_owned(), b"years of work".to_vec())]);
}

#[test]
fn an_earlier_bundle_stays_until_the_new_one_is_whole() {
    let case = Case::new("qwen3_moe");
    ok(&mut case.build());
    let before = tree(&case.output());
    case.weights(|b| b.truncate(b.len() - 100));
    fails(&mut case.build());
    assert!(tree(&case.output()) == before, "a failed build changed the earlier bundle");
    case.weights(|b| *b = fs::read(checkpoint("qwen3_moe").join("model.safetensors")).unwrap());
    ok(&mut case.build());
    assert!(tree(&case.output()) == before, "the same input gave another bundle");
    fs::remove_dir_all(case.output()).unwrap();
    case.nothing_left();
}

#[test]
fn full_and_read_only_disks_are_reported() {
    let case = Case::of(&ferris());
    let disk = case.folder.path().join("disk");
    fs::create_dir(&disk).unwrap();
    for (options, doing, hint) in
        [("size=1m", "cannot write", "the disk is full"), ("ro", "cannot create", "nothing can be written")]
    {
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(&disk)
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|s| s.success());
        if !MOUNT.holds_or_skip(mounted) {
            return;
        }
        let mut build = moec();
        build.arg("build").arg(&case.toml).args(["--quiet", "--no-run", "-o"]).arg(disk.join("out.moec"));
        let output = build.output().unwrap();
        let left = fs::read_dir(&disk).unwrap().count();
        Command::new("umount").arg(&disk).status().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(doing) && stderr.contains(hint) && stderr.contains("`-o`"), "{stderr}");
        assert_eq!(left, 0, "something was left on the disk");
    }
}

#[test]
fn interrupted_build_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("hf");
    ok(moec().args(["synth", "--like", "olmoe", "--layers", "1", "--quiet"]).arg(&source));
    let toml = Setup { format: "bf16", chunk: 16, batch: &[1], context: 64 }.write(&source, folder.path());
    // Whether the tests themselves were started by `nohup` does not matter.
    for (signal, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let output = folder.path().join("out.moec");
        let mut build = clean(Command::new("env"));
        build.arg("--default-signal=HUP").arg(env!("CARGO_BIN_EXE_moec"));
        build.arg("build").arg(&toml).args(["--quiet", "--no-run", "-o"]).arg(&output).stderr(Stdio::piped());
        let child = build.spawn().unwrap();
        // Wait until weights are being written, since from then on files could remain.
        let hidden = folder.path().join(format!(".out.moec.partial-{}/bundle", child.id()));
        for _ in 0..600 {
            if fs::metadata(hidden.join("weights/dense.bin")).is_ok_and(|m| m.len() > 0) {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(hidden.exists(), "the build was over before it could be interrupted");
        let pid = child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{signal}"), &pid]).status().unwrap().success());
        let done = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&done.stderr);
        assert_eq!((done.status.code(), &*stderr), (Some(code), "error: interrupted\n"), "SIG{signal}");
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "SIG{signal} left something behind: {left:?}");
    }
}

/// A build with a limit of the shell: `ulimit` with these arguments.
fn under(limit: &str, case: &Case) -> Command {
    let build = case.build();
    let mut command = clean(Command::new("sh"));
    command.args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\"")]);
    command.arg(build.get_program()).args(build.get_args());
    command
}

#[test]
fn file_size_limit_fails_the_build_without_leftovers() {
    let case = Case::of(&ferris());
    let (code, stderr) = fails(&mut under("-f 100", &case));
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("cannot write") && stderr.contains("`ulimit -f`"), "{stderr}");
    case.nothing_left();
}

#[test]
fn running_out_of_file_descriptors_fails_without_leftovers() {
    let case = Case::new("qwen3_moe");
    // The loop over limits reaches the point at which each step runs out of descriptors.
    let mut hints = 0;
    for most in (4..200).step_by(2) {
        let done = finish(&mut under(&format!("-n {most}"), &case));
        let stderr = String::from_utf8_lossy(&done.stderr);
        if done.status.success() {
            assert!(hints > 0, "no build ran out of descriptors");
            return;
        }
        assert!(!stderr.contains("panicked"), "{most} descriptors: {stderr}");
        hints += usize::from(stderr.contains("`ulimit -n`"));
        case.nothing_left();
    }
    panic!("no number of descriptors was enough");
}

/// Replaces a file. A program that was just started cannot be written to in place.
fn write_back(path: &Path, bytes: &[u8]) {
    let new = path.with_extension("new");
    fs::write(&new, bytes).unwrap();
    #[cfg(unix)]
    if path.ends_with("run") {
        use std::os::unix::fs::PermissionsExt as _;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::rename(new, path).unwrap();
}

#[test]
fn damaged_or_missing_bundle_files_are_reported() {
    let case = Case::of(&ferris());
    let mut build = moec();
    ok(build.arg("build").arg(&case.toml).args(["--quiet", "-o"]).arg(case.output()));
    let own = || clean(Command::new(case.output().join("run")));
    let generate = ["generate", "--prompt", "a", "-n", "1"];
    ok(own().args(generate));
    for (file, by_own_binary) in [
        ("weights/dense.bin", true),
        ("weights/experts.bin", true),
        ("artifacts/tokenizer.json", true),
        ("artifacts/kernels.o", true),
        ("artifacts/graph.moe", false),
        ("plan.bin", false),
        ("plan.txt", false),
        ("decisions.json", false),
        ("runner/src/main.rs", false),
        ("run", false),
    ] {
        let path = case.output().join(file);
        let whole = fs::read(&path).unwrap();
        let name = Path::new(file).file_name().unwrap().to_str().unwrap();
        let mut changed = whole.clone();
        let middle = changed.len() / 2;
        changed[middle] ^= 1;
        let mut longer = whole.clone();
        longer.push(0);
        for damage in [Some(changed), Some(whole[..middle].to_vec()), Some(longer), None] {
            match &damage {
                Some(bytes) => write_back(&path, bytes),
                None => fs::remove_file(&path).unwrap(),
            }
            let mut commands = vec![moec()];
            commands[0].arg("verify").arg(case.output());
            let mut run = moec();
            run.arg("run").arg(case.output()).args(generate);
            commands.push(run);
            if by_own_binary {
                let mut run = own();
                run.args(generate);
                commands.push(run);
            }
            // If `run` itself is truncated, the operating system cannot start it.
            if file != "run" {
                let mut run = own();
                run.args(generate).arg("--check");
                commands.push(run);
            }
            for mut command in commands {
                let (code, stderr) = fails(&mut command);
                assert_eq!(code, 1, "{stderr}");
                assert!(stderr.contains(name), "`{name}` is not named:\n{stderr}");
            }
        }
        write_back(&path, &whole);
    }
    // `--check` reports the number of checked files, which is that of the manifest.
    let listed = moec_bundle::manifest::Manifest::read(&case.output()).unwrap();
    let files = listed.files.len();
    assert!(listed.files.contains_key("run") && files > 10, "{files} files");
    let checked = format!("checked {files} files, ");
    let stderr = ok(own().args(generate).arg("--check")).stderr;
    assert!(String::from_utf8_lossy(&stderr).contains(&checked), "{}", String::from_utf8_lossy(&stderr));
    // A missing manifest, or the manifest of another build, is detected.
    let manifest = case.output().join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::remove_file(&manifest).unwrap();
    let (_, stderr) = fails(own().args(generate).arg("--check"));
    assert!(stderr.contains("manifest.json` is missing"), "{stderr}");
    fs::write(&manifest, text.replace(&listed.files["weights/dense.bin"].sha256, &"0".repeat(64))).unwrap();
    let (_, stderr) = fails(own().args(generate).arg("--check"));
    assert!(stderr.contains("weights/dense.bin"), "{stderr}");
    fs::write(&manifest, text).unwrap();
    let manifest = case.output().join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replacen("\"weights/dense.bin\"", "\"../dense.bin\"", 1)).unwrap();
    let (_, stderr) = fails(moec().arg("verify").arg(case.output()));
    assert!(stderr.contains("../dense.bin"), "{stderr}");
    fs::write(&manifest, text).unwrap();
    ok(own().args(generate));
}

#[test]
fn impossible_generate_requests_are_refused() {
    let case = Case::new("qwen3_moe");
    ok(&mut case.build());
    let run = |args: &[&str]| {
        let mut command = moec();
        command.arg("run").arg(case.output()).args(args);
        fails(&mut command)
    };
    let long = vec!["1"; 65].join(",");
    let (_, stderr) = run(&["generate", "--ids", &long, "-n", "1"]);
    assert!(stderr.contains("65") && stderr.contains("64"), "{stderr}");
    // The message has the limit, and the numbers that the user gave.
    let (code, stderr) = run(&["generate", "--ids", "1,2", "-n", "99999999"]);
    assert_eq!(code, 2, "{stderr}");
    for words in
        ["the context holds 64 tokens; the prompt has 2, and 99999999 more are requested", "up to 62 fit"]
    {
        assert!(stderr.contains(words), "`{words}` is missing: {stderr}");
    }
    ok(moec().arg("run").arg(case.output()).args(["generate", "--ids", "1,2", "-n", "62"]));
    let full = vec!["1"; 64].join(",");
    let (_, stderr) = run(&["generate", "--ids", &full, "-n", "1"]);
    assert!(
        stderr.contains("the prompt has 64, and 1 more are requested")
            && stderr.contains("shorten the prompt"),
        "{stderr}"
    );
    let logits = case.folder.path().join("logits.safetensors");
    let (_, stderr) = run(&["logits", "--ids", &long, "--out", logits.to_str().unwrap()]);
    assert!(stderr.contains("65") && stderr.contains("64") && !logits.exists(), "{stderr}");
    let (_, stderr) = run(&["generate", "--ids", "1,320", "-n", "1"]);
    assert!(stderr.contains("320") && stderr.contains("vocabulary"), "{stderr}");
    let (_, stderr) = run(&["generate", "--prompt", "hello"]);
    assert!(stderr.contains("--ids"), "{stderr}");
    let questions = case.folder.path().join("qa.jsonl");
    fs::write(&questions, "{\"prompt\": \"a\", \"answer\": \"b\"}\n{\"prompt\": 1}\n").unwrap();
    let (_, stderr) = fails(moec().arg("eval").arg(case.output()).arg("--qa").arg(&questions));
    assert!(stderr.contains("qa.jsonl") && stderr.contains("line 2"), "{stderr}");
    let (_, stderr) = fails(moec().arg("verify").arg(case.output()).arg("--source").arg(checkpoint("olmoe")));
    assert!(stderr.contains("was not built from"), "{stderr}");
    let (_, stderr) = fails(moec().arg("inspect").arg(case.folder.path()));
    assert!(stderr.contains("neither a bundle nor a checkpoint"), "{stderr}");
}

/// Seeds of fuzzing must be of this version, since one that is refused at its first byte is useless.
/// `MOEC_RENEW_SEEDS=1` writes new ones.
#[test]
fn fuzz_seeds_are_current() {
    let seeds = support::root().join("fuzz/seeds");
    if std::env::var_os("MOEC_RENEW_SEEDS").is_some() {
        let case = Case::new("olmoe");
        Setup { format: "q4", chunk: 4, batch: &[1], context: 16 }.write(&case.source, case.folder.path());
        ok(case.build().args(["--target", "x86-64-v3"]));
        fs::copy(case.output().join("plan.bin"), seeds.join("plan/olmoe")).unwrap();
    }
    let files = |kind: &str| -> Vec<PathBuf> {
        let found: Vec<_> = fs::read_dir(seeds.join(kind)).unwrap().map(|f| f.unwrap().path()).collect();
        assert!(!found.is_empty(), "no seeds of `{kind}`");
        found
    };
    for path in files("plan") {
        let plan = moec_ir::plan::Plan::decode(&fs::read(&path).unwrap());
        let plan = plan.unwrap_or_else(|e| panic!("{}: {e}; MOEC_RENEW_SEEDS=1 renews it", path.display()));
        moec_ir::verify::plan(&plan).unwrap();
    }
    for path in files("graph") {
        let graph = moec_ir::text::parse_module(&fs::read_to_string(&path).unwrap());
        let graph = graph.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        moec_ir::verify::module(&graph).unwrap();
    }
    for path in files("safetensors") {
        let bytes = fs::read(&path).unwrap();
        safetensors::SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }
}
