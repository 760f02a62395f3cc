//! Plans whose experts are assigned to units at run time, and NDP command streams.

use crate::plans::{accepted, refused};
use moec_ir::op::Score;
use moec_ir::plan::{Arg, Cached, ExpertPlacement, ExpertPolicy, Plan, PromptUnits, Scheduled};
use moec_ir::text::parse_plan;
use moec_ir::verify;

/// One layer of two experts: a GPU holds the first; NDP DIMMs hold both and execute command streams.
const TEXT: &str = r#"plan 24 {scratch_bytes = 64}
model "m" {vocab = 8, hidden = 8, layers = 1, max_context = 4, slots = 1, eos = [], parameters = 1, active_parameters = 1}
target "t" {triple = "t", cpu = "c", features = []}

unit 0 "cpu" {backend = "cpu", memory = 0}
unit 1 "gpu" {backend = "mirror", memory = 1}
unit 2 "dimms" {backend = "ndp", memory = 2}
memory 0 "ram" {arena_bytes = 1024}
memory 1 "vram" {arena_bytes = 0, residents = [resident(segment = 0, matrices = [0]), resident(segment = 1, matrices = [0])]}
memory 2 "dimms" {arena_bytes = 512, residents = [resident(segment = 0, matrices = [0, 1]), resident(segment = 1, matrices = [0, 1])]}
link 0 {from = 0, to = 1}
link 1 {from = 0, to = 2}
file 0 "w.bin" {bytes = 1024, sha256 = "0000000000000000000000000000000000000000000000000000000000000000"}
segment 0 "gate_up" f32[2, 8, 8] rows {file = 0, offset = 0, bytes = 512}
segment 1 "down" f32[2, 8, 4] rows {file = 0, offset = 512, bytes = 256}
streams 0 {layer = 0, unit = 2, artifact = "artifacts/dimms/0.bin", experts = 2, hidden = 8, inner = 4, bias = false}
kernel 0 "embed" {results = [1, 2]}
kernel 1 "head" {results = [1]}

expert_placement scheduled {hot = 1, cold = 2, dimms = 4, frames = 1, moves = true, refine = full, prefill = auto, prompt_window = [[4, 2.5]], decode_window = [[1, 1.5]], costs = us(hot = [[1, 1.0]], cpu = [[1, 1.5], [16, 2.0]], cold = [[1, 3.25]], bring_us = 0.1, striped_us = 0.2, localized_us = 0.3, internal_us = 0.4, link_us = 0.5, expert_bytes = 768, row_bytes = 48)} {
  layer 0 {layer = 0, units = [0, 1, 2], starts = [1, 2], segments = [0, 1], dimms = [-1, 3]}
}

entry prefill[4] {out_rows = 4, logits = 7} {
  buffer 0 "%0" i32[4, 1] {offset = 0, bytes = 64}
  buffer 1 "%1" i32[4, 1] {offset = 64, bytes = 64}
  buffer 2 "%2" i32[4, 1] {offset = 128, bytes = 64}
  buffer 3 "%3" i32[4, 1] {offset = 192, bytes = 64}
  buffer 4 "%4" f32[4, 8] {offset = 256, bytes = 128}
  buffer 5 "t" i32[40, 1] {offset = 512, bytes = 192}
  buffer 6 "y" f32[4, 8] {offset = 384, bytes = 128}
  buffer 7 "l" f32[4, 8] {offset = 704, bytes = 128}
  buffer 8 "t@2" i32[40, 1] {offset = 0, bytes = 192, memory = 2}
  buffer 9 "x@2" f32[4, 8] {offset = 192, bytes = 128, memory = 2}
  buffer 10 "y@2" f32[4, 8] {offset = 320, bytes = 128, memory = 2}
  step 0 kernel 0 (buffer 0, buffer 4, buffer 5) {unit = 0, rows = tokens, grid = one, barrier = true, deps = [], node = 0}
  step 1 copy {words = 40, span = whole} (buffer 5, buffer 8) {unit = 2, rows = tokens, grid = one, deps = [0], node = 1}
  step 2 copy {words = 8, span = rows} (buffer 4, buffer 9) {unit = 2, rows = tokens, grid = one, deps = [0], node = 1}
  step 3 expert_streams {set = 0, rows = 4, k = 1} (buffer 9, buffer 8, matrices 0, matrices 1, buffer 10) {unit = 2, rows = tokens, grid = one, deps = [1, 2], node = 1}
  step 4 copy {words = 8, span = rows} (buffer 10, buffer 6) {unit = 2, rows = tokens, grid = one, deps = [3], node = 1}
  step 5 kernel 1 (buffer 6, buffer 7) {unit = 0, rows = outputs, grid = one, barrier = true, deps = [4], node = 2}
}
"#;

#[expect(clippy::panic, reason = "a test fails by panicking")]
fn scheduled(plan: &mut Plan) -> &mut Scheduled {
    let ExpertPolicy::Scheduled(s) = &mut plan.experts.policy else { panic!("they are scheduled") };
    s
}

#[test]
fn scheduled_experts_are_read_and_accepted() {
    let plan = accepted(TEXT);
    let mut odd = plan;
    scheduled(&mut odd).costs.link_us = f64::NAN;
    assert!(Plan::decode(&odd.encode().unwrap()).is_err());
}

#[test]
fn command_streams_match_their_unit_and_step() {
    refused(TEXT, "streams[0]", "unit 0", |p| p.streams[0].unit = 0);
    refused(TEXT, "streams[0]", "the path", |p| p.streams[0].artifact = "../x".into());
    refused(TEXT, "streams[0]", "experts", |p| p.streams[0].inner = 0);
    refused(TEXT, "streams[1]", "twice", |p| p.streams.push(p.streams[0].clone()));
    refused(TEXT, "entries[0].steps[3]", "not its unit's", |p| p.streams[0].unit = 1);
    refused(TEXT, "entries[0].steps[3]", "arguments", |p| p.streams[0].hidden = 16);
    refused(TEXT, "entries[0].steps[3]", "arguments", |p| p.streams[0].bias = true);
    refused(TEXT, "entries[0].steps[3]", "arguments", |p| {
        (p.entries[0].buffers[10].rows, p.entries[0].buffers[10].bytes) = (3, 96);
    });
    refused(TEXT, "entries[0].steps[3]", "arguments", |p| {
        (p.entries[0].buffers[8].rows, p.entries[0].buffers[8].bytes) = (16, 64);
        p.entries[0].steps[1].deps.clear();
        p.entries[0].steps[1].code = p.entries[0].steps[2].code;
        p.entries[0].steps[1].args = p.entries[0].steps[2].args.clone();
        p.entries[0].steps[1].deps = vec![0];
    });
    refused(TEXT, "entries[0].steps[3]", "arguments", |p| {
        p.entries[0].steps[3].args[3] = Arg::Matrices(0);
    });
}

#[test]
fn candidate_units_of_an_expert_hold_its_weights() {
    let layer =
        |message: &str, change: &dyn Fn(&mut Plan)| refused(TEXT, "experts.layers[0]", message, change);
    layer("unit 1 does not hold", &|p| p.memories[1].residents[0].matrices = vec![1]);
    layer("unit 2 does not hold", &|p| p.memories[2].residents[1].matrices = vec![1]);
    layer("2 experts in 1 frames", &|p| p.experts.layers[0].starts = vec![1, 1]);
    layer("in no DIMM", &|p| p.experts.layers[0].dimms[0] = 4);
    layer("in no DIMM", &|p| p.experts.layers[0].dimms.clear());
    layer("segments", &|p| p.experts.layers[0].segments = vec![0, 9]);
    layer("its units", &|p| {
        (p.experts.layers[0].units, p.experts.layers[0].starts) = (vec![1, 2], vec![0, 1]);
    });
    layer("its units", &|p| {
        (p.experts.layers[0].units, p.experts.layers[0].starts) = (vec![0, 2], vec![0, 1]);
    });
    layer("its streams read segments [0, 1]", &|p| p.experts.layers[0].segments = vec![0]);
    let policy = |message: &str, change: &dyn Fn(&mut Scheduled)| {
        refused(TEXT, "experts.policy", message, |p| change(scheduled(p)));
    };
    refused(TEXT, "experts.policy", "no layers", |p| p.experts.layers.clear());
    policy("a curve", &|s| s.costs.cpu.reverse());
    policy("a curve", &|s| s.costs.cold.clear());
    policy("a time", &|s| s.decode_window[0].1 = -1.0);
    policy("a time", &|s| s.traffic = vec![(1, f64::INFINITY)]);
    policy("windows", &|s| s.prompt_window.clear());
    policy("prompts on a hot unit", &|s| s.prefill = PromptUnits::Hot);
    policy("one unit", &|s| s.hot = Some(s.cold));
    policy("NDP DIMMs", &|s| s.dimms = 0);
    // Without a GPU, the CPU and the NDP DIMMs compute all experts.
    let mut plan = parse_plan(TEXT).unwrap();
    (plan.experts.layers[0].units, plan.experts.layers[0].starts) = (vec![0, 2], vec![0, 1]);
    let s = scheduled(&mut plan);
    (s.hot, s.frames) = (None, 0);
    s.costs.hot.clear();
    verify::plan(&plan).unwrap();
}

/// Cache frames that all layers share.
#[test]
fn expert_cache_has_one_unit_and_room_for_pinned_experts() {
    let framed = |p: &mut Plan, change: &dyn Fn(&mut ExpertPlacement)| {
        let mut costs = scheduled(p).costs.clone();
        costs.cold.clear();
        let layer = &mut p.experts.layers[0];
        (layer.units, layer.starts, layer.dimms) = (vec![0, 1], vec![1, 0], Vec::new());
        p.experts.policy = ExpertPolicy::Cached(Cached {
            hot: 1,
            frames: 1,
            divides: ["cut".into(), "cut".into()],
            keeps: "lru".into(),
            ahead: 3,
            first_us: [1.0, 0.0, 2.5],
            launch_us: 0.5,
            k: 1,
            score: Score::Softmax,
            pinned: vec![(0, 0)],
            window_us: 2.5,
            costs,
        });
        change(&mut p.experts);
    };
    let placed = |at: &str, message: &str, change: &dyn Fn(&mut ExpertPlacement)| {
        refused(TEXT, at, message, |p| framed(p, change));
    };
    let wrong = |message: &str, change: &dyn Fn(&mut Cached)| {
        placed("experts.policy", message, &|p| match &mut p.policy {
            ExpertPolicy::Cached(cached) => change(cached),
            _ => panic!("a cache"),
        });
    };
    wrong("0 of 2 experts", &|c| c.k = 0);
    wrong("3 of 2 experts", &|c| c.k = 3);
    wrong("1 experts in 0 frames", &|c| c.frames = 0);
    wrong("a pinned expert", &|c| c.pinned = vec![(0, 1)]);
    wrong("a pinned expert", &|c| c.pinned = vec![(1, 0)]);
    wrong("a time", &|c| c.first_us[1] = f64::INFINITY);
    wrong("a time", &|c| c.launch_us = -1.0);
    placed("experts.policy", "without an initial expert", &|p| p.layers[0].starts = vec![0, 0]);
    placed("experts.layers[0]", "in no DIMM", &|p| p.layers[0].dimms = vec![-1; 2]);
    placed("experts.policy", "matrices of other sizes", &|p| {
        let mut other = p.layers[0].clone();
        (other.layer, other.segments) = (1, vec![1, 0]);
        p.layers.push(other);
    });
    let mut plan = parse_plan(TEXT).unwrap();
    framed(&mut plan, &|p| p.layers[0].brought = vec![0, 1]);
    assert_eq!(parse_plan(&plan.to_string()).unwrap(), plan);
    assert_eq!(Plan::decode(&plan.encode().unwrap()).unwrap(), plan);
    assert_eq!(plan.requested_layers(), [(2, 1)]);
    assert_eq!(plan.segments_to_bring().into_iter().collect::<Vec<_>>(), [0, 1]);
}
