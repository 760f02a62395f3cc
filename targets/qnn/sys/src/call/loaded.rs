//! Shared libraries, loaded once and for good.

use super::log::CallGuard;
use crate::abi::Status;
use crate::error::{Error, Result};
use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::ptr;

/// Most interfaces that a library is believed to offer.
const INTERFACES: u32 = 16;

/// A shared library of this process. It is never closed: QNN's have threads and destructors of their own.
#[derive(Debug)]
pub(crate) struct SharedLibrary {
    path: PathBuf,
    handle: *mut c_void,
}

impl SharedLibrary {
    /// Loads the library, or returns the loaded one.
    ///
    /// # Errors
    /// [`Error::Load`] with the loader's message.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let failed = |why: String| Error::Load { path: path.to_owned(), why };
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|e| failed(e.to_string()))?;
        // SAFETY: the name ends in a zero byte. What the library does while it is loaded is trusted: its user
        // installed it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(failed(last_error()));
        }
        Ok(Self { path: path.to_owned(), handle })
    }

    /// Address of a symbol.
    ///
    /// # Errors
    /// [`Error::Version`] if the table is missing.
    pub(crate) fn symbol(&self, name: &CStr) -> Result<*mut c_void> {
        // SAFETY: the handle is of `dlopen` and never closed, and the name ends in a zero byte.
        let symbol = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        if symbol.is_null() {
            return Err(self.unexpected(format!("it has no `{}`", name.to_string_lossy())));
        }
        Ok(symbol)
    }

    /// Addresses of the library's interfaces, which are not null and stay valid.
    ///
    /// # Errors
    /// [`Error::Version`] if the functions are missing.
    ///
    /// # Safety
    /// The symbol is a function that writes a list of addresses of `T` and its length.
    pub(crate) unsafe fn interfaces<T>(&self, symbol: &CStr) -> Result<Vec<*const T>> {
        type Get<T> = unsafe extern "C" fn(*mut *const *const T, *mut u32) -> Status;
        // SAFETY: the caller's.
        let get: Get<T> = unsafe { std::mem::transmute(self.symbol(symbol)?) };
        let (mut list, mut count) = (ptr::null(), 0);
        let _calling = CallGuard::begin();
        // SAFETY: both are written.
        let status = unsafe { get(&raw mut list, &raw mut count) };
        if status != 0 || list.is_null() || count > INTERFACES {
            return Err(self.unexpected(format!("it offers no interface (code {status:#x})")));
        }
        // SAFETY: the list has `count` addresses.
        let offered = (0..count as usize).map(|i| unsafe { *list.add(i) });
        Ok(offered.filter(|at| !at.is_null()).collect())
    }

    /// Error for a library that behaves unexpectedly.
    pub(crate) fn unexpected(&self, what: impl Into<String>) -> Error {
        Error::Version { path: self.path.clone(), what: what.into() }
    }
}

/// Message of the loader about its last failure.
fn last_error() -> String {
    // SAFETY: the text is the loader's, of this thread, and copied at once.
    unsafe { text(libc::dlerror()) }.unwrap_or_else(|| "the loader gives no reason".into())
}

/// A copy of a C string; `None` for null.
///
/// # Safety
/// The pointer is null, or points to a string that ends in a zero byte and lives as long as this call.
pub(crate) unsafe fn text(at: *const std::ffi::c_char) -> Option<String> {
    // SAFETY: the caller's.
    (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
}
