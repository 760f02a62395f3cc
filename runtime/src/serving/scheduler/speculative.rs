//! Several tokens of one sequence in a call: draft tokens from the text itself, verified by the model.
//! `speculate.rs` defines the drafts, and which choices count.
//!
//! A sequence that decodes alone takes draft tokens. Together with others it gets one token per step, since
//! the rows of a step are then used by the others.

use super::model::Model;
use super::{Choice, Id, Inner, Sink, pick};
use crate::error::{Error, Result};
use crate::serving::speculate::{is_clear_maximum, prompt_lookup};

impl<M: Model> Inner<'_, M> {
    /// Decodes a sequence that runs alone, with draft tokens; `false` if there are none, or if no choice
    /// counts: its next token is then decoded plainly.
    pub(super) fn decode_speculatively(
        &mut self,
        row: (Id, u32, usize, u32),
        sink: &mut Sink<'_>,
    ) -> Result<bool> {
        let (id, slot, pos, last) = row;
        let Self { model, live, core, speculated: did, .. } = self;
        let Some(of) = live.get(&id).filter(|of| of.draft_tokens > 0) else { return Ok(false) };
        // The last of the remaining tokens needs no draft.
        let most = of.draft_tokens.min(model.max_draft_tokens()).min(of.left.saturating_sub(1));
        // At the end of a chunk there must be a snapshot.
        let left = core.chunk() - 1 - pos % core.chunk();
        let most = if model.kv_capabilities().snapshots { most.min(left) } else { most };
        let mut ids = vec![last];
        ids.extend_from_slice(prompt_lookup(core.text(id), most));
        if ids.len() == 1 {
            did.single_token_calls += 1;
            return Ok(false);
        }
        did.calls += 1;
        did.draft_tokens += ids.len() - 1;
        let ends = of.end.clone();
        let (mut open, mut chosen) = (true, Vec::new());
        let called = model.extend(slot, pos, &ids, &mut |i, logits| {
            if !open {
                return;
            }
            if !is_clear_maximum(logits) {
                open = false;
                did.close_choices += 1;
                return;
            }
            let choice = pick(live.get_mut(&id), logits);
            open = matches!(&choice, Choice::Token { id, ended: false, .. } if !ends.contains(id) && ids.get(i + 1) == Some(id));
            did.accepted += usize::from(open);
            chosen.push(choice);
        });
        match called {
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            // A draft token may be the cause: decoding the last token alone shows whether the sequence fails.
            Err(_) => return Ok(false),
            Ok(()) => {}
        }
        // The token after the last one that counts is computed by the next call, which replaces what is
        // there.
        if let Err(e) = model.take_back(slot, pos, &ids[..chosen.len()]) {
            return self.fail(id, e, sink).map(|()| true);
        }
        if (pos + chosen.len()).is_multiple_of(core.chunk()) {
            model.snapshot(slot);
        }
        if chosen.is_empty() {
            did.single_token_calls += 1;
            return Ok(false);
        }
        self.counters.decodes += 1;
        self.counters.rows += ids.len() as u64;
        for choice in chosen {
            self.core.decoded([id].into_iter());
            self.book(id, choice, sink)?;
        }
        Ok(true)
    }
}
