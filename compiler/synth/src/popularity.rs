//! Random models whose routers choose experts in recorded proportions.
//!
//! Channel 0 of the residual stream is the same in every token: the embedding sets it, no layer writes to it,
//! and no matrix but the routers' reads it. So the first number of a router's row acts as a bias, which the
//! models do not have. The rest of the row is random, and its product with the other channels is what
//! distinguishes tokens.
//!
//! Seen from a router, expert `e` has the logit `b_e + z_e` with `z_e` normal, and the `k` largest are
//! chosen. The biases are fitted by Monte Carlo: from `b_e = Φ⁻¹(π_e)` on, each step adds `Φ⁻¹(π_e) −
//! Φ⁻¹(p_e)` for the share `p_e` of tokens that the experts got and the share `π_e` that they should get.
//!
//! Attention and experts change the residual stream by about [`CHANGE`] of what the embedding put there, so
//! that the routing of one layer follows from that of the one before about as loosely as in trained models,
//! and the proportions of the router's two parts are known in every layer.
//!
//! The gates of experts can read channel 0, too: then they are ReLU, and so many of a token's neurons are 0
//! as is requested ([`super::sparse`]).

use super::shapes::{First, NORM, Normal, Shape, Tensor, WEIGHT};
use super::{GRID, Numbers, fnv, probit, sparse};
use moec_base::error::{Error, Result};
use moec_sim::cache::synthetic;
use std::collections::BTreeSet;

/// Value of channel 0, where the others have a standard deviation of one.
const CHANNEL_0_VALUE: f64 = 4.0;
/// Standard deviation of what attention (for the first token) and the experts add in a layer, relative to the
/// embedding's.
const CHANGE: f64 = 0.3;
/// Tokens of the Monte Carlo.
const TOKENS: usize = 1 << 14;
/// Steps of the fit.
const STEPS: usize = 24;

/// Number of tokens that chose each expert.
#[derive(Clone, Debug, PartialEq)]
pub struct Popularity {
    /// Layer of the recorded model, and counts of its experts.
    layers: Vec<(u32, Vec<f64>)>,
}

impl Popularity {
    /// Reads lines `model,domain,layer,expert,count` and adds up the domains. Without a name, the file must
    /// hold the counts of one model only.
    ///
    /// # Errors
    /// An invalid line, a model that is not there, or several to choose from.
    pub fn parse(csv: &str, model: Option<&str>) -> Result<Self> {
        let sources: BTreeSet<(&str, &str)> = csv
            .lines()
            .skip(1)
            .filter_map(|line| line.split_once(',').and_then(|(m, rest)| Some((m, rest.split_once(',')?.0))))
            .collect();
        let models: BTreeSet<&str> = sources.iter().map(|s| s.0).collect();
        let known = models.iter().copied().collect::<Vec<_>>().join(", ");
        let name = match (model, models.len()) {
            (_, 0) => return Err(Error::input("no line reads model,domain,layer,expert,count")),
            (None, 1) => known.as_str(),
            (None, _) => {
                return Err(Error::input("it counts several models").hint(format!("choose one: {known}")));
            }
            (Some(name), _) if models.contains(name) => name,
            (Some(name), _) => {
                return Err(Error::input(format!("it has no model `{name}`")).hint(format!("it has {known}")));
            }
        };
        let mut layers: Vec<(u32, Vec<f64>)> = Vec::new();
        for (_, domain) in sources.iter().filter(|s| s.0 == name) {
            let found = synthetic::popularity(csv, name, domain).map_err(|e| Error::input(e.to_string()))?;
            for (layer, counts) in found {
                match layers.iter_mut().find(|l| l.0 == layer) {
                    None => layers.push((layer, counts)),
                    Some((_, sum)) if sum.len() == counts.len() => {
                        sum.iter_mut().zip(counts).for_each(|(s, c)| *s += c);
                    }
                    Some((_, sum)) => {
                        let (n, m) = (sum.len(), counts.len());
                        return Err(Error::input(format!("layer {layer} has {n} experts, or {m}")));
                    }
                }
            }
        }
        layers.sort_by_key(|l| l.0);
        Ok(Self { layers })
    }

    /// Counts for layer `layer` of `layers`, in a model that has `depth` when it is not cut: those of the
    /// recorded layer that is nearest at the same depth.
    pub fn at(&self, layer: usize, layers: usize, depth: usize) -> &[f64] {
        let whole = depth.saturating_sub(1) as f64;
        let place = layer as f64 * whole / layers.saturating_sub(1).max(1) as f64;
        let away = |l: &u32| (f64::from(*l) - place).abs();
        let nearest = self.layers.iter().min_by(|a, b| away(&a.0).total_cmp(&away(&b.0)));
        nearest.map_or(&[], |(_, counts)| counts)
    }
}

/// The error for a model that cannot have a popularity.
pub(super) fn refused(why: &str) -> Error {
    Error::usage(why).hint("`--popularity` works for olmoe and qwen3-30b-a3b")
}

/// Changes the tensors of a model so that its routers choose in the recorded proportions. `depth` is the
/// number of layers that the model has when it is not cut. `zeros`: the share of a token's neurons that ReLU
/// leaves at 0; `None`: gates are SiLU.
pub(super) fn skew(
    shape: &Shape,
    depth: usize,
    popularity: &Popularity,
    zeros: Option<f64>,
    tensors: &mut [Tensor],
) -> Result<()> {
    if shape.biases {
        return Err(refused("this model's norms have biases, which hide what the routers would read"));
    }
    let k = shape.config["num_experts_per_tok"].as_u64().unwrap_or(1) as usize;
    let renorm = shape.config["norm_topk_prob"].as_bool().unwrap_or(false);
    // A row of a matrix of `WEIGHT` times a normalised vector.
    let row = WEIGHT.std * (shape.hidden as f64).sqrt() * (1.0 + NORM.std.powi(2)).sqrt();
    let draw = |std| Normal { mean: 0.0, std };
    let attention = CHANGE / (row * ((shape.heads * shape.head_dim) as f64).sqrt());
    let gates = zeros.map(|zeros| sparse::biases(zeros, shape.inner));
    let inner = match &gates {
        Some(gates) => sparse::power(gates, row).sqrt(),
        None => glu(row) * (shape.inner as f64).sqrt(),
    };
    // Neighbouring layers often have the same counts.
    let (mut fits, mut of_layer): (Vec<Router<'_>>, Vec<usize>) = (Vec::new(), Vec::new());
    for layer in 0..shape.layers {
        let counts = popularity.at(layer, shape.layers, depth);
        if counts.len() != shape.experts {
            let (n, m) = (counts.len(), shape.experts);
            return Err(Error::input(format!("the counts are of {n} experts per layer, the model has {m}")));
        }
        if let Some(known) = fits.iter().position(|f| f.counts == counts) {
            of_layer.push(known);
            continue;
        }
        let biases = fit(counts, k)?;
        let down = CHANGE / (inner * weights(&biases, row, k, renorm));
        of_layer.push(fits.len());
        fits.push(Router { counts, biases, down });
    }
    for tensor in tensors {
        let layer = tensor.name.split('.').nth(2).and_then(|l| l.parse::<usize>().ok());
        let fit = layer.and_then(|l| of_layer.get(l)).and_then(|&i| fits.get(i));
        let short = tensor.name.trim_end_matches(".weight").rsplit('.').next().unwrap_or_default();
        let [gate, up, down] = shape.names;
        // What the layers before have added to the channels that are not marked.
        let before = (1.0 + CHANGE.powi(2) * layer.unwrap_or(0) as f64).sqrt();
        let scale = row * before / CHANNEL_0_VALUE;
        match (short, fit) {
            ("embed_tokens", _) => {
                (tensor.distribution, tensor.first) = (draw(1.0), First::OfRows(vec![CHANNEL_0_VALUE]));
            }
            ("post_attention_layernorm", _) => tensor.first = First::OfRows(vec![1.0]),
            ("o_proj", _) => (tensor.distribution, tensor.first) = (draw(attention), First::NoRow),
            ("gate", Some(fit)) => {
                tensor.first = First::OfRows(fit.biases.iter().map(|b| b * scale).collect());
            }
            (name, Some(fit)) if name == down => {
                (tensor.distribution, tensor.first) = (draw(fit.down), First::NoRow);
            }
            ("v_proj", _) => tensor.first = First::OfRows(vec![0.0]),
            (name, _) if name == gate && gates.is_some() => {
                let own = sparse::shuffled(gates.as_deref().unwrap_or_default(), fnv(&tensor.name));
                tensor.first = First::OfRows(own.iter().map(|b| b * scale).collect());
            }
            (name, _) if name == gate || name == up => tensor.first = First::OfRows(vec![0.0]),
            _ => {}
        }
    }
    Ok(())
}

/// Root mean square of `silu(g) · u` for independent normal `g` and `u` of standard deviation `std`.
fn glu(std: f64) -> f64 {
    let silu = |i: u32| {
        let g = std * probit((f64::from(i) + 0.5) / f64::from(GRID));
        g / (1.0 + (-g).exp())
    };
    std * ((0..GRID).map(|i| silu(i).powi(2)).sum::<f64>() / f64::from(GRID)).sqrt()
}

/// Router of a layer.
struct Router<'a> {
    counts: &'a [f64],
    /// In standard deviations of the logits' random part.
    biases: Vec<f64>,
    /// Standard deviation of the experts' last matrix.
    down: f64,
}

/// The biases with which experts are chosen as often as counted, in standard deviations of the random part.
fn fit(counts: &[f64], k: usize) -> Result<Vec<f64>> {
    let sum: f64 = counts.iter().sum();
    let least = 1.0 / TOKENS as f64;
    let targets: Vec<f64> = counts.iter().map(|c| (c * k as f64 / sum).max(least)).collect();
    if !(sum.is_finite() && sum > 0.0) || k > counts.len() || targets.iter().any(|&w| w >= 1.0) {
        return Err(Error::input(format!("no router that chooses {k} experts has these counts")));
    }
    let mut biases: Vec<f64> = targets.iter().map(|&w| probit(w)).collect();
    for _ in 0..STEPS {
        let mut got = vec![0.0_f64; counts.len()];
        each_token(&biases, k, &mut |chosen| chosen.iter().for_each(|c| got[c.0] += least));
        for ((bias, &target), got) in biases.iter_mut().zip(&targets).zip(got) {
            *bias += probit(target) - probit(got.clamp(least / 2.0, 1.0 - least / 2.0));
        }
    }
    Ok(biases)
}

/// Experts that a token chose, with their logits.
type Chosen = [(usize, f64)];

/// Draws tokens, the same for all biases.
fn each_token(biases: &[f64], k: usize, see: &mut dyn FnMut(&Chosen)) {
    let table: Vec<f64> = (0..GRID).map(|i| probit((f64::from(i) + 0.5) / f64::from(GRID))).collect();
    let mut numbers = Numbers(0);
    let mut logits: Vec<(usize, f64)> = Vec::with_capacity(biases.len());
    for _ in 0..TOKENS {
        logits.clear();
        for (e, bias) in biases.iter().enumerate() {
            logits.push((e, bias + table[(numbers.next() >> 40) as usize % table.len()]));
        }
        logits.select_nth_unstable_by(k - 1, |a, b| b.1.total_cmp(&a.1));
        see(&logits[..k]);
    }
}

/// Root of the mean sum of squares of a token's routing weights. `std` turns what biases are counted in into
/// logits. Experts that are not chosen have their part in the softmax, unless the weights are made to add up
/// to one.
fn weights(biases: &[f64], std: f64, k: usize, renorm: bool) -> f64 {
    // The mean of a log-normal variable, of every expert.
    let all: f64 = biases.iter().map(|b| (std * b + std * std / 2.0).exp()).sum();
    let mut squares = 0.0;
    each_token(biases, k, &mut |chosen| {
        let of = |c: &(usize, f64)| (std * c.1).exp();
        let sum = if renorm { chosen.iter().map(of).sum() } else { all };
        squares += chosen.iter().map(|c| (of(c) / sum).powi(2)).sum::<f64>();
    });
    (squares / TOKENS as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Like, SHARD, write_tensors};
    use moec_base::progress::Progress;
    use moec_config::Config;
    use moec_import::ImportOptions;
    use moec_measure::calibrate::{Request, calibrate, read_texts};
    use moec_measure::job::Job;
    use moec_profile::Profile;
    use std::fmt::Write as _;
    use std::fs;

    const OLMOE: &str = include_str!("../../../golden/traces/olmoe_expert_counts.csv");
    const VOCAB: usize = 2048;

    #[test]
    fn popularity_sums_domains_and_separates_models() {
        let csv =
            "model,domain,layer,expert,count\na,x,0,0,1\na,x,0,1,2\na,y,0,0,10\na,y,0,1,20\nb,x,0,0,5\n";
        assert_eq!(Popularity::parse(csv, Some("a")).unwrap().at(0, 1, 1), [11.0, 22.0]);
        let e = Popularity::parse(csv, None).expect_err("two models");
        assert_eq!(e.hint.as_deref(), Some("choose one: a, b"));
        assert!(Popularity::parse(csv, Some("c")).is_err());
        assert!(Popularity::parse("model,domain,layer,expert,count\na,x,0,0,many\n", None).is_err());
        assert!(Popularity::parse("", None).is_err());
    }

    #[test]
    fn layers_take_counts_by_relative_depth() {
        let counts = |layer: u32| (layer, vec![f64::from(layer)]);
        let popularity = Popularity { layers: vec![counts(0), counts(7), counts(15)] };
        let at =
            |layers: usize| (0..layers).map(|l| popularity.at(l, layers, 16)[0] as u32).collect::<Vec<_>>();
        assert_eq!(at(16), [0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 15, 15, 15, 15]);
        assert_eq!((at(3), at(2), at(1)), (vec![0, 7, 15], vec![0, 15], vec![0]));
    }

    #[test]
    fn fitted_biases_reproduce_the_routing_shares() {
        let popularity = Popularity::parse(OLMOE, None).unwrap();
        for layer in [0, 7, 15] {
            let counts = popularity.at(layer, 16, 16);
            let mut got = vec![0.0; counts.len()];
            let biases = fit(counts, 8).unwrap();
            each_token(&biases, 8, &mut |chosen| chosen.iter().for_each(|c| got[c.0] += 1.0));
            assert!(distance(counts, &got) < 0.002, "layer {layer}: {}", distance(counts, &got));
        }
        assert!(fit(&[1.0, 0.0], 2).is_err());
    }

    /// Total variation distance of two distributions.
    fn distance(a: &[f64], b: &[f64]) -> f64 {
        let (of_a, of_b) = (a.iter().sum::<f64>(), b.iter().sum::<f64>());
        a.iter().zip(b).map(|(a, b)| (a / of_a - b / of_b).abs()).sum::<f64>() / 2.0
    }

    /// Share of the `n` busiest experts of one that are among those of the other.
    fn overlap(a: &[f64], b: &[f64], n: usize) -> f64 {
        let busiest = |x: &[f64]| {
            let mut order: Vec<usize> = (0..x.len()).collect();
            order.sort_by(|&i, &j| x[j].total_cmp(&x[i]));
            order.truncate(n);
            order
        };
        let other = busiest(b);
        busiest(a).iter().filter(|e| other.contains(e)).count() as f64 / n as f64
    }

    /// Profile of OLMoE with narrow layers, and a tokenizer of the words `w0`, `w1`, …
    fn profile(popularity: &Popularity, zeros: Option<f64>) -> Profile {
        let shape = Shape {
            layers: 3,
            hidden: 256,
            heads: 4,
            kv_heads: 4,
            head_dim: 64,
            inner: 32,
            vocab: VOCAB,
            ..Like::Olmoe.shape().unwrap()
        };
        let mut config = shape.config(zeros.is_some());
        config["intermediate_size"] = 32.into();
        let mut tensors = crate::shapes::tensors(&config, &[]).unwrap();
        skew(&shape, 16, popularity, zeros, &mut tensors).unwrap();
        config["eos_token_id"] = 1.into();
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("hf");
        write_tensors(&source, &config, &tensors, 3, SHARD, &Progress::silent()).unwrap();
        let vocab: serde_json::Map<_, _> = (0..VOCAB).map(|i| (format!("w{i}"), i.into())).collect();
        let tokenizer = serde_json::json!({
            "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
        });
        fs::write(source.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let mut numbers = Numbers(1);
        let text = (0..4096).fold(String::new(), |mut text, _| {
            let _ = write!(text, "w{} ", numbers.next() % VOCAB as u64);
            text
        });
        let path = dir.path().join("text.txt");
        fs::write(&path, text).unwrap();
        let toml = dir.path().join("model.toml");
        fs::write(&toml, "[model]\nsource = \"hf\"\n[shapes]\nmax_context = 256\nprefill_chunk = 128\n")
            .unwrap();
        let config = Config::load(&toml).unwrap();
        let (checkpoint, spec) = moec_import::open(&source, &ImportOptions::default()).unwrap();
        let texts = read_texts(&[path]).unwrap();
        let request = Request { texts: &texts, tokens: 4096, window: 256, job: Job::ALONE };
        calibrate(&config, &checkpoint, &spec, &request, &Progress::silent()).unwrap()
    }

    #[test]
    fn synthetic_model_routes_like_the_counts() {
        let popularity = Popularity::parse(OLMOE, None).unwrap();
        for routing in profile(&popularity, None).layers {
            let expected = popularity.at(routing.layer as usize, 3, 16);
            let got: Vec<f64> = routing.chosen.iter().map(|&n| n as f64).collect();
            let (off, even) = (distance(expected, &got), distance(expected, &vec![1.0; expected.len()]));
            let same = overlap(expected, &got, 8);
            assert!(off < 0.06 && even > 0.1, "layer {}: {off} of {even}, overlap {same}", routing.layer);
            assert!(same >= 0.7, "layer {}: overlap {same}", routing.layer);
        }
    }

    #[test]
    fn model_has_the_requested_share_of_zeros() {
        let popularity = Popularity::parse(OLMOE, None).unwrap();
        for zeros in [0.5, 0.9] {
            let profile = profile(&popularity, Some(zeros));
            for layer in 0..3 {
                let counts = profile.neurons(layer).unwrap();
                let found = counts.zeros(0, 1).unwrap();
                assert!(
                    counts.is_exact() && (found - zeros).abs() < 0.03,
                    "layer {layer}: {found} of {zeros}"
                );
                // Some are requested much more often than others.
                let often = counts.frequencies(0, 1);
                let share =
                    |part: usize| often[..often.len() / part].iter().sum::<f64>() / often.iter().sum::<f64>();
                assert!(share(10) > 0.15, "layer {layer}: {}", share(10));
            }
        }
    }
}
