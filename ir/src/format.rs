//! Weight formats: one row of facts each, which the compiler, the packing and the kernels read.
//!
//! A format of codes that there are is a variant and a row; one with a new [`Coding`] also needs kernels,
//! which match on it.

use bincode::{Decode, Encode};
use std::fmt;

/// Numbers of a block of codes: what kernels unpack at once, and what shares a scale in the formats of
/// groups.
pub const GROUP: usize = 32;

/// Input channels of which [`Format::Q4o`] stores one in INT8.
pub const OUTLIERS: usize = 32;

/// Storage format of a weight in the bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
pub enum Format {
    /// IEEE binary32.
    F32,
    /// The upper half of binary32.
    Bf16,
    /// IEEE binary16.
    F16,
    /// Groups of [`GROUP`] numbers of a row: whole codes in −127..=127 times one bf16 scale.
    Q8,
    /// Groups of [`GROUP`] numbers of a row: whole codes in −8..=7 times one bf16 scale of either sign.
    Q4,
    /// Output channels (rows of a matrix) that share one f32 scale each, with whole codes in −8..=7; but the
    /// weights of one input channel (column) in [`OUTLIERS`], those that lose most by so few bits, have codes
    /// in −127..=127 and a second f32 scale for each row.
    Q4o,
    /// Output channels that share one f32 scale each, all of them with codes in −8..=7: what [`Format::Q4o`]
    /// is without its outliers.
    Q4c,
    /// As [`Format::Q8`] with a scale of f16 and codes from −128 on: GGUF's Q8_0.
    Q8h,
    /// As [`Format::Q4`] with a scale of f16: GGUF's Q4_0.
    Q4h,
    /// Groups of [`GROUP`] numbers of a row: numbers of [`E2M1`] times a power of two (OCP Microscaling
    /// Formats 1.0, MXFP4). The scale is half of that power, as bf16.
    Mxfp4,
    /// Groups of [`GROUP`] numbers of a row: whole codes in −32..=31 times one bf16 scale.
    Q6,
    /// Groups of [`GROUP`] numbers of a row: whole codes in −16..=15 times one bf16 scale of either sign.
    Q5,
    /// Groups of [`GROUP`] numbers of a row: odd codes in −7..=7 times one bf16 scale.
    Q3,
    /// Groups of [`GROUP`] numbers of a row: the codes −3, −1, 1 and 3 times one bf16 scale.
    Q2,
}

/// Layout of a format's codes, and their values in multiples of the scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// A byte each: the code.
    Bytes,
    /// Half a byte each: the code, and 8.
    Nibbles,
    /// Half a byte each: the place of the code in [`E2M1`].
    E2m1,
    /// The index of the code among all codes from the lowest on, its bits in planes ([`Codes::planes`]).
    Planes,
}

/// Bits of the codes of a block that are stored together: a word of 32 bits for each bit of their width, in
/// which the same bits of `8 / width` quads of codes follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// Bits of a code: 8, 4, 2 or 1. As many words hold those of a block.
    pub width: usize,
    /// Position of the first of them in the code.
    pub shift: usize,
    /// Index of the first word: the number of words of the planes before.
    pub first: usize,
}

impl Plane {
    /// Word of the block that holds the bits of a quad of codes, and their position in each byte of it.
    pub const fn of_quad(self, quad: usize) -> (usize, usize) {
        (self.first + quad % self.width, quad / self.width * self.width)
    }
}

/// The numbers of E2M1 by their bits (sign, two of exponent, one of mantissa), each twice itself: whole ones,
/// whose scale is half of the numbers'.
pub const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Numbers that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granularity {
    /// No group: numbers have no common scale.
    Number,
    /// A block of a row.
    Group,
    /// A row of a matrix: an output channel.
    Channel,
}

/// Codes of a format, times whose scale they are numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Codes {
    /// Layout of the codes.
    pub coding: Coding,
    /// Codes of a block; groups are one block each.
    pub block: usize,
    /// Lowest code.
    pub lowest: i8,
    /// Highest code.
    pub highest: i8,
    /// Widest step from a code to the next.
    pub step: u8,
    /// Codes that a number of 1 at a scale of 1 is: 2 where halves are among the numbers.
    pub unit: u8,
    /// Whether scales are powers of two.
    pub powers: bool,
}

impl Codes {
    /// Planes of codes of `bits` bits, the widest first.
    pub fn planes(bits: usize) -> impl Iterator<Item = Plane> + Clone {
        let widths = [8, 4, 2, 1].into_iter().filter(move |width| bits & width > 0);
        // The widths before are the higher bits of the number of bits.
        widths.map(move |width| Plane {
            width,
            shift: bits & !(2 * width - 1),
            first: bits & !(2 * width - 1),
        })
    }
}

/// Facts of a format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FormatSpec {
    /// The format.
    pub format: Format,
    /// Name in the text form and in `model.toml`.
    pub name: &'static str,
    /// Bits of a number or of its code, scales aside.
    pub bits: usize,
    /// Its codes; `None` for formats without groups.
    pub codes: Option<Codes>,
    /// Numbers that share a scale.
    pub granularity: Granularity,
    /// Type of the scales; for formats without groups the format itself.
    pub scale: Format,
    /// Whether it exists for the codes and scales of published checkpoints, which it holds unchanged.
    pub published: bool,
    /// One column of this many is stored in INT8, in addition to the others.
    pub outliers: Option<usize>,
    /// Relative error of rounding a binary32 number, in formats without groups: half of the last place; else
    /// 0.
    pub rounding: f64,
    /// Largest magnitude of a number that is surely held: of codes, the largest times a scale that was
    /// rounded up is still finite.
    pub largest: f32,
}

/// Largest magnitude of numbers whose scales have the exponents of binary32.
pub const LARGEST: f32 = 1e38;

/// A format without groups.
const fn plain(format: Format, name: &'static str, bits: usize, rounding: f64) -> FormatSpec {
    FormatSpec {
        format,
        name,
        bits,
        codes: None,
        granularity: Granularity::Number,
        scale: format,
        published: false,
        outliers: None,
        rounding,
        largest: LARGEST,
    }
}

/// Groups of codes with a scale of bf16 each.
const fn groups(format: Format, name: &'static str, bits: usize, codes: Codes) -> FormatSpec {
    FormatSpec {
        codes: Some(codes),
        granularity: Granularity::Group,
        scale: Format::Bf16,
        ..plain(format, name, bits, 0.0)
    }
}

/// Rows of codes with a scale of f32 each.
const fn channels(format: Format, name: &'static str, bits: usize, codes: Codes) -> FormatSpec {
    FormatSpec { granularity: Granularity::Channel, scale: Format::F32, ..groups(format, name, bits, codes) }
}

/// A byte for each code.
const BYTES: Codes = Codes {
    coding: Coding::Bytes,
    block: GROUP,
    lowest: -127,
    highest: 127,
    step: 1,
    unit: 1,
    powers: false,
};

/// Half a byte for each code.
const NIBBLES: Codes =
    Codes { coding: Coding::Nibbles, block: GROUP, lowest: -8, highest: 7, step: 1, unit: 1, powers: false };

/// Codes of some bits in planes, from the lowest on.
const fn planes(lowest: i8, step: u8) -> Codes {
    Codes {
        coding: Coding::Planes,
        lowest,
        highest: if step == 1 { -lowest - 1 } else { -lowest },
        step,
        ..BYTES
    }
}

/// A row for each format, in the order of its variants.
static ROWS: [FormatSpec; 14] = [
    plain(Format::F32, "f32", 32, 0.0),
    plain(Format::Bf16, "bf16", 16, 1.0 / 512.0),
    FormatSpec { largest: 65504.0, ..plain(Format::F16, "f16", 16, 1.0 / 4096.0) },
    groups(Format::Q8, "q8", 8, BYTES),
    groups(Format::Q4, "q4", 4, NIBBLES),
    FormatSpec { outliers: Some(OUTLIERS), ..channels(Format::Q4o, "q4o", 4, NIBBLES) },
    channels(Format::Q4c, "q4c", 4, NIBBLES),
    FormatSpec {
        scale: Format::F16,
        published: true,
        largest: 8e6,
        ..groups(Format::Q8h, "q8h", 8, Codes { lowest: -128, ..BYTES })
    },
    FormatSpec {
        scale: Format::F16,
        published: true,
        largest: 3.9e5,
        ..groups(Format::Q4h, "q4h", 4, NIBBLES)
    },
    FormatSpec {
        published: true,
        ..groups(
            Format::Mxfp4,
            "mxfp4",
            4,
            Codes {
                coding: Coding::E2m1,
                lowest: -12,
                highest: 12,
                step: 4,
                unit: 2,
                powers: true,
                ..NIBBLES
            },
        )
    },
    groups(Format::Q6, "q6", 6, planes(-32, 1)),
    groups(Format::Q5, "q5", 5, planes(-16, 1)),
    groups(Format::Q3, "q3", 3, planes(-7, 2)),
    groups(Format::Q2, "q2", 2, planes(-3, 2)),
];

/// Bytes of a scale of a group.
const GROUP_SCALE: usize = 2;

/// Bytes of a scale of a row.
const CHANNEL_SCALE: usize = 4;

impl Format {
    /// Every format, in the order that messages list them.
    pub const ALL: [Self; 14] = [
        Self::F32,
        Self::Bf16,
        Self::F16,
        Self::Q8,
        Self::Q6,
        Self::Q5,
        Self::Q4,
        Self::Q3,
        Self::Q2,
        Self::Q8h,
        Self::Q4h,
        Self::Mxfp4,
        Self::Q4o,
        Self::Q4c,
    ];

    /// Its facts.
    pub const fn spec(self) -> &'static FormatSpec {
        &ROWS[self as usize]
    }

    /// Name in the text form and in `model.toml`.
    pub const fn name(self) -> &'static str {
        self.spec().name
    }

    /// The format of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }

    /// The format for published codes with this many bits, whose order and grid are those of `coding`.
    pub fn published(coding: Coding, bits: usize) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|f| f.is_published() && (f.coding(), f.spec().bits) == (Some(coding), bits))
    }

    /// Whether numbers are stored in groups with a common scale.
    pub const fn is_grouped(self) -> bool {
        matches!(self.spec().granularity, Granularity::Group)
    }

    /// Whether the numbers of a row share one scale.
    pub const fn is_by_channel(self) -> bool {
        matches!(self.spec().granularity, Granularity::Channel)
    }

    /// Whether numbers are codes that have a scale in common, of a group or of a row.
    pub const fn is_quantised(self) -> bool {
        self.spec().codes.is_some()
    }

    /// Layout of its codes; `None` for formats without groups.
    pub const fn coding(self) -> Option<Coding> {
        match &self.spec().codes {
            Some(codes) => Some(codes.coding),
            None => None,
        }
    }

    /// Numbers that are stored together: those of a block of codes; 1 for formats without groups.
    pub const fn block(self) -> usize {
        match &self.spec().codes {
            Some(codes) => codes.block,
            None => 1,
        }
    }

    /// Bytes of the codes of a block; of a number for formats without groups.
    pub const fn block_bytes(self) -> usize {
        self.block() * self.spec().bits / 8
    }

    /// The format of the scales of its codes; where it has none, it is itself.
    pub const fn scales(self) -> Self {
        self.spec().scale
    }

    /// Whether it exists for the codes and scales of published checkpoints, which it holds unchanged.
    pub const fn is_published(self) -> bool {
        self.spec().published
    }

    /// Whether its codes are stored in planes of bits.
    pub const fn is_by_planes(self) -> bool {
        matches!(self.coding(), Some(Coding::Planes))
    }

    /// Whether single rows can be stored in it: the table of embeddings is read row by row.
    pub const fn holds_rows(self) -> bool {
        !self.is_by_channel() && !self.is_by_planes()
    }

    /// Whether neurons can be stored in it individually.
    pub const fn holds_neurons(self) -> bool {
        self.holds_rows() && !self.is_published()
    }

    /// Bytes of a number as a checkpoint has it, [`crate::Source::stored`]: of groups its code and the scale
    /// of its group. 0 where no checkpoint has any.
    pub const fn stored_bytes(self) -> usize {
        if !self.is_quantised() {
            self.block_bytes()
        } else if self.is_published() {
            1 + GROUP_SCALE
        } else {
            0
        }
    }

    /// Number of a matrix's `cols` that are stored as INT8 beside the others.
    pub const fn outliers(self, cols: usize) -> usize {
        match self.spec().outliers {
            Some(one_in) => cols / one_in,
            None => 0,
        }
    }

    /// Bytes of one group and its scale; `None` for the formats that have no groups.
    pub const fn group_bytes(self) -> Option<usize> {
        if self.is_grouped() { Some(self.block_bytes() + GROUP_SCALE) } else { None }
    }

    /// Bytes of a row of `cols` numbers in row-major order. The last block is stored whole, and so are rows
    /// of one scale; their outliers, with the scale of these, come in addition.
    pub const fn row_bytes(self, cols: usize) -> usize {
        let blocks = cols.div_ceil(self.block());
        match self.spec().granularity {
            Granularity::Number => blocks * self.block_bytes(),
            Granularity::Group => blocks * (self.block_bytes() + GROUP_SCALE),
            Granularity::Channel => {
                let outliers = match self.outliers(cols) {
                    0 => 0,
                    codes => codes + CHANNEL_SCALE,
                };
                blocks * self.block_bytes() + CHANNEL_SCALE + outliers
            }
        }
    }

    /// Bytes that one output channel of `depth` numbers takes of a panel. As [`Self::row_bytes`], but bf16 is
    /// stored in whole pairs.
    pub const fn column_bytes(self, depth: usize) -> usize {
        match self {
            Self::Bf16 => depth.div_ceil(2) * 4,
            _ => self.row_bytes(depth),
        }
    }

    /// Bytes that `elements` elements take in row-major order.
    pub const fn bytes(self, elements: usize) -> usize {
        self.row_bytes(elements)
    }

    /// Bits per number of long rows, scales of groups and outliers included.
    pub const fn bits(self) -> f64 {
        let spec = self.spec();
        match (spec.granularity, spec.outliers) {
            (Granularity::Channel, Some(one_in)) => spec.bits as f64 + 8.0 / one_in as f64,
            (Granularity::Channel, None) => spec.bits as f64,
            _ => self.row_bytes(self.block()) as f64 * 8.0 / self.block() as f64,
        }
    }

    /// Relative error, as root mean square, that storing numbers in it explains: half a step of a group whose
    /// other numbers are small beside its largest. Of long rows with one scale the largest is cut off, so
    /// that no more is lost than in such a group.
    pub fn distance(self) -> f64 {
        let spec = self.spec();
        spec.codes.map_or(spec.rounding, |codes| {
            f64::from(codes.step) / 2.0 / f64::from(codes.highest) * (codes.block as f64).sqrt()
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_the_row_of_its_variant() {
        assert_eq!(ROWS.len(), Format::ALL.len());
        for (i, row) in ROWS.iter().enumerate() {
            assert_eq!(row.format as usize, i, "{}", row.name);
            assert!(Format::ALL.contains(&row.format) && Format::parse(row.name) == Some(row.format));
            assert!(
                !row.scale.is_quantised() && row.codes.is_some() == (row.scale != row.format),
                "{}",
                row.name
            );
        }
    }

    /// Every bit of every quad has a position of its own, in as many words as a code has bits.
    #[test]
    fn planes_hold_each_bit_once() {
        for bits in 1..=8 {
            let mut taken = vec![0_u32; bits];
            for plane in Codes::planes(bits) {
                for quad in 0..GROUP / 4 {
                    let (word, shift) = plane.of_quad(quad);
                    let mask = ((1 << plane.width) - 1) << shift;
                    assert_eq!(taken[word] & mask, 0, "{bits} bits, quad {quad}");
                    taken[word] |= mask;
                }
            }
            assert!(taken.iter().all(|word| *word == 0xff), "{bits} bits");
            let shifts: Vec<_> = Codes::planes(bits).map(|p| (p.shift, p.width)).collect();
            assert_eq!(shifts.iter().map(|s| s.1).sum::<usize>(), bits);
            assert!(shifts.windows(2).all(|s| s[0].0 + s[0].1 == s[1].0), "{shifts:?}");
        }
        let three: Vec<Plane> = Codes::planes(3).collect();
        assert_eq!(three, [Plane { width: 2, shift: 0, first: 0 }, Plane { width: 1, shift: 2, first: 2 }]);
    }

    /// Bytes and errors of formats, by their definitions.
    #[test]
    fn format_sizes_and_errors_match_their_definitions() {
        let sizes = |f: Format| (f.row_bytes(33), f.group_bytes(), f.bits(), f.stored_bytes());
        assert_eq!(sizes(Format::F32), (132, None, 32.0, 4));
        assert_eq!(sizes(Format::Bf16), (66, None, 16.0, 2));
        assert_eq!(sizes(Format::Q8), (68, Some(34), 8.5, 0));
        assert_eq!(sizes(Format::Q8h), (68, Some(34), 8.5, 3));
        assert_eq!(sizes(Format::Q4), (36, Some(18), 4.5, 0));
        assert_eq!(sizes(Format::Mxfp4), (36, Some(18), 4.5, 3));
        assert_eq!(sizes(Format::Q6), (52, Some(26), 6.5, 0));
        assert_eq!(sizes(Format::Q5), (44, Some(22), 5.5, 0));
        assert_eq!(sizes(Format::Q3), (28, Some(14), 3.5, 0));
        assert_eq!(sizes(Format::Q2), (20, Some(10), 2.5, 0));
        assert_eq!(sizes(Format::Q4o), (41, None, 4.25, 0));
        assert_eq!(sizes(Format::Q4c), (36, None, 4.0, 0));
        assert_eq!([Format::Q4o, Format::Q4c].map(|f| f.outliers(65)), [2, 0]);
        let root = 32.0_f64.sqrt();
        assert_eq!(Format::Q8h.distance(), 0.5 / 127.0 * root);
        assert_eq!(Format::Q4c.distance(), 0.5 / 7.0 * root);
        // Half of the widest step, between 4 and 6.
        assert_eq!(Format::Mxfp4.distance(), 1.0 / 6.0 * root);
        assert_eq!([Format::F32, Format::Bf16].map(Format::distance), [0.0, 2.0_f64.powi(-9)]);
        let published = [(Coding::Bytes, 8), (Coding::Nibbles, 4), (Coding::E2m1, 4), (Coding::Bytes, 4)];
        let found = published.map(|(coding, bits)| Format::published(coding, bits));
        assert_eq!(found, [Some(Format::Q8h), Some(Format::Q4h), Some(Format::Mxfp4), None]);
    }
}
