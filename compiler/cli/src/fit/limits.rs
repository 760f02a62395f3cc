//! Limits of a fit: which one a candidate breaks, and what is missing if none keeps them.

use super::candidate::{Candidate, Model};
use moec_base::{Error, human};

/// Shortest context that is proposed.
const SHORTEST: u32 = 256;

/// Limits that a candidate must keep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes.
    pub(crate) memory: u64,
    /// Tokens per second of decoding.
    pub(crate) rate: f64,
    /// Increase of perplexity, as a share.
    pub(crate) loss: Option<f64>,
    /// Whether losses are measured after a build, so that one that is not known yet breaks nothing.
    pub(crate) measures: bool,
}

impl Limits {
    /// The first limit that a candidate breaks, as text. A rate without prediction breaks nothing.
    pub(crate) fn broken_by(&self, c: &Candidate) -> Option<String> {
        if c.memory > self.memory {
            return Some(format!("needs {} more", human::bytes(c.memory - self.memory)));
        }
        if let Some(rate) = c.decode.filter(|rate| *rate < self.rate) {
            return Some(format!("decodes {rate:.1} tokens/s"));
        }
        match (self.loss, c.loss) {
            (Some(most), Some(nats)) if nats.exp_m1() > most => {
                Some(format!("loses {:.1} %", 100.0 * nats.exp_m1()))
            }
            (Some(_), None) if !self.measures || c.measured => Some("loss not known".to_owned()),
            _ => None,
        }
    }

    /// Reason for the choice of a candidate.
    pub(super) fn why(&self, candidates: &[Candidate], at: usize) -> String {
        let own = candidates.get(at).map_or_else(String::new, Candidate::name);
        let before = at.checked_sub(1).and_then(|before| candidates.get(before));
        match before.and_then(|before| Some((before, self.broken_by(before)?))) {
            Some((before, broken)) => {
                format!("{own}: the first in the table that keeps the limits ({} {broken})", before.name())
            }
            None => format!("{own}: the first in the table, and it keeps the limits"),
        }
    }

    /// Error if no candidate keeps the limits, with what the nearest one lacks.
    pub(crate) fn nothing(&self, candidates: &[Candidate], disk: bool, model: &Model<'_>) -> Error {
        let fit = || candidates.iter().filter(|c| c.memory <= self.memory);
        if fit().next().is_none() {
            return self.too_large(candidates, disk, model);
        }
        let fast = || fit().filter(|c| c.decode.is_none_or(|rate| rate >= self.rate));
        if fast().next().is_none() {
            let fastest = fit().filter_map(|c| c.decode).fold(0.0, f64::max);
            let how = if fit().any(|c| c.measured) { "measured or predicted" } else { "predicted" };
            return Error::limit(format!(
                "no format that fits decodes {} tokens per second: at most {fastest:.1} are {how}",
                self.rate
            ))
            .hint("reduce `--tokens-per-s`, or choose a target with more memory bandwidth");
        }
        let least = fast().filter_map(|c| c.loss).fold(f64::INFINITY, f64::min);
        let most = 100.0 * self.loss.unwrap_or(0.0);
        if least.is_infinite() {
            return Error::limit("the loss of no format that fits is known")
                .hint("record losses of all formats with `moec calibrate --losses`");
        }
        Error::limit(format!(
            "no format that fits loses at most {most} % of perplexity: at least {:.2} % are lost",
            100.0 * least.exp_m1()
        ))
        .hint("allow more `--max-loss`, more `--memory`, or fewer `--tokens-per-s`")
    }

    /// Error if nothing fits into the memory. The hint names a shorter context with which something does, if there
    /// is one.
    fn too_large(&self, candidates: &[Candidate], disk: bool, model: &Model<'_>) -> Error {
        let least = candidates.iter().min_by_key(|c| c.memory);
        let missing = least.map_or(0, |c| c.memory.saturating_sub(self.memory));
        let shorter = |c: &Candidate| {
            let halves = std::iter::successors(Some(c.context / 2), |n| Some(n / 2));
            let fits =
                |&context: &u32| model.predict(c.shorter(context)).is_ok_and(|c| c.memory <= self.memory);
            halves.take_while(|n| *n >= SHORTEST).find(fits)
        };
        let hint = match (least.and_then(shorter), disk) {
            (Some(context), _) => format!("`--context {context}` fits"),
            (None, false) => "add `--disk` to keep experts on disk".to_owned(),
            (None, true) => "allow more `--memory`".to_owned(),
        };
        Error::limit(format!(
            "no format fits into {}: at least {} more memory is required",
            human::bytes(self.memory),
            human::bytes(missing)
        ))
        .hint(hint)
    }
}
