//! Pass `assign_units`: operators and experts of accelerators that take dynamic shapes.
//!
//! [`assign_residency`](super::assign_residency) has placed the static graphs. The rest runs on the CPU, or
//! on a unit that runs the CPU's operators: a GPU or NDP DIMMs.
//!
//! **Experts.** A unit gets all experts of a layer or a share of them. Under `auto` it gets those that cost
//! less there than on the CPU. Costs are the expected times of an expert's rows and of their transfer over
//! the link and back. The most popular come first (HybriMoE, §IV-B), as many as the unit's memory has room
//! for. An expert has one unit, and its weights are in the memory of that unit.
//!
//! **Attention** has one unit in all entry points, that of the KV cache. It goes to an accelerator if the
//! user requests it. Without a request, attention, mixers and the rest go to a unit with cache frames if they
//! cost less there and leave half of its memory to the frames (HybriMoE, §II-A).
//!
//! **Mixers** other than attention (delta rules, state spaces, short convolutions) also have one unit, that
//! of their states. They go where the user requests. Otherwise they go with the rest if its unit runs all of
//! their operators, else to the CPU.
//!
//! **The rest** (embeddings, norms, routers, dense networks, sums, the head) goes where the user requests.
//! Without a request it goes with attention if all experts and mixers are there and the memory holds the
//! model. Then only tokens and logits cross a link. A dispatch and its combine go with the rest if one unit
//! has all of a layer's experts. Otherwise they run on the CPU, where the rows of several units meet. So do
//! angles that depend on the length of a prompt.
//!
//! No result changes: every expert computes the same rows on any unit, and `combine` adds them in the order
//! of the router's choices.
//!
//! **Hosts** of one device divide the model in one of the ways of [`HostPlacement`].

mod dense;
mod leaving;
mod owners;
mod stages;

use crate::decisions::Decision;
use leaving::Leaving;
use moec_backend::CommandStreams;
use moec_base::error::{Error, Result};
use moec_config::HostPlacement;
use moec_costs::units::{DynamicUnit, Named, UnitList};
use moec_device::is_beside;
use moec_ir::placement::{ExpertGroup, ExpertRow, OpAssignment, Placement};
use moec_ir::plan::{
    Arg, Code, ExpertLayer, ExpertPlacement, ExpertPolicy, ExpertTable, Memory, MemoryLink, Plan, UnitRef,
};
use moec_ir::{Graph, Module, Node, Op, Operand, Role, StateId, ValueId, Weight, WeightId};
use moec_profile::loads::Loads;
use moec_targets::backends;
use std::collections::{BTreeMap, BTreeSet};

/// Reason in the placement for a group of experts without a fixed unit. Memories of the units.
pub const ASSIGNED: &str = "assigned in every step";

/// Units of nodes and experts outside of static graphs.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitAssignment {
    /// Units of the plan.
    pub units: Vec<UnitRef>,
    /// Memories of the units.
    pub memories: Vec<Memory>,
    /// Links between the memories.
    pub links: Vec<MemoryLink>,
    /// Unit of attention.
    pub attention: u32,
    /// Unit of mixers other than attention.
    pub mixer: u32,
    /// Unit of the rest: what neither mixes tokens nor is an expert.
    pub rest: u32,
    /// Units of the slices of experts and of heads, by slice; slices past the last are on the CPU.
    pub slices: Vec<u32>,
    /// Units of whole layers, by layer; empty if layers are not divided between hosts.
    pub stages: Vec<u32>,
    /// Units of experts; no layer has segments before `layout`.
    pub experts: ExpertPlacement,
}

impl Default for UnitAssignment {
    /// Everything on the CPU.
    fn default() -> Self {
        let memory = Memory { name: "memory".to_owned(), ..Memory::default() };
        Self {
            units: vec![UnitRef::cpu()],
            memories: vec![memory],
            links: Vec::new(),
            attention: 0,
            mixer: 0,
            rest: 0,
            slices: Vec::new(),
            stages: Vec::new(),
            experts: ExpertPlacement::default(),
        }
    }
}

impl UnitAssignment {
    /// Everything outside of static graphs on the CPU of a device.
    pub fn all_on_cpu(list: &UnitList<'_>) -> Self {
        let (units, memories, links) = list.for_plan();
        Self { units, memories, links, ..Self::default() }
    }

    /// The assignment of a plan; `module` is the Graph that the plan was made from.
    pub fn of_plan(plan: &Plan, module: &Module) -> Self {
        let bare = |m: &Memory| Memory { name: m.name.clone(), capacity: m.capacity, ..Memory::default() };
        let steps = || {
            plan.entries.iter().flat_map(|e| {
                let graph = module.entries.iter().find(|g| g.kind == e.kind);
                e.steps.iter().map(move |s| (s, graph.and_then(|g| g.nodes.get(s.node as usize))))
            })
        };
        let kernels = || steps().filter(|(s, _)| matches!(s.code, Code::Kernel(_)));
        let reads_state = |args: &[Arg]| args.iter().any(|a| matches!(a, Arg::State(_)));
        let mixes = |role: Role| {
            let mut of = kernels().filter(|(s, _)| reads_state(&s.args));
            of.find(|(_, node)| node.is_some_and(|n| n.scope.role() == role)).map(|(s, _)| s.unit)
        };
        let sliced = kernels().filter_map(|(s, node)| Some((node?.scope.part.slice()?, s.unit)));
        let slices: BTreeMap<u32, u32> = sliced.collect();
        let is_host = |unit: u32| plan.units.get(unit as usize).is_some_and(is_host);
        let staged = kernels().filter_map(|(s, node)| {
            let scope = &node.filter(|n| !matches!(n.op, Op::ExpertFfn { .. }))?.scope;
            let whole = scope.part.slice().is_none() && is_host(s.unit);
            scope.layer.filter(|_| whole).map(|layer| (layer, s.unit))
        });
        let staged: BTreeMap<u32, u32> = staged.collect();
        let layers = staged.last_key_value().map_or(0, |(&last, _)| last + 1);
        // The first kernel step embeds tokens.
        let rest = kernels().next().map(|(s, _)| s.unit);
        Self {
            units: plan.units.clone(),
            memories: plan.memories.iter().map(bare).collect(),
            links: plan.links.clone(),
            attention: mixes(Role::Attention).unwrap_or(0),
            mixer: mixes(Role::Mixer).unwrap_or(0),
            rest: rest.unwrap_or(0),
            slices: slices.into_values().collect(),
            stages: (0..layers).map(|layer| staged.get(&layer).copied().unwrap_or(0)).collect(),
            experts: plan.experts.clone(),
        }
    }

    /// True if router scores predict the experts that are brought into cache frames.
    pub fn predicts_experts(&self) -> bool {
        self.experts.policy.cached().is_some_and(|c| c.ahead > 0)
    }

    /// The memory of a unit.
    pub fn memory(&self, unit: u32) -> u32 {
        self.units.get(unit as usize).map_or(0, |u| u.memory)
    }

    /// The unit of a node outside of static graphs; [`ExpertPlacement::of_layer`] has the units of experts.
    pub fn of_node(&self, node: &Node) -> u32 {
        if let Some(unit) = self.of_host(node) {
            return unit;
        }
        match node.op {
            Op::ExpertFfn { .. }
            | Op::NeuronFfn { .. }
            | Op::RequestExperts { .. }
            | Op::LimitCapacity(_) => 0,
            Op::Dispatch { .. } | Op::Combine { .. } if self.whole(node.scope.layer).is_none() => 0,
            // A builtin of the runtime that the unit has no kernel for runs on the CPU.
            Op::Dispatch { .. } | Op::RopeAngles { .. } if !self.takes(self.rest, &node.op) => 0,
            _ => self.of_role(node.scope.role()),
        }
    }

    /// Whether another unit than the CPU computes a node outside of static graphs, or some of its experts.
    pub fn is_elsewhere(&self, node: &Node) -> bool {
        let experts = || self.experts.of_layer(node.scope.layer).is_some_and(|(_, of)| of.units != [0]);
        self.of_node(node) != 0
            || (node.op.expert_ffn().is_some() && self.of_host(node).is_none() && experts())
    }

    /// The unit of the host that has a node's slice of experts or heads, or its layer.
    pub fn of_host(&self, node: &Node) -> Option<u32> {
        match node.scope.part.slice() {
            Some(slice) => Some(self.slices.get(slice as usize).copied().unwrap_or(0)),
            None => self.stages.get(node.scope.layer? as usize).copied(),
        }
    }

    /// True if a unit is of another host than the first.
    pub fn is_host(&self, unit: u32) -> bool {
        self.units.get(unit as usize).is_some_and(is_host)
    }

    /// Memories of other hosts that hold a part of the model.
    pub fn memories_of_hosts(&self) -> BTreeSet<u32> {
        let experts = self.experts.layers.iter().flat_map(|l| &l.units);
        let units = self.slices.iter().chain(&self.stages).chain(experts).copied();
        units.filter(|&unit| self.is_host(unit)).map(|unit| self.memory(unit)).collect()
    }

    /// The unit of a role's nodes, experts aside.
    const fn of_role(&self, role: Role) -> u32 {
        match role {
            Role::Attention => self.attention,
            Role::Mixer => self.mixer,
            Role::Network | Role::Head | Role::Other => self.rest,
        }
    }

    /// The unit that permanently has all experts of a layer, if it also computes the rest of the layer.
    pub fn whole(&self, layer: Option<u32>) -> Option<u32> {
        match self.experts.of_layer(layer)?.1.units[..] {
            [unit] if unit != 0 && unit == self.rest => Some(unit),
            _ => None,
        }
    }

    /// True if the backend of a unit runs an operator.
    fn takes(&self, unit: u32, op: &Op) -> bool {
        let backend = self.units.get(unit as usize).and_then(|u| backends::named(&u.backend));
        backend.is_some_and(|f| f.takes(op))
    }

    /// The NDP command streams of a unit, if it computes experts by them.
    pub fn streams(&self, unit: u32) -> Option<&'static dyn CommandStreams> {
        backends::command_streams(&self.units.get(unit as usize)?.backend)
    }

    /// Experts of a layer whose matrices are in a memory other than the CPU's, ascending. On targets with NDP
    /// DIMMs these are all experts, elsewhere those that start on the unit of the memory.
    pub fn experts_of(&self, layer: u32, memory: u32) -> Vec<u32> {
        let Some((_, of)) = self.experts.of_layer(Some(layer)) else { return Vec::new() };
        let cold = self.experts.policy.cold();
        match of.units.iter().find(|&&u| self.memory(u) == memory) {
            Some(&unit) if Some(unit) == cold => (0..of.starts.len() as u32).collect(),
            Some(&unit) => of.on(unit),
            None => Vec::new(),
        }
    }

    /// True if experts outside of static graphs read a table.
    pub fn divides(graph: &Graph, table: ValueId) -> bool {
        let reads = |n: &Node, v: ValueId| n.inputs.contains(&Operand::Value(v));
        graph.nodes.iter().any(|n| match n.op {
            Op::ExpertFfn { fixed: false, .. } => reads(n, table),
            Op::RequestExperts { .. } if reads(n, table) => {
                n.outputs.iter().any(|&v| v != table && Self::divides(graph, v))
            }
            _ => false,
        })
    }
}

/// True if a unit is of another host than the first, or of another NUMA node.
fn is_host(unit: &UnitRef) -> bool {
    is_beside(&unit.backend)
}

/// Assigns attention, mixers, experts and the rest to units and records that in the placement. Without static
/// graphs it creates the placement. Several hosts divide the model as `hosts` says. A run takes at most `budget` bytes of the memory of the unit that experts
/// are for. Returns the units, and a decision for each layer of which experts leave the CPU or could have
/// left it.
///
/// # Errors
/// Fails if the device does not have a named unit, or if that unit does not run what is assigned to it.
pub fn assign_units(
    module: &Module,
    placement: &mut Option<Placement>,
    list: &UnitList<'_>,
    config: &moec_config::PlacementConfig,
    hosts: HostPlacement,
    budget: Option<u64>,
    loads: Option<&Loads>,
) -> Result<(UnitAssignment, Vec<Decision>)> {
    let mut decisions = Vec::new();
    let mut assignment = UnitAssignment::all_on_cpu(list);
    let attention = list.named("attention", &config.attention)?.and_then(|index| list.accelerator(index));
    let named = list.named("experts", &config.experts)?;
    if let Some(budget) = budget {
        limit_memory(&mut assignment, list, named, budget)?;
    }
    if list.accelerators.is_empty() {
        return Ok((assignment, decisions));
    }
    let placed = placement.get_or_insert(Placement::dynamic(expert_tables(module)?));
    placed.units = list.device.units.iter().map(|u| u.name.clone()).collect();
    let (beside_frames, decision) = dense::unit(module, list, config, &assignment, named, &placed.experts)?;
    decisions.extend(decision);
    let requested = "requested by `placement.attention`";
    let attention = attention.map(|of| (of, requested)).or(beside_frames.map(|of| (of, dense::WHY)));
    if let Some((accelerator, why)) = attention {
        assignment.attention = accelerator.index;
        assign(module, placed, accelerator, Role::Attention, why)?;
    }
    let rest = list.dynamic("rest", &config.rest)?;
    let mixer = list.dynamic("mixer", &config.mixer)?;
    if let Named::Unit(accelerator) = mixer {
        assignment.mixer = accelerator.index;
        assign(module, placed, accelerator, Role::Mixer, "requested by `placement.mixer`")?;
    }
    if hosts == HostPlacement::Stages {
        decisions.extend(stages::stages(module, placed, list, &mut assignment)?);
        return Ok((assignment, decisions));
    }
    if hosts == HostPlacement::Owners {
        decisions.extend(owners::owners(module, placed, list, &mut assignment)?);
        return Ok((assignment, decisions));
    }
    if module.entries.iter().flat_map(|g| &g.nodes).any(|n| n.scope.part.slice().is_some()) {
        assignment.slices = if hosts == HostPlacement::Slices { list.hosts() } else { Vec::new() };
        slice_rows(module, placed, list, &assignment)?;
        return Ok((assignment, decisions));
    }
    let mut taken = BTreeMap::new();
    for role in [Role::Attention, Role::Mixer] {
        *taken.entry(assignment.memory(assignment.of_role(role))).or_default() += states(module, role);
    }
    let mut leaving = Leaving { module, list, config, named, layers: placed.experts.len(), taken };
    for layer in 0..leaving.layers {
        let table = &placed.experts[layer];
        let choice = leaving.choose(layer, table, loads, &assignment)?;
        if let Some(accelerator) = choice.experts.first().and_then(|&(_, unit)| list.accelerator(unit)) {
            takes_experts(module, table.layer, accelerator)?;
        }
        decisions.extend(leaving.decision(table, &choice));
        take(placed, layer, &choice.experts, &mut assignment);
    }
    let rest = match rest {
        Named::Unit(accelerator) => Some((accelerator, "requested by `placement.rest`")),
        Named::Cpu => None,
        Named::Auto if beside_frames.is_some() => beside_frames.map(|of| (of, dense::WHY)),
        Named::Auto => attention
            .filter(|&(accelerator, _)| rest_follows_attention(module, &assignment, accelerator, mixer))
            .map(|(accelerator, _)| (accelerator, "with all of the model")),
    };
    if let Some((accelerator, why)) = rest {
        assignment.rest = accelerator.index;
        if let Named::Auto = mixer {
            assign_mixers(module, placed, &mut assignment, accelerator)?;
        }
        for (graph, node) in of_rest(module, &assignment) {
            runs(accelerator, node)?;
            place(placed, graph, node, accelerator.index, why);
        }
    }
    expert_rows(module, placed, &assignment);
    Ok((assignment, decisions))
}

/// Nodes of the rest that its unit computes.
fn of_rest<'m>(
    module: &'m Module,
    assignment: &UnitAssignment,
) -> impl Iterator<Item = (&'m Graph, &'m Node)> {
    let nodes = module.entries.iter().flat_map(|g| g.nodes.iter().map(move |n| (g, n)));
    let mixes = |n: &Node| n.scope.role().mixes_tokens();
    nodes.filter(move |(_, n)| assignment.rest != 0 && !mixes(n) && assignment.of_node(n) == assignment.rest)
}

/// Nodes of a role.
fn of_role(module: &Module, role: Role) -> impl Iterator<Item = (&Graph, &Node)> {
    let nodes = module.entries.iter().flat_map(|g| g.nodes.iter().map(move |n| (g, n)));
    nodes.filter(move |(_, n)| n.scope.role() == role)
}

/// Bytes of the states that nodes of a role read. Caches are counted in f32, which no other format exceeds.
fn states(module: &Module, role: Role) -> u64 {
    let read = |i: &Operand| if let Operand::State(s) = i { Some(*s) } else { None };
    let read: BTreeSet<StateId> =
        of_role(module, role).flat_map(|(_, n)| n.inputs.iter().filter_map(read)).collect();
    let bytes = read.iter().filter_map(|s| module.states.get(s.0 as usize)).map(|s| s.ty.bytes() as u64);
    bytes.sum()
}

/// Assigns mixers to the unit of the rest; if it does not run one of their operators, records that as the
/// reason.
fn assign_mixers(
    module: &Module,
    placed: &mut Placement,
    assignment: &mut UnitAssignment,
    accelerator: DynamicUnit<'_>,
) -> Result<()> {
    let missing = of_role(module, Role::Mixer).find(|(_, n)| runs(accelerator, n).is_err());
    let Some((_, missing)) = missing else {
        assignment.mixer = accelerator.index;
        return assign(module, placed, accelerator, Role::Mixer, "with the rest");
    };
    let why = format!("`{}` does not run `{}`", accelerator.unit.name, missing.op.name());
    for (graph, node) in of_role(module, Role::Mixer) {
        place(placed, graph, node, assignment.mixer, &why);
    }
    Ok(())
}

/// True if the rest goes with attention: the unit has all experts, its memory holds the model, and it runs
/// all of it.
fn rest_follows_attention(
    module: &Module,
    assignment: &UnitAssignment,
    accelerator: DynamicUnit<'_>,
    mixer: Named<'_>,
) -> bool {
    let there = UnitAssignment { rest: accelerator.index, ..assignment.clone() };
    let mut mixers = of_role(module, Role::Mixer);
    let mixes = match mixer {
        Named::Unit(unit) => unit.index == accelerator.index,
        Named::Auto => mixers.all(|(_, node)| runs(accelerator, node).is_ok()),
        Named::Cpu => mixers.next().is_none(),
    };
    let layers = module.entries.iter().flat_map(|g| &g.nodes);
    let mut experts = layers.filter(|n| matches!(n.op, Op::ExpertFfn { .. } | Op::NeuronFfn { .. }));
    let weights: u64 = module.weights.iter().map(stored).sum();
    let states: u64 = module.states.iter().map(|s| s.ty.bytes() as u64).sum();
    mixes
        && experts.all(|n| there.whole(n.scope.layer).is_some())
        && weights.saturating_add(states) <= most(assignment, accelerator.index)
        && of_rest(module, &there).all(|(_, node)| runs(accelerator, node).is_ok())
        && backends::gpu_kernels(accelerator.backend.name()).is_some()
}

/// Bytes of a weight as it is stored.
fn stored(weight: &Weight) -> u64 {
    let cols = weight.shape.last().copied().unwrap_or(1).max(1);
    let rows = weight.shape.iter().product::<usize>() / cols;
    (weight.format.row_bytes(cols) * rows) as u64
}

/// Limits a run to `budget` bytes of the memory of an accelerator: of the named one, or else of the first.
///
/// # Errors
/// Fails if there is no such memory.
fn limit_memory(
    assignment: &mut UnitAssignment,
    list: &UnitList<'_>,
    named: Option<u32>,
    budget: u64,
) -> Result<()> {
    let unit = named.or(list.accelerators.first().map(|f| f.index)).unwrap_or(0);
    let memory = assignment.memory(unit) as usize;
    let of = assignment.memories.get_mut(memory).filter(|_| memory > 0).ok_or_else(|| {
        Error::input(format!(
            "`device_budget` under `[memory]`, but `{}` has only the CPU's memory",
            list.device.name
        ))
        .because("it is for the memory of a GPU")
        .hint("`budget` under `[memory]` limits the CPU's memory")
    })?;
    of.capacity = Some(of.capacity.map_or(budget, |c| c.min(budget)));
    Ok(())
}

/// Bytes of a unit's memory that experts may take: a tenth is left for activations.
fn most(assignment: &UnitAssignment, unit: u32) -> u64 {
    let capacity = assignment.memories.get(assignment.memory(unit) as usize).and_then(|m| m.capacity);
    capacity.map_or(u64::MAX, |c| c - c / 10)
}

/// Moves experts of a table to their units.
fn take(placed: &mut Placement, layer: usize, chosen: &[(u32, u32)], assignment: &mut UnitAssignment) {
    let Some(table) = placed.experts.get_mut(layer) else { return };
    for &(expert, unit) in chosen {
        if let Some(row) = table.experts.get_mut(expert as usize) {
            row.unit = unit;
        }
    }
    if chosen.is_empty() {
        return;
    }
    regroup(table);
    // Rows of a static graph are not among the rows that are left.
    let allowed = |unit: u32| unit == 0 || chosen.iter().any(|&(_, u)| u == unit);
    let mut units: Vec<u32> = table.experts.iter().map(|row| row.unit).filter(|&u| allowed(u)).collect();
    // Experts of static graphs run on the CPU if their rows do not pay for a launch.
    units.extend(table.experts.iter().any(|row| !allowed(row.unit)).then_some(0));
    units.sort_unstable();
    units.dedup();
    let start = |unit: u32| units.iter().position(|&u| u == unit).unwrap_or(0) as u32;
    let starts = table.experts.iter().map(|row| start(row.unit)).collect();
    assignment.experts.layers.push(ExpertLayer {
        layer: table.layer,
        units,
        starts,
        ..ExpertLayer::default()
    });
}

/// Records where the experts of a layer start.
pub(super) fn record_starts(placed: &mut Placement, of: &ExpertLayer) {
    let Some(table) = placed.experts.iter_mut().find(|t| t.layer == of.layer) else { return };
    for (row, &at) in table.experts.iter_mut().zip(&of.starts) {
        row.unit = of.units.get(at as usize).copied().unwrap_or(0);
    }
    regroup(table);
}

/// Splits CPU groups of which some experts have moved: those become groups of their own, after all others.
/// Groups of static graphs keep their experts and their numbers, since these name their artifacts.
fn regroup(table: &mut ExpertTable) {
    for index in 0..table.groups.len() {
        let unit = |e: &u32| table.experts.get(*e as usize).map_or(0, |row| row.unit);
        let group = &table.groups[index];
        let bytes = group.bytes / group.experts.len().max(1) as u64;
        let mut by_unit: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        group.experts.iter().for_each(|e| by_unit.entry(unit(e)).or_default().push(*e));
        // The first part keeps the number of the whole group.
        let stay = if by_unit.contains_key(&group.unit) {
            group.unit
        } else {
            by_unit.keys().next().copied().unwrap_or(0)
        };
        for (unit, experts) in by_unit {
            let (like, count) = (table.groups[index].clone(), experts.len() as u64);
            let part = ExpertGroup { unit, experts, bytes: bytes * count, ..like };
            let at = if unit == stay { index } else { table.groups.len() };
            for &e in &part.experts {
                table.experts[e as usize].group = at as u32;
            }
            if unit == stay {
                table.groups[at] = part;
            } else {
                table.groups.push(part);
            }
        }
    }
}

/// One expert of a layer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Size {
    /// Numbers of its matrices.
    weights: u64,
    /// Bytes of these as they are stored.
    pub(super) bytes: u64,
    /// Channels of its rows.
    pub(super) hidden: usize,
}

/// The experts of a layer.
pub(super) fn size(module: &Module, layer: u32) -> Size {
    let graph = module.entries.first();
    let node = graph.and_then(|g| {
        g.nodes.iter().find(|n| n.scope.layer == Some(layer) && matches!(n.op, Op::ExpertFfn { .. }))
    });
    let Some((graph, node)) = graph.zip(node) else { return Size::default() };
    let mut size =
        Size { hidden: node.outputs.first().map_or(0, |&v| graph.ty(v).cols()), ..Size::default() };
    let weights = node.inputs.iter().filter_map(|i| if let Operand::Weight(w) = i { Some(*w) } else { None });
    for weight in weights.map(|w: WeightId| module.weight(w)) {
        let numbers: usize = weight.shape.iter().skip(1).product();
        let cols = weight.shape.last().copied().unwrap_or(1).max(1);
        size.weights += if weight.shape.len() > 2 { numbers as u64 } else { 0 };
        size.bytes += (weight.format.row_bytes(cols) * (numbers / cols)) as u64;
    }
    size
}

/// Checks that a unit runs an operator.
///
/// # Errors
/// Fails with the names of both if it does not.
fn runs(accelerator: DynamicUnit<'_>, node: &Node) -> Result<()> {
    let (op, unit) = (node.op.name(), &accelerator.unit.name);
    if accelerator.unit.is_legal(op) && accelerator.backend.takes(&node.op) {
        return Ok(());
    }
    Err(Error::limit(format!("`{unit}` does not run `{op}` of `{}`", node.scope))
        .hint("keep it on the CPU: `\"auto\"` or `\"cpu\"` under `[placement]`"))
}

/// Assigns the nodes of a role in all layers to a unit.
fn assign(
    module: &Module,
    placed: &mut Placement,
    accelerator: DynamicUnit<'_>,
    role: Role,
    why: &str,
) -> Result<()> {
    for (graph, node) in of_role(module, role) {
        runs(accelerator, node)?;
        place(placed, graph, node, accelerator.index, why);
    }
    Ok(())
}

/// Records the unit of a node, and the reason.
fn place(placed: &mut Placement, graph: &Graph, node: &Node, unit: u32, why: &str) {
    let (entry, scope, op) = (graph.kind, node.scope.any_layer(), node.op.name().to_owned());
    list(placed, OpAssignment { entry, scope, op, unit, nodes: 0, why: why.to_owned() });
}

/// True if a unit runs the experts of a layer.
pub(super) fn takes_experts(module: &Module, layer: u32, accelerator: DynamicUnit<'_>) -> Result<()> {
    let nodes = module.entries.iter().flat_map(|g| &g.nodes);
    let of = nodes.filter(|n| n.scope.layer == Some(layer));
    if of.clone().any(|n| matches!(n.op, Op::ZeroExperts { .. })) {
        return Err(Error::limit(format!("layer {layer} has zero-computation experts"))
            .hint("keep all of its experts on the CPU: `experts = \"cpu\"` under `[placement]`"));
    }
    of.filter(|n| matches!(n.op, Op::ExpertFfn { fixed: false, .. })).try_for_each(|n| runs(accelerator, n))
}

/// Adds a placement row for each unit that runs experts.
pub(super) fn expert_rows(module: &Module, placed: &mut Placement, assignment: &UnitAssignment) {
    for graph in &module.entries {
        for node in graph.nodes.iter().filter(|n| matches!(n.op, Op::ExpertFfn { fixed: false, .. })) {
            let Some((_, of)) = assignment.experts.of_layer(node.scope.layer) else { continue };
            for &unit in &of.units {
                let why = match &assignment.experts.policy {
                    ExpertPolicy::Fixed => "experts with a fixed unit",
                    _ => ASSIGNED,
                };
                list(
                    placed,
                    OpAssignment {
                        entry: graph.kind,
                        scope: node.scope.any_layer(),
                        op: node.op.name().to_owned(),
                        unit,
                        nodes: 0,
                        why: why.to_owned(),
                    },
                );
            }
        }
    }
}

/// Adds a placement row for each host that computes a slice of the experts or of attention.
///
/// # Errors
/// Fails if the unit of a host does not run them.
fn slice_rows(
    module: &Module,
    placed: &mut Placement,
    list: &UnitList<'_>,
    assignment: &UnitAssignment,
) -> Result<()> {
    for graph in &module.entries {
        for node in &graph.nodes {
            let Some(unit) = assignment.of_host(node) else { continue };
            if let Some(accelerator) = list.accelerator(unit) {
                runs(accelerator, node)?;
            }
            let what = match node.scope.role() {
                Role::Attention => "a slice of attention's heads",
                _ => "a slice of all experts",
            };
            place(placed, graph, node, unit, what);
        }
    }
    Ok(())
}

/// Counts a node in its row of the placement. A row that is new replaces that of the CPU.
fn list(placed: &mut Placement, row: OpAssignment) {
    let same = |o: &OpAssignment| o.entry == row.entry && o.scope == row.scope && o.op == row.op;
    if let Some(found) = placed.ops.iter_mut().find(|o| same(o) && o.unit == row.unit && o.why == row.why) {
        found.nodes += 1;
        return;
    }
    placed.ops.retain(|o| !(same(o) && o.unit == 0 && o.op != "expert_ffn"));
    placed.ops.push(OpAssignment { nodes: 1, ..row });
}

/// Builds one table per MoE layer for dynamic shapes: every expert has its own group and no capacity.
///
/// # Errors
/// Fails if there are more experts than a plan can hold.
pub fn expert_tables(module: &Module) -> Result<Vec<ExpertTable>> {
    let Some(graph) = module.entries.first() else { return Ok(Vec::new()) };
    let mut tables = Vec::new();
    for node in &graph.nodes {
        if let Op::Router(desc) = &node.op {
            let experts = (0..desc.experts)
                .map(|e| Ok(ExpertRow { group: int(e)?, ..ExpertRow::default() }))
                .collect::<Result<_>>()?;
            tables.push(ExpertTable {
                layer: node.scope.layer.unwrap_or(int(tables.len())?),
                k: int(desc.k)?,
                tiers: Vec::new(),
                expected: None,
                groups: Vec::new(),
                experts,
            });
        }
    }
    Ok(tables)
}

fn int(x: usize) -> Result<u32> {
    u32::try_from(x).map_err(|_| Error::limit(format!("{x} is past what a plan can hold")))
}
