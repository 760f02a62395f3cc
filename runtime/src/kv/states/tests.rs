//! Tests on the bytes of slots.

use super::*;
use moec_ir::Format;
use moec_ir::plan::{CacheOrder, StateBuf};
use moec_ir::state::CACHED;

#[test]
fn state_inside_a_static_graph_cannot_be_forked() {
    let text = r#"plan 24 {scratch_bytes = 0}
        model "m" {vocab = 1, hidden = 1, layers = 1, max_context = 1, slots = 2, eos = [], parameters = 1, active_parameters = 1}
        target "t" {triple = "", cpu = "", features = []}
        graph 0 {package = "attention.mlpackage", function = "chunk", stateful = true}"#;
    let mut plan = moec_ir::text::parse_plan(text).unwrap();
    let mut states = States::new(&plan, &[], 9).unwrap();
    let e = states.fork(0, 1, 0, Units::default()).unwrap_err();
    assert_eq!(
        e.to_string(),
        "state `attention.mlpackage chunk` (cache) cannot be copied to another slot: another unit keeps it"
    );
    assert_eq!(e.hint().as_deref(), Some("give the sequence to every slot"));
    plan.graphs[0].stateful = false;
    States::new(&plan, &[], 9).unwrap().fork(0, 1, 0, Units::default()).unwrap();
}

/// A block of values that a call begins and does not fill is cleared in every head of its slot; nothing else
/// is cleared.
#[test]
fn blocks_of_values_begin_empty() {
    let text = r#"plan 24 {scratch_bytes = 0}
        model "m" {vocab = 1, hidden = 1, layers = 1, max_context = 36, slots = 2, eos = [], parameters = 1, active_parameters = 1}
        target "t" {triple = "", cpu = "", features = []}
        memory 0 "ram" {arena_bytes = 0}
        state 0 "k" f32[2, 3, 36, 4] keys 4
        state 1 "v" f32[2, 3, 36, 4] values 4 12"#;
    let plan = moec_ir::text::parse_plan(text).unwrap();
    let (head, block) = (36 * 4 * 4, 12 * 4 * 4);
    let cleared = |rows: &[(u32, usize)]| {
        let mut states = States::new(&plan, &[], 9).unwrap();
        let bytes = states.region.bytes();
        states.region.part_mut(0, bytes).unwrap().fill(0xff);
        states.begin(rows.iter().copied(), Units::default()).unwrap();
        let at = states.values[0].at;
        let (keys, values) = (states.region.part(0, at).unwrap(), states.region.part(at, 6 * head).unwrap());
        assert!(keys.iter().all(|&b| b == 0xff));
        let mut found = Vec::new();
        for (i, block) in values.chunks(block).enumerate() {
            let empty = block.iter().all(|&b| b == 0);
            assert!(empty || block.iter().all(|&b| b == 0xff), "a part of a block");
            if empty {
                found.push((i / 9, i / 3 % 3, i % 3));
            }
        }
        found
    };
    let heads = |slot, block| [0, 1, 2].map(|head| (slot, head, block)).to_vec();
    let run = |from: usize, to: usize| (from..to).map(|pos| (1, pos)).collect::<Vec<_>>();
    assert_eq!(cleared(&run(0, 5)), heads(1, 0));
    assert_eq!(cleared(&run(0, 12)), []);
    assert_eq!(cleared(&run(5, 11)), []);
    assert_eq!(cleared(&run(3, 25)), heads(1, 2));
    assert_eq!(cleared(&[(0, 12), (1, 24)]), [heads(0, 1), heads(1, 2)].concat());
    assert_eq!(cleared(&[(0, 13), (1, 23)]), []);
}

/// Exactly the values of existing tokens are copied, in every layout.
#[test]
fn only_values_of_existing_tokens_are_copied() {
    let orders = [
        (CacheOrder::Rows, &[Format::F32][..]),
        (CacheOrder::Keys { nr: 16 }, &CACHED),
        (CacheOrder::Values { nr: 8, block: 12 }, &CACHED),
    ];
    for (order, formats) in orders {
        for &format in formats {
            let state = StateBuf {
                name: String::new(),
                memory: 0,
                shape: [3, 2, 50, 40],
                format,
                order,
                rotated: 1,
                kind: StateKind::Cache,
                snapshots: 0,
            };
            let whole = state.head().bytes().unwrap();
            for tokens in [0, 1, 11, 12, 13, 16, 17, 49, 50] {
                let (bytes, starts) = heads(&state, 0, 2, tokens).unwrap();
                let starts: Vec<_> = starts.collect();
                assert_eq!(starts, [(0, 4 * whole), (whole, 5 * whole)]);
                let size = match format {
                    Format::F32 => 4,
                    Format::Q8 | Format::Q5 | Format::Q4 => 1,
                    _ => 2,
                };
                let inside = |t: usize, c: usize| {
                    let place = state.head().offsets(t, c);
                    place.at + size <= bytes
                        && place.fifth.is_none_or(|(at, _)| at < bytes)
                        && place.scale.is_none_or(|s| s + 2 <= bytes)
                };
                let all = (0..tokens).all(|t| (0..40).all(|c| inside(t, c)));
                assert!(all && bytes <= whole, "{order:?} of {format}, {tokens} tokens");
            }
            assert!(heads(&state, 0, 2, 51).is_none() && heads(&state, 0, 3, 1).is_none());
            // States that are not stored in the order of positions are copied whole.
            for kind in [StateKind::Recurrent, StateKind::Ring { window: 4 }] {
                let whole = StateBuf { kind, ..state.clone() };
                assert_eq!(heads(&whole, 0, 2, 1000).map(|(bytes, _)| bytes), whole.head().bytes());
            }
        }
    }
}
