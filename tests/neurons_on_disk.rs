//! Neurons on disk: for any memory size, threads and reader, logits are bit-identical to those of the same
//! model in memory. A token reads fewer bytes than with whole experts.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_bundle::read::Bundle;
use moec_runtime::offload::disk::{self, Choice};
use moec_runtime::offload::paging::{ClusterPart, Hooks, Paging, Report, Wrap};
use moec_runtime::platform::cores;
use moec_runtime::{Engine, Options, Program};
use moec_sim::disk::fault::{Faulty, Gate, Injected};
use moec_sim::neurons::Recorder;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;
use support::{built, checkpoint, expected, failing, fails, ferris_relu, logits, moec, ok, recovers, root};

pub(crate) fn write(source: &Path, folder: &Path, format: &str, more: &str) -> PathBuf {
    let toml = folder.join("model.toml");
    let text = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 96\nprefill_chunk = 20\ndecode_batch = [1, 2]\n\
         [weights]\nexperts = \"{format}\"\nattention = \"{format}\"\n{more}\n",
        source.display(),
    );
    std::fs::write(&toml, text).unwrap();
    toml
}

pub(crate) fn build(source: &Path, folder: &Path, format: &str, more: &str) -> Bundle {
    let bundle = folder.join("b");
    built(&write(source, folder, format, more), &["--target", "native"], &bundle);
    Bundle::open(&bundle).unwrap()
}

const ON_DISK: &str = "[experts]\nskip = \"on\"\n[memory]\nbudget = \"1 GiB\"\nthreads = 3";

/// Settings of a run that replace the plan's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) frames: u32,
    pub(crate) staging: u32,
    pub(crate) threads: usize,
    pub(crate) reader: Choice,
}

pub(crate) fn with_engine<R>(
    bundle: &Bundle,
    case: Option<Case>,
    (wrap, hooks): (Option<Wrap>, Option<&'static dyn Hooks>),
    f: impl FnOnce(&mut Engine<'_>) -> R,
) -> R {
    let mut plan = bundle.plan.clone();
    let reader = case.map_or(Choice::Threads, |c| c.reader);
    let disk = disk::Options { reader, ..disk::Options::default() };
    let paging = Paging { disk, ahead: 0, budget: None, preload: true, wrap, hooks, cores: cores::SYS };
    if let Some((own, case)) = plan.paging.as_mut().zip(case) {
        (own.frames, own.staging) = (case.frames, case.staging);
    }
    let unit = bundle.unit().unwrap();
    let program = Program::new(plan, &|s| unit.resolve(s)).unwrap();
    let threads = Some(case.map_or(2, |c| c.threads));
    let options = Options { threads, resident: case.is_none(), paging: Some(paging), ..Options::default() };
    f(&mut Engine::open(&program, &bundle.folder, options).unwrap())
}

pub(crate) fn in_memory(bundle: &Bundle, prompt: &[u32]) -> Vec<u32> {
    with_engine(bundle, None, (None, None), |engine| {
        assert_eq!(engine.paging(), None);
        logits(engine, prompt).unwrap()
    })
}

/// Logits, the report, and the least units that any cache would have read, with the number of all uses.
pub(crate) fn run(bundle: &Bundle, case: Case, prompt: &[u32]) -> (Vec<u32>, Report, (u64, u64)) {
    let recorder = recorder(bundle);
    with_engine(bundle, Some(case), (None, Some(recorder)), |engine| {
        let found = logits(engine, prompt).unwrap();
        (found, engine.paging().unwrap(), recorder.least_read(case.frames).unwrap())
    })
}

/// A recorder that lives as long as the tests, as hooks must.
fn recorder(bundle: &Bundle) -> &'static Recorder {
    let experts: Vec<u32> = bundle.plan.paging.as_ref().unwrap().layers.iter().map(|l| l.experts).collect();
    Box::leak(Box::new(Recorder::new(&experts, frames(bundle)[0])))
}

/// Number of frames of an expert, and of all experts.
pub(crate) fn frames(bundle: &Bundle) -> [u32; 2] {
    let paging = bundle.plan.paging.as_ref().unwrap();
    let inter = bundle.plan.segments[paging.layers[0].down as usize].extents().1;
    let one = inter.div_ceil(paging.neurons);
    [one, one * paging.layers.iter().map(|l| l.experts).sum::<u32>()]
}

#[test]
fn logits_are_those_of_the_model_in_memory() {
    let prompt = &expected(&ferris_relu()).ids[..44];
    for format in ["bf16", "f32", "q8", "q4"] {
        let folder = tempfile::tempdir().unwrap();
        let resident = build(&ferris_relu(), folder.path(), format, "[experts]\nskip = \"on\"");
        let want = in_memory(&resident, prompt);
        let folder = tempfile::tempdir().unwrap();
        let bundle = build(&ferris_relu(), folder.path(), format, ON_DISK);
        assert!(in_memory(&bundle, prompt) == want, "{format}: gates by themselves give other bits");
        let [one, all] = frames(&bundle);
        assert_eq!(bundle.plan.paging.as_ref().unwrap().frames, all, "a large budget holds all neurons");
        let staging = bundle.plan.paging.as_ref().unwrap().staging;
        for (frames, staging, threads, reader) in [
            (all, staging, 2, Choice::Threads),
            (all / 2, staging, 1, Choice::Threads),
            (all / 4, 9, 3, Choice::Auto),
            (one, 2, 2, Choice::Threads),
        ] {
            let case = Case { frames, staging, threads, reader };
            let (found, report, (least, used)) = run(&bundle, case, prompt);
            assert!(found == want, "{format}, {case:?}: other bits");
            assert!(report.misses > 0 && report.disk.bytes > 0, "{format}, {case:?}: {report:?}");
            assert!(0 < least && least <= used, "{format}, {case:?}: {least} of {used}");
        }
    }
}

#[test]
fn families_with_relu_run_from_disk() {
    for (family, format) in [
        ("smallthinker_4b", "f32"),
        ("smallthinker_21b", "f32"),
        ("turbosparse_mixtral", "f32"),
        // With q8, scales are stored separately from codes.
        ("smallthinker_4b", "q8"),
        ("turbosparse_mixtral", "q8"),
        // Dense networks are experts that every token takes.
        ("bamboo", "f32"),
        ("prosparse", "q8"),
    ] {
        let prompt = &expected(&checkpoint(family)).ids[..24];
        let folder = tempfile::tempdir().unwrap();
        let bundle = build(&checkpoint(family), folder.path(), format, ON_DISK);
        let down = bundle.plan.paging.as_ref().unwrap().layers[0].down;
        let split_scales = bundle.plan.segments[down as usize].on_disk().unwrap().bundle.has_split_scales();
        assert_eq!(split_scales, format == "q8", "{family}");
        let [one, all] = frames(&bundle);
        let want = in_memory(&bundle, prompt);
        for frames in [one, (all / 2).max(one)] {
            let case = Case { frames, staging: 4, threads: 2, reader: Choice::Threads };
            assert!(run(&bundle, case, prompt).0 == want, "{family} in {format}, {case:?}: other bits");
        }
    }
}

/// Bytes that a token reads from disk on the text of the golden file; and the same for the best cache with
/// equally many frames.
fn per_token(bundle: &Bundle, frames: u32, text: &[u32]) -> (f64, f64) {
    let staging = bundle.plan.paging.as_ref().unwrap().staging;
    let case = Case { frames, staging, threads: 1, reader: Choice::Threads };
    let recorder = bundle.plan.paging.as_ref().unwrap().by_neurons().then(|| recorder(bundle));
    let hooks = recorder.map(|recorder| recorder as &'static dyn Hooks);
    with_engine(bundle, Some(case), (None, hooks), |engine| {
        for (pos, &id) in text.iter().enumerate() {
            engine.decode(&[(0, pos, id)], &mut |_, _| Ok(())).unwrap();
        }
        let report = engine.paging().unwrap();
        let per = |bytes: u64| bytes as f64 / text.len() as f64;
        // Reads include the padding of neurons on disk.
        let read = report.disk.bytes as f64 / report.misses.max(1) as f64;
        let least = recorder.map_or(0, |r| r.least_read(frames).unwrap().0) as f64;
        (per(report.disk.bytes), least * read / text.len() as f64)
    })
}

/// Rows of the table in `docs/neuron-cache.md`. The first column is the share of the experts' bytes in
/// memory. The others are kilobytes per token of whole experts, of neurons, and of the best cache of neurons.
fn table() -> Vec<[f64; 4]> {
    let text = &expected(&ferris_relu()).ids;
    let text = &text[..text.len().min(96)];
    let [whole, neurons] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let lru = "[memory]\nbudget = \"1 GiB\"\nthreads = 3\npolicy = \"lru\"\nprefetch = 0";
    let whole = build(&ferris_relu(), whole.path(), "f32", lru);
    let neurons = build(&ferris_relu(), neurons.path(), "f32", ON_DISK);
    let segments = &whole.plan.segments;
    let all: u64 = segments.iter().filter(|s| s.file == 1).map(|s| s.bytes).sum();
    let paging = neurons.plan.paging.as_ref().unwrap();
    let gates = |l: &moec_ir::plan::PagedLayer| neurons.plan.segments[l.gate_up as usize].bytes;
    let gates: u64 = paging.layers.iter().map(gates).sum();
    let row = |percent: u64| {
        let room = all * percent / 100;
        let whole =
            per_token(&whole, (room / whole.plan.paging.as_ref().unwrap().frame_bytes) as u32, text).0;
        let (own, least) = per_token(&neurons, ((room - gates) / paging.frame_bytes) as u32, text);
        [percent as f64, whole / 1e3, own / 1e3, least / 1e3]
    };
    [75, 50, 40].map(row).to_vec()
}

#[test]
fn token_reads_fewer_bytes_than_with_whole_experts() {
    const PAGE: &str = "docs/neuron-cache.md";
    let rows = table();
    for &[percent, whole, neurons, least] in &rows {
        assert!(
            neurons < 0.7 * whole && least <= neurons,
            "{percent} %: {neurons} of {whole} kB, least {least}"
        );
    }
    let line = |[percent, whole, neurons, least]: &[f64; 4]| {
        format!("| {percent} % | {whole:.0} kB | {neurons:.0} kB | {least:.0} kB |\n")
    };
    let lines: String = rows.iter().map(line).collect();
    let table = format!("\n| memory | whole experts | neurons | least |\n|---|---|---|---|\n{lines}\n");
    let page = std::fs::read_to_string(root().join(PAGE)).unwrap();
    let (before, rest) = page.split_once("neurons_on_disk::` -->\n").unwrap();
    let (written, after) = rest.split_once("<!-- /disk -->").unwrap();
    if std::env::var_os("MOEC_BLESS").is_some() {
        let page = format!("{before}neurons_on_disk::` -->\n{table}<!-- /disk -->{after}");
        return std::fs::write(root().join(PAGE), page).unwrap();
    }
    // Which neurons are active depends slightly on the machine's rounding.
    let numbers = |text: &str| -> Vec<f64> {
        text.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
    };
    let (stand, found) = (numbers(written), numbers(&table));
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1.0 + 0.05 * b;
    assert!(
        stand.len() == found.len() && stand.iter().zip(&found).all(near),
        "{PAGE} says{written}and not{table}"
    );
}

#[test]
fn auto_reads_neurons_if_the_profile_predicts_fewer_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let (text, profile) = (root().join("golden/models/ferris/eval/text.txt"), folder.path().join("p.trace"));
    let toml = write(&ferris_relu(), folder.path(), "f32", "");
    let mut calibrate = moec();
    calibrate.arg("calibrate").arg(&toml).args(["--quiet", "--tokens", "2048", "--text"]).arg(text);
    ok(calibrate.arg("-o").arg(&profile));
    // A disk with half the bandwidth for small reads.
    let device = folder.path().join("device.toml");
    let row = |bytes: u32, rate: f32| {
        format!("  {{ block_bytes = {bytes}, gb_per_s = {rate:?}, source = \"a test\" }},\n")
    };
    let disk =
        format!("[[memory]]\nname = \"disk\"\nbandwidth = [\n{}{}]\n", row(4096, 1.0), row(524_288, 2.0));
    let native = String::from_utf8(ok(moec().args(["targets", "native"])).stdout).unwrap();
    std::fs::write(&device, format!("{native}\n{disk}")).unwrap();
    let device = device.display().to_string();
    let seen = format!("[calibrate]\nprofile = \"{}\"\n", profile.display());
    for (target, budget, calibrated, by_neurons, why) in [
        (&*device, "30 MiB", true, true, "by neurons: expected bytes per token"),
        // The gates alone take 7 MB.
        (&*device, "24 MiB", true, false, "whole: gates would leave too little"),
        // Everything fits into memory.
        (&*device, "1 GiB", true, false, "whole: expected bytes per token"),
        (&*device, "30 MiB", false, false, ""),
        // Without figures of the disk, small reads are assumed to be as slow as on the measured disk.
        ("native", "30 MiB", true, false, "those of small reads count 6.0 times"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let seen = if calibrated { &*seen } else { "" };
        let memory = format!("{seen}[memory]\nbudget = \"{budget}\"\nthreads = 2");
        let bundle = folder.path().join("b");
        built(&write(&ferris_relu(), folder.path(), "f32", &memory), &["--target", target], &bundle);
        let stdout = String::from_utf8(ok(moec().arg("explain").arg(&bundle)).stdout).unwrap();
        let paging = Bundle::open(&bundle).unwrap().plan.paging.unwrap();
        assert_eq!(paging.by_neurons(), by_neurons, "{budget} on {target}:\n{stdout}");
        assert!(stdout.contains(why), "{budget} on {target}:\n{stdout}");
    }
}

#[test]
fn failing_disk_is_an_error_and_the_next_call_is_correct() {
    let prompt = &expected(&ferris_relu()).ids[..44];
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&ferris_relu(), folder.path(), "f32", ON_DISK);
    let want = in_memory(&bundle, prompt);
    let [one, all] = frames(&bundle);
    for (frames, threads) in [(all, 1), (3 * one, 2)] {
        let case = Case { frames, staging: 8, threads, reader: Choice::Threads };
        with_engine(&bundle, Some(case), (Some(failing()), None), |engine| {
            recovers(engine, prompt, &want);
        });
    }
}

/// Records clusters, and releases the first read when down of an expert was computed.
#[derive(Default)]
struct Holder {
    gate: Gate,
    parts: Mutex<Vec<ClusterPart>>,
}

impl std::fmt::Debug for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Holder").field("parts", &self.parts).finish_non_exhaustive()
    }
}

impl Hooks for Holder {
    fn cluster_computed(&self, layer: usize, part: ClusterPart, _expert: u32, _blocks: Range<usize>) {
        if layer > 0 {
            return;
        }
        self.parts.lock().unwrap().push(part);
        if matches!(part, ClusterPart::Down { .. }) {
            self.gate.open();
        }
    }
}

/// Logits of tokens that are decoded one by one.
fn decoded(engine: &mut Engine<'_>, text: &[u32]) -> Vec<u32> {
    let mut all = Vec::new();
    for (pos, &id) in text.iter().enumerate() {
        let keep = &mut |_, l: &[f32]| {
            all.extend(l.iter().map(|x| x.to_bits()));
            Ok(())
        };
        engine.decode(&[(0, pos, id)], keep).unwrap();
    }
    all
}

/// Holds the first read, which an expert of the first layer waits for, until down of another expert is computed.
/// Returns the parts of that layer's clusters in the order in which they were computed; fails if nothing
/// releases the read, or if logits are not those of the model in memory.
pub(crate) fn computed_beside_a_held_read(bundle: &Bundle, threads: usize) -> Vec<ClusterPart> {
    const PATIENCE: Duration = Duration::from_secs(20);
    let text = &expected(&ferris_relu()).ids[..4];
    let want = with_engine(bundle, None, (None, None), |engine| decoded(engine, text));
    let holder: &'static Holder = Box::leak(Box::default());
    let wrap = move |reader| {
        let mut first = true;
        let plan = move |_: &disk::Read| {
            if std::mem::take(&mut first) { Injected::Stall } else { Injected::Nothing }
        };
        Box::new(Faulty::new(reader, holder.gate.clone(), plan)) as Box<dyn disk::Reader>
    };
    let wrap = Wrap(Box::leak(Box::new(wrap)));
    let case = Case { frames: frames(bundle)[1], staging: 16, threads, reader: Choice::Threads };
    with_engine(bundle, Some(case), (Some(wrap), Some(holder)), |engine| {
        let (ended, end) = std::sync::mpsc::channel::<()>();
        let late = std::thread::spawn(move || {
            let late = end.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout);
            let before = holder.parts.lock().unwrap().clone();
            // Else a step that waits for all reads would never end.
            holder.gate.open();
            late.then_some(before)
        });
        let found = decoded(engine, text);
        drop(ended);
        let late = late.join().unwrap();
        assert_eq!(late, None, "{threads} threads: no expert was computed while a read of another was held");
        assert!(found == want, "{threads} threads: other bits");
    });
    holder.parts.lock().unwrap().clone()
}

/// Down of an expert is computed while up of another one is read: no barrier between matrices.
#[test]
fn experts_are_computed_while_up_of_another_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&ferris_relu(), folder.path(), "bf16", ON_DISK);
    for threads in [1, 2] {
        let parts = computed_beside_a_held_read(&bundle, threads);
        let down = parts.iter().position(|part| matches!(part, ClusterPart::Down { .. })).unwrap();
        assert!(parts[down..].contains(&ClusterPart::Up), "{threads} threads: {parts:?}");
    }
}

#[test]
fn impossible_neuron_settings_are_refused_with_alternatives() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |source: &Path, more: &str| {
        let toml = write(source, folder.path(), "bf16", more);
        fails(moec().arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(folder.path().join("b")))
            .1
    };
    let error = refused(&ferris_relu(), "[experts]\nskip = \"on\"\n[memory]\nbudget = \"16 MiB\"");
    assert!(error.contains("too small") && error.contains("the minimum is"), "{error}");
    let error =
        refused(&ferris_relu(), "[experts]\nskip = \"on\"\n[memory]\nbudget = \"1 GiB\"\npolicy = \"lfu\"");
    assert!(error.contains("cached by `lru`"), "{error}");
}
