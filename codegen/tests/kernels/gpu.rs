//! Runs kernels on this machine's GPU; the interpreter's memory is copied there and back.

use moec_codegen::gpu::Sm;
use moec_cuda_unit::device::{GpuDevice, Image};
use moec_ptx::{Buffer, Memory};
use std::ffi::CString;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Time limit for a kernel.
const LIMIT: Duration = Duration::from_mins(1);

/// A kernel and its launch.
pub(crate) struct Run<'a> {
    pub(crate) text: &'a str,
    pub(crate) symbol: &'a str,
    pub(crate) grid: [u32; 3],
    pub(crate) block: u32,
    pub(crate) rows: u32,
}

/// The GPU, if the tests use one.
fn device() -> Option<&'static Mutex<GpuDevice>> {
    static DEVICE: OnceLock<Option<Mutex<GpuDevice>>> = OnceLock::new();
    let open = || {
        std::env::var_os("MOEC_CUDA").is_some_and(|v| v == "gpu").then(|| {
            let opened = GpuDevice::open().unwrap_or_else(|e| panic!("no driver: {e}"));
            Mutex::new(opened.unwrap_or_else(|e| panic!("no GPU: {e}")))
        })
    };
    DEVICE.get_or_init(open).as_ref()
}

/// The newest supported generation that the GPU runs; `None` if kernels are interpreted on the host.
pub(crate) fn generation() -> Option<Sm> {
    let device = device()?.lock().unwrap_or_else(PoisonError::into_inner);
    let here = device.generation().unwrap_or_else(|e| panic!("{e}"));
    let number = |sm: &Sm| sm.name().trim_start_matches("sm_").parse::<u32>().expect("a number");
    let newest = Sm::ALL.into_iter().rev().find(|sm| number(sm) <= here);
    Some(newest.unwrap_or_else(|| panic!("a GPU of sm_{here}")))
}

impl Run<'_> {
    /// Runs the kernel on these operands. Each of the `tables` contains addresses of `matrices`; all other
    /// buffers are copied back.
    pub(crate) fn on_gpu(&self, memory: &Memory, buffers: &[Buffer], tables: &[Buffer], matrices: &[Buffer]) {
        let mut device = device().expect("it was requested").lock().unwrap_or_else(PoisonError::into_inner);
        let all = || buffers.iter().chain(matrices).copied();
        let end = |b: Buffer| memory.address(b) + memory.bytes(b).len() as u64;
        let (first, last) =
            (all().map(|b| memory.address(b)).min().unwrap_or(0), all().map(end).max().unwrap_or(0));
        let text = CString::new(self.text).expect("a text");
        device.load(Image::Text(&text)).unwrap_or_else(|e| panic!("{e}: {}", self.symbol));
        let kernel =
            device.kernel(&CString::new(self.symbol).expect("a name")).unwrap_or_else(|e| panic!("{e}"));
        let base = device.take((last - first).max(1) as usize).unwrap_or_else(|e| panic!("{e}"));
        let there = |address: u64| address - first + base;
        for buffer in all() {
            let mut bytes = memory.bytes(buffer);
            if tables.contains(&buffer) {
                for word in bytes.as_chunks_mut::<8>().0 {
                    *word = there(u64::from_le_bytes(*word)).to_le_bytes();
                }
            }
            let to = there(memory.address(buffer));
            // SAFETY: both ends have this many bytes.
            unsafe { device.put(bytes.as_ptr(), to, bytes.len(), LIMIT) }.unwrap_or_else(|e| panic!("{e}"));
        }
        let addresses: Vec<u64> = buffers.iter().map(|&b| there(memory.address(b))).collect();
        // SAFETY: these are the kernel's operands.
        unsafe { device.launch(kernel, self.grid, self.block, &addresses, self.rows) }
            .unwrap_or_else(|e| panic!("{e}: {}", self.symbol));
        device.wait(LIMIT).unwrap_or_else(|e| panic!("{e}: {}", self.symbol));
        for &buffer in buffers.iter().filter(|b| !tables.contains(b)) {
            let mut bytes = memory.bytes(buffer);
            let from = there(memory.address(buffer));
            // SAFETY: both ends have this many bytes.
            unsafe { device.get(from, bytes.as_mut_ptr(), bytes.len(), LIMIT) }
                .unwrap_or_else(|e| panic!("{e}"));
            memory.write(buffer, 0, &bytes).expect("as many bytes");
        }
    }
}
