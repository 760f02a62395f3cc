//! Writing a bundle.

use super::hashing::{HashingWriter, hex, sha256};
use super::manifest::{BUNDLE_VERSION, Manifest, digest, entry};
use super::partial::{MANIFEST, Partial, io_error};
use super::toolchain::{Missing, Route};
use super::{
    DECISIONS, DENSE, DEVICE, EXPERTS, GRAPH, KERNELS, PLAN, PLAN_TEXT, TOKENIZER, cargo, device, link,
    runner,
};
use crate::coreml;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::pipeline::Compilation;
use crate::progress::Progress;
use moec_cpu::WeightImportance;
use moec_ir::plan::{FileRef, Layout, Paging, Plan, Segment};
use moec_ir::{Module, Source, WeightId};
use moec_runtime::flash::checksum_after;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Bytes of packed weights.
    pub weight_bytes: u64,
    /// Bytes of weights in packages of other units.
    pub package_bytes: u64,
    /// Whether `run` is there.
    pub run: bool,
    /// Why it is not, though it was wanted.
    pub missing: Option<Missing>,
    /// SHA-256 of the manifest, hexadecimal.
    pub manifest_sha256: String,
}

/// Writes the compiled model to `destination`. `route`: how `run` comes about, or what keeps it from that; `None`
/// where it is not wanted.
///
/// # Errors
/// Whatever keeps a file from being written; nothing is left behind then.
pub fn write(
    c: &mut Compilation<'_>,
    destination: &Path,
    route: Option<Result<Route, Missing>>,
    progress: &Progress,
) -> Result<Summary> {
    let partial = Partial::create(destination)?;
    let root = partial.path();
    for folder in ["weights", "artifacts", "runner"] {
        let path = root.join(folder);
        fs::create_dir(&path).map_err(|e| io_error("create", &path, &e))?;
    }

    let phase = progress.phase("Compiling", &format!("{} kernels for {}", c.kernels.len(), c.target.name()));
    let object =
        c.target.compile(&c.kernels).map_err(|e| Error::bug("the kernels do not compile").because(e))?;
    drop(phase);
    put(&root.join(KERNELS), &object)?;
    put(&root.join(GRAPH), c.module.to_string().as_bytes())?;
    put(&root.join(DEVICE), device::text(c.target)?.as_bytes())?;
    if let Some(tokenizer) = c.tokenizer()? {
        put(&root.join(TOKENIZER), tokenizer)?;
    }

    let package_bytes = coreml::emit::packages(c, root, progress)?;
    let mut plan = c.plan()?.clone();
    let packing = Packing {
        module: &c.module,
        segment_weights: &c.segment_weights,
        source: c.checkpoint,
        importance: c.importance,
    };
    let weight_bytes = pack(&packing, &mut plan, root, progress)?;
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

    let decisions = c.decisions.as_ref().ok_or_else(|| Error::bug("nothing was decided"))?;
    let text = serde_json::to_string_pretty(decisions).map_err(|e| Error::bug(e.to_string()))?;
    put(&root.join(DECISIONS), format!("{text}\n").as_bytes())?;

    let generated = moec_cpu::runner_source(&plan)
        .map_err(|e| Error::bug("the generated source is no Rust").because(e))?;
    runner::write_sources(&root.join("runner"), &generated)?;
    runner::write_script(root, c.target.triple())?;
    let route = route.transpose();
    if let Ok(Some(route)) = &route {
        let built = match route {
            Route::Prebuilt(cc) => {
                let _phase = progress.phase("Linking", "`run`");
                let table = c.target.table(&plan, &encoded);
                let table = table.map_err(|e| Error::bug("the table does not compile").because(e))?;
                link::link(root, &table, cc)
            }
            Route::Cargo(tools) => cargo::build(root, &generated, &object, tools, progress),
        };
        // An interrupt ends cargo and the linker, too: that is no failure of theirs.
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
        source_fingerprint: c.checkpoint.fingerprint(),
        profile: c.profile_entry.clone(),
        files: std::collections::BTreeMap::new(),
    };
    list(root, root, &plan, &mut manifest)?;
    let text = serde_json::to_string_pretty(&manifest).map_err(|e| Error::bug(e.to_string()))?;
    let text = format!("{text}\n");
    put(&root.join(MANIFEST), text.as_bytes())?;
    interrupt::check()?;
    partial.commit()?.iter().for_each(|note| progress.warn(note));
    c.plan = Some(plan);
    Ok(Summary {
        weight_bytes,
        package_bytes,
        run: matches!(route, Ok(Some(_))),
        missing: route.err(),
        manifest_sha256: digest(text.as_bytes()),
    })
}

fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).map_err(|e| io_error("write", path, &e))
}

/// What is packed.
pub(crate) struct Packing<'a> {
    /// Weights.
    pub(crate) module: &'a Module,
    /// Weight of each segment of the plan.
    pub(crate) segment_weights: &'a [WeightId],
    /// Where their numbers come from.
    pub(crate) source: &'a dyn Source,
    /// Which errors matter, for grouped formats.
    pub(crate) importance: Option<&'a dyn WeightImportance>,
}

/// Packs every segment into its file, one panel at a time. Sets size and hash of the weight files. Gives their bytes.
///
/// # Errors
/// Weights that cannot be read or do not fit their format; a disk that is full.
pub(crate) fn pack(c: &Packing<'_>, plan: &mut Plan, root: &Path, progress: &Progress) -> Result<u64> {
    let total = plan.segments.iter().map(|s| s.bytes).sum();
    let bar = progress.bytes("Packing", total);
    for (index, file) in plan.files.iter_mut().enumerate() {
        if ![DENSE, EXPERTS].contains(&file.path.as_str()) {
            continue;
        }
        let path = root.join(&file.path);
        let failed = |e: &io::Error| interrupt::check().err().unwrap_or_else(|| io_error("write", &path, e));
        let mut out = HashingWriter::create(&path).map_err(|e| failed(&e))?;
        for piece in pieces(&plan.segments, plan.paging.as_ref(), index as u32) {
            let Some((segment, &weight)) = plan.segments.iter().zip(c.segment_weights).nth(piece.segment)
            else {
                return Err(Error::bug("a segment that does not exist"));
            };
            bar.label(&segment.name);
            let offset = segment.matrix_offset(piece.matrices.start as u32).unwrap_or(segment.offset);
            out.pad_to(offset).map_err(|e| failed(&e))?;
            let before = out.position();
            let weight = c.module.weight(weight);
            // Importance is that of what a matrix is multiplied by; a table that is read by rows has none.
            let importance = c.importance.filter(|i| segment.layout != Layout::Rows || i.stored());
            let mut checked = Checked { out: &mut out, crc32c: 0 };
            let matrices = piece.matrices.clone();
            moec_cpu::pack(segment, weight, c.source, importance, matrices, &mut checked, &mut |bytes| {
                bar.add(bytes);
            })
            .map_err(|e| match e {
                moec_cpu::PackError::Write(e) => failed(&e),
                moec_cpu::PackError::Read(e) => match e.downcast::<Error>() {
                    Ok(e) => *e,
                    Err(e) => Error::input(e.to_string()),
                },
                e @ moec_cpu::PackError::Importance { .. } => Error::bug(e.to_string()),
                e @ moec_cpu::PackError::Range { .. } => {
                    Error::input(e.to_string()).hint("choose bf16 or f32 for its class under `[weights]`")
                }
            })?;
            let crc32c = checked.crc32c;
            let matrix = segment.matrix_bytes().unwrap_or(0);
            if out.position() - before != matrix * piece.matrices.len() as u64 {
                return Err(Error::bug(format!(
                    "`{}` was packed to another size than planned",
                    segment.name
                )));
            }
            if let (Some(at), Some(paging)) = (piece.checksum, &mut plan.paging) {
                paging.checksums[at] = crc32c;
            }
        }
        let (bytes, sha256) = out.finish().map_err(|e| failed(&e))?;
        *file = FileRef { path: file.path.clone(), bytes, sha256 };
    }
    bar.finish();
    Ok(total)
}

/// Matrices of a segment that are written one after the other.
struct Piece {
    segment: usize,
    matrices: Range<usize>,
    /// Where their checksum goes.
    checksum: Option<usize>,
}

/// What a weight file holds, in the order of its bytes: whole segments, or the experts that stay on flash one by one.
fn pieces(segments: &[Segment], paging: Option<&Paging>, file: u32) -> Vec<Piece> {
    let lead = |s: &Segment| s.extents().0 as usize;
    let paged: Vec<_> =
        paging.iter().flat_map(|p| &p.layers).map(|l| [l.gate_up as usize, l.down as usize]).collect();
    let is_paged = |i: usize| paged.iter().any(|pair| pair.contains(&i));
    let own = segments.iter().enumerate().filter(|(i, s)| s.file == file && !is_paged(*i));
    let mut all: Vec<Piece> =
        own.map(|(i, s)| Piece { segment: i, matrices: 0..lead(s), checksum: None }).collect();
    let mut at = 0;
    for pair in &paged {
        let Some(first) = segments.get(pair[0]) else { continue };
        for expert in 0..lead(first) {
            for &segment in pair {
                if first.file == file {
                    all.push(Piece { segment, matrices: expert..expert + 1, checksum: Some(at) });
                }
                at += 1;
            }
        }
    }
    all
}

/// A writer that also computes the CRC-32C of what goes through it.
struct Checked<'a, W> {
    out: &'a mut W,
    crc32c: u32,
}

impl<W: io::Write> io::Write for Checked<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.crc32c = checksum_after(self.crc32c, bytes.get(..n).unwrap_or(bytes));
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
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
