//! Output of `moec simulate --hosts`.
#![expect(clippy::cast_possible_truncation, reason = "figures for readers")]

use crate::output;
use moec_base::human;
use moec_costs::hosts::Cost;
use moec_device::Device;
use moec_simulate::hosts::{Row, Simulated};
use serde_json::{Value, json};

/// Two tables: divisions by number of hosts, and the numbers of the model.
pub(super) fn text(device: &Device, s: &Simulated) -> String {
    let row = |cells: &[&str]| cells.iter().map(|&c| c.to_owned()).collect::<Vec<_>>();
    let batch = format!("batch of {}", s.batch);
    let mut table = vec![row(&[
        "hosts",
        "division",
        "1 sequence",
        &batch,
        "prompt",
        "link per token",
        "fullest host",
        "",
    ])];
    for r in &s.rows {
        for (i, cost) in r.costs.iter().enumerate() {
            let mark = match (i == r.wins, cost.fits) {
                (true, _) => "← wins",
                (false, false) => "does not fit",
                (false, true) => "",
            };
            let hosts = if i == 0 { r.hosts.to_string() } else { String::new() };
            let fullest = human::bytes(cost.memory.iter().max().copied().unwrap_or(0));
            let [one, several, prompt] = [cost.decode, cost.batch, cost.prefill].map(rate);
            let link = human::bytes(cost.link_bytes as u64);
            table.push(row(&[&hosts, cost.placement.name(), &one, &several, &prompt, &link, &fullest, mark]));
        }
    }
    let mut slices =
        vec![row(&["hosts", "slices save per layer", "and cost", "replicas", "tokens/s of all"])];
    for r in &s.rows {
        let [saved, paid] = r.slices.map(|us| format!("{us:.1} µs"));
        let all = rate(s.best.1.decode * r.replicas as f64);
        slices.push(row(&[&r.hosts.to_string(), &saved, &paid, &r.replicas.to_string(), &all]));
    }
    let mut model = vec![row(&["model", "value", "source"])];
    model.extend(s.constants.iter().map(|c| row(&[c.what, &c.value, &c.source])));
    let (hosts, best) = &s.best;
    format!(
        "{}: hosts like its first, {:.3} GB/s and {:.1} µs there and back to it; {} choices of experts\n\
         all figures are modelled, in tokens per second; a prompt is of {} tokens\n\n{}\n\
         one sequence is decoded fastest on {hosts} ({}, {}); more hosts serve as replicas of these\n\n{}\n{}",
        device.name,
        s.network.gb_per_s,
        s.network.round_trip_us,
        s.routing,
        s.chunk,
        output::table(&table),
        best.placement.name(),
        rate(best.decode),
        output::table(&slices),
        output::table(&model)
    )
}

fn rate(tokens_per_s: f64) -> String {
    format!("{tokens_per_s:.1}")
}

/// The same as JSON.
pub(super) fn value(device: &Device, s: &Simulated) -> Value {
    let cost = |c: &Cost| {
        json!({
            "division": c.placement.name(), "decode_tokens_per_s": c.decode, "batch_tokens_per_s": c.batch,
            "prefill_tokens_per_s": c.prefill, "link_bytes_per_token": c.link_bytes,
            "host_bytes": c.memory, "fits": c.fits,
        })
    };
    let row = |r: &Row| {
        json!({
            "hosts": r.hosts, "divisions": r.costs.iter().map(cost).collect::<Vec<_>>(),
            "wins": r.costs.get(r.wins).map(|c| c.placement.name()),
            "slices_save_us": r.slices[0], "slices_cost_us": r.slices[1], "replicas": r.replicas,
            "replicas_tokens_per_s": s.best.1.decode * r.replicas as f64,
        })
    };
    json!({
        "device": device.name, "model": true, "batch": s.batch, "chunk": s.chunk, "routing": s.routing,
        "gb_per_s": s.network.gb_per_s, "round_trip_us": s.network.round_trip_us,
        "rows": s.rows.iter().map(row).collect::<Vec<_>>(),
        "best": {"hosts": s.best.0, "division": s.best.1.placement.name(),
                 "decode_tokens_per_s": s.best.1.decode},
        "constants": s.constants.iter()
            .map(|c| json!({"what": c.what, "value": c.value, "source": c.source})).collect::<Vec<_>>(),
    })
}
