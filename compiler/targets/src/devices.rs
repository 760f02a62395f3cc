//! Targets and devices by name.

use crate::backends;
use moec_base::{Error, Result};
use moec_cpu::CpuTarget;
use moec_device::{Device, DeviceError};

/// The target of that name or device file.
///
/// # Errors
/// No such target, or one that this build of moec cannot compile for.
pub fn target(name: &str) -> Result<CpuTarget> {
    target_of(&device(name)?, name)
}

/// The CPU of a device.
pub fn target_of(device: &Device, name: &str) -> Result<CpuTarget> {
    CpuTarget::new(device).map_err(|e| Error::limit(format!("cannot compile for `{name}`")).because(e))
}

/// The device of that name or path, which its backends accept.
///
/// # Errors
/// No such target, or its file is wrong.
pub fn device(name: &str) -> Result<Device> {
    let device = Device::find(name).map_err(|e| {
        let hint = e.hint();
        let error = match &e {
            DeviceError::Unknown { .. } => Error::usage(e.to_string()),
            DeviceError::Read { source, .. } => Error::input(e.to_string()).because(source),
            DeviceError::Parse { .. } | DeviceError::Invalid { .. } | DeviceError::Nodes { .. } => {
                Error::input(e.to_string())
            }
        };
        error.hint(hint)
    })?;
    backends::check(&device, name)?;
    Ok(device)
}
