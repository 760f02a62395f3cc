//! Machines that these tests compile kernels for.

use crate::harness::PRODUCTS;
use moec_codegen::spec::Attention;
use moec_codegen::{ComputeType, KernelSpec, Machine};
use moec_cpu::emulate;
use moec_testing::SAPPHIRE_RAPIDS;

/// AVX-512 with VNNI and bf16, which every CPU with tiles has, and AMX.
pub(crate) fn sapphire_rapids() -> Machine {
    let mut machine = Machine::x86_64_level(4);
    for feature in ["avx512vnni", "avx512bf16", "amx-tile", "amx-bf16", "amx-int8"] {
        machine.features.push(feature.to_string());
    }
    machine
}

/// Machines with tiles. Missing AMX is emulated; without the other features there are none.
pub(crate) fn machines() -> Vec<Machine> {
    let machine = sapphire_rapids();
    let all = machine.all_features();
    let features: Vec<&str> = all.iter().map(String::as_str).collect();
    let (emulated, missing): (Vec<&str>, Vec<&str>) = moec_runtime::platform::cpu::missing(&features)
        .into_iter()
        .partition(|feature| emulate::FEATURES.contains(feature));
    let missing = if missing.is_empty() { Ok(()) } else { Err(format!("no {}", missing.join(", "))) };
    if SAPPHIRE_RAPIDS.ok_or_skip(missing).is_none() {
        return Vec::new();
    }
    if !emulated.is_empty() {
        emulate::install().unwrap_or_else(|e| panic!("{e}"));
    }
    // Every CPU with tiles also has VBMI, but codes are unpacked by other instructions without it.
    let mut permuting = machine.clone();
    permuting.features.push("avx512vbmi".to_string());
    if !SAPPHIRE_RAPIDS.holds_or_skip(moec_runtime::platform::cpu::missing(&["avx512vbmi"]).is_empty()) {
        return vec![machine];
    }
    vec![machine, permuting]
}

/// Whether a case is checked on the machine at `place`, of `of` machines. Only kernels with tiles are
/// checked, since the others are the same as on AVX-512. In a plain run, cases alternate between the
/// machines.
pub(crate) fn is_selected(spec: &KernelSpec, case: usize, (place, of): (usize, usize)) -> bool {
    let order = case / PRODUCTS.len() + case % PRODUCTS.len() + place;
    let attention =
        matches!(spec, KernelSpec::Attention(Attention { compute: ComputeType::Bf16, rows: 2.., .. }));
    let tiles = attention || spec.compute() == Some(ComputeType::Bf16);
    tiles && (moec_testing::all() || order.is_multiple_of(of))
}
