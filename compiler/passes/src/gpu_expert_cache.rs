//! Experts that the CPU and a unit with cache frames divide at run time (HybriMoE, §IV): the units that can
//! run them, and the costs. Pass `size_gpu_expert_cache` sets the number of frames and their initial experts.
//!
//! All experts are in the memory that the CPU reads. The memory of one other unit also holds some of them, in
//! frames that all layers share. [`moec_runtime::schedule`] divides each layer's experts after its router has
//! run, and brings others into frames. `[placement] policy` names the system that divides them. This pass
//! computes what is known at compile time: the cost of an expert on the unit, on the CPU and on the link
//! between them.
//!
//! The number of frames is a limit, as `[memory] budget` is. `size_gpu_expert_cache` is therefore one of the
//! last passes: by then it is known what everything else takes of the other memory. Replays of recorded
//! routing ([`mod@moec_sim::resident`]) choose the experts that begin in a frame, those that are pinned
//! there, and the policy for the other frames.

use super::assign_units::{UnitAssignment, expert_rows, expert_tables, record_starts, size, takes_experts};
use super::plan_expert_schedule::{curve, scheduled_layers, window_us, without_costs};
use super::size_expert_cache::{Routed, routers};
use crate::decisions::Decision;
use moec_base::error::{Error, Result};
use moec_config::UnitSetting;
use moec_costs::units::{DynamicUnit, UnitList};
use moec_ir::Module;
use moec_ir::placement::Placement;
use moec_ir::plan::{Cached, ExpertCosts, ExpertLayer, ExpertPolicy, Plan};
use moec_profile::Profile;
use moec_runtime::offload::cache::{Key, Setting};
use moec_runtime::schedule::{GpuResidents, System};
use moec_sim::cache::Trace;
use moec_sim::resident::{Prices, resident};
use moec_sim::systems::{self, MOEC};

/// One in so many of the permanent cache frames is used for experts that pass through.
const PASSING: usize = 4;

/// The unit with cache frames.
fn hot<'a>(list: &UnitList<'a>, options: &moec_config::PlacementConfig) -> Result<DynamicUnit<'a>> {
    let named = list.named("experts", &options.experts)?;
    let found = match named {
        Some(index) => list.accelerator(index),
        None => list.accelerators.first().copied(),
    };
    let name = options.policy.map_or_else(String::new, systems::key);
    let accelerator = found.ok_or_else(|| {
        Error::input(format!(
            "`policy = \"{name}\"` under `[placement]`, but `{}` has no unit for it",
            list.device.name
        ))
        .because("it divides experts between the CPU and a unit with dynamic shapes and its own memory")
        .hint("choose a target with a GPU (`moec targets`), or remove `policy`")
    })?;
    if list.has_near_data {
        return Err(Error::limit(format!("`policy = \"{name}\"` on `{}`", list.device.name))
            .because("with NDP DIMMs, experts are assigned by TriMoE's schedule")
            .hint(
                "remove `policy` under `[placement]`; `refine`, `moves` and `cached` control this schedule",
            ));
    }
    Ok(accelerator)
}

/// Checks that a device has what `policy` under `[placement]` requires, before a model is read. That is a
/// unit with cache frames, and the cost of an expert there and on the CPU.
///
/// # Errors
/// Fails if the device has no such unit or lacks a cost.
pub fn check(list: &UnitList<'_>, options: &moec_config::PlacementConfig) -> Result<()> {
    if options.policy.is_none_or(|system| system.gpu_residents == GpuResidents::Layers) {
        return Ok(());
    }
    let units = [list.device.units.first(), Some(hot(list, options)?.unit)];
    let silent = units.into_iter().flatten().find(|unit| curve(list.device, unit, 1.0).is_none());
    silent.map_or(Ok(()), |unit| Err(without_costs(list.device, unit)))
}

/// Gives every layer of experts two units that share frames; [`size_gpu_expert_cache`] chooses the initial
/// experts of frames.
///
/// # Errors
/// Fails if the device has no such unit or no costs of experts, or if layers differ.
pub fn plan_gpu_expert_cache(
    module: &Module,
    placement: &mut Option<Placement>,
    assignment: &mut UnitAssignment,
    list: &UnitList<'_>,
    config: &moec_config::Config,
) -> Result<()> {
    let Some(system) = config.placement.policy else { return Ok(()) };
    let hot = hot(list, &config.placement)?;
    let Some((experts, expert)) = scheduled_layers(module)? else { return Ok(()) };
    let device = list.device;
    let own = assignment.memory(hot.index);
    let (host, there) =
        device.cpu_memory().zip(device.memory_of(hot.unit)).filter(|_| own > 0).ok_or_else(|| {
            Error::limit(format!("`{}` works in the CPU's memory", hot.unit.name))
                .because("all experts are in that memory, so no cache frames are needed")
                .hint("remove `policy` under `[placement]`")
        })?;
    for &layer in &experts {
        takes_experts(module, layer, hot)?;
    }
    let graph = module.entries.first().ok_or_else(|| Error::bug("experts of no graph"))?;
    let routers = routers(graph);
    let first = *routers.first().ok_or_else(|| Error::bug("experts without a router"))?;
    let Routed { experts: most, k, score, .. } = first;
    if routers.iter().any(|r| Routed { layer: first.layer, ..*r } != first) || routers.len() != experts.len()
    {
        return Err(Error::limit(
            "the layers' routers choose in different ways, but all layers share the cache frames",
        )
        .hint("remove `policy` under `[placement]`"));
    }
    let size = size(module, *experts.first().unwrap_or(&0));
    let transfer_us = |bytes: f64| device.transfer_us(host, there, bytes).unwrap_or(0.0);
    let back = device.transfer_us(there, host, 0.0).unwrap_or(0.0);
    let times = |unit| curve(device, unit, expert.weights()).ok_or_else(|| without_costs(device, unit));
    let cpu = device.units.first().ok_or_else(|| Error::bug("a device without a CPU"))?;
    let units = vec![0, hot.index];
    let placed = match placement {
        Some(placed) => placed,
        None => placement.insert(Placement::dynamic(expert_tables(module)?)),
    };
    placed.units = device.units.iter().map(|u| u.name.clone()).collect();
    for &layer in &experts {
        // One expert of each layer, until the number of frames is known.
        let starts = (0..most).map(|e| u32::from(e == 0)).collect();
        let of = ExpertLayer { layer, units: units.clone(), starts, ..ExpertLayer::default() };
        record_starts(placed, &of);
        assignment.experts.layers.push(of);
    }
    // Of the entry point with the most rows.
    let attention = list.accelerator(assignment.attention);
    let window = |graph| window_us(module, graph, device, attention);
    let window_us = module.entries.last().map_or(Ok(0.0), window)?;
    assignment.experts.policy = ExpertPolicy::Cached(Cached {
        hot: hot.index,
        frames: experts.len() as u32,
        divides: [system.prefill.name().to_owned(), system.decode.name().to_owned()],
        keeps: Setting::lru().to_string(),
        ahead: system.prediction.gates() as u32,
        // Experts that the unit holds share a launch, and the rows of all cross the link twice.
        first_us: [hot.unit.launch_us() + transfer_us(0.0) + back, cpu.launch_us(), transfer_us(0.0)],
        // Each wave has a table of its own, which crosses the link.
        launch_us: hot.unit.launch_us() + transfer_us(0.0),
        k,
        score,
        pinned: Vec::new(),
        window_us,
        costs: ExpertCosts {
            hot: times(hot.unit)?,
            cpu: times(cpu)?,
            bring_us: transfer_us(size.bytes as f64) - transfer_us(0.0),
            expert_bytes: size.bytes,
            row_bytes: 8 * size.hidden as u64,
            ..ExpertCosts::default()
        },
    });
    expert_rows(module, placed, assignment);
    Ok(())
}

/// Options of the user.
#[derive(Clone, Copy, Debug)]
pub struct FrameOptions<'a> {
    /// System that divides the experts.
    pub system: &'static System,
    /// Preferred unit of experts, with a share of all.
    pub experts: &'a UnitSetting,
    /// Average number of experts of each layer in frames.
    pub cached: Option<u32>,
    /// Microseconds to read an expert from disk, if experts stay there.
    pub disk_us: f64,
}

/// Sets the number of frames, and their initial experts, in a plan that is otherwise final.
///
/// # Errors
/// Fails if there are fewer frames than layers.
pub fn size_gpu_expert_cache(
    plan: &mut Plan,
    options: FrameOptions<'_>,
    profile: Option<&Profile>,
) -> Result<Option<Decision>> {
    let Some(room) = FrameBudget::of(plan, options)? else { return Ok(None) };
    let trace = profile.filter(|p| !p.routes.is_empty()).map(|p| p.routes.trace(&p.layers)).transpose();
    let trace = trace.map_err(|e| Error::bug("a profile that was checked").because(e))?;
    let initial = initial_experts(plan, options, &room, trace.as_ref())?;
    let FrameBudget { frames, memory, unit, .. } = room;
    let ExpertPolicy::Cached(cached) = &mut plan.experts.policy else { return Ok(None) };
    cached.frames = frames as u32;
    cached.keeps.clone_from(&initial.keeps);
    cached.pinned = initial.pinned.iter().map(|k| (k.layer.into(), k.expert.into())).collect();
    cached.pinned.sort_unstable();
    for (index, layer) in (0..).zip(&mut plan.experts.layers) {
        let at = layer.units.iter().position(|&u| u == unit).unwrap_or(0) as u32;
        for (expert, start) in (0..).zip(&mut layer.starts) {
            *start = if initial.begin.contains(&Key { layer: index, expert }) { at } else { 0 };
        }
        record_starts(&mut plan.placement, layer);
        if let Some(of) = plan.memories.get_mut(memory as usize) {
            let moved = of.residents.iter_mut().filter(|r| layer.to_bring().contains(&r.segment));
            moved.for_each(|r| r.matrices = layer.on(unit));
        }
    }
    let memory = plan.memories.get(memory as usize).map_or("", |m| &m.name);
    let system =
        format!("`{}`: {}; keeps `{}`", options.system.name, options.system.description, initial.keeps);
    let decision =
        Decision::new("size_gpu_expert_cache", &format!("cache frames in `{memory}`"), system, initial.why)
            .with(&[
                ("frames", frames as f64),
                ("frame_bytes", room.each as f64),
                ("experts", room.experts as f64),
                ("pinned", initial.pinned.len() as f64),
            ]);
    Ok(Some(match room.limit {
        Some(limit) => decision.with(&[("limit_bytes", limit as f64)]),
        None => decision,
    }))
}

/// Room for experts.
struct FrameBudget {
    /// Unit and memory of the frames.
    unit: u32,
    memory: u32,
    /// Limit of the bytes that a run may take there, if any; then the bytes of a frame.
    limit: Option<u64>,
    each: u64,
    frames: usize,
    /// Number of layers, and of the experts of all layers.
    layers: usize,
    experts: usize,
}

impl FrameBudget {
    fn of(plan: &Plan, options: FrameOptions<'_>) -> Result<Option<Self>> {
        let Some(unit) = plan.experts.policy.cached().map(|c| c.hot) else { return Ok(None) };
        let memory = plan.memory_of(unit);
        let decl = plan.memories.get(memory as usize).ok_or_else(|| Error::bug("frames of no memory"))?;
        let layers = &plan.experts.layers;
        let first = layers.first().ok_or_else(|| Error::bug("a cache of frames without layers"))?;
        let piece = |&segment: &u32| {
            let resident = decl.residents.iter().find(|r| r.segment == segment)?;
            resident.piece_bytes(plan.segments.get(segment as usize)?)
        };
        let each: Option<u64> = first.to_bring().iter().map(piece).sum();
        let peak = each.and_then(|each| Some((each, plan.peak(memory, 1)?)));
        let (each, peak) = peak.ok_or_else(|| Error::limit("experts past what a memory can hold"))?;
        let layers = layers.len();
        let experts = layers * first.starts.len();
        let fixed = peak.saturating_sub(each * layers as u64);
        let limit = decl.capacity;
        let fit = limit.map_or(u64::MAX, |limit| limit.saturating_sub(fixed) / each.max(1));
        let share = match options.experts {
            UnitSetting::Share(_, percent) => (experts * usize::from(*percent)).div_ceil(100),
            _ => experts,
        };
        let cached = options.cached.map_or(usize::MAX, |n| n as usize * layers);
        let frames = share.min(cached).min(usize::try_from(fit).unwrap_or(usize::MAX)).min(experts);
        if frames < layers {
            return Err(Error::input(format!("{frames} frames are too few for {layers} layers of experts"))
                .because("each layer needs an expert in a frame at the start")
                .hint("set a larger share in `experts` under `[placement]`, or `cached` to 1 or more"));
        }
        Ok(Some(Self { unit, memory, limit, each, frames, layers, experts }))
    }
}

/// Initial and pinned experts of the frames, the policy of the others, and the reason.
struct InitialExperts {
    begin: Vec<Key>,
    pinned: Vec<Key>,
    keeps: String,
    why: String,
}

fn initial_experts(
    plan: &Plan,
    options: FrameOptions<'_>,
    room: &FrameBudget,
    trace: Option<&Trace>,
) -> Result<InitialExperts> {
    let (frames, each) = (room.frames, room.experts / room.layers.max(1));
    let keys =
        (0..each).flat_map(|e| (0..room.layers).map(move |l| Key { layer: l as u16, expert: e as u16 }));
    let mut popular: Vec<Key> = keys.collect();
    if let Some(trace) = trace {
        let uses = moec_sim::cache::uses(trace);
        let of = |k: &Key| uses.get(usize::from(k.layer) * each + usize::from(k.expert)).copied();
        popular.sort_by_key(|k| std::cmp::Reverse(of(k)));
    }
    let seen =
        if trace.is_some() { "the profile used most" } else { "come first, as no routing was recorded" };
    let choice = match (trace, options.system.gpu_residents) {
        (Some(trace), GpuResidents::Cache(_)) if options.system.name == MOEC.name && trace.tokens() > 1 => {
            let host = plan.paging.as_ref().map_or(room.experts as u64, |p| u64::from(p.frames));
            let found = resident(trace, [host, frames as u64], &prices(plan, options))
                .map_err(|e| Error::bug(e.to_string()))?;
            let [us, fixed] = [found.held_out, found.held_out_fixed].map(|u| u.us(&prices(plan, options)));
            let uses = found.held_out;
            let all = (uses.gpu + uses.host + uses.disk).max(1);
            let why = format!(
                "replays of the profile: `{}` with {} % pinned; on held-out routing {:.0} % of the uses are in a frame, and experts take \
                 {:.2} of the time with the hottest pinned alone",
                found.setting,
                found.share,
                100.0 * uses.gpu as f64 / all as f64,
                us / fixed.max(f64::MIN_POSITIVE)
            );
            Some((found.pinned, found.setting.to_string(), why))
        }
        _ => None,
    };
    // Experts that the replays pin, one of every layer that has none, then the hottest.
    let mut begin: Vec<Key> = choice.iter().flat_map(|c| &c.0).copied().collect();
    let held = |begin: &[Key], layer: u16| begin.iter().any(|k| k.layer == layer);
    let lacking = (0..room.layers as u16).filter(|&l| !held(&begin, l)).collect::<Vec<_>>();
    begin.truncate(frames - lacking.len());
    for layer in (0..room.layers as u16).filter(|l| !begin.iter().any(|k| k.layer == *l)).collect::<Vec<_>>()
    {
        begin.extend(popular.iter().find(|k| k.layer == layer));
    }
    for key in popular {
        if begin.len() >= frames {
            break;
        }
        if !begin.contains(&key) {
            begin.push(key);
        }
    }
    Ok(match (choice, options.system.gpu_residents) {
        (Some((pinned, keeps, why)), _) => {
            let pinned = pinned.into_iter().filter(|k| begin.contains(k)).collect();
            InitialExperts { begin, pinned, keeps, why }
        }
        (None, GpuResidents::Cache(keeps)) => {
            let setting: Setting = keeps.parse().map_err(|_| Error::bug("an invalid policy"))?;
            let why =
                format!("the initial experts are those that {seen}; `{keeps}` chooses among later ones");
            InitialExperts { begin, pinned: Vec::new(), keeps: setting.to_string(), why }
        }
        (None, _) => {
            let passing = if systems::passes(options.system) { (frames / PASSING).max(1) } else { 0 };
            let pinned = begin.iter().copied().take(frames - passing).collect::<Vec<_>>();
            let why = format!(
                "{} are pinned, those that {seen}; {passing} frames are for temporary experts",
                pinned.len()
            );
            InitialExperts { begin, pinned, keeps: Setting::lru().to_string(), why }
        }
    })
}

/// Costs of uses of one row each.
fn prices(plan: &Plan, options: FrameOptions<'_>) -> Prices {
    let first = |points: &[(u32, f64)]| points.first().map_or(0.0, |p| p.1);
    let times = plan.experts.policy.costs();
    Prices {
        gpu: times.map_or(0.0, |t| first(&t.hot)),
        host: times.map_or(0.0, |t| first(&t.cpu)),
        disk: options.disk_us,
        transfer: times.map_or(0.0, |t| t.bring_us),
    }
}
