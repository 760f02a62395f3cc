//! Loads of experts sampled from recorded counts, for models whose own routing is not available.
//!
//! The counts are those of OLMoE-1B-7B (`golden/traces`): 64 experts, 8 per token, three layers, by domain of
//! text. The experts of a layer are sorted by their load over all domains. For a model with fewer experts,
//! runs of neighbours become one expert; with more, each becomes several equal ones. So popular experts stay
//! popular, and domains keep their preferences. Each token of a chunk then chooses its experts, by these
//! shares and a fixed seed. Layers follow the recorded layer of their depth.

use moec_base::{Error, Result};
use moec_costs::Model;
use moec_costs::model::Moe;
use moec_profile::Routing;
use moec_profile::loads::{LayerLoads, Loads};
use std::collections::BTreeMap;

/// The recorded counts.
const COUNTS: &str = include_str!("../../golden/traces/olmoe_expert_counts.csv");
/// Domains that come near NPUMoE's workloads (§5.1): web text, an encyclopedia (BoolQ), narratives
/// (HellaSwag, RULER).
pub const DOMAINS: [&str; 3] = ["c4", "wikipedia", "book"];
/// Every domain that was recorded.
pub const ALL: [&str; 6] = ["arxiv", "book", "c4", "github", "tulu", "wikipedia"];
/// Chunks of every domain that calibration reads.
const CALIBRATION: u64 = 8;

/// Counts by domain, then by layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    domains: BTreeMap<String, BTreeMap<u32, Vec<f64>>>,
    /// Experts in order of popularity, by layer.
    order: BTreeMap<u32, Vec<usize>>,
}

impl Recorded {
    /// The counts that come with moec.
    ///
    /// # Errors
    /// Our bug: counts that do not parse.
    pub fn built_in() -> Result<Self> {
        Self::parse(COUNTS, &DOMAINS)
    }

    /// All of the counts that come with moec.
    ///
    /// # Errors
    /// Our bug: counts that do not parse.
    pub fn every() -> Result<Self> {
        Self::parse(COUNTS, &ALL)
    }

    /// Share of its choices that each recorded expert got: `[layer][domain][expert]`, layers in their order.
    pub fn parts(&self) -> Vec<Vec<Vec<f64>>> {
        let part = |counts: &Vec<f64>| {
            let sum: f64 = counts.iter().sum();
            counts.iter().map(|c| c / sum).collect()
        };
        let of = |layer| self.domains.values().filter_map(|d| d.get(layer)).map(part).collect();
        self.order.keys().map(of).collect()
    }

    /// Routing of a domain, by layer: each token chose `k` experts. `None` if it was not recorded.
    pub fn routing(&self, domain: &str, k: u32) -> Option<Vec<Routing>> {
        let layer = |(&layer, counts): (&u32, &Vec<f64>)| {
            let chosen: Vec<u64> = counts.iter().map(|&c| c as u64).collect();
            let tokens = chosen.iter().sum::<u64>() / u64::from(k.max(1));
            Routing { tokens, chosen, ..Routing::new(layer, k, counts.len()) }
        };
        Some(self.domains.get(domain)?.iter().map(layer).collect())
    }

    /// Reads counts (`model,domain,layer,expert,count`), those of some domains.
    ///
    /// # Errors
    /// An invalid line, by its number; a domain or an expert that is missing.
    pub fn parse(text: &str, names: &[&str]) -> Result<Self> {
        let wrong = |line: usize, why: &str| Error::input(format!("recorded counts, line {line}: {why}"));
        let mut domains: BTreeMap<String, BTreeMap<u32, Vec<f64>>> = BTreeMap::new();
        for (i, line) in text.lines().enumerate().skip(1).filter(|(_, l)| !l.trim().is_empty()) {
            let fields: Vec<&str> = line.split(',').map(str::trim).collect();
            let [_, domain, layer, expert, count] = fields.as_slice() else {
                return Err(wrong(i + 1, "expected model,domain,layer,expert,count"));
            };
            if !names.contains(domain) {
                continue;
            }
            let layer: u32 = layer.parse().map_err(|_| wrong(i + 1, "the layer is not a number"))?;
            let expert: usize = expert.parse().map_err(|_| wrong(i + 1, "the expert is not a number"))?;
            let count: u64 = count.parse().map_err(|_| wrong(i + 1, "the count is not a number"))?;
            let counts = domains.entry((*domain).to_owned()).or_default().entry(layer).or_default();
            if counts.len() != expert {
                return Err(wrong(i + 1, "experts are not in order"));
            }
            counts.push(count as f64);
        }
        let missing = names.iter().find(|d| !domains.contains_key(**d));
        if let Some(domain) = missing {
            return Err(Error::input(format!("recorded counts: no domain `{domain}`")));
        }
        let mut order = BTreeMap::new();
        let layers: Vec<u32> = domains.values().flat_map(|d| d.keys().copied()).collect();
        for layer in layers {
            let all: Vec<&Vec<f64>> = domains.values().filter_map(|d| d.get(&layer)).collect();
            let experts = all.first().map_or(0, |c| c.len());
            if all.len() != domains.len()
                || all.iter().any(|c| c.len() != experts || c.iter().sum::<f64>() <= 0.0)
            {
                return Err(Error::input(format!("recorded counts: layer {layer} is not complete")));
            }
            let share = |e: usize| all.iter().map(|c| c[e] / c.iter().sum::<f64>()).sum::<f64>();
            let mut ranks: Vec<usize> = (0..experts).collect();
            ranks.sort_by(|&a, &b| share(b).total_cmp(&share(a)).then(a.cmp(&b)));
            order.insert(layer, ranks);
        }
        Ok(Self { domains, order })
    }

    /// Shares of `experts` experts in a domain, at a depth of the model from 0 to 1.
    fn shares(&self, domain: &str, depth: f64, experts: usize) -> Vec<f64> {
        let at = ((depth * self.order.len() as f64) as usize).min(self.order.len().saturating_sub(1));
        let Some((layer, ranks)) = self.order.iter().nth(at) else { return vec![1.0; experts] };
        let Some(counts) = self.domains.get(domain).and_then(|d| d.get(layer)) else {
            return vec![1.0; experts];
        };
        let n = ranks.len();
        let of = |rank: usize| ranks.get(rank).and_then(|&e| counts.get(e)).copied().unwrap_or(0.0);
        let share = |e: usize| {
            let (from, to) = (e * n / experts, (e + 1) * n / experts);
            // More experts than were recorded: each recorded one represents several.
            if to <= from { of(from) / (experts as f64 / n as f64) } else { (from..to).map(of).sum() }
        };
        (0..experts).map(share).collect()
    }

    /// Loads of a prompt: `[chunks][MoE layers][experts]` tokens of a chunk that chose each expert.
    pub fn prompt(
        &self,
        model: &Model,
        domain: &str,
        chunk: u32,
        chunks: u32,
        seed: u64,
    ) -> Vec<Vec<Vec<u32>>> {
        let depth = Depth::of(model);
        let layers: Vec<(usize, Moe)> = model.moe_layers().filter_map(|l| l.experts).enumerate().collect();
        let shares: Vec<Vec<f64>> =
            layers.iter().map(|(i, moe)| cumulative(&self.shares(domain, depth.at(*i), moe.count))).collect();
        let call = |c: u32| {
            let of = |(i, moe): &(usize, Moe)| {
                let mut random = Random(seed ^ hash(domain) ^ (u64::from(c) << 32) ^ ((*i as u64) << 8));
                draw(&shares[*i], moe.k, chunk, &mut random)
            };
            layers.iter().map(of).collect()
        };
        (0..chunks).map(call).collect()
    }

    /// Loads that calibration sees: chunks of every domain, none of them of a prompt. Layers of one recorded
    /// layer share it.
    pub fn calibration(&self, model: &Model, chunk: u32) -> Loads {
        let depth = Depth::of(model);
        let mut seen: BTreeMap<usize, LayerLoads> = BTreeMap::new();
        let mut layers = Vec::new();
        for (i, layer) in model.moe_layers().enumerate() {
            let Some(moe) = layer.experts else { continue };
            let class = (depth.at(i) * self.order.len() as f64) as usize;
            let loads = seen.entry(class).or_insert_with(|| {
                let mut samples = Vec::new();
                for domain in self.domains.keys() {
                    let shares = cumulative(&self.shares(domain, depth.at(i), moe.count));
                    for c in 0..CALIBRATION {
                        let mut random = Random(!hash(domain) ^ (c << 32) ^ ((class as u64) << 8));
                        samples.push(draw(&shares, moe.k, chunk, &mut random));
                    }
                }
                let chosen = (0..moe.count).map(|e| samples.iter().map(|s| u64::from(s[e])).sum()).collect();
                let tokens = samples.len() as u64 * u64::from(chunk);
                LayerLoads { layer: 0, k: moe.k, tokens, chosen, samples }
            });
            layers.push(LayerLoads { layer: layer.layer, ..loads.clone() });
        }
        let origin = format!("{} chunks of {}", CALIBRATION * self.domains.len() as u64, DOMAINS.join(", "));
        Loads { chunk, origin, layers }
    }
}

/// Depth of a layer with experts.
struct Depth(usize);

impl Depth {
    fn of(model: &Model) -> Self {
        Self(model.moe_layers().count().max(1))
    }

    fn at(&self, layer: usize) -> f64 {
        layer as f64 / self.0 as f64
    }
}

/// Sums up to each share, the last one 1.
fn cumulative(shares: &[f64]) -> Vec<f64> {
    let total: f64 = shares.iter().sum();
    let mut sum = 0.0;
    shares
        .iter()
        .map(|s| {
            sum += s;
            sum / total.max(f64::MIN_POSITIVE)
        })
        .collect()
}

/// Tokens of a chunk that choose each expert: every token `k` different ones.
fn draw(cumulative: &[f64], k: u32, tokens: u32, random: &mut Random) -> Vec<u32> {
    /// Draws after which a token takes the first expert that is left: shares of nothing must not hang.
    const TRIES: u32 = 256;
    let n = cumulative.len();
    let mut loads = vec![0; n];
    let mut chosen: Vec<usize> = Vec::new();
    for _ in 0..tokens {
        chosen.clear();
        let mut tries = 0;
        while chosen.len() < (k as usize).min(n) {
            let u = random.next();
            let mut e = cumulative.partition_point(|c| *c <= u).min(n - 1);
            tries += 1;
            if tries > TRIES {
                e = (0..n).find(|e| !chosen.contains(e)).unwrap_or(e);
            }
            if !chosen.contains(&e) {
                chosen.push(e);
                loads[e] += 1;
            }
        }
    }
    loads
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// SplitMix64 (Steele, Lea, Flood, 2014).
struct Random(u64);

impl Random {
    /// Uniform in 0..1.
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::shapes::{PHIMOE, QWEN3};

    #[test]
    fn recorded_counts_are_checked_and_drawn_from() {
        let recorded = Recorded::built_in().unwrap();
        for shape in [PHIMOE, QWEN3] {
            let model = shape.model();
            for domain in DOMAINS {
                let prompt = recorded.prompt(&model, domain, 64, 2, 7);
                assert_eq!(
                    (prompt.len(), prompt[0].len(), prompt[0][0].len()),
                    (2, shape.layers as usize, shape.experts)
                );
                for layer in prompt.iter().flatten() {
                    assert_eq!(layer.iter().sum::<u32>(), 64 * shape.k);
                    assert!(layer.iter().all(|n| *n <= 64));
                }
                assert_eq!(prompt, recorded.prompt(&model, domain, 64, 2, 7));
                assert_ne!(prompt, recorded.prompt(&model, domain, 64, 2, 8));
            }
            let seen = recorded.calibration(&model, 64);
            // Popular experts come first, with the skew of the recorded counts.
            assert!(
                seen.layers.iter().all(|l| l.imbalance() > 1.2 && l.chosen[0] > l.chosen[shape.experts - 1])
            );
        }
        let head = "model,domain,layer,expert,count\n";
        for (text, why) in [
            ("m,a,0,0\n", "line 2: expected model,domain,layer,expert,count"),
            ("m,a,zero,0,5\n", "line 2: the layer is not a number"),
            ("m,a,0,0,-1\n", "line 2: the count is not a number"),
            ("m,a,0,1,5\n", "line 2: experts are not in order"),
            ("m,a,0,0,0\n", "layer 0 is not complete"),
            ("m,b,0,0,5\n", "no domain `a`"),
            ("", "no domain `a`"),
        ] {
            let e = Recorded::parse(&format!("{head}{text}"), &["a"]).unwrap_err().to_string();
            assert!(e.contains(why), "{e}");
        }
    }
}
