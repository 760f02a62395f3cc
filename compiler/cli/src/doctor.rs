//! `moec doctor`: what this machine has of what moec needs.

use super::{output, targets};
use moec_base::cache_dir;
use moec_base::{Result, disk, human, tools};
use moec_bundle::link;
use moec_bundle::toolchain::{CROSS, Cross, MAC_SCRIPT, RUST, Toolchain, has_std, own_rustc, parsed};
use moec_device::{BUILT_IN, Device, is_host};
use moec_targets::backends::BACKENDS;
use serde_json::json;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// Below this much free space builds are likely to fail.
const LITTLE_SPACE: u64 = 4 << 30;

/// Check the system for required and optional dependencies
///
/// Fails when something is missing that a build needs.
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
    /// Something works less well.
    Warn,
    /// A build fails.
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

/// A check: its result, what was found, and what to do.
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

/// Prints what was found; the exit code says whether a build can work.
///
/// # Errors
/// Stdout cannot be written.
pub fn run(args: &Args) -> Result<ExitCode> {
    let mut found: Vec<_> = CHECKS.iter().map(|(name, check)| (*name, check())).collect();
    found.extend(backends());
    found.extend((!cfg!(target_os = "macos")).then(|| (MAC, mac())));
    found.extend(CROSS.iter().filter(|c| !is_host(c.triple)).map(|c| (c.triple, cross(c))));
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

/// First line of what a tool says to `--version`.
fn version(tool: &str) -> Option<String> {
    let out = Command::new(tool).arg("--version").output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&out.stdout).lines().next().unwrap_or_default().to_owned())
}

/// `rustc` or `cargo`, of the version that `run` needs.
fn rust(variable: &str, tool: &str) -> CheckResult {
    let hint = if link::is_prebuilt() {
        "only for other machines' `run` and for `--run-from-source`: Rust 1.95 or later (https://rustup.rs)"
    } else {
        "`run` is built with Rust 1.95 or later (https://rustup.rs); `moec build --no-run` needs none"
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
    let hint = "`run` is linked with `cc`: install gcc or clang; `moec build --no-run` needs none";
    match version("cc") {
        Some(line) => CheckResult::new(Status::Ok, format!("cc: {line}"), hint),
        None => CheckResult::new(Status::Warn, "`cc` not found", hint),
    }
}

/// Tools that link `run` for machines of another kind.
fn cross(to: &Cross) -> CheckResult {
    match Toolchain::find(to.triple) {
        Ok(tools) => {
            let rustc = tools.version.lines().next().unwrap_or_default();
            let emulator = to.emulator.join(" ");
            let runs =
                if to.emulated() { format!("`{emulator}` runs it") } else { "nothing here runs it".into() };
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
        let hint = "set `MOEC_CACHE` to one";
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
        "rustc here has its standard library, so `cargo xtask check-apple` type-checks for it"
    } else {
        "`cargo xtask check-apple` gets what type-checks for it"
    };
    CheckResult::new(
        Status::Ok,
        format!("`run` is linked on a Mac, by the bundle's `{MAC_SCRIPT}`; {checks}"),
        "",
    )
}

/// The cache folder: for what is compiled for other machines, tuned, calibrated or compared.
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

/// Free space where bundles go: the user's current folder.
fn space() -> CheckResult {
    let here = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    let hint = "a bundle takes about as much as its weights; `moec init` estimates it";
    match disk::free_bytes(&here) {
        None => CheckResult::new(Status::Warn, "free space is not known", hint),
        Some(n) if n < LITTLE_SPACE => {
            CheckResult::new(Status::Warn, format!("only {} free here", human::bytes(n)), hint)
        }
        Some(n) => CheckResult::new(Status::Ok, format!("{} free here", human::bytes(n)), hint),
    }
}
