//! `moec simulate`.

use super::output;
use crate::Result;
use crate::bundle::read::Bundle;
use crate::error::io_error;
use crate::profile::Profile;
use crate::simulate::bundle::{Request, Simulated, simulate};
use crate::simulate::perfetto;
use crate::simulate::run::Outcome;
use crate::simulate::timeline::Queue;
use moec_device::Device;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Predict latency, energy and processor time of a bundle for a device with a neural processing unit
///
/// Queues of the processor and of the Neural Engine execute the plan's placement, with the costs of the device
/// file and the loads of a recorded profile; beside it what Core ML alone, its default scheduling and ANEMLL would
/// take.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A bundle for `m2-ultra` or `m2-max`
    pub bundle: PathBuf,
    /// Profile that the loads of the experts are from [default: the mean loads that the bundle remembers]
    #[arg(long, value_name = "PROFILE")]
    pub trace: Option<PathBuf>,
    /// Write the timelines of all systems as a trace for ui.perfetto.dev
    #[arg(long, value_name = "FILE.JSON")]
    pub timeline: Option<PathBuf>,
    /// Tokens of the prompt, rounded up to whole chunks [default: four chunks]
    #[arg(long, value_name = "TOKENS")]
    pub prompt: Option<u32>,
    /// Tokens decoded behind the prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub decode: u32,
    /// Device, by name or file [default: the bundle's]
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
    let bundle = Bundle::open(&args.bundle)?;
    let device = match args.target.as_deref() {
        None => bundle.device()?,
        Some(name) => crate::targets::device(name)?,
    };
    let profile = args.trace.as_deref().map(Profile::read).transpose()?;
    let request =
        Request { device: &device, profile: profile.as_ref(), prompt: args.prompt, decode: args.decode };
    let simulated = simulate(&bundle, &request)?;
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
