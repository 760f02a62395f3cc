//! Kernels of a model of the size of OLMoE and Qwen3-30B-A3B, decoding and reading a prompt.

use moec_codegen::gpu::Kernel;
use moec_codegen::spec::{
    Attention, AttentionMerge, CacheWrite, CausalConv, Combine, DeltaRule, Embed, ExpertDown, ExpertGateUp,
    Linear, Map, Norm, Rope, Router, SelectiveScan, Softmax,
};
use moec_codegen::{
    ComputeType, KernelSpec, MapOp, NormKind, Rotation, RowFormat, RowNorm, Schedule, WeightOrder,
    packed_words,
};
use moec_ir::op::{
    Activation, AttentionDesc, DispatchLayout, Glu, GroupScore, Groups, Renorm, RopeStyle, RouterDesc, Score,
    WeightFrom,
};
use moec_ir::types::Format;

const HIDDEN: usize = 2048;
const WIDE: usize = 4096;

/// A name for people, and the kernel.
pub(crate) fn kernels() -> Vec<(String, Kernel)> {
    let mut all: Vec<(String, KernelSpec)> = Vec::new();
    all.push(("norm".to_owned(), norm(RowFormat::f32(HIDDEN))));
    all.push(("norm to bf16".to_owned(), norm(RowFormat { compute: ComputeType::Bf16, ld: HIDDEN / 2 })));
    let glu = MapOp::Glu { glu: Glu::Gated(Activation::Silu), b_ld: HIDDEN };
    all.push((
        "map glu".to_owned(),
        KernelSpec::Map(Map { op: glu, cols: HIDDEN, a_ld: HIDDEN, out_ld: HIDDEN }),
    ));
    for (format, compute) in [
        (Format::F32, ComputeType::F32),
        (Format::Bf16, ComputeType::F32),
        (Format::F16, ComputeType::F32),
        (Format::Q8, ComputeType::F32),
        (Format::Q4, ComputeType::F32),
        (Format::Q8, ComputeType::I8),
        (Format::Q4, ComputeType::I8),
        (Format::Bf16, ComputeType::Bf16),
        (Format::F16, ComputeType::Bf16),
        (Format::Q8, ComputeType::Bf16),
        (Format::Q4, ComputeType::Bf16),
    ] {
        for rows in [1, 4, 8, 64] {
            if rows > 8 && compute == ComputeType::I8 {
                continue;
            }
            let name = format!("linear {} by {}, {rows} rows", format.name(), compute.name());
            all.push((name, linear(format, compute, rows, None)));
        }
    }
    let silu = Some(Glu::Gated(Activation::Silu));
    all.push(("linear gated q4, 1 row".to_owned(), linear(Format::Q4, ComputeType::F32, 1, silu)));
    all.push(("linear gated q4, 64 rows".to_owned(), linear(Format::Q4, ComputeType::Bf16, 64, silu)));
    experts(&mut all);
    others(&mut all);
    mixers(&mut all);
    let mut all: Vec<(String, Kernel)> = all.into_iter().map(|(name, spec)| (name, spec.into())).collect();
    let layout = DispatchLayout { rows: 512, k: 8, experts: 128 };
    all.push(("dispatch".to_owned(), Kernel::Dispatch(layout)));
    all.push(("angles".to_owned(), Kernel::Angles { half: 64, scale: 1.0 }));
    all.push(("argmax".to_owned(), Kernel::Argmax { cols: 151_936, x_ld: 151_936 }));
    all
}

/// Experts of Qwen3-30B-A3B: eight of 128 for a token, 768 neurons.
fn experts(all: &mut Vec<(String, KernelSpec)>) {
    const INTER: usize = 768;
    let (order, glu) = (WeightOrder::Panels, Glu::Gated(Activation::Silu));
    let forms = [
        (Format::Bf16, ComputeType::F32, 1),
        (Format::Q4, ComputeType::F32, 1),
        (Format::Q8, ComputeType::I8, 1),
        (Format::Q4, ComputeType::F32, 64),
        (Format::Bf16, ComputeType::Bf16, 64),
        (Format::Q4, ComputeType::Bf16, 64),
    ];
    for (format, compute, rows) in forms {
        let layout = DispatchLayout { rows: 512, k: 8, experts: 128 };
        let schedule = Schedule { rows, ..Schedule::default() };
        let (x_ld, h_ld) = (packed_words(HIDDEN, compute), packed_words(INTER, compute));
        let out = if compute == ComputeType::Bf16 {
            RowFormat { compute, ld: h_ld }
        } else {
            RowFormat::f32(INTER)
        };
        let (hidden, inter, bias) = (HIDDEN, INTER, false);
        let name =
            |half: &str| format!("experts {half} {} by {}, {rows} rows", format.name(), compute.name());
        let up = KernelSpec::ExpertGateUp(ExpertGateUp {
            layout,
            hidden,
            inter,
            format,
            compute,
            x_ld,
            glu,
            bias,
            out,
            order,
            schedule,
        });
        all.push((name("up"), up));
        let down = KernelSpec::ExpertDown(ExpertDown {
            layout,
            inter,
            hidden,
            format,
            compute,
            h_ld,
            bias,
            order,
            schedule,
        });
        all.push((name("down"), down));
    }
    let layout = DispatchLayout { rows: 512, k: 8, experts: 128 };
    let combine = KernelSpec::Combine(Combine {
        layout,
        hidden: HIDDEN,
        out_ld: HIDDEN,
        residual_ld: Some(HIDDEN),
        partial: true,
    });
    all.push(("combine".to_owned(), combine));
}

fn others(all: &mut Vec<(String, KernelSpec)>) {
    let desc = |heads, kv_heads, qk_dim, v_dim, v_from_k| AttentionDesc {
        heads,
        kv_heads,
        qk_dim,
        v_dim,
        scale: 0.1,
        window: None,
        chunked: false,
        sinks: false,
        v_from_k,
    };
    let gqa = desc(32, 4, 128, 128, false);
    let windowed = AttentionDesc { window: Some(128), sinks: true, ..desc(64, 8, 64, 64, false) };
    let latent = desc(16, 1, 576, 512, true);
    let named = [
        ("grouped", gqa.clone(), Format::Bf16, 1),
        ("grouped, 16 parts", gqa, Format::Bf16, 16),
        ("window and sinks", windowed, Format::F32, 1),
        ("latent", latent, Format::Bf16, 1),
        ("wide heads", desc(8, 2, 256, 256, false), Format::Bf16, 1),
    ];
    for (name, desc, cache, splits) in named {
        let (q_ld, out_ld) = (desc.heads * desc.qk_dim, desc.heads * splits * (desc.v_dim + 2));
        let (compute, ctx, rows) = (ComputeType::F32, 4096, 1);
        let rotated = [1; 2];
        let spec = KernelSpec::Attention(Attention {
            desc,
            cache,
            rotated,
            compute,
            ctx,
            rows,
            splits,
            q_ld,
            out_ld,
        });
        all.push((format!("attention {name}"), spec));
    }
    let merge = KernelSpec::AttentionMerge(AttentionMerge {
        heads: 32,
        v_dim: 128,
        splits: 16,
        sinks: true,
        out_ld: WIDE,
    });
    all.push(("attention merge".to_owned(), merge));
    let norm = Some(RowNorm { width: 128, eps: 1e-6, weight: true });
    let rotation = Rotation { rotary: 128, offset: 0, style: RopeStyle::Half, angles_ld: 128 };
    let rope = KernelSpec::Rope(Rope { heads: 32, dim: 128, norm, rotation, x_ld: WIDE, out_ld: WIDE });
    all.push(("rope".to_owned(), rope));
    let keys = KernelSpec::CacheWrite(CacheWrite {
        heads: 4,
        dim: 128,
        ctx: 4096,
        ring: false,
        cache: Format::Bf16,
        rotated: 1,
        values: false,
        norm,
        rotation: Some(rotation),
        each: 4,
        x_ld: 512,
    });
    all.push(("cache write".to_owned(), keys));
    for (name, groups, score) in [
        ("router", None, Score::Softmax),
        (
            "router of groups",
            Some(Groups { n: 8, keep: 4, score: GroupScore::Top2Sum, mask_neg_inf: true }),
            Score::Sigmoid,
        ),
    ] {
        let desc = RouterDesc {
            experts: 256,
            zero: None,
            k: 8,
            score,
            select_bias: groups.is_some(),
            groups,
            weight_from: WeightFrom::Score,
            renorm: Renorm::Sum { eps: 0.0 },
            scale: 2.5,
        };
        all.push((name.to_owned(), KernelSpec::Router(Router { desc, logits_ld: 256 })));
    }
    let (vocab, format) = (151_936, Format::Q4);
    let embed = KernelSpec::Embed(Embed { vocab, hidden: HIDDEN, format, panels: false, out_ld: HIDDEN });
    all.push(("embed q4".to_owned(), embed));
    all.push(("softmax".to_owned(), KernelSpec::Softmax(Softmax { cols: 256, x_ld: 256, out_ld: 256 })));
}

/// Mixers of Qwen3-Next, Kimi Linear, Nemotron 3 Nano and Jamba.
fn mixers(all: &mut Vec<(String, KernelSpec)>) {
    for rows in [1, 512] {
        let (channels, act) = (8192, Some(Activation::Silu));
        let conv = CausalConv { rows, channels, taps: 4, act, bias: false, x_ld: channels, out_ld: channels };
        all.push((format!("convolution, {rows} in a call"), conv.into()));
        let rule = DeltaRule {
            rows,
            key_heads: 16,
            heads: 32,
            key: 128,
            value: 128,
            corrects: true,
            by_channel: false,
            chunked: false,
            ld: [2048, 2048, 4096, 32, 32],
            out_ld: 4096,
        };
        let by_channel =
            DeltaRule { key_heads: 32, by_channel: true, ld: [4096, 4096, 4096, 4096, 32], ..rule.clone() };
        let ssd = DeltaRule {
            key_heads: 8,
            heads: 64,
            value: 64,
            corrects: false,
            ld: [1024, 1024, 4096, 64, 64],
            ..rule.clone()
        };
        let scan = SelectiveScan { rows, channels, state: 16, ld: [16, 16, 8192, 8192], out_ld: channels };
        let named: [(&str, KernelSpec); 4] = [
            ("delta rule, a decay per head", rule.into()),
            ("delta rule, a decay per channel", by_channel.into()),
            ("state space", ssd.into()),
            ("selective scan", scan.into()),
        ];
        all.extend(named.map(|(name, spec)| (format!("{name}, {rows} in a call"), spec)));
    }
}

fn norm(out: RowFormat) -> KernelSpec {
    KernelSpec::Norm(Norm {
        kind: NormKind::Rms,
        width: HIDDEN,
        groups: 1,
        x_ld: HIDDEN,
        outs: vec![out],
        eps: 1e-5,
        weight: true,
    })
}

fn linear(format: Format, compute: ComputeType, rows: usize, glu: Option<Glu>) -> KernelSpec {
    KernelSpec::Linear(Linear {
        k: HIDDEN,
        n: WIDE,
        format,
        compute,
        groups: 1,
        x_ld: packed_words(HIDDEN, compute),
        out_ld: WIDE,
        bias: false,
        residual_ld: None,
        glu,
        schedule: Schedule { rows, ..Schedule::default() },
    })
}
