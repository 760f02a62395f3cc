//! `cargo xtask torment-serve` and `cargo xtask bench-serve`: `run serve` under clients that come and go, and beside llama.cpp's server.
//!
//! Who asks is Rust, examples of `moec-testing`: beside the server, on the same cores, clients had better cost little.

use crate::peers;
use crate::setup;
use crate::shell::{self, Failed, cargo, program, root, stage};
use std::ffi::OsStr;
use std::fs;

const FOLDER: &str = "target/torment-serve";
const FERRIS: &str = "golden/models/ferris";
/// Several sizes of batches: sequences that come and go move from one to the other.
const SHAPES: &str = "[shapes]
max_context = 1024
prefill_chunk = 64
decode_batch = [1, 2, 4, 8]
[weights]
experts = \"bf16\"
attention = \"bf16\"
embeddings = \"bf16\"
";
/// Seconds where none are named.
const SECONDS: u64 = 120;

/// Clients that come and go, on the demo model.
pub(crate) fn torment(args: &[String]) -> Result<(), Failed> {
    let Some(seconds) = seconds(args)? else {
        stage("Usage", "cargo xtask torment-serve [--seconds N]");
        stage(
            "--seconds",
            &format!("N: how long clients ask, half of it with `--exact` [default: {SECONDS}]"),
        );
        return Ok(());
    };
    let moec = setup::moec()?;
    let folder = root().join(FOLDER);
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", folder.display()));
    fs::create_dir_all(&folder).map_err(failed)?;
    let (toml, bundle) = (folder.join("model.toml"), folder.join("ferris.moec"));
    let source = root().join(FERRIS);
    fs::write(&toml, format!("[model]\nsource = \"{}\"\n{SHAPES}", source.display())).map_err(failed)?;
    shell::run(program(moec).args(["build", "--quiet"]).arg(&toml).arg("-o").arg(&bundle))?;
    let (template, text) = (root().join("golden/plain.jinja"), source.join("eval/text.txt"));
    let mut torment = example("torment_serve", &["run", "--quiet"]);
    torment.arg("--").arg(bundle.join("run")).args([template, text]).arg(seconds.to_string());
    stage("Tormenting", &format!("{} for {seconds} s", bundle.display()));
    shell::run(&mut torment)
}

/// The server beside llama.cpp's.
pub(crate) fn bench(args: &[String]) -> Result<(), Failed> {
    let mut build = example("load_serve", &["build"]);
    stage("Building", "clients");
    shell::run(&mut build)?;
    let clients = shell::target_dir().join("release/examples/load_serve");
    let mut all = vec!["--load".to_owned(), clients.display().to_string()];
    all.extend(args.iter().cloned());
    peers::run(peers::SERVE, &all)
}

/// A cargo command for an example of `moec-testing`.
fn example(name: impl AsRef<OsStr>, verb: &[&str]) -> std::process::Command {
    let mut command = cargo(verb[0], None);
    command
        .args(&verb[1..])
        .args(["--release", "--locked", "--package", "moec-testing", "--example"])
        .arg(name);
    command
}

/// The seconds that options name; `None` where they ask for help.
fn seconds(args: &[String]) -> Result<Option<u64>, Failed> {
    let words: Vec<&str> = args.iter().flat_map(|word| word.splitn(2, '=')).collect();
    match *words {
        [] => Ok(Some(SECONDS)),
        ["--help" | "-h"] => Ok(None),
        ["--seconds", n] => match n.parse() {
            Ok(n) if n >= 4 => Ok(Some(n)),
            _ => Err(Failed::new(format!("`--seconds` is `{n}`, expected a number from 4 up"))),
        },
        _ => Err(Failed::new(format!("there is no option `{}`", args.join(" ")))
            .hint("`cargo xtask torment-serve --help` lists them")),
    }
}

#[cfg(test)]
mod tests {
    use super::{SECONDS, seconds};

    #[test]
    fn options_are_seconds() {
        let of = |words: &[&str]| seconds(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>()).ok();
        assert_eq!(of(&[]), Some(Some(SECONDS)));
        assert_eq!((of(&["--seconds", "9"]), of(&["--seconds=10"])), (Some(Some(9)), Some(Some(10))));
        assert_eq!(of(&["--help"]), Some(None));
        for wrong in [&["--seconds"][..], &["--seconds", "3"], &["--seconds", "many"], &["9"]] {
            assert_eq!(of(wrong), None, "{wrong:?}");
        }
    }
}
