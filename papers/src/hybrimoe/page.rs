//! The page of the documentation.

use super::machine::{A6000, COLD, GPU_BYTES, GPU_FLOPS, PROMPT, WEIGHT};
use super::models::MODELS;
use super::report::{Report, Row};
use super::routing::GATE_ACCURACY;
use super::systems::{ABLATION, BASELINE, MRS, SYSTEMS};
use crate::claim::{CLOSE, Claim, Claims, digits};
use std::fmt::Write as _;

/// The page.
pub fn page(claims: &Claims, report: &Report) -> String {
    [
        summary(claims, report),
        machine(),
        claims.table("HybriMoE, simulated"),
        prefill(report),
        decode(report),
        ablation(report),
        hits(report),
        hangs_on(report),
    ]
    .concat()
}

fn summary(claims: &Claims, report: &Report) -> String {
    let free: Vec<&Claim> = claims.unfitted();
    let agree = free.iter().filter(|c| c.agrees()).count();
    let [prefill, decode] = report.speedups(BASELINE + 1);
    let late = report.gate_accuracy.first().map_or(0.0, |f| f.1[1]);
    format!(
        "# HybriMoE's evaluation, simulated\n\n\
         What `cargo xtask hybrimoe` computes, beside the figures that *HybriMoE* (section VI) prints. It writes this page and its plots;\n\
         `cargo xtask hybrimoe --check` fails where they are stale.\n\n\
         Of {} figures that were not used to fit a constant, {agree} come out within {:.0} % of the paper's. {}\n\
         The main ones are the mean speedups over\n\
         KTransformers: 1.33 in prefill is {prefill:.2} here, 1.70 in decoding is {decode:.2}. What is larger here is what prefetching gains in\n\
         decoding; with gates that predict nothing, All is {late:.2} times as fast as the baseline, with those assumed here {:.2}, and the\n\
         paper's 1.86 lies between.\n\n",
        free.len(),
        CLOSE * 100.0,
        claims.unchecked(),
        report.ablation(1)[4],
    )
}

fn machine() -> String {
    let mut out = String::from(
        "## What is simulated\n\n\
         Layers on three timelines, GPU, CPU and link, in virtual time. The policies are those of `moec_runtime::schedule` and\n\
         `moec_runtime::offload::cache`, which a running plan would use. A layer takes its dense part; then its router has chosen, and its experts are\n\
         divided. When the link is idle before the next layer, experts of the next three are transferred into a buffer, by what they gain in\n\
         the simulated layer; then, in decoding, what the CPU computed and the cache would keep. A prompt is one pass over all layers\n\
         with the popular experts on the GPU.\n\n\
         The machine is that of §VI-A: an RTX A6000 and ten cores of a Xeon Gold 5220R. The paper prints none of its rates. Four constants are\n\
         found from four of its times, those of KTransformers and of the schedule added to it (Table III); nothing else is fitted to a speedup.\n\n\
         | constant | value | from |\n|---|---|---|\n",
    );
    let giga = |x: f64| x * 1e-9;
    let rows = [
        ("the link", format!("{:.2} GB/s", giga(A6000.link)), "found: 1.47 s of KTransformers in prefill, which transfers what the GPU lacks (Table I: its CPU computes in decoding only)".to_owned()),
        ("the CPU, an expert with one token", format!("{:.1} GB/s of weights", giga(A6000.cpu)), "found: the schedule's 1.46 in decoding".to_owned()),
        ("the CPU, each further token", format!("{:.1} GFLOPS", giga(A6000.cpu_flops)), "found: the schedule's 1.26 in prefill".to_owned()),
        ("a layer beside its routed experts", format!("{:.2} ms for 10⁹ dense weights", A6000.dense * 1e12), "found: 0.21 s of KTransformers in decoding; as a part of it for each weight of attention and shared experts".to_owned()),
        ("the CPU's first expert of a layer", format!("{:.0} % more than one token takes", COLD * 100.0), "Figure 3(e) without a number; assumed".to_owned()),
        ("the GPU", format!("{:.0} GB/s, {:.0} TFLOPS, 20 µs for each expert", giga(GPU_BYTES), GPU_FLOPS * 1e-12), "NVIDIA RTX A6000 data sheet; half of the peak without sparsity and the 20 µs are assumed".to_owned()),
        ("a weight", format!("{:.1} bits", WEIGHT * 8.0), "§V: 4 bits; a scale for 32".to_owned()),
        ("the prompt of Table III", format!("{PROMPT} tokens"), "not said; that of Figure 3(d)".to_owned()),
        ("how often gates are right", format!("{}, {} and {} for one, two and three layers ahead", GATE_ACCURACY[0], GATE_ACCURACY[1], GATE_ACCURACY[2]), "not said; assumed".to_owned()),
        ("α of MRS", MRS.split_whitespace().nth(1).unwrap_or_default().trim_start_matches("alpha=").to_owned(), "not said; of 0.1 to 0.98 the one with most hits".to_owned()),
        ("how far choices repeat", MODELS.map(|m| format!("{} {}", m.persistence, m.name)).join(", "), "found: LRU's hit rates with a quarter cached, Figure 9; the correlation of a token's draws with those of the one before".to_owned()),
    ];
    for (what, value, from) in rows {
        let _ = writeln!(out, "| {what} | {value} | {from} |");
    }
    out.push_str(
        "\nRouting of these models has not been published token by token. It is drawn: with the popularity that was recorded of OLMoE\n\
         (`golden/traces`), 64 experts as they are, Mixtral's eight as eight neighbours each. What is placed for good is chosen by web text (`c4`),\n\
         what runs is chat (`tulu`). Models stand by their shapes on Hugging Face. Table II gives Qwen2's routed experts an inner width of 18944,\n\
         `intermediate_size`, which no layer uses; with it the model would have 365 billion weights, with `moe_intermediate_size`, 2560, it has its 57.\n\n\
         Systems: *llama.cpp* has whole layers on the GPU and computes the others' experts on the CPU; *AdapMoE* transfers what the GPU lacks,\n\
         with LRU and one layer ahead; *Fiddler* computes each expert where it is done sooner by itself; *KTransformers* keeps popular experts on the\n\
         GPU, and gives the others to the CPU in decoding and to the GPU in prefill; *HybriMoE* is the paper's; *moec* takes the best of all cuts by\n\
         load, mended and searched on, in place of the paper's simulation, and MRS with bypass.\n\n",
    );
    out
}

/// Rows of times, with the speedups of the last two over the baseline.
fn times(rows: &[Row], scale: f64) -> String {
    let mut out = String::from("| model | cached | tokens |");
    for s in &SYSTEMS {
        let _ = write!(out, " {} |", s.name);
    }
    out.push_str(" HybriMoE over KTransformers | moec |\n|---|---|---|---|---|---|---|---|---|---|---|\n");
    for r in rows {
        let _ = write!(out, "| {} | {:.0} % | {} |", r.model, r.cached * 100.0, r.tokens);
        for o in &r.outcomes {
            let _ = write!(out, " {} |", digits(o.seconds * scale));
        }
        let over = |s: usize| digits(r.outcomes[BASELINE].seconds / r.outcomes[s].seconds);
        let _ = writeln!(out, " {} | {} |", over(BASELINE + 1), over(BASELINE + 2));
    }
    out + "\n"
}

fn prefill(report: &Report) -> String {
    format!(
        "## Prefill (Figure 7)\n\n![Speedup over KTransformers in prefill](hybrimoe/prefill.svg)\n\nSeconds to the first token.\n\n{}\
         The CPU helps with short prompts: with 32 tokens an expert has four, with 1024 it has a hundred, which it computes more slowly than\n\
         the link carries the weights. The paper prints no numbers of Figure 7 but the mean.\n\n",
        times(&report.prefill, 1.0)
    )
}

fn decode(report: &Report) -> String {
    format!(
        "## Decoding (Figure 8)\n\n![Speedup over KTransformers in decoding](hybrimoe/decode.svg)\n\nMilliseconds of a token.\n\n{}",
        times(&report.decode, 1e3)
    )
}

fn ablation(report: &Report) -> String {
    let mut out = String::from(
        "## What is added (Table III)\n\n![Speedup over the baseline by what is added](hybrimoe/ablation.svg)\n\n\
         Qwen2, a quarter of the experts cached; seconds, and the speedup over the baseline.\n\n| | prefill | | decoding | |\n|---|---|---|---|---|\n",
    );
    for (row, system) in ABLATION.iter().enumerate() {
        let of =
            |of: usize| format!("{} | {:.2}", digits(report.ablation[of][row]), report.ablation(of)[row]);
        let _ = writeln!(out, "| {} | {} | {} |", system.name, of(0), of(1));
    }
    out + "\nA prompt is one pass: caching changes nothing in it.\n\n"
}

fn hits(report: &Report) -> String {
    let mut out = String::from(
        "## Hit rates (Figure 9)\n\n![Hits by policy](hybrimoe/hits.svg)\n\n\
         Every miss is loaded, as in Figure 9; layers share the slots. The bound is Belady's, which knows the future.\n\n\
         | model | cached | LRU | MRS | MRS with bypass | bound |\n|---|---|---|---|---|---|\n",
    );
    for h in &report.hits {
        let _ = write!(out, "| {} | {:.0} % |", MODELS[h.model].name, h.cached * 100.0);
        for rate in h.rates {
            let _ = write!(out, " {:.1} % |", rate * 100.0);
        }
        out.push('\n');
    }
    out + "\n"
}

fn hangs_on(report: &Report) -> String {
    let mut out = String::from(
        "## What the speedups depend on\n\n![Speedup by how often gates are right](hybrimoe/gate-accuracy.svg)\n\n\
         Decoding of Qwen2 with a quarter cached, over the baseline, by how often the gates of one to three layers before are right (times 0.8, 0.7\n\
         and 0.6). The paper has 1.15 and 1.86.\n\n| gates | Baseline+Prefetching | All |\n|---|---|---|\n",
    );
    for (part, [ahead, all]) in &report.gate_accuracy {
        let _ = writeln!(out, "| × {part} | {ahead:.2} | {all:.2} |");
    }
    out.push_str("\nMean speedups over KTransformers (the paper: 1.33 and 1.70), with one assumption changed:\n\n| | prefill | decoding |\n|---|---|---|\n");
    for (name, [prefill, decode]) in &report.variants {
        let _ = writeln!(out, "| {name} | {} | {} |", digits(*prefill), digits(*decode));
    }
    out.push_str(
        "\nTable I says that KTransformers' CPU computes in decoding alone, its text that it does when the cache misses. Only the first agrees\n\
         with both 1.47 s and 1.26: on a CPU that makes the schedule's gain so small, long prompts would take minutes, as llama.cpp's do here.\n",
    );
    out.push_str(
        "\n§IV-B fills \"the timeline with the earliest completion time\". Read as the one whose next task would end first it is within 3 % of the\n\
         optimum in each of 1000 random layers of up to eight experts, where a GPU's time hardly rises with tokens (Figure 3(f)); where it rises, up to\n\
         1.9 times as long. moec's cut, searched on, is the optimum in all of them. Read as the one that is free first, an idle CPU takes\n\
         experts that the GPU would be done with long before.\n\n",
    );
    out.truncate(out.trim_end().len());
    out + "\n"
}
