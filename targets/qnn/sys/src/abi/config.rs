//! Configurations: each has an option number and a value. Lists of them end in a null pointer.

use super::layout;
use std::ffi::{c_char, c_void};

/// An option of the backend's own, in `QnnDevice_Config_t`, `QnnContext_Config_t` and `QnnGraph_Config_t`.
pub(crate) const CUSTOM: u32 = 0;

/// All three of them where the option is [`CUSTOM`].
#[repr(C)]
pub(crate) struct Config {
    pub option: u32,
    pub custom: *const c_void,
    /// The C unions are longer; the other bytes stay zero.
    pub rest: [u64; 2],
}

/// `QnnHtpDevice_CustomConfig_t`, `QnnHtpContext_CustomConfig_t` and `QnnHtpGraph_CustomConfig_t`: each is an
/// option number, and a union that begins at 8 †.
#[repr(C)]
pub(crate) struct HtpConfig {
    pub option: u32,
    padding: u32,
    /// The union's first two numbers of 32 bits.
    pub value: [u32; 2],
    rest: [u32; 4],
}

impl HtpConfig {
    /// An option that is one number, or two.
    pub(crate) fn new(option: u32, value: [u32; 2]) -> Self {
        Self { option, padding: 0, value, rest: [0; 4] }
    }
}

/// Option of a device, `QNN_HTP_DEVICE_CONFIG_OPTION_SOC`: the chip's number.
pub(crate) const HTP_SOC: u32 = 0;
/// `QNN_HTP_DEVICE_CONFIG_OPTION_ARCH`: number of the device, which is 0, and the architecture.
pub(crate) const HTP_ARCH: u32 = 1;
/// Option of a context, `QNN_HTP_CONTEXT_CONFIG_OPTION_WEIGHT_SHARING_ENABLED`: a bool.
pub(crate) const HTP_WEIGHT_SHARING: u32 = 1;
/// Option of a graph, `QNN_HTP_GRAPH_CONFIG_OPTION_OPTIMIZATION`: a kind and a float.
pub(crate) const HTP_OPTIMIZATION: u32 = 1;
/// The kind for the level of optimisation: 1.0, 2.0 or 3.0.
pub(crate) const HTP_FINALIZE_LEVEL: u32 = 3;
/// `QNN_HTP_GRAPH_CONFIG_OPTION_VTCM_SIZE`, in MiB.
pub(crate) const HTP_VTCM: u32 = 3;

/// `QnnIrGraph_CustomConfig_t`: where the DLC goes.
#[repr(C)]
pub(crate) struct IrGraph {
    /// [`IR_SERIALIZATION`].
    pub option: u32,
    pub serialization: IrSerialization,
}

/// `QnnIrGraph_SerializationOption_t`.
#[repr(C)]
pub(crate) struct IrSerialization {
    /// [`IR_FLAT_BUFFER`].
    pub format: u32,
    pub path: *const c_char,
}
/// `QNN_IR_GRAPH_CONFIG_OPTION_SERIALIZATION`.
pub(crate) const IR_SERIALIZATION: u32 = 1;
/// `QNN_IR_GRAPH_SERIALIZATION_TYPE_FLAT_BUFFER`.
pub(crate) const IR_FLAT_BUFFER: u32 = 1;

#[cfg(target_pointer_width = "64")]
layout! { Config: 32, 8; HtpConfig: 32, 4; IrGraph: 24, 8; }
const _: () = assert!(std::mem::offset_of!(HtpConfig, value) == 8);
