//! `moec verify --static`: checks of a bundle without executing it.

use super::agree;
use moec_base::error::{Error, Result};
use moec_base::paths::{DECISIONS, KERNELS, TOKENIZER};
use moec_base::progress::Progress;
use moec_bundle::packed;
use moec_bundle::read::Bundle;
use moec_import::Checkpoint;
use moec_ir::eval::Evaluator;
use moec_ir::plan::{Plan, TargetInfo};
use moec_ir::{Module, WeightId};
use moec_runtime::CheckLevel;
use moec_runtime::{Program, Text};
use object::{Architecture, Object as _, ObjectSymbol as _, SymbolKind};
use serde::Serialize;
use std::collections::BTreeSet;

/// Relocations and symbols that object code may require of its loader.
const REQUIRED_SYMBOLS: [&str; 4] = ["memcpy", "memmove", "memset", "bzero"];

/// Summary of the valid parts.
#[derive(Clone, Debug, Serialize)]
pub struct StaticReport {
    /// Number of files whose hash was checked.
    pub files: usize,
    /// Bytes of these files.
    pub bytes: u64,
    /// Entry points of the plan.
    pub entries: usize,
    /// Number of steps in all of them.
    pub steps: usize,
    /// Number of nodes of the Graph, in all entry points.
    pub nodes: usize,
    /// Number of kernels of the plan that the object code defines.
    pub kernels: usize,
    /// Number of functions of artifacts that the plan calls.
    pub functions: usize,
    /// Number of weights that match the checkpoint, if one was named.
    pub weights: Option<usize>,
}

/// Verifies a bundle without executing it. Checks the hashes of all files and that the folder has no others,
/// plan, Graph, decisions, tokenizer, the object code's symbols, and artifacts. With `source`, also checks
/// every packed weight.
///
/// # Errors
/// Fails at the first part that differs from what a build writes.
pub fn verify(bundle: &Bundle, source: Option<&Checkpoint>, progress: &Progress) -> Result<StaticReport> {
    let count = bundle.manifest.files.len();
    progress.stage("Checking", &format!("{count} files"));
    bundle.manifest.check(&bundle.folder, true)?;
    let files = bundle.files(CheckLevel::All)?;
    let unlisted = bundle.unlisted()?;
    if let Some(first) = unlisted.first() {
        return Err(Error::input(format!(
            "`{}` contains files that no build wrote",
            bundle.folder.display()
        ))
        .because(format!("`{first}` is the first of {}", unlisted.len()))
        .hint("move them away: files outside the manifest are not checked"));
    }
    let mut module = bundle.graph()?;
    agree(bundle, &module)?;
    // The runtime's check of a plan needs kernels; these are never called.
    Program::new(bundle.plan.clone(), &|_| Some(never))
        .map_err(|e| Error::input("the plan cannot be run").because(e))?;
    if bundle.manifest.files.contains_key(DECISIONS) {
        bundle.decisions()?;
    }
    if bundle.manifest.files.contains_key(TOKENIZER) {
        Text::open(&files, bundle.plan.model.bos).map_err(Error::from)?;
    }
    let path = bundle.folder.join(KERNELS);
    object_code(&bundle.object()?, &bundle.plan).map_err(|why| {
        Error::input(format!("`{}` is not the plan's object code", path.display()))
            .because(why)
            .hint("build the bundle again")
    })?;
    let (functions, unverified) = super::artifacts::read(bundle, &files, &module)?;
    for what in &unverified {
        progress.warn(what);
    }
    let weights = source.map(|s| compare(bundle, &mut module, s, progress)).transpose()?;
    Ok(StaticReport {
        files: count,
        bytes: bundle.manifest.bytes(),
        entries: bundle.plan.entries.len(),
        steps: bundle.plan.entries.iter().map(|e| e.steps.len()).sum(),
        nodes: module.entries.iter().map(|g| g.nodes.len()).sum(),
        kernels: bundle.plan.kernels.len(),
        functions,
        weights,
    })
}

/// Placeholder for every kernel of a plan that is checked but not run.
extern "C" fn never(_: *const *mut u8, _: i64, _: i64, _: i64, _: *mut u8) {}

/// Checks that object code is for the plan's CPU and operating system, defines every kernel, and needs no
/// symbols but memory moves.
fn object_code(code: &[u8], plan: &Plan) -> Result<(), String> {
    let file = object::File::parse(code).map_err(|e| e.to_string())?;
    let TargetInfo { triple, .. } = &plan.target;
    let architecture = match triple.split('-').next() {
        Some("x86_64") => Architecture::X86_64,
        Some("aarch64" | "arm64") => Architecture::Aarch64,
        _ => return Err(format!("`{triple}` is not a machine that moec supports")),
    };
    if file.architecture() != architecture {
        return Err(format!("it is for {:?}, but the plan is for {triple}", file.architecture()));
    }
    let apple = triple.contains("-apple-");
    if (file.format() == object::BinaryFormat::MachO) != apple {
        return Err(format!("it has the format {:?}, but the plan is for {triple}", file.format()));
    }
    // Mach-O adds an underscore before the C name of a symbol.
    let plain =
        |name: &str| if apple { name.strip_prefix('_').unwrap_or(name).to_owned() } else { name.to_owned() };
    let mut defined = BTreeSet::new();
    for symbol in file.symbols() {
        let name = plain(symbol.name().map_err(|e| e.to_string())?);
        if symbol.is_definition() && symbol.kind() == SymbolKind::Text {
            defined.insert(name);
        } else if symbol.is_undefined() && !name.is_empty() && !REQUIRED_SYMBOLS.contains(&&*name) {
            return Err(format!("it references `{name}`, which kernels do not need"));
        }
    }
    match plan.kernels.iter().find(|k| !defined.contains(&k.symbol)) {
        Some(kernel) => Err(format!("it has no kernel `{}`", kernel.symbol)),
        None => Ok(()),
    }
}

/// Compares every packed weight with the checkpoint's, rounded as the bundle stores it. Returns the number of
/// weights.
fn compare(bundle: &Bundle, module: &mut Module, source: &Checkpoint, progress: &Progress) -> Result<usize> {
    let packed = packed::Packed::open(bundle)?;
    packed::split_tables(module, &packed);
    let mut own = module.clone();
    packed::read_from_bundle(&mut own, &packed);
    let sources = packed::CheckpointWithBundle { checkpoint: source, packed: &packed };
    let (mut stored, mut right) = (Evaluator::new(&own, &packed), Evaluator::new(module, &sources));
    stored.keep_weights(false);
    right.keep_weights(false);
    right.map_weights(|weight, values| packed.round(weight, values));
    // Weights that only artifacts hold have no segment. `verify` executes them; this check does not read
    // them.
    let ids: Vec<WeightId> = (0..module.weights.len() as u32)
        .map(WeightId)
        .filter(|id| packed.holds(&module.weight(*id).name))
        .collect();
    let bar = progress.items("Comparing", ids.len() as u64, "weights");
    for id in &ids {
        let name = &module.weight(*id).name;
        bar.label(name);
        let failed =
            |e: moec_ir::eval::EvalError| Error::input(format!("cannot read weight `{name}`")).because(e);
        let (a, b) = (stored.weight(*id).map_err(failed)?, right.weight(*id).map_err(failed)?);
        let (a, b) = (a.as_f32(), b.as_f32());
        let differ = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits() && a != b).count();
        if a.len() != b.len() || differ > 0 {
            return Err(Error::input(format!("weight `{name}` of the bundle is not the checkpoint's"))
                .because(format!("{differ} of {} numbers differ", a.len()))
                .hint("build the bundle again"));
        }
        bar.add(1);
    }
    bar.finish();
    Ok(ids.len())
}
