//! Experts that stay on disk, and the memory that the others leave them.

use crate::op::{Attributes, Score, attributes};
use crate::regions::{ArtifactBytes, Regions};
use crate::text::ops::{Parsed, Reader, Word, Writer};
use bincode::{Decode, Encode};

attributes! {
    /// Memory of a run whose experts do not all fit.
    ///
    /// Everything else is resident: the sum of `resident`, `process`, all frames and loaded artifacts is the
    /// peak, and at most `budget`.
    #[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
    pub struct Paging as "paging" {
        /// Bytes that a run may take, the kernel's page cache included.
        pub budget: u64,
        /// Threads that the sum is for: each has scratch of its own.
        pub threads: u32,
        /// Bytes of weights outside of experts, activations, scratch and KV cache.
        pub resident: u64,
        /// Bytes left for the process itself: code, heap, stacks, tokenizer.
        pub process: u64,
        /// Bytes of a frame: the largest expert, its matrices at multiples of a block.
        pub frame_bytes: u64,
        /// Frames that hold experts from one token to the next.
        pub frames: u32,
        /// Staging frames, for experts that the cache does not keep: at least 2.
        pub staging: u32,
        /// Most bytes of one read: a multiple of 4096, at most 512 KiB.
        pub block_bytes: u32,
        /// Policy of the cache with its parameters, as the runtime reads it (`lru`, `mrs alpha=0.1 depth=2
        /// bypass=1`).
        pub policy: String,
        /// Experts `(layer, expert)` that are read at the start and never go, the hottest first: fewer than
        /// there are frames. Under a smaller budget the first of them stay.
        pub pinned: Vec<(u32, u32)>,
        /// Neurons that a frame holds up and down of, and gates if these stay on disk, too; 0: a frame holds a
        /// whole expert. Where it is not 0, nothing is pinned, and neither checksums nor uses are known.
        pub neurons: u32,
        /// Layers with routed experts, in order.
        pub layers: Vec<PagedLayer>,
        /// CRC-32C of every matrix, `[layer][expert][gate and up, down]`.
        pub checksums: Vec<u32>,
        /// Uses of each expert in recorded routing, `[layer][expert]`: the counts that a cache begins with,
        /// until it has seen more itself. Empty where nothing was recorded.
        pub uses: Vec<u32>,
        /// Kinds of cores of the CPU, the fastest first, and what each does. Empty where the device file names
        /// none, or where all are alike.
        pub cores: Vec<CoreClass>,
        /// Artifacts of static graphs that a run loads and frees. Empty where all stay in memory; their weights
        /// then count in `resident`.
        pub artifacts: Vec<ArtifactBytes>,
        /// Regions by entry point, in the order of the plan's, if artifacts are loaded and freed. `frames` is
        /// then the most of any.
        pub regions: Vec<Regions>,
    }
}

attributes! {
    /// Cores of one kind. A run finds them by their highest clocks, since numbers of cores differ between
    /// devices.
    #[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
    pub struct CoreClass as "cores" {
        /// Name of the kind.
        pub name: String,
        /// Number of cores.
        pub count: u32,
        /// Whether they compute.
        pub computes: bool,
        /// Whether one of them reads from disk; that one does not compute.
        pub reads: bool,
    }
}

attributes! {
    /// Experts of a layer on disk. Both segments are in one file, each expert's matrices next to each other. Of a layer
    /// whose experts have several hosts, they are in the segments of each: [`crate::plan::Plan::experts_on_disk`].
    /// If neurons are read one by one, up and down are on disk, and gates in memory or on disk.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
    pub struct PagedLayer as "layer" {
        /// Layer.
        pub layer: u32,
        /// Experts.
        pub experts: u32,
        /// Experts per token.
        pub k: u32,
        /// Segment of the gate and up matrices; of gates by themselves, which are resident, where neurons are
        /// read one by one; where gates are read, too, the segment of [`PagedLayer::down`].
        pub gate_up: u32,
        /// Segment of the down matrices; of up and down by neurons, or of whole neurons, where these are read
        /// one by one.
        pub down: u32,
        /// Function that turns the router's logits into scores.
        pub score: Score,
    }
}

impl CoreClass {
    /// Number of cores that compute, of all kinds; `None` if no kind is known.
    pub fn computing(classes: &[Self]) -> Option<u32> {
        let of = |c: &Self| if c.computes { c.count.saturating_sub(u32::from(c.reads)) } else { 0 };
        let all = classes.iter().map(of).fold(0, u32::saturating_add);
        (!classes.is_empty()).then_some(all.max(1))
    }
}

impl Paging {
    /// Whether neurons are read one by one.
    pub const fn by_neurons(&self) -> bool {
        self.neurons > 0
    }

    /// Whether neurons are read one by one, with their gates: a predictor names the neurons whose gates are
    /// read (PowerInfer-2, §4.3).
    pub fn gates_on_disk(&self) -> bool {
        self.by_neurons() && self.layers.iter().any(|l| l.gate_up == l.down)
    }

    /// Segments that stay on disk, layer by layer.
    pub fn segments(&self) -> impl Iterator<Item = u32> {
        let by_neurons = self.by_neurons();
        let of = move |l: &PagedLayer| [(!by_neurons).then_some(l.gate_up), Some(l.down)];
        self.layers.iter().flat_map(of).flatten()
    }

    /// Bytes of all frames; `None` where that overflows.
    pub fn cache_bytes(&self) -> Option<u64> {
        u64::from(self.frames).checked_add(u64::from(self.staging))?.checked_mul(self.frame_bytes)
    }

    /// Most bytes that a run takes; `None` where that overflows.
    pub fn peak(&self) -> Option<u64> {
        let fixed = self.resident.checked_add(self.process)?;
        let of = |regions: &Regions| {
            let frames = u64::from(regions.frames).checked_add(u64::from(self.staging))?;
            frames.checked_mul(self.frame_bytes)?.checked_add(regions.graphs)?.checked_add(fixed)
        };
        let peaks: Vec<u64> = self.regions.iter().map(of).collect::<Option<_>>()?;
        peaks.into_iter().max().or_else(|| of(&self.regions_of(0)))
    }
}
