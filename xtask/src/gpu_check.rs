//! `cargo xtask gpu-check`: all that moec does on a graphics processor of NVIDIA's, on one that is there.
//!
//! | part | what it shows |
//! |---|---|
//! | kernels | every kernel of threads on the cases that the interpreter executes elsewhere, held against plain loops |
//! | bundles | logits and tokens of nine families, and of every format, held against their references |
//! | a program | `run` of a bundle, linked, without moec |
//! | figures | launches, the memory, the link, experts by rows, beside what the card's maker states |
//! | models | four layers of OLMoE-1B-7B's shapes: tokens a second of a prompt and of decoding, all on the card, with graphs of launches and without |
//! | shares | the same with a quarter, a half and three quarters of the experts on the card, the others with the processor |
//!
//! A part that fails does not keep the next from running. Everything that was said goes into a report beside the build.

use crate::setup;
use crate::shell::{Failed, cargo, output, program, shown, stage, target_dir};
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{fs, io};

/// What has tests use the card (`tests/cuda.rs`, `codegen/tests/kernels/card.rs`).
const ON_CARD: (&str, &str) = ("MOEC_CUDA", "card");
/// Formats of the models that are timed.
const FORMATS: [&str; 3] = ["bf16", "q8", "q4"];
/// Shares of the experts that have frames.
const SHARES: [&str; 3] = ["25%", "50%", "75%"];
/// What has every launch made by itself.
const NO_GRAPHS: (&str, &str) = ("MOEC_CUDA_GRAPHS", "off");
/// Name of the device file that is measured.
const DEVICE: &str = "gpu-check-device";

/// What was found so far.
struct Report {
    text: String,
    failed: Vec<String>,
}

impl Report {
    /// Runs a command and writes down what it says. Gives whether it succeeded.
    fn part(&mut self, name: &str, command: &mut Command) -> bool {
        stage("Checking", name);
        let shown = shown(command);
        let (said, passed) = match command.stdin(Stdio::null()).stderr(Stdio::piped()).output() {
            Ok(done) => {
                let [out, err] = [done.stdout, done.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
                // What went well is told by what was asked for alone.
                let said = if done.status.success() { out } else { out + &err };
                (said, done.status.success())
            }
            Err(e) => (format!("it does not start: {e}\n"), false),
        };
        // Writing to a string does not fail.
        let _ =
            write!(self.text, "\n== {name}: {}\n{shown}\n{said}", if passed { "passed" } else { "FAILED" });
        if !passed {
            stage("Failed", name);
            self.failed.push(name.to_owned());
        }
        passed
    }

    /// Writes down that something could not be done, and what was not run for it.
    fn without(&mut self, name: &str, why: &str) {
        let _ = write!(self.text, "\n== {name}: NOT RUN\n{why}\n");
        stage("Missing", &format!("{name}: {why}"));
        self.failed.push(name.to_owned());
    }
}

/// Runs all parts, and writes `gpu-check.txt`.
pub(crate) fn run() -> Result<(), Failed> {
    let cards = output(
        program("nvidia-smi").args(["--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]),
    )
    .filter(|cards| !cards.is_empty());
    let Some(cards) = cards else {
        return Err(Failed::new("there is no graphics processor of NVIDIA's here: `nvidia-smi` finds none")
            .hint("run this on a machine with one and NVIDIA's driver; `cargo test -p moec --test end_to_end cuda::` executes the same bundles on the host"));
    };
    cards.lines().for_each(|card| stage("Found", card));
    let llvm = setup::run()?;
    let moec = setup::moec()?;
    let mut report = Report { text: format!("{cards}\n"), failed: Vec::new() };
    for (name, package, test, filter) in
        [("kernels", "moec-codegen", "kernels", ""), ("bundles", "moec", "end_to_end", "on_threads")]
    {
        let mut tests = cargo("test", Some(&llvm));
        tests
            .args(["--package", package, "--test", test, "--", "--nocapture", filter])
            .env(ON_CARD.0, ON_CARD.1);
        report.part(name, &mut tests);
    }
    let folder = target_dir().join("gpu-check");
    if let Err(e) = measured(&mut report, &moec, &folder) {
        report.without("the rest of the figures and models", &format!("`{}`: {e}", folder.display()));
    }
    let at = target_dir().join("gpu-check.txt");
    fs::write(&at, &report.text)
        .map_err(|e| Failed::new(format!("`{}` cannot be written: {e}", at.display())))?;
    let _ = fs::remove_dir_all(&folder);
    stage("Wrote", &at.display().to_string());
    if report.failed.is_empty() {
        return Ok(());
    }
    Err(Failed::new(format!("not everything does on the card what it should: {}", report.failed.join(", ")))
        .hint(format!("`{}` has what each part said", at.display())))
}

/// Measures the card, and models on it.
fn measured(report: &mut Report, moec: &Path, folder: &Path) -> io::Result<()> {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder)?;
    let mut profile = program(moec);
    profile.args(["profile-device", "--gpu", "--json", "--name", DEVICE]).arg(folder);
    if !report.part("figures", &mut profile) {
        report.without("models", "there is no device file to build for");
        return Ok(());
    }
    let device = folder.join(format!("{DEVICE}.toml"));
    report.text.push_str(&fs::read_to_string(&device)?);
    let mut synth = program(moec);
    synth.args(["synth", "--quiet", "--like", "olmoe", "--layers", "4"]).arg(folder.join("hf"));
    if !report.part("a model of OLMoE's shapes", &mut synth) {
        report.without("models", "there is no checkpoint to build");
        return Ok(());
    }
    models(report, moec, folder, &device)
}

/// Builds models of usual shapes for the card, and times them by their own `run`.
fn models(report: &mut Report, moec: &Path, folder: &Path, device: &Path) -> io::Result<()> {
    for format in FORMATS {
        let text = format!(
            "[model]\nsource = \"hf\"\n[shapes]\nmax_context = 1024\nprefill_chunk = 512\n[weights]\n\
             experts = \"{format}\"\nattention = \"{format}\"\nembeddings = \"{format}\"\n[placement]\n\
             experts = \"gpu\"\nattention = \"gpu\"\n"
        );
        let toml = folder.join(format!("{format}.toml"));
        fs::write(&toml, text)?;
        let bundle = folder.join(format!("{format}.moec"));
        let build = |share: Option<&str>| {
            let mut build = program(moec);
            build.args(["build", "--quiet", "--target"]).arg(device).arg("-o").arg(&bundle).arg(&toml);
            build.args(share.into_iter().flat_map(|share| ["--gpu-experts", share]));
            build
        };
        let bench = || {
            let mut bench = program(bundle.join("run"));
            bench.args(["bench", "--prompt", "512", "--gen", "64"]);
            bench
        };
        let names = [format!("a program in {format}"), format!("a program in {format}, launch by launch")];
        if report.part(&format!("a bundle in {format}"), &mut build(None)) {
            report.part(&names[0], &mut bench());
            report.part(&names[1], bench().env(NO_GRAPHS.0, NO_GRAPHS.1));
        } else {
            for name in names {
                report.without(&name, "it was not built");
            }
        }
        for share in SHARES {
            let name = format!("{format} with {share} of the experts");
            let ran = format!("a program in {name}");
            if report.part(&format!("a bundle in {name}"), &mut build(Some(share))) {
                report.part(&ran, &mut bench());
            } else {
                report.without(&ran, "it was not built");
            }
        }
        let _ = fs::remove_dir_all(&bundle);
    }
    Ok(())
}
