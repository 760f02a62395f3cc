//! Execution of a stream: its instructions, one after the other.

use super::act::{activate, glu};
use super::dimms::{Dimms, span};
use super::fault::Fault;
use super::gemv::{COLUMNS, Inputs, PAIRS, TILE_BYTES, Tile};
use super::program::Program;
use super::report::Report;
use super::time::time;
use crate::allocation::DimmConfig;
use half::bf16;
use moec_ndp_isa::{BUFFER, Block, GLU_PANEL, LINE, Layout, Lines, Number, Op, PAIR_LINES, Slab, Stream};
use std::ops::Range;

const BYTES: usize = LINE as usize;

/// The unit of one DIMM, with its buffer.
struct Unit<'a> {
    dimms: &'a mut Dimms,
    stream: &'a Stream,
    buffer: Vec<u8>,
    block: Block,
    /// The instruction that is being executed.
    at: usize,
}

impl Dimms {
    /// Executes a stream on its DIMM, for `n` tokens whose slots begin at `first`.
    ///
    /// # Errors
    /// A stream for another machine, or too many tokens; [`Fault::Unwritten`] of strict DIMMs. Then what the
    /// stream writes may be there in part.
    pub fn run(&mut self, program: &Program, first: u32, n: u32) -> Result<Report, Fault> {
        self.execute(program, first, n)?;
        Ok(time(program, self.bus(), n))
    }

    /// Like [`Self::run`], for callers that need no times.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn execute(&mut self, program: &Program, first: u32, n: u32) -> Result<(), Fault> {
        let stream = program.stream();
        let theirs = DimmConfig { system: stream.system, geometry: stream.geometry };
        if theirs != *self.dimm_config() {
            let stream = stream.name.clone();
            return Err(Fault::OtherDimms { stream, theirs, ours: *self.dimm_config() });
        }
        let slots = stream.slots;
        if first.checked_add(n).is_none_or(|end| end > slots) {
            return Err(Fault::Slots { stream: stream.name.clone(), first, n, slots });
        }
        self::stream(self, stream, first, n)
    }
}

/// Executes a stream that the verifier has accepted.
fn stream(dimms: &mut Dimms, stream: &Stream, first: u32, n: u32) -> Result<(), Fault> {
    let block = Block { first: u64::from(first), tokens: 0 };
    let mut unit = Unit { dimms, stream, buffer: vec![0; BUFFER as usize], block, at: 0 };
    let mut at = 0;
    while let Some(instruction) = stream.code.get(at) {
        let mut end = at + 1;
        if instruction.op == Op::Loop {
            end += stream.code[end..].iter().take_while(|i| i.op != Op::End).count();
            for from in (0..n).step_by(stream.tokens.max(1) as usize) {
                let tokens = stream.tokens.min(n - from);
                unit.block = Block { first: u64::from(first + from), tokens };
                unit.all(at + 1..end)?;
            }
        } else {
            unit.all(at..end)?;
        }
        at = end;
    }
    Ok(())
}

impl Unit<'_> {
    fn all(&mut self, code: Range<usize>) -> Result<(), Fault> {
        let stream = self.stream;
        for (at, instruction) in code.clone().zip(&stream.code[code]) {
            self.at = at;
            self.one(&instruction.op)?;
        }
        Ok(())
    }

    fn one(&mut self, op: &Op) -> Result<(), Fault> {
        match *op {
            Op::Loop | Op::End | Op::Barrier => Ok(()),
            Op::Load { dst, src, stride, lines } => self.each(|unit, t| {
                let line = src.line + (unit.block.first + u64::from(t)) * stride;
                let range = unit.range(dst, t, lines as usize * BYTES)?;
                let rows = &unit.stream.regions[usize::from(src.region)].rows;
                unit.dimms.lines(unit.stream.dimm, rows, line, &mut unit.buffer[range])
            }),
            Op::Store { src, dst, stride, lines } => self.each(|unit, t| {
                let line = dst.line + (unit.block.first + u64::from(t)) * stride;
                let range = unit.range(src, t, lines as usize * BYTES)?;
                let rows = &unit.stream.regions[usize::from(dst.region)].rows;
                unit.dimms.memory_mut(unit.stream.dimm)?.write(span(rows, line), &unit.buffer[range]);
                Ok(())
            }),
            Op::Init { dst, count } => self.each(|unit, t| unit.put(dst, t, &vec![0.0; count as usize])),
            Op::Gemv { acc, x, weights, panels, pairs } => self.gemv(acc, x, weights, panels, pairs as usize),
            Op::Act { kind, dst, src, count } => self.each(|unit, t| {
                let results: Vec<f32> =
                    unit.get(src, t, count)?.into_iter().map(|x| activate(kind, x)).collect();
                unit.put(dst, t, &results)
            }),
            Op::Glu { kind, dst, src, count } => self.each(|unit, t| {
                let half = GLU_PANEL as usize;
                let sums = unit.get(src, t, count.div_ceil(GLU_PANEL) * GLU_PANEL * 2)?;
                let panels = sums.chunks_exact(2 * half).map(|panel| panel.split_at(half));
                let pairs = panels.flat_map(|(gates, ups)| gates.iter().zip(ups));
                let results: Vec<f32> = pairs.take(count as usize).map(|(&g, &u)| glu(kind, g, u)).collect();
                unit.put(dst, t, &results)
            }),
            Op::Mul { dst, a, b, count } => self.each(|unit, t| {
                let (a, b) = (unit.get(a, t, count)?, unit.get(b, t, count)?);
                let results: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a * b).collect();
                unit.put(dst, t, &results)
            }),
            Op::Scale { dst, src, factor, count } => self.each(|unit, t| {
                let factor = unit.get(factor, t, 1)?.first().copied().unwrap_or(0.0);
                let results: Vec<f32> = unit.get(src, t, count)?.into_iter().map(|x| x * factor).collect();
                unit.put(dst, t, &results)
            }),
            Op::Reduce { dst, src, count } => self.each(|unit, t| {
                let (sums, added) = (unit.get(dst, t, count)?, unit.get(src, t, count)?);
                let results: Vec<f32> = sums.iter().zip(&added).map(|(sum, x)| sum + x).collect();
                unit.put(dst, t, &results)
            }),
            Op::Convert { dst, src, count } => self.each(|unit, t| {
                let numbers = unit.get(src, t, count)?;
                unit.put(dst, t, &numbers)
            }),
            Op::Relayout { src, dst, lines, to } => self.relayout(src, dst, lines, to),
            Op::Migrate { src, dimm, ref rows, lines } => self.migrate(src, dimm, rows, lines),
        }
    }

    /// For every token of the block.
    fn each(&mut self, mut act: impl FnMut(&mut Self, u32) -> Result<(), Fault>) -> Result<(), Fault> {
        (0..self.block.tokens).try_for_each(|t| act(self, t))
    }

    /// The bytes of a token's vector.
    fn range(&self, slab: Slab, token: u32, bytes: usize) -> Result<Range<usize>, Fault> {
        let from = slab.base as usize + token as usize * slab.stride as usize;
        let fault = || {
            let op = self.stream.code.get(self.at).map_or("", |i| i.op.name());
            Fault::Buffer { instruction: self.at, op }
        };
        let end = from.checked_add(bytes).filter(|&end| end <= self.buffer.len()).ok_or_else(fault)?;
        Ok(from..end)
    }

    /// Numbers of a token's vector.
    fn get(&self, slab: Slab, token: u32, count: u32) -> Result<Vec<f32>, Fault> {
        let width = slab.number.bytes() as usize;
        let bytes = &self.buffer[self.range(slab, token, count as usize * width)?];
        Ok(match slab.number {
            Number::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            Number::B16 => {
                bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
        })
    }

    /// Sets a token's vector, rounded to nearest even where it is of bf16.
    fn put(&mut self, slab: Slab, token: u32, numbers: &[f32]) -> Result<(), Fault> {
        let width = slab.number.bytes() as usize;
        let range = self.range(slab, token, numbers.len() * width)?;
        for (bytes, &number) in self.buffer[range].chunks_exact_mut(width).zip(numbers) {
            match slab.number {
                Number::F32 => bytes.copy_from_slice(&number.to_le_bytes()),
                Number::B16 => bytes.copy_from_slice(&bf16::from_f32(number).to_le_bytes()),
            }
        }
        Ok(())
    }

    fn gemv(&mut self, acc: Slab, x: Slab, weights: Lines, panels: u32, pairs: usize) -> Result<(), Fault> {
        let tokens = self.block.tokens;
        let (tiles, mut inputs) = (pairs.div_ceil(PAIRS), Vec::new());
        for t in 0..tokens {
            inputs.extend(tiled(&self.get(x, t, pairs as u32 * 2)?));
        }
        let rows = &self.stream.regions[usize::from(weights.region)].rows;
        let (mut bytes, mut tile) = ([0; TILE_BYTES], Tile::new());
        let mut line = weights.line;
        for panel in 0..panels {
            let base = acc.base + panel * COLUMNS as u32 * 4;
            let sums_of = Slab { base, ..acc };
            let mut sums = Vec::with_capacity(tokens as usize);
            for t in 0..tokens {
                let mut columns = [0.0; COLUMNS];
                columns.copy_from_slice(&self.get(sums_of, t, COLUMNS as u32)?);
                sums.push(columns);
            }
            for number in 0..tiles {
                let lines = PAIRS.min(pairs - number * PAIRS) * PAIR_LINES as usize;
                let bytes = &mut bytes[..lines * BYTES];
                self.dimms.lines(self.stream.dimm, rows, line, bytes)?;
                line += lines as u64;
                tile.fill(bytes);
                for (inputs, sums) in inputs.chunks_exact(tiles).zip(&mut sums) {
                    tile.multiply(&inputs[number], sums);
                }
            }
            for (t, sums) in sums.iter().enumerate() {
                self.put(sums_of, t as u32, sums)?;
            }
        }
        Ok(())
    }

    fn relayout(&mut self, src: Lines, dst: Lines, lines: u32, to: Layout) -> Result<(), Fault> {
        let regions = &self.stream.regions;
        let (from, into) = (&regions[usize::from(src.region)].rows, &regions[usize::from(dst.region)].rows);
        let own = self.stream.dimm;
        let mut bytes = [0; BYTES];
        for number in 0..u64::from(lines) {
            let (src, dst) = (src.line + number, dst.line + number);
            let (from, into) = match to {
                Layout::Striped => ((own, self.dimms.localized(from, src)?), self.dimms.striped(into, dst)?),
                Layout::Localized => {
                    (self.dimms.striped(from, src)?, (own, self.dimms.localized(into, dst)?))
                }
            };
            self.dimms.line(from.0, from.1, &mut bytes)?;
            self.dimms.memory_mut(into.0)?.set_line(into.1, &bytes);
        }
        Ok(())
    }

    fn migrate(&mut self, src: Lines, dimm: u32, rows: &Range<u32>, lines: u32) -> Result<(), Fault> {
        let from = &self.stream.regions[usize::from(src.region)].rows;
        let mut bytes = [0; BYTES];
        for number in 0..u64::from(lines) {
            self.dimms.lines(self.stream.dimm, from, src.line + number, &mut bytes)?;
            self.dimms.memory_mut(dimm)?.write(span(rows, number), &bytes);
        }
        Ok(())
    }
}

/// Inputs by tiles, with even and odd ones separate; missing inputs of the last tile are zero.
fn tiled(x: &[f32]) -> impl Iterator<Item = Inputs> + '_ {
    x.chunks(2 * PAIRS).map(|x| {
        let mut inputs = [[0.0; PAIRS]; 2];
        for (i, &x) in x.iter().enumerate() {
            inputs[i % 2][i / 2] = x;
        }
        inputs
    })
}
