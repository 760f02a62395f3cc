//! The table of functions that a backend's library provides, and the struct that contains it.

use super::{Handle, OpConfig, Status, Tensor, Unused, Version, layout};
use std::ffi::{c_char, c_void};

/// The symbol that gives [`Provider`]s.
pub(crate) const PROVIDERS: &std::ffi::CStr = c"QnnInterface_getProviders";

/// A list of configurations that a null ends.
pub(crate) type Configs = *const *const c_void;
/// Callback for every message: format, level, time stamp, arguments (`QnnLog_Callback_t`).
pub(crate) type LogFn = unsafe extern "C" fn(*const c_char, u32, u64, *mut c_void);

/// `QnnInterface_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Provider {
    pub backend: u32,
    pub name: *const c_char,
    pub core: Version,
    pub version: Version,
    pub table: Table,
}

/// `QNN_INTERFACE_VER_TYPE` of version 2 of the API, which only grows at its end.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Table {
    _property: Unused,
    pub backend_create: Option<unsafe extern "C" fn(Handle, Configs, *mut Handle) -> Status>,
    _backend_set_config: Unused,
    _backend_api_version: Unused,
    pub backend_build_id: Option<unsafe extern "C" fn(*mut *const c_char) -> Status>,
    _backend_packages: [Unused; 2],
    pub backend_validate_op: Option<unsafe extern "C" fn(Handle, OpConfig) -> Status>,
    pub backend_free: Option<unsafe extern "C" fn(Handle) -> Status>,
    pub context_create: Option<unsafe extern "C" fn(Handle, Handle, Configs, *mut Handle) -> Status>,
    _context_set_config: Unused,
    pub context_binary_size: Option<unsafe extern "C" fn(Handle, *mut u64) -> Status>,
    pub context_binary: Option<unsafe extern "C" fn(Handle, *mut c_void, u64, *mut u64) -> Status>,
    pub context_from_binary: Option<
        unsafe extern "C" fn(Handle, Handle, Configs, *const c_void, u64, *mut Handle, Handle) -> Status,
    >,
    pub context_free: Option<unsafe extern "C" fn(Handle, Handle) -> Status>,
    pub graph_create: Option<unsafe extern "C" fn(Handle, *const c_char, Configs, *mut Handle) -> Status>,
    _graph_subgraph: Unused,
    _graph_set_config: Unused,
    pub graph_add_node: Option<unsafe extern "C" fn(Handle, OpConfig) -> Status>,
    pub graph_finalize: Option<unsafe extern "C" fn(Handle, Handle, Handle) -> Status>,
    pub graph_retrieve: Option<unsafe extern "C" fn(Handle, *const c_char, *mut Handle) -> Status>,
    pub graph_execute:
        Option<unsafe extern "C" fn(Handle, *const Tensor, u32, *mut Tensor, u32, Handle, Handle) -> Status>,
    _graph_execute_async: Unused,
    _tensor_context: Unused,
    pub tensor_create: Option<unsafe extern "C" fn(Handle, *mut Tensor) -> Status>,
    pub log_create: Option<unsafe extern "C" fn(Option<LogFn>, u32, *mut Handle) -> Status>,
    _log_level: Unused,
    pub log_free: Option<unsafe extern "C" fn(Handle) -> Status>,
    _profile: [Unused; 7],
    _memory: [Unused; 2],
    _device_info: [Unused; 3],
    pub device_create: Option<unsafe extern "C" fn(Handle, Configs, *mut Handle) -> Status>,
    _device_set_config: Unused,
    _device_get_info: Unused,
    pub device_free: Option<unsafe extern "C" fn(Handle) -> Status>,
    _signal: [Unused; 4],
    pub error_message: Option<unsafe extern "C" fn(Status, *mut *const c_char) -> Status>,
    _error_verbose: [Unused; 2],
    _graph_environment: [Unused; 3],
    _context_validate: Unused,
    _context_signal: Unused,
    /// To the end of the table of version 2.51 †: it is passed by value, so its size must be exact.
    _later: [Unused; 19],
}

#[cfg(target_pointer_width = "64")]
layout! { Table: 600, 8; Provider: 640, 8; }
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(std::mem::offset_of!(Provider, table) == 40);
    assert!(std::mem::offset_of!(Table, graph_create) == 120);
    assert!(std::mem::offset_of!(Table, log_create) == 200);
    assert!(std::mem::offset_of!(Table, device_create) == 320);
    assert!(std::mem::offset_of!(Table, error_message) == 384);
    assert!(std::mem::offset_of!(Table, _later) == 448);
};
