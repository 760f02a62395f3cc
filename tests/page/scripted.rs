//! A server whose answers depend only on the last message, for events that are rare with a real one.

use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

/// The page under test.
const PAGE: &str = include_str!("../../service/src/serve/page.html");

/// Messages with scripted answers.
pub(super) const REASONING: &str = "Think first";
pub(super) const LENGTH: &str = "Answer at length";
pub(super) const ENDLESS: &str = "Never end";
/// Messages whose answers fail, and the page's error text.
pub(super) const FAILURES: [(&str, &str); 3] = [
    ("Be refused", "too many sequences wait"),
    ("Fail", "the sequence cannot go on"),
    ("Break off", "the connection ended before the answer did"),
];

/// Requests that the server received.
#[derive(Default)]
pub(super) struct ReceivedRequests {
    /// Bodies of chat requests.
    pub(super) bodies: Vec<Value>,
    /// Number of answers during which the client disconnected.
    pub(super) left: usize,
}

/// Starts the server, which ends with the process; returns its address.
pub(super) fn start() -> (String, Arc<Mutex<ReceivedRequests>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let seen = Arc::new(Mutex::new(ReceivedRequests::default()));
    let shared = Arc::clone(&seen);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let seen = Arc::clone(&shared);
            // Some tests disconnect in the middle of an answer.
            std::thread::spawn(move || answer(&stream, &seen).unwrap_or_default());
        }
    });
    (address, seen)
}

fn answer(mut stream: &TcpStream, seen: &Mutex<ReceivedRequests>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let (mut first, mut length) = (String::new(), 0);
    reader.read_line(&mut first)?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let line = line.trim().to_ascii_lowercase();
        if let Some(bytes) = line.strip_prefix("content-length:") {
            length = bytes.trim().parse().unwrap();
        }
        if line.is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let mut whole = |status: &str, kind: &str, body: &str| {
        write!(stream, "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n{body}")
    };
    let path = first.split(' ').nth(1).unwrap_or_default();
    if path == "/" {
        return whole("200 OK", "text/html", PAGE);
    }
    if path == "/v1/models" {
        let model = json!({"id": "scripted", "chat": true, "max_model_len": 1024});
        return whole("200 OK", "application/json", &json!({"data": [model]}).to_string());
    }
    let body: Value = serde_json::from_slice(&body).unwrap();
    let question =
        body["messages"].as_array().unwrap().last().unwrap()["content"].as_str().unwrap().to_owned();
    seen.lock().unwrap().bodies.push(body);
    if question == FAILURES[0].0 {
        let error = json!({"error": {"message": FAILURES[0].1}});
        return whole("503 Service Unavailable", "application/json", &error.to_string());
    }
    whole("200 OK", "text/event-stream", "")?;
    let mut event = |value: &Value| write!(stream, "data: {value}\n\n");
    let delta =
        |delta: Value, finish: Option<&str>| json!({"choices": [{"delta": delta, "finish_reason": finish}]});
    event(&delta(json!({"role": "assistant", "content": ""}), None))?;
    let finish = match &*question {
        REASONING => {
            for piece in ["Two and two", " are to be added.\n", "That is easy."] {
                event(&delta(json!({"reasoning_content": piece}), None))?;
            }
            for piece in ["The sum is `4`", ":\n```rust\nlet sum = 2 + 2;\n```"] {
                event(&delta(json!({"content": piece}), None))?;
            }
            "stop"
        }
        LENGTH => {
            for _ in 0..60 {
                event(&delta(json!({"content": "and so it goes on "}), None))?;
            }
            "length"
        }
        ENDLESS => loop {
            let sent = event(&delta(json!({"content": "leak "}), None));
            if sent.is_err() {
                seen.lock().unwrap().left += 1;
                return sent;
            }
            sleep(Duration::from_millis(10));
        },
        _ => {
            event(&delta(json!({"content": "a beginning"}), None))?;
            if question == FAILURES[1].0 {
                event(&json!({"error": {"message": FAILURES[1].1}}))?;
            }
            return Ok(());
        }
    };
    event(&delta(json!({}), Some(finish)))?;
    let usage =
        json!({"prompt_tokens": 9, "completion_tokens": 60, "prompt_tokens_details": {"cached_tokens": 3}});
    event(&json!({"choices": [], "usage": usage}))?;
    write!(stream, "data: [DONE]\n\n")
}
