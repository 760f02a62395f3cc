//! Tests of bundles with QNN's library, its emulator, and onnxruntime.

use super::{Case, PHONE, Tiny, files};
use crate::support::{FAMILIES, distance, fails, list, logits_file, moec, ok};
use moec_testing::{ONNXRUNTIME, QNN};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Settings for few groups of experts, each with two sizes.
const MORE: &str = "[experts]\ngroup = 8\nsizes = 2\n";

/// The folder with the library, and a Python with onnxruntime, from the cache folder that `cargo xtask`
/// fills.
pub(crate) fn installed() -> Option<[(&'static str, PathBuf); 2]> {
    if !QNN.met_or_skip() || !ONNXRUNTIME.met_or_skip() {
        return None;
    }
    let named = std::env::var_os("MOEC_QNN_LIB").map(PathBuf::from);
    let library = named.or_else(|| {
        let lib = moec_testing::cache()?.join("qnn/lib");
        let python = lib.read_dir().ok()?.flatten().next()?.path();
        Some(python.join("site-packages/onnxruntime_qnn"))
    })?;
    Some([("MOEC_QNN_LIB", library), ("MOEC_ONNXRUNTIME", moec_testing::onnxruntime()?)])
}

/// A phone's bundle of `ferris-relu`, built with the library.
struct QnnBundle {
    case: Case,
    tools: [(&'static str, PathBuf); 2],
}

impl QnnBundle {
    fn new() -> Option<Self> {
        let tools = installed()?;
        let built = Self { case: Case::of("ferris-relu", 256, MORE), tools };
        assert_eq!(built.build("a.moec")["notes"], json!([]));
        Some(built)
    }

    fn moec(&self, subcommand: &str) -> Command {
        let mut command = self.case.moec(subcommand);
        command.envs(self.tools.iter().map(|(name, value)| (name, value)));
        command
    }

    fn build(&self, out: &str) -> Value {
        let mut command = self.moec("build");
        command.arg(&self.case.toml).args(["--target", PHONE, "--no-run", "--json", "-o"]);
        serde_json::from_slice(&ok(command.arg(self.case.path(out))).stdout).unwrap()
    }

    fn verify(&self) -> Value {
        let mut command = self.moec("verify");
        serde_json::from_slice(&ok(command.arg(self.case.path("a.moec")).arg("--json")).stdout).unwrap()
    }

    /// Error of `moec verify` on an invalid bundle.
    fn refused(&self) -> String {
        let (code, stderr) = fails(self.moec("verify").arg(self.case.path("a.moec")));
        assert_eq!(code, 1, "{stderr}");
        stderr
    }

    fn read(&self, file: &str) -> Vec<u8> {
        fs::read(self.case.path("a.moec").join(file)).unwrap()
    }

    /// See [`Case::forge`].
    fn forge(&self, file: &str, bytes: &[u8]) {
        self.case.forge("a.moec", file, bytes);
    }

    /// Path of the first artifact's file with this ending.
    fn first(&self, end: &str) -> String {
        let folder = self.case.path("a.moec/artifacts/layers.0.group.0.qnn");
        let mut names: Vec<String> =
            folder.read_dir().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        let name = names.iter().find(|name| name.ends_with(end)).unwrap();
        format!("artifacts/layers.0.group.0.qnn/{name}")
    }
}

/// Every network is executed by the emulator and by onnxruntime, the largest of a group also from its DLC.
/// The results are near those of the same weights in f32.
#[test]
fn bundles_have_contexts_and_dlc_that_compute() {
    let Some(built) = QnnBundle::new() else { return };
    let report = built.verify();
    assert_eq!(report.get("unverified"), None, "{report}");
    let mut of: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let functions = report["packages"].as_array().unwrap();
    for f in functions {
        for check in f["checks"].as_array().unwrap() {
            let (by, off) = (check["by"].as_str().unwrap(), check["share_of_spread"].as_f64().unwrap());
            assert!(off > 0.0 && off < 2e-3 && check["bound"] == 0.02, "{f}");
            of.entry(by).or_default().insert(f["package"].as_str().unwrap());
        }
        let names: Vec<&str> =
            f["checks"].as_array().unwrap().iter().map(|c| c["by"].as_str().unwrap()).collect();
        assert_eq!(names[..2], ["onnxruntime", "QNN's emulator"], "{f}");
    }
    let groups: BTreeSet<&str> = functions.iter().map(|f| f["package"].as_str().unwrap()).collect();
    assert!(functions.len() > groups.len(), "no group has two sizes: {report}");
    assert!(of.values().all(|packages| *packages == groups) && of.len() == 3, "{of:?}");

    // Two builds give the same bytes, in any folders.
    built.build("elsewhere.moec");
    let [a, b] = ["a.moec", "elsewhere.moec"].map(|name| files(&built.case.path(name).join("artifacts")));
    let ends = |end: &str| a.keys().filter(|path| path.to_string_lossy().ends_with(end)).count();
    assert_eq!((ends("context.bin"), ends(".dlc")), (groups.len(), groups.len()));
    let differ: Vec<_> =
        a.iter().filter(|(path, bytes)| b.get(*path) != Some(bytes)).map(|(p, _)| p).collect();
    assert!(differ.is_empty() && a.len() == b.len(), "{differ:?}");

    // The whole model gives the same results by QNN's emulator as by moec's emulation.
    let ids: Vec<u32> = (0..40).map(|i| i * 37 % 2000 + 1).collect();
    let logits = |emulate: &str| {
        let out = built.case.path("logits.safetensors");
        let mut command = built.moec("run");
        command.arg(emulate).arg(built.case.path("a.moec")).args(["logits", "--ids", &list(&ids), "--out"]);
        ok(command.arg(&out));
        logits_file(&out).1
    };
    let (moec, library) = (logits("--emulate"), logits("--emulate=library"));
    assert!(moec.len() == library.len() && moec.len() >= 40 * 2000, "{} and {}", moec.len(), library.len());
    let spread = moec.iter().fold(f32::MIN, |a, b| a.max(*b)) - moec.iter().fold(f32::MAX, |a, b| a.min(*b));
    let most = distance(&moec, &library);
    println!("logits on QNN's emulator and by moec's evaluator: {:.1e} of their spread apart", most / spread);
    assert!(most > 0.0 && most < 0.02 * spread, "{most} of {spread}");
    // The unit of a phone's `run`, in moec's own process, computes the same numbers.
    assert!(logits("--emulate=device") == library, "the unit and the emulator differ");
    let left = built.case.path("cache/qnn-device").read_dir().map(Iterator::count);
    assert_eq!(left.unwrap_or(0), 0, "what it has compiled is gone");
}

/// Executes networks of every family's checkpoint: groups of experts, dense networks, shared experts, heads.
#[test]
fn networks_of_every_family_compute_on_the_emulator() {
    let Some(tools) = installed() else { return };
    for model in moec_testing::every_nth(4, FAMILIES) {
        let experts = "[experts]\ngroup = 8\nsizes = 1\n[placement]\nexperts = \"npu\"\n";
        let built = Tiny::with(model, &[1], experts, tools.to_vec());
        let report = built.verify();
        let functions = report["packages"].as_array().unwrap();
        assert!(
            functions.iter().any(|f| f["package"].as_str().unwrap().contains("head")),
            "{model}: {report}"
        );
        let mut most = 0.0_f64;
        for f in functions {
            let checks = f["checks"].as_array().unwrap();
            let by = |name: &str| checks.iter().any(|c| c["by"] == name);
            assert!(by("QNN's emulator") && by("onnxruntime") && f["refused"] == false, "{model}: {f}");
            for check in checks {
                let off = check["share_of_spread"].as_f64().unwrap();
                assert!(off > 0.0 && off < 0.02, "{model}: {f}");
                most = most.max(off);
            }
        }
        println!("{model}: {} networks, {most:.1e} of their spread at most", functions.len());
    }
}

/// Changed artifacts with updated hashes are refused by name.
#[test]
fn artifacts_that_do_not_fit_are_refused() {
    let Some(built) = QnnBundle::new() else { return };
    let (context, dlc) = (built.first("context.bin"), built.first(".dlc"));
    let rows = built.first("rows.bin");
    let device = String::from_utf8(built.read("device.toml")).unwrap();
    let other = device.replace("soc = 57", "soc = 42").replace("arch = 75", "arch = 69");
    assert_ne!(other, device);
    let loud: Vec<u8> = built
        .read(&rows)
        .as_chunks::<4>()
        .0
        .iter()
        .flat_map(|b| (f32::from_le_bytes(*b) * 40.0).to_le_bytes())
        .collect();
    let half = |file: &str| {
        let bytes = built.read(file);
        bytes[..bytes.len() / 2].to_vec()
    };
    let second = context.replace("group.0", "group.1");
    let cases: [(&str, Vec<u8>, &[&str]); 6] = [
        (&context, half(&context), &["layers.0.group.0.qnn", "context.bin", "cannot be read"]),
        (&context, b"no context at all".to_vec(), &["context.bin", "cannot be read"]),
        (&context, built.read(&second), &["context.bin", "it has the graphs", "but the networks are"]),
        (&dlc, half(&dlc), &["layers.0.group.0.qnn", ".dlc", "cannot be read"]),
        (&rows, loud, &["saturates", "by QNN's emulator, is off by", "of its spread"]),
        ("device.toml", other.into_bytes(), &["context.bin", "for the chip of number 57, not for"]),
    ];
    for (file, bytes, expected) in cases {
        let right = built.read(file);
        built.forge(file, &bytes);
        let stderr = built.refused();
        assert!(expected.iter().all(|words| stderr.contains(words)), "{file}: {stderr}");
        built.forge(file, &right);
    }
    let report = built.verify();
    assert_eq!(report["verdict"], "right");
}

/// Without the library or with only half of it, everything else is built and verified, and one line reports
/// what is missing.
#[test]
fn missing_qnn_library_is_reported_without_failing_builds() {
    let case = Case::of("ferris-relu", 64, "[experts]\ngroup = 24\n");
    let run = |subcommand: &str, more: &[&str], lib: &Path| {
        let mut command = case.moec(subcommand);
        command.env("MOEC_QNN_LIB", lib).env("MOEC_ONNXRUNTIME", "/nowhere/python");
        let out = ok(command.args(more));
        let json: Value = serde_json::from_slice(&out.stdout).unwrap();
        (json, String::from_utf8(out.stderr).unwrap())
    };
    let (toml, bundle) = (case.toml.display().to_string(), case.path("a.moec").display().to_string());
    let build: [&str; 7] = [&toml, "--target", PHONE, "--no-run", "--json", "-o", &bundle];
    let empty = case.path("empty");
    fs::create_dir(&empty).unwrap();
    let fake = case.path("fake");
    fs::create_dir(&fake).unwrap();
    for name in ["libQnnHtp.so", "libQnnIr.so", "libQnnSystem.so"] {
        fs::write(fake.join(name), "no library").unwrap();
    }
    for (lib, why) in [
        (case.path("none"), "QNN is not installed: there is no `"),
        (empty, "has no `libQnnHtp.so`"),
        (fake, "libQnnHtp.so` cannot be loaded"),
    ] {
        let (built, stderr) = run("build", &build, &lib);
        let [note] = built["notes"].as_array().unwrap().as_slice() else { panic!("{built}") };
        let note = note.as_str().unwrap();
        assert!(
            note.starts_with("no context binaries and no DLC were written: ") && note.contains(why),
            "{note}"
        );
        assert!(
            note.contains("cargo xtask qnn") && !note.contains('\n') && stderr.contains(note),
            "{stderr}"
        );
        assert!(!files(&case.path("a.moec/artifacts")).keys().any(|p| p.ends_with("context.bin")));
        let (report, stderr) = run("verify", &[&bundle, "--json"], &lib);
        let unverified = report["unverified"].as_array().unwrap();
        assert!(unverified.len() == 2 && unverified[0].as_str().unwrap().contains(why), "{report}");
        assert!(unverified[1].as_str().unwrap().contains("/nowhere/python"), "{report}");
        assert!(unverified.iter().all(|what| stderr.contains(what.as_str().unwrap())), "{stderr}");
        assert_eq!(report["verdict"], "right");
    }
    let mut doctor = case.moec("doctor");
    let out = ok(doctor.env("MOEC_QNN_LIB", case.path("none")).arg("--json"));
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    let row = report["checks"].as_array().unwrap().iter().find(|c| c["name"] == "qnn").unwrap();
    assert_eq!(row["status"], "warning");
    assert!(row["found"].as_str().unwrap().contains("not installed"), "{row}");
    assert!(row["hint"].as_str().unwrap().contains("cargo xtask qnn"), "{row}");
    let (code, stderr) = fails(case.moec("run").arg("--emulate=library").arg(&bundle).arg("info"));
    assert!(
        code == 1 && stderr.contains("QNN is not installed") && stderr.contains("cargo xtask qnn"),
        "{stderr}"
    );
}

/// `doctor` reports the installed library, and a process that hangs is ended and named.
#[test]
fn qnn_library_is_found_and_hangs_time_out() {
    let Some(tools) = installed() else { return };
    let mut doctor = moec();
    doctor.env(tools[0].0, &tools[0].1).args(["doctor", "--json"]);
    let report: Value = serde_json::from_slice(&ok(&mut doctor).stdout).unwrap();
    let row = report["checks"].as_array().unwrap().iter().find(|c| c["name"] == "qnn").unwrap();
    assert_eq!(row["status"], "ok");
    assert!(row["found"].as_str().unwrap().contains("version v2.51"), "{row}");
    doctor.env("MOEC_QNN_SECONDS", "0");
    let report: Value = serde_json::from_slice(&ok(&mut doctor).stdout).unwrap();
    let row = report["checks"].as_array().unwrap().iter().find(|c| c["name"] == "qnn").unwrap();
    assert!(row["found"].as_str().unwrap().contains("did not load the library within 0 s"), "{row}");
    assert!(row["hint"].as_str().unwrap().contains("MOEC_QNN_SECONDS"), "{row}");
    doctor.env("MOEC_QNN_SECONDS", "soon");
    let report: Value = serde_json::from_slice(&ok(&mut doctor).stdout).unwrap();
    let row = report["checks"].as_array().unwrap().iter().find(|c| c["name"] == "qnn").unwrap();
    assert_eq!(row["found"], "`MOEC_QNN_SECONDS` is `soon`");
}

/// A device file that contradicts QNN's description of a chip is refused before anything is built.
#[test]
fn device_file_that_contradicts_its_chip_is_refused() {
    let case = tempfile::tempdir().unwrap();
    let text = String::from_utf8(ok(moec().args(["targets", PHONE])).stdout).unwrap();
    let (device, toml) = (case.path().join("other.toml"), case.path().join("model.toml"));
    for (from, to, expected) in [
        ("arch = 75", "arch = 69", "`unit.hexagon.arch`: chip 57 of QNN (SM8650) has architecture 75"),
        ("vtcm_mib = 8", "vtcm_mib = 16", "`unit.hexagon.vtcm_mib`: chip 57 of QNN (SM8650) has 8 MiB"),
    ] {
        assert!(text.contains(from), "{text}");
        fs::write(&device, text.replace(from, to)).unwrap();
        let (code, stderr) = fails(moec().arg("build").arg(&toml).arg("--target").arg(&device));
        assert!(code == 1 && stderr.contains(expected), "{stderr}");
    }
}
