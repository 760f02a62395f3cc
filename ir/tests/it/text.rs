//! The text forms: printing and parsing round-trips, and no text makes the parser panic.

mod basics;
mod graphs;
mod plans;

use crate::common::{leaf, model, weight};
use crate::plans::plan;
use basics::{list, small, text};
use graphs::{module, op};
use moec_ir::eval::{self, Tensor};
use moec_ir::plan::*;
use moec_ir::scope::AnyLayer;
use moec_ir::text::{parse_expr, parse_module, parse_placement, parse_plan};
use moec_ir::{Format, Scope, StateDecl, StateKind, Type};
use plans::{random_placement, random_plan};
use proptest::prelude::*;

#[test]
fn text_format_is_readable() {
    insta::assert_snapshot!("module", model());
    insta::assert_snapshot!("plan", plan());
}

#[test]
fn examples_round_trip() {
    let m = model();
    assert_eq!(parse_module(&m.to_string()).unwrap(), m);
    let p = plan();
    assert_eq!(parse_plan(&p.to_string()).unwrap(), p);
    // Operators that update states; weights that are joined and mapped by functions. Fuzzing starts from
    // these texts, too.
    let recurrent = parse_module(include_str!("../../../fuzz/seeds/graph/recurrent")).unwrap();
    moec_ir::verify::module(&recurrent).unwrap();
    assert_eq!(parse_module(&recurrent.to_string()).unwrap(), recurrent);
}

#[test]
fn parse_errors_have_a_position() {
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

/// Deletes, repeats and swaps bytes; the result is made valid UTF-8.
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

/// Number of cases of each property.
const CASES: u32 = 128;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn modules_round_trip(m in module()) {
        let text = m.to_string();
        let back = parse_module(&text);
        prop_assert_eq!(back.as_ref().ok(), Some(&m), "{}\n{:?}", text, back.as_ref().err());
        // The verifier must not panic on any parsed module.
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
    fn scopes_have_one_spelling(text in prop_oneof![text(), "(layers[.])?[0-9*+]{0,2}[.]?[a-z_0-9.]{0,4}"]) {
        for printed in [
            text.parse::<Scope>().map(|s| s.to_string()),
            text.parse::<Scope<AnyLayer>>().map(|s| s.to_string()),
        ] {
            prop_assert_eq!(printed.as_ref().unwrap_or(&text), &text);
        }
    }
}

#[test]
fn printing_an_invalid_module_does_not_panic() {
    let mut m = model();
    m.weights.truncate(1);
    m.states.clear();
    m.entries[0].values.truncate(2);
    assert!(m.to_string().contains("@?1"));
    assert!(parse_module(&m.to_string()).is_err());
    assert_eq!(weight("w", leaf("t", &[2])).to_string(), "weight @w: bf16[2] experts = t\"t\"[2]");
}

/// Kinds of states in text form; a KV cache, the default, has no keyword.
#[test]
fn kinds_of_states_are_printed_as_words() {
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
        rotated: 1,
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
