//! The server with requests for grammars: expensive ones, and tool calls, with the runtime's toy model.
#![allow(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    clippy::panic,
    reason = "what fails here fails the test"
)]

#[path = "../../runtime/tests/common/mod.rs"]
mod common;

use common::*;
use moec_runtime::cli::Io;
use moec_testing::http::{Reply, Request, post};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::{self, Write};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The server's worker processes: this program, run with the name of this test.
#[test]
fn bounded_worker() {
    moec_service::worker::run().unwrap();
}

/// Sends all output to a channel.
struct Lines(Sender<String>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.0.send(String::from_utf8_lossy(bytes).into_owned());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs a test with a server, which then ends by one SIGTERM; returns its exit status. Tests run one at a
/// time, since a signal applies to the whole process.
fn with_server(options: &[&str], test: impl FnOnce(&str)) -> u8 {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = bundle();
    add_tokenizer(dir.path());
    let template = dir.path().join("template.jinja");
    std::fs::write(&template, "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let program = program(&ENTRIES);
    let (lines, lines_received) = channel();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let own = ["serve", "--port", "0", "--threads", "1", "--template", template.to_str().unwrap()];
            let args: Vec<OsString> = own.iter().chain(options).map(OsString::from).collect();
            let (mut out, mut err) = (Lines(lines), Vec::new());
            let io = Io { input: None, out: &mut out, err: &mut err };
            moec_service::front(&[]).run_with(&program, dir.path(), args.into_iter(), io)
        });
        let url = lines_received.recv_timeout(Duration::from_mins(1)).unwrap();
        let address = url.trim().strip_prefix("http://").unwrap().to_owned();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&address)));
        let pid = std::process::id().to_string();
        assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let status = server.join().unwrap();
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        status
    })
}

/// A chat request with these fields in addition to its message.
fn chat(at: &str, fields: Value) -> Request {
    let mut body = json!({"messages": [{"role": "user", "content": "a"}], "temperature": 0});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    post(at, "/v1/chat/completions", body)
}

fn send(at: &str, fields: Value) -> Reply {
    chat(at, fields).call().unwrap()
}

fn json(reply: &Reply) -> Value {
    serde_json::from_str(&reply.body).unwrap_or_else(|e| panic!("{e}: {}", reply.body))
}

/// Fields with a schema for `response_format`.
fn schema(schema: &Value) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})
}

fn tool(parameters: Value) -> Value {
    let mut function = json!({"name": "f"});
    if !parameters.is_null() {
        function["parameters"] = parameters;
    }
    json!({"tools": [{"type": "function", "function": function}], "tool_choice": "required"})
}

/// A short schema whose compilation takes gigabytes and does not end within any time limit.
fn endless(patterns: u8) -> Value {
    let pattern = |i: u8| format!(".*[a-{}].{{{}}}.*", char::from(b'b' + i % 24), 10 + i);
    let patterns = (0..patterns).map(|i| json!({"type": "string", "pattern": pattern(i)}));
    json!({"allOf": patterns.collect::<Vec<_>>()})
}

#[test]
fn expensive_schemas_are_rejected_without_blocking_others() {
    let status = with_server(&[], |at| {
        let object = json!({"type": "object", "properties": {"p": endless(40)}, "required": ["p"]});
        let long = json!({"type": "string", "pattern": "a?".repeat(400_000)});
        let requests = [schema(&endless(16)), tool(object), schema(&long)].map(|fields| {
            let at = at.to_owned();
            std::thread::spawn(move || send(&at, fields))
        });
        // Other requests are answered meanwhile, including those with a grammar once a process is free.
        let free = send(at, json!({"max_tokens": 3}));
        assert_eq!(free.status, 200, "{}", free.body);
        assert!(requests.iter().any(|request| !request.is_finished()), "it was refused before it was tried");
        let fair = send(at, schema(&json!({"enum": ["ab", "cd"]})));
        let content = json(&fair)["choices"][0]["message"]["content"].clone();
        assert!(content == "\"ab\"" || content == "\"cd\"", "{}", fair.body);
        for request in requests {
            let reply = request.join().unwrap();
            assert!(reply.status == 400 && reply.body.contains("takes more than"), "{}", reply.body);
        }
    });
    assert_eq!(status, 0);
}

/// One signal ends the server although a disconnected client's grammar still compiles.
#[test]
fn disconnecting_during_compilation_leaks_nothing() {
    let status = with_server(&[], |at| {
        for _ in 0..5 {
            chat(at, schema(&endless(40))).leave(Duration::from_millis(20)).unwrap();
        }
        let fair = send(at, schema(&json!({"enum": ["ab"]})));
        assert_eq!(json(&fair)["choices"][0]["message"]["content"], "\"ab\"", "{}", fair.body);
        chat(at, schema(&endless(40))).leave(Duration::from_millis(20)).unwrap();
    });
    assert_eq!(status, 0);
}

#[test]
fn forced_call_arguments_are_objects() {
    // Bias against the tokens that small models repeat forever.
    let plain: Value = (0..33)
        .chain(127..256u32)
        .map(|id| (id.to_string(), json!(-100)))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let status = with_server(&[], |at| {
        let call = |parameters: Value, tokens: usize| {
            let mut fields = tool(parameters);
            (fields["max_tokens"], fields["logit_bias"]) = (json!(tokens), plain.clone());
            let reply = send(at, fields);
            let choice = json(&reply)["choices"][0].clone();
            let message = choice["message"].clone();
            assert!(reply.status == 200 && message["content"].is_null(), "{}", reply.body);
            let function = message["tool_calls"][0]["function"].clone();
            assert_eq!(function["name"], "f", "{}", reply.body);
            (function["arguments"].as_str().unwrap().to_owned(), choice["finish_reason"].clone())
        };
        assert_eq!(call(Value::Null, 50), ("{}".to_owned(), json!("tool_calls")));
        let of = |required: &str| json!({"properties": {required: {"enum": ["a-longer-text"]}}, "required": [required], "additionalProperties": false});
        assert_eq!(call(of("p"), 50), (r#"{"p":"a-longer-text"}"#.to_owned(), json!("tool_calls")));
        // An answer that is cut by its length is a call nevertheless.
        let (arguments, finish) = call(of("p"), 35);
        assert!(r#"{"p":"a-longer-text"}"#.starts_with(&arguments) && arguments.len() > 3, "{arguments}");
        assert_eq!(finish, "length");
        // Without a schema the arguments are any object.
        let (arguments, _) = call(json!({}), 50);
        assert!(arguments.starts_with('{'), "{arguments}");
        for parameters in [json!({"type": "string"}), json!(true), json!([])] {
            let reply = send(at, tool(parameters));
            assert!(reply.status == 400 && reply.body.contains("of an object"), "{}", reply.body);
        }
    });
    assert_eq!(status, 0);
}
