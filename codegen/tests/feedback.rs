//! Rounding with error feedback, compared with the published algorithm.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use moec_codegen::pack::feedback::SWEEPS;
use moec_codegen::pack::quantise::Group;
use moec_codegen::pack::{
    Feedback, Geometry, Scratch, Weighting, groups, pack, pack_block, round_as_packed, unpack_rows,
};
use moec_ir::plan::Layout;
use moec_ir::types::{E2M1, Format, GROUP};
use std::f64::consts::PI;
use std::io;
use std::ops::Range;
use std::thread;

/// Random numbers around 0, the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    fn numbers(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.next() + self.next() + self.next()) as f32).collect()
    }
}

/// Second moments `[n, n]`, damped, of channels that are mixtures of a few common sources.
fn moments(n: usize, random: &mut Random) -> Vec<f64> {
    let causes = 6;
    let mix: Vec<f64> = (0..n * causes).map(|_| random.next()).collect();
    let product =
        |i: usize, j: usize| (0..causes).map(|c| mix[i * causes + c] * mix[j * causes + c]).sum::<f64>();
    (0..n * n).map(|at| product(at / n, at % n) + if at % (n + 1) == 0 { 0.1 } else { 0.0 }).collect()
}

/// Feedback from the lower triangles of the diagonal blocks of `h`.
fn feedback(h: &[f64], n: usize, block: usize) -> Feedback {
    let lower = |range: Range<usize>| {
        let pairs = range.clone().flat_map(|i| (range.start..=i).map(move |j| (i, j)));
        (range.clone(), pairs.map(|(i, j)| h[i * n + j]).collect())
    };
    Feedback::new((0..n).step_by(block).map(|b| lower(b..(b + block).min(n)))).unwrap()
}

/// `H⁻¹`, by Gauss-Jordan elimination.
fn inverse(h: &[f64], n: usize) -> Vec<f64> {
    let mut a = h.to_vec();
    let mut inverse: Vec<f64> = (0..n * n).map(|at| f64::from(u8::from(at % (n + 1) == 0))).collect();
    for k in 0..n {
        let pivot = a[k * n + k];
        for j in 0..n {
            a[k * n + j] /= pivot;
            inverse[k * n + j] /= pivot;
        }
        for i in (0..n).filter(|&i| i != k) {
            let by = a[i * n + k];
            for j in 0..n {
                a[i * n + j] -= by * a[k * n + j];
                inverse[i * n + j] -= by * inverse[k * n + j];
            }
        }
    }
    inverse
}

/// `U`, upper triangular, with `UᵀU = a`.
fn cholesky(a: &[f64], n: usize) -> Vec<f64> {
    let mut u = vec![0.0; n * n];
    for i in 0..n {
        for j in i..n {
            let sum: f64 = (0..i).map(|k| u[k * n + i] * u[k * n + j]).sum();
            let rest = a[i * n + j] - sum;
            u[i * n + j] = if i == j { rest.sqrt() } else { rest / u[i * n + i] };
        }
    }
    u
}

/// `tr(Δ H Δᵀ)` of one row.
fn error(h: &[f64], exact: &[f32], stored: &[f32]) -> f64 {
    let d: Vec<f64> = exact.iter().zip(stored).map(|(a, b)| f64::from(a - b)).collect();
    d.iter()
        .zip(h.chunks(d.len()))
        .map(|(x, row)| x * d.iter().zip(row).map(|(y, h)| y * h).sum::<f64>())
        .sum()
}

fn values(groups: &[Group], cols: usize) -> Vec<f32> {
    groups.iter().flat_map(Group::values).take(cols).collect()
}

/// GPTQ, algorithm 1, in f64 with a real inverse, gives the same codes for the same scales.
#[test]
fn codes_are_those_of_gptq() {
    let (n, mut random) = (3 * GROUP, Random(1));
    let h = moments(n, &mut random);
    let u = cholesky(&inverse(&h, n), n);
    let feedback = feedback(&h, n, n);
    let rows = random.numbers(40 * n);
    let found = feedback.round_in(Format::Q4, &rows, 0);
    let mut others = 0;
    for (row, groups) in rows.chunks(n).zip(found.chunks(n / GROUP)) {
        let mut w: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
        for i in 0..n {
            let scale = f64::from(groups[i / GROUP].scale);
            let code = (w[i] / scale).round_ties_even().clamp(-8.0, 7.0);
            let error = (w[i] - code * scale) / u[i * n + i];
            for j in i..n {
                w[j] -= error * u[i * n + j];
            }
            others += usize::from(code != f64::from(groups[i / GROUP].codes[i % GROUP]));
        }
    }
    // A number halfway between two codes may be rounded to either, which changes the codes after it.
    assert!(others <= rows.len() / 100, "{others} of {} codes are others", rows.len());
}

#[test]
fn feedback_errs_less_than_the_nearest_codes() {
    let n = 4 * GROUP;
    let formats = [
        (Format::Q4, 0.6),
        (Format::Q4n, 0.6),
        (Format::Q6, 0.7),
        (Format::Q3, 0.7),
        (Format::Q2, 0.8),
        (Format::Q2s, 0.8),
    ];
    for (seed, (format, most)) in (0..8).flat_map(|seed| formats.map(|f| (seed, f))) {
        let mut random = Random(seed);
        let h = moments(n, &mut random);
        let rows = random.numbers(32 * n);
        let diagonal: Vec<f32> = (0..n).map(|i| h[i * n + i] as f32).collect();
        let nearest = groups(format, &rows, n, Weighting::of(Some(&diagonal)));
        let sum = |found: &[Group]| -> f64 {
            let rows = rows.chunks(n).zip(found.chunks(n / GROUP));
            rows.map(|(row, groups)| error(&h, row, &values(groups, n))).sum()
        };
        let plain = sum(&nearest);
        let mut last = plain;
        // Wider blocks compensate more of the error.
        for block in [GROUP, 2 * GROUP, n] {
            let fed = sum(&feedback(&h, n, block).round(format, &rows));
            assert!(fed < 1.02 * last, "{format}, seed {seed}, blocks of {block}: {fed} after {last}");
            last = fed;
        }
        assert!(last < most * plain, "{format}, seed {seed}: {last} of {plain}");
    }
}

/// Choosing codes again once all are known lowers the error of every row; more sweeps lower it further.
#[test]
fn sweeps_lower_the_error_of_every_row() {
    let n = 4 * GROUP - 3;
    for seed in 0..8 {
        let mut random = Random(seed);
        let h = moments(n, &mut random);
        let feedback = feedback(&h, n, n);
        let rows = random.numbers(32 * n);
        let errors = |sweeps: usize| -> Vec<f64> {
            let found = feedback.round_in(Format::Q4, &rows, sweeps);
            let rows = rows.chunks(n).zip(found.chunks(n.div_ceil(GROUP)));
            rows.map(|(row, groups)| error(&h, row, &values(groups, n))).collect()
        };
        let sum = |errors: &[f64]| errors.iter().sum::<f64>();
        let once = errors(0);
        let mut last = once.clone();
        for sweeps in 1..=SWEEPS {
            let now = errors(sweeps);
            for (now, last) in now.iter().zip(&last) {
                assert!(*now <= last * 1.0001, "seed {seed}, sweep {sweeps}: {now} after {last}");
            }
            last = now;
        }
        assert!(sum(&last) < 0.95 * sum(&once), "seed {seed}: {} after {}", sum(&last), sum(&once));
    }
}

/// A row's bytes depend neither on the rows that are rounded at the same time nor on its position.
#[test]
fn rows_are_rounded_each_by_itself() {
    let (matrices, rows, cols) = (2, 37, 72);
    let mut random = Random(7);
    let feedback = feedback(&moments(cols, &mut random), cols, GROUP * 2);
    let all = random.numbers(matrices * rows * cols);
    let alone: Vec<Group> = all.chunks(cols).flat_map(|row| feedback.round(Format::Q4, row)).collect();
    assert_eq!(feedback.round(Format::Q4, &all), alone);
    for layout in [Layout::Rows, Layout::Panels { nr: 16 }, Layout::GluPanels { nr: 4 }] {
        let rows = if matches!(layout, Layout::GluPanels { .. }) { rows - 1 } else { rows };
        let g = Geometry { layout, format: Format::Q4, matrices, rows, cols };
        let read = |l: usize, r: Range<usize>, out: &mut [f32]| {
            out.copy_from_slice(&all[(l * rows + r.start) * cols..][..out.len()]);
            Ok::<(), io::Error>(())
        };
        let mut packed = Vec::new();
        let weighting = |_: usize| Weighting { feedback: Some(&feedback), ..Weighting::default() };
        pack(&g, &weighting, read, &mut packed).unwrap();
        for l in 0..matrices {
            let mut out = vec![0.0; rows * cols];
            unpack_rows(&g, &packed, l, 0..rows, &mut out).unwrap();
            let own = &all[l * rows * cols..][..rows * cols];
            for (row, got) in own.chunks(cols).zip(out.chunks(cols)) {
                assert_eq!(got, values(&feedback.round(Format::Q4, row), cols));
            }
            // Rounding unpacked weights again gives the same codes; numbers far from them keep a difference.
            let mut again = own.to_vec();
            round_as_packed(&g, &packed, l, 0..rows, true, &mut again).unwrap();
            assert_eq!(again, out);
            let mut others = vec![100.0; cols];
            round_as_packed(&g, &packed, l, 0..1, true, &mut others).unwrap();
            assert_ne!(others, out[..cols]);
        }
    }
}

/// The bytes of a matrix of several blocks depend neither on the threads nor on the order of packing.
#[test]
fn blocks_are_packed_each_by_itself() {
    let (rows, cols) = (600, 1024);
    let mut random = Random(11);
    let wide = Feedback::new((0..cols / GROUP / 2).map(|b| {
        let n = GROUP * 2;
        let h = moments(n, &mut random);
        (
            b * n..(b + 1) * n,
            (0..n).flat_map(|i| (0..=i).map(move |j| (i, j))).map(|(i, j)| h[i * n + j]).collect(),
        )
    }))
    .unwrap();
    let all = random.numbers(rows * cols);
    let g = Geometry { layout: Layout::Panels { nr: 16 }, format: Format::Q4, matrices: 1, rows, cols };
    let weighting = Weighting { feedback: Some(&wide), ..Weighting::default() };
    let read = |_: usize, r: Range<usize>, out: &mut [f32]| {
        out.copy_from_slice(&all[r.start * cols..][..out.len()]);
        Ok::<(), io::Error>(())
    };
    let mut packed = Vec::new();
    pack(&g, &|_| weighting, read, &mut packed).unwrap();
    let blocks: Vec<_> = g.blocks().collect();
    assert_eq!((blocks.len(), g.blocks_of_one()), (3, 3));
    let by_threads: Vec<Vec<u8>> = thread::scope(|scope| {
        let pack = |block| {
            let mut bytes = Vec::new();
            pack_block(&g, block, weighting, &mut { read }, &mut Scratch::default(), &mut bytes).unwrap();
            bytes
        };
        // The last block is started first.
        let mut threads: Vec<_> = blocks.iter().rev().map(|block| scope.spawn(move || pack(block))).collect();
        threads.reverse();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(by_threads.concat() == packed);
}

/// Numbers that were read from codes and scales give the same numbers again, whatever the largest code is.
#[test]
fn rounding_stored_numbers_again_keeps_them() {
    let (n, mut random) = (2 * GROUP, Random(5));
    let feedback = feedback(&moments(n, &mut random), n, n);
    let found = feedback.round(Format::Q4, &random.numbers(200 * n));
    for group in &found {
        assert_eq!(Group::recover(Format::Q4, &group.values()).values(), group.values());
    }
    for top in 1..=7_i8 {
        let group = Group {
            scale: half::bf16::from_f32(0.37).to_f32(),
            codes: std::array::from_fn(|i| i as i8 % (top + 1)),
        };
        for format in [Format::Q4, Format::Q8, Format::Q4h, Format::Q8h] {
            assert_eq!(Group::recover(format, &group.values()).values(), group.values(), "{top}");
        }
    }
    // As in checkpoints: the code −128, a subnormal f16 scale, and both ends of the range of powers of two.
    let group = Group {
        scale: half::f16::from_bits(37).to_f32(),
        codes: std::array::from_fn(|i| (i as i16 - 128) as i8),
    };
    assert_eq!(Group::recover(Format::Q8h, &group.values()), group);
    for exponent in [-128, -127, -126, -3, 123] {
        let codes = std::array::from_fn(|i| E2M1[(i * 7 + 5) % 16]);
        let group = Group { scale: 2.0_f64.powi(exponent) as f32, codes };
        assert_eq!(Group::recover(Format::Mxfp4, &group.values()), group, "{exponent}");
        assert_eq!(Group::with_scale(Format::Mxfp4, &group.values(), group.scale), group, "{exponent}");
    }
}

#[test]
fn any_input_gives_finite_numbers() {
    let n = GROUP + 5;
    let odd = [0.0, -0.0, 1e-38, 1e38, -1e38, f32::INFINITY, f32::NAN, f32::MIN_POSITIVE, 1.0];
    let mut random = Random(3);
    let rows: Vec<f32> =
        (0..40 * n).map(|i| if i % 3 == 0 { odd[i / 3 % odd.len()] } else { random.next() as f32 }).collect();
    // Impossible correlations: the block is treated as its diagonal.
    let impossible: Vec<f64> = (0..n * n).map(|at| if at % (n + 1) == 0 { 1.0 } else { -1.0 }).collect();
    for h in [moments(n, &mut random), impossible, vec![0.0; n * n], vec![1e300; n * n]] {
        let found = feedback(&h, n, n).round(Format::Q4, &rows);
        assert!(found.iter().flat_map(Group::values).all(f32::is_finite));
    }
    assert_eq!(Feedback::new([(0..3, vec![1.0; 5])]), None);
    assert_eq!(Feedback::new([(0..1, vec![f64::NAN])]), None);
    assert_eq!(Feedback::new([(0..1, vec![1.0]), (1..2, vec![1.0])]), None);
}

/// Of normal numbers in groups, each divided by its best scale of either sign, every code of a grid is where it
/// loses least; and the scales that rounding tries lose hardly more than the best.
#[test]
fn grids_are_fitted_to_normal_numbers() {
    const GROUPS: usize = 400;
    let mut random = Random(1);
    // Box and Muller's transform.
    let mut normal =
        || (-2.0 * (0.5 + 0.5 * random.next()).max(1e-9).ln()).sqrt() * (PI * random.next()).cos();
    let numbers: Vec<f64> = (0..GROUPS * GROUP).map(|_| normal()).collect();
    for format in [Format::Q4n, Format::Q3] {
        let grid: Vec<f64> = format.grid().iter().map(|&code| f64::from(code)).collect();
        let lost = |grid: &[f64]| -> f64 {
            let at = |x: &[f64], scale: f64| -> f64 {
                let nearest =
                    |x: &f64| grid.iter().map(|code| (x - code * scale).powi(2)).fold(f64::MAX, f64::min);
                x.iter().map(nearest).sum()
            };
            let best = |x: &[f64]| {
                let root = (x.iter().map(|x| x * x).sum::<f64>() / GROUP as f64).sqrt();
                let scales =
                    (0..24).flat_map(|i| [1.0, -1.0].map(|sign| sign * (0.65 + 0.037 * f64::from(i)) * root));
                // The root mean square of the codes that normal numbers have is near to 20.
                scales.map(|scale| at(x, scale / 20.0)).fold(f64::MAX, f64::min)
            };
            numbers.chunks(GROUP).map(best).sum()
        };
        let least = lost(&grid);
        for (i, by) in (0..grid.len()).flat_map(|i| [(i, -3.0), (i, 3.0)]) {
            let mut moved = grid.clone();
            moved[i] += by;
            assert!(lost(&moved) > least, "{format}: {} is better {by} on", grid[i]);
        }
        let rounded: f64 = numbers
            .chunks(GROUP)
            .map(|x| {
                let x: [f32; GROUP] = std::array::from_fn(|i| x[i] as f32);
                let values = Group::nearest(format, &x, &[1.0; GROUP]).values();
                x.iter().zip(values).map(|(x, y)| f64::from(x - y).powi(2)).sum::<f64>()
            })
            .sum();
        assert!(rounded < 1.04 * least, "{format}: {rounded} of {least}");
    }
}
