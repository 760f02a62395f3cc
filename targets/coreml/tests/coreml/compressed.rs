//! Compressed weights, with results computed by hand.

use crate::builder::{Arg, Builder, halves, int, name, raw, run, tensor, ty};
use moec_coreml::exec::{ExecError, Executor, Fault};
use moec_coreml::package::Dtype;

/// The dense weights, multiplied by one.
fn dense(kind: &str, args: &[(&str, Arg)], shape: &[usize]) -> Result<Vec<f32>, ExecError> {
    let (t, one) = (ty(Dtype::F16, shape), ty(Dtype::F16, &[1]));
    let package = Builder::default()
        .input("one", &one)
        .op(kind, args, &[("w", t.clone())])
        .op("mul", &[("x", name("w")), ("y", name("one"))], &[("y", t.clone())])
        .output("y", &t)
        .open();
    Ok(run(&package, &[("one", tensor(&one, &[1.0]))])?["y"].to_f32())
}

#[test]
fn quantized_blocks_share_a_scale_and_an_offset() {
    // int4, lowest bits first: 1, -1, 7, -8.
    let data = ("data", raw(Dtype::I4, &[1, 4], vec![0xF1, 0x87]));
    let scale = ("scale", halves(&[1, 2], &[0.5, 2.0]));
    let y = dense("constexpr_blockwise_shift_scale", &[data.clone(), scale.clone()], &[1, 4]);
    assert_eq!(y.expect("runs"), [0.5, -0.5, 14.0, -16.0]);
    let offset = ("offset", raw(Dtype::I4, &[1, 2], vec![0x21]));
    let y = dense("constexpr_blockwise_shift_scale", &[data.clone(), scale, offset], &[1, 4]);
    assert_eq!(y.expect("runs"), [0.0, -1.0, 10.0, -20.0]);
    let odd = ("scale", halves(&[1, 3], &[1.0; 3]));
    let error = dense("constexpr_blockwise_shift_scale", &[data, odd], &[1, 4]).expect_err("refused");
    assert!(matches!(error, ExecError::Op { fault: Fault::Argument { parameter: "scale", .. }, .. }));
}

#[test]
fn quantized_bytes_are_scaled_along_an_axis() {
    let data = ("quantized_data", raw(Dtype::U8, &[2, 2], vec![0, 128, 255, 130]));
    let args = [
        data,
        ("scale", halves(&[2], &[0.5, 0.25])),
        ("zero_point", raw(Dtype::U8, &[2], vec![128, 130])),
        ("axis", int(0)),
    ];
    assert_eq!(dense("constexpr_affine_dequantize", &args, &[2, 2]).expect("runs"), [-64.0, 0.0, 31.25, 0.0]);
}

#[test]
fn indices_select_entries_of_lookup_tables() {
    // Two groups of one row each, with tables of four entries; 2-bit indices 2, 3 and 1, 0.
    let indices = ("indices", raw(Dtype::U2, &[2, 2], vec![0b00_01_11_10]));
    let lut = ("lut", halves(&[2, 1, 4, 1], &[1.0, 5.0, 9.0, 13.0, 2.0, 10.0, 18.0, 26.0]));
    assert_eq!(
        dense("constexpr_lut_to_dense", &[indices, lut], &[2, 2]).expect("runs"),
        [9.0, 13.0, 10.0, 2.0]
    );
    // Vectors of three along each axis; indices 0, 1 over 1, 0.
    let indices = ("indices", raw(Dtype::U1, &[2, 2], vec![0b0110]));
    let lut = ("lut", halves(&[1, 1, 2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    let along = |axis| [indices.clone(), lut.clone(), ("vector_axis", int(axis))];
    assert_eq!(
        dense("constexpr_lut_to_dense", &along(1), &[2, 6]).expect("runs"),
        [1., 2., 3., 4., 5., 6., 4., 5., 6., 1., 2., 3.]
    );
    assert_eq!(
        dense("constexpr_lut_to_dense", &along(0), &[6, 2]).expect("runs"),
        [1., 4., 2., 5., 3., 6., 4., 1., 5., 2., 6., 3.]
    );
}

#[test]
fn weights_are_made_dense_when_a_function_is_loaded() {
    let t = ty(Dtype::F16, &[1, 2]);
    let package = Builder::default()
        .input("x", &t)
        .op(
            "constexpr_blockwise_shift_scale",
            &[("data", raw(Dtype::I8, &[1, 2], vec![127, 1])), ("scale", halves(&[1, 1], &[60000.0]))],
            &[("w", t.clone())],
        )
        .op("add", &[("x", name("x")), ("y", name("w"))], &[("y", t.clone())])
        .output("y", &t)
        .open();
    let error = Executor::new(&package, None).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(
        error.contains("constexpr_blockwise_shift_scale `w`") && error.contains("not finite in fp16"),
        "{error}"
    );
}
