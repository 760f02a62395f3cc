//! `moec steps`: the time of every step of a call.
#![expect(clippy::cast_possible_truncation, reason = "figures for readers, and indices of a plan")]

mod limits;

use super::output;
use limits::{Call, Work};
use moec_base::progress::Progress;
use moec_base::{Error, Result, interrupt};
use moec_bundle::read::Bundle;
use moec_cpu::roofline::{self, Roofline};
use moec_ir::EntryKind;
use moec_ir::plan::UnitRef;
use moec_ir::plan::{Builtin, Code, Plan};
use moec_runtime::CheckLevel;
use moec_runtime::{Engine, LogitRows, Options, Program, Row};
use moec_targets::backends;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

/// Time every step of a compiled model
///
/// Steps run one by one on all threads, so that their sum is a little more than the time of a call.
#[derive(Clone, Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("call").args(["prefill", "decode", "little"]))]
pub struct Args {
    /// The bundle
    pub bundle: PathBuf,
    /// Time a prompt with this number of tokens [default: one full chunk]
    #[arg(long, value_name = "TOKENS")]
    pub prefill: Option<usize>,
    /// Time a decode call with this number of sequences
    #[arg(long, value_name = "SEQUENCES")]
    pub decode: Option<usize>,
    /// Time a big-little decode call with fewer experts and this number of sequences
    #[arg(long, value_name = "SEQUENCES")]
    pub little: Option<usize>,
    /// Tokens in the context before the call
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub context: usize,
    /// Number of measurements; the medians are reported
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// Threads [default: `MOEC_THREADS`, else one per core]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Also measure this machine, and print the least time that it needs for the matrices and states of each
    /// step: the longer of arithmetic at its peak and of one pass over their bytes. Takes some seconds
    #[arg(long)]
    pub limits: bool,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// One step and its median time.
struct Timed {
    op: &'static str,
    scope: String,
    kernel: String,
    time: Duration,
    /// Its arithmetic and its bytes, with the least time for them.
    limit: Option<(Work, Duration)>,
}

/// Times the steps and prints them.
///
/// # Errors
/// Fails if the bundle cannot be executed here, or has no entry point for the call.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    let bundle = Bundle::open(&args.bundle)?;
    let unit = bundle.unit()?;
    let program = Program::new(bundle.plan.clone(), &|symbol| unit.resolve(symbol))
        .map_err(|e| Error::input("the plan cannot run on this machine").because(e))?;
    let (index, rows) = call(&bundle.plan, args)?;
    let options = Options { threads: args.threads, ..Options::default() };
    let (folder, host) = (&bundle.folder, &mut |unit: &UnitRef| backends::host(&unit.backend, &unit.name));
    let mut engine = Engine::with_units(&program, folder, host, &bundle.files(CheckLevel::Small)?, options)
        .map_err(Error::from)?;
    // Recurrent states have no holes: every token before the call is read, and each measurement begins there.
    let slots: BTreeSet<u32> = rows.iter().map(|r| r.slot).filter(|_| args.context > 0).collect();
    let before: Vec<u32> = (0..args.context).map(|i| spread(i, bundle.plan.model.vocab)).collect();
    for &slot in &slots {
        engine.prefill(slot, 0, &before, LogitRows::None, &mut |_, _| Ok(())).map_err(Error::from)?;
        engine.snapshot(slot).map_err(Error::from)?;
    }
    let mut once = || {
        interrupt::check()?;
        slots.iter().try_for_each(|&slot| engine.rewind(slot, args.context)).map_err(Error::from)?;
        let seq_len = rows.iter().map(|r| r.pos + 1).max().unwrap_or(0);
        engine.time_steps(index, &rows, &[rows.len() - 1], seq_len).map_err(Error::from)
    };
    once()?; // a warm-up: pages come from disk
    let times = (0..args.repeat).map(|_| once()).collect::<Result<Vec<_>>>()?;
    let machine = args.limits.then(|| {
        let tick = &mut |what: &str| progress.stage("Measured", what);
        roofline::measure(engine.threads(), tick).map_err(Error::from)
    });
    let machine = machine.transpose()?;
    let steps = join(&bundle, index, &rows, &times, machine.as_ref())?;
    let call = bundle.plan.entries[index].kind;
    if args.json {
        return output::json(&report(call, &rows, args, &steps));
    }
    output::data(&output::table(&summary(&steps, args.limits)))
}

/// The entry point of a call, and its rows.
fn call(plan: &Plan, args: &Args) -> Result<(usize, Vec<Row>)> {
    let (decode, little) = (args.decode.is_some(), args.little.is_some());
    let of_kind = |k: EntryKind| match k {
        EntryKind::Prefill(_) => !decode && !little,
        EntryKind::Decode(_) => decode,
        EntryKind::Little(_) => little,
    };
    let slots: Vec<(usize, usize)> = plan
        .entries
        .iter()
        .enumerate()
        .filter(|(_, e)| of_kind(e.kind))
        .map(|(i, e)| (i, e.kind.rows()))
        .collect();
    let largest = slots.iter().map(|r| r.1).max().unwrap_or(0);
    let n = args.decode.or(args.little).or(args.prefill).unwrap_or(largest);
    let fits = slots.iter().filter(|r| r.1 >= n).min_by_key(|r| r.1);
    let (index, _) = *fits.filter(|_| n > 0).ok_or_else(|| {
        Error::usage(format!("the bundle has no entry point for {n} rows"))
            .hint(format!("the largest of that kind takes {largest}"))
    })?;
    let (vocab, separate_slots) = (plan.model.vocab, decode || little);
    let row = |i: usize| Row {
        slot: if separate_slots { i as u32 } else { 0 },
        pos: args.context + if separate_slots { 0 } else { i },
        id: spread(i, vocab),
    };
    Ok((index, (0..n).map(row).collect()))
}

/// A token, spread over the vocabulary (Knuth's multiplicative hashing).
const fn spread(i: usize, vocab: u32) -> u32 {
    (i as u32 + 1).wrapping_mul(2_654_435_761) % vocab
}

/// Names of the steps of an entry point, with the medians of their times, and with limits on a machine.
fn join(
    bundle: &Bundle,
    index: usize,
    rows: &[Row],
    times: &[Vec<Duration>],
    machine: Option<&Roofline>,
) -> Result<Vec<Timed>> {
    let module = bundle.graph()?;
    let (entry, graph) = (&bundle.plan.entries[index], module.entries.get(index));
    let call = Call::of(rows);
    let timed = entry.steps.iter().enumerate().map(|(i, step)| {
        let mut of_step: Vec<Duration> = times.iter().map(|t| t[i]).collect();
        of_step.sort_unstable();
        let node = graph.and_then(|g| g.nodes.get(step.node as usize));
        let kernel = match &step.code {
            Code::Kernel(k) => bundle.plan.kernels.get(*k as usize).map(|k| k.symbol.clone()),
            Code::Builtin(Builtin::Launch { kernel }) => {
                bundle.plan.launches.get(*kernel as usize).map(|k| k.symbol.clone())
            }
            Code::Builtin(b) => {
                Some(format!("{b:?}").split([' ', '(']).next().unwrap_or_default().to_owned())
            }
        };
        Timed {
            op: node.map_or("", |n| n.op.name()),
            scope: node.map(|n| n.scope.to_string()).unwrap_or_default(),
            kernel: kernel.unwrap_or_default(),
            time: of_step[of_step.len() / 2],
            limit: machine.zip(node).and_then(|(machine, node)| {
                let work = Work::of(&bundle.plan, entry, step, node, call)?;
                Some((work, work.limit(machine)))
            }),
        }
    });
    Ok(timed.collect())
}

/// Steps of one operator and kernel.
#[derive(Default)]
struct Sum {
    steps: usize,
    seconds: f64,
    /// Seconds of those with a limit, and the sum of the limits.
    limited: [f64; 2],
}

impl Sum {
    fn add(&mut self, step: &Timed) {
        self.steps += 1;
        self.seconds += step.time.as_secs_f64();
        if let Some((_, limit)) = step.limit {
            self.limited[0] += step.time.as_secs_f64();
            self.limited[1] += limit.as_secs_f64();
        }
    }

    /// Number, milliseconds, share of `total`, and share of the limit.
    fn cells(&self, total: f64, limits: bool) -> Vec<String> {
        let percent = |part: f64, of: f64| format!("{:.1} %", 100.0 * part / of.max(1e-12));
        let [seconds, limit] = self.limited;
        let of_limit = || if limit > 0.0 { percent(limit, seconds) } else { String::new() };
        let mut cells =
            vec![self.steps.to_string(), format!("{:.3}", self.seconds * 1e3), percent(self.seconds, total)];
        cells.extend(limits.then(of_limit));
        cells
    }
}

/// Steps of one operator and kernel, the longest first.
fn summary(steps: &[Timed], limits: bool) -> Vec<Vec<String>> {
    let (mut all, mut by_kernel) = (Sum::default(), BTreeMap::<(&str, &str), Sum>::new());
    for step in steps {
        all.add(step);
        by_kernel.entry((step.op, &step.kernel)).or_default().add(step);
    }
    let mut sorted: Vec<_> = by_kernel.into_iter().collect();
    sorted.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    let mut head = vec!["operator", "steps", "ms", "share"];
    head.extend(limits.then_some("of the limit"));
    head.push("kernel");
    let row = |op: &str, sum: &Sum, kernel: &str| {
        let cells = sum.cells(all.seconds, limits);
        [vec![op.to_owned()], cells, vec![kernel.to_owned()]].concat()
    };
    let mut rows = vec![head.into_iter().map(str::to_owned).collect()];
    rows.extend(sorted.iter().map(|((op, kernel), sum)| row(op, sum, kernel)));
    rows.push(row("(all)", &all, ""));
    rows
}

fn report(call: EntryKind, rows: &[Row], args: &Args, steps: &[Timed]) -> Value {
    let step = |s: &Timed| {
        let mut step = json!({
            "op": s.op, "scope": s.scope, "kernel": s.kernel, "seconds": s.time.as_secs_f64(),
        });
        if let Some((work, limit)) = s.limit {
            step["limit"] = json!({
                "seconds": limit.as_secs_f64(), "operations": work.operations, "bytes": work.bytes,
            });
        }
        step
    };
    json!({
        "entry": call.to_string(),
        "rows": rows.len(),
        "context": args.context,
        "seconds": steps.iter().map(|s| s.time.as_secs_f64()).sum::<f64>(),
        "steps": steps.iter().map(step).collect::<Vec<_>>(),
    })
}
