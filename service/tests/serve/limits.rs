//! Limits of slots, queues and connections, and the server's shutdown.

use crate::clients::COMPLETIONS;
use crate::common::*;
use crate::server::{
    POST, ReplyExt as _, complete, connect, long, metric, send, settled, terminate, with_program, with_server,
};
use moec_runtime::Program;
use moec_testing::http::{Incoming, Reply, get, post, raw};
use serde_json::json;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// If the caches of all slots would take terabytes, only as many slots are opened as fit into memory.
pub(crate) fn slots_are_as_many_as_memory_is_free_for() {
    let run = |program: &Program| {
        let mut slots = 0;
        let (status, output) = with_program(program, &[], &[], |at| {
            slots = metric(at, "moec_slots");
            assert_eq!(
                complete(at, &json!({"prompt": [1, 2], "max_tokens": 3, "temperature": 0})).status,
                200
            );
        });
        assert_eq!(status, 0);
        (slots, output)
    };
    let (slots, why) = run(&program(&ENTRIES));
    assert!(
        slots == 3 && why.contains("3 sequences at a time (the largest `decode_batch`"),
        "{slots}: {why}"
    );
    // Other operating systems do not report free memory.
    if !cfg!(target_os = "linux") {
        return;
    }
    const MANY: u32 = 1 << 16;
    let mut plan = plan(&ENTRIES);
    plan.model.slots = MANY;
    for state in &mut plan.states {
        (state.shape[0], state.shape[1]) = (MANY, MANY);
    }
    let (slots, why) = run(&Program::new(plan, &resolve).unwrap());
    assert!((1..u64::from(MANY)).contains(&slots), "{slots}");
    let words = format!(
        "{slots} sequences at a time (free memory is enough for no more of the bundle's {MANY} slots)"
    );
    assert!(why.contains(&words), "{why}");
}

pub(crate) fn who_goes_away_frees_the_slot(at: &str) {
    for _ in 0..10 {
        post(at, COMPLETIONS, long()).leave(Duration::from_millis(1)).unwrap();
    }
    settled(at);
    assert_eq!(complete(at, &json!({"prompt": "a", "max_tokens": 1})).status, 200);
}

pub(crate) fn too_many_are_sent_away(at: &str) {
    let before = metric(at, "moec_refused_total");
    let incoming: Vec<_> = std::thread::scope(|scope| {
        let clients: Vec<_> =
            (0..24).map(|_| scope.spawn(|| post(at, COMPLETIONS, long()).send().unwrap())).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let mut sent_away = 0;
    for Incoming { status, headers, .. } in incoming {
        let away = status == 429;
        assert!(away || status == 200, "{headers}");
        assert!(!away || headers.contains("retry-after: 1"), "{headers}");
        sent_away += usize::from(away);
    }
    assert!(sent_away > 0, "all of 24 were taken in");
    assert_eq!(metric(at, "moec_refused_total") - before, sent_away as u64);
    settled(at);
}

/// A client with an incomplete request delays the shutdown; a second signal ends the server at once.
pub(crate) fn a_second_signal_ends_what_waits() {
    let (mut held, mut since) = (None, Instant::now());
    let status = with_server(&[], |at| {
        let mut stream = TcpStream::connect(at).unwrap();
        write!(stream, "{POST}\r\nContent-Length: 100\r\n\r\n{{").unwrap();
        held = Some(stream);
        assert_eq!(send(get(at, "/health")).status, 200);
        terminate();
        std::thread::sleep(Duration::from_millis(300));
        since = Instant::now();
    });
    assert!(since.elapsed() < Duration::from_secs(10), "it took {:?}", since.elapsed());
    assert_ne!(status, 0, "it ended before the second signal");
    drop(held);
}

/// After a signal with `--drain`, requests are still answered, and health checks and answers send clients away.
pub(crate) fn a_draining_server_answers_and_sends_clients_away() {
    let mut since = Instant::now();
    let status = with_server(&["--drain", "60"], |at| {
        assert_eq!(send(get(at, "/health/ready")).json(), json!({"status": "ok"}));
        terminate();
        since = Instant::now();
        while send(get(at, "/health/ready")).status == 200 {
            assert!(since.elapsed() < Duration::from_secs(20), "it is ready after the signal");
        }
        let away = send(get(at, "/health/ready"));
        assert_eq!((away.status, away.json()), (503, json!({"status": "draining"})));
        assert_eq!([send(get(at, "/health/live")).status, send(get(at, "/health")).status], [200, 503]);
        let answer = complete(at, &json!({"prompt": [1, 2, 3], "max_tokens": 2}));
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert!(answer.headers.contains("connection: close"), "{}", answer.headers);
        assert!(answer.headers.contains("x-moec-cached-tokens: 0"), "{}", answer.headers);
    });
    // Another signal ends the time to drain.
    assert!(status == 0 && since.elapsed() < Duration::from_secs(30), "{status}, {:?}", since.elapsed());
}

/// Idle connections, as browsers open in advance, and connections kept open after an answer.
pub(crate) fn connections_without_a_request_do_not_hold_up_the_end() {
    let (mut held, mut since) = (Vec::new(), Instant::now());
    let status = with_server(&[], |at| {
        held.push(TcpStream::connect(at).unwrap());
        let mut kept = TcpStream::connect(at).unwrap();
        write!(kept, "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut begin = [0; 12];
        kept.read_exact(&mut begin).unwrap();
        assert_eq!(&begin, b"HTTP/1.1 200");
        held.push(kept);
        since = Instant::now();
    });
    assert_eq!(status, 0);
    assert!(since.elapsed() < Duration::from_secs(10), "it took {:?}", since.elapsed());
    drop(held);
}

/// At most three connections from one address and four in all; inactive clients are disconnected.
pub(crate) fn connections_have_limits(at: &str) {
    let answered = |from: &str| -> Option<Reply> {
        raw(connect(at, from), "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()
    };
    let status = |from: &str| answered(from).map_or(0, |reply| reply.status);
    let soon = |what: &str, mut holds: Box<dyn FnMut() -> bool + '_>| {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < Duration::from_secs(30), "{what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    // The announced body never arrives.
    let late = format!("{POST}\r\nContent-Length: 9\r\n\r\n{{");
    assert_eq!(raw(connect(at, "127.0.0.1"), &late).unwrap().status, 408);
    soon("a client that is late stays", Box::new(|| status("127.0.0.1") == 200));
    // No bytes, a part of a header, and an answer that is not followed by a request.
    let mut held: Vec<TcpStream> = (0..3).map(|_| connect(at, "127.0.0.1")).collect();
    write!(held[1], "GET /health HTT").unwrap();
    write!(held[2], "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let refused = answered("127.0.0.1").unwrap();
    assert_eq!(
        (refused.status, refused.json()["error"]["code"].as_str()),
        (429, Some("too_many_connections"))
    );
    assert!(refused.headers.contains("retry-after: 1") && refused.body.contains("3 connections open"));
    let mut other = connect(at, "127.0.0.2");
    write!(other, "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut begin = [0; 12];
    other.read_exact(&mut begin).unwrap();
    assert_eq!(&begin, b"HTTP/1.1 200");
    held.push(other);
    assert_eq!(status("127.0.0.3"), 503);
    soon("connections without a request stay", Box::new(|| status("127.0.0.1") == 200));
    drop(held);
    // A client that sends requests and never reads the answers.
    let mut stream = connect(at, "127.0.0.1");
    stream.set_nonblocking(true).unwrap();
    let asks = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(100);
    let closed = || stream.write(asks.as_bytes()).is_err_and(|e| e.kind() != std::io::ErrorKind::WouldBlock);
    soon("a client that never reads stays", Box::new(closed));
}
