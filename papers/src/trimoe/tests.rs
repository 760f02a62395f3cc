//! Tests that the page's statements hold in a short run.

use super::bench;
use super::bench::Size;
use super::claims::{claims, steps};
use super::experiments::{ABLATION, Bench, CLOSEST_VARIANT, SYSTEMS, TimingMethod};
use super::loads::{DRIFT, Loads, Source, count};
use super::models::{DEEPSEEK, MODELS, QWEN};
use super::page::page;
use super::paper::{BATCH, BATCHES};
use super::plots::plots;
use super::report::{Report, robust};
use crate::claim::{Claim, Claims, check_page};
use std::sync::LazyLock;

static BENCH: LazyLock<Bench> = LazyLock::new(|| bench(Size::QUICK).expect("a bench"));
static REPORT: LazyLock<Report> = LazyLock::new(|| Report::new(&BENCH).expect("a report"));
static CLAIMS: LazyLock<Claims> = LazyLock::new(|| claims(&BENCH, &REPORT).expect("claims"));

fn mean(x: impl Iterator<Item = f64>) -> f64 {
    let all: Vec<f64> = x.collect();
    all.iter().sum::<f64>() / all.len() as f64
}

#[test]
fn drawn_loads_have_the_skew_of_the_paper() {
    let mut loads = Loads::new(&Source::Drawn(DRIFT), 4, QWEN.experts, QWEN.k, BATCH, 1);
    let (hot, warm) = count(QWEN.experts);
    for _ in 0..4 {
        for mut layer in loads.step() {
            let all: u32 = layer.iter().sum();
            assert_eq!(all as usize, BATCH * QWEN.k);
            assert!(layer.iter().all(|&l| l as usize <= BATCH));
            layer.sort_unstable_by(|a, b| b.cmp(a));
            let part = |of: &[u32]| f64::from(of.iter().sum::<u32>()) / f64::from(all);
            // §3.1: more than 70 % of the experts have 8 % of the tokens, 20 to 40 % up to 70 %.
            assert!((0.04..0.12).contains(&part(&layer[hot + warm..])), "{layer:?}");
            assert!((0.6..0.8).contains(&part(&layer[hot..hot + warm])), "{layer:?}");
        }
    }
}

#[test]
fn recorded_loads_match_the_recording() {
    let Source::Recorded(layers) = &BENCH.recorded else { panic!("recorded") };
    assert_eq!((layers.len(), layers[0].len(), layers[0][0].len()), (3, 6, 64));
    let mut loads = Loads::new(&BENCH.recorded, 3, DEEPSEEK.experts, DEEPSEEK.k, BATCH, 1);
    let expected = loads.mean(1);
    let mut sums = vec![0.0; DEEPSEEK.experts];
    for _ in 0..60 {
        let step = loads.step();
        assert!(step.iter().all(|l| l.iter().sum::<u32>() as usize == BATCH * DEEPSEEK.k));
        sums.iter_mut().zip(&step[1]).for_each(|(s, &l)| *s += f64::from(l) / 60.0);
    }
    // Hot experts are drawn slightly less than their share, since a token has no expert twice.
    let off = mean(sums.iter().zip(&expected).map(|(s, e)| (s - e).abs() / e));
    assert!(off < 0.15, "{off}");
}

#[test]
fn loads_and_times_are_reproducible() {
    let again = || {
        let mut loads = Loads::new(&Source::Drawn(DRIFT), 2, 16, 2, 32, 5);
        [loads.step(), loads.step()]
    };
    assert_eq!(again(), again());
    let setting = BENCH.setting(&QWEN, BATCH);
    let times = || BENCH.times(&setting, &SYSTEMS, TimingMethod::Simulation).expect("times");
    assert_eq!(times(), times());
}

#[test]
fn shape_derived_figures_match_the_paper() {
    for place in ["Table 2", "§3.1"] {
        assert!(CLAIMS.compared.iter().filter(|c| c.place == place).all(Claim::agrees), "{place}");
    }
    let of = |what: &str| CLAIMS.find(what).expect(what);
    assert!(of("predictor/memory").agrees());
    // The fitted constant reproduces its figure.
    let window = of("migration/window");
    assert!(window.used && window.paper.error(window.ours).abs() < 0.01, "{window:?}");
    assert!(of("migration/overhead").agrees());
}

#[test]
fn equations_underestimate_without_fetches() {
    for (of, model) in REPORT.errors.iter().zip(&MODELS) {
        let [.., trimoe, moec] = of;
        assert!(trimoe.0 < -0.1, "{}: {trimoe:?}", model.name);
        assert!(moec.1 < 0.1, "{}: {moec:?}", model.name);
    }
    for row in REPORT.speeds.iter().filter(|s| BATCHES.contains(&s.batch)) {
        assert!(row.us[4] < row.us[3], "{row:?}");
    }
}

#[test]
fn decode_is_faster_than_the_best_baseline() {
    let speedup = REPORT.speedup();
    let [trimoe, moec] = [0, 1].map(|s| mean(speedup.iter().map(|m| m[s])));
    assert!(trimoe > 1.2 && moec > 1.3 * trimoe, "{speedup:?}");
    // moec's schedule reaches the lower end of the paper's range.
    let printed = CLAIMS.find("decode/DeepSeek-V2").expect("a claim").paper;
    assert!(printed.error(moec).abs() < 0.15, "{moec}");
    // With two assumptions, the paper's own schedule gives the paper's numbers.
    let bare = REPORT.variant(CLOSEST_VARIANT);
    assert!(bare.iter().all(|m| printed.error(m[0]).abs() < 0.15), "{bare:?}");
    assert!(robust(&REPORT).iter().all(|r| r.1[1] > 1.0), "{:?}", robust(&REPORT));
    // With routing as even as OLMoE's, TriMoE's schedule is not faster; without fetches it is.
    for row in REPORT.speeds.iter().filter(|s| !s.drawn) {
        let best = row.us[..3].iter().copied().fold(f64::INFINITY, f64::min);
        assert!(best < row.us[3] && best > row.us[4], "{row:?}");
    }
}

#[test]
fn component_speedups_exceed_their_bounds() {
    let steps = steps(&REPORT);
    assert_eq!(steps.len(), ABLATION.len() - 1);
    let [cpu, refinement, relayout, plateaus, fetches, both] = steps[..] else { panic!("{steps:?}") };
    assert!(cpu > 1.2 && refinement > 1.05 && relayout > 0.97, "{steps:?}");
    assert!(plateaus > 0.97 && fetches > 1.1 && both >= fetches.max(plateaus) * 0.98, "{steps:?}");
    let flat = |curve: &[(f64, [f64; 2])], from: f64, to: f64| {
        let at = |x: f64| curve.iter().find(|p| p.0 == x).expect("a point").1;
        at(from).map(|us| us / at(to)[0])[0]
    };
    assert!(
        flat(&REPORT.dimms, 16.0, 32.0) < 1.2 && flat(&REPORT.dimms, 2.0, 16.0) > 1.5,
        "{:?}",
        REPORT.dimms
    );
    assert!(flat(&REPORT.cpu, 0.5, 1.0) < 1.1 && flat(&REPORT.cpu, 0.125, 1.0) > 1.2, "{:?}", REPORT.cpu);
    assert!(REPORT.no_gpu.iter().all(|[alone, _, moec]| alone > moec), "{:?}", REPORT.no_gpu);
    // More drift, less speedup.
    let (first, last) = (&REPORT.drifts[0], &REPORT.drifts[REPORT.drifts.len() - 1]);
    assert!(first.speedup[1] > last.speedup[1] && first.accuracy > last.accuracy, "{:?}", REPORT.drifts);
}

#[test]
fn trimoe_page_lists_every_figure() {
    let page = page(&CLAIMS, &BENCH, &REPORT);
    check_page("trimoe", &page, &CLAIMS, &plots(&CLAIMS, &REPORT));
    for system in SYSTEMS.iter().chain(&ABLATION) {
        assert!(page.contains(system.name), "{}", system.name);
    }
}
