//! QNN's library, where it is installed: compiles networks, and computes them with its emulator.
//!
//! | | |
//! |---|---|
//! | [`contexts`] | the context binary and the DLC of an artifact |
//! | [`check`] | everything of an artifact executed by the emulator, and by onnxruntime |
//! | [`host`] | whole models on the emulator |
//! | [`device`] | the same, driven as a bundle's `run` does on a phone |
//! | [`graph_io`] | numbers as a graph's inputs and outputs hold them |
//!
//! The library runs in processes of its own, `worker qnn` of moec; [`device`] alone executes it in this
//! process. There is one process for each artifact, so that building twice gives the same bytes
//! (`docs/qnn.md`, A process of its own).

pub(super) mod check;
pub(super) mod contexts;
pub(super) mod device;
mod graph_io;
pub(super) mod host;
mod onnxruntime;

use crate::net::Network;
use crate::onnx;
use moec_backend::Tools;
use moec_backend::error::Error;
use moec_device::{DeviceUnit, Hexagon};
use moec_qnn_sys::worker::{Program, Worker};
use moec_qnn_sys::{self as sys, INSTALL, Installation, LIMIT, Soc};
use moec_runtime::bundle::BundleReader;
use moec_runtime::platform::regular;
use std::path::Path;
use std::time::Duration;

/// Time limit in seconds of a process for one answer, for example to compile one graph.
const SECONDS: u64 = 600;

/// File of an artifact with its graphs compiled for the chip, sharing weights.
pub(super) const CONTEXT: &str = "context.bin";
/// Most bytes of a context binary: the address space of an HTP process.
pub(super) const CONTEXT_BYTES: u64 = 4 << 30;
/// Extension of files that have one graph as it was before it was compiled.
pub(super) const DLC: &str = "dlc";

/// The library, for one chip.
#[derive(Clone, Debug)]
pub(super) struct Library {
    program: Program,
    installation: Installation,
    soc: Soc,
    /// Its version.
    pub(super) build: String,
}

/// Reason that the library cannot be used.
#[derive(Clone, Debug)]
pub(super) struct Unavailable {
    /// Reason.
    pub(super) why: String,
    /// Remedy.
    pub(super) hint: String,
}

impl Unavailable {
    /// One line, which begins with the name of the skipped step.
    pub(super) fn line(&self, skipped: &str) -> String {
        format!("{skipped}: {} ({})", self.why, self.hint)
    }

    /// The same as an error, for callers that require the library.
    pub(super) fn error(self) -> Error {
        Error::environment(self.why).hint(self.hint)
    }

    fn of(error: &sys::Error) -> Self {
        let hint = error.hint().unwrap_or_else(|| format!("install it anew with `{INSTALL}`"));
        // Further lines hold its log.
        Self { why: error.to_string().lines().next().unwrap_or_default().to_owned(), hint }
    }
}

impl Library {
    /// The library for a unit's chip: installed, of the version that moec supports, and loaded once.
    pub(super) fn open(tools: Tools<'_>, unit: &DeviceUnit) -> Result<Self, Unavailable> {
        let chip = unit.hexagon.as_ref().and_then(soc).ok_or_else(|| Unavailable {
            why: format!("moec supports no chip of QNN for `{}`", unit.name),
            hint: "`unit.hexagon.soc` is the number of the chip in QNN".into(),
        })?;
        Self::load(tools, chip)
    }

    /// The library for a chip.
    pub(super) fn load(tools: Tools<'_>, soc: Soc) -> Result<Self, Unavailable> {
        let installation = Installation::find(tools.cache).map_err(|e| Unavailable::of(&e))?;
        let path = tools.moec.ok_or_else(|| Unavailable {
            why: "QNN runs in a process of moec, whose program file cannot be found".into(),
            hint: "start moec by its path".into(),
        })?;
        let arguments = ["worker", "qnn"].map(Into::into).to_vec();
        let program = Program { path: path.to_owned(), arguments, limit: limit()? };
        let library = Self { program, installation, soc, build: String::new() };
        let build = library.worker(false).map_err(|e| Unavailable::of(&e))?.build().to_owned();
        Ok(Self { build, ..library })
    }

    /// Its folder.
    pub(super) fn folder(&self) -> &Path {
        self.installation.folder()
    }

    /// A fresh process.
    pub(super) fn worker(&self, share: bool) -> sys::Result<Worker> {
        Worker::start(&self.program, &self.installation, self.soc, share)
    }
}

/// Time that a process may take for one answer.
fn limit() -> Result<Duration, Unavailable> {
    let Some(given) = std::env::var_os(LIMIT) else { return Ok(Duration::from_secs(SECONDS)) };
    let seconds = given.to_str().and_then(|text| text.parse().ok());
    seconds.map(Duration::from_secs).ok_or_else(|| Unavailable {
        why: format!("`{LIMIT}` is `{}`", given.display()),
        hint: "it must be a whole number of seconds".into(),
    })
}

/// The chip of a device file.
pub(super) fn soc(hexagon: &Hexagon) -> Option<Soc> {
    Soc::numbered(hexagon.soc)
}

/// The networks of an artifact, by ascending size: every `NAME.onnx` of its folder.
///
/// # Errors
/// A folder or a file that cannot be read, for people.
pub(super) fn networks(files: &BundleReader) -> Result<Vec<Network>, String> {
    let folder = files.folder();
    let unreadable = |e: std::io::Error| format!("`{}`: {e}", folder.display());
    let mut names: Vec<String> = Vec::new();
    for entry in folder.read_dir().map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned();
        if Path::new(&name).extension().is_some_and(|e| e == "onnx") {
            names.push(name);
        }
    }
    let read = |name: &String| {
        let bytes = files.read(name, regular::NETWORK).map_err(|e| e.to_string())?;
        onnx::read(&bytes).map_err(|e| format!("`{}`: {e}", folder.join(name).display()))
    };
    let mut all: Vec<Network> = names.iter().map(read).collect::<Result<_, _>>()?;
    let rows = |n: &Network| n.inputs.first().map_or(0, |id| n.tensor(*id).elements());
    all.sort_by(|a, b| (rows(a), &a.name).cmp(&(rows(b), &b.name)));
    Ok(all)
}
