//! The profile: statistics that calibration records while it runs a model over text.
//!
//! A profile has one part per question, each in its own file:
//!
//! * [`Reading`]: the texts, and the model's perplexity on them,
//! * [`Routing`]: experts that the tokens chose, and pairs chosen together,
//! * [`Trace`]: the load of every expert, chunk by chunk,
//! * [`Saliency`]: magnitudes of attention outputs,
//! * [`Moments`]: magnitudes of the inputs of each matrix,
//! * [`Correlations`]: correlations of these inputs,
//! * [`Routes`]: experts that a sample of the tokens chose, one after the other,
//! * [`NeuronCounts`]: frequency of each neuron's activation,
//! * [`Sample`]: rows of some inputs,
//! * [`Gates`]: magnitudes of gates after SiLU,
//! * [`Confidence`]: largest probabilities of the little pass of big-little decoding,
//! * [`FormatLoss`]: what formats of weights and of the KV cache lose.
//!
//! Each part has its own checks and its own merge. A new part is a new field of [`Profile`] and a new
//! [`file::VERSION`]. [`loads`] and [`mod@overlap`] evaluate profiles for passes and for users.
//!
//! Profiles are untrusted input: every result of [`Profile::read`] has been checked.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

mod confidence;
pub mod correlations;
pub mod decoding;
pub mod file;
mod gates;
pub mod importance;
pub mod inputs;
pub mod loads;
pub mod losses;
mod moments;
pub mod neurons;
mod origin;
pub mod overlap;
mod reading;
pub mod routes;
mod routing;
mod saliency;
pub mod samples;
mod table;
#[cfg(test)]
mod tests;
mod trace;

pub use confidence::Confidence;
pub use correlations::Correlations;
pub use gates::Gates;
pub use importance::Importance;
pub use losses::FormatLoss;
pub use moments::Moments;
pub use neurons::NeuronCounts;
pub use origin::Origin;
pub use reading::Reading;
pub use routes::Routes;
pub use routing::Routing;
pub use saliency::Saliency;
pub use samples::Sample;
pub use trace::{Chunk, Trace};

use bincode::{Decode, Encode};
use moec_base::error::{Error, Result};
use std::collections::BTreeMap;

/// Limit of the tokens that a profile may count; sums stay far below 64 bits.
const MOST_TOKENS: u64 = 1 << 48;
/// Limit of layers, experts and channels: far more than any model has, and it makes a damaged file harmless.
const MOST: usize = 1 << 20;

/// Observations of a calibration.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Profile {
    /// The model that was run.
    pub origin: Origin,
    /// Text that was read.
    pub reading: Reading,
    /// Layers with routed experts, ascending.
    pub layers: Vec<Routing>,
    /// Loads of their experts, chunk by chunk.
    pub trace: Trace,
    /// Attention outputs, by ascending layer.
    pub saliency: Vec<Saliency>,
    /// Inputs of every matrix that may be quantised, by the weight's name in the lowered Graph
    /// (`layers.3.attn.q`), before any rewriting.
    pub weights: BTreeMap<String, Moments>,
    /// Choices of single tokens, in order.
    pub routes: Routes,
    /// Correlations of these inputs' channels, each input once; empty in a profile of version 2.
    pub correlations: Vec<Correlations>,
    /// Frequency of neurons' activation, by ascending layer and by the name of the down matrix; empty in
    /// profiles up to version 3.
    pub neurons: Vec<NeuronCounts>,
    /// Rows of the inputs of networks and of the head; empty in profiles up to version 4.
    pub samples: Vec<Sample>,
    /// Magnitudes of the gates of experts with SiLU, by ascending layer; empty in profiles up to version 5.
    pub gates: Vec<Gates>,
    /// Largest probabilities of the little pass, if calibration ran one; `None` in profiles up to version 6.
    pub confidence: Option<Confidence>,
    /// Losses of formats, by key and format, if calibration measured them; empty in profiles up to version 7.
    pub losses: Vec<FormatLoss>,
}

/// Fault of a profile.
pub(crate) type ProfileFault = String;

impl Profile {
    /// Merges two profiles, as if one run had read the texts of both. Commutative.
    ///
    /// # Errors
    /// Fails if the profiles are of different models, or exceed the tokens that a profile counts.
    pub fn merge(&self, other: &Self) -> Result<Self> {
        self.origin.same(&other.origin).map_err(|e| {
            Error::input("the profiles are of different models")
                .because(e)
                .hint("only profiles of the same checkpoint can be merged")
        })?;
        let differ = || Error::input("the profiles are of one model, but do not list the same parts of it");
        if self.layers.len() != other.layers.len() || !self.weights.keys().eq(other.weights.keys()) {
            return Err(differ());
        }
        let layers: Option<Vec<_>> = self.layers.iter().zip(&other.layers).map(|(a, b)| a.merge(b)).collect();
        let trace = self.trace.merge(&other.trace).ok_or_else(|| {
            Error::input(format!(
                "one profile has chunks of {} tokens, the other of {}",
                self.trace.chunk, other.trace.chunk
            ))
            .hint("take both with the same `prefill_chunk` and the same `--window`")
        })?;
        let saliency: Option<Vec<_>> = (self.saliency.len() == other.saliency.len())
            .then(|| {
                self.saliency.iter().zip(&other.saliency).map(|(a, b)| a.merge(b)).collect::<Option<_>>()
            })
            .flatten();
        let pairs = self.weights.iter().zip(other.weights.values());
        let weights: Option<BTreeMap<_, _>> =
            pairs.map(|((name, a), b)| Some((name.clone(), a.merge(b)?))).collect();
        let merged = Self {
            origin: self.origin.clone(),
            reading: self.reading.merge(&other.reading),
            layers: layers.ok_or_else(differ)?,
            trace,
            saliency: saliency.ok_or_else(differ)?,
            weights: weights.ok_or_else(differ)?,
            routes: self.routes.merge(&other.routes, &self.layers),
            correlations: self.merged_correlations(other),
            neurons: neurons::merge(&self.neurons, &other.neurons),
            samples: samples::merge(&self.samples, &other.samples),
            gates: gates::merge(&self.gates, &other.gates),
            confidence: confidence::merge(self.confidence.as_ref(), other.confidence.as_ref()),
            losses: losses::merge(&self.losses, &other.losses),
        };
        merged
            .check()
            .map_err(|e| Error::limit("the merged profile is past what one can hold").because(e))?;
        Ok(merged)
    }

    /// Counts of a layer's neurons: of its routed experts, or else of its dense network.
    pub fn neurons(&self, layer: u32) -> Option<&NeuronCounts> {
        let of_layer = || self.neurons.iter().filter(|c| c.layer == layer);
        of_layer().find(|c| c.routed).or_else(|| of_layer().next())
    }

    /// Correlations of the inputs that both profiles have; empty if the version of one of them has none.
    fn merged_correlations(&self, other: &Self) -> Vec<Correlations> {
        let moments = |of: &Self, c: &Correlations| Some(of.weights.get(c.readers.first()?)?.clone());
        let merged = |a: &Correlations| {
            let b = other.correlations.iter().find(|b| b.readers == a.readers)?;
            a.merge(&moments(self, a)?, b, &moments(other, b)?)
        };
        self.correlations.iter().filter_map(merged).collect()
    }

    /// Checks the properties that every reader of a profile relies on.
    fn check(&self) -> Result<(), ProfileFault> {
        self.origin.check()?;
        self.reading.check()?;
        if self.layers.len() > MOST || !self.layers.is_sorted_by(|a, b| a.layer < b.layer) {
            return Err("its layers are not in order".to_owned());
        }
        self.layers.iter().try_for_each(|l| l.check().map_err(|e| format!("layer {}: {e}", l.layer)))?;
        self.trace.check(&self.layers)?;
        if self.saliency.len() > MOST || !self.saliency.is_sorted_by(|a, b| a.layer < b.layer) {
            return Err("its layers of attention are not in order".to_owned());
        }
        self.saliency.iter().try_for_each(|s| s.check().map_err(|e| format!("layer {}: {e}", s.layer)))?;
        for (name, moments) in &self.weights {
            if name.is_empty() || name.len() > 256 || name.chars().any(char::is_control) {
                return Err(format!("weight name {name:?}"));
            }
            moments.check().map_err(|e| format!("weight `{name}`: {e}"))?;
        }
        if self.correlations.len() > self.weights.len() {
            return Err("more inputs than weights".to_owned());
        }
        let shape = |name: &str| self.weights.get(name).map(|m| (m.matrices(), m.cols));
        for (i, c) in self.correlations.iter().enumerate() {
            c.check(shape).map_err(|e| format!("input {i}: {e}"))?;
        }
        neurons::check(&self.neurons, &self.layers)?;
        samples::check(self)?;
        gates::check(&self.gates)?;
        self.confidence.as_ref().map_or(Ok(()), Confidence::check)?;
        losses::check(&self.losses)?;
        self.routes.check(&self.layers)
    }
}
