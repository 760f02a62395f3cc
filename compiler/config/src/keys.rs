//! The keys of `model.toml`, one row each.

use super::value::{Value, ValueError};
use super::{
    Activations, Capacity, Config, Gamma, HostPlacement, KvCache, Overflow, Predict, Rounding, STORED, Size,
    Skip, Threshold, UnitSetting,
};
use moec_base::human;
use moec_ir::placement::MOST_TIERS;
use moec_ir::plan::{PromptUnits, Refine};
use moec_ir::{Format, WeightClass};
use moec_runtime::offload::cache::Setting;
use moec_sim::cache::Pin;
use moec_sim::systems;
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Most of the cache that may be pinned, in percent; the rest is for the policy.
const MOST_PINNED: u8 = 90;

/// Most sizes of a graph: each is compiled separately for the unit.
const MOST_SIZES: usize = 8;
/// Range of `sizes`.
const SIZES: &str = "1..=8";

/// A key.
pub struct Key {
    /// Section.
    pub section: &'static str,
    /// Name.
    pub name: &'static str,
    /// Default, as TOML or in words.
    pub default: &'static str,
    /// Valid values.
    pub range: &'static str,
    /// Description for people. Each line is a comment line in `model.toml`.
    pub help: &'static [&'static str],
    /// Parses a value.
    pub(super) set: fn(&mut Config, &Value<'_>) -> Result<(), ValueError>,
}

impl Key {
    /// `section.name`.
    pub fn path(&self) -> String {
        format!("{}.{}", self.section, self.name)
    }
}

/// Every key, in the order of the file.
pub const KEYS: &[Key] = &[
    Key {
        section: "model",
        name: "source",
        default: "\".\"",
        range: "a path",
        help: &[
            "Folder of the checkpoint (`config.json`, `*.safetensors`), or a GGUF file, relative to this file.",
        ],
        set: |c, v| {
            let path = v.text()?;
            if path.is_empty() {
                return Err(ValueError::Range);
            }
            c.model.source = match path {
                "." => super::folder(&c.path).into(),
                path => super::resolve(&c.path, path),
            };
            Ok(())
        },
    },
    Key {
        section: "model",
        name: "allow_nonfinite",
        default: "false",
        range: "true or false",
        help: &["Whether weights may hold infinities and NaNs. They are refused otherwise."],
        set: |c, v| v.boolean().map(|b| c.model.allow_nonfinite = b),
    },
    Key {
        section: "shapes",
        name: "max_context",
        default: "4096, or the model's own limit if that is shorter",
        range: "1..=1048576, and at most the model's own limit",
        help: &[
            "Longest sequence in tokens, prompt and answer together. The KV cache has this length, except in layers with a",
            "sliding window, which keep only the window and a chunk (`prefill_chunk`).",
        ],
        set: |c, v| v.integer(1..=1 << 20).map(|n| c.shapes.max_context = Some(n)),
    },
    Key {
        section: "shapes",
        name: "prefill_chunk",
        default: "256",
        range: "\"auto\" or 1..=4096",
        help: &[
            "Tokens of the prompt per step. Larger is faster on long prompts and takes more memory. `auto`, on targets with static",
            "graphs: of 64, 128, … 2048 tokens the size with which the prompts under `[placement]` take the least time, simulated.",
        ],
        set: |c, v| {
            c.shapes.prefill_chunk = match v.text() {
                Ok("auto") => None,
                Ok(_) => return Err(ValueError::Range),
                Err(_) => Some(v.integer(1..=4096).map_err(|w| w.of("\"auto\" or an integer"))?),
            };
            Ok(())
        },
    },
    Key {
        section: "shapes",
        name: "decode_batch",
        default: "[1]",
        range: "a list of integers in 1..=64, ascending",
        help: &[
            "Sequences that are decoded together. One graph is compiled for each size. `moec init` writes [1, 2, 4].",
        ],
        set: |c, v| {
            let sizes = v.integers(1..=64)?;
            if sizes.is_empty() || !sizes.is_sorted_by(|a, b| a < b) {
                return Err(ValueError::Range);
            }
            c.shapes.decode_batch = sizes;
            Ok(())
        },
    },
    Key {
        section: "weights",
        name: "experts",
        default: "\"bf16\"",
        range: FORMATS,
        help: &[
            "Storage of the routed experts. \"q8h\", \"q4h\" and \"mxfp4\" hold what checkpoints store as Q8_0, Q4_0 and MXFP4,",
            "with unchanged codes and scales; weights in other formats are rounded. \"stored\" rounds nothing: each matrix keeps what",
            "the checkpoint has, Q2_K to Q6_K among it, and is f32 where no format holds that.",
        ],
        set: |c, v| storage(v, format, WeightClass::Experts, &mut c.weights.stored, &mut c.weights.experts),
    },
    Key {
        section: "weights",
        name: "attention",
        default: "\"bf16\"",
        range: FORMATS,
        help: &["Storage of attention, dense and shared feed-forward matrices."],
        set: |c, v| {
            storage(v, format, WeightClass::Attention, &mut c.weights.stored, &mut c.weights.attention)
        },
    },
    Key {
        section: "weights",
        name: "embeddings",
        default: "\"bf16\"",
        range: TABLE_FORMATS,
        help: &["Storage of the embedding table and the language-model head."],
        set: |c, v| {
            storage(
                v,
                table_format,
                WeightClass::Embeddings,
                &mut c.weights.stored,
                &mut c.weights.embeddings,
            )
        },
    },
    Key {
        section: "weights",
        name: "activations",
        default: "\"auto\"",
        range: "\"auto\", \"f32\", \"bf16\" or \"i8\"",
        help: &[
            "Compute type of the matrices' inputs: exact, rounded to bf16, or to 8 bits in groups of 32. `auto` chooses by the target",
            "and the weights' format, so that the error is smaller than that of the weights' own rounding.",
        ],
        set: |c, v| Activations::parse(v.text()?).map(|a| c.weights.activations = a).ok_or(ValueError::Range),
    },
    Key {
        section: "weights",
        name: "rounding",
        default: "\"feedback\"",
        range: "\"feedback\" or \"nearest\"",
        help: &[
            "Rounding of weights in q2 to q6. `feedback` compensates the error of each number in later ones, by the profile's correlations",
            "of input channels; `nearest` rounds each number to the nearest code, as does a build without a profile.",
        ],
        set: |c, v| Rounding::parse(v.text()?).map(|r| c.weights.rounding = r).ok_or(ValueError::Range),
    },
    Key {
        section: "weights",
        name: "size",
        default: "\"\"",
        range: "a size such as \"4 GiB\", \"auto\", or \"\" for none",
        help: &[
            "Size limit of all weights. Each matrix then gets the format of its class, q8 or q4, with the least loss on the text of",
            "`[quality]` or `[calibrate]`. `auto` is the smallest size that `max_perplexity_increase` allows.",
        ],
        set: |c, v| {
            c.weights.size = match v.text()? {
                "" => Size::Any,
                "auto" => Size::Auto,
                text => Size::Most(human::parse_bytes(text).filter(|b| *b > 0).ok_or(ValueError::Range)?),
            };
            Ok(())
        },
    },
    Key {
        section: "memory",
        name: "kv_cache",
        default: "\"auto\"",
        range: "\"auto\", \"bf16\", \"f32\", \"q8\", \"q5\" or \"q4\"",
        help: &[
            "Storage of the KV cache. `auto` is bf16, or f32 where activations or attention are f32. `q8`, `q5` and",
            "`q4` store heads rotated, which loses less; only the CPU has kernels for them.",
        ],
        set: |c, v| KvCache::parse(v.text()?).map(|k| c.memory.kv_cache = k).ok_or(ValueError::Range),
    },
    Key {
        section: "memory",
        name: "budget",
        default: "\"\"",
        range: "a size such as \"4.5 GiB\" or \"900 MiB\", or \"\" for none",
        help: &[
            "Memory limit of a run, including the kernel's page cache. Experts that do not fit stay on disk and are cached.",
            "Without a limit, all experts stay in memory. Of several hosts, each has this limit.",
        ],
        set: |c, v| {
            let text = v.text()?;
            let bytes = human::parse_bytes(text).filter(|b| *b > 0);
            c.memory.budget = bytes;
            if bytes.is_some() || text.is_empty() { Ok(()) } else { Err(ValueError::Range) }
        },
    },
    Key {
        section: "memory",
        name: "device_budget",
        default: "\"\"",
        range: "a size such as \"4.5 GiB\" or \"900 MiB\", or \"\" for its capacity",
        help: &[
            "Limit of the GPU memory of a run, if `policy` under `[placement]` copies experts there. The rest of it",
            "holds cache frames of one expert each.",
        ],
        set: |c, v| {
            let text = v.text()?;
            let bytes = human::parse_bytes(text).filter(|b| *b > 0);
            c.memory.device_budget = bytes;
            if bytes.is_some() || text.is_empty() { Ok(()) } else { Err(ValueError::Range) }
        },
    },
    Key {
        section: "memory",
        name: "policy",
        default: "\"auto\"",
        range: "\"auto\" or a policy such as \"lru\" or \"mrs alpha=0.2 depth=2\"",
        help: &[
            "Cache policy of experts. `auto` replays the routing of the profile with all policies and chooses the one that",
            "reads least; without a profile it is `lru`.",
        ],
        set: |c, v| {
            let text = v.text()?;
            let named = text != "auto";
            if named && text.parse::<Setting>().is_err() {
                return Err(ValueError::Range);
            }
            c.memory.policy = named.then(|| text.to_owned());
            Ok(())
        },
    },
    Key {
        section: "memory",
        name: "pin",
        default: "\"auto\"",
        range: "\"auto\", a share of the cache up to \"90%\", or 0",
        help: &[
            "Share of the cache for pinned experts, which are read at the start and never evicted: those that the profile",
            "uses most. `auto` chooses the share by replays of the profile; it is 0 if `policy` names a policy.",
        ],
        set: |c, v| {
            let percent = match v.text() {
                Ok("auto") => None,
                Ok(text) => {
                    let percent = text.strip_suffix('%').and_then(|n| n.trim().parse().ok());
                    Some(percent.filter(|n| *n <= MOST_PINNED).ok_or(ValueError::Range)?)
                }
                Err(_) => Some(v.integer(0..=0).map_err(|w| w.of("a string"))?),
            };
            c.memory.pin = percent.map_or(Pin::Auto, Pin::Percent);
            Ok(())
        },
    },
    Key {
        section: "memory",
        name: "prefetch",
        default: "1",
        range: "0..=3",
        help: &[
            "Layers ahead whose experts are read before they are requested, while one sequence is decoded.",
        ],
        set: |c, v| v.integer(0..=3).map(|n| c.memory.prefetch = n),
    },
    Key {
        section: "memory",
        name: "threads",
        default: "0",
        range: "0..=1024",
        help: &[
            "Number of threads that the budget assumes: each has scratch memory of its own. 0: the cores of the device that compute, where its file has kinds of cores, else the number of cores of this machine.",
        ],
        set: |c, v| v.integer(0..=1024).map(|n: usize| c.memory.threads = (n > 0).then_some(n)),
    },
    Key {
        section: "calibrate",
        name: "text",
        default: "[]",
        range: "a list of paths",
        help: &[
            "Texts to calibrate on, in UTF-8, relative to this file. The activations and the routing that they cause decide",
            "how quantised weights are rounded and where experts are placed.",
        ],
        set: |c, v| paths(c, v).map(|texts| c.calibrate.text = texts),
    },
    Key {
        section: "calibrate",
        name: "profile",
        default: "\"\"",
        range: "a path, or \"\" for none",
        help: &[
            "Profile that `moec calibrate` writes and builds read. Without it, a build runs the calibration on `text` itself.",
        ],
        set: |c, v| {
            let path = v.text()?;
            c.calibrate.profile = (!path.is_empty()).then(|| super::resolve(&c.path, path));
            Ok(())
        },
    },
    Key {
        section: "calibrate",
        name: "tokens",
        default: "65536",
        range: "1..=16777216",
        help: &["Maximum number of tokens to read, over all texts."],
        set: |c, v| v.integer(1..=1 << 24).map(|n| c.calibrate.tokens = n),
    },
    Key {
        section: "experts",
        name: "tiers",
        default: "6",
        range: "1..=6",
        help: &[
            "Maximum number of capacities of a layer's experts, on targets with static graphs. More tiers need less padding and",
            "more launches; the number with the least cost is used. On targets with dynamic shapes experts have no capacities,",
            "and these keys have no effect.",
        ],
        set: |c, v| v.integer(1..=MOST_TIERS).map(|n| c.experts.tiers = n),
    },
    Key {
        section: "experts",
        name: "group",
        default: "\"auto\"",
        range: "\"auto\" or 1..=1024",
        help: &[
            "Experts of one tier that share a static graph. `auto` chooses the number with the least cost within the device's limit.",
        ],
        set: |c, v| {
            c.experts.group = match v.text() {
                Ok("auto") => None,
                Ok(_) => return Err(ValueError::Range),
                Err(_) => Some(v.integer(1..=1024).map_err(|w| w.of("\"auto\" or an integer"))?),
            };
            Ok(())
        },
    },
    Key {
        section: "experts",
        name: "sizes",
        default: "4",
        range: SIZES,
        help: &[
            "Number of row counts for which a static graph has a function. The functions share weights, and a call uses the smallest",
            "that holds its tokens: more sizes need less padding. 1: always the capacity.",
        ],
        set: |c, v| v.integer(1..=MOST_SIZES).map(|n| c.experts.sizes = n),
    },
    Key {
        section: "experts",
        name: "overflow",
        default: "\"auto\"",
        range: "\"auto\", \"prune\" or \"spill\"",
        help: &[
            "Treatment of tokens past an expert's capacity. `spill` computes them on the CPU, without loss. `prune` drops the",
            "expert for the tokens with the smallest attention output. `auto` is `spill`, or `prune` if `max_perplexity_increase`",
            "permits a loss.",
        ],
        set: |c, v| {
            c.experts.overflow = match v.text()? {
                "auto" => None,
                name => Some(Overflow::parse(name).ok_or(ValueError::Range)?),
            };
            Ok(())
        },
    },
    Key {
        section: "experts",
        name: "capacity",
        default: "\"coverage\"",
        range: "\"coverage\", \"mean\", \"quartile\" or 1..=65536",
        help: &[
            "Rows of an expert's static graph. `coverage`: as many as the key `coverage` requires of the profile's",
            "chunks. `mean`: its mean load. `quartile`: four times the mean load of the layer for its busiest quarter, and the mean",
            "for the others. A number: the same for every expert.",
        ],
        set: |c, v| {
            c.experts.capacity = if let Ok(name) = v.text() {
                Capacity::NAMED.iter().find(|n| n.0 == name).ok_or(ValueError::Range)?.1
            } else {
                let rows = v.integer(1..=1 << 16);
                Capacity::Rows(rows.map_err(|w| w.of("\"coverage\", \"mean\", \"quartile\" or an integer"))?)
            };
            Ok(())
        },
    },
    Key {
        section: "experts",
        name: "coverage",
        default: "0.99",
        range: "a number in 0.5..=1.0",
        help: &[
            "Share of the calibration's chunks in which an expert's capacity holds all tokens that chose it. A smaller share",
            "means less padding and more overflow.",
        ],
        set: |c, v| v.number(0.5..=1.0).map(|x| c.experts.coverage = x),
    },
    Key {
        section: "experts",
        name: "skip",
        default: "\"auto\"",
        range: "\"auto\", \"on\" or \"off\"",
        help: &[
            "Whether decoding skips neurons that an expert's gate sets to exactly 0 (such as ReLU). Weights are then stored by",
            "neuron, and only those of active neurons are read completely. `auto`: if the profile has enough zeros. Results change only",
            "by rounding. Not for experts on other units. With a memory budget, the up and down rows of active neurons are read",
            "from disk; `auto`: if this reads less than whole experts, according to the profile.",
        ],
        set: |c, v| Skip::parse(v.text()?).map(|s| c.experts.skip = s).ok_or(ValueError::Range),
    },
    Key {
        section: "experts",
        name: "predict",
        default: "\"off\"",
        range: "\"off\", \"auto\", \"low-rank\" or \"coarse\"",
        help: &[
            "Predictor of the neurons that a token activates, used before their gates are read if experts are stored by neuron:",
            "low-rank matrices, or gates in four bits, trained on the profile. Neurons that it misses are skipped, which changes",
            "results. With a memory budget, gates then stay on disk, and those of predicted neurons are read. `auto` chooses the one",
            "that reads least, if it reads less than gates or their int8 bounds, and `max_perplexity_increase` allows it.",
        ],
        set: |c, v| Predict::parse(v.text()?).map(|p| c.experts.predict = p).ok_or(ValueError::Range),
    },
    Key {
        section: "experts",
        name: "recall",
        default: "0.99",
        range: "a number in 0.5..=1.0",
        help: &[
            "Share of the active neurons that a predictor must find, on the rows of the profile that it is fitted to.",
        ],
        set: |c, v| v.number(0.5..=1.0).map(|x| c.experts.recall = x),
    },
    Key {
        section: "experts",
        name: "threshold",
        default: "\"off\"",
        range: "\"off\", \"auto\", or a share in \"0%\"..=\"95%\"",
        help: &[
            "Share of the neurons of experts with SiLU that count as 0, those with the smallest gates (\"50%\"). The profile gives",
            "the threshold of each layer, and `skip` skips the neurons below it. This is an approximation; its loss is measured on the",
            "text of `[quality]` or `[calibrate]`. `auto`: as many as `max_perplexity_increase` allows. Not with graphs of Core ML.",
        ],
        set: |c, v| Threshold::parse(v.text()?).map(|t| c.experts.threshold = t).ok_or(ValueError::Range),
    },
    Key {
        section: "decode",
        name: "big_little",
        default: "false",
        range: "true or false",
        help: &[
            "Whether to decode tokens with fewer experts first (MoBiLE). One whose largest probability is not above `gamma` is",
            "decoded again with all of them. One more graph is compiled for each size of `decode_batch`.",
        ],
        set: |c, v| v.boolean().map(|b| c.decode.big_little = b),
    },
    Key {
        section: "decode",
        name: "gamma",
        default: "0.7",
        range: "a number in 0.0..=1.0, or a share in \"0%\"..=\"100%\"",
        help: &[
            "Probability above which a token that was decoded with fewer experts is kept. 0 keeps every token; 1 keeps none, and",
            "the results are those without `big_little`. A share (\"15%\"): the probability that this share of the profile's tokens",
            "does not exceed, so that about as many are decoded again.",
        ],
        set: |c, v| {
            c.decode.gamma = if let Ok(share) = v.text() {
                Gamma::parse(share).ok_or(ValueError::Range)?
            } else {
                Gamma::Above(v.number(0.0..=1.0).map_err(|w| w.of("a number or a share"))?)
            };
            Ok(())
        },
    },
    Key {
        section: "decode",
        name: "little",
        default: "half of the model's experts per token, rounded up",
        range: "1..=1024, and fewer than the model's experts per token",
        help: &["Experts per token of `big_little`'s first try."],
        set: |c, v| v.integer(1..=1024).map(|n| c.decode.little = Some(n)),
    },
    Key {
        section: "placement",
        name: "attention",
        default: "\"auto\"",
        range: UNITS,
        help: &[
            "Unit of attention, dense feed-forward networks and the head, on targets with more than one unit. `auto` simulates a",
            "request of `prompt` and `generate` tokens with attention on each unit and chooses the faster one: the KV cache is on one",
            "unit. Dense networks and the head use the unit where a call costs less. Operators that cannot be part of a graph stay on",
            "the CPU; with the name of a unit, such a model is an error. On a unit with dynamic shapes, this key is for attention",
            "alone. If graphs keep no state (Hexagon), `auto` is the CPU for attention. With `policy` it is the unit of cache frames",
            "for attention, `mixer` and `rest`, if a token costs less there and they take half of its memory at most.",
        ],
        set: |c, v| {
            let unit = UnitSetting::parse(v.text()?).filter(|h| !matches!(h, UnitSetting::Share(..)));
            unit.map(|h| c.placement.attention = h).ok_or(ValueError::Range)
        },
    },
    Key {
        section: "placement",
        name: "prompt",
        default: "4096",
        range: "1..=1048576, or a list of such numbers",
        help: &[
            "Tokens of the prompt in a typical request, at most as many as the context holds. The default is the long prompt",
            "that NPUMoE measures. A list has lengths that are equally likely: `prefill_chunk = \"auto\"` is for all of them, and",
            "`attention = \"auto\"` for their mean.",
        ],
        set: |c, v| {
            c.prompts = several(v, 1..=1 << 20)?;
            let sum: u64 = c.prompts.iter().map(|&n| u64::from(n)).sum();
            let mean = sum.checked_div(c.prompts.len() as u64).ok_or(ValueError::Range)?;
            c.mix.prompt = u32::try_from(mean).map_err(|_| ValueError::Range)?;
            Ok(())
        },
    },
    Key {
        section: "placement",
        name: "generate",
        default: "8",
        range: "0..=1048576",
        help: &[
            "Tokens generated after it. The default is the mean of NPUMoE's workloads, long prompts with short answers; chats",
            "generate hundreds, and every token pays a launch per layer on the NPU.",
        ],
        set: |c, v| v.integer(0..=1 << 20).map(|n| c.mix.generate = n),
    },
    Key {
        section: "placement",
        name: "experts",
        default: "\"auto\"",
        range: EXPERT_UNITS,
        help: &[
            "Unit of experts. `auto` is the unit with the least cost under the loads of calibration. `\"gpu:50%\"` gives a unit with",
            "dynamic shapes this share of the experts of each layer: those with the most tokens in calibration.",
        ],
        set: |c, v| UnitSetting::parse(v.text()?).map(|h| c.placement.experts = h).ok_or(ValueError::Range),
    },
    Key {
        section: "placement",
        name: "decode",
        default: "\"auto\"",
        range: UNITS,
        help: &[
            "Unit of experts in decoding, on targets with static graphs, whose groups are those of prompts. `auto` is the unit with",
            "the least cost for the rows of each `decode_batch`: a launch for few rows is mostly padding. With `experts = \"cpu\"` it",
            "is the CPU.",
        ],
        set: |c, v| {
            let unit = UnitSetting::parse(v.text()?).filter(|h| !matches!(h, UnitSetting::Share(..)));
            unit.map(|h| c.placement.decode = h).ok_or(ValueError::Range)
        },
    },
    Key {
        section: "placement",
        name: "mixer",
        default: "\"auto\"",
        range: UNITS,
        help: &[
            "Unit of token mixers other than attention (delta rules, state spaces, short convolutions), on targets with a unit that",
            "has dynamic shapes. `auto` is the unit of `rest` if it runs all of their operators, else the CPU.",
        ],
        set: |c, v| {
            let unit = UnitSetting::parse(v.text()?).filter(|h| !matches!(h, UnitSetting::Share(..)));
            unit.map(|h| c.placement.mixer = h).ok_or(ValueError::Range)
        },
    },
    Key {
        section: "placement",
        name: "rest",
        default: "\"auto\"",
        range: UNITS,
        help: &[
            "Unit of all other operators, on targets with a unit that has dynamic shapes: embeddings, norms, routers, dense and",
            "shared networks, sums, the head. `auto` is the unit of attention if it also has the experts and mixers and its memory",
            "holds the model, else the CPU. A layer whose experts are on several units has its dispatch and its sum on the CPU.",
        ],
        set: |c, v| {
            let unit = UnitSetting::parse(v.text()?).filter(|h| !matches!(h, UnitSetting::Share(..)));
            unit.map(|h| c.placement.rest = h).ok_or(ValueError::Range)
        },
    },
    Key {
        section: "placement",
        name: "policy",
        default: "\"none\"",
        range: SYSTEMS,
        help: &[
            "Policy that places experts on the CPU and a GPU at run time, and copies them into the GPU's memory. With `none`, each",
            "expert has a fixed unit. `moec` searches the best division of every layer, and prefetches the experts that gates",
            "predict; `hybrimoe` does so as in the paper. The others are the paper's baselines: `llama.cpp` divides layers,",
            "`ktransformers` and `fiddler` keep popular experts on the GPU, `adapmoe` computes all there (as Klotski).",
            "`experts` then names the unit, and a share is that of its cache frames (`\"gpu:25%\"`).",
        ],
        set: |c, v| {
            let text = v.text()?;
            c.placement.policy = match text {
                "none" => None,
                _ => Some(systems::of_key(text).ok_or(ValueError::Range)?),
            };
            Ok(())
        },
    },
    Key {
        section: "placement",
        name: "hot",
        default: "\"cpu\"",
        range: HOT,
        help: &[
            "Unit of the hot neurons of experts in decoding, if their gates set neurons to 0. A unit with static graphs gets graphs",
            "of the hot neurons of calibration, one for each expert and batch. Meanwhile the CPU computes the other neurons and",
            "skips those at 0. Prompts use whole experts. A dense network counts as one expert.",
        ],
        set: |c, v| {
            let unit = UnitSetting::parse(v.text()?).filter(|h| matches!(h, UnitSetting::Unit(_)));
            unit.map(|h| c.placement.hot = h).ok_or(ValueError::Range)
        },
    },
    Key {
        section: "placement",
        name: "hosts",
        default: "\"auto\"",
        range: "\"auto\", \"alone\", \"slices\", \"stages\" or \"owners\"",
        help: &[
            "Division of the model between the hosts, or NUMA nodes, of a target with several. `slices`: each host has a slice of",
            "every expert. `stages`: each has consecutive layers with their states. `owners`: each has whole experts of every",
            "layer. With `alone` the first host has everything. `auto` takes the one that decodes fastest by costs, of those that",
            "fit; of those within a tenth of it, the one that decodes several sequences fastest.",
        ],
        set: |c, v| {
            let text = v.text()?;
            let found = HostPlacement::ALL.into_iter().find(|h| h.name() == text);
            c.placement.hosts = match text {
                "auto" => None,
                _ => Some(found.ok_or(ValueError::Range)?),
            };
            Ok(())
        },
    },
    Key {
        section: "placement",
        name: "slices",
        default: "\"auto\"",
        range: "\"auto\", 1..=64, or a list of such numbers",
        help: &[
            "Slices of its inner channels that every expert is cut into, whose results are added in their order. `auto` cuts one for",
            "each host of the target, with `hosts = \"auto\"` in the layers where that costs less. A list has a number for each layer from",
            "the first on, the last one for all others. On one host, as many slices as on several hosts give the same bits.",
        ],
        set: |c, v| {
            c.placement.slices = match v.text() {
                Ok("auto") => return Ok(()),
                Ok(_) => return Err(ValueError::Range),
                Err(_) => several(v, 1..=64)?,
            };
            if c.placement.slices.is_empty() { Err(ValueError::Range) } else { Ok(()) }
        },
    },
    Key {
        section: "placement",
        name: "attention_slices",
        default: "\"auto\"",
        range: "\"auto\", or 1..=64",
        help: &[
            "Slices of its key-value heads that attention is cut into, each with its part of the KV cache; results are added in",
            "their order. `auto`, with `hosts = \"slices\"`: one for each host in the layers where that costs less than attention on",
            "the first host, and else 1. Layers whose heads cannot be cut keep attention on the first host.",
        ],
        set: |c, v| {
            c.placement.attention_slices = match v.text() {
                Ok("auto") => None,
                Ok(_) => return Err(ValueError::Range),
                Err(_) => Some(v.integer(1..=64)?),
            };
            Ok(())
        },
    },
    Key {
        section: "placement",
        name: "cached",
        default: "\"auto\"",
        range: "\"auto\", or 0..=4096",
        help: &[
            "Experts of each layer that the memory of a GPU holds. On targets with NDP DIMMs, the runtime assigns experts to units",
            "in every step, and prefetches hot ones. With `policy`, this is an average over the layers. `auto`: as many as fit.",
        ],
        set: |c, v| {
            c.placement.cached = match v.text() {
                Ok("auto") => None,
                Ok(_) => return Err(ValueError::Range),
                Err(_) => Some(v.integer(0..=4096)?),
            };
            Ok(())
        },
    },
    Key {
        section: "placement",
        name: "refine",
        default: "\"full\"",
        range: "\"full\", \"bottleneck\" or \"none\"",
        help: &[
            "Refinement of that assignment. `none`: every expert has the unit with the least cost. `bottleneck` (TriMoE, §4.2) moves",
            "the costliest expert of the busiest unit, as long as that helps; `full` continues when that stalls.",
        ],
        set: |c, v| {
            let text = v.text()?;
            let found = Refine::ALL.into_iter().find(|r| r.name() == text);
            found.map(|r| c.placement.refine = r).ok_or(ValueError::Range)
        },
    },
    Key {
        section: "placement",
        name: "prefill",
        default: "\"auto\"",
        range: "\"auto\" or \"hot\"",
        help: &[
            "Units of the experts of a prompt, on targets with NDP DIMMs. `hot`: the GPU computes all, and those that it does not",
            "hold are streamed through its frames (TriMoE, §4.1). `auto`: so, or on all units, by the costs of each step.",
        ],
        set: |c, v| {
            let text = v.text()?;
            let found = PromptUnits::ALL.into_iter().find(|p| p.name() == text);
            found.map(|p| c.placement.prefill = p).ok_or(ValueError::Range)
        },
    },
    Key {
        section: "placement",
        name: "moves",
        default: "true",
        range: "true or false",
        help: &[
            "Whether experts may move between steps, on targets with NDP DIMMs: into the GPU's memory, to another DIMM, or to",
            "all DIMMs (TriMoE, §4.3).",
        ],
        set: |c, v| v.boolean().map(|on| c.placement.moves = on),
    },
    Key {
        section: "quality",
        name: "max_perplexity_increase",
        default: "\"none\"",
        range: "\"none\", or a share in \"0%\"..=\"100%\"",
        help: &[
            "Largest permitted increase of the perplexity of held-out text (\"1%\"). The compiler then chooses the capacities itself,",
            "and `coverage` has no effect. On targets with dynamic shapes, capacities cause no loss; there it bounds the loss by",
            "`size` under `[weights]` and `threshold` under `[experts]`.",
        ],
        set: |c, v| {
            let text = v.text()?;
            let share = |t: &str| -> Option<f64> {
                t.strip_suffix('%')?.trim().parse().ok().filter(|x| (0.0..=100.0).contains(x))
            };
            c.quality.max_perplexity_increase = match text {
                "none" => None,
                text => Some(share(text).ok_or(ValueError::Range)? / 100.0),
            };
            Ok(())
        },
    },
    Key {
        section: "quality",
        name: "text",
        default: "[]",
        range: "a list of paths",
        help: &[
            "Texts that the loss is measured on, in UTF-8, relative to this file, preferably not those of calibration.",
            "Without any, the texts of `[calibrate]`.",
        ],
        set: |c, v| paths(c, v).map(|texts| c.quality.text = texts),
    },
];

/// Parses a list of paths, relative to the file's folder.
fn paths(c: &Config, v: &Value<'_>) -> Result<Vec<PathBuf>, ValueError> {
    let texts = v.texts()?;
    if texts.iter().any(|t| t.is_empty()) {
        return Err(ValueError::Range);
    }
    Ok(texts.into_iter().map(|t| super::resolve(&c.path, t)).collect())
}

/// Range of `placement.attention`, `placement.mixer` and `placement.rest`.
const UNITS: &str = "\"auto\", or the name or kind of a unit of the target (\"cpu\", \"npu\")";
/// Range of `placement.hot`.
const HOT: &str = "the name or kind of a unit of the target (\"cpu\", \"npu\")";
/// Range of `placement.policy`; a test compares it with the runtime's table.
const SYSTEMS: &str =
    "\"none\", \"llama.cpp\", \"adapmoe\", \"fiddler\", \"ktransformers\", \"hybrimoe\" or \"moec\"";
/// Range of `placement.experts`.
const EXPERT_UNITS: &str = "\"auto\", the name or kind of a unit of the target (\"cpu\", \"npu\"), or one with a share (\"gpu:50%\")";

/// Range of the storage keys of matrices; a test compares it with [`Format::ALL`]. Scales of two levels come
/// only with what a checkpoint stores.
const FORMATS: &str = "\"f32\", \"bf16\", \"f16\", \"q8\", \"q6\", \"q5\", \"q4n\", \"q4\", \"q3\", \"q2\", \"q2s\", \"q8h\", \"q4h\", \"mxfp4\", \"q4o\", \"q4c\" or \"stored\"";
/// Range of the storage of tables that are read row by row.
const TABLE_FORMATS: &str =
    "\"f32\", \"bf16\", \"f16\", \"q8\", \"q4n\", \"q4\", \"q8h\", \"q4h\", \"mxfp4\" or \"stored\"";

/// An integer or a list of them.
fn several(v: &Value<'_>, range: RangeInclusive<usize>) -> Result<Vec<u32>, ValueError> {
    match v.integer(range.clone()) {
        Err(ValueError::Type(_)) => {
            let list = v.integers(range).map_err(|w| w.of("an integer or a list of integers"))?;
            list.into_iter().map(|n| u32::try_from(n).map_err(|_| ValueError::Range)).collect()
        }
        one => one.map(|n| vec![n]),
    }
}

fn format(v: &Value<'_>) -> Result<Format, ValueError> {
    Format::parse(v.text()?).filter(|format| !format.has_fine_scales()).ok_or(ValueError::Range)
}

/// Sets the storage of a class: a format as `parse` has it, or [`STORED`].
fn storage(
    v: &Value<'_>,
    parse: fn(&Value<'_>) -> Result<Format, ValueError>,
    class: WeightClass,
    stored: &mut Vec<WeightClass>,
    format: &mut Format,
) -> Result<(), ValueError> {
    if v.text()? == STORED {
        stored.push(class);
    } else {
        *format = parse(v)?;
    }
    Ok(())
}

/// Parses the format of a table. Formats with a scale for each output channel, or with bits in several words, are
/// only for matrices in panels.
fn table_format(v: &Value<'_>) -> Result<Format, ValueError> {
    match format(v)? {
        format if !format.holds_rows() => Err(ValueError::Unsupported),
        format => Ok(format),
    }
}

#[cfg(test)]
mod tests {
    use crate::{Activations, KvCache};
    use moec_sim::systems;

    fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
        let names: Vec<_> = names.map(|n| format!("\"{n}\"")).collect();
        let (last, others) = names.split_last().expect("there are names");
        format!("{} or {last}", others.join(", "))
    }

    #[test]
    fn the_range_of_the_storage_keys_lists_every_format() {
        let all = || moec_ir::Format::ALL.iter().filter(|f| !f.has_fine_scales());
        let named = |names: Vec<&str>| listed(names.into_iter().chain([crate::STORED]));
        assert_eq!(super::FORMATS, named(all().map(|f| f.name()).collect()));
        let tables = all().filter(|f| f.holds_rows());
        assert_eq!(super::TABLE_FORMATS, named(tables.map(|f| f.name()).collect()));
    }

    #[test]
    fn the_range_of_policies_lists_every_system() {
        let names: Vec<String> =
            ["none".to_owned()].into_iter().chain(systems::CACHED.iter().map(systems::key)).collect();
        assert_eq!(super::SYSTEMS, listed(names.iter().map(String::as_str)));
    }

    #[test]
    fn the_ranges_of_names_list_every_one() {
        let range = |name: &str| super::KEYS.iter().find(|k| k.name == name).expect("a key").range;
        assert_eq!(range("activations"), listed(Activations::ALL.iter().map(|a| a.name())));
        assert_eq!(range("kv_cache"), listed(KvCache::ALL.iter().map(|k| k.name())));
    }
}
