//! `docs/fit.md`: what `moec fit` chooses for published models, by their shapes.

use super::candidate::{self, FORMATS, Formats, Model, figures};
use super::limits::Limits;
use crate::facts;
use moec_base::{Result, human};
use moec_import::Config;
use moec_ir::Format;
use moec_synth::Like;
use std::fmt::Write as _;
use std::path::Path;

/// The models.
const MODELS: [(&str, Like); 5] = [
    ("OLMoE-1B-7B", Like::Olmoe),
    ("gpt-oss-20b", Like::GptOss20b),
    ("Qwen3.6-35B-A3B", Like::Qwen3_6_35bA3b),
    ("GLM-4.5-Air", Like::Glm45Air),
    ("DeepSeek-V3", Like::DeepseekV3),
];
/// Memory limits in GiB.
const MEMORIES: [u64; 5] = [8, 16, 32, 64, 128];
/// Target, whose device file names its cores and memory.
const TARGET: &str = "sapphire-rapids";

/// The page.
///
/// # Errors
/// Only bugs: a model that cannot be planned.
pub(crate) fn page() -> Result<String> {
    let mut out = format!(
        "# What fits\n\n`moec fit` chooses these formats for published models with `--disk`, on `{TARGET}`: the first that fits, with\n\
         more bits first and experts in memory before experts on disk. Everything is predicted from shapes alone, with the\n\
         default context. *By hand* is the number of parameters times the bits of their formats. Speeds are modelled, not\n\
         measured; where experts are on disk, every one that memory does not hold is read before it is used, at the disk's\n\
         bandwidth or, where the device file has none, at 3.5 GB/s. [The guide](guide.md#building) has the command.\n\n\
         | model | parameters | memory | experts | rest | KV | kept in | size | by hand | memory of a run | decode tokens/s | prefill tokens/s |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|\n"
    );
    for (name, like) in MODELS {
        let config = like.config()?.as_object().cloned().unwrap_or_default();
        let source = Path::new(name);
        let (checkpoint, spec) = moec_import::shapes(source, Config::of("config.json", config))?;
        let facts = facts::of(&spec, &|leaf| checkpoint.format(leaf));
        let device = moec_targets::device(TARGET)?;
        let model = Model {
            checkpoint: &checkpoint,
            spec: &spec,
            facts: &facts,
            source,
            device: &device,
            target: TARGET,
            profile: None,
            times: None,
        };
        for gib in MEMORIES {
            let limits = Limits { memory: gib << 30, rate: 0.0, loss: None, measures: false };
            let predict = |&formats: &Formats, budget: Option<u64>| {
                model
                    .predict(candidate::choice(formats, budget))
                    .ok()
                    .filter(|c| limits.broken_by(c).is_none())
            };
            // What is larger than the limit by its bits alone need not be planned.
            let small = |&&(experts, rest, _): &&Formats| {
                facts.bundle_bytes(&weights(experts, rest)) <= limits.memory
            };
            let found = FORMATS.iter().filter(small).find_map(|formats| predict(formats, None));
            let budget = Some(limits.memory);
            let on_disk = || {
                // Where the smallest does not fit, nothing does.
                FORMATS.last().and_then(|formats| predict(formats, budget))?;
                FORMATS.iter().find_map(|formats| predict(formats, budget))
            };
            let _ = write!(out, "| {name} | {} | {gib} GiB |", human::count(facts.parameters));
            let Some(c) = found.or_else(on_disk) else {
                out += " nothing fits | | | | | | | | |\n";
                continue;
            };
            let (experts, rest, kv) = c.formats;
            let [size, memory, decode, prefill] = figures(&c);
            let by_hand = human::bytes(facts.bundle_bytes(&weights(experts, rest)));
            let kept = c.kept();
            let _ = writeln!(
                out,
                " {experts} | {rest} | {kv} | {kept} | {size} | {by_hand} | {memory} | {decode} | {prefill} |"
            );
        }
    }
    out.truncate(out.trim_end().len());
    Ok(out)
}

/// Formats of weights.
fn weights(experts: Format, rest: Format) -> moec_config::Weights {
    moec_config::Weights {
        experts,
        attention: rest,
        embeddings: rest,
        stored: Vec::new(),
        activations: moec_config::Activations::Auto,
        rounding: moec_config::Rounding::Feedback,
        size: moec_config::Size::Any,
    }
}
