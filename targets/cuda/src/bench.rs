//! A GPU of this machine, for measurements.

use crate::{GENERATIONS, NAME, number};
use moec_backend::error::{Error, Result};
use moec_backend::{Bench, Call, Peaks};
use moec_cuda_unit::device::{GpuDevice, Image, Kernel, Refusal};
use moec_cuda_unit::open;
use std::ffi::CString;
use std::time::{Duration, Instant};

/// The longest that a measurement may take.
const LIMIT: Duration = Duration::from_mins(2);

/// Operations of bf16 products that a multiprocessor does in a clock, by generation: NVIDIA's white papers of
/// the A100 (1024 multiply-adds) and the H100 (2048). Of others the number depends on the GPU.
const PER_CLOCK: [(u32, f64); 2] = [(80, 2048.0), (90, 4096.0)];

/// A GPU.
pub(crate) struct Measured {
    device: GpuDevice,
    kernels: Vec<Kernel>,
    /// First address and length of each allocation.
    taken: (u64, u64),
}

impl Measured {
    /// The first GPU of this machine.
    ///
    /// # Errors
    /// No driver, no GPU.
    pub(crate) fn open() -> Result<Self> {
        let device = open(NAME).map_err(|e| {
            let error = Error::environment("there is no GPU to measure").because(&e);
            error.hint("install NVIDIA's driver on a machine with an NVIDIA GPU, or remove `--gpu`")
        })?;
        Ok(Self { device, kernels: Vec::new(), taken: (0, 0) })
    }

    fn holds(&self, at: u64, bytes: u64) -> Result<()> {
        let (first, all) = self.taken;
        let inside =
            at.checked_sub(first).and_then(|offset| offset.checked_add(bytes)).is_some_and(|end| end <= all);
        if inside { Ok(()) } else { Err(Error::bug("an address outside of the GPU's memory")) }
    }
}

fn refused(refusal: Refusal) -> Error {
    Error::environment("the GPU cannot be measured")
        .because(refusal.to_string())
        .hint("check with `nvidia-smi` which programs use it")
}

impl Bench for Measured {
    fn name(&self) -> String {
        self.device.name()
    }

    fn generation(&self) -> Result<&'static str> {
        let here = self.device.generation().map_err(refused)?;
        let newest = GENERATIONS.into_iter().rev().find(|g| number(g).is_some_and(|n| n <= here));
        newest.ok_or_else(|| {
            Error::limit(format!("`{}` is of sm_{here}", self.name()))
                .because(format!("kernels are written for {} and newer", GENERATIONS[0]))
        })
    }

    fn memory(&self) -> Result<[u64; 2]> {
        self.device.memory().map(|all| all.map(|bytes| bytes as u64)).map_err(refused)
    }

    fn peaks(&self) -> Peaks {
        let of_clock =
            self.device.generation().ok().and_then(|here| PER_CLOCK.iter().find(|(g, _)| *g == here));
        let gops = of_clock.and_then(|(_, each)| Some(each * self.device.clocks().ok()? / 1e9));
        Peaks { gb_per_s: self.device.memory_peak().ok().map(|bytes| bytes / 1e9), gops }
    }

    fn take(&mut self, bytes: u64) -> Result<u64> {
        let at = self.device.take(usize::try_from(bytes).unwrap_or(usize::MAX)).map_err(refused)?;
        self.taken = (at, bytes);
        Ok(at)
    }

    fn load(&mut self, text: &str, symbols: &[String]) -> Result<()> {
        let zero = |_| Error::bug("a zero byte in a text");
        self.device.load(Image::Text(&CString::new(text).map_err(zero)?)).map_err(refused)?;
        let of = |symbol: &String| {
            self.device.kernel(&CString::new(symbol.as_str()).map_err(zero)?).map_err(refused)
        };
        self.kernels = symbols.iter().map(of).collect::<Result<_>>()?;
        Ok(())
    }

    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        self.holds(at, bytes.len() as u64)?;
        // SAFETY: both ends have this many bytes.
        unsafe { self.device.put(bytes.as_ptr(), at, bytes.len(), LIMIT) }.map_err(refused)?;
        self.device.wait(LIMIT).map_err(refused)
    }

    fn time(&mut self, calls: &[Call], times: u32) -> Result<Duration> {
        for at in calls.iter().flat_map(|call| &call.addresses) {
            self.holds(*at, 1)?;
        }
        let start = Instant::now();
        for call in (0..times).flat_map(|_| calls) {
            let kernel =
                self.kernels.get(call.kernel).ok_or_else(|| Error::bug("a kernel that does not exist"))?;
            let blocks = call.launch.blocks(call.rows).ok_or_else(|| Error::bug("a call of no blocks"))?;
            // SAFETY: the caller gives a kernel the addresses that it takes, with room after them.
            unsafe { self.device.launch(*kernel, blocks, call.launch.block, &call.addresses, call.rows) }
                .map_err(refused)?;
        }
        self.device.wait(LIMIT).map_err(refused)?;
        Ok(start.elapsed())
    }

    fn link(&mut self, to: bool, times: u32) -> Result<(u64, Duration)> {
        let (bytes, took) = self.device.measure_link(to, times as usize, LIMIT).map_err(refused)?;
        Ok((bytes as u64, took))
    }
}
