//! Loads of the hosts in a call, by how often experts are chosen.

use super::Load;
use super::shape::Shape;
use moec_profile::Profile;
use moec_profile::loads::LayerLoads;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Most rows whose choices are drawn one by one. With more, loads are near their means.
const DRAWN: u32 = 64;

/// Loads of a call of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Routed {
    /// Of all hosts.
    pub all: Load,
    /// Of the busiest, if each has whole experts.
    pub busiest: Load,
}

/// Index of a layer, rows of a call, and ends of the hosts' experts.
type Call = (usize, u32, Vec<usize>);

/// Frequencies with which the experts of each layer are chosen.
#[derive(Debug)]
pub struct Routing {
    layers: Vec<LayerLoads>,
    /// Origin of the counts.
    pub origin: &'static str,
    /// Loads that were computed: a comparison asks for each many times.
    known: Mutex<BTreeMap<Call, Routed>>,
}

impl Routing {
    /// Every expert is chosen as often as any other.
    pub fn even(shape: &Shape) -> Self {
        let experts = shape.layers.iter().enumerate().filter_map(|(i, l)| Some((i, l.experts.as_ref()?)));
        let layers = experts.map(|(layer, e)| LayerLoads {
            layer: layer as u32,
            k: e.k,
            tokens: e.count as u64,
            chosen: vec![u64::from(e.k); e.count],
            samples: Vec::new(),
        });
        Self { layers: layers.collect(), origin: "even", known: Mutex::default() }
    }

    /// By the counts of a profile; even where it is of another model.
    pub fn of(shape: &Shape, profile: Option<&Profile>) -> Self {
        let even = Self::even(shape);
        let Some(profile) = profile else { return even };
        let own = profile.layers.iter().map(|l| (l.chosen.len(), l.k));
        if !own.eq(even.layers.iter().map(|l| (l.experts(), l.k))) {
            return even;
        }
        let layers = profile.layers.iter().map(|l| LayerLoads {
            layer: l.layer,
            k: l.k,
            tokens: l.tokens,
            chosen: l.chosen.clone(),
            samples: Vec::new(),
        });
        Self { layers: layers.collect(), origin: "of the profile", known: Mutex::default() }
    }

    /// Loads of a call of so many rows in the layer of experts of that index, whose experts hosts have in these
    /// shares.
    pub fn routed(&self, layer: usize, rows: u32, shares: &[f64]) -> Routed {
        let Some(loads) = self.layers.get(layer) else { return Routed::default() };
        // Layers with the same counts have the same loads.
        let layer = self.layers.iter().position(|l| l.chosen == loads.chosen && l.k == loads.k);
        let ends = ends(loads.experts(), shares);
        let key = (layer.unwrap_or(0), rows, ends);
        let known = self.known.lock().ok().and_then(|known| known.get(&key).copied());
        known.unwrap_or_else(|| {
            let routed =
                if rows <= DRAWN { drawn(&loads.decoding(rows), &key.2) } else { mean(loads, rows, &key.2) };
            if let Ok(mut known) = self.known.lock() {
                known.insert(key, routed);
            }
            routed
        })
    }
}

/// Ends of the hosts' ranges of experts: consecutive ones, in proportion to their shares.
fn ends(experts: usize, shares: &[f64]) -> Vec<usize> {
    let mut sum = 0.0;
    let end = |share: &f64| {
        sum += share;
        (sum * experts as f64).round() as usize
    };
    shares.iter().map(end).collect()
}

/// Host of an expert.
fn owner(expert: usize, ends: &[usize]) -> usize {
    ends.partition_point(|&end| end <= expert).min(ends.len().saturating_sub(1))
}

/// Means over drawn calls.
fn drawn(calls: &LayerLoads, ends: &[usize]) -> Routed {
    let mut sum = Routed::default();
    for call in &calls.samples {
        let (mut experts, mut pairs) = (vec![0_u32; ends.len()], vec![0_u32; ends.len()]);
        for (e, &rows) in call.iter().enumerate() {
            let host = owner(e, ends);
            experts[host] += u32::from(rows > 0);
            pairs[host] += rows;
        }
        let total = |of: &[u32]| f64::from(of.iter().sum::<u32>());
        let most = |of: &[u32]| f64::from(of.iter().copied().max().unwrap_or(0));
        sum.all.experts += total(&experts);
        sum.all.pairs += total(&pairs);
        sum.busiest.experts += most(&experts);
        sum.busiest.pairs += most(&pairs);
    }
    let each = 1.0 / calls.samples.len().max(1) as f64;
    Routed { all: sum.all.share(each), busiest: sum.busiest.share(each) }
}

/// Means of calls of many rows: an expert that a row chooses with probability p is read with 1 − (1 − p)ⁿ.
fn mean(loads: &LayerLoads, rows: u32, ends: &[usize]) -> Routed {
    let total: u64 = loads.chosen.iter().sum();
    let mut by_host = vec![Load::default(); ends.len()];
    for (e, &chosen) in loads.chosen.iter().enumerate() {
        let p = (f64::from(loads.k) * chosen as f64 / total.max(1) as f64).min(1.0);
        let host = &mut by_host[owner(e, ends)];
        host.experts += 1.0 - (1.0 - p).powf(f64::from(rows));
        host.pairs += p * f64::from(rows);
    }
    let add = |a: Load, b: &Load| Load { experts: a.experts + b.experts, pairs: a.pairs + b.pairs };
    let most = |a: Load, b: &Load| Load { experts: a.experts.max(b.experts), pairs: a.pairs.max(b.pairs) };
    Routed {
        all: by_host.iter().fold(Load::default(), add),
        busiest: by_host.iter().fold(Load::default(), most),
    }
}
