//! Share of the memory's rate that kernels reach in decoding, by the format of the weights.
//!
//! Kernels of experts for one row each and plain reading of memory take turns of some milliseconds, on the same threads: the
//! memory of a machine that others use, too, swings from second to second, and both see the same of it.

use super::experts::{EXPERTS, kernels};
use super::{PART, buffers, fastest_read};
use crate::{CpuTarget, Stopwatch, TuneError};
use moec_ir::Format;
use std::time::Duration;

/// Rates of a format's kernels and of reading; medians.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// Format of the weights.
    pub format: Format,
    /// 10⁹ bytes per second of weights, rows and results.
    pub kernel_gb_per_s: f64,
    /// 10⁹ bytes per second of plain reading.
    pub read_gb_per_s: f64,
    /// The first by the second, turn by turn.
    pub share: f64,
}

/// Measures the kernels of experts with weights in a format, in so many turns.
///
/// # Errors
/// As [`super::measure_experts`].
pub fn decode_share(
    target: &CpuTarget,
    threads: usize,
    format: Format,
    turns: usize,
) -> Result<Share, TuneError> {
    let mut watch = Stopwatch::new(target, threads.max(1))?;
    let memory = buffers(threads.max(1));
    let kernels = kernels(target, EXPERTS, format)?;
    let mut found = [const { Vec::new() }; 3];
    for turn in 0..turns.max(1) {
        let read = (PART * memory.len()) as f64 / fastest_read(&memory, turn) / 1e9;
        let (mut bytes, mut seconds) = (0.0, 0.0);
        for spec in &kernels {
            let probed = watch.probed(target, spec, EXPERTS).zip(target.cheapest(spec, EXPERTS));
            let Some((work, schedule)) = probed else { continue };
            let times = watch.time(target, spec, EXPERTS, &[schedule], Duration::ZERO, &|| false)?;
            bytes += work.bytes;
            seconds += times.iter().sum::<f64>();
        }
        let kernel = bytes / seconds / 1e9;
        for (of, x) in found.iter_mut().zip([kernel, read, kernel / read]) {
            of.push(x);
        }
    }
    let [kernel_gb_per_s, read_gb_per_s, share] = found.map(|mut x| crate::tune::median(&mut x));
    Ok(Share { format, kernel_gb_per_s, read_gb_per_s, share })
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_device::Device;

    /// Rates are not tested, but every format must have kernels that can be timed.
    #[test]
    fn every_rounded_format_is_measured() {
        let target = CpuTarget::new(&Device::find("native").unwrap()).unwrap();
        for format in [Format::Bf16, Format::Q8, Format::Q3, Format::Q2s] {
            let share = decode_share(&target, 1, format, 1).unwrap();
            assert_eq!(share.format, format);
            assert!(share.share > 0.0 && share.share.is_finite(), "{share:?}");
        }
    }
}
