//! Prompts in virtual time. All neurons are requested (§7.2.2), so that weights on UFS come one after the
//! other, or in pieces.

use super::dense::{LONG, PAGED, bundle};
use super::in_memory::used;
use super::models::{CHANNEL, GROUPED, Model};
use super::phone::{Cluster, Phone};
use moec_sim::neurons::NeuronError;

/// A prompt.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// The phone.
    pub phone: &'a Phone,
    /// The model.
    pub model: &'a Model,
    /// Its tokens.
    pub tokens: usize,
    /// Part of the feed-forward weights that memory holds.
    pub held: f64,
}

/// Seconds of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layer {
    /// The NPU computes.
    pub compute: f64,
    /// UFS is read.
    pub io: f64,
}

impl Prompt<'_> {
    /// Factor by which units are slower with weights on UFS.
    fn paged(&self) -> f64 {
        if self.held < 1.0 { PAGED } else { 1.0 }
    }

    /// Weights of a layer with all experts: a prompt goes through all of them.
    fn layer_weights(&self) -> f64 {
        let model = self.model;
        model.attention() + model.neuron() * model.neurons() as f64
    }

    /// Seconds of multiply-adds at a rate, or of reading all weights once if that is longer.
    fn computing(&self, weights: f64, all: f64, macs: f64, rate: f64, bytes: f64) -> f64 {
        (weights * self.tokens as f64 / macs).max(all * bytes / rate) * self.paged()
    }

    /// A layer of PowerInfer-2's: the NPU computes all of it, a big core reads bundles in long reads.
    ///
    /// # Errors
    /// Our bug: an invalid width.
    pub fn layer(&self) -> Result<Layer, NeuronError> {
        let (phone, model) = (self.phone, self.model);
        let weights = model.attention() + model.routed();
        let compute =
            self.computing(weights, self.layer_weights(), phone.npu_macs, phone.memory.npu, CHANNEL);
        let bytes = bundle(model, &phone.ufs.random)?.stride() as f64 * model.neurons() as f64;
        Ok(Layer { compute, io: phone.ufs.sequential_seconds(bytes * (1.0 - self.held), LONG) })
    }

    /// Tokens per second of PowerInfer-2: a layer is read while the one before it is computed.
    ///
    /// # Errors
    /// As [`Prompt::layer`].
    pub fn powerinfer2(&self) -> Result<f64, NeuronError> {
        let Layer { compute, io } = self.layer()?;
        let seconds = io + (self.model.layers - 1) as f64 * compute.max(io) + compute;
        Ok(self.tokens as f64 / seconds)
    }

    /// Tokens per second of QNN: layers are read as long as they are not there, and then computed.
    pub fn qnn(&self) -> f64 {
        let (phone, model) = (self.phone, self.model);
        let all = self.layer_weights() * model.layers as f64;
        let compute = self.computing(used(model), all, phone.npu_macs, phone.memory.npu, CHANNEL);
        let bytes = (1.0 - self.held) * model.feed_forward() * CHANNEL;
        self.tokens as f64 / (compute + phone.ufs.sequential_seconds(bytes, LONG))
    }

    /// Seconds of the cores.
    fn cores(&self) -> f64 {
        let (phone, model) = (self.phone, self.model);
        let all = self.layer_weights() * model.layers as f64;
        self.computing(used(model), all, phone.cpu_macs, phone.memory.cpu, GROUPED)
    }

    /// Tokens per second of llama.cpp: all feed-forward weights come through a mapping, from which they go
    /// before they are used again.
    pub fn mapped(&self) -> f64 {
        let bytes = if self.held < 1.0 { self.model.feed_forward() * GROUPED } else { 0.0 };
        let ufs = &self.phone.ufs;
        let reading = ufs.sequential_seconds(bytes, 128 << 10) / ufs.contended;
        self.tokens as f64 / (self.cores() + reading)
    }

    /// Tokens per second of LLMFlash: bundles of two neurons, in scattered reads of all threads.
    ///
    /// # Errors
    /// As [`Prompt::layer`].
    pub fn llmflash(&self) -> Result<f64, NeuronError> {
        let (model, ufs) = (self.model, &self.phone.ufs);
        let bundle = bundle(model, &ufs.random)?;
        let pairs = (model.neurons() * model.layers) as f64 / 2.0 * (1.0 - self.held);
        let range = bundle.stride() as f64 * model.neurons() as f64;
        let each = ufs.random_seconds(2 * bundle.stride(), range, Cluster::Mid) / ufs.contended;
        Ok(self.tokens as f64 / (self.cores() + pairs * each))
    }
}
