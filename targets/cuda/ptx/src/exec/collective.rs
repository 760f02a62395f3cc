//! Operations of lanes together: shuffles, votes, reductions, matrices and barriers.

use super::block::Block;
use super::error::{Kind, Stop};
use super::matrix;
use super::shared::AccessKind;
use super::warp::{Next, State, Warp, lanes};
use crate::code::{Action, Code, Shuffle, Vote};
use crate::lanes::{Lanes, WARP};

impl Warp {
    /// Executes instructions that are not functions of a single lane's registers.
    pub(super) fn collective_or_memory(
        &mut self,
        block: &mut Block<'_>,
        at: usize,
        code: &Code,
        mask: u32,
        active: u32,
    ) -> Result<Next, Stop> {
        match &code.action {
            Action::Load(access, sign) => self.load(block, code, access, *sign, active)?,
            Action::Store(access) => self.store(block, code, access, active)?,
            Action::Atomic(access, update) => self.atomic(block, code, access, update, active)?,
            Action::Copy { to, from, bytes } => self.copy(block, code, (*to, *from, *bytes), active)?,
            Action::CopyCommit => lanes(active).for_each(|lane| self.closed[lane] += 1),
            Action::CopyWait(pending) => self.copies_arrive(block, *pending, active)?,
            Action::ActiveMask => self.give(code.outs[0], &[u64::from(active); WARP], active),
            Action::Shuffle(mode) => {
                let Some(groups) = self.converge(code.ins[3], mask, active)? else {
                    return Ok(self.wait_for_lanes(at));
                };
                for of in groups {
                    self.shuffle(code, *mode, of)?;
                }
            }
            Action::Vote { vote, negated } => {
                let Some(groups) = self.converge(code.ins[1], mask, active)? else {
                    return Ok(self.wait_for_lanes(at));
                };
                for of in groups {
                    self.vote(code, *vote, *negated, of);
                }
            }
            Action::Reduce(reduction) => {
                let Some(groups) = self.converge(code.ins[1], mask, active)? else {
                    return Ok(self.wait_for_lanes(at));
                };
                for of in groups {
                    let values = self.registers[code.ins[0] as usize];
                    let found = lanes(of).map(|lane| values[lane]).reduce(reduction).unwrap_or(0);
                    self.give(code.outs[0], &[found; WARP], of);
                }
            }
            Action::WarpBarrier => {
                let Some(groups) = self.converge(code.ins[0], mask, active)? else {
                    return Ok(self.wait_for_lanes(at));
                };
                for of in groups {
                    block.shared.lanes_converge(self.index, of);
                }
            }
            Action::Matrix(of) => {
                if !self.whole(mask, active)? {
                    return Ok(self.wait_for_lanes(at));
                }
                let (ins, outs) = (&code.ins, &code.outs);
                let found = matrix::product(*of, &|i| &self.registers[ins[i] as usize]);
                for (reg, values) in outs.iter().zip(&found) {
                    self.give(*reg, values, active);
                }
            }
            Action::LoadMatrix { offset, count, transposed } => {
                if !self.whole(mask, active)? {
                    return Ok(self.wait_for_lanes(at));
                }
                self.load_matrices(block, code, *offset, *count as usize, *transposed)?;
            }
            Action::Barrier { aligned, arrive } => {
                if *aligned && active != self.alive {
                    if mask != active {
                        return Err(Self::partial(mask & !active));
                    }
                    return Ok(self.wait_for_lanes(at));
                }
                return self.barrier(block, at, code, active, *arrive);
            }
            _ => {}
        }
        Ok(Next::On)
    }

    /// Lanes at this instruction that do not participate because their predicate is false.
    fn partial(of: u32) -> Stop {
        Stop::new(
            Kind::DivergentBarrier,
            of.trailing_zeros(),
            "lanes whose predicate is false do not participate".to_string(),
            "all lanes of a warp must reach the same barrier: remove its predicate",
        )
    }

    /// Whether all live lanes of the mask are here. Ended lanes in the mask are an error.
    fn whole(&self, mask: u32, active: u32) -> Result<bool, Stop> {
        let missing = !self.alive | mask & !active;
        if missing != 0 {
            return Err(Stop::new(
                Kind::InactiveLane,
                active.trailing_zeros(),
                format!("lane {} does not participate", missing.trailing_zeros()),
                "all 32 lanes of the warp execute it together",
            ));
        }
        Ok(active == u32::MAX)
    }

    /// Lanes of an instruction with a mask, by their masks; none where some are still to come.
    fn converge(&self, register: u32, mask: u32, active: u32) -> Result<Option<Vec<u32>>, Stop> {
        let masks = &self.registers[register as usize];
        let mut groups = Vec::new();
        let mut left = active;
        while left != 0 {
            let lane = left.trailing_zeros();
            let of = masks[lane as usize] as u32;
            let wrong = |message: String| {
                let hint =
                    "the mask must name the lanes that execute the instruction together, the same in each";
                Err(Stop::new(Kind::InactiveLane, lane, message, hint))
            };
            if of >> lane & 1 == 0 {
                return wrong(format!("the mask {of:#010x} has no lane {lane}"));
            }
            let expected = of & self.alive;
            if expected & mask & !active != 0 {
                let other = (expected & mask & !active).trailing_zeros();
                return wrong(format!("lane {other} of the mask {of:#010x} does not participate"));
            }
            if expected & !active != 0 {
                return Ok(None);
            }
            if let Some(other) = lanes(expected).find(|other| masks[*other] as u32 != of) {
                return wrong(format!(
                    "lane {other} has the mask {:#010x}, lane {lane} {of:#010x}",
                    masks[other]
                ));
            }
            groups.push(expected);
            left &= !expected;
        }
        Ok(Some(groups))
    }

    /// PTX ISA, section 9.7.9.6.
    fn shuffle(&mut self, code: &Code, mode: Shuffle, of: u32) -> Result<(), Stop> {
        let [values, choice, clamps] = [0, 1, 2].map(|i| self.registers[code.ins[i] as usize]);
        let (mut found, mut valid): (Lanes, Lanes) = ([0; WARP], [0; WARP]);
        for lane in lanes(of) {
            let own = lane as u32;
            let (by, clamp) = (choice[lane] as u32 & 31, clamps[lane] as u32);
            let (segment, clamp) = (clamp >> 8 & 31, clamp & 31);
            let (most, least) = ((own & segment) | (clamp & !segment), own & segment);
            let (from, inside) = match mode {
                Shuffle::Up => (own.wrapping_sub(by), own as i32 - by as i32 >= most as i32),
                Shuffle::Down => (own + by, own + by <= most),
                Shuffle::Butterfly => (own ^ by, own ^ by <= most),
                Shuffle::Index => ((by & !segment) | least, (by & !segment) | least <= most),
            };
            let from = if inside { from } else { own };
            if of >> from & 1 == 0 {
                return Err(Stop::new(
                    Kind::InactiveLane,
                    own,
                    format!("it reads lane {from}, which does not participate"),
                    "lanes that are read must execute the shuffle, too",
                ));
            }
            found[lane] = values[from as usize];
            valid[lane] = u64::from(inside);
        }
        self.give(code.outs[0], &found, of);
        if let Some(reg) = code.outs.get(1) {
            self.give(*reg, &valid, of);
        }
        Ok(())
    }

    fn vote(&mut self, code: &Code, vote: Vote, negated: bool, of: u32) {
        let values = self.registers[code.ins[0] as usize];
        let yes =
            lanes(of).filter(|lane| (values[*lane] == 1) != negated).fold(0u32, |yes, lane| yes | 1 << lane);
        let found = match vote {
            Vote::Ballot => yes,
            Vote::All => u32::from(yes == of),
            Vote::Any => u32::from(yes != 0),
            Vote::Uniform => u32::from(yes == of || yes == 0),
        };
        self.give(code.outs[0], &[u64::from(found); WARP], of);
    }

    /// PTX ISA, section 9.7.14.5.15: eight lanes give the rows of each matrix.
    fn load_matrices(
        &mut self,
        block: &mut Block<'_>,
        code: &Code,
        offset: i64,
        count: usize,
        transposed: bool,
    ) -> Result<(), Stop> {
        let rows = self.registers[code.ins[0] as usize].map(|row| row.wrapping_add(offset as u64));
        for (lane, row) in rows.iter().enumerate().take(8 * count) {
            super::access::aligned(*row, 16, lane)?;
            block.shared.touch(*row, 16, self.index * WARP + lane, AccessKind::Read)?;
        }
        for (i, reg) in code.outs.iter().enumerate() {
            let found = std::array::from_fn(|lane| {
                (0..2).fold(0, |word, half| {
                    let (row, column) = (lane / 4, 2 * (lane % 4) + half);
                    let (row, column) = if transposed { (column, row) } else { (row, column) };
                    word | block.shared.load(rows[8 * i + row] + 2 * column as u64, 2) << (16 * half)
                })
            });
            self.give(*reg, &found, u32::MAX);
        }
        Ok(())
    }

    /// A barrier of the block.
    fn barrier(
        &mut self,
        block: &mut Block<'_>,
        at: usize,
        code: &Code,
        active: u32,
        arrive: bool,
    ) -> Result<Next, Stop> {
        let lane = active.trailing_zeros();
        let operand = |i: usize| -> Result<Option<u32>, Stop> {
            let Some(reg) = code.ins.get(i) else { return Ok(None) };
            let values = &self.registers[*reg as usize];
            if lanes(active).any(|of| values[of] != values[lane as usize]) {
                let hint = "lanes that arrive together must name the same barrier";
                return Err(Stop::new(Kind::Operand, lane, "lanes name several barriers", hint));
            }
            Ok(Some(values[lane as usize] as u32))
        };
        let (id, count) = (operand(0)?.unwrap_or(0), operand(1)?);
        if id > 15 {
            return Err(Stop::new(
                Kind::Operand,
                lane,
                format!("barrier {id}"),
                "a block has 16 barriers, 0 to 15",
            ));
        }
        if count.is_some_and(|count| count == 0 || !count.is_multiple_of(32)) {
            let message = format!("a barrier of {} threads", count.unwrap_or(0));
            return Err(Stop::new(
                Kind::Operand,
                lane,
                message,
                "the number of threads must be a multiple of 32",
            ));
        }
        block.arrive(self.index, id as usize, active.count_ones());
        if arrive {
            return Ok(Next::On);
        }
        // Lanes for which the predicate is false do not wait at the barrier, and continue.
        let rest = self.groups[at].mask & !active;
        if rest != 0 {
            let pc = self.groups[at].pc + 1;
            self.groups.push(super::warp::Group { pc, mask: rest, state: State::Ready });
            self.groups[at].mask = active;
        }
        self.groups[at].state = State::Barrier(id, count);
        self.groups[at].pc += 1;
        Ok(Next::Gone)
    }
}
