//! Rounding errors of fp16 compared with exact arithmetic.

use crate::builder::{Arg, Builder, int, name, run, tensor, ty};
use half::f16;
use moec_coreml::package::Dtype;

/// Reproducible normal random numbers, rounded to fp16.
struct Normal(u64);

impl Normal {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    fn take(&mut self, n: usize, scale: f64) -> Vec<f32> {
        let one = |_| {
            let (a, b) = (self.uniform(), self.uniform());
            let x = (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos() * scale;
            f16::from_f64(x).to_f32()
        };
        (0..n).map(one).collect()
    }
}

/// `w[m, k] · x[k]`.
fn times(w: &[f32], x: &[f64]) -> Vec<f64> {
    w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()).collect()
}

/// Relative root mean square of the error of an expert group in fp16, compared with f64.
fn grouped(experts: usize, hidden: usize, inner: usize, rows: usize) -> f64 {
    let mut normal = Normal(7);
    let t = |shape: &[usize]| ty(Dtype::F16, shape);
    let all = t(&[experts * rows, hidden, 1, 1]);
    let x = normal.take(experts * rows * hidden, 1.0);
    let mut exact = Vec::new();
    let names = |stem: &str| -> Vec<&'static str> {
        (0..experts).map(|e| &*Box::leak(format!("{stem}{e}").into_boxed_str())).collect()
    };
    let [parts, gates, ups, downs, a, s, b, h, outs] =
        ["part", "gate", "up", "down", "a", "s", "b", "h", "out"].map(names);
    let row_type = t(&[rows, hidden, 1, 1]);
    let inner_type = t(&[rows, inner, 1, 1]);
    let split: Vec<_> = parts.iter().map(|&p| (p, row_type.clone())).collect();
    let mut f = Builder::default().input("x", &all).op(
        "split",
        &[("x", name("x")), ("num_splits", int(experts as i32)), ("axis", int(0))],
        &split,
    );
    for e in 0..experts {
        let gate = normal.take(inner * hidden, (hidden as f64).powf(-0.5));
        let up = normal.take(inner * hidden, (hidden as f64).powf(-0.5));
        let down = normal.take(hidden * inner, (inner as f64).powf(-0.5));
        for row in x[e * rows * hidden..(e + 1) * rows * hidden].chunks(hidden) {
            let row: Vec<f64> = row.iter().map(|&x| x.into()).collect();
            let gated = times(&gate, &row).into_iter().zip(times(&up, &row));
            let h: Vec<f64> = gated.map(|(a, b)| a / (1.0 + (-a).exp()) * b).collect();
            exact.extend(times(&down, &h));
        }
        let conv = |f: Builder, x, weight, y, ty: &_| {
            f.op("conv", &[("x", name(x)), ("weight", name(weight))], &[(y, Clone::clone(ty))])
        };
        f = f.weight(gates[e], &[inner, hidden, 1, 1], &gate).weight(ups[e], &[inner, hidden, 1, 1], &up);
        f = f.weight(downs[e], &[hidden, inner, 1, 1], &down);
        f = conv(f, parts[e], gates[e], a[e], &inner_type);
        f = f.op("silu", &[("x", name(a[e]))], &[(s[e], inner_type.clone())]);
        f = conv(f, parts[e], ups[e], b[e], &inner_type);
        f = f.op("mul", &[("x", name(s[e])), ("y", name(b[e]))], &[(h[e], inner_type.clone())]);
        f = conv(f, h[e], downs[e], outs[e], &row_type);
    }
    let package = f
        .op("concat", &[("values", Arg::Names(outs)), ("axis", int(0))], &[("y", all.clone())])
        .output("y", &all)
        .open();
    let start = std::time::Instant::now();
    let y = run(&package, &[("x", tensor(&all, &x))]).expect("runs")["y"].to_f32();
    let seconds = start.elapsed().as_secs_f64();
    let square = |x: f64| x * x;
    let difference: f64 = y.iter().zip(&exact).map(|(&y, e)| square(f64::from(y) - e)).sum();
    let relative = (difference / exact.iter().map(|&e| square(e)).sum::<f64>()).sqrt();
    println!("{experts} experts {hidden}×{inner}, {rows} rows: relative rms {relative:.2e}, {seconds:.2} s");
    relative
}

#[test]
fn a_grouped_ffn_is_within_rounding_of_exact_arithmetic() {
    for (experts, hidden, inner, rows) in [(2, 64, 96, 16), (4, 256, 128, 16)] {
        let relative = grouped(experts, hidden, inner, rows);
        // Three roundings of about 2⁻¹² each; fewer or more would be outside of these bounds.
        assert!((2e-4..8e-4).contains(&relative), "{relative:.2e}");
    }
}

/// An expert group of a real model's size: `cargo test -p moec-coreml -- --ignored --nocapture full_size`.
#[test]
#[ignore = "computes a second, and its reference in f64 a minute"]
fn a_grouped_ffn_of_full_size_is_as_exact() {
    let relative = grouped(8, 2048, 1024, 64);
    assert!((2e-4..8e-4).contains(&relative), "{relative:.2e}");
}
