//! The figures of NPUMoE's evaluation that are no ratio of two systems, beside what is simulated: tables, shares, watts.

use super::paper::{self, Block, Metric, Printed};
use super::reproduce::{Bench, Figure, Measured, Total};
use crate::shapes::Shape;
use moec_base::{Error, Result};
use moec_costs::timeline::What;
use moec_costs::units::{ExpertSize, Units};
use moec_simulate::systems::{ANEMLL, COREML_CPU, COREML_NAIVE, OURS};

/// What is added to.
type Figures = Vec<Figure>;

/// A figure that no constant was found from.
fn free(source: impl Into<String>, unit: &'static str, paper: Printed, found: f64) -> Figure {
    Figure { source: source.into(), unit, paper, found, used: false }
}

impl Bench {
    /// Every one.
    ///
    /// # Errors
    /// Our bug: devices or models that lack what the paper's have.
    pub(super) fn figures(&self, measured: &[Measured]) -> Result<Vec<Figure>> {
        let units = self.units("m2-ultra")?;
        let mut out = Vec::new();
        shapes(&mut out);
        let watts = Watts::of(&units);
        graphs(&mut out, &units, &watts)?;
        let find = |config: &str| measured.iter().find(|m| m.config.name == config);
        if let Some(short) = find(paper::SHORT.name) {
            block(&mut out, short);
            capacities(&mut out, short);
            whole(&mut out, short);
            if let Some(all) = find("PhiMoE end to end") {
                prefill(&mut out, short, all);
            }
        }
        measured.iter().filter(|m| m.config.stated).for_each(|m| energy(&mut out, m));
        if let Some(qwen) = find(paper::QWEN.name) {
            runs(&mut out, qwen);
        }
        // One graph that does nothing but compute, its launches and waiting aside.
        let pure = watts.npu + watts.memory;
        let is = Printed::Is(paper::ATTENTION_W);
        out.push(free("Table 8, power of NPU and memory in attention", "W", is, pure));
        Ok(out)
    }
}

/// Watts of the units while they work, and the processor's microseconds of a launch.
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
fn shapes(out: &mut Figures) {
    for (shape, total, active) in paper::PARAMETERS {
        let of = |experts: u64| parameters(&shape, experts) as f64 * 1e-9;
        let name = format!("Table 1, {}", shape.name);
        out.push(free(name.clone() + ", parameters", "10⁹", Printed::Is(total), of(shape.experts as u64)));
        out.push(free(name + ", active parameters", "10⁹", Printed::Is(active), of(u64::from(shape.k))));
    }
    let mb = 2.0 * paper::SHORT.shape.expert() as f64 * 1e-6;
    out.push(free("§5.1, an expert of PhiMoE", "MB", Printed::Is(paper::EXPERT_MB), mb));
}

/// Parameters of a model with so many experts in a layer.
fn parameters(shape: &Shape, experts: u64) -> u64 {
    let inner = shape.head_dim * (shape.heads + shape.kv_heads);
    let layer = experts * shape.expert() + 2 * shape.hidden * inner + shape.hidden * shape.experts as u64;
    u64::from(shape.layers) * layer + 2 * shape.hidden * shape.vocab
}

/// Table 5 with its text, and Figure 7: single graphs.
fn graphs(out: &mut Figures, units: &Units<'_>, watts: &Watts) -> Result<()> {
    let model = paper::SHORT.shape.model();
    let size = model.moe_layers().find_map(|l| l.experts).map(|m| m.size);
    let size: ExpertSize = size.ok_or_else(|| Error::bug("a model without experts"))?;
    let experts = paper::SHORT.shape.experts as f64;
    // Milliseconds and millijoules per row.
    let token = |group: usize, capacity: u32| {
        let graphs = experts / group as f64;
        let us = graphs * units.graph_us(group, capacity, size);
        let rows = experts * f64::from(capacity);
        let busy = us - graphs * units.npu.launch_us();
        let uj = busy * watts.npu + graphs * watts.dispatch_us * watts.cpu + us * watts.memory;
        (us * 1e-3 / rows, uj * 1e-3 / rows)
    };
    for row in paper::GROUPED_ROWS {
        let (ms, mj) = token(row.group, row.capacity);
        let name = format!("Table 5, {}x{} serial", row.group, row.capacity);
        // The device file's table is from groups of 8, its launch from groups of 1.
        let used = row.group == 8 || (row.group == 1 && row.capacity == 32);
        out.push(Figure { used, ..free(name.clone() + ", latency", "ms/token", Printed::Is(row.ms), ms) });
        out.push(free(name + ", energy", "mJ/token", Printed::Is(row.mj), mj));
    }
    for step in paper::STEPS {
        let of = |(group, capacity)| {
            let (ms, mj) = token(group, capacity);
            if step.metric == Metric::Latency { ms } else { mj }
        };
        let ((g1, c1), (g2, c2)) = (step.from, step.to);
        let name = format!("§5.7 of Table 5, {} of {g1}x{c1} over {g2}x{c2}", step.metric.name());
        // Both rows are those that the table of the device file is from.
        let used = step.metric == Metric::Latency
            && [step.from, step.to].iter().all(|&(group, c)| group == 8 || (group, c) == (1, 32));
        out.push(Figure { used, ..free(name, "×", Printed::Is(step.times), of(step.from) / of(step.to)) });
    }
    for rows in [32_u32, 64, 128, 256] {
        let us = |u: &moec_device::Unit| u.matmul_us(f64::from(rows), size.weights as f64).unwrap_or(0.0);
        let (from, to) = paper::NPU_FASTER;
        let name = format!("Figure 7, NPU over CPU at {rows} rows");
        let found = us(units.cpu) / us(units.npu);
        out.push(Figure { used: rows == 256, ..free(name, "×", Printed::Within(from, to), found) });
    }
    Ok(())
}

/// Milliseconds of a part of a MoE block, as Table 4 has it.
fn part_ms(total: &Total, what: What, m: &Measured) -> f64 {
    // The second addition of a layer is that of the MoE block.
    let share = if what == What::Residual { 0.5 } else { 1.0 };
    total.block_ms(what, &m.config) * share
}

/// The rows of Table 4.
fn rows(block: &Block) -> [(What, &'static str, f64); 6] {
    [
        (What::Router, "Router", block.router),
        (What::Gather, "Gather", block.gather),
        (What::Pad, "Padding", block.padding),
        (What::Experts, "Expert FFN", block.experts),
        (What::Scatter, "Scatter", block.scatter),
        (What::Residual, "Residual", block.residual),
    ]
}

/// Table 4 and its text.
fn block(out: &mut Figures, short: &Measured) {
    let whole = |system: &str| {
        let total = short.total(system)?;
        let block = paper::BLOCKS.iter().find(|b| b.system == system)?;
        Some(rows(block).iter().map(|&(what, ..)| part_ms(total, what, short)).sum::<f64>())
    };
    for (block, all) in paper::BLOCKS.iter().zip(paper::BLOCK_MS) {
        let Some(total) = short.total(block.system) else { continue };
        for (what, name, ms) in rows(block).into_iter().filter(|r| r.2 > 0.0) {
            let used = match what {
                What::Gather => block.system == COREML_CPU.name,
                What::Experts => block.system == COREML_CPU.name || block.system == COREML_NAIVE.name,
                _ => false,
            };
            let name = format!("Table 4, {name}, {}", block.system);
            out.push(Figure { used, ..free(name, "ms", Printed::Is(ms), part_ms(total, what, short)) });
        }
        let found = whole(block.system).unwrap_or(0.0);
        out.push(free(format!("Table 4, end to end, {}", block.system), "ms", Printed::Is(all), found));
    }
    let (Some(ours), Some(cpu)) = (short.total(OURS.name), short.total(COREML_CPU.name)) else { return };
    let saved = |ours: f64, theirs: f64| 1.0 - ours / theirs.max(f64::MIN_POSITIVE);
    let of = |what| saved(part_ms(ours, what, short), part_ms(cpu, what, short));
    let against = |system: &str| saved(whole(OURS.name).unwrap_or(0.0), whole(system).unwrap_or(0.0));
    let found = [of(What::Experts), of(What::Scatter), against(COREML_CPU.name)];
    let names = ["expert FFN", "scatter", "the whole block"];
    for ((name, (from, to)), found) in names.iter().zip(paper::BLOCK_SAVES).zip(found) {
        let name = format!("§5.7 of Table 4, {name}, less than coreml-cpu");
        out.push(free(name, "of 1", Printed::Within(from, to), found));
    }
    let is = Printed::Is(paper::BLOCK_SAVES_NAIVE);
    out.push(free(
        "§5.7 of Table 4, the whole block, less than coreml-naive",
        "of 1",
        is,
        against(COREML_NAIVE.name),
    ));
}

/// Table 3 and §5.8: tokens past capacities, and padding.
fn capacities(out: &mut Figures, short: &Measured) {
    let Some(ours) = short.total(OURS.name) else { return };
    let [routed, dropped, rows, padding] = ours.rows.map(|n| n as f64);
    let range = |all: [f64; 4]| {
        Printed::Within(all.iter().copied().fold(f64::MAX, f64::min), all.iter().copied().fold(0.0, f64::max))
    };
    let padding = 100.0 * padding / rows.max(1.0);
    let dropped = 100.0 * dropped / routed.max(1.0);
    out.push(free("Table 3, tokens dropped", "%", range(paper::DROPPED), dropped));
    out.push(free("Table 3, padding", "%", range(paper::PADDED), padding));
    out.push(free("§5.8, padding on average", "%", Printed::Is(paper::PADDED_ON_AVERAGE), padding));
}

/// Figures 8 and 14, §5.3 and Table 9: shares and watts of whole runs.
fn whole(out: &mut Figures, short: &Measured) {
    let part = |total: &Total, what| total.parts.get(&what).copied().unwrap_or(0.0);
    if let Some(ours) = short.total(OURS.name) {
        let watts = ours.energy.total_j() / (ours.wall_us * 1e-6);
        out.push(free("Table 9, attention and MoE block", "W", Printed::Is(paper::BLOCK_W), watts));
        let share = part(ours, What::Experts) / ours.wall_us;
        let over = Printed::Over(paper::EXPERT_SHARE);
        out.push(free("Figure 14, experts in the TTFT of ours", "of 1", over, share));
    }
    if let Some(naive) = short.total(COREML_NAIVE.name) {
        let share = naive.dispatch_us / part(naive, What::Experts).max(f64::MIN_POSITIVE);
        let over = Printed::Over(paper::DISPATCH_SHARE);
        out.push(free("§5.3, dispatch in the naive MoE block", "of 1", over, share));
    }
    if let (Some(cpu), Some(npu)) = (short.total(COREML_CPU.name), short.total(ANEMLL.name)) {
        let (a, b) = (part(cpu, What::Attention), part(npu, What::Attention));
        let is = Printed::Is(paper::ATTENTION_ELSEWHERE);
        out.push(free("§5.3, attention on the slower unit over the other", "×", is, a.max(b) / a.min(b)));
    }
    if let Some(ratio) = short.ratio(Metric::Latency, COREML_NAIVE.name, COREML_CPU.name) {
        let (cpu, npu) = paper::SYNC_S;
        out.push(free("Figure 8, CPU and NPU over CPU alone", "×", Printed::Is(npu / cpu), ratio));
    }
}

/// Figure 2: what the prefill takes of a whole run. Which system the paper ran is not stated: ours.
fn prefill(out: &mut Figures, short: &Measured, all: &Measured) {
    let (Some(prefill), Some(all)) = (short.total(OURS.name), all.total(OURS.name)) else { return };
    let (latency, cycles) = paper::PREFILL_SHARE;
    let rows = [
        ("latency", latency, prefill.wall_us / all.wall_us),
        ("CPU cycles", cycles, prefill.cpu_us / all.cpu_us),
    ];
    for (name, share, found) in rows {
        out.push(free(
            format!("Figure 2, prefill in the {name} of a run"),
            "of 1",
            Printed::Is(share),
            found,
        ));
    }
}

/// §5.4: joules of a configuration.
fn energy(out: &mut Figures, m: &Measured) {
    let (Some(ours), Some(naive)) = (m.total(OURS.name), m.total(COREML_NAIVE.name)) else { return };
    let (from, to) = paper::OURS_MJ;
    let mj = ours.metric(Metric::Energy) * 1e3;
    out.push(free(format!("§5.4, ours, {}", m.config.name), "mJ/token", Printed::Within(from, to), mj));
    let (from, to) = paper::NAIVE_MEMORY;
    let ratio = naive.energy.memory_j / ours.energy.memory_j;
    let name = format!("§5.4, data of naive over ours, {}", m.config.name);
    out.push(free(name, "×", Printed::Within(from, to), ratio));
}

/// Tables 6 and 7: shares of seconds and of joules, and watts.
fn runs(out: &mut Figures, qwen: &Measured) {
    for run in paper::RUNS {
        let Some(total) = qwen.total(run.system) else { continue };
        let all = run.cpu_j + run.npu_j + run.memory_j;
        let watts = total.energy.total_j() / (total.wall_us * 1e-6);
        let used = run.system == COREML_CPU.name;
        let name = format!("Tables 6 and 7, {}, power", run.system);
        out.push(Figure { used, ..free(name, "W", Printed::Is(all / run.wall), watts) });
        for (name, what, s) in
            [("experts", What::Experts, run.experts), ("attention", What::Attention, run.attention)]
        {
            let found = total.parts.get(&what).copied().unwrap_or(0.0) / total.wall_us;
            let name = format!("Table 6, {}, {name}", run.system);
            out.push(free(name, "of 1", Printed::Is(s / run.wall), found));
        }
        let joules = [
            ("CPU", run.cpu_j, total.energy.cpu_j),
            ("ANE", run.npu_j, total.energy.npu_j),
            ("Comm.", run.memory_j, total.energy.memory_j),
        ];
        for (name, paper, found) in joules.into_iter().filter(|j| j.1 > 0.0) {
            let found = found / total.energy.total_j();
            // The Neural Engine's watts are from its joules in both systems.
            let used = used || name == "ANE";
            let name = format!("Table 7, {}, {name}", run.system);
            out.push(Figure { used, ..free(name, "of 1", Printed::Is(paper / all), found) });
        }
    }
}
