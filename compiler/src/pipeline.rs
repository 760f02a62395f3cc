//! The pipeline: one list, in order.

use crate::bundle::manifest::ProfileEntry;
use crate::bundle::{KERNELS, TOKENIZER};
use crate::config::{Config, Skip};
use crate::decisions::{AttentionDecision, Decisions};
use crate::error::{Error, Result};
use crate::import::{Checkpoint, ModelSpec};
use crate::mix::Formats;
use crate::passes::home::Homes;
use crate::passes::offload::Statics;
use crate::passes::rewrite::{Applied, Costs, rules};
use crate::passes::schedule::Writes;
use crate::passes::units::{UnitList, Units, expert_sizes_on};
use crate::passes::{
    barriers, cluster, convolve, cross, fetch, format, fuse, group, home, layout, lower, memory, offload,
    page, place, reside, rewrite, schedule, tier, tune,
};
use crate::profile::Profile;
use crate::profile::loads::{Loads, loads};
use crate::progress::Progress;
use crate::tuner::Tuner;
use moec_cpu::{CpuTarget, KernelSpec, WeightImportance};
use moec_ir::placement::{Overflow, Placement};
use moec_ir::plan::{BigLittle, ModelInfo, Plan};
use moec_ir::{Module, Op, WeightId};

/// Most bytes of logits that one call may give: a longer chunk gives fewer rows per call.
const LOGITS_BYTES: usize = 64 << 20;

/// A model on its way through the compiler.
#[derive(Debug)]
pub struct Compilation<'a> {
    /// What the user asked for.
    pub config: &'a Config,
    /// What is compiled.
    pub start: Start<'a>,
    /// For which CPU.
    pub target: &'a CpuTarget,
    /// The Graph, from `lower` on.
    pub module: Module,
    /// The units that share the model, where graphs are static; `None` where shapes are dynamic.
    pub units: Option<Units<'a>>,
    /// What calibration saw. Static graphs need it.
    pub profile: Option<&'a Profile>,
    /// Measures what a placement costs in quality, where the user states what it may cost.
    pub quality: Option<&'a dyn QualityProbe>,
    /// Loads of the experts in chunks of the build, from `tier` on where graphs are static. `tier` takes those of the profile
    /// where nobody has given others.
    pub loads: Option<Loads>,
    /// Where things run, from `tier` on where graphs are static. Where they are not, but somebody has given a placement,
    /// experts keep its capacities, and are all computed on the processor.
    pub placement: Option<Placement>,
    /// What a request costs with attention on either unit, from `reside` on where that decides.
    pub attention: Option<AttentionDecision>,
    /// What static graphs compute, from `offload` on.
    pub statics: Statics,
    /// All units of the device.
    pub list: UnitList<'a>,
    /// Where the rest lives, from `home` on.
    pub homes: Homes,
    /// The Plan, from `layout` on.
    pub plan: Option<Plan>,
    /// Whether the plan says who waits for whom: from `barriers` on.
    pub ordered: bool,
    /// Kernels of the plan.
    pub kernels: Vec<KernelSpec>,
    /// Weight that each segment of the plan packs.
    pub segment_weights: Vec<WeightId>,
    /// What each step of the plan writes.
    pub writes: Writes,
    /// Times kernels, where the build was asked to.
    pub tuner: Option<Tuner<'a>>,
    /// Why kernels are what they are, from `tune` on.
    pub decisions: Option<Decisions>,
    /// How often each rewrite rule applied.
    pub applied: Applied,
    /// No rule applies: weights and nodes stay what `lower` made of them, for who looks at them by name.
    pub as_lowered: bool,
    /// Formats of weights that are not those of their classes.
    pub formats: Formats,
    /// Which errors of weights matter, for grouped formats; `None`: all the same.
    pub importance: Option<&'a dyn WeightImportance>,
    /// What the manifest says of the profile.
    pub profile_entry: Option<ProfileEntry>,
    /// What the last pass that ran has changed.
    prints: Prints,
}

/// What a compilation begins with.
#[derive(Clone, Copy, Debug)]
pub enum Start<'a> {
    /// A checkpoint, and what import made of it.
    Checkpoint(&'a Checkpoint, &'a ModelSpec),
    /// A Graph that has been through the first passes already, of this model: a bundle's, or one in a file.
    Graph(&'a ModelInfo),
}

/// A placement whose cost in quality is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The Graph, without capacities.
    pub module: &'a Module,
    /// The model.
    pub model: &'a ModelInfo,
    /// The capacities.
    pub placement: &'a Placement,
}

/// Measures what a placement costs in quality.
pub trait QualityProbe: std::fmt::Debug {
    /// By how much perplexity on held-out text rises, as a share, when experts have the capacities of a placement.
    ///
    /// # Errors
    /// The model cannot be run so.
    fn perplexity_increase(&self, candidate: &Candidate<'_>) -> Result<f64>;
}

/// A pass: its name, when it runs, what it changes, why it stands where it stands, and what it does.
#[derive(Debug)]
pub struct Pass {
    /// Name for `--print-after` and `--stop-after`.
    pub name: &'static str,
    /// Which compilations have anything for it to do.
    pub when: When,
    /// What it changes, and so what is printed after it.
    pub prints: Prints,
    run: fn(&mut Compilation<'_>) -> Result<()>,
    /// Why it stands there.
    pub why: &'static str,
}

/// Which compilations a pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// All.
    Always,
    /// Targets with a unit whose graphs are static.
    Static,
    /// Models whose experts have capacities: for such targets, and for their twins on the processor.
    Capacities,
    /// Models that memory does not hold.
    Budget,
    /// Targets with units that take shapes as they come beside the processor.
    Beside,
    /// Targets with memory modules that compute.
    Modules,
    /// Targets whose units have memories of their own.
    Memories,
    /// All but those in which somebody looks at values by name, and wants to find every one.
    NotAsLowered,
}

impl When {
    /// For people: the pass runs ….
    pub const fn words(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Static => "where graphs are static",
            Self::Capacities => "where experts have capacities",
            Self::Budget => "where memory has a budget",
            Self::Beside => "where units beside the processor take shapes as they come",
            Self::Modules => "where memory modules compute",
            Self::Memories => "where units have memories of their own",
            Self::NotAsLowered => "unless values are looked at by name",
        }
    }

    /// Whether a compilation has anything for such a pass to do.
    pub const fn applies(self, c: &Compilation<'_>) -> bool {
        match self {
            Self::Always => true,
            Self::Static => c.units.is_some(),
            Self::Capacities => c.units.is_some() || c.placement.is_some(),
            Self::Budget => c.config.memory.budget.is_some(),
            Self::Beside => !c.list.free.is_empty(),
            Self::Modules => c.list.modules,
            Self::Memories => c.homes.memories.len() > 1,
            Self::NotAsLowered => !c.as_lowered,
        }
    }
}

/// What a pass changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prints {
    /// What to compute.
    Graph,
    /// Where things run.
    Placement,
    /// How, where and when.
    Plan,
}

impl Prints {
    /// For people.
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
    // The Graph: what to compute.
    Pass {
        name: "lower",
        when: When::Always,
        prints: Prints::Graph,
        run: run_lower,
        why: "the model's description becomes a Graph, op by op as the reference computes",
    },
    Pass {
        name: "format",
        when: When::Always,
        prints: Prints::Graph,
        run: run_format,
        why: "before rewriting, which may fold a factor only into exact weights",
    },
    Pass {
        name: "rewrite",
        when: When::Always,
        prints: Prints::Graph,
        run: run_rewrite,
        why: "on the Graph, where equations hold; the target's cost picks the form",
    },
    // The placement: what fits into static graphs, and where it lives. Shapes of a processor are dynamic.
    Pass {
        name: "tier",
        when: When::Static,
        prints: Prints::Placement,
        run: run_tier,
        why: "the operators are final; capacities are the first thing that a static graph must know",
    },
    Pass {
        name: "group",
        when: When::Static,
        prints: Prints::Placement,
        run: run_group,
        why: "experts of one capacity can share a graph",
    },
    Pass {
        name: "reside",
        when: When::Static,
        prints: Prints::Placement,
        run: run_reside,
        why: "what a launch of a whole group costs decides where the group lives",
    },
    Pass {
        name: "convolve",
        when: When::Static,
        prints: Prints::Graph,
        run: run_convolve,
        why: "where every operator lives is known; what it costs there picks its form, before nodes are cut out of the Graph",
    },
    Pass {
        name: "offload",
        when: When::Capacities,
        prints: Prints::Graph,
        run: run_offload,
        why: "every expert has its home; what lives on another unit leaves the processor's path before kernels are chosen",
    },
    Pass {
        name: "home",
        when: When::Beside,
        prints: Prints::Placement,
        run: run_home,
        why: "what static graphs leave is the processor's, or goes to units that take shapes as they come",
    },
    Pass {
        name: "place",
        when: When::Modules,
        prints: Prints::Placement,
        run: run_place,
        why: "whom nobody has given a home is assigned in every step; what that costs is known now",
    },
    Pass {
        name: "cluster",
        when: When::NotAsLowered,
        prints: Prints::Graph,
        run: run_cluster,
        why: "whom the processor alone computes is known; what is left can lie neuron by neuron, before kernels are chosen",
    },
    Pass {
        name: "fetch",
        when: When::Budget,
        prints: Prints::Graph,
        run: run_fetch,
        why: "the processor's experts are final; where memory has a budget, layers say whom they will read",
    },
    // The Plan: how, where and when.
    Pass {
        name: "layout",
        when: When::Always,
        prints: Prints::Plan,
        run: run_layout,
        why: "kernels and weight layouts are chosen for the final form of every node",
    },
    Pass {
        name: "fuse",
        when: When::NotAsLowered,
        prints: Prints::Plan,
        run: run_fuse,
        why: "kernels are chosen, and what one writes another reads; before schedules, which are for the kernels that stay",
    },
    Pass {
        name: "cross",
        when: When::Memories,
        prints: Prints::Plan,
        run: run_cross,
        why: "steps are what they will be; what a unit reads of another memory is copied there first",
    },
    Pass {
        name: "tune",
        when: When::Always,
        prints: Prints::Plan,
        run: run_tune,
        why: "what a kernel computes is settled; how it cuts its work changes no result",
    },
    Pass {
        name: "schedule",
        when: When::Always,
        prints: Prints::Plan,
        run: run_schedule,
        why: "steps that do not wait for each other stand together",
    },
    Pass {
        name: "memory",
        when: When::Always,
        prints: Prints::Plan,
        run: run_memory,
        why: "the order is final, and with it how long each buffer lives",
    },
    Pass {
        name: "barriers",
        when: When::Always,
        prints: Prints::Plan,
        run: run_barriers,
        why: "buffers that share bytes must wait for each other, and now it is known which do",
    },
    Pass {
        name: "page",
        when: When::Budget,
        prints: Prints::Plan,
        run: run_page,
        why: "last, since what all else takes of the budget is known; the rest holds experts",
    },
];

/// Names of the passes.
pub fn names() -> impl Iterator<Item = &'static str> {
    PIPELINE.iter().map(|p| p.name)
}

/// Where to start, what to print and where to stop.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stops<'a> {
    /// Run no pass before this one: the compilation holds what those in front of it would have made.
    pub start_at: Option<&'a str>,
    /// Print the IR after this pass.
    pub print_after: Option<&'a str>,
    /// Run no pass after this one.
    pub stop_after: Option<&'a str>,
}

impl<'a> Compilation<'a> {
    /// A model before its first pass.
    pub fn new(
        config: &'a Config,
        checkpoint: &'a Checkpoint,
        spec: &'a ModelSpec,
        target: &'a CpuTarget,
    ) -> Self {
        Self::begin(config, Start::Checkpoint(checkpoint, spec), target, Module::default())
    }

    /// A model whose Graph there is: some pass behind `lower` is its first.
    pub fn of_graph(config: &'a Config, model: &'a ModelInfo, target: &'a CpuTarget, module: Module) -> Self {
        Self::begin(config, Start::Graph(model), target, module)
    }

    fn begin(config: &'a Config, start: Start<'a>, target: &'a CpuTarget, module: Module) -> Self {
        Self {
            config,
            start,
            target,
            module,
            units: None,
            profile: None,
            quality: None,
            loads: None,
            placement: None,
            attention: None,
            statics: Statics::default(),
            homes: Homes::at_home(&UnitList::of(target.device())),
            list: UnitList::of(target.device()),
            plan: None,
            ordered: false,
            kernels: Vec::new(),
            segment_weights: Vec::new(),
            writes: Writes::new(),
            tuner: None,
            decisions: None,
            applied: Applied::new(),
            as_lowered: false,
            formats: Formats::new(),
            importance: None,
            profile_entry: None,
            prints: Prints::Graph,
        }
    }

    /// The checkpoint.
    ///
    /// # Errors
    /// Our bug: a compilation of a Graph has none.
    pub fn checkpoint(&self) -> Result<&'a Checkpoint> {
        match self.start {
            Start::Checkpoint(checkpoint, _) => Ok(checkpoint),
            Start::Graph(_) => Err(Error::bug("a Graph is compiled, and no checkpoint")),
        }
    }

    /// What import made of the checkpoint.
    ///
    /// # Errors
    /// Our bug: a compilation of a Graph has none.
    pub fn spec(&self) -> Result<&'a ModelSpec> {
        match self.start {
            Start::Checkpoint(_, spec) => Ok(spec),
            Start::Graph(_) => Err(Error::bug("a Graph is compiled, and no checkpoint")),
        }
    }

    /// The Graph as `lower` makes it, whatever has become of it since.
    ///
    /// # Errors
    /// As of [`Compilation::run`].
    pub fn lowered(&self) -> Result<Module> {
        let mut own = Compilation::new(self.config, self.checkpoint()?, self.spec()?, self.target);
        let stops = Stops { stop_after: Some("lower"), ..Stops::default() };
        own.run(stops, &Progress::silent(), &mut |_| {})?;
        Ok(own.module)
    }

    /// Runs the pipeline; `print` gets the text that `stops` asks for. Gives whether it ran to its end.
    ///
    /// The IR is verified behind every pass, and in front of the first where that is not `lower`. Nothing else runs passes: a
    /// bundle's twin, the measurement of a placement, calibration and filetests are compilations, too, which start where
    /// their Graph stands. (What two passes share they call: `convolve` is `rewrite` with other rules, and `tier` forms
    /// groups to know what they cost.)
    ///
    /// # Errors
    /// A name that is no pass, a pass that fails, or a verifier that objects, naming the pass.
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
        // Whoever starts later brings a Graph of his own.
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
                self.prints = pass.prints;
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

    /// The plan.
    ///
    /// # Errors
    /// Before `layout` there is none.
    pub fn plan(&self) -> Result<&Plan> {
        self.plan.as_ref().ok_or_else(|| Error::bug("there is no plan yet"))
    }

    /// Text of what the last pass that ran has changed.
    pub fn text(&self) -> String {
        match (self.prints, &self.placement, &self.plan) {
            (Prints::Placement, Some(placement), _) => placement.to_string(),
            (Prints::Plan, _, Some(plan)) => plan.to_string(),
            _ => self.module.to_string(),
        }
    }

    /// Files beside weights that the runtime reads.
    fn artifacts(&self) -> Result<Vec<&'static str>> {
        let tokenizer = self.tokenizer()?.map(|_| TOKENIZER);
        Ok([KERNELS].into_iter().chain(tokenizer).collect())
    }

    /// The checkpoint's tokenizer, if it has one.
    ///
    /// # Errors
    /// One that cannot be used with this model.
    pub fn tokenizer(&self) -> Result<Option<&'a [u8]>> {
        match self.start {
            Start::Checkpoint(checkpoint, spec) => checkpoint.tokenizer(spec),
            Start::Graph(_) => Ok(None),
        }
    }

    /// Sizes that this build fixes.
    ///
    /// # Errors
    /// A context that the model does not have; our bug: those of a Graph are fixed.
    pub fn shapes(&self) -> Result<lower::Shapes> {
        let spec = self.spec()?;
        let shapes = self.config.shapes_for(spec.max_positions)?;
        let row = spec.vocab.max(1) * 4;
        let fit = LOGITS_BYTES / row;
        let rows = shapes.prefill_chunk;
        let prefill_out_rows = if rows <= fit { rows } else { (fit / 16 * 16).clamp(1, rows) };
        Ok(lower::Shapes {
            max_context: shapes.max_context,
            prefill_chunk: rows,
            prefill_out_rows,
            slots: shapes.decode_batch.iter().copied().max().unwrap_or(1),
            decode_batch: shapes.decode_batch,
            little: self.config.little(spec.experts_per_token())?,
        })
    }

    fn model_info(&self) -> Result<ModelInfo> {
        let (checkpoint, spec) = match self.start {
            Start::Checkpoint(checkpoint, spec) => (checkpoint, spec),
            Start::Graph(model) => return Ok(model.clone()),
        };
        let shapes = self.shapes()?;
        let int = |x: usize| {
            u32::try_from(x).map_err(|_| Error::limit(format!("{x} is past what a plan can hold")))
        };
        Ok(ModelInfo {
            family: spec.family.to_owned(),
            vocab: int(spec.vocab)?,
            hidden: int(spec.hidden)?,
            layers: int(spec.layers.len())?,
            max_context: int(shapes.max_context)?,
            slots: int(shapes.slots)?,
            bos: first_token(checkpoint, spec)?,
            eos: spec.eos.clone(),
            parameters: spec.params,
            active_parameters: spec.active_params,
            big_little: match shapes.little {
                Some(experts) => {
                    Some(BigLittle { experts: int(experts)?, gamma: self.config.decode.gamma as f32 })
                }
                None => None,
            },
        })
    }

    fn verify(&self) -> Result<()> {
        moec_ir::verify::module(&self.module).map_err(|e| Error::bug(e.to_string()))?;
        if let Some(placement) = &self.placement {
            moec_ir::verify::placement(placement).map_err(|e| Error::bug(e.to_string()))?;
        }
        let check = if self.ordered { moec_ir::verify::plan } else { moec_ir::verify::draft };
        self.plan.as_ref().map_or(Ok(()), |plan| check(plan).map_err(|e| Error::bug(e.to_string())))
    }

    fn plan_mut(&mut self) -> Result<&mut Plan> {
        self.plan.as_mut().ok_or_else(|| Error::bug("there is no plan yet"))
    }
}

/// The token in front of every text, where the tokenizer's configuration asks for one.
///
/// # Errors
/// One that the model does not have.
pub(crate) fn first_token(checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<Option<u32>> {
    let config = checkpoint.tokenizer_config()?;
    let asks = config.map(|c| c.flag_or("add_bos_token", false)).transpose()?.unwrap_or(false);
    match spec.bos.filter(|_| asks) {
        Some(bos) if bos as usize >= spec.vocab => {
            Err(Error::input(format!("`bos_token_id` is {bos}, but the model has {} tokens", spec.vocab))
                .because("`add_bos_token` in `tokenizer_config.json` puts it in front of every text")
                .hint("the configuration files are not of this model: download them again"))
        }
        bos => Ok(bos),
    }
}

/// The pass of that name.
///
/// # Errors
/// There is none.
pub fn find(name: &str) -> Result<&'static Pass> {
    let unknown = || {
        let all: Vec<_> = names().collect();
        Error::usage(format!("there is no pass `{name}`")).hint(format!("the passes are {}", all.join(", ")))
    };
    PIPELINE.iter().find(|p| p.name == name).ok_or_else(unknown)
}

#[expect(clippy::unnecessary_wraps, reason = "a pass may fail; this one does not")]
fn run_format(c: &mut Compilation<'_>) -> Result<()> {
    format::format(&mut c.module, &c.config.weights, &c.formats);
    Ok(())
}

fn run_lower(c: &mut Compilation<'_>) -> Result<()> {
    c.module = lower::lower(c.spec()?, &c.shapes()?)?;
    Ok(())
}

fn run_rewrite(c: &mut Compilation<'_>) -> Result<()> {
    let target = c.target;
    let none: &dyn Fn(&str) -> bool = &|_| false;
    let keep = c.as_lowered.then_some(none);
    let costs = Costs { legal: &|op| target.is_legal(op), launch: target.launch_cost() };
    let options = rewrite::Options { rules: rules::equations, keep, costs, islands: &[] };
    c.applied = rewrite::rewrite(&mut c.module, &options)?;
    Ok(())
}

fn run_tier(c: &mut Compilation<'_>) -> Result<()> {
    let Some(units) = &c.units else { return Ok(()) };
    let loads = match &c.loads {
        Some(given) => given.clone(),
        None => recorded(c)?,
    };
    let routers = c.module.entries.first().into_iter().flat_map(|g| &g.nodes).filter_map(|n| match &n.op {
        Op::Router(d) => Some((d.experts, d.k as u32)),
        _ => None,
    });
    if !routers.eq(loads.layers.iter().map(|l| (l.experts(), l.k))) {
        return Err(Error::input("the profile has other experts than the model")
            .hint("take it anew with `moec calibrate`"));
    }
    let wanted = &c.config.experts;
    let options = group_options(c)?;
    let sizes = expert_sizes_on(&c.module, units)?;
    let place = |coverage: f64| {
        group::tiered(&loads, units, wanted, coverage, &|layer| sizes.get(&layer).copied(), options)
    };
    let coverage = match c.config.quality.max_perplexity_increase {
        // What spills is computed all the same.
        Some(budget) if wanted.overflow == Overflow::Prune => {
            let probe = c.quality.ok_or_else(|| {
                Error::limit(format!("nothing here measures the loss of quality on `{}`", units.device.name))
                    .hint("name `text` under `[quality]`, or set `coverage` under `[experts]` in place of `max_perplexity_increase`")
            })?;
            let (module, model) = (&c.module, &c.model_info()?);
            let mut loss = |coverage: f64| {
                let placement = &place(coverage)?;
                probe.perplexity_increase(&Candidate { module, model, placement })
            };
            tier::spend(budget, &mut loss)?
        }
        _ => wanted.coverage,
    };
    c.placement = Some(place(coverage)?);
    c.loads = Some(loads);
    Ok(())
}

/// Loads of the profile in chunks of the build.
fn recorded(c: &Compilation<'_>) -> Result<Loads> {
    let profile = c.profile.ok_or_else(|| {
        Error::input("static capacities come from the loads that calibration saw, and there is no profile").hint(
            "`moec calibrate` records one; name it as `profile` under `[calibrate]`, or name `text` to read",
        )
    })?;
    let chunk = u32::try_from(c.shapes()?.prefill_chunk).map_err(|_| Error::limit("a chunk past 32 bits"))?;
    loads(profile, chunk)
}

fn group_options(c: &Compilation<'_>) -> Result<group::Options> {
    let (experts, home) = (&c.config.experts, c.list.wish("experts", &c.config.placement.experts)?);
    Ok(group::Options { group: experts.group, sizes: experts.sizes, home })
}

fn run_group(c: &mut Compilation<'_>) -> Result<()> {
    let options = group_options(c)?;
    let Some(((units, placement), loads)) = c.units.as_ref().zip(c.placement.as_mut()).zip(c.loads.as_ref())
    else {
        return Ok(());
    };
    group::group(placement, loads, &c.module, units, options)
}

fn run_reside(c: &mut Compilation<'_>) -> Result<()> {
    let Some(((units, placement), loads)) = c.units.as_ref().zip(c.placement.as_mut()).zip(c.loads.as_ref())
    else {
        return Ok(());
    };
    let homes = &c.config.placement;
    let wanted = reside::Wanted {
        attention: c.list.wish("attention", &homes.attention)?,
        experts: c.list.wish("experts", &homes.experts)?,
        mix: c.config.mix,
    };
    c.attention = reside::reside(placement, loads, &c.module, units, wanted)?;
    Ok(())
}

fn run_convolve(c: &mut Compilation<'_>) -> Result<()> {
    let Some((units, placement)) = c.units.as_ref().zip(c.placement.as_mut()) else { return Ok(()) };
    let target = c.target;
    let costs = Costs { legal: &|op| target.is_legal(op), launch: target.launch_cost() };
    for (rule, count) in convolve::convolve(&mut c.module, placement, units, costs)? {
        *c.applied.entry(rule).or_default() += count;
    }
    Ok(())
}

fn run_offload(c: &mut Compilation<'_>) -> Result<()> {
    let Some(placement) = &c.placement else { return Ok(()) };
    let Some(units) = &c.units else {
        c.statics = Statics::bounds(placement);
        return offload::offload(&mut c.module, &c.statics, false);
    };
    let statics = Statics::of(&c.module, placement, units)?;
    offload::offload(&mut c.module, &statics, true)?;
    // Nodes have other numbers now.
    c.statics = Statics::of(&c.module, placement, units)?;
    Ok(())
}

fn run_home(c: &mut Compilation<'_>) -> Result<()> {
    let known = match (&c.loads, c.profile) {
        (None, Some(_)) => Some(recorded(c)?),
        _ => None,
    };
    let loads = c.loads.as_ref().or(known.as_ref());
    c.homes = home::home(&c.module, &mut c.placement, &c.list, &c.config.placement, loads)?;
    Ok(())
}

fn run_place(c: &mut Compilation<'_>) -> Result<()> {
    let known = match (&c.loads, c.profile) {
        (None, Some(_)) => Some(recorded(c)?),
        _ => None,
    };
    let loads = c.loads.as_ref().or(known.as_ref());
    place::place(&c.module, &mut c.placement, &mut c.homes, &c.list, c.config, loads)
}

fn run_cross(c: &mut Compilation<'_>) -> Result<()> {
    let mut writes = std::mem::take(&mut c.writes);
    cross::cross(c.plan_mut()?, &mut writes)?;
    c.writes = writes;
    Ok(())
}

fn run_cluster(c: &mut Compilation<'_>) -> Result<()> {
    let skip = c.config.experts.skip;
    let paged = c.config.memory.budget.is_some();
    // Other units have kernels of their own.
    let elsewhere = if c.units.is_some() || !c.list.free.is_empty() || c.placement.is_some() {
        "other units compute experts on this target"
    } else {
        let seen: &dyn cluster::Activity = match c.profile {
            Some(profile) => profile,
            None => &cluster::Unseen,
        };
        return cluster::cluster(&mut c.module, skip, seen, paged);
    };
    if skip != Skip::On {
        return Ok(());
    }
    Err(Error::limit("`skip = \"on\"`, but experts cannot be skipped neuron by neuron here")
        .because(elsewhere)
        .hint("leave `skip` under `[experts]` at `\"auto\"`"))
}

fn run_fetch(c: &mut Compilation<'_>) -> Result<()> {
    // Neurons are asked for when it is known who is awake.
    let by_neurons = |n: &moec_ir::Node| matches!(n.op, Op::NeuronFfn { paged: Some(_), .. });
    let neurons = c.module.entries.iter().flat_map(|g| &g.nodes).any(by_neurons);
    if c.config.memory.budget.is_none() || neurons {
        return Ok(());
    }
    fetch::fetch(&mut c.module, c.config.memory.prefetch)
}

fn run_page(c: &mut Compilation<'_>) -> Result<()> {
    let Some(budget) = c.config.memory.budget else { return Ok(()) };
    let tokenizer = c.tokenizer()?.map_or(0, |text| text.len() as u64);
    let threads = match c.config.memory.threads {
        Some(threads) => threads,
        None => moec_runtime::cpu::threads(None).map_err(Error::from)?,
    };
    let wanted = page::Wanted {
        budget,
        threads: u32::try_from(threads).unwrap_or(u32::MAX),
        tokenizer,
        policy: c.config.memory.policy.as_deref(),
        flash: c.target.flash(),
        pin: c.config.memory.pin,
        prefetch: u32::try_from(c.config.memory.prefetch).unwrap_or(u32::MAX),
    };
    let profile = c.profile;
    let paged = page::page(c.plan_mut()?, wanted, profile)?;
    if let Some(decisions) = &mut c.decisions {
        decisions.cache = paged.choice.as_ref().map(crate::decisions::CacheDecision::of);
    }
    Ok(())
}

fn run_layout(c: &mut Compilation<'_>) -> Result<()> {
    let artifacts = c.artifacts()?;
    let cache = c.config.kv_format();
    let (statics, homes) = (&c.statics, &c.homes);
    let draft = layout::layout(&c.module, c.model_info()?, c.target, cache, &artifacts, statics, homes)?;
    let mut plan = draft.plan;
    // What bounds the experts of a twin is no placement of its own.
    let placed = c.units.is_some() || !c.list.free.is_empty();
    if let Some(placement) = c.placement.as_ref().filter(|_| placed) {
        plan.placement = placement.clone();
    }
    c.plan = Some(plan);
    c.kernels = draft.kernels;
    c.segment_weights = draft.segment_weights;
    c.writes = draft.writes;
    Ok(())
}

fn run_fuse(c: &mut Compilation<'_>) -> Result<()> {
    let plan = c.plan.as_mut().ok_or_else(|| Error::bug("there is no plan yet"))?;
    fuse::fuse(plan, &mut c.kernels, &mut c.writes, c.target)
}

fn run_tune(c: &mut Compilation<'_>) -> Result<()> {
    let plan = c.plan.as_mut().ok_or_else(|| Error::bug("there is no plan yet"))?;
    let mut decisions = tune::tune(plan, &mut c.kernels, c.target, c.tuner.as_mut())?;
    decisions.attention.clone_from(&c.attention);
    c.decisions = Some(decisions);
    Ok(())
}

fn run_schedule(c: &mut Compilation<'_>) -> Result<()> {
    let mut writes = std::mem::take(&mut c.writes);
    schedule::schedule(c.plan_mut()?, &mut writes);
    c.writes = writes;
    Ok(())
}

fn run_memory(c: &mut Compilation<'_>) -> Result<()> {
    memory::memory(c.plan_mut()?)
}

fn run_barriers(c: &mut Compilation<'_>) -> Result<()> {
    let writes = std::mem::take(&mut c.writes);
    barriers::barriers(c.plan_mut()?, &writes);
    (c.writes, c.ordered) = (writes, true);
    Ok(())
}
