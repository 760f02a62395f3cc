//! Golden snapshots: every family through the pipeline, and the generated source. Tests of single passes are
//! in `golden/passes` (`filetests.rs`).
//!
//! The target is fixed, so snapshots do not depend on the machine. The text after `lower`, `rewrite` and
//! `barriers` is in `golden/snapshots`. `INSTA_UPDATE=always cargo xtask test passes` updates them; check the
//! difference.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking")]

use crate::support;

use moec_base::progress::Progress;
use moec_config::Config;
use moec_import::ImportOptions;
use moec_pipeline::{Compilation, Inputs, PIPELINE, Stops, When, find};
use moec_runtime::offload::disk::{Extent, ExtentTable, FileEntry};
use moec_targets::target;
use support::{FAMILIES, MIXTURES, Setup, checkpoint};

/// Passes whose whole output is a snapshot.
const WHOLE: [&str; 3] = ["lower", "rewrite", "barriers"];

fn settings() -> insta::Settings {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(support::root().join("golden/snapshots"));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings
}

/// Texts after each pass, and the final state of the compilation.
fn texts(family: &str, format: &str, visit: &mut dyn FnMut(&Compilation<'_>)) -> Vec<(&'static str, String)> {
    texts_with(family, format, "", visit)
}

/// Like [`texts`], with additions to `model.toml`.
fn texts_with(
    family: &str,
    format: &str,
    more: &str,
    visit: &mut dyn FnMut(&Compilation<'_>),
) -> Vec<(&'static str, String)> {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup { format, chunk: 8, batch: &[1], context: 32 };
    let toml = setup.write(&checkpoint(family), folder.path());
    std::fs::write(&toml, std::fs::read_to_string(&toml).unwrap() + more).unwrap();
    let config = Config::load(&toml).unwrap();
    let (checkpoint, spec) = moec_import::open(&config.model.source, &ImportOptions::default()).unwrap();
    let target = target("x86-64-v3").unwrap();
    PIPELINE
        .iter()
        .map(|pass| {
            let mut c = Compilation::new(Inputs::new(&config, &checkpoint, &spec, &target));
            let stops = Stops { stop_after: Some(pass.name), ..Stops::default() };
            c.run(stops, &Progress::silent(), &mut |_| {}).unwrap();
            visit(&c);
            (pass.name, c.text())
        })
        .collect()
}

#[test]
fn every_family_through_the_pipeline() {
    settings().bind(|| {
        for family in FAMILIES {
            let all = texts(family, "f32", &mut |_| {});
            let mut before = "";
            for (pass, text) in &all {
                let when = find(pass).unwrap().when;
                if !matches!(when, When::Always | When::NotAsLowered) {
                    assert_eq!(before, text.as_str(), "{family}: `{pass}` runs {}", when.words());
                }
                if WHOLE.contains(pass) {
                    insta::assert_snapshot!(format!("{family}@{pass}"), text);
                }
                before = text;
            }
        }
    });
}

#[test]
fn text_and_stored_forms_parse_back() {
    for family in FAMILIES {
        texts(family, "bf16", &mut |c| {
            let graph = moec_ir::text::parse_module(&c.module.to_string()).unwrap();
            assert!(graph == c.module, "{family}: the graph does not survive its text form");
            if let Ok(plan) = c.plan() {
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
            if let Some(plan) = c.plan().ok().filter(|p| p.entries[0].steps.iter().any(|s| !s.barrier)) {
                for file in moec_cpu::runner_source(plan, None).unwrap() {
                    insta::assert_snapshot!(format!("olmoe@{}", file.path.replace('/', "-")), file.text);
                }
            }
        });
    });
}

/// A memory budget with room for some of the experts.
const MEMORY: &str = "[memory]\nbudget = \"17 MiB\"\nthreads = 2\nprefetch = 2\n";

/// Every expert of every family is read in one piece, which is aligned and shared with no other expert.
#[test]
fn experts_have_extents() {
    for family in MIXTURES {
        texts_with(family, "q8", MEMORY, &mut |c| {
            let Ok(plan) = c.plan() else { return };
            let paging = plan.paging.as_ref().unwrap();
            let read: Vec<_> = paging.layers.iter().map(|l| l.experts as usize).collect();
            let routed: Vec<_> = plan.placement.experts.iter().map(|t| t.experts.len()).collect();
            assert_eq!(read, routed, "{family}");
            let (mut extents, mut end) = (Vec::new(), 0);
            for l in &paging.layers {
                let pair = [l.gate_up, l.down].map(|s| &plan.segments[s as usize]);
                for expert in 0..l.experts {
                    for segment in pair {
                        let offset = segment.matrix_offset(expert).unwrap();
                        let bytes = segment.matrix_bytes().unwrap();
                        assert!(offset >= end, "{family}: {} overlaps", segment.name);
                        end = offset + bytes;
                        extents.push(Extent { file: 0, offset, bytes, crc32c: None });
                    }
                }
            }
            let file = FileEntry {
                path: "experts.bin".into(),
                bytes: plan.files[1].bytes,
                cached: false,
                identity: None,
            };
            let count = extents.len() as u32;
            let table = ExtentTable::new(vec![file], extents).unwrap();
            for first in (0..count).step_by(2) {
                table.run(first, 2).unwrap();
            }
        });
    }
}
