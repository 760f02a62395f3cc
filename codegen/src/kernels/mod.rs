//! One kernel family per file. [`write`] is the table of them.
#![expect(clippy::cast_possible_truncation, reason = "kernels: lanes, tiles and strides of one matrix")]

mod amx;
pub(crate) mod attention;
mod bytes;
pub(crate) mod cache;
mod combine;
pub(crate) mod expert;
mod linear;
pub(crate) mod map;
mod micro;
pub(crate) mod multiply;
pub(crate) mod neuron;
mod norm;
mod outliers;
mod panel;
mod position;
mod quantise;
pub(crate) mod recurrence;
pub(crate) mod routed;
pub(crate) mod router;
mod rows;
mod scratch;
mod softmax;
mod squares;
mod unpack;

use crate::dsl::Kb;
use crate::machine::{ByteDot, Isa};
use crate::spec::{Compute, KernelSpec, MapOp, RowForm, Symbol, WeightOrder, packed_words};
use moec_ir::plan::{Grid, Results};
use moec_ir::types::Format;

/// What a kernel tells of itself, and its code.
pub(crate) trait Kernel {
    /// What it does, in a word.
    fn kind(&self) -> &'static str;
    /// Adds its parameters to its symbol: equal exactly for equal ones.
    fn name(&self, symbol: &mut Symbol);
    /// Work items.
    fn grid(&self, isa: &Isa) -> Grid;
    /// Number of arguments.
    fn args(&self) -> usize;
    /// Arguments that it writes.
    fn results(&self) -> Results {
        Results::last(1, self.args())
    }
    /// Bytes of scratch that a thread needs.
    fn scratch_bytes(&self, _isa: &Isa) -> usize {
        0
    }
    /// What must hold, and what is wrong where it does not: the kernel would read or write out of bounds.
    fn rules(&self, isa: &Isa) -> Vec<(bool, &'static str)>;
    /// Writes its body.
    fn write<'k>(&self, k: &'k Kb<'k>);
}

/// Writes the body of a kernel.
pub(crate) fn write<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    match spec {
        KernelSpec::Embed { .. } => rows::embed(k, spec),
        KernelSpec::GatherRows { .. } => rows::gather(k, spec),
        KernelSpec::Copy { .. } => rows::copy(k, spec),
        KernelSpec::ZeroExperts { .. } => rows::zero_experts(k, spec),
        KernelSpec::Norm { .. } => norm::write(k, spec),
        KernelSpec::Quantise { .. } => quantise::write(k, spec),
        KernelSpec::Linear { .. } => linear::write(k, spec),
        KernelSpec::Rope { .. } => position::rope(k, spec),
        KernelSpec::CacheWrite { .. } => cache::write(k, spec),
        KernelSpec::Attention { .. } => attention::write(k, spec),
        KernelSpec::AttentionMerge { .. } => attention::merge::write(k, spec),
        KernelSpec::Router { .. } => router::write(k, spec),
        KernelSpec::ExpertGateUp { .. } => expert::gate_up(k, spec),
        KernelSpec::ExpertDown { .. } => expert::down(k, spec),
        KernelSpec::NeuronUp { .. } => neuron::up(k, spec),
        KernelSpec::NeuronPredict { .. } => neuron::predict::write(k, spec),
        KernelSpec::NeuronDown { .. } | KernelSpec::NeuronDownAt { .. } => neuron::down(k, spec),
        KernelSpec::NeuronGate { .. } => neuron::apart::gate(k, spec),
        KernelSpec::NeuronUpAt { .. } => neuron::apart::up(k, spec),
        KernelSpec::Combine { .. } => combine::write(k, spec),
        KernelSpec::Map { .. } => map::write(k, spec),
        KernelSpec::Softmax { .. } => softmax::write(k, spec),
        KernelSpec::Recurrence(of) => of.kernel().write(k),
    }
}

/// What is wrong with formats that have a scale for each column of a panel.
const BY_CHANNEL: &str = "rows by themselves in a format of panels alone";
const NO_GATE: &str = "two projections, of which none is a gate";
const NO_NEURONS: &str = "neurons in a format that does not hold them";
const NO_SKETCH: &str = "a sketch that is no smaller than the gate, or does not bound it";

/// Contradictions in a specification that would make the kernel read or write out of bounds.
pub(crate) fn check(spec: &KernelSpec, isa: &Isa) -> Result<(), String> {
    let rules: Vec<(bool, &str)> = match spec {
        KernelSpec::Embed { hidden, format, out_ld, .. } => {
            vec![(out_ld >= hidden, "rows of the output overlap"), (!format.is_by_channel(), BY_CHANNEL)]
        }
        KernelSpec::GatherRows { cols, x_ld, out_ld } | KernelSpec::Softmax { cols, x_ld, out_ld } => {
            vec![(x_ld >= cols && out_ld >= cols, "rows overlap"), (*cols > 0, "no columns")]
        }
        KernelSpec::ZeroExperts { experts, zero, k } => {
            let all = experts.checked_add(*zero).and_then(|n| i32::try_from(n).ok());
            vec![(*k > 0, "no choices"), (all.is_some(), "more experts than ids")]
        }
        KernelSpec::Copy { groups, cols, in_group, out_group, in_ld, out_ld } => {
            let width = |group: &usize| groups.saturating_sub(1) * group + cols;
            vec![
                (*in_ld >= width(in_group) && *out_ld >= width(out_group), "rows overlap"),
                (*groups == 1 || out_group >= cols, "groups of the output overlap"),
            ]
        }
        KernelSpec::Norm { width, groups, x_ld, outs, .. } => {
            let mut rules = vec![
                (*width > 0, "no channels"),
                (!outs.is_empty(), "no result"),
                (*x_ld >= width * groups, "rows overlap"),
            ];
            rules.extend(outs.iter().flat_map(|out| fits(isa, *out, *width, *groups)));
            rules
        }
        KernelSpec::Quantise { cols, groups, per_row, x_ld, out_ld, to } => {
            let mut rules = vec![
                (*cols > 0 && *groups > 0 && *per_row > 0, "an extent is zero"),
                (*x_ld >= cols * groups, "rows overlap"),
            ];
            rules.extend(fits(isa, RowForm { form: *to, ld: *out_ld }, *cols, *groups));
            rules
        }
        KernelSpec::Linear { k, n, format, compute, groups, x_ld, out_ld, residual_ld, glu, .. } => {
            let out = if glu.is_some() { n / 2 } else { *n };
            vec![
                (*k > 0 && *n > 0 && *groups > 0, "an extent is zero"),
                (glu.is_none() || n % 2 == 0, "a gated weight has an odd number of rows"),
                (glu.is_none_or(moec_ir::op::Glu::is_gated), NO_GATE),
                (glu.is_none() || residual_ld.is_none(), "gate and residual exclude each other"),
                (*x_ld >= packed_words(*k, *compute) * groups && *out_ld >= out * groups, "rows overlap"),
                can_multiply(isa, *format, *compute),
            ]
        }
        KernelSpec::Rope { heads, dim, norm, rotation, x_ld, out_ld } => {
            let mut rules = vec![(*x_ld >= heads * dim && *out_ld >= heads * dim, "rows overlap")];
            rules.extend(position::rules(*heads, *dim, *norm, Some(*rotation)));
            rules
        }
        KernelSpec::CacheWrite { heads, dim, ctx, ring, cache, values, norm, rotation, each, x_ld } => {
            let mut rules = vec![
                (*x_ld >= heads * dim, "rows overlap"),
                (*dim > 0 && *ctx > 0, "an extent is zero"),
                (!*ring || ctx.is_multiple_of(cache::BLOCK), "a ring of no whole blocks"),
                (*each > 0 && heads.is_multiple_of((*each).max(1)), "heads that no work item has"),
                (cache::head_bytes(isa, *cache, *values, *ctx, *dim) > 0, "a cache of another format"),
            ];
            rules.extend(position::rules(*heads, *dim, *norm, *rotation));
            rules
        }
        KernelSpec::Attention { .. } => attention::rules(spec),
        KernelSpec::AttentionMerge { heads, v_dim, splits, out_ld, .. } => vec![
            (*heads > 0 && *v_dim > 0 && *splits > 0, "an extent is zero"),
            (*out_ld >= heads * v_dim, "rows overlap"),
        ],
        KernelSpec::Router { desc, logits_ld } => router::rules(desc, *logits_ld),
        KernelSpec::ExpertGateUp { hidden, inter, format, compute, x_ld, out, bias, order, .. } => {
            let mut rules = vec![
                (*hidden > 0 && *inter > 0, "an extent is zero"),
                (*x_ld >= packed_words(*hidden, *compute), "rows overlap"),
                (out.form != Compute::I8, "a panel has half a group of columns"),
            ];
            rules.extend(multiplies(isa, *format, *compute, *order, *bias));
            rules.extend(fits(isa, *out, *inter, 1));
            rules
        }
        KernelSpec::ExpertDown { hidden, inter, format, compute, h_ld, bias, order, .. } => {
            let mut rules = vec![
                (*hidden > 0 && *inter > 0, "an extent is zero"),
                (*h_ld >= packed_words(*inter, *compute), "rows overlap"),
            ];
            rules.extend(multiplies(isa, *format, *compute, *order, *bias));
            rules
        }
        KernelSpec::NeuronUp { hidden, inter, format, compute, sketch, x_ld, glu, .. } => vec![
            (*hidden > 0 && *inter > 0, "an extent is zero"),
            (*x_ld >= packed_words(*hidden, *compute), "rows overlap"),
            (neuron::neurons_meet(isa, *format, *hidden, *compute), "neurons that meet no rows in that form"),
            (glu.skips(), "a gate that makes no neuron 0"),
            (!sketch || neuron::neurons_sketched(*format, *glu), NO_SKETCH),
            (format.holds_neurons(), NO_NEURONS),
        ],
        KernelSpec::NeuronPredict { hidden, inter, rank, format, x_ld, .. } => vec![
            (*hidden > 0 && *inter > 0 && *rank != Some(0), "an extent is zero"),
            (x_ld >= hidden, "rows overlap"),
            (format.holds_neurons(), NO_NEURONS),
        ],
        KernelSpec::NeuronDown { hidden, inter, format, sketch, .. } => vec![
            (*hidden > 0 && *inter > 0, "an extent is zero"),
            (!sketch || !format.is_grouped(), NO_SKETCH),
            (format.holds_neurons(), NO_NEURONS),
        ],
        KernelSpec::NeuronGate { hidden, inter, format, compute, x_ld, glu, .. }
        | KernelSpec::NeuronUpAt { hidden, inter, format, compute, x_ld, glu, .. } => vec![
            (*hidden > 0 && *inter > 0, "an extent is zero"),
            (*x_ld >= packed_words(*hidden, *compute), "rows overlap"),
            (neuron::neurons_meet(isa, *format, *hidden, *compute), "neurons that meet no rows in that form"),
            (glu.skips(), "a gate that makes no neuron 0"),
            (format.holds_neurons(), NO_NEURONS),
        ],
        KernelSpec::NeuronDownAt { hidden, inter, format, .. } => {
            vec![(*hidden > 0 && *inter > 0, "an extent is zero"), (format.holds_neurons(), NO_NEURONS)]
        }
        KernelSpec::Combine { hidden, out_ld, .. } => vec![(out_ld >= hidden, "rows overlap")],
        KernelSpec::Map { op, cols, a_ld, out_ld } => {
            let whole = match op {
                // Positions are 32 bits, and so is their sum with the offset.
                MapOp::ScaleByPosition { every, offset, .. } => {
                    (1..1 << 31).contains(every) && *offset < 1 << 31
                }
                MapOp::MulHeads { heads, .. } => *heads > 0 && cols.is_multiple_of((*heads).max(1)),
                _ => true,
            };
            let joins = !matches!(op, MapOp::Glu { glu, .. } if !glu.is_gated());
            vec![
                (a_ld >= cols && out_ld >= cols, "rows overlap"),
                (whole, "heads of unequal width, or positions out of range"),
                (joins, NO_GATE),
            ]
        }
        KernelSpec::Recurrence(of) => of.kernel().rules(isa),
    };
    let schedule = spec.schedule().map(|s| s.check(isa));
    match rules.iter().chain(schedule.iter().flatten()).find(|(holds, _)| !holds) {
        Some((_, what)) => Err(format!("{what} ({spec:?} on {isa:?})")),
        None => Ok(()),
    }
}

/// Whether rows of `groups` segments of `cols` numbers each can be written in a form.
fn fits(isa: &Isa, out: RowForm, cols: usize, groups: usize) -> [(bool, &'static str); 3] {
    [
        (out.form != Compute::Bf16 || isa.bf16, "pairs on a machine that does not multiply them"),
        (out.ld >= packed_words(cols, out.form) * groups, "rows of the output overlap"),
        (
            out.form != Compute::I8 || isa.bytes != ByteDot::None,
            "bytes on a machine that does not multiply them",
        ),
    ]
}

/// Whether a machine multiplies the matrices of experts so.
fn multiplies(
    isa: &Isa,
    format: Format,
    compute: Compute,
    order: WeightOrder,
    bias: bool,
) -> Vec<(bool, &'static str)> {
    match order {
        WeightOrder::Panels => vec![can_multiply(isa, format, compute)],
        WeightOrder::Neurons { .. } | WeightOrder::Apart => vec![
            can_multiply(isa, unpack::format(compute), compute),
            (compute != Compute::I8, "panels of bytes out of neurons"),
            (!bias, "neurons with biases"),
            (!order.sketch() || !format.is_grouped(), NO_SKETCH),
            (format.holds_neurons(), NO_NEURONS),
        ],
    }
}

/// Whether a machine multiplies weights of a format in a form.
fn can_multiply(isa: &Isa, format: Format, compute: Compute) -> (bool, &'static str) {
    let quantised = format.is_quantised();
    match compute {
        Compute::F32 => (true, ""),
        Compute::Bf16 => (
            isa.bf16 && (quantised || format == Format::Bf16 || format == Format::F16 && isa.is_thread()),
            "bf16 rows need weights of bf16 or codes (on threads f16, too), and a machine with bf16 dot products",
        ),
        Compute::I8 => (
            isa.bytes != ByteDot::None && quantised,
            "byte rows need weights of codes, and a machine with byte dot products",
        ),
    }
}
