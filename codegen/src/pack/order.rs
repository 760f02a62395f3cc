//! Places of a row's numbers in a panel, for every format.
//!
//! Writing and reading take the same places, so that one undoes the other.

use super::fine::{self, FineGroup};
use super::patterns::{Patterns, QUAD};
use super::quantise::Group;
use super::scale;
use half::{bf16, f16};
use moec_ir::types::{Codes, Coding, FINE_BYTES, FINE_GROUP, FINE_STORED, Format, GROUP, Granularity, Plane};

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
    /// Groups of [`GROUP`] numbers that share a scale.
    shared: usize,
    /// Bytes up to the row's first fine scales, where it has such.
    fine: usize,
    /// Bytes from a scale to that of the minima.
    least: usize,
}

/// Bytes of a scale of each level.
const HALF: usize = 2;

/// Groups of [`GROUP`] numbers that share a scale.
const fn shared(format: Format) -> usize {
    if format.group() > GROUP { format.group() / GROUP } else { 1 }
}

impl PackedRow {
    /// Column `column` of a panel of `nr`.
    pub(super) const fn of_panel(format: Format, nr: usize, cols: usize, column: usize) -> Self {
        let (side, size) = match format {
            Format::F32 => (1, 4),
            Format::Bf16 => (2, 4),
            Format::F16 => (1, 2),
            _ => (1, QUAD),
        };
        // Scales follow the codes of their group, or all codes where groups have more than one block.
        let block = format.block_bytes() * nr;
        let (group, codes, scale_step) = if let Some(bytes) = format.group_bytes() {
            (bytes * nr, block, bytes * nr)
        } else {
            (block, cols.div_ceil(GROUP) * block, format.scale_bytes() * nr)
        };
        let scale_bytes = if format.has_fine_scales() { HALF } else { format.scale_bytes() };
        let (first, scale) = (column * size, codes + column * scale_bytes);
        let (shared, fine) = (shared(format), format.code_bytes() * nr + column * FINE_BYTES);
        Self {
            format,
            side,
            first,
            step: nr * size,
            group,
            scale,
            scale_step,
            shared,
            fine,
            least: HALF * nr,
        }
    }

    /// A row of `cols` numbers by itself.
    pub(super) const fn of_row(format: Format, cols: usize) -> Self {
        let (step, group) =
            if format.is_quantised() { (QUAD, format.block_bytes()) } else { (format.block_bytes(), 0) };
        let scale = cols.div_ceil(GROUP) * group;
        let (scale_step, shared, fine) = (format.scale_bytes(), shared(format), format.code_bytes());
        Self { format, side: 1, first: 0, step, group, scale, scale_step, shared, fine, least: HALF }
    }

    /// The same with its first scale this many bytes after the row's first.
    pub(super) const fn with_scales(self, scale: usize) -> Self {
        Self { scale, ..self }
    }

    /// The same, this many bytes later.
    pub(super) const fn after(self, bytes: usize) -> Self {
        let Self { first, scale, fine, .. } = self;
        Self { first: first + bytes, scale: scale + bytes, fine: fine + bytes, ..self }
    }

    /// Byte of number `i`, in formats without groups.
    fn cell(&self, i: usize) -> usize {
        self.first + i / self.side * self.step + i % self.side * 2
    }

    /// Writes the row's numbers in a grouped format. `weights` are those of its columns.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub(super) fn put(&self, values: &[f32], weights: Option<&[f32]>, bytes: &mut [u8]) {
        if self.format.has_fine_scales() {
            let blocks = values.len().div_ceil(GROUP);
            for (i, group) in fine::quantised(self.format, values).enumerate() {
                self.put_fine(i, blocks, &group, bytes);
            }
            return;
        }
        quantised(self.format, values, weights, |g, group| self.put_group(g, &group, bytes));
    }

    /// Writes groups with scales of two levels: those of a row of this many numbers.
    pub(super) fn put_fine_groups(&self, cols: usize, groups: &[FineGroup], bytes: &mut [u8]) {
        for (i, group) in groups.iter().enumerate() {
            self.put_fine(i, cols.div_ceil(GROUP), group, bytes);
        }
    }

    /// Writes group `i` of a row of this many blocks.
    fn put_fine(&self, i: usize, blocks: usize, group: &FineGroup, bytes: &mut [u8]) {
        let (runs, minima) = (self.format.runs(), self.format.fine().is_some_and(|fine| fine.minima));
        let known = i * self.shared..((i + 1) * self.shared).min(blocks);
        for ((g, b), codes) in known.zip(0..).zip(group.codes.as_chunks().0) {
            self.put_codes(g, codes, bytes);
            let at = self.fine + g * self.group;
            if let Some(cell) = bytes.get_mut(at..at + FINE_BYTES) {
                let scale = |run: usize| group.scales[run].cast_unsigned();
                let byte = |run: usize| scale(run) | group.minima[run] << 4;
                cell.copy_from_slice(&match runs {
                    1 => [scale(b), group.minima[b]],
                    _ if minima => [byte(2 * b), byte(2 * b + 1)],
                    _ => [scale(2 * b), scale(2 * b + 1)],
                });
            }
        }
        let scales = self.format.scale_bytes() / HALF;
        for (unit, at) in
            group.units.iter().take(scales).zip((self.scale_at(i * self.shared)..).step_by(self.least))
        {
            if let Some(cell) = bytes.get_mut(at..at + HALF) {
                cell.copy_from_slice(&unit.to_le_bytes());
            }
        }
    }

    /// Group `i` of a row of this many blocks, with scales of two levels; zeros past its end.
    fn fine_group(&self, i: usize, blocks: usize, bytes: &[u8]) -> Option<FineGroup> {
        let (mut found, runs) = (FineGroup::ZERO, self.format.runs());
        let minima = self.format.fine().is_some_and(|fine| fine.minima);
        let known = i * self.shared..((i + 1) * self.shared).min(blocks);
        for ((g, b), codes) in known.zip(0..).zip(found.codes.as_chunks_mut().0) {
            *codes = self.codes(g, bytes)?;
            let &[low, high] = bytes.get(self.fine + g * self.group..)?.first_chunk::<FINE_BYTES>()?;
            if runs == 1 {
                (found.scales[b], found.minima[b]) = (low.cast_signed(), high);
                continue;
            }
            for (run, byte) in (2 * b..).zip([low, high]) {
                let (scale, minimum) = if minima { (byte & 15, byte >> 4) } else { (byte, 0) };
                (found.scales[run], found.minima[run]) = (scale.cast_signed(), minimum);
            }
        }
        let scales = self.format.scale_bytes() / HALF;
        let places = (self.scale_at(i * self.shared)..).step_by(self.least);
        for (unit, at) in found.units.iter_mut().take(scales).zip(places) {
            *unit = u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?);
        }
        Some(found)
    }

    /// Reads a row of `cols` numbers with scales of two levels as a checkpoint has it.
    pub(super) fn get_stored(&self, cols: usize, bytes: &[u8], out: &mut [[u8; FINE_STORED]]) -> Option<()> {
        let run = self.format.fine()?.run;
        for (i, out) in out.chunks_mut(FINE_GROUP).enumerate() {
            fine::as_stored(&self.fine_group(i, cols.div_ceil(GROUP), bytes)?, run, out);
        }
        Some(())
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
        if self.format.has_fine_scales() {
            return self.put_fine_groups(cols, &vec![FineGroup::ZERO; cols.div_ceil(FINE_GROUP)], bytes);
        }
        for g in 0..cols.div_ceil(GROUP) {
            self.put_group(g, &Group::ZERO, bytes);
        }
    }

    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn put_group(&self, g: usize, group: &Group, bytes: &mut [u8]) {
        if let Some(Codes { coding: Coding::Patterns, patterns, .. }) = self.format.spec().codes {
            return self.put_quads(g, patterns, group, bytes);
        }
        self.put_codes(g, &group.codes, bytes);
        let at = self.scale_at(g);
        if let Some(cell) = bytes.get_mut(at..at + 2) {
            cell.copy_from_slice(&scale::bits(self.format, group.scale).to_le_bytes());
        }
    }

    /// Writes the codes of a block that have indices of their own.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn put_codes(&self, g: usize, known: &[i8; GROUP], bytes: &mut [u8]) {
        let first = self.first + g * self.group;
        let spec = self.format.spec();
        let Some(codes) = spec.codes else { return };
        // As they are stored, in as many bits as a code has.
        let mut stored = known.map(i8::cast_unsigned);
        match codes.coding {
            Coding::Bytes | Coding::Patterns => {}
            Coding::Nibbles | Coding::Planes if codes.grid.is_empty() => {
                let lowest = codes.lowest.cast_unsigned();
                for code in &mut stored {
                    *code = code.wrapping_sub(lowest);
                }
            }
            Coding::Nibbles | Coding::Planes => {
                // The first index of a code that has several.
                for (index, at) in codes.grid.iter().enumerate().rev() {
                    for (to, code) in stored.iter_mut().zip(known) {
                        *to = if code == at { index as u8 } else { *to };
                    }
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
    }

    /// Byte of the scale of group `g`, with what is beside it.
    const fn scale_at(&self, g: usize) -> usize {
        self.scale + g / self.shared * self.scale_step
    }

    /// Writes a group of quads by patterns.
    fn put_quads(&self, g: usize, known: &[[u8; QUAD]], group: &Group, bytes: &mut [u8]) {
        let (mut indices, mut signs, mut beside) = (0_u32, 0_u32, 0_u8);
        for (q, codes) in group.codes.chunks_exact(QUAD).enumerate() {
            let index = Patterns::index(known, codes) as u32;
            indices |= (index & 15) << (4 * q);
            beside |= ((index >> 4) as u8) << q;
            let negative = codes.iter().enumerate().map(|(j, code)| u32::from(*code < 0) << (8 * j + q));
            signs |= negative.fold(0, |a, b| a | b);
        }
        let first = self.first + g * self.group;
        for (at, word) in [(first, indices), (first + self.step, signs)] {
            if let Some(cell) = bytes.get_mut(at..at + QUAD) {
                cell.copy_from_slice(&word.to_le_bytes());
            }
        }
        let (at, size) = (self.scale_at(g), self.format.scale_bytes());
        if let Some(cell) = bytes.get_mut(at..at + size) {
            let all = [beside, scale::bits(self.format, group.scale) as u8];
            cell.copy_from_slice(&all[all.len() - size..]);
        }
    }

    /// Reads a group of quads by patterns.
    fn get_quads(&self, g: usize, known: &[[u8; QUAD]], bytes: &[u8]) -> Option<Group> {
        let first = self.first + g * self.group;
        let word = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let (indices, signs) = (word(first)?, word(first + self.step)?);
        let (at, size) = (self.scale_at(g), self.format.scale_bytes());
        let (scale, beside) = bytes.get(at..at + size)?.split_last()?;
        let beside = u32::from(beside.first().copied().unwrap_or(0));
        let mut codes = [0; GROUP];
        for (q, codes) in codes.chunks_exact_mut(QUAD).enumerate() {
            let index = indices >> (4 * q) & 15 | (beside >> q & 1) << 4;
            for (j, (code, magnitude)) in codes.iter_mut().zip(known.get(index as usize)?).enumerate() {
                let magnitude = magnitude.cast_signed();
                *code = if signs >> (8 * j + q) & 1 > 0 { -magnitude } else { magnitude };
            }
        }
        Some(Group { scale: scale::of_bits(self.format, u16::from(*scale)), codes })
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
            (Granularity::Group, format) if format.has_fine_scales() => {
                let blocks = out.len().div_ceil(GROUP);
                for (i, out) in out.chunks_mut(FINE_GROUP).enumerate() {
                    let values = self.fine_group(i, blocks, bytes)?.values(format);
                    out.copy_from_slice(&values[..out.len()]);
                }
                Some(())
            }
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
        let known = self.format.spec().codes?;
        if known.coding == Coding::Patterns {
            return self.get_quads(g, known.patterns, bytes);
        }
        let codes = self.codes(g, bytes)?;
        let stored = bytes.get(self.scale_at(g)..)?.first_chunk()?;
        Some(Group { scale: scale::of_bits(self.format, u16::from_le_bytes(*stored)), codes })
    }

    /// The codes of a block that have indices of their own.
    fn codes(&self, g: usize, bytes: &[u8]) -> Option<[i8; GROUP]> {
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
        Some(stored.map(|code| match known.coding {
            Coding::Bytes => code.cast_signed(),
            Coding::Nibbles | Coding::Planes if !known.grid.is_empty() => known.grid[usize::from(code)],
            Coding::Nibbles | Coding::Planes | Coding::Patterns => known.lowest + code.cast_signed(),
        }))
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

/// The groups of a row by their numbers, the last one filled up with zeros, with the weights of the row's
/// columns.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
pub(super) fn quantised(
    format: Format,
    row: &[f32],
    weights: Option<&[f32]>,
    mut put: impl FnMut(usize, Group),
) {
    let of = |first: usize, count: usize| weights?.get(first..)?.get(..count);
    if let Some(patterns) = Patterns::of(format) {
        let (size, mut g) = (format.group(), 0);
        for (i, x) in row.chunks(size).enumerate() {
            patterns.nearest(x, of(i * size, x.len()), |group| {
                put(g, group);
                g += 1;
            });
        }
        return;
    }
    for (g, x) in row.chunks(GROUP).enumerate() {
        let weights = of(g * GROUP, x.len()).map_or([1.0; GROUP], zero_padded);
        put(g, Group::nearest(format, &zero_padded(x), &weights));
    }
}

/// The groups that a row was read back from, the last one filled up with zeros ([`Group::recover`]).
pub(super) fn recovered(format: Format, row: &[f32], mut put: impl FnMut(Group)) {
    match Patterns::of(format) {
        Some(patterns) => row.chunks(format.group()).for_each(|x| patterns.recover(x, &mut put)),
        None => row.chunks(GROUP).for_each(|x| put(Group::recover(format, &zero_padded(x)))),
    }
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
