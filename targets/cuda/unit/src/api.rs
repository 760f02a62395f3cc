//! The functions of NVIDIA's driver that are called, as its public documentation declares them (CUDA Driver
//! API, 12.x). They are looked up in the library when a unit is first used: moec itself links to nothing of
//! NVIDIA's.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

/// Result of a function: 0, or the number of an error.
pub(crate) type Status = c_int;
/// A device: its number.
pub(crate) type Device = c_int;
/// An address in the memory of a device.
pub(crate) type DevicePtr = u64;
/// A context, module, function, stream, event or graph.
pub(crate) type Handle = *mut c_void;

/// The library's name.
pub(crate) const LIBRARY: &CStr = c"libcuda.so.1";

/// Numbers of errors, and of attributes.
pub(crate) mod code {
    use super::{Status, c_int, c_uint};

    pub(crate) const SUCCESS: Status = 0;
    pub(crate) const OUT_OF_MEMORY: Status = 2;
    pub(crate) const NO_DEVICE: Status = 100;
    pub(crate) const NO_BINARY_FOR_GPU: Status = 209;
    pub(crate) const INVALID_PTX: Status = 218;
    pub(crate) const UNSUPPORTED_PTX_VERSION: Status = 222;
    pub(crate) const NOT_READY: Status = 600;

    /// Attributes of a device.
    pub(crate) const CAPABILITY: [c_int; 2] = [75, 76];
    /// Clock in kHz, and width in bits.
    pub(crate) const MEMORY: [c_int; 2] = [36, 37];
    /// Multiprocessors, and their clock in kHz.
    pub(crate) const MULTIPROCESSORS: [c_int; 2] = [16, 13];

    /// Options of the assembler.
    pub(crate) const ERROR_LOG: c_uint = 5;
    pub(crate) const ERROR_LOG_BYTES: c_uint = 6;
}

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal : fn($($argument:ty),*);)*) => {
        /// The functions, by their addresses.
        #[derive(Clone, Copy)]
        pub(crate) struct Api {
            $($(#[$doc])* pub(crate) $name: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Api {
            /// Finds every function.
            ///
            /// # Errors
            /// The name of one that is not there.
            ///
            /// # Safety
            /// `find` must return, for a name, the driver's function of that name, valid for as long as the
            /// process lives.
            pub(crate) unsafe fn load(
                find: &dyn Fn(&CStr) -> Option<*mut c_void>,
            ) -> Result<Self, &'static CStr> {
                Ok(Self {
                    $($name: {
                        let at = find($symbol).ok_or($symbol)?;
                        // SAFETY: the caller's promise; the signature is that of the driver's documentation.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> Status>(at)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    init = c"cuInit": fn(c_uint);
    device_count = c"cuDeviceGetCount": fn(*mut c_int);
    device_get = c"cuDeviceGet": fn(*mut Device, c_int);
    device_name = c"cuDeviceGetName": fn(*mut c_char, c_int, Device);
    device_attribute = c"cuDeviceGetAttribute": fn(*mut c_int, c_int, Device);
    context_retain = c"cuDevicePrimaryCtxRetain": fn(*mut Handle, Device);
    context_release = c"cuDevicePrimaryCtxRelease_v2": fn(Device);
    context_set = c"cuCtxSetCurrent": fn(Handle);
    memory_info = c"cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    memory_alloc = c"cuMemAlloc_v2": fn(*mut DevicePtr, usize);
    memory_free = c"cuMemFree_v2": fn(DevicePtr);
    memory_zero = c"cuMemsetD8Async": fn(DevicePtr, u8, usize, Handle);
    host_alloc = c"cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    host_free = c"cuMemFreeHost": fn(*mut c_void);
    copy_in = c"cuMemcpyHtoDAsync_v2": fn(DevicePtr, *const c_void, usize, Handle);
    copy_out = c"cuMemcpyDtoHAsync_v2": fn(*mut c_void, DevicePtr, usize, Handle);
    copy_within = c"cuMemcpyDtoDAsync_v2": fn(DevicePtr, DevicePtr, usize, Handle);
    module_load = c"cuModuleLoadDataEx":
        fn(*mut Handle, *const c_void, c_uint, *mut c_uint, *mut *mut c_void);
    module_unload = c"cuModuleUnload": fn(Handle);
    module_function = c"cuModuleGetFunction": fn(*mut Handle, Handle, *const c_char);
    launch = c"cuLaunchKernel": fn(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
    capture_begin = c"cuStreamBeginCapture_v2": fn(Handle, c_uint);
    capture_end = c"cuStreamEndCapture": fn(Handle, *mut Handle);
    graph_make = c"cuGraphInstantiateWithFlags": fn(*mut Handle, Handle, c_ulonglong);
    graph_launch = c"cuGraphLaunch": fn(Handle, Handle);
    graph_destroy = c"cuGraphDestroy": fn(Handle);
    graph_free = c"cuGraphExecDestroy": fn(Handle);
    stream_create = c"cuStreamCreate": fn(*mut Handle, c_uint);
    stream_destroy = c"cuStreamDestroy_v2": fn(Handle);
    stream_query = c"cuStreamQuery": fn(Handle);
    stream_wait_event = c"cuStreamWaitEvent": fn(Handle, Handle, c_uint);
    event_create = c"cuEventCreate": fn(*mut Handle, c_uint);
    event_destroy = c"cuEventDestroy_v2": fn(Handle);
    event_record = c"cuEventRecord": fn(Handle, Handle);
    event_query = c"cuEventQuery": fn(Handle);
    error_name = c"cuGetErrorName": fn(Status, *mut *const c_char);
    error_text = c"cuGetErrorString": fn(Status, *mut *const c_char);
}

/// The driver of this machine.
///
/// # Errors
/// The loader's message about the library, or the function that it lacks.
pub(crate) fn system() -> Result<Api, String> {
    // SAFETY: the name ends in a zero byte. What the library does while it is loaded is trusted: its user
    // installed it.
    let handle = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: the loader's text is null or ends in a zero byte, and stays until its next call in this
        // thread.
        let message = unsafe {
            let text = libc::dlerror();
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        return Err(message.unwrap_or_default());
    }
    let find = |name: &CStr| {
        // SAFETY: the handle is of `dlopen` and never closed, and the name ends in a zero byte.
        let at = unsafe { libc::dlsym(handle, name.as_ptr()) };
        (!at.is_null()).then_some(at)
    };
    // SAFETY: the library is NVIDIA's by its name, and never closed.
    unsafe { Api::load(&find) }.map_err(|name| format!("it has no `{}`", name.to_string_lossy()))
}
