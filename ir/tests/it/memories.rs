//! Plans with several units and memories: those that the verifier accepts, and those that it refuses.

use moec_ir::Format;
use moec_ir::op::Score;
use moec_ir::plan::{Arg, FileRef, Layout, PagedLayer, Paging, Plan, Resident, Segment};
use moec_ir::text::parse_plan;
use moec_ir::verify;

/// The CPU copies rows to a GPU, which multiplies them by a matrix in its own memory. The result is copied
/// back, and overwrites the rows that were sent.
const TEXT: &str = r#"plan 24 {scratch_bytes = 64}
model "m" {vocab = 8, hidden = 8, layers = 1, max_context = 4, slots = 1, eos = [], parameters = 1, active_parameters = 1}
target "t" {triple = "t", cpu = "c", features = []}

unit 0 "cpu" {backend = "cpu", memory = 0}
unit 1 "gpu" {backend = "mirror", memory = 1}
memory 0 "ram" {arena_bytes = 768}
memory 1 "vram" {arena_bytes = 256, capacity = 832, residents = [resident(segment = 0), resident(segment = 1, matrices = [1])]}
link 0 {from = 0, to = 1}
file 0 "w.bin" {bytes = 768, sha256 = "0000000000000000000000000000000000000000000000000000000000000000"}
segment 0 "w" f32[8, 8] rows {file = 0, offset = 0, bytes = 256}
segment 1 "e" f32[2, 4, 8] rows {file = 0, offset = 256, bytes = 256}
kernel 0 "embed" {results = [1]}
kernel 1 "linear" {results = [3]}
kernel 2 "head" {results = [1]}
expert_placement fixed {
  layer 0 {layer = 0, units = [0, 1], starts = [0, 1]}
}

entry prefill[4] {out_rows = 4, logits = 6} {
  buffer 0 "%0" i32[4, 1] {offset = 0, bytes = 64}
  buffer 1 "%1" i32[4, 1] {offset = 64, bytes = 64}
  buffer 2 "%2" i32[4, 1] {offset = 128, bytes = 64}
  buffer 3 "%3" i32[4, 1] {offset = 192, bytes = 64}
  buffer 4 "%4" f32[4, 8] {offset = 256, bytes = 128}
  buffer 5 "%5@0" f32[4, 8] {offset = 256, bytes = 128}
  buffer 6 "%6" f32[4, 8] {offset = 384, bytes = 128}
  buffer 7 "%4@1" f32[4, 8] {offset = 0, bytes = 128, memory = 1}
  buffer 8 "%5" f32[4, 8] {offset = 128, bytes = 128, memory = 1}
  step 0 kernel 0 (buffer 0, buffer 4) {unit = 0, rows = tokens, grid = one, barrier = true, deps = [], node = 0}
  step 1 copy {words = 8, span = rows} (buffer 4, buffer 7) {unit = 1, rows = tokens, grid = one, deps = [0], node = 1}
  step 2 kernel 1 (buffer 7, segment 0, matrices 1, buffer 8) {unit = 1, rows = tokens, grid = one, deps = [1], node = 1}
  step 3 copy {words = 8, span = rows} (buffer 8, buffer 5) {unit = 1, rows = tokens, grid = one, deps = [0, 2], node = 1}
  step 4 kernel 2 (buffer 5, buffer 6) {unit = 0, rows = outputs, grid = one, barrier = true, deps = [3], node = 2}
}
"#;

fn plan() -> Plan {
    parse_plan(TEXT).unwrap()
}

fn refused(at: &str, message: &str, change: impl FnOnce(&mut Plan)) {
    let mut plan = plan();
    change(&mut plan);
    let error = verify::plan(&plan).unwrap_err();
    assert!(error.at.starts_with(at) && error.message.contains(message), "{error}");
}

#[test]
fn rows_may_be_copied_back_to_their_buffer() {
    let plan = plan();
    verify::plan(&plan).unwrap();
    // Arena, one segment, a table of two addresses with one matrix, scratch.
    assert_eq!(plan.peak(1, 1), Some(256 + 256 + 64 + 128 + 64));
    // Arena, and scratch of two threads; no step here reads a weight.
    assert_eq!(plan.peak(0, 2), Some(768 + 2 * 64));
    assert_eq!(plan.peak(2, 1), None);
}

#[test]
fn order_between_units_follows_dependencies() {
    let step = |p: &mut Plan, i: usize, deps: &[u32]| p.entries[0].steps[i].deps = deps.to_vec();
    // Without a dependency, a step would read the returned rows while they overwrite those that were sent.
    refused("entries[0].steps[4]", "step 3, which writes it, may not have ended", |p| step(p, 4, &[]));
    refused("entries[0].steps[1]", "step 0, which writes it, may not have ended", |p| {
        step(p, 1, &[]);
        step(p, 3, &[2]);
    });
    // The GPU executes its own queue in order, so an indirect dependency is enough.
    let mut plan = plan();
    step(&mut plan, 2, &[]);
    step(&mut plan, 3, &[]);
    verify::plan(&plan).unwrap();
    refused("entries[0].steps[2]", "a barrier of an accelerator", |p| p.entries[0].steps[2].barrier = true);
    refused("entries[0].steps[4]", "not before it", |p| step(p, 4, &[4]));
    refused("entries[0].steps[2]", "shares bytes with buffer 7", |p| p.entries[0].buffers[8].offset = 64);
    // An unsynchronized plan has no order between units yet.
    let mut plan = self::plan();
    step(&mut plan, 4, &[]);
    verify::unsynchronized_plan(&plan).unwrap();
}

#[test]
fn unit_accesses_only_its_own_memory() {
    let arg = |p: &mut Plan, i: usize, at: usize, arg| p.entries[0].steps[i].args[at] = arg;
    refused("entries[0].steps[2]", "not in memory 1", |p| arg(p, 2, 0, Arg::Buffer(4, 0)));
    refused("entries[0].steps[4]", "not in memory 0", |p| arg(p, 4, 0, Arg::Buffer(8, 0)));
    refused("entries[0].steps[2]", "not in memory 1", |p| p.memories[1].residents.clear());
    refused("entries[0].steps[2]", "not in memory 1", |p| p.memories[1].residents[1].matrices.clear());
    refused("entries[0].steps[1]", "a copy from memory 0 to memory 0", |p| arg(p, 1, 1, Arg::Buffer(6, 0)));
    refused("entries[0].steps[1]", "by a unit of memory 0", |p| {
        p.entries[0].steps[1].unit = 0;
        p.entries[0].steps[1].barrier = true;
        p.entries[0].steps[3].deps = vec![0, 1, 2];
    });
    refused("entries[0].steps[1]", "a copy from memory 0 to memory 1", |p| p.links.clear());
    refused("entries[0].logits", "is not f32", |p| p.entries[0].logits = 8);
    refused("entries[0].buffers[8]", "memory 2 is out of range", |p| p.entries[0].buffers[8].memory = 2);
}

#[test]
fn units_memories_and_experts_are_checked() {
    refused("memories[1]", "past its capacity", |p| p.memories[1].capacity = Some(767));
    refused("memories[0]", "a store serves", |p| {
        p.memories[0].residents.push(Resident { segment: 0, matrices: vec![] });
    });
    refused("memories[1].residents[1]", "matrices [2]", |p| p.memories[1].residents[1].matrices = vec![2]);
    refused("memories[1].residents[1]", "matrices [1, 1]", |p| {
        p.memories[1].residents[1].matrices = vec![1, 1];
    });
    refused("memories[1].residents[1]", "out of order", |p| p.memories[1].residents[1].segment = 0);
    refused("memories[1]", "a duplicate", |p| p.memories[1].name = "ram".into());
    refused("units[1]", "a duplicate", |p| p.units[1].name = "cpu".into());
    refused("units[1]", "no backend", |p| p.units[1].backend.clear());
    refused("units[1]", "0 queues, expected 1 to 64", |p| p.units[1].queues = 0);
    refused("units[1]", "memory 7 is out of range", |p| p.units[1].memory = 7);
    refused("units[1]", "beside a first unit without CPUs", |p| p.units[1].cpus = [1].into_iter().collect());
    refused("units[1]", "CPU 3 of another unit", |p| {
        p.units[0].cpus = (0..4).collect();
        p.units[1].cpus = (3..6).collect();
    });
    refused("units", "the CPU's memory", |p| p.units.swap(0, 1));
    refused("units", "2 units in memory 1", |p| {
        let mut other = p.units[1].clone();
        other.name = "other".into();
        p.units.push(other);
    });
    refused("units", "more than 64", |p| {
        let of = |i: u32| moec_ir::plan::UnitRef { name: i.to_string(), ..p.units[0].clone() };
        p.units = (0..65).map(of).collect();
    });
    refused("links[0]", "1 and 0", |p| (p.links[0].from, p.links[0].to) = (1, 0));
    refused("experts.layers[0]", "without an initial unit", |p| p.experts.layers[0].starts[0] = 2);
    refused("experts.layers[0]", "units [1, 0]", |p| p.experts.layers[0].units = vec![1, 0]);
    refused("experts.layers[0]", "must not move", |p| p.experts.layers[0].segments = vec![1]);
    refused("experts.layers[1]", "out of order", |p| p.experts.layers.push(p.experts.layers[0].clone()));
}

/// Expert 1 is on the disk of the second memory's host, in a segment of its own.
fn paged(p: &mut Plan) {
    p.files.push(FileRef { path: "ram1.bin".into(), bytes: 8192, sha256: [0; 32] });
    for (name, offset) in [("gate_up", 0), ("down", 4096)] {
        p.memories[1].residents.push(Resident { segment: p.segments.len() as u32, matrices: vec![1] });
        p.segments.push(Segment {
            name: name.into(),
            file: 1,
            offset,
            bytes: 128,
            pitch: 8192,
            shape: vec![1, 4, 8],
            format: Format::F32,
            layout: Layout::Rows,
        });
    }
    p.memories[1].paging = Some(Paging {
        budget: 1 << 20,
        threads: 1,
        resident: 768,
        process: 0,
        frame_bytes: 8192,
        frames: 1,
        staging: 2,
        block_bytes: 4096,
        policy: "lru".into(),
        pinned: vec![],
        neurons: 0,
        layers: vec![PagedLayer { layer: 0, experts: 2, k: 1, gate_up: 2, down: 3, score: Score::Softmax }],
        checksums: vec![0; 4],
        uses: vec![],
        cores: vec![],
        artifacts: Vec::new(),
        regions: Vec::new(),
    });
}

#[test]
fn experts_on_the_disk_of_another_host_are_its_own() {
    let mut plan = plan();
    let before = plan.peak(1, 1).unwrap();
    paged(&mut plan);
    verify::plan(&plan).unwrap();
    assert_eq!(parse_plan(&plan.to_string()).unwrap(), plan);
    // Experts on disk take none of the memory; in an emulation each part takes a table of two and its matrix.
    assert_eq!((plan.peak(1, 1), plan.whole(1)), (Some(before), Some(before + 2 * (64 + 128))));
    assert_eq!(plan.experts_off_disk(1), [(0, 0)]);
    assert_eq!(plan.experts_on_disk(1, 2).into_iter().collect::<Vec<_>>(), [(1, 0)]);
    let refused = |at: &str, message: &str, change: &dyn Fn(&mut Plan)| {
        refused(at, message, |p| {
            paged(p);
            change(p);
        });
    };
    let paging = |p: &mut Plan| p.memories[1].paging.clone().unwrap();
    refused("memories[0]", "the plan has its experts", &|p| p.memories[0].paging = Some(paging(p)));
    refused("memories[1].paging.layers[0]", "expert 0 is neither", &|p| p.experts.layers[0].starts[0] = 1);
    refused("memories[1].paging.layers[0]", "not in its memory", &|p| {
        p.memories[1].residents.pop();
    });
    refused("memories[1].paging", "in a budget of 1000", &|p| {
        p.memories[1].paging = Some(Paging { budget: 1000, ..paging(p) });
    });
    refused("memories[1].paging", "neurons or artifacts", &|p| {
        p.memories[1].paging = Some(Paging { neurons: 1, ..paging(p) });
    });
}
