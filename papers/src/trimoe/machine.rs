//! The machine of Table 1 and the costs of an expert on its units, with the source of every constant.

use super::models::Model;
use moec_ir::{Activation, Glu};
use moec_ndp::allocation::{DimmConfig, DramLayout, Expert, RowAllocator};
use moec_ndp::emit::{Output, emit};
use moec_ndp::image::Shape;
use moec_ndp::machine::{Bus, Program, times};
use moec_ndp::steps::{Before, Rates, Rows, StepsError, System};
use moec_runtime::schedule::{Costs, NearCosts, Table};

/// Operations a second of the GPU in bf16, and bytes a second of its memory. Table 1.
pub const GPU_FLOPS: f64 = 819.6e12;
const HBM: f64 = 2.04e12;
/// Tokens of an expert, and the part of [`GPU_FLOPS`] that the GPU reaches with them. Figure 5(a), §3.1.
const GPU_POINT: (f64, f64) = (256.0, 0.30);
/// The part of [`GPU_FLOPS`] that it never passes. Assumed.
const GPU_MOST: f64 = 0.75;
/// Tokens of an expert, and operations a second that the CPU reaches with them. §3.2: 10 to 40 TFLOPS for
/// tens to hundreds of tokens; read as 10 with 16 tokens, which fill a tile, and 40 from 256 on, by powers
/// between them.
const AMX: [(u32, f64); 6] =
    [(16, 10e12), (32, 14.1e12), (64, 20e12), (128, 28.3e12), (256, 40e12), (1024, 40e12)];
/// The same of moec's kernels: one core with AMX reaches this part of [`AMX_FLOPS`] divided by its cores.
const AMX_MOEC: [(u32, f64); 6] =
    [(16, 0.25), (32, 0.45), (64, 0.62), (128, 0.66), (256, 0.68), (1024, 0.68)];
/// Operations a second of the CPU's tiles in bf16. Table 1.
pub const AMX_FLOPS: f64 = 90.1e12;
/// Bytes a second between host and GPU. Table 1.
pub const PCIE: f64 = 64e9;
/// Memory channels of the host. Table 1.
pub const CHANNELS: f64 = 8.0;
/// Bytes a second of a DIMM-Link. Table 1.
pub const LINK: f64 = 25e9;
/// The part of [`GPU_FLOPS`] that attention reaches where memory does not bind. Assumed.
pub const ATTENTION: f64 = 0.5;
/// Positions of a sequence on average. Found from the 0.68 ms of §5.5: as long as attention of Qwen3 then
/// takes at batch 512.
pub const CONTEXT: f64 = 1188.0;
/// Part of a layer's routed experts that the GPU's memory holds. §2.2: more than 90 % are in the host's.
const CACHED: f64 = 0.10;

/// Tokens up to which a stream is timed; beyond, a token takes as long as the last ones.
const NDP_TOKENS: u32 = 64;

/// The machine of Table 1, or one that differs.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Rates of memory.
    pub rates: Rates,
    /// DIMMs with NDP units.
    pub dimms: usize,
    /// Whether there is a GPU.
    pub gpu: bool,
    /// Multiple of the CPU's calculation.
    pub cpu: f64,
    /// Whether the CPU computes as moec's kernels do, and not as the paper's.
    pub moec_kernels: bool,
    /// Multiple of the rate of a DIMM-Link.
    pub link: f64,
    /// Part of a layer's experts that the GPU holds.
    pub cached: f64,
    /// Whether attention reads keys and values over PCIe, as §4.1 has it, or finds them in the GPU's memory.
    pub kv_on_host: bool,
    /// Whether rows between GPU and host take time.
    pub rows: bool,
    /// True if the scheduler may let the GPU read experts; else it computes only those in its memory.
    pub fetches: bool,
    /// True if experts are placed by their mean loads before the first step; else loads are assumed equal.
    pub profiled: bool,
    /// Whether moves take time.
    pub moves: bool,
    /// Whether links may move experts while others are computed, and not in the window of attention alone.
    pub links_always: bool,
}

impl Machine {
    /// Table 1 with these rates.
    pub const fn new(rates: Rates) -> Self {
        Self {
            rates,
            dimms: 16,
            gpu: true,
            cpu: 1.0,
            moec_kernels: false,
            link: 1.0,
            cached: CACHED,
            kv_on_host: false,
            rows: true,
            fetches: true,
            profiled: true,
            moves: true,
            links_always: false,
        }
    }

    /// System to simulate.
    pub fn system(&self, model: &Model) -> System {
        System {
            pcie_gbs: PCIE * 1e-9,
            link_gbs: LINK * self.link * 1e-9,
            moves_take_time: self.moves,
            ..System::trimoe(self.rates, model.expert_bytes())
        }
    }

    /// Frames of the GPU's memory for a layer's experts.
    pub fn frames(&self, model: &Model) -> usize {
        if self.gpu { (model.experts as f64 * self.cached) as usize } else { 0 }
    }

    /// Costs of experts, with `f_calc` of an NDP unit.
    ///
    /// # Errors
    /// Our bug: a table that does not ascend.
    pub fn costs(&self, model: &Model, ndp: &Table) -> Result<Costs, StepsError> {
        let (flops, bytes) = (2.0 * model.expert() as f64, model.expert_bytes());
        let micro = |x: f64| x * 1e6;
        let gpu = |n: u32| {
            // Up to the point of Figure 5(a) all loads take as long: weights are read, tiles are not full.
            let n = f64::from(n);
            let part = (GPU_POINT.1 * n / GPU_POINT.0).min(GPU_MOST);
            micro((flops * n / (GPU_FLOPS * part)).max(bytes as f64 / HBM))
        };
        let gpu_points = [1, 256, 512, 640, 1024, 4096].map(|n| (n, gpu(n)));
        let rates = if self.moec_kernels { AMX_MOEC.map(|(n, part)| (n, AMX_FLOPS * part)) } else { AMX };
        let cpu = rates.map(|(n, rate)| (n, micro(flops * f64::from(n) / (rate * self.cpu))));
        // An expert's time at so many microseconds for a byte.
        let expert = |us: f64| bytes as f64 * us;
        let near = NearCosts {
            table: ndp.clone(),
            internal_us: expert(1e-3 / self.rates.private_gbs),
            link_us: expert(micro(1.0 / (LINK * self.link))),
        };
        let pcie = if self.fetches { micro(1.0 / PCIE) } else { f64::INFINITY };
        Ok(Costs {
            gpu: if self.gpu { Some(Table::new(gpu_points.to_vec())?.into()) } else { None },
            cpu: Table::new(cpu.to_vec())?.into(),
            near: (self.dimms > 0).then_some(near),
            bring_us: expert(pcie),
            first_bring_us: 0.0,
            launch_us: 0.0,
            striped_us: expert(1e-3 / (CHANNELS * self.rates.striped_gbs)),
            localized_us: expert(1e-3 / self.rates.localized_gbs),
            row_us: (4 * model.width) as f64 * pcie,
        })
    }

    /// Attention, router and shared experts of a layer for a batch.
    pub fn before(&self, model: &Model, batch: usize) -> Before {
        let n = batch as f64;
        let weights =
            model.attention + model.shared as u64 * model.expert() + model.width * model.experts as u64;
        let kv = n * CONTEXT * model.kv_bytes as f64;
        let flops = 2.0 * n * weights as f64 + n * CONTEXT * model.attention_flops as f64;
        let bytes = 2.0 * weights as f64;
        if !self.gpu {
            let peak = AMX_FLOPS * self.cpu * 0.5;
            return Before { calc_us: flops / peak * 1e6, host_bytes: bytes + kv };
        }
        let local = if self.kv_on_host { bytes } else { bytes + kv };
        let calc_us = (flops / (GPU_FLOPS * ATTENTION)).max(local / HBM) * 1e6;
        Before { calc_us, host_bytes: if self.kv_on_host { kv } else { 0.0 } }
    }

    /// Rows of a batch in bf16, each of which goes to the host once and comes back once.
    pub fn rows(&self, model: &Model, batch: usize) -> Rows {
        let bytes = if self.rows { 2.0 * batch as f64 * model.width as f64 } else { 0.0 };
        Rows { to_host: bytes, to_gpu: bytes, prompt: false }
    }
}

/// `f_calc` of an NDP unit: the command stream of an expert, timed on the machine that executes it.
///
/// # Errors
/// Fails if there is no such stream, with the reason.
pub fn ndp_times(model: &Model) -> Result<Table, String> {
    let message = |e: &dyn std::error::Error| format!("an expert of {}: {e}", model.name);
    let all_dimms = DimmConfig::trimoe();
    let shape = Shape {
        hidden: model.width as u32,
        inner: model.inner as u32,
        glu: Glu::Gated(Activation::Silu),
        bias: false,
    };
    let mut allocator = RowAllocator::new(all_dimms, shape, NDP_TOKENS).map_err(|e| message(&e))?;
    let allocation = allocator
        .allocate(Expert { layer: 0, number: 0 }, DramLayout::Localized(0))
        .map_err(|e| message(&e))?;
    let rows = allocation.rows.clone();
    let stream =
        emit(&shape, &all_dimms, 0, rows, allocator.boxes(), Output::Slots).map_err(|e| message(&e))?;
    let program = Program::new(stream).map_err(|e| message(&e))?;
    let points = times(&program, &Bus::trimoe(), &[1, 2, 4, 8, 16, 32, NDP_TOKENS]);
    Table::new(points).map_err(|e| message(&e))
}
