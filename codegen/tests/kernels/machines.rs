//! Machines that these tests compile kernels for.

use crate::harness::PRODUCTS;
use moec_codegen::{KernelSpec, Machine};
use moec_testing::AMX;
#[cfg(target_arch = "x86_64")]
use moec_testing::{AVX2, AVX512};

/// Machines that this host runs: the x86-64 levels, and the host itself.
pub(crate) fn machines() -> Vec<Machine> {
    #[cfg(not(target_arch = "x86_64"))]
    let levels: [u8; 0] = [];
    #[cfg(target_arch = "x86_64")]
    let levels = [
        (
            4,
            AVX512
                .holds_or_skip(is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512dq")),
        ),
        (3, AVX2.holds_or_skip(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"))),
        (1, true),
    ]
    .into_iter()
    .filter_map(|(level, runs)| runs.then_some(level));
    levels.into_iter().map(Machine::x86_64_level).chain([host()]).collect()
}

/// This host's CPU, without tile registers if the operating system denies them to this process.
fn host() -> Machine {
    let mut host = Machine::host().unwrap_or_else(|e| panic!("{e}"));
    if host.isa().tiles && !AMX.holds_or_skip(tiles_permitted()) {
        host.features.retain(|f| !f.starts_with("amx-"));
    }
    host
}

/// Asks the operating system for tile registers, as a runtime does before its first kernel.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn tiles_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: this `arch_prctl` takes two integers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn tiles_permitted() -> bool {
    false
}

/// Whether a case is checked on the machine at `place`, of `of` machines that have its instructions. A plain
/// run checks every third case, on one of the machines. The machines alternate over shapes and products, so
/// that each gets every product in turn. `cargo xtask test --all` checks every case on every machine.
pub(crate) fn is_selected(_: &KernelSpec, case: usize, (place, of): (usize, usize)) -> bool {
    moec_testing::all() || (case / PRODUCTS.len() + case % PRODUCTS.len() + place).is_multiple_of(3 * of)
}
