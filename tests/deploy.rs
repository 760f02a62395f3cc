//! Replicas to which HAProxy passes requests, as docs/deploy has them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_testing::http::post;
use moec_testing::server::Server;
use moec_testing::{HAPROXY, KUBERNETES, SYSTEMD};
use serde_json::{Value, json};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::{Setup, built, clean, ferris, moec, ok, root};

const REPLICAS: usize = 3;
const CLIENTS: usize = 32;
/// Requests of each client.
const REQUESTS: usize = 8;
/// Beginnings of prompts, long enough to be shared.
const BEGINNINGS: [&str; 4] = [
    "The borrow checker is the part of the compiler that proves that no reference outlives its value.",
    "A vector holds its elements in one allocation, which grows when it is full and moves them all.",
    "Every task of an executor is polled until it is ready, and between two polls it does nothing at all.",
    "An iterator gives one item after the other until there are none, and its adapters are as lazy as it is.",
];

/// A proxy that ends with its owner.
struct Proxy(Child, String);

impl Proxy {
    /// Starts HAProxy with the page's configuration for these replicas.
    fn start(folder: &Path, replicas: &[Server]) -> Self {
        // Freed at once: nothing else on this machine takes it in the next moment.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut config = std::fs::read_to_string(root().join("docs/deploy/haproxy.cfg")).unwrap();
        for (i, replica) in replicas.iter().enumerate() {
            let shown = format!("127.0.0.1:{}", 8081 + i);
            assert!(config.contains(&shown), "{config}");
            config = config.replace(&shown, replica.address());
        }
        assert!(config.contains("bind :8080"));
        let config = config.replace("bind :8080", &format!("bind 127.0.0.1:{port}"));
        let path = folder.join("haproxy.cfg");
        std::fs::write(&path, config).unwrap();
        ok(clean(Command::new("haproxy")).args(["-c", "-f"]).arg(&path));
        let mut command = clean(Command::new("haproxy"));
        let child = command.arg("-f").arg(&path).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let (proxy, start) = (Self(child, format!("127.0.0.1:{port}")), Instant::now());
        while TcpStream::connect(&proxy.1).is_err() {
            assert!(start.elapsed() < Duration::from_secs(20), "HAProxy does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        proxy
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn bundle(folder: &Path) -> PathBuf {
    let bundle = folder.join("ferris.moec");
    let setup = Setup { format: "bf16", chunk: 16, batch: &[1, 2, 4], context: 256 };
    built(&setup.write(&ferris(), folder), &[], &bundle);
    bundle
}

/// Every option that the pages give the server exists.
fn options_exist(bundle: &Path) {
    let help = String::from_utf8(ok(moec().arg("run").arg(bundle).args(["serve", "--help"])).stdout).unwrap();
    let pages = [("moec.service", "--drain"), ("kubernetes.yaml", "--drain"), ("slurm.sh", "--host")];
    for (page, needs) in pages {
        let page = std::fs::read_to_string(root().join("docs/deploy").join(page)).unwrap();
        let mut lines = page.lines().filter_map(|line| Some(line.split_once("serve")?.1));
        let options = lines.find(|options| options.contains("--")).unwrap();
        let words = options.split([' ', ',', '[', ']']).filter(|word| word.starts_with("--"));
        let missing: Vec<&str> = words.filter(|word| !help.contains(*word)).collect();
        assert!(options.contains(needs) && missing.is_empty(), "{missing:?}: {help}");
    }
    ok(clean(Command::new("sh")).arg("-n").arg(root().join("docs/deploy/slurm.sh")));
}

fn replica(bundle: &Path) -> Server {
    let mut command = moec();
    command.arg("run").arg(bundle);
    Server::start(command.args(["serve", "--port", "0", "--threads", "1", "--exact", "--drain", "2"]))
        .unwrap()
}

fn body(client: usize, request: usize) -> Value {
    let prompt = format!("{} {client} {request}", BEGINNINGS[client % BEGINNINGS.len()]);
    json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true})
}

/// One of three replicas is killed and another drained under clients: every request gets the answer of a
/// single server, and prompts that begin alike find their beginning in a cache.
#[test]
fn clients_get_right_answers_while_replicas_end() {
    if !HAPROXY.met_or_skip() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path());
    options_exist(&bundle);
    let alone = replica(&bundle);
    let text = |at: &str, body: &Value| {
        let reply = post(at, "/v1/completions", body).call();
        let reply = reply.map_err(|e| e.to_string())?;
        let value: Value = serde_json::from_str(&reply.body).map_err(|e| format!("{e}: {}", reply.body))?;
        let cached = value["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        match &value["choices"][0]["text"] {
            Value::String(text) if reply.status == 200 => Ok((text.clone(), cached, reply.headers)),
            _ => Err(format!("status {}: {}", reply.status, reply.body)),
        }
    };
    // What a single server answers, by client and request.
    let of = |client| (0..REQUESTS).map(move |request| body(client, request));
    let right: Vec<Vec<String>> = (0..CLIENTS)
        .map(|client| of(client).map(|body| text(alone.address(), &body).unwrap().0).collect())
        .collect();
    drop(alone);
    let mut replicas: Vec<Server> = (0..REPLICAS).map(|_| replica(&bundle)).collect();
    let proxy = Proxy::start(folder.path(), &replicas);
    let (done, repeated, cached) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let ask = |client: usize, request: usize| {
        // The client's own rule, as libraries for this server's interface have it: what has failed is asked again, later
        // each time.
        let mut tries = (0..5_u32).map(|n| {
            std::thread::sleep(Duration::from_millis(if n == 0 { 0 } else { 250 << n }));
            text(&proxy.1, &body(client, request))
        });
        let mut failed = Vec::new();
        let found = tries.find_map(|answer| answer.map_err(|e| failed.push(e)).ok());
        repeated.fetch_add(failed.len(), Ordering::Relaxed);
        let (text, tokens, headers) = found.unwrap_or_else(|| panic!("no answer: {failed:?}"));
        assert!(headers.contains(&format!("x-moec-cached-tokens: {tokens}")), "{headers}");
        cached.fetch_add(usize::from(tokens > 0), Ordering::Relaxed);
        done.fetch_add(1, Ordering::Relaxed);
        text
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| scope.spawn(move || (0..REQUESTS).map(|r| ask(client, r)).collect::<Vec<_>>()))
            .collect();
        let wait = |count: usize| {
            let start = Instant::now();
            while done.load(Ordering::Relaxed) < count && start.elapsed() < Duration::from_mins(3) {
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        wait(CLIENTS);
        replicas[0].signal("-KILL").unwrap();
        wait(2 * CLIENTS);
        replicas[1].signal("-TERM").unwrap();
        for (client, right) in clients.into_iter().zip(&right) {
            assert_eq!(&client.join().unwrap(), right);
        }
    });
    assert_eq!(replicas[1].ended(Duration::from_mins(1)).unwrap().code(), Some(0));
    assert_eq!(done.load(Ordering::Relaxed), CLIENTS * REQUESTS);
    // The proxy itself repeats what a killed replica has not begun to answer.
    assert!(repeated.load(Ordering::Relaxed) <= CLIENTS, "{repeated:?} requests failed");
    // Three replicas and four beginnings: all but the first requests find theirs, if they go where it is.
    let cached = cached.load(Ordering::Relaxed);
    assert!(cached * 2 > CLIENTS * REQUESTS, "{cached} of {} found their beginning", CLIENTS * REQUESTS);
}

#[test]
fn manifests_are_those_of_kubernetes_schemas() {
    if !KUBERNETES.met_or_skip() {
        return;
    }
    let mut check = clean(Command::new(moec_testing::kubernetes().unwrap()));
    ok(check.arg("--strict").arg(root().join("docs/deploy/kubernetes.yaml")));
}

#[test]
fn the_unit_is_one_that_systemd_reads() {
    if !SYSTEMD.met_or_skip() {
        return;
    }
    let unit = std::fs::read_to_string(root().join("docs/deploy/moec.service")).unwrap();
    let installed = "/usr/local/bin/moec";
    assert!(unit.contains(installed));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("moec.service");
    let program = moec().get_program().to_owned();
    std::fs::write(&path, unit.replace(installed, program.to_str().unwrap())).unwrap();
    let out = clean(Command::new("systemd-analyze")).arg("verify").arg(&path).output().unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
}
