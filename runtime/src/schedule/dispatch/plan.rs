//! Settings of schedulers, from a plan.

use crate::offload::cache::{CachedLayer, ExpertIndex, Key, Setting};
use crate::schedule::cached::dispatcher;
use crate::schedule::error::ScheduleError;
use crate::schedule::policy::{Solver, System, TRIMOE, trimoe};
use crate::schedule::scheduled::{ExpertScheduler, Layout, Place, Placement, Setup, Windows};
use crate::schedule::{Costs, NearCosts, Table};
use moec_ir::plan::{Cached, ExpertCosts, ExpertLayer, ExpertPlacement, PromptUnits, Refine, Scheduled};

/// Costs of a plan's experts.
///
/// # Errors
/// Negative or infinite times.
pub fn costs(c: &ExpertCosts) -> Result<Costs, ScheduleError> {
    let table = |points: &Vec<(u32, f64)>| Table::new(points.clone());
    let some = |points: &Vec<(u32, f64)>| if points.is_empty() { Ok(None) } else { table(points).map(Some) };
    let near = |table| NearCosts { table, internal_us: c.internal_us, link_us: c.link_us };
    Ok(Costs {
        gpu: some(&c.hot)?.map(Into::into),
        cpu: table(&c.cpu)?.into(),
        near: some(&c.cold)?.map(near),
        bring_us: c.bring_us,
        first_bring_us: 0.0,
        launch_us: 0.0,
        striped_us: c.striped_us,
        localized_us: c.localized_us,
        row_us: c.row_bytes as f64 * c.bring_us / c.expert_bytes.max(1) as f64,
    })
}

/// Settings of a scheduler, for `layers` layers of `experts` experts.
///
/// # Errors
/// As [`costs`].
pub fn setup(s: &Scheduled, layers: usize, experts: usize) -> Result<Setup, ScheduleError> {
    let solver = match s.refine {
        Refine::None => Solver::Cheapest,
        Refine::Bottleneck => Solver::Refined,
        Refine::Full => Solver::Best,
    };
    // Experts that prompts evict from the frames return by moves.
    let may_stream = s.streams(layers, experts);
    let prefill = match s.prefill {
        PromptUnits::Hot => Solver::Gpu,
        PromptUnits::Auto if may_stream => Solver::Best,
        PromptUnits::Auto => Solver::Refined,
    };
    let windows = windows(s)?;
    Ok(Setup {
        system: System { prefill, ..trimoe(TRIMOE.name, solver, s.moves) },
        costs: costs(&s.costs)?,
        layers,
        experts,
        memories: s.dimms as usize,
        frames: s.frames as usize,
        // That of the decoding entry point with the most rows.
        window: windows.of(s.decode_window.last().map_or(1, |w| w.0 as usize), false),
    })
}

/// Windows in which experts move.
///
/// # Errors
/// No windows, negative times.
pub fn windows(s: &Scheduled) -> Result<Windows, ScheduleError> {
    let traffic = Some(&s.traffic).filter(|t| !t.is_empty());
    Ok(Windows {
        prompt: Table::new(s.prompt_window.clone())?,
        decode: Table::new(s.decode_window.clone())?,
        traffic: traffic.map(|t| Table::new(t.clone())).transpose()?,
    })
}

/// A scheduler, with experts where they are when the first step begins.
///
/// # Errors
/// As [`setup`]; memories or frames that do not exist.
pub fn scheduler(p: &ExpertPlacement, s: &Scheduled) -> Result<ExpertScheduler, ScheduleError> {
    let experts = p.layers.first().map_or(0, |l| l.starts.len());
    let mut scheduler = ExpertScheduler::new(setup(s, p.layers.len(), experts)?)?;
    for (index, layer) in p.layers.iter().enumerate() {
        let places = places(layer, s.hot);
        scheduler.place(index, &Placement::new(places, s.dimms as usize, s.frames as usize)?)?;
    }
    Ok(scheduler)
}

/// Initial locations of a layer's experts.
fn places(layer: &ExpertLayer, hot: Option<u32>) -> Vec<Place> {
    let layout = |m: i32| u16::try_from(m).map_or(Layout::Striped, Layout::Local);
    let cached = |at: u32| hot.is_some() && layer.units.get(at as usize).copied() == hot;
    let places = layer.dimms.iter().zip(&layer.starts);
    places.map(|(&dimm, &at)| Place { layout: layout(dimm), cached: cached(at) }).collect()
}

/// Initial settings of a dispatcher.
///
/// # Errors
/// As [`costs`]; an unknown policy.
pub fn dispatcher_setup(p: &ExpertPlacement, c: &Cached) -> Result<dispatcher::Setup, ScheduleError> {
    let [gpu_us, cpu_us, first_bring_us] = c.first_us;
    let mut costs = Costs { first_bring_us, launch_us: c.launch_us, ..costs(&c.costs)? };
    costs.cpu.first_us = cpu_us;
    costs.gpu.iter_mut().for_each(|gpu| gpu.first_us = gpu_us);
    let solver = |name: &String| {
        Solver::named(name).ok_or_else(|| ScheduleError::Name { what: "solver", name: name.clone() })
    };
    let layer = |l: &ExpertLayer| CachedLayer { experts: l.starts.len(), k: c.k as usize, bytes: 1 };
    let layers: Vec<CachedLayer> = p.layers.iter().map(layer).collect();
    let key = |layer: u32, expert: u32| Key { layer: layer as u16, expert: expert as u16 };
    let held = |(l, layer): (u32, &ExpertLayer)| layer.on(c.hot).into_iter().map(move |e| key(l, e));
    Ok(dispatcher::Setup {
        costs,
        experts: ExpertIndex::new(&layers)?,
        solvers: [solver(&c.divides[0])?, solver(&c.divides[1])?],
        cache_policy: c.keeps.parse::<Setting>()?,
        ahead: c.ahead as usize,
        window_us: c.window_us,
        cached: (0..).zip(&p.layers).flat_map(held).collect(),
        pinned: c.pinned.iter().map(|&(l, e)| key(l, e)).collect(),
        score: c.score,
    })
}
