//! Sums over a piece of the texts. The sums of later pieces are added to those of earlier ones, in their order.

use super::gates::GateSample;
use super::products::Products;
use bincode::{Decode, Encode};
use moec_base::error::{Error, Result};
use moec_profile::samples::Sample;
use moec_profile::{Correlations, Moments, NeuronCounts, Routes, Routing, Saliency, Trace};
use std::collections::BTreeMap;
use std::mem;

/// Sums over a piece.
#[derive(Encode, Decode)]
pub(super) struct PieceRecord {
    pub(super) layers: Vec<Routing>,
    pub(super) trace: Trace,
    pub(super) saliency: Vec<Saliency>,
    pub(super) sums: Vec<Sum>,
    pub(super) products: Vec<Products>,
    /// Rows that are kept of each sampled input.
    pub(super) most: usize,
    pub(super) routes: Routes,
    pub(super) neurons: Vec<NeuronCounts>,
    pub(super) gates: Vec<GateSample>,
    /// Number of predictions, and sum of −ln p.
    pub(super) predicted: u64,
    pub(super) loss: f64,
    /// Whether every value of the taps could be read.
    pub(super) whole: bool,
}

/// Sums of one weight.
#[derive(Encode, Decode)]
pub(super) struct Sum {
    pub(super) name: String,
    pub(super) cols: usize,
    /// Number of tokens that each of its matrices has seen.
    pub(super) tokens: Vec<u64>,
    /// `[matrices, cols]`.
    pub(super) squares: Vec<f32>,
}

/// Part of a piece that is sent alone: products of one input may be large.
#[derive(Encode, Decode)]
pub(super) enum Part {
    /// All but the products; the first part of a piece.
    Begin(Box<PieceRecord>),
    /// Products by their index.
    Products(usize, Products),
}

/// Observations of all pieces.
pub(super) struct CalibrationRecord {
    pub(super) layers: Vec<Routing>,
    pub(super) trace: Trace,
    pub(super) saliency: Vec<Saliency>,
    pub(super) weights: BTreeMap<String, Moments>,
    pub(super) routes: Routes,
    pub(super) correlations: Vec<Correlations>,
    pub(super) neurons: Vec<NeuronCounts>,
    pub(super) samples: Vec<Sample>,
    pub(super) gates: Vec<GateSample>,
    pub(super) predicted: u64,
    pub(super) loss: f64,
}

impl PieceRecord {
    /// No layers, for chunks of `chunk` tokens.
    pub(super) fn new(chunk: u32) -> Self {
        Self {
            layers: Vec::new(),
            trace: Trace::new(chunk),
            saliency: Vec::new(),
            sums: Vec::new(),
            products: Vec::new(),
            most: 0,
            routes: Routes::default(),
            neurons: Vec::new(),
            gates: Vec::new(),
            predicted: 0,
            loss: 0.0,
            whole: true,
        }
    }

    /// Takes the sums out; those of the next piece begin at zero.
    pub(super) fn take(&mut self) -> Self {
        let layers = self.layers.iter().map(|l| Routing::new(l.layer, l.k, l.chosen.len())).collect();
        let saliency = self.saliency.iter().map(|s| Saliency::new(s.layer)).collect();
        let trace = Trace::new(self.trace.chunk);
        Self {
            layers: mem::replace(&mut self.layers, layers),
            trace: mem::replace(&mut self.trace, trace),
            saliency: mem::replace(&mut self.saliency, saliency),
            sums: self.sums.iter_mut().map(Sum::take).collect(),
            products: self.products.iter_mut().map(Products::take).collect(),
            most: self.most,
            routes: mem::take(&mut self.routes),
            neurons: mem::take(&mut self.neurons),
            gates: self.gates.iter_mut().map(GateSample::take).collect(),
            predicted: mem::take(&mut self.predicted),
            loss: mem::take(&mut self.loss),
            whole: mem::replace(&mut self.whole, true),
        }
    }

    /// The parts of a piece.
    pub(super) fn parts(mut self) -> impl Iterator<Item = Part> {
        let products = mem::take(&mut self.products);
        let products = products.into_iter().enumerate().map(|(i, products)| Part::Products(i, products));
        std::iter::once(Part::Begin(Box::new(self))).chain(products)
    }

    /// Adds a part of the next piece to the sums of all earlier ones, which are `None` before the first.
    ///
    /// # Errors
    /// Only bugs of moec: pieces of different shapes.
    pub(super) fn add(sums: &mut Option<Self>, part: Part) -> Result<()> {
        let added = match (sums, part) {
            (none @ None, Part::Begin(first)) => {
                *none = Some(*first);
                Some(())
            }
            (Some(sums), Part::Begin(next)) => sums.merge(*next),
            (Some(sums), Part::Products(i, next)) => {
                if let Some(own) = sums.products.get_mut(i) {
                    own.merge(next, sums.most)
                } else {
                    sums.products.push(next);
                    Some(())
                }
            }
            (None, Part::Products(..)) => None,
        };
        added.ok_or_else(|| Error::bug("sums of pieces of different shapes"))
    }

    /// Adds the sums of a later piece, without products.
    fn merge(&mut self, next: Self) -> Option<()> {
        let all = |alike: bool| alike.then_some(());
        all(self.layers.len() == next.layers.len() && self.saliency.len() == next.saliency.len())?;
        all(self.sums.len() == next.sums.len() && self.gates.len() == next.gates.len())?;
        all(self.neurons.len() == next.neurons.len())?;
        self.routes.append(next.routes, &self.layers);
        for (own, next) in self.layers.iter_mut().zip(&next.layers) {
            *own = own.merge(next)?;
        }
        for (own, next) in self.saliency.iter_mut().zip(&next.saliency) {
            *own = own.merge(next)?;
        }
        for (own, next) in self.neurons.iter_mut().zip(&next.neurons) {
            *own = own.merge(next)?;
        }
        for chunks in next.trace.sequences {
            self.trace.begin();
            for chunk in chunks {
                self.trace.push(chunk);
            }
        }
        self.sums.iter_mut().zip(&next.sums).try_for_each(|(own, next)| own.merge(next))?;
        self.gates.iter_mut().zip(next.gates).for_each(|(own, next)| own.merge(next));
        self.predicted += next.predicted;
        self.loss += next.loss;
        self.whole &= next.whole;
        Some(())
    }

    /// Returns the observations.
    ///
    /// # Errors
    /// Fails if activations are not finite; the message names the weight.
    pub(super) fn finish(mut self) -> Result<CalibrationRecord> {
        if !self.whole {
            return Err(Error::bug("values were not at the addresses of the plan"));
        }
        let mut weights = BTreeMap::new();
        for sum in self.sums {
            let moments = Moments::from_sums(sum.cols, sum.tokens, &sum.squares).ok_or_else(|| {
                Error::input(format!("the inputs of `{}` are not finite", sum.name))
                    .hint("the model diverges on these texts: is the checkpoint whole?")
            })?;
            // A weight that two nodes read has two inputs, which both count.
            weights
                .entry(sum.name)
                .and_modify(|old: &mut Moments| {
                    if let Some(both) = old.merge(&moments) {
                        *old = both;
                    }
                })
                .or_insert(moments);
        }
        if !self.layers.is_sorted_by_key(|l| l.layer) {
            return Err(Error::bug("routers out of layer order"));
        }
        self.saliency.sort_by_key(|s| s.layer);
        self.trace.sequences.sort();
        let samples = self.products.iter_mut().filter_map(Products::sample).collect();
        let correlations = self.products.into_iter().map(Products::finish).collect::<Option<_>>();
        let correlations = correlations.ok_or_else(|| Error::bug("sums of products of another shape"))?;
        Ok(CalibrationRecord {
            layers: self.layers,
            trace: self.trace,
            saliency: self.saliency,
            weights,
            routes: self.routes,
            correlations,
            neurons: self.neurons,
            samples,
            gates: self.gates,
            predicted: self.predicted,
            loss: self.loss,
        })
    }
}

impl Sum {
    /// Takes the sums out; the next ones begin at zero.
    fn take(&mut self) -> Self {
        let (tokens, squares) = (vec![0; self.tokens.len()], vec![0.0; self.squares.len()]);
        Self {
            name: self.name.clone(),
            cols: self.cols,
            tokens: mem::replace(&mut self.tokens, tokens),
            squares: mem::replace(&mut self.squares, squares),
        }
    }

    /// Adds the sums of a later piece; `None` if shapes differ.
    fn merge(&mut self, next: &Self) -> Option<()> {
        add(&mut self.tokens, &next.tokens)?;
        add(&mut self.squares, &next.squares)
    }
}

/// Adds sums of a later piece; `None` if there are not as many.
pub(super) fn add<T: Copy + std::ops::AddAssign>(own: &mut [T], next: &[T]) -> Option<()> {
    (own.len() == next.len()).then(|| own.iter_mut().zip(next).for_each(|(own, &next)| *own += next))
}
