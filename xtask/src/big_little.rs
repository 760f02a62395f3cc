//! `cargo xtask big-little`: what big-little decoding costs in quality and gains in speed, as a table
//! (MoBiLE, Table III).
//!
//! The model of golden/models/ferris is built with little entry points. A profile chooses γ for some shares of
//! fallbacks. For each γ it measures the perplexity of a text, read token by token, and the questions. Then it
//! measures the speed of generating after pieces of that text. A second table counts the experts that are
//! brought ahead, from the disk and over the link to a unit with frames. The tables go to stdout and into
//! docs/benchmarks.md. `cargo xtask big-little --transfers` writes the second one only, which is not timed.

mod transfers;

use crate::quality::{BENCHMARKS, number, write_table};
use crate::setup;
use crate::shell::{self, Failed, program, root, stage};
use std::fmt::Write as _;
use std::fs;

const FERRIS: &str = "golden/models/ferris";
const FOLDER: &str = "target/big-little";
const MARKS: [&str; 2] = ["<!-- big-little -->", "<!-- /big-little -->"];

/// Memory of a run where experts are on disk: little more than the least that works.
const BUDGET: &str = "29 MiB";

/// Thresholds; 1 is the full model. Those that a profile chooses follow the first.
const GAMMAS: [&str; 6] = ["0", "0.5", "0.7", "0.8", "0.9", "1"];

/// Shares of the profile's tokens that fall back, for which the profile chooses γ.
const SHARES: [f64; 3] = [0.1, 0.15, 0.2];

/// Characters of each prompt, prompts, tokens generated after each, and rounds in which every γ has its turn.
const PROMPT: usize = 600;
const PROMPTS: usize = 4;
const TOKENS: &str = "192";
const ROUNDS: usize = 5;

/// Measurements of one γ.
#[derive(Clone, Debug, Default)]
struct Row {
    gamma: String,
    /// Share of the profile's tokens for which the profile chose γ.
    share: Option<f64>,
    /// Output of `moec eval`.
    report: String,
    /// Tokens per second of every generation, by storage of the experts: memory, the disk.
    rates: [Vec<f64>; 2],
    /// Fallback ratio of every generation.
    ratios: Vec<f64>,
    /// Bytes per token that were read from disk.
    read: Vec<f64>,
}

/// Builds, measures, writes the table.
pub(crate) fn run(options: &[String]) -> Result<(), Failed> {
    let moec = setup::moec()?;
    let folder = root().join(FOLDER);
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", folder.display()));
    fs::create_dir_all(&folder).map_err(failed)?;
    let ferris = root().join(FERRIS);
    let text = ferris.join("eval/text.txt");
    let config = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 1024\n[weights]\nactivations = \"f32\"\n\
         [decode]\nbig_little = true\n[calibrate]\n",
        ferris.display()
    );
    let (toml, profile) = (folder.join("model.toml"), folder.join("ferris.trace"));
    fs::write(&toml, &config).map_err(failed)?;
    let mut calibrate = program(&moec);
    calibrate.arg("calibrate").arg(&toml).arg("--text").arg(ferris.join("eval/calibration.txt"));
    shell::run(calibrate.args(["--quiet", "-o"]).arg(&profile))?;
    let mut inspect = program(&moec);
    let of_profile = shell::output(inspect.arg("inspect").arg(&profile).arg("--json")).unwrap_or_default();
    let gammas = gammas(&of_profile)?;
    let config = format!("{config}profile = \"{}\"\n", profile.display());
    let corpus = fs::read_to_string(&text).map_err(failed)?;
    let prompts = prompts(&corpus);
    transfers::run(&moec, &folder, &config, &prompts)?;
    if options.iter().any(|option| option == transfers::ALONE) {
        return Ok(());
    }
    let bundles = ["memory", "disk"].map(|storage| folder.join(format!("{storage}.moec")));
    // The routing of the calibration text decides which experts stay in memory.
    for (bundle, budget) in bundles.iter().zip(["", BUDGET]) {
        fs::write(&toml, format!("{config}[memory]\nbudget = \"{budget}\"\n")).map_err(failed)?;
        let mut build = program(&moec);
        build.arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(bundle);
        shell::run(&mut build)?;
    }

    stage("Measuring", "quality");
    let mut measure = program(&moec);
    measure.arg("eval").arg(&bundles[0]).arg("--text").arg(&text);
    measure.arg("--qa").arg(ferris.join("eval/needle.jsonl"));
    let listed: Vec<&str> = gammas.iter().map(|(gamma, _)| &**gamma).collect();
    measure.args(["--big-little", "--json", "--gamma", &listed.join(",")]);
    let report = shell::output(&mut measure).ok_or_else(|| Failed::new("the bundle cannot be measured"))?;
    let each: Vec<&str> = report.split("\"gamma\":").skip(1).collect();
    if each.len() != gammas.len() {
        return Err(Failed::new("`moec eval` printed an unexpected report"));
    }
    let row = |((gamma, share), report): ((String, Option<f64>), &&str)| Row {
        gamma,
        share,
        report: (*report).to_owned(),
        ..Row::default()
    };
    let mut rows: Vec<Row> = gammas.into_iter().zip(&each).map(row).collect();

    stage("Measuring", "speed");
    for prompt in prompts {
        for _ in 0..ROUNDS {
            for row in &mut rows {
                for (storage, bundle) in bundles.iter().enumerate() {
                    let mut generate = program(&moec);
                    generate.arg("run").arg(bundle).args([
                        "generate",
                        "--ignore-eos",
                        "--json",
                        "-n",
                        TOKENS,
                    ]);
                    generate.args(["--gamma", &row.gamma, "--prompt", &prompt]);
                    let report = shell::output(&mut generate).unwrap_or_default();
                    let of = |key: &str| {
                        let failed =
                            || Failed::new(format!("nothing was generated with gamma {}", row.gamma));
                        number(&report, key).ok_or_else(failed)
                    };
                    row.rates[storage].push(of("decode_tokens_per_s")?);
                    match storage {
                        0 => row.ratios.push(of("fallback_ratio")?),
                        _ => row.read.push(of("bytes")? / f64::from(TOKENS.parse::<u16>().unwrap_or(1))),
                    }
                }
            }
        }
    }
    let table = table(&rows)?;
    println!("\n{table}");
    write_table(BENCHMARKS, MARKS, &table)
}

/// Pieces of a text.
fn prompts(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let step = chars.len() / PROMPTS;
    (0..PROMPTS).map(|i| chars.iter().skip(i * step).take(PROMPT).collect()).collect()
}

/// All γ of the table, with the share of fallbacks that the profile chose it for; `profile` is the output of
/// `moec inspect`.
fn gammas(profile: &str) -> Result<Vec<(String, Option<f64>)>, Failed> {
    let list = profile.split_once("\"gammas\":").map_or("", |(_, list)| list);
    let mut chosen = Vec::new();
    for share in SHARES {
        let objects = list.split('}');
        let mut own = objects.filter(|o| number(o, "fallback_share") == Some(share));
        let gamma = own.find_map(|o| number(o, "gamma"));
        let gamma =
            gamma.ok_or_else(|| Failed::new(format!("the profile has no γ for a share of {share}")))?;
        chosen.push((gamma.to_string(), Some(share)));
    }
    let fixed = |gamma: &&str| ((*gamma).to_owned(), None);
    let (first, others) = GAMMAS.split_at(1);
    Ok(first.iter().map(fixed).chain(chosen).chain(others.iter().map(fixed)).collect())
}

/// The rows as Markdown; increases and speeds are against the last, the full model.
fn table(rows: &[Row]) -> Result<String, Failed> {
    let mut out = String::from(
        "| γ | all experts | perplexity | increase | needle | all experts when generating | decode, tokens/s | times γ = 1 \
         | from disk, tokens/s | times γ = 1 | read per token |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let perplexity = |row: &Row| {
        number(&row.report, "perplexity").ok_or_else(|| Failed::new("no perplexity was measured"))
    };
    let Some(full) = rows.last() else { return Ok(out) };
    let reference = perplexity(full)?;
    for row in rows {
        let share = |x: Option<f64>| x.map_or("–".to_owned(), |x| format!("{:.1} %", 100.0 * x));
        let mean = row.ratios.iter().sum::<f64>() / row.ratios.len().max(1) as f64;
        let speed = |storage: usize| {
            let rate = median(&row.rates[storage]);
            format!("{rate:.0} | {:.2}×", rate / median(&full.rates[storage]))
        };
        // Writing to a string does not fail.
        let _ = writeln!(
            out,
            "| {} | {} | {:.4} | {:+.2} % | {} | {} | {} | {} | {:.2} MB |",
            row.share.map_or_else(
                || row.gamma.clone(),
                |share| format!("{} (`\"{:.0}%\"`)", row.gamma, 100.0 * share)
            ),
            share(number(&row.report, "fallback_ratio")),
            perplexity(row)?,
            100.0 * (perplexity(row)? / reference - 1.0),
            share(number(&row.report, "exact_match")),
            share(Some(mean)),
            speed(0),
            speed(1),
            median(&row.read) / 1e6,
        );
    }
    Ok(out)
}

fn median(of: &[f64]) -> f64 {
    let mut sorted = of.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::{GAMMAS, Row, SHARES, gammas, table};

    #[test]
    fn gammas_of_the_profile_follow_the_first() {
        let object = |share: f64| format!("{{\n \"fallback_share\": {share},\n \"gamma\": {}}}", share / 2.0);
        let list = [0.05, 0.1, 0.15, 0.2, 0.3].map(object).join(",\n");
        let Ok(all) = gammas(&format!("\"confidence\": {{\"gammas\": [{list}], \"tokens\": 8}}")) else {
            panic!("a list")
        };
        let named: Vec<(&str, Option<f64>)> = all.iter().map(|(gamma, share)| (&**gamma, *share)).collect();
        let [a, b, c] = SHARES.map(Some);
        assert_eq!(named[..5], [("0", None), ("0.05", a), ("0.075", b), ("0.1", c), ("0.5", None)]);
        assert_eq!(named.len(), GAMMAS.len() + SHARES.len());
        assert!(gammas("{}").is_err());
    }

    #[test]
    fn rows_are_compared_with_the_full_model() {
        let row = |gamma: &str, report: &str, rate: f64| Row {
            gamma: gamma.to_owned(),
            share: None,
            report: report.to_owned(),
            rates: [vec![rate, 0.0, 2.0 * rate], vec![3.0 * rate]],
            ratios: vec![0.25, 0.75],
            read: vec![1.5e6],
        };
        let rows = [
            row("0.5", " 0.5,\n \"perplexity\": 20.2,\n \"fallback_ratio\": 0.1\n}", 30.0),
            row("1", " 1.0, \"perplexity\": 20.0, \"exact_match\": 0.97}", 20.0),
        ];
        let Ok(table) = table(&rows) else { panic!("a table") };
        let first = "| 0.5 | 10.0 % | 20.2000 | +1.00 % | – | 50.0 % | 30 | 1.50× | 90 | 1.50× | 1.50 MB |";
        assert!(table.contains(first), "{table}");
        let chosen = [Row { share: Some(0.15), ..rows[0].clone() }, rows[1].clone()];
        let Ok(table) = super::table(&chosen) else { panic!("a table") };
        assert!(table.contains("| 0.5 (`\"15%\"`) | 10.0 % |"), "{table}");
        let last = "| 1 | – | 20.0000 | +0.00 % | 97.0 % | 50.0 % | 20 | 1.00× | 60 | 1.00× | 1.50 MB |";
        assert!(table.contains(last), "{table}");
    }
}
