//! Formats of single weights under a size limit, chosen by their cost in quality.
//!
//! The error that a rounding makes in the output of a matrix follows from the second moments of its inputs.
//! It is the share `ρ = tr(ΔW H ΔWᵀ) / tr(W H Wᵀ)` of the output's energy, here over a sample of rows. To
//! second order a loss grows linearly with `ρ`. The slope is measured class by class: a model with that class
//! in q4 and the original model read the same text. The divergence of their probabilities is divided in
//! proportion to `ρ`. Then formats are bought by gain per byte, and the result is measured, too. The cost of
//! all of this is printed before it begins (`measure`).
#![expect(clippy::cast_possible_truncation, reason = "estimates in bytes, and ids of weights")]

mod knapsack;
pub mod losses;
mod measure;

pub use knapsack::{Choice, Item, buy};

use crate::calibrate::profile;
use crate::job::Job;
use crate::quality::Measured;
use measure::{Bench, Extent};
use moec_base::error::{Error, Result};
use moec_base::human;
use moec_base::progress::Progress;
use moec_config::{Config, Size};
use moec_cpu::{WeightImportance as _, Weighting, uses_feedback};
use moec_ir::{Format, Module, Operand, Source, Weight, WeightClass, WeightId};
use moec_passes::decisions::Decision;
use moec_passes::format::Formats;
use moec_pipeline::Inputs;
use moec_profile::{Importance, Profile};
use std::collections::BTreeMap;

/// Formats that a weight may get in place of that of its class, if they are smaller.
const SMALLER: [Format; 2] = [Format::Q8, Format::Q4];
/// Matrices of a weight, and rows of each, that are sampled for rounding errors.
const MATRICES: usize = 4;
const ROWS: usize = 64;
/// Number of times that a choice is measured and improved.
const ROUNDS: usize = 4;

/// Weights that get one format: they read the same input, and rewriting may join them.
struct Group {
    names: Vec<String>,
    class: WeightClass,
    /// Number of their elements.
    numbers: u64,
    /// Elements of the table that serves as head, too, among these.
    tied: u64,
    /// The format of the class, and smaller ones, each with its share ρ of the output's energy.
    errors: Vec<(Format, f64)>,
}

impl Group {
    /// Bytes in a bundle. It stores a tied table twice if either use has a rounding of its own.
    fn bytes(&self, format: Format) -> u64 {
        let again = if uses_feedback(format) { self.tied } else { 0 };
        ((self.numbers + again) as f64 * format.bits() / 8.0) as u64
    }
}

/// Name of the decision's pass in `decisions.json`.
const PASS: &str = "size";
/// Figure of the first decision: the increase of perplexity, as a share, two standard errors included.
pub const INCREASE: &str = "perplexity_increase_share";

/// Decision on the formats of single weights.
fn mixed(size: Option<u64>, limit: Option<f64>, bytes: u64, increase: f64) -> Decision {
    let chosen = match size {
        Some(size) => format!("one for each weight, for {}", human::bytes(size)),
        None => "one for each weight, as small as quality allows".to_owned(),
    };
    let why = format!("perplexity {:+.3} % as measured", 100.0 * increase);
    let mut decision = Decision::new(PASS, "formats of weights", chosen, why)
        .with(&[("weights_bytes", bytes as f64), (INCREASE, increase)]);
    decision.figures.extend(size.map(|size| ("allowed_bytes".to_owned(), size as f64)));
    decision.figures.extend(limit.map(|limit| ("allowed_perplexity_increase_share".to_owned(), limit)));
    decision
}

/// Chooses the formats for `size` under `[weights]`, and gives the reasons.
///
/// # Errors
/// Fails without a profile or a text, if no choice has that size, or if none of that size keeps the quality
/// limit. Errors of building and running a model are returned, too.
pub fn choose(c: &Inputs<'_>, job: Job<'_>, progress: &Progress) -> Result<(Formats, Vec<Decision>)> {
    let config = c.config;
    let needs = |what: &str| Error::input(format!("`size` under `[weights]` needs {what}"));
    let profile = profile(c, job, progress)?.ok_or_else(|| {
        needs("a profile, which has the costs of rounding")
            .hint("name `text` or `profile` under `[calibrate]`")
    })?;
    if profile.correlations.is_empty() {
        return Err(needs("a profile with correlations")
            .because("the profile is of an earlier version of moec")
            .hint("record it again with `moec calibrate`"));
    }
    let measured = Measured::new(config, c.checkpoint()?, &profile, c.spec()?, progress)?
        .ok_or_else(|| needs("text to measure on").hint("name `text` under `[quality]` or `[calibrate]`"))?
        .with_job(job)?;
    let limit = config.quality.max_perplexity_increase;
    let most = match config.weights.size {
        Size::Most(bytes) => bytes,
        Size::Any | Size::Auto => u64::MAX,
    };
    if most == u64::MAX && limit.is_none() {
        return Err(needs("a limit if it is \"auto\"")
            .hint("set `max_perplexity_increase` under `[quality]`, or a size"));
    }
    let groups = groups(&profile, &c.lowered()?, config, c.checkpoint()?)?;
    let sum = |of: &dyn Fn(&Group) -> u64| groups.iter().map(of).sum::<u64>();
    let own = sum(&|g| g.bytes(g.errors[0].0));
    let extent = Extent {
        models: 1 + in_question(&groups).count() + ROUNDS,
        own,
        least: sum(&|g| g.errors.last().map_or(0, |e| g.bytes(e.0))),
        all: sum(&|g| g.errors.iter().map(|e| g.bytes(e.0)).sum()),
        most,
    };
    let mut bench = Bench::new(c, &profile, &measured, extent, progress)?;
    let fixed = bench.bytes().saturating_sub(own);
    let factors = factors(&groups, &mut bench)?;
    let items: Vec<Item> = groups.iter().map(|g| item(g, &factors)).collect();
    let (mut room, mut target) = (most - fixed, limit.filter(|_| most == u64::MAX));
    for _ in 0..ROUNDS {
        let chosen = buy(&items, room, target.map(f64::ln_1p));
        let formats = formats(&groups, &chosen);
        let (bytes, found) = bench.measure(&formats)?;
        let increase = found.increase();
        progress.stage(
            "Measured",
            &format!("{} of weights: perplexity {:+.3} %", human::bytes(bytes), 100.0 * increase),
        );
        if bytes > most {
            // Padding, which the bits per element do not include.
            room = room.saturating_sub(bytes - most);
            continue;
        }
        if limit.is_none_or(|limit| increase <= limit) {
            let each = groups.iter().zip(items.iter().zip(&chosen)).map(|(g, (item, &at))| Decision {
                weights: g.names.clone(),
                ..Decision::new(PASS, "format of a weight", g.errors[at].0.name(), "least loss for its bytes")
                    .with(&[("loss_nats", item.options[at].loss)])
            });
            let size = (most < u64::MAX).then_some(most);
            let all = mixed(size, limit, bytes, increase);
            return Ok((formats, std::iter::once(all).chain(each).collect()));
        }
        let Some(aim) = &mut target else {
            return Err(Error::limit(format!(
                "no choice of formats found keeps both `size` and `max_perplexity_increase`: with {} of weights perplexity rises by {:.3} %",
                human::bytes(bytes),
                100.0 * increase
            ))
            .hint("allow a larger `size` under `[weights]`, or more `max_perplexity_increase` under `[quality]`"));
        };
        let predicted: f64 = items.iter().zip(&chosen).map(|(item, &at)| item.options[at].loss).sum();
        // The measurement includes two standard errors, which no format removes.
        *aim = 0.9 * predicted.exp_m1() * limit.unwrap_or(0.0) / increase;
        if predicted == 0.0 {
            break;
        }
    }
    Err(Error::limit("no choice of formats was found that keeps `max_perplexity_increase`")
        .hint("allow more under `[quality]`, or remove `size` under `[weights]`"))
}

/// Checks that a size is enough for the smallest choice of formats.
///
/// # Errors
/// Fails if it is not.
fn check_size(most: u64, least: u64) -> Result<()> {
    if least <= most {
        return Ok(());
    }
    Err(Error::limit(format!(
        "`size` under `[weights]` is {}, but the weights take {} at least",
        human::bytes(most),
        human::bytes(least)
    ))
    .because("this is with q4 for all weights but norms, routers and biases")
    .hint(format!("set it to {} or more", human::bytes(least + least / 100))))
}

fn formats(groups: &[Group], chosen: &[usize]) -> Formats {
    let of = |(g, &at): (&Group, &usize)| {
        g.names.iter().map(move |n| (n.clone(), g.errors[at].0)).collect::<Vec<_>>()
    };
    groups.iter().zip(chosen).flat_map(of).collect()
}

/// Options of a group: bytes, and an increase of the loss in nats per token.
fn item(group: &Group, factors: &BTreeMap<WeightClass, f64>) -> Item {
    let by = factors.get(&group.class).copied().unwrap_or(0.0);
    let option = |&(format, error): &(Format, f64)| Choice { bytes: group.bytes(format), loss: by * error };
    Item { options: group.errors.iter().map(option).collect() }
}

/// Classes with groups that may get a smaller format, and these groups. The number is the share of the
/// outputs' energy that the smallest format costs them together.
fn in_question(groups: &[Group]) -> impl Iterator<Item = (WeightClass, Vec<&Group>, f64)> {
    [WeightClass::Experts, WeightClass::Attention, WeightClass::Embeddings].into_iter().filter_map(|class| {
        let own: Vec<_> = groups.iter().filter(|g| g.class == class && g.errors.len() > 1).collect();
        let errors = own.iter().map(|g| g.errors.last().map(|e| e.1)).sum::<Option<f64>>();
        Some((class, own, errors.filter(|e| *e > 0.0)?))
    })
}

/// Slope of the loss over the share of energy, class by class.
fn factors(groups: &[Group], bench: &mut Bench<'_>) -> Result<BTreeMap<WeightClass, f64>> {
    let mut found = BTreeMap::new();
    for (class, own, errors) in in_question(groups) {
        let last = |g: &&Group| {
            g.names.iter().filter_map(|n| Some((n.clone(), g.errors.last()?.0))).collect::<Vec<_>>()
        };
        let (_, measured) = bench.measure(&own.iter().flat_map(last).collect())?;
        found.insert(class, measured.divergence.max(0.0) / errors);
    }
    Ok(found)
}

/// The weights that may get other formats than those of their class, grouped by the input that they read.
fn groups(profile: &Profile, lowered: &Module, config: &Config, source: &dyn Source) -> Result<Vec<Group>> {
    let importance = Importance::new(profile, lowered, lowered, source, |_| true)?;
    let importance = importance.with_feedback(profile.correlations.clone());
    let mut found: BTreeMap<(usize, WeightClass), Vec<&Weight>> = BTreeMap::new();
    for (i, weight) in lowered.weights.iter().enumerate() {
        if weight.shape.len() < 2 || weight.class == WeightClass::Exact {
            continue;
        }
        let input = profile.correlations.iter().position(|c| c.readers.contains(&weight.name));
        let key = input.unwrap_or(profile.correlations.len() + i);
        found.entry((key, weight.class)).or_default().push(weight);
    }
    let group = |((_, class), weights): ((usize, WeightClass), Vec<&Weight>)| {
        moec_base::interrupt::check()?;
        let top = config.weights.format(class);
        let numbers = |w: &&Weight| w.shape.iter().map(|&d| d as u64).product::<u64>();
        let mut group = Group {
            names: weights.iter().map(|w| w.name.clone()).collect(),
            class,
            numbers: weights.iter().map(numbers).sum(),
            tied: weights.iter().filter(|w| is_tied(lowered, w)).map(numbers).sum(),
            errors: vec![(top, 0.0)],
        };
        for format in SMALLER {
            if group.errors.last().is_some_and(|(last, _)| group.bytes(format) >= group.bytes(*last)) {
                continue;
            }
            let (mut missed, mut energy) = (0.0, 0.0);
            for weight in &weights {
                let (m, e) = error(weight, format, &importance, source)?;
                (missed, energy) = (missed + m, energy + e);
            }
            group.errors.push((format, if energy > 0.0 { missed / energy } else { 0.0 }));
        }
        Ok(group)
    };
    found.into_iter().map(group).collect()
}

/// Whether a weight is a table that serves as head, too.
fn is_tied(module: &Module, weight: &Weight) -> bool {
    let id = module.weights.iter().position(|w| w.name == weight.name).map(|i| WeightId(i as u32));
    let reads = |embeds: bool| {
        let nodes = module.entries.iter().flat_map(|g| &g.nodes);
        nodes
            .filter(|n| n.op.is_embedding() == embeds)
            .any(|n| n.inputs.iter().any(|&i| matches!(i, Operand::Weight(w) if Some(w) == id)))
    };
    reads(true) && reads(false)
}

/// Error of a format in the outputs' energy, and that energy, over a sample of rows.
fn error(
    weight: &Weight,
    format: Format,
    importance: &Importance,
    source: &dyn Source,
) -> Result<(f64, f64)> {
    let (matrices, rows, cols) = (weight.matrices(), weight.rows(), weight.cols());
    let (mut missed, mut energy) = (0.0, 0.0);
    let take = rows.min(ROWS);
    let mut exact = vec![0.0; take * cols];
    for at in 0..matrices.min(MATRICES) {
        let matrix = at * matrices / matrices.min(MATRICES);
        // The middle of the rows, so that gate and up both contribute.
        let first = (rows - take) / 2;
        weight
            .expr
            .read(matrix, first..first + take, 0..cols, source, &mut exact)
            .map_err(|e| Error::input(format!("`{}` cannot be read", weight.name)).because(e))?;
        let feedback = importance.feedback(&weight.name, matrix);
        let by = importance.importance(&weight.name, matrix);
        let weighting = Weighting { feedback: feedback.as_deref(), ..Weighting::of(by) };
        let groups = moec_cpu::groups(format, &exact, cols, weighting).map_err(|x| {
            Error::input(format!("`{}` holds {x:e}, which {format} cannot hold", weight.name))
        })?;
        let values = groups.flat_map(|(scale, codes)| codes.map(|q| f32::from(q) * scale));
        // Groups end with the row; the last one is padded.
        let width = cols.next_multiple_of(format.block());
        let stored: Vec<f32> = values.enumerate().filter(|(i, _)| i % width < cols).map(|(_, x)| x).collect();
        let left: Vec<f32> = exact.iter().zip(&stored).map(|(x, y)| x - y).collect();
        let weigh = |x: &[f32]| match &feedback {
            Some(feedback) => feedback.energy(x),
            None => x
                .iter()
                .enumerate()
                .map(|(i, x)| {
                    f64::from(x * x) * by.and_then(|b| b.get(i % cols)).map_or(1.0, |&b| f64::from(b))
                })
                .sum(),
        };
        (missed, energy) = (missed + weigh(&left), energy + weigh(&exact));
    }
    Ok((missed, energy))
}
