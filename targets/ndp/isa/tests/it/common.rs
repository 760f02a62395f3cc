//! An example expert, and random streams.

use moec_ndp_isa::*;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use std::ops::Range;

/// One expert of OLMoE.
pub(crate) const EXPERT: &str = include_str!("expert.ndp");

/// The parsed stream of [`EXPERT`].
pub(crate) fn expert() -> Stream {
    parse(EXPERT).expect("the example is a stream")
}

/// The example's text with one piece replaced.
pub(crate) fn with(from: &str, to: &str) -> String {
    assert!(EXPERT.contains(from), "the example has no `{from}`");
    EXPERT.replacen(from, to, 1)
}

/// Small geometries, for which every address can be tried.
pub(crate) fn geometry() -> impl Strategy<Value = Geometry> {
    (1..4_u32, 1..5_u32, 1..4_u32, 1..4_u32, 1..6_u32, 1..6_u32).prop_map(
        |(subchannels, ranks, bank_groups, banks, rows, lines)| Geometry {
            subchannels,
            ranks,
            bank_groups,
            banks,
            rows,
            lines,
        },
    )
}

fn slab() -> impl Strategy<Value = Slab> + Clone {
    (select(Number::ALL.to_vec()), any::<u32>(), any::<u32>()).prop_map(|(number, base, stride)| Slab {
        number,
        base,
        stride,
    })
}

fn place(regions: usize) -> impl Strategy<Value = Lines> + Clone {
    (0..regions as u16, 0..MAX_LINES).prop_map(|(region, line)| Lines { region, line })
}

fn rows() -> impl Strategy<Value = Range<u32>> {
    (any::<u32>(), any::<u32>()).prop_map(|(start, end)| start..end)
}

fn glu() -> impl Strategy<Value = Glu> {
    let finite = || any::<f32>().prop_filter("finite", |x| x.is_finite());
    prop_oneof![
        select(Activation::ALL.to_vec()).prop_map(Glu::Gated),
        Just(Glu::DRelu),
        (finite(), finite()).prop_map(|(alpha, limit)| Glu::Clamped { alpha, limit }),
    ]
}

fn op(regions: usize) -> impl Strategy<Value = Op> {
    let memory = (slab(), place(regions), 0..MAX_LINES, any::<u32>());
    let vectors = (slab(), slab(), slab(), any::<u32>());
    let layout = select(Layout::ALL.to_vec());
    prop_oneof![
        select(vec![Op::Loop, Op::End, Op::Barrier]),
        memory.clone().prop_map(|(dst, src, stride, lines)| Op::Load { dst, src, stride, lines }),
        memory.prop_map(|(src, dst, stride, lines)| Op::Store { src, dst, stride, lines }),
        (slab(), any::<u32>()).prop_map(|(dst, count)| Op::Init { dst, count }),
        (slab(), slab(), place(regions), any::<u32>(), any::<u32>())
            .prop_map(|(acc, x, weights, panels, pairs)| Op::Gemv { acc, x, weights, panels, pairs }),
        (select(Activation::ALL.to_vec()), slab(), slab(), any::<u32>())
            .prop_map(|(kind, dst, src, count)| Op::Act { kind, dst, src, count }),
        (glu(), slab(), slab(), any::<u32>()).prop_map(|(kind, dst, src, count)| Op::Glu {
            kind,
            dst,
            src,
            count
        }),
        vectors.clone().prop_map(|(dst, a, b, count)| Op::Mul { dst, a, b, count }),
        vectors.clone().prop_map(|(dst, src, factor, count)| Op::Scale { dst, src, factor, count }),
        vectors.clone().prop_map(|(dst, src, _, count)| Op::Reduce { dst, src, count }),
        vectors.prop_map(|(dst, src, _, count)| Op::Convert { dst, src, count }),
        (place(regions), place(regions), any::<u32>(), layout)
            .prop_map(|(src, dst, lines, to)| Op::Relayout { src, dst, lines, to }),
        (place(regions), any::<u32>(), rows(), any::<u32>())
            .prop_map(|(src, dimm, rows, lines)| Op::Migrate { src, dimm, rows, lines }),
    ]
}

/// Any stream that has a text form, valid or not.
pub(crate) fn stream() -> impl Strategy<Value = Stream> {
    let name = "[a-zA-Z_][a-zA-Z0-9_.]{0,20}";
    let region = (rows(), select(Layout::ALL.to_vec()), select(Access::ALL.to_vec()));
    let header = (name, any::<[u32; 11]>(), vec(region, 1..5));
    header.prop_flat_map(|(name, numbers, regions)| {
        let signal = proptest::option::of(0..EVENTS);
        let instruction = (op(regions.len()), any::<u32>(), signal);
        vec(instruction, 0..20).prop_map(move |code| {
            let [channels, dimms, dimm, subchannels, ranks, bank_groups, banks, rows, lines, tokens, slots] =
                numbers;
            let regions = regions.iter().enumerate().map(|(i, (rows, layout, access))| Region {
                name: format!("{name}.{i}"),
                rows: rows.clone(),
                layout: *layout,
                access: *access,
            });
            let code =
                code.into_iter().map(|(op, waits, signal)| Instruction { op, waits: Events(waits), signal });
            Stream {
                name: name.clone(),
                system: System { channels, dimms },
                dimm,
                geometry: Geometry { subchannels, ranks, bank_groups, banks, rows, lines },
                tokens,
                slots,
                regions: regions.collect(),
                code: code.collect(),
            }
        })
    })
}
