//! Measurement of a unit of this machine that runs GPU kernels.

use crate::error::Result;
use moec_ir::plan::Launch;
use std::time::Duration;

/// A unit that is there, to launch GPU kernels on and to wait for them. Its memory is taken once, and given
/// back with it.
pub trait Bench {
    /// Name of the GPU, as its vendor reports it.
    fn name(&self) -> String;

    /// The newest generation that kernels are written for and that it runs (`sm_90`).
    ///
    /// # Errors
    /// Fails if it is older than all of them.
    fn generation(&self) -> Result<&'static str>;

    /// Bytes of its memory that are free, and all.
    ///
    /// # Errors
    /// Fails if the driver does.
    fn memory(&self) -> Result<[u64; 2]>;

    /// Peaks that its maker states.
    fn peaks(&self) -> Peaks;

    /// Allocates this many bytes of zeros. Gives their address.
    ///
    /// # Errors
    /// Fails if the driver does.
    fn take(&mut self, bytes: u64) -> Result<u64>;

    /// Loads kernels from their text, in the place of earlier ones; calls name them by their place in
    /// `symbols`.
    ///
    /// # Errors
    /// Fails if the driver's assembler does.
    fn load(&mut self, text: &str, symbols: &[String]) -> Result<()>;

    /// Copies there, and waits.
    ///
    /// # Errors
    /// Fails if a place is outside of the allocated memory, or the driver fails.
    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<()>;

    /// Launches all calls in their order, `times` times over, and waits. Gives how long that took.
    ///
    /// # Errors
    /// Fails if an address is outside of the allocated memory, the driver fails, or a kernel does not end.
    fn time(&mut self, calls: &[Call], times: u32) -> Result<Duration>;

    /// Copies from pinned memory of the CPU's (`to`) or to it, `times` times a buffer, and waits. Gives the
    /// bytes of all copies, and their time.
    ///
    /// # Errors
    /// Fails if the driver does.
    fn link(&mut self, to: bool, times: u32) -> Result<(u64, Duration)>;
}

/// A launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Index of the kernel in the loaded text.
    pub kernel: usize,
    /// Its launch.
    pub launch: Launch,
    /// Addresses that are passed to the kernel.
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
