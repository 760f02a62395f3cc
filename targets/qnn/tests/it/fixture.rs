//! Networks with random weights, and input rows for them.

use moec_backend::Channels;
use moec_ir::{Activation, Glu, RopeStyle};
use moec_qnn::emit::{Attention, Cluster, Ffn, Projection, Rope, Rotation, fitted};
use moec_qnn::exec::Executor;
use moec_qnn::net::{Network, Tensor};
use moec_qnn::quant::{Matrix, coded, widths};
use moec_qnn::ranges::RangeObserver;
use std::sync::Arc;

/// Reproducible pseudorandom numbers, about normal with variance 1.
pub(crate) fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..count).map(|_| ((0..6).map(|_| next()).sum::<f32>() - 3.0) * std::f32::consts::SQRT_2).collect()
}

/// A matrix rounded to the nearest codes. The `outliers` columns with the largest numbers have 8 bits.
fn channels(numbers: &[f32], cols: usize, outliers: usize) -> Channels {
    let coded = |row: &[f32], most: f32| -> (f32, Vec<i8>) {
        let whole = row.iter().fold(1e-9_f32, |m, x| m.max(x.abs())) / most;
        let with = |scale: f32| -> (f32, Vec<i8>) {
            let code = |x: &f32| (x / scale).round_ties_even().clamp(-most, most) as i8;
            (scale, row.iter().map(code).collect())
        };
        // Clamping numbers at the ends may lower the error of the others.
        let tried = [1.0, 0.9, 0.8, 0.7, 0.6].map(|share| with(whole * share));
        let error = |(scale, codes): &(f32, Vec<i8>)| -> f32 {
            row.iter().zip(codes).map(|(x, q)| (x - f32::from(*q) * scale).powi(2)).sum()
        };
        tried.into_iter().min_by(|a, b| error(a).total_cmp(&error(b))).unwrap()
    };
    let largest = |column: &u32| {
        numbers.iter().skip(*column as usize).step_by(cols).fold(0.0_f32, |m, x| m.max(x.abs()))
    };
    let mut columns: Vec<u32> = (0..cols as u32).collect();
    columns.sort_by(|a, b| largest(b).total_cmp(&largest(a)).then(a.cmp(b)));
    columns.truncate(outliers);
    columns.sort_unstable();
    let mut all = Channels { outliers: columns, ..Channels::default() };
    for row in numbers.chunks_exact(cols) {
        let own: Vec<f32> = all.outliers.iter().map(|&c| row[c as usize]).collect();
        let mut rest = row.to_vec();
        all.outliers.iter().for_each(|&c| rest[c as usize] = 0.0);
        let ((scale, four), (eight_scale, eight)) = (coded(&rest, 7.0), coded(&own, 127.0));
        all.scales.push(scale);
        all.eight_scales.push(eight_scale);
        all.four.extend(four);
        all.eight.extend(eight);
    }
    all
}

/// A matrix whose columns all have eight bits.
pub(crate) fn eight_bit(numbers: &[f32], cols: usize) -> Matrix {
    let rows = numbers.len() / cols;
    let [_, eight] = widths(&channels(numbers, cols, cols), 0..rows, cols);
    eight.unwrap()
}

/// Rounding of matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MatrixRounding {
    /// In f32.
    Exact,
    /// Eight bits.
    Eight,
    /// Four bits, and eight for one column of sixteen.
    Mixed,
}

pub(crate) fn projection(
    form: MatrixRounding,
    name: &str,
    [rows, cols]: [usize; 2],
    numbers: &[f32],
) -> Projection {
    match form {
        MatrixRounding::Exact => Projection::of(Tensor::floats(name, [rows, cols], numbers)),
        MatrixRounding::Eight => Projection::of(eight_bit(numbers, cols).tensor(name)),
        MatrixRounding::Mixed => {
            let made = channels(numbers, cols, cols / 16);
            let [four, eight] = widths(&made, 0..rows, cols).map(Option::unwrap);
            let wide = (eight.tensor(format!("{name}.int8")), made.outliers);
            let matrix = four.tensor(format!("{name}.int4"));
            Projection { matrix, outliers: Some(wide), bias: None }
        }
    }
}

fn scaled(seed: u64, rows: usize, cols: usize) -> Vec<f32> {
    numbers(seed, rows * cols).iter().map(|x| x / (cols as f32).sqrt()).collect()
}

/// A gated network in clusters; the numbers do not depend on the rounding.
pub(crate) fn ffn(form: MatrixRounding, glu: Glu, hidden: usize, clusters: &[usize], seed: u64) -> Ffn {
    let cluster = |(i, &n): (usize, &usize)| {
        let name = format!("e{seed}.c{i}");
        let seed = seed * 100 + i as u64 * 3;
        let gate = projection(form, &format!("{name}.wg"), [n, hidden], &scaled(seed + 1, n, hidden));
        let up = projection(form, &format!("{name}.wu"), [n, hidden], &scaled(seed + 2, n, hidden));
        let down = projection(form, &format!("{name}.wd"), [hidden, n], &scaled(seed + 3, hidden, n));
        Cluster { name, gate, up, down }
    };
    Ffn { hidden, glu, clusters: clusters.iter().enumerate().map(cluster).collect() }
}

pub(crate) const RELU: Glu = Glu::Gated(Activation::Relu);

pub(crate) fn attention(form: MatrixRounding, style: RopeStyle) -> Attention {
    let (hidden, heads, kv_heads, dim) = (64, 4, 2, 16);
    let of = |name: &str, rows: usize, cols: usize, seed| {
        projection(form, name, [rows, cols], &scaled(seed, rows, cols))
    };
    let gain: Vec<f32> = numbers(9, dim).iter().map(|x| 1.0 + 0.1 * x).collect();
    let rope = Some(Rope { offset: 0, channels: dim, style });
    let rotation = Rotation { norm: Some((gain, 1e-6)), rope };
    Attention {
        hidden,
        heads,
        kv_heads,
        qk_dim: dim,
        v_dim: dim,
        scale: 0.25,
        context: 8,
        q: of("wq", heads * dim, hidden, 1),
        k: of("wk", kv_heads * dim, hidden, 2),
        v: of("wv", kv_heads * dim, hidden, 3),
        o: of("wo", hidden, heads * dim, 4),
        of_q: rotation.clone(),
        of_k: rotation,
        clip: None,
    }
}

pub(crate) fn run(network: &Network, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let inputs: Vec<&[f32]> = inputs.iter().map(|x| &**x).collect();
    Executor::new(Arc::new(network.clone()), None).unwrap().run(&inputs).unwrap().outputs
}

/// Quantises an f32 network by samples of its inputs; the last samples measure margins.
pub(crate) fn calibrated(network: &Network, sample: impl Fn(u64) -> Vec<Vec<f32>>) -> Network {
    let executor = Executor::new(Arc::new(network.clone()), None).unwrap();
    let mut watch = RangeObserver::default();
    for seed in 0..8 {
        let inputs = sample(seed);
        let inputs: Vec<&[f32]> = inputs.iter().map(|x| &**x).collect();
        watch.run(&executor, &inputs, seed % 2 == 1).unwrap();
    }
    coded(network, &fitted(watch.ranges(1.25), 1.0)).unwrap()
}
