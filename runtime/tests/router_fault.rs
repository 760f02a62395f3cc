//! A router that chooses an expert which does not exist. The test is alone in its process, because the switch
//! is global.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_ir::op::NO_EXPERT;
use moec_runtime::{Error, LogitRows};
use std::sync::atomic::Ordering;

#[test]
fn nonexistent_expert_id_is_an_error() {
    BAD_CHOICE.store(100, Ordering::Relaxed);
    with_engine(&ENTRIES, 3, |engine| {
        let e = engine.prefill(0, 0, &[1, 2, 3], LogitRows::Last, &mut |_, _| Ok(())).unwrap_err();
        assert!(matches!(&e, Error::Model { what, .. } if what.ends_with(" of 6 (step 4)")), "{e}");
        assert!(e.hint().is_some());
        assert!(engine.is_empty(0));
        // Choice that routers write if their scores are NaN.
        BAD_CHOICE.store(NO_EXPERT, Ordering::Relaxed);
        let e = engine.prefill(0, 0, &[1, 2, 3], LogitRows::Last, &mut |_, _| Ok(())).unwrap_err();
        BAD_CHOICE.store(0, Ordering::Relaxed);
        let hint = e.hint().unwrap();
        assert!(e.to_string().contains("NaN") && hint.contains("moec verify"), "{e}: {hint}");
    });
}
