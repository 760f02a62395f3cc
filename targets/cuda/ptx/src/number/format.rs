//! Floating-point formats, and rounding to them.

/// Direction of rounding for a number between two others (PTX ISA, section 9.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// `rn`: the nearer, of two the even one.
    Nearest,
    /// `rna`: the nearer, of two the one farther from zero.
    NearestAway,
    /// `rz`: the one nearer to zero.
    Zero,
    /// `rm`: the smaller.
    Down,
    /// `rp`: the larger.
    Up,
}

impl Rounding {
    /// All that instructions name, and their names.
    pub(crate) const NAMES: [(&str, Self); 5] = [
        ("rn", Self::Nearest),
        ("rna", Self::NearestAway),
        ("rz", Self::Zero),
        ("rm", Self::Down),
        ("rp", Self::Up),
    ];

    /// The directions that round to an integer.
    pub(crate) const INTEGERS: [(&str, Self); 4] =
        [("rni", Self::Nearest), ("rzi", Self::Zero), ("rmi", Self::Down), ("rpi", Self::Up)];

    /// Whether a magnitude is rounded up, by its last bit, and by the part that was cut off: less than (-1),
    /// equal to or more than half.
    fn goes_up(self, negative: bool, odd: bool, cut: Remainder) -> bool {
        match self {
            Self::Nearest => cut == Remainder::More || (cut == Remainder::Half && odd),
            Self::NearestAway => cut >= Remainder::Half,
            Self::Zero => false,
            Self::Down => negative && cut != Remainder::Nothing,
            Self::Up => !negative && cut != Remainder::Nothing,
        }
    }
}

/// Part that was cut off a magnitude, in halves of its last bit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Remainder {
    Nothing,
    Less,
    Half,
    More,
}

/// A binary floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    /// Bits of the exponent.
    exponent: u32,
    /// Bits of the significand that are stored.
    fraction: u32,
    /// Whether the largest exponent holds infinities; e4m3 has finite numbers there.
    infinities: bool,
}

/// IEEE half precision.
pub(crate) const F16: Format = Format { exponent: 5, fraction: 10, infinities: true };
/// The upper half of an f32.
pub(crate) const BF16: Format = Format { exponent: 8, fraction: 7, infinities: true };
/// IEEE single precision.
pub(crate) const F32: Format = Format { exponent: 8, fraction: 23, infinities: true };
/// IEEE double precision.
pub(crate) const F64: Format = Format { exponent: 11, fraction: 52, infinities: true };
/// An f32 of ten bits, in the upper bits of 32.
pub(crate) const TF32: Format = Format { exponent: 8, fraction: 10, infinities: true };
/// Eight bits: four of the exponent; without infinities.
pub(crate) const E4M3: Format = Format { exponent: 4, fraction: 3, infinities: false };
/// Eight bits: five of the exponent.
pub(crate) const E5M2: Format = Format { exponent: 5, fraction: 2, infinities: true };

impl Format {
    fn bias(self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    /// Bits of a number.
    pub(crate) fn bits(self) -> u32 {
        1 + self.exponent + self.fraction
    }

    fn sign(self, negative: bool) -> u64 {
        u64::from(negative) << (self.exponent + self.fraction)
    }

    /// The NaN that arithmetic results in (PTX ISA: 0x7fffffff of f32, 0x7fff of f16 and bf16).
    pub(crate) fn nan(self) -> u64 {
        match self.fraction {
            52 => 0x7ff8_0000_0000_0000,
            _ => (1 << (self.exponent + self.fraction)) - 1,
        }
    }

    /// The largest finite number.
    pub(crate) fn largest(self) -> u64 {
        let infinity = ((1u64 << self.exponent) - 1) << self.fraction;
        if self.infinities { infinity - 1 } else { self.nan() - 1 }
    }

    fn overflow(self, negative: bool, rounding: Rounding) -> u64 {
        let stays = match rounding {
            Rounding::Nearest | Rounding::NearestAway => false,
            Rounding::Zero => true,
            Rounding::Down => !negative,
            Rounding::Up => negative,
        };
        let found = match (stays, self.infinities) {
            (true, _) => self.largest(),
            (false, true) => self.largest() + 1,
            (false, false) => self.nan(),
        };
        found | self.sign(negative)
    }

    /// A number `(-1)^negative * magnitude * 2^scale`, rounded.
    pub(crate) fn pack(self, negative: bool, magnitude: u64, scale: i32, rounding: Rounding) -> u64 {
        if magnitude == 0 {
            return self.sign(negative);
        }
        let top = 63 - magnitude.leading_zeros() as i32 + scale;
        let lowest = 1 - self.bias();
        let exponent = top.max(lowest);
        // The value of the last stored bit, and the part of the magnitude below it.
        let last = exponent - self.fraction as i32;
        let down = last - scale;
        let (kept, cut) = if down <= 0 {
            (magnitude << -down, Remainder::Nothing)
        } else if down > 64 {
            (0, Remainder::Less)
        } else {
            let wide = u128::from(magnitude);
            let (rest, half) = (wide & ((1 << down) - 1), 1u128 << (down - 1));
            let cut = match rest {
                0 => Remainder::Nothing,
                rest if rest < half => Remainder::Less,
                rest if rest == half => Remainder::Half,
                _ => Remainder::More,
            };
            ((wide >> down) as u64, cut)
        };
        let kept = kept + u64::from(rounding.goes_up(negative, kept & 1 == 1, cut));
        // Carries go into the exponent by themselves.
        let field = ((exponent - lowest) as u64) << self.fraction;
        let found = if kept < 1 << self.fraction { kept } else { field + kept };
        if found > self.largest() { self.overflow(negative, rounding) } else { found | self.sign(negative) }
    }

    /// A number, rounded; NaN is the format's.
    pub(crate) fn round(self, value: f64, rounding: Rounding) -> u64 {
        let bits = value.to_bits();
        let (negative, field) = (value.is_sign_negative(), (bits >> 52) as i32 & 0x7ff);
        let fraction = bits & ((1 << 52) - 1);
        match (field, fraction) {
            (0x7ff, 0) if self.infinities => (self.largest() + 1) | self.sign(negative),
            (0x7ff, 0) => self.nan() | self.sign(negative),
            (0x7ff, _) => self.nan(),
            (0, _) => self.pack(negative, fraction, -1074, rounding),
            _ => self.pack(negative, fraction | 1 << 52, field - 1075, rounding),
        }
    }

    /// Value of bits.
    pub(crate) fn value(self, bits: u64) -> f64 {
        let fraction = bits & ((1 << self.fraction) - 1);
        let field = (bits >> self.fraction) as i32 & ((1 << self.exponent) - 1);
        let largest = (1 << self.exponent) - 1;
        let magnitude = match (field, fraction) {
            _ if !self.infinities && bits & (self.sign(true) - 1) == self.nan() => f64::NAN,
            (field, 0) if field == largest && self.infinities => f64::INFINITY,
            (field, _) if field == largest && self.infinities => f64::NAN,
            (0, _) => fraction as f64 * two(1 - self.bias() - self.fraction as i32),
            _ => {
                let significand = (fraction | 1 << self.fraction) as f64;
                significand * two(field - self.bias() - self.fraction as i32)
            }
        };
        if bits & self.sign(true) == 0 { magnitude } else { -magnitude }
    }

    /// Clamps a value to the largest number, with its sign; NaN is kept.
    pub(crate) fn saturated(self, value: f64) -> f64 {
        let most = self.value(self.largest());
        if value.is_nan() { value } else { value.clamp(-most, most) }
    }
}

/// 2^exponent of a normal f64.
fn two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_round_trips() {
        for format in [F16, BF16, E4M3, E5M2] {
            for bits in 0..1u64 << format.bits() {
                let value = format.value(bits);
                if !value.is_nan() {
                    assert_eq!(format.round(value, Rounding::Nearest), bits, "{format:?} {bits:x}");
                }
            }
        }
    }

    #[test]
    fn singles_round_as_the_cpu_does() {
        let mut state = 1u64;
        for _ in 0..100_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Exponents around those of f32, its subnormal numbers among them.
            let value = f64::from_bits((state & !(0x7ff << 52)) | ((860 + (state >> 55)) << 52));
            let want = u64::from((value as f32).to_bits());
            assert_eq!(F32.round(value, Rounding::Nearest), want, "{value:e}");
        }
    }

    #[test]
    fn directed_rounding() {
        let third = 1.0 / 3.0;
        let of = |rounding| F16.round(third, rounding);
        assert_eq!(of(Rounding::Up), of(Rounding::Zero) + 1);
        assert_eq!(of(Rounding::Down), of(Rounding::Zero));
        assert_eq!(F16.round(-third, Rounding::Down), of(Rounding::Up) | 0x8000);
        assert_eq!(F16.round(70000.0, Rounding::Zero), 0x7bff);
        assert_eq!(F16.round(70000.0, Rounding::Nearest), 0x7c00);
        assert_eq!(TF32.round(1.0 + 1.0 / 2048.0, Rounding::NearestAway), (127 << 10) + 1);
        assert_eq!(TF32.round(1.0 + 1.0 / 2048.0, Rounding::Nearest), 127 << 10);
        assert_eq!(E4M3.round(448.0, Rounding::Nearest), 0x7e);
        assert_eq!(E4M3.round(E4M3.saturated(1e9), Rounding::Nearest), 0x7e);
    }
}
