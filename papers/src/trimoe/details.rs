//! The sections of the page that follow the decode speedup.

use super::claims::{copies_gbs, links_gbs, prefetch_ms, relayouts_ms};
use super::experiments::{ABLATION, Bench, SYSTEMS};
use super::models::{MODELS, QWEN};
use super::report::{OUTPUTS, PROMPT, Report, kv_gb};
use crate::claim::{Claims, digits};
use std::fmt::Write as _;

/// The scheduler's own time of a layer of Qwen3 with 16 DIMMs: tokens of a step, microseconds of a dispatch
/// with the search that leaves plateaus, and of the moves after it; on one core of an Intel Xeon with
/// AMX, at 3.5 GHz. `cargo run --release -p moec-sim --example schedule_rate` measures such times.
const SCHEDULER_US: [(usize, f64, f64); 4] =
    [(32, 6.0, 27.2), (128, 7.1, 28.3), (512, 32.2, 30.5), (1024, 60.7, 36.7)];

pub(super) fn throughput(claims: &Claims, report: &Report) -> String {
    let mut out = format!(
        "## End to end (Figure 7)\n\n\
         Batch 512, prompts of {PROMPT} tokens, throughput over the best baseline, TriMoE / moec. *Zigzag*: attention of one half of the batch\n\
         runs in parallel to the experts of the other. *Over PCIe*: keys and values are in the host's memory, as §4.1 says; they are\n",
    );
    let sizes: Vec<String> =
        MODELS.iter().map(|m| format!("{} GB a layer for {}", digits(kv_gb(m)), m.name)).collect();
    out.push_str(&sizes.join(", "));
    out.push_str(
        ",\nand PCIe needs longer for them than TriMoE for its experts. The paper's throughput is 98 % of its decode speedup: everything but\n\
         experts then takes no more than some 3 % of their time, which neither 0.68 ms of attention nor keys and values over PCIe leave.\n\n\
         | model | tokens | paper | one after the other | zigzag | over PCIe |\n|---|---|---|---|---|---|\n",
    );
    for (m, of) in MODELS.iter().zip(&report.throughput) {
        let paper = claims.printed(&format!("end to end/{}", m.name));
        for (tokens, e) in OUTPUTS.iter().zip(of) {
            let two = |[a, b]: [f64; 2]| format!("{a:.2} / {b:.2}");
            let _ = writeln!(
                out,
                "| {} | {tokens} | {paper} | {} | {} | {} |",
                m.name,
                two(e.plain),
                two(e.zigzag),
                two(e.kv_on_host)
            );
        }
    }
    out + "\n"
}

pub(super) fn ablation(report: &Report) -> String {
    let mut out = String::from(
        "## Ablation (Figure 8)\n\n![What each component adds](trimoe/ablation.svg)\n\n\
         Milliseconds of the MoE layer at batch 512, from GPU and NDP units (MoNDE) on. The last three are moec's, on top of +Relayout.\n\n\
         | model |",
    );
    for s in &ABLATION {
        let _ = write!(out, " {} |", s.name);
    }
    out.push_str("\n|---|---|---|---|---|---|---|---|\n");
    for (m, times) in MODELS.iter().zip(&report.ablation) {
        let _ = write!(out, "| {} |", m.name);
        for us in times {
            let _ = write!(out, " {} |", digits(us * 1e-3));
        }
        out.push('\n');
    }
    out + "\n"
}

pub(super) fn sensitivity(_: &Report) -> String {
    "## Sensitivity (Figure 9)\n\n![Time by DIMMs](trimoe/dimms.svg)\n\n![Time by the CPU's rate](trimoe/cpu.svg)\n\n\
     With 16 or more DIMMs a step no longer waits for cold experts, as in the paper. A CPU of half the rate is enough for\n\
     TriMoE's schedule, which waits for memory; without fetches the CPU has that memory to itself, and the other half pays as well.\n\n"
        .to_owned()
}

pub(super) fn used(report: &Report) -> String {
    let mut out = String::from(
        "## Utilization (Table 3)\n\n\
         Parts of the time of the experts, mean of the models at batch 512. *GPU domain*: it calculates, or weights come to it. *Calculation*: what\n\
         the CPU would need if memory were infinitely fast.\n\n\
         | system | GPU | GPU domain | CPU | its calculation | NDP units | the busiest | PCIe | links |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for (system, s) in SYSTEMS.iter().zip(&report.used) {
        let _ = write!(out, "| {} |", system.name);
        for x in [s.gpu, s.gpu_domain, s.cpu, s.cpu_calc, s.ndp, s.ndp_most, s.pcie, s.link] {
            let _ = write!(out, " {:.1} % |", x * 100.0);
        }
        out.push('\n');
    }
    out + "\n"
}

pub(super) fn moves(bench: &Bench, report: &Report) -> String {
    let machine = bench.machine();
    let mut out = format!(
        "## Migration (§5.5)\n\n\
         One striped expert of Qwen3 that is localized keeps a link of 25 GB/s busy for {:.2} ms, four at once on DIMMs of their own {:.2} ms; a\n\
         prefetch over PCIe takes {:.2} ms. The 0.63 ms that the paper gives for up to four experts are thus one prefetch, or need links of\n\
         {:.0} GB/s. That does not matter: what is known of a layer's next step is known right after its last one, so that a move has all other\n\
         layers' time to arrive. Moves run after all other reads.\n\n\
         {} links carry {:.0} GB/s at once. A CPU that reads and writes each byte over its channels moves {:.0} GB/s.\n\n\
         | model | moves of a layer's step | waited for | overhead |\n|---|---|---|---|\n",
        relayouts_ms(&machine, 1),
        relayouts_ms(&machine, 4),
        prefetch_ms(),
        relayouts_ms(&machine, 4) / 0.63 * 25.0,
        machine.dimms,
        links_gbs(&machine),
        copies_gbs(&machine),
    );
    for (m, x) in MODELS.iter().zip(&report.migration) {
        let _ = writeln!(
            out,
            "| {} | {:.1} | {:.2} % | {:.2} % |",
            m.name,
            x.moves,
            x.stalled * 100.0,
            x.overhead * 100.0
        );
    }
    let models = |x: [f64; 3]| x.map(|x| format!("{x:.2}")).join(", ");
    let _ = writeln!(
        out,
        "\nWhat relayout adds to the refinement, by model: {} where experts are placed by their mean loads first, as the paper has it; {} where\n\
         nothing is known of them first.\n",
        models(report.relayout.profiled),
        models(report.relayout.unknown),
    );
    out
}

pub(super) fn equations(report: &Report) -> String {
    let mut out = String::from(
        "## The equations and the simulation\n\n\
         The makespan that the scheduler expects (equation 7) over the simulated one, less 1, at batch 512; in brackets the mean of its size.\n\n| model |",
    );
    for s in &SYSTEMS {
        let _ = write!(out, " {} |", s.name);
    }
    out.push_str("\n|---|---|---|---|---|---|\n");
    for (m, of) in MODELS.iter().zip(&report.errors) {
        let _ = write!(out, "| {} |", m.name);
        for (error, size) in of {
            let _ = write!(out, " {:+.1} % ({:.1} %) |", error * 100.0, size * 100.0);
        }
        out.push('\n');
    }
    out.push_str(
        "\nWhere the GPU fetches while the CPU computes, both read the same channels: eight of them give the CPU all it can use, so\n\
         that every byte over PCIe is one that it waits for. The equations count the time of each alone. Without fetches they are right within\n\
         some percent.\n\n",
    );
    out
}

pub(super) fn added(report: &Report) -> String {
    let over = |i: usize| {
        let product: f64 = report.ablation.iter().map(|a| a[3] / a[i]).product();
        product.powf(1.0 / report.ablation.len() as f64)
    };
    let mut out = format!(
        "## What moec adds\n\n\
         - *No fetches*: the GPU computes the experts that a profile put there, and the CPU keeps its bandwidth. {:.2} times TriMoE's MoE layer at batch 512.\n\
         - *A refinement that leaves plateaus*: {:.2} times on its own, {:.2} times with both.\n\
         - *A plan without a GPU*: attention and hot experts on the CPU, cold ones on the DIMMs.\n\
         - *Exact verification*: a DIMM's NDP command stream is executed, and its result is bit for bit that of an evaluator of its own\n\
           (docs/ndp-isa.md). Speed is not what that is for.\n\n\
         Milliseconds of the MoE layer without a GPU, batch 512:\n\n\
         | model | CPU alone | TriMoE | moec | moec over the CPU |\n|---|---|---|---|---|\n",
        over(5),
        over(4),
        over(6),
    );
    for (m, [alone, trimoe, moec]) in MODELS.iter().zip(report.no_gpu) {
        let [a, t, o] = [alone, trimoe, moec].map(|us| digits(us * 1e-3));
        let _ = writeln!(out, "| {} | {a} | {t} | {o} | {:.2} |", m.name, alone / moec);
    }
    out.push_str(
        "\nThe scheduler's own time of a layer of Qwen3, beside that layer's; measured on one core (`page.rs` says how). The paper allows\n\
         3.3 %, migration included:\n\n| batch | dispatch | moves | of the MoE layer |\n|---|---|---|---|\n",
    );
    for (batch, dispatch, moves) in SCHEDULER_US {
        let layer = report.speeds.iter().find(|s| s.drawn && s.model == QWEN.name && s.batch == batch);
        let part = layer.map_or(0.0, |l| (dispatch + moves) / l.us[4] * 100.0);
        let _ = writeln!(out, "| {batch} | {dispatch} µs | {moves} µs | {part:.2} % |");
    }
    out
}
