//! Kinds of attacks, and what of each must hold.

use super::Bundle;
use super::other::Other;
use moec_testing::http::{Reply, get, post};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Time that an answer may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);
/// Bytes of requests that a client that never reads writes at most.
const UNREAD: usize = 256 << 10;

/// A request: its path and its body.
pub(crate) type Post = (&'static str, String);

/// Attack on a server.
pub(crate) enum Attack {
    /// Requests, all at once. Each gets one of these statuses.
    Requests { make: fn() -> Vec<Post>, statuses: &'static [u16] },
    /// A chat template. The server refuses it by name at its start, or conversations get one of these
    /// statuses.
    Template { source: fn() -> String, statuses: &'static [u16] },
    /// A tokenizer that is changed. The server refuses it by name at its start, or every text.
    Tokenizer(fn(&mut Value)),
    /// Clients that hold this many connections.
    Connections { count: usize, hold: fn(&mut TcpStream) -> io::Result<()> },
}

impl Attack {
    /// Attacks a server while another client sends requests. Returns the result.
    ///
    /// # Errors
    /// Fails if a requirement is not met.
    pub(crate) fn run(&self, address: &str, other: Option<&mut Other>) -> Result<String, String> {
        match self {
            Self::Requests { make, statuses } => requests(address, make(), statuses, other),
            Self::Template { statuses, .. } => {
                let body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2});
                let posts = vec![("/v1/chat/completions", body.to_string())];
                requests(address, posts, statuses, other)
            }
            Self::Tokenizer(_) => {
                let body = json!({"prompt": "aaa", "max_tokens": 2, "temperature": 0}).to_string();
                let reply = send(address, &("/v1/completions", body)).map_err(|e| e.to_string())?;
                if reply.status == 400 && reply.body.contains("tokenizer") {
                    Ok("400, and names the tokenizer".to_owned())
                } else {
                    Err(format!("the tokenizer was taken: {} {}", reply.status, reply.body))
                }
            }
            Self::Connections { count, hold } => connections(address, *count, *hold, other),
        }
    }
}

fn requests(
    address: &str,
    posts: Vec<Post>,
    statuses: &[u16],
    mut other: Option<&mut Other>,
) -> Result<String, String> {
    let replies = thread::scope(|scope| {
        let threads: Vec<_> = posts.iter().map(|post| scope.spawn(move || send(address, post))).collect();
        loop {
            other.as_deref_mut().map_or(Ok(()), Other::check)?;
            if threads.iter().all(thread::ScopedJoinHandle::is_finished) {
                break;
            }
        }
        Ok::<_, String>(threads.into_iter().map(thread::ScopedJoinHandle::join).collect::<Vec<_>>())
    })?;
    let mut found: BTreeMap<u16, usize> = BTreeMap::new();
    for reply in replies {
        let reply = reply.map_err(|_| "a client panicked")?;
        let reply = reply.map_err(|e| format!("no answer in {} s: {e}", LIMIT.as_secs()))?;
        if !statuses.contains(&reply.status) {
            let body: String = reply.body.chars().take(200).collect();
            return Err(format!("status {}, expected one of {statuses:?}: {body}", reply.status));
        }
        *found.entry(reply.status).or_default() += 1;
    }
    let found: Vec<String> = found.iter().map(|(status, n)| format!("{n} × {status}")).collect();
    Ok(found.join(", "))
}

/// Sends requests as an attacker does.
fn send(address: &str, (path, body): &Post) -> io::Result<Reply> {
    let start = Instant::now();
    let reply = post(address, path, body).call()?;
    if start.elapsed() > LIMIT { Err(ErrorKind::TimedOut.into()) } else { Ok(reply) }
}

/// Opens connections and uses each as the case requires. The other client must get answers meanwhile. A
/// client of the same address gets a status that says when to come back, and an answer as soon as the server
/// has closed the held connections.
fn connections(
    address: &str,
    count: usize,
    hold: fn(&mut TcpStream) -> io::Result<()>,
    mut other: Option<&mut Other>,
) -> Result<String, String> {
    let mut held = Vec::new();
    for _ in 0..count {
        let mut stream = small(address).map_err(|e| format!("connection {}: {e}", held.len() + 1))?;
        // One that is refused at once is held as well.
        let _ = hold(&mut stream);
        held.push(stream);
        if held.len() % 64 == 0 {
            other.as_deref_mut().map_or(Ok(()), Other::check)?;
        }
    }
    other.map_or(Ok(()), Other::check)?;
    let start = Instant::now();
    let health = || get(address, "/health").call();
    // If very many are refused at a time, some are closed without an answer.
    let first = loop {
        match health() {
            Ok(reply) => break reply,
            Err(e) if start.elapsed() > LIMIT => {
                return Err(format!("a client of the same address is not answered: {e}"));
            }
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    };
    if ![200, 429, 503].contains(&first.status)
        || (first.status != 200) != first.headers.contains("retry-after")
    {
        return Err(format!("a client of the same address got {}", first.headers));
    }
    while !health().is_ok_and(|reply| reply.status == 200) {
        if start.elapsed() > LIMIT {
            return Err("connections that are of no use are never closed".to_owned());
        }
        thread::sleep(Duration::from_millis(50));
    }
    Ok(format!(
        "{} held, then {}, 200 after {:.1} s",
        held.len(),
        first.status,
        start.elapsed().as_secs_f64()
    ))
}

/// A connection with little room for answers, so that a server soon waits for its client.
fn small(address: &str) -> io::Result<TcpStream> {
    let to: SocketAddr = address.parse().map_err(io::Error::other)?;
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_recv_buffer_size(4096)?;
    socket.connect_timeout(&to.into(), LIMIT)?;
    Ok(socket.into())
}

/// Writes requests until the server takes no more, and reads nothing.
pub(crate) fn never_reads(stream: &mut TcpStream) -> io::Result<()> {
    let one = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let all = one.repeat(UNREAD / one.len());
    stream.set_nonblocking(true)?;
    let mut rest = &*all;
    while let Some(more) = stream.write(rest).ok().and_then(|n| rest.get(n..)).filter(|more| !more.is_empty())
    {
        rest = more;
    }
    Ok(())
}

/// Begins a head, and never ends it.
pub(crate) fn never_ends_its_head(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
}

/// Sends the head of a large body, and little of it.
pub(crate) fn never_ends_its_body(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 4000000\r\n\r\n{",
    )
}

/// Gets an answer, and holds the connection.
pub(crate) fn stays(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.read_exact(&mut [0; 12])
}

/// Builds the model with a changed tokenizer. Returns the bundle, or the message of the failed build.
pub(crate) fn built(bundle: &Bundle, change: fn(&mut Value)) -> Result<Result<PathBuf, String>, String> {
    let failed = |e: io::Error| e.to_string();
    let [source, to] = ["changed", "changed.moec"].map(|name| bundle.scratch.join(name));
    let _ = fs::remove_dir_all(&source);
    copy(&bundle.source, &source).map_err(failed)?;
    let file = source.join("tokenizer.json");
    let text = fs::read(&file).map_err(failed)?;
    let mut tokenizer: Value = serde_json::from_slice(&text).map_err(|e| e.to_string())?;
    change(&mut tokenizer);
    // It is a link to the file of the model.
    fs::remove_file(&file).map_err(failed)?;
    fs::write(&file, tokenizer.to_string()).map_err(failed)?;
    let mut build = bundle.moec();
    build.arg("build").arg(source.join("model.toml")).args(["--no-run", "--quiet", "-o"]).arg(&to);
    let done = build.output().map_err(failed)?;
    let stderr = format!("{}; {}", done.status, String::from_utf8_lossy(&done.stderr));
    Ok(if done.status.success() { Ok(to) } else { Err(stderr) })
}

/// Links the files of a folder into another one.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &to)?;
        } else if fs::hard_link(entry.path(), &to).is_err() {
            fs::copy(entry.path(), &to)?;
        }
    }
    Ok(())
}
