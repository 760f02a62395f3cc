//! `cargo xtask padding`: what tiers, groups, coverage and sizes of static graphs cost, simulated, for
//! docs/padding.md.
//!
//! The model of golden/models/ferris with a profile of its calibration text, and published shapes with
//! recorded routing.

use crate::quality::write_table;
use crate::shell::{self, Failed, program, root, stage};
use crate::{papers, setup};
use std::fs;

const FERRIS: &str = "golden/models/ferris";
const FOLDER: &str = "target/padding";
const PAGE: &str = "docs/padding.md";
const MARKS: [&str; 2] = ["<!-- padding -->", "<!-- /padding -->"];

/// Simulates and writes the page.
pub(crate) fn run() -> Result<(), Failed> {
    let moec = setup::moec()?;
    let folder = root().join(FOLDER);
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", folder.display()));
    fs::create_dir_all(&folder).map_err(failed)?;
    let ferris = root().join(FERRIS);
    let (toml, trace, bundle) =
        (folder.join("model.toml"), folder.join("ferris.trace"), folder.join("ferris.moec"));
    // Everything is on the CPU, so that no package is written: only the shapes are requested.
    let config = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 1024\nprefill_chunk = 64\n[calibrate]\nprofile = \"{}\"\n\
         [placement]\nexperts = \"cpu\"\nattention = \"cpu\"\n",
        ferris.display(),
        trace.display()
    );
    fs::write(&toml, config).map_err(failed)?;
    stage("Calibrating", "ferris in chunks of 64");
    let mut calibrate = program(&moec);
    calibrate.arg("calibrate").arg(&toml).arg("--text").arg(ferris.join("eval/calibration.txt"));
    shell::run(calibrate.args(["--window", "1024", "--quiet", "-o"]).arg(&trace))?;
    let mut build = program(&moec);
    build.arg("build").arg(&toml).args(["--target", "m2-ultra", "--no-run", "--quiet", "-o"]).arg(&bundle);
    shell::run(&mut build)?;
    stage("Simulating", "settings of [experts]");
    let papers = papers::program()?;
    let mut own = program(&papers);
    own.arg("padding").arg(&bundle).arg("--trace").arg(&trace);
    let mut recorded = program(&papers);
    recorded.arg("padding");
    let mut tables = String::new();
    for command in [&mut own, &mut recorded] {
        let table = shell::output(command).ok_or_else(|| Failed::new("the settings cannot be simulated"))?;
        tables =
            format!("{tables}\n{}\n", table.trim().replace("qwen3_moe:", "ferris (`golden/models/ferris`):"));
    }
    write_table(PAGE, MARKS, &tables)
}
