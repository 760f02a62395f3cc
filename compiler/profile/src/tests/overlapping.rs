//! Tests of the overlap of two profiles' busy experts.

use super::*;
use crate::overlap::overlap;

fn profile(layers: &[[u64; 4]]) -> Profile {
    let layer =
        |(i, chosen): (usize, &[u64; 4])| Routing { chosen: chosen.to_vec(), ..Routing::new(i as u32, 1, 4) };
    let layers = layers.iter().enumerate().map(layer).collect();
    Profile { layers, trace: Trace::default(), ..example() }
}

#[test]
fn overlap_counts_the_busiest_experts_of_both() {
    let a = profile(&[[9, 5, 1, 0], [4, 3, 2, 1], [7, 7, 7, 7]]);
    let b = profile(&[[9, 1, 5, 0], [1, 2, 3, 4], [1, 1, 1, 1]]);
    let o = overlap(&a, &b, 2).unwrap();
    // Ties go to the lowest index, so that the last layer agrees.
    assert_eq!(o.layers, [(0, 0.5), (1, 0.0), (2, 1.0)]);
    assert_eq!((o.median, o.mean), (0.5, 0.5));
    assert_eq!(overlap(&b, &a, 2).unwrap(), o);
    assert_eq!(overlap(&a, &a, 3).unwrap().median, 1.0);
    assert_eq!(overlap(&a, &b, 4).unwrap().mean, 1.0);
    assert!(overlap(&a, &profile(&[[1, 0, 0, 0]]), 2).is_err());
}
