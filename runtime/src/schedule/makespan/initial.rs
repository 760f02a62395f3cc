//! Where experts are before the first step, by loads that were recorded before (TriMoE, §4.3).

use super::layout::{Layout, Place, Placement};
use super::policy::Start;
use super::predictor::{Class, classes};
use super::prices::Prices;

/// The hottest are cached; cold ones are localized, so that DIMMs take equally long (longest first); the others are
/// striped. `cold` is the boundary of classes. Where experts begin otherwise, all are striped or all are localized.
pub(super) fn initial(
    prices: &Prices,
    start: Start,
    loads: &[f64],
    dimms: usize,
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
    let local = |e: usize| match start {
        Start::Classes => of[e] == Class::Cold,
        Start::Striped => false,
        Start::Local => true,
    };
    let mut busy = vec![0; dimms];
    for &e in hottest.iter().filter(|&&e| local(e)) {
        // What is cached computes there.
        let task = prices.expected(e, Place { layout: Layout::Local(0), ..striped }, loads[e]);
        let time = if placement.places()[e].cached { 0 } else { task.cost(super::Unit::Ndp) };
        if let Some((dimm, least)) = busy.iter_mut().enumerate().min_by_key(|b| *b.1) {
            *least += time;
            placement.relayout(e, Layout::Local(dimm as u16));
        }
    }
    placement
}
