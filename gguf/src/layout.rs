//! Layout of tensors in the data: aligned, inside of the file, and none in another.

use crate::Error;
use crate::tensor::{Entry, Tensor};

/// Gives tensors their bytes, in the order of the data. The data begins at the first multiple of `alignment`
/// from `header` on, where the header ends, and goes to the end of the file, at `len`.
pub(crate) fn locate_tensors(
    mut entries: Vec<Entry<'_>>,
    alignment: u64,
    header: usize,
    len: usize,
) -> Result<Vec<Tensor<'_>>, Error> {
    // An alignment has 30 bits at most, and no file 2^63 bytes.
    let data = (header as u64).next_multiple_of(alignment);
    let has = (len as u64).saturating_sub(data);
    entries.sort_by_key(|e| e.offset);
    let mut tensors = Vec::with_capacity(entries.len());
    let mut last: Option<(&str, u64)> = None;
    for entry in entries {
        let Entry { name, kind, shape, size, offset } = entry;
        let tensor = || name.to_owned();
        if !offset.is_multiple_of(alignment) {
            return Err(Error::Unaligned { tensor: tensor(), offset, alignment });
        }
        let end = offset.saturating_add(size);
        if end > has {
            return Err(Error::Outside { tensor: tensor(), end, has });
        }
        let free = last.map_or(0, |(_, end)| end);
        match last {
            Some((before, end)) if offset < end => return Err(Error::Overlap(before.to_owned(), tensor())),
            _ if offset - free >= alignment => {
                return Err(Error::Gap { tensor: tensor(), bytes: offset - free });
            }
            _ => {}
        }
        last = Some((name, end));
        let inside =
            |at: u64| usize::try_from(data + at).map_err(|_| Error::Outside { tensor: tensor(), end, has });
        let bytes = inside(offset)?..inside(end)?;
        tensors.push(Tensor { name, kind, shape, bytes });
    }
    Ok(tensors)
}
