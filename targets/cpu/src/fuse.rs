//! Fusion of kernels: a table of rules.
//!
//! A step often reads the result of another, does little to it, and writes it again: a norm, a rotation, a
//! conversion of rows to the compute type of a matrix. Each such pass costs the memory traffic of its rows.
//! One kernel for both keeps the numbers in registers. Every rule leaves each sum, product and rounding
//! unchanged, so results have the same bits.

use crate::{CpuTarget, KernelSpec};
use moec_codegen::spec::{CacheWrite, ExpertGateUp, Norm, Quantise, Rope};
use moec_codegen::{ComputeType, NormKind, RowFormat, RowNorm};

/// An argument of a fused kernel: that of one of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Operand of the kernel that writes.
    Writer(usize),
    /// Operand of the kernel that reads.
    Reader(usize),
}

/// Place of a fused kernel in the order of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FusePosition {
    /// The place of the kernel that writes: the other had no operand but the result.
    Writer,
    /// The place of the kernel that reads, whose other operands may not exist earlier.
    Reader,
}

/// A kernel that replaces two others.
#[derive(Clone, Debug, PartialEq)]
pub struct Fused {
    /// Name of the rule.
    pub rule: &'static str,
    /// Kernel.
    pub spec: KernelSpec,
    /// Its arguments.
    pub args: Vec<Operand>,
    /// Its place.
    pub place: FusePosition,
}

/// A kernel and which of its arguments is written by the one and read by the other.
type End<'a> = (&'a KernelSpec, usize);

/// Returns the kernel for both. The last argument says whether nothing else reads the intermediate result,
/// which is then not written.
type Rule = fn(End<'_>, End<'_>, bool) -> Option<(KernelSpec, Vec<Operand>)>;

const RULES: &[(&str, FusePosition, Rule)] = &[
    ("norm to compute type", FusePosition::Writer, norm_to_compute_type),
    ("hidden to compute type", FusePosition::Writer, hidden_to_compute_type),
    ("norm then rope", FusePosition::Reader, norm_then_rope),
    ("rope then cache", FusePosition::Reader, rope_then_cache),
];

impl CpuTarget {
    /// Kernel that does the work of `writer` and then of `reader`. The writer's argument `writer.1` is the
    /// result that the reader reads as its argument `reader.1`. `sole`: nothing else reads it. `None` if no
    /// rule applies.
    pub fn fused(
        &self,
        writer: (&KernelSpec, usize),
        reader: (&KernelSpec, usize),
        sole: bool,
    ) -> Option<Fused> {
        RULES.iter().find_map(|&(name, place, rule)| {
            let (spec, args) = rule(writer, reader, sole)?;
            Some(Fused { rule: name, spec, args, place })
        })
    }
}

/// A norm writes the compute type of a matrix, and also its plain result if that has other readers.
fn norm_to_compute_type(
    (writer, result): End<'_>,
    (reader, _): End<'_>,
    sole: bool,
) -> Option<(KernelSpec, Vec<Operand>)> {
    let KernelSpec::Norm(Norm { kind, width, groups, x_ld, outs, eps, weight }) = writer else { return None };
    let &KernelSpec::Quantise(Quantise { cols, groups: parts, per_row: 1, x_ld: ld, out_ld, to }) = reader
    else {
        return None;
    };
    let (count, first) = (writer.args(), writer.args() - outs.len());
    let at = result.checked_sub(first)?;
    if outs.get(at) != Some(&RowFormat::f32(ld)) || (cols, parts) != (*width, *groups) {
        return None;
    }
    let (mut outs, mut args) = (outs.clone(), (0..count).map(Operand::Writer).collect::<Vec<_>>());
    if sole {
        outs.remove(at);
        args.remove(result);
    }
    outs.push(RowFormat { compute: to, ld: out_ld });
    args.push(Operand::Reader(1));
    let (kind, width, groups, x_ld, eps, weight) = (*kind, *width, *groups, *x_ld, *eps, *weight);
    Some((KernelSpec::Norm(Norm { kind, width, groups, x_ld, outs, eps, weight }), args))
}

/// Gate and up write pairs of bf16, which the down projection multiplies. A group of bytes is two panels
/// wide.
fn hidden_to_compute_type(
    (writer, result): End<'_>,
    (reader, _): End<'_>,
    sole: bool,
) -> Option<(KernelSpec, Vec<Operand>)> {
    let &KernelSpec::ExpertGateUp(ExpertGateUp { layout, inter, out: plain, .. }) = writer else {
        return None;
    };
    let &KernelSpec::Quantise(Quantise {
        cols,
        groups: 1,
        per_row,
        x_ld,
        out_ld: ld,
        to: compute @ ComputeType::Bf16,
    }) = reader
    else {
        return None;
    };
    if !sole || plain != RowFormat::f32(x_ld) || (cols, per_row) != (inter, layout.k) {
        return None;
    }
    let mut spec = writer.clone();
    if let KernelSpec::ExpertGateUp(ExpertGateUp { out, .. }) = &mut spec {
        *out = RowFormat { compute, ld };
    }
    let mut args: Vec<_> = (0..writer.args()).map(Operand::Writer).collect();
    args[result] = Operand::Reader(1);
    Some((spec, args))
}

/// Heads are normalised where they are rotated.
fn norm_then_rope(
    (writer, _): End<'_>,
    (reader, operand): End<'_>,
    sole: bool,
) -> Option<(KernelSpec, Vec<Operand>)> {
    let &KernelSpec::Norm(Norm { kind: NormKind::Rms, width, groups, x_ld, ref outs, eps, weight }) = writer
    else {
        return None;
    };
    let &KernelSpec::Rope(Rope { heads, dim, norm: None, rotation, x_ld: ld, out_ld }) = reader else {
        return None;
    };
    let of_heads = (width, groups) == (dim, heads) || (width, groups) == (heads * dim, 1);
    if !sole || operand != 0 || *outs != [RowFormat::f32(ld)] || !of_heads {
        return None;
    }
    let norm = Some(RowNorm { width, eps, weight });
    let args = (0..=usize::from(weight)).map(Operand::Writer);
    let args = args.chain((1..reader.args()).map(Operand::Reader)).collect();
    Some((KernelSpec::Rope(Rope { heads, dim, norm, rotation, x_ld, out_ld }), args))
}

/// Keys are rotated where they are written to the cache.
fn rope_then_cache(
    (writer, _): End<'_>,
    (reader, operand): End<'_>,
    sole: bool,
) -> Option<(KernelSpec, Vec<Operand>)> {
    let &KernelSpec::Rope(Rope { heads, dim, norm, rotation, x_ld, out_ld }) = writer else { return None };
    let &KernelSpec::CacheWrite(CacheWrite {
        heads: kept,
        dim: channels,
        ctx,
        ring,
        cache,
        rotated,
        values,
        norm: None,
        rotation: None,
        each,
        x_ld: ld,
    }) = reader
    else {
        return None;
    };
    if !sole || operand != 1 || (heads, dim, out_ld) != (kept, channels, ld) {
        return None;
    }
    let rotation = Some(rotation);
    let spec = KernelSpec::CacheWrite(CacheWrite {
        heads,
        dim,
        ctx,
        ring,
        cache,
        rotated,
        values,
        norm,
        rotation,
        each,
        x_ld,
    });
    let of_writer = (0..writer.args() - 1).map(Operand::Writer);
    let args = std::iter::once(Operand::Reader(0)).chain(of_writer);
    Some((spec, args.chain((2..reader.args()).map(Operand::Reader)).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use Operand::{Reader, Writer};
    use moec_codegen::{Rotation, Schedule, WeightOrder};
    use moec_device::Device;
    use moec_ir::Format;
    use moec_ir::op::{Activation, DispatchLayout, Glu, RopeStyle};

    const HALF: Rotation = Rotation { rotary: 16, offset: 0, style: RopeStyle::Half, angles_ld: 16 };

    fn norm(width: usize, groups: usize, outs: Vec<RowFormat>) -> KernelSpec {
        KernelSpec::Norm(Norm { kind: NormKind::Rms, width, groups, x_ld: 64, outs, eps: 1e-6, weight: true })
    }

    fn quantise(cols: usize, per_row: usize, x_ld: usize, to: ComputeType) -> KernelSpec {
        KernelSpec::Quantise(Quantise { cols, groups: 1, per_row, x_ld, out_ld: 80, to })
    }

    fn rope(x_ld: usize) -> KernelSpec {
        KernelSpec::Rope(Rope { heads: 4, dim: 16, norm: None, rotation: HALF, x_ld, out_ld: 64 })
    }

    fn cached(dim: usize) -> KernelSpec {
        let (heads, ctx, cache, values) = (64 / dim, 32, Format::Bf16, false);
        let (norm, rotation, each, x_ld, ring) = (None, None, heads, 64, false);
        KernelSpec::CacheWrite(CacheWrite {
            heads,
            dim,
            ctx,
            ring,
            cache,
            rotated: 1,
            values,
            norm,
            rotation,
            each,
            x_ld,
        })
    }

    fn gate_up() -> KernelSpec {
        KernelSpec::ExpertGateUp(ExpertGateUp {
            layout: DispatchLayout { rows: 16, k: 2, experts: 4 },
            hidden: 64,
            inter: 48,
            format: Format::Bf16,
            compute: ComputeType::Bf16,
            x_ld: 32,
            glu: Glu::Gated(Activation::Silu),
            bias: true,
            out: RowFormat::f32(48),
            order: WeightOrder::Panels,
            schedule: Schedule::default(),
        })
    }

    fn target() -> CpuTarget {
        CpuTarget::new(&Device::find("sapphire-rapids").unwrap()).unwrap()
    }

    fn fused(writer: (&KernelSpec, usize), reader: (&KernelSpec, usize), sole: bool) -> Option<Fused> {
        let fused = target().fused(writer, reader, sole)?;
        // All arguments must be present, and the fused kernel must exist.
        assert_eq!(fused.args.len(), fused.spec.args(), "{fused:?}");
        target().compile(std::slice::from_ref(&fused.spec), &()).unwrap();
        Some(fused)
    }

    #[test]
    fn fused_norm_keeps_plain_rows_for_other_readers() {
        let (plain, packed) = (RowFormat::f32(64), RowFormat { compute: ComputeType::Bf16, ld: 80 });
        let (writer, reader) = (norm(64, 1, vec![plain]), quantise(64, 1, 64, ComputeType::Bf16));
        let sole = fused((&writer, 2), (&reader, 0), true).unwrap();
        assert_eq!(sole.spec, norm(64, 1, vec![packed]));
        assert_eq!((sole.args, sole.place), (vec![Writer(0), Writer(1), Reader(1)], FusePosition::Writer));
        let kept_plain = fused((&writer, 2), (&reader, 0), false).unwrap();
        assert_eq!(kept_plain.spec, norm(64, 1, vec![plain, packed]));
        assert_eq!(kept_plain.args, [Writer(0), Writer(1), Writer(2), Reader(1)]);
        // A second format replaces the plain rows if they have no other readers.
        let bytes = quantise(64, 1, 64, ComputeType::I8);
        let both = fused((&kept_plain.spec, 2), (&bytes, 0), true).unwrap();
        assert_eq!(both.spec, norm(64, 1, vec![packed, RowFormat { compute: ComputeType::I8, ld: 80 }]));
        assert_eq!(both.args, [Writer(0), Writer(1), Writer(3), Reader(1)]);
    }

    #[test]
    fn norm_rope_and_cache_store_fuse_into_one_kernel() {
        for (width, groups) in [(16, 4), (64, 1)] {
            let writer = norm(width, groups, vec![RowFormat::f32(64)]);
            let normed = fused((&writer, 2), (&rope(64), 0), true).unwrap();
            assert_eq!(normed.args, [Writer(0), Writer(1), Reader(1), Reader(2)]);
            assert_eq!(normed.place, FusePosition::Reader);
            let stored = fused((&normed.spec, 3), (&cached(16), 1), true).unwrap();
            let args = [Reader(0), Writer(0), Writer(1), Writer(2), Reader(2), Reader(3)];
            assert_eq!((stored.args.as_slice(), stored.place), (args.as_slice(), FusePosition::Reader));
        }
    }

    #[test]
    fn incompatible_kernels_are_not_fused() {
        let plain = || vec![RowFormat::f32(64)];
        let pairs = |cols, per_row, ld| quantise(cols, per_row, ld, ComputeType::Bf16);
        let unfusable = [
            // Not fused: another row stride, other columns, several rows per row, packed input.
            (norm(64, 1, plain()), 2, pairs(64, 1, 65), 0, true),
            (norm(64, 1, plain()), 2, pairs(48, 1, 64), 0, true),
            (norm(64, 1, plain()), 2, pairs(64, 2, 64), 0, true),
            (
                norm(64, 1, vec![RowFormat { compute: ComputeType::Bf16, ld: 64 }]),
                2,
                pairs(64, 1, 64),
                0,
                true,
            ),
            // Not fused: other readers of the rows, norms of parts of heads, angles in place of heads.
            (norm(16, 4, plain()), 2, rope(64), 0, false),
            (norm(32, 2, plain()), 2, rope(64), 0, true),
            (norm(16, 4, plain()), 2, rope(64), 1, true),
            (rope(64), 2, cached(16), 1, false),
            (rope(64), 2, cached(32), 1, true),
            // Not fused: other readers of the rows, bytes wider than a panel.
            (gate_up(), 4, pairs(48, 2, 48), 0, false),
            (gate_up(), 4, quantise(48, 2, 48, ComputeType::I8), 0, true),
            (gate_up(), 4, pairs(48, 1, 48), 0, true),
        ];
        for (writer, result, reader, operand, sole) in unfusable {
            let found = fused((&writer, result), (&reader, operand), sole);
            assert_eq!(found, None, "{writer:?} {reader:?}");
        }
        let joined = fused((&gate_up(), 4), (&pairs(48, 2, 48), 0), true).unwrap();
        assert_eq!(joined.args, [Writer(0), Writer(1), Writer(2), Writer(3), Reader(1)]);
    }
}
