//! Places of a row's numbers in a panel, for every format.
//!
//! Writing and reading take the same places, so that one undoes the other.

use super::quantise::Group;
use super::{e2m1, scale};
use half::{bf16, f16};
use moec_ir::types::{Codes, Coding, E2M1, Format, GROUP, Granularity, Plane};

/// Codes that are stored together: an input of the dot-product instructions.
const QUAD: usize = 4;

/// One row of a packed matrix, in the bytes of its panel or of itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackedRow {
    format: Format,
    /// Adjacent numbers: a pair of bf16, else one.
    side: usize,
    /// Bytes up to the row's first number.
    first: usize,
    /// Bytes from adjacent numbers, or from quad to quad, to the next.
    step: usize,
    /// Bytes from group to group.
    group: usize,
    /// Bytes up to the row's first scale.
    scale: usize,
    /// Bytes from scale to scale.
    scale_step: usize,
}

impl PackedRow {
    /// Column `column` of a panel of `nr`.
    pub(super) const fn of_panel(format: Format, nr: usize, column: usize) -> Self {
        let (side, size) = match format {
            Format::F32 => (1, 4),
            Format::Bf16 => (2, 4),
            Format::F16 => (1, 2),
            _ => (1, QUAD),
        };
        let group = format.column_bytes(GROUP) * nr;
        let codes = group - 2 * nr;
        let (first, scale) = (column * size, codes + column * 2);
        Self { format, side, first, step: nr * size, group, scale, scale_step: group }
    }

    /// A row of `cols` numbers by itself.
    pub(super) const fn of_row(format: Format, cols: usize) -> Self {
        let (step, group) =
            if format.is_quantised() { (QUAD, format.block_bytes()) } else { (format.block_bytes(), 0) };
        let scale = cols.div_ceil(GROUP) * group;
        Self { format, side: 1, first: 0, step, group, scale, scale_step: 2 }
    }

    /// The same with its first scale this many bytes after the row's first.
    pub(super) const fn with_scales(self, scale: usize) -> Self {
        Self { scale, ..self }
    }

    /// The same, this many bytes later.
    pub(super) const fn after(self, bytes: usize) -> Self {
        Self { first: self.first + bytes, scale: self.scale + bytes, ..self }
    }

    /// Byte of number `i`, in formats without groups.
    fn cell(&self, i: usize) -> usize {
        self.first + i / self.side * self.step + i % self.side * 2
    }

    /// Writes the row's numbers in a grouped format. `weights` are those of its columns.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub(super) fn put(&self, values: &[f32], weights: Option<&[f32]>, bytes: &mut [u8]) {
        for (g, x) in values.chunks(GROUP).enumerate() {
            self.put_group(g, &quantised(self.format, g, x, weights), bytes);
        }
    }

    /// Writes the groups of a row that was rounded before.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub(super) fn put_groups(&self, groups: &[Group], bytes: &mut [u8]) {
        for (g, group) in groups.iter().enumerate() {
            self.put_group(g, group, bytes);
        }
    }

    /// Writes the zeros of a row of a grouped format that pads its panel.
    pub(super) fn pad(&self, cols: usize, bytes: &mut [u8]) {
        for g in 0..cols.div_ceil(GROUP) {
            self.put_group(g, &Group::ZERO, bytes);
        }
    }

    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn put_group(&self, g: usize, group: &Group, bytes: &mut [u8]) {
        let first = self.first + g * self.group;
        let spec = self.format.spec();
        let Some(codes) = spec.codes else { return };
        // As they are stored, in as many bits as a code has.
        let mut stored = group.codes.map(i8::cast_unsigned);
        match codes.coding {
            Coding::Bytes => {}
            Coding::Nibbles => stored.iter_mut().for_each(|code| *code = code.wrapping_add(8)),
            Coding::E2m1 => {
                stored.iter_mut().zip(&group.codes).for_each(|(to, code)| *to = e2m1::bits(*code));
            }
            Coding::Planes => {
                let lowest = codes.lowest.cast_unsigned();
                for code in &mut stored {
                    *code = code.wrapping_sub(lowest) / codes.step;
                }
            }
        }
        for Plane { width, shift, first: word } in Codes::planes(spec.bits) {
            for i in 0..width {
                let at = first + (word + i) * self.step;
                let Some(quad) = bytes.get_mut(at..at + QUAD) else { continue };
                for (j, cell) in quad.iter_mut().enumerate() {
                    *cell =
                        (i..GROUP / QUAD).step_by(width).enumerate().fold(0, |cell, (bit_offset, quad)| {
                            let bits = u32::from(stored[quad * QUAD + j]) >> shift & ((1 << width) - 1);
                            cell | (bits << (bit_offset * width)) as u8
                        });
                }
            }
        }
        let at = self.scale + g * self.scale_step;
        if let Some(cell) = bytes.get_mut(at..at + 2) {
            cell.copy_from_slice(&scale::bits(self.format, group.scale).to_le_bytes());
        }
    }

    /// Reads the row's numbers; `None` if the bytes end before it does.
    pub(super) fn get(&self, bytes: &[u8], out: &mut [f32]) -> Option<()> {
        match (self.format.spec().granularity, self.format) {
            (Granularity::Number, Format::Bf16) => {
                self.get_cells(bytes, out, |b| bf16::from_le_bytes(b).to_f32())
            }
            (Granularity::Number, Format::F16) => {
                self.get_cells(bytes, out, |b| f16::from_le_bytes(b).to_f32())
            }
            (Granularity::Number, _) => self.get_cells(bytes, out, f32::from_le_bytes),
            // Rows with a scale each have another order.
            (Granularity::Channel, _) => None,
            (Granularity::Group, _) => {
                for (g, out) in out.chunks_mut(GROUP).enumerate() {
                    let values = self.group(g, bytes)?.values();
                    out.copy_from_slice(&values[..out.len()]);
                }
                Some(())
            }
        }
    }

    fn get_cells<const N: usize>(
        &self,
        bytes: &[u8],
        out: &mut [f32],
        from: impl Fn([u8; N]) -> f32,
    ) -> Option<()> {
        for (i, x) in out.iter_mut().enumerate() {
            *x = from(*bytes.get(self.cell(i)..)?.first_chunk()?);
        }
        Some(())
    }

    /// Group `g` of the row.
    pub(super) fn group(&self, g: usize, bytes: &[u8]) -> Option<Group> {
        let first = self.first + g * self.group;
        let spec = self.format.spec();
        let known = spec.codes?;
        let mut stored = [0_u8; GROUP];
        for plane in Codes::planes(spec.bits) {
            for (quad, to) in stored.chunks_exact_mut(QUAD).enumerate() {
                let (word, bit_offset) = plane.of_quad(quad);
                let from: &[u8; QUAD] = bytes.get(first + word * self.step..)?.first_chunk()?;
                for (to, from) in to.iter_mut().zip(from) {
                    let bits = u32::from(*from) >> bit_offset & ((1 << plane.width) - 1);
                    *to |= (bits << plane.shift) as u8;
                }
            }
        }
        let codes = stored.map(|code| match known.coding {
            Coding::Bytes => code.cast_signed(),
            Coding::Nibbles => code.cast_signed() - 8,
            Coding::E2m1 => E2M1[usize::from(code)],
            Coding::Planes => known.lowest + (code * known.step).cast_signed(),
        });
        let stored = bytes.get(self.scale + g * self.scale_step..)?.first_chunk()?;
        Some(Group { scale: scale::of_bits(self.format, u16::from_le_bytes(*stored)), codes })
    }
}

/// Groups of rows of `cols` numbers of a grouped format as a checkpoint has them, [`Format::stored_bytes`]
/// each: scale and codes as they are. `None` where numbers that share a scale here do not there.
pub(super) fn stored_groups(format: Format, cols: usize, stored: &[u8]) -> Option<Vec<Group>> {
    let numbers = stored.as_chunks::<3>().0;
    let group = |numbers: &[[u8; 3]]| {
        let &[[_, low, high], ..] = numbers else { return Some(Group::ZERO) };
        let mut codes = [0; GROUP];
        for (to, [code, ..]) in codes.iter_mut().zip(numbers) {
            *to = code.cast_signed();
        }
        let one = numbers.iter().all(|[_, l, h]| (l, h) == (&low, &high));
        one.then(|| Group { scale: scale::of_bits(format, u16::from_le_bytes([low, high])), codes })
    };
    numbers.chunks(cols.max(1)).flat_map(|row| row.chunks(GROUP)).map(group).collect()
}

/// Group `g` of a row: up to [`GROUP`] numbers, filled up with zeros, and the weights of the row's columns.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
pub(super) fn quantised(format: Format, g: usize, x: &[f32], weights: Option<&[f32]>) -> Group {
    let weights = weights
        .and_then(|w| w.get(g * GROUP..))
        .map_or([1.0; GROUP], |w| zero_padded(&w[..w.len().min(x.len())]));
    Group::nearest(format, &zero_padded(x), &weights)
}

/// The first numbers of a group, then zeros.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
pub(super) fn zero_padded(x: &[f32]) -> [f32; GROUP] {
    let mut all = [0.0; GROUP];
    for (to, &x) in all.iter_mut().zip(x) {
        *to = x;
    }
    all
}
