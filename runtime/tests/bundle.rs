//! A damaged bundle or a plan that cannot run is refused, with the reason and a way out.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_ir::plan::{Arg, Builtin, Code, Grid, Plan};
use moec_runtime::program::{self, EntryKind, EntryRef, Format, StateRef};
use moec_runtime::store::MappedStore;
use moec_runtime::{CheckLevel, Engine, Error, Fault, Options, Program, validate};
use std::path::Path;

fn refused(change: impl FnOnce(&Path), check: CheckLevel) -> Option<Error> {
    let dir = bundle();
    change(dir.path());
    let p = &program(&ENTRIES);
    MappedStore::open(p, dir.path(), check).err()
}

fn change_byte(bundle: &Path) {
    let path = bundle.join("weights/model.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[70] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn an_untouched_bundle_opens() {
    for check in [CheckLevel::Sizes, CheckLevel::Small, CheckLevel::All] {
        assert!(refused(|_| {}, check).is_none());
    }
}

#[test]
fn a_changed_byte() {
    let e = refused(change_byte, CheckLevel::Small).unwrap();
    let text = e.to_string();
    assert!(matches!(e, Error::Changed { .. }), "{text}");
    assert!(text.contains("weights/model.bin") && text.contains("SHA-256"), "{text}");
    assert!(e.hint().unwrap().contains("moec build"));
    assert_eq!(e.fault(), Fault::Bundle);
    assert!(refused(change_byte, CheckLevel::Sizes).is_none());
}

#[test]
fn a_missing_file() {
    let e =
        refused(|b| std::fs::remove_file(b.join("weights/model.bin")).unwrap(), CheckLevel::Sizes).unwrap();
    assert!(matches!(&e, Error::MissingFile(p) if p.ends_with("weights/model.bin")), "{e}");
    assert!(e.hint().is_some());
}

#[test]
fn a_file_of_another_size() {
    for n in [0, 100, weights().len() + 1] {
        let mut bytes = weights();
        bytes.resize(n, 0);
        let e = refused(|b| std::fs::write(b.join("weights/model.bin"), bytes).unwrap(), CheckLevel::Sizes);
        assert!(matches!(e, Some(Error::WrongSize { found, .. }) if found == n as u64), "{e:?}");
    }
}

#[test]
fn a_path_out_of_the_bundle() {
    for path in ["../secret", "/etc/passwd", "weights/../../x", ""] {
        let p = &program(&ENTRIES);
        let file = program::FileInfo { path, ..p.files[0] };
        let p = Program { files: &[file], ..*p };
        let e = MappedStore::open(&p, bundle().path(), CheckLevel::Sizes).unwrap_err();
        assert!(matches!(e, Error::OutsideBundle(_)), "{e}");
    }
}

#[test]
fn a_processor_without_the_features() {
    let mut plan = plan(&ENTRIES);
    plan.target.features = vec!["flux-capacitor".to_owned()];
    let dir = bundle();
    let p = &Program::new(plan, &resolve).unwrap();
    let e = Engine::open(p, dir.path(), Options::default()).err().unwrap();
    assert!(e.to_string().contains("`flux-capacitor`"), "{e}");
    plan.target.features.clear();
    plan.target.triple = "s390x-unknown-linux-gnu".to_owned();
    let p = &Program::new(plan, &resolve).unwrap();
    let e = Engine::open(p, dir.path(), Options::default()).err().unwrap();
    assert!(matches!(e, Error::WrongArch { .. }), "{e}");
}

#[test]
fn a_kernel_that_is_not_there() {
    let e = Program::new(plan(&ENTRIES), &|s| resolve(s).filter(|_| s != "ffn")).unwrap_err();
    assert!(matches!(&e, Error::NoKernel(k) if k == "ffn"), "{e}");
}

#[test]
fn a_plan_of_another_version() {
    let plan = Plan { version: 99, ..plan(&ENTRIES) };
    let e = Program::new(plan, &resolve).unwrap_err().to_string();
    assert!(e.contains("99"), "{e}");
}

/// The verifier of the plan stands before `validate`; here the program itself is wrong, as a generated
/// source could be.
#[test]
fn programs_that_would_leave_their_memory() {
    fn check(what: &str, change: impl for<'a> FnOnce(&mut EntryRef<'a>)) {
        let p = &program(&ENTRIES);
        let mut entry = p.entries[0];
        change(&mut entry);
        let e = validate::program(&Program { entries: &[entry], ..*p });
        assert!(matches!(e, Err(Error::Plan(_))), "{what}: {e:?}");
    }
    fn check_step(what: &str, index: usize, change: impl for<'a> FnOnce(&mut program::Step<'a>)) {
        let p = &program(&ENTRIES);
        let mut steps = p.entries[0].steps.to_vec();
        change(&mut steps[index]);
        let entry = EntryRef { steps: &steps, ..p.entries[0] };
        let e = validate::program(&Program { entries: &[entry], ..*p });
        assert!(matches!(e, Err(Error::Plan(_))), "{what}: {e:?}");
    }
    check("inputs missing", |e| e.buffers = &e.buffers[..3]);
    check("more rows than the inputs hold", |e| e.kind = EntryKind::Prefill(1000));
    check("no rows", |e| e.kind = EntryKind::Decode(0));
    check("no output rows", |e| e.out_rows = 0);
    check("more output rows than the logits hold", |e| e.out_rows = 5);
    check("logits nowhere", |e| e.logits = 10);
    check("rows of logits that overlap", |e| e.logits_stride = V as u32 - 1);
    check_step("buffer", 0, |s| s.args = &[Arg::Buffer(10, 0)]);
    check_step("behind a buffer", 0, |s| s.args = &[Arg::Buffer(0, 1 << 20)]);
    check_step("segment", 0, |s| s.args = &[Arg::Segment(3)]);
    check_step("state", 0, |s| s.args = &[Arg::State(1)]);
    check_step("blocks of nothing", 0, |s| s.grid = Grid::Tiles { rows: 0, tiles: 1 });
    check_step("table nowhere", 5, |s| s.grid = Grid::Experts { table: 4, tiles: 1 });
    check_step("table in a file", 5, |s| s.grid = Grid::Experts { table: 2, tiles: 1 });
    let dispatch =
        |rows, k, experts| program::Code::Builtin(Builtin::Dispatch { rows, k, experts, partial: false });
    check_step("too many experts", 4, |s| s.code = dispatch(4, 2, 7));
    check_step("too few rows", 4, |s| s.code = dispatch(3, 2, 6));
    check_step("too many choices", 4, |s| s.code = dispatch(4, u32::MAX, 6));
    check_step("table over its ids", 4, |s| s.args = &[Arg::Buffer(6, 0), Arg::Buffer(6, 0)]);
    check_step("table into a file", 4, |s| s.args = &[Arg::Buffer(5, 0), Arg::Segment(0)]);
    check_step("half an argument", 4, |s| s.args = &[Arg::Buffer(5, 2), Arg::Buffer(6, 0)]);
    check_step("angles without frequencies", 1, |s| s.args = &[Arg::Buffer(1, 0), Arg::Buffer(9, 0)]);
    let p = &program(&ENTRIES);
    assert!(validate::program(&Program { arena_bytes: 64, ..*p }).is_err());
    assert!(validate::program(&Program { files: &[], ..*p }).is_err());
    let odd = program::SegmentRef { offset: 4, ..p.segments[0] };
    assert!(validate::program(&Program { segments: &[odd; 3], ..*p }).is_err());
    assert!(validate::program(p).is_ok());
}

#[test]
fn kernels_out_of_range() {
    let mut plan = plan(&ENTRIES);
    plan.entries[0].steps[0].code = Code::Kernel(99);
    assert!(matches!(Program::new(plan, &resolve), Err(Error::Plan(_))));
}

/// What a generated runner contains.
static BAKED: Program<'static> = Program {
    model: program::ModelRef {
        family: "none",
        vocab: 2,
        hidden: 1,
        layers: 0,
        max_context: 1,
        slots: 1,
        bos: None,
        eos: &[1],
        parameters: 0,
        active_parameters: 0,
        big_little: None,
    },
    target: program::TargetRef {
        name: "native",
        triple: "x86_64-unknown-linux-gnu",
        cpu: "generic",
        features: &[],
    },
    arena_bytes: 320,
    scratch_bytes: 0,
    files: &[],
    segments: &[],
    states: &[StateRef {
        bytes: 64,
        format: Format::Bf16,
        shape: [1, 1, 1, 32],
        order: program::CacheOrder::Keys { nr: 1 },
    }],
    graphs: &[],
    sets: &[],
    parts: &[],
    paging: None,
    entries: &[EntryRef {
        kind: EntryKind::Prefill(1),
        out_rows: 1,
        buffers: &[
            program::BufferRef { offset: 0, bytes: 4 },
            program::BufferRef { offset: 64, bytes: 4 },
            program::BufferRef { offset: 128, bytes: 4 },
            program::BufferRef { offset: 192, bytes: 4 },
            program::BufferRef { offset: 256, bytes: 8 },
        ],
        logits: 4,
        logits_stride: 2,
        steps: &[],
    }],
};

#[test]
fn a_program_can_be_a_constant() {
    assert!(validate::program(&BAKED).is_ok());
}
