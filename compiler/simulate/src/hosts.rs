//! A bundle's model on numbers of hosts that are not there: each is like the first host of the device, and connected
//! with the first by the same network ([`mod@moec_costs::hosts`]). Where a bundle's experts stay on disk, each has the
//! bundle's budget of memory and a disk like the device's.

use super::bundle::Request;
use moec_base::error::{Error, Result};
use moec_bundle::read::Bundle;
use moec_costs::hosts::network::Constant;
use moec_costs::hosts::{Cost, EVERY, Host, Hosts, Network, Routing, Scene, Shape, preferred};
use moec_ir::{EntryKind, Format};

/// Most hosts of one model.
pub const MOST: u8 = 64;

/// A model on several numbers of hosts.
#[derive(Clone, Debug)]
pub struct Simulated {
    /// The network.
    pub network: Network,
    /// Sequences that are decoded together, and tokens of a chunk of a prompt.
    pub batch: u32,
    /// Tokens of a chunk of a prompt.
    pub chunk: u32,
    /// Origin of the choices of experts.
    pub routing: &'static str,
    /// By number of hosts.
    pub rows: Vec<Row>,
    /// Number of hosts up to which one more decodes a sequence faster, and the costs there.
    pub best: (usize, Cost),
    /// Numbers of the model, and their sources.
    pub constants: Vec<Constant>,
}

/// Costs on a number of hosts.
#[derive(Clone, Debug)]
pub struct Row {
    /// Hosts.
    pub hosts: usize,
    /// Every division.
    pub costs: Vec<Cost>,
    /// Index of the one that a build takes ([`preferred`]).
    pub wins: usize,
    /// Microseconds per layer of experts that slices save in reading, and that their messages take; means.
    pub slices: [f64; 2],
    /// Replicas of the best number of hosts that so many hosts are; 1 up to that number.
    pub replicas: usize,
}

/// Simulates a bundle on these numbers of hosts. Without a network, it is that of the device's first two hosts.
///
/// # Errors
/// A bundle whose graphs are static; a device of one host, without a network.
pub fn hosts(
    bundle: &Bundle,
    request: &Request<'_>,
    numbers: &[usize],
    network: Option<Network>,
    batch: Option<u32>,
) -> Result<Simulated> {
    let plan = &bundle.plan;
    if !plan.graphs.is_empty() {
        return Err(Error::limit("bundles with static graphs cannot be simulated on several hosts")
            .hint("build for a target with only CPUs"));
    }
    let device = request.device;
    let target = moec_targets::target_of(device, &device.name)?;
    let own = Hosts::of(&target);
    let network = network.or(own.others().next()).ok_or_else(|| {
        Error::usage(format!("`{}` has one host, and no network", device.name))
            .hint("`--network \"10 Gb/s, 100 us\"` gives a rate and a round trip")
    })?;
    let cache = plan.states.iter().find(|s| !s.kind.needs_snapshots()).map_or(Format::F32, |s| s.format);
    let shape = Shape::of(&bundle.graph()?, cache);
    let routing = Routing::of(&shape, request.profile);
    let rows_of = |is: fn(EntryKind) -> bool| {
        let kinds = plan.entries.iter().map(|e| e.kind).filter(move |&kind| is(kind));
        kinds.map(|kind| kind.rows() as u32).max().unwrap_or(1)
    };
    let batch = batch.unwrap_or_else(|| rows_of(|kind| matches!(kind, EntryKind::Decode(_))));
    let chunk = rows_of(EntryKind::is_prefill);
    let on = |n: usize| {
        let hosts = Hosts::alike(own.first(), n, network);
        let hosts = match &plan.paging {
            Some(paging) => hosts.with_budget(paging.budget.saturating_sub(paging.process), &target),
            None => hosts,
        };
        let (cut_attention, slices) = (None, Some(EVERY));
        let scene =
            Scene { shape: &shape, hosts: &hosts, routing: &routing, batch, chunk, cut_attention, slices };
        (scene.costs(), exchange(&scene, own.first()))
    };
    // All numbers of hosts, since what wins may change several times.
    let mut best: Option<(usize, Cost)> = None;
    for n in 1..=usize::from(MOST) {
        let Some(cost) = preferred(&on(n).0).cloned() else { continue };
        let better = |(_, known): &(usize, Cost)| (cost.fits, cost.decode) > (known.fits, known.decode);
        if best.as_ref().is_none_or(better) {
            best = Some((n, cost));
        }
    }
    let best = best.ok_or_else(|| Error::bug("no division of a model"))?;
    let row = |&n: &usize| {
        let (costs, slices) = on(n);
        let wins = preferred(&costs).and_then(|cost| costs.iter().position(|c| c == cost)).unwrap_or(0);
        Row { hosts: n, costs, wins, slices, replicas: (n / best.0).max(1) }
    };
    let rows = numbers.iter().map(row).collect();
    let mut constants = own.constants;
    constants.retain(|c| c.what != "link");
    Ok(Simulated { network, batch, chunk, routing: routing.origin, rows, best, constants })
}

/// Microseconds per layer of experts that slices save in reading a token's experts, and that their messages take.
fn exchange(scene: &Scene<'_>, host: &Host) -> [f64; 2] {
    let slices = moec_config::HostPlacement::Slices;
    let experts = || scene.shape.layers.iter().filter_map(|l| l.experts.as_ref());
    let layers = experts().count().max(1) as f64;
    let saved: f64 = experts().map(|e| e.saved_us(scene.hosts.list.len(), host.gb_per_s)).sum();
    let paid: f64 = experts().map(|e| scene.exchange_us(slices, e, 1)).sum();
    [saved / layers, paid / layers]
}
