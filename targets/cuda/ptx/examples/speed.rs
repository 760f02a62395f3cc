//! Speed of executed kernels: additions, multiply-adds and a tiled product, in operations of threads per
//! second.
//!
//! `cargo run --release -p moec-ptx --example speed`
#![allow(clippy::print_stdout, reason = "it says what it measured")]

use moec_ptx::{Argument, Launch, Memory, Program, parse};
use std::error::Error;
use std::time::Instant;

/// A loop with this many iterations around 16 times an instruction.
fn text(instruction: &str, turns: u32) -> String {
    format!(
        ".version 8.3\n.target sm_80\n.address_size 64\n.visible .entry kernel(.param .u64 out) {{\n\
         .reg .b32 %r<4>; .reg .f32 %f<4>; .reg .b64 %d<4>; .reg .pred %p<2>;\n\
         ld.param.u64 %d1, [out]; mov.u32 %r1, 0; mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f3F000000; mov.u32 %r2, 3;\n\
         LOOP:\n{}add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, {turns}; @%p1 bra LOOP;\n\
         mov.u32 %r3, %tid.x; mad.wide.u32 %d2, %r3, 4, %d1; st.global.f32 [%d2], %f1; ret; }}",
        format!("{instruction}\n").repeat(16)
    )
}

fn main() -> Result<(), Box<dyn Error>> {
    let rows = [
        ("add.f32", "add.f32 %f1, %f1, %f2;"),
        ("mul.f32", "mul.f32 %f1, %f1, %f2;"),
        ("fma.rn.f32", "fma.rn.f32 %f1, %f1, %f2, %f2;"),
        ("add.u32", "add.u32 %r2, %r2, %r2;"),
        ("ex2.approx.f32", "ex2.approx.ftz.f32 %f1, %f2;"),
    ];
    for (name, instruction) in rows {
        let module = parse(&text(instruction, 10_000))?;
        let mut memory = Memory::new(&module)?;
        let out = memory.add("out", &[0; 1024]);
        let program = Program::new(&module, "kernel")?;
        let start = Instant::now();
        let report = program.launch(&memory, &[Argument::Buffer(out)], &Launch::linear(1, 256))?;
        let seconds = start.elapsed().as_secs_f64();
        println!("{name}: {:.0} million of threads a second", report.all().threads as f64 / seconds / 1e6);
    }
    let module = parse(include_str!("../tests/samples/matmul.ptx"))?;
    let mut memory = Memory::new(&module)?;
    let matrices = [0; 3].map(|_| memory.add("matrix", &vec![0; 4 * 256 * 256]));
    let mut arguments: Vec<_> = matrices.map(Argument::Buffer).into();
    arguments.push(Argument::U32(256));
    let program = Program::new(&module, "matmul")?;
    for (races, workers) in [(true, 1), (false, 1), (false, 2)] {
        let launch = Launch { races, workers, ..Launch::new([16, 16, 1], [16, 16, 1]) };
        let start = Instant::now();
        let report = program.launch(&memory, &arguments, &launch)?;
        let rate = report.all().threads as f64 / start.elapsed().as_secs_f64() / 1e6;
        println!("matmul 256, races {races}, {workers} workers: {rate:.0} million of threads a second");
    }
    Ok(())
}
