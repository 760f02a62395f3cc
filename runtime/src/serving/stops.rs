//! Stop strings, found across token boundaries.

use crate::error::Result;
use crate::serving::sampler::Constraint;
use crate::serving::text::TextStream;

/// Watches a text that comes in pieces for the first of several stop strings. The pieces that it returns,
/// joined, are the text before it. A text that may become a stop string is held back until it is certain.
#[derive(Clone, Debug, Default)]
pub struct Stops {
    strings: Vec<String>,
    /// Held-back text that may begin a stop string.
    held: String,
    found: Option<usize>,
}

impl Stops {
    /// Watches for these strings; empty ones are ignored.
    pub fn new(strings: impl IntoIterator<Item = String>) -> Self {
        let strings = strings.into_iter().filter(|s| !s.is_empty()).collect();
        Self { strings, ..Self::default() }
    }

    /// The text that is certain after one more piece. Empty after a stop string was found.
    pub fn push(&mut self, piece: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        self.held.push_str(piece);
        let places = self.strings.iter().enumerate().filter_map(|(i, s)| Some((self.held.find(&**s)?, i)));
        if let Some((at, i)) = places.min() {
            self.found = Some(i);
            let mut text = std::mem::take(&mut self.held);
            text.truncate(at);
            return text;
        }
        let certain =
            self.held.len() - self.strings.iter().map(|s| prefix_at_end(&self.held, s)).max().unwrap_or(0);
        self.held.drain(..certain).collect()
    }

    /// The stop string that was found.
    pub fn found(&self) -> Option<&str> {
        self.found.map(|i| &*self.strings[i])
    }

    /// The held-back text, if the whole text ends without a stop string.
    pub fn finish(self) -> String {
        self.held
    }
}

/// The part of a text before the first of several stop strings; all of it where there is none.
pub fn truncate_at_stop(text: &str, strings: &[String]) -> String {
    let mut stops = Stops::new(strings.iter().cloned());
    let before = stops.push(text);
    if stops.found().is_some() { before } else { before + &stops.finish() }
}

/// Stop condition: ends an answer when its text contains one of several strings. It forbids no token.
pub struct StopCondition {
    stream: TextStream<'static>,
    stops: Stops,
}

impl StopCondition {
    /// Creates a condition for one answer, whose text comes from `stream`.
    pub fn new(stream: TextStream<'static>, strings: &[String]) -> Self {
        Self { stream, stops: Stops::new(strings.iter().cloned()) }
    }
}

impl Constraint for StopCondition {
    fn mask(&mut self, _logits: &mut [f32]) -> Result<()> {
        Ok(())
    }

    fn accept(&mut self, id: u32) -> Result<()> {
        let piece = self.stream.push(id)?;
        self.stops.push(&piece);
        Ok(())
    }

    fn ended(&self) -> bool {
        self.stops.found().is_some()
    }
}

/// Length in bytes of the longest proper prefix of `tag` that `text` ends with.
pub fn prefix_at_end(text: &str, tag: &str) -> usize {
    let most = text.len().min(tag.len().saturating_sub(1));
    let mut ends = (1..=most).rev().filter_map(|at| tag.get(..at));
    ends.find(|begin| text.ends_with(begin)).map_or(0, str::len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<String>, String) {
        let mut of = Stops::new(stops.iter().map(|&s| s.to_owned()));
        let given = pieces.iter().map(|p| of.push(p)).collect();
        (given, of.found().map(ToOwned::to_owned), of.finish())
    }

    #[test]
    fn stop_string_across_pieces_is_never_emitted() {
        let (given, found, rest) = run(&["END", "xyz"], &["a E", "N", "D b"]);
        assert_eq!(
            (given, found.as_deref(), &*rest),
            (vec!["a ".into(), String::new(), String::new()], Some("END"), "")
        );
        // Held back, then released.
        let (given, found, rest) = run(&["END"], &["E", "EN", "X", "ü E"]);
        assert_eq!(
            (given, found, &*rest),
            (vec![String::new(), "E".into(), "ENX".into(), "ü ".into()], None, "E")
        );
        let (given, ..) = run(&[""], &["a"]);
        assert_eq!(given, ["a"]);
        let stops = ["END".to_owned(), "x".to_owned()];
        assert_eq!(
            (
                &*truncate_at_stop("a ENDx", &stops),
                &*truncate_at_stop("a EN", &stops),
                &*truncate_at_stop("ax END", &[])
            ),
            ("a ", "a EN", "ax END")
        );
    }

    proptest! {
        /// For any cuts of the text, the output is the text before the first stop string.
        #[test]
        fn piece_boundaries_do_not_change_the_output(text in "[abü]{0,40}", stops in prop::collection::vec("[abü]{1,4}", 0..4), cuts in prop::collection::vec(1usize..4, 40)) {
            let mut of = Stops::new(stops.clone());
            let chars: Vec<char> = text.chars().collect();
            let (mut at, mut out) = (0, String::new());
            for n in cuts {
                let piece: String = chars[at..(at + n).min(chars.len())].iter().collect();
                at = (at + n).min(chars.len());
                let given = of.push(&piece);
                out.push_str(&given);
                prop_assert!(stops.iter().all(|s| !out.contains(&**s)));
            }
            let found = of.found().is_some();
            prop_assert_eq!(found, stops.iter().any(|s| text.contains(&**s)));
            out.push_str(&of.finish());
            prop_assert!(text.starts_with(&out) && (found || out == text));
        }
    }
}
