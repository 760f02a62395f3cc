//! Packed weights of a bundle, read back: for references and for host builds.
#![expect(clippy::cast_possible_truncation, reason = "ids of a graph")]

use crate::read::Bundle;
use moec_base::error::{Error, Result, io_error};
use moec_config::Rounding;
use moec_import::Checkpoint;
use moec_import::map::Map;
use moec_ir::plan::{Layout, Segment};
use moec_ir::{Encoding, Format, Leaf, Module, Operand, Source, Weight, WeightExpr, WeightId};
use moec_passes::own_experts;
use moec_passes::trained::weight_of;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;

/// The packed weights of a bundle as a source: leaves are segments.
pub struct Packed {
    files: Vec<Option<Map>>,
    segments: HashMap<String, Segment>,
    /// Whether codes were rounded with feedback.
    fed: bool,
}

impl Packed {
    /// Opens the files that hold segments.
    pub fn open(bundle: &Bundle) -> Result<Self> {
        let plan = &bundle.plan;
        let mut files = Vec::new();
        for (i, file) in plan.files.iter().enumerate() {
            let used = plan.segments.iter().any(|s| s.file as usize == i);
            let path = bundle.folder.join(&file.path);
            let open = || Map::open(&path).map_err(|e| io_error("read", &path, &e));
            files.push(used.then(open).transpose()?);
        }
        let fed = bundle.decisions().is_ok_and(|d| d.rounding == Rounding::Feedback);
        Ok(Self { files, segments: by_name(&plan.segments), fed })
    }

    /// The segment of a weight, and its bytes.
    fn segment(&self, weight: &str) -> Option<(&Segment, &[u8])> {
        let segment = self.segments.get(weight)?;
        let file = self.files.get(segment.file as usize)?.as_ref()?;
        let from = usize::try_from(segment.offset).ok()?;
        let end = usize::try_from(segment.end()?).ok()?;
        Some((segment, file.get(from..end)?))
    }

    /// Whether a weight is among them.
    pub fn holds(&self, weight: &str) -> bool {
        self.segment(weight).is_some()
    }

    /// Rounds a weight of the checkpoint as the bundle stores it. Grouped formats keep the bundle's scales,
    /// for which errors may have mattered in some way that only the build knew; the codes are then settled,
    /// or read from the bundle, too, where errors were fed back.
    pub fn round(&self, weight: &Weight, values: &mut [f32]) {
        let parts = || own_experts::names(&weight.name).filter_map(|name| self.segment(&name));
        let (mut rounded, mut at) = (true, 0);
        for (s, packed) in self.segment(&weight.name).into_iter().chain(parts()) {
            let end = at + s.shape.iter().map(|&n| n as usize).product::<usize>();
            let own = values.get_mut(at..end).map(|own| moec_cpu::round_as_packed(s, packed, self.fed, own));
            rounded &= matches!(own, Some(Ok(())));
            at = end;
        }
        if !rounded || at != values.len() {
            // The bundle has no such weight; NaN equals nothing.
            values.fill(f32::NAN);
        }
    }
}

impl Source for Packed {
    fn read(
        &self,
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let missing = || format!("there is no segment `{}`", leaf.tensor);
        let (segment, packed) = self.segment(&leaf.tensor).ok_or_else(missing)?;
        moec_cpu::unpack(segment, packed, matrix, rows, cols, out)?;
        Ok(())
    }

    /// Scales of two levels cannot be found again by the numbers; those of other formats are.
    fn stored(
        &self,
        leaf: &Leaf,
        format: Format,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [u8],
    ) -> std::result::Result<bool, Box<dyn std::error::Error + Send + Sync>> {
        match self.segment(&leaf.tensor) {
            Some((segment, packed)) if format.has_fine_scales() && segment.format == format => {
                moec_cpu::unpack_stored(segment, packed, matrix, rows, cols, out)?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }
}

/// A checkpoint, and a bundle for what its build computed beside that ([`moec_passes::trained`]).
#[derive(Clone, Copy)]
pub struct CheckpointWithBundle<'a> {
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// The weights of the bundle.
    pub packed: &'a Packed,
}

impl Source for CheckpointWithBundle<'_> {
    fn read(
        &self,
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
        match weight_of(&leaf.tensor) {
            Some(weight) => {
                let leaf = Leaf { tensor: weight.to_owned(), ..leaf.clone() };
                self.packed.read(&leaf, matrix, rows, cols, out)
            }
            None => self.checkpoint.read(leaf, matrix, rows, cols, out),
        }
    }
}

/// Segments by the name of their weight. If a weight is stored twice, its segment of rows has another name.
fn by_name(segments: &[Segment]) -> HashMap<String, Segment> {
    let mut found: HashMap<String, Segment> = HashMap::new();
    for segment in segments {
        let mut new = segment.clone();
        if let Some(old) = found.get_mut(&segment.name) {
            if new.layout != Layout::Rows {
                std::mem::swap(old, &mut new);
            }
            found.insert(in_rows(&segment.name), new);
        } else {
            found.insert(segment.name.clone(), new);
        }
    }
    found
}

/// Name of the rows of a weight that is stored in panels, too.
fn in_rows(weight: &str) -> String {
    format!("{weight} in rows")
}

/// Checks that the bundle has every weight that the Graph reads, or the weights that it is made of. A weight
/// that is only on another unit has no segment: its package holds codes, and these are verified.
///
/// # Errors
/// It has not: the reference needs the checkpoint.
pub fn complete(module: &Module, packed: &Packed, bundle: &Path) -> Result<()> {
    let inputs = module.entries.iter().flat_map(|g| &g.nodes).flat_map(|n| &n.inputs);
    let read: BTreeSet<WeightId> = inputs
        .filter_map(|input| match input {
            Operand::Weight(id) => Some(*id),
            Operand::Value(_) | Operand::State(_) => None,
        })
        .collect();
    let known = segments(module, packed);
    let lacks = |w: &&Weight| !packed.holds(&w.name) && through(&w.expr, &known).is_none();
    let missing: Vec<&str> =
        read.iter().map(|id| module.weight(*id)).filter(lacks).map(|w| w.name.as_str()).collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let and = match missing.len() {
        1 => String::new(),
        n => format!(" and {} more", n - 1),
    };
    Err(Error::input(format!("`{}` does not contain all weights that the check requires", bundle.display()))
        .because(format!("`{first}`{and} is stored only in a package of another unit, as its codes"))
        .hint("name the folder of the checkpoint that it was built from: `--source HF_DIR`"))
}

/// Gives tables that are also stored in panels a weight of their own: the two may be rounded differently,
/// since errors of a matrix matter by what it is multiplied by.
pub fn split_tables(module: &mut Module, packed: &Packed) {
    let Module { weights, entries, .. } = module;
    let mut tables: HashMap<WeightId, WeightId> = HashMap::new();
    for node in entries.iter_mut().flat_map(|g| &mut g.nodes).filter(|n| n.op.is_embedding()) {
        for input in &mut node.inputs {
            let Operand::Weight(id) = input else { continue };
            let Some(weight) = weights.get(id.0 as usize) else { continue };
            let name = in_rows(&weight.name);
            if packed.segments.contains_key(&name) {
                let table = Weight { name, ..weight.clone() };
                *id = *tables.entry(*id).or_insert_with(|| {
                    weights.push(table);
                    WeightId(weights.len() as u32 - 1)
                });
            }
        }
    }
}

/// Replaces every weight's expression by the segment of its name. What has no segment, but is made of weights
/// that have some (the hot neurons of experts, whose prompts take all), reads those.
pub fn read_from_bundle(module: &mut Module, packed: &Packed) {
    let known = segments(module, packed);
    for w in &mut module.weights {
        let found = if packed.holds(&w.name) { None } else { through(&w.expr, &known) };
        w.expr = found.unwrap_or_else(|| leaf(w));
    }
}

/// The segment of a weight.
fn leaf(w: &Weight) -> WeightExpr {
    WeightExpr::Leaf(Leaf { tensor: w.name.clone(), shape: w.shape.clone(), encoding: Encoding::Plain })
}

/// Stored expressions, with their places.
fn segments(module: &Module, packed: &Packed) -> Vec<(WeightExpr, WeightExpr)> {
    let packed_weights = module.weights.iter().filter(|w| packed.holds(&w.name));
    packed_weights.map(|w| (w.expr.clone(), leaf(w))).collect()
}

/// An expression with stored weights in place of the tensors that they are made of; `None` if some are not
/// stored.
fn through(expr: &WeightExpr, known: &[(WeightExpr, WeightExpr)]) -> Option<WeightExpr> {
    if let Some((_, stored)) = known.iter().find(|(whole, _)| whole == expr) {
        return Some(stored.clone());
    }
    let one = |of: &WeightExpr| through(of, known).map(Box::new);
    let all = |of: &[WeightExpr]| of.iter().map(|of| through(of, known)).collect::<Option<Vec<_>>>();
    Some(match expr {
        WeightExpr::Leaf(_) => return None,
        WeightExpr::Const(numbers) => WeightExpr::Const(numbers.clone()),
        WeightExpr::Transpose(of) => WeightExpr::Transpose(one(of)?),
        &WeightExpr::Slice { axis, start, step, len, ref of } => {
            WeightExpr::Slice { axis, start, step, len, of: one(of)? }
        }
        WeightExpr::Concat { axis, of } => WeightExpr::Concat { axis: *axis, of: all(of)? },
        WeightExpr::Stack(of) => WeightExpr::Stack(all(of)?),
        WeightExpr::Split { heads, of } => WeightExpr::Split { heads: *heads, of: one(of)? },
        WeightExpr::Join(of) => WeightExpr::Join(one(of)?),
        WeightExpr::ScaleMatrices { of, by } => WeightExpr::ScaleMatrices { of: one(of)?, by: one(by)? },
        WeightExpr::Repeat { each, of } => WeightExpr::Repeat { each: *each, of: one(of)? },
        WeightExpr::Map { map, of } => WeightExpr::Map { map: *map, of: one(of)? },
        WeightExpr::Arrange { order, of } => WeightExpr::Arrange { order: order.clone(), of: one(of)? },
        WeightExpr::ScaleCols { of, by } => WeightExpr::ScaleCols { of: one(of)?, by: one(by)? },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stored_in_two_segments_have_their_own_name() {
        let segment = |name: &str, offset, layout| Segment {
            name: name.into(),
            file: 0,
            offset,
            bytes: 64,
            pitch: 64,
            shape: vec![8, 2],
            format: Format::F32,
            layout,
        };
        let (rows, panels) = (Layout::Rows, Layout::Panels { nr: 8 });
        let (a, b) = (segment("e", 0, rows), segment("e", 64, panels));
        let other = segment("t", 128, rows);
        for order in [[&a, &b, &other], [&b, &other, &a]] {
            let found = by_name(&order.map(Clone::clone));
            assert_eq!(found.len(), 3);
            assert_eq!((&found["e"], &found["e in rows"], &found["t"]), (&b, &a, &other));
        }
    }
}
