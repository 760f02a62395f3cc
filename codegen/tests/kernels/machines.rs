//! What the kernels are compiled for here.

use moec_codegen::{KernelSpec, Machine};

/// Machines that this host runs: the x86-64 levels, and the host itself.
pub(crate) fn machines() -> Vec<Machine> {
    #[cfg(not(target_arch = "x86_64"))]
    let levels: [(u8, bool); 0] = [];
    #[cfg(target_arch = "x86_64")]
    let levels = [
        (4, is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512dq")),
        (3, is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")),
        (1, true),
    ];
    for (level, _) in levels.iter().filter(|(_, runs)| !runs) {
        println!("skipped: this host is no x86-64-v{level}");
    }
    let levels = levels.iter().filter(|(_, runs)| *runs).map(|(level, _)| Machine::x86_64_level(*level));
    levels.chain([Machine::host().unwrap_or_else(|e| panic!("{e}"))]).collect()
}

/// Whether a kernel is to be checked on them: every one is.
pub(crate) fn wanted(_: &KernelSpec) -> bool {
    true
}
