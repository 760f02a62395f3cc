//! Compiled packages, kept between starts.
//!
//! Core ML compiles a package before it loads it and leaves the result in a temporary folder; what it
//! specialises for the Neural Engine it caches itself, by the path of the compiled package. So that path must
//! stay the same: here it is `coreml/compiled/KEY.mlmodelc` in moec's cache folder, where KEY is a hash of
//! the package's files and of the operating system. Nothing is deleted; a folder without which moec compiles
//! anew can be deleted by hand at any time.
//!
//! Reading gigabytes at every start to know KEY would cost more than it saves. The hash of the files is
//! remembered under their paths, sizes and times (`coreml/stamps`), as build tools do. Where all files are to
//! be checked, they are hashed.
//!
//! Core ML opens a package by its path, so it may read other files than those that were hashed: nothing here
//! can prevent that. They are hashed once more when it has compiled them, and what it made is kept only if
//! they are still the same. Files that are replaced and put back while it compiles are not found out.

use moec_ir::plan::FileRef;
use moec_runtime::CheckLevel;
use moec_runtime::bundle::BundleReader;
use moec_runtime::error::{Error, Result};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{self, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Deepest folder of a package.
const DEPTH: usize = 16;

/// The folder of compiled packages.
#[derive(Debug)]
pub(crate) struct Cache {
    home: PathBuf,
}

/// A file of a package.
struct Entry {
    /// Relative to the package, with `/`.
    name: String,
    meta: Metadata,
}

impl Cache {
    /// `$MOEC_CACHE`, `$XDG_CACHE_HOME/moec` or `~/.cache/moec`, and in it `coreml`.
    ///
    /// # Errors
    /// Fails if none of the three is set.
    #[cfg(target_os = "macos")]
    pub(crate) fn open() -> Result<Self> {
        let from = |var: &str| std::env::var_os(var).filter(|v| !v.is_empty()).map(PathBuf::from);
        let home = from("MOEC_CACHE")
            .or_else(|| from("XDG_CACHE_HOME").map(|p| p.join("moec")))
            .or_else(|| from("HOME").map(|p| p.join(".cache/moec")));
        let why = "there is no cache folder for what Core ML compiles: set `MOEC_CACHE` to a folder that you can write";
        let none = || Error::graph("packages", why);
        home.map(|home| Self::at(&home.join("coreml"))).ok_or_else(none)
    }

    fn at(home: &Path) -> Self {
        Self { home: home.to_owned() }
    }

    /// Path of a compiled package of a bundle. What is not there yet is made by `compile`, which gives a
    /// folder that is moved here. `system` is what else decides what compiling gives: the version of the
    /// operating system.
    ///
    /// # Errors
    /// A package that cannot be read, is not as it was built, or is replaced meanwhile; a cache that cannot
    /// be written, and what `compile` says.
    pub(crate) fn compiled(
        &self,
        bundle: &BundleReader,
        package: &str,
        system: &str,
        compile: &mut dyn FnMut(&Path) -> Result<PathBuf>,
    ) -> Result<PathBuf> {
        let content = self.content(bundle, package)?;
        let key = hex(&Sha256::digest(format!("{content}\n{system}")));
        let to = self.home.join("compiled").join(format!("{key}.mlmodelc"));
        if to.is_dir() {
            return Ok(to);
        }
        let path = bundle.path(package)?;
        let made = compile(&path)?;
        if hash(bundle, package, &files(&path)?)? != content {
            let _ = fs::remove_dir_all(made);
            return Err(Error::replaced(path));
        }
        install(&made, &to).map_err(|source| Error::io("write", to.clone(), source))?;
        Ok(to)
    }

    /// Hash of a package's files, remembered while they are the same.
    fn content(&self, bundle: &BundleReader, package: &str) -> Result<String> {
        let path = bundle.path(package)?;
        let failed = |source| Error::io("read", path.clone(), source);
        let files = files(&path)?;
        if bundle.level() == CheckLevel::All {
            return hash(bundle, package, &files);
        }
        let mut stamp = Sha256::new();
        field(&mut stamp, fs::canonicalize(&path).map_err(failed)?.as_os_str().as_encoded_bytes());
        for f in &files {
            let time = f.meta.modified().map_err(failed)?;
            let time = time.duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos());
            field(&mut stamp, f.name.as_bytes());
            stamp.update(f.meta.len().to_le_bytes());
            stamp.update(time.to_le_bytes());
        }
        let stamp = self.home.join("stamps").join(hex(&stamp.finalize()));
        if let Ok(known) = fs::read_to_string(&stamp)
            && known.len() == 64
            && known.bytes().all(|b| b.is_ascii_hexdigit())
        {
            return Ok(known);
        }
        let content = hash(bundle, package, &files)?;
        // A stamp that cannot be written costs time at the next start, and nothing else.
        let _ = fs::create_dir_all(self.home.join("stamps")).and_then(|()| fs::write(&stamp, &content));
        Ok(content)
    }
}

/// Bytes after their length, so that no two sequences of fields are the same bytes.
fn field(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

/// Hash of the names and contents of a package's files: those that are there, and those that the bundle
/// should have.
fn hash(bundle: &BundleReader, package: &str, files: &[Entry]) -> Result<String> {
    let below = |f: &FileRef| f.path.strip_prefix(package)?.strip_prefix('/').map(str::to_owned);
    let mut names: BTreeSet<String> = files.iter().map(|f| f.name.clone()).collect();
    names.extend(bundle.listed().into_iter().flatten().filter_map(below));
    let (bundle, mut content) = (bundle.below(package), Sha256::new());
    for name in names {
        field(&mut content, name.as_bytes());
        content.update(bundle.open(&name)?.digest()?);
    }
    Ok(hex(&content.finalize()))
}

/// The files of a package, by name.
fn files(package: &Path) -> Result<Vec<Entry>> {
    let mut files = Vec::new();
    walk(package, "", DEPTH, &mut files).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => Error::MissingFile(package.to_owned()),
        _ => Error::io("read", package.to_owned(), source),
    })?;
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

/// Collects the files below a folder. Links are refused: they may lead out of the package.
fn walk(folder: &Path, prefix: &str, depth: usize, files: &mut Vec<Entry>) -> io::Result<()> {
    let odd = |name: &str, what: &str| {
        Err(io::Error::new(io::ErrorKind::InvalidData, format!("`{name}` in it is {what}")))
    };
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        let meta = fs::symlink_metadata(entry.path())?;
        if meta.is_dir() {
            if depth == 0 {
                return odd(&name, "nested too deep");
            }
            walk(&entry.path(), &format!("{name}/"), depth - 1, files)?;
        } else if meta.is_file() {
            files.push(Entry { name, meta });
        } else {
            return odd(&name, "neither file nor folder");
        }
    }
    Ok(())
}

/// Moves a folder to its place, in one step; the second of two processes finds the work done.
fn install(made: &Path, to: &Path) -> io::Result<()> {
    let parent = to.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent)?;
    let partial = to.with_extension(format!("partial-{}", std::process::id()));
    let _ = fs::remove_dir_all(&partial);
    // Temporary folders may be on another volume.
    if fs::rename(made, &partial).is_err() {
        copy(made, &partial, DEPTH)?;
        let _ = fs::remove_dir_all(made);
    }
    match fs::rename(&partial, to) {
        Err(_) if to.is_dir() => fs::remove_dir_all(&partial),
        other => other,
    }
}

fn copy(from: &Path, to: &Path, depth: usize) -> io::Result<()> {
    if depth == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "folders are nested too deep"));
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &to, depth - 1)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, b| {
        let _ = write!(text, "{b:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::time::{Duration, SystemTime};

    const PACKAGE: &str = "a.mlpackage";

    struct Case {
        folder: tempfile::TempDir,
        cache: Cache,
    }

    impl Case {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let cache = Cache::at(&folder.path().join("cache/coreml"));
            let case = Self { folder, cache };
            fs::create_dir_all(case.package().join("Data/weights")).unwrap();
            fs::write(case.package().join("Manifest.json"), "{}").unwrap();
            fs::write(case.weights(), [7; 3000]).unwrap();
            case
        }

        fn package(&self) -> PathBuf {
            self.folder.path().join(PACKAGE)
        }

        fn bundle(&self) -> BundleReader {
            BundleReader::unchecked(self.folder.path())
        }

        fn weights(&self) -> PathBuf {
            self.package().join("Data/weights/weight.bin")
        }

        /// Returns the compiled package, and whether it was compiled now.
        fn compiled(&self, system: &str) -> (PathBuf, bool) {
            let mut made = false;
            let path = self.cache.compiled(&self.bundle(), PACKAGE, system, &mut |package| {
                made = true;
                let temporary = self.folder.path().join("tmp.mlmodelc");
                fs::create_dir_all(temporary.join("inner")).unwrap();
                fs::copy(package.join("Manifest.json"), temporary.join("inner/model")).unwrap();
                Ok(temporary)
            });
            let path = path.unwrap();
            assert_eq!(fs::read_to_string(path.join("inner/model")).unwrap(), "{}");
            (path, made)
        }
    }

    #[test]
    fn a_package_is_compiled_once() {
        let case = Case::new();
        let (path, made) = case.compiled("15.1");
        assert!(made && path.extension().unwrap() == "mlmodelc" && path.starts_with(case.folder.path()));
        assert!(!case.folder.path().join("tmp.mlmodelc").exists());
        assert_eq!(case.compiled("15.1"), (path.clone(), false));
        // Another version of the operating system compiles differently.
        let (other, made) = case.compiled("15.2");
        assert!(made && other != path);
    }

    #[test]
    fn compiled_package_is_found_by_content_not_by_path() {
        let case = Case::new();
        let (path, _) = case.compiled("15");
        let moved = case.folder.path().join("b.mlpackage");
        fs::rename(case.package(), &moved).unwrap();
        let found =
            case.cache.compiled(&case.bundle(), "b.mlpackage", "15", &mut |_| panic!("it is compiled"));
        assert_eq!(found.unwrap(), path);
        // Other bytes of the same length are another package, if their modification time has changed.
        fs::rename(&moved, case.package()).unwrap();
        fs::write(case.weights(), [8; 3000]).unwrap();
        let later = SystemTime::now() + Duration::from_secs(10);
        File::options().write(true).open(case.weights()).unwrap().set_modified(later).unwrap();
        let (other, made) = case.compiled("15");
        assert!(made && other != path);
        // The name of a file is part of the content.
        fs::rename(case.weights(), case.package().join("Data/weight.bin")).unwrap();
        assert!(case.compiled("15").1);
    }

    #[test]
    fn damaged_cache_stamp_is_ignored() {
        let case = Case::new();
        let (path, _) = case.compiled("15");
        for stamp in fs::read_dir(case.folder.path().join("cache/coreml/stamps")).unwrap() {
            fs::write(stamp.unwrap().path(), "../../elsewhere").unwrap();
        }
        assert_eq!(case.compiled("15"), (path, false));
    }

    #[test]
    fn failed_compilation_leaves_no_files_and_links_are_rejected() {
        let case = Case::new();
        let failed = || Error::graph("a", "no");
        let e = case.cache.compiled(&case.bundle(), PACKAGE, "15", &mut |_| Err(failed())).unwrap_err();
        assert!(e.to_string().contains("`a`: no"), "{e}");
        assert!(!case.folder.path().join("cache/coreml/compiled").exists());
        let missing = case.folder.path().join("none.mlpackage");
        let e =
            case.cache.compiled(&case.bundle(), "none.mlpackage", "15", &mut |_| Err(failed())).unwrap_err();
        assert!(matches!(e, Error::MissingFile(path) if path == missing));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("/etc", case.package().join("Data/link")).unwrap();
            let e = case.cache.compiled(&case.bundle(), PACKAGE, "15", &mut |_| Err(failed())).unwrap_err();
            assert!(e.to_string().contains("Data/link"), "{e}");
        }
    }

    /// The files of a case, as in a manifest.
    fn listed(case: &Case) -> Vec<FileRef> {
        let of = |name: &str| {
            let bytes = fs::read(case.package().join(name)).unwrap();
            let path = format!("{PACKAGE}/{name}");
            FileRef { path, bytes: bytes.len() as u64, sha256: Sha256::digest(&bytes).into() }
        };
        vec![of("Manifest.json"), of("Data/weights/weight.bin")]
    }

    #[test]
    fn package_changed_after_the_build_is_not_compiled() {
        let case = Case::new();
        let bundle = BundleReader::of_manifest(case.folder.path(), &listed(&case), CheckLevel::All);
        let compile = |bundle: &BundleReader| {
            case.cache.compiled(bundle, PACKAGE, "15", &mut |_| {
                let made = case.folder.path().join("tmp.mlmodelc");
                fs::create_dir_all(&made).unwrap();
                Ok(made)
            })
        };
        compile(&bundle).unwrap();
        // Neither a stamp nor an earlier compilation replaces the check of the files.
        compile(&case.bundle()).unwrap();
        let time = case.weights().metadata().unwrap().modified().unwrap();
        fs::write(case.weights(), [8; 3000]).unwrap();
        File::options().write(true).open(case.weights()).unwrap().set_modified(time).unwrap();
        assert!(compile(&case.bundle()).is_ok());
        assert!(
            matches!(compile(&bundle), Err(Error::BadFile { path, what, .. }) if path == case.weights() && what.contains("changed"))
        );
        fs::remove_file(case.weights()).unwrap();
        assert!(matches!(compile(&bundle), Err(Error::MissingFile(path)) if path == case.weights()));
        fs::write(case.weights(), [7; 3000]).unwrap();
        let more = case.package().join("Data/more");
        fs::write(&more, "").unwrap();
        assert!(
            matches!(compile(&bundle), Err(Error::BadFile { path, what, .. }) if path == more && what.contains("added"))
        );
    }

    #[test]
    fn compilation_of_replaced_files_is_discarded() {
        let case = Case::new();
        let made = case.folder.path().join("tmp.mlmodelc");
        let done = case.cache.compiled(&case.bundle(), PACKAGE, "15", &mut |_| {
            fs::create_dir_all(&made).unwrap();
            fs::write(case.weights(), [8; 3000]).unwrap();
            Ok(made.clone())
        });
        assert!(
            matches!(done, Err(Error::BadFile { path, what, .. }) if path == case.package() && what.contains("replaced"))
        );
        assert!(!made.exists() && !case.folder.path().join("cache/coreml/compiled").exists());
    }

    #[test]
    fn second_process_reuses_finished_work() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("compiled/k.mlmodelc");
        for text in ["first", "second"] {
            let made = folder.path().join(text);
            fs::create_dir_all(&made).unwrap();
            fs::write(made.join("model"), text).unwrap();
            install(&made, &to).unwrap();
            assert!(!made.exists());
        }
        assert_eq!(fs::read_to_string(to.join("model")).unwrap(), "first");
        assert_eq!(fs::read_dir(folder.path().join("compiled")).unwrap().count(), 1);
    }
}
