//! The DIMMs of a machine: their contents, and the units that execute streams.

use super::clock::Bus;
use super::fault::Fault;
use super::memory::{LineSpan, Memory};
use crate::allocation::{DimmConfig, DramLayout, RowAllocation};
use moec_ndp_isa::{LINE, Layout, Place};
use std::ops::Range;

/// DIMMs with their DRAM, physically addressed: every line is where the layout of its region places it, so
/// data that is written through one layout is found through it alone.
#[derive(Debug)]
pub struct Dimms {
    dimm_config: DimmConfig,
    bus: Bus,
    strict: bool,
    memories: Vec<Memory>,
}

impl Dimms {
    /// DIMMs before any write. `bus` is the clock of their DRAM. With `strict`, reading a line that was not
    /// written is an error; otherwise it is zero.
    ///
    /// # Errors
    /// [`Fault::Dimms`].
    pub fn new(dimm_config: DimmConfig, bus: Bus, strict: bool) -> Result<Self, Fault> {
        let count = dimm_config.check().ok_or(Fault::Dimms(dimm_config))?;
        let memories = (0..count).map(|_| Memory::new(dimm_config.geometry)).collect();
        Ok(Self { dimm_config, bus, strict, memories })
    }

    /// The machine.
    pub const fn dimm_config(&self) -> &DimmConfig {
        &self.dimm_config
    }

    /// The clock of its DRAM.
    pub const fn bus(&self) -> &Bus {
        &self.bus
    }

    /// The host writes whole lines from line `line` of an allocation on.
    ///
    /// # Errors
    /// [`Fault::NoDimm`], [`Fault::Outside`], [`Fault::NoLines`].
    pub fn write(&mut self, to: &RowAllocation, line: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.check(to, line, bytes.len())?;
        match to.layout {
            DramLayout::Localized(dimm) => self.memories[dimm as usize].write(span(&to.rows, line), bytes),
            DramLayout::Striped => {
                for (number, bytes) in bytes.chunks_exact(LINE as usize).enumerate() {
                    let (dimm, place) = self.striped(&to.rows, line + number as u64)?;
                    self.memories[dimm as usize].set_line(place, bytes);
                }
            }
        }
        Ok(())
    }

    /// The host reads whole lines from line `line` of an allocation on.
    ///
    /// # Errors
    /// [`Fault::NoDimm`], [`Fault::Outside`], [`Fault::NoLines`]; [`Fault::Unwritten`] of strict DIMMs.
    pub fn read(&self, from: &RowAllocation, line: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        self.check(from, line, bytes.len())?;
        match from.layout {
            DramLayout::Localized(dimm) => {
                let missing = self.memories[dimm as usize].read(span(&from.rows, line), bytes);
                self.hold(dimm, missing)
            }
            DramLayout::Striped => {
                bytes.chunks_exact_mut(LINE as usize).enumerate().try_for_each(|(number, bytes)| {
                    let (dimm, place) = self.striped(&from.rows, line + number as u64)?;
                    self.line(dimm, place, bytes)
                })
            }
        }
    }

    fn dimm(&self, dimm: u32) -> Result<(), Fault> {
        let count = self.memories.len() as u32;
        if dimm < count { Ok(()) } else { Err(Fault::NoDimm { dimm, count }) }
    }

    fn check(&self, allocation: &RowAllocation, line: u64, bytes: usize) -> Result<(), Fault> {
        if let DramLayout::Localized(dimm) = allocation.layout {
            self.dimm(dimm)?;
        }
        if !bytes.is_multiple_of(LINE as usize) {
            return Err(Fault::NoLines(bytes));
        }
        let (rows, lines) = (&allocation.rows, (bytes / LINE as usize) as u64);
        let sets = u64::from(rows.end.min(self.dimm_config.geometry.rows).saturating_sub(rows.start));
        let dimms = if allocation.layout == DramLayout::Striped { self.memories.len() as u64 } else { 1 };
        let room = sets * self.dimm_config.geometry.set_lines().unwrap_or(0) * dimms;
        if line.checked_add(lines).is_none_or(|end| end > room) {
            return Err(Fault::Outside { line, lines, rows: rows.clone(), room });
        }
        Ok(())
    }

    /// Place of a line of striped row sets.
    pub(super) fn striped(&self, rows: &Range<u32>, line: u64) -> Result<(u32, Place), Fault> {
        let DimmConfig { system, geometry } = &self.dimm_config;
        let place = system.place(geometry, rows.start, line);
        place.ok_or_else(|| Fault::Outside { line, lines: 1, rows: rows.clone(), room: 0 })
    }

    /// Place of a line of localized row sets.
    pub(super) fn localized(&self, rows: &Range<u32>, line: u64) -> Result<Place, Fault> {
        let place = Layout::Localized.place(&self.dimm_config.geometry, rows.start, line);
        place.ok_or_else(|| Fault::Outside { line, lines: 1, rows: rows.clone(), room: 0 })
    }

    /// A line by its place.
    pub(super) fn line(&self, dimm: u32, place: Place, bytes: &mut [u8]) -> Result<(), Fault> {
        let Some(line) = self.memory(dimm)?.line(place) else {
            bytes.fill(0);
            return self.hold(dimm, Some(place));
        };
        bytes.copy_from_slice(line);
        Ok(())
    }

    /// Lines of localized row sets.
    pub(super) fn lines(
        &self,
        dimm: u32,
        rows: &Range<u32>,
        line: u64,
        bytes: &mut [u8],
    ) -> Result<(), Fault> {
        let missing = self.memory(dimm)?.read(span(rows, line), bytes);
        self.hold(dimm, missing)
    }

    pub(super) fn memory(&self, dimm: u32) -> Result<&Memory, Fault> {
        let count = self.memories.len() as u32;
        self.memories.get(dimm as usize).ok_or(Fault::NoDimm { dimm, count })
    }

    pub(super) fn memory_mut(&mut self, dimm: u32) -> Result<&mut Memory, Fault> {
        let count = self.memories.len() as u32;
        self.memories.get_mut(dimm as usize).ok_or(Fault::NoDimm { dimm, count })
    }

    fn hold(&self, dimm: u32, missing: Option<Place>) -> Result<(), Fault> {
        match missing {
            Some(place) if self.strict => Err(Fault::Unwritten { dimm, place }),
            _ => Ok(()),
        }
    }
}

/// Lines of localized row sets.
pub(super) fn span(rows: &Range<u32>, line: u64) -> LineSpan {
    LineSpan { layout: Layout::Localized, first_row: rows.start, line }
}
