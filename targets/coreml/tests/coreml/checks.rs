//! Each rule reports the packages that violate it, and no others.

use crate::builder::{Arg, Builder, Saved, halves, int, ints, model, name, text, ty};
use moec_coreml::check::{Finding, Limits, Severity, check, rules};
use moec_coreml::package::{Dtype, proto};

fn half(shape: &[usize]) -> moec_coreml::package::TensorType {
    ty(Dtype::F16, shape)
}

/// A linear layer with 16 rows that violates no rule.
fn good() -> Builder {
    let t = half(&[16, 8, 1, 1]);
    let w: Vec<f32> = (0..64).map(|i| i as f32).collect();
    Builder::default().input("x", &t).weight("w", &[8, 8, 1, 1], &w).op(
        "conv",
        &[("x", name("x")), ("weight", name("w"))],
        &[("y", t.clone())],
    )
}

fn done(f: Builder) -> Builder {
    f.output("y", &half(&[16, 8, 1, 1]))
}

/// Rules that a package violates, with severity.
fn broken(saved: &Saved, limits: &Limits) -> Vec<(&'static str, Severity)> {
    let findings: Vec<Finding> = check(&saved.open().expect("opens"), limits);
    let mut rules: Vec<_> = findings.iter().map(|f| (f.rule, f.severity)).collect();
    rules.dedup();
    rules
}

fn breaks(f: &Builder, rule: &'static str, severity: Severity) {
    assert_eq!(broken(&f.save(), &Limits::default()), [(rule, severity)]);
}

#[test]
fn a_good_package_has_no_findings() {
    assert_eq!(broken(&done(good()).save(), &Limits::default()), []);
    assert!(rules().count() >= 12);
}

#[test]
fn package_descriptions_match_their_boundaries() {
    let sound = done(good()).model();
    let change = |change: fn(&mut proto::ModelDescription), what: &str| {
        let mut model = sound.clone();
        change(model.description.as_mut().unwrap());
        let findings =
            check(&Saved::new(&model, &done(good()).weights).open().expect("opens"), &Limits::default());
        assert!(!findings.is_empty() && findings.iter().all(|f| f.rule == "about"), "{findings:?}");
        assert!(findings.iter().any(|f| f.message.contains(what)), "{findings:?}");
    };
    change(|d| d.metadata = None, "it has no author");
    change(|d| d.metadata.as_mut().unwrap().license.clear(), "it has no license");
    change(|d| d.functions[0].input[0].short_description.clear(), "it has no description");
    change(
        |d| d.functions[0].output[0].short_description = "y of [1, 2]".into(),
        "another shape than [16, 8, 1, 1]",
    );
}

/// Rows of 8 numbers of f16 are 16 bytes, rows of 4 are not.
#[test]
fn rows_at_the_boundary_are_aligned_where_the_unit_requires_it() {
    let aligned = Limits { row_bytes: 16, ..Limits::default() };
    assert_eq!(broken(&done(good()).save(), &aligned), []);
    let t = half(&[16, 4, 1, 1]);
    let w: Vec<f32> = (0..16).map(|i| i as f32).collect();
    let narrow = Builder::default().input("x", &t).weight("w", &[4, 4, 1, 1], &w);
    let conv = [("x", name("x")), ("weight", name("w"))];
    let narrow = narrow.op("conv", &conv, &[("y", t.clone())]).output("y", &t).save();
    assert_eq!(broken(&narrow, &Limits::default()), []);
    assert_eq!(broken(&narrow, &aligned), [("aligned", Severity::Warning)]);
    let findings = check(&narrow.open().expect("opens"), &aligned);
    assert_eq!(findings.len(), 2, "the input and the result: {findings:?}");
    assert!(findings[0].message.contains("rows of 8 bytes are not multiples of 16"), "{findings:?}");
}

#[test]
fn operators_and_projections() {
    use Severity::Error;
    let y = half(&[16, 8, 1, 1]);
    let more = |kind, args: &[(&str, Arg)]| done(good().op(kind, args, &[("z", y.clone())]));
    for kind in ["topk", "gather", "scatter", "custom_layer"] {
        breaks(&more(kind, &[("x", name("y"))]), "operators", Error);
    }
    let w = good().weight("v", &[8, 8], &[0.5; 64]);
    let flat = |f: Builder| {
        f.op("reshape", &[("x", name("y")), ("shape", ints(&[16, 8]))], &[("r", half(&[16, 8]))])
    };
    let linear =
        flat(w.clone()).op("linear", &[("x", name("r")), ("weight", name("v"))], &[("z", half(&[16, 8]))]);
    breaks(&done(linear), "projections", Error);
    let matmul = flat(w).op("matmul", &[("x", name("r")), ("y", name("v"))], &[("z", half(&[16, 8]))]);
    breaks(&done(matmul), "projections", Error);
    let wide = good().op(
        "conv",
        &[("x", name("y")), ("weight", halves(&[1, 8, 3, 1], &[0.0; 24]))],
        &[("z", half(&[16, 1, 1, 1]))],
    );
    breaks(&done(wide), "projections", Error);
}

#[test]
fn types_ranks_and_slices() {
    use Severity::{Error, Warning};
    let cast = |to: &str, dtype| {
        good().op("cast", &[("x", name("y")), ("dtype", text(to))], &[("z", ty(dtype, &[16, 8, 1, 1]))])
    };
    breaks(&done(cast("fp32", Dtype::F32)), "types", Error);
    breaks(&done(cast("int32", Dtype::I32)), "types", Error);
    let expand = |axes: &[i32], shape: &[usize]| {
        good().op("expand_dims", &[("x", name("y")), ("axes", ints(axes))], &[("z", half(shape))])
    };
    breaks(&done(expand(&[0], &[1, 16, 8, 1, 1])), "ranks", Warning);
    breaks(&done(expand(&[0, 1], &[1, 1, 16, 8, 1, 1])), "ranks", Error);
    let at = ty(Dtype::I32, &[4]);
    let sliced = |kind, size: &str, more: &[(&str, Arg)]| {
        let args = [&[("x", name("y")), ("begin", name("at")), (size, ints(&[16, 8, 1, 1]))], more].concat();
        done(good().input("at", &at).op(kind, &args, &[("z", half(&[16, 8, 1, 1]))]))
    };
    breaks(&sliced("slice_by_size", "size", &[]), "slices", Error);
    breaks(&sliced("slice_by_index", "end", &[]), "slices", Error);
    breaks(&sliced("slice_update", "end", &[("update", name("y"))]), "slices", Warning);
}

#[test]
fn capacities_and_grouped_convolutions() {
    let saved = |function, f: &Builder| Saved::new(&model(&[(function, f)]), &f.weights);
    let found = |function| broken(&saved(function, &done(good())), &Limits::default());
    assert_eq!(found("cap16"), []);
    for name in ["cap0", "cap8", "cap24", "cap32"] {
        assert_eq!(found(name), [("capacities", Severity::Error)], "{name}");
    }
    let rows = |n: usize| {
        let t = half(&[n, 8, 1, 1]);
        let conv = [("x", name("x")), ("weight", halves(&[8, 8, 1, 1], &[0.0; 64]))];
        Builder::default().input("x", &t).op("conv", &conv, &[("y", t.clone())]).output("y", &t)
    };
    breaks(&rows(17), "capacities", Severity::Warning);
    let (t, out) = (half(&[16, 2, 1, 1]), half(&[16, 65_536, 1, 1]));
    let grouped = Builder::default()
        .input("x", &t)
        .weight("w", &[65_536, 1, 1, 1], &vec![0.0; 65_536])
        .op("conv", &[("x", name("x")), ("weight", name("w")), ("groups", int(2))], &[("y", out.clone())])
        .output("y", &out);
    breaks(&grouped, "grouped", Severity::Error);
}

#[test]
fn states_are_few_aligned_read_and_written() {
    let state = |shape: &[usize], read: bool, write: bool| {
        let t = half(shape);
        let mut f = good().state("s", &t);
        if read {
            f = f.op("read_state", &[("input", name("s"))], &[("r", t.clone())]);
        }
        if write {
            let zeros = vec![0.0; shape.iter().product()];
            f = f.op("write_state", &[("input", name("s")), ("data", halves(shape, &zeros))], &[]);
        }
        done(f)
    };
    assert_eq!(broken(&state(&[1, 32], true, true).save(), &Limits::default()), []);
    for bad in [state(&[1, 31], true, true), state(&[1, 32], false, true), state(&[1, 32], true, false)] {
        breaks(&bad, "states", Severity::Error);
    }
    let limits = Limits { states: 0, ..Limits::default() };
    assert_eq!(broken(&state(&[1, 32], true, true).save(), &limits), [("states", Severity::Error)]);
}

#[test]
fn weights_are_finite_few_and_stored_once() {
    let limits = |graph_bytes| Limits { graph_bytes, ..Limits::default() };
    assert_eq!(broken(&done(good()).save(), &limits(128)), []);
    assert_eq!(broken(&done(good()).save(), &limits(127)), [("size", Severity::Error)]);
    let mask = |x| {
        done(good().op("add", &[("x", name("y")), ("y", halves(&[1], &[x]))], &[("z", half(&[16, 8, 1, 1]))]))
    };
    assert_eq!(broken(&mask(-1e4).save(), &Limits::default()), []);
    breaks(&mask(f32::NEG_INFINITY), "finite", Severity::Error);
    let w: Vec<f32> = (0..64).map(|i| i as f32).collect();
    breaks(&done(good().weight("again", &[64], &w)), "shared", Severity::Error);
    let mut unread = done(good());
    unread.weights[0] = 2;
    breaks(&unread, "shared", Severity::Warning);
}

#[test]
fn descriptions_match_their_functions() {
    let change = |f: fn(&mut proto::FunctionDescription)| {
        let mut built = done(good());
        f(&mut built.described);
        breaks(&built, "signatures", Severity::Error);
    };
    change(|d| d.input[0].name = "z".into());
    change(|d| d.output.clear());
    change(|d| d.state = d.input.clone());
    change(|d| with(d, |a| a.shape[0] = 32));
    change(|d| with(d, |a| a.data_type = 65_568));
    change(|d| with(d, |a| a.shape_range = Some(proto::Flexible {})));
    change(|d| d.input[0].r#type.as_mut().expect("a type").is_optional = true);
    let mut undescribed = done(good()).model();
    undescribed.description.as_mut().expect("a description").functions[0].name = "other".into();
    let found = broken(&Saved::new(&undescribed, &done(good()).weights), &Limits::default());
    assert_eq!(found, [("signatures", Severity::Error)]);
}

fn with(d: &mut proto::FunctionDescription, f: fn(&mut proto::ArrayFeatureType)) {
    f(d.input[0].r#type.as_mut().and_then(|t| t.multi_array.as_mut()).expect("an array"));
}
