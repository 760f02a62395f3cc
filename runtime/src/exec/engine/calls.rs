//! Calls of entry points: tokens in, logits out.

use super::{Engine, LogitRows, Row};
use crate::bundle::program::Program;
use crate::error::{Error, Result};
use crate::exec::call::{Extent, Threads, Walk};
use crate::exec::unit::{BadExpert, StepFault, Units};
use crate::offload::paging::AnyPager;
use crate::platform::memory::Region;
use moec_ir::op::NO_EXPERT;
use moec_ir::plan::{Arg, Builtin, Code, Entry, Plan};
use moec_ir::{EntryKind, FEW_ROWS};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

/// Callback for the rows of a call: the engine, the entry point, and the rows of the batch that it computed.
type After<'a, 'p> = dyn FnMut(&mut Engine<'p>, usize, Range<usize>) -> Result<()> + 'a;

impl<'p> Engine<'p> {
    /// Appends `ids` to the sequence in `slot` at position `start`, in chunks as large as the entry points
    /// allow. Tokens at `start` and later are replaced, with the limits of [`Engine::rewind`].
    ///
    /// `sink` gets the position in the sequence and the logits (`f32[vocab]`) of every row that `logit_rows`
    /// names, in order. Its error ends the work.
    ///
    /// # Errors
    /// Before any work: an empty prompt, an id outside of the vocabulary, more tokens than the context holds,
    /// a slot that does not exist, a hole before `start`, a state that cannot go back to it. Later:
    /// [`Error::Interrupted`], a router that chooses an invalid expert, and errors of `sink`.
    pub fn prefill(
        &mut self,
        slot: u32,
        start: usize,
        ids: &[u32],
        logit_rows: LogitRows,
        sink: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.prefill_part(slot, start, ids, start.saturating_add(ids.len()), logit_rows, sink)
    }

    /// As [`Engine::prefill`], for a part of a prompt of `whole` tokens: rows get the same position angles as
    /// if the prompt were read in one call.
    ///
    /// # Errors
    /// As [`Engine::prefill`].
    pub fn prefill_part(
        &mut self,
        slot: u32,
        start: usize,
        ids: &[u32],
        whole: usize,
        logit_rows: LogitRows,
        sink: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let room = |e: &Entry| match logit_rows {
            LogitRows::All => e.kind.rows().min(e.out_rows as usize),
            LogitRows::None | LogitRows::Last => e.kind.rows(),
        };
        if ids.is_empty() {
            return Err(Error::empty_prompt());
        }
        let what = if start == 0 { "the prompt has" } else { "the sequence would have" };
        self.check_context(what, start.saturating_add(ids.len()))?;
        ids.iter().try_for_each(|&id| self.check_id(id))?;
        self.states.check_rewind(slot, start)?;
        if self.last.is_some() {
            self.begin_preload();
        }
        let prefill = |k| matches!(k, EntryKind::Prefill(_));
        let seq_len = whole.max(start + ids.len());
        let mut done = 0;
        while done < ids.len() {
            let left = ids.len() - done;
            let (entry, room) = self.pick(prefill, room, left).ok_or_else(|| Error::no_entry("prefill"))?;
            let n = left.min(room);
            let rows = (done..done + n).map(|i| Row { slot, pos: start + i, id: ids[i] });
            let logit_range = match logit_rows {
                LogitRows::All => 0..n,
                LogitRows::Last if done + n == ids.len() => n - 1..n,
                LogitRows::None | LogitRows::Last => 0..0,
            };
            self.call(entry, rows, logit_range.clone(), seq_len)?;
            for (i, row) in logit_range.enumerate() {
                sink(start + done + row, self.logits(entry, i))?;
            }
            done += n;
        }
        self.warn_of_overflow();
        Ok(())
    }

    /// Appends one token to each of the sequences in `batch` (`slot`, position, id). Uses the smallest decode
    /// entry point that takes them all, or several calls of the largest. `sink` gets the index in the batch
    /// and the logits (`f32[vocab]`) of each, in order.
    ///
    /// # Errors
    /// As [`Engine::prefill`]; also a slot that the batch names twice.
    pub fn decode(
        &mut self,
        batch: &[(u32, usize, u32)],
        sink: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.decode_in(EntryKind::Decode, batch, &mut |engine, entry, rows| {
            engine.in_order(entry, rows, sink)
        })
    }

    /// As [`Engine::decode`], in the little entry points, whose routers choose fewer experts. Decoding the
    /// same position again replaces their values in the states. If a state needs a snapshot for that, one is
    /// taken.
    ///
    /// # Errors
    /// As [`Engine::decode`] and [`Engine::snapshot`]; a program without little entry points.
    pub fn decode_little(
        &mut self,
        batch: &[(u32, usize, u32)],
        sink: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.decode_in(EntryKind::Little, batch, &mut |engine, entry, rows| {
            engine.in_order(entry, rows, sink)
        })
    }

    /// As [`Engine::decode`] or [`Engine::decode_little`], by the kind of entry points; `sink` runs on the
    /// engine's threads, for several rows at once and in any order.
    ///
    /// # Errors
    /// As [`Engine::decode_little`].
    pub(crate) fn decode_on_threads(
        &mut self,
        kind: fn(u32) -> EntryKind,
        batch: &[(u32, usize, u32)],
        sink: &(dyn Fn(usize, &[f32]) + Sync),
    ) -> Result<()> {
        self.decode_in(kind, batch, &mut |engine, entry, rows| {
            engine.on_threads(entry, rows, sink);
            Ok(())
        })
    }

    /// Appends several tokens to the sequence in `slot` in one call, from position `start` on. Uses the
    /// smallest decode entry point with enough rows whose kernels treat inputs as those for one row do
    /// ([`FEW_ROWS`]). `sink` gets the index and the logits (`f32[vocab]`) of each, in order. Tokens at
    /// `start` and later are replaced. Kernels for several rows sum in another order than those for one.
    ///
    /// # Errors
    /// As [`Engine::prefill`]; more tokens than [`Engine::most_rows`].
    pub fn extend(
        &mut self,
        slot: u32,
        start: usize,
        ids: &[u32],
        sink: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.check_context("the sequence would have", start.saturating_add(ids.len()))?;
        ids.iter().try_for_each(|&id| self.check_id(id))?;
        self.states.check_rewind(slot, start)?;
        let room = |e: &Entry| e.kind.rows().min(e.out_rows as usize);
        let found = self.pick(extends, room, ids.len()).filter(|&(_, room)| room >= ids.len());
        let (entry, _) = found.ok_or_else(|| Error::no_entry("wide enough decode"))?;
        let rows = ids.iter().enumerate().map(|(i, &id)| Row { slot, pos: start + i, id });
        // For every row the sequence ends with it, as if it were decoded alone.
        self.call(entry, rows, 0..ids.len(), 0)?;
        (0..ids.len()).try_for_each(|i| sink(i, self.logits(entry, i)))
    }

    /// Most tokens that [`Engine::extend`] takes.
    pub fn most_rows(&self) -> usize {
        most_rows(self.program)
    }

    /// Decodes in the entry points of one kind. After each call, `after` gets the entry point and the rows of
    /// the batch that it computed. The first of these rows has its logits in row 0 of the entry point.
    fn decode_in(
        &mut self,
        kind: fn(u32) -> EntryKind,
        batch: &[(u32, usize, u32)],
        after: &mut After<'_, 'p>,
    ) -> Result<()> {
        for (i, &(slot, pos, id)) in batch.iter().enumerate() {
            self.check_context("the sequence would have", pos.saturating_add(1))?;
            self.check_id(id)?;
            self.states.check_rewind(slot, pos)?;
            if batch[..i].iter().any(|&(other, ..)| other == slot) {
                return Err(Error::slot_twice(slot));
            }
        }
        self.begin_preload();
        if matches!(kind(0), EntryKind::Little(_)) {
            self.states.keep(batch.iter().map(|&(slot, pos, _)| (slot, pos)), Units(&self.units))?;
        }
        let decode = |k: EntryKind| k == kind(k.rows() as u32);
        let room = |e: &Entry| e.kind.rows().min(e.out_rows as usize);
        let mut done = 0;
        while done < batch.len() {
            let left = batch.len() - done;
            let (entry, room) =
                self.pick(decode, room, left).ok_or_else(|| Error::no_entry(kind(0).name()))?;
            let n = left.min(room);
            let rows = batch[done..done + n].iter().map(|&(slot, pos, id)| Row { slot, pos, id });
            // Every row is a sequence of its own, which ends with it.
            self.call(entry, rows, 0..n, 0)?;
            after(self, entry, done..done + n)?;
            done += n;
        }
        Ok(())
    }

    /// Passes the logits of the last call's rows to `sink`, numbered from `rows.start` on.
    fn in_order(
        &self,
        entry: usize,
        rows: Range<usize>,
        sink: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        rows.clone().try_for_each(|row| sink(row, self.logits(entry, row - rows.start)))
    }

    /// As [`Engine::in_order`], on all threads.
    fn on_threads(&mut self, entry: usize, rows: Range<usize>, sink: &(dyn Fn(usize, &[f32]) + Sync)) {
        let Self { program, arena, pool, .. } = self;
        let threads = pool.threads().min(rows.len());
        let walk = |thread: usize| {
            for i in (thread..rows.len()).step_by(threads) {
                sink(rows.start + i, logits(program, arena, entry, i));
            }
        };
        if threads > 1 {
            pool.run(&|thread, _| {
                if thread < threads {
                    walk(thread);
                }
            });
        } else {
            walk(0);
        }
    }

    /// Smallest entry point of a kind that takes `left` rows, else the largest; and its number of rows.
    fn pick(
        &self,
        kind: impl Fn(EntryKind) -> bool,
        room: impl Fn(&Entry) -> usize,
        left: usize,
    ) -> Option<(usize, usize)> {
        let of_kind = || {
            let entries = self.program.entries.iter().enumerate().filter(|(_, e)| kind(e.kind));
            entries.map(|(i, e)| (i, room(e)))
        };
        let enough = of_kind().filter(|(_, room)| *room >= left).min_by_key(|(_, room)| *room);
        enough.or_else(|| of_kind().max_by_key(|(_, room)| *room))
    }

    fn check_context(&self, what: &'static str, needed: usize) -> Result<()> {
        let max = self.program.model.max_context as usize;
        if needed > max { Err(Error::context(what, needed, max)) } else { Ok(()) }
    }

    fn check_id(&self, id: u32) -> Result<()> {
        let vocab = self.program.model.vocab;
        if id >= vocab { Err(Error::bad_id(id, vocab)) } else { Ok(()) }
    }

    /// Runs an entry point on all threads. The CPU allocates nothing, unless there are more rows than the
    /// entry point has or an expert moves.
    fn call(
        &mut self,
        entry: usize,
        rows: impl Iterator<Item = Row>,
        logit_range: Range<usize>,
        seq_len: usize,
    ) -> Result<()> {
        if self.stop.is_some_and(|s| s.load(Ordering::Relaxed)) {
            return Err(Error::Interrupted);
        }
        self.follow()?;
        let mut kept = std::mem::take(&mut self.rows);
        kept.clear();
        kept.extend(rows);
        let done = self.walk(entry, &kept, logit_range, seq_len);
        self.rows = kept;
        done
    }

    fn walk(&mut self, entry: usize, rows: &[Row], logit_range: Range<usize>, seq_len: usize) -> Result<()> {
        let extent = self.begin(entry, rows, logit_range, seq_len)?;
        self.enter(entry)?;
        let fault = OnceLock::new();
        let walk = Walk {
            bound: &self.bound[entry],
            units: &self.units,
            taken: &self.taken,
            events: &self.events,
            fault: &fault,
            extent,
            progress: self.store.load_progress().filter(|a| !a.is_complete()),
            assigner: self.assigner.as_deref(),
            timeline: self.timeline.as_deref().map(|t| (t, entry as u32)),
        };
        let threads = Threads {
            on_cpu: self.pool.threads(),
            scratch: (self.scratch.base(), self.scratch_stride),
            accelerators: &self.unit_threads,
            queues: self.assigner.as_ref().map_or([None; 2], |a| a.queues()),
        };
        threads.queues.iter().flatten().for_each(|(queue, _)| queue.open());
        self.pool.run(&|index, barrier| {
            // SAFETY: the program is verified, and `begin` has checked the rows. All threads of the pool walk
            // the same steps, each with its own part of the scratch. `&mut self` excludes every other use of
            // the memory.
            unsafe { threads.walk(&walk, 0..walk.bound.len(), index, barrier) }
        });
        self.end(entry, rows, fault.into_inner())
    }

    /// Announces the entry point of a call to the units, if it is not the last call's. Where artifacts are
    /// loaded and freed, the border between them and the cache moves first: what shrinks does so before the
    /// other grows.
    fn enter(&mut self, entry: usize) -> Result<()> {
        let read = self.pager.as_ref().map_or(0, AnyPager::bytes_read);
        let (regions, moved) = match self.border.as_mut().and_then(|border| border.enter(entry, read)) {
            Some((regions, moved)) => (Some(regions), moved),
            None => (None, false),
        };
        if self.last.replace(entry) == Some(entry) && !moved {
            return Ok(());
        }
        let prepare = |engine: &Self| {
            let memory = regions.map(|regions| regions.graphs);
            engine.units.iter().flatten().for_each(|unit| unit.prepare(entry, memory));
        };
        match (&self.pager, regions.filter(|_| moved)) {
            (Some(pager), Some(regions)) if pager.shrinks_to(regions.frames) => {
                pager.resize(regions.frames)?;
                prepare(self);
                Ok(())
            }
            (Some(pager), Some(regions)) => {
                prepare(self);
                pager.resize(regions.frames)
            }
            _ => {
                prepare(self);
                Ok(())
            }
        }
    }

    /// Writes the inputs of an entry point, and padding after them.
    pub(crate) fn begin(
        &mut self,
        entry: usize,
        rows: &[Row],
        logit_range: impl Iterator<Item = usize> + Clone,
        seq_len: usize,
    ) -> Result<Extent> {
        let outputs = logit_range.clone().count();
        let e = self.program.entries.get(entry).ok_or_else(|| Error::no_entry("such"))?;
        if rows.len() > e.kind.rows()
            || outputs > e.out_rows as usize
            || logit_range.clone().any(|w| w >= rows.len())
        {
            return Err(Error::plan(format!(
                "{} does not take {} rows and {} outputs",
                e.kind,
                rows.len(),
                outputs
            )));
        }
        let (kind, out_rows) = (e.kind, e.out_rows as usize);
        for row in rows {
            self.check_id(row.id)?;
            self.check_context("the sequence would have", row.pos.saturating_add(1))?;
            let slots = self.program.model.slots;
            if row.slot >= slots {
                return Err(Error::bad_slot(row.slot, slots));
            }
        }
        self.states.begin(rows.iter().map(|row| (row.slot, row.pos)), Units(&self.units))?;
        self.write(entry, 0, kind.rows(), 0, rows.iter().map(|r| r.id as i32));
        self.write(entry, 1, kind.rows(), -1, rows.iter().map(|r| r.pos as i32));
        self.write(entry, 2, kind.rows(), 0, rows.iter().map(|r| r.slot as i32));
        self.write(entry, 3, out_rows, -1, logit_range.map(|w| w as i32));
        self.taken.iter().for_each(|t| t.store(0, Ordering::Relaxed));
        let threads = self.pool.threads();
        self.events.reset(self.bound[entry].events().iter().map(|&unit| if unit == 0 { threads } else { 1 }));
        Ok(Extent { n: rows.len(), m: outputs, seq_len })
    }

    /// Fills an input buffer with `words` words: the values, then padding.
    fn write(
        &mut self,
        entry: usize,
        buffer: usize,
        words: usize,
        pad: i32,
        values: impl Iterator<Item = i32>,
    ) {
        let at = self.arena.base().plus(self.program.entries[entry].buffers[buffer].offset as usize);
        let at = at.of::<i32>();
        for (i, value) in values.chain(std::iter::repeat(pad)).take(words).enumerate() {
            // SAFETY: the verifier has found `words` aligned words in the buffer, and `&mut self` ensures
            // that no step is running.
            unsafe { at.add(i).write(value) };
        }
    }

    /// Updates the states after a call of an entry point, or reports its fault.
    pub(crate) fn end(&mut self, entry: usize, rows: &[Row], fault: Option<StepFault>) -> Result<()> {
        if let Some(fault) = fault {
            return Err(fault.error(self.program, entry));
        }
        self.states.end(rows.iter().map(|row| (row.slot, row.pos)));
        Ok(())
    }

    /// A row of the logits of the last call of an entry point.
    fn logits(&self, entry: usize, row: usize) -> &[f32] {
        logits(self.program, &self.arena, entry, row)
    }
}

impl StepFault {
    /// The error of a call of an entry point that ended with this fault.
    pub(crate) fn error(self, plan: &Plan, entry: usize) -> Error {
        match self {
            Self::Expert(BadExpert { step, expert: NO_EXPERT, .. }) => {
                let router = layer_of(plan, entry, step)
                    .map_or_else(|| "a router".to_owned(), |layer| format!("the router of layer {layer}"));
                let what = format!("{router} cannot choose experts: its scores are not numbers (NaN)");
                Error::model(what).with_hint(
                    "numbers before it have overflowed, or weights are NaN: `moec verify` compares the bundle with its checkpoint; with \
                     `activations = \"f32\"` under `[weights]` in `model.toml` fewer overflow",
                )
            }
            Self::Expert(BadExpert { step, expert, experts }) => {
                Error::model(format!("a router chose expert {expert} of {experts} (step {step})"))
            }
            Self::Unknown(unknown) => unknown.into(),
            Self::Unit(e) | Self::Disk(e) | Self::Weights(e) => e,
        }
    }
}

/// A row of the logits that the last call of an entry point has left in an engine's arena.
fn logits<'a>(program: &Program, arena: &'a Region, entry: usize, row: usize) -> &'a [f32] {
    let e = &program.entries[entry];
    let logits = &e.buffers[e.logits as usize];
    assert!(row < e.out_rows as usize, "a row of the outputs");
    let at = arena.base().plus(logits.offset as usize);
    // SAFETY: the verifier has found room for `out_rows` rows, and the arena is initialised memory. Only
    // calls of the engine write to it, and these borrow it mutably.
    unsafe {
        let first = at.of::<f32>().add(row * logits.stride as usize);
        std::slice::from_raw_parts(first, program.model.vocab as usize)
    }
}

/// Layer of the model that a step of an entry point belongs to, by the names of earlier steps' weights.
fn layer_of(plan: &Plan, entry: usize, step: usize) -> Option<u32> {
    let steps = plan.entries.get(entry)?.steps.get(..step)?;
    let layer = |arg: &Arg| match arg {
        Arg::Segment(s) => {
            let name = plan.segments.get(*s as usize)?.name.strip_prefix("layers.")?;
            name.split('.').next()?.parse().ok()
        }
        _ => None,
    };
    steps.iter().rev().flat_map(|s| &s.args).find_map(layer)
}

/// Long-RoPE threshold: prompts of more tokens use the long frequency factors. `None` without LongRoPE.
pub(crate) fn long_rope_threshold(plan: &Plan) -> Option<usize> {
    let steps = plan.entries.iter().flat_map(|e| &e.steps);
    let thresholds = steps.filter_map(|s| match s.code {
        Code::Builtin(Builtin::RopeAngles { long: Some((after, _)), .. }) => Some(after as usize),
        _ => None,
    });
    thresholds.min()
}

/// Whether an entry point decodes, with kernels that treat inputs as those for one row do.
fn extends(kind: EntryKind) -> bool {
    matches!(kind, EntryKind::Decode(_)) && kind.rows() <= FEW_ROWS
}

/// Rows of the widest entry point of a plan that [`Engine::extend`] calls.
pub(crate) fn most_rows(plan: &Plan) -> usize {
    let decode = plan.entries.iter().filter(|e| extends(e.kind));
    decode.map(|e| e.kind.rows().min(e.out_rows as usize)).max().unwrap_or(0)
}
