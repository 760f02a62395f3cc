//! `run serve` on the demo model: OpenAI's own client, signals, and the answers of `run generate`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "../testing/clients/answer.rs"]
mod answer;
#[cfg(target_os = "linux")]
#[path = "../testing/hostile/mod.rs"]
#[allow(dead_code, reason = "the example prints what the test only judges")]
mod hostile;
use crate::support;

use answer::Answer;
use moec_ir::plan::{Paging, Plan};
use moec_testing::http::{Request, get, post};
use moec_testing::server::Server;
use moec_testing::{COREML, OPENAI};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::{Setup, built, clean, fails, ferris, moec, ok, root};

/// `moec run` with arguments `run`, for `BUNDLE serve`.
fn serve(run: &[&str], bundle: &Path, options: &[&str]) -> Command {
    let mut command = moec();
    command.arg("run").args(run).arg(bundle).args(["serve", "--port", "0", "--threads", "1"]).args(options);
    command
}

fn start(bundle: &Path, options: &[&str]) -> Server {
    Server::start(&mut serve(&[], bundle, options)).unwrap()
}

/// A request with a JSON body.
fn request(server: &Server, body: &Value) -> Request {
    post(server.address(), "/v1/completions", body)
}

/// Answers to requests that are sent at once.
fn together(server: &Server, bodies: &[Value]) -> Vec<Answer> {
    let answer_to = |body| Answer::of(&request(server, body).call().unwrap(), false).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = bodies.iter().map(|body| scope.spawn(move || answer_to(body))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn bundle(folder: &Path) -> PathBuf {
    let bundle = folder.join("ferris.moec");
    let setup = Setup { format: "bf16", chunk: 64, batch: &[1, 2, 4], context: 1024 };
    built(&setup.write(&ferris(), folder), &[], &bundle);
    bundle
}

/// Prompts are written out with the log-probabilities that the same tokens had as an answer, as evaluation
/// harnesses request them; the first token has none.
#[test]
fn prompts_are_echoed_with_their_log_probabilities() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(&bundle(folder.path()), &[]);
    let ask = |body: Value| -> Value {
        serde_json::from_str(&request(&server, &body).call().unwrap().body).unwrap()
    };
    let prompt = "The borrow checker rejects";
    let fields =
        json!({"prompt": prompt, "max_tokens": 7, "temperature": 0, "ignore_eos": true, "logprobs": 2});
    let answer = ask(fields.clone())["choices"][0].clone();
    let mut echoing = fields.clone();
    echoing["echo"] = json!(true);
    let both = ask(echoing)["choices"][0].clone();
    let all = format!("{prompt}{}", answer["text"].as_str().unwrap());
    assert_eq!(both["text"], all.as_str());
    // The same text as a prompt, with nothing after it, although a slot holds all of it.
    let scored = ask(json!({"prompt": all, "max_tokens": 0, "echo": true, "logprobs": 2, "stream": false}));
    assert_eq!(
        (&scored["usage"]["completion_tokens"], &scored["choices"][0]["finish_reason"]),
        (&json!(0), &json!("length"))
    );
    let scored = &scored["choices"][0];
    assert_eq!(
        (&scored["text"], &scored["logprobs"]["tokens"]),
        (&both["text"], &both["logprobs"]["tokens"])
    );
    let list = |of: &Value, name: &str| of["logprobs"][name].as_array().unwrap().clone();
    for (of, name) in [(&both, "token_logprobs"), (scored, "token_logprobs"), (scored, "top_logprobs")] {
        assert!(list(of, name)[0].is_null() && list(of, name).iter().skip(1).all(|v| !v.is_null()), "{of}");
    }
    assert_eq!(list(&both, "text_offset"), list(scored, "text_offset"));
    let (alone, whole) = (list(&answer, "token_logprobs"), list(scored, "token_logprobs"));
    for (answer, prompt) in alone.iter().zip(&whole[whole.len() - alone.len()..]) {
        let (answer, prompt) = (answer.as_f64().unwrap(), prompt.as_f64().unwrap());
        assert!((answer - prompt).abs() < 0.02, "{alone:?} {whole:?}");
    }
    let plain = ask(json!({"prompt": prompt, "max_tokens": 1, "echo": true, "temperature": 0}));
    assert!(
        plain["choices"][0]["text"].as_str().unwrap().starts_with(prompt)
            && plain["choices"][0]["logprobs"].is_null()
    );
    let chat = request(&server, &json!({"prompt": prompt, "max_tokens": 0})).call().unwrap();
    assert!(chat.status == 400 && chat.body.contains("max_tokens"), "{}", chat.body);
}

#[test]
fn openai_client_works_with_the_server() {
    if !OPENAI.met_or_skip() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path());
    let template = root().join("golden/plain.jinja");
    // Ferris is a base model: without a template the server continues texts, with one it also chats.
    for (options, talks) in [(&[][..], "0"), (&["--template", template.to_str().unwrap()], "1")] {
        let server = start(&bundle, options);
        let mut python = clean(Command::new(moec_testing::openai().unwrap()));
        let url = format!("http://{}", server.address());
        ok(python.arg(root().join("golden/openai/ask.py")).args([&*url, talks]));
    }
}

#[test]
fn served_answers_equal_generate_and_finish_after_sigterm() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path());
    let prompt = "The borrow checker";
    let args = ["generate", "--prompt", prompt, "-n", "40", "--ignore-eos", "--json"];
    let alone = ok(moec().arg("run").arg(&bundle).args(args));
    let alone: Value = serde_json::from_slice(&alone.stdout).unwrap();
    let mut server = start(&bundle, &["--exact"]);
    let body = json!({"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": true});
    assert!(together(&server, &vec![body; 6]).iter().all(|answer| answer.text == alone["text"]));
    // A running answer is completed; then the server ends without an error.
    let body =
        json!({"prompt": prompt, "max_tokens": 400, "temperature": 0, "stream": true, "ignore_eos": true});
    let mut last = request(&server, &body).send().unwrap();
    assert!(last.event().unwrap().is_some());
    server.signal("-TERM").unwrap();
    let rest = last.whole().unwrap().body;
    assert!(rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(server.ended(Duration::from_mins(1)).unwrap().code(), Some(0));
}

/// A bundle's own `run` and `moec run` start worker processes for grammars. A short schema with an expensive
/// grammar is refused, and other requests are answered.
#[test]
fn both_programs_constrain_answers_to_schemas() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup { format: "bf16", chunk: 64, batch: &[1, 2], context: 256 };
    let bundle = folder.path().join("ferris.moec");
    ok(moec().arg("build").arg(setup.write(&ferris(), folder.path())).args(["--quiet", "-o"]).arg(&bundle));
    let template = root().join("golden/plain.jinja");
    let options = ["--template", template.to_str().unwrap()];
    let mut own = clean(Command::new(bundle.join("run")));
    own.args(["serve", "--port", "0", "--threads", "1"]).args(options);
    let pattern = |i: u8| json!({"type": "string", "pattern": format!(".*[a-{}].{{{}}}.*", char::from(b'b' + i), 10 + i)});
    let endless = json!({"allOf": (0..16).map(pattern).collect::<Vec<_>>()});
    for mut command in [own, serve(&[], &bundle, &options)] {
        let mut server = Server::start(&mut command).unwrap();
        let of = |schema: &Value| {
            let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
            let body = json!({"messages": [{"role": "user", "content": "a"}], "response_format": format, "max_tokens": 20});
            post(server.address(), "/v1/chat/completions", &body).call().unwrap()
        };
        let held = of(&json!({"enum": ["ab", "cd"]}));
        assert!(held.body.contains(r#""\"ab\"""#) || held.body.contains(r#""\"cd\"""#), "{}", held.body);
        let refused = of(&endless);
        assert!(refused.status == 400 && refused.body.contains("takes more than"), "{}", refused.body);
        server.signal("-TERM").unwrap();
        assert_eq!(server.ended(Duration::from_mins(1)).unwrap().code(), Some(0));
    }
}

/// Bundles whose experts are not all in memory: name, additions to `model.toml`, target, options of `moec
/// run`, whether answers can be bit-identical to single runs.
type Kind = (&'static str, &'static str, &'static str, &'static [&'static str], bool);
const KINDS: [Kind; 4] = [
    ("big-little", "[decode]\nbig_little = true\n", "native", &[], true),
    ("disk", "[memory]\nbudget = \"1 GiB\"\nthreads = 1\n", "native", &[], true),
    (
        "policy",
        "[placement]\npolicy = \"moec\"\nexperts = \"mirror:30%\"\n",
        "targets/mirror/mirror.toml",
        &["--emulate"],
        false,
    ),
    ("capacities", CAPACITIES, "m2-ultra", &["--emulate"], true),
];
const CAPACITIES: &str =
    "[placement]\nexperts = \"npu\"\n[calibrate]\nprofile = \"PROFILE\"\n[experts]\noverflow = \"prune\"\n";

/// For any kind of bundle, concurrent clients get the answers of single runs: bit for bit with `--exact`,
/// otherwise up to rounding. If `--exact` is impossible, the server reports it.
#[test]
fn concurrent_clients_get_the_answers_of_single_runs() {
    for (name, more, target, run, exact) in KINDS {
        if target == "m2-ultra" && !COREML.met_or_skip() {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let bundle = kind(folder.path(), more, target);
        let budget = budget(&bundle);
        let serve = |options: &[&str]| {
            let mut command = serve(run, &bundle, options);
            command.args(&budget);
            command
        };
        let prompts = [
            "The borrow checker",
            "The borrow checker says",
            "A trait is",
            "Each value in Rust has",
            "fn main() {",
        ];
        let body = |prompt: &str| json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true, "logprobs": 5});
        let server = Server::start(&mut serve(&[])).unwrap();
        let bodies = prompts.map(body);
        let alone: Vec<Answer> =
            bodies.iter().flat_map(|body| together(&server, std::slice::from_ref(body))).collect();
        for (found, alone) in together(&server, &bodies).iter().zip(&alone) {
            found.leaves(alone).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        let figures = get(server.address(), "/metrics").call().unwrap().body;
        let routed = figures.lines().find_map(|l| l.strip_prefix("moec_expert_rows_total "));
        assert_eq!(routed.is_some_and(|n| n != "0"), name == "capacities", "{figures}");
        assert_eq!(figures.contains("moec_expert_rows_past_capacity_expected "), name == "capacities");
        drop(server);
        if !exact {
            let (_, stderr) = fails(&mut serve(&["--exact"]));
            assert!(stderr.contains("assigned to units"), "{name}: {stderr}");
            continue;
        }
        let server = Server::start(&mut serve(&["--exact"])).unwrap();
        for (found, prompt) in together(&server, &bodies).iter().zip(prompts) {
            let mut single = moec();
            single.arg("run").args(run).arg(&bundle).args(["generate", "--json", "--ignore-eos", "-n", "12"]);
            let single = ok(single.args(["--threads", "1", "--prompt", prompt]).args(&budget));
            let single: Value = serde_json::from_slice(&single.stdout).unwrap();
            assert_eq!(single["text"], found.text, "{name}");
        }
    }
}

/// Builds the demo model for four concurrent sequences, with these additions to `model.toml`.
fn kind(folder: &Path, more: &str, target: &str) -> PathBuf {
    let at = |name: &str| folder.join(name);
    let setup = Setup { format: "bf16", chunk: 16, batch: &[1, 2, 4], context: 128 };
    let toml = setup.write(&ferris(), folder);
    let shapes = fs::read_to_string(&toml).unwrap();
    if more.contains("PROFILE") {
        let text = ferris().join("eval/calibration.txt");
        let mut calibrate = moec();
        calibrate.args(["calibrate", "--quiet", "--tokens", "512", "--text"]).arg(text).arg(&toml);
        ok(calibrate.arg("-o").arg(at("p.trace")));
    }
    let more = more.replace("PROFILE", at("p.trace").to_str().unwrap());
    fs::write(&toml, format!("{shapes}{more}")).unwrap();
    let mut target = target.to_owned();
    if root().join(&target).is_file() {
        // A modelled unit needs its memory and, for this test, the times of experts.
        let mut device = fs::read_to_string(root().join(&target)).unwrap();
        for (memory, ms) in [("ram", 2.0), ("vram", 0.2)] {
            let line = format!("memory = \"{memory}\"\n");
            let costs =
                format!("matmul = [{{ rows = 1, weights = 1000000, ms = {ms}, source = \"assumed\" }}]\n");
            assert!(device.contains(&line));
            device = device.replacen(&line, &format!("{line}{costs}"), 1);
        }
        fs::write(at("device.toml"), device).unwrap();
        at("device.toml").to_str().unwrap().clone_into(&mut target);
    }
    built(&toml, &["--target", &target], &at("b"));
    at("b")
}

/// The budget option with room for resident data and some of the experts, if experts are on disk.
fn budget(bundle: &Path) -> Vec<String> {
    let plan = Plan::decode(&fs::read(bundle.join("plan.bin")).unwrap()).unwrap();
    let least = |p: &Paging| p.resident + p.process + (u64::from(p.staging) + 12) * p.frame_bytes;
    plan.paging.iter().flat_map(|p| ["--budget".to_owned(), least(p).to_string()]).collect()
}

/// Plays a tenth of the requests of `cargo xtask hostile-requests`.
#[cfg(target_os = "linux")]
#[test]
fn hostile_requests_neither_stop_the_server_nor_fill_its_memory() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = hostile::Bundle {
        moec: moec().get_program().into(),
        folder: bundle(folder.path()),
        source: ferris(),
        template: root().join("golden/plain.jinja"),
        scratch: folder.path().to_owned(),
    };
    let played = hostile::CASES.iter().filter(|case| case.in_test);
    let failed: Vec<String> = played
        .filter_map(|case| Some(format!("{}: {}", case.name, hostile::play(case, &bundle).err()?)))
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// One line per request, as text or JSON; none by default.
#[test]
fn requests_are_logged_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path());
    let log = |options: &[&str]| {
        let path = folder.path().join("stderr");
        let mut command = serve(&[], &bundle, options);
        let mut server = Server::start(command.stderr(fs::File::create(&path).unwrap())).unwrap();
        let body = json!({"prompt": "A trait is", "max_tokens": 5, "temperature": 0, "ignore_eos": true, "stream": true});
        let whole = request(&server, &body).call().unwrap();
        assert!(whole.body.contains("data: [DONE]"), "{}", whole.body);
        let lost = get(server.address(), "/nothing?secret").call().unwrap();
        assert_eq!(lost.status, 404);
        server.signal("-TERM").unwrap();
        server.ended(Duration::from_mins(1)).unwrap();
        fs::read_to_string(path).unwrap()
    };
    let silent = log(&[]);
    assert!(
        !silent.contains("/nothing") && silent.contains("serving ferris: 4 sequences at a time"),
        "{silent}"
    );
    let text = log(&["-v"]);
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("method=")).collect();
    assert_eq!(lines.len(), 2, "{text}");
    for part in [
        "method=POST",
        "path=\"/v1/completions\"",
        "status=200",
        "cached_tokens=0",
        "completion_tokens=5",
        "first_token_ms=",
        "total_ms=",
        "complete=true",
    ] {
        assert!(lines[0].contains(part), "{part}: {text}");
    }
    assert!(
        lines[1].contains("status=404 error=\"unknown endpoint\"")
            && !lines[0].contains("error=")
            && !lines[1].contains("tokens")
            && !text.contains("secret"),
        "{text}"
    );
    let text = log(&["--log", "json"]);
    let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!(lines.len(), 2, "{text}");
    let first = &lines[0];
    assert_eq!(
        (&first["path"], &first["status"], &first["completion_tokens"]),
        (&json!("/v1/completions"), &json!(200), &json!(5))
    );
    assert!(first["prompt_tokens"].as_u64() > Some(2), "{first}");
    let [start, end] = ["first_token_ms", "total_ms"].map(|name| first[name].as_f64().unwrap());
    assert!(start <= end && first["timestamp"].is_string() && first["error"].is_null(), "{first}");
    assert_eq!(lines[1]["error"], "unknown endpoint", "{text}");
}
