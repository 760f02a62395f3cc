//! All policies over steps whose loads drift.

use super::workload::*;
use crate::schedule::scheduled::*;
use crate::schedule::{SCHEDULED, System};

/// Layers, of which each has loads of its own.
const LAYERS: usize = 4;

/// A layer's shares wander: their logarithms keep 0.9 of what they are off, from step to step.
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
pub(super) fn run(system: System, model: &Model, batch: usize, steps: usize) -> (f64, Scheduler) {
    let mut scheduler = Scheduler::new(setup(system, model)).expect("a sound setup");
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

#[test]
fn each_part_of_the_scheme_helps() {
    let model = &MODELS[0];
    let mean = SCHEDULED.map(|system| run(system, model, 512, 50).0);
    let [klotski, _, ktransformers, monde, greedy, paper, full, .., complete] = mean;
    assert!(paper < greedy && full < paper && complete < full, "{mean:?}");
    assert!(complete < klotski.min(ktransformers).min(monde), "{mean:?}");
}

#[test]
#[ignore = "it measures"]
fn policies_over_models_and_batches() {
    for model in &MODELS {
        for batch in [32, 128, 512, 768] {
            println!("{} batch {batch}", model.name);
            for system in SCHEDULED {
                let (mean, scheduler) = run(system, model, batch, 100);
                let tally = scheduler.tally();
                println!(
                    "  {:28} {mean:9.1} us, accuracy {:.3}, precision {:.3}",
                    system.name,
                    tally.accuracy(),
                    tally.precision()
                );
            }
        }
    }
}
