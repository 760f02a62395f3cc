//! `cargo xtask gpu-check`: checks everything that moec does on an NVIDIA GPU of this machine.
//!
//! | part | what it shows |
//! |---|---|
//! | kernels | every GPU kernel on the cases of the interpreter's tests, compared with plain loops |
//! | bundles | logits and tokens of the families and formats, compared with their references |
//! | figures | launches, the GPU's memory, the link, experts by rows, compared with the vendor's figures |
//! | models | four layers of OLMoE-1B-7B's shapes: tokens per second of a prompt and of decoding, all on the GPU, with graphs of launches and without |
//! | report | `moec self-test --report`: a trained model on the CPU and the GPU |
//! | shares | the models with a quarter, a half and three quarters of the experts in the GPU's memory, the others with the CPU |
//!
//! Parts run in this order, each within a time limit. After a failed part, the next one still runs. Their
//! output goes into a report in the build folder.
//!
//! A machine with a GPU may have neither Rust nor this tree: `--pack` writes an archive with the programs and
//! checkpoints that the parts need, and a script `check` that runs them there by `--packed`.

use crate::llvm::Llvm;
use crate::setup;
use crate::shell::{Failed, cargo, output, program, shown, stage, target_dir};
use crate::{shell, suite};
use moec_testing::checkpoints::{FOLDED, PACKAGED};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, io};

const HELP: &str = "Usage: cargo xtask gpu-check [OPTIONS]

Runs bundles on an NVIDIA GPU and writes what they compute and how fast; fails without a GPU.

  --report FILE    where to write (default: target/gpu-check.txt)
  --seconds N      end after about N seconds; parts that were not run by then are named
  --keep           leave the models and bundles that are timed
  --pack DIR       write DIR/gpu-check.tar.xz, which checks a machine that has neither Rust nor this tree; needs no GPU
  --packed DIR     run what was packed and unpacked in DIR; `DIR/check` does so";

/// Has tests use the GPU (`tests/cuda.rs`, `codegen/tests/kernels/gpu.rs`).
const ON_GPU: (&str, &str) = ("MOEC_CUDA", "gpu");
/// Has tests use the programs and files of an unpacked archive (`tests/support/mod.rs`).
const PACKED: &str = "MOEC_PACKED";
/// Formats of the models that are timed.
const FORMATS: [&str; 3] = ["bf16", "q8", "q4"];
/// Shares of the experts that have cache frames.
const SHARES: [&str; 3] = ["25%", "50%", "75%"];
/// Has every launch made by itself.
const NO_GRAPHS: (&str, &str) = ("MOEC_CUDA_GRAPHS", "off");
/// Name of the device file that is measured.
const DEVICE: &str = "gpu-check-device";
/// Test programs: name in the suite, package, cargo's name, and the tests that are run.
const TESTS: [(&str, &str, &str, &str); 2] = [
    ("moec-codegen/kernels", "moec-codegen", "kernels", ""),
    ("end_to_end", "moec", "end_to_end", "on_threads"),
];
/// Checkpoints that the tests read.
const CHECKPOINTS: &str = "golden/hf";
/// Other files that they read.
const FILES: [&str; 1] = ["targets/cuda/cuda.toml"];
/// Name of the archive, and of the folder in it.
const PACK: &str = "gpu-check";
/// The script of an archive that runs its parts.
const SCRIPT: &str = include_str!("gpu_check.sh");
/// Libraries of glibc, which every machine has and which belong to its loader.
const GLIBC: [&str; 6] = ["ld-linux", "libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so"];

/// Seconds that a part may take at most.
mod seconds {
    pub(super) const TESTS: u64 = 180;
    pub(super) const FIGURES: u64 = 120;
    pub(super) const BUILD: u64 = 120;
    pub(super) const BENCH: u64 = 60;
    pub(super) const REPORT: u64 = 180;
    /// Time after which a part that was told to end is killed.
    pub(super) const GRACE: u64 = 5;
}

/// Parsed options.
#[derive(Debug, Default, PartialEq, Eq)]
struct Options {
    report: Option<PathBuf>,
    seconds: Option<u64>,
    keep: bool,
    pack: Option<PathBuf>,
    packed: Option<PathBuf>,
}

impl Options {
    /// `None`: the usage was requested.
    fn read(words: &[String]) -> Result<Option<Self>, Failed> {
        let mut options = Self::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut value =
                || words.next().ok_or_else(|| Failed::new(format!("`{word}` takes a value")).hint(HELP));
            match word.as_str() {
                "--help" | "-h" => return Ok(None),
                "--report" => options.report = Some(absolute(value()?)?),
                "--seconds" => {
                    let n = value()?.parse().ok().filter(|n| *n > 0);
                    options.seconds =
                        Some(n.ok_or_else(|| Failed::new("`--seconds` takes a number of seconds"))?);
                }
                "--keep" => options.keep = true,
                "--pack" => options.pack = Some(absolute(value()?)?),
                "--packed" => options.packed = Some(absolute(value()?)?),
                _ => return Err(Failed::new(format!("no option `{word}`")).hint(HELP)),
            }
        }
        Ok(Some(options))
    }
}

fn absolute(path: &str) -> Result<PathBuf, Failed> {
    std::path::absolute(path).map_err(|e| failed(Path::new(path), &e))
}

fn failed(path: &Path, e: &io::Error) -> Failed {
    Failed::new(format!("`{}`: {e}", path.display()))
}

/// The programs that the parts run.
enum Programs {
    /// Built in this tree.
    Built { llvm: Llvm, moec: PathBuf },
    /// Unpacked in a folder.
    Packed(PathBuf),
}

impl Programs {
    /// The program `moec`.
    fn moec(&self) -> Command {
        match self {
            Self::Built { moec, .. } => program(moec),
            Self::Packed(folder) => Command::new(folder.join("bin/moec")),
        }
    }

    /// The tests of a test program that use the GPU.
    fn tests(&self, (_, package, name, filter): (&str, &str, &str, &str)) -> Command {
        let mut command = match self {
            Self::Built { llvm, .. } => {
                let mut cargo = cargo("test", Some(llvm));
                cargo.args(["--package", package, "--test", name, "--"]);
                cargo
            }
            Self::Packed(folder) => {
                let mut tests = Command::new(folder.join("bin").join(name));
                tests.env(PACKED, folder).current_dir(folder);
                tests
            }
        };
        command.args(["--nocapture", filter]).env(ON_GPU.0, ON_GPU.1);
        command
    }

    /// A folder for models and bundles.
    fn folder(&self) -> PathBuf {
        match self {
            Self::Built { .. } => target_dir().join(PACK),
            Self::Packed(folder) => folder.join("work"),
        }
    }
}

/// Report so far.
struct Report {
    /// The file that has it, too.
    at: PathBuf,
    text: String,
    failed: Vec<String>,
    /// Time when no further part begins.
    end: Option<Instant>,
}

impl Report {
    /// Runs a command for at most `limit` seconds and writes down what it prints. Returns whether it
    /// succeeded.
    fn part(&mut self, name: &str, limit: u64, command: &Command) -> bool {
        let left = self.end.map_or(u64::MAX, |end| end.saturating_duration_since(Instant::now()).as_secs());
        if left == 0 {
            self.without(name, "no time was left");
            return false;
        }
        stage("Checking", name);
        let start = Instant::now();
        let (text, passed) =
            match limited(command, limit.min(left)).stdin(Stdio::null()).stderr(Stdio::piped()).output() {
                Ok(done) => {
                    let [out, err] =
                        [done.stdout, done.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
                    // Progress is of interest where something failed.
                    let text = if done.status.success() { out } else { out + &err };
                    (text, done.status.success())
                }
                Err(e) => (format!("it does not start: {e}\n"), false),
            };
        let (took, verdict) = (start.elapsed().as_secs_f64(), if passed { "passed" } else { "FAILED" });
        // Writing to a string does not fail.
        let _ = write!(self.text, "\n== {name}: {verdict} after {took:.1} s\n{}\n{text}", shown(command));
        if !passed {
            stage("Failed", name);
            self.failed.push(name.to_owned());
        }
        // If a user stops this, the log has all results up to then; at the end a file that cannot be written
        // is an error.
        let _ = self.save();
        passed
    }

    fn save(&self) -> io::Result<()> {
        fs::write(&self.at, &self.text)
    }

    /// Writes down that a part was not run, and why.
    fn without(&mut self, name: &str, why: &str) {
        let _ = write!(self.text, "\n== {name}: NOT RUN\n{why}\n");
        stage("Missing", &format!("{name}: {why}"));
        self.failed.push(name.to_owned());
    }
}

/// A command that is ended after this many seconds, with the processes that it started.
fn limited(command: &Command, seconds: u64) -> Command {
    let mut limited = Command::new("timeout");
    limited.arg(format!("--kill-after={}", seconds::GRACE)).arg(seconds.to_string());
    limited.arg(command.get_program()).args(command.get_args());
    for (key, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(key, value),
            None => limited.env_remove(key),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        limited.current_dir(folder);
    }
    limited
}

/// Runs all parts and writes `gpu-check.txt`, or packs them.
pub(crate) fn run(words: &[String]) -> Result<(), Failed> {
    let Some(options) = Options::read(words)? else {
        println!("{HELP}");
        return Ok(());
    };
    if let Some(folder) = &options.pack {
        return pack(folder);
    }
    let gpus = output(
        Command::new("nvidia-smi")
            .args(["--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]),
    )
    .filter(|gpus| !gpus.is_empty());
    let Some(gpus) = gpus else {
        return Err(Failed::new("no NVIDIA GPU was found: `nvidia-smi` lists none").hint(
            "run this on a machine with one and NVIDIA's driver; \
             `cargo test -p moec --test end_to_end cuda::` executes the same bundles on the host",
        ));
    };
    gpus.lines().for_each(|device| stage("Found", device));
    let programs = match options.packed {
        Some(folder) => Programs::Packed(folder),
        None => Programs::Built { llvm: setup::run()?, moec: setup::moec()? },
    };
    let end = options.seconds.map(|n| Instant::now() + Duration::from_secs(n));
    let at = options.report.unwrap_or_else(|| target_dir().join("gpu-check.txt"));
    let mut report = Report { at, text: format!("{gpus}\n"), failed: Vec::new(), end };
    // Whether it can be written is known before the minutes that the parts take.
    report.save().map_err(|e| failed(&report.at, &e))?;
    for (name, tests) in ["kernels", "bundles"].into_iter().zip(TESTS) {
        report.part(name, seconds::TESTS, &programs.tests(tests));
    }
    let folder = programs.folder();
    if let Err(e) = measured(&mut report, &programs, &folder) {
        report.without("the other figures and models", &format!("`{}`: {e}", folder.display()));
    }
    report.save().map_err(|e| failed(&report.at, &e))?;
    if !options.keep {
        let _ = fs::remove_dir_all(&folder);
    }
    stage("Wrote", &report.at.display().to_string());
    if report.failed.is_empty() {
        return Ok(());
    }
    Err(Failed::new(format!("not every part passed on the GPU: {}", report.failed.join(", ")))
        .hint(format!("`{}` has what each part printed", report.at.display())))
}

/// Measures the GPU, and models on it.
fn measured(report: &mut Report, programs: &Programs, folder: &Path) -> io::Result<()> {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder)?;
    let mut profile = programs.moec();
    profile.args(["profile-device", "--gpu", "--json", "--name", DEVICE]).arg(folder);
    let device = folder.join(format!("{DEVICE}.toml"));
    let profiled = report.part("figures", seconds::FIGURES, &profile);
    if profiled {
        report.text.push_str(&fs::read_to_string(&device)?);
    } else {
        report.without("models", "there is no device file to build for");
    }
    let mut synth = programs.moec();
    synth.args(["synth", "--quiet", "--like", "olmoe", "--layers", "4"]).arg(folder.join("hf"));
    let drawn = profiled && report.part("a model of OLMoE's shapes", seconds::BUILD, &synth);
    if profiled && !drawn {
        report.without("models", "there is no checkpoint to build");
    }
    let models = Models { programs, folder, device: &device };
    if drawn {
        models.whole(report)?;
    }
    let json = folder.join("self-test.json");
    let mut own = programs.moec();
    own.args(["self-test", "--report"]).arg(&json);
    report.part("report", seconds::REPORT, &own);
    report.text.push_str(&fs::read_to_string(&json).unwrap_or_default());
    if drawn {
        models.shares(report)?;
    }
    Ok(())
}

/// Models of usual shapes, built for the GPU and timed by their own `run`.
struct Models<'a> {
    programs: &'a Programs,
    folder: &'a Path,
    device: &'a Path,
}

impl Models<'_> {
    fn bundle(&self, format: &str) -> PathBuf {
        self.folder.join(format!("{format}.moec"))
    }

    /// Builds the model in a format; `share`: with that share of its experts in the GPU's memory.
    fn build(&self, format: &str, share: Option<&str>) -> io::Result<Command> {
        let text = format!(
            "[model]\nsource = \"hf\"\n[shapes]\nmax_context = 1024\nprefill_chunk = 512\n[weights]\n\
             experts = \"{format}\"\nattention = \"{format}\"\nembeddings = \"{format}\"\n[placement]\n\
             experts = \"gpu\"\nattention = \"gpu\"\n"
        );
        let toml = self.folder.join(format!("{format}.toml"));
        fs::write(&toml, text)?;
        let mut build = self.programs.moec();
        build.args(["build", "--quiet", "--target"]).arg(self.device).arg("-o").arg(self.bundle(format));
        build.arg(&toml).args(share.into_iter().flat_map(|share| ["--gpu-experts", share]));
        Ok(build)
    }

    fn bench(&self, format: &str) -> Command {
        let mut bench = Command::new(self.bundle(format).join("run"));
        bench.args(["bench", "--json", "--prompt", "512", "--gen", "64"]);
        bench
    }

    /// All of the model on the GPU.
    fn whole(&self, report: &mut Report) -> io::Result<()> {
        for format in FORMATS {
            let names =
                [format!("a program in {format}"), format!("a program in {format}, launch by launch")];
            let build = self.build(format, None)?;
            if report.part(&format!("a bundle in {format}"), seconds::BUILD, &build) {
                report.part(&names[0], seconds::BENCH, &self.bench(format));
                let mut each = self.bench(format);
                each.env(NO_GRAPHS.0, NO_GRAPHS.1);
                report.part(&names[1], seconds::BENCH, &each);
            } else {
                for name in names {
                    report.without(&name, "it was not built");
                }
            }
        }
        Ok(())
    }

    /// Shares of the experts in the GPU's memory.
    fn shares(&self, report: &mut Report) -> io::Result<()> {
        for format in FORMATS {
            for share in SHARES {
                let name = format!("{format} with {share} of the experts");
                let ran = format!("a program in {name}");
                let build = self.build(format, Some(share))?;
                if report.part(&format!("a bundle in {name}"), seconds::BUILD, &build) {
                    report.part(&ran, seconds::BENCH, &self.bench(format));
                } else {
                    report.without(&ran, "it was not built");
                }
            }
            let _ = fs::remove_dir_all(self.bundle(format));
        }
        Ok(())
    }
}

/// Writes an archive with all that the parts need on a machine with glibc, a C compiler for `run`, and a GPU.
fn pack(folder: &Path) -> Result<(), Failed> {
    let (llvm, moec) = (setup::run()?, setup::moec()?);
    let tests = suite::files(&llvm, &TESTS.map(|(name, ..)| name))?;
    let own = std::env::current_exe().map_err(|e| failed(folder, &e))?;
    let unpacked = folder.join(PACK);
    let _ = fs::remove_dir_all(&unpacked);
    let names = ["moec", "xtask"].into_iter().chain(TESTS.map(|(_, _, name, _)| name));
    for (name, from) in names.zip([moec, own].into_iter().chain(tests)) {
        let to = made(&unpacked.join("bin").join(name))?;
        shell::run(program("strip").args(["--strip-all", "-o"]).arg(&to).arg(&from))?;
        for library in libraries(&to)? {
            let to = made(&unpacked.join("lib").join(library.file_name().unwrap_or_default()))?;
            fs::copy(&library, &to).map_err(|e| failed(&library, &e))?;
        }
    }
    let tree = unpacked.join("tree");
    for family in PACKAGED.iter().chain(&FOLDED) {
        copy(&Path::new(CHECKPOINTS).join(family), &tree)?;
    }
    for file in FILES {
        copy(Path::new(file), &tree)?;
    }
    let script = made(&unpacked.join("check"))?;
    fs::write(&script, SCRIPT).map_err(|e| failed(&script, &e))?;
    shell::run(program("chmod").arg("+x").arg(&script))?;
    let archive = folder.join(PACK).with_added_extension("tar.xz");
    let mut tar = program("tar");
    tar.args(["--use-compress-program", "xz -T0 -6", "--owner=0", "--group=0", "-cf"]).arg(&archive);
    shell::run(tar.arg("-C").arg(folder).arg(PACK))?;
    fs::remove_dir_all(&unpacked).map_err(|e| failed(&unpacked, &e))?;
    let bytes = fs::metadata(&archive).map_err(|e| failed(&archive, &e))?.len();
    stage("Packed", &format!("{}, {:.1} MiB", archive.display(), bytes as f64 / f64::from(1 << 20)));
    Ok(())
}

/// The path, whose folder is there.
fn made(path: &Path) -> Result<PathBuf, Failed> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(|e| failed(folder, &e))?;
    Ok(path.to_owned())
}

/// Copies a file of the tree, or the files of a folder, to the same place below another root.
fn copy(path: &Path, root: &Path) -> Result<(), Failed> {
    let from = shell::root().join(path);
    if !from.is_dir() {
        let to = made(&root.join(path))?;
        return fs::copy(&from, &to).map(drop).map_err(|e| failed(&from, &e));
    }
    for entry in fs::read_dir(&from).map_err(|e| failed(&from, &e))? {
        copy(&path.join(entry.map_err(|e| failed(&from, &e))?.file_name()), root)?;
    }
    Ok(())
}

/// The shared libraries of a program, without those of glibc.
fn libraries(program: &Path) -> Result<Vec<PathBuf>, Failed> {
    let listing = output(Command::new("ldd").arg(program))
        .ok_or_else(|| Failed::new(format!("`ldd {}` fails", program.display())))?;
    Ok(loaded(&listing))
}

/// Paths of the libraries in what `ldd` prints, without those of glibc.
fn loaded(listing: &str) -> Vec<PathBuf> {
    let path = |line: &str| Some(line.split_once(" => ")?.1.split(" (").next()?.trim().to_owned());
    let paths = listing.lines().filter_map(path).map(PathBuf::from);
    let own = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        path.is_absolute() && !GLIBC.iter().any(|glibc| name.starts_with(glibc))
    };
    paths.filter(own).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn options_are_read() {
        let read = |line| Options::read(&words(line));
        let options = read("--report /r --seconds 7 --keep --packed /p").unwrap().unwrap();
        let (report, packed) = (Some("/r".into()), Some("/p".into()));
        assert_eq!(options, Options { report, seconds: Some(7), keep: true, pack: None, packed });
        assert!(read("--help").unwrap().is_none());
        for wrong in ["--seconds", "--seconds 0", "--seconds x", "--other"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn glibc_libraries_are_not_packed() {
        let listing = "\tlinux-vdso.so.1 (0x7f)\n\tlibLLVM.so.22.1 => /usr/lib/libLLVM.so.22.1 (0x7f)\n\
                    \tlibc.so.6 => /lib/libc.so.6 (0x7f)\n\tlibz3.so.4 => not found\n\t/lib64/ld-linux-x86-64.so.2 (0x7f)\n";
        assert_eq!(loaded(listing), [Path::new("/usr/lib/libLLVM.so.22.1")]);
    }

    #[test]
    fn failed_or_slow_parts_do_not_stop_the_next() {
        let at = std::env::temp_dir().join(format!("moec-gpu-check-{}", std::process::id()));
        let mut report = Report { at, text: String::new(), failed: Vec::new(), end: None };
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        let start = Instant::now();
        assert!(!report.part("slow", 1, &shell("echo begun; sleep 60")));
        assert!(start.elapsed() < Duration::from_secs(30));
        assert!(!report.part("wrong", 9, &shell("echo why >&2; exit 3")));
        assert!(report.part("right", 9, shell("echo $MOEC_WORD").env("MOEC_WORD", "heard")));
        assert_eq!(report.failed, ["slow", "wrong"]);
        for text in ["== slow: FAILED", "begun", "why", "== right: passed", "heard"] {
            assert!(report.text.contains(text), "{text} in {}", report.text);
        }
        assert_eq!(fs::read_to_string(&report.at).unwrap(), report.text);
        fs::remove_file(&report.at).unwrap();
        report.end = Some(Instant::now());
        assert!(!report.part("late", 9, &shell("exit 0")));
        assert!(report.text.contains("== late: NOT RUN\nno time was left"), "{}", report.text);
    }
}
