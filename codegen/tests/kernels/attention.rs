//! Attention: grouped heads, windows, sinks, latent values, padding rows, cache formats, splits.

use crate::cache::{Cache, FORMATS};
use crate::harness::{
    Case, Expect, Operand, Rng, can_multiply, check, check_on, is_assigned, random, run, strided,
};
use crate::machines::machines;
use moec_codegen::jit::Loaded;
use moec_codegen::spec::{Attention, AttentionMerge, CacheWrite};
use moec_codegen::{ComputeType, KernelSpec, compile};
use moec_ir::op::AttentionDesc;
use moec_ir::state::{rotated_channels, stores_rotated};
use moec_ir::types::Format;

/// Two kernels: operand `from` of the first is operand `to` of the second.
#[derive(Clone, Debug)]
struct Chain {
    first: Case,
    from: usize,
    then: Case,
    to: usize,
}

#[derive(Clone)]
struct Setting {
    desc: AttentionDesc,
    ctx: usize,
    cache: Format,
    /// Whether heads are stored rotated.
    rotates: bool,
    compute: ComputeType,
    /// Rows per work item.
    tile: usize,
    /// (position, slot) of each row.
    rows: Vec<(i32, i32)>,
}

impl Setting {
    /// Channels that are rotated together, of keys and of values.
    fn rotated(&self) -> [usize; 2] {
        let d = &self.desc;
        let block = |extents: &[usize]| if self.rotates { rotated_channels(extents) } else { 1 };
        if d.v_from_k { [block(&[d.qk_dim, d.v_dim]); 2] } else { [block(&[d.qk_dim]), block(&[d.v_dim])] }
    }
}

/// Inputs of attention, whichever way the cache is split.
struct Problem {
    s: Setting,
    q: Vec<f32>,
    keys: Cache,
    values: Option<Cache>,
    sinks: Option<Vec<f32>>,
}

impl Problem {
    fn new(rng: &mut Rng, s: Setting) -> Self {
        let (d, ctx, slots) = (&s.desc, s.ctx, 3);
        let q = random(rng, s.rows.len(), d.heads * d.qk_dim, d.heads * d.qk_dim + 2);
        // Values that no row attends to must not affect the result, even if they are NaN.
        let mut state = |values: bool, dim: usize| {
            let mut numbers = rng.floats(slots * d.kv_heads * ctx * dim);
            for (i, x) in numbers.iter_mut().enumerate() {
                let (key, slot) = (i / dim % ctx, (i / dim / ctx / d.kv_heads) as i32);
                // The last positions up to the row's own, as many as the cache has rows.
                let held = |pos: i32| (0..=pos).rev().take(ctx).any(|p| p as usize % ctx == key);
                if !s.rows.iter().any(|&(pos, s)| s == slot && held(pos)) {
                    *x = 1e30;
                }
            }
            Cache { format: s.cache, rotated: s.rotated()[usize::from(values)], values, ctx, dim, numbers }
        };
        let keys = state(false, d.qk_dim);
        let values = (!d.v_from_k).then(|| state(true, d.v_dim));
        let sinks = d.sinks.then(|| rng.floats(d.heads));
        Self { s, q, keys, values, sinks }
    }

    fn q_ld(&self) -> usize {
        self.s.desc.heads * self.s.desc.qk_dim + 2
    }

    /// Attention by its formula in f64 over the cache as stored, head by head; a row sees the tokens `[from,
    /// to)`.
    fn expected(&self) -> Vec<f32> {
        let (d, ctx) = (&self.s.desc, self.s.ctx);
        let keys = self.keys.rounded();
        let (values, v_ld) = match &self.values {
            Some(v) => (v.rounded(), d.v_dim),
            None => (keys.clone(), d.qk_dim),
        };
        let out_ld = d.heads * d.v_dim + 1;
        let mut expected = strided(self.s.rows.len(), d.heads * d.v_dim, out_ld, |_, _| 0.0);
        for (t, &(pos, slot)) in self.s.rows.iter().enumerate().filter(|(_, row)| row.0 >= 0) {
            for h in 0..d.heads {
                let base = (slot as usize * d.kv_heads + h / (d.heads / d.kv_heads)) * ctx;
                let first = match d.window {
                    Some(w) if d.chunked => pos as usize / w * w,
                    window => window.map_or(0, |w| (pos as usize + 1).saturating_sub(w)),
                };
                let query = &self.q[t * self.q_ld() + h * d.qk_dim..][..d.qk_dim];
                let scores: Vec<f64> = (first..=pos as usize)
                    .map(|p| {
                        let key = &keys[(base + p % ctx) * d.qk_dim..][..d.qk_dim];
                        let dot: f64 =
                            query.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                        dot * f64::from(d.scale)
                    })
                    .collect();
                let sink = self.sinks.as_ref().map(|s| f64::from(s[h]));
                let total: f64 = scores.iter().copied().chain(sink).map(f64::exp).sum();
                for c in 0..d.v_dim {
                    let value = |i: usize| f64::from(values[(base + (first + i) % ctx) * v_ld + c]);
                    let sum: f64 = scores.iter().enumerate().map(|(i, s)| s.exp() * value(i)).sum();
                    expected[t * out_ld + h * d.v_dim + c] = (sum / total) as f32;
                }
            }
        }
        expected
    }

    fn operands(&self, sinks: bool) -> Vec<Operand> {
        let mut operands = vec![Operand::Floats(self.q.clone()), Operand::Cache(self.keys.clone())];
        operands.extend(self.values.clone().map(Operand::Cache));
        operands.push(Operand::Ints(self.s.rows.iter().map(|r| r.0).collect()));
        operands.push(Operand::Ints(self.s.rows.iter().map(|r| r.1).collect()));
        operands.extend(self.sinks.clone().filter(|_| sinks).map(Operand::Floats));
        operands
    }

    fn spec(&self, splits: usize, out_ld: usize) -> KernelSpec {
        let rotated = self.s.rotated();
        let Setting { desc, ctx, cache, compute, tile, .. } = self.s.clone();
        KernelSpec::Attention(Attention {
            desc,
            cache,
            rotated,
            compute,
            ctx,
            rows: tile,
            splits,
            q_ld: self.q_ld(),
            out_ld,
        })
    }

    fn tolerance(&self) -> f32 {
        match self.s.compute {
            ComputeType::F32 => 1e-5,
            // Queries and weights have 8 bits; sums of their products have a smaller relative error.
            _ => 1.5e-2,
        }
    }

    /// A kernel over the whole cache.
    fn case(&self) -> Case {
        let d = &self.s.desc;
        let (n, out_ld) = (self.s.rows.len(), d.heads * d.v_dim + 1);
        let mut operands = self.operands(true);
        let at = operands.len();
        operands.push(Operand::Floats(strided(n, d.heads * d.v_dim, out_ld, |_, _| 3.0)));
        let expect = vec![(at, Expect::Floats(self.expected(), self.tolerance()))];
        Case { spec: self.spec(1, out_ld), n, operands, expect }
    }

    /// A kernel over parts of the cache, and the kernel that joins the parts.
    fn parts(&self, splits: usize) -> Chain {
        let d = &self.s.desc;
        let (n, out_ld) = (self.s.rows.len(), d.heads * d.v_dim + 1);
        let words = d.heads * splits * (d.v_dim + 2);
        let mut operands = self.operands(false);
        let from = operands.len();
        operands.push(Operand::Floats(vec![3.0; n * words]));
        let first = Case { spec: self.spec(splits, words), n, operands, expect: Vec::new() };
        let mut operands = vec![Operand::Floats(Vec::new())];
        operands.extend(self.sinks.clone().map(Operand::Floats));
        let at = operands.len();
        operands.push(Operand::Floats(strided(n, d.heads * d.v_dim, out_ld, |_, _| 3.0)));
        let (heads, v_dim, sinks) = (d.heads, d.v_dim, d.sinks);
        let spec = KernelSpec::AttentionMerge(AttentionMerge { heads, v_dim, splits, sinks, out_ld });
        let expect = vec![(at, Expect::Floats(self.expected(), self.tolerance()))];
        Chain { first, from, then: Case { spec, n, operands, expect }, to: 0 }
    }
}

fn desc(heads: usize, kv_heads: usize, qk_dim: usize, v_dim: usize) -> AttentionDesc {
    AttentionDesc {
        heads,
        kv_heads,
        qk_dim,
        v_dim,
        scale: 0.7,
        window: None,
        chunked: false,
        sinks: false,
        v_from_k: false,
    }
}

fn prefill(start: i32, len: i32) -> Vec<(i32, i32)> {
    (start..start + len).map(|p| (p, 1)).collect()
}

/// Cache formats with their compute types.
fn arithmetics() -> Vec<(Format, ComputeType)> {
    let exact = FORMATS.map(|f| (f, ComputeType::F32));
    let rounded = FORMATS.into_iter().filter(|f| *f != Format::F32).map(|f| (f, ComputeType::Bf16));
    exact.into_iter().chain(rounded).collect()
}

/// Like [`check`], for pairs of kernels.
fn check_chains(chains: &[Chain]) {
    let machines = machines();
    for machine in &machines {
        let isa = machine.isa();
        let mut then = Vec::new();
        let chains = (0..)
            .zip(chains)
            .filter(|(i, c)| is_assigned(&c.first.spec, *i, machine, &machines, can_multiply));
        for (_, chain) in chains {
            let case = &chain.first;
            let object =
                compile(machine, std::slice::from_ref(&case.spec), &()).unwrap_or_else(|e| panic!("{e}"));
            let loaded = Loaded::new(&object).unwrap_or_else(|e| panic!("{e}"));
            let kernel = loaded.kernel(&case.spec.symbol(&isa)).unwrap_or_else(|e| panic!("{e}"));
            let results = run(kernel, &isa, case, usize::MAX);
            assert_eq!(results, run(kernel, &isa, case, 1), "work split by 1: {:?} on {isa:?}", case.spec);
            let mut next = chain.then.clone();
            next.operands[chain.to] =
                Operand::Floats(results[chain.from].iter().map(|&w| f32::from_bits(w)).collect());
            then.push(next);
        }
        check_on(machine, &then);
    }
}

/// Writes random tokens at (position, slot) to a cache of other numbers. Positions outside of the context
/// change nothing; in a ring, positions wrap around.
fn written(
    rng: &mut Rng,
    ring: bool,
    [heads, dim, ctx, slots]: [usize; 4],
    (cache, values): (Format, bool),
    rows: &[(i32, i32)],
) -> Case {
    let (x_ld, n, each) = (heads * dim + 1, rows.len(), rng.pick(&[1, heads]));
    let x = random(rng, n, heads * dim, x_ld);
    let before = rng.floats(slots * heads * ctx * dim);
    let mut after = before.clone();
    let most = if ring { i32::MAX } else { ctx as i32 };
    for (r, &(pos, slot)) in rows.iter().enumerate().filter(|(_, r)| (0..most).contains(&r.0)) {
        for c in 0..heads * dim {
            let at = ((slot as usize * heads + c / dim) * ctx + pos as usize % ctx) * dim;
            after[at + c % dim] = x[r * x_ld + c];
        }
    }
    let rotated = if stores_rotated(cache) { rotated_channels(&[dim]) } else { 1 };
    let tensor = |numbers| Cache { format: cache, rotated, values, ctx, dim, numbers };
    let (pos, slot) = rows.iter().copied().unzip();
    Case {
        spec: CacheWrite {
            heads,
            dim,
            ctx,
            ring,
            cache,
            rotated,
            values,
            norm: None,
            rotation: None,
            each,
            x_ld,
        }
        .into(),
        n,
        operands: vec![
            Operand::Cache(tensor(before)),
            Operand::Floats(x),
            Operand::Ints(pos),
            Operand::Ints(slot),
        ],
        expect: vec![(0, Expect::Cache(tensor(after)))],
    }
}

#[test]
fn rows_outside_of_the_context_are_skipped() {
    let mut rng = Rng::new(17);
    let mut cases = Vec::new();
    for (i, dim) in [1, 5, 24, 32, 56, 80, 128, 131].into_iter().enumerate() {
        for cache in FORMATS {
            for values in [false, true] {
                let ctx = [5, 200][i % 2];
                let last = ctx as i32 - 1;
                let pos = [0, last, -1, last + 1, 2, 0, 3, 1, 4];
                let rows: Vec<_> = pos.into_iter().zip([0, 2, 1, 1, 1, 1, 1, 1, 0]).collect();
                cases.push(written(&mut rng, false, [2, dim, ctx, 3], (cache, values), &rows));
            }
        }
    }
    check(&cases);
}

#[test]
fn consecutive_tokens_are_stored_like_single_ones() {
    let mut rng = Rng::new(18);
    let mut cases = Vec::new();
    for (i, dim) in [1, 2, 7, 15, 32, 33, 63, 80, 131].into_iter().enumerate() {
        for cache in FORMATS {
            let ctx = [200, 72][i % 2];
            let run = |first: i32, n: i32, slot| (first..first + n).map(move |p| (p, slot));
            let last = ctx as i32;
            let rows: [Vec<(i32, i32)>; 5] = [
                run(0, 48, 1).collect(),
                // From the middle of a vector; then up to the end of the context and past it.
                run(5, 37, 0).collect(),
                run((last - 24) / 16 * 16, 40, 2).collect(),
                // Runs that are interrupted by another slot, by a gap, and by padding.
                run(16, 9, 1).chain(run(25, 7, 0)).chain(run(32, 16, 1)).chain(run(56, 16, 1)).collect(),
                run(32, 20, 1).chain([(-1, 0); 12]).collect(),
            ];
            for (rows, values) in rows.iter().flat_map(|rows| [(rows, false), (rows, true)]) {
                cases.push(written(&mut rng, false, [2, dim, ctx, 3], (cache, values), rows));
            }
        }
    }
    check(&cases);
}

#[test]
fn tokens_wrap_around_in_a_ring() {
    let mut rng = Rng::new(19);
    let mut cases = Vec::new();
    for dim in [1, 7, 32, 80] {
        for (cache, values) in FORMATS.into_iter().flat_map(|f| [(f, false), (f, true)]) {
            // Past the end of the ring, from the middle and from the start of a vector; single tokens;
            // padding.
            let runs = (1000..1060).map(|p| (p, 1)).chain((5 * 256 - 16..5 * 256 + 32).map(|p| (p, 2)));
            let rows: Vec<_> = runs.chain([(700, 0), (-1, 0), (256, 0), (3, 0)]).collect();
            cases.push(written(&mut rng, true, [2, dim, 256, 3], (cache, values), &rows));
        }
    }
    check(&cases);
}

#[test]
fn prefill_and_decode() {
    let mut rng = Rng::new(40);
    let mut cases = Vec::new();
    let heads = [(4, 4, 16, 16), (8, 2, 24, 17), (6, 1, 80, 56), (2, 2, 128, 144), (5, 5, 24, 80)];
    let arithmetics = arithmetics();
    for (i, (heads, kv, qk, v)) in heads.into_iter().enumerate() {
        for j in [0, 2] {
            let (cache, compute) = arithmetics[(i + j) % arithmetics.len()];
            let (ctx, tile) = ([48, 100, 300][(i + j) % 3], [16, 5, 48][i % 3]);
            let last = ctx as i32 - 1;
            let batch = vec![(40, 0), (0, 2), (-1, 1), (33, 2), (31, 1), (47, 1), (last, 1)];
            for (rows, tile) in [
                (prefill(0, 40), tile),
                (prefill(29, 7), tile),
                (prefill(last - 46, 47), tile),
                (vec![(0, 0)], tile),
                (batch.clone(), tile),
                (vec![(last, 2)], 1),
                (batch, 1),
            ] {
                let desc = desc(heads, kv, qk, v);
                cases.push(
                    Problem::new(
                        &mut rng,
                        Setting { desc, ctx, cache, rotates: stores_rotated(cache), compute, tile, rows },
                    )
                    .case(),
                );
            }
        }
    }
    check(&cases);
}

#[test]
fn windows_and_sinks() {
    let mut rng = Rng::new(41);
    let mut cases = Vec::new();
    let windows = [(Some(1), false), (Some(7), true), (Some(150), true), (Some(500), false), (None, true)];
    for ((window, sinks), (cache, compute)) in windows.into_iter().zip(arithmetics()) {
        for (rows, tile) in
            [(prefill(0, 170), 24), (prefill(160, 105), 24), (vec![(69, 0), (-3, 0), (2, 1), (269, 2)], 1)]
        {
            let desc = AttentionDesc { window, sinks, ..desc(8, 2, 32, 24) };
            cases.push(
                Problem::new(
                    &mut rng,
                    Setting { desc, ctx: 270, cache, rotates: stores_rotated(cache), compute, tile, rows },
                )
                .case(),
            );
        }
    }
    check(&cases);
}

#[test]
fn windows_wrap_around_in_a_ring() {
    let mut rng = Rng::new(45);
    let (mut cases, mut chains) = (Vec::new(), Vec::new());
    let windows = [(1, false), (7, true), (150, true), (196, false), (129, true)];
    for ((window, sinks), (cache, compute)) in windows.into_iter().zip(arithmetics().into_iter().cycle()) {
        let few = vec![(699, 0), (-3, 0), (2, 1), (511, 2)];
        let desc =
            AttentionDesc { window: Some(window), chunked: window % 3 == 0, sinks, ..desc(8, 2, 32, 24) };
        // Exactly as many cache rows as window and chunk need: 196 + 60 is 256.
        for (rows, tile) in
            [(prefill(500, 60), 24), (prefill(230, 60), 5), (prefill(0, 60), 24), (few.clone(), 1)]
        {
            let setting = Setting {
                desc: desc.clone(),
                ctx: 256,
                cache,
                rotates: stores_rotated(cache),
                compute,
                tile,
                rows,
            };
            cases.push(Problem::new(&mut rng, setting).case());
        }
        let setting =
            Setting { desc, ctx: 384, cache, rotates: stores_rotated(cache), compute, tile: 1, rows: few };
        chains.push(Problem::new(&mut rng, setting).parts(3));
    }
    check(&cases);
    check_chains(&chains);
}

#[test]
fn latent_values_are_part_of_the_keys() {
    let mut rng = Rng::new(42);
    let mut cases = Vec::new();
    let shapes = [(16, 576, 512), (3, 40, 32), (20, 24, 24), (5, 33, 31), (2, 64, 48)];
    for ((heads, qk, v), (cache, compute)) in shapes.into_iter().zip(arithmetics().into_iter().rev()) {
        for (rows, tile) in [(prefill(100, 20), 6), (vec![(133, 0), (5, 2)], 1)] {
            let desc = AttentionDesc { v_from_k: true, scale: 0.1, ..desc(heads, 1, qk, v) };
            cases.push(
                Problem::new(
                    &mut rng,
                    Setting { desc, ctx: 144, cache, rotates: stores_rotated(cache), compute, tile, rows },
                )
                .case(),
            );
        }
    }
    check(&cases);
}

#[test]
fn attention_over_splits_of_the_cache_equals_the_whole() {
    let mut rng = Rng::new(43);
    let mut chains = Vec::new();
    let heads = [(4, 4, None, false, false), (8, 2, Some(200), true, false), (4, 1, None, true, true)];
    let arithmetics = arithmetics();
    for (i, splits) in [2, 3, 16].into_iter().enumerate() {
        for (j, (heads, kv, window, sinks, v_from_k)) in heads.into_iter().enumerate() {
            let (cache, compute) = arithmetics[(i + 2 * j) % arithmetics.len()];
            let ctx = [900, 130, 700][i];
            let last = ctx as i32 - 1;
            let rows = vec![(last, 0), (0, 1), (-1, 0), (128, 2), (last / 2, 1)];
            let desc = AttentionDesc { window, sinks, v_from_k, ..desc(heads, kv, 40, 40) };
            let setting =
                Setting { desc, ctx, cache, rotates: stores_rotated(cache), compute, tile: 1 + i % 2, rows };
            chains.push(Problem::new(&mut rng, setting).parts(splits));
        }
    }
    check_chains(&chains);
}

#[test]
fn any_shape() {
    let mut rng = Rng::new(44);
    let mut cases = Vec::new();
    for _ in 0..16 {
        let kv = rng.pick(&[1, 2, 3]);
        let (cache, compute) = rng.pick(&arithmetics());
        let v_from_k = rng.below(4) == 0;
        let qk = 1 + rng.below(140);
        let v = if v_from_k { 1 + rng.below(qk) } else { 1 + rng.below(140) };
        let window = Some(1 + rng.below(300)).filter(|w| w % 3 == 0);
        let sinks = rng.below(3) == 0;
        let shared = 1 + rng.below(14);
        let desc = AttentionDesc { window, sinks, v_from_k, scale: 0.3, ..desc(kv * shared, kv, qk, v) };
        let (ctx, tile) = (1 + rng.below(400), 1 + rng.below(30));
        for _ in 0..3 {
            let start = rng.below(ctx) as i32;
            let rows = prefill(start, (ctx as i32 - start).min(1 + rng.below(60) as i32));
            let (desc, rotates) = (desc.clone(), rng.below(2) == 0);
            let setting = Setting { desc, ctx, cache, rotates, compute, tile, rows };
            cases.push(Problem::new(&mut rng, setting).case());
        }
    }
    check(&cases);
}
