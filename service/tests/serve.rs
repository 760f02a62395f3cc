//! The server over the runtime's toy model, whose logits are exact: every answer is the one of a run by itself, whoever asks beside it.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "what fails here fails the test")]

#[path = "../../testing/clients/mod.rs"]
mod clients;
#[path = "../../runtime/tests/common/mod.rs"]
mod common;

use clients::{Answer, CHAT, COMPLETIONS, Case, Clients, Model, Random};
use common::*;
use moec_runtime::cli::Io;
use moec_runtime::{Decoder, Program, Request, Sampler, Sampling, Text, generate};
use moec_testing::http::{self, Incoming, Reply, bare, get, post, raw, text};
use serde_json::{Map, Value, json};
use socket2::{Domain, Socket, Type};
use std::ffi::OsString;
use std::io::{Read as _, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// Gives every line on.
struct Lines(Sender<String>, Vec<u8>);

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

/// Runs a test against a server with these options, and ends the server with SIGTERM. Gives its status.
fn with_server(options: &[&str], test: impl FnOnce(&str)) -> u8 {
    with_bundle(&[], options, test)
}

/// As [`with_server`], of a bundle with other artifacts.
fn with_bundle(artifacts: &[(&str, &str)], options: &[&str], test: impl FnOnce(&str)) -> u8 {
    with_program(&program(&ENTRIES), artifacts, options, test).0
}

/// As [`with_bundle`], with another program. Gives also what the server says on standard error.
fn with_program(
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
    let (lines, said) = channel();
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
        let url = said.recv_timeout(Duration::from_mins(1)).unwrap();
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

/// Asks the server of this process to end.
fn terminate() {
    let pid = std::process::id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
}

/// What replies say.
trait Said {
    fn json(&self) -> Value;
    fn said(&self) -> Vec<Value>;
}

impl Said for Reply {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The events of a stream.
    fn said(&self) -> Vec<Value> {
        let events = self.events().unwrap_or_else(|| panic!("{}", self.body));
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

fn ask(request: http::Request) -> Reply {
    request.ask().unwrap()
}

fn complete(address: &str, body: &Value) -> Reply {
    ask(post(address, COMPLETIONS, body))
}

/// The beginning of a request that no client would send.
const POST: &str = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json";

fn metric(address: &str, name: &str) -> u64 {
    let text = ask(get(address, "/metrics")).body;
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')).map(str::to_owned);
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

/// Waits until no sequence waits or runs.
fn settled(address: &str) {
    let start = Instant::now();
    while metric(address, "moec_sequences_running") + metric(address, "moec_sequences_waiting") > 0 {
        assert!(start.elapsed() < Duration::from_secs(30), "a slot is never freed");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn text_of(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().filter(|&&id| id < 256).map(|&id| id as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The name that log-probabilities give a token.
fn named(id: u32) -> String {
    match id {
        0..128 => char::from(id as u8).to_string(),
        128..256 => format!("bytes:\\x{id:02x}"),
        BOS => "<s>".to_owned(),
        EOS => "</s>".to_owned(),
        _ => String::new(),
    }
}

/// The ids that are expected: up to an end token.
fn expected(prompt: &[u32], n: usize) -> (String, &'static str) {
    let mut ids = continuation(prompt, n);
    let end = ids.iter().position(|&id| id == EOS);
    ids.truncate(end.unwrap_or(n));
    (text_of(&ids), if end.is_some_and(|at| at < n) { "stop" } else { "length" })
}

/// The servers' process for grammars: this program, with the name of this test.
#[test]
fn bounded_worker() {
    moec_service::worker::run().unwrap();
}

/// One after the other, since a signal is for the whole process.
#[test]
fn serves() {
    let status = with_server(&["--max-queue", "2", "--max-body", "4096"], |at| {
        answers(at);
        offsets_are_those_of_tokens(at);
        stop_strings_end_at_once(at);
        refusals(at);
        only_this_machine_is_answered(at);
        who_goes_away_frees_the_slot(at);
        too_many_are_sent_away(at);
    });
    assert_eq!(status, 0);
    let advised = with_bundle(&[("sampling.json", r#"{"temperature": 30, "top_k": 1}"#)], &[], |at| {
        let prompt = [72, 105, 32];
        let said = |body: Value| complete(at, &body).json()["choices"][0]["text"].clone();
        assert_eq!(said(json!({"prompt": prompt, "max_tokens": 20})), expected(&prompt, 20).0);
        assert_ne!(
            said(json!({"prompt": prompt, "max_tokens": 20, "top_k": 0, "seed": 1})),
            expected(&prompt, 20).0
        );
    });
    assert_eq!(advised, 0);
    slots_are_as_many_as_memory_is_free_for();
    let named = with_server(&["--model-name", "org/toy"], |at| {
        for path in ["org/toy", "org%2Ftoy"] {
            let reply = ask(get(at, &format!("/v1/models/{path}")));
            assert_eq!((reply.status, reply.json()["id"].as_str()), (200, Some("org/toy")));
        }
        assert_eq!(ask(get(at, "/v1/models/org/other")).status, 404);
    });
    assert_eq!(named, 0);
    let key =
        with_server(&["--api-key", "secret", "--cors", "https://a.example", "--exact"], keys_and_origins);
    assert_eq!(key, 0);
    a_second_signal_ends_what_waits();
    connections_without_a_request_do_not_hold_up_the_end();
    let few = ["--max-connections", "4", "--max-connections-per-address", "3", "--client-timeout", "3"];
    // Others have one loopback address alone.
    if cfg!(target_os = "linux") {
        assert_eq!(with_server(&few, connections_have_limits), 0);
    }
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("template.jinja");
    let source = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}T{% endif %}";
    std::fs::write(&template, source).unwrap();
    assert_eq!(with_server(&["--template", template.to_str().unwrap()], conversations), 0);
    assert_eq!(
        with_bundle(
            &[("tokenizer.json", &pieces())],
            &["--template", template.to_str().unwrap()],
            first_words
        ),
        0
    );
    std::fs::write(&template, "{{ messages[0].content }}<think>{# </think> #}").unwrap();
    assert_eq!(with_server(&["--template", template.to_str().unwrap()], thoughts), 0);
    assert_eq!(with_server(&["--max-queue", "1000", "--max-body", "4096"], many_clients), 0);
}

fn answers(at: &str) {
    let prompt = [72, 105, 32];
    let (text, finish) = expected(&prompt, 20);
    let body = json!({"model": "toy", "prompt": prompt, "max_tokens": 20, "temperature": 0, "user": "unknown fields pass"});
    let reply = complete(at, &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let value = reply.json();
    assert_eq!(value["object"], "text_completion");
    assert_eq!(
        (&value["choices"][0]["text"], &value["choices"][0]["finish_reason"]),
        (&json!(text), &json!(finish))
    );
    assert_eq!(value["usage"]["prompt_tokens"], 3);
    // As events: the same text, in pieces.
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let reply = complete(at, &streamed);
    assert!(reply.headers.contains("content-type: text/event-stream"), "{}", reply.headers);
    let events = reply.said();
    let joined: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(joined, text);
    let last = events.last().unwrap();
    assert_eq!((&last["usage"]["prompt_tokens"], last["choices"].as_array().unwrap().len()), (&json!(3), 0));
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 2, "the prompt lay in a slot");
    // Where no probability is wanted, the likeliest token stays.
    let mut narrow = body.clone();
    (narrow["temperature"], narrow["top_p"]) = (json!(50.0), json!(0));
    assert_eq!(complete(at, &narrow).json()["choices"][0]["text"], text);
    // More tokens than the context has room for are as many as it has.
    let most = json!({"prompt": prompt, "max_tokens": 1000, "temperature": 0, "ignore_eos": true});
    let value = complete(at, &most).json();
    assert_eq!(
        (&value["choices"][0]["finish_reason"], &value["usage"]["total_tokens"]),
        (&json!("length"), &json!(64))
    );
    // Without a temperature tokens are drawn, with a seed that is shown.
    let mut drawn = json!({"prompt": prompt, "max_tokens": 20, "temperature": 30.0, "ignore_eos": true});
    let first = complete(at, &drawn).json();
    drawn["seed"] = first["seed"].clone();
    let again = complete(at, &drawn).json();
    assert!(
        first["seed"].is_u64() && again["choices"][0]["text"] == first["choices"][0]["text"],
        "{first} {again}"
    );
    drawn["seed"] = json!(null);
    assert_ne!(complete(at, &drawn).json()["seed"], first["seed"]);
    // Several prompts, several answers, a seed, log-probabilities: those of the library.
    let body = json!({"prompt": [[1, 2, 3], [9, 8]], "n": 2, "max_tokens": 6, "temperature": 30.0, "seed": 5, "logprobs": 2,
        "ignore_eos": true});
    let value = complete(at, &body).json();
    let choices = value["choices"].as_array().unwrap().clone();
    assert_eq!(choices.len(), 4, "{value}");
    with_engine(&ENTRIES, 1, |engine| {
        for (i, choice) in choices.iter().enumerate() {
            let prompt: &[u32] = [&[1, 2, 3][..], &[9, 8]][i / 2];
            let how = Sampling { temperature: 30.0, seed: 5 + i as u64, ..Sampling::GREEDY };
            let request = Request { slot: 0, prompt, n: 6, end: &[] };
            let mut sampler = Sampler::new(how);
            let alone =
                generate(engine, &request, &mut Decoder::full(), &mut sampler, &mut |_| Ok(())).unwrap();
            assert_eq!(choice["text"], text_of(&alone.ids), "choice {i}");
            let lists = &choice["logprobs"];
            assert_eq!(lists["tokens"], alone.ids.iter().map(|&id| named(id)).collect::<Value>());
            assert_eq!(lists["top_logprobs"][0].as_object().unwrap().len(), 2, "{lists}");
            assert!(lists["token_logprobs"][0].as_f64().unwrap() <= 0.0);
        }
    });
    // Those that copy a prompt from the first answer to it do not count.
    let usage =
        complete(at, &json!({"prompt": [201, 202, 203], "n": 3, "max_tokens": 2})).json()["usage"].clone();
    assert_eq!(
        (&usage["prompt_tokens"], &usage["prompt_tokens_details"]["cached_tokens"]),
        (&json!(3), &json!(0))
    );
    // A string ends it, and nothing of that string is there.
    if let Some((i, c)) = text.char_indices().nth(3) {
        let body = json!({"prompt": prompt, "max_tokens": 20, "temperature": 0, "stop": [c.to_string()]});
        let value = complete(at, &body).json();
        let before = &text[..text.find(c).unwrap().min(i)];
        assert_eq!(
            (&value["choices"][0]["text"], &value["choices"][0]["finish_reason"]),
            (&json!(before), &json!("stop"))
        );
    }
    let value = ask(get(at, "/v1/models")).json();
    assert_eq!((&value["data"][0]["id"], &value["data"][0]["chat"]), (&json!("toy"), &json!(false)));
    assert_eq!(ask(get(at, "/v1/models/toy")).status, 200);
    assert_eq!(ask(get(at, "/health")).json(), json!({"status": "ok"}));
    let page = ask(get(at, "/"));
    assert!(page.body.contains("<title>moec</title>") && page.headers.contains("content-security-policy"));
    assert!(metric(at, "moec_tokens_total") > 0 && metric(at, "moec_slots") == SLOTS as u64);
}

/// Of slots whose full caches would take terabytes, those are opened whose caches fit.
fn slots_are_as_many_as_memory_is_free_for() {
    let said = |program: &Program| {
        let mut slots = 0;
        let (status, said) = with_program(program, &[], &[], |at| {
            slots = metric(at, "moec_slots");
            assert_eq!(
                complete(at, &json!({"prompt": [1, 2], "max_tokens": 3, "temperature": 0})).status,
                200
            );
        });
        assert_eq!(status, 0);
        (slots, said)
    };
    let (slots, why) = said(&program(&ENTRIES));
    assert!(
        slots == 3 && why.contains("3 sequences at a time (the largest `decode_batch`"),
        "{slots}: {why}"
    );
    // Others do not say how much is free.
    if !cfg!(target_os = "linux") {
        return;
    }
    const MANY: u32 = 1 << 16;
    let mut plan = plan(&ENTRIES);
    plan.model.slots = MANY;
    for state in &mut plan.states {
        (state.shape[0], state.shape[1]) = (MANY, MANY);
    }
    let (slots, why) = said(&Program::new(plan, &resolve).unwrap());
    assert!((1..u64::from(MANY)).contains(&slots), "{slots}");
    let words = format!("{slots} sequences at a time (of the {MANY} that the bundle has slots for");
    assert!(why.contains(&words), "{why}");
}

fn refusals(at: &str) {
    let of = |body: Value| {
        let reply = complete(at, &body);
        (reply.status, reply.json()["error"].clone())
    };
    let cases = [
        (json!({"prompt": "a", "temperature": "hot"}), 400, "temperature", "must be a number"),
        (json!({"prompt": "a", "temperature": 101}), 400, "", "temperature must be from 0 to 100"),
        (json!({"prompt": "a", "top_p": -0.5}), 400, "", "top_p must be from 0 to 1"),
        (json!({"prompt": "a", "n": 4}), 400, "n", "from 1 to 3"),
        (json!({"prompt": "a", "stop": 3}), 400, "stop", "array of strings"),
        (json!({"prompt": "a", "stop": ["b", "é".repeat(129)]}), 400, "stop", "hint: each may have 256"),
        (json!({"prompt": "a", "echo": true}), 400, "echo", "not supported"),
        (json!({"prompt": "a", "suffix": "b"}), 400, "suffix", "not supported"),
        (json!({"prompt": "a", "logprobs": 21}), 400, "logprobs", "from 0 to 20"),
        (json!({"prompt": "a", "logit_bias": {"x": 1}}), 400, "logit_bias", "token ids"),
        (json!({"prompt": "a", "stream_options": {}}), 400, "stream_options", "for streams"),
        (json!({"prompt": {"a": 1}}), 400, "prompt", "an object"),
        (json!({"prompt": [300]}), 400, "", "outside of the vocabulary"),
        (json!({"prompt": []}), 400, "", "the prompt is empty"),
        (json!({"prompt": "a".repeat(64), "max_tokens": 1}), 400, "", "the context holds 64"),
        (json!({}), 400, "prompt", "missing"),
        (json!([]), 400, "the body", "an object"),
        (json!({"prompt": "a", "model": "gpt-9"}), 404, "model", "this is `toy`"),
    ];
    for (body, status, param, says) in cases {
        let (found, error) = of(body.clone());
        assert_eq!(found, status, "{body} {error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{body} {error}");
        assert_eq!(error["param"].as_str().unwrap_or_default(), param, "{body} {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(!error["message"].as_str().unwrap().contains("`-"), "options are not for clients: {error}");
    }
    // Bodies whose transfer is malformed, that are no JSON, and that are too large.
    let chunked = |chunks: &str| {
        let request = format!("{POST}\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}\r\n");
        raw(TcpStream::connect(at).unwrap(), &request).unwrap()
    };
    let reply = chunked("no size");
    assert!(reply.status == 400 && reply.body.contains("cannot be read"), "{}", reply.body);
    assert_eq!(chunked(&format!("1388\r\n{}", "x".repeat(5000))).status, 413);
    let large = ask(post(at, COMPLETIONS, "x".repeat(5000)));
    assert!(!large.body.contains("`-"), "{}", large.body);
    assert_eq!(ask(post(at, COMPLETIONS, "{")).status, 400);
    assert_eq!(ask(text(at, COMPLETIONS, "{}").header("Content-Type", "text/plain")).status, 415);
    assert_eq!(ask(get(at, "/v1/completions")).status, 405);
    assert_eq!(ask(get(at, "/v2")).status, 404);
    assert_eq!(ask(post(at, COMPLETIONS, "x".repeat(5000))).status, 413);
    let chat = ask(post(at, CHAT, r#"{"messages": [{"role": "user", "content": "hi"}]}"#));
    assert!(chat.status == 400 && chat.body.contains("template"), "{}", chat.body);
}

/// Every token is where its text begins, streamed and whole, although text is held back for a string that might end the answer.
fn offsets_are_those_of_tokens(at: &str) {
    const N: usize = 20;
    let visible = |prompt: &[u32; 2]| (33..127).contains(&continuation(prompt, 1)[0]);
    let prompt = (1..128).map(|i| [i, 2]).find(visible).unwrap();
    let text = Text::parse(tokenizer().as_bytes(), None).unwrap();
    let (mut stream, mut all) = (text.stream(), String::new());
    let mut offsets = Vec::new();
    for id in continuation(&prompt, N) {
        offsets.push(all.chars().count() as u64);
        all += &stream.push(id).unwrap();
    }
    all += &stream.finish().unwrap();
    assert_eq!(offsets[..2], [0, 1]);
    let never = format!("{}\u{1}\u{1}\u{1}", all.chars().next().unwrap());
    for (stop, stream) in [(None, false), (None, true), (Some(&never), false), (Some(&never), true)] {
        let body = json!({"prompt": prompt, "max_tokens": N, "temperature": 0, "ignore_eos": true, "logprobs": 0, "stop": stop,
            "stream": stream});
        let reply = complete(at, &body);
        let said = if stream { reply.said() } else { vec![reply.json()] };
        let (mut joined, mut found) = (String::new(), Vec::new());
        for choice in said.iter().map(|event| &event["choices"][0]) {
            joined += choice["text"].as_str().unwrap();
            let of = choice["logprobs"]["text_offset"].as_array();
            found.extend(of.into_iter().flatten().filter_map(Value::as_u64));
        }
        assert_eq!((&joined, &found), (&all, &offsets), "{stop:?}, {stream}: {}", reply.body);
    }
}

/// Of two answers one ends early, at a letter that the other one has not, and takes no token more.
fn stop_strings_end_at_once(at: &str) {
    const N: usize = 40;
    let long = [9, 8];
    let others = continuation(&long, N);
    let early = |i: u32| {
        let ids = continuation(&[i, 2], N);
        let letter = |id: &u32| (97..123).contains(id) && !others.contains(id);
        let place = ids.iter().take(12).position(letter)?;
        Some(([i, 2], text_of(&[ids[place]]), place + 1))
    };
    let (short, letter, tokens) = (1..256).find_map(early).unwrap();
    settled(at);
    for stream in [false, true] {
        let before = metric(at, "moec_tokens_total");
        let mut body = json!({"prompt": [short, long], "max_tokens": N, "temperature": 0, "ignore_eos": true, "stop": letter,
            "stream": stream});
        if stream {
            body["stream_options"] = json!({"include_usage": true});
        }
        let reply = complete(at, &body);
        let said = if stream { reply.said() } else { vec![reply.json()] };
        let choices = said.iter().flat_map(|e| e["choices"].as_array().unwrap());
        let ends = choices.filter(|c| !c["finish_reason"].is_null());
        let mut ends: Vec<_> = ends.map(|c| (c["index"].as_u64(), c["finish_reason"].as_str())).collect();
        ends.sort_unstable();
        assert_eq!(ends, [(Some(0), Some("stop")), (Some(1), Some("length"))], "{}", reply.body);
        assert_eq!(said.last().unwrap()["usage"]["completion_tokens"], tokens + N);
        settled(at);
        assert_eq!(metric(at, "moec_tokens_total") - before, (tokens + N) as u64);
    }
}

/// A request that takes all slots for as long as it can.
fn long() -> Value {
    json!({"prompt": [5, 6], "max_tokens": 60, "n": SLOTS, "temperature": 50.0, "stream": true, "ignore_eos": true})
}

fn who_goes_away_frees_the_slot(at: &str) {
    for _ in 0..10 {
        post(at, COMPLETIONS, long()).leave(Duration::from_millis(1)).unwrap();
    }
    settled(at);
    assert_eq!(complete(at, &json!({"prompt": "a", "max_tokens": 1})).status, 200);
}

fn too_many_are_sent_away(at: &str) {
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

/// A page whose own name leads to this machine sends that name.
fn only_this_machine_is_answered(at: &str) {
    for (host, status) in [
        ("Host: localhost:1\r\n", 200),
        ("Host: [::1]\r\n", 200),
        ("Host: a.localhost.:1\r\n", 200),
        ("Host: host.docker.internal:1\r\n", 200),
        ("", 200),
        ("Host: a.example\r\n", 403),
        ("Host: localhost.a.example\r\n", 403),
        ("Host: 10.0.0.1:80\r\n", 403),
        ("Host: localhost\r\nHost: a.example\r\n", 400),
        ("Host: a.example\r\nHost: localhost\r\n", 400),
    ] {
        let stream = TcpStream::connect(at).unwrap();
        let reply = raw(stream, &format!("GET /v1/models HTTP/1.0\r\n{host}\r\n")).unwrap();
        assert_eq!(reply.status, status, "{host}: {}", reply.body);
        assert!(status == 200 || reply.body.contains("`Host`"), "{}", reply.body);
    }
}

/// A client that does not send all of its request holds up the end; another signal does not wait for it.
fn a_second_signal_ends_what_waits() {
    let (mut held, mut since) = (None, Instant::now());
    let status = with_server(&[], |at| {
        let mut stream = TcpStream::connect(at).unwrap();
        write!(stream, "{POST}\r\nContent-Length: 100\r\n\r\n{{").unwrap();
        held = Some(stream);
        assert_eq!(ask(get(at, "/health")).status, 200);
        terminate();
        std::thread::sleep(Duration::from_millis(300));
        since = Instant::now();
    });
    assert!(since.elapsed() < Duration::from_secs(10), "it took {:?}", since.elapsed());
    assert_ne!(status, 0, "it ended before the second signal");
    drop(held);
}

/// Neither one that says nothing, as browsers open ahead, nor one that stays open behind an answer.
fn connections_without_a_request_do_not_hold_up_the_end() {
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

/// Three of an address, four in all, and each for as long as its client takes part.
fn connections_have_limits(at: &str) {
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
    // A body that does not come.
    let late = format!("{POST}\r\nContent-Length: 9\r\n\r\n{{");
    assert_eq!(raw(connect(at, "127.0.0.1"), &late).unwrap().status, 408);
    soon("a client that is late stays", Box::new(|| status("127.0.0.1") == 200));
    // Nothing, a part of a head, and an answer behind which nothing is asked.
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
    // One that asks and never reads.
    let mut stream = connect(at, "127.0.0.1");
    stream.set_nonblocking(true).unwrap();
    let asks = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(100);
    let closed = || stream.write(asks.as_bytes()).is_err_and(|e| e.kind() != std::io::ErrorKind::WouldBlock);
    soon("a client that never reads stays", Box::new(closed));
}

/// A connection from an address of this machine.
fn connect(to: &str, from: &str) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let from: SocketAddr = format!("{from}:0").parse().unwrap();
    let to: SocketAddr = to.parse().unwrap();
    socket.bind(&from.into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
    socket.into()
}

fn keys_and_origins(at: &str) {
    let body = json!({"prompt": [1, 2], "max_tokens": 3, "temperature": 0});
    let request = || post(at, COMPLETIONS, &body);
    let with = |key: &str| request().header("Authorization", key);
    for request in [request(), with("Bearer wrong!"), with("secret"), with("Digest secret")] {
        let reply = ask(request);
        assert_eq!(
            (reply.status, reply.json()["error"]["type"].as_str()),
            (401, Some("authentication_error"))
        );
    }
    let reply = ask(with("Bearer secret"));
    assert_eq!(reply.json()["choices"][0]["text"], expected(&[1, 2], 3).0);
    assert!(reply.headers.contains("access-control-allow-origin: https://a.example"), "{}", reply.headers);
    // In capitals or not, schemes and types are the same.
    let request = text(at, COMPLETIONS, &body.to_string()).header("Authorization", "bearer secret");
    let reply = ask(request.header("Content-Type", "Application/JSON; charset=UTF-8"));
    assert_eq!(reply.status, 200, "{}", reply.body);
    for (origin, allows) in [
        ("", "authorization, content-type"),
        ("https://a.example", "x-stainless-os"),
        ("https://b.example", "authorization"),
    ] {
        let mut request = bare("OPTIONS", at, COMPLETIONS);
        if !origin.is_empty() {
            request =
                request.header("Origin", origin).header("Access-Control-Request-Headers", "x-stainless-os");
        }
        let reply = ask(request);
        assert_eq!(reply.status, 204);
        let allowed = format!("access-control-allow-headers: {allows}");
        assert!(reply.headers.contains(&allowed), "{}", reply.headers);
    }
    // With a key, any name will do; not so any body.
    let many = format!("{{\"prompt\": [{}0]}}", "0,".repeat(200_000));
    let reply = ask(post(at, COMPLETIONS, many).header("Authorization", "Bearer secret"));
    assert!(reply.status == 400 && reply.body.contains("more than 200000 values"), "{}", reply.body);
    assert_eq!(ask(get(at, "/health")).status, 200);
    assert_eq!(ask(get(at, "/metrics")).status, 401);
}

fn conversations(at: &str) {
    let of = |body: &Value| ask(post(at, CHAT, body));
    assert_eq!(ask(get(at, "/v1/models")).json()["data"][0]["chat"], true);
    let parts = json!([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]);
    for content in [json!("hi"), parts] {
        let mut body = json!({"messages": [{"role": "user", "content": content}], "max_completion_tokens": 12, "temperature": 0,
            "logprobs": true, "top_logprobs": 2});
        let (text, finish) = expected(&[104, 105], 12);
        let value = of(&body).json();
        let choice = &value["choices"][0];
        assert_eq!(
            (&value["object"], &choice["message"]["content"]),
            (&json!("chat.completion"), &json!(text)),
            "{value}"
        );
        assert_eq!(choice["finish_reason"], finish);
        let of_token = &choice["logprobs"]["content"][0];
        assert_eq!(of_token["top_logprobs"].as_array().unwrap().len(), 2);
        let first = continuation(&[104, 105], 1)[0];
        assert_eq!(of_token["token"], named(first));
        assert!(first > 255 || of_token["bytes"] == json!([first]), "{of_token}");
        body["stream"] = json!(true);
        let events = of(&body).said();
        assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
        let joined: String =
            events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!((joined, &events.last().unwrap()["choices"][0]["finish_reason"]), (text, &json!(finish)));
    }
    // Held to a schema; tools that must be called; tools that are only shown.
    let messages = json!([{"role": "user", "content": "a"}]);
    let schema =
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab", "cd"]}}});
    let body =
        json!({"messages": messages, "response_format": schema, "temperature": 1.0, "seed": 4, "n": 3});
    let value = of(&body).json();
    for choice in 0..3 {
        let said =
            value["choices"][choice]["message"]["content"].as_str().unwrap_or_else(|| panic!("{value}"));
        assert!(["\"ab\"", "\"cd\""].contains(&said), "{value}");
    }
    let parameters =
        json!({"properties": {"p": {"enum": [7]}}, "required": ["p"], "additionalProperties": false});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let mut body = json!({"messages": messages, "tools": [tool], "tool_choice": "required", "temperature": 0,
        "logit_bias": {"9": -100, "10": -100, "13": -100, "32": -100}});
    let value = of(&body).json();
    let call = &value["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(call["function"], json!({"name": "f", "arguments": r#"{"p":7}"#}), "{value}");
    // As templates want it that take nothing else.
    let id = call["id"].as_str().unwrap_or_else(|| panic!("{value}"));
    assert!(id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric()), "{id}");
    assert_eq!(value["choices"][0]["finish_reason"], "tool_calls");
    body["stream"] = json!(true);
    let events = of(&body).said();
    let deltas: Vec<&Value> = events.iter().map(|e| &e["choices"][0]["delta"]).collect();
    let calls: Vec<&Value> = deltas.iter().filter_map(|d| Some(&d.get("tool_calls")?[0])).collect();
    assert_eq!(calls[0]["function"]["name"], "f", "{events:?}");
    let arguments: String = calls.iter().filter_map(|c| c["function"]["arguments"].as_str()).collect();
    assert!(calls.len() > 3 && arguments == r#"{"p":7}"#, "{events:?}");
    // An event has something to say: the first one, and the last one that says why it ended.
    let empty = events.iter().filter(|e| e["choices"][0]["delta"] == json!({}));
    assert!(empty.clone().count() <= 1 && empty.clone().all(|e| !e["choices"][0]["finish_reason"].is_null()));
    // What a tool's references name is found although its schema is a part of another one.
    body["stream"] = json!(false);
    body["tool_choice"] = json!({"type": "function", "function": {"name": "g"}});
    let parameters = json!({"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"],
        "additionalProperties": false, "$defs": {"P": {"anyOf": [{"$ref": "#/$defs/Q"}]}, "Q": {"enum": [7]}}});
    let nested = json!({"type": "function", "function": {"name": "g", "parameters": parameters}});
    body["tools"] = json!([tool, nested]);
    let value = of(&body).json();
    let call = &value["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(call["function"], json!({"name": "g", "arguments": r#"{"p":7}"#}), "{value}");
    let body = json!({"messages": messages, "tools": [tool], "temperature": 0, "max_tokens": 5});
    assert_eq!(
        of(&body).json()["choices"][0]["message"]["content"],
        expected(b"aT".map(u32::from).as_slice(), 5).0
    );
    // Arguments are texts that are read as JSON: what they hold counts, of all of them together.
    let arguments = format!("[{}0]", "0,".repeat(120_000));
    let call =
        json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]});
    for (calls, status) in [(1, 200), (2, 400)] {
        let mut many = vec![json!({"role": "user", "content": "a"})];
        many.extend(std::iter::repeat_n(call.clone(), calls));
        let reply = of(&json!({"messages": many, "max_tokens": 1}));
        let refused = reply.body.contains("more than 200000 values");
        assert_eq!((reply.status, refused), (status, status == 400), "{}", reply.body);
    }
    let calls = |calls: Value| json!({"messages": [{"role": "assistant", "tool_calls": calls}]});
    for (body, says) in [
        (calls(json!(7)), "`messages[0]`: `tool_calls` must be an array, not 7"),
        (calls(json!(["x"])), "`messages[0].tool_calls[0]` must be an object"),
        (
            calls(json!([{}, {"function": 3}])),
            "`messages[0].tool_calls[1]`: `function` must be an object, not 3",
        ),
        (json!({}), "at least one"),
        (json!({"messages": [{"content": "a"}]}), "no `role`"),
        (json!({"messages": [{"role": "robot", "content": "a"}]}), "`messages[0].role` is `robot`"),
        (json!({"messages": messages, "tools": [tool], "parallel_tool_calls": 1}), "true or false"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "no text"),
        (json!({"messages": messages, "top_logprobs": 2}), "wants `logprobs`"),
        (json!({"messages": messages, "tools": [{"type": "x"}]}), "tools[0]"),
        (json!({"messages": messages, "tool_choice": "required"}), "no `tools`"),
        (json!({"messages": messages, "tool_choice": {"function": {"name": "g"}}}), "no function `g`"),
        (json!({"messages": messages, "response_format": {"type": "xml"}}), "json_object"),
        (
            json!({"messages": messages, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "q"}}}}),
            "schema",
        ),
        (
            json!({"messages": messages, "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}),
            "no text fits it",
        ),
    ] {
        let reply = of(&body);
        assert!(reply.status == 400 && reply.body.contains(says), "{body}: {}", reply.body);
    }
}

/// The tokenizer of bytes in the spelling of SentencePiece, whose decoder strips a text of its first space.
fn pieces() -> String {
    let mut json: Value = serde_json::from_str(&tokenizer()).unwrap();
    let spelled = |b: u32| match char::from_u32(b).filter(char::is_ascii_graphic) {
        Some(c) => c.to_string(),
        None if b == 32 => "▁".to_owned(),
        None => format!("<0x{b:02X}>"),
    };
    let vocab: Map<String, Value> = (0..256u32).map(|b| (spelled(b), b.into())).collect();
    json["model"]["vocab"] = vocab.into();
    json["pre_tokenizer"] = Value::Null;
    let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    json["decoder"] =
        json!({"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]});
    json.to_string()
}

/// A text that goes on has the space of its first word, also where a string might end it. A message has not.
fn first_words(at: &str) {
    // Nothing but spaces is allowed.
    let others = (0..V as u32).filter(|&id| id != 32);
    let bias: Map<String, Value> = others.map(|id| (id.to_string(), json!(-100))).collect();
    let body = json!({"prompt": [65, 66], "max_tokens": 3, "temperature": 0, "logit_bias": bias});
    let with = |name: &str, value: Value| {
        let mut body = body.clone();
        body[name] = value;
        body
    };
    assert_eq!(complete(at, &body).json()["choices"][0]["text"], "   ");
    let said = complete(at, &with("stream", json!(true))).said();
    let joined: String = said.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(joined, "   ");
    let value = complete(at, &with("stop", json!("  "))).json();
    assert_eq!(
        (&value["choices"][0]["text"], &value["usage"]["completion_tokens"]),
        (&json!(""), &json!(2)),
        "{value}"
    );
    let messages = json!([{"role": "user", "content": "a"}]);
    let value = ask(post(at, CHAT, with("messages", messages))).json();
    assert_eq!(value["choices"][0]["message"]["content"], "  ", "{value}");
}

/// The prompt begins thoughts: what a grammar holds is the answer all the same.
fn thoughts(at: &str) {
    let of = |body: &Value| ask(post(at, CHAT, body)).json()["choices"][0]["message"].clone();
    let mut body = json!({"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 20, "ignore_eos": true});
    let message = of(&body);
    assert!(message["content"] == "" && message["reasoning_content"].is_string(), "{message}");
    body["ignore_eos"] = json!(false);
    body["response_format"] = json!({"type": "json_schema", "json_schema": {"schema": {"const": "<think>"}}});
    let message = of(&body);
    assert!(message["content"] == "\"<think>\"" && message["reasoning_content"].is_null(), "{message}");
}

/// The toy, whose answers follow from its prompts.
struct Toy;

impl Model for Toy {
    fn case(&self, random: &mut Random) -> Case {
        // A few beginnings, so that prefixes are shared.
        let mut prompt = vec![random.below(3), 77, 78, 79, 80, 81];
        prompt.extend((0..random.below(20)).map(|_| random.below(4)));
        let body = json!({"prompt": prompt, "max_tokens": 1 + random.below(30), "temperature": 0});
        Case { path: COMPLETIONS, body, key: 0 }
    }

    fn judge(&self, case: &Case, answer: &Answer) -> Result<(), String> {
        let number = |value: &Value| value.as_u64().unwrap() as usize;
        let prompt: Vec<u32> =
            case.body["prompt"].as_array().unwrap().iter().map(|id| number(id) as u32).collect();
        let (text, finish) = expected(&prompt, number(&case.body["max_tokens"]));
        let right = (&*answer.text, &*answer.finish) == (&*text, finish);
        if right { Ok(()) } else { Err(format!("{answer:?} in place of {text:?}")) }
    }

    fn long(&self) -> Value {
        long()
    }

    fn too_large(&self) -> usize {
        5000
    }
}

/// 64 clients for five seconds: some break off, some ask for nonsense; all others get what a run by itself gives. `cargo xtask
/// torment-serve` has them ask a real model for two minutes.
fn many_clients(at: &str) {
    let done = Clients::new(at, &Toy, 64, Duration::from_secs(5)).run();
    assert!(done.failures.is_empty(), "{:#?}", done.failures);
    assert!(done.acts.iter().all(|(_, n)| *n > 0), "{:?}", done.acts);
    settled(at);
    assert!(metric(at, "moec_shared_tokens_total") > 0);
    let rows = metric(at, "moec_decode_rows_total") as f64 / metric(at, "moec_decode_steps_total") as f64;
    assert!(rows > 1.5, "{rows} rows in a step: sequences were not decoded together");
}
