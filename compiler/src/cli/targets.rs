//! `moec targets`.

use super::output;
use crate::targets::device;
use crate::{Error, Result};
use moec_device::{BUILT_IN, Device};
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

/// Prints them.
///
/// # Errors
/// No such target, or its file is wrong.
pub fn run(args: &Args) -> Result<()> {
    if let Some(name) = &args.name {
        let device = device(name)?;
        return if args.json {
            output::json(&describe(&device))
        } else {
            output::data(&file(name, &device)?)
        };
    }
    let devices: Vec<Device> = BUILT_IN.iter().map(|(name, _)| device(name)).collect::<Result<_>>()?;
    if args.json {
        return output::json(&devices.iter().map(describe).collect());
    }
    let rows: Vec<_> =
        devices.iter().map(|d| vec![d.name.clone(), runs_here(d), d.description.clone()]).collect();
    output::data(&output::table(&rows))
}

/// Whether this machine can run code for the device, in words.
fn runs_here(device: &Device) -> String {
    let lacks = lacks(device);
    if !device.is_host() {
        "other machines".into()
    } else if lacks.is_empty() {
        "runs here".into()
    } else {
        format!("lacks {}", lacks.join(", "))
    }
}

/// Features that this machine lacks to run code for the device. Of another architecture all are lacking.
pub(super) fn lacks(device: &Device) -> Vec<&str> {
    let features: Vec<&str> = device.features.iter().map(String::as_str).collect();
    moec_runtime::cpu::missing(&features)
}

/// A device as JSON: the file's keys, and what this machine makes of it.
fn describe(device: &Device) -> Value {
    let mut value = serde_json::to_value(device).unwrap_or_default();
    if let Value::Object(map) = &mut value {
        let lacks = lacks(device);
        map.insert("runs_here".into(), json!(device.is_host() && lacks.is_empty()));
        map.insert("lacks".into(), json!(lacks));
    }
    value
}

/// The text of a device file.
fn file(name: &str, device: &Device) -> Result<String> {
    match BUILT_IN.iter().find(|(n, _)| *n == name) {
        // What was detected is in none of the files.
        Some((_, text)) if !device.is_native() => Ok((*text).to_owned()),
        _ => toml::to_string(device).map_err(|e| Error::bug("a device cannot be written").because(e)),
    }
}
