//! The page of the documentation.

use super::machine::{OVERHEAD_US, TARGET};
use super::models::PERSISTENCE;
use super::paper::{TABLE_3, TABLE_4};
use super::report::{GATE_ACCURACY, Report, Row};
use super::systems::{FULL, MOBILE, MOEC, MOEC_FULL, SYSTEMS, at};
use crate::claim::{CLOSE, Claim, Claims, digits};
use std::fmt::Write as _;

/// The page.
pub fn page(claims: &Claims, report: &Report) -> String {
    [
        summary(claims, report),
        machine(report),
        claims.table("MoBiLE, simulated"),
        times(claims, report),
        thresholds(claims, report),
        sizes(report),
        with_cpu(report),
        accuracy(),
    ]
    .concat()
}

fn summary(claims: &Claims, report: &Report) -> String {
    let free: Vec<&Claim> = claims.unfitted();
    let agree = free.iter().filter(|c| c.agrees()).count();
    let [qwen, olmoe] = ["Qwen MoE", "OLMoE"].map(|m| report.mean(m, &MOBILE));
    format!(
        "# MoBiLE's evaluation, simulated\n\n\
         What `cargo xtask mobile` computes, beside the figures that *MoBiLE* prints. It writes this page and its plots;\n\
         `cargo xtask mobile --check` fails where they are stale. How a bundle decodes so is in the [guide](guide.md#fewer-experts-where-that-is-enough).\n\n\
         Of {} figures that were not used to fit a constant, {agree} come out within {:.0} % of the paper's. {}\n\
         The main ones are the average speedups: 1.72 for Qwen MoE is {qwen:.2} here, 1.60 for OLMoE is {olmoe:.2}.\n\n",
        free.len(),
        CLOSE * 100.0,
        claims.unchecked(),
    )
}

fn machine(report: &Report) -> String {
    let m = &report.machine;
    let mut out = format!(
        "## What is simulated\n\n\
         Layers on three timelines, GPU, CPU and link, in virtual time, by the schedulers and caches of `moec_runtime::schedule` and\n\
         `moec_runtime::offload::cache`. Experts are in the host's memory. A little pass takes the first half of a token's experts; where the token falls\n\
         back, a second pass takes all: those of the first pass are on the GPU, and the others are on their way from its beginning, since\n\
         the first pass's routers have named them (Algorithm 1). The paper's second pass takes the experts so named as they are, and so does it\n\
         here. Which tokens fall back is drawn, as often as the paper says.\n\n\
         The machine is the built-in target `{TARGET}`, an RTX 4080 beside a Core i5-12400 over PCI Express 4.0. The paper prints none of its rates\n\
         and no time, only ratios; one constant is found from one of them.\n\n\
         | constant | value | from |\n|---|---|---|\n"
    );
    let rows = [
        (
            "a layer beside reading its weights",
            format!("{OVERHEAD_US:.0} µs"),
            "found: 1.85, OLMoE with half of its experts (Table II)".to_owned(),
        ),
        (
            "the link",
            format!("{:.1} GB/s", m.link * 1e-3),
            format!("`{TARGET}`: what sixteen lanes of PCI Express 4.0 achieve"),
        ),
        (
            "the GPU",
            format!("{:.0} GB/s of weights", m.gpu * 1e-3),
            format!("`{TARGET}`: what is achieved of NVIDIA's data sheet"),
        ),
        (
            "the CPU",
            format!("{:.1} GB/s of weights", m.cpu * 1e-3),
            format!("`{TARGET}`: what two channels of DDR5 achieve; moec's rows alone use it"),
        ),
        ("a weight", "16 bits".to_owned(), "the checkpoints are in bf16; no other format is named".to_owned()),
        (
            "room on the GPU, if a cache keeps experts",
            "as many as a token uses".to_owned(),
            "assumed: \"slightly larger than the activated parameters\" (§II-B)".to_owned(),
        ),
        (
            "how far choices repeat",
            PERSISTENCE.to_string(),
            "that of models of as many experts in [HybriMoE's](hybrimoe.md) Figure 9; only caches depend on it".to_owned(),
        ),
    ];
    for (what, value, from) in rows {
        let _ = writeln!(out, "| {what} | {value} | {from} |");
    }
    out.push_str(
        "\nSystems: *offloading* fetches a layer's experts when its router has chosen; *Pre-gated MoE* predicts them one layer before; so does *AdapMoE*,\n\
         and keeps experts with LRU; *MoBiLE* is the paper's, *with gates* has those of Pre-gated MoE for its first pass; *moec* lets the CPU\n\
         compute what the GPU does not hold where that is sooner, with MRS, all experts or fewer first.\n\n",
    );
    out
}

fn times(claims: &Claims, report: &Report) -> String {
    let mut out = String::from(
        "## Speedups (Table II, Figure 5)\n\n![Speedup by model and task](mobile/tasks.svg)\n\n| model | task | fall back |",
    );
    for s in &SYSTEMS[1..] {
        let _ = write!(out, " {} |", s.name);
    }
    out.push_str(" of equation 1 |\n|---|---|---|");
    out.push_str(&"---|".repeat(SYSTEMS.len()));
    out.push('\n');
    for r in &report.tasks {
        let _ = write!(out, "| {} | {} | {:.0} % |", r.model, r.task, r.fallback * 100.0);
        for s in &SYSTEMS[1..] {
            let _ = write!(out, " {} |", digits(r.speedup(s)));
        }
        let _ = writeln!(out, " {} |", digits(equation_1(r)));
    }
    let checked: Vec<String> = report
        .checked
        .iter()
        .zip(&report.tasks)
        .map(|(ours, r)| (ours, claims.printed(&format!("{}/{}", r.model, r.task))))
        .map(|(ours, paper)| format!("{} ({})", digits(*ours), digits(paper)))
        .collect();
    let _ = write!(
        out,
        "\n*Of equation 1*: `T / (T_l + r T_b)` with the times of MoBiLE's passes as they came out. Where the second pass uses its own routers, as\n\
         moec's does to be exact, and {:.0} % of what it requests was named, MoBiLE's four rows are {} (in brackets the paper's).\n\n",
        GATE_ACCURACY * 100.0,
        checked.join(", "),
    );
    out
}

/// The speedup by equation 1, from the times of MoBiLE's passes.
pub(super) fn equation_1(row: &Row) -> f64 {
    let (full, mobile) = (row.outcomes[at(&FULL)].token, row.outcomes[at(&MOBILE)]);
    full / (mobile.first + mobile.fallback * mobile.again)
}

fn thresholds(claims: &Claims, report: &Report) -> String {
    let mut out = String::from(
        "## By threshold (Table III)\n\n![Speedup by share of tokens that fall back](mobile/fallback.svg)\n\n\
         | γ | fall back | the paper | MoBiLE, simulated | moec, big-little |\n|---|---|---|---|---|\n",
    );
    for (row, (gamma, ratio)) in report.thresholds.iter().zip(TABLE_3) {
        let of = if gamma == 0.0 { "half/OLMoE".to_owned() } else { format!("γ/{gamma}") };
        let printed = claims.printed(&of);
        let _ = writeln!(
            out,
            "| {gamma} | {:.0} % | {printed} | {} | {} |",
            ratio * 100.0,
            digits(row.speedup(&MOBILE)),
            digits(row.speedup(&MOEC))
        );
    }
    out + "\n"
}

fn sizes(report: &Report) -> String {
    let mut out = String::from(
        "## By experts of the little model (Table IV)\n\nThe paper prints accuracy and fallback ratios, and reports little speedup with six of eight experts.\n\n\
         | experts | fall back | speedup, simulated |\n|---|---|---|\n",
    );
    for ((experts, ratio), speedup) in TABLE_4.iter().zip(&report.sizes) {
        let _ = writeln!(out, "| {experts} of 8 | {:.0} % | {} |", ratio * 100.0, digits(*speedup));
    }
    out + "\n"
}

fn with_cpu(report: &Report) -> String {
    let of = |system| report.over(system, &FULL);
    format!(
        "## With the CPU\n\n\
         The paper's CPU computes nothing. On this machine it reads weights from memory {:.1} times as fast as the link carries them, so that\n\
         most experts that the GPU lacks are computed sooner on the CPU: all experts, scheduled so, are {} times as fast as offloading, on the average of\n\
         the rows above, and with fewer experts first {} times. Fewer experts still gain {} then.\n\n",
        report.machine.cpu / report.machine.link,
        digits(of(&MOEC_FULL)),
        digits(of(&MOEC)),
        digits(report.over(&MOEC, &MOEC_FULL)),
    )
}

fn accuracy() -> String {
    "## Accuracy\n\n\
     Tables II to IV print accuracy on GSM8K and Humaneval. It is a property of trained models that are not available here, so it is not\n\
     computed. `moec eval --big-little --gamma 0,0.7,1` measures a bundle's own: of golden/models/ferris, perplexity, answers, fallback ratios and speed by γ are\n\
     [in the benchmarks](benchmarks.md#big-little-decoding).\n"
        .to_owned()
}
