//! Loss that formats cause, measured on text: the basis of what `moec fit` predicts of a candidate.
//!
//! Each format is measured alone: all weights of one class have it, or the KV cache, and everything else is as the
//! checkpoint stores it. To second order roundings that do not depend on each other add up, so that the loss of
//! several formats is the sum of theirs.

use super::{MOST_TOKENS, ProfileFault};
use bincode::{Decode, Encode};
use moec_ir::Format;

/// Keys of `model.toml` whose formats are measured.
pub const KEYS: [&str; 4] = ["experts", "attention", "embeddings", "kv_cache"];

/// Loss of a model in which one key has another format than the checkpoint.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct FormatLoss {
    /// One of [`KEYS`].
    pub key: String,
    /// Its format.
    pub format: Format,
    /// Tokens that were predicted.
    pub tokens: u64,
    /// Sum of the increases of −ln p(next token) over these tokens, in nats.
    pub loss: f64,
}

impl FormatLoss {
    /// Increase of the loss in nats per token. It may be below 0: within the noise of a text a rounding can help.
    pub fn mean(&self) -> f64 {
        self.loss / self.tokens.max(1) as f64
    }
}

/// Loss of one format of a key in nats per token, if it was measured.
pub fn find(losses: &[FormatLoss], key: &str, format: Format) -> Option<f64> {
    losses.iter().find(|l| l.key == key && l.format == format).map(FormatLoss::mean)
}

/// Merges the losses of two profiles. A format that only one of them has stays.
pub fn merge(a: &[FormatLoss], b: &[FormatLoss]) -> Vec<FormatLoss> {
    let mut all = a.to_vec();
    for other in b {
        match all.iter_mut().find(|l| l.key == other.key && l.format == other.format) {
            Some(own) => {
                own.tokens = own.tokens.saturating_add(other.tokens);
                own.loss += other.loss;
            }
            None => all.push(other.clone()),
        }
    }
    all.sort_by(|a, b| (&a.key, a.format).cmp(&(&b.key, b.format)));
    all
}

/// Checks the properties that readers rely on.
pub(super) fn check(losses: &[FormatLoss]) -> Result<(), ProfileFault> {
    for l in losses {
        if !KEYS.contains(&l.key.as_str()) {
            return Err(format!("a loss of {:?}", l.key));
        }
        if l.tokens == 0 || l.tokens > MOST_TOKENS || !l.loss.is_finite() {
            return Err(format!("a loss of {} nats over {} tokens", l.loss, l.tokens));
        }
    }
    let ascends = |a: &FormatLoss, b: &FormatLoss| (&a.key, a.format) < (&b.key, b.format);
    if losses.is_sorted_by(ascends) { Ok(()) } else { Err("its losses are not in order".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(key: &str, format: Format, tokens: u64, loss: f64) -> FormatLoss {
        FormatLoss { key: key.to_owned(), format, tokens, loss }
    }

    #[test]
    fn merged_losses_are_means_over_the_tokens_of_both() {
        let a = [of("experts", Format::Q4, 100, 2.0), of("kv_cache", Format::Q8, 100, 0.1)];
        let b = [of("experts", Format::Q4, 300, 10.0), of("experts", Format::Q8, 10, -0.1)];
        let merged = merge(&a, &b);
        assert_eq!(merged, merge(&b, &a));
        check(&merged).unwrap();
        assert_eq!(find(&merged, "experts", Format::Q4), Some(0.03));
        assert_eq!(find(&merged, "experts", Format::Q8), Some(-0.01));
        assert_eq!(find(&merged, "attention", Format::Q8), None);
    }

    #[test]
    fn inconsistent_losses_are_rejected() {
        check(&[of("experts", Format::Q4, 1, -0.5)]).unwrap();
        for wrong in [
            of("router", Format::Q4, 1, 0.0),
            of("experts", Format::Q4, 0, 0.0),
            of("experts", Format::Q4, 1, f64::NAN),
            of("experts", Format::Q4, MOST_TOKENS + 1, 0.0),
        ] {
            check(std::slice::from_ref(&wrong)).unwrap_err();
        }
        let one = of("experts", Format::Q4, 1, 0.5);
        check(&[one.clone(), one]).unwrap_err();
    }
}
