//! Runs, orders and constants of NPUMoE's paper; its figures are in `claims/npumoe.toml`.
//!
//! The paper gives ratios to its own system, most of them per prompt length and chunk. If it does not state
//! the configuration, `stated` is false and ours is an assumption.

use crate::claim::Claim;
use crate::shapes::{PHIMOE, PHIMOE_TINY, QWEN3, Shape};
use Metric::{Energy, Latency};

/// The figures.
pub const CLAIMS: &str = include_str!("../../claims/npumoe.toml");

/// A configuration that was measured.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Name.
    pub name: &'static str,
    /// Device.
    pub device: &'static str,
    /// Model.
    pub shape: Shape,
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens of a chunk.
    pub chunk: u32,
    /// Tokens decoded.
    pub decode: u32,
    /// Whether the paper states prompt and chunk.
    pub stated: bool,
    /// Whether it is about the ablations of Figure 17.
    pub ablation: bool,
}

impl Config {
    /// The claim about a ratio of two systems here.
    pub fn ratio(&self, metric: Metric, of: &str, to: &str) -> String {
        let star = if self.stated { "" } else { " *" };
        format!("{}{star}: {} of {of} over {to}", self.name, metric.name())
    }
}

/// A ratio of two systems that a claim is about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio<'a> {
    /// Name of the configuration.
    pub config: &'a str,
    /// Compared metric.
    pub metric: Metric,
    /// System above the line.
    pub of: &'a str,
    /// System below it.
    pub to: &'a str,
}

impl<'a> Ratio<'a> {
    /// As [`Config::ratio`] has it; `None` for other figures.
    pub fn of(claim: &'a Claim) -> Option<Self> {
        let (config, rest) = claim.of.split_once(": ")?;
        let (metric, rest) = rest.split_once(" of ")?;
        let (of, to) = rest.split_once(" over ")?;
        let metric = Metric::ALL.into_iter().find(|m| m.name() == metric)?;
        Some(Self { config: config.trim_end_matches(" *"), metric, of, to })
    }
}

const PHI: Config = Config {
    name: "PhiMoE 1024/256",
    device: "m2-ultra",
    shape: PHIMOE,
    prompt: 1024,
    chunk: 256,
    decode: 0,
    stated: true,
    ablation: false,
};

/// Prefill of PhiMoE, the configuration of Table 4.
pub const SHORT: Config = PHI;
/// Qwen3-MoE of Tables 6 and 7.
pub const QWEN: Config = Config { name: "Qwen3-MoE 1024/256", shape: QWEN3, stated: false, ..PHI };

/// Every configuration.
pub const CONFIGS: [Config; 9] = [
    SHORT,
    Config { name: "PhiMoE 1024/512", chunk: 512, ..PHI },
    Config { name: "PhiMoE 4096/512", prompt: 4096, chunk: 512, ..PHI },
    Config { name: "PhiMoE 4096/1024", prompt: 4096, chunk: 1024, ..PHI },
    // §5.1: the average decode length is 8 tokens.
    Config { name: "PhiMoE end to end", decode: 8, stated: false, ..PHI },
    QWEN,
    Config { name: "Qwen3-MoE 4096/1024", prompt: 4096, chunk: 1024, ..QWEN },
    Config { name: "PhiMoE-tiny", device: "m2-max", shape: PHIMOE_TINY, stated: false, ..PHI },
    Config { name: "PhiMoE ablation", stated: false, ablation: true, ..PHI },
];

/// Metric that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    /// Time of the run.
    Latency,
    /// Energy per token.
    Energy,
    /// CPU cycles there, time that the CPU works here.
    Cpu,
}

impl Metric {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Latency, Self::Energy, Self::Cpu];

    /// Name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Energy => "energy",
            Self::Cpu => "cpu",
        }
    }

    /// Range of all its ratios, of all baselines and configurations of PhiMoE's prefill
    /// (§5.2).
    pub const fn range(self) -> (f64, f64) {
        match self {
            Self::Latency => (1.32, 5.55),
            Self::Energy => (1.81, 7.37),
            Self::Cpu => (1.78, 5.54),
        }
    }
}

/// A statement that one system is below another, where the paper gives no number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Below {
    /// Name of the configuration.
    pub config: &'static str,
    /// Compared metric.
    pub metric: Metric,
    /// The better system.
    pub less: &'static str,
    /// The worse one.
    pub more: &'static str,
    /// Place in the paper.
    pub source: &'static str,
}

const fn below(metric: Metric, less: &'static str, more: &'static str, source: &'static str) -> Below {
    Below { config: "PhiMoE ablation", metric, less, more, source }
}

const GROUPED: &str = "§5.8: both grouped variants outperform the rest";
const WORST: &str = "§5.8: Ours-base gives the worst performance";

/// Orders in words.
pub const ORDERS: &[Below] = &[
    below(Latency, "ours-tg", "ours-t", GROUPED),
    below(Latency, "ours", "ours-t", GROUPED),
    below(Latency, "ours-t", "ours-base", WORST),
    below(Energy, "ours", "ours-t", GROUPED),
    below(Energy, "ours-tg", "ours", "§5.8: Ours-TG gives the best energy efficiency"),
];

/// Configurations of Table 5, serial execution: experts per graph, rows of each.
pub const GROUPS: [(usize, u32); 11] =
    [(1, 32), (1, 64), (1, 128), (4, 32), (4, 64), (8, 32), (8, 64), (8, 96), (8, 128), (8, 192), (8, 256)];

/// A row of Tables 6 and 7: a system's seconds in all, of experts and of attention, and joules.
#[derive(Clone, Copy, Debug)]
pub struct PaperRun {
    /// System.
    pub system: &'static str,
    /// Wall (s).
    pub wall: f64,
    /// Exp (s).
    pub experts: f64,
    /// Attn (s).
    pub attention: f64,
    /// CPU (J).
    pub cpu_j: f64,
    /// ANE (J).
    pub npu_j: f64,
    /// Comm. (J).
    pub memory_j: f64,
}

/// Tables 6 and 7.
pub const RUNS: [PaperRun; 3] = [
    PaperRun {
        system: "ours",
        wall: 0.572,
        experts: 0.464,
        attention: 0.086,
        cpu_j: 1.23,
        npu_j: 1.20,
        memory_j: 1.37,
    },
    PaperRun {
        system: "coreml-cpu",
        wall: 1.139,
        experts: 0.978,
        attention: 0.095,
        cpu_j: 9.66,
        npu_j: 0.0,
        memory_j: 3.01,
    },
    PaperRun {
        system: "anemll",
        wall: 1.144,
        experts: 0.988,
        attention: 0.090,
        cpu_j: 8.87,
        npu_j: 0.26,
        memory_j: 2.99,
    },
];

/// Models of Table 1.
pub const MODELS: [Shape; 3] = [PHIMOE, PHIMOE_TINY, QWEN3];
