//! `run serve` on the demo model: OpenAI's own client, a browser, signals, and the answers of `run generate`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use moec_testing::{CHROMIUM, OPENAI};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use support::{Setup, built, clean, ferris, moec, ok, root};

/// A server that ends with the test.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(bundle: &Path, options: &[&str]) -> Self {
        let mut command = moec();
        command.arg("run").arg(bundle).args(["serve", "--port", "0", "--threads", "1"]).args(options);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
        assert!(url.starts_with("http://127.0.0.1:"), "{url}");
        Self { child, url: url.trim().to_owned() }
    }

    fn signal(&self, name: &str) {
        ok(clean(Command::new("kill")).arg(name).arg(self.child.id().to_string()));
    }

    /// Sends a request of JSON.
    fn post(&self, body: &serde_json::Value) -> TcpStream {
        let mut stream = TcpStream::connect(self.url.strip_prefix("http://").unwrap()).unwrap();
        let body = body.to_string();
        let head =
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close";
        write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        stream
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // One that has ended is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn bundle(folder: &Path) -> PathBuf {
    let bundle = folder.join("ferris.moec");
    let setup = Setup { format: "bf16", chunk: 64, batch: &[1, 2, 4], context: 1024 };
    built(&setup.write(&ferris(), folder), &[], &bundle);
    bundle
}

#[test]
fn openais_client_is_answered() {
    if !OPENAI.here() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path());
    let template = root().join("golden/plain.jinja");
    // Ferris is a base model: without a template it continues texts, with one it also talks.
    for (options, talks) in [(&[][..], "0"), (&["--template", template.to_str().unwrap()], "1")] {
        let server = Server::start(&bundle, options);
        let mut python = clean(Command::new(moec_testing::openai().unwrap()));
        ok(python.arg(root().join("golden/openai/ask.py")).args([&*server.url, talks]));
    }
}

#[test]
fn answers_are_those_of_generate_and_a_signal_lets_them_end() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path());
    let prompt = "The borrow checker";
    let args = ["generate", "--prompt", prompt, "-n", "40", "--ignore-eos", "--json"];
    let alone = ok(moec().arg("run").arg(&bundle).args(args));
    let alone: serde_json::Value = serde_json::from_slice(&alone.stdout).unwrap();
    let mut server = Server::start(&bundle, &["--exact"]);
    let body = serde_json::json!({"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": true});
    let streams: Vec<TcpStream> = (0..6).map(|_| server.post(&body)).collect();
    let mut replies = streams.into_iter().map(|mut stream| {
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        let body = reply.split_once("\r\n\r\n").unwrap().1;
        serde_json::from_str::<serde_json::Value>(body).unwrap_or_else(|e| panic!("{e}: {reply}"))
    });
    assert!(replies.all(|reply| reply["choices"][0]["text"] == alone["text"]));
    // What has begun is finished; then it ends without an error.
    let mut last = server.post(&serde_json::json!({"prompt": prompt, "max_tokens": 400, "temperature": 0, "stream": true, "ignore_eos": true}));
    let mut first = [0; 64];
    last.read_exact(&mut first).unwrap();
    server.signal("-TERM");
    let mut rest = String::new();
    last.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}

#[test]
fn the_page_talks_in_a_browser() {
    if !CHROMIUM.here() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&bundle(folder.path()), &[]);
    let mut chromium = clean(Command::new("chromium"));
    chromium.args(["--headless", "--no-sandbox", "--disable-gpu"]);
    // With a port it stays until it is ended, and what the page logs comes at standard error.
    chromium.args(["--remote-debugging-port=0", "--enable-logging=stderr"]);
    chromium.arg(format!("--user-data-dir={}", folder.path().join("profile").display()));
    chromium.arg(format!("{}/#ask=The%20borrow%20checker", server.url));
    let mut browser = chromium.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let lines = BufReader::new(browser.stderr.take().unwrap()).lines();
    let logged = lines.map_while(Result::ok).filter(|line| line.contains("CONSOLE"));
    let mut said = Vec::new();
    for line in logged.take(8) {
        let done = line.contains("tokens/s");
        said.push(line);
        if done {
            break;
        }
    }
    browser.kill().unwrap();
    browser.wait().unwrap();
    let answer = said.iter().find_map(|line| Some(line.split_once("{\"answer\":\"")?.1)).unwrap_or_default();
    assert!(answer.chars().take_while(|c| *c != '"').filter(|c| c.is_alphabetic()).count() > 8, "{said:?}");
    assert!(said.last().is_some_and(|line| line.contains("tokens in (0 known), ")), "{said:?}");
}
