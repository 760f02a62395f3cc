//! A block: its warps take turns, and meet at barriers.

use super::error::{ExecutionError, Kind, Stop};
use super::launch::Launch;
use super::report::Report;
use super::shared::Shared;
use super::warp::{State, Warp, lanes};
use crate::code::{Action, Constant, Kernel, Special};
use crate::lanes::{Lanes, WARP};
use crate::memory::{Held, Memory};

/// A barrier of a block.
#[derive(Default)]
struct Barrier {
    /// Threads that have come since it last opened.
    arrived: u32,
    /// What they know of each other.
    known: Vec<u32>,
}

/// What the warps of a block share.
pub(super) struct Block<'k> {
    pub(super) kernel: &'k Kernel,
    pub(super) launch: &'k Launch,
    pub(super) memory: &'k Memory,
    pub(super) params: &'k [u8],
    pub(super) shared: Shared,
    /// How often each instruction was executed, by warps and by threads.
    pub(super) counts: Vec<(u64, u64)>,
    pub(super) report: Report,
    /// Steps that are left.
    pub(super) steps: u64,
    barriers: [Barrier; 16],
    at: [u32; 3],
}

impl<'k> Block<'k> {
    pub(super) fn new(
        kernel: &'k Kernel,
        launch: &'k Launch,
        memory: &'k Memory,
        params: &'k [u8],
        at: [u32; 3],
    ) -> Self {
        let warps = launch.block_threads().div_ceil(WARP as u32) as usize;
        let bytes = kernel.shared as usize + launch.dynamic_shared as usize;
        Self {
            kernel,
            launch,
            memory,
            params,
            shared: Shared::new(bytes, warps, launch.races, !launch.unwritten),
            counts: vec![(0, 0); kernel.code.len()],
            report: Report::default(),
            steps: launch.steps,
            barriers: Default::default(),
            at,
        }
    }

    /// Executes the block. `addresses` are those of the constants that are variables of the module.
    pub(super) fn run(mut self, addresses: &[u64]) -> Result<Report, Box<ExecutionError>> {
        let threads = self.launch.block_threads() as usize;
        let mut warps: Vec<_> =
            (0..threads.div_ceil(WARP)).map(|index| self.warp(index, threads, addresses)).collect();
        loop {
            let mut moved = false;
            for warp in &mut warps {
                moved |=
                    warp.run(&mut self).map_err(|(pc, stop)| Box::new(self.error(warp.index, pc, stop)))?;
            }
            moved |= self.open(&mut warps);
            if warps.iter().all(|warp| warp.alive == 0) {
                break;
            }
            if !moved {
                return Err(Box::new(self.stuck(&warps)));
            }
        }
        let mut report = self.report;
        report.add(self.kernel, &self.counts);
        Ok(report)
    }

    fn warp(&self, index: usize, threads: usize, addresses: &[u64]) -> Warp {
        let left = (threads - index * WARP).min(WARP);
        let mask = if left == WARP { u32::MAX } else { (1 << left) - 1 };
        let mut registers = vec![[0; WARP]; self.kernel.registers.max(1)];
        let mut written = vec![0; registers.len()];
        for ((reg, constant), address) in self.kernel.constants.iter().zip(addresses) {
            registers[*reg as usize] = match constant {
                Constant::Bits(bits) => [*bits; WARP],
                Constant::Address(_, offset) => [address.wrapping_add(*offset as u64); WARP],
                Constant::Special(special) => self.special(*special, index),
            };
            written[*reg as usize] = u32::MAX;
        }
        Warp::new(index, mask, registers, written, self.kernel.local as usize)
    }

    fn special(&self, special: Special, warp: usize) -> Lanes {
        let [x, y, z] = self.launch.block;
        let thread = |lane: usize| (warp * WARP + lane) as u32;
        let all = self.launch.block_threads().div_ceil(WARP as u32);
        std::array::from_fn(|lane| {
            let mask = 1u32 << lane;
            u64::from(match special {
                Special::ThreadX => thread(lane) % x,
                Special::ThreadY => thread(lane) / x % y,
                Special::ThreadZ => thread(lane) / x / y % z,
                Special::ThreadsX => x,
                Special::ThreadsY => y,
                Special::ThreadsZ => z,
                Special::BlockX => self.at[0],
                Special::BlockY => self.at[1],
                Special::BlockZ => self.at[2],
                Special::BlocksX => self.launch.grid[0],
                Special::BlocksY => self.launch.grid[1],
                Special::BlocksZ => self.launch.grid[2],
                Special::Lane => lane as u32,
                Special::Warp => warp as u32,
                Special::Warps => all,
                Special::MaskEqual => mask,
                Special::MaskLess => mask - 1,
                Special::MaskLessEqual => mask | (mask - 1),
                Special::MaskGreater => !(mask | (mask - 1)),
                Special::MaskGreaterEqual => !(mask - 1),
                Special::DynamicShared => self.launch.dynamic_shared,
                Special::TotalShared => self.launch.dynamic_shared + self.kernel.shared,
            })
        })
    }

    /// The buffer and the byte in it of a global address.
    pub(super) fn global(
        &self,
        address: u64,
        bytes: u64,
        writes: bool,
        lane: usize,
        last: &mut usize,
    ) -> Result<(&'k Held, u64), Stop> {
        let stop = |kind, message, hint| Err(Stop::new(kind, lane as u32, message, hint));
        match self.memory.find(address, bytes, last) {
            Ok((held, _)) if writes && held.read_only => {
                let message = format!("{bytes} bytes are written at {address:#x}, in `{}`", held.name);
                stop(Kind::ReadOnly, message, "constants and buffers that are read only stay what they are")
            }
            Ok(found) => Ok(found),
            Err(near) => {
                let place = near.map_or("in front of every buffer".to_string(), |held| {
                    let at = address - held.first;
                    format!("byte {at} of `{}`, which has {}", held.name, held.bytes)
                });
                let message = format!("{bytes} bytes at {address:#x}: {place}");
                stop(Kind::OutOfBounds, message, "check the index, and the size of the buffer")
            }
        }
    }

    /// Threads of a warp come to a barrier.
    pub(super) fn arrive(&mut self, warp: usize, id: usize, threads: u32) {
        let barrier = &mut self.barriers[id];
        barrier.arrived += threads;
        self.shared.warps.arrive(warp, &mut barrier.known);
    }

    /// Opens barriers that all have come to; whether there was one.
    fn open(&mut self, warps: &mut [Warp]) -> bool {
        let alive: u32 = warps.iter().map(|warp| warp.alive.count_ones()).sum();
        let mut opened = false;
        for id in 0..self.barriers.len() as u32 {
            let waits = |state: State| matches!(state, State::Barrier(of, _) if of == id);
            let mut waiting = warps.iter().flat_map(|warp| &warp.groups).filter(|group| waits(group.state));
            let Some(first) = waiting.next() else { continue };
            let State::Barrier(_, count) = first.state else { continue };
            let barrier = &mut self.barriers[id as usize];
            if barrier.arrived < count.unwrap_or(alive) {
                continue;
            }
            let Barrier { known, .. } = std::mem::take(barrier);
            for warp in &mut *warps {
                for group in warp.groups.iter_mut().filter(|group| waits(group.state)) {
                    group.state = State::Ready;
                    self.shared.warps.leave(warp.index, &known);
                }
            }
            opened = true;
        }
        opened
    }

    /// Nobody can go on: what they wait for.
    fn stuck(&self, warps: &[Warp]) -> ExecutionError {
        let groups = || warps.iter().flat_map(|warp| warp.groups.iter().map(move |group| (warp, group)));
        let found = groups().find(|(_, group)| group.state == State::Lanes).or_else(|| groups().next());
        let Some((warp, group)) = found else {
            let stop =
                Stop::new(Kind::Deadlock, 0, "no thread goes on", "look for a barrier that not all reach");
            return self.error(0, 0, stop);
        };
        if let State::Barrier(id, count) = group.state {
            let alive: u32 = warps.iter().map(|warp| warp.alive.count_ones()).sum();
            let (has, wants) = (self.barriers[id as usize].arrived, count.unwrap_or(alive));
            let message = format!("deadlock at barrier {id}: {has} threads have come, {wants} have to");
            let hint = "every thread of the barrier has to reach it: look for a branch around it";
            let stop = Stop::new(Kind::Deadlock, group.mask.trailing_zeros(), message, hint);
            return self.error(warp.index, group.pc.saturating_sub(1), stop);
        }
        let missing = warp.alive & !group.mask;
        let elsewhere = warp.groups.iter().find(|other| other.mask & missing != 0);
        let line = elsewhere.map_or(0, |other| self.source(other.pc).0);
        let names: Vec<_> = lanes(missing).take(4).map(|lane| lane.to_string()).collect();
        let names = names.join(", ");
        let message = format!("lanes {names} of the warp wait at line {line} and never come here");
        let barrier = matches!(self.kernel.code[group.pc as usize].action, Action::Barrier { .. });
        let kind = if barrier { Kind::DivergentBarrier } else { Kind::Deadlock };
        let hint = "all lanes that are named come to the same instruction";
        self.error(warp.index, group.pc, Stop::new(kind, group.mask.trailing_zeros(), message, hint))
    }

    fn source(&self, pc: u32) -> (u32, &str) {
        let code = self.kernel.code.get(pc as usize);
        let source = code.and_then(|code| self.kernel.sources.get(code.source as usize));
        source.map_or((0, ""), |(line, text)| (*line, text))
    }

    /// What stopped a lane, with its place.
    fn error(&self, warp: usize, pc: u32, stop: Stop) -> ExecutionError {
        let (line, text) = self.source(pc);
        let [x, y, _] = self.launch.block;
        let thread = (warp * WARP) as u32 + stop.lane;
        ExecutionError {
            kind: stop.kind,
            kernel: self.kernel.name.clone(),
            line,
            instruction: text.to_owned(),
            thread: [thread % x, thread / x % y, thread / x / y],
            block: self.at,
            message: stop.message,
            hint: stop.hint.into(),
        }
    }
}
