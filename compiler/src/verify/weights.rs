//! Weights for the reference: the bundle's own, unpacked, or the checkpoint's.

use crate::bundle::partial::io_error;
use crate::bundle::read::Bundle;
use crate::error::Result;
use crate::import::map::Map;
use moec_ir::plan::Segment;
use moec_ir::{Encoding, Leaf, Module, Source, Weight, WeightExpr};
use std::collections::HashMap;
use std::ops::Range;

/// The packed weights of a bundle as a source: leaves are segments.
pub(super) struct Packed {
    files: Vec<Option<Map>>,
    segments: HashMap<String, Segment>,
}

impl Packed {
    /// Opens the files that hold segments.
    pub(super) fn open(bundle: &Bundle) -> Result<Self> {
        let plan = &bundle.plan;
        let mut files = Vec::new();
        for (i, file) in plan.files.iter().enumerate() {
            let used = plan.segments.iter().any(|s| s.file as usize == i);
            let path = bundle.folder.join(&file.path);
            let open = || Map::open(&path).map_err(|e| io_error("read", &path, &e));
            files.push(used.then(open).transpose()?);
        }
        let segments = plan.segments.iter().map(|s| (s.name.clone(), s.clone())).collect();
        Ok(Self { files, segments })
    }

    /// The segment of a weight, and its bytes.
    fn segment(&self, weight: &str) -> Option<(&Segment, &[u8])> {
        let segment = self.segments.get(weight)?;
        let file = self.files.get(segment.file as usize)?.as_ref()?;
        let from = usize::try_from(segment.offset).ok()?;
        let end = from.checked_add(usize::try_from(segment.bytes).ok()?)?;
        Some((segment, file.get(from..end)?))
    }

    /// Rounds a weight of the checkpoint as the bundle stores it. Grouped formats keep the bundle's scales, for
    /// which errors may have mattered in some way that only the build knew; the codes are then settled.
    pub(super) fn round(&self, weight: &Weight, values: &mut [f32]) {
        let rounded =
            self.segment(&weight.name).map(|(s, packed)| moec_cpu::round_as_packed(s, packed, values));
        if !matches!(rounded, Some(Ok(()))) {
            // There is no such weight in the bundle: nothing equals it.
            values.fill(f32::NAN);
        }
    }
}

impl Source for Packed {
    fn read(
        &self,
        leaf: &Leaf,
        lead: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let missing = || format!("there is no segment `{}`", leaf.tensor);
        let (segment, packed) = self.segment(&leaf.tensor).ok_or_else(missing)?;
        moec_cpu::unpack(segment, packed, lead, rows, cols, out)?;
        Ok(())
    }
}

/// Replaces every weight's expression by the segment of its name.
pub(super) fn read_from_bundle(module: &mut Module) {
    for w in &mut module.weights {
        let leaf = Leaf { tensor: w.name.clone(), shape: w.shape.clone(), encoding: Encoding::Plain };
        w.expr = WeightExpr::Leaf(leaf);
    }
}
