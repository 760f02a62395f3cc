//! Checks of units, memories, and the contents of memories.

use super::{VerifyError, require};
use crate::plan::{Arg, Builtin, Code, Entry, Paging, Plan, Span, Step};
use std::collections::HashSet;

/// Most units, memories, and queues of a unit: what is checked of them grows with their number.
const MOST: usize = 64;

/// Units have memories, the CPU the first; names are unique; links join two memories.
pub(super) fn check_units(plan: &Plan) -> Result<(), VerifyError> {
    let at = || "units".to_owned();
    require(!plan.units.is_empty(), at, || "no units".into())?;
    require(!plan.memories.is_empty(), at, || "no memories".into())?;
    require(plan.units.first().is_some_and(|u| u.memory == 0), at, || {
        "the CPU's memory is not the first".into()
    })?;
    let mut names = HashSet::new();
    for (i, u) in plan.units.iter().enumerate() {
        let at = || format!("units[{i}]");
        require(!u.name.is_empty() && names.insert(&u.name), at, || "no name, or a duplicate".into())?;
        require(!u.backend.is_empty(), at, || "no backend".into())?;
        require((u.memory as usize) < plan.memories.len(), at, || {
            format!("memory {} is out of range", u.memory)
        })?;
        let queues = u.queues as usize;
        require((1..=MOST).contains(&queues), at, || format!("{queues} queues, expected 1 to {MOST}"))?;
    }
    check_cpus(plan)?;
    let few = plan.units.len() <= MOST && plan.memories.len() <= MOST;
    require(few, at, || format!("more than {MOST} units or memories"))?;
    for m in 1..plan.memories.len() as u32 {
        let units = plan.units.iter().filter(|u| u.memory == m).count();
        require(units <= 1, at, || format!("{units} units in memory {m}, which one unit has reserved"))?;
    }
    let mut names = HashSet::new();
    for (i, m) in plan.memories.iter().enumerate() {
        let at = || format!("memories[{i}]");
        require(!m.name.is_empty() && names.insert(&m.name), at, || "no name, or a duplicate".into())?;
    }
    for (i, link) in plan.links.iter().enumerate() {
        let joins = link.from < link.to && (link.to as usize) < plan.memories.len();
        require(joins, || format!("links[{i}]"), || format!("{} and {}", link.from, link.to))?;
    }
    Ok(())
}

/// CPUs of NUMA nodes: each is of one node, and the first node has some, too.
fn check_cpus(plan: &Plan) -> Result<(), VerifyError> {
    let first_has_some = plan.units.first().is_some_and(|u| !u.cpus.is_empty());
    for (i, u) in plan.units.iter().enumerate() {
        let at = || format!("units[{i}]");
        require(u.cpus.is_valid(), at, || "CPUs that do not ascend, or past all".into())?;
        require(u.cpus.is_empty() || i == 0 || (first_has_some && u.memory != 0), at, || {
            "CPUs of a node without a memory of its own, or beside a first unit without CPUs".into()
        })?;
        let shared = plan.units.iter().take(i).find_map(|other| u.cpus.shared(&other.cpus));
        require(shared.is_none(), at, || format!("CPU {} of another unit", shared.unwrap_or(0)))?;
    }
    Ok(())
}

/// Residents name matrices that there are, once each.
pub(super) fn check_residents(plan: &Plan) -> Result<(), VerifyError> {
    for (i, m) in plan.memories.iter().enumerate() {
        require(
            i > 0 || m.residents.is_empty(),
            || "memories[0]".into(),
            || "a store serves its weights".into(),
        )?;
        require(
            i > 0 || m.paging.is_none(),
            || "memories[0]".into(),
            || "the plan has its experts on disk".into(),
        )?;
        let mut previous = None;
        for (j, r) in m.residents.iter().enumerate() {
            let at = || format!("memories[{i}].residents[{j}]");
            require(previous < Some(r.segment), at, || format!("segment {} is out of order", r.segment))?;
            previous = Some(r.segment);
            let segment = plan.segments.get(r.segment as usize);
            let matrices = segment.map(|s| s.extents().0);
            let inside = matrices.is_some_and(|matrices| {
                let alone = r.matrices.len() == matrices as usize;
                alone || r.matrices.last().is_none_or(|&last| last < matrices)
            });
            require(inside && r.matrices.is_sorted_by(|a, b| a < b), at, || {
                format!("matrices {:?} of segment {}", r.matrices, r.segment)
            })?;
            // A resident of one piece is a segment whose matrices follow each other.
            let dense = segment.is_some_and(|s| s.matrix_bytes() == Some(s.pitch) || s.extents().0 == 1);
            require(!r.matrices.is_empty() || dense, at, || "a segment with gaps, in one piece".into())?;
        }
    }
    Ok(())
}

/// Arguments are where their units find them, and memories have room for their contents.
pub(super) fn check_steps(plan: &Plan) -> Result<(), VerifyError> {
    for (i, entry) in plan.entries.iter().enumerate() {
        for (j, step) in entry.steps.iter().enumerate() {
            check_step(plan, entry, step, &format!("entries[{i}].steps[{j}]"))?;
        }
    }
    check_peaks(plan)
}

/// Checks that the peak of each memory exceeds neither its capacity nor addresses.
fn check_peaks(plan: &Plan) -> Result<(), VerifyError> {
    for (i, m) in plan.memories.iter().enumerate() {
        let at = || format!("memories[{i}] ({})", m.name);
        let peak = plan.peak(i as u32, 1).filter(|&n| isize::try_from(n).is_ok());
        require(peak.is_some(), at, || "it holds more than there are addresses".into())?;
        require(m.capacity.is_none_or(|most| peak <= Some(most)), at, || {
            format!("it holds {peak:?} bytes, past its capacity of {:?}", m.capacity)
        })?;
    }
    Ok(())
}

/// Arguments are in the memory of the step's unit; a copy crosses a link.
fn check_step(plan: &Plan, entry: &Entry, step: &Step, at: &str) -> Result<(), VerifyError> {
    let own = plan.memory_of(step.unit);
    let at = || at.to_owned();
    let of_buffer = |arg: Option<&Arg>| match arg {
        Some(&Arg::Buffer(b, _)) => entry.buffers.get(b as usize).map(|b| b.memory),
        _ => None,
    };
    if let Code::Builtin(Builtin::Copy { span, .. }) = step.code {
        let ends = if let Span::Slots { .. } = span { 1 } else { 0 };
        let (from, to) = (of_buffer(step.args.get(ends)), of_buffer(step.args.get(ends + 1)));
        let table = ends == 0 || of_buffer(step.args.first()) == Some(0);
        let (Some(from), Some(to)) = (from, to) else {
            return require(false, at, || "a copy of an argument that is not a buffer".into());
        };
        let linked = plan.links.iter().any(|l| (l.from, l.to) == (from.min(to), from.max(to)));
        // A unit moves bytes between its own memory and the CPU's.
        let own_link = own != 0 && from.min(to) == 0 && from.max(to) == own;
        return require(table && linked && own_link, at, || {
            format!("a copy from memory {from} to memory {to} by a unit of memory {own}")
        });
    }
    for (i, arg) in step.args.iter().enumerate() {
        let resident = |segment: u32, by_expert: bool| {
            let of = plan.memories.get(own as usize).map_or(&[][..], |m| &m.residents);
            of.iter().any(|r| r.segment == segment && r.matrices.is_empty() != by_expert)
        };
        let paged = |segment: u32| plan.paging.iter().flat_map(Paging::segments).any(|s| s == segment);
        let here = match *arg {
            Arg::Buffer(..) => of_buffer(Some(arg)) == Some(own),
            Arg::State(s) => plan.states.get(s as usize).is_some_and(|s| s.memory == own),
            // The pager knows of the CPU's steps alone.
            Arg::Segment(s) | Arg::Matrices(s) if own == 0 => step.unit == 0 || !paged(s),
            Arg::Segment(s) => resident(s, false),
            Arg::Matrices(s) => resident(s, true),
        };
        require(here, at, || format!("argument {i} ({arg:?}) is not in memory {own}, its unit's"))?;
    }
    Ok(())
}
