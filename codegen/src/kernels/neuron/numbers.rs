//! Numbers of a bundle's parts, a group of thirty-two at a time, whatever their format: times rows of f32,
//! and added to them.

use crate::dsl::{F, I, Kb, LINE, P};
use moec_ir::types::{Coding, Format, GROUP};

/// Chains of sums that take turns: as many as hide the latency of a multiply-add.
const CHAINS: usize = 4;

/// Coding of the numbers of a part.
#[derive(Clone, Copy)]
enum Code {
    /// Each by itself.
    Plain(Format),
    /// A byte each, without scales.
    Bytes,
    /// A byte each, and a scale for every group.
    Q8,
    /// Half a byte each, and a scale for every group.
    Q4,
}

/// A part of a bundle.
#[derive(Clone, Copy)]
pub(super) struct Row<'k> {
    k: &'k Kb<'k>,
    code: Code,
    /// Numbers.
    hidden: usize,
    pub(super) at: P<'k>,
    /// Its scales, where they do not follow its codes.
    pub(super) scales: Option<P<'k>>,
}

/// Thirty-two numbers: vectors, and what they are to be multiplied by.
pub(super) struct Numbers<'k> {
    pub(super) vectors: Vec<F<'k>>,
    pub(super) scale: Option<F<'k>>,
}

impl<'k> Row<'k> {
    /// A part of a neuron.
    pub(super) fn part(k: &'k Kb<'k>, format: Format, hidden: usize, at: P<'k>) -> Self {
        let code = match format.coding() {
            None => Code::Plain(format),
            Some(Coding::Bytes) => Code::Q8,
            // Neurons are stored in no other format, `holds_neurons`.
            Some(Coding::Nibbles | Coding::Planes | Coding::Patterns) => Code::Q4,
        };
        Self { k, code, hidden, at, scales: None }
    }

    /// The same with its scales elsewhere.
    pub(super) fn with_scales(self, scales: P<'k>) -> Self {
        Self { scales: Some(scales), ..self }
    }

    /// The codes of a gate bound.
    pub(super) fn codes(k: &'k Kb<'k>, hidden: usize, at: P<'k>) -> Self {
        Self { k, code: Code::Bytes, hidden, at, scales: None }
    }

    /// Bytes of the codes of a group.
    pub(super) fn group_bytes(&self) -> usize {
        match self.code {
            Code::Plain(format) => format.bytes(GROUP),
            Code::Bytes | Code::Q8 => GROUP,
            Code::Q4 => GROUP / 2,
        }
    }

    /// Place of the scale of a group.
    fn scale_at(&self, group: I<'k>) -> Option<P<'k>> {
        let after = || self.at.bytes(self.hidden.div_ceil(GROUP) * self.group_bytes());
        let has = matches!(self.code, Code::Q8 | Code::Q4);
        has.then(|| self.scales.unwrap_or_else(after).bytes(group * 2))
    }

    /// The numbers of a group. What pads the last one is 0.
    pub(super) fn numbers(&self, group: I<'k>) -> Numbers<'k> {
        let lanes = self.k.lanes();
        let vector = |c: usize| self.vector(group, self.k.i(c as i64), c >= GROUP / 2);
        let scale = self.scale_at(group).map(P::load_bf16);
        Numbers { vectors: (0..GROUP).step_by(lanes).map(vector).collect(), scale }
    }

    /// A vector of a group's codes from column `c` on; `upper`: of its second half.
    fn vector(&self, group: I<'k>, c: I<'k>, upper: bool) -> F<'k> {
        let from = self.at.bytes(group * self.group_bytes());
        match self.code {
            Code::Plain(format) => from.elements(c, format).load_weights(format, crate::dsl::Span::Full),
            Code::Bytes | Code::Q8 => from.bytes(c).load_codes().to_float(),
            Code::Q4 if upper => {
                (from.bytes(c).bytes(self.k.i(-(GROUP as i64 / 2))).load_bytes().shr(4) - 8).to_float()
            }
            Code::Q4 => ((from.bytes(c).load_bytes() & 15) - 8).to_float(),
        }
    }

    /// A vector of numbers, from a column that need not begin a group: `columns` are whole vectors.
    pub(super) fn numbers_at(&self, column: I<'k>) -> F<'k> {
        let k = self.k;
        let (group, c) = (column.div(k.i(GROUP as i64)), column.rem(k.i(GROUP as i64)));
        let codes = match self.code {
            Code::Q4 => {
                let upper = c.ge(k.i(GROUP as i64 / 2));
                let at = upper.pick_int(c - GROUP / 2, c);
                let bytes = self.at.bytes(group * self.group_bytes()).bytes(at).load_bytes();
                (upper.pick_int(bytes.shr(4), bytes & 15) - 8).to_float()
            }
            _ => self.vector(group, c, false),
        };
        self.scale_at(group).map_or(codes, |at| codes * at.load_bf16().splat())
    }

    /// A vector of pairs of bf16 of a group, from the pair `first` on, as words.
    pub(super) fn pairs(&self, group: I<'k>, first: usize) -> F<'k> {
        self.at.bytes(group * self.group_bytes()).words(first).load_ints().as_float()
    }

    /// A vector of bf16 from a column on, each in the low half of a word.
    pub(super) fn halves_at(&self, column: I<'k>) -> I<'k> {
        self.at.halves(column).load_halves()
    }

    /// Prefetches the line of a column, which need not be there, in a cache that holds many rows' lines.
    pub(super) fn fetch_column(&self, column: I<'k>) {
        let group = column.div(self.k.i(GROUP as i64));
        let within = column.rem(self.k.i(GROUP as i64)) * self.group_bytes();
        let within = within.div(self.k.i(GROUP as i64));
        self.at.bytes(group * self.group_bytes() + within).prefetch_far();
    }

    /// Prefetches the lines of a group.
    pub(super) fn fetch(&self, group: I<'k>) {
        let from = self.at.bytes(group * self.group_bytes());
        (0..self.group_bytes()).step_by(LINE).for_each(|line| from.beyond(line).prefetch());
    }

    /// `sums + by · numbers`, of a group.
    pub(super) fn add(&self, by: F<'k>, group: I<'k>, sums: &[F<'k>]) -> Vec<F<'k>> {
        let numbers = self.numbers(group);
        let by = numbers.scale.map_or(by, |scale| scale * by).splat();
        sums.iter().zip(numbers.vectors).map(|(&sum, w)| by.fma(w, sum)).collect()
    }
}

/// The sum of products of a part and a row of f32. Lines this many bytes further are prefetched meanwhile.
pub(super) fn dot<'k>(k: &'k Kb<'k>, row: &Row<'k>, x: P<'k>, ahead: Option<usize>) -> F<'k> {
    let per_group = GROUP / k.lanes();
    // Scales take one chain for a group.
    let scaled = matches!(row.code, Code::Q8 | Code::Q4);
    let chains = if scaled { 1 } else { per_group };
    let unroll = (CHAINS / chains).max(1);
    let step = |group: I<'k>, sums: &mut [F<'k>], count: usize| {
        let Numbers { vectors, scale } = row.numbers(group);
        let x =
            |v: usize| x.words(group * GROUP).words(v * k.lanes()).load_vec(k.span(count - v * k.lanes()));
        let pairs = vectors.into_iter().enumerate().filter(|(v, _)| v * k.lanes() < count);
        match scale {
            Some(scale) => {
                let sum = pairs.fold(k.fv(0.0), |sum, (v, w)| w.fma(x(v), sum));
                sums[0] = sum.fma(scale.splat(), sums[0]);
            }
            None => pairs.for_each(|(v, w)| sums[v] = w.fma(x(v), sums[v])),
        }
    };
    let groups = row.hidden / GROUP;
    let whole = groups / unroll * unroll;
    let mut sums = vec![k.fv(0.0); unroll * chains];
    if whole > 0 {
        sums = k.fold(0, whole, unroll, &sums, |group, sums| {
            let mut sums = sums.to_vec();
            if let Some(ahead) = ahead {
                let from = row.at.bytes(group * row.group_bytes()).beyond(ahead);
                (0..unroll * row.group_bytes()).step_by(LINE).for_each(|line| from.beyond(line).prefetch());
            }
            for (u, sums) in sums.chunks_mut(chains).enumerate() {
                step(group + u, sums, GROUP);
            }
            sums
        });
    }
    for (u, group) in (whole..groups).enumerate() {
        step(k.i(group as i64), &mut sums[u * chains..][..chains], GROUP);
    }
    let rest = row.hidden % GROUP;
    if rest > 0 {
        step(k.i(groups as i64), &mut sums[(groups - whole) * chains % (unroll * chains)..][..chains], rest);
    }
    let total = sums.iter().skip(1).fold(sums[0], |total, &sum| total + sum);
    total.sum()
}

/// The norm of a row, or a little more: what sums may have lost is added.
pub(super) fn norm<'k>(k: &'k Kb<'k>, x: P<'k>, hidden: usize) -> F<'k> {
    let squares = k.fold_columns(
        hidden,
        CHAINS,
        k.fv(0.0),
        |sum, c, span| {
            let x = x.words(c).load_vec(span);
            x.fma(x, sum)
        },
        |a, b| a + b,
    );
    let slack = 1.0 + (hidden + GROUP) as f32 * f32::EPSILON;
    // The smallest squares are no numbers of f32 any more: their norm is less than what is added.
    (squares.sum() * slack + 1e-30).sqrt() * slack
}
