//! The DRAM of one DIMM, as far as it was written.

use moec_ndp_isa::{Geometry, LINE, Layout, Place};
use std::collections::HashMap;
use std::ops::Range;

const BYTES: usize = LINE as usize;

/// Lines by their place. One row of one bank of all bank groups, ranks and subchannels is a *piece*, which is
/// there once a line of it is written.
#[derive(Debug)]
pub(super) struct Memory {
    geometry: Geometry,
    pieces: Vec<Piece>,
    /// Pieces by row and bank.
    index: HashMap<(u32, u32), usize>,
}

#[derive(Debug)]
struct Piece {
    bytes: Vec<u8>,
    /// A bit for each line.
    written: Vec<u64>,
}

/// Consecutive lines of localized row sets, or of the share of striped ones that this DIMM has.
#[derive(Clone, Copy, Debug)]
pub(super) struct LineSpan {
    pub(super) layout: Layout,
    pub(super) first_row: u32,
    pub(super) line: u64,
}

/// Consecutive lines in a piece.
struct Run {
    key: (u32, u32),
    lines: Range<usize>,
}

impl Piece {
    fn new(lines: usize) -> Self {
        Self { bytes: vec![0; lines * BYTES], written: vec![0; lines.div_ceil(64)] }
    }

    fn is_written(&self, line: usize) -> bool {
        self.written[line / 64] >> (line % 64) & 1 == 1
    }

    fn bytes(&self, lines: Range<usize>) -> &[u8] {
        &self.bytes[lines.start * BYTES..lines.end * BYTES]
    }
}

impl Memory {
    pub(super) fn new(geometry: Geometry) -> Self {
        Self { geometry, pieces: Vec::new(), index: HashMap::new() }
    }

    /// The piece of a place, and its line in it: subchannels change fastest, then ranks, bank groups and
    /// columns.
    fn locate(&self, place: Place) -> ((u32, u32), usize) {
        let g = &self.geometry;
        let group = place.column as usize * g.bank_groups as usize + place.bank_group as usize;
        let rank = group * g.ranks as usize + place.rank as usize;
        ((place.row, place.bank), rank * g.subchannels as usize + place.subchannel as usize)
    }

    fn piece_lines(&self) -> usize {
        let g = &self.geometry;
        [g.subchannels, g.ranks, g.bank_groups, g.lines].iter().map(|&n| n as usize).product()
    }

    fn place(&self, from: LineSpan, number: usize) -> Option<Place> {
        from.layout.place(&self.geometry, from.first_row, from.line.checked_add(number as u64)?)
    }

    /// The number of consecutive lines from `number` on, at most `count`. Both ends are placed by the layout;
    /// the lines between them are in this order, too, as a test checks.
    fn run(&self, from: LineSpan, number: usize, count: usize) -> Option<Run> {
        let (key, at) = self.locate(self.place(from, number)?);
        let most = count.min(self.piece_lines() - at).max(1);
        let last = self.place(from, number + most - 1).map(|place| self.locate(place));
        let dense = from.layout == Layout::Localized && last == Some((key, at + most - 1));
        Some(Run { key, lines: at..at + if dense { most } else { 1 } })
    }

    fn piece(&self, key: (u32, u32)) -> Option<&Piece> {
        self.index.get(&key).map(|&piece| &self.pieces[piece])
    }

    fn piece_mut(&mut self, key: (u32, u32)) -> &mut Piece {
        let (lines, next) = (self.piece_lines(), self.pieces.len());
        let piece = *self.index.entry(key).or_insert(next);
        if piece == next {
            self.pieces.push(Piece::new(lines));
        }
        &mut self.pieces[piece]
    }

    /// Reads whole lines. Lines that were not written are zero, and the place of the first is returned. Lines
    /// outside of the geometry count as unwritten, too: the caller has checked that there are none.
    pub(super) fn read(&self, from: LineSpan, to: &mut [u8]) -> Option<Place> {
        let (mut missing, mut number) = (None, 0);
        let count = to.len() / BYTES;
        while let Some(Run { key, lines }) =
            (number < count).then(|| self.run(from, number, count - number)).flatten()
        {
            let piece = self.piece(key);
            let target = &mut to[number * BYTES..(number + lines.len()) * BYTES];
            match piece {
                Some(piece) => target.copy_from_slice(piece.bytes(lines.clone())),
                None => target.fill(0),
            }
            if missing.is_none() {
                let gap = lines.clone().position(|line| !piece.is_some_and(|piece| piece.is_written(line)));
                missing = gap.and_then(|gap| self.place(from, number + gap));
            }
            number += lines.len();
        }
        missing
    }

    /// Writes whole lines, all of them inside of the geometry.
    pub(super) fn write(&mut self, to: LineSpan, from: &[u8]) {
        let (count, mut number) = (from.len() / BYTES, 0);
        while let Some(Run { key, lines }) =
            (number < count).then(|| self.run(to, number, count - number)).flatten()
        {
            let source = &from[number * BYTES..(number + lines.len()) * BYTES];
            number += lines.len();
            let piece = self.piece_mut(key);
            piece.bytes[lines.start * BYTES..lines.end * BYTES].copy_from_slice(source);
            lines.for_each(|line| piece.written[line / 64] |= 1 << (line % 64));
        }
    }

    /// The line of a place, if it was written.
    pub(super) fn line(&self, place: Place) -> Option<&[u8]> {
        let (key, line) = self.locate(place);
        self.piece(key).filter(|piece| piece.is_written(line)).map(|piece| piece.bytes(line..line + 1))
    }

    /// Sets the line of a place.
    pub(super) fn set_line(&mut self, place: Place, bytes: &[u8]) {
        let (key, line) = self.locate(place);
        let piece = self.piece_mut(key);
        piece.bytes[line * BYTES..][..BYTES].copy_from_slice(bytes);
        piece.written[line / 64] |= 1 << (line % 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn geometry() -> impl Strategy<Value = Geometry> {
        (1_u32..4, 1_u32..4, 1_u32..4, 1_u32..4, 1_u32..9).prop_map(
            |(subchannels, ranks, bank_groups, banks, lines)| Geometry {
                subchannels,
                ranks,
                bank_groups,
                banks,
                rows: 8,
                lines,
            },
        )
    }

    proptest! {
        #[test]
        fn memory_runs_match_the_layout(
            geometry in geometry(),
            layout in prop::sample::select(&Layout::ALL[..]),
            first_row in 0_u32..3,
            from in 0.0_f64..1.0,
            length in 0.0_f64..1.0,
        ) {
            let all = geometry.set_lines().expect("lines") * 5;
            let line = (from * all as f64) as u64;
            let count = (length * (all - line) as f64) as usize;
            let span = LineSpan { layout, first_row, line };
            let bytes: Vec<u8> = (0..count * BYTES).map(|i| (i / BYTES * 7 + i) as u8).collect();
            let mut memory = Memory::new(geometry);
            memory.write(span, &bytes);
            for (number, bytes) in bytes.chunks_exact(BYTES).enumerate() {
                let place = layout.place(&geometry, first_row, line + number as u64).expect("a place");
                prop_assert_eq!(memory.line(place), Some(bytes));
            }
            let mut back = vec![1; bytes.len()];
            prop_assert_eq!(memory.read(span, &mut back), None);
            prop_assert_eq!(back, bytes);
        }
    }

    #[test]
    fn unwritten_lines_read_as_zero_and_are_detected() {
        let geometry = Geometry { subchannels: 2, ranks: 2, bank_groups: 2, banks: 2, rows: 4, lines: 4 };
        let mut memory = Memory::new(geometry);
        let at = |line| LineSpan { layout: Layout::Localized, first_row: 1, line };
        memory.write(at(0), &[5; 3 * BYTES]);
        memory.write(at(4), &[6; BYTES]);
        let mut back = vec![1; 5 * BYTES];
        assert_eq!(memory.read(at(0), &mut back), Layout::Localized.place(&geometry, 1, 3));
        assert_eq!([back[0], back[3 * BYTES], back[4 * BYTES]], [5, 0, 6]);
        assert_eq!(memory.read(at(40), &mut back), Layout::Localized.place(&geometry, 1, 40));
    }
}
