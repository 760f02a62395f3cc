//! The pipeline: one list of passes, in order. A [`Compilation`] goes through it, with its [`Inputs`], the
//! Graph, the placement ([`Placed`], [`Neurons`]) and the Plan ([`Planned`]). The row of a pass has what it
//! reads of these and what it changes.
#![expect(
    clippy::cast_possible_truncation,
    reason = "ids of a graph and numbers of one model, whose sizes the import bounds"
)]

mod compilation;
mod graph;
mod inputs;
mod neurons;
mod placement;
mod plan;

pub use compilation::{Compilation, Compiled, Neurons, Placed, Planned};
pub use inputs::{Candidate, Change, Inputs, QualityProbe, Start, first_token};

use moec_base::error::{Error, Result};
use moec_base::progress::Progress;
use moec_config::HostPlacement;
use moec_passes::{barriers, insert_copies, memory, schedule, threshold};

/// A pass: its name, its compilations, the IR that it changes, the reason for its place, and its function.
#[derive(Debug)]
pub struct Pass {
    /// Name for `--print-after` and `--stop-after`.
    pub name: &'static str,
    /// Compilations that it runs in.
    pub when: When,
    /// IR that it changes, which is printed after it.
    pub ir_level: IrLevel,
    run: fn(&mut Compilation<'_>) -> Result<()>,
    /// Reason for its place in the list.
    pub why: &'static str,
}

/// Compilations that a pass runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// All.
    Always,
    /// Targets with a unit whose graphs are static.
    Static,
    /// Models whose experts have capacities: for such targets, and for their host builds on the CPU.
    Capacities,
    /// Models that memory does not hold.
    Budget,
    /// Models that memory does not hold, and those that prefetch experts into the GPU's memory.
    RequestsExperts,
    /// Targets with accelerators with dynamic shapes.
    Accelerators,
    /// Targets with NDP DIMMs, and builds with a policy for the GPU's expert cache.
    Assigned,
    /// Builds with a policy for the GPU's expert cache.
    GpuCache,
    /// Targets whose units have memories of their own.
    Memories,
    /// Models whose experts have thresholds.
    Thresholds,
    /// Models whose experts are cut into slices, for hosts or by request.
    Slices,
    /// Models whose attention is cut by heads, for hosts or by request.
    Heads,
    /// Targets with several hosts, each with whole experts.
    Owners,
    /// All but those whose values are read by name, so that each must exist.
    NotAsLowered,
}

impl When {
    /// Words for users: the pass runs ….
    pub const fn words(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Static => "where graphs are static",
            Self::Capacities => "where experts have capacities",
            Self::Budget => "where memory has a budget",
            Self::RequestsExperts => "where memory has a budget, or the GPU's expert cache prefetches",
            Self::Accelerators => "on accelerators with dynamic shapes",
            Self::Assigned => "with NDP DIMMs, or `policy` names a system",
            Self::GpuCache => "where `policy` names a system",
            Self::Memories => "where units have memories of their own",
            Self::Thresholds => "where gates have thresholds",
            Self::Slices => "where experts are cut into slices",
            Self::Heads => "where attention is cut by heads",
            Self::Owners => "where hosts have whole experts",
            Self::NotAsLowered => "unless values are looked at by name",
        }
    }

    /// True if a pass of this kind has anything to do in a compilation.
    pub fn applies(self, c: &Compilation<'_>) -> bool {
        let (given, placed) = (&c.inputs, &c.placed);
        match self {
            Self::Always => true,
            Self::Static => given.units.is_some(),
            Self::Capacities => given.units.is_some() || placed.placement.is_some(),
            Self::Budget => given.config.memory.budget.is_some(),
            Self::RequestsExperts => {
                given.config.memory.budget.is_some() || placed.assignment.predicts_experts()
            }
            Self::Accelerators => {
                !given.list.accelerators.is_empty() || given.config.memory.device_budget.is_some()
            }
            Self::Assigned => given.list.has_near_data || given.config.placement.policy.is_some(),
            Self::GpuCache => placed.assignment.experts.policy.cached().is_some(),
            Self::Memories => placed.assignment.memories.len() > 1,
            Self::Thresholds => !given.thresholds.by_layer.is_empty(),
            Self::Slices => given.cuts_experts(),
            Self::Heads => given.cuts_attention(),
            Self::Owners => given.hosts() == HostPlacement::Owners,
            Self::NotAsLowered => !given.as_lowered,
        }
    }
}

/// IR that a pass changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrLevel {
    /// Computation.
    Graph,
    /// Units.
    Placement,
    /// Steps, memory and order.
    Plan,
}

impl IrLevel {
    /// Word for users.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Graph => "Graph",
            Self::Placement => "placement",
            Self::Plan => "Plan",
        }
    }
}

/// Every pass, in order.
pub const PIPELINE: &[Pass] = &[
    // The Graph: the computation.
    Pass {
        name: "lower",
        when: When::Always,
        ir_level: IrLevel::Graph,
        run: |c| graph::lower(&c.inputs).map(|module| c.module = module),
        why: "lowers the model to a Graph, op by op as the reference computes",
    },
    Pass {
        name: "threshold",
        when: When::Thresholds,
        ir_level: IrLevel::Graph,
        run: |c| {
            threshold::threshold(&mut c.module, &c.inputs.thresholds);
            Ok(())
        },
        why: "the only pass that changes what the model computes; all later passes change how",
    },
    Pass {
        name: "format",
        when: When::Always,
        ir_level: IrLevel::Graph,
        run: |c| graph::format(&c.inputs, &mut c.module),
        why: "before rewriting, which may fold factors only into exact weights",
    },
    Pass {
        name: "rewrite",
        when: When::Always,
        ir_level: IrLevel::Graph,
        run: |c| graph::rewrite(&c.inputs, &mut c.module),
        why: "on the Graph, where equations hold; the target's costs choose the form",
    },
    Pass {
        name: "slice_experts",
        when: When::Slices,
        ir_level: IrLevel::Graph,
        run: |c| graph::slice_experts(&c.inputs, &mut c.module),
        why: "the operators are final; which unit computes a slice is part of the placement",
    },
    Pass {
        name: "slice_attention",
        when: When::Heads,
        ir_level: IrLevel::Graph,
        run: |c| graph::slice_attention(&c.inputs, &mut c.module),
        why: "as for experts: norms and projections have their final form",
    },
    // The placement: contents of static graphs, and units. Shapes of a CPU are dynamic.
    Pass {
        name: "tier",
        when: When::Static,
        ir_level: IrLevel::Placement,
        run: |c| placement::tier(&c.inputs, &c.module, &mut c.placed),
        why: "the operators are final, and static graphs need capacities first",
    },
    Pass {
        name: "group",
        when: When::Static,
        ir_level: IrLevel::Placement,
        run: |c| placement::group(&c.inputs, &c.module, &mut c.placed),
        why: "experts of one capacity can share a graph",
    },
    Pass {
        name: "assign_residency",
        when: When::Static,
        ir_level: IrLevel::Placement,
        run: |c| placement::assign_residency(&c.inputs, &c.module, &mut c.placed),
        why: "the cost of launching a whole group decides on its unit",
    },
    Pass {
        name: "outline_graphs",
        when: When::Capacities,
        ir_level: IrLevel::Graph,
        run: |c| graph::outline_graphs(&c.inputs, &mut c.module, &mut c.placed),
        why: "every expert has its unit; graphs of other units are outlined before kernels are chosen",
    },
    Pass {
        name: "assign_units",
        when: When::Accelerators,
        ir_level: IrLevel::Placement,
        run: |c| placement::assign_units(&c.inputs, &c.module, &mut c.placed),
        why: "operators outside static graphs go to the CPU or units with dynamic shapes",
    },
    Pass {
        name: "own_experts",
        when: When::Owners,
        ir_level: IrLevel::Graph,
        run: |c| graph::own_experts(&mut c.module, &c.placed.assignment),
        why: "it is known which host has which experts; each stores its own alone",
    },
    Pass {
        name: "plan_expert_schedule",
        when: When::Assigned,
        ir_level: IrLevel::Placement,
        run: |c| placement::plan_expert_schedule(&c.inputs, &c.module, &mut c.placed),
        why: "experts without a fixed unit are scheduled at run time; their costs are known now",
    },
    Pass {
        name: "cluster",
        when: When::NotAsLowered,
        ir_level: IrLevel::Graph,
        run: |c| neurons::cluster(&c.inputs, &mut c.module, &mut c.placed, &mut c.neurons),
        why: "it is known which experts only the CPU computes: they can be stored by neuron, before kernels are chosen",
    },
    Pass {
        name: "prefetch_experts",
        when: When::RequestsExperts,
        ir_level: IrLevel::Graph,
        run: |c| graph::prefetch_experts(&c.inputs, &mut c.module, &c.placed.assignment),
        why: "the CPU's experts are final; with a memory budget, layers request those that they will read",
    },
    // The Plan: kernels, memory and order.
    Pass {
        name: "layout",
        when: When::Always,
        ir_level: IrLevel::Plan,
        run: |c| plan::layout(&c.inputs, &c.module, &c.placed).map(|planned| c.planned = Some(planned)),
        why: "kernels and weight layouts are chosen for the final form of every node",
    },
    Pass {
        name: "fuse",
        when: When::NotAsLowered,
        ir_level: IrLevel::Plan,
        run: |c| plan::fuse(&c.inputs, planned(&mut c.planned)?),
        why: "kernels are chosen, so producers and consumers can be joined; before schedules, which are for the final kernels",
    },
    Pass {
        name: "insert_copies",
        when: When::Memories,
        ir_level: IrLevel::Plan,
        run: |c| insert_copies::insert_copies(&mut planned(&mut c.planned)?.plan),
        why: "the steps are final; values that a unit reads from another memory are copied first",
    },
    Pass {
        name: "tune",
        when: When::Always,
        ir_level: IrLevel::Plan,
        run: |c| {
            plan::tune(&c.inputs, c.timer.as_deref_mut(), &c.placed, &c.neurons, planned(&mut c.planned)?)
        },
        why: "the kernels are final; how a kernel divides its work changes no result",
    },
    Pass {
        name: "schedule",
        when: When::Always,
        ir_level: IrLevel::Plan,
        run: |c| {
            schedule::schedule(&mut planned(&mut c.planned)?.plan);
            Ok(())
        },
        why: "all steps are known: other units begin soon, and independent steps become neighbours, so that fewer barriers are needed",
    },
    Pass {
        name: "memory",
        when: When::Always,
        ir_level: IrLevel::Plan,
        run: |c| memory::memory(&mut planned(&mut c.planned)?.plan),
        why: "the order is final, and with it the lifetime of each buffer",
    },
    Pass {
        name: "barriers",
        when: When::Always,
        ir_level: IrLevel::Plan,
        run: |c| {
            let planned = planned(&mut c.planned)?;
            barriers::barriers(&mut planned.plan);
            planned.ordered = true;
            Ok(())
        },
        why: "steps on buffers that share bytes must wait for each other, and addresses are known now",
    },
    Pass {
        name: "size_expert_cache",
        when: When::Budget,
        ir_level: IrLevel::Plan,
        run: |c| {
            let artifacts = c.placed.statics.artifacts(&c.module);
            plan::size_expert_cache(&c.inputs, artifacts, planned(&mut c.planned)?)
        },
        why: "last, since the rest of the budget is for experts",
    },
    Pass {
        name: "size_gpu_expert_cache",
        when: When::GpuCache,
        ir_level: IrLevel::Plan,
        run: |c| plan::size_gpu_expert_cache(&c.inputs, &c.placed.assignment, planned(&mut c.planned)?),
        why: "the use of the GPU's memory is known, and how many experts the CPU's memory holds",
    },
];

/// Plan of the passes so far.
///
/// # Errors
/// A bug of the compiler: `layout` was left out.
fn planned(planned: &mut Option<Planned>) -> Result<&mut Planned> {
    planned.as_mut().ok_or_else(|| Error::bug("there is no plan yet"))
}

/// Names of the passes.
pub fn names() -> impl Iterator<Item = &'static str> {
    PIPELINE.iter().map(|p| p.name)
}

/// Passes to start at, to print after and to stop at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stops<'a> {
    /// Run no pass before this one: the compilation already holds the results of those.
    pub start_at: Option<&'a str>,
    /// Print the IR after this pass.
    pub print_after: Option<&'a str>,
    /// Run no pass after this one.
    pub stop_after: Option<&'a str>,
}

impl Compilation<'_> {
    /// Runs the pipeline; `print` gets the text that `stops` requests. Returns true if it ran to its end.
    ///
    /// The IR is verified after every pass, and also before the first unless that is `lower`. Passes run only
    /// here. A bundle's host build, the measurement of a placement, calibration and filetests are
    /// compilations, too. They start at the pass that follows their Graph. (Passes share code by calls:
    /// `tier` forms groups to compute their costs.)
    ///
    /// # Errors
    /// Fails if a name is not a pass, a pass fails, or the verifier fails, with the name of the pass.
    pub fn run(
        &mut self,
        stops: Stops<'_>,
        progress: &Progress,
        print: &mut dyn FnMut(&str),
    ) -> Result<bool> {
        for name in [stops.start_at, stops.print_after, stops.stop_after].into_iter().flatten() {
            find(name)?;
        }
        let first = PIPELINE.iter().position(|p| stops.start_at.is_none_or(|name| name == p.name));
        let passes = PIPELINE.get(first.unwrap_or(0)..).unwrap_or_default();
        let count = passes.iter().filter(|p| p.when.applies(self)).count();
        let bar = progress.items("Planning", count as u64, "passes");
        // A compilation that starts later brings its own Graph.
        if let Some(name) = stops.start_at {
            self.verify().map_err(|e| e.context(format!("the IR is wrong before pass `{name}`")))?;
        }
        for pass in passes {
            if pass.when.applies(self) {
                bar.label(pass.name);
                progress.detail("Running", &format!("pass `{}`", pass.name));
                (pass.run)(self).map_err(|e| e.context(format!("pass `{}` failed", pass.name)))?;
                self.verify()
                    .map_err(|e| e.context(format!("the IR is wrong after pass `{}`", pass.name)))?;
                self.ir_level = pass.ir_level;
                bar.add(1);
            }
            if stops.print_after == Some(pass.name) {
                bar.suspend(|| print(&self.text()));
            }
            if stops.stop_after == Some(pass.name) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The pass of that name.
///
/// # Errors
/// Fails if there is none.
pub fn find(name: &str) -> Result<&'static Pass> {
    let unknown = || {
        let all: Vec<_> = names().collect();
        Error::usage(format!("there is no pass `{name}`")).hint(format!("the passes are {}", all.join(", ")))
    };
    PIPELINE.iter().find(|p| p.name == name).ok_or_else(unknown)
}
