//! Tests of hot shares by batch.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use moec_device::Device;
use moec_profile::Routing;

/// Mixtral's shapes with few experts.
fn experts() -> Experts {
    let hidden = 4096;
    Experts {
        layer: 0,
        glu: Glu::DRelu,
        count: 4,
        k: 2,
        inter: 2048,
        hidden,
        bytes: 3.0 * hidden as f64 * 0.5625,
        attention: 42e6,
        attends: true,
    }
}

/// Counts in which every eighth neuron is active half of the time, and the others for one token in 16.
fn neuron_counts(of: &Experts) -> (NeuronCounts, Routing) {
    let mut counts =
        NeuronCounts::new((0, "layers.0.down".to_owned()), (of.count, of.inter as u32, true), &[0.0], 4);
    let mut random = Independent::new(3);
    let often = |n: usize| if n.is_multiple_of(8) { 0.5_f64 } else { 1.0 / 16.0 };
    for expert in 0..of.count {
        for batch in 0..4 {
            for _ in 0..64 {
                let mut bits = vec![0_u64; of.inter / 64];
                let active = (0..of.inter).map(|n| 1.0 - (1.0 - often(n)).powi(batch as i32 + 1));
                random.active(active).into_iter().for_each(|n| bits[n as usize / 64] |= 1 << (n % 64));
                counts.levels[0].batches[batch].add(expert, of.inter, &bits).unwrap();
            }
        }
    }
    let mut routing = Routing::new(0, of.k as u32, of.count);
    routing.tokens = 128;
    routing.chosen = vec![64; of.count];
    (counts, routing)
}

fn shares(device: &Device, of: Experts, room: f64) -> Vec<HotShare> {
    let units = Units::of(device).unwrap();
    let (counts, routing) = neuron_counts(&of);
    let layers = [of];
    let popularity: Vec<f64> = routing.chosen.iter().map(|&n| n as f64 / routing.tokens as f64).collect();
    let plan = |batch| {
        let resident = resident_neurons(&layers, &of, room);
        let read = if resident < of.inter { of.read_seconds(&units).unwrap() } else { 0.0 };
        HotShareInputs {
            experts: &of,
            units: &units,
            batch,
            ordered_by: 1,
            popularity: &popularity,
            resident,
            read,
            requested: false,
        }
        .plan(&counts)
        .unwrap()
    };
    (1..=4).map(plan).collect()
}

#[test]
fn larger_batches_have_more_hot_neurons_on_both_phones() {
    for name in ["snapdragon-8-gen-3", "snapdragon-8-plus-gen-1"] {
        let found = shares(&moec_targets::device(name).unwrap(), experts(), f64::INFINITY);
        let hot: Vec<u32> = found.iter().map(|s| s.hot).collect();
        assert!(hot.windows(2).all(|w| w[0] <= w[1]) && hot[0] < hot[3], "{name}: {hot:?}");
        for share in found {
            assert!(share.us <= share.cold_us && share.hot <= share.neurons, "{name}: {share:?}");
        }
    }
}

#[test]
fn less_memory_is_never_faster_and_hot_neurons_fit() {
    let device = moec_targets::device("snapdragon-8-gen-3").unwrap();
    let all = experts().bytes * (experts().count * experts().inter) as f64;
    let [whole, half] = [all, all / 2.0].map(|room| shares(&device, experts(), room));
    for (whole, half) in whole.iter().zip(&half) {
        assert!(whole.us <= half.us, "{whole:?} {half:?}");
    }
    // Gates take a third: half of the memory holds up and down of a quarter of the neurons.
    assert_eq!(resident_neurons(&[experts()], &experts(), all / 2.0), 512);
}

#[test]
fn neurons_used_by_a_batch_are_the_union() {
    assert!((used(&[0.5, 0.5], 1) - 1.0).abs() < 1e-12 && (used(&[0.5, 0.5], 2) - 1.5).abs() < 1e-12);
    let (counts, _) = neuron_counts(&experts());
    let by_rank = by_rank(&counts, 1, 1);
    assert!(by_rank.is_sorted_by(|a, b| a >= b) && by_rank[0] > 0.4 && by_rank[2000] < 0.1);
}
