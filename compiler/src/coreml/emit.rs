//! Writes the packages of a build, some at a time: disk and memory for raw weights do not grow with the model.

use super::parts::{self, Part};
use super::weights::{Numbers, RawFile};
use super::{Experts, groups};
use crate::cache_dir;
use crate::error::{Error, Result, io_error};
use crate::interrupt;
use crate::passes::units::Units;
use crate::pipeline::Compilation;
use crate::progress::{Bar, Progress};
use moec_coreml::emit::{ExpertGroup, Networks};
use moec_coreml::helper::{Helper, HelperError, Package};
use moec_coreml::program::Program;
use moec_ir::plan::ExpertTable;
use moec_ir::{Weight, WeightId};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Most raw bytes that wait for the helper, unless one graph alone has more: it takes seconds to start.
const BATCH: u64 = 1 << 30;

/// What becomes packages.
enum Item<'a> {
    Group(&'a ExpertTable, usize),
    Part(&'a Part),
}

/// Writes the packages of everything that lives on the Neural Engine below `root`. Gives the bytes of their weights.
///
/// # Errors
/// No helper, which says what installs it; a graph over the limit; a weight that is no f16; a disk that is full.
pub fn packages(c: &Compilation<'_>, root: &Path, progress: &Progress) -> Result<u64> {
    let (Some(units), Some(placement)) = (&c.units, &c.placement) else { return Ok(0) };
    let parts = parts::placed(&c.module, placement, units.npu);
    parts.iter().try_for_each(|part| part.check_forms(&c.module, placement, units.npu))?;
    let of_experts = groups(placement, &units.npu.name).map(|(table, group)| Item::Group(table, group));
    let items: Vec<Item<'_>> = of_experts.chain(parts.iter().map(Item::Part)).collect();
    if items.is_empty() {
        return Ok(0);
    }
    let helper = Helper::find(&cache_dir::path()?).map_err(|e| failed(&e))?;
    let bar = progress.items("Emitting", items.len() as u64, "graphs");
    let mut batch = Batch { helper: &helper, root, raw: root.join("raw"), programs: Vec::new(), bytes: 0 };
    let mut written = 0;
    for item in &items {
        interrupt::check()?;
        batch.add(c, units, item, &bar)?;
        if batch.bytes >= BATCH {
            written += batch.write()?;
        }
        bar.add(1);
    }
    written += batch.write()?;
    bar.finish();
    Ok(written)
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
    fn add(&mut self, c: &Compilation<'_>, units: &Units<'_>, item: &Item<'_>, bar: &Bar) -> Result<()> {
        if self.programs.is_empty() {
            fs::create_dir(&self.raw).map_err(|e| io_error("create", &self.raw, &e))?;
        }
        let bytes = match item {
            Item::Group(table, group) => {
                bar.label(&table.group_name(*group));
                let (program, bytes) = self::group(c, units, table, *group, &self.raw)?;
                self.programs.push(program);
                bytes
            }
            Item::Part(part) => {
                bar.label(&part.name);
                let mut file = RawFile::create(&self.raw, &format!("{}.f16", part.name), "attention")?;
                let numbers = Numbers { source: c.checkpoint, importance: c.importance };
                let mut raw = |ids: &[WeightId]| {
                    let weights: Vec<_> = ids.iter().map(|id| c.module.weight(*id)).collect();
                    file.joined(&weights, units.npu, numbers)
                };
                self.programs.extend(part.programs(&c.module, units.npu, &mut raw)?);
                file.finish()?
            }
        };
        self.bytes = self.bytes.saturating_add(bytes);
        Ok(())
    }

    /// Hands all to the helper; gives the bytes of weights that it wrote.
    fn write(&mut self) -> Result<u64> {
        if self.programs.is_empty() {
            return Ok(0);
        }
        interrupt::check()?;
        let outs: Vec<_> = self.programs.iter().map(|p| self.root.join(parts::path(&p.name))).collect();
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
fn group(
    c: &Compilation<'_>,
    units: &Units<'_>,
    table: &ExpertTable,
    group: usize,
    raw: &Path,
) -> Result<(Program, u64)> {
    let name = table.group_name(group);
    let found = Experts::of(&c.module, table.layer).zip(table.groups.get(group));
    let (experts, members) = found.ok_or_else(|| Error::bug(format!("`{name}` has no experts")))?;
    let capacities = super::sizes(table, group).into_iter().map(|n| n as usize).collect();
    let mut file = RawFile::create(raw, &format!("{name}.f16"), "experts")?;
    let [gate_up, down] = [experts.gate_up, experts.down].map(|id| c.module.weight(id));
    let numbers = Numbers { source: c.checkpoint, importance: c.importance };
    let inner = down.cols();
    let mut stacked = |weight: &Weight, rows: Range<usize>| {
        file.stacked(weight, &members.experts, rows, units.npu, numbers)
    };
    // Gate, then up.
    let weights = Networks {
        gate: stacked(gate_up, 0..inner)?,
        up: stacked(gate_up, inner..2 * inner)?,
        down: stacked(down, 0..down.rows())?,
        gate_up_bias: match experts.biases {
            Some([both, _]) => {
                let both = c.module.weight(both);
                Some([stacked(both, 0..inner)?, stacked(both, inner..2 * inner)?])
            }
            None => None,
        },
        down_bias: match experts.biases {
            Some([_, bias]) => Some(stacked(c.module.weight(bias), 0..down.rows())?),
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
    let program = group.emit(&parts::limits(units.npu));
    Ok((program.map_err(|e| Error::limit(format!("`{name}` cannot be a graph")).because(e))?, bytes))
}
