//! The texts of a calibration, as words or as tokens, and the pieces that are read.

use moec_base::error::{Error, Result, io_error};
use moec_base::hashing::sha256;
use moec_runtime::platform::regular;
use moec_runtime::serving::text::Text;
use std::path::{Path, PathBuf};

/// A text.
#[derive(Clone, Debug)]
pub struct Corpus {
    /// Its file.
    pub path: PathBuf,
    /// SHA-256 of its bytes.
    pub hash: [u8; 32],
    content: Content,
}

/// Source of a text.
#[derive(Clone, Debug)]
enum Content {
    /// Words, which the model's tokenizer converts.
    Text(String),
    /// Tokens.
    Ids(Vec<u32>),
}

impl Corpus {
    /// Whether reading it needs a tokenizer.
    pub(crate) fn is_text(&self) -> bool {
        matches!(self.content, Content::Text(_))
    }

    /// Tokens of the text, without those that the tokenizer adds before a text.
    fn tokens(&self, tokenizer: Option<&Text>) -> Result<Vec<u32>> {
        match (&self.content, tokenizer) {
            (Content::Ids(ids), _) => Ok(ids.clone()),
            (Content::Text(text), Some(tokenizer)) => tokenizer.encode_plain(text).map_err(Error::from),
            (Content::Text(_), None) => Err(Error::bug("a text without a tokenizer")),
        }
    }

    /// Checks that its tokens are in a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    /// Fails if a token is not, and names it.
    pub(crate) fn must_fit(&self, vocab: usize) -> Result<()> {
        let Content::Ids(ids) = &self.content else { return Ok(()) };
        match ids.iter().position(|&id| id as usize >= vocab) {
            None => Ok(()),
            Some(at) => Err(Error::input(format!(
                "number {} in `{}` is token {}, of a model that has {vocab}",
                at + 1,
                self.path.display(),
                ids[at]
            ))),
        }
    }
}

/// A piece of a text that is read as one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// Index of the text.
    pub(crate) text: usize,
    /// Tokens of the text, including those that the tokenizer adds before a text.
    pub(crate) ids: Vec<u32>,
}

/// Reads texts.
///
/// # Errors
/// Fails for the first file that cannot be read, is not UTF-8 or is too large.
pub fn read_texts(paths: &[PathBuf]) -> Result<Vec<Corpus>> {
    let corpus = |path: &PathBuf| {
        let (text, hash) = read(path)?;
        Ok(Corpus { path: path.clone(), hash, content: Content::Text(text) })
    };
    paths.iter().map(corpus).collect()
}

/// Reads files of tokens: numbers, separated by white space or commas.
///
/// # Errors
/// Those of [`read_texts`]; also fails if a word is not a number.
pub fn read_ids(paths: &[PathBuf]) -> Result<Vec<Corpus>> {
    let corpus = |path: &PathBuf| {
        let (text, hash) = read(path)?;
        let words = text.split(|c: char| c.is_whitespace() || c == ',').filter(|w| !w.is_empty());
        let number = |word: &str| {
            word.parse::<u32>().map_err(|_| {
                let shown: String = word.chars().take(24).collect();
                Error::input(format!("`{shown}` in `{}` is not a token id", path.display()))
                    .hint("a file of token ids has numbers, separated by white space or commas")
            })
        };
        let ids = words.map(number).collect::<Result<_>>()?;
        Ok(Corpus { path: path.clone(), hash, content: Content::Ids(ids) })
    };
    paths.iter().map(corpus).collect()
}

/// Content and SHA-256.
fn read(path: &Path) -> Result<(String, [u8; 32])> {
    let bytes = regular::read(path, regular::TEXT).map_err(|e| match regular::refused(&e) {
        Some(regular::Refused::Long { .. }) => Error::limit(format!("`{}` is too long", path.display()))
            .because(e)
            .hint("calibration reads about ten thousand tokens: use a sample of it"),
        _ => io_error("read", path, &e),
    })?;
    let hash = sha256(&bytes);
    let text = String::from_utf8(bytes).map_err(|e| {
        Error::input(format!("`{}` is not text in UTF-8", path.display()))
            .because(format!("byte {} is the first invalid one", e.utf8_error().valid_up_to()))
    })?;
    Ok((text, hash))
}

/// Pieces of at most `window` tokens, `tokens` of them in all. Each text has an even share, and a short text
/// is used whole. The pieces are spread over a text that is longer than its share.
///
/// # Errors
/// Fails if a text cannot be tokenised, or if no text has two tokens.
pub(crate) fn windows(
    texts: &[Corpus],
    tokenizer: Option<&Text>,
    tokens: usize,
    window: usize,
) -> Result<Vec<Window>> {
    let head = head(tokenizer)?;
    let mut all = Vec::new();
    for text in texts {
        moec_base::interrupt::check()?;
        all.push(text.tokens(tokenizer)?);
    }
    let body = window.saturating_sub(head.len()).max(1);
    // Tokens that are added before every piece count, too.
    let tokens = (tokens as u128 * body as u128 / window.max(1) as u128) as usize;
    let shares = shares(&all.iter().map(Vec::len).collect::<Vec<_>>(), tokens.max(1));
    let mut found = Vec::new();
    for (text, (ids, share)) in all.iter().zip(shares).enumerate() {
        for range in pieces(ids.len(), share, body) {
            let ids: Vec<u32> = head.iter().chain(&ids[range]).copied().take(window).collect();
            if ids.len() > 1 {
                found.push(Window { text, ids });
            }
        }
    }
    if found.is_empty() {
        let names: Vec<_> = texts.iter().map(|t| format!("`{}`", t.path.display())).collect();
        return Err(Error::input(format!("there is nothing to read in {}", names.join(", ")))
            .hint("calibration needs about ten thousand tokens of text like that in use"));
    }
    Ok(found)
}

/// Pieces of at most `window` tokens, about `tokens` in all, that calibration has not read. `read` is the
/// number of tokens that it read of each text, by hash. Returns no pieces if it has read everything.
///
/// # Errors
/// Fails if a text cannot be tokenised.
pub(crate) fn held_out(
    texts: &[Corpus],
    read: &dyn Fn(&[u8; 32]) -> u64,
    tokenizer: &Text,
    tokens: usize,
    window: usize,
) -> Result<Vec<Window>> {
    let tokenizer = Some(tokenizer);
    let head = head(tokenizer)?;
    let body = window.saturating_sub(head.len()).max(1);
    let mut found = Vec::new();
    for (text, corpus) in texts.iter().enumerate() {
        moec_base::interrupt::check()?;
        let ids = corpus.tokens(tokenizer)?;
        let share = usize::try_from(read(&corpus.hash)).unwrap_or(usize::MAX);
        for range in gaps(&pieces(ids.len(), share, body), ids.len()) {
            for piece in ids[range].chunks(body).filter(|p| p.len() > body / 8) {
                let ids = head.iter().chain(piece).copied().take(window).collect();
                found.push(Window { text, ids });
            }
        }
    }
    let most = tokens.div_ceil(window.max(1)).max(1);
    let every = found.len().div_ceil(most).max(1);
    Ok(found.into_iter().step_by(every).collect())
}

/// Tokens that are added before every text.
fn head(tokenizer: Option<&Text>) -> Result<Vec<u32>> {
    tokenizer.map_or(Ok(Vec::new()), |tokenizer| tokenizer.encode("").map_err(Error::from))
}

/// Gaps between ascending ranges, in `0 .. len`.
fn gaps(ranges: &[std::ops::Range<usize>], len: usize) -> Vec<std::ops::Range<usize>> {
    let starts = std::iter::once(0).chain(ranges.iter().map(|r| r.end));
    let ends = ranges.iter().map(|r| r.start).chain(std::iter::once(len));
    starts.zip(ends).filter(|(a, b)| a < b).map(|(a, b)| a..b).collect()
}

/// Number of tokens of each text to read, at most `tokens` in all.
fn shares(lens: &[usize], tokens: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lens.len()).collect();
    order.sort_by_key(|&i| lens[i]);
    let (mut left, mut shares) = (tokens, vec![0; lens.len()]);
    for (done, &i) in order.iter().enumerate() {
        shares[i] = lens[i].min(left / (lens.len() - done));
        left -= shares[i];
    }
    shares
}

/// Ranges of at most `body` tokens, `share` of `len` in all: adjacent if they cover everything, else spread
/// out.
fn pieces(len: usize, share: usize, body: usize) -> Vec<std::ops::Range<usize>> {
    if share >= len {
        return (0..len).step_by(body).map(|start| start..(start + body).min(len)).collect();
    }
    let count = share.div_ceil(body);
    let lens = (0..count).map(|i| body.min(share - i * body));
    let room = len - share;
    lens.enumerate()
        .map(|(i, n)| {
            let start = i * body + if count > 1 { room * i / (count - 1) } else { 0 };
            start..start + n
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn short_texts_leave_their_share_to_long_ones() {
        assert_eq!(shares(&[10, 1000, 1000], 100), [10, 45, 45]);
        assert_eq!(shares(&[10, 20], 100), [10, 20]);
        assert_eq!(shares(&[10, 20], 1), [0, 1]);
    }

    #[test]
    fn pieces_are_spread_over_a_long_text() {
        assert_eq!(pieces(100, 30, 10), [0..10, 45..55, 90..100]);
        assert_eq!(pieces(100, 25, 10), [0..10, 47..57, 95..100]);
        assert_eq!(pieces(25, 30, 10), [0..10, 10..20, 20..25]);
        assert_eq!(pieces(100, 5, 10), std::slice::from_ref(&(0..5)));
        assert!(pieces(100, 0, 10).is_empty());
    }

    proptest! {
        #[test]
        fn pieces_are_in_the_text_and_disjoint(len in 0_usize..5000, share in 0_usize..6000, body in 1_usize..700) {
            let pieces = pieces(len, share, body);
            prop_assert_eq!(pieces.iter().map(ExactSizeIterator::len).sum::<usize>(), share.min(len));
            prop_assert!(pieces.iter().all(|p| !p.is_empty() && p.len() <= body && p.end <= len));
            prop_assert!(pieces.is_sorted_by(|a, b| a.end <= b.start));
            // All the rest is held out.
            let mut all: Vec<_> = pieces.iter().cloned().chain(gaps(&pieces, len)).collect();
            all.sort_by_key(|r| r.start);
            prop_assert!(all.iter().flat_map(Clone::clone).eq(0..len));
        }
    }
}
