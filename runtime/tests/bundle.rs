//! A damaged bundle or a plan that cannot run is refused, with the reason and a remedy.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_ir::EntryKind;
use moec_ir::plan::{Arg, Builtin, Code, Entry, Grid, Plan, Step};
use moec_runtime::bundle::BundleReader;
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::exec::unit::{ComputeUnit, Launch, PoolThread};
use moec_runtime::platform::memory::{Addr, Region};
use moec_runtime::weights::store::MappedStore;
use moec_runtime::{CheckLevel, Engine, Error, Fault, Options, Program};
use std::path::Path;

fn refused(change: impl FnOnce(&Path), check: CheckLevel) -> Option<Error> {
    let dir = bundle();
    change(dir.path());
    MappedStore::open(&program(&ENTRIES), dir.path(), check).err()
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
fn changed_byte_in_the_bundle_is_reported() {
    let e = refused(change_byte, CheckLevel::Small).unwrap();
    let text = e.to_string();
    assert!(matches!(e, Error::BadFile { .. }) && text.contains("changed"), "{text}");
    assert!(text.contains("weights/model.bin") && text.contains("SHA-256"), "{text}");
    assert!(e.hint().unwrap().contains("moec build"));
    assert_eq!(e.fault(), Fault::Bundle);
    assert!(refused(change_byte, CheckLevel::Sizes).is_none());
}

#[test]
fn missing_bundle_file_is_reported() {
    let e =
        refused(|b| std::fs::remove_file(b.join("weights/model.bin")).unwrap(), CheckLevel::Sizes).unwrap();
    assert!(matches!(&e, Error::MissingFile(p) if p.ends_with("weights/model.bin")), "{e}");
    assert!(e.hint().is_some());
}

#[test]
fn bundle_file_of_wrong_size_is_reported() {
    for n in [0, 100, weights().len() + 1] {
        let mut bytes = weights();
        bytes.resize(n, 0);
        let e = refused(|b| std::fs::write(b.join("weights/model.bin"), bytes).unwrap(), CheckLevel::Sizes);
        assert!(
            matches!(&e, Some(Error::BadFile { what, .. }) if what.starts_with(&format!("has {n} bytes"))),
            "{e:?}"
        );
    }
}

#[test]
fn path_outside_the_bundle_is_rejected() {
    for path in ["../secret", "/etc/passwd", "weights/../../x", ""] {
        let mut plan = plan(&ENTRIES);
        path.clone_into(&mut plan.files[0].path);
        let e = Program::new(plan, &resolve).unwrap_err();
        assert!(matches!(&e, Error::Bundle(why) if why.contains("inside the bundle")), "{e}");
    }
}

#[test]
fn missing_cpu_features_are_reported() {
    let mut plan = plan(&ENTRIES);
    plan.target.features = vec!["flux-capacitor".to_owned()];
    let dir = bundle();
    let p = &Program::new(plan.clone(), &resolve).unwrap();
    let e = Engine::open(p, dir.path(), Options::default()).err().unwrap();
    assert!(e.to_string().contains("`flux-capacitor`"), "{e}");
    plan.target.features.clear();
    plan.target.triple = "s390x-unknown-linux-gnu".to_owned();
    let p = &Program::new(plan, &resolve).unwrap();
    let e = Engine::open(p, dir.path(), Options::default()).err().unwrap();
    assert!(matches!(&e, Error::Machine { what, .. } if what.contains("built for")), "{e}");
}

#[test]
fn missing_kernel_is_reported() {
    let e = Program::new(plan(&ENTRIES), &|s| resolve(s).filter(|_| s != "ffn")).unwrap_err();
    assert!(matches!(&e, Error::Bundle(why) if why.ends_with("no kernel `ffn`")), "{e}");
}

#[test]
fn plan_of_another_version_is_rejected() {
    let plan = Plan { version: 99, ..plan(&ENTRIES) };
    let e = Program::new(plan, &resolve).unwrap_err().to_string();
    assert!(e.contains("99"), "{e}");
}

#[test]
fn plans_exceeding_their_memory_are_rejected() {
    fn check(what: &str, change: impl FnOnce(&mut Plan)) {
        let mut plan = plan(&ENTRIES);
        change(&mut plan);
        let e = Program::new(plan, &resolve);
        assert!(matches!(e, Err(Error::Bundle(_))), "{what}: {e:?}");
    }
    let entry = |what: &str, change: &dyn Fn(&mut Entry)| check(what, |p| change(&mut p.entries[0]));
    let step = |what: &str, index: usize, change: &dyn Fn(&mut Step)| {
        check(what, |p| change(&mut p.entries[0].steps[index]));
    };
    entry("inputs missing", &|e| e.buffers.truncate(3));
    entry("more rows than the inputs hold", &|e| e.kind = EntryKind::Prefill(1000));
    entry("no rows", &|e| e.kind = EntryKind::Prefill(0));
    entry("no output rows", &|e| e.out_rows = 0);
    entry("more output rows than the logits hold", &|e| e.out_rows = 5);
    entry("logits nowhere", &|e| e.logits = 10);
    entry("rows of logits that overlap", &|e| e.buffers[8].stride = V as u32 - 1);
    step("buffer", 0, &|s| s.args = vec![Arg::Buffer(10, 0)]);
    step("after a buffer", 0, &|s| s.args = vec![Arg::Buffer(0, 1 << 20)]);
    step("segment", 0, &|s| s.args = vec![Arg::Segment(3)]);
    step("matrices", 0, &|s| s.args = vec![Arg::Matrices(3)]);
    step("state", 0, &|s| s.args = vec![Arg::State(1)]);
    step("kernel", 0, &|s| s.code = Code::Kernel(99));
    step("blocks of nothing", 0, &|s| s.grid = Grid::Tiles { rows: 0, tiles: 1 });
    step("table nowhere", 5, &|s| s.grid = Grid::Experts { table: 4, tiles: 1 });
    step("table in a file", 5, &|s| s.grid = Grid::Experts { table: 2, tiles: 1 });
    let dispatch = |rows, k, experts| {
        Code::Builtin(Builtin::Dispatch { rows, k, experts, partial: false, candidates: None })
    };
    step("too many experts", 4, &|s| s.code = dispatch(4, 2, 7));
    step("too few rows", 4, &|s| s.code = dispatch(3, 2, 6));
    step("too many choices", 4, &|s| s.code = dispatch(4, u32::MAX, 6));
    step("table over its ids", 4, &|s| s.args = vec![Arg::Buffer(6, 0), Arg::Buffer(6, 0)]);
    step("table into a file", 4, &|s| s.args = vec![Arg::Buffer(5, 0), Arg::Segment(0)]);
    step("half an argument", 4, &|s| s.args = vec![Arg::Buffer(5, 2), Arg::Buffer(6, 0)]);
    step("angles without frequencies", 1, &|s| s.args = vec![Arg::Buffer(1, 0), Arg::Buffer(9, 0)]);
    check("a small arena", |p| p.memories[0].arena_bytes = 64);
    check("no files", |p| p.files.clear());
    check("a segment at an odd place", |p| p.segments[0].offset = 4);
    assert!(Program::new(plan(&ENTRIES), &resolve).is_ok());
}

/// A plan whose steps are on an accelerator.
const BESIDE: &str = r#"plan 24 {scratch_bytes = 0}
model "m" {vocab = 1, hidden = 1, layers = 1, max_context = 4, slots = 1, eos = [], parameters = 1, active_parameters = 1}
target "t" {triple = "TRIPLE", cpu = "c", features = []}
unit 0 "cpu" {backend = "cpu", memory = 0}
unit 1 "other" {backend = "other", memory = 1}
memory 0 "ram" {arena_bytes = 320}
memory 1 "own" {arena_bytes = 64}
link 0 {from = 0, to = 1}
entry prefill[4] {out_rows = 4, logits = 4} {
  buffer 0 "%0" i32[4, 1] {offset = 0, bytes = 64}
  buffer 1 "%1" i32[4, 1] {offset = 64, bytes = 64}
  buffer 2 "%2" i32[4, 1] {offset = 128, bytes = 64}
  buffer 3 "%3" i32[4, 1] {offset = 192, bytes = 64}
  buffer 4 "l" f32[4, 1] {offset = 256, bytes = 64}
  buffer 5 "x@1" i32[4, 1] {offset = 0, bytes = 64, memory = 1}
  step 0 copy {words = 1, span = rows} (buffer 0, buffer 5) {unit = 1, rows = tokens, grid = one, deps = [], node = 0}
  step 1 copy {words = 1, span = rows} (buffer 5, buffer 4) {unit = 1, rows = tokens, grid = one, deps = [0], node = 0}
}
"#;

/// A unit that executes all steps or none.
struct Other {
    executes: bool,
    memory: Option<Region>,
}

impl ComputeUnit for Other {
    fn name(&self) -> &'static str {
        "another unit"
    }

    fn executes(&self, _: Builtin) -> bool {
        self.executes
    }

    fn take(&mut self, bytes: u64) -> Result<Option<Addr>, Error> {
        let memory = self.memory.insert(Region::new("a unit", bytes)?);
        Ok(Some(memory.base()))
    }

    unsafe fn submit(&self, _: &Launch<'_>, _: PoolThread) {}
}

/// The plan names the unit of each step, and each unit knows the steps that it executes: both are compared
/// before anything runs.
#[test]
fn step_unsupported_by_its_unit_is_rejected() {
    let target = plan(&ENTRIES).target.triple;
    let plan = moec_ir::text::parse_plan(&BESIDE.replace("TRIPLE", &target)).unwrap();
    let p = &Program::new(plan, &|_| None).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let open = |executes: bool| {
        let other = || Some(Executor::Unit(Box::new(Other { executes, memory: None })));
        let files = BundleReader::unchecked(dir.path());
        Engine::with_units(p, dir.path(), &mut |_| other(), &files, Options::default()).err()
    };
    assert!(open(true).is_none());
    let e = open(false).unwrap();
    assert!(
        matches!(&e, Error::Machine { what, .. } if what.starts_with("`another unit` does not execute step 0, `copy")),
        "{e}"
    );
    assert!(e.hint().unwrap().contains("--emulate"));
}

/// Parts that are linked into a `run`.
#[test]
fn encoded_plan_finds_its_kernels() {
    let plan = plan(&ENTRIES);
    let kernels: Vec<_> = plan.kernels.iter().map(|k| resolve(&k.symbol).unwrap()).collect();
    let bytes = plan.encode().unwrap();
    assert!(*Program::linked(&bytes, &kernels).unwrap() == plan);
    let few = Program::linked(&bytes, &kernels[1..]).unwrap_err();
    assert!(
        matches!(&few, Error::Bundle(why) if why.contains(&plan.kernels[kernels.len() - 1].symbol)),
        "{few}"
    );
    let cut = Program::linked(&bytes[..bytes.len() - 1], &kernels).unwrap_err();
    assert!(matches!(cut, Error::Bundle(_)), "{cut}");
}
