//! The warps of a block take turns, and meet at barriers.

use super::block::{Barrier, Block};
use super::error::{ExecutionError, Kind, Stop};
use super::report::Report;
use super::warp::{State, Warp, lanes};
use crate::code::{Action, Constant};
use crate::lanes::WARP;

/// Executes a block. `addresses` are those of the constants that are variables of the module.
pub(super) fn run(mut block: Block<'_>, addresses: &[u64]) -> Result<Report, Box<ExecutionError>> {
    let threads = block.launch.block_threads() as usize;
    let mut warps: Vec<_> =
        (0..threads.div_ceil(WARP)).map(|index| warp(&block, index, threads, addresses)).collect();
    loop {
        let mut moved = false;
        for warp in &mut warps {
            let ran = warp.run(&mut block);
            moved |= ran.map_err(|(pc, stop)| Box::new(block.error(warp.index, pc, stop)))?;
        }
        moved |= open(&mut block, &mut warps);
        if warps.iter().all(|warp| warp.alive == 0) {
            break;
        }
        if !moved {
            return Err(Box::new(stuck(&block, &warps)));
        }
    }
    let mut report = block.report;
    report.add(block.kernel, &block.counts);
    Ok(report)
}

fn warp(block: &Block<'_>, index: usize, threads: usize, addresses: &[u64]) -> Warp {
    let left = (threads - index * WARP).min(WARP);
    let mask = if left == WARP { u32::MAX } else { (1 << left) - 1 };
    let mut registers = vec![[0; WARP]; block.kernel.registers.max(1)];
    let mut written = vec![0; registers.len()];
    for ((reg, constant), address) in block.kernel.constants.iter().zip(addresses) {
        registers[*reg as usize] = match constant {
            Constant::Bits(bits) => [*bits; WARP],
            Constant::Address(_, offset) => [address.wrapping_add(*offset as u64); WARP],
            Constant::Special(special) => block.special(*special, index),
        };
        written[*reg as usize] = u32::MAX;
    }
    Warp::new(index, mask, registers, written, block.kernel.local as usize)
}

/// Opens barriers that all have come to; whether there was one.
fn open(block: &mut Block<'_>, warps: &mut [Warp]) -> bool {
    let alive: u32 = warps.iter().map(|warp| warp.alive.count_ones()).sum();
    let mut opened = false;
    for id in 0..block.barriers.len() as u32 {
        let waits = |state: State| matches!(state, State::Barrier(of, _) if of == id);
        let mut waiting = warps.iter().flat_map(|warp| &warp.groups).filter(|group| waits(group.state));
        let Some(first) = waiting.next() else { continue };
        let State::Barrier(_, count) = first.state else { continue };
        let barrier = &mut block.barriers[id as usize];
        if barrier.arrived < count.unwrap_or(alive) {
            continue;
        }
        let Barrier { known, .. } = std::mem::take(barrier);
        for warp in &mut *warps {
            for group in warp.groups.iter_mut().filter(|group| waits(group.state)) {
                group.state = State::Ready;
                block.shared.warps.leave(warp.index, &known);
            }
        }
        opened = true;
    }
    opened
}

/// Error if no thread can continue: what they wait for.
fn stuck(block: &Block<'_>, warps: &[Warp]) -> ExecutionError {
    let groups = || warps.iter().flat_map(|warp| warp.groups.iter().map(move |group| (warp, group)));
    let found = groups().find(|(_, group)| group.state == State::Lanes).or_else(|| groups().next());
    let Some((warp, group)) = found else {
        let stop =
            Stop::new(Kind::Deadlock, 0, "no thread can continue", "look for a barrier that not all reach");
        return block.error(0, 0, stop);
    };
    let lane = group.mask.trailing_zeros();
    if let State::Barrier(id, count) = group.state {
        let alive: u32 = warps.iter().map(|warp| warp.alive.count_ones()).sum();
        let (has, needed) = (block.barriers[id as usize].arrived, count.unwrap_or(alive));
        let message = format!("deadlock at barrier {id}: {has} threads have arrived, {needed} must");
        let hint = "every thread of the barrier must reach it: look for a branch around it";
        let stop = Stop::new(Kind::Deadlock, lane, message, hint);
        return block.error(warp.index, group.pc.saturating_sub(1), stop);
    }
    let missing = warp.alive & !group.mask;
    let elsewhere = warp.groups.iter().find(|other| other.mask & missing != 0);
    let line = elsewhere.map_or(0, |other| block.source(other.pc).0);
    let names: Vec<_> = lanes(missing).take(4).map(|lane| lane.to_string()).collect();
    let message = format!("lanes {} of the warp wait at line {line} and never arrive here", names.join(", "));
    let barrier = matches!(block.kernel.code[group.pc as usize].action, Action::Barrier { .. });
    let kind = if barrier { Kind::DivergentBarrier } else { Kind::Deadlock };
    let hint = "all named lanes must reach the same instruction";
    block.error(warp.index, group.pc, Stop::new(kind, lane, message, hint))
}
