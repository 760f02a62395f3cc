//! Tests that the page's statements hold in a short run, and that figures without a run are on it as
//! computed.

use super::block::{Block, Group};
use super::claims::claims;
use super::decode::{Case, Size};
use super::dense::{Dense, bundle};
use super::in_memory::{InMemory, mapped};
use super::machine::{oneplus_12, oneplus_ace_2};
use super::models::{BAMBOO, MIXTRAL, MODELS, Model};
use super::planned::{planned, searched};
use super::plots::plots;
use super::report::Report;
use super::systems::{ABLATION, CPU_ONLY, DIVIDED, LLMFLASH, MATRIX, POWERINFER2, System};
use super::{details, page};
use crate::claim::check_page;
use moec_sim::neurons::{Order, Phases};
use std::sync::LazyLock;

static REPORT: LazyLock<Report> = LazyLock::new(|| Report::new(Size::QUICK).expect("a report"));

fn written() -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/powerinfer2.md");
    std::fs::read_to_string(page).expect("the page")
}

#[test]
fn neuron_bundles_match_the_paper() {
    let phone = oneplus_12().expect("a phone");
    let of = bundle(&BAMBOO, &phone.ufs.random).expect("a bundle");
    assert_eq!((of.stride(), of.gate().bytes, of.phases()), (8192, 4096, Phases::Two));
}

#[test]
fn each_optimization_helps_and_runs_are_reproducible() {
    let phone = oneplus_12().expect("a phone");
    let run = |system, hot| {
        let case = Case { phone: &phone, model: &BAMBOO, system, held: 0.5, hot, size: Size::QUICK, seed: 1 };
        case.run().expect("an outcome")
    };
    let speeds: Vec<f64> = ABLATION.iter().map(|&s| run(s, 0.3).speed()).collect();
    assert!(speeds.windows(2).all(|w| w[1] > 1.1 * w[0]), "{speeds:?}");
    assert_eq!(run(POWERINFER2, 0.3), run(POWERINFER2, 0.3));
    let (ours, others) = (run(POWERINFER2, 0.3), run(LLMFLASH, 0.0));
    assert!(ours.speed() > others.speed() && others.speed() > 1.0 / mapped(&phone, &BAMBOO, 0.5));
    assert!(ours.io_share() < 0.5 && others.io_share() > 0.5);
    for out in [ours, others] {
        let t = out.times;
        assert!((t.cpu + t.npu + t.both + t.exposed - t.all).abs() < 1e-9 * t.all, "{t:?}");
        assert!(t.exposed <= t.reading * 1.0001, "{t:?}");
    }
}

#[test]
fn divided_attention_is_a_variant_that_no_other_row_uses() {
    let phone = oneplus_12().expect("a phone");
    let dense = |system: System, batch| Dense {
        phone: &phone,
        model: &BAMBOO,
        memory: phone.memory,
        units: system.dense_units(),
        batch,
        part: 1.0,
    };
    for system in ABLATION.into_iter().chain([POWERINFER2, CPU_ONLY, LLMFLASH, MATRIX]) {
        assert!(!system.divides_attention, "{}", system.name);
        for work in [dense(system, 1.0).attention(), dense(system, 1.0).head()] {
            assert!(work.both == 0.0 && work.cpu.max(work.npu) == work.all, "{}: {work:?}", system.name);
        }
    }
    // One unit computes all of it: the NPU for one sequence, and the cores for four, which it takes one by one.
    let [one, four] = [1.0, 4.0].map(|batch| dense(POWERINFER2, batch).attention());
    assert!(one.npu == one.all && four.cpu == four.all, "{one:?} {four:?}");
    let divided = dense(DIVIDED, 1.0).attention();
    assert!(divided.both == divided.all && divided.all < one.all, "{divided:?} {one:?}");
    let named = REPORT.ablation.iter().filter(|(name, _)| *name == DIVIDED.name);
    assert_eq!(named.count(), 1);
}

#[test]
fn more_memory_is_never_slower() {
    let phone = oneplus_12().expect("a phone");
    let speed = |held| {
        let system = POWERINFER2;
        let case =
            Case { phone: &phone, model: &MIXTRAL, system, held, hot: 0.0, size: Size::QUICK, seed: 1 };
        case.run().expect("an outcome").speed()
    };
    let speeds = [0.02, 0.2, 0.5, 1.0].map(speed);
    assert!(speeds.windows(2).all(|w| w[1] >= 0.999 * w[0]), "{speeds:?}");
}

#[test]
fn larger_batches_have_more_hot_neurons() {
    for of in [|b: &super::report::Batch| b.planned, |b: &super::report::Batch| b.searched] {
        let shares: Vec<f64> = REPORT.batches.iter().map(of).collect();
        assert!(shares.windows(2).all(|w| w[0] < w[1]), "{shares:?}");
        assert!(shares[0] > 0.0 && shares[3] < 1.0, "{shares:?}");
    }
}

#[test]
fn planned_share_is_nearly_optimal() {
    for phone in [oneplus_12(), oneplus_ace_2()].map(|p| p.expect("a phone")) {
        for inner in [4096, 10240] {
            for active in [0.05, 0.27, 0.6] {
                for batch in 1..=4 {
                    let model = Model { inner, active, ..BAMBOO };
                    let (hot, _) = planned(&phone, &model, batch).expect("a share");
                    let (best, seconds) = searched(&phone, &model, batch).expect("a share");
                    let step = InMemory { phone: &phone, model: &model, npu: true, hot, batch };
                    let planned = step.run().expect("times").all;
                    assert!(
                        planned < 1.13 * seconds && planned >= seconds * 0.999_999,
                        "{} of {inner}, {active}, batch {batch}: {hot} for {best}, {planned} for {seconds}",
                        phone.name
                    );
                }
            }
        }
    }
}

#[test]
fn no_group_order_beats_the_combined_unit_rate() {
    let phone = oneplus_12().expect("a phone");
    let workers = phone.workers(None);
    let bytes = 1e6;
    let groups = vec![Group { stages: [bytes, 0.0, bytes, 0.0, bytes] }; 30];
    let block = Block { npu: 90e6, density: 1.0, groups };
    let times = block.run(&phone.memory, &workers, Some(Order::Cluster)).expect("times");
    assert!(times.all >= 180e6 / phone.memory.both, "{times:?}");
    assert!(times.all < 1.2 * 180e6 / phone.memory.both, "{times:?}");
}

#[test]
fn systems_rank_as_in_the_paper() {
    assert_eq!(REPORT.decode.len(), 2 * MODELS.len());
    for d in &REPORT.decode {
        assert!(d.powerinfer2.speed > d.llmflash.speed && d.llmflash.speed > d.llama, "{d:?}");
    }
    let [ours, llama, mlc, qnn] = REPORT.in_memory;
    assert!(ours > qnn && qnn > llama && llama > mlc);
    for p in REPORT.prefill.iter().filter(|p| p.tokens == 512) {
        let [ours, qnn, llama, ufs] = p.speeds;
        assert!(ours > qnn && qnn > llama && llama >= ufs, "{p:?}");
    }
    let [ours, qnn, llama] = REPORT.energy;
    assert!(ours < qnn && qnn < llama);
}

#[test]
fn results_without_a_run_are_on_the_page() {
    let written = written();
    let phone = oneplus_12().expect("a phone");
    let parts = [
        page::machine(&phone),
        page::fitted(),
        details::prefill(&REPORT),
        details::in_memory(&REPORT),
        details::shares(&REPORT),
        details::energy(&REPORT),
    ];
    for part in parts {
        assert!(written.contains(&part), "stale, `cargo xtask powerinfer2` writes it:\n{part}");
    }
}

#[test]
fn powerinfer2_page_lists_every_figure() {
    let phone = oneplus_12().expect("a phone");
    let claims = claims(&phone, &REPORT).expect("claims");
    check_page("powerinfer2", &written(), &claims, &plots(&claims, &REPORT));
}
