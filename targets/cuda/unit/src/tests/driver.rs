//! A fake driver, which records its calls and returns chosen answers.

use crate::api::{Api, Handle, Status, code};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// State of the fake driver: recorded calls and chosen answers.
pub(super) struct Fake {
    pub(super) calls: Vec<String>,
    pub(super) gpus: c_int,
    pub(super) generation: [c_int; 2],
    pub(super) free: usize,
    /// A function that fails, and its error number.
    pub(super) refuses: Option<(&'static str, Status)>,
    /// Output of the assembler.
    pub(super) log: &'static str,
    pub(super) memory: Vec<u8>,
}

pub(super) static FAKE: Mutex<Fake> = Mutex::new(Fake {
    calls: Vec::new(),
    gpus: 1,
    generation: [9, 0],
    free: 1 << 20,
    refuses: None,
    log: "",
    memory: Vec::new(),
});
/// Serializes the tests, which share one driver.
static FAKE_LOCK: Mutex<()> = Mutex::new(());

pub(super) fn lock_fake(change: impl FnOnce(&mut Fake)) -> MutexGuard<'static, ()> {
    let guard = FAKE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let mut fake = FAKE.lock().unwrap_or_else(PoisonError::into_inner);
    (fake.calls, fake.gpus, fake.generation) = (Vec::new(), 1, [9, 0]);
    (fake.free, fake.refuses, fake.log) = (1 << 20, None, "");
    change(&mut fake);
    guard
}

/// Records a call; returns its status.
fn note(function: &'static str, what: String) -> Status {
    let mut fake = FAKE.lock().unwrap_or_else(PoisonError::into_inner);
    let name = function.strip_suffix("_v2").unwrap_or(function);
    fake.calls.push(if what.is_empty() { name.to_owned() } else { format!("{name} {what}") });
    fake.refuses.filter(|(of, _)| *of == name).map_or(code::SUCCESS, |(_, status)| status)
}

pub(super) fn calls() -> Vec<String> {
    std::mem::take(&mut FAKE.lock().unwrap().calls)
}

/// Writes the result of a call, unless it fails.
unsafe fn give<T>(status: Status, to: *mut T, value: T) -> Status {
    if status == code::SUCCESS {
        // SAFETY: promised by the caller: the address is that of such a value.
        unsafe { to.write(value) };
    }
    status
}

const COMPUTE: usize = 0x11;
const COPIES: usize = 0x12;
const COPY_STREAM: usize = 0x13;

fn handle(number: usize) -> Handle {
    std::ptr::without_provenance_mut(number)
}

fn stream(of: Handle) -> &'static str {
    match of.addr() {
        COMPUTE => "compute",
        COPIES => "copies",
        COPY_STREAM => "beside",
        _ => "?",
    }
}

pub(super) fn fake() -> Api {
    unsafe extern "C" fn init(_: c_uint) -> Status {
        note("cuInit", String::new())
    }
    unsafe extern "C" fn device_count(count: *mut c_int) -> Status {
        let gpus = FAKE.lock().unwrap().gpus;
        // SAFETY: the unit passes addresses of its own variables; the same holds in all functions below.
        unsafe { give(note("cuDeviceGetCount", String::new()), count, gpus) }
    }
    unsafe extern "C" fn device_get(device: *mut c_int, index: c_int) -> Status {
        // SAFETY: as above.
        unsafe { give(note("cuDeviceGet", index.to_string()), device, 7) }
    }
    unsafe extern "C" fn device_name(name: *mut c_char, _: c_int, _: c_int) -> Status {
        for (i, c) in c"Card".to_bytes_with_nul().iter().enumerate() {
            // SAFETY: as above.
            unsafe { name.add(i).write(*c as c_char) };
        }
        code::SUCCESS
    }
    unsafe extern "C" fn device_attribute(value: *mut c_int, attribute: c_int, _: c_int) -> Status {
        let generation = FAKE.lock().unwrap().generation;
        // SAFETY: as above.
        unsafe { give(code::SUCCESS, value, generation[usize::from(attribute == code::CAPABILITY[1])]) }
    }
    unsafe extern "C" fn context_retain(context: *mut Handle, device: c_int) -> Status {
        // SAFETY: as above.
        unsafe { give(note("cuDevicePrimaryCtxRetain", device.to_string()), context, handle(0x10)) }
    }
    unsafe extern "C" fn context_release(_: c_int) -> Status {
        note("cuDevicePrimaryCtxRelease_v2", String::new())
    }
    unsafe extern "C" fn context_set(_: Handle) -> Status {
        code::SUCCESS
    }
    unsafe extern "C" fn memory_info(free: *mut usize, all: *mut usize) -> Status {
        let bytes = FAKE.lock().unwrap().free;
        // SAFETY: as above.
        unsafe { give(give(code::SUCCESS, free, bytes), all, 1 << 30) }
    }
    unsafe extern "C" fn memory_alloc(at: *mut u64, bytes: usize) -> Status {
        let status = note("cuMemAlloc_v2", bytes.to_string());
        let mut fake = FAKE.lock().unwrap();
        fake.memory = vec![0xff; bytes];
        let address = fake.memory.as_ptr().addr() as u64;
        // SAFETY: as above.
        unsafe { give(status, at, address) }
    }
    unsafe extern "C" fn memory_free(_: u64) -> Status {
        note("cuMemFree_v2", String::new())
    }
    unsafe extern "C" fn memory_zero(_: u64, value: u8, bytes: usize, of: Handle) -> Status {
        FAKE.lock().unwrap().memory.fill(value);
        note("cuMemsetD8Async", format!("{bytes} on {}", stream(of)))
    }
    unsafe extern "C" fn host_alloc(at: *mut *mut c_void, bytes: usize, _: c_uint) -> Status {
        let buffer = vec![0_u8; bytes].leak().as_mut_ptr().cast();
        // SAFETY: as above.
        unsafe { give(note("cuMemHostAlloc", String::new()), at, buffer) }
    }
    unsafe extern "C" fn host_free(_: *mut c_void) -> Status {
        note("cuMemFreeHost", String::new())
    }
    unsafe extern "C" fn copy_in(to: u64, from: *const c_void, bytes: usize, of: Handle) -> Status {
        let mut fake = FAKE.lock().unwrap();
        let at = (to as usize) - fake.memory.as_ptr().addr();
        // SAFETY: the pinned buffer has as many bytes.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
        fake.memory[at..at + bytes.len()].copy_from_slice(bytes);
        drop(fake);
        note("cuMemcpyHtoDAsync_v2", format!("{} to {at} on {}", bytes.len(), stream(of)))
    }
    unsafe extern "C" fn copy_out(to: *mut c_void, from: u64, bytes: usize, of: Handle) -> Status {
        let fake = FAKE.lock().unwrap();
        let at = (from as usize) - fake.memory.as_ptr().addr();
        // SAFETY: the pinned buffer has as many bytes.
        unsafe { fake.memory.as_ptr().add(at).copy_to_nonoverlapping(to.cast(), bytes) };
        drop(fake);
        note("cuMemcpyDtoHAsync_v2", format!("{bytes} from {at} on {}", stream(of)))
    }
    unsafe extern "C" fn copy_within(_: u64, _: u64, bytes: usize, _: Handle) -> Status {
        note("cuMemcpyDtoDAsync_v2", bytes.to_string())
    }
    unsafe extern "C" fn module_load(
        module: *mut Handle,
        text: *const c_void,
        count: c_uint,
        options: *mut c_uint,
        values: *mut *mut c_void,
    ) -> Status {
        let log = FAKE.lock().unwrap().log;
        // SAFETY: the text ends in a zero byte. There are as many options and values as `count` says, and the
        // log has as many bytes as the second value says.
        unsafe {
            let options = std::slice::from_raw_parts(options, count as usize);
            let values = std::slice::from_raw_parts(values, count as usize);
            assert_eq!(options, [code::ERROR_LOG, code::ERROR_LOG_BYTES]);
            assert!(values[1].addr() > log.len());
            values[0].cast::<u8>().copy_from_nonoverlapping(log.as_ptr(), log.len());
            let text = CStr::from_ptr(text.cast()).to_bytes();
            let what = if text.starts_with(b"\x7fELF") {
                "code".to_owned()
            } else {
                format!("{} lines", String::from_utf8_lossy(text).lines().count())
            };
            give(note("cuModuleLoadDataEx", what), module, handle(0x20))
        }
    }
    unsafe extern "C" fn module_unload(_: Handle) -> Status {
        note("cuModuleUnload", String::new())
    }
    unsafe extern "C" fn module_function(function: *mut Handle, _: Handle, name: *const c_char) -> Status {
        // SAFETY: names end in a zero byte.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        // SAFETY: as above.
        unsafe { give(note("cuModuleGetFunction", name), function, handle(0x30)) }
    }
    unsafe extern "C" fn launch(
        _: Handle,
        x: c_uint,
        y: c_uint,
        z: c_uint,
        block: c_uint,
        _: c_uint,
        _: c_uint,
        shared: c_uint,
        of: Handle,
        parameters: *mut *mut c_void,
        _: *mut *mut c_void,
    ) -> Status {
        let base = FAKE.lock().unwrap().memory.as_ptr().addr() as u64;
        // SAFETY: the kernel of these tests has two addresses and a number of rows.
        let (a, b, rows) = unsafe {
            let p = std::slice::from_raw_parts(parameters, 3);
            (p[0].cast::<u64>().read() - base, p[1].cast::<u64>().read() - base, p[2].cast::<u32>().read())
        };
        let text = format!("[{x}, {y}, {z}] of {block} ({a}, {b}, {rows}) shared {shared} on {}", stream(of));
        note("cuLaunchKernel", text)
    }
    unsafe extern "C" fn stream_create(of: *mut Handle, flags: c_uint) -> Status {
        let all = FAKE.lock().unwrap().calls.iter().filter(|a| a.starts_with("cuStreamCreate")).count();
        let stream = [COMPUTE, COPIES, COPY_STREAM][all % 3];
        // SAFETY: as above.
        unsafe { give(note("cuStreamCreate", flags.to_string()), of, handle(stream)) }
    }
    unsafe extern "C" fn stream_destroy(of: Handle) -> Status {
        note("cuStreamDestroy_v2", stream(of).to_owned())
    }
    unsafe extern "C" fn stream_query(of: Handle) -> Status {
        note("cuStreamQuery", stream(of).to_owned())
    }
    unsafe extern "C" fn stream_wait_event(of: Handle, _: Handle, _: c_uint) -> Status {
        note("cuStreamWaitEvent", stream(of).to_owned())
    }
    unsafe extern "C" fn event_create(event: *mut Handle, _: c_uint) -> Status {
        // SAFETY: as above.
        unsafe { give(note("cuEventCreate", String::new()), event, handle(0x40)) }
    }
    unsafe extern "C" fn event_query(_: Handle) -> Status {
        note("cuEventQuery", String::new())
    }
    unsafe extern "C" fn capture_begin(of: Handle, mode: c_uint) -> Status {
        note("cuStreamBeginCapture_v2", format!("{mode} on {}", stream(of)))
    }
    unsafe extern "C" fn capture_end(of: Handle, graph: *mut Handle) -> Status {
        // SAFETY: as above.
        unsafe { give(note("cuStreamEndCapture", stream(of).to_owned()), graph, handle(0x50)) }
    }
    unsafe extern "C" fn graph_make(made: *mut Handle, _: Handle, _: c_ulonglong) -> Status {
        // SAFETY: as above.
        unsafe { give(note("cuGraphInstantiateWithFlags", String::new()), made, handle(0x51)) }
    }
    unsafe extern "C" fn graph_launch(graph: Handle, of: Handle) -> Status {
        note("cuGraphLaunch", format!("{:x} on {}", graph.addr(), stream(of)))
    }
    unsafe extern "C" fn graph_destroy(_: Handle) -> Status {
        note("cuGraphDestroy", String::new())
    }
    unsafe extern "C" fn graph_free(_: Handle) -> Status {
        note("cuGraphExecDestroy", String::new())
    }
    unsafe extern "C" fn error_text(status: Status, text: *mut *const c_char) -> Status {
        let known = match status {
            code::OUT_OF_MEMORY => c"out of memory",
            719 => c"unspecified launch failure",
            _ => return 1,
        };
        // SAFETY: as above.
        unsafe { give(code::SUCCESS, text, known.as_ptr()) }
    }
    unsafe extern "C" fn event_destroy(_: Handle) -> Status {
        note("cuEventDestroy_v2", String::new())
    }
    unsafe extern "C" fn event_record(_: Handle, of: Handle) -> Status {
        note("cuEventRecord", stream(of).to_owned())
    }
    unsafe extern "C" fn error_name(status: Status, name: *mut *const c_char) -> Status {
        let known = match status {
            code::UNSUPPORTED_PTX_VERSION => c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            719 => c"CUDA_ERROR_LAUNCH_FAILED",
            _ => return 1,
        };
        // SAFETY: as above.
        unsafe { give(code::SUCCESS, name, known.as_ptr()) }
    }
    Api {
        init,
        device_count,
        device_get,
        device_name,
        device_attribute,
        context_retain,
        context_release,
        context_set,
        memory_info,
        memory_alloc,
        memory_free,
        memory_zero,
        host_alloc,
        host_free,
        copy_in,
        copy_out,
        copy_within,
        module_load,
        module_unload,
        module_function,
        launch,
        capture_begin,
        capture_end,
        graph_make,
        graph_launch,
        graph_destroy,
        graph_free,
        stream_create,
        stream_destroy,
        stream_query,
        stream_wait_event,
        event_create,
        event_destroy,
        event_record,
        event_query,
        error_name,
        error_text,
    }
}
