//! `cargo xtask demo`: from a fresh clone to generated text.

use crate::shell::{self, Failed, program, root, shown, stage};
use crate::{prebuilt, setup};

/// Profile of `Cargo.toml`: optimised for the parts that a demo waits for.
const PROFILE: &str = "demo";
const MODEL: &str = "golden/models/ferris/model.toml";
const BUNDLE: &str = "target/demo/ferris.moec";
const PROMPT: &str = "Each value in Rust has";

/// Builds moec, compiles a model, runs it.
pub(crate) fn run() -> Result<(), Failed> {
    let llvm = setup::run()?;
    let bundle = root().join(BUNDLE);
    if let Some(folder) = bundle.parent() {
        std::fs::create_dir_all(folder).map_err(|e| Failed::new(format!("`{}`: {e}", folder.display())))?;
    }
    stage("Building", "moec");
    prebuilt::share(PROFILE, &llvm)?;
    shell::run(&mut prebuilt::build(PROFILE, &llvm, true))?;
    let mut moec = program(root().join(shell::target_dir()).join(PROFILE).join("moec"));
    moec.args(["build", MODEL, "-o", BUNDLE]);
    step(&format!("moec build {MODEL} -o {BUNDLE}"), &mut moec)?;
    let mut generate = program(bundle.join("run"));
    generate.args(["generate", "--prompt", PROMPT, "-n", "64"]);
    generate.args(["--temperature", "0.8", "--top-p", "0.9", "--seed", "1"]);
    step(&shown(&generate), &mut generate)?;
    let mut bench = program(bundle.join("run"));
    bench.arg("bench");
    step(&shown(&bench), &mut bench)?;
    stage(
        "Next",
        "`cargo xtask install` puts an optimised `moec` on the path; README, \"A model of your own\", goes on",
    );
    Ok(())
}

/// Says a command line and runs it.
fn step(line: &str, command: &mut std::process::Command) -> Result<(), Failed> {
    eprintln!("\n$ {line}");
    shell::run(command)
}
