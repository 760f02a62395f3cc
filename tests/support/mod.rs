//! Common parts of the end-to-end tests: running the real binary, reading reference outputs.
#![allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    clippy::panic,
    clippy::pedantic,
    reason = "every test file uses its own part"
)]

mod built;
#[cfg(target_os = "linux")]
pub mod group;
mod models;
mod paged;
#[cfg(target_os = "linux")]
pub mod pty;
mod serving;

pub use built::{built, cache, recorded};
pub use models::{WORDS, add_words, configured, copy_checkpoint, with_words};
pub use moec_testing::checkpoints::{
    FAMILIES, FOLDED, GRAPHS, IN_RAM, MIXTURES, PACKAGED, families, mixtures,
};
use moec_testing::{AVX2, AVX512, COREML, SAPPHIRE_RAPIDS};
pub use paged::{failing, faulty, logits, recovers};
use safetensors::{Dtype, SafeTensors};
pub use serving::{Answer, served, with_engine, with_plan};
use std::fmt::Write;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;
use wait_timeout::ChildExt;

/// Folder with the binaries and files that the tests need on a machine without cargo and the tree (`cargo
/// xtask gpu-check --pack`).
fn packed() -> Option<PathBuf> {
    std::env::var_os("MOEC_PACKED").map(PathBuf::from)
}

/// The binary under test.
fn program() -> PathBuf {
    packed().map_or_else(|| env!("CARGO_BIN_EXE_moec").into(), |folder| folder.join("bin/moec"))
}

/// The project's root.
pub fn root() -> PathBuf {
    if let Some(folder) = packed() {
        return folder.join("tree");
    }
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("`compiler/cli` lies in the root")
        .to_owned()
}

/// Folder of a tiny checkpoint.
pub fn checkpoint(family: &str) -> PathBuf {
    root().join("golden/hf").join(family)
}

/// The trained demo model.
pub fn ferris() -> PathBuf {
    root().join("golden/models/ferris")
}

/// The variant of ferris with ReLU gates. Its evaluation texts and questions are those of [`ferris`].
pub fn ferris_relu() -> PathBuf {
    root().join("golden/models/ferris-relu")
}

/// Path of [`ferris`]'s calibration text.
pub fn calibration() -> String {
    ferris().join("eval/calibration.txt").display().to_string()
}

/// The binary under test, without progress bars, colours and the user's settings.
pub fn moec() -> Command {
    clean(Command::new(program()))
}

/// Any binary in the same environment. Runtimes that cargo compiles for bundles are optimised less than
/// users' runtimes, which halves the time and changes no number.
pub fn clean(mut command: Command) -> Command {
    command.env("MOEC_NO_PROGRESS", "1").env("NO_COLOR", "1").env_remove("MOEC_THREADS");
    command.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
    command
}

/// Time limit of any command in the tests. The slowest take half a minute alone on a machine.
const DEADLINE: Duration = Duration::from_secs(600);

/// Runs a command to its end. A command that hangs is killed and named.
pub fn finish(command: &mut Command) -> Output {
    fn drain(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).expect("a pipe can be read");
            bytes
        })
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|e| panic!("{command:?} does not start: {e}"));
    let stdout = drain(child.stdout.take().expect("a pipe"));
    let stderr = drain(child.stderr.take().expect("a pipe"));
    let ended = child.wait_timeout(DEADLINE).expect("a child can be waited for");
    if ended.is_none() {
        child.kill().expect("a child can be killed");
        child.wait().expect("a child can be waited for");
    }
    let [stdout, stderr] = [stdout, stderr].map(|pipe| pipe.join().expect("the pipe was read"));
    let Some(status) = ended else {
        panic!("{command:?} hangs; it said:\n{}", String::from_utf8_lossy(&stderr));
    };
    Output { status, stdout, stderr }
}

/// Runs a command that must succeed.
pub fn ok(command: &mut Command) -> Output {
    let output = finish(command);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} failed with {}:\n{stderr}", output.status);
    output
}

/// Runs a command that must fail, and returns its exit code and stderr.
pub fn fails(command: &mut Command) -> (i32, String) {
    let output = finish(command);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{command:?} succeeded:\n{stderr}");
    assert!(!stderr.contains("panicked"), "{command:?} panicked:\n{stderr}");
    (output.status.code().expect("an exit code"), stderr)
}

/// Whether this machine can execute a target's code; otherwise the calling test is skipped.
pub fn runs_here(target: &str) -> bool {
    match target {
        "x86-64-v3" => {
            AVX2.holds_or_skip(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"))
        }
        "x86-64-v4" => {
            AVX512.holds_or_skip(is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw"))
        }
        // AMX is emulated where it is missing.
        "sapphire-rapids" => SAPPHIRE_RAPIDS.holds_or_skip(
            is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vbmi2")
                && is_x86_feature_detected!("avx512vnni")
                && is_x86_feature_detected!("avx512bf16")
                && is_x86_feature_detected!("avx512bitalg")
                && is_x86_feature_detected!("avx512vpopcntdq")
                && is_x86_feature_detected!("avxvnni"),
        ),
        _ => true,
    }
}

/// Format of tables if matrices have this format: tables are read by rows, which have no scale each.
pub fn table_format(format: &str) -> &str {
    if matches!(format, "q4o" | "q4c") { "q8" } else { format }
}

/// A `model.toml` of the tests.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'a> {
    /// Format of every class; q8 for the embeddings if tables do not support it.
    pub format: &'a str,
    /// Tokens per prefill chunk.
    pub chunk: usize,
    /// Sequences per decode call.
    pub batch: &'a [usize],
    /// Longest sequence.
    pub context: usize,
}

impl Setup<'_> {
    /// Writes `model.toml` for the checkpoint `source` into `folder`; activations stay exact.
    pub fn write(&self, source: &Path, folder: &Path) -> PathBuf {
        let Self { format, chunk, batch, context } = self;
        let path = folder.join("model.toml");
        let tables = table_format(format);
        let text = format!(
            "[model]\nsource = {source:?}\n[shapes]\nmax_context = {context}\nprefill_chunk = {chunk}\n\
             decode_batch = {batch:?}\n[weights]\nexperts = \"{format}\"\nattention = \"{format}\"\n\
             embeddings = \"{tables}\"\nactivations = \"f32\"\n"
        );
        std::fs::write(&path, text).expect("model.toml is written");
        path
    }
}

/// Reference outputs of a checkpoint.
pub struct Expected {
    /// Prompt.
    pub ids: Vec<u32>,
    /// Logits of every position, row after row.
    pub logits: Vec<f32>,
    /// Start of the prompt and what follows it greedily.
    pub greedy: Vec<u32>,
}

impl Expected {
    /// Largest difference of any logit where nothing is rounded: a ten-thousandth of their range.
    pub fn tolerance(&self) -> f32 {
        let most =
            |of: fn(f32, f32) -> f32| self.logits.iter().copied().reduce(of).expect("there are logits");
        (most(f32::max) - most(f32::min)) * 1e-4
    }

    /// Logits of the token at this position.
    pub fn row(&self, position: usize) -> &[f32] {
        let vocab = self.logits.len() / self.ids.len();
        &self.logits[position * vocab..][..vocab]
    }
}

/// Reads `expected.safetensors` of a checkpoint.
pub fn expected(folder: &Path) -> Expected {
    let bytes = std::fs::read(folder.join("expected.safetensors")).expect("the reference is there");
    let tensors = SafeTensors::deserialize(&bytes).expect("the reference is well-formed");
    Expected {
        ids: ints(&tensors, "input_ids"),
        logits: floats(&tensors, "logits"),
        greedy: ints(&tensors, "greedy_ids"),
    }
}

/// Experts that transformers' routers choose for the tokens of the prompt, for each layer with experts:
/// `routes.safetensors` of a checkpoint, if it has the file.
pub fn routes(folder: &Path) -> Option<Vec<Vec<Vec<u32>>>> {
    let bytes = std::fs::read(folder.join("routes.safetensors")).ok()?;
    let tensors = SafeTensors::deserialize(&bytes).expect("the reference is well-formed");
    let layer = |name: &str| name.rsplit('.').next().and_then(|n| n.parse::<usize>().ok()).expect("a layer");
    let mut names = tensors.names();
    names.sort_by_key(|name| layer(name));
    let of = |name: &str| {
        let k = tensors.tensor(name).expect("a tensor").shape()[1];
        ints(&tensors, name).chunks(k).map(<[u32]>::to_vec).collect()
    };
    Some(names.into_iter().map(of).collect())
}

/// The tensor `logits` of a file.
pub fn logits_file(path: &Path) -> (Vec<usize>, Vec<f32>) {
    let bytes = std::fs::read(path).expect("logits were written");
    let tensors = SafeTensors::deserialize(&bytes).expect("logits are well-formed");
    (tensors.tensor("logits").expect("logits are there").shape().to_vec(), floats(&tensors, "logits"))
}

fn ints(tensors: &SafeTensors<'_>, name: &str) -> Vec<u32> {
    let t = tensors.tensor(name).expect("the tensor is there");
    assert_eq!(t.dtype(), Dtype::I32);
    t.data().chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
}

fn floats(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let t = tensors.tensor(name).expect("the tensor is there");
    assert_eq!(t.dtype(), Dtype::F32);
    t.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
}

/// Standard output of a command that must succeed: one JSON value.
pub fn json_of(command: &mut Command) -> serde_json::Value {
    serde_json::from_slice(&ok(command).stdout).expect("one JSON value")
}

/// `1,2,3`
pub fn list(ids: &[u32]) -> String {
    ids.iter().enumerate().fold(String::new(), |mut s, (i, id)| {
        let _ = write!(s, "{}{id}", if i == 0 { "" } else { "," });
        s
    })
}

/// Largest absolute difference; infinite if lengths differ or a number is NaN.
pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    if a.len() != b.len() {
        return f32::INFINITY;
    }
    a.iter()
        .zip(b)
        .map(|(x, y)| (x - y).abs())
        .fold(0.0, |m, d| if d.is_nan() { f32::INFINITY } else { m.max(d) })
}

/// Files below a folder with their bytes, sorted by path.
pub fn tree(folder: &Path) -> Vec<(String, Vec<u8>)> {
    fn walk(root: &Path, folder: &Path, out: &mut Vec<(String, Vec<u8>)>) {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                walk(root, &path, out);
            } else {
                let name = path.strip_prefix(root).expect("below").to_string_lossy().into_owned();
                out.push((name, std::fs::read(&path).expect("a file")));
            }
        }
    }
    let mut out = Vec::new();
    walk(folder, folder, &mut out);
    out.sort();
    out
}

/// Paths of the tools that `cargo xtask coreml` installs; a test that needs them is skipped without them.
pub fn coreml() -> Option<[(&'static str, PathBuf); 2]> {
    let cache = moec_base::cache_dir::path().expect("there is a cache folder");
    COREML.ok_or_skip(moec_coreml::helper::Helper::find(&cache))?;
    let from = |var: &'static str, at: &str| {
        let given = std::env::var_os(var).filter(|v| !v.is_empty()).map(PathBuf::from);
        (var, given.unwrap_or_else(|| cache.join("coreml").join(at)))
    };
    Some([from("MOEC_COREML_HELPER", "bin/moec-coreml"), from("MOEC_COREML_PYTHON", "venv")])
}
