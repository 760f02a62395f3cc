//! Costs and loads as in the paper, and all policies over steps with drifting loads. The tests of this folder
//! and the benchmark `sim/examples/schedule_rate.rs` include this file. So the parent module imports items of
//! this crate, by the names used here.

use super::{Costs, ExpertScheduler, NearCosts, Setup, System, Table, Window};
use moec_sim::sample_experts;

/// A model of Table 2: experts, experts of a token, width, width of an expert.
pub(super) struct Model {
    pub(super) name: &'static str,
    pub(super) experts: usize,
    pub(super) k: usize,
    pub(super) width: u64,
    pub(super) inner: u64,
}

pub(super) const MODELS: [Model; 3] = [
    Model { name: "DeepSeek-V2", experts: 160, k: 6, width: 5120, inner: 1536 },
    Model { name: "Qwen3-235B", experts: 128, k: 8, width: 4096, inner: 1536 },
    Model { name: "GLM-4.5-Air", experts: 128, k: 8, width: 4096, inner: 1408 },
];

/// Reproducible random numbers (SplitMix64).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(super) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A standard normal number.
    pub(super) fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

/// Costs for a model on the hardware of Table 1: rooflines, with half of the peak for the CPU's tiles and for
/// the GPU.
pub(super) fn costs(model: &Model) -> Costs {
    let weights = 3 * model.width * model.inner;
    let bytes = 2 * weights;
    let line = |flops: f64, floor: f64| {
        let at = |n: u32| (n, floor.max(f64::from(n) * 2.0 * weights as f64 / flops * 1e6));
        let tokens = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
        Table::new(tokens.map(at).to_vec()).expect("tokens ascend")
    };
    Costs {
        gpu: Some(line(819.6e12 * 0.5, bytes as f64 / 2.04e12 * 1e6).into()),
        cpu: line(90.1e12 * 0.5, 20.0).into(),
        near: Some(NearCosts {
            table: line(256e9, 0.0),
            internal_us: bytes as f64 * (1e6 / 153.6e9),
            link_us: bytes as f64 * (1e6 / 25e9),
        }),
        bring_us: bytes as f64 * (1e6 / 64e9),
        first_bring_us: 0.0,
        launch_us: 0.0,
        striped_us: bytes as f64 * (1e6 / 307.2e9),
        localized_us: bytes as f64 * (1e6 / 38.4e9),
        row_us: 4.0 * model.width as f64 * (1e6 / 64e9),
    }
}

/// Shares of tokens with the skew of Figure 3: 5 % hot experts have 22 %, 25 % warm ones 70 %, the others 8
/// %.
pub(super) fn popularity(random: &mut Random, experts: usize) -> Vec<f64> {
    let (hot, warm) = (experts.div_ceil(20), experts.div_ceil(4));
    let cold = experts.saturating_sub(hot + warm).max(1);
    let mut shares: Vec<f64> = (0..experts)
        .map(|e| match e {
            _ if e < hot => 0.22 / hot as f64,
            _ if e < hot + warm => 0.70 / warm as f64,
            _ => 0.08 / cold as f64,
        })
        .map(|share| share * (0.4 * random.normal()).exp())
        .collect();
    for i in (1..shares.len()).rev() {
        shares.swap(i, random.below(i + 1));
    }
    shares
}

/// Loads of a step: each token samples distinct experts by their shares.
pub(super) fn loads(random: &mut Random, shares: &[f64], k: usize, batch: usize) -> Vec<u32> {
    let mut loads = vec![0; shares.len()];
    sample_experts(&mut || random.unit(), shares, k, batch, &mut loads);
    loads
}

/// Number of layers, each with loads of its own.
pub(super) const LAYERS: usize = 4;

/// Drifting shares of a layer: from step to step, their logarithms keep 0.9 of their deviation.
pub(super) struct Drift {
    random: Random,
    base: Vec<Vec<f64>>,
    off: Vec<Vec<f64>>,
}

impl Drift {
    pub(super) fn new(seed: u64, experts: usize) -> Self {
        let mut random = Random(seed);
        let base = (0..LAYERS).map(|_| popularity(&mut random, experts)).collect();
        Self { random, base, off: vec![vec![0.0; experts]; LAYERS] }
    }

    pub(super) fn loads(&mut self, layer: usize, k: usize, batch: usize) -> Vec<u32> {
        for x in &mut self.off[layer] {
            *x = 0.9 * *x + 0.436 * self.random.normal();
        }
        let shares: Vec<f64> =
            self.base[layer].iter().zip(&self.off[layer]).map(|(b, x)| b * (0.7 * x).exp()).collect();
        loads(&mut self.random, &shares, k, batch)
    }
}

pub(super) fn setup(system: System, model: &Model) -> Setup {
    let window = Window { pcie_us: 680.0, link_us: 680.0 };
    Setup {
        system,
        costs: costs(model),
        layers: LAYERS,
        experts: model.experts,
        memories: 16,
        frames: 8,
        window,
    }
}

/// Mean makespan of a step of a layer, with the scheduler that gave it.
pub(super) fn run(system: System, model: &Model, batch: usize, steps: usize) -> (f64, ExpertScheduler) {
    let mut scheduler = ExpertScheduler::new(setup(system, model)).expect("a sound setup");
    let mut drift = Drift::new(3, model.experts);
    for layer in 0..LAYERS {
        let total: f64 = drift.base[layer].iter().sum();
        let mean = |b: &f64| b / total * (batch * model.k) as f64;
        let loads: Vec<f64> = drift.base[layer].iter().map(mean).collect();
        scheduler.profile(layer, &loads).expect("a layer");
    }
    let mut sum = 0.0;
    for _ in 0..steps {
        for layer in 0..LAYERS {
            let loads = drift.loads(layer, model.k, batch);
            sum += scheduler.step(layer, &loads).expect("a layer").makespan_us;
        }
    }
    (sum / (steps * LAYERS) as f64, scheduler)
}
