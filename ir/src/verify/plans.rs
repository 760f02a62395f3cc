//! Checks of plans; [`super`] lists the invariants.

use super::{VerifyError, memories, placements, require};
use crate::bundle::{BLOCK, active_list_words};
use crate::graph::EntryKind;
use crate::op::DispatchLayout;
use crate::plan::{
    ALIGN, Arg, Buffer, Builtin, CacheOrder, Candidates, Code, Entry, Grid, Layout, PLAN_VERSION, Plan,
    Results, RowSpace, Segment, Span, StateKind, Step,
};
use crate::types::{DType, Format};
use std::collections::HashSet;

/// `unsynchronized`: steps of several units have no order yet.
pub(super) fn check(plan: &Plan, unsynchronized: bool) -> Result<(), VerifyError> {
    let at = || "plan".to_owned();
    require(plan.version == PLAN_VERSION, at, || {
        format!("version {}, this is version {PLAN_VERSION}", plan.version)
    })?;
    check_model(plan)?;
    let arenas = plan.memories.iter().map(|m| m.arena_bytes);
    let addresses = arenas.chain([plan.scratch_bytes]).all(|bytes| isize::try_from(bytes).is_ok());
    require(addresses, at, || "arena or scratch exceeds the address space".into())?;
    memories::check_units(plan)?;
    check_files(plan)?;
    check_segments(plan)?;
    check_states(plan)?;
    memories::check_residents(plan)?;
    super::experts::check(plan)?;
    check_kernels(plan)?;
    super::statics::check(plan)?;
    super::paging::check(plan)?;
    super::launches::check(plan)?;
    for (i, entry) in plan.entries.iter().enumerate() {
        let here = format!("entries[{i}]");
        let previous = i.checked_sub(1).map(|p| rank(plan.entries[p].kind));
        require(
            previous < Some(rank(entry.kind)),
            || here.clone(),
            || format!("{} is out of order", entry.kind),
        )?;
        check_entry(plan, entry, &here, unsynchronized)?;
    }
    if !unsynchronized {
        super::experts::check_policy(plan)?;
    }
    check_big_little(plan)?;
    placements::check_in_plan(plan)
}

/// Prefill before decode before little, each by rows.
fn rank(kind: EntryKind) -> (u32, u32) {
    match kind {
        EntryKind::Prefill(n) => (0, n),
        EntryKind::Decode(n) => (1, n),
        EntryKind::Little(n) => (2, n),
    }
}

/// Big-little decoding needs a little entry point beside each decode entry point, and little ones serve
/// nothing else.
fn check_big_little(plan: &Plan) -> Result<(), VerifyError> {
    let at = || "model".to_owned();
    let rows = |little: bool| {
        let of_kind = move |k: &EntryKind| match k {
            EntryKind::Prefill(_) => false,
            EntryKind::Decode(_) => !little,
            EntryKind::Little(_) => little,
        };
        plan.entries.iter().map(|e| e.kind).filter(of_kind).map(EntryKind::rows).collect::<Vec<_>>()
    };
    let Some(b) = plan.model.big_little else {
        return require(rows(true).is_empty(), at, || "little entry points, and no big_little".into());
    };
    require(b.experts > 0, at, || "big_little has no experts".into())?;
    require((0.0..=1.0).contains(&b.gamma), at, || format!("gamma is {}", b.gamma))?;
    require(rows(true) == rows(false), at, || "decode and little entry points differ in rows".into())
}

fn check_model(plan: &Plan) -> Result<(), VerifyError> {
    let m = &plan.model;
    let at = || "model".to_owned();
    let sizes = [m.vocab, m.hidden, m.layers, m.max_context, m.slots];
    require(!sizes.contains(&0), at, || "a size is zero".into())?;
    // Positions and ids are i32.
    require(sizes.iter().all(|&n| i32::try_from(n).is_ok()), at, || "a size exceeds i32".into())?;
    require(m.bos.is_none_or(|id| id < m.vocab), at, || "bos is not in the vocabulary".into())?;
    let share = |p: f32| (0.0..=100.0).contains(&p);
    require(m.thresholded.is_none_or(share), at, || "an invalid share of neurons below thresholds".into())
}

fn check_files(plan: &Plan) -> Result<(), VerifyError> {
    let mut paths = HashSet::new();
    for (i, file) in plan.files.iter().enumerate() {
        let at = || format!("files[{i}]");
        require(super::stays_inside(&file.path), at, || {
            format!("path {:?} does not stay inside the bundle", file.path)
        })?;
        require(paths.insert(&file.path), at, || format!("path {:?} occurs twice", file.path))?;
    }
    Ok(())
}

fn check_segments(plan: &Plan) -> Result<(), VerifyError> {
    for (i, s) in plan.segments.iter().enumerate() {
        let at = || format!("segments[{i}] ({})", s.name);
        require(!s.name.is_empty(), at, || "no name".into())?;
        require((1..=3).contains(&s.shape.len()) && !s.shape.contains(&0), at, || {
            format!("shape {:?}", s.shape)
        })?;
        require(s.offset % ALIGN == 0, at, || format!("offset {} is not aligned", s.offset))?;
        let needed = s.packed_bytes();
        require(needed == Some(s.bytes), at, || format!("{} bytes, expected {needed:?}", s.bytes))?;
        let file = plan.files.get(s.file as usize);
        let disjoint = s.matrix_bytes().is_some_and(|bytes| s.pitch >= bytes);
        require(disjoint, at, || format!("a matrix stride of {} bytes", s.pitch))?;
        let inside = file.zip(s.end()).is_some_and(|(f, end)| end <= f.bytes);
        require(inside, at, || format!("is not inside file {}", s.file))?;
    }
    Ok(())
}

fn check_states(plan: &Plan) -> Result<(), VerifyError> {
    let mut names = HashSet::new();
    for (i, s) in plan.states.iter().enumerate() {
        let at = || format!("states[{i}] ({})", s.name);
        require(!s.name.is_empty() && names.insert(&s.name), at, || "no name, or a duplicate".into())?;
        require((s.memory as usize) < plan.memories.len(), at, || {
            format!("memory {} is out of range", s.memory)
        })?;
        let fits = s.checked_bytes().is_some_and(|n| n > 0 && isize::try_from(n).is_ok());
        require(fits, at, || format!("extents {:?} of {} in the order {:?}", s.shape, s.format, s.order))?;
        let [slots, _, rows, dim] = s.shape;
        let (needed, context) = (plan.model.slots, plan.model.max_context);
        let holds = |tokens: u64| {
            require(slots >= needed && u64::from(rows) >= tokens, at, || {
                format!("{slots} slots of {rows} tokens do not hold the model's {needed} of {tokens}")
            })
        };
        match s.kind {
            StateKind::Cache => holds(context.into())?,
            StateKind::Ring { window } => {
                require(window > 0, at, || "a ring without a window".into())?;
                // The rows of a call are all written before the first of them looks back.
                let call = plan.entries.iter().filter(|e| e.kind.is_prefill()).map(|e| e.kind.rows() as u64);
                let visible = u64::from(window) + call.max().unwrap_or(1).saturating_sub(1);
                holds(visible.min(context.into()))?;
            }
            StateKind::Recurrent | StateKind::Convolution => {
                require(slots >= needed, at, || format!("{slots} slots do not hold the model's {needed}"))?;
                let whole = match s.order {
                    CacheOrder::Rows => true,
                    CacheOrder::Values { block, .. } => s.kind == StateKind::Recurrent && block == rows,
                    CacheOrder::Keys { .. } => false,
                };
                require(whole && s.format == Format::F32, at, || {
                    format!("{} of {} in the order {:?}", s.kind, s.format, s.order)
                })?;
            }
        }
        let blocks = s.rotated.is_power_of_two() && dim % s.rotated == 0;
        require(blocks && (s.rotated == 1 || !s.kind.needs_snapshots()), at, || {
            format!("heads of {dim} channels of a {} rotated in blocks of {}", s.kind.name(), s.rotated)
        })?;
        let most = if s.kind.needs_snapshots() { context } else { 0 };
        require(s.snapshots <= most, at, || {
            format!("{} snapshots, and a state of the kind {} has {most} at most", s.snapshots, s.kind.name())
        })?;
    }
    Ok(())
}

fn check_kernels(plan: &Plan) -> Result<(), VerifyError> {
    let mut symbols = HashSet::new();
    for (i, k) in plan.kernels.iter().enumerate() {
        let at = || format!("kernels[{i}]");
        require(super::is_identifier(&k.symbol), at, || format!("{:?} is not a C identifier", k.symbol))?;
        require(symbols.insert(&k.symbol), at, || format!("{} occurs twice", k.symbol))?;
        require(k.results != Results::default(), at, || format!("{} writes nothing", k.symbol))?;
    }
    Ok(())
}

/// Bytes from the start of a matrix of 4-byte elements to the end of its last row.
fn extent(rows: u32, stride: u32, cols: u32) -> Option<u64> {
    let before = u64::from(rows.checked_sub(1)?).checked_mul(u64::from(stride))?;
    before.checked_add(u64::from(cols))?.checked_mul(4)
}

fn check_entry(plan: &Plan, entry: &Entry, here: &str, unsynchronized: bool) -> Result<(), VerifyError> {
    let tokens = entry.kind.rows() as u32;
    require(tokens > 0 && entry.out_rows > 0, || here.into(), || "no rows".into())?;
    require(
        i32::try_from(tokens).is_ok() && i32::try_from(entry.out_rows).is_ok(),
        || here.into(),
        || "rows exceed i32".into(),
    )?;
    for (i, b) in entry.buffers.iter().enumerate() {
        let at = || format!("{here}.buffers[{i}] ({})", b.name);
        require(b.offset % ALIGN == 0, at, || format!("offset {} is not aligned", b.offset))?;
        let arena = plan.memories.get(b.memory as usize).map(|m| m.arena_bytes);
        let arena =
            arena.ok_or_else(|| VerifyError::new(at(), format!("memory {} is out of range", b.memory)))?;
        let inside = b.offset.checked_add(b.bytes).is_some_and(|end| end <= arena);
        require(inside, at, || format!("exceeds the arena of {arena} bytes"))?;
        let needed = extent(b.rows, b.stride, b.stride).filter(|&n| n > 0);
        require(needed.is_some_and(|n| n <= b.bytes), at, || {
            format!("{} bytes do not hold {} rows of {}", b.bytes, b.rows, b.stride)
        })?;
    }
    let inputs = [tokens, tokens, tokens, entry.out_rows];
    require(entry.buffers.len() >= inputs.len(), || here.into(), || "fewer than four buffers".into())?;
    for (i, (b, rows)) in entry.buffers.iter().zip(inputs).enumerate() {
        require(
            b.dtype == DType::I32 && b.rows >= rows && b.stride == 1 && b.memory == 0,
            || format!("{here}.buffers[{i}]"),
            || format!("input is not i32[{rows}]"),
        )?;
    }
    let logits = entry.buffers.get(entry.logits as usize);
    let fits = |b: &Buffer| {
        let shaped = b.dtype == DType::F32 && b.rows >= entry.out_rows && b.stride >= plan.model.vocab;
        // Logits of another memory come back with the copies.
        shaped && (b.memory == 0 || unsynchronized)
    };
    require(
        logits.is_some_and(fits),
        || format!("{here}.logits"),
        || format!("buffer {} is not f32[{}, {}]", entry.logits, entry.out_rows, plan.model.vocab),
    )?;
    for (i, place) in entry.locations.iter().enumerate() {
        if let Some(p) = place {
            let end = p.column.checked_add(p.cols);
            let buffer = entry.buffers.get(p.buffer as usize);
            let inside = buffer.zip(end).is_some_and(|(b, end)| p.cols > 0 && end <= b.stride);
            require(
                inside,
                || format!("{here}.locations[{i}]"),
                || format!("columns {} + {} are not in buffer {}", p.column, p.cols, p.buffer),
            )?;
        }
    }
    for (i, step) in entry.steps.iter().enumerate() {
        let at = format!("{here}.steps[{i}]");
        check_step(plan, entry, step, &at)?;
    }
    Ok(())
}

fn check_step(plan: &Plan, entry: &Entry, step: &Step, at: &str) -> Result<(), VerifyError> {
    let at = || at.to_owned();
    require((step.unit as usize) < plan.units.len(), at, || format!("unit {} is out of range", step.unit))?;
    for (i, arg) in step.args.iter().enumerate() {
        let exists = match *arg {
            Arg::Buffer(b, offset) => entry.buffers.get(b as usize).is_some_and(|b| {
                // Elements have four bytes.
                offset % 4 == 0 && u64::from(offset) + 4 <= b.bytes
            }),
            Arg::Segment(s) | Arg::Matrices(s) => (s as usize) < plan.segments.len(),
            Arg::State(s) => (s as usize) < plan.states.len(),
        };
        require(exists, at, || format!("argument {i} ({arg:?}) is out of range"))?;
    }
    match step.grid {
        Grid::One => {}
        Grid::Tiles { rows, tiles } => {
            require(rows > 0 && tiles > 0, at, || "an empty grid".into())?;
        }
        Grid::Experts { tiles, .. } => require(tiles > 0, at, || "an empty grid".into())?,
        Grid::Clusters { blocks, columns, .. } => {
            require(blocks > 0 && columns > 0, at, || "an empty grid".into())?;
            require(has_clusters(plan, step, blocks), at, || "clusters of other neurons".into())?;
        }
    }
    if let Some(table) = step.grid.table() {
        let is_table = match step.args.get(table as usize) {
            Some(&Arg::Buffer(b, _)) => entry.buffers.get(b as usize).is_some_and(|b| b.dtype == DType::I32),
            _ => false,
        };
        require(is_table, at, || format!("argument {table} is not a dispatch table"))?;
    }
    match step.code {
        Code::Kernel(k) => {
            require((k as usize) < plan.kernels.len(), at, || format!("kernel {k} is out of range"))?;
            check_results(plan, step, at)
        }
        Code::Builtin(Builtin::Launch { kernel }) => {
            require((kernel as usize) < plan.launches.len(), at, || {
                format!("launch {kernel} is out of range")
            })?;
            check_results(plan, step, at)
        }
        Code::Builtin(builtin) => {
            require(step.grid == Grid::One, at, || "a built-in function has one work item".into())?;
            let rows = match step.rows {
                RowSpace::Tokens => entry.kind.rows() as u32,
                RowSpace::Outputs => entry.out_rows,
            };
            let fits = builtin_fits(plan, entry, &step.args, builtin, rows)
                && has_own_results(&step.args, builtin.results());
            require(fits, at, || format!("arguments {:?} do not fit {builtin:?}", step.args))
        }
    }
}

/// Checks that a kernel's results are arguments of its step, and no weights.
fn check_results(plan: &Plan, step: &Step, at: impl Fn() -> String) -> Result<(), VerifyError> {
    let results = plan.results(step);
    let may = |arg: Option<&Arg>| matches!(arg, Some(Arg::Buffer(..) | Arg::State(_)));
    require(results.indices().all(|i| may(step.args.get(i))), at, || {
        format!("its kernel writes {results} of the arguments {:?}", step.args)
    })
}

/// Whether the last arguments, which a built-in function writes, are buffers that hold no other argument.
fn has_own_results(args: &[Arg], results: usize) -> bool {
    let operands = args.len().saturating_sub(results);
    (operands..args.len()).all(|i| match args[i] {
        Arg::Buffer(own, _) => !args[..i].iter().any(|a| matches!(a, Arg::Buffer(b, _) if *b == own)),
        Arg::Segment(_) | Arg::Matrices(_) | Arg::State(_) => false,
    })
}

/// Whether an argument is a buffer with room for a dispatch table after its offset.
fn holds_table(entry: &Entry, arg: &Arg, layout: DispatchLayout) -> bool {
    let Arg::Buffer(b, offset) = *arg else { return false };
    let bytes = layout.checked_words().and_then(|n| (n as u64).checked_mul(4));
    let end = bytes.and_then(|n| n.checked_add(u64::from(offset)));
    let table = entry.buffers.get(b as usize);
    table.zip(end).is_some_and(|(b, end)| b.dtype == DType::I32 && end <= b.bytes)
}

/// Whether the arguments of `request_gates` or `request_neurons` are a dispatch table, and perhaps the lists of a layer whose
/// neurons are read one by one.
fn has_active_lists(plan: &Plan, entry: &Entry, args: &[Arg], [layer, rows, k]: [u32; 3]) -> bool {
    let paging = plan.paging.as_ref().filter(|p| p.by_neurons());
    let Some(own) = paging.and_then(|p| p.layers.get(layer as usize)) else { return false };
    let Some(up_down) = plan.segments.get(own.down as usize) else { return false };
    let layout = DispatchLayout { rows: rows as usize, k: k as usize, experts: own.experts as usize };
    let lists = |arg: &Arg| {
        let Arg::Buffer(b, 0) = *arg else { return false };
        let words = active_list_words(layout, up_down.extents().1 as usize) as u64;
        let lists = entry.buffers.get(b as usize);
        lists.is_some_and(|b| b.dtype == DType::I32 && words.checked_mul(4).is_some_and(|n| n <= b.bytes))
    };
    // The table is checked first: its words fit what can be counted.
    let fits = |table: &Arg| (1..=own.k).contains(&k) && holds_table(entry, table, layout);
    match args {
        [table] => fits(table),
        [table, active_lists] => fits(table) && lists(active_lists),
        _ => false,
    }
}

/// Whether a step of so many blocks for each expert is one of the CPU on neurons on disk.
fn has_clusters(plan: &Plan, step: &Step, blocks: u32) -> bool {
    let Some(paging) = plan.paging.as_ref().filter(|p| p.by_neurons() && step.unit == 0) else {
        return false;
    };
    let is_own = |segment: u32| {
        let own = plan.segments.get(segment as usize).map(|s| s.extents().1 as usize);
        paging.layers.iter().any(|l| l.down == segment)
            && own.is_some_and(|inter| inter.div_ceil(BLOCK) == blocks as usize)
    };
    step.args.iter().any(|arg| matches!(*arg, Arg::Matrices(segment) if is_own(segment)))
}

/// Whether the arguments of a built-in function are of the kinds and sizes that it takes.
fn builtin_fits(plan: &Plan, entry: &Entry, args: &[Arg], builtin: Builtin, rows: u32) -> bool {
    // Whether an argument is a buffer of this type with room for `[rows, cols]` after its offset.
    let holds = |arg: Arg, dtype: DType, cols: Option<u32>| -> bool {
        let Arg::Buffer(b, offset) = arg else {
            return false;
        };
        let (Some(b), Some(cols)) = (entry.buffers.get(b as usize), cols) else {
            return false;
        };
        let end = extent(rows, b.stride, cols).and_then(|n| n.checked_add(u64::from(offset)));
        b.dtype == dtype && cols <= b.stride && end.is_some_and(|end| end <= b.bytes)
    };
    match builtin {
        Builtin::RopeAngles { half, long, .. } => {
            let is_table =
                |s: &Segment| s.format == Format::F32 && s.layout == Layout::Rows && s.shape == [half];
            let table = |arg: &Arg| match *arg {
                Arg::Segment(s) => plan.segments.get(s as usize).is_some_and(is_table),
                _ => false,
            };
            let [pos, tables @ .., out] = args else {
                return false;
            };
            let expected = if long.is_some() { 2 } else { 1 };
            tables.len() == expected
                && tables.iter().all(table)
                && holds(*pos, DType::I32, Some(1))
                && holds(*out, DType::F32, half.checked_mul(2))
        }
        Builtin::Dispatch { rows: table_rows, k, experts, candidates, .. } => {
            let [ids, tables @ ..] = args else {
                return false;
            };
            let layout =
                DispatchLayout { rows: table_rows as usize, k: k as usize, experts: experts as usize };
            let units = candidates.map_or(0, |c| c.units as usize);
            let known = candidates.is_none_or(|Candidates { layer, .. }| {
                let of = plan.experts.layers.get(layer as usize);
                of.is_some_and(|l| l.units.len() == units && l.starts.len() == experts as usize)
            });
            // Words of a table are i32, and the choices of all its rows are looked at.
            let slots = table_rows.checked_mul(k).filter(|&n| i32::try_from(n).is_ok());
            let has_slots = |slots: u32| match *ids {
                Arg::Buffer(b, offset) => entry
                    .buffers
                    .get(b as usize)
                    .is_some_and(|b| u64::from(slots) * 4 + u64::from(offset) <= b.bytes),
                _ => false,
            };
            k > 0
                && experts > 0
                && i32::try_from(experts).is_ok()
                && slots.is_some_and(has_slots)
                && table_rows >= rows
                && holds(*ids, DType::I32, Some(k))
                && known
                && tables.len() == 1 + units
                && tables.iter().all(|t| holds_table(entry, t, layout))
        }
        Builtin::Copy { words, span } => {
            let (table, ends) = match (span, args) {
                (Span::Slots { .. }, [table, ends @ ..]) => (Some(table), ends),
                _ => (None, args),
            };
            let [from, to] = ends else { return false };
            // Whether a buffer has room for this many rows, or for all in one.
            let whole = |arg: &Arg, rows: u32| match *arg {
                Arg::Buffer(b, 0) => entry.buffers.get(b as usize).is_some_and(|b| {
                    let bytes = u64::from(rows).checked_mul(u64::from(words) * 4);
                    bytes.is_some_and(|n| n <= b.bytes)
                }),
                _ => false,
            };
            let most = match span {
                Span::Rows => Some(rows),
                Span::Whole => Some(1),
                Span::Slots { rows, k, .. } => rows.checked_mul(k),
            };
            let table_fits = match (span, table) {
                (Span::Slots { rows, k, experts }, Some(table)) => {
                    let layout =
                        DispatchLayout { rows: rows as usize, k: k as usize, experts: experts as usize };
                    k > 0 && holds_table(entry, table, layout)
                }
                _ => true,
            };
            words > 0 && table_fits && most.is_some_and(|n| whole(from, n) && whole(to, n))
        }
        Builtin::RequestExperts { layer, rows: table_rows, k, strides } => {
            let layers = plan.requested_layers();
            let Some(ahead) = layers.get(layer as usize..) else { return false };
            let [scores @ .., Arg::Buffer(table, offset)] = args else { return false };
            let Some(&(experts, most)) = ahead.first() else { return false };
            let layout =
                DispatchLayout { rows: table_rows as usize, k: k as usize, experts: experts as usize };
            let bytes = layout.checked_words().and_then(|n| (n as u64).checked_mul(4));
            let end = bytes.and_then(|n| n.checked_add(u64::from(*offset)));
            let table = entry.buffers.get(*table as usize);
            let scored = |((arg, stride), &(experts, _)): ((&Arg, &u32), &(u32, u32))| match *arg {
                Arg::Buffer(b, _) => {
                    entry.buffers.get(b as usize).is_some_and(|b| b.stride == *stride)
                        && holds(*arg, DType::F32, Some(experts))
                }
                _ => false,
            };
            !scores.is_empty()
                && (1..=most).contains(&k)
                && scores.len() <= strides.len().min(ahead.len())
                && strides[scores.len()..].iter().all(|&s| s == 0)
                && table_rows >= rows
                && scores.iter().zip(&strides).zip(ahead).all(scored)
                && table.zip(end).is_some_and(|(b, end)| b.dtype == DType::I32 && end <= b.bytes)
        }
        Builtin::RequestNeurons { layer, rows: table_rows, k } => {
            table_rows >= rows && has_active_lists(plan, entry, args, [layer, table_rows, k])
        }
        Builtin::LimitCapacity { set, k, channels } => {
            let [ids, added, stay, rest] = args else {
                return false;
            };
            k > 0
                && plan
                    .expert_sets
                    .get(set as usize)
                    .is_some_and(|s| s.hot.is_none() && s.is_called(entry.kind, rows))
                && holds(*added, DType::F32, Some(channels))
                && [ids, stay, rest].iter().all(|&&a| holds(a, DType::I32, Some(k)))
        }
        Builtin::Streams { set, rows: table_rows, k } => {
            let Some(set) = plan.streams.get(set as usize) else { return false };
            let [x, table, gate_up, down, biases @ .., Arg::Buffer(y, 0)] = args else { return false };
            let (experts, hidden, inner) = (set.experts, set.hidden, set.inner);
            let matrices = |arg: &Arg, shape: [u32; 3]| match *arg {
                Arg::Matrices(i) => plan.segments.get(i as usize).is_some_and(|s| s.shape == shape),
                _ => false,
            };
            let vectors = |arg: &Arg, shape: [u32; 2]| match *arg {
                Arg::Segment(i) => plan
                    .segments
                    .get(i as usize)
                    .is_some_and(|s| (s.format, s.layout) == (Format::F32, Layout::Rows) && s.shape == shape),
                _ => false,
            };
            let Some(both) = inner.checked_mul(2) else { return false };
            let biased = match (set.bias, biases) {
                (false, []) => true,
                (true, [a, b]) => vectors(a, [experts, both]) && vectors(b, [experts, hidden]),
                _ => false,
            };
            let layout =
                DispatchLayout { rows: table_rows as usize, k: k as usize, experts: experts as usize };
            let slots = table_rows.checked_mul(k).filter(|&n| i32::try_from(n).is_ok());
            let wide = |b: &Buffer, slots: u32| {
                let bytes = extent(slots, hidden, hidden);
                b.dtype == DType::F32 && b.stride == hidden && bytes.is_some_and(|n| n <= b.bytes)
            };
            k > 0
                && table_rows >= rows
                && biased
                && matrices(gate_up, [experts, both, hidden])
                && matrices(down, [experts, hidden, inner])
                && holds(*x, DType::F32, Some(hidden))
                && matches!(*x, Arg::Buffer(b, 0) if entry.buffers[b as usize].stride == hidden)
                && holds_table(entry, table, layout)
                && slots.is_some_and(|n| entry.buffers.get(*y as usize).is_some_and(|b| wide(b, n)))
        }
        // The kernel determines the arguments and the blocks of its launch.
        Builtin::Launch { .. } => true,
        Builtin::Subgraph { subgraph: part } => {
            let Some(part) = plan.subgraphs.get(part as usize) else { return false };
            // A graph takes the rows of a call at once; where they are sequences of their own, one of them.
            let at_once = if part.attention.is_some_and(|a| a.one_call_per_row) { 1 } else { rows };
            let takes = |&g: &u32| {
                let graph = plan.graphs.get(g as usize);
                graph.is_some_and(|d| d.inputs.iter().any(|i| i.name == "x" && i.shape[0] >= at_once))
            };
            if !part.graphs.iter().all(takes) {
                return false;
            }
            let own = |cols: u32| move |arg: &Arg| holds(*arg, DType::F32, Some(cols));
            let one = |arg: &Arg| holds(*arg, DType::I32, Some(1));
            let (x, y) = (own(part.inputs), own(part.outputs));
            match (part.attention, args) {
                (None, [a, b]) => x(a) && y(b),
                (Some(t), [a, pos, slot, b]) if t.angles == 0 => x(a) && one(pos) && one(slot) && y(b),
                (Some(t), [a, angles, pos, slot, b]) if t.angles > 0 => {
                    x(a) && own(t.angles)(angles) && one(pos) && one(slot) && y(b)
                }
                _ => false,
            }
        }
        Builtin::Experts { set, rows: table_rows, k, hidden } => {
            let [x, Arg::Buffer(table, offset), y] = args else {
                return false;
            };
            let Some(set) = plan.expert_sets.get(set as usize) else { return false };
            let layout =
                DispatchLayout { rows: table_rows as usize, k: k as usize, experts: set.capacities.len() };
            let bytes = layout.checked_words().and_then(|n| (n as u64).checked_mul(4));
            let end = bytes.and_then(|n| n.checked_add(u64::from(*offset)));
            let table = entry.buffers.get(*table as usize);
            let takes = |g: &crate::plan::GraphGroup| {
                plan.graphs.get(g.graph as usize).is_some_and(|d| d.inputs[0].shape[1] == hidden)
            };
            let slots = table_rows.checked_mul(k);
            let called = set.is_called(entry.kind, rows) && (set.hot.is_none() || table_rows == rows);
            let y = match *y {
                Arg::Buffer(y, 0) => entry.buffers.get(y as usize),
                _ => None,
            };
            k > 0
                && called
                && table_rows >= rows
                && set.groups.iter().all(takes)
                && holds(*x, DType::F32, Some(hidden))
                && table.zip(end).is_some_and(|(b, end)| b.dtype == DType::I32 && end <= b.bytes)
                && y.zip(slots).is_some_and(|(b, slots)| {
                    b.dtype == DType::F32 && b.stride == hidden && b.rows >= slots && {
                        u64::from(slots).checked_mul(u64::from(hidden) * 4).is_some_and(|n| n <= b.bytes)
                    }
                })
        }
    }
}
