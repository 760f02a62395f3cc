//! The stored form of a Plan: whatever decodes can be verified, printed, read back and made a program of.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_ir::plan::Plan;
use moec_ir::text::parse_plan;
use moec_ir::verify;
use moec_runtime::Program;

/// Stands for every kernel; it is never called.
unsafe extern "C" fn kernel(_: *const *mut u8, _: i64, _: i64, _: i64, _: *mut u8) {}

fuzz_target!(|bytes: &[u8]| {
    let Ok(plan) = Plan::decode(bytes) else { return };
    assert!(plan.encode().is_ok_and(|b| Plan::decode(&b).is_ok_and(|again| again == plan)), "stored form");
    let printed = plan.to_string();
    match parse_plan(&printed) {
        Ok(again) => assert!(again == plan, "reads back another plan:\n{printed}"),
        Err(e) => panic!("does not read back: {e}\n{printed}"),
    }
    let verified = verify::plan(&plan).is_ok();
    let without = Program::new(plan.clone(), &|_| None);
    let with = Program::new(plan.clone(), &|_| Some(kernel));
    assert!(verified == with.is_ok(), "runs and verifies, or neither");
    assert!(plan.kernels.is_empty() || without.is_err(), "runs without its kernels");
});
