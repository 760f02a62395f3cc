//! Reading a bundle back.

use super::manifest::{Manifest, digest};
use super::{destination, workspace};
use moec_base::error::{Error, Result, io_error};
use moec_base::paths::{DECISIONS, GRAPH, KERNELS, PLAN, has_weights, is_inside};
use moec_base::progress::Progress;
use moec_cpu::{HostError, HostUnit};
use moec_device::{Device, HOST_BACKEND};
use moec_ir::Module;
use moec_ir::plan::{Plan, TargetInfo};
use moec_passes::decisions::{Decisions, VERSION};
use moec_runtime::CheckLevel;
use moec_runtime::bundle::BundleReader;
use moec_runtime::bundle::manifest as runtime_manifest;
use moec_runtime::platform::cpu;
use moec_runtime::platform::regular;
use std::path::{Path, PathBuf};

/// A bundle on disk, its plan decoded and verified.
#[derive(Debug)]
pub struct Bundle {
    /// Folder.
    pub folder: PathBuf,
    /// Manifest.
    pub manifest: Manifest,
    /// The manifest's bytes.
    pub manifest_bytes: Vec<u8>,
    /// Plan.
    pub plan: Plan,
}

impl Bundle {
    /// Opens a bundle. Checks the sizes of all files and the hashes of the small ones (and of `run`), and
    /// verifies the plan. If a build was killed between two renames, the bundle that it was replacing is
    /// restored first.
    ///
    /// # Errors
    /// A file is missing, changed or malformed; the error names it.
    pub fn open(folder: &Path) -> Result<Self> {
        // If it cannot be put back, the bundle is missing, and the load below reports that.
        let _ = workspace::recover(folder);
        let (manifest, manifest_bytes) = Manifest::load(folder)?;
        manifest.part(|name| !has_weights(name)).check(folder, false)?;
        manifest.part(|name| !has_weights(name) && !is_inside(name)).check(folder, true)?;
        let path = folder.join(PLAN);
        let bytes = manifest.read_file(folder, PLAN, regular::PLAN)?;
        let malformed = |cause: String| {
            Error::input(format!("`{}` is not a plan of this version", path.display()))
                .because(cause)
                .hint("build the bundle again")
        };
        let plan = Plan::decode(&bytes).map_err(|e| malformed(e.to_string()))?;
        moec_ir::verify::plan(&plan).map_err(|e| malformed(e.to_string()))?;
        // A host needs no weights of others.
        let has_hosts = plan.units.iter().any(|unit| unit.backend == HOST_BACKEND);
        let is_there = |name: &str| !has_hosts || folder.join(name).exists();
        manifest.part(|name| has_weights(name) && is_there(name)).check(folder, false)?;
        Ok(Self { folder: folder.to_owned(), manifest, manifest_bytes, plan })
    }

    /// The hash by which the whole bundle can be compared: that of its manifest, which holds those of all
    /// other files.
    pub fn manifest_sha256(&self) -> String {
        digest(&self.manifest_bytes)
    }

    /// Files, links and folders in it that its manifest does not list.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn unlisted(&self) -> Result<Vec<String>> {
        destination::unlisted_entries(&self.folder, &self.manifest.listed())
            .map_err(|e| io_error("read", &self.folder, &e))
    }

    /// The device that it was built for.
    ///
    /// # Errors
    /// As [`super::device::read`].
    pub fn device(&self) -> Result<Device> {
        super::device::read(&self.folder, &self.manifest, &self.plan)
    }

    /// Compares the SHA-256 of all files but those that the plan lists: what executes it opens these, and
    /// checks what it opens ([`CheckLevel::All`]).
    ///
    /// # Errors
    /// As [`Manifest::check`].
    pub fn check_rest(&self) -> Result<()> {
        let in_plan = |name: &str| self.plan.files.iter().any(|f| f.path == name);
        self.manifest.part(|name| !in_plan(name)).check(&self.folder, true)
    }

    /// Reader of its files, each of which is checked against the manifest when it is read.
    ///
    /// # Errors
    /// A manifest that is of another build than the plan.
    pub fn files(&self, check: CheckLevel) -> Result<BundleReader> {
        let files = runtime_manifest::parse(&self.manifest_bytes, &self.folder)?;
        // The plan holds hashes of its own.
        if let Some(of) = self.plan.files.iter().find(|of| !files.contains(of)) {
            let what = format!("the manifest and the plan contradict each other about `{}`", of.path);
            return Err(Error::input(what).hint("build the bundle again"));
        }
        Ok(BundleReader::of_manifest(&self.folder, &files, check))
    }

    /// The Graph that the plan computes.
    ///
    /// # Errors
    /// A text that does not parse or verify.
    pub fn graph(&self) -> Result<Module> {
        let path = self.folder.join(GRAPH);
        let malformed =
            |cause: String| Error::input(format!("`{}` is not a graph", path.display())).because(cause);
        let bytes = self.manifest.read_file(&self.folder, GRAPH, regular::PLAN)?;
        let text = String::from_utf8(bytes).map_err(|e| malformed(e.to_string()))?;
        let module = moec_ir::text::parse_module(&text).map_err(|e| malformed(e.to_string()))?;
        moec_ir::verify::module(&module).map_err(|e| malformed(e.to_string()))?;
        Ok(module)
    }

    /// Reasons for the choice of kernels.
    ///
    /// # Errors
    /// A bundle of an earlier moec, or a file that is not well-formed.
    pub fn decisions(&self) -> Result<Decisions> {
        let path = self.folder.join(DECISIONS);
        let bytes = self.manifest.read_file(&self.folder, DECISIONS, regular::PLAN)?;
        let decisions: Decisions = serde_json::from_slice(&bytes).map_err(|e| {
            Error::input(format!("`{}` is not well-formed", path.display()))
                .because(e)
                .hint("build the bundle again")
        })?;
        if decisions.version != VERSION {
            return Err(Error::limit(format!("`{}` was written by another version of moec", path.display()))
                .hint("build the bundle again"));
        }
        Ok(decisions)
    }

    /// Whether its object code is for another architecture or operating system.
    pub fn is_foreign(&self) -> bool {
        !cpu::is_of_this_machine(&self.plan.target.triple)
    }

    /// Whether this machine executes the bundle only by a host build, compiled from the bundle's own Graph
    /// and weights.
    pub fn needs_host_build(&self) -> bool {
        !self.plan.graphs.is_empty() || self.is_foreign()
    }

    /// Note to users if the host build replaces its object code.
    pub fn host_build_note(&self) -> String {
        let triple = &self.plan.target.triple;
        format!("its kernels are for {triple}: its graph and weights were compiled for this machine instead")
    }

    /// Loads the object code into this process.
    ///
    /// # Errors
    /// A CPU that lacks a feature, or code that does not load.
    pub fn unit(&self) -> Result<HostUnit> {
        self.load(HostUnit::load)
    }

    /// Like [`Bundle::unit`]; instructions that this CPU lacks are emulated if possible, with a message.
    ///
    /// # Errors
    /// As [`Bundle::unit`].
    pub fn emulated_unit(&self, progress: &Progress) -> Result<HostUnit> {
        let unit = self.load(HostUnit::load_emulated)?;
        if !unit.emulated().is_empty() {
            progress.warn(&format!("this CPU lacks {}: emulated, slowly", unit.emulated().join(", ")));
        }
        Ok(unit)
    }

    /// The object code.
    ///
    /// # Errors
    /// As [`Manifest::read_file`].
    pub fn object(&self) -> Result<Vec<u8>> {
        self.manifest.read_file(&self.folder, KERNELS, regular::OBJECT)
    }

    fn load(&self, load: impl FnOnce(&[u8], &TargetInfo) -> Result<HostUnit, HostError>) -> Result<HostUnit> {
        let object = self.object()?;
        load(&object, &self.plan.target).map_err(|e| {
            let hint = e.hint();
            let error: Error = match e {
                HostError::Machine(e) | HostError::Features(e) => self.elsewhere(e),
                HostError::Emulate(e) => Error::limit(e.to_string()),
                HostError::Load(e) => Error::limit(e.to_string()),
            };
            match hint {
                Some(hint) => error.hint(hint),
                None => error,
            }
        })
    }

    /// The error of a machine that cannot run it. One for another architecture has a host build here.
    fn elsewhere(&self, e: moec_runtime::Error) -> Error {
        let emulated = self.is_foreign();
        let error = Error::from(e);
        match &error.hint {
            Some(hint) if emulated => {
                let hint =
                    format!("{hint}; `moec run {} --emulate …` runs it here, slowly", self.folder.display());
                error.hint(hint)
            }
            _ => error,
        }
    }
}
