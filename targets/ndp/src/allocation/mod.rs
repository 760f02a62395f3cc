//! Row sets of DIMMs, and the experts that own them.
//!
//! A row set is one row of every bank of a DIMM ([`moec_ndp_isa::Geometry`]). The first ones of every DIMM
//! are its boxes. The rest is for experts, each of which has whole row sets, so moving an expert never
//! touches another one. A localized expert has row sets of one DIMM, a striped one the same row sets of all.
#![expect(
    clippy::cast_possible_truncation,
    reason = "numbers of a memory system below 2⁴⁰ lines, and of one layer"
)]

mod error;

use crate::image::Shape;
use moec_ndp_isa::{Geometry, LINE, System};
use std::collections::BTreeMap;
use std::ops::Range;

pub use error::AllocationError;

/// The DIMMs of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DimmConfig {
    /// Numbers of the parts.
    pub system: System,
    /// The DRAM of each.
    pub geometry: Geometry,
}

impl DimmConfig {
    /// TriMoE's machine (Table 1): 8 channels with two DIMMs of 128 GB. A DIMM has 2 subchannels × 4 ranks ×
    /// 8 bank groups × 4 banks with rows of 4 KB.
    pub const fn trimoe() -> Self {
        Self {
            system: System { channels: 8, dimms: 2 },
            geometry: Geometry {
                subchannels: 2,
                ranks: 4,
                bank_groups: 8,
                banks: 4,
                rows: 1 << 17,
                lines: 64,
            },
        }
    }

    /// DIMMs, if none of the numbers is zero and all lines can be numbered.
    pub(crate) fn check(&self) -> Option<u32> {
        let count = self.system.count()?;
        let lines = self.geometry.set_lines()?.checked_mul(u64::from(self.geometry.rows))?;
        lines.checked_mul(u64::from(count)).filter(|&lines| lines < moec_ndp_isa::MAX_LINES)?;
        Some(count)
    }
}

/// Row sets of activations that come in and of results, the same on every DIMM. Each slot has a row of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boxes {
    /// Slots: (token, expert) pairs of a step.
    pub slots: u32,
    /// Activations, bf16, [`Shape::input_lines`] of a slot.
    pub inbox: Range<u32>,
    /// Routing weights: a line of a slot, whose first f32 it is.
    pub factors: Range<u32>,
    /// Results, f32, [`Shape::output_lines`] of a slot.
    pub outbox: Range<u32>,
}

/// Layout of an expert in DRAM (TriMoE, §3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DramLayout {
    /// Whole in this DIMM, whose unit can compute it.
    Localized(u32),
    /// Spread over all DIMMs, as the host reads best.
    Striped,
}

/// The row sets of an expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowAllocation {
    /// Place in DRAM.
    pub layout: DramLayout,
    /// Row sets there; of a striped expert, on every DIMM.
    pub rows: Range<u32>,
}

/// An expert while it moves: it has both until [`RowAllocator::settle`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The expert.
    pub expert: Expert,
    /// Old allocation.
    pub from: RowAllocation,
    /// New allocation.
    pub to: RowAllocation,
}

/// An expert of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Expert {
    /// Layer, counted over those with routed experts.
    pub layer: u32,
    /// Expert.
    pub number: u32,
}

impl std::fmt::Display for DramLayout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Localized(dimm) => write!(f, "DIMM {dimm}"),
            Self::Striped => f.write_str("the set of all DIMMs"),
        }
    }
}

/// Row sets of all DIMMs: the boxes, and one expert after the other, each in the first gap that it fits.
#[derive(Clone, Debug)]
pub struct RowAllocator {
    dimm_config: DimmConfig,
    shape: Shape,
    boxes: Boxes,
    /// Row sets of a localized expert, and of a striped one on each DIMM.
    sets: (u32, u32),
    /// Allocated row sets of each DIMM: first and end.
    taken: Vec<BTreeMap<u32, u32>>,
    experts: BTreeMap<Expert, RowAllocation>,
    moving: BTreeMap<Expert, RowAllocation>,
}

impl RowAllocator {
    /// Boxes for `slots` slots, and room for experts of one shape.
    ///
    /// # Errors
    /// A machine without DRAM, boxes that do not fit, and an expert that no DIMM can hold.
    pub fn new(dimm_config: DimmConfig, shape: Shape, slots: u32) -> Result<Self, AllocationError> {
        let sizes = dimm_config.check().zip(dimm_config.geometry.set_lines());
        let (count, set) = sizes.ok_or(AllocationError::Dimms(dimm_config))?;
        let rows = dimm_config.geometry.rows;
        let image = shape.image()?;
        let (mut end, mut ranges) = (0_u64, Vec::with_capacity(3));
        for lines in [shape.input_lines(), 1, shape.output_lines()] {
            let from = end;
            end += (u64::from(slots.max(1)) * lines).div_ceil(set);
            ranges.push(from..end);
        }
        let full = AllocationError::Boxes { slots, sets: end, rows };
        if slots == 0 || slots > moec_ndp_isa::MAX_SLOTS || end > u64::from(rows) {
            return Err(full);
        }
        let narrow = |range: &Range<u64>| range.start as u32..range.end as u32;
        let [inbox, factors, outbox] = [narrow(&ranges[0]), narrow(&ranges[1]), narrow(&ranges[2])];
        let boxes = Boxes { slots, inbox, factors, outbox };
        let room = u64::from(rows) - end;
        let sets = (image.lines.div_ceil(set), image.lines.div_ceil(set * u64::from(count)));
        if sets.0 > room {
            let bytes = |sets: u64| sets * set * u64::from(LINE);
            return Err(AllocationError::Expert { shape, bytes: bytes(sets.0), room: bytes(room) });
        }
        let taken = vec![BTreeMap::from([(0, end as u32)]); count as usize];
        Ok(Self {
            dimm_config,
            shape,
            boxes,
            sets: (sets.0 as u32, sets.1 as u32),
            taken,
            experts: BTreeMap::new(),
            moving: BTreeMap::new(),
        })
    }

    /// The machine.
    pub const fn dimm_config(&self) -> &DimmConfig {
        &self.dimm_config
    }

    /// Shape of its experts.
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The boxes of every DIMM.
    pub const fn boxes(&self) -> &Boxes {
        &self.boxes
    }

    /// The row sets of an expert: the new ones while it moves.
    pub fn get(&self, expert: Expert) -> Option<&RowAllocation> {
        self.experts.get(&expert)
    }

    /// Every expert that has a place.
    pub fn experts(&self) -> impl Iterator<Item = (Expert, &RowAllocation)> {
        self.experts.iter().map(|(&expert, allocation)| (expert, allocation))
    }

    /// Free row sets of a DIMM; 0 for an unknown DIMM.
    pub fn free(&self, dimm: u32) -> u32 {
        let taken = self.taken.get(dimm as usize).map(|t| t.iter().map(|(from, end)| end - from).sum());
        taken.map_or(0, |taken: u32| self.dimm_config.geometry.rows - taken)
    }

    /// Allocates row sets to an expert: the lowest that are free.
    ///
    /// # Errors
    /// [`AllocationError::Full`], [`AllocationError::NoDimm`], and [`AllocationError::State`] where it has some already.
    pub fn allocate(
        &mut self,
        expert: Expert,
        layout: DramLayout,
    ) -> Result<&RowAllocation, AllocationError> {
        if self.experts.contains_key(&expert) {
            return Err(AllocationError::State { expert, what: "has its place already" });
        }
        let allocation = self.find(expert, layout)?;
        self.take(&allocation);
        Ok(self.experts.entry(expert).or_insert(allocation))
    }

    /// Allocates new row sets to an expert that has some: those that a stream of [`crate::emit::transfer`]
    /// brings it to. It keeps the old ones until [`Self::settle`].
    ///
    /// # Errors
    /// As [`Self::allocate`]; [`AllocationError::State`] if it has none, is there already, or is moving.
    pub fn begin(&mut self, expert: Expert, layout: DramLayout) -> Result<Move, AllocationError> {
        let state = |what| AllocationError::State { expert, what };
        let from = self.experts.get(&expert).cloned().ok_or(state("has no place"))?;
        if from.layout == layout {
            return Err(state("is there already"));
        }
        if self.moving.contains_key(&expert) {
            return Err(state("is on its way"));
        }
        let to = self.find(expert, layout)?;
        self.take(&to);
        self.moving.insert(expert, from.clone());
        self.experts.insert(expert, to.clone());
        Ok(Move { expert, from, to })
    }

    /// Gives up a move: the expert has its old row sets alone.
    ///
    /// # Errors
    /// [`AllocationError::State`] if it is not moving.
    pub fn cancel(&mut self, expert: Expert) -> Result<(), AllocationError> {
        let from = self.moving.remove(&expert);
        let from = from.ok_or(AllocationError::State { expert, what: "is not on its way" })?;
        if let Some(to) = self.experts.insert(expert, from) {
            self.give(&to);
        }
        Ok(())
    }

    /// The expert has arrived: its old row sets are free.
    ///
    /// # Errors
    /// [`AllocationError::State`] if it is not moving.
    pub fn settle(&mut self, expert: Expert) -> Result<(), AllocationError> {
        let what = "is not on its way";
        let from = self.moving.remove(&expert).ok_or(AllocationError::State { expert, what })?;
        self.give(&from);
        Ok(())
    }

    /// Frees an expert's row sets, old and new ones.
    ///
    /// # Errors
    /// [`AllocationError::State`] if it has none.
    pub fn free_expert(&mut self, expert: Expert) -> Result<(), AllocationError> {
        let what = "has no place";
        let allocation = self.experts.remove(&expert).ok_or(AllocationError::State { expert, what })?;
        self.give(&allocation);
        if let Some(from) = self.moving.remove(&expert) {
            self.give(&from);
        }
        Ok(())
    }

    /// DIMMs that a layout is on.
    fn dimms(&self, layout: DramLayout) -> Range<usize> {
        match layout {
            DramLayout::Localized(dimm) => dimm as usize..dimm as usize + 1,
            DramLayout::Striped => 0..self.taken.len(),
        }
    }

    fn find(&self, expert: Expert, layout: DramLayout) -> Result<RowAllocation, AllocationError> {
        let (count, rows) = (self.taken.len() as u32, self.dimm_config.geometry.rows);
        let sets = match layout {
            DramLayout::Localized(dimm) if dimm >= count => {
                return Err(AllocationError::NoDimm { dimm, count });
            }
            DramLayout::Localized(_) => self.sets.0,
            DramLayout::Striped => self.sets.1,
        };
        let dimms = &self.taken[self.dimms(layout)];
        let mut at = 0;
        // Every DIMM moves the first candidate past its allocated row sets, until all agree.
        while let Some(end) = dimms.iter().find_map(|taken| blocker(taken, at, sets)) {
            at = end;
        }
        if u64::from(at) + u64::from(sets) <= u64::from(rows) {
            return Ok(RowAllocation { layout, rows: at..at + sets });
        }
        let free = self.dimms(layout).map(|d| self.free(d as u32)).min().unwrap_or(0);
        Err(AllocationError::Full { expert, sets, layout, free, rows })
    }

    fn take(&mut self, allocation: &RowAllocation) {
        for dimm in self.dimms(allocation.layout) {
            self.taken[dimm].insert(allocation.rows.start, allocation.rows.end);
        }
    }

    fn give(&mut self, allocation: &RowAllocation) {
        for dimm in self.dimms(allocation.layout) {
            self.taken[dimm].remove(&allocation.rows.start);
        }
    }
}

/// End of an allocation that overlaps `sets` row sets from `at` on, if there is one.
fn blocker(taken: &BTreeMap<u32, u32>, at: u32, sets: u32) -> Option<u32> {
    let (_, &end) = taken.range(..at.saturating_add(sets)).next_back()?;
    (end > at).then_some(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_ir::{Activation, Glu};
    use proptest::prelude::*;

    const SHAPE: Shape = Shape { hidden: 256, inner: 512, glu: Glu::Gated(Activation::Silu), bias: false };

    /// Row sets of 64 KB: an expert of [`SHAPE`] takes 12 of them, or 3 on each of four DIMMs.
    fn small(rows: u32) -> DimmConfig {
        DimmConfig {
            system: System { channels: 2, dimms: 2 },
            geometry: Geometry { subchannels: 2, ranks: 2, bank_groups: 2, banks: 2, rows, lines: 64 },
        }
    }

    fn expert(number: u32) -> Expert {
        Expert { layer: 3, number }
    }

    #[test]
    fn buffers_come_first_and_experts_fill_the_first_gap() {
        let mut all = RowAllocator::new(small(64), SHAPE, 100).expect("an allocator");
        assert_eq!(*all.boxes(), Boxes { slots: 100, inbox: 0..1, factors: 1..2, outbox: 2..4 });
        let dimm = |d, rows| RowAllocation { layout: DramLayout::Localized(d), rows };
        assert_eq!(*all.allocate(expert(0), DramLayout::Localized(1)).expect("room"), dimm(1, 4..16));
        assert_eq!(*all.allocate(expert(1), DramLayout::Localized(1)).expect("room"), dimm(1, 16..28));
        let striped = all.allocate(expert(2), DramLayout::Striped).expect("room").clone();
        assert_eq!(striped, RowAllocation { layout: DramLayout::Striped, rows: 28..31 });
        assert_eq!(*all.allocate(expert(3), DramLayout::Localized(0)).expect("room"), dimm(0, 4..16));
        all.free_expert(expert(0)).expect("it was there");
        assert_eq!(*all.allocate(expert(4), DramLayout::Localized(1)).expect("room"), dimm(1, 4..16));
        assert_eq!(all.free(1), 64 - 4 - 24 - 3);
    }

    #[test]
    fn move_reserves_source_and_target_until_it_finishes() {
        let mut all = RowAllocator::new(small(64), SHAPE, 100).expect("an allocator");
        all.allocate(expert(0), DramLayout::Localized(0)).expect("room");
        let there = all.begin(expert(0), DramLayout::Striped).expect("room");
        assert_eq!((there.from.rows, there.to.rows), (4..16, 16..19));
        assert_eq!(all.free(0), 64 - 4 - 12 - 3);
        let twice = all.begin(expert(0), DramLayout::Localized(2)).expect_err("on its way");
        assert_eq!(twice.to_string(), "expert 0 of layer 3 is on its way");
        all.settle(expert(0)).expect("it was on its way");
        assert_eq!(all.free(0), 64 - 4 - 3);
        assert_eq!(all.begin(expert(0), DramLayout::Localized(2)).expect("room").to.rows, 4..16);
    }

    #[test]
    fn allocation_over_capacity_is_reported() {
        let of = |dimm_config, shape, slots| {
            RowAllocator::new(dimm_config, shape, slots).expect_err("too much").to_string()
        };
        let large = Shape { hidden: 5120, inner: 1536, ..SHAPE };
        assert_eq!(
            of(small(64), large, 10),
            "an expert of 5120 by 1536 takes 47185920 bytes, but a DIMM has 3735552"
        );
        assert_eq!(
            of(small(64), SHAPE, 10_000),
            "boxes of 10000 slots need 246 row sets, but a DIMM has 64: use fewer slots"
        );
        let mut all = RowAllocator::new(small(20), SHAPE, 100).expect("an allocator");
        all.allocate(expert(0), DramLayout::Localized(3)).expect("room");
        let full = all.allocate(expert(7), DramLayout::Localized(3)).expect_err("full");
        assert_eq!(
            full.to_string(),
            "expert 7 of layer 3 takes 12 row sets, and DIMM 3 has no 12 in a row left (4 of 20 are free): move \
             this or another expert to another DIMM"
        );
        let none = all.allocate(expert(7), DramLayout::Localized(4)).expect_err("no DIMM");
        assert_eq!(none.to_string(), "there is no DIMM 4: the machine has 4, from 0");
        let empty = DimmConfig { system: System { channels: 0, dimms: 2 }, ..small(20) };
        assert_eq!(RowAllocator::new(empty, SHAPE, 1).expect_err("no DIMM"), AllocationError::Dimms(empty));
    }

    proptest! {
        #[test]
        fn allocations_never_share_a_row_set(steps in prop::collection::vec((0_u32..12, 0_u32..5, 0_u8..4), 1..80)) {
            let mut all = RowAllocator::new(small(80), SHAPE, 100).expect("an allocator");
            for (number, to, step) in steps {
                let layout = if to == 4 { DramLayout::Striped } else { DramLayout::Localized(to) };
                let _ = match step {
                    0 => all.allocate(expert(number), layout).map(drop),
                    1 => all.begin(expert(number), layout).map(drop),
                    2 => all.settle(expert(number)),
                    _ => all.free_expert(expert(number)),
                };
                let mut owners = vec![[0_u32; 80]; 4];
                let held: Vec<_> = all.experts.values().chain(all.moving.values()).cloned().collect();
                for allocation in held {
                    for dimm in all.dimms(allocation.layout) {
                        allocation.rows.clone().for_each(|row| owners[dimm][row as usize] += 1);
                    }
                }
                for (dimm, owners) in owners.iter().enumerate() {
                    prop_assert!(owners.iter().all(|&n| n <= 1));
                    prop_assert!(owners[..4].iter().all(|&n| n == 0), "boxes have no owner");
                    let free = owners.iter().filter(|&&n| n == 0).count() as u32 - 4;
                    prop_assert_eq!(free, all.free(dimm as u32));
                }
            }
        }
    }
}
