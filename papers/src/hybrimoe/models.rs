//! The models of Table II by their shapes, as their configurations on Hugging Face have them.
//!
//! Table II prints 18944 as the inner width of Qwen2's routed experts. That is `intermediate_size`, which no
//! layer of the model uses; with `moe_intermediate_size`, 2560, it has the 57 billion weights of its name.

/// A model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// Name, as the paper shortens it.
    pub name: &'static str,
    /// Layers with experts.
    pub layers: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Routed experts of a token.
    pub k: usize,
    /// Width of the model.
    pub width: u64,
    /// Width of a routed expert.
    pub inner: u64,
    /// Weights of a layer's attention.
    pub attention: u64,
    /// Weights of a layer's shared experts.
    pub shared: u64,
    /// Correlation of a token's choice of experts with the one before. Found from LRU's hit rate with a
    /// quarter of the experts cached, Figure 9.
    pub persistence: f64,
}

/// Mixtral-8x7B-Instruct.
pub const MIXTRAL: Model = Model {
    name: "Mixtral",
    layers: 32,
    experts: 8,
    k: 2,
    width: 4096,
    inner: 14336,
    attention: 2 * 4096 * 4096 + 2 * 4096 * 1024,
    shared: 0,
    persistence: 0.09,
};

/// Qwen2-57B-A14B-Instruct.
pub const QWEN2: Model = Model {
    name: "Qwen2",
    layers: 28,
    experts: 64,
    k: 8,
    width: 3584,
    inner: 2560,
    attention: 2 * 3584 * 3584 + 2 * 3584 * 512,
    shared: 3 * 3584 * 20480,
    persistence: 0.4,
};

/// DeepSeek-V2-Lite-Chat; its first layer has no experts.
pub const DEEPSEEK: Model = Model {
    name: "DeepSeek",
    layers: 26,
    experts: 64,
    k: 6,
    width: 2048,
    inner: 1408,
    attention: 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 2048 * 2048,
    shared: 2 * 3 * 2048 * 1408,
    persistence: 0.465,
};

/// All of them, in the order of Table II.
pub const MODELS: [Model; 3] = [MIXTRAL, QWEN2, DEEPSEEK];

impl Model {
    /// Weights of a routed expert: gate, up and down.
    pub const fn expert(&self) -> u64 {
        3 * self.width * self.inner
    }

    /// Weights that every token uses in a layer.
    pub const fn dense(&self) -> u64 {
        self.attention + self.shared
    }
}
