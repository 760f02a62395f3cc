//! The family's row: what the compiler asks of it.
//!
//! The streams of a layer's experts lie in one file ([`crate::artifact`]), which says besides where each expert begins. An expert
//! is read as the CPU's kernels have it packed, so no weight is stored twice.
#![expect(clippy::cast_possible_truncation, reason = "sizes of one layer, and rows of a memory system")]

mod check;
mod simulate;

use crate::NAME;
use crate::allot;
use crate::allot::Modules;
use crate::artifact::{self, Artifact, Placed, STRIPED};
use crate::emit::{Output, emit};
use crate::image::{self, Shape};
use crate::machine::{self, Bus};
use crate::sim;
use crate::unit::DimmUnit;
use moec_device::{Device, Dimms, Unit};
use moec_dram::{Options, Path as Way, Placement, Timing};
use moec_family::error::{Error, Result};
use moec_family::{
    Family, Flaw, FunctionReport, StreamCosts, StreamExpert, StreamLayer, StreamRun, StreamScene,
    StreamTrial, Streams, Subcommand,
};
use moec_ir::plan::{Layout, Plan};
use moec_ir::{Format, Op};
use moec_ndp_isa::{Geometry, LINE, System};
use moec_runtime::bundle::BundleReader;
use moec_runtime::exec::beside::Executor;
use std::fs;
use std::ops::Range;
use std::path::Path;

/// Subchannels of a module of DDR5 (JESD79-5).
const SUBCHANNELS: u32 = 2;
/// 10⁹ operations per second of the unit that is modelled (TriMoE, Table 1).
const GOPS: f64 = 256.0;

/// The family of NDP DIMMs.
#[derive(Clone, Copy, Debug)]
pub struct Ndp;

/// The modules that a device file describes.
///
/// # Errors
/// The key that is wrong or missing, and what is expected.
pub fn modules(unit: &Unit) -> Result<(Modules, &Dimms, Timing), Flaw> {
    let missing = || Flaw::new("unit.dimms", "a unit of the family `ndp` says which modules it is");
    let dimms = unit.dimms.as_ref().ok_or_else(missing)?;
    let timing = Timing::named(&dimms.timing).ok_or_else(|| {
        let known: Vec<_> = moec_dram::TIMINGS.iter().map(|(name, _)| format!("`{name}`")).collect();
        Flaw::new(
            "unit.dimms.timing",
            format!("`{}` is not known; there are {}", dimms.timing, known.join(", ")),
        )
    })?;
    if dimms.gops.value != GOPS {
        return Err(Flaw::new("unit.dimms.gops", format!("the unit that is modelled has {GOPS}")));
    }
    let lines = dimms.row_bytes / LINE;
    let set =
        u64::from(SUBCHANNELS * dimms.ranks * dimms.bank_groups * dimms.banks) * u64::from(dimms.row_bytes);
    let rows = dimms.capacity.value as u64 / set.max(1);
    let geometry = Geometry {
        subchannels: SUBCHANNELS,
        ranks: dimms.ranks,
        bank_groups: dimms.bank_groups,
        banks: dimms.banks,
        rows: u32::try_from(rows).unwrap_or(u32::MAX),
        lines,
    };
    if geometry.set_lines().is_none() {
        let message =
            format!("{} bytes are not a row of every bank, which takes {set}", dimms.capacity.value);
        return Err(Flaw::new("unit.dimms.capacity", message));
    }
    let system = System { channels: dimms.channels, dimms: dimms.count / dimms.channels.max(1) };
    Ok((Modules { system, geometry }, dimms, timing))
}

impl Family for Ndp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn is_modelled(&self) -> bool {
        true
    }

    fn check(&self, device: &Device, unit: &Unit) -> Result<(), Flaw> {
        if unit.kind != moec_device::UnitKind::Ndp {
            return Err(Flaw::new("unit.family", "a unit of the family `ndp` is of kind `ndp`"));
        }
        if device.memory_of(unit).is_none() {
            return Err(Flaw::new(
                "unit.memory",
                "a unit of the family `ndp` works in the memory of its modules",
            ));
        }
        let (_, dimms, _) = modules(unit)?;
        if dimms.count > 1 && dimms.link_gb_per_s.is_none() {
            let message = format!("{} modules need links to hand experts to each other", dimms.count);
            return Err(Flaw::new("unit.dimms.link_gb_per_s", message));
        }
        Ok(())
    }

    fn takes(&self, op: &Op) -> bool {
        matches!(op, Op::ExpertFfn { fixed: false, .. })
    }

    fn streams(&self) -> Option<&dyn Streams> {
        Some(self)
    }

    fn subcommands(&self) -> &'static [Subcommand] {
        &[sim::SUBCOMMAND]
    }

    fn host(&self, _unit: &str) -> Option<Executor> {
        Some(Executor::Unit(Box::new(DimmUnit::default())))
    }
}

/// The shape of an expert that a module can multiply.
fn shape(expert: &StreamExpert) -> Result<Shape, String> {
    if let Some(format) = expert.formats.iter().find(|f| **f != Format::Bf16) {
        return Err(format!(
            "its weights are {format}, and a module multiplies bf16: `experts = \"bf16\"` under `[weights]`"
        ));
    }
    let StreamExpert { hidden, inner, glu, bias, .. } = *expert;
    if crate::kinds::glu(glu).is_none() {
        return Err(crate::emit::EmitError::Join(glu).to_string());
    }
    Ok(Shape { hidden, inner, glu, bias })
}

impl Streams for Ndp {
    fn costs(
        &self,
        _device: &Device,
        unit: &Unit,
        expert: &StreamExpert,
        rows: &[u32],
    ) -> Result<StreamCosts, String> {
        let (modules, dimms, timing) =
            modules(unit).map_err(|flaw| format!("`{}`: {}", flaw.key, flaw.message))?;
        let shape = shape(expert)?;
        let image = shape.image().map_err(|e| e.to_string())?;
        let slots = rows.iter().copied().max().unwrap_or(1);
        let mut all = allot::Allotter::new(modules, shape, slots).map_err(|e| e.to_string())?;
        let (first, home) = (allot::Expert { layer: 0, number: 0 }, allot::Home::Dimm(0));
        let place = all.allot(first, home).map_err(|e| e.to_string())?.rows.clone();
        let stream =
            emit(&shape, &modules, 0, place, all.boxes(), Output::Slots).map_err(|e| e.to_string())?;
        let program = machine::Program::new(stream).map_err(|e| e.to_string())?;
        let curve = machine::times(&program, &Bus::new(&modules, timing, Options::default()), rows);
        let bytes = (image.lines * u64::from(LINE)) as f64;
        let channel = machine::channel(&modules, timing, Options::default());
        // Every channel brings its share of what lies over all of them.
        let striped = image.lines.div_ceil(u64::from(modules.system.channels.max(1)));
        let us = |way: Way, lines: u64| timing.microseconds(channel.stream_cycles(way, lines));
        Ok(StreamCosts {
            modules: dimms.count,
            rows: curve,
            internal_us: us(Way::Ndp, image.lines),
            link_us: dimms.link_gb_per_s.as_ref().map(|f| bytes / (f.value * 1e3)),
            host_us: [
                us(Way::Host(Placement::Striped), striped),
                us(Way::Host(Placement::Localized), image.lines),
            ],
        })
    }

    fn reads(&self, layout: Layout) -> bool {
        image::is_read(layout)
    }

    fn emit(
        &self,
        unit: &Unit,
        layers: &[StreamLayer<'_>],
        root: &Path,
        next: &dyn Fn(&str) -> Result<()>,
    ) -> Result<u64> {
        let (modules, ..) =
            modules(unit).map_err(|flaw| Error::input(format!("`{}`: {}", flaw.key, flaw.message)))?;
        let limit = |e: &dyn std::fmt::Display| {
            Error::limit(format!("`{}` has no room for the experts of this model", unit.name))
                .because(e.to_string())
        };
        let slots = layers.iter().map(|l| l.slots).max().unwrap_or(1);
        let mut allotter: Option<(Shape, allot::Allotter)> = None;
        let mut written = 0;
        for (number, layer) in (0..).zip(layers) {
            next(&format!("layer {}", layer.set.layer))?;
            let shape = shape(&layer.expert).map_err(|why| limit(&why))?;
            let fresh = allotter.as_ref().is_none_or(|(of, _)| *of != shape);
            if fresh && allotter.is_some() {
                return Err(limit(&"layers whose experts differ"));
            }
            if fresh {
                allotter = Some((shape, allot::Allotter::new(modules, shape, slots).map_err(|e| limit(&e))?));
            }
            let Some((_, all)) = allotter.as_mut() else { continue };
            let mut entries = Vec::new();
            for (expert, &module) in (0..).zip(layer.modules) {
                let home = u32::try_from(module).map_or(allot::Home::Striped, allot::Home::Dimm);
                let at = allot::Expert { layer: number, number: expert };
                let rows = all.allot(at, home).map_err(|e| limit(&e))?.rows.clone();
                // Who lies over all modules has the stream that it runs once it is brought into one.
                let dimm = u32::try_from(module).unwrap_or(0);
                let local = local_rows(&shape, &modules, all.boxes(), home, &rows);
                let mut stream =
                    emit(&shape, &modules, dimm, local, all.boxes(), Output::Slots).map_err(|e| limit(&e))?;
                let striped = if home == allot::Home::Striped { STRIPED } else { "" };
                stream.name = format!("layers.{}.experts.{expert}{striped}", layer.set.layer);
                moec_ndp_isa::verify(&stream)
                    .map_err(|e| Error::bug(format!("a stream of layer {}", layer.set.layer)).because(e))?;
                entries.push(Placed { expert, stream });
            }
            let artifact = Artifact { layer: number, experts: entries };
            let bytes = artifact::encode(&artifact)
                .map_err(|e| Error::bug(format!("streams of layer {}", layer.set.layer)).because(e))?;
            let path = root.join(&layer.set.artifact);
            fs::write(&path, &bytes)
                .map_err(|e| Error::environment(format!("cannot write `{}`", path.display())).because(e))?;
            written += bytes.len() as u64;
        }
        Ok(written)
    }

    fn read(&self, bundle: &BundleReader, plan: &Plan, unit: u32) -> Result<usize> {
        let mut count = 0;
        for set in plan.streams.iter().filter(|s| s.unit == unit) {
            count += check::read(bundle, set)?.experts.len();
        }
        Ok(count)
    }

    fn print(&self, bytes: &[u8]) -> Result<String, String> {
        let artifact = artifact::decode(bytes).map_err(|e| e.to_string())?;
        let text = |Placed { stream, .. }: &Placed| {
            let note = if stream.name.ends_with(STRIPED) { NOTE } else { "" };
            format!("{note}{stream}")
        };
        let streams: Vec<String> = artifact.experts.iter().map(text).collect();
        Ok(streams.join("\n"))
    }

    fn simulate(&self, unit: &Unit, scene: &StreamScene<'_>) -> Result<StreamRun, String> {
        simulate::simulate(unit, scene)
    }

    fn verify(&self, trial: &mut StreamTrial<'_, '_>) -> Result<Vec<FunctionReport>> {
        check::verify(trial)
    }
}

/// Comment before such a stream.
const NOTE: &str = "; the expert begins striped over all DIMMs: `dimm` and the rows of `expert` are set when it is moved to one\n";

/// The row sets of a stream: those of its expert, or, where that lies over all modules, the first after the boxes: it gets
/// others when it comes into a module.
fn local_rows(
    shape: &Shape,
    modules: &Modules,
    boxes: &allot::Boxes,
    home: allot::Home,
    rows: &Range<u32>,
) -> Range<u32> {
    if let allot::Home::Dimm(_) = home {
        return rows.clone();
    }
    let (lines, set) = (shape.image().map_or(1, |i| i.lines), modules.geometry.set_lines().unwrap_or(1));
    let first = boxes.outbox.end;
    first..first + u32::try_from(lines.div_ceil(set)).unwrap_or(u32::MAX - first)
}
