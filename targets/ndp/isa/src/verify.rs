//! The verifier: properties that an executor of streams may rely on. Nothing here panics or overflows on any
//! stream.
//!
//! 1. Names are words, those of regions unique; numbers of regions and events exist; regions, instructions,
//!    lines and parameters are within the limits of the crate.
//! 2. No number of geometry and system is zero, and all DIMMs together have fewer than [`crate::MAX_LINES`]
//!    lines. The DIMM is one of the system. A block has 1 to [`crate::MAX_TOKENS`] tokens, and there are 1 to
//!    [`crate::MAX_SLOTS`] slots.
//! 3. Regions have rows, all of them the geometry's, and none of another region's.
//! 4. Loops end and do not nest. Instructions on tokens are inside of them. Instructions that wait for all
//!    engines have no events.
//! 5. Slabs are aligned, have a kind of number that the instruction takes, and are in the buffer with the
//!    vectors of a whole block. Vectors that are written do not overlap. A destination shares bytes with a
//!    source only if it is the same slab and the instruction goes number by number. No count is zero.
//! 6. Lines are in their region for every row of an inbox or outbox. Read-only regions are not written. Rows
//!    that are stored do not overlap. `relayout` takes one region of each layout, everything else takes
//!    localized ones. A migration goes to the rows of another DIMM, and fits there.
//! 7. Between two barriers, two instructions of different engines that touch the same bytes of the buffer or
//!    the same lines, one of them writing, are ordered by events. Of lines that have a row per token, all
//!    rows count as touched.
//! 8. An instruction that waits for an event comes after the only instruction that signals it. Both are in
//!    the same iteration, or outside of loops.
//! 9. For any number of tokens in a block, every byte of the buffer that is read was written before in the
//!    same iteration.

mod operands;
mod order;

use crate::fault::{Fault, check_form};
use crate::stream::Stream;
use crate::{MAX_LINES, MAX_SLOTS, MAX_TOKENS};

/// Checks a stream. It takes time of the order of its instructions times the lines of the buffer, and of the
/// square of its instructions.
///
/// # Errors
/// The first fault found.
pub fn verify(stream: &Stream) -> Result<(), Fault> {
    check_form(stream)?;
    header(stream)?;
    regions(stream)?;
    operands::check(stream)?;
    order::check(stream)
}

fn header(stream: &Stream) -> Result<(), Fault> {
    let dimms = stream.system.count();
    let all = dimms.zip(stream.geometry.set_lines()).and_then(|(dimms, lines)| {
        let rows = u64::from(stream.geometry.rows);
        lines.checked_mul(rows)?.checked_mul(u64::from(dimms)).filter(|&all| all < MAX_LINES)
    });
    let (Some(dimms), Some(_)) = (dimms, all) else {
        return Err(Fault::header(format!(
            "the system or its geometry is empty or too large: every number is at least 1, and all DIMMs together have \
             fewer than {MAX_LINES} lines"
        )));
    };
    let at_most = |what: &str, found: u32, most: u32| {
        if (1..=most).contains(&found) {
            return Ok(());
        }
        Err(Fault::header(format!("{what} {found}: allowed are 1 to {most}")))
    };
    at_most("tokens", stream.tokens, MAX_TOKENS)?;
    at_most("slots", stream.slots, MAX_SLOTS)?;
    if stream.dimm >= dimms {
        return Err(Fault::header(format!(
            "there is no DIMM {}: the system has {dimms}, numbered from 0",
            stream.dimm
        )));
    }
    Ok(())
}

fn regions(stream: &Stream) -> Result<(), Fault> {
    for region in &stream.regions {
        let (rows, all) = (&region.rows, stream.geometry.rows);
        if rows.is_empty() || rows.end > all {
            let message =
                format!("rows {}..{}: take at least one of the geometry's {all}", rows.start, rows.end);
            return Err(Fault::region(&region.name, message));
        }
    }
    let mut sorted: Vec<_> = stream.regions.iter().collect();
    sorted.sort_by_key(|region| region.rows.start);
    for pair in sorted.windows(2) {
        if let [one, other] = pair
            && other.rows.start < one.rows.end
        {
            let message = format!(
                "row {} is also one of region `{}`: give each its own rows",
                other.rows.start, one.name
            );
            return Err(Fault::region(&other.name, message));
        }
    }
    Ok(())
}
