//! Files that are truncated while they are mapped. Each case ends its process, so it has a process of its
//! own.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "what fails here fails the test")]

use memmap2::Mmap;
use moec_runtime::platform::mapped::{MappedFile, Unfinished};
use std::fs::{self, OpenOptions};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Output};

/// Variable with the case of a process, and its file.
const CASE: &str = "MOEC_CUT_CASE";
const BYTES: usize = 1 << 20;

fn cut(path: &Path, to: u64) {
    OpenOptions::new().write(true).open(path).unwrap().set_len(to).unwrap();
}

/// Recurses until the stack overflows.
fn deep(n: u64) -> u64 {
    let held = std::hint::black_box([n; 512]);
    if n == u64::MAX { 0 } else { deep(n + 1) + held[(n % 512) as usize] }
}

/// Executes a case in the process that [`run`] starts.
#[test]
#[ignore = "the other tests start it"]
fn case() {
    let Ok(case) = std::env::var(CASE) else { return };
    let (what, path) = case.split_once('@').unwrap();
    let path = Path::new(path);
    let file = MappedFile::open(path).unwrap();
    let read =
        |bytes: &[u8]| std::hint::black_box(bytes.iter().step_by(4096).map(|&b| u64::from(b)).sum::<u64>());
    assert!(file.is_watched());
    let hidden = path.with_file_name(".out.partial");
    fs::write(&hidden, "half").unwrap();
    let _unfinished = Unfinished::new(&hidden);
    match what {
        "cut" => {
            cut(path, 4096);
            assert_eq!(read(&file[..4096]), 7);
            read(&file);
        }
        "cut on another thread" => {
            read(&file);
            cut(path, 0);
            drop(std::thread::scope(|s| s.spawn(|| read(&file)).join()));
        }
        "another mapping" => {
            let other = path.with_extension("other");
            fs::copy(path, &other).unwrap();
            // SAFETY: plain bytes are read; the case tests a file that shrinks.
            let map = unsafe { Mmap::map(&fs::File::open(&other).unwrap()).unwrap() };
            cut(&other, 0);
            read(&map);
        }
        "no longer mapped" => {
            let other = path.with_extension("other");
            fs::copy(path, &other).unwrap();
            drop(MappedFile::open(&other).unwrap());
            // The operating system returns the same addresses again. SAFETY: bytes are bytes.
            let map = unsafe { Mmap::map(&fs::File::open(&other).unwrap()).unwrap() };
            cut(&other, 0);
            read(&map);
        }
        "a write" => {
            // SAFETY: none: this is a bug on purpose, which must not be reported as a fault of the file.
            unsafe { file.as_ptr().cast_mut().write_volatile(1) };
        }
        "stack" => drop(std::hint::black_box(deep(0))),
        _ => panic!("{what}"),
    }
}

fn run(what: &str) -> (Output, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights.bin");
    fs::write(&path, vec![7; BYTES]).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["case", "--exact", "--ignored", "--nocapture"])
        .env(CASE, format!("{what}@{}", path.display()));
    let output = command.output().unwrap();
    let stays = dir.path().join(".out.partial").exists();
    assert_eq!(stays, !what.starts_with("cut"), "{what}: what is half written goes with a file that was cut");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, message)
}

#[test]
fn truncated_mapped_file_is_named_and_ends_the_process() {
    for what in ["cut", "cut on another thread"] {
        let (output, message) = run(what);
        assert_eq!(output.status.code(), Some(1), "{what}: {message}");
        assert!(
            message.contains("weights.bin` was changed or cut while it was in use\nhint: "),
            "{what}: {message}"
        );
    }
}

#[test]
fn unrelated_faults_keep_their_signal() {
    for (what, signal) in
        [("another mapping", libc::SIGBUS), ("no longer mapped", libc::SIGBUS), ("a write", libc::SIGSEGV)]
    {
        let (output, message) = run(what);
        assert_eq!(output.status.signal(), Some(signal), "{what}: {message}");
        assert!(!message.contains("while it was in use"), "{what}: {message}");
    }
    let (output, message) = run("stack");
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{message}");
    assert!(message.contains("has overflowed its stack"), "{message}");
}
