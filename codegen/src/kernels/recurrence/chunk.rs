//! The gated delta rule for several rows of one sequence at once, by products of matrices (Yang, Wang, Zhang,
//! Shen and Kim, *Parallelizing Linear Transformers with the Delta Rule over Sequence Length*; Yang, Kautz
//! and Hatamizadeh, *Gated Delta Networks*, section 3.3).
//!
//! Let `S` be the state before the rows, `a_i` the decay of row `i`, and `Γ_ij = a_i · … · a_(j+1)` that from
//! row `j` to row `i`. A row changes the state by `k_i d_iᵀ`, and with `Γ_i = a_i · … · a_0`
//!
//! * `d_i = β_i (v_i − (k_i ⊙ Γ_i)ᵀ S) − Σ_(j<i) A_ij d_j`, where `A_ij = β_i k_iᵀ (k_j ⊙ Γ_ij)`: forward
//!   substitution;
//! * `y_i = (q_i ⊙ Γ_i)ᵀ S + Σ_(j≤i) P_ij d_j`, where `P_ij = q_iᵀ (k_j ⊙ Γ_ij)`;
//! * the state becomes `Γ_last ⊙ S + Σ_j (k_j ⊙ Γ_last,j) d_jᵀ`.
//!
//! Decays are products of factors, never quotients: nothing overflows that does not overflow row by row, and
//! a factor of 0 or NaN reaches only the rows after it. Sums over rows are written out, so that no row is
//! combined with numbers of a later one.
//!
//! A chunk is short: the changes of a panel of columns stay in registers from the substitution on. Take `C`
//! rows and states of 128 × 128. Every row costs `3 · 128²` multiply-adds with the state and `128² / C`
//! multiplications for its decay. It also costs `4 · 128 · C / 2` multiply-adds for `A`, `P` and their
//! products. The total is least for `C` of 8. A longer chunk would read the state less often, but arithmetic
//! hides these reads.

use super::delta::{Decay, DeltaRule, Panel, VECTORS, columns};
use crate::dsl::{F, I, Kb, LINE, P, Span};
use crate::machine::Isa;

/// Rows of the state that a product takes in turn. Keys have an even number of channels.
const UNROLL: usize = 2;

/// Rows of a chunk: 8 where there are 32 vector registers, 4 where there are 16. The changes of a panel take
/// half of them.
pub(super) fn rows(isa: &Isa) -> usize {
    (isa.mr / 4 * 4).min(8)
}

/// Rows of the state that are changed together, to hide the latency of additions.
fn together(isa: &Isa, key: usize) -> usize {
    if rows(isa) == 8 && key.is_multiple_of(4) { 4 } else { 2 }
}

/// Words into the scratch of what a chunk keeps there.
#[derive(Clone, Copy, Default)]
pub(super) struct Scratch {
    /// `k_i ⊙ Γ_i`, rows [`Scratch::ld`] apart.
    keys: usize,
    /// `q_i ⊙ Γ_i`, likewise.
    queries: usize,
    /// `k_j ⊙ Γ_last,j`, likewise.
    rest: usize,
    /// `Γ_last` of each channel, where these have decays of their own; else `a_i`.
    decay: usize,
    /// `A`, row-major.
    corrections: usize,
    /// `P`, row-major.
    shares: usize,
    /// Contribution of the state before the rows to the outputs of a panel.
    outputs: usize,
    /// Words from row to row.
    ld: usize,
    /// Words of all.
    pub(super) words: usize,
}

impl Scratch {
    pub(super) fn new(isa: &Isa, key: usize) -> Self {
        let (rows, ld) = (rows(isa), key.next_multiple_of(isa.lanes));
        let mut s = Self { ld, ..Self::default() };
        let mut take = |words: usize| {
            let at = s.words;
            s.words += words.next_multiple_of(isa.lanes);
            at
        };
        (s.keys, s.queries, s.rest) = (take(rows * ld), take(rows * ld), take(rows * ld));
        s.decay = take(ld.max(rows.next_multiple_of(isa.lanes)));
        (s.corrections, s.shares) = (take(rows * rows), take(rows * rows));
        s.outputs = take(rows * columns(isa));
        s
    }
}

/// A chunk of a head.
pub(super) struct Chunk<'a, 'k> {
    pub(super) rule: &'a DeltaRule,
    pub(super) k: &'k Kb<'k>,
    /// Its first row.
    pub(super) first: I<'k>,
    pub(super) head: I<'k>,
    /// The head's state.
    pub(super) state: P<'k>,
}

impl<'k> Chunk<'_, 'k> {
    fn rows(&self) -> usize {
        rows(&self.k.isa)
    }

    fn scratch(&self) -> Scratch {
        Scratch::new(&self.k.isa, self.rule.key)
    }

    /// Address `words` into the scratch.
    fn at(&self, words: usize) -> P<'k> {
        self.k.scratch().words(words)
    }

    /// Row `i` of operand `arg`.
    fn row(&self, arg: usize, i: usize) -> P<'k> {
        self.k.arg(arg).words((self.first + i) * self.rule.ld[arg - 1])
    }

    /// All of it, for a range of panels.
    pub(super) fn compute(&self, [from, end]: [I<'k>; 2]) {
        let decay = self.prepare();
        self.k.each(from, end, 1, |panel| self.panel(panel, decay));
    }

    /// Writes the values that the head's panels share to scratch; gives the decay of the state.
    fn prepare(&self) -> Decay<'k> {
        let (k, s, rule, rows) = (self.k, self.scratch(), self.rule, self.rows());
        let of_key = self.head.div(k.i((rule.heads / rule.key_heads.max(1)) as i64)) * rule.key;
        self.fetch();
        if !rule.by_channel {
            // All at once: each is in a cache line of its own.
            let factors = self.at(s.decay);
            for i in 0..rows {
                factors.words(i).store(self.row(4, i).words(self.head).load());
            }
            k.columns(rows, |c, span| {
                factors.words(c).store_vec(factors.words(c).load_vec(span).exp(), span);
            });
        }
        // From row `j` to the row that is reached, and from before the first; of one decay for all channels.
        let (mut factors, mut all) = (Vec::<F<'k>>::new(), k.f(1.0));
        for i in 0..rows {
            let (query, keys) = (self.row(1, i).words(of_key), self.row(2, i).words(of_key));
            let decay = self.row(4, i).words(self.head * rule.key);
            if !rule.by_channel {
                let factor = self.at(s.decay).words(i).load();
                for f in &mut factors {
                    *f = *f * factor;
                }
                factors.push(k.f(1.0));
                all = all * factor;
            }
            // Of `A` the sums with earlier rows, then of `P` those and its own.
            let zeros = vec![k.fv(0.0); 2 * i + 1];
            let sums = self.channels(&zeros, |c, span, sums| {
                let (key, query) = (keys.words(c).load_vec(span), query.words(c).load_vec(span));
                let rest = |j: usize| self.at(s.rest + j * s.ld).words(c);
                let all = if rule.by_channel {
                    let factor = decay.words(c).load_vec(span).exp();
                    for j in 0..i {
                        rest(j).store(rest(j).load_vec(Span::Full) * factor);
                    }
                    let total = self.at(s.decay).words(c);
                    let all = if i == 0 { factor } else { total.load_vec(Span::Full) * factor };
                    total.store(all);
                    all
                } else {
                    all.splat()
                };
                if rule.corrects {
                    self.at(s.keys + i * s.ld).words(c).store(key * all);
                }
                self.at(s.queries + i * s.ld).words(c).store(query * all);
                let mut next = sums.to_vec();
                for j in 0..i {
                    let before = rest(j).load_vec(Span::Full);
                    if rule.corrects {
                        next[j] = key.fma(before, sums[j]);
                    }
                    next[i + j] = query.fma(before, sums[i + j]);
                }
                next[2 * i] = query.fma(key, sums[2 * i]);
                rest(i).store(key);
                next
            });
            let beta = self.row(5, i).words(self.head).load();
            let factor = |j: usize, sum: F<'k>| factors.get(j).map_or(sum, |&f| sum * f);
            for j in 0..=i {
                if j < i && rule.corrects {
                    let sum = factor(j, sums[j].sum());
                    self.at(s.corrections + i * rows + j).store(-(sum * beta));
                }
                self.at(s.shares + i * rows + j).store(factor(j, sums[i + j].sum()));
            }
        }
        if rule.by_channel {
            return Decay::Channels(self.at(s.decay));
        }
        for (j, factor) in factors.into_iter().enumerate().take(rows - 1) {
            self.channels(&[], |c, _, _| {
                let rest = self.at(s.rest + j * s.ld).words(c);
                rest.store(rest.load_vec(Span::Full) * factor.splat());
                Vec::new()
            });
        }
        Decay::Head(all.splat())
    }

    /// Prefetches values and results of the rows, which the panels need later.
    fn fetch(&self) {
        let (k, rule) = (self.k, self.rule);
        let column = self.head * rule.value;
        for i in 0..self.rows() {
            let values = self.row(3, i).words(column);
            let out = k.arg(8).words((self.first + i) * rule.out_ld + column);
            for line in (0..rule.value * 4).step_by(LINE) {
                values.beyond(line).prefetch();
                out.beyond(line).prefetch_to_write();
            }
        }
    }

    /// Folds the channels of a key by vectors: `body(first channel, channels that are there, values)`.
    fn channels(&self, init: &[F<'k>], body: impl Fn(I<'k>, Span<'k>, &[F<'k>]) -> Vec<F<'k>>) -> Vec<F<'k>> {
        let (k, key) = (self.k, self.rule.key);
        let whole = key / k.lanes() * k.lanes();
        let mut values = init.to_vec();
        if whole > 0 {
            values = k.fold(0, whole, k.lanes(), &values, |c, values| body(c, Span::Full, values));
        }
        if key > whole {
            values = body(k.i(whole as i64), k.span(key - whole), &values);
        }
        values
    }

    /// A panel of the head's state.
    fn panel(&self, panel: I<'k>, decay: Decay<'k>) {
        let (k, s, rule, rows) = (self.k, self.scratch(), self.rule, self.rows());
        let (lanes, width) = (k.lanes(), columns(&k.isa));
        let state = Panel { k, at: self.state.words(panel * (width * rule.key)), width, key: rule.key };
        let first = panel * width;
        let column = self.head * rule.value + first;
        let span = |v: usize| k.span_before(k.i(rule.value as i64) - first - v * lanes);
        let output = |i: usize, v: usize| self.at(s.outputs + i * width + v * lanes);
        for (i, sums) in self.product(state, s.queries).into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                output(i, v).store(sum);
            }
        }
        let retrieved = rule.corrects.then(|| self.product(state, s.keys));
        // Number `at` of a row, in every lane.
        let number = |at: usize| self.at(at).load().splat();
        let mut changes: Vec<[F<'k>; VECTORS]> = Vec::new();
        for i in 0..rows {
            let values = self.row(3, i).words(column);
            let beta = self.row(5, i).words(self.head).load().splat();
            let mut change: [F<'k>; VECTORS] = std::array::from_fn(|v| {
                let x = values.words(v * lanes).load_vec(span(v));
                retrieved.as_ref().map_or(x, |retrieved| x - retrieved[i][v]) * beta
            });
            if rule.corrects {
                for (j, before) in changes.iter().enumerate() {
                    let by = number(s.corrections + i * rows + j);
                    change = std::array::from_fn(|v| by.fma(before[v], change[v]));
                }
            }
            changes.push(change);
        }
        for i in 0..rows {
            let mut sums: [F<'k>; VECTORS] = std::array::from_fn(|v| output(i, v).load_vec(Span::Full));
            for (j, change) in changes.iter().enumerate().take(i + 1) {
                let by = number(s.shares + i * rows + j);
                sums = std::array::from_fn(|v| by.fma(change[v], sums[v]));
            }
            let out = k.arg(8).words((self.first + i) * rule.out_ld + column);
            for (v, sum) in sums.into_iter().enumerate() {
                out.words(v * lanes).store_vec(sum, span(v));
            }
        }
        let together = together(&k.isa, rule.key);
        k.each(0, rule.key, together, |c| {
            let mut new: Vec<F<'k>> = (0..together * VECTORS)
                .map(|at| decay.of(state.row(c + at / VECTORS, at % VECTORS), c + at / VECTORS))
                .collect();
            for (j, change) in changes.iter().enumerate() {
                let keys = self.at(s.rest + j * s.ld).words(c);
                for (at, new) in new.iter_mut().enumerate() {
                    *new = keys.words(at / VECTORS).load().splat().fma(change[at % VECTORS], *new);
                }
            }
            for (at, new) in new.into_iter().enumerate() {
                state.address(c + at / VECTORS, at % VECTORS).store(new);
            }
        });
    }

    /// Every row of `left`, words into the scratch, times a panel of the state.
    fn product(&self, state: Panel<'k>, left: usize) -> Vec<[F<'k>; VECTORS]> {
        let (k, s, rows) = (self.k, self.scratch(), self.rows());
        let zeros = vec![k.fv(0.0); rows * VECTORS];
        let sums = k.fold(0, self.rule.key, UNROLL, &zeros, |c, sums| {
            let mut sums = sums.to_vec();
            for u in 0..UNROLL {
                let part: [F<'k>; VECTORS] = std::array::from_fn(|v| state.row(c + u, v));
                for (i, sums) in sums.chunks_exact_mut(VECTORS).enumerate() {
                    let x = self.at(left + i * s.ld).words(c).words(u).load().splat();
                    for (sum, part) in sums.iter_mut().zip(part) {
                        *sum = x.fma(part, *sum);
                    }
                }
            }
            sums
        });
        sums.chunks_exact(VECTORS).map(|row| std::array::from_fn(|v| row[v])).collect()
    }
}
