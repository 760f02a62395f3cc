//! Names of tokens in log-probabilities, from their bytes.

use super::Server;
use super::error::{Answer, ApiError};
use crate::grammar::words::Word;
use axum::http::StatusCode;
use moec_runtime::Text;
use std::sync::Arc;

/// Names of tokens.
pub(super) struct Names {
    text: Arc<Text>,
    /// All tokens, if the tokenizer defines their bytes.
    words: Option<Arc<[Word]>>,
}

impl Names {
    /// Names of a server's tokens. The first use reads the vocabulary, which takes a while, on another
    /// thread.
    ///
    /// # Errors
    /// The reading was cancelled.
    pub(super) async fn of(server: &Arc<Server>, text: &Arc<Text>, needed: bool) -> Answer<Self> {
        let text = Arc::clone(text);
        if !needed {
            return Ok(Self { text, words: None });
        }
        let server = Arc::clone(server);
        let words = tokio::task::spawn_blocking(move || server.words()).await;
        let words = words.map_err(|e| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, e.to_string()))?;
        Ok(Self { text, words })
    }

    /// The bytes of a token; if unknown, those of its text.
    pub(super) fn bytes(&self, id: u32) -> Vec<u8> {
        let word = self.words.as_ref().and_then(|words| words.get(id as usize));
        match word.filter(|word| !word.bytes.is_empty()) {
            Some(word) => word.bytes.clone(),
            None => self.text.decode(&[id]).unwrap_or_default().into_bytes(),
        }
    }
}

/// Name of a token by its bytes: their text, or, for a part of a character, OpenAI's form `bytes:\xe2\x82`.
pub(super) fn name(bytes: &[u8]) -> String {
    str::from_utf8(bytes).map_or_else(|_| format!("bytes:{}", bytes.escape_ascii()), ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_characters_have_byte_names() {
        for (bytes, named) in
            [(" é".as_bytes(), " é"), (b"\xe2\x82", r"bytes:\xe2\x82"), (b" \xe2", r"bytes: \xe2"), (b"", "")]
        {
            assert_eq!(name(bytes), named);
        }
    }
}
