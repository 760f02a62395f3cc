//! Plans with static graphs of experts' hot neurons.

use crate::plans::{accepted, refused};
use moec_ir::EntryKind;
use moec_ir::plan::{Arg, Builtin, Code};
use moec_ir::verify;

/// Two experts; two sequences choose one each. The results of the graphs have the shape of logits, and take
/// their place.
const TEXT: &str = r#"plan 24 {scratch_bytes = 0}
model "m" {vocab = 1, hidden = 1, layers = 1, max_context = 4, slots = 2, eos = [], parameters = 1, active_parameters = 1}
target "t" {triple = "t", cpu = "c", features = []}
unit 0 "cpu" {backend = "cpu", memory = 0}
unit 1 "npu" {backend = "qnn", memory = 0}
memory 0 "ram" {arena_bytes = 448}
kernel 0 "embed" {results = [1, 2]}
graph 0 {package = "artifacts/h.qnn", function = "expert0_batch2", inputs = [tensor(name = "x", shape = [2, 1, 1, 1])], outputs = [tensor(name = "y", shape = [2, 1, 1, 1])]}
graph 1 {package = "artifacts/h.qnn", function = "expert1_batch2", inputs = [tensor(name = "x", shape = [2, 1, 1, 1])], outputs = [tensor(name = "y", shape = [2, 1, 1, 1])]}
set 0 {layer = 0, overflow = prune, capacities = [2, 2], groups = [group(graph = 0, capacity = 2, experts = [0]), group(graph = 1, capacity = 2, experts = [1])], batch = 2, hot = 3}
entry decode[2] {out_rows = 2, logits = 6} {
  buffer 0 "%0" i32[2, 1] {offset = 0, bytes = 64}
  buffer 1 "%1" i32[2, 1] {offset = 64, bytes = 64}
  buffer 2 "%2" i32[2, 1] {offset = 128, bytes = 64}
  buffer 3 "%3" i32[2, 1] {offset = 192, bytes = 64}
  buffer 4 "x" f32[2, 1] {offset = 256, bytes = 64}
  buffer 5 "t" i32[13, 1] {offset = 320, bytes = 64}
  buffer 6 "y" f32[2, 1] {offset = 384, bytes = 64}
  step 0 kernel 0 (buffer 0, buffer 4, buffer 5) {unit = 0, rows = tokens, grid = one, barrier = true, deps = [], node = 0}
  step 1 expert_graphs {set = 0, rows = 2, k = 1, hidden = 1} (buffer 4, buffer 5, buffer 6) {unit = 1, rows = tokens, grid = one, deps = [0], node = 0}
}
"#;

#[test]
fn hot_neurons_are_read_and_accepted() {
    let plan = accepted(TEXT);
    assert_eq!((plan.expert_sets[0].batch, plan.expert_sets[0].hot), (Some(2), Some(3)));
    // A layer has one set of graphs for each batch size, and one for whole experts.
    let mut more = plan.clone();
    let mut other = plan.expert_sets[0].clone();
    (other.batch, other.hot) = (None, None);
    more.expert_sets.push(other);
    verify::plan(&more).unwrap();
}

#[test]
fn every_expert_has_a_graph_for_all_rows_of_its_batch() {
    refused(TEXT, "sets[1]", "layer 0 occurs twice", |p| p.expert_sets.push(p.expert_sets[0].clone()));
    refused(TEXT, "sets[0]", "a graph of their own for 1 rows", |p| {
        p.expert_sets[0].batch = Some(1);
    });
    refused(TEXT, "sets[0]", "a graph of their own for 0 rows", |p| p.expert_sets[0].batch = None);
    refused(TEXT, "sets[0]", "a graph of their own", |p| p.expert_sets[0].hot = Some(0));
    // Whole experts, too, have room for all rows that are decoded.
    refused(TEXT, "sets[0]", "without room for 3 rows", |p| {
        (p.expert_sets[0].batch, p.expert_sets[0].hot) = (Some(3), None);
    });
    refused(TEXT, "sets[0]", "a graph of their own", |p| {
        p.expert_sets[0].groups.pop();
    });
    refused(TEXT, "sets[0]", "a graph of their own", |p| {
        p.expert_sets[0].groups[0].experts = vec![0, 1];
        p.expert_sets[0].groups.pop();
        p.graphs[0].inputs[0].shape[0] = 4;
        p.graphs[0].outputs[0].shape[0] = 4;
    });
}

#[test]
fn hot_sets_run_only_when_decoding_their_batch() {
    let step = "entries[0].steps[1]";
    refused(TEXT, step, "do not fit", |p| p.entries[0].kind = EntryKind::Prefill(2));
    refused(TEXT, step, "do not fit", |p| {
        let Code::Builtin(Builtin::Experts { rows, .. }) = &mut p.entries[0].steps[1].code else { return };
        *rows = 3;
        p.entries[0].buffers[5].bytes = 128;
        p.entries[0].buffers[5].rows = 15;
        p.memories[0].arena_bytes = 1024;
    });
    // Hot neurons have no capacity, so a step that limits it is invalid.
    refused(TEXT, step, "do not fit", |p| {
        let step = &mut p.entries[0].steps[1];
        step.code = Code::Builtin(Builtin::LimitCapacity { set: 0, k: 1, channels: 1 });
        step.args = [0, 4, 1, 2].map(|b| Arg::Buffer(b, 0)).to_vec();
    });
}
