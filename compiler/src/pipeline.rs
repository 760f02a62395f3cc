//! The pipeline: one list, in order.

use crate::bundle::manifest::ProfileEntry;
use crate::bundle::{KERNELS, TOKENIZER};
use crate::config::Config;
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
    barriers, convolve, cross, fetch, format, fuse, group, home, layout, lower, memory, offload, page,
    reside, rewrite, schedule, tier, tune,
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
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// What import made of it.
    pub spec: &'a ModelSpec,
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
    /// Loads of the experts in chunks of the build, from `tier` on where graphs are static.
    pub loads: Option<Loads>,
    /// Where things run, from `tier` on where graphs are static.
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

/// A pass: its name, why it stands where it stands, and what it does.
pub struct Pass {
    /// Name for `--print-after` and `--stop-after`.
    pub name: &'static str,
    /// Why it stands there.
    pub why: &'static str,
    /// Whether a compilation has anything for it to do.
    applies: fn(&Compilation<'_>) -> bool,
    run: fn(&mut Compilation<'_>) -> Result<()>,
}

/// Every pass, in order.
pub const PIPELINE: &[Pass] = &[
    // The Graph: what to compute.
    pass("lower", run_lower, "the model's description becomes a Graph, op by op as the reference computes"),
    pass("format", run_format, "before rewriting, which may fold a factor only into exact weights"),
    pass("rewrite", run_rewrite, "on the Graph, where equations hold; the target's cost picks the form"),
    // The placement: what fits into static graphs, and where it lives. Shapes of a processor are dynamic.
    static_pass(
        "tier",
        run_tier,
        "the operators are final; capacities are the first thing that a static graph must know",
    ),
    static_pass("group", run_group, "experts of one capacity can share a graph"),
    static_pass("reside", run_reside, "what a launch of a whole group costs decides where the group lives"),
    static_pass(
        "convolve",
        run_convolve,
        "where every operator lives is known; what it costs there picks its form, before nodes are cut out of the Graph",
    ),
    static_pass(
        "offload",
        run_offload,
        "every expert has its home; what lives on another unit leaves the processor's path before kernels are chosen",
    ),
    Pass {
        name: "home",
        why: "what static graphs leave is the processor's, or goes to units that take shapes as they come",
        applies: |c| !c.list.free.is_empty(),
        run: run_home,
    },
    budget_pass(
        "fetch",
        run_fetch,
        "the processor's experts are final; where memory has a budget, layers say whom they will read",
    ),
    // The Plan: how, where and when.
    pass("layout", run_layout, "kernels and weight layouts are chosen for the final form of every node"),
    Pass {
        name: "fuse",
        why: "kernels are chosen, and what one writes another reads; before schedules, which are for the kernels that stay",
        // Whoever looks at values by name finds every one.
        applies: |c| !c.as_lowered,
        run: run_fuse,
    },
    Pass {
        name: "cross",
        why: "steps are what they will be; what a unit reads of another memory is copied there first",
        applies: |_| true,
        run: run_cross,
    },
    pass("tune", run_tune, "what a kernel computes is settled; how it cuts its work changes no result"),
    pass("schedule", run_schedule, "steps that do not wait for each other stand together"),
    pass("memory", run_memory, "the order is final, and with it how long each buffer lives"),
    pass(
        "barriers",
        run_barriers,
        "buffers that share bytes must wait for each other, and now it is known which do",
    ),
    budget_pass(
        "page",
        run_page,
        "last, since what all else takes of the budget is known; the rest holds experts",
    ),
];

type Run = fn(&mut Compilation<'_>) -> Result<()>;

/// A pass of every compilation.
const fn pass(name: &'static str, run: Run, why: &'static str) -> Pass {
    Pass { name, why, applies: |_| true, run }
}

/// A pass for targets with static graphs.
const fn static_pass(name: &'static str, run: Run, why: &'static str) -> Pass {
    Pass { name, why, applies: |c| c.units.is_some(), run }
}

/// A pass for models that memory does not hold.
const fn budget_pass(name: &'static str, run: Run, why: &'static str) -> Pass {
    Pass { name, why, applies: |c| c.config.memory.budget.is_some(), run }
}

/// Names of the passes.
pub fn names() -> impl Iterator<Item = &'static str> {
    PIPELINE.iter().map(|p| p.name)
}

/// What to print and where to stop.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stops<'a> {
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
        Self {
            config,
            checkpoint,
            spec,
            target,
            module: Module::default(),
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
        }
    }

    /// Runs the pipeline; `print` gets the text that `stops` asks for. Gives whether it ran to its end.
    ///
    /// # Errors
    /// A name that is no pass, a pass that fails, or a verifier that objects, naming the pass.
    pub fn run(
        &mut self,
        stops: Stops<'_>,
        progress: &Progress,
        print: &mut dyn FnMut(&str),
    ) -> Result<bool> {
        for name in [stops.print_after, stops.stop_after].into_iter().flatten() {
            check_name(name)?;
        }
        let count = PIPELINE.iter().filter(|p| (p.applies)(self)).count();
        let bar = progress.items("Planning", count as u64, "passes");
        for pass in PIPELINE {
            if (pass.applies)(self) {
                bar.label(pass.name);
                progress.detail("Running", &format!("pass `{}`", pass.name));
                (pass.run)(self).map_err(|e| e.context(format!("pass `{}` failed", pass.name)))?;
                self.verify()
                    .map_err(|e| e.context(format!("the IR is wrong after pass `{}`", pass.name)))?;
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

    /// Text of what the last pass has changed: the plan, or the placement while there is no plan, or the Graph.
    pub fn text(&self) -> String {
        match (&self.plan, &self.placement) {
            (Some(plan), _) => plan.to_string(),
            // What `convolve` and `offload` change is the Graph again.
            (None, Some(placement))
                if !self.statics.graphs.is_empty() || placement.ops.iter().any(|o| o.op == "conv1x1") =>
            {
                self.module.to_string()
            }
            (None, Some(placement)) => placement.to_string(),
            (None, None) => self.module.to_string(),
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
        self.checkpoint.tokenizer(self.spec)
    }

    /// Sizes that this build fixes.
    ///
    /// # Errors
    /// A context that the model does not have.
    pub fn shapes(&self) -> Result<lower::Shapes> {
        let shapes = self.config.shapes_for(self.spec.max_positions)?;
        let row = self.spec.vocab.max(1) * 4;
        let fit = LOGITS_BYTES / row;
        let rows = shapes.prefill_chunk;
        let prefill_out_rows = if rows <= fit { rows } else { (fit / 16 * 16).clamp(1, rows) };
        Ok(lower::Shapes {
            max_context: shapes.max_context,
            prefill_chunk: rows,
            prefill_out_rows,
            slots: shapes.decode_batch.iter().copied().max().unwrap_or(1),
            decode_batch: shapes.decode_batch,
            little: self.config.little(self.spec.experts_per_token())?,
        })
    }

    fn model_info(&self) -> Result<ModelInfo> {
        let spec = self.spec;
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
            bos: self.first_token()?,
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

    /// The token in front of every text, where the tokenizer's configuration asks for one.
    ///
    /// # Errors
    /// One that the model does not have.
    pub(crate) fn first_token(&self) -> Result<Option<u32>> {
        let config = self.checkpoint.tokenizer_config()?;
        let asks = config.map(|c| c.flag_or("add_bos_token", false)).transpose()?.unwrap_or(false);
        match self.spec.bos.filter(|_| asks) {
            Some(bos) if bos as usize >= self.spec.vocab => Err(Error::input(format!(
                "`bos_token_id` is {bos}, but the model has {} tokens",
                self.spec.vocab
            ))
            .because("`add_bos_token` in `tokenizer_config.json` puts it in front of every text")
            .hint("the configuration files are not of this model: download them again")),
            bos => Ok(bos),
        }
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

fn check_name(name: &str) -> Result<()> {
    if names().any(|n| n == name) {
        return Ok(());
    }
    let all: Vec<_> = names().collect();
    Err(Error::usage(format!("there is no pass `{name}`")).hint(format!("the passes are {}", all.join(", "))))
}

#[expect(clippy::unnecessary_wraps, reason = "a pass may fail; this one does not")]
fn run_format(c: &mut Compilation<'_>) -> Result<()> {
    format::format(&mut c.module, &c.config.weights, &c.formats);
    Ok(())
}

fn run_lower(c: &mut Compilation<'_>) -> Result<()> {
    c.module = lower::lower(c.spec, &c.shapes()?)?;
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
    let profile = c.profile.ok_or_else(|| {
        Error::input("static capacities come from the loads that calibration saw, and there is no profile").hint(
            "`moec calibrate` records one; name it as `profile` under `[calibrate]`, or name `text` to read",
        )
    })?;
    let chunk = u32::try_from(c.shapes()?.prefill_chunk).map_err(|_| Error::limit("a chunk past 32 bits"))?;
    let loads = loads(profile, chunk)?;
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
    let Some((units, placement)) = c.units.as_ref().zip(c.placement.as_ref()) else { return Ok(()) };
    let statics = Statics::of(&c.module, placement, units)?;
    offload::offload(&mut c.module, &statics, true)?;
    // Nodes have other numbers now.
    c.statics = Statics::of(&c.module, placement, units)?;
    Ok(())
}

fn run_home(c: &mut Compilation<'_>) -> Result<()> {
    let loads = match (&c.loads, c.profile) {
        (None, Some(profile)) => {
            let chunk = u32::try_from(c.shapes()?.prefill_chunk).unwrap_or(u32::MAX);
            Some(loads(profile, chunk)?)
        }
        _ => None,
    };
    let loads = c.loads.as_ref().or(loads.as_ref());
    c.homes = home::home(&c.module, &mut c.placement, &c.list, &c.config.placement, loads)?;
    Ok(())
}

fn run_cross(c: &mut Compilation<'_>) -> Result<()> {
    let mut writes = std::mem::take(&mut c.writes);
    cross::cross(c.plan_mut()?, &mut writes)?;
    c.writes = writes;
    Ok(())
}

fn run_fetch(c: &mut Compilation<'_>) -> Result<()> {
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
    if let Some(placement) = &c.placement {
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
