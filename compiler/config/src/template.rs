//! The `model.toml` that `moec init` writes: keys with their descriptions, and figures of the model.
#![expect(clippy::cast_possible_truncation, reason = "an estimate in bytes")]

use super::{Activations, DEFAULT_MAX_CONTEXT, KEYS, Key, Rounding, STORED, Size, Weights};
use moec_base::human;
use moec_cpu::uses_feedback;
use moec_ir::{Format, WeightClass};
use std::fmt::Write as _;
use std::path::Path;

/// Facts about the model, for comments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Family (`qwen3_moe`).
    pub family: String,
    /// Parameters in all.
    pub parameters: u64,
    /// Parameters that are used for one token.
    pub active_parameters: u64,
    /// Layers.
    pub layers: usize,
    /// Layers with routed experts.
    pub moe_layers: usize,
    /// Routed experts per such layer.
    pub experts: usize,
    /// Experts per token.
    pub experts_per_token: usize,
    /// Longest sequence of the model, by its own config.
    pub max_context: usize,
    /// For each layer with attention: elements of the KV cache per token and sequence, and its window.
    pub kv: Vec<(u64, Option<usize>)>,
    /// Number of f32 elements in a sequence's states of constant size.
    pub folded: u64,
    /// Parameters by class.
    pub by_class: Vec<(WeightClass, u64)>,
    /// The format that holds all matrices of a class exactly as the checkpoint stores them, if there is one.
    pub stored: Vec<(WeightClass, Format)>,
    /// Classes of which the checkpoint stores codes that [`super::STORED`] keeps, in one format or several.
    pub coded: Vec<WeightClass>,
    /// Whether the embedding table serves as head, too. In a format that is rounded with feedback a bundle
    /// stores it twice, rounded for each use.
    pub tied_embeddings: bool,
}

impl Facts {
    /// The format that keeps the codes and scales of a class, if the checkpoint has codes.
    fn stored_format(&self, class: WeightClass) -> Option<Format> {
        let of = self.stored.iter().find(|(c, _)| *c == class);
        of.map(|(_, format)| *format).filter(|format| format.is_published() && !format.has_fine_scales())
    }

    /// The name of the storage that keeps the codes and scales of a class, if the checkpoint has codes.
    fn kept(&self, class: WeightClass) -> Option<&'static str> {
        let several = || self.coded.contains(&class).then_some(STORED);
        self.stored_format(class).map(Format::name).or_else(several)
    }

    /// Parameters of a class.
    fn of(&self, class: WeightClass) -> u64 {
        self.by_class.iter().filter(|(c, _)| *c == class).map(|(_, n)| n).sum()
    }

    /// Bytes of KV cache per token and sequence, in a format.
    pub fn kv_bytes_per_token(&self, format: Format) -> u64 {
        self.kv.iter().map(|&(numbers, _)| of_numbers(format, numbers)).sum()
    }

    /// Bytes of KV cache and other states of a sequence, in a format. `state_rows` is the number of rows of a layer
    /// with such a window.
    pub fn kv_bytes(&self, format: Format, state_rows: impl Fn(Option<usize>) -> usize) -> u64 {
        let of_layer = |&(numbers, window): &(u64, Option<usize>)| {
            of_numbers(format, numbers) * state_rows(window) as u64
        };
        self.kv.iter().map(of_layer).sum::<u64>() + self.folded_bytes()
    }

    /// Bytes of a snapshot of a sequence: of the states that do not grow with its tokens.
    pub fn folded_bytes(&self) -> u64 {
        of_numbers(Format::F32, self.folded)
    }

    /// Approximate size of the weights of a bundle, in bytes.
    pub fn bundle_bytes(&self, weights: &Weights) -> u64 {
        let bytes = |&(class, n): &(WeightClass, u64)| {
            let format = weights.format(class);
            let twice = class == WeightClass::Embeddings && self.tied_embeddings && uses_feedback(format);
            let copies = if twice { 2 } else { 1 };
            ((copies * n) as f64 * format.bits() / 8.0) as u64
        };
        self.by_class.iter().map(bytes).sum()
    }
}

/// Bytes of elements of a KV cache. Formats store groups, and a head of a model always has whole groups.
fn of_numbers(format: Format, numbers: u64) -> u64 {
    format.bytes(format.block()) as u64 * numbers / format.block() as u64
}

/// The keys that users often change, by section and name.
const COMMON: [(&str, &str); 10] = [
    ("model", "source"),
    ("shapes", "max_context"),
    ("shapes", "decode_batch"),
    ("weights", "experts"),
    ("weights", "attention"),
    ("weights", "embeddings"),
    ("memory", "budget"),
    ("calibrate", "text"),
    ("calibrate", "profile"),
    ("placement", "experts"),
];

/// Number of sequences that are decoded together: a server has several clients.
const BATCHES: &str = "[1, 2, 4]";

/// Text of a `model.toml` for the checkpoint in `source`, a path relative to the file's folder. It can be
/// built without changes. It has only defaults, sizes for several clients, and formats that keep the codes of
/// the checkpoint. With `all` it has every key, not only those that users often change. `set` has values that
/// replace these, by section and key.
pub fn template(source: &Path, facts: &Facts, all: bool, set: &[(&str, &str, String)]) -> String {
    let value_of =
        |key: &Key| set.iter().find(|(s, k, _)| (*s, *k) == (key.section, key.name)).map(|(.., v)| v);
    let mut out = String::new();
    let defaults = if WeightClass::ALL.into_iter().any(|class| facts.kept(class).is_some()) {
        "The keys below have their default values and may be left out, except `decode_batch` and formats of weights that the checkpoint has."
    } else {
        "The keys below have their default values and may be left out, except `decode_batch`."
    };
    let others = if all {
        String::new()
    } else {
        format!("\n# `moec init --all` also writes the {} other keys.", KEYS.len() - COMMON.len())
    };
    let _ = writeln!(
        out,
        "# {}: {} parameters, {} used per token; {} layers, {} of them with {} experts, {} per token.\n#\n\
         # What moec is to build from this checkpoint:\n\
         #     moec build model.toml\n\
         # {defaults}{others}",
        comment(&facts.family),
        human::count(facts.parameters),
        human::count(facts.active_parameters),
        facts.layers,
        facts.moe_layers,
        facts.experts,
        facts.experts_per_token,
    );
    let mut section = "";
    let written = |k: &&Key| all || COMMON.contains(&(k.section, k.name)) || value_of(k).is_some();
    for key in KEYS.iter().filter(written) {
        if key.section != section {
            section = key.section;
            let _ = write!(out, "\n[{section}]\n");
            if section == "weights" {
                let _ = writeln!(out, "# About the size of a bundle: {}.", sizes(facts));
            }
        }
        for line in key.help {
            let _ = writeln!(out, "# {line}");
        }
        for line in figures(key.section, key.name, facts) {
            let _ = writeln!(out, "# {line}");
        }
        let value = match (section, key.name) {
            _ if let Some(value) = value_of(key) => value.clone(),
            ("model", "source") => toml::Value::from(source.to_string_lossy().as_ref()).to_string(),
            ("shapes", "max_context") => facts.max_context.min(DEFAULT_MAX_CONTEXT).to_string(),
            ("shapes", "decode_batch") => BATCHES.to_owned(),
            ("decode", "little") => facts.experts_per_token.div_ceil(2).max(1).to_string(),
            ("weights", name) => match class(name).and_then(|class| facts.kept(class)) {
                Some(kept) => format!("\"{kept}\""),
                None => key.default.to_owned(),
            },
            _ => key.default.to_owned(),
        };
        let _ = writeln!(out, "{} = {value}  # {}", key.name, key.range);
    }
    out
}

/// The class whose storage format a key of `[weights]` sets.
fn class(key: &str) -> Option<WeightClass> {
    WeightClass::ALL.into_iter().find(|class| class.name() == key && *class != WeightClass::Exact)
}

/// Comment lines with the model's own figures for a key.
fn figures(section: &str, key: &str, facts: &Facts) -> Vec<String> {
    let parameters = |class| {
        let n = facts.of(class);
        let share = 100.0 * n as f64 / facts.parameters.max(1) as f64;
        let mut lines = vec![format!("{} parameters, {share:.0}% of the model.", human::count(n))];
        lines.extend(facts.kept(class).map(|kept| {
            format!("\"{kept}\" holds all of them as the checkpoint stores them; the default is \"bf16\".")
        }));
        lines
    };
    match (section, key) {
        ("shapes", "max_context") => vec![
            format!("The model's own limit is {} tokens.", facts.max_context),
            format!(
                "The cache takes {} per token and sequence in bf16.",
                human::bytes(facts.kv_bytes_per_token(Format::Bf16))
            ),
        ],
        ("shapes", "decode_batch") => vec![
            "`run serve` answers as many requests at a time as the largest of them; without this key, one."
                .to_owned(),
        ],
        ("weights", key) => class(key).map(parameters).unwrap_or_default(),
        _ => Vec::new(),
    }
}

/// `f32 24.0 MiB, bf16 12.0 MiB, …`: approximate size of a bundle with all weights in one format, for formats
/// that can store all of them.
pub fn sizes(facts: &Facts) -> String {
    let size = |format| {
        let (activations, rounding) = (Activations::Auto, Rounding::Feedback);
        let (size, stored) = (Size::Any, Vec::new());
        let [experts, attention, embeddings] = [format; 3];
        let weights = Weights { experts, attention, embeddings, stored, activations, rounding, size };
        format!("{format} {}", human::bytes(facts.bundle_bytes(&weights)))
    };
    let whole = Format::ALL.into_iter().filter(|format| format.holds_rows());
    whole.map(size).collect::<Vec<_>>().join(", ")
}

/// A name that is safe in a comment, without characters that end the line.
fn comment(s: &str) -> String {
    s.chars().filter(|c| !c.is_control()).collect()
}
