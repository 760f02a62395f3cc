//! Writing a bundle.

use super::manifest::{BUNDLE_VERSION, Manifest, ProfileEntry, digest, entry};
use super::pack::{Packing, pack};
use super::partial::Partial;
use super::reuse::Reuse;
use super::toolchain::{Missing, Route};
use super::{artifacts, cargo, device, link, runner};
use crate::objects::ObjectCache;
use moec_base::error::{Error, Result, io_error};
use moec_base::hashing::{hex, sha256};
use moec_base::interrupt;
use moec_base::paths::{
    CHAT_TEMPLATE, DECISIONS, DEVICE, GRAPH, KERNELS, MANIFEST, PLAN, PLAN_TEXT, SAMPLING, TOKENIZER,
};
use moec_base::progress::Progress;
use moec_cpu::WeightImportance;
use moec_ir::plan::{FileRef, Plan};
use moec_pipeline::Compiled;
use moec_targets::backends;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Summary of a written bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Bytes of packed weights.
    pub weight_bytes: u64,
    /// Number of them that earlier bundles had.
    pub reused_bytes: u64,
    /// Duration of packing them, until they were on the disk.
    pub packing: Duration,
    /// Bytes of weights in packages of other units.
    pub package_bytes: u64,
    /// Notes of backends on what they left out, and the remedy, a line each.
    pub notes: Vec<String>,
    /// Whether the bundle has `run`.
    pub run: bool,
    /// Reason that `run` is missing, though it was requested.
    pub missing: Option<Missing>,
    /// SHA-256 of the manifest, hexadecimal.
    pub manifest_sha256: String,
}

/// Optional parts of a bundle.
#[derive(Clone, Debug, Default)]
pub struct Options<'a> {
    /// Method that builds `run`, or the reason that there is none; `None` if `run` is not requested.
    pub route: Option<Result<Route, Missing>>,
    /// Whether weights may come from earlier bundles.
    pub reuse: bool,
    /// Whether the sources of the runtime are in it.
    pub sources: bool,
    /// Importance of the weights' errors, for grouped formats; `None`: all the same.
    pub importance: Option<&'a dyn WeightImportance>,
    /// Entry of the profile in the manifest.
    pub profile: Option<ProfileEntry>,
}

/// Writes the compiled model to `destination`. Returns the plan as it was written, with all files.
///
/// # Errors
/// Fails if a file cannot be written; no files remain then.
pub fn write(
    c: &Compiled<'_>,
    destination: &Path,
    options: Options<'_>,
    progress: &Progress,
) -> Result<(Plan, Summary)> {
    let Options { route, reuse: reuses, sources, importance, profile } = options;
    let checkpoint = c.checkpoint;
    let partial = Partial::create(destination)?;
    let root = partial.path();
    for folder in ["weights", "artifacts", "runner"] {
        let path = root.join(folder);
        fs::create_dir(&path).map_err(|e| io_error("create", &path, &e))?;
    }

    let phase = progress.phase("Compiling", &format!("{} kernels for {}", c.kernels.len(), c.target.name()));
    let object = c
        .target
        .compile(&c.kernels, &ObjectCache::open())
        .map_err(|e| Error::bug("the kernels do not compile").because(e))?;
    drop(phase);
    put(&root.join(KERNELS), &object)?;
    put(&root.join(GRAPH), c.module.to_string().as_bytes())?;
    put(&root.join(DEVICE), device::text(c.target)?.as_bytes())?;
    if let Some(tokenizer) = c.tokenizer {
        put(&root.join(TOKENIZER), tokenizer)?;
    }
    if let Some(templates) = checkpoint.chat_templates()? {
        put(&root.join(CHAT_TEMPLATE), &templates)?;
    }
    if let Some(sampling) = checkpoint.sampling()? {
        put(&root.join(SAMPLING), &sampling)?;
    }

    let emitted = artifacts::write(c, importance, root, progress)?;
    let mut plan = c.plan.clone();
    let code_files =
        emitted.code.iter().map(|path| FileRef { path: path.clone(), bytes: 0, sha256: [0; 32] });
    plan.files.extend(code_files);
    let known = profile.as_ref().filter(|_| importance.is_some());
    let rounding = known.map(|profile| format!("{} {:?}", profile.sha256, c.decisions.rounding));
    let reuse = reuses.then(|| Reuse::of(checkpoint, rounding.as_deref())).flatten();
    let source = c.trained.over(checkpoint);
    let packing = Packing {
        module: &c.module,
        segment_weights: &c.segment_weights,
        source: &source,
        importance,
        reuse: reuse.as_ref(),
    };
    let start = Instant::now();
    let packed = pack(&packing, &mut plan, root, progress)?;
    let packing = start.elapsed();
    for file in &mut plan.files {
        if file.bytes == 0 {
            let path = root.join(&file.path);
            let bytes = fs::read(&path).map_err(|e| io_error("read", &path, &e))?;
            (file.bytes, file.sha256) = (bytes.len() as u64, sha256(&bytes));
        }
    }
    moec_ir::verify::plan(&plan).map_err(|e| Error::bug("the plan does not verify").because(e))?;
    let encoded = plan.encode().map_err(|e| Error::bug("the plan cannot be encoded").because(e))?;
    put(&root.join(PLAN), &encoded)?;
    put(&root.join(PLAN_TEXT), plan.to_string().as_bytes())?;

    let text = serde_json::to_string_pretty(&c.decisions).map_err(|e| Error::bug(e.to_string()))?;
    put(&root.join(DECISIONS), format!("{text}\n").as_bytes())?;

    let more = backends::runner(&plan)?;
    let generated = moec_cpu::runner_source(&plan, more.map(|more| more.native))
        .map_err(|e| Error::bug("the source of `run` was not written").because(e))?;
    runner::write_sources(&root.join("runner"), &generated, more, sources)?;
    runner::write_script(root, c.target.triple(), more)?;
    let route = route.transpose();
    if let Ok(Some(route)) = &route {
        let built = match route {
            Route::Prebuilt(linker) => {
                let _phase = progress.phase("Linking", "`run`");
                let table = c.target.table(&plan, &encoded);
                let table = table.map_err(|e| Error::bug("the table does not compile").because(e))?;
                link::link(root, &table, *linker)
            }
            Route::Cargo(tools) => cargo::build(root, (&generated, more), tools, progress),
        };
        // An interrupt ends cargo and the linker, too: that is not their failure.
        interrupt::check()?;
        built?;
    }
    interrupt::check()?;

    let mut manifest = Manifest {
        bundle_version: BUNDLE_VERSION,
        moec_version: env!("CARGO_PKG_VERSION").to_owned(),
        family: plan.model.family.clone(),
        target: plan.target.name.clone(),
        llvm: moec_cpu::llvm_version(),
        assembler: emitted.assembler,
        source_fingerprint: checkpoint.fingerprint(),
        profile,
        files: std::collections::BTreeMap::new(),
    };
    list(root, root, &plan, &mut manifest)?;
    let text = serde_json::to_string_pretty(&manifest).map_err(|e| Error::bug(e.to_string()))?;
    let text = format!("{text}\n");
    put(&root.join(MANIFEST), text.as_bytes())?;
    interrupt::check()?;
    partial.commit()?.iter().for_each(|note| progress.warn(note));
    if let Some(reuse) = &reuse {
        reuse.note(checkpoint, destination, packed.files);
    }
    let summary = Summary {
        weight_bytes: packed.bytes,
        reused_bytes: packed.reused,
        packing,
        package_bytes: emitted.bytes,
        notes: emitted.notes,
        run: matches!(route, Ok(Some(_))),
        missing: route.err(),
        manifest_sha256: digest(text.as_bytes()),
    };
    Ok((plan, summary))
}

fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).map_err(|e| io_error("write", path, &e))
}

/// Enters every file below `folder` into the manifest; those of the plan are already hashed.
fn list(root: &Path, folder: &Path, plan: &Plan, manifest: &mut Manifest) -> Result<()> {
    let entries = fs::read_dir(folder).map_err(|e| io_error("read", folder, &e))?;
    for found in entries {
        let path = found.map_err(|e| io_error("read", folder, &e))?.path();
        if path.is_dir() {
            list(root, &path, plan, manifest)?;
            continue;
        }
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().replace('\\', "/");
        let known = plan.files.iter().find(|f| f.path == name);
        let entry = match known {
            Some(f) => super::manifest::FileEntry { bytes: f.bytes, sha256: hex(&f.sha256) },
            None => entry(&path)?,
        };
        manifest.files.insert(name, entry);
    }
    Ok(())
}
