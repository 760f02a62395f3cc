//! Pass `plan_expert_schedule`: experts that several units can run, and their costs there.
//!
//! If a device has NDP DIMMs, no expert has a fixed unit. An expert is hot, warm or cold by the rows that a
//! step gives it (TriMoE, §3.1). The runtime assigns it in every step ([`moec_runtime::schedule`]). This pass
//! computes what is known at compile time:
//!
//! * the cost of an expert on each unit by its rows (§4.2, equations 1 to 4),
//! * the number of experts that the hot unit holds,
//! * the memories of all experts before the first step (§4.3, "optimized initial layout via offline trace
//!   analysis"),
//! * the time between the experts of two layers, in which experts move (§4.3), for each entry point: attention
//!   and dense layers, and how long their own values use the link to the hot unit.
//!
//! An expert with a unit requested by the user stays there: then [`assign_units`](super::assign_units) has
//! placed it.

use super::assign_units::{UnitAssignment, expert_rows, expert_tables, record_starts};
use moec_backend::{CommandStreams, StreamCosts, StreamExpert};
use moec_base::error::{Error, Result};
use moec_config::UnitSetting;
use moec_costs::units::{DynamicUnit, UnitList};
use moec_device::{Device, DeviceUnit};
use moec_ir::placement::Placement;
use moec_ir::plan::{ExpertCosts, ExpertLayer, ExpertPolicy, PromptUnits, Scheduled};
use moec_ir::{EntryKind, Graph, Module, Op, Operand};
use moec_profile::loads::Loads;
use moec_runtime::schedule::ScheduleError;
use moec_runtime::schedule::dispatch::plan;
use moec_runtime::schedule::scheduled::{ExpertScheduler, Place};

/// Numbers of rows in the cost tables: close to each other for few rows, up to those of a large batch.
const ROWS: [u32; 22] =
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096];

/// Bytes of a weight that units multiply.
const NUMBER_BYTES: f64 = 2.0;

/// Gives every layer of experts its units and a schedule if the device has NDP DIMMs and the user has not
/// placed experts.
///
/// # Errors
/// Fails if a unit does not run experts, a budget of memory is set, layers differ in their experts, or the
/// device file lacks a cost.
pub fn plan_expert_schedule(
    module: &Module,
    placement: &mut Option<Placement>,
    assignment: &mut UnitAssignment,
    list: &UnitList<'_>,
    config: &moec_config::Config,
    loads: Option<&Loads>,
) -> Result<()> {
    let Some((cold, streams)) =
        list.accelerators.iter().find_map(|f| Some((*f, f.backend.command_streams()?)))
    else {
        return Ok(());
    };
    if config.placement.experts != UnitSetting::Auto {
        return Ok(());
    }
    let Some((layers, Expert(expert))) = scheduled_layers(module)? else { return Ok(()) };
    if config.memory.budget.is_some() {
        return Err(Error::limit(format!(
            "`budget` under `[memory]` cannot be combined with experts on `{}`",
            cold.unit.name
        ))
        .because("experts that are assigned in every step must be in memory")
        .hint("remove the budget, or give experts a fixed unit: `experts = \"cpu\"` under `[placement]`"));
    }
    let device = list.device;
    let hot = list
        .accelerators
        .iter()
        .copied()
        .find(|f| f.index != cold.index && f.backend.command_streams().is_none());
    let hot = hot.filter(|f| f.unit.is_legal("expert_ffn") && f.backend.takes(&ffn(expert)));
    let costs = costs(streams, device, cold, &expert)?;
    let size = Size::of(&expert);
    let mut times = times(device, hot, &costs, &size)?;
    let placed = match placement {
        Some(placed) => placed,
        None => placement.insert(Placement::dynamic(expert_tables(module)?)),
    };
    placed.units = device.units.iter().map(|u| u.name.clone()).collect();
    let most = placed.experts.first().map_or(0, |t| t.experts.len());
    let frames = hot.map_or(0, |hot| frames(device, hot, &size, layers.len(), most, config.placement.cached));
    // A unit that holds no expert runs none, since it would have to copy each one first.
    if frames == 0 {
        times.hot.clear();
    }
    let attention = list.accelerator(assignment.attention);
    let window = |graph: &Graph| window_us(module, graph, device, attention);
    let windows = |kind: &dyn Fn(EntryKind) -> bool| {
        by_rows(
            module.entries.iter().filter(|g| kind(g.kind)).map(|g| Ok((g.kind.rows() as u32, window(g)?))),
        )
    };
    let (mut prompt_window, mut decode_window) =
        (windows(&EntryKind::is_prefill)?, windows(&|kind: EntryKind| !kind.is_prefill())?);
    // A kind without an entry point has the windows of the other.
    if prompt_window.is_empty() {
        prompt_window.clone_from(&decode_window);
    } else if decode_window.is_empty() {
        decode_window.clone_from(&prompt_window);
    }
    // The KV cache is in the memory of the unit that computes attention. If that is the hot unit, a row
    // arrives there and returns to the router, in f32.
    let rows_us = |rows: f64| {
        let hot = hot.filter(|hot| frames > 0 && attention.is_some_and(|a| a.index == hot.index))?;
        let (host, there) = device.cpu_memory().zip(device.memory_of(hot.unit))?;
        let bytes = rows * 4.0 * f64::from(expert.hidden);
        Some(device.transfer_us(host, there, bytes)? + device.transfer_us(there, host, bytes)?)
    };
    let traffic = module.entries.iter().map(|g| g.kind.rows() as u32);
    let traffic = by_rows(traffic.map(|rows| Ok((rows, rows_us(f64::from(rows)).unwrap_or(0.0)))))?;
    let schedule = Scheduled {
        hot: hot.filter(|_| frames > 0).map(|f| f.index),
        cold: cold.index,
        dimms: costs.dimms,
        frames,
        moves: config.placement.moves && costs.link_us.is_some(),
        refine: config.placement.refine,
        prefill: config.placement.prefill,
        prompt_window,
        decode_window,
        traffic: if traffic.iter().any(|t| t.1 > 0.0) { traffic } else { Vec::new() },
        costs: ExpertCosts {
            expert_bytes: size.bytes as u64,
            // Rows are sent in bf16 and returned in f32.
            row_bytes: 6 * u64::from(expert.hidden),
            ..times
        },
    };
    if schedule.prefill == PromptUnits::Hot && !schedule.streams(layers.len(), most) {
        let have = u64::from(frames) * layers.len() as u64;
        let why = if schedule.moves {
            format!("a prompt may need {most} experts of a layer at once, and there are frames for {have}")
        } else {
            "prompts evict experts from the frames, and these return by moves, which are off".to_owned()
        };
        return Err(Error::limit("`prefill = \"hot\"` under `[placement]`").because(why).hint(
            "choose a target whose GPU has more memory, raise `cached`, set `moves = true`, or remove `prefill`",
        ));
    }
    // All layers at once: the scheduler itself chooses the layout before the first step.
    let limit = |e: ScheduleError| {
        Error::limit(format!("the experts of this model cannot be assigned on `{}`", device.name)).because(e)
    };
    let mut scheduler =
        ExpertScheduler::new(plan::setup(&schedule, layers.len(), most).map_err(limit)?).map_err(limit)?;
    let mut units: Vec<u32> = [Some(0), schedule.hot, Some(schedule.cold)].into_iter().flatten().collect();
    units.sort_unstable();
    // Experts move between decoding steps.
    let decodes = module.entries.iter().filter(|g| !g.kind.is_prefill());
    let step = decodes.map(|g| g.kind.rows() as u32).max().unwrap_or(1);
    for (index, &layer) in layers.iter().enumerate() {
        if let Some(recorded) = loads.and_then(|l| l.layers.iter().find(|of| of.layer == layer)) {
            let mean: Vec<f64> = (0..most).map(|e| recorded.mean(e, step)).collect();
            scheduler.profile(index, &mean).map_err(limit)?;
        }
        let places = scheduler.placement(index).map_or(&[][..], |p| p.places());
        let at = |unit: Option<u32>| units.iter().position(|&u| Some(u) == unit).unwrap_or(0) as u32;
        let start = |p: &Place| match (p.cached, p.layout.memory()) {
            (true, _) => at(schedule.hot),
            (_, Some(_)) => at(Some(schedule.cold)),
            _ => at(Some(0)),
        };
        let of = ExpertLayer {
            layer,
            units: units.clone(),
            starts: places.iter().map(start).collect(),
            dimms: places.iter().map(|p| p.layout.memory().map_or(-1, i32::from)).collect(),
            ..ExpertLayer::default()
        };
        record_starts(placed, &of);
        assignment.experts.layers.push(of);
    }
    assignment.experts.policy = ExpertPolicy::Scheduled(schedule);
    expert_rows(module, placed, assignment);
    Ok(())
}

/// An expert of equal layers.
#[derive(Clone, Copy, Debug)]
pub struct Expert(StreamExpert);

impl Expert {
    /// Numbers of its matrices.
    pub fn weights(&self) -> f64 {
        3.0 * f64::from(self.0.hidden) * f64::from(self.0.inner)
    }
}

/// The layers with experts outside of static graphs, and the size of an expert, which all of them share.
/// `None` if there are no such layers.
///
/// # Errors
/// Fails if layers differ.
pub fn scheduled_layers(module: &Module) -> Result<Option<(Vec<u32>, Expert)>> {
    let experts = experts(module)?;
    let Some(&(_, expert)) = experts.first() else { return Ok(None) };
    if let Some((layer, other)) = experts.iter().find(|(_, other)| *other != expert) {
        return Err(Error::limit(format!("layer {layer} has experts of {} by {}", other.hidden, other.inner))
            .because(format!("those before it are {} by {}", expert.hidden, expert.inner))
            .hint("the schedule requires equal layers: give experts a fixed unit, `experts = \"cpu\"` under `[placement]`"));
    }
    Ok(Some((experts.iter().map(|(layer, _)| *layer).collect(), Expert(expert))))
}

/// The experts of each layer that no static graph computes.
pub fn experts(module: &Module) -> Result<Vec<(u32, StreamExpert)>> {
    let Some(graph) = module.entries.first() else { return Ok(Vec::new()) };
    let mut experts = Vec::new();
    for node in &graph.nodes {
        let &Op::ExpertFfn { glu, bias, fixed: false } = &node.op else { continue };
        let weight = |i: usize| match node.inputs.get(i) {
            Some(&Operand::Weight(w)) => Ok(module.weight(w)),
            _ => Err(Error::bug("experts without matrices")),
        };
        let (gate_up, down) = (weight(2)?, weight(3)?);
        let &[_, hidden, inner] = down.shape.as_slice() else {
            return Err(Error::bug("experts whose matrices have no three axes"));
        };
        let layer = node.scope.layer.ok_or_else(|| Error::bug("experts of no layer"))?;
        let [hidden, inner] = [hidden, inner].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        let formats = [gate_up.format, down.format];
        experts.push((layer, StreamExpert { hidden, inner, glu, bias, formats }));
    }
    Ok(experts)
}

fn ffn(expert: StreamExpert) -> Op {
    Op::ExpertFfn { glu: expert.glu, bias: expert.bias, fixed: false }
}

/// Costs of an expert on a target with NDP DIMMs.
///
/// # Errors
/// Fails if it does not run there, with the reason and the way out.
pub fn costs(
    streams: &dyn CommandStreams,
    device: &Device,
    cold: DynamicUnit<'_>,
    expert: &StreamExpert,
) -> Result<StreamCosts> {
    streams.costs(device, cold.unit, expert, &ROWS).map_err(|why| {
        Error::limit(format!("`{}` does not run the experts of this model", cold.unit.name))
            .because(why)
            .hint("change this in the device file, or keep experts on the CPU: `experts = \"cpu\"` under `[placement]`")
    })
}

/// Size of one expert, as units read and multiply it.
struct Size {
    /// Numbers of its matrices.
    weights: f64,
    /// Bytes.
    bytes: f64,
}

impl Size {
    fn of(e: &StreamExpert) -> Self {
        let weights = Expert(*e).weights();
        Self { weights, bytes: weights * NUMBER_BYTES }
    }
}

/// Microseconds of `rows` rows with matrices of `weights` numbers: from the unit's table, else by its
/// roofline. `None` if the device file has neither.
fn matmul_us(unit: &DeviceUnit, bandwidth: Option<f64>, rows: f64, weights: f64) -> Option<f64> {
    if let Some(us) = unit.matmul_us(rows, weights) {
        return Some(us);
    }
    let peak = unit.peak.get("bf16").or_else(|| unit.peak.get("f16")).or_else(|| unit.peak.get("f32"))?;
    let reading = weights * NUMBER_BYTES / (bandwidth? * 1e3);
    Some((2.0 * rows * weights / (peak.rate() * 1e3)).max(reading))
}

/// Bandwidth of the memory that a unit works in, in 10⁹ bytes per second: the unit's own figure, else the
/// memory's.
fn bandwidth(device: &Device, unit: &DeviceUnit) -> Option<f64> {
    let name = device.memory_of(unit).or_else(|| device.cpu_memory());
    let memory = device.memories.iter().find(|m| Some(m.name.as_str()) == name);
    let of_memory = memory.and_then(|m| m.bandwidth.last()).map(moec_device::Bandwidth::rate);
    unit.bandwidth().or(of_memory)
}

/// Microseconds of one expert by its rows on a unit, without launches; `None` if the device file has no
/// figures.
pub fn curve(device: &Device, unit: &DeviceUnit, weights: f64) -> Option<Vec<(u32, f64)>> {
    let rate = bandwidth(device, unit);
    ROWS.iter().map(|&rows| Some((rows, matmul_us(unit, rate, f64::from(rows), weights)?))).collect()
}

/// The error for a unit whose expert costs are missing in the device file.
pub fn without_costs(device: &Device, unit: &DeviceUnit) -> Error {
    Error::input(format!("target `{}` has no measured expert costs of `{}`", device.name, unit.name))
        .hint("`moec profile-device DIR`, with `--gpu` for a GPU, measures the machine that will run the bundle and writes a \
               device file: give its path as `--target`")
}

/// Costs of an expert on every unit.
fn times(
    device: &Device,
    hot: Option<DynamicUnit<'_>>,
    cold: &StreamCosts,
    size: &Size,
) -> Result<ExpertCosts> {
    let curve = |unit: &DeviceUnit| {
        let points = curve(device, unit, size.weights).ok_or_else(|| without_costs(device, unit))?;
        Ok::<_, Error>(points.into_iter().map(|(rows, us)| (rows, us + unit.launch_us())).collect::<Vec<_>>())
    };
    let cpu = device.units.first().ok_or_else(|| Error::bug("a device without a CPU"))?;
    let bring =
        hot.and_then(|hot| device.transfer_us(device.cpu_memory()?, device.memory_of(hot.unit)?, size.bytes));
    Ok(ExpertCosts {
        hot: hot.map(|hot| curve(hot.unit)).transpose()?.unwrap_or_default(),
        cpu: curve(cpu)?,
        cold: cold.rows.clone(),
        bring_us: bring.unwrap_or(0.0),
        striped_us: cold.host_us[0],
        localized_us: cold.host_us[1],
        internal_us: cold.internal_us,
        link_us: cold.link_us.unwrap_or(0.0),
        ..ExpertCosts::default()
    })
}

/// Number of experts of a layer that the hot unit's memory has room for; a tenth of it is left for everything
/// else.
fn frames(
    device: &Device,
    hot: DynamicUnit<'_>,
    size: &Size,
    layers: usize,
    most: usize,
    requested: Option<u32>,
) -> u32 {
    let of = device.memory_of(hot.unit).and_then(|name| device.memories.iter().find(|m| m.name == name));
    let room = of.and_then(|m| m.capacity.as_ref()).map_or(f64::INFINITY, |c| c.value * 0.9);
    let fit = (room / (size.bytes * layers.max(1) as f64)).floor();
    requested.unwrap_or(u32::MAX).min(fit.min(most as f64) as u32).min(most as u32)
}

/// Points by rows, ascending; of several entry points with equal rows the first one's.
fn by_rows(points: impl Iterator<Item = Result<(u32, f64)>>) -> Result<Vec<(u32, f64)>> {
    let mut points = points.collect::<Result<Vec<_>>>()?;
    points.sort_by_key(|p| p.0);
    points.dedup_by_key(|p| p.0);
    Ok(points)
}

/// Microseconds between the experts of two layers in an entry point: the other weights of a layer and its
/// attention, on the unit that computes attention (`None`: the CPU). Caches are half full, the mean of a
/// sequence that grows to its end. The rows of a prompt share the keys and values that they read; in decoding
/// every row has its own.
pub fn window_us(
    module: &Module,
    graph: &Graph,
    device: &Device,
    unit: Option<DynamicUnit<'_>>,
) -> Result<f64> {
    let unit =
        unit.map(|f| f.unit).or(device.units.first()).ok_or_else(|| Error::bug("a device without units"))?;
    let layers = graph.nodes.iter().filter_map(|n| n.scope.layer).max().map_or(1, |last| last + 1);
    let rest =
        graph.nodes.iter().filter(|n| n.scope.layer.is_some() && !matches!(n.op, Op::ExpertFfn { .. }));
    let (mut weights, mut cached) = (0.0, 0.0);
    for node in rest {
        let attention = matches!(node.op, Op::Attention(_));
        for input in &node.inputs {
            match input {
                Operand::Weight(w) => weights += module.weight(*w).shape.iter().product::<usize>() as f64,
                Operand::State(s) if attention => {
                    cached += module.state(*s).ty.shape.iter().skip(1).product::<usize>() as f64 / 2.0;
                }
                Operand::State(_) | Operand::Value(_) => {}
            }
        }
    }
    let [weights, cached] = [weights, cached].map(|all| all / f64::from(layers));
    let rate = bandwidth(device, unit);
    let rows = graph.kind.rows() as f64;
    let (calls, each) = if graph.kind.is_prefill() { (1.0, rows) } else { (rows, 1.0) };
    let dense = matmul_us(unit, rate, rows, weights).unwrap_or(0.0);
    let attention =
        if cached > 0.0 { calls * matmul_us(unit, rate, each, cached).unwrap_or(0.0) } else { 0.0 };
    Ok(dense + attention)
}
