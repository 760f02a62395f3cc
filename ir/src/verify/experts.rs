//! Checks of the units of experts, and of NDP command streams; [`super`] lists the invariants.

use super::{VerifyError, require};
use crate::plan::{
    Arg, Builtin, Cached, Code, ExpertLayer, ExpertPolicy, Plan, PromptUnits, Segment, StreamSet,
};
use std::collections::BTreeSet;

/// Most experts of a layer: what a policy does in a step grows with their number.
const MOST: usize = 1024;
/// Most NDP DIMMs.
const MOST_DIMMS: u32 = 256;
/// Most points of a curve.
const POINTS: usize = 1024;

/// Candidates exist, every expert starts on one, and NDP command streams are of units that there are.
pub(super) fn check(plan: &Plan) -> Result<(), VerifyError> {
    let mut previous = None;
    for (i, l) in plan.experts.layers.iter().enumerate() {
        let at = || format!("experts.layers[{i}]");
        require(previous < Some(l.layer), at, || format!("layer {} is out of order", l.layer))?;
        previous = Some(l.layer);
        let known = l.units.iter().all(|&u| (u as usize) < plan.units.len());
        require(!l.units.is_empty() && known && l.units.is_sorted_by(|a, b| a < b), at, || {
            format!("units {:?}", l.units)
        })?;
        let start = l.starts.iter().all(|&at| (at as usize) < l.units.len());
        require(!l.starts.is_empty() && start, at, || "an expert without an initial unit".into())?;
    }
    check_streams(plan)
}

/// NDP command streams belong to existing units, one set of a layer to each, and steps run those of their own
/// unit.
fn check_streams(plan: &Plan) -> Result<(), VerifyError> {
    let mut seen = BTreeSet::new();
    for (i, s) in plan.streams.iter().enumerate() {
        let at = || format!("streams[{i}]");
        let StreamSet { layer, unit, artifact, experts, hidden, inner, bias: _ } = s;
        require((*unit as usize) < plan.units.len() && *unit > 0, at, || format!("unit {unit}"))?;
        require(seen.insert((*layer, *unit)), at, || format!("layer {layer} occurs twice"))?;
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

/// Units have the experts that they may be given, and every number of the policy is possible.
pub(super) fn check_policy(plan: &Plan) -> Result<(), VerifyError> {
    let (layers, policy) = (&plan.experts.layers, &plan.experts.policy);
    let at = || "experts.policy".to_owned();
    if let Some(costs) = policy.costs() {
        require(policy.is_finite(), at, || "a time that is negative or not finite".into())?;
        let curves = [
            (&costs.hot, policy.hot().is_some()),
            (&costs.cpu, true),
            (&costs.cold, policy.cold().is_some()),
        ];
        for (curve, needed) in curves {
            let rising = curve.is_sorted_by(|a, b| a.0 < b.0) && curve.len() <= POINTS;
            require(rising && curve.is_empty() != needed, at, || {
                "a curve that is empty, too long or not ascending".into()
            })?;
        }
        require(costs.expert_bytes > 0, at, || "experts of no bytes".into())?;
        for unit in [policy.hot(), policy.cold()].into_iter().flatten() {
            require(unit > 0 && (unit as usize) < plan.units.len(), at, || format!("unit {unit}"))?;
        }
        require(policy.hot() != policy.cold(), at, || "one unit for hot and cold experts".into())?;
        let alike = layers.first().is_some_and(|f| layers.iter().all(|l| l.starts.len() == f.starts.len()));
        require(alike, at, || "no layers, or layers with different numbers of experts".into())?;
    }
    match policy {
        ExpertPolicy::Fixed => {}
        ExpertPolicy::Scheduled(s) => {
            require((1..=MOST_DIMMS).contains(&s.dimms), at, || format!("{} NDP DIMMs", s.dimms))?;
            let rising = |curve: &[(u32, f64)]| curve.is_sorted_by(|a, b| a.0 < b.0) && curve.len() <= POINTS;
            let windows = !s.prompt_window.is_empty() && !s.decode_window.is_empty();
            require(windows && s.curves().into_iter().all(rising), at, || {
                "windows that are absent, too many or not ascending".into()
            })?;
            let experts = layers.first().map_or(0, |l| l.starts.len());
            require(s.prefill == PromptUnits::Auto || s.streams(layers.len(), experts), at, || {
                "prompts on a hot unit with fewer frames than a layer has experts".into()
            })?;
        }
        ExpertPolicy::Cached(c) => {
            check_cached(plan, c).map_err(|why| VerifyError::new(at(), why))?;
        }
    }
    for (i, layer) in layers.iter().enumerate() {
        check_layer(plan, layer).map_err(|why| VerifyError::new(format!("experts.layers[{i}]"), why))?;
    }
    Ok(())
}

/// No layer is without a frame, and pinned experts start in one.
fn check_cached(plan: &Plan, cached: &Cached) -> Result<(), String> {
    let layers = &plan.experts.layers;
    let resident: Vec<Vec<u32>> = layers.iter().map(|l| l.on(cached.hot)).collect();
    if resident.iter().any(Vec::is_empty) {
        return Err("a layer without an initial expert in a frame".into());
    }
    // A frame is a place for an expert of any layer.
    let bytes = |l: &ExpertLayer| -> Vec<Option<u64>> {
        let of = |&i: &u32| plan.segments.get(i as usize).and_then(Segment::matrix_bytes);
        l.to_bring().iter().map(of).collect()
    };
    let first = layers.first().map(bytes);
    if layers.iter().any(|l| Some(bytes(l)) != first) {
        return Err("layers with matrices of other sizes".into());
    }
    let experts = layers.first().map_or(0, |l| l.starts.len());
    if cached.k == 0 || cached.k as usize > experts {
        return Err(format!("{} of {experts} experts for a token", cached.k));
    }
    let all = resident.iter().map(|own| own.len() as u64).sum::<u64>();
    if all > u64::from(cached.frames) {
        return Err(format!("{all} experts in {} frames", cached.frames));
    }
    let there =
        |(l, e): &(u32, u32)| resident.get(*l as usize).is_some_and(|own| own.binary_search(e).is_ok());
    if !cached.pinned.is_sorted_by(|a, b| a < b) || !cached.pinned.iter().all(there) {
        return Err("a pinned expert that is not initially in a frame, or out of order".into());
    }
    Ok(())
}

fn check_layer(plan: &Plan, layer: &ExpertLayer) -> Result<(), String> {
    let policy = &plan.experts.policy;
    let ExpertLayer { layer: of, units, starts, segments, brought, dimms } = layer;
    if policy.is_fixed() {
        let none = segments.is_empty() && brought.is_empty() && dimms.is_empty();
        return if none { Ok(()) } else { Err("experts with a fixed unit must not move".into()) };
    }
    let mut candidates: Vec<u32> = [Some(0), policy.hot(), policy.cold()].into_iter().flatten().collect();
    candidates.sort_unstable();
    if *units != candidates {
        return Err(format!("its units are {units:?}"));
    }
    let scheduled = match policy {
        ExpertPolicy::Scheduled(s) => {
            let (resident, frames) = (s.hot.map_or(0, |hot| layer.on(hot).len()), s.frames);
            if resident > frames as usize {
                return Err(format!("{resident} experts in {frames} frames"));
            }
            Some(s.dimms)
        }
        _ => None,
    };
    let in_dimm = |&m: &i32| m == -1 || u32::try_from(m).is_ok_and(|m| scheduled.is_some_and(|n| m < n));
    let count = if scheduled.is_some() { starts.len() } else { 0 };
    if starts.len() > MOST || dimms.len() != count || !dimms.iter().all(in_dimm) {
        return Err("an expert in no DIMM".into());
    }
    let of_experts =
        |&i: &u32| plan.segments.get(i as usize).is_some_and(|s| s.extents().0 as usize == starts.len());
    if segments.is_empty() || !segments.is_sorted_by(|a, b| a < b) || !segments.iter().all(of_experts) {
        return Err(format!("segments {segments:?} are not those of its experts"));
    }
    // The same numbers, in an order that another unit reads.
    let alike = |(&own, &other): (&u32, &u32)| {
        let [own, other] = [own, other].map(|i| plan.segments.get(i as usize));
        own.zip(other).is_some_and(|(a, b)| (&a.shape, a.format) == (&b.shape, b.format))
    };
    let pairs = brought.len() == segments.len() && segments.iter().zip(brought).all(alike);
    if !(brought.is_empty() || pairs && policy.cached().is_some()) {
        return Err(format!("segments {brought:?} are not those of its experts"));
    }
    // Moving an expert moves the weights that its streams read.
    if let Some(cold) = policy.cold() {
        let set = plan.streams.iter().position(|set| (set.layer, set.unit) == (*of, cold));
        let steps = plan.entries.iter().flat_map(|e| &e.steps);
        let own = steps.filter(|step| match step.code {
            Code::Builtin(Builtin::Streams { set: other, .. }) => Some(other as usize) == set,
            _ => false,
        });
        for step in own {
            let matrices = |arg: &Arg| if let Arg::Matrices(i) = *arg { Some(i) } else { None };
            let mut read: Vec<u32> = step.args.iter().filter_map(matrices).collect();
            read.sort_unstable();
            if read != *segments {
                return Err(format!("its streams read segments {read:?}, and {segments:?} move"));
            }
        }
    }
    // Experts that a unit may be given are in its memory: of the hot unit those that start there, of the cold
    // one all.
    let all = || (0..starts.len() as u32).collect();
    let hot = policy.hot().map(|hot| (hot, layer.on(hot), layer.to_bring()));
    let cold = policy.cold().map(|cold| (cold, all(), segments.as_slice()));
    for (unit, resident, segments) in hot.into_iter().chain(cold) {
        let memory = plan.memory_of(unit);
        if memory == 0 {
            continue;
        }
        let residents = plan.memories.get(memory as usize).map_or(&[][..], |m| &m.residents);
        for &segment in segments {
            if !residents.iter().any(|r| r.segment == segment && r.matrices == resident) {
                return Err(format!("unit {unit} does not hold the experts of segment {segment}"));
            }
        }
    }
    Ok(())
}
