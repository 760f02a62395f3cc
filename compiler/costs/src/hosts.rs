//! Costs of a model on several hosts, by its division between them.
//!
//! A call of n rows reads what it multiplies by at the bandwidth `B` of a host's memory, and computes at its peak
//! `P`: a product of `w` numbers in `b` bytes takes `max(b / B, 2·n·w / P)`. Attention's reading of the cache is
//! not in it. Let `D` be the time of everything but routed experts on the first host, and for a layer of experts
//! `A` the time of those that the call chooses. With `N` hosts:
//!
//! | division | time of a call |
//! |---|---|
//! | `alone` | `D + Σ A` |
//! | `slices` | `D + Σ (A / N + T)` |
//! | `stages` | `D + Σ A`, each layer at its host's rates, and for each other host `R + 2·h / L` |
//! | `owners` | `D + Σ (f·A / N + T)` |
//!
//! `T = R + Σ (to + from) / L` over the other hosts: one round trip `R`, since they work at the same time, and bytes
//! that follow each other through the first host's connection, at the rate `L` of each link. To a host go the rows
//! and the router's choice. From it come the sums of its slice, or the results of its own experts. `h` is a row of the
//! residual stream, which goes to a stage and comes back, since every message is of the first host. The stages of a
//! call follow each other, also with several sequences: they add room, and no speed.
//!
//! `f` is the imbalance of whole experts: the mean load of the busiest host, over that of all. In decoding it is
//! of [`moec_profile::decoding::CALLS`] calls that are drawn from the counts of a profile, or evenly without one; in
//! prompts it follows from the counts ([`routing`]). Hosts of different rates have slices of one size, and numbers of
//! experts and of layers in proportion to their rates; the slowest counts. Where hosts share the memory of a machine, `B`
//! is less in `A / N` and `f·A / N`, which all of them read at the same time.
//!
//! Under a budget of memory, experts that a host's memory does not hold stay on its disk. Of a host's experts the share
//! `1 − (room for experts) / (bytes of its experts)` is read again in every call, at the disk's rate and after each
//! other with computing: choices are taken as even, and nothing as read ahead.
//!
//! So a slice pays where `T < A·(1 − 1/N)` ([`shape::Experts::saved_us`]). Layers in which it does not may keep their
//! experts whole on the first host ([`Scene::whole`]).
//!
//! Slices may cut attention by heads, too ([`moec_ir::heads`]). Let `H` be the time of the matrices of a layer's
//! attention, which is in `D`, and `c` the largest share of its key-value heads on a host. With the heads cut a layer
//! takes `c·H + T` in its place, where `T` is for a row there and one back. So heads are cut in the layers where
//! `c·H + T < 0.9·H` in decoding ([`Scene::cut`]).

pub mod network;
pub mod routing;
pub mod shape;

pub use network::{DISK_GB_PER_S, Host, Hosts, Network};
pub use routing::Routing;
pub use shape::{Attention, Product, Shape};

use moec_config::HostPlacement;
use shape::{Experts, Layer};

/// Costs of a division.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// The division.
    pub placement: HostPlacement,
    /// Tokens per second of one sequence.
    pub decode: f64,
    /// Tokens per second of as many sequences as are decoded together, all of them counted.
    pub batch: f64,
    /// Tokens per second of a prompt, in whole chunks.
    pub prefill: f64,
    /// Bytes that a decoded token moves over each link of the first host, on average over the links.
    pub link_bytes: f64,
    /// Bytes of weights and states in the memory of each host.
    pub memory: Vec<u64>,
    /// Whether every host has so much memory; one that states no capacity has. Experts that may stay on disk need none.
    pub fits: bool,
}

/// A model on several hosts.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    /// The model.
    pub shape: &'a Shape,
    /// The hosts.
    pub hosts: &'a Hosts,
    /// Frequencies of the experts.
    pub routing: &'a Routing,
    /// Sequences that are decoded together.
    pub batch: u32,
    /// Tokens of a chunk of a prompt.
    pub chunk: u32,
    /// Whether slices cut attention by heads where they can; `None`: where that costs less.
    pub cut_attention: Option<bool>,
    /// Slices of experts by layer, the last number for all others: experts of one slice are whole, on the first host.
    /// `None`: whole where that costs less.
    pub slices: Option<&'a [u32]>,
}

/// Largest share of a time for which costs take what is faster and has a price: attention that is cut by heads, with which a
/// program can save no prompt, copy no sequence and draft nothing. Smaller differences of predictions say nothing.
const WORTH: f64 = 0.9;

/// Slices of every layer's experts.
pub const EVERY: &[u32] = &[u32::MAX];

/// Work of a call on routed experts of one host: matrices that it reads, and rows that it multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Experts.
    pub experts: f64,
    /// (row, expert) pairs.
    pub pairs: f64,
}

/// Bytes that a host needs.
#[derive(Clone, Copy, Debug, Default)]
struct Need {
    /// Its routed experts.
    experts: u64,
    /// Its other weights, and states.
    other: u64,
}

impl Need {
    /// Bytes that memory holds: all, but experts that have no room if those may stay on disk.
    fn held(self, host: &Host, paged: bool) -> u64 {
        let all = self.other + self.experts;
        let most = host.capacity.filter(|_| paged).map_or(u64::MAX, |capacity| capacity as u64);
        all.min(most.max(self.other))
    }
}

impl Load {
    /// A share of it.
    #[must_use]
    pub fn share(self, share: f64) -> Self {
        Self { experts: self.experts * share, pairs: self.pairs * share }
    }
}

impl Scene<'_> {
    /// Costs of every division, in the order of [`HostPlacement::ALL`].
    pub fn costs(&self) -> Vec<Cost> {
        HostPlacement::ALL.into_iter().map(|placement| self.cost(placement)).collect()
    }

    /// Costs of a division.
    pub fn cost(&self, placement: HostPlacement) -> Cost {
        let rate = |rows: u32| f64::from(rows) * 1e6 / self.call_us(placement, rows).max(f64::MIN_POSITIVE);
        let needed = self.memory(placement);
        let paged = self.hosts.disk_gb_per_s.is_some();
        let must = |need: &Need| need.other + if paged { 0 } else { need.experts };
        let fits = needed.iter().zip(&self.hosts.list).all(|(need, host)| host.holds(must(need)));
        let memory = needed.iter().zip(&self.hosts.list).map(|(need, host)| need.held(host, paged)).collect();
        let links = self.hosts.others().count().max(1) as f64;
        Cost {
            placement,
            decode: rate(1),
            batch: rate(self.batch.max(1)),
            prefill: rate(self.chunk.max(1)),
            link_bytes: self.moved(placement, 1.0) / links,
            memory,
            fits,
        }
    }

    /// Microseconds of a call of so many rows.
    pub fn call_us(&self, division: HostPlacement, rows: u32) -> f64 {
        let (hosts, first) = (&self.hosts.list, self.hosts.first());
        let together: Vec<Host> = hosts.iter().map(Host::beside_others).collect();
        let n = hosts.len().max(1) as f64;
        let (stages, shares) = (self.stages(), self.hosts.shares());
        let disk = self.hosts.disk_gb_per_s.unwrap_or(f64::INFINITY);
        let missing = self.missing(division);
        let mut us = first.product_us(self.shape.rest, f64::from(rows));
        let whole = self.whole(division);
        // Index among the layers of experts.
        let mut index = 0;
        for (at, layer) in self.shape.layers.iter().enumerate() {
            let placement = if whole[at] { HostPlacement::Alone } else { division };
            let at = match placement {
                HostPlacement::Stages => stages[at],
                HostPlacement::Alone | HostPlacement::Slices | HostPlacement::Owners => 0,
            };
            let own = hosts.get(at).unwrap_or(first);
            let cut = self.cut(layer).filter(|_| division == HostPlacement::Slices);
            us += own.product_us(cut.map_or(layer.own, |of| layer.own.without(of.product)), f64::from(rows));
            us += cut.map_or(0.0, |of| self.attention_us(of, rows)[1]);
            let Some(of) = &layer.experts else { continue };
            let routed = self.routing.routed(index, rows, &shares);
            index += 1;
            let slowest = |load: Load| {
                let each = together
                    .iter()
                    .zip(&missing)
                    .map(|(h, &missing)| h.experts_us(of, load, (missing, disk)));
                each.fold(0.0, f64::max)
            };
            us += match placement {
                HostPlacement::Alone | HostPlacement::Stages => {
                    own.experts_us(of, routed.all, (missing.get(at).copied().unwrap_or(0.0), disk))
                }
                HostPlacement::Slices => {
                    slowest(routed.all.share(1.0 / n)) + self.exchange_us(placement, of, rows)
                }
                HostPlacement::Owners => slowest(routed.busiest) + self.exchange_us(placement, of, rows),
            };
        }
        match division {
            HostPlacement::Stages => us + self.hops_us(f64::from(rows)),
            HostPlacement::Alone | HostPlacement::Slices | HostPlacement::Owners => us,
        }
    }

    /// Layers whose experts stay whole on the first host where those of others are cut into slices.
    pub fn whole(&self, division: HostPlacement) -> Vec<bool> {
        let layers = self.shape.layers.iter().enumerate();
        // Index among the layers of experts.
        let mut index = 0;
        let whole = layers.map(|(at, layer)| {
            let Some(of) = layer.experts.as_ref().filter(|_| division == HostPlacement::Slices) else {
                return false;
            };
            index += 1;
            if let Some(slices) = self.slices {
                return slices.get(at).or(slices.last()).is_some_and(|&n| n < 2);
            }
            let [whole, cut] = self.experts_us(of, index - 1, 1);
            whole <= cut
        });
        whole.collect()
    }

    /// Microseconds of a layer's experts in memory for so many rows: on the first host, and in slices, with the messages.
    pub fn experts_us(&self, of: &Experts, index: usize, rows: u32) -> [f64; 2] {
        let all = self.routing.routed(index, rows, &self.hosts.shares()).all;
        let on = |host: &Host, load: Load| host.experts_us(of, load, (0.0, f64::INFINITY));
        let share = all.share(1.0 / self.hosts.list.len().max(1) as f64);
        let each = self.hosts.list.iter().map(|host| on(&host.beside_others(), share)).fold(0.0, f64::max);
        [on(self.hosts.first(), all), each + self.exchange_us(HostPlacement::Slices, of, rows)]
    }

    /// The attention of a layer, if slices cut it by heads.
    pub fn cut<'a>(&self, layer: &'a Layer) -> Option<&'a Attention> {
        let of = layer.attention.as_ref()?.as_ref().ok()?;
        let pays = || {
            let [first, cut] = self.attention_us(of, 1);
            cut < WORTH * first
        };
        let hosts = self.hosts.list.len();
        (hosts > 1 && of.heads >= hosts && self.cut_attention.unwrap_or_else(pays)).then_some(of)
    }

    /// Microseconds of the matrices of attention for so many rows: on the first host, and cut by heads, with the
    /// messages.
    pub fn attention_us(&self, of: &Attention, rows: u32) -> [f64; 2] {
        let [to, from] = of.message(f64::from(rows));
        let share = of.product_share(self.hosts.list.len());
        let each = self.hosts.list.iter().map(|host| host.beside_others().product_us(share, f64::from(rows)));
        let whole = self.hosts.first().product_us(of.product, f64::from(rows));
        [whole, each.fold(0.0, f64::max) + self.hosts.exchange_us(to, from)]
    }

    /// Bytes of the messages to each other host and from it for a layer of experts.
    fn message(&self, placement: HostPlacement, of: &Experts, rows: f64) -> [f64; 2] {
        match placement {
            HostPlacement::Slices => of.slice_message(rows),
            HostPlacement::Owners => of.owner_message(rows, self.hosts.list.len()),
            HostPlacement::Alone | HostPlacement::Stages => [0.0; 2],
        }
    }

    /// Microseconds of the messages for a layer of experts: `T`.
    pub fn exchange_us(&self, placement: HostPlacement, of: &Experts, rows: u32) -> f64 {
        let [to, from] = self.message(placement, of, f64::from(rows));
        self.hosts.exchange_us(to, from)
    }

    /// Microseconds of the rows' way to the stages of the other hosts and back.
    fn hops_us(&self, rows: f64) -> f64 {
        let bytes = rows * self.shape.row_bytes as f64;
        self.hosts.others().map(|link| link.round_trip_us + link.bytes_us(2.0 * bytes)).sum()
    }

    /// Bytes that a call moves over all links.
    fn moved(&self, placement: HostPlacement, rows: f64) -> f64 {
        let others = self.hosts.others().count() as f64;
        others
            * match placement {
                HostPlacement::Alone => 0.0,
                HostPlacement::Stages => 2.0 * rows * self.shape.row_bytes as f64,
                HostPlacement::Slices | HostPlacement::Owners => {
                    let divided =
                        self.shape.layers.iter().zip(self.whole(placement)).filter(|(_, whole)| !whole);
                    let experts = divided.filter_map(|(l, _)| l.experts.as_ref());
                    let experts: f64 = experts.flat_map(|e| self.message(placement, e, rows)).sum();
                    let cut = self.shape.layers.iter().filter_map(|l| self.cut(l));
                    let cut = cut.filter(|_| placement == HostPlacement::Slices);
                    experts + cut.flat_map(|of| of.message(rows)).sum::<f64>()
                }
            }
    }

    /// Host of each layer: consecutive layers, such that a token reads of each host in proportion to its rate. The
    /// head is on the first.
    fn stages(&self) -> Vec<usize> {
        let of = |(i, layer): (usize, &Layer)| {
            let experts = layer.experts.as_ref().map_or(0.0, |e| f64::from(e.k) * e.bytes as f64);
            (i, layer.own.bytes as f64 + experts)
        };
        let reads: Vec<(usize, f64)> = self.shape.layers.iter().enumerate().map(of).collect();
        let head = self.shape.rest.bytes as f64;
        let all = head + reads.iter().map(|(_, bytes)| bytes).sum::<f64>();
        let mut before = head;
        let shares = self.hosts.shares();
        let host = |(_, bytes): (usize, f64)| {
            let middle = (before + bytes / 2.0) / all.max(f64::MIN_POSITIVE);
            before += bytes;
            let mut end = 0.0;
            shares
                .iter()
                .position(|share| {
                    end += share;
                    middle < end
                })
                .unwrap_or(shares.len() - 1)
        };
        reads.into_iter().map(host).collect()
    }

    /// Share of each host's experts that its memory has no room for, where they stay on disk.
    fn missing(&self, placement: HostPlacement) -> Vec<f64> {
        let paged = self.hosts.disk_gb_per_s.is_some();
        let of = |(need, host): (Need, &Host)| {
            let missing = need.other + need.experts - need.held(host, paged);
            missing as f64 / need.experts.max(1) as f64
        };
        self.memory(placement).into_iter().zip(&self.hosts.list).map(of).collect()
    }

    /// Bytes of weights and states by host.
    fn memory(&self, placement: HostPlacement) -> Vec<Need> {
        let hosts = self.hosts.list.len().max(1);
        let mut all = vec![Need::default(); hosts];
        all[0].other += self.shape.rest_stored;
        let layers = self.shape.layers.iter().zip(self.stages()).zip(self.whole(placement));
        for ((layer, stage), stays) in layers {
            let experts = layer.experts.as_ref().map_or(0, |e| e.bytes * e.count as u64);
            let (host, whole) = match placement {
                HostPlacement::Alone => (0, true),
                HostPlacement::Stages => (stage, true),
                HostPlacement::Slices | HostPlacement::Owners => (0, stays),
            };
            all[host].other += layer.stored;
            if let Some(of) = self.cut(layer).filter(|_| placement == HostPlacement::Slices) {
                all[host].other -= of.stored.min(layer.stored);
                for need in &mut all {
                    need.other += of.share(of.stored, hosts);
                }
            }
            if whole {
                all[host].experts += experts;
                continue;
            }
            for need in &mut all {
                need.experts += experts.div_ceil(hosts as u64);
            }
        }
        all
    }
}

/// The division that decodes most tokens of all sequences together, of those that fit and decode one sequence at nine
/// tenths of the fastest's rate or more: predictions are off by as much. Of equal ones the first. Where none fits, the one
/// whose fullest host needs least.
pub fn preferred(costs: &[Cost]) -> Option<&Cost> {
    let fitting = || costs.iter().filter(|c| c.fits);
    let most = fitting().map(|c| c.decode).fold(0.0, f64::max);
    let near = fitting().filter(|c| c.decode >= WORTH * most);
    let near = near.reduce(|best, c| if c.batch > best.batch { c } else { best });
    near.or_else(|| costs.iter().min_by_key(|c| c.memory.iter().max().copied()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two layers of 8 experts, 2 per token, of 1 MB; 1 MB besides in each; rows of 4 KB.
    fn shape() -> Shape {
        let product = Product { bytes: 1_000_000, numbers: 1_000_000 };
        let experts = Experts {
            count: 8,
            k: 2,
            bytes: product.bytes,
            numbers: product.numbers,
            row: 4000,
            weights: 0,
            result: 4000,
            table: 0,
        };
        let layer = Layer { own: product, stored: product.bytes, experts: Some(experts), attention: None };
        Shape { layers: vec![layer.clone(), layer], rest: product, rest_stored: 2_000_000, row_bytes: 4000 }
    }

    fn hosts(n: usize, network: &str) -> Hosts {
        let host = Host { gb_per_s: 10.0, shared_gb_per_s: 10.0, gops: 1000.0, capacity: None, link: None };
        Hosts::alike(&host, n, network.parse().expect("a network"))
    }

    fn costs(hosts: &Hosts, shape: &Shape) -> Vec<Cost> {
        let routing = Routing::even(shape);
        Scene {
            shape,
            hosts,
            routing: &routing,
            batch: 4,
            chunk: 64,
            cut_attention: None,
            slices: Some(EVERY),
        }
        .costs()
    }

    /// 3 MB outside of experts and 4 MB of chosen ones at 10 GB/s; half of these with slices, and 100 µs plus 8 µs
    /// for 8 KB at 1 GB/s for both layers.
    #[test]
    fn formulas_of_the_four_divisions() {
        let (shape, hosts) = (shape(), hosts(2, "8 Gb/s, 100 us"));
        let all = costs(&hosts, &shape);
        let us: Vec<f64> = all.iter().map(|c| 1e6 / c.decode).collect();
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} {b}");
        near(us[0], 700.0);
        near(us[1], 500.0 + 2.0 * 108.0);
        near(us[2], 700.0 + 108.0);
        // Both chosen experts are on one host in 3 of 7 calls: the busier host has 10/7 on average. One result comes
        // back, as from a slice.
        let most = (us[3] - 300.0 - 2.0 * 108.0) / 200.0;
        assert!((most - 10.0 / 7.0).abs() < 0.08, "{most}");
        let bytes: Vec<f64> = all.iter().map(|c| c.link_bytes).collect();
        assert_eq!(bytes, [0.0, 16_000.0, 8000.0, 16_000.0]);
        let memory: Vec<&[u64]> = all.iter().map(|c| c.memory.as_slice()).collect();
        let mb = 1_000_000;
        assert_eq!(memory[0], [20 * mb, 0]);
        assert_eq!(memory[1], [12 * mb, 8 * mb]);
        assert_eq!(memory[2], [11 * mb, 9 * mb]);
        assert_eq!(memory[3], memory[1]);
    }

    /// Reading takes longer where several hosts read a memory that they share, and as long where one reads alone.
    #[test]
    fn hosts_of_one_machine_share_its_memory() {
        let (shape, own) = (shape(), hosts(2, "8 Gb/s, 100 us"));
        let mut shared = own.clone();
        shared.list.iter_mut().for_each(|host| host.shared_gb_per_s = host.gb_per_s / 2.0);
        let [own, shared] = [own, shared].map(|hosts| costs(&hosts, &shape));
        let us = |of: &[Cost], i: usize| 1e6 / of[i].decode;
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} {b}");
        near(us(&shared, 0), us(&own, 0));
        near(us(&shared, 2), us(&own, 2));
        near(us(&shared, 1), us(&own, 1) + 200.0);
        assert!(us(&shared, 3) > us(&own, 3));
    }

    #[test]
    fn fast_links_pay_for_slices_and_small_memories_for_room() {
        let shape = shape();
        let chosen = |hosts: &Hosts| preferred(&costs(hosts, &shape)).map(|c| c.placement);
        assert_eq!(chosen(&hosts(2, "100 Gb/s, 10 us")), Some(HostPlacement::Slices));
        let slow = hosts(2, "1 Gb/s, 1 ms");
        assert_eq!(chosen(&slow), Some(HostPlacement::Alone));
        let limited = |bytes: f64| {
            let mut hosts = slow.clone();
            hosts.list.iter_mut().for_each(|h| h.capacity = Some(bytes));
            hosts
        };
        assert_eq!(chosen(&limited(15e6)), Some(HostPlacement::Stages));
        // Nothing fits: what needs least on one host.
        assert_eq!(chosen(&limited(1e6)), Some(HostPlacement::Stages));
        // With a disk, experts that have no room are read from it: two hosts have room for twice as many.
        let mut paged = hosts(2, "100 Gb/s, 10 us");
        paged.disk_gb_per_s = Some(1.0);
        paged.list.iter_mut().for_each(|h| h.capacity = Some(8e6));
        let all = costs(&paged, &shape);
        assert!(all.iter().all(|c| c.fits && c.memory.iter().all(|&bytes| bytes <= 8_000_000)));
        // Of 16 MB of experts one host holds 4 MB. Each of two has 8 MB of them, the first with room for half.
        let us = |decode: f64| 1e6 / decode;
        assert!((us(all[0].decode) - (700.0 + 4000.0 * 0.75)).abs() < 1e-6, "{all:?}");
        let slices = us(all[1].decode) - us(costs(&hosts(2, "100 Gb/s, 10 us"), &shape)[1].decode);
        assert!((slices - 2000.0 * 0.5).abs() < 1e-6, "{slices}");
        // Rows of a batch share weights, but not their messages.
        let all = costs(&hosts(2, "100 Gb/s, 10 us"), &shape);
        assert!(all[1].batch > 1.5 * all[1].decode && all[1].batch < 4.0 * all[1].decode);
    }

    #[test]
    fn near_costs_of_one_sequence_are_told_apart_by_those_of_several() {
        let of = |placement, [decode, batch]: [f64; 2]| Cost {
            placement,
            decode,
            batch,
            prefill: decode,
            link_bytes: 0.0,
            memory: vec![0],
            fits: true,
        };
        let chosen = |rates: [[f64; 2]; 4]| {
            let costs: Vec<_> =
                HostPlacement::ALL.into_iter().zip(rates).map(|(p, rate)| of(p, rate)).collect();
            preferred(&costs).map(|c| c.placement)
        };
        let [few, near, most] = [[10.0, 60.0], [11.5, 40.0], [12.0, 30.0]];
        assert_eq!(chosen([few, near, few, most]), Some(HostPlacement::Slices));
        assert_eq!(chosen([few, few, most, most]), Some(HostPlacement::Stages));
        assert_eq!(chosen([near, near, few, most]), Some(HostPlacement::Alone));
        assert_eq!(chosen([few, few, few, most]), Some(HostPlacement::Owners));
    }

    /// 1 MB of chosen experts in the first layer saves less than a message takes, 8 MB in the second more.
    #[test]
    fn layers_have_slices_where_messages_take_less_than_they_save() {
        let mut shape = shape();
        for (layer, bytes) in shape.layers.iter_mut().zip([500_000, 4_000_000]) {
            layer.experts.as_mut().expect("experts").bytes = bytes;
        }
        let (hosts, routing) = (hosts(2, "8 Gb/s, 100 us"), Routing::even(&shape));
        let every = Scene {
            shape: &shape,
            hosts: &hosts,
            routing: &routing,
            batch: 1,
            chunk: 64,
            cut_attention: None,
            slices: Some(EVERY),
        };
        let us = |of: Option<&[u32]>| {
            let scene = Scene { slices: of, ..every };
            let cost = scene.cost(HostPlacement::Slices);
            (scene.whole(HostPlacement::Slices), 1e6 / cost.decode, cost)
        };
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} {b}");
        let (whole, all, _) = us(Some(EVERY));
        assert_eq!(whole, [false; 2]);
        near(all, 300.0 + 50.0 + 400.0 + 2.0 * 108.0);
        let (whole, mixed, cost) = us(None);
        assert_eq!(whole, [true, false]);
        near(mixed, 300.0 + 100.0 + 400.0 + 108.0);
        assert_eq!((cost.link_bytes, cost.memory[1]), (8000.0, 16_000_000));
        assert_eq!(us(Some(&[1, 2])), us(None));
        assert_eq!(us(Some(&[1])).0, [true; 2]);
    }

    /// Attention of three heads, half of what a layer reads besides experts: two hosts have two and one of them.
    #[test]
    fn heads_are_cut_where_messages_take_less_than_they_save() {
        let mut shape = shape();
        let product = Product { bytes: 600_000, numbers: 600_000 };
        let attention = Attention { heads: 3, product, stored: 900_000, row: 4000, result: 4000 };
        shape.layers[0].attention = Some(Ok(attention));
        shape.layers[1].attention = Some(Err("is another's".to_owned()));
        let routing = Routing::even(&shape);
        let us = |network: &str, cut_attention| {
            let hosts = hosts(2, network);
            let scene = Scene {
                shape: &shape,
                hosts: &hosts,
                routing: &routing,
                batch: 1,
                chunk: 64,
                cut_attention,
                slices: Some(EVERY),
            };
            let slices = scene.cost(HostPlacement::Slices);
            let cut = shape.layers.iter().map(|l| scene.cut(l).is_some()).collect::<Vec<_>>();
            (1e6 / slices.decode, slices.memory, slices.link_bytes, cut)
        };
        // 60 µs of attention are 40 on the host with two of three heads; a row there and back takes 1 + 0.64 µs.
        let (first, cut) = (us("100 Gb/s, 1 us", Some(false)), us("100 Gb/s, 1 us", None));
        assert_eq!((first.3.as_slice(), cut.3.as_slice()), (&[false, false][..], &[true, false][..]));
        assert!((first.0 - cut.0 - (60.0 - 40.0 - 1.64)).abs() < 1e-6, "{first:?} {cut:?}");
        assert_eq!([cut.1[0] + 300_000, cut.1[1]], [first.1[0], first.1[1] + 600_000]);
        assert_eq!(cut.2, first.2 + 8000.0);
        assert_eq!(us("100 Gb/s, 30 us", None), us("100 Gb/s, 30 us", Some(false)));
    }
}
