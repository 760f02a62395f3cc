//! Distance from the least makespan.

use super::drawn::{MODELS, costs};
use super::workload::{ALL, small};
use crate::schedule::scheduled::{ExpertUnit, Layout, Place};
use crate::schedule::sums::assignment::Assignment;
use crate::schedule::sums::exact::Exact;
use crate::schedule::sums::prices::Prices;
use crate::schedule::sums::refine::refine;
use crate::schedule::sums::search::Search;

/// Cases of up to ten experts on four memories.
const CASES: usize = 1000;

#[test]
fn the_search_is_within_three_percent_of_the_least_makespan() {
    let (mut search, mut exact) = (Search::default(), Exact::default());
    let (mut worst, mut worst_paper) = (1.0f64, 1.0f64);
    let (mut off, mut stalled) = (0, 0);
    for seed in 0..CASES as u64 {
        let mut paper = small(seed);
        let mut best = paper.clone();
        assert!(exact.improve(&mut best, usize::MAX), "seed {seed}");
        refine(&mut paper, 1000);
        let mut full = paper.clone();
        search.improve(&mut full);
        assert!(full.makespan() <= paper.makespan(), "seed {seed}");
        assert!(best.makespan() <= full.makespan(), "seed {seed}");
        let ratio = |m: i64| m as f64 / best.makespan() as f64;
        worst = worst.max(ratio(full.makespan()));
        worst_paper = worst_paper.max(ratio(paper.makespan()));
        off += usize::from(full.makespan() > best.makespan());
        stalled += usize::from(paper.makespan() > best.makespan());
        assert!(ratio(full.makespan()) <= 1.03, "seed {seed}: {} of the optimum", ratio(full.makespan()));
    }
    println!("search: {off} of {CASES} off, worst {worst:.4}; paper: {stalled} off, worst {worst_paper:.4}");
    // The paper's refinement does stall; otherwise the search would show no gain.
    assert!(stalled > CASES / 40 && worst_paper > 1.3);
}

/// Two memories with three experts each, and a CPU that is idle: no move of one expert helps both.
#[test]
fn search_leaves_plateaus_that_stall_the_papers_refinement() {
    let mut costs = costs(&MODELS[0]);
    // The host reads a memory in no time.
    costs.localized_us = 0.0;
    let places: Vec<Place> =
        (0..6u16).map(|e| Place { layout: Layout::Local(e % 2), cached: false }).collect();
    // On a memory 4 tokens take 737 µs each; on the CPU 20.
    let mut a = Assignment::default();
    a.clear(2);
    for (e, &place) in places.iter().enumerate() {
        a.push(Prices::new(costs.clone(), ALL, 2).task(e, place, 4), ExpertUnit::Near);
    }
    let before = a.clone();
    refine(&mut a, 1000);
    assert_eq!(a, before);
    Search::default().improve(&mut a);
    assert!(a.makespan() * 2 < before.makespan(), "{} of {}", a.makespan(), before.makespan());
}
