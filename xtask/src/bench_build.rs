//! `cargo xtask bench-build`: the time of packing, compared with copying the same files, as a table and as
//! `bench/build.json`.
//!
//! Two layers of OLMoE-1B-7B's shapes with random weights, 2.1 GB of bf16, are packed in every format and
//! copied, alternately. Both end when their bytes are on the disk. Where this user may drop the operating
//! system's caches, every turn is done once more with the checkpoint on the disk alone.

use crate::quality::number;
use crate::setup;
use crate::shell::{self, Failed, program, root, stage};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

const FOLDER: &str = "target/bench-build";
const JSON: &str = "bench/build.json";
/// File that makes the operating system drop cached files.
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";
/// Number of times that each is done.
const TURNS: usize = 3;
/// Measured acts: copying, packing in every format, and packing where an earlier bundle has it all.
const WHAT: [&str; 5] = ["copy", "bf16", "q8", "q4", "q4 again"];

/// Measurements of one of [`WHAT`].
#[derive(Default)]
struct Row {
    /// Seconds, of files that the operating system has cached, and of files that it has not.
    seconds: [Vec<f64>; 2],
    /// Bytes written.
    bytes: f64,
    /// Largest peak memory of the build, in bytes; LLVM included.
    peak: f64,
}

/// Measures, prints the table and writes the file.
pub(crate) fn run() -> Result<(), Failed> {
    let moec = setup::moec()?;
    let folder = root().join(FOLDER);
    let failed = |e: io::Error| Failed::new(format!("`{}`: {e}", folder.display()));
    drop(fs::remove_dir_all(&folder));
    fs::create_dir_all(&folder).map_err(failed)?;
    let source = folder.join("hf");
    stage("Writing", "two layers of OLMoE-1B-7B's shapes");
    let mut synth = program(&moec);
    shell::run(synth.args(["synth", "--quiet", "--like", "olmoe", "--layers", "2"]).arg(&source))?;
    let size = bytes_of(&source).map_err(failed)?;
    for format in &WHAT[1..4] {
        let text = format!(
            "[model]\nsource = \"hf\"\n[shapes]\nmax_context = 1024\nprefill_chunk = 256\n[weights]\n\
             experts = \"{format}\"\nattention = \"{format}\"\nembeddings = \"{format}\"\n"
        );
        fs::write(folder.join(format!("{format}.toml")), text).map_err(failed)?;
    }
    let colds = if forget().is_ok() { 2 } else { 1 };
    let mut rows: [Row; WHAT.len()] = Default::default();
    let build = |format: &str, to: &Path, reuse: bool| {
        let mut build = Command::new(&moec);
        build.args(["build", "--no-run", "--quiet", "--json", "-o"]).arg(to);
        build.args((!reuse).then_some("--no-reuse")).arg(folder.join(format!("{format}.toml")));
        shell::output(&mut build).ok_or_else(|| Failed::new(format!("{format} does not build")))
    };
    let earlier = folder.join("earlier");
    build("q4", &earlier, true)?;
    for turn in 0..TURNS {
        for (what, row) in WHAT.iter().zip(&mut rows) {
            for cold in 0..colds {
                stage("Measuring", &format!("{what}, turn {} of {TURNS}", turn + 1));
                if cold == 1 {
                    forget().map_err(failed)?;
                } else {
                    copy(&source, None).map_err(failed)?;
                }
                let to = folder.join("out");
                let (seconds, bytes, peak) = if *what == "copy" {
                    let start = Instant::now();
                    copy(&source, Some(&to)).map_err(failed)?;
                    (start.elapsed().as_secs_f64(), size as f64, 0.0)
                } else {
                    let report = build(what.trim_end_matches(" again"), &to, what.ends_with("again"))?;
                    let of = |key: &str| number(&report, key).unwrap_or(f64::NAN);
                    (of("packing_seconds"), of("weight_bytes"), of("peak_memory_bytes"))
                };
                row.seconds[cold].push(seconds);
                (row.bytes, row.peak) = (bytes, row.peak.max(peak));
                fs::remove_dir_all(&to).map_err(failed)?;
            }
        }
    }
    fs::remove_dir_all(&folder).map_err(failed)?;
    let path = root().join(JSON);
    fs::write(&path, json(size, &rows)).map_err(|e| Failed::new(format!("`{}`: {e}", path.display())))?;
    println!("\n{}", table(size, &rows));
    Ok(())
}

/// Has the operating system forget cached files.
fn forget() -> io::Result<()> {
    fs::write(DROP_CACHES, "1")
}

fn bytes_of(folder: &Path) -> io::Result<u64> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.metadata()?.len())).sum()
}

/// Copies the files of a folder, onto the disk; nowhere: only reads them.
fn copy(from: &Path, to: Option<&Path>) -> io::Result<()> {
    to.map_or(Ok(()), fs::create_dir)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if let Some(to) = to {
            let to = to.join(entry.file_name());
            fs::copy(entry.path(), &to)?;
            File::open(to)?.sync_data()?;
        } else {
            io::copy(&mut File::open(entry.path())?, &mut io::sink())?;
        }
    }
    Ok(())
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

/// Seconds per GB of checkpoint, cached and not, with the rate in GB/s.
fn table(size: u64, rows: &[Row; WHAT.len()]) -> String {
    let gb = size as f64 / 1e9;
    let mut out = String::from(
        "| | cached, s per GB | GB/s | beside copying | from disk, s per GB | written, GB | peak memory, MiB |\n\
         |---|---|---|---|---|---|---|\n",
    );
    let copying = median(&rows[0].seconds[0]).unwrap_or(f64::NAN);
    for (what, row) in WHAT.iter().zip(rows) {
        let [cached, cold] = row.seconds.each_ref().map(|s| median(s));
        let seconds = cached.unwrap_or(f64::NAN);
        let _ = writeln!(
            out,
            "| {what} | {:.2} | {:.2} | {:.2} × | {} | {:.2} | {} |",
            seconds / gb,
            gb / seconds,
            seconds / copying,
            cold.map_or("–".to_owned(), |s| format!("{:.2}", s / gb)),
            row.bytes / 1e9,
            if row.peak > 0.0 { format!("{:.0}", row.peak / f64::from(1 << 20)) } else { "–".to_owned() },
        );
    }
    out
}

fn json(size: u64, rows: &[Row; WHAT.len()]) -> String {
    let list = |values: &[f64]| values.iter().map(|s| format!("{s:.3}")).collect::<Vec<_>>().join(", ");
    let one = |(what, row): (&&str, &Row)| {
        let [cached, cold] = row.seconds.each_ref().map(|s| list(s));
        format!(
            "  \"{what}\": {{ \"cached_seconds\": [{cached}], \"disk_seconds\": [{cold}], \"bytes\": {:.0}, \
             \"peak_memory_bytes\": {:.0} }}",
            row.bytes, row.peak
        )
    };
    let all: Vec<String> = WHAT.iter().zip(rows).map(one).collect();
    format!("{{\n  \"checkpoint_bytes\": {size},\n{}\n}}\n", all.join(",\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_per_gb_of_checkpoint() {
        let row = |cached: &[f64], cold: &[f64]| Row {
            seconds: [cached.to_vec(), cold.to_vec()],
            bytes: 2e9,
            peak: f64::from(1 << 20),
        };
        let rows = [
            row(&[9.0, 2.0, 1.0], &[]),
            row(&[4.0], &[8.0]),
            row(&[1.0], &[1.0]),
            row(&[1.0], &[1.0]),
            row(&[1.0], &[1.0]),
        ];
        let table = table(2_000_000_000, &rows);
        assert!(table.contains("| copy | 1.00 | 1.00 | 1.00 × | – | 2.00 | 1 |"), "{table}");
        assert!(table.contains("| bf16 | 2.00 | 0.50 | 2.00 × | 4.00 | 2.00 | 1 |"), "{table}");
        let json = json(5, &rows);
        assert_eq!(number(&json, "checkpoint_bytes"), Some(5.0));
        assert!(
            json.contains("\"bf16\": { \"cached_seconds\": [4.000], \"disk_seconds\": [8.000],"),
            "{json}"
        );
    }
}
