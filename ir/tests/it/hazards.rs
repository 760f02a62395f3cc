//! Data hazards: each kind is refused without an explicit order, and accepted with one.

use moec_ir::op::Score;
use moec_ir::plan::{
    Arg, ArtifactBytes, Builtin, Code, CoreClass, FileRef, Layout, PagedLayer, Paging, Plan, Regions, Segment,
};
use moec_ir::text::parse_plan;
use moec_ir::{DType, Format, verify};

/// The CPU embeds ids, stores the rows in a state, and reads that state. A GPU in the same memory reads the
/// rows, too.
const TEXT: &str = r#"plan 24 {scratch_bytes = 64}
model "m" {vocab = 8, hidden = 8, layers = 1, max_context = 4, slots = 1, eos = [], parameters = 1, active_parameters = 1}
target "t" {triple = "t", cpu = "c", features = []}
unit 0 "cpu" {backend = "cpu", memory = 0}
unit 1 "gpu" {backend = "mirror", memory = 0}
unit 2 "other" {backend = "mirror", memory = 0}
memory 0 "ram" {arena_bytes = 1024}
state 0 "k" f32[1, 1, 4, 8] keys 4
kernel 0 "one_to_one" {results = [1]}
kernel 1 "store" {results = [0]}
kernel 2 "load" {results = [1]}
kernel 3 "two_to_one" {results = [2]}

entry prefill[4] {out_rows = 4, logits = 7} {
  buffer 0 "ids" i32[4, 1] {offset = 0, bytes = 64}
  buffer 1 "%1" i32[4, 1] {offset = 64, bytes = 64}
  buffer 2 "%2" i32[4, 1] {offset = 128, bytes = 64}
  buffer 3 "%3" i32[4, 1] {offset = 192, bytes = 64}
  buffer 4 "x" f32[4, 8] {offset = 256, bytes = 128}
  buffer 5 "gpu" f32[4, 8] {offset = 384, bytes = 128}
  buffer 6 "kept" f32[4, 8] {offset = 512, bytes = 128}
  buffer 7 "logits" f32[4, 8] {offset = 640, bytes = 128}
  step 0 kernel 0 (buffer 0, buffer 4) {unit = 0, rows = tokens, grid = one, deps = [], node = 0}
  step 1 kernel 0 (buffer 4, buffer 5) {unit = 1, rows = tokens, grid = one, deps = [0], node = 0}
  step 2 kernel 1 (state 0, buffer 4) {unit = 0, rows = tokens, grid = one, barrier = true, deps = [0], node = 0}
  step 3 kernel 2 (state 0, buffer 6) {unit = 0, rows = tokens, grid = one, barrier = true, deps = [2], node = 0}
  step 4 kernel 3 (buffer 5, buffer 6, buffer 7) {unit = 0, rows = tokens, grid = one, barrier = true, deps = [1, 3], node = 0}
}
"#;

fn plan() -> Plan {
    let plan = parse_plan(TEXT).unwrap();
    verify::plan(&plan).unwrap();
    plan
}

/// The error of the plan after a change.
#[track_caller]
fn refused(change: impl FnOnce(&mut Plan)) -> String {
    let mut plan = plan();
    change(&mut plan);
    verify::plan(&plan).unwrap_err().to_string()
}

#[track_caller]
fn accepted(change: impl FnOnce(&mut Plan)) {
    let mut plan = plan();
    change(&mut plan);
    verify::plan(&plan).unwrap();
}

/// Removes a step's barrier, and the dependencies between the CPU's own steps.
fn without_barrier(p: &mut Plan, step: usize) {
    p.entries[0].steps[step].barrier = false;
    deps(p, 2, &[]);
    deps(p, 3, &[]);
    deps(p, 4, &[1]);
}

fn deps(p: &mut Plan, step: usize, of: &[u32]) {
    p.entries[0].steps[step].deps = of.to_vec();
}

fn args(p: &mut Plan, step: usize, buffers: &[u32]) {
    p.entries[0].steps[step].args = buffers.iter().map(|&b| Arg::Buffer(b, 0)).collect();
}

#[test]
fn a_reader_waits_for_the_writer_on_its_unit() {
    assert_eq!(
        refused(|p| without_barrier(p, 2)),
        "entries[0].steps[2]: reads buffer 4 (x), and step 0, which writes it, may not have ended"
    );
    // The barrier of a later step comes too late, and one before the writer too early.
    let error = refused(|p| {
        without_barrier(p, 2);
        p.entries[0].steps[0].barrier = true;
    });
    assert!(error.contains("step 0, which writes it"), "{error}");
}

#[test]
fn a_reader_waits_for_the_writer_on_another_unit() {
    assert_eq!(
        refused(|p| deps(p, 1, &[])),
        "entries[0].steps[1]: reads buffer 4 (x), and step 0, which writes it, may not have ended"
    );
    assert_eq!(
        refused(|p| deps(p, 4, &[3])),
        "entries[0].steps[4]: reads buffer 5 (gpu), and step 1, which writes it, may not have ended"
    );
    // It is enough if another step of the unit has waited, also by way of a third unit.
    accepted(|p| {
        deps(p, 3, &[1]);
        deps(p, 4, &[]);
    });
    accepted(|p| {
        p.entries[0].steps[3].unit = 2;
        p.entries[0].steps[3].barrier = false;
        deps(p, 3, &[1, 2]);
        deps(p, 4, &[3]);
    });
}

#[test]
fn a_writer_waits_for_readers_on_its_unit() {
    // Step 3 overwrites the ids that step 0 reads, and nothing else orders the two.
    let over = |p: &mut Plan| {
        args(p, 0, &[0, 4]);
        args(p, 2, &[1, 0]);
        p.entries[0].steps[2].code = Code::Kernel(0);
        p.entries[0].steps[3].args[0] = Arg::State(0);
    };
    accepted(over);
    let error = refused(|p| {
        over(p);
        without_barrier(p, 2);
    });
    assert_eq!(
        error,
        "entries[0].steps[2]: writes buffer 0 (ids), and step 0, which reads it, may not have ended"
    );
}

#[test]
fn a_writer_waits_for_readers_on_another_unit() {
    // The GPU still reads the rows that the CPU overwrites.
    let over = |p: &mut Plan, of: &[u32]| {
        args(p, 3, &[0, 4]);
        p.entries[0].steps[3].code = Code::Kernel(0);
        deps(p, 3, of);
        args(p, 4, &[5, 4, 7]);
    };
    accepted(|p| over(p, &[1, 2]));
    assert_eq!(
        refused(|p| over(p, &[2])),
        "entries[0].steps[3]: writes buffer 4 (x), and step 1, which reads it, may not have ended"
    );
}

#[test]
fn writers_of_one_buffer_are_ordered() {
    let twice = |p: &mut Plan, of: &[u32]| {
        args(p, 3, &[0, 5]);
        p.entries[0].steps[3].code = Code::Kernel(0);
        deps(p, 3, of);
        args(p, 4, &[5, 4, 7]);
    };
    accepted(|p| twice(p, &[1, 2]));
    assert_eq!(
        refused(|p| twice(p, &[2])),
        "entries[0].steps[3]: writes buffer 5 (gpu), and step 1, which writes it, may not have ended"
    );
    // Two writers on one unit.
    let error = refused(|p| {
        without_barrier(p, 2);
        args(p, 2, &[0, 4]);
        p.entries[0].steps[2].code = Code::Kernel(0);
    });
    assert!(error.contains("steps[2]: writes buffer 4 (x), and step 0, which writes it"), "{error}");
}

#[test]
fn step_may_not_write_a_buffer_that_it_reads() {
    assert_eq!(
        refused(|p| args(p, 4, &[5, 7, 7])),
        "entries[0].steps[4]: reads buffer 7 (logits), which is not written, or was overwritten"
    );
    assert_eq!(
        refused(|p| args(p, 4, &[5, 6, 6])),
        "entries[0].steps[4]: writes buffer 6 (kept), which it also reads by another argument"
    );
}

#[test]
fn a_state_is_read_after_it_is_written() {
    assert_eq!(
        refused(|p| without_barrier(p, 3)),
        "entries[0].steps[3]: reads state 0, and step 2, which writes it, may not have ended"
    );
    // A buffer is overwritten after it was read, by the same or another unit.
    let before = |p: &mut Plan, of: &[u32]| {
        let e = &mut p.entries[0];
        e.steps[1].code = Code::Kernel(2);
        e.steps[1].args[0] = Arg::State(0);
        deps(p, 2, of);
    };
    accepted(|p| before(p, &[0, 1]));
    assert_eq!(
        refused(|p| before(p, &[0])),
        "entries[0].steps[2]: writes state 0, and step 1, which reads it, may not have ended"
    );
}

#[test]
fn buffer_memory_is_reused_only_after_its_last_reader() {
    // The CPU writes the rows that it keeps to the memory of the GPU's result.
    let shared = |p: &mut Plan, offset: u64| p.entries[0].buffers[6].offset = offset;
    assert_eq!(
        refused(|p| shared(p, 384)),
        "entries[0].steps[3]: writes buffer 6 (kept), which shares bytes with buffer 5 (gpu), and step 1, which writes \
         them, may not have ended"
    );
    // The two writers are ordered, but the last step reads both results.
    let error = refused(|p| {
        shared(p, 384);
        deps(p, 3, &[1, 2]);
    });
    assert_eq!(error, "entries[0].steps[4]: reads buffer 5 (gpu), which is not written, or was overwritten");
    // The CPU writes to the memory of the rows that the GPU reads.
    assert_eq!(
        refused(|p| shared(p, 256)),
        "entries[0].steps[3]: writes buffer 6 (kept), which shares bytes with buffer 4 (x), and step 1, which reads \
         them, may not have ended"
    );
    accepted(|p| {
        shared(p, 256);
        deps(p, 3, &[1, 2]);
    });
    // On one unit a barrier is enough: the ids are read, then overwritten by the logits.
    accepted(|p| p.entries[0].buffers[7].offset = 0);
}

#[test]
fn partly_overlapping_buffers_keep_their_dependencies() {
    // `kept` has one half of the bytes of `x`, and the logits the other, which the GPU may still read.
    let halves = |p: &mut Plan| {
        let e = &mut p.entries[0];
        (e.buffers[4].offset, e.buffers[4].bytes) = (256, 256);
        (e.buffers[5].offset, e.buffers[5].bytes) = (768, 128);
        (e.buffers[6].offset, e.buffers[6].bytes) = (256, 128);
        (e.buffers[7].offset, e.buffers[7].bytes) = (384, 128);
        args(p, 4, &[6, 6, 7]);
    };
    accepted(|p| {
        halves(p);
        deps(p, 3, &[1, 2]);
        deps(p, 4, &[]);
    });
    // A unit that waits for `kept` also waits for everything before it.
    accepted(|p| {
        halves(p);
        deps(p, 3, &[1, 2]);
        p.entries[0].steps[4].unit = 2;
        p.entries[0].steps[4].barrier = false;
        deps(p, 4, &[3]);
    });
    // A unit that waits for nothing writes to the other half.
    let error = refused(|p| {
        halves(p);
        deps(p, 3, &[1, 2]);
        p.entries[0].steps[4].unit = 2;
        p.entries[0].steps[4].barrier = false;
        deps(p, 4, &[]);
        args(p, 4, &[0, 0, 7]);
    });
    assert_eq!(
        error,
        "entries[0].steps[4]: writes buffer 7 (logits), which shares bytes with an earlier buffer, and step 0, which \
         writes them, may not have ended"
    );
}

#[test]
fn buffers_are_written_before_they_are_read() {
    assert_eq!(
        refused(|p| args(p, 0, &[6, 4])),
        "entries[0].steps[0]: reads buffer 6 (kept), which is not written, or was overwritten"
    );
    assert_eq!(
        refused(|p| {
            p.entries[0].steps.pop();
        }),
        "entries[0].logits: buffer 7 is not written, or was overwritten"
    );
}

#[test]
fn an_unsynchronised_plan_of_several_units_is_checked_in_the_order_of_its_steps() {
    let mut unsynchronized = plan();
    for step in &mut unsynchronized.entries[0].steps {
        (step.barrier, step.deps) = (false, vec![]);
    }
    assert!(verify::plan(&unsynchronized).is_err());
    verify::unsynchronized_plan(&unsynchronized).unwrap();
    unsynchronized.entries[0].steps.swap(0, 1);
    let error = verify::unsynchronized_plan(&unsynchronized).unwrap_err().to_string();
    assert_eq!(error, "entries[0].steps[0]: reads buffer 4 (x), which is not written, or was overwritten");
}

/// Experts of step 3 on disk.
fn paged(p: &mut Plan) {
    p.files.push(FileRef { path: "experts.bin".into(), bytes: 16384, sha256: [0; 32] });
    let segment = |name: &str, offset| Segment {
        name: name.into(),
        file: 0,
        offset,
        bytes: 512,
        pitch: 8192,
        shape: vec![2, 8, 8],
        format: Format::F32,
        layout: Layout::Rows,
    };
    p.segments = vec![segment("gate_up", 0), segment("down", 4096)];
    let layer = PagedLayer { layer: 0, experts: 2, k: 1, gate_up: 0, down: 1, score: Score::Softmax };
    p.paging = Some(Paging {
        budget: 1 << 20,
        threads: 1,
        resident: 0,
        process: 0,
        frame_bytes: 8192,
        frames: 1,
        staging: 2,
        block_bytes: 4096,
        policy: "lru".into(),
        pinned: vec![],
        neurons: 0,
        layers: vec![layer],
        checksums: vec![0; 4],
        uses: vec![],
        cores: vec![],
        artifacts: Vec::new(),
        regions: Vec::new(),
    });
    p.entries[0].steps[3].args[0] = Arg::Matrices(0);
}

/// As [`paged`], and step 1 requests them.
fn requested(p: &mut Plan) {
    paged(p);
    let e = &mut p.entries[0];
    e.buffers[5].dtype = DType::I32;
    let step = &mut e.steps[1];
    step.code = Code::Builtin(Builtin::RequestExperts { layer: 0, rows: 4, k: 1, strides: [8, 0, 0, 0] });
    (step.unit, step.barrier) = (0, true);
}

/// As [`requested`], where artifacts are loaded and freed: each entry point has these regions.
fn with_regions(p: &mut Plan, graphs: u64, frames: u32) {
    requested(p);
    let named = p.entries.iter().flat_map(|entry| p.artifacts_of(entry));
    let names: std::collections::BTreeSet<String> = named.map(str::to_owned).collect();
    let regions = vec![Regions { graphs, frames }; p.entries.len()];
    let paging = p.paging.as_mut().unwrap();
    paging.artifacts = names.into_iter().map(|package| ArtifactBytes { package, bytes: 10 }).collect();
    paging.regions = regions;
}

#[test]
fn regions_of_every_entry_point_fit_the_budget() {
    const ROOM: u64 = (1 << 20) - 3 * 8192;
    accepted(|p| with_regions(p, ROOM, 1));
    let error = refused(|p| with_regions(p, ROOM + 1, 1));
    assert!(error.starts_with("paging: a peak of ") && error.ends_with("in a budget of 1048576"), "{error}");
    let error = refused(|p| {
        with_regions(p, ROOM, 1);
        p.paging.as_mut().unwrap().regions.push(Regions { graphs: 0, frames: 1 });
    });
    assert!(error.contains("regions for") && error.contains("entry points"), "{error}");
    assert_eq!(refused(|p| with_regions(p, 20, 2)), "paging.regions: other frames than the plan's 1");
    let error = refused(|p| with_regions(p, 20, 0));
    assert!(error.ends_with("0 frames do not hold an expert"), "{error}");
    let error = refused(|p| {
        with_regions(p, 20, 1);
        p.paging.as_mut().unwrap().regions.clear();
        p.paging.as_mut().unwrap().artifacts =
            vec![ArtifactBytes { package: "artifacts/a.qnn".into(), bytes: 1 }];
    });
    assert_eq!(error, "paging.regions: artifacts without regions");
}

#[test]
fn experts_on_disk_are_read_after_their_request() {
    accepted(requested);
    assert_eq!(
        refused(|p| {
            requested(p);
            p.entries[0].steps[2].barrier = false;
            without_barrier(p, 3);
        }),
        "entries[0].steps[3]: reads experts of layer 0 on disk, and step 1, which writes it, may not have ended"
    );
    assert_eq!(
        refused(paged),
        "entries[0].steps[3]: reads experts of layer 0 on disk before they are requested"
    );
}

#[test]
fn some_kinds_of_cores_compute_and_one_at_most_reads() {
    let class = |count, computes, reads| CoreClass { name: "any".into(), count, computes, reads };
    let with = |cores: Vec<CoreClass>| {
        move |p: &mut Plan| {
            requested(p);
            p.paging.as_mut().unwrap().cores = cores.clone();
        }
    };
    accepted(with(vec![class(1, true, true), class(5, true, false), class(2, false, false)]));
    accepted(with(vec![class(4, true, false)]));
    for (cores, expected) in [
        (vec![class(1, false, true)], "no core computes"),
        (vec![class(1, true, true), class(1, true, true)], "two kinds of cores read"),
        (vec![class(0, true, false)], "a kind has no cores, or more than 1024"),
        (vec![class(u32::MAX, true, false)], "a kind has no cores, or more than 1024"),
        (vec![class(1, true, false); 17], "17 kinds of cores"),
    ] {
        assert_eq!(refused(with(cores)), format!("paging.cores: {expected}"));
    }
}
