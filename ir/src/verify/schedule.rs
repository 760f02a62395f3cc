//! Checks of experts that are assigned while the plan runs, and of streams; [`super`] lists the invariants.

use super::{VerifyError, require};
use crate::plan::{Arg, Builtin, Code, ExpertHomes, Plan, StreamSet};
use crate::schedule::{Hybrid, Schedule, ScheduledLayer};
use std::collections::BTreeSet;

/// Most experts of a layer: what a policy does in a step grows with their number.
const MOST: usize = 1024;
/// Most modules.
const MOST_MODULES: u32 = 256;
/// Most points of a curve.
const POINTS: usize = 1024;

/// Streams belong to units that there are, one set of a layer to each, and steps run those of their own unit.
pub(super) fn check_streams(plan: &Plan) -> Result<(), VerifyError> {
    let mut seen = BTreeSet::new();
    for (i, s) in plan.streams.iter().enumerate() {
        let at = || format!("streams[{i}]");
        let StreamSet { layer, unit, artifact, experts, hidden, inner, bias: _ } = s;
        require((*unit as usize) < plan.units.len() && *unit > 0, at, || format!("unit {unit}"))?;
        require(seen.insert((*layer, *unit)), at, || format!("layer {layer} comes twice"))?;
        require(super::stays_inside(artifact), at, || format!("the path `{artifact}`"))?;
        let some = *experts > 0 && (*experts as usize) <= MOST && *hidden > 0 && *inner > 0;
        require(some, at, || format!("{experts} experts of {hidden} by {inner}"))?;
    }
    for (i, entry) in plan.entries.iter().enumerate() {
        for (j, step) in entry.steps.iter().enumerate() {
            let Code::Builtin(Builtin::Streams { set, .. }) = step.code else { continue };
            let own = plan.streams.get(set as usize).is_some_and(|s| s.unit == step.unit);
            require(
                own,
                || format!("entries[{i}].steps[{j}]"),
                || format!("the streams {set} are not its unit's"),
            )?;
        }
    }
    Ok(())
}

/// Units that are scheduled have the experts that they may be given, and every number is one.
pub(super) fn check(plan: &Plan) -> Result<(), VerifyError> {
    let Some(s) = &plan.schedule else { return Ok(()) };
    let at = || "schedule".to_owned();
    require(s.is_finite(), at, || "a time that is none".into())?;
    let curves =
        [(&s.times.hot, s.hot.is_some()), (&s.times.processor, true), (&s.times.cold, s.cold.is_some())];
    for (curve, needed) in curves {
        let rising = curve.is_sorted_by(|a, b| a.0 < b.0) && curve.len() <= POINTS;
        require(rising && curve.is_empty() != needed, at, || {
            "a curve that is empty, too long or not ascending".into()
        })?;
    }
    require(s.expert_bytes > 0, at, || "experts of no bytes".into())?;
    for unit in [s.hot, s.cold].into_iter().flatten() {
        require(unit > 0 && (unit as usize) < plan.units.len(), at, || format!("unit {unit}"))?;
    }
    require(s.hot.is_none() || s.hot != s.cold, at, || "one unit for hot and cold experts".into())?;
    require(s.modules <= MOST_MODULES && (s.modules > 0) == s.cold.is_some(), at, || {
        format!("{} modules", s.modules)
    })?;
    if let Some(hybrid) = &s.hybrid {
        check_hybrid(plan, s, hybrid).map_err(|why| VerifyError::new(at(), why))?;
    }
    let rising = s.layers.is_sorted_by(|a, b| a.homes < b.homes);
    require(!s.layers.is_empty() && rising, at, || "no layers, or out of order".into())?;
    for (i, layer) in s.layers.iter().enumerate() {
        check_layer(plan, s, layer).map_err(|why| VerifyError::new(format!("schedule.layers[{i}]"), why))?;
    }
    Ok(())
}

/// A unit with frames that no layer is without, and no modules. Who is pinned begins in a frame.
fn check_hybrid(plan: &Plan, s: &Schedule, hybrid: &Hybrid) -> Result<(), String> {
    let experts = s.layers.first().map_or(0, |l| l.modules.len());
    if s.hot.is_none() || s.cold.is_some() {
        return Err("frames of no unit, or beside modules".into());
    }
    if s.layers.iter().any(|l| l.modules.len() != experts || l.cached.is_empty()) {
        return Err("layers that differ, or begin without an expert in a frame".into());
    }
    // A frame is a place for an expert of any layer.
    let bytes = |l: &ScheduledLayer| -> Vec<Option<u64>> {
        let of = |&i: &u32| plan.segments.get(i as usize).and_then(crate::plan::Segment::matrix_bytes);
        l.to_bring().iter().map(of).collect()
    };
    let first = s.layers.first().map(bytes);
    if s.layers.iter().any(|l| Some(bytes(l)) != first) {
        return Err("layers with matrices of other sizes".into());
    }
    if hybrid.k == 0 || hybrid.k as usize > experts {
        return Err(format!("{} of {experts} experts for a token", hybrid.k));
    }
    let cached = s.layers.iter().map(|l| l.cached.len() as u64).sum::<u64>();
    if cached > u64::from(s.frames) {
        return Err(format!("{cached} experts in {} frames", s.frames));
    }
    let there =
        |&(l, e): &(u32, u32)| s.layers.get(l as usize).is_some_and(|l| l.cached.binary_search(&e).is_ok());
    if !hybrid.pinned.is_sorted_by(|a, b| a < b) || !hybrid.pinned.iter().all(there) {
        return Err("a pinned expert that begins in no frame, or out of order".into());
    }
    Ok(())
}

fn check_layer(plan: &Plan, s: &Schedule, layer: &ScheduledLayer) -> Result<(), String> {
    let ScheduledLayer { homes, segments, brought, modules, cached } = layer;
    let Some(ExpertHomes { units, experts, layer: of }) = plan.homes.get(*homes as usize) else {
        return Err(format!("homes {homes} are out of range"));
    };
    let known = [Some(0), s.hot, s.cold];
    let all = known.iter().flatten().all(|u| units.contains(u));
    if !all || !units.iter().all(|&u| known.contains(&Some(u))) {
        return Err(format!("its units are {units:?}"));
    }
    let of_module = |&m: &i32| m == -1 || u32::try_from(m).is_ok_and(|m| m < s.modules);
    if modules.len() != experts.len() || modules.len() > MOST || !modules.iter().all(of_module) {
        return Err("an expert in no module".into());
    }
    let inside = cached.last().is_none_or(|&last| (last as usize) < experts.len());
    let few = cached.len() as u64 <= u64::from(s.frames) && (s.hot.is_some() || cached.is_empty());
    if !inside || !few || !cached.is_sorted_by(|a, b| a < b) {
        return Err(format!("{} experts in {} frames", cached.len(), s.frames));
    }
    let of_experts =
        |&i: &u32| plan.segments.get(i as usize).is_some_and(|s| s.extents().0 as usize == experts.len());
    if segments.is_empty() || !segments.is_sorted_by(|a, b| a < b) || !segments.iter().all(of_experts) {
        return Err(format!("segments {segments:?} are not those of its experts"));
    }
    // The same numbers, in an order that another unit reads.
    let alike = |(&own, &other): (&u32, &u32)| {
        let [own, other] = [own, other].map(|i| plan.segments.get(i as usize));
        own.zip(other).is_some_and(|(a, b)| (&a.shape, a.format) == (&b.shape, b.format))
    };
    let pairs = brought.len() == segments.len() && segments.iter().zip(brought).all(alike);
    if !(brought.is_empty() || pairs && s.hybrid.is_some()) {
        return Err(format!("segments {brought:?} are not those of its experts"));
    }
    // What moves when an expert does is what its streams read.
    if let Some(cold) = s.cold {
        let set = plan.streams.iter().position(|set| (set.layer, set.unit) == (*of, cold));
        let steps = plan.entries.iter().flat_map(|e| &e.steps);
        let own = steps.filter(|step| match step.code {
            Code::Builtin(Builtin::Streams { set: other, .. }) => Some(other as usize) == set,
            _ => false,
        });
        for step in own {
            let mut read: Vec<u32> = step
                .args
                .iter()
                .filter_map(|arg| match *arg {
                    Arg::Matrices(i) => Some(i),
                    _ => None,
                })
                .collect();
            read.sort_unstable();
            if read != *segments {
                return Err(format!("its streams read segments {read:?}, and {segments:?} move"));
            }
        }
    }
    // What a unit may be given lies in its memory.
    for (unit, wanted) in [(s.hot, cached.as_slice()), (s.cold, &[])] {
        let Some(unit) = unit.filter(|u| units.contains(u)) else { continue };
        let memory = plan.memory_of(unit);
        if memory == 0 {
            continue;
        }
        let residents = plan.memories.get(memory as usize).map_or(&[][..], |m| &m.residents);
        for &segment in if Some(unit) == s.hot { layer.to_bring() } else { segments } {
            let there = residents.iter().find(|r| r.segment == segment).map(|r| r.matrices.as_slice());
            let all = |m: &[u32]| m.len() == experts.len();
            let held = there.is_some_and(|m| if Some(unit) == s.hot { m == wanted } else { all(m) });
            if !held {
                return Err(format!("unit {unit} does not hold the experts of segment {segment}"));
            }
        }
    }
    Ok(())
}
