//! Kernels compiled by LLVM, and one written by hand, compared with references in f64.

use crate::common::{as_floats, bf16, floats, noise, of_bf16, sample};
use moec_ptx::{Argument, Launch, Memory, Program, Report, parse};

/// Runs a kernel with these buffers and this number as its arguments; returns the last buffer.
fn start(name: &str, buffers: &[Vec<u8>], number: Option<u32>, launch: &Launch) -> (Vec<u8>, Report) {
    let module = parse(&sample(name)).unwrap();
    let mut memory = Memory::new(&module).unwrap();
    let held: Vec<_> =
        buffers.iter().enumerate().map(|(i, bytes)| memory.add(&format!("b{i}"), bytes)).collect();
    let mut arguments: Vec<_> = held.iter().map(|buffer| Argument::Buffer(*buffer)).collect();
    arguments.extend(number.map(Argument::U32));
    let program = Program::new(&module, name).unwrap();
    let report = program.launch(&memory, &arguments, launch).unwrap_or_else(|e| panic!("{e}"));
    (memory.bytes(held[held.len() - 1]), report)
}

/// Checks that differences are at most `part` of the largest expected number.
fn near(found: &[f32], expected: &[f64], part: f64) {
    let most = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
    for (i, (x, y)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(*x) - y).abs() <= part * most, "element {i}: {x} and {y}");
    }
    assert_eq!(found.len(), expected.len());
}

#[test]
fn vectors_are_added_by_whole_and_by_partial_blocks() {
    let (a, b) = (noise(1000, 1), noise(1000, 2));
    for workers in [1, 3] {
        let launch = Launch { workers, ..Launch::linear(8, 128) };
        let (c, report) = start("vector_add", &[floats(&a), floats(&b), vec![0; 4000]], Some(1000), &launch);
        let sums: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        assert_eq!(as_floats(&c), sums);
        // 125 sectors of 32 bytes each; three vectors of 4000 bytes.
        assert_eq!((report.loads.bytes, report.loads.sectors), (8000, 250));
        assert_eq!((report.stores.bytes, report.stores.sectors, report.stores.requests), (4000, 125, 32));
        assert_eq!(report.loads.coalescing(), 1.0);
    }
}

#[test]
fn rows_are_summed_through_shuffles_and_shared_memory() {
    let (rows, columns) = (3, 1000);
    let data: Vec<u16> = noise(rows * columns, 3).into_iter().map(bf16).collect();
    let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
    let (out, _) =
        start("row_sum", &[bytes, vec![0; 4 * rows]], Some(columns as u32), &Launch::linear(3, 128));
    let sums: Vec<f64> =
        data.chunks(columns).map(|row| row.iter().map(|x| f64::from(of_bf16(*x))).sum()).collect();
    near(&as_floats(&out), &sums, 1e-6);
}

/// `a · b` with `m` rows, inner dimension `k`, and `n` columns.
fn product(a: &[f32], b: &[f32], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let at = |i: usize, j: usize| (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(b[l * n + j])).sum();
    (0..m * n).map(|i| at(i / n, i % n)).collect()
}

#[test]
fn tiles_are_multiplied_between_barriers() {
    let n = 48;
    let (a, b) = (noise(n * n, 4), noise(n * n, 5));
    let launch = Launch::new([3, 3, 1], [16, 16, 1]);
    let (c, report) = start("matmul", &[floats(&a), floats(&b), vec![0; 4 * n * n]], Some(n as u32), &launch);
    near(&as_floats(&c), &product(&a, &b, [n, n, n]), 1e-6);
    // A warp reads two rows of a tile: 64 bytes each.
    assert_eq!(report.loads.coalescing(), 1.0);
    assert_eq!(report.class(moec_ptx::InstructionClass::Float).operations, 2 * (n * n * n) as u64);
}

#[test]
fn softmax_keeps_rows_in_dynamic_shared_memory() {
    let (rows, columns) = (4, 256);
    let x: Vec<f32> = noise(rows * columns, 6).iter().map(|x| 8.0 * x).collect();
    let launch = Launch { dynamic_shared: 4 * columns as u32, ..Launch::linear(rows as u32, 32) };
    let (out, _) =
        start("softmax", &[floats(&x), vec![0; 4 * rows * columns]], Some(columns as u32), &launch);
    let expected = x.chunks(columns).flat_map(|row| {
        let most = row.iter().copied().fold(f32::MIN, f32::max);
        let powers: Vec<f64> = row.iter().map(|x| f64::from(x - most).exp()).collect();
        let sum: f64 = powers.iter().sum();
        powers.into_iter().map(move |p| p / sum)
    });
    near(&as_floats(&out), &expected.collect::<Vec<_>>(), 1e-6);
}

#[test]
fn bf16_tile_is_multiplied_by_tensor_cores() {
    let (a, b) = (noise(16 * 16, 7), noise(16 * 8, 8));
    let halves = |of: &[f32]| of.iter().flat_map(|x| bf16(*x).to_le_bytes()).collect::<Vec<u8>>();
    let rounded = |of: &[f32]| of.iter().map(|x| of_bf16(bf16(*x))).collect::<Vec<f32>>();
    let buffers = [halves(&a), halves(&b), vec![0; 4 * 16 * 8]];
    let (out, report) = start("mma_bf16", &buffers, None, &Launch::linear(1, 32));
    near(&as_floats(&out), &product(&rounded(&a), &rounded(&b), [16, 16, 8]), 1e-6);
    assert_eq!(report.class(moec_ptx::InstructionClass::Matrix).operations, 2 * 16 * 16 * 8);
}
