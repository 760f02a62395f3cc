//! Synthetic traces with a recorded popularity, for tests and benchmarks.
//!
//! Every expert of a layer has a latent logit `z = ln w + g`, of which a token uses the `k` largest. With `g`
//! from a Gumbel distribution this is sampling without replacement with the weights `w`; `w = −ln(1 − π)`
//! makes each expert's share of tokens (nearly) its popularity `π`. From one token to the next `g` is kept in
//! part: its quantiles are those of a first-order Gaussian process with correlation `persistence`. So one
//! number sets how often choices repeat, without a change in popularity. The router scores are the softmax of
//! `z`: as in real models, an expert with a score just below the chosen ones may be next.

use super::{Trace, TraceError};
use moec_runtime::offload::cache::{CacheError, ExpertIndex};
use moec_runtime::serving::sampler::SplitMix64;

/// Popularity of experts by layer.
pub type Popularity = Vec<(u32, Vec<f64>)>;

/// Reads counts from lines `model,domain,layer,expert,count` of one model and one domain. Layers without a
/// number, and a header line, are skipped.
///
/// # Errors
/// [`CacheError::Experts`] for an invalid line, or if no line is of this model and domain.
pub fn popularity(csv: &str, model: &str, domain: &str) -> Result<Popularity, CacheError> {
    let wrong = |what: String| CacheError::Experts(what);
    let mut layers = Popularity::new();
    for (number, line) in csv.lines().enumerate().skip(1).filter(|(_, l)| !l.is_empty()) {
        let fields: Vec<&str> = line.split(',').collect();
        let &[of, from, layer, expert, count] = fields.as_slice() else {
            return Err(wrong(format!("line {} has {} fields instead of five", number + 1, fields.len())));
        };
        let Some(layer) = layer.parse().ok().filter(|_| of == model && from == domain) else { continue };
        let (Ok(expert), Ok(count)) = (expert.parse::<u16>(), count.parse::<u64>()) else {
            return Err(wrong(format!("line {} counts no expert: {line:?}", number + 1)));
        };
        let at = layers.iter().position(|(l, _)| *l == layer).unwrap_or_else(|| {
            layers.push((layer, Vec::new()));
            layers.len() - 1
        });
        let counts = &mut layers[at].1;
        counts.resize(counts.len().max(usize::from(expert) + 1), 0.0);
        counts[usize::from(expert)] = count as f64;
    }
    if layers.is_empty() {
        return Err(wrong(format!("there are no counts of `{model}` on `{domain}`")));
    }
    layers.sort_by_key(|l| l.0);
    Ok(layers)
}

/// A trace of `tokens` tokens with scores. A layer without a popularity of its own has that of the nearest
/// layer with one. `persistence` is from 0 (tokens are independent) to below 1.
///
/// # Errors
/// [`CacheError::Experts`] if the popularity is empty, negative or for another number of experts, or if the
/// persistence is out of range.
pub fn trace(
    experts: &ExpertIndex,
    popularity: &Popularity,
    persistence: f64,
    tokens: usize,
    seed: u64,
) -> Result<Trace, TraceError> {
    let wrong = |what: String| TraceError::from(CacheError::Experts(what));
    if !(0.0..1.0).contains(&persistence) {
        return Err(wrong(format!("the persistence must be from 0 to below 1, not {persistence}")));
    }
    let mut logits = Vec::new();
    for (l, layer) in experts.layers().iter().enumerate() {
        let nearest = popularity.iter().min_by_key(|(at, _)| at.abs_diff(l as u32));
        let counts = nearest.map_or(&[][..], |(_, c)| c.as_slice());
        let sum: f64 = counts.iter().sum();
        if counts.len() != layer.experts || counts.iter().any(|&c| c < 0.0) || !(sum > 0.0 && sum.is_finite())
        {
            return Err(wrong(format!("no popularity of {} experts for layer {l}", layer.experts)));
        }
        let share = |&c: &f64| (c * layer.k as f64 / sum).clamp(1e-9, 0.9999);
        logits.push(counts.iter().map(|c| (-(-share(c)).ln_1p()).ln()).collect::<Vec<f64>>());
    }
    let mut random = SplitMix64(seed);
    let mut state: Vec<f64> = (0..experts.count()).map(|_| normal(&mut random)).collect();
    let fresh = (1.0 - persistence * persistence).sqrt();
    let mut trace = Trace::new(experts.clone(), true);
    let (mut chosen, mut ranked) = (Vec::new(), Vec::new());
    let mut order: Vec<(u16, f64)> = Vec::new();
    for _ in 0..tokens {
        chosen.clear();
        ranked.clear();
        for (l, layer) in experts.layers().iter().enumerate() {
            let ids = experts.ids(l);
            order.clear();
            for (expert, x) in state[ids.start as usize..ids.end as usize].iter_mut().enumerate() {
                *x = persistence * *x + fresh * normal(&mut random);
                let u = below(*x).clamp(1e-12, 1.0 - 1e-12);
                order.push((expert as u16, logits[l][expert] - (-u.ln()).ln()));
            }
            order.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            let max = order[0].1;
            let sum: f64 = order.iter().map(|o| (o.1 - max).exp()).sum();
            chosen.extend(order.iter().take(layer.k).map(|o| o.0));
            let scores = order.iter().take(Trace::ranks(experts, l));
            ranked.extend(scores.map(|o| (o.0, ((o.1 - max).exp() / sum) as f32)));
        }
        trace.push(&chosen, &ranked)?;
    }
    Ok(trace)
}

/// A sample of a standard normal distribution (Box and Muller, 1958).
fn normal(random: &mut SplitMix64) -> f64 {
    let radius = (-2.0 * (1.0 - random.unit()).ln()).sqrt();
    radius * (std::f64::consts::TAU * random.unit()).cos()
}

/// Share of a standard normal distribution below `x`, to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
fn below(x: f64) -> f64 {
    let y = x.abs() / std::f64::consts::SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * y);
    let factors = [1.061_405_429, -1.453_152_027, 1.421_413_741, -0.284_496_736, 0.254_829_592];
    let tail = factors.iter().fold(0.0, |sum, f| (sum + f) * t) * (-y * y).exp() / 2.0;
    if x < 0.0 { tail } else { 1.0 - tail }
}
