//! From router logits to the experts of a token and their weights, as `RouterDesc` defines it.

use super::softmax::exponentials;
use super::{GpuKernel, Kernel, ROWS, Rule};
use crate::dsl::{F, I, Kb, P, Span};
use crate::machine::Isa;
use crate::spec::Symbol;
use moec_ir::op::{GroupScore, Groups, NO_EXPERT, Renorm, RouterDesc, Score, WeightFrom};
use moec_ir::plan::Results;

/// Scratch of one row, in words. Arrays are padded to whole vectors.
struct Scratch {
    experts: usize,
    groups: usize,
    k: usize,
}

impl Scratch {
    fn of(desc: &RouterDesc, isa: &Isa) -> Self {
        let pad = |n: usize| n.next_multiple_of(isa.lanes);
        Self { experts: pad(desc.scores()), groups: pad(desc.groups.map_or(0, |g| g.n)), k: pad(desc.k) }
    }
}

/// `[logits, select_bias? f32 [E], ids out i32 [T, k], weights out f32 [T, k]]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    /// The routing.
    pub desc: RouterDesc,
    /// Row distance of the logits.
    pub logits_ld: usize,
}

impl Kernel for Router {
    fn kind(&self) -> &'static str {
        "router"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        let desc = &self.desc;
        s.word("router").num("e", desc.scores()).num("k", desc.k);
        s.word(match desc.score {
            Score::Softmax => "softmax",
            Score::Sigmoid => "sigmoid",
            Score::Identity => "identity",
        });
        s.flag("bias", desc.select_bias);
        if let Some(g) = &desc.groups {
            s.num("groups", g.n).num("keep", g.keep);
            s.word(match g.score {
                GroupScore::Max => "max",
                GroupScore::Top2Sum => "top2sum",
            });
            s.flag("inf", g.mask_neg_inf);
        }
        match desc.weight_from {
            WeightFrom::Score => s.word("from_score"),
            WeightFrom::SoftmaxTopk => s.word("from_softmax"),
            WeightFrom::SigmoidTopk => s.word("from_sigmoid"),
            WeightFrom::SparseMixer { eps } => s.word("from_mixer").float("eps", eps),
        };
        match desc.renorm {
            Renorm::None => &mut *s,
            Renorm::Sum { eps } => s.float("sum", eps),
            Renorm::Clamp { min } => s.float("clamp", min),
        };
        s.float("s", desc.scale).num("z", self.logits_ld);
    }

    fn args(&self) -> usize {
        3 + usize::from(self.desc.select_bias)
    }

    fn results(&self) -> Results {
        Results::last(2, self.args())
    }

    fn scratch_bytes(&self, isa: &Isa) -> usize {
        let s = Scratch::of(&self.desc, isa);
        (3 * s.experts + s.groups + s.k) * 4
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        let Self { desc, logits_ld } = self;
        let groups =
            desc.groups.unwrap_or(Groups { n: 1, keep: 1, score: GroupScore::Max, mask_neg_inf: true });
        vec![
            (desc.k > 0 && desc.k <= desc.scores(), "more experts per token than experts"),
            (*logits_ld >= desc.scores(), "rows overlap"),
            (groups.n > 0 && desc.scores().is_multiple_of(groups.n.max(1)), "experts that fill no group"),
            (groups.keep > 0 && groups.keep <= groups.n, "more groups kept than there are"),
            (
                !matches!(desc.weight_from, WeightFrom::SparseMixer { .. }) || desc.k <= 2,
                "SparseMixer chooses two at most",
            ),
        ]
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let Self { desc, logits_ld } = self;
        let s = Scratch::of(desc, &k.isa);
        let logits = k.arg(0);
        let select_bias = desc.select_bias.then(|| k.arg(1));
        let at = 1 + usize::from(desc.select_bias);
        let (ids, weights) = (k.arg(at), k.arg(at + 1));
        let z = k.scratch();
        let scores = z.words(s.experts);
        let choice = scores.words(s.experts);
        let group_scores = choice.words(s.experts);
        let picked = group_scores.words(s.groups);
        k.rows(ROWS, |row| {
            let logits = logits.words(row * *logits_ld);
            k.columns(desc.scores(), |c, span| {
                z.words(c).store(logits.words(c).load_vec(span).within(span, f32::NEG_INFINITY));
            });
            score(k, desc, z, scores);
            k.columns(desc.scores(), |c, span| {
                let x = scores.words(c).load_vec(Span::Full);
                let x = select_bias.map_or(x, |b| x + b.words(c).load_vec(span));
                // Padding is never chosen, as what was chosen is not chosen again.
                choice.words(c).store(x.within(span, f32::NAN));
            });
            if let Some(groups) = desc.groups {
                mask_groups(k, desc.scores(), groups, choice, group_scores, s.groups);
            }
            let out = weights.words(row * desc.k);
            let mut chosen: Vec<I<'k>> = Vec::with_capacity(desc.k);
            for j in 0..desc.k {
                let (id, expert) = take_best(k, choice, desc.scores());
                ids.words(row * desc.k).words(j).store_int(id);
                let from = if desc.weight_from == WeightFrom::Score { scores } else { z };
                picked.words(j).store(from.words(expert).load());
                chosen.push(expert);
            }
            weigh(k, desc, z, &chosen, picked);
            normalise(k, desc, picked, out);
        });
    }
}

/// Scores of all experts; zero in the padding, where that matters.
fn score<'k>(k: &'k Kb<'k>, d: &RouterDesc, z: P<'k>, scores: P<'k>) {
    let padded = d.scores().next_multiple_of(k.lanes());
    match d.score {
        Score::Softmax => {
            let sum = exponentials(k, z, scores, padded).splat();
            k.columns(padded, |c, _| scores.words(c).store(scores.words(c).load_vec(Span::Full) / sum));
        }
        Score::Sigmoid => {
            k.columns(padded, |c, _| scores.words(c).store(z.words(c).load_vec(Span::Full).sigmoid()));
        }
        Score::Identity => k.copy(z, scores, padded),
    }
}

/// Index of the largest of `count` numbers, the lowest of equals, which becomes NaN: NaN is never taken.
/// Where nothing else is left the index is [`NO_EXPERT`]. The second result is an index that is always in
/// range. The array is NaN up to a whole vector.
fn take_best<'k>(k: &'k Kb<'k>, x: P<'k>, count: usize) -> (I<'k>, I<'k>) {
    let padded = count.next_multiple_of(k.lanes());
    let larger = |m: F<'k>, c, _| m.max(x.words(c).load_vec(Span::Full));
    let max = k.fold_columns(padded, 1, k.fv(f32::NEG_INFINITY), larger, F::max).lanes_max().splat();
    let none = k.i32v(NO_EXPERT);
    let first = k.fold(0, padded, k.lanes(), &[none], |c, first| {
        let ids = k.lane_ids() + c.narrow().splat(k.lanes());
        vec![x.words(c).load_vec(Span::Full).equals(max).pick_int(ids, none).min(first[0])]
    });
    let id = first.first().map_or(k.i32(0), |f| f.lanes_min());
    let best = id.wide().min(k.i(count as i64 - 1));
    x.words(best).store(k.f(f32::NAN));
    (id, best)
}

/// Masks the experts outside of the best groups. Where a score is NaN it stays so: a mask makes no expert of
/// it.
fn mask_groups<'k>(
    k: &'k Kb<'k>,
    experts: usize,
    g: Groups,
    choice: P<'k>,
    group_scores: P<'k>,
    padded: usize,
) {
    let size = experts / g.n;
    k.columns(padded, |c, _| group_scores.words(c).store(k.fv(f32::NAN)));
    k.each(0, g.n, 1, |group| {
        let first = choice.words(group * size);
        let [best, second] = two_largest(k, first, size);
        let score = match g.score {
            GroupScore::Top2Sum if size > 1 => best + second,
            GroupScore::Top2Sum | GroupScore::Max => best,
        };
        group_scores.words(group).store(score);
    });
    for _ in 0..g.keep {
        take_best(k, group_scores, g.n);
    }
    let masked = k.fv(if g.mask_neg_inf { f32::NEG_INFINITY } else { 0.0 });
    k.each(0, g.n, 1, |group| {
        let score = group_scores.words(group).load();
        // A kept group was taken: its score is NaN.
        k.when(score.equals(score), || {
            let first = choice.words(group * size);
            k.columns(size, |c, span| {
                let x = first.words(c).load_vec(span);
                first.words(c).store_vec(x.equals(x).pick(masked, x), span);
            });
        });
    });
}

/// The two largest of `count` numbers; NaN counts as −∞.
fn two_largest<'k>(k: &'k Kb<'k>, x: P<'k>, count: usize) -> [F<'k>; 2] {
    let join = |a: [F<'k>; 2], b: [F<'k>; 2]| {
        let loser = a[0].max(b[0]).equals(a[0]).pick(b[0], a[0]);
        [a[0].max(b[0]), loser.max(a[1]).max(b[1])]
    };
    let low = k.fv(f32::NEG_INFINITY);
    let number = |x: F<'k>| x.equals(x).pick(x, low);
    let mut pair = [low, low];
    let whole = count / k.lanes() * k.lanes();
    if whole > 0 {
        let of_loop = k.fold(0, whole, k.lanes(), &pair, |c, pair| {
            join([pair[0], pair[1]], [number(x.words(c).load_vec(Span::Full)), low]).to_vec()
        });
        pair = [of_loop[0], of_loop[1]];
    }
    if count > whole {
        let span = k.span(count - whole);
        pair = join(pair, [number(x.words(whole).load_vec(span).within(span, f32::NEG_INFINITY)), low]);
    }
    while pair[0].width() > 1 {
        let ([a, b], [c, d]) = (pair[0].halves(), pair[1].halves());
        pair = join([a, c], [b, d]);
    }
    pair.map(|x| x.lane(0))
}

/// Turns what was picked into weights.
fn weigh<'k>(k: &'k Kb<'k>, d: &RouterDesc, z: P<'k>, chosen: &[I<'k>], picked: P<'k>) {
    match d.weight_from {
        WeightFrom::Score => {}
        WeightFrom::SoftmaxTopk => {
            let sum = exponentials(k, picked, picked, d.k).splat();
            k.columns(d.k, |c, _| picked.words(c).store(picked.words(c).load_vec(Span::Full) / sum));
        }
        WeightFrom::SigmoidTopk => {
            k.columns(d.k, |c, _| picked.words(c).store(picked.words(c).load_vec(Span::Full).sigmoid()));
        }
        WeightFrom::SparseMixer { eps } => {
            let mut removed = None;
            for (j, &expert) in chosen.iter().enumerate() {
                let weight = sparse_mixer(k, d.scores(), z, z.words(expert).load(), removed, eps);
                picked.words(j).store(weight);
                removed = Some(expert);
            }
        }
    }
}

/// The softmax of the logit `max` over the experts near it, without the one removed.
fn sparse_mixer<'k>(
    k: &'k Kb<'k>,
    experts: usize,
    z: P<'k>,
    max: F<'k>,
    removed: Option<I<'k>>,
    eps: f32,
) -> F<'k> {
    let max = max.splat();
    let near = |sum: F<'k>, c: I<'k>, span| {
        let x = z.words(c).load_vec(Span::Full);
        // Zero by zero is NaN, which is not far.
        let far = ((max - x) / x.abs().max(max)).gt(k.f(2.0 * eps));
        let e = far.pick(k.fv(0.0), (x - max).exp());
        let e = match removed {
            Some(expert) => {
                let ids = k.lane_ids() + c.narrow().splat(k.lanes());
                ids.equals(expert.narrow().splat(k.lanes())).pick(k.fv(0.0), e)
            }
            None => e,
        };
        sum + e.within(span, 0.0)
    };
    k.f(1.0) / k.fold_columns(experts, 1, k.fv(0.0), near, |a, b| a + b).sum()
}

fn normalise<'k>(k: &'k Kb<'k>, d: &RouterDesc, picked: P<'k>, out: P<'k>) {
    let add = |sum: F<'k>, c, span| sum + picked.words(c).load_vec(Span::Full).within(span, 0.0);
    let sum = || k.fold_columns(d.k, 1, k.fv(0.0), add, |a, b| a + b).sum();
    let divisor = match d.renorm {
        Renorm::None => None,
        Renorm::Sum { eps } => Some((sum() + eps).splat()),
        Renorm::Clamp { min } => Some(sum().at_least(min).splat()),
    };
    k.columns(d.k, |c, span| {
        let w = picked.words(c).load_vec(Span::Full);
        let w = divisor.map_or(w, |d| w / d);
        out.words(c).store_vec(w * d.scale, span);
    });
}
