//! Number of tokens of a step that chose each expert.
//!
//! Two kinds. *Drawn*: shares of a layer's experts with the skew of §3.1, which wander from step to step.
//! *Recorded*: shares of OLMoE's experts by domain of text (`golden/traces`), in a batch whose sequences end
//! and make room for others. In both each token then draws its experts by these shares, none twice. All is
//! repeatable.

use crate::random::Random;
use moec_sim::sample_experts;

/// Part of the experts and of their tokens that are hot, and warm; the others are cold. §3.1: more than 70 %
/// of the experts have 8 % of the tokens, 20 to 40 % up to 70 %.
const HOT: (f64, f64) = (0.05, 0.22);
const WARM: (f64, f64) = (0.25, 0.70);
/// Spread of the shares within a class: the logarithm's deviation.
const SPREAD: f64 = 0.4;
/// Share of a deviation that is left from one step to the next.
const PERSISTENCE: f64 = 0.9;
/// Deviation of a share's logarithm from the one by which experts are put in order. Found from the 78 % of
/// §4.3.
pub const DRIFT: f64 = 1.0;
/// Tokens of a sequence before another takes its place, on average.
const LENGTH: f64 = 256.0;

/// Shares of a layer's experts by domain: `[domain][expert]`.
pub type Domains = Vec<Vec<f64>>;

/// Source of shares.
#[derive(Clone, Debug)]
pub enum Source {
    /// Drawn, with this drift.
    Drawn(f64),
    /// Recorded, by layer.
    Recorded(Vec<Domains>),
}

/// A layer's shares in time.
#[derive(Clone, Debug)]
enum Shares {
    Drawn { base: Vec<f64>, off: Vec<f64>, drift: f64 },
    Recorded(Domains),
}

/// Loads of all layers from step to step.
#[derive(Clone, Debug)]
pub struct Loads {
    random: Random,
    layers: Vec<Shares>,
    /// Domain of each sequence of the batch, for recorded shares.
    sequences: Vec<usize>,
    batch: usize,
    k: usize,
}

impl Loads {
    /// Of so many layers and experts.
    pub fn new(source: &Source, layers: usize, experts: usize, k: usize, batch: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let layers = (0..layers)
            .map(|l| match source {
                Source::Drawn(drift) => Shares::Drawn {
                    base: popularity(&mut random, experts),
                    off: (0..experts).map(|_| random.normal()).collect(),
                    drift: *drift,
                },
                Source::Recorded(of) => {
                    let domains = of.get(l % of.len().max(1)).map_or(&[][..], Vec::as_slice);
                    Shares::Recorded(domains.iter().map(|d| spread(d, experts)).collect())
                }
            })
            .collect::<Vec<_>>();
        let domains = layers.iter().map(Shares::domains).max().unwrap_or(1);
        let sequences = (0..batch).map(|_| random.below(domains)).collect();
        Self { random, layers, sequences, batch, k }
    }

    /// Mean loads of a layer, recorded before.
    pub fn mean(&self, layer: usize) -> Vec<f64> {
        let shares = match &self.layers[layer] {
            Shares::Drawn { base, .. } => base.clone(),
            Shares::Recorded(domains) => {
                let experts = domains.first().map_or(0, Vec::len);
                (0..experts).map(|e| domains.iter().map(|d| d[e]).sum()).collect()
            }
        };
        let sum: f64 = shares.iter().sum();
        shares.iter().map(|s| s / sum * (self.batch * self.k) as f64).collect()
    }

    /// A step of all layers: `[layer][expert]` tokens.
    pub fn step(&mut self) -> Vec<Vec<u32>> {
        let domains = self.layers.iter().map(Shares::domains).max().unwrap_or(1);
        for sequence in &mut self.sequences {
            if self.random.unit() < 1.0 / LENGTH {
                *sequence = self.random.below(domains);
            }
        }
        let Self { random, layers, sequences, batch, k } = self;
        layers.iter_mut().map(|shares| shares.draw(random, sequences, *batch, *k)).collect()
    }
}

impl Shares {
    fn domains(&self) -> usize {
        match self {
            Self::Drawn { .. } => 1,
            Self::Recorded(domains) => domains.len().max(1),
        }
    }

    fn draw(&mut self, random: &mut Random, sequences: &[usize], batch: usize, k: usize) -> Vec<u32> {
        match self {
            Self::Drawn { base, off, drift } => {
                for x in off.iter_mut() {
                    *x = PERSISTENCE * *x + (1.0 - PERSISTENCE * PERSISTENCE).sqrt() * random.normal();
                }
                let now = wandered(base, off, *drift);
                let mut loads = vec![0; now.len()];
                sample_experts(&mut || random.unit(), &now, k, batch, &mut loads);
                loads
            }
            Self::Recorded(domains) => {
                let mut loads = vec![0; domains.first().map_or(0, Vec::len)];
                for (d, shares) in domains.iter().enumerate() {
                    let tokens = sequences.iter().filter(|&&s| s == d).count();
                    sample_experts(&mut || random.unit(), shares, k, tokens, &mut loads);
                }
                loads
            }
        }
    }
}

/// Numbers of a layer's hot and warm experts.
pub fn count(experts: usize) -> (usize, usize) {
    let of = |part: f64| ((experts as f64 * part).round() as usize).max(1);
    (of(HOT.0), of(WARM.0))
}

/// Shares with the skew of §3.1, in no order.
fn popularity(random: &mut Random, experts: usize) -> Vec<f64> {
    let (hot, warm) = count(experts);
    let cold = experts.saturating_sub(hot + warm).max(1);
    let mut shares: Vec<f64> = (0..experts)
        .map(|e| match e {
            _ if e < hot => HOT.1 / hot as f64,
            _ if e < hot + warm => WARM.1 / warm as f64,
            _ => (1.0 - HOT.1 - WARM.1) / cold as f64,
        })
        .map(|share| share * (SPREAD * random.normal()).exp())
        .collect();
    for i in (1..shares.len()).rev() {
        shares.swap(i, random.below(i + 1));
    }
    shares
}

/// Shares of more experts than were recorded: each recorded one represents several.
fn spread(recorded: &[f64], experts: usize) -> Vec<f64> {
    (0..experts).map(|e| recorded.get(e * recorded.len() / experts).copied().unwrap_or(0.0)).collect()
}

/// The same shares for other experts: in the order of their logarithms and how far these are off.
fn wandered(base: &[f64], off: &[f64], drift: f64) -> Vec<f64> {
    let score: Vec<f64> = base.iter().zip(off).map(|(b, x)| b.ln() + drift * x).collect();
    let order = |score: &[f64]| {
        let mut order: Vec<usize> = (0..score.len()).collect();
        order.sort_by(|&a, &b| score[b].total_cmp(&score[a]).then(a.cmp(&b)));
        order
    };
    let by_base = order(base);
    let mut now = vec![0.0; base.len()];
    for (to, what) in order(&score).into_iter().zip(by_base) {
        now[to] = base[what];
    }
    now
}
