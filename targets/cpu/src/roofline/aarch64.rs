//! Loops for AArch64.

use super::{LOOP_BYTES, Loop, Read};
use std::arch::asm;

pub(super) const LOOPS: &[Loop] = &[
    Loop { format: "f32", instruction: "fmla, 128 bits", features: &["neon"], operations: 24 * 8, run: fma },
    Loop {
        format: "bf16",
        instruction: "bfmmla, 128 bits",
        features: &["bf16"],
        operations: 24 * 32,
        run: products_bf16,
    },
    Loop {
        format: "int8",
        instruction: "sdot, 128 bits",
        features: &["dotprod"],
        operations: 24 * 32,
        run: dot_int8,
    },
    Loop {
        format: "int8",
        instruction: "smmla, 128 bits",
        features: &["i8mm"],
        operations: 24 * 64,
        run: products_int8,
    },
];

pub(super) const READS: &[Read] = &[Read { features: &["neon"], run: read }];

/// The same line for several registers.
macro_rules! each {
    ($before:literal [$($r:literal)*] $after:literal) => { concat!($($before, $r, $after, "\n"),*) };
}

/// Turns of independent instructions: each of 24 registers depends on itself alone, and register 31 holds
/// `$x` in every 32-bit word.
macro_rules! loop_of {
    ($name:ident, $extension:literal, $op:literal, $after:literal, $x:literal) => {
        /// # Safety
        /// The CPU has the instruction.
        unsafe fn $name(turns: u64) {
            // SAFETY: registers only, all of them declared.
            unsafe {
                asm!(
                    $extension,
                    "dup v31.4s, {x:w}",
                    each!("mov v" [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23] ".16b, v31.16b"),
                    "2:",
                    each!($op [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23] $after),
                    "subs {n}, {n}, #1",
                    "b.ne 2b",
                    x = in(reg) $x as u32, n = inout(reg) turns => _,
                    out("v0") _, out("v1") _, out("v2") _, out("v3") _, out("v4") _, out("v5") _, out("v6") _,
                    out("v7") _, out("v8") _, out("v9") _, out("v10") _, out("v11") _, out("v12") _,
                    out("v13") _, out("v14") _, out("v15") _, out("v16") _, out("v17") _, out("v18") _,
                    out("v19") _, out("v20") _, out("v21") _, out("v22") _, out("v23") _, out("v31") _,
                    options(nostack, nomem),
                );
            }
        }
    };
}

// One half, two bf16 of one half, four bytes of one: sums stay far from the slow corners of a format.
loop_of!(fma, "", "fmla v", ".4s, v31.4s, v31.4s", 0x3f00_0000);
loop_of!(products_bf16, ".arch_extension bf16", "bfmmla v", ".4s, v31.8h, v31.8h", 0x3f00_3f00);
loop_of!(dot_int8, ".arch_extension dotprod", "sdot v", ".4s, v31.16b, v31.16b", 0x0101_0101);
loop_of!(products_int8, ".arch_extension i8mm", "smmla v", ".4s, v31.16b, v31.16b", 0x0101_0101);

/// # Safety
/// `bytes`, a positive multiple of [`LOOP_BYTES`], can be read at `at`.
unsafe fn read(at: *const u8, bytes: usize) {
    // SAFETY: reads those bytes and changes declared registers only.
    unsafe {
        asm!(
            "2:",
            "ldp q0, q1, [{at}]",
            "ldp q2, q3, [{at}, #32]",
            "ldp q0, q1, [{at}, #64]",
            "ldp q2, q3, [{at}, #96]",
            "ldp q0, q1, [{at}, #128]",
            "ldp q2, q3, [{at}, #160]",
            "ldp q0, q1, [{at}, #192]",
            "ldp q2, q3, [{at}, #224]",
            "ldp q0, q1, [{at}, #256]",
            "ldp q2, q3, [{at}, #288]",
            "ldp q0, q1, [{at}, #320]",
            "ldp q2, q3, [{at}, #352]",
            "ldp q0, q1, [{at}, #384]",
            "ldp q2, q3, [{at}, #416]",
            "ldp q0, q1, [{at}, #448]",
            "ldp q2, q3, [{at}, #480]",
            "add {at}, {at}, {turn}",
            "cmp {at}, {end}",
            "b.lo 2b",
            at = inout(reg) at => _, end = in(reg) at.wrapping_add(bytes), turn = const LOOP_BYTES,
            out("v0") _, out("v1") _, out("v2") _, out("v3") _,
            options(nostack, readonly),
        );
    }
}
