//! Object code of single kernels, kept in the cache by what it was compiled from.
//!
//! Most builds compile kernels that an earlier build has compiled: other weights, another profile, the same
//! shapes. The key is a SHA-256 of everything that decides the object, including the module's LLVM IR. So a
//! cached object is the one that LLVM would write. Nothing depends on the cache: an entry that is missing or
//! damaged is compiled again.

use moec_base::hashing::{hex, sha256};
use moec_base::{cache_dir, disk};
use moec_cpu::Objects;
use moec_runtime::platform::regular::{self, Limit};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// Folder in the cache.
const FOLDER: &str = "objects";
/// Bytes that the folder holds at most; the entries that were not used for longest go.
const MOST: u64 = 512 << 20;
/// Most bytes of an entry.
const ENTRY: Limit = Limit { what: "cached object code", bytes: 64 << 20 };
/// Bytes of the SHA-256 before an object.
const SUM: usize = 32;

/// The folder of kept objects; without a cache folder nothing is kept.
#[derive(Debug)]
pub struct ObjectCache {
    folder: Option<PathBuf>,
    most: u64,
    /// Whether something was added.
    grown: AtomicBool,
}

impl ObjectCache {
    /// The one in the cache folder.
    pub fn open() -> Self {
        Self::at(cache_dir::path().ok().map(|cache| cache.join(FOLDER)), MOST)
    }

    fn at(folder: Option<PathBuf>, most: u64) -> Self {
        Self { folder, most, grown: AtomicBool::new(false) }
    }

    fn path(&self, source: &[u8]) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(hex(&sha256(source))))
    }
}

impl Objects for ObjectCache {
    fn get(&self, source: &[u8]) -> Option<Vec<u8>> {
        let path = self.path(source)?;
        let mut entry = regular::read(&path, ENTRY).ok()?;
        if entry.len() < SUM {
            return None;
        }
        let object = entry.split_off(SUM);
        if sha256(&object)[..] != entry[..] {
            return None;
        }
        // An object that is used is kept: it gets the time of its last use.
        let _ = File::options().append(true).open(&path).and_then(|f| f.set_modified(SystemTime::now()));
        Some(object)
    }

    fn keep(&self, source: &[u8], object: &[u8]) {
        let Some(path) = self.path(source) else { return };
        // A cache that is full or cannot be written costs the next build time.
        if disk::write_whole(&path, &[&sha256(object)[..], object].concat()).is_ok() {
            self.grown.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for ObjectCache {
    fn drop(&mut self) {
        if let Some(folder) = self.folder.as_ref().filter(|_| self.grown.load(Ordering::Relaxed)) {
            shrink(folder, self.most);
        }
    }
}

/// Removes the entries of a folder that were not used for longest, until it has at most `most` bytes.
fn shrink(folder: &Path, most: u64) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let facts = |path: PathBuf| {
        let data = fs::metadata(&path).ok()?;
        Some((data.modified().ok()?, path, data.len()))
    };
    let mut entries: Vec<_> = entries.filter_map(|e| facts(e.path())).collect();
    let mut bytes: u64 = entries.iter().map(|(.., bytes)| bytes).sum();
    entries.sort();
    for (_, path, size) in entries {
        if bytes <= most {
            break;
        }
        // Another build may have removed it.
        let _ = fs::remove_file(path);
        bytes -= size;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn objects_are_found_by_source_unless_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let cache = ObjectCache::at(Some(folder.path().join("objects")), MOST);
        assert_eq!(cache.get(b"source"), None);
        cache.keep(b"source", b"object");
        assert_eq!(cache.get(b"source").as_deref(), Some(&b"object"[..]));
        assert_eq!(cache.get(b"another"), None);
        let path = cache.path(b"source").unwrap();
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        assert_eq!(cache.get(b"source"), None);
        fs::write(&path, "short").unwrap();
        assert_eq!(cache.get(b"source"), None);
    }

    #[test]
    fn entries_that_were_used_last_stay_when_the_folder_is_full() {
        let folder = tempfile::tempdir().unwrap();
        let cache = ObjectCache::at(Some(folder.path().to_owned()), 3 * (SUM as u64 + 10));
        let age = |source: &[u8], seconds| {
            let file = File::options().append(true).open(cache.path(source).unwrap()).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
        };
        for (i, source) in [b"a", b"b", b"c"].iter().enumerate() {
            cache.keep(*source, &[0; 10]);
            age(*source, i as u64);
        }
        assert!(cache.get(b"a").is_some());
        cache.keep(b"d", &[0; 10]);
        shrink(folder.path(), cache.most);
        assert_eq!([b"a", b"b", b"c", b"d"].map(|s| cache.get(s).is_some()), [true, false, true, true]);
    }

    #[test]
    fn object_cache_without_a_folder_stores_nothing() {
        let cache = ObjectCache::at(None, MOST);
        cache.keep(b"source", b"object");
        assert_eq!(cache.get(b"source"), None);
    }
}
