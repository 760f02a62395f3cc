//! Where packed weights come from.

use crate::error::{Error, Result};
use crate::mapped::MappedFile;
use crate::memory::Addr;
use crate::owned::Arrival;
use crate::preload::Preload;
use crate::program::Program;
use crate::regular;
use crate::weights::Held;
#[cfg(doc)]
use moec_ir::plan::Layout;
use moec_ir::plan::{FileRef, Segment};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// Gives the addresses of weight segments: memory of our own, mapped files, or a cache over flash for models that do not fit
/// in memory.
///
/// # Safety
/// For every index of [`moec_ir::plan::Plan::segments`], an address that `segment` returns is aligned to 64 bytes, and that of at
/// least the segment's bytes; one that `matrices` returns is that of a table with an address for each of the segment's
/// matrices, or of its rows and their scales where its layout is [`Layout::Rests`]. All stay the same and readable as long as
/// the store lives, or until `leave` after a `moves` that was true; where the store has an `arrival`, bytes may be read from when that has let through what the segment needs, and nobody writes to
/// them from then on. An address in a table is that of a matrix, aligned to 64 bytes if the segment's pitch is: always, or of
/// an expert on flash from when its pager has found it ready until the step is over.
pub unsafe trait Store: Send + Sync {
    /// Address of a segment of the program that the store was opened for; none if its matrices are found by a table only.
    fn segment(&self, index: u32) -> Option<Addr>;
    /// Address of the table of a segment's matrices.
    fn matrices(&self, index: u32) -> Option<Addr>;
    /// Bytes of weights that the store serves.
    fn bytes(&self) -> u64;
    /// Begins to load in the background what nobody has asked for yet.
    fn preload(&mut self) {}
    /// What has to be waited for before a segment is read; none if all may be read from the start.
    fn arrival(&self) -> Option<&Arrival> {
        None
    }
    /// Whether weights have other addresses from now on. The ones before stay readable until [`Store::leave`].
    ///
    /// # Errors
    /// Weights that were to move and cannot be read.
    fn moves(&mut self) -> Result<bool> {
        Ok(false)
    }
    /// Nobody has addresses any more that were given before [`Store::moves`] was true.
    fn leave(&mut self) {}
    /// Waits until weights are where they are to stay, but for `moves`.
    ///
    /// # Errors
    /// As [`Store::moves`].
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }
    /// What it holds, in memory of its own or not.
    fn held(&self) -> Held {
        Held::default()
    }
}

/// How much of the bundle is checked before it runs. Sizes always are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum CheckLevel {
    /// Sizes only.
    Sizes,
    /// Also the SHA-256 of files of at most [`SMALL_FILE`] bytes.
    #[default]
    Small,
    /// The SHA-256 of every file.
    All,
}

impl CheckLevel {
    /// Whether the content of a file of so many bytes is checked.
    pub(crate) fn hashes(self, bytes: u64) -> bool {
        self == Self::All || (self == Self::Small && bytes <= SMALL_FILE)
    }
}

/// Largest file whose content is checked at every start, in bytes.
pub const SMALL_FILE: u64 = 64 << 20;

/// Weight files mapped into memory, read-only. Pages come from disk when a kernel first reads them, or before it
/// ([`Store::preload`]).
///
/// Shortening a file under a running program ends the process with a message ([`crate::mapped`]).
#[derive(Debug)]
pub struct MappedStore {
    // Held so that the addresses stay valid.
    maps: Arc<Vec<Option<MappedFile>>>,
    preload: Option<Preload>,
    addresses: Addresses,
}

/// Where segments begin, and the tables of their matrices.
#[derive(Debug)]
pub(crate) struct Addresses {
    segments: Vec<Option<Addr>>,
    tables: Vec<Vec<Addr>>,
    bytes: u64,
}

impl Addresses {
    /// Those of the segments that `wanted` names by their indices. `place` gives the first byte of a segment that ends before
    /// the given offset in its file, or none where the file does not go so far.
    ///
    /// # Errors
    /// [`Error::Plan`] for a segment outside of its file.
    pub(crate) fn new(
        program: &Program,
        wanted: &dyn Fn(u32) -> bool,
        place: &dyn Fn(&Segment, u64) -> Option<Addr>,
    ) -> Result<Self> {
        let (mut segments, mut tables, mut bytes) = (Vec::new(), Vec::new(), 0_u64);
        for (i, s) in program.segments.iter().enumerate() {
            if !wanted(i as u32) {
                segments.push(None);
                tables.push(Vec::new());
                continue;
            }
            let first = s
                .end()
                .and_then(|end| place(s, end))
                .ok_or_else(|| Error::Plan(format!("segment {i} lies outside of its file")))?;
            segments.push(Some(first));
            // Inside of the range: the last of them ends with it.
            let (lead, rows, _) = s.extents();
            let rows = rows as usize;
            let matrix = |m: u32| first.plus(m as usize * s.pitch as usize);
            tables.push(match s.rests() {
                Some(b) => {
                    let row =
                        |m, r| [r * b.rest_pitch(), b.rest_scales_at(r, rows)].map(|at| matrix(m).plus(at));
                    let of = |m| (0..rows).flat_map(move |r| row(m, r).into_iter().take(b.rest_addresses()));
                    (0..lead).flat_map(of).collect()
                }
                None => (0..lead).map(matrix).collect(),
            });
            bytes = bytes.saturating_add(s.bytes);
        }
        Ok(Self { segments, tables, bytes })
    }

    /// As [`Store::segment`].
    pub(crate) fn segment(&self, index: u32) -> Option<Addr> {
        self.segments.get(index as usize).copied().flatten()
    }

    /// As [`Store::matrices`].
    pub(crate) fn matrices(&self, index: u32) -> Option<Addr> {
        let table = self.tables.get(index as usize).filter(|t| !t.is_empty())?;
        Some(Addr::read_only(table.as_ptr().cast()))
    }

    /// As [`Store::bytes`].
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl MappedStore {
    /// Checks the files of the bundle and maps those that hold segments.
    ///
    /// # Errors
    /// A file that is missing, has another size, or another content (as far as `check` goes); a segment
    /// outside of its file; what the system refuses.
    pub fn open(program: &Program, bundle: &Path, check: CheckLevel) -> Result<Self> {
        Self::open_some(program, bundle, check, &|_| true)
    }

    /// As [`MappedStore::open`], with those segments only that `wanted` names by their indices.
    pub(crate) fn open_some(
        program: &Program,
        bundle: &Path,
        check: CheckLevel,
        wanted: &dyn Fn(u32) -> bool,
    ) -> Result<Self> {
        let segments_in = |file: usize| {
            let all = program.segments.iter().enumerate();
            all.filter(move |(i, s)| s.file as usize == file && wanted(*i as u32)).count()
        };
        let paths = checked_paths(program, bundle)?;
        let mut maps = Vec::with_capacity(paths.len());
        for (i, (info, path)) in program.files.iter().zip(&paths).enumerate() {
            let used = segments_in(i) > 0;
            let map = if used { map_file(info, path)? } else { None };
            if check.hashes(info.bytes) {
                let found = match &map {
                    Some(map) => Sha256::digest(&**map).into(),
                    None => hash_of(path)?,
                };
                check_hash(info, path, found)?;
            }
            maps.push(map);
        }
        let addresses = Addresses::new(program, wanted, &|s, end| {
            let map = maps.get(s.file as usize)?.as_deref().unwrap_or_default();
            let range = usize::try_from(s.offset).ok()?..usize::try_from(end).ok()?;
            map.get(range).map(|bytes| Addr::read_only(bytes.as_ptr()))
        })?;
        Ok(Self { maps: Arc::new(maps), preload: None, addresses })
    }
}

// SAFETY: every address lies in a mapping that the store holds, page-aligned plus an offset that
// the verifier has found to be a multiple of 64, with the segment's bytes inside of the mapping (`open`). Tables are never
// changed; an address is as large as a pointer.
unsafe impl Store for MappedStore {
    fn segment(&self, index: u32) -> Option<Addr> {
        self.addresses.segment(index)
    }

    fn matrices(&self, index: u32) -> Option<Addr> {
        self.addresses.matrices(index)
    }

    fn bytes(&self) -> u64 {
        self.addresses.bytes()
    }

    fn preload(&mut self) {
        self.preload = self.preload.take().or_else(|| Preload::start(&self.maps));
    }
}

/// The paths of all files of the program, which must have the sizes that the plan names: that costs nothing and catches most
/// damage.
///
/// # Errors
/// A path outside of the bundle; a file that is missing or has another size.
pub(crate) fn checked_paths(program: &Program, bundle: &Path) -> Result<Vec<PathBuf>> {
    let paths = program.files.iter().map(|f| file_path(bundle, &f.path)).collect::<Result<Vec<_>>>()?;
    program.files.iter().zip(&paths).try_for_each(|(info, path)| check_size(info, path))?;
    Ok(paths)
}

/// The path of a file of the bundle. Absolute paths and `..` are refused.
pub(crate) fn file_path(bundle: &Path, relative: &str) -> Result<PathBuf> {
    let path = Path::new(relative);
    if path.components().next().is_none() || path.components().any(|c| !matches!(c, Component::Normal(_))) {
        return Err(Error::OutsideBundle(relative.to_owned()));
    }
    Ok(bundle.join(path))
}

pub(crate) fn check_size(info: &FileRef, path: &Path) -> Result<()> {
    let found = match regular::size(path) {
        Ok(found) => found,
        Err(e) if e.kind() == ErrorKind::NotFound => {
            return Err(Error::MissingFile(path.to_owned()));
        }
        Err(source) => return Err(Error::Io { doing: "read", path: path.to_owned(), source }),
    };
    if found == info.bytes {
        Ok(())
    } else {
        Err(Error::WrongSize { path: path.to_owned(), expected: info.bytes, found })
    }
}

/// Maps a file of `info.bytes` bytes; none if it is empty.
fn map_file(info: &FileRef, path: &Path) -> Result<Option<MappedFile>> {
    if info.bytes == 0 {
        return Ok(None);
    }
    let failed = |source| Error::Io { doing: "map", path: path.to_owned(), source };
    let map = MappedFile::open(path).map_err(failed)?;
    if map.len() as u64 == info.bytes {
        in_huge_pages(&map);
        Ok(Some(map))
    } else {
        Err(Error::WrongSize { path: path.to_owned(), expected: info.bytes, found: map.len() as u64 })
    }
}

/// Asks for pages as large as the processor has them, where the file system takes part (ext4 and XFS of recent Linux):
/// a matrix of an expert is then read and mapped by a fault or two, not by one in sixteen small pages. A hint.
#[cfg(target_os = "linux")]
fn in_huge_pages(map: &MappedFile) {
    drop(map.map().advise(memmap2::Advice::HugePage));
}

/// Does nothing on this system.
#[cfg(not(target_os = "linux"))]
fn in_huge_pages(_map: &MappedFile) {}

/// SHA-256 of a file that nothing maps. It is not resident, and leaves the page cache
/// behind: a budget has no room for it.
pub(crate) fn hash_of(path: &Path) -> Result<[u8; 32]> {
    let failed = |source| Error::Io { doing: "read", path: path.to_owned(), source };
    let mut file = regular::open(path).map_err(failed)?;
    let (mut hash, mut piece, mut at) = (Sha256::new(), vec![0; PIECE], 0_usize);
    loop {
        match file.read(&mut piece) {
            Ok(0) => return Ok(hash.finalize().into()),
            Ok(n) => {
                hash.update(&piece[..n]);
                at += n;
                forget(&file, at);
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(failed(e)),
        }
    }
}

/// Bytes that are read at once.
const PIECE: usize = 1 << 20;

/// Drops the first bytes of a file from the page cache. From the start, since the kernel keeps what lies in one piece of its
/// own with bytes further on until these are dropped, too.
#[cfg(target_os = "linux")]
pub(crate) fn forget(file: &File, len: usize) {
    use std::os::fd::AsRawFd as _;
    // SAFETY: a hint on a descriptor that is open; no memory is passed. Should the system not take it, nothing is lost.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, len as libc::off_t, libc::POSIX_FADV_DONTNEED) };
}

/// Does nothing on this system.
#[cfg(not(target_os = "linux"))]
pub(crate) fn forget(_file: &File, _len: usize) {}

pub(crate) fn check_hash(info: &FileRef, path: &Path, found: [u8; 32]) -> Result<()> {
    if found == info.sha256 {
        Ok(())
    } else {
        Err(Error::Changed { path: path.to_owned(), expected: info.sha256, found })
    }
}
