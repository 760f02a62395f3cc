//! Routing, as [`RouterDesc`] defines it.
//!
//! Scores are rounded to f32 before the choice is made on them, since two experts tie where their f32
//! scores do.

use super::math::{sigmoid, softmax};
use super::*;
use bincode::{Decode, Encode};
use std::cmp::Ordering;

words! {
    /// Function that turns router logits into scores.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub enum Score, "`softmax`, `sigmoid` or `identity`" {
        /// Softmax over all experts.
        Softmax = "softmax",
        /// Sigmoid of each logit.
        Sigmoid = "sigmoid",
        /// The logit itself.
        Identity = "identity",
    }
}

words! {
    /// Score of a group of experts.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum GroupScore, "`max` or `top2sum`" {
        /// The largest score in the group (DeepSeek-V2).
        Max = "max",
        /// The sum of the two largest (DeepSeek-V3).
        Top2Sum = "top2sum",
    }
}

words! {
    /// [`Groups::mask_neg_inf`], false and true.
    #[derive(Clone, Copy, PartialEq)]
    enum Mask, "`neg_inf` or `zero`" {
        Zero = "zero",
        NegInf = "neg_inf",
    }
}

/// Group-limited selection: of `n` groups only the best `keep` may be chosen from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Groups {
    /// Number of groups; divides the number of experts.
    pub n: usize,
    /// Groups kept.
    pub keep: usize,
    /// Score of a group.
    pub score: GroupScore,
    /// Score of an expert in a dropped group: −∞ if true, 0 if false.
    pub mask_neg_inf: bool,
}

impl Word for Groups {
    const EXPECTED: &'static str = "`groups(…)`";

    fn word(&self, w: &mut Writer) {
        let mask = if self.mask_neg_inf { Mask::NegInf } else { Mask::Zero };
        w.put("n", &self.n)
            .put("keep", &self.keep)
            .put("score", &self.score)
            .put("mask", &mask)
            .word("groups");
    }

    fn of(word: &str, r: &mut Reader<'_, '_>) -> Parsed<Option<Self>> {
        if word != "groups" {
            return Ok(None);
        }
        let (n, keep, score) = (r.get("n")?, r.get("keep")?, r.get("score")?);
        Ok(Some(Self { n, keep, score, mask_neg_inf: r.get::<Mask>("mask")? == Mask::NegInf }))
    }
}

/// Source of the routing weight of a selected expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightFrom {
    /// Its score, without the selection bias.
    Score,
    /// Softmax over the selected logits only.
    SoftmaxTopk,
    /// Sigmoid of its logit.
    SigmoidTopk,
    /// Phi-MoE's SparseMixer at inference; `k` is 2, or 1: the weight of the first does not depend on the
    /// second.
    SparseMixer {
        /// Jitter that decides which near ties share the weight.
        eps: f32,
    },
}

impl Word for WeightFrom {
    const EXPECTED: &'static str = "a source of weights";

    fn word(&self, w: &mut Writer) {
        match self {
            Self::Score => w.word("score"),
            Self::SoftmaxTopk => w.word("softmax_topk"),
            Self::SigmoidTopk => w.word("sigmoid_topk"),
            Self::SparseMixer { eps } => w.put("eps", eps).word("sparsemixer"),
        }
    }

    fn of(word: &str, r: &mut Reader<'_, '_>) -> Parsed<Option<Self>> {
        Ok(Some(match word {
            "score" => Self::Score,
            "softmax_topk" => Self::SoftmaxTopk,
            "sigmoid_topk" => Self::SigmoidTopk,
            "sparsemixer" => Self::SparseMixer { eps: r.get("eps")? },
            _ => return Ok(None),
        }))
    }
}

/// Normalisation of the weights of the selected experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Renorm {
    /// They stay as they are.
    None,
    /// Divided by their sum plus `eps`.
    Sum {
        /// Added to the sum.
        eps: f32,
    },
    /// Divided by their sum, which is at least `min`.
    Clamp {
        /// Smallest divisor.
        min: f32,
    },
}

impl Word for Renorm {
    const EXPECTED: &'static str = "`none`, `sum` or `clamp`";

    fn word(&self, w: &mut Writer) {
        match self {
            Self::None => w.word("none"),
            Self::Sum { eps } => w.put("eps", eps).word("sum"),
            Self::Clamp { min } => w.put("min", min).word("clamp"),
        }
    }

    fn of(word: &str, r: &mut Reader<'_, '_>) -> Parsed<Option<Self>> {
        Ok(Some(match word {
            "none" => Self::None,
            "sum" => Self::Sum { eps: r.get("eps")? },
            "clamp" => Self::Clamp { min: r.get("min")? },
            _ => return Ok(None),
        }))
    }
}

attributes! {
    /// Routing of every supported family, from logits to `k` experts with weights per token.
    ///
    /// 1. `s = score(z)`; the choice is made on `c = s + select_bias` (operand, if there).
    /// 2. With `groups`, experts outside of the kept groups are masked in `c`.
    /// 3. The `k` largest `c` are selected, the **lowest index wins ties**, slots in descending order of `c`.
    /// 4. Weights come from `weight_from`, are renormalised, then multiplied by `scale`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct RouterDesc {
        /// Number of experts.
        pub experts: usize,
        /// Zero-computation experts, numbered after the others; `None` if the model has none.
        pub zero: Option<usize>,
        /// Experts per token.
        pub k: usize,
        /// Scores.
        pub score: Score,
        /// Whether a selection bias operand follows the logits.
        pub select_bias: bool,
        /// Group-limited selection.
        pub groups: Option<Groups>,
        /// Weights of the selected.
        pub weight_from: WeightFrom,
        /// Normalisation of the weights.
        pub renorm: Renorm,
        /// Factor on the weights, last.
        pub scale: f32,
    }
}

impl RouterDesc {
    /// Logits of a token: one for each expert, zero-computation experts included.
    pub fn scores(&self) -> usize {
        self.experts.saturating_add(self.zero.unwrap_or(0))
    }
}

/// The `n` largest, in descending order; the lowest index wins ties. NaN is never among them, so there may be
/// fewer.
fn top(x: &[f32], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..x.len()).filter(|&i| !x[i].is_nan()).collect();
    // The sort is stable: equal numbers keep their order.
    order.sort_by(|&i, &j| x[j].partial_cmp(&x[i]).unwrap_or(Ordering::Equal));
    order.truncate(n);
    order
}

fn scores(z: &[f32], score: Score) -> Vec<f32> {
    match score {
        Score::Softmax => softmax(z).into_iter().map(|p| p as f32).collect(),
        Score::Sigmoid => z.iter().map(|&z| sigmoid(f64::from(z)) as f32).collect(),
        Score::Identity => z.to_vec(),
    }
}

/// Masks the experts outside of the best groups. NaN counts as −∞ in a group's score, and stays NaN.
fn mask_groups(choice: &mut [f32], g: Groups) {
    let size = choice.len() / g.n;
    let largest = match g.score {
        GroupScore::Max => 1,
        GroupScore::Top2Sum => size.min(2),
    };
    let of_groups: Vec<f32> = choice
        .chunks_exact(size)
        .map(|group| {
            let numbers = top(group, largest).into_iter().map(|i| group[i]);
            numbers.chain(std::iter::repeat(f32::NEG_INFINITY)).take(largest).sum()
        })
        .collect();
    let kept = top(&of_groups, g.keep);
    let masked = if g.mask_neg_inf { f32::NEG_INFINITY } else { 0.0 };
    for (i, group) in choice.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&i) {
            group.iter_mut().filter(|c| !c.is_nan()).for_each(|c| *c = masked);
        }
    }
}

/// SparseMixer's weight of expert `at`, the largest of `candidates`: the softmax over the candidates that
/// are near it. `z` are the original logits, from which nearness is measured; `removed` is −∞ in the softmax.
fn sparse_mixer(z: &[f32], at: usize, removed: Option<usize>, eps: f32) -> f64 {
    let max = z[at];
    let kept = z.iter().enumerate().filter(|&(j, &zj)| {
        // `!(a > b)`, since 0/0 keeps the expert.
        let far = (max - zj) / zj.abs().max(max) > 2.0 * eps;
        !far && Some(j) != removed
    });
    let sum: f64 = kept.map(|(_, &zj)| (f64::from(zj) - f64::from(max)).exp()).sum();
    1.0 / sum
}

fn weights(z: &[f32], s: &[f32], chosen: &[usize], d: &RouterDesc) -> Vec<f64> {
    let mut w: Vec<f64> = match d.weight_from {
        WeightFrom::Score => chosen.iter().map(|&i| f64::from(s[i])).collect(),
        WeightFrom::SoftmaxTopk => softmax(&chosen.iter().map(|&i| z[i]).collect::<Vec<_>>()),
        WeightFrom::SigmoidTopk => chosen.iter().map(|&i| sigmoid(f64::from(z[i]))).collect(),
        WeightFrom::SparseMixer { eps } => {
            let removed = std::iter::once(None).chain(chosen.iter().map(|&i| Some(i)));
            chosen.iter().zip(removed).map(|(&i, removed)| sparse_mixer(z, i, removed, eps)).collect()
        }
    };
    let sum: f64 = w.iter().sum();
    let divisor = match d.renorm {
        Renorm::None => 1.0,
        Renorm::Sum { eps } => sum + f64::from(eps),
        Renorm::Clamp { min } => sum.max(f64::from(min)),
    };
    for w in &mut w {
        *w = *w / divisor * f64::from(d.scale);
    }
    w
}

impl Operator for RouterDesc {
    const NAMES: &'static [&'static str] = &["router"];
    const OPERANDS: &'static [Kind] = &[V];

    fn weights(&self) -> usize {
        usize::from(self.select_bias)
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let d = self;
        let [t, e] = o.matrix(0, "logits")?;
        o.require(e == d.scores(), || format!("{e} logits for {} experts", d.scores()))?;
        o.require((1..=e).contains(&d.k), || format!("{} of {e} experts per token", d.k))?;
        if d.select_bias {
            o.exact(1, "select_bias", &f32(&[e]))?;
        }
        if let Some(g) = &d.groups {
            let size = o.part(e, g.n, "groups")?;
            o.require((1..=g.n).contains(&g.keep), || format!("{} of {} groups kept", g.keep, g.n))?;
            o.require(d.k <= g.keep * size, || {
                format!("{} experts out of {} groups of {size}", d.k, g.keep)
            })?;
            o.require(g.score == GroupScore::Max || size >= 2, || format!("top2sum over groups of {size}"))?;
        }
        if matches!(d.weight_from, WeightFrom::SparseMixer { .. }) {
            o.require(d.k <= 2, || format!("sparsemixer with k = {}", d.k))?;
        }
        Ok(vec![i32(&[t, d.k]), f32(&[t, d.k])])
    }

    /// A row with fewer numbers among its scores than experts to choose is an error.
    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let d = self;
        let bias = a.weight(1, d.select_bias)?;
        let (mut ids, mut out) = (Vec::new(), Vec::new());
        for (row, z) in a.f32(0)?.chunks_exact(d.scores()).enumerate() {
            let s = scores(z, d.score);
            let mut choice = s.clone();
            for (c, b) in choice.iter_mut().zip(bias.unwrap_or_default()) {
                *c += b;
            }
            if let Some(groups) = d.groups {
                mask_groups(&mut choice, groups);
            }
            let chosen = top(&choice, d.k);
            if chosen.len() < d.k {
                let (numbers, experts, k) = (choice.iter().filter(|c| !c.is_nan()).count(), d.scores(), d.k);
                return Err(a.error(format!(
                    "row {row}: of the scores of {experts} experts {numbers} are numbers, the others NaN, and {k} experts are to be chosen"
                )));
            }
            out.extend(weights(z, &s, &chosen, d).into_iter().map(|w| w as f32));
            ids.extend(chosen.into_iter().map(|i| i as i32));
        }
        Ok(vec![Data::I32(ids), Data::F32(out)])
    }
}
