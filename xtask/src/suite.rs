//! `cargo xtask test`: everything that must hold before a change goes in.

use crate::shell::{self, Failed, cargo, output, program, shown, stage};
use crate::{apple, cross, setup};
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Formatting, lints, a check for macOS, documentation, tests, in this order: what is quick to fail comes first.
pub(crate) fn run() -> Result<(), Failed> {
    let start = Instant::now();
    let llvm = setup::run()?;
    let mut skipped: Vec<String> = cross::run().into_iter().collect();
    if has("fmt") {
        formatting()?;
    } else {
        skipped.push("formatting (rustup component add rustfmt)".into());
    }
    if has("clippy") {
        let mut clippy = cargo("clippy", Some(&llvm));
        clippy.args(["--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]);
        step(&mut clippy)?;
    } else {
        skipped.push("lints (rustup component add clippy)".into());
    }
    skipped.extend(apple::if_quick()?);
    let mut doc = cargo("doc", Some(&llvm));
    doc.args(["--workspace", "--no-deps", "--locked"]).env("RUSTDOCFLAGS", "-D warnings");
    step(&mut doc)?;
    let mut test = cargo("test", Some(&llvm));
    test.args(["--workspace", "--locked"]);
    let totals = tests(&mut test)?;
    for what in skipped {
        stage("Skipped", &what);
    }
    println!("\n{totals}; everything in {:.0}s", start.elapsed().as_secs_f64());
    Ok(())
}

/// `cargo fmt --check`.
pub(crate) fn formatting() -> Result<(), Failed> {
    step(cargo("fmt", None).args(["--all", "--check"])).map_err(|f| f.hint("`cargo fmt` does it"))
}

/// Whether cargo has a component.
fn has(component: &str) -> bool {
    output(program(format!("cargo-{component}")).arg("--version")).is_some()
        || output(cargo(component, None).arg("--version")).is_some()
}

fn step(command: &mut Command) -> Result<(), Failed> {
    stage("Running", &shown(command));
    shell::run(command)
}

/// Runs the tests, passing on what they print, and adds up the closing lines of all test binaries.
fn tests(command: &mut Command) -> Result<String, Failed> {
    stage("Running", &shown(command));
    let failed = |e: std::io::Error| Failed::new(format!("the tests do not run: {e}"));
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(failed)?;
    let mut counts = [0u64; 3];
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line.map_err(failed)?;
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            if line.starts_with("test result:") {
                for (count, word) in counts.iter_mut().zip(["passed", "failed", "ignored"]) {
                    *count += number_before(&line, word);
                }
            }
        }
    }
    std::io::stdout().flush().map_err(failed)?;
    let status = child.wait().map_err(failed)?;
    let [passed, wrong, ignored] = counts;
    let totals = format!("{passed} passed; {wrong} failed; {ignored} ignored");
    if status.success() {
        return Ok(format!("test result: ok. {totals}"));
    }
    Err(Failed::new(format!("test result: FAILED. {totals}")))
}

/// `12` of `…; 12 passed; …`.
fn number_before(line: &str, word: &str) -> u64 {
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|w| w.trim_end_matches(';') == word);
    at.and_then(|i| words.get(i.checked_sub(1)?)).and_then(|n| n.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::number_before;

    #[test]
    fn closing_lines_are_read() {
        let line =
            "test result: ok. 12 passed; 0 failed; 3 ignored; 0 measured; 0 filtered out; finished in 0.05s";
        assert_eq!(["passed", "failed", "ignored", "none"].map(|w| number_before(line, w)), [12, 0, 3, 0]);
    }
}
