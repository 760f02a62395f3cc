//! Tests of every instruction that works on a single thread, with known values.

use crate::common::{assembled, execute, kernel};
use moec_ptx::Launch;
use std::fmt::Write as _;

/// An instruction, its operands and its result. Operand `i` is in register `i` of `%h`, `%r` and `%d`, by its
/// size; `%p` has its lowest bit. The result is in register 0 of the kind that the instruction names first.
type Row<'a> = (&'a str, &'a [u64], u64);

fn check(rows: &[Row<'_>]) {
    let mut wrong = Vec::new();
    let mut module = String::from(".version 8.6\n.target sm_90\n.address_size 64\n");
    for (instruction, operands, expected) in rows {
        let mut body = String::from("ld.param.u64 %d31, [out];\n");
        for (i, value) in operands.iter().enumerate() {
            let i = i + 1;
            let (h, r) = (*value as u16, *value as u32);
            let _ = writeln!(body, "mov.b16 %h{i}, {h}; mov.b32 %r{i}, {r}; mov.b64 %d{i}, {value};");
            let _ = writeln!(body, "setp.ne.s32 %p{i}, {}, 0;", value & 1);
        }
        let _ = writeln!(body, "{instruction}");
        let at = instruction.find('%').unwrap();
        body += match instruction.as_bytes()[at + 1] {
            b'h' => "mov.b16 %h15, 0; mov.b32 %r40, {%h0, %h15}; cvt.u64.u32 %d30, %r40;",
            b'r' => "cvt.u64.u32 %d30, %r0;",
            b'd' => "mov.b64 %d30, %d0;",
            _ => "selp.b64 %d30, 1, 0, %p0;",
        };
        body += "\nst.global.b64 [%d31], %d30;";
        let text = kernel(".param .u64 out", &body);
        let at = text.find(".visible").unwrap();
        module += &text[at..].replace("entry kernel(", &format!("entry kernel{}(", module.len()));
        let (words, _) =
            execute(&text, 2, &Launch::linear(1, 1)).unwrap_or_else(|e| panic!("{instruction}: {e}"));
        let found = u64::from(words[0]) | u64::from(words[1]) << 32;
        if found != *expected {
            wrong.push(format!("{instruction} of {operands:x?}: {found:#x}, not {expected:#x}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assembled("instructions", "sm_90", &module);
}

const ONE: u64 = 0x3f80_0000;
const TWO: u64 = 0x4000_0000;
const THREE: u64 = 0x4040_0000;
const NAN: u64 = 0x7fff_ffff;
const INFINITY: u64 = 0x7f80_0000;
const MINUS: u64 = 0x8000_0000;
const ALL: u64 = 0xffff_ffff;

#[test]
fn integers() {
    check(&[
        ("add.s32 %r0, %r1, %r2;", &[ALL, 2], 1),
        ("add.u16 %h0, %h1, %h2;", &[0xffff, 2], 1),
        ("add.s64 %d0, %d1, %d2;", &[u64::MAX, 5], 4),
        ("add.sat.s32 %r0, %r1, %r2;", &[0x7fff_ffff, 1], 0x7fff_ffff),
        ("sub.s32 %r0, %r1, %r2;", &[1, 3], 0xffff_fffe),
        ("sub.sat.s32 %r0, %r1, %r2;", &[MINUS, 1], MINUS),
        ("mul.lo.s32 %r0, %r1, %r2;", &[0x1_0001, 0x1_0001], 0x2_0001),
        ("mul.hi.s32 %r0, %r1, %r2;", &[ALL, 5], ALL),
        ("mul.hi.u32 %r0, %r1, %r2;", &[ALL, 5], 4),
        ("mul.hi.u64 %d0, %d1, %d2;", &[u64::MAX, u64::MAX], u64::MAX - 1),
        ("mul.hi.s64 %d0, %d1, %d2;", &[u64::MAX, 3], u64::MAX),
        ("mul.wide.s32 %d0, %r1, %r2;", &[ALL, 5], (-5i64) as u64),
        ("mul.wide.u32 %d0, %r1, %r2;", &[ALL, 2], 0x1_ffff_fffe),
        ("mul.wide.s16 %r0, %h1, %h2;", &[0xffff, 3], 0xffff_fffd),
        ("mul24.lo.u32 %r0, %r1, %r2;", &[0xff00_0003, 5], 15),
        ("mul24.hi.s32 %r0, %r1, %r2;", &[0x80_0000, 0x80_0000], 0x4000_0000),
        ("mad.lo.s32 %r0, %r1, %r2, %r3;", &[3, 4, 5], 17),
        ("mad.hi.u32 %r0, %r1, %r2, %r3;", &[ALL, 2, 5], 6),
        ("mad.hi.sat.s32 %r0, %r1, %r2, %r3;", &[0x7fff_ffff, 0x7fff_ffff, 0x7fff_ffff], 0x7fff_ffff),
        ("mad.wide.u32 %d0, %r1, %r2, %d3;", &[ALL, 2, 2], 0x2_0000_0000),
        ("mad.wide.s16 %r0, %h1, %h2, %r3;", &[0xffff, 2, 1], ALL),
        ("sad.s32 %r0, %r1, %r2, %r3;", &[ALL, 4, 10], 15),
        ("div.s32 %r0, %r1, %r2;", &[(-7i32) as u32 as u64, 2], (-3i32) as u32 as u64),
        ("div.u32 %r0, %r1, %r2;", &[7, 0], ALL),
        ("div.s64 %d0, %d1, %d2;", &[1 << 63, u64::MAX], 1 << 63),
        ("rem.s32 %r0, %r1, %r2;", &[(-7i32) as u32 as u64, 2], ALL),
        ("rem.u32 %r0, %r1, %r2;", &[7, 0], 7),
        ("min.s32 %r0, %r1, %r2;", &[ALL, 1], ALL),
        ("min.u32 %r0, %r1, %r2;", &[ALL, 1], 1),
        ("max.s16 %h0, %h1, %h2;", &[0xffff, 1], 1),
        ("max.relu.s32 %r0, %r1, %r2;", &[ALL, 0xffff_fff0], 0),
        ("abs.s32 %r0, %r1;", &[ALL], 1),
        ("neg.s64 %d0, %d1;", &[1], u64::MAX),
        ("popc.b32 %r0, %r1;", &[0xf0f0], 8),
        ("popc.b64 %r0, %d1;", &[u64::MAX], 64),
        ("clz.b32 %r0, %r1;", &[1], 31),
        ("clz.b64 %r0, %d1;", &[0], 64),
        ("bfind.u32 %r0, %r1;", &[0x100], 8),
        ("bfind.s32 %r0, %r1;", &[ALL], ALL),
        ("bfind.shiftamt.u32 %r0, %r1;", &[0x100], 23),
        ("brev.b32 %r0, %r1;", &[1], MINUS),
        ("cnot.b32 %r0, %r1;", &[0], 1),
        ("bfe.u32 %r0, %r1, %r2, %r3;", &[0xabcd, 4, 8], 0xbc),
        ("bfe.s32 %r0, %r1, %r2, %r3;", &[0xabcd, 4, 8], 0xffff_ffbc),
        ("bfe.s32 %r0, %r1, %r2, %r3;", &[MINUS, 30, 8], 0xffff_fffe),
        ("bfe.u64 %d0, %d1, %r2, %r3;", &[u64::MAX, 60, 8], 0xf),
        ("bfi.b32 %r0, %r1, %r2, %r3, %r4;", &[0xff, 0, 4, 4], 0xf0),
        ("bfi.b64 %d0, %d1, %d2, %r3, %r4;", &[0, u64::MAX, 60, 8], u64::MAX >> 4),
        ("dp4a.s32.s32 %r0, %r1, %r2, %r3;", &[0xff01_0203, 0x0101_0101, 10], 15),
        ("dp4a.u32.u32 %r0, %r1, %r2, %r3;", &[0xff01_0203, 0x0101_0101, 10], 271),
        ("dp4a.u32.s32 %r0, %r1, %r2, %r3;", &[0x0000_00ff, 0x0000_00ff, 0], (-255i32) as u32 as u64),
        ("dp2a.lo.s32.s32 %r0, %r1, %r2, %r3;", &[0xffff_0002, 0x0403_0201, 0], 0),
        ("dp2a.hi.s32.s32 %r0, %r1, %r2, %r3;", &[0x0001_0002, 0x0403_0201, 1], 11),
    ]);
}

#[test]
fn bit_and_select_instructions_are_evaluated() {
    check(&[
        ("and.b32 %r0, %r1, %r2;", &[12, 10], 8),
        ("or.b64 %d0, %d1, %d2;", &[12, 10], 14),
        ("xor.b16 %h0, %h1, %h2;", &[12, 10], 6),
        ("and.pred %p0, %p1, %p2;", &[1, 1], 1),
        ("xor.pred %p0, %p1, %p2;", &[1, 1], 0),
        ("not.b32 %r0, %r1;", &[0], ALL),
        ("not.pred %p0, %p1;", &[0], 1),
        ("shl.b32 %r0, %r1, %r2;", &[1, 31], MINUS),
        ("shl.b32 %r0, %r1, %r2;", &[1, 32], 0),
        ("shr.s32 %r0, %r1, %r2;", &[MINUS, 40], ALL),
        ("shr.u64 %d0, %d1, %r2;", &[1 << 63, 63], 1),
        ("shr.s16 %h0, %h1, %r2;", &[0x8000, 1], 0xc000),
        ("shf.l.wrap.b32 %r0, %r1, %r2, %r3;", &[MINUS, 1, 33], 3),
        ("shf.r.wrap.b32 %r0, %r1, %r2, %r3;", &[2, 1, 1], MINUS | 1),
        ("shf.r.clamp.b32 %r0, %r1, %r2, %r3;", &[2, 7, 40], 7),
        ("shf.l.clamp.b32 %r0, %r1, %r2, %r3;", &[9, 7, 40], 9),
        ("lop3.b32 %r0, %r1, %r2, %r3, 0xe8;", &[12, 10, 6], 14),
        ("lop3.b32 %r0, %r1, %r2, %r3, 0x96;", &[12, 10, 6], 0),
        ("prmt.b32 %r0, %r1, %r2, %r3;", &[0x3322_1100, 0x7766_5544, 0x7410], 0x7744_1100),
        ("prmt.b32 %r0, %r1, %r2, %r3;", &[0x80, 0, 0x8888], ALL),
        ("prmt.b32.f4e %r0, %r1, %r2, %r3;", &[0x3322_1100, 0x7766_5544, 1], 0x4433_2211),
        ("prmt.b32.rc16 %r0, %r1, %r2, %r3;", &[0x3322_1100, 0, 1], 0x3322_3322),
        ("setp.lt.s32 %p0, %r1, %r2;", &[ALL, 1], 1),
        ("setp.lo.u32 %p0, %r1, %r2;", &[ALL, 1], 0),
        ("setp.hs.u64 %p0, %d1, %d2;", &[5, 5], 1),
        ("setp.eq.f32 %p0, %r1, %r2;", &[0, MINUS], 1),
        ("setp.ne.f32 %p0, %r1, %r2;", &[NAN, ONE], 0),
        ("setp.neu.f32 %p0, %r1, %r2;", &[NAN, ONE], 1),
        ("setp.nan.f32 %p0, %r1, %r2;", &[NAN, ONE], 1),
        ("setp.num.f32 %p0, %r1, %r2;", &[TWO, ONE], 1),
        ("setp.eq.ftz.f32 %p0, %r1, %r2;", &[1, 0], 1),
        ("setp.gt.f16 %p0, %h1, %h2;", &[0x3c00, 0xbc00], 1),
        ("setp.gt.bf16 %p0, %h1, %h2;", &[0x3f80, 0x4000], 0),
        ("setp.lt.and.s32 %p0, %r1, %r2, %p3;", &[1, 2, 0], 0),
        ("setp.lt.or.s32 %p0, %r1, %r2, !%p3;", &[2, 1, 0], 1),
        ("setp.lt.s32 %p0|%p5, %r1, %r2; and.pred %p0, %p0, %p5;", &[1, 2], 0),
        ("setp.gt.f16x2 %p0|%p5, %r1, %r2;", &[0x3c00, 0x3c00_0000], 1),
        ("set.gt.u32.f32 %r0, %r1, %r2;", &[TWO, ONE], ALL),
        ("set.gt.f32.s32 %r0, %r1, %r2;", &[2, 1], ONE),
        ("selp.b32 %r0, %r1, %r2, %p3;", &[7, 8, 1], 7),
        ("slct.b32.s32 %r0, %r1, %r2, %r3;", &[7, 8, ALL], 8),
        ("slct.b32.f32 %r0, %r1, %r2, %r3;", &[7, 8, MINUS], 7),
        ("mov.b32 %r0, {%h1, %h2};", &[0x1111, 0x2222], 0x2222_1111),
        ("mov.b64 %d0, {%r1, %r2};", &[1, 2], 0x2_0000_0001),
        ("mov.b32 {%h0, _}, %r1;", &[0x2222_1111], 0x1111),
        ("mov.b64 {_, %r0}, %d1;", &[0x2_0000_0001], 2),
        ("mov.f32 %r0, 1.5;", &[], 0x3fc0_0000),
        ("mov.pred %p0, %p1;", &[1], 1),
    ]);
}

#[test]
fn floats() {
    check(&[
        ("add.rn.f32 %r0, %r1, %r2;", &[ONE, TWO], THREE),
        ("add.f32 %r0, %r1, %r2;", &[INFINITY, INFINITY | MINUS], NAN),
        ("add.rz.f32 %r0, %r1, %r2;", &[ONE, 0x337f_ffff], ONE),
        ("add.rp.f32 %r0, %r1, %r2;", &[ONE, 1], ONE + 1),
        ("add.rm.f32 %r0, %r1, %r2;", &[ONE, MINUS | 1], ONE - 1),
        ("add.ftz.f32 %r0, %r1, %r2;", &[1, 1], 0),
        ("add.f32 %r0, %r1, %r2;", &[1, 1], 2),
        ("add.sat.f32 %r0, %r1, %r2;", &[ONE, ONE], ONE),
        ("add.sat.f32 %r0, %r1, %r2;", &[NAN, ONE], 0),
        ("sub.f32 %r0, %r1, %r2;", &[THREE, ONE], TWO),
        ("mul.f32 %r0, %r1, %r2;", &[0x3f80_0001, 0x3f80_0001], 0x3f80_0002),
        ("mul.rp.f32 %r0, %r1, %r2;", &[0x3f80_0001, 0x3f80_0001], 0x3f80_0003),
        ("mul.ftz.f32 %r0, %r1, %r2;", &[0x0080_0000, 0x3f00_0000], 0),
        ("fma.rn.f32 %r0, %r1, %r2, %r3;", &[0x3f80_0002, 0x3f80_0002, ONE | MINUS], 0x3500_0001),
        ("fma.rz.f32 %r0, %r1, %r2, %r3;", &[ONE, ONE, 0x3300_0000], ONE),
        ("fma.rn.ftz.f32 %r0, %r1, %r2, %r3;", &[1, ONE, ONE], ONE),
        ("mad.rn.f32 %r0, %r1, %r2, %r3;", &[TWO, ONE, ONE], THREE),
        ("add.f64 %d0, %d1, %d2;", &[1f64.to_bits(), 2f64.to_bits()], 3f64.to_bits()),
        ("fma.rn.f64 %d0, %d1, %d2, %d3;", &[2f64.to_bits(), 3f64.to_bits(), 1f64.to_bits()], 7f64.to_bits()),
        ("add.f16 %h0, %h1, %h2;", &[0x3c00, 0x1000], 0x3c00),
        ("add.f16 %h0, %h1, %h2;", &[0x3c00, 0x1001], 0x3c01),
        ("mul.f16 %h0, %h1, %h2;", &[0x7bff, 0x4000], 0x7c00),
        ("fma.rn.f16 %h0, %h1, %h2, %h3;", &[0x3c02, 0x3c02, 0xbc00], 0x1c01),
        ("fma.rn.relu.f16 %h0, %h1, %h2, %h3;", &[0x3c00, 0x3c00, 0xc000], 0),
        ("fma.rn.f16x2 %r0, %r1, %r2, %r3;", &[0x3c00_4000, 0x4000_4000, 0x3c00_0000], 0x4200_4400),
        ("add.bf16 %h0, %h1, %h2;", &[0x3f80, 0x3b80], 0x3f80),
        ("fma.rn.bf16 %h0, %h1, %h2, %h3;", &[0x3f82, 0x3f82, 0xbf80], 0x3d01),
        ("mul.bf16x2 %r0, %r1, %r2;", &[0x4000_3f80, 0x4000_4040], 0x4080_4040),
        ("div.rn.f32 %r0, %r1, %r2;", &[ONE, THREE], 0x3eaa_aaab),
        ("div.rz.f32 %r0, %r1, %r2;", &[ONE, THREE], 0x3eaa_aaaa),
        ("div.full.f32 %r0, %r1, %r2;", &[THREE, TWO], 0x3fc0_0000),
        ("div.approx.ftz.f32 %r0, %r1, %r2;", &[ONE, 0], INFINITY),
        ("div.rn.f64 %d0, %d1, %d2;", &[1f64.to_bits(), 3f64.to_bits()], (1.0 / 3f64).to_bits()),
        ("rcp.rn.f32 %r0, %r1;", &[THREE], 0x3eaa_aaab),
        ("rcp.approx.f32 %r0, %r1;", &[TWO], 0x3f00_0000),
        ("sqrt.rn.f32 %r0, %r1;", &[TWO], 0x3fb5_04f3),
        ("sqrt.rp.f32 %r0, %r1;", &[TWO], 0x3fb5_04f4),
        ("sqrt.approx.f32 %r0, %r1;", &[ONE | MINUS], NAN),
        ("sqrt.rn.f64 %d0, %d1;", &[4f64.to_bits()], 2f64.to_bits()),
        ("min.f32 %r0, %r1, %r2;", &[NAN, ONE], ONE),
        ("min.NaN.f32 %r0, %r1, %r2;", &[NAN, ONE], NAN),
        ("min.f32 %r0, %r1, %r2;", &[0, MINUS], MINUS),
        ("max.f32 %r0, %r1, %r2;", &[MINUS, 0], 0),
        ("max.f64 %d0, %d1, %d2;", &[1f64.to_bits(), 2f64.to_bits()], 2f64.to_bits()),
        ("max.bf16x2 %r0, %r1, %r2;", &[0x4000_3f80, 0x3f80_4000], 0x4000_4000),
        ("abs.f32 %r0, %r1;", &[ONE | MINUS], ONE),
        ("abs.ftz.f32 %r0, %r1;", &[MINUS | 1], 0),
        ("neg.f16x2 %r0, %r1;", &[0x3c00_bc00], 0xbc00_3c00),
        ("neg.bf16 %h0, %h1;", &[0x3f80], 0xbf80),
        ("copysign.f32 %r0, %r1, %r2;", &[MINUS, ONE], ONE | MINUS),
        ("testp.finite.f32 %p0, %r1;", &[INFINITY], 0),
        ("testp.infinite.f32 %p0, %r1;", &[INFINITY], 1),
        ("testp.subnormal.f32 %p0, %r1;", &[1], 1),
        ("testp.normal.f64 %p0, %d1;", &[1f64.to_bits()], 1),
        ("testp.notanumber.f32 %p0, %r1;", &[NAN], 1),
        ("testp.number.f32 %p0, %r1;", &[NAN], 0),
    ]);
}

#[test]
fn approximate_functions_are_evaluated() {
    check(&[
        ("ex2.approx.f32 %r0, %r1;", &[THREE], 0x4100_0000),
        ("ex2.approx.ftz.f32 %r0, %r1;", &[0xc300_0000], 0),
        ("ex2.approx.f16 %h0, %h1;", &[0x4200], 0x4800),
        ("ex2.approx.f16x2 %r0, %r1;", &[0x4200_0000], 0x4800_3c00),
        ("ex2.approx.ftz.bf16 %h0, %h1;", &[0x4040], 0x4100),
        ("lg2.approx.f32 %r0, %r1;", &[0x4100_0000], THREE),
        ("lg2.approx.f32 %r0, %r1;", &[0], INFINITY | MINUS),
        ("sin.approx.f32 %r0, %r1;", &[0], 0),
        ("cos.approx.f32 %r0, %r1;", &[0], ONE),
        ("tanh.approx.f32 %r0, %r1;", &[0x41a0_0000], ONE),
        ("tanh.approx.f16 %h0, %h1;", &[0x3c00], 0x3a18),
        ("tanh.approx.bf16x2 %r0, %r1;", &[0x42c8_0000], 0x3f80_0000),
        ("rsqrt.approx.f32 %r0, %r1;", &[0x4080_0000], 0x3f00_0000),
        ("rsqrt.approx.ftz.f32 %r0, %r1;", &[1], INFINITY),
        ("rsqrt.approx.f64 %d0, %d1;", &[4f64.to_bits()], 0.5f64.to_bits()),
    ]);
}

#[test]
fn conversions() {
    check(&[
        ("cvt.u64.u32 %d0, %r1;", &[ALL], ALL),
        ("cvt.s64.s32 %d0, %r1;", &[ALL], u64::MAX),
        ("cvt.s32.s8 %r0, %r1;", &[0x80], 0xffff_ff80),
        ("cvt.u16.u32 %h0, %r1;", &[0x1_2345], 0x2345),
        ("cvt.s8.s32 %r0, %r1;", &[0x80], 0xffff_ff80),
        ("cvt.sat.u8.s32 %r0, %r1;", &[300], 255),
        ("cvt.sat.s8.s32 %r0, %r1;", &[300], 127),
        ("cvt.sat.u8.s32 %r0, %r1;", &[ALL], 0),
        ("cvt.rn.f32.s32 %r0, %r1;", &[0x100_0001], 0x4b80_0000),
        ("cvt.rp.f32.s32 %r0, %r1;", &[0x100_0001], 0x4b80_0001),
        ("cvt.rn.f32.u32 %r0, %r1;", &[ALL], 0x4f80_0000),
        ("cvt.rn.f32.s8 %r0, %r1;", &[0xff], ONE | MINUS),
        ("cvt.rn.f64.s64 %d0, %d1;", &[u64::MAX], (-1f64).to_bits()),
        ("cvt.rn.f16.s32 %h0, %r1;", &[70000], 0x7c00),
        ("cvt.rn.bf16.s32 %h0, %r1;", &[3], 0x4040),
        ("cvt.rzi.s32.f32 %r0, %r1;", &[0xbfc0_0000], ALL),
        ("cvt.rni.s32.f32 %r0, %r1;", &[0x4020_0000], 2),
        ("cvt.rmi.s32.f32 %r0, %r1;", &[0xbfc0_0000], 0xffff_fffe),
        ("cvt.rpi.s32.f32 %r0, %r1;", &[0x3fc0_0000], 2),
        ("cvt.rzi.s32.f32 %r0, %r1;", &[NAN], 0),
        ("cvt.rzi.s32.f32 %r0, %r1;", &[INFINITY], 0x7fff_ffff),
        ("cvt.rzi.u32.f32 %r0, %r1;", &[ONE | MINUS], 0),
        ("cvt.rni.sat.s8.f32 %r0, %r1;", &[0xc3c8_0000], 0xffff_ff80),
        ("cvt.rzi.u64.f64 %d0, %d1;", &[1e30f64.to_bits()], u64::MAX),
        ("cvt.rzi.s32.f16 %r0, %h1;", &[0xc500], 0xffff_fffb),
        ("cvt.rni.f32.f32 %r0, %r1;", &[0x4020_0000], TWO),
        ("cvt.rmi.f32.f32 %r0, %r1;", &[0xbf00_0000], ONE | MINUS),
        ("cvt.sat.f32.f32 %r0, %r1;", &[TWO], ONE),
        ("cvt.ftz.f32.f32 %r0, %r1;", &[1], 0),
        ("cvt.f64.f32 %d0, %r1;", &[ONE], 1f64.to_bits()),
        ("cvt.rn.f32.f64 %r0, %d1;", &[(1.0 + 1e-10f64).to_bits()], ONE),
        ("cvt.rp.f32.f64 %r0, %d1;", &[(1.0 + 1e-10f64).to_bits()], ONE + 1),
        ("cvt.f32.f16 %r0, %h1;", &[0x3c00], ONE),
        ("cvt.f32.f16 %r0, %h1;", &[1], 0x3380_0000),
        ("cvt.f32.bf16 %r0, %h1;", &[0x3f80], ONE),
        ("cvt.rn.f16.f32 %h0, %r1;", &[0x3f80_1000], 0x3c00),
        ("cvt.rz.f16.f32 %h0, %r1;", &[0x477f_ffff], 0x7bff),
        ("cvt.rn.satfinite.f16.f32 %h0, %r1;", &[0x4800_0000], 0x7bff),
        ("cvt.rn.bf16.f32 %h0, %r1;", &[0x3f80_8000], 0x3f80),
        ("cvt.rn.bf16.f32 %h0, %r1;", &[0x3f81_8000], 0x3f82),
        ("cvt.rn.relu.bf16.f32 %h0, %r1;", &[ONE | MINUS], 0),
        ("cvt.rn.bf16x2.f32 %r0, %r1, %r2;", &[ONE, TWO], 0x3f80_4000),
        ("cvt.rn.f16x2.f32 %r0, %r1, %r2;", &[ONE, TWO], 0x3c00_4000),
        ("cvt.rna.tf32.f32 %r0, %r1;", &[0x3f80_1000], 0x3f80_2000),
        ("cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r2;", &[ONE, 0x4700_0000], 0x387e),
        ("cvt.rn.satfinite.e5m2x2.f32 %h0, %r1, %r2;", &[ONE, 0x4800_0000], 0x3c7b),
        ("cvt.rn.f16x2.e4m3x2 %r0, %h1;", &[0x387e], 0x3c00_5f00),
        ("cvt.rn.f16x2.e5m2x2 %r0, %h1;", &[0x3c00], 0x3c00_0000),
    ]);
}
