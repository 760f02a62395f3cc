//! The text forms: printed, parsed back, equal; and no text makes the parser panic.

use crate::common::{leaf, model, router, weight};
use crate::plans::plan;
use moec_ir::eval::{self, Tensor};
use moec_ir::op::{AdmitDesc, AttentionDesc, GroupScore, Groups, LongSwitch, Renorm, Score, WeightFrom};
use moec_ir::plan::*;
use moec_ir::scope::AnyLayer;
use moec_ir::text::{parse_expr, parse_module, parse_placement, parse_plan};
use moec_ir::{
    Activation, Coded, DType, Encoding, EntryKind, Format, Glu, Graph, Leaf, Module, Node, Op, Operand,
    Predictor, RopeStyle, RouterDesc, Scope, StateDecl, StateId, StateKind, Type, ValueId, Weight,
    WeightClass, WeightExpr, WeightId,
};
use proptest::prelude::*;

#[test]
fn the_form_is_readable() {
    insta::assert_snapshot!("module", model());
    insta::assert_snapshot!("plan", plan());
}

#[test]
fn examples_round_trip() {
    let m = model();
    assert_eq!(parse_module(&m.to_string()).unwrap(), m);
    let p = plan();
    assert_eq!(parse_plan(&p.to_string()).unwrap(), p);
    // Operators that update states, and weights that are joined and put through functions; fuzzing begins with it, too.
    let recurrent = parse_module(include_str!("../../../fuzz/seeds/graph/recurrent")).unwrap();
    moec_ir::verify::module(&recurrent).unwrap();
    assert_eq!(parse_module(&recurrent.to_string()).unwrap(), recurrent);
}

#[test]
fn errors_have_a_place() {
    let error = |text: &str| parse_module(text).unwrap_err().to_string();
    assert_eq!(error("weight @a: f31[2]"), "1:12: expected a number format, found `f31`");
    assert_eq!(error("; é\n  entri"), "2:3: expected `weight`, `state` or `entry`, found `entri`");
    assert_eq!(error("weight @a"), "1:10: expected `:`, found the end of the text");
    assert_eq!(error("state $\"a\\q\""), "1:11: expected one of \\n \\t \\\" \\\\ \\u{…}");
    let entry =
        "state $s: f32[1]\nentry decode[1] -> %4 {\n inputs %0: i32[1], %1: i32[1], %2: i32[1], %3: i32[1]\n";
    let error = |line: &str| error(&format!("{entry}{line}\n}}"));
    assert_eq!(error("%4: f32[1] = add @x"), "4:18: no weight \"x\" is declared above");
    assert_eq!(error("%4: f32[1] = sub %0"), "4:14: expected an operator, found `sub`");
    assert_eq!(error("%4: f32[1] = add %0 {x = 1}"), "4:22: `x` is unknown or comes twice");
    assert_eq!(error("%4: f32[1] = scale %0 {factor = nan}"), "4:24: expected a number for `factor`");
    assert_eq!(error("%4: f32[1] = scale %0"), "5:1: expected the attribute `factor`");
    assert_eq!(error("%400: f32[1] = add %0"), "4:1: %400 leaves a gap in the numbers of the values");
    assert_eq!(error("%3: f32[1] = add %0"), "4:1: %3 is defined twice");
    for scope in
        ["layers.x.attn", "layers.03.attn", "layers.4294967296.attn", "layers.3.", "a.b", "layers.*.a"]
    {
        let expected = format!("4:7: expected a scope, `PART` or `layers.LAYER.PART`, found {scope:?}");
        assert_eq!(error(&format!("scope {scope:?} %4: f32[1] = add %0")), expected);
    }
}

#[test]
fn deep_nesting_is_an_error() {
    let deep = "transpose(".repeat(100_000);
    assert!(parse_expr(&deep).unwrap_err().message.contains("deeply"));
    let entry = "entry decode[1] -> %4 { inputs %0: i32[1], %1: i32[1], %2: i32[1], %3: i32[1] %4: f32[1] = add %0 {a = ";
    for nest in ["[", "b(a = "] {
        let text = format!("{entry}{}", nest.repeat(100_000));
        assert!(parse_module(&text).unwrap_err().message.contains("deeply"));
    }
}

fn list<S: Strategy>(of: S, n: std::ops::Range<usize>) -> impl Strategy<Value = Vec<S::Value>> {
    prop::collection::vec(of, n)
}

fn float() -> impl Strategy<Value = f32> {
    prop::num::f32::ANY.prop_filter("NaN has no text", |x| !x.is_nan())
}

fn small() -> impl Strategy<Value = usize> {
    prop_oneof![0..100_usize, any::<usize>()]
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z_][a-z0-9_.]{0,8}", "\\PC{0,6}", any::<String>()]
}

fn activation() -> impl Strategy<Value = Activation> {
    prop::sample::select(Activation::ALL.to_vec())
}

fn glu() -> impl Strategy<Value = Glu> {
    prop_oneof![
        activation().prop_map(Glu::Gated),
        Just(Glu::DRelu),
        float().prop_map(|threshold| Glu::FatRelu { threshold }),
        float().prop_map(|threshold| Glu::Cats { threshold }),
        (float(), float()).prop_map(|(alpha, limit)| Glu::Clamped { alpha, limit }),
    ]
}

fn router_desc() -> impl Strategy<Value = RouterDesc> {
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
    (small(), score, any::<bool>(), prop::option::of(groups), from, renorm, float()).prop_map(
        |(k, score, select_bias, groups, weight_from, renorm, scale)| RouterDesc {
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

fn attention() -> impl Strategy<Value = AttentionDesc> {
    (small(), small(), small(), small(), float(), prop::option::of(small()), any::<[bool; 2]>()).prop_map(
        |(heads, kv_heads, qk_dim, v_dim, scale, window, [sinks, v_from_k])| AttentionDesc {
            heads,
            kv_heads,
            qk_dim,
            v_dim,
            scale,
            window,
            sinks,
            v_from_k,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let plain = vec![
        Op::Embed,
        Op::CacheWrite,
        Op::Add,
        Op::Mul,
        Op::ScaleCols,
        Op::Softmax,
        Op::GatherRows,
        Op::ToNchw,
        Op::FromNchw,
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
        (glu(), prop::option::of(small()), prop::option::of(prop::sample::select(Predictor::ALL.to_vec())))
            .prop_map(|(glu, paged, predict)| Op::NeuronFfn { glu, paged, predict }),
        any::<bool>().prop_map(|partial| Op::Combine { partial }),
        (proptest::collection::vec(any::<u32>(), 0..5), any::<bool>())
            .prop_map(|(capacities, spill)| Op::Admit(AdmitDesc { capacities, spill })),
        small().prop_map(|heads| Op::HeadLinear { heads }),
        (small(), any::<bool>()).prop_map(|(groups, bias)| Op::Conv1x1 { groups, bias }),
        small().prop_map(|heads| Op::Concat { heads }),
        (small(), any::<bool>()).prop_map(|(experts, partial)| Op::Dispatch { experts, partial }),
        (small(), small()).prop_map(|(layer, scores)| Op::Fetch { layer, scores }),
        (small(), small(), small()).prop_map(|(heads, start, len)| Op::Slice { heads, start, len }),
        (float(), prop::option::of(switch)).prop_map(|(scale, switch)| Op::RopeAngles { scale, switch }),
        (small(), small(), style).prop_map(|(heads, offset, style)| Op::Rope { heads, offset, style }),
        attention().prop_map(Op::Attention),
        (prop::option::of(activation()), any::<bool>()).prop_map(|(act, bias)| Op::CausalConv { act, bias }),
        (small(), small()).prop_map(|(key_heads, heads)| Op::DeltaRule { key_heads, heads }),
        router_desc().prop_map(Op::Router),
        float().prop_map(|factor| Op::Scale { factor }),
        (float(), float()).prop_map(|(lo, hi)| Op::Clamp { lo, hi }),
    ]
}

fn ty() -> impl Strategy<Value = Type> {
    (any::<bool>(), prop::collection::vec(small(), 0..4))
        .prop_map(|(f, shape)| Type { dtype: if f { DType::F32 } else { DType::I32 }, shape })
}

fn kind() -> impl Strategy<Value = EntryKind> {
    let kinds: [fn(u32) -> EntryKind; 3] = [EntryKind::Prefill, EntryKind::Decode, EntryKind::Little];
    (prop::sample::select(kinds.to_vec()), any::<u32>()).prop_map(|(kind, n)| kind(n))
}

/// Scopes of parts that the compiler has and of others, in layers and outside of them.
fn scope() -> impl Strategy<Value = Scope> {
    let part = prop_oneof!["", "attn", "ffn", "head", "layers", "[A-Za-z_][A-Za-z0-9_]{0,8}"];
    (prop::option::of(any::<u32>()), part).prop_map(|(layer, part)| {
        let part = part.parse::<Scope>().unwrap().part;
        Scope { layer, part }
    })
}

/// A graph that refers to the given numbers of weights and states. Only the numbering of values and the
/// declared names need to be right for the text.
fn graph(weights: u32, states: u32) -> impl Strategy<Value = Graph> {
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

fn state_kind() -> impl Strategy<Value = StateKind> {
    prop_oneof![
        Just(StateKind::Cache),
        any::<u32>().prop_map(|window| StateKind::Ring { window }),
        Just(StateKind::Recurrent),
        Just(StateKind::Convolution),
    ]
}

/// A plain leaf, or codes with some of what they may have.
fn encoded_leaf() -> impl Strategy<Value = WeightExpr> {
    let further = || prop::option::of(text());
    let rest = (text(), any::<u32>(), [small(), small()], text(), [further(), further(), further()]);
    let coded = rest.prop_map(|(layout, bits, block, scales, [zeros, factor, groups])| {
        Encoding::Coded(Box::new(Coded { layout, bits, block, scales, zeros, factor, groups }))
    });
    (text(), prop_oneof![Just(Encoding::Plain), coded])
        .prop_map(|(tensor, encoding)| WeightExpr::Leaf(Leaf { tensor, shape: vec![2, 3], encoding }))
}

fn module() -> impl Strategy<Value = Module> {
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

fn layout() -> impl Strategy<Value = Layout> {
    (0..7, any::<u32>()).prop_map(|(which, nr)| match which {
        0 => Layout::Rows,
        1 => Layout::Panels { nr },
        2 => Layout::GluPanels { nr },
        5 => Layout::Gates,
        6 => Layout::Rests,
        sketch => Layout::Neurons { sketch: sketch == 4 },
    })
}

fn code() -> impl Strategy<Value = Code> {
    prop_oneof![
        any::<u32>().prop_map(Code::Kernel),
        any::<(u32, u32, Option<(u32, u32)>)>()
            .prop_map(|(half, scale, long)| Code::Builtin(Builtin::RopeAngles { half, scale, long })),
        any::<([u32; 3], bool, Option<(u32, u32)>)>().prop_map(
            |([rows, k, experts], partial, candidates)| {
                let candidates = candidates.map(|(layer, units)| Candidates { layer, units });
                Code::Builtin(Builtin::Dispatch { rows, k, experts, partial, candidates })
            }
        ),
        (
            any::<u32>(),
            prop_oneof![
                Just(Span::Rows),
                Just(Span::Whole),
                any::<[u32; 3]>().prop_map(|[rows, k, experts]| Span::Slots { rows, k, experts }),
            ]
        )
            .prop_map(|(words, span)| Code::Builtin(Builtin::Copy { words, span })),
        any::<(u32, u32, u32, [u32; 4])>()
            .prop_map(|(layer, rows, k, strides)| Code::Builtin(Builtin::Fetch { layer, rows, k, strides })),
        any::<[u32; 3]>().prop_map(|[layer, rows, k]| Code::Builtin(Builtin::Wake { layer, rows, k })),
        any::<[u32; 3]>().prop_map(|[set, k, channels]| Code::Builtin(Builtin::Admit { set, k, channels })),
        any::<u32>().prop_map(|part| Code::Builtin(Builtin::Part { part })),
        any::<u32>().prop_map(|kernel| Code::Builtin(Builtin::Launch { kernel })),
        any::<(u32, u32, u32)>().prop_map(|(set, rows, k)| Code::Builtin(Builtin::Streams { set, rows, k })),
        any::<[u32; 4]>().prop_map(|[set, rows, k, hidden]| Code::Builtin(Builtin::Experts {
            set,
            rows,
            k,
            hidden
        })),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let arg = prop_oneof![
        any::<(u32, u32)>().prop_map(|(b, o)| Arg::Buffer(b, o)),
        any::<u32>().prop_map(|b| Arg::Buffer(b, 0)),
        any::<u32>().prop_map(Arg::Segment),
        any::<u32>().prop_map(Arg::Matrices),
        any::<u32>().prop_map(Arg::State),
    ];
    let grid = prop_oneof![
        Just(Grid::One),
        any::<(u32, u32)>().prop_map(|(rows, tiles)| Grid::Tiles { rows, tiles }),
        any::<(u32, u32)>().prop_map(|(table, tiles)| Grid::Experts { table, tiles }),
    ];
    let deps = prop::collection::vec(any::<u32>(), 0..4);
    (code(), prop::collection::vec(arg, 0..4), grid, deps, any::<(u32, bool, bool, u32)>()).prop_map(
        |(code, args, grid, deps, (unit, outputs, barrier, node))| Step {
            unit,
            code,
            args,
            rows: if outputs { RowSpace::Outputs } else { RowSpace::Tokens },
            grid,
            barrier,
            deps,
            node,
        },
    )
}

fn entry() -> impl Strategy<Value = Entry> {
    let buffer = (text(), any::<(u32, u64, u64, bool, u32, u32)>()).prop_map(
        |(name, (memory, offset, bytes, f, rows, stride))| {
            let dtype = if f { DType::F32 } else { DType::I32 };
            Buffer { name, memory, offset, bytes, dtype, rows, stride }
        },
    );
    let place =
        prop::option::of(any::<[u32; 3]>().prop_map(|[buffer, column, cols]| Place { buffer, column, cols }));
    (kind(), any::<(u32, u32)>(), list(buffer, 0..4), list(place, 0..4), list(step(), 0..4)).prop_map(
        |(kind, (out_rows, logits), buffers, places, steps)| Entry {
            kind,
            out_rows,
            buffers,
            logits,
            places,
            steps,
        },
    )
}

/// Units, memories and links.
fn units() -> impl Strategy<Value = (Vec<UnitRef>, Vec<Memory>, Vec<MemoryLink>)> {
    let unit =
        (text(), text(), any::<u32>()).prop_map(|(name, family, memory)| UnitRef { name, family, memory });
    let resident = any::<(u32, Vec<u32>)>().prop_map(|(segment, matrices)| Resident { segment, matrices });
    let memory = (text(), any::<(Option<u64>, u64)>(), list(resident, 0..3)).prop_map(
        |(name, (capacity, arena_bytes), residents)| Memory { name, capacity, arena_bytes, residents },
    );
    let link = any::<(u32, u32)>().prop_map(|(from, to)| MemoryLink { from, to });
    (list(unit, 0..3), list(memory, 0..3), list(link, 0..3))
}

fn random_placement() -> impl Strategy<Value = Placement> {
    let number = || -1e3_f32..1e9;
    let row = (any::<[u32; 3]>(), any::<[Option<u32>; 2]>(), prop::option::of(number()), any::<bool>())
        .prop_map(|([capacity, group, unit], [tier, fallback], load, few)| ExpertRow {
            capacity,
            group,
            unit,
            tier,
            fallback,
            load,
            few,
        });
    let group = (any::<([u32; 2], u64, [Vec<u32>; 2])>(), list(number(), 0..3), text()).prop_map(
        |(([tier, unit], bytes, [experts, sizes]), cost_us, why)| ExpertGroup {
            tier,
            unit,
            experts,
            sizes,
            bytes,
            cost_us,
            why,
        },
    );
    let expected = (number(), number(), number()).prop_map(|(imbalance, overflow, padding)| Expected {
        imbalance,
        overflow,
        padding,
    });
    let table =
        (any::<(u32, u32, Vec<u32>)>(), prop::option::of(expected), list(group, 0..3), list(row, 0..3))
            .prop_map(|((layer, k, tiers), expected, groups, experts)| ExpertTable {
                layer,
                k,
                tiers,
                expected,
                groups,
                experts,
            });
    let op =
        (any::<(u32, u32, u32)>(), scope(), text(), text()).prop_map(|((n, unit, nodes), scope, op, why)| {
            let scope = scope.any_layer();
            OpPlace { entry: EntryKind::Prefill(n), scope, op, unit, nodes, why }
        });
    let overflow = prop::sample::select(Overflow::ALL.to_vec());
    (any::<u32>(), overflow, list(text(), 0..3), list(op, 0..3), list(table, 0..3))
        .prop_map(|(chunk, overflow, units, ops, experts)| Placement { chunk, overflow, units, ops, experts })
}

fn random_paging() -> impl Strategy<Value = Paging> {
    let score = prop::sample::select(Score::ALL.to_vec());
    let layer =
        (0..4_u32, any::<[u32; 4]>(), score).prop_map(|(experts, [layer, k, gate_up, down], score)| {
            PagedLayer { layer, experts, k, gate_up, down, score }
        });
    let layers = prop::collection::vec(layer, 0..4);
    let pinned = prop::collection::vec(any::<(u32, u32)>(), 0..3);
    (any::<[u64; 4]>(), any::<[u32; 5]>(), text(), pinned, layers).prop_map(
        |(bytes, [a, b, c, d, block_bytes], policy, pinned, layers)| {
            let matrices: u32 = layers.iter().map(|l| 2 * l.experts).sum();
            let [budget, resident, process, frame_bytes] = bytes;
            let (threads, frames, spare) = (a, b, c);
            let checksums = (0..matrices).map(|i| i.wrapping_mul(d)).collect();
            let uses = (0..if d % 2 == 0 { 0 } else { matrices / 2 }).map(|i| i.wrapping_mul(d)).collect();
            Paging {
                budget,
                threads,
                resident,
                process,
                frame_bytes,
                frames,
                spare,
                block_bytes,
                policy,
                pinned,
                neurons: d % 3,
                layers,
                checksums,
                uses,
            }
        },
    )
}

fn random_plan() -> impl Strategy<Value = Plan> {
    let segment = (text(), any::<(u32, u64, u64, u64)>(), list(any::<u32>(), 0..4), layout()).prop_map(
        |(name, (file, offset, bytes, pitch), shape, layout)| Segment {
            name,
            file,
            offset,
            bytes,
            pitch,
            shape,
            format: Format::F16,
            layout,
        },
    );
    let file = (text(), any::<(u64, [u8; 32])>()).prop_map(|(path, (bytes, sha256))| FileRef {
        path,
        bytes,
        sha256,
    });
    let order = prop_oneof![
        Just(CacheOrder::Rows),
        any::<u32>().prop_map(|nr| CacheOrder::Keys { nr }),
        any::<(u32, u32)>().prop_map(|(nr, block)| CacheOrder::Values { nr, block }),
    ];
    let formats = prop::sample::select(Format::ALL.to_vec());
    let state = (text(), any::<(u32, [u32; 4])>(), formats, order, state_kind(), any::<u32>()).prop_map(
        |(name, (memory, shape), format, order, kind, snapshots)| StateBuf {
            name,
            memory,
            shape,
            format,
            order,
            kind,
            snapshots,
        },
    );
    let texts = (list(text(), 0..3), units(), [text(), text(), text(), text()], list(text(), 0..3));
    let numbers = any::<([u32; 6], Option<u32>, Vec<u32>, [u64; 4])>();
    let few = prop::option::of((any::<u32>(), 0f32..=1.0));
    let few = few.prop_map(|few| few.map(|(experts, gamma)| BigLittle { experts, gamma }));
    let numbers = (numbers, few, prop::option::of(float()));
    let port = || (text(), any::<[u32; 4]>()).prop_map(|(name, shape)| Port { name, shape });
    let graph = (text(), text(), list(port(), 0..3), list(port(), 0..3), any::<bool>()).prop_map(
        |(package, function, inputs, outputs, stateful)| GraphDecl {
            package,
            function,
            inputs,
            outputs,
            stateful,
        },
    );
    let group = any::<(u32, u32, Vec<u32>)>().prop_map(|(graph, capacity, experts)| GraphGroup {
        graph,
        capacity,
        experts,
    });
    let overflow = prop::sample::select(Overflow::ALL.to_vec());
    let hot = prop::option::of(any::<(u32, u32)>())
        .prop_map(|hot| hot.map(|(batch, neurons)| HotNeurons { batch, neurons }));
    let set = (any::<(u32, Vec<u32>)>(), overflow, list(group, 0..3), hot).prop_map(
        |((layer, capacities), overflow, groups, hot)| ExpertSet { layer, overflow, capacities, groups, hot },
    );
    let attention = any::<(u32, u32, Option<u32>, bool)>()
        .prop_map(|(angles, context, window, apart)| PartAttention { angles, context, window, apart });
    let part = (any::<(Vec<u32>, u32, u32)>(), prop::option::of(attention))
        .prop_map(|((graphs, inputs, outputs), attention)| GraphPart { graphs, inputs, outputs, attention });
    let paging = prop::option::of(random_paging());
    let statics = (
        list(graph, 0..3),
        list(set, 0..3),
        list(part, 0..3),
        (paging, random_streams(), random_experts()),
        list(random_launch(), 0..3),
    );
    let lists =
        (list(file, 0..3), list(segment, 0..3), list(state, 0..3), list(entry(), 0..3), random_placement());
    (texts, numbers, lists, statics).prop_map(
        |(
            (features, (units, memories, links), [family, name, triple, cpu], symbols),
            ((n, bos, eos, long), big_little, silenced),
            lists,
            statics,
        )| {
            Plan {
                version: n[0],
                model: ModelInfo {
                    family,
                    vocab: n[1],
                    hidden: n[2],
                    layers: n[3],
                    max_context: n[4],
                    slots: n[5],
                    bos,
                    eos,
                    parameters: long[0],
                    active_parameters: long[1],
                    big_little,
                    silenced,
                },
                target: TargetInfo { name, triple, cpu, features },
                units,
                memories,
                links,
                scratch_bytes: long[3],
                files: lists.0,
                segments: lists.1,
                states: lists.2,
                experts: statics.3.2,
                kernels: symbols
                    .into_iter()
                    .map(|symbol| KernelRef {
                        symbol,
                        results: Results::last(n[0] as usize % 9, n[1] as usize % 99),
                    })
                    .collect(),
                graphs: statics.0,
                sets: statics.1,
                parts: statics.2,
                entries: lists.3,
                placement: lists.4,
                paging: statics.3.0,
                streams: statics.3.1,
                launches: statics.4,
            }
        },
    )
}

fn random_launch() -> impl Strategy<Value = ThreadKernel> {
    let extent = prop_oneof![
        any::<u32>().prop_map(Extent::Fixed),
        any::<u32>().prop_map(|per| Extent::Rows { per }),
        any::<(u32, u32)>().prop_map(|(k, experts)| Extent::Active { k, experts }),
    ];
    let launch = (prop::array::uniform3(extent), any::<(u32, u32)>())
        .prop_map(|(grid, (block, shared))| Launch { grid, block, shared });
    let numbers = any::<(u32, u32, u8, u8)>();
    (text(), text(), numbers, launch).prop_map(|(artifact, symbol, (unit, operands, count, args), launch)| {
        let results = Results::last(count as usize, args as usize);
        ThreadKernel { unit, artifact, symbol, operands, results, launch }
    })
}

fn random_streams() -> impl Strategy<Value = Vec<StreamSet>> {
    let set = (text(), any::<([u32; 5], bool)>()).prop_map(|(artifact, (n, bias))| StreamSet {
        layer: n[0],
        unit: n[1],
        artifact,
        experts: n[2],
        hidden: n[3],
        inner: n[4],
        bias,
    });
    list(set, 0..3)
}

fn random_experts() -> impl Strategy<Value = ExpertPlacement> {
    let us = || 0.0..1e12_f64;
    let curve = || list((any::<u32>(), us()), 0..4);
    let costs = ([curve(), curve(), curve()], [us(), us(), us(), us(), us(), us()], any::<(u64, u64)>());
    let costs = costs.prop_map(|([hot, processor, cold], n, (expert_bytes, row_bytes))| ExpertCosts {
        hot,
        processor,
        cold,
        bring_us: n[0],
        striped_us: n[1],
        localized_us: n[2],
        internal_us: n[3],
        link_us: n[4],
        window_us: n[5],
        expert_bytes,
        row_bytes,
    });
    let scheduled = (any::<(Option<u32>, [u32; 3], bool)>(), prop::sample::select(Refine::ALL.to_vec()));
    let score = prop::sample::select(Score::ALL.to_vec());
    let cached = ([text(), text()], text(), any::<[u32; 4]>(), [us(), us(), us()], score);
    let cached = (cached, list(any::<(u32, u32)>(), 0..3));
    let policy = (0..3, scheduled, cached, costs).prop_map(|(which, scheduled, cached, costs)| match which {
        0 => ExpertPolicy::Fixed,
        1 => {
            let ((hot, [cold, modules, frames], moves), refine) = scheduled;
            ExpertPolicy::Scheduled(Scheduled { hot, cold, modules, frames, moves, refine, costs })
        }
        _ => {
            let ((divides, keeps, [hot, frames, ahead, k], first_us, score), pinned) = cached;
            let cached = Cached { hot, frames, divides, keeps, ahead, first_us, k, score, pinned, costs };
            ExpertPolicy::Cached(cached)
        }
    });
    let layer = any::<(u32, [Vec<u32>; 4], Vec<i32>)>().prop_map(
        |(layer, [units, starts, segments, brought], modules)| ExpertLayer {
            layer,
            units,
            starts,
            segments,
            brought,
            modules,
        },
    );
    (list(layer, 0..3), policy).prop_map(|(layers, policy)| ExpertPlacement { layers, policy })
}

/// Cuts out, repeats and swaps bytes; what remains valid UTF-8 is text.
fn mutate(text: &str, edits: &[(usize, u8, u8)]) -> String {
    let mut bytes = text.as_bytes().to_vec();
    for &(at, what, byte) in edits {
        let at = at % bytes.len().max(1);
        match what % 4 {
            0 if at < bytes.len() => bytes[at] = byte,
            1 => bytes.insert(at, b" \n%@${}[](),:=-+;\"\\0x"[byte as usize % 21]),
            2 => bytes.truncate(at),
            _ => drop(bytes.drain(at..(at + byte as usize % 20).min(bytes.len()))),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Cases of each property.
const CASES: u32 = 128;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn modules_round_trip(m in module()) {
        let text = m.to_string();
        let back = parse_module(&text);
        prop_assert_eq!(back.as_ref().ok(), Some(&m), "{}\n{:?}", text, back.as_ref().err());
        // Whatever it is, the verifier gives an answer.
        let _ = moec_ir::verify::module(&m);
    }

    #[test]
    fn plans_round_trip(p in random_plan()) {
        let text = p.to_string();
        let back = parse_plan(&text);
        prop_assert_eq!(back.as_ref().ok(), Some(&p), "{}\n{:?}", text, back.as_ref().err());
        let _ = moec_ir::verify::plan(&p);
        prop_assert_eq!(Plan::decode(&p.encode().unwrap()).unwrap(), p);
    }

    #[test]
    fn placements_round_trip(p in random_placement()) {
        let text = p.to_string();
        let back = parse_placement(&text);
        prop_assert_eq!(back.as_ref().ok(), Some(&p), "{}\n{:?}", text, back.as_ref().err());
        let _ = moec_ir::verify::placement(&p);
    }

    #[test]
    fn nearly_right_texts_do_not_panic(edits in prop::collection::vec(any::<(usize, u8, u8)>(), 1..6)) {
        if let Ok(m) = parse_module(&mutate(&model().to_string(), &edits)) {
            let _ = moec_ir::verify::module(&m);
            let _ = m.to_string();
        }
        if let Ok(p) = parse_plan(&mutate(&plan().to_string(), &edits)) {
            let _ = moec_ir::verify::plan(&p);
        }
    }

    #[test]
    fn random_nodes_do_not_panic(
        node in op(),
        types in list((any::<bool>(), prop::collection::vec(prop_oneof![8 => 1..5_usize, 1 => small()], 1..4)), 0..6),
    ) {
        let types: Vec<_> = types.into_iter().map(|(f, s)| if f { Type::f32(s) } else { Type::i32(s) }).collect();
        let Ok(results) = node.infer(&types.iter().collect::<Vec<_>>()) else { return Ok(()) };
        let size = |ty: &Type| ty.shape.iter().try_fold(1_usize, |n, &d| n.checked_mul(d));
        if types.iter().chain(&results).all(|ty| size(ty).is_some_and(|n| n < 100_000)) {
            let tensors: Vec<_> = types.into_iter().map(Tensor::zeros).collect();
            let args = tensors.iter().map(eval::Arg::Tensor).collect();
            if let Ok(out) = eval::op(&node, args) {
                prop_assert_eq!(out.into_iter().map(|t| t.ty).collect::<Vec<_>>(), results);
            }
        }
    }

    #[test]
    fn random_texts_do_not_panic(text in any::<String>()) {
        let _ = (parse_module(&text), parse_plan(&text), parse_expr(&text));
    }

    #[test]
    fn scopes_have_one_text(text in prop_oneof![text(), "(layers[.])?[0-9*+]{0,2}[.]?[a-z_0-9.]{0,4}"]) {
        for printed in [
            text.parse::<Scope>().map(|s| s.to_string()),
            text.parse::<Scope<AnyLayer>>().map(|s| s.to_string()),
        ] {
            prop_assert_eq!(printed.as_ref().unwrap_or(&text), &text);
        }
    }
}

#[test]
fn printing_survives_faults() {
    let mut m = model();
    m.weights.truncate(1);
    m.states.clear();
    m.entries[0].values.truncate(2);
    assert!(m.to_string().contains("@?1"));
    assert!(parse_module(&m.to_string()).is_err());
    assert_eq!(weight("w", leaf("t", &[2])).to_string(), "weight @w: bf16[2] experts = t\"t\"[2]");
}

/// Kinds of states, as they are written; a cache is not worth a word.
#[test]
fn kinds_of_states_are_words() {
    let mut m = model();
    let (cache, ty) = (m.states[0].to_string(), m.states[0].ty.clone());
    assert!(cache.ends_with(&ty.to_string()), "{cache}");
    let name = String::from("conv");
    m.states.push(StateDecl { name, ty, kind: StateKind::Convolution });
    let text = m.to_string();
    assert!(text.contains("state $conv: f32[2, 1, 16, 4] convolution\n"), "{text}");
    assert_eq!(parse_module(&text).unwrap(), m);

    let mut p = plan();
    p.states.push(StateBuf {
        memory: 0,
        name: "s".into(),
        shape: [2, 3, 4, 5],
        format: Format::F32,
        order: CacheOrder::Rows,
        kind: StateKind::Recurrent,
        snapshots: 2,
    });
    let text = p.to_string();
    assert!(text.contains("state 1 \"s\" f32[2, 3, 4, 5] rows recurrent {snapshots = 2}\n"), "{text}");
    assert_eq!(parse_plan(&text).unwrap(), p);
    let ring = text.replace("recurrent {snapshots = 2}", "ring 3 {snapshots = 0}");
    assert_eq!(parse_plan(&ring).unwrap().states[1].kind, StateKind::Ring { window: 3 });
    let refused = parse_plan(&text.replace("recurrent", "circular")).unwrap_err().to_string();
    assert!(refused.contains("circular"), "{refused}");
}
