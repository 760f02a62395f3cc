//! Layout of a neuron's gate, up and down on disk, and the number of reads for them (PowerInfer-2, §4.4).
//!
//! A bundle has two parts. The first holds what determines whether the neuron is active: the codes of the
//! gate row and the scales of all three rows. The second holds the codes of up and down. So at 4 bits, 4096
//! weights and scales of 0.5 KiB per row, the 7.5 KiB of a bundle become two halves of 4 KiB: 2 + 1.5 padded,
//! and 2 + 2 without a gap. Were every row's scales beside its codes, the second part would be 5 KiB and take
//! two blocks. (The paper gives the sizes but not the position of scales. This is the only order in which its
//! two reads of 4 KiB hold everything without splitting a row's codes or scales.)

use super::error::NeuronError;

/// Storage format of a row's weights: codes one after the other, with a scale for each group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantFormat {
    /// Bits of a code.
    pub bits: u32,
    /// Weights that share a scale; 0: there are no scales.
    pub group: u32,
    /// Bytes of a scale.
    pub scale_bytes: u32,
}

impl QuantFormat {
    /// 32 bits, no scales.
    pub const F32: Self = Self { bits: 32, group: 0, scale_bytes: 0 };
    /// 16 bits (bf16 or f16), no scales.
    pub const HALF: Self = Self { bits: 16, group: 0, scale_bytes: 0 };
    /// 8 bits, groups of 32 with scales of 16 bits.
    pub const Q8: Self = Self { bits: 8, group: 32, scale_bytes: 2 };
    /// 4 bits, groups of 32 with scales of 16 bits.
    pub const Q4: Self = Self { bits: 4, group: 32, scale_bytes: 2 };
    /// 4 bits with 0.5 KiB of scales for 4096 weights, the paper's example (§4.4): groups of 16.
    pub const Q4_PAPER: Self = Self { bits: 4, group: 16, scale_bytes: 2 };
}

/// Number of reads of a bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phases {
    /// One read of everything.
    One,
    /// The gate first; up and down only if the neuron is active.
    Two,
}

/// Bytes of a bundle, relative to its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// The layout of a bundle: gate codes, scales of gate, up and down, then up codes and down codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bundle {
    codes: u64,
    scales: u64,
    block: u64,
    phases: Phases,
}

/// Maximum number of weights of a row; far above any model, and far from overflow.
const MOST_HIDDEN: u64 = 1 << 24;
/// Largest block.
const MOST_BLOCK: u64 = 1 << 24;

impl Bundle {
    /// The layout for rows of `hidden` weights, read in blocks of `block` bytes.
    ///
    /// # Errors
    /// [`NeuronError::Bundle`] for a row that is not a whole number of bytes or groups, or a block that is
    /// not a power of 2.
    pub fn new(hidden: u64, format: QuantFormat, block: u64, phases: Phases) -> Result<Self, NeuronError> {
        let wrong = |what: String| Err(NeuronError::Bundle { hidden, what });
        if hidden == 0 || hidden > MOST_HIDDEN {
            return wrong(format!("1 to {MOST_HIDDEN} can be"));
        }
        if !block.is_power_of_two() || block > MOST_BLOCK {
            return wrong(format!("a block of {block} bytes is not a power of 2 up to {MOST_BLOCK}"));
        }
        let QuantFormat { bits, group, scale_bytes } = format;
        if !(1..=64).contains(&bits) || scale_bytes > 8 || !(hidden * u64::from(bits)).is_multiple_of(8) {
            return wrong(format!("{bits} bits each are not a whole number of bytes"));
        }
        if group > 0 && !hidden.is_multiple_of(u64::from(group)) {
            return wrong(format!("they are not a whole number of groups of {group}"));
        }
        let groups = hidden.checked_div(u64::from(group)).unwrap_or(0);
        let (codes, scales) = (hidden * u64::from(bits) / 8, groups * u64::from(scale_bytes));
        Ok(Self { codes, scales, block, phases })
    }

    /// The layout with the least reading time, if the share `together` of the neurons whose gate is read are
    /// active (§4.4: 0.8). If both take the same time, one read.
    ///
    /// # Errors
    /// As [`Bundle::new`].
    pub fn choose(
        hidden: u64,
        format: QuantFormat,
        block: u64,
        rates: &RatesByBlock,
        together: f64,
    ) -> Result<Self, NeuronError> {
        let one = Self::new(hidden, format, block, Phases::One)?;
        let two = Self { phases: Phases::Two, ..one };
        let better = two.expected_seconds(rates, together) < one.expected_seconds(rates, together);
        Ok(if better { two } else { one })
    }

    /// Number of its reads.
    pub fn phases(&self) -> Phases {
        self.phases
    }

    /// Bytes without padding.
    pub fn bytes(&self) -> u64 {
        3 * (self.codes + self.scales)
    }

    /// Bytes from one bundle to the next: whole blocks, in two phases for each part.
    pub fn stride(&self) -> u64 {
        match self.phases {
            Phases::One => self.pad(self.bytes()),
            Phases::Two => self.gate().bytes + self.up_down().bytes,
        }
    }

    /// The first read: everything that determines whether the neuron is active, or all bytes in one phase.
    pub fn gate(&self) -> Range {
        match self.phases {
            Phases::One => Range { offset: 0, bytes: self.stride() },
            Phases::Two => Range { offset: 0, bytes: self.pad(self.codes + 3 * self.scales) },
        }
    }

    /// The second read: the remaining bytes of an active neuron; empty in one phase.
    pub fn up_down(&self) -> Range {
        let offset = self.gate().bytes;
        match self.phases {
            Phases::One => Range { offset, bytes: 0 },
            Phases::Two => Range { offset, bytes: self.pad(2 * self.codes) },
        }
    }

    /// The codes of gate, up and down.
    pub fn codes(&self) -> [Range; 3] {
        let up = match self.phases {
            Phases::One => self.codes + 3 * self.scales,
            Phases::Two => self.gate().bytes,
        };
        [0, up, up + self.codes].map(|offset| Range { offset, bytes: self.codes })
    }

    /// The scales of gate, up and down; empty if there are none.
    pub fn scales(&self) -> [Range; 3] {
        [0, 1, 2].map(|i| Range { offset: self.codes + i * self.scales, bytes: self.scales })
    }

    /// Mean bytes read for a neuron, if the share `together` of those whose gate is read are active.
    pub fn expected_bytes(&self, together: f64) -> f64 {
        self.gate().bytes as f64 + together * self.up_down().bytes as f64
    }

    /// Seconds that these reads take.
    pub fn expected_seconds(&self, rates: &RatesByBlock, together: f64) -> f64 {
        rates.seconds(self.gate().bytes) + together * rates.seconds(self.up_down().bytes)
    }

    fn pad(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.block)
    }
}

/// Rates of random reads, by their size. Between two rows the rate follows a line over the logarithms of
/// both; past the ends it stays.
#[derive(Clone, Debug, PartialEq)]
pub struct RatesByBlock(Vec<(u64, f64)>);

impl RatesByBlock {
    /// Creates rates from rows of a size in bytes and a rate in bytes per second, by size.
    ///
    /// # Errors
    /// [`NeuronError::Rates`] for no rows, sizes that do not ascend, or rates that are not positive numbers.
    pub fn new(rows: Vec<(u64, f64)>) -> Result<Self, NeuronError> {
        let wrong = |what: &str| Err(NeuronError::Rates(what.to_owned()));
        if rows.is_empty() || rows.iter().any(|r| r.0 == 0 || !r.1.is_finite() || r.1 <= 0.0) {
            return wrong("every row needs a size and a rate above 0");
        }
        if rows.windows(2).any(|w| w[0].0 >= w[1].0) {
            return wrong("sizes have to grow from row to row");
        }
        Ok(Self(rows))
    }

    /// Bytes per second of reads of this size.
    pub fn rate(&self, bytes: u64) -> f64 {
        let rows = &self.0;
        let at = rows.partition_point(|r| r.0 <= bytes);
        match (at.checked_sub(1).and_then(|i| rows.get(i)), rows.get(at)) {
            (Some(a), Some(b)) => {
                let part = (bytes as f64 / a.0 as f64).ln() / (b.0 as f64 / a.0 as f64).ln();
                a.1 * (b.1 / a.1).powf(part)
            }
            (Some(end), None) | (None, Some(end)) => end.1,
            (None, None) => f64::INFINITY,
        }
    }

    /// Seconds of one read of this size among many; 0 for none.
    pub fn seconds(&self, bytes: u64) -> f64 {
        if bytes == 0 { 0.0 } else { bytes as f64 / self.rate(bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KIB: u64 = 1024;

    /// Random reads of UFS 4.0: 4 KiB within 128 MB at 1 GB/s, 512 KiB at 3.5 GB/s (§2.3.2), and 8 KiB at no
    /// more than 4 KiB (§4.4: two reads of 4 KiB use the bandwidth better than one of 8).
    fn ufs() -> RatesByBlock {
        RatesByBlock::new(vec![(4 * KIB, 1e9), (8 * KIB, 1e9), (512 * KIB, 3.5e9)]).unwrap()
    }

    #[test]
    fn bundle_splits_4_bit_neurons_but_not_16_bit_ones() {
        let q4 = Bundle::choose(4096, QuantFormat::Q4_PAPER, 4096, &ufs(), 0.8).unwrap();
        assert_eq!((q4.bytes(), q4.stride(), q4.phases()), (7680, 8192, Phases::Two));
        assert_eq!(q4.gate(), Range { offset: 0, bytes: 4096 });
        assert_eq!(q4.up_down(), Range { offset: 4096, bytes: 4096 });
        let half = Bundle::choose(4096, QuantFormat::HALF, 4096, &ufs(), 0.8).unwrap();
        assert_eq!((half.stride(), half.gate().bytes, half.phases()), (24 * KIB, 24 * KIB, Phases::One));
        // If all reads have the same rate, only bytes count.
        let flat = RatesByBlock::new(vec![(1, 1e9)]).unwrap();
        let half = Bundle::choose(4096, QuantFormat::HALF, 4096, &flat, 0.8).unwrap();
        assert_eq!((half.phases(), half.expected_bytes(0.8)), (Phases::Two, 8192.0 + 0.8 * 16384.0));
        // A small neuron fits into one block, two parts of it into two.
        let small = Bundle::choose(512, QuantFormat::Q4_PAPER, 4096, &flat, 0.8).unwrap();
        assert_eq!((small.phases(), small.expected_bytes(0.8)), (Phases::One, 4096.0));
    }

    #[test]
    fn disk_rates_interpolate_over_log_block_size() {
        let rates = RatesByBlock::new(vec![(4096, 1e9), (16_384, 4e9)]).unwrap();
        for (bytes, want) in [(1, 1e9), (4096, 1e9), (8192, 2e9), (16_384, 4e9), (1 << 30, 4e9)] {
            assert!((rates.rate(bytes) / want - 1.0).abs() < 1e-12, "{bytes}");
        }
        assert_eq!(rates.seconds(0), 0.0);
        for bad in [vec![], vec![(0, 1.0)], vec![(1, 0.0)], vec![(1, f64::NAN)], vec![(2, 1.0), (2, 1.0)]] {
            assert!(RatesByBlock::new(bad).is_err());
        }
    }

    #[test]
    fn invalid_neuron_bundle_layouts_are_rejected() {
        let new = |hidden, format, block| Bundle::new(hidden, format, block, Phases::Two);
        assert!(new(0, QuantFormat::Q4, 4096).is_err());
        assert!(new(u64::MAX, QuantFormat::F32, 4096).is_err());
        assert!(new(48, QuantFormat::Q4, 4096).is_err());
        assert!(new(64, QuantFormat::Q4, 3000).is_err());
        assert!(new(64, QuantFormat { bits: u32::MAX, ..QuantFormat::Q4 }, 4096).is_err());
        assert!(new(3, QuantFormat { bits: 4, group: 0, scale_bytes: 0 }, 4096).is_err());
        assert!(new(64, QuantFormat::F32, 512).is_ok());
    }

    proptest! {
        #[test]
        fn bundle_parts_are_disjoint_and_covered_by_reads(
            groups in 1_u64..300, format in 0..4_usize, shift in 6_u32..14, two: bool
        ) {
            let format = [QuantFormat::F32, QuantFormat::HALF, QuantFormat::Q8, QuantFormat::Q4][format];
            let phases = if two { Phases::Two } else { Phases::One };
            let bundle = Bundle::new(groups * 32, format, 1 << shift, phases).unwrap();
            let (gate, up_down) = (bundle.gate(), bundle.up_down());
            prop_assert_eq!(bundle.stride(), gate.bytes + up_down.bytes);
            prop_assert!(gate.bytes.is_multiple_of(1 << shift) && up_down.bytes.is_multiple_of(1 << shift));
            let [c, s] = [bundle.codes(), bundle.scales()];
            let mut all: Vec<Range> = c.into_iter().chain(s).filter(|r| r.bytes > 0).collect();
            all.sort_by_key(|r| r.offset);
            prop_assert_eq!(all.iter().map(|r| r.bytes).sum::<u64>(), bundle.bytes());
            for w in all.windows(2) {
                prop_assert!(w[0].offset + w[0].bytes <= w[1].offset);
            }
            let within = |r: Range, part: Range| r.bytes == 0 || (r.offset >= part.offset && r.offset + r.bytes <= part.offset + part.bytes);
            prop_assert!(within(c[0], gate) && s.into_iter().all(|r| within(r, gate)));
            let second = if two { up_down } else { gate };
            prop_assert!(within(c[1], second) && within(c[2], second));
        }
    }
}
