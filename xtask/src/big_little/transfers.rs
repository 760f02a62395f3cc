//! Experts that are brought before they are requested while tokens are decoded twice (MoBiLE, §III-B): from
//! the disk into memory, and over the link into the frames of a modelled unit.

use super::TOKENS;
use crate::quality::{BENCHMARKS, number, write_table};
use crate::shell::{self, Failed, program, root, stage};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// Option that measures nothing else.
pub(super) const ALONE: &str = "--transfers";

const MARKS: [&str; 2] = ["<!-- big-little-transfers -->", "<!-- /big-little-transfers -->"];
const GAMMA: &str = "0.7";
/// Maximum number of layers ahead; with 0 nothing is brought ahead.
const DEPTHS: [&str; 4] = ["0", "1", "2", "3"];
/// Prompts that are counted: counts need no repetition.
const PROMPTS: usize = 2;
/// Memory of a run where experts are on disk: little more than the least with gates of three layers.
const BUDGET: &str = "30 MiB";
/// The modelled unit; the milliseconds that one row and 64 rows with a million weights take by memory; and the
/// rates of its link, in 10⁹ bytes per second.
const DEVICE: &str = "targets/mirror/mirror.toml";
const TIMES: [(&str, [&str; 2]); 2] = [("ram", ["2", "40"]), ("vram", ["0.2", "1"])];
const LINKS: [&str; 2] = ["25", "0.5"];

/// Counts of one place, for one depth.
#[derive(Clone, Debug, Default, PartialEq)]
struct Row {
    place: String,
    depth: &'static str,
    /// Experts of second passes, and those of them that the first pass had named.
    second_pass: [f64; 2],
    /// Experts that were brought ahead, and those of them that were used.
    ahead: [f64; 2],
    /// Experts that a layer requested and that were not there.
    waited: f64,
    /// By layers ahead: as `ahead`; empty for the disk, which does not count them.
    by_depth: Vec<[f64; 2]>,
}

/// Builds, counts, writes the table.
pub(super) fn run(moec: &Path, folder: &Path, config: &str, prompts: &[String]) -> Result<(), Failed> {
    stage("Counting", "experts that are brought ahead");
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", folder.display()));
    let toml = folder.join("transfers.toml");
    let build = |name: &str, more: &str, target: Option<&Path>| {
        fs::write(&toml, format!("{config}{more}")).map_err(failed)?;
        let bundle = folder.join(format!("{name}.moec"));
        let mut build = program(moec);
        build.arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(&bundle);
        if let Some(target) = target {
            build.arg("--target").arg(target);
        }
        shell::run(&mut build).map(|()| bundle)
    };
    let disk = build("ahead", &format!("[memory]\nbudget = \"{BUDGET}\"\nprefetch = 3\n"), None)?;
    let mut places = vec![("the disk".to_owned(), disk, Block::DISK)];
    for link in LINKS {
        let device = folder.join(format!("link-{link}.toml"));
        fs::write(&device, device_file(link)?).map_err(failed)?;
        // All experts are computed there.
        let more = "[placement]\npolicy = \"adapmoe\"\nexperts = \"mirror:50%\"\n";
        let bundle = build(&format!("link-{link}"), more, Some(&device))?;
        places.push((format!("a link of {link} GB/s"), bundle, Block::LINK));
    }
    let mut rows = Vec::new();
    for (place, bundle, block) in &places {
        for depth in DEPTHS {
            let mut row = Row { place: place.clone(), depth, ..Row::default() };
            for prompt in prompts.iter().take(PROMPTS) {
                let mut generate = program(moec);
                generate.args(["run", "--emulate"]).arg(bundle);
                generate.args(["generate", "--ignore-eos", "--json", "-n", TOKENS, "--gamma", GAMMA]);
                generate.args(["--prefetch", depth, "--prompt", prompt]);
                row.add(&shell::output(&mut generate).unwrap_or_default(), block)?;
            }
            rows.push(row);
        }
    }
    let table = table(&rows);
    println!("\n{table}");
    write_table(BENCHMARKS, MARKS, &table)
}

/// The device file of the modelled unit with a link of so many 10⁹ bytes per second.
fn device_file(link: &str) -> Result<String, Failed> {
    let text = fs::read_to_string(root().join(DEVICE));
    let mut text = text.map_err(|e| Failed::new(format!("`{DEVICE}`: {e}")))?;
    text = text.replace("gb_per_s = 25", &format!("gb_per_s = {link}"));
    for (memory, ms) in TIMES {
        let line = format!("memory = \"{memory}\"\n");
        let point =
            |(rows, ms)| format!("{{ rows = {rows}, weights = 1000000, ms = {ms}, source = \"assumed\" }}");
        let points: Vec<String> = ["1", "64"].into_iter().zip(ms).map(point).collect();
        text = text.replacen(&line, &format!("{line}matmul = [{}]\n", points.join(", ")), 1);
    }
    Ok(text)
}

/// Object of a report with the counts, and its names of them.
#[derive(Clone, Copy, Debug)]
struct Block {
    name: &'static str,
    ahead: &'static str,
    waited: &'static str,
}

impl Block {
    const DISK: Self = Self { name: "\"cache\":", ahead: "read_ahead", waited: "misses" };
    const LINK: Self = Self { name: "\"frames\":", ahead: "ahead", waited: "fetched" };
}

impl Row {
    /// Adds the counts of a report.
    fn add(&mut self, report: &str, block: &Block) -> Result<(), Failed> {
        let (_, text) = report
            .split_once(block.name)
            .ok_or_else(|| Failed::new(format!("nothing was generated with experts from {}", self.place)))?;
        let second_pass = text.split_once("\"second_pass\":").map_or("", |(_, of)| of);
        let of = |text: &str, key: &str| {
            number(text, key).ok_or_else(|| Failed::new(format!("the report lacks `{key}`")))
        };
        for (sum, key) in self.second_pass.iter_mut().zip(["used", "named"]) {
            *sum += of(second_pass, key)?;
        }
        for (sum, key) in self.ahead.iter_mut().zip([block.ahead, "predicted"]) {
            *sum += of(text, key)?;
        }
        self.waited += of(text, block.waited)?;
        for (depth, of_depth) in text.split("\"transferred\":").skip(1).enumerate() {
            if self.by_depth.len() == depth {
                self.by_depth.push([0.0; 2]);
            }
            let transferred: String =
                of_depth.chars().skip_while(|c| c.is_whitespace()).take_while(char::is_ascii_digit).collect();
            if let Some([sum, used]) = self.by_depth.get_mut(depth) {
                *sum += transferred.parse().unwrap_or(0.0);
                *used += of(of_depth, "used")?;
            }
        }
        Ok(())
    }
}

/// The rows as Markdown.
fn table(rows: &[Row]) -> String {
    let mut out = String::from(
        "| experts from | layers ahead | of second passes | named by the first pass | brought ahead | used | wasted | waited for \
         | used of those brought 1, 2, 3 layers ahead |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let [used, named] = row.second_pass;
        let [ahead, came] = row.ahead;
        // Without prefetching from disk they are not counted.
        let second_pass = if used > 0.0 {
            format!("{used:.0} | {:.1} %", 100.0 * named / used)
        } else {
            "– | –".to_owned()
        };
        let depths: Vec<String> =
            row.by_depth.iter().map(|[sum, used]| format!("{used:.0} of {sum:.0}")).collect();
        // Writing to a string does not fail.
        let _ = writeln!(
            out,
            "| {} | {} | {second_pass} | {ahead:.0} | {came:.0} | {:.0} | {:.0} | {} |",
            row.place,
            row.depth,
            ahead - came,
            row.waited,
            if depths.is_empty() { "–".to_owned() } else { depths.join(", ") },
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{Block, Row, table};

    #[test]
    fn counts_are_those_of_their_place() {
        let mut row = Row { place: "a link".to_owned(), depth: "2", ..Row::default() };
        let report = "{\"assigned\": {\"fetched\": 90, \"frames\": {\"ahead\": 9, \"by_layers_ahead\": [\
            {\"transferred\": 7, \"used\": 5}, {\"transferred\": 2, \"used\": 1}], \"fetched\": 4, \"predicted\": 6, \
            \"second_pass\": {\"named\": 18, \"used\": 20}}, \"predicted\": 0.5}}";
        for _ in 0..2 {
            assert!(row.add(report, &Block::LINK).is_ok());
        }
        let table = table(&[row.clone()]);
        let line = "| a link | 2 | 40 | 90.0 % | 18 | 12 | 6 | 8 | 10 of 14, 2 of 4 |";
        assert!(table.contains(line), "{table}");
        assert!(row.add(report, &Block::DISK).is_err());
        let report = "{\"cache\": {\"misses\": 3, \"predicted\": 1, \"read_ahead\": 2, \"second_pass\": {\"named\": 4, \"used\": 4}}}";
        let mut row = Row::default();
        assert!(row.add(report, &Block::DISK).is_ok());
        assert_eq!((row.ahead, row.waited, row.by_depth.len()), ([2.0, 1.0], 3.0, 0));
    }
}
