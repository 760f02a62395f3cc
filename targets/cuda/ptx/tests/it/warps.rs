//! Operations that the lanes of a warp or the warps of a block execute together.

use crate::common::{execute, kernel};
use moec_ptx::{InstructionClass, Launch};

/// Values of `%r0` in every thread of a block after these statements; `%r1` has the thread's number.
fn threads(statements: &str, block: u32) -> Vec<u32> {
    run(statements, &Launch::linear(1, block)).0
}

fn run(statements: &str, launch: &Launch) -> (Vec<u32>, moec_ptx::Report) {
    let body = format!(
        "ld.param.u64 %d31, [out]; mov.u32 %r1, %tid.x;\n{statements}\n\
         mul.wide.u32 %d30, %r1, 4; add.s64 %d30, %d31, %d30; st.global.b32 [%d30], %r0; ret;"
    );
    execute(&kernel(".param .u64 out", &body), launch.block[0] as usize, launch)
        .unwrap_or_else(|e| panic!("{e}"))
}

fn each(block: u32, of: impl Fn(u32) -> u32) -> Vec<u32> {
    (0..block).map(of).collect()
}

#[test]
fn shuffles_read_the_right_lanes() {
    let of = |mode: &str| threads(&format!("shfl.sync.{mode}, -1;"), 32);
    assert_eq!(of("bfly.b32 %r0, %r1, 5, 31"), each(32, |i| i ^ 5));
    assert_eq!(of("down.b32 %r0, %r1, 3, 31"), each(32, |i| if i + 3 > 31 { i } else { i + 3 }));
    assert_eq!(of("up.b32 %r0, %r1, 3, 0"), each(32, |i| if i < 3 { i } else { i - 3 }));
    assert_eq!(of("idx.b32 %r0, %r1, 7, 31"), each(32, |_| 7));
    // Segments of eight lanes: 0x181f is a mask of 24 above a clamp of 31.
    assert_eq!(of("idx.b32 %r0, %r1, 2, 6175"), each(32, |i| i / 8 * 8 + 2));
    assert_eq!(of("down.b32 %r0, %r1, 1, 6175"), each(32, |i| if i % 8 == 7 { i } else { i + 1 }));
    let inside = threads("shfl.sync.up.b32 %r2|%p1, %r1, 1, 0, -1; selp.b32 %r0, 1, 0, %p1;", 32);
    assert_eq!(inside, each(32, |i| u32::from(i > 0)));
}

#[test]
fn votes_and_reductions() {
    let odd = "and.b32 %r2, %r1, 1; setp.eq.s32 %p1, %r2, 1;";
    let vote = |of: &str| threads(&format!("{odd} vote.sync.{of}, -1; selp.b32 %r0, 1, 0, %p2;"), 32)[3];
    assert_eq!([vote("any.pred %p2, %p1"), vote("all.pred %p2, %p1"), vote("uni.pred %p2, %p1")], [1, 0, 0]);
    let ballot = threads(&format!("{odd} vote.sync.ballot.b32 %r0, !%p1, -1;"), 32);
    assert_eq!(ballot, each(32, |_| 0x5555_5555));
    let reduce = |of: &str| threads(&format!("sub.s32 %r2, %r1, 5; redux.sync.{of} %r0, %r2, -1;"), 32)[0];
    assert_eq!(reduce("add.s32") as i32, 31 * 16 - 5 * 32);
    assert_eq!([reduce("min.s32") as i32, reduce("max.s32") as i32], [-5, 26]);
    assert_eq!([reduce("min.u32"), reduce("max.u32")], [0, u32::MAX]);
    let bits = |of: &str| threads(&format!("or.b32 %r2, %r1, 32; redux.sync.{of}.b32 %r0, %r2, -1;"), 32)[0];
    assert_eq!([bits("and"), bits("or"), bits("xor")], [32, 63, 0]);
    assert_eq!(threads("activemask.b32 %r0;", 40), each(40, |i| if i < 32 { u32::MAX } else { 0xff }));
}

#[test]
fn diverged_lanes_reconverge() {
    // A loop with the lane's number of iterations, then a vote of all.
    let (found, report) = run(
        "mov.u32 %r2, 0;\nLOOP: setp.ge.u32 %p1, %r2, %r1; @%p1 bra DONE; add.u32 %r2, %r2, 1; bra LOOP;\n\
         DONE: activemask.b32 %r3; popc.b32 %r4, %r3; add.u32 %r0, %r2, %r4;",
        &Launch::linear(1, 32),
    );
    assert_eq!(found, each(32, |i| i + 32));
    // The loop is executed 31 times by the warp, not once for every lane.
    assert!(report.all().warps < 31 * 4 + 20, "{report}");
    // Halves of a warp with masks of their own.
    let halves = threads(
        "setp.lt.u32 %p1, %r1, 16; selp.b32 %r2, 65535, -65536, %p1; shfl.sync.bfly.b32 %r0, %r1, 1, 31, %r2;",
        32,
    );
    assert_eq!(halves, each(32, |i| i ^ 1));
    // A shuffle waits for lanes that come later.
    let waits = threads(
        "mov.u32 %r3, 0; setp.lt.u32 %p1, %r1, 8; @%p1 bra MEET; mov.u32 %r3, 100;\n\
         MEET: add.u32 %r2, %r3, %r1; shfl.sync.idx.b32 %r0, %r2, 9, 31, -1;",
        32,
    );
    assert_eq!(waits, each(32, |_| 109));
}

#[test]
fn spinning_lanes_do_not_block_their_warp() {
    let found = threads(
        ".shared .align 4 .b8 flag[4]; setp.eq.u32 %p1, %r1, 0; mov.u32 %r3, 0;\n\
         @%p1 st.shared.b32 [flag], %r3; bar.warp.sync -1; setp.eq.u32 %p2, %r1, 31; @%p2 bra SET;\n\
         WAIT: atom.shared.or.b32 %r2, [flag], 0; setp.eq.u32 %p3, %r2, 0; @%p3 bra WAIT; bra END;\n\
         SET: atom.shared.exch.b32 %r2, [flag], 7;\n END: bar.warp.sync -1; ld.shared.b32 %r0, [flag];",
        32,
    );
    assert_eq!(found, each(32, |_| 7));
}

#[test]
fn barriers_order_shared_memory() {
    let reverse = "shl.b32 %r2, %r1, 2; mov.u32 %r3, s; add.u32 %r4, %r3, %r2; st.shared.u32 [%r4], %r1;\
         bar.sync 0; sub.u32 %r5, 127, %r1; shl.b32 %r5, %r5, 2; add.u32 %r5, %r3, %r5; ld.shared.u32 %r0, [%r5];";
    let found = threads(&format!(".shared .align 4 .b8 s[512]; {reverse}"), 128);
    assert_eq!(found, each(128, |i| 127 - i));
    // One warp writes and arrives at barrier 1, the other waits and reads. The barrier has 64 threads, 32 of
    // which do not wait.
    let given = threads(
        ".shared .align 4 .b8 s[128]; and.b32 %r2, %r1, 31; shl.b32 %r2, %r2, 2; mov.u32 %r3, s; add.u32 %r3, %r3, %r2;\
         mov.u32 %r0, 0; setp.lt.u32 %p1, %r1, 32; @%p1 bra GIVE; barrier.sync.aligned 1, 64; ld.shared.u32 %r0, [%r3]; bra END;\n\
         GIVE: st.shared.u32 [%r3], %r1; bar.arrive 1, 64;\nEND:",
        64,
    );
    assert_eq!(given, each(64, |i| i.saturating_sub(32)));
    // Threads that have ended are not waited for.
    let ended = threads("mov.u32 %r0, 3; setp.ge.u32 %p1, %r1, 48; @%p1 exit; bar.sync 0;", 64);
    assert_eq!(ended, each(64, |i| if i < 48 { 3 } else { 0 }));
}

#[test]
fn atomic_operations_of_all_blocks() {
    for workers in [1, 4] {
        let body = "ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x;\n\
            atom.global.add.u32 %r2, [%d1], 1; red.global.max.u32 [%d1+4], %r1; red.global.add.f32 [%d1+8], 0f3F800000;\n\
            atom.global.inc.u32 %r3, [%d1+12], 9; atom.global.cas.b32 %r4, [%d1+16], 0, 5; red.global.add.u64 [%d1+24], 3;\n\
            mov.b32 %r5, 15360; red.relaxed.gpu.global.add.noftz.f16x2 [%d1+32], %r5; red.global.or.b32 [%d1+36], %r1;";
        let launch = Launch { workers, ..Launch::linear(4, 64) };
        let (found, report) = execute(&kernel(".param .u64 out", body), 10, &launch).unwrap();
        let expected = [256, 63, 256f32.to_bits(), 256 % 10, 5, 0, 768, 0, 0x5c00, 63];
        assert_eq!(found, expected);
        assert_eq!(report.class(InstructionClass::Atomic).threads, 8 * 256);
    }
}

#[test]
fn functions_tables_and_memory_of_a_thread() {
    let text = ".version 8.3 .target sm_80 .address_size 64
.global .align 4 .u32 table[4] = {10, 20, 30, 40};
.const .align 4 .f32 half = 0f3F000000;
.func (.param .b32 result) twice(.param .b32 of) {
  .reg .b32 %r<3>; ld.param.b32 %r1, [of]; add.u32 %r2, %r1, %r1; st.param.b32 [result], %r2; ret;
}
.visible .entry kernel(.param .u64 out, .param .align 4 .b8 pair[8]) {
  .reg .b32 %r<20>; .reg .b64 %d<9>; .reg .f32 %f<3>; .reg .pred %p<2>; .local .align 8 .b8 own[16];
  ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x;
  T: .branchtargets A, B, C;
  st.local.u32 [own+4], %r1; mov.u64 %d2, own; cvta.local.u64 %d3, %d2; ld.u32 %r2, [%d3+4];
  { .param .b32 p0; .param .b32 r0; st.param.b32 [p0], %r2; call.uni (r0), twice, (p0); ld.param.b32 %r3, [r0]; }
  { .param .b32 p0; .param .b32 r0; st.param.b32 [p0], %r3; call.uni (r0), twice, (p0); ld.param.b32 %r3, [r0]; }
  rem.u32 %r4, %r1, 3; brx.idx %r4, T;
  A: mov.u32 %r5, 1000; bra END;
  B: ld.param.u32 %r5, [pair+4]; bra END;
  C: cvta.global.u64 %d4, table; ld.u32 %r5, [%d4+8];
  END: add.u32 %r6, %r3, %r5; ld.const.f32 %f1, [half]; cvt.rzi.u32.f32 %r7, %f1; add.u32 %r6, %r6, %r7;
  isspacep.local %p1, %d3; @!%p1 trap; isspacep.shared %p1, %d3; @%p1 trap; isspacep.global %p1, %d1; @!%p1 trap;
  mad.wide.u32 %d5, %r1, 4, %d1; st.global.u32 [%d5], %r6; fence.acq_rel.gpu; membar.gl;
}";
    let module = moec_ptx::parse(text).unwrap();
    moec_ptx::verify(&module).unwrap();
    let mut memory = moec_ptx::Memory::new(&module).unwrap();
    let out = memory.add("out", &[0; 24]);
    let arguments =
        [moec_ptx::Argument::Buffer(out), moec_ptx::Argument::Bytes(vec![1, 0, 0, 0, 0xd0, 7, 0, 0])];
    let program = moec_ptx::Program::new(&module, "kernel").unwrap();
    program.launch(&memory, &arguments, &Launch::linear(1, 6)).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(
        crate::common::as_words(&memory.bytes(out)),
        each(6, |i| 4 * i + [1000, 2000, 30][i as usize % 3])
    );
}

/// The ISA specifies the positions of matrix elements. A register of one lane at a time is set to one; each
/// sum shows which element it was.
#[test]
fn matrix_fragment_layout_follows_the_isa() {
    // s8: a has a one at row 3 and column 18, b holds its row's number in column 5.
    let text = kernel(
        ".param .u64 out",
        "ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x; mov.u32 %r10, 0; mov.u32 %r0, 0;\n\
         // Row 3 is group 3, columns 16 to 19 are register 2 of its first lane: lane 12, byte 2.
         setp.eq.u32 %p1, %r1, 12; selp.b32 %r12, 65536, 0, %p1;\n\
         // Column 5 is group 5: lanes 20 to 23; rows 4 i to 4 i + 3 in register 0, and 16 more in register 1.
         shr.u32 %r2, %r1, 2; setp.eq.u32 %p2, %r2, 5; and.b32 %r3, %r1, 3; mul.lo.u32 %r4, %r3, 67372036;\n\
         add.u32 %r4, %r4, 50462976; add.u32 %r5, %r4, 269488144; selp.b32 %r4, %r4, 0, %p2; selp.b32 %r5, %r5, 0, %p2;\n\
         mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r20, %r21, %r22, %r23}, {%r0, %r10, %r12, %r0}, {%r4, %r5}, {%r0, %r0, %r0, %r0};\n\
         mad.wide.u32 %d2, %r1, 16, %d1; st.global.v4.b32 [%d2], {%r20, %r21, %r22, %r23};",
    );
    let (found, _) = execute(&text, 128, &Launch::linear(1, 32)).unwrap_or_else(|e| panic!("{e}"));
    // Element (3, 5) is lane 14's second.
    let expected: Vec<u32> = (0..128).map(|i| if i == 4 * 14 + 1 { 18 } else { 0 }).collect();
    assert_eq!(found, expected);
    let tf32 = kernel(
        ".param .u64 out",
        "ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x; mov.u32 %r0, 0; mov.f32 %f0, 0f3F800000;\n\
         // Row 10 and column 6: group 2, lane 2 of it, register 3. Row 6 of b: register 1 of lane 2 of each group.
         setp.eq.u32 %p1, %r1, 10; selp.b32 %r3, 0x40000000, 0, %p1; cvt.rn.f32.u32 %f1, %r1; mov.b32 %r4, %f1;\n\
         mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f4, %f5, %f6, %f7}, {%r0, %r0, %r0, %r3}, {%r0, %r4}, {%f0, %f0, %f0, %f0};\n\
         mad.wide.u32 %d2, %r1, 16, %d1; st.global.v4.f32 [%d2], {%f4, %f5, %f6, %f7};",
    );
    let (found, _) = execute(&tf32, 128, &Launch::linear(1, 32)).unwrap_or_else(|e| panic!("{e}"));
    for (i, bits) in found.iter().enumerate() {
        let (lane, row, column) = (i / 4, i / 16 + 8 * (i % 4 / 2), 2 * (i / 4 % 4) + i % 2);
        let expected = if row == 10 { 1.0 + 2.0 * (4 * column + 2) as f32 } else { 1.0 };
        assert_eq!(f32::from_bits(*bits), expected, "lane {lane}, row {row}, column {column}");
    }
}

#[test]
fn coalescing_is_counted_in_sectors() {
    let reads = |stride: u32| {
        let body = format!(
            "ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x; mad.wide.u32 %d2, %r1, {stride}, %d1; ld.global.u32 %r2, [%d2];"
        );
        execute(&kernel(".param .u64 out", &body), 1024, &Launch::linear(1, 32)).unwrap().1.loads
    };
    assert_eq!([reads(4).sectors, reads(8).sectors, reads(32).sectors, reads(0).sectors], [4, 8, 32, 1]);
    assert_eq!([reads(4).coalescing(), reads(8).coalescing(), reads(128).coalescing()], [1.0, 0.5, 0.125]);
}
