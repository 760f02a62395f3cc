//! Quality by the share of dropped tokens (§4.1, §5.6, Table 3), measured: moec's capacities beside the two
//! estimates of the paper.
//!
//! Each policy gives every expert of a model a capacity, from a profile. All capacities are multiplied by one
//! factor, with which the requested share of the measured text's (token, expert) pairs is past them: so
//! policies are compared at equal shares. The model then reads the text with these capacities and without any.
//!
//! `cargo xtask quality --drops` calls [`measure`] and writes a file, which the page has as a table.

use moec_base::progress::Progress;
use moec_base::{Error, Result};
use moec_config::{Activations, Capacity, Config, Overflow};
use moec_costs::units::Units;
use moec_import::ImportOptions;
use moec_ir::Format;
use moec_ir::placement::{CAPACITY_ALIGN, Placement};
use moec_measure::calibrate::{Request, calibrate, read_texts};
use moec_measure::job::Job;
use moec_measure::quality::Measured;
use moec_passes::tier::tier;
use moec_pipeline::{Candidate, Compilation, Inputs, Stops};
use moec_profile::loads::{Account, Loads, loads};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::path::Path;

/// Requested shares of the pairs past a capacity: the paper drops 10.6 to 21.8 % (Table 3).
pub const SHARES: [f64; 4] = [0.01, 0.05, 0.1, 0.2];
/// Tokens of a chunk, and of a window of text: the longest sequence that the model was trained on.
const CHUNK: usize = 512;
/// The device whose alignment capacities have.
const DEVICE: &str = "m2-ultra";
/// Figures of the last measurement.
const MEASURED: &str = include_str!("../../measured/drops.toml");

/// Measured figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Drops {
    /// Name of the model's folder.
    pub model: String,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Perplexity with room for every row.
    pub perplexity: f64,
    /// The curves, policy by policy.
    pub rows: Vec<Row>,
}

/// A point of a curve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// `capacity` under `[experts]`.
    pub capacity: String,
    /// `overflow` under `[experts]`.
    pub overflow: String,
    /// Requested share of the pairs past a capacity.
    pub requested: f64,
    /// Share of the pairs that lost the expert.
    pub dropped: f64,
    /// Share of the pairs past a capacity that were computed.
    pub spilled: f64,
    /// Share of the rows that graphs compute which is padding, by the loads of the text.
    pub padding: f64,
    /// Increase of the perplexity, as a share.
    pub increase: f64,
    /// Kullback-Leibler divergence from the probabilities with room for every row, in nats.
    pub divergence: f64,
    /// Share of tokens after which the most probable next token is the same.
    pub same_choice: f64,
}

/// Text and extent of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Extent<'a> {
    /// Text that capacities come from.
    pub calibration: &'a Path,
    /// Text that is measured.
    pub text: &'a Path,
    /// Most tokens of either text that loads are recorded of.
    pub recorded: usize,
    /// Most tokens that are measured.
    pub tokens: usize,
    /// Requested shares.
    pub shares: &'a [f64],
}

/// Measures a checkpoint on this machine.
///
/// # Errors
/// Fails if the checkpoint or a text cannot be read, or the model does not run here.
pub fn measure(model: &Path, extent: &Extent<'_>, progress: &Progress) -> Result<Drops> {
    let mut config = Config::defaults(&model.join("model.toml"));
    config.shapes.max_context = Some(CHUNK);
    config.shapes.prefill_chunk = Some(CHUNK);
    config.weights.experts = Format::F32;
    config.weights.attention = Format::F32;
    config.weights.embeddings = Format::F32;
    config.weights.activations = Activations::F32;
    config.quality.text = vec![extent.text.to_owned()];
    let (checkpoint, spec) = moec_import::open(model, &ImportOptions::default())?;
    let profile = |path: &Path| {
        let texts = read_texts(&[path.to_owned()])?;
        let request = Request { texts: &texts, tokens: extent.recorded, window: CHUNK, job: Job::ALONE };
        calibrate(&config, &checkpoint, &spec, &request, progress)
    };
    let (recorded, own) = (profile(extent.calibration)?, profile(extent.text)?);
    let [known, own] = [loads(&recorded, CHUNK as u32)?, loads(&own, CHUNK as u32)?];

    let target = moec_targets::target("native")?.with_activations(Activations::F32);
    let mut compilation = Compilation::new(Inputs::new(&config, &checkpoint, &spec, &target));
    let until = Stops { stop_after: Some("rewrite"), ..Stops::default() };
    compilation.run(until, &Progress::silent(), &mut |_| {})?;
    let info = compilation.inputs.model_info()?;
    let device = moec_targets::device(DEVICE)?;
    let units = Units::of(&device).ok_or_else(|| Error::bug(format!("`{DEVICE}` has no NPU")))?;
    let measured = Measured::new(&config, &checkpoint, &recorded, &spec, progress)?
        .ok_or_else(|| Error::bug("there is a text, and nothing to measure it"))?
        .with_tokens(extent.tokens);

    let full = measured.unbounded(None, &compilation.module, &info)?;
    let (mut rows, mut perplexity) = (Vec::new(), 0.0);
    for (name, capacity) in Capacity::NAMED {
        for overflow in Overflow::ALL {
            let mut experts = config.experts.clone();
            (experts.capacity, experts.overflow) = (capacity, Some(overflow));
            let whole = tier(&known, &units, &experts, experts.coverage);
            for &share in extent.shares {
                let placement = &at_share(&whole, &own, share);
                let candidate = Candidate { module: &compilation.module, model: &info, placement };
                let quality = measured.quality(&full, &candidate)?;
                progress.stage("Measured", &format!("{name}, {overflow}, {:.0} %", 100.0 * share));
                perplexity = quality.exact_perplexity;
                rows.push(Row {
                    capacity: name.to_owned(),
                    overflow: overflow.to_string(),
                    requested: share,
                    dropped: quality.dropped,
                    spilled: quality.spilled,
                    padding: account(placement, &own).padding_rate(),
                    increase: quality.perplexity / quality.exact_perplexity - 1.0,
                    divergence: quality.divergence,
                    same_choice: quality.same_choice,
                });
            }
        }
    }
    let model = model.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    Ok(Drops { model, chunk: CHUNK, perplexity, rows })
}

/// The placement with its capacities multiplied by the factor with which the share of the pairs of `loads` that
/// is past them is nearest to `share`.
fn at_share(placement: &Placement, loads: &Loads, share: f64) -> Placement {
    let tried = (0..=300).map(|step| scaled(placement, 8.0 * 0.98_f64.powi(step)));
    let miss = |p: &Placement| (account(p, loads).overflow_rate() - share).abs();
    tried.min_by(|a, b| miss(a).total_cmp(&miss(b))).unwrap_or_else(|| placement.clone())
}

/// The placement with its capacities multiplied by a factor, to the nearest multiple of the alignment.
fn scaled(placement: &Placement, factor: f64) -> Placement {
    let rows = |capacity: u32| {
        let steps = (f64::from(capacity) * factor / f64::from(CAPACITY_ALIGN)).round().max(1.0);
        (steps as u32 * CAPACITY_ALIGN).min(placement.chunk.next_multiple_of(CAPACITY_ALIGN))
    };
    let mut out = placement.clone();
    for table in &mut out.experts {
        // The tiers descend; those that become equal are one.
        table.tiers = table.tiers.iter().map(|&c| rows(c)).collect();
        table.tiers.dedup();
        table.expected = None;
        for row in &mut table.experts {
            row.capacity = rows(row.capacity);
            let tier = table.tiers.iter().position(|&c| c == row.capacity);
            row.tier = tier.and_then(|t| u32::try_from(t).ok());
        }
    }
    out
}

/// Rows of loads with the capacities of a placement, one expert a graph.
fn account(placement: &Placement, loads: &Loads) -> Account {
    let layers = placement.experts.iter().zip(&loads.layers);
    let of = layers.map(|(table, l)| l.account(&|e| table.experts.get(e).map(|r| r.capacity), &|e| e));
    of.fold(Account::default(), Account::and)
}

/// Figures as the file has them.
///
/// # Errors
/// Our bug: figures that are not TOML.
pub fn file(drops: &Drops) -> Result<String> {
    let text = toml::to_string(drops).map_err(|e| Error::bug("the figures are not TOML").because(e))?;
    Ok(format!("# Written by `cargo xtask quality --drops`.\n{text}"))
}

/// Figures of the last measurement.
///
/// # Errors
/// Our bug: a file that does not parse.
pub fn measured() -> Result<Drops> {
    toml::from_str(MEASURED).map_err(|e| Error::bug("papers/measured/drops.toml").because(e))
}

/// Writes the section of the page.
pub fn section(out: &mut String, drops: &Drops) {
    let _ = writeln!(
        out,
        "\n## Quality by dropped tokens\n\n\
         Measured, not simulated: `{}` reads held-out text in chunks of {} tokens, with f32 weights on a CPU; perplexity {:.3} with room\n\
         for every row. `capacity` is the key under `[experts]`: *coverage* is moec's default, *mean* is the paper's r · B / E (§4.1), *quartile*\n\
         its example of four times the base for the top quartile (§1). All capacities of a policy are multiplied by one factor, with\n\
         which the first column of pairs is past them; multiples of 16 rows cannot meet every share. *Padding*: of the rows of graphs of one\n\
         expert. The paper drops 10.63 to 21.77 % and pads 31.73 to 37.49 % (Table 3), with at most 1.07 % less accuracy; it has no spilling.\n\
         `cargo xtask quality --drops` measures again.\n\n\
         | capacity | overflow | requested | dropped | spilled | padding | perplexity | divergence, nats | same next token |\n\
         |---|---|---|---|---|---|---|---|---|",
        drops.model, drops.chunk, drops.perplexity
    );
    for row in &drops.rows {
        let percent = |x: f64| format!("{:.1} %", 100.0 * x);
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {:+.2} % | {:.4} | {} |",
            row.capacity,
            row.overflow,
            percent(row.requested),
            percent(row.dropped),
            percent(row.spilled),
            percent(row.padding),
            100.0 * row.increase,
            row.divergence.max(0.0),
            percent(row.same_choice)
        );
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    /// Dropped tokens cost quality, more of them cost more, and spilled ones cost nothing.
    #[test]
    fn dropped_tokens_cost_quality_and_spilled_ones_none() {
        let ferris = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/models/ferris");
        let [calibration, text] = ["calibration.txt", "text.txt"].map(|name| ferris.join("eval").join(name));
        let extent = Extent {
            calibration: &calibration,
            text: &text,
            recorded: 4096,
            tokens: 6144,
            shares: &[0.02, 0.2],
        };
        let drops = measure(&ferris, &extent, &Progress::silent()).unwrap();
        let file = file(&drops).unwrap();
        assert_eq!(toml::from_str::<Drops>(&file).unwrap(), drops);
        assert_eq!(drops.rows.len(), Capacity::NAMED.len() * Overflow::ALL.len() * 2);
        for pair in drops.rows.chunks(2) {
            let [few, many] = pair else { unreachable!("two shares") };
            assert_eq!((&few.capacity, &few.overflow), (&many.capacity, &many.overflow));
            let past = |r: &Row| r.dropped + r.spilled;
            assert!((past(many) - many.requested).abs() < 0.05, "{many:?}");
            assert!(past(few) < past(many) && few.padding > many.padding, "{few:?} {many:?}");
            if few.overflow == "spill" {
                assert!(
                    many.dropped == 0.0 && many.divergence < 1e-5 && many.increase.abs() < 1e-3,
                    "{many:?}"
                );
            } else {
                assert!(many.spilled == 0.0 && many.divergence > 4.0 * few.divergence.max(1e-4), "{pair:?}");
                assert!(many.increase > few.increase, "{pair:?}");
            }
        }
    }

    #[test]
    fn the_page_has_every_measured_point() {
        let drops = measured().unwrap();
        assert_eq!(drops.rows.len(), Capacity::NAMED.len() * Overflow::ALL.len() * SHARES.len());
        let mut page = String::new();
        section(&mut page, &drops);
        assert_eq!(page.lines().filter(|l| l.starts_with("| coverage | prune")).count(), SHARES.len());
    }
}
