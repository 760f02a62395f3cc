//! Checks of GPU kernels; [`super`] lists the invariants.

use super::{VerifyError, require};
use crate::launch::{GpuKernel, MOST_SHARED, MOST_THREADS};
use crate::plan::{Builtin, Code, Plan};
use std::collections::BTreeSet;

/// Threads of a block are whole warps.
const WARP: u32 = 32;

/// Kernels belong to accelerators that work in a memory of their own, each once in its artifact. Steps launch
/// those of their own unit, with as many addresses as they take and a permitted number of blocks.
pub(super) fn check(plan: &Plan) -> Result<(), VerifyError> {
    let mut seen = BTreeSet::new();
    for (i, kernel) in plan.launches.iter().enumerate() {
        let at = || format!("launches[{i}]");
        let GpuKernel { unit, artifact, symbol, operands, results, launch } = kernel;
        let on_accelerator = *unit > 0 && plan.units.get(*unit as usize).is_some_and(|u| u.memory > 0);
        require(on_accelerator, at, || format!("unit {unit}"))?;
        require(super::stays_inside(artifact), at, || format!("the path `{artifact}`"))?;
        require(super::is_identifier(symbol), at, || format!("{symbol:?} is not a C identifier"))?;
        require(seen.insert((artifact, symbol)), at, || format!("{symbol} occurs twice"))?;
        require(results.are_among(*operands as usize), at, || {
            format!("its results are {results} of {operands} operands")
        })?;
        let fits = (1..=MOST_THREADS).contains(&launch.block) && launch.block.is_multiple_of(WARP);
        require(fits && launch.shared <= MOST_SHARED, at, || {
            format!("{} threads and {} bytes of shared memory", launch.block, launch.shared)
        })?;
        require(launch.blocks(1).is_some(), at, || format!("the grid {:?}", launch.grid))?;
    }
    for (i, entry) in plan.entries.iter().enumerate() {
        for (j, step) in entry.steps.iter().enumerate() {
            let Code::Builtin(Builtin::Launch { kernel }) = step.code else { continue };
            let at = || format!("entries[{i}].steps[{j}]");
            let Some(of) = plan.launches.get(kernel as usize) else {
                return require(false, at, || format!("launch {kernel} is out of range"));
            };
            require(of.unit == step.unit, at, || format!("launch {kernel} is not its unit's"))?;
            require(of.operands as usize == step.args.len(), at, || {
                format!("{} addresses for the {} of launch {kernel}", step.args.len(), of.operands)
            })?;
            let rows = (entry.kind.rows() as u32).max(entry.out_rows);
            require(of.launch.blocks(rows).is_some(), at, || format!("too many blocks for {rows} rows"))?;
        }
    }
    Ok(())
}
