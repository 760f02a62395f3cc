//! From router logits to the experts of a token and their weights, as `RouterDesc` defines it: a warp for
//! every row. A lane holds the experts whose number by 32 leaves its own.

use super::GpuKernel;
use super::launch::{Extent, Launch};
use crate::dsl::{F, I, Kb, WARP};
use crate::spec::Router;
use moec_ir::op::{GroupScore, Groups, NO_EXPERT, Renorm, RouterDesc, Score, WeightFrom};

/// Most experts: numbers of a lane that stay in registers.
const MOST: usize = 512;

/// Words of shared memory: choices, of experts and of groups.
fn shared(d: &RouterDesc) -> usize {
    d.groups.map_or(0, |g| d.scores() + g.n)
}

impl GpuKernel for Router {
    fn launch(&self) -> Option<Launch> {
        let Self { desc, .. } = self;
        let grid = [Extent::rows(1), Extent::fixed(1), Extent::fixed(1)];
        let launch = Launch { grid, block: WARP as u32, shared: 4 * shared(desc) as u32 };
        (desc.scores() <= MOST && desc.groups.is_none_or(|g| g.n <= WARP)).then_some(launch)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let Self { desc: d, logits_ld } = self;
        let logits = k.arg(0);
        let bias = d.select_bias.then(|| k.arg(1));
        let at = 1 + usize::from(d.select_bias);
        let row = k.block_index(0);
        let (ids, weights) = (k.arg(at).words(row * d.k), k.arg(at + 1).words(row * d.k));
        let logits = logits.words(row * *logits_ld);
        let lanes = Lanes { k, count: d.scores() };
        let z = lanes.all(f32::NEG_INFINITY, |e| logits.words(e).load());
        let scores: Vec<F<'k>> = match d.score {
            Score::Softmax => lanes.softmax(&z),
            Score::Sigmoid => z.iter().map(|z| z.sigmoid()).collect(),
            Score::Identity => z.clone(),
        };
        let biases = bias.map(|b| lanes.all(0.0, |e| b.words(e).load()));
        let mut choice: Vec<F<'k>> = (0..scores.len())
            .map(|i| {
                let c = biases.as_ref().map_or(scores[i], |b| scores[i] + b[i]);
                // Numbers past the last expert are never chosen.
                lanes.is_present(i).pick(c, k.f(f32::NAN))
            })
            .collect();
        if let Some(groups) = d.groups {
            mask_groups(&lanes, d.scores(), groups, &mut choice);
        }
        let chosen: Vec<I<'k>> = (0..d.k).map(|_| lanes.take_best(&mut choice)).collect();
        let from = if d.weight_from == WeightFrom::Score { &scores } else { &z };
        let picked: Vec<F<'k>> = chosen.iter().map(|&e| lanes.of(from, e)).collect();
        let picked = normalise(k, d, weigh(&lanes, d, &z, &chosen, picked));
        // Everything is in all lanes: the first one writes.
        k.when(k.lane_index().equals(k.i(0)), || {
            for (j, (&id, &w)) in chosen.iter().zip(&picked).enumerate() {
                ids.words(j).store_int(id.narrow());
                weights.words(j).store(w);
            }
        });
    }
}

/// One lane's numbers of experts, in order; past the last expert they are absent.
struct Lanes<'k> {
    k: &'k Kb<'k>,
    count: usize,
}

impl<'k> Lanes<'k> {
    fn per_lane(&self) -> usize {
        self.count.div_ceil(WARP)
    }

    /// Number of the expert at a lane's place `i`.
    fn id(&self, i: usize) -> I<'k> {
        self.k.lane_index() + i * WARP
    }

    fn is_present(&self, i: usize) -> I<'k> {
        self.id(i).lt(self.k.i(self.count as i64))
    }

    /// Value that `read` gives of each expert, `otherwise` past the last.
    fn all(&self, otherwise: f32, read: impl Fn(I<'k>) -> F<'k>) -> Vec<F<'k>> {
        let last = self.k.i(self.count as i64 - 1);
        let one = |i: usize| self.is_present(i).pick(read(self.id(i).min(last)), self.k.f(otherwise));
        (0..self.per_lane()).map(one).collect()
    }

    /// Largest of all.
    fn max(&self, x: &[F<'k>]) -> F<'k> {
        x.iter().fold(self.k.f(f32::NEG_INFINITY), |m, &x| m.max(x)).warp_max(WARP)
    }

    /// Softmax of numbers that are −∞ past the last.
    fn softmax(&self, x: &[F<'k>]) -> Vec<F<'k>> {
        let max = self.max(x);
        let e: Vec<_> = x.iter().map(|&x| (x - max).exp()).collect();
        let there = (0..e.len()).map(|i| self.is_present(i).pick(e[i], self.k.f(0.0)));
        let sum = there.fold(self.k.f(0.0), |sum, e| sum + e).warp_sum(WARP);
        e.into_iter().map(|e| e / sum).collect()
    }

    /// The largest, the lowest of equals, which becomes NaN: NaN is never taken. Where nothing else is left
    /// it is [`NO_EXPERT`].
    fn take_best(&self, x: &mut [F<'k>]) -> I<'k> {
        let (k, max) = (self.k, self.max(x));
        let none = k.i32(NO_EXPERT);
        let first = (0..x.len())
            .fold(none, |first, i| x[i].equals(max).pick_int(self.id(i).narrow(), none).min(first));
        let best = first.warp_min(WARP).wide();
        for (i, x) in x.iter_mut().enumerate() {
            *x = self.id(i).equals(best).pick(k.f(f32::NAN), *x);
        }
        best
    }

    /// The number of an expert, in all lanes; 0 of [`NO_EXPERT`].
    fn of(&self, x: &[F<'k>], id: I<'k>) -> F<'k> {
        let own = |i: usize| self.id(i).equals(id).pick_int(x[i].bits(), self.k.i32(0));
        let bits = (0..x.len()).fold(self.k.i32(0), |all, i| all | own(i));
        // One lane has it, the others zero.
        bits.warp_sum(WARP).as_float()
    }
}

/// Masks the experts outside of the best groups. Lane `g` scores group `g`. Where a score is NaN it stays so.
fn mask_groups<'k>(lanes: &Lanes<'k>, experts: usize, g: Groups, choice: &mut [F<'k>]) {
    let (k, size) = (lanes.k, experts / g.n);
    let held = |e: I<'k>| k.shared(e * 4);
    for (i, &c) in choice.iter().enumerate() {
        k.when(lanes.is_present(i), || held(lanes.id(i)).store(c));
    }
    k.barrier();
    let groups = Lanes { k, count: g.n };
    let low = k.f(f32::NEG_INFINITY);
    let own = k.lane_index().min(k.i(g.n as i64 - 1)) * size;
    let best = k.fold(0, size, 1, &[low, low], |i, best| {
        let x = held(own + i).load();
        let loser = best[0].max(x).equals(best[0]).pick(x, best[0]);
        vec![best[0].max(x), best[1].max(loser)]
    });
    let score = match g.score {
        GroupScore::Top2Sum if size > 1 => best[0] + best[1],
        GroupScore::Top2Sum | GroupScore::Max => best[0],
    };
    let mut scores = vec![groups.is_present(0).pick(score, k.f(f32::NAN))];
    for _ in 0..g.keep {
        groups.take_best(&mut scores);
    }
    // A kept group was taken: its score is NaN.
    k.when(groups.is_present(0), || k.shared(k.lane_index() * 4 + 4 * experts).store(scores[0]));
    k.barrier();
    let masked = k.f(if g.mask_neg_inf { f32::NEG_INFINITY } else { 0.0 });
    for (i, c) in choice.iter_mut().enumerate() {
        let group = lanes.id(i).min(k.i(experts as i64 - 1)).div(k.i(size as i64));
        let score = k.shared(group * 4 + 4 * experts).load();
        *c = score.equals(score).and(c.equals(*c)).pick(masked, *c);
    }
}

/// Turns the chosen scores into weights.
fn weigh<'k>(
    lanes: &Lanes<'k>,
    d: &RouterDesc,
    z: &[F<'k>],
    chosen: &[I<'k>],
    picked: Vec<F<'k>>,
) -> Vec<F<'k>> {
    let k = lanes.k;
    match d.weight_from {
        WeightFrom::Score => picked,
        WeightFrom::SoftmaxTopk => {
            let max = picked.iter().fold(k.f(f32::NEG_INFINITY), |m, &x| m.max(x));
            let e: Vec<_> = picked.iter().map(|&x| (x - max).exp()).collect();
            let sum = e.iter().fold(k.f(0.0), |sum, &e| sum + e);
            e.into_iter().map(|e| e / sum).collect()
        }
        WeightFrom::SigmoidTopk => picked.into_iter().map(F::sigmoid).collect(),
        WeightFrom::SparseMixer { eps } => {
            let removed = |j: usize| j.checked_sub(1).map(|before| chosen[before]);
            picked.iter().enumerate().map(|(j, &max)| sparse_mixer(lanes, z, max, removed(j), eps)).collect()
        }
    }
}

/// The softmax of the logit `max` over the experts near it, without the one removed.
fn sparse_mixer<'k>(lanes: &Lanes<'k>, z: &[F<'k>], max: F<'k>, removed: Option<I<'k>>, eps: f32) -> F<'k> {
    let k = lanes.k;
    let near = |i: usize| {
        let x = z[i];
        // Zero by zero is NaN, which is not far.
        let far = ((max - x) / x.abs().max(max)).gt(k.f(2.0 * eps));
        let e = far.pick(k.f(0.0), (x - max).exp());
        let e = removed.map_or(e, |r| lanes.id(i).equals(r).pick(k.f(0.0), e));
        lanes.is_present(i).pick(e, k.f(0.0))
    };
    let own = (0..z.len()).map(near).fold(k.f(0.0), |sum, e| sum + e);
    k.f(1.0) / own.warp_sum(WARP)
}

fn normalise<'k>(k: &'k Kb<'k>, d: &RouterDesc, picked: Vec<F<'k>>) -> Vec<F<'k>> {
    let sum = || picked.iter().fold(k.f(0.0), |sum, &w| sum + w);
    let divisor = match d.renorm {
        Renorm::None => None,
        Renorm::Sum { eps } => Some(sum() + eps),
        Renorm::Clamp { min } => Some(sum().at_least(min)),
    };
    picked.iter().map(|&w| divisor.map_or(w, |d| w / d) * d.scale).collect()
}
