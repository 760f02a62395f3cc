//! What a plan says of its experts, as those who decide have it.

use crate::offload::cache::{CachedLayer, ExpertIndex, Key, Setting};
use crate::schedule::cached::director;
use crate::schedule::error::ScheduleError;
use crate::schedule::policy::{Solver, TRIMOE, trimoe};
use crate::schedule::scheduled::{Layout, Place, Placement, Scheduler, Setup, Window};
use crate::schedule::{Costs, NearCosts, Table};
use moec_ir::plan::{Hybrid, Refine, Schedule, ScheduledLayer};

/// What experts of a schedule cost.
fn costs(s: &Schedule) -> Result<Costs, ScheduleError> {
    let (t, table) = (&s.times, |points: &Vec<(u32, f64)>| Table::new(points.clone()));
    let near = |_| {
        Ok::<_, ScheduleError>(NearCosts {
            table: table(&t.cold)?,
            internal_us: t.internal_us,
            link_us: t.link_us,
        })
    };
    Ok(Costs {
        gpu: s.hot.map(|_| table(&t.hot)).transpose()?.map(Into::into),
        cpu: table(&t.processor)?.into(),
        near: s.cold.map(near).transpose()?,
        bring_us: t.bring_us,
        first_bring_us: 0.0,
        striped_us: t.striped_us,
        localized_us: t.localized_us,
        row_us: s.row_bytes as f64 * t.bring_us / s.expert_bytes.max(1) as f64,
    })
}

/// What a scheduler is made of, for layers of `experts` experts.
///
/// # Errors
/// Times that are none.
pub fn setup(s: &Schedule, experts: usize) -> Result<Setup, ScheduleError> {
    let solver = match s.refine {
        Refine::None => Solver::Cheapest,
        Refine::Bottleneck => Solver::Refined,
        Refine::Full => Solver::Best,
    };
    Ok(Setup {
        system: trimoe(TRIMOE.name, solver, s.moves),
        costs: costs(s)?,
        layers: s.layers.len(),
        experts,
        memories: s.modules as usize,
        frames: s.frames as usize,
        window: Window { pcie_us: s.window_us, link_us: s.window_us },
    })
}

/// A scheduler, with experts where they are when the first step begins.
///
/// # Errors
/// As [`setup`]; memories or frames that are not there.
pub fn scheduler(s: &Schedule, experts: usize) -> Result<Scheduler, ScheduleError> {
    let mut scheduler = Scheduler::new(setup(s, experts)?)?;
    for (index, layer) in s.layers.iter().enumerate() {
        scheduler.place(index, &Placement::new(places(layer), s.modules as usize, s.frames as usize)?)?;
    }
    Ok(scheduler)
}

/// The places of a layer's experts when its first step begins.
fn places(layer: &ScheduledLayer) -> Vec<Place> {
    let layout = |m: i32| u16::try_from(m).map_or(Layout::Striped, Layout::Local);
    let cached = |e: usize| layer.cached.contains(&(e as u32));
    layer.modules.iter().enumerate().map(|(e, &m)| Place { layout: layout(m), cached: cached(e) }).collect()
}

/// What a director knows from the start.
///
/// # Errors
/// Times that are none, names that are no policy's.
pub fn director(s: &Schedule, hybrid: &Hybrid) -> Result<director::Setup, ScheduleError> {
    let [gpu_us, cpu_us, first_bring_us] = hybrid.first_us;
    let mut costs = Costs { first_bring_us, ..costs(s)? };
    costs.cpu.first_us = cpu_us;
    costs.gpu.iter_mut().for_each(|gpu| gpu.first_us = gpu_us);
    let solver = |name: &String| {
        Solver::named(name).ok_or_else(|| ScheduleError::Name { what: "solver", name: name.clone() })
    };
    let layer = |l: &ScheduledLayer| CachedLayer { experts: l.modules.len(), k: hybrid.k as usize, bytes: 1 };
    let layers: Vec<CachedLayer> = s.layers.iter().map(layer).collect();
    let key = |layer: u32, expert: u32| Key { layer: layer as u16, expert: expert as u16 };
    let cached = (0..).zip(&s.layers).flat_map(|(l, layer)| layer.cached.iter().map(move |&e| key(l, e)));
    Ok(director::Setup {
        costs,
        experts: ExpertIndex::new(&layers)?,
        divides: [solver(&hybrid.divides[0])?, solver(&hybrid.divides[1])?],
        keeps: hybrid.keeps.parse::<Setting>()?,
        ahead: hybrid.ahead as usize,
        window_us: s.window_us,
        cached: cached.collect(),
        pinned: hybrid.pinned.iter().map(|&(l, e)| key(l, e)).collect(),
        score: hybrid.score,
    })
}
