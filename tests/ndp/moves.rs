//! Experts that move while a model runs: beside attention and dense layers, or not at all.

use super::*;
use moec_runtime::bundle::program::Program as Plan;
use moec_runtime::exec::unit::{Launch, PoolThread, StepFault};
use moec_runtime::platform::memory::Addr;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

/// Work of units, in the order in which it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// A step on the experts of a layer.
    Experts(usize),
    /// Another step of the GPU.
    Other,
    /// A transfer begins: of an expert to the GPU, or of one between DIMMs.
    Begin(Transfer),
    /// It ends.
    End(Transfer),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transfer {
    /// To the GPU: bytes of a matrix.
    Copy(usize),
    /// Of an expert of a layer, between DIMMs.
    Relocate(usize, u32),
}

#[derive(Default)]
struct Log {
    events: Mutex<Vec<Event>>,
    changed: Condvar,
}

impl Log {
    fn add(&self, event: Event) {
        self.events.lock().unwrap().push(event);
        self.changed.notify_all();
    }

    /// Does a transfer that lasts until the GPU has executed a step other than of experts, or for a while.
    fn span<T>(&self, of: Transfer, transfer: impl FnOnce() -> T) -> T {
        let mut events = self.events.lock().unwrap();
        let begin = events.len();
        events.push(Event::Begin(of));
        let waits = |events: &mut Vec<Event>| !events[begin..].contains(&Event::Other);
        drop(self.changed.wait_timeout_while(events, Duration::from_millis(200), waits).unwrap());
        let result = transfer();
        self.add(Event::End(of));
        result
    }
}

/// A unit that records what it does.
struct Recorded {
    inner: Box<dyn ComputeUnit>,
    log: Arc<Log>,
    /// The steps of decoding, and the layer whose experts each reads.
    steps: Vec<Option<usize>>,
    /// Layer of each set of command streams.
    sets: Vec<usize>,
    is_gpu: bool,
    /// The transfer between DIMMs that fails.
    fails: Option<usize>,
    started: OnceLock<()>,
}

impl ComputeUnit for Recorded {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn executes(&self, builtin: Builtin) -> bool {
        self.inner.executes(builtin)
    }

    fn load(&mut self, program: &Plan, index: u32, bundle: &BundleReader) -> Result<(), moec_runtime::Error> {
        self.inner.load(program, index, bundle)
    }

    fn take(&mut self, bytes: u64) -> Result<Option<Addr>, moec_runtime::Error> {
        self.inner.take(bytes)
    }

    fn is_mapped(&self) -> bool {
        self.inner.is_mapped()
    }

    unsafe fn copy(&self, from: Addr, to: Addr, bytes: usize) {
        // SAFETY: the caller's promise.
        let copy = || unsafe { self.inner.copy(from, to, bytes) };
        // Entries of tables are short.
        if self.started.get().is_some() && bytes > 64 {
            self.log.span(Transfer::Copy(bytes), copy);
        } else {
            copy();
        }
    }

    fn relocate(&self, set: u32, expert: u32, to: Option<u32>) -> Result<(), moec_runtime::Error> {
        let earlier = |e: &&Event| matches!(e, Event::End(Transfer::Relocate(..)));
        let earlier = self.log.events.lock().unwrap().iter().filter(earlier).count();
        if self.fails == Some(earlier) {
            return Err(moec_runtime::Error::plan("DIMM 3 does not answer".to_owned()));
        }
        let of = Transfer::Relocate(self.sets[set as usize], expert);
        self.log.span(of, || self.inner.relocate(set, expert, to))
    }

    fn settle(&self, set: u32, expert: u32) -> Result<(), moec_runtime::Error> {
        self.inner.settle(set, expert)
    }

    unsafe fn submit(&self, launch: &Launch<'_>, thread: PoolThread) {
        let _ = self.started.set(());
        let decodes = launch.seq_len == 0;
        match self.steps[launch.step] {
            Some(layer) if decodes => self.log.add(Event::Experts(layer)),
            None if decodes && self.is_gpu => self.log.add(Event::Other),
            _ => {}
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.submit(launch, thread) };
    }

    fn wait(&self, fault: &OnceLock<StepFault>) {
        self.inner.wait(fault);
    }
}

/// Computes with units that record, or fail at a transfer between DIMMs.
fn recorded(
    bundle: &Bundle,
    prompt: &[u32],
    fails: Option<usize>,
) -> (Result<Computed, moec_runtime::Error>, Vec<Event>) {
    let log = Arc::<Log>::default();
    let plan = &bundle.plan;
    let entry = plan.entries.iter().find(|e| e.kind == moec_ir::EntryKind::Decode(1)).unwrap();
    let layer_of = |segment: u32| plan.experts.layers.iter().position(|l| l.segments.contains(&segment));
    let step = |step: &moec_ir::plan::Step| {
        step.args.iter().find_map(|arg| match *arg {
            moec_ir::plan::Arg::Matrices(segment) => layer_of(segment),
            _ => None,
        })
    };
    let mut steps: Vec<Option<usize>> = entry.steps.iter().map(step).collect();
    let most = plan.entries.iter().map(|e| e.steps.len()).max().unwrap();
    steps.resize(most, None);
    let of_set = |set: &moec_ir::plan::StreamSet| {
        plan.experts.layers.iter().position(|l| l.layer == set.layer).unwrap()
    };
    let sets: Vec<usize> = plan.streams.iter().map(of_set).collect();
    let wrap = |name: &str, inner: Box<dyn ComputeUnit>| -> Box<dyn ComputeUnit> {
        let (log, steps, sets) = (Arc::clone(&log), steps.clone(), sets.clone());
        let (is_gpu, started) = (name == "gpu", OnceLock::new());
        Box::new(Recorded { inner, log, steps, sets, is_gpu, fails, started })
    };
    let computed = compute_on(bundle, prompt, 24, 2, &wrap);
    let events = log.events.lock().unwrap().clone();
    (computed, events)
}

/// A machine on which launches are free, so that experts of a small model are worth a move.
fn device(folder: &Path) -> String {
    let path = emulated(folder, "h100-spr-ndp");
    let device = fs::read_to_string(&path).unwrap();
    let free = device.replace("dispatch_cost_us = { value = 5,", "dispatch_cost_us = { value = 0,");
    assert!(free != device);
    fs::write(&path, free).unwrap();
    path.to_str().unwrap().to_owned()
}

fn prompt() -> Vec<u32> {
    (0..40).map(|i| 3 + i * 29 % 400).collect()
}

const ON_GPU: &str = "attention = \"gpu\"\nrest = \"gpu\"\ncached = 3\n";

/// Moves begin when the experts of a layer have been computed, and go on beside attention and dense layers of
/// the next one. The tokens are those without moves, and of the CPU.
#[test]
fn experts_move_beside_attention() {
    if !emulates() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let target = device(folder.path());
    let moves = build(&ferris(), folder.path(), "moves", &target, ON_GPU);
    let stays = build(&ferris(), folder.path(), "stays", &target, &format!("{ON_GPU}moves = false\n"));
    let want = compute(&stays, &prompt(), 24, 2);
    let (got, events) = recorded(&moves, &prompt(), None);
    let got = got.unwrap();
    assert_eq!(got.ids, want.ids);
    let did = got.assigned.unwrap();
    println!("{did:?}");
    let layers = moves.plan.experts.layers.len();
    // By kind: transfers, and those during which the GPU executed another step.
    let mut beside = [[0; 2]; 2];
    for (at, event) in events.iter().enumerate() {
        let Event::Begin(of) = *event else { continue };
        let end = at + events[at..].iter().position(|e| *e == Event::End(of)).unwrap();
        let kind = usize::from(matches!(of, Transfer::Relocate(..)));
        beside[kind][0] += 1;
        beside[kind][1] += usize::from(events[at..end].contains(&Event::Other));
        let Transfer::Relocate(layer, _) = of else { continue };
        // No expert of the layer before is computed any more.
        let before = (layer + layers - 1) % layers;
        let next = events[at..].iter().find_map(|e| match *e {
            Event::Experts(layer) => Some(layer),
            _ => None,
        });
        assert!(next != Some(before), "a move of layer {layer} began among the experts of layer {before}");
    }
    assert!(beside.iter().all(|[_, beside]| *beside > 0), "{beside:?}");
    let [hot, relaid, moved] = did.moves;
    assert!(hot > 0 && relaid + moved > 0, "{did:?}");
    assert_eq!(beside[1][0] as u64, relaid + moved, "{did:?}");
    // The decisions follow the plan's times, not those of the units.
    let again = compute(&moves, &prompt(), 24, 1);
    assert!(again.ids == got.ids && again.logits == got.logits);
    assert_eq!(again.assigned, Some(did));
}

/// A move that fails ends the run with its reason, and without a wrong token.
#[test]
fn failing_move_is_reported() {
    if !emulates() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&ferris(), folder.path(), "b", &device(folder.path()), ON_GPU);
    let error = recorded(&bundle, &prompt(), Some(2)).0.err().unwrap().to_string();
    assert!(error.contains("DIMM 3 does not answer"), "{error}");
}

/// With `prefill = "hot"` the GPU computes all experts of prompts, which are streamed through the frames of
/// all layers; decoding uses all units. The tokens are the same, and the simulation agrees.
#[test]
fn prompts_on_the_gpu_are_streamed_through_its_frames() {
    if !emulates() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let target = device(folder.path());
    let stays = build(&ferris(), folder.path(), "stays", &target, "cached = 7\nmoves = false\n");
    let hot = build(&ferris(), folder.path(), "hot", &target, "cached = 7\nprefill = \"hot\"\n");
    let frames: usize = hot.plan.experts.layers.iter().map(|l| l.on(1).len()).sum();
    let (want, got) = (compute(&stays, &prompt(), 0, 2), compute(&hot, &prompt(), 0, 2));
    let did = got.assigned.unwrap();
    let [on_gpu, on_cpu, on_dimms] = did.experts;
    assert!(on_gpu > 0 && on_cpu == 0 && on_dimms == 0, "{did:?}, {frames} frames");
    assert!(did.streamed > 0 && did.fetched > 0, "{did:?}");
    assert!(near(&got.logits, &want.logits, prompt().len()) >= 0.9);
    let (want, got) = (compute(&stays, &prompt(), 24, 2), compute(&hot, &prompt(), 24, 2));
    assert_eq!(got.ids, want.ids);
    let did = got.assigned.unwrap();
    println!("{did:?}");
    assert!(did.experts[1] + did.experts[2] > 0 && did.moves[0] > 0, "{did:?}");
}

/// Prompts are on the GPU only where its frames hold the experts of a layer, and experts move.
#[test]
fn prompts_on_the_gpu_need_frames_and_moves() {
    let folder = tempfile::tempdir().unwrap();
    for (more, why) in [("cached = 2\n", "frames for 8"), ("moves = false\n", "which are off")] {
        let toml = folder.path().join("m.toml");
        let text = format!(
            "[model]\nsource = {:?}\n[weights]\nexperts = \"bf16\"\n[placement]\nprefill = \"hot\"\n{more}",
            ferris()
        );
        fs::write(&toml, text).unwrap();
        let mut build = moec();
        build.arg("build").arg(&toml).args(["--target", "h100-spr-ndp", "--quiet", "--no-run", "-o"]);
        let (_, stderr) = fails(build.arg(folder.path().join("b")));
        assert!(stderr.contains("`prefill = \"hot\"`") && stderr.contains(why), "{stderr}");
    }
}
