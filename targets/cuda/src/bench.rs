//! A card of this machine, for who measures it.

use crate::{GENERATIONS, NAME, number};
use moec_cuda_unit::card::{Card, Image, Kernel, Refusal};
use moec_cuda_unit::open;
use moec_family::error::{Error, Result};
use moec_family::{Bench, Call, Peaks};
use std::ffi::CString;
use std::time::{Duration, Instant};

/// The longest that a measurement may take.
const LIMIT: Duration = Duration::from_mins(2);

/// Operations of bf16 products that a multiprocessor does in a clock, by generation: NVIDIA's white papers of the A100 (1024 multiply-adds) and
/// the H100 (2048). Of others the number depends on the card.
const PER_CLOCK: [(u32, f64); 2] = [(80, 2048.0), (90, 4096.0)];

/// A card.
pub(crate) struct Measured {
    card: Card,
    kernels: Vec<Kernel>,
    /// First address and bytes of what was taken.
    taken: (u64, u64),
}

impl Measured {
    /// The first card of this machine.
    ///
    /// # Errors
    /// No driver, no card.
    pub(crate) fn open() -> Result<Self> {
        let card = open(NAME).map_err(|e| {
            let error = Error::environment("there is no GPU to measure").because(&e);
            error.hint("install NVIDIA's driver on a machine with a card of NVIDIA's, or leave `--gpu` out")
        })?;
        Ok(Self { card, kernels: Vec::new(), taken: (0, 0) })
    }

    fn holds(&self, at: u64, bytes: u64) -> Result<()> {
        let (first, all) = self.taken;
        let inside =
            at.checked_sub(first).and_then(|offset| offset.checked_add(bytes)).is_some_and(|end| end <= all);
        if inside { Ok(()) } else { Err(Error::bug("a place outside of the card's memory")) }
    }
}

fn refused(refusal: Refusal) -> Error {
    Error::environment("the card cannot be measured")
        .because(refusal.to_string())
        .hint("see with `nvidia-smi` what else uses it")
}

impl Bench for Measured {
    fn name(&self) -> String {
        self.card.name()
    }

    fn generation(&self) -> Result<&'static str> {
        let here = self.card.generation().map_err(refused)?;
        let newest = GENERATIONS.into_iter().rev().find(|g| number(g).is_some_and(|n| n <= here));
        newest.ok_or_else(|| {
            Error::limit(format!("`{}` is of sm_{here}", self.name()))
                .because(format!("kernels are written for {} and newer", GENERATIONS[0]))
        })
    }

    fn memory(&self) -> Result<[u64; 2]> {
        self.card.memory().map(|all| all.map(|bytes| bytes as u64)).map_err(refused)
    }

    fn peaks(&self) -> Peaks {
        let of_clock =
            self.card.generation().ok().and_then(|here| PER_CLOCK.iter().find(|(g, _)| *g == here));
        let gops = of_clock.and_then(|(_, each)| Some(each * self.card.clocks().ok()? / 1e9));
        Peaks { gb_per_s: self.card.memory_peak().ok().map(|bytes| bytes / 1e9), gops }
    }

    fn take(&mut self, bytes: u64) -> Result<u64> {
        let at = self.card.take(usize::try_from(bytes).unwrap_or(usize::MAX)).map_err(refused)?;
        self.taken = (at, bytes);
        Ok(at)
    }

    fn load(&mut self, text: &str, symbols: &[String]) -> Result<()> {
        let zero = |_| Error::bug("a zero byte in a text");
        self.card.load(Image::Text(&CString::new(text).map_err(zero)?)).map_err(refused)?;
        let of = |symbol: &String| {
            self.card.kernel(&CString::new(symbol.as_str()).map_err(zero)?).map_err(refused)
        };
        self.kernels = symbols.iter().map(of).collect::<Result<_>>()?;
        Ok(())
    }

    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        self.holds(at, bytes.len() as u64)?;
        // SAFETY: so many bytes are at both ends.
        unsafe { self.card.put(bytes.as_ptr(), at, bytes.len(), LIMIT) }.map_err(refused)?;
        self.card.wait(LIMIT).map_err(refused)
    }

    fn time(&mut self, calls: &[Call], times: u32) -> Result<Duration> {
        for at in calls.iter().flat_map(|call| &call.addresses) {
            self.holds(*at, 1)?;
        }
        let start = Instant::now();
        for call in (0..times).flat_map(|_| calls) {
            let kernel =
                self.kernels.get(call.kernel).ok_or_else(|| Error::bug("a kernel that is not there"))?;
            let blocks = call.launch.blocks(call.rows).ok_or_else(|| Error::bug("a call of no blocks"))?;
            // SAFETY: who measures gives a kernel the addresses that it takes, with room after them.
            unsafe { self.card.launch(*kernel, blocks, call.launch.block, &call.addresses, call.rows) }
                .map_err(refused)?;
        }
        self.card.wait(LIMIT).map_err(refused)?;
        Ok(start.elapsed())
    }

    fn link(&mut self, to: bool, times: u32) -> Result<(u64, Duration)> {
        let (bytes, took) = self.card.link(to, times as usize, LIMIT).map_err(refused)?;
        Ok((bytes as u64, took))
    }
}
