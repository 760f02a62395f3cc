//! GPU kernels: printing and parsing.

use super::attrs::{Attrs, Value};
use super::cursor::{Cursor, Parsed};
use super::items::with_attrs;
use super::lex::quote;
use crate::launch::{Extent, GpuKernel, Launch};
use crate::plan::{Plan, Results};
use std::fmt;

/// Writes GPU kernels, a line each.
pub(super) fn write(f: &mut fmt::Formatter<'_>, plan: &Plan) -> fmt::Result {
    for (i, kernel) in plan.launches.iter().enumerate() {
        let GpuKernel { unit, artifact, symbol, operands, results, launch } = kernel;
        let Launch { grid, block, shared } = launch;
        write!(f, "launch {i} {} {{unit = {unit}, artifact = {}", quote(symbol), quote(artifact))?;
        let [x, y, z] = grid.map(extent);
        write!(f, ", operands = {operands}, results = {results}")?;
        writeln!(f, ", grid = [{x}, {y}, {z}], block = {block}, shared = {shared}}}")?;
    }
    Ok(())
}

fn extent(of: Extent) -> String {
    match of {
        Extent::Fixed(blocks) => format!("fixed(blocks = {blocks})"),
        Extent::Rows { per } => format!("rows(per = {per})"),
        Extent::Active { k, experts } => format!("active(k = {k}, experts = {experts})"),
    }
}

/// Reads a GPU kernel, after its index.
pub(super) fn read(c: &mut Cursor<'_>) -> Parsed<GpuKernel> {
    let symbol = c.string("a symbol")?;
    with_attrs(c, |c, a| {
        let grid = a.required(c, "grid", "three extents", |value, c| {
            let Value::List(items) = value else { return Ok(None) };
            let extents =
                items.into_iter().map(|item| read_extent(item, c)).collect::<Parsed<Option<Vec<_>>>>()?;
            Ok(extents.and_then(|e| <[Extent; 3]>::try_from(e).ok()))
        })?;
        Ok(GpuKernel {
            unit: a.int(c, "unit")?,
            artifact: a.string(c, "artifact")?,
            symbol,
            operands: a.int(c, "operands")?,
            results: read_results(c, a)?,
            launch: Launch { grid, block: a.int(c, "block")?, shared: a.int(c, "shared")? },
        })
    })
}

/// Reads the arguments that a kernel writes.
pub(super) fn read_results<'t>(c: &Cursor<'t>, a: &mut Attrs<'t>) -> Parsed<Results> {
    let what = format!("a list of arguments below {}", Results::MOST);
    a.required(c, "results", &what, |value, _| {
        let Value::List(items) = value else { return Ok(None) };
        Ok(items.into_iter().map(Value::number).collect::<Option<Vec<_>>>().and_then(Results::new))
    })
}

fn read_extent<'t>(item: Value<'t>, c: &Cursor<'t>) -> Parsed<Option<Extent>> {
    let Value::Word(word, mut args) = item else { return Ok(None) };
    let extent = match word {
        "fixed" => Extent::Fixed(args.int(c, "blocks")?),
        "rows" => Extent::Rows { per: args.int(c, "per")? },
        "active" => Extent::Active { k: args.int(c, "k")?, experts: args.int(c, "experts")? },
        _ => return Ok(None),
    };
    args.finish(c)?;
    Ok(Some(extent))
}
