//! A server with the toy model in this process, and requests to it.

use crate::clients::COMPLETIONS;
use crate::common::*;
use moec_runtime::Program;
use moec_runtime::cli::Io;
use moec_testing::http::{self, Reply, get, post};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use std::ffi::OsString;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// Sends every line of output to a channel.
pub(crate) struct Lines(Sender<String>, Vec<u8>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.1.extend_from_slice(bytes);
        while let Some(end) = self.1.iter().position(|&b| b == b'\n') {
            let line: Vec<u8> = self.1.drain(..=end).collect();
            let _ = self.0.send(String::from_utf8(line).unwrap().trim().to_owned());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs a test with a server with these options, then ends the server by SIGTERM; returns its exit status.
pub(crate) fn with_server(options: &[&str], test: impl FnOnce(&str)) -> u8 {
    with_bundle(&[], options, test)
}

/// Like [`with_server`], with other artifacts in the bundle.
pub(crate) fn with_bundle(artifacts: &[(&str, &str)], options: &[&str], test: impl FnOnce(&str)) -> u8 {
    with_program(&program(&ENTRIES), artifacts, options, test).0
}

/// Like [`with_bundle`], with another program; also returns the server's standard error.
pub(crate) fn with_program(
    program: &Program,
    artifacts: &[(&str, &str)],
    options: &[&str],
    test: impl FnOnce(&str),
) -> (u8, String) {
    let dir = bundle();
    add_tokenizer(dir.path());
    for (name, text) in artifacts {
        std::fs::write(dir.path().join("artifacts").join(name), text).unwrap();
    }
    let (lines, lines_received) = channel();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let args = ["serve", "--port", "0", "--threads", "1"];
            let name = ["--model-name", "toy"];
            let named = options.contains(&name[0]);
            let args = args
                .iter()
                .chain(name.iter().filter(|_| !named))
                .chain(options)
                .map(OsString::from)
                .collect::<Vec<_>>();
            let (mut out, mut err) = (Lines(lines, Vec::new()), Vec::new());
            let io = Io { input: None, out: &mut out, err: &mut err };
            let status = moec_service::front(&[]).run_with(program, dir.path(), args.into_iter(), io);
            (status, String::from_utf8(err).unwrap())
        });
        let url = lines_received.recv_timeout(Duration::from_mins(1)).unwrap();
        let address = url.strip_prefix("http://").unwrap().to_owned();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&address)));
        terminate();
        let (status, err) = server.join().unwrap();
        if let Err(panic) = result {
            eprintln!("{err}");
            std::panic::resume_unwind(panic);
        }
        (status, err)
    })
}

/// Sends SIGTERM to this process.
pub(crate) fn terminate() {
    let pid = std::process::id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
}

/// Accessors of replies.
pub(crate) trait ReplyExt {
    fn json(&self) -> Value;
    fn event_values(&self) -> Vec<Value>;
}

impl ReplyExt for Reply {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The events of a stream.
    fn event_values(&self) -> Vec<Value> {
        let events = self.events().unwrap_or_else(|| panic!("{}", self.body));
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

pub(crate) fn send(request: http::Request) -> Reply {
    request.call().unwrap()
}

pub(crate) fn complete(address: &str, body: &Value) -> Reply {
    send(post(address, COMPLETIONS, body))
}

/// Beginning of a raw request, for requests that no HTTP client would send.
pub(crate) const POST: &str =
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json";

pub(crate) fn metric(address: &str, name: &str) -> u64 {
    let text = send(get(address, "/metrics")).body;
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')).map(str::to_owned);
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

/// Waits until no sequence waits or runs.
pub(crate) fn settled(address: &str) {
    let start = Instant::now();
    while metric(address, "moec_sequences_running") + metric(address, "moec_sequences_waiting") > 0 {
        assert!(start.elapsed() < Duration::from_secs(30), "a slot is never freed");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn text_of(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().filter(|&&id| id < 256).map(|&id| id as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The name of a token in log-probabilities.
pub(crate) fn named(id: u32) -> String {
    match id {
        0..128 => char::from(id as u8).to_string(),
        128..256 => format!("bytes:\\x{id:02x}"),
        BOS => "<s>".to_owned(),
        EOS => "</s>".to_owned(),
        _ => String::new(),
    }
}

/// The expected text, up to an end token, and the finish reason.
pub(crate) fn expected(prompt: &[u32], n: usize) -> (String, &'static str) {
    let mut ids = continuation(prompt, n);
    let end = ids.iter().position(|&id| id == EOS);
    ids.truncate(end.unwrap_or(n));
    (text_of(&ids), if end.is_some_and(|at| at < n) { "stop" } else { "length" })
}

/// A request that occupies all slots as long as possible.
pub(crate) fn long() -> Value {
    json!({"prompt": [5, 6], "max_tokens": 60, "n": SLOTS, "temperature": 2.0, "stream": true, "ignore_eos": true})
}

/// A connection from this address.
pub(crate) fn connect(to: &str, from: &str) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let from: SocketAddr = format!("{from}:0").parse().unwrap();
    let to: SocketAddr = to.parse().unwrap();
    socket.bind(&from.into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
    socket.into()
}
