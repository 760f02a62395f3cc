//! Refused programs, and the JSON form.

use crate::store::{Store, ane};
use moec_coreml::program::{Arg, FunctionBuilder, OpKind, Program, Rules, ValueId, WeightRef};

#[test]
fn program_round_trips_through_json() {
    let mut store = Store::default();
    let mut attention = store.attention_of([4, 2, 24, 16], true);
    attention.sinks = Some(store.raw(&[4], 0.0, 1.0));
    let glu = moec_ir::Glu::Gated(moec_ir::Activation::Gelu);
    let group = store.group(2, glu, true);
    for program in [attention.emit(&ane()), group.emit(&ane()), store.head().emit(&ane())] {
        let program = program.unwrap();
        let json = serde_json::to_string(&program).unwrap();
        assert_eq!(serde_json::from_str::<Program>(&json).unwrap(), program);
    }
    let op = r#"{"op": "add", "args": {"x": "%0", "y": "1"}, "results": ["%1"]}"#;
    assert!(serde_json::from_str::<moec_coreml::program::Op>(op).is_err());
}

/// A program `x[4, 4] → y` with this body.
fn program(body: impl FnOnce(&mut FunctionBuilder, ValueId) -> ValueId) -> Program {
    let mut weights = Vec::new();
    let mut b = FunctionBuilder::new("main", &mut weights);
    let x = b.input("x", &[4, 4]);
    let y = body(&mut b, x);
    let function = b.finish(&[("y", y)]);
    Program { name: "p".into(), description: String::new(), weights, functions: vec![function] }
}

fn relu(b: &mut FunctionBuilder, x: ValueId) -> ValueId {
    b.unary(OpKind::Relu, x).unwrap()
}

#[track_caller]
fn refused(program: &Program, rules: &Rules, what: &str) {
    let error = program.verify(rules).unwrap_err().to_string();
    assert!(error.contains(what), "{error}");
}

/// Expected words of the error, and a change to the program.
type Fault = (&'static str, fn(&mut Program));

#[test]
fn malformed_programs_are_rejected_with_their_location() {
    let sound = program(relu);
    sound.verify(&Rules::ANE).unwrap();
    let faults: &[Fault] = &[
        ("there is no function", |p| p.functions.clear()),
        ("the name is a duplicate", |p| p.functions.push(p.functions[0].clone())),
        ("its name is not an identifier", |p| p.functions[0].name = "2x".into()),
        ("or a duplicate", |p| p.functions[0].values[1].name = "x".into()),
        ("has no elements", |p| p.functions[0].values[1].shape = vec![4, 0]),
        ("op 0 (relu): `%1` is [4, 4], not [4, 5]", |p| p.functions[0].values[1].shape = vec![4, 5]),
        ("`%0` is defined twice", |p| p.functions[0].ops[0].results = vec![ValueId(0)]),
        ("there is no value `%9`", |p| p.functions[0].inputs.push(ValueId(9))),
        ("there is no value `%9`", |p| p.functions[0].states.push(ValueId(9))),
        ("0 results are named, expected 1", |p| p.functions[0].ops[0].results.clear()),
        ("there is no `x`", |p| p.functions[0].ops[0].args.clear()),
        ("it has no parameter `y`", |p| {
            p.functions[0].ops[0].args.insert("y".into(), Arg::Value(ValueId(0)));
        }),
        ("`x` takes Value, not Int(3)", |p| {
            p.functions[0].ops[0].args.insert("x".into(), Arg::Int(3));
        }),
        ("`%1` is not defined before it is used", |p| {
            p.functions[0].ops[0].args.insert("x".into(), Arg::Value(ValueId(1)));
        }),
        ("`%7` is not defined before it is used", |p| {
            p.functions[0].ops[0].args.insert("x".into(), Arg::Value(ValueId(7)));
        }),
        ("its result `%7` is not defined", |p| p.functions[0].outputs = vec![ValueId(7)]),
        ("it has no result", |p| p.functions[0].outputs.clear()),
    ];
    for (what, change) in faults {
        let mut bad = sound.clone();
        change(&mut bad);
        refused(&bad, &Rules::ANE, what);
    }
}

#[test]
fn operators_unsupported_by_the_unit_are_rejected() {
    let rules = Rules { ops: &[OpKind::Sigmoid], ..Rules::ANE };
    refused(
        &program(relu),
        &rules,
        "program `p`, function `main`: op 0 (relu): the Neural Engine does not run it",
    );
    refused(
        &program(relu),
        &Rules { extent: 3, ..Rules::ANE },
        "`x` has an extent of 4; the Neural Engine takes at most 3",
    );
    let masked = program(|b, x| b.scalar(OpKind::Add, x, f32::NEG_INFINITY).unwrap());
    refused(&masked, &Rules::ANE, "`splat` is -inf, which f16 cannot hold");
    let large = program(|b, x| b.scalar(OpKind::Add, x, 1e5).unwrap());
    refused(&large, &Rules::ANE, "f16 cannot hold");
}

#[test]
fn states_are_few_and_of_the_right_width() {
    let with = |shapes: &[&[usize]]| {
        program(|b, x| {
            for (i, shape) in shapes.iter().enumerate() {
                let state = b.state(&format!("s{i}"), shape);
                let old = b.read_state(state).unwrap();
                b.write_state(state, old).unwrap();
            }
            relu(b, x)
        })
    };
    with(&[&[2, 64, 32], &[32, 32]]).verify(&Rules::ANE).unwrap();
    refused(&with(&[&[2, 64, 24]]), &Rules::ANE, "the last two extents of state `s0` are 64 and 24");
    refused(&with(&[&[2, 40, 32]]), &Rules::ANE, "must be multiples of 32");
    refused(&with(&[&[32]]), &Rules::ANE, "state `s0` has no rows");
    let square: &[usize] = &[32, 32];
    refused(&with(&[square; 3]), &Rules::ANE, "it has 3 states; the Neural Engine takes 2 in a graph");
    let mut read = with(&[&[32, 32]]);
    let state = read.functions[0].states[0];
    let last = read.functions[0].ops.len() - 1;
    read.functions[0].ops[last].args.insert("x".into(), Arg::Value(state));
    refused(&read, &Rules::ANE, "`x` takes Value");
}

#[test]
fn weight_files_must_be_inside_their_folder() {
    let weight = |file: &str, offset, shape: &[usize]| {
        let weight =
            WeightRef { name: "w".into(), file: file.into(), offset, shape: shape.to_vec(), blocks: None };
        program(|b, x| {
            let w = b.weight(&weight).unwrap();
            b.binary(OpKind::Mul, x, w).unwrap()
        })
    };
    weight("layer0/w.bin", 6, &[4]).verify(&Rules::ANE).unwrap();
    for file in ["../w.bin", "/etc/passwd", "a/../../w.bin", ""] {
        refused(&weight(file, 0, &[4]), &Rules::ANE, "outside of the weights");
    }
    refused(&weight("w.bin", 3, &[4]), &Rules::ANE, "at byte 3");
    refused(&weight("w.bin", u64::MAX - 1, &[4]), &Rules::ANE, "at byte 18446744073709551614");
}

/// An operator, its arguments, and expected words of the error.
type Case = (OpKind, Vec<(&'static str, Arg)>, &'static str);

#[test]
fn mismatched_shapes_are_rejected_by_the_builder() {
    let mut weights = Vec::new();
    let mut b = FunctionBuilder::new("f", &mut weights);
    let x = b.input("x", &[2, 3, 4]);
    let ints = |list: &[usize]| Arg::Ints(list.to_vec());
    let cases: Vec<Case> = vec![
        (OpKind::Transpose, vec![("perm", ints(&[0, 1, 1]))], "axes [0, 1, 1]"),
        (OpKind::Transpose, vec![("perm", ints(&[0, 1]))], "does not order"),
        (OpKind::Reshape, vec![("shape", ints(&[5, 5]))], "has other elements"),
        (OpKind::Squeeze, vec![("axes", ints(&[1]))], "is not 1"),
        (OpKind::ExpandDims, vec![("axes", ints(&[9]))], "axes [9]"),
        (OpKind::SliceBySize, vec![("begin", ints(&[1, 0, 0])), ("size", ints(&[2, 3, 4]))], "is outside of"),
        (
            OpKind::SliceBySize,
            vec![("begin", ints(&[usize::MAX, 0, 0])), ("size", ints(&[2, 3, 4]))],
            "is outside of",
        ),
        (OpKind::Split, vec![("split_sizes", ints(&[1, 1])), ("axis", Arg::Int(1))], "do not add up"),
        (OpKind::Softmax, vec![("axis", Arg::Int(3))], "axis"),
        (OpKind::Tile, vec![("reps", ints(&[1]))], "repetitions"),
        (OpKind::Conv, vec![("weight", Arg::Value(x))], "1×1 convolution"),
        (
            OpKind::Matmul,
            vec![("y", Arg::Value(x)), ("transpose_x", Arg::Bool(false)), ("transpose_y", Arg::Bool(false))],
            "a product over 4 and 3 channels",
        ),
    ];
    for (op, mut args, what) in cases {
        args.push(("x", Arg::Value(x)));
        let error = b.op(op, &args).unwrap_err().to_string();
        assert!(error.contains(what), "{}: {error}", op.name());
    }
    let y = b.input("y", &[5, 4]);
    let error = b.binary(OpKind::Add, x, y).unwrap_err().to_string();
    assert!(error.contains("[2, 3, 4] and [5, 4] do not broadcast"), "{error}");
    let error = b.concat(&[x, y], 0).unwrap_err().to_string();
    assert!(error.contains("does not join"), "{error}");
}
