//! Memory accesses of instructions.

use crate::common::{expert, stream};
use moec_ndp_isa::*;
use proptest::prelude::*;

fn op(stream: &Stream, name: &str) -> Op {
    let found = stream.code.iter().find(|i| i.op.name() == name);
    found.expect("the example has it").op.clone()
}

#[test]
fn operand_accesses_match_the_block() {
    let stream = expert();
    let block = Block { first: 10, tokens: 2 };
    let lines = |region, lines| Touch::Lines { region, lines };
    let load = op(&stream, "load");
    assert_eq!(load.reads(block), [lines(1, 650..714), lines(1, 715..779)]);
    // The vectors of `x` are adjacent, so they are one range.
    assert_eq!(load.writes(block), [Touch::Buffer(0..8192)]);
    let gemv = op(&stream, "gemv");
    let sums = Touch::Buffer(33280..33280 + 2 * 8192);
    assert_eq!(gemv.reads(block), [sums.clone(), Touch::Buffer(0..8192), lines(0, 0..131_072)]);
    assert_eq!(gemv.writes(block), [sums]);
    let scale = op(&stream, "scale");
    let factors = [Touch::Buffer(32768..32772), Touch::Buffer(32832..32836)];
    assert_eq!(scale.reads(block)[1..], factors);
    let store = op(&stream, "store");
    assert_eq!(store.writes(block), [lines(2, 1280..1408), lines(2, 1408..1536)]);
    assert_eq!(store.writes(Block { first: 10, tokens: 0 }), []);
}

/// A GLU panel has 16 outputs, so 17 outputs are sums of two panels.
#[test]
fn glu_reads_whole_panels() {
    let text = crate::common::with("f32[33280 + t*8192], count 1024", "f32[33280 + t*8192], count 17");
    let glu = op(&parse(&text).expect("a stream"), "glu");
    let block = Block { first: 0, tokens: 1 };
    assert_eq!(glu.reads(block), [Touch::Buffer(33280..33280 + 256)]);
    assert_eq!(glu.writes(block), [Touch::Buffer(164_352..164_352 + 34)]);
}

#[test]
fn every_instruction_but_control_has_an_engine() {
    let engines: Vec<_> = expert().code.iter().map(|i| i.op.engine().map(Engine::name)).collect();
    let (mem, act, gemv) = (Some("MEM"), Some("ACT"), Some("GEMV"));
    assert_eq!(engines, [None, mem, mem, act, act, gemv, act, gemv, act, mem, None]);
    assert!(Engine::ALL.into_iter().enumerate().all(|(i, engine)| engine.index() == i));
}

proptest! {
    /// Operands and blocks may have any values.
    #[test]
    fn no_operand_overflows(stream in stream(), first in any::<u64>(), tokens in 0..3_u32) {
        for instruction in &stream.code {
            let block = Block { first, tokens };
            let (reads, writes) = (instruction.op.reads(block), instruction.op.writes(block));
            prop_assert!(reads.len() + writes.len() <= 15);
            let last = Block { first, tokens: u32::MAX };
            for slab in instruction.op.slabs() {
                prop_assert!(slab.ranges(u32::MAX).next().is_some());
            }
            for lines in instruction.op.lines() {
                prop_assert!(lines.ranges(last).next().is_some());
            }
        }
    }
}
