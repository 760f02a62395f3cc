//! Offsets of the numbers of a KV cache.

use moec_ir::plan::{CacheOrder, StateBuf};
use moec_ir::state::CacheHead;
use moec_ir::{Format, StateKind};
use std::collections::HashSet;

const CACHED: [Format; 3] = [Format::F32, Format::Bf16, Format::Q8];

fn orders() -> Vec<CacheOrder> {
    let panels = [2, 8, 32];
    let keys = panels.map(|nr| CacheOrder::Keys { nr });
    keys.into_iter().chain(panels.map(|nr| CacheOrder::Values { nr, block: 16 })).collect()
}

#[test]
fn every_cache_element_has_its_own_address() {
    for order in orders() {
        for format in CACHED {
            for (ctx, dim) in [(1, 1), (16, 32), (40, 5), (33, 80)] {
                let head = CacheHead { format, order, ctx, dim };
                let bytes = head.bytes().unwrap();
                let size = match format {
                    Format::F32 => 4,
                    Format::Q8 => 1,
                    _ => 2,
                };
                let mut taken = HashSet::new();
                let mut scales = HashSet::new();
                for t in 0..ctx {
                    for c in 0..dim {
                        let place = head.offsets(t, c);
                        assert!(
                            place.at + size <= bytes && place.at.is_multiple_of(size),
                            "{head:?} {t} {c}"
                        );
                        assert!(taken.insert(place.at), "{head:?} {t} {c}");
                        scales.extend(place.scale.map(|at| (at, t, c / 32)));
                    }
                }
                // One scale per token and group; scales overlap neither each other nor the codes.
                let groups = if format == Format::Q8 { ctx * dim.div_ceil(32) } else { 0 };
                let places: HashSet<usize> = scales.iter().map(|s| s.0).collect();
                assert_eq!((scales.len(), places.len()), (groups, groups), "{head:?}");
                assert!(
                    places
                        .iter()
                        .all(|&at| at + 2 <= bytes && !taken.contains(&at) && !taken.contains(&(at + 1)))
                );
            }
        }
    }
}

#[test]
fn memory_reads_back_as_the_tensor() {
    for order in orders().into_iter().chain([CacheOrder::Rows]) {
        let state = StateBuf {
            name: "k".into(),
            memory: 0,
            shape: [2, 3, 20, 6],
            format: Format::F32,
            order,
            kind: StateKind::Cache,
            snapshots: 0,
        };
        let head = state.head();
        let size = head.bytes().unwrap();
        let mut memory = vec![0; state.bytes() as usize];
        let numbers: Vec<f32> = (0..2 * 3 * 20 * 6).map(|i| i as f32).collect();
        for (i, x) in numbers.iter().enumerate() {
            let at = i / 120 * size + head.offsets(i / 6 % 20, i % 6).at;
            memory[at..at + 4].copy_from_slice(&x.to_le_bytes());
        }
        assert_eq!(state.read(&memory).unwrap(), numbers);
        assert_eq!(state.read(&memory[1..]), None);
    }
}

#[test]
fn codes_are_read_with_their_scales() {
    let order = CacheOrder::Keys { nr: 2 };
    let head = CacheHead { format: Format::Q8, order, ctx: 2, dim: 33 };
    let mut memory = vec![0; head.bytes().unwrap()];
    let place = head.offsets(1, 32);
    memory[place.at] = (-3_i8).cast_unsigned();
    memory[place.scale.unwrap()..][..2].copy_from_slice(&[0x20, 0x40]);
    assert_eq!(head.read(&memory, place), Some(-7.5));
    let half = CacheHead { format: Format::Bf16, ..head };
    let place = half.offsets(0, 1);
    let mut memory = vec![0; half.bytes().unwrap()];
    memory[place.at..][..2].copy_from_slice(&[0x20, 0xc0]);
    assert_eq!(half.read(&memory, place), Some(-2.5));
}

#[test]
fn unsupported_cache_formats_have_no_size() {
    let bytes = |format, order| CacheHead { format, order, ctx: 4, dim: 4 }.bytes();
    let keys = CacheOrder::Keys { nr: 4 };
    assert!(bytes(Format::F32, keys).is_some());
    assert_eq!(bytes(Format::F16, keys), None);
    assert_eq!(bytes(Format::Q4, keys), None);
    assert_eq!(bytes(Format::Bf16, CacheOrder::Rows), None);
    assert_eq!(bytes(Format::F32, CacheOrder::Keys { nr: 0 }), None);
    assert_eq!(bytes(Format::Bf16, CacheOrder::Values { nr: 4, block: 0 }), None);
    assert_eq!(bytes(Format::Bf16, CacheOrder::Values { nr: 4, block: 3 }), None);
    assert_eq!(CacheHead { format: Format::F32, order: keys, ctx: usize::MAX, dim: 4 }.bytes(), None);
}
