//! Writes the packages of a build, some at a time: disk and memory for raw weights do not grow with the
//! model.

use super::sizes;
use super::weights::RawFile;
use crate::emit::{ExpertGroup, Networks};
use crate::helper::{Helper, HelperError, Package};
use crate::program::Program;
use crate::subgraphs::{self, CoreMlSubgraph};
use moec_backend::Emit;
use moec_backend::LayerExperts;
use moec_backend::error::{Error, Result, io_error};
use moec_ir::plan::ExpertTable;
use moec_ir::{Weight, WeightId};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Most raw bytes that wait for the helper, unless one graph alone has more: it takes seconds to start.
const BATCH: u64 = 1 << 30;

/// Writes the packages of everything on the unit. Gives the bytes of their weights.
///
/// # Errors
/// A missing helper, with its remedy; a graph over the limit; a weight outside f16; a full disk.
pub(super) fn packages(emit: &Emit<'_>) -> Result<u64> {
    if emit.groups.is_empty() && emit.parts.is_empty() {
        return Ok(0);
    }
    let helper = Helper::find(emit.tools.cache).map_err(|e| failed(&e))?;
    let raw = emit.root.join("raw");
    let mut batch = Batch { helper: &helper, root: emit.root, raw, programs: Vec::new(), bytes: 0 };
    let mut written = 0;
    for &(table, group) in emit.groups {
        (emit.next)(&table.group_name(group))?;
        let (program, bytes) = self::group(emit, table, group, batch.folder()?)?;
        written += batch.add(vec![program], bytes)?;
    }
    for part in emit.parts {
        (emit.next)(&part.name)?;
        let found = CoreMlSubgraph::find(emit.module, &part.scope)
            .map_err(|why| Error::bug(format!("`{}` is not a graph: {why}", part.name)))?;
        let mut file = RawFile::create(batch.folder()?, &format!("{}.f16", part.name), "attention")?;
        let mut raw = |ids: &[WeightId]| {
            let weights: Vec<_> = ids.iter().map(|id| emit.module.weight(*id)).collect();
            file.joined(&weights, emit.unit, emit.numbers)
        };
        let programs = found.programs(emit.module, emit.unit, &mut raw)?;
        written += batch.add(programs, file.finish()?)?;
    }
    Ok(written + batch.write()?)
}

fn failed(e: &HelperError) -> Error {
    Error::environment(e.to_string()).hint(e.hint())
}

/// Programs whose raw weights are written, and that wait for the helper.
struct Batch<'a> {
    helper: &'a Helper,
    root: &'a Path,
    raw: PathBuf,
    programs: Vec<Program>,
    bytes: u64,
}

impl Batch<'_> {
    /// The folder of raw weights, which is there.
    fn folder(&self) -> Result<&Path> {
        fs::create_dir_all(&self.raw).map_err(|e| io_error("create", &self.raw, &e))?;
        Ok(&self.raw)
    }

    /// Adds programs with this many raw bytes. Returns the bytes of weights that the helper wrote for the
    /// waiting programs.
    fn add(&mut self, programs: Vec<Program>, bytes: u64) -> Result<u64> {
        self.programs.extend(programs);
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes < BATCH { Ok(0) } else { self.write() }
    }

    /// Passes all waiting programs to the helper; returns the bytes of weights that it wrote.
    fn write(&mut self) -> Result<u64> {
        if self.programs.is_empty() {
            return Ok(0);
        }
        let outs: Vec<_> = self.programs.iter().map(|p| self.root.join(subgraphs::path(&p.name))).collect();
        let jobs = self.programs.iter().zip(&outs);
        let jobs: Vec<_> = jobs.map(|(program, out)| Package { program, weights: &self.raw, out }).collect();
        let emitted = self.helper.emit(&jobs, &mut |_| ()).map_err(|e| failed(&e))?;
        fs::remove_dir_all(&self.raw).map_err(|e| io_error("remove", &self.raw, &e))?;
        self.programs.clear();
        self.bytes = 0;
        Ok(emitted.iter().map(|e| e.weight_bytes).sum())
    }
}

/// The program of a group, its weights written to a raw file of that many bytes.
fn group(emit: &Emit<'_>, table: &ExpertTable, group: usize, raw: &Path) -> Result<(Program, u64)> {
    let name = table.group_name(group);
    let found = LayerExperts::of(emit.module, table.layer).zip(table.groups.get(group));
    let (experts, members) = found.ok_or_else(|| Error::bug(format!("`{name}` has no experts")))?;
    if !experts.glu.is_gated() {
        return Err(Error::limit(format!("`{name}` cannot be a graph"))
            .because(crate::emit::EmitError::NoGate)
            .hint("set `experts = \"cpu\"` under `[placement]`"));
    }
    let capacities = sizes(table, group).into_iter().map(|n| n as usize).collect();
    let mut file = RawFile::create(raw, &format!("{name}.f16"), "experts")?;
    let [gate_up, down] = [experts.gate_up, experts.down].map(|id| emit.module.weight(id));
    let inner = down.cols();
    let mut stacked = |weight: &Weight, rows: Range<usize>| {
        file.stacked(weight, &members.experts, rows, emit.unit, emit.numbers)
    };
    // Gate, then up.
    let weights = Networks {
        gate: stacked(gate_up, 0..inner)?,
        up: stacked(gate_up, inner..2 * inner)?,
        down: stacked(down, 0..down.rows())?,
        gate_up_bias: match experts.biases {
            Some([both, _]) => {
                let both = emit.module.weight(both);
                Some([stacked(both, 0..inner)?, stacked(both, inner..2 * inner)?])
            }
            None => None,
        },
        down_bias: match experts.biases {
            Some([_, bias]) => Some(stacked(emit.module.weight(bias), 0..down.rows())?),
            None => None,
        },
    };
    let bytes = file.finish()?;
    let group = ExpertGroup {
        name: name.clone(),
        hidden: gate_up.cols(),
        intermediate: inner,
        glu: experts.glu,
        experts: members.experts.iter().map(|e| format!("expert{e}")).collect(),
        weights,
        capacities,
    };
    let program = group.emit(&subgraphs::limits(emit.unit));
    Ok((program.map_err(|e| Error::limit(format!("`{name}` cannot be a graph")).because(e))?, bytes))
}
