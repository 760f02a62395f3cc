//! Measurement of a unit of this machine that runs GPU kernels.

use crate::error::Result;
use moec_ir::plan::Launch;
use std::time::Duration;

/// A unit that is there, to launch GPU kernels on and to wait for them. Its memory is taken once, and given back with it.
pub trait Bench {
    /// Its name, as its maker has it.
    fn name(&self) -> String;

    /// The newest generation that kernels are written for and that it runs (`sm_90`).
    ///
    /// # Errors
    /// It is older than all of them.
    fn generation(&self) -> Result<&'static str>;

    /// Bytes of its memory that are free, and all.
    ///
    /// # Errors
    /// What the driver refuses.
    fn memory(&self) -> Result<[u64; 2]>;

    /// Peaks that its maker states.
    fn peaks(&self) -> Peaks;

    /// Takes so many bytes of zeros. Gives their address.
    ///
    /// # Errors
    /// What the driver refuses.
    fn take(&mut self, bytes: u64) -> Result<u64>;

    /// Loads kernels from their text, in the place of earlier ones; calls name them by their place in `symbols`.
    ///
    /// # Errors
    /// What the driver's assembler says.
    fn load(&mut self, text: &str, symbols: &[String]) -> Result<()>;

    /// Copies there, and waits.
    ///
    /// # Errors
    /// A place outside of what was taken; what the driver refuses.
    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<()>;

    /// Launches all calls in their order, `times` times over, and waits. Gives how long that took.
    ///
    /// # Errors
    /// An address outside of what was taken; what the driver refuses; a kernel that does not end.
    fn time(&mut self, calls: &[Call], times: u32) -> Result<Duration>;

    /// Copies from pinned memory of the CPU's (`to`) or to it, `times` times so many bytes, and waits. Gives the bytes of all copies, and
    /// how long they took.
    ///
    /// # Errors
    /// What the driver refuses.
    fn link(&mut self, to: bool, times: u32) -> Result<(u64, Duration)>;
}

/// A launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Index of the kernel in what was loaded.
    pub kernel: usize,
    /// Its launch.
    pub launch: Launch,
    /// Addresses that it takes.
    pub addresses: Vec<u64>,
    /// Valid rows.
    pub rows: u32,
}

/// Peaks of a unit, as far as they are known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Peaks {
    /// 10⁹ bytes a second that its memory gives.
    pub gb_per_s: Option<f64>,
    /// 10⁹ operations a second of products of bf16, multiplications and additions counted apart.
    pub gops: Option<f64>,
}
