//! Golden snapshots: every family after every pass, the plan, the generated source.
//!
//! The target is a fixed one, so that snapshots do not depend on the machine. After `lower`, `rewrite`
//! and `barriers` the whole text stands in `golden/snapshots`; after the passes between them, what the
//! pass changed. `INSTA_UPDATE=always cargo test --test passes` renews them; read the difference.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking")]

mod support;

use moec::build::target;
use moec::bundle::extents;
use moec::config::Config;
use moec::import::{self, ImportOptions};
use moec::pipeline::{Compilation, PIPELINE, Stops};
use moec::progress::Progress;
use moec_runtime::flash::{Extent, ExtentTable, FileEntry};
use similar::{ChangeTag, TextDiff};
use std::fmt::Write;
use support::{FAMILIES, Setup, checkpoint};

/// Passes that do nothing where shapes are dynamic; `placement.rs` looks at them.
const STATIC: [&str; 5] = ["tier", "group", "reside", "convolve", "offload"];

/// Passes whose whole result is kept.
const WHOLE: [&str; 3] = ["lower", "rewrite", "barriers"];

fn settings() -> insta::Settings {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(support::root().join("golden/snapshots"));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings
}

/// Texts after each pass, and the final state.
fn texts(family: &str, format: &str, visit: &mut dyn FnMut(&Compilation<'_>)) -> Vec<(&'static str, String)> {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup { format, chunk: 8, batch: &[1], context: 32 };
    let config = Config::load(&setup.write(&checkpoint(family), folder.path())).unwrap();
    let (checkpoint, spec) = import::open(&config.model.source, &ImportOptions::default()).unwrap();
    let target = target("x86-64-v3").unwrap();
    PIPELINE
        .iter()
        .map(|pass| {
            let mut c = Compilation::new(&config, &checkpoint, &spec, &target);
            let stops = Stops { print_after: None, stop_after: Some(pass.name) };
            c.run(stops, &Progress::silent(), &mut |_| {}).unwrap();
            visit(&c);
            (pass.name, c.text())
        })
        .collect()
}

/// Lines that differ, without context.
fn changes(before: &str, after: &str) -> String {
    let diff = TextDiff::from_lines(before, after);
    diff.iter_all_changes().fold(String::new(), |mut out, change| {
        match change.tag() {
            ChangeTag::Delete => write!(out, "- {change}").unwrap(),
            ChangeTag::Insert => write!(out, "+ {change}").unwrap(),
            ChangeTag::Equal => {}
        }
        out
    })
}

#[test]
fn every_family_after_every_pass() {
    settings().bind(|| {
        for family in FAMILIES {
            let all = texts(family, "f32", &mut |_| {});
            let mut before = "";
            for (pass, text) in &all {
                if STATIC.contains(pass) {
                    assert_eq!(before, text.as_str(), "{family}: `{pass}` is for static shapes");
                    continue;
                }
                let name = format!("{family}@{pass}");
                if WHOLE.contains(pass) {
                    insta::assert_snapshot!(name, text);
                } else if *pass != "layout" {
                    // From Graph to Plan everything changes; the plan is kept at its end.
                    insta::assert_snapshot!(name, changes(before, text));
                }
                before = text;
            }
        }
    });
}

#[test]
fn bf16_weights_are_left_as_they_are() {
    settings().bind(|| {
        let all = texts("olmoe", "bf16", &mut |_| {});
        for (pass, text) in &all[..3] {
            insta::assert_snapshot!(format!("olmoe-bf16@{pass}"), text);
        }
    });
}

#[test]
fn text_forms_parse_back() {
    for family in FAMILIES {
        texts(family, "bf16", &mut |c| {
            let graph = moec_ir::text::parse_module(&c.module.to_string()).unwrap();
            assert!(graph == c.module, "{family}: the graph does not survive its text form");
            if let Some(plan) = &c.plan {
                let parsed = moec_ir::text::parse_plan(&plan.to_string()).unwrap();
                assert!(parsed == *plan, "{family}: the plan does not survive its text form");
                let stored = moec_ir::plan::Plan::decode(&plan.encode().unwrap()).unwrap();
                assert!(stored == *plan, "{family}: the plan does not survive its stored form");
            }
        });
    }
}

#[test]
fn the_generated_source_is_readable() {
    settings().bind(|| {
        texts("olmoe", "f32", &mut |c| {
            if let Some(plan) = c.plan.as_ref().filter(|p| p.entries[0].steps.iter().any(|s| !s.barrier)) {
                for file in moec_cpu::runner_source(plan).unwrap() {
                    insta::assert_snapshot!(format!("olmoe@{}", file.path.replace('/', "-")), file.text);
                }
            }
        });
    });
}

/// Every expert of every family can be read in one piece: aligned, apart from the others, and whole.
#[test]
fn experts_have_extents() {
    let extent = |p: &extents::Part| Extent { file: 0, offset: p.offset, bytes: p.bytes, crc32c: 0 };
    for family in FAMILIES {
        texts(family, "q8", &mut |c| {
            let Ok(plan) = c.plan() else { return };
            let groups = extents::groups(plan).unwrap();
            let read: Vec<_> = groups.iter().map(|g| (g.table as usize, g.experts as usize)).collect();
            let routed: Vec<_> = plan.placement.experts.iter().map(|t| t.experts.len()).enumerate().collect();
            assert_eq!(read, routed, "{family}");
            assert!(groups.iter().all(|g| g.segments.len() == 2), "{family}: {groups:?}");
            let layout = extents::layout(&plan.segments, &groups, &|_, _| 0).unwrap();
            let parts: u64 = layout.parts.iter().map(|p| p.bytes).sum();
            let segments = groups.iter().flat_map(|g| &g.segments).map(|&s| &plan.segments[s as usize]);
            assert_eq!(parts, segments.map(|s| s.bytes).sum::<u64>(), "{family}");
            let file = FileEntry { path: "experts.bin".into(), bytes: layout.bytes };
            let table = ExtentTable::new(vec![file], layout.parts.iter().map(extent).collect()).unwrap();
            for first in (0..layout.parts.len() as u32).step_by(2) {
                table.run(first, 2).unwrap();
            }
        });
    }
}
