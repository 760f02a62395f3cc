//! The plots of the page: file names and contents.

use super::report::Report;
use super::systems::ABLATION;
use crate::chart::{COLOURS, Labels, Series, bars, curves};
use crate::claim::Claims;

/// Every plot: its file, and its text.
pub fn plots(claims: &Claims, report: &Report) -> Vec<(&'static str, String)> {
    vec![
        ("decode.svg", decode(report, "OnePlus 12")),
        ("decode-ace-2.svg", decode(report, "OnePlus Ace 2")),
        ("prefill.svg", prefill(report, "OnePlus 12")),
        ("prefill-ace-2.svg", prefill(report, "OnePlus Ace 2")),
        ("layer.svg", layer(report)),
        ("memory.svg", memory(claims, report)),
        ("tasks.svg", tasks(report)),
        ("in-memory.svg", in_memory(claims, report)),
        ("best-of.svg", best_of(report)),
        ("shares.svg", shares(claims, report)),
        ("ablation.svg", ablation(claims, report)),
    ]
}

fn series(name: &str, colour: usize, values: Vec<f64>) -> Series {
    Series { name: name.to_owned(), colour: COLOURS[colour], values }
}

fn labels(title: &str, up: &'static str, across: &'static str, groups: Vec<String>) -> Labels {
    Labels { title: title.to_owned(), up, across, groups, range: None }
}

fn decode(report: &Report, phone: &str) -> String {
    let rows: Vec<_> = report.decode.iter().filter(|d| d.phone == phone).collect();
    let groups = rows.iter().map(|r| format!("{}\n{:.0} % in memory", r.model, r.held * 100.0)).collect();
    let title = format!("Decode speed with weights on UFS, {phone}");
    bars(
        &labels(&title, "tokens/s", "model", groups),
        &[
            series("llama.cpp", 0, rows.iter().map(|r| r.llama).collect()),
            series("LLMFlash", 1, rows.iter().map(|r| r.llmflash.speed).collect()),
            series("PowerInfer-2", 4, rows.iter().map(|r| r.powerinfer2.speed).collect()),
        ],
    )
}

fn prefill(report: &Report, phone: &str) -> String {
    let rows: Vec<_> = report.prefill.iter().filter(|p| p.phone == phone).collect();
    let short =
        |name: &str| name.split('-').next().unwrap_or(name).split('(').next().unwrap_or(name).to_owned();
    let groups = rows.iter().map(|r| format!("{}\n{}", short(r.model), r.tokens)).collect();
    let title = format!("Prefill speed with weights on UFS, {phone}");
    let of = |s: usize| rows.iter().map(|r| r.speeds[s]).collect();
    bars(
        &labels(&title, "tokens/s", "model and tokens of the prompt", groups),
        &[
            series("llama.cpp", 0, of(2)),
            series("LLMFlash", 1, of(3)),
            series("QNN", 3, of(1)),
            series("PowerInfer-2", 4, of(0)),
        ],
    )
}

fn layer(report: &Report) -> String {
    let groups = report.layers.iter().map(|l| l.0.to_owned()).collect();
    bars(
        &labels(
            "A layer of a prompt of 512 tokens, half on UFS, OnePlus 12",
            "milliseconds",
            "model",
            groups,
        ),
        &[
            series("computing", 4, report.layers.iter().map(|l| l.1.compute * 1e3).collect()),
            series("reading", 1, report.layers.iter().map(|l| l.1.io * 1e3).collect()),
        ],
    )
}

fn memory(claims: &Claims, report: &Report) -> String {
    let groups = report.memory.iter().map(|m| m.gigabytes.to_string()).collect();
    // Between the two that are printed the paper says that speed grows with memory on a line.
    let line = |gb: f64| {
        let [low, high] = ["memory/7", "memory/19"].map(|of| claims.printed(of));
        low + (high - low) * (gb - 7.0) / (19.0 - 7.0)
    };
    curves(
        &labels("Mixtral-47B by memory, OnePlus 12", "tokens/s", "gigabytes", groups),
        &[
            series("the paper's PowerInfer-2", 3, report.memory.iter().map(|m| line(m.gigabytes)).collect()),
            series("PowerInfer-2", 4, report.memory.iter().map(|m| m.powerinfer2.speed).collect()),
            series("LLMFlash", 1, report.memory.iter().map(|m| m.llmflash.speed).collect()),
            series("llama.cpp", 0, report.memory.iter().map(|m| m.llama).collect()),
        ],
    )
}

fn tasks(report: &Report) -> String {
    let groups = (1..=report.tasks.len()).map(|t| t.to_string()).collect();
    let title = "Mixtral-47B with all available memory, four draws, OnePlus 12";
    bars(&labels(title, "tokens/s", "draw", groups), &[series("PowerInfer-2", 4, report.tasks.to_vec())])
}

fn in_memory(claims: &Claims, report: &Report) -> String {
    let names = ["PowerInfer-2", "llama.cpp", "MLC-LLM", "QNN"];
    let groups = names.iter().map(|n| (*n).to_owned()).collect();
    let ours = report.in_memory[0];
    let over = names[1..].iter().map(|n| 1.0 / claims.printed(&format!("in memory/{n}")));
    let printed = std::iter::once(1.0).chain(over);
    bars(
        &labels(
            "Bamboo-7B in memory, over PowerInfer-2, OnePlus 12",
            "part of its decode speed",
            "system",
            groups,
        ),
        &[
            series("the paper", 0, printed.collect()),
            series("simulated", 4, report.in_memory.iter().map(|x| x / ours).collect()),
        ],
    )
}

fn best_of(report: &Report) -> String {
    let groups = report.batches.iter().map(|b| b.sequences.to_string()).collect();
    let of = |s: usize| report.batches.iter().map(|b| b.speeds[s]).collect();
    curves(
        &labels(
            "Best of N, Bamboo-7B in memory, OnePlus 12",
            "tokens/s of all sequences",
            "sequences",
            groups,
        ),
        &[
            series("QNN", 3, of(3)),
            series("PowerInfer-2-CPUOnly", 1, of(2)),
            series("PowerInfer-2", 4, of(0)),
        ],
    )
}

fn shares(claims: &Claims, report: &Report) -> String {
    let groups = report.batches.iter().map(|b| b.sequences.to_string()).collect();
    let about = |b: usize| claims.find(&format!("hot/{b}")).map_or(0.0, |c| c.paper.value());
    let printed: Vec<f64> = report.batches.iter().map(|b| about(b.sequences)).collect();
    bars(
        &labels("Hot share by batch, Bamboo-7B in memory", "part of the neurons", "sequences", groups),
        &[
            series("the paper: about", 0, printed),
            series("planned", 4, report.batches.iter().map(|b| b.planned).collect()),
            series("best of all in simulation", 1, report.batches.iter().map(|b| b.searched).collect()),
        ],
    )
}

fn ablation(claims: &Claims, report: &Report) -> String {
    let steps = &report.ablation[..ABLATION.len()];
    let groups = steps.iter().map(|a| a.0.to_owned()).collect();
    bars(
        &labels("Bamboo-7B with half of its neurons on UFS, OnePlus 12", "tokens/s", "one more each", groups),
        &[
            series("the paper", 0, steps.iter().map(|a| claims.printed(&format!("step/{}", a.0))).collect()),
            series("simulated", 4, steps.iter().map(|a| a.1.speed).collect()),
        ],
    )
}
