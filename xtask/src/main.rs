//! The project's own commands: `cargo xtask demo`, `cargo xtask test`, …
//!
//! Depends on nothing but std and the table of what tests need, so that a fresh machine has it in a second.
#![allow(clippy::cast_possible_truncation, reason = "figures for readers")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for people")]

mod accuracy;
mod amx;
mod apple;
mod apt;
mod archives;
mod bench_build;
mod big_little;
mod book;
mod coreml;
mod crates;
mod cross;
mod cuda;
mod debian;
mod demo;
mod deny;
mod dist;
mod docs;
mod fault_injection;
mod fit;
mod fuzz;
mod gpu_check;
mod hit_rates;
mod llvm;
mod memory;
mod notices;
mod padding;
mod papers;
mod peers;
mod prebuilt;
mod qnn;
mod quality;
mod rounding;
mod rust;
mod serve;
mod setup;
mod shapes;
mod shell;
mod size;
mod skip;
mod suite;
mod tools;
mod venv;
mod words;

use shell::Failed;
use std::process::ExitCode;

/// A command: name, what it does, and its function.
type Command = (&'static str, &'static str, fn() -> Result<(), Failed>);

/// Every command.
const COMMANDS: &[Command] = &[
    ("demo", "build moec, compile the model of golden/models/ferris, generate text, measure", demo::run),
    (
        "test",
        "formatting, lints, documentation and every test; takes options and names, `--help` lists them",
        || suite::run(&options()),
    ),
    ("setup", "find LLVM, a C compiler, and what tests need; install them on Debian or Ubuntu", || {
        setup::run()?;
        for what in cross::run().into_iter().chain(tools::run()) {
            shell::stage("Missing", &what);
        }
        Ok(())
    }),
    ("install", "put moec on the path: cargo install, with the LLVM that is here", setup::install),
    (
        "coreml",
        "install what writes Core ML packages: coremltools in a folder of its own, and the helper",
        coreml::run,
    ),
    ("qnn", "install QNN and its emulator of Hexagon, and onnxruntime, in a folder of their own", qnn::run),
    ("gguf", "install the gguf package, with which tests write GGUF files, in a folder of its own", || {
        venv::run(&venv::GGUF)
    }),
    ("openai", "install OpenAI's client, with which tests ask `run serve`, in a folder of its own", || {
        venv::run(&venv::OPENAI)
    }),
    ("actionlint", "install actionlint, with which tests check workflows, in a folder of its own", || {
        venv::run(&venv::ACTIONLINT)
    }),
    (
        "kubernetes",
        "install kubernetes-validate, with which tests check manifests, in a folder of its own",
        || venv::run(&venv::KUBERNETES),
    ),
    (
        "cuda",
        "install NVIDIA's assembler of PTX, for machine code in bundles, in moec's cache folder",
        cuda::run,
    ),
    (
        "gpu-check",
        "run bundles on an NVIDIA GPU and write a report, or pack that for another machine; takes options, `--help` lists them",
        || gpu_check::run(&options()),
    ),
    (
        "check-apple",
        "type-check for macOS what ships there; gets what is missing from rustup or Debian",
        apple::run,
    ),
    ("docs", "write the generated pages of docs/", docs::run),
    (
        "book",
        "build the pages as a book with mdBook, into target/book/html; installs mdBook if it is missing",
        book::run,
    ),
    ("crates", "draw the crates of the workspace and their arrows, in ARCHITECTURE.md", crates::run),
    ("deny", "check licences, sources and advisories of all crates with cargo-deny", deny::run),
    ("notices", "write the licences of what is linked into `run`, which bundles carry", notices::run),
    (
        "fuzz",
        "run the targets of fuzz/ for a minute each; takes targets and options, `--help` lists them",
        || fuzz::run(&options()),
    ),
    ("dist", "pack moec: a tarball, a Debian package, checksums; takes options, `--help` lists them", || {
        dist::run(&options())
    }),
    (
        "words",
        "seek phrases that have a plainer word, and docstrings that begin with a question word; takes options",
        || words::run(&options()),
    ),
    ("size", "count the lines of every crate, and fail where one has more than `size.txt` allows", size::run),
    (
        "quality",
        "measure what static capacities cost in quality, for docs/benchmarks.md; `--capacities`: not what formats cost; some twenty minutes",
        || quality::run(&options()),
    ),
    (
        "accuracy",
        "measure what INT8 and INT4 cost on text, on the CPU and in networks for Hexagon, for docs/qnn-networks.md; some ten minutes",
        accuracy::run,
    ),
    (
        "fit",
        "measure what formats lose, for `moec fit`, and compare its predictions with measurements, for docs/benchmarks.md; some twenty minutes",
        fit::run,
    ),
    (
        "padding",
        "simulate what tiers, groups and sizes of static graphs cost, for docs/padding.md; a minute",
        padding::run,
    ),
    (
        "npumoe",
        "simulate NPUMoE's evaluation and compare with the paper; takes options, `--help` lists them",
        || papers::run(&options()),
    ),
    (
        "trimoe",
        "rerun TriMoE's evaluation, simulated, and write docs/trimoe.md; takes options, `--help` lists them",
        || papers::page("trimoe", &options()),
    ),
    (
        "powerinfer2",
        "rerun PowerInfer-2's evaluation, simulated, and write docs/powerinfer2.md; takes options, `--help` lists them",
        || papers::page("powerinfer2", &options()),
    ),
    (
        "hybrimoe",
        "rerun HybriMoE's evaluation, simulated, and write docs/hybrimoe.md; takes options, `--help` lists them",
        || papers::page("hybrimoe", &options()),
    ),
    (
        "mobile",
        "rerun MoBiLE's evaluation, simulated, and write docs/mobile.md; takes options, `--help` lists them",
        || papers::page("mobile", &options()),
    ),
    (
        "big-little",
        "measure what big-little decoding costs and gains, for docs/benchmarks.md; some five minutes, or one with `--transfers`",
        || big_little::run(&options()),
    ),
    (
        "hit-rates",
        "replay every cache policy on recorded routing, for docs/benchmarks.md; some five minutes, 8 GB of disk",
        hit_rates::run,
    ),
    (
        "coreml-shapes",
        "build and verify Core ML packages in real shapes, for docs/benchmarks.md; some twenty minutes",
        shapes::run,
    ),
    ("bench-peers", "compare with other engines from PyPI; takes options, `--help` lists them", || {
        peers::run(peers::PEERS, &options())
    }),
    (
        "bench-disk",
        "compare with llama.cpp on a model that is larger than memory; takes options, `--help` lists them",
        || peers::run(peers::DISK, &options()),
    ),
    (
        "bench-neurons",
        "compare neurons from disk with whole experts and llama.cpp, by share of zeros; takes options, `--help` lists them",
        || peers::run(peers::NEURONS, &options()),
    ),
    (
        "bench-serve",
        "compare `run serve` with llama.cpp's server, by number of clients; takes options, `--help` lists them",
        || serve::bench(&options()),
    ),
    (
        "bench-hosts",
        "compare one model on two hosts with one host, in network namespaces; needs root and Open MPI; takes options, `--help` lists them",
        || peers::run(peers::HOSTS, &options()),
    ),
    (
        "bench-needle",
        "measure retrieval from long contexts by the form of the KV cache; takes options, two minutes",
        || peers::run(peers::NEEDLE, &options()),
    ),
    (
        "amx-bench",
        "matrix kernels on tile registers compared with the machine's peak; a minute, on a machine with AMX",
        amx::run,
    ),
    (
        "bench-build",
        "compare packing with copying the same files, into bench/build.json; some six minutes, 8 GB of disk",
        bench_build::run,
    ),
    (
        "bench-memory",
        "measure a model by what memory is full of, its own weights and mapped ones; some four minutes, 8 GB of disk",
        memory::run,
    ),
    (
        "skip",
        "measure what skipping neurons gains in decoding, by share of zeros; takes options, five minutes",
        || skip::run(&options()),
    ),
    (
        "fault-injection",
        "a thousand damaged checkpoints and bundles; takes options, `--help` lists them",
        || fault_injection::run(&options()),
    ),
    (
        "stress-serve",
        "64 clients of a server that come and go at random, for two minutes; takes options, `--help` lists them",
        || serve::stress(&options()),
    ),
    (
        "hostile-requests",
        "requests, files and clients that are meant to harm a server, some minutes; takes parts of cases' names",
        || serve::hostile(&options()),
    ),
    ("fmt-check", "check the formatting", suite::formatting),
    ("help", "this list", help),
];

/// Arguments after the command.
fn options() -> Vec<String> {
    std::env::args().skip(2).collect()
}

#[expect(clippy::unnecessary_wraps, reason = "a row of the table")]
fn help() -> Result<(), Failed> {
    println!("Usage: cargo xtask COMMAND\n");
    for (name, what, _) in COMMANDS {
        println!("  {name:<16} {what}");
    }
    Ok(())
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let name = match &*args {
        [] => "help",
        [one] if one == "--help" || one == "-h" => "help",
        [one] => one,
        // The only ones with options of their own.
        [one, ..]
            if matches!(
                &**one,
                "bench-peers"
                    | "bench-disk"
                    | "bench-neurons"
                    | "bench-serve"
                    | "bench-hosts"
                    | "bench-needle"
                    | "big-little"
                    | "dist"
                    | "fuzz"
                    | "gpu-check"
                    | "hostile-requests"
                    | "hybrimoe"
                    | "mobile"
                    | "npumoe"
                    | "powerinfer2"
                    | "quality"
                    | "skip"
                    | "test"
                    | "fault-injection"
                    | "stress-serve"
                    | "trimoe"
                    | "words"
            ) =>
        {
            one
        }
        _ => "",
    };
    let Some((_, _, run)) = COMMANDS.iter().find(|(n, ..)| *n == name) else {
        let names: Vec<_> = COMMANDS.iter().map(|(n, ..)| *n).collect();
        eprintln!("error: no command `{}`\n\nhint: the commands are {}", args.join(" "), names.join(", "));
        return ExitCode::from(2);
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => {
            eprintln!("error: {failed}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The contracts of `tests/contracts.rs` that concern this program.
    #[test]
    fn commands_used_by_scripts_exist() {
        for name in ["demo", "test", "coreml", "qnn", "cuda"] {
            assert!(
                COMMANDS.iter().any(|(n, ..)| *n == name),
                "scripts call `cargo xtask {name}`: bring it back"
            );
        }
    }
}
