//! Hazards: the verifier's clocks compared with a graph of the order of instructions.

use crate::common::expert;
use moec_ndp_isa::*;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

/// Every wait of the example is needed: without it the verifier reports a hazard.
#[test]
fn every_wait_of_the_example_is_needed() {
    let whole = expert();
    let mut tried = 0;
    for (index, instruction) in whole.code.iter().enumerate() {
        for event in instruction.waits.iter() {
            let mut stream = whole.clone();
            stream.code[index].waits.0 &= !(1 << event);
            let fault = verify(&stream).expect_err("a hazard");
            assert_eq!(fault.instruction, Some(index), "{fault}");
            assert!(fault.message.contains("at the same time"), "{fault}");
            tried += 1;
        }
    }
    assert_eq!(tried, 7);
}

/// Choices for an instruction: its kind, its slabs, its line, and the events that it waits for and signals.
type Choice = (usize, u32, u32, u64, Option<u8>, Option<u8>);

/// Two tokens with vectors of 64 bytes; slabs whose bases differ by 64 bytes overlap by half.
fn slab(number: Number, at: u32) -> Slab {
    Slab { number, base: at * 64, stride: 64 }
}

fn instruction((kind, to, from, line, wait, signal): Choice) -> Instruction {
    let (dst, src) = (slab(Number::F32, to), slab(Number::F32, from + 8));
    let memory = Lines { region: 0, line };
    let op = match kind {
        0 => Op::Load { dst, src: memory, stride: 0, lines: 1 },
        1 => Op::Store { src: dst, dst: memory, stride: 1, lines: 1 },
        2 => Op::Init { dst, count: 16 },
        3 => Op::Init { dst: src, count: 10 },
        9 => Op::Convert { dst: slab(Number::B16, from + 8), src: Slab { stride: 0, ..dst }, count: 20 },
        4 => Op::Reduce { dst, src, count: 10 },
        5 => Op::Gemv {
            acc: Slab { stride: 128, ..dst },
            x: slab(Number::B16, from + 8),
            weights: Lines { region: 0, line },
            panels: 1,
            pairs: 2,
        },
        6 => Op::Relayout { src: memory, dst: Lines { region: 1, line }, lines: 3, to: Layout::Striped },
        7 => Op::Relayout { src: Lines { region: 1, line }, dst: memory, lines: 3, to: Layout::Localized },
        _ => return Instruction::from(Op::Barrier),
    };
    Instruction { op, waits: wait.map_or(Events(0), |event| Events(1 << event)), signal }
}

/// A loop of these instructions. Before them, all slabs are filled by the first token (a stride of 1024),
/// partly by each token, or not at all (0).
fn program(choices: Vec<Choice>, stride: u32) -> Stream {
    let mut stream = expert();
    stream.tokens = 2;
    stream.slots = 2;
    stream.regions.truncate(2);
    stream.regions[0] = Region { access: Access::Write, ..stream.regions[0].clone() };
    stream.regions[1] =
        Region { access: Access::Write, layout: Layout::Striped, ..stream.regions[1].clone() };
    let mut code = vec![Op::Loop.into()];
    if stride > 0 {
        let dst = Slab { stride, ..slab(Number::F32, 0) };
        code.push(Op::Init { dst, count: stride / 4 }.into());
        code.push(Op::Barrier.into());
    }
    code.extend(choices.into_iter().map(instruction));
    code.push(Op::End.into());
    stream.code = code;
    stream
}

fn overlap(one: &[Touch], other: &[Touch]) -> bool {
    one.iter().any(|a| {
        other.iter().any(|b| match (a, b) {
            (Touch::Buffer(a), Touch::Buffer(b)) => a.start < b.end && b.start < a.end,
            (Touch::Lines { region, lines: a }, Touch::Lines { region: other, lines: b }) => {
                region == other && a.start < b.end && b.start < a.end
            }
            _ => false,
        })
    })
}

/// The verdict by the order of all pairs: `before[i][j]` if `i` has completed when `j` begins.
fn allowed(stream: &Stream) -> bool {
    let (code, count) = (&stream.code, stream.code.len());
    let mut before = vec![vec![false; count]; count];
    let mut events = [None; EVENTS as usize];
    for j in 0..count {
        for event in code[j].waits.iter() {
            let Some(i) = events[usize::from(event)] else { return false };
            before[i as usize][j] = true;
        }
        for i in 0..j {
            let (one, other) = (code[i].op.engine(), code[j].op.engine());
            before[i][j] |= one.is_none() || other.is_none() || one == other;
        }
        if let Some(event) = code[j].signal
            && events[usize::from(event)].replace(j as u32).is_some()
        {
            return false;
        }
    }
    for k in 0..count {
        for i in 0..count {
            for j in 0..count {
                before[i][j] |= before[i][k] && before[k][j];
            }
        }
    }
    let block = Block { first: 0, tokens: stream.tokens };
    for j in 0..count {
        let (reads, writes) = (code[j].op.reads(block), code[j].op.writes(block));
        for i in 0..j {
            let (r, w) = (code[i].op.reads(block), code[i].op.writes(block));
            if !before[i][j] && (overlap(&w, &reads) || overlap(&w, &writes) || overlap(&r, &writes)) {
                return false;
            }
        }
    }
    (1..=stream.tokens).all(|tokens| defined(stream, Block { first: 0, tokens }))
}

/// Whether every byte is written before it is read.
fn defined(stream: &Stream, block: Block) -> bool {
    let bytes = |touches: Vec<Touch>| {
        let ranges = touches.into_iter().filter_map(|touch| match touch {
            Touch::Buffer(bytes) => Some(bytes.start as usize..bytes.end as usize),
            Touch::Lines { .. } => None,
        });
        ranges.flatten()
    };
    let mut filled = vec![false; BUFFER as usize];
    stream.code.iter().all(|Instruction { op, .. }| {
        let all = bytes(op.reads(block)).all(|byte| filled[byte]);
        bytes(op.writes(block)).for_each(|byte| filled[byte] = true);
        all
    })
}

fn choice() -> impl Strategy<Value = Choice> {
    let event = || proptest::option::weighted(0.6, 0..3_u8);
    (0..10_usize, 0..4_u32, 0..4_u32, 0..5_u64, event(), event())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn vector_clocks_agree_with_checking_all_pairs(choices in vec(choice(), 1..7), stride in select(vec![0, 576, 576, 1024, 1024, 1024])) {
        let stream = program(choices, stride);
        let verdict = verify(&stream);
        prop_assert_eq!(verdict.is_ok(), allowed(&stream), "{}\n{:?}", stream, verdict);
    }
}

/// Random programs get both verdicts often enough for the comparison to be meaningful.
#[test]
fn generated_programs_include_both_verdicts() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let mut good = 0;
    for _ in 0..1000 {
        let choices = vec(choice(), 1..7).new_tree(&mut runner).expect("a program").current();
        good += usize::from(verify(&program(choices, 1024)).is_ok());
    }
    assert!((100..900).contains(&good), "{good} of 1000 are well-formed");
}
