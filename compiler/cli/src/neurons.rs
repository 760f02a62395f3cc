//! Neurons in a profile: zeros by layer, and how often neurons are active, the hottest first (PowerInfer-2,
//! Figure 2), in a terminal, as JSON and for the page; and how large gates after SiLU are.

use super::output;
use moec_base::human;
use moec_profile::{Gates, NeuronCounts, Profile};
use serde_json::{Value, json};

/// Slices of the neurons, from hot to cold, that a strip shows.
const SLICES: usize = 40;
/// Shades of a slice, by the frequency that it does not reach.
const SHADES: [(f64, char); 5] = [(0.02, '·'), (0.25, '░'), (0.5, '▒'), (0.75, '▓'), (f64::INFINITY, '█')];
/// Share of batches from which on a neuron counts as hot.
const HOT: f64 = 0.75;
/// Bounds of the frequencies by which neurons are counted.
const BOUNDS: [f64; 6] = [0.01, 0.1, 0.25, 0.5, 0.75, 0.9];

/// Shares of the gates after SiLU whose bounds are shown.
const INACTIVE: [f64; 6] = [0.1, 0.3, 0.5, 0.7, 0.9, 0.95];

/// Figures of a network's neurons at a level and a size of the batch.
pub(super) struct NeuronFigures {
    /// Layer.
    pub(super) layer: u32,
    /// Down matrix.
    weight: String,
    /// Magnitude above which a neuron is active; 0 for a gate with exact zeros.
    threshold: f32,
    /// Tokens of a batch.
    pub(super) batch: usize,
    /// Share of neurons that can be skipped.
    zeros: f64,
    /// Frequencies, the highest first.
    frequencies: Vec<f64>,
}

impl NeuronFigures {
    /// Mean frequencies of [`SLICES`] slices of the neurons, fewer where there are fewer neurons.
    pub(super) fn slices(&self) -> Vec<f64> {
        let n = self.frequencies.len();
        let slices = SLICES.min(n);
        let cut = |i: usize| i * n / slices.max(1);
        let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len().max(1) as f64;
        (0..slices).map(|i| mean(&self.frequencies[cut(i)..cut(i + 1)])).collect()
    }

    /// Share of the neurons that are not below a frequency.
    fn share(&self, frequency: f64) -> f64 {
        self.frequencies.partition_point(|&f| f >= frequency) as f64 / self.frequencies.len().max(1) as f64
    }
}

/// All counts, by network, level and batch.
pub(super) fn figures(profile: &Profile) -> Vec<NeuronFigures> {
    profile.neurons.iter().flat_map(|c| (0..c.levels.len()).flat_map(move |l| of_level(c, l))).collect()
}

fn of_level(counts: &NeuronCounts, level: usize) -> impl Iterator<Item = NeuronFigures> {
    (1..=counts.batches()).filter_map(move |batch| {
        Some(NeuronFigures {
            layer: counts.layer,
            weight: counts.weight.clone(),
            threshold: counts.levels[level].threshold,
            batch,
            zeros: counts.zeros(level, batch)?,
            frequencies: counts.frequencies(level, batch),
        })
    })
}

/// Number of counted neurons, for people.
pub(super) fn counted(profile: &Profile) -> String {
    let all: u64 = profile.neurons.iter().map(|c| c.experts() as u64 * u64::from(c.width)).sum();
    match profile.neurons.iter().map(NeuronCounts::batches).max() {
        None => {
            "none: the profile has an older version, or the model has too many neurons to count".to_owned()
        }
        Some(most) => {
            let exact =
                if profile.neurons.iter().all(NeuronCounts::is_exact) { "exact zeros" } else { "thresholds" };
            format!(
                "{} of {} networks, {exact}, in batches of 1 to {most}",
                human::count(all),
                profile.neurons.len()
            )
        }
    }
}

/// The table; empty where nothing was counted.
pub(super) fn table(profile: &Profile) -> String {
    let seen = figures(profile);
    if seen.is_empty() {
        return String::new();
    }
    let percent = |x: f64| format!("{:.1} %", x * 100.0);
    let shade = |f: f64| SHADES.iter().find(|(bound, _)| f < *bound).map_or(' ', |(_, c)| *c);
    let hot = format!("active in {} of batches", percent(HOT));
    let head = ["neurons of", "past", "batch", "skipped", hot.as_str(), "activity of neurons, hot → cold"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(seen.iter().map(|s| {
        let threshold = if s.threshold == 0.0 { "0".to_owned() } else { format!("{:.4}", s.threshold) };
        let strip = s.slices().into_iter().map(shade).collect();
        let (zeros, hot) = (percent(s.zeros), percent(s.share(HOT)));
        vec![s.weight.clone(), threshold, s.batch.to_string(), zeros, hot, strip]
    }));
    let shades: Vec<String> =
        SHADES.iter().filter(|s| s.0.is_finite()).map(|(b, c)| format!("{c} below {b}")).collect();
    format!("\n{}{}\n", output::table(&rows), shades.join(", "))
}

/// Quantiles of the gates after SiLU by layer: the thresholds for each share of `threshold` under
/// `[experts]`. Empty where there are no such gates.
pub(super) fn gates(profile: &Profile) -> String {
    let known: Vec<&Gates> = profile.gates.iter().filter(|g| g.counted() > 0).collect();
    if known.is_empty() {
        return String::new();
    }
    let head = INACTIVE.map(|s| format!("{:.0} % below", 100.0 * s));
    let mut rows: Vec<Vec<String>> =
        vec![std::iter::once("|silu(gate)| of".to_owned()).chain(head).collect()];
    rows.extend(known.iter().map(|g| -> Vec<String> {
        let bounds = INACTIVE.map(|s| format!("{:.4}", g.quantile(s)));
        std::iter::once(g.weight.clone()).chain(bounds).collect()
    }));
    format!("\n{}", output::table(&rows))
}

/// The same as JSON.
pub(super) fn gates_json(profile: &Profile) -> Value {
    let of = |g: &Gates| {
        let bounds = INACTIVE.map(|s| json!({"share": s, "below": g.quantile(s)}));
        json!({"layer": g.layer, "weight": g.weight, "counted": g.counted(), "quantiles": bounds})
    };
    profile.gates.iter().map(of).collect()
}

/// The counts as JSON, network by network.
pub(super) fn json(profile: &Profile) -> Value {
    let batch = |s: NeuronFigures| {
        let shares: Vec<f64> = BOUNDS.iter().map(|&b| s.share(b)).collect();
        json!({
            "batch": s.batch,
            "skipped": s.zeros,
            "share_active_in_at_least": BOUNDS.iter().zip(shares).map(|(b, s)| json!([b, s])).collect::<Vec<_>>(),
            "hot_to_cold": s.slices(),
        })
    };
    let network = |c: &NeuronCounts| {
        let levels = c.levels.iter().enumerate().map(|(i, l)| {
            json!({"threshold": l.threshold, "batches": of_level(c, i).map(batch).collect::<Vec<_>>()})
        });
        json!({
            "layer": c.layer,
            "weight": c.weight,
            "experts": c.experts(),
            "neurons_per_expert": c.width,
            "exact": c.is_exact(),
            "levels": levels.collect::<Vec<_>>(),
        })
    };
    profile.neurons.iter().map(network).collect()
}
