//! Trains predictors of a layer's neurons on the rows of a profile, and counts their misses on other rows.
//!
//! A neuron is predicted to be active if its predicted gate exceeds the border less `κ` standard errors. The
//! errors and `κ` are fitted on every other row, so that the requested share of the active neurons is found
//! there. Recall and the predicted share are counted on the other rows. Rows belong to a layer: a profile
//! does not record which experts its router chose for them, so that every expert computes every row.

use super::low_rank;
use half::bf16;
use moec_base::error::{Error, Result};
use moec_ir::op::Predictor;
use moec_ir::{Format, Glu, Source, WeightExpr};
use moec_profile::inputs::Input;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Format of the codes of [`Predictor::Coarse`]: four bits, and a scale for every 32.
pub(super) const CODES: Format = Format::Q4;
/// Format of the matrices of [`Predictor::LowRank`].
pub(super) const FACTORS: Format = Format::Bf16;
/// Ranks that are tried.
pub(super) const RANKS: [usize; 6] = [8, 16, 32, 64, 128, 256];
/// Neurons whose codes are in memory at once.
const NEURONS: usize = 64;
/// Largest number of bytes for experts that are trained at once, unless a single one takes more.
const MOST_BYTES: usize = 2 << 30;

/// Largest number of bytes that training one expert on `rows` rows takes. These are a few copies of its
/// gates' sides, the predictions of each row, and the gates once.
pub fn bytes(inter: usize, hidden: usize, rows: usize) -> usize {
    let (number, rank) = (size_of::<f32>(), ranks(inter, hidden).max().unwrap_or(0));
    let gates = number * inter * hidden;
    // Exact and predicted gates, and for every kind the distance of neurons from the border.
    let kinds = RANKS.len() + 1;
    let predictions = number * rows * (2 * inter + rank) + kinds * 2 * number * (rows + 1) * inter;
    let factors = 2 * number * rank * (inter + hidden);
    let codes = number * NEURONS * (hidden + rows);
    gates + predictions.max(low_rank::bytes(inter, hidden, rank)) + factors + codes
}

/// Ranks whose matrices are smaller than gates `[inter, hidden]`.
fn ranks(inter: usize, hidden: usize) -> impl Iterator<Item = usize> {
    RANKS.into_iter().filter(move |rank| 2 * rank <= inter.min(hidden))
}

/// The neurons of a layer's experts.
pub(super) struct Neurons<'a> {
    /// Their weight, `[experts, inter, 3 · hidden]`.
    pub(super) expr: &'a WeightExpr,
    pub(super) experts: usize,
    pub(super) inter: usize,
    pub(super) hidden: usize,
    pub(super) glu: Glu,
}

/// Kind of predictor of gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) predictor: Predictor,
    /// Rank of [`Predictor::LowRank`].
    pub(super) rank: usize,
}

/// A trained predictor of all experts.
pub(super) struct TrainedPredictor {
    pub(super) kind: Kind,
    /// Standard errors that are subtracted from the border.
    pub(super) kappa: f64,
    /// Share of the active neurons that are found, on rows outside of the fit.
    pub(super) recall: f64,
    /// Share of all neurons that are predicted to be active there.
    pub(super) predicted: f64,
    /// `[experts, inter]`: added to the predicted gates.
    pub(super) margins: Vec<f32>,
}

/// All predictors of a layer.
pub(super) struct LayerPredictors {
    /// Share of active neurons, on rows outside of the fit.
    pub(super) active: f64,
    /// Numbers of rows in the fit, and of rows for counting.
    pub(super) rows: [usize; 2],
    pub(super) predictors: Vec<TrainedPredictor>,
    /// By expert, of the largest rank: `left` `[inter, rank]` by columns, `right` `[rank, hidden]` by rows.
    pub(super) factors: Vec<Factors>,
}

/// Factors: `left` column after column, `right` row after row. The first of both are the matrices of any
/// smaller rank.
#[derive(Clone, Default)]
pub(super) struct Factors {
    pub(super) left: Vec<f32>,
    pub(super) right: Vec<f32>,
}

/// Statistics of one expert for a kind. `errors` are the standard errors of neurons; the others are numbers
/// of standard errors by which predictions are below the border.
#[derive(Default)]
struct MarginSamples {
    errors: Vec<f32>,
    fitted: Vec<f32>,
    active: Vec<f32>,
    inactive: Vec<f32>,
}

/// True if a gate activates its neuron, as in [`moec_ir::Op::NeuronFfn`].
fn activates(glu: Glu, gate: f32) -> bool {
    match glu {
        Glu::FatRelu { threshold } => gate >= threshold,
        _ => gate > 0.0,
    }
}

/// The smallest gate of an active neuron.
fn activity_threshold(glu: Glu) -> f32 {
    match glu {
        Glu::FatRelu { threshold } => threshold,
        _ => 0.0,
    }
}

/// Trains all kinds whose weights are smaller than the gates; `recall` is the share of active neurons that
/// they must find.
///
/// # Errors
/// Fails if weights cannot be read, or on an interrupt.
pub(super) fn train(
    of: &Neurons<'_>,
    input: &Input<'_>,
    recall: f64,
    source: &dyn Source,
) -> Result<LayerPredictors> {
    let low = ranks(of.inter, of.hidden);
    let mut kinds: Vec<Kind> = low.map(|rank| Kind { predictor: Predictor::LowRank, rank }).collect();
    kinds.push(Kind { predictor: Predictor::Coarse, rank: 0 });
    let at_once = (MOST_BYTES / bytes(of.inter, of.hidden, input.len()).max(1)).max(1);
    let experts = in_parallel(of.experts, at_once, |e| expert(of, input, e, &kinds, source))?;
    let halves = [input.len().div_ceil(2), input.len() / 2];
    let mut factors = Vec::new();
    let mut by_kind: Vec<Vec<MarginSamples>> = kinds.iter().map(|_| Vec::new()).collect();
    for (own, seen) in experts {
        factors.push(own);
        by_kind.iter_mut().zip(seen).for_each(|(all, seen)| all.push(seen));
    }
    let count = |of: &[MarginSamples], which: fn(&MarginSamples) -> &Vec<f32>| {
        of.iter().map(|s| which(s).len()).sum::<usize>()
    };
    let first = by_kind.first().map_or(&[][..], Vec::as_slice);
    let active = count(first, |s| &s.active);
    let all = active + count(first, |s| &s.inactive);
    let share = |part: usize, of: usize| part as f64 / of.max(1) as f64;
    let predictors = kinds.into_iter().zip(&by_kind).map(|(kind, seen)| {
        let mut fitted: Vec<f32> = seen.iter().flat_map(|s| s.fitted.iter().copied()).collect();
        let kappa = quantile(&mut fitted, recall);
        let within = |x: &&f32| f64::from(**x) < kappa;
        let found = seen.iter().flat_map(|s| &s.active).filter(within).count();
        let false_ones = seen.iter().flat_map(|s| &s.inactive).filter(within).count();
        let margin = |error: &f32| (kappa * f64::from(*error)) as f32 - activity_threshold(of.glu);
        TrainedPredictor {
            kind,
            kappa,
            recall: share(found, active),
            predicted: share(found + false_ones, all),
            margins: seen.iter().flat_map(|s| s.errors.iter().map(margin)).collect(),
        }
    });
    Ok(LayerPredictors {
        active: share(active, all),
        rows: halves,
        predictors: predictors.collect(),
        factors,
    })
}

/// The least number that exceeds this share of all.
fn quantile(of: &mut [f32], share: f64) -> f64 {
    if of.is_empty() {
        return 0.0;
    }
    of.sort_unstable_by(f32::total_cmp);
    let at = ((share * of.len() as f64).ceil() as usize).clamp(1, of.len()) - 1;
    // Above that value, by one rounding step.
    f64::from(of[at].next_up())
}

/// Gates of an expert, `[inter, hidden]`.
pub(super) fn gates(of: &Neurons<'_>, e: usize, source: &dyn Source) -> Result<Vec<f32>> {
    let mut gates = vec![0.0; of.inter * of.hidden];
    let read = of.expr.read(e, 0..of.inter, 0..of.hidden, source, &mut gates);
    read.map_err(|e| Error::input(e.to_string()))?;
    Ok(gates)
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `rows [n, cols]` times `matrix [m, cols]`: `[n, m]`.
fn products(rows: &[f32], matrix: &[f32], cols: usize) -> Vec<f32> {
    let row = |x: &[f32]| matrix.chunks_exact(cols).map(|w| dot(x, w)).collect::<Vec<_>>();
    rows.chunks_exact(cols).flat_map(row).collect()
}

fn expert(
    of: &Neurons<'_>,
    input: &Input<'_>,
    e: usize,
    kinds: &[Kind],
    source: &dyn Source,
) -> Result<(Factors, Vec<MarginSamples>)> {
    moec_base::interrupt::check()?;
    let gates = gates(of, e, source)?;
    let rank = kinds.iter().map(|k| k.rank).max().unwrap_or(0);
    let factors = factors(of, &gates, input, e, rank)?;
    let exact = products(&input.rows, &gates, of.hidden);
    let small = products(&input.rows, &factors.right, of.hidden);
    let samples = kinds.iter().map(|kind| {
        let predicted = match kind.predictor {
            Predictor::Coarse => by_codes(of, &gates, &input.rows),
            Predictor::LowRank => by_factors(of, &factors, &small, [rank, kind.rank]),
        };
        sample_margins(of, &exact, &predicted)
    });
    let samples = samples.collect();
    Ok((factors, samples))
}

/// Predicted gates with numbers rounded to codes.
fn by_codes(of: &Neurons<'_>, gates: &[f32], rows: &[f32]) -> Vec<f32> {
    let mut predicted = vec![0.0; rows.len() / of.hidden * of.inter];
    for (i, gates) in gates.chunks(NEURONS * of.hidden).enumerate() {
        let mut codes = gates.to_vec();
        moec_cpu::round_rows(CODES, of.hidden, &mut codes);
        let some = products(rows, &codes, of.hidden);
        let neurons = codes.len() / of.hidden;
        for (predicted, some) in predicted.chunks_exact_mut(of.inter).zip(some.chunks_exact(neurons)) {
            predicted[i * NEURONS..][..neurons].copy_from_slice(some);
        }
    }
    predicted
}

/// Predicted gates of the first `used` of `rank` factors; `small` is the product of rows and all of `right`.
fn by_factors(of: &Neurons<'_>, factors: &Factors, small: &[f32], [rank, used]: [usize; 2]) -> Vec<f32> {
    let row = |t: &[f32]| {
        let mut sums = vec![0.0; of.inter];
        for (t, column) in t.iter().take(used).zip(factors.left.chunks_exact(of.inter)) {
            sums.iter_mut().zip(column).for_each(|(s, l)| *s += t * l);
        }
        sums
    };
    small.chunks_exact(rank.max(1)).flat_map(row).collect()
}

/// The matrices of low rank that approximate gates on such an input, rounded as they are stored.
///
/// # Errors
/// Fails if numbers are not finite.
fn factors(of: &Neurons<'_>, gates: &[f32], input: &Input<'_>, e: usize, rank: usize) -> Result<Factors> {
    if rank == 0 {
        return Ok(Factors::default());
    }
    let found = low_rank::factors(gates, of.hidden, &input.moments(e), rank).ok_or_else(|| {
        Error::input(format!(
            "the gates of expert {e}, or the inputs that the profile recorded for them, are not finite"
        ))
        .hint(
            "record the profile again with `moec calibrate`, or set `predict = \"coarse\"` under `[experts]`",
        )
    })?;
    let round = |all: Vec<f64>| all.into_iter().map(|x| bf16::from_f64(x).to_f32()).collect();
    Ok(Factors { left: round(found.left), right: round(found.right) })
}

/// Compares predicted with exact gates, `[rows, inter]` both.
fn sample_margins(of: &Neurons<'_>, exact: &[f32], predicted: &[f32]) -> MarginSamples {
    let (inter, border) = (of.inter, activity_threshold(of.glu));
    let rows = || exact.chunks_exact(inter).zip(predicted.chunks_exact(inter)).enumerate();
    let mut squares = vec![0.0_f64; inter];
    let mut fitted = 0_u32;
    for (_, (exact, predicted)) in rows().filter(|(row, _)| row % 2 == 0) {
        fitted += 1;
        let off = exact.iter().zip(predicted).map(|(a, b)| f64::from(a - b).powi(2));
        squares.iter_mut().zip(off).for_each(|(sum, x)| *sum += x);
    }
    // An error of 0 would exclude differences by rounding.
    let least = f64::from(f32::MIN_POSITIVE).sqrt();
    let error = |sum: &f64| (sum / f64::from(fitted.max(1))).sqrt().max(least) as f32;
    let errors: Vec<f32> = squares.iter().map(error).collect();
    let mut samples = MarginSamples::default();
    for (row, (exact, predicted)) in rows() {
        for (i, (gate, predicted)) in exact.iter().zip(predicted).enumerate() {
            let below = (border - predicted) / errors[i];
            match (activates(of.glu, *gate), row % 2) {
                (true, 0) => samples.fitted.push(below),
                (true, _) => samples.active.push(below),
                (false, 0) => {}
                (false, _) => samples.inactive.push(below),
            }
        }
    }
    samples.errors = errors;
    samples
}

/// Computes `of(0), …, of(n − 1)` on as many cores, at most `at_once` at once; the first error is returned.
fn in_parallel<T: Send>(n: usize, at_once: usize, of: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let found: Mutex<Vec<(usize, Result<T>)>> = Mutex::new(Vec::new());
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= n {
                return;
            }
            let one = of(i);
            found.lock().unwrap_or_else(PoisonError::into_inner).push((i, one));
        }
    };
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(n).min(at_once);
    thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_by_key(|(i, _)| *i);
    found.into_iter().map(|(_, one)| one).collect()
}
