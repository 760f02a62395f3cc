//! Search for the library. It is installed separately, since its licence does not permit redistribution.

use crate::error::{Error, Result, VARIABLE};
use std::path::{Path, PathBuf};

/// The package of PyPI that carries it.
pub const PACKAGE: &str = "onnxruntime-qnn";
/// Version of the package.
pub const PACKAGE_VERSION: &str = "2.7.0";
/// Version of the library that the package carries, and that this crate is written for.
pub const QAIRT: &str = "2.51";

/// The backend that compiles for the Hexagon tensor processor, and emulates it on x86-64.
pub const HTP: &str = "libQnnHtp.so";
/// The backend that writes graphs as DLC.
pub const IR: &str = "libQnnIr.so";
/// Name of the library that reads context binaries and DLC.
pub const SYSTEM: &str = "libQnnSystem.so";

/// A folder that has the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installation {
    folder: PathBuf,
}

impl Installation {
    /// Looks in the folder that [`VARIABLE`] names, or else where `cargo xtask qnn` installs, in moec's cache
    /// folder.
    ///
    /// # Errors
    /// [`Error::NotInstalled`], or [`Error::NoLibrary`] if a part is missing.
    pub fn find(cache: &Path) -> Result<Self> {
        match std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty()) {
            Some(folder) => Self::at(PathBuf::from(folder)),
            None => Self::installed(&cache.join("qnn")),
        }
    }

    /// Looks for the files that execute context binaries, which are fewer than those that write them: in the
    /// folder that [`VARIABLE`] names, or else in `run_folder`. Otherwise the operating system's loader
    /// finds them, and reports if they are missing.
    ///
    /// # Errors
    /// [`Error::NotInstalled`] or [`Error::NoLibrary`] if [`VARIABLE`] names a folder without it, or
    /// `run_folder` has only a part of it.
    pub fn to_execute(run_folder: &Path) -> Result<Self> {
        match std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty()) {
            Some(folder) => Self::with(PathBuf::from(folder), &[HTP, SYSTEM]),
            None => Self::to_execute_in(run_folder),
        }
    }

    fn to_execute_in(run_folder: &Path) -> Result<Self> {
        if [HTP, SYSTEM].into_iter().any(|name| run_folder.join(name).is_file()) {
            return Self::with(run_folder.to_owned(), &[HTP, SYSTEM]);
        }
        // The loader takes a name without a folder for one that it is to look for.
        Ok(Self { folder: PathBuf::new() })
    }

    /// The folder with the library's files.
    ///
    /// # Errors
    /// [`Error::NotInstalled`], or [`Error::NoLibrary`] if a part is missing.
    pub fn at(folder: impl Into<PathBuf>) -> Result<Self> {
        Self::with(folder.into(), &[HTP, IR, SYSTEM])
    }

    fn with(folder: PathBuf, parts: &[&str]) -> Result<Self> {
        if !folder.is_dir() {
            return Err(Error::NotInstalled { path: folder });
        }
        match parts.iter().find(|name| !folder.join(name).is_file()) {
            Some(name) => Err(Error::NoLibrary { folder, name: (*name).into() }),
            None => Ok(Self { folder }),
        }
    }

    /// A virtual environment of Python that has the package.
    ///
    /// # Errors
    /// As [`Installation::at`]; [`Error::Version`] if it is the package of another version.
    pub fn installed(venv: &Path) -> Result<Self> {
        let missing = || Error::NotInstalled { path: venv.to_owned() };
        let entries = std::fs::read_dir(venv.join("lib")).map_err(|_| missing())?;
        // `lib/python3.11`; the names are sorted so that the same one is taken every time.
        let mut packages: Vec<PathBuf> = entries
            .filter_map(|e| Some(e.ok()?.path().join("site-packages")))
            .filter(|p| p.is_dir())
            .collect();
        packages.sort();
        let packages =
            packages.into_iter().find(|p| p.join("onnxruntime_qnn").is_dir()).ok_or_else(missing)?;
        let info = format!("onnxruntime_qnn-{PACKAGE_VERSION}.dist-info");
        if !packages.join(&info).is_dir() {
            let what = format!("it is not of {PACKAGE} {PACKAGE_VERSION}");
            return Err(Error::Version { path: packages.join("onnxruntime_qnn"), what });
        }
        Self::at(packages.join("onnxruntime_qnn"))
    }

    /// The folder; empty where the operating system's loader looks for the files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A file of it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtime_libraries_are_found_beside_or_by_the_loader() {
        let folder = tempfile::tempdir().unwrap();
        let found = Installation::to_execute_in(folder.path()).unwrap();
        assert_eq!(found.file(HTP), Path::new(HTP));
        std::fs::write(folder.path().join(HTP), "").unwrap();
        let half = Installation::to_execute_in(folder.path()).unwrap_err();
        assert_eq!(half, Error::NoLibrary { folder: folder.path().into(), name: SYSTEM.into() });
        std::fs::write(folder.path().join(SYSTEM), "").unwrap();
        let found = Installation::to_execute_in(folder.path()).unwrap();
        assert_eq!(found.file(HTP), folder.path().join(HTP));
        // Writing context binaries requires more files.
        let few = Installation::at(folder.path()).unwrap_err();
        assert!(matches!(few, Error::NoLibrary { name, .. } if name == IR));
    }
}
