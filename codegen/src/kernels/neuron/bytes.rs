//! Parts of codes times rows of bytes: a vector of codes at a time, whose sums of products are scaled lane by
//! lane.
//!
//! A row comes as `Quantise` writes it, group by group. Before it is multiplied by neurons it is written to
//! scratch, in the order in which their codes are read from memory. Each vector has the initial values of its
//! sums and the scales of its lanes. So a vector of codes takes one instruction for each of load, dot
//! product, conversion, scale and sum.

use super::super::quantise::{CORRECTION, ROW_GROUP, SCALE};
use super::numbers::Row;
use crate::dsl::{F, I, Kb, LINE, P};
use crate::machine::{ByteDot, Isa};
use moec_ir::types::{Coding, Format, GROUP};

/// Chains of sums that take turns.
const CHAINS: usize = 4;

/// Order in which codes of a format are read from memory on a machine.
#[derive(Clone, Copy)]
pub(super) struct Steps {
    format: Format,
    lanes: usize,
    /// Groups whose codes are read together.
    groups: usize,
    /// Vectors of codes that these are.
    vectors: usize,
    /// Number of times that this is done in a row.
    count: usize,
}

impl Steps {
    /// `None` if the row is not a whole number of steps, or the machine does not multiply bytes.
    pub(super) fn new(isa: &Isa, format: Format, hidden: usize) -> Option<Self> {
        let lanes = isa.lanes;
        if !format.is_grouped() || !format.holds_neurons() {
            return None;
        }
        // Two codes of four bits share a byte.
        let halves = match format.coding()? {
            Coding::Bytes => 1,
            Coding::Nibbles => 2,
            Coding::Planes | Coding::Patterns => return None,
        };
        let group = format.block_bytes();
        let groups = (4 * lanes).div_ceil(group);
        let vectors = groups * group / (4 * lanes) * halves;
        let all = hidden.div_ceil(GROUP);
        let fits = isa.bytes != ByteDot::None && all.is_multiple_of(groups);
        fits.then_some(Self { format, lanes, groups, vectors, count: all / groups })
    }

    /// Bytes of a row in scratch.
    pub(super) const fn row_bytes(self) -> usize {
        self.count * self.step_bytes()
    }

    /// Codes, then what sums begin with, then scales.
    const fn step_bytes(self) -> usize {
        (self.vectors + 2) * self.vector_bytes()
    }

    const fn vector_bytes(self) -> usize {
        4 * self.lanes
    }

    /// Bytes of weights of a step.
    const fn code_bytes(self) -> usize {
        self.groups * self.format.block_bytes()
    }

    /// Writes a row to scratch.
    pub(super) fn arrange<'k>(self, k: &'k Kb<'k>, x: P<'k>, to: P<'k>) {
        let quarter = GROUP / 4;
        k.each(0, self.count, 1, |step| {
            let (from, to) = (x.bytes(step * (self.groups * ROW_GROUP)), to.bytes(step * self.step_bytes()));
            let group = |g: usize| from.bytes(g * ROW_GROUP);
            for g in 0..self.groups {
                for word in 0..quarter {
                    // The upper halves of groups of nibbles come after all lower ones.
                    let at = match self.format.coding() {
                        Some(Coding::Nibbles) => {
                            word / (quarter / 2) * self.lanes + g * (quarter / 2) + word % (quarter / 2)
                        }
                        _ => g * quarter + word,
                    };
                    to.words(at).store_int(group(g).words(word).load_word());
                }
            }
            let starts = to.bytes(self.vectors * self.vector_bytes());
            starts.store_int(k.i32v(0));
            for g in 0..self.groups {
                if let Some(start) = self.start(k, group(g).bytes(CORRECTION).load_word()) {
                    starts.words(self.first_lane(g)).store_int(start);
                }
            }
            let scales = self.by_lane(|g| group(g).bytes(SCALE).load());
            starts.bytes(self.vector_bytes()).store(scales);
        });
    }

    /// Initial sums of a group, as a multiple of `−128 · Σ x`: nibbles are stored plus 8, and instructions of
    /// VNNI take all codes plus 128.
    fn start<'k>(self, k: &Kb<'k>, correction: I<'k>) -> Option<I<'k>> {
        match self.format.coding() {
            Some(Coding::Nibbles) => Some(correction.shr(4)),
            _ => (k.isa.bytes == ByteDot::Vnni).then_some(correction),
        }
    }

    const fn first_lane(self, group: usize) -> usize {
        group * self.lanes / self.groups
    }

    /// A vector that has numbers of groups in their lanes.
    fn by_lane<'k>(self, of: impl Fn(usize) -> F<'k>) -> F<'k> {
        (1..self.groups).fold(of(0).splat(), |sum, g| {
            let order: Vec<usize> =
                (0..self.lanes).map(|l| if l < self.first_lane(g) { l } else { self.lanes + l }).collect();
            sum.shuffle(of(g).splat(), &order)
        })
    }

    /// Vectors of codes, as [`Kb::dot_bytes`] wants them.
    fn codes<'k>(self, k: &'k Kb<'k>, from: P<'k>) -> Vec<I<'k>> {
        let load = |v: usize| from.bytes(v * self.vector_bytes()).load_ints();
        match self.format.coding() {
            Some(Coding::Nibbles) => {
                vec![load(0) & 0x0f0f_0f0f, load(0).shr(4) & 0x0f0f_0f0f]
            }
            _ if k.isa.bytes == ByteDot::Vnni => (0..self.vectors).map(|v| load(v) ^ 0x8080_8080).collect(),
            _ => (0..self.vectors).map(load).collect(),
        }
    }

    /// The sum of products of a part and a row in scratch. Lines this many bytes further are prefetched
    /// meanwhile.
    pub(super) fn dot<'k>(self, k: &'k Kb<'k>, part: &Row<'k>, x: P<'k>, ahead: Option<usize>) -> F<'k> {
        let (row, codes) = (part.at, self.count * self.code_bytes());
        let scales = part.scales.unwrap_or_else(|| row.bytes(codes));
        if let Some(ahead) = ahead {
            let lines = (0..self.count * self.groups * 2).step_by(LINE);
            lines.for_each(|line| row.beyond(codes + ahead + line).prefetch());
        }
        let step = |at: I<'k>, scales: F<'k>, sum: F<'k>| {
            let (from, x) = (row.bytes(at * self.code_bytes()), x.bytes(at * self.step_bytes()));
            if let Some(ahead) = ahead {
                (0..self.code_bytes()).step_by(LINE).for_each(|line| from.beyond(ahead + line).prefetch());
            }
            let after = x.bytes(self.vectors * self.vector_bytes());
            let found = self.codes(k, from).into_iter().enumerate().fold(after.load_ints(), |sum, (v, w)| {
                k.dot_bytes(sum, w, x.bytes(v * self.vector_bytes()).load_ints())
            });
            let by = after.bytes(self.vector_bytes()).load_vec(crate::dsl::Span::Full);
            (scales * by).fma(found.to_float(), sum)
        };
        // A vector of scales serves this many steps.
        let turn = self.lanes / self.groups;
        let whole = self.count / turn * turn;
        let mut sums = vec![k.fv(0.0); CHAINS.min(turn)];
        if whole > 0 {
            sums = k.fold(0, whole, turn, &sums, |first, sums| {
                let mut sums = sums.to_vec();
                let chains = sums.len();
                let all = scales.halves(first * self.groups).load_halves().shl(16).as_float();
                for s in 0..turn {
                    let order: Vec<usize> =
                        (0..self.lanes).map(|l| s * self.groups + l * self.groups / self.lanes).collect();
                    let sum = &mut sums[s % chains];
                    *sum = step(first + s, all.shuffle(all, &order), *sum);
                }
                sums
            });
        }
        for at in whole..self.count {
            let own = self.by_lane(|g| scales.halves(at * self.groups + g).load_bf16());
            let chain = at % sums.len();
            sums[chain] = step(k.i(at as i64), own, sums[chain]);
        }
        sums.iter().skip(1).fold(sums[0], |total, &sum| total + sum).sum()
    }
}
