//! Weight expressions: a rectangle equals the same rectangle of the whole, and nothing else is read.

use crate::common::{GeneratedSource, leaf, number};
use moec_ir::text::parse_expr;
use moec_ir::{Axis, Elementwise, WeightExpr};
use proptest::prelude::*;

/// One number of an expression, computed by definition.
fn at(expr: &WeightExpr, matrix: usize, row: usize, col: usize) -> f32 {
    let rank = |e: &WeightExpr| e.shape().unwrap().len();
    let extent = |e: &WeightExpr, axis: Axis| {
        let shape = e.shape().unwrap();
        shape.iter().rev().nth(usize::from(axis == Axis::Rows)).copied().unwrap_or(1)
    };
    match expr {
        WeightExpr::Leaf(leaf) => number(&leaf.tensor, matrix, row, col),
        WeightExpr::Const(values) => values[col],
        WeightExpr::Transpose(of) => at(of, matrix, col, row),
        WeightExpr::Slice { axis: Axis::Rows, start, step, of, .. } => {
            at(of, matrix, start + row * step, col)
        }
        WeightExpr::Slice { axis: Axis::Cols, start, step, of, .. } => {
            at(of, matrix, row, start + col * step)
        }
        WeightExpr::Concat { axis, of } => {
            let (mut row, mut col) = (row, col);
            for part in of {
                let n = extent(part, *axis);
                let i = if *axis == Axis::Rows { &mut row } else { &mut col };
                if *i < n {
                    return at(part, matrix, row, col);
                }
                *i -= n;
            }
            unreachable!()
        }
        WeightExpr::Stack(of) if rank(&of[0]) == 1 => at(&of[row], 0, 0, col),
        WeightExpr::Stack(of) => at(&of[matrix], 0, row, col),
        WeightExpr::Split { heads, of } => at(of, 0, matrix * (extent(of, Axis::Rows) / heads) + row, col),
        WeightExpr::Join(of) => {
            let each = extent(of, Axis::Rows);
            at(of, row / each, row % each, col)
        }
        WeightExpr::ScaleMatrices { of, by } => at(of, matrix, row, col) * at(by, 0, 0, matrix),
        WeightExpr::Repeat { each, of } => at(of, 0, 0, col / each),
        WeightExpr::Map { map, of } => map.of(at(of, matrix, row, col)),
        WeightExpr::Arrange { order, of } => {
            at(of, matrix, order[matrix * extent(of, Axis::Rows) + row] as usize, col)
        }
        WeightExpr::ScaleCols { of, by } => at(of, matrix, row, col) * at(by, 0, 0, col),
    }
}

/// Expressions of this shape, nested up to `depth`.
fn expr(shape: Vec<usize>, depth: u32) -> BoxedStrategy<WeightExpr> {
    let name = prop_oneof![Just("a"), Just("b.c"), Just("d \"e\"\\\n")];
    let plain = name.prop_map({
        let shape = shape.clone();
        move |name| leaf(name, &shape)
    });
    if depth == 0 {
        return plain.boxed();
    }
    let n = shape.len();
    let (axis, i) = if n > 1 { (Axis::Rows, n - 2) } else { (Axis::Cols, n - 1) };
    let mut options = vec![plain.boxed()];
    for (axis, i) in [(axis, i), (Axis::Cols, n - 1)] {
        let shape = shape.clone();
        let sliced = (0..3_usize, 1..7_usize).prop_flat_map({
            let shape = shape.clone();
            move |(start, step)| {
                let mut whole = shape.clone();
                whole[i] = start + (shape[i] - 1) * step + 2;
                let len = shape[i];
                expr(whole, depth - 1).prop_map(move |of| WeightExpr::Slice {
                    axis,
                    start,
                    step,
                    len,
                    of: Box::new(of),
                })
            }
        });
        options.push(sliced.boxed());
        if shape[i] > 1 {
            let joined = (1..shape[i]).prop_flat_map(move |first| {
                let (mut a, mut b) = (shape.clone(), shape.clone());
                a[i] = first;
                b[i] -= first;
                (expr(a, depth - 1), expr(b, depth - 1))
                    .prop_map(move |(a, b)| WeightExpr::Concat { axis, of: vec![a, b] })
            });
            options.push(joined.boxed());
        }
    }
    let scaled = (expr(shape.clone(), depth - 1), expr(vec![shape[n - 1]], 0));
    options.push(
        scaled.prop_map(|(of, by)| WeightExpr::ScaleCols { of: Box::new(of), by: Box::new(by) }).boxed(),
    );
    if n > 1 {
        let mut swapped = shape.clone();
        swapped.swap(n - 1, n - 2);
        options.push(expr(swapped, depth - 1).prop_map(|of| WeightExpr::Transpose(Box::new(of))).boxed());
        let (rows, matrices) = (shape[n - 2] as u32, if n > 2 { shape[0] } else { 1 });
        let orders = prop::collection::vec(Just((0..rows).collect::<Vec<_>>()).prop_shuffle(), matrices);
        options.push(
            (orders, expr(shape.clone(), depth - 1))
                .prop_map(|(order, of)| WeightExpr::Arrange { order: order.concat(), of: Box::new(of) })
                .boxed(),
        );
        let parts = prop::collection::vec(expr(shape[1..].to_vec(), depth - 1), shape[0]);
        options.push(parts.prop_map(WeightExpr::Stack).boxed());
    }
    let map = (prop::sample::select(Elementwise::ALL.to_vec()), expr(shape.clone(), depth - 1));
    options.push(map.prop_map(|(map, of)| WeightExpr::Map { map, of: Box::new(of) }).boxed());
    if let [rows, cols] = shape[..] {
        let heads =
            prop::sample::select((1..=rows).filter(|heads| rows.is_multiple_of(*heads)).collect::<Vec<_>>());
        let of = heads.prop_flat_map(move |heads| expr(vec![heads, rows / heads, cols], depth - 1));
        options.push(of.prop_map(|of| WeightExpr::Join(Box::new(of))).boxed());
    }
    if let [heads, rows, cols] = shape[..] {
        let of = expr(vec![heads * rows, cols], depth - 1);
        options.push(of.prop_map(move |of| WeightExpr::Split { heads, of: Box::new(of) }).boxed());
    }
    if n == 1 {
        let values = prop::collection::vec(prop::num::f32::NORMAL | prop::num::f32::INFINITE, shape[0]);
        options.push(values.prop_map(WeightExpr::Const).boxed());
    }
    prop::strategy::Union::new(options).boxed()
}

fn any_expr() -> impl Strategy<Value = WeightExpr> {
    prop::collection::vec(1..5_usize, 1..=3).prop_flat_map(|shape| expr(shape, 3))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn rectangle_reads_equal_the_definition(e in any_expr(), seed in any::<[u8; 5]>()) {
        let shape = e.shape().unwrap();
        let axis = |i: usize| shape.iter().rev().nth(i).copied().unwrap_or(1);
        let pick = |n: usize, a: u8, b: u8| {
            let (a, b) = (a as usize % (n + 1), b as usize % (n + 1));
            a.min(b)..a.max(b)
        };
        let matrix = seed[0] as usize % axis(2);
        let rows = pick(axis(1), seed[1], seed[2]);
        let cols = pick(axis(0), seed[3], seed[4]);
        let mut out = vec![f32::NAN; rows.len() * cols.len()];
        e.read(matrix, rows.clone(), cols.clone(), &GeneratedSource::default(), &mut out).unwrap();
        let want: Vec<f32> = rows.flat_map(|r| cols.clone().map(move |c| (r, c))).map(|(r, c)| at(&e, matrix, r, c)).collect();
        prop_assert_eq!(out, want);
    }

    #[test]
    fn text_round_trips(e in any_expr()) {
        prop_assert_eq!(parse_expr(&e.to_string()).unwrap(), e);
    }
}

fn reads(expr: &WeightExpr, matrix: usize, rows: std::ops::Range<usize>) -> Vec<String> {
    let source = GeneratedSource::default();
    let cols = expr.shape().unwrap().last().copied().unwrap();
    let mut out = vec![0.0; rows.len() * cols];
    expr.read(matrix, rows, 0..cols, &source, &mut out).unwrap();
    source
        .reads
        .into_inner()
        .unwrap()
        .into_iter()
        .map(|(n, l, r, c)| format!("{n} {l} {r:?} {c:?}"))
        .collect()
}

#[test]
fn rows_of_an_expression_read_each_leaf_once() {
    let gate_up = parse_expr(
        "stack(concat rows(t\"g0\"[6, 8], t\"u0\"[6, 8]), concat rows(t\"g1\"[6, 8], t\"u1\"[6, 8]))",
    );
    assert_eq!(reads(&gate_up.unwrap(), 1, 4..9), ["g1 0 4..6 0..8", "u1 0 0..3 0..8"]);
    let odd = parse_expr("slice rows 1:3:2 (t\"w\"[6, 8])").unwrap();
    assert_eq!(reads(&odd, 0, 0..3), ["w 0 1..6 0..8"]);
    let split = parse_expr("slice rows 2:2:1 (split 3 (t\"w\"[12, 8]))").unwrap();
    assert_eq!(reads(&split, 2, 0..2), ["w 0 10..12 0..8"]);
    assert_eq!(reads(&split, 2, 1..1), [""; 0]);
}

#[test]
fn leaves_are_listed_in_order() {
    let e = parse_expr("scale_cols(concat cols(t\"a\"[2, 3], transpose(t\"b\"[1, 2])), t\"s\"[4])").unwrap();
    assert_eq!(e.shape().unwrap(), [2, 4]);
    assert_eq!(e.leaves().map(|l| l.tensor.as_str()).collect::<Vec<_>>(), ["a", "b", "s"]);
}

#[test]
fn ill_formed_expressions_have_no_shape() {
    for text in [
        "const []",
        "t\"a\"[]",
        "t\"a\"[1, 2, 3, 4]",
        "t\"a\"[0]",
        "t\"a\"[18446744073709551615, 18446744073709551615]",
        "transpose(t\"a\"[4])",
        "slice rows 0:1:1 (t\"a\"[4])",
        "slice cols 0:3:2 (t\"a\"[4])",
        "slice cols 0:0:1 (t\"a\"[4])",
        "slice cols 1:2:18446744073709551615 (t\"a\"[4])",
        "concat rows(t\"a\"[4], t\"a\"[4])",
        "concat rows()",
        "concat cols(t\"a\"[4, 2], t\"a\"[2, 4])",
        "stack(t\"a\"[4], t\"a\"[5])",
        "split 3(t\"a\"[4, 2])",
        "split 0(t\"a\"[4, 2])",
        "scale_cols(t\"a\"[4, 2], t\"a\"[4])",
    ] {
        let e = parse_expr(text).unwrap();
        assert!(e.shape().is_err(), "{text}");
        // Reading may fail, but must not panic.
        let _ = e.read(0, 0..1, 0..1, &Quiet, &mut [0.0]);
        let _ = e.read(1, 0..2, 1..2, &Quiet, &mut [0.0; 2]);
    }
    let e = leaf("a", &[2, 3]);
    assert!(e.read(0, 0..3, 0..1, &Quiet, &mut [0.0; 3]).is_err());
    assert!(e.read(1, 0..1, 0..1, &Quiet, &mut [0.0]).is_err());
    assert!(e.read(0, 0..1, 0..1, &Quiet, &mut []).is_err());
}

/// A source that accepts every read and writes nothing.
struct Quiet;

impl moec_ir::Source for Quiet {
    fn read(
        &self,
        _: &moec_ir::Leaf,
        _: usize,
        _: std::ops::Range<usize>,
        _: std::ops::Range<usize>,
        _: &mut [f32],
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(())
    }
}
