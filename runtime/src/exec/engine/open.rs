//! Opening an engine: units, memory, and the placement of weights.

use super::{Engine, Options};
use crate::bundle::program::Program;
use crate::bundle::{BundleFiles, BundleReader};
use crate::error::{Error, Result};
use crate::exec::accelerators::{self, Executor};
use crate::exec::call::{Bound, Places, bind};
use crate::exec::capacity_limit::SetCounters;
use crate::exec::cpu::CpuUnit;
use crate::exec::graph_unit::GraphUnit;
use crate::exec::graphs::Graphs;
use crate::exec::node_unit::NodeUnit;
use crate::exec::unit::{self, ComputeUnit};
use crate::kv::states::States;
use crate::offload::paging::{self, Opened, Paging};
use crate::platform::available::available;
use crate::platform::cores::CoreUse;
use crate::platform::cpu::{self, CoreSet};
use crate::platform::memory::{Addr, Region};
use crate::platform::numa::Node;
use crate::schedule::dispatch::Assigner;
use crate::sync::events::Events;
use crate::sync::pool::{Binding, Pool};
use crate::weights::owned::{LoadOptions, LoadProgress, MovingStore, OwnedStore};
use crate::weights::store::{CheckLevel, MappedStore, Store};
use crate::weights::{self, Choice, Weights};
use moec_ir::plan::{self, ALIGN, Builtin, Code, UnitRef};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

impl<'p> Engine<'p> {
    /// Checks this machine and the bundle's files, maps the weights or begins to read them
    /// ([`Options::weights`]) and allocates the memory. The program has steps only for the CPU.
    ///
    /// # Errors
    /// Errors of [`cpu::check`], [`MappedStore::open`] and [`OwnedStore::open`]; memory or threads refused;
    /// [`Error::Machine`] for a step of another unit.
    pub fn open(program: &'p Program, bundle: &Path, options: Options) -> Result<Self> {
        let files = BundleReader::of_plan(bundle, program, options.check);
        Self::with_units(program, bundle, &mut |_| None, &files, options)
    }

    /// As [`Engine::open`], for a program with static graphs, which `graphs` executes. They are loaded from
    /// `packages`.
    ///
    /// # Errors
    /// As [`Engine::open`]; a graph that does not load.
    pub fn with_graphs(
        program: &'p Program,
        bundle: &Path,
        graphs: Box<dyn Graphs>,
        packages: &BundleReader,
        options: Options,
    ) -> Result<Self> {
        let mut graphs = Some(graphs);
        let runs = |unit: &UnitRef| {
            let steps = program.entries.iter().flat_map(|e| &e.steps);
            let of_graphs =
                |code| matches!(code, Code::Builtin(Builtin::Experts { .. } | Builtin::Subgraph { .. }));
            steps.filter(|s| of_graphs(s.code)).any(|s| program.units.get(s.unit as usize) == Some(unit))
        };
        let mut executor_of = |unit: &UnitRef| graphs.take_if(|_| runs(unit)).map(Executor::Graphs);
        Self::with_units(program, bundle, &mut executor_of, packages, options)
    }

    /// As [`Engine::open`], with executors of accelerators. `executor` is called for every unit that has
    /// steps. Artifacts of units are read from `packages`. A unit with CPUs that `executor` has none for is a NUMA
    /// node of this machine; the CPU's threads and memory are then bound to the first one, and [`Options::threads`]
    /// are those of each.
    ///
    /// # Errors
    /// As [`Engine::open`]; a graph that does not load, a unit without an executor.
    pub fn with_units(
        program: &'p Program,
        bundle: &Path,
        executor: &mut dyn FnMut(&UnitRef) -> Option<Executor>,
        packages: &BundleReader,
        options: Options,
    ) -> Result<Self> {
        let counters = Arc::new(SetCounters::of(&program.expert_sets));
        let on_demand = if options.resident { None } else { program.paging.as_ref() };
        let (mut units, has_nodes) =
            load_units(program, (on_demand, options.threads), executor, packages, &counters)?;
        let mut options = options;
        let first = program.units.first().filter(|_| has_nodes);
        let node = first.map(|first| Node::new(&first.name, &first.cpus)).transpose()?;
        if let Some(node) = &node {
            if options.pin {
                let what = "`--pin` binds threads to cores, and the bundle binds them to NUMA nodes";
                return Err(Error::usage(what).with_hint("leave it out"));
            }
            options.threads = Some(cpu::threads_on(options.threads, node.count())?);
        }
        let threads = cpu::threads(options.threads)?;
        if let Some((demand, free)) = options.demand.zip(available()) {
            weights::check_room(program, threads, demand, free)?;
        }
        let files = BundleFiles::open(program, bundle)?;
        let mut cores = node.as_ref().map(Node::cores);
        let (store, pager, why, border, locked): (Box<dyn Store + 'p>, _, _, _, _) =
            if program.paging.is_some() && !options.resident {
                if options.weights == Weights::Ram {
                    return Err(Error::usage("the bundle has a memory budget, which leaves experts on disk")
                        .with_hint("give `--no-budget` to hold all weights, or leave out `--weights ram`"));
                }
                let mut paging = options.paging.map_or_else(Paging::from_env, Ok)?;
                let found = paging::cores(program, paging.cores);
                let threads = paging::threads(program.paging.as_ref(), options.threads, found.as_ref())?;
                options.threads = Some(threads);
                paging.disk.core = paging.disk.core.or(found.as_ref().and_then(CoreUse::reader));
                cores = found.and_then(|found| found.set(threads));
                let opened = paging::open(program, &files, options.check, &paging)?;
                let Opened { store, pager, border, locked } = opened;
                (Box::new(store), Some(pager), Choice::under_budget().why, border, locked)
            } else {
                let (store, why) = match &node {
                    Some(node) => node.within(|| weights_of(program, &files, options, Some(node)))?,
                    None => weights_of(program, &files, options, None)?,
                };
                (store, None, why, None, 0)
            };
        let assigner = Assigner::new(program, pager.clone())?;
        let cpu = CpuUnit::new(program, pager.clone(), Arc::clone(&counters), assigner.clone());
        units[0] = Some(Box::new(cpu));
        let at = (cores, node.as_ref());
        let mut engine =
            Self::with_parts(program, store, units, (counters, assigner), Some(&files), at, options)?;
        (engine.pager, engine.why, engine.border, engine.locked) = (pager, why, border, locked);
        Ok(engine)
    }

    /// As [`Engine::open`], with weights from another store; [`Options::weights`] is ignored.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn with_store(program: &'p Program, store: Box<dyn Store + 'p>, options: Options) -> Result<Self> {
        let counters = Arc::new(SetCounters::of(&program.expert_sets));
        let mut units: Vec<Option<Box<dyn ComputeUnit + 'p>>> = program.units.iter().map(|_| None).collect();
        units[0] = Some(Box::new(CpuUnit::new(program, None, Arc::clone(&counters), None)));
        Self::with_parts(program, store, units, (counters, None), None, (None, None), options)
    }

    fn with_parts(
        program: &'p Program,
        store: Box<dyn Store + 'p>,
        mut units: Vec<Option<Box<dyn ComputeUnit + 'p>>>,
        (counters, assigner): (Arc<SetCounters>, Option<Arc<Assigner>>),
        files: Option<&BundleFiles>,
        (cores, node): (Option<CoreSet>, Option<&Node>),
        options: Options,
    ) -> Result<Self> {
        unit::check(&units, program)?;
        cpu::check(&program.target)?;
        let threads = cpu::threads(options.threads)?;
        let binding = if options.pin {
            cpu::check_pin(threads)?;
            Binding::Each
        } else {
            cores.map_or(Binding::None, Binding::Within)
        };
        let arena = Region::new("activations", program.arena_bytes())?;
        let accelerators = accelerators::open(program, &mut units, files, CheckLevel::Sizes, &|_| false)?;
        let sequences = options.demand.map_or(u32::MAX, |d| u32::try_from(d.sequences).unwrap_or(u32::MAX));
        let states = States::new(program, &accelerators.states, sequences)?;
        // One more cache line between threads, so that the prefetcher of one core does not touch the next
        // thread's.
        let stride = program.scratch_bytes.checked_next_multiple_of(ALIGN).and_then(|b| b.checked_add(ALIGN));
        let used = |u: usize| program.entries.iter().flat_map(|e| &e.steps).any(|s| s.unit as usize == u);
        let others: Vec<usize> = (1..units.len()).filter(|&u| units[u].is_some() && used(u)).collect();
        // Units that compute in the CPU's memory have their scratch there.
        let scratches = (threads + others.len()) as u64;
        let scratch_bytes = stride.and_then(|s| s.checked_mul(scratches)).unwrap_or(u64::MAX);
        let scratch = Region::new("scratch", scratch_bytes)?;
        if let Some(node) = node {
            for region in [&arena, &scratch, states.region()] {
                node.hold(region);
            }
        }
        let stride = stride.unwrap_or(0) as usize;
        let at = |i: usize| scratch.base().plus((threads + i) * stride);
        let own = |u: usize| accelerators.scratch.get(u).copied().flatten();
        let unit_threads: Vec<_> =
            others.iter().enumerate().map(|(i, &u)| (u, own(u).unwrap_or_else(|| at(i)))).collect();
        let arenas: Vec<Option<Addr>> =
            [Some(arena.base())].into_iter().chain(accelerators.arenas.iter().copied()).collect();
        let places = Places {
            arenas: &arenas,
            states: states.addresses(),
            store: store.as_ref(),
            residents: &accelerators.residents,
        };
        let all = program.entries.iter().map(|entry| bind(program, entry, &places, assigner.as_deref()));
        let bound: Vec<Bound> = all.collect::<Result<_>>()?;
        if let Some(assigner) = &assigner {
            // Experts may be copied to the hot unit at any dispatch, so all must be loaded before.
            store.load_progress().map_or(Ok(()), LoadProgress::wait_all)?;
            assigner.bind(program, &|s| places.matrices(program, 0, s), &|s| {
                places.matrices(program, program.experts.policy.hot()?, s)
            })?;
            options.ahead.iter().for_each(|&layers| assigner.limit_depth(layers));
            let hot = program.experts.policy.hot().and_then(|hot| units.get(hot as usize)?.as_ref());
            if !options.fixed_costs && hot.is_some_and(|hot| hot.is_timed()) {
                assigner.begin_warm_up();
            }
        }
        // A transfer queue is served by one more thread.
        let queues = assigner.as_ref().map_or(0, |a| a.queues().iter().flatten().count());
        let unit_cores = unit_threads.iter().map(|&(u, _)| units[u].as_ref().and_then(|unit| unit.cores()));
        let others: Vec<_> = unit_cores.chain((0..queues).map(|_| None)).collect();
        let pool = Pool::with_others(threads, &others, binding)?;
        let most = bound.iter().map(Bound::len).max().unwrap_or(0);
        let events = bound.iter().map(|b| b.events().len()).max().unwrap_or(0);
        Ok(Self {
            program,
            units,
            accelerators,
            counters,
            assigner,
            pager: None,
            timeline: None,
            store,
            why: "as requested".to_owned(),
            preload: !options.lazy,
            arena,
            states,
            bound,
            scratch,
            scratch_stride: stride,
            taken: (0..most).map(|_| AtomicUsize::new(0)).collect(),
            events: Events::new(events, threads + unit_threads.len()),
            pool,
            unit_threads,
            rows: Vec::with_capacity(program.entries.iter().map(|e| e.kind.rows()).max().unwrap_or(0)),
            stop: options.stop,
            warn: options.warn,
            warn_overflow: options.warn,
            last: None,
            border: None,
            locked: 0,
        })
    }
}

/// Executors of a plan's units, by index; `None` for the CPU, and for those without steps.
type LoadedUnits<'p> = Vec<Option<Box<dyn ComputeUnit + 'p>>>;

/// Executors of all units with steps, except the CPU, and whether some are NUMA nodes of this machine. With
/// `on_demand`, artifacts are loaded and freed. `threads`: those of each node.
fn load_units<'p>(
    program: &'p Program,
    (on_demand, threads): (Option<&plan::Paging>, Option<usize>),
    executor: &mut dyn FnMut(&UnitRef) -> Option<Executor>,
    packages: &BundleReader,
    counters: &Arc<SetCounters>,
) -> Result<(LoadedUnits<'p>, bool)> {
    let mut units: LoadedUnits<'p> = Vec::with_capacity(program.units.len());
    units.resize_with(program.units.len(), || None);
    let mut has_nodes = false;
    for (i, of) in program.accelerators() {
        let Some(found) = executor(of) else {
            if of.cpus.is_empty() {
                return Err(Error::no_unit(&of.name));
            }
            units[i] = Some(Box::new(NodeUnit::open(program, of, threads)?));
            has_nodes = true;
            continue;
        };
        units[i] = Some(match found {
            Executor::Unit(mut unit) => {
                unit.load(program, i as u32, packages)?;
                unit
            }
            Executor::Graphs(mut graphs) => {
                if let Some(paging) = on_demand.filter(|paging| !paging.artifacts.is_empty()) {
                    graphs.load_on_demand(&paging.artifacts);
                }
                graphs.load(packages, &program.graphs, program.model.slots as usize)?;
                Box::new(GraphUnit::new(program, graphs, Arc::clone(counters), of.queues)?)
            }
        });
    }
    Ok((units, has_nodes))
}

/// A store of all weights that the CPU's steps read, mapped or in memory of our own, and the reason. `node`: the NUMA
/// node that the CPU is.
fn weights_of<'p>(
    program: &'p Program,
    files: &BundleFiles,
    options: Options,
    node: Option<&Node>,
) -> Result<(Box<dyn Store + 'p>, String)> {
    // Pages of mapped files may be on any node.
    let mapped = node.is_none().then(|| weights::must_be_mapped(program)).flatten();
    if let Some(why) = mapped.filter(|_| options.weights != Weights::Ram) {
        let (on_cpu, transferred) = (program.segments_of(0), program.segments_to_bring());
        let is_needed = |i: u32| on_cpu.contains(&i) || transferred.contains(&i);
        let store = MappedStore::of(program, files, options.check, &is_needed)?;
        return Ok((Box::new(store), why.to_owned()));
    }
    let needed = weights::needed(program, cpu::threads(options.threads)?);
    // With `ram` by name the engine waits for it. So it does if all files are hashed, which takes longer than
    // filling it.
    let may_move = options.weights == Weights::Auto && options.check != CheckLevel::All && node.is_none();
    let cached = if may_move { MovingStore::cached(program, files)? } else { None };
    let free = [available(), node.and_then(Node::free)].into_iter().flatten().min();
    let choice = weights::choose(options.weights, options.lazy, needed, cached, free)?;
    let store: Box<dyn Store + 'p> = if !choice.own {
        Box::new(MappedStore::of_files_here(program, files, options.check)?)
    } else if cached.is_some() {
        Box::new(MovingStore::of(program, files, options.check, &LoadOptions::from_env()?)?)
    } else {
        Box::new(OwnedStore::of(program, files, options.check, &LoadOptions::from_env()?)?)
    };
    Ok((store, choice.why))
}
