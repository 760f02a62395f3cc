//! The C structures of QNN that are needed here, and no others.
//!
//! Declared from public material: Qualcomm's online reference of the QNN API, the ctypes declarations that
//! Qualcomm publishes under BSD-3-Clause-Clear, and the users of the API in onnxruntime (MIT), ExecuTorch
//! (BSD) and LiteRT (Apache-2.0). Values in none of them were found by trial against version 2.51 of the
//! library; they carry a dagger (†), here and in `docs/qnn.md`. Sizes are of 64-bit systems, and checked at
//! compile time.

mod config;
mod interface;
mod system;
mod tensor;

pub(crate) use config::*;
pub(crate) use interface::*;
pub(crate) use system::*;
pub(crate) use tensor::*;

use std::ffi::c_void;

/// An object of the library's own: backend, device, context, graph, log.
pub(crate) type Handle = *mut c_void;
/// Result of a call: 0, or a code.
pub(crate) type Status = u64;
/// A place of a table that is not called.
pub(crate) type Unused = *const c_void;

/// Three numbers of a version (`Qnn_Version_t`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

/// A structure has this size and alignment, or this does not compile.
macro_rules! layout {
    ($($of:ty: $size:literal, $align:literal;)*) => {
        $(const _: () = assert!(size_of::<$of>() == $size && align_of::<$of>() == $align);)*
    };
}
pub(crate) use layout;

#[cfg(target_pointer_width = "64")]
layout! { Version: 12, 4; }
