//! Every figure that the paper prints, beside ours.

use super::experiments::Bench;
use super::machine::{LINK, Machine, PCIE};
use super::models::{DEEPSEEK, MODELS, QWEN};
use super::paper;
use super::report::{OUTPUTS, Report, robust};
use crate::printed::Printed;

/// How far ours may be off to agree.
pub const CLOSE: f64 = 0.10;

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
    /// With TriMoE's schedule.
    pub ours: f64,
    /// With moec's, where that makes a difference.
    pub moec: Option<f64>,
    /// A constant was found from it: it checks nothing.
    pub used: bool,
    /// Why it does not come out, if it does not.
    pub why: &'static str,
}

impl Claim {
    fn new(place: &'static str, what: impl Into<String>, paper: Printed, ours: f64) -> Self {
        Self { place, what: what.into(), unit: "×", paper, ours, moec: None, used: false, why: "" }
    }

    fn moec(self, moec: f64) -> Self {
        Self { moec: Some(moec), ..self }
    }

    fn unit(self, unit: &'static str) -> Self {
        Self { unit, ..self }
    }

    fn why(self, why: &'static str) -> Self {
        Self { why, ..self }
    }

    /// Whether TriMoE's schedule gives it.
    pub fn agrees(&self) -> bool {
        self.paper.error(self.ours).abs() <= CLOSE
    }

    /// Whether moec's gives it.
    pub fn agrees_with_moec(&self) -> bool {
        self.moec.is_some_and(|m| self.paper.error(m).abs() <= CLOSE)
    }

    /// One line.
    pub fn verdict(&self) -> String {
        match (self.used, self.agrees(), self.agrees_with_moec()) {
            (true, ..) => "a constant was found from it".to_owned(),
            (_, true, _) => "agrees".to_owned(),
            (_, _, true) => format!("moec's schedule agrees; {}", self.why),
            _ => self.why.to_owned(),
        }
    }
}

const FETCHES: &str =
    "fetches take the processor's bandwidth, and baselines are strong; see *What the speedup hangs on*";
const SHARES: &str =
    "neither busy time (all of it) nor calculation (this) gives it; the paper does not say what counts";
const BOUND: &str = "the processor waits for memory more than the paper's does: fetches take bandwidth";

/// All of them.
pub fn claims(bench: &Bench, report: &Report) -> Vec<Claim> {
    let mut all = Vec::new();
    for (m, gb) in MODELS.iter().zip(paper::EXPERT_GB) {
        let what = format!("experts of {}", m.name);
        let gib = m.bytes() as f64 / f64::from(1 << 30);
        all.push(Claim::new("Table 2", what, Printed::Is(gb), gib).unit("GiB"));
    }
    let klotski = report.used[0];
    all.push(
        Claim::new("§3.1", "GPU that fetches warm experts", paper::GPU_FETCHING, klotski.gpu).unit("of 1"),
    );
    let warm = Printed::Is(paper::NDP_WARM);
    all.push(Claim::new("§3.1", "near-data units with warm experts", warm, report.warm_on_ndp));
    for (m, [trimoe, moec]) in MODELS.iter().zip(report.speedup()) {
        let what = format!("decode over the best baseline, {}", m.name);
        all.push(Claim::new("§5.2.1, Figure 6", what, paper::SPEEDUP, trimoe).moec(moec).why(FETCHES));
    }
    for ((m, x), of) in MODELS.iter().zip(paper::THROUGHPUT).zip(&report.throughput) {
        let what = format!("end to end, {}, {} tokens", m.name, OUTPUTS[OUTPUTS.len() - 1]);
        let [trimoe, moec] = of[OUTPUTS.len() - 1].plain;
        let why = "less than the decode's, since attention takes its time; see *End to end*";
        all.push(Claim::new("§5.2.2, Figure 7", what, Printed::Is(x), trimoe).moec(moec).why(why));
    }
    all.extend(used(report));
    all.extend(ablation(report));
    all.extend(curves(report));
    for (batch, x, [trimoe, moec]) in robust(report) {
        let what = format!("decode over the best baseline, Qwen3, batch {batch}");
        let why =
            "MoNDE is stronger here; with a GPU that keeps no experts for it moec's schedule comes near";
        all.push(Claim::new("§5.5", what, Printed::Is(x), trimoe).moec(moec).why(why));
    }
    all.extend(migration(bench, report));
    all
}

fn used(report: &Report) -> Vec<Claim> {
    // Columns of Table 3 are the first four systems; moec's schedule is compared with TriMoE's column.
    let mut all = Vec::new();
    let moec = report.used[4];
    for (row, s) in paper::USED.iter().zip(&report.used) {
        let last = row.system == "TriMoE";
        let claim = |what: &str, x: f64, ours: f64, moec: f64| {
            let claim = Claim::new("Table 3", format!("{what}, {}", row.system), Printed::Is(x), ours);
            let claim = claim.unit("of 1").why(BOUND);
            if last { claim.moec(moec) } else { claim }
        };
        all.push(claim("GPU", row.gpu, s.gpu, moec.gpu).why(SHARES));
        all.extend(row.cpu.map(|x| claim("processor's calculation", x, s.cpu_calc, moec.cpu_calc)));
        let idle = "cold experts are few operations: units wait for the processor, or for the GPU's fetches";
        all.extend(row.ndp.map(|x| claim("near-data units", x, s.ndp, moec.ndp).why(idle)));
    }
    all
}

/// Geometric means over the models of what a step adds.
pub fn steps(report: &Report) -> Vec<f64> {
    let n = report.ablation[0].len();
    let ratio = |i: usize, from: usize| {
        let product: f64 = report.ablation.iter().map(|a| a[from] / a[i]).product();
        product.powf(1.0 / report.ablation.len() as f64)
    };
    // The last three begin where the paper's steps end.
    (1..n).map(|i| ratio(i, if i < 4 { i - 1 } else { 3 })).collect()
}

fn ablation(report: &Report) -> Vec<Claim> {
    let why = [
        "the greedy assignment leaves the processor alone with what is not on its DIMM",
        "it moves experts to the GPU, whose fetches slow the processor down",
        "most experts are where they belong; from a layout that knows no loads it adds more than the paper's",
    ];
    let each = paper::ABLATION.iter().zip(steps(report)).zip(why);
    each.map(|(((name, x), ours), why)| Claim::new("§5.3, Figure 8", *name, Printed::Is(*x), ours).why(why))
        .collect()
}

fn curves(report: &Report) -> Vec<Claim> {
    let at = |curve: &[(f64, [f64; 2])], x: f64, system: usize| {
        curve.iter().find(|p| p.0 == x).map_or(0.0, |p| p.1[system])
    };
    let dimms =
        |system| at(&report.dimms, paper::STABLE_DIMMS as f64, system) / at(&report.dimms, 32.0, system);
    let cpu = |system| at(&report.cpu, paper::FLAT_CPU, system) / at(&report.cpu, 1.0, system);
    let flat = Printed::Is(1.0);
    vec![
        Claim::new("§5.4.1, Figure 9(a)", "time with 16 DIMMs over that with 32", flat, dimms(0))
            .moec(dimms(1)),
        Claim::new(
            "§5.4.2, Figure 9(b)",
            "time with half of the processor's rate over all of it",
            flat,
            cpu(0),
        )
        .moec(cpu(1))
        .why("a schedule without fetches has more use for the processor"),
    ]
}

fn migration(bench: &Bench, report: &Report) -> Vec<Claim> {
    let overhead = report.migration.iter().map(|m| m.overhead).fold(0.0, f64::max);
    // Four bytes for each routed expert.
    let kb = (4 * DEEPSEEK.experts * DEEPSEEK.layers) as f64 * 1e-3;
    let window = Claim {
        used: true,
        ..Claim::new("§5.5", "window of Qwen3 at batch 512", paper::WINDOW_MS, report.window_ms)
    };
    let four = relayouts_ms(&bench.machine(), 4);
    vec![
        Claim::new("§4.3", "right decisions of the predictor", paper::ACCURACY, report.accuracy)
            .unit("of 1")
            .why("drifts further than the paper's loads"),
        Claim::new("§4.3", "memory of the predictor, DeepSeek-V2", paper::PREDICTOR_KB, kb).unit("KB"),
        Claim::new("§5.5", "four experts localized at once", paper::MIGRATION_MS, four).unit("ms").why(
            "a link of 25 GB/s carries one expert in more than a millisecond; one prefetch over PCIe takes this long",
        ),
        window.unit("ms"),
        Claim::new("§5.5", "overhead of migration", paper::OVERHEAD, overhead).unit("of 1"),
    ]
}

/// Milliseconds for so many striped experts of Qwen3 to be localized on DIMMs of their own, all at once: each link
/// carries one expert in, and its share of the others out.
pub fn relayouts_ms(machine: &Machine, experts: usize) -> f64 {
    let bytes = QWEN.expert_bytes() as f64;
    let share = bytes / machine.dimms as f64;
    (bytes - share + share * (experts as f64 - 1.0)) / (LINK * machine.link) * 1e3
}

/// Milliseconds of one prefetch of Qwen3.
pub fn prefetch_ms() -> f64 {
    QWEN.expert_bytes() as f64 / PCIE * 1e3
}
