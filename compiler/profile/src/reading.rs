//! Text that was read, and the model's perplexity on it.

use super::{MOST, MOST_TOKENS, ProfileFault};
use bincode::{Decode, Encode};
use std::collections::BTreeMap;

/// Text that was read.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
pub struct Reading {
    /// Tokens read of each text, by the SHA-256 of the text.
    pub texts: BTreeMap<[u8; 32], u64>,
    /// Number of scored predictions. On a large vocabulary that is a sample of the tokens.
    pub predicted: u64,
    /// Sum of −ln p(next token) over those predictions.
    pub loss: f64,
}

impl Reading {
    /// Tokens of all texts.
    pub fn tokens(&self) -> u64 {
        self.texts.values().sum()
    }

    /// Perplexity on the texts, if anything was scored.
    pub fn perplexity(&self) -> Option<f64> {
        (self.predicted > 0).then(|| (self.loss / self.predicted as f64).exp())
    }

    pub(super) fn merge(&self, other: &Self) -> Self {
        let mut texts = self.texts.clone();
        for (text, &tokens) in &other.texts {
            let sum = texts.entry(*text).or_default();
            *sum = sum.saturating_add(tokens);
        }
        Self {
            texts,
            predicted: self.predicted.saturating_add(other.predicted),
            loss: self.loss + other.loss,
        }
    }

    pub(super) fn check(&self) -> Result<(), ProfileFault> {
        let tokens = self.texts.values().try_fold(0_u64, |sum, &n| sum.checked_add(n));
        if self.texts.len() > MOST || tokens.is_none_or(|n| n > MOST_TOKENS) {
            return Err("it counts more tokens than anyone can read".to_owned());
        }
        if self.predicted > self.tokens() {
            return Err("more predictions than tokens".to_owned());
        }
        if self.loss.is_finite() && self.loss >= 0.0 {
            Ok(())
        } else {
            Err(format!("a loss of {}", self.loss))
        }
    }
}
