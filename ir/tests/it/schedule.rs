//! Plans whose experts are assigned while they run, and streams of commands.

use moec_ir::op::Score;
use moec_ir::plan::{Arg, Hybrid, Plan, Schedule};
use moec_ir::text::parse_plan;
use moec_ir::verify;

/// One layer of two experts: a card that holds the first, and modules that hold both and compute by streams.
const TEXT: &str = r#"plan 16 {scratch_bytes = 64}
model "m" {vocab = 8, hidden = 8, layers = 1, max_context = 4, slots = 1, eos = [], parameters = 1, active_parameters = 1}
target "t" {triple = "t", cpu = "c", features = []}

unit 0 "cpu" {family = "cpu", memory = 0}
unit 1 "card" {family = "mirror", memory = 1}
unit 2 "dimms" {family = "ndp", memory = 2}
memory 0 "ram" {arena_bytes = 1024}
memory 1 "vram" {arena_bytes = 0, residents = [segment(of = 0, matrices = [0]), segment(of = 1, matrices = [0])]}
memory 2 "modules" {arena_bytes = 512, residents = [segment(of = 0, matrices = [0, 1]), segment(of = 1, matrices = [0, 1])]}
link 0 {from = 0, to = 1}
link 1 {from = 0, to = 2}
file 0 "w.bin" {bytes = 1024, sha256 = "0000000000000000000000000000000000000000000000000000000000000000"}
segment 0 "gate_up" f32[2, 8, 8] rows {file = 0, offset = 0, bytes = 512}
segment 1 "down" f32[2, 8, 4] rows {file = 0, offset = 512, bytes = 256}
homes 0 {layer = 0, units = [0, 1, 2], experts = [1, 2]}
streams 0 "artifacts/dimms/0.bin" {layer = 0, unit = 2, experts = 2, hidden = 8, inner = 4, bias = false}
kernel 0 "embed" {results = [1, 2]}
kernel 1 "head" {results = [1]}

schedule {hot = 1, cold = 2, modules = 4, frames = 1, moves = true, refine = full, window_us = 2.5, expert_bytes = 768, row_bytes = 48, bring_us = 0.1, striped_us = 0.2, localized_us = 0.3, internal_us = 0.4, link_us = 0.5, hot_us = [[1, 1.0]], processor_us = [[1, 1.5], [16, 2.0]], cold_us = [[1, 3.25]]} {
  layer 0 {homes = 0, segments = [0, 1], modules = [-1, 3], cached = [0]}
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

fn refused(at: &str, message: &str, change: impl FnOnce(&mut Plan)) {
    let mut plan = parse_plan(TEXT).unwrap();
    change(&mut plan);
    let error = verify::plan(&plan).unwrap_err();
    assert!(error.at.starts_with(at) && error.message.contains(message), "{error}");
}

#[test]
fn a_schedule_is_read_and_accepted() {
    let plan = parse_plan(TEXT).unwrap();
    verify::plan(&plan).unwrap();
    assert_eq!(parse_plan(&plan.to_string()).unwrap(), plan);
    assert_eq!(Plan::decode(&plan.encode().unwrap()).unwrap(), plan);
    let mut odd = plan;
    odd.schedule.as_mut().unwrap().times.link_us = f64::NAN;
    assert!(Plan::decode(&odd.encode().unwrap()).is_err());
}

#[test]
fn streams_belong_to_their_unit() {
    refused("streams[0]", "unit 0", |p| p.streams[0].unit = 0);
    refused("streams[0]", "the path", |p| p.streams[0].artifact = "../x".into());
    refused("streams[0]", "experts", |p| p.streams[0].inner = 0);
    refused("streams[1]", "twice", |p| p.streams.push(p.streams[0].clone()));
    refused("entries[0].steps[3]", "not its unit's", |p| p.streams[0].unit = 1);
    refused("entries[0].steps[3]", "arguments", |p| p.streams[0].hidden = 16);
    refused("entries[0].steps[3]", "arguments", |p| p.streams[0].bias = true);
    refused("entries[0].steps[3]", "arguments", |p| {
        (p.entries[0].buffers[10].rows, p.entries[0].buffers[10].bytes) = (3, 96);
    });
    refused("entries[0].steps[3]", "arguments", |p| {
        (p.entries[0].buffers[8].rows, p.entries[0].buffers[8].bytes) = (16, 64);
        p.entries[0].steps[1].deps.clear();
        p.entries[0].steps[1].code = p.entries[0].steps[2].code;
        p.entries[0].steps[1].args = p.entries[0].steps[2].args.clone();
        p.entries[0].steps[1].deps = vec![0];
    });
    refused("entries[0].steps[3]", "arguments", |p| {
        p.entries[0].steps[3].args[3] = Arg::Matrices(0);
    });
}

#[test]
fn who_may_be_given_an_expert_holds_it() {
    let schedule = |p: &mut Plan, f: &dyn Fn(&mut Schedule)| f(p.schedule.as_mut().unwrap());
    refused("schedule.layers[0]", "unit 1 does not hold", |p| p.memories[1].residents[0].matrices = vec![1]);
    refused("schedule.layers[0]", "unit 2 does not hold", |p| p.memories[2].residents[1].matrices = vec![1]);
    refused("schedule.layers[0]", "2 experts in 1 frames", |p| {
        schedule(p, &|s| s.layers[0].cached = vec![0, 1]);
    });
    refused("schedule.layers[0]", "in no module", |p| schedule(p, &|s| s.layers[0].modules[0] = 4));
    refused("schedule.layers[0]", "out of range", |p| schedule(p, &|s| s.layers[0].homes = 1));
    refused("schedule.layers[0]", "segments", |p| schedule(p, &|s| s.layers[0].segments = vec![0, 9]));
    refused("schedule.layers[0]", "its units", |p| {
        (p.homes[0].units, p.homes[0].experts) = (vec![1, 2], vec![0, 1]);
    });
    refused("schedule.layers[0]", "its units", |p| {
        (p.homes[0].units, p.homes[0].experts) = (vec![0, 2], vec![0, 1]);
    });
    refused("schedule.layers[0]", "its streams read segments [0, 1]", |p| {
        schedule(p, &|s| s.layers[0].segments = vec![0]);
    });
    refused("schedule", "out of order", |p| schedule(p, &|s| s.layers.clear()));
    refused("schedule", "a curve", |p| schedule(p, &|s| s.times.processor.reverse()));
    refused("schedule", "a curve", |p| schedule(p, &|s| s.times.cold.clear()));
    refused("schedule", "a time", |p| schedule(p, &|s| s.window_us = -1.0));
    refused("schedule", "one unit", |p| schedule(p, &|s| s.hot = s.cold));
    refused("schedule", "modules", |p| schedule(p, &|s| s.modules = 0));
    // Without a card everything is the processor's or the modules'.
    let mut plan = parse_plan(TEXT).unwrap();
    plan.homes[0].units = vec![0, 2];
    plan.homes[0].experts = vec![0, 1];
    let s = plan.schedule.as_mut().unwrap();
    (s.hot, s.frames) = (None, 0);
    s.times.hot.clear();
    s.layers[0].cached.clear();
    verify::plan(&plan).unwrap();
}

/// Frames that all layers share.
#[test]
fn shared_frames_are_of_one_unit_and_hold_who_is_pinned() {
    let framed = |p: &mut Plan, change: &dyn Fn(&mut Schedule, &mut Hybrid)| {
        let s = p.schedule.as_mut().unwrap();
        (s.cold, s.modules, s.layers[0].modules) = (None, 0, vec![-1; 2]);
        s.times.cold.clear();
        let mut hybrid = Hybrid {
            divides: ["cut".into(), "cut".into()],
            keeps: "lru".into(),
            ahead: 3,
            first_us: [1.0, 0.0, 2.5],
            k: 1,
            score: Score::Softmax,
            pinned: vec![(0, 0)],
        };
        change(s, &mut hybrid);
        s.hybrid = Some(hybrid);
    };
    let wrong = |message: &str, change: &dyn Fn(&mut Schedule, &mut Hybrid)| {
        refused("schedule", message, |p| framed(p, change));
    };
    wrong("beside modules", &|s, _| {
        (s.cold, s.modules) = (Some(2), 4);
        s.times.cold = vec![(1, 1.0)];
    });
    wrong("0 of 2 experts", &|_, h| h.k = 0);
    wrong("3 of 2 experts", &|_, h| h.k = 3);
    wrong("begin without an expert", &|s, _| s.layers[0].cached.clear());
    wrong("1 experts in 0 frames", &|s, _| s.frames = 0);
    wrong("a pinned expert", &|_, h| h.pinned = vec![(0, 1)]);
    wrong("a pinned expert", &|_, h| h.pinned = vec![(1, 0)]);
    wrong("a time", &|_, h| h.first_us[1] = f64::INFINITY);
    wrong("matrices of other sizes", &|s, _| {
        let mut other = s.layers[0].clone();
        (other.homes, other.segments) = (1, vec![1, 0]);
        s.layers.push(other);
        s.frames = 2;
    });
    let mut plan = parse_plan(TEXT).unwrap();
    framed(&mut plan, &|s, _| s.layers[0].brought = vec![0, 1]);
    assert_eq!(parse_plan(&plan.to_string()).unwrap(), plan);
    assert_eq!(Plan::decode(&plan.encode().unwrap()).unwrap(), plan);
    assert_eq!(plan.asked_layers(), [(2, 1)]);
    assert_eq!(plan.segments_to_bring().into_iter().collect::<Vec<_>>(), [0, 1]);
}
