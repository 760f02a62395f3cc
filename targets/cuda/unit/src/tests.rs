//! Tests of the unit with a fake driver: the order of calls, and the errors after refusals.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod driver;

use crate::Gpu;
use crate::api::code;
use crate::gpu::LIMIT;
use driver::{FAKE, Fake, calls, fake, lock_fake};
use moec_ir::plan::{Builtin, FileRef};
use moec_ir::text::parse_plan;
use moec_runtime::bundle::BundleReader;
use moec_runtime::bundle::program::{Code, Program};
use moec_runtime::exec::unit::{ComputeUnit as _, Launch, PoolThread, StepFault, Units};
use moec_runtime::platform::memory::Addr;
use moec_runtime::{CheckLevel, Result};
use std::ffi::c_int;
use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

/// An empty kernel with two addresses and a number of rows as parameters.
const PTX: &str = ".version 7.8
.target sm_90
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b, .param .u32 n) .reqntid 32
{
ret;
}
";

/// A plan whose only entry point copies rows to the GPU, launches the kernel, and copies the result back.
const PLAN: &str = r#"plan 24 {scratch_bytes = 0}
model "m" {vocab = 1, hidden = 1, layers = 1, max_context = 4, slots = 1, eos = [], parameters = 1, active_parameters = 1}
target "t" {triple = "t", cpu = "c", features = []}
unit 0 "cpu" {backend = "cpu", memory = 0}
unit 1 "gpu" {backend = "cuda", memory = 1}
memory 0 "ram" {arena_bytes = 320}
memory 1 "vram" {arena_bytes = 128}
link 0 {from = 0, to = 1}
launch 0 "k" {unit = 1, artifact = "artifacts/gpu.ptx", operands = 2, results = [1], grid = [rows(per = 2), fixed(blocks = 3), fixed(blocks = 1)], block = 32, shared = 0}
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

/// A folder with the artifact, which is removed on drop.
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

    fn files(&self) -> BundleReader {
        BundleReader::unchecked(&self.0)
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
        layer_part: None,
        fault,
        units: Units::default(),
    };
    let thread = PoolThread { index: 0, of: 1, scratch: args[0] };
    // SAFETY: the addresses are those of the plan: in the fake memory of the GPU, and of the test's own
    // numbers.
    unsafe { gpu.submit(&launch, thread) };
}

const COPY: Builtin = Builtin::Copy { words: 1, span: moec_ir::plan::Span::Rows };

#[test]
fn steps_are_launched_in_order() {
    let _guard = lock_fake(|_| {});
    let folder = Folder::new(PTX);
    let mut gpu = Gpu::with(&fake(), "gpu", LIMIT).unwrap();
    assert_eq!(gpu.device_name(), "Card");
    gpu.load(&program(), 1, &folder.files()).unwrap();
    let base = gpu.take(128).unwrap().unwrap();
    let opened = calls();
    assert_eq!(
        opened,
        [
            "cuInit",
            "cuDeviceGetCount",
            "cuDeviceGet 0",
            "cuDevicePrimaryCtxRetain 7",
            "cuStreamCreate 1",
            "cuEventCreate",
            "cuStreamCreate 1",
            "cuMemHostAlloc",
            "cuEventCreate",
            "cuMemHostAlloc",
            "cuEventCreate",
            "cuStreamCreate 1",
            "cuMemHostAlloc",
            "cuEventCreate",
            "cuMemHostAlloc",
            "cuEventCreate",
            "cuModuleLoadDataEx 7 lines",
            "cuModuleGetFunction k",
            "cuMemAlloc 128",
            "cuMemsetD8Async 128 on compute",
            "cuStreamQuery compute",
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
        calls(),
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
        calls(),
        [
            "cuStreamDestroy beside",
            "cuEventDestroy",
            "cuMemFreeHost",
            "cuEventDestroy",
            "cuMemFreeHost",
            "cuStreamDestroy compute",
            "cuEventDestroy",
            "cuStreamDestroy copies",
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

/// A state is zeroed, and copied to a snapshot, after the kernels that used it and before those that will.
#[test]
fn states_change_in_the_order_of_kernels() {
    let _guard = lock_fake(|_| {});
    let folder = Folder::new(PTX);
    let mut gpu = Gpu::with(&fake(), "gpu", LIMIT).unwrap();
    gpu.load(&program(), 1, &folder.files()).unwrap();
    let base = gpu.take(128).unwrap().unwrap();
    calls();
    let fault = OnceLock::new();
    step(&gpu, Builtin::Launch { kernel: 0 }, &[base, base.plus(64)], &fault);
    // SAFETY: both ranges are in the fake memory of the GPU, and do not overlap.
    unsafe {
        gpu.zero(base, 16);
        gpu.copy(base, base.plus(64), 16);
    }
    step(&gpu, Builtin::Launch { kernel: 0 }, &[base, base.plus(64)], &fault);
    gpu.wait(&fault);
    assert!(fault.get().is_none(), "{fault:?}");
    let launch = "cuLaunchKernel [2, 3, 1] of 32 (0, 64, 3) shared 0 on compute";
    let between = ["cuMemsetD8Async 16 on compute", "cuMemcpyDtoDAsync 16"];
    assert_eq!(calls(), [launch, between[0], between[1], launch, "cuStreamQuery compute"]);
    // A refusal is reported by the next step.
    FAKE.lock().unwrap().refuses = Some(("cuMemsetD8Async", 719));
    // SAFETY: as above.
    unsafe { gpu.zero(base, 16) };
    step(&gpu, Builtin::Launch { kernel: 0 }, &[base, base.plus(64)], &fault);
    assert!(matches!(fault.get(), Some(StepFault::Unit(_))), "{fault:?}");
}

/// The driver's calls for each of `times` repetitions of the same launches.
fn runs(gpu: &Gpu, base: Addr, times: usize) -> Vec<Vec<String>> {
    let fault = OnceLock::new();
    let run = |_| {
        for _ in 0..8 {
            step(gpu, Builtin::Launch { kernel: 0 }, &[base, base.plus(64)], &fault);
        }
        gpu.wait(&fault);
        assert!(fault.get().is_none(), "{fault:?}");
        let mut calls = calls();
        calls.iter_mut().filter(|a| a.starts_with("cuLaunchKernel")).for_each(|a| *a = "launch".to_owned());
        calls.dedup();
        calls
    };
    (0..times).map(run).collect()
}

/// Repeated launches are captured as a graph; if the driver cannot create graphs, they are launched one by
/// one.
#[test]
fn repeated_launches_are_captured_as_a_graph() {
    const ONCE: [&str; 2] = ["launch", "cuStreamQuery compute"];
    const CAPTURED: [&str; 3] = ["cuStreamBeginCapture 1 on compute", "launch", "cuStreamEndCapture compute"];
    let _guard = lock_fake(|_| {});
    let folder = Folder::new(PTX);
    let mut gpu = Gpu::with(&fake(), "gpu", LIMIT).unwrap();
    gpu.load(&program(), 1, &folder.files()).unwrap();
    let base = gpu.take(128).unwrap().unwrap();
    calls();
    let made = ["cuGraphInstantiateWithFlags", "cuGraphDestroy", "cuGraphLaunch 51 on compute", ONCE[1]];
    let again = vec!["cuGraphLaunch 51 on compute", ONCE[1]];
    let second: Vec<&str> = CAPTURED.into_iter().chain(made).collect();
    assert_eq!(runs(&gpu, base, 4), [ONCE.to_vec(), second, again.clone(), again]);
    // Launches with other addresses are not the captured ones.
    assert_eq!(runs(&gpu, base.plus(4), 1), [ONCE]);
    drop(gpu);
    assert_eq!(calls().iter().filter(|a| *a == "cuGraphExecDestroy").count(), 1);

    let mut gpu = Gpu::with(&fake(), "gpu", LIMIT).unwrap();
    gpu.load(&program(), 1, &folder.files()).unwrap();
    let base = gpu.take(128).unwrap().unwrap();
    FAKE.lock().unwrap().refuses = Some(("cuGraphInstantiateWithFlags", 801));
    calls();
    let tried = CAPTURED.into_iter().chain(["cuGraphInstantiateWithFlags", "cuGraphDestroy"]).chain(ONCE);
    assert_eq!(runs(&gpu, base, 3), [ONCE.to_vec(), tried.collect(), ONCE.to_vec()]);
}

/// Machine code is used if the GPU's generation has the same first digit and the code is complete. Otherwise
/// the driver gets the PTX text.
#[test]
fn compatible_machine_code_is_preferred() {
    let mut plan = parse_plan(PLAN).unwrap();
    plan.files.push(FileRef { path: "artifacts/gpu.cubin".into(), bytes: 64, sha256: [0; 32] });
    let program = Program::new(plan, &|_| None).unwrap();
    let folder = Folder::new(PTX);
    let code = folder.0.join("artifacts/gpu.cubin");
    let loads = |generation: [c_int; 2]| {
        let _guard = lock_fake(|fake| fake.generation = generation);
        let mut gpu = Gpu::with(&fake(), "gpu", LIMIT).unwrap();
        gpu.load(&program, 1, &folder.files()).unwrap();
        let loads: Vec<String> = calls().into_iter().filter(|a| a.starts_with("cuModuleLoad")).collect();
        assert_eq!(gpu.is_assembled(), loads == ["cuModuleLoadDataEx code"]);
        loads.join(", ")
    };
    // An ELF header without tables.
    let mut head = b"\x7fELF\x02\x01\x01".to_vec();
    head.resize(64, 0);
    fs::write(&code, &head).unwrap();
    assert_eq!(loads([9, 0]), "cuModuleLoadDataEx code");
    assert_eq!(loads([10, 0]), "cuModuleLoadDataEx 7 lines");
    // Tables of sections and of segments that are past the end, and a damaged header.
    for (at, bytes) in [(40, [200_u8, 0]), (32, [200, 0]), (0, [0, 0])] {
        let mut broken = head.clone();
        broken[at..at + 2].copy_from_slice(&bytes);
        broken[58] = 64;
        fs::write(&code, &broken).unwrap();
        assert_eq!(loads([9, 0]), "cuModuleLoadDataEx 7 lines", "{at}");
    }
    fs::remove_file(&code).unwrap();
    let _guard = lock_fake(|_| {});
    let (why, _) =
        text_and_hint(Gpu::with(&fake(), "gpu", LIMIT).unwrap().load(&program, 1, &folder.files()));
    assert!(why.contains("gpu.cubin") && why.contains("is missing"), "{why}");
}

/// Files whose hashes differ from the plan's are not loaded.
#[test]
fn changed_kernel_files_are_not_loaded() {
    let folder = Folder::new(PTX);
    fs::write(folder.0.join("artifacts/gpu.cubin"), b"\x7fELF").unwrap();
    for (name, bytes) in [("artifacts/gpu.ptx", PTX.len()), ("artifacts/gpu.cubin", 4)] {
        let _guard = lock_fake(|_| {});
        let mut plan = parse_plan(PLAN).unwrap();
        plan.files.push(FileRef { path: name.into(), bytes: bytes as u64, sha256: [0; 32] });
        let files = BundleReader::of_plan(&folder.0, &plan, CheckLevel::Small);
        let program = Program::new(plan, &|_| None).unwrap();
        let mut gpu = Gpu::with(&fake(), "gpu", LIMIT).unwrap();
        calls();
        let (why, _) = text_and_hint(gpu.load(&program, 1, &files));
        assert!(why.contains(name) && why.contains("was changed after the build"), "{why}");
        assert!(calls().iter().all(|call| !call.starts_with("cuModuleLoad")));
    }
}

/// The kernels of the text must be those of the plan.
#[test]
fn kernels_must_match_the_plan() {
    for (text, words) in [
        (PTX.replace("entry k(", "entry kk("), "there is no kernel of that name"),
        (PTX.replace(".param .u64 b, ", ""), "it takes 2 parameters, 1 of them addresses, not 2 addresses"),
        (PTX.replace(".param .u32 n", ".param .u64 n"), "it takes 3 parameters, 3 of them addresses"),
        (PTX.replace(".target sm_90", ".target"), "does not name its generation"),
    ] {
        let _guard = lock_fake(|_| {});
        let folder = Folder::new(&text);
        let (why, _) =
            text_and_hint(Gpu::with(&fake(), "gpu", LIMIT).unwrap().load(&program(), 1, &folder.files()));
        assert!(why.contains(words), "{why}");
    }
}

/// Long copies go through two buffers alternately; a buffer is reused once its previous copy has ended.
/// Parallel to the steps, neither they nor kernels wait for the other.
#[test]
fn long_copies_are_interleaved() {
    let _guard = lock_fake(|fake| fake.free = 64 << 20);
    let mut gpu = Gpu::with(&fake(), "gpu", LIMIT).unwrap();
    let bytes = (9 << 20) + 5;
    let base = gpu.take(bytes as u64).unwrap().unwrap();
    let numbers: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
    let mut back = vec![0_u8; bytes];
    calls();
    // SAFETY: both ends have this many bytes.
    unsafe { gpu.copy(Addr::read_only(numbers.as_ptr()), base, bytes) };
    let piece = ["cuEventQuery", "cuMemcpyHtoDAsync", "cuEventRecord beside"];
    let there: Vec<String> =
        calls().into_iter().map(|a| a.split(" 4194304").next().unwrap().to_owned()).collect();
    let there: Vec<&str> = there.iter().map(|a| if a.starts_with(piece[1]) { piece[1] } else { a }).collect();
    // No event of a kernel is waited for.
    let order: Vec<&str> = piece.repeat(3).into_iter().chain(["cuStreamQuery beside"]).collect();
    assert_eq!(there, order);
    // SAFETY: as above.
    unsafe { gpu.copy(base, Addr::read_only(back.as_mut_ptr()), bytes) };
    assert!(back == numbers);
    // The second piece is copied while the first is read.
    let copies: Vec<bool> = calls().iter().map(|a| a.starts_with("cuMemcpyDtoH")).collect();
    let at: Vec<usize> = copies.iter().zip(0..).filter(|(c, _)| **c).map(|(_, i)| i).collect();
    assert_eq!((at.len(), at[1] - at[0]), (3, 3));
}

fn text_and_hint<T>(result: Result<T>) -> (String, String) {
    let error = result.err().unwrap();
    (error.to_string(), error.hint().unwrap_or_default())
}

#[test]
fn driver_errors_name_the_call() {
    let folder = Folder::new(PTX);
    let open = |change: &dyn Fn(&mut Fake)| {
        let guard = lock_fake(|fake| change(fake));
        (Gpu::with(&fake(), "gpu", LIMIT), guard)
    };
    let (none, guard) = open(&|f| f.gpus = 0);
    let (why, hint) = text_and_hint(none);
    assert!(
        why.contains("the unit `gpu` cannot be used: NVIDIA's driver reports no GPU")
            && hint.contains("--emulate"),
        "{why}"
    );
    drop(guard);
    let (gpu, guard) = open(&|f| f.generation = [8, 9]);
    let (why, hint) = text_and_hint(gpu.unwrap().load(&program(), 1, &folder.files()));
    assert!(
        why.contains("for sm_90, but `Card` is of sm_89") && hint.contains("sm = \"sm_89\""),
        "{why}: {hint}"
    );
    drop(guard);
    let (gpu, guard) = open(&|f| {
        f.refuses = Some(("cuModuleLoadDataEx", code::UNSUPPORTED_PTX_VERSION));
        f.log = "ptxas fatal: Unsupported .version 7.8";
    });
    let (why, hint) = text_and_hint(gpu.unwrap().load(&program(), 1, &folder.files()));
    assert!(
        why.contains("CUDA_ERROR_UNSUPPORTED_PTX_VERSION: ptxas fatal: Unsupported .version 7.8"),
        "{why}"
    );
    assert!(hint.contains("update NVIDIA's driver"), "{hint}");
    drop(guard);
    let (gpu, guard) = open(&|f| f.free = 100);
    let (why, hint) = text_and_hint(gpu.unwrap().take(128));
    assert!(why.contains("it needs 128 bytes of memory, and 100 are free on `Card`"), "{why}");
    assert!(hint.contains("place fewer experts there"), "{hint}");
    drop(guard);
    let (gpu, guard) = open(&|f| f.refuses = Some(("cuMemAlloc", code::OUT_OF_MEMORY)));
    let (why, _) = text_and_hint(gpu.unwrap().take(128));
    assert!(why.contains("128 bytes of memory in one piece"), "{why}");
    drop(guard);
    // An error without a name is reported by its number.
    let (gpu, _guard) = open(&|f| f.refuses = Some(("cuInit", 999)));
    let (why, _) = text_and_hint(gpu);
    assert!(why.contains("cannot be started: cuInit gives error 999"), "{why}");
}

/// A kernel that does not end is abandoned after a time limit, and so are all steps that would wait for it.
#[test]
fn nonterminating_kernel_is_named() {
    let _guard = lock_fake(|_| {});
    let folder = Folder::new(PTX);
    let mut gpu = Gpu::with(&fake(), "gpu", Duration::from_millis(5)).unwrap();
    gpu.load(&program(), 1, &folder.files()).unwrap();
    let base = gpu.take(128).unwrap().unwrap();
    let fault = OnceLock::new();
    step(&gpu, Builtin::Launch { kernel: 0 }, &[base, base.plus(64)], &fault);
    FAKE.lock().unwrap().refuses = Some(("cuStreamQuery", code::NOT_READY));
    calls();
    gpu.wait(&fault);
    let Some(StepFault::Unit(why)) = fault.get() else { unreachable!("{fault:?}") };
    assert!(why.to_string().contains("have not ended within 0.005 s"), "{why}");
    calls();
    drop(gpu);
    assert!(calls().is_empty());
}

/// Operands outside of the GPU's memory, and kernels that trap, end the call with an error that names them.
#[test]
fn step_faults_are_named() {
    let _guard = lock_fake(|_| {});
    let folder = Folder::new(PTX);
    let mut gpu = Gpu::with(&fake(), "gpu", LIMIT).unwrap();
    gpu.load(&program(), 1, &folder.files()).unwrap();
    let base = gpu.take(128).unwrap().unwrap();
    let message = |fault: OnceLock<StepFault>| match fault.into_inner() {
        Some(StepFault::Unit(e)) => e.to_string(),
        other => format!("{other:?}"),
    };
    let fault = OnceLock::new();
    step(&gpu, Builtin::Launch { kernel: 0 }, &[base, base.plus(128)], &fault);
    let why = message(fault);
    assert!(why.contains("kernel `k` on `gpu`: operand 1 of step 5 is outside of its memory"), "{why}");
    FAKE.lock().unwrap().refuses = Some(("cuLaunchKernel", 719));
    let fault = OnceLock::new();
    step(&gpu, Builtin::Launch { kernel: 0 }, &[base, base.plus(64)], &fault);
    gpu.wait(&fault);
    let why = message(fault);
    assert!(why.contains("kernel `k` on `gpu`: cuLaunchKernel gives CUDA_ERROR_LAUNCH_FAILED"), "{why}");
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
    // SAFETY: both ends have twelve bytes.
    unsafe { gpu.copy(Addr::read_only([0_u8; 12].as_ptr()), base, 12) };
    let fault = OnceLock::new();
    step(&gpu, Builtin::Launch { kernel: 0 }, &[base, base.plus(64)], &fault);
    let why = message(fault);
    assert!(why.contains("a copy failed"), "{why}");
    // From then on every wait fails, and nothing is copied, so the null address is never read.
    let fault = OnceLock::new();
    gpu.wait(&fault);
    let why = message(fault);
    assert!(why.contains("a copy failed"), "{why}");
    calls();
    // SAFETY: neither address is accessed.
    unsafe { gpu.copy(base, Addr::read_only(std::ptr::null()), 12) };
    assert!(calls().is_empty());
}
