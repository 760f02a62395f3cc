//! Speculative decoding by prompt lookup in the text itself: draft tokens, and the choices that count. The
//! scheduler uses it.
//!
//! Text repeats itself: code names the same things, answers quote questions. If the last tokens have
//! occurred before, the tokens that followed them are the draft. Draft tokens are computed in one call with
//! the token before them, and each row gives the token that the model would choose next. Draft tokens are
//! accepted up to the first that the model would not have chosen (Leviathan, Kalman and Matias, 2023, with
//! greedy choices; drafts as in Saxena's prompt lookup). The rest is taken back, by shortening the cache.
//!
//! **Tokens stay those of plain decoding.** Draft tokens are verified in entry points for decoding of few
//! rows, whose kernels treat inputs like those of one row ([`moec_ir::FEW_ROWS`]). Kernels of more rows, and
//! of a prompt, may round inputs to fewer bits and give other tokens. One difference is left: several rows
//! are summed in another order than one, which changes the last bits of logits. A choice counts only where
//! its logit leads the second by more than [`TIE`] times the largest magnitude of the row. If it leads by
//! less, the token is decoded again alone, as in plain decoding, and that choice counts.

/// Lead of the first logit over the second that is required, as a share of the largest magnitude in the row.
pub const TIE: f32 = 1.0 / 128.0;
/// Maximum length of the sequence end that is looked up.
const LONGEST: usize = 4;
/// Minimum length.
const SHORTEST: usize = 2;

/// Counts of draft tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounters {
    /// Draft tokens.
    pub draft_tokens: usize,
    /// Those that the model would have chosen.
    pub accepted: usize,
    /// Calls with draft tokens.
    pub calls: usize,
    /// Calls of one token: no draft, or a choice too close to count.
    pub single_token_calls: usize,
    /// Choices too close to count, among these calls.
    pub close_choices: usize,
}

impl DraftCounters {
    /// Share of accepted draft tokens; `None` without any.
    pub fn acceptance(&self) -> Option<f64> {
        (self.draft_tokens > 0).then(|| self.accepted as f64 / self.draft_tokens as f64)
    }
}

/// At most `most` tokens that followed the last earlier occurrence of the end of `seq`. The longest such end
/// counts, from `LONGEST` tokens down to `SHORTEST`.
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

/// Whether the first logit leads the second by enough to be the first in any order of summation.
pub(crate) fn is_clear_maximum(logits: &[f32]) -> bool {
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
    fn prompt_lookup_drafts_after_the_longest_last_match() {
        assert_eq!(prompt_lookup(&[1, 2, 3, 4, 9, 1, 2], 2), [3, 4]);
        // The later of two occurrences; the longer of two ends.
        assert_eq!(prompt_lookup(&[1, 2, 3, 1, 2, 5, 1, 2], 1), [5]);
        assert_eq!(prompt_lookup(&[7, 1, 2, 3, 1, 2, 5, 7, 1, 2], 3), [3, 1, 2]);
        // Repeated text overlaps its own beginning.
        assert_eq!(prompt_lookup(&[4, 4, 4], 5), [4]);
        assert_eq!(prompt_lookup(&[4; 8], 3), [4]);
        for (seq, most) in
            [(&[][..], 3), (&[1], 3), (&[1, 2], 3), (&[1, 2, 3, 2, 1], 3), (&[1, 2, 3, 1, 2], 0)]
        {
            assert!(prompt_lookup(seq, most).is_empty(), "{seq:?}");
        }
    }

    #[test]
    fn draft_is_kept_only_with_a_clear_margin() {
        assert!(is_clear_maximum(&[1.0, -3.0, 2.0]));
        assert!(
            !is_clear_maximum(&[2.0, 2.0])
                && !is_clear_maximum(&[100.0, 99.5, 0.0])
                && is_clear_maximum(&[100.0, 99.0, 0.0])
        );
        for bad in [&[][..], &[f32::NAN], &[f32::INFINITY, 1.0], &[f32::NEG_INFINITY; 3]] {
            assert!(!is_clear_maximum(bad), "{bad:?}");
        }
        assert!(is_clear_maximum(&[1.0]), "a vocabulary of one token has no second");
    }
}
