//! Text to ids and back, with the checkpoint's own tokenizer.

use crate::error::{Error, Result};
use crate::regular;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenizers::Tokenizer;

/// Where a bundle keeps its tokenizer.
pub fn path(bundle: &Path) -> PathBuf {
    bundle.join("artifacts").join("tokenizer.json")
}

/// A tokenizer.
pub struct Text {
    tokenizer: Tokenizer,
    bos: Option<u32>,
}

impl Text {
    /// Reads the bundle's tokenizer. `bos` is put in front of every text that does not start with it.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`] if there is no file, [`Error::BadTokenizer`] if it cannot be used.
    pub fn open(bundle: &Path, bos: Option<u32>) -> Result<Self> {
        Self::open_file(path(bundle), bos)
    }

    /// As [`Text::open`], of any file.
    ///
    /// # Errors
    /// As [`Text::open`].
    fn open_file(path: PathBuf, bos: Option<u32>) -> Result<Self> {
        match regular::read(&path, regular::TOKENIZER) {
            Ok(bytes) => Self::parse(&bytes, bos).map_err(|reason| Error::BadTokenizer { path, reason }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Error::NoTokenizer(path)),
            Err(source) => Err(Error::Io { doing: "read", path, source }),
        }
    }

    /// As [`Text::open`], of what a `tokenizer.json` holds.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn parse(json: &[u8], bos: Option<u32>) -> Result<Self, String> {
        // A prompt is encoded whole, whatever the file says of cutting and padding.
        let read = Tokenizer::from_bytes(json).and_then(|mut tokenizer| {
            tokenizer.with_truncation(None)?;
            tokenizer.with_padding(None);
            Ok(tokenizer)
        });
        read.map(|tokenizer| Self { tokenizer, bos }).map_err(|e| e.to_string())
    }

    /// The largest id that the tokenizer knows, and its token; none if it knows none.
    pub fn largest(&self) -> Option<(u32, String)> {
        self.tokenizer.get_vocab(true).into_iter().map(|(token, id)| (id, token)).max()
    }

    /// Ids of a text.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode(text, true).map_err(|e| Error::Tokenizer(e.to_string()))?;
        let ids = encoding.get_ids();
        let bos = self.bos.filter(|bos| ids.first() != Some(bos));
        Ok(bos.into_iter().chain(ids.iter().copied()).collect())
    }

    /// Ids of a text that goes on from another: nothing is put in front.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode(text, false).map_err(|e| Error::Tokenizer(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of ids, without special tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.decode(ids, true).map_err(|e| Error::Tokenizer(e.to_string()))
    }

    /// A decoder that is fed id by id. It leaves special tokens out.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::of(Tokens::Lent(self))
    }

    /// As [`Text::stream`], for who outlives whoever opened the tokenizer.
    pub fn own_stream(self: &Arc<Self>) -> TextStream<'static> {
        TextStream::of(Tokens::Shared(Arc::clone(self)))
    }

    /// As [`Text::stream`], with special tokens as they are written: for those who read what they mean.
    pub fn stream_with_special(&self) -> TextStream<'_> {
        TextStream { skip: false, ..self.stream() }
    }

    /// As [`Text::own_stream`], with special tokens as they are written.
    pub fn own_stream_with_special(self: &Arc<Self>) -> TextStream<'static> {
        TextStream { skip: false, ..self.own_stream() }
    }

    /// Texts of the special tokens, in no order.
    pub fn special_tokens(&self) -> Vec<String> {
        let added = self.tokenizer.get_added_tokens_decoder();
        added.into_values().filter(|token| token.special).map(|token| token.content).collect()
    }
}

/// New ids of a window from which on it moves although nothing came of them: as many special tokens, or bytes of no character. There
/// alone a piece may end inside of a character.
const LONG: usize = 64;

/// Decodes ids as they come. The pieces, joined, are the text of all ids; no piece ends inside of a
/// character.
pub struct TextStream<'a> {
    text: Tokens<'a>,
    /// Whether special tokens are left out.
    skip: bool,
    /// The last ids: those of the previous piece, for decoders that look back (a space in front of a
    /// word), then the new ones.
    window: Vec<u32>,
    /// Ids of the window that were there when it was last moved.
    settled: usize,
    /// Bytes of the window's text that have been returned.
    emitted: usize,
}

/// Whose tokenizer a stream decodes with.
enum Tokens<'a> {
    Lent(&'a Text),
    Shared(Arc<Text>),
}

impl<'a> TextStream<'a> {
    fn of(text: Tokens<'a>) -> Self {
        Self { text, skip: true, window: Vec::new(), settled: 0, emitted: 0 }
    }

    fn decode(&self) -> Result<String> {
        let text = match &self.text {
            Tokens::Lent(text) => text,
            Tokens::Shared(text) => &**text,
        };
        let decoded = text.tokenizer.decode(&self.window, self.skip);
        decoded.map_err(|e| Error::Tokenizer(e.to_string()))
    }

    /// The text that is certain after one more id; often empty.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.window.push(id);
        let text = self.decode()?;
        let long = self.window.len() >= self.settled + LONG;
        // A character whose bytes have not all come decodes to a replacement character at the end.
        let certain = if long { &*text } else { text.trim_end_matches('\u{fffd}') };
        let piece = certain.get(self.emitted..).unwrap_or_default().to_owned();
        self.emitted = self.emitted.max(certain.len());
        if certain.len() == text.len() && (long || !piece.is_empty()) {
            self.window.drain(..self.settled);
            self.settled = self.window.len();
            self.emitted = self.decode()?.len();
        }
        Ok(piece)
    }

    /// What is left: characters that never became whole, as replacement characters.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn finish(self) -> Result<String> {
        let text = self.decode()?;
        Ok(text.get(self.emitted..).unwrap_or_default().to_owned())
    }
}
