//! `cargo xtask skip`: what skipping neurons gains while decoding, by the share of them at 0, for
//! docs/neurons.md.

use crate::quality::write_table;
use crate::setup;
use crate::shell::{self, Failed, cargo, shown, stage};

const PAGE: &str = "docs/neurons.md";
const MARKS: [&str; 2] = ["<!-- skip -->", "<!-- /skip -->"];
const USAGE: &str =
    "the options are `--write`, which puts the tables into docs/neurons.md, and `--threads N`";

/// Runs the example that times kernels of whole experts and of neurons by turns.
pub(crate) fn run(options: &[String]) -> Result<(), Failed> {
    let (mut write, mut threads) = (false, None);
    let mut options = options.iter();
    while let Some(option) = options.next() {
        match option.as_str() {
            "--write" => write = true,
            "--threads" => {
                let given = options.next().filter(|n| n.parse::<u32>().is_ok_and(|n| n > 0));
                threads = Some(given.ok_or_else(|| Failed::new("`--threads` takes a number").hint(USAGE))?);
            }
            other => return Err(Failed::new(format!("no option `{other}`")).hint(USAGE)),
        }
    }
    let llvm = setup::run()?;
    let mut bench = cargo("run", Some(&llvm));
    bench.args(["--locked", "--package", "moec-codegen", "--example", "neuron_rate", "--"]);
    bench.args(threads);
    stage("Running", &shown(&bench));
    if !write {
        return shell::run(&mut bench);
    }
    let table =
        shell::output(&mut bench).ok_or_else(|| Failed::new(format!("`{}` failed", shown(&bench))))?;
    println!("{table}");
    write_table(PAGE, MARKS, &format!("\n{table}\n"))
}
