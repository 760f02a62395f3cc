//! Error messages for texts that are not modules, and for modules that cannot be executed.

use crate::common::kernel;
use moec_ptx::{parse, verify};

/// Error message for a text.
fn message_for(text: &str) -> String {
    match parse(text) {
        Err(e) => e.to_string(),
        Ok(module) => verify(&module).map_or_else(|e| e.to_string(), |()| "a module".into()),
    }
}

#[test]
fn messages_of_the_parser() {
    let texts = [
        String::new(),
        ".version 5.0".into(),
        ".version 8.3 .target compute_80".into(),
        ".version 8.3 .target sm_80 .address_size 32".into(),
        ".version 8.3 .target sm_80 .address_size 64 .texref t;".into(),
        ".version 8.3 .target sm_80 .address_size 64 .shared .b8 x[99999999999];".into(),
        kernel("", "\twgmma.fence.sync.aligned;"),
        kernel("", "\tadd.f32 %f1 %f2, %f3;"),
        kernel("", "\tadd.f32 %f1, %f2, 0f3F8;"),
        kernel("", "\tld.global.f32 %f1, [%d1;"),
        kernel("", "\t.reg .f8 %x;"),
        kernel("", "\t.reg .b32 %x<70000>;"),
        kernel("", "\t.local .align 3 .b8 x[4];"),
        kernel("", "\tadd.f32 %f1, %f2"),
        kernel("", &"{".repeat(40)),
    ];
    insta::assert_snapshot!(texts.map(|text| message_for(&text)).join("\n"));
}

#[test]
fn messages_of_the_verifier() {
    let bodies = [
        "add.f32 %f1, %f2, %f99;",
        "add.f32 %f1, %f2, %r1;",
        "add.s32 %f1, %r2, %r1;",
        "add.s64 %d1, %r2, %d1;",
        "add.s32 %r1, %r2;",
        "add.s32.wide %r1, %r2, %r3;",
        "add.b32 %r1, %r2, %r3;",
        "add.f32 %f1, %f2, 1;",
        "add.rz.f64 %d1, %d1, %d1;",
        "mov.u32 %r1, %clock;",
        "mov.u64 %d1, %tid.x;",
        "bra NOWHERE;",
        "L: L: ret;",
        "@%r1 bra L; L: ret;",
        "ld.global.v4.f32 {%f1, %f2}, [%d1];",
        "ld.shared.nc.f32 %f1, [%d1];",
        "ld.global.f32 %f1, [%f2];",
        ".shared .b8 s[16]; ld.global.f32 %f1, [s];",
        ".shared .b8 s[300000];",
        ".reg .b32 %r1; .reg .b32 %r1;",
        "st.param.f32 [p], %f1;",
        "cvt.f16.f32 %h1, %f1;",
        "lop3.b32 %r1, %r2, %r3, %r4, 256;",
        "brx.idx %r1, NOWHERE;",
        "call nothing;",
        "atom.global.add.s64 %d1, [%d2], %d3;",
        "cp.async.cg.shared.global [%d1], [%d2], 8;",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32 {%f0,%f1,%f2,%f3}, {%r0,%r1,%r2,%r3}, {%r4,%r5}, {%f0,%f1,%f2,%f3};",
        "setp.lt.f16x2 %p1, %r1, %r2;",
    ];
    let messages = bodies.map(|body| message_for(&kernel(".param .u32 p", body)));
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn recursive_functions_are_rejected() {
    let text = ".version 8.3 .target sm_80 .address_size 64
.func g() { call f; ret; }
.func f() { call g; ret; }";
    assert!(message_for(text).contains("calls itself"), "{}", message_for(text));
}

#[test]
fn call_depth_is_limited() {
    let head = ".version 8.3 .target sm_80 .address_size 64\n.func f4000() { ret; }\n".to_owned();
    let calls = (0..4000).rev().map(|nth| format!(".func f{nth}() {{ call f{}; ret; }}\n", nth + 1));
    let text = std::iter::once(head).chain(calls).collect::<String>();
    assert!(message_for(&text).contains("calls are nested too deeply"), "{}", message_for(&text));
}

#[test]
fn total_variable_size_is_limited() {
    let variable = |name| format!(".global .b8 {name}[1073741824];\n");
    let text = format!(".version 8.3 .target sm_80 .address_size 64\n{}{}", variable("a"), variable("b"));
    assert!(message_for(&text).contains("too large variables"), "{}", message_for(&text));
}

#[test]
fn slash_star_slash_does_not_close_a_comment() {
    assert_eq!(message_for(&kernel("", "/*/ add.f32 %f1 */ ret;")), "a module");
}
