//! Artifacts of accelerators: written by their backends.

use moec_backend::{Assembled, Channels, Emit, Emitted, Error, Numbers, Rounding, StreamLayer};
use moec_base::cache_dir;
use moec_base::error::{Error as Bug, Result, io_error};
use moec_base::interrupt;
use moec_base::progress::Progress;
use moec_base::tools;
use moec_cpu::{Feedback, GpuTarget, LARGEST, Q4o, WeightImportance, Weighting, groups, quantise_q4o};
use moec_ir::plan::{Builtin, Code, StreamSet};
use moec_ir::types::GROUP;
use moec_ir::{Format, Module, Source, Weight};
use moec_passes::{parts, plan_expert_schedule};
use moec_pipeline::Compiled;
use moec_profile::{Profile, samples};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Writes the artifacts of everything that runs on another unit below `root`.
///
/// # Errors
/// The backend fails.
pub fn write(
    c: &Compiled<'_>,
    importance: Option<&dyn WeightImportance>,
    root: &Path,
    progress: &Progress,
) -> Result<Emitted> {
    let mut emitted = write_graphs(c, importance, root, progress)?;
    emitted.bytes += write_streams(c, root, progress)?;
    write_threads(c, root, progress, &mut emitted)?;
    Ok(emitted)
}

/// Writes the NDP command streams of every unit that has some. Gives their bytes.
fn write_streams(c: &Compiled<'_>, root: &Path, progress: &Progress) -> Result<u64> {
    let plan = &c.plan;
    if plan.streams.is_empty() {
        return Ok(0);
    }
    let bar = progress.items("Emitting", plan.streams.len() as u64, "layers");
    let next = |name: &str| {
        interrupt::check()?;
        bar.label(name);
        bar.add(1);
        Ok(())
    };
    let mut written = 0;
    for accelerator in &c.list.accelerators {
        let Some(streams) = accelerator.backend.command_streams() else { continue };
        let dimms: Vec<Vec<i32>> = plan.streams.iter().map(|set| dimms_of_experts(c, set)).collect();
        let mut layers = Vec::new();
        for (index, set) in plan.streams.iter().enumerate().filter(|(_, set)| set.unit == accelerator.index) {
            let experts = plan_expert_schedule::experts(&c.module)?;
            let found = experts.iter().find(|(layer, _)| *layer == set.layer);
            let &(_, expert) = found.ok_or_else(|| Bug::bug("command streams of a layer without experts"))?;
            let steps = plan.entries.iter().flat_map(|e| &e.steps);
            let of = steps.filter_map(|s| match s.code {
                Code::Builtin(Builtin::Streams { set, rows, k }) if set as usize == index => Some(rows * k),
                _ => None,
            });
            let slots = of.max().unwrap_or(1);
            layers.push(StreamLayer { set, expert, dimms: &dimms[index], slots });
        }
        written += streams.emit(accelerator.unit, &layers, root, &next)?;
    }
    bar.finish();
    Ok(written)
}

/// Writes the GPU kernels of every unit that launches some, and beside their text what an assembler makes of
/// it, if there is one.
fn write_threads(c: &Compiled<'_>, root: &Path, progress: &Progress, emitted: &mut Emitted) -> Result<()> {
    let launches = &c.plan.launches;
    for accelerator in &c.list.accelerators {
        let own = launches.iter().zip(&c.gpu_kernels).filter(|(k, _)| k.unit == accelerator.index);
        let (names, kernels): (Vec<_>, Vec<_>) = own.map(|(k, kernel)| (&k.artifact, kernel.clone())).unzip();
        let Some(artifact) = names.first() else { continue };
        let backend =
            accelerator.backend.gpu_kernels().ok_or_else(|| Bug::bug("GPU kernels of no backend"))?;
        let generation = backend.generation(accelerator.unit);
        let threads = generation.and_then(|g| GpuTarget::new(g, c.target));
        let threads = threads.ok_or_else(|| Bug::bug("GPU kernels for no generation"))?;
        let what = format!("{} kernels for {}", kernels.len(), threads.sm().name());
        let _phase = progress.phase("Compiling", &what);
        let text = threads.compile(&kernels).map_err(|e| {
            Error::environment(format!("the kernels of `{}` do not compile", accelerator.unit.name))
                .because(e)
        })?;
        let path = root.join(artifact);
        std::fs::write(&path, text).map_err(|e| io_error("write", &path, &e))?;
        let cache = tools::cache();
        match backend.assemble(&path, accelerator.unit, tools::beside(&cache))? {
            Some(Assembled { code, by }) => {
                let name = backend.code_path(artifact);
                let path = root.join(&name);
                std::fs::write(&path, code).map_err(|e| io_error("write", &path, &e))?;
                emitted.code.push(name);
                emitted.assembler = Some(by);
            }
            None => emitted.notes.push(format!(
                "`{artifact}` contains only PTX, which the driver compiles at every start; `{}` \
                 installs the assembler that adds machine code",
                backend.installs_assembler()
            )),
        }
    }
    Ok(())
}

/// DIMM of each expert of a set: its initial one if experts are scheduled, otherwise in rotation.
fn dimms_of_experts(c: &Compiled<'_>, set: &StreamSet) -> Vec<i32> {
    let of = c.assignment.experts.of_layer(Some(set.layer)).filter(|(_, l)| !l.dimms.is_empty());
    let count =
        c.list.accelerator(set.unit).and_then(|f| f.unit.dimms.as_ref()).map_or(1, |d| d.count.max(1));
    let in_turn = || (0..set.experts).map(|e| (e % count) as i32).collect();
    of.map_or_else(in_turn, |(_, l)| l.dimms.clone())
}

fn write_graphs(
    c: &Compiled<'_>,
    importance: Option<&dyn WeightImportance>,
    root: &Path,
    progress: &Progress,
) -> Result<Emitted> {
    let (Some(units), Some(placement)) = (&c.units, &c.placement) else { return Ok(Emitted::default()) };
    let parts = parts::placed(&c.module, placement, units);
    let groups = parts::groups(placement, units);
    let count = groups.len() + parts.len() + c.hot_neurons.len();
    if count == 0 {
        return Ok(Emitted::default());
    }
    let bar = progress.items("Emitting", count as u64, "graphs");
    let seen = RefCell::new(BTreeSet::new());
    let next = |name: &str| {
        interrupt::check()?;
        bar.label(name);
        // A backend comes back to some.
        if seen.borrow_mut().insert(name.to_owned()) {
            bar.add(1);
        }
        Ok(())
    };
    let cache = cache_dir::path()?;
    let samples = c.samples.as_ref().map(|(profile, lowered)| (*profile, lowered));
    let numbers = Checkpoint { source: c.checkpoint, importance, samples };
    let written = units.graphs.emit(&Emit {
        module: &c.module,
        unit: units.npu,
        groups: &groups,
        parts: &parts,
        hot: &c.hot_neurons,
        numbers: &numbers,
        root,
        tools: tools::beside(&cache),
        next: &next,
    })?;
    // An interrupt ends the programs of a backend, too: that is not their failure.
    interrupt::check()?;
    bar.finish();
    Ok(written)
}

/// Weights of a source as backends read them, without a profile: rounded to the nearest codes.
pub fn numbers(source: &dyn Source) -> impl Numbers {
    Checkpoint { source, importance: None, samples: None }
}

/// Weights of a checkpoint, rounded as packing rounds them.
struct Checkpoint<'a> {
    source: &'a dyn Source,
    importance: Option<&'a dyn WeightImportance>,
    /// The profile that rows are kept in, and the Graph whose weights it names.
    samples: Option<(&'a Profile, &'a Module)>,
}

impl Numbers for Checkpoint<'_> {
    fn read(
        &self,
        weight: &Weight,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        weight
            .expr
            .read(matrix, rows, cols, self.source, out)
            .map_err(|e| Error::input(format!("`{}` cannot be read", weight.name)).because(e))
    }

    fn importance(&self, weight: &Weight, matrix: usize) -> Option<Vec<f32>> {
        Some(self.importance?.importance(&weight.name, matrix)?.to_vec())
    }

    fn rows(&self, weight: &Weight) -> Result<Option<Vec<f32>>> {
        let Some((profile, lowered)) = &self.samples else { return Ok(None) };
        samples::rows(profile, lowered, weight, self.source)
    }

    fn rounding<'a>(&'a self, weight: &'a Weight, matrix: usize) -> Box<dyn Rounding + 'a> {
        let feedback = self.importance.and_then(|i| i.feedback(&weight.name, matrix));
        let importance = self.importance.and_then(|i| i.importance(&weight.name, matrix));
        Box::new(Groups { format: weight.format, feedback, importance })
    }
}

struct Groups<'a> {
    format: Format,
    feedback: Option<Arc<Feedback>>,
    importance: Option<&'a [f32]>,
}

impl Rounding for Groups<'_> {
    fn groups(&self, rows: &[f32], cols: usize) -> Result<Vec<(f32, [i8; GROUP])>, f32> {
        let weighting = Weighting { feedback: self.feedback.as_deref(), ..Weighting::of(self.importance) };
        Ok(groups(self.format, rows, cols, weighting)?.collect())
    }

    fn channels(&self, numbers: &[f32], cols: usize, outliers: usize) -> Result<Channels, f32> {
        if let Some(x) = numbers.iter().find(|x| x.is_nan() || x.abs() > LARGEST) {
            return Err(*x);
        }
        let weighting = Weighting { feedback: self.feedback.as_deref(), ..Weighting::of(self.importance) };
        let read = |rows: Range<usize>, out: &mut [f32]| match numbers.get(rows.start * cols..rows.end * cols)
        {
            Some(own) => {
                out.copy_from_slice(own);
                Ok(())
            }
            None => Err(f32::NAN),
        };
        let made = quantise_q4o([numbers.len() / cols.max(1), cols], outliers, weighting, read)?;
        let Q4o { outliers, int4, scale: scales, int8: eight, int8_scale: eight_scales, .. } = made;
        let four = if outliers.len() == cols { Vec::new() } else { int4 };
        Ok(Channels { outliers, four, scales, eight, eight_scales })
    }
}
