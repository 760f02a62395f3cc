//! Output of `moec simulate` about hot and cold neurons on a phone.
#![expect(clippy::cast_possible_truncation, reason = "figures for readers, and indices of a plan")]

use super::output;
use moec_base::human;
use moec_device::Device;
use moec_passes::hot::HotShare;
use moec_simulate::phone::Simulated;
use serde_json::{Value, json};

/// Share of hot neurons over all layers.
fn share<'a>(of: impl Iterator<Item = &'a HotShare>) -> f64 {
    let (hot, all) = of.fold((0_u64, 0_u64), |(h, n), s| (h + u64::from(s.hot), n + u64::from(s.neurons)));
    if all == 0 { 0.0 } else { hot as f64 / all as f64 }
}

/// Busy time of each queue of the timeline, in microseconds.
fn busy(s: &Simulated) -> Vec<(&str, f64)> {
    let of = |queue: usize| {
        let own = s.timeline.tasks.iter().zip(&s.timeline.spans).filter(|(task, _)| task.queue == queue);
        own.fold(0.0, |us, (_, span)| us + span.end - span.start)
    };
    s.timeline.queues.iter().enumerate().map(|(i, name)| (name.as_str(), of(i))).collect()
}

/// Text for people, with the functions of hot neurons that the bundle has and the bytes of their codes.
pub(super) fn text(device: &Device, s: &Simulated, networks: Option<(usize, u64)>) -> String {
    let row = |cells: &[&str]| cells.iter().map(|&c| c.to_owned()).collect::<Vec<_>>();
    let [active, hot, read] = s.active;
    let percent = |n: u64| format!("{:.2} %", 100.0 * n as f64 / active.max(1) as f64);
    let facts = [
        ("tokens per second", format!("{:.2}", s.speed())),
        ("disk per token", human::bytes(s.bytes_per_token() as u64)),
        ("neurons in memory", format!("{:.1} %", s.held * 100.0)),
        ("hot neurons", format!("{:.1} %", share(s.hot.iter()) * 100.0)),
        ("active neurons that are hot", percent(hot)),
        ("active neurons read from disk", percent(read)),
    ];
    let mut facts: Vec<_> = facts.iter().map(|(name, value)| row(&[name, value])).collect();
    facts.extend(networks.map(|(functions, bytes)| {
        row(&["graphs of hot neurons", &format!("{functions} functions, {} of weights", human::bytes(bytes))])
    }));
    let mut queues = vec![row(&["row", "busy", "of the time"])];
    queues.extend(busy(s).into_iter().map(|(name, us)| {
        let part = 100.0 * us / s.timeline.wall_us.max(f64::MIN_POSITIVE);
        row(&[name, &format!("{:.3} ms", us * 1e-3), &format!("{part:.1} %")])
    }));
    let mut model = vec![row(&["model", "value", "source"])];
    model.extend(s.constants.iter().map(|c| row(&[c.what, &c.value, &c.source])));
    format!(
        "{}: {} tokens of each of {} sequences, only layers with experts; routing: {} recorded tokens\n\
         the runtime's policies on modelled units: all times are predictions\n\n{}\n{}\n{}",
        device.name,
        s.decode,
        s.batch,
        s.recorded,
        output::table(&facts),
        output::table(&queues),
        output::table(&model)
    )
}

pub(super) fn value(device: &Device, s: &Simulated, networks: Option<(usize, u64)>) -> Value {
    let mut value = json!({
        "device": device.name, "batch": s.batch, "decode": s.decode, "recorded_tokens": s.recorded, "model": true,
        "tokens_per_s": s.speed(), "wall_s": s.timeline.wall_us * 1e-6,
        "disk_bytes": s.disk_bytes, "disk_bytes_per_token": s.bytes_per_token(), "held": s.held,
        "neurons": {"active": s.active[0], "hot": s.active[1], "read": s.active[2]},
        "hot": s.hot,
        "queues": busy(s).into_iter().map(|(name, us)| json!({"queue": name, "busy_s": us * 1e-6})).collect::<Vec<_>>(),
        "constants": s.constants.iter()
            .map(|c| json!({"what": c.what, "value": c.value, "source": c.source})).collect::<Vec<_>>(),
    });
    if let Some((functions, bytes)) = networks {
        value["networks"] = json!({"functions": functions, "bytes": bytes});
    }
    value
}
