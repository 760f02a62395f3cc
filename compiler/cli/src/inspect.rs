//! `moec inspect`.

use super::{bundle, caches, facts, output, trace};
use moec_base::paths::MANIFEST;
use moec_base::{Error, Result, human};
use moec_bundle::workspace;
use moec_config::{Config, Facts, sizes};
use moec_cpu::CACHE_BLOCK;
use moec_import::lower;
use moec_import::{ImportOptions, ModelSpec, containers};
use moec_ir::state::snapshots;
use moec_ir::{Format, WeightClass};
use moec_runtime::platform::regular;
use moec_targets::backends;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Show details of a model.toml, checkpoint, profile or bundle
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A `model.toml`, a checkpoint's folder, a profile (`.trace`), a bundle, or NDP command streams of a
    /// bundle (`.streams`)
    pub path: PathBuf,
    #[command(flatten)]
    profile: trace::Args,
    /// Replay a profile's routing with every cache policy, for these cache sizes (25%,50%,75%)
    #[arg(long, value_name = "SIZES", value_delimiter = ',')]
    pub cache: Vec<caches::Share>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Prints the details of a path.
///
/// # Errors
/// Fails if the path is none of these, or its content is invalid.
pub fn run(args: &Args) -> Result<()> {
    let path = &args.path;
    let shown = path.display();
    if args.profile.any() && !trace::is_one(path) {
        return Err(Error::usage(format!(
            "`--html`, `--moments` and `--against` require a profile, and `{shown}` is not one"
        ))
        .hint("`moec calibrate model.toml` records a profile"));
    }
    if !args.cache.is_empty() && !trace::is_one(path) {
        return Err(Error::usage(format!("`--cache` requires a profile, and `{shown}` is not one"))
            .hint("`moec calibrate model.toml` records a profile"));
    }
    // A bundle whose build was killed while it was being replaced is put back.
    let _ = workspace::recover(path);
    if !path.exists() && path.extension().is_none_or(|e| e != "toml") {
        return Err(Error::input(format!("there is no `{shown}`")).hint(
            "`moec inspect` takes a bundle, a checkpoint (a folder or a GGUF file), a `model.toml`, a profile (`.trace`), or \
             NDP command streams of a bundle (`.streams`)",
        ));
    }
    if path.join(MANIFEST).is_file() {
        bundle::inspect(path, args.json)
    } else if containers::find(path).is_some() {
        let (checkpoint, spec) = moec_import::open(path, &ImportOptions::default())?;
        let facts = facts::of(&spec, &|leaf| checkpoint.format(leaf));
        let stored = facts::stored_as(&spec, &|leaf| checkpoint.stored_as(leaf));
        let value =
            json!({"kind": "checkpoint", "model": model(&spec, &facts), "stored_as": numbers_as(&stored)});
        let mut rows = model_rows(path, &spec, &facts);
        let stored: Vec<_> =
            stored.iter().map(|(storage, n)| format!("{storage} {}", human::count(*n))).collect();
        rows.insert(5, vec!["numbers".to_owned(), stored.join("; ")]);
        print(args, &value, rows)
    } else if trace::is_one(path) {
        match args.cache.as_slice() {
            [] => trace::inspect(path, &args.profile, args.json),
            sizes => caches::inspect(path, sizes, args.json),
        }
    } else if path.extension().is_some_and(|e| e == "streams") {
        streams(args)
    } else if path.is_dir() {
        Err(Error::input(format!("`{shown}` is neither a bundle nor a checkpoint"))
            .hint("a bundle has a `manifest.json`, a checkpoint a `config.json`"))
    } else {
        config(args, &Config::load(path)?)
    }
}

/// The NDP command streams of a layer, as text.
fn streams(args: &Args) -> Result<()> {
    let shown = args.path.display();
    let bytes = regular::read(&args.path, regular::STREAMS)
        .map_err(|e| Error::input(format!("`{shown}` cannot be read")).because(e))?;
    let text = backends::print_command_streams(&bytes).map_err(|why| {
        Error::input(format!("`{shown}` is not a file of NDP command streams"))
            .because(why)
            .hint("a bundle for NDP DIMMs has such files in `artifacts`")
    })?;
    if args.json { output::json(&json!({"kind": "streams", "text": text})) } else { output::data(&text) }
}

/// Prints a `model.toml`.
fn config(args: &Args, config: &Config) -> Result<()> {
    let options = ImportOptions { allow_nonfinite: config.model.allow_nonfinite };
    let (checkpoint, spec) = moec_import::open(&config.model.source, &options)?;
    let shapes = config.shapes_for(spec.max_positions)?;
    let facts = facts::of(&spec, &|leaf| checkpoint.format(leaf));
    let bytes = facts.bundle_bytes(&config.weights);
    let slots = shapes.decode_batch.last().copied().unwrap_or(1) as u64;
    let states = |rings: bool| lower::Shapes {
        max_context: shapes.max_context,
        rings: rings.then_some(CACHE_BLOCK),
        prefill_chunk: shapes.prefill_chunk,
        prefill_out_rows: 1,
        decode_batch: shapes.decode_batch.clone(),
        slots: 1,
        little: None,
    };
    let of_states = |rings| {
        let shapes = states(rings);
        facts.kv_bytes(config.kv_format(), |window| shapes.kv_state(window).0) * slots
    };
    let (cache, without_windows) = (of_states(true), of_states(false));
    let less = match without_windows - cache {
        0 => String::new(),
        saved => format!(", {} less for sliding windows", human::bytes(saved)),
    };
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let (context, chunk) = (narrow(shapes.max_context), narrow(shapes.prefill_chunk));
    let snapshots = snapshots(facts.folded_bytes(), cache / slots.max(1), context, chunk);
    let of_snapshots = facts.folded_bytes() * u64::from(snapshots) * slots;
    let more = match of_snapshots {
        0 => String::new(),
        bytes => format!(", {} of snapshots", human::bytes(bytes)),
    };
    let w = &config.weights;
    let mut value = json!({
        "kind": "model.toml",
        "source": config.model.source,
        "model": model(&spec, &facts),
        "shapes": {
            "max_context": shapes.max_context,
            "prefill_chunk": shapes.prefill_chunk,
            "decode_batch": shapes.decode_batch,
        },
        "weights": {
            "experts": w.name(WeightClass::Experts),
            "attention": w.name(WeightClass::Attention),
            "embeddings": w.name(WeightClass::Embeddings),
            "activations": w.activations.name(),
            "rounding": w.rounding.name(),
        },
        "estimate": {"weight_bytes": bytes, "kv_cache_bytes": cache, "kv_cache_bytes_without_windows": without_windows, "snapshot_bytes": of_snapshots},
    });
    let mut rows = model_rows(&config.model.source, &spec, &facts);
    let row = |a: &str, b: String| vec![a.to_owned(), b];
    let batch: Vec<String> = shapes.decode_batch.iter().map(ToString::to_string).collect();
    rows.extend([
        row(
            "shapes",
            format!(
                "{} tokens, prefill by {}, decode by {}",
                shapes.max_context,
                config.shapes.prefill_chunk.map_or("auto".to_owned(), |_| shapes.prefill_chunk.to_string()),
                batch.join(", ")
            ),
        ),
        row(
            "weights",
            format!(
                "experts {}, attention {}, embeddings {}; activations {}",
                w.name(WeightClass::Experts),
                w.name(WeightClass::Attention),
                w.name(WeightClass::Embeddings),
                w.activations.name()
            ),
        ),
        row(
            "estimate",
            format!("{} of weights, {} of KV cache{less}{more}", human::bytes(bytes), human::bytes(cache)),
        ),
    ]);
    if let Some(budget) = config.memory.budget {
        value["budget_bytes"] = json!(budget);
        let threads = config.memory.threads.map_or(String::new(), |n| format!(", {n} threads"));
        rows.push(row(
            "budget",
            format!("{}{threads}; experts that do not fit stay on disk", human::bytes(budget)),
        ));
    }
    print(args, &value, rows)
}

fn print(args: &Args, value: &Value, rows: Vec<Vec<String>>) -> Result<()> {
    if args.json { output::json(value) } else { output::data(&output::table(&rows)) }
}

/// Numbers that are stored in each way.
fn numbers_as(stored: &[(String, u64)]) -> Value {
    Value::Object(stored.iter().map(|(storage, n)| (storage.clone(), json!(n))).collect())
}

/// A model as JSON.
fn model(spec: &ModelSpec, facts: &Facts) -> Value {
    let stored: serde_json::Map<_, _> =
        facts.stored.iter().map(|(class, f)| (class.name().to_owned(), json!(f.name()))).collect();
    let by_class: serde_json::Map<_, _> =
        facts.by_class.iter().map(|(class, n)| (class.name().to_owned(), json!(n))).collect();
    json!({
        "family": facts.family,
        "parameters": facts.parameters,
        "active_parameters": facts.active_parameters,
        "parameters_by_class": by_class,
        "stored_by_class": stored,
        "layers": facts.layers,
        "moe_layers": facts.moe_layers,
        "experts": facts.experts,
        "experts_per_token": facts.experts_per_token,
        "hidden": spec.hidden,
        "vocab": spec.vocab,
        "max_context": spec.max_positions,
        "kv_bytes_per_token": facts.kv_bytes_per_token(Format::Bf16),
        "warnings": spec.warnings,
    })
}

/// Rows about a model, for people.
fn model_rows(source: &Path, spec: &ModelSpec, f: &Facts) -> Vec<Vec<String>> {
    let row = |a: &str, b: String| vec![a.to_owned(), b];
    let classes: Vec<String> =
        f.by_class.iter().map(|(c, n)| format!("{} {}", c.name(), human::count(*n))).collect();
    let stored: Vec<String> =
        f.stored.iter().map(|(class, format)| format!("{} {format}", class.name())).collect();
    let mut rows = vec![
        row("checkpoint", source.display().to_string()),
        row("family", format!("{} ({})", spec.title, spec.family)),
        row(
            "parameters",
            format!("{}, {} used per token", human::count(f.parameters), human::count(f.active_parameters)),
        ),
        row("", classes.join(", ")),
        row(
            "stored",
            if stored.is_empty() {
                "in a format that bundles do not have".to_owned()
            } else {
                stored.join(", ")
            },
        ),
        row(
            "layers",
            format!(
                "{}, {} of them with {} experts, {} per token",
                f.layers, f.moe_layers, f.experts, f.experts_per_token
            ),
        ),
        row("width", format!("{} hidden, {} vocabulary", spec.hidden, spec.vocab)),
        row(
            "context",
            format!(
                "{} tokens, {} of bf16 cache each",
                spec.max_positions,
                human::bytes(f.kv_bytes_per_token(Format::Bf16))
            ),
        ),
        row("sizes", sizes(f)),
    ];
    rows.extend(spec.warnings.iter().map(|w| row("warning", w.clone())));
    rows
}
