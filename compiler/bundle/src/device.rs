//! `device.toml` of a bundle: the complete description of the device that it was built for. A bundle can be
//! opened if the user's device file has changed or is missing, for which the device's name would not be
//! enough.

use super::manifest::Manifest;
use moec_base::error::{Error, Result};
use moec_base::paths::DEVICE;
use moec_cpu::CpuTarget;
use moec_device::Device;
use moec_ir::plan::Plan;
use moec_runtime::platform::regular::Limit;
use std::path::Path;

/// Longest description.
const MOST: Limit = Limit { what: "a device", bytes: 1 << 20 };

/// The description of a target, as a device file. `native` is written as the target that it was resolved to.
///
/// # Errors
/// Only our bug: a device that cannot be written.
pub fn text(target: &CpuTarget) -> Result<String> {
    let mut device = target.device().clone();
    if device.is_native() {
        let info = target.info();
        (device.triple, device.cpu, device.features) = (info.triple, info.cpu, info.features);
    }
    toml::to_string(&device).map_err(|e| Error::bug("a device cannot be written").because(e))
}

/// Reads the description of a bundle's device.
///
/// # Errors
/// Fails if the bundle has no description, if it is invalid, or if it is not that of the plan's device.
pub fn read(folder: &Path, manifest: &Manifest, plan: &Plan) -> Result<Device> {
    let path = folder.join(DEVICE);
    let again = |e: Error| e.hint("build the bundle again");
    let bytes = manifest.read_file(folder, DEVICE, MOST)?;
    let text = String::from_utf8(bytes)
        .map_err(|e| again(Error::input(format!("`{}` is not text", path.display())).because(e)))?;
    let device = Device::parse(&text, &path).map_err(|e| again(Error::input(e.to_string())))?;
    let (placement, name) = (&plan.placement, &plan.target.name);
    let units: Vec<&str> = device.units.iter().map(|u| u.name.as_str()).collect();
    if device.name != *name || !placement.units.is_empty() && placement.units != units {
        return Err(again(Error::input(format!("`{}` does not match the device `{name}`", path.display()))));
    }
    Ok(device)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use moec_device::BUILT_IN;

    #[test]
    fn a_description_is_read_as_it_was_written() {
        for (name, _) in BUILT_IN {
            let device = Device::find(name).unwrap();
            let text = text(&CpuTarget::new(&device).unwrap()).unwrap();
            let found = Device::parse(&text, Path::new(DEVICE)).unwrap();
            assert!(!found.is_native(), "{name}");
            if !device.is_native() {
                assert_eq!(found, device);
            }
        }
    }
}
