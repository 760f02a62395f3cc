//! The quantities that `claims/powerinfer2.toml` names.

use super::activity::{WHITE, popularity};
use super::dense::{LONG, POSITIONS};
use super::models::{BAMBOO, CHANNEL, GROUPED, LLAMA, MISTRAL, MIXTRAL};
use super::phone::{Cluster, Phone};
use super::report::{BATCHES, Decode, LATENCIES, PROMPTS, Report, fits};
use super::systems::ABLATION;
use crate::claim::{Claims, Quantities};
use moec_base::Result;

/// Every figure of the paper's evaluation, and ours.
///
/// # Errors
/// Our bug: claims with an unknown quantity.
pub fn claims(phone: &Phone, report: &Report) -> Result<Claims> {
    let mut all = Quantities::default();
    workload(&mut all, phone, report);
    decode(&mut all, report);
    prefill(&mut all, report);
    in_memory(&mut all, report);
    ablation(&mut all, report);
    Claims::new(include_str!("../../claims/powerinfer2.toml"), &all)
}

/// Assumptions of the runs.
fn workload(all: &mut Quantities, phone: &Phone, report: &Report) {
    let of = popularity(BAMBOO.active, BAMBOO.inner);
    for batch in [1, 32] {
        let white = of.iter().filter(|&&p| 1.0 - (1.0 - p).powi(batch) > WHITE).count() as f64;
        all.put(format!("active/{batch}"), white / of.len() as f64);
    }
    all.put("active/128", 100.0 * report.active_128);
    let ufs = &phone.ufs;
    let random = ufs.random_seconds(4096, 128e6, Cluster::Big);
    all.put("sequential", ufs.sequential.rate(LONG) * random / 4096.0);
    all.put("cached", fits(&MIXTRAL, 7.0));
    all.put("scales", MIXTRAL.feed_forward() * (GROUPED - CHANNEL) * 1e-9);
    let others = MIXTRAL.weights() - MIXTRAL.feed_forward() + MIXTRAL.head();
    let kv = MIXTRAL.kv_bytes(POSITIONS) * MIXTRAL.layers as f64;
    all.put("others", (others * GROUPED + kv) * 1e-9);
    let saved = 0.5 * BAMBOO.feed_forward();
    all.put("saved", saved * GROUPED * 1e-9);
    all.put("saved/share", saved / (BAMBOO.weights() + BAMBOO.head()));
    all.put("feed-forward/Mistral", MISTRAL.feed_forward() / (MISTRAL.weights() + MISTRAL.head()));
    for (unit, macs) in [("NPU", phone.npu_macs), ("GPU", phone.gpu_macs), ("CPU", phone.cpu_macs)] {
        all.put(format!("7B/{unit}"), macs / MISTRAL.weights());
    }
    all.put("activated/Mixtral-47B", MIXTRAL.activated() * 1e-9);
    all.put("activated/Llama-13B", LLAMA.activated() / BAMBOO.activated());
}

/// Figures 7, 10 and 11, Tables 2 and 4 to 6.
fn decode(all: &mut Quantities, report: &Report) {
    let ufs = |d: &Decode| d.powerinfer2.speed / d.llmflash.speed;
    let llama = |d: &Decode| d.powerinfer2.speed / d.llama;
    for phone in ["OnePlus 12", "OnePlus Ace 2"] {
        for (system, over) in [("LLMFlash", &ufs as &dyn Fn(&Decode) -> f64), ("llama.cpp", &llama)] {
            let each: Vec<f64> = report.decode.iter().filter(|d| d.phone == phone).map(over).collect();
            all.put(format!("{phone}/{system}/mean"), each.iter().sum::<f64>() / each.len().max(1) as f64);
            all.put(format!("{phone}/{system}/most"), most(each));
        }
    }
    let rows = [&BAMBOO, &MISTRAL, &MIXTRAL, &LLAMA].map(|m| report.of("OnePlus 12", m));
    for row in rows.into_iter().flatten() {
        all.put(format!("hits/{}", row.model), 1.0 - row.powerinfer2.misses);
        all.put(format!("misses/{}", row.model), row.powerinfer2.misses);
        all.put(format!("misses/{}/P99", row.model), row.powerinfer2.misses_p99);
        all.put(format!("decode/{}/PowerInfer-2", row.model), row.powerinfer2.speed);
        all.put(format!("decode/{}/LLMFlash", row.model), row.llmflash.speed);
        all.put(format!("decode/{}/speedup", row.model), ufs(row));
        for (which, ms) in LATENCIES.into_iter().zip(row.powerinfer2.latency) {
            all.put(format!("latency/{}/{which}", row.model), ms);
        }
    }
    if let [_, Some(mistral), Some(mixtral), _] = rows {
        all.put("loses/LLMFlash", 1.0 - mistral.llmflash.speed / report.mistral_in_memory);
        all.put("io/LLMFlash/Mistral", mistral.llmflash.io);
        all.put("cpu/LLMFlash/Mistral", 1.0 - mistral.llmflash.io);
        let [mean, _, p90, p99] = mixtral.powerinfer2.latency;
        all.put("latency/P90", p90 / mean);
        all.put("latency/P99", p99 / mean);
    }
    if let [Some(bamboo), _, _, Some(llama)] = rows {
        all.put("LLMFlash over llama.cpp", bamboo.llmflash.speed / bamboo.llama);
        all.put("misses/LLMFlash", bamboo.llmflash.misses);
        all.put("Bamboo-7B over Llama-13B", bamboo.powerinfer2.speed / llama.powerinfer2.speed);
        all.put("io/PowerInfer-2", bamboo.powerinfer2.io);
        all.put("io/LLMFlash", bamboo.llmflash.io);
    }
    all.put("decode/Mistral in memory", report.mistral_in_memory);
    for m in &report.memory {
        let of = format!("memory/{}", m.gigabytes);
        all.put(format!("{of}/LLMFlash"), m.powerinfer2.speed / m.llmflash.speed);
        all.put(format!("{of}/llama.cpp"), m.powerinfer2.speed / m.llama);
        all.put(of, m.powerinfer2.speed);
    }
    all.put("tasks", report.tasks.into_iter().fold(f64::INFINITY, f64::min));
}

/// Figures 8 and 9.
fn prefill(all: &mut Quantities, report: &Report) {
    for phone in ["OnePlus 12", "OnePlus Ace 2"] {
        for tokens in PROMPTS {
            for (system, of) in [("QNN", 1), ("llama.cpp", 2), ("LLMFlash", 3)] {
                let rows = report.prefill.iter().filter(|p| p.phone == phone && p.tokens == tokens);
                let over = most(rows.map(|p| p.speeds[0] / p.speeds[of]));
                all.put(format!("prefill/{phone}/{tokens}/{system}"), over);
            }
        }
    }
    for (name, layer) in report.layers {
        all.put(format!("layer/{name}"), layer.io / layer.compute);
    }
}

/// Figures 12 and 13, hot shares, and Table 8.
fn in_memory(all: &mut Quantities, report: &Report) {
    let [prefill, half, cpu, _] = report.in_memory_prefill;
    all.put("in memory/prefill", prefill);
    all.put("in memory/prefill/llama.cpp", prefill / cpu);
    all.put("in memory/prefill/half", half);
    let [ours, others @ ..] = report.in_memory;
    for (name, other) in ["llama.cpp", "MLC-LLM", "QNN"].into_iter().zip(others) {
        all.put(format!("in memory/{name}"), ours / other);
    }
    for (batch, b) in BATCHES.iter().zip(&report.batches) {
        let [ours, _, cpu, qnn] = b.speeds;
        all.put(format!("batch/{batch}/QNN"), ours / qnn);
        all.put(format!("batch/{batch}/CPUOnly"), ours / cpu);
        all.put(format!("hot/{batch}"), b.planned);
    }
    let between = report.batches.iter().filter(|b| [2, 3].contains(&b.sequences));
    let over: Vec<f64> = between.map(|b| b.speeds[0] / b.speeds[2].max(b.speeds[3])).collect();
    all.put("batch/between", over.iter().sum::<f64>() / over.len().max(1) as f64);
    let ours = report.energy[0];
    for (name, joules) in ["PowerInfer-2", "QNN", "llama.cpp"].into_iter().zip(report.energy) {
        all.put(format!("energy/{name}"), joules);
        all.put(format!("saves/{name}"), 1.0 - ours / joules);
    }
}

/// Figure 14.
fn ablation(all: &mut Quantities, report: &Report) {
    let mut before = f64::NAN;
    for (system, (_, ran)) in ABLATION.iter().zip(&report.ablation) {
        all.put(format!("step/{}", system.name), ran.speed);
        all.put(format!("adds/{}", system.name), ran.speed / before);
        before = ran.speed;
    }
}

fn most(of: impl IntoIterator<Item = f64>) -> f64 {
    of.into_iter().fold(0.0, f64::max)
}
