//! The verifiers accept valid modules and plans, and name the error of invalid ones.

use crate::common::{leaf, model, weight};
use crate::plans::{placement, plan};
use moec_ir::op::AttentionDesc;
use moec_ir::plan::*;
use moec_ir::{
    DType, Format, Glu, Graph, GraphBuilder, Module, Op, Operand, Part, StateId, Type, ValueId, WeightExpr,
    verify,
};
use moec_ir::{EntryKind, StateDecl, StateKind};

#[test]
fn a_good_module_passes() {
    verify::module(&model()).unwrap();
    verify::module(&Module::default()).unwrap();
}

/// Checks that the changed module is refused with a message that contains `message`.
#[track_caller]
fn refuse(message: &str, change: impl FnOnce(&mut Module)) {
    let mut module = model();
    change(&mut module);
    let error = verify::module(&module).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

fn find(graph: &Graph, name: &str) -> usize {
    graph.nodes.iter().position(|n| n.op.name() == name).unwrap()
}

#[test]
fn bad_modules_are_refused() {
    refuse("declared twice", |m| m.weights[1].name = "embed".into());
    refuse("no name", |m| m.weights[0].name.clear());
    refuse("its expression is", |m| m.weights[0].shape = vec![3]);
    refuse("NaN", |m| {
        m.weights.push(weight("nan", WeightExpr::Const(vec![f32::NAN])));
    });
    refuse("f32[slots", |m| m.states[0].ty = Type::f32([1, 2, 3]));
    refuse("f32[slots", |m| m.states[0].ty = Type::f32([usize::MAX, 2, 2, 2]));
    refuse("a ring without a window", |m| m.states[0].kind = StateKind::Ring { window: 0 });
    refuse("it reads 6 positions, but the ring", |m| m.states[0].kind = StateKind::Ring { window: 4 });
    refuse("is recurrent, expected cache or ring", |m| m.states[0].kind = StateKind::Recurrent);
    refuse("declared twice", |m| m.entries[1].kind = m.entries[0].kind);
    refuse("input %1", |m| m.entries[0].values[1] = Type::i32([4]));
    refuse("input %3", |m| m.entries[0].values[3] = Type::f32([5]));
    refuse("declared f32[1, 2], expected", |m| m.entries[0].values[4] = Type::f32([1, 2]));
    refuse("is never defined", |m| {
        m.entries[0].values.push(Type::f32([1]));
    });
    refuse("defined twice", |m| m.entries[0].nodes[1].outputs = vec![ValueId(4)]);
    refuse("is not defined before it is used", |m| m.entries[0].nodes.swap(0, 2));
    refuse("not in the module", |m| m.entries[0].nodes[0].inputs[1] = Operand::Weight(moec_ir::WeightId(99)));
    refuse("expected a weight", |m| m.entries[0].nodes[0].inputs[1] = Operand::Value(ValueId(0)));
    refuse("1 operands, expected 2", |m| {
        m.entries[0].nodes[0].inputs.pop();
    });
    refuse("1 results, not 0", |m| m.entries[0].nodes[0].outputs.clear());
    refuse("attribute is NaN", |m| {
        let i = find(&m.entries[0], "rms_norm");
        m.entries[0].nodes[i].op = Op::RmsNorm { eps: f32::NAN, groups: 1, weight: true };
    });
    // An attribute of a nested value.
    refuse("attribute is NaN", |m| {
        let i = find(&m.entries[0], "expert_ffn");
        let glu = Glu::Limited { limit: f32::NAN };
        m.entries[0].nodes[i].op = Op::ExpertFfn { glu, bias: false, fixed: false };
    });
    refuse("read the result of the write", |m| {
        let i = find(&m.entries[0], "attention");
        m.entries[0].nodes[i].inputs[1] = Operand::State(StateId(0));
    });
    refuse("written twice", |m| {
        let i = find(&m.entries[0], "cache_write");
        m.entries[0].nodes[i + 1].inputs[0] = Operand::State(StateId(0));
    });
    refuse("expected a value", |m| {
        let (i, add) = (find(&m.entries[0], "cache_write"), find(&m.entries[0], "add"));
        let cache = m.entries[0].nodes[i].outputs[0];
        m.entries[0].nodes[add].inputs[0] = cache.into();
    });
    refuse("output", |m| m.entries[0].output = ValueId(4));
    refuse("output %999 is nothing", |m| m.entries[0].output = ValueId(999));
}

fn state(b: &mut GraphBuilder<'_>, name: &str, shape: [usize; 4], kind: StateKind) -> Operand {
    b.module().add_state(StateDecl { name: name.into(), ty: Type::f32(shape), kind }).into()
}

/// Builds a convolution and a delta rule, each with its own state, after `change` to their operands. Returns
/// the error.
fn updates(change: fn(&mut GraphBuilder<'_>, [&mut Vec<Operand>; 2])) -> Option<String> {
    let mut m = Module::default();
    let mut b = GraphBuilder::new(&mut m, EntryKind::Prefill(4), 1);
    let [embed, conv] = ["embed", "conv"].map(|name| b.weight(weight(name, leaf(name, &[3, 4]))).unwrap());
    let x = b.one(Op::Embed, &[Graph::IDS.into(), embed.into()]).unwrap();
    let half = b.one(Op::Slice { heads: 1, start: 0, len: 2 }, &[x.into()]).unwrap();
    let [x, half, pos, slot] = [x, half, Graph::POS, Graph::SLOT].map(Operand::from);
    let mut of_conv =
        vec![state(&mut b, "conv", [2, 1, 2, 4], StateKind::Convolution), x, conv.into(), pos, slot];
    let s = state(&mut b, "s", [2, 2, 2, 2], StateKind::Recurrent);
    let mut of_delta = vec![s, half, half, x, half, half, pos, slot];
    change(&mut b, [&mut of_conv, &mut of_delta]);
    let built = (|| {
        let y = b.one(Op::CausalConv { act: None, bias: false }, &of_conv)?;
        let z = b.one(Op::DeltaRule { key_heads: 1, heads: 2 }, &of_delta)?;
        let y = b.one(Op::Add, &[y.into(), z.into()])?;
        let y = b.one(Op::GatherRows, &[y.into(), Graph::ROWS.into()])?;
        b.finish(y)
    })();
    built.err().map(|e| e.to_string()).or_else(|| verify::module(&m).err().map(|e| e.to_string()))
}

#[test]
fn operators_that_update_states_are_checked() {
    use StateKind::{Cache, Convolution, Recurrent};
    assert_eq!(updates(|_, _| {}), None);
    let refuse = |message: &str, change: fn(&mut GraphBuilder<'_>, [&mut Vec<Operand>; 2])| {
        let error = updates(change).unwrap_or_else(|| panic!("accepted, not: {message}"));
        assert!(error.contains(message), "{error}");
    };
    refuse("the state \"other\", which is cache, expected recurrent", |b, [_, delta]| {
        delta[0] = state(b, "other", [2, 2, 2, 2], Cache);
    });
    refuse("the state \"s\", which is recurrent, expected convolution", |_, [conv, delta]| {
        conv[0] = delta[0];
    });
    refuse("the state has 2 heads, expected 1", |b, [conv, _]| {
        conv[0] = state(b, "other", [2, 2, 2, 4], Convolution);
    });
    refuse("weight is f32[3, 4], expected f32[4, 4]", |b, [conv, _]| {
        conv[0] = state(b, "other", [2, 1, 3, 4], Convolution);
    });
    refuse("the state has 1 heads, expected 2", |b, [_, delta]| {
        delta[0] = state(b, "other", [2, 1, 2, 2], Recurrent);
    });
    refuse("v is f32[4, 2], expected f32[4, 4]", |_, [_, delta]| delta[3] = delta[1]);
    refuse("expected a state", |_, [conv, _]| conv[0] = conv[1]);
    refuse("state 1 is written twice", |b, [_, delta]| {
        b.one(Op::DeltaRule { key_heads: 1, heads: 2 }, delta).unwrap();
    });
    // Operators that only write or read caches accept none of these states.
    let cached = |op: Op| {
        let mut m = Module::default();
        let mut b = GraphBuilder::new(&mut m, EntryKind::Prefill(4), 1);
        let s = state(&mut b, "s", [2, 1, 2, 1], Recurrent);
        let places = [Graph::POS, Graph::SLOT].map(Operand::from);
        let w = b.weight(weight("embed", leaf("embed", &[3, 1]))).unwrap();
        let x = b.one(Op::Embed, &[Graph::IDS.into(), w.into()]).unwrap().into();
        let inputs = if op == Op::CacheWrite { vec![s, x] } else { vec![x, s, s] };
        b.one(op, &[inputs, places.to_vec()].concat()).unwrap_err().to_string()
    };
    let attention = Op::Attention(AttentionDesc {
        heads: 1,
        kv_heads: 1,
        qk_dim: 1,
        v_dim: 1,
        scale: 1.0,
        window: None,
        chunked: false,
        sinks: false,
        v_from_k: false,
    });
    for op in [Op::CacheWrite, attention] {
        let error = cached(op);
        assert!(error.contains("the state \"s\", which is recurrent, expected cache or ring"), "{error}");
    }
}

#[test]
fn selective_scans_are_checked() {
    let built = |shape: [usize; 4], kind: StateKind, change: fn(&mut Vec<Operand>)| {
        let mut m = Module::default();
        let mut b = GraphBuilder::new(&mut m, EntryKind::Prefill(4), 1);
        let table = b.weight(weight("embed", leaf("embed", &[3, 4]))).unwrap();
        let rate = b.weight(weight("rate", leaf("rate", &[2, 4]))).unwrap();
        let x = b.one(Op::Embed, &[Graph::IDS.into(), table.into()]).unwrap();
        let half = b.one(Op::Slice { heads: 1, start: 0, len: 2 }, &[x.into()]).unwrap();
        let [x, half, pos, slot] = [x, half, Graph::POS, Graph::SLOT].map(Operand::from);
        let s = state(&mut b, "s", shape, kind);
        let mut operands = vec![s, half, half, x, x, rate.into(), pos, slot];
        change(&mut operands);
        b.one(Op::SelectiveScan, &operands).map(|_| ()).map_err(|e| e.to_string())
    };
    let (fits, kept) = ([2, 1, 2, 4], StateKind::Recurrent);
    assert_eq!(built(fits, kept, |_| {}), Ok(()));
    for (message, error) in [
        ("which is cache, expected recurrent", built(fits, StateKind::Cache, |_| {})),
        ("the state has 2 heads, expected 1", built([2, 2, 2, 4], kept, |_| {})),
        ("c is f32[4, 2], expected f32[4, 3]", built([2, 1, 3, 4], kept, |_| {})),
        ("b is f32[4, 4], expected f32[4, 2]", built(fits, kept, |o| o[2] = o[3])),
        ("dt is f32[4, 2], expected f32[4, 4]", built(fits, kept, |o| o[4] = o[1])),
        ("expected a weight", built(fits, kept, |o| o[5] = o[3])),
        (
            "rate is f32[3, 4], expected f32[2, 4]",
            built(fits, kept, |o| o[5] = Operand::Weight(moec_ir::WeightId(0))),
        ),
    ] {
        let error = error.unwrap_err();
        assert!(error.contains(message), "{error}, not: {message}");
    }
}

#[test]
fn token_rows_and_output_rows_do_not_mix() {
    // In a decode entry point, token rows and output rows can be equally many.
    let build = |tail: fn(&mut GraphBuilder<'_>, ValueId) -> ValueId| {
        let mut m = Module::default();
        let mut b = GraphBuilder::new(&mut m, EntryKind::Decode(2), 2);
        let w = b.weight(weight("w", leaf("w", &[3, 4]))).unwrap();
        let x = b.one(Op::Embed, &[Graph::IDS.into(), w.into()]).unwrap();
        let out = tail(&mut b, x);
        b.finish(out).unwrap();
        (verify::module(&m), m)
    };
    let (ok, m) = build(|b, x| b.one(Op::GatherRows, &[x.into(), Graph::ROWS.into()]).unwrap());
    ok.unwrap();
    let spaces = m.entries[0].row_spaces(&m);
    assert_eq!(spaces[4], RowSpace::Tokens);
    assert_eq!(spaces[5], RowSpace::Outputs);
    let message = |r: Result<(), verify::VerifyError>| r.unwrap_err().to_string();
    assert!(message(build(|_, x| x).0).contains("gather_rows is missing"));
    let mixed = build(|b, x| {
        let g = b.one(Op::GatherRows, &[x.into(), Graph::ROWS.into()]).unwrap();
        b.one(Op::Add, &[g.into(), x.into()]).unwrap()
    });
    assert!(message(mixed.0).contains("mix"));
    let twice = build(|b, x| {
        let g = b.one(Op::GatherRows, &[x.into(), Graph::ROWS.into()]).unwrap();
        b.one(Op::GatherRows, &[g.into(), Graph::ROWS.into()]).unwrap()
    });
    assert!(message(twice.0).contains("mix"));
    let by_ids = build(|b, x| b.one(Op::GatherRows, &[x.into(), Graph::IDS.into()]).unwrap());
    assert!(message(by_ids.0).contains("mix"));
}

#[test]
fn the_builder_types_every_node() {
    let mut m = Module::default();
    let mut b = GraphBuilder::new(&mut m, EntryKind::Prefill(4), 1);
    b.scope(Part::EMBED);
    let w = b.weight(weight("w", leaf("w", &[3, 4]))).unwrap();
    assert_eq!(b.weight(weight("w", leaf("w", &[3, 4]))).unwrap(), w);
    assert!(b.weight(weight("w", leaf("v", &[3, 4]))).is_err());
    let s = StateDecl { name: "s".into(), ty: Type::f32([1, 1, 4, 4]), kind: StateKind::Cache };
    let s1 = b.module().add_state(s.clone());
    assert_eq!(b.module().add_state(s), s1);
    let x = b.one(Op::Embed, &[Graph::IDS.into(), w.into()]).unwrap();
    assert_eq!(b.ty(x).unwrap(), &Type::f32([4, 4]));
    let error = b.push(Op::Add, &[x.into(), Graph::IDS.into()]).unwrap_err().to_string();
    assert_eq!(error, "prefill[4] embed node 1 (add): b is i32[4], expected f32[4, 4]");
    assert!(b.push(Op::Add, &[x.into(), ValueId(99).into()]).is_err());
    assert!(b.finish(x).is_err());
}

#[test]
fn a_good_plan_passes() {
    verify::plan(&plan()).unwrap();
    let bytes = plan().encode().unwrap();
    assert_eq!(Plan::decode(&bytes).unwrap(), plan());
}

/// Checks that the changed plan is refused at this place with a message that contains `message`.
#[track_caller]
fn refuse_plan(at: &str, message: &str, change: impl FnOnce(&mut Plan)) {
    let mut plan = plan();
    change(&mut plan);
    let error = verify::plan(&plan).unwrap_err();
    assert!(error.at.starts_with(at) && error.message.contains(message), "{error}");
}

#[test]
fn bad_plans_are_refused() {
    refuse_plan("plan", "version", |p| p.version += 1);
    refuse_plan("model", "zero", |p| p.model.hidden = 0);
    refuse_plan("model", "i32", |p| p.model.vocab = u32::MAX);
    refuse_plan("model", "bos", |p| p.model.bos = Some(10));
    refuse_plan("units", "no units", |p| p.units.clear());
    refuse_plan("plan", "address space", |p| p.memories[0].arena_bytes = u64::MAX);
    for path in ["/a", "../a", "a/../b", "a//b", "", "a/", "./a", "a\\b", "c:a", "a\0"] {
        refuse_plan("files[0]", "inside the bundle", |p| p.files[0].path = path.into());
    }
    refuse_plan("files[1]", "twice", |p| p.files.push(p.files[0].clone()));
    refuse_plan("segments[0]", "aligned", |p| p.segments[0].offset = 32);
    refuse_plan("segments[0]", "file", |p| p.segments[0].offset = 4096);
    refuse_plan("segments[0]", "file", |p| p.segments[0].offset = u64::MAX - 63);
    refuse_plan("segments[0]", "file", |p| p.segments[0].file = 1);
    refuse_plan("segments[0]", "bytes", |p| p.segments[0].bytes = 15);
    refuse_plan("segments[1]", "bytes", |p| p.segments[1].layout = Layout::Panels { nr: 0 });
    refuse_plan("segments[1]", "bytes", |p| p.segments[1].shape = vec![u32::MAX; 3]);
    refuse_plan("segments[2]", "bytes", |p| p.segments[2].layout = Layout::GluPanels { nr: 7 });
    // Byte counts without the padding, of another grouped format, and of plain numbers.
    refuse_plan("segments[3]", "bytes", |p| p.segments[3].bytes = 8 * 3 * 2);
    refuse_plan("segments[4]", "bytes", |p| p.segments[4].bytes = 2 * 8 * (40 + 2));
    refuse_plan("segments[4]", "bytes", |p| p.segments[4].format = Format::Q4);
    refuse_plan("segments[5]", "bytes", |p| p.segments[5].format = Format::Q8);
    refuse_plan("segments[5]", "bytes", |p| p.segments[5].shape = vec![12, 33]);
    refuse_plan("segments[6]", "bytes", |p| p.segments[6].layout = Layout::Panels { nr: 8 });
    refuse_plan("segments[6]", "bytes", |p| p.segments[6].shape = vec![u32::MAX; 3]);
    refuse_plan("segments[0]", "shape", |p| p.segments[0].shape = vec![]);
    refuse_plan("states[0]", "extents", |p| p.states[0].shape = [u32::MAX; 4]);
    refuse_plan("states[0]", "f16", |p| p.states[0].format = Format::F16);
    refuse_plan("states[0]", "Keys", |p| p.states[0].order = CacheOrder::Keys { nr: 0 });
    refuse_plan("states[0]", "do not hold", |p| p.model.max_context = 17);
    for blocks in [0, 3, 8] {
        refuse_plan("states[0]", "rotated in blocks", |p| p.states[0].rotated = blocks);
    }
    let folded = |p: &mut Plan, kind| {
        let shape = [2, 3, 1, 5];
        p.states[0] = StateBuf {
            memory: 0,
            name: "s".into(),
            shape,
            format: Format::F32,
            order: CacheOrder::Rows,
            rotated: 1,
            kind,
            snapshots: 16,
        };
    };
    for kind in [StateKind::Recurrent, StateKind::Convolution] {
        let mut good = plan();
        folded(&mut good, kind);
        verify::plan(&good).unwrap();
        assert_eq!(good.states[0].bytes(), 2 * 3 * 5 * 4 * 17);
        let refuse = |message: &str, change: fn(&mut StateBuf)| {
            refuse_plan("states[0]", message, |p| {
                folded(p, kind);
                change(&mut p.states[0]);
            });
        };
        refuse("17 snapshots, and a state", |s| s.snapshots = 17);
        refuse("has 16 at most", |s| s.snapshots = u32::MAX);
        refuse("1 slots do not hold", |s| s.shape[0] = 1);
        refuse("extents", |s| s.shape[2] = 0);
        refuse("extents", |s| s.shape = [u32::MAX, u32::MAX, 1, 1]);
        refuse("bf16", |s| s.format = Format::Bf16);
        refuse("in the order Keys", |s| s.order = CacheOrder::Keys { nr: 4 });
    }
    // A state that is read as a whole may be stored in panels of its columns; one that is read by rows may
    // not.
    let panels = |p: &mut Plan, kind, block| {
        folded(p, kind);
        (p.states[0].shape, p.states[0].order) = ([2, 3, 4, 5], CacheOrder::Values { nr: 8, block });
    };
    let mut good = plan();
    panels(&mut good, StateKind::Recurrent, 4);
    verify::plan(&good).unwrap();
    assert_eq!(good.states[0].bytes(), 2 * 3 * 4 * 8 * 4 * 17);
    refuse_plan("states[0]", "recurrent of f32 in the order", |p| panels(p, StateKind::Recurrent, 2));
    refuse_plan("states[0]", "convolution of f32 in the order", |p| panels(p, StateKind::Convolution, 4));
    refuse_plan("states[0]", "1 snapshots, and a state of the kind cache has 0", |p| {
        p.states[0].snapshots = 1;
    });
    // A chunk of 4 tokens and a window of 6 need 9 positions, or all of the context if that is shorter.
    let ring = |p: &mut Plan, rows, window| {
        (p.states[0].shape[2], p.states[0].kind) = (rows, StateKind::Ring { window });
    };
    for (rows, window) in [(9, 6), (16, 14), (16, u32::MAX)] {
        let mut good = plan();
        ring(&mut good, rows, window);
        verify::plan(&good).unwrap();
    }
    refuse_plan("states[0]", "2 slots of 8 tokens do not hold the model's 2 of 9", |p| ring(p, 8, 6));
    refuse_plan("states[0]", "of 16", |p| ring(p, 15, u32::MAX));
    refuse_plan("states[0]", "a ring without a window", |p| ring(p, 16, 0));
    refuse_plan("states[0]", "1 snapshots, and a state of the kind ring has 0", |p| {
        ring(p, 16, 4);
        p.states[0].snapshots = 1;
    });
    refuse_plan("states[1]", "a duplicate", |p| p.states.push(p.states[0].clone()));
    for symbol in ["", "1a", "a-b", "ä"] {
        refuse_plan("kernels[0]", "identifier", |p| p.kernels[0].symbol = symbol.into());
    }
    refuse_plan("kernels[1]", "twice", |p| p.kernels[1] = p.kernels[0].clone());
    refuse_plan("kernels[1]", "writes nothing", |p| p.kernels[1].results = Results::default());
    refuse_plan("entries[1]", "order", |p| p.entries.push(p.entries[0].clone()));
    refuse_plan("placement", "layer", |p| p.placement.experts[0].layer = 2);
    refuse_plan("placement", "units", |p| p.placement.units.swap(0, 1));
}

#[test]
fn every_decode_entry_point_has_a_little_one() {
    let with = |kinds: &[EntryKind], big_little: Option<BigLittle>| {
        let mut p = plan();
        let entry = p.entries[0].clone();
        for &kind in kinds {
            p.entries.push(Entry { kind, ..entry.clone() });
        }
        p.model.big_little = big_little;
        verify::plan(&p).map_err(|e| e.to_string())
    };
    let (d, l) = (EntryKind::Decode, EntryKind::Little);
    let some = Some(BigLittle { experts: 1, gamma: 1.0 });
    assert_eq!(with(&[d(1), d(3), l(1), l(3)], some), Ok(()));
    assert_eq!(with(&[d(1)], None), Ok(()));
    let refused = |kinds: &[EntryKind], big_little, message: &str| {
        let e = with(kinds, big_little).unwrap_err();
        assert!(e.contains(message), "{e}");
    };
    refused(&[d(1), l(1)], None, "no big_little");
    refused(&[d(1)], some, "differ in rows");
    refused(&[d(1), d(2), l(1), l(3)], some, "differ in rows");
    refused(&[l(1), d(1)], some, "out of order");
    refused(&[d(1), l(1)], Some(BigLittle { experts: 0, gamma: 0.5 }), "no experts");
    for gamma in [-0.1, 1.1, f32::NAN] {
        refused(&[d(1), l(1)], Some(BigLittle { experts: 1, gamma }), "gamma is");
    }
}

#[test]
fn bad_entries_are_refused() {
    let refuse = |at: &str, message: &str, change: fn(&mut Entry)| {
        refuse_plan(&format!("entries[0]{at}"), message, |p| change(&mut p.entries[0]));
    };
    refuse("", "no rows", |e| e.kind = EntryKind::Prefill(0));
    refuse(".buffers[0]", "i32[5]", |e| e.kind = EntryKind::Prefill(5));
    refuse(".buffers[4]", "aligned", |e| e.buffers[4].offset = 260);
    refuse(".buffers[4]", "arena", |e| e.buffers[4].offset = 576);
    refuse(".buffers[4]", "arena", |e| e.buffers[4].bytes = u64::MAX - 10);
    refuse(".buffers[4]", "do not hold", |e| e.buffers[4].stride = u32::MAX);
    refuse(".buffers[4]", "do not hold", |e| e.buffers[4].rows = 0);
    refuse(".buffers[0]", "input", |e| e.buffers[0].dtype = DType::F32);
    refuse(".logits", "not f32", |e| e.logits = 5 + 1);
    refuse(".logits", "not f32", |e| e.logits = 99);
    refuse(".locations[2]", "columns", |e| {
        e.locations[2] = Some(BufferColumns { buffer: 5, column: 5, cols: 4 });
    });
    refuse(".locations[2]", "columns", |e| {
        e.locations[2] = Some(BufferColumns { buffer: 5, column: u32::MAX, cols: 4 });
    });
    refuse(".steps[0]", "unit", |e| e.steps[0].unit = 2);
    refuse(".steps[1]", "kernel", |e| e.steps[1].code = Code::Kernel(2));
    refuse(".steps[1]", "argument 0", |e| e.steps[1].args[0] = Arg::Buffer(4, 128));
    refuse(".steps[1]", "argument 0", |e| e.steps[1].args[0] = Arg::Buffer(4, 2));
    refuse(".steps[1]", "argument 0", |e| e.steps[1].args[0] = Arg::Segment(99));
    refuse(".steps[1]", "argument 0", |e| e.steps[1].args[0] = Arg::State(1));
    refuse(".steps[1]", "empty grid", |e| e.steps[1].grid = Grid::Tiles { rows: 0, tiles: 1 });
    refuse(".steps[3]", "dispatch table", |e| e.steps[3].grid = Grid::Experts { table: 0, tiles: 1 });
    refuse(".steps[3]", "dispatch table", |e| e.steps[3].grid = Grid::Experts { table: 9, tiles: 1 });
    refuse(".steps[3]", "empty grid", |e| {
        e.steps[3].grid = Grid::Clusters { table: 1, blocks: 0, columns: 1 };
    });
    refuse(".steps[3]", "clusters of other neurons", |e| {
        e.steps[3].grid = Grid::Clusters { table: 1, blocks: 1, columns: 1 };
    });
    refuse(".steps[0]", "one work item", |e| e.steps[0].grid = Grid::Tiles { rows: 1, tiles: 1 });
    refuse(".steps[0]", "do not fit", |e| {
        e.steps[0].args.pop();
    });
    refuse(".steps[0]", "do not fit", |e| e.steps[0].args[1] = Arg::Segment(1));
    refuse(".steps[0]", "do not fit", |e| e.steps[0].args[2] = Arg::Buffer(4, 4));
    refuse(".steps[2]", "do not fit", |e| {
        e.steps[2].code = Code::Builtin(Builtin::Dispatch {
            rows: 4,
            k: u32::MAX,
            experts: u32::MAX,
            partial: false,
            candidates: None,
        });
    });
    refuse(".steps[2]", "do not fit", |e| {
        e.steps[2].code =
            Code::Builtin(Builtin::Dispatch { rows: 4, k: 1, experts: 12, partial: false, candidates: None });
    });
    // A result must not be written to an offset in a buffer, or to a weight.
    refuse(".steps[2]", "do not fit", |e| e.steps[2].args[0] = Arg::Buffer(6, 64));
    refuse(".steps[2]", "do not fit", |e| e.steps[2].args[1] = Arg::Segment(0));
    refuse(".steps[1]", "argument 0", |e| {
        e.buffers[4].bytes = 130;
        e.steps[1].args[0] = Arg::Buffer(4, 128);
    });
    refuse(".steps[3]", "ascending", |e| e.steps[3].deps = vec![1, 0]);
    refuse(".steps[1]", "not before", |e| e.steps[1].deps = vec![1]);
    refuse(".steps[1]", "no barrier", |e| e.steps[1].barrier = false);
    refuse(".buffers[3]", "overlaps", |e| e.buffers[3].offset = 128);
    // The steps are in order, but a buffer has been overwritten.
    refuse(".steps[3]", "reads buffer 5 (%5), which is not written, or was overwritten", |e| {
        e.buffers[6].offset = 448;
    });
    refuse(".steps[0]", "writes buffer 4 (%4), which shares bytes with buffer 1 (%1)", |e| {
        e.buffers[4].offset = 64;
    });
    refuse(".steps[1]", "its kernel writes", |e| e.steps[1].args.truncate(2));
    refuse(".steps[1]", "its kernel writes", |e| e.steps[1].args[2] = Arg::Segment(1));
}

/// Checks that the changed placement is refused with a message that contains `message`.
#[track_caller]
fn refuse_placement(message: &str, change: impl FnOnce(&mut Placement)) {
    let mut p = placement();
    change(&mut p);
    let error = verify::placement(&p).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[test]
fn bad_placements_are_refused() {
    verify::placement(&placement()).unwrap();
    verify::placement(&Placement::default()).unwrap();
    refuse_placement("two of one name", |p| p.units[1] = "cpu".into());
    refuse_placement("with dynamic shapes", |p| p.chunk = 0);
    refuse_placement("ops[0]: unit 2", |p| p.ops[0].unit = 2);
    refuse_placement("per token", |p| p.experts[0].k = 5);
    refuse_placement("experts[1]: layer 1", |p| p.experts.push(p.experts[0].clone()));
    for tiers in
        [vec![], vec![48, 48], vec![16, 48], vec![48, 17], vec![0], vec![112, 96, 80, 64, 48, 32, 16]]
    {
        refuse_placement("tiers", |p| p.experts[0].tiers = tiers);
    }
    let rates = Expected { imbalance: 1.0, overflow: 1.5, padding: 0.0 };
    refuse_placement("rate", |p| p.experts[0].expected = Some(rates));
    refuse_placement("experts[3]: group 4", |p| p.experts[0].experts[3].group = 4);
    refuse_placement("capacity 32", |p| p.experts[0].experts[0].capacity = 32);
    refuse_placement("capacity 16 in tier None", |p| p.experts[0].experts[0].tier = None);
    refuse_placement("an invalid load", |p| p.experts[0].experts[0].load = Some(f32::NAN));
    refuse_placement("fallback None", |p| p.experts[0].experts[0].fallback = None);
    refuse_placement("fallback Some(1)", |p| p.experts[0].experts[0].fallback = Some(1));
    refuse_placement("fallback Some(0)", |p| p.overflow = Overflow::Prune);
    refuse_placement("groups[0]: unit 7", |p| p.experts[0].groups[0].unit = 7);
    refuse_placement("costs", |p| p.experts[0].groups[0].cost_us = vec![1.0]);
    refuse_placement("unit 7 with costs", |p| p.experts[0].groups[0].decode[0].unit = 7);
    refuse_placement("for 0 rows", |p| p.experts[0].groups[0].decode[0].batch = 0);
    refuse_placement("do not ascend", |p| {
        let decode = &mut p.experts[0].groups[0].decode;
        decode.push(decode[0].clone());
    });
    refuse_placement("holds nothing", |p| p.experts[0].groups[0].experts.clear());
    refuse_placement("expert 0", |p| p.experts[0].groups[0].experts.push(0));
    refuse_placement("expert 3", |p| p.experts[0].groups[2].experts.push(3));
    refuse_placement("in no group", |p| drop(p.experts[0].groups.pop()));
}

/// Lengths past the limit do not allocate memory.
#[test]
fn a_stored_plan_with_a_hostile_length_is_refused() {
    for length in [(64 << 20) + 1, u64::MAX] {
        // The version, then the length of the model family's name, as a number of eight bytes.
        let bytes: Vec<u8> = [1, 253].into_iter().chain(length.to_le_bytes()).collect();
        let e = Plan::decode(&bytes).unwrap_err();
        assert!(matches!(e, bincode::error::DecodeError::LimitExceeded), "{length}: {e}");
    }
}

#[test]
fn stored_plan_with_nan_is_refused() {
    let mut p = plan();
    assert!(Plan::decode(&p.encode().unwrap()).is_ok());
    p.model.big_little = Some(BigLittle { experts: 1, gamma: f32::NAN });
    assert!(Plan::decode(&p.encode().unwrap()).is_err());
    p.model.big_little = None;
    p.placement.experts[0].groups[0].cost_us[0] = f32::NAN;
    assert!(Plan::decode(&p.encode().unwrap()).is_err());
}

/// A dispatch table is built from the choices of all its rows, and its size must fit an i32.
#[test]
fn dispatch_table_must_fit_its_ids_and_i32() {
    let with = |rows: u32, experts: u32| {
        let mut plan = plan();
        plan.memories[0].arena_bytes = 1 << 40;
        let e = &mut plan.entries[0];
        (e.buffers[6].offset, e.buffers[6].bytes) = (1 << 20, 1 << 39);
        e.steps[2].code =
            Code::Builtin(Builtin::Dispatch { rows, k: 1, experts, partial: false, candidates: None });
        verify::plan(&plan).map_err(|e| e.message)
    };
    // The buffer with the ids has 64 bytes.
    assert_eq!(with(16, 7), Ok(()));
    for (rows, experts) in [(17, 7), (4, 1 << 31)] {
        assert!(with(rows, experts).unwrap_err().contains("do not fit"), "{rows} {experts}");
    }
}

/// A subgraph takes all rows of its step at once, or one per call.
#[test]
fn subgraph_takes_the_rows_of_its_step() {
    let with = |rows: u32, one_call_per_row: bool| {
        let mut plan = plan();
        let tensor = |name: &str, shape| GraphTensor { name: name.into(), shape };
        let attention = SubgraphAttention { angles: 0, context: 16, window: None, one_call_per_row };
        plan.graphs.push(GraphDecl {
            package: "artifacts/part.mlpackage".into(),
            function: "main".into(),
            inputs: vec![
                tensor("x", [rows, 8, 1, 1]),
                tensor("mask", [1, 1, rows, 16]),
                tensor("write", [1, 1, 16, rows]),
            ],
            outputs: vec![tensor("y", [rows, 8, 1, 1])],
            stateful: true,
        });
        plan.subgraphs =
            vec![Subgraph { graphs: vec![1], inputs: 8, outputs: 8, attention: Some(attention) }];
        let e = &mut plan.entries[0];
        e.steps[1].code = Code::Builtin(Builtin::Subgraph { subgraph: 0 });
        e.steps[1].grid = Grid::One;
        e.steps[1].args = [4, 1, 2, 5].map(|b| Arg::Buffer(b, 0)).to_vec();
        verify::plan(&plan).map_err(|e| e.message)
    };
    assert_eq!((with(4, false), with(32, false), with(1, true)), (Ok(()), Ok(()), Ok(())));
    assert!(with(3, false).unwrap_err().contains("do not fit"));
}
