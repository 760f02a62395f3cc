//! GPU kernels: their PTX, and the output of NVIDIA's assembler where it is installed.
#![allow(clippy::panic, reason = "this is a test, though not all of it a test function")]

#[path = "../../examples/ptx_report/catalogue.rs"]
mod catalogue;
#[path = "../../examples/ptx_report/ptxas.rs"]
mod ptxas;

use moec_codegen::gpu::{Kernel, Sm, compile};
use moec_codegen::spec::Map;
use moec_codegen::{KernelSpec, MapOp};
use moec_testing::PTXAS;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// PTX by generation and kernel.
type PtxCache = BTreeMap<(&'static str, String), Arc<str>>;

fn compiled(sm: Sm, kernel: &Kernel) -> String {
    compile(sm, std::slice::from_ref(kernel)).unwrap_or_else(|e| panic!("{kernel:?}: {e}"))
}

/// The PTX of a kernel, compiled once for all tests.
fn ptx(sm: Sm, kernel: &Kernel) -> Arc<str> {
    static MADE: Mutex<PtxCache> = Mutex::new(BTreeMap::new());
    let key = (sm.name(), format!("{kernel:?}"));
    let made = MADE.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get(&key).cloned();
    made.unwrap_or_else(|| {
        let text: Arc<str> = compiled(sm, kernel).into();
        MADE.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(key, Arc::clone(&text));
        text
    })
}

#[test]
fn ptx_of_a_small_kernel_is_readable() {
    let op = MapOp::Add { b_ld: 12, broadcast_b: false };
    let kernel = Kernel::from(KernelSpec::Map(Map { op, cols: 10, a_ld: 10, out_ld: 16 }));
    let text = ptx(Sm::Sm80, &kernel);
    // The version of LLVM is in a comment.
    let lines: Vec<&str> = text.lines().filter(|l| !l.starts_with("//") && !l.trim().is_empty()).collect();
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn every_kernel_compiles_for_every_gpu_generation() {
    for (i, (name, kernel)) in catalogue::kernels().into_iter().enumerate() {
        let launch = kernel.launch().unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(launch.shared <= 48 << 10, "{name} takes {launch:?}");
        let again = Sm::ALL[i % Sm::ALL.len()];
        assert_eq!(*ptx(again, &kernel), *compiled(again, &kernel), "{name} is not the same twice");
        for sm in Sm::ALL {
            let text = ptx(sm, &kernel);
            assert!(text.contains(&format!(".target {}", sm.name())), "{name}");
            assert!(text.contains(&format!(".visible .entry {}(", kernel.symbol())), "{name}");
            assert!(text.contains(&format!(".reqntid {}", launch.block)), "{name}");
            assert!(!text.contains("call"), "{name} calls what is not there");
            assert!(!text.contains("local"), "{name} keeps what it computes in memory");
        }
    }
}

#[test]
fn weights_are_read_sixteen_bytes_at_a_time() {
    for (name, kernel) in catalogue::kernels().iter().filter(|(name, _)| name.contains("1 row")) {
        assert!(ptx(Sm::Sm90, kernel).contains("ld.global.v4"), "{name}");
    }
}

#[test]
fn many_rows_of_bf16_run_on_tensor_cores() {
    let with = |what: &str| {
        let all = catalogue::kernels();
        let found = all.iter().filter(|(_, k)| ptx(Sm::Sm80, k).contains(what));
        found.map(|(name, _)| name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(
        with("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
        with("cp.async.cg.shared.global")
    );
    assert!(with("mma.sync").iter().all(|name| name.contains("64 rows")));
    assert!(!with("mma.sync").is_empty() && !with("dp4a.").is_empty());
}

/// The assembler accepts every kernel, and the GPU has enough registers.
#[test]
fn ptxas_assembles_every_kernel() {
    if !PTXAS.met_or_skip() {
        return;
    }
    let found = moec_testing::ptxas().expect("it is here");
    for (i, (name, kernel)) in catalogue::kernels().into_iter().enumerate() {
        let launch = kernel.launch().unwrap_or_else(|e| panic!("{name}: {e}"));
        // A plain run assembles each kernel for one generation; the generations alternate.
        let selected = |(turn, _): &(usize, Sm)| moec_testing::all() || i % Sm::ALL.len() == *turn;
        for (_, sm) in Sm::ALL.into_iter().enumerate().filter(selected) {
            let resources = ptxas::assemble(&found, sm, &ptx(sm, &kernel));
            let r = resources.unwrap_or_else(|e| panic!("{name} for {}: {e}", sm.name()));
            assert!(r.registers > 0 && r.registers * launch.block <= 65_536, "{name}: {r:?}");
            // The assembler may spill a word or two, to fit another block on a multiprocessor.
            assert!(r.spilled <= 8, "{name} for {}: {r:?}", sm.name());
            assert!(r.shared <= launch.shared.max(1), "{name}: {r:?} {launch:?}");
        }
    }
}
