//! Tests of drawn calls that decode.

use crate::decoding::CALLS;
use crate::loads::LayerLoads;

fn layer(k: u32, tokens: u64, chosen: &[u64]) -> LayerLoads {
    LayerLoads { layer: 0, k, tokens, chosen: chosen.to_vec(), samples: Vec::new() }
}

#[test]
fn drawn_rows_choose_experts_as_often_as_recorded() {
    let chosen = [400, 400, 200, 100, 60, 30, 10, 0];
    let layer = layer(3, 400, &chosen);
    for batch in [1, 2, 8] {
        let drawn = layer.decoding(batch);
        assert_eq!(drawn, layer.decoding(batch));
        let rows = CALLS * batch;
        let mut sums = [0; 8];
        for sample in &drawn.samples {
            assert_eq!(sample.iter().sum::<u32>(), 3 * batch, "each row chooses three");
            assert!(sample.iter().all(|&n| n <= batch), "no row chooses an expert twice");
            sums.iter_mut().zip(sample).for_each(|(sum, n)| *sum += n);
        }
        for (sum, chosen) in sums.into_iter().zip(chosen) {
            let share = f64::from(sum) / f64::from(rows);
            // Experts that every token chose, or none, are certain.
            let error = (share - chosen as f64 / 400.0).abs();
            assert!(error < 0.06 && (chosen % 400 != 0 || error == 0.0), "{batch}: {sums:?}");
        }
    }
}

#[test]
fn rows_of_other_orders_mix_neighbours() {
    // Of equal experts no two are always together, or never.
    let drawn = layer(2, 100, &[50; 4]).decoding(1);
    let together = |a: usize, b: usize| drawn.samples.iter().filter(|s| s[a] + s[b] == 2).count();
    for (a, b) in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] {
        assert!((5..=50).contains(&together(a, b)), "{a}, {b}: {}", together(a, b));
    }
    assert!(layer(2, 0, &[0; 4]).decoding(2).samples.iter().flatten().all(|&n| n == 0));
}
