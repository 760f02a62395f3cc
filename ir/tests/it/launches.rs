//! Plans with GPU kernels.

use crate::plans::{accepted, refused};
use moec_ir::plan::{Arg, Builtin, Code, Extent, Grid};
use moec_ir::text::parse_plan;
use moec_ir::verify;

/// One kernel on rows that were copied to its unit's memory; its result is copied back.
const TEXT: &str = r#"plan 24 {scratch_bytes = 0}
model "m" {vocab = 1, hidden = 1, layers = 1, max_context = 4, slots = 1, eos = [], parameters = 1, active_parameters = 1}
target "t" {triple = "t", cpu = "c", features = []}
unit 0 "cpu" {backend = "cpu", memory = 0}
unit 1 "gpu" {backend = "cuda", memory = 1}
memory 0 "ram" {arena_bytes = 320}
memory 1 "vram" {arena_bytes = 128}
link 0 {from = 0, to = 1}
launch 0 "k" {unit = 1, artifact = "artifacts/gpu.ptx", operands = 2, results = [1], grid = [rows(per = 2), fixed(blocks = 3), fixed(blocks = 1)], block = 32, shared = 0}
entry prefill[4] {out_rows = 4, logits = 4} {
  buffer 0 "%0" i32[4, 1] {offset = 0, bytes = 64}
  buffer 1 "%1" i32[4, 1] {offset = 64, bytes = 64}
  buffer 2 "%2" i32[4, 1] {offset = 128, bytes = 64}
  buffer 3 "%3" i32[4, 1] {offset = 192, bytes = 64}
  buffer 4 "l" f32[4, 1] {offset = 256, bytes = 64}
  buffer 5 "x@1" i32[4, 1] {offset = 0, bytes = 64, memory = 1}
  buffer 6 "l@1" f32[4, 1] {offset = 64, bytes = 64, memory = 1}
  step 0 copy {words = 1, span = rows} (buffer 0, buffer 5) {unit = 1, rows = tokens, grid = one, deps = [], node = 0}
  step 1 launch {kernel = 0} (buffer 5, buffer 6) {unit = 1, rows = tokens, grid = one, deps = [0], node = 0}
  step 2 copy {words = 1, span = rows} (buffer 6, buffer 4) {unit = 1, rows = tokens, grid = one, deps = [1], node = 0}
}
"#;

#[test]
fn launches_are_read_and_accepted() {
    accepted(TEXT);
    let odd = TEXT.replace("rows(per = 2), ", "");
    assert!(parse_plan(&odd).unwrap_err().to_string().contains("three extents"));
    let odd = TEXT.replace("rows(per = 2)", "rows(per = 2, of = 3)");
    assert!(parse_plan(&odd).unwrap_err().to_string().contains("`of`"));
}

#[test]
fn invalid_launches_are_refused() {
    refused(TEXT, "launches[0]", "unit 0", |p| p.launches[0].unit = 0);
    refused(TEXT, "launches[0]", "unit 7", |p| p.launches[0].unit = 7);
    refused(TEXT, "launches[0]", "the path", |p| p.launches[0].artifact = "../k.ptx".into());
    refused(TEXT, "launches[0]", "identifier", |p| p.launches[0].symbol = "k k".into());
    refused(TEXT, "launches[1]", "twice", |p| p.launches.push(p.launches[0].clone()));
    refused(TEXT, "launches[0]", "of 0 operands", |p| p.launches[0].operands = 0);
    for block in [0, 33, 2048] {
        refused(TEXT, "launches[0]", "threads", |p| p.launches[0].launch.block = block);
    }
    refused(TEXT, "launches[0]", "shared", |p| p.launches[0].launch.shared = 1 << 20);
    refused(TEXT, "launches[0]", "the grid", |p| p.launches[0].launch.grid[1] = Extent::Fixed(0));
    let step = "entries[0].steps[1]";
    refused(TEXT, step, "too many blocks", |p| {
        p.launches[0].launch.grid[1] = Extent::Active { k: 20_000, experts: 70_000 };
    });
    refused(TEXT, step, "2 addresses", |p| p.launches[0].operands = 3);
    refused(TEXT, step, "out of range", |p| {
        p.entries[0].steps[1].code = Code::Builtin(Builtin::Launch { kernel: 1 });
    });
    refused(TEXT, step, "not in memory 1", |p| p.entries[0].steps[1].args[0] = Arg::Buffer(0, 0));
    // A copy is one work item; the work items of a launch follow from its kernel.
    let tiles = Grid::Tiles { rows: 1, tiles: 2 };
    refused(TEXT, "entries[0].steps[0]", "one work item", |p| p.entries[0].steps[0].grid = tiles);
    let mut plan = parse_plan(TEXT).unwrap();
    plan.entries[0].steps[1].grid = tiles;
    verify::plan(&plan).unwrap();
}
