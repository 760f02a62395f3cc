//! The page of the documentation.

use super::activity::{EXPONENT, SPREAD, WHITE};
use super::dense::{CLUSTER, PAGED, POSITIONS};
use super::details::{ablation, chosen, decode, energy, in_memory, latency, memory, prefill, shares};
use super::models::{BAMBOO, LLAMA, MIXTRAL, PREDICTOR};
use super::phone::Phone;
use super::report::{Report, TAKEN_GB};
use super::systems::TOGETHER;
use crate::claim::{CLOSE, Claim, Claims};
use std::fmt::Write as _;

/// Largest distance of ours that is near.
const NEAR: f64 = 0.25;

/// The page.
pub fn page(claims: &Claims, phone: &Phone, report: &Report) -> String {
    let mut out = String::from(
        "# PowerInfer-2's evaluation, simulated\n\n\
         What `cargo xtask powerinfer2` computes, beside every figure that *PowerInfer-2* (sections 2 and 7) prints. It writes this page\n\
         and its plots; `cargo xtask powerinfer2 --check` fails where they are stale. Nothing here was measured on a phone.\n\n",
    );
    out.push_str(&summary(claims));
    out.push_str(&machine(phone));
    out.push_str(&fitted());
    out.push_str(&claims.table("simulated"));
    out.push_str(&decode(report));
    out.push_str(&prefill(report));
    out.push_str(&memory(report));
    out.push_str(&latency(claims, report));
    out.push_str(&in_memory(report));
    out.push_str(&shares(report));
    out.push_str(&chosen(report));
    out.push_str(&ablation(claims, report));
    out.push_str(&energy(report));
    out
}

fn summary(claims: &Claims) -> String {
    let free: Vec<&Claim> = claims.unfitted();
    let within = |most: f64| free.iter().filter(|c| c.paper.error(c.ours).abs() <= most).count();
    format!(
        "Of {} figures that were not used to fit a constant, {} come out within {:.0} % of the paper's, and {} within {:.0} %.\n\
         {} The misses are in the table, with reasons if known.\n\n",
        free.len(),
        within(CLOSE),
        CLOSE * 100.0,
        within(NEAR),
        NEAR * 100.0,
        claims.unchecked(),
    )
}

pub(super) fn machine(phone: &Phone) -> String {
    let mut out = String::from(
        "## What is simulated\n\n\
         Tokens of a sequence, one after the other, in virtual time. What stays in memory (a cache with a hot and a cold region), what is\n\
         computed next by which unit (the pipeline of neuron clusters), the layout and reads of bundles, and the number of hot neurons are decided\n\
         by the code of the runtime, `moec_runtime::offload::neurons`. Cores and the NPU share the rate of one memory; UFS is one queue, read\n\
         by one core. A token requests each neuron or not, see *Fitted constants*.\n\n\
         | constant | value | from |\n|---|---|---|\n",
    );
    let memory = phone.memory;
    let rows = [
        (
            "memory: cores, NPU, both",
            format!("{:.1}, {:.1}, {:.1} GB/s", memory.cpu * 1e-9, memory.npu * 1e-9, memory.both * 1e-9),
            "§2.3.1",
        ),
        (
            "UFS, one read after the other",
            "450 MB/s at 4 KB, 4 GB/s at 512 KB; between them a power".to_owned(),
            "§2.3.2",
        ),
        (
            "UFS, scattered within 128 MB",
            "1008 MB/s at 4 KB (a mid core), the same at 8 KB, 3.5 GB/s at 512 KB".to_owned(),
            "Table 1, §2.3.2; of 8 KB §4.4 says that two reads of 4 KB are better",
        ),
        (
            "UFS by range, core and number of cores",
            format!(
                "85 % from 512 MB on; big {:.2}, little {:.2}; several 60 %",
                phone.ufs.cores[0], phone.ufs.cores[1]
            ),
            "§2.3.2, Table 1: \"up to 40 %\" is taken as 40 %, for LLMFlash and llama.cpp, whose threads read what they compute",
        ),
        (
            "multiply-adds",
            format!(
                "NPU {:.1}, GPU {:.2}, cores {:.2} · 10¹² a second",
                phone.npu_macs * 1e-12,
                phone.gpu_macs * 1e-12,
                phone.cpu_macs * 1e-12
            ),
            "prefill of a 7B model: 770 and 37 tokens/s of §2.3.1; the cores' from 32× of §7.3 (8 of §2.3.1 would be less than they decode)",
        ),
        (
            "a core's part of the CPU",
            "its clock over that of one big and five mid cores; little ones read at most".to_owned(),
            "§2.3.1, §4.3",
        ),
        (
            "weights",
            "cores: 4 bits and a scale for 32; NPU: 4 bits; UFS: 7.5 KB a neuron in 8 KB".to_owned(),
            "§7.6, §4.4",
        ),
        ("a predictor", format!("{PREDICTOR:.0} bytes a neuron"), "2.6 GB of §7.2.3"),
        (
            "memory in use before neurons are cached",
            format!("{TAKEN_GB} GB"),
            "§7.2.3: 1 GB of other weights, 2.6 GB of predictors, 2.7 GB of scales, 0.3 GB of the runtime",
        ),
        ("a cluster", format!("{CLUSTER} neurons"), "§4.1.2"),
        ("positions of a sequence", format!("{POSITIONS}"), "§7.1: up to 64 and half of 1024"),
        (
            "gates that turn out to be active",
            "80 %".to_owned(),
            "§4.4; up and down of the others are neither read nor computed",
        ),
        (
            "OnePlus Ace 2",
            "memory ⅔, NPU ⅔; UFS at most 2.1 GB/s; cores 1 × 3.2 and 3 × 2.75 GHz".to_owned(),
            "assumed, from the rates of LPDDR5-6400 and LPDDR5X-9600 and of UFS 3.1: the paper prints how much memory it has, and no rate",
        ),
        (
            "the GPU's memory",
            "half of the NPU's rate".to_owned(),
            "assumed, from \"50 % of GPU kernel time\" of §2.3.1",
        ),
        (
            "llama.cpp on UFS",
            "reads ahead 128 KiB; a dense model's weights have gone before they are used again".to_owned(),
            "Linux's default; what LRU does to a circle",
        ),
    ];
    for (what, value, from) in rows {
        let _ = writeln!(out, "| {what} | {value} | {from} |");
    }
    out.push_str(
        "\nSystems: *PowerInfer-2*, with the hot share that the planner chooses from a trace, and attention and the head on one unit each;\n\
         *LLMFlash*, a cache of neurons, bundles of several neurons, nothing overlaps; *llama.cpp*, all weights, mapped; *QNN*, all weights on the NPU; *MLC-LLM*, all weights on the\n\
         GPU. How a system works where the paper leaves it open was chosen with its figures at hand in three places: *Baseline* and\n\
         *+Bundle* keep nothing from token to token, threads of LLMFlash and llama.cpp get in each other's way at UFS, and the Ace 2's UFS.\n\
         Table 7 is of accuracy, which no simulation gives: [qnn-networks.md](qnn-networks.md#accuracy) has it in kind, measured.\n\n",
    );
    out
}

pub(super) fn fitted() -> String {
    let mut out = String::from(
        "## Fitted constants\n\nNo device file and no section gives these. Each was fitted only to the named figures.\n\n\
         | constant | value | found from |\n|---|---|---|\n",
    );
    let rows = [
        (
            "exponent of how often neurons are requested, by rank",
            format!("{EXPONENT}"),
            format!("under 1 % and 75 % of Figure 2, where white is a neuron requested {:.1} % of the time", WHITE * 100.0),
        ),
        (
            "neurons that a token requests",
            format!(
                "{:.1} % of Bamboo-7B's and Qwen2-7B's, {:.1} % of Llama-13B's, {:.1} % of Mixtral-47B's routed experts', 50 % of Mistral-7B's",
                BAMBOO.active * 100.0,
                LLAMA.active * 100.0,
                MIXTRAL.active * 100.0
            ),
            "about 3B, nearly 6B, about 3B activated parameters (§7.2.1); CATS (§7.2.5); of Qwen2-7B nothing is printed".to_owned(),
        ),
        (
            "neurons that are drawn anew at a token, the others keep their state",
            format!("{:.1} % on average, {:.1} % of Mixtral-47B's", BAMBOO.novelty * 100.0, MIXTRAL.novelty * 100.0),
            "95 % of hits (§7.5), 3.5 % of misses (§7.2.4)".to_owned(),
        ),
        (
            "deviation of that number's logarithm, over tokens",
            format!("{SPREAD}"),
            "18.9 % of misses at the 99th percentile (§7.2.4)".to_owned(),
        ),
        (
            "how much slower units compute beside a cache of neurons",
            format!("{PAGED}"),
            "404.6 tokens/s of prefill (§7.3); used for decoding and for all systems, too. The paper does not say why".to_owned(),
        ),
        ("neurons in a bundle of LLMFlash's", format!("{TOGETHER}"), "76.7 % of Table 4".to_owned()),
        (
            "power of cores, NPU, both",
            "4.065, 5.133, 5.095 W".to_owned(),
            "Table 8's peaks; its joules are not used".to_owned(),
        ),
    ];
    for (what, value, from) in rows {
        let _ = writeln!(out, "| {what} | {value} | {from} |");
    }
    out.push('\n');
    out
}
