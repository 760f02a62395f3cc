//! The part of a bundle's `run` that is the same for all bundles, compiled when moec is and embedded into it.
//!
//! `moec build` links it with the kernels and with a table object that names them and holds the plan
//! (`Table`, which `moec_codegen::table` writes). So a bundle for this machine's own kind costs one call of
//! the C compiler's linker, and neither rustc nor cargo. The generated crate in a bundle's `runner/` builds
//! the same `Program` from the same plan.
//!
//! It drives units, too (`moec_units`): a driver's library is looked for where a plan has steps for one, and
//! is small beside the rest.
//!
//! The work of Rust's own `main` before and after a program is done here, since C's is the entry point.
//! `unsafe` is in this file: the linked table is trusted, as the kernels are.

use moec_runtime::bundle::abi::KernelFn;
use std::ffi::{c_char, c_int};
use std::io::Write;

/// Contents of a bundle's table object, under the symbol `moec_table`.
#[repr(C)]
struct Table {
    /// The encoded plan.
    plan: *const u8,
    /// Its length.
    plan_bytes: usize,
    /// Kernels, in the plan's order.
    kernels: *const KernelFn,
    /// Number of kernels.
    kernel_count: usize,
}

unsafe extern "C" {
    #[link_name = "moec_table"]
    static TABLE: Table;
}

/// The entry point of a linked `run`. Arguments come by way of the standard library, which finds them by
/// itself.
#[unsafe(no_mangle)]
extern "C" fn main(_count: c_int, _arguments: *const *const c_char) -> c_int {
    prepare();
    // SAFETY: `moec build` links one table, whose addresses and lengths are those of constants beside it.
    let (plan, kernels) = unsafe {
        let table = &raw const TABLE;
        (
            std::slice::from_raw_parts((*table).plan, (*table).plan_bytes),
            std::slice::from_raw_parts((*table).kernels, (*table).kernel_count),
        )
    };
    let status = moec_service::front(moec_units::PRECOMPILED).main(plan, kernels);
    // Returning from C's `main` flushes C's streams only. The subcommand has reported a closed one.
    let _ = std::io::stdout().flush();
    c_int::from(status)
}

/// Rust's own `main` ignores SIGPIPE, so that writing to a closed pipe is an error and does not end the
/// process. It also opens the three standard streams if they are closed, so that no file of the bundle gets
/// one of their numbers.
fn prepare() {
    // SAFETY: calls of the C library without memory of ours, before there are other threads.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        for stream in 0..3 {
            if libc::fcntl(stream, libc::F_GETFD) == -1 {
                // The lowest number that is free is this one.
                libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
            }
        }
    }
}
