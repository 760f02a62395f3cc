//! Offsets of the parts of a state: slots, snapshots, blocks, heads.

use crate::error::{Error, Result};
use crate::exec::unit::Units;
use crate::platform::memory::{Addr, Region};
use moec_ir::plan::{Plan, StateBuf};
use moec_ir::state::{CacheHead, CacheOrder, StateKind};

/// First byte of a state.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// In the region.
    Region(usize),
    /// In the memory of the unit with this index.
    Unit(Addr, usize),
}

impl Place {
    /// The place of a state outside of the region, which begins at `first`.
    ///
    /// # Errors
    /// A memory without a unit that has steps.
    pub(super) fn of_unit(plan: &Plan, state: &StateBuf, first: Addr) -> Result<Self> {
        let has_steps =
            |unit: usize| plan.entries.iter().flat_map(|e| &e.steps).any(|s| s.unit as usize == unit);
        let mut units = plan.units.iter().enumerate().filter(|(_, unit)| unit.memory == state.memory);
        let owner = units.find(|&(unit, _)| has_steps(unit));
        let owner = owner.ok_or_else(|| Error::plan(format!("no unit has state `{}`", state.name)))?;
        Ok(Self::Unit(first, owner.0))
    }
}

/// A state into which all tokens are folded: it can go back only to a snapshot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Folded {
    /// First byte.
    pub(super) place: Place,
    /// Bytes of a slot, and of a snapshot.
    pub(super) slot: usize,
    /// Bytes of all slots; snapshots follow them.
    pub(super) live: usize,
}

/// Values of a cache or ring, in blocks of tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Values {
    /// First byte in the region.
    pub(super) at: usize,
    pub(super) heads: usize,
    /// Bytes of a head of a slot.
    pub(super) head: usize,
    /// Positions that it holds.
    pub(super) rows: usize,
    /// Tokens of a block.
    pub(super) block: usize,
    /// Bytes of a block.
    pub(super) bytes: usize,
}

impl Values {
    /// Values of a state that begins at `at`; `None` if it has no values in blocks, or if its extents
    /// overflow.
    pub(super) fn of(state: &StateBuf, at: usize) -> Option<Self> {
        let CacheOrder::Values { block, .. } = state.order else { return None };
        let kept = matches!(state.kind, StateKind::Cache | StateKind::Ring { .. });
        let (head, heads) = (state.head(), state.shape[1] as usize);
        let (block, rows) = (block as usize, head.ctx);
        let bytes = CacheHead { ctx: block, ..head }.bytes()?;
        let head = head.bytes()?;
        (kept && block > 0).then_some(Self { at, heads, head, rows, block, bytes })
    }

    /// Clears the block of a slot that begins at a position; `None` if it is outside of the region.
    pub(super) fn clear(&self, region: &mut Region, (slot, pos): (u32, usize)) -> Option<()> {
        let slot = self.at + slot as usize * self.heads * self.head;
        let block = pos / self.block * self.bytes;
        (0..self.heads).try_for_each(|h| region.zero(slot + h * self.head + block, self.bytes))
    }
}

impl Folded {
    /// Offset of a slot in the state.
    pub(super) fn live(&self, slot: u32) -> usize {
        slot as usize * self.slot
    }

    /// Offsets in the state of a slot and of a place of the pool.
    pub(super) fn places(&self, slot: u32, place: u32) -> (usize, usize) {
        (self.live(slot), self.live + place as usize * self.slot)
    }

    /// Offset in the region of one in the state; `None` if the state is in another memory.
    pub(super) fn in_region(&self, at: usize) -> Option<usize> {
        match self.place {
            Place::Region(first) => Some(first + at),
            Place::Unit(..) => None,
        }
    }

    /// Zeroes a slot; `None` if it is outside of its memory.
    pub(super) fn zero(&self, slot: u32, region: &mut Region, units: Units<'_>) -> Option<()> {
        let at = self.live(slot);
        match self.place {
            Place::Region(first) => region.zero(first + at, self.slot),
            Place::Unit(first, unit) => {
                let unit = units.get(unit)?;
                // SAFETY: the slot is one of the plan's, for which the unit's memory has room; no step runs
                // between two calls.
                unsafe { unit.zero(first.plus(at), self.slot) };
                Some(())
            }
        }
    }

    /// Copies a slot or snapshot to another one, both by their offsets in the state; `None` if one of them is
    /// outside of its memory.
    pub(super) fn copy(&self, from: usize, to: usize, region: &mut Region, units: Units<'_>) -> Option<()> {
        match self.place {
            Place::Region(first) => region.copy(first + from, first + to, self.slot),
            Place::Unit(first, unit) if from != to => {
                let unit = units.get(unit)?;
                // SAFETY: both are slots of the plan or places of its pool, for which the unit's memory has
                // room, and do not overlap; no step runs between two calls.
                unsafe { unit.copy(first.plus(from), first.plus(to), self.slot) };
                Some(())
            }
            Place::Unit(..) => Some(()),
        }
    }
}

/// Bytes that `tokens` tokens take in each head of a state, and the offsets of the heads of both slots;
/// `None` if they are outside of the state.
///
/// Every layout of a cache stores tokens in consecutive panels or blocks. So the first tokens are the first
/// bytes, as many as a head of `tokens` tokens has. States of other kinds are copied whole.
pub(super) fn heads(
    state: &StateBuf,
    from: u32,
    to: u32,
    tokens: usize,
) -> Option<(usize, impl Iterator<Item = (usize, usize)>)> {
    let [slots, heads, ctx, _] = state.shape.map(|n| n as usize);
    let head = state.head();
    let filled = match state.kind {
        StateKind::Cache => tokens,
        StateKind::Ring { .. } | StateKind::Recurrent | StateKind::Convolution => ctx,
    };
    let (whole, bytes) = (head.bytes()?, CacheHead { ctx: filled, ..head }.bytes()?);
    let slot = whole.checked_mul(heads)?;
    let fits = filled <= ctx && slot.checked_mul(slots).is_some();
    let [from, to] = [from, to].map(|s| s as usize);
    let starts = (0..heads).map(move |h| (from * slot + h * whole, to * slot + h * whole));
    (fits && from.max(to) < slots).then_some((bytes, starts))
}
