//! Trains predictors of a layer's neurons on the rows of a profile, and counts what they miss on rows that they have not seen.
//!
//! A predictor takes a neuron to be active where what it says of the gate is past the border less `κ` of its standard errors. The errors
//! and `κ` are of every other row, so that of the neurons that these rows activate the wished share is found; recall and the share that is
//! taken to be active are counted on the others. Rows are of a layer: which experts its router chose for them is not in a profile,
//! so that every row is computed by every expert.

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
/// Neurons whose codes are held at once.
const NEURONS: usize = 64;
/// Most bytes that experts take that are trained at once, unless a single one takes more.
const MOST_BYTES: usize = 2 << 30;

/// Most bytes that the training of one expert takes, of `rows` rows: a few copies of its gates' sides, of what is said of each row, and
/// the gates once.
pub fn bytes(inter: usize, hidden: usize, rows: usize) -> usize {
    let (number, rank) = (size_of::<f32>(), ranks(inter, hidden).max().unwrap_or(0));
    let gates = number * inter * hidden;
    // Exact and said, and of every kind how far neurons are from the border.
    let kinds = RANKS.len() + 1;
    let said = number * rows * (2 * inter + rank) + kinds * 2 * number * (rows + 1) * inter;
    let factors = 2 * number * rank * (inter + hidden);
    let codes = number * NEURONS * (hidden + rows);
    gates + said.max(low_rank::bytes(inter, hidden, rank)) + factors + codes
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
    /// Of [`Predictor::LowRank`].
    pub(super) rank: usize,
}

/// A predictor of all experts, trained.
pub(super) struct Tried {
    pub(super) kind: Kind,
    /// Standard errors that the border is lower by.
    pub(super) kappa: f64,
    /// Of the neurons that rows activate, those that are found: on rows that nothing was fitted to.
    pub(super) recall: f64,
    /// Of all neurons, those that are taken to be active there.
    pub(super) predicted: f64,
    /// `[experts, inter]`: what is added to what is said.
    pub(super) margins: Vec<f32>,
}

/// All predictors of a layer.
pub(super) struct Trained {
    /// Share of neurons that rows activate, of those that nothing was fitted to.
    pub(super) active: f64,
    /// Rows that were fitted to, and rows that were counted.
    pub(super) rows: [usize; 2],
    pub(super) tried: Vec<Tried>,
    /// By expert, of the largest rank: `left` `[inter, rank]` by columns, `right` `[rank, hidden]` by rows.
    pub(super) factors: Vec<Factors>,
}

/// `left` column after column, `right` row after row: the first of both are the matrices of any smaller rank.
#[derive(Clone, Default)]
pub(super) struct Factors {
    pub(super) left: Vec<f32>,
    pub(super) right: Vec<f32>,
}

/// Statistics of one expert for a kind: of the neurons that rows activate, and of the others, how many standard errors below the border the
/// predictor puts them.
#[derive(Default)]
struct MarginSamples {
    errors: Vec<f32>,
    fitted: Vec<f32>,
    active: Vec<f32>,
    inactive: Vec<f32>,
}

/// Whether a gate activates its neuron, as [`moec_ir::Op::NeuronFfn`] has it.
fn wakes(glu: Glu, gate: f32) -> bool {
    match glu {
        Glu::FatRelu { threshold } => gate >= threshold,
        _ => gate > 0.0,
    }
}

/// The gate from which on neurons are active.
fn border(glu: Glu) -> f32 {
    match glu {
        Glu::FatRelu { threshold } => threshold,
        _ => 0.0,
    }
}

/// Trains all kinds whose weights are smaller than the gates; `recall` is the share of active neurons that they are to find.
///
/// # Errors
/// Weights that cannot be read, an interrupt.
pub(super) fn train(
    of: &Neurons<'_>,
    input: &Input<'_>,
    recall: f64,
    source: &dyn Source,
) -> Result<Trained> {
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
    let tried = kinds.into_iter().zip(&by_kind).map(|(kind, seen)| {
        let mut fitted: Vec<f32> = seen.iter().flat_map(|s| s.fitted.iter().copied()).collect();
        let kappa = quantile(&mut fitted, recall);
        let within = |x: &&f32| f64::from(**x) < kappa;
        let found = seen.iter().flat_map(|s| &s.active).filter(within).count();
        let false_ones = seen.iter().flat_map(|s| &s.inactive).filter(within).count();
        let margin = |error: &f32| (kappa * f64::from(*error)) as f32 - border(of.glu);
        Tried {
            kind,
            kappa,
            recall: share(found, active),
            predicted: share(found + false_ones, all),
            margins: seen.iter().flat_map(|s| s.errors.iter().map(margin)).collect(),
        }
    });
    Ok(Trained { active: share(active, all), rows: halves, tried: tried.collect(), factors })
}

/// The least number that such a share of all is below.
fn quantile(of: &mut [f32], share: f64) -> f64 {
    if of.is_empty() {
        return 0.0;
    }
    of.sort_unstable_by(f32::total_cmp);
    let at = ((share * of.len() as f64).ceil() as usize).clamp(1, of.len()) - 1;
    // Above it, and be it by a rounding.
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
    let seen = kinds.iter().map(|kind| {
        let said = match kind.predictor {
            Predictor::Coarse => by_codes(of, &gates, &input.rows),
            Predictor::LowRank => by_factors(of, &factors, &small, [rank, kind.rank]),
        };
        judge(of, &exact, &said)
    });
    let seen = seen.collect();
    Ok((factors, seen))
}

/// Predicted gates once their numbers are rounded to codes.
fn by_codes(of: &Neurons<'_>, gates: &[f32], rows: &[f32]) -> Vec<f32> {
    let mut said = vec![0.0; rows.len() / of.hidden * of.inter];
    for (i, gates) in gates.chunks(NEURONS * of.hidden).enumerate() {
        let mut codes = gates.to_vec();
        moec_cpu::round_rows(CODES, of.hidden, &mut codes);
        let some = products(rows, &codes, of.hidden);
        let neurons = codes.len() / of.hidden;
        for (said, some) in said.chunks_exact_mut(of.inter).zip(some.chunks_exact(neurons)) {
            said[i * NEURONS..][..neurons].copy_from_slice(some);
        }
    }
    said
}

/// Prediction of the first `used` of `rank` factors: `small` are rows times all of `right`.
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

/// The matrices of low rank that stand for gates on such an input, rounded as they are stored.
///
/// # Errors
/// Numbers that are not finite.
fn factors(of: &Neurons<'_>, gates: &[f32], input: &Input<'_>, e: usize, rank: usize) -> Result<Factors> {
    if rank == 0 {
        return Ok(Factors::default());
    }
    let found = low_rank::factors(gates, of.hidden, &input.moments(e), rank).ok_or_else(|| {
        Error::input(format!(
            "the gates of expert {e}, or the inputs that the profile recorded for them, are not finite"
        ))
        .hint("take the profile anew with `moec calibrate`, or set `predict = \"coarse\"` under `[experts]`")
    })?;
    let round = |all: Vec<f64>| all.into_iter().map(|x| bf16::from_f64(x).to_f32()).collect();
    Ok(Factors { left: round(found.left), right: round(found.right) })
}

/// Compares what is said of gates with what they are, `[rows, inter]` both.
fn judge(of: &Neurons<'_>, exact: &[f32], said: &[f32]) -> MarginSamples {
    let (inter, border) = (of.inter, border(of.glu));
    let rows = || exact.chunks_exact(inter).zip(said.chunks_exact(inter)).enumerate();
    let mut squares = vec![0.0_f64; inter];
    let mut fitted = 0_u32;
    for (_, (exact, said)) in rows().filter(|(row, _)| row % 2 == 0) {
        fitted += 1;
        let off = exact.iter().zip(said).map(|(a, b)| f64::from(a - b).powi(2));
        squares.iter_mut().zip(off).for_each(|(sum, x)| *sum += x);
    }
    // Where nothing is wrong a rounding still may be.
    let least = f64::from(f32::MIN_POSITIVE).sqrt();
    let error = |sum: &f64| (sum / f64::from(fitted.max(1))).sqrt().max(least) as f32;
    let errors: Vec<f32> = squares.iter().map(error).collect();
    let mut seen = MarginSamples::default();
    for (row, (exact, said)) in rows() {
        for (i, (gate, said)) in exact.iter().zip(said).enumerate() {
            let below = (border - said) / errors[i];
            match (wakes(of.glu, *gate), row % 2) {
                (true, 0) => seen.fitted.push(below),
                (true, _) => seen.active.push(below),
                (false, 0) => {}
                (false, _) => seen.inactive.push(below),
            }
        }
    }
    seen.errors = errors;
    seen
}

/// `of(0), …, of(n − 1)`, at most so many at once, on as many cores; the first error is that of all.
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
