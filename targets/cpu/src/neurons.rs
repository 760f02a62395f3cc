//! Experts by neurons: few rows skip inactive neurons, many are multiplied by panels out of the same bundles.

use crate::arithmetic::{Activations, RowConversion};
use crate::select::{Launch, NodeView, Result, Role, Selection, Work, dispatch_layout, int};
use crate::{CpuTarget, Unsupported};
use moec_codegen::spec::{ExpertDown, ExpertGateUp, NeuronClusters, NeuronDown, NeuronPredict, NeuronUp};
use moec_codegen::{
    ComputeType, RowFormat, Schedule, WeightOrder, active_list_words, has_gate_bounds, neurons_multiply,
};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Builtin, Layout};
use moec_ir::{FEW_ROWS, Format, Glu, Predictor, Type};

impl CpuTarget {
    /// Compute type of few rows with gate and up: that of whole experts if neurons support it, else exact.
    fn few_rows(&self, format: Format, rows: usize, hidden: usize) -> Result<ComputeType> {
        let usual = self.compute(format, rows)?;
        Ok(if neurons_multiply(&self.isa, format, hidden, usual) { usual } else { ComputeType::F32 })
    }

    /// Compute type of many rows with panels out of neurons.
    fn many_rows(&self, format: Format) -> ComputeType {
        let exact = self.activations() == Activations::F32 || matches!(format, Format::F32 | Format::F16);
        if exact || !self.isa.bf16 { ComputeType::F32 } else { ComputeType::Bf16 }
    }

    /// Kernels of `neuron_ffn` whose gates are stored separately, and whose up and down may stay on disk. Few rows
    /// go through clusters, for which `request_neurons` prepares the store. Hot neurons are left out by the lists
    /// of active ones, however many rows there are.
    pub(crate) fn split_neurons(
        &self,
        s: &mut Selection,
        node: &NodeView<'_>,
        glu: Glu,
        (layer, hot): (usize, Option<usize>),
    ) -> Result<()> {
        let (x, x_ld) = node.value(0)?;
        let (table, _) = node.value(1)?;
        let (gates, format) = node.weight(2)?;
        let (up_down, up_down_format) = node.weight(3)?;
        if !format.holds_neurons() || up_down_format != format {
            return Err(Unsupported(format!(
                "neurons cannot be {format} and {up_down_format}; supported are q4 and q8"
            )));
        }
        let (&[experts, inter, hidden], true) = (gates, up_down.len() == 3) else {
            return Err(Unsupported("neurons need three axes".into()));
        };
        let (rows, slots) = (x.rows(), node.out()?.rows());
        let layout = dispatch_layout(rows, slots / rows.max(1), table)?;
        if layout.experts != experts {
            return Err(Unsupported("the dispatch table is for other experts".into()));
        }
        s.layouts.extend([(2, Layout::Gates), (3, Layout::UpDown)]);
        let request = Builtin::RequestNeurons { layer: int(layer)?, rows: int(rows)?, k: int(layout.k)? };
        let h = s.temp(Type::f32([slots, inter]));
        if rows <= FEW_ROWS || hot.is_some() {
            let lists = s.temp(Type::i32([active_list_words(layout, inter)]));
            let compute = self.few_rows(format, rows, hidden)?;
            let conversion = RowConversion { cols: hidden, groups: 1, per_row: 1, ld: x_ld, to: compute };
            let (x, x_ld) = s.rows(Role::In(0), rows, conversion);
            s.launches.push(Launch { work: Work::Builtin(request), args: vec![Role::In(1), lists] });
            let bundled = false;
            let clusters = NeuronClusters { layout, hidden, inter, format, compute, x_ld, glu, hot, bundled };
            s.kernel(clusters, vec![x, Role::In(1), Role::In(2), Role::In(3), h, lists], 1);
            return Ok(());
        }
        // A prompt activates nearly all neurons.
        s.launches.push(Launch { work: Work::Builtin(request), args: vec![Role::In(1)] });
        let weights = [vec![Role::In(2), Role::In(3)], vec![Role::In(3)]];
        self.all_neurons(s, node, glu, (layout, inter, format), (WeightOrder::Split, weights, h))
    }

    /// Kernels of `neuron_ffn` whose gates stay on disk with the rest: a predictor lists the neurons whose gates
    /// are requested, and clusters follow. Without a predictor all is requested.
    pub(crate) fn bundled_neurons(
        &self,
        s: &mut Selection,
        node: &NodeView<'_>,
        glu: Glu,
        (layer, hot): (usize, Option<usize>),
        predict: Option<Predictor>,
    ) -> Result<()> {
        let (x, x_ld) = node.value(0)?;
        let (table, _) = node.value(1)?;
        let (neurons, format) = node.weight(2)?;
        if !format.holds_neurons() {
            return Err(Unsupported(format!("neuron bundles cannot be {format}; supported are q4 and q8")));
        }
        let (rows, hidden, slots) = (x.rows(), x.cols(), node.out()?.rows());
        let &[experts, inter, _] = neurons else {
            return Err(Unsupported("neuron bundles need three axes".into()));
        };
        let layout = dispatch_layout(rows, slots / rows.max(1), table)?;
        if layout.experts != experts {
            return Err(Unsupported("the dispatch table is for other experts".into()));
        }
        s.layouts.push((2, Layout::Bundles));
        let (layer, of_rows, k) = (int(layer)?, int(rows)?, int(layout.k)?);
        let request = Work::Builtin(Builtin::RequestNeurons { layer, rows: of_rows, k });
        let h = s.temp(Type::f32([slots, inter]));
        let Some(predict) = predict else {
            if hot.is_some() {
                return Err(Unsupported("hot neurons beside gates on disk need a predictor".into()));
            }
            s.launches.push(Launch { work: request, args: vec![Role::In(1)] });
            let weights = [vec![Role::In(2)], vec![Role::In(2)]];
            return self.all_neurons(
                s,
                node,
                glu,
                (layout, inter, format),
                (WeightOrder::Bundles, weights, h),
            );
        };
        let lists = s.temp(Type::i32([active_list_words(layout, inter)]));
        let compute = self.few_rows(format, rows, hidden)?;
        let conversion = RowConversion { cols: hidden, groups: 1, per_row: 1, ld: x_ld, to: compute };
        Self::prediction(s, node, predict, (layout, inter, hot), [h, lists])?;
        s.launches.push(Launch { work: request, args: vec![Role::In(1), lists] });
        let (x, x_ld) = s.rows(Role::In(0), rows, conversion);
        let (bundled, hot) = (true, None);
        let clusters = NeuronClusters { layout, hidden, inter, format, compute, x_ld, glu, hot, bundled };
        s.kernel(clusters, vec![x, Role::In(1), Role::In(2), Role::In(2), h, lists], 1);
        Ok(())
    }

    /// Kernels that multiply many rows by all neurons of their experts, wherever these are; `weights` are the
    /// operands of gate and up, and of down.
    fn all_neurons(
        &self,
        s: &mut Selection,
        node: &NodeView<'_>,
        glu: Glu,
        (layout, inter, format): (DispatchLayout, usize, Format),
        (order, weights, h): (WeightOrder, [Vec<Role>; 2], Role),
    ) -> Result<()> {
        let (x, x_ld) = node.value(0)?;
        let (rows, hidden) = (x.rows(), x.cols());
        let (compute, schedule) = (self.many_rows(format), Schedule::default());
        let conversion = RowConversion { cols: hidden, groups: 1, per_row: 1, ld: x_ld, to: compute };
        let (x, x_ld) = s.rows(Role::In(0), rows, conversion);
        let (bias, out) = (false, RowFormat::f32(inter));
        let up =
            ExpertGateUp { layout, hidden, inter, format, compute, x_ld, glu, bias, out, order, schedule };
        let [of_up, of_down] = weights;
        let args = [vec![x, Role::In(1)], of_up, vec![h]].concat();
        s.launches.push(Launch { work: Work::Kernel(up.into()), args });
        let conversion = RowConversion { cols: inter, groups: 1, per_row: layout.k, ld: inter, to: compute };
        let (h, h_ld) = s.rows(h, rows, conversion);
        let down = ExpertDown { layout, inter, hidden, format, compute, h_ld, bias, order, schedule };
        s.kernel(down, [vec![h, Role::In(1)], of_down].concat(), 1);
        Ok(())
    }

    /// Prediction, written to `h`, and the lists of the neurons that it takes to be active.
    fn prediction(
        s: &mut Selection,
        node: &NodeView<'_>,
        predict: Predictor,
        (layout, inter, hot): (DispatchLayout, usize, Option<usize>),
        results: [Role; 2],
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
        let predict = NeuronPredict { layout, hidden: x.cols(), inter, rank, format, x_ld, hot };
        let mut args = vec![Role::In(0), Role::In(1)];
        args.extend(weights.map(Role::In));
        args.extend(results);
        s.launches.push(Launch { work: Work::Kernel(predict.into()), args });
        Ok(())
    }

    /// Kernels of `neuron_ffn` over the rows of a dispatch table. A predictor is used however many rows there
    /// are.
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
            return Err(Unsupported(format!("neuron bundles cannot be {format}; supported are q4 and q8")));
        }
        let (rows, hidden) = (x.rows(), x.cols());
        let &[experts, inter, _] = neurons else {
            return Err(Unsupported("neuron bundles need three axes".into()));
        };
        let slots = node.out()?.rows();
        let layout = dispatch_layout(rows, slots / rows.max(1), table)?;
        if layout.experts != experts {
            return Err(Unsupported("the dispatch table is for other experts".into()));
        }
        let gate_bound = has_gate_bounds(format, glu);
        let h = s.temp(Type::f32([slots, inter]));
        if rows <= FEW_ROWS || predict.is_some() {
            let active_lists = s.temp(Type::i32([active_list_words(layout, inter)]));
            let compute = self.few_rows(format, rows, hidden)?;
            let conversion = RowConversion { cols: hidden, groups: 1, per_row: 1, ld: x_ld, to: compute };
            let predicted = predict.is_some();
            if let Some(predict) = predict {
                Self::prediction(s, node, predict, (layout, inter, None), [h, active_lists])?;
            }
            let (x, x_ld) = s.rows(Role::In(0), rows, conversion);
            let up = NeuronUp { layout, hidden, inter, format, compute, gate_bound, predicted, x_ld, glu };
            s.layouts.extend(self.weight_layout(up.clone()).map(|l| (2, l)));
            let args = vec![x, Role::In(1), Role::In(2), h, active_lists];
            s.launches.push(Launch { work: Work::Kernel(up.into()), args });
            let down = NeuronDown { layout, hidden, inter, format, gate_bound };
            s.kernel(down, vec![h, Role::In(1), Role::In(2), active_lists], 1);
            return Ok(());
        }
        s.layouts.push((2, Layout::Neurons { gate_bound }));
        let weights = [vec![Role::In(2)], vec![Role::In(2)]];
        let order = WeightOrder::Neurons { gate_bound };
        self.all_neurons(s, node, glu, (layout, inter, format), (order, weights, h))
    }
}
