//! Ctrl-C in the middle of a generation. The test is alone in its process, because signals are global.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_runtime::Program;
use moec_runtime::bundle::abi::KernelFn;
use moec_runtime::cli::{Front, Io};
use serde_json::Value;
use std::ffi::OsString;
use std::sync::atomic::{AtomicUsize, Ordering};

static CALLS: AtomicUsize = AtomicUsize::new(0);

/// As `store_ids`; the fifth call raises SIGINT.
unsafe extern "C" fn store_ids(a: *const *mut u8, n: i64, begin: i64, end: i64, scratch: *mut u8) {
    if CALLS.fetch_add(1, Ordering::Relaxed) == 4 {
        // SAFETY: a signal to this thread; the handler is that of `cli::interrupt`.
        unsafe { libc::raise(libc::SIGINT) };
    }
    let kernel = resolve("store_ids").unwrap();
    // SAFETY: the arguments are those of this kernel.
    unsafe { kernel(a, n, begin, end, scratch) };
}

#[test]
fn an_interrupt_ends_cleanly() {
    let dir = bundle();
    let resolve = |s: &str| if s == "store_ids" { Some(store_ids as KernelFn) } else { resolve(s) };
    let program = Program::new(plan(&ENTRIES), &resolve).unwrap();
    let run = |args: &str| {
        CALLS.store(0, Ordering::Relaxed);
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let args = args.split(' ').map(OsString::from);
        let io = Io { input: None, out: &mut out, err: &mut err };
        let status = Front::default().run_with(&program, dir.path(), args, io);
        (status, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    };
    // One prefill and four decode calls: five tokens are printed before the next call sees the flag.
    let expected = continuation(&[1, 2], 5).iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let out = run("generate --ids 1,2 -n 40 --threads 1");
    assert_eq!(out, (130, format!("{expected}\n"), String::new()));
    // No part of a JSON object is printed.
    assert_eq!(run("generate --ids 1,2 -n 40 --threads 1 --json"), (130, String::new(), String::new()));

    // The most probable of several sequences so far; the fifth call is the last of a run with five tokens.
    let sampled_args = "generate --ids 1,2 --threads 1 --best-of 2 --temperature 2 --quiet";
    let (status, five, _) = run(&format!("{sampled_args} -n 5"));
    let note = "note: no sequence was complete; this is the most probable one so far\n";
    assert_eq!(run(&format!("{sampled_args} -n 40")), (130, five, note.to_owned()));
    assert_eq!(status, 0);
    let (status, all, errors) = run(&format!("{sampled_args} -n 40 --all"));
    assert_eq!((status, all.matches(", cut short\n").count(), errors.as_str()), (130, 2, ""), "{all}");
    assert_eq!(run(&format!("{sampled_args} -n 40 --json")), (130, String::new(), String::new()));

    // A finished sequence comes before an unfinished one, even if the latter is more probable.
    let ended = |s: &Value| s["ids"].as_array().is_some_and(|ids| ids.last() == Some(&EOS.into()));
    let found = (0..2000).find_map(|seed| {
        let sampled_args = format!("{sampled_args} --stop-at-eos --seed {seed}");
        let json: Value = serde_json::from_str(&run(&format!("{sampled_args} -n 5 --json")).1).unwrap();
        let sequences = json["sequences"].as_array().unwrap();
        (!ended(&sequences[0]) && ended(&sequences[1])).then(|| (sampled_args, sequences[1]["ids"].clone()))
    });
    let (sampled_args, ids) =
        found.expect("a seed with a sequence that ends and a likelier one that does not");
    let ids: Vec<u32> = serde_json::from_value(ids).unwrap();
    let ids = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    assert_eq!(run(&format!("{sampled_args} -n 40")), (130, format!("{ids}\n"), String::new()));
}
