//! The server with requests that request grammars: those that take too much, and calls of tools, over the runtime's toy model.
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

/// The server's processes: this program, with the name of this test.
#[test]
fn bounded_worker() {
    moec_service::worker::run().unwrap();
}

/// Gives on what is written.
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

/// Runs a test against a server, and ends the server with one SIGTERM. Gives its status. One after the other, since a signal is for the
/// whole process.
fn with_server(options: &[&str], test: impl FnOnce(&str)) -> u8 {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = bundle();
    add_tokenizer(dir.path());
    let template = dir.path().join("template.jinja");
    std::fs::write(&template, "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let program = program(&ENTRIES);
    let (lines, said) = channel();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let own = ["serve", "--port", "0", "--threads", "1", "--template", template.to_str().unwrap()];
            let args: Vec<OsString> = own.iter().chain(options).map(OsString::from).collect();
            let (mut out, mut err) = (Lines(lines), Vec::new());
            let io = Io { input: None, out: &mut out, err: &mut err };
            moec_service::front(&[]).run_with(&program, dir.path(), args.into_iter(), io)
        });
        let url = said.recv_timeout(Duration::from_mins(1)).unwrap();
        let address = url.trim().strip_prefix("http://").unwrap().to_owned();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&address)));
        let pid = std::process::id().to_string();
        assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let status = server.join().unwrap();
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        status
    })
}

/// A conversation with these fields beside its message.
fn chat(at: &str, fields: Value) -> Request {
    let mut body = json!({"messages": [{"role": "user", "content": "a"}], "temperature": 0});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    post(at, "/v1/chat/completions", body)
}

fn ask(at: &str, fields: Value) -> Reply {
    chat(at, fields).call().unwrap()
}

fn json(reply: &Reply) -> Value {
    serde_json::from_str(&reply.body).unwrap_or_else(|e| panic!("{e}: {}", reply.body))
}

/// Request with a schema of `response_format` or of a tool's arguments.
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

/// A schema of few bytes that takes gigabytes, and as long as there are seconds, where nothing bounds it.
fn endless(patterns: u8) -> Value {
    let pattern = |i: u8| format!(".*[a-{}].{{{}}}.*", char::from(b'b' + i % 24), 10 + i);
    let patterns = (0..patterns).map(|i| json!({"type": "string", "pattern": pattern(i)}));
    json!({"allOf": patterns.collect::<Vec<_>>()})
}

#[test]
fn schemas_that_take_too_much_hold_up_nobody_and_are_refused() {
    let status = with_server(&[], |at| {
        let object = json!({"type": "object", "properties": {"p": endless(40)}, "required": ["p"]});
        let long = json!({"type": "string", "pattern": "a?".repeat(400_000)});
        let asked = [schema(&endless(16)), tool(object), schema(&long)].map(|fields| {
            let at = at.to_owned();
            std::thread::spawn(move || ask(&at, fields))
        });
        // Others have their answers meanwhile, those with a grammar of their own among them once a process is free.
        let free = ask(at, json!({"max_tokens": 3}));
        assert_eq!(free.status, 200, "{}", free.body);
        assert!(asked.iter().any(|asked| !asked.is_finished()), "it was refused before it was tried");
        let fair = ask(at, schema(&json!({"enum": ["ab", "cd"]})));
        let said = json(&fair)["choices"][0]["message"]["content"].clone();
        assert!(said == "\"ab\"" || said == "\"cd\"", "{}", fair.body);
        for asked in asked {
            let reply = asked.join().unwrap();
            assert!(reply.status == 400 && reply.body.contains("takes more than"), "{}", reply.body);
        }
    });
    assert_eq!(status, 0);
}

/// One signal ends it although what was requested by them still compiles.
#[test]
fn clients_that_leave_while_a_grammar_compiles_leave_nothing_behind() {
    let status = with_server(&[], |at| {
        for _ in 0..5 {
            chat(at, schema(&endless(40))).leave(Duration::from_millis(20)).unwrap();
        }
        let fair = ask(at, schema(&json!({"enum": ["ab"]})));
        assert_eq!(json(&fair)["choices"][0]["message"]["content"], "\"ab\"", "{}", fair.body);
        chat(at, schema(&endless(40))).leave(Duration::from_millis(20)).unwrap();
    });
    assert_eq!(status, 0);
}

#[test]
fn arguments_of_forced_calls_are_objects() {
    // Nothing that small models like to go on with for ever.
    let plain: Value = (0..33)
        .chain(127..256u32)
        .map(|id| (id.to_string(), json!(-100)))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let status = with_server(&[], |at| {
        let call = |parameters: Value, tokens: usize| {
            let mut fields = tool(parameters);
            (fields["max_tokens"], fields["logit_bias"]) = (json!(tokens), plain.clone());
            let reply = ask(at, fields);
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
        // Cut by its length, it is a call all the same.
        let (arguments, finish) = call(of("p"), 35);
        assert!(r#"{"p":"a-longer-text"}"#.starts_with(&arguments) && arguments.len() > 3, "{arguments}");
        assert_eq!(finish, "length");
        // Anything in it, but an object.
        let (arguments, _) = call(json!({}), 50);
        assert!(arguments.starts_with('{'), "{arguments}");
        for parameters in [json!({"type": "string"}), json!(true), json!([])] {
            let reply = ask(at, tool(parameters));
            assert!(reply.status == 400 && reply.body.contains("of an object"), "{}", reply.body);
        }
    });
    assert_eq!(status, 0);
}
