//! `libQnnSystem`: contents of context binaries and of DLC files.

use super::{Configs, Handle, Provider, Status, Tensor, Unused, Version, layout};
use std::ffi::{c_char, c_void};

/// The symbol that gives [`SystemProvider`]s.
pub(crate) const SYSTEM_PROVIDERS: &std::ffi::CStr = c"QnnSystemInterface_getProviders";

/// `QnnSystemInterface_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SystemProvider {
    pub backend: u32,
    pub name: *const c_char,
    pub version: Version,
    pub table: SystemTable,
}

/// `QNN_SYSTEM_INTERFACE_VER_TYPE`, as far as it is called.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SystemTable {
    pub context_create: Option<unsafe extern "C" fn(*mut Handle) -> Status>,
    pub context_binary_info:
        Option<unsafe extern "C" fn(Handle, *mut c_void, u64, *mut *const BinaryInfo, *mut u64) -> Status>,
    _context_metadata: Unused,
    pub context_free: Option<unsafe extern "C" fn(Handle) -> Status>,
    _tensor: Unused,
    _log: [Unused; 3],
    pub dlc_from_file: Option<unsafe extern "C" fn(Handle, *const c_char, *mut Handle) -> Status>,
    _dlc_from_binary: Unused,
    /// File, configurations and their number, backend, context, the backend's functions (by value), version
    /// of the result, and the result: an array of graphs for the caller to free, and its length.
    pub dlc_compose: Option<
        unsafe extern "C" fn(
            Handle,
            Configs,
            u32,
            Handle,
            Handle,
            Provider,
            u32,
            *mut *mut GraphInfo,
            *mut u32,
        ) -> Status,
    >,
    _dlc_mappings: Unused,
    pub dlc_free: Option<unsafe extern "C" fn(Handle) -> Status>,
}

/// `QNN_SYSTEM_CONTEXT_GRAPH_INFO_VERSION_1`; later versions have the same beginning.
pub(crate) const GRAPH_INFO_V1: u32 = 1;

/// `QnnSystemContext_GraphInfo_t`: a tagged union whose versions have the same beginning; the third is the
/// longest.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GraphInfo {
    pub version: u32,
    pub name: *const c_char,
    pub input_count: u32,
    pub inputs: *const Tensor,
    pub output_count: u32,
    pub outputs: *const Tensor,
    _updateable_count: u32,
    _updateable: *const Tensor,
    _blob_len: u32,
    _blob: *const c_void,
    _first_op: u32,
    _last_op: u32,
}

/// Common beginning of all versions of `QnnSystemContext_BinaryInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BinaryHead {
    pub backend: u32,
    pub build: *const c_char,
    pub core: Version,
    pub version: Version,
    pub soc: *const c_char,
}

/// Versions 1 and 2 after their head, without the second's last pointer.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BinaryV1 {
    pub head: BinaryHead,
    pub hardware_version: Version,
    pub blob_version: Version,
    pub hardware_len: u32,
    pub hardware: *const c_void,
    pub blob_len: u64,
    pub tensor_count: u32,
    pub tensors: *const Tensor,
    pub graph_count: u32,
    pub graphs: *const GraphInfo,
}

/// Version 3 after its head.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BinaryV3 {
    pub head: BinaryHead,
    pub blob_version: Version,
    pub blob_len: u64,
    pub tensor_count: u32,
    pub tensors: *const Tensor,
    pub graph_count: u32,
    pub graphs: *const GraphInfo,
    pub platform: *const c_void,
    pub metadata_len: u32,
    pub metadata: *const c_void,
    pub soc_model: u32,
}

/// The union of `QnnSystemContext_BinaryInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union BinaryVersions {
    pub v1: BinaryV1,
    pub v3: BinaryV3,
}

/// `QnnSystemContext_BinaryInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BinaryInfo {
    pub version: u32,
    pub of: BinaryVersions,
}

#[cfg(target_pointer_width = "64")]
layout! { SystemTable: 104, 8; GraphInfo: 88, 8; BinaryHead: 48, 8; BinaryV1: 128, 8; BinaryV3: 136, 8; BinaryInfo: 144, 8; }
#[cfg(target_pointer_width = "64")]
const _: () = assert!(std::mem::offset_of!(SystemProvider, table) == 32);
