//! `cargo xtask stress-serve`, `hostile-requests` and `bench-serve`: `run serve` under clients that come and
//! go, under hostile ones, and compared with llama.cpp's server.
//!
//! The clients are Rust programs, examples of `moec-testing`: they share the server's cores, so they must
//! cost little.

use crate::peers;
use crate::setup;
use crate::shell::{self, Failed, cargo, program, root, stage};
use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;

const FOLDER: &str = "target/stress-serve";
const HOSTILE_FOLDER: &str = "target/hostile-requests";
const FERRIS: &str = "golden/models/ferris";
/// A chat template for it.
const TEMPLATE: &str = "golden/plain.jinja";
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
/// Four slots, which a case requests at once.
const HOSTILE_SHAPES: &str = "[shapes]
max_context = 1024
prefill_chunk = 64
decode_batch = [1, 2, 4]
";
/// Seconds where none are named.
const SECONDS: u64 = 120;

/// Clients that come and go, on the demo model.
pub(crate) fn stress(args: &[String]) -> Result<(), Failed> {
    let Some(seconds) = seconds(args)? else {
        stage("Usage", "cargo xtask stress-serve [--seconds N]");
        stage(
            "--seconds",
            &format!("N: how long clients ask, half of it with `--exact` [default: {SECONDS}]"),
        );
        return Ok(());
    };
    let (_, bundle) = bundle(FOLDER, SHAPES)?;
    let (template, text) = (root().join(TEMPLATE), root().join(FERRIS).join("eval/text.txt"));
    let mut stress = example("stress_serve", &["run", "--quiet"]);
    stress.arg("--").arg(bundle.join("run")).args([template, text]).arg(seconds.to_string());
    stage("Stressing", &format!("{} for {seconds} s", bundle.display()));
    shell::run(&mut stress)
}

/// Requests, files and clients that are meant to do harm: all cases, or those whose names have one of the
/// words.
pub(crate) fn hostile(words: &[String]) -> Result<(), Failed> {
    if words.iter().any(|word| word == "--help" || word == "-h") {
        stage("Usage", "cargo xtask hostile-requests [PART-OF-A-NAME]…");
        return Ok(());
    }
    let (moec, bundle) = bundle(HOSTILE_FOLDER, HOSTILE_SHAPES)?;
    shell::run(&mut example("hostile_serve", &["build", "--quiet"]))?;
    // The clients of a case have more files open than a shell allows by default.
    let mut play = program("sh");
    play.args(["-c", "ulimit -S -n 4096; exec \"$0\" \"$@\""])
        .arg(shell::target_dir().join("release/examples/hostile_serve"));
    play.arg(moec)
        .arg(&bundle)
        .args([FERRIS, TEMPLATE, HOSTILE_FOLDER].map(|path| root().join(path)))
        .args(words);
    stage("Playing", &format!("hostile cases against {}", bundle.display()));
    shell::run(&mut play)
}

/// The compiler, and the demo model in these shapes, built in a folder of its own.
fn bundle(folder: &str, shapes: &str) -> Result<(PathBuf, PathBuf), Failed> {
    let moec = setup::moec()?;
    let folder = root().join(folder);
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", folder.display()));
    fs::create_dir_all(&folder).map_err(failed)?;
    let (toml, bundle) = (folder.join("model.toml"), folder.join("ferris.moec"));
    let source = root().join(FERRIS);
    fs::write(&toml, format!("[model]\nsource = \"{}\"\n{shapes}", source.display())).map_err(failed)?;
    shell::run(program(&moec).args(["build", "--quiet"]).arg(&toml).arg("-o").arg(&bundle))?;
    Ok((moec, bundle))
}

/// The server compared with llama.cpp's.
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
fn example(name: impl AsRef<OsStr>, subcommand: &[&str]) -> std::process::Command {
    let mut command = cargo(subcommand[0], None);
    command
        .args(&subcommand[1..])
        .args(["--release", "--locked", "--package", "moec-testing", "--example"])
        .arg(name);
    command
}

/// The seconds in the options; `None` if they request help.
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
            .hint("`cargo xtask stress-serve --help` lists them")),
    }
}

#[cfg(test)]
mod tests {
    use super::{SECONDS, seconds};

    #[test]
    fn option_of_seconds_is_parsed() {
        let of = |words: &[&str]| seconds(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>()).ok();
        assert_eq!(of(&[]), Some(Some(SECONDS)));
        assert_eq!((of(&["--seconds", "9"]), of(&["--seconds=10"])), (Some(Some(9)), Some(Some(10))));
        assert_eq!(of(&["--help"]), Some(None));
        for wrong in [&["--seconds"][..], &["--seconds", "3"], &["--seconds", "many"], &["9"]] {
            assert_eq!(of(wrong), None, "{wrong:?}");
        }
    }
}
