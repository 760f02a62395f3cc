//! Attention: grouped heads, windows, sinks, latent values, padding rows.

use crate::harness::{Case, Expect, Operand, Rng, check, random, strided};
use moec_codegen::KernelSpec;
use moec_ir::op::AttentionDesc;

struct Setting {
    desc: AttentionDesc,
    ctx: usize,
    /// (position, slot) of each row.
    rows: Vec<(i32, i32)>,
}

fn case(rng: &mut Rng, s: Setting) -> Case {
    let Setting { desc: d, ctx, rows } = s;
    let (n, slots) = (rows.len(), 3);
    let (q_ld, out_ld) = (d.heads * d.qk_dim + 2, d.heads * d.v_dim + 1);
    let q = random(rng, n, d.heads * d.qk_dim, q_ld);
    // What no row attends to must not matter, be it never so bad.
    let mut state = |dim: usize| -> Vec<f32> {
        let mut x = rng.floats(slots * d.kv_heads * ctx * dim);
        for (i, x) in x.iter_mut().enumerate() {
            let (key, slot) = ((i / dim % ctx) as i32, (i / dim / ctx / d.kv_heads) as i32);
            if !rows.iter().any(|&(pos, s)| s == slot && key <= pos) {
                *x = f32::NAN;
            }
        }
        x
    };
    let keys = state(d.qk_dim);
    let values = (!d.v_from_k).then(|| state(d.v_dim));
    let sinks = d.sinks.then(|| rng.floats(d.heads));
    let (v, v_ld) = match &values {
        Some(v) => (v, d.v_dim),
        None => (&keys, d.qk_dim),
    };
    let mut expected = strided(n, d.heads * d.v_dim, out_ld, |_, _| 0.0);
    for (t, &(pos, slot)) in rows.iter().enumerate() {
        for h in 0..d.heads {
            if pos < 0 {
                continue;
            }
            let base = (slot as usize * d.kv_heads + h / (d.heads / d.kv_heads)) * ctx;
            let first = d.window.map_or(0, |w| (pos as usize + 1).saturating_sub(w));
            let query = &q[t * q_ld + h * d.qk_dim..][..d.qk_dim];
            let scores: Vec<f64> = (first..=pos as usize)
                .map(|p| {
                    let key = &keys[(base + p) * d.qk_dim..][..d.qk_dim];
                    let dot: f64 = query.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                    dot * f64::from(d.scale)
                })
                .collect();
            let sink = sinks.as_ref().map(|s| f64::from(s[h]));
            let total: f64 = scores.iter().copied().chain(sink).map(f64::exp).sum();
            for c in 0..d.v_dim {
                let sum: f64 = scores
                    .iter()
                    .enumerate()
                    .map(|(i, s)| s.exp() * f64::from(v[(base + first + i) * v_ld + c]))
                    .sum();
                expected[t * out_ld + h * d.v_dim + c] = (sum / total) as f32;
            }
        }
    }
    let mut operands = vec![Operand::Floats(q), Operand::Floats(keys)];
    operands.extend(values.map(Operand::Floats));
    operands.push(Operand::Ints(rows.iter().map(|r| r.0).collect()));
    operands.push(Operand::Ints(rows.iter().map(|r| r.1).collect()));
    operands.extend(sinks.map(Operand::Floats));
    let at = operands.len();
    operands.push(Operand::Floats(strided(n, d.heads * d.v_dim, out_ld, |_, _| 3.0)));
    Case {
        spec: KernelSpec::Attention { desc: d, q_ld, out_ld, ctx },
        n,
        operands,
        expect: vec![(at, Expect::Floats(expected, 1e-5))],
    }
}

fn desc(heads: usize, kv_heads: usize, qk_dim: usize, v_dim: usize) -> AttentionDesc {
    AttentionDesc { heads, kv_heads, qk_dim, v_dim, scale: 0.7, window: None, sinks: false, v_from_k: false }
}

fn prefill(start: i32, len: i32) -> Vec<(i32, i32)> {
    (start..start + len).map(|p| (p, 1)).collect()
}

#[test]
fn prefill_and_decode() {
    let mut rng = Rng::new(40);
    let mut cases = Vec::new();
    for (heads, kv, qk, v) in [(4, 4, 16, 16), (8, 2, 24, 17), (6, 1, 80, 64), (2, 2, 128, 144), (4, 2, 5, 3)]
    {
        for ctx in [48, 100] {
            let batch = vec![(40, 0), (0, 2), (-1, 1), (33, 2), (31, 1), (47, 1)];
            for rows in [prefill(0, 40), prefill(29, 7), vec![(47, 2)], vec![(0, 0)], batch] {
                cases.push(case(&mut rng, Setting { desc: desc(heads, kv, qk, v), ctx, rows }));
            }
        }
    }
    check(&cases);
}

#[test]
fn windows_and_sinks() {
    let mut rng = Rng::new(41);
    let mut cases = Vec::new();
    for (window, sinks) in
        [(Some(1), false), (Some(7), true), (Some(40), false), (Some(500), true), (None, true)]
    {
        for rows in [prefill(0, 70), prefill(60, 5), vec![(69, 0), (-3, 0), (2, 1)]] {
            let desc = AttentionDesc { window, sinks, ..desc(8, 2, 32, 24) };
            cases.push(case(&mut rng, Setting { desc, ctx: 70, rows }));
        }
    }
    check(&cases);
}

#[test]
fn latent_values_are_part_of_the_keys() {
    let mut rng = Rng::new(42);
    let mut cases = Vec::new();
    for (heads, qk, v) in [(16, 576, 512), (3, 40, 32), (40, 24, 24)] {
        for rows in [prefill(0, 20), vec![(33, 0), (5, 2)]] {
            let desc = AttentionDesc { v_from_k: true, scale: 0.1, ..desc(heads, 1, qk, v) };
            cases.push(case(&mut rng, Setting { desc, ctx: 64, rows }));
        }
    }
    check(&cases);
}
