//! The hot share that the runtime's planner chooses, from tables of a phone and a model; and the one that is
//! best in simulation.

use super::activity::{Activity, popularity};
use super::decode::{Case, Size};
use super::dense::{CLUSTER, Dense, DenseUnits, LONG, PAGED, bundle};
use super::in_memory::InMemory;
use super::models::{CHANNEL, GROUPED, Model, PREDICTOR, TOGETHER};
use super::phone::{Cluster, Memory, Phone};
use moec_sim::neurons::Activations;
use moec_sim::neurons::plan::{Share, Tables, hot_share};
use moec_sim::neurons::{NeuronError, Recorded};

/// Tables of a layer, everything in memory, whose rates are given.
///
/// # Errors
/// Our bug: an invalid width.
pub fn tables(phone: &Phone, memory: &Memory, model: &Model, batch: usize) -> Result<Tables, NeuronError> {
    let of = popularity(model.active, model.inner);
    let active: Vec<f64> = of.iter().map(|p| 1.0 - (1.0 - p).powi(batch as i32)).collect();
    let requests: f64 = of.iter().sum::<f64>() * batch as f64;
    let union: f64 = active.iter().sum();
    let rows = (1.0 + 2.0 * TOGETHER) * model.hidden as f64;
    // As many multiply-adds as tokens that share a neuron.
    let neuron = (rows * GROUPED).max(phone.cpu_bytes_of(rows * requests / union));
    // Both units at once, as most of the time.
    let (cpu, npu) = memory.rates(1.0, rows * GROUPED / neuron, true);
    let predict = PREDICTOR.max(phone.cpu_bytes_of(2.0 * PREDICTOR * batch as f64));
    let dense = model.neuron() * CHANNEL;
    let dense_work =
        Dense { phone, model, memory: *memory, units: DenseUnits::One, batch: batch as f64, part: 1.0 };
    let bundle = bundle(model, &phone.ufs.random)?;
    let seconds =
        |bytes: u64| if bytes == 0 { 0.0 } else { phone.ufs.random_seconds(bytes, 128e6, Cluster::Mid) };
    // This share of the requested gates is active, and takes the second read.
    let read = seconds(bundle.gate().bytes) + TOGETHER * seconds(bundle.up_down().bytes);
    Ok(Tables {
        active,
        cluster: CLUSTER,
        dense: vec![(CLUSTER, CLUSTER as f64 * dense / npu), (model.inner, model.inner as f64 * dense / npu)],
        sparse: neuron / cpu,
        predict: predict / cpu,
        gate: 0.0,
        attention: dense_work.attention().all,
        bytes: dense,
        disk: phone.ufs.sequential.rate(LONG),
        read,
        memory: memory.both,
        held: model.inner,
    })
}

/// The planner's share.
///
/// # Errors
/// As [`tables`].
pub fn planned(phone: &Phone, model: &Model, batch: usize) -> Result<(f64, Share), NeuronError> {
    let share = hot_share(&tables(phone, &phone.memory, model, batch)?, None)?;
    Ok((share.hot as f64 / model.inner as f64, share))
}

/// Source of the planner's knowledge about reads from UFS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadsFrom {
    /// It replays a trace of the model's activations.
    Trace,
    /// Not modelled: reads are left out.
    Nowhere,
}

/// Steps of the planner's trace that fill its cache, and that count.
const TRACE: [usize; 2] = [60, 60];
/// Neurons that are drawn for it: none that a simulation draws.
const TRACE_SEED: u64 = 1001;

/// Requests of a layer of so many sequences, step by step.
pub fn trace(model: &Model, batch: usize) -> Activations {
    let steps = TRACE.iter().sum();
    let sequence = |seed| {
        let mut of = Activity::new(model, 1, seed);
        let token = move || {
            let routed = of.token().into_iter().flatten();
            routed.map(|r| (r.expert, r.neurons.into_iter().map(|n| n.0).collect())).collect()
        };
        std::iter::repeat_with(token).take(steps)
    };
    let seeds = (TRACE_SEED..).take(batch);
    let (matrices, neurons) = (model.experts as u32, model.inner as u32);
    Activations { matrices, neurons, tokens: seeds.flat_map(sequence).collect() }.batched(batch)
}

/// The planner's share with weights on UFS, of which memory holds a part.
///
/// # Errors
/// As [`tables`].
pub fn planned_on_ufs(
    phone: &Phone,
    model: &Model,
    held: f64,
    batch: usize,
    reads: ReadsFrom,
) -> Result<f64, NeuronError> {
    let mut tables = tables(phone, &phone.memory.scaled(1.0 / PAGED), model, batch)?;
    tables.held = (held * model.inner as f64) as usize;
    let share = match reads {
        ReadsFrom::Trace => {
            let trace = trace(model, batch);
            hot_share(&tables, Some(&Recorded { activations: &trace, warmup: TRACE[0] }))?
        }
        ReadsFrom::Nowhere => hot_share(&Tables { read: 0.0, ..tables }, None)?,
    };
    Ok(share.hot as f64 / model.inner as f64)
}

/// The best of all shares in simulation, everything in memory, with the seconds of a step.
///
/// # Errors
/// As [`InMemory::run`].
pub fn searched(phone: &Phone, model: &Model, batch: usize) -> Result<(f64, f64), NeuronError> {
    let mut best = (0.0, f64::INFINITY);
    for clusters in 0..=model.inner / CLUSTER {
        let hot = (clusters * CLUSTER) as f64 / model.inner as f64;
        let seconds = InMemory { phone, model, npu: true, hot, batch }.run()?.all;
        if seconds < best.1 {
            best = (hot, seconds);
        }
    }
    Ok(best)
}

/// Shares that are tried where weights are on UFS: a run for each.
pub const SHARES: [f64; 8] = [0.0, 0.036, 0.072, 0.11, 0.18, 0.25, 0.36, 0.5];

/// The best of [`SHARES`] in a short simulation with weights on UFS.
///
/// # Errors
/// As [`Case::run`].
pub fn searched_on_ufs(case: &Case<'_>) -> Result<f64, NeuronError> {
    let size = Size { layers: 1, warmup: case.size.warmup / 2, tokens: case.size.tokens.min(60) };
    let mut best = (0.0, 0.0);
    for hot in SHARES {
        let speed = Case { hot, size, ..*case }.run()?.speed();
        if speed > best.1 {
            best = (hot, speed);
        }
    }
    Ok(best.0)
}
