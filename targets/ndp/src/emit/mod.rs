//! From an expert to its command stream.
//!
//! The stream works on blocks of as many tokens as fit into the buffer. For each token the buffer holds its
//! activations `x` and the whole intermediate `h`. It holds the sums of both matrices in *chunks* of some
//! panels, which go through a pipeline. While the weights of one chunk are multiplied, the sums of the
//! previous chunk become results. Meanwhile those of the next chunk get their biases or zeros. A barrier ends
//! every step of the pipeline: there are 32 events, and large experts have more chunks.
//!
//! | step | GEMV | ACT | MEM |
//! |---|---|---|---|
//! | gate and up, `i` | chunk `i` | `h` of chunk `i−1`; zeros for `i+1` | biases for `i+1` |
//! | down, `i` | chunk `i` | routing weight on chunk `i−1`; zeros for `i+1` | results of `i−1` or `i−2`; biases for `i+1` |
//!
//! The sums of down take the place of `x` and the sums of gate and up.
#![expect(
    clippy::cast_possible_truncation,
    reason = "numbers of a memory system below 2⁴⁰ lines, and of one layer"
)]

mod plan;
mod transfer;

use crate::allocation::{Boxes, DimmConfig};
use crate::image::{Image, ImageError, Shape};
use moec_ir::Glu;
use moec_ndp_isa::{Access, BUFFER, Instruction, Layout, Lines, MAX_CODE, Op, Region, Slab, Stream};
use plan::{Chunk, Chunks, Plan};
use std::ops::Range;

pub use transfer::transfer;

/// Result that a slot of the outbox gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Output {
    /// The expert's result.
    Slots,
    /// The result times the routing weight of the slot.
    Weighted,
}

/// An expert of which no stream can be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EmitError {
    /// A shape without an image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Not even one token fits.
    #[error(
        "a token of an expert of {} by {} takes {bytes} bytes of the buffer, which has {BUFFER}: such an expert cannot \
         be computed in a DIMM",
        .shape.hidden, .shape.inner
    )]
    Buffer {
        /// The expert.
        shape: Shape,
        /// Bytes of a token, with the sums of one panel at a time.
        bytes: u64,
    },
    /// No instruction joins gate and up so.
    #[error("gate and up are combined by {0:?}, which no instruction of a DIMM computes")]
    Join(Glu),
    /// More instructions, or more lines in one, than there can be.
    #[error(
        "the stream of an expert of {} by {} takes more instructions than a stream has, or more lines than an instruction \
         moves", .0.hidden, .0.inner
    )]
    Long(Shape),
    /// Both ends of a move are the same.
    #[error("an expert that stays where it is needs no stream")]
    Stays,
}

/// Regions of an expert's stream, by their number.
const EXPERT: u16 = 0;
const INBOX: u16 = 1;
const OUTBOX: u16 = 2;
const FACTORS: u16 = 3;

/// Stream that computes one localized expert on DIMM `dimm`. Its image is in row sets `rows`; activations
/// come from the inbox, and results go to the outbox, slot by slot.
///
/// # Errors
/// Fails for a shape without an image, an expert of which no token fits into the buffer, or one with too many
/// chunks.
pub fn emit(
    shape: &Shape,
    dimm_config: &DimmConfig,
    dimm: u32,
    rows: Range<u32>,
    boxes: &Boxes,
    output: Output,
) -> Result<Stream, EmitError> {
    let plan = Plan::new(shape, boxes.slots, output)?;
    let mut code = vec![Instruction::from(Op::Loop)];
    code.push(load(plan.input(), INBOX, shape.input_lines()));
    if output == Output::Weighted {
        code.push(load(plan.factors(), FACTORS, 1));
    }
    let Image { gate_up, down, biases, .. } = plan.image;
    let (gate_up_biases, down_biases) = (biases.map(|b| b.0), biases.map(|b| b.1));
    let stages: [Stage<'_>; 3] =
        [&|chunk| chunk.prepare(gate_up_biases), &|chunk| chunk.multiply(&gate_up, plan.input()), &|chunk| {
            plan.join(chunk)
        }];
    pipeline(&mut code, &plan.gate_up, plan.tokens, &stages);
    code.push(Op::Barrier.into());
    // Without routing weights the third one is left out.
    let stages: [Stage<'_>; 4] = [
        &|chunk| chunk.prepare(down_biases),
        &|chunk| chunk.multiply(&down, plan.intermediate(0)),
        &|chunk| chunk.scale(plan.factors()),
        &|chunk| chunk.store(shape.output_lines()),
    ];
    match (output, stages) {
        (Output::Slots, [prepare, multiply, _, store]) => {
            pipeline(&mut code, &plan.down, plan.tokens, &[prepare, multiply, store]);
        }
        (Output::Weighted, stages) => pipeline(&mut code, &plan.down, plan.tokens, &stages),
    }
    code.push(Op::End.into());
    if code.len() > MAX_CODE {
        return Err(EmitError::Long(*shape));
    }
    let region = |name, rows, access| region(name, rows, Layout::Localized, access);
    let mut regions = vec![
        region("expert", &rows, Access::Read),
        region("inbox", &boxes.inbox, Access::Read),
        region("outbox", &boxes.outbox, Access::Write),
    ];
    if output == Output::Weighted {
        regions.push(region("factors", &boxes.factors, Access::Read));
    }
    Ok(Stream {
        name: "expert".into(),
        system: dimm_config.system,
        dimm,
        geometry: dimm_config.geometry,
        tokens: plan.tokens,
        slots: boxes.slots,
        regions,
        code,
    })
}

type Stage<'a> = &'a dyn Fn(&Chunk) -> Op;

/// Every chunk goes through all stages, one a step; in a step every stage has another chunk.
fn pipeline(code: &mut Vec<Instruction>, chunks: &Chunks, tokens: u32, stages: &[Stage<'_>]) {
    let steps = chunks.count() as usize + stages.len() - 1;
    for step in 0..steps {
        if step > 0 {
            code.push(Op::Barrier.into());
        }
        for (number, stage) in stages.iter().enumerate() {
            if let Some(chunk) = step.checked_sub(number).and_then(|chunk| chunks.get(chunk as u32, tokens)) {
                code.push(stage(&chunk).into());
            }
        }
    }
}

/// Reads `lines` lines of every token's row.
fn load(dst: Slab, region: u16, lines: u64) -> Instruction {
    Op::Load { dst, src: Lines { region, line: 0 }, stride: lines, lines: lines as u32 }.into()
}

fn region(name: &str, rows: &Range<u32>, layout: Layout, access: Access) -> Region {
    Region { name: name.into(), rows: rows.clone(), layout, access }
}
