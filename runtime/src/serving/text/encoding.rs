//! Text to ids. What holds more tokens than a prompt may have is refused before it is encoded whole: encoding takes hundreds of times
//! the bytes of a text.

use super::bounded::timed;
use super::{Limit, Text};
use crate::error::{Error, Result};

/// Bytes for each token of the limit up to which a text is encoded without being counted before.
const UNCOUNTED: usize = 4;
/// Bytes of a piece, when tokens are counted.
const PIECE: usize = 16 << 10;
/// Times the limit that the tokens of all pieces must exceed: a text cut into pieces has other tokens at the cuts.
const MARGIN: usize = 2;
/// Bytes that a normalizer makes one of at most: compatibility forms (NFKC) write four as one.
const SHRINK: usize = 4;

impl Limit {
    fn refused(self) -> Error {
        Error::context("the prompt has at least", self.tokens + 1, self.tokens)
    }
}

impl Text {
    /// With a limit for [`Text::encode`] and its like: a text that surely has more tokens is refused before it is encoded. One of a few
    /// more may pass. `vocab`: ids that the model has.
    #[must_use]
    pub fn at_most(mut self, tokens: usize, vocab: u32) -> Self {
        let bytes = |id| self.tokenizer.id_to_token(id).map_or(0, |token| token.len());
        let longest = (0..vocab).map(bytes).max().unwrap_or(0).max(1);
        let shrink = if self.tokenizer.get_normalizer().is_some() { SHRINK } else { 1 };
        self.limit = Some(Limit { tokens, longest: longest * shrink });
        self
    }

    /// Ids of a text.
    ///
    /// # Errors
    /// [`Error::Internal`]; [`Error::Limit`] where it is refused for [`Text::at_most`].
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

    /// Ids of the parts of a text, each encoded by itself as [`Text::encode_plain`] does. The limit is for all of them.
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

    /// Refuses a text that surely has more tokens than the limit: by its bytes, else by the tokens of its pieces.
    fn check(&self, text: &str, limit: Limit) -> Result<()> {
        if text.len() <= limit.tokens.saturating_mul(UNCOUNTED) {
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
