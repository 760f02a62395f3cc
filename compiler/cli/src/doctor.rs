//! `moec doctor`: checks this machine for the requirements of moec.

use super::{output, targets};
use moec_base::cache_dir;
use moec_base::{Result, disk, human, tools};
use moec_bundle::link;
use moec_bundle::toolchain::{
    CROSS_TARGETS, CrossTarget, MAC_SCRIPT, RUST, Toolchain, has_std, own_rustc, parsed,
};
use moec_device::{BUILT_IN, Device, is_host};
use moec_targets::backends::BACKENDS;
use serde_json::json;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// Free space below which builds are likely to fail.
const LITTLE_SPACE: u64 = 4 << 30;

/// Check this machine for required and optional dependencies
///
/// Fails if a requirement of builds is missing.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Ok,
    /// A feature is missing or limited; builds work.
    Warn,
    /// Builds fail.
    Fail,
}

impl Status {
    const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warning",
            Self::Fail => "failed",
        }
    }
}

/// Result of a check: status, finding and remedy.
struct CheckResult(Status, String, String);

impl CheckResult {
    fn new(status: Status, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self(status, what.into(), hint.into())
    }
}

/// A check.
type Check = (&'static str, fn() -> CheckResult);

/// Every check.
const CHECKS: &[Check] = &[
    ("moec", || {
        let carries = if link::is_prebuilt() { "with" } else { "without" };
        let what =
            format!("version {}, {carries} a precompiled runtime for `run`", env!("CARGO_PKG_VERSION"));
        CheckResult::new(Status::Ok, what, "")
    }),
    ("llvm", || CheckResult::new(Status::Ok, format!("version {}, linked in", moec_cpu::llvm_version()), "")),
    ("cpu", cpu),
    ("rustc", || rust("RUSTC", "rustc")),
    ("cargo", || rust("CARGO", "cargo")),
    ("linker", linker),
    ("cache", cache_folder),
    ("disk", space),
];

/// Prints the results of all checks. The exit code is a failure if builds cannot work.
///
/// # Errors
/// Fails if stdout cannot be written.
pub fn run(args: &Args) -> Result<ExitCode> {
    let mut found: Vec<_> = CHECKS.iter().map(|(name, check)| (*name, check())).collect();
    found.extend(backends());
    found.extend((!cfg!(target_os = "macos")).then(|| (MAC, mac())));
    found.extend(CROSS_TARGETS.iter().filter(|c| !is_host(c.triple)).map(|c| (c.triple, cross(c))));
    let ok = found.iter().all(|(_, CheckResult(status, ..))| *status != Status::Fail);
    if args.json {
        let checks: Vec<_> = found
            .iter()
            .map(|(name, CheckResult(status, what, hint))| {
                json!({"name": name, "status": status.name(), "found": what, "hint": (!hint.is_empty()).then_some(hint)})
            })
            .collect();
        output::json(&json!({"ok": ok, "checks": checks}))?;
    } else {
        let rows: Vec<_> = found
            .iter()
            .map(|(name, CheckResult(status, what, _))| {
                vec![(*name).to_owned(), status.name().into(), what.clone()]
            })
            .collect();
        let mut text = output::table(&rows);
        for (name, CheckResult(status, _, hint)) in &found {
            if *status != Status::Ok {
                text.extend(["\n", name, ": ", hint]);
            }
        }
        output::data(&text)?;
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Targets that this CPU runs.
fn cpu() -> CheckResult {
    let here: Vec<_> = BUILT_IN
        .iter()
        .filter_map(|(name, _)| Device::find(name).ok())
        .filter(|d| targets::runs_here(d).unwrap_or(false))
        .map(|d| d.name)
        .collect();
    CheckResult::new(Status::Ok, format!("{}, runs {}", std::env::consts::ARCH, here.join(", ")), "")
}

/// First line of a tool's output for `--version`.
fn version(tool: &str) -> Option<String> {
    let out = Command::new(tool).arg("--version").output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&out.stdout).lines().next().unwrap_or_default().to_owned())
}

/// `rustc` or `cargo`, of the version that `run` needs.
fn rust(variable: &str, tool: &str) -> CheckResult {
    let hint = if link::is_prebuilt() {
        "required only for `--run-from-source` and for `run` on other machines: Rust 1.95 or later (https://rustup.rs)"
    } else {
        "`run` requires Rust 1.95 or later (https://rustup.rs); `moec build --no-run` works without it"
    };
    let tool = std::env::var(variable).unwrap_or_else(|_| tool.to_owned());
    let Some(line) = version(&tool) else {
        return CheckResult::new(Status::Warn, format!("`{tool}` not found"), hint);
    };
    let status = if parsed(&line).is_some_and(|v| v >= RUST) { Status::Ok } else { Status::Warn };
    CheckResult::new(status, line, hint)
}

/// The C compiler that links `run`, for moec or for rustc.
fn linker() -> CheckResult {
    let hint = "`run` is linked with `cc`: install gcc or clang; `moec build --no-run` works without it";
    match version("cc") {
        Some(line) => CheckResult::new(Status::Ok, format!("cc: {line}"), hint),
        None => CheckResult::new(Status::Warn, "`cc` not found", hint),
    }
}

/// Tools that link `run` for machines of another kind.
fn cross(to: &CrossTarget) -> CheckResult {
    match Toolchain::find(to.triple) {
        Ok(tools) => {
            let rustc = tools.version.lines().next().unwrap_or_default();
            let emulator = to.emulator.join(" ");
            let runs = if to.emulated() {
                format!("`{emulator}` runs it")
            } else {
                "this machine has no emulator for it".into()
            };
            CheckResult::new(
                Status::Ok,
                format!("`run` is linked with {}, {rustc}; {runs}", to.linker),
                to.install(),
            )
        }
        Err(missing) => {
            let hint = format!("to link `run` for this target: {}", missing.hint());
            CheckResult::new(Status::Warn, missing.to_string(), hint)
        }
    }
}

/// Requirements of the backends. Without them moec builds for every other target.
fn backends() -> Vec<(&'static str, CheckResult)> {
    let Ok(cache) = cache_dir::path() else {
        let hint = "set `MOEC_CACHE` to a folder that you can write";
        return vec![("backends", CheckResult::new(Status::Warn, "there is no cache folder", hint))];
    };
    let mut found = Vec::new();
    for backend in BACKENDS {
        let has = |d: &Device| d.units.iter().any(|u| d.backend_of(u) == backend.name());
        let targets: Vec<&str> = BUILT_IN
            .iter()
            .map(|(name, _)| *name)
            .filter(|name| Device::find(name).is_ok_and(|d| has(&d)))
            .collect();
        for row in backend.doctor(tools::beside(&cache), &targets) {
            let status = if row.works { Status::Ok } else { Status::Warn };
            found.push((row.name, CheckResult::new(status, row.found, row.hint)));
        }
    }
    found
}

/// Rust's name of macOS.
const MAC: &str = "aarch64-apple-darwin";

/// Tools for Macs on other machines.
fn mac() -> CheckResult {
    let checks = if has_std(&own_rustc(), MAC) {
        "rustc has its standard library, so `cargo xtask check-apple` can type-check for it"
    } else {
        "`cargo xtask check-apple` installs the tools to type-check for it"
    };
    CheckResult::new(
        Status::Ok,
        format!("`run` is linked on a Mac, by the bundle's `{MAC_SCRIPT}`; {checks}"),
        "",
    )
}

/// Checks the cache folder, which holds results of cross compilation, tuning, calibration and comparison.
fn cache_folder() -> CheckResult {
    let hint = "set `MOEC_CACHE` to a folder that you can write; `--tune`, calibration and `run` for other machines need it";
    let Ok(folder) = cache_dir::path() else {
        return CheckResult::new(Status::Fail, "there is no cache folder", hint);
    };
    match cache_dir::probe(&folder) {
        Ok(()) => CheckResult::new(Status::Ok, format!("`{}` is writable", folder.display()), hint),
        Err(e) => {
            CheckResult::new(Status::Fail, format!("`{}` cannot be written: {e}", folder.display()), hint)
        }
    }
}

/// Checks the free space in the current folder, the default place of bundles.
fn space() -> CheckResult {
    let here = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    let hint = "a bundle is about as large as its weights; `moec init` estimates the size";
    match disk::free_bytes(&here) {
        None => CheckResult::new(Status::Warn, "the free space is unknown", hint),
        Some(n) if n < LITTLE_SPACE => {
            CheckResult::new(Status::Warn, format!("only {} free here", human::bytes(n)), hint)
        }
        Some(n) => CheckResult::new(Status::Ok, format!("{} free here", human::bytes(n)), hint),
    }
}
