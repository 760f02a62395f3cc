//! Extents: bytes of a file that are read and checked together.

use crate::error::{Error, Result};
use crate::platform::regular::FileId;
use std::path::PathBuf;

/// Alignment of an extent's offset, in bytes: direct reads require it.
pub const BLOCK: u64 = 4096;

/// Bytes that are read, checked and handed out together: the gate and up matrices of an expert, or its down
/// matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index of the file in its table.
    pub file: u32,
    /// Offset in the file, a multiple of [`BLOCK`].
    pub offset: u64,
    /// Size, at least 1.
    pub bytes: u64,
    /// CRC-32C (Castagnoli) of the bytes; `None`: they are not checked.
    pub crc32c: Option<u32>,
}

impl Extent {
    /// Offset of the next extent, if that one is to be read together with this one.
    const fn next(&self) -> u64 {
        (self.offset + self.bytes).next_multiple_of(BLOCK)
    }
}

/// A file that contains extents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEntry {
    /// Path.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Whether it is read through the page cache even if reads may bypass it: for bytes that are known to be
    /// in the page cache.
    pub cached: bool,
    /// Identity of the file, which was opened and checked before; `None`: any file at that path.
    pub identity: Option<FileId>,
}

/// All extents of a store and their files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtentTable {
    files: Vec<FileEntry>,
    extents: Vec<Extent>,
}

/// Neighbouring extents as one range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentRun {
    /// Index of the file.
    pub file: u32,
    /// Offset of the first extent.
    pub offset: u64,
    /// Bytes to the end of the last one, alignment gaps included.
    pub bytes: u64,
}

impl ExtentTable {
    /// Checks the extents.
    ///
    /// # Errors
    /// [`Error::Bundle`] for an extent that is empty, not aligned, outside of its file, or without a file.
    pub fn new(files: Vec<FileEntry>, extents: Vec<Extent>) -> Result<Self> {
        for (i, e) in extents.iter().enumerate() {
            let wrong = |why: &str| Err(Error::plan(format!("extent {i} {why}")));
            let Some(file) = files.get(e.file as usize) else { return wrong("is of no file") };
            if e.bytes == 0 || !e.offset.is_multiple_of(BLOCK) {
                return wrong("is empty or not aligned to 4096 bytes");
            }
            // Small enough that rounding up cannot overflow.
            if e.offset.checked_add(e.bytes).is_none_or(|end| end > file.bytes || end > i64::MAX as u64) {
                return wrong("is outside of its file");
            }
        }
        Ok(Self { files, extents })
    }

    /// Files.
    pub fn files(&self) -> &[FileEntry] {
        &self.files
    }

    /// Extents.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// The range of `count` extents from `first` on.
    ///
    /// # Errors
    /// [`Error::Bundle`] for no extents, or if one does not begin at the end of the previous one, rounded up
    /// to [`BLOCK`].
    pub fn run(&self, first: u32, count: u32) -> Result<ExtentRun> {
        let range = first as usize..first as usize + count as usize;
        let extents = self.extents.get(range).unwrap_or_default();
        let (Some(a), Some(z)) = (extents.first(), extents.last()) else {
            return Err(Error::plan(format!("there are no {count} extents from {first} on")));
        };
        let apart = |w: &&[Extent]| w[0].file != w[1].file || w[0].next() != w[1].offset;
        if extents.windows(2).any(|w| apart(&w)) {
            return Err(Error::plan(format!("{count} extents from {first} on are not neighbours")));
        }
        Ok(ExtentRun { file: a.file, offset: a.offset, bytes: z.offset + z.bytes - a.offset })
    }
}

/// Computes the CRC-32C (Castagnoli) of bytes, for [`Extent::crc32c`].
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

/// The checksum of bytes that follow others with the checksum `before`; 0 before the first.
pub fn checksum_after(before: u32, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(before, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(extents: &[(u32, u64, u64)]) -> Result<ExtentTable> {
        let files = ["a", "b"].map(|path| FileEntry {
            path: path.into(),
            bytes: 20_000,
            cached: false,
            identity: None,
        });
        let extent = |&(file, offset, bytes)| Extent { file, offset, bytes, crc32c: None };
        ExtentTable::new(files.to_vec(), extents.iter().map(extent).collect())
    }

    #[test]
    fn extents_outside_their_file_are_rejected() {
        assert!(table(&[(0, 0, 20_000), (1, 16_384, 3616)]).is_ok());
        for bad in [(2, 0, 1), (0, 0, 0), (0, 64, 100), (0, 16_384, 3617), (0, 4096, u64::MAX)] {
            assert!(table(&[bad]).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn adjacent_extents_form_one_run() {
        let t = table(&[(0, 0, 5000), (0, 8192, 4096), (0, 12_288, 10), (1, 16_384, 1)]).unwrap();
        assert_eq!(t.run(0, 3).unwrap(), ExtentRun { file: 0, offset: 0, bytes: 12_298 });
        assert_eq!(t.run(1, 1).unwrap(), ExtentRun { file: 0, offset: 8192, bytes: 4096 });
        for (first, count) in [(0, 0), (0, 4), (2, 2), (3, 2), (9, 1), (u32::MAX, u32::MAX)] {
            assert!(t.run(first, count).is_err(), "{first} {count}");
        }
    }

    #[test]
    fn the_checksum_is_crc32c() {
        // RFC 3720, appendix B.4.
        assert_eq!(checksum(&[0; 32]), 0x8a91_36aa);
        assert_eq!(checksum(b"123456789"), 0xe306_9283);
        assert_eq!(checksum_after(checksum(b"1234"), b"56789"), 0xe306_9283);
    }
}
