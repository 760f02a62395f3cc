//! Token rows grouped by expert.

use super::*;
use std::cmp::Reverse;

/// Id that a router kernel writes in place of an expert where too few scores are numbers. No dispatch takes
/// it.
pub const NO_EXPERT: i32 = i32::MAX;

/// The layout of the dispatch table: i32 words that [`Op::Dispatch`] writes and the expert kernels read.
///
/// | words | content |
/// |---|---|
/// | 0 | active experts `A` |
/// | 1 | pairs, `valid rows · k`; as many slots are in use, less those that a partial table leaves out |
/// | `expert() ..` `[E]` | ids of the active experts, the busiest first, ties by id |
/// | `start() ..` `[E+1]` | first slot of each active expert, then the number of slots |
/// | `token() ..` `[T·k]` | token row of each slot |
/// | `slot() ..` `[T·k]` | slot of each (token, choice); −1 where a partial table leaves it out |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchLayout {
    /// Token rows `T`.
    pub rows: usize,
    /// Experts per token.
    pub k: usize,
    /// Experts.
    pub experts: usize,
}

impl DispatchLayout {
    /// First word of the expert list.
    pub const fn expert(self) -> usize {
        4
    }

    /// First word of the slot starts.
    pub const fn start(self) -> usize {
        self.expert() + self.experts
    }

    /// First word of the token rows.
    pub const fn token(self) -> usize {
        self.start() + self.experts + 1
    }

    /// First word of the slots of each (token, choice).
    pub const fn slot(self) -> usize {
        self.token() + self.rows * self.k
    }

    /// Words in all.
    pub const fn words(self) -> usize {
        self.slot() + self.rows * self.k
    }

    /// Words in all, or `None` where that overflows.
    pub fn checked_words(self) -> Option<usize> {
        let slots = self.rows.checked_mul(self.k)?.checked_mul(2)?;
        self.experts.checked_mul(2)?.checked_add(5)?.checked_add(slots)
    }
}

/// Slots of a dispatch table of this many words, for this many rows and experts.
pub(super) fn slots_for(
    o: &Operands<'_>,
    words: usize,
    rows: usize,
    experts: usize,
) -> Result<usize, TypeError> {
    let head = DispatchLayout { rows: 0, k: 0, experts }.checked_words();
    let twice = head.and_then(|head| words.checked_sub(head)).filter(|&n| n > 0 && n.is_multiple_of(2));
    let slots = twice.map(|n| n / 2).filter(|slots| slots % rows == 0);
    slots.ok_or_else(|| {
        o.error(format!("dispatch of {words} words fits no k for {rows} rows and {experts} experts"))
    })
}

/// Calls `each` with every slot that an active expert has, in order: expert, slot, and token row. `experts`
/// and `rows` are how many there are.
pub(super) fn for_each_slot(
    a: &Args<'_>,
    (rows, slots, experts): (usize, usize, usize),
    mut each: impl FnMut(usize, usize, usize) -> Result<(), EvalError>,
) -> Result<(), EvalError> {
    let table = a.i32(1)?;
    let layout = DispatchLayout { rows, k: slots / rows, experts };
    let active = a.index("number of active experts", table[0], experts + 1)?;
    for i in 0..active {
        let e = a.index("expert", table[layout.expert() + i], experts)?;
        let first = a.index("slot", table[layout.start() + i], slots + 1)?;
        let end = a.index("slot", table[layout.start() + i + 1], slots + 1)?;
        for slot in first..end {
            each(e, slot, a.index("row", table[layout.token() + slot], rows)?)?;
        }
    }
    Ok(())
}

impl Operator for Dispatch {
    const NAMES: &'static [&'static str] = &["dispatch"];
    const OPERANDS: &'static [Kind] = &[V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [rows, k] = o.shape(0, "ids", DType::I32)?;
        o.require(self.experts > 0, || "no experts".to_owned())?;
        let words = DispatchLayout { rows, k, experts: self.experts }.checked_words();
        Ok(vec![i32(&[words.ok_or_else(|| o.error("dispatch table overflows"))?])])
    }

    /// Words that the table leaves unused are 0.
    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let Self { experts, partial } = *self;
        let ids = a.i32(0)?;
        let layout = DispatchLayout { rows: a.rows(0)?, k: a.cols(0)?, experts };
        // (row, choice) pairs of each expert, flattened, in order of rows.
        let mut members: Vec<Vec<usize>> = vec![Vec::new(); experts];
        for (pair, &id) in ids.iter().enumerate().filter(|&(_, &id)| !(partial && id == -1)) {
            members[a.index("expert", id, experts)?].push(pair);
        }
        let mut active: Vec<usize> = (0..experts).filter(|&e| !members[e].is_empty()).collect();
        active.sort_by_key(|&e| (Reverse(members[e].len()), e));
        let mut table = vec![0; layout.words()];
        table[0] = active.len() as i32;
        table[1] = ids.len() as i32;
        table[layout.slot()..].fill(-1);
        let mut slot = 0;
        for (i, &e) in active.iter().enumerate() {
            table[layout.expert() + i] = e as i32;
            table[layout.start() + i] = slot as i32;
            for &pair in &members[e] {
                table[layout.token() + slot] = (pair / layout.k) as i32;
                table[layout.slot() + pair] = slot as i32;
                slot += 1;
            }
        }
        table[layout.start() + active.len()] = slot as i32;
        Ok(vec![Data::I32(table)])
    }
}
