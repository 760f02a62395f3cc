//! Writes the packages of a build, layer by layer: disk and memory for raw weights do not grow with the model.

use super::weights::RawFile;
use super::{Experts, groups, path};
use crate::bundle::partial::io_error;
use crate::bundle::runner::cache_dir;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::passes::units::Units;
use crate::pipeline::Compilation;
use crate::progress::Progress;
use moec_coreml::emit::{Expert, ExpertGroup, Layout, Limits};
use moec_coreml::helper::{Helper, HelperError, Package};
use moec_coreml::program::{Program, Rules};
use moec_ir::plan::ExpertTable;
use std::fs;
use std::path::Path;

/// Writes the packages of all groups that live on the Neural Engine below `root`. Gives the bytes of their weights.
///
/// # Errors
/// No helper, which says what installs it; a graph over the limit; a weight that is no f16; a disk that is full.
pub fn packages(c: &Compilation<'_>, root: &Path, progress: &Progress) -> Result<u64> {
    let (Some(units), Some(placement)) = (&c.units, &c.placement) else { return Ok(0) };
    let wanted: Vec<_> = groups(placement, &units.npu.name).collect();
    if wanted.is_empty() {
        return Ok(0);
    }
    let helper = Helper::find(&cache_dir()?).map_err(|e| failed(&e))?;
    let bar = progress.items("Emitting", wanted.len() as u64);
    let raw = root.join("raw");
    let mut bytes = 0;
    for table in &placement.experts {
        let of_layer: Vec<usize> =
            wanted.iter().filter(|(t, _)| t.layer == table.layer).map(|&(_, g)| g).collect();
        if of_layer.is_empty() {
            continue;
        }
        interrupt::check()?;
        bar.label(&format!("layers.{}", table.layer));
        fs::create_dir(&raw).map_err(|e| io_error("create", &raw, &e))?;
        let programs =
            of_layer.iter().map(|&g| program(c, units, table, g, &raw)).collect::<Result<Vec<_>>>()?;
        let outs: Vec<_> = of_layer.iter().map(|&g| root.join(path(table, g))).collect();
        let jobs = programs.iter().zip(&outs);
        let jobs: Vec<_> = jobs.map(|(program, out)| Package { program, weights: &raw, out }).collect();
        let emitted = helper.emit(&jobs, &mut |_| bar.add(1)).map_err(|e| failed(&e))?;
        bytes += emitted.iter().map(|e| e.weight_bytes).sum::<u64>();
        fs::remove_dir_all(&raw).map_err(|e| io_error("remove", &raw, &e))?;
    }
    bar.finish();
    Ok(bytes)
}

fn failed(e: &HelperError) -> Error {
    Error::environment(e.to_string()).hint(e.hint())
}

/// The program of a group, its weights written to a raw file.
fn program(
    c: &Compilation<'_>,
    units: &Units<'_>,
    table: &ExpertTable,
    group: usize,
    raw: &Path,
) -> Result<Program> {
    let name = table.group_name(group);
    let found = Experts::of(&c.module, table.layer).zip(table.groups.get(group));
    let (experts, members) = found.ok_or_else(|| Error::bug(format!("`{name}` has no experts")))?;
    let capacity = table.tiers.get(members.tier as usize).copied().unwrap_or(0) as usize;
    let mut file = RawFile::create(raw, &format!("{name}.f16"))?;
    let [gate_up, down] = [experts.gate_up, experts.down].map(|id| c.module.weight(id));
    let mut list = Vec::new();
    for &e in &members.experts {
        let lead = e as usize;
        let mut bias = |which: usize| {
            let id = experts.biases.map(|b| b[which]);
            id.map(|id| file.append(c.module.weight(id), lead, c.checkpoint)).transpose()
        };
        let (gate_up_bias, down_bias) = (bias(0)?, bias(1)?);
        list.push(Expert {
            name: format!("expert{e}"),
            gate_up: file.append(gate_up, lead, c.checkpoint)?,
            down: file.append(down, lead, c.checkpoint)?,
            gate_up_bias,
            down_bias,
        });
    }
    file.finish()?;
    let group = ExpertGroup {
        name: name.clone(),
        hidden: gate_up.cols(),
        intermediate: down.cols(),
        glu: experts.glu,
        experts: list,
        capacities: vec![capacity],
        layout: Layout::Rows,
    };
    let limits = Limits { rules: Rules::ANE, graph_bytes: units.npu.graph_limit().unwrap_or(u64::MAX) };
    group.emit(&limits).map_err(|e| Error::limit(format!("`{name}` cannot be a graph")).because(e))
}
