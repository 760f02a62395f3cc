//! Initial placement of experts, by recorded loads (TriMoE, §4.3).

use super::placement::{Layout, Place, Placement};
use super::predictor::{Class, classes};
use super::schedule::ExpertUnit;
use crate::schedule::policy::GpuResidents;
use crate::schedule::sums::prices::Prices;

/// The initial placement: the hottest are cached; cold ones are localized, so that memories take equally long
/// (longest first); the others are striped. `cold` is the boundary of classes. With other policies, all are
/// striped or all are localized.
pub(crate) fn initial(
    prices: &Prices,
    gpu_residents: GpuResidents,
    loads: &[f64],
    memories: usize,
    frames: usize,
    cold: f64,
) -> Placement {
    let mut of = Vec::new();
    classes(prices, frames, cold, loads.iter().copied(), &mut Vec::new(), &mut of);
    let striped = Place { layout: Layout::Striped, cached: false };
    let mut placement = Placement::striped(loads.len(), frames);
    let mut hottest: Vec<usize> = (0..loads.len()).collect();
    hottest.sort_by(|&a, &b| loads[b].total_cmp(&loads[a]));
    if prices.costs().gpu.is_some() {
        hottest.iter().take(frames).for_each(|&e| placement.prefetch(e, None));
    }
    let local = |e: usize| match gpu_residents {
        GpuResidents::Classes => of[e] == Class::Cold,
        GpuResidents::Local => true,
        GpuResidents::Token | GpuResidents::Popular | GpuResidents::Layers | GpuResidents::Cache(_) => false,
    };
    let mut busy = vec![0; memories];
    for &e in hottest.iter().filter(|&&e| local(e)) {
        // Cached experts are computed on the GPU.
        let task = prices.expected(e, Place { layout: Layout::Local(0), ..striped }, loads[e]);
        let time = if placement.places()[e].cached { 0 } else { task.cost(ExpertUnit::Near) };
        if let Some((memory, least)) = busy.iter_mut().enumerate().min_by_key(|b| *b.1) {
            *least += time;
            placement.relayout(e, Layout::Local(memory as u16));
        }
    }
    placement
}
