//! Finds and starts `moec-coreml`, the program that turns [programs](crate::program) into packages.
//!
//! It embeds Python for coremltools, so it is not part of moec's own binary, which starts without Python.
//! Jobs go to its stdin as one JSON object. It reports finished jobs on stdout, one JSON object per line.

mod error;
mod protocol;

pub use error::HelperError;
pub use protocol::{Emitted, Versions};

use crate::program::{Program, about};
use protocol::{About, Event, Job, Jobs, PROTOCOL};
use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

/// Name of the program.
pub const PROGRAM: &str = "moec-coreml";
/// Variable that names the program.
pub const PROGRAM_VAR: &str = "MOEC_COREML_HELPER";
/// Variable that names a virtual environment with coremltools.
pub const PYTHON_VAR: &str = "MOEC_COREML_PYTHON";
/// Command that installs both.
pub const INSTALL: &str = "cargo xtask coreml";

/// Description of every package for people.
const ABOUT: About = About { author: about::AUTHOR, license: about::LICENSE, version: about::VERSION };

/// Bytes kept of the program's stderr, to which coremltools writes many remarks.
const TAIL: usize = 4096;

/// The program and the Python packages that it is to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Helper {
    program: PathBuf,
    venv: PathBuf,
}

/// A package to be written.
#[derive(Clone, Copy, Debug)]
pub struct Package<'a> {
    /// Its program; verified.
    pub program: &'a Program,
    /// Folder that its weights' files are relative to.
    pub weights: &'a Path,
    /// The package, a folder whose name ends in `.mlpackage`; replaced if it is there.
    pub out: &'a Path,
}

impl Helper {
    /// A program and a virtual environment.
    pub fn new(program: impl Into<PathBuf>, venv: impl Into<PathBuf>) -> Self {
        Self { program: program.into(), venv: venv.into() }
    }

    /// Looks where `cargo xtask coreml` installs, in moec's cache folder; [`PROGRAM_VAR`] and [`PYTHON_VAR`]
    /// come first.
    ///
    /// # Errors
    /// One of the two is not there.
    pub fn find(cache: &Path) -> Result<Self, HelperError> {
        let from = |var: &str| std::env::var_os(var).filter(|v| !v.is_empty()).map(PathBuf::from);
        Self::among(from(PROGRAM_VAR), from(PYTHON_VAR), cache)
    }

    fn among(program: Option<PathBuf>, venv: Option<PathBuf>, cache: &Path) -> Result<Self, HelperError> {
        let installed = cache.join("coreml");
        let program = program.unwrap_or_else(|| installed.join("bin").join(PROGRAM));
        let venv = venv.unwrap_or_else(|| installed.join("venv"));
        if !program.is_file() {
            return Err(HelperError::NoProgram { path: program });
        }
        if !venv.is_dir() {
            return Err(HelperError::NoPython { path: venv });
        }
        Ok(Self { program, venv })
    }

    /// Starts it and requests its versions: a test that it works.
    ///
    /// # Errors
    /// It does not start, coremltools is missing or has another version, or the protocol's version differs.
    pub fn versions(&self) -> Result<Versions, HelperError> {
        let mut found = None;
        self.run("versions", None, &mut |event| {
            if let Event::Versions(versions) = event {
                found = Some(versions);
            }
        })?;
        let versions = found.ok_or_else(|| self.silent("it gave no versions"))?;
        if versions.protocol != PROTOCOL {
            return Err(HelperError::Protocol { path: self.program.clone(), found: versions.protocol });
        }
        Ok(versions)
    }

    /// Writes packages, in order; `progress` is called for each finished one.
    ///
    /// # Errors
    /// The first that cannot be written; those before it stay.
    pub fn emit(
        &self,
        packages: &[Package],
        progress: &mut dyn FnMut(&Emitted),
    ) -> Result<Vec<Emitted>, HelperError> {
        let packages: Vec<_> =
            packages.iter().map(|p| Job { program: p.program, weights: p.weights, out: p.out }).collect();
        let jobs = serde_json::to_vec(&Jobs { protocol: PROTOCOL, about: ABOUT, packages: &packages })
            .map_err(|e| self.silent(&format!("its jobs cannot be written down: {e}")))?;
        let mut done = Vec::new();
        self.run("emit", Some(&jobs), &mut |event| {
            if let Event::Package(emitted) = event {
                progress(&emitted);
                done.push(emitted);
            }
        })?;
        if done.len() == packages.len() {
            Ok(done)
        } else {
            Err(self.silent(&format!("it wrote {} packages of {}", done.len(), packages.len())))
        }
    }

    /// Runs the program with this input, and passes on its messages until it ends.
    fn run(
        &self,
        subcommand: &str,
        input: Option<&[u8]>,
        hear: &mut dyn FnMut(Event),
    ) -> Result<(), HelperError> {
        let mut command = Command::new(&self.program);
        command.args([OsStr::new("--venv"), self.venv.as_os_str(), OsStr::new(subcommand)]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .map_err(|e| HelperError::Start { path: self.program.clone(), what: e.to_string() })?;
        // The program reads all of stdin before it writes. If it ends early, the pipe is closed; the exit
        // status then reports the reason.
        if let Some(mut stdin) = child.stdin.take() {
            let _ = stdin.write_all(input.unwrap_or_default());
        }
        let stderr = child.stderr.take().map(|mut pipe| {
            thread::spawn(move || {
                let mut all = Vec::new();
                let _ = pipe.read_to_end(&mut all);
                let tail = all.len().saturating_sub(TAIL);
                String::from_utf8_lossy(&all[tail..]).trim().to_owned()
            })
        });
        let mut refused = None;
        let mut unreadable = None;
        for line in child.stdout.take().into_iter().flat_map(|pipe| BufReader::new(pipe).lines()) {
            let line = line.unwrap_or_default();
            match serde_json::from_str(&line) {
                Ok(Event::Error { kind, message, hint }) => refused = Some((kind, message, hint)),
                Ok(event) => hear(event),
                Err(_) => unreadable = Some(line),
            }
        }
        let stderr_text = stderr.and_then(|reader| reader.join().ok()).unwrap_or_default();
        let status = child
            .wait()
            .map_err(|e| HelperError::Start { path: self.program.clone(), what: e.to_string() })?;
        if let Some((kind, message, hint)) = refused {
            return Err(error::refused(&kind, message, hint, &self.venv));
        }
        if !status.success() {
            return Err(error::died(&self.program, status, stderr_text));
        }
        unreadable.map_or(Ok(()), |line| Err(self.silent(&format!("it printed `{line}`"))))
    }

    fn silent(&self, what: &str) -> HelperError {
        HelperError::Talk { path: self.program.clone(), what: what.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_helper_parts_are_named_with_their_installer() {
        let cache = tempfile::tempdir().unwrap();
        let none = Helper::among(None, None, cache.path()).unwrap_err();
        assert!(matches!(&none, HelperError::NoProgram { path } if path.ends_with("coreml/bin/moec-coreml")));
        assert!(none.hint().contains(INSTALL), "{none}");

        let program = cache.path().join("helper");
        std::fs::write(&program, "").unwrap();
        let none = Helper::among(Some(program.clone()), None, cache.path()).unwrap_err();
        assert!(matches!(&none, HelperError::NoPython { path } if path.ends_with("coreml/venv")));

        let venv = cache.path().to_owned();
        let found = Helper::among(Some(program.clone()), Some(venv.clone()), cache.path()).unwrap();
        assert_eq!(found, Helper::new(program, venv));
    }
}
