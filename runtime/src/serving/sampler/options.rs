//! Sampling options, their ranges and their defaults.

use crate::error::{Error, Result};

/// Maximum number of most probable tokens whose log-probabilities are returned in addition to the chosen
/// one's (OpenAI's limit).
pub const MAX_TOP_LOGPROBS: usize = 20;

/// Sampling options. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 chooses the largest one. 0 to 2.
    pub temperature: f32,
    /// Only the most probable tokens that together have at least this probability stay; 1 keeps all. Above 0,
    /// up to 1.
    pub top_p: f32,
    /// Only this many of the most probable tokens stay; 0 keeps all.
    pub top_k: usize,
    /// Only tokens with at least this share of the most probable one's probability stay; 0 keeps all. 0 to 1.
    pub min_p: f32,
    /// Only the most typical tokens stay, those whose −ln p is nearest to the entropy, until they together
    /// have this probability (Meister et al. 2023, "Locally Typical Sampling", §3); 1 keeps all. Above 0, up
    /// to 1.
    pub typical_p: f32,
    /// Divides positive logits of tokens that occur in the prompt or in the answer, and multiplies negative
    /// ones (Keskar et al. 2019, "CTRL", §4.1; as transformers does it); 1 changes nothing. Above 0, up to
    /// 100.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token that occurs in the answer (as in OpenAI and vLLM: the prompt
    /// does not count). −2 to 2.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once for every occurrence in the answer (as in OpenAI and vLLM).
    /// −2 to 2.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens; −∞ forbids one. Ids outside the vocabulary have no effect.
    pub bias: Vec<(u32, f32)>,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Number of most probable tokens whose log-probabilities are returned with that of each chosen token; at
    /// most [`MAX_TOP_LOGPROBS`].
    pub log_probabilities: Option<usize>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self::GREEDY
    }
}

/// A number of [`Sampling`]: its name, a getter, a range check, and the range in words.
type Bounded = (&'static str, fn(&Sampling) -> f32, fn(f32) -> bool, &'static str);

/// Ranges of the numbers from all sources: requests, `/set`, the command line, a checkpoint. They are
/// OpenAI's, except that a `top_p` of 0 is invalid, as in vLLM.
const RANGES: [Bounded; 7] = [
    ("temperature", |s| s.temperature, |x| (0.0..=2.0).contains(&x), "from 0 to 2"),
    ("top_p", |s| s.top_p, |x| x > 0.0 && x <= 1.0, "above 0, up to 1"),
    ("min_p", |s| s.min_p, |x| (0.0..=1.0).contains(&x), "from 0 to 1"),
    ("typical_p", |s| s.typical_p, |x| x > 0.0 && x <= 1.0, "above 0, up to 1"),
    ("repetition_penalty", |s| s.repetition_penalty, |x| x > 0.0 && x <= 100.0, "above 0, up to 100"),
    ("presence_penalty", |s| s.presence_penalty, |x| (-2.0..=2.0).contains(&x), "from -2 to 2"),
    ("frequency_penalty", |s| s.frequency_penalty, |x| (-2.0..=2.0).contains(&x), "from -2 to 2"),
];

impl Sampling {
    /// Options that take the most probable token.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        typical_p: 1.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        bias: Vec::new(),
        seed: 0,
        log_probabilities: None,
    };

    /// Parses the number of that name.
    ///
    /// # Errors
    /// The text is not a number in its range, which the error names.
    pub(crate) fn parse(name: &str, text: &str) -> Result<f32, String> {
        let bounded = RANGES.iter().find(|(known, ..)| *known == name);
        let (_, _, fits, range) = bounded.ok_or_else(|| format!("`{name}` is not a sampling parameter"))?;
        text.parse().ok().filter(|&x| fits(x)).ok_or_else(|| format!("must be a number {range}"))
    }

    /// Fails if a number is out of its range.
    ///
    /// # Errors
    /// [`Error::Usage`] for the first one.
    pub fn check(&self) -> Result<()> {
        for (what, of, fits, range) in RANGES {
            let x = of(self);
            if !fits(x) {
                return Err(Error::range(what, range, x.to_string()));
            }
        }
        if let Some((id, bias)) = self.bias.iter().find(|(_, b)| b.is_nan() || *b == f32::INFINITY) {
            let range = "of numbers below infinity";
            return Err(Error::range("logit_bias", range, format!("{bias} for token {id}")));
        }
        match self.log_probabilities {
            Some(n) if n > MAX_TOP_LOGPROBS => {
                Err(Error::range("log_probabilities", "from 0 to 20", n.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// Fails if a bias is for an id outside a vocabulary of this size.
    ///
    /// # Errors
    /// [`Error::Usage`] for the first one.
    pub fn check_ids(&self, vocab: u32) -> Result<()> {
        let id = self.bias.iter().map(|&(id, _)| id).find(|&id| id >= vocab);
        id.map_or(Ok(()), |id| Err(Error::bad_id(id, vocab)))
    }
}
