//! The models of Table 2 by their shapes, as their configurations on Hugging Face have them.

/// A model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// Name.
    pub name: &'static str,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Routed experts of a token.
    pub k: usize,
    /// Shared experts.
    pub shared: usize,
    /// Width of the model.
    pub width: u64,
    /// Width of an expert.
    pub inner: u64,
    /// Layers with experts.
    pub layers: usize,
    /// Weights of a layer's attention.
    pub attention: u64,
    /// Bytes that a token's keys and values take in a layer, in bf16.
    pub kv_bytes: u64,
    /// Operations of a layer's attention for one token and one position of its context.
    pub attention_flops: u64,
}

/// DeepSeek-V2: latent attention with 128 heads, with keys and values of 512 numbers and 64 rotated ones.
pub const DEEPSEEK: Model = Model {
    name: "DeepSeek-V2",
    experts: 160,
    k: 6,
    shared: 2,
    width: 5120,
    inner: 1536,
    layers: 59,
    attention: 5120 * 1536 + 1536 * 128 * 192 + 5120 * 576 + 512 * 128 * 256 + 128 * 128 * 5120,
    kv_bytes: 2 * 576,
    attention_flops: 2 * 128 * (576 + 512),
};

/// Qwen3-235B-A22B: 64 heads, 4 of keys and values.
pub const QWEN: Model = Model {
    name: "Qwen3-235B-A22B",
    experts: 128,
    k: 8,
    shared: 0,
    width: 4096,
    inner: 1536,
    layers: 94,
    attention: 2 * 4096 * 64 * 128 + 2 * 4096 * 4 * 128,
    kv_bytes: 2 * 2 * 4 * 128,
    attention_flops: 4 * 64 * 128,
};

/// GLM-4.5-Air: 96 heads, 8 of keys and values.
pub const GLM: Model = Model {
    name: "GLM-4.5-Air",
    experts: 128,
    k: 8,
    shared: 1,
    width: 4096,
    inner: 1408,
    layers: 45,
    attention: 2 * 4096 * 96 * 128 + 2 * 4096 * 8 * 128,
    kv_bytes: 2 * 2 * 8 * 128,
    attention_flops: 4 * 96 * 128,
};

/// All of them, in the order of Table 2.
pub const MODELS: [Model; 3] = [DEEPSEEK, QWEN, GLM];

impl Model {
    /// Weights of an expert: gate, up and down.
    pub const fn expert(&self) -> u64 {
        3 * self.width * self.inner
    }

    /// Bytes of an expert in bf16.
    pub const fn expert_bytes(&self) -> u64 {
        2 * self.expert()
    }

    /// Weights of all its experts and of attention, without embeddings and dense layers.
    pub const fn weights(&self) -> u64 {
        self.bytes() / 2 + self.attention * self.layers as u64
    }

    /// Bytes of all its experts, the shared ones among them.
    pub const fn bytes(&self) -> u64 {
        (self.experts + self.shared) as u64 * self.layers as u64 * self.expert_bytes()
    }
}
