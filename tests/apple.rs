//! Bundles for Macs: their object code, linking on a Mac, and the messages on other machines.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_ir::plan::Plan;
use object::read::macho::{LoadCommandVariant, MachHeader as _, MachOFile64};
use object::{Architecture, Endianness, FileKind, Object as _, ObjectKind, ObjectSymbol as _};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use support::{Setup, fails, ferris, moec, ok, tree};

const TRIPLE: &str = "arm64-apple-macosx15.0.0";

static PROFILE: OnceLock<Vec<u8>> = OnceLock::new();

/// ferris with a profile, and the unit of the placeable parts.
struct Case {
    folder: tempfile::TempDir,
    toml: PathBuf,
}

impl Case {
    fn new(unit: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let setup = Setup { format: "bf16", chunk: 64, batch: &[1], context: 128 };
        let case = Self { toml: setup.write(&ferris(), folder.path()), folder };
        // All cases share one profile, which the first case records.
        let profile = PROFILE.get_or_init(|| {
            let mut calibrate = case.moec("calibrate");
            calibrate.arg(&case.toml).arg("--text").arg(ferris().join("eval/calibration.txt"));
            ok(calibrate.args(["--tokens", "1024", "--window", "128", "-o"]).arg(case.path("a.trace")));
            fs::read(case.path("a.trace")).unwrap()
        });
        fs::write(case.path("a.trace"), profile).unwrap();
        let more = format!(
            "[calibrate]\nprofile = \"a.trace\"\n[placement]\nattention = \"{unit}\"\nexperts = \"{unit}\"\n"
        );
        fs::write(&case.toml, fs::read_to_string(&case.toml).unwrap() + &more).unwrap();
        case
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A moec command without access to Python, compilers or other programs, and with an empty cache.
    fn moec(&self, subcommand: &str) -> Command {
        let mut command = moec();
        command.env("MOEC_CACHE", self.path("cache")).env("PATH", self.path("nothing"));
        for name in ["MOEC_COREML_HELPER", "MOEC_COREML_PYTHON", "CARGO", "RUSTC"] {
            command.env_remove(name);
        }
        command.env("MOEC_THREADS", "1").arg(subcommand);
        command
    }

    fn build(&self, target: &str, out: &str) -> Command {
        let mut command = self.moec("build");
        command.arg(&self.toml).args(["--quiet", "--no-run", "--target", target, "-o"]).arg(self.path(out));
        command
    }
}

/// Oldest version of macOS that an object supports, in Apple's encoding `0xMMMMmmpp`.
fn oldest_system(file: &MachOFile64<'_, Endianness>) -> Option<u32> {
    let endian = file.endian();
    let mut commands = file.macho_header().load_commands(endian, file.data(), 0).unwrap();
    while let Some(command) = commands.next().unwrap() {
        if let LoadCommandVariant::BuildVersion(version) = command.variant().unwrap() {
            assert_eq!(version.platform.get(endian), object::macho::PLATFORM_MACOS);
            return Some(version.minos.get(endian));
        }
    }
    None
}

#[test]
fn mac_kernels_are_one_mach_o_object() {
    let case = Case::new("cpu");
    for out in ["a.moec", "b.moec"] {
        ok(&mut case.build("m2-ultra", out));
    }
    let bundle = case.path("a.moec");
    assert!(tree(&bundle) == tree(&case.path("b.moec")), "two builds differ");

    let bytes = fs::read(bundle.join("artifacts/kernels.o")).unwrap();
    let file = MachOFile64::<Endianness>::parse(&*bytes).unwrap();
    let is = (FileKind::parse(&*bytes).unwrap(), file.architecture(), file.kind());
    assert_eq!(is, (FileKind::MachO64, Architecture::Aarch64, ObjectKind::Relocatable));
    assert_eq!(oldest_system(&file), Some(15 << 16));

    let plan = Plan::decode(&fs::read(bundle.join("plan.bin")).unwrap()).unwrap();
    assert_eq!((plan.target.name.as_str(), plan.target.triple.as_str()), ("m2-ultra", TRIPLE));
    // C names have a leading underscore on macOS.
    let name = |s: object::read::macho::MachOSymbol64<'_, '_, Endianness>| {
        s.name().unwrap().strip_prefix('_').unwrap().to_owned()
    };
    let (defined, undefined): (Vec<_>, Vec<_>) =
        file.symbols().filter(|s| s.is_global() || s.is_undefined()).partition(|s| !s.is_undefined());
    let defined: BTreeSet<String> = defined.into_iter().map(name).collect();
    let kernels: BTreeSet<String> = plan.kernels.iter().map(|k| k.symbol.clone()).collect();
    assert_eq!(defined, kernels);
    for symbol in undefined.into_iter().map(name) {
        assert!(["memcpy", "memmove", "memset", "bzero"].contains(&symbol.as_str()), "wants `{symbol}`");
    }
}

/// A fake `cargo` that prints its arguments and writes a program.
const CARGO: &str = r#"#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in --target-dir) folder=$2 ;; esac
    shift
done
mkdir -p "$folder/release"
printf '%s\n' "$MACOSX_DEPLOYMENT_TARGET" "$PWD" "$folder" > "$folder/release/moec-runner"
"#;

#[test]
fn run_for_a_mac_is_built_there_and_refused_elsewhere() {
    let case = Case::new("cpu");
    ok(&mut case.build("m2-ultra", "a.moec"));
    let bundle = case.path("a.moec");
    for subcommand in [&["info"][..], &["generate", "--ids", "1,2", "-n", "1"]] {
        let (code, stderr) = fails(case.moec("run").arg(&bundle).args(subcommand));
        assert_eq!(code, 1, "{stderr}");
        assert!(stderr.contains(TRIPLE) && stderr.contains(std::env::consts::ARCH), "{stderr}");
        assert!(stderr.contains("hint:") && stderr.contains("sh runner/build.sh"), "{stderr}");
    }

    // The script calls cargo in the runner's folder for the right system, and leaves no files but `run`.
    let cargo = case.path("bin/cargo");
    fs::create_dir(case.path("bin")).unwrap();
    fs::write(&cargo, CARGO).unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    let before = tree(&bundle);
    let path = format!("{}:{}", case.path("bin").display(), std::env::var("PATH").unwrap());
    ok(Command::new("sh").arg("runner/build.sh").current_dir(&bundle).env("PATH", path));
    let arguments = fs::read_to_string(bundle.join("run")).unwrap();
    let lines: Vec<&str> = arguments.lines().collect();
    let runner = fs::canonicalize(bundle.join("runner")).unwrap();
    assert_eq!((lines[0], Path::new(lines[1])), ("15.0", &*runner));
    assert!(!Path::new(lines[2]).exists(), "{arguments}");
    fs::remove_file(bundle.join("run")).unwrap();
    assert!(before == tree(&bundle), "the script leaves more than `run`");
}

#[test]
fn only_building_for_the_neural_engine_needs_python() {
    let case = Case::new("npu");
    let (code, stderr) = fails(&mut case.build("m2-ultra", "a.moec"));
    let helper = case.path("cache/coreml/bin/moec-coreml");
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains(&*helper.to_string_lossy()) && stderr.contains("hint:"), "{stderr}");
    assert!(stderr.contains("`cargo xtask coreml`") && stderr.contains("MOEC_COREML_HELPER"), "{stderr}");
    assert!(!case.path("a.moec").exists());

    // Without other programs, the same moec builds for this machine and runs the result.
    ok(&mut case.build("native", "b.moec"));
    ok(case.moec("run").arg(case.path("b.moec")).args(["generate", "--ids", "1,2", "-n", "1"]));

    // Missing tools are reported before the build.
    let doctor = case.moec("doctor").arg("--json").output().unwrap();
    let report: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let check = |name: &str| {
        let found = report["checks"].as_array().unwrap().iter().find(|c| c["name"] == name);
        found.unwrap_or_else(|| panic!("no check `{name}` in {report}")).clone()
    };
    let core_ml = check("core ml");
    assert_eq!(core_ml["status"], "warning", "{report}");
    let hint = core_ml["hint"].as_str().unwrap();
    assert!(hint.contains("cargo xtask coreml") && hint.contains("m2-ultra"), "{hint}");
    assert!(core_ml["found"].as_str().unwrap().contains("moec-coreml"), "{report}");
    let mac = check("aarch64-apple-darwin");
    assert!(mac["found"].as_str().unwrap().contains("cargo xtask check-apple"), "{report}");
}
