//! The files of a bundle. Each is opened once, so a reader gets the bytes that were checked, even if the path
//! changes.
//!
//! Every program knows the files that its plan names: weights, tokenizer, GPU kernels. The manifest lists all
//! other files; it is read if all files are to be checked.

use crate::bundle::program::Program;
use crate::error::{Error, Result};
use crate::platform::mapped::MappedFile;
use crate::platform::regular::{self, FileId, Limit};
use crate::weights::store::CheckLevel;
use moec_ir::plan::{FileRef, Plan};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Seek as _};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Reader of a bundle, or of a folder in it. Files are named by paths with `/`. Clones share their mappings.
///
/// A library that takes a path ([`BundleReader::path`]) opens the file itself, so it may read other bytes
/// than were checked. Core ML's packages are read this way.
#[derive(Clone, Debug)]
pub struct BundleReader {
    bundle: Arc<Listing>,
    /// Prefix of names: empty, or the folder with a `/`.
    prefix: String,
}

/// A bundle, and its known files.
#[derive(Debug)]
struct Listing {
    folder: PathBuf,
    files: BTreeMap<String, FileRef>,
    check: CheckLevel,
    /// Whether these are all files.
    whole: bool,
    maps: Mutex<BTreeMap<String, Arc<MappedFile>>>,
}

impl BundleReader {
    fn new(folder: &Path, files: &[FileRef], check: CheckLevel, whole: bool) -> Self {
        let files = files.iter().map(|f| (f.path.clone(), f.clone())).collect();
        let folder = folder.to_owned();
        let bundle = Arc::new(Listing { folder, files, check, whole, maps: Mutex::default() });
        Self { bundle, prefix: String::new() }
    }

    /// Reader of a folder without known files. Nothing is checked.
    pub fn unchecked(folder: &Path) -> Self {
        Self::new(folder, &[], CheckLevel::Sizes, false)
    }

    /// Reader of the bundle of a plan. Only the files that the plan names are checked.
    pub fn of_plan(folder: &Path, plan: &Plan, check: CheckLevel) -> Self {
        Self::new(folder, &plan.files, check, false)
    }

    /// Reader of a bundle with these files. If all files are checked, any other file is refused.
    pub fn of_manifest(folder: &Path, files: &[FileRef], check: CheckLevel) -> Self {
        Self::new(folder, files, check, true)
    }

    /// Reader of a folder in this one.
    #[must_use]
    pub fn below(&self, folder: &str) -> Self {
        Self { bundle: Arc::clone(&self.bundle), prefix: format!("{}{folder}/", self.prefix) }
    }

    /// A reader of the same files with mappings of its own: files that are read again are checked again.
    #[must_use]
    pub fn reopened(&self) -> Self {
        let Listing { folder, files, check, whole, .. } = &*self.bundle;
        let (folder, files) = (folder.clone(), files.clone());
        let bundle = Listing { folder, files, check: *check, whole: *whole, maps: Mutex::default() };
        Self { bundle: Arc::new(bundle), prefix: self.prefix.clone() }
    }

    /// Folder of the files: the bundle's, or one inside of it.
    pub fn folder(&self) -> PathBuf {
        self.bundle.folder.join(&self.prefix)
    }

    /// Extent of the checks.
    pub fn level(&self) -> CheckLevel {
        self.bundle.check
    }

    /// All files of the bundle, if they are known.
    pub fn listed(&self) -> Option<impl Iterator<Item = &FileRef>> {
        self.bundle.whole.then(|| self.bundle.files.values())
    }

    /// Path of a file, for messages and for libraries that open it themselves.
    ///
    /// # Errors
    /// A path outside of the bundle.
    pub fn path(&self, name: &str) -> Result<PathBuf> {
        file_path(&self.bundle.folder, &format!("{}{name}", self.prefix))
    }

    /// Opens a file.
    ///
    /// # Errors
    /// A path outside of the bundle; a file that is missing, not listed, or of another size.
    pub fn open(&self, name: &str) -> Result<CheckedFile> {
        let name = format!("{}{name}", self.prefix);
        let known = self.bundle.files.get(&name);
        let file = BundleFile::open(&self.bundle.folder, &name, known.map(|of| of.bytes))?;
        if known.is_none() && self.bundle.whole && self.bundle.check == CheckLevel::All {
            return Err(Error::unlisted(file.path));
        }
        let known = known.filter(|of| self.bundle.check.hashes(of.bytes)).cloned();
        Ok(CheckedFile { file, known })
    }

    /// Reads a file whole.
    ///
    /// # Errors
    /// As [`BundleReader::open`] and [`CheckedFile::read`].
    pub fn read(&self, name: &str, limit: Limit) -> Result<Vec<u8>> {
        self.open(name)?.read(limit)
    }

    /// As [`BundleReader::read`]; `None` if there is no such file.
    ///
    /// # Errors
    /// As [`BundleReader::read`].
    pub fn read_if_any(&self, name: &str, limit: Limit) -> Result<Option<Vec<u8>>> {
        match self.read(name, limit) {
            Err(Error::MissingFile(_)) => Ok(None),
            read => read.map(Some),
        }
    }

    /// Maps a file, once for this reader and its clones. See [`MappedFile::open`] for changes by other
    /// processes.
    ///
    /// # Errors
    /// As [`BundleReader::open`]; other content; an operation that the operating system refuses.
    pub fn map(&self, name: &str) -> Result<Arc<MappedFile>> {
        let mut maps = self.bundle.maps.lock().unwrap_or_else(PoisonError::into_inner);
        let name_in_bundle = format!("{}{name}", self.prefix);
        if let Some(map) = maps.get(&name_in_bundle) {
            return Ok(Arc::clone(map));
        }
        let CheckedFile { file, known } = self.open(name)?;
        let map = MappedFile::of(&file.file, &file.path).map_err(file.failed("map"))?;
        known.map_or(Ok(()), |of| file.check_hash(&of, Sha256::digest(&*map).into()))?;
        let map = Arc::new(map);
        maps.insert(name_in_bundle, Arc::clone(&map));
        Ok(map)
    }
}

/// An open file of a bundle, with its expected content if that is checked.
#[derive(Debug)]
pub struct CheckedFile {
    file: BundleFile,
    known: Option<FileRef>,
}

impl CheckedFile {
    /// Path at which it was opened.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Reads the whole file that was opened, even if the path now names another one. May be called
    /// repeatedly.
    ///
    /// # Errors
    /// [`Error::BadFile`]; a file that cannot be read, or with more bytes than the limit.
    pub fn read(&self, limit: Limit) -> Result<Vec<u8>> {
        let bytes = regular::read_open(&self.file.file, limit).map_err(self.file.failed("read"))?;
        self.known.as_ref().map_or(Ok(()), |of| self.file.check_hash(of, Sha256::digest(&bytes).into()))?;
        Ok(bytes)
    }

    /// SHA-256 of its content.
    ///
    /// # Errors
    /// [`Error::BadFile`]; a file that cannot be read.
    pub fn digest(&self) -> Result<[u8; 32]> {
        let found = self.file.digest()?;
        self.known.as_ref().map_or(Ok(()), |of| self.file.check_hash(of, found))?;
        Ok(found)
    }
}

/// An open file of the bundle.
#[derive(Debug)]
pub(crate) struct BundleFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
}

impl BundleFile {
    /// Opens a file by its name in the bundle. Its size must be `bytes`, if known: this check costs nothing
    /// and catches most damage.
    ///
    /// # Errors
    /// A path outside of the bundle; a file that is missing or has another size.
    pub(crate) fn open(bundle: &Path, name: &str, bytes: Option<u64>) -> Result<Self> {
        let path = file_path(bundle, name)?;
        let failed = |source: io::Error| match source.kind() {
            ErrorKind::NotFound => Error::MissingFile(path.clone()),
            _ => Error::io("read", path.clone(), source),
        };
        let file = regular::open(&path).map_err(failed)?;
        let found = file.metadata().map_err(failed)?.len();
        match bytes.filter(|&expected| expected != found) {
            Some(expected) => Err(Error::wrong_size(path, expected, found)),
            None => Ok(Self { path, file }),
        }
    }

    fn failed(&self, doing: &'static str) -> impl Fn(io::Error) -> Error {
        move |source| Error::io(doing, self.path.clone(), source)
    }

    /// Identity of the file.
    ///
    /// # Errors
    /// [`Error::Io`] if the operating system refuses.
    pub(crate) fn identity(&self) -> Result<Option<FileId>> {
        regular::identity(&self.file).map_err(self.failed("read"))
    }

    /// Maps the file; `None` if it is empty.
    pub(crate) fn map(&self, info: &FileRef) -> Result<Option<MappedFile>> {
        if info.bytes == 0 {
            return Ok(None);
        }
        let map = MappedFile::of(&self.file, &self.path).map_err(self.failed("map"))?;
        if map.len() as u64 == info.bytes {
            in_huge_pages(&map);
            Ok(Some(map))
        } else {
            Err(Error::wrong_size(&self.path, info.bytes, map.len() as u64))
        }
    }

    /// Compares the SHA-256 of a file that is not mapped.
    ///
    /// # Errors
    /// [`Error::BadFile`]; a file that cannot be read.
    pub(crate) fn check(&self, info: &FileRef) -> Result<()> {
        self.check_hash(info, self.digest()?)
    }

    /// SHA-256 of a file that is not mapped. Its pages leave the page cache: a budget has no room for them.
    fn digest(&self) -> Result<[u8; 32]> {
        let (mut hash, mut piece, mut at) = (Sha256::new(), vec![0; PIECE], 0_usize);
        let mut file = &self.file;
        file.rewind().map_err(self.failed("read"))?;
        loop {
            match file.read(&mut piece) {
                Ok(0) => return Ok(hash.finalize().into()),
                Ok(n) => {
                    hash.update(&piece[..n]);
                    at += n;
                    forget(file, at);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.failed("read")(e)),
            }
        }
    }

    pub(crate) fn check_hash(&self, info: &FileRef, found: [u8; 32]) -> Result<()> {
        if found == info.sha256 { Ok(()) } else { Err(Error::changed(&self.path, &info.sha256, &found)) }
    }
}

/// All files that a program names, in its order, each opened once. Weights of other hosts may be missing.
#[derive(Clone, Debug)]
pub(crate) struct BundleFiles(Arc<[Option<BundleFile>]>);

impl BundleFiles {
    /// Opens them.
    ///
    /// # Errors
    /// As [`BundleFile::open`].
    pub(crate) fn open(program: &Program, bundle: &Path) -> Result<Self> {
        let open =
            |(index, info): (u32, &FileRef)| match BundleFile::open(bundle, &info.path, Some(info.bytes)) {
                Err(Error::MissingFile(_)) if program.may_lack(index) => Ok(None),
                opened => opened.map(Some),
            };
        (0..).zip(&program.files).map(open).collect::<Result<_>>().map(Self)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Option<&BundleFile>> {
        self.0.iter().map(Option::as_ref)
    }

    /// All of them, with `None` for a missing one that is not read.
    ///
    /// # Errors
    /// [`Error::MissingFile`].
    pub(crate) fn reading(
        &self,
        program: &Program,
        is_read: &dyn Fn(u32) -> bool,
    ) -> Result<Vec<Option<&BundleFile>>> {
        let files = (0..).zip(&program.files).zip(self.iter());
        let found = |((i, info), file): ((u32, &FileRef), Option<_>)| match file {
            None if is_read(i) => Err(Error::MissingFile(info.path.clone().into())),
            file => Ok(file),
        };
        files.map(found).collect()
    }

    /// File at an index of the plan.
    ///
    /// # Errors
    /// [`Error::Bundle`] for an index out of range, or of a file that is missing.
    pub(crate) fn get(&self, index: u32) -> Result<&BundleFile> {
        let file = self.0.get(index as usize).and_then(Option::as_ref);
        file.ok_or_else(|| Error::plan(format!("there is no file {index}")))
    }
}

/// The path of a file of the bundle. Absolute paths and `..` are refused.
pub(crate) fn file_path(bundle: &Path, relative: &str) -> Result<PathBuf> {
    let path = Path::new(relative);
    if path.components().next().is_none() || path.components().any(|c| !matches!(c, Component::Normal(_))) {
        let what = format!("the plan names `{relative}`, which is not a path inside the bundle");
        return Err(Error::Bundle(what));
    }
    Ok(bundle.join(path))
}

/// Requests huge pages, where the file system supports them (ext4 and XFS of recent Linux). One or two faults
/// then read and map a matrix of an expert, instead of one per sixteen small pages. A hint.
#[cfg(target_os = "linux")]
fn in_huge_pages(map: &MappedFile) {
    drop(map.map().advise(memmap2::Advice::HugePage));
}

/// Does nothing on this system.
#[cfg(not(target_os = "linux"))]
fn in_huge_pages(_map: &MappedFile) {}

/// Bytes of one read.
const PIECE: usize = 1 << 20;

/// Drops the first `len` bytes of a file from the page cache. The range begins at 0, because the kernel keeps
/// a folio until all of its bytes are dropped.
#[cfg(target_os = "linux")]
pub(crate) fn forget(file: &File, len: usize) {
    use std::os::fd::AsRawFd as _;
    // SAFETY: a hint on an open descriptor; no memory is passed. If the operating system ignores it, nothing
    // is lost.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, len as libc::off_t, libc::POSIX_FADV_DONTNEED) };
}

/// Does nothing on this system.
#[cfg(not(target_os = "linux"))]
pub(crate) fn forget(_file: &File, _len: usize) {}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const TEXT: Limit = regular::TEXT;

    /// A folder with files, and their rows of a manifest.
    fn bundle(files: &[(&str, &str)]) -> (tempfile::TempDir, Vec<FileRef>) {
        let dir = tempfile::tempdir().unwrap();
        let listed = files.iter().map(|(name, text)| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            FileRef {
                path: (*name).to_owned(),
                bytes: text.len() as u64,
                sha256: Sha256::digest(text).into(),
            }
        });
        let listed = listed.collect();
        (dir, listed)
    }

    /// Replaces a file by another one, as a user might do while it is in use.
    fn replace(path: &Path, text: &str) {
        let other = path.with_extension("other");
        fs::write(&other, text).unwrap();
        fs::rename(other, path).unwrap();
    }

    #[test]
    fn opened_file_is_read_after_replacement() {
        let (dir, listed) = bundle(&[("a/x", "first")]);
        for check in [CheckLevel::Sizes, CheckLevel::Small, CheckLevel::All] {
            let reader = BundleReader::of_manifest(dir.path(), &listed, check);
            let path = dir.path().join("a/x");
            replace(&path, "first");
            let (file, map) = (reader.open("a/x").unwrap(), reader.map("a/x").unwrap());
            replace(&path, "other");
            assert_eq!((file.path(), &*file.read(TEXT).unwrap()), (&*path, &b"first"[..]));
            assert_eq!((&**map, &**reader.below("a").map("x").unwrap()), (&b"first"[..], &b"first"[..]));
            assert_eq!(file.digest().unwrap(), listed[0].sha256);
            // Opening the path now gives the other file, or an error.
            match reader.read("a/x", TEXT) {
                Ok(bytes) => assert!(check == CheckLevel::Sizes && bytes == b"other"),
                Err(e) => assert!(check > CheckLevel::Sizes && is_changed(&e), "{e}"),
            }
        }
    }

    fn is_changed(e: &Error) -> bool {
        matches!(e, Error::BadFile { what, .. } if what.starts_with("was changed"))
    }

    #[test]
    fn changed_content_is_rejected_by_every_read() {
        let (dir, listed) = bundle(&[("x", "first")]);
        let reader = BundleReader::of_manifest(dir.path(), &listed, CheckLevel::Small);
        let file = reader.open("x").unwrap();
        // A change inside of the same file.
        fs::write(dir.path().join("x"), "other").unwrap();
        let changed = |e: Error| is_changed(&e) && e.to_string().contains("x`");
        assert!(changed(file.read(TEXT).unwrap_err()) && changed(file.digest().unwrap_err()));
        assert!(changed(reader.read("x", TEXT).unwrap_err()));
        assert!(changed(reader.read_if_any("x", TEXT).unwrap_err()));
        assert!(changed(reader.map("x").unwrap_err()));
        fs::write(dir.path().join("x"), "longer").unwrap();
        let e = reader.open("x").unwrap_err().to_string();
        assert!(e.ends_with("x` has 6 bytes, but the build wrote 5"), "{e}");
        fs::remove_file(dir.path().join("x")).unwrap();
        assert!(matches!(reader.open("x"), Err(Error::MissingFile(_))));
        assert_eq!(reader.read_if_any("x", TEXT).unwrap(), None);
    }

    #[test]
    fn unlisted_files_are_read_unless_all_are_checked() {
        let (dir, mut listed) = bundle(&[("x", "first"), ("more", "text")]);
        listed.pop();
        let all = |check| BundleReader::of_manifest(dir.path(), &listed, check);
        assert_eq!(all(CheckLevel::Small).read("more", TEXT).unwrap(), b"text");
        assert_eq!(BundleReader::unchecked(dir.path()).read("more", TEXT).unwrap(), b"text");
        assert!(
            matches!(all(CheckLevel::All).read("more", TEXT), Err(Error::BadFile { what, .. }) if what.contains("not in the bundle's manifest"))
        );
    }

    #[test]
    fn names_stay_in_the_bundle_and_are_of_regular_files() {
        let (dir, _) = bundle(&[("a/x", "first")]);
        let reader = BundleReader::unchecked(dir.path());
        for name in ["../x", "/etc/passwd", "", "a/../../x"] {
            assert!(matches!(reader.read(name, TEXT), Err(Error::Bundle(_))), "{name}");
        }
        assert!(matches!(reader.below("a").read("../a/x", TEXT), Err(Error::Bundle(_))));
        assert!(matches!(reader.below("a").read("/etc/passwd", TEXT), Err(Error::MissingFile(_))));
        assert_eq!(reader.below("a").folder(), dir.path().join("a/"));
        assert!(reader.read("a", TEXT).unwrap_err().to_string().contains("a folder"));
    }
}
