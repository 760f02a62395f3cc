//! Writes the artifacts of a build, one group of experts after the other.

use super::rows::{HEADROOM, deviations, drawn};
use super::weights::{Part, WeightFile};
use super::{ROWS, function, path, sizes};
use crate::emit::{Cluster, Ffn, Group};
use crate::exec::Executor;
use crate::net::Network;
use crate::onnx;
use crate::quant::{Ranges, coded};
use crate::ranges::Watch;
use moec_family::error::{Error, Result, io_error};
use moec_family::{Emit, LayerExperts};
use moec_ir::Weight;
use moec_ir::plan::ExpertTable;
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Runs that ranges are taken from, and as many that measure margins.
const RUNS: u64 = 2;

/// Writes what lives on the unit. Gives the bytes of the weights.
///
/// # Errors
/// A group over the limit; a weight that no code holds; a disk that is full.
pub(super) fn artifacts(emit: &Emit<'_>) -> Result<u64> {
    if let Some(part) = emit.parts.first() {
        return Err(Error::bug(format!("`{}` was given to a unit that takes experts alone", part.name)));
    }
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
    let mut file = WeightFile::create(folder)?;
    let made = members.experts.iter().map(|&e| expert(emit, &experts, e, &mut file));
    let made = Group { experts: made.collect::<Result<_>>()? };
    let bytes = file.finish()?;
    if let Some(limit) = emit.unit.graph_limit().filter(|limit| bytes > *limit) {
        return Err(Error::limit(format!("`{name}` has {bytes} bytes of weights; a graph holds {limit}"))
            .hint("give a smaller `max_group` under `[placement]`"));
    }
    let deviations = deviations(emit.module, table.layer, experts.gate_up, emit.numbers)?;
    let sizes = sizes(table, group);
    let mut ranges = None;
    for &capacity in &sizes {
        let function = function(capacity);
        let plain = made.graph(&function, capacity as usize).map_err(|e| cannot(&e))?;
        // Tensors of all sizes have the same names: how wide they are is measured once.
        let ranges = match &ranges {
            Some(known) => known,
            None => ranges.insert(measured(&plain, folder, &deviations).map_err(|e| cannot(&e))?),
        };
        let codes = coded(&plain, ranges).map_err(|e| cannot(&e))?;
        let bytes = onnx::write(&codes).map_err(|e| cannot(&e))?;
        let path = folder.join(format!("{function}.onnx"));
        fs::write(&path, bytes).map_err(|e| io_error("write", &path, &e))?;
    }
    let rows = sizes.first().map_or(0, |c| *c as usize * members.experts.len());
    let rows: Vec<u8> = drawn(&deviations, rows, 0).iter().flat_map(|x| x.to_le_bytes()).collect();
    let path = folder.join(ROWS);
    fs::write(&path, rows).map_err(|e| io_error("write", &path, &e))?;
    Ok(bytes)
}

/// One expert, its codes written.
fn expert(emit: &Emit<'_>, experts: &LayerExperts, e: u32, file: &mut WeightFile) -> Result<Ffn> {
    let module = emit.module;
    let [gate_up, down] = [experts.gate_up, experts.down].map(|id| module.weight(id));
    let (inner, hidden, lead) = (down.cols(), down.rows(), e as usize);
    let name = |what: &str| format!("expert{e}.{what}");
    let read = |weight: &Weight, rows| Part { weight, lead, rows }.read(emit.numbers);
    let bias = |i: usize| -> Result<Option<Vec<f32>>> {
        let Some(ids) = experts.biases else { return Ok(None) };
        // A bias has one axis behind that of the experts: its entries are rows of one matrix.
        let weight = module.weight(ids[i]);
        Part { weight, lead: 0, rows: lead..lead + 1 }.read(emit.numbers).map(Some)
    };
    let both = bias(0)?;
    let half = |first: usize| both.as_ref().and_then(|b| b.get(first..first + inner)).map(<[f32]>::to_vec);
    let gate = read(gate_up, 0..inner)?;
    let gate = file.projection(&name("wg"), gate_up, &gate, hidden, half(0))?;
    let up = read(gate_up, inner..2 * inner)?;
    let up = file.projection(&name("wu"), gate_up, &up, hidden, half(inner))?;
    let mut columns = read(down, 0..hidden)?;
    // Columns stand as the gate gives its results.
    let mut row = vec![0.0; inner];
    for numbers in columns.chunks_exact_mut(inner.max(1)) {
        row.copy_from_slice(numbers);
        numbers.iter_mut().enumerate().for_each(|(at, x)| *x = row[gate.channel(at)]);
    }
    let down = file.projection(&name("wd"), down, &columns, inner, bias(1)?)?;
    let cluster = Cluster { name: format!("expert{e}"), gate, up, down };
    Ok(Ffn { hidden, glu: experts.glu, clusters: vec![cluster] })
}

/// Ranges of a network in f32 on drawn rows.
fn measured(network: &Network, folder: &Path, deviations: &[f32]) -> Result<Ranges, crate::exec::ExecError> {
    let executor = Executor::new(Arc::new(network.clone()), Some(folder))?;
    let rows = network.inputs.first().map_or(0, |id| network.tensor(*id).shape[0]);
    let mut watch = Watch::default();
    for seed in 0..2 * RUNS {
        watch.run(&executor, &[&drawn(deviations, rows, seed)], seed >= RUNS)?;
    }
    Ok(watch.ranges().into_iter().map(|(name, range)| (name, range.widened(HEADROOM))).collect())
}
