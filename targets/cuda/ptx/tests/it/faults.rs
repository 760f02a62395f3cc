//! Errors that stop a kernel, and their messages.

use crate::common::{SAMPLES, execute, kernel, sample, stopped};
use moec_ptx::{Argument, Kind, Launch, LaunchError, Memory, Program, parse};

/// Executes statements, with the thread's number in `%r1` and the address of a buffer of 256 words in `%d1`.
fn stops(statements: &str, threads: u32) -> moec_ptx::ExecutionError {
    let body =
        format!("ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 4;\n{statements}");
    stopped(&body, &Launch { steps: 1000, ..Launch::linear(1, threads) })
}

/// Statements, number of threads, expected error.
const STOPS: &[(&str, u32, Kind)] = &[
    ("add.s64 %d3, %d1, %d2; ld.global.u32 %r2, [%d3+1000];", 32, Kind::OutOfBounds),
    ("mov.u64 %d3, 16; st.global.u32 [%d3], %r1;", 1, Kind::OutOfBounds),
    ("ld.global.u32 %r2, [%d1+-4];", 1, Kind::OutOfBounds),
    (".shared .b8 s[16]; mov.u32 %r2, s; st.shared.u32 [%r2+16], %r1;", 1, Kind::OutOfBounds),
    (".local .b8 own[16]; mov.u64 %d3, own; st.local.u32 [%d3+16], %r1;", 1, Kind::OutOfBounds),
    ("mov.u64 %d3, 8; ld.param.u32 %r2, [%d3];", 1, Kind::OutOfBounds),
    ("ld.global.u32 %r2, [%d1+2];", 1, Kind::Misaligned),
    ("ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%d1+8];", 1, Kind::Misaligned),
    ("add.u32 %r2, %r3, 1;", 1, Kind::Uninitialised),
    ("setp.lt.u32 %p1, %r1, 5; @%p1 mov.u32 %r2, 1; add.u32 %r3, %r2, 1;", 32, Kind::Uninitialised),
    (".shared .align 4 .b8 s[16]; ld.shared.u32 %r2, [s];", 1, Kind::Uninitialised),
    (".shared .align 4 .b8 s[16]; st.shared.u32 [s], %r1;", 2, Kind::Race),
    (
        ".shared .align 4 .b8 s[512]; mov.u32 %r2, s; shl.b32 %r3, %r1, 2; add.u32 %r3, %r2, %r3; st.shared.u32 [%r3], %r1;\n\
         bar.sync 0; ld.shared.u32 %r4, [s]; st.shared.u32 [%r3], %r4;",
        64,
        Kind::Race,
    ),
    (
        ".shared .align 4 .b8 s[512]; mov.u32 %r2, s; shl.b32 %r3, %r1, 2; add.u32 %r3, %r2, %r3; st.shared.u32 [%r3], %r1;\n\
         bar.warp.sync -1; ld.shared.u32 %r4, [s];",
        64,
        Kind::Race,
    ),
    (
        ".shared .align 16 .b8 s[16]; mov.u32 %r2, s; cp.async.ca.shared.global [%r2], [%d1], 4; cp.async.commit_group;\n\
         ld.shared.u32 %r3, [s];",
        1,
        Kind::Uninitialised,
    ),
    (
        ".shared .align 16 .b8 s[16]; mov.u32 %r2, s; st.shared.u32 [s], %r2; cp.async.ca.shared.global [%r2], [%d1], 4;\n\
         cp.async.commit_group; cp.async.wait_group 1; ld.shared.u32 %r3, [s];",
        1,
        Kind::Race,
    ),
    ("setp.lt.u32 %p1, %r1, 32; @%p1 bra END; barrier.sync 1, 64;\nEND:", 64, Kind::Deadlock),
    (
        "setp.lt.u32 %p1, %r1, 8; @%p1 bra A; bar.sync 0; bra END;\nA: bar.sync 0;\nEND:",
        32,
        Kind::DivergentBarrier,
    ),
    ("setp.lt.u32 %p1, %r1, 8; @%p1 bar.sync 0;", 32, Kind::DivergentBarrier),
    (
        "setp.lt.u32 %p1, %r1, 8; @%p1 bra A; bar.warp.sync -1; bra END;\nA: bar.warp.sync -1;\nEND:",
        32,
        Kind::Deadlock,
    ),
    ("setp.lt.u32 %p1, %r1, 8; @%p1 shfl.sync.idx.b32 %r2, %r1, 9, 31, -1;", 32, Kind::InactiveLane),
    ("setp.lt.u32 %p1, %r1, 8; @%p1 shfl.sync.idx.b32 %r2, %r1, 9, 31, 255;", 32, Kind::InactiveLane),
    ("shfl.sync.down.b32 %r2, %r1, 1, 31, 65534;", 32, Kind::InactiveLane),
    ("shfl.sync.down.b32 %r2, %r1, 1, 31, -1;", 20, Kind::InactiveLane),
    ("bar.sync 16;", 1, Kind::Operand),
    ("bar.sync %r1;", 2, Kind::Operand),
    ("T: .branchtargets A;\nA: brx.idx %r1, T;", 2, Kind::Operand),
    ("trap;", 1, Kind::Trap),
    ("L: bra L;", 1, Kind::StepLimit),
];

#[test]
fn kernel_faults_are_named() {
    let mut messages = Vec::new();
    for (statements, threads, kind) in STOPS {
        let error = stops(statements, *threads);
        assert_eq!(error.kind, *kind, "{statements}: {error}");
        messages.push(error.to_string());
    }
    insta::assert_snapshot!(messages.join("\n"));
}

/// Negative offsets wrap around to addresses far past the end.
#[test]
fn addresses_before_shared_memory_are_out_of_bounds() {
    for statements in [
        ".shared .align 4 .b8 s[16]; mov.u32 %r2, 0; ld.shared.u32 %r3, [%r2+-4];",
        ".shared .align 4 .b8 s[16]; mov.u32 %r2, 0; st.shared.u32 [%r2+-4], %r1;",
    ] {
        let error = stops(statements, 1);
        assert_eq!(error.kind, Kind::OutOfBounds, "{statements}: {error}");
    }
}

#[test]
fn a_limit_of_threads_may_be_larger_than_any_block() {
    let body = ".maxntid 2147483647, 2147483647, 2147483647\n{ ret; }";
    let text = format!(".version 8.3 .target sm_80 .address_size 64 .visible .entry kernel() {body}");
    let module = parse(&text).unwrap();
    let program = Program::new(&module, "kernel").unwrap();
    program.launch(&Memory::new(&module).unwrap(), &[], &Launch::linear(1, 32)).unwrap();
}

#[test]
fn faults_allowed_by_the_launch_do_not_stop_it() {
    let body = "ld.param.u64 %d1, [out]; .shared .align 4 .b8 s[16]; add.u32 %r2, %r3, 5; st.shared.u32 [s], %r2;\n\
        ld.shared.u32 %r4, [s+8]; add.u32 %r2, %r2, %r4; st.global.u32 [%d1], %r2;";
    let launch = Launch { races: false, unwritten: true, ..Launch::linear(1, 64) };
    assert_eq!(execute(&kernel(".param .u64 out", body), 1, &launch).unwrap().0, [5]);
}

#[test]
fn first_faulting_block_is_reported() {
    let body =
        "ld.param.u64 %d1, [out]; mov.u32 %r1, %ctaid.x; setp.lt.u32 %p1, %r1, 5; @%p1 bra END; trap;\nEND:";
    for workers in [1, 4] {
        let error = stopped(body, &Launch { workers, ..Launch::linear(64, 32) });
        assert_eq!(error.block, [5, 0, 0]);
    }
}

#[test]
fn mismatched_launches_are_rejected() {
    let module = parse(&sample("matmul")).unwrap();
    let memory = Memory::new(&module).unwrap();
    let program = Program::new(&module, "matmul").unwrap();
    let four = vec![Argument::U64(0), Argument::U64(0), Argument::U64(0), Argument::U32(1)];
    let right = Launch::new([1, 1, 1], [16, 16, 1]);
    let wide = vec![Argument::U64(0); 4];
    let messages: Vec<_> = [
        (&four, Launch::linear(1, 256)),
        (&four, Launch::linear(1, 2048)),
        (&four, Launch { grid: [1, 0, 1], ..right.clone() }),
        (&four, Launch { dynamic_shared: 1 << 20, ..right.clone() }),
        (&vec![], right.clone()),
        (&wide, right),
    ]
    .into_iter()
    .map(|(arguments, launch)| match program.launch(&memory, arguments, &launch) {
        Err(error @ LaunchError::Start { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    })
    .collect();
    insta::assert_snapshot!(messages.join("\n"));
    assert!(Program::new(&module, "mat").is_err_and(|e| e.to_string().contains("kernels: matmul")));
}

/// A kernel compiled by LLVM from which one barrier was removed has races, which are reported.
#[test]
fn missing_barrier_is_detected() {
    let text = sample("matmul");
    assert!(SAMPLES.contains(&"matmul"));
    for nth in 0..2 {
        let at = text.match_indices("bar.sync").nth(nth).unwrap().0;
        let broken = format!("{}membar.cta; //{}", &text[..at], &text[at..]);
        let module = parse(&broken).unwrap();
        let mut memory = Memory::new(&module).unwrap();
        let buffer = memory.add("matrices", &vec![0; 4 * 48 * 48]);
        let arguments =
            [Argument::Buffer(buffer), Argument::Buffer(buffer), Argument::Buffer(buffer), Argument::U32(48)];
        let program = Program::new(&module, "matmul").unwrap();
        match program.launch(&memory, &arguments, &Launch::new([3, 3, 1], [16, 16, 1])) {
            Err(LaunchError::Execution(error)) => {
                assert!(matches!(error.kind, Kind::Race | Kind::Uninitialised), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
}
