//! The page of the documentation.

use super::details::{ablation, added, equations, moves, sensitivity, throughput, used};
use super::experiments::{Bench, CLOSEST_VARIANT, SYSTEMS};
use super::loads::DRIFT;
use super::machine::CONTEXT;
use super::models::MODELS;
use super::paper::ROBUST;
use super::report::{Report, strongest};
use crate::claim::{CLOSE, Claim, Claims, digits};
use std::fmt::Write as _;

/// The page.
pub fn page(claims: &Claims, bench: &Bench, report: &Report) -> String {
    let mut out = String::new();
    out.push_str(
        "# TriMoE's evaluation, simulated\n\n\
         What `cargo xtask trimoe` computes, beside every figure that *TriMoE* (sections 3 to 5) prints. It writes this page and its\n\
         plots; `cargo xtask trimoe --check` fails where they are stale.\n\n",
    );
    out.push_str(&summary(claims, report));
    out.push_str(&machine(bench));
    out.push_str(&claims.table("TriMoE, simulated"));
    out.push_str(&speeds(report));
    out.push_str(&variants(report));
    out.push_str(&small(claims, report));
    out.push_str(&drift(report));
    out.push_str(&throughput(claims, report));
    out.push_str(&ablation(report));
    out.push_str(&sensitivity(report));
    out.push_str(&used(report));
    out.push_str(&moves(bench, report));
    out.push_str(&equations(report));
    out.push_str(&added(report));
    out
}

fn summary(claims: &Claims, report: &Report) -> String {
    let free: Vec<&Claim> = claims.unfitted();
    let agree = free.iter().filter(|c| c.agrees()).count();
    let moec = free.iter().filter(|c| !c.agrees() && c.agrees_with_moec()).count();
    let models = |of: [[f64; 2]; 3], s: usize| of.map(|m| format!("{:.2}", m[s])).join(", ");
    let bare = report.variant(CLOSEST_VARIANT);
    format!(
        "Of {} figures that were not used to fit a constant, {agree} come out within {:.0} % of the paper's or its range with TriMoE's own\n\
         schedule, and {moec} more with moec's. {}\n\n\
         The main one is the decode speedup over the best baseline, 2.12 to 2.83. By model it is {} here with TriMoE's schedule and {}\n\
         with moec's, which fetches no experts: PCIe and the CPU share the host's memory, and TriMoE's equations add up each as if it\n\
         had it alone. Two assumptions that the paper does not state give its numbers with its own schedule, {}: loads that do not\n\
         drift, and a MoNDE whose GPU keeps no experts from step to step. *What the speedup depends on* has these and others one by one.\n\n",
        free.len(),
        CLOSE * 100.0,
        claims.unchecked(),
        models(report.speedup(), 0),
        models(report.speedup(), 1),
        models(bare, 0),
    )
}

fn machine(bench: &Bench) -> String {
    let r = &bench.rates;
    let first = &MODELS[0];
    let one = bench.ndp(first);
    let mut out = String::from("## What is simulated\n\n");
    let _ = writeln!(
        out,
        "Decode steps on the machine of Table 1, in virtual time (`moec_ndp::steps`): GPU, CPU, PCIe, 16 DIMMs with their near-data\n\
         units and links, 8 channels. The scheduler is the one that a running plan uses (`moec_runtime::schedule`). Units that read\n\
         the same memory at once share its rate. {} layers stand for all, {} steps are measured after {}.\n\n\
         | constant | value | from |\n|---|---|---|",
        bench.size.layers, bench.size.steps, bench.size.warmup
    );
    let rows = [
        (
            "an NDP unit reads its DIMM".to_owned(),
            format!("{:.1} GB/s", r.private_gbs),
            "the cycle-level model (docs/ndp-dram.md); 153.6 less refresh",
        ),
        (
            "the host reads a channel of striped experts, while units are busy".to_owned(),
            format!("{:.1} GB/s", r.striped_gbs),
            "the cycle-level model; 38.4 at best",
        ),
        (
            "the host reads one DIMM".to_owned(),
            format!("{:.1} GB/s", r.localized_gbs),
            "the cycle-level model",
        ),
        (
            "what a byte for the host costs a unit that is bound by memory".to_owned(),
            format!("{:.2} bytes striped, {:.2} localized", r.striped_weight, r.localized_weight),
            "the cycle-level model, the host first; equation 6 is read as 4",
        ),
        (
            format!("an expert of {} on an NDP unit", first.name),
            format!("{:.0} µs with 1 token, {:.0} with 8", one.at(1.0), one.at(8.0)),
            "its NDP command stream, timed (docs/ndp-isa.md)",
        ),
        (
            "an expert on the GPU".to_owned(),
            "30 % of 819.6 TFLOPS at 256 tokens; as long with fewer; at most 75 %".to_owned(),
            "Figure 5(a); the limit is assumed",
        ),
        (
            "an expert on the CPU".to_owned(),
            "10 TFLOPS with 16 tokens, 40 from 256 on".to_owned(),
            "§3.2: 10–40 TFLOPS for tens to hundreds of tokens",
        ),
        (
            "experts in the GPU's memory".to_owned(),
            "10 % of a layer's".to_owned(),
            "§2.2: more than 90 % are in the host's memory",
        ),
        (
            "positions of a sequence, on average".to_owned(),
            format!("{CONTEXT}"),
            "found from the 0.68 ms of §5.5, for Qwen3 at batch 512, with keys and values in the GPU's memory",
        ),
        (
            "loads".to_owned(),
            format!(
                "5 % hot with 22 % of the tokens, 25 % warm with 70 %, 70 % cold with 8 %; drift {DRIFT}"
            ),
            "§3.1; the drift is found from the accuracy of §4.3",
        ),
        (
            "rows".to_owned(),
            "a token's row in bf16 goes to the host once, and comes back once".to_owned(),
            "the paper does not count them",
        ),
    ];
    for (what, value, from) in rows {
        let _ = writeln!(out, "| {what} | {value} | {from} |");
    }
    out.push_str(
        "\nThe other loads are those of OLMoE by domain of text (`golden/traces`), resampled to the number of experts: the batch mixes\n\
         domains, and a sequence ends after 256 tokens on average.\n\n\
         Systems: *Klotski* computes all experts on the GPU and reads them over PCIe beside that; *En-KTransformers* computes on the\n\
         CPU what the GPU does not hold, or gives it the hottest others, whichever is faster; *MoNDE* shares experts between GPU and\n\
         NDP units; *TriMoE* is the paper's schedule (greedy assignment, refinement, relayout); *moec* is the same with a refinement that\n\
         leaves plateaus, and without fetches: the GPU computes what the profile put there, and reads no expert, neither ahead nor as it goes.\n\n",
    );
    out
}

fn speeds(report: &Report) -> String {
    let mut out = String::from(
        "## Decode speedup (Figure 6)\n\n![Decode speedup over Klotski, drawn loads](trimoe/speedup.svg)\n\n\
         ![Decode speedup over Klotski, loads of OLMoE](trimoe/speedup-olmoe.svg)\n\n\
         Milliseconds of the MoE layer, with rows to the host and back. The last two columns: speedup over the best baseline.\n\n\
         | model | batch | loads |",
    );
    for s in &SYSTEMS {
        let _ = write!(out, " {} |", s.name);
    }
    out.push_str(" best baseline | TriMoE | moec |\n|---|---|---|---|---|---|---|---|---|---|---|\n");
    for row in &report.speeds {
        let best = strongest(&row.us);
        let _ =
            write!(out, "| {} | {} | {} |", row.model, row.batch, if row.drawn { "drawn" } else { "OLMoE" });
        row.us.iter().for_each(|us| {
            let _ = write!(out, " {} |", digits(us * 1e-3));
        });
        let over = |s: usize| digits(row.us[best] / row.us[s]);
        let _ = writeln!(out, " {} | {} | {} |", SYSTEMS[best].name, over(3), over(4));
    }
    out.push_str(
        "\nOLMoE's routing is trained to be even: few of its experts are cold, so that the classes of §3.1 do not appear. TriMoE's scheme\n\
         depends on skew.\n\n",
    );
    out
}

fn variants(report: &Report) -> String {
    let mut out = String::from(
        "## What the speedup depends on\n\n\
         Speedup over the best baseline, mean over the batches 256, 512 and 768, TriMoE / moec. The paper reports 2.12 to 2.83. *The equations\n\
         alone*: times of all systems are what equations 1 to 7 add up, so that PCIe and the CPU do not share the channels of the\n\
         host's memory; moec's column there is its schedule without fetches, which the equations do not reward.\n\n| |",
    );
    for m in &MODELS {
        let _ = write!(out, " {} |", m.name);
    }
    out.push_str("\n|---|---|---|---|\n");
    for (name, of) in &report.variants {
        let _ = write!(out, "| {name} |");
        for [trimoe, moec] in of {
            let _ = write!(out, " {trimoe:.2} / {moec:.2} |");
        }
        out.push('\n');
    }
    out + "\n"
}

fn small(claims: &Claims, report: &Report) -> String {
    let mut out = String::from("The same for Qwen3 at the small batches of §5.5:\n\n| |");
    for batch in ROBUST {
        let paper = claims.printed(&format!("batch/{batch}"));
        let _ = write!(out, " {batch} (the paper: {paper}) |");
    }
    out.push_str("\n|---|---|---|---|\n");
    for (name, of) in &report.small {
        let _ = write!(out, "| {name} |");
        for [trimoe, moec] in of {
            let _ = write!(out, " {trimoe:.2} / {moec:.2} |");
        }
        out.push('\n');
    }
    out + "\n"
}

fn drift(report: &Report) -> String {
    let mut out = String::from(
        "## Drift, and the value of a predictor\n\n![Speedup by drift](trimoe/drift.svg)\n\n\
         Every step a share's logarithm keeps 0.9 of what it is off; experts take the shares of §3.1 in the order of these sums. *Classes*:\n\
         experts whose predicted class (hot, warm, cold) was that of their load. *Decisions*: of the decisions to move an expert, those whose\n\
         class was right. The paper has 78 % of \"migration decision accuracy\", and does not say of what.\n\n\
         | drift | classes | decisions | TriMoE over the best baseline | moec |\n|---|---|---|---|---|\n",
    );
    for d in &report.drifts {
        let [trimoe, moec] = d.speedup;
        let _ = writeln!(
            out,
            "| {} | {:.1} % | {:.1} % | {trimoe:.2} | {moec:.2} |",
            d.drift,
            d.accuracy * 100.0,
            d.precision * 100.0
        );
    }
    out + "\n"
}
