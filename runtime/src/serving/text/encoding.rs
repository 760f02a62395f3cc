//! Encoding of text to ids. A text with more tokens than a prompt may have is refused before it is fully
//! encoded: encoding takes hundreds of times the bytes of a text.

use super::bounded::timed;
use super::{Limit, Text};
use crate::error::{Error, Result};

/// Bytes per token of the limit up to which a text is encoded without counting its tokens first.
const UNCOUNTED_BYTES_PER_TOKEN: usize = 4;
/// Bytes of a piece, for counting tokens.
const PIECE: usize = 16 << 10;
/// Multiple of the limit that the tokens of all pieces must exceed: a text cut into pieces has other tokens
/// at the cuts.
const MARGIN: usize = 2;
/// Maximum number of bytes that a normalizer makes one: compatibility forms (NFKC) turn four into one.
const MAX_SHRINK: usize = 4;

impl Limit {
    fn refused(self) -> Error {
        Error::context("the prompt has at least", self.tokens + 1, self.tokens)
    }
}

impl Text {
    /// Sets a limit for [`Text::encode`] and similar methods: a text that certainly has more tokens is
    /// refused before it is encoded. One with slightly more may pass. `vocab`: number of ids of the model.
    #[must_use]
    pub fn at_most(mut self, tokens: usize, vocab: u32) -> Self {
        let bytes = |id| self.tokenizer.id_to_token(id).map_or(0, |token| token.len());
        let longest = (0..vocab).map(bytes).max().unwrap_or(0).max(1);
        let shrink = if self.tokenizer.get_normalizer().is_some() { MAX_SHRINK } else { 1 };
        self.limit = Some(Limit { tokens, longest: longest * shrink });
        self
    }

    /// Ids of a text.
    ///
    /// # Errors
    /// [`Error::Internal`]; [`Error::Limit`] if [`Text::at_most`] refuses the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.ids(text, true)?;
        let bos = self.bos.filter(|bos| ids.first() != Some(bos));
        Ok(bos.into_iter().chain(ids).collect())
    }

    /// Ids of a text that goes on from another: nothing is prepended.
    ///
    /// # Errors
    /// As [`Text::encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, false)
    }

    /// Ids of the parts of a text, each encoded by itself as [`Text::encode_plain`] does. The limit is for
    /// all of them together.
    ///
    /// # Errors
    /// As [`Text::encode`].
    pub fn encode_parts<'t>(&self, parts: impl Iterator<Item = &'t str>) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for part in parts {
            ids.extend(self.ids(part, false)?);
            if let Some(limit) = self.limit.filter(|limit| ids.len() > limit.tokens) {
                return Err(limit.refused());
            }
        }
        Ok(ids)
    }

    fn ids(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        if let Some(limit) = self.limit {
            self.check(text, limit)?;
        }
        let encoding = timed(|| self.tokenizer.encode_fast(text, special));
        Ok(encoding.map_err(Error::tokenizer)?.get_ids().to_vec())
    }

    /// Fails if a text certainly has more tokens than the limit: by its bytes, else by the tokens of its
    /// pieces.
    fn check(&self, text: &str, limit: Limit) -> Result<()> {
        if text.len() <= limit.tokens.saturating_mul(UNCOUNTED_BYTES_PER_TOKEN) {
            return Ok(());
        }
        if text.len() > limit.tokens.saturating_mul(limit.longest) {
            return Err(limit.refused());
        }
        let (mut rest, mut count) = (text, 0);
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE));
            let encoding = timed(|| self.tokenizer.encode_fast(piece, false));
            count += encoding.map_err(Error::tokenizer)?.len();
            if count > limit.tokens.saturating_mul(MARGIN) {
                return Err(limit.refused());
            }
            rest = after;
        }
        Ok(())
    }
}
