//! The quantities of `claims/npumoe.toml` other than ratios of two systems: tables, shares, watts.

use super::paper::{self, GROUPS, Metric};
use super::reproduce::{Bench, Measured, Total};
use crate::claim::Quantities;
use crate::shapes::{PHIMOE, PHIMOE_TINY, QWEN3, Shape};
use moec_base::{Error, Result};
use moec_costs::timeline::TaskKind;
use moec_costs::units::{ExpertSize, Units};
use moec_simulate::systems::{ANEMLL, COREML_CPU, COREML_NAIVE, OURS};

impl Bench {
    /// Adds every one.
    ///
    /// # Errors
    /// Our bug: devices or models that lack what the paper's have.
    pub(super) fn figures(&self, out: &mut Quantities, measured: &[Measured]) -> Result<()> {
        let units = self.units("m2-ultra")?;
        shapes(out);
        let watts = Watts::of(&units);
        if let Some(most) = &units.npu.max_graph_bytes {
            out.put("largest graph of the NPU", most.value * 1e-9);
        }
        graphs(out, &units, &watts)?;
        let find = |config: &str| measured.iter().find(|m| m.config.name == config);
        if let Some(short) = find(paper::SHORT.name) {
            block(out, short);
            capacities(out, short);
            whole(out, short);
            if let Some(all) = find("PhiMoE end to end") {
                prefill(out, short, all);
            }
        }
        measured.iter().filter(|m| m.config.stated).for_each(|m| energy(out, m));
        if let Some(qwen) = find(paper::QWEN.name) {
            runs(out, qwen);
        }
        // One graph that does nothing but compute, its launches and waiting aside.
        out.put("power of NPU and memory in attention", watts.npu + watts.memory);
        Ok(())
    }
}

/// Watts of the units while they work, and the CPU's microseconds of a launch.
struct Watts {
    cpu: f64,
    npu: f64,
    memory: f64,
    dispatch_us: f64,
}

impl Watts {
    fn of(units: &Units<'_>) -> Self {
        let memory = units.device.memories.first().map(|m| &m.busy_w);
        let [cpu, npu, memory] = [Some(&units.cpu.busy_w), Some(&units.npu.busy_w), memory]
            .map(|f| f.and_then(Option::as_ref).map_or(0.0, |f| f.value));
        let dispatch_us = units.npu.dispatch_cost_us.as_ref().map_or(0.0, |f| f.value);
        Self { cpu, npu, memory, dispatch_us }
    }
}

/// Table 1 and §5.1: whether the models are those of the paper.
fn shapes(out: &mut Quantities) {
    for shape in paper::MODELS {
        let of = |experts: u64| parameters(&shape, experts) as f64 * 1e-9;
        out.put(format!("{}, parameters", shape.name), of(shape.experts as u64));
        out.put(format!("{}, active parameters", shape.name), of(u64::from(shape.k)));
    }
    out.put("an expert of PhiMoE", 2.0 * paper::SHORT.shape.expert() as f64 * 1e-6);
    let size = |shape: &Shape, each: f64| parameters(shape, shape.experts as u64) as f64 * each;
    out.put("PhiMoE, size", size(&PHIMOE, 2e-9));
    out.put("PhiMoE-tiny, size", size(&PHIMOE_TINY, 2e-9));
    out.put("Qwen3-MoE, size", size(&QWEN3, 1.0 / f64::from(1 << 30)));
}

/// Parameters of a model with so many experts in a layer.
fn parameters(shape: &Shape, experts: u64) -> u64 {
    let inner = shape.head_dim * (shape.heads + shape.kv_heads);
    let layer = experts * shape.expert() + 2 * shape.hidden * inner + shape.hidden * shape.experts as u64;
    u64::from(shape.layers) * layer + 2 * shape.hidden * shape.vocab
}

/// Table 5 with its text, and Figure 7: single graphs.
fn graphs(out: &mut Quantities, units: &Units<'_>, watts: &Watts) -> Result<()> {
    let model = paper::SHORT.shape.model();
    let size = model.moe_layers().find_map(|l| l.experts).map(|m| m.size);
    let size: ExpertSize = size.ok_or_else(|| Error::bug("a model without experts"))?;
    let experts = paper::SHORT.shape.experts as f64;
    // Milliseconds and millijoules per row.
    let token = |(group, capacity): (usize, u32)| {
        let graphs = experts / group as f64;
        let us = graphs * units.graph_us(group, capacity, size);
        let rows = experts * f64::from(capacity);
        let busy = us - graphs * units.npu.launch_us();
        let uj = busy * watts.npu + graphs * watts.dispatch_us * watts.cpu + us * watts.memory;
        (us * 1e-3 / rows, uj * 1e-3 / rows)
    };
    for first in GROUPS {
        let (ms, mj) = token(first);
        let name = |(group, capacity): (usize, u32)| format!("{group}x{capacity}");
        out.put(format!("{} serial, latency", name(first)), ms);
        out.put(format!("{} serial, energy", name(first)), mj);
        for second in GROUPS {
            let less = token(second);
            let pair = format!("{} over {}", name(first), name(second));
            out.put(format!("latency of {pair}"), ms / less.0);
            out.put(format!("energy of {pair}"), mj / less.1);
        }
    }
    for rows in [32_u32, 64, 128, 256] {
        let us =
            |u: &moec_device::DeviceUnit| u.matmul_us(f64::from(rows), size.weights as f64).unwrap_or(0.0);
        out.put(format!("NPU over CPU at {rows} rows"), us(units.cpu) / us(units.npu));
    }
    Ok(())
}

/// Milliseconds of a part of a MoE block, as Table 4 has it.
fn part_ms(total: &Total, what: TaskKind, m: &Measured) -> f64 {
    // The second addition of a layer is that of the MoE block.
    let share = if what == TaskKind::Residual { 0.5 } else { 1.0 };
    total.block_ms(what, &m.config) * share
}

/// The rows of Table 4.
const ROWS: [(TaskKind, &str); 6] = [
    (TaskKind::Router, "Router"),
    (TaskKind::Gather, "Gather"),
    (TaskKind::Pad, "Padding"),
    (TaskKind::Experts, "Expert FFN"),
    (TaskKind::Scatter, "Scatter"),
    (TaskKind::Residual, "Residual"),
];

/// Table 4 and its text.
fn block(out: &mut Quantities, short: &Measured) {
    let whole = |total: &Total| ROWS.iter().map(|&(what, _)| part_ms(total, what, short)).sum::<f64>();
    for (system, total) in &short.systems {
        for (what, name) in ROWS {
            out.put(format!("{name}, {}", system.name), part_ms(total, what, short));
        }
        out.put(format!("end to end, {}", system.name), whole(total));
    }
    let [Some(ours), Some(cpu), Some(naive)] = [OURS, COREML_CPU, COREML_NAIVE].map(|s| short.total(s.name))
    else {
        return;
    };
    let saved = |ours: f64, theirs: f64| 1.0 - ours / theirs.max(f64::MIN_POSITIVE);
    let of = |what| saved(part_ms(ours, what, short), part_ms(cpu, what, short));
    out.put("expert FFN, less than coreml-cpu", of(TaskKind::Experts));
    out.put("scatter, less than coreml-cpu", of(TaskKind::Scatter));
    out.put("the whole block, less than coreml-cpu", saved(whole(ours), whole(cpu)));
    out.put("the whole block, less than coreml-naive", saved(whole(ours), whole(naive)));
}

/// Table 3 and §5.8: tokens past capacities, and padding.
fn capacities(out: &mut Quantities, short: &Measured) {
    let Some(ours) = short.total(OURS.name) else { return };
    let [routed, dropped, rows, padding] = ours.rows.map(|n| n as f64);
    let padding = 100.0 * padding / rows.max(1.0);
    out.put("tokens dropped", 100.0 * dropped / routed.max(1.0));
    out.put("padding", padding);
    out.put("padding on average", padding);
}

/// Figures 8 and 14, §5.3 and Table 9: shares and watts of whole runs.
fn whole(out: &mut Quantities, short: &Measured) {
    let part = |total: &Total, what| total.parts.get(&what).copied().unwrap_or(0.0);
    if let Some(ours) = short.total(OURS.name) {
        out.put("attention and MoE block", ours.energy.total_j() / (ours.wall_us * 1e-6));
        out.put("experts in the TTFT of ours", part(ours, TaskKind::Experts) / ours.wall_us);
    }
    if let Some(naive) = short.total(COREML_NAIVE.name) {
        let share = naive.dispatch_us / part(naive, TaskKind::Experts).max(f64::MIN_POSITIVE);
        out.put("dispatch in the naive MoE block", share);
    }
    if let (Some(cpu), Some(npu)) = (short.total(COREML_CPU.name), short.total(ANEMLL.name)) {
        let (a, b) = (part(cpu, TaskKind::Attention), part(npu, TaskKind::Attention));
        out.put("attention on the slower unit over the other", a.max(b) / a.min(b));
    }
    if let Some(ratio) = short.ratio(Metric::Latency, COREML_NAIVE.name, COREML_CPU.name) {
        out.put("CPU and NPU over CPU alone", ratio);
    }
}

/// Figure 2: the prefill's share of a whole run. The paper does not state its system; ours is used.
fn prefill(out: &mut Quantities, short: &Measured, all: &Measured) {
    let (Some(prefill), Some(all)) = (short.total(OURS.name), all.total(OURS.name)) else { return };
    out.put("prefill in the latency of a run", prefill.wall_us / all.wall_us);
    out.put("prefill in the CPU cycles of a run", prefill.cpu_us / all.cpu_us);
}

/// §5.4: joules of a configuration.
fn energy(out: &mut Quantities, m: &Measured) {
    let (Some(ours), Some(naive)) = (m.total(OURS.name), m.total(COREML_NAIVE.name)) else { return };
    out.put(format!("ours, {}", m.config.name), ours.metric(Metric::Energy) * 1e3);
    let ratio = naive.energy.memory_j / ours.energy.memory_j;
    out.put(format!("data of naive over ours, {}", m.config.name), ratio);
}

/// Tables 6 and 7: shares of seconds and of joules, and watts.
fn runs(out: &mut Quantities, qwen: &Measured) {
    let attention = |system: &str| qwen.total(system)?.parts.get(&TaskKind::Attention).copied();
    if let (Some(cpu), Some(npu)) = (attention(COREML_CPU.name), attention(ANEMLL.name)) {
        out.put("attention of coreml-cpu over that of ours and anemll", cpu / npu);
    }
    for (system, total) in &qwen.systems {
        let (name, joules) = (system.name, total.energy.total_j());
        out.put(format!("{name}, power"), joules / (total.wall_us * 1e-6));
        for (part, what) in [("experts", TaskKind::Experts), ("attention", TaskKind::Attention)] {
            let us = total.parts.get(&what).copied().unwrap_or(0.0);
            out.put(format!("{name}, {part}"), us / total.wall_us);
        }
        let parts =
            [("CPU", total.energy.cpu_j), ("ANE", total.energy.npu_j), ("Comm.", total.energy.memory_j)];
        for (part, found) in parts {
            out.put(format!("{name}, {part}"), found / joules);
        }
    }
}
