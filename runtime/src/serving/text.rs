//! Conversion of text to ids and back, with the checkpoint's own tokenizer.

mod bounded;
mod charsmap;
mod encoding;
mod template;

use crate::bundle::BundleReader;
use crate::error::{Error, Result};
use crate::platform::regular;
use bounded::{Bounded, timed};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A bundle's tokenizer.
pub const FILE: &str = "artifacts/tokenizer.json";

/// A tokenizer.
pub struct Text {
    tokenizer: Bounded,
    bos: Option<u32>,
    /// Limit of prompts, if there is one.
    limit: Option<Limit>,
    /// Special tokens, which are left out of a text.
    special: BTreeMap<u32, String>,
}

/// The tokens that a prompt may have ([`Text::at_most`]).
#[derive(Clone, Copy, Debug)]
struct Limit {
    tokens: usize,
    /// Maximum number of bytes of text that one token represents.
    longest: usize,
}

impl Text {
    /// Reads the bundle's tokenizer. `bos` is prepended to every text that does not start with it.
    ///
    /// # Errors
    /// [`Error::Request`] if there is no file, as `Text::of_file`, and as [`BundleReader::read`].
    pub fn open(bundle: &BundleReader, bos: Option<u32>) -> Result<Self> {
        let bytes = bundle.read(FILE, regular::TOKENIZER).map_err(|e| match e {
            Error::MissingFile(path) => {
                Error::request(format!("the bundle has no tokenizer (`{}`)", path.display()))
                    .with_hint("give token ids with `--ids`, or put the checkpoint's `tokenizer.json` there")
            }
            e => e,
        })?;
        Self::of_file(bundle, &bytes, bos)
    }

    /// As [`Text::parse`], for the contents of the bundle's file.
    ///
    /// # Errors
    /// [`Error::BadFile`].
    pub(crate) fn of_file(bundle: &BundleReader, json: &[u8], bos: Option<u32>) -> Result<Self> {
        Self::parse(json, bos).map_err(|why| {
            Error::file(bundle.folder().join(FILE), format!("cannot be used as a tokenizer: {why}"))
                .with_hint("replace the file by the checkpoint's `tokenizer.json`, or give `--ids`")
        })
    }

    /// As [`Text::open`], for the contents of a `tokenizer.json`.
    ///
    /// # Errors
    /// The reason that it cannot be used: it is not a tokenizer, or its rules lengthen texts without bound.
    pub fn parse(json: &[u8], bos: Option<u32>) -> Result<Self, String> {
        charsmap::check(json)?;
        let read = timed(|| serde_json::from_slice(json).map_err(Into::into));
        let mut tokenizer: Bounded = read.map_err(|e| e.to_string())?;
        // A prompt is encoded as a whole, even if the file requests truncation or padding.
        tokenizer.with_truncation(None).map_err(|e| e.to_string())?;
        tokenizer.with_padding(None);
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.into_iter().filter(|(_, token)| token.special);
        let special = special.map(|(id, token)| (id, token.content)).collect();
        Ok(Self { tokenizer, bos, limit: None, special })
    }

    /// The largest id of the tokenizer and its token; `None` if it has no tokens.
    pub fn largest(&self) -> Option<(u32, String)> {
        self.tokenizer.get_vocab(true).into_iter().map(|(token, id)| (id, token)).max()
    }

    /// Text of ids, without special tokens.
    ///
    /// # Errors
    /// [`Error::Internal`].
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        timed(|| self.tokenizer.decode(ids, true)).map_err(Error::tokenizer)
    }

    /// A decoder that gets ids one by one. It omits special tokens.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::of(Tokens::Borrowed(self))
    }

    /// As [`Text::stream`], for users that outlive the owner of the tokenizer.
    pub fn own_stream(self: &Arc<Self>) -> TextStream<'static> {
        TextStream::of(Tokens::Shared(Arc::clone(self)))
    }

    /// As [`Text::stream`], but special tokens are written out, for readers that interpret them.
    pub fn stream_with_special(&self) -> TextStream<'_> {
        TextStream { skip: false, ..self.stream() }
    }

    /// As [`Text::own_stream`], with special tokens as they are written.
    pub fn own_stream_with_special(self: &Arc<Self>) -> TextStream<'static> {
        TextStream { skip: false, ..self.own_stream() }
    }

    /// Texts of the special tokens, in the order of their ids.
    pub fn special_tokens(&self) -> Vec<String> {
        self.special.values().cloned().collect()
    }
}

/// Number of ids without text after which no more bytes of a character are awaited: they belong to none.
const MAX_IDS_WITHOUT_TEXT: usize = 64;

/// Maximum number of ids that may begin a character whose last byte is still missing.
const MAX_PARTIAL_IDS: usize = 3;

/// Number of ids before an answer among which one is sought that decoders can look back at.
const MAX_LOOKBACK: usize = 32;

/// Decodes ids as they come. The pieces, joined, are the text of all ids; no piece ends inside of a
/// character. Invalid bytes become replacement characters, late, and returned text never changes.
pub struct TextStream<'a> {
    text: Tokens<'a>,
    /// Whether special tokens are omitted.
    skip: bool,
    /// The ids of the previous piece, for decoders that look back (a space before a word), then the new ones.
    window: Vec<u32>,
    /// Number of ids in the window that belong to the previous piece.
    previous: usize,
    /// The part of the window's text that has been returned.
    returned: String,
    /// Number of new ids since the last piece.
    new_ids: usize,
}

/// Tokenizer that a stream decodes with.
enum Tokens<'a> {
    Borrowed(&'a Text),
    Shared(Arc<Text>),
}

impl<'a> TextStream<'a> {
    fn of(text: Tokens<'a>) -> Self {
        Self { text, skip: true, window: Vec::new(), previous: 0, returned: String::new(), new_ids: 0 }
    }

    /// The stream of a text that continues after these ids: their text is not returned, but a word after them
    /// gets its space.
    ///
    /// # Errors
    /// [`Error::Internal`].
    pub fn continue_after(mut self, ids: &[u32]) -> Result<Self> {
        for &id in ids.iter().rev().take(MAX_LOOKBACK) {
            if self.leaves_out(id) {
                continue;
            }
            self.window = vec![id];
            let text = self.decode(1)?;
            // Decoders look back at words, not at parts of characters.
            if !text.is_empty() && !text.contains('\u{fffd}') {
                (self.previous, self.returned) = (1, text);
                return Ok(self);
            }
        }
        self.window.clear();
        Ok(self)
    }

    fn source(&self) -> &Text {
        match &self.text {
            Tokens::Borrowed(text) => text,
            Tokens::Shared(text) => text,
        }
    }

    /// Whether an id is a special token that is not written: decoders do not see it.
    fn leaves_out(&self, id: u32) -> bool {
        self.skip && self.source().special.contains_key(&id)
    }

    /// Text of the window's first ids.
    fn decode(&self, ids: usize) -> Result<String> {
        let decoded = timed(|| self.source().tokenizer.decode(&self.window[..ids], self.skip));
        decoded.map_err(Error::tokenizer)
    }

    /// The text that is certain after one more id; often empty.
    ///
    /// # Errors
    /// [`Error::Internal`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        if self.leaves_out(id) {
            return Ok(String::new());
        }
        self.window.push(id);
        self.new_ids += 1;
        let mut text = self.decode(self.window.len())?;
        if !(whole(&text).starts_with(&self.returned) || self.returned.starts_with(whole(&text))) {
            self.forget()?;
            text = self.decode(self.window.len())?;
        }
        let certain = whole(&text);
        let piece = certain.strip_prefix(&*self.returned).unwrap_or_default().to_owned();
        if piece.is_empty() {
            return if self.new_ids < MAX_IDS_WITHOUT_TEXT { Ok(piece) } else { self.give_up() };
        }
        self.new_ids = 0;
        if certain.len() == text.len() {
            self.window.drain(..self.previous);
            self.previous = self.window.len();
            self.returned = self.decode(self.previous)?;
        } else {
            certain.clone_into(&mut self.returned);
        }
        Ok(piece)
    }

    /// Accepts new ids as they are, as characters or not, except the last ones, which may still become a
    /// character.
    fn give_up(&mut self) -> Result<String> {
        self.new_ids = MAX_PARTIAL_IDS;
        let mut text = self.decode(self.window.len() - MAX_PARTIAL_IDS)?;
        if !text.starts_with(&self.returned) {
            self.forget()?;
            text = self.decode(self.window.len() - MAX_PARTIAL_IDS)?;
        }
        let more = text.strip_prefix(&*self.returned).unwrap_or_default().to_owned();
        let over = self.window.len() - MAX_PARTIAL_IDS;
        if text == self.decode(self.previous)? {
            // They have no text.
            self.window.drain(self.previous..over);
        } else {
            self.window.drain(..over - 1);
            self.previous = 1;
            self.returned = self.decode(1)?;
        }
        Ok(more)
    }

    /// Forgets the ids of the previous piece if the new ones change their text: a byte outside of any
    /// character changes the meaning of those before it.
    fn forget(&mut self) -> Result<()> {
        let settled = self.decode(self.previous)?;
        self.returned = self.returned.strip_prefix(&*settled).unwrap_or_default().to_owned();
        self.window.drain(..self.previous);
        self.previous = 0;
        Ok(())
    }

    /// The rest: incomplete characters, as replacement characters.
    ///
    /// # Errors
    /// [`Error::Internal`].
    pub fn finish(mut self) -> Result<String> {
        let mut text = self.decode(self.window.len())?;
        if !text.starts_with(&self.returned) {
            self.forget()?;
            text = self.decode(self.window.len())?;
        }
        Ok(text.strip_prefix(&*self.returned).unwrap_or_default().to_owned())
    }
}

/// A text without the incomplete characters at its end, which decode to replacement characters.
fn whole(text: &str) -> &str {
    text.trim_end_matches('\u{fffd}')
}
