//! States of the sequences in slots: their memory, the length of each sequence, and the operations on it.
//!
//! The kind of a state determines how a sequence goes back ([`StateKind`]). A cache needs only its length: if
//! all states are caches, nothing is copied or allocated, and only new blocks are cleared. A ring goes back
//! as long as it has not overwritten positions that its window sees. For other kinds a slot is zeroed at the
//! start of a sequence, and goes back to positions with a snapshot; all slots share a pool of these
//! ([`super::snapshots`]). Slots and snapshots of a state are in one memory, and the unit of that memory
//! zeroes and copies them. An operation that a kind does not support is an error that names the state.

mod parts;

use super::snapshots::Pool;
use super::unsupported::{UnsupportedOperation, check_fork, check_own, check_snapshots, refusal};
use crate::error::{Error, Result};
use crate::exec::unit::Units;
use crate::platform::memory::{Addr, Region};
use moec_ir::plan::{ALIGN, Plan};
use moec_ir::state::StateKind;
use parts::{Folded, Place, Values, heads};

/// A cache of the last positions.
#[derive(Clone, Copy, Debug)]
struct Ring {
    /// Index into [`Plan::states`].
    index: usize,
    /// Positions that it holds.
    rows: usize,
    /// Positions that a token sees, including its own.
    window: usize,
}

/// The states of a plan, slot by slot.
#[derive(Debug)]
pub(crate) struct States<'p> {
    plan: &'p Plan,
    region: Region,
    at: Vec<Addr>,
    /// Tokens of each slot.
    lens: Vec<usize>,
    rings: Vec<Ring>,
    /// By slot, the position after the furthest one written since the sequence began; empty without rings.
    written: Vec<usize>,
    /// Values of caches and rings in the CPU's memory.
    values: Vec<Values>,
    /// Recurrent states; empty, as `rings`, if all states are caches.
    folded: Vec<Folded>,
    pool: Pool,
    /// Slots whose states a call has changed without completing.
    dirty: Vec<u32>,
}

impl<'p> States<'p> {
    /// Allocates zeroed memory for all states of a verified plan. `elsewhere` has the addresses of states
    /// outside of the CPU's memory. `sequences` is the most sequences to hold: the pool has room for the
    /// snapshots of these.
    ///
    /// # Errors
    /// [`Error::Bundle`] if the size overflows an address space, [`Error::Io`] if the operating system
    /// refuses.
    pub(crate) fn new(plan: &'p Plan, elsewhere: &[Option<Addr>], sequences: u32) -> Result<Self> {
        let large = || Error::plan("the KV cache is larger than memory can be");
        let (mut bytes, mut offsets) = (0_u64, Vec::with_capacity(plan.states.len()));
        for state in &plan.states {
            offsets.push(bytes);
            let own = if state.memory == 0 { state.bytes() } else { 0 };
            let end = own.checked_next_multiple_of(ALIGN).and_then(|b| bytes.checked_add(b));
            bytes = end.ok_or_else(large)?;
        }
        let region = Region::new("KV cache", bytes)?;
        let (mut rings, mut folded, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (state, &at)) in plan.states.iter().zip(&offsets).enumerate() {
            if let StateKind::Ring { window } = state.kind {
                rings.push(Ring { index, rows: state.shape[2] as usize, window: window as usize });
            }
            if state.memory == 0 {
                values.extend(Values::of(state, at as usize));
            }
            if state.kind.needs_snapshots() {
                let (slot, live) = state.slot_bytes().zip(state.live_bytes()).ok_or_else(large)?;
                let place = match elsewhere.get(index).copied().flatten() {
                    None => Place::Region(at as usize),
                    Some(first) => Place::of_unit(plan, state, first)?,
                };
                folded.push(Folded { place, slot: slot as usize, live: live as usize });
            }
        }
        Ok(Self {
            plan,
            at: offsets
                .into_iter()
                .enumerate()
                .map(|(i, o)| elsewhere.get(i).copied().flatten().unwrap_or(region.base().plus(o as usize)))
                .collect(),
            region,
            lens: vec![0; plan.model.slots as usize],
            pool: Pool::new(
                plan.snapshots_of_slot().saturating_mul(sequences.clamp(1, plan.model.slots.max(1))),
                plan.snapshot_distance().map(|d| d as usize),
            ),
            written: vec![0; if rings.is_empty() { 0 } else { plan.model.slots as usize }],
            rings,
            values,
            folded,
            dirty: Vec::new(),
        })
    }

    /// Memory of the states that are the CPU's.
    pub(crate) const fn region(&self) -> &Region {
        &self.region
    }

    /// Address of each state of the plan.
    pub(crate) fn addresses(&self) -> &[Addr] {
        &self.at
    }

    /// Bytes of all states, snapshots included.
    pub(crate) fn bytes(&self) -> u64 {
        self.region.bytes() as u64
    }

    /// Bytes of all snapshots that the pool has room for, in the CPU's memory.
    pub(crate) fn snapshot_bytes(&self) -> u64 {
        let here = self.folded.iter().filter(|s| matches!(s.place, Place::Region(_)));
        here.fold(0_u64, |sum, s| sum.saturating_add(s.slot as u64)).saturating_mul(self.pool.size().into())
    }

    /// Tokens in a slot; `None` if there is no such slot.
    pub(crate) fn len(&self, slot: u32) -> Option<usize> {
        self.lens.get(slot as usize).copied()
    }

    /// Forgets the sequence in a slot, also after a failed call. Every kind supports this.
    ///
    /// # Errors
    /// [`Error::Request`].
    pub(crate) fn zero(&mut self, slot: u32, units: Units<'_>) -> Result<()> {
        let slots = self.plan.model.slots;
        // A cache or ring needs no clearing: a row attends to positions up to its own, which will have been
        // written by then. `begin` clears the other values that its kernels multiply.
        *self.lens.get_mut(slot as usize).ok_or_else(|| Error::bad_slot(slot, slots))? = 0;
        if let Some(written) = self.written.get_mut(slot as usize) {
            *written = 0;
        }
        if self.folded.is_empty() {
            return Ok(());
        }
        for state in &self.folded {
            state.zero(slot, &mut self.region, units).ok_or_else(short)?;
        }
        self.pool.truncate(slot, 0);
        self.dirty.retain(|&t| t != slot);
        Ok(())
    }

    /// Takes a snapshot of a slot, to which [`States::rewind`] can go back, and returns its position. If the
    /// pool is full another snapshot is evicted. An empty sequence, a cache and a ring need no snapshot.
    ///
    /// # Errors
    /// [`Error::Request`]; [`Error::State`] if there is no room, or after a call that failed.
    pub(crate) fn snapshot(&mut self, slot: u32, units: Units<'_>) -> Result<usize> {
        let pos = self.checked_len(slot)?;
        if self.folded.is_empty() {
            return Ok(pos);
        }
        self.check_whole(slot)?;
        if pos == 0 || self.pool.find(slot, pos).is_some() {
            return Ok(pos);
        }
        let Some(place) = self.pool.take(slot, pos) else {
            return Err(refusal(self.plan, UnsupportedOperation::Snapshot));
        };
        for state in &self.folded {
            let (live, kept) = state.places(slot, place);
            state.copy(live, kept, &mut self.region, units).ok_or_else(short)?;
        }
        Ok(pos)
    }

    /// Prepares for tokens at these slots and positions that may be decoded again: goes back to the
    /// positions, and keeps snapshots of them until the next call.
    ///
    /// # Errors
    /// As [`States::check_rewind`] and [`States::snapshot`].
    pub(crate) fn keep(
        &mut self,
        rows: impl Iterator<Item = (u32, usize)> + Clone,
        units: Units<'_>,
    ) -> Result<()> {
        if self.folded.is_empty() {
            return Ok(());
        }
        check_snapshots(self.plan)?;
        // Going back may need snapshots that `release` drops.
        rows.clone().try_for_each(|(slot, pos)| self.rewind(slot, pos, units))?;
        self.pool.release();
        for (slot, pos) in rows {
            let passing = self.pool.find(slot, pos).is_none();
            self.snapshot(slot, units)?;
            self.pool.keep(slot, pos, passing);
        }
        Ok(())
    }

    /// Restores a slot exactly as it was after its first `pos` tokens. Snapshots of later positions are
    /// dropped.
    ///
    /// # Errors
    /// As [`States::check_rewind`]. Nothing is changed then.
    pub(crate) fn rewind(&mut self, slot: u32, pos: usize, units: Units<'_>) -> Result<()> {
        self.check_rewind(slot, pos)?;
        let len = &mut self.lens[slot as usize];
        if pos == *len && !self.dirty.contains(&slot) {
            return Ok(());
        }
        if pos == 0 {
            return self.zero(slot, units);
        }
        *len = pos;
        if self.folded.is_empty() {
            return Ok(());
        }
        self.pool.truncate(slot, pos);
        if let Some(place) = self.pool.find(slot, pos) {
            self.pool.touch(slot, pos);
            for state in &self.folded {
                let (live, kept) = state.places(slot, place);
                state.copy(kept, live, &mut self.region, units).ok_or_else(short)?;
            }
        }
        self.dirty.retain(|&t| t != slot);
        Ok(())
    }

    /// Furthest position up to `most` at which a slot's sequence can continue; 0 if only its beginning is
    /// possible.
    pub(crate) fn resumes(&self, slot: u32, most: usize) -> usize {
        let most = most.min(self.len(slot).unwrap_or(0));
        let goes = |&pos: &usize| self.check_rewind(slot, pos).is_ok();
        Some(most).filter(goes).or_else(|| self.pool.before(slot, most).filter(goes)).unwrap_or(0)
    }

    /// Checks that a sequence can continue at `pos`.
    ///
    /// # Errors
    /// [`Error::Request`]. [`Error::State`] if `pos` is past the end; if it is before the end, and a ring has
    /// overwritten positions seen from there or a state has no snapshot; if it is the end, after a call that
    /// failed.
    pub(crate) fn check_rewind(&self, slot: u32, pos: usize) -> Result<()> {
        let len = self.checked_len(slot)?;
        if pos > len {
            return Err(Error::gap(slot, pos, len));
        }
        if pos == 0 {
            return Ok(());
        }
        for ring in &self.rings {
            let overwritten = self.written[slot as usize].saturating_sub(ring.rows);
            if pos.saturating_sub(ring.window - 1) < overwritten {
                let least = overwritten.saturating_add(ring.window - 1);
                let state = &self.plan.states[ring.index];
                let operation = UnsupportedOperation::RewindRing { slot, len, pos, least };
                return Err(operation.error(&state.name, state.kind));
            }
        }
        if self.folded.is_empty() || self.pool.find(slot, pos).is_some() {
            return Ok(());
        }
        if pos == len {
            return self.check_whole(slot);
        }
        let (snapshots, room) = (self.pool.positions(slot), self.plan.snapshots_of_slot());
        Err(refusal(self.plan, UnsupportedOperation::Rewind { slot, len, pos, snapshots, room }))
    }

    /// Makes the sequence in slot `to` the first `tokens` tokens of slot `from`. Of a cache the filled rows
    /// are copied, of a ring all rows. Of a folded state the snapshot of that position is copied, or else the
    /// slot. Both slots then share the snapshots up to there; other snapshots of `to` are dropped.
    ///
    /// # Errors
    /// [`Error::State`] for states of static graphs; as [`States::check_rewind`] of `from`. Nothing is
    /// changed then.
    pub(crate) fn fork(&mut self, from: u32, to: u32, tokens: usize, units: Units<'_>) -> Result<()> {
        self.checked_len(to)?;
        check_fork(self.plan)?;
        self.check_rewind(from, tokens)?;
        if from == to {
            return self.rewind(to, tokens, units);
        }
        self.zero(to, units)?;
        if tokens == 0 {
            return Ok(());
        }
        let rows = self.written.get(from as usize).copied();
        for (state, at) in self.plan.states.iter().zip(&self.at).filter(|(s, _)| !s.kind.needs_snapshots()) {
            let offset = at.ptr() as usize - self.region.base().ptr() as usize;
            let (bytes, heads) = heads(state, from, to, tokens).ok_or_else(short)?;
            for (from, to) in heads {
                self.region.copy(offset + from, offset + to, bytes).ok_or_else(short)?;
            }
        }
        let place = self.pool.find(from, tokens);
        for state in &self.folded {
            let source = place.map_or(state.live(from), |place| state.places(from, place).1);
            state.copy(source, state.live(to), &mut self.region, units).ok_or_else(short)?;
        }
        self.pool.share(from, to, tokens);
        self.lens[to as usize] = tokens;
        if let Some(rows) = rows {
            self.written[to as usize] = rows;
        }
        Ok(())
    }

    /// Ranges that a sequence of `tokens` tokens takes in a slot: first bytes and lengths in the region, in
    /// the plan's order.
    ///
    /// # Errors
    /// [`Error::Request`]; [`Error::State`] for states in another unit.
    fn held(&self, slot: u32, tokens: usize) -> Result<Vec<(usize, usize)>> {
        self.checked_len(slot)?;
        check_own(self.plan, UnsupportedOperation::Save)?;
        let mut parts = Vec::new();
        for (state, at) in self.plan.states.iter().zip(&self.at) {
            let offset = at.ptr() as usize - self.region.base().ptr() as usize;
            let (bytes, heads) = heads(state, slot, slot, tokens).ok_or_else(short)?;
            parts.extend(heads.map(|(from, _)| (offset + from, bytes)));
        }
        Ok(parts)
    }

    /// Bytes that [`States::save`] writes for a sequence of `tokens` tokens with `snapshots` snapshots.
    ///
    /// # Errors
    /// As [`States::save`].
    pub(crate) fn saved_bytes(&self, slot: u32, tokens: usize, snapshots: usize) -> Result<u64> {
        let parts = self.held(slot, tokens)?;
        let snapshot = self.folded.iter().fold(0_u64, |sum, state| sum.saturating_add(state.slot as u64));
        let live = parts.iter().fold(0, |sum, (_, bytes)| sum + *bytes as u64);
        Ok(snapshot.saturating_mul(snapshots as u64).saturating_add(live))
    }

    /// Positions before the end of a slot's sequence that have a snapshot, ascending.
    pub(crate) fn snapshots(&self, slot: u32) -> Vec<usize> {
        let len = self.len(slot).unwrap_or(0);
        self.pool.positions(slot).into_iter().filter(|&pos| pos < len).collect()
    }

    /// Passes all values of a slot's sequence to `sink`, then its [`States::snapshots`], one after the other.
    ///
    /// # Errors
    /// [`Error::Request`]; [`Error::State`] for states in another unit, and after a call that failed; errors
    /// of `sink`.
    pub(crate) fn save(&self, slot: u32, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        self.check_whole(slot)?;
        for (at, bytes) in self.held(slot, self.checked_len(slot)?)? {
            sink(self.region.part(at, bytes).ok_or_else(short)?)?;
        }
        for place in self.snapshots(slot).into_iter().filter_map(|pos| self.pool.find(slot, pos)) {
            for state in &self.folded {
                let at = state.in_region(state.places(slot, place).1).ok_or_else(short)?;
                sink(self.region.part(at, state.slot).ok_or_else(short)?)?;
            }
        }
        Ok(())
    }

    /// Position after the furthest one written in a slot's rings; without rings its number of tokens.
    pub(crate) fn written(&self, slot: u32) -> usize {
        let written = self.written.get(slot as usize).copied();
        written.unwrap_or_else(|| self.len(slot).unwrap_or(0))
    }

    /// Restores a sequence of `tokens` tokens in a slot. `source` fills the parts that [`States::save`]
    /// wrote; `written` and `snapshots` are the values of [`States::written`] and [`States::snapshots`] at
    /// that time. After an error the slot is empty.
    ///
    /// # Errors
    /// As [`States::save`], and errors of `source`.
    pub(crate) fn restore(
        &mut self,
        slot: u32,
        tokens: usize,
        written: usize,
        snapshots: &[usize],
        source: &mut dyn FnMut(&mut [u8]) -> Result<()>,
        units: Units<'_>,
    ) -> Result<()> {
        let parts = self.held(slot, tokens)?;
        self.zero(slot, units)?;
        let filled = self.fill(slot, &parts, snapshots, source);
        if filled.is_err() {
            self.zero(slot, units)?;
            return filled;
        }
        self.lens[slot as usize] = tokens;
        if let Some(rows) = self.written.get_mut(slot as usize) {
            *rows = written;
        }
        Ok(())
    }

    /// Fills parts of the region, then snapshots of a slot. `source` is also called for snapshots that find
    /// no room.
    fn fill(
        &mut self,
        slot: u32,
        parts: &[(usize, usize)],
        snapshots: &[usize],
        source: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        for &(at, bytes) in parts {
            source(self.region.part_mut(at, bytes).ok_or_else(short)?)?;
        }
        for &pos in snapshots {
            let place = self.pool.take(slot, pos);
            for state in &self.folded {
                match place {
                    Some(place) => {
                        let at = state.in_region(state.places(slot, place).1).ok_or_else(short)?;
                        source(self.region.part_mut(at, state.slot).ok_or_else(short)?)?;
                    }
                    None => source(&mut vec![0; state.slot])?,
                }
            }
        }
        Ok(())
    }

    /// Prepares for a call with `rows` (slots and positions): takes every sequence back to the beginning of
    /// its rows, so that replaced tokens are forgotten even if the call fails. Rows of a sequence are
    /// consecutive; slots are the plan's.
    ///
    /// For caches a hole before the rows is allowed.
    ///
    /// # Errors
    /// As [`States::check_rewind`]; [`Error::Request`] if rows of a sequence are not consecutive. No sequence
    /// is changed then.
    pub(crate) fn begin(
        &mut self,
        rows: impl Iterator<Item = (u32, usize)> + Clone,
        units: Units<'_>,
    ) -> Result<()> {
        self.clear(rows.clone())?;
        if self.folded.is_empty() && self.rings.is_empty() {
            for (slot, pos) in rows {
                let len = &mut self.lens[slot as usize];
                *len = (*len).min(pos);
            }
            return Ok(());
        }
        let mut before = None;
        let first = rows.clone().filter(move |&(slot, pos)| {
            let follows = before == Some((slot, pos));
            before = Some((slot, pos.saturating_add(1)));
            !follows
        });
        for (i, (slot, pos)) in first.clone().enumerate() {
            if first.clone().take(i).any(|(other, _)| other == slot) {
                return Err(Error::slot_twice(slot));
            }
            self.check_rewind(slot, pos)?;
        }
        for (slot, pos) in first {
            self.rewind(slot, pos, units)?;
            if !self.folded.is_empty() {
                self.dirty.push(slot);
            }
        }
        if !self.rings.is_empty() {
            for (slot, pos) in rows {
                let written = &mut self.written[slot as usize];
                *written = (*written).max(pos.saturating_add(1));
            }
        }
        Ok(())
    }

    /// Clears the blocks of values that `rows` begin and do not fill. Attention kernels multiply the rest of
    /// a sequence's last block by 0. An earlier sequence may have left NaN there, and the product would be
    /// NaN.
    fn clear(&mut self, rows: impl Iterator<Item = (u32, usize)> + Clone) -> Result<()> {
        let Self { region, values, .. } = self;
        for of in values {
            let mut open = None;
            for (slot, pos) in rows.clone() {
                if let Some(partial) = open.take_if(|partial: &mut (u32, usize)| partial.0 != slot) {
                    of.clear(region, partial).ok_or_else(short)?;
                }
                if pos < of.rows && pos.is_multiple_of(of.block) {
                    open = Some((slot, pos));
                }
                if (pos + 1).is_multiple_of(of.block) {
                    open = None;
                }
            }
            if let Some(partial) = open {
                of.clear(region, partial).ok_or_else(short)?;
            }
        }
        Ok(())
    }

    /// Updates lengths after a call with `rows` that ended without an error.
    pub(crate) fn end(&mut self, rows: impl Iterator<Item = (u32, usize)>) {
        for (slot, pos) in rows {
            self.lens[slot as usize] = pos + 1;
            if !self.folded.is_empty() {
                self.dirty.retain(|&t| t != slot);
            }
        }
    }

    fn checked_len(&self, slot: u32) -> Result<usize> {
        self.len(slot).ok_or_else(|| Error::bad_slot(slot, self.plan.model.slots))
    }

    fn check_whole(&self, slot: u32) -> Result<()> {
        if self.dirty.contains(&slot) {
            Err(refusal(self.plan, UnsupportedOperation::Dirty { slot }))
        } else {
            Ok(())
        }
    }
}

fn short() -> Error {
    Error::plan("a state is shorter than its extents")
}

#[cfg(test)]
mod tests;
