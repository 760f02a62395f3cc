//! Backends and devices.

use super::loaded::{SharedLibrary, text};
use super::log::{CallGuard, ERRORS, receive};
use crate::abi::{self, Config, Handle, HtpConfig, PROVIDERS, Provider, Status, Table};
use crate::error::{Error, Result};
use crate::find::{HTP, IR, Installation, QAIRT};
use crate::soc::Soc;
use std::ffi::{c_char, c_void};
use std::ptr;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Major version of the interface that is declared in `abi`.
const API: u32 = 2;

/// A backend of QNN: what compiles and executes graphs, or writes them down.
#[derive(Debug)]
pub struct Backend {
    lib: SharedLibrary,
    build: String,
    provider: Provider,
    handle: Handle,
    log: Handle,
}

impl std::fmt::Debug for Provider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Provider")
            .field("backend", &self.backend)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

/// Refusal of the library: the code in words, and its log.
pub(crate) struct Refusal {
    pub(crate) reason: String,
    pub(crate) messages: Vec<String>,
}

impl Refusal {
    /// The error of a call.
    pub(crate) fn of(self, what: impl Into<String>) -> Error {
        Error::Call { what: what.into(), reason: self.reason, messages: self.messages }
    }
}

impl Backend {
    /// The backend that compiles for the Hexagon tensor processor; on x86-64 it emulates that.
    ///
    /// # Errors
    /// The library cannot be loaded, or is of another version.
    pub fn htp(installation: &Installation) -> Result<Rc<Self>> {
        Self::open(installation, HTP)
    }

    /// The backend that writes graphs as DLC.
    ///
    /// # Errors
    /// The library cannot be loaded, or is of another version.
    pub fn ir(installation: &Installation) -> Result<Rc<Self>> {
        Self::open(installation, IR)
    }

    fn open(installation: &Installation, name: &str) -> Result<Rc<Self>> {
        let lib = SharedLibrary::open(&installation.file(name))?;
        // SAFETY: the function of this name gives these structures, by QNN's documentation.
        let offered = unsafe { lib.interfaces::<Provider>(PROVIDERS)? };
        // SAFETY: they begin as declared, with the version before the table.
        let found = offered.into_iter().find(|&p| unsafe { (*p).core.major } == API);
        let Some(found) = found else {
            return Err(lib.unexpected(format!("it has no interface of version {API}")));
        };
        // SAFETY: as above; this function is in every table of version 2, and the rest of it is not touched
        // before its answer is known.
        let build_id = unsafe { (*found).table.backend_build_id };
        let build = build_of(&lib, build_id)?;
        // SAFETY: the library is of the version whose table is declared.
        let provider = unsafe { *found };
        let mut backend = Self { lib, build, provider, handle: ptr::null_mut(), log: ptr::null_mut() };
        let (log_create, create) = (backend.table().log_create, backend.table().backend_create);
        let (Some(log_create), Some(create)) = (log_create, create) else {
            return Err(backend.missing_function("logCreate or backendCreate"));
        };
        let mut log = ptr::null_mut();
        // SAFETY: the callback is a function and stays; `log` is written.
        let called = backend.call(|| unsafe { log_create(Some(receive), ERRORS, &raw mut log) });
        called.map_err(|r| r.of("a log"))?;
        backend.log = log;
        let mut handle = ptr::null_mut();
        // SAFETY: the log was created above; no configurations; `handle` is written.
        let called = backend.call(|| unsafe { create(log, ptr::null(), &raw mut handle) });
        called.map_err(|r| r.of("a backend"))?;
        backend.handle = handle;
        Ok(Rc::new(backend))
    }

    /// Version of the library, as the library reports it: `v2.51.0.…`.
    pub fn build(&self) -> &str {
        &self.build
    }

    pub(crate) fn table(&self) -> &Table {
        &self.provider.table
    }

    pub(crate) fn provider(&self) -> Provider {
        self.provider
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    /// A function that the library lacks.
    pub(crate) fn missing_function(&self, name: &str) -> Error {
        self.lib.unexpected(format!("its interface has no `{name}`"))
    }

    /// Calls the library while no other call runs; an error has the messages of the library.
    pub(crate) fn call(&self, call: impl FnOnce() -> Status) -> Result<(), Refusal> {
        let calling = CallGuard::begin();
        let status = call();
        if status == 0 {
            return Ok(());
        }
        Err(Refusal { reason: self.words(status), messages: calling.messages() })
    }

    /// A code in words.
    fn words(&self, status: Status) -> String {
        let mut message = ptr::null();
        let words = self.table().error_message.and_then(|error_message| {
            // SAFETY: `message` is written, with a text of the library's own.
            (unsafe { error_message(status, &raw mut message) } == 0).then(|| unsafe { text(message) })?
        });
        let words = words.map(|w| w.trim().to_owned()).filter(|w| !w.is_empty());
        words.map_or_else(|| format!("code {status}"), |w| format!("{w} (code {status})"))
    }
}

/// `backendGetBuildId`.
type BuildId = unsafe extern "C" fn(*mut *const c_char) -> Status;

/// Queries a library for its version.
///
/// # Errors
/// [`Error::Version`] if it is not the one that is declared.
fn build_of(lib: &SharedLibrary, build_id: Option<BuildId>) -> Result<String> {
    let build_id = build_id.ok_or_else(|| lib.unexpected("its interface has no `backendGetBuildId`"))?;
    let _calling = CallGuard::begin();
    let mut id = ptr::null();
    // SAFETY: `id` is written, with a text of the library's own that ends in a zero byte.
    let build = unsafe { (build_id(&raw mut id) == 0).then(|| text(id)).flatten() };
    let build = build.ok_or_else(|| lib.unexpected("it has no version"))?;
    let known = build.trim_start_matches('v').strip_prefix(QAIRT).is_some_and(|rest| rest.starts_with('.'));
    if known { Ok(build) } else { Err(lib.unexpected(format!("it is of version {build}, not {QAIRT}"))) }
}

impl Drop for Backend {
    fn drop(&mut self) {
        let _calling = CallGuard::begin();
        // SAFETY: whatever was made with either holds this backend, so that nothing uses them any more; null
        // ones were never made.
        unsafe {
            if let (Some(free), false) = (self.table().backend_free, self.handle.is_null()) {
                free(self.handle);
            }
            if let (Some(free), false) = (self.table().log_free, self.log.is_null()) {
                free(self.log);
            }
        }
    }
}

/// The chip that this process compiles for, and how many devices of it there are. The library checks nodes
/// for the chip that was chosen last, whatever device a graph is for †; so there is one chip at a time.
static CHIP: Mutex<(u32, usize)> = Mutex::new((0, 0));

fn chip() -> MutexGuard<'static, (u32, usize)> {
    CHIP.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A chip that is compiled for, and on x86-64 emulated.
#[derive(Debug)]
pub struct Device {
    backend: Rc<Backend>,
    soc: Soc,
    handle: Handle,
}

impl Device {
    /// Chooses a chip. As long as there is a device of it, this process can have none of another chip.
    ///
    /// # Errors
    /// [`Error::Device`]: nothing may be compiled after that, since it would be for another chip.
    pub fn new(backend: &Rc<Backend>, soc: Soc) -> Result<Rc<Self>> {
        let create = backend.table().device_create.ok_or_else(|| backend.missing_function("deviceCreate"))?;
        let options =
            [HtpConfig::new(abi::HTP_SOC, [soc.model, 0]), HtpConfig::new(abi::HTP_ARCH, [0, soc.arch])];
        let configs = options.each_ref().map(custom);
        let list =
            [&raw const configs[0], &raw const configs[1], ptr::null()].map(<*const Config>::cast::<c_void>);
        let mut handle = ptr::null_mut();
        let mut chip = chip();
        if chip.1 > 0 && chip.0 != soc.model {
            let reason = format!("this process compiles for chip {}; use another process", chip.0);
            return Err(Error::Device {
                soc: soc.name.into(),
                model: soc.model,
                reason,
                messages: Vec::new(),
            });
        }
        // SAFETY: the list ends in a null, what it points to lives until the call returns, and `handle` is
        // written.
        let called = backend.call(|| unsafe { create(backend.log, list.as_ptr(), &raw mut handle) });
        called.map_err(|Refusal { reason, messages }| Error::Device {
            soc: soc.name.into(),
            model: soc.model,
            reason,
            messages,
        })?;
        *chip = (soc.model, chip.1 + 1);
        Ok(Rc::new(Self { backend: Rc::clone(backend), soc, handle }))
    }

    /// The chip.
    pub fn soc(&self) -> Soc {
        self.soc
    }

    pub(crate) fn backend(&self) -> &Rc<Backend> {
        &self.backend
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }
}

/// A configuration of the backend's own.
pub(crate) fn custom<T>(of: &T) -> Config {
    Config { option: abi::CUSTOM, custom: ptr::from_ref(of).cast(), rest: [0; 2] }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let (Some(free), false) = (self.backend.table().device_free, self.handle.is_null()) {
            let _calling = CallGuard::begin();
            // SAFETY: contexts keep the device alive, so no context uses it now.
            unsafe { free(self.handle) };
        }
        chip().1 -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soc::{SNAPDRAGON_8_GEN_3, SNAPDRAGON_8_PLUS_GEN_1};

    /// The chip is released with the last device of a process. The test is here since no other test of this
    /// program has a device.
    #[test]
    fn process_uses_one_chip_at_a_time() {
        let found = Installation::find(&moec_testing::cache().unwrap_or_default());
        let Some(installation) = moec_testing::QNN.ok_or_skip(found) else { return };
        let backend = Backend::htp(&installation).unwrap();
        let reason = |soc| match Device::new(&backend, soc).unwrap_err() {
            Error::Device { reason, .. } => reason,
            other => other.to_string(),
        };
        // The library refuses chips that it does not know.
        let unknown = Soc { name: "unknown", part: "none", model: 9999, arch: 75, vtcm: 8 };
        assert!(!reason(unknown).contains("another process"));
        let first = Device::new(&backend, SNAPDRAGON_8_GEN_3).unwrap();
        let again = Device::new(&backend, SNAPDRAGON_8_GEN_3).unwrap();
        drop(first);
        assert!(reason(SNAPDRAGON_8_PLUS_GEN_1).contains("another process"));
        drop(again);
        assert_eq!(Device::new(&backend, SNAPDRAGON_8_PLUS_GEN_1).unwrap().soc(), SNAPDRAGON_8_PLUS_GEN_1);
    }
}
