//! The memory of a block: its bytes, whether they were written, and the last threads that touched them.

use super::clocks::Clocks;
use super::error::{Kind, Stop};
use crate::lanes::WARP;

/// Thread that touched a byte, and when by the clocks of its warp and of itself.
#[derive(Clone, Copy, Default)]
struct Stamp {
    /// The thread, from 1; 0: none.
    thread: u16,
    atomic: bool,
    warp_clock: u32,
    lane_clock: u32,
}

/// Last accesses of a byte.
#[derive(Clone, Copy, Default)]
struct Cell {
    writer: Stamp,
    /// The last two threads that read it.
    readers: [Stamp; 2],
    /// The thread, counted from 1, whose copy to it is pending.
    copying: u16,
}

/// Kind of access.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AccessKind {
    Read,
    Write,
    Atomic,
    /// A copy begins that ends at a wait.
    CopyBegins,
    /// A copy ends.
    CopyEnds,
}

/// The memory of a block.
pub(super) struct Shared {
    bytes: Vec<u8>,
    written: Vec<bool>,
    /// Empty where races are not looked for.
    cells: Vec<Cell>,
    /// Clocks of the warps of the block, at barriers.
    pub(super) warps: Clocks,
    /// Clocks of the lanes of each warp, at barriers of the warp.
    lanes: Vec<Clocks>,
    unwritten: bool,
}

impl Shared {
    pub(super) fn new(bytes: usize, warps: usize, races: bool, unwritten: bool) -> Self {
        Self {
            bytes: vec![0; bytes],
            written: vec![false; bytes],
            cells: if races { vec![Cell::default(); bytes] } else { Vec::new() },
            warps: Clocks::new(warps),
            lanes: (0..warps).map(|_| Clocks::new(WARP)).collect(),
            unwritten,
        }
    }

    /// The lanes of a warp synchronise.
    pub(super) fn lanes_converge(&mut self, warp: usize, mask: u32) {
        if self.cells.is_empty() {
            return;
        }
        let mut known = Vec::new();
        for pass in [true, false] {
            for lane in (0..WARP).filter(|lane| mask >> lane & 1 == 1) {
                if pass {
                    self.lanes[warp].arrive(lane, &mut known);
                } else {
                    self.lanes[warp].leave(lane, &known);
                }
            }
        }
    }

    /// Whether the access of a stamp came before a thread's present access.
    fn before(&self, stamp: Stamp, thread: usize) -> bool {
        let of = usize::from(stamp.thread).wrapping_sub(1);
        if stamp.thread == 0 || of == thread {
            return true;
        }
        let (warp, lane) = (thread / WARP, thread % WARP);
        self.warps.knows(warp, of / WARP, stamp.warp_clock)
            || (of / WARP == warp && self.lanes[warp].knows(lane, of % WARP, stamp.lane_clock))
    }

    /// Checks an access of a thread. `place` is the first byte, and there are `bytes` of them.
    pub(super) fn touch(
        &mut self,
        place: u64,
        bytes: u64,
        thread: usize,
        touch: AccessKind,
    ) -> Result<(), Stop> {
        let lane = (thread % WARP) as u32;
        let end = place.checked_add(bytes).filter(|end| *end <= self.bytes.len() as u64);
        let Some(range) = end.map(|end| place as usize..end as usize) else {
            return Err(Stop::new(
                Kind::OutOfBounds,
                lane,
                format!(
                    "{bytes} bytes at {place:#x} of shared memory, of which the block has {}",
                    self.bytes.len()
                ),
                "a dynamic size is given at the launch",
            ));
        };
        let reads = matches!(touch, AccessKind::Read | AccessKind::Atomic);
        if self.unwritten && reads && !self.written[range.clone()].iter().all(|written| *written) {
            return Err(Stop::new(
                Kind::Uninitialised,
                lane,
                format!("shared memory at {place:#x} is read and was never written"),
                "shared memory is not initialised",
            ));
        }
        if !matches!(touch, AccessKind::Read | AccessKind::CopyBegins) {
            self.written[range.clone()].fill(true);
        }
        if self.cells.is_empty() {
            return Ok(());
        }
        let stamp = Stamp {
            thread: thread as u16 + 1,
            atomic: touch == AccessKind::Atomic,
            warp_clock: self.warps.now(thread / WARP),
            lane_clock: self.lanes[thread / WARP].now(thread % WARP),
        };
        for at in range {
            self.touch_byte(at, thread, stamp, touch)?;
        }
        Ok(())
    }

    fn touch_byte(&mut self, at: usize, thread: usize, stamp: Stamp, touch: AccessKind) -> Result<(), Stop> {
        let cell = self.cells[at];
        let race = |other: u16, what: &str| {
            let does = if touch == AccessKind::Read { "reads" } else { "writes" };
            Stop::new(
                Kind::Race,
                (thread % WARP) as u32,
                format!(
                    "thread {thread} {does} shared memory at {at:#x}, which thread {} {what}, with no barrier in between",
                    other - 1
                ),
                "`bar.sync` orders the threads of a block, `bar.warp.sync` those of a warp; `cp.async` ends at a wait",
            )
        };
        if cell.copying != 0 && touch != AccessKind::CopyEnds {
            return Err(race(cell.copying, "is still copying to"));
        }
        let both_atomic = stamp.atomic && cell.writer.atomic;
        if !both_atomic && !self.before(cell.writer, thread) {
            return Err(race(cell.writer.thread, "wrote"));
        }
        if touch != AccessKind::Read {
            for reader in cell.readers {
                let both_atomic = stamp.atomic && reader.atomic;
                if !both_atomic && !self.before(reader, thread) {
                    return Err(race(reader.thread, "read"));
                }
            }
        }
        let cell = &mut self.cells[at];
        match touch {
            AccessKind::Read => {
                if cell.readers[0].thread != stamp.thread {
                    cell.readers[1] = cell.readers[0];
                }
                cell.readers[0] = stamp;
            }
            AccessKind::CopyBegins => cell.copying = stamp.thread,
            AccessKind::Write | AccessKind::Atomic | AccessKind::CopyEnds => {
                cell.writer = stamp;
                cell.copying = 0;
            }
        }
        Ok(())
    }

    /// Up to eight bytes that were checked.
    pub(super) fn load(&self, place: u64, bytes: u32) -> u64 {
        let place = place as usize;
        let mut value = [0; 8];
        value[..bytes as usize].copy_from_slice(&self.bytes[place..place + bytes as usize]);
        u64::from_le_bytes(value)
    }

    /// Up to eight bytes that were checked.
    pub(super) fn store(&mut self, place: u64, bytes: u32, value: u64) {
        let place = place as usize;
        self.bytes[place..place + bytes as usize].copy_from_slice(&value.to_le_bytes()[..bytes as usize]);
    }
}
