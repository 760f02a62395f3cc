//! Random modules: graphs, weights, states.

use super::basics::{float, small, text};
use crate::common::router;
use moec_ir::op::{
    AttentionDesc, GroupScore, Groups, LimitCapacityDesc, LongSwitch, Renorm, Score, WeightFrom,
};
use moec_ir::{
    Activation, Coded, DType, Encoding, EntryKind, Format, Glu, Graph, Leaf, Module, Node, Op, Operand,
    Predictor, RopeStyle, RouterDesc, Scope, StateDecl, StateId, StateKind, Type, ValueId, Weight,
    WeightClass, WeightExpr, WeightId,
};
use proptest::prelude::*;

pub(super) fn activation() -> impl Strategy<Value = Activation> {
    prop::sample::select(Activation::ALL.to_vec())
}

pub(super) fn glu() -> impl Strategy<Value = Glu> {
    prop_oneof![
        activation().prop_map(Glu::Gated),
        activation().prop_map(Glu::Ungated),
        Just(Glu::DRelu),
        float().prop_map(|threshold| Glu::FatRelu { threshold }),
        float().prop_map(|threshold| Glu::Cats { threshold }),
        float().prop_map(|limit| Glu::Limited { limit }),
        (float(), float()).prop_map(|(alpha, limit)| Glu::Clamped { alpha, limit }),
    ]
}

pub(super) fn router_desc() -> impl Strategy<Value = RouterDesc> {
    let groups = (small(), small(), any::<[bool; 2]>()).prop_map(|(n, keep, [max, mask_neg_inf])| Groups {
        n,
        keep,
        score: if max { GroupScore::Max } else { GroupScore::Top2Sum },
        mask_neg_inf,
    });
    let score = prop::sample::select(vec![Score::Softmax, Score::Sigmoid, Score::Identity]);
    let from = prop_oneof![
        Just(WeightFrom::Score),
        Just(WeightFrom::SoftmaxTopk),
        Just(WeightFrom::SigmoidTopk),
        float().prop_map(|eps| WeightFrom::SparseMixer { eps }),
    ];
    let renorm = prop_oneof![
        Just(Renorm::None),
        float().prop_map(|eps| Renorm::Sum { eps }),
        float().prop_map(|min| Renorm::Clamp { min }),
    ];
    let ks = (small(), prop::option::of(small()));
    (ks, score, any::<bool>(), prop::option::of(groups), from, renorm, float()).prop_map(
        |((k, zero), score, select_bias, groups, weight_from, renorm, scale)| RouterDesc {
            zero,
            score,
            select_bias,
            groups,
            weight_from,
            renorm,
            scale,
            ..router(8, k)
        },
    )
}

pub(super) fn attention() -> impl Strategy<Value = AttentionDesc> {
    (small(), small(), small(), small(), float(), prop::option::of(small()), any::<[bool; 3]>()).prop_map(
        |(heads, kv_heads, qk_dim, v_dim, scale, window, [chunked, sinks, v_from_k])| AttentionDesc {
            heads,
            kv_heads,
            qk_dim,
            v_dim,
            scale,
            window,
            chunked,
            sinks,
            v_from_k,
        },
    )
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let plain = vec![
        Op::Embed,
        Op::CacheWrite,
        Op::Add,
        Op::Mul,
        Op::ScaleCols,
        Op::Softmax,
        Op::GatherRows,
        Op::Softplus,
    ];
    let switch = (small(), float()).prop_map(|(after, long_scale)| LongSwitch { after, long_scale });
    let style = prop::sample::select(vec![RopeStyle::Half, RopeStyle::Interleaved]);
    prop_oneof![
        prop::sample::select(plain),
        activation().prop_map(Op::Act),
        glu().prop_map(Op::Glu),
        (float(), small(), any::<bool>()).prop_map(|(eps, groups, weight)| Op::RmsNorm {
            eps,
            groups,
            weight
        }),
        float().prop_map(|eps| Op::LayerNorm { eps }),
        any::<bool>().prop_map(|bias| Op::Linear { bias }),
        (glu(), any::<bool>()).prop_map(|(glu, bias)| Op::LinearGlu { glu, bias }),
        (glu(), any::<bool>(), any::<bool>()).prop_map(|(glu, bias, fixed)| Op::ExpertFfn {
            glu,
            bias,
            fixed
        }),
        (
            glu(),
            prop::option::of(small()),
            any::<bool>(),
            prop::option::of(small()),
            prop::option::of(prop::sample::select(Predictor::ALL.to_vec()))
        )
            .prop_map(|(glu, paged, gates_on_disk, hot, predict)| Op::NeuronFfn {
                glu,
                paged,
                gates_on_disk,
                hot,
                predict
            }),
        any::<bool>().prop_map(|partial| Op::Combine { partial }),
        (proptest::collection::vec(any::<u32>(), 0..5), any::<bool>())
            .prop_map(|(capacities, spill)| Op::LimitCapacity(LimitCapacityDesc { capacities, spill })),
        small().prop_map(|heads| Op::HeadLinear { heads }),
        small().prop_map(|heads| Op::Concat { heads }),
        (small(), any::<bool>()).prop_map(|(experts, partial)| Op::Dispatch { experts, partial }),
        (small(), small()).prop_map(|(experts, zero)| Op::ZeroExperts { experts, zero }),
        (small(), small()).prop_map(|(layer, scores)| Op::RequestExperts { layer, scores }),
        (small(), small(), small()).prop_map(|(heads, start, len)| Op::Slice { heads, start, len }),
        (float(), prop::option::of(switch)).prop_map(|(scale, switch)| Op::RopeAngles { scale, switch }),
        (small(), small(), style).prop_map(|(heads, offset, style)| Op::Rope { heads, offset, style }),
        attention().prop_map(Op::Attention),
        (prop::option::of(activation()), any::<bool>()).prop_map(|(act, bias)| Op::CausalConv { act, bias }),
        (small(), small()).prop_map(|(key_heads, heads)| Op::DeltaRule { key_heads, heads }),
        (small(), small()).prop_map(|(groups, heads)| Op::Ssd { groups, heads }),
        Just(Op::SelectiveScan),
        router_desc().prop_map(Op::Router),
        float().prop_map(|factor| Op::Scale { factor }),
        (float(), float()).prop_map(|(lo, hi)| Op::Clamp { lo, hi }),
        (float(), small(), small()).prop_map(|(beta, every, offset)| Op::ScaleByPosition {
            beta,
            every,
            offset
        }),
    ]
}

pub(super) fn ty() -> impl Strategy<Value = Type> {
    (any::<bool>(), prop::collection::vec(small(), 0..4))
        .prop_map(|(f, shape)| Type { dtype: if f { DType::F32 } else { DType::I32 }, shape })
}

pub(super) fn kind() -> impl Strategy<Value = EntryKind> {
    let kinds: [fn(u32) -> EntryKind; 3] = [EntryKind::Prefill, EntryKind::Decode, EntryKind::Little];
    (prop::sample::select(kinds.to_vec()), any::<u32>()).prop_map(|(kind, n)| kind(n))
}

/// Scopes of the parts that the compiler knows and of others, in layers and outside of them.
pub(super) fn scope() -> impl Strategy<Value = Scope> {
    let part = prop_oneof!["", "attn", "ffn", "head", "layers", "[A-Za-z_][A-Za-z0-9_]{0,8}"];
    (prop::option::of(any::<u32>()), part).prop_map(|(layer, part)| {
        let part = part.parse::<Scope>().unwrap().part;
        Scope { layer, part }
    })
}

/// A random graph over this many weights and states. For the text form, only the numbers of values and the
/// declared names must be valid.
pub(super) fn graph(weights: u32, states: u32) -> impl Strategy<Value = Graph> {
    let operand = prop_oneof![
        3 => (0..50_u32).prop_map(|v| Operand::Value(ValueId(v))),
        1 => (0..weights).prop_map(|w| Operand::Weight(WeightId(w))),
        1 => (0..states).prop_map(|s| Operand::State(StateId(s))),
    ];
    let node = (op(), prop::collection::vec(operand, 1..4), prop::collection::vec(ty(), 1..3), scope());
    (kind(), any::<u32>(), prop::collection::vec(ty(), 4), prop::collection::vec(node, 0..8)).prop_map(
        |(kind, output, mut values, list)| {
            let mut nodes = Vec::new();
            for (op, inputs, results, scope) in list {
                let outputs =
                    (values.len()..values.len() + results.len()).map(|v| ValueId(v as u32)).collect();
                values.extend(results);
                nodes.push(Node { op, inputs, outputs, scope });
            }
            Graph { kind, values, nodes, output: ValueId(output) }
        },
    )
}

pub(super) fn state_kind() -> impl Strategy<Value = StateKind> {
    prop_oneof![
        Just(StateKind::Cache),
        any::<u32>().prop_map(|window| StateKind::Ring { window }),
        Just(StateKind::Recurrent),
        Just(StateKind::Convolution),
    ]
}

/// A plain leaf, or codes with some of their optional tensors.
pub(super) fn encoded_leaf() -> impl Strategy<Value = WeightExpr> {
    let further = || prop::option::of(text());
    let rest = (text(), any::<u32>(), [small(), small()], text(), [further(), further(), further()]);
    let coded = rest.prop_map(|(layout, bits, block, scales, [zeros, factor, groups])| {
        Encoding::Coded(Box::new(Coded { layout, bits, block, scales, zeros, factor, groups }))
    });
    (text(), prop_oneof![Just(Encoding::Plain), coded])
        .prop_map(|(tensor, encoding)| WeightExpr::Leaf(Leaf { tensor, shape: vec![2, 3], encoding }))
}

pub(super) fn module() -> impl Strategy<Value = Module> {
    let names = |n| prop::collection::hash_set(text(), n);
    let class = prop::sample::select(WeightClass::ALL.to_vec());
    let format = prop::sample::select(Format::ALL.to_vec());
    let weights = names(1..4).prop_flat_map(move |names| {
        let n = names.len();
        let rest = prop::collection::vec(
            (class.clone(), format.clone(), prop::collection::vec(small(), 0..4), encoded_leaf()),
            n,
        );
        (Just(names), rest)
    });
    let states = (names(1..4), prop::collection::vec((ty(), state_kind()), 4));
    (weights, states).prop_flat_map(|((names, rest), (states, types))| {
        let weights: Vec<Weight> = names
            .into_iter()
            .zip(rest)
            .map(|(name, (class, format, shape, expr))| Weight { name, shape, class, format, expr })
            .collect();
        let states: Vec<StateDecl> =
            states.into_iter().zip(types).map(|(name, (ty, kind))| StateDecl { name, ty, kind }).collect();
        let graphs = prop::collection::vec(graph(weights.len() as u32, states.len() as u32), 0..3);
        graphs.prop_map(move |entries| Module { weights: weights.clone(), states: states.clone(), entries })
    })
}
