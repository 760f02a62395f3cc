//! The unit on a driver that is made up: what it is asked in which order, and what its refusals become.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::Gpu;
use crate::api::{Api, Handle, Status, code};
use crate::gpu::LIMIT;
use moec_ir::plan::Builtin;
use moec_ir::text::parse_plan;
use moec_runtime::Result;
use moec_runtime::memory::Addr;
use moec_runtime::program::{Code, Program};
use moec_runtime::unit::{Lane, Launch, StepFault, Unit as _, Units};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs;
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// A driver: what it was asked, and how it answers.
struct Fake {
    asked: Vec<String>,
    cards: c_int,
    generation: [c_int; 2],
    free: usize,
    /// A function that refuses, and the number that it gives.
    refuses: Option<(&'static str, Status)>,
    /// What the assembler says.
    says: &'static str,
    memory: Vec<u8>,
}

static FAKE: Mutex<Fake> = Mutex::new(Fake {
    asked: Vec::new(),
    cards: 1,
    generation: [9, 0],
    free: 1 << 20,
    refuses: None,
    says: "",
    memory: Vec::new(),
});
/// One test after the other: the driver is one for all.
static TURN: Mutex<()> = Mutex::new(());

fn turn(change: impl FnOnce(&mut Fake)) -> MutexGuard<'static, ()> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut fake = FAKE.lock().unwrap_or_else(PoisonError::into_inner);
    (fake.asked, fake.cards, fake.generation) = (Vec::new(), 1, [9, 0]);
    (fake.free, fake.refuses, fake.says) = (1 << 20, None, "");
    change(&mut fake);
    turn
}

/// Notes a call; the status that it gives.
fn note(function: &'static str, what: String) -> Status {
    let mut fake = FAKE.lock().unwrap_or_else(PoisonError::into_inner);
    let name = function.strip_suffix("_v2").unwrap_or(function);
    fake.asked.push(if what.is_empty() { name.to_owned() } else { format!("{name} {what}") });
    fake.refuses.filter(|(of, _)| *of == name).map_or(code::SUCCESS, |(_, status)| status)
}

fn asked() -> Vec<String> {
    std::mem::take(&mut FAKE.lock().unwrap().asked)
}

/// Writes what a call gives, unless it refuses.
unsafe fn give<T>(status: Status, to: *mut T, value: T) -> Status {
    if status == code::SUCCESS {
        // SAFETY: the caller's: the address is of such a value.
        unsafe { to.write(value) };
    }
    status
}

const COMPUTE: usize = 0x11;
const COPIES: usize = 0x12;

fn handle(number: usize) -> Handle {
    std::ptr::without_provenance_mut(number)
}

fn stream(of: Handle) -> &'static str {
    match of.addr() {
        COMPUTE => "compute",
        COPIES => "copies",
        _ => "?",
    }
}

fn fake() -> Api {
    unsafe extern "C" fn init(_: c_uint) -> Status {
        note("cuInit", String::new())
    }
    unsafe extern "C" fn device_count(count: *mut c_int) -> Status {
        let cards = FAKE.lock().unwrap().cards;
        // SAFETY: the addresses that the card gives are of its variables; so in all functions below.
        unsafe { give(note("cuDeviceGetCount", String::new()), count, cards) }
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
        let says = FAKE.lock().unwrap().says;
        // SAFETY: the text ends in a zero byte; there are as many options and values as is said, and the log has the bytes of
        // the second one.
        unsafe {
            let options = std::slice::from_raw_parts(options, count as usize);
            let values = std::slice::from_raw_parts(values, count as usize);
            assert_eq!(options, [code::ERROR_LOG, code::ERROR_LOG_BYTES]);
            assert!(values[1].addr() > says.len());
            values[0].cast::<u8>().copy_from_nonoverlapping(says.as_ptr(), says.len());
            let text = CStr::from_ptr(text.cast()).to_bytes();
            let what = match text.starts_with(b"\x7fELF") {
                true => "code".to_owned(),
                false => format!("{} lines", String::from_utf8_lossy(text).lines().count()),
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
        let how = format!("[{x}, {y}, {z}] of {block} ({a}, {b}, {rows}) shared {shared} on {}", stream(of));
        note("cuLaunchKernel", how)
    }
    unsafe extern "C" fn stream_create(of: *mut Handle, flags: c_uint) -> Status {
        let all = FAKE.lock().unwrap().asked.iter().filter(|a| a.starts_with("cuStreamCreate")).count();
        let stream = if all == 0 { COMPUTE } else { COPIES };
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

/// A kernel that does nothing with two addresses and a number of rows.
const PTX: &str = ".version 7.8
.target sm_90
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b, .param .u32 n) .reqntid 32
{
ret;
}
";

/// A plan whose one entry launches it on rows that crossed, and brings back what it gives.
const PLAN: &str = r#"plan 15 {scratch_bytes = 0}
model "m" {vocab = 1, hidden = 1, layers = 1, max_context = 4, slots = 1, eos = [], parameters = 1, active_parameters = 1}
target "t" {triple = "t", cpu = "c", features = []}
unit 0 "cpu" {family = "cpu", memory = 0}
unit 1 "gpu" {family = "cuda", memory = 1}
memory 0 "ram" {arena_bytes = 320}
memory 1 "vram" {arena_bytes = 128}
link 0 {from = 0, to = 1}
launch 0 "k" {unit = 1, artifact = "artifacts/gpu.ptx", operands = 2, grid = [rows(per = 2), fixed(blocks = 3), fixed(blocks = 1)], block = 32, shared = 0}
entry prefill[4] {out_rows = 4, logits = 4} {
  buffer 0 "%0" i32[4, 1] {offset = 0, bytes = 64}
  buffer 1 "%1" i32[4, 1] {offset = 64, bytes = 64}
  buffer 2 "%2" i32[4, 1] {offset = 128, bytes = 64}
  buffer 3 "%3" i32[4, 1] {offset = 192, bytes = 64}
  buffer 4 "l" f32[4, 1] {offset = 256, bytes = 64}
  buffer 5 "x@1" i32[4, 1] {offset = 0, bytes = 64, memory = 1}
  buffer 6 "l@1" f32[4, 1] {offset = 64, bytes = 64, memory = 1}
  step 0 copy {words = 1, span = rows} (buffer 0, buffer 5) {unit = 1, rows = tokens, grid = one, deps = [], node = 0}
  step 1 launch {kernel = 0} (buffer 5, buffer 6) {unit = 1, rows = tokens, grid = one, deps = [0], node = 0}
  step 2 copy {words = 1, span = rows} (buffer 6, buffer 4) {unit = 1, rows = tokens, grid = one, deps = [1], node = 0}
}
"#;

fn program() -> Program {
    Program::new(parse_plan(PLAN).unwrap(), &|_| None).unwrap()
}

/// A folder with the artifact, which is removed at the end.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(text: &str) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let own = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("moec-cuda-{}-{own}", std::process::id()));
        fs::create_dir_all(path.join("artifacts")).unwrap();
        fs::write(path.join("artifacts/gpu.ptx"), text).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a step of the plan on three rows.
fn step(gpu: &Gpu, code: Builtin, args: &[Addr], fault: &OnceLock<StepFault>) {
    let taken = AtomicUsize::new(0);
    let launch = Launch {
        code: Code::Builtin(code),
        args,
        grid: moec_ir::plan::Grid::One,
        n: 3,
        seq_len: 3,
        taken: &taken,
        step: 5,
        half: None,
        fault,
        units: Units::default(),
    };
    let lane = Lane { index: 0, of: 1, scratch: args[0] };
    // SAFETY: the addresses are those of the plan: in the made-up memory of the card, and of the test's own numbers.
    unsafe { gpu.submit(&launch, lane) };
}

const COPY: Builtin = Builtin::Copy { words: 1, span: moec_ir::plan::Span::Rows };

#[test]
fn steps_reach_the_card_in_their_order() {
    let _turn = turn(|_| {});
    let folder = Folder::new(PTX);
    let mut gpu = Gpu::with(fake(), "gpu", LIMIT).unwrap();
    assert_eq!(gpu.card(), "Card");
    gpu.load(&program(), 1, &folder.0).unwrap();
    let base = gpu.take(128).unwrap().unwrap();
    let opened = asked();
    assert_eq!(
        opened,
        [
            "cuInit",
            "cuDeviceGetCount",
            "cuDeviceGet 0",
            "cuDevicePrimaryCtxRetain 7",
            "cuStreamCreate 1",
            "cuStreamCreate 1",
            "cuEventCreate",
            "cuMemHostAlloc",
            "cuEventCreate",
            "cuMemHostAlloc",
            "cuEventCreate",
            "cuModuleLoadDataEx 7 lines",
            "cuModuleGetFunction k",
            "cuMemAlloc 128",
            "cuMemsetD8Async 128 on compute",
        ]
    );
    let fault = OnceLock::new();
    let (numbers, mut y) = ([3_i32, 4, 5], [9_i32; 3]);
    let [x, y_at] = [Addr::read_only(numbers.as_ptr().cast()), Addr::read_only(y.as_mut_ptr().cast())];
    step(&gpu, COPY, &[x, base], &fault);
    step(&gpu, Builtin::Launch { kernel: 0 }, &[base, base.plus(64)], &fault);
    step(&gpu, COPY, &[base, y_at], &fault);
    gpu.wait(&fault);
    assert!(fault.get().is_none(), "{fault:?}");
    assert_eq!(y, [3, 4, 5]);
    assert_eq!(
        asked(),
        [
            "cuEventRecord compute",
            "cuStreamWaitEvent copies",
            "cuEventQuery",
            "cuMemcpyHtoDAsync 12 to 0 on copies",
            "cuEventRecord copies",
            "cuEventRecord copies",
            "cuStreamWaitEvent compute",
            "cuLaunchKernel [2, 3, 1] of 32 (0, 64, 3) shared 0 on compute",
            "cuEventRecord compute",
            "cuStreamWaitEvent copies",
            "cuEventQuery",
            "cuMemcpyDtoHAsync 12 from 0 on copies",
            "cuEventRecord copies",
            "cuEventQuery",
            "cuStreamQuery compute",
        ]
    );
    drop(gpu);
    assert_eq!(
        asked(),
        [
            "cuStreamDestroy compute",
            "cuStreamDestroy copies",
            "cuEventDestroy",
            "cuEventDestroy",
            "cuMemFreeHost",
            "cuEventDestroy",
            "cuMemFreeHost",
            "cuMemFree",
            "cuModuleUnload",
            "cuDevicePrimaryCtxRelease",
        ]
    );
}

fn said<T>(result: Result<T>) -> (String, String) {
    let error = result.err().unwrap();
    (error.to_string(), error.hint().unwrap_or_default())
}

#[test]
fn what_the_driver_refuses_is_said_by_name() {
    let folder = Folder::new(PTX);
    let open = |change: &dyn Fn(&mut Fake)| {
        let turn = turn(|fake| change(fake));
        (Gpu::with(fake(), "gpu", LIMIT), turn)
    };
    let (none, guard) = open(&|f| f.cards = 0);
    let (why, hint) = said(none);
    assert!(
        why.contains("the unit `gpu` cannot be used: there is no card") && hint.contains("--emulate"),
        "{why}"
    );
    drop(guard);
    let (gpu, guard) = open(&|f| f.generation = [8, 9]);
    let (why, hint) = said(gpu.unwrap().load(&program(), 1, &folder.0));
    assert!(
        why.contains("for sm_90, and `Card` is of sm_89") && hint.contains("sm = \"sm_89\""),
        "{why}: {hint}"
    );
    drop(guard);
    let (gpu, guard) = open(&|f| {
        f.refuses = Some(("cuModuleLoadDataEx", code::UNSUPPORTED_PTX_VERSION));
        f.says = "ptxas fatal: Unsupported .version 7.8";
    });
    let (why, hint) = said(gpu.unwrap().load(&program(), 1, &folder.0));
    assert!(
        why.contains("CUDA_ERROR_UNSUPPORTED_PTX_VERSION: ptxas fatal: Unsupported .version 7.8"),
        "{why}"
    );
    assert!(hint.contains("update NVIDIA's driver"), "{hint}");
    drop(guard);
    let (gpu, guard) = open(&|f| f.free = 100);
    let (why, hint) = said(gpu.unwrap().take(128));
    assert!(why.contains("it needs 128 bytes of memory, and 100 are free on `Card`"), "{why}");
    assert!(hint.contains("place less there"), "{hint}");
    drop(guard);
    let (gpu, guard) = open(&|f| f.refuses = Some(("cuMemAlloc", code::OUT_OF_MEMORY)));
    let (why, _) = said(gpu.unwrap().take(128));
    assert!(why.contains("128 bytes of memory in one piece"), "{why}");
    drop(guard);
    // An error without a name is said by its number.
    let (gpu, _guard) = open(&|f| f.refuses = Some(("cuInit", 999)));
    let (why, _) = said(gpu);
    assert!(why.contains("does not start: cuInit gives error 999"), "{why}");
}

/// A kernel that does not end is given up, and so is all that would wait for it.
#[test]
fn a_kernel_that_does_not_end_is_named() {
    let _turn = turn(|_| {});
    let folder = Folder::new(PTX);
    let mut gpu = Gpu::with(fake(), "gpu", Duration::from_millis(5)).unwrap();
    gpu.load(&program(), 1, &folder.0).unwrap();
    let base = gpu.take(128).unwrap().unwrap();
    let fault = OnceLock::new();
    step(&gpu, Builtin::Launch { kernel: 0 }, &[base, base.plus(64)], &fault);
    FAKE.lock().unwrap().refuses = Some(("cuStreamQuery", code::NOT_READY));
    asked();
    gpu.wait(&fault);
    let Some(StepFault::Unit(why)) = fault.get() else { unreachable!("{fault:?}") };
    assert!(why.to_string().contains("have not ended within 0.005 s"), "{why}");
    asked();
    drop(gpu);
    assert!(asked().is_empty());
}

/// Operands outside of the card's memory, and kernels that trapped, end the call with their names.
#[test]
fn what_stops_a_step_is_named() {
    let _turn = turn(|_| {});
    let folder = Folder::new(PTX);
    let mut gpu = Gpu::with(fake(), "gpu", LIMIT).unwrap();
    gpu.load(&program(), 1, &folder.0).unwrap();
    let base = gpu.take(128).unwrap().unwrap();
    let message = |fault: OnceLock<StepFault>| match fault.into_inner() {
        Some(StepFault::Unit(e)) => e.to_string(),
        other => format!("{other:?}"),
    };
    let fault = OnceLock::new();
    step(&gpu, Builtin::Launch { kernel: 0 }, &[base, base.plus(128)], &fault);
    let why = message(fault);
    assert!(why.contains("kernel `k` on `gpu`: operand 1 of step 5 lies outside of its memory"), "{why}");
    FAKE.lock().unwrap().refuses = Some(("cuStreamQuery", 719));
    let fault = OnceLock::new();
    gpu.wait(&fault);
    let why = message(fault);
    assert!(
        why.contains(
            "a kernel stopped: cuStreamQuery gives CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)"
        ),
        "{why}"
    );
    FAKE.lock().unwrap().refuses = Some(("cuMemcpyHtoDAsync", 719));
    // SAFETY: twelve bytes are at both ends.
    unsafe { gpu.copy(Addr::read_only([0_u8; 12].as_ptr()), base, 12) };
    let fault = OnceLock::new();
    step(&gpu, Builtin::Launch { kernel: 0 }, &[base, base.plus(64)], &fault);
    let why = message(fault);
    assert!(why.contains("a copy failed"), "{why}");
}
