//! Importance of each input channel for the rounding of a weight, from the mean squares of its inputs.
//!
//! A matrix `W` that is stored as `W + E` has the error `E x`. If the channels of `x` are not correlated, the
//! mean square of that is `Σ E²[n, k] · mean(x²[k])`. So in a rounding that minimises squared error, the
//! weight of channel `k` is the mean square of its input.
//!
//! The profile has weights by the names that lowering gives them. Rewriting joins and scales weights; the
//! expression of a rewritten weight names its parts, and its channels follow from these.
#![expect(clippy::cast_possible_truncation, reason = "statistics: floats are clamped and rounded")]

use super::{Correlations, Moments, Profile, table};
use moec_base::error::{Error, Result};
use moec_config::Rounding;
use moec_cpu::{Feedback, WeightImportance, uses_feedback};
use moec_ir::{Axis, Module, Source, Weight, WeightExpr};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Tokens from which on an expert's own channels count. With fewer, the layer's mean is used.
pub const ENOUGH: u64 = 64;
/// Least importance of every channel, as a share of the weight's mean. A channel that is silent in the
/// recorded texts must still be rounded with care.
const FLOOR: f32 = 0.01;

/// The importance of every input channel of a model's weights, by their names in the compiled Graph.
#[derive(Debug, Default)]
pub struct Importance {
    channels: HashMap<String, Channels>,
    /// Correlations of channels; empty if errors are not fed back.
    correlations: Vec<Correlations>,
    /// The table of embeddings, and the rounding of its rows.
    table: Option<(String, Arc<Feedback>)>,
    /// Feedback of the last requested input, for inputs that all experts of a layer share.
    shared: Mutex<Option<(usize, Arc<Feedback>)>>,
}

/// `[matrices, cols]`, 1 on average over each matrix.
#[derive(Clone, Debug)]
struct Channels {
    cols: usize,
    all: Vec<f32>,
    /// Index of its input's correlations, and the means `[cols]` over all matrices if these share an input.
    input: Option<(usize, Vec<f32>)>,
    /// Number of its first matrix in the recorded weight.
    first: usize,
}

impl Importance {
    /// The importance for the weights that `select` selects in `module`, which rewriting may have changed
    /// since it was `lowered`. Weights that calibration does not record have no importance.
    ///
    /// # Errors
    /// Fails if the profile's shapes differ from the model's, or if `source` fails, from which the factors of
    /// scaled weights are read.
    pub fn new(
        profile: &Profile,
        lowered: &Module,
        module: &Module,
        source: &dyn Source,
        select: impl Fn(&Weight) -> bool,
    ) -> Result<Self> {
        let mut known = Vec::new();
        for weight in &lowered.weights {
            let Some(moments) = profile.weights.get(&weight.name) else { continue };
            if moments.matrices() != weight.matrices() || moments.cols != weight.cols() {
                return Err(Error::input(format!(
                    "the profile has {} × {} channels for `{}`, whose shape is {:?}",
                    moments.matrices(),
                    moments.cols,
                    weight.name,
                    weight.shape
                ))
                .hint("record it again with `moec calibrate`"));
            }
            let input = profile.correlations.iter().position(|c| c.readers.contains(&weight.name));
            known.push((moments, &weight.expr, input));
        }
        let known = RecordedWeights { weights: known, source };
        let mut found = HashMap::new();
        for weight in module.weights.iter().filter(|w| select(w)) {
            let cols = weight.cols();
            let fits = |all: &Vec<f32>| all.len() == weight.matrices() * cols;
            if let Some(mut all) = known.squares(&weight.expr)?.filter(fits) {
                all.chunks_exact_mut(cols.max(1)).for_each(normalise);
                let mean = |input: usize| {
                    let recorded = known.recorded(&weight.expr)?;
                    let correlations = profile.correlations.get(input)?;
                    let mut mean =
                        (correlations.matrices() < recorded.matrices()).then(|| recorded.mean())?;
                    normalise(&mut mean);
                    Some(mean)
                };
                let input = known.input(&weight.expr).map(|i| (i, mean(i).unwrap_or_default()));
                let first = some_matrices(&weight.expr).map_or(0, |(_, first)| first);
                found.insert(weight.name.clone(), Channels { cols, all, input, first });
            }
        }
        let own = table::table(module).filter(|w| uses_feedback(w.format) && select(w));
        // A rewritten table is a different one.
        let own = own.filter(|w| table::table(lowered).is_some_and(|known| known.expr == w.expr));
        let table = match own {
            Some(weight) => table::feedback(lowered, source)?.map(|f| (weight.name.clone(), f)),
            None => None,
        };
        Ok(Self { channels: found, table, ..Self::default() })
    }

    /// Adds the data of its profile that a rounding requires.
    pub fn rounded(self, rounding: Rounding, correlations: Vec<Correlations>) -> Self {
        match rounding {
            Rounding::Feedback => self.with_feedback(correlations),
            Rounding::Nearest => self,
        }
    }

    /// Adds the correlations of its profile: errors are fed back.
    pub fn with_feedback(self, correlations: Vec<Correlations>) -> Self {
        Self { correlations, ..self }
    }

    /// Rounding of weights by this importance.
    pub fn rounding(&self) -> Rounding {
        if self.correlations.is_empty() { Rounding::Nearest } else { Rounding::Feedback }
    }

    /// Feedback of a matrix; `None` if its input was not recorded, or too rarely.
    fn matrix(&self, weight: &str, matrix: usize) -> Option<Arc<Feedback>> {
        let channels = self.channels.get(weight)?;
        let (input, mean) = channels.input.as_ref()?;
        let correlations = self.correlations.get(*input).filter(|c| c.cols == channels.cols)?;
        if mean.is_empty() {
            let recorded = channels.first + matrix;
            let enough = correlations.tokens.get(recorded).is_some_and(|&n| n >= ENOUGH);
            return enough
                .then(|| feedback(correlations, recorded, self.importance(weight, matrix)?))
                .flatten();
        }
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = shared.as_ref().filter(|(i, _)| i == input) {
            return Some(Arc::clone(known));
        }
        let found = feedback(correlations, 0, mean)?;
        *shared = Some((*input, Arc::clone(&found)));
        Some(found)
    }
}

/// Feedback by correlations and normalised mean squares. The floor of the latter is the damping of GPTQ
/// (arXiv 2210.17323, §3.3, step 3): a hundredth of the mean is added to the diagonal.
fn feedback(correlations: &Correlations, matrix: usize, squares: &[f32]) -> Option<Arc<Feedback>> {
    let root: Vec<f64> =
        squares.iter().map(|&x| (f64::from(x) - f64::from(FLOOR / (1.0 + FLOOR))).max(0.0).sqrt()).collect();
    let blocks = correlations.of(matrix).map(|(range, mut below)| {
        let (root, squares) = (&root[range.clone()], &squares[range.clone()]);
        let mut moments = Vec::with_capacity(root.len() * (root.len() + 1) / 2);
        for i in 0..root.len() {
            moments.extend(below.by_ref().take(i).zip(root).map(|(r, x)| r * x * root[i]));
            moments.push(f64::from(squares[i]));
        }
        (range, moments)
    });
    Feedback::new(blocks).map(Arc::new)
}

impl WeightImportance for Importance {
    fn importance(&self, weight: &str, matrix: usize) -> Option<&[f32]> {
        let Channels { cols, all, .. } = self.channels.get(weight)?;
        all.get(matrix * cols..(matrix + 1) * cols)
    }

    fn feedback(&self, weight: &str, matrix: usize) -> Option<Arc<Feedback>> {
        self.matrix(weight, matrix)
    }

    fn table(&self, weight: &str) -> Option<Arc<Feedback>> {
        let (name, feedback) = self.table.as_ref().filter(|_| self.rounding() == Rounding::Feedback)?;
        (name == weight).then(|| Arc::clone(feedback))
    }
}

/// Statistics of the profile by the weights of the lowered Graph.
struct RecordedWeights<'a> {
    /// Moments, expression, and the index of the input's correlations.
    weights: Vec<(&'a Moments, &'a WeightExpr, Option<usize>)>,
    source: &'a dyn Source,
}

impl RecordedWeights<'_> {
    /// Recorded weight with the same channels as an expression, unscaled.
    fn known(&self, expr: &WeightExpr) -> Option<&(&Moments, &WeightExpr, Option<usize>)> {
        self.weights.iter().find(|(_, known, _)| *known == expr).or_else(|| match expr {
            WeightExpr::Concat { axis: Axis::Rows, of } => of.first().and_then(|first| self.known(first)),
            WeightExpr::Slice { axis: Axis::Rows, of, .. } => self.known(of),
            WeightExpr::Split { .. } => {
                let parts = joined(expr).and_then(<[WeightExpr]>::first);
                self.known(some_matrices(parts.map_or(expr, whole))?.0)
            }
            _ => None,
        })
    }

    /// Moments of that weight.
    fn recorded(&self, expr: &WeightExpr) -> Option<&Moments> {
        self.known(expr).map(|(moments, ..)| *moments)
    }

    /// Index of its input's correlations.
    fn input(&self, expr: &WeightExpr) -> Option<usize> {
        self.known(expr)?.2
    }

    /// Mean squares of the inputs of an expression, `[matrices, cols]`.
    fn squares(&self, expr: &WeightExpr) -> Result<Option<Vec<f32>>> {
        if let Some((moments, ..)) = self.weights.iter().find(|(_, known, _)| *known == expr) {
            return Ok(Some(recorded(moments)));
        }
        match expr {
            // Rows that are joined or selected read the same channels.
            WeightExpr::Concat { axis: Axis::Rows, of } => {
                of.first().map_or(Ok(None), |first| self.squares(first))
            }
            WeightExpr::Slice { axis: Axis::Rows, of, .. } => self.squares(of),
            WeightExpr::Split { heads, .. } => {
                if let Some(parts) = joined(expr) {
                    let all: Result<Vec<_>> = parts.iter().map(|part| self.squares(whole(part))).collect();
                    return Ok(all?.into_iter().collect::<Option<Vec<_>>>().map(|parts| parts.concat()));
                }
                let Some((of, first)) = some_matrices(expr) else { return Ok(None) };
                let cols = of.shape().ok().and_then(|s| s.last().copied()).unwrap_or(0);
                let all = self.squares(of)?;
                Ok(all.and_then(|all| Some(all.get(first * cols..(first + heads) * cols)?.to_vec())))
            }
            WeightExpr::Concat { axis: Axis::Cols, of } => {
                let mut all = Vec::new();
                for part in of {
                    match self.squares(part)? {
                        Some(channels) if part.shape().is_ok_and(|s| s.len() == 2) => all.extend(channels),
                        _ => return Ok(None),
                    }
                }
                Ok(Some(all))
            }
            // (x · s) Wᵀ = x (W · s)ᵀ: the stored matrix reads x, which is the recorded input divided by s.
            WeightExpr::ScaleCols { of, by } => {
                let Some(mut channels) = self.squares(of)? else { return Ok(None) };
                let cols = by.shape().ok().and_then(|s| s.last().copied()).unwrap_or(0);
                let mut factors = vec![0.0; cols];
                by.read(0, 0..1, 0..cols, self.source, &mut factors)
                    .map_err(|e| Error::input(e.to_string()))?;
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
}

/// The matrices that an expression has some of, one after the other, and the number of the first.
fn some_matrices(expr: &WeightExpr) -> Option<(&WeightExpr, usize)> {
    let WeightExpr::Split { heads, of } = expr else { return None };
    let WeightExpr::Slice { axis: Axis::Rows, start, step: 1, len, of } = &**of else { return None };
    let WeightExpr::Join(whole) = &**of else { return None };
    Some((whole, start / (len / heads.max(&1)).max(1)))
}

/// Parts whose matrices an expression has one after the other.
fn joined(expr: &WeightExpr) -> Option<&[WeightExpr]> {
    let WeightExpr::Split { of, .. } = expr else { return None };
    let WeightExpr::Concat { axis: Axis::Rows, of } = &**of else { return None };
    of.iter().all(|part| matches!(part, WeightExpr::Join(_))).then_some(of)
}

/// The matrices whose rows are joined.
fn whole(part: &WeightExpr) -> &WeightExpr {
    if let WeightExpr::Join(of) = part { of } else { part }
}

/// Mean squares `[matrices, cols]`; for a matrix with too few tokens, those of all matrices together.
fn recorded(moments: &Moments) -> Vec<f32> {
    let mean = moments.mean();
    let own = |matrix: usize| if moments.tokens[matrix] < ENOUGH { &mean[..] } else { moments.of(matrix) };
    (0..moments.matrices()).flat_map(|matrix| own(matrix).iter().copied()).collect()
}

/// Scales channels to a mean of 1 and raises the silent ones. If nothing was recorded, all channels are
/// equal.
fn normalise(channels: &mut [f32]) {
    let mean = channels.iter().map(|&x| f64::from(x)).sum::<f64>() / channels.len().max(1) as f64;
    for x in channels {
        let share = if mean > 0.0 { (f64::from(*x) / mean) as f32 } else { 1.0 };
        *x = (share + FLOOR) / (1.0 + FLOOR);
    }
}

/// One line per layer with experts that saw too few tokens, for a warning.
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
            "{experts} of {all} experts have fewer than {ENOUGH} tokens ({}{more}): their layers' mean replaces \
             theirs; use more text or more `tokens`",
            layers.join(", ")
        )
    })
}
