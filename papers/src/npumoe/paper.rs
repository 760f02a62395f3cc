//! What NPUMoE's paper says, and nothing else: every number here is printed there, under the place that is named.
//!
//! The paper gives ratios to its own system, most of them per prompt length and chunk. Where it gives a range over
//! several configurations, the range stands here; where it does not say the configuration, `stated` is false and ours
//! is an assumption. Bars of figures without a number are not read off.

pub use crate::printed::Printed;
use crate::shapes::{PHIMOE, PHIMOE_TINY, QWEN3, Shape};
use Metric::{Cpu, Energy, Latency};
use Printed::{Is, Within};

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

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    /// Time of the run.
    Latency,
    /// Energy per token.
    Energy,
    /// CPU cycles there, time that the processor works here.
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

    /// From where to where all its ratios lie, of all baselines and configurations of PhiMoE's prefill (§5.2).
    pub const fn range(self) -> (f64, f64) {
        match self {
            Self::Latency => (1.32, 5.55),
            Self::Energy => (1.81, 7.37),
            Self::Cpu => (1.78, 5.54),
        }
    }
}

/// A ratio of two systems.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Claim {
    /// Name of the configuration.
    pub config: &'static str,
    /// What is compared.
    pub metric: Metric,
    /// System above the line.
    pub of: &'static str,
    /// System below it.
    pub to: &'static str,
    /// Their ratio.
    pub value: Printed,
    /// Where it stands.
    pub source: &'static str,
}

const fn claim(
    config: &'static str,
    metric: Metric,
    of: &'static str,
    value: Printed,
    source: &'static str,
) -> Claim {
    Claim { config, metric, of, to: "ours", value, source }
}

const AMONG: &str =
    "§5.4 and §5.8; §5.4 gives ranges over the two chunks at 4096, §5.8 the ends at chunk 1024";
const CHUNKS: &str =
    "§5.5; it names the chunks 256 and 512 where §5.3, §5.4 and §5.8 have 512 and 1024: read so";
const WHOLE: &str =
    "§5.3 to §5.5; end to end: model and prompt are not stated, and §5.2 calls the same numbers Qwen3-MoE's";

const SPEEDUPS: &str =
    "§5.2; a range over all baselines of Qwen3-MoE: §5.3 and §5.4 call the same numbers end to end";

/// Every ratio, in the order of the text.
pub const CLAIMS: &[Claim] = &[
    claim("PhiMoE 1024/256", Latency, "coreml-cpu", Is(2.07), "§5.3"),
    claim("PhiMoE 1024/256", Latency, "coreml-naive", Is(5.55), "§5.3"),
    claim("PhiMoE 1024/256", Latency, "anemll", Is(1.95), "§5.3"),
    claim("PhiMoE 1024/512", Latency, "coreml-cpu", Is(1.32), "§5.3"),
    claim("PhiMoE 1024/512", Latency, "coreml-naive", Is(3.44), "§5.3"),
    claim("PhiMoE 1024/512", Latency, "anemll", Is(1.33), "§5.3"),
    claim("PhiMoE 4096/512", Latency, "coreml-cpu", Is(1.58), "§5.3"),
    claim("PhiMoE 4096/512", Latency, "coreml-naive", Is(3.85), "§5.3"),
    claim("PhiMoE 4096/512", Latency, "anemll", Is(1.50), "§5.3"),
    claim("PhiMoE 4096/1024", Latency, "coreml-cpu", Is(1.72), "§5.3"),
    claim("PhiMoE 4096/1024", Latency, "coreml-naive", Is(3.70), "§5.3"),
    claim("PhiMoE 4096/1024", Latency, "anemll", Is(1.56), "§5.3; §5.8 says 1.44"),
    claim("PhiMoE 1024/256", Energy, "coreml-cpu", Within(2.01, 6.30), "§5.8"),
    claim("PhiMoE 1024/256", Energy, "coreml-naive", Within(2.01, 6.30), "§5.8"),
    claim("PhiMoE 1024/256", Energy, "anemll", Within(2.01, 6.30), "§5.8"),
    claim("PhiMoE 1024/512", Energy, "coreml-cpu", Is(3.19), "§5.4"),
    claim("PhiMoE 1024/512", Energy, "coreml-naive", Is(7.37), "§5.4"),
    claim("PhiMoE 1024/512", Energy, "anemll", Is(3.43), "§5.4"),
    claim("PhiMoE 4096/512", Energy, "coreml-cpu", Is(1.81), AMONG),
    claim("PhiMoE 4096/512", Energy, "coreml-naive", Is(4.71), AMONG),
    claim("PhiMoE 4096/512", Energy, "anemll", Is(1.86), AMONG),
    claim("PhiMoE 4096/1024", Energy, "coreml-cpu", Is(2.30), AMONG),
    claim("PhiMoE 4096/1024", Energy, "coreml-naive", Is(5.23), AMONG),
    claim("PhiMoE 4096/1024", Energy, "anemll", Is(2.49), AMONG),
    claim("PhiMoE 1024/256", Cpu, "coreml-cpu", Is(3.78), "§5.5"),
    claim("PhiMoE 1024/256", Cpu, "coreml-naive", Is(3.61), "§5.5"),
    claim("PhiMoE 1024/256", Cpu, "anemll", Is(2.98), "§5.5"),
    claim("PhiMoE 1024/512", Cpu, "coreml-cpu", Is(2.45), "§5.5"),
    claim("PhiMoE 1024/512", Cpu, "coreml-naive", Is(3.20), "§5.5"),
    claim("PhiMoE 1024/512", Cpu, "anemll", Is(1.78), "§5.5"),
    claim("PhiMoE 4096/512", Cpu, "coreml-cpu", Within(2.09, 3.70), CHUNKS),
    claim("PhiMoE 4096/512", Cpu, "coreml-naive", Within(2.09, 3.70), CHUNKS),
    claim("PhiMoE 4096/512", Cpu, "anemll", Within(2.09, 3.70), CHUNKS),
    claim("PhiMoE 4096/1024", Cpu, "coreml-cpu", Within(2.21, 5.54), CHUNKS),
    claim("PhiMoE 4096/1024", Cpu, "coreml-naive", Within(2.21, 5.54), CHUNKS),
    claim("PhiMoE 4096/1024", Cpu, "anemll", Within(2.21, 5.54), CHUNKS),
    claim("PhiMoE end to end", Latency, "coreml-cpu", Is(1.26), WHOLE),
    claim("PhiMoE end to end", Latency, "coreml-naive", Is(3.86), WHOLE),
    claim("PhiMoE end to end", Latency, "anemll", Is(1.19), WHOLE),
    claim("PhiMoE end to end", Energy, "coreml-cpu", Is(1.84), WHOLE),
    claim("PhiMoE end to end", Energy, "coreml-naive", Is(3.89), WHOLE),
    claim("PhiMoE end to end", Energy, "anemll", Is(1.95), WHOLE),
    claim("PhiMoE end to end", Cpu, "coreml-cpu", Within(2.64, 3.75), WHOLE),
    claim("PhiMoE end to end", Cpu, "coreml-naive", Within(3.17, 4.67), WHOLE),
    claim("PhiMoE end to end", Cpu, "anemll", Within(2.01, 2.99), WHOLE),
    claim("Qwen3-MoE 1024/256", Latency, "coreml-cpu", Is(1.99), "Table 6"),
    claim("Qwen3-MoE 1024/256", Latency, "anemll", Is(2.00), "Table 6"),
    claim("Qwen3-MoE 1024/256", Energy, "coreml-cpu", Is(3.33), "Table 7"),
    claim("Qwen3-MoE 1024/256", Energy, "anemll", Is(3.19), "Table 7"),
    claim("Qwen3-MoE 1024/256", Latency, "coreml-naive", Within(1.19, 3.86), SPEEDUPS),
    claim("Qwen3-MoE 1024/256", Energy, "coreml-naive", Within(1.84, 3.89), SPEEDUPS),
    claim("Qwen3-MoE 4096/1024", Latency, "coreml-cpu", Is(1.99), "Table 6"),
    claim("Qwen3-MoE 4096/1024", Latency, "anemll", Is(2.00), "Table 6"),
    claim("Qwen3-MoE 4096/1024", Energy, "coreml-cpu", Is(3.33), "Table 7"),
    claim("Qwen3-MoE 4096/1024", Energy, "anemll", Is(3.19), "Table 7"),
    claim("Qwen3-MoE 4096/1024", Latency, "coreml-naive", Within(1.19, 3.86), SPEEDUPS),
    claim("Qwen3-MoE 4096/1024", Energy, "coreml-naive", Within(1.84, 3.89), SPEEDUPS),
    claim("PhiMoE-tiny", Latency, "coreml-cpu", Within(1.11, 1.87), "§5.2 of Figure 19"),
    claim("PhiMoE-tiny", Latency, "coreml-naive", Within(1.11, 1.87), "§5.2 of Figure 19"),
    claim("PhiMoE-tiny", Latency, "anemll", Within(1.11, 1.87), "§5.2 of Figure 19"),
    claim("PhiMoE-tiny", Energy, "coreml-cpu", Within(1.70, 2.68), "§5.2 of Figure 19"),
    claim("PhiMoE-tiny", Energy, "coreml-naive", Within(1.70, 2.68), "§5.2 of Figure 19"),
    claim("PhiMoE-tiny", Energy, "anemll", Within(1.70, 2.68), "§5.2 of Figure 19"),
    claim("PhiMoE ablation", Latency, "ours-base", Is(2.89), "§5.8"),
    claim("PhiMoE ablation", Latency, "ours-tg", Is(1.09), "§5.8"),
    Claim { to: "ours-tg", ..claim("PhiMoE ablation", Energy, "ours-base", Is(3.74), "§5.8") },
    Claim { to: "ours-tg", ..claim("PhiMoE ablation", Energy, "ours-t", Is(1.31), "§5.8") },
];

/// A statement that one system is below another, where the paper gives no number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Below {
    /// Name of the configuration.
    pub config: &'static str,
    /// What is compared.
    pub metric: Metric,
    /// The better system.
    pub less: &'static str,
    /// The worse one.
    pub more: &'static str,
    /// Where it stands.
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

/// Table 3: average share of tokens dropped, and of padding, in percent.
pub const DROPPED: [f64; 4] = [14.66, 10.63, 21.77, 21.00];
/// Table 3, the second column.
pub const PADDED: [f64; 4] = [31.73, 34.77, 37.49, 37.00];

/// A system's rows of Table 4, in milliseconds for the four chunks of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// System.
    pub system: &'static str,
    /// Router.
    pub router: f64,
    /// Gather tokens to expert buffer.
    pub gather: f64,
    /// Padding.
    pub padding: f64,
    /// Expert FFN.
    pub experts: f64,
    /// Scatter (write back).
    pub scatter: f64,
    /// Residual addition.
    pub residual: f64,
}

const fn block(system: &'static str, x: [f64; 6]) -> Block {
    let [router, gather, padding, experts, scatter, residual] = x;
    Block { system, router, gather, padding, experts, scatter, residual }
}

/// Table 4.
pub const BLOCKS: [Block; 4] = [
    block("coreml-cpu", [1.0, 3.62, 0.0, 969.53, 901.06, 440.62]),
    block("coreml-naive", [1.0, 1.95, 1.62, 3369.86, 896.76, 435.23]),
    block("anemll", [1.0, 3.73, 0.0, 983.05, 902.87, 440.22]),
    block("ours", [1.0, 1.24, 0.37, 530.91, 775.52, 398.34]),
];

/// A row of Table 5, serial: experts per graph, rows of each, ms and mJ per token (per row, as the device files say).
#[derive(Clone, Copy, Debug)]
pub struct Grouped {
    /// Experts per graph.
    pub group: usize,
    /// Rows of each.
    pub capacity: u32,
    /// Milliseconds per token.
    pub ms: f64,
    /// Millijoules per token.
    pub mj: f64,
}

const fn grouped(group: usize, capacity: u32, ms: f64, mj: f64) -> Grouped {
    Grouped { group, capacity, ms, mj }
}

/// Table 5, serial execution, fixed capacities.
pub const GROUPED_ROWS: [Grouped; 11] = [
    grouped(1, 32, 0.31, 1.43),
    grouped(1, 64, 0.23, 1.17),
    grouped(1, 128, 0.16, 0.89),
    grouped(4, 32, 0.27, 1.22),
    grouped(4, 64, 0.19, 0.98),
    grouped(8, 32, 0.26, 1.16),
    grouped(8, 64, 0.18, 0.93),
    grouped(8, 96, 0.15, 0.88),
    grouped(8, 128, 0.14, 0.96),
    grouped(8, 192, 0.15, 0.92),
    grouped(8, 256, 0.16, 0.99),
];

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

/// Table 8: average watts of a dense attention kernel on the NPU.
pub const ATTENTION_W: f64 = 7.10;
/// Table 9: average watts of attention and MoE block on the NPU.
pub const BLOCK_W: f64 = 9.61;
/// Figure 7's text: how many times less an NPU takes for a matrix product.
pub const NPU_FASTER: (f64, f64) = (1.4, 2.3);
/// Figure 8: seconds on the CPU alone, and with the NPU.
pub const SYNC_S: (f64, f64) = (1.45, 2.66);
/// §5.3: share of a naive MoE block that is dispatch.
pub const DISPATCH_SHARE: f64 = 0.60;
/// Figure 14's text: share of the experts in the time to the first token.
pub const EXPERT_SHARE: f64 = 0.86;
/// §5.4: millijoules per token of ours, from the least to the most.
pub const OURS_MJ: (f64, f64) = (52.0, 137.0);
/// §5.4: how many times ours the naive system spends on moving data.
pub const NAIVE_MEMORY: (f64, f64) = (4.44, 5.69);
/// Table 1: parameters of a model in 10⁹, in all and active.
pub const PARAMETERS: [(Shape, f64, f64); 3] =
    [(PHIMOE, 42.6, 6.6), (PHIMOE_TINY, 3.8, 1.1), (QWEN3, 30.5, 3.3)];
/// §5.1: megabytes of an expert of PhiMoE.
pub const EXPERT_MB: f64 = 150.0;
/// Figure 2's text: share of the prefill in latency and in CPU cycles, end to end.
pub const PREFILL_SHARE: (f64, f64) = (0.80, 0.70);
/// §5.3: how much longer attention takes on the other backend.
pub const ATTENTION_ELSEWHERE: f64 = 1.276;
/// §5.8: share of computed tokens that are padding, in percent, on average.
pub const PADDED_ON_AVERAGE: f64 = 35.35;
/// §5.7 of Table 4: by how much less the experts' networks, scattering, and the whole block take than Core ML (CPU).
pub const BLOCK_SAVES: [(f64, f64); 3] = [(0.40, 0.50), (0.10, 0.15), (0.05, 0.10)];
/// §5.7 of Table 4: by how much less the whole block takes than Core ML (naive).
pub const BLOCK_SAVES_NAIVE: f64 = 0.54;
/// Table 4, end to end: coreml-cpu, coreml-naive, anemll, ours. The rows above it sum to 1707 ms in the column of ours.
pub const BLOCK_MS: [f64; 4] = [2315.83, 4706.42, 2330.87, 2165.46];

/// §5.7 of Table 5: how many times less a token takes in the second configuration (experts per graph, rows) than in the
/// first.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// The first.
    pub from: (usize, u32),
    /// The second.
    pub to: (usize, u32),
    /// What is compared: latency or energy.
    pub metric: Metric,
    /// How many times less.
    pub times: f64,
}

const fn step(from: (usize, u32), to: (usize, u32), metric: Metric, times: f64) -> Step {
    Step { from, to, metric, times }
}

/// Every one.
pub const STEPS: [Step; 11] = [
    step((1, 32), (1, 128), Latency, 1.94),
    step((1, 32), (1, 64), Energy, 1.22),
    step((1, 32), (1, 128), Energy, 1.61),
    step((8, 32), (8, 64), Latency, 1.44),
    step((8, 32), (8, 96), Latency, 1.73),
    step((8, 32), (8, 64), Energy, 1.25),
    step((8, 32), (8, 96), Energy, 1.32),
    step((1, 32), (4, 32), Latency, 1.15),
    step((1, 32), (8, 32), Latency, 1.19),
    step((1, 64), (4, 64), Latency, 1.21),
    step((1, 64), (8, 64), Latency, 1.28),
];

/// What the evaluation reports and no simulation of ours can speak to: where it stands, what it is, and why not.
pub const UNSAID: &[(&str, &str, &str)] = &[
    (
        "Table 3, accuracy",
        "86.00 %, 88.57 %, 95.50 %, 96.00 % in f16; at most 1.07 % less",
        "PhiMoE is not executed here; what capacities cost the demo model stands in [benchmarks](benchmarks.md#quality-of-static-capacities)",
    ),
    (
        "Table 3, each data set",
        "14.66 %, 10.63 %, 21.77 %, 21.00 % dropped; 31.73 %, 34.77 %, 37.49 %, 37.00 % padded",
        "the routing of these data sets is not published: ours is of other text, and is held against the range of the four",
    ),
    (
        "Table 5, parallel execution",
        "0.07 to 0.16 ms and 0.62 to 1.66 mJ per token",
        "how many graphs run at once is not stated; the device file has one queue",
    ),
    (
        "Table 5, C = 1..512",
        "0.25 ms and 1.96 mJ per token; cannot run in parallel",
        "the rows of each call are not stated",
    ),
    ("§5.7", "serial execution 1.4 to 2.9 times slower than parallel", "as parallel execution"),
    (
        "Table 6, seconds",
        "0.572, 1.139 and 1.144 s",
        "prompt, chunk and number of layers are not stated: shares and ratios are compared",
    ),
    ("Table 7, joules", "3.80, 12.67 and 12.13 J", "as Table 6"),
    (
        "Table 8, GPU; Table 9, GPU; §5.8",
        "GPU 1.26 to 5.40 times faster, 1.87 to 4.48 times the energy, 5.65 to 9.41 times the power",
        "no device file has a GPU",
    ),
    (
        "Table 8, NPU",
        "38.27 ms and 275.70 mJ",
        "the shape of the kernel is not stated: its power is compared",
    ),
    ("Table 9, NPU", "1.26 s and 12.21 J", "the shape is not stated: its power is compared"),
    ("§5.8, energy of Ours-TG", "998.4", "the unit is not stated"),
    (
        "§5.8, impact of padding",
        "1.25 to 1.36 times the CPU cycles, 27 to 29 % more time",
        "what runs without padding is not described",
    ),
    (
        "§5.8 and Figure 18, calibration",
        "overlap 86 % of the top 4, 94 % of the top 8; across data sets 65.2 % in prefill, 77.0 % in decoding",
        "the routing of these data sets is not published; `moec inspect A --against B` measures Overlap@K of profiles",
    ),
    (
        "Figures 5, 12, 13 to 17 and 19",
        "curves and bars without numbers",
        "nothing is read off; the numbers in their text are compared",
    ),
    ("§5.8, loads and evictions", "graphs stay where they are", "nothing is measured"),
];
