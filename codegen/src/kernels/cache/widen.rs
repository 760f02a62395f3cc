//! Blocks of a KV cache in the form of a weight panel, if they are stored in another form.

use super::{BLOCK, Values, codes};
use crate::dsl::{F, I, Kb, P, Span};
use crate::kernels::unpack;
use crate::machine::Isa;
use moec_ir::types::{Format, GROUP};

/// Two vectors of numbers that share words, in the format of a panel: f32 in two rows of it, or bf16 in one.
fn store_pair<'k>(k: &'k Kb<'k>, to: P<'k>, format: Format, pair: I<'k>, column: usize, both: [F<'k>; 2]) {
    let nr = k.isa.nr;
    if format == Format::F32 {
        let to = to.words(pair * (2 * nr)).words(column);
        to.store(both[0]);
        to.words(nr).store(both[1]);
    } else {
        to.words(pair * nr).words(column).store_int(both[0].pair_bf16(both[1]));
    }
}

/// Widens panels of keys in codes to panels of `format`: tokens `first .. end` of a block, multiples of `nr`.
pub(in crate::kernels) fn widen_keys<'k>(
    k: &'k Kb<'k>,
    [first, end]: [I<'k>; 2],
    dim: usize,
    (from, cached): (P<'k>, Format),
    to: P<'k>,
    format: Format,
) {
    let (nr, lanes) = (k.isa.nr, k.lanes());
    let groups = dim.div_ceil(GROUP);
    k.each(first, end, nr, |t| {
        let panel = t.div(k.i(nr as i64));
        let to = to.bytes(panel * wide_panel_bytes(&k.isa, format, dim));
        k.each(0, groups, 1, |g| {
            let from = from.bytes((panel * groups + g) * codes::panel_group_bytes(cached, nr));
            let to = to.bytes(g * format.bytes(GROUP * nr));
            for column in (0..nr).step_by(lanes) {
                let scale = codes::key_scale(from, cached, nr, column);
                if cached != Format::Q8 {
                    for quad in 0..GROUP / 4 {
                        let codes = unpack::codes(cached, from, nr, quad, column);
                        for pair in 0..2 {
                            let both = [0, 1].map(|i| unpack::byte(codes, 2 * pair + i) * scale);
                            store_pair(k, to, format, k.i((2 * quad + pair) as i64), column, both);
                        }
                    }
                    continue;
                }
                k.each(0, GROUP / 2, 1, |pair| {
                    let codes = from.bytes(pair * (2 * nr)).bytes(column);
                    let both = [0, nr].map(|row| codes.bytes(row).load_codes().to_float() * scale);
                    store_pair(k, to, format, pair, column, both);
                });
            }
        });
    });
}

/// Bytes of a panel of widened keys.
pub(in crate::kernels) fn wide_panel_bytes(isa: &Isa, format: Format, dim: usize) -> usize {
    format.bytes(dim.next_multiple_of(GROUP) * isa.nr)
}

/// Widens tokens `first .. end` of a block of values in codes, multiples of `nr`, to a block of `format`.
pub(in crate::kernels) fn widen_values<'k>(
    k: &'k Kb<'k>,
    [first, end]: [I<'k>; 2],
    dim: usize,
    (from, cached): (P<'k>, Format),
    to: P<'k>,
    format: Format,
) {
    let (nr, lanes) = (k.isa.nr, k.lanes());
    let values = Values::of(k, cached, dim, from);
    k.each(0, dim.div_ceil(nr), 1, |panel| {
        let panel_codes = values.panel(k, panel);
        let to = to.bytes(panel * format.bytes(nr * BLOCK));
        for column in (0..nr).step_by(lanes) {
            let group = (panel * nr + column).div(k.i(GROUP as i64));
            let scales = values.scales.halves(group * BLOCK);
            k.each(first.div(k.i(2)), end.div(k.i(2)), 1, |pair| {
                let both = [0, 1].map(|row| {
                    let scale = scales.halves(pair * 2).halves(row).load_bf16();
                    panel_codes.codes(k, pair * 2, row, column).to_float() * scale
                });
                store_pair(k, to, format, pair, column, both);
            });
        }
    });
}

/// Keys that are values too: their first `dim` channels, tokens `first .. end` (multiples of `nr`) of panels
/// of keys with `key_dim` channels and `panel_bytes` each, to a block of values of the same format.
pub(in crate::kernels) fn turn_keys<'k>(
    k: &'k Kb<'k>,
    [first, end]: [I<'k>; 2],
    [key_dim, dim]: [usize; 2],
    (from, panel_bytes): (P<'k>, usize),
    to: P<'k>,
    format: Format,
) {
    let (nr, lanes) = (k.isa.nr, k.lanes());
    k.each(first, end, nr, |t| {
        let from = from.bytes(t.div(k.i(nr as i64)) * panel_bytes);
        // As many channels as a vector has lanes; `there` of them are in the keys.
        let transpose_column = |c: I<'k>, count: usize| {
            let panel = to.bytes(c.div(k.i(nr as i64)) * format.bytes(nr * BLOCK));
            let to = panel.words(c.rem(k.i(nr as i64)));
            let store = |row: I<'k>, channels: &[F<'k>]| {
                for (i, x) in F::transpose(channels).into_iter().enumerate() {
                    to.words((row + i) * nr).store(x);
                }
            };
            if format == Format::F32 {
                for column in (0..nr).step_by(lanes) {
                    let row = |i: usize| {
                        if i < count {
                            from.words((c + i) * nr).words(column).load_vec(Span::Full)
                        } else {
                            k.fv(0.0)
                        }
                    };
                    store(t + column, &(0..lanes).map(row).collect::<Vec<_>>());
                }
            } else {
                let pair = |i: usize| {
                    if 2 * i < count {
                        split_pairs(from.words((c.div(k.i(2)) + i) * nr), lanes)
                    } else {
                        [k.fv(0.0); 2]
                    }
                };
                store(t.div(k.i(2)), &(0..lanes / 2).flat_map(pair).collect::<Vec<_>>());
            }
        };
        let whole = dim / lanes * lanes;
        k.each(0, whole, lanes, |c| transpose_column(c, lanes));
        if dim > whole {
            transpose_column(k.i(whole as i64), lanes.min(key_dim - whole));
        }
    });
}

/// Words of channel pairs, one for each token of a panel, as words of token pairs for either channel.
fn split_pairs(from: P<'_>, lanes: usize) -> [F<'_>; 2] {
    let [even, odd] = from.load_vec(Span::Full).unzip(from.words(lanes).load_vec(Span::Full));
    let (even, odd) = (even.bits(), odd.bits());
    [(even & 0xffff) | odd.shl(16), (even.shr(16) & 0xffff) | (odd & 0xffff_0000)].map(I::as_float)
}
