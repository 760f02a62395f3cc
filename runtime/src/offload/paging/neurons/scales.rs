//! Scales of up and down in segments of their own: read when the store is opened, and resident.

use super::stored;
use crate::bundle::program::Program;
use crate::bundle::{BundleFiles, forget};
use crate::error::{Error, Result};
use crate::exec::unit::{ExpertPart, LayerPart};
use crate::offload::paging::tables::Tables;
use crate::platform::memory::Region;
use moec_ir::plan::{Paging, Segment};
use std::io::{Read as _, Seek as _, SeekFrom};

/// Reads the scales of all layers, and enters their addresses; reads nothing if scales are stored with codes,
/// or with gates on disk.
///
/// # Errors
/// Refused memory, a file that cannot be read.
pub(super) fn load(
    program: &Program,
    files: &BundleFiles,
    paging: &Paging,
    tables: &Tables,
) -> Result<Region> {
    const NAME: &str = "scales of neurons";
    let stored = stored(program, paging)?;
    let each = stored.resident_scales();
    if each == 0 {
        return Region::new(NAME, 0);
    }
    let neurons = |l: &moec_ir::plan::PagedLayer| super::super::neurons_of(program, l);
    let all: usize = paging.layers.iter().map(neurons).sum();
    let region = Region::new(NAME, (all * each) as u64)?;
    let mut at = 0;
    for (layer, l) in paging.layers.iter().enumerate() {
        let lost = || Error::plan("neurons of no segment");
        let segment: &Segment = program.segments.get(l.down as usize).ok_or_else(lost)?;
        let of = files.get(segment.file)?;
        let failed = |source| Error::io("read", of.path.clone(), source);
        let mut file = &of.file;
        let inter = segment.extents().1 as usize;
        for expert in 0..l.experts {
            let first = segment.matrix_offset(expert).ok_or_else(lost)? + stored.scales_at(0, inter) as u64;
            let place = region.base().plus(at);
            // SAFETY: the region has room for the scales of all neurons of all layers, of which `at` bytes
            // are taken; nothing else has its address yet.
            let bytes = unsafe { std::slice::from_raw_parts_mut(place.ptr(), inter * each) };
            file.seek(SeekFrom::Start(first)).and_then(|_| file.read_exact(bytes)).map_err(failed)?;
            // A budget has no room for a second copy in the page cache.
            forget(file, usize::try_from(first).unwrap_or(usize::MAX).saturating_add(bytes.len()));
            for i in 0..inter {
                let neuron = expert as usize * inter + i;
                let entry = neuron * stored.addresses() + 1;
                tables.set(LayerPart { layer, part: ExpertPart::Down }, entry, place.plus(i * each));
            }
            at += bytes.len();
        }
    }
    Ok(region)
}
