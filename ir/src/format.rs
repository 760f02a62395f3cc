//! Weight formats: one row of facts each, which the compiler, the packing and the kernels read.
//!
//! A format of codes that there are is a variant and a row; one with a new [`Coding`] also needs kernels,
//! which match on it.

mod patterns;

pub use patterns::{Q2_PATTERNS, Q2S_PATTERNS};

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
    /// Groups of [`GROUP`] numbers of a row: codes of [`Q3_GRID`] times one bf16 scale of either sign.
    Q3,
    /// Groups of [`GROUP`] numbers of a row: quads, each one of [`Q2_PATTERNS`] with signs, times one scale of
    /// [`E5M3`].
    Q2,
    /// As [`Format::Q2`], one of [`Q2S_PATTERNS`], and groups of twice as many numbers.
    Q2s,
    /// GGUF's Q4_K: groups with [`Fine`] scales and minima by [`GROUP`] numbers, and codes of 4 bits.
    Q4k,
    /// GGUF's Q5_K: as [`Format::Q4k`] with codes of 5 bits.
    Q5k,
    /// GGUF's Q6_K: groups with [`Fine`] scales by half of [`GROUP`] numbers, and codes in −32..=31.
    Q6k,
    /// GGUF's Q3_K: as [`Format::Q6k`] with codes in −4..=3.
    Q3k,
    /// As [`Format::Q4`] with codes of [`Q4N_GRID`].
    Q4n,
    /// GGUF's Q2_K: groups with [`Fine`] scales and minima by half of [`GROUP`] numbers, and codes of 2 bits.
    Q2k,
    /// GGUF's IQ4_XS: groups with [`Fine`] scales by [`GROUP`] numbers, and codes of [`IQ4_GRID`].
    Iq4xs,
}

/// Scales of two levels: those of a group's runs are whole numbers of a byte times the group's scale, and
/// their minima are such numbers times a second scale. A block is its codes, then [`FINE_BYTES`]: the scale
/// of its run and the minimum, or a byte for each of its two runs, the scale or both in half a byte each, the
/// scale in the lower. The scales of groups, then those of their minima, follow all blocks; both are f16.
///
/// A number is `scale · (code − lowest) − minimum`, or without minima `scale · code`. Products of so few
/// bits are exact in f32, so that this is what llama.cpp's `dequantize_row` gives, to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fine {
    /// Numbers of a run: a block or half of one.
    pub run: usize,
    /// Whether runs have minima.
    pub minima: bool,
}

/// Bytes of the fine scales and minima of a block.
pub const FINE_BYTES: usize = 2;

/// Numbers that share the scale of [`Fine`] ones.
pub const FINE_GROUP: usize = 256;

/// Bytes of a number with fine scales as a checkpoint has it: its code, the scale and the minimum of its run,
/// the group's two scales.
pub const FINE_STORED: usize = 7;

/// Layout of a format's codes, and their values in multiples of the scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// A byte each: the code.
    Bytes,
    /// Half a byte each: the index of the code.
    Nibbles,
    /// The index of the code, its bits in planes ([`Codes::planes`]).
    Planes,
    /// Quads of codes: the index of their magnitudes among [`Codes::patterns`], and four signs. A block has a
    /// word with the four lower bits of all indices, quad by quad, then a word of signs: bit `q` of byte `j`
    /// is that of code `j` of quad `q`. The fifth bits of indices, if there are any, are a byte before the
    /// scale, quad by quad.
    Patterns,
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

/// The codes of [`Format::Q4n`]. As those of [`Q3_GRID`], they are where groups of [`GROUP`] normal numbers,
/// each divided by the best scale of either sign, lose least (Lloyd, "Least squares quantization in PCM", 1982),
/// rounded to whole numbers. They are not symmetric: a group takes the sign that suits it.
pub const Q4N_GRID: [i8; 16] = [-48, -37, -29, -22, -16, -11, -6, -1, 4, 9, 15, 21, 28, 36, 45, 56];

/// The codes of [`Format::Q3`].
pub const Q3_GRID: [i8; 8] = [-47, -29, -15, -3, 8, 20, 34, 57];

/// The codes of [`Format::Iq4xs`]: `kvalues_iq4nl` of ggml.
pub const IQ4_GRID: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Bits of mantissa of a scale of eight bits without a sign: five of exponent, then three. The number of
/// byte `b` is the f32 of bits `b << 20`, times [`E5M3_UNIT`]. Scales are normal numbers or zero: bytes 1 to 7
/// are not written.
pub const E5M3: u32 = 3;

/// Factor of the scales of [`E5M3`]: 2¹⁰², so that their exponents go from −24 to 6.
pub const E5M3_UNIT: f32 = f32::from_bits((127 + 102) << 23);

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
    /// Codes of a block.
    pub block: usize,
    /// Numbers of a group: one block or more.
    pub group: usize,
    /// Lowest code.
    pub lowest: i8,
    /// Highest code.
    pub highest: i8,
    /// Codes by their index; empty where they are whole numbers from the lowest on.
    pub grid: &'static [i8],
    /// Widest step from a code to the next; of patterns, twice the farthest that the codes of a quad are from
    /// what they stand for.
    pub step: u8,
    /// Codes that a number of 1 at a scale of 1 is: 2 where halves are among the numbers.
    pub unit: u8,
    /// Whether scales are powers of two.
    pub powers: bool,
    /// Magnitudes of quads, in ascending order of their sums of squares; empty where codes have indices of
    /// their own. None is zero.
    pub patterns: &'static [[u8; 4]],
    /// Scales of runs, where groups have such.
    pub fine: Option<Fine>,
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
    /// Bits of a number or of its code, but for those beside a scale.
    pub bits: usize,
    /// Its codes; `None` for formats without groups.
    pub codes: Option<Codes>,
    /// Numbers that share a scale.
    pub granularity: Granularity,
    /// Type of the scales; for formats without groups the format itself.
    pub scale: Format,
    /// Bytes of a scale with the bits of codes beside it; 0 for formats without groups.
    pub scale_bytes: usize,
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
        scale_bytes: 0,
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
        scale_bytes: 2,
        ..plain(format, name, bits, 0.0)
    }
}

/// Rows of codes with a scale of f32 each.
const fn channels(format: Format, name: &'static str, bits: usize, codes: Codes) -> FormatSpec {
    FormatSpec {
        granularity: Granularity::Channel,
        scale: Format::F32,
        scale_bytes: 4,
        ..groups(format, name, bits, codes)
    }
}

/// A byte for each code.
const BYTES: Codes = Codes {
    coding: Coding::Bytes,
    block: GROUP,
    group: GROUP,
    lowest: -127,
    highest: 127,
    grid: &[],
    step: 1,
    unit: 1,
    powers: false,
    patterns: &[],
    fine: None,
};

/// Half a byte for each code.
const NIBBLES: Codes = Codes { coding: Coding::Nibbles, lowest: -8, highest: 7, ..BYTES };

/// Codes of some bits in planes, from the lowest on.
const fn planes(lowest: i8) -> Codes {
    Codes { coding: Coding::Planes, lowest, highest: -lowest - 1, ..BYTES }
}

/// Codes of a grid in ascending order.
const fn by_grid(coding: Coding, grid: &'static [i8]) -> Codes {
    let (mut step, mut i) = (0, 1);
    while i < grid.len() {
        let next = grid[i].abs_diff(grid[i - 1]);
        step = if next > step { next } else { step };
        i += 1;
    }
    Codes { coding, lowest: grid[0], highest: grid[grid.len() - 1], grid, step, ..BYTES }
}

/// Groups of quads by patterns, whose scales are of [`E5M3`]. `scale_bytes` says whether indices have a fifth
/// bit.
const fn quads(
    format: Format,
    name: &'static str,
    [group, scale_bytes]: [usize; 2],
    patterns: &'static [[u8; 4]],
) -> FormatSpec {
    const HIGHEST: i8 = TOP.cast_signed();
    let codes = Codes {
        coding: Coding::Patterns,
        group,
        lowest: -HIGHEST,
        highest: HIGHEST,
        step: 16,
        patterns,
        ..BYTES
    };
    FormatSpec { scale_bytes, largest: 2e3, ..groups(format, name, 2, codes) }
}

/// Codes as they are, with scales of two levels.
const fn fine(format: Format, name: &'static str, bits: usize, codes: Codes, fine: Fine) -> FormatSpec {
    let codes = Codes { group: FINE_GROUP, fine: Some(fine), ..codes };
    FormatSpec {
        scale: Format::F16,
        scale_bytes: if fine.minima { 4 } else { 2 },
        published: true,
        largest: 3e7,
        ..groups(format, name, bits, codes)
    }
}

/// Highest magnitude of a pattern.
const TOP: u8 = 24;

/// A row for each format, in the order of its variants.
static ROWS: [FormatSpec; 22] = [
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
            Codes { lowest: -12, highest: 12, grid: &E2M1, step: 4, unit: 2, powers: true, ..NIBBLES },
        )
    },
    groups(Format::Q6, "q6", 6, planes(-32)),
    groups(Format::Q5, "q5", 5, planes(-16)),
    groups(Format::Q3, "q3", 3, by_grid(Coding::Planes, &Q3_GRID)),
    quads(Format::Q2, "q2", [GROUP, 2], &Q2_PATTERNS),
    quads(Format::Q2s, "q2s", [2 * GROUP, 1], &Q2S_PATTERNS),
    fine(Format::Q4k, "q4k", 4, NIBBLES, Fine { run: GROUP, minima: true }),
    fine(Format::Q5k, "q5k", 5, planes(-16), Fine { run: GROUP, minima: true }),
    fine(Format::Q6k, "q6k", 6, planes(-32), Fine { run: GROUP / 2, minima: false }),
    fine(Format::Q3k, "q3k", 3, planes(-4), Fine { run: GROUP / 2, minima: false }),
    groups(Format::Q4n, "q4n", 4, by_grid(Coding::Nibbles, &Q4N_GRID)),
    fine(Format::Q2k, "q2k", 2, planes(-2), Fine { run: GROUP / 2, minima: true }),
    fine(Format::Iq4xs, "iq4xs", 4, by_grid(Coding::Nibbles, &IQ4_GRID), Fine { run: GROUP, minima: false }),
];

impl Format {
    /// Every format, in the order that messages list them.
    pub const ALL: [Self; 22] = [
        Self::F32,
        Self::Bf16,
        Self::F16,
        Self::Q8,
        Self::Q6,
        Self::Q5,
        Self::Q4n,
        Self::Q4,
        Self::Q3,
        Self::Q2,
        Self::Q2s,
        Self::Q8h,
        Self::Q4h,
        Self::Mxfp4,
        Self::Q4o,
        Self::Q4c,
        Self::Q6k,
        Self::Q5k,
        Self::Q4k,
        Self::Iq4xs,
        Self::Q3k,
        Self::Q2k,
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

    /// The format for published codes of this many bits and this grid.
    pub fn published(bits: usize, grid: &[i8]) -> Option<Self> {
        Self::ALL
            .into_iter()
            .filter(|f| f.is_published() && !f.has_fine_scales())
            .find(|f| f.spec().bits == bits && f.grid() == grid)
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

    /// Codes by their index; empty where they are whole numbers from the lowest on, and for formats without
    /// groups.
    pub const fn grid(self) -> &'static [i8] {
        match &self.spec().codes {
            Some(codes) => codes.grid,
            None => &[],
        }
    }

    /// Numbers that are stored together: those of a block of codes; 1 for formats without groups.
    pub const fn block(self) -> usize {
        match &self.spec().codes {
            Some(codes) => codes.block,
            None => 1,
        }
    }

    /// Numbers that share a scale in formats of groups; those of a block in others.
    pub const fn group(self) -> usize {
        match &self.spec().codes {
            Some(codes) => codes.group,
            None => 1,
        }
    }

    /// Bytes of a scale with the bits of codes beside it.
    pub const fn scale_bytes(self) -> usize {
        self.spec().scale_bytes
    }

    /// Bytes of the codes of a block, but for bits beside a scale, with its fine scales; of a number for
    /// formats without groups.
    pub const fn block_bytes(self) -> usize {
        self.code_bytes() + if self.has_fine_scales() { FINE_BYTES } else { 0 }
    }

    /// As [`Self::block_bytes`], without fine scales.
    pub const fn code_bytes(self) -> usize {
        self.block() * self.spec().bits / 8
    }

    /// Scales of runs, if its groups have such.
    pub const fn fine(self) -> Option<Fine> {
        match &self.spec().codes {
            Some(codes) => codes.fine,
            None => None,
        }
    }

    /// Whether its scales are of two levels. Such formats hold the numbers of checkpoints that have the same
    /// one; no weights are rounded to them.
    pub const fn has_fine_scales(self) -> bool {
        self.fine().is_some()
    }

    /// Highest fine scale of rounded numbers, and highest minimum.
    pub const fn fine_most(self) -> u8 {
        match self.fine() {
            Some(Fine { run: GROUP, minima: true }) => 63,
            Some(Fine { minima: true, .. }) => 15,
            _ => 127,
        }
    }

    /// Runs of a block that have a scale of their own.
    pub const fn runs(self) -> usize {
        match self.fine() {
            Some(fine) => GROUP / fine.run,
            None => 1,
        }
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

    /// Whether its codes are quads by patterns.
    pub const fn is_by_patterns(self) -> bool {
        matches!(self.coding(), Some(Coding::Patterns))
    }

    /// Whether a code's bits are in several words of a block.
    pub const fn spreads_codes(self) -> bool {
        self.is_by_planes() || self.is_by_patterns()
    }

    /// Whether single rows can be stored in it: the table of embeddings is read row by row.
    pub const fn holds_rows(self) -> bool {
        !self.is_by_channel() && !self.spreads_codes() && !self.has_fine_scales()
    }

    /// Whether its codes, if it has any, are whole numbers that rounding chooses, each in one place: what
    /// neurons and static graphs take.
    pub const fn has_plain_codes(self) -> bool {
        !self.is_published() && !self.spreads_codes() && self.grid().is_empty()
    }

    /// Whether neurons can be stored in it individually.
    pub const fn holds_neurons(self) -> bool {
        self.holds_rows() && self.has_plain_codes()
    }

    /// Bytes of a number as a checkpoint has it, [`crate::Source::stored`]: of groups its code and the scale
    /// of its group. 0 where no checkpoint has any.
    pub const fn stored_bytes(self) -> usize {
        if !self.is_quantised() {
            self.block_bytes()
        } else if self.has_fine_scales() {
            FINE_STORED
        } else if self.is_published() {
            1 + self.scale_bytes()
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

    /// Bytes of a block and its scale; `None` for the formats that have no groups, or groups of more blocks.
    pub const fn group_bytes(self) -> Option<usize> {
        if self.is_grouped() && self.group() == self.block() {
            Some(self.block_bytes() + self.scale_bytes())
        } else {
            None
        }
    }

    /// Bytes of a row of `cols` numbers in row-major order. The last block is stored whole, and so are rows
    /// of one scale; their outliers, with the scale of these, come in addition.
    pub const fn row_bytes(self, cols: usize) -> usize {
        let blocks = cols.div_ceil(self.block());
        match self.spec().granularity {
            Granularity::Number => blocks * self.block_bytes(),
            Granularity::Group => {
                blocks * self.block_bytes() + cols.div_ceil(self.group()) * self.scale_bytes()
            }
            Granularity::Channel => {
                let outliers = match self.outliers(cols) {
                    0 => 0,
                    codes => codes + self.scale_bytes(),
                };
                blocks * self.block_bytes() + self.scale_bytes() + outliers
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
            _ => self.row_bytes(self.group()) as f64 * 8.0 / self.group() as f64,
        }
    }

    /// Relative error, as root mean square, that storing numbers in it explains: half a step of a group whose
    /// other numbers are small beside its largest. Of long rows with one scale the largest is cut off, so
    /// that no more is lost than in such a group.
    pub fn distance(self) -> f64 {
        let spec = self.spec();
        spec.codes.map_or(spec.rounding, |codes| {
            let shared = codes.fine.map_or(codes.group, |fine| fine.run);
            f64::from(codes.step) / 2.0 / f64::from(codes.highest) * (shared as f64).sqrt()
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
