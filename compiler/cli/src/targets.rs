//! `moec targets`.

use super::output;
use moec_base::{Error, Result};
use moec_device::{BUILT_IN, CPU_BACKEND, Device, measured};
use moec_targets::backends;
use moec_targets::device;
use serde_json::{Value, json};

/// List the targets, or print one as a device file
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A name, or a path of a device file
    pub name: Option<String>,
    /// Print JSON to stdout
    #[arg(long)]
    pub json: bool,
}

/// Prints all targets, or one.
///
/// # Errors
/// Fails if the target does not exist or its file is invalid.
pub fn run(args: &Args) -> Result<()> {
    if let Some(name) = &args.name {
        let device = device(name)?;
        return if args.json {
            output::json(&describe(&device)?)
        } else {
            output::data(&file(name, &device)?)
        };
    }
    let devices: Vec<Device> = BUILT_IN.iter().map(|(name, _)| device(name)).collect::<Result<_>>()?;
    if args.json {
        return output::json(&devices.iter().map(describe).collect::<Result<_>>()?);
    }
    let row = |d: &Device| {
        Ok(vec![
            d.name.clone(),
            evidence(d)?.to_owned(),
            MissingFeatures::of(d)?.words(d),
            d.description.clone(),
        ])
    };
    let rows: Vec<_> = devices.iter().map(row).collect::<Result<_>>()?;
    output::data(&output::table(&rows))
}

/// Evidence for a built-in device: measured on silicon, tested natively, emulated, or modelled.
///
/// # Errors
/// A unit of an unknown backend.
pub(super) fn evidence(device: &Device) -> Result<&'static str> {
    let x86 = device.is_native() || device.triple.starts_with("x86_64");
    let cpu_alone = device.units.iter().all(|unit| device.backend_of(unit) == CPU_BACKEND);
    Ok(if measured(&device.name).next().is_some() {
        "measured"
    } else if backends::modelled(device)? {
        "modelled"
    } else if cpu_alone && x86 {
        "tested"
    } else {
        "emulated"
    })
}

/// Requirements of a device that this machine lacks.
struct MissingFeatures<'a> {
    /// Features of the CPU. For another architecture these are all features.
    features: Vec<&'a str>,
    /// Accelerators, each with the reason.
    units: Vec<(&'a str, String)>,
}

impl<'a> MissingFeatures<'a> {
    fn of(device: &'a Device) -> Result<Self> {
        Ok(Self { features: lacks(device), units: backends::absent(device)? })
    }

    /// Whether this machine runs code for the device without emulation.
    fn runs(&self, device: &Device) -> bool {
        device.is_host() && self.features.is_empty() && self.units.is_empty()
    }

    fn words(&self, device: &Device) -> String {
        let units: Vec<_> = self.units.iter().map(|(name, _)| format!("`{name}`")).collect();
        if !device.is_host() {
            "other machines".into()
        } else if !self.features.is_empty() {
            format!("lacks {}", self.features.join(", "))
        } else if units.is_empty() {
            "runs here".into()
        } else {
            format!("emulated here: no {}", units.join(", "))
        }
    }
}

/// Whether this machine has the CPU and all units of a device.
///
/// # Errors
/// A unit of an unknown backend.
pub(super) fn runs_here(device: &Device) -> Result<bool> {
    Ok(MissingFeatures::of(device)?.runs(device))
}

/// Features that this machine lacks to run code for the device. For another architecture these are all
/// features.
fn lacks(device: &Device) -> Vec<&str> {
    let features: Vec<&str> = device.features.iter().map(String::as_str).collect();
    moec_runtime::platform::cpu::missing(&features)
}

/// A device as JSON: the file's keys, its evidence, and the requirements that this machine lacks.
fn describe(device: &Device) -> Result<Value> {
    let mut value = serde_json::to_value(device).unwrap_or_default();
    if let Value::Object(map) = &mut value {
        let here = MissingFeatures::of(device)?;
        // A user's own device file has no evidence.
        if BUILT_IN.iter().any(|(name, _)| *name == device.name) {
            map.insert("evidence".into(), json!(evidence(device)?));
            map.insert("measured".into(), json!(measured(&device.name).collect::<Vec<_>>()));
        }
        map.insert("runs_here".into(), json!(here.runs(device)));
        map.insert("lacks".into(), json!(here.features));
        let unit = |(name, why): &(&str, String)| json!({"name": name, "why": why});
        map.insert("missing_units".into(), here.units.iter().map(unit).collect());
    }
    Ok(value)
}

/// The text of a device file.
fn file(name: &str, device: &Device) -> Result<String> {
    match BUILT_IN.iter().find(|(n, _)| *n == name) {
        // The detected device has no file.
        Some((_, text)) if !device.is_native() => Ok((*text).to_owned()),
        _ => toml::to_string(device).map_err(|e| Error::bug("a device cannot be written").because(e)),
    }
}
