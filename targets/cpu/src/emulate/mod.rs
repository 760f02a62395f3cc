//! Emulation of AMX on a CPU without it. An AMX instruction raises `#UD` there, the operating system sends
//! `SIGILL`, and the handler below executes it. It is for reading artifacts back and for tests: a trap per
//! instruction takes microseconds where the hardware takes nanoseconds.
//!
//! [`FEATURES`] are emulated, with the arithmetic of Intel's *Software Developer's Manual*, volume 2.
//! `tdpbf16ps` sums the low and the high elements of the pairs in two chains of f32 fused multiply-adds
//! ("FP32 FMA with DAZ=FTZ=1, RNE rounding"). It adds their sum to the destination; integers wrap. A result
//! is denormal if it is so after rounding. Instructions that raise `#UD` or `#GP` on the hardware, and every
//! other unknown instruction, go to the previous handler. A page fault of an operand arrives as `SIGSEGV`,
//! with the address as on the hardware but the instruction pointer in here.
#![expect(clippy::cast_possible_truncation, reason = "parts of an instruction that was decoded")]

/// Reason that AMX cannot be emulated.
#[derive(Debug, thiserror::Error)]
pub enum EmulateError {
    /// Another system or architecture.
    #[error("AMX is emulated on x86-64 Linux only")]
    System,
    /// The operating system refuses the signal handler.
    #[error("the handler of illegal instructions cannot be set")]
    Handler(#[source] std::io::Error),
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod decode;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod tiles;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod trap;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub use trap::install;

/// Features, by LLVM's names, whose instructions are emulated.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub const FEATURES: &[&str] = &["amx-bf16", "amx-int8", "amx-tile"];

/// Features, by LLVM's names, whose instructions are emulated.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub const FEATURES: &[&str] = &[];

/// Emulates from now on, in every thread; again is harmless.
///
/// # Errors
/// Always: this system has no such handler.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub fn install() -> Result<(), EmulateError> {
    Err(EmulateError::System)
}
