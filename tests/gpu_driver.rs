//! A bundle on a GPU, with a fake driver that executes kernels on the host: by its own `run`, and by `moec
//! run`.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;
use moec_runtime::bundle::BundleReader;

use moec_backend::{GpuKernels as _, Tools};
use moec_bundle::read::Bundle;
use moec_cuda::Cuda;
use moec_ir::plan::{Builtin, Code};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Setup, checkpoint, clean, distance, expected, fails, list, logits_file, moec, ok, root};

/// Largest difference of any logit.
const TOLERANCE: f32 = 2e-3;

/// A folder in which the dynamic loader finds the fake driver.
fn driver(folder: &Path) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let library = own.parent().unwrap().join("libmoec_libcuda.so");
    assert!(library.is_file(), "cargo builds `{}` beside this test", library.display());
    let folder = folder.join("driver");
    fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink(library, folder.join("libcuda.so.1")).unwrap();
    folder
}

/// A bundle with its `run` and everything on the GPU that the GPU supports.
fn build(folder: &Path) -> Bundle {
    let setup = Setup { format: "f32", chunk: 20, batch: &[1], context: 96 };
    let toml = setup.write(&checkpoint("mixtral"), folder);
    let text = fs::read_to_string(&toml).unwrap();
    fs::write(&toml, format!("{text}[placement]\nattention = \"gpu\"\nexperts = \"gpu\"\n")).unwrap();
    let bundle = folder.join("b");
    let mut build = moec();
    build.args(["build", "--quiet", "--target"]).arg(root().join("targets/cuda/cuda.toml"));
    ok(build.arg(&toml).arg("-o").arg(&bundle));
    Bundle::open(&bundle).unwrap()
}

/// Commands that run a bundle with the fake driver.
struct Run<'a> {
    bundle: &'a Bundle,
    driver: &'a Path,
}

impl Run<'_> {
    fn command(&self, mut command: Command) -> Command {
        command.env("LD_LIBRARY_PATH", self.driver);
        command
    }

    /// The bundle's own `run`.
    fn alone(&self) -> Command {
        self.command(clean(Command::new(self.bundle.folder.join("run"))))
    }

    /// `moec run`.
    fn by_moec(&self) -> Command {
        let mut run = self.command(moec());
        run.arg("run").arg(&self.bundle.folder);
        run
    }

    /// Error if the driver refuses a call.
    fn refused(&self, variable: &str, value: &str, words: &[&str]) {
        for mut run in [self.alone(), self.by_moec()] {
            let (code, stderr) =
                fails(run.args(["generate", "--ids", "1,2,3", "-n", "2"]).env(variable, value));
            assert!(code == 1 && words.iter().all(|w| stderr.contains(w)), "{variable}={value}: {stderr}");
            assert!(stderr.contains("hint: "), "{stderr}");
        }
    }
}

/// The `run` of a build drives a GPU without moec, gives transformers' results, and names errors.
#[test]
fn run_drives_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let (bundle, driver) = (build(folder.path()), driver(folder.path()));
    let run = Run { bundle: &bundle, driver: &driver };
    let (out, log) = (folder.path().join("logits.safetensors"), folder.path().join("calls"));
    let want = expected(&checkpoint("mixtral"));
    for mut logits in [run.alone(), run.by_moec()] {
        ok(logits.args(["logits", "--ids", &list(&want.ids), "--out"]).arg(&out).env("MOEC_FAKE_LOG", &log));
        let worst = distance(&logits_file(&out).1, &want.logits);
        assert!(worst <= TOLERANCE, "a logit is off by {worst}");
        fs::remove_file(&out).unwrap();
    }
    let calls = fs::read_to_string(&log).unwrap();
    let prefill = bundle.plan.entries.iter().find(|e| e.kind.is_prefill()).unwrap();
    let launches = prefill.steps.iter().filter(|s| matches!(s.code, Code::Builtin(Builtin::Launch { .. })));
    let made = calls.lines().filter(|l| l.starts_with("cuLaunchKernel ")).count();
    // 48 tokens take three calls, and two programs made them.
    assert_eq!(made, 2 * 3 * launches.count(), "{calls}");
    // Machine code is tried first, if there is some; this driver only accepts text.
    let code = bundle.manifest.assembler.is_some();
    let loads: Vec<_> = calls.lines().filter(|l| l.starts_with("cuModuleLoadDataEx")).collect();
    let all = ["cuModuleLoadDataEx code", "cuModuleLoadDataEx text"];
    assert_eq!(loads, all[usize::from(!code)..].repeat(2));
    let prompt = want.greedy.len() - 24;
    let ids = list(&want.greedy[..prompt]);
    // The first of three decoded tokens launches its kernels one by one, the others launch a graph.
    for (graphs, launched) in [("on", 2), ("off", 0)] {
        fs::remove_file(&log).unwrap();
        let mut generate = run.alone();
        generate.args(["generate", "--ids", &ids, "-n", "4", "--json"]);
        let generated = ok(generate.env("MOEC_FAKE_LOG", &log).env("MOEC_CUDA_GRAPHS", graphs));
        let report: serde_json::Value = serde_json::from_slice(&generated.stdout).unwrap();
        let ids: Vec<u32> = serde_json::from_value(report["ids"].clone()).unwrap();
        assert_eq!(ids, want.greedy[prompt..prompt + 4]);
        let calls = fs::read_to_string(&log).unwrap();
        assert_eq!(calls.lines().filter(|l| *l == "cuGraphLaunch").count(), launched, "{calls}");
    }

    run.refused("MOEC_FAKE_GPUS", "0", &["the unit `gpu` cannot be used", "reports no GPU"]);
    run.refused("MOEC_FAKE_SM", "80", &["its kernels are for sm_90", "is of sm_80", "sm = \"sm_80\""]);
    run.refused("MOEC_FAKE_FREE", "4096", &["bytes of memory, and 4096 are free", "[placement]"]);
    let mismatch = ["cuInit gives CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "unsupported display driver"];
    run.refused("MOEC_FAKE_REFUSE", "cuInit=803", &mismatch);
    let stopped = ["CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)"];
    run.refused("MOEC_FAKE_REFUSE", "cuLaunchKernel=719", &stopped);
    // The first wait is for the zeros of the memory.
    run.refused("MOEC_FAKE_REFUSE", "cuStreamQuery=719", &["the unit `gpu` cannot be used", stopped[0]]);
    run.refused("MOEC_FAKE_REFUSE", "cuMemcpyHtoDAsync=719", &["a copy failed", stopped[0]]);
    run.refused("MOEC_FAKE_REFUSE", "cuMemcpyDtoHAsync=719", &[stopped[0]]);
}

/// Without a driver, `run` reports it, and `info` reports it in advance.
#[test]
fn run_reports_a_missing_gpu_driver() {
    let folder = tempfile::tempdir().unwrap();
    let (bundle, driver) = (build(folder.path()), driver(folder.path()));
    let run = Run { bundle: &bundle, driver: &driver };
    let missing = |gpus: &str| {
        let info = ok(run.alone().args(["info", "--json"]).env("MOEC_FAKE_GPUS", gpus));
        let info: serde_json::Value = serde_json::from_slice(&info.stdout).unwrap();
        info["target"]["missing_units"].clone()
    };
    assert_eq!([missing("1"), missing("0")], [serde_json::json!([]), serde_json::json!(["gpu"])]);
    // The kernels' file is checked like any other file.
    let path = bundle.folder.join(&bundle.plan.launches[0].artifact);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("sm_90", "sm_80")).unwrap();
    let (_, stderr) = fails(run.alone().args(["generate", "--ids", "1,2,3", "-n", "1"]));
    assert!(stderr.contains("gpu.ptx"), "{stderr}");
    fs::write(&path, text).unwrap();
    fs::remove_file(driver.join("libcuda.so.1")).unwrap();
    fs::write(driver.join("libcuda.so.1"), "no library").unwrap();
    run.refused("MOEC_FAKE_GPUS", "1", &["no NVIDIA driver found", "libcuda.so.1"]);
}

/// Machine code is the assembler's output for the text, and reproducible. Machine code of another text is
/// refused.
#[test]
fn machine_code_is_the_assembled_ptx() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("empty");
    let build = |name: &str, cache: Option<&Path>| {
        let bundle = folder.path().join(name);
        let setup = Setup { format: "f32", chunk: 4, batch: &[1], context: 16 };
        let toml = setup.write(&checkpoint("mixtral"), folder.path());
        let text = fs::read_to_string(&toml).unwrap();
        fs::write(&toml, format!("{text}[placement]\nexperts = \"gpu\"\n")).unwrap();
        let mut build = moec();
        build.args(["build", "--no-run", "--json", "--target"]).arg(root().join("targets/cuda/cuda.toml"));
        if let Some(cache) = cache {
            build.env("MOEC_CACHE", cache).env_remove("MOEC_PTXAS");
        }
        let built = ok(build.arg(&toml).arg("-o").arg(&bundle));
        let report: serde_json::Value = serde_json::from_slice(&built.stdout).unwrap();
        (Bundle::open(&bundle).unwrap(), report["notes"].to_string())
    };
    let (without, notes) = build("without", Some(&cache));
    assert!(notes.contains("cargo xtask cuda"), "{notes}");
    assert_eq!(without.manifest.assembler, None);
    let Some(ptxas) = moec_testing::ptxas() else {
        assert!(!moec_testing::PTXAS.met_or_skip());
        return;
    };
    let [(one, notes), (two, _)] = ["one", "two"].map(|name| build(name, None));
    assert!(!notes.contains("cargo xtask cuda"), "{notes}");
    assert_eq!(one.manifest, two.manifest);
    let by = one.manifest.assembler.as_deref().unwrap();
    assert!(by.starts_with("ptxas 1"), "{by}");
    ok(moec().args(["verify", "--static"]).arg(&one.folder));
    let path = Cuda.code_path(&one.plan.launches[0].artifact);
    assert!(one.plan.files.iter().any(|f| f.path == path));
    assert!(fs::read(one.folder.join(&path)).unwrap().starts_with(b"\x7fELF"));

    // Even with a correct hash, the code must equal the assembler's output for the text.
    let tools = folder.path().join("tools");
    fs::create_dir_all(tools.join("cuda")).unwrap();
    std::os::unix::fs::symlink(ptxas, tools.join("cuda/ptxas")).unwrap();
    let read = |by: Option<&str>, cache: &Path| {
        Cuda.read(&BundleReader::unchecked(&one.folder), &one.plan, 1, by, Tools { cache, moec: None })
    };
    assert_eq!(read(Some(by), &tools).unwrap().unverified, None);
    let unverified = |by, cache: &Path| read(by, cache).unwrap().unverified.unwrap();
    if std::env::var_os("MOEC_PTXAS").is_none() {
        assert!(unverified(Some(by), &cache).contains("not installed here"));
    }
    let mut code = fs::read(one.folder.join(&path)).unwrap();
    *code.last_mut().unwrap() ^= 1;
    fs::write(one.folder.join(&path), code).unwrap();
    let error = read(Some(by), &tools).unwrap_err().to_string();
    assert!(error.contains(&path) && error.contains(by), "{error}");
    assert!(unverified(Some("ptxas 1.2.3"), &tools).contains("is installed here"));
    fs::remove_file(one.folder.join(&path)).unwrap();
    let error = read(Some(by), &tools).unwrap_err().to_string();
    assert!(error.contains("is missing from the bundle"), "{error}");
}

/// `moec targets` queries the driver for a GPU of the target's generation.
#[test]
fn targets_report_whether_a_gpu_is_present() {
    let folder = tempfile::tempdir().unwrap();
    let driver = driver(folder.path());
    let targets = |gpus: &str, sm: &str| {
        let mut targets = moec();
        targets.env("LD_LIBRARY_PATH", &driver).env("MOEC_FAKE_GPUS", gpus).env("MOEC_FAKE_SM", sm);
        targets.arg("targets");
        targets
    };
    let described = |gpus: &str, sm: &str| -> serde_json::Value {
        let mut one = targets(gpus, sm);
        let out = ok(one.arg(root().join("targets/cuda/cuda.toml")).arg("--json"));
        serde_json::from_slice(&out.stdout).unwrap()
    };
    let here = described("1", "90");
    assert_eq!(
        (&here["runs_here"], here["missing_units"].as_array().unwrap().len()),
        (&true.into(), 0),
        "{here}"
    );
    for (gpus, sm, why) in [("0", "90", "reports no GPU"), ("1", "89", "is of sm_89, older than sm_90")] {
        let none = described(gpus, sm);
        let unit = &none["missing_units"][0];
        assert_eq!((&none["runs_here"], &unit["name"]), (&false.into(), &"gpu".into()), "{none}");
        assert!(unit["why"].as_str().unwrap().contains(why), "{none}");
    }
    let list = ok(&mut targets("0", "90")).stdout;
    let list = String::from_utf8(list).unwrap();
    for line in
        list.lines().filter(|l| ["a6000-xeon", "h100-x86", "rtx4080-i5"].iter().any(|t| l.starts_with(t)))
    {
        assert!(!line.contains("runs here"), "{line}");
    }
}

/// `profile-device` measures a GPU with the fake driver, and writes a device file that builds accept.
#[test]
fn a_gpu_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let (driver, log) = (driver(folder.path()), folder.path().join("calls"));
    let profile = |gpus: &str| {
        let mut profile = moec();
        profile.args(["profile-device", "--gpu", "--name", "made-up", "--threads", "1", "--json"]);
        profile.env("LD_LIBRARY_PATH", &driver).env("MOEC_FAKE_GPUS", gpus).env("MOEC_FAKE_LOG", &log);
        // Slow GPU figures, so that the smallest shapes are measured, since kernels are interpreted.
        profile.env("MOEC_FAKE_FREE", "10000000").arg(folder.path());
        profile
    };
    let (_, stderr) = fails(&mut profile("0"));
    assert!(stderr.contains("there is no GPU to measure") && stderr.contains("--gpu"), "{stderr}");
    let profiled = ok(&mut profile("1"));
    let report: serde_json::Value = serde_json::from_slice(&profiled.stdout).unwrap();
    let gpu = &report["gpu"];
    assert_eq!(gpu["name"], "A GPU that is made up");
    // Memory: two transfers per clock of 1024 bits. Arithmetic: two multiprocessors of 4096 operations per
    // clock.
    assert_eq!([&gpu["read_gb_per_s_stated"], &gpu["gops_stated"]], [&256.0, &8192.0]);
    let entries = gpu["experts"].as_array().unwrap();
    assert!(entries.len() > 3, "{gpu}");
    for (i, entry) in entries.iter().enumerate() {
        let of = |key: &str| entry[key].as_f64().unwrap();
        assert_eq!(of("rows"), f64::from(1 << i));
        let weights = 3.0 * gpu["expert"][0].as_f64().unwrap() * gpu["expert"][1].as_f64().unwrap();
        let gops = 2.0 * of("rows") * weights / (of("ms") * 1e6);
        assert!((gops / of("gops") - 1.0).abs() < 1e-9, "{entry}");
    }
    let calls = fs::read_to_string(&log).unwrap();
    for (call, least) in [
        ("cuLaunchKernel moec_scale", 2000),
        ("cuLaunchKernel moec_linear", 3),
        ("cuLaunchKernel moec_expert_gate_up", 3 * entries.len()),
        ("cuLaunchKernel moec_expert_down", 3 * entries.len()),
        ("cuMemcpyHtoDAsync 4194304", 65),
        ("cuMemcpyDtoHAsync 4194304", 65),
        ("cuMemcpyHtoDAsync 4", 50),
    ] {
        let made = calls.lines().filter(|l| l.starts_with(call)).count();
        assert!(made >= least, "{made} of `{call}`, not {least}");
    }
    // Many rows are multiplied on tensor cores.
    assert!(calls.contains("_as_bf16_"), "{calls}");

    let file = folder.path().join("made-up.toml");
    let text = fs::read_to_string(&file).unwrap();
    let device = moec_device::Device::parse(&text, &file).unwrap();
    let [cpu, gpu] = device.units.as_slice() else { panic!("{text}") };
    assert_eq!((gpu.backend.as_deref(), gpu.sm.as_deref()), (Some("cuda"), Some("sm_90")));
    assert_eq!(gpu.matmul.len(), entries.len());
    assert!(gpu.matmul.iter().all(|t| t.source.contains("A GPU that is made up") && t.ms > 0.0));
    assert!(gpu.dispatch_cost_us.as_ref().unwrap().value > 0.0);
    let ends: Vec<_> = device.links.iter().map(|l| (Some(&*l.from), Some(&*l.to))).collect();
    let [home, away] = [cpu, gpu].map(|unit| unit.memory.as_deref());
    assert_eq!(ends, [(home, away), (away, home)]);
    assert!(device.links.iter().all(|l| l.gb_per_s > 0.0 && l.latency_us.unwrap() > 0.0));
    let setup = Setup { format: "bf16", chunk: 4, batch: &[1], context: 16 };
    let toml = setup.write(&checkpoint("olmoe"), folder.path());
    let mut build = moec();
    ok(build
        .args(["build", "--no-run", "--quiet", "--target"])
        .arg(&file)
        .arg(&toml)
        .arg("-o")
        .arg(folder.path().join("b")));
}
