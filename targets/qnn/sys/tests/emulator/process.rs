//! The library in a worker process.

use crate::support::{installation, linear, load, relative, worker};
use moec_qnn_sys::worker::{Program, Worker};
use moec_qnn_sys::{DType, Error, Installation, SNAPDRAGON_8_GEN_3, SNAPDRAGON_8_PLUS_GEN_1};
use std::os::unix::ffi::OsStrExt as _;
use std::time::{Duration, Instant};

fn start(installation: &Installation, share: bool) -> Worker {
    worker(installation, SNAPDRAGON_8_GEN_3, share)
}

#[test]
fn graphs_compute_and_are_saved_and_loaded() {
    let Some(installation) = installation() else { return };
    let mut process = start(&installation, false);
    assert!(process.build().contains(moec_qnn_sys::find::QAIRT));
    let case = linear("linear", 2, 128, 256, 4, 7, 1.0);
    let graph = process.compose(&case.spec).unwrap();
    let out = process.execute(graph, vec![case.x.clone()]).unwrap();
    assert!(relative(&load(&out[0], DType::U16, &case.quant), &case.y) < 4e-4);
    let bytes = process.binary().unwrap();
    assert_eq!(process.binary_info(bytes.clone()).unwrap().soc_model, Some(SNAPDRAGON_8_GEN_3.model));

    let mut other = start(&installation, false);
    let graphs = other.load(bytes.clone()).unwrap();
    assert_eq!((graphs.clone(), other.graphs()[0].name.as_str()), (0..1, "linear"));
    assert_eq!(other.execute(graphs.start, vec![case.x.clone()]).unwrap(), out);
    // A context binary for one chip is refused by the other.
    let refused = worker(&installation, SNAPDRAGON_8_PLUS_GEN_1, false).load(bytes).unwrap_err();
    let Error::Soc { found, expected, .. } = &refused else { panic!("{refused}") };
    assert_eq!((*found, *expected), (SNAPDRAGON_8_GEN_3.model, SNAPDRAGON_8_PLUS_GEN_1.model));
    assert!(refused.hint().is_some());
}

/// Building the same graphs in two processes gives the same bytes.
#[test]
fn two_builds_give_the_same_bytes() {
    let Some(installation) = installation() else { return };
    let folder = tempfile::tempdir().unwrap();
    for share in [false, true] {
        let build = |name: &str| {
            let mut process = start(&installation, share);
            for batch in 1..=2 {
                process.compose(&linear(&format!("batch_{batch}"), batch, 128, 256, 4, 7, 1.0).spec).unwrap();
            }
            let path = folder.path().join(name);
            process.write_dlc(&linear("linear", 1, 128, 256, 8, 7, 1.0).spec, &path).unwrap();
            (process.binary().unwrap(), std::fs::read(path).unwrap())
        };
        let (one, two) = (build("one.dlc"), build("two.dlc"));
        assert!(one.0 == two.0, "context binaries differ, shared: {share}");
        assert!(one.1 == two.1, "DLC differ");
    }
}

#[test]
fn dlc_files_are_written_and_loaded() {
    let Some(installation) = installation() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("linear.dlc");
    let case = linear("linear", 2, 128, 256, 8, 7, 1.0);
    let mut process = start(&installation, false);
    process.write_dlc(&case.spec, &path).unwrap();
    let graphs = process.compose_dlc(&path).unwrap();
    let out = process.execute(graphs.start, vec![case.x]).unwrap();
    assert!(relative(&load(&out[0], DType::U16, &case.quant), &case.y) < 4e-4);
}

/// Errors of the library are returned, and the worker process continues.
#[test]
fn library_errors_reach_the_caller() {
    let Some(installation) = installation() else { return };
    let mut process = start(&installation, false);
    let refused = process.binary_info(vec![1, 2, 3]).unwrap_err();
    assert!(matches!(refused, Error::Binary { .. }), "{refused}");
    let path = std::ffi::OsStr::from_bytes(b"no UTF-8: \xff").as_ref();
    let unsaid = process.compose_dlc(path).unwrap_err();
    assert!(matches!(unsaid, Error::Request { .. }), "{unsaid}");
    let none = process.execute(3, Vec::new()).unwrap_err();
    assert!(none.to_string().contains("no graph of that number"), "{none}");
    process.compose(&linear("linear", 1, 64, 64, 8, 7, 1.0).spec).unwrap();
    let late = process.load(Vec::new()).unwrap_err();
    assert!(late.to_string().contains("the context has graphs"), "{late}");
}

/// Files are untrusted: for any content there is an error or a graph, and the caller does not crash.
#[test]
fn damaged_binaries_do_not_crash_the_caller() {
    let Some(installation) = installation() else { return };
    let mut process = start(&installation, false);
    process.compose(&linear("linear", 1, 64, 64, 8, 7, 1.0).spec).unwrap();
    let bytes = process.binary().unwrap();
    for (at, len) in [
        (0, 16),
        (256, bytes.len()),
        (4096, bytes.len()),
        (bytes.len() / 2, bytes.len()),
        (0, bytes.len() - 64),
    ] {
        let mut damaged = bytes[..len].to_vec();
        damaged[at..].iter_mut().step_by(97).take(64).for_each(|byte| *byte ^= 0x5A);
        match start(&installation, false).load(damaged) {
            Ok(graphs) => println!("from {at}, {len} bytes: {} graphs", graphs.len()),
            Err(e) => println!("from {at}, {len} bytes: {e}"),
        }
    }
}

/// If a worker process dies, the error says how it ended; the next request fails with the same error.
#[test]
fn worker_death_is_an_error() {
    let Some(installation) = installation() else { return };
    let shell = |script: &str| Program {
        path: "/bin/sh".into(),
        arguments: vec!["-c".into(), script.into()],
        limit: Duration::from_secs(5),
    };
    let start = |program| Worker::start(&program, &installation, SNAPDRAGON_8_GEN_3, false).unwrap_err();
    let killed = start(shell("echo falling over >&2; kill -SEGV $$"));
    let Error::Died { ending, messages, .. } = &killed else { panic!("{killed}") };
    assert!(ending.contains("signal: 11") && messages.iter().any(|m| m == "falling over"), "{killed}");
    let ended = start(shell("exit 3"));
    assert!(matches!(&ended, Error::Died { ending, .. } if ending.contains('3')), "{ended}");
    let chatty = start(shell("echo 'this is not an answer at all, but a long line'; exec sleep 0.1"));
    assert!(matches!(&chatty, Error::Died { .. }), "{chatty}");
    let missing = Program { path: "/nowhere/moec-qnn-exec".into(), ..shell("") };
    assert!(matches!(start(missing), Error::Start { .. }));
}

/// A process that does not answer in time is killed, even if it does not read its requests.
#[test]
fn a_process_that_hangs_is_ended() {
    let Some(installation) = installation() else { return };
    let begin = Instant::now();
    for script in ["exec sleep 100", "cat >/dev/null & echo thinking >&2; exec sleep 100"] {
        let program = Program {
            path: "/bin/sh".into(),
            arguments: vec!["-c".into(), script.into()],
            limit: Duration::from_millis(300),
        };
        let late = Worker::start(&program, &installation, SNAPDRAGON_8_GEN_3, false).unwrap_err();
        let Error::Late { doing, seconds, .. } = &late else { panic!("{late}") };
        assert_eq!((doing.as_str(), *seconds), ("load the library", 0.3));
        assert!(late.hint().is_some_and(|hint| hint.contains("MOEC_QNN_SECONDS")), "{late}");
    }
    assert!(begin.elapsed() < Duration::from_mins(1));
}
