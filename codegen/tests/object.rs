//! Tests of symbols, object files and intermediate code.
#![allow(clippy::unwrap_used, clippy::panic)] // this is a test, though not all of it a test function

use moec_codegen::jit::Loaded;
#[cfg(feature = "llvm22")]
use moec_codegen::llvm_ir;
use moec_codegen::machine::FEATURES;
use moec_codegen::spec::{
    Attention, AttentionMerge, CacheWrite, Combine, CopyColumns, Embed, ExpertDown, ExpertGateUp, GatherRows,
    Linear, Map, Norm, Quantise, Rope, Router, Softmax, ZeroExperts,
};
use moec_codegen::table::{TABLE, table};
use moec_codegen::{
    ByteDot, ComputeType, Error, Isa, KernelSpec, Machine, MapOp, NormKind, Objects, Rotation, RowFormat,
    RowNorm, Schedule, WeightOrder, assembly, compile, packed_words,
};
use moec_ir::op::{
    Activation, AttentionDesc, DispatchLayout, Glu, GroupScore, Groups, Renorm, RopeStyle, RouterDesc, Score,
    WeightFrom,
};
use moec_ir::types::Format;
use object::{
    Architecture, BinaryFormat, Object as _, ObjectKind, ObjectSection as _, ObjectSymbol as _, SectionKind,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

fn norm_to(outs: Vec<RowFormat>) -> KernelSpec {
    let kind = NormKind::Rms;
    KernelSpec::Norm(Norm { kind, width: 24, groups: 1, x_ld: 24, outs, eps: 1e-6, weight: true })
}

fn norm() -> KernelSpec {
    norm_to(vec![RowFormat::f32(24)])
}

fn linear(k: usize, n: usize, format: Format, glu: Option<Glu>) -> KernelSpec {
    let compute = ComputeType::F32;
    KernelSpec::Linear(Linear {
        k,
        n,
        format,
        compute,
        groups: 1,
        x_ld: k,
        out_ld: n,
        bias: false,
        residual_ld: None,
        glu,
        schedule: Schedule::default(),
    })
}

/// Kernels with bf16 or int8 products, which only some machines have.
fn small_products() -> Vec<KernelSpec> {
    let mut all = Vec::new();
    for (format, compute) in [
        (Format::Bf16, ComputeType::Bf16),
        (Format::Q8, ComputeType::Bf16),
        (Format::Q4, ComputeType::Bf16),
        (Format::Q8, ComputeType::I8),
        (Format::Q4, ComputeType::I8),
        (Format::Q4o, ComputeType::I8),
    ] {
        let layout = DispatchLayout { rows: 8, k: 2, experts: 4 };
        let (hidden, inter, bias, glu) = (40, 16, false, Glu::Gated(Activation::Silu));
        let x_ld = packed_words(hidden, compute);
        let (groups, out_ld, residual_ld) = (1, 48, None);
        all.extend([
            KernelSpec::Linear(Linear {
                k: hidden,
                n: 48,
                format,
                compute,
                groups,
                x_ld,
                out_ld,
                bias,
                residual_ld,
                glu: None,
                schedule: Schedule::default(),
            }),
            KernelSpec::ExpertGateUp(ExpertGateUp {
                layout,
                hidden,
                inter,
                format,
                compute,
                x_ld,
                glu,
                bias,
                out: RowFormat::f32(inter),
                order: WeightOrder::Panels,
                schedule: Schedule::default(),
            }),
            KernelSpec::ExpertDown(ExpertDown {
                layout,
                inter,
                hidden,
                format,
                compute,
                h_ld: packed_words(inter, compute),
                bias,
                order: WeightOrder::Panels,
                schedule: Schedule::default(),
            }),
        ]);
    }
    let quantise =
        |to| KernelSpec::Quantise(Quantise { cols: 40, groups: 1, per_row: 1, x_ld: 40, out_ld: 40, to });
    all.extend([ComputeType::Bf16, ComputeType::I8].map(quantise));
    all
}

/// Whether a machine has the compute type of a kernel.
fn multiplies(machine: &Machine, spec: &KernelSpec) -> bool {
    let isa = machine.isa();
    let able = |compute: &ComputeType| match compute {
        ComputeType::F32 => true,
        ComputeType::Bf16 => isa.bf16,
        ComputeType::I8 => isa.bytes != ByteDot::None,
    };
    match spec {
        KernelSpec::Norm(Norm { outs, .. }) => outs.iter().all(|out| able(&out.compute)),
        KernelSpec::ExpertGateUp(ExpertGateUp { compute, out, .. }) => able(compute) && able(&out.compute),
        KernelSpec::Linear(Linear { compute, .. })
        | KernelSpec::ExpertDown(ExpertDown { compute, .. })
        | KernelSpec::Quantise(Quantise { to: compute, .. }) => able(compute),
        _ => true,
    }
}

fn router() -> RouterDesc {
    RouterDesc {
        experts: 16,
        zero: None,
        k: 2,
        score: Score::Softmax,
        select_bias: false,
        groups: None,
        weight_from: WeightFrom::Score,
        renorm: Renorm::None,
        scale: 1.0,
    }
}

fn attention() -> AttentionDesc {
    AttentionDesc {
        heads: 4,
        kv_heads: 2,
        qk_dim: 16,
        v_dim: 16,
        scale: 0.25,
        window: None,
        chunked: false,
        sinks: false,
        v_from_k: false,
    }
}

/// One kernel of every kind, and many that differ in one parameter only.
fn specs() -> Vec<KernelSpec> {
    let layout = DispatchLayout { rows: 8, k: 2, experts: 4 };
    let silu = Glu::Gated(Activation::Silu);
    let (hidden, inter, format, compute) = (24, 16, Format::Bf16, ComputeType::F32);
    let map = |op| KernelSpec::Map(Map { op, cols: 24, a_ld: 24, out_ld: 24 });
    let route = |desc| KernelSpec::Router(Router { desc, logits_ld: 16 });
    let arithmetic = |desc, cache, compute, rows, splits| {
        let out_ld = if splits > 1 { 4 * splits * 18 } else { 64 };
        let rotated = [1; 2];
        KernelSpec::Attention(Attention {
            desc,
            cache,
            rotated,
            compute,
            ctx: 32,
            rows,
            splits,
            q_ld: 64,
            out_ld,
        })
    };
    let attend = |desc| arithmetic(desc, Format::Bf16, ComputeType::F32, 4, 1);
    let heads_norm = |width, weight| Some(RowNorm { width, eps: 1e-6, weight });
    let rotation = |style, offset, rotary| Rotation { rotary, offset, style, angles_ld: 24 };
    let writes = |cache, values, norm, rotation, each| {
        KernelSpec::CacheWrite(CacheWrite {
            heads: 2,
            dim: 16,
            ctx: 32,
            ring: false,
            cache,
            rotated: 1,
            values,
            norm,
            rotation,
            each,
            x_ld: 32,
        })
    };
    let write = |cache, values| writes(cache, values, None, None, 2);
    let normed_rope = |style, offset, rotary, norm| {
        let rotation = rotation(style, offset, rotary);
        KernelSpec::Rope(Rope { heads: 2, dim: 24, norm, rotation, x_ld: 48, out_ld: 48 })
    };
    let rope = |style, offset, rotary| normed_rope(style, offset, rotary, None);
    let bf16_rows = RowFormat { compute: ComputeType::Bf16, ld: 12 };
    let group = |score, mask_neg_inf| Some(Groups { n: 4, keep: 2, score, mask_neg_inf });
    let mut all = vec![
        KernelSpec::Embed(Embed { vocab: 7, hidden, format, panels: false, out_ld: 24 }),
        KernelSpec::Embed(Embed { vocab: 72, hidden, format, panels: false, out_ld: 24 }),
        KernelSpec::Embed(Embed { vocab: 72, hidden, format, panels: true, out_ld: 24 }),
        norm(),
        norm_to(vec![bf16_rows]),
        norm_to(vec![RowFormat::f32(24), bf16_rows]),
        rope(RopeStyle::Half, 0, 24),
        rope(RopeStyle::Interleaved, 0, 24),
        rope(RopeStyle::Half, 2, 22),
        write(Format::F32, true),
        write(Format::Bf16, true),
        write(Format::Q8, false),
        writes(Format::Bf16, false, None, None, 1),
        writes(Format::Bf16, false, heads_norm(16, true), None, 2),
        writes(Format::Bf16, false, heads_norm(32, true), None, 2),
        writes(Format::Bf16, false, heads_norm(16, false), None, 2),
        writes(Format::Bf16, false, None, Some(rotation(RopeStyle::Half, 0, 16)), 2),
        writes(Format::Bf16, false, heads_norm(16, true), Some(rotation(RopeStyle::Half, 0, 16)), 2),
        normed_rope(RopeStyle::Half, 0, 24, heads_norm(24, true)),
        normed_rope(RopeStyle::Half, 0, 24, heads_norm(48, true)),
        attend(attention()),
        attend(AttentionDesc { window: Some(4), ..attention() }),
        attend(AttentionDesc { window: Some(4), chunked: true, ..attention() }),
        attend(AttentionDesc { sinks: true, ..attention() }),
        attend(AttentionDesc { v_from_k: true, ..attention() }),
        attend(AttentionDesc { scale: 0.5, ..attention() }),
        arithmetic(attention(), Format::F32, ComputeType::F32, 4, 1),
        arithmetic(attention(), Format::Q8, ComputeType::F32, 4, 1),
        arithmetic(attention(), Format::Bf16, ComputeType::F32, 5, 1),
        arithmetic(attention(), Format::Bf16, ComputeType::F32, 1, 2),
        KernelSpec::AttentionMerge(AttentionMerge {
            heads: 4,
            v_dim: 16,
            splits: 2,
            sinks: false,
            out_ld: 64,
        }),
        KernelSpec::AttentionMerge(AttentionMerge {
            heads: 4,
            v_dim: 16,
            splits: 2,
            sinks: true,
            out_ld: 64,
        }),
        route(router()),
        route(RouterDesc { score: Score::Sigmoid, ..router() }),
        route(RouterDesc { score: Score::Identity, ..router() }),
        route(RouterDesc { select_bias: true, ..router() }),
        route(RouterDesc { groups: group(GroupScore::Max, false), ..router() }),
        route(RouterDesc { groups: group(GroupScore::Top2Sum, false), ..router() }),
        route(RouterDesc { groups: group(GroupScore::Top2Sum, true), ..router() }),
        route(RouterDesc { weight_from: WeightFrom::SoftmaxTopk, ..router() }),
        route(RouterDesc { weight_from: WeightFrom::SigmoidTopk, ..router() }),
        route(RouterDesc { weight_from: WeightFrom::SparseMixer { eps: 0.01 }, ..router() }),
        route(RouterDesc { weight_from: WeightFrom::SparseMixer { eps: 0.1 }, ..router() }),
        route(RouterDesc { renorm: Renorm::Sum { eps: 1e-20 }, ..router() }),
        route(RouterDesc { renorm: Renorm::Sum { eps: 0.0 }, ..router() }),
        route(RouterDesc { renorm: Renorm::Clamp { min: 1e-20 }, ..router() }),
        route(RouterDesc { scale: 2.5, ..router() }),
        KernelSpec::ExpertGateUp(ExpertGateUp {
            layout,
            hidden,
            inter,
            format,
            compute,
            x_ld: 24,
            glu: silu,
            bias: false,
            out: RowFormat::f32(inter),
            order: WeightOrder::Panels,
            schedule: Schedule::default(),
        }),
        KernelSpec::ExpertGateUp(ExpertGateUp {
            layout,
            hidden,
            inter,
            format,
            compute,
            x_ld: 24,
            glu: silu,
            bias: false,
            out: bf16_rows,
            order: WeightOrder::Panels,
            schedule: Schedule::default(),
        }),
        KernelSpec::ExpertGateUp(ExpertGateUp {
            layout,
            hidden,
            inter,
            format,
            compute,
            x_ld: 24,
            glu: silu,
            bias: true,
            out: RowFormat::f32(inter),
            order: WeightOrder::Panels,
            schedule: Schedule::default(),
        }),
        KernelSpec::ExpertDown(ExpertDown {
            layout,
            inter,
            hidden,
            format,
            compute,
            h_ld: inter,
            bias: false,
            order: WeightOrder::Panels,
            schedule: Schedule::default(),
        }),
        KernelSpec::ExpertDown(ExpertDown {
            layout,
            inter,
            hidden,
            format,
            compute,
            h_ld: inter,
            bias: true,
            order: WeightOrder::Panels,
            schedule: Schedule::default(),
        }),
        KernelSpec::Combine(Combine { layout, hidden, out_ld: 24, residual_ld: None, partial: true }),
        KernelSpec::Combine(Combine { layout, hidden, out_ld: 24, residual_ld: Some(24), partial: false }),
        KernelSpec::CopyColumns(CopyColumns {
            groups: 2,
            cols: 8,
            in_group: 12,
            out_group: 8,
            in_ld: 24,
            out_ld: 24,
        }),
        KernelSpec::Softmax(Softmax { cols: 24, x_ld: 24, out_ld: 24 }),
        KernelSpec::GatherRows(GatherRows { cols: 24, x_ld: 24, out_ld: 24 }),
        KernelSpec::ZeroExperts(ZeroExperts { experts: 8, zero: 4, k: 3 }),
        KernelSpec::ZeroExperts(ZeroExperts { experts: 8, zero: 5, k: 3 }),
        KernelSpec::ZeroExperts(ZeroExperts { experts: 9, zero: 4, k: 3 }),
        KernelSpec::ZeroExperts(ZeroExperts { experts: 8, zero: 4, k: 2 }),
    ];
    let glus = [
        Glu::DRelu,
        Glu::FatRelu { threshold: 0.01 },
        Glu::FatRelu { threshold: 0.1 },
        Glu::Cats { threshold: 0.01 },
        Glu::Cats { threshold: 0.1 },
        Glu::Limited { limit: 0.1 },
        Glu::Clamped { alpha: 1.702, limit: 7.0 },
        Glu::Clamped { alpha: 1.702, limit: -7.0 },
        Glu::Clamped { alpha: 17.02, limit: 7.0 },
    ];
    let glus = Activation::ALL.into_iter().map(Glu::Gated).chain(glus);
    for glu in glus {
        all.push(linear(24, 48, Format::F32, Some(glu)));
        all.push(map(MapOp::Glu { glu, b_ld: 24 }));
    }
    for format in Format::ALL {
        all.push(linear(24, 48, format, None));
    }
    let maps = [
        MapOp::Add { b_ld: 24, broadcast_b: false },
        MapOp::Add { b_ld: 24, broadcast_b: true },
        MapOp::Mul { b_ld: 24, broadcast_b: false },
        MapOp::Mul { b_ld: 25, broadcast_b: false },
        MapOp::ScaleCols,
        MapOp::Scale { factor: 1.0 },
        MapOp::Scale { factor: 10.0 },
        MapOp::Clamp { lo: -1.0, hi: 1.0 },
        MapOp::ScaleByPosition { beta: 0.1, every: 8, offset: 0 },
        MapOp::ScaleByPosition { beta: 0.1, every: 8, offset: 1 },
        MapOp::ScaleByPosition { beta: 0.1, every: 9, offset: 0 },
        MapOp::ScaleByPosition { beta: 0.2, every: 8, offset: 0 },
        MapOp::Clamp { lo: 1.0, hi: 1.0 },
    ];
    all.extend(maps.map(map));
    all.extend(Activation::ALL.map(|act| map(MapOp::Act(act))));
    all.extend(small_products());
    all
}

#[test]
fn different_kernels_have_different_symbols() {
    let isa = Machine::x86_64_level(3).isa();
    let mut seen = BTreeMap::new();
    for spec in specs() {
        let symbol = spec.symbol(&isa);
        assert!(symbol.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'), "{symbol}");
        assert_eq!(symbol, spec.clone().symbol(&isa));
        if let Some(other) = seen.insert(symbol, spec.clone()) {
            panic!("{spec:?} and {other:?} share a symbol");
        }
    }
}

#[test]
fn machines_have_their_vector_widths() {
    let lanes = |m: Machine| m.isa().lanes;
    assert_eq!(lanes(Machine::x86_64_level(1)), 4);
    assert_eq!(lanes(Machine::x86_64_level(3)), 8);
    assert_eq!(lanes(Machine::x86_64_level(4)), 16);
    let bytes = ByteDot::Sdot;
    assert_eq!(
        aarch64().isa(),
        Isa { lanes: 4, nr: 8, mr: 8, bf16: false, bytes, tiles: false, permutes: false }
    );
    let host = Machine::host().unwrap();
    assert!(host.features.iter().all(|f| FEATURES.iter().any(|(llvm, _)| llvm == f)), "{host:?}");
}

/// Machines with two-row instructions use them for several rows, and one-row instructions for one row.
#[test]
fn neon_multiplies_two_rows_at_a_time() {
    let features = ["dotprod", "i8mm", "bf16"].map(str::to_owned).to_vec();
    let machine = Machine { features, ..aarch64() };
    for spec in small_products() {
        let text = assembly(&machine, &spec).unwrap();
        let (two, one) = match spec.compute() {
            Some(ComputeType::Bf16) => ("bfmmla", "bfdot"),
            Some(ComputeType::I8) => ("smmla", "sdot"),
            _ => continue,
        };
        assert!(
            text.contains(two) && text.contains(one),
            "no {two} and {one} in {}",
            spec.symbol(&machine.isa())
        );
    }
    // Without the two-row instruction, rows are multiplied one at a time.
    let bytes = small_products().into_iter().find(|s| s.compute() == Some(ComputeType::I8)).unwrap();
    assert!(!assembly(&aarch64(), &bytes).unwrap().contains("smmla"));
}

fn aarch64() -> Machine {
    Machine {
        triple: "aarch64-unknown-linux-gnu".to_string(),
        cpu: "neoverse-v2".to_string(),
        features: vec!["dotprod".to_string()],
    }
}

/// Every machine of the device files: the x86-64 levels, Xeon with AMX, two Arm CPUs, an Apple CPU.
fn all_machines() -> Vec<Machine> {
    let machine = |triple: &str, cpu: &str, features: &[&str]| Machine {
        triple: triple.to_string(),
        cpu: cpu.to_string(),
        features: features.iter().map(|f| (*f).to_string()).collect(),
    };
    let v4 = Machine::x86_64_level(4).all_features();
    let mut amx: Vec<&str> = v4.iter().map(String::as_str).collect();
    amx.extend(["avx512vnni", "avx512bf16", "avx512fp16", "avxvnni", "amx-tile", "amx-bf16", "amx-int8"]);
    let arm = ["neon", "fullfp16", "dotprod", "i8mm", "bf16", "lse"];
    let mut all: Vec<Machine> = [1, 2, 3, 4].map(Machine::x86_64_level).into();
    all.extend([
        machine("x86_64-unknown-linux-gnu", "sapphirerapids", &amx),
        aarch64(),
        machine("aarch64-unknown-linux-gnu", "neoverse-v2", &arm),
        machine("aarch64-unknown-linux-gnu", "cortex-x4", &arm),
        machine("arm64-apple-macosx14.0.0", "apple-m2", &arm),
    ]);
    all
}

/// Undefined symbols of an object, and the functions that it defines, in order.
fn symbols(machine: &Machine, bytes: &[u8]) -> (BTreeSet<String>, Vec<String>) {
    let file = object::File::parse(bytes).unwrap();
    let apple = machine.triple.contains("apple");
    assert_eq!(file.format(), if apple { BinaryFormat::MachO } else { BinaryFormat::Elf });
    let arm = !machine.triple.starts_with("x86_64");
    assert_eq!(file.architecture(), if arm { Architecture::Aarch64 } else { Architecture::X86_64 });
    assert!(file.is_64() && file.is_little_endian() && file.kind() == ObjectKind::Relocatable);
    // Apple's linker requires an underscore before C names.
    let name = |s: &object::Symbol<'_, '_>| {
        let name = s.name().unwrap();
        if apple { name.strip_prefix('_').unwrap().to_string() } else { name.to_string() }
    };
    let (mut undefined, mut defined) = (BTreeSet::new(), Vec::new());
    for symbol in file.symbols().filter(object::ObjectSymbol::is_global) {
        if symbol.is_undefined() {
            undefined.insert(name(&symbol));
        } else {
            // Functions and relocations must be inside an executable section.
            let section = file.section_by_index(symbol.section_index().unwrap()).unwrap();
            assert_eq!(section.kind(), SectionKind::Text);
            assert!((section.address()..section.address() + section.size()).contains(&symbol.address()));
            assert!(section.relocations().all(|(at, _)| at < section.size()));
            defined.push((symbol.address(), name(&symbol)));
        }
    }
    defined.sort();
    (undefined, defined.into_iter().map(|(_, name)| name).collect())
}

#[test]
fn objects_are_self_contained_and_their_symbols_sorted() {
    let mut all = specs();
    all.reverse();
    // A plain run tests every second machine.
    for machine in moec_testing::every_nth(2, all_machines()) {
        let all: Vec<KernelSpec> = all.iter().filter(|s| multiplies(&machine, s)).cloned().collect();
        let (undefined, defined) = symbols(&machine, &compile(&machine, &all, &()).unwrap());
        let allowed = ["memcpy", "memmove", "memset", "bzero"];
        assert!(undefined.iter().all(|s| allowed.contains(&s.as_str())), "{undefined:?} on {machine:?}");
        let mut want: Vec<String> = all.iter().map(|s| s.symbol(&machine.isa())).collect();
        want.sort();
        assert_eq!(defined, want);
    }
}

/// Object files by their source.
type Sources = BTreeMap<Vec<u8>, Vec<u8>>;

/// Object files by their source, and the number of hits.
#[derive(Default)]
struct ObjectCache(Mutex<(Sources, usize)>);

impl Objects for ObjectCache {
    fn get(&self, source: &[u8]) -> Option<Vec<u8>> {
        let (objects, found) = &mut *self.0.lock().unwrap();
        let object = objects.get(source).cloned();
        *found += usize::from(object.is_some());
        object
    }

    fn keep(&self, source: &[u8], object: &[u8]) {
        self.0.lock().unwrap().0.insert(source.to_vec(), object.to_vec());
    }
}

#[test]
fn cached_object_serves_only_the_same_kernel_and_machine() {
    let kept = ObjectCache::default();
    let (machine, kernels) = (Machine::x86_64_level(3), [norm(), linear(24, 33, Format::Bf16, None)]);
    let first = compile(&machine, &kernels, &kept).unwrap();
    assert!(first == compile(&machine, &kernels, &kept).unwrap());
    assert_eq!(kept.0.lock().unwrap().1, 2);
    for (machine, kernels) in [(machine, &kernels[..1]), (Machine::x86_64_level(4), &kernels[..])] {
        assert!(first != compile(&machine, kernels, &kept).unwrap());
    }
    let (objects, found) = &*kept.0.lock().unwrap();
    assert_eq!((objects.len(), *found), (4, 3), "each kernel is kept by itself");
}

#[test]
fn object_without_kernels_has_no_symbols() {
    let machine = Machine::x86_64_level(3);
    let (undefined, defined) = symbols(&machine, &compile(&machine, &[], &()).unwrap());
    assert!(undefined.is_empty() && defined.is_empty(), "{undefined:?} {defined:?}");
}

#[test]
fn the_same_kernels_give_the_same_bytes() {
    let machine = Machine::x86_64_level(3);
    let mut kernels = vec![norm(), linear(24, 33, Format::Bf16, None), norm()];
    let first = compile(&machine, &kernels, &()).unwrap();
    kernels.reverse();
    assert!(first == compile(&machine, &kernels, &()).unwrap());
}

#[test]
fn contradictory_kernel_specs_are_refused_by_name() {
    let machine = Machine::x86_64_level(3);
    let attend = |desc, cache| {
        let (compute, rows, splits, rotated) = (ComputeType::F32, 4, 1, [1; 2]);
        let (ctx, q_ld, out_ld) = (8, 64, 64);
        KernelSpec::Attention(Attention { desc, cache, rotated, compute, ctx, rows, splits, q_ld, out_ld })
    };
    let cached = |cache, norm, each| {
        let (heads, dim, ctx, ring, values, rotation, x_ld) = (2, 16, 32, false, false, None, 32);
        KernelSpec::CacheWrite(CacheWrite {
            heads,
            dim,
            ctx,
            ring,
            cache,
            rotated: 1,
            values,
            norm,
            rotation,
            each,
            x_ld,
        })
    };
    let gate_up = |out| {
        KernelSpec::ExpertGateUp(ExpertGateUp {
            layout: DispatchLayout { rows: 4, k: 2, experts: 3 },
            hidden: 24,
            inter: 24,
            format: Format::F32,
            compute: ComputeType::F32,
            x_ld: 24,
            glu: Glu::DRelu,
            bias: false,
            out,
            order: WeightOrder::Panels,
            schedule: Schedule::default(),
        })
    };
    let bad = [
        linear(24, 33, Format::F32, Some(Glu::DRelu)),
        KernelSpec::Softmax(Softmax { cols: 9, x_ld: 8, out_ld: 9 }),
        KernelSpec::Router(Router { desc: RouterDesc { k: 17, ..router() }, logits_ld: 16 }),
        attend(AttentionDesc { kv_heads: 3, ..attention() }, Format::Bf16),
        attend(AttentionDesc { scale: -0.25, ..attention() }, Format::Bf16),
        attend(attention(), Format::F16),
        cached(Format::Q3, None, 2),
        cached(Format::F32, None, 3),
        cached(Format::F32, Some(RowNorm { width: 8, eps: 1e-6, weight: true }), 2),
        gate_up(RowFormat { compute: ComputeType::Bf16, ld: 11 }),
        gate_up(RowFormat { compute: ComputeType::I8, ld: 24 }),
    ];
    for spec in bad {
        assert!(
            matches!(compile(&machine, std::slice::from_ref(&spec), &()), Err(Error::Spec { .. })),
            "{spec:?}"
        );
    }
    let mips = Machine { triple: "mips-unknown-linux-gnu".to_string(), ..machine };
    assert!(matches!(compile(&mips, &[norm()], &()), Err(Error::Target { .. })));
}

#[test]
fn objects_for_other_machines_are_refused() {
    let load = |bytes: &[u8]| Loaded::new(bytes).and_then(|l| l.kernel("moec_nothing").map(|_| ()));
    assert!(matches!(load(b"no object"), Err(Error::Load(_))));
    assert!(matches!(load(&compile(&aarch64(), &[norm()], &()).unwrap()), Err(Error::Load(_))));
    let own = compile(&Machine::x86_64_level(1), &[norm()], &()).unwrap();
    assert!(matches!(load(&own), Err(Error::Load(_))));
}

// The text depends on LLVM's version; these snapshots are of LLVM 22.
#[cfg(feature = "llvm22")]
#[test]
fn intermediate_code_of_a_norm() {
    insta::assert_snapshot!(llvm_ir(&Machine::x86_64_level(3), &norm(), false).unwrap());
}

#[cfg(feature = "llvm22")]
#[test]
fn intermediate_code_of_a_linear_layer() {
    let text = llvm_ir(&Machine::x86_64_level(3), &linear(6, 16, Format::Bf16, None), false).unwrap();
    // The end of the function: the loop over rows that are multiplied one at a time.
    let loops =
        text.match_indices("\nloop").filter(|(at, _)| text[at + 1..].find(':') < text[at + 1..].find('\n'));
    let (start, _) = loops.collect::<Vec<_>>().into_iter().rev().nth(1).unwrap();
    insta::assert_snapshot!(text[start..].split("\n}").next().unwrap());
}

#[test]
fn a_table_names_kernels_and_holds_the_plan() {
    let arm = Machine {
        triple: "aarch64-unknown-linux-gnu".to_owned(),
        cpu: "neoverse-v2".to_owned(),
        features: vec![],
    };
    for machine in [Machine::x86_64_level(3), arm] {
        // A kernel that a plan names twice is declared once.
        let write = || table(&machine, &["first", "second", "first"], b"the plan").unwrap();
        let bytes = write();
        assert!(bytes == write(), "two tables of one plan differ");
        let file = object::File::parse(&*bytes).unwrap();
        assert_eq!((file.format(), file.kind()), (BinaryFormat::Elf, ObjectKind::Relocatable));
        assert!(file.symbols().any(|s| s.name() == Ok(TABLE) && s.is_definition() && s.is_global()));
        let undefined =
            file.symbols().filter(object::ObjectSymbol::is_undefined).filter_map(|s| s.name().ok());
        assert_eq!(
            undefined.filter(|n| !n.is_empty()).collect::<BTreeSet<_>>(),
            BTreeSet::from(["first", "second"])
        );
        let holds = |d: &[u8]| d.windows(8).any(|w| w == b"the plan");
        assert!(file.sections().any(|s| s.data().is_ok_and(holds)));
    }
}
