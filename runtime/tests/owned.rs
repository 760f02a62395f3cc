//! Weights in memory of our own give the same logits as mapped ones under all faults of reads. If they cannot
//! be loaded there is an error, and never a hang.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_runtime::offload::disk::{self, Choice, Read, ReadFault, Reader};
use moec_runtime::offload::paging::Wrap;
use moec_runtime::weights::owned::{LoadOptions, MovingStore, OwnedStore};
use moec_runtime::weights::store::{MappedStore, Store};
use moec_runtime::{CheckLevel, Engine, Error, Fault, LogitRows, Options, Program, Weights};
use moec_sim::disk::fault::{Faulty, Gate, Injected};
use moec_testing::PAGE_CACHE;
use sha2::{Digest, Sha256};
use std::fs::{self, OpenOptions};
use std::path::Path;
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// Offsets of head, experts and frequencies: each in a piece of its own, in another order than the steps'.
/// The file ends within a piece, and within a block.
const PLACES: [usize; 3] = [9 * MIB, 5 * MIB, MIB];
const BYTES: usize = 9 * MIB + 3000;
const PIECE: u64 = 4 << 20;
const HEAD: u64 = 2 * PIECE;
const EXPERTS: u64 = PIECE;

const CHECKS: [CheckLevel; 3] = [CheckLevel::Sizes, CheckLevel::Small, CheckLevel::All];

/// The file, with unread bytes between the segments.
fn file() -> Vec<u8> {
    let near = weights();
    let mut bytes: Vec<u8> = (0..BYTES).map(|i| (i * 31 / 7) as u8).collect();
    for (s, at) in plan(&ENTRIES).segments.iter().zip(PLACES) {
        let from = s.offset as usize;
        bytes[at..at + s.bytes as usize].copy_from_slice(&near[from..from + s.bytes as usize]);
    }
    bytes
}

/// A folder on this project's disk, which supports direct I/O.
fn bundle() -> tempfile::TempDir {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::create_dir_all(dir.path().join("weights")).unwrap();
    fs::write(dir.path().join("weights/model.bin"), file()).unwrap();
    dir
}

fn program() -> Program {
    let mut plan = plan(&ENTRIES);
    for (s, at) in plan.segments.iter_mut().zip(PLACES) {
        s.offset = at as u64;
    }
    (plan.files[0].bytes, plan.files[0].sha256) = (BYTES as u64, Sha256::digest(file()).into());
    Program::new(plan, &resolve).unwrap()
}

/// Reads past the page cache by `reader`, wrapped by `wrap`.
fn load_options(reader: Choice, wrap: Option<Wrap>) -> LoadOptions {
    let usual = LoadOptions::from_env().unwrap();
    LoadOptions { disk: disk::Options { reader, time_limit: Duration::from_secs(5), ..usual.disk }, wrap }
}

/// A wrapper of readers that injects the fault of `plan` into every read. Lives as long as the process.
fn faults(gate: &Gate, plan: impl Fn(&Read) -> Injected + Send + Sync + Clone + 'static) -> Wrap {
    let gate = gate.clone();
    Wrap(Box::leak(Box::new(move |inner: Box<dyn Reader>| -> Box<dyn Reader> {
        Box::new(Faulty::new(inner, gate.clone(), plan.clone()))
    })))
}

fn engine<'p>(
    p: &'p Program,
    dir: &Path,
    check: CheckLevel,
    options: &LoadOptions,
    threads: usize,
) -> moec_runtime::Result<Engine<'p>> {
    let store = OwnedStore::open(p, dir, check, options)?;
    Engine::with_store(p, Box::new(store), Options { threads: Some(threads), ..Options::default() })
}

const IDS: [u32; 9] = [1, 20, 3, 44, 5, 66, 7, 88, 9];

/// Checks the logits of a prompt and of two more tokens.
fn is_right(engine: &mut Engine<'_>) {
    let mut seen = 0;
    engine
        .prefill(0, 0, &IDS[..7], LogitRows::All, &mut |pos, logits| {
            assert_eq!(logits, reference(&IDS[..=pos]), "position {pos}");
            seen += 1;
            Ok(())
        })
        .unwrap();
    for at in 7..9 {
        engine
            .decode(&[(0, at, IDS[at])], &mut |_, logits| {
                assert_eq!(logits, reference(&IDS[..=at]), "position {at}");
                seen += 1;
                Ok(())
            })
            .unwrap();
    }
    assert_eq!(seen, 9);
}

fn prefill(engine: &mut Engine<'_>, logit_rows: LogitRows) -> moec_runtime::Result<()> {
    engine.prefill(0, 0, &IDS, logit_rows, &mut |pos, logits| {
        assert_eq!(logits, reference(&IDS[..=pos]));
        Ok(())
    })
}

/// Drops the file from the page cache.
fn forget(path: &Path) {
    use std::os::fd::AsRawFd as _;
    let file = fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    #[cfg(target_os = "linux")]
    // SAFETY: a hint on a descriptor that is open.
    unsafe {
        libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED);
    }
    let _ = file.as_raw_fd();
}

#[test]
fn owned_weights_give_the_logits_of_mapped_weights() {
    let dir = bundle();
    let p = &program();
    let mapped = MappedStore::open(p, dir.path(), CheckLevel::All).unwrap();
    is_right(&mut Engine::with_store(p, Box::new(mapped), Options::default()).unwrap());
    for (reader, direct) in [(Choice::Auto, true), (Choice::Threads, true), (Choice::Threads, false)] {
        for check in CHECKS {
            for (cached, threads) in [(true, 1), (false, 2), (false, 5)] {
                if !cached {
                    forget(&dir.path().join("weights/model.bin"));
                }
                let usual = load_options(reader, None);
                let options = LoadOptions { disk: disk::Options { direct, ..usual.disk }, ..usual };
                let mut engine = engine(p, dir.path(), check, &options, threads).unwrap();
                is_right(&mut engine);
                let held = engine.weights();
                assert!(held.own && held.bytes >= BYTES as u64 && held.took.is_some(), "{held:?}");
                assert_eq!(engine.memory().weights, ((V + E + 2) * 4) as u64);
            }
        }
    }
}

#[test]
fn owned_segments_equal_the_file_bytes() {
    let dir = bundle();
    let bytes = file();
    let p = &program();
    let store =
        OwnedStore::open(p, dir.path(), CheckLevel::Sizes, &load_options(Choice::Auto, None)).unwrap();
    store.load_progress().unwrap().wait_all().unwrap();
    for (i, s) in (0..).zip(&p.segments) {
        let at = store.segment(i).unwrap().ptr();
        assert_eq!(at.addr() % 64, 0);
        // SAFETY: all pieces are loaded, and a segment has this number of bytes.
        let found = unsafe { std::slice::from_raw_parts(at, s.bytes as usize) };
        assert_eq!(found, &bytes[s.offset as usize..][..s.bytes as usize], "segment {i}");
        // SAFETY: the table has an address for the segment's one matrix.
        assert_eq!(unsafe { store.matrices(i).unwrap().of::<*mut u8>().read() }, at);
    }
    assert!(store.segment(3).is_none() && store.matrices(3).is_none());
    // In the order of the steps: frequencies, experts, head.
    assert_eq!([0, 1, 2].map(|i| store.load_progress().unwrap().needs(i)), [3, 2, 1]);
}

#[test]
fn step_waits_only_for_its_own_weights() {
    let dir = bundle();
    forget(&dir.path().join("weights/model.bin"));
    let gate = Gate::default();
    let wrap = faults(&gate, |r| if r.offset >= HEAD { Injected::Stall } else { Injected::Nothing });
    let p = &program();
    let mut engine =
        engine(p, dir.path(), CheckLevel::Sizes, &load_options(Choice::Auto, Some(wrap)), 3).unwrap();
    // Without logits no step needs the head.
    prefill(&mut engine, LogitRows::None).unwrap();
    assert!(engine.weights().took.is_none());
    std::thread::scope(|scope| {
        let (done, ended) = mpsc::channel();
        scope.spawn(move || {
            is_right(&mut engine);
            done.send(()).unwrap();
        });
        assert!(ended.recv_timeout(Duration::from_millis(300)).is_err(), "it did not wait");
        gate.open();
        ended.recv_timeout(Duration::from_secs(20)).unwrap();
    });
}

#[test]
fn failed_weight_read_is_the_waiting_calls_error() {
    let dir = bundle();
    for (reader, injected) in [
        (Choice::Auto, Injected::Error(libc::EIO)),
        (Choice::Threads, Injected::Error(libc::EIO)),
        (Choice::Auto, Injected::End),
        (Choice::Auto, Injected::Break),
    ] {
        let wrap = faults(&Gate::default(), move |r| {
            if r.offset >= EXPERTS && r.offset < HEAD { injected } else { Injected::Nothing }
        });
        let p = &program();
        let mut engine =
            engine(p, dir.path(), CheckLevel::Sizes, &load_options(reader, Some(wrap)), 3).unwrap();
        // A later caller gets the same error.
        for logit_rows in [LogitRows::None, LogitRows::Last, LogitRows::None] {
            let error = prefill(&mut engine, logit_rows).unwrap_err();
            assert!(matches!(&error, Error::Read(_)), "{error}");
            assert_eq!(error.fault(), Fault::Host);
            assert!(error.to_string().contains("model.bin") && error.hint().is_some(), "{error}");
            assert_eq!(engine.len(0), 0);
        }
        let rows = [moec_runtime::Row { slot: 0, pos: 0, id: 1 }];
        assert!(matches!(engine.time_steps(0, &rows, &[0], 1), Err(Error::Read(_))));
    }
}

#[test]
fn stalled_weight_read_times_out() {
    let dir = bundle();
    let wrap =
        faults(&Gate::default(), |r| if r.offset >= HEAD { Injected::Stall } else { Injected::Nothing });
    let p = &program();
    let usual = load_options(Choice::Threads, Some(wrap));
    let time_limit = Duration::from_millis(200);
    let options = LoadOptions { disk: disk::Options { time_limit, ..usual.disk }, ..usual };
    let mut engine = engine(p, dir.path(), CheckLevel::Sizes, &options, 2).unwrap();
    let error = prefill(&mut engine, LogitRows::Last).unwrap_err();
    assert!(matches!(&error, Error::Read(e) if matches!(e.fault, ReadFault::Stalled { .. })), "{error}");
}

#[test]
fn transient_faults_do_not_change_results() {
    let dir = bundle();
    for seed in 0..6_u64 {
        forget(&dir.path().join("weights/model.bin"));
        let wrap = faults(&Gate::default(), move |r| {
            // A repeated read has another token.
            match (r.token >> 32).wrapping_mul(2_654_435_761).wrapping_add(seed) % 7 {
                0 => Injected::Short((r.bytes / 2).min(12_345)),
                1 => Injected::Error(libc::EINTR),
                2 => Injected::Error(libc::EAGAIN),
                3 => Injected::Twice,
                4 => Injected::End,
                _ => Injected::Nothing,
            }
        });
        let check = CHECKS[seed as usize % 3];
        let p = &program();
        let usual = load_options(Choice::Auto, Some(wrap));
        let options = LoadOptions { disk: disk::Options { retries: 1000, ..usual.disk }, ..usual };
        is_right(&mut engine(p, dir.path(), check, &options, 2).unwrap());
    }
}

#[test]
fn weight_file_of_wrong_size_is_rejected() {
    let dir = bundle();
    let path = dir.path().join("weights/model.bin");
    let p = &program();
    let open = || OwnedStore::open(p, dir.path(), CheckLevel::Sizes, &load_options(Choice::Auto, None)).err();
    for bytes in [0, 100, BYTES as u64 - 1, BYTES as u64 + 1] {
        OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes).unwrap();
        assert!(
            matches!(open(), Some(Error::BadFile { what, .. }) if what.starts_with(&format!("has {bytes} bytes")))
        );
    }
    fs::remove_file(&path).unwrap();
    assert!(matches!(open(), Some(Error::MissingFile(_))));
}

#[test]
fn file_truncated_during_loading_is_named() {
    let dir = bundle();
    let path = dir.path().join("weights/model.bin");
    forget(&path);
    let gate = Gate::default();
    let wrap = faults(&gate, |r| if r.offset >= HEAD { Injected::Stall } else { Injected::Nothing });
    let p = &program();
    let mut engine =
        engine(p, dir.path(), CheckLevel::Sizes, &load_options(Choice::Auto, Some(wrap)), 2).unwrap();
    prefill(&mut engine, LogitRows::None).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(HEAD + 5000).unwrap();
    gate.open();
    let error = prefill(&mut engine, LogitRows::Last).unwrap_err();
    assert!(error.to_string().contains("was shortened to 8393608 bytes"), "{error}");
    assert_eq!(error.fault(), Fault::Bundle);
}

#[test]
fn weight_file_with_wrong_hash_is_never_used() {
    let dir = bundle();
    let path = dir.path().join("weights/model.bin");
    let mut bytes = file();
    // Bytes of the head, and between segments.
    for at in [PLACES[0] + 1, 3 * MIB, BYTES - 1] {
        bytes[at] ^= 1;
        fs::write(&path, &bytes).unwrap();
        bytes[at] ^= 1;
        for check in [CheckLevel::Small, CheckLevel::All] {
            let p = &program();
            let mut engine = engine(p, dir.path(), check, &load_options(Choice::Auto, None), 2).unwrap();
            let error = prefill(&mut engine, LogitRows::None).unwrap_err();
            assert!(
                matches!(&error, Error::BadFile { path, what, .. } if path.ends_with("model.bin") && what.contains("changed")),
                "{error}"
            );
        }
    }
    let p = &program();
    // The changed byte was the last one, which no segment has and no read requested.
    is_right(&mut engine(p, dir.path(), CheckLevel::Sizes, &load_options(Choice::Auto, None), 2).unwrap());
}

#[test]
fn dropping_the_store_ends_its_loading() {
    let dir = bundle();
    for (check, stall) in CHECKS.into_iter().flat_map(|c| [(c, false), (c, true)]) {
        forget(&dir.path().join("weights/model.bin"));
        let wrap = faults(&Gate::default(), move |_| if stall { Injected::Stall } else { Injected::Nothing });
        let p = &program();
        let store =
            OwnedStore::open(p, dir.path(), check, &load_options(Choice::Threads, Some(wrap))).unwrap();
        let start = Instant::now();
        drop(store);
        // Reads that do not end are waited for at most a second.
        assert!(start.elapsed() < Duration::from_secs(if stall { 4 } else { 2 }), "{check:?}");
    }
}

#[test]
fn engine_reports_the_location_of_its_weights() {
    let dir = bundle();
    let p = &program();
    for (weights, lazy, own) in [
        (Weights::Ram, false, Some(true)),
        (Weights::Mmap, false, Some(false)),
        (Weights::Auto, true, Some(false)),
        // That depends on the machine.
        (Weights::Auto, false, None),
    ] {
        let options = Options { threads: Some(2), weights, lazy, ..Options::default() };
        let mut engine = Engine::open(p, dir.path(), options).unwrap();
        is_right(&mut engine);
        let held = engine.weights();
        assert!(own.is_none_or(|own| held.own == own), "{weights:?}: {held:?}");
        assert!(!held.why.is_empty() && (held.bytes > 0) == held.own && held.reader.is_some() == held.own);
    }
}

/// The first prompt uses weights in the page cache; later calls use memory of our own.
#[test]
fn weights_move_to_ram_after_the_first_prompt() {
    let dir = bundle();
    let p = &program();
    for settled in [true, false] {
        let options = Options { threads: Some(2), ..Options::default() };
        let mut engine = Engine::open(p, dir.path(), options).unwrap();
        let first = engine.weights();
        is_right(&mut engine);
        if !PAGE_CACHE.holds_or_skip(!first.own && first.why.contains("page cache")) {
            return;
        }
        let start = Instant::now();
        if settled {
            engine.settle().unwrap();
        }
        while !engine.weights().own {
            assert!(start.elapsed() < Duration::from_secs(20) && !settled, "{:?}", engine.weights());
            is_right(&mut engine);
        }
        // The file is no longer needed.
        is_right(&mut engine);
        assert!(!engine.weights().why.is_empty() && engine.weights().bytes >= BYTES as u64);
    }
}

/// Weights that were read past the page cache are left in it, so that the next start need not wait.
#[test]
fn second_start_reuses_weights_in_the_page_cache() {
    let dir = bundle();
    let p = &program();
    forget(&dir.path().join("weights/model.bin"));
    let options = Options { threads: Some(2), ..Options::default() };
    let open = || Engine::open(p, dir.path(), options).unwrap();
    let mut first = open();
    is_right(&mut first);
    if !PAGE_CACHE.holds_or_skip(first.weights().own) {
        return;
    }
    let start = Instant::now();
    while !open().weights().why.contains("page cache") {
        assert!(start.elapsed() < Duration::from_mins(1), "{:?}", open().weights());
        std::thread::sleep(Duration::from_millis(20));
    }
    is_right(&mut first);
}

/// Warnings of engines to the user in this process.
static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// An engine whose weights are mapped, and copied after the first prompt.
fn moving<'p>(p: &'p Program, dir: &Path, options: &LoadOptions) -> Engine<'p> {
    let store = MovingStore::open(p, dir, CheckLevel::Small, options).unwrap();
    let warn: fn(&str) = |text| WARNINGS.lock().unwrap().push(text.to_owned());
    let options = Options { threads: Some(2), warn: Some(warn), ..Options::default() };
    Engine::with_store(p, Box::new(store), options).unwrap()
}

#[test]
fn weights_that_cannot_be_copied_stay_mapped_and_warn_once() {
    let dir = bundle();
    let p = &program();
    for injected in [Injected::Error(libc::EIO), Injected::Stall] {
        WARNINGS.lock().unwrap().clear();
        let wrap =
            faults(&Gate::default(), move |r| if r.offset >= HEAD { injected } else { Injected::Nothing });
        let usual = load_options(Choice::Threads, Some(wrap));
        let time_limit = Duration::from_millis(200);
        let options = LoadOptions { disk: disk::Options { time_limit, ..usual.disk }, ..usual };
        let mut engine = moving(p, dir.path(), &options);
        is_right(&mut engine);
        engine.settle().unwrap();
        for _ in 0..3 {
            is_right(&mut engine);
        }
        let held = engine.weights();
        assert!(!held.own && held.why.contains("stay mapped"), "{held:?}");
        let warnings = WARNINGS.lock().unwrap();
        assert!(warnings.len() == 1 && warnings[0].contains("model.bin"), "{warnings:?}");
    }
}

#[test]
fn replaced_weight_file_is_not_used() {
    let dir = bundle();
    let p = &program();
    let mut engine = moving(p, dir.path(), &load_options(Choice::Threads, None));
    let other = dir.path().join("other");
    fs::write(&other, vec![1; BYTES]).unwrap();
    fs::rename(&other, dir.path().join("weights/model.bin")).unwrap();
    is_right(&mut engine);
    engine.settle().unwrap();
    is_right(&mut engine);
    let held = engine.weights();
    assert!(!held.own && held.why.contains("was replaced by another file"), "{held:?}");
}
