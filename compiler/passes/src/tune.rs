//! Pass `tune`: the schedule of each matrix kernel, which divides its work.
//!
//! A schedule changes no result, so it is chosen when everything else about a kernel is known. The cost model
//! of the target chooses it, or measurements do if tuning was requested. Entry points that call one kernel
//! with different numbers of rows may get different schedules of it.

use crate::decisions::{
    DecisionLoad, Decisions, Figure, KernelDecision, Measured, Predicted, ScheduleSource, VERSION, pieces,
};
use moec_base::error::{Error, Result};
use moec_cpu::{CpuTarget, KernelSpec, Schedule};
use moec_ir::EntryKind;
use moec_ir::plan::{Code, Entry, Plan, RowSpace};
use std::collections::HashMap;

/// Share by which a schedule must be faster than the model's choice to replace it: less is noise.
pub const MARGIN: f64 = 0.02;

/// Measures times of kernels on this machine.
pub trait KernelTimer: std::fmt::Debug {
    /// Threads of the measurements.
    fn threads(&self) -> usize;

    /// Seconds of a kernel, called with `n` valid rows, in every promising schedule, that of the model
    /// included; empty if no time is left. They are those of the whole matrix, on all threads. `left` kernels
    /// share the remaining time.
    ///
    /// # Errors
    /// Fails if threads do not start, or on an interrupt. A bug of the compiler: a kernel that cannot be
    /// timed.
    fn measure(
        &mut self,
        spec: &KernelSpec,
        n: usize,
        model: Schedule,
        left: usize,
    ) -> Result<Vec<(Schedule, f64)>>;
}

/// A kernel as one entry point calls it.
struct Job {
    spec: KernelSpec,
    rows: usize,
}

/// Result of a job.
struct TuneResult {
    schedule: Schedule,
    by: ScheduleSource,
    measured: Vec<(Schedule, f64)>,
}

/// Expected rows of a step. A prompt counts one row of logits, as generation uses it.
pub fn rows(entry: &Entry, of: RowSpace) -> usize {
    match (of, entry.kind) {
        (RowSpace::Outputs, EntryKind::Prefill(_)) => 1,
        (RowSpace::Tokens | RowSpace::Outputs, kind) => kind.rows(),
    }
}

/// Sets the schedule of every matrix kernel of the plan and records the reason.
///
/// # Errors
/// Fails if a kernel cannot be timed, or on an interrupt.
pub fn tune(
    plan: &mut Plan,
    kernels: &mut Vec<KernelSpec>,
    target: &CpuTarget,
    mut timer: Option<&mut (dyn KernelTimer + '_)>,
) -> Result<Decisions> {
    // Kernels to time, each once, in the order of the plan.
    let mut jobs: Vec<Job> = Vec::new();
    let mut job_ids: HashMap<(u32, usize), usize> = HashMap::new();
    for entry in &plan.entries {
        for step in &entry.steps {
            let Code::Kernel(id) = step.code else { continue };
            let spec = kernels.get(id as usize).ok_or_else(|| Error::bug("a step without its kernel"))?;
            let rows = rows(entry, step.rows);
            if target.load(spec, rows).is_some() {
                job_ids.entry((id, rows)).or_insert_with(|| {
                    jobs.push(Job { spec: spec.clone(), rows });
                    jobs.len() - 1
                });
            }
        }
    }
    let mut found = Vec::new();
    for (at, job) in jobs.iter().enumerate() {
        found.push(find(job, target, timer.as_deref_mut(), jobs.len() - at)?);
    }

    let mut chosen: Vec<KernelSpec> = Vec::new();
    let mut ids: HashMap<String, u32> = HashMap::new();
    let mut decisions = Vec::new();
    for entry in &mut plan.entries {
        let (kind, first) = (entry.kind.to_string(), decisions.len());
        for at in 0..entry.steps.len() {
            let (code, space) = (entry.steps[at].code, entry.steps[at].rows);
            let Code::Kernel(old) = code else { continue };
            let rows = rows(entry, space);
            let job = job_ids.get(&(old, rows)).copied();
            let spec = match job {
                Some(job) => jobs[job].spec.with_schedule(found[job].schedule),
                None => kernels[old as usize].clone(),
            };
            let new = u32::try_from(chosen.len()).map_err(|_| Error::limit("too many kernels"))?;
            let id = *ids.entry(target.symbol(&spec)).or_insert_with(|| {
                chosen.push(spec.clone());
                new
            });
            let step = &mut entry.steps[at];
            (step.code, step.grid) = (Code::Kernel(id), target.grid(&spec));
            let known = decisions[first..].iter().any(|d: &KernelDecision| (d.kernel, d.rows) == (id, rows));
            if let Some(job) = job.filter(|_| !known) {
                decisions.push(decision(target, &spec, id, &kind, rows, &found[job])?);
            }
        }
    }
    plan.kernels = chosen.iter().map(|k| target.reference(k)).collect();
    let scratch = chosen.iter().map(|k| super::memory::aligned(target.scratch_bytes(k) as u64)).max();
    plan.scratch_bytes = scratch.unwrap_or(0);
    *kernels = chosen;
    Ok(Decisions {
        decisions: Vec::new(),
        expert_use: Vec::new(),
        version: VERSION,
        activations: target.activations().name().to_owned(),
        rounding: moec_config::Rounding::default(),
        threads: timer.map(|t| t.threads()),
        figures: figures(target),
        kernels: decisions,
    })
}

fn find(
    job: &Job,
    target: &CpuTarget,
    timer: Option<&mut (dyn KernelTimer + '_)>,
    left: usize,
) -> Result<TuneResult> {
    let Job { spec, rows } = job;
    let model = target.cheapest(spec, *rows).ok_or_else(|| Error::bug("a matrix without a schedule"))?;
    let measured = match timer {
        Some(timer) => timer.measure(spec, *rows, model, left)?,
        None => Vec::new(),
    };
    let schedule = fastest(&measured, model);
    let by = if measured.is_empty() { ScheduleSource::Model } else { ScheduleSource::Measured };
    Ok(TuneResult { schedule, by, measured })
}

/// The fastest schedule, if it is faster than the model's by more than [`MARGIN`].
pub fn fastest(measured: &[(Schedule, f64)], model: Schedule) -> Schedule {
    let of_model = measured.iter().find(|(s, _)| *s == model).map_or(0.0, |(_, t)| *t);
    let best = measured.iter().min_by(|a, b| a.1.total_cmp(&b.1));
    best.filter(|(_, t)| *t < of_model * (1.0 - MARGIN)).map_or(model, |(s, _)| *s)
}

fn decision(
    target: &CpuTarget,
    spec: &KernelSpec,
    kernel: u32,
    entry: &str,
    rows: usize,
    found: &TuneResult,
) -> Result<KernelDecision> {
    let none = || Error::bug("a matrix without an estimate");
    let (load, e) = target.load(spec, rows).zip(target.estimate(spec, rows)).ok_or_else(none)?;
    let (format, compute) = spec.weight_format().zip(spec.compute()).ok_or_else(none)?;
    Ok(KernelDecision {
        kernel,
        kind: spec.kind().to_owned(),
        entry: entry.to_owned(),
        rows,
        load: DecisionLoad { matrices: load.matrices, rows: load.rows, k: load.k, n: load.n },
        format: format.name().to_owned(),
        compute: compute.name().to_owned(),
        why: target.why(format, compute, rows),
        schedule: pieces(target, spec, found.schedule),
        by: found.by,
        predicted: Predicted {
            ms: e.seconds() * 1e3,
            gops: e.operations / e.seconds() / 1e9,
            gb_per_s: e.bytes / e.seconds() / 1e9,
            bound: e.bound().name().to_owned(),
            overhead: e.overhead,
        },
        measured: found
            .measured
            .iter()
            .map(|&(s, seconds)| Measured { schedule: pieces(target, spec, s), ms: seconds * 1e3 })
            .collect(),
    })
}

/// Figures of the machine in the cost model.
fn figures(target: &CpuTarget) -> Vec<Figure> {
    let f = target.figures();
    let rate = |what: &str, r: &moec_cpu::Rate, unit: &str| Figure {
        what: what.to_owned(),
        value: r.value / 1e9,
        unit: unit.to_owned(),
        source: r.source.clone(),
    };
    vec![
        rate("f32", &f.f32, "GOP/s"),
        rate("bf16", &f.bf16, "GOP/s"),
        rate("i8", &f.bytes, "GOP/s"),
        rate("memory", &f.read, "GB/s"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedule_changes_only_for_a_clear_speedup() {
        let model = Schedule::default();
        let other = Schedule { ahead: 0, ..model };
        let third = Schedule { unroll: 8, ..model };
        assert_eq!(fastest(&[(model, 1.0), (other, 0.985)], model), model);
        assert_eq!(fastest(&[(model, 1.0), (other, 0.97), (third, 0.975)], model), other);
        assert_eq!(fastest(&[(other, 2.0), (model, 1.0)], model), model);
        assert_eq!(fastest(&[], model), model);
    }
}
