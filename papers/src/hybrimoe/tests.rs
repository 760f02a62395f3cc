//! Tests that the page's statements hold in a short run.

use super::claims::claims;
use super::machine::{A6000, PROMPT};
use super::models::{DEEPSEEK, MIXTRAL, MODELS, QWEN2};
use super::page::page;
use super::paper::{CACHED, PROMPTS};
use super::plots::plots;
use super::report::{Bench, Report, Size};
use super::routing::{CALIBRATION_DOMAIN, RUN_DOMAIN, expected, loads, trace};
use super::systems::{ABLATION, BASELINE, HYBRIMOE, KTRANSFORMERS, LLAMA_CPP, SYSTEMS, System};
use crate::claim::{Claims, check_page};
use crate::random::Random;
use crate::recorded::Recorded;
use std::sync::LazyLock;

static BENCH: LazyLock<Bench> = LazyLock::new(|| Bench::new(Size::QUICK).expect("a bench"));
static REPORT: LazyLock<Report> = LazyLock::new(|| Report::new(&BENCH).expect("a report"));
static CLAIMS: LazyLock<Claims> = LazyLock::new(|| claims(&REPORT).expect("claims"));

#[test]
fn hybrimoe_models_have_their_named_sizes() {
    let billions = |of: super::models::Model| {
        (of.layers as u64 * (of.experts as u64 * of.expert() + of.dense())) as f64 * 1e-9
    };
    // Without embeddings and, for DeepSeek, without the first layer.
    for (model, all) in [(MIXTRAL, 46.7), (QWEN2, 57.4), (DEEPSEEK, 15.7)] {
        let found = billions(model);
        assert!((0.94..1.0).contains(&(found / all)), "{}: {found}", model.name);
    }
}

#[test]
fn fitted_constants_reproduce_their_times() {
    let used: Vec<_> = CLAIMS.compared.iter().filter(|c| c.used).collect();
    // The schedule's two speedups are printed as seconds, too.
    assert_eq!(used.len(), 4 + 2 + MODELS.len());
    for c in used {
        assert!(c.paper.error(c.ours).abs() < 0.05, "{c:?}");
    }
}

#[test]
fn device_file_agrees_with_the_model_constants() {
    let device = moec_device::Device::find("a6000-xeon").expect("a device");
    assert!(device.links.iter().all(|l| (l.gb_per_s - A6000.link * 1e-9).abs() < 1e-9), "{:?}", device.links);
    let costs = A6000.costs(&QWEN2).expect("costs");
    let cpu = device.units.iter().find(|u| u.name == "cpu").expect("a CPU");
    for time in &cpu.matmul {
        let ours = costs.cpu.table.at(f64::from(time.rows)) * 1e-3;
        assert_eq!(time.weights, QWEN2.expert());
        assert!((time.ms / ours - 1.0).abs() < 0.01, "{time:?}: {ours}");
    }
}

#[test]
fn gate_predictions_have_the_configured_accuracy() {
    let trace = trace(&Recorded::every().expect("counts"), RUN_DOMAIN, &QWEN2, 200, 1).expect("a trace");
    for gate_accuracy in [0.0, 0.5, 1.0] {
        let mut random = Random::new(3);
        let (mut right, mut all) = (0, 0);
        for token in 0..200 {
            let [was, predicted] = [
                loads(&trace, token..token + 1, 4),
                expected(&trace, token..token + 1, 4, gate_accuracy, &mut random),
            ];
            assert_eq!(predicted.iter().sum::<u32>() as usize, QWEN2.k);
            right += was.iter().zip(&predicted).filter(|(a, b)| **a > 0 && **b > 0).count();
            all += QWEN2.k;
        }
        let share = right as f64 / all as f64;
        assert!((share - gate_accuracy).abs() < 0.05, "{gate_accuracy}: {share}");
    }
    assert_ne!(CALIBRATION_DOMAIN, RUN_DOMAIN);
}

#[test]
fn no_system_beats_the_model_without_experts() {
    for model in &MODELS {
        let dense = model.layers as f64 * A6000.before(model, 1) * 1e-6;
        for system in &SYSTEMS {
            let found = BENCH.decode(&A6000, model, system, 0.5).expect("an outcome");
            assert!(
                found.seconds > dense && found.busy.iter().all(|b| (0.0..=1.0 + 1e-9).contains(b)),
                "{found:?}"
            );
            assert_eq!(found, BENCH.decode(&A6000, model, system, 0.5).expect("an outcome"));
        }
    }
}

/// With all experts on the GPU, all systems are equal; with none, llama.cpp computes layers on the CPU.
#[test]
fn full_and_empty_gpu_cache_match_their_limits() {
    let of = |system: &System, cached| BENCH.decode(&A6000, &QWEN2, system, cached).expect("an outcome");
    let full: Vec<_> = SYSTEMS.iter().map(|s| of(s, 1.0)).collect();
    assert!(full.iter().all(|o| o.hits == 1.0 && (o.seconds - full[0].seconds).abs() < 1e-9), "{full:?}");
    let (llama, fixed) = (of(&LLAMA_CPP, 0.0), of(&KTRANSFORMERS, 0.0));
    assert!((llama.seconds - fixed.seconds).abs() < 1e-9 && llama.hits == 0.0 && llama.busy[0] == 0.0);
}

#[test]
fn more_cached_experts_are_faster() {
    for row in REPORT.prefill.iter().chain(&REPORT.decode) {
        let [baseline, hybrimoe, moec] = [0, 1, 2].map(|s| row.outcomes[BASELINE + s].seconds);
        assert!(hybrimoe < baseline && moec < baseline && moec < hybrimoe * 1.02, "{row:?}");
        let least = row.outcomes.iter().map(|o| o.seconds).fold(f64::INFINITY, f64::min);
        assert!(hybrimoe < least * 1.02, "{row:?}");
    }
    for model in 0..MODELS.len() {
        for pair in CACHED.windows(2) {
            assert!(REPORT.hit_rates(model, pair[0])[1] < REPORT.hit_rates(model, pair[1])[1]);
        }
    }
    assert!(REPORT.hits.iter().all(|h| h.rates[..3].iter().all(|r| *r <= h.rates[3])), "{:?}", REPORT.hits);
}

#[test]
fn hybrimoe_speedups_are_near_the_paper() {
    for c in CLAIMS.compared.iter().filter(|c| c.place == "Table III" && c.unit == "×") {
        // The gain of prefetching in decoding is the figure that the page reports as missed.
        let near = if c.of == "decoding/Baseline+Prefetching" { 1.3..1.6 } else { 0.87..1.15 };
        assert!(near.contains(&(c.ours / c.paper.value())), "{c:?}");
    }
    let decode = CLAIMS.find("decoding").expect("a claim");
    assert!(decode.paper.error(decode.ours).abs() < 0.15, "{decode:?}");
    // Better gates make it faster; useless gates are hardly slower than no prefetching.
    let gates: Vec<[f64; 2]> = REPORT.gate_accuracy.iter().map(|f| f.1).collect();
    let last = gates[gates.len() - 1];
    assert!(gates[0][0] > 0.95 && last[0] > gates[0][0] * 1.3 && last[1] > gates[0][1] * 1.1, "{gates:?}");
    assert_eq!(HYBRIMOE.name, SYSTEMS[BASELINE + 1].name);
    assert!(PROMPT <= PROMPTS[Size::QUICK.prompts - 1]);
}

#[test]
fn hybrimoe_page_lists_every_figure() {
    let page = page(&CLAIMS, &REPORT);
    check_page("hybrimoe", &page, &CLAIMS, &plots(&CLAIMS, &REPORT));
    for system in SYSTEMS.iter().chain(&ABLATION) {
        assert!(page.contains(system.name), "{}", system.name);
    }
}
