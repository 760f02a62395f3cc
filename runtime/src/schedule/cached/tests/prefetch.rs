//! Experts that are transferred ahead.

use super::*;

fn predicted_layer(start: f64, of: &[(u16, u32, f64, bool)]) -> PredictedLayer {
    let task =
        |&(expert, load, _, held): &(u16, u32, f64, bool)| Task { expert, load, held: held.then_some(0.0) };
    PredictedLayer {
        start,
        tasks: of.iter().map(task).collect(),
        probability: of.iter().map(|o| o.2).collect(),
    }
}

fn planned(layers: &[PredictedLayer], busy: f64) -> Vec<Prefetch> {
    let costs = costs([1.0, 0.0], [10.0, 10.0], 0.0, 30.0);
    let mut out = Vec::new();
    plan(&mut scheduler(&costs), Solver::Best, &mut layers.to_vec(), busy, &mut out);
    out
}

fn who(of: &[Prefetch]) -> Vec<(usize, u16)> {
    of.iter().map(|p| (p.ahead, p.expert)).collect()
}

#[test]
fn prefetch_prefers_the_layer_with_the_larger_gain() {
    let near = predicted_layer(40.0, &[(0, 1, 1.0, false), (1, 1, 1.0, true)]);
    let far = predicted_layer(90.0, &[(5, 8, 1.0, false), (6, 8, 1.0, false)]);
    let found = planned(&[near.clone(), far.clone()], 0.0);
    // Either of the experts of the far layer saves a transfer.
    assert_eq!(found[0], Prefetch { ahead: 2, expert: 5, gain: 30.0, there: 30.0 });
    assert_eq!(who(&found[1..]), [(2, 6)]);
    // An expert that no token can choose gains nothing.
    let vague = predicted_layer(90.0, &[(5, 8, 0.0, false)]);
    assert_eq!(who(&planned(&[near, vague], 0.0)), [(1, 0)]);
    assert!(planned(&[], 0.0).is_empty());
}

#[test]
fn busy_link_and_distant_layers_get_no_prefetch() {
    let of = predicted_layer(40.0, &[(0, 4, 1.0, false)]);
    assert!(planned(std::slice::from_ref(&of), 40.0).is_empty());
    let held = predicted_layer(40.0, &[(0, 4, 1.0, true)]);
    let layers: Vec<PredictedLayer> =
        (0..=DEPTH).map(|i| if i < DEPTH { held.clone() } else { of.clone() }).collect();
    assert!(planned(&layers, 0.0).is_empty());
    assert_eq!(who(&planned(&layers[1..], 0.0)), [(DEPTH, 0)]);
}

/// Every planned prefetch has the gain that it states, and without it the layers take no less time.
#[test]
fn planned_prefetches_shorten_layers_by_their_gain() {
    let mut random = SplitMix64(9);
    let mut any = 0;
    for _ in 0..200 {
        let (costs, tasks) = random_layer(&mut random, 16);
        let probability = vec![1.0; tasks.len()];
        let mut layers = [PredictedLayer { start: 1000.0 * random.unit(), tasks, probability }];
        let mut s = scheduler(&costs);
        let mut time = |tasks: &[Task]| s.makespan(Solver::Best, tasks, Free::default());
        let before = time(&layers[0].tasks);
        let mut out = Vec::new();
        plan(&mut scheduler(&costs), Solver::Best, &mut layers, 0.0, &mut out);
        let gains: f64 = out.iter().map(|p| p.gain).sum();
        let after = time(&layers[0].tasks);
        assert!((before - after - gains).abs() < 1e-6 && out.iter().all(|p| p.gain > 0.0), "{out:?}");
        assert!(out.windows(2).all(|w| w[0].there < w[1].there));
        any += out.len();
    }
    assert!(any > 200, "{any}");
}
