//! States persist between calls, and only successful calls change them.

use crate::builder::{Arg, Builder, flags, ints, model, name, tensor, ty};
use moec_coreml::exec::ExecError;
use moec_coreml::exec::{Executor, Fault, States};
use moec_coreml::package::Dtype;
use std::collections::BTreeMap;
use std::sync::Arc;

/// `sum += x`, and the sum is the output.
fn counter() -> Builder {
    let t = ty(Dtype::F16, &[2]);
    Builder::default()
        .input("x", &t)
        .state("sum", &t)
        .op("read_state", &[("input", name("sum"))], &[("old", t.clone())])
        .op("add", &[("x", name("old")), ("y", name("x"))], &[("new", t.clone())])
        .op("write_state", &[("input", name("sum")), ("data", name("new"))], &[])
        .op("mul", &[("x", name("new")), ("y", name("x"))], &[("y", t.clone())])
        .output("y", &t)
}

#[test]
fn state_keeps_the_value_of_the_last_call() {
    let package = counter().open();
    let executor = Executor::new(&package, None).expect("loads");
    let mut states = States::default();
    let x = |a, b| BTreeMap::from([("x".to_owned(), tensor(&ty(Dtype::F16, &[2]), &[a, b]))]);
    for (given, out, sum) in [([1.0, 2.0], [1.0, 4.0], [1.0, 2.0]), ([3.0, -1.0], [12.0, -1.0], [4.0, 1.0])] {
        let outputs = executor.run(&x(given[0], given[1]), &mut states).expect("runs");
        assert_eq!(outputs["y"].to_f32(), out);
        assert_eq!(states.get("sum").expect("written").to_f32(), sum);
    }
    // The state is written before the operation that overflows.
    let error = executor.run(&x(300.0, 300.0), &mut states).expect_err("overflows");
    assert!(matches!(error, ExecError::Op { fault: Fault::Overflow { index: 0, .. }, .. }), "{error}");
    assert_eq!(states.get("sum").expect("kept").to_f32(), [4.0, 1.0]);
    states.set("sum", tensor(&ty(Dtype::F16, &[1]), &[0.0]));
    assert!(matches!(executor.run(&x(1.0, 1.0), &mut states), Err(ExecError::Given { what: "state", .. })));
}

#[test]
fn functions_share_states_of_equal_name() {
    let t = ty(Dtype::F16, &[2]);
    let reader = Builder::default()
        .state("sum", &t)
        .op("read_state", &[("input", name("sum"))], &[("y", t.clone())])
        .output("y", &t);
    let saved = crate::builder::Saved::new(&model(&[("write", &counter()), ("read", &reader)]), &[]);
    let package = Arc::new(saved.open().expect("opens"));
    let mut states = States::default();
    let x = BTreeMap::from([("x".to_owned(), tensor(&t, &[5.0, 6.0]))]);
    let run = |function, inputs: &_, states: &mut _| {
        Executor::new(&package, Some(function)).expect("loads").run(inputs, states).expect("runs")["y"]
            .to_f32()
    };
    assert_eq!(run("read", &BTreeMap::new(), &mut states), [0.0, 0.0], "states start as zeros");
    run("write", &x, &mut states);
    assert_eq!(run("read", &BTreeMap::new(), &mut states), [5.0, 6.0]);
}

#[test]
fn state_slice_is_updated_at_a_dynamic_position() {
    let cache = ty(Dtype::F16, &[4, 2]);
    let (row, at) = (ty(Dtype::F16, &[1, 2]), ty(Dtype::I32, &[2]));
    let package = Builder::default()
        .input("row", &row)
        .input("at", &at)
        .state("cache", &cache)
        .op("read_state", &[("input", name("cache"))], &[("old", cache.clone())])
        .op(
            "slice_update",
            &[
                ("x", name("old")),
                ("update", name("row")),
                ("begin", name("at")),
                ("end", ints(&[0, 0])),
                ("end_mask", flags(&[true, true])),
                ("stride", ints(&[4, 1])),
            ],
            &[("new", cache.clone())],
        )
        .op(
            "coreml_update_state",
            &[("state", name("cache")), ("value", Arg::Names(vec!["new"]))],
            &[("y", cache.clone())],
        )
        .output("y", &cache)
        .open();
    let executor = Executor::new(&package, None).expect("loads");
    let mut states = States::default();
    for (position, expect) in
        [(1.0, [0., 0., 7., 8., 0., 0., 0., 0.]), (3.0, [0., 0., 7., 8., 0., 0., 7., 8.])]
    {
        let inputs = BTreeMap::from([
            ("row".to_owned(), tensor(&row, &[7.0, 8.0])),
            ("at".to_owned(), tensor(&at, &[position, 0.0])),
        ]);
        assert_eq!(executor.run(&inputs, &mut states).expect("runs")["y"].to_f32(), expect);
    }
}
