//! The report of `moec self-test --report`: every unit of this machine, built for, verified, run and timed.
//!
//! A person reads it and sends it to others. It describes the machine only by names of the CPU and of units,
//! and their figures. Texts of failures lose folders and the names of user and host ([`Private`]).

use super::trial::{Trial, TrialResult, Trials, object};
use crate::profile_device::cpu_name;
use moec_base::progress::Progress;
use moec_base::{Error, Result};
use moec_device::{BUILT_IN, Device, DeviceUnit, UnitKind};
use moec_targets::backends;
use serde_json::{Map, Value, json};
use std::env;
use std::ffi::OsStr;
use std::process::Command;

/// Version of the report's form.
const REPORT_VERSION: u32 = 1;
/// Tolerance of logits on a unit that rounds to bf16 or f16, where f32 is expected of the CPU.
const TOLERANCE: f32 = 0.1;
/// Systems that moec runs on and whose machines have a unit with static graphs.
const WITH_GRAPHS: [&str; 1] = ["macos"];
/// Tokens of the prompt that is timed, and tokens after it.
const TIMED: [&str; 2] = ["64", "64"];
/// Name of the device file that is measured.
const MEASURED: &str = "self-test";
/// The CPU, as a unit of the report.
const CPU: &str = "cpu";

/// Report.
pub(super) struct Report {
    pub(super) value: Value,
    right: bool,
}

impl Report {
    /// Whether every unit that is there computes what it should.
    pub(super) fn is_right(&self) -> bool {
        self.right
    }
}

/// Tests every unit and writes the report. `cpu`: result of the CPU's trial.
pub(super) fn write(trials: &Trials, cpu: Result<&TrialResult, &Error>, progress: &Progress) -> Report {
    let private = Private::of_this_machine();
    let mut units = vec![match cpu {
        Ok(found) => entry(trials, None, found, &private),
        Err(e) => failed(CPU, e, &private),
    }];
    progress.stage("Measuring", "this machine");
    let gpu = backends::bench().map(drop);
    let mut profile = trials.moec();
    profile.args(["profile-device", "--quiet", "--json", "--name", MEASURED]);
    profile.args(gpu.is_ok().then_some("--gpu")).arg(trials.folder());
    let measured = object(&mut profile);
    let file = trials.folder().join(format!("{MEASURED}.toml"));
    units.push(match (gpu, &measured) {
        (Err(e), _) => {
            json!({"unit": UnitKind::Gpu.name(), "state": "missing", "why": private.out_of(&error_text(&e))})
        }
        (_, Err(e)) => failed(UnitKind::Gpu.name(), e, &private),
        (Ok(()), Ok(_)) => run_trial(trials, file.as_os_str(), UnitKind::Gpu, &private, progress),
    });
    units.push(match with_graphs() {
        Some(target) => run_trial(trials, OsStr::new(target), UnitKind::Npu, &private, progress),
        None => json!({
            "unit": UnitKind::Npu.name(), "state": "missing",
            "why": format!("static graphs run only on {}, and this is {}", WITH_GRAPHS.join(", "), env::consts::OS),
        }),
    });
    let off_npu: usize = units.iter().map(|unit| operation_warnings(&unit["operations"])).sum();
    if off_npu > 0 {
        progress.warn(&format!(
            "{off_npu} static graphs do not run on the NPU alone: see `operations` of the unit `{}` in the report",
            UnitKind::Npu.name()
        ));
    }
    let right = units.iter().all(|unit| matches!(unit["state"].as_str(), Some("ok" | "missing")));
    let figures = match measured {
        Ok(mut figures) => {
            // Where it was written.
            figures.as_object_mut().map(|map| map.shift_remove("file"));
            figures
        }
        Err(e) => json!({"state": "failed", "why": private.out_of(&error_text(&e))}),
    };
    let value = json!({
        "report": REPORT_VERSION,
        "version": env!("CARGO_PKG_VERSION"),
        "machine": format!("{}-{}", env::consts::ARCH, env::consts::OS),
        "system": system(),
        "cpu": cpu_name(),
        "units": units,
        "figures": figures,
    });
    Report { value, right }
}

/// A built-in target of this machine's kind that has a unit with static graphs.
fn with_graphs() -> Option<&'static str> {
    if !WITH_GRAPHS.contains(&env::consts::OS) {
        return None;
    }
    let has = |name: &str| {
        Device::find(name).is_ok_and(|device| device.is_host() && unit(&device, UnitKind::Npu).is_some())
    };
    BUILT_IN.iter().map(|(name, _)| *name).find(|name| has(name))
}

fn unit(device: &Device, kind: UnitKind) -> Option<&DeviceUnit> {
    device.units.iter().find(|unit| unit.kind == kind)
}

/// Builds for the unit of that kind of a device, verifies, runs and times.
fn run_trial(
    trials: &Trials,
    target: &OsStr,
    kind: UnitKind,
    private: &Private,
    progress: &Progress,
) -> Value {
    let found = || -> Result<Value> {
        let device = moec_targets::device(&target.to_string_lossy())?;
        let unit = unit(&device, kind)
            .ok_or_else(|| Error::bug(format!("the device file has no unit `{}`", kind.name())))?;
        let trial = Trial { target, unit: Some(&unit.name), near: TOLERANCE };
        let found = trials.of(&trial, progress)?;
        Ok(entry(trials, Some(&unit.name), &found, private))
    };
    found().unwrap_or_else(|e| failed(kind.name(), &e, private))
}

/// Entry of a unit whose bundle was built and ran.
fn entry(trials: &Trials, unit: Option<&str>, found: &TrialResult, private: &Private) -> Value {
    let bundle = trials.bundle(unit);
    let part = |command: &mut Command, shorten: fn(&Value) -> Value| match object(command) {
        Ok(value) => (true, shorten(&value)),
        Err(e) => (false, json!({"state": "failed", "why": private.out_of(&error_text(&e))})),
    };
    let (verifies, verified) =
        part(trials.moec().args(["verify", "--quiet", "--json"]).arg(&bundle), verification);
    let mut bench = trials.run(&bundle);
    bench.args(["bench", "--json", "--prompt", TIMED[0], "--gen", TIMED[1]]);
    let (times, bench) = part(&mut bench, Value::clone);
    let (_, info) = part(trials.run(&bundle).args(["info", "--json"]), |info| info["operations"].clone());
    json!({
        "unit": unit.unwrap_or(CPU),
        "state": if verifies && times { found.verdict() } else { "failed" },
        "cpu": found.cpu,
        "features": found.features,
        "tokens": {"same": found.tokens.0, "of": found.tokens.1},
        "largest_distance_of_a_logit": found.distance,
        "build_s": found.build_s,
        "verify": verified,
        "bench": bench,
        "operations": operations(info, private),
    })
}

/// Units that execute the operations of static graphs, as `run info` reports them. `null`: the unit has no
/// static graphs.
fn operations(mut reported: Value, private: &Private) -> Value {
    // Packages are named relative to the bundle; a reason may name folders of this machine.
    if let Some(Value::String(why)) = reported.get_mut("why") {
        *why = private.out_of(why);
    }
    reported
}

/// Number of static graphs with operations that do not run on the NPU.
fn operation_warnings(operations: &Value) -> usize {
    operations["warnings"].as_array().map_or(0, Vec::len)
}

/// Result of `moec verify`, without the steps that are right.
fn verification(all: &Value) -> Value {
    let mut short = Map::new();
    for key in ["verdict", "failures", "files", "packages", "unverified"] {
        short.extend(all.get(key).map(|value| (key.to_owned(), value.clone())));
    }
    let entries = all["entries"].as_array().map(Vec::as_slice).unwrap_or_default();
    let logits = entries.iter().map(|entry| json!({"entry": entry["entry"], "logits": entry["logits"]}));
    short.insert("entries".into(), logits.collect());
    short.into()
}

fn failed(unit: &str, e: &Error, private: &Private) -> Value {
    json!({"unit": unit, "state": "failed", "why": private.out_of(&error_text(e))})
}

/// An error with its causes and its hint, in one line each.
fn error_text(e: &Error) -> String {
    let hint = e.hint.iter().map(|hint| format!("hint: {hint}"));
    std::iter::once(e.message.clone())
        .chain(e.causes.iter().cloned())
        .chain(hint)
        .collect::<Vec<_>>()
        .join("\n")
}

/// The version of the operating system, where static graphs depend on it.
fn system() -> Option<String> {
    cfg!(target_os = "macos").then(|| printed(Command::new("sw_vers").arg("-productVersion"))).flatten()
}

fn printed(command: &mut Command) -> Option<String> {
    let out = command.output().ok().filter(|out| out.status.success())?;
    Some(String::from_utf8_lossy(&out.stdout).trim().to_owned()).filter(|text| !text.is_empty())
}

/// Words that no report may contain.
struct Private {
    /// Names of the user and the host.
    names: Vec<String>,
}

impl Private {
    fn of_this_machine() -> Self {
        let host = printed(Command::new("uname").arg("-n"));
        let short = host.as_ref().and_then(|host| Some(host.split_once('.')?.0.to_owned()));
        let users = ["USER", "LOGNAME", "USERNAME"].into_iter().filter_map(|name| env::var(name).ok());
        let home = env::home_dir().and_then(|home| Some(home.file_name()?.to_string_lossy().into_owned()));
        let names = host.into_iter().chain(short).chain(users).chain(home);
        Self { names: names.filter(|name| !name.is_empty()).collect() }
    }

    /// A text without folders, of which the last name stays, and without these names as words.
    fn out_of(&self, text: &str) -> String {
        let ends = |c: char| c.is_whitespace() || "`'\"()<>|,;=".contains(c);
        let mut clean = String::new();
        for word in text.split_inclusive(ends) {
            let (body, end) = word.strip_suffix(ends).map_or((word, ""), |body| (body, &word[body.len()..]));
            match body.rsplit_once('/') {
                Some((_, last)) => clean.extend(["…/", &self.without_names(last)]),
                None => clean += &self.without_names(body),
            }
            clean += end;
        }
        clean
    }

    fn without_names(&self, word: &str) -> String {
        let inside = |c: char| c.is_alphanumeric() || c == '_';
        let mut word = word.to_owned();
        for name in &self.names {
            let mut from = 0;
            while let Some(at) = word.get(from..).and_then(|rest| rest.find(name.as_str())) {
                let (start, end) = (from + at, from + at + name.len());
                let whole = !word[..start].ends_with(inside) && !word[end..].starts_with(inside);
                if whole {
                    word.replace_range(start..end, "…");
                }
                from = if whole { start + '…'.len_utf8() } else { end };
            }
        }
        word
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_users_and_hosts_are_removed_from_reports() {
        let private = Private { names: vec!["mara".into(), "tower.example".into(), "tower".into()] };
        for (text, clean) in [
            ("no `/home/mara/models/x.toml` here", "no `…/x.toml` here"),
            ("cannot read '/home/mara': denied", "cannot read '…/…': denied"),
            ("mara@tower.example: marathon, mara.", "…@…: marathon, …."),
            ("--out=/tmp/a/b.txt (~/x, ../y)", "--out=…/b.txt (…/x, …/y)"),
            ("tower's 3 tokens/s", "…'s 3 …/s"),
            ("nothing\nof the kind", "nothing\nof the kind"),
        ] {
            assert_eq!(private.out_of(text), clean);
        }
    }

    #[test]
    fn self_test_report_has_the_units_of_operations() {
        let private = Private { names: vec!["mara".into()] };
        assert_eq!(operations(Value::Null, &private), Value::Null);
        let why = json!({"known": false, "why": "cannot read `/Users/mara/a.mlpackage`"});
        assert_eq!(operations(why, &private)["why"], "cannot read `…/a.mlpackage`");
        let known = json!({
            "known": true,
            "units": {"npu": {"operations": 9, "cost": 0.9}, "cpu": {"operations": 1, "cost": 0.1}},
            "functions": [{"package": "artifacts/part.mlpackage", "function": "rows1", "operations": []}],
            "warnings": ["function `rows1` of `artifacts/part.mlpackage` does not run on the NPU alone"],
        });
        assert_eq!(operations(known.clone(), &private), known);
        assert_eq!((operation_warnings(&known), operation_warnings(&Value::Null)), (1, 0));
    }

    #[test]
    fn self_test_report_omits_correct_steps() {
        let all = json!({
            "verdict": "right", "failures": [], "files": 9, "bound": null, "signature": null,
            "entries": [{"entry": "decode[1]", "nodes": [1, 2, 3], "logits": {"relative": 1e-6}, "rows": 1}],
        });
        let short = verification(&all);
        assert_eq!(short["entries"], json!([{"entry": "decode[1]", "logits": {"relative": 1e-6}}]));
        assert!(short["verdict"] == "right" && short.get("bound").is_none());
    }
}
