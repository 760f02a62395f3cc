//! Selection of the kernels that compute a node: one row per operator.

use crate::arithmetic::RowConversion;
use crate::attend::CacheView;
use crate::{CpuTarget, KernelSpec};
use moec_codegen::pack::feedback::uses_feedback;
use moec_codegen::spec::{
    CausalConv, Combine, CopyColumns, DeltaRule, Embed, ExpertDown, ExpertGateUp, GatherRows, Linear, Map,
    Norm, Quantise, Rope, Router, SelectiveScan, Softmax, ZeroExperts,
};
use moec_codegen::{
    ComputeType, MapOp, NormKind, Rotation, RowFormat, Schedule, WeightOrder, packed_words, pad_row_stride,
};
use moec_ir::op::{DispatchLayout, LongSwitch};
use moec_ir::plan::{Builtin, Layout};
use moec_ir::{Format, Op, Type};

/// A node as selection sees it.
#[derive(Clone, Debug)]
pub struct NodeView<'a> {
    /// Operator.
    pub op: &'a Op,
    /// Operands.
    pub inputs: Vec<InputView<'a>>,
    /// Types of the results.
    pub outputs: Vec<&'a Type>,
    /// Row distance of a residual that the epilogue adds, in elements.
    pub residual_ld: Option<usize>,
    /// Whether every row is a sequence of its own, as in decoding.
    pub one_row_per_sequence: bool,
    /// Whether a matrix kernel of the same CPU multiplies by the table of an embedding, too.
    pub tied: bool,
}

/// Operand of a step.
#[derive(Clone, Copy, Debug)]
pub enum InputView<'a> {
    /// A value in the arena.
    Value {
        /// Type.
        ty: &'a Type,
        /// Elements from row to row.
        ld: usize,
    },
    /// A weight.
    Weight {
        /// Shape.
        shape: &'a [usize],
        /// Storage.
        format: Format,
    },
    /// A tensor of the KV cache.
    State(CacheView<'a>),
}

/// An address that a launch gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Operand of the node.
    In(usize),
    /// Operand of the node, from this column on.
    InAt(usize, usize),
    /// Result of the node.
    Out(usize),
    /// Result of the node, from this column on.
    OutAt(usize, usize),
    /// Temporary of the selection.
    Temp(usize),
    /// The residual.
    Residual,
}

/// Work of a launch.
#[derive(Clone, Debug)]
pub enum Work {
    /// A generated kernel.
    Kernel(KernelSpec),
    /// A function of the runtime.
    Builtin(Builtin),
}

/// One launch.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Code.
    pub work: Work,
    /// Addresses, in the kernel's order.
    pub args: Vec<Role>,
}

/// Kernels that compute a node.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Launches in order.
    pub launches: Vec<Launch>,
    /// Temporaries.
    pub temps: Vec<Type>,
    /// Layouts of weight operands that are not row-major.
    pub layouts: Vec<(usize, Layout)>,
}

/// Reason that a node cannot be computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unsupported(pub String);

pub(crate) type Result<T> = std::result::Result<T, Unsupported>;

impl NodeView<'_> {
    pub(crate) fn value(&self, i: usize) -> Result<(&Type, usize)> {
        match self.inputs.get(i) {
            Some(&InputView::Value { ty, ld }) => Ok((ty, ld)),
            _ => Err(Unsupported(format!("operand {i} is not a value"))),
        }
    }
    pub(crate) fn weight(&self, i: usize) -> Result<(&[usize], Format)> {
        match self.inputs.get(i) {
            Some(&InputView::Weight { shape, format }) => Ok((shape, format)),
            _ => Err(Unsupported(format!("operand {i} is not a weight"))),
        }
    }
    fn state(&self, i: usize) -> Result<CacheView<'_>> {
        match self.inputs.get(i) {
            Some(&InputView::State(state)) => Ok(state),
            _ => Err(Unsupported(format!("operand {i} is not a state"))),
        }
    }
    /// Row distances of the values after the state.
    fn row_distances<const N: usize>(&self) -> Result<[usize; N]> {
        let mut ld = [0; N];
        for (ld, i) in ld.iter_mut().zip(1..) {
            *ld = self.value(i)?.1;
        }
        Ok(ld)
    }
    /// Whether the second operand is one column for all.
    fn broadcasts(&self) -> Result<bool> {
        Ok(self.value(1)?.0.cols() == 1 && self.out()?.cols() != 1)
    }
    pub(crate) fn out(&self) -> Result<&Type> {
        self.outputs.first().copied().ok_or_else(|| Unsupported("no result".into()))
    }
}

impl CpuTarget {
    /// Kernels for a node.
    ///
    /// # Errors
    /// An operator, or a combination of its attributes, without a kernel.
    pub fn select(&self, node: &NodeView<'_>) -> Result<Selection> {
        if !self.is_legal(node.op.name()) {
            return Err(Unsupported(format!(
                "`{}` is not in the `legal_ops` of its device file",
                node.op.name()
            )));
        }
        let mut s = Selection::default();
        match node.op {
            Op::Embed => {
                let (shape, format) = node.weight(1)?;
                let (vocab, hidden) = two(shape)?;
                // A format that gains from feedback is rounded for what reads it: two readers, two copies.
                let panels = node.tied && !uses_feedback(format) || format.has_fine_scales();
                let spec = Embed { vocab, hidden, format, panels, out_ld: hidden };
                s.layouts.extend(self.weight_layout(spec.clone()).filter(|_| panels).map(|l| (1, l)));
                s.kernel(spec, inputs(2), 1);
            }
            &Op::RmsNorm { eps, groups, weight } => {
                let (ty, x_ld) = node.value(0)?;
                let width = ty.cols() / groups;
                let out_ld = ty.cols();
                let outs = vec![RowFormat::f32(out_ld)];
                let spec = Norm { kind: NormKind::Rms, width, groups, x_ld, outs, eps, weight };
                s.kernel(spec, inputs(1 + usize::from(weight)), 1);
            }
            &Op::LayerNorm { eps } => {
                let (ty, x_ld) = node.value(0)?;
                let (width, outs) = (ty.cols(), vec![RowFormat::f32(ty.cols())]);
                let kind = NormKind::Layer;
                let spec = Norm { kind, width, groups: 1, x_ld, outs, eps, weight: true };
                s.kernel(spec, inputs(3), 1);
            }
            &Op::Linear { bias } => self.linear(&mut s, node, 1, bias, None)?,
            &Op::LinearGlu { glu, bias } => self.linear(&mut s, node, 1, bias, Some(glu))?,
            &Op::HeadLinear { heads } => self.linear(&mut s, node, heads, false, None)?,
            Op::RopeAngles { scale, switch } => rope_angles(&mut s, node, *scale, *switch)?,
            &Op::Rope { heads, offset, style } => {
                let (ty, x_ld) = node.value(0)?;
                let (angles, angles_ld) = node.value(1)?;
                let dim = ty.cols() / heads;
                let (rotary, out_ld) = (angles.cols(), ty.cols());
                let rotation = Rotation { rotary, offset, style, angles_ld };
                let spec = Rope { heads, dim, norm: None, rotation, x_ld, out_ld };
                s.kernel(spec, inputs(2), 1);
            }
            Op::CacheWrite => Self::cache_write(&mut s, node)?,
            &Op::CausalConv { act, bias } => {
                let (x, x_ld) = node.value(1)?;
                let (taps, channels) = two(node.weight(2)?.0)?;
                let (rows, out_ld) = (x.rows(), channels);
                let conv = CausalConv { rows, channels, taps, act, bias, x_ld, out_ld };
                s.kernel(conv, inputs(node.inputs.len()), 1);
            }
            &Op::DeltaRule { key_heads, heads } | &Op::Ssd { groups: key_heads, heads } => {
                let corrects = matches!(node.op, Op::DeltaRule { .. });
                let (rows, out_ld) = (node.value(1)?.0.rows(), node.out()?.cols());
                let &[_, _, key, value] = node.state(0)?.shape else {
                    return Err(Unsupported("a state needs four axes".into()));
                };
                let by_channel = node.value(4)?.0.cols() != heads;
                let ld = node.row_distances()?;
                // Threads go row by row.
                let chunked = !node.one_row_per_sequence && !self.isa.is_thread();
                let rule = DeltaRule {
                    rows,
                    key_heads,
                    heads,
                    key,
                    value,
                    corrects,
                    by_channel,
                    chunked,
                    ld,
                    out_ld,
                };
                s.kernel(rule, inputs(8), 1);
            }
            Op::SelectiveScan => {
                let (c, channels) = (node.value(1)?.0, node.out()?.cols());
                let (rows, state, ld) = (c.rows(), c.cols(), node.row_distances()?);
                let scan = SelectiveScan { rows, channels, state, ld, out_ld: channels };
                s.kernel(scan, inputs(8), 1);
            }
            Op::Attention(desc) => self.attention(&mut s, node, desc)?,
            Op::Router(desc) => {
                let (_, logits_ld) = node.value(0)?;
                let n = 1 + usize::from(desc.select_bias);
                s.kernel(Router { desc: desc.clone(), logits_ld }, inputs(n), 2);
            }
            &Op::ZeroExperts { experts, zero } => {
                let k = node.value(0)?.0.cols();
                s.kernel(ZeroExperts { experts, zero, k }, inputs(2), 2);
            }
            &Op::Dispatch { experts, partial } => {
                let (ids, _) = node.value(0)?;
                let (rows, k) = two(&ids.shape)?;
                let (rows, k, experts) = (int(rows)?, int(k)?, int(experts)?);
                let work = Work::Builtin(Builtin::Dispatch { rows, k, experts, partial, candidates: None });
                s.launches.push(Launch { work, args: vec![Role::In(0), Role::Out(0)] });
            }
            // Nodes of static graphs have no kernel: `layout` gives them a function of the runtime.
            Op::RequestExperts { .. } => {
                return Err(Unsupported("`request_experts` is the runtime's".into()));
            }
            Op::LimitCapacity(_) | Op::ExpertFfn { fixed: true, .. } => {
                return Err(Unsupported(format!("`{}` is for static graphs", node.op.name())));
            }
            &Op::ExpertFfn { glu, bias, fixed: false } => self.expert_ffn(&mut s, node, glu, bias)?,
            &Op::NeuronFfn { glu, paged: None, predict, .. } => {
                self.neuron_ffn(&mut s, node, glu, predict)?;
            }
            &Op::NeuronFfn { glu, paged: Some(layer), gates_on_disk: false, hot, .. } => {
                self.split_neurons(&mut s, node, glu, (layer, hot))?;
            }
            &Op::NeuronFfn { glu, paged: Some(layer), gates_on_disk: true, hot, predict } => {
                self.bundled_neurons(&mut s, node, glu, (layer, hot), predict)?;
            }
            &Op::Combine { partial } => {
                let (y, _) = node.value(0)?;
                let (table, _) = node.value(1)?;
                let (weights, _) = node.value(2)?;
                let (rows, k) = two(&weights.shape)?;
                let layout = dispatch_layout(rows, k, table)?;
                let hidden = y.cols();
                let residual_ld = node.residual_ld;
                let spec = Combine { layout, hidden, out_ld: hidden, residual_ld, partial };
                let mut args = inputs(3);
                args.extend(residual_ld.map(|_| Role::Residual));
                s.kernel(spec, args, 1);
            }
            Op::Add => s.map(node, MapOp::Add { b_ld: node.value(1)?.1, broadcast_b: node.broadcasts()? })?,
            Op::Mul => s.map(node, MapOp::Mul { b_ld: node.value(1)?.1, broadcast_b: node.broadcasts()? })?,
            &Op::MulHeads { heads } => s.map(node, MapOp::MulHeads { heads, b_ld: node.value(1)?.1 })?,
            &Op::SoftCap { cap } => s.map(node, MapOp::SoftCap { cap })?,
            &Op::Glu(glu) => s.map(node, MapOp::Glu { glu, b_ld: node.value(1)?.1 })?,
            &Op::Scale { factor } => s.map(node, MapOp::Scale { factor })?,
            Op::ScaleCols => s.map(node, MapOp::ScaleCols)?,
            &Op::ScaleByPosition { beta, every, offset } => {
                s.map(node, MapOp::ScaleByPosition { beta, every, offset })?;
            }
            &Op::Clamp { lo, hi } => s.map(node, MapOp::Clamp { lo, hi })?,
            &Op::Act(kind) => s.map(node, MapOp::Act(kind))?,
            Op::Softplus => s.map(node, MapOp::Softplus)?,
            Op::Softmax => {
                let (ty, x_ld) = node.value(0)?;
                s.kernel(Softmax { cols: ty.cols(), x_ld, out_ld: ty.cols() }, inputs(1), 1);
            }
            Op::GatherRows => {
                let (ty, x_ld) = node.value(0)?;
                s.kernel(GatherRows { cols: ty.cols(), x_ld, out_ld: ty.cols() }, inputs(2), 1);
            }
            &Op::Slice { heads, start, len } => {
                let (ty, in_ld) = node.value(0)?;
                let (in_group, out_ld) = (ty.cols() / heads, heads * len);
                let spec = CopyColumns { groups: heads, cols: len, in_group, out_group: len, in_ld, out_ld };
                s.kernel(spec, vec![Role::InAt(0, start)], 1);
            }
            &Op::Concat { heads } => {
                let out_ld = node.out()?.cols();
                let mut at = 0;
                for i in 0..node.inputs.len() {
                    let (ty, in_ld) = node.value(i)?;
                    let (cols, out_group) = (ty.cols() / heads, out_ld / heads);
                    let spec = CopyColumns { groups: heads, cols, in_group: cols, out_group, in_ld, out_ld };
                    let args = vec![Role::In(i), Role::OutAt(0, at)];
                    s.launches.push(Launch { work: Work::Kernel(spec.into()), args });
                    at += cols;
                }
            }
        }
        Ok(s)
    }

    fn linear(
        &self,
        s: &mut Selection,
        node: &NodeView<'_>,
        groups: usize,
        bias: bool,
        glu: Option<moec_ir::Glu>,
    ) -> Result<()> {
        let (x, x_ld) = node.value(0)?;
        let (shape, format) = node.weight(1)?;
        let ([n, k] | [_, n, k]) = *shape else {
            return Err(Unsupported("a matrix needs two or three axes".into()));
        };
        let compute = self.compute_type(format, x.rows(), k)?;
        let conversion = RowConversion { cols: k, groups, per_row: 1, ld: x_ld, to: compute };
        let (x, x_ld) = self.rows_for(s, Role::In(0), x.rows(), conversion);
        let out_ld = node.out()?.cols();
        let residual_ld = node.residual_ld;
        let spec = Linear {
            k,
            n,
            format,
            compute,
            groups,
            x_ld,
            out_ld,
            bias,
            residual_ld,
            glu,
            schedule: Schedule::default(),
        };
        s.layouts.extend(self.weight_layout(spec.clone()).map(|l| (1, l)));
        let mut args = inputs(2 + usize::from(bias));
        args[0] = x;
        args.extend(residual_ld.map(|_| Role::Residual));
        s.kernel(spec, args, 1);
        Ok(())
    }

    fn expert_ffn(
        &self,
        s: &mut Selection,
        node: &NodeView<'_>,
        glu: moec_ir::Glu,
        bias: bool,
    ) -> Result<()> {
        let (x, x_ld) = node.value(0)?;
        let (table, _) = node.value(1)?;
        let (gate_up, format) = node.weight(2)?;
        let &[experts, both, hidden] = gate_up else {
            return Err(Unsupported("expert matrices need three axes".into()));
        };
        let (_, down_format) = node.weight(3)?;
        let inter = both / glu.projections();
        let rows = x.rows();
        let slots = node.out()?.rows();
        let k = slots / rows.max(1);
        let layout = dispatch_layout(rows, k, table)?;
        if layout.experts != experts {
            return Err(Unsupported("the dispatch table is for other experts".into()));
        }
        let expert_rows = self.rows_of_expert(rows, slots, experts);
        let compute = self.compute_type(format, expert_rows, hidden)?;
        let down_compute = self.compute_type(down_format, expert_rows, inter)?;
        let conversion = RowConversion { cols: hidden, groups: 1, per_row: 1, ld: x_ld, to: compute };
        let (x, x_ld) = self.rows_for(s, Role::In(0), rows, conversion);
        // GPU kernels write their results in the compute type of the next matrix. A CPU's kernels are fused
        // later.
        let paired = self.isa.is_thread() && down_compute == ComputeType::Bf16;
        let out = if paired {
            RowFormat { compute: down_compute, ld: pad_row_stride(packed_words(inter, down_compute)) }
        } else {
            RowFormat::f32(inter)
        };
        let h = s.temp(if paired { Type::i32([slots, out.ld]) } else { Type::f32([slots, inter]) });
        let up = ExpertGateUp {
            layout,
            hidden,
            inter,
            format,
            compute,
            x_ld,
            glu,
            bias,
            out,
            order: WeightOrder::Panels,
            schedule: Schedule::default(),
        };
        s.layouts.extend(self.weight_layout(up.clone()).map(|l| (2, l)));
        let mut args = vec![x, Role::In(1), Role::In(2)];
        args.extend(bias.then_some(Role::In(4)));
        args.push(h);
        s.launches.push(Launch { work: Work::Kernel(up.into()), args });

        let conversion = RowConversion { cols: inter, groups: 1, per_row: k, ld: inter, to: down_compute };
        let (h, h_ld) = if paired { (h, out.ld) } else { self.rows_for(s, h, rows, conversion) };
        let down = ExpertDown {
            layout,
            inter,
            hidden,
            format: down_format,
            compute: down_compute,
            h_ld,
            bias,
            order: WeightOrder::Panels,
            schedule: Schedule::default(),
        };
        s.layouts.extend(self.weight_layout(down.clone()).map(|l| (3, l)));
        let mut args = vec![h, Role::In(1), Role::In(3)];
        args.extend(bias.then_some(Role::In(5)));
        s.kernel(down, args, 1);
        Ok(())
    }
}

/// Words of a page: rows of f32 that are whole pages apart share one set of a first-level cache.
const PAGE: usize = 1024;

/// Rows from which on it pays to copy such rows apart, before a matrix reads them panel after panel.
const MANY: usize = 16;

impl Selection {
    /// An element-wise kernel.
    fn map(&mut self, node: &NodeView<'_>, op: MapOp) -> Result<()> {
        let (_, a_ld) = node.value(0)?;
        let cols = node.out()?.cols();
        self.kernel(Map { op, cols, a_ld, out_ld: cols }, inputs(node.inputs.len()), 1);
        Ok(())
    }

    /// A temporary.
    pub(crate) fn temp(&mut self, ty: Type) -> Role {
        self.temps.push(ty);
        Role::Temp(self.temps.len() - 1)
    }

    /// `rows` rows of f32 in the compute type of a matrix kernel, and their distance in words.
    pub(crate) fn rows(&mut self, x: Role, rows: usize, conversion: RowConversion) -> (Role, usize) {
        let RowConversion { cols, groups, per_row, ld: x_ld, to } = conversion;
        let all = rows * per_row;
        if to == ComputeType::F32 && (all < MANY || !x_ld.is_multiple_of(PAGE)) {
            return (x, x_ld);
        }
        let out_ld = pad_row_stride(groups * packed_words(cols, to));
        let packed = self.temp(Type::i32([all, out_ld]));
        let work = Work::Kernel(Quantise { cols, groups, per_row, x_ld, out_ld, to }.into());
        self.launches.push(Launch { work, args: vec![x, packed] });
        (packed, out_ld)
    }

    /// A kernel whose last arguments are the node's `outs` results.
    pub(crate) fn kernel(&mut self, spec: impl Into<KernelSpec>, mut args: Vec<Role>, outs: usize) {
        args.extend((0..outs).map(Role::Out));
        self.launches.push(Launch { work: Work::Kernel(spec.into()), args });
    }
}

fn inputs(n: usize) -> Vec<Role> {
    (0..n).map(Role::In).collect()
}

/// Extents of a matrix.
fn two(shape: &[usize]) -> Result<(usize, usize)> {
    match *shape {
        [a, b] => Ok((a, b)),
        _ => Err(Unsupported("a matrix needs two axes".into())),
    }
}

pub(crate) fn int(x: usize) -> Result<u32> {
    u32::try_from(x).map_err(|_| Unsupported(format!("{x} is too large")))
}

/// The layout of a dispatch table of `k` choices for `rows` tokens: its size gives the experts.
pub(crate) fn dispatch_layout(rows: usize, k: usize, table: &Type) -> Result<DispatchLayout> {
    let rest = DispatchLayout { rows, k, experts: 0 }.words();
    let experts = table.elements().saturating_sub(rest) / 2;
    let layout = DispatchLayout { rows, k, experts };
    if layout.words() == table.elements() { Ok(layout) } else { Err(Unsupported("no dispatch table".into())) }
}

fn rope_angles(s: &mut Selection, node: &NodeView<'_>, scale: f32, switch: Option<LongSwitch>) -> Result<()> {
    let (shape, _) = node.weight(1)?;
    let half = int(shape.iter().product())?;
    let long = switch.map(|l| Ok((int(l.after)?, l.long_scale.to_bits()))).transpose()?;
    let work = Work::Builtin(Builtin::RopeAngles { half, scale: scale.to_bits(), long });
    let mut args = inputs(2 + usize::from(switch.is_some()));
    args.push(Role::Out(0));
    s.launches.push(Launch { work, args });
    Ok(())
}
