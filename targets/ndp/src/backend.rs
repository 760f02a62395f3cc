//! The backend's interface to the compiler.
//!
//! The streams of a layer's experts are in one file ([`crate::artifact`]), which also has each expert's
//! initial location. Experts are read in the packing of the CPU's kernels, so no weight is stored twice.
#![expect(clippy::cast_possible_truncation, reason = "sizes of one layer, and rows of a memory system")]

mod check;
mod simulate;

use crate::NAME;
use crate::allocation;
use crate::allocation::DimmConfig;
use crate::artifact::{self, Artifact, Placed, STRIPED};
use crate::emit::{Output, emit};
use crate::image::{self, Shape};
use crate::machine::{self, Bus};
use crate::sim;
use crate::unit::DimmUnit;
use moec_backend::error::{Error, Result};
use moec_backend::{
    Backend, CommandStreams, Flaw, FunctionReport, StreamCosts, StreamExpert, StreamLayer, StreamRun,
    StreamTrial, StreamWorkload, Subcommand,
};
use moec_device::{Device, DeviceUnit, Dimms};
use moec_dram::{Options, Path as Way, Placement, Timing};
use moec_ir::plan::{Layout, Plan};
use moec_ir::{Format, Op};
use moec_ndp_isa::{Geometry, LINE, System};
use moec_runtime::bundle::BundleReader;
use moec_runtime::exec::accelerators::Executor;
use std::fs;
use std::ops::Range;
use std::path::Path;

/// Subchannels of a module of DDR5 (JESD79-5).
const SUBCHANNELS: u32 = 2;
/// 10⁹ operations per second of the unit that is modelled (TriMoE, Table 1).
const GOPS: f64 = 256.0;

/// The backend of NDP DIMMs.
#[derive(Clone, Copy, Debug)]
pub struct Ndp;

/// The DIMMs that a device file describes.
///
/// # Errors
/// The key that is wrong or missing, and the expected value.
pub fn dimm_config(unit: &DeviceUnit) -> Result<(DimmConfig, &Dimms, Timing), Flaw> {
    let missing = || Flaw::new("unit.dimms", "a unit of the backend `ndp` needs `dimms`");
    let dimms = unit.dimms.as_ref().ok_or_else(missing)?;
    let timing = Timing::named(&dimms.timing).ok_or_else(|| {
        let known: Vec<_> = moec_dram::TIMINGS.iter().map(|(name, _)| format!("`{name}`")).collect();
        Flaw::new(
            "unit.dimms.timing",
            format!("`{}` is not supported; supported are {}", dimms.timing, known.join(", ")),
        )
    })?;
    if dimms.gops.value != GOPS {
        return Err(Flaw::new("unit.dimms.gops", format!("the modelled unit has {GOPS}")));
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
        let message = format!("{} bytes are not a row of every bank, which has {set}", dimms.capacity.value);
        return Err(Flaw::new("unit.dimms.capacity", message));
    }
    let system = System { channels: dimms.channels, dimms: dimms.count / dimms.channels.max(1) };
    Ok((DimmConfig { system, geometry }, dimms, timing))
}

impl Backend for Ndp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn is_modelled(&self) -> bool {
        true
    }

    fn check(&self, device: &Device, unit: &DeviceUnit) -> Result<(), Flaw> {
        if unit.kind != moec_device::UnitKind::Ndp {
            return Err(Flaw::new("unit.backend", "a unit of the backend `ndp` is of kind `ndp`"));
        }
        if device.memory_of(unit).is_none() {
            return Err(Flaw::new(
                "unit.memory",
                "a unit of the backend `ndp` works in the memory of its DIMMs",
            ));
        }
        let (_, dimms, _) = dimm_config(unit)?;
        if dimms.count > 1 && dimms.link_gb_per_s.is_none() {
            let message = format!("{} DIMMs need links to exchange experts", dimms.count);
            return Err(Flaw::new("unit.dimms.link_gb_per_s", message));
        }
        Ok(())
    }

    fn takes(&self, op: &Op) -> bool {
        matches!(op, Op::ExpertFfn { fixed: false, glu, .. } if crate::kinds::glu(*glu).is_some())
    }

    fn command_streams(&self) -> Option<&dyn CommandStreams> {
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
            "its weights are {format}, but NDP DIMMs multiply bf16: set `experts = \"bf16\"` under `[weights]`"
        ));
    }
    let StreamExpert { hidden, inner, glu, bias, .. } = *expert;
    if crate::kinds::glu(glu).is_none() {
        return Err(crate::emit::EmitError::Join(glu).to_string());
    }
    Ok(Shape { hidden, inner, glu, bias })
}

impl CommandStreams for Ndp {
    fn costs(
        &self,
        _device: &Device,
        unit: &DeviceUnit,
        expert: &StreamExpert,
        rows: &[u32],
    ) -> Result<StreamCosts, String> {
        let (dimm_config, dimms, timing) =
            dimm_config(unit).map_err(|flaw| format!("`{}`: {}", flaw.key, flaw.message))?;
        let shape = shape(expert)?;
        let image = shape.image().map_err(|e| e.to_string())?;
        let slots = rows.iter().copied().max().unwrap_or(1);
        let mut all = allocation::RowAllocator::new(dimm_config, shape, slots).map_err(|e| e.to_string())?;
        let (first, layout) =
            (allocation::Expert { layer: 0, number: 0 }, allocation::DramLayout::Localized(0));
        let place = all.allocate(first, layout).map_err(|e| e.to_string())?.rows.clone();
        let stream =
            emit(&shape, &dimm_config, 0, place, all.boxes(), Output::Slots).map_err(|e| e.to_string())?;
        let program = machine::Program::new(stream).map_err(|e| e.to_string())?;
        let curve = machine::times(&program, &Bus::new(&dimm_config, timing, Options::default()), rows);
        let bytes = (image.lines * u64::from(LINE)) as f64;
        let channel = machine::channel(&dimm_config, timing, Options::default());
        // Every channel reads its share of striped experts.
        let striped = image.lines.div_ceil(u64::from(dimm_config.system.channels.max(1)));
        let us = |way: Way, lines: u64| timing.microseconds(channel.stream_cycles(way, lines));
        Ok(StreamCosts {
            dimms: dimms.count,
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
        unit: &DeviceUnit,
        layers: &[StreamLayer<'_>],
        root: &Path,
        next: &dyn Fn(&str) -> Result<()>,
    ) -> Result<u64> {
        let (dimm_config, ..) =
            dimm_config(unit).map_err(|flaw| Error::input(format!("`{}`: {}", flaw.key, flaw.message)))?;
        let limit = |e: &dyn std::fmt::Display| {
            Error::limit(format!("the experts of this model do not fit into `{}`", unit.name))
                .because(e.to_string())
        };
        let slots = layers.iter().map(|l| l.slots).max().unwrap_or(1);
        let mut allocator: Option<(Shape, allocation::RowAllocator)> = None;
        let mut written = 0;
        for (number, layer) in (0..).zip(layers) {
            next(&format!("layer {}", layer.set.layer))?;
            let shape = shape(&layer.expert).map_err(|why| limit(&why))?;
            let fresh = allocator.as_ref().is_none_or(|(of, _)| *of != shape);
            if fresh && allocator.is_some() {
                return Err(limit(&"layers whose experts differ"));
            }
            if fresh {
                allocator = Some((
                    shape,
                    allocation::RowAllocator::new(dimm_config, shape, slots).map_err(|e| limit(&e))?,
                ));
            }
            let Some((_, all)) = allocator.as_mut() else { continue };
            let mut entries = Vec::new();
            for (expert, &module) in (0..).zip(layer.dimms) {
                let layout = u32::try_from(module)
                    .map_or(allocation::DramLayout::Striped, allocation::DramLayout::Localized);
                let at = allocation::Expert { layer: number, number: expert };
                let rows = all.allocate(at, layout).map_err(|e| limit(&e))?.rows.clone();
                // A striped expert has the stream that it runs once it is moved to one DIMM.
                let dimm = u32::try_from(module).unwrap_or(0);
                let local = local_rows(&shape, &dimm_config, all.boxes(), layout, &rows);
                let mut stream = emit(&shape, &dimm_config, dimm, local, all.boxes(), Output::Slots)
                    .map_err(|e| limit(&e))?;
                let striped = if layout == allocation::DramLayout::Striped { STRIPED } else { "" };
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

    fn simulate(&self, unit: &DeviceUnit, scene: &StreamWorkload<'_>) -> Result<StreamRun, String> {
        simulate::simulate(unit, scene)
    }

    fn verify(&self, trial: &mut StreamTrial<'_, '_>) -> Result<Vec<FunctionReport>> {
        check::verify(trial)
    }
}

/// Comment before the stream of a striped expert.
const NOTE: &str = "; the expert begins striped over all DIMMs: `dimm` and the rows of `expert` are set when it is moved to one\n";

/// The row sets of a stream: those of its expert, or, for a striped expert, the first after the boxes: it
/// gets others when it moves to a DIMM.
fn local_rows(
    shape: &Shape,
    dimm_config: &DimmConfig,
    boxes: &allocation::Boxes,
    layout: allocation::DramLayout,
    rows: &Range<u32>,
) -> Range<u32> {
    if let allocation::DramLayout::Localized(_) = layout {
        return rows.clone();
    }
    let (lines, set) = (shape.image().map_or(1, |i| i.lines), dimm_config.geometry.set_lines().unwrap_or(1));
    let first = boxes.outbox.end;
    first..first + u32::try_from(lines.div_ceil(set)).unwrap_or(u32::MAX - first)
}
