//! Experts by neurons: few rows skip what sleeps, many meet panels out of the same bundles.

use crate::arithmetic::{Activations, Form};
use crate::select::{Launch, NodeView, Result, Role, Selection, Work, dispatch_layout, int};
use crate::{CpuTarget, Unsupported};
use moec_codegen::spec::{
    ExpertDown, ExpertGateUp, NeuronDown, NeuronDownAt, NeuronGate, NeuronPredict, NeuronUp, NeuronUpAt,
};
use moec_codegen::{Compute, RowForm, Schedule, WeightOrder, awake_words, neurons_meet, neurons_sketched};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Builtin, Layout};
use moec_ir::{FEW_ROWS, Format, Glu, Predictor, Type};

impl CpuTarget {
    /// In what form few rows meet gate and up: that of whole experts where neurons know it, else exact.
    fn few_rows(&self, format: Format, rows: usize, hidden: usize) -> Result<Compute> {
        let usual = self.compute(format, rows)?;
        Ok(if neurons_meet(&self.isa, format, hidden, usual) { usual } else { Compute::F32 })
    }

    /// In what form many rows meet panels out of neurons.
    fn many_rows(&self, format: Format) -> Compute {
        let exact = self.activations() == Activations::F32 || matches!(format, Format::F32 | Format::F16);
        if exact || !self.isa.bf16 { Compute::F32 } else { Compute::Bf16 }
    }

    /// Kernels of `neuron_ffn` whose gates lie apart: where up and down stay on flash, `wake` asks for them in between.
    pub(crate) fn neurons_apart(
        &self,
        s: &mut Selection,
        node: &NodeView<'_>,
        glu: Glu,
        layer: usize,
    ) -> Result<()> {
        let (x, x_ld) = node.value(0)?;
        let (table, _) = node.value(1)?;
        let (gates, format) = node.weight(2)?;
        let (rests, rest_format) = node.weight(3)?;
        if !format.holds_neurons() || rest_format != format {
            return Err(Unsupported(format!(
                "neurons cannot be {format} and {rest_format}; q4 and q8 they can"
            )));
        }
        let (&[experts, inter, hidden], true) = (gates, rests.len() == 3) else {
            return Err(Unsupported("neurons need three axes".into()));
        };
        let (rows, slots) = (x.rows(), node.out()?.rows());
        let layout = dispatch_layout(rows, slots / rows.max(1), table)?;
        if layout.experts != experts {
            return Err(Unsupported("the dispatch table is for other experts".into()));
        }
        s.layouts.extend([(2, Layout::Gates), (3, Layout::Rests)]);
        let wake = Builtin::Wake { layer: int(layer)?, rows: int(rows)?, k: int(layout.k)? };
        let h = s.temp(Type::f32([slots, inter]));
        if rows <= FEW_ROWS {
            let awake = s.temp(Type::i32([awake_words(layout, inter)]));
            let compute = self.few_rows(format, rows, hidden)?;
            let form = Form { cols: hidden, groups: 1, per_row: 1, ld: x_ld, to: compute };
            let (x, x_ld) = s.rows(Role::In(0), rows, form);
            let gate = NeuronGate { layout, hidden, inter, format, compute, x_ld, glu };
            let args = vec![x, Role::In(1), Role::In(2), h, awake];
            s.launches.push(Launch { work: Work::Kernel(gate.into()), args });
            s.launches.push(Launch { work: Work::Builtin(wake), args: vec![Role::In(1), awake] });
            let up = NeuronUpAt { layout, hidden, inter, format, compute, x_ld, glu };
            let args = vec![x, Role::In(1), Role::In(3), h, awake];
            s.launches.push(Launch { work: Work::Kernel(up.into()), args });
            let down = NeuronDownAt { layout, hidden, inter, format };
            s.kernel(down, vec![h, Role::In(1), Role::In(3), awake], 1);
            return Ok(());
        }
        // A prompt activates nearly all neurons.
        s.launches.push(Launch { work: Work::Builtin(wake), args: vec![Role::In(1)] });
        let (compute, order, schedule) = (self.many_rows(format), WeightOrder::Apart, Schedule::default());
        let form = Form { cols: hidden, groups: 1, per_row: 1, ld: x_ld, to: compute };
        let (x, x_ld) = s.rows(Role::In(0), rows, form);
        let (bias, out) = (false, RowForm::f32(inter));
        let up =
            ExpertGateUp { layout, hidden, inter, format, compute, x_ld, glu, bias, out, order, schedule };
        let args = vec![x, Role::In(1), Role::In(2), Role::In(3), h];
        s.launches.push(Launch { work: Work::Kernel(up.into()), args });
        let form = Form { cols: inter, groups: 1, per_row: layout.k, ld: inter, to: compute };
        let (h, h_ld) = s.rows(h, rows, form);
        let down = ExpertDown { layout, inter, hidden, format, compute, h_ld, bias, order, schedule };
        s.kernel(down, vec![h, Role::In(1), Role::In(3)], 1);
        Ok(())
    }

    /// Prediction, written to `h`.
    fn prediction(
        s: &mut Selection,
        node: &NodeView<'_>,
        predict: Predictor,
        (layout, inter): (DispatchLayout, usize),
        h: Role,
    ) -> Result<()> {
        let (x, x_ld) = node.value(0)?;
        let weights = 3..3 + predict.weights();
        let (first, format) = node.weight(3)?;
        let rank = match (predict, first) {
            (Predictor::Coarse, _) => None,
            (Predictor::LowRank, &[_, rank, _]) => Some(rank),
            (Predictor::LowRank, _) => return Err(Unsupported("a predictor needs three axes".into())),
        };
        s.layouts.extend(weights.clone().map(|i| (i, Layout::Gates)));
        let predict = NeuronPredict { layout, hidden: x.cols(), inter, rank, format, x_ld };
        let mut args = vec![Role::In(0), Role::In(1)];
        args.extend(weights.map(Role::In));
        args.push(h);
        s.launches.push(Launch { work: Work::Kernel(predict.into()), args });
        Ok(())
    }

    /// Kernels of `neuron_ffn` over the rows of a dispatch table. Who asks a predictor does so however many rows there are.
    pub(crate) fn neuron_ffn(
        &self,
        s: &mut Selection,
        node: &NodeView<'_>,
        glu: Glu,
        predict: Option<Predictor>,
    ) -> Result<()> {
        let (x, x_ld) = node.value(0)?;
        let (table, _) = node.value(1)?;
        let (neurons, format) = node.weight(2)?;
        if !format.holds_neurons() {
            return Err(Unsupported(format!("bundles of neurons cannot hold {format}; q4 and q8 they can")));
        }
        let (rows, hidden) = (x.rows(), x.cols());
        let &[experts, inter, _] = neurons else {
            return Err(Unsupported("bundles of neurons need three axes".into()));
        };
        let slots = node.out()?.rows();
        let layout = dispatch_layout(rows, slots / rows.max(1), table)?;
        if layout.experts != experts {
            return Err(Unsupported("the dispatch table is for other experts".into()));
        }
        let sketch = neurons_sketched(format, glu);
        let h = s.temp(Type::f32([slots, inter]));
        if rows <= FEW_ROWS || predict.is_some() {
            let awake = s.temp(Type::i32([awake_words(layout, inter)]));
            let compute = self.few_rows(format, rows, hidden)?;
            let form = Form { cols: hidden, groups: 1, per_row: 1, ld: x_ld, to: compute };
            let predicted = predict.is_some();
            if let Some(predict) = predict {
                Self::prediction(s, node, predict, (layout, inter), h)?;
            }
            let (x, x_ld) = s.rows(Role::In(0), rows, form);
            let up = NeuronUp { layout, hidden, inter, format, compute, sketch, predicted, x_ld, glu };
            s.layouts.extend(self.weight_layout(up.clone()).map(|l| (2, l)));
            let args = vec![x, Role::In(1), Role::In(2), h, awake];
            s.launches.push(Launch { work: Work::Kernel(up.into()), args });
            let down = NeuronDown { layout, hidden, inter, format, sketch };
            s.kernel(down, vec![h, Role::In(1), Role::In(2), awake], 1);
            return Ok(());
        }
        let (compute, order, schedule) =
            (self.many_rows(format), WeightOrder::Neurons { sketch }, Schedule::default());
        let form = Form { cols: hidden, groups: 1, per_row: 1, ld: x_ld, to: compute };
        let (x, x_ld) = s.rows(Role::In(0), rows, form);
        let up = ExpertGateUp {
            layout,
            hidden,
            inter,
            format,
            compute,
            x_ld,
            glu,
            bias: false,
            out: RowForm::f32(inter),
            order,
            schedule,
        };
        s.layouts.extend(self.weight_layout(up.clone()).map(|l| (2, l)));
        let args = vec![x, Role::In(1), Role::In(2), h];
        s.launches.push(Launch { work: Work::Kernel(up.into()), args });
        let form = Form { cols: inter, groups: 1, per_row: layout.k, ld: inter, to: compute };
        let (h, h_ld) = s.rows(h, rows, form);
        let down = ExpertDown { layout, inter, hidden, format, compute, h_ld, bias: false, order, schedule };
        s.kernel(down, vec![h, Role::In(1), Role::In(2)], 1);
        Ok(())
    }
}
