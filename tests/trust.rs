//! Origin and checks of a bundle: the manifest's hash, signatures, and `moec verify --static`, which executes
//! nothing.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails by panicking, and says what it skips"
)]

use crate::support;

use moec_base::hashing::{hex, sha256};
use moec_ir::plan::Plan;
use moec_testing::MINISIGN;
use object::{Object as _, ObjectSection as _, ObjectSymbol as _};
use serde_json::Value;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use support::{Setup, built, checkpoint, fails, moec, ok, tree};
use tempfile::TempDir;

/// A bundle of a tiny model, in a folder of its own.
struct Case(TempDir);

impl Case {
    fn new(format: &str, target: &str) -> Self {
        let case = Self(tempfile::tempdir().unwrap());
        built(&case.toml(format), &["--target", target], &case.at("b"));
        case
    }

    fn toml(&self, format: &str) -> PathBuf {
        let setup = Setup { format, chunk: 16, batch: &[1], context: 64 };
        setup.write(&checkpoint("qwen3_moe"), self.0.path())
    }

    fn build(&self, format: &str, target: &str) -> Value {
        let mut build = moec();
        build
            .arg("build")
            .arg(self.toml(format))
            .args(["--no-run", "--json", "--target", target, "-o"])
            .arg(self.at("b"));
        json(&mut build)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `moec SUBCOMMAND BUNDLE …`
    fn moec(&self, subcommand: &str, more: &[&str]) -> Command {
        let mut command = moec();
        command.current_dir(self.0.path()).args([subcommand, "b"]).args(more);
        command
    }

    /// `moec sign …`
    fn sign(&self, args: &[&str]) -> Command {
        let mut command = moec();
        command.current_dir(self.0.path()).arg("sign").args(args);
        command
    }

    fn manifest(&self) -> Value {
        serde_json::from_slice(&fs::read(self.at("b/manifest.json")).unwrap()).unwrap()
    }

    /// Replaces a file, as an attacker with write access would: hashes in plan and manifest are updated.
    fn forge(&self, file: &str, bytes: &[u8]) {
        fs::write(self.at("b").join(file), bytes).unwrap();
        let mut plan = Plan::decode(&fs::read(self.at("b/plan.bin")).unwrap()).unwrap();
        for f in plan.files.iter_mut().filter(|f| f.path == file) {
            (f.bytes, f.sha256) = (bytes.len() as u64, sha256(bytes));
        }
        if file != "plan.bin" {
            fs::write(self.at("b/plan.bin"), plan.encode().unwrap()).unwrap();
        }
        let mut manifest = self.manifest();
        for name in [file, "plan.bin"] {
            let bytes = fs::read(self.at("b").join(name)).unwrap();
            manifest["files"][name]["bytes"] = bytes.len().into();
            manifest["files"][name]["sha256"] = hex(&sha256(&bytes)).into();
        }
        fs::write(self.at("b/manifest.json"), manifest.to_string()).unwrap();
    }
}

fn json(command: &mut Command) -> Value {
    serde_json::from_slice(&ok(command).stdout).unwrap()
}

fn text(command: &mut Command) -> String {
    let output = ok(command);
    String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
}

#[test]
fn manifest_hash_is_reported_by_every_command() {
    let case = Case(tempfile::tempdir().unwrap());
    let built = case.build("bf16", "native");
    let right = hex(&sha256(&fs::read(case.at("b/manifest.json")).unwrap()));
    assert_eq!(built["manifest_sha256"], *right);
    let as_json: [(&str, &[&str]); 4] = [
        ("inspect", &["--json"]),
        ("run", &["info", "--json"]),
        ("verify", &["--json"]),
        ("verify", &["--static", "--json"]),
    ];
    for (subcommand, more) in as_json {
        assert_eq!(
            json(&mut case.moec(subcommand, more))["manifest_sha256"],
            *right,
            "{subcommand} {more:?}"
        );
        let more: Vec<&str> = more.iter().copied().filter(|a| *a != "--json").collect();
        let output = text(&mut case.moec(subcommand, &more));
        assert!(output.contains(&format!("SHA-256 {right}")), "{subcommand} {more:?}: {output}");
    }
    let again =
        text(moec().arg("build").arg(case.at("model.toml")).args(["--no-run", "-o"]).arg(case.at("b")));
    assert!(again.contains(&format!("SHA-256 {right}")), "{again}");
}

#[test]
fn signatures() {
    let case = Case::new("bf16", "native");
    let before = tree(&case.at("b"));
    let (_, stderr) = fails(&mut case.moec("verify", &["--static", "--key", "me.pub"]));
    assert!(stderr.contains("me.pub"), "{stderr}");

    for args in [&["b"][..], &["b", "--key", "nowhere"]] {
        let (_, stderr) = fails(&mut case.sign(args));
        assert!(stderr.contains("`moec sign --new-key FILE` creates a key pair"), "{stderr}");
    }
    let pair = json(&mut case.sign(&["--new-key", "me", "--json"]));
    assert_eq!(pair["public_key"], "me.pub");
    let mode = fs::metadata(case.at("me")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "others can read the secret key");
    let secret = fs::read(case.at("me")).unwrap();
    let (code, stderr) = fails(&mut case.sign(&["--new-key", "me"]));
    assert!(
        code == 2 && stderr.contains("`me` exists") && fs::read(case.at("me")).unwrap() == secret,
        "{stderr}"
    );
    ok(&mut case.sign(&["--new-key", "other"]));

    // First unsigned, then signed; signing changes nothing else in the bundle.
    let with = |key: &str| case.moec("verify", &["--static", "--key", key]);
    let (code, stderr) = fails(&mut with("me.pub"));
    assert!(code == 1 && stderr.contains("`b` is not signed") && stderr.contains("hint: "), "{stderr}");
    assert!(text(&mut case.moec("verify", &["--static"])).contains("signature    none"));
    let signed = json(&mut case.sign(&["b", "--key", "me", "--json"]));
    assert_eq!(signed["key_id"], pair["key_id"]);
    let mut after = tree(&case.at("b"));
    after.retain(|(name, _)| name != "manifest.json.minisig");
    assert!(after == before, "a signature changed the bundle");

    let id = pair["key_id"].as_str().unwrap();
    assert!(text(&mut with("me.pub")).contains(&format!("good, of key {id}")));
    let report = json(&mut case.moec("verify", &["--key", "me.pub", "--json"]));
    assert_eq!((&report["signature"]["checked"], &report["signature"]["key_id"]), (&true.into(), &id.into()));
    assert_eq!(json(&mut case.moec("inspect", &["--json"]))["signature"]["checked"], false);
    assert!(text(&mut case.moec("inspect", &[])).contains(&format!("of key {id}, not checked")));
    let run = |key: &str| {
        let mut run = moec();
        run.current_dir(case.0.path()).args(["run", "--key", key, "b", "generate", "--ids", "1", "-n", "1"]);
        run
    };
    ok(&mut run("me.pub"));

    // Another key; a file that is not a key.
    for mut command in [with("other.pub"), run("other.pub")] {
        let (code, stderr) = fails(&mut command);
        assert!(code == 1 && stderr.contains("signed with another key") && stderr.contains(id), "{stderr}");
    }
    for key in ["me", "model.toml", "b/plan.bin"] {
        let (_, stderr) = fails(&mut with(key));
        assert!(
            stderr.contains(key) && (stderr.contains("not a public key") || stderr.contains("not text")),
            "{stderr}"
        );
    }
    let (_, stderr) = fails(&mut case.sign(&["b", "--key", "me.pub"]));
    assert!(stderr.contains("`me.pub` is not a secret key"), "{stderr}");

    // A changed file, with an updated manifest and without.
    let plan = fs::read(case.at("b/plan.txt")).unwrap();
    let manifest = fs::read(case.at("b/manifest.json")).unwrap();
    case.forge("plan.txt", b"another plan");
    ok(&mut case.moec("verify", &["--static"]));
    for mut command in [with("me.pub"), run("me.pub")] {
        let (code, stderr) = fails(&mut command);
        assert!(code == 1 && stderr.contains("b/manifest.json` was changed after it was signed"), "{stderr}");
    }
    fs::write(case.at("b/manifest.json"), &manifest).unwrap();
    for mut command in [with("me.pub"), run("me.pub"), case.sign(&["b", "--key", "me"])] {
        let (_, stderr) = fails(&mut command);
        assert!(stderr.contains("plan.txt` was changed"), "{stderr}");
    }
    fs::write(case.at("b/plan.txt"), &plan).unwrap();
    ok(&mut with("me.pub"));
    // If a signature is required, weights are hashed completely before anything runs.
    let weights = fs::read(case.at("b/weights/experts.bin")).unwrap();
    let mut changed = weights.clone();
    *changed.last_mut().unwrap() ^= 1;
    fs::write(case.at("b/weights/experts.bin"), changed).unwrap();
    let (_, stderr) = fails(&mut run("me.pub"));
    assert!(stderr.contains("experts.bin` was changed"), "{stderr}");
    fs::write(case.at("b/weights/experts.bin"), weights).unwrap();

    // An unsigned bundle.
    fs::write(case.at("b/artifacts/extra"), "x").unwrap();
    let (_, stderr) = fails(&mut with("me.pub"));
    assert!(stderr.contains("`artifacts/extra`") && stderr.contains("does not cover"), "{stderr}");
    assert!(text(&mut case.moec("verify", &[])).contains("`artifacts/extra`"), "a stranger is not said");
    fs::remove_file(case.at("b/artifacts/extra")).unwrap();

    // An invalid signature, truncated ones of every length, and one for another manifest.
    let path = case.at("b/manifest.json.minisig");
    let whole = fs::read(&path).unwrap();
    for cut in [0, 1, 20, 60, 100, 150, whole.len() - 20] {
        fs::write(&path, &whole[..cut]).unwrap();
        let (code, stderr) = fails(&mut with("me.pub"));
        assert!(code == 1 && stderr.contains("manifest.json"), "{cut}: {stderr}");
    }
    fs::write(&path, whole).unwrap();
    ok(&mut with("me.pub"));
    // Signed bundles are replaced like others, and the signature is removed with its bundle.
    case.build("bf16", "native");
    assert!(tree(&case.at("b")) == before);
}

/// A password-protected key of minisign works; the password is read from standard input.
#[test]
fn a_key_with_a_password() {
    let case = Case::new("bf16", "native");
    let pair = minisign::KeyPair::generate_encrypted_keypair(Some("open sesame".into())).unwrap();
    fs::write(case.at("k"), pair.sk.to_box(None).unwrap().to_string()).unwrap();
    fs::write(case.at("k.pub"), pair.pk.to_box().unwrap().to_string()).unwrap();
    for (password, good) in [("open sesame\n", true), ("wrong\n", false)] {
        let mut sign = case.sign(&["b", "--key", "k"]);
        let mut child =
            sign.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(password.as_bytes()).unwrap();
        let done = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.success(), good, "{stderr}");
        assert!(good || stderr.contains("password"), "{stderr}");
    }
    ok(&mut case.moec("verify", &["--static", "--key", "k.pub"]));
}

/// Keys and signatures are compatible with minisign in both directions.
#[test]
fn keys_and_signatures_work_with_minisign() {
    if !MINISIGN.met_or_skip() {
        return;
    }
    let case = Case::new("bf16", "native");
    let minisign = |args: &[&str]| {
        let mut command = Command::new("minisign");
        command.current_dir(case.0.path()).args(args).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().map(|s| s.success())
    };
    ok(&mut case.sign(&["--new-key", "ours"]));
    ok(&mut case.sign(&["b", "--key", "ours"]));
    assert!(minisign(&["-V", "-p", "ours.pub", "-m", "b/manifest.json"]).unwrap());
    assert!(minisign(&["-G", "-W", "-p", "theirs.pub", "-s", "theirs"]).unwrap());
    assert!(minisign(&["-S", "-s", "theirs", "-m", "b/manifest.json"]).unwrap());
    ok(&mut case.moec("verify", &["--static", "--key", "theirs.pub"]));
}

/// Kernels were replaced, and hashes updated. They must not run unless that is requested.
#[test]
#[cfg(target_arch = "x86_64")]
fn static_verification_executes_nothing() {
    let case = Case::new("bf16", "native");
    let path = case.at("b/artifacts/kernels.o");
    let mut code = fs::read(&path).unwrap();
    let traps: Vec<usize> = {
        let file = object::File::parse(&*code).unwrap();
        let start = |s: &object::Symbol<'_, '_>| {
            let section = file.section_by_index(s.section_index()?).ok()?;
            Some((section.file_range()?.0 + s.address() - section.address()) as usize)
        };
        let all = file.symbols().filter(|s| s.is_definition() && s.kind() == object::SymbolKind::Text);
        all.filter_map(|s| start(&s)).collect()
    };
    assert!(!traps.is_empty());
    for at in traps {
        // `ud2`: a thread that reaches it ends with SIGILL.
        code[at..at + 2].copy_from_slice(&[0x0f, 0x0b]);
    }
    case.forge("artifacts/kernels.o", &code);
    let report = json(&mut case.moec("verify", &["--static", "--json"]));
    assert_eq!(report["executed"], false);
    assert!(report["kernels"].as_u64().unwrap() > 0 && report["files"].as_u64().unwrap() > 10, "{report}");
    let run = support::finish(&mut case.moec("verify", &[]));
    assert_eq!(
        run.status.code(),
        None,
        "the forged code was not executed by `verify`, so this test shows nothing"
    );
}

/// Bundles for any machine can be verified statically, and problems are reported.
#[test]
fn static_verification_reads_everything() {
    for target in ["x86-64-v3", "neoverse-v2", "apple-m2"] {
        let case = Case::new("q4", target);
        let source = checkpoint("qwen3_moe");
        let output = text(case.moec("verify", &["--static", "--source"]).arg(&source));
        assert!(
            output.contains("are those of the checkpoint") && output.contains("nothing was executed"),
            "{output}"
        );
        let refused = |words: &[&str]| {
            let (code, stderr) = fails(case.moec("verify", &["--static", "--source"]).arg(&source));
            assert_eq!(code, 1);
            for word in words {
                assert!(stderr.contains(word), "{target}: `{word}`: {stderr}");
            }
        };
        let weights = fs::read(case.at("b/weights/dense.bin")).unwrap();
        let mut changed = weights.clone();
        let last = changed.iter().rposition(|b| *b != 0).unwrap();
        changed[last] ^= 0x41;
        case.forge("weights/dense.bin", &changed);
        refused(&["is not the checkpoint's", "numbers differ"]);
        ok(&mut case.moec("verify", &["--static"]));
        case.forge("weights/dense.bin", &weights);

        let code = fs::read(case.at("b/artifacts/kernels.o")).unwrap();
        case.forge("artifacts/kernels.o", &code[..code.len() / 2]);
        refused(&["kernels.o` is not the plan's object code"]);
        let other = if target == "neoverse-v2" { "x86-64-v3" } else { "neoverse-v2" };
        case.forge(
            "artifacts/kernels.o",
            &fs::read(Case::new("q4", other).at("b/artifacts/kernels.o")).unwrap(),
        );
        refused(&["kernels.o` is not the plan's object code", "but the plan is for"]);
        case.forge("artifacts/kernels.o", &code);

        let plan = fs::read(case.at("b/plan.bin")).unwrap();
        let mut other = Plan::decode(&plan).unwrap();
        other.kernels[0].symbol = "somebody_elses".into();
        case.forge("plan.bin", &other.encode().unwrap());
        refused(&["it has no kernel `somebody_elses`"]);
        case.forge("plan.bin", &plan);

        let graph = fs::read(case.at("b/artifacts/graph.moe")).unwrap();
        case.forge("artifacts/graph.moe", &graph[..graph.len() / 2]);
        refused(&["graph.moe` is not a graph"]);
        case.forge("artifacts/graph.moe", &graph);
        fs::write(case.at("b/weights/extra"), "x").unwrap();
        refused(&["`weights/extra`"]);
        fs::remove_file(case.at("b/weights/extra")).unwrap();
        ok(&mut case.moec("verify", &["--static"]));
    }
}

/// The word "untrusted" was once used for bundles that were executed nevertheless.
#[test]
fn pages_and_help_state_what_trust_means() {
    let read = |name: &str| fs::read_to_string(support::root().join(name)).unwrap();
    let help = text(moec().args(["verify", "--help"]));
    let pages = ["README.md", "docs/trust.md", "ARCHITECTURE.md"].map(|name| (name, read(name)));
    for (what, text) in pages.into_iter().chain([("help", help)]) {
        let words: Vec<&str> = text.split_whitespace().collect();
        let text = words.join(" ");
        for sentence in ["bundle is a program", "that you do not trust", "not against malice"] {
            assert!(text.contains(sentence), "{what} does not say `{sentence}`");
        }
    }
}
