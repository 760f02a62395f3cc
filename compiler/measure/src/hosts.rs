//! Division of the model between the hosts of a target, if `model.toml` leaves it to costs.
#![expect(clippy::cast_possible_truncation, reason = "sizes of one model")]

use moec_base::error::{Fault, Result};
use moec_base::progress::Progress;
use moec_config::HostPlacement;
use moec_costs::hosts::{Cost, Hosts, Routing, Scene, Shape, cheapest};
use moec_passes::decisions::Decision;
use moec_pipeline::{Compilation, Inputs, Stops};

/// Subject of the decision.
pub const SUBJECT: &str = "division between hosts";

/// Chooses the division that decodes one sequence fastest, of those that the model allows and the hosts' memories
/// hold. `None` for a target of one host. A division that `model.toml` requests is compared with the others, too.
///
/// # Errors
/// Fails as the passes until `assign_units` do, unless another division has no such fault.
pub fn choose(c: &Inputs<'_>) -> Result<Option<(HostPlacement, Decision)>> {
    if c.list.hosts().len() < 2 {
        return Ok(None);
    }
    let format = Stops { stop_after: Some("format"), ..Stops::default() };
    let mut lowered = Compilation::new(c.clone());
    lowered.run(format, &Progress::silent(), &mut |_| {})?;
    let shape = Shape::of(&lowered.module, c.config.kv_format());
    let shapes = c.shapes()?;
    let (hosts, routing) = (Hosts::of(c.target), Routing::of(&shape, c.profile));
    let hosts = match c.config.memory.budget {
        Some(budget) => hosts.with_budget(budget, c.target),
        None => hosts,
    };
    let (batch, chunk) = (shapes.slots as u32, shapes.prefill_chunk as u32);
    let scene = Scene { shape: &shape, hosts: &hosts, routing: &routing, batch, chunk };
    let requested = requested(c);
    let mut costs = Vec::new();
    for cost in scene.costs() {
        // What is requested fails by itself, with its own reason.
        if requested.is_some() || is_possible(c, cost.placement)? {
            costs.push(cost);
        }
    }
    let (chosen, why) = match (requested, cheapest(&costs)) {
        (Some(requested), _) => (requested, "requested in `model.toml`".to_owned()),
        (None, Some(cost)) if cost.fits => {
            (cost.placement, "fastest in decoding one sequence, of those that fit".to_owned())
        }
        (None, Some(cost)) => {
            (cost.placement, "none fits into the hosts' memories; least on one host".to_owned())
        }
        (None, None) => (HostPlacement::Alone, "no other is possible".to_owned()),
    };
    let why = format!("{why}; modelled, with {} choices of experts", routing.origin);
    Ok(Some((chosen, decision(chosen, why, &costs, &hosts))))
}

/// The division that `model.toml` requests: by its name, or by a number of slices.
fn requested(c: &Inputs<'_>) -> Option<HostPlacement> {
    let placement = &c.config.placement;
    placement.hosts.or(placement.slices.map(|_| HostPlacement::Slices))
}

/// Whether the passes can divide the model so.
///
/// # Errors
/// Other faults than limits.
fn is_possible(c: &Inputs<'_>, placement: HostPlacement) -> Result<bool> {
    let until = match placement {
        HostPlacement::Alone => return Ok(true),
        HostPlacement::Slices => "slice_experts",
        HostPlacement::Stages | HostPlacement::Owners => "assign_units",
    };
    let mut tried = Compilation::new(Inputs { division: Some(placement), ..c.clone() });
    let stops = Stops { stop_after: Some(until), ..Stops::default() };
    match tried.run(stops, &Progress::silent(), &mut |_| {}) {
        Ok(_) => Ok(true),
        Err(e) if e.fault == Fault::Limit => Ok(false),
        Err(e) => Err(e),
    }
}

fn decision(chosen: HostPlacement, why: String, costs: &[Cost], hosts: &Hosts) -> Decision {
    let round_trip_us = hosts.others().map(|link| link.round_trip_us).fold(0.0, f64::max);
    let count = hosts.list.len() as f64;
    let own = Decision::new("hosts", SUBJECT, chosen.name(), why)
        .with(&[("hosts", count), ("round_trip_us", round_trip_us)]);
    costs.iter().fold(own, |own, cost| {
        let fullest = cost.memory.iter().max().copied().unwrap_or(0);
        own.or(
            cost.placement.name(),
            &[
                ("decode_tokens_per_s", cost.decode),
                ("batch_tokens_per_s", cost.batch),
                ("prefill_tokens_per_s", cost.prefill),
                ("link_per_token_bytes", cost.link_bytes),
                ("fullest_host_bytes", fullest as f64),
            ],
        )
    })
}
