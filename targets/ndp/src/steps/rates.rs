//! Rates of memory to an NDP unit, to the host, and to both at once: taken from the cycle-level model.

use super::error::StepsError;
use moec_dram::{Channel, Options, Path, Placement, Timing};

/// Lines of 64 bytes that the host reads: they take longer than what is simulated of a long stream.
const LINES: u64 = 1 << 20;
/// Lines that a unit reads meanwhile, so that the host is never alone.
const UNIT_LINES: u64 = 8 * LINES;

/// Rates in GB/s (10⁹ bytes a second).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// An NDP unit reads its own DIMM, alone.
    pub private_gbs: f64,
    /// The host reads one channel of data striped over all DIMMs, while their units read.
    pub striped_gbs: f64,
    /// The host reads one DIMM over its channel, beside that DIMM's unit.
    pub localized_gbs: f64,
    /// Bytes that an NDP unit loses for each byte that the host reads of its DIMM, striped.
    pub striped_weight: f64,
    /// The same for data on that DIMM alone.
    pub localized_weight: f64,
}

impl Rates {
    /// Measures one channel with its DIMMs: a unit's stream alone, and the host's together with the units of
    /// all its DIMMs.
    pub fn measure(timing: Timing, options: Options) -> Self {
        Self::of(&Channel::trimoe(timing, options))
    }

    /// Measures a channel with its DIMMs.
    pub fn of(channel: &Channel) -> Self {
        let private_gbs = channel.rate_gbs(LINES, channel.stream_cycles(Path::Ndp, LINES));
        let [(striped_gbs, striped_weight), (localized_gbs, localized_weight)] =
            [(Placement::Striped, channel.dimms), (Placement::Localized, 1)].map(|(placement, busy)| {
                let both = channel.together(placement, LINES, UNIT_LINES, busy);
                // Bytes that the unit could have read in its additional time.
                let lost = UNIT_LINES as f64 * both.ndp.saturating_sub(both.ndp_alone) as f64;
                let lost = lost / both.ndp_alone.max(1) as f64;
                (channel.rate_gbs(LINES, both.host), lost * f64::from(busy) / LINES as f64)
            });
        Self { private_gbs, striped_gbs, localized_gbs, striped_weight, localized_weight }
    }

    /// Peak rates of buses: no refresh, no change of rows, and a byte for the host costs a unit one byte.
    pub fn peak() -> Self {
        Self {
            private_gbs: 153.6,
            striped_gbs: 38.4,
            localized_gbs: 38.4,
            striped_weight: 1.0,
            localized_weight: 1.0,
        }
    }

    pub(super) fn check(&self) -> Result<(), StepsError> {
        let rates = [
            ("the rate of an NDP unit", self.private_gbs),
            ("the rate of a channel", self.striped_gbs),
            ("the rate of one DIMM to the host", self.localized_gbs),
        ];
        let weights = [
            ("what a read of a striped expert costs a unit", self.striped_weight),
            ("what a read of a localized expert costs a unit", self.localized_weight),
        ];
        let wrong = |&&(_, v): &&(&str, f64)| !(v.is_finite() && v > 0.0);
        if let Some(&(what, value)) = rates.iter().find(wrong) {
            return Err(StepsError::Number { what, from: "above 0", value });
        }
        match weights.into_iter().find(|w| !(w.1.is_finite() && w.1 >= 0.0)) {
            Some((what, value)) => Err(StepsError::Number { what, from: "from 0 on", value }),
            None => Ok(()),
        }
    }
}
