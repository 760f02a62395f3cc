//! Protocol between moec and its helper.

use crate::program::Program;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Version of the protocol. `emit.py` has the same.
pub(super) const PROTOCOL: u32 = 2;

/// Requests.
#[derive(Serialize)]
pub(super) struct Jobs<'a> {
    pub(super) protocol: u32,
    pub(super) about: About,
    pub(super) packages: &'a [Job<'a>],
}

/// Description of every package for people.
#[derive(Serialize)]
pub(super) struct About {
    pub(super) author: &'static str,
    pub(super) license: &'static str,
    pub(super) version: &'static str,
}

/// A package that is requested.
#[derive(Serialize)]
pub(super) struct Job<'a> {
    pub(super) program: &'a Program,
    pub(super) weights: &'a Path,
    pub(super) out: &'a Path,
}

/// A package that has been written.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Emitted {
    /// Name of its program.
    pub name: String,
    /// The folder.
    pub out: PathBuf,
    /// Bytes of its weight file.
    pub weight_bytes: u64,
    /// Bytes in all.
    pub bytes: u64,
}

/// Versions that decide the bytes of a package, besides its program.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Versions {
    /// Version of the protocol.
    pub protocol: u32,
    /// Version of Python.
    pub python: String,
    /// Version of coremltools.
    pub coremltools: String,
    /// Version of numpy.
    pub numpy: String,
}

/// A line of the helper's output.
#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event {
    Versions(Versions),
    Package(Emitted),
    Done,
    Error { kind: String, message: String, hint: Option<String> },
}
