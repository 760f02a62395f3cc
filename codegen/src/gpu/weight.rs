//! A row of a weight in [`Layout::Rows`](moec_ir::plan::Layout), as a lane of a warp reads it.

use crate::dsl::{F, HalfType, I, Kb, P, widest};
use crate::kernels::panel::is_nibbles;
use crate::kernels::unpack::{e5m3, from_patterns, from_planes};
use moec_ir::types::{Codes as FormatCodes, Coding, E2M1, Format, GROUP};

/// Bytes that a lane reads at once, at most, but for a group of codes in planes.
const WIDE: usize = 16;
/// Quads of codes in a group.
const QUADS: usize = GROUP / 4;

/// A row of a weight.
#[derive(Clone, Copy)]
pub(super) struct WeightRow<'k> {
    k: &'k Kb<'k>,
    at: P<'k>,
    format: Format,
    cols: usize,
}

/// Numbers that a lane read: consecutive columns from each of these on, all to be multiplied by the scale, if
/// any.
pub(super) struct Part<'k> {
    pub(super) runs: Vec<(I<'k>, Vec<F<'k>>)>,
    pub(super) scale: Option<F<'k>>,
}

/// Codes that a lane read: their words, the place in the row of bytes that they multiply, and their group.
pub(super) struct Codes<'k> {
    pub(super) words: Vec<(I<'k>, I<'k>)>,
    pub(super) group: I<'k>,
    pub(super) scale: F<'k>,
    /// Whether this part is the first of its group.
    pub(super) first: I<'k>,
}

impl Part<'_> {
    /// Codes become the numbers that they encode, rounded to bf16.
    pub(super) fn round(&mut self) {
        let Some(scale) = self.scale.take() else { return };
        for x in self.runs.iter_mut().flat_map(|(_, run)| run) {
            *x = (*x * scale).to_bf16().shl(16).as_float();
        }
    }
}

/// Whether rows by themselves come in that format. Scales of two levels have no kernels here.
pub(super) const fn by_rows(format: Format) -> bool {
    (format.holds_rows() || format.spreads_codes()) && !format.has_fine_scales()
}

/// Bytes of a row of `cols` numbers that a lane reads at once: the alignment of rows, or 0 if that is less
/// than a word. Of codes that are spread it reads a group, word by word.
fn bytes_at_once(format: Format, cols: usize) -> usize {
    let bytes = format.row_bytes(cols);
    if format.spreads_codes() {
        return if bytes.is_multiple_of(4) { format.block_bytes() } else { 0 };
    }
    [WIDE, 8, 4].into_iter().find(|b| bytes.is_multiple_of(*b)).unwrap_or(0)
}

/// Numbers in this many bytes.
const fn numbers(format: Format, bytes: usize) -> usize {
    match (format, format.coding()) {
        (Format::F32, _) => bytes / 4,
        (_, None) => bytes / 2,
        (_, Some(Coding::Bytes)) => bytes,
        (_, Some(Coding::Nibbles)) => bytes * 2,
        (_, Some(Coding::Planes | Coding::Patterns)) => bytes * 8 / format.spec().bits,
    }
}

impl<'k> WeightRow<'k> {
    /// Row `row` of the matrix at `weight`.
    pub(super) fn new(k: &'k Kb<'k>, weight: P<'k>, row: I<'k>, format: Format, cols: usize) -> Self {
        Self { k, at: weight.bytes(row * format.row_bytes(cols)), format, cols }
    }

    /// Number of leading columns that are read in whole [`Part`]s; the rest are read one by one.
    pub(super) fn whole(&self) -> usize {
        let once = numbers(self.format, bytes_at_once(self.format, self.cols));
        // Codes of a group are read by several parts.
        let unit = if self.format.is_grouped() && once > 0 { GROUP } else { once };
        self.cols.checked_div(unit).map_or(0, |units| units * unit)
    }

    /// Number of parts in these columns.
    pub(super) fn parts(&self) -> usize {
        let once = numbers(self.format, bytes_at_once(self.format, self.cols));
        self.whole().checked_div(once).unwrap_or(0)
    }

    /// Words of part `part`.
    fn words(&self, part: I<'k>) -> Vec<I<'k>> {
        let bytes = bytes_at_once(self.format, self.cols);
        let first = self.at.bytes(part * bytes);
        if self.format.spreads_codes() {
            return (0..bytes / 4).flat_map(|word| first.words(word).load_words(1)).collect();
        }
        first.load_words(bytes / 4)
    }

    fn scale(&self, group: I<'k>) -> F<'k> {
        if self.format.is_by_patterns() {
            return e5m3(self.format, self.beside(group));
        }
        half(self.scales().bytes(group * 2), self.format.scales())
    }

    fn scales(&self) -> P<'k> {
        self.at.bytes(self.cols.div_ceil(GROUP) * self.format.block_bytes())
    }

    /// The scale of a group of patterns as it is stored, with what is beside it.
    fn beside(&self, group: I<'k>) -> I<'k> {
        let bytes = self.format.scale_bytes();
        let at = self.scales().bytes(group.div(self.k.i((self.format.group() / GROUP) as i64)) * bytes);
        if bytes == 1 { at.load_byte() } else { at.load_half() }
    }

    /// The codes of a quad of a group of patterns.
    fn quad(&self, group: I<'k>, words: &[I<'k>], quad: usize) -> I<'k> {
        from_patterns(self.format, quad, [words[0], words[1]], &|| self.beside(group), 0)
    }

    /// Group of a part of codes, and the byte of the part in its group.
    fn group(&self, part: I<'k>) -> (I<'k>, I<'k>) {
        if self.format.spreads_codes() {
            return (part, self.k.i(0));
        }
        let (bytes, of_group) = (bytes_at_once(self.format, self.cols), self.format.block_bytes());
        let at = part * bytes;
        (at.div(self.k.i(of_group as i64)), at & (of_group - 1))
    }

    /// Part `part` as numbers.
    pub(super) fn part(&self, part: I<'k>) -> Part<'k> {
        let words = self.words(part);
        let count = numbers(self.format, words.len() * 4);
        let halves = |kind| words.iter().flat_map(|w| w.unpack(kind)).collect();
        let plain = |values| Part { runs: vec![(part * count, values)], scale: None };
        match (self.format.coding(), self.format) {
            (None, Format::Bf16) => plain(halves(HalfType::Bf16)),
            (None, Format::F16) => plain(halves(HalfType::F16)),
            (None, _) => plain(words.iter().map(|w| w.as_float()).collect()),
            (Some(Coding::Bytes), _) => {
                let codes = words.iter().flat_map(|w| (0..4).map(|i| w.signed_byte(i).to_float()));
                let scale = Some(self.scale(self.group(part).0));
                Part { runs: vec![(part * count, codes.collect())], scale }
            }
            (Some(Coding::Planes), format) => {
                let quad = |quad: usize| from_planes(format, quad, &|word| words[word], 0);
                let codes =
                    (0..QUADS).map(quad).flat_map(|w| (0..4).map(move |i| w.signed_byte(i).to_float()));
                Part { runs: vec![(part * count, codes.collect())], scale: Some(self.scale(part)) }
            }
            (Some(Coding::Patterns), _) => {
                let quad = |quad: usize| self.quad(part, &words, quad);
                let codes =
                    (0..QUADS).map(quad).flat_map(|w| (0..4).map(move |i| w.signed_byte(i).to_float()));
                Part { runs: vec![(part * count, codes.collect())], scale: Some(self.scale(part)) }
            }
            (Some(Coding::Nibbles), format) => {
                let (group, byte) = self.group(part);
                let first = group * GROUP + byte;
                let codes = |upper: bool| words.iter().flat_map(|&w| nibbles(w, upper, format)).collect();
                let runs = vec![(first, codes(false)), (first + GROUP / 2, codes(true))];
                Part { runs, scale: Some(self.scale(group)) }
            }
        }
    }

    /// Part `part` as codes: signed, of plain nibbles the code plus 8.
    pub(super) fn codes(&self, part: I<'k>) -> Codes<'k> {
        let (group, byte) = self.group(part);
        let read = self.words(part);
        let (kind, grid) = (self.format.coding(), self.format.grid());
        let of = |upper: bool| {
            let first = byte + if upper { GROUP / 2 } else { 0 };
            let codes = move |w: I<'k>| {
                let nibbles = (if upper { w.logical_shr(4) } else { w }) & 0x0f0f_0f0f;
                if grid.is_empty() { nibbles } else { nibbles.codes_at(grid, 0) }
            };
            read.iter().enumerate().map(move |(i, &w)| (first + 4 * i, codes(w)))
        };
        let words = match kind {
            Some(Coding::Bytes) => read.iter().enumerate().map(|(i, &w)| (byte + 4 * i, w)).collect(),
            Some(Coding::Planes) => {
                let quad = |quad: usize| from_planes(self.format, quad, &|word| read[word], 0);
                (0..QUADS).map(|i| (byte + 4 * i, quad(i))).collect()
            }
            Some(Coding::Patterns) => {
                (0..QUADS).map(|i| (byte + 4 * i, self.quad(group, &read, i))).collect()
            }
            _ => of(false).chain(of(true)).collect(),
        };
        Codes { words, group, scale: self.scale(group), first: byte.equals(self.k.i(0)) }
    }

    /// The row, `n` bytes on.
    pub(super) fn bytes(&self, n: I<'k>) -> P<'k> {
        self.at.bytes(n)
    }

    /// Group `group` of codes, as 16 words of two bf16: each number after rounding to bf16.
    pub(super) fn group_as_bf16(&self, group: I<'k>) -> Vec<I<'k>> {
        let parts = self.format.block_bytes() / bytes_at_once(self.format, self.cols).max(1);
        let scale = self.scale(group);
        // Runs of all parts, the lower half of the group first.
        let mut halves = [Vec::new(), Vec::new()];
        for part in 0..parts {
            let runs = self.part(group * parts + part).runs;
            for (half, (_, run)) in halves.iter_mut().zip(runs) {
                half.extend(run);
            }
        }
        let numbers: Vec<F<'k>> = halves.into_iter().flatten().map(|code| code * scale).collect();
        numbers.chunks_exact(2).map(|pair| pair[0].both_halves(pair[1])).collect()
    }

    /// Sixteen numbers of f16 from column `16 · step` on, as 16 words of two bf16. The first is the number
    /// rounded to bf16; the second is the remainder, which bf16 holds exactly, since 11 digits are 8 and 3.
    pub(super) fn sixteen_as_two_bf16(&self, step: I<'k>) -> Vec<I<'k>> {
        let words = (0..2).flat_map(|half| self.at.bytes(step * 32 + 16 * half).load_words(4));
        let pairs: Vec<[F<'k>; 2]> = words.map(|w| w.unpack(HalfType::F16)).collect();
        let rounded: Vec<I<'k>> = pairs.iter().map(|[a, b]| a.both_halves(*b)).collect();
        let remainders = pairs.iter().zip(&rounded).map(|([a, b], w)| {
            let [lower, upper] = w.unpack(HalfType::Bf16);
            (*a - lower).both_halves(*b - upper)
        });
        let remainders: Vec<I<'k>> = remainders.collect();
        rounded.into_iter().chain(remainders).collect()
    }

    /// The number of column `c`.
    pub(super) fn one(&self, c: I<'k>) -> F<'k> {
        let k = self.k;
        let group = || c.div(k.i(GROUP as i64));
        match (self.format.coding(), self.format) {
            (None, Format::F32) => self.at.words(c).load(),
            (None, format) => half(self.at.bytes(c * 2), format),
            (Some(Coding::Bytes), _) => {
                self.at.bytes(c).load_byte().signed_byte(0).to_float() * self.scale(group())
            }
            (Some(Coding::Planes), format) => self.one_of_planes(format, c) * self.scale(group()),
            (Some(Coding::Patterns), _) => self.one_of_patterns(c) * self.scale(group()),
            (Some(Coding::Nibbles), format) => {
                let within = c & (GROUP - 1);
                let upper = within.ge(k.i(GROUP as i64 / 2));
                let byte = self.at.bytes(group() * (GROUP / 2) + (within & (GROUP / 2 - 1))).load_byte();
                let nibble = upper.pick_int(byte.logical_shr(4), byte & 15);
                let code = if is_nibbles(format) {
                    nibble - 8_usize
                } else {
                    nibble.codes_at(format.grid(), 0).signed_byte(0)
                };
                code.to_float() * self.scale(group())
            }
        }
    }

    /// The code of column `c` in quads by patterns.
    fn one_of_patterns(&self, c: I<'k>) -> F<'k> {
        let k = self.k;
        let group = c.div(k.i(GROUP as i64));
        let block = self.at.bytes(group * self.format.block_bytes());
        // Rows may begin at any byte.
        let word = |at: usize| {
            let bytes = (0..4).map(|i| block.bytes(4 * at + i).load_byte().shl(8 * i as i64));
            bytes.fold(k.i32(0), |all, byte| all | byte)
        };
        let words = [word(0), word(1)];
        let (quad, byte) = ((c & (GROUP - 1)).logical_shr(2), c & 3);
        let codes = (0..QUADS).fold(k.i32(0), |found, i| {
            quad.equals(k.i(i as i64)).pick_int(self.quad(group, &words, i), found)
        });
        let code = (0..4)
            .fold(k.i32(0), |found, i| byte.equals(k.i(i as i64)).pick_int(codes.signed_byte(i), found));
        code.to_float()
    }

    /// The code of column `c` in planes, read byte by byte.
    fn one_of_planes(&self, format: Format, c: I<'k>) -> F<'k> {
        let (k, spec) = (self.k, format.spec());
        let (quad, byte) = ((c & (GROUP - 1)).logical_shr(2), c & 3);
        let group = self.at.bytes(c.div(k.i(GROUP as i64)) * format.block_bytes());
        let mut index = k.i32(0);
        for plane in FormatCodes::planes(spec.bits) {
            let word = (quad & (plane.width - 1)) + plane.first;
            let packed = group.bytes(word * 4 + byte).load_byte();
            // Later quads of a word have their bits higher up.
            let offset = quad & (QUADS - plane.width);
            let bits = (0..QUADS).step_by(plane.width).fold(packed, |bits, at| {
                offset.equals(k.i(at as i64)).pick_int(packed.logical_shr(at as i64), bits)
            });
            index = index | (bits & ((1 << plane.width) - 1)).shl(plane.shift as i64);
        }
        let code = match spec.codes {
            Some(codes) if codes.grid.is_empty() => index + k.i32(i32::from(codes.lowest)),
            Some(codes) => index.codes_at(codes.grid, 0).signed_byte(0),
            None => index,
        };
        code.to_float()
    }
}

/// One number of bf16 or f16.
fn half(at: P<'_>, format: Format) -> F<'_> {
    let bits = at.load_half();
    if format == Format::F16 { bits.f16() } else { bits.shl(16).as_float() }
}

/// The lower or the upper nibbles of four bytes as codes.
fn nibbles(w: I<'_>, upper: bool, format: Format) -> [F<'_>; 4] {
    let first = if upper { 4 } else { 0 };
    if is_nibbles(format) {
        return std::array::from_fn(|i| ((w.logical_shr(8 * i as i64 + first) & 15) - 8_usize).to_float());
    }
    if format.grid() != E2M1 {
        let codes = (w.logical_shr(first) & 0x0f0f_0f0f).codes_at(format.grid(), 0);
        return std::array::from_fn(|i| codes.signed_byte(i).to_float());
    }
    // Sign, exponent and mantissa are read as f16, whose exponents begin 14 lower; a code is twice its
    // number.
    let pair = |at: i64| {
        let bits = w.logical_shr(at + first);
        let number = (bits & 0x0007_0007).shl(9) | (bits & 0x0008_0008).shl(12);
        number.unpack(HalfType::F16).map(|x| x * 32_768.0)
    };
    let ([a, c], [b, d]) = (pair(0), pair(8));
    [a, b, c, d]
}

/// Floats of one access to a row whose first float is at a multiple of `aligned` floats.
pub(super) fn floats_at_once(aligned: usize) -> usize {
    widest(4, aligned)
}
