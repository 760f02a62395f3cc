//! Model that a scheduler calls: an engine, or a toy in tests.

use super::slots::{KvCapabilities, Sharing};
use crate::bundle::program::Program;
use crate::error::{Error, Result};
use crate::exec::engine::{self, Engine, LogitRows};
use crate::kv::unsupported;
use crate::serving::big_little::Decoder;
use moec_ir::EntryKind;

/// Computes tokens in slots.
pub(super) trait Model {
    /// KV capabilities of its states.
    fn kv_capabilities(&self) -> KvCapabilities;

    /// Brings a slot to the first `keep` tokens of the contents of `from`, or of its own. Returns how many of
    /// these it has: fewer if its states cannot go back so far.
    fn place(&mut self, slot: u32, from: Option<u32>, keep: usize) -> Result<usize>;

    /// The largest position of a slot, up to `most`, that it can go back to, or that a sequence can be copied
    /// from and continue at.
    fn resumes(&self, slot: u32, most: usize) -> usize;

    /// Makes a snapshot of a slot's current position, if its states need one and allow it.
    fn snapshot(&mut self, slot: u32);

    /// Appends a chunk of a prompt of `whole` tokens; `sink`, if any, gets the logits after it.
    fn prompt(
        &mut self,
        slot: u32,
        start: usize,
        ids: &[u32],
        whole: usize,
        logit_rows: LogitRows,
        sink: &mut dyn FnMut(&[f32]),
    ) -> Result<()>;

    /// Appends a token to each of several sequences (slot, position, token); `sink` gets the index of the row
    /// and the logits after it, for several rows at once and in any order.
    fn decode(&mut self, rows: &[(u32, usize, u32)], sink: &(dyn Fn(usize, &[f32]) + Sync)) -> Result<()>;

    /// Maximum number of tokens that [`Model::extend`] takes after the first one.
    fn max_draft_tokens(&self) -> usize;

    /// Appends several tokens to a sequence in one call, some of which may be taken back. `sink` gets the
    /// index and the logits of each, in order.
    fn extend(
        &mut self,
        slot: u32,
        pos: usize,
        ids: &[u32],
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()>;

    /// Takes back what [`Model::extend`] has appended at `pos`, except its first tokens, `ids`.
    fn take_back(&mut self, slot: u32, pos: usize, ids: &[u32]) -> Result<()>;
}

/// An engine with its decoder.
pub(super) struct Served<'e, 'p> {
    pub(super) engine: &'e mut Engine<'p>,
    pub(super) decoder: &'e mut Decoder,
    pub(super) exact: bool,
    pub(super) sharing: Option<Sharing>,
}

/// Sharing between sequences of a program, and the capabilities of its states. `reduced`: decoding leaves
/// keys and values that fewer experts have computed.
fn kv_capabilities(program: &Program, exact: bool, reduced: bool) -> KvCapabilities {
    let prefill = |k: EntryKind| matches!(k, EntryKind::Prefill(_)).then(|| k.rows());
    let chunk = program.entries.iter().filter_map(|e| prefill(e.kind)).max().unwrap_or(1);
    let sharing = if !program.experts.policy.is_fixed() {
        // Units round differently, and the unit of an expert depends on earlier steps.
        Sharing::None
    } else if exact || reduced || !program.expert_sets.is_empty() {
        // The tokens that a chunk's experts drop depend on the whole chunk. Answers with fewer experts are
        // approximations, which no other sequence may continue: prompts are computed with all experts.
        Sharing::Chunks
    } else {
        Sharing::All
    };
    let fork = unsupported::check_fork(program).is_ok();
    let snapshots = program.states.iter().any(|s| s.kind.needs_snapshots());
    KvCapabilities {
        sharing,
        chunk,
        long_rope_threshold: engine::long_rope_threshold(program),
        fork,
        snapshots,
    }
}

impl Model for Served<'_, '_> {
    fn kv_capabilities(&self) -> KvCapabilities {
        let capabilities = kv_capabilities(self.engine.program(), self.exact, self.decoder.is_reduced());
        KvCapabilities { sharing: self.sharing.unwrap_or(capabilities.sharing), ..capabilities }
    }

    fn place(&mut self, slot: u32, from: Option<u32>, keep: usize) -> Result<usize> {
        if keep > 0 {
            let done = match from {
                Some(from) => self.engine.fork(from, slot, keep),
                None => self.engine.rewind(slot, keep),
            };
            match done {
                Ok(()) => return Ok(keep),
                Err(Error::State { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        self.engine.reset(slot)?;
        Ok(0)
    }

    fn resumes(&self, slot: u32, most: usize) -> usize {
        self.engine.resumes(slot, most)
    }

    fn snapshot(&mut self, slot: u32) {
        // A snapshot that cannot be made is never used.
        drop(self.engine.snapshot(slot));
    }

    fn prompt(
        &mut self,
        slot: u32,
        start: usize,
        ids: &[u32],
        whole: usize,
        logit_rows: LogitRows,
        sink: &mut dyn FnMut(&[f32]),
    ) -> Result<()> {
        self.engine.prefill_part(slot, start, ids, whole, logit_rows, &mut |_, logits| {
            sink(logits);
            Ok(())
        })
    }

    fn decode(&mut self, rows: &[(u32, usize, u32)], sink: &(dyn Fn(usize, &[f32]) + Sync)) -> Result<()> {
        let together = if self.exact { 1 } else { rows.len() };
        for (i, rows) in rows.chunks(together.max(1)).enumerate() {
            self.decoder.decode(self.engine, rows, &|row, logits| sink(i * together + row, logits))?;
        }
        Ok(())
    }

    fn max_draft_tokens(&self) -> usize {
        let most = unsupported::max_draft_tokens(self.engine.program()).unwrap_or(0);
        if self.exact { 0 } else { most.min(self.engine.most_rows().saturating_sub(1)) }
    }

    fn extend(
        &mut self,
        slot: u32,
        pos: usize,
        ids: &[u32],
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        self.engine.keep(slot, pos)?;
        self.engine.extend(slot, pos, ids, &mut |i, logits| {
            sink(i, logits);
            Ok(())
        })
    }

    fn take_back(&mut self, slot: u32, pos: usize, ids: &[u32]) -> Result<()> {
        match self.engine.rewind(slot, pos + ids.len()) {
            // Recurrent states go back to the first of them, and the accepted ones are applied
            // again.
            Err(Error::State { .. }) => {
                self.engine.rewind(slot, pos)?;
                if ids.is_empty() { Ok(()) } else { self.engine.extend(slot, pos, ids, &mut |_, _| Ok(())) }
            }
            done => done,
        }
    }
}
