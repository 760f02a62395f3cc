//! Plays hostile requests, files and clients against `moec run BUNDLE serve`, and prints what came of each:
//! `cargo xtask hostile-requests` builds a bundle and runs this.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for people")]

#[path = "../../hostile/mod.rs"]
mod hostile;

use hostile::{Bundle, CASES, play};
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [moec, bundle, source, template, scratch, only @ ..] = &*words else {
        eprintln!("usage: hostile_serve MOEC BUNDLE MODEL TEMPLATE SCRATCH [PART-OF-A-NAME]…");
        return ExitCode::from(2);
    };
    let bundle = Bundle {
        moec: moec.into(),
        folder: bundle.into(),
        source: source.into(),
        template: template.into(),
        scratch: scratch.into(),
    };
    let is_selected = |name: &str| only.is_empty() || only.iter().any(|part| name.contains(&**part));
    let (mut played, mut failed) = (0, Vec::new());
    println!("{:<52} {:>6} {:>8} {:>8}  answers", "case", "s", "MiB", "other, s");
    for case in CASES.iter().filter(|case| is_selected(case.name)) {
        played += 1;
        match play(case, &bundle) {
            Ok(seen) => println!(
                "{:<52} {:>6.1} {:>8} {:>8.2}  {}",
                case.name,
                seen.took.as_secs_f64(),
                seen.memory,
                seen.other.as_secs_f64(),
                seen.answers
            ),
            Err(why) => {
                println!("{:<52} FAILED: {}", case.name, why.trim());
                failed.push(case.name);
            }
        }
    }
    if played == 0 {
        eprintln!("error: no case is called so; hint: the command by itself plays and names all");
        return ExitCode::FAILURE;
    }
    println!("{played} cases, {} failed", failed.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
