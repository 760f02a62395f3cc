//! Costs of the settings of `[experts]`: padding, dropped tokens, simulated time and energy of prompts whose
//! last chunk is short, with every expert in a static graph. `cargo xtask padding` writes docs/padding.md
//! with it.

use crate::recorded::{DOMAINS, Recorded};
use crate::shapes::{OLMOE, PHIMOE, QWEN3, Shape};
use moec_base::{Error, Result};
use moec_config::{ExpertsConfig, Overflow};
use moec_costs::run::{Outcome, Placed, Prompt, Scenario};
use moec_costs::timeline::Queue;
use moec_costs::units::{UnitPreference, Units};
use moec_costs::{Constants, Model};
use moec_ir::placement::ExpertTable;
use moec_passes::assign_residency::assign_layer_residency;
use moec_passes::group::{Options, group_layer, tiered};
use moec_passes::tier::tier;
use moec_profile::Profile;
use moec_profile::loads::{Loads, loads};
use std::fmt::Write as _;

/// Tokens of a chunk, and of the last one of a prompt.
const CHUNK: u32 = 256;
const SHORT: u32 = 64;
/// Whole chunks of a prompt.
const CHUNKS: u32 = 4;
/// Models whose routing is sampled from the recorded counts of the first one.
const SHAPES: [Shape; 3] = [OLMOE, PHIMOE, QWEN3];

/// A setting.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Difference from NPUMoE's: three tiers, one size, coverage 0.99.
    pub name: &'static str,
    /// The keys.
    pub experts: ExpertsConfig,
    /// True if the short chunk has separate capacities and functions.
    pub joint: bool,
    /// Whether `tiers` is the most, and each layer has as many as cost least.
    pub by_cost: bool,
}

/// Costs of a setting on a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cost {
    /// Share of the rows of graphs that is padding.
    pub padding: f64,
    /// Share of the (token, expert) pairs that find no room.
    pub dropped: f64,
    /// Milliseconds per prompt.
    pub ms: f64,
    /// Millijoules per token.
    pub mj_per_token: f64,
    /// Graphs of a layer, and functions of all of them.
    pub graphs: f64,
    /// Functions of a layer's graphs.
    pub functions: f64,
}

/// The settings, NPUMoE's first.
pub fn settings() -> Vec<Setting> {
    let base = ExpertsConfig { tiers: 3, sizes: 1, ..ExpertsConfig::DEFAULT };
    let set = |name, experts| Setting { name, experts, joint: false, by_cost: false };
    let mut all = vec![set("three tiers, one size (NPUMoE)", base.clone())];
    for (name, tiers) in [("4 tiers", 4), ("5 tiers", 5), ("6 tiers", 6)] {
        all.push(set(name, ExpertsConfig { tiers, ..base.clone() }));
    }
    for (name, group) in [("groups of 8", 8), ("groups of 4", 4), ("groups of 2", 2), ("groups of 1", 1)] {
        all.push(set(name, ExpertsConfig { group: Some(group), ..base.clone() }));
    }
    for (name, coverage) in [("coverage 0.9", 0.9), ("coverage 0.95", 0.95), ("coverage 1", 1.0)] {
        all.push(set(name, ExpertsConfig { coverage, ..base.clone() }));
    }
    all.push(Setting { joint: true, ..set("capacities for chunks of 64 and 256", base.clone()) });
    for (name, sizes) in [("2 sizes", 2), ("3 sizes", 3), ("4 sizes", 4), ("6 sizes", 6), ("8 sizes", 8)] {
        all.push(set(name, ExpertsConfig { sizes, ..base.clone() }));
    }
    for (name, tiers, sizes) in [
        ("1 tier, 4 sizes", 1, 4),
        ("4 tiers, 4 sizes", 4, 4),
        ("6 tiers, 4 sizes", 6, 4),
        ("6 tiers, 8 sizes", 6, 8),
    ] {
        all.push(set(name, ExpertsConfig { tiers, sizes, ..base.clone() }));
    }
    for (name, sizes) in [
        ("tiers by cost, one size", 1),
        ("tiers by cost, 4 sizes (default)", 4),
        ("tiers by cost, 8 sizes", 8),
    ] {
        all.push(Setting { by_cost: true, ..set(name, ExpertsConfig { sizes, ..ExpertsConfig::DEFAULT }) });
    }
    all
}

/// Loads that capacities are chosen by, and prompts.
struct Case {
    model: Model,
    /// For whole chunks and for the short one.
    calibration: [Loads; 2],
    /// `[prompts]`: whole chunks, then the short one.
    prompts: Vec<[Prompt; 2]>,
}

impl Case {
    /// A published model, routed as recorded.
    fn recorded(shape: &Shape, recorded: &Recorded) -> Self {
        let model = shape.model();
        let part = |domain: &str, chunk, chunks, seed| Prompt {
            chunk,
            chunks: recorded.prompt(&model, domain, chunk, chunks, seed),
            decode: Vec::new(),
        };
        let prompts = DOMAINS.map(|d| [part(d, CHUNK, CHUNKS, 1), part(d, SHORT, 1, 2)]).into();
        let calibration = [CHUNK, SHORT].map(|chunk| recorded.calibration(&model, chunk));
        Self { model, calibration, prompts }
    }

    /// Model with profiled routing in chunks that divide the short one. Its first half chooses capacities,
    /// its second half is evaluated.
    fn profiled(model: Model, profile: &Profile) -> Result<Self> {
        let half = |second: bool| -> Result<[Loads; 2]> {
            let mut half = profile.clone();
            let sequences = &mut half.trace.sequences;
            let rest = sequences.split_off(sequences.len() / 2);
            if second {
                *sequences = rest;
            }
            let all = [loads(&half, CHUNK)?, loads(&half, SHORT)?];
            Ok(all.map(|mut l| {
                // The profile's sums are of both halves.
                for layer in &mut l.layers {
                    let count = |e: usize| layer.samples.iter().map(|s| u64::from(s[e])).sum();
                    layer.chosen = (0..layer.chosen.len()).map(count).collect();
                    layer.tokens = layer.samples.len() as u64 * u64::from(l.chunk);
                }
                l
            }))
        };
        let [whole, short] = half(true)?;
        let sample = |l: &Loads, i: usize| -> Option<Vec<Vec<u32>>> {
            l.layers.iter().map(|layer| layer.samples.get(i).cloned()).collect()
        };
        let prompts = (0..).map_while(|i| {
            let first = i * CHUNKS as usize;
            let chunks: Option<Vec<_>> =
                (first..first + CHUNKS as usize).map(|c| sample(&whole, c)).collect();
            let last = sample(&short, i * (CHUNKS * CHUNK / SHORT) as usize)?;
            let part = |chunk, chunks| Prompt { chunk, chunks, decode: Vec::new() };
            Some([part(CHUNK, chunks?), part(SHORT, vec![last])])
        });
        let prompts: Vec<_> = prompts.collect();
        if prompts.is_empty() {
            return Err(Error::input(format!(
                "the profile is too short for prompts of {} tokens",
                CHUNKS * CHUNK
            ))
            .hint("record the profile from more text: `moec calibrate --tokens`"));
        }
        Ok(Self { model, calibration: half(false)?, prompts })
    }

    /// Runs a setting on all prompts. Every expert is in a graph; attention runs outside of them.
    fn cost(&self, setting: &Setting, units: &Units<'_>) -> Result<Cost> {
        let tables = |loads: &Loads| self.tables(setting, loads, units);
        let [whole, short] = &self.calibration;
        let of_whole = tables(whole)?;
        let of_short = if setting.joint { tables(short)? } else { of_whole.clone() };
        let scene = Scenario {
            model: &self.model,
            units,
            constants: Constants::NPUMOE,
            calibration: whole,
            coverage: setting.experts.coverage,
            overflow: Overflow::Prune,
        };
        let placed = |tables: &[ExpertTable]| Placed {
            attention: Queue::Npu,
            decode_attention: Queue::Npu,
            dense: Queue::Npu,
            decode_dense: Queue::Npu,
            tables: Some(tables.to_vec()),
            decode_batch: 1,
            resident: true,
        };
        let each = |[whole, short]: &[Prompt; 2]| {
            // Static shapes outside of experts are those of a whole chunk.
            let short = Prompt { chunk: CHUNK, ..short.clone() };
            [scene.run(&placed(&of_whole), whole), scene.run(&placed(&of_short), &short)]
        };
        let all: Vec<Outcome> = self.prompts.iter().flat_map(each).collect();
        let sum = |f: &dyn Fn(&Outcome) -> f64| all.iter().map(f).sum::<f64>();
        let (prompts, layers) = (self.prompts.len() as f64, of_whole.len().max(1) as f64);
        let mut groups: Vec<_> = of_whole.iter().flat_map(|t| &t.groups).collect();
        let graphs = groups.len() as f64;
        if setting.joint {
            groups.extend(of_short.iter().flat_map(|t| &t.groups));
        }
        let functions: usize = groups.iter().map(|g| g.sizes.len().max(1)).sum();
        Ok(Cost {
            padding: sum(&|o| o.padding as f64) / sum(&|o| o.rows as f64).max(1.0),
            dropped: sum(&|o| o.dropped as f64) / sum(&|o| o.routed as f64).max(1.0),
            ms: sum(&|o| o.timeline.wall_us) * 1e-3 / prompts,
            mj_per_token: sum(&|o| o.energy.total_j()) * 1e3 / (prompts * f64::from(CHUNKS * CHUNK + SHORT)),
            graphs: graphs / layers,
            functions: functions as f64 / layers,
        })
    }

    fn tables(&self, setting: &Setting, loads: &Loads, units: &Units<'_>) -> Result<Vec<ExpertTable>> {
        let experts = &setting.experts;
        let size = |layer: u32| {
            self.model.layers.iter().find(|l| l.layer == layer).and_then(|l| l.experts).map(|moe| moe.size)
        };
        let options =
            Options { group: experts.group, sizes: experts.sizes, preference: UnitPreference::Graphs };
        let mut placement = if setting.by_cost {
            tiered(loads, units, experts, experts.coverage, &size, options)?
        } else {
            tier(loads, units, experts, experts.coverage)
        };
        for (table, layer) in placement.experts.iter_mut().zip(&loads.layers) {
            let size = size(table.layer).ok_or_else(|| Error::input("the loads are not of this model"))?;
            // A request that does not fit is the most that fits.
            let fits =
                units.npu.graph_limit().map_or(usize::MAX, |limit| (limit / size.bytes.max(1)) as usize);
            let group = experts.group.map(|g| g.min(fits.max(1)));
            group_layer(table, layer, size, units, Options { group, ..options })?;
            assign_layer_residency(table, layer, units, UnitPreference::Graphs);
        }
        Ok(placement.experts)
    }
}

/// Costs of every setting: by model its name and the costs in the order of [`settings`].
///
/// # Errors
/// An expert that fits into no graph.
pub fn recorded(units: &Units<'_>) -> Result<Vec<(String, Vec<Cost>)>> {
    let recorded = Recorded::built_in()?;
    SHAPES.iter().map(|shape| run(&Case::recorded(shape, &recorded), units)).collect()
}

/// The same for a model with its profile.
///
/// # Errors
/// As [`recorded`]; a profile of another model, or a short one.
pub fn profiled(model: Model, profile: &Profile, units: &Units<'_>) -> Result<(String, Vec<Cost>)> {
    run(&Case::profiled(model, profile)?, units)
}

fn run(case: &Case, units: &Units<'_>) -> Result<(String, Vec<Cost>)> {
    let costs = settings().iter().map(|s| case.cost(s, units)).collect::<Result<_>>()?;
    Ok((case.model.name.clone(), costs))
}

/// The costs of a model as a table in Markdown, a row for each of [`settings`].
pub fn table(name: &str, costs: &[Cost]) -> String {
    let mut text = format!(
        "{name}:\n\n| setting | padding | dropped | ms per prompt | mJ per token | graphs per layer | functions |\n\
         |---|---|---|---|---|---|---|\n"
    );
    for (setting, c) in settings().iter().zip(costs) {
        let (name, padding, dropped) = (setting.name, c.padding * 100.0, c.dropped * 100.0);
        let _ = writeln!(
            text,
            "| {name} | {padding:.1} % | {dropped:.2} % | {:.1} | {:.3} | {:.1} | {:.1} |",
            c.ms, c.mj_per_token, c.graphs, c.functions
        );
    }
    text
}
