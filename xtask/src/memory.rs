//! `cargo xtask bench-memory`: speed of a model by the initial state of memory, with weights in RAM and
//! mapped ones.
//!
//! A model in the shapes of OLMoE, cut to four layers (3.6 GB in bf16), is built once and kept. Before every
//! run memory is brought into its state again, since a run changes it: mapped weights stay in the page cache,
//! or memory becomes free. The table goes to stdout, the figures to `bench/memory.json`. Nothing else should
//! run meanwhile.

use crate::quality::number;
use crate::setup;
use crate::shell::{self, Failed, program, root, stage};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

const FOLDER: &str = "target/bench-memory";
const OUT: &str = "bench/memory.json";

const MODEL_TOML: &str = "[model]
source = \"hf\"
[shapes]
max_context = 1024
[weights]
experts = \"bf16\"
attention = \"bf16\"
embeddings = \"bf16\"
";

/// Arguments of every run: a prompt, and tokens after it, several times.
const BENCH: [&str; 8] = ["bench", "--json", "--prompt", "128", "--gen", "32", "--repeat", "3"];

/// Places of weights.
const WEIGHTS: [&str; 2] = ["ram", "mmap"];

/// Free memory, in bytes, at which the page cache counts as full: the kernel keeps about as much.
const NONE_FREE: u64 = 400 << 20;
/// Number of times that all of it is measured.
const TURNS: usize = 3;

/// A state of memory: its name, and what brings it about.
type State = (&'static str, fn(&BenchFiles) -> Result<(), Failed>);

/// Every state.
const STATES: [State; 4] = [
    ("free, the bundle in the page cache", |place| {
        place.evict()?;
        place.each_file(read)
    }),
    ("free, the bundle evicted", BenchFiles::evict),
    ("free, half of the bundle in the page cache", |place| {
        place.evict()?;
        place.each_file(|file, bytes| read(file, bytes / 2))
    }),
    ("the page cache full of other files", |place| {
        place.evict()?;
        place.fill()
    }),
];

/// Measurements of one run.
#[derive(Clone, Copy, Debug)]
struct MeasuredRun {
    prefill: f64,
    decode: f64,
    first: f64,
    /// Bytes that a decoded token reads.
    bytes: f64,
    /// Share of the weights in its own memory that is in huge pages.
    huge: Option<f64>,
}

/// The files of the benchmark.
struct BenchFiles {
    bundle: PathBuf,
    /// A file without content, as large as memory: reading it fills the page cache at the speed of memory.
    other: PathBuf,
}

/// Builds, measures, writes the table.
pub(crate) fn run() -> Result<(), Failed> {
    let moec = setup::moec()?;
    let folder = root().join(FOLDER);
    let place = BenchFiles { bundle: folder.join("out.moec"), other: folder.join("other") };
    place.build(&moec, &folder)?;
    let mut found: Vec<(f64, Vec<MeasuredRun>)> = Vec::new();
    for turn in 1..=TURNS {
        for (name, bring) in STATES {
            stage("Measuring", &format!("{name}, a plain read, turn {turn} of {TURNS}"));
            bring(&place)?;
            let plain = plain_read(&moec)?;
            let mut runs = Vec::new();
            for weights in WEIGHTS {
                stage("Measuring", &format!("{name}, weights {weights}, turn {turn} of {TURNS}"));
                bring(&place)?;
                runs.push(measure(&moec, &place.bundle, weights)?);
            }
            found.push((plain, runs));
        }
    }
    let (mut table, mut rows) = (String::new(), Vec::new());
    let _ = writeln!(
        table,
        "| memory | plain read, GB/s | weights | first token, s | prefill, tokens/s | decode, tokens/s | GB/s | of the plain read | in \
         huge pages |\n|---|---|---|---|---|---|---|---|---|"
    );
    for (i, (name, _)) in STATES.iter().enumerate() {
        for (j, weights) in WEIGHTS.iter().enumerate() {
            // Shares are of the same turn: the machine's rate swings from one to the next.
            let of = |what: &dyn Fn(f64, &MeasuredRun) -> f64| {
                let turns = found.iter().skip(i).step_by(STATES.len());
                median(turns.filter_map(|(plain, runs)| Some(what(*plain, runs.get(j)?))).collect())
            };
            let gb = |run: &MeasuredRun| run.decode * run.bytes / 1e9;
            let (plain, first) = (of(&|plain, _| plain), of(&|_, run| run.first));
            let (prefill, decode) = (of(&|_, run| run.prefill), of(&|_, run| run.decode));
            let (rate, share) = (of(&|_, run| gb(run)), of(&|plain, run| gb(run) / plain));
            let huge = of(&|_, run| run.huge.unwrap_or(f64::NAN));
            let huge_share = if huge.is_nan() { "–".to_owned() } else { format!("{:.0} %", 100.0 * huge) };
            let _ = writeln!(
                table,
                "| {name} | {plain:.1} | {weights} | {first:.2} | {prefill:.0} | {decode:.1} | {rate:.1} | {:.0} % | {huge_share} |",
                100.0 * share
            );
            let huge = if huge.is_nan() { "null".to_owned() } else { format!("{huge:.3}") };
            rows.push(format!(
                "  {{ \"memory\": \"{name}\", \"weights\": \"{weights}\", \"turns\": {TURNS}, \"plain_read_gb_per_s\": {plain:.2}, \
                 \"first_token_seconds\": {first:.3}, \"prefill_tokens_per_s\": {prefill:.2}, \
                 \"decode_tokens_per_s\": {decode:.2}, \"decode_gb_per_s\": {rate:.2}, \"of_plain_read\": {share:.3}, \
                 \"huge_share\": {huge} }}"
            ));
        }
    }
    println!("\n{table}");
    drop(fs::remove_file(&place.other));
    write(&root().join(OUT), &format!("[\n{}\n]\n", rows.join(",\n")))
}

impl BenchFiles {
    /// Makes the model and compiles it, unless this very moec has.
    fn build(&self, moec: &Path, folder: &Path) -> Result<(), Failed> {
        let (source, toml) = (folder.join("hf"), folder.join("model.toml"));
        let age = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).ok();
        if age(&self.bundle.join("manifest.json")) > age(moec) {
            return Ok(());
        }
        fs::create_dir_all(folder).map_err(|e| failed(folder, &e))?;
        if !source.exists() {
            let mut synth = program(moec);
            shell::run(synth.args(["synth", "--like", "olmoe", "--layers", "4", "--quiet"]).arg(&source))?;
        }
        write(&toml, MODEL_TOML)?;
        let mut build = program(moec);
        shell::run(build.args(["build", "--no-run", "--quiet", "-o"]).arg(&self.bundle).arg(&toml))
    }

    /// Calls `each` with every weight file and its bytes.
    fn each_file(&self, each: impl Fn(&Path, u64) -> Result<(), Failed>) -> Result<(), Failed> {
        let folder = self.bundle.join("weights");
        let files = fs::read_dir(&folder).map_err(|e| failed(&folder, &e))?;
        for file in files {
            let path = file.map_err(|e| failed(&folder, &e))?.path();
            let bytes = fs::metadata(&path).map_err(|e| failed(&path, &e))?.len();
            each(&path, bytes)?;
        }
        Ok(())
    }

    /// Drops the weights, and what fills memory, from the page cache.
    fn evict(&self) -> Result<(), Failed> {
        // Pages that are not written out yet cannot be dropped.
        let _ = shell::output(&mut program("sync"));
        self.each_file(|file, _| forget(file))?;
        if self.other.exists() {
            forget(&self.other)?;
            drop(fs::remove_file(&self.other));
        }
        Ok(())
    }

    /// Reads another file until no memory is free.
    fn fill(&self) -> Result<(), Failed> {
        let other = File::create(&self.other).map_err(|e| failed(&self.other, &e))?;
        other.set_len(memory("MemTotal:")?).map_err(|e| failed(&self.other, &e))?;
        let mut file = File::open(&self.other).map_err(|e| failed(&self.other, &e))?;
        let mut piece = vec![0; 4 << 20];
        while memory("MemFree:")? > NONE_FREE {
            if file.read(&mut piece).map_err(|e| failed(&self.other, &e))? == 0 {
                break;
            }
        }
        Ok(())
    }
}

/// Drops a file from the page cache.
fn forget(file: &Path) -> Result<(), Failed> {
    let mut dd = program("dd");
    let of = |word: &str, path: &Path| format!("{word}={}", path.display());
    dd.arg(of("if", file)).args(["iflag=nocache", "count=0", "status=none"]);
    shell::output(&mut dd)
        .map(drop)
        .ok_or_else(|| Failed::new("`dd` does not drop a file from the page cache"))
}

/// Reads the first bytes of a file, which the page cache has from then on.
fn read(path: &Path, bytes: u64) -> Result<(), Failed> {
    let file = File::open(path).map_err(|e| failed(path, &e))?;
    std::io::copy(&mut file.take(bytes), &mut std::io::sink()).map(drop).map_err(|e| failed(path, &e))
}

/// A number of `/proc/meminfo`, in bytes.
fn memory(name: &str) -> Result<u64, Failed> {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let value =
        text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse::<u64>().ok());
    value.map(|kib| kib << 10).ok_or_else(|| Failed::new(format!("this system does not say `{name}`")))
}

/// Runs the bundle once.
fn measure(moec: &Path, bundle: &Path, weights: &str) -> Result<MeasuredRun, Failed> {
    let mut bench = program(moec);
    bench.arg("run").arg(bundle).args(BENCH).args(["--weights", weights]);
    let report =
        shell::output(&mut bench).ok_or_else(|| Failed::new(format!("`{}` fails", shell::shown(&bench))))?;
    let of = |key: &str| number(&report, key).unwrap_or(f64::NAN);
    let weights = report.split_once("\"weights\":").map_or("", |(_, rest)| rest);
    let huge = number(weights, "huge_page_bytes").zip(number(weights, "bytes").filter(|&b| b > 0.0));
    Ok(MeasuredRun {
        prefill: of("prefill_tokens_per_s"),
        decode: of("decode_tokens_per_s"),
        first: of("first_token_seconds"),
        bytes: of("bytes_per_decoded_token"),
        huge: huge.map(|(huge, all)| huge / all),
    })
}

/// GB/s at which all cores read anonymous memory that they have written before.
fn plain_read(moec: &Path) -> Result<f64, Failed> {
    let mut profile = program(moec);
    profile.args(["profile-device", "--quiet", "--json", "--no-matmul"]);
    let rate = shell::output(&mut profile).and_then(|json| number(&json, "read_gb_per_s"));
    rate.ok_or_else(|| Failed::new(format!("`{}` does not say how fast memory is", shell::shown(&profile))))
}

/// The median; NaN without values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn write(path: &Path, text: &str) -> Result<(), Failed> {
    fs::write(path, text).map_err(|e| failed(path, &e))
}

fn failed(path: &Path, e: &std::io::Error) -> Failed {
    Failed::new(format!("`{}`: {e}", path.display()))
}
