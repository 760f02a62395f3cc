//! State that the warps of a block share.

use super::error::{ExecutionError, Kind, Stop};
use super::report::Report;
use super::settings::Launch;
use super::shared::Shared;
use crate::code::{Kernel, Special};
use crate::lanes::{Lanes, WARP};
use crate::memory::{BufferBytes, Memory};

/// A barrier of a block.
#[derive(Default)]
pub(super) struct Barrier {
    /// Threads that have come since it last opened.
    pub(super) arrived: u32,
    /// Clocks that they know of each other.
    pub(super) known: Vec<u32>,
}

/// State that the warps of a block share.
pub(super) struct Block<'k> {
    pub(super) kernel: &'k Kernel,
    pub(super) launch: &'k Launch,
    pub(super) memory: &'k Memory,
    pub(super) params: &'k [u8],
    pub(super) shared: Shared,
    /// Number of times that each instruction was executed, by warps and by threads.
    pub(super) counts: Vec<(u64, u64)>,
    pub(super) report: Report,
    /// Steps that are left.
    pub(super) steps: u64,
    pub(super) barriers: [Barrier; 16],
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

    pub(super) fn special(&self, special: Special, warp: usize) -> Lanes {
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
                Special::PoolThread => lane as u32,
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
    ) -> Result<(&'k BufferBytes, u64), Stop> {
        let stop = |kind, message, hint| Err(Stop::new(kind, lane as u32, message, hint));
        match self.memory.find(address, bytes, last) {
            Ok((held, _)) if writes && held.read_only => {
                let message = format!("{bytes} bytes are written at {address:#x}, in `{}`", held.name);
                stop(Kind::ReadOnly, message, "constants and read-only buffers must not change")
            }
            Ok(found) => Ok(found),
            Err(near) => {
                let place = near.map_or("before every buffer".to_string(), |held| {
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

    pub(super) fn source(&self, pc: u32) -> (u32, &str) {
        let code = self.kernel.code.get(pc as usize);
        let source = code.and_then(|code| self.kernel.sources.get(code.source as usize));
        source.map_or((0, ""), |(line, text)| (*line, text))
    }

    /// Error that stopped a lane, with its place.
    pub(super) fn error(&self, warp: usize, pc: u32, stop: Stop) -> ExecutionError {
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
