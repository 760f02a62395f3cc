//! Writes the artifacts of a build, one group of experts after the other.

use super::rows::{HEADROOM, RUN_ROWS, Sample, cycled, deviations};
use super::weights::{MatrixSlice, WeightFile, rounded};
use super::{ROWS, function, path, sizes};
use crate::emit::{Cluster, Ffn, Group};
use crate::exec::Executor;
use crate::net::Network;
use crate::onnx;
use crate::quant::{Ranges, coded};
use crate::ranges::RangeObserver;
use moec_backend::error::{Error, Result, io_error};
use moec_backend::{Channels, Emit, LayerExperts};
use moec_device::DeviceUnit;
use moec_ir::plan::ExpertTable;
use moec_ir::{Glu, Module, Operand};
use moec_runtime::bundle::BundleReader;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Writes groups of experts. Gives the bytes of the weights.
///
/// # Errors
/// A group over the limit; a weight that no code holds; a disk that is full.
pub(super) fn artifacts(emit: &Emit<'_>) -> Result<u64> {
    let mut written = 0;
    for &(table, group) in emit.groups {
        (emit.next)(&table.group_name(group))?;
        let folder = emit.root.join(path(table, group));
        fs::create_dir_all(&folder).map_err(|e| io_error("create", &folder, &e))?;
        written += artifact(emit, table, group, &folder)?;
    }
    Ok(written)
}

fn artifact(emit: &Emit<'_>, table: &ExpertTable, group: usize, folder: &Path) -> Result<u64> {
    let name = table.group_name(group);
    let found = LayerExperts::of(emit.module, table.layer).zip(table.groups.get(group));
    let (experts, members) = found.ok_or_else(|| Error::bug(format!("`{name}` has no experts")))?;
    let cannot = |e: &dyn std::fmt::Display| {
        let error = Error::limit(format!("`{name}` cannot be a network")).because(e);
        error.hint("set `experts = \"cpu\"` under `[placement]`")
    };
    if !experts.glu.is_gated() {
        return Err(cannot(&"its experts have no gate"));
    }
    let mut file = WeightFile::create(folder)?;
    let made = members.experts.iter().map(|&e| expert(emit, &experts, e, &mut file));
    let made = Group { experts: made.collect::<Result<_>>()? };
    let bytes = file.finish()?;
    limited(emit.unit, &name, bytes, SMALLER)?;
    let drawn =
        || deviations(emit.module, read_by_experts(emit.module, table.layer)?, experts.gate_up, emit.numbers);
    let sample = Sample::new(emit.numbers, emit.module, experts.gate_up, drawn)?;
    // Tensors of all sizes have the same names: how wide they are is measured once.
    let plain = made.graph("ranges", RUN_ROWS).map_err(|e| cannot(&e))?;
    let ranges = measured(plain, folder, &sample).map_err(|e| cannot(&e))?;
    let sizes = sizes(table, group);
    for &capacity in &sizes {
        let function = function(capacity);
        let plain = made.graph(&function, capacity as usize).map_err(|e| cannot(&e))?;
        let codes = coded(&plain, &ranges).map_err(|e| cannot(&e))?;
        let bytes = onnx::write(&codes).map_err(|e| cannot(&e))?;
        let path = folder.join(format!("{function}.onnx"));
        fs::write(&path, bytes).map_err(|e| io_error("write", &path, &e))?;
    }
    let rows = sizes.first().map_or(0, |c| *c as usize * members.experts.len());
    shown(folder, &sample, rows)?;
    Ok(bytes)
}

/// Writes at most `rows` rows of a sample, which verification runs networks on.
pub(super) fn shown(folder: &Path, sample: &Sample, rows: usize) -> Result<()> {
    let rows: Vec<u8> = sample.verification_rows(rows).iter().flat_map(|x| x.to_le_bytes()).collect();
    let path = folder.join(ROWS);
    fs::write(&path, rows).map_err(|e| io_error("write", &path, &e))
}

/// Remedy where an artifact is too large.
pub(super) const SMALLER: &str = "give a smaller `max_group` under `[placement]`";

/// Refuses an artifact of more weights than a graph of the unit holds; `hint` gives the remedy.
pub(super) fn limited(unit: &DeviceUnit, name: &str, bytes: u64, hint: &str) -> Result<()> {
    match unit.graph_limit().filter(|limit| bytes > *limit) {
        Some(limit) => {
            let error = Error::limit(format!("`{name}` has {bytes} bytes of weights; a graph holds {limit}"));
            Err(error.hint(hint))
        }
        None => Ok(()),
    }
}

/// Operand that the experts of a layer read.
pub(super) fn read_by_experts(module: &Module, layer: u32) -> Result<Operand> {
    let nodes = module.entries.iter().flat_map(|graph| &graph.nodes);
    let experts = |n: &&moec_ir::Node| n.op.expert_ffn().is_some() || n.op.pages_neurons();
    let mut own = nodes.filter(|n| n.scope.layer == Some(layer)).filter(experts);
    let x = own.next().and_then(|n| n.inputs.first().copied());
    x.ok_or_else(|| Error::bug(format!("layer {layer} has no experts")))
}

/// Network of one expert, whose codes are written to the file.
fn expert(emit: &Emit<'_>, experts: &LayerExperts, e: u32, file: &mut WeightFile) -> Result<Ffn> {
    let module = emit.module;
    let [gate_up, down] = [experts.gate_up, experts.down].map(|id| module.weight(id));
    let (inner, matrix) = (down.cols(), e as usize);
    let bias = |i: usize| -> Result<Option<Vec<f32>>> {
        let Some(ids) = experts.biases else { return Ok(None) };
        // A bias has one axis after that of the experts: its entries are rows of one matrix.
        let weight = module.weight(ids[i]);
        MatrixSlice { weight, matrix: 0, rows: matrix..matrix + 1 }.read(emit.numbers).map(Some)
    };
    let both = rounded(emit.numbers, gate_up, matrix)?;
    let gated = Gated {
        name: format!("expert{e}"),
        hidden: down.rows(),
        glu: experts.glu,
        gate: (&both, 0..inner),
        up: (&both, inner..2 * inner),
        down: &rounded(emit.numbers, down, matrix)?,
        gate_up_bias: bias(0)?,
        down_bias: bias(1)?,
    };
    gated.written(file)
}

/// A gated network whose matrices are rounded.
pub(super) struct Gated<'a> {
    pub(super) name: String,
    pub(super) hidden: usize,
    pub(super) glu: Glu,
    pub(super) gate: (&'a Channels, Range<usize>),
    pub(super) up: (&'a Channels, Range<usize>),
    pub(super) down: &'a Channels,
    /// `[2 I]`
    pub(super) gate_up_bias: Option<Vec<f32>>,
    /// `[H]`
    pub(super) down_bias: Option<Vec<f32>>,
}

impl Gated<'_> {
    /// The network, its codes written.
    pub(super) fn written(self, file: &mut WeightFile) -> Result<Ffn> {
        let Self { name, hidden, glu, .. } = self;
        let inner = self.gate.1.len();
        let at = |what: &str| format!("{name}.{what}");
        let half = |first: usize| {
            self.gate_up_bias.as_ref().and_then(|b| b.get(first..first + inner)).map(<[f32]>::to_vec)
        };
        let gate = file.projection(&at("wg"), self.gate, hidden, half(0))?;
        let up = file.projection(&at("wu"), self.up, hidden, half(inner))?;
        let down = file.projection(&at("wd"), (self.down, 0..hidden), inner, self.down_bias)?;
        let cluster = Cluster { name, gate, up, down };
        Ok(Ffn { hidden, glu, clusters: vec![cluster] })
    }
}

/// Ranges of a network in f32 whose input is [`RUN_ROWS`] rows, or as many for each of its experts, all the
/// same.
pub(super) fn measured(
    network: Network,
    folder: &Path,
    sample: &Sample,
) -> Result<Ranges, crate::exec::ExecError> {
    let count = network.inputs.first().map_or(0, |id| network.tensor(*id).shape.iter().product());
    let executor = Executor::new(Arc::new(network), Some(&BundleReader::unchecked(folder)))?;
    let mut watch = RangeObserver::default();
    for (rows, held) in sample.runs() {
        watch.run(&executor, &[&cycled(&rows, count)], held)?;
    }
    Ok(watch.ranges(HEADROOM))
}
