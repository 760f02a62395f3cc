//! A fused kernel gives bit-identical results to the steps that it replaces.

use crate::cache::{Cache, FORMATS};
use crate::experts::gate_up_cases;
use crate::harness::{Case, Operand, Rng, can_multiply, random, run, strided};
use crate::machines::machines;
use moec_codegen::jit::Loaded;
use moec_codegen::spec::{CacheWrite, ExpertGateUp, Norm, Quantise, Rope};
use moec_codegen::{
    ByteDot, ComputeType, Isa, KernelSpec, NormKind, Rotation, RowFormat, RowNorm, compile, packed_words,
};
use moec_ir::op::RopeStyle;

/// A kernel, and for each argument the index of a shared operand.
type Step = (KernelSpec, Vec<usize>);

/// Steps, the fused kernel that replaces them, and the operands that must be equal after both.
struct Pair {
    operands: Vec<Operand>,
    n: usize,
    steps: Vec<Step>,
    fused: Step,
    same: Vec<usize>,
}

/// Contents of the operands after the steps.
fn after(loaded: &Loaded, isa: &Isa, pair: &Pair, steps: &[Step], chunk: usize) -> Vec<Operand> {
    let mut operands = pair.operands.clone();
    for (spec, args) in steps {
        let of_step = args.iter().map(|&i| operands[i].clone()).collect();
        let case = Case { spec: spec.clone(), n: pair.n, operands: of_step, expect: Vec::new() };
        let kernel = loaded.kernel(&spec.symbol(isa)).unwrap_or_else(|e| panic!("{e}"));
        for (words, &i) in run(kernel, isa, &case, chunk).into_iter().zip(args) {
            if let Operand::Floats(_) | Operand::Cache(_) = operands[i] {
                operands[i] = Operand::Floats(words.into_iter().map(f32::from_bits).collect());
            }
        }
    }
    operands
}

/// Checks the pairs on every machine that this host runs and that has their compute types.
fn check_pairs(pairs: &[Pair]) {
    for machine in machines() {
        let isa = machine.isa();
        let packs = |compute| match compute {
            ComputeType::F32 => true,
            ComputeType::Bf16 => isa.bf16,
            ComputeType::I8 => isa.bytes != ByteDot::None,
        };
        let fits = |pair: &&Pair| match &pair.fused.0 {
            KernelSpec::Norm(Norm { outs, .. }) => outs.iter().all(|out| packs(out.compute)),
            spec @ KernelSpec::ExpertGateUp(ExpertGateUp { out, .. }) => {
                packs(out.compute) && can_multiply(&isa, spec)
            }
            spec => can_multiply(&isa, spec),
        };
        let pairs: Vec<&Pair> = pairs.iter().filter(fits).collect();
        let specs: Vec<KernelSpec> =
            pairs.iter().flat_map(|p| p.steps.iter().chain([&p.fused])).map(|s| s.0.clone()).collect();
        let object = compile(&machine, &specs, &()).unwrap_or_else(|e| panic!("{e}"));
        let loaded = Loaded::new(&object).unwrap_or_else(|e| panic!("{e}"));
        for pair in pairs {
            let words = |operands: &[Operand]| -> Vec<Vec<u32>> {
                let bits = |i: &usize| match &operands[*i] {
                    Operand::Floats(x) => x.iter().map(|x| x.to_bits()).collect(),
                    other => panic!("{other:?} was not written"),
                };
                pair.same.iter().map(bits).collect()
            };
            let expected = words(&after(&loaded, &isa, pair, &pair.steps, usize::MAX));
            for chunk in [usize::MAX, 1] {
                let fused = std::slice::from_ref(&pair.fused);
                let found = words(&after(&loaded, &isa, pair, fused, chunk));
                assert!(found == expected, "{:?} n={} on {isa:?}", pair.fused.0, pair.n);
            }
        }
    }
}

/// A buffer for rows of a format, filled with a marker.
fn empty_rows(rows: usize, out: RowFormat, words: usize) -> Operand {
    Operand::Floats(strided(rows, words, out.ld, |_, _| 3.0))
}

#[test]
fn norms_write_the_compute_type_of_the_next_matrix() {
    let mut rng = Rng::new(60);
    let mut pairs = Vec::new();
    for (i, width) in [1, 5, 16, 31, 32, 80, 129, 200].into_iter().enumerate() {
        for kind in [NormKind::Rms, NormKind::Layer] {
            for compute in ComputeType::ALL {
                let (n, groups, eps, weight) = (1 + rng.below(9), 1 + i % 2, 1e-5, true);
                let (x_ld, plain) = (width * groups + 3, RowFormat::f32(width * groups + 1));
                let words = packed_words(width, compute) * groups;
                let packed = RowFormat { compute, ld: words + 2 };
                let mut operands = vec![Operand::Floats(random(&mut rng, n, width * groups, x_ld))];
                operands.push(Operand::Floats(rng.floats(width)));
                operands.extend((kind == NormKind::Layer).then(|| Operand::Floats(rng.floats(width))));
                let given: Vec<usize> = (0..operands.len()).collect();
                let (a, b) = (operands.len(), operands.len() + 1);
                operands.extend([empty_rows(n, plain, width * groups), empty_rows(n, packed, words)]);
                let norm = |outs| KernelSpec::Norm(Norm { kind, width, groups, x_ld, outs, eps, weight });
                let quantise = KernelSpec::Quantise(Quantise {
                    cols: width,
                    groups,
                    per_row: 1,
                    x_ld: plain.ld,
                    out_ld: packed.ld,
                    to: compute,
                });
                let with = |more: &[usize]| [given.as_slice(), more].concat();
                let steps = vec![(norm(vec![plain]), with(&[a])), (quantise, vec![a, b])];
                let alone = (norm(vec![packed]), with(&[b]));
                let both = (norm(vec![packed, plain]), with(&[b, a]));
                for (fused, same) in [(alone, vec![b]), (both, vec![a, b])] {
                    let (operands, steps) = (operands.clone(), steps.clone());
                    pairs.push(Pair { operands, n, steps, fused, same });
                }
            }
        }
    }
    check_pairs(&pairs);
}

#[test]
fn gate_and_up_write_the_compute_type_of_down() {
    let mut rng = Rng::new(61);
    let mut pairs = Vec::new();
    for case in gate_up_cases(&mut rng) {
        let KernelSpec::ExpertGateUp(ExpertGateUp { layout, inter, .. }) = case.spec else { continue };
        let words = packed_words(inter, ComputeType::Bf16);
        let packed = RowFormat { compute: ComputeType::Bf16, ld: words + 1 };
        let mut fused = case.spec.clone();
        if let KernelSpec::ExpertGateUp(ExpertGateUp { out, .. }) = &mut fused {
            *out = packed;
        }
        let mut operands = case.operands.clone();
        let (at, hidden) = (operands.len(), operands.len() - 1);
        // Rows without a token keep the buffer's earlier contents.
        operands.push(Operand::Floats(vec![0.0; layout.rows * layout.k * packed.ld]));
        let quantise = KernelSpec::Quantise(Quantise {
            cols: inter,
            groups: 1,
            per_row: layout.k,
            x_ld: inter,
            out_ld: packed.ld,
            to: ComputeType::Bf16,
        });
        let args: Vec<usize> = (0..at).collect();
        let mut others = args.clone();
        others[hidden] = at;
        let steps = vec![(case.spec, args), (quantise, vec![hidden, at])];
        pairs.push(Pair { operands, n: case.n, steps, fused: (fused, others), same: vec![at] });
    }
    check_pairs(&pairs);
}

/// Norms (of rows, of heads, none) combined with rotations (of all channels, of some, none).
fn norm_rotations(heads: usize, dim: usize, angles_ld: usize) -> Vec<(Option<RowNorm>, Option<Rotation>)> {
    let norm = |width, weight| Some(RowNorm { width, eps: 1e-5, weight });
    let norms = [None, norm(dim, true), norm(heads * dim, true), norm(dim, false)];
    let rotation = |rotary, offset, style| Some(Rotation { rotary, offset, style, angles_ld });
    let some = dim / 4 * 2;
    let rotations = [
        None,
        rotation(dim / 2 * 2, 0, RopeStyle::Half),
        rotation(some, dim - some, RopeStyle::Half),
        rotation(some, 1, RopeStyle::Interleaved),
    ];
    norms.into_iter().flat_map(|n| rotations.map(|r| (n, r))).filter(|w| *w != (None, None)).collect()
}

/// The steps that a fused kernel replaces, over the operands `[x, weight, angles, normed, rotated]`; and the
/// index of the operand with the result.
fn steps_of(
    heads: usize,
    dim: usize,
    ld: usize,
    (norm, rotation): (Option<RowNorm>, Option<Rotation>),
) -> (Vec<Step>, usize) {
    let (mut steps, mut at) = (Vec::new(), 0);
    if let Some(RowNorm { width, eps, weight }) = norm {
        let (kind, groups, outs) = (NormKind::Rms, heads * dim / width, vec![RowFormat::f32(ld)]);
        let spec = KernelSpec::Norm(Norm { kind, width, groups, x_ld: ld, outs, eps, weight });
        steps.push((spec, if weight { vec![0, 1, 3] } else { vec![0, 3] }));
        at = 3;
    }
    if let Some(rotation) = rotation {
        let spec = KernelSpec::Rope(Rope { heads, dim, norm: None, rotation, x_ld: ld, out_ld: ld });
        steps.push((spec, vec![at, 2, 4]));
        at = 4;
    }
    (steps, at)
}

#[test]
fn norm_and_rotation_of_heads_fuse_exactly() {
    let mut rng = Rng::new(62);
    let mut pairs = Vec::new();
    for (heads, dim) in [(1, 8), (3, 24), (2, 34), (2, 128), (5, 80)] {
        let (n, ld, angles_ld) = (1 + rng.below(9), heads * dim + 2, dim + 1);
        for way in norm_rotations(heads, dim, angles_ld) {
            let (Some(norm), Some(rotation)) = way else { continue };
            let rows = || empty_rows(n, RowFormat::f32(ld), heads * dim);
            let operands = vec![
                Operand::Floats(random(&mut rng, n, heads * dim, ld)),
                Operand::Floats(rng.floats(norm.width)),
                Operand::Floats(random(&mut rng, n, dim, angles_ld)),
                rows(),
                rows(),
            ];
            let (steps, at) = steps_of(heads, dim, ld, way);
            let spec =
                KernelSpec::Rope(Rope { heads, dim, norm: Some(norm), rotation, x_ld: ld, out_ld: ld });
            let args = if norm.weight { vec![0, 1, 2, at] } else { vec![0, 2, at] };
            pairs.push(Pair { operands, n, steps, fused: (spec, args), same: vec![at] });
        }
    }
    check_pairs(&pairs);
}

#[test]
fn norm_rotation_and_cache_write_fuse_exactly() {
    let mut rng = Rng::new(63);
    let mut pairs = Vec::new();
    for (i, (heads, dim)) in [(1, 8), (3, 24), (2, 34), (2, 128)].into_iter().enumerate() {
        let (ld, angles_ld, ctx, slots) = (heads * dim + 2, dim + 1, 72, 3);
        for (j, way) in norm_rotations(heads, dim, angles_ld).into_iter().enumerate() {
            let (norm, rotation) = way;
            let (cache, values, each) = (FORMATS[(i + j) % 3], j % 5 == 0, [1, heads][j % 2]);
            // A run of whole vectors, an interrupted run, single tokens, padding.
            let run = |first: i32, n: i32, slot| (first..first + n).map(move |p| (p, slot));
            let rows: Vec<(i32, i32)> = run(0, 32, 1)
                .chain(run(37, 9, 0))
                .chain([(-1, 0), (71, 2), (72, 2), (3, 2)])
                .chain(run(48, 16, 1))
                .collect();
            let n = rows.len();
            let (pos, slot) = rows.into_iter().unzip();
            let numbers = rng.floats(slots * heads * ctx * dim);
            let plain = || empty_rows(n, RowFormat::f32(ld), heads * dim);
            let operands = vec![
                Operand::Floats(random(&mut rng, n, heads * dim, ld)),
                Operand::Floats(rng.floats(norm.map_or(1, |n| n.width))),
                Operand::Floats(random(&mut rng, n, dim, angles_ld)),
                plain(),
                plain(),
                Operand::Cache(Cache { format: cache, rotated: 1, values, ctx, dim, numbers }),
                Operand::Ints(pos),
                Operand::Ints(slot),
            ];
            let (mut steps, at) = steps_of(heads, dim, ld, way);
            let write = |norm, rotation| {
                KernelSpec::CacheWrite(CacheWrite {
                    heads,
                    dim,
                    ctx,
                    ring: false,
                    cache,
                    rotated: 1,
                    values,
                    norm,
                    rotation,
                    each,
                    x_ld: ld,
                })
            };
            steps.push((write(None, None), vec![5, at, 6, 7]));
            let weight = norm.and_then(|n| n.weight.then_some(1));
            let args = [5, 0].into_iter().chain(weight).chain(rotation.map(|_| 2)).chain([6, 7]).collect();
            pairs.push(Pair { operands, n, steps, fused: (write(norm, rotation), args), same: vec![5] });
        }
    }
    check_pairs(&pairs);
}
