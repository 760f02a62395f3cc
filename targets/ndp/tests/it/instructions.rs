//! Instructions that experts' streams do not contain; and the time that each instruction takes.

use crate::common::{Random, bits, small};
use half::bf16;
use moec_ndp::allocation::{DramLayout, RowAllocation};
use moec_ndp::machine::{Bus, Dimms, Fault, Program, Report, time};
use moec_ndp_isa::parse;

/// A stream for DIMM 1. Each of 8 slots has two lines of input and six of output; the code is in a loop over
/// blocks of 3 tokens.
fn program(code: &str) -> Program {
    let text = format!(
        "stream test\nsystem channels 2 dimms 2\ndimm 1\n\
         geometry subchannels 2 ranks 2 bank_groups 2 banks 2 rows 4096 lines 64\ntokens 3\nslots 8\n\
         region in rows 0..1 layout localized access read\n\
         region out rows 1..2 layout localized access write\n\
         region weights rows 2..4 layout localized access read\nloop\n{code}\nend\n"
    );
    Program::new(parse(&text).expect("a stream")).expect("it is verified")
}

/// `0.5·x·(1 + erf(x/√2))` for 0.5, 1 and −1, from tables of the normal distribution.
const GELU: [(f32, f64); 3] =
    [(0.5, 0.345_731_230_637_004), (1.0, 0.841_344_746_068_543), (-1.0, -0.158_655_253_931_457)];

#[test]
fn activation_unit_computes_its_functions() {
    let program = program(
        "load f32[0 + t*64], in[0 + r*2], lines 1
         load f32[1024 + t*64], in[1 + r*2], lines 1
         barrier
         act sigmoid f32[2048 + t*64], f32[0 + t*64], count 16
         act gelu f32[3072 + t*64], f32[0 + t*64], count 16
         mul f32[4096 + t*64], f32[0 + t*64], f32[1024 + t*64], count 16
         act relu b16[5120 + t*64], f32[0 + t*64], count 16
         act relu b16[5120 + t*64], f32[0 + t*64], count 16
         convert f32[6144 + t*64], b16[5120 + t*64], count 16
         reduce f32[1024 + t*64], f32[0 + t*64], count 16
         act gelu_tanh f32[7168 + t*64], f32[0 + t*64], count 16
         barrier
         store f32[2048 + t*64], out[0 + r*6], lines 1
         store f32[3072 + t*64], out[1 + r*6], lines 1
         store f32[4096 + t*64], out[2 + r*6], lines 1
         store f32[6144 + t*64], out[3 + r*6], lines 1
         store f32[1024 + t*64], out[4 + r*6], lines 1
         store f32[7168 + t*64], out[5 + r*6], lines 1",
    );
    let mut dimms = Dimms::new(small(), Bus::plain(64.0), true).expect("DIMMs");
    let at = |rows| RowAllocation { layout: DramLayout::Localized(1), rows };
    let mut numbers = Random(3).numbers(8 * 32, 6.0);
    for (number, (x, _)) in numbers[2 * 32..].iter_mut().zip(GELU) {
        *number = x;
    }
    let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    dimms.write(&at(0..1), 0, &bytes).expect("inside");
    // Tokens of slots 2 to 7, in two blocks.
    dimms.run(&program, 2, 6).expect("no fault");
    let untouched = dimms.read(&at(1..2), 0, &mut [0; 64]);
    assert!(matches!(untouched, Err(Fault::Unwritten { dimm: 1, .. })), "slot 0 has no result");
    for slot in 2..8 {
        let mut bytes = [0; 6 * 64];
        dimms.read(&at(1..2), slot * 6, &mut bytes).expect("it was written");
        let out: Vec<f32> =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let (a, b) = numbers[slot as usize * 32..][..32].split_at(16);
        let near = |found: &[f32], what: &dyn Fn(f64) -> f64| {
            for (&found, &x) in found.iter().zip(a) {
                let expected = what(f64::from(x));
                assert!(
                    (f64::from(found) - expected).abs() <= expected.abs() * 1e-7 + 1e-12,
                    "{found} of {x}: {expected}"
                );
            }
        };
        near(&out[..16], &|x| (x / 2.0).tanh() / 2.0 + 0.5);
        near(&out[80..], &|x| {
            let y = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            x / (1.0 + (-2.0 * y).exp())
        });
        let exact = |found: &[f32], what: &dyn Fn(f32, f32) -> f32| {
            let expected: Vec<f32> = a.iter().zip(b).map(|(&a, &b)| what(a, b)).collect();
            assert_eq!(bits(found), bits(&expected));
        };
        exact(&out[32..48], &|a, b| a * b);
        exact(&out[48..64], &|a, _| bf16::from_f32(if a > 0.0 { a } else { 0.0 }).to_f32());
        exact(&out[64..80], &|a, b| a + b);
        if slot == 2 {
            for (&found, (x, expected)) in out[16..].iter().zip(GELU) {
                assert!((f64::from(found) - expected).abs() < 1e-7, "gelu({x}) = {found}");
            }
        }
    }
}

const CHAIN: &str = "load b16[0 + t*1024], in[0], lines 2 signal e0
    init f32[8192 + t*4096], count 1024 signal e1
    gemv f32[8192 + t*4096], b16[0 + t*1024], weights[0], panels 1, pairs 32 wait e0 wait e1 signal e2
    act relu b16[4096 + t*1024], f32[8192 + t*4096], count 32 wait e2 signal e3
    store b16[4096 + t*1024], out[0 + r*6], lines 1 wait e3";

fn ns(code: &str, bus: Bus, tokens: u32) -> Report {
    time(&program(code), &bus, tokens)
}

/// A bus that takes 1 ns per line.
fn plain() -> Bus {
    Bus::plain(64.0)
}

#[test]
fn instructions_take_their_documented_clocks() {
    // 2 ns for x after 4 for the zeros, then 64 for a tile, 16 for its products, 1, and 1 for a line.
    let report = ns(CHAIN, plain(), 1);
    assert_eq!((report.ns, report.busy), (86.0, [3.0, 80.0, 5.0, 0.0]));
    assert_eq!((report.read, report.written, report.tiles, report.flops), (66, 1, 1, 4096));
    // Three tokens share x: zeros take 12, products 48.
    assert_eq!(ns(CHAIN, plain(), 3).ns, 12.0 + 64.0 + 48.0 + 3.0 + 3.0);
    // Blocks do not overlap.
    assert_eq!(ns(CHAIN, plain(), 7).ns, 2.0 * 130.0 + 86.0);
    assert_eq!(ns(CHAIN, plain(), 0), Report::default());
    // The latency applies to each request: x, the tile and the result.
    let slow = Bus { latency_ns: 30.0, ..plain() };
    assert_eq!(ns(CHAIN, slow, 1).ns, 2.0 + 30.0 + 64.0 + 30.0 + 16.0 + 1.0 + 1.0 + 30.0);
    // Writes may be slower than reads.
    assert_eq!(ns(CHAIN, Bus { write_ns: 5.0, ..plain() }, 1).ns, 90.0);
}

/// 15 tiles of a panel, the last of them half full.
const LONG: &str = "load b16[0 + t*2048], in[0], lines 2
    load b16[128 + t*2048], in[0], lines 2
    load b16[256 + t*2048], in[0], lines 16
    load b16[1280 + t*2048], in[0], lines 12
    init f32[8192 + t*128], count 32
    barrier
    gemv f32[8192 + t*128], b16[0 + t*2048], weights[0], panels 1, pairs 464";

#[test]
fn reads_overlap_tile_multiplication() {
    let before = 32.0;
    // Limited by reads; the products of the last tile follow.
    assert_eq!(ns(LONG, plain(), 1).ns, before + 928.0 + 16.0);
    assert_eq!(ns(LONG, plain(), 1).tiles, 15);
    // Limited by products; the first tile is read before them.
    let fast = Bus::plain(256.0);
    assert_eq!(ns(LONG, fast, 3).ns, before / 4.0 + 16.0 + 15.0 * 48.0);
    // The four loads do not overlap. The FIFO hides latency for as many tiles as fit into it, which are four.
    let late = |latency_ns| ns(LONG, Bus { latency_ns, ..plain() }, 1).ns - (before + 4.0 * latency_ns);
    assert_eq!(late(150.0), 928.0 + 150.0 + 16.0);
    assert!(late(400.0) > 928.0 + 400.0 + 16.0);
}

#[test]
fn engines_share_the_bus() {
    let both = format!("{LONG}\nload b16[16384 + t*8192], in[0], lines 100");
    // 928 lines of weights and 100 others, alternately.
    let report = ns(&both, plain(), 1);
    assert_eq!(report.ns, 32.0 + 928.0 + 100.0 + 16.0);
    let [mem, ..] = report.busy;
    assert!(mem < 32.0 + 300.0, "{mem}: it comes between tiles, not after all");
    // With a barrier between them, they do not overlap.
    let separated = both.replace("\nload b16[16384", "\nbarrier\nload b16[16384");
    assert_eq!(ns(&separated, plain(), 1).ns, 32.0 + 928.0 + 16.0 + 100.0);
    // One engine executes one instruction at a time, with or without events.
    let twice = format!(
        "{CHAIN}\ninit f32[65536 + t*64], count 16\nact silu f32[65536 + t*64], f32[65536 + t*64], count 16"
    );
    assert_eq!(ns(&twice, plain(), 1).busy[2], 5.0 + 1.0 + 16.0);
}

#[test]
fn host_accesses_are_whole_lines_within_the_allotment() {
    let mut dimms = Dimms::new(small(), plain(), true).expect("DIMMs");
    let at = |layout, rows| RowAllocation { layout, rows };
    let message = |found: Result<(), Fault>| found.expect_err("a fault").to_string();
    let four = at(DramLayout::Localized(4), 0..1);
    assert_eq!(message(dimms.write(&four, 0, &[0; 64])), "there is no DIMM 4: the machine has 4, from 0");
    let one = at(DramLayout::Localized(0), 5..6);
    assert_eq!(message(dimms.write(&one, 0, &[0; 65])), "65 bytes are not whole lines of 64");
    assert_eq!(message(dimms.write(&one, 1023, &[0; 128])), "2 lines from line 1023 on: rows 5..6 have 1024");
    assert_eq!(
        message(dimms.read(&one, u64::MAX, &mut [0; 64])),
        format!("1 lines from line {} on: rows 5..6 have 1024", u64::MAX)
    );
    let all = at(DramLayout::Striped, 4095..4096);
    dimms.write(&all, 4 * 1024 - 1, &[7; 64]).expect("the last line");
    assert!(message(dimms.write(&all, 4 * 1024 - 1, &[0; 128])).ends_with("rows 4095..4096 have 4096"));
    let mut line = [0; 64];
    dimms.read(&all, 4 * 1024 - 1, &mut line).expect("it was written");
    assert_eq!(line, [7; 64]);
    assert!(
        message(dimms.read(&all, 0, &mut line)).starts_with("DIMM 0 reads an address that was not written")
    );
}
