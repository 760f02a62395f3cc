//! `bench`: tokens per second and memory.

#![allow(clippy::cast_possible_truncation, reason = "figures for readers, and ids within the vocabulary")]

use super::args::Bench;
use super::{Context, Failure, Io, assigned, hosts, interrupt, paging, size};
use crate::bundle::BundleReader;
use crate::bundle::program::Program;
use crate::error::{Error, Result};
use crate::exec::engine::{Engine, Memory};
use crate::platform::busy::{Busy, Others};
use crate::platform::energy::{EnergyMeter, EnergySource};
use crate::serving::best_of::best_of;
use crate::serving::big_little::Decoder;
use crate::serving::generate::{Request, check_context, generate, rate};
use crate::serving::sampler::{Sampler, Sampling};
use crate::serving::scheduler::{Choose, End, Event, Job, Scheduler, Setting, StepWork};
use crate::weights::{Demand, WeightPlacement};
use moec_ir::EntryKind;
use moec_ir::plan::{Arg, StateBuf, StateKind, Step};
use serde_json::json;
use std::collections::BTreeSet;
use std::fmt;
use std::time::{Duration, Instant};

pub(super) fn run(
    context: &Context<'_>,
    files: &BundleReader,
    args: &Bench,
    io: &mut Io<'_>,
) -> Result<(), Failure> {
    let max = context.program.model.max_context as usize;
    if args.stdin {
        let mut engine = context.open(&args.common, files, Demand::FULL)?;
        let _interrupt = interrupt::guard();
        return answer(&mut engine, io);
    }
    let prompt = args.prompt.unwrap_or_else(|| 512.min(max / 2).max(1));
    let n = args.r#gen.unwrap_or_else(|| 64.min(max.saturating_sub(prompt)).max(1));
    let what = Task { prompt, n, batch: args.batch };
    check_context(prompt, n, max)?;
    let slots = context.program.model.slots;
    if let Some(many) = args.best_of.filter(|&many| many > slots as usize) {
        return Err(Error::few_slots(many, slots).into());
    }
    let start = Instant::now();
    let demand = Demand { sequences: args.best_of.unwrap_or(args.batch), tokens: prompt + n };
    let mut engine = context.open(&args.common, files, demand)?;
    engine.ignore_overflow();
    let opened = start.elapsed();
    let _interrupt = interrupt::guard();
    if let Some(many) = args.best_of {
        return best(&mut engine, what, many, args, io);
    }
    // A warm-up: pages are read from disk, threads start.
    let (first, _) = once(&mut engine, Task { n: n.min(4), ..what })?;
    engine.settle()?;
    let (before, meter) = (Busy::now(), EnergyMeter::now());
    let times = (0..args.repeat).map(|_| once(&mut engine, what)).collect::<Result<Vec<_>>>()?;
    let others = before.and_then(|before| before.others(Busy::now()));
    let tokens = args.repeat * args.batch * (prompt + n);
    let energy = meter.and_then(|meter| Energy::new(&meter, tokens));
    let report = Report { first: Some(opened + first), others, energy, ..Report::new(&engine, what, &times) };
    let did = engine.paging();
    if args.json {
        let mut value = report.json();
        if let Some(did) = &did {
            paging::add(&mut value, did);
        }
        if let Some(did) = engine.assigned() {
            assigned::add(&mut value, &did);
        }
        hosts::add(&mut value, &engine);
        io.say(&format!("{value}\n"))?;
        return Ok(());
    }
    let rate = |r: Option<f64>| r.map_or("–".to_owned(), |r| format!("{r:.1} tokens/s"));
    let memory = engine.memory();
    let read = report.bytes_per_call;
    let bandwidth = report.decode.map_or(0.0, |d| d / args.batch as f64 * read as f64 / 1e9);
    let sequences = if args.batch > 1 { format!(", {} sequences", args.batch) } else { String::new() };
    let lines = [
        ("prefill", format!("{} ({prompt} tokens{sequences})", rate(report.prefill))),
        ("decode", format!("{} ({n} tokens{sequences})", rate(report.decode))),
        ("first token", report.first.map_or("–".to_owned(), |t| format!("after {:.2} s", t.as_secs_f64()))),
        ("threads", engine.threads().to_string()),
        ("peak memory", crate::platform::cpu::peak_memory().map_or("unknown".to_owned(), size)),
        ("weights", format!("{}, {}", size(memory.weights), weights_location(&engine.weights()))),
        ("KV cache", format!("{} when full", size(memory.kv))),
        ("arena", format!("{}, and {} of scratch", size(memory.arena), size(memory.scratch))),
        ("read per token", format!("about {} (decode: {bandwidth:.1} GB/s)", size(read))),
    ];
    // Bytes that sequences read together are not known in advance: they depend on the experts that they
    // share.
    let known = if args.batch > 1 { &lines[..lines.len() - 1] } else { &lines[..] };
    for (what, value) in known {
        io.say(&format!("{what:15} {value}\n"))?;
    }
    if let Some(energy) = report.energy {
        io.say(&format!("{:15} {energy}\n", "energy"))?;
    }
    if let Some(warning) = others.and_then(|others| others.warning(engine.threads())) {
        io.say(&format!("{:15} {warning}\n", "warning"))?;
    }
    if let Some(did) = &did {
        io.say(&format!("{}\n", paging::line(did)))?;
    }
    if let Some(over) = engine.overflowed() {
        io.say(&format!("{:15} {over}\n", "capacities"))?;
    }
    if let Some(did) = engine.assigned() {
        io.say(&format!("{}\n", assigned::line(&did)))?;
    }
    if let Some(line) = hosts::line(&engine) {
        io.say(&format!("{line}\n"))?;
    }
    Ok(())
}

/// Measures best-of-N and N runs of one sequence alternately, in tokens per second, prompts included.
fn best(
    engine: &mut Engine<'_>,
    what: Task,
    many: usize,
    args: &Bench,
    io: &mut Io<'_>,
) -> Result<(), Failure> {
    let Task { prompt, n, .. } = what;
    let ids = prompt_ids(0, prompt, engine.program().model.vocab);
    let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
    let mut once = |n: usize| -> Result<[Duration; 2]> {
        let request = Request { slot: 0, prompt: &ids, n, end: &[] };
        let start = Instant::now();
        best_of(engine, &request, many, &mut Decoder::full(), &sampling)?;
        let together = start.elapsed();
        let start = Instant::now();
        for i in 0..many {
            let mut sampler = Sampler::new(Sampling { seed: i as u64, ..sampling.clone() });
            generate(engine, &request, &mut Decoder::full(), &mut sampler, &mut |_| Ok(()))?;
        }
        Ok([together, start.elapsed()])
    };
    once(n.min(4))?; // a warm-up
    let times = (0..args.repeat).map(|_| once(n)).collect::<Result<Vec<_>>>()?;
    let of = |which: usize| rate(n * many, median(times.iter().map(|t| t[which]).collect()));
    let (together, single) = (of(0), of(1));
    let speedup = together.zip(single).map(|(t, s)| t / s);
    if args.json {
        let report = json!({
            "prompt": prompt,
            "gen": n,
            "best_of": many,
            "repeat": args.repeat,
            "threads": engine.threads(),
            "best_of_tokens_per_s": together,
            "single_runs_tokens_per_s": single,
            "speedup": speedup,
        });
        io.say(&format!("{report}\n"))?;
        return Ok(());
    }
    let show = |r: Option<f64>| r.map_or("–".to_owned(), |r| format!("{r:.1} tokens/s"));
    let each = format!("{n} tokens each after a prompt of {prompt}");
    let times = speedup.map_or_else(String::new, |s| format!(", {s:.2} times as fast"));
    io.say(&format!("{:15} {} ({each}){times}\n", format!("best of {many}"), show(together)))?;
    io.say(&format!("{:15} {}\n", format!("{many} single runs"), show(single)))?;
    Ok(())
}

/// Runs the measurements that lines of standard input request.
fn answer(engine: &mut Engine<'_>, io: &mut Io<'_>) -> Result<(), Failure> {
    let max = engine.program().model.max_context as usize;
    let mut line = Vec::new();
    loop {
        line.clear();
        let Some(input) = &mut io.input else { return Ok(()) };
        let mut byte = [0];
        while input.read(&mut byte).map_err(Error::input)? == 1 && byte[0] != b'\n' {
            line.push(byte[0]);
        }
        let text = String::from_utf8_lossy(&line);
        let words: Vec<usize> = text.split_whitespace().map_while(|w| w.parse().ok()).collect();
        let (prompt, n, batch) = match *words {
            [] if line.is_empty() => return Ok(()),
            [prompt, n, batch] if prompt > 0 && n > 0 && batch > 0 => (prompt, n, batch),
            _ => {
                let what = format!("`{}` is not a request for a measurement", text.trim());
                let hint = "write three numbers from 1 up: PROMPT GEN BATCH".to_owned();
                return Err(Failure::Use { what, hint });
            }
        };
        check_context(prompt, n, max)?;
        let what = Task { prompt, n, batch };
        let times = [once(engine, what)?];
        // No later request runs beside the loading of weights.
        engine.settle()?;
        let mut value = Report::new(engine, what, &times).json();
        if let Some(did) = engine.paging() {
            // Sums since the engine was opened: a program that measures twice takes the difference.
            paging::add(&mut value, &did);
        }
        if let Some(did) = engine.assigned() {
            assigned::add(&mut value, &did);
        }
        hosts::add(&mut value, engine);
        io.say(&format!("{value}\n"))?;
    }
}

/// Place of the weights, for people.
fn weights_location(held: &WeightPlacement) -> String {
    if !held.own {
        return format!("mapped ({})", held.why);
    }
    let huge = held.huge_bytes.map_or_else(String::new, |b| format!(", {} of it in huge pages", size(b)));
    format!("in {} of its own{huge} ({})", size(held.bytes), held.why)
}

/// Task to measure.
#[derive(Clone, Copy)]
struct Task {
    /// Tokens of each prompt.
    prompt: usize,
    /// Decode calls.
    n: usize,
    /// Sequences.
    batch: usize,
}

/// Results.
struct Report {
    what: Task,
    repeat: usize,
    threads: usize,
    /// Tokens per second of all sequences together.
    prefill: Option<f64>,
    decode: Option<f64>,
    /// Time from opening the engine until all prompts of the first measurement had been read, if measured.
    first: Option<Duration>,
    /// CPU time of other programs meanwhile, if measured.
    others: Option<Others>,
    energy: Option<Energy>,
    memory: Memory,
    held: WeightPlacement,
    /// Bytes that a decode call of one sequence must read.
    bytes_per_call: u64,
}

/// Energy that all measurements took.
#[derive(Clone, Copy)]
struct Energy {
    joules: f64,
    /// Tokens of prompts and answers.
    tokens: usize,
    source: EnergySource,
}

impl Energy {
    fn new(meter: &EnergyMeter, tokens: usize) -> Option<Self> {
        Some(Self { joules: meter.joules_since()?, tokens, source: meter.source() })
    }

    fn per_token(self) -> f64 {
        self.joules / self.tokens.max(1) as f64
    }

    fn json(self) -> serde_json::Value {
        json!({"joules": self.joules, "joules_per_token": self.per_token(), "source": self.source.name()})
    }
}

impl fmt::Display for Energy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = match self.source {
            EnergySource::Rapl => "CPU and memory",
            EnergySource::Battery => "the machine, by its battery",
        };
        write!(f, "{:.3} J per token, prompts included: {:.0} J of {of}", self.per_token(), self.joules)
    }
}

/// Bytes of states that are read for one more token after `tokens` tokens: all of them, or those within a
/// window.
fn cached_bytes(program: &Program, tokens: usize) -> u64 {
    let of_state = |s: &StateBuf| {
        let [slots, _, rows, _] = s.shape.map(f64::from);
        let read = match s.kind {
            StateKind::Ring { window } => (tokens as f64).min(f64::from(window)),
            StateKind::Cache => tokens as f64,
            StateKind::Recurrent | StateKind::Convolution => rows,
        };
        (s.live_bytes().unwrap_or(0) as f64 * (read / rows).min(1.0) / slots) as u64
    };
    program.states.iter().map(of_state).sum()
}

impl Report {
    fn new(engine: &Engine<'_>, what: Task, times: &[(Duration, Duration)]) -> Self {
        let (model, memory) = (&engine.program().model, engine.memory());
        let Task { prompt, n, batch } = what;
        // A token's share of the weights, and the cache of the tokens before it.
        let active = model.active_parameters as f64 / model.parameters.max(1) as f64;
        let weights = (memory.weights as f64 * active.min(1.0)) as u64;
        let weights = weights.saturating_sub(tables(engine.program()));
        Self {
            what,
            repeat: times.len(),
            threads: engine.threads(),
            prefill: rate(prompt * batch, median(times.iter().map(|t| t.0).collect())),
            decode: rate(n * batch, median(times.iter().map(|t| t.1).collect())),
            first: None,
            others: None,
            energy: None,
            memory,
            held: engine.weights(),
            bytes_per_call: weights + cached_bytes(engine.program(), prompt + n / 2),
        }
    }

    fn json(&self) -> serde_json::Value {
        json!({
            "prompt": self.what.prompt,
            "gen": self.what.n,
            "batch": self.what.batch,
            "repeat": self.repeat,
            "threads": self.threads,
            "prefill_tokens_per_s": self.prefill,
            "decode_tokens_per_s": self.decode,
            "first_token_seconds": self.first.map(|t| t.as_secs_f64()),
            "cores": self.others.map(|others| others.cores),
            "cores_used_by_others": self.others.map(|others| others.used),
            "energy": self.energy.map(Energy::json),
            "peak_memory_bytes": crate::platform::cpu::peak_memory(),
            "locked_bytes": crate::platform::cpu::locked_memory(),
            "weights": {
                "own": self.held.own,
                "why": self.held.why,
                "shared": !self.held.own,
                "bytes": self.held.bytes,
                "huge_page_bytes": self.held.huge_bytes,
                "reader": self.held.reader,
                "load_seconds": self.held.took.map(|t| t.as_secs_f64()),
            },
            "arena_bytes": self.memory.arena,
            "scratch_bytes": self.memory.scratch,
            "weight_bytes": self.memory.weights,
            "kv_bytes": self.memory.kv,
            "bytes_per_decoded_token": self.bytes_per_call,
        })
    }
}

/// Bytes of weights of which a token reads one row: those used only by steps that also take ids.
fn tables(program: &Program) -> u64 {
    let Some(entry) = program.entries.iter().find(|e| matches!(e.kind, EntryKind::Decode(_))) else {
        return 0;
    };
    let by_ids = |step: &&Step| step.args.iter().any(|arg| matches!(arg, Arg::Buffer(0, _)));
    let (tables, others): (Vec<_>, Vec<_>) = entry.steps.iter().partition(by_ids);
    let of = |steps: &[&Step]| -> BTreeSet<u32> {
        let segment = |arg: &Arg| if let Arg::Segment(i) = arg { Some(*i) } else { None };
        steps.iter().flat_map(|step| step.args.iter().filter_map(segment)).collect()
    };
    let only = of(&tables);
    let bytes = |i: &u32| program.segments.get(*i as usize).map_or(0, |s| s.bytes);
    only.difference(&of(&others)).map(bytes).sum()
}

/// Ids spread over the vocabulary, the same on every machine. Those of the next sequence begin at the end of
/// these.
fn prompt_ids(sequence: usize, n: usize, vocab: u32) -> Vec<u32> {
    let id = |i: u64| (i.wrapping_mul(2_654_435_761) >> 8) as u32 % vocab;
    (0..n).map(|i| id((sequence * n + i) as u64)).collect()
}

/// Sampler that returns given tokens and ignores the logits.
struct Known<'i>(std::iter::Cycle<std::slice::Iter<'i, u32>>);

impl Choose for Known<'_> {
    fn choose(&mut self, _logits: &[f32]) -> Result<u32> {
        self.0.next().copied().ok_or_else(Error::empty_prompt)
    }
}

/// Time of the prefill of all sequences, and of the decode calls after it. All prompts are read before the
/// first decode call; each sequence is continued with its own tokens.
fn once(engine: &mut Engine<'_>, what: Task) -> Result<(Duration, Duration)> {
    let Task { prompt, n, batch } = what;
    let model = &engine.program().model;
    let (vocab, slots) = (model.vocab, model.slots);
    if batch > slots as usize {
        return Err(Error::few_slots(batch, slots));
    }
    let ids: Vec<_> = (0..batch).map(|s| prompt_ids(s, prompt, vocab)).collect();
    let mut decoder = Decoder::full();
    let setting = Setting { budget: Some(usize::MAX), ..Setting::default() };
    let mut scheduler = Scheduler::new(engine, &mut decoder, &setting)?;
    for ids in &ids {
        let known: Box<dyn Choose> = Box::new(Known(ids.iter().cycle()));
        // The first token comes from the prompt; each of the others needs a call.
        let job = Job {
            prompt: ids.clone(),
            samplers: vec![known],
            n: n + 1,
            end: Vec::new(),
            limit: None,
            scores: None,
            draft_tokens: 0,
        };
        scheduler.submit(job)?;
    }
    let (mut prefill, mut decode, mut failed) = (Duration::ZERO, Duration::ZERO, None);
    let mut sink = |_, event| match event {
        Event::Ended(End::Failed(e)) => {
            failed = Some(e);
            false
        }
        _ => true,
    };
    scheduler.run(&mut sink, &mut |step| {
        match step.done {
            StepWork::Decode(_) => decode += step.took,
            _ => prefill += step.took,
        }
        true
    })?;
    failed.map_or(Ok((prefill, decode)), Err)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
