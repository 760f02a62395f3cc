//! Division of the model between the hosts of a target, if `model.toml` leaves it to costs.
#![expect(clippy::cast_possible_truncation, reason = "sizes of one model")]

use moec_base::error::{Fault, Result};
use moec_base::progress::Progress;
use moec_config::HostPlacement;
use moec_costs::hosts::shape::{Experts, Layer};
use moec_costs::hosts::{Cost, EVERY, Hosts, Routing, Scene, Shape, preferred};
use moec_passes::decisions::Decision;
use moec_pipeline::{Compilation, Inputs, Stops};
use std::collections::BTreeSet;

/// Subject of the decision.
pub const SUBJECT: &str = "division between hosts";
/// Subject of the decisions on experts, one for each layer, if they are cut into slices.
pub const EXPERTS: &str = "experts between hosts";
/// Subject of the decisions on attention, one for each layer, if experts are cut into slices.
pub const ATTENTION: &str = "attention between hosts";

/// Division of a model between hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Division {
    /// The division.
    pub placement: HostPlacement,
    /// Layers whose experts stay whole on the first host where those of others are cut into slices, if `model.toml`
    /// leaves that to costs.
    pub whole_experts: BTreeSet<u32>,
    /// Layers whose attention is cut by heads, if `model.toml` leaves that to costs.
    pub cut_attention: BTreeSet<u32>,
}

/// Chooses the [`preferred`] division of those that the model allows. `None` for a target of one host. A division that
/// `model.toml` requests is compared with the others, too. Where experts are cut into slices, it also chooses the layers
/// whose attention is cut by heads, and those whose experts stay whole.
///
/// # Errors
/// Fails as the passes until `assign_units` do, unless another division has no such fault.
pub fn choose(c: &Inputs<'_>) -> Result<Option<(Division, Vec<Decision>)>> {
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
    let cut_attention = requested_heads(c);
    let placement = &c.config.placement;
    let slices = if placement.slices.is_empty() { EVERY } else { &placement.slices };
    let mut scene = Scene {
        shape: &shape,
        hosts: &hosts,
        routing: &routing,
        batch,
        chunk,
        cut_attention,
        slices: Some(slices),
    };
    let requested = requested(c);
    let mut costs = Vec::new();
    for cost in scene.costs() {
        // What is requested fails by itself, with its own reason.
        if requested.is_some() || is_possible(c, cost.placement)? {
            costs.push(cost);
        }
    }
    // With a budget each host has a slice of every expert on its disk.
    if requested.is_none() && c.config.memory.budget.is_none() {
        let by_layer = Scene { slices: None, ..scene };
        let (cost, known) = (by_layer.cost(HostPlacement::Slices), preferred(&costs));
        if cost.fits && known.is_some_and(|known| cost.decode > known.decode) {
            costs.iter_mut().filter(|of| of.placement == cost.placement).for_each(|of| of.clone_from(&cost));
            scene = by_layer;
        }
    }
    let (chosen, why) = match (requested, preferred(&costs)) {
        (Some(requested), _) => (requested, "requested in `model.toml`".to_owned()),
        (None, Some(cost)) if cost.fits => (
            cost.placement,
            "of those that fit and decode one sequence within a tenth of the fastest, the fastest with several"
                .to_owned(),
        ),
        (None, Some(cost)) => {
            (cost.placement, "none fits into the hosts' memories; least on one host".to_owned())
        }
        (None, None) => (HostPlacement::Alone, "no other is possible".to_owned()),
    };
    let why = format!("{why}; modelled, with {} choices of experts", routing.origin);
    let mut decisions = vec![decision(chosen, why, &costs, &hosts)];
    let mut division =
        Division { placement: chosen, whole_experts: BTreeSet::new(), cut_attention: BTreeSet::new() };
    if chosen == HostPlacement::Slices {
        let whole = scene.whole(chosen).into_iter().zip(0..).filter(|(whole, _)| *whole);
        division.whole_experts = whole.filter(|_| placement.slices.is_empty()).map(|(_, at)| at).collect();
        decisions.extend(experts(&scene));
        let cut = shape.layers.iter().zip(0..).filter(|(layer, _)| scene.cut(layer).is_some());
        division.cut_attention = cut.filter(|_| cut_attention.is_none()).map(|(_, at)| at).collect();
        let attention = shape.layers.iter().zip(0..).filter_map(|(layer, at)| attention(&scene, layer, at));
        decisions.extend(attention);
    }
    Ok(Some((division, decisions)))
}

/// Whether `model.toml` requests that attention is cut by heads, or stays whole; `None`: costs decide. A unit that it
/// names has all of attention.
fn requested_heads(c: &Inputs<'_>) -> Option<bool> {
    let placement = &c.config.placement;
    let named = [&placement.attention, &placement.rest].into_iter().any(|setting| setting.unit().is_some());
    placement.attention_slices.map(|slices| slices > 1).or(named.then_some(false))
}

/// The decisions on the experts of every layer.
fn experts(scene: &Scene<'_>) -> Vec<Decision> {
    let [first, slices] = ["first host", "slices"];
    let why = match scene.slices {
        Some(EVERY) => "all layers alike",
        Some(_) => "requested in `model.toml`",
        None => "less time for a token, with messages; modelled",
    };
    let layers = scene.shape.layers.iter().zip(scene.whole(HostPlacement::Slices)).zip(0..);
    let with_experts = layers.filter_map(|((layer, whole), at)| Some((layer.experts.as_ref()?, whole, at)));
    let decision = |(index, (of, whole, at)): (usize, (&Experts, bool, u32))| {
        let [whole_us, cut_us] = scene.experts_us(of, index, 1);
        let bytes = of.slice_message(1.0).into_iter().sum();
        Decision::new("hosts", EXPERTS, if whole { first } else { slices }, why)
            .in_layer(at)
            .or(first, &[("token_us", whole_us), ("link_per_token_bytes", 0.0)])
            .or(slices, &[("token_us", cut_us), ("link_per_token_bytes", bytes)])
    };
    with_experts.enumerate().map(decision).collect()
}

/// The decision on a layer's attention; none for a layer without a mixer of tokens.
fn attention(scene: &Scene<'_>, layer: &Layer, at: u32) -> Option<Decision> {
    let [first, heads] = ["first host", "heads"];
    let decision = |chosen: &str, why: String| Decision::new("hosts", ATTENTION, chosen, why).in_layer(at);
    let of = match layer.attention.as_ref()? {
        Ok(of) => of,
        Err(why) => return Some(decision(first, format!("it {why}"))),
    };
    let hosts = scene.hosts.list.len();
    if of.heads < hosts {
        let why = format!("its key-value heads are fewer than hosts: {} of {hosts}", of.heads);
        return Some(decision(first, why));
    }
    let chosen = if scene.cut(layer).is_some() { heads } else { first };
    let why = match scene.cut_attention {
        Some(_) => "requested in `model.toml`",
        None => "less time for a token, with messages; modelled, without reading the KV cache",
    };
    let [whole, cut] = scene.attention_us(of, 1);
    let bytes = of.message(1.0).into_iter().sum();
    let own =
        decision(chosen, why.to_owned()).or(first, &[("token_us", whole), ("link_per_token_bytes", 0.0)]);
    Some(own.or(heads, &[("token_us", cut), ("link_per_token_bytes", bytes)]))
}

/// The division that `model.toml` requests: by its name, or by a number of slices.
fn requested(c: &Inputs<'_>) -> Option<HostPlacement> {
    let placement = &c.config.placement;
    placement.hosts.or((!placement.slices.is_empty()).then_some(HostPlacement::Slices))
}

/// Whether the passes can divide the model so.
///
/// # Errors
/// Other faults than limits.
fn is_possible(c: &Inputs<'_>, placement: HostPlacement) -> Result<bool> {
    let until = match placement {
        HostPlacement::Alone => return Ok(true),
        HostPlacement::Slices => "slice_attention",
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
