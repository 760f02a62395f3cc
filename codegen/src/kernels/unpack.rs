//! Panels of codes: their codes, and the panel unpacked once into scratch as f32 or bf16 for all rows that
//! are multiplied by them.

use super::fine::Scales;
use super::outliers;
use super::panel::{Panel, fetch, group_bytes, is_nibbles};
use crate::dsl::{F, I, Kb, P, Span};
use crate::schedule::Schedule;
use crate::spec::ComputeType;
use inkwell::values::VectorValue;
use moec_ir::types::{Codes, Coding, E5M3, E5M3_UNIT, Format, GROUP, Plane};

/// Format of the unpacked panel.
pub(super) fn format(compute: ComputeType) -> Format {
    if compute == ComputeType::Bf16 { Format::Bf16 } else { Format::F32 }
}

/// Channels of the unpacked panel: whole groups.
pub(super) const fn depth(channels: usize) -> usize {
    channels.next_multiple_of(GROUP)
}

/// Writes the panel to the beginning of the scratch.
pub(super) fn unpack<'k>(k: &'k Kb<'k>, panel: &Panel<'k>) {
    let (nr, lanes) = (k.isa.nr, k.lanes());
    let Panel { weights: to, format, .. } = unpacked(k, panel);
    let bytes = group_bytes(panel.format, nr);
    let orders = if k.isa.permutes { pair_orders(k) } else { Vec::new() };
    k.each(0, panel.depth.div_ceil(GROUP), 1, |group| {
        let from = panel.weights.bytes(group * bytes);
        fetch(from, bytes, panel.schedule.ahead);
        let to = to.bytes(group * format.bytes(GROUP * nr));
        if format == Format::Bf16 && k.isa.permutes {
            return by_permutes(k, panel, group, from, to, &orders);
        }
        for half in 0..2 {
            let scales = scales(k, panel, group, from, half * lanes);
            let channels = |quad: usize, j: usize| {
                scales.number(quad, byte(codes(panel.format, from, nr, quad, half * lanes), j))
            };
            for quad in 0..GROUP / 4 {
                for pair in 0..2 {
                    let c = quad * 4 + pair * 2;
                    let values = [channels(quad, pair * 2), channels(quad, pair * 2 + 1)];
                    match format {
                        Format::Bf16 => {
                            to.words((c / 2) * nr + half * lanes).store_int(values[0].pair_bf16(values[1]));
                        }
                        _ => {
                            for (i, x) in values.into_iter().enumerate() {
                                to.words((c + i) * nr + half * lanes).store(x);
                            }
                        }
                    }
                }
            }
        }
    });
    outliers::unpack(k, panel, format, to);
}

/// A group to pairs of bf16, where one instruction moves any byte anywhere (AVX512-VBMI): every code goes to
/// the top of a word, in the order of the pairs, and is so 2²⁴ times itself; two vectors become one of bf16
/// as they stand. The same numbers as otherwise: what the scale is divided by is a power of two.
fn by_permutes<'k>(
    k: &'k Kb<'k>,
    panel: &Panel<'k>,
    group: I<'k>,
    from: P<'k>,
    to: P<'k>,
    orders: &[[VectorValue<'k>; 2]],
) {
    let (nr, lanes) = (k.isa.nr, k.lanes());
    for first in (0..nr).step_by(lanes) {
        let scales = scales(k, panel, group, from, first).of_multiples(k, (1 << 24) as f32);
        // Each column twice: of the lower half of the columns, of the upper half.
        let twice = |c: usize| (0..lanes).map(|i| c + i / 2).collect::<Vec<_>>();
        let doubled = |c: usize| scales.map(|x| x.shuffle(x, &twice(c)));
        let scales = [doubled(0), doubled(lanes / 2)];
        for quad in 0..GROUP / 4 {
            let codes = codes(panel.format, from, nr, quad, first);
            for (pair, orders) in orders.iter().enumerate() {
                let [lower, upper] =
                    [0, 1].map(|h| scales[h].number(quad, codes.bytes_to_top(orders[h]).to_float()));
                to.words((2 * quad + pair) * nr + first).store_int(lower.both_bf16(upper));
            }
        }
    }
}

/// Byte orders of a quad's two pairs of channels: the lower half of the columns and the upper half, as pairs.
fn pair_orders<'k>(k: &'k Kb<'k>) -> Vec<[VectorValue<'k>; 2]> {
    let lanes = k.lanes();
    let byte = |pair: usize, half: usize, i: usize| 4 * (half * lanes / 2 + i / 2) + 2 * pair + i % 2;
    let order = |pair, half| k.top_bytes(&(0..lanes).map(|i| byte(pair, half, i)).collect::<Vec<_>>());
    (0..2).map(|pair| [order(pair, 0), order(pair, 1)]).collect()
}

/// The panel that [`unpack`] writes.
pub(super) fn unpacked<'k>(k: &'k Kb<'k>, panel: &Panel<'k>) -> Panel<'k> {
    // Data that was just written need not be prefetched.
    let schedule = Schedule { ahead: 0, ..panel.schedule };
    Panel { weights: k.scratch(), format: format(panel.compute), schedule, outliers: None, ..*panel }
}

/// Scales of group `index`, from a column on, for codes as [`codes`] and [`high_nibbles`] give them.
pub(super) fn scales<'k>(
    k: &'k Kb<'k>,
    panel: &Panel<'k>,
    index: I<'k>,
    group: P<'k>,
    column: usize,
) -> Scales<'k> {
    let scales = Scales::new(k, panel, index, group, column);
    if is_nibbles(panel.format) { scales.of_multiples(k, 16.0) } else { scales }
}

/// A vector of the scales of a group, for codes as they are, where blocks have one each.
pub(super) fn plain_scale<'k>(
    k: &'k Kb<'k>,
    panel: &Panel<'k>,
    index: I<'k>,
    group: P<'k>,
    column: usize,
) -> F<'k> {
    if panel.format.is_by_channel() {
        return panel.channel_scales(k).words(column).load_vec(Span::Full);
    }
    let scales = panel.group_scales(k, index, group, column);
    if panel.format.is_by_patterns() {
        let one_byte = panel.format.scale_bytes() == 1;
        return e5m3(panel.format, if one_byte { scales.load_bytes() } else { scales.load_halves() });
    }
    scales.load_weights(panel.format.scales(), Span::Full)
}

/// Scales of [`E5M3`], in the last byte of what is stored for a group.
pub(crate) fn e5m3(format: Format, stored: I<'_>) -> F<'_> {
    let beside = 8 * (format.scale_bytes() - 1);
    let bits = if beside > 0 { stored & (0xff << beside) } else { stored };
    bits.shl(23 - i64::from(E5M3) - beside as i64).as_float() * E5M3_UNIT
}

/// Signed codes of one quad, four bytes a lane, for the columns from `column` on; of plain nibbles 16 times what they
/// are, which [`scales`] take out.
pub(super) fn codes(format: Format, group: P<'_>, nr: usize, quad: usize, column: usize) -> I<'_> {
    stored(format, group, nr, quad, column, 0)
}

/// The same as unsigned bytes: 128 more.
pub(super) fn flipped(format: Format, group: P<'_>, nr: usize, quad: usize, column: usize) -> I<'_> {
    stored(format, group, nr, quad, column, FLIPPED)
}

/// Offset from a signed byte to the unsigned one with the other top bit.
const FLIPPED: u8 = 0x80;

/// A number in each byte of a word.
const EACH: usize = 0x0101_0101;

/// As [`codes`]; `flipped` changes the top bit of each.
fn stored(format: Format, group: P<'_>, nr: usize, quad: usize, column: usize, flipped: u8) -> I<'_> {
    let word = |word: usize| group.words(word * nr + column).load_ints();
    match format.coding() {
        // In the upper nibble `16 · (code + 8)`: the sign bit of `16 · code`, flipped.
        Some(Coding::Nibbles) if is_nibbles(format) => {
            high_nibbles(group, nr, quad, column) ^ (usize::from(flipped ^ FLIPPED) * EACH)
        }
        Some(Coding::Nibbles) => from_grid(format, group, nr, quad, column, flipped),
        Some(Coding::Planes) => from_planes(format, quad, &word, flipped),
        Some(Coding::Patterns) => patterns(format, group, nr, quad, column, flipped),
        _ => word(quad) ^ (usize::from(flipped) * EACH),
    }
}

/// The codes of one quad plus `offset`, for a format of nibbles with a grid.
pub(super) fn from_grid(
    format: Format,
    group: P<'_>,
    nr: usize,
    quad: usize,
    column: usize,
    offset: u8,
) -> I<'_> {
    low_nibbles(group, nr, quad, column).codes_at(format.grid(), offset)
}

/// The signed codes of one quad of a format of planes, four bytes a lane, from the words of its group. With
/// `flipped`, 0x80, the top bit of each is the other one.
pub(crate) fn from_planes<'k>(
    format: Format,
    quad: usize,
    word_of: &dyn Fn(usize) -> I<'k>,
    flipped: u8,
) -> I<'k> {
    const TOP: usize = 0x80 * EACH;
    let spec = format.spec();
    let part = |plane: Plane| {
        let (word, bit_offset) = plane.of_quad(quad);
        let packed = word_of(word);
        // Shifted at once to where its bits belong in a code; what comes from other bytes is masked.
        let up = plane.shift as i64 - bit_offset as i64;
        let moved = match up {
            0 => packed,
            1.. => packed.shl(up),
            _ => packed.shr(-up),
        };
        moved & ((((1 << plane.width) - 1) << plane.shift) * EACH)
    };
    let bits = Codes::planes(spec.bits).map(part).reduce(|a, b| a | b);
    let (Some(bits), Some(codes)) = (bits, spec.codes) else { return word_of(0) };
    if !codes.grid.is_empty() {
        return bits.codes_at(codes.grid, flipped);
    }
    // Less the lowest code, byte by byte: a bit above each keeps borrows away, and is then the sign's inverse.
    let least = usize::from(codes.lowest.unsigned_abs());
    ((bits | TOP) - least * EACH) ^ (TOP ^ (usize::from(flipped) * EACH))
}

/// The codes of one quad of a format of patterns as [`from_patterns`] gives them, for the columns from `column`
/// on.
pub(super) fn patterns(
    format: Format,
    group: P<'_>,
    nr: usize,
    quad: usize,
    column: usize,
    flipped: u8,
) -> I<'_> {
    let words = [0, 1].map(|word| group.words(word * nr + column).load_ints());
    let beside = || group.words(2 * nr).bytes(2 * column).load_halves();
    from_patterns(format, quad, words, &beside, flipped)
}

/// The signed codes of one quad of a format of patterns, four bytes a lane, from the words of its group and
/// what is stored beside its scale. With `flipped`, 0x80, the top bit of each is the other one.
pub(crate) fn from_patterns<'k>(
    format: Format,
    quad: usize,
    [indices, signs]: [I<'k>; 2],
    beside: &dyn Fn() -> I<'k>,
    flipped: u8,
) -> I<'k> {
    let Some(codes) = format.spec().codes else { return indices };
    let mut index = indices.shr(4 * quad as i64);
    if codes.patterns.len() > 16 {
        let up = 4 - quad as i64;
        let fifth = if up < 0 { beside().shr(-up) } else { beside().shl(up) };
        index = (index & 15) | (fifth & 16);
    }
    let word = |pattern: &[u8; 4]| u32::from_le_bytes(pattern.map(|magnitude| magnitude ^ flipped));
    let words: Vec<u32> = codes.patterns.iter().map(word).collect();
    index.look_up(&words).negated_where(signs.shl(7 - quad as i64))
}

/// The nibbles of one quad, four bytes a lane.
pub(super) fn low_nibbles(group: P<'_>, nr: usize, quad: usize, column: usize) -> I<'_> {
    let packed = group.words(quad % 4 * nr + column).load_ints();
    (if quad < 4 { packed } else { packed.shr(4) }) & 0x0f0f_0f0f
}

/// `16 · (code + 8)` of one quad of q4, four bytes a lane.
pub(super) fn high_nibbles(group: P<'_>, nr: usize, quad: usize, column: usize) -> I<'_> {
    let packed = group.words(quad % 4 * nr + column).load_ints();
    let high = if quad < 4 { packed.shl(4) } else { packed };
    high & 0xf0f0_f0f0
}

/// Byte `j` of every lane, signed, as f32.
pub(super) fn byte(words: I<'_>, j: usize) -> F<'_> {
    let up = if j == 3 { words } else { words.shl(24 - 8 * j as i64) };
    up.shr(24).to_float()
}
