//! Two builds of the same input give the same bytes.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking")]

use crate::support;

use std::path::Path;
use support::{Setup, checkpoint, copy_checkpoint, moec, ok, tree};

/// Builds in `folder` with this cache.
fn build(folder: &Path, cache: &Path, more: &[&str]) -> Vec<(String, Vec<u8>)> {
    let source = folder.join("checkpoint");
    copy_checkpoint(&checkpoint("deepseek_v3"), &source);
    let toml = Setup { format: "bf16", chunk: 16, batch: &[1, 2], context: 64 }.write(&source, folder);
    let bundle = folder.join("model.moec");
    let mut build = moec();
    build.arg("build").arg(&toml).args(more).args(["--quiet", "-o"]).arg(&bundle).env("MOEC_CACHE", cache);
    ok(&mut build);
    tree(&bundle)
}

#[test]
fn bundles_are_equal_byte_for_byte() {
    let caches = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    equal(&[], caches.each_ref().map(tempfile::TempDir::path));
}

/// The caches are kept, since compiling the runtime takes minutes in each, once for every version of its
/// source.
#[test]
fn bundles_compiled_by_cargo_are_equal_byte_for_byte() {
    let usual = moec_base::cache_dir::path().unwrap();
    let another = Path::new(env!("CARGO_TARGET_TMPDIR")).join("another/cache");
    std::fs::create_dir_all(&another).unwrap();
    equal(&["--run-from-source"], [&usual, &another]);
}

fn equal(more: &[&str], caches: [&Path; 2]) {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // The second folder is nested deeper, and its cache is another one, so paths in the output would show.
    let deep = b.path().join("some/where/else");
    std::fs::create_dir_all(&deep).unwrap();
    let one = build(a.path(), caches[0], more);
    let two = build(&deep, caches[1], more);
    let names = |t: &[(String, Vec<u8>)]| t.iter().map(|(n, _)| n.clone()).collect::<Vec<_>>();
    assert_eq!(names(&one), names(&two));
    assert!(one.iter().any(|(n, _)| n == "run"), "the bundle has no `run`");
    for ((name, x), (_, y)) in one.iter().zip(&two) {
        assert!(x == y, "`{name}` differs between two builds");
        for path in [a.path(), caches[0]].map(Path::to_string_lossy) {
            assert!(
                !x.windows(path.len()).any(|w| w == path.as_bytes()),
                "`{name}` names a folder of the build"
            );
        }
    }
}
