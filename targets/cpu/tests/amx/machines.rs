//! Target machines of the kernels here.

use crate::harness::PRODUCTS;
use moec_codegen::spec::Attention;
use moec_codegen::{ComputeType, KernelSpec, Machine};
use moec_cpu::emulate;
use moec_testing::SAPPHIRE_RAPIDS;

/// AVX-512 with VNNI and bf16, as every CPU with tiles has them, and AMX.
pub(crate) fn sapphire_rapids() -> Machine {
    let mut machine = Machine::x86_64_level(4);
    for feature in ["avx512vnni", "avx512bf16", "amx-tile", "amx-bf16", "amx-int8"] {
        machine.features.push(feature.to_string());
    }
    machine
}

/// A machine with tiles, where this host has the rest; what it lacks of AMX is emulated.
pub(crate) fn machines() -> Vec<Machine> {
    let machine = sapphire_rapids();
    let all = machine.all_features();
    let features: Vec<&str> = all.iter().map(String::as_str).collect();
    let (emulated, missing): (Vec<&str>, Vec<&str>) = moec_runtime::platform::cpu::missing(&features)
        .into_iter()
        .partition(|feature| emulate::FEATURES.contains(feature));
    let missing = if missing.is_empty() { Ok(()) } else { Err(format!("no {}", missing.join(", "))) };
    if SAPPHIRE_RAPIDS.of(missing).is_none() {
        return Vec::new();
    }
    if !emulated.is_empty() {
        emulate::install().unwrap_or_else(|e| panic!("{e}"));
    }
    // Every CPU with tiles also moves bytes by one instruction; codes are unpacked otherwise without it.
    let mut permuting = machine.clone();
    permuting.features.push("avx512vbmi".to_string());
    if !SAPPHIRE_RAPIDS.by(moec_runtime::platform::cpu::missing(&["avx512vbmi"]).is_empty()) {
        return vec![machine];
    }
    vec![machine, permuting]
}

/// Whether a case of that number is checked on the machine of that place among so many: kernels that use
/// tiles, since the others are as on AVX-512; in a plain run on one of the machines, in turn.
pub(crate) fn wanted(spec: &KernelSpec, case: usize, (place, of): (usize, usize)) -> bool {
    let turn = case / PRODUCTS.len() + case % PRODUCTS.len() + place;
    let attention =
        matches!(spec, KernelSpec::Attention(Attention { compute: ComputeType::Bf16, rows: 2.., .. }));
    let tiles = attention || spec.compute() == Some(ComputeType::Bf16);
    tiles && (moec_testing::all() || turn.is_multiple_of(of))
}
