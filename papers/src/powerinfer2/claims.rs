//! Every figure that the paper prints of its evaluation, beside ours.

use super::activity::{WHITE, popularity};
use super::dense::LONG;
use super::models::{BAMBOO, GROUPED, LLAMA, MISTRAL, MIXTRAL};
use super::paper;
use super::phone::{Cluster, Phone};
use super::report::{Decode, Report, fits};
use crate::printed::Printed::{self, Is};

/// How far ours may be off to agree, and to be near.
pub const CLOSE: f64 = 0.10;
/// Near.
pub const NEAR: f64 = 0.25;

/// A figure of the paper.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// Where it stands.
    pub place: &'static str,
    /// What it is.
    pub what: String,
    /// Its unit.
    pub unit: &'static str,
    /// What is printed.
    pub paper: Printed,
    /// What is simulated.
    pub ours: f64,
    /// A constant was found from it: it checks nothing.
    pub used: bool,
    /// Why it does not come out, if it does not.
    pub why: &'static str,
}

impl Claim {
    fn new(place: &'static str, what: impl Into<String>, paper: Printed, ours: f64) -> Self {
        Self { place, what: what.into(), unit: "×", paper, ours, used: false, why: "" }
    }

    fn unit(self, unit: &'static str) -> Self {
        Self { unit, ..self }
    }

    fn why(self, why: &'static str) -> Self {
        Self { why, ..self }
    }

    fn used(self) -> Self {
        Self { used: true, ..self }
    }

    /// Whether it comes out.
    pub fn agrees(&self) -> bool {
        self.paper.error(self.ours).abs() <= CLOSE
    }

    /// Whether it nearly does.
    pub fn near(&self) -> bool {
        self.paper.error(self.ours).abs() <= NEAR
    }

    /// One line.
    pub fn verdict(&self) -> String {
        let error = format!("{:+.0} %", 100.0 * self.paper.error(self.ours));
        match (self.used, self.agrees(), self.why) {
            (true, ..) => "a constant was found from it".to_owned(),
            (_, true, _) => "agrees".to_owned(),
            (_, _, "") => error,
            (_, _, why) => format!("{error}: {why}"),
        }
    }
}

const MIXTRAL_READS: &str =
    "3B activated parameters are 124 000 neurons of 8 KB; the paper's times have room for half of them";
const CATS: &str = "the paper does not say how neurons of a SiLU model are predicted, nor what that costs";
const TAIL: &str = "one spread for both models, found from the misses of the other";
const BEST: &str = "§7.4 contradicts itself; see *In memory*";

fn mean(of: impl Iterator<Item = f64>) -> f64 {
    let all: Vec<f64> = of.collect();
    all.iter().sum::<f64>() / all.len().max(1) as f64
}

fn most(of: impl Iterator<Item = f64>) -> f64 {
    of.fold(0.0, f64::max)
}

/// All of them.
pub fn claims(phone: &Phone, report: &Report) -> Vec<Claim> {
    let mut all = workload(phone, report);
    all.extend(decode(report));
    all.extend(prefill(report));
    all.extend(memory(report));
    all.extend(latency(report));
    all.extend(in_memory(report));
    all.extend(ablation(report));
    all.extend(energy(report));
    all
}

/// What the runs begin from.
fn workload(phone: &Phone, report: &Report) -> Vec<Claim> {
    let of = popularity(BAMBOO.active, BAMBOO.inner);
    let white = |batch| of.iter().filter(|&&p| 1.0 - (1.0 - p).powi(batch) > WHITE).count() as f64;
    let [one, many] = [1, 32].map(|b| white(b) / of.len() as f64);
    let flash = &phone.flash;
    let sequential = flash.sequential.rate(LONG) * flash.random_seconds(4096, 128e6, Cluster::Big) / 4096.0;
    let half = 0.5 * BAMBOO.feed_forward() * GROUPED * 1e-9;
    let misses = |model, what, paper, ours: fn(&Decode) -> f64| {
        let ours = report.of(phone.name, model).map_or(0.0, ours);
        Claim::new("§7.2.4, §7.5", what, paper, ours).unit("of 1")
    };
    vec![
        Claim::new("§2.2, Figure 2", "highly activated neurons, batch 1", paper::WHITE[0], one)
            .unit("of 1")
            .used(),
        Claim::new("§2.2, Figure 2", "highly activated neurons, batch 32", paper::WHITE[1], many)
            .unit("of 1")
            .used(),
        misses(&BAMBOO, "hits of Bamboo-7B", paper::HITS, |d| 1.0 - d.powerinfer2.misses).used(),
        misses(&MIXTRAL, "misses of Mixtral-47B, mean", paper::MISSES[0], |d| d.powerinfer2.misses).used(),
        misses(&MIXTRAL, "misses of Mixtral-47B, P99", paper::MISSES[1], |d| d.powerinfer2.misses_p99).used(),
        Claim::new(
            "§7.2.2",
            "Mixtral-47B's neurons that 128 tokens activate",
            paper::ACTIVE_128,
            100.0 * report.active_128,
        )
        .unit("%"),
        Claim::new("§7.2.2", "sequential over random reads", paper::SEQUENTIAL, sequential)
            .why("the rates of §2.3.2 say this"),
        Claim::new("§7.2.3", "feed-forward weights in 400 MB", paper::CACHED_AT_7, fits(&MIXTRAL, 7.0))
            .unit("of 1"),
        Claim::new("§7.3", "memory that half on flash saves", paper::SAVED_GB, half).unit("GB"),
    ]
}

/// Figure 7, Tables 2, 4 and 6.
fn decode(report: &Report) -> Vec<Claim> {
    let rows = |phone: &'static str| report.decode.iter().filter(move |d| d.phone == phone);
    let (first, second) = ("OnePlus 12", "OnePlus Ace 2");
    let flash = |d: &Decode| d.powerinfer2.speed / d.llmflash.speed;
    let llama = |d: &Decode| d.powerinfer2.speed / d.llama;
    let [[flash_mean, flash_most], [llama_mean, llama_most]] = [
        [mean(rows(first).map(flash)), most(rows(first).map(flash))],
        [mean(rows(first).map(llama)), most(rows(first).map(llama))],
    ];
    let place = "§7.2.1, Figure 7";
    let claim = |what: &str, paper, ours| Claim::new(place, what, paper, ours);
    let mut all = vec![
        claim("over LLMFlash, mean of the models, OnePlus 12", paper::DECODE[0].0, flash_mean),
        claim("over LLMFlash, at most, OnePlus 12", paper::DECODE[0].1, flash_most),
        claim("over llama.cpp, mean, OnePlus 12", paper::DECODE[1].0, llama_mean),
        claim("over llama.cpp, at most, OnePlus 12", paper::DECODE[1].1, llama_most),
        claim("over LLMFlash, mean, Ace 2", paper::DECODE_ACE[0], mean(rows(second).map(flash))),
        claim("over llama.cpp, mean, Ace 2", paper::DECODE_ACE[1], mean(rows(second).map(llama)))
            .why("nothing is printed of its flash, nor of its cores"),
    ];
    let Some([bamboo, mistral, mixtral, llama13]) = [&BAMBOO, &MISTRAL, &MIXTRAL, &LLAMA]
        .map(|m| report.of(first, m))
        .into_iter()
        .collect::<Option<Vec<_>>>()
        .and_then(|v| <[&Decode; 4]>::try_from(v).ok())
    else {
        return all;
    };
    all.extend([
        claim("LLMFlash over llama.cpp, Bamboo-7B", paper::LLMFLASH_OVER_LLAMA, bamboo.llmflash.speed / bamboo.llama),
        claim("neurons that LLMFlash loads, Bamboo-7B", paper::LLMFLASH_MISSES, bamboo.llmflash.misses)
            .unit("of 1")
            .why("ours keeps all that fits, by least recent use; the paper does not say what its LLMFlash keeps"),
        claim("Mixtral-47B", paper::MIXTRAL, mixtral.powerinfer2.speed).unit("tokens/s"),
        claim("Bamboo-7B over Llama-13B", paper::LLAMA_SLOWER, bamboo.powerinfer2.speed / llama13.powerinfer2.speed),
        Claim::new("Table 2", "LLMFlash with Mistral-7B in memory", paper::MISTRAL_IN_MEMORY, report.mistral_in_memory)
            .unit("tokens/s")
            .why(CATS),
        Claim::new("Table 4", "I/O of PowerInfer-2", paper::IO[0], bamboo.powerinfer2.io).unit("of the time"),
        Claim::new("Table 4", "I/O of LLMFlash", paper::IO[1], bamboo.llmflash.io).unit("of the time").used(),
    ]);
    for (row, speeds) in [mistral, bamboo].into_iter().zip(paper::SPEEDS) {
        let why = if row.model == MISTRAL.name { CATS } else { "" };
        let claim = |what: &str, paper, ours, unit| {
            Claim::new("Table 6", format!("{what}, {}", row.model), paper, ours).unit(unit).why(why)
        };
        all.push(claim("PowerInfer-2", Is(speeds[0]), row.powerinfer2.speed, "tokens/s"));
        all.push(claim("LLMFlash", Is(speeds[1]), row.llmflash.speed, "tokens/s"));
        all.push(claim("speedup", Is(speeds[0] / speeds[1]), flash(row), "×"));
    }
    all
}

/// Figures 8 and 9.
fn prefill(report: &Report) -> Vec<Claim> {
    let rows = |phone: &'static str, tokens| {
        report.prefill.iter().filter(move |p| p.phone == phone && p.tokens == tokens)
    };
    let over = |phone, tokens, of: usize| most(rows(phone, tokens).map(|p| p.speeds[0] / p.speeds[of]));
    let (first, second) = ("OnePlus 12", "OnePlus Ace 2");
    let place = "§7.2.2, Figure 8";
    let cpu = "cores without flash are taken to prefill at 24 tokens/s (§7.3); by §2.3.1 it is 8";
    let claim = |what: &str, paper, ours| Claim::new(place, what, paper, ours).why(cpu);
    let mut all = vec![
        claim("512 tokens over LLMFlash, at most, OnePlus 12", paper::PREFILL[0], over(first, 512, 3)),
        claim("512 tokens over llama.cpp, at most, OnePlus 12", paper::PREFILL[1], over(first, 512, 2)),
        claim("512 tokens over QNN, at most, OnePlus 12", paper::PREFILL[2], over(first, 512, 1))
            .why("QNN is taken to read at the full sequential rate; how it reads is not said"),
        claim("512 tokens over LLMFlash, at most, Ace 2", paper::PREFILL_ACE[0], over(second, 512, 3)),
        claim("512 tokens over llama.cpp, at most, Ace 2", paper::PREFILL_ACE[1], over(second, 512, 2)),
        claim("128 tokens over LLMFlash, at most, OnePlus 12", paper::PREFILL_128, over(first, 128, 3)),
    ];
    for (name, layer) in report.layers {
        let what = format!("time of reading over that of computing, {name}");
        all.push(Claim::new("Figure 9", what, Printed::Below(1.0), layer.io / layer.compute));
    }
    all
}

/// Figures 10 and 11.
fn memory(report: &Report) -> Vec<Claim> {
    let place = "§7.2.3, Figure 10";
    let mut all = Vec::new();
    for ((gb, speed), over) in paper::MEMORY.into_iter().zip(paper::MEMORY_OVER_LLMFLASH) {
        let Some(m) = report.memory.iter().find(|m| m.gigabytes == gb) else { continue };
        let (ours, llmflash, llama) = (m.powerinfer2.speed, m.llmflash.speed, m.llama);
        let small = gb < 10.0;
        let why = if small {
            MIXTRAL_READS
        } else {
            "hits come from tokens that are alike, which needs less memory; see below"
        };
        all.push(Claim::new(place, format!("Mixtral-47B, {gb} GB"), speed, ours).unit("tokens/s").why(why));
        let what = format!("over LLMFlash, {gb} GB");
        let why =
            if small { "bundles of six where one of them is asked for, several cores that read" } else { "" };
        all.push(Claim::new(place, what, over, ours / llmflash).why(why));
        if !small {
            let what = format!("over llama.cpp, {gb} GB");
            all.push(Claim::new(place, what, paper::MEMORY_OVER_LLAMA, ours / llama));
        }
    }
    let least = report.tasks.into_iter().fold(f64::INFINITY, f64::min);
    all.push(
        Claim::new("Figure 11", "Mixtral-47B, the slowest of four", paper::TASKS, least).unit("tokens/s"),
    );
    all
}

/// Table 5.
fn latency(report: &Report) -> Vec<Claim> {
    let mut all = Vec::new();
    for (model, printed) in [&MIXTRAL, &BAMBOO].into_iter().zip(paper::LATENCY) {
        let Some(row) = report.of("OnePlus 12", model) else { continue };
        let names = ["mean", "P50", "P90", "P99"];
        for ((name, paper), ours) in names.into_iter().zip(printed).zip(row.powerinfer2.latency) {
            let why = match (name, model.experts) {
                ("P99", 1) => TAIL,
                ("P99", _) => MIXTRAL_READS,
                _ => "",
            };
            let what = format!("{}, {name}", model.name);
            all.push(Claim::new("Table 5", what, Is(paper), ours).unit("ms").why(why));
        }
    }
    all
}

/// Figures 12 and 13, and hot shares.
fn in_memory(report: &Report) -> Vec<Claim> {
    let [ours, llama, mlc, qnn] = report.in_memory;
    let [prefill, half, cpu, _] = report.in_memory_prefill;
    let place = "§7.3, Figure 12";
    let claim = |what: &str, paper, ours| Claim::new(place, what, paper, ours);
    let mut all = vec![
        claim("prefill in memory", paper::PREFILL_IN_MEMORY, prefill).unit("tokens/s"),
        claim("prefill over llama.cpp", paper::PREFILL_OVER_CPU, prefill / cpu).used(),
        claim("prefill, half on flash", paper::PREFILL_HALF, half).unit("tokens/s").used(),
        claim("decode over llama.cpp", paper::IN_MEMORY[0], ours / llama),
        claim("decode over MLC-LLM", paper::IN_MEMORY[1], ours / mlc).why(
            "half of the neural unit's rate for the graphics unit: §2.3.1 gives a share of time, no rate",
        ),
        claim("decode over QNN", paper::IN_MEMORY[2], ours / qnn),
    ];
    for (sequences, printed) in paper::BEST_OF {
        let Some(b) = report.batches.iter().find(|b| b.sequences == sequences) else { continue };
        let [ours, _, cpu, qnn] = b.speeds;
        let why = if sequences == 4 { BEST } else { "" };
        for (name, paper, other) in [("QNN", printed[0], qnn), ("PowerInfer-2-CPUOnly", printed[1], cpu)] {
            let what = format!("{sequences} sequences, over {name}");
            all.push(Claim::new("§7.4, Figure 13", what, paper, ours / other).why(why));
        }
    }
    for (batch, paper) in paper::HOT {
        let Some(b) = report.batches.iter().find(|b| b.sequences == batch) else { continue };
        let what = format!("hot share, batch {batch}, planned");
        let why = "dense neurons cost bytes that sparse ones do not; where both share memory fewer are best";
        all.push(Claim::new("§4.1.3", what, paper, b.planned).unit("of 1").why(why));
    }
    all
}

/// Figure 14.
fn ablation(report: &Report) -> Vec<Claim> {
    let place = "§7.5, Figure 14";
    let why = [
        "",
        "",
        "9.60 over the 1.29 of the next step would be 7.44: the printed speeds and steps do not go together",
        "",
        "",
    ];
    let rows = report.ablation.iter().zip(paper::ABLATION).zip(why);
    let mut all: Vec<Claim> = rows
        .map(|(((name, ran), paper), why)| {
            Claim::new(place, *name, Is(paper), ran.speed).unit("tokens/s").why(why)
        })
        .collect();
    let speeds: Vec<f64> = report.ablation.iter().map(|a| a.1.speed).collect();
    let why = [
        "4.181 over 1.1 is 3.80, 7.44 over 1.1 is 6.76",
        "",
        "both units share memory nearly as said in §2.3.1",
    ];
    for ((pair, paper), (name, why)) in
        speeds[1..5].windows(2).zip(paper::ADDED).zip(["+Cache", "+Pipeline", "+XPU"].into_iter().zip(why))
    {
        let what = format!("what {name} adds");
        all.push(Claim::new(place, what, Is(paper), pair[1] / pair[0]).why(why));
    }
    all
}

/// Table 8.
fn energy(report: &Report) -> Vec<Claim> {
    let names = ["PowerInfer-2", "QNN", "llama.cpp"];
    let mut all: Vec<Claim> = names
        .into_iter()
        .zip(paper::ENERGY)
        .zip(report.energy)
        .map(|((name, paper), ours)| Claim::new("Table 8", name, Is(paper), ours).unit("J/token"))
        .collect();
    let [ours, others @ ..] = report.energy;
    for ((name, paper), other) in names[1..].iter().zip(paper::ENERGY_SAVED).zip(others) {
        all.push(
            Claim::new("Table 8", format!("less than {name}"), Is(paper), 1.0 - ours / other).unit("of 1"),
        );
    }
    all
}
