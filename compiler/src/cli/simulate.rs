//! `moec simulate`.

use super::output;
use crate::bundle::read::Bundle;
use crate::error::io_error;
use crate::passes::units::Units;
use crate::profile::Profile;
use crate::simulate::bundle::{Request, Simulated, simulate};
use crate::simulate::paper::{Metric, Printed};
use crate::simulate::perfetto;
use crate::simulate::reproduce::{Bench, Judged, Measured, Report};
use crate::simulate::run::Outcome;
use crate::simulate::timeline::Queue;
use crate::simulate::{Model, capacities};
use crate::{Error, Result};
use moec_device::Device;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Predict latency, energy and processor time of a bundle for a device with a neural processing unit
///
/// Queues of the processor and of the Neural Engine execute the plan's placement, with the costs of the device
/// file and the loads of a recorded profile; beside it what Core ML alone, its default scheduling and ANEMLL would
/// take. `--paper` reruns the evaluation of NPUMoE and prints every figure of it beside the simulated one.
#[derive(Clone, Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").args(["bundle", "paper", "capacities"]).required(true).multiple(true))]
pub struct Args {
    /// A bundle for `m2-ultra` or `m2-max`
    pub bundle: Option<PathBuf>,
    /// Profile that the loads of the experts are from [default: the mean loads that the bundle remembers]
    #[arg(long, value_name = "PROFILE", conflicts_with = "paper")]
    pub trace: Option<PathBuf>,
    /// Write the timelines of all systems as a trace for ui.perfetto.dev
    #[arg(long, value_name = "FILE.JSON", conflicts_with = "paper")]
    pub timeline: Option<PathBuf>,
    /// Tokens of the prompt, rounded up to whole chunks [default: four chunks]
    #[arg(long, value_name = "TOKENS", conflicts_with = "paper")]
    pub prompt: Option<u32>,
    /// Tokens decoded behind the prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 0, conflicts_with = "paper")]
    pub decode: u32,
    /// Rerun the evaluation of NPUMoE instead
    #[arg(long, conflicts_with = "bundle")]
    pub paper: bool,
    /// Compare settings of `[experts]` instead: of a bundle with the loads of `--trace`, else of published shapes with
    /// recorded routing
    #[arg(long, conflicts_with_all = ["paper", "timeline", "json"])]
    pub capacities: bool,
    /// Device, by name or file [default: the bundle's; with `--paper`: all that NPUMoE measured]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Simulates.
///
/// # Errors
/// A bundle, a profile or a device that cannot be simulated, a file that cannot be written.
pub fn run(args: &Args) -> Result<()> {
    match &args.bundle {
        path if args.capacities => compare(args, path.as_deref()),
        Some(path) => one(args, &Bundle::open(path)?),
        None => paper(args),
    }
}

fn one(args: &Args, bundle: &Bundle) -> Result<()> {
    let device = match args.target.as_deref() {
        None => bundle.device()?,
        Some(name) => Device::find(name).map_err(|e| {
            let hint = e.hint();
            Error::input("the device to simulate is not known").because(e).hint(hint)
        })?,
    };
    let profile = args.trace.as_deref().map(Profile::read).transpose()?;
    let request =
        Request { device: &device, profile: profile.as_ref(), prompt: args.prompt, decode: args.decode };
    let simulated = simulate(bundle, &request)?;
    if let Some(path) = &args.timeline {
        let timelines: Vec<_> = simulated.outcomes.iter().map(|(name, o)| (*name, &o.timeline)).collect();
        let text = perfetto::trace(&timelines).to_string();
        std::fs::write(path, text).map_err(|e| io_error("write", path, &e))?;
    }
    if args.json {
        output::json(&one_json(&device, &simulated))
    } else {
        output::data(&one_text(&device, &simulated))
    }
}

/// Settings of `[experts]`, as a table in Markdown.
fn compare(args: &Args, path: Option<&Path>) -> Result<()> {
    let bundle = path.map(Bundle::open).transpose()?;
    let device = match (args.target.as_deref(), &bundle) {
        (None, Some(bundle)) => bundle.device()?,
        (name, _) => crate::build::device(name.unwrap_or("m2-ultra"))?,
    };
    let units = Units::of(&device).ok_or_else(|| {
        Error::input(format!("`{}` has no neural processing unit", device.name))
            .hint("`--target m2-ultra` and `--target m2-max` have one")
    })?;
    let models = match &bundle {
        None => capacities::recorded(&units)?,
        Some(bundle) => {
            let trace = args.trace.as_deref().ok_or_else(|| {
                Error::usage("settings are compared on the loads of a profile").hint("`--trace` names one")
            })?;
            let info = &bundle.plan.model;
            let model = Model::of(&bundle.graph()?, &info.family, info.layers)?;
            vec![capacities::profiled(model, &Profile::read(trace)?, &units)?]
        }
    };
    let mut text = String::new();
    for (name, costs) in models {
        let _ = writeln!(
            text,
            "\n{name}:\n\n| setting | padding | dropped | ms per prompt | mJ per token | graphs per layer | functions |"
        );
        let _ = writeln!(text, "|---|---|---|---|---|---|---|");
        for (setting, c) in capacities::settings().iter().zip(costs) {
            let (name, padding, dropped) = (setting.name, c.padding * 100.0, c.dropped * 100.0);
            let _ = writeln!(
                text,
                "| {name} | {padding:.1} % | {dropped:.2} % | {:.1} | {:.3} | {:.1} | {:.1} |",
                c.ms, c.mj_per_token, c.graphs, c.functions
            );
        }
    }
    output::data(text.trim_start())
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
            ms(o.timeline.busy_us(Queue::Npu)),
            times(&|o| o.timeline.wall_us),
            times(&Outcome::joules_per_token),
            times(&|o| o.cpu_us),
        ]);
    }
    let decoded = if s.decode == 0 { String::new() } else { format!(", then {} decoded", s.decode) };
    format!(
        "{}: a prompt of {} tokens in chunks of {}{decoded}; loads: {}\n\n{}",
        device.name,
        s.prompt,
        s.chunk,
        s.loads,
        output::table(&rows)
    )
}

fn ms(us: f64) -> String {
    format!("{:.3} ms", us * 1e-3)
}

fn one_json(device: &Device, s: &Simulated) -> Value {
    let system = |(name, o): &(&'static str, Outcome)| {
        json!({
            "system": name,
            "latency_s": o.timeline.wall_us * 1e-6,
            "energy_j": {"cpu": o.energy.cpu_j, "npu": o.energy.npu_j, "memory": o.energy.memory_j,
                         "total": o.energy.total_j()},
            "energy_per_token_j": o.joules_per_token(),
            "cpu_busy_s": o.cpu_us * 1e-6,
            "npu_busy_s": o.timeline.busy_us(Queue::Npu) * 1e-6,
            "pairs": o.routed, "dropped": o.dropped, "rows": o.rows, "padding": o.padding,
        })
    };
    json!({
        "device": device.name, "prompt": s.prompt, "chunk": s.chunk, "decode": s.decode, "loads": s.loads,
        "systems": s.outcomes.iter().map(system).collect::<Vec<_>>(),
    })
}

fn paper(args: &Args) -> Result<()> {
    let known = ["m2-ultra", "m2-max"];
    if let Some(name) = args.target.as_deref().filter(|t| !known.contains(t)) {
        return Err(Error::usage(format!("NPUMoE did not measure `{name}`"))
            .hint("it measured `m2-ultra` and `m2-max`"));
    }
    let report = Bench::new()?.report(args.target.as_deref())?;
    if args.json { output::json(&report_json(&report)) } else { output::data(&report_text(&report)) }
}

/// The evaluation in tables.
pub fn report_text(report: &Report) -> String {
    let mut text = String::from(
        "Simulated, and in brackets what NPUMoE printed, where it did. Latency, energy and CPU at the right are ratios to ours.\n\n",
    );
    let head = ["configuration", "system", "latency", "mJ/token", "CPU busy", "latency", "energy", "CPU"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    report.measured.iter().for_each(|m| rows.extend(measured_rows(report, m)));
    text += &output::table(&rows);
    text += "\n* the paper does not state prompt and chunk: 1024 and 256 were taken, and for Qwen3-MoE the largest too.\n\
             u: a constant was found from it.\n";
    let others = report.claims.iter().filter(|j| j.claim.to != "ours");
    let row = |j: &Judged| {
        let c = &j.claim;
        let of = format!("{} over {}, {}", c.of, c.to, c.metric.name());
        vec![c.config.to_owned(), of, format!("{:.2} ({})", j.found, c.value)]
    };
    let rows: Vec<Vec<String>> = others.map(row).collect();
    if !rows.is_empty() {
        let _ = write!(text, "\n{}", output::table(&rows));
    }

    let (all, wrong) = (report.orders.len(), report.reversed());
    let _ = writeln!(text, "\nOrders of two systems: {} of {all} as in the paper.", all - wrong.len());
    if !wrong.is_empty() {
        text += "The others:\n";
        let head = [
            "configuration",
            "metric",
            "the paper's better",
            "the paper's worse",
            "simulated worse / better",
        ];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        let named =
            |(name, x): (&str, Option<f64>)| x.map_or_else(|| name.to_owned(), |x| format!("{name} ({x})"));
        rows.extend(wrong.iter().map(|o| {
            vec![
                o.config.into(),
                o.metric.name().into(),
                named(o.less),
                named(o.more),
                format!("{:.2}", o.found),
            ]
        }));
        text += &output::table(&rows);
    }

    let outside = report.outside();
    text += "\nRanges of §5.2 over all baselines and configurations of PhiMoE (cpu: cycles there, busy time here):\n";
    let head = ["metric", "the paper's", "simulated", "outside"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for metric in Metric::ALL {
        let (from, to) = metric.range();
        let found: Vec<f64> = ratios(report, metric);
        let (least, most) = found.iter().fold((f64::MAX, 0.0_f64), |(a, b), &x| (a.min(x), b.max(x)));
        let out: Vec<String> =
            outside.iter().filter(|o| o.1 == metric).map(|o| format!("{} {} {:.2}", o.0, o.2, o.3)).collect();
        let out = if out.is_empty() { "none".to_owned() } else { out.join("; ") };
        if !found.is_empty() {
            rows.push(vec![
                metric.name().into(),
                format!("{from}–{to}"),
                format!("{least:.2}–{most:.2}"),
                out,
            ]);
        }
    }
    text += &output::table(&rows);

    text += "\nConstants found from figures of the paper:\n";
    let found = report.constants.found();
    let rows: Vec<Vec<String>> = found
        .iter()
        .map(|f| vec![f.what.into(), format!("{:.3} {}", f.value, f.unit), f.from.into()])
        .collect();
    text += &output::table(&rows);
    if !report.figures.is_empty() {
        text +=
            "\nFigures of the paper (u: the device file or a constant is from it; the others check them):\n";
        let head = ["figure", "unit", "paper", "simulated", "error", ""];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        rows.extend(report.figures.iter().map(|f| {
            let used = if f.used { "u" } else { "" };
            let error = percent(f.paper.error(f.found));
            vec![f.source.clone(), f.unit.into(), f.paper.to_string(), number(f.found), error, used.into()]
        }));
        text += &output::table(&rows);
    }
    text
}

/// Ratios of the baselines in PhiMoE's prefill.
fn ratios(report: &Report, metric: Metric) -> Vec<f64> {
    let stated = report.measured.iter().filter(|m| m.config.stated);
    let of = |m: &Measured| -> Vec<f64> {
        m.systems
            .iter()
            .filter(|(s, _)| s.name != "ours")
            .filter_map(|(s, _)| m.ratio(metric, s.name, "ours"))
            .collect()
    };
    stated.flat_map(of).collect()
}

fn percent(x: f64) -> String {
    format!("{:+.0} %", x * 100.0)
}

fn number(x: f64) -> String {
    if x >= 100.0 { format!("{x:.0}") } else { format!("{x:.3}") }
}

fn measured_rows(report: &Report, m: &Measured) -> Vec<Vec<String>> {
    let row =
        |(i, (system, total)): (usize, &(crate::simulate::System, crate::simulate::reproduce::Total))| {
            let prompts = f64::from(total.prompts.max(1));
            let seconds = |us: f64| format!("{:.2} s", us * 1e-6 / prompts);
            let ratio = |metric: Metric| {
                let found = m.ratio(metric, system.name, "ours").unwrap_or(f64::NAN);
                let is = |j: &&Judged| {
                    let c = &j.claim;
                    (c.config, c.metric, c.of, c.to) == (m.config.name, metric, system.name, "ours")
                };
                match report.claims.iter().find(is) {
                    Some(j) => format!("{found:.2} ({}){}", j.claim.value, if j.used { " u" } else { "" }),
                    None => format!("{found:.2}"),
                }
            };
            let name =
                if m.config.stated { m.config.name.to_owned() } else { format!("{} *", m.config.name) };
            let mut row = vec![if i == 0 { name } else { String::new() }, system.name.to_owned()];
            let mj = format!("{:.0}", total.metric(Metric::Energy) * 1e3);
            row.extend([seconds(total.wall_us), mj, seconds(total.cpu_us)]);
            row.extend(Metric::ALL.map(ratio));
            row
        };
    m.systems.iter().enumerate().map(row).collect()
}

/// The evaluation as JSON.
pub fn report_json(report: &Report) -> Value {
    let printed = |p: Printed| match p {
        Printed::Is(x) => json!(x),
        Printed::Within(a, b) => json!([a, b]),
        Printed::Over(x) => json!({"over": x}),
    };
    let measured = |m: &Measured| {
        let systems = m.systems.iter().map(|(s, t)| {
            json!({
                "system": s.name, "source": s.source, "prompts": t.prompts,
                "latency_s": t.wall_us * 1e-6, "cpu_busy_s": t.cpu_us * 1e-6, "npu_busy_s": t.npu_us * 1e-6,
                "energy_j": {"cpu": t.energy.cpu_j, "npu": t.energy.npu_j, "memory": t.energy.memory_j},
                "energy_per_token_j": t.metric(Metric::Energy),
            })
        });
        json!({
            "configuration": m.config.name, "device": m.config.device, "model": m.config.shape.name,
            "prompt": m.config.prompt, "chunk": m.config.chunk, "decode": m.config.decode,
            "stated": m.config.stated, "systems": systems.collect::<Vec<_>>(),
        })
    };
    json!({
        "constants": report.constants.found().iter().map(|f| json!({
            "constant": f.what, "value": f.value, "unit": f.unit, "from": f.from,
        })).collect::<Vec<_>>(),
        "configurations": report.measured.iter().map(measured).collect::<Vec<_>>(),
        "ratios": report.claims.iter().map(|j| json!({
            "configuration": j.claim.config, "metric": j.claim.metric.name(), "of": j.claim.of, "to": j.claim.to,
            "paper": printed(j.claim.value), "simulated": j.found, "error": j.error, "used": j.used,
            "source": j.claim.source,
        })).collect::<Vec<_>>(),
        "orders": report.orders.iter().map(|o| json!({
            "configuration": o.config, "metric": o.metric.name(), "less": o.less.0, "more": o.more.0,
            "simulated": o.found, "holds": o.holds(),
        })).collect::<Vec<_>>(),
        "outside": report.outside().iter().map(|(config, metric, system, x)| json!({
            "configuration": config, "metric": metric.name(), "system": system, "simulated": x,
        })).collect::<Vec<_>>(),
        "figures": report.figures.iter().map(|f| json!({
            "figure": f.source, "unit": f.unit, "paper": printed(f.paper), "simulated": f.found,
            "error": f.paper.error(f.found), "used": f.used,
        })).collect::<Vec<_>>(),
    })
}
