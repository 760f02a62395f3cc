//! Speculative decoding from the text itself, prompt lookup: draft tokens, and the choices that count. The scheduler decodes with it.
//!
//! Text repeats itself: code names the same things, answers quote what was asked. Where the last tokens have stood before, the ones
//! that followed them there are the draft now. Draft tokens are taken in one call with the token before them, each
//! row says which token the model would choose after it, and draft tokens are accepted up to the first that the model would not have
//! chosen (Leviathan, Kalman and Matias, 2023, with greedy choices; Saxena's prompt lookup for where drafts come from). What was
//! taken after it is taken back: the cache's length is all there is to it.
//!
//! **Tokens stay those of plain decoding.** Draft tokens are verified in entry points for decoding of few rows, whose kernels treat inputs as
//! those of one row do ([`moec_ir::FEW_ROWS`]); those of more rows, and of a prompt, may round them to fewer bits, and then other tokens
//! come out. What is left is that several rows
//! are summed in another order than one, which moves the last bits of logits. A choice counts only where its logit leads the
//! second by more than [`TIE`] times the largest magnitude of the row. Where it leads by less, the token is decoded once more, alone,
//! as plain decoding does it, and that choice counts.

/// Lead of the first logit over the second that is required, as a share of the largest magnitude in the row.
pub const TIE: f32 = 1.0 / 128.0;
/// Most last tokens that are looked for.
const LONGEST: usize = 4;
/// Fewest.
const SHORTEST: usize = 2;

/// Counts of draft tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speculated {
    /// Draft tokens.
    pub draft_tokens: usize,
    /// Those of them that the model would have chosen.
    pub accepted: usize,
    /// Calls with draft tokens.
    pub calls: usize,
    /// Calls of one token: no draft, or a choice too close to count.
    pub alone: usize,
    /// Choices too close to count, among these calls.
    pub close: usize,
}

impl Speculated {
    /// Share of accepted draft tokens; `None` without any.
    pub fn acceptance(&self) -> Option<f64> {
        (self.draft_tokens > 0).then(|| self.accepted as f64 / self.draft_tokens as f64)
    }
}

/// The tokens that followed the last place where the end of `seq` has stood before, `most` of them at most. The longest end
/// counts, of `LONGEST` tokens down to `SHORTEST`.
pub fn prompt_lookup(seq: &[u32], most: usize) -> &[u32] {
    for n in (SHORTEST..=LONGEST).rev() {
        let Some(body) = seq.len().checked_sub(n).filter(|&body| body > 0) else { continue };
        let end = &seq[body..];
        if let Some(at) = (0..body).rev().find(|&at| seq[at..at + n] == *end) {
            let from = at + n;
            return &seq[from..seq.len().min(from.saturating_add(most))];
        }
    }
    &[]
}

/// Whether the first logit leads the second by enough to be the first in any order of summing.
pub(crate) fn leads(logits: &[f32]) -> bool {
    let (mut first, mut second, mut largest) = (f32::NEG_INFINITY, f32::NEG_INFINITY, 0_f32);
    for &l in logits {
        largest = largest.max(l.abs());
        if l > first {
            (first, second) = (l, first);
        } else if l > second {
            second = l;
        }
    }
    first.is_finite() && first - second > TIE * largest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draft_tokens_are_what_followed_the_longest_end_the_last_time() {
        assert_eq!(prompt_lookup(&[1, 2, 3, 4, 9, 1, 2], 2), [3, 4]);
        // The later of two places; the longer of two ends.
        assert_eq!(prompt_lookup(&[1, 2, 3, 1, 2, 5, 1, 2], 1), [5]);
        assert_eq!(prompt_lookup(&[7, 1, 2, 3, 1, 2, 5, 7, 1, 2], 3), [3, 1, 2]);
        // What repeats itself overlaps its own beginning.
        assert_eq!(prompt_lookup(&[4, 4, 4], 5), [4]);
        assert_eq!(prompt_lookup(&[4; 8], 3), [4]);
        for (seq, most) in
            [(&[][..], 3), (&[1], 3), (&[1, 2], 3), (&[1, 2, 3, 2, 1], 3), (&[1, 2, 3, 1, 2], 0)]
        {
            assert!(prompt_lookup(seq, most).is_empty(), "{seq:?}");
        }
    }

    #[test]
    fn a_close_choice_does_not_count() {
        assert!(leads(&[1.0, -3.0, 2.0]));
        assert!(!leads(&[2.0, 2.0]) && !leads(&[100.0, 99.5, 0.0]) && leads(&[100.0, 99.0, 0.0]));
        for bad in [&[][..], &[f32::NAN], &[f32::INFINITY, 1.0], &[f32::NEG_INFINITY; 3]] {
            assert!(!leads(bad), "{bad:?}");
        }
        assert!(leads(&[1.0]), "a vocabulary of one token has no second");
    }
}
