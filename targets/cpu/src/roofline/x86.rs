//! Loops for x86-64.

use super::{LOOP_BYTES, Loop, Read};
use std::arch::asm;

pub(super) const LOOPS: &[Loop] = &[
    Loop {
        format: "f32",
        instruction: "vfmadd213ps, 256 bits",
        features: &["avx2", "fma"],
        operations: 12 * 16,
        run: fma_256,
    },
    Loop {
        format: "f32",
        instruction: "vfmadd213ps, 512 bits",
        features: &["avx512f"],
        operations: 24 * 32,
        run: fma_512,
    },
    Loop {
        format: "bf16",
        instruction: "vdpbf16ps, 512 bits",
        features: &["avx512bf16"],
        operations: 24 * 64,
        run: dot_bf16,
    },
    Loop {
        format: "bf16",
        instruction: "tdpbf16ps, AMX tiles",
        features: &["amx-tile", "amx-bf16"],
        operations: 4 * 16384,
        run: tiles_bf16,
    },
    Loop {
        format: "int8",
        instruction: "vpmaddubsw + vpmaddwd + vpaddd, 256 bits",
        features: &["avx2"],
        operations: 6 * 64,
        run: madd_256,
    },
    Loop {
        format: "int8",
        instruction: "vpdpbusd, 512 bits",
        features: &["avx512vnni"],
        operations: 24 * 128,
        run: dot_int8,
    },
    Loop {
        format: "int8",
        instruction: "tdpbusd, AMX tiles",
        features: &["amx-tile", "amx-int8"],
        operations: 4 * 32768,
        run: tiles_int8,
    },
];

pub(super) const READS: &[Read] = &[
    Read { features: &["avx2"], run: read_256 },
    Read { features: &["avx512f"], run: read_512 },
    Read { features: &["avx512f"], run: read_512_prefetching },
    Read { features: &["sse2"], run: read_128 },
];

/// The same line for several registers.
macro_rules! each {
    ($before:literal [$($r:literal)*] $after:literal) => { concat!($($before, $r, $after, "\n"),*) };
}

/// Turns of independent 512-bit instructions: each of 24 registers depends on itself alone, and register 31
/// holds `$x` in every 32-bit word.
macro_rules! loop_512 {
    ($name:ident, $op:literal, $x:literal) => {
        /// # Safety
        /// The CPU has the instruction.
        unsafe fn $name(turns: u64) {
            // SAFETY: registers only, all of them declared.
            unsafe {
                asm!(
                    "vpbroadcastd zmm31, {x:e}",
                    each!("vmovdqa64 zmm" [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23] ", zmm31"),
                    "2:",
                    each!($op [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23] ", zmm31, zmm31"),
                    "dec {n}",
                    "jnz 2b",
                    x = in(reg) $x as u32, n = inout(reg) turns => _,
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                    out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                    out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _, out("xmm16") _,
                    out("xmm17") _, out("xmm18") _, out("xmm19") _, out("xmm20") _, out("xmm21") _,
                    out("xmm22") _, out("xmm23") _, out("xmm31") _,
                    options(nostack, nomem),
                );
            }
        }
    };
}

// One half: sums stay near one. Two bf16 of one half. Four bytes of one.
loop_512!(fma_512, "vfmadd213ps zmm", 0x3f00_0000);
loop_512!(dot_bf16, "vdpbf16ps zmm", 0x3f00_3f00);
loop_512!(dot_int8, "vpdpbusd zmm", 0x0101_0101);

/// # Safety
/// The CPU has AVX2 and FMA.
unsafe fn fma_256(turns: u64) {
    // SAFETY: registers only, all of them declared.
    unsafe {
        asm!(
            "vmovd xmm15, {x:e}",
            "vpbroadcastd ymm15, xmm15",
            each!("vmovdqa ymm" [0 1 2 3 4 5 6 7 8 9 10 11] ", ymm15"),
            "2:",
            each!("vfmadd213ps ymm" [0 1 2 3 4 5 6 7 8 9 10 11] ", ymm15, ymm15"),
            "dec {n}",
            "jnz 2b",
            "vzeroupper",
            x = in(reg) 0x3f00_0000_u32, n = inout(reg) turns => _,
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _,
            out("ymm6") _, out("ymm7") _, out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
            out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            options(nostack, nomem),
        );
    }
}

/// # Safety
/// The CPU has AVX2.
unsafe fn madd_256(turns: u64) {
    // SAFETY: registers only, all of them declared.
    unsafe {
        asm!(
            "vmovd xmm15, {x:e}",
            "vpbroadcastd ymm15, xmm15",
            each!("vmovdqa ymm" [0 1 2 3 4 5] ", ymm15"),
            "2:",
            each!("vpmaddubsw ymm" [6 7 8 9 10 11] ", ymm15, ymm15"),
            "vpmaddwd ymm6, ymm6, ymm15",
            "vpmaddwd ymm7, ymm7, ymm15",
            "vpmaddwd ymm8, ymm8, ymm15",
            "vpmaddwd ymm9, ymm9, ymm15",
            "vpmaddwd ymm10, ymm10, ymm15",
            "vpmaddwd ymm11, ymm11, ymm15",
            "vpaddd ymm0, ymm0, ymm6",
            "vpaddd ymm1, ymm1, ymm7",
            "vpaddd ymm2, ymm2, ymm8",
            "vpaddd ymm3, ymm3, ymm9",
            "vpaddd ymm4, ymm4, ymm10",
            "vpaddd ymm5, ymm5, ymm11",
            "dec {n}",
            "jnz 2b",
            "vzeroupper",
            x = in(reg) 0x0101_0101_u32, n = inout(reg) turns => _,
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _,
            out("ymm6") _, out("ymm7") _, out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
            out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            options(nostack, nomem),
        );
    }
}

/// Palette 1, eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct TileConfig([u8; 64]);

static TILES: TileConfig = {
    let mut c = [0; 64];
    c[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        c[16 + 2 * tile] = 64;
        c[48 + tile] = 16;
        tile += 1;
    }
    TileConfig(c)
};

/// Turns of four products of tiles, two by two, as a matrix kernel has them. Every tile holds zeros.
macro_rules! loop_tiles {
    ($name:ident, $op:literal) => {
        /// # Safety
        /// The CPU has the instruction, and the operating system lets this process use tiles.
        unsafe fn $name(turns: u64) {
            // SAFETY: reads the configuration; else registers only. Tiles are released.
            unsafe {
                asm!(
                    "ldtilecfg [{config}]",
                    each!("tilezero tmm" [0 1 2 3 4 5 6 7] ""),
                    "2:",
                    concat!($op, " tmm0, tmm4, tmm6"),
                    concat!($op, " tmm1, tmm4, tmm7"),
                    concat!($op, " tmm2, tmm5, tmm6"),
                    concat!($op, " tmm3, tmm5, tmm7"),
                    "dec {n}",
                    "jnz 2b",
                    "tilerelease",
                    config = in(reg) &raw const TILES, n = inout(reg) turns => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                    out("tmm6") _, out("tmm7") _,
                    options(nostack, readonly),
                );
            }
        }
    };
}

loop_tiles!(tiles_bf16, "tdpbf16ps");
loop_tiles!(tiles_int8, "tdpbusd");

/// A loop of loads, `$lines` of which take [`LOOP_BYTES`] bytes.
macro_rules! read {
    ($name:ident, $end:literal, $($line:literal),*) => {
        /// # Safety
        /// The CPU has the instruction; `bytes`, a positive multiple of [`LOOP_BYTES`], can be read at `at`.
        unsafe fn $name(at: *const u8, bytes: usize) {
            // SAFETY: reads those bytes and changes declared registers only. A prefetch of what is not
            // there does nothing.
            unsafe {
                asm!(
                    "2:",
                    $($line,)*
                    "add {at}, {turn}",
                    "cmp {at}, {end}",
                    "jb 2b",
                    $end,
                    at = inout(reg) at => _, end = in(reg) at.wrapping_add(bytes), turn = const LOOP_BYTES,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                    options(nostack, readonly),
                );
            }
        }
    };
}

read!(
    read_512,
    "vzeroupper",
    "vmovdqu64 zmm0, [{at}]",
    "vmovdqu64 zmm1, [{at} + 64]",
    "vmovdqu64 zmm2, [{at} + 128]",
    "vmovdqu64 zmm3, [{at} + 192]",
    "vmovdqu64 zmm0, [{at} + 256]",
    "vmovdqu64 zmm1, [{at} + 320]",
    "vmovdqu64 zmm2, [{at} + 384]",
    "vmovdqu64 zmm3, [{at} + 448]"
);
read!(
    read_512_prefetching,
    "vzeroupper",
    "prefetcht0 [{at} + 2048]",
    "vmovdqu64 zmm0, [{at}]",
    "prefetcht0 [{at} + 2112]",
    "vmovdqu64 zmm1, [{at} + 64]",
    "prefetcht0 [{at} + 2176]",
    "vmovdqu64 zmm2, [{at} + 128]",
    "prefetcht0 [{at} + 2240]",
    "vmovdqu64 zmm3, [{at} + 192]",
    "prefetcht0 [{at} + 2304]",
    "vmovdqu64 zmm0, [{at} + 256]",
    "prefetcht0 [{at} + 2368]",
    "vmovdqu64 zmm1, [{at} + 320]",
    "prefetcht0 [{at} + 2432]",
    "vmovdqu64 zmm2, [{at} + 384]",
    "prefetcht0 [{at} + 2496]",
    "vmovdqu64 zmm3, [{at} + 448]"
);
read!(
    read_256,
    "vzeroupper",
    "vmovdqu ymm0, [{at}]",
    "vmovdqu ymm1, [{at} + 32]",
    "vmovdqu ymm2, [{at} + 64]",
    "vmovdqu ymm3, [{at} + 96]",
    "vmovdqu ymm0, [{at} + 128]",
    "vmovdqu ymm1, [{at} + 160]",
    "vmovdqu ymm2, [{at} + 192]",
    "vmovdqu ymm3, [{at} + 224]",
    "vmovdqu ymm0, [{at} + 256]",
    "vmovdqu ymm1, [{at} + 288]",
    "vmovdqu ymm2, [{at} + 320]",
    "vmovdqu ymm3, [{at} + 352]",
    "vmovdqu ymm0, [{at} + 384]",
    "vmovdqu ymm1, [{at} + 416]",
    "vmovdqu ymm2, [{at} + 448]",
    "vmovdqu ymm3, [{at} + 480]"
);
// Four loads of every line would measure the loads; a line counts as read when its first bytes are.
read!(
    read_128,
    "",
    "movdqu xmm0, [{at}]",
    "movdqu xmm1, [{at} + 64]",
    "movdqu xmm2, [{at} + 128]",
    "movdqu xmm3, [{at} + 192]",
    "movdqu xmm0, [{at} + 256]",
    "movdqu xmm1, [{at} + 320]",
    "movdqu xmm2, [{at} + 384]",
    "movdqu xmm3, [{at} + 448]"
);
