//! Offsets of the numbers of a KV cache.

use moec_ir::plan::{CacheOrder, StateBuf};
use moec_ir::state::{CACHED, CacheHead, rotate, rotated_channels, stores_rotated};
use moec_ir::{Format, StateKind};
use std::collections::HashSet;

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
                let Some(bytes) = head.bytes() else {
                    // Fifth bits of a narrower panel are no whole byte.
                    assert_eq!((format, order), (Format::Q5, CacheOrder::Values { nr: 2, block: 16 }));
                    continue;
                };
                let size = match format {
                    Format::F32 => 4,
                    Format::Q8 | Format::Q5 | Format::Q4 => 1,
                    _ => 2,
                };
                let (mut taken, mut fifth) = (HashSet::new(), HashSet::new());
                let mut scales = HashSet::new();
                for t in 0..ctx {
                    for c in 0..dim {
                        let place = head.offsets(t, c);
                        assert!(
                            place.at + size <= bytes && place.at.is_multiple_of(size),
                            "{head:?} {t} {c}"
                        );
                        assert!(taken.insert((place.at, place.shift)), "{head:?} {t} {c}");
                        assert_eq!(place.fifth.is_some(), format == Format::Q5);
                        if let Some((at, bit)) = place.fifth {
                            assert!(at < bytes && bit < 8 && fifth.insert((at, bit)), "{head:?} {t} {c}");
                        }
                        scales.extend(place.scale.map(|at| (at, t, c / 32)));
                    }
                }
                // One scale per token and group; scales overlap neither each other nor the codes.
                let groups = if format.is_quantised() { ctx * dim.div_ceil(32) } else { 0 };
                let places: HashSet<usize> = scales.iter().map(|s| s.0).collect();
                assert_eq!((scales.len(), places.len()), (groups, groups), "{head:?}");
                let codes: HashSet<usize> = taken.iter().map(|code| code.0).collect();
                let bits: HashSet<usize> = fifth.iter().map(|bit| bit.0).collect();
                assert!(codes.is_disjoint(&bits), "{head:?}");
                let is_free = |at: usize| at < bytes && !codes.contains(&at) && !bits.contains(&at);
                assert!(places.iter().all(|&at| is_free(at) && is_free(at + 1)), "{head:?}");
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
            rotated: 1,
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
    assert_eq!(bytes(Format::Q6, keys), None);
    assert_eq!(bytes(Format::Bf16, CacheOrder::Rows), None);
    assert_eq!(bytes(Format::F32, CacheOrder::Keys { nr: 0 }), None);
    assert_eq!(bytes(Format::Bf16, CacheOrder::Values { nr: 4, block: 0 }), None);
    assert_eq!(bytes(Format::Bf16, CacheOrder::Values { nr: 4, block: 3 }), None);
    assert_eq!(CacheHead { format: Format::F32, order: keys, ctx: usize::MAX, dim: 4 }.bytes(), None);
}

/// Sylvester's matrix has the sign of the parity of the bits that row and column share.
#[test]
fn rotation_is_the_orthonormal_hadamard_matrix_and_its_own_inverse() {
    for block in [1_usize, 2, 8, 64] {
        let numbers: Vec<f32> = (0..2 * block).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut rotated = numbers.clone();
        rotate(&mut rotated, block);
        for (i, &x) in rotated.iter().enumerate() {
            let of_block = &numbers[i / block * block..][..block];
            let sign = |j: usize| if ((i % block) & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            let sum: f32 = of_block.iter().enumerate().map(|(j, y)| sign(j) * y).sum();
            assert!((x - sum / (block as f32).sqrt()).abs() < 1e-5, "{block} {i}");
        }
        rotate(&mut rotated, block);
        assert!(rotated.iter().zip(&numbers).all(|(a, b)| (a - b).abs() < 1e-5), "{block}");
    }
    let blocks = [&[128_usize][..], &[80], &[576, 512], &[33, 31], &[]].map(rotated_channels);
    assert_eq!(blocks, [128, 16, 64, 1, 1]);
    assert_eq!(CACHED.map(stores_rotated), [false, false, true, true, true]);
}

#[test]
fn codes_of_few_bits_are_read_with_their_scales_and_turned_back() {
    let order = CacheOrder::Values { nr: 8, block: 2 };
    let head = CacheHead { format: Format::Q5, order, ctx: 2, dim: 8 };
    assert_eq!(head.bytes(), Some(2 * (5 + 2)));
    let mut memory = vec![0; 14];
    let place = head.offsets(1, 6);
    assert_eq!((place.at, place.shift, place.fifth, place.scale), (6, 4, Some((9, 6)), Some(12)));
    memory[6] = 0x30;
    memory[9] = 1 << 6;
    memory[12..].copy_from_slice(&[0x00, 0x40]);
    // 16 + 3 less 16, twice.
    assert_eq!(head.read(&memory, place), Some(6.0));
    let state = StateBuf {
        name: "v".into(),
        memory: 0,
        shape: [1, 1, 2, 8],
        format: Format::Q5,
        order,
        rotated: 2,
        kind: StateKind::Cache,
        snapshots: 0,
    };
    // The other channels have the code −16.
    let read = state.read(&memory).unwrap();
    let root = 2.0_f32.sqrt();
    assert!((read[14] - (6.0 - 32.0) / root).abs() < 1e-4 && (read[15] - (6.0 + 32.0) / root).abs() < 1e-4);
}
