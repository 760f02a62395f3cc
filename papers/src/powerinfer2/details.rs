//! The sections of the page after the table: one for each figure.

use super::models::{BAMBOO, MIXTRAL, MODELS};
use super::report::{CHAT, LATENCIES, Report, SystemRun};
use crate::claim::{Claims, digits};
use std::fmt::Write as _;

fn ran(out: &mut String, name: &str, ran: &SystemRun) {
    let _ = write!(
        out,
        "| {name} | {} | {:.1} % | {:.1} % | {} | {:.1} % |",
        digits(ran.speed),
        ran.misses * 100.0,
        ran.misses_p99 * 100.0,
        digits(ran.megabytes),
        ran.io * 100.0
    );
}

pub(super) fn decode(report: &Report) -> String {
    let mut out = String::from(
        "## Decode speed (Figure 7, Tables 4 and 6)\n\n![Decode speed, OnePlus 12](powerinfer2/decode.svg)\n\n\
         ![Decode speed, OnePlus Ace 2](powerinfer2/decode-ace-2.svg)\n\n\
         *Misses*: neurons requested that were read, on average and for the worst token in 100. *I/O*: part of the time in which all units\n\
         wait for UFS.\n\n\
         | | tokens/s | misses | P99 | MB a token | I/O | hot |\n|---|---|---|---|---|---|---|\n",
    );
    for d in &report.decode {
        let name = |system| format!("{}, {}, {system}", d.phone, d.model);
        ran(&mut out, &name("PowerInfer-2"), &d.powerinfer2);
        let _ = writeln!(out, " {:.0} % |", d.powerinfer2.hot * 100.0);
        ran(&mut out, &name("LLMFlash"), &d.llmflash);
        let _ = writeln!(out, " |\n| {} | {} | | | | | |", name("llama.cpp"), digits(d.llama));
    }
    out.push_str("\nThe core that reads makes this difference (PowerInfer-2, Bamboo-7B; a little core leaves six to compute):\n\n");
    out.push_str("| | tokens/s | misses | P99 | MB a token | I/O |\n|---|---|---|---|---|---|\n");
    for (core, of) in &report.readers {
        ran(&mut out, &format!("{core:?}").to_lowercase(), of);
        out.push('\n');
    }
    out + "\n"
}

pub(super) fn prefill(report: &Report) -> String {
    let mut out = String::from(
        "## Prefill speed (Figures 8 and 9)\n\n![Prefill speed, OnePlus 12](powerinfer2/prefill.svg)\n\n\
         ![Prefill speed, OnePlus Ace 2](powerinfer2/prefill-ace-2.svg)\n\n\
         Tokens per second.\n\n| phone | model | prompt | PowerInfer-2 | QNN | llama.cpp | LLMFlash |\n|---|---|---|---|---|---|---|\n",
    );
    for p in &report.prefill {
        let [ours, qnn, llama, ufs] = p.speeds.map(digits);
        let _ =
            writeln!(out, "| {} | {} | {} | {ours} | {qnn} | {llama} | {ufs} |", p.phone, p.model, p.tokens);
    }
    out.push_str("\n![A layer](powerinfer2/layer.svg)\n\n");
    for (name, layer) in &report.layers {
        let _ = writeln!(
            out,
            "A layer of {name} computes {:.1} ms and reads {:.1} ms of them.\n",
            layer.compute * 1e3,
            layer.io * 1e3
        );
    }
    out
}

pub(super) fn memory(report: &Report) -> String {
    let mut out = String::from(
        "## By memory, and by task (Figures 10 and 11)\n\n![Mixtral-47B by memory](powerinfer2/memory.svg)\n\n\
         | GB | feed-forward weights in memory | PowerInfer-2 | misses | hot | LLMFlash | llama.cpp |\n|---|---|---|---|---|---|---|\n",
    );
    for m in &report.memory {
        let _ = writeln!(
            out,
            "| {} | {:.1} % | {} | {:.1} % | {:.0} % | {} | {} |",
            m.gigabytes,
            m.held * 100.0,
            digits(m.powerinfer2.speed),
            m.powerinfer2.misses * 100.0,
            m.powerinfer2.hot * 100.0,
            digits(m.llmflash.speed),
            digits(m.llama)
        );
    }
    out.push_str(
        "\nThe paper's speed grows with memory on a line; ours grows little once memory holds what tokens have requested lately. Two things\n\
         make hits: neurons that most tokens request, and tokens that request what the last one requested. Figure 2 leaves little of the first\n\
         (three quarters of the neurons have to be requested by one of 32 tokens, nearly always), so that the printed hits have to come from\n\
         the second, which takes less memory. A line would need more of the first.\n\n\
         ![Four draws](powerinfer2/tasks.svg)\n\nThe paper's four tasks differ in what they activate, and it does not say by how much: ours are four draws of one distribution.\n\n",
    );
    out
}

pub(super) fn latency(claims: &Claims, report: &Report) -> String {
    let mut out = String::from(
        "## Latencies (Table 5)\n\nMilliseconds, simulated / the paper's.\n\n| | mean | P50 | P90 | P99 |\n|---|---|---|---|---|\n",
    );
    for model in [&MIXTRAL, &BAMBOO] {
        let Some(row) = report.of("OnePlus 12", model) else { continue };
        let _ = write!(out, "| {} |", model.name);
        for (ours, which) in row.powerinfer2.latency.into_iter().zip(LATENCIES) {
            let paper = claims.printed(&format!("latency/{}/{which}", model.name));
            let _ = write!(out, " {ours:.1} / {paper} |");
        }
        out.push('\n');
    }
    out.push_str(
        "\nThe paper's own numbers leave a gap here: 18.9 % of misses of the 124 000 neurons that 3B activated parameters are would be 23 000\n\
         neurons, whose reads take 0.16 s at the 1.1 GB/s of Table 1; its P99 is 0.14 s, with everything else in it. At 7 GB, where nearly\n\
         all is read, the same factor of two is between ours and the printed speed. With fewer activated parameters Mixtral-47B does this:\n\n\
         | activated | 7 GB, tokens/s | half in memory | 19 GB | P99 with half in memory, ms |\n|---|---|---|---|---|\n",
    );
    for (parameters, [least, half, most]) in &report.sparser {
        let _ = writeln!(
            out,
            "| {parameters:.1}B | {} | {} | {} | {:.0} |",
            digits(least.speed),
            digits(half.speed),
            digits(most.speed),
            half.latency[3]
        );
    }
    let printed = ["memory/7", "decode/Mixtral-47B/PowerInfer-2", "memory/19", "latency/Mixtral-47B/P99"];
    let [low, half, high, latest] = printed.map(|of| claims.printed(of));
    let _ = writeln!(out, "| the paper, about 3B | {low} | {half} | {high} | {latest} |\n");
    out
}

pub(super) fn in_memory(report: &Report) -> String {
    let [ours, llama, mlc, qnn] = report.in_memory;
    let [prefill, half, cpu, gpu] = report.in_memory_prefill;
    let mut out = format!(
        "## In memory (Figures 12 and 13)\n\n![In memory](powerinfer2/in-memory.svg)\n\n\
         Bamboo-7B decodes {} tokens/s with PowerInfer-2, {} with llama.cpp, {} with MLC-LLM, {} with QNN. A prompt of 512 tokens takes\n\
         {} tokens/s with PowerInfer-2 ({} with half on UFS), {} with llama.cpp, {} with MLC-LLM.\n\n\
         ![Best of N](powerinfer2/best-of.svg)\n\n\
         | sequences | PowerInfer-2 | with the best share | PowerInfer-2-CPUOnly | QNN | over QNN | over CPUOnly |\n|---|---|---|---|---|---|---|\n",
        digits(ours),
        digits(llama),
        digits(mlc),
        digits(qnn),
        digits(prefill),
        digits(half),
        digits(cpu),
        digits(gpu)
    );
    for b in &report.batches {
        let [planned, best, cpu, qnn] = b.speeds;
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} |",
            b.sequences,
            digits(planned),
            digits(best),
            digits(cpu),
            digits(qnn),
            digits(planned / qnn),
            digits(planned / cpu)
        );
    }
    if let Some([ours, _, cpu, qnn]) = report.batches.last().map(|b| b.speeds) {
        let (cpu, qnn) = (ours / cpu, ours / qnn);
        let _ = writeln!(
            out,
            "\nOf four sequences §7.4 says that PowerInfer-2 is 1.84× as fast as QNN and 1.28× as CPUOnly, and then that QNN falls below\n\
             CPUOnly when one is left. Both can only be where the two numbers are exchanged: then ours, {} and {}, are {:+.0} and {:+.0} % off.\n",
            digits(qnn),
            digits(cpu),
            (qnn / 1.28 - 1.0) * 100.0,
            (cpu / 1.84 - 1.0) * 100.0
        );
    }
    out
}

pub(super) fn shares(report: &Report) -> String {
    let mut out = String::from(
        "## Hot shares\n\n![Hot shares](powerinfer2/shares.svg)\n\n\
         *Planned*: what the runtime's planner chooses from tables of the phone. *Best*: the best of all whole numbers of clusters, each\n\
         simulated.\n\n| sequences | planned | best | loses |\n|---|---|---|---|\n",
    );
    for b in &report.batches {
        let [planned, best, ..] = b.speeds;
        let _ = writeln!(
            out,
            "| {} | {:.0} % | {:.0} % | {:.1} % |",
            b.sequences,
            b.planned * 100.0,
            b.searched * 100.0,
            (1.0 - planned / best) * 100.0
        );
    }
    out.push_str(
        "\nThe paper has about 50 % with one sequence and about 70 % with several. Both units share one memory that either nearly fills alone, so\n\
         that a hot neuron costs its bytes whether or not it is active; what it saves is the predictor and the cores' multiply-adds.\n\n",
    );
    out
}

pub(super) fn chosen(report: &Report) -> String {
    let mut out = String::from(
        "With half of Bamboo-7B on UFS, one sequence:\n\n| who chooses | hot | tokens/s |\n|---|---|---|\n",
    );
    for (name, hot, speed) in &report.chosen {
        let _ = writeln!(out, "| {name} | {:.0} % | {} |", hot * 100.0, digits(*speed));
    }
    out.push_str(
        "\nWhat is read is what changes from token to token, and a cold region that is too small for what a token requests loses nearly all of it.\n\
         Frequencies show neither: the planner replays a trace, of other draws than those that are simulated. By sequences, with half on UFS:\n\n\
         | sequences | planned, all in memory | planned, half on UFS | the paper |\n|---|---|---|---|\n",
    );
    for b in &report.batches {
        let paper = match b.sequences {
            1 => "about 50 %",
            4 => "about 70 %",
            _ => "",
        };
        let (memory, ufs) = (b.planned * 100.0, b.planned_on_ufs * 100.0);
        let _ = writeln!(out, "| {} | {memory:.0} % | {ufs:.0} % | {paper} |", b.sequences);
    }
    out.push_str(
        "\nThree sequences request more than half of the neurons: with half on UFS every hot neuron that is not requested then takes the room\n\
         of one that has to be read. The paper's shares do not mention UFS.\n\n",
    );
    out
}

pub(super) fn ablation(claims: &Claims, report: &Report) -> String {
    let mut out = String::from(
        "## One optimization after the other (Figure 14)\n\n![Ablation](powerinfer2/ablation.svg)\n\n\
         | | the paper's tokens/s | tokens/s | misses | P99 | MB a token | I/O |\n|---|---|---|---|---|---|---|\n",
    );
    for (name, of) in &report.ablation {
        let printed = claims.find(&format!("step/{name}")).map_or_else(String::new, |c| c.paper.to_string());
        ran(&mut out, &format!("{name} | {printed}"), of);
        out.push('\n');
    }
    out.push_str(
        "\n*Baseline* reads the three rows of every neuron requested from their matrices, in all pages that they touch, and keeps nothing; *+Bundle*\n\
         reads the gate's half of the bundle and, of active ones, the other. In *+XPU*, as everywhere on this page, attention and the head are\n\
         on one unit each, the one that takes less time, as a bundle has them. The row after it divides them between both units, which\n\
         §4.1.2 does and no bundle. The last row, which the paper does not have, is *+Pipeline* with a barrier between matrices (Figure 6a).\n\
         The printed steps and speeds contradict each other: 1.1 · 2.82 is 3.1 and not 4.181, and\n\
         9.60 / 1.29 is 7.44. Between the two pipelines there is little: what reading takes here is less than what computing takes, and either\n\
         hides it.\n\n",
    );
    out
}

pub(super) fn energy(report: &Report) -> String {
    let [ours, qnn, llama] = report.energy.map(digits);
    let (prompt, answer) = CHAT;
    format!(
        "## Energy (Table 8)\n\n\
         {ours} J/token with PowerInfer-2, {qnn} with QNN, {llama} with llama.cpp: Table 8's peak power of the busy units, over prompts of {prompt}\n\
         and answers of {answer} tokens (the means of LMSYS-Chat-1M), everything in memory, for each token of the answer. Five models appear on\n\
         this page: {}.\n",
        MODELS.map(|m| m.name).join(", ")
    )
}
