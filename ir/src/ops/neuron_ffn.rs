//! Experts by neurons.

use super::dispatch::{for_each_slot, slots_for};
use super::math::{dot, matrix, matvec};
use super::*;
use std::borrow::Cow;

words! {
    /// Predictor of active neurons, evaluated before their gates (PowerInfer-2, §2.2 and §4.1.2). Its number
    /// is above 0 for neurons that it takes to be active; it misses some active ones.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Predictor, "`low_rank` or `coarse`" {
        /// `left · (right · x) + margin`, of `@right[E, R, H], @left[E, I, R], @margin[E, 1, I]`: the gates
        /// as a product of two small matrices.
        LowRank = "low_rank",
        /// `codes · x + margin`, of `@codes[E, I, H], @margin[E, 1, I]`: the gates in fewer bits.
        Coarse = "coarse",
    }
}

impl Predictor {
    /// Its weights.
    pub const fn weights(self) -> usize {
        match self {
            Self::LowRank => 3,
            Self::Coarse => 2,
        }
    }
}

/// The bundles of all neurons, whether gates are stored separately or not.
fn bundles<'a>(a: &'a Args<'_>, hidden: usize) -> Result<Cow<'a, [f32]>, EvalError> {
    let first = a.f32(2)?;
    // Gates by themselves are as wide as a row.
    if a.cols(2)? != hidden {
        return Ok(Cow::Borrowed(first));
    }
    let up_down = a.f32(3)?.chunks_exact(2 * hidden);
    Ok(first.chunks_exact(hidden).zip(up_down).flat_map(|(gate, rest)| [gate, rest].concat()).collect())
}

/// Prediction for the neurons of an expert.
fn predicted(
    a: &Args<'_>,
    predict: Predictor,
    e: usize,
    experts: usize,
    x: &[f32],
) -> Result<Vec<f32>, EvalError> {
    let of = |i| Ok::<_, EvalError>(matrix(a.f32(i)?, e, experts));
    Ok(match predict {
        Predictor::LowRank => matvec(&matvec(x, of(3)?, None), of(4)?, Some(of(5)?)),
        Predictor::Coarse => matvec(x, of(3)?, Some(of(4)?)),
    })
}

/// A row through the bundles of a network: gate, up, down. The first `hot` neurons, and those of which a
/// predictor says 0 or less, are passed over.
fn by_neurons(x: &[f32], bundles: &[f32], glu: Glu, hot: usize, predicted: Option<&[f32]>) -> Vec<f32> {
    let mut sums = vec![0.0_f64; x.len()];
    for (i, bundle) in bundles.chunks_exact(3 * x.len()).enumerate().skip(hot) {
        if predicted.and_then(|p| p.get(i)).is_some_and(|&p| p <= 0.0) {
            continue;
        }
        let (gate, rest) = bundle.split_at(x.len());
        let (up, down) = rest.split_at(x.len());
        let gate = dot(x, gate) as f32;
        if is_inactive(glu, gate) {
            continue;
        }
        let h = f64::from(glu.at(gate, dot(x, up) as f32));
        for (sum, &down) in sums.iter_mut().zip(down) {
            *sum += h * f64::from(down);
        }
    }
    sums.into_iter().map(|sum| sum as f32).collect()
}

/// Whether the gate alone makes the result 0.
fn is_inactive(glu: Glu, gate: f32) -> bool {
    match glu {
        Glu::Gated(Activation::Relu) | Glu::DRelu => gate <= 0.0,
        Glu::FatRelu { threshold } => gate < threshold,
        Glu::Cats { threshold } => Activation::Silu.at(gate).abs() < threshold,
        Glu::Gated(_) | Glu::Limited { .. } | Glu::Clamped { .. } | Glu::Ungated(_) => false,
    }
}

impl NeuronFfn {
    /// Whether gates are in memory, up and down on disk.
    const fn is_split(&self) -> bool {
        self.paged.is_some() && !self.gates_on_disk
    }
}

impl Operator for NeuronFfn {
    const NAMES: &'static [&'static str] = &["neuron_ffn"];
    const OPERANDS: &'static [Kind] = &[V, V, W];

    fn weights(&self) -> usize {
        // A predictor of gates in memory is found by inference.
        if self.is_split() { 1 } else { self.predict.map_or(0, Predictor::weights) }
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [t, h] = o.matrix(0, "x")?;
        o.require(self.glu.skips(), || "this gate makes no neuron 0".to_owned())?;
        let [words] = o.shape(1, "dispatch", DType::I32)?;
        let [e, i, width] = o.shape(2, "neurons", DType::F32)?;
        o.require(self.paged.is_some() || !self.gates_on_disk, || {
            "gates on disk of neurons in memory".to_owned()
        })?;
        let want = if self.is_split() { h } else { o.mul(3, h)? };
        o.require(width == want, || {
            format!("bundles of {width} numbers, expected gate, up and down of {h} each")
        })?;
        if self.is_split() {
            let both = o.mul(2, h)?;
            o.exact(3, "up_down", &f32(&[e, i, both]))?;
            o.require(self.predict.is_none(), || "a predictor of gates in memory".to_owned())?;
        }
        if let Some(hot) = self.hot {
            o.require(self.paged.is_some(), || "hot neurons of experts in memory".to_owned())?;
            o.require((1..i).contains(&hot), || format!("{hot} hot neurons of {i}"))?;
        }
        match self.predict {
            None => {}
            Some(Predictor::LowRank) => {
                let [_, rank, _] = o.shape(3, "right", DType::F32)?;
                o.exact(3, "right", &f32(&[e, rank, h]))?;
                o.exact(4, "left", &f32(&[e, i, rank]))?;
                o.exact(5, "margin", &f32(&[e, 1, i]))?;
            }
            Some(Predictor::Coarse) => {
                o.exact(3, "codes", &f32(&[e, i, h]))?;
                o.exact(4, "margin", &f32(&[e, 1, i]))?;
            }
        }
        Ok(vec![f32(&[slots_for(o, words, t, e)?, h])])
    }

    /// Slots that no active expert has are 0.
    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (rows, hidden, x) = (a.rows(0)?, a.cols(0)?, a.f32(0)?);
        let neurons = bundles(a, hidden)?;
        let experts = a.get(2)?.ty.shape.first().copied().unwrap_or(1);
        let slots = a.results.first().map_or(0, Type::rows);
        let mut out = vec![0.0; slots * hidden];
        for_each_slot(a, (rows, slots, experts), |e, slot, row| {
            let x = &x[row * hidden..(row + 1) * hidden];
            let prediction = self.predict.map(|p| predicted(a, p, e, experts, x)).transpose()?;
            let hot = self.hot.unwrap_or(0);
            let y = by_neurons(x, matrix(&neurons, e, experts), self.glu, hot, prediction.as_deref());
            out[slot * hidden..(slot + 1) * hidden].copy_from_slice(&y);
            Ok(())
        })?;
        Ok(one(out))
    }
}
