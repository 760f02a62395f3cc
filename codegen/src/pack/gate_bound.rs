//! Int8 gate bounds: a byte for every number, and the largest error of a gate that is computed from them
//! ([`moec_ir::Bundle`]).

use super::Geometry;
use super::order::PackedRow;
use moec_ir::bundle::Part;

/// Largest code.
const MOST: f32 = 127.0;

/// Writes the gate bounds of the bundles in `panel`, from the gates in it. `numbers` is memory for one of
/// them.
pub(super) fn add(g: &Geometry, numbers: &mut Vec<f32>, panel: &mut [u8]) {
    let Some(bundle) = g.bundle().filter(|b| b.gate_bound) else { return };
    let lane = PackedRow::of_row(g.format, bundle.hidden);
    numbers.resize(bundle.hidden, 0.0);
    let available = panel.len() / bundle.bytes();
    for i in 0..available {
        let [at, gate] = [Part::GateBound, Part::Gate].map(|part| bundle.at(part, i, available));
        let (front, parts) = panel.split_at_mut(gate);
        if lane.get(parts, numbers).is_none() {
            continue;
        }
        let (codes, rest) = front[at..].split_at_mut(bundle.codes_bytes());
        let facts = gate_bound(numbers, codes, bundle.slack());
        for (cell, x) in rest.as_chunks_mut::<4>().0.iter_mut().zip(facts) {
            *cell = x.to_le_bytes();
        }
    }
}

/// Codes of a row, its scale, its bound, and the norm of the numbers that the codes encode.
fn gate_bound(row: &[f32], codes: &mut [u8], slack: f64) -> [f32; 3] {
    let largest = row.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
    // A gate whose square overflows f32 gets an infinite bound, and is never passed over.
    let scale = largest / MOST;
    let (mut missed, mut norms, mut energy) = (0.0_f64, 0.0_f64, 0.0_f64);
    for (cell, &x) in codes.iter_mut().zip(row) {
        let code = if scale > 0.0 { (x / scale).round_ties_even().clamp(-MOST, MOST) } else { 0.0 };
        *cell = (code as i8).cast_unsigned();
        let (x, kept) = (f64::from(x), f64::from(code) * f64::from(scale));
        missed += (x - kept).powi(2);
        norms += x.powi(2).max(kept.powi(2));
        energy += kept.powi(2);
    }
    // The last factor covers the roundings of this sum, of the norm of `x` and of the two products.
    let bound = (missed.sqrt() + slack * norms.sqrt()) * (1.0 + slack) * 1.001;
    let above = (bound as f32).next_up();
    let bound = if largest.is_finite() { above } else { f32::INFINITY };
    [scale, bound, ((energy.sqrt() * 1.001) as f32).next_up()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_bound_is_valid_for_any_input() {
        let mut state = 7_u64;
        let mut number = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        for n in [1, 5, 64, 700] {
            let row: Vec<f32> = (0..n).map(|_| number().powi(3) * 3.0).collect();
            let mut codes = vec![0; n];
            let [scale, bound, kept] = gate_bound(&row, &mut codes, 1e-4);
            let code = |c: &u8| f64::from(c.cast_signed()) * f64::from(scale);
            // Largest error of the codes over all rows.
            let worst: Vec<f64> = row.iter().zip(&codes).map(|(&w, c)| f64::from(w) - code(c)).collect();
            let random: Vec<f64> = (0..n).map(|_| f64::from(number())).collect();
            for x in [worst, random] {
                let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
                let exact: f64 = row.iter().zip(&x).map(|(&w, x)| f64::from(w) * x).sum();
                let approximate: f64 = codes.iter().zip(&x).map(|(c, x)| code(c) * x).sum();
                assert!(
                    exact <= approximate + f64::from(bound) * norm,
                    "{n}: {exact} {approximate} {bound} {norm}"
                );
                let energy = codes.iter().map(|c| code(c).powi(2)).sum::<f64>().sqrt();
                assert!((energy..energy * 1.01 + 1e-30).contains(&f64::from(kept)), "{n}: {kept} {energy}");
                // The bound is also useful: a small share of a row's largest possible value.
                let all = row.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>().sqrt();
                assert!(f64::from(bound) < 0.02 * all, "{n}: {bound} of {all}");
            }
        }
    }

    #[test]
    fn gate_bound_of_zeros_and_of_infinity() {
        let mut codes = [1; 3];
        assert_eq!(gate_bound(&[0.0; 3], &mut codes, 1e-4)[0], 0.0);
        assert_eq!(codes, [0; 3]);
        assert_eq!(gate_bound(&[f32::INFINITY, 1.0, 0.0], &mut codes, 1e-4)[1], f32::INFINITY);
    }
}
