//! Places of a block's vectors in the buffer, and the instructions on them.

use super::{EXPERT, EmitError, OUTBOX, Output};
use crate::image::{Image, Matrix, SUM_LINES, Shape};
use crate::kinds;
use moec_ndp_isa::{BUFFER, GLU_PANEL, Glu, LINE, Lines, MAX_TOKENS, Number, Op, PANEL, Slab};

/// Weights that a chunk has at least, in lines: reading 1 MiB takes 7 µs, beside which starting does not
/// count.
const CHUNK_LINES: u64 = 1 << 14;
/// Bytes of the sums of a panel, of one token.
const SUM_BYTES: u64 = SUM_LINES * LINE as u64;

/// Panels of gate and up that a chunk has a multiple of: their results are whole lines of bf16.
const UNIT: u32 = 2;

/// Places of a block's vectors: bytes of a token, and panels of a chunk.
pub(super) struct Plan {
    pub(super) image: Image,
    pub(super) tokens: u32,
    glu: Glu,
    h: u64,
    x: u64,
    factor: u64,
    pub(super) gate_up: Chunks,
    pub(super) down: Chunks,
}

/// The chunks of a matrix.
pub(super) struct Chunks {
    matrix: Matrix,
    /// Panels of each but the last.
    panels: u32,
    /// Buffers that they take in turns.
    depth: u32,
    /// First byte of the first buffer.
    base: u64,
}

/// Some panels of a matrix.
pub(super) struct Chunk {
    first: u32,
    panels: u32,
    /// Their sums.
    sums: Slab,
}

impl Chunk {
    /// The biases of the panels, whose first line is given, or zeros.
    pub(super) fn prepare(&self, biases: Option<u64>) -> Op {
        let Some(line) = biases else {
            return Op::Init { dst: self.sums, count: self.panels * PANEL };
        };
        let src = Lines { region: EXPERT, line: line + self.line() };
        Op::Load { dst: self.sums, src, stride: 0, lines: self.panels * SUM_LINES as u32 }
    }

    /// The panels of a matrix times `x`.
    pub(super) fn multiply(&self, matrix: &Matrix, x: Slab) -> Op {
        let line = matrix.line + u64::from(self.first) * matrix.panel_lines();
        let weights = Lines { region: EXPERT, line };
        Op::Gemv { acc: self.sums, x, weights, panels: self.panels, pairs: matrix.pairs }
    }

    /// The sums times one factor of each token.
    pub(super) fn scale(&self, factor: Slab) -> Op {
        Op::Scale { dst: self.sums, src: self.sums, factor, count: self.panels * PANEL }
    }

    /// The sums go to the outbox, which has `row` lines of a slot.
    pub(super) fn store(&self, row: u64) -> Op {
        let lines = (row - self.line()).min(u64::from(self.panels) * SUM_LINES) as u32;
        Op::Store { src: self.sums, dst: Lines { region: OUTBOX, line: self.line() }, stride: row, lines }
    }

    /// The first line of its sums in a row of them.
    fn line(&self) -> u64 {
        u64::from(self.first) * SUM_LINES
    }
}

impl Chunks {
    /// As many panels at a time as `room` bytes of a token hold in `depth` buffers. All chunks are about
    /// equally large and, except for the last one, a multiple of `unit`.
    fn new(matrix: Matrix, unit: u32, depth: u32, room: u64, base: u64) -> Self {
        let units = matrix.panels.div_ceil(unit);
        let most = (room / SUM_BYTES / u64::from(depth * unit)).clamp(1, u64::from(units)) as u32;
        let panels = units.div_ceil(units.div_ceil(most)) * unit;
        Self { matrix, panels, depth, base }
    }

    pub(super) fn count(&self) -> u32 {
        self.matrix.panels.div_ceil(self.panels)
    }

    pub(super) fn get(&self, chunk: u32, tokens: u32) -> Option<Chunk> {
        let first = chunk.checked_mul(self.panels).filter(|&first| first < self.matrix.panels)?;
        let stride = u64::from(self.panels) * SUM_BYTES;
        let base = self.base + u64::from(chunk % self.depth) * stride * u64::from(tokens);
        let sums = Slab { number: Number::F32, base: base as u32, stride: stride as u32 };
        Some(Chunk { first, panels: self.panels.min(self.matrix.panels - first), sums })
    }
}

/// Panels that a chunk has at least, a multiple of `unit`.
fn least(matrix: &Matrix, unit: u32) -> u64 {
    let all = u64::from(matrix.panels).next_multiple_of(u64::from(unit));
    CHUNK_LINES.div_ceil(matrix.panel_lines()).next_multiple_of(u64::from(unit)).min(all)
}

impl Plan {
    pub(super) fn new(shape: &Shape, slots: u32, output: Output) -> Result<Self, EmitError> {
        let image = shape.image()?;
        let glu = kinds::glu(shape.glu).ok_or(EmitError::Join(shape.glu))?;
        let (line, buffer) = (u64::from(LINE), u64::from(BUFFER));
        let h = (u64::from(image.down.pairs) * 4).next_multiple_of(line);
        let x = shape.input_lines() * line;
        let factor = if output == Output::Weighted { line } else { 0 };
        // Stages of the pipelines: this many chunks are in progress.
        let depths = if output == Output::Weighted { (3, 4) } else { (3, 3) };
        let bytes = |gate_up: u64, down: u64| {
            let sums =
                (x + gate_up * SUM_BYTES * u64::from(depths.0)).max(down * SUM_BYTES * u64::from(depths.1));
            h + factor + sums
        };
        let one = bytes(u64::from(UNIT), 1);
        if one > buffer {
            return Err(EmitError::Buffer { shape: *shape, bytes: one });
        }
        let tokens = (buffer / bytes(least(&image.gate_up, UNIT), least(&image.down, 1))).max(1);
        let tokens = tokens.min(u64::from(slots.max(1))).min(u64::from(MAX_TOKENS));
        let room = (buffer / tokens).saturating_sub(h + factor);
        let offset = (h + factor) * tokens;
        Ok(Self {
            image,
            tokens: tokens as u32,
            glu,
            h,
            x,
            factor,
            gate_up: Chunks::new(image.gate_up, UNIT, depths.0, room.saturating_sub(x), offset + x * tokens),
            down: Chunks::new(image.down, 1, depths.1, room, offset),
        })
    }

    /// The sums of a chunk of gate and up become a part of the intermediate.
    pub(super) fn join(&self, chunk: &Chunk) -> Op {
        let first = chunk.first * GLU_PANEL;
        let count = (self.image.down.pairs * 2 - first).min(chunk.panels * GLU_PANEL);
        let dst = self.intermediate(first * 2);
        Op::Glu { kind: self.glu, dst, src: chunk.sums, count }
    }

    /// bf16, from byte `offset` of each vector on.
    pub(super) fn intermediate(&self, offset: u32) -> Slab {
        Slab { number: Number::B16, base: offset, stride: self.h as u32 }
    }

    /// Slab with one f32 per token: routing weights.
    pub(super) fn factors(&self) -> Slab {
        let base = self.h * u64::from(self.tokens);
        Slab { number: Number::F32, base: base as u32, stride: self.factor as u32 }
    }

    /// bf16.
    pub(super) fn input(&self) -> Slab {
        let base = (self.h + self.factor) * u64::from(self.tokens);
        Slab { number: Number::B16, base: base as u32, stride: self.x as u32 }
    }
}
