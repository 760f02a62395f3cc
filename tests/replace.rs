//! Replacing bundles: nothing but bundles is changed. If a build is killed while it replaces a bundle, the
//! old or the new one is left, complete.
//!
//! Most cases replace a small bundle with the library's functions in a separate process, which takes
//! milliseconds. So every step and every system call can be the last. `MOEC_KILLS=200 cargo test -p moec
//! --test end_to_end killed_builds_leave_a_whole_bundle` kills as many real builds at random moments.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_bundle::manifest::{BUNDLE_VERSION, Manifest, entry};
use moec_bundle::partial::Partial;
use moec_bundle::{destination, swap};
use moec_testing::{ASSERTIONS, STRACE};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::{Setup, checkpoint, fails, moec, ok, tree};
use tempfile::TempDir;

/// Files of a small bundle.
const FILES: [&str; 6] = [
    "weights/dense.bin",
    "artifacts/kernels.o",
    "plan.bin",
    "plan.txt",
    "runner/src/main.rs",
    "runner/Cargo.toml",
];

/// The two ways to exchange names: at once, or by two renames.
const METHODS: [(&str, &str); 2] =
    [("at once", "MOEC_NO_SUCH_THING"), ("by two renames", "MOEC_RENAME_TWICE")];

/// Writes a small bundle, whose files all contain `mark`.
fn write(root: &Path, mark: &str) {
    let mut files = BTreeMap::new();
    for name in FILES {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("{mark} {name}")).unwrap();
        files.insert(name.to_owned(), entry(&path).unwrap());
    }
    let manifest = Manifest {
        bundle_version: BUNDLE_VERSION,
        moec_version: "0".into(),
        family: mark.into(),
        target: "native".into(),
        llvm: "0".into(),
        assembler: None,
        source_fingerprint: "0".into(),
        profile: None,
        files,
    };
    fs::write(root.join("manifest.json"), serde_json::to_string(&manifest).unwrap()).unwrap();
}

/// The mark of the bundle in `folder`, which must be complete; `None` if there is no bundle.
fn mark(folder: &Path) -> Option<String> {
    if folder.symlink_metadata().is_err() {
        return None;
    }
    let manifest = Manifest::read(folder).unwrap();
    manifest.check(folder, true).unwrap();
    assert_eq!(destination::unlisted_entries(folder, &manifest.listed()).unwrap(), [] as [&str; 0]);
    Some(manifest.family)
}

/// A folder with a bundle `b` that is replaced.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn bundle(&self) -> PathBuf {
        self.0.path().join("b")
    }

    /// A process that replaces the bundle by one with this mark.
    fn build(&self, mark: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "replace::replacing_child_process", "--ignored"]);
        command.env("REPLACE_PLACE", self.bundle()).env("REPLACE_MARK", mark);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// Other entries in the bundle's folder.
    fn left(&self) -> Vec<String> {
        let all = fs::read_dir(self.0.path()).unwrap();
        let names = all.map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut left: Vec<String> = names.filter(|n| n != "b").collect();
        left.sort();
        left
    }

    /// Checks that the next build succeeds and removes leftovers of earlier ones.
    fn next(&self, method: &str, what: &str) {
        ok(self.build("next").env(method, "1"));
        assert_eq!(mark(&self.bundle()).as_deref(), Some("next"), "{what}");
        assert_eq!(self.left(), [] as [&str; 0], "{what}: left behind");
    }
}

#[test]
#[ignore = "the other tests start it"]
fn replacing_child_process() {
    let Some(at) = std::env::var_os("REPLACE_PLACE") else { return };
    let partial = Partial::create(Path::new(&at)).unwrap();
    write(partial.path(), &std::env::var("REPLACE_MARK").unwrap());
    if std::env::var_os("REPLACE_STRANGER").is_some() {
        fs::write(Path::new(&at).join("thesis.txt"), "years of work").unwrap();
    }
    partial.commit().unwrap();
}

/// Reads the bundle after its build may have been killed.
fn read(place: &Place, method: &str) -> Option<String> {
    let at = place.bundle();
    if method == METHODS[1].1 && !at.exists() {
        assert!(
            moec_bundle::workspace::recover(&at).unwrap().is_some(),
            "nothing was put back: {:?}",
            place.left()
        );
    }
    mark(&at)
}

#[test]
fn replacement_survives_a_kill_after_any_step() {
    if !ASSERTIONS.met_or_skip() {
        return;
    }
    for (name, method) in METHODS {
        let mut survived = Vec::new();
        for step in swap::STEPS {
            let what = format!("{name}, killed after `{step}`");
            let place = Place::new();
            ok(&mut place.build("old"));
            let status = place.build("new").env(method, "1").env("MOEC_DIE_AFTER", step).status().unwrap();
            if status.success() {
                survived.push(step);
            }
            let found = read(&place, method);
            assert!(["old", "new"].contains(&found.as_deref().unwrap_or("nothing")), "{what}: {found:?}");
            let before = !status.success() && ["folder", "lock", "write", "sync", "take"].contains(&step);
            assert_eq!(found.as_deref() == Some("old"), before, "{what}: {found:?}");
            place.next(method, &what);

            // The same without an earlier bundle.
            let place = Place::new();
            let status = place.build("new").env(method, "1").env("MOEC_DIE_AFTER", step).status().unwrap();
            let found = mark(&place.bundle());
            assert!(!status.success() || found.is_some(), "{what}, where there was none: {found:?}");
            assert!(
                matches!(found.as_deref(), None | Some("new")),
                "{what}, where there was none: {found:?}"
            );
            place.next(method, &what);
        }
        let others: &[&str] = if name == METHODS[0].0 { &["take", "place"] } else { &["exchange"] };
        assert_eq!(survived, others, "{name}: not every step was reached");
    }
}

#[test]
fn replacement_survives_kills_at_random_moments() {
    for (name, method) in METHODS {
        let place = Place::new();
        ok(&mut place.build("old"));
        let start = Instant::now();
        ok(place.build("old").env(method, "1"));
        let whole = start.elapsed();
        let mut killed = 0;
        // Moments spread evenly over the run and a little past its end, by multiples of the golden ratio.
        for i in 0..100_u32 {
            let moment = whole.mul_f64(f64::from(i) * 0.618_033_988_75 % 1.0 * 1.2);
            let mut child = place.build("new").env(method, "1").spawn().unwrap();
            std::thread::sleep(moment);
            child.kill().unwrap();
            killed += u32::from(!child.wait().unwrap().success());
            let what = format!("{name}, killed after {moment:?}");
            let found = read(&place, method);
            assert!(["old", "new"].contains(&found.as_deref().unwrap_or("nothing")), "{what}: {found:?}");
            place.next(method, &what);
            ok(&mut place.build("old"));
        }
        assert!(killed > 20, "{name}: only {killed} of 100 were killed");
    }
}

#[test]
fn replacement_survives_a_kill_after_any_system_call() {
    if !STRACE.met_or_skip() {
        return;
    }
    let traced = |place: &Place, mark: &str, method: &str, what: &[&str]| {
        let build = place.build(mark);
        let mut command = Command::new("strace");
        command.args(["-f", "-o"]).arg(place.0.path().with_extension("log")).args(what);
        command.arg(build.get_program()).args(build.get_args());
        command.envs(build.get_envs().filter_map(|(k, v)| Some((k, v?)))).env(method, "1");
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    const CALLS: &str = "mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,fsync,flock";
    for (name, method) in METHODS {
        let place = Place::new();
        ok(&mut place.build("old"));
        ok(&mut traced(&place, "old", method, &["-e", &format!("trace=?{}", CALLS.replace(',', ",?"))]));
        let log = fs::read_to_string(place.0.path().with_extension("log")).unwrap();
        let mut killed = 0;
        for call in CALLS.split(',') {
            let times = log.lines().filter(|l| l.contains(&format!(" {call}("))).count();
            for nth in 1..=times {
                let inject = format!("inject={call}:signal=KILL:when={nth}");
                let status = traced(&place, "new", method, &["-e", &inject]).status().unwrap();
                killed += u32::from(!status.success());
                let what = format!("{name}, killed at `{call}` {nth}");
                let found = read(&place, method);
                assert!(["old", "new"].contains(&found.as_deref().unwrap_or("nothing")), "{what}: {found:?}");
                place.next(method, &what);
                ok(&mut place.build("old"));
            }
        }
        fs::remove_file(place.0.path().with_extension("log")).unwrap();
        assert!(killed > 20, "{name}: only {killed} calls were the last");
    }
}

/// Sets the flag when dropped, also during a panic.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A reader always finds a bundle, and after several concurrent builds the last one is complete.
#[test]
fn concurrent_builds_leave_one_whole_bundle() {
    for (name, method) in METHODS {
        let place = Place::new();
        ok(&mut place.build("old"));
        let stop = AtomicBool::new(false);
        let absent = std::thread::scope(|scope| {
            // The reader also ends if a round fails.
            let stops = Stops(&stop);
            let reader = scope.spawn(|| {
                let mut absent = 0;
                while !stop.load(Ordering::Relaxed) {
                    absent += u32::from(place.bundle().symlink_metadata().is_err());
                }
                absent
            });
            for round in 0..6 {
                let marks = [1, 2, 3].map(|i| format!("{round}.{i}"));
                let children: Vec<_> =
                    marks.iter().map(|m| place.build(m).env(method, "1").spawn().unwrap()).collect();
                for mut child in children {
                    assert!(child.wait().unwrap().success(), "{name}: a build failed beside others");
                }
                let found = mark(&place.bundle()).unwrap();
                assert!(marks.contains(&found), "{name}: {found} after {marks:?}");
                assert_eq!(place.left(), [] as [&str; 0], "{name}: left behind");
            }
            drop(stops);
            reader.join().unwrap()
        });
        if method == METHODS[0].1 && cfg!(target_os = "linux") {
            assert_eq!(absent, 0, "{name}: there was a moment without a bundle");
        }
    }
}

#[test]
fn process_ids_do_not_decide_cleanup() {
    if !ASSERTIONS.met_or_skip() {
        return;
    }
    // Leftovers of a dead build are removed, although its process id is in use again.
    let place = Place::new();
    assert!(!place.build("new").env("MOEC_DIE_AFTER", "write").status().unwrap().success());
    let [dead] = &place.left()[..] else { panic!("{:?}", place.left()) };
    let own = format!(".b.partial-{}", std::process::id());
    fs::rename(place.0.path().join(dead), place.0.path().join(&own)).unwrap();
    place.next(METHODS[0].1, "the id of a living process");

    // Files of a running build remain, although no process has its id.
    let living = Partial::create(&place.bundle()).unwrap();
    write(living.path(), "living");
    let other = place.0.path().join(".b.partial-99999999");
    fs::rename(place.0.path().join(&own), &other).unwrap();
    ok(&mut place.build("beside"));
    assert_eq!(mark(&other.join("bundle")).as_deref(), Some("living"));
    fs::rename(&other, place.0.path().join(&own)).unwrap();
    living.commit().unwrap();
    assert_eq!(mark(&place.bundle()).as_deref(), Some("living"));
    assert_eq!(place.left(), [] as [&str; 0]);
}

#[test]
fn leftovers_of_earlier_versions_are_removed() {
    let place = Place::new();
    let at = |name: &str| place.0.path().join(name);
    write(&at(".b.replaced-99999999"), "replaced");
    // The bundle itself is missing, since it was being replaced.
    assert!(moec_bundle::workspace::recover(&place.bundle()).unwrap().is_some());
    assert_eq!(mark(&place.bundle()).as_deref(), Some("replaced"));
    assert_eq!(place.left(), [] as [&str; 0]);

    write(&at(".b.replaced-99999999"), "replaced");
    fs::create_dir_all(at(".b.partial-99999999/weights")).unwrap();
    fs::write(at(".b.partial-99999999/weights/dense.bin"), "half").unwrap();
    fs::create_dir(at(".b.partial-99999998")).unwrap();
    place.next(METHODS[0].1, "what earlier versions left");

    let mine = [".b.partial-99999999", ".b.replaced-99999998", ".b.partial-mine", ".c.partial-99999999"];
    for name in mine {
        fs::create_dir(at(name)).unwrap();
        fs::write(at(name).join("thesis.txt"), "years of work").unwrap();
    }
    symlink(at(".c.partial-99999999"), at(".b.partial-99999997")).unwrap();
    ok(&mut place.build("next"));
    for name in mine {
        assert_eq!(fs::read(at(name).join("thesis.txt")).unwrap(), b"years of work", "{name}");
    }
    assert!(at(".b.partial-99999997").is_symlink());
}

#[test]
fn files_added_during_a_build_are_kept() {
    for (name, method) in METHODS {
        let place = Place::new();
        ok(&mut place.build("old"));
        let mut build = place.build("new");
        build.env(method, "1").env("REPLACE_STRANGER", "1");
        assert!(!build.status().unwrap().success(), "{name}");
        assert_eq!(fs::read(place.bundle().join("thesis.txt")).unwrap(), b"years of work", "{name}");
        assert_eq!(place.left(), [] as [&str; 0], "{name}");
        fs::remove_file(place.bundle().join("thesis.txt")).unwrap();
        assert_eq!(mark(&place.bundle()).as_deref(), Some("old"), "{name}");
    }
}

/// A tiny model, and a real build of it.
fn real(folder: &Path) -> impl Fn(&str) -> Command {
    let setup = Setup { format: "bf16", chunk: 16, batch: &[1], context: 64 };
    let toml = setup.write(&checkpoint("qwen3_moe"), folder);
    let folder = folder.to_owned();
    move |output| {
        let mut command = moec();
        command.arg("build").arg(&toml).args(["--no-run", "-o"]).arg(folder.join(output));
        command
    }
}

#[test]
fn a_folder_of_the_users_is_never_replaced() {
    let home = tempfile::tempdir().unwrap();
    let at = |name: &str| home.path().join(name);
    let build = real(home.path());
    ok(&mut build("bundle.moec"));
    let good = fs::read_to_string(at("bundle.moec/manifest.json")).unwrap();
    let later = good.replacen("\"bundle_version\": 1", "\"bundle_version\": 99", 1);
    let odd = good.replacen("\"family\"", "\"vendor\": \"x\", \"family\"", 1);
    let leaves = good.replacen("\"plan.bin\"", "\"../plan.bin\"", 1);
    let manifests: [(&str, &str); 6] = [
        ("{}", "not a manifest of moec"),
        ("", "not a manifest of moec"),
        ("{\"name\": \"an app\", \"version\": 1}", "not a manifest of moec"),
        (&later, "version 99"),
        (&odd, "vendor"),
        (&leaves, "../plan.bin"),
    ];
    for (manifest, word) in manifests {
        fs::create_dir_all(at("fm/src")).unwrap();
        fs::write(at("fm/manifest.json"), manifest).unwrap();
        fs::write(at("fm/src/thesis.txt"), "years of work").unwrap();
        let before = tree(&at("fm"));
        let (code, stderr) = fails(&mut build("fm"));
        assert_eq!(code, 2, "{stderr}");
        assert!(
            stderr.contains("fm` already exists and is not a moec bundle") && stderr.contains(word),
            "`{word}`: {stderr}"
        );
        assert!(stderr.contains("hint: "), "{stderr}");
        assert!(!stderr.contains("Reading"), "refused too late: {stderr}");
        assert!(tree(&at("fm")) == before);
        fs::remove_dir_all(at("fm")).unwrap();
    }

    // A bundle with an additional file.
    let before = tree(&at("bundle.moec"));
    let refused = |names: &[&str]| {
        let (code, stderr) = fails(&mut build("bundle.moec"));
        assert_eq!(code, 2, "{stderr}");
        for name in names {
            assert!(stderr.contains(&format!("`{name}`")), "`{name}` is not named: {stderr}");
        }
        assert!(stderr.contains("hint: ") && !stderr.contains("Reading"), "{stderr}");
    };
    fs::write(at("bundle.moec/weights/thesis.txt"), "years of work").unwrap();
    refused(&["weights/thesis.txt"]);
    fs::create_dir(at("bundle.moec/notes")).unwrap();
    symlink(home.path(), at("bundle.moec/home")).unwrap();
    refused(&["home", "notes", "weights/thesis.txt"]);
    assert_eq!(fs::read(at("bundle.moec/weights/thesis.txt")).unwrap(), b"years of work");
    fs::remove_file(at("bundle.moec/weights/thesis.txt")).unwrap();
    fs::remove_dir(at("bundle.moec/notes")).unwrap();
    fs::remove_file(at("bundle.moec/home")).unwrap();
    // A listed file that was replaced by a link.
    fs::rename(at("bundle.moec/plan.txt"), at("my plan.txt")).unwrap();
    symlink(at("my plan.txt"), at("bundle.moec/plan.txt")).unwrap();
    refused(&["plan.txt"]);
    fs::remove_file(at("bundle.moec/plan.txt")).unwrap();
    fs::rename(at("my plan.txt"), at("bundle.moec/plan.txt")).unwrap();

    // Links to bundles, with and without a slash after them.
    symlink(at("bundle.moec"), at("link.moec")).unwrap();
    for name in ["link.moec", "link.moec/"] {
        let (code, stderr) = fails(&mut build(name));
        assert!(code == 2 && stderr.contains("is a link"), "{stderr}");
    }
    assert!(at("link.moec").is_symlink());
    fs::write(at("file"), "mine").unwrap();
    let (code, stderr) = fails(&mut build("file"));
    assert!(code == 2 && stderr.contains("is not a folder"), "{stderr}");
    assert!(tree(&at("bundle.moec")) == before);

    // Permitted: a signature, a `run` that was built later. An empty folder counts as no bundle.
    fs::write(at("bundle.moec/manifest.json.minisig"), "signed").unwrap();
    fs::write(at("bundle.moec/run"), "built on a Mac").unwrap();
    fs::create_dir(at("empty.moec")).unwrap();
    for name in ["bundle.moec", "bundle.moec/", "empty.moec"] {
        ok(&mut build(name));
        assert!(tree(&home.path().join(name)) == before, "{name}");
    }
}

/// Real builds, killed at random moments and at the steps that exchange names: readers always find a complete
/// bundle.
#[test]
fn killed_builds_leave_a_whole_bundle() {
    let home = tempfile::tempdir().unwrap();
    let build = real(home.path());
    let at = home.path().join("b");
    ok(build("b").arg("-q"));
    let right = tree(&at);
    let whole = |what: &str| {
        // Readers also restore a bundle that a killed build has moved.
        ok(moec().args(["verify", "--static", "-q"]).arg(&at));
        assert!(tree(&at) == right, "{what}");
    };
    let next = |what: &str| {
        ok(build("b").arg("-q"));
        whole(what);
        let left: Vec<_> = fs::read_dir(home.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "{what} left something behind: {left:?}");
    };
    for (step, method) in [("sync", 0), ("exchange", 0), ("file", 0), ("take", 1), ("place", 1)] {
        if !ASSERTIONS.met_or_skip() {
            break;
        }
        let output =
            build("b").arg("-q").env(METHODS[method].1, "1").env("MOEC_DIE_AFTER", step).output().unwrap();
        assert!(!output.status.success(), "`{step}` was not reached");
        assert!(step != "take" || !at.exists());
        whole(step);
        next(step);
    }
    let kills: u32 = std::env::var("MOEC_KILLS").map_or(3, |n| n.parse().unwrap());
    let start = Instant::now();
    ok(build("b").arg("-q"));
    let time = start.elapsed();
    for i in 0..kills {
        let moment = time.mul_f64(f64::from(i + 1) * 0.618_033_988_75 % 1.0 * 1.1);
        let mut child = build("b").arg("-q").stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(moment.max(Duration::from_millis(1)));
        child.kill().unwrap();
        child.wait().unwrap();
        let what = format!("killed after {moment:?}");
        whole(&what);
        next(&what);
    }
}
