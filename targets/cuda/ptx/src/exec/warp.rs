//! A warp: registers of 32 lanes, and groups of lanes at the same instruction.

use super::block::Block;
use super::error::{Kind, Stop};
use crate::code::{Action, Code, Kernel, Reg};
use crate::lanes::{Lanes, WARP};

/// Steps of a warp before others have their turn.
const QUANTUM: u32 = 4096;
/// Steps per round of a warp with diverged lanes. The last [`OTHERS`] of them go to groups other than the
/// first in program order.
const ROUND: u32 = 8192;
const OTHERS: u32 = 128;

/// State of a group of lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing.
    Ready,
    /// Other lanes that have to come to the same instruction.
    Lanes,
    /// Waiting for other threads of the block at a barrier; with the number of threads, if the barrier has
    /// one.
    Barrier(u32, Option<u32>),
}

/// Lanes at the same instruction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) pc: u32,
    pub(super) mask: u32,
    pub(super) state: State,
}

/// A pending copy to shared memory.
pub(super) struct Copy {
    pub(super) lane: u32,
    pub(super) group: u32,
    pub(super) place: u64,
    pub(super) bytes: u32,
    pub(super) values: [u64; 2],
}

/// A warp.
pub(super) struct Warp {
    pub(super) index: usize,
    pub(super) registers: Vec<Lanes>,
    /// The lanes in which each register was written.
    pub(super) written: Vec<u32>,
    pub(super) groups: Vec<Group>,
    /// Lanes that have not ended.
    pub(super) alive: u32,
    /// Memory of the lanes' own, one after the other.
    pub(super) local: Vec<u8>,
    pub(super) copies: Vec<Copy>,
    /// Groups of copies that each lane has closed.
    pub(super) closed: [u32; WARP],
    turn: u32,
    results: [Lanes; 8],
}

/// Next step after an instruction.
pub(super) enum Next {
    /// The next one.
    On,
    /// The group waits, before the same instruction.
    Wait,
    /// The group has jumped.
    Gone,
}

/// The lanes of a mask.
pub(super) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..WARP).filter(move |lane| mask >> lane & 1 == 1)
}

impl Warp {
    pub(super) fn new(
        index: usize,
        mask: u32,
        registers: Vec<Lanes>,
        written: Vec<u32>,
        local: usize,
    ) -> Self {
        Self {
            index,
            registers,
            written,
            groups: vec![Group { pc: 0, mask, state: State::Ready }],
            alive: mask,
            local: vec![0; local * WARP],
            copies: Vec::new(),
            closed: [0; WARP],
            turn: 0,
            results: [[0; WARP]; 8],
        }
    }

    /// The group that runs next: the first in program order, and sometimes another, so that none starves.
    fn pick(&mut self) -> Option<usize> {
        if let [group] = &self.groups[..] {
            return (group.state == State::Ready).then_some(0);
        }
        let mut ready: Vec<usize> =
            (0..self.groups.len()).filter(|i| self.groups[*i].state == State::Ready).collect();
        ready.sort_by_key(|i| self.groups[*i].pc);
        self.turn = self.turn.wrapping_add(1);
        let others = self.turn % ROUND >= ROUND - OTHERS;
        let at = if others { (self.turn / ROUND) as usize + 1 } else { 0 };
        ready.get(at % ready.len().max(1)).copied()
    }

    /// Groups at the same instruction are merged.
    fn join(&mut self, mut at: usize) -> usize {
        let mut i = 0;
        while i < self.groups.len() {
            let (other, group) = (self.groups[i], self.groups[at]);
            let meet = i != at && other.pc == group.pc && !matches!(other.state, State::Barrier(..));
            if !meet {
                i += 1;
                continue;
            }
            self.groups[at].mask |= other.mask;
            self.groups.swap_remove(i);
            if at == self.groups.len() {
                at = i;
            }
        }
        at
    }

    /// Executes until every group waits or has ended, or others shall have their turn. The error comes with
    /// its instruction.
    pub(super) fn run(&mut self, block: &mut Block<'_>) -> Result<bool, (u32, Stop)> {
        let mut moved = false;
        for _ in 0..QUANTUM {
            let Some(at) = self.pick() else { return Ok(moved) };
            let at = if self.groups.len() > 1 { self.join(at) } else { at };
            let Group { pc, mask, .. } = self.groups[at];
            let kernel = block.kernel;
            let code = &kernel.code[pc as usize];
            let next = self.step(block, at, code, mask).map_err(|stop| (pc, stop))?;
            match next {
                Next::On => {
                    self.groups[at].pc += 1;
                    moved = true;
                }
                Next::Wait => {}
                Next::Gone => moved = true,
            }
            if block.steps == 0 {
                let limit = block.launch.steps;
                let stop = Stop::new(
                    Kind::StepLimit,
                    mask.trailing_zeros(),
                    format!("the block has executed {limit} steps of warps"),
                    "raise `Launch::steps`, or look for a loop that does not end",
                );
                return Err((pc, stop));
            }
            block.steps -= 1;
        }
        Ok(moved)
    }

    /// The lanes of a mask in which a predicate has a value.
    fn guarded(
        &self,
        kernel: &Kernel,
        mask: u32,
        guard: Option<(Reg, bool)>,
        look: bool,
    ) -> Result<u32, Stop> {
        let Some((reg, value)) = guard else { return Ok(mask) };
        if look {
            self.check(kernel, &[reg], mask)?;
        }
        let lanes = &self.registers[reg as usize];
        let set = lanes.iter().enumerate().fold(0u32, |set, (i, lane)| set | (*lane as u32) << i);
        Ok(mask & if value { set } else { !set })
    }

    /// Registers were written in all lanes of a mask.
    fn check(&self, kernel: &Kernel, registers: &[Reg], mask: u32) -> Result<(), Stop> {
        for reg in registers {
            let missing = mask & !self.written[*reg as usize];
            if missing != 0 {
                return Err(Stop::new(
                    Kind::Uninitialised,
                    missing.trailing_zeros(),
                    format!("`{}` is read and was never written", kernel.register_name(*reg)),
                    "every path to here must write it; `Launch::unwritten` allows it",
                ));
            }
        }
        Ok(())
    }

    fn step(&mut self, block: &mut Block<'_>, at: usize, code: &Code, mask: u32) -> Result<Next, Stop> {
        let unwritten = !block.launch.unwritten;
        let active = self.guarded(block.kernel, mask, code.guard, unwritten)?;
        let count = &mut block.counts[self.groups[at].pc as usize];
        count.0 += 1;
        count.1 += u64::from(active.count_ones());
        if active == 0 {
            return Ok(Next::On);
        }
        if unwritten {
            self.check(block.kernel, &code.ins, active)?;
        }
        match &code.action {
            Action::Map(map) => {
                let mut ins = [&self.registers[0]; 8];
                for (place, reg) in ins.iter_mut().zip(&code.ins) {
                    *place = &self.registers[*reg as usize];
                }
                map(&ins[..code.ins.len().min(8)], &mut self.results[..code.outs.len().min(8)]);
                for (i, reg) in code.outs.iter().enumerate().take(8) {
                    put(&mut self.registers[*reg as usize], &self.results[i], active);
                    self.written[*reg as usize] |= active;
                }
                Ok(Next::On)
            }
            Action::Branch(target) => Ok(self.branch(at, active, |_, _| *target)),
            Action::BranchTable(targets) => {
                let chosen = self.registers[code.ins[0] as usize];
                for lane in lanes(active) {
                    if chosen[lane] >= targets.len() as u64 {
                        return Err(Stop::new(
                            Kind::Operand,
                            lane as u32,
                            format!("target {} of {}", chosen[lane], targets.len()),
                            "`brx.idx` counts its targets from 0",
                        ));
                    }
                }
                Ok(self.branch(at, active, |_, lane| targets[chosen[lane] as usize]))
            }
            Action::Exit => Ok(self.exit(at, active)),
            Action::Trap => {
                Err(Stop::new(Kind::Trap, active.trailing_zeros(), "`trap`", "the kernel gave up"))
            }
            Action::Nothing => Ok(Next::On),
            _ => self.collective_or_memory(block, at, code, mask, active),
        }
    }

    /// Writes results into registers, in some lanes.
    pub(super) fn give(&mut self, reg: Reg, values: &Lanes, active: u32) {
        put(&mut self.registers[reg as usize], values, active);
        self.written[reg as usize] |= active;
    }

    /// Lanes go where they are sent, the others on.
    fn branch(&mut self, at: usize, active: u32, target: impl Fn(&Self, usize) -> u32) -> Next {
        let Group { pc, mask, .. } = self.groups[at];
        let mut places: Vec<(u32, u32)> = Vec::new();
        let mut send = |to: u32, lanes: u32| match places.iter_mut().find(|(pc, _)| *pc == to) {
            Some((_, of)) => *of |= lanes,
            None => places.push((to, lanes)),
        };
        if mask & !active != 0 {
            send(pc + 1, mask & !active);
        }
        for lane in lanes(active) {
            send(target(self, lane), 1 << lane);
        }
        let mut places = places.into_iter();
        if let Some((pc, mask)) = places.next() {
            self.groups[at] = Group { pc, mask, state: State::Ready };
        }
        self.groups.extend(places.map(|(pc, mask)| Group { pc, mask, state: State::Ready }));
        Next::Gone
    }

    /// Ends lanes. Groups that waited for them check again.
    fn exit(&mut self, at: usize, active: u32) -> Next {
        self.alive &= !active;
        self.copies.retain(|copy| active >> copy.lane & 1 == 0);
        self.retry_lanes();
        let rest = self.groups[at].mask & !active;
        if rest == 0 {
            self.groups.swap_remove(at);
        } else {
            self.groups[at].mask = rest;
            self.groups[at].pc += 1;
        }
        Next::Gone
    }

    /// Groups that wait for lanes look again.
    fn retry_lanes(&mut self) {
        for group in &mut self.groups {
            if group.state == State::Lanes {
                group.state = State::Ready;
            }
        }
    }

    /// A group waits for lanes that are not at its instruction yet.
    pub(super) fn wait_for_lanes(&mut self, at: usize) -> Next {
        self.groups[at].state = State::Lanes;
        Next::Wait
    }
}

/// Values into some lanes of a register.
fn put(register: &mut Lanes, values: &Lanes, active: u32) {
    if active == u32::MAX {
        *register = *values;
        return;
    }
    for i in 0..WARP {
        if active >> i & 1 == 1 {
            register[i] = values[i];
        }
    }
}
