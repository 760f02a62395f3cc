//! Panels from bundles, for many rows: neuron by neuron storage brought to the order that matrix kernels
//! multiply.
//!
//! A panel is written to scratch once for all rows that are multiplied by it, as panels of grouped formats
//! are ([`super::super::unpack`]). Gate and up are transposed, `lanes` neurons at a time; of down a strip of
//! columns is taken unchanged.

use super::NeuronAddresses;
use super::numbers::Row;
use crate::dsl::{F, I, Kb, P};
use moec_ir::bundle::Part;
use moec_ir::types::{Format, GROUP};

/// Writes panel `p` of gate and up to `to`, in `format`, f32 or bf16: whole groups of channels. Columns past
/// the last neuron are that one again.
pub(crate) fn gate_up<'k>(
    k: &'k Kb<'k>,
    addresses: &NeuronAddresses<'k>,
    inter: usize,
    to: P<'k>,
    p: I<'k>,
    format: Format,
) {
    let (nr, lanes, bundle) = (k.isa.nr, k.lanes(), addresses.bundle);
    let last = k.i(inter as i64 - 1);
    for (half, part) in [Part::Gate, Part::Up].into_iter().enumerate() {
        let rows: Vec<Row<'k>> = (0..lanes).map(|i| addresses.row(part, (p * lanes + i).min(last))).collect();
        let to = to.words(half * lanes);
        k.each(0, bundle.hidden.div_ceil(GROUP), 1, |group| {
            if (bundle.format, format) == (Format::Bf16, Format::Bf16) {
                for first in (0..GROUP / 2).step_by(lanes) {
                    let pairs: Vec<F<'k>> = rows.iter().map(|r| r.pairs(group, first)).collect();
                    for (i, pair) in F::transpose(&pairs).into_iter().enumerate() {
                        to.words(group * (GROUP / 2 * nr)).words((first + i) * nr).store(pair);
                    }
                }
                return;
            }
            let numbers: Vec<_> = rows.iter().map(|r| r.numbers(group)).collect();
            for v in 0..GROUP / lanes {
                let of = |n: &super::numbers::Numbers<'k>| {
                    n.scale.map_or(n.vectors[v], |scale| n.vectors[v] * scale.splat())
                };
                let channels = F::transpose(&numbers.iter().map(of).collect::<Vec<_>>());
                for (i, pair) in channels.chunks_exact(2).enumerate() {
                    let c = v * lanes + 2 * i;
                    if format == Format::Bf16 {
                        let to = to.words(group * (GROUP / 2 * nr)).words(c / 2 * nr);
                        to.store_int(pair[0].pair_bf16(pair[1]));
                    } else {
                        let to = to.words(group * (GROUP * nr));
                        (0..2).for_each(|j| to.words((c + j) * nr).store(pair[j]));
                    }
                }
            }
        });
    }
}

/// Writes panel `p` of down to `to`, in `format`, f32 or bf16.
pub(crate) fn down<'k>(
    k: &'k Kb<'k>,
    addresses: &NeuronAddresses<'k>,
    inter: usize,
    to: P<'k>,
    p: I<'k>,
    format: Format,
) {
    let (nr, lanes, bundle) = (k.isa.nr, k.lanes(), addresses.bundle);
    let row = |i: I<'k>| addresses.row(Part::Down, i);
    let columns = [0, lanes].map(|c| p * nr + c);
    if format == Format::F32 {
        k.each(0, inter, 1, |i| {
            let row = row(i);
            row.fetch_column(p * nr + nr);
            for (half, c) in columns.into_iter().enumerate() {
                to.words(i * nr).words(half * lanes).store(row.numbers_at(c));
            }
        });
        return;
    }
    let pair = |i: I<'k>, rows: &[Row<'k>]| {
        for (half, c) in columns.into_iter().enumerate() {
            let to = to.words(i * nr).words(half * lanes);
            to.store_int(match (bundle.format, rows) {
                (Format::Bf16, &[a, b]) => a.halves_at(c) | b.halves_at(c).shl(16),
                (_, &[a, b]) => a.numbers_at(c).pair_bf16(b.numbers_at(c)),
                (_, rows) => rows.first().map_or(k.fv(0.0), |r| r.numbers_at(c)).pair_bf16(k.fv(0.0)),
            });
        }
    };
    k.each(0, inter / 2, 1, |i| {
        let rows = [row(i * 2), row(i * 2 + 1)];
        for r in &rows {
            r.fetch_column(p * nr + nr);
        }
        pair(i, &rows);
    });
    if inter % 2 == 1 {
        let i = k.i(inter as i64 / 2);
        pair(i, &[row(i * 2)]);
    }
}
