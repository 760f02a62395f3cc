//! The five models of §7.1 by their shapes, as their configurations on Hugging Face have them, and how many
//! of their neurons a token requests.

/// Bytes of a weight in 4 bits, with a scale of 16 bits for 32 of them: what cores read of memory (§7.6,
/// llama.cpp's groups).
pub const GROUPED: f64 = 0.5 + 2.0 / 32.0;
/// Bytes of a 4-bit weight with one scale per channel, as read by the NPU (§7.6).
pub const CHANNEL: f64 = 0.5;
/// Bytes of a predictor for a neuron: the 2.6 GB of §7.2.3 over the neurons of TurboSparse-Mixtral-47B.
pub const PREDICTOR: f64 = 2.6e9 / (32.0 * 8.0 * 14336.0);
/// Share of computed gates whose neuron is active (§4.4).
pub const TOGETHER: f64 = 0.8;

/// A model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// Name.
    pub name: &'static str,
    /// Layers.
    pub layers: usize,
    /// Width.
    pub hidden: usize,
    /// Neurons of a layer, or of one of its experts.
    pub inner: usize,
    /// Experts of a layer; 1: none.
    pub experts: usize,
    /// Experts of a token.
    pub k: usize,
    /// Width of keys, and of values.
    pub kv: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Part of its experts' neurons that a token requests.
    pub active: f64,
    /// Share of neurons that are sampled again at a token, on average (see `activity`).
    pub novelty: f64,
}

/// Bamboo's, whose hits §7.5 gives; the same is assumed for the other dense models.
const DENSE: f64 = 0.14;

/// Bamboo-7B. §7.2.1: 3B parameters are activated for a token, 1.47B of them by attention and the head.
pub const BAMBOO: Model = Model {
    name: "Bamboo-7B",
    layers: 32,
    hidden: 4096,
    inner: 14336,
    experts: 1,
    k: 1,
    kv: 1024,
    vocabulary: 32000,
    active: (3e9 - 1.473e9) / 5.637e9,
    novelty: DENSE,
};

/// Mistral-7B with SiLU. §7.2.5: 50 % by CATS; predicted like the others, since CATS itself would need every
/// gate.
pub const MISTRAL: Model = Model { name: "Mistral(SiLU)-7B", active: 0.5, ..BAMBOO };

/// Sparse Qwen2-7B. Its sparsity is not printed: Bamboo's is used.
pub const QWEN2: Model = Model {
    name: "Qwen2-7B",
    layers: 28,
    hidden: 3584,
    inner: 18944,
    kv: 512,
    vocabulary: 152_064,
    ..BAMBOO
};

/// Sparse Llama-13B. §7.2.1: nearly twice as many activated parameters as Bamboo's.
pub const LLAMA: Model = Model {
    name: "Llama-13B",
    layers: 40,
    hidden: 5120,
    inner: 13824,
    kv: 5120,
    active: (6e9 - 4.358e9) / 8.493e9,
    ..BAMBOO
};

/// TurboSparse-Mixtral-47B. §7.2.1: about 3B activated parameters, of 11.27B in the two experts of a token.
pub const MIXTRAL: Model = Model {
    name: "Mixtral-47B",
    experts: 8,
    k: 2,
    active: (3e9 - 1.473e9) / 11.274e9,
    novelty: 0.023,
    ..BAMBOO
};

/// All of them, in the order of Figure 7's text.
pub const MODELS: [Model; 5] = [MISTRAL, QWEN2, BAMBOO, LLAMA, MIXTRAL];

impl Model {
    /// Weights of a layer's attention.
    pub const fn attention(&self) -> f64 {
        (2 * self.hidden * self.hidden + 2 * self.hidden * self.kv) as f64
    }

    /// Weights of the head.
    pub const fn head(&self) -> f64 {
        (self.vocabulary * self.hidden) as f64
    }

    /// Neurons of a layer, of all experts.
    pub const fn neurons(&self) -> usize {
        self.experts * self.inner
    }

    /// Weights of a neuron: gate, up and down.
    pub const fn neuron(&self) -> f64 {
        (3 * self.hidden) as f64
    }

    /// Weights of a layer's experts that a token goes through.
    pub const fn routed(&self) -> f64 {
        self.neuron() * (self.k * self.inner) as f64
    }

    /// Weights of the feed-forward part of all layers.
    pub const fn feed_forward(&self) -> f64 {
        self.neuron() * (self.neurons() * self.layers) as f64
    }

    /// Weights that a token activates.
    pub const fn activated(&self) -> f64 {
        (self.attention() + self.active * self.routed()) * self.layers as f64 + self.head()
    }

    /// All weights but the table of embeddings.
    pub const fn weights(&self) -> f64 {
        self.feed_forward() + self.attention() * self.layers as f64 + self.head()
    }

    /// Bytes of keys and values of a layer, for so many positions, in 16 bits.
    pub const fn kv_bytes(&self, positions: f64) -> f64 {
        4.0 * self.kv as f64 * positions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_shapes_give_the_sizes_of_the_paper() {
        // Section 7.2.3: 400 MB hold 1.8 % of the feed-forward weights, whose scales take 2.7 GB.
        let codes = MIXTRAL.feed_forward() * CHANNEL;
        assert!((400e6 / codes - 0.018).abs() < 0.0005, "{codes}");
        assert!(((GROUPED - CHANNEL) * MIXTRAL.feed_forward() / 2.7e9 - 1.0).abs() < 0.06);
        // Bamboo: half of the feed-forward weights are 1.5 GB (section 7.3).
        assert!((0.5 * BAMBOO.feed_forward() * GROUPED / 1.5e9 - 1.0).abs() < 0.1);
        for model in [BAMBOO, MIXTRAL] {
            assert!((model.activated() / 3e9 - 1.0).abs() < 0.01, "{}: {}", model.name, model.activated());
        }
        assert!((MISTRAL.weights() / SEVEN - 1.0).abs() < 0.01);
        assert!((0.15..0.25).contains(&LLAMA.active));
    }

    const SEVEN: f64 = 7.11e9;
}
