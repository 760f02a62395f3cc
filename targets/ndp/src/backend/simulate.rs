//! Steps of a bundle in virtual time: the runtime's scheduler decides, and [`crate::steps`] simulates the
//! rest.

use super::dimm_config;
use crate::machine::channel;
use crate::steps::{Before, Rates, Rows, Simulator, System, Track};
use moec_backend::{StreamEvent, StreamRun, StreamStep, StreamWorkload};
use moec_device::DeviceUnit;
use moec_dram::Options;
use moec_runtime::schedule::dispatch::plan;

/// Simulates the steps of a scene.
pub(super) fn simulate(unit: &DeviceUnit, scene: &StreamWorkload<'_>) -> Result<StreamRun, String> {
    let (ours, dimms, timing) =
        dimm_config(unit).map_err(|flaw| format!("`{}`: {}", flaw.key, flaw.message))?;
    let message = |e: &dyn std::fmt::Display| e.to_string();
    let (s, costs) = (scene.schedule, &scene.schedule.costs);
    let scheduler = plan::scheduler(scene.experts, s).map_err(|e| message(&e))?;
    let rates = Rates::of(&channel(&ours, timing, Options::default()));
    let link_gbs = dimms.link_gb_per_s.as_ref().map_or(1.0, |f| f.value);
    let system = System {
        channels: ours.system.channels as usize,
        all_dimms: dimms.count as usize,
        rates,
        // Nothing crosses it without such a unit.
        pcie_gbs: scene.link_gb_per_s.unwrap_or(1.0),
        link_gbs,
        moves_take_time: true,
        expert_bytes: costs.expert_bytes.max(1),
    };
    let mut simulator = Simulator::with(scheduler, system).map_err(|e| message(&e))?;
    simulator.record();
    let windows = plan::windows(s).map_err(|e| message(&e))?;
    let mut run = StreamRun::default();
    for (step, (loads, &tokens)) in scene.loads.iter().zip(scene.rows).enumerate() {
        let prompt = step < scene.prompts;
        let window = windows.of(tokens as usize, prompt);
        let before = Before { calc_us: window.link_us, host_bytes: 0.0 };
        // A token's row goes to the CPU's side in bf16, and comes back in f32.
        let bytes = if s.hot.is_some() { costs.row_bytes as f64 * f64::from(tokens) / 3.0 } else { 0.0 };
        let rows = Rows { to_host: bytes, to_gpu: 2.0 * bytes, prompt };
        let report = simulator.step(loads, before, rows).map_err(|e| message(&e))?;
        run.moves += report.layers.iter().map(|l| l.moves as u64).sum::<u64>();
        run.steps.push(StreamStep {
            total_us: report.total_us(),
            experts_us: report.experts_us(),
            expected_us: report.layers.iter().map(|l| l.predicted_us).sum(),
        });
    }
    run.predicted = simulator.scheduler().counters().accuracy();
    let mut tracks: Vec<Track> = simulator.events().iter().map(|e| e.track).collect();
    tracks.sort_unstable();
    tracks.dedup();
    // An absent unit has no queue.
    tracks.retain(|t| s.hot.is_some() || !matches!(t, Track::Gpu | Track::Pcie | Track::PcieBack));
    run.queues = tracks.iter().map(ToString::to_string).collect();
    let queue = |track: Track| tracks.binary_search(&track).unwrap_or(0);
    run.events = simulator
        .events()
        .iter()
        .filter(|e| tracks.contains(&e.track))
        .map(|e| StreamEvent {
            queue: queue(e.track),
            name: e.name.clone(),
            begin_us: e.begin_us,
            end_us: e.end_us,
        })
        .collect();
    let decoding = simulator.scheduler().setup().window;
    let memory = "moec-dram, clock by clock (docs/ndp-dram.md)";
    let mut constants = vec![
        ("a DIMM reads its own weights", rates.private_gbs, "GB/s", memory),
        ("the CPU reads a channel of striped weights", rates.striped_gbs, "GB/s", memory),
        ("the CPU reads weights of one DIMM", rates.localized_gbs, "GB/s", memory),
        ("cost for a DIMM of a byte that the CPU reads", rates.striped_weight, "bytes", memory),
        ("a link between DIMMs", link_gbs, "GB/s", "the device file"),
        ("attention and dense layers of decoding, per layer", decoding.link_us, "µs", "the plan"),
    ];
    let link = scene.link_gb_per_s;
    constants.extend(link.map(|gbs| ("the link to the hot unit", gbs, "GB/s", "the device file")));
    let row = |(what, value, of, source): (&str, f64, &str, &str)| {
        [what.to_owned(), format!("{value:.2} {of}"), source.to_owned()]
    };
    run.constants = constants.into_iter().map(row).collect();
    Ok(run)
}
