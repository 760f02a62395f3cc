//! Loss of a candidate: by the model's own profile, or beside it, by their names, what the small models of the
//! project lost.

use super::candidate::{Candidate, Formats};
use moec_ir::Format;
use moec_profile::Profile;
use moec_profile::losses::{FormatLoss, find};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Losses of the project's models, which `cargo xtask fit` measures and writes.
const OTHERS: &str = include_str!("losses.json");

/// Losses that candidates are predicted by.
#[derive(Debug)]
pub(crate) struct Losses<'a> {
    own: Option<&'a [FormatLoss]>,
    /// Losses of other models, by their names; empty if the model's own are known.
    others: Vec<(String, Vec<FormatLoss>)>,
}

/// A loss in the file.
#[derive(Debug, Deserialize)]
struct Row {
    key: String,
    format: String,
    tokens: u64,
    nats_per_token: f64,
}

impl<'a> Losses<'a> {
    /// The losses of a profile, if it has some, else those of other models.
    pub(crate) fn of(profile: Option<&'a Profile>) -> Self {
        let own = profile.map(|p| &p.losses[..]).filter(|losses| !losses.is_empty());
        Self { own, others: if own.is_some() { Vec::new() } else { others() } }
    }

    /// Loss of this model in formats, in nats per token.
    pub(crate) fn own(&self, formats: Formats) -> Option<f64> {
        self.own.and_then(|losses| sum(losses, formats))
    }

    /// Loss of each other model in formats, in nats per token.
    pub(super) fn others(&self, formats: Formats) -> impl Iterator<Item = (&str, Option<f64>)> {
        self.others.iter().map(move |(name, losses)| (name.as_str(), sum(losses, formats)))
    }

    /// Names of the other models.
    pub(super) fn names(&self) -> Vec<&str> {
        self.others.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// Losses of other models in the formats of every candidate, by their names.
    pub(super) fn others_json(&self, candidates: &[Candidate]) -> Value {
        let of = |c: &Candidate| {
            let of =
                self.others(c.formats).map(|(name, nats)| (name.to_owned(), json!(nats.map(f64::exp_m1))));
            Value::Object(of.collect())
        };
        if self.others.is_empty() { Value::Null } else { candidates.iter().map(of).collect() }
    }
}

/// Sum of the losses of the formats of a candidate; `None` if one was not measured. bf16 is what others are compared
/// with, and a key without any loss does not exist in the model.
fn sum(losses: &[FormatLoss], (experts, rest, kv): Formats) -> Option<f64> {
    let keys = [("experts", experts), ("attention", rest), ("embeddings", rest), ("kv_cache", kv)];
    let of = |(key, format): (&str, Format)| match find(losses, key, format) {
        Some(nats) => Some(nats),
        None if format == Format::Bf16 || losses.iter().all(|l| l.key != key) => Some(0.0),
        None => None,
    };
    keys.into_iter().map(of).sum()
}

/// The losses in the file.
fn others() -> Vec<(String, Vec<FormatLoss>)> {
    let rows: BTreeMap<String, Vec<Row>> = serde_json::from_str(OTHERS).unwrap_or_default();
    let loss = |row: Row| {
        let loss = row.nats_per_token * row.tokens as f64;
        Some(FormatLoss { format: Format::parse(&row.format)?, key: row.key, tokens: row.tokens, loss })
    };
    rows.into_iter().map(|(name, rows)| (name, rows.into_iter().filter_map(loss).collect())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fit::candidate::FORMATS;
    use moec_measure::mix::losses::{KV_CACHE, OF_CACHES, OF_WEIGHTS};
    use moec_profile::losses::KEYS;

    /// The file has every format that is measured, of both models, and so a loss for each candidate.
    #[test]
    fn every_candidate_has_a_loss_of_the_small_models() {
        let all = others();
        assert_eq!(all.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["ferris", "ferris-relu"]);
        for (name, losses) in &all {
            for (class, formats) in OF_WEIGHTS {
                assert!(KEYS.contains(&class.name()));
                for &format in formats {
                    assert!(
                        find(losses, class.name(), format).is_some(),
                        "{name}: {} {format}",
                        class.name()
                    );
                }
            }
            assert!(OF_CACHES.iter().all(|&format| find(losses, KV_CACHE, format).is_some()), "{name}");
            let of = |formats| sum(losses, formats).unwrap();
            assert_eq!(of(FORMATS[0]), 0.0);
            assert!(FORMATS.iter().all(|&formats| of(formats).is_finite()));
            // The fewest bits lose most.
            let worst = FORMATS.iter().map(|&formats| of(formats)).fold(0.0, f64::max);
            assert_eq!(of(FORMATS[FORMATS.len() - 1]), worst);
        }
    }

    #[test]
    fn losses_of_a_candidate_add_up() {
        let of = |key: &str, format, nats| FormatLoss {
            key: key.to_owned(),
            format,
            tokens: 10,
            loss: 10.0 * nats,
        };
        let losses = [
            of("experts", Format::Q4, 0.5),
            of("attention", Format::Q8, 0.25),
            of("kv_cache", Format::Q8, 0.125),
        ];
        // No embeddings were measured: the model has none of its own.
        assert_eq!(sum(&losses, (Format::Q4, Format::Q8, Format::Q8)), Some(0.875));
        assert_eq!(sum(&losses, (Format::Bf16, Format::Bf16, Format::Bf16)), Some(0.0));
        assert_eq!(sum(&losses, (Format::Q3, Format::Q8, Format::Q8)), None);
    }
}
