//! A bundle whose experts are assigned to units in every step: the runtime's own scheduler decides, with
//! recorded routing, and the backend of the NDP DIMMs says what then happens, and for how long.

use super::bundle::Request;
use super::paged::routing;
use moec_backend::{StreamRun, StreamWorkload};
use moec_base::error::{Error, Result};
use moec_bundle::read::Bundle;
use moec_ir::plan::Scheduled;
use moec_sim::cache::Trace;
use moec_targets::backends;

/// Tokens of each sequence that are decoded by default.
pub const DECODED: u32 = 16;

/// Result.
#[derive(Clone, Debug)]
pub struct Simulated {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens decoded of each sequence.
    pub decode: u32,
    /// Sequences that are decoded together.
    pub batch: u32,
    /// Tokens of recorded routing that there are; more are taken from their start again.
    pub recorded: usize,
    /// The simulated run.
    pub run: StreamRun,
}

/// Simulates a bundle whose experts are assigned while it runs.
///
/// # Errors
/// No recorded routing, or that of another model; a device that has not the bundle's units.
pub fn assigned(
    bundle: &Bundle,
    schedule: &Scheduled,
    request: &Request<'_>,
    batch: Option<u32>,
) -> Result<Simulated> {
    let (device, plan) = (request.device, &bundle.plan);
    let name = |unit: Option<u32>| unit.and_then(|u| plan.units.get(u as usize)).map(|u| u.name.clone());
    let has = |unit| name(unit).is_none_or(|name| device.units.iter().any(|u| u.name == name));
    let found = name(Some(schedule.cold))
        .filter(|_| has(schedule.hot))
        .and_then(|name| device.units.iter().find(|u| u.name == name));
    let unit = found.ok_or_else(|| {
        Error::input(format!("`{}` has not the units of the bundle", device.name))
            .hint("leave `--target` out: the bundle knows its own device")
    })?;
    let streams = backends::command_streams(device.backend_of(unit))
        .ok_or_else(|| Error::bug("a schedule of a unit without NDP command streams"))?;
    let k = |layer: u32| Some(plan.placement.experts.iter().find(|t| t.layer == layer)?.k);
    let layers = plan.experts.layers.iter();
    let layers: Vec<(u32, u32)> = layers.filter_map(|l| Some((l.starts.len() as u32, k(l.layer)?))).collect();
    let trace = routing(&layers, request)?;
    let widest = plan.entries.iter().filter(|e| !e.kind.is_prefill()).map(|e| e.kind.rows() as u32).max();
    let chunk = plan.entries.iter().find(|e| e.kind.is_prefill()).map_or(1, |e| e.kind.rows() as u32);
    let batch = batch.or(widest).unwrap_or(1).max(1);
    let (prompt, decode) = (request.prompt.unwrap_or(0), request.decode.unwrap_or(DECODED));
    if prompt == 0 && decode == 0 {
        return Err(
            Error::usage("no step is left to simulate").hint("`--prompt` or `--decode` says how many tokens")
        );
    }
    let mut steps = Vec::new();
    let mut left = prompt;
    while left > 0 {
        steps.push(left.min(chunk));
        left -= left.min(chunk);
    }
    let prompts = steps.len();
    steps.extend((0..decode).map(|_| batch));
    let loads = loads(&trace, &layers, &steps);
    let link = |unit: Option<u32>| {
        let own = name(unit).and_then(|name| device.units.iter().find(|u| u.name == name))?;
        let (host, there) = (device.cpu_memory()?, device.memory_of(own)?);
        device.links.iter().find(|l| l.from == host && l.to == there).map(moec_device::Link::rate)
    };
    let experts = &plan.experts;
    let scene = StreamWorkload {
        experts,
        schedule,
        loads: &loads,
        rows: &steps,
        prompts,
        link_gb_per_s: link(schedule.hot),
    };
    let run = streams
        .simulate(unit, &scene)
        .map_err(|why| Error::limit("the schedule cannot be simulated").because(why))?;
    Ok(Simulated { prompt, decode, batch, recorded: trace.tokens(), run })
}

/// By step, layer and expert: rows of tokens in the order in which they were recorded, from their start again
/// where they end.
fn loads(trace: &Trace, layers: &[(u32, u32)], steps: &[u32]) -> Vec<Vec<Vec<u32>>> {
    let mut at = 0;
    let mut all = Vec::with_capacity(steps.len());
    for &rows in steps {
        let mut step: Vec<Vec<u32>> = layers.iter().map(|&(experts, _)| vec![0; experts as usize]).collect();
        for token in at..at + rows as usize {
            for (layer, loads) in step.iter_mut().enumerate() {
                let of = trace.step(token % trace.tokens().max(1), layer);
                of.chosen.iter().for_each(|&e| loads[usize::from(e)] += 1);
            }
        }
        at += rows as usize;
        all.push(step);
    }
    all
}
