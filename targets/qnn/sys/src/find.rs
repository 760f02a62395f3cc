//! Where the library is. It is installed, never part of moec: its license does not let it be given on.

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
/// What reads context binaries and DLC.
pub const SYSTEM: &str = "libQnnSystem.so";

/// A folder that has the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installation {
    folder: PathBuf,
}

impl Installation {
    /// Looks in the folder that [`VARIABLE`] names, or else where `cargo xtask qnn` installs, in moec's cache folder.
    ///
    /// # Errors
    /// [`Error::NotInstalled`], or [`Error::NoLibrary`] if a part is missing.
    pub fn find(cache: &Path) -> Result<Self> {
        match std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty()) {
            Some(folder) => Self::at(PathBuf::from(folder)),
            None => Self::installed(&cache.join("qnn")),
        }
    }

    /// The folder with the library's files.
    ///
    /// # Errors
    /// [`Error::NotInstalled`], or [`Error::NoLibrary`] if a part is missing.
    pub fn at(folder: impl Into<PathBuf>) -> Result<Self> {
        let folder = folder.into();
        if !folder.is_dir() {
            return Err(Error::NotInstalled { path: folder });
        }
        match [HTP, IR, SYSTEM].into_iter().find(|name| !folder.join(name).is_file()) {
            Some(name) => Err(Error::NoLibrary { folder, name: name.into() }),
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

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A file of it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}
