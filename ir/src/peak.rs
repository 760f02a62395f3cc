//! Contents of memories under a plan, and their peaks.

use crate::plan::{ALIGN, Arg, Paging, Plan, Resident, Segment};
use std::collections::BTreeSet;

impl Resident {
    /// Bytes of one matrix, or of the whole segment, on the boundaries of [`ALIGN`]; `None` where that
    /// overflows.
    pub fn piece_bytes(&self, segment: &Segment) -> Option<u64> {
        let bytes = if self.matrices.is_empty() { segment.bytes } else { segment.matrix_bytes()? };
        bytes.checked_next_multiple_of(ALIGN)
    }

    /// Entries of the table of addresses that precedes the matrices: one for each matrix of the segment, and for
    /// each number up to the last.
    pub fn table_entries(&self, segment: &Segment) -> u32 {
        self.matrices.last().map_or(0, |&last| segment.extents().0.max(last.saturating_add(1)))
    }

    /// Bytes of that table, 8 for each entry.
    pub fn table_bytes(&self, segment: &Segment) -> u64 {
        (u64::from(self.table_entries(segment)) * 8).next_multiple_of(ALIGN)
    }

    /// Numbers of the matrices, each with its index in the segment. A segment of as many matrices as are named has
    /// these alone, in their order.
    pub fn indices(&self, segment: &Segment) -> impl Iterator<Item = (u32, u32)> {
        let alone = self.matrices.len() == segment.extents().0 as usize;
        (0..).zip(&self.matrices).map(move |(i, &matrix)| (matrix, if alone { i } else { matrix }))
    }

    /// Bytes in all; `None` where that overflows.
    pub fn bytes(&self, segment: &Segment) -> Option<u64> {
        let pieces = self.matrices.len().max(1) as u64;
        self.piece_bytes(segment)?.checked_mul(pieces)?.checked_add(self.table_bytes(segment))
    }
}

impl Plan {
    /// Bytes of the arena of the CPU's memory.
    pub fn arena_bytes(&self) -> u64 {
        self.memories.first().map_or(0, |m| m.arena_bytes)
    }

    /// The memory of a unit.
    pub fn memory_of(&self, unit: u32) -> u32 {
        self.units.get(unit as usize).map_or(0, |u| u.memory)
    }

    /// Names of the units.
    pub fn unit_names(&self) -> Vec<String> {
        self.units.iter().map(|u| u.name.clone()).collect()
    }

    /// Bytes that a memory holds at most while the plan runs, `threads` CPU threads each with their scratch:
    /// arena, states, and the weights that units read there. Weights on disk do not count. `None` on overflow.
    pub fn peak(&self, memory: u32, threads: u64) -> Option<u64> {
        let decl = self.memories.get(memory as usize)?;
        let mut sum = decl.arena_bytes.checked_next_multiple_of(ALIGN)?;
        let mut add = |bytes: u64| {
            sum = sum.checked_add(bytes)?;
            Some(())
        };
        for state in self.states.iter().filter(|s| s.memory == memory) {
            add(state.checked_bytes()?.checked_next_multiple_of(ALIGN)?)?;
        }
        let paged: Vec<u32> = self.paging_of(memory).into_iter().flat_map(Paging::segments).collect();
        if memory == 0 {
            add(self.scratch_bytes.checked_next_multiple_of(ALIGN)?.checked_mul(threads)?)?;
            for index in self.segments_of(0).into_iter().filter(|i| !paged.contains(i)) {
                add(self.segments.get(index as usize)?.bytes.checked_next_multiple_of(ALIGN)?)?;
            }
        }
        for resident in decl.residents.iter().filter(|r| !paged.contains(&r.segment)) {
            add(resident.bytes(self.segments.get(resident.segment as usize)?)?)?;
        }
        // An accelerator has one thread, if it has anything to do.
        let runs = |unit: u32| self.entries.iter().flat_map(|e| &e.steps).any(|s| s.unit == unit);
        let here = (0..).zip(&self.units).filter(|(_, u)| memory != 0 && u.memory == memory);
        for _ in here.filter(|&(unit, _)| runs(unit)) {
            add(self.scratch_bytes.checked_next_multiple_of(ALIGN)?)?;
        }
        Some(sum)
    }

    /// Bytes of a memory with the experts that its host has on disk, in an emulation that holds them all. `None` on
    /// overflow.
    pub fn whole(&self, memory: u32) -> Option<u64> {
        let mut sum = self.peak(memory, 1)?;
        let paged: Vec<u32> = self.paging_of(memory).into_iter().flat_map(Paging::segments).collect();
        for resident in
            self.memories.get(memory as usize)?.residents.iter().filter(|r| paged.contains(&r.segment))
        {
            sum = sum.checked_add(resident.bytes(self.segments.get(resident.segment as usize)?)?)?;
        }
        Some(sum)
    }

    /// Files with weights that are read in the first memory, or brought from there to another one, ascending. All that
    /// have weights if the plan has one memory.
    pub fn files_here(&self) -> BTreeSet<u32> {
        let (here, brought) = (self.segments_of(0), self.segments_to_bring());
        let alone = self.memories.len() < 2;
        let all = (0..).zip(&self.segments).filter(|(i, _)| alone || here.contains(i) || brought.contains(i));
        all.map(|(_, segment)| segment.file).collect()
    }

    /// Segments that steps of units of a memory read, ascending.
    pub fn segments_of(&self, memory: u32) -> BTreeSet<u32> {
        let steps = self.entries.iter().flat_map(|e| &e.steps);
        let here = steps.filter(|s| self.memory_of(s.unit) == memory);
        here.flat_map(|s| &s.args)
            .filter_map(|arg| match *arg {
                Arg::Segment(i) | Arg::Matrices(i) => Some(i),
                Arg::Buffer(..) | Arg::State(_) => None,
            })
            .collect()
    }
}
