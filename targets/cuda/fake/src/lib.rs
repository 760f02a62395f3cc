//! A fake of NVIDIA's driver library, which executes kernels on the host ([`moec_ptx`]), for tests of its
//! callers.
//!
//! A test puts it under the name `libcuda.so.1` where the loader looks. It has one GPU, whose work is done
//! when a call returns. Variables change it:
//!
//! | variable | meaning |
//! |---|---|
//! | `MOEC_FAKE_LOG` | file that every call is written to, a line each |
//! | `MOEC_FAKE_GPUS` | `0`: no GPU |
//! | `MOEC_FAKE_SM` | its generation, 90 by default |
//! | `MOEC_FAKE_FREE` | bytes that are free, 64 MiB by default |
//! | `MOEC_FAKE_REFUSE` | `FUNCTION=NUMBER`: what gives that error |
//!
//! `unsafe` is in this file: addresses are those of a caller that keeps to the driver's documentation (CUDA
//! Driver API, 12.x).
#![expect(clippy::cast_possible_truncation, reason = "a stand-in for tests")]
#![allow(
    clippy::missing_safety_doc,
    reason = "these are the driver's functions: its documentation says what they take"
)]

mod state;

use state::{State, note, with};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

type Status = c_int;
type Handle = *mut c_void;

const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 1;
const OUT_OF_MEMORY: Status = 2;
const INVALID_PTX: Status = 218;
const NOT_FOUND: Status = 500;
const LAUNCH_FAILED: Status = 719;

/// Errors with names and words.
const ERRORS: &[(Status, &CStr, &CStr)] = &[
    (INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (OUT_OF_MEMORY, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (209, c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"no kernel image is available for execution on the device"),
    (INVALID_PTX, c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
    (NOT_FOUND, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (LAUNCH_FAILED, c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
    (
        803,
        c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        c"system has unsupported display driver / cuda driver combination",
    ),
];

/// Notes a call; writes what it gives, unless it refuses.
unsafe fn give<T>(function: &str, what: &str, to: *mut T, value: T) -> Status {
    let status = note(function, what);
    if status == SUCCESS {
        // SAFETY: the caller's: the address is of such a value.
        unsafe { to.write(value) };
    }
    status
}

const fn handle(number: usize) -> Handle {
    std::ptr::without_provenance_mut(number)
}

macro_rules! driver {
    ($($name:ident($($arg:ident: $ty:ty),*) $body:block)*) => {
        $(
            #[doc = concat!("As `", stringify!($name), "` of the driver.")]
            #[allow(non_snake_case, reason = "the driver's name")]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> Status $body
        )*
    };
}

// SAFETY of all blocks below: addresses are of the caller's variables, or of so many bytes as it says; texts
// end in a zero byte.
driver! {
    cuInit(_flags: c_uint) { note("cuInit", "") }
    cuDeviceGetCount(count: *mut c_int) {
        let gpus = c_int::from(state::number("MOEC_FAKE_GPUS", 1) > 0);
        // SAFETY: as above.
        unsafe { give("cuDeviceGetCount", "", count, gpus) }
    }
    cuDeviceGet(device: *mut c_int, _index: c_int) {
        // SAFETY: as above.
        unsafe { give("cuDeviceGet", "", device, 0) }
    }
    cuDeviceGetName(name: *mut c_char, bytes: c_int, _device: c_int) {
        let text = c"A GPU that is made up".to_bytes_with_nul();
        for (i, c) in text.iter().take(bytes.max(0) as usize).enumerate() {
            // SAFETY: as above.
            unsafe { name.add(i).write(*c as c_char) };
        }
        SUCCESS
    }
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) {
        let sm = state::number("MOEC_FAKE_SM", 90) as c_int;
        let number = match attribute {
            75 => sm / 10,
            76 => sm % 10,
            // Two multiprocessors, and a memory of 1024 bits, all at 1 GHz.
            13 | 36 => 1_000_000,
            16 => 2,
            37 => 1024,
            _ => return INVALID_VALUE,
        };
        // SAFETY: as above.
        unsafe { value.write(number) };
        SUCCESS
    }
    cuDevicePrimaryCtxRetain(context: *mut Handle, _device: c_int) {
        // SAFETY: as above.
        unsafe { give("cuDevicePrimaryCtxRetain", "", context, handle(16)) }
    }
    cuDevicePrimaryCtxRelease_v2(_device: c_int) { note("cuDevicePrimaryCtxRelease", "") }
    cuCtxSetCurrent(_context: Handle) { SUCCESS }
    cuMemGetInfo_v2(free: *mut usize, all: *mut usize) {
        let bytes = state::number("MOEC_FAKE_FREE", 64 << 20) as usize;
        // SAFETY: as above.
        unsafe {
            free.write(bytes);
            all.write(2 * bytes);
        }
        SUCCESS
    }
    cuMemAlloc_v2(at: *mut u64, bytes: usize) {
        let Some(address) = with(|s| s.take(bytes)) else { return OUT_OF_MEMORY };
        // SAFETY: as above.
        unsafe { give("cuMemAlloc", &bytes.to_string(), at, address) }
    }
    cuMemFree_v2(_at: u64) { note("cuMemFree", "") }
    cuMemsetD8Async(at: u64, value: u8, bytes: usize, _stream: Handle) {
        done(note("cuMemsetD8Async", &bytes.to_string()), |s| s.write(at, &vec![value; bytes]))
    }
    cuMemHostAlloc(at: *mut *mut c_void, bytes: usize, _flags: c_uint) {
        let buffer = vec![0_u8; bytes].leak().as_mut_ptr().cast();
        // SAFETY: as above.
        unsafe { give("cuMemHostAlloc", &bytes.to_string(), at, buffer) }
    }
    cuMemFreeHost(_at: *mut c_void) { note("cuMemFreeHost", "") }
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, _stream: Handle) {
        // SAFETY: as above.
        let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
        done(note("cuMemcpyHtoDAsync", &bytes.to_string()), |s| s.write(to, from))
    }
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, _stream: Handle) {
        // SAFETY: as above.
        let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes) };
        done(note("cuMemcpyDtoHAsync", &bytes.to_string()), |s| s.read(from, to))
    }
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, _stream: Handle) {
        let mut between = vec![0; bytes];
        done(note("cuMemcpyDtoDAsync", &bytes.to_string()), |s| {
            s.read(from, &mut between)?;
            s.write(to, &between)
        })
    }
    cuModuleLoadDataEx(
        module: *mut Handle, image: *const c_void, count: c_uint, options: *mut c_uint, values: *mut *mut c_void
    ) {
        // SAFETY: as above; data that is not an ELF file is a text.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_bytes();
        if text.starts_with(b"\x7fELF") {
            // Machine code cannot be executed here.
            note("cuModuleLoadDataEx", "code");
            return 209;
        }
        let loaded = with(|s| s.load(&String::from_utf8_lossy(text)));
        let Err(why) = loaded else {
            // SAFETY: as above.
            return unsafe { give("cuModuleLoadDataEx", "text", module, handle(32)) };
        };
        for i in 0..count as usize {
            // SAFETY: as above: there are `count` options, and the size of the log follows the log.
            unsafe {
                if *options.add(i) == 5 && i + 1 < count as usize {
                    let room = (*values.add(i + 1)).addr().saturating_sub(1).min(why.len());
                    (*values.add(i)).cast::<u8>().copy_from_nonoverlapping(why.as_ptr(), room);
                }
            }
        }
        INVALID_PTX
    }
    cuModuleUnload(_module: Handle) { note("cuModuleUnload", "") }
    cuModuleGetFunction(function: *mut Handle, _module: Handle, name: *const c_char) {
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let Some(index) = with(|s| s.kernel(&name)) else { return NOT_FOUND };
        // SAFETY: as above.
        unsafe { give("cuModuleGetFunction", &name, function, handle(index + 1)) }
    }
    cuLaunchKernel(
        function: Handle, x: c_uint, y: c_uint, z: c_uint, bx: c_uint, by: c_uint, bz: c_uint, _shared: c_uint,
        _stream: Handle, parameters: *mut *mut c_void, _extra: *mut *mut c_void
    ) {
        let index = function.addr().wrapping_sub(1);
        let what = with(|s| s.name(index)).unwrap_or_default();
        let status = note("cuLaunchKernel", &what);
        // SAFETY: as above: as many parameters as the kernel has, of its sizes.
        let parameter = |i: usize, bytes: u32| unsafe {
            let at = *parameters.add(i);
            if bytes == 8 { at.cast::<u64>().read() } else { at.cast::<u32>().read().into() }
        };
        done(status, |s| {
            let launch = s.parameters(index, [x, y, z], [bx, by, bz], parameter)?;
            s.captured(launch)
        })
    }
    cuStreamBeginCapture_v2(_stream: Handle, _mode: c_uint) {
        done(note("cuStreamBeginCapture", ""), State::begin)
    }
    cuStreamEndCapture(_stream: Handle, graph: *mut Handle) {
        let Some(made) = with(State::end) else { return INVALID_VALUE };
        // SAFETY: as above.
        unsafe { give("cuStreamEndCapture", "", graph, handle(made + 1)) }
    }
    cuGraphInstantiateWithFlags(made: *mut Handle, graph: Handle, _flags: u64) {
        // SAFETY: as above.
        unsafe { give("cuGraphInstantiateWithFlags", "", made, graph) }
    }
    cuGraphLaunch(graph: Handle, _stream: Handle) {
        done(note("cuGraphLaunch", ""), |s| s.replay(graph.addr().wrapping_sub(1)))
    }
    cuGraphDestroy(_graph: Handle) { note("cuGraphDestroy", "") }
    cuGraphExecDestroy(_graph: Handle) { note("cuGraphExecDestroy", "") }
    cuStreamCreate(stream: *mut Handle, _flags: c_uint) {
        // SAFETY: as above.
        unsafe { give("cuStreamCreate", "", stream, handle(48)) }
    }
    cuStreamDestroy_v2(_stream: Handle) { note("cuStreamDestroy", "") }
    cuStreamQuery(_stream: Handle) { note("cuStreamQuery", "") }
    cuStreamWaitEvent(_stream: Handle, _event: Handle, _flags: c_uint) { note("cuStreamWaitEvent", "") }
    cuEventCreate(event: *mut Handle, _flags: c_uint) {
        // SAFETY: as above.
        unsafe { give("cuEventCreate", "", event, handle(64)) }
    }
    cuEventDestroy_v2(_event: Handle) { note("cuEventDestroy", "") }
    cuEventRecord(_event: Handle, _stream: Handle) { note("cuEventRecord", "") }
    cuEventQuery(_event: Handle) { note("cuEventQuery", "") }
    cuGetErrorName(status: Status, name: *mut *const c_char) {
        let Some((_, text, _)) = ERRORS.iter().find(|(of, ..)| *of == status) else { return INVALID_VALUE };
        // SAFETY: as above.
        unsafe { name.write(text.as_ptr()) };
        SUCCESS
    }
    cuGetErrorString(status: Status, words: *mut *const c_char) {
        let Some((.., text)) = ERRORS.iter().find(|(of, ..)| *of == status) else { return INVALID_VALUE };
        // SAFETY: as above.
        unsafe { words.write(text.as_ptr()) };
        SUCCESS
    }
}

/// Does the requested work, unless it refuses.
fn done(status: Status, work: impl FnOnce(&mut State) -> Option<()>) -> Status {
    if status != SUCCESS {
        return status;
    }
    with(work).map_or(LAUNCH_FAILED, |()| SUCCESS)
}
