//! Accesses of memory by a warp.

use super::block::Block;
use super::error::{Kind, Stop};
use super::shared::AccessKind;
use super::warp::{Copy, Warp, lanes};
use crate::code::{Access, Code, LOCAL_WINDOW, SHARED_WINDOW, Update, WINDOW};
use crate::lanes::{WARP, mask, signed};
use crate::types::Space;

/// A space and an address in it.
fn placed(access: &Access, register: u64) -> (Space, u64) {
    let address = register.wrapping_add(access.offset as u64);
    match access.space {
        Some(space) => (space, address),
        None if (SHARED_WINDOW..SHARED_WINDOW + WINDOW).contains(&address) => {
            (Space::Shared, address - SHARED_WINDOW)
        }
        None if (LOCAL_WINDOW..LOCAL_WINDOW + WINDOW).contains(&address) => {
            (Space::Local, address - LOCAL_WINDOW)
        }
        None => (Space::Global, address),
    }
}

/// Checks that an address is a multiple of the access's size.
pub(super) fn aligned(address: u64, bytes: u64, lane: usize) -> Result<(), Stop> {
    if address.is_multiple_of(bytes) {
        return Ok(());
    }
    Err(Stop::new(
        Kind::Misaligned,
        lane as u32,
        format!("{bytes} bytes at {address:#x}, which is not a multiple of {bytes}"),
        "an address must be a multiple of the bytes of the access",
    ))
}

/// Direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Load,
    Store,
    Change,
}

impl Warp {
    /// `outs` from memory.
    pub(super) fn load(
        &mut self,
        block: &mut Block<'_>,
        code: &Code,
        access: &Access,
        sign: Option<(u32, u32)>,
        active: u32,
    ) -> Result<(), Stop> {
        let mut found = [[0; WARP]; 8];
        self.each(block, code, access, Direction::Load, active, |_, place, lane| {
            for (i, of) in found.iter_mut().enumerate().take(access.count as usize) {
                of[lane] = place.load(i as u64 * u64::from(access.bytes), access.bytes);
            }
            Ok(())
        })?;
        for (of, reg) in found.iter_mut().zip(&code.outs) {
            if let Some((from, to)) = sign {
                for value in of.iter_mut() {
                    *value = signed(*value, from) as u64 & mask(to);
                }
            }
            self.give(*reg, of, active);
        }
        Ok(())
    }

    /// `ins[1..]` to memory.
    pub(super) fn store(
        &mut self,
        block: &mut Block<'_>,
        code: &Code,
        access: &Access,
        active: u32,
    ) -> Result<(), Stop> {
        self.each(block, code, access, Direction::Store, active, |registers, mut place, lane| {
            for (i, reg) in code.ins[1..].iter().enumerate() {
                let value = registers[*reg as usize][lane] & mask(8 * access.bytes);
                place.store(i as u64 * u64::from(access.bytes), access.bytes, value);
            }
            Ok(())
        })
    }

    /// A word of memory is changed, lane by lane.
    pub(super) fn atomic(
        &mut self,
        block: &mut Block<'_>,
        code: &Code,
        access: &Access,
        update: &Update,
        active: u32,
    ) -> Result<(), Stop> {
        let mut before = [0; WARP];
        let bits = mask(8 * access.bytes);
        self.each(block, code, access, Direction::Change, active, |registers, mut place, lane| {
            let operand = |i: usize| code.ins.get(i).map_or(0, |reg| registers[*reg as usize][lane]);
            let (b, c) = (operand(1), operand(2));
            before[lane] = place.change(access.bytes, |old| update(old, b, c) & bits);
            Ok(())
        })?;
        if let Some(reg) = code.outs.first() {
            self.give(*reg, &before, active);
        }
        Ok(())
    }

    /// Checks every lane's access, counts it, and does something at its place.
    fn each(
        &mut self,
        block: &mut Block<'_>,
        code: &Code,
        access: &Access,
        direction: Direction,
        active: u32,
        mut with: impl FnMut(&[[u64; WARP]], CheckedMemory<'_>, usize) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let bytes = u64::from(access.bytes * access.count);
        let base = code.ins[0] as usize;
        let mut global = [0; WARP];
        let mut globals = 0;
        let mut last = 0;
        for lane in lanes(active) {
            let (space, address) = placed(access, self.registers[base][lane]);
            aligned(address, bytes, lane)?;
            let place = match space {
                Space::Global | Space::Const => {
                    let (held, at) =
                        block.global(address, bytes, direction != Direction::Load, lane, &mut last)?;
                    if space == Space::Global {
                        global[globals] = address;
                        globals += 1;
                    }
                    CheckedMemory::Global(block.memory, held, at)
                }
                Space::Shared => {
                    let touch = match direction {
                        Direction::Load => AccessKind::Read,
                        Direction::Store => AccessKind::Write,
                        Direction::Change => AccessKind::Atomic,
                    };
                    block.shared.touch(address, bytes, self.index * WARP + lane, touch)?;
                    CheckedMemory::Shared(&mut block.shared, address)
                }
                Space::Local => {
                    let own = self.local.len() / WARP;
                    within(address, bytes, own, "local memory", lane)?;
                    CheckedMemory::Bytes(&mut self.local, lane * own + address as usize)
                }
                Space::Param => {
                    within(address, bytes, block.params.len(), "the parameters", lane)?;
                    CheckedMemory::Params(block.params, address as usize)
                }
            };
            with(&self.registers, place, lane)?;
        }
        let traffic = match direction {
            Direction::Load => &mut block.report.loads,
            Direction::Store => &mut block.report.stores,
            Direction::Change => &mut block.report.atomics,
        };
        if globals > 0 {
            traffic.count(&mut global[..globals], bytes);
        }
        Ok(())
    }

    /// `cp.async`: the data that is read now arrives at a later wait.
    pub(super) fn copy(
        &mut self,
        block: &mut Block<'_>,
        code: &Code,
        (to, from, bytes): (i64, i64, u32),
        active: u32,
    ) -> Result<(), Stop> {
        let mut last = 0;
        let mut global = [0; WARP];
        let mut count = 0;
        for lane in lanes(active) {
            let place = self.registers[code.ins[0] as usize][lane].wrapping_add(to as u64);
            let address = self.registers[code.ins[1] as usize][lane].wrapping_add(from as u64);
            let read = code.ins.get(2).map_or(u64::from(bytes), |reg| self.registers[*reg as usize][lane]);
            if read > u64::from(bytes) {
                let hint = "bytes that are read are at most those that are copied";
                return Err(Stop::new(Kind::Operand, lane as u32, format!("{read} bytes of {bytes}"), hint));
            }
            aligned(place, u64::from(bytes), lane)?;
            aligned(address, u64::from(bytes), lane)?;
            block.shared.touch(place, u64::from(bytes), self.index * WARP + lane, AccessKind::CopyBegins)?;
            let mut values = [0; 2];
            if read > 0 {
                let (held, at) = block.global(address, read, false, lane, &mut last)?;
                for byte in 0..read {
                    values[byte as usize / 8] |= held.load(at + byte, 1) << (8 * (byte % 8));
                }
                global[count] = address;
                count += 1;
            }
            self.copies.push(Copy { lane: lane as u32, group: self.closed[lane], place, bytes, values });
        }
        if count > 0 {
            block.report.loads.count(&mut global[..count], u64::from(bytes));
        }
        Ok(())
    }

    /// Copies of lanes arrive, but for those of the last groups.
    pub(super) fn copies_arrive(
        &mut self,
        block: &mut Block<'_>,
        pending: Option<u32>,
        active: u32,
    ) -> Result<(), Stop> {
        let mut left = Vec::new();
        for copy in std::mem::take(&mut self.copies) {
            let lane = copy.lane as usize;
            let arrives = pending.is_none_or(|n| copy.group + n < self.closed[lane]);
            if active >> lane & 1 == 0 || !arrives {
                left.push(copy);
                continue;
            }
            let thread = self.index * WARP + lane;
            block.shared.touch(copy.place, u64::from(copy.bytes), thread, AccessKind::CopyEnds)?;
            for i in 0..copy.bytes.div_ceil(8) {
                let place = copy.place + u64::from(8 * i);
                block.shared.store(place, copy.bytes.min(8), copy.values[i as usize]);
            }
        }
        self.copies = left;
        Ok(())
    }
}

/// Checks that bytes are inside a range of this many.
fn within(address: u64, bytes: u64, all: usize, what: &str, lane: usize) -> Result<(), Stop> {
    if address.checked_add(bytes).is_some_and(|end| end <= all as u64) {
        return Ok(());
    }
    Err(Stop::new(
        Kind::OutOfBounds,
        lane as u32,
        format!("{bytes} bytes at {address:#x} of {what}, which has {all}"),
        "check the index",
    ))
}

/// Memory that was checked.
enum CheckedMemory<'a> {
    Global(&'a crate::memory::Memory, &'a crate::memory::BufferBytes, u64),
    Shared(&'a mut super::shared::Shared, u64),
    Bytes(&'a mut [u8], usize),
    Params(&'a [u8], usize),
}

impl CheckedMemory<'_> {
    fn load(&self, offset: u64, bytes: u32) -> u64 {
        match self {
            Self::Global(_, held, at) => held.load(at + offset, bytes),
            Self::Shared(shared, at) => shared.load(at + offset, bytes),
            Self::Bytes(all, at) => from_bytes(all, at + offset as usize, bytes),
            Self::Params(all, at) => from_bytes(all, at + offset as usize, bytes),
        }
    }

    fn store(&mut self, offset: u64, bytes: u32, value: u64) {
        match self {
            Self::Global(_, held, at) => held.store(*at + offset, bytes, value),
            Self::Shared(shared, at) => shared.store(*at + offset, bytes, value),
            Self::Bytes(all, at) => {
                let at = *at + offset as usize;
                all[at..at + bytes as usize].copy_from_slice(&value.to_le_bytes()[..bytes as usize]);
            }
            // The verifier refuses stores to parameters.
            Self::Params(..) => {}
        }
    }

    fn change(&mut self, bytes: u32, f: impl Fn(u64) -> u64) -> u64 {
        if let Self::Global(memory, held, at) = self {
            return memory.change(held, *at, bytes, f);
        }
        let old = self.load(0, bytes);
        self.store(0, bytes, f(old));
        old
    }
}

fn from_bytes(all: &[u8], at: usize, bytes: u32) -> u64 {
    let mut value = [0; 8];
    value[..bytes as usize].copy_from_slice(&all[at..at + bytes as usize]);
    u64::from_le_bytes(value)
}
