//! How much the rounding of each input channel of a weight matters, from the mean squares of its inputs.
//!
//! A matrix `W` that is stored as `W + E` errs by `E x`. Where the channels of `x` are not correlated, the mean
//! square of that is `Σ E²[n, k] · mean(x²[k])`: the weight of channel `k` in a rounding that minimises squared
//! error is the mean square of what it is multiplied by.
//!
//! The profile knows weights by the names that lowering gives them. Rewriting joins and scales weights; what a
//! rewritten one is made of stands in its expression, and its channels follow from that.

use super::Profile;
use crate::error::{Error, Result};
use moec_ir::{Axis, Module, Source, Weight, WeightExpr};

/// Tokens from which an expert's own channels count. With fewer, the layer's mean stands in for them.
pub const ENOUGH: u64 = 64;
/// Share of a weight's mean importance that every channel has: a channel that the texts happened to leave
/// silent must not be rounded to anything.
const FLOOR: f32 = 0.01;

/// The importance of every input channel of a model's weights.
#[derive(Clone, Debug)]
pub struct Importance {
    profile: Profile,
    /// Names of the profile and what lowering made of them.
    known: Vec<(String, WeightExpr)>,
}

impl Importance {
    /// From a profile and the model as it was lowered, before rewriting.
    ///
    /// # Errors
    /// A profile whose shapes are not those of the model.
    pub fn new(profile: Profile, lowered: &Module) -> Result<Self> {
        let mut known = Vec::new();
        for weight in &lowered.weights {
            let Some(moments) = profile.weights.get(&weight.name) else { continue };
            if moments.lead() != weight.lead() || moments.cols != weight.cols() {
                return Err(Error::input(format!(
                    "the profile has {} × {} channels for `{}`, whose shape is {:?}",
                    moments.lead(),
                    moments.cols,
                    weight.name,
                    weight.shape
                ))
                .hint("take it anew with `moec calibrate`"));
            }
            known.push((weight.name.clone(), weight.expr.clone()));
        }
        Ok(Self { profile, known })
    }

    /// The profile.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Importance of the input channels of a weight, `[lead, cols]`, 1 on average over each matrix. `None` for
    /// a weight that calibration has no say in: a table that is read by rows, and what is never quantised.
    ///
    /// # Errors
    /// Those of `source`, from which the factors of scaled weights are read.
    pub fn of(&self, weight: &Weight, source: &dyn Source) -> Result<Option<Vec<f32>>> {
        let Some(mut channels) = self.squares(&weight.expr, source)? else { return Ok(None) };
        if channels.len() != weight.lead() * weight.cols() {
            return Ok(None);
        }
        channels.chunks_exact_mut(weight.cols().max(1)).for_each(normalise);
        Ok(Some(channels))
    }

    /// Mean squares of the inputs of an expression, `[lead, cols]`.
    fn squares(&self, expr: &WeightExpr, source: &dyn Source) -> Result<Option<Vec<f32>>> {
        if let Some((name, _)) = self.known.iter().find(|(_, known)| known == expr) {
            return Ok(self.recorded(name));
        }
        match expr {
            // Rows that are joined or picked read the same channels.
            WeightExpr::Concat { axis: Axis::Rows, of } => {
                of.first().map_or(Ok(None), |first| self.squares(first, source))
            }
            WeightExpr::Slice { axis: Axis::Rows, of, .. } => self.squares(of, source),
            WeightExpr::Concat { axis: Axis::Cols, of } => {
                let mut all = Vec::new();
                for part in of {
                    match self.squares(part, source)? {
                        Some(channels) if part.shape().is_ok_and(|s| s.len() == 2) => all.extend(channels),
                        _ => return Ok(None),
                    }
                }
                Ok(Some(all))
            }
            // (x · s) Wᵀ = x (W · s)ᵀ: the matrix as stored reads x, which is the recorded input over s.
            WeightExpr::ScaleCols { of, by } => {
                let Some(mut channels) = self.squares(of, source)? else { return Ok(None) };
                let cols = by.shape().ok().and_then(|s| s.last().copied()).unwrap_or(0);
                let mut factors = vec![0.0; cols];
                by.read(0, 0..1, 0..cols, source, &mut factors).map_err(|e| Error::input(e.to_string()))?;
                for row in channels.chunks_exact_mut(cols.max(1)) {
                    for (x, f) in row.iter_mut().zip(&factors) {
                        *x = if *f == 0.0 { 0.0 } else { *x / (f * f) };
                    }
                }
                Ok(Some(channels))
            }
            _ => Ok(None),
        }
    }

    fn recorded(&self, name: &str) -> Option<Vec<f32>> {
        let moments = self.profile.weights.get(name)?;
        let mean = moments.mean();
        let own = |lead: usize| if moments.tokens[lead] < ENOUGH { &mean[..] } else { moments.of(lead) };
        Some((0..moments.lead()).flat_map(|lead| own(lead).iter().copied()).collect())
    }
}

/// Scales channels to a mean of 1 and lifts the silent ones. Where nothing was seen at all, every channel
/// counts alike.
fn normalise(channels: &mut [f32]) {
    let mean = channels.iter().map(|&x| f64::from(x)).sum::<f64>() / channels.len().max(1) as f64;
    for x in channels {
        let share = if mean > 0.0 { (f64::from(*x) / mean) as f32 } else { 1.0 };
        *x = (share + FLOOR) / (1.0 + FLOOR);
    }
}

/// One line per layer that has experts with too few tokens to judge, for a warning.
pub fn too_few(profile: &Profile) -> Option<String> {
    const SHOWN: usize = 4;
    let mut experts = 0;
    let mut layers = Vec::new();
    for layer in &profile.layers {
        let below = layer.below(ENOUGH);
        if !below.is_empty() {
            experts += below.len();
            layers.push(format!("{} in layer {}", below.len(), layer.layer));
        }
    }
    let all: usize = profile.layers.iter().map(|l| l.chosen.len()).sum();
    let more = layers.len().saturating_sub(SHOWN);
    layers.truncate(SHOWN);
    let more = if more > 0 { format!(" and {more} more layers") } else { String::new() };
    (experts > 0).then(|| {
        format!(
            "{experts} of {all} experts saw fewer than {ENOUGH} tokens ({}{more}): their layers' mean stands in for \
             them; more text or more `tokens` helps",
            layers.join(", ")
        )
    })
}
