//! Strings that end an answer, wherever tokens end: nothing of them is given out.

/// Looks for strings in a text that comes in pieces.
#[derive(Clone, Debug)]
pub(super) struct Stops {
    all: Vec<String>,
    /// The end of the text so far that may be the beginning of one.
    held: String,
}

impl Stops {
    pub(super) fn new(all: &[String]) -> Self {
        Self { all: all.to_vec(), held: String::new() }
    }

    /// Takes a piece, and gives the text that is certain by now, and whether one of the strings is there, in front of which it ends.
    pub(super) fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        let hit = self.all.iter().filter_map(|s| self.held.find(s.as_str())).min();
        if let Some(at) = hit {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let open = |at: &usize| self.all.iter().any(|s| s.starts_with(&self.held[*at..]));
        let ends = self.held.char_indices().map(|(at, _)| at);
        let keep = ends.filter(|at| self.held.len() - at < self.longest()).find(open);
        let rest = self.held.split_off(keep.unwrap_or(self.held.len()));
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What was held back, when nothing follows.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    fn longest(&self) -> usize {
        self.all.iter().map(String::len).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_found_over_pieces() {
        let all = ["END".to_owned(), "é!".to_owned()];
        for (text, before, hit) in
            [("abcENDx", "abc", true), ("EEND", "E", true), ("aéé!b", "aé", true), ("ENENé", "ENENé", false)]
        {
            for size in 1..4 {
                let mut stops = Stops::new(&all);
                let chars: Vec<char> = text.chars().collect();
                let (mut out, mut found) = (String::new(), false);
                for piece in chars.chunks(size) {
                    let (text, hit) = stops.push(&piece.iter().collect::<String>());
                    out += &text;
                    if hit {
                        found = true;
                        break;
                    }
                }
                if !found {
                    out += &stops.finish();
                }
                assert_eq!((out.as_str(), found), (before, hit), "{text} by {size}");
            }
        }
        assert_eq!(Stops::new(&[]).push("abc"), ("abc".to_owned(), false));
    }
}
