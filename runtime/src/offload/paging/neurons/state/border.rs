//! The cold region grows and shrinks (PowerInfer-2, §4.2).

use super::{NeuronLayout, Pool, State, UnitState};
use crate::error::{Error, Result};
use crate::exec::unit::{ExpertPart, LayerPart};
use crate::offload::neurons::Event;
use crate::offload::paging::neurons::{Layer, Piece, layer_of};
use crate::offload::paging::tables::Tables;

impl State {
    /// Sets the number of frames, between two calls; the hot region gets the rest. With fewer frames the
    /// neurons used longest ago are evicted, those that stay move to frames that stay, and the memory of the
    /// others goes back to the operating system.
    ///
    /// # Errors
    /// More frames than there are.
    pub(in super::super) fn resize(
        &mut self,
        layout: NeuronLayout,
        layers: &[Layer],
        frames: u32,
    ) -> Result<()> {
        for (piece, pool) in Piece::ALL.into_iter().zip(&mut self.pools) {
            let tables = &self.tables;
            pool.resize(layout, frames, |pool, id, frame| {
                pool.write_addresses(layout, layers, tables, piece, id, frame);
            })?;
        }
        Ok(())
    }
}

impl State {
    /// Frames that hold neurons now.
    pub(in super::super) fn frames(&self, layout: NeuronLayout) -> u32 {
        self.pools.first().map_or(0, |pool| pool.frames(layout))
    }
}

impl Pool {
    fn frames(&self, layout: NeuronLayout) -> u32 {
        (self.cache.regions().cold / self.unit_bytes(layout).max(1)) as u32
    }

    fn unit_bytes(&self, layout: NeuronLayout) -> u64 {
        (self.read.bytes * layout.neurons_per_unit) as u64
    }

    fn resize(
        &mut self,
        layout: NeuronLayout,
        frames: u32,
        mut moved: impl FnMut(&Self, u32, u32),
    ) -> Result<()> {
        let bytes = self.unit_bytes(layout);
        let (before, cold) = (self.frames(layout), bytes.saturating_mul(frames.into()));
        let hot = self.cache.regions().capacity().checked_sub(cold);
        let hot = hot.ok_or_else(|| Error::plan(format!("{frames} frames are more than there are")))?;
        let (slots, free) = (&mut self.unit_states, &mut self.free);
        let resized = self.cache.resize(hot, |event| {
            if let Event::Evict(other) = event
                && let UnitState::InFrame(frame) =
                    std::mem::replace(&mut slots[other as usize], UnitState::OnDisk)
            {
                free.push(frame);
            }
        });
        resized.map_err(Error::plan)?;
        self.free.extend((before..frames).rev());
        self.free.retain(|&frame| frame < frames);
        if frames >= before {
            return Ok(());
        }
        for id in 0..self.unit_states.len() {
            let UnitState::InFrame(from) = self.unit_states[id] else { continue };
            if from < frames {
                continue;
            }
            let to = self.free.pop();
            let to = to.ok_or_else(|| Error::plan("more neurons are held than there are frames"))?;
            let at = |frame: u32| frame as usize * bytes as usize;
            let copied = self.frames.copy(at(from), at(to), bytes as usize);
            copied.ok_or_else(|| Error::plan("a frame outside of its region"))?;
            self.unit_states[id] = UnitState::InFrame(to);
            moved(self, id as u32, to);
        }
        self.frames.release(cold as usize);
        Ok(())
    }

    /// Writes the addresses of a unit's neurons in a frame into the tables that kernels read.
    fn write_addresses(
        &self,
        layout: NeuronLayout,
        layers: &[Layer],
        tables: &Tables,
        piece: Piece,
        id: u32,
        frame: u32,
    ) {
        let (matrix, unit) = (id / layout.units, id % layout.units);
        let Some((layer, own)) = layer_of(layers, matrix) else { return };
        let within = unit as usize * layout.neurons_per_unit;
        let count = layout.neurons_per_unit.min(own.inter.saturating_sub(within));
        let first = (matrix - own.first) as usize * own.inter + within;
        let at = self.frames.base().plus(frame as usize * self.unit_bytes(layout) as usize);
        for i in 0..count {
            let entry = (first + i) * layout.addresses + piece.index();
            let part = LayerPart { layer, part: ExpertPart::Down };
            tables.set(part, entry, at.plus(i * self.read.bytes));
        }
    }
}
