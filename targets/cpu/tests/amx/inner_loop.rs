//! Instructions of the inner loop.

use crate::machines::sapphire_rapids;
use moec_codegen::spec::{Attention, Linear};
use moec_codegen::{ComputeType, KernelSpec, Schedule, assembly, packed_words};
use moec_ir::op::AttentionDesc;
use moec_ir::types::Format;

/// Mnemonics of the loops that multiply tiles, loop by loop. A loop is from a label to the jump back to it;
/// only tile instructions are kept.
fn loops(assembly: &str) -> Vec<Vec<&str>> {
    let mut found = Vec::new();
    let lines: Vec<&str> = assembly.lines().map(str::trim).collect();
    let label_of =
        |line: &str| line.strip_prefix('.').and_then(|l| l.split_once(':')).map(|(l, _)| format!(".{l}"));
    for (start, line) in lines.iter().enumerate() {
        let Some(label) = label_of(line) else { continue };
        let back = lines[start..].iter().position(|l| {
            let mut words = l.split_whitespace();
            words.next().is_some_and(|w| w.starts_with('j')) && words.next() == Some(label.as_str())
        });
        let Some(back) = back else { continue };
        let tiles: Vec<&str> = lines[start..start + back]
            .iter()
            .filter_map(|l| l.split_whitespace().next())
            .filter(|w| w.starts_with("tile") || w.starts_with("tdp") || w.starts_with("ldtile"))
            .collect();
        if tiles.first().is_some_and(|t| t.starts_with("tileload")) {
            found.push(tiles);
        }
    }
    found
}

#[test]
fn four_loads_for_four_products_and_no_spill() {
    let (k, n) = (2048, 64);
    let compute = ComputeType::Bf16;
    let spec = KernelSpec::Linear(Linear {
        k,
        n,
        format: Format::Bf16,
        compute,
        groups: 1,
        x_ld: packed_words(k, compute),
        out_ld: n,
        bias: false,
        residual_ld: None,
        glu: None,
        schedule: Schedule::default(),
    });
    let text = assembly(&sapphire_rapids(), &spec).unwrap_or_else(|e| panic!("{e}"));
    let (load, dot) = ("tileloadd", "tdpbf16ps");
    // Loops over one and two tiles of rows; the compiler may unroll a loop.
    let narrow = [load, load, dot, load, dot];
    let wide = [load, load, dot, load, dot, load, dot, dot];
    let found = loops(&text);
    let made_of = |steps: &[&str]| found.iter().filter(|l| l.chunks(steps.len()).all(|c| c == steps)).count();
    assert!(made_of(&wide) > 0 && made_of(&narrow) > 0, "{found:?}\n{text}");
    assert_eq!(made_of(&wide) + made_of(&narrow), found.len(), "{found:?}\n{text}");
    let count = |what: &str| text.lines().filter(|l| l.trim_start().starts_with(what)).count();
    // The sums of each block are stored once; there are no other stores, so nothing is spilled.
    assert_eq!(count("tilestored"), 2 + 4, "{text}");
    assert_eq!(count("tilezero"), 2 + 4, "{text}");
    assert_eq!(count("tilerelease"), 1, "{text}");
}

#[test]
fn both_attention_products_use_tiles() {
    let (heads, kv_heads, qk_dim, v_dim) = (16, 16, 128, 128);
    let (scale, window, sinks, v_from_k) = (0.1, None, false, false);
    let desc =
        AttentionDesc { heads, kv_heads, qk_dim, v_dim, scale, window, chunked: false, sinks, v_from_k };
    let (cache, compute, q_ld) = (Format::Bf16, ComputeType::Bf16, heads * qk_dim);
    let attention = |rows| {
        let desc = desc.clone();
        let spec = KernelSpec::Attention(Attention {
            desc,
            cache,
            rotated: [1; 2],
            compute,
            ctx: 512,
            rows,
            splits: 1,
            q_ld,
            out_ld: q_ld,
        });
        assembly(&sapphire_rapids(), &spec).unwrap_or_else(|e| panic!("{e}"))
    };
    let text = attention(96);
    let found = loops(&text);
    // Products of queries with keys, and of weights with values.
    let full: Vec<_> = found.iter().filter(|l| l.contains(&"tdpbf16ps")).collect();
    assert!(full.len() >= 2, "{found:?}\n{text}");
    assert!(!text.contains("vdpbf16ps"), "{text}");
    // One row alone would leave most of a tile empty, so it does not use tiles.
    assert!(!attention(1).contains("tdpbf16ps"));
}
