//! Tests of every operator, with numbers computed by hand.

use crate::builder::{Arg, Builder, eval, flag, flags, halves, int, ints, name, run, tensor, text, ty};
use moec_coreml::exec::{ExecError, Executor, Fault, operators};
use moec_coreml::package::Dtype;

/// Whether numbers are equal up to fp16 rounding.
fn near(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= b.abs() * 1e-3 + 1e-6)
}

fn check(kind: &str, x: (&[usize], &[f32]), args: &[(&str, Arg)], shape: &[usize], expect: &[f32]) {
    let y = eval(kind, x, args, shape).unwrap_or_else(|e| panic!("{kind}: {e}"));
    assert!(near(&y, expect), "{kind}: {y:?}, expected {expect:?}");
}

fn fault(kind: &str, x: (&[usize], &[f32]), args: &[(&str, Arg)], shape: &[usize]) -> Fault {
    match eval(kind, x, args, shape) {
        Err(ExecError::Op { fault, .. }) => fault,
        other => panic!("{kind}: {other:?}"),
    }
}

const V: (&[usize], &[f32]) = (&[4], &[-2.0, -0.5, 0.0, 1.5]);
/// 0 to 5 in two rows.
const M: (&[usize], &[f32]) = (&[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);

#[test]
fn unary_operators_are_evaluated() {
    let table: [(&str, [f32; 4]); 11] = [
        ("abs", [2.0, 0.5, 0.0, 1.5]),
        ("exp", [0.135_335_3, 0.606_530_7, 1.0, 4.481_689]),
        ("identity", [-2.0, -0.5, 0.0, 1.5]),
        ("relu", [0.0, 0.0, 0.0, 1.5]),
        ("sigmoid", [0.119_202_9, 0.377_540_7, 0.5, 0.817_574_5]),
        ("silu", [-0.238_405_8, -0.188_770_3, 0.0, 1.226_361_7]),
        ("square", [4.0, 0.25, 0.0, 2.25]),
        ("tanh", [-0.964_027_6, -0.462_117_2, 0.0, 0.905_148_3]),
        ("gelu", [-0.045_500_3, -0.154_268_8, 0.0, 1.399_789_2]),
        ("softmax", [0.021_745_7, 0.097_457_3, 0.160_679_9, 0.720_117_2]),
        ("layer_norm", [-1.399_995_5, -0.199_999_4, 0.199_999_4, 1.399_995_5]),
    ];
    for (kind, expect) in table {
        check(kind, V, &[], V.0, &expect);
    }
    check(
        "gelu",
        V,
        &[("mode", text("TANH_APPROXIMATION"))],
        V.0,
        &[-0.045_402_3, -0.154_286, 0.0, 1.399_572],
    );
    check(
        "gelu",
        V,
        &[("mode", text("SIGMOID_APPROXIMATION"))],
        V.0,
        &[-0.064_341_4, -0.149_611_6, 0.0, 1.391_662],
    );
    check(
        "clip",
        V,
        &[("alpha", halves(&[], &[-1.0])), ("beta", halves(&[], &[1.0]))],
        V.0,
        &[-1.0, -0.5, 0.0, 1.0],
    );
    check("sqrt", (&[2], &[4.0, 2.0]), &[], &[2], &[2.0, std::f32::consts::SQRT_2]);
    check("rsqrt", (&[2], &[3.0, 0.0]), &[("epsilon", halves(&[], &[1.0]))], &[2], &[0.5, 1.0]);
    assert!(matches!(fault("sqrt", V, &[], V.0), Fault::Overflow { index: 0, .. }));
}

#[test]
fn binary_operators_broadcast() {
    let y = ("y", halves(&[2, 1], &[2.0, -1.0]));
    for (kind, expect) in [
        ("add", [2.0, 3.0, 4.0, 2.0, 3.0, 4.0]),
        ("sub", [-2.0, -1.0, 0.0, 4.0, 5.0, 6.0]),
        ("mul", [0.0, 2.0, 4.0, -3.0, -4.0, -5.0]),
        ("real_div", [0.0, 0.5, 1.0, -3.0, -4.0, -5.0]),
        ("maximum", [2.0, 2.0, 2.0, 3.0, 4.0, 5.0]),
        ("minimum", [0.0, 1.0, 2.0, -1.0, -1.0, -1.0]),
    ] {
        check(kind, M, std::slice::from_ref(&y), M.0, &expect);
    }
    check("mul", (&[], &[3.0]), &[("y", halves(&[2], &[1.0, 2.0]))], &[2], &[3.0, 6.0]);
    assert!(matches!(fault("add", M, &[("y", halves(&[2], &[1.0, 2.0]))], M.0), Fault::Argument { .. }));
    assert!(matches!(fault("add", M, &[("y", ints(&[1, 2, 3]))], M.0), Fault::Argument { .. }), "integers");
}

#[test]
fn reductions() {
    let over = |axes: &[i32]| [("axes", ints(axes)), ("keep_dims", flag(true))];
    check("reduce_sum", M, &over(&[-1]), &[2, 1], &[3.0, 12.0]);
    check("reduce_mean", M, &over(&[0]), &[1, 3], &[1.5, 2.5, 3.5]);
    check("reduce_max", M, &over(&[0, 1]), &[1, 1], &[5.0]);
    check("reduce_sum", M, &[], &[], &[15.0]);
    check("reduce_mean", M, &[("axes", ints(&[1]))], &[2], &[1.0, 4.0]);
    check(
        "softmax",
        (&[2, 2], &[0.0, 3.0, 0.0, 1.0]),
        &[("axis", int(0))],
        &[2, 2],
        &[0.5, 0.880_797, 0.5, 0.119_202_9],
    );
    let affine = [
        ("axes", ints(&[0])),
        ("gamma", halves(&[2], &[1.0, 2.0])),
        ("beta", halves(&[2], &[0.5, 0.0])),
        ("epsilon", halves(&[], &[0.0])),
    ];
    check("layer_norm", M, &affine, M.0, &[-0.5, -0.5, -0.5, 2.0, 2.0, 2.0]);
    assert!(matches!(fault("reduce_sum", M, &over(&[2]), M.0), Fault::Argument { parameter: "axes", .. }));
    assert!(matches!(
        fault("reduce_sum", M, &over(&[0, -2]), M.0),
        Fault::Argument { parameter: "axes", .. }
    ));
}

#[test]
fn slices_and_gathers_are_evaluated() {
    let by_size = |b: &[i32], s: &[i32]| [("begin", ints(b)), ("size", ints(s))];
    check("slice_by_size", M, &by_size(&[1, 0], &[1, 2]), &[1, 2], &[3.0, 4.0]);
    check("slice_by_size", M, &by_size(&[0, 1], &[-1, -1]), &[2, 2], &[1.0, 2.0, 4.0, 5.0]);
    assert!(matches!(fault("slice_by_size", M, &by_size(&[0, 2], &[1, 2]), &[1, 2]), Fault::Argument { .. }));
    let by_index = |b: &[i32], e: &[i32]| vec![("begin", ints(b)), ("end", ints(e))];
    check("slice_by_index", M, &by_index(&[0, -2], &[2, i32::MAX]), &[2, 2], &[1.0, 2.0, 4.0, 5.0]);
    let strided = [by_index(&[0, 0], &[1, 3]), vec![("stride", ints(&[1, 2]))]].concat();
    check("slice_by_index", M, &strided, &[1, 2], &[0.0, 2.0]);
    let squeezed = [
        by_index(&[-1, 0], &[0, 0]),
        vec![("squeeze_mask", flags(&[true, false])), ("end_mask", flags(&[false, true]))],
    ]
    .concat();
    check("slice_by_index", M, &squeezed, &[3], &[3.0, 4.0, 5.0]);
    let begins = [by_index(&[1, 1], &[2, 1]), vec![("begin_mask", flags(&[false, true]))]].concat();
    check("slice_by_index", M, &begins, &[1, 1], &[3.0]);
    assert!(matches!(
        fault("slice_by_index", M, &by_index(&[1, 0], &[1, 3]), &[1, 3]),
        Fault::Argument { .. }
    ));
    let update = [by_index(&[0, 1], &[2, 2]), vec![("update", halves(&[2, 1], &[8.0, 9.0]))]].concat();
    check("slice_update", M, &update, M.0, &[0.0, 8.0, 2.0, 3.0, 9.0, 5.0]);
}

#[test]
fn transposes_and_reshapes_are_evaluated() {
    check("transpose", M, &[("perm", ints(&[1, 0]))], &[3, 2], &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    check("reshape", M, &[("shape", ints(&[3, -1]))], &[3, 2], M.1);
    check("expand_dims", M, &[("axes", ints(&[0, -1]))], &[1, 2, 3, 1], M.1);
    check("squeeze", (&[1, 2, 1], &[1.0, 2.0]), &[("axes", ints(&[0]))], &[2, 1], &[1.0, 2.0]);
    check("squeeze", (&[1, 2, 1], &[1.0, 2.0]), &[], &[2], &[1.0, 2.0]);
    check(
        "tile",
        (&[1, 2], &[1.0, 2.0]),
        &[("reps", ints(&[2, 2]))],
        &[2, 4],
        &[1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0],
    );
    assert!(matches!(fault("tile", M, &[("reps", ints(&[i32::MAX, 1]))], M.0), Fault::Argument { .. }));
    assert!(matches!(fault("transpose", M, &[("perm", ints(&[0, 0]))], M.0), Fault::Argument { .. }));
    assert!(matches!(fault("reshape", M, &[("shape", ints(&[4, -1]))], &[4, 1]), Fault::Argument { .. }));
}

#[test]
fn tensors_are_joined_and_split() {
    let (half, row) = (|s: &[usize]| ty(Dtype::F16, s), [1.0, 2.0, 3.0, 4.0]);
    let package = Builder::default()
        .input("x", &half(&[2, 2]))
        .op(
            "split",
            &[("x", name("x")), ("num_splits", int(2)), ("axis", int(1))],
            &[("a", half(&[2, 1])), ("b", half(&[2, 1]))],
        )
        .op(
            "split",
            &[("x", name("x")), ("split_sizes", ints(&[1, 1])), ("axis", int(0))],
            &[("c", half(&[1, 2])), ("d", half(&[1, 2]))],
        )
        .op(
            "concat",
            &[("values", Arg::Names(vec!["b", "x", "a"])), ("axis", int(-1))],
            &[("y", half(&[2, 4]))],
        )
        .op(
            "concat",
            &[("values", Arg::Names(vec!["d", "c"])), ("axis", int(0)), ("interleave", flag(false))],
            &[("z", half(&[2, 2]))],
        )
        .output("y", &half(&[2, 4]))
        .output("z", &half(&[2, 2]))
        .open();
    let out = run(&package, &[("x", tensor(&half(&[2, 2]), &row))]).expect("runs");
    assert_eq!(out["y"].to_f32(), [2.0, 1.0, 2.0, 1.0, 4.0, 3.0, 4.0, 3.0]);
    assert_eq!(out["z"].to_f32(), [3.0, 4.0, 1.0, 2.0]);
}

#[test]
fn matrix_products_are_evaluated() {
    let w = ("weight", halves(&[2, 3], &[1.0, 0.0, 2.0, -1.0, 1.0, 0.5]));
    let bias = ("bias", halves(&[2], &[10.0, 20.0]));
    check("linear", M, &[w.clone(), bias.clone()], &[2, 2], &[14.0, 22.0, 23.0, 23.5]);
    check("linear", M, &[w], &[2, 2], &[4.0, 2.0, 13.0, 3.5]);
    // One image with three channels and two pixels; then two images of one pixel each.
    let w = ("weight", halves(&[2, 3, 1, 1], &[1.0, 0.0, 2.0, -1.0, 1.0, 0.5]));
    check("conv", (&[1, 3, 1, 2], M.1), &[w.clone(), bias], &[1, 2, 1, 2], &[18.0, 21.0, 24.0, 24.5]);
    check("conv", (&[2, 3, 1, 1], M.1), &[w], &[2, 2, 1, 1], &[4.0, 2.0, 13.0, 3.5]);
    let grouped = [("weight", halves(&[2, 2, 1], &[1.0, 2.0, 3.0, 4.0])), ("groups", int(2))];
    check("conv", (&[1, 4, 1], &[1.0, 2.0, 3.0, 4.0]), &grouped, &[1, 2, 1], &[5.0, 25.0]);
    let wide = [("weight", halves(&[1, 1, 3], &[1.0; 3]))];
    assert!(matches!(
        fault("conv", (&[1, 1, 3], &[1.0; 3]), &wide, &[1, 1, 1]),
        Fault::Argument { parameter: "weight", .. }
    ));
    let y = |shape: &[usize]| ("y", halves(shape, &[1.0, 0.0, 2.0, -1.0, 1.0, 0.5]));
    check("matmul", M, &[y(&[3, 2])], &[2, 2], &[4.0, 0.0, 16.0, -1.5]);
    check("matmul", M, &[y(&[2, 3]), ("transpose_y", flag(true))], &[2, 2], &[4.0, 2.0, 13.0, 3.5]);
    check(
        "matmul",
        M,
        &[y(&[2, 3]), ("transpose_x", flag(true))],
        &[3, 3],
        &[-3.0, 3.0, 1.5, -3.0, 4.0, 4.0, -3.0, 5.0, 6.5],
    );
    // Both matrices of `x` are multiplied by the only one of `y`.
    check("matmul", (&[2, 1, 3], M.1), &[y(&[1, 3, 2])], &[2, 1, 2], &[4.0, 0.0, 16.0, -1.5]);
    assert!(matches!(fault("matmul", M, &[y(&[2, 3])], &[2, 3]), Fault::Argument { .. }));
}

#[test]
fn casts_round_to_fp16_and_toward_zero() {
    let (half, int32) = (ty(Dtype::F16, &[3]), ty(Dtype::I32, &[3]));
    let package = Builder::default()
        .input("x", &half)
        .input("i", &int32)
        .op("cast", &[("x", name("x")), ("dtype", text("int32"))], &[("a", int32.clone())])
        .op("cast", &[("x", name("i")), ("dtype", text("fp16"))], &[("b", half.clone())])
        .op("cast", &[("x", name("b")), ("dtype", text("fp32"))], &[("c", ty(Dtype::F32, &[3]))])
        .output("a", &int32)
        .output("c", &ty(Dtype::F32, &[3]))
        .open();
    let inputs = [("x", tensor(&half, &[1.75, -1.75, 0.0])), ("i", tensor(&int32, &[2049.0, -7.0, 0.0]))];
    let out = run(&package, &inputs).expect("runs");
    assert_eq!(out["a"].to_f32(), [1.0, -1.0, 0.0]);
    assert_eq!(out["c"].to_f32(), [2048.0, -7.0, 0.0]);
}

#[test]
fn values_between_operations_are_rounded_to_fp16() {
    // 2048 + 1 is 2048 in fp16, in f32 it would be 2049.
    let t = ty(Dtype::F16, &[1]);
    let package = Builder::default()
        .input("x", &t)
        .op("add", &[("x", name("x")), ("y", halves(&[1], &[1.0]))], &[("sum", t.clone())])
        .op("sub", &[("x", name("sum")), ("y", name("x"))], &[("y", t.clone())])
        .output("y", &t)
        .open();
    assert_eq!(run(&package, &[("x", tensor(&t, &[2048.0]))]).expect("runs")["y"].to_f32(), [0.0]);
}

#[test]
fn unknown_operators_and_parameters_are_rejected_by_name() {
    let error = eval("topk", V, &[], V.0).expect_err("refused").to_string();
    assert!(error.contains("topk `y`") && operators().iter().all(|op| error.contains(op)), "{error}");
    let error = fault("relu", V, &[("slope", halves(&[], &[0.1]))], V.0);
    assert_eq!(error, Fault::UnknownParameter("slope".into()));
    assert_eq!(fault("add", V, &[], V.0), Fault::Missing("y"));
    assert!(matches!(fault("relu", V, &[], &[2, 2]), Fault::Declared { .. }));
}

#[test]
fn inputs_must_be_those_of_the_function() {
    let t = ty(Dtype::F16, &[2]);
    let package = Builder::default()
        .input("x", &t)
        .op("relu", &[("x", name("x"))], &[("y", t.clone())])
        .output("y", &t)
        .open();
    let given = |inputs: &[_]| run(&package, inputs).expect_err("refused").to_string();
    assert!(given(&[]).contains("input `x`: it is missing"));
    assert!(given(&[("x", tensor(&ty(Dtype::F16, &[1]), &[0.0]))]).contains("fp16[1] in place of fp16[2]"));
    assert!(given(&[("x", tensor(&t, &[0.0, f32::INFINITY]))]).contains("element 1 is not finite"));
    assert!(given(&[("x", tensor(&t, &[0.0; 2])), ("z", tensor(&t, &[0.0; 2]))]).contains("`z`"));
    assert!(matches!(Executor::new(&package, Some("cap16")), Err(ExecError::NoFunction { .. })));
}
