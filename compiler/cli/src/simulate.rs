//! `moec simulate`.

mod hosts;

use super::output;
use moec_backend::StreamStep;
use moec_base::error::io_error;
use moec_base::human;
use moec_base::{Error, Result};
use moec_bundle::read::Bundle;
use moec_costs::hosts::Network;
use moec_costs::run::Outcome;
use moec_costs::timeline::Timeline;
use moec_device::Device;
use moec_ir::plan::ExpertPolicy;
use moec_passes::hot::HotShare;
use moec_profile::Profile;
use moec_simulate::assigned::{self, assigned};
use moec_simulate::bundle::{BUNDLE, Request, Simulated, simulate};
use moec_simulate::hosts::{MOST, hosts as simulated_hosts};
use moec_simulate::paged::{self, paged};
use moec_simulate::perfetto;
use moec_simulate::phone::phone;
use moec_simulate::systems::System;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Simulate a bundle on NPU, SSD-offload or near-data-processing hardware: latency, energy, reads
///
/// Simulates a bundle with static graphs on queues of the CPU and the Neural Engine, with the costs of the
/// device file and the loads of a profile. Compares the plan's placement with Core ML alone, its default
/// scheduling, and ANEMLL. With experts on disk, the runtime's own policies decide which experts are read and
/// cached, by the routing of a profile, on modelled units and links. With NDP DIMMs, the runtime's scheduler
/// assigns experts to units in every step. With `--hosts`, it predicts the speed of the model on clusters of other
/// sizes. On a phone with a profile of active neurons, the NPU computes hot
/// neurons and the CPU cold ones; neurons that do not fit into memory are read from disk.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A bundle for `m2-ultra`, `m2-max`, `snapdragon-8-gen-3` or `snapdragon-8-plus-gen-1`, one with a memory budget, or one for
    /// `h100-spr-ndp` or `spr-ndp`; with `--hosts` one for CPUs
    pub bundle: PathBuf,
    /// Profile with the loads and the routing of experts [default: the mean loads stored in the bundle]
    #[arg(long, value_name = "PROFILE")]
    pub trace: Option<PathBuf>,
    /// Write the timelines of all systems as a trace for ui.perfetto.dev
    #[arg(long, value_name = "FILE.JSON")]
    pub timeline: Option<PathBuf>,
    /// Tokens of the prompt, rounded up to whole chunks for static graphs [default: four chunks; one chunk
    /// with experts on disk; none with NDP DIMMs]
    #[arg(long, value_name = "TOKENS")]
    pub prompt: Option<u32>,
    /// Tokens decoded after the prompt [default: none; 64 with experts on disk; 16 per sequence with NDP
    /// DIMMs or hot neurons]
    #[arg(long, value_name = "TOKENS")]
    pub decode: Option<u32>,
    /// Sequences that are decoded together, with NDP DIMMs or `--hosts` [default: the bundle's largest batch] or hot
    /// neurons [default: 1]
    #[arg(long, value_name = "SEQUENCES", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub batch: Option<u32>,
    /// Memory for experts, such as `12 GiB`, with hot neurons [default: the memory that the device leaves to
    /// a program]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub memory: Option<u64>,
    /// Compare all divisions of the model between so many hosts, each like the first of the device
    #[arg(
        long,
        value_name = "N,…",
        value_delimiter = ',',
        conflicts_with_all = ["timeline", "prompt", "decode", "memory"],
        value_parser = clap::value_parser!(u8).range(1..=i64::from(MOST))
    )]
    pub hosts: Vec<u8>,
    /// Network between these hosts: rate and round trip, such as `10 Gb/s, 100 us` [default: the device's link]
    #[arg(long, value_name = "NETWORK", requires = "hosts")]
    pub network: Option<Network>,
    /// Device, by name or file [default: the bundle's]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// A size.
fn bytes(text: &str) -> std::result::Result<u64, String> {
    human::parse_bytes(text)
        .ok_or_else(|| "expected a size with a unit, such as `12 GiB` or `512 MiB`".to_owned())
}

/// Simulates a bundle and prints the results.
///
/// # Errors
/// Fails if the bundle, the profile or the device cannot be simulated, or a file cannot be written.
pub fn run(args: &Args) -> Result<()> {
    let bundle = Bundle::open(&args.bundle)?;
    let device = match args.target.as_deref() {
        None => bundle.device()?,
        Some(name) => moec_targets::device(name)?,
    };
    let profile = args.trace.as_deref().map(Profile::read).transpose()?;
    let hot: Vec<HotShare> = bundle.decisions()?.decisions.iter().filter_map(HotShare::of).collect();
    let by_neurons = !hot.is_empty() && profile.as_ref().is_some_and(|p| !p.neurons.is_empty());
    if !args.hosts.is_empty() {
        let request = Request { device: &device, profile: profile.as_ref(), prompt: None, decode: None };
        let numbers: Vec<usize> = args.hosts.iter().map(|&n| n.into()).collect();
        let simulated = simulated_hosts(&bundle, &request, &numbers, args.network, args.batch)?;
        return if args.json {
            output::json(&hosts::value(&device, &simulated))
        } else {
            output::data(&hosts::text(&device, &simulated))
        };
    }
    let policy = &bundle.plan.experts.policy;
    if policy.cached().is_some() {
        return Err(Error::limit("bundles with a GPU expert cache cannot be simulated")
            .because("`moec simulate` does not model the CPU, the GPU and the link together")
            .hint("`run generate --json` reports the predicted time (`expected_s`); `docs/hybrimoe.md` compares systems on one machine"));
    }
    unused(args, policy.cold().is_some(), by_neurons)?;
    let request =
        Request { device: &device, profile: profile.as_ref(), prompt: args.prompt, decode: args.decode };
    if let Some(paging) = bundle.plan.paging.as_ref().filter(|_| bundle.plan.placement.is_dynamic()) {
        if paging.by_neurons() {
            return Err(Error::limit("bundles that read neurons from disk one by one cannot be simulated")
                .because("the bundle does not record which neurons a token activates")
                .hint("`docs/neuron-cache.md` lists bytes per token; `run bench` measures a bundle"));
        }
        return from_disk(&device, &paged(&bundle, paging, &request)?, args);
    }
    if let ExpertPolicy::Scheduled(schedule) = policy {
        return from_modules(&device, &assigned(&bundle, schedule, &request, args.batch)?, args);
    }
    if bundle.plan.paging.as_ref().is_some_and(moec_ir::plan::Paging::gates_on_disk) {
        return Err(Error::limit("bundles whose gates stay on disk cannot be simulated")
            .because("the simulation of hot and cold neurons has all gates in memory")
            .hint("build without `predict`, or measure with `run bench`"));
    }
    if by_neurons {
        let simulated = phone(&bundle, &hot, &request, args.batch, args.memory)?;
        if let Some(path) = &args.timeline {
            write(path, &[(BUNDLE, &simulated.timeline)])?;
        }
        let networks = super::packages::hot(&bundle)?;
        return if args.json {
            output::json(&super::phone::value(&device, &simulated, networks))
        } else {
            output::data(&super::phone::text(&device, &simulated, networks))
        };
    }
    let simulated = simulate(&bundle, &request)?;
    if let Some(path) = &args.timeline {
        let timelines: Vec<_> = simulated.outcomes.iter().map(|(name, o)| (*name, &o.timeline)).collect();
        write(path, &timelines)?;
    }
    if args.json {
        output::json(&one_json(&device, &simulated))
    } else {
        output::data(&one_text(&device, &simulated))
    }
}

/// Fails if an option does not apply to the bundle. `assigned`: it is for NDP DIMMs; `by_neurons`: it has hot
/// neurons.
fn unused(args: &Args, assigned: bool, by_neurons: bool) -> Result<()> {
    let neurons = "a bundle with hot neurons in `decisions.json`, and a `--trace` with counts of neurons";
    let options = [
        ("--memory", args.memory.is_some(), by_neurons, neurons),
        (
            "--batch",
            args.batch.is_some(),
            assigned || by_neurons,
            "a bundle for NDP DIMMs, or one with hot neurons and their `--trace`",
        ),
        ("--prompt", args.prompt.is_some(), !by_neurons, "a bundle that is not decoded by hot neurons"),
    ];
    match options.iter().find(|(_, given, used, _)| *given && !used) {
        Some((name, _, _, whose)) => Err(Error::usage(format!("`{name}` does not apply to this bundle"))
            .hint(format!("it requires {whose}"))),
        None => Ok(()),
    }
}

fn write(path: &Path, timelines: &[(&str, &Timeline)]) -> Result<()> {
    let text = perfetto::trace(timelines).to_string();
    std::fs::write(path, text).map_err(|e| io_error("write", path, &e))
}

/// Output for a bundle whose experts are assigned in every step.
fn from_modules(device: &Device, s: &assigned::Simulated, args: &Args) -> Result<()> {
    if let Some(path) = &args.timeline {
        let text = perfetto::assigned(BUNDLE, &s.run).to_string();
        std::fs::write(path, text).map_err(|e| io_error("write", path, &e))?;
    }
    let busy = |queue: usize| -> f64 {
        s.run.events.iter().filter(|e| e.queue == queue).map(|e| e.end_us - e.begin_us).sum()
    };
    let wall = s.run.events.iter().map(|e| e.end_us).fold(0.0, f64::max);
    let queues: Vec<(&str, f64)> =
        s.run.queues.iter().enumerate().map(|(i, name)| (&**name, busy(i))).collect();
    if args.json {
        let queues: Vec<_> =
            queues.iter().map(|(name, us)| json!({"queue": name, "busy_s": us * 1e-6})).collect();
        return output::json(&json!({
            "device": device.name, "prompt": s.prompt, "decode": s.decode, "batch": s.batch,
            "recorded_tokens": s.recorded, "model": true, "wall_s": wall * 1e-6,
            "steps": s.run.steps, "moves": s.run.moves, "predicted": s.run.predicted, "queues": queues,
            "constants": s.run.constants.iter()
                .map(|[what, value, source]| json!({"what": what, "value": value, "source": source}))
                .collect::<Vec<_>>(),
        }));
    }
    let row = |cells: &[&str]| cells.iter().map(|&c| c.to_owned()).collect::<Vec<_>>();
    let sum = |f: &dyn Fn(&StreamStep) -> f64| s.run.steps.iter().map(f).sum::<f64>();
    let n = s.run.steps.len().max(1) as f64;
    let mut steps = vec![row(&["", "all steps", "per step"])];
    for (name, us) in [
        ("time", sum(&|s| s.total_us)),
        ("experts", sum(&|s| s.experts_us)),
        ("predicted by the scheduler", sum(&|s| s.expected_us)),
    ] {
        steps.push(row(&[name, &ms(us), &ms(us / n)]));
    }
    let mut shares = vec![row(&["queue", "busy", "of the time"])];
    for (name, us) in queues {
        shares.push(row(&[name, &ms(us), &format!("{:.1} %", 100.0 * us / wall.max(f64::MIN_POSITIVE))]));
    }
    let mut model = vec![row(&["model", "value", "source"])];
    model.extend(s.run.constants.iter().map(|c| c.to_vec()));
    output::data(&format!(
        "{}: {} steps of {} sequences after a prompt of {} tokens; routing: {} recorded tokens\n\
         the runtime's expert schedule on modelled units: all times are predictions\n\
         {} experts moved between steps; the class of {:.1} % of all experts was predicted\n\n{}\n{}\n{}",
        device.name,
        s.decode,
        s.batch,
        s.prompt,
        s.recorded,
        s.run.moves,
        100.0 * s.run.predicted,
        output::table(&steps),
        output::table(&shares),
        output::table(&model)
    ))
}

/// Output for a bundle with experts on disk.
fn from_disk(device: &Device, s: &paged::Simulated, args: &Args) -> Result<()> {
    if let Some(path) = &args.timeline {
        write(path, &[(BUNDLE, &s.timeline)])?;
    }
    if args.json { output::json(&disk_json(device, s)) } else { output::data(&disk_text(device, s)) }
}

fn disk_text(device: &Device, s: &paged::Simulated) -> String {
    let row = |cells: &[&str]| cells.iter().map(|&c| c.to_owned()).collect::<Vec<_>>();
    let decoding = s.run.wall.saturating_sub(s.prefill);
    let mut phases = vec![row(&["", "time", "per token", "waiting for disk"])];
    for (name, time, tokens, waits) in
        [("prompt", s.prefill, s.prompt, s.stalled[0]), ("decoding", decoding, s.decode, s.stalled[1])]
    {
        let us = time.as_secs_f64() * 1e6;
        let each = us / f64::from(tokens.max(1));
        phases.push(row(&[name, &ms(us), &ms(each), &ms(waits.as_secs_f64() * 1e6)]));
    }
    let c = s.run.counts;
    let counts = [
        ("experts requested", (c.hits + c.misses).to_string()),
        ("in memory, or in flight", c.hits.to_string()),
        ("read on demand", c.misses.to_string()),
        ("of these, not cached", c.streamed.to_string()),
        ("read ahead", c.ahead.to_string()),
        ("of these, requested", c.predicted.to_string()),
        ("read from disk", human::bytes(s.run.disk.bytes)),
    ];
    let counts: Vec<_> = counts.iter().map(|(name, value)| row(&[name, value])).collect();
    let mut queues = vec![row(&["queue", "busy", "of the time"])];
    for (queue, us) in busy(s) {
        let share = 100.0 * us / s.timeline.wall_us.max(f64::MIN_POSITIVE);
        queues.push(row(&[queue, &ms(us), &format!("{share:.1} %")]));
    }
    let mut model = vec![row(&["model", "value", "source"])];
    model.extend(s.constants.iter().map(|c| row(&[c.what, &c.value, &c.source])));
    format!(
        "{}: a prompt of {} tokens in chunks of {}, then {} decoded; routing: {} recorded tokens, without predictions of routers\n\
         the runtime's policies on modelled units: all times are predictions\n\n{}\n{}\n{}\n{}",
        device.name,
        s.prompt,
        s.chunk,
        s.decode,
        s.recorded,
        output::table(&phases),
        output::table(&counts),
        output::table(&queues),
        output::table(&model)
    )
}

/// Busy time of each queue, in microseconds.
fn busy(s: &paged::Simulated) -> impl Iterator<Item = (&str, f64)> {
    let computes = s.run.wall.saturating_sub(s.run.stalled).as_secs_f64() * 1e6;
    let reads = s.run.disk.busy.as_secs_f64() * 1e6;
    s.timeline.queues.iter().enumerate().map(move |(i, name)| {
        let us = match i {
            i if i == s.unit => computes,
            i if i == s.link => reads,
            _ => 0.0,
        };
        (name.as_str(), us)
    })
}

fn disk_json(device: &Device, s: &paged::Simulated) -> Value {
    let c = s.run.counts;
    let seconds = |d: std::time::Duration| d.as_secs_f64();
    json!({
        "device": device.name, "prompt": s.prompt, "chunk": s.chunk, "decode": s.decode,
        "recorded_tokens": s.recorded, "model": true,
        "prefill_s": seconds(s.prefill), "decode_s": seconds(s.run.wall.saturating_sub(s.prefill)),
        "waiting_s": {"prefill": seconds(s.stalled[0]), "decode": seconds(s.stalled[1])},
        "experts": {"hits": c.hits, "misses": c.misses, "streamed": c.streamed, "read_ahead": c.ahead,
                    "predicted": c.predicted, "preloaded": c.preloaded},
        "disk_bytes": s.run.disk.bytes,
        "queues": busy(s).map(|(name, us)| json!({"queue": name, "busy_s": us * 1e-6})).collect::<Vec<_>>(),
        "constants": s.constants.iter()
            .map(|c| json!({"what": c.what, "value": c.value, "source": c.source})).collect::<Vec<_>>(),
    })
}

fn one_text(device: &Device, s: &Simulated) -> String {
    let head = ["system", "latency", "energy per token", "CPU busy", "NPU busy", "latency", "energy", "CPU"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let first = s.outcomes.first().map(|(_, o)| o);
    for (name, o) in &s.outcomes {
        let times = |f: &dyn Fn(&Outcome) -> f64| {
            first.map_or_else(String::new, |first| format!("{:.2}×", f(o) / f(first).max(f64::MIN_POSITIVE)))
        };
        rows.push(vec![
            (*name).to_owned(),
            ms(o.timeline.wall_us),
            format!("{:.4} mJ", o.joules_per_token() * 1e3),
            ms(o.cpu_us),
            ms(o.npu_us),
            times(&|o| o.timeline.wall_us),
            times(&Outcome::joules_per_token),
            times(&|o| o.cpu_us),
        ]);
    }
    let mut legend = vec![vec!["system".to_owned(), "description".to_owned()]];
    legend.extend(s.outcomes.iter().map(|(name, _)| vec![(*name).to_owned(), described(name).to_owned()]));
    let decoded = if s.decode == 0 { String::new() } else { format!(", then {} decoded", s.decode) };
    format!(
        "{}: a prompt of {} tokens in chunks of {}{decoded}; loads: {}\n\n{}\n{}",
        device.name,
        s.prompt,
        s.chunk,
        s.loads,
        output::table(&rows),
        output::table(&legend)
    )
}

/// Description of a system of the table.
fn described(name: &str) -> &'static str {
    System::named(name).map_or("moec, with the placement of the bundle's plan", |system| system.legend)
}

fn ms(us: f64) -> String {
    format!("{:.3} ms", us * 1e-3)
}

fn one_json(device: &Device, s: &Simulated) -> Value {
    let system = |(name, o): &(&'static str, Outcome)| {
        json!({
            "system": name,
            "description": described(name),
            "latency_s": o.timeline.wall_us * 1e-6,
            "energy_j": {"cpu": o.energy.cpu_j, "npu": o.energy.npu_j, "memory": o.energy.memory_j,
                         "total": o.energy.total_j()},
            "energy_per_token_j": o.joules_per_token(),
            "cpu_busy_s": o.cpu_us * 1e-6,
            "npu_busy_s": o.npu_us * 1e-6,
            "pairs": o.routed, "dropped": o.dropped, "rows": o.rows, "padding": o.padding,
        })
    };
    json!({
        "device": device.name, "prompt": s.prompt, "chunk": s.chunk, "decode": s.decode, "loads": s.loads,
        "systems": s.outcomes.iter().map(system).collect::<Vec<_>>(),
    })
}
