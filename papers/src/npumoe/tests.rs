//! Tests that the evaluation of NPUMoE keeps its results, and that the documentation has them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::fit::watts;
use super::page::page;
use super::paper::{CLAIMS, CONFIGS, GROUPS, Metric};
use super::reproduce::{Report, serial};
use super::{report, tables};
use crate::claim::printed;
use crate::shapes::{PHIMOE, PHIMOE_TINY, QWEN3};
use moec_costs::Constants;
use moec_costs::model::ModelLayer;
use moec_costs::units::Units;
use moec_device::Device;
use moec_simulate::System;
use moec_simulate::systems::{ANEMLL, COREML_CPU, COREML_NAIVE, OURS};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

static DEVICE: LazyLock<Device> = LazyLock::new(|| serial(Device::find("m2-ultra").unwrap()));
static REPORT: LazyLock<Report> = LazyLock::new(|| report(None).unwrap());

#[test]
fn model_sizes_match_the_paper() {
    // Table 1, in billions; embeddings and heads separately if they are.
    for (shape, billions) in [(PHIMOE, 42.6), (PHIMOE_TINY, 3.8), (QWEN3, 30.5)] {
        let model = shape.model();
        let experts = |l: &ModelLayer| l.experts.map_or(0, |m| m.count as u64 * m.size.weights);
        let all: u64 =
            model.layers.iter().map(|l| l.attention + l.router + experts(l)).sum::<u64>() + 2 * model.head;
        assert!((all as f64 * 1e-9 / billions - 1.0).abs() < 0.03, "{}: {all}", shape.name);
    }
    // §5.1: "each expert being 150MB in size".
    assert_eq!(2 * PHIMOE.expert(), 150 << 20);
}

#[test]
fn device_file_matches_the_paper_tables() {
    let units = Units::of(&DEVICE).unwrap();
    let [cpu, npu, memory] = watts().unwrap();
    let file =
        [&units.cpu.busy_w, &units.npu.busy_w, &DEVICE.memories[0].busy_w].map(|f| f.as_ref().unwrap().value);
    for (file, derived) in file.into_iter().zip([cpu, npu, memory]) {
        assert!((file - derived).abs() < 0.0051, "{file} {derived}");
    }
    let printed = printed(CLAIMS).unwrap();
    let ms = |group: usize, capacity: u32| printed[&format!("{group}x{capacity} serial, latency")].value();
    for (group, capacity) in GROUPS.into_iter().filter(|g| g.0 == 8) {
        let each =
            (ms(group, capacity) * 16.0 * f64::from(capacity) / 2.0 - units.npu.launch_us() * 1e-3) / 8.0;
        let entry = units.npu.matmul.iter().find(|m| m.rows == capacity).unwrap();
        assert!((entry.ms - each).abs() < 0.0051 && entry.weights == PHIMOE.expert(), "{entry:?} {each}");
    }
    // Cost of launching and waiting: the rest if both rows have the same time per expert.
    let left: Vec<f64> = [32_u32, 64, 128]
        .into_iter()
        .map(|c| {
            let (one, eight) = (ms(1, c) * f64::from(c), ms(8, c) * 8.0 * f64::from(c));
            one - (eight - one) / 7.0
        })
        .collect();
    let mean = left.iter().sum::<f64>() / 3.0;
    assert!((units.npu.launch_us() * 1e-3 - mean).abs() < 0.01, "{left:?}");
}

#[test]
fn our_system_is_best_and_all_ranges_hold() {
    let report = &*REPORT;
    for m in report.measured.iter().filter(|m| !m.config.ablation) {
        for metric in Metric::ALL {
            for system in [COREML_CPU, COREML_NAIVE, ANEMLL] {
                let ratio = m.ratio(metric, system.name, OURS.name).unwrap();
                // If no group pays for a launch, our placement equals ANEMLL's: small experts of Qwen3-MoE in
                // small chunks.
                let tie = m.config.name == "Qwen3-MoE 1024/256" && system.name == ANEMLL.name;
                let first = ratio > 1.0 || tie && ratio >= 1.0;
                assert!(first, "{} {} {}: {ratio}", m.config.name, metric.name(), system.name);
            }
            // Core ML (naive) takes the longest and the most energy of all; §5.5 orders CPU time otherwise.
            for other in [OURS, COREML_CPU, ANEMLL] {
                let ratio = m.ratio(metric, COREML_NAIVE.name, other.name).unwrap();
                assert!(ratio > 1.0 || metric == Metric::Cpu, "{} {}", m.config.name, other.name);
            }
        }
    }
    // §5.2: 1.32 to 5.55 times the latency, 1.81 to 7.37 times the energy, 1.78 to 5.54 times the CPU cycles.
    assert_eq!(report.outside(), []);
}

#[test]
fn every_technique_reduces_latency() {
    let ablation = REPORT.measured.iter().find(|m| m.config.ablation).unwrap();
    let ratio = |of: &str, to: &str| ablation.ratio(Metric::Latency, of, to).unwrap();
    for (worse, better) in [("ours-base", "ours-t"), ("ours-t", "ours-tg"), ("ours-tg", "ours")] {
        assert!(ratio(worse, better) > 1.0, "{worse} {better}");
    }
    // §5.8: 1.09 of the last step.
    assert!((ratio("ours-tg", "ours") / 1.09 - 1.0).abs() < 0.1);
    // The paper's 2.89 is between the ratios for the smallest and the largest shape that Ours-base can mean.
    assert!(ratio("ours-base", "ours") < 2.89 && ratio("ours-base-chunk", "ours") > 2.89);
}

/// Claims that differ from the paper, by name; after a change here, the README must change.
#[test]
fn claims_that_do_not_hold_match_the_snapshot() {
    let report = &*REPORT;
    let mut text = String::new();
    for o in report.reversed() {
        let _ = writeln!(text, "{} {}: {} before {}", o.config, o.metric.name(), o.less.0, o.more.0);
    }
    let _ = writeln!(text, "\nratios more than a third off:");
    for (r, c) in report.ratios().filter(|(_, c)| c.paper.error(c.ours).abs() > 1.0 / 3.0 && !c.used) {
        let _ = writeln!(
            text,
            "{} {}: {} / {}: {} not {:.2}",
            r.config,
            r.metric.name(),
            r.of,
            r.to,
            c.paper,
            c.ours
        );
    }
    insta::assert_snapshot!("claims_that_do_not_hold_match_the_snapshot", text);
    // Every printed figure was computed, and every ratio names existing systems and configurations.
    assert!(report.ratios().all(|(r, _)| CONFIGS.iter().any(|x| x.name == r.config)));
    assert!(report.ratios().all(|(r, _)| System::named(r.of).is_some() && System::named(r.to).is_some()));
    assert_eq!((report.claims.compared.len(), report.ratios().count()), (printed(CLAIMS).unwrap().len(), 67));
}

#[test]
fn figures_used_for_fitting_are_met_and_marked() {
    let report = &*REPORT;
    assert!(report.ratios().filter(|(_, c)| c.used).all(|(_, c)| c.paper.error(c.ours).abs() < 1e-6));
    assert_eq!(report.ratios().filter(|(_, c)| c.used).count(), 2);
    let c = report.constants;
    let each =
        |c: Constants| [c.copy_gb_per_s, c.attention_on_cpu, c.load_gb_per_s, c.load_on_cpu, c.hosting];
    for (found, used) in each(c).into_iter().zip(each(Constants::NPUMOE)) {
        assert!((found / used - 1.0).abs() < 1e-9, "moec's simulator is to use {c:?}");
    }
    for x in each(c) {
        assert!(x.is_finite() && x > 0.0, "{c:?}");
    }
    assert!(c.load_on_cpu < 1.0 && c.hosting < 1.0);
    for of in ["Gather, coreml-cpu", "Expert FFN, coreml-naive"] {
        let f = report.claims.find(of).unwrap();
        assert!(f.used && f.paper.error(f.ours).abs() < 1e-6, "{f:?}");
    }
}

#[test]
fn result_tables_match_the_snapshot() {
    insta::assert_snapshot!("tables", tables::text(&REPORT));
    let all = tables::value(&REPORT);
    assert_eq!(
        (all["configurations"].as_array().unwrap().len(), &all["outside"]),
        (9, &serde_json::json!([]))
    );
    let one = tables::value(&report(Some("m2-max")).unwrap());
    assert_eq!(one["configurations"].as_array().unwrap().len(), 1);
}

#[test]
fn npumoe_documentation_is_current() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let read = |name: &str| fs::read_to_string(root.join(name)).unwrap();
    let fresh = page(&REPORT);
    assert!(
        read("docs/npumoe.md").trim_end() == fresh.trim_end(),
        "docs/npumoe.md is stale\nhint: cargo xtask docs"
    );
}
