//! What must hold of a Program before a single step of it runs.
//!
//! Cheap (one pass over the steps), so it is done at every start, for baked programs and decoded plans
//! alike. What it cannot know is whether kernels keep to the extents of their arguments.

use crate::error::{Error, Result};
use crate::flash::{BLOCK, LARGEST_BLOCK, SMALLEST_BLOCK};
use crate::program::{Arg, Builtin, Code, EntryRef, Grid, PagedLayer, PagingRef, Program, RowSpace, Step};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::ALIGN;
use std::collections::BTreeSet;
use std::ops::Range;

/// Checks every index and every range of a program.
///
/// # Errors
/// [`Error::Plan`], naming the place.
pub fn program(p: &Program<'_>) -> Result<()> {
    let m = &p.model;
    for (what, n) in [("vocab", m.vocab), ("max_context", m.max_context), ("slots", m.slots)] {
        ensure(n >= 1 && i32::try_from(n).is_ok(), || format!("{what} is {n}"))?;
    }
    ensure(m.bos.is_none_or(|id| id < m.vocab), || "bos is outside of the vocabulary".to_owned())?;
    for (i, s) in p.segments.iter().enumerate() {
        let file = p.files.get(s.file as usize);
        ensure(file.zip(s.span()).is_some_and(|(f, span)| inside(s.offset, span, f.bytes)), || {
            format!("segment {i} lies outside of its file")
        })?;
        ensure(s.offset.is_multiple_of(ALIGN), || format!("segment {i} is not aligned"))?;
    }
    if let Some(paging) = &p.paging {
        check_paging(p, paging).map_err(|why| Error::Plan(format!("paging: {why}")))?;
    }
    for e in p.entries {
        entry(p, e).map_err(|why| Error::Plan(format!("{}: {why}", e.kind)))?;
    }
    Ok(())
}

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Plan(why())) }
}

fn inside(offset: u64, bytes: u64, of: u64) -> bool {
    offset.checked_add(bytes).is_some_and(|end| end <= of)
}

/// The matrices of every expert must be neighbours that a frame holds: what [`moec_ir::verify`] asks of plans.
fn check_paging(p: &Program<'_>, paging: &PagingRef<'_>) -> Result<(), String> {
    let matrices: u64 = paging.layers.iter().map(|l| 2 * u64::from(l.experts)).sum();
    if paging.layers.is_empty() || paging.checksums.len() as u64 != matrices || paging.spare < 2 {
        return Err(format!("{} checksums of {matrices} matrices", paging.checksums.len()));
    }
    if !paging.uses.is_empty() && paging.uses.len() as u64 != matrices / 2 {
        return Err(format!("uses of {} of {} experts", paging.uses.len(), matrices / 2));
    }
    if paging.frame_bytes == 0 || !paging.frame_bytes.is_multiple_of(BLOCK) {
        return Err(format!("frames of {} bytes", paging.frame_bytes));
    }
    if !(SMALLEST_BLOCK..=LARGEST_BLOCK).contains(&paging.block_bytes)
        || !paging.block_bytes.is_multiple_of(SMALLEST_BLOCK)
    {
        return Err(format!("reads of {} bytes", paging.block_bytes));
    }
    for (i, l) in paging.layers.iter().enumerate() {
        let segment =
            |s: u32| p.segments.get(s as usize).ok_or_else(|| format!("layer {i} has no segment {s}"));
        let (gate_up, down) = (segment(l.gate_up)?, segment(l.down)?);
        let first = gate_up.matrix_bytes().and_then(|b| b.checked_next_multiple_of(BLOCK));
        let rest = down.matrix_bytes().and_then(|b| b.checked_next_multiple_of(BLOCK));
        let bytes = first.zip(rest).and_then(|(a, b)| a.checked_add(b));
        let neighbours = first.and_then(|f| f.checked_add(gate_up.offset)) == Some(down.offset)
            && (gate_up.file, gate_up.pitch, gate_up.matrices) == (down.file, down.pitch, down.matrices)
            && gate_up.offset.is_multiple_of(BLOCK)
            && gate_up.pitch.is_multiple_of(BLOCK)
            && gate_up.matrices == l.experts
            && l.k >= 1
            && l.k <= l.experts
            && bytes.is_some_and(|b| b <= gate_up.pitch && b <= paging.frame_bytes);
        if !neighbours {
            return Err(format!("the experts of layer {i} do not lie as they are read"));
        }
    }
    let fits = paging.pinned.is_empty() || (paging.pinned.len() as u64) < u64::from(paging.frames);
    let mut seen = BTreeSet::new();
    let own = |&(layer, expert): &(u32, u32)| {
        paging.layers.get(layer as usize).is_some_and(|l| expert < l.experts) && seen.insert((layer, expert))
    };
    if !fits || !paging.pinned.iter().all(own) {
        return Err(format!("{} pinned experts in {} frames", paging.pinned.len(), paging.frames));
    }
    Ok(())
}

fn entry(p: &Program<'_>, e: &EntryRef<'_>) -> Result<(), String> {
    let (t, r) = (e.kind.rows() as u64, u64::from(e.out_rows));
    if t == 0 || r == 0 || i32::try_from(t).is_err() {
        return Err(format!("{t} rows and {r} output rows"));
    }
    for (i, b) in e.buffers.iter().enumerate() {
        if !inside(b.offset, b.bytes, p.arena_bytes) || !b.offset.is_multiple_of(ALIGN) {
            return Err(format!("buffer {i} is not an aligned place in the arena"));
        }
    }
    for (i, rows) in [t, t, t, r].into_iter().enumerate() {
        if e.buffers.get(i).is_none_or(|b| b.bytes < rows * 4) {
            return Err(format!("input {i} has no room for {rows} rows"));
        }
    }
    let (stride, vocab) = (u64::from(e.logits_stride), u64::from(p.model.vocab));
    let logits = e.buffers.get(e.logits as usize).map(|b| b.bytes / 4);
    if stride < vocab || logits.is_none_or(|n| n < (r - 1).saturating_mul(stride).saturating_add(vocab)) {
        return Err("the logits have no room".to_owned());
    }
    for (i, s) in e.steps.iter().enumerate() {
        step(p, e, s).map_err(|why| format!("step {i}: {why}"))?;
    }
    Ok(())
}

fn step(p: &Program<'_>, e: &EntryRef<'_>, s: &Step<'_>) -> Result<(), String> {
    for (i, &arg) in s.args.iter().enumerate() {
        extent(p, e, arg).ok_or_else(|| format!("argument {i} names nothing"))?;
    }
    match s.grid {
        Grid::Tiles { rows: 0, .. } => return Err("blocks of no rows".to_owned()),
        Grid::Experts { table, .. } => {
            let words = s.args.get(table as usize).and_then(|&a| words(p, e, a));
            if !matches!(s.args.get(table as usize), Some(Arg::Buffer(..)))
                || words.is_none_or(|w| w.is_empty())
            {
                return Err(format!("argument {table} is no dispatch table"));
            }
        }
        Grid::One | Grid::Tiles { .. } => {}
    }
    let n = match s.rows {
        RowSpace::Tokens => e.kind.rows() as u64,
        RowSpace::Outputs => u64::from(e.out_rows),
    };
    let Code::Builtin(builtin) = s.code else { return Ok(()) };
    // Smallest extent of each argument in words; the last ones are written.
    let mut results = 1;
    let needs: Vec<u64> = match builtin {
        Builtin::RopeAngles { half, long, .. } => {
            let half = u64::from(half);
            let mut needs = vec![n, half];
            needs.extend(long.map(|_| half));
            needs.push(n * 2 * half);
            needs
        }
        Builtin::Dispatch { rows, k, experts, .. } => {
            if u64::from(rows) < n {
                return Err(format!("a dispatch table of {rows} rows for {n}"));
            }
            let layout = DispatchLayout { rows: rows as usize, k: k as usize, experts: experts as usize };
            let slots = u64::from(rows) * u64::from(k);
            if i32::try_from(slots).is_err() || i32::try_from(experts).is_err() {
                return Err(format!("a dispatch table of {slots} slots"));
            }
            vec![slots, layout.words() as u64]
        }
        Builtin::Fetch { layer, rows, k, strides } => {
            let layers = p.paging.map_or(&[][..], |p| p.layers);
            let ahead = layers.get(layer as usize..).unwrap_or_default();
            let own = ahead.first().ok_or("there is no such layer on flash")?;
            if u64::from(rows) < n {
                return Err(format!("a dispatch table of {rows} rows for {n}"));
            }
            let (k, experts) = (k as usize, own.experts as usize);
            if k == 0 || k > own.k as usize {
                return Err(format!("a dispatch table of {k} experts per token"));
            }
            let layout = DispatchLayout { rows: rows as usize, k, experts };
            let words = layout.checked_words().ok_or("a dispatch table past the address space")?;
            let scores = s.args.len().saturating_sub(1);
            if scores == 0 || scores > strides.len().min(ahead.len()) {
                return Err(format!("scores of {scores} layers"));
            }
            let room = |(&stride, layer): (&u32, &PagedLayer)| {
                (layer.experts <= stride).then(|| (n - 1) * u64::from(stride) + u64::from(layer.experts))
            };
            let needs: Option<Vec<u64>> = strides.iter().zip(ahead).take(scores).map(room).collect();
            let mut needs = needs.ok_or("rows of scores that are too short")?;
            needs.push(words as u64);
            needs
        }
        Builtin::Admit { set, k, channels } => {
            p.sets.get(set as usize).ok_or("there is no such set of experts")?;
            let (ids, added) = (n * u64::from(k), n * u64::from(channels));
            results = 2;
            vec![ids, added, ids, ids]
        }
        Builtin::Part { part } => {
            let part = p.parts.get(part as usize).ok_or("there is no such part")?;
            let channels = |n_channels: u32| n * u64::from(n_channels);
            for &g in part.graphs {
                let graph = p.graphs.get(g as usize).ok_or("there is no such graph")?;
                let room = graph.inputs.first().is_some_and(|x| {
                    let apart = part.attention.is_some_and(|a| a.apart);
                    u64::from(x.shape[0]) >= if apart { 1 } else { n } && x.shape[1] == part.inputs
                });
                if !room {
                    return Err(format!("`{}` does not take {n} rows of {}", graph.package, part.inputs));
                }
            }
            let mut needs = vec![channels(part.inputs)];
            if let Some(a) = part.attention {
                needs.extend((a.angles > 0).then(|| channels(a.angles)));
                needs.extend([n, n]);
            }
            needs.push(channels(part.outputs));
            needs
        }
        Builtin::Experts { set, rows, k, hidden } => {
            let set = p.sets.get(set as usize).ok_or("there is no such set of experts")?;
            let experts = set.capacities.len();
            let layout = DispatchLayout { rows: rows as usize, k: k as usize, experts };
            let words = layout.checked_words().ok_or("a dispatch table past the address space")?;
            let row = u64::from(hidden);
            if u64::from(rows) < n {
                return Err(format!("a dispatch table of {rows} rows for {n}"));
            }
            for group in set.groups {
                let rows = group.experts.len() as u64 * u64::from(group.capacity);
                let graph = p.graphs.get(group.graph as usize).ok_or("there is no such graph")?;
                let fits = |ports: &[crate::program::PortRef<'_>]| {
                    ports.len() == 1 && ports[0].len() as u64 == rows * row
                };
                if !fits(graph.inputs) || !fits(graph.outputs) {
                    return Err(format!("`{}` does not take {rows} rows of {hidden}", graph.package));
                }
            }
            let slots = u64::from(rows) * u64::from(k);
            vec![n * row, words as u64, slots.checked_mul(row).ok_or("slots past the address space")?]
        }
    };
    fits(p, e, s, &needs, results)
}

/// Whether the arguments of a builtin are there, large enough, and the last `results` of them apart from all others.
fn fits(
    p: &Program<'_>,
    e: &EntryRef<'_>,
    s: &Step<'_>,
    needs: &[u64],
    results: usize,
) -> Result<(), String> {
    if s.args.len() != needs.len() {
        return Err(format!("{} arguments, not {}", s.args.len(), needs.len()));
    }
    let mut places = Vec::new();
    for (i, (&arg, &need)) in s.args.iter().zip(needs).enumerate() {
        let found = words(p, e, arg).filter(|w| w.end - w.start >= need);
        let found = found.ok_or_else(|| format!("argument {i} has no room for {need} words"))?;
        places.push(found.start..found.start + need);
    }
    for out in s.args.len() - results..s.args.len() {
        if !matches!(s.args[out], Arg::Buffer(..)) {
            return Err("the result is no buffer".to_owned());
        }
        let to = &places[out];
        for (&arg, from) in s.args.iter().zip(&places).take(out) {
            if matches!(arg, Arg::Buffer(..)) && from.start < to.end && to.start < from.end {
                return Err("the result overlaps an operand".to_owned());
            }
        }
    }
    Ok(())
}

/// Bytes that an argument gives access to: in the arena for a buffer, else from 0.
fn extent(p: &Program<'_>, e: &EntryRef<'_>, arg: Arg) -> Option<Range<u64>> {
    match arg {
        Arg::Buffer(i, skip) => {
            let b = e.buffers.get(i as usize)?;
            let start = b.offset + u64::from(skip);
            (u64::from(skip) <= b.bytes).then_some(start..b.offset + b.bytes)
        }
        Arg::Segment(i) => p.segments.get(i as usize).map(|s| 0..s.bytes),
        Arg::Matrices(i) => p.segments.get(i as usize).map(|s| 0..u64::from(s.matrices) * 8),
        Arg::State(i) => p.states.get(i as usize).map(|s| 0..s.bytes),
    }
}

/// As [`extent`], in 4-byte words; none if not aligned to them.
fn words(p: &Program<'_>, e: &EntryRef<'_>, arg: Arg) -> Option<Range<u64>> {
    extent(p, e, arg).filter(|r| r.start.is_multiple_of(4)).map(|r| r.start / 4..r.end / 4)
}
