//! Which kernels become one: a table of rules.
//!
//! A step reads what another has just written, does little to it, and writes it again: a norm, a rotation, rows brought
//! into the form that a matrix multiplies. Each such pass takes as long as memory takes for its rows. One kernel for both
//! keeps the numbers in registers. Every rule leaves each sum, product and rounding as it was, so results are the same bits.

use crate::{CpuTarget, KernelSpec};
use moec_codegen::{Compute, NormKind, RowForm, RowNorm};

/// An argument of a fused kernel: that of one of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Of the kernel that writes.
    Writer(usize),
    /// Of the kernel that reads.
    Reader(usize),
}

/// Whose place in the order of steps a fused kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// That of the kernel that writes: the other had no operand beside the result.
    Writer,
    /// That of the kernel that reads, whose other operands may be there no sooner.
    Reader,
}

/// One kernel for two.
#[derive(Clone, Debug, PartialEq)]
pub struct Fused {
    /// Name of the rule.
    pub rule: &'static str,
    /// Kernel.
    pub spec: KernelSpec,
    /// Its arguments.
    pub args: Vec<Operand>,
    /// Where it stands.
    pub place: Place,
}

/// A kernel and which of its arguments is written by the one and read by the other.
type End<'a> = (&'a KernelSpec, usize);

/// Gives the kernel for both. The last argument says whether nobody else reads the result: it then goes nowhere.
type Rule = fn(End<'_>, End<'_>, bool) -> Option<(KernelSpec, Vec<Operand>)>;

const RULES: &[(&str, Place, Rule)] = &[
    ("norm to form", Place::Writer, norm_to_form),
    ("hidden to form", Place::Writer, hidden_to_form),
    ("norm then rope", Place::Reader, norm_then_rope),
    ("rope then cache", Place::Reader, rope_then_cache),
];

impl CpuTarget {
    /// One kernel that does what `writer` does and then `reader`, which reads the result that is the writer's argument
    /// `writer.1` as its own argument `reader.1`. `sole`: nobody else reads it. `None`: no rule joins them.
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

/// A norm writes the form that a matrix multiplies, beside its plain result where that has other readers.
fn norm_to_form(
    (writer, result): End<'_>,
    (reader, _): End<'_>,
    sole: bool,
) -> Option<(KernelSpec, Vec<Operand>)> {
    let KernelSpec::Norm { kind, width, groups, x_ld, outs, eps, weight } = writer else { return None };
    let &KernelSpec::Quantise { cols, groups: parts, per_row: 1, x_ld: ld, out_ld, to } = reader else {
        return None;
    };
    let (count, first) = (writer.args(), writer.args() - outs.len());
    let at = result.checked_sub(first)?;
    if outs.get(at) != Some(&RowForm::f32(ld)) || (cols, parts) != (*width, *groups) {
        return None;
    }
    let (mut outs, mut args) = (outs.clone(), (0..count).map(Operand::Writer).collect::<Vec<_>>());
    if sole {
        outs.remove(at);
        args.remove(result);
    }
    outs.push(RowForm { form: to, ld: out_ld });
    args.push(Operand::Reader(1));
    let (kind, width, groups, x_ld, eps, weight) = (*kind, *width, *groups, *x_ld, *eps, *weight);
    Some((KernelSpec::Norm { kind, width, groups, x_ld, outs, eps, weight }, args))
}

/// Gate and up write pairs of bf16, which the down projection multiplies. A group of bytes is two panels wide.
fn hidden_to_form(
    (writer, result): End<'_>,
    (reader, _): End<'_>,
    sole: bool,
) -> Option<(KernelSpec, Vec<Operand>)> {
    let &KernelSpec::ExpertGateUp { layout, inter, out: plain, .. } = writer else { return None };
    let &KernelSpec::Quantise { cols, groups: 1, per_row, x_ld, out_ld: ld, to: form @ Compute::Bf16 } =
        reader
    else {
        return None;
    };
    if !sole || plain != RowForm::f32(x_ld) || (cols, per_row) != (inter, layout.k) {
        return None;
    }
    let mut spec = writer.clone();
    if let KernelSpec::ExpertGateUp { out, .. } = &mut spec {
        *out = RowForm { form, ld };
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
    let &KernelSpec::Norm { kind: NormKind::Rms, width, groups, x_ld, ref outs, eps, weight } = writer else {
        return None;
    };
    let &KernelSpec::Rope { heads, dim, norm: None, rotation, x_ld: ld, out_ld } = reader else {
        return None;
    };
    let of_heads = (width, groups) == (dim, heads) || (width, groups) == (heads * dim, 1);
    if !sole || operand != 0 || *outs != [RowForm::f32(ld)] || !of_heads {
        return None;
    }
    let norm = Some(RowNorm { width, eps, weight });
    let args = (0..=usize::from(weight)).map(Operand::Writer);
    let args = args.chain((1..reader.args()).map(Operand::Reader)).collect();
    Some((KernelSpec::Rope { heads, dim, norm, rotation, x_ld, out_ld }, args))
}

/// Keys are rotated where they are written to the cache.
fn rope_then_cache(
    (writer, _): End<'_>,
    (reader, operand): End<'_>,
    sole: bool,
) -> Option<(KernelSpec, Vec<Operand>)> {
    let &KernelSpec::Rope { heads, dim, norm, rotation, x_ld, out_ld } = writer else { return None };
    let &KernelSpec::CacheWrite {
        heads: kept,
        dim: channels,
        ctx,
        cache,
        values,
        norm: None,
        rotation: None,
        each,
        x_ld: ld,
    } = reader
    else {
        return None;
    };
    if !sole || operand != 1 || (heads, dim, out_ld) != (kept, channels, ld) {
        return None;
    }
    let rotation = Some(rotation);
    let spec = KernelSpec::CacheWrite { heads, dim, ctx, cache, values, norm, rotation, each, x_ld };
    let of_writer = (0..writer.args() - 1).map(Operand::Writer);
    let args = std::iter::once(Operand::Reader(0)).chain(of_writer);
    Some((spec, args.chain((2..reader.args()).map(Operand::Reader)).collect()))
}
