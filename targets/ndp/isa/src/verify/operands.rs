//! Conditions of each instruction by itself, and its valid places.

use crate::fault::Fault;
use crate::geometry::Layout;
use crate::op::{Glu, Op, Slab};
use crate::stream::{Access, Instruction, Region, Stream};
use crate::uses::{LinesUse, SlabUse};
use crate::{ALIGN, BUFFER};

type Message = Result<(), String>;

/// Checks every instruction.
pub(super) fn check(stream: &Stream) -> Result<(), Fault> {
    let mut open = None;
    for (index, instruction) in stream.code.iter().enumerate() {
        let slabs = instruction.op.slabs();
        place(&instruction.op, index, &mut open, !slabs.is_empty())
            .and_then(|()| control(instruction))
            .and_then(|()| slabs.iter().try_for_each(|operand| slab(stream, operand)))
            .and_then(|()| overlaps(stream, &slabs))
            .and_then(|()| {
                instruction.op.lines().iter().try_for_each(|operand| lines(stream, &instruction.op, operand))
            })
            .and_then(|()| parameters(stream, &instruction.op))
            .map_err(|message| Fault::instruction(stream, index, message))?;
    }
    match open {
        None => Ok(()),
        Some(index) => Err(Fault::instruction(stream, index, "this loop has no end: write `end` after it")),
    }
}

/// Loops, and the instructions in them.
fn place(op: &Op, index: usize, open: &mut Option<usize>, tokens: bool) -> Message {
    match (op, *open) {
        (Op::Loop, Some(outer)) => Err(format!("loops cannot be nested: instruction {outer} begins one")),
        (Op::Loop, None) => {
            *open = Some(index);
            Ok(())
        }
        (Op::End, None) => Err("there is no loop to end".into()),
        (Op::End, Some(_)) => {
            *open = None;
            Ok(())
        }
        (_, None) if tokens => Err("it acts on tokens: put it between `loop` and `end`".into()),
        _ => Ok(()),
    }
}

/// Conditions of instructions that no engine executes.
fn control(instruction: &Instruction) -> Message {
    let events = !instruction.waits.is_empty() || instruction.signal.is_some();
    if instruction.op.engine().is_none() && events {
        return Err("it waits for all engines: remove its events".into());
    }
    Ok(())
}

fn slab(stream: &Stream, operand: &SlabUse) -> Message {
    let SlabUse { name, slab, only, bytes, writes, .. } = *operand;
    let (base, stride, last) = (slab.base, slab.stride, u64::from(stream.tokens) - 1);
    if let Some(only) = only.filter(|&only| only != slab.number) {
        return Err(format!("the {name} holds {}: it takes only {}", slab.number.name(), only.name()));
    }
    if base % ALIGN != 0 || stride % ALIGN != 0 {
        return Err(format!("the {name}: base {base} and stride {stride} must be multiples of {ALIGN}"));
    }
    if bytes == 0 {
        return Err("it does nothing: give it a count of at least 1".into());
    }
    if writes && last > 0 && u64::from(stride) < bytes {
        let message =
            format!("the {name}: a token has {bytes} bytes, and the next one is written {stride} after it");
        return Err(format!(
            "{message}; take a stride of at least {}",
            bytes.next_multiple_of(u64::from(ALIGN))
        ));
    }
    let end = u64::from(base) + last * u64::from(stride) + bytes;
    if end > u64::from(BUFFER) {
        return Err(format!(
            "the {name} of {} tokens ends at byte {end}, and the buffer at {BUFFER}",
            stream.tokens
        ));
    }
    Ok(())
}

/// The destination and its sources.
fn overlaps(stream: &Stream, slabs: &[SlabUse]) -> Message {
    let one = |slab: Slab| if stream.tokens == 1 { Slab { stride: 0, ..slab } } else { slab };
    for target in slabs.iter().filter(|operand| operand.writes) {
        for source in slabs.iter().filter(|operand| !operand.writes) {
            let same = source.in_place && one(source.slab) == one(target.slab);
            if !same && overlap(stream, target, source) {
                let rule = if source.in_place { "be the same slab or share none" } else { "share none" };
                return Err(format!(
                    "the {} and the {} share bytes: they must {rule}",
                    target.name, source.name
                ));
            }
        }
    }
    Ok(())
}

/// Whether two operands share bytes. Both are sorted, and inside of the buffer.
fn overlap(stream: &Stream, one: &SlabUse, other: &SlabUse) -> bool {
    let (mut one, mut other) = (one.ranges(stream.tokens).peekable(), other.ranges(stream.tokens).peekable());
    while let (Some(a), Some(b)) = (one.peek(), other.peek()) {
        if a.start < b.end && b.start < a.end {
            return true;
        }
        if a.end <= b.end {
            one.next();
        } else {
            other.next();
        }
    }
    false
}

fn lines(stream: &Stream, op: &Op, operand: &LinesUse) -> Message {
    let LinesUse { lines, stride, count, writes } = *operand;
    let Some(region) = stream.regions.get(usize::from(lines.region)) else {
        return Err(format!("there is no region {}", lines.region));
    };
    let Region { name, layout, access, .. } = region;
    if count == 0 {
        return Err("it does nothing: give it at least one line".into());
    }
    if writes && *access == Access::Read {
        return Err(format!("region `{name}` is read-only: give it `access write`"));
    }
    let required = match *op {
        Op::Relayout { to, .. } if writes => to,
        Op::Relayout { to: Layout::Localized, .. } => Layout::Striped,
        _ => Layout::Localized,
    };
    if required != *layout {
        return Err(format!("region `{name}` is {}, expected a {} one", layout.name(), required.name()));
    }
    let last = u64::from(stream.slots) - 1;
    let all = region.lines(&stream.geometry, &stream.system).unwrap_or(0);
    let end = last.checked_mul(stride).and_then(|rows| rows.checked_add(lines.line)?.checked_add(count));
    if end.is_none_or(|end| end > all) {
        let rows = if stride == 0 { String::new() } else { format!(", that of row {last},") };
        let end = end.map_or_else(|| "no number".into(), |end| (end - 1).to_string());
        return Err(format!(
            "the last line{rows} is {end}, and region `{name}` has {all} lines, numbered from 0"
        ));
    }
    if matches!(op, Op::Store { .. }) && last > 0 && stride < count {
        return Err(format!(
            "a token has {count} lines, and the next row is {stride} after it: take a larger stride"
        ));
    }
    Ok(())
}

/// Conditions of operands that are neither slab nor line.
fn parameters(stream: &Stream, op: &Op) -> Message {
    match op {
        Op::Glu { kind: Glu::Clamped { limit, .. }, .. } if *limit <= 0.0 => {
            Err(format!("the limit {limit} must be above 0"))
        }
        Op::Convert { dst, src, .. } if dst.number == src.number => {
            Err(format!("both sides hold {}: there is nothing to convert", src.number.name()))
        }
        Op::Migrate { dimm, rows, lines, .. } => {
            let dimms = stream.system.count().unwrap_or(0);
            let room = u64::from(rows.end.saturating_sub(rows.start))
                .saturating_mul(stream.geometry.set_lines().unwrap_or(0));
            let all = stream.geometry.rows;
            if *dimm == stream.dimm || *dimm >= dimms {
                return Err(format!("it cannot go to DIMM {dimm}: take one of the {dimms}, but not its own"));
            }
            if rows.is_empty() || rows.end > all {
                return Err(format!(
                    "rows {}..{}: take at least one of the geometry's {all}",
                    rows.start, rows.end
                ));
            }
            if u64::from(*lines) > room {
                return Err(format!("{lines} lines into rows that have {room}"));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}
