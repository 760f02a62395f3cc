//! `chat` from a user's view, with the small model of the runtime's tests.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

#[path = "../../runtime/tests/common/mod.rs"]
mod common;

use common::*;
use moec_ir::plan::FileRef;
use moec_runtime::CheckLevel;
use moec_runtime::bundle::BundleReader;
use moec_runtime::cli::{Front, Io};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::Read;
use std::path::Path;

const TEMPLATE: &str = "{% if shout is defined %}!{% endif %}{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}";

struct ProcessOutput {
    status: u8,
    out: String,
    err: String,
}

impl ProcessOutput {
    /// One object for each answer.
    fn answers(&self) -> Vec<Value> {
        self.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// The process that renders templates: this program, run with the name of this test.
#[test]
fn bounded_worker() {
    moec_service::worker::run().unwrap();
}

/// A bundle with a tokenizer and a template.
fn talking() -> tempfile::TempDir {
    let dir = bundle();
    add_tokenizer(dir.path());
    let templates = json!({"templates": {"default": TEMPLATE}, "tokens": {"bos_token": "<s>"}});
    std::fs::write(dir.path().join("artifacts/chat_template.json"), templates.to_string()).unwrap();
    dir
}

fn chat(bundle: &Path, args: &str, input: &str) -> ProcessOutput {
    subcommand(&moec_service::front(&[]), bundle, &format!("chat {args}"), input)
}

fn subcommand(front: &Front<'_>, bundle: &Path, args: &str, input: &str) -> ProcessOutput {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut input = input.as_bytes();
    let io = Io { input: Some(&mut input as &mut dyn Read), out: &mut out, err: &mut err };
    let args = args.split_whitespace().map(OsString::from);
    let status = front.run_with(&program(&ENTRIES), bundle, args, io);
    let text = |b| String::from_utf8(b).unwrap();
    ProcessOutput { status, out: text(out), err: text(err) }
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[test]
fn each_chat_turn_prefills_only_new_tokens() {
    let dir = talking();
    let done = chat(dir.path(), "--json -n 4 --regex [a-d]{9} --temperature 1", "hi\nho\n\nhe\n");
    assert_eq!((done.status, &*done.err), (0, ""));
    let answers = done.answers();
    assert_eq!(answers.len(), 3);
    let mut prompt = String::new();
    let mut before = 0;
    for (answer, said) in answers.iter().zip(["hi", "ho", "he"]) {
        prompt = [&*prompt, "[u]", said, "[a]"].concat();
        assert_eq!(answer["prompt_tokens"], prompt.len());
        // Everything is reused except the answer's last token, which was never fed back.
        assert_eq!(answer["kept_tokens"], before);
        assert_eq!(answer["prefilled_tokens"], prompt.len() - before);
        let text = answer["text"].as_str().unwrap();
        assert!(text.len() == 4 && text.bytes().all(|b| (b'a'..=b'd').contains(&b)), "{text}");
        assert_eq!(answer["end"], "length");
        prompt.push_str(text);
        before = prompt.len() - 1;
    }
}

#[test]
fn chat_answers_match_whole_prompts() {
    let dir = talking();
    let done = chat(dir.path(), "--json -n 3 --temperature 0 --system s", "hi\nho\n");
    let answers = done.answers();
    let first = ids("[s]s[u]hi[a]");
    assert_eq!(answers[0]["ids"], json!(continuation(&first, 3)));
    // The next prompt contains the text that the answer was decoded to.
    let second = format!("[s]s[u]hi[a]{}[u]ho[a]", answers[0]["text"].as_str().unwrap());
    assert_eq!(answers[1]["ids"], json!(continuation(&ids(&second), 3)));
    assert!(answers[1]["kept_tokens"].as_u64().unwrap() >= first.len() as u64);
}

/// A conversation that exceeds the context continues without its oldest turns, but with its system message.
#[test]
fn a_full_context_drops_the_oldest_turns() {
    let dir = talking();
    let lines = "0123456789\n".repeat(9);
    let done = chat(dir.path(), "--json -n 8 --system s --regex [a-d]{8}", &lines);
    assert_eq!(done.status, 0, "{}", done.err);
    let answers = done.answers();
    assert_eq!(answers.len(), 9);
    let turn_bytes = "[u]0123456789[a]".len() + 8;
    let prompt = |turns: usize| "[s]s".len() + turns * turn_bytes - 8;
    let prompts: Vec<usize> = answers.iter().map(|a| a["prompt_tokens"].as_u64().unwrap() as usize).collect();
    // Two turns and an answer fit. With three, fewer than eight tokens of the context of 64 are left.
    assert_eq!(prompts[..3], [prompt(1), prompt(2), prompt(2)], "{prompts:?}");
    assert!(
        prompts.iter().all(|tokens| tokens + 8 <= 64)
            && answers.iter().all(|a| a["ids"].as_array().unwrap().len() == 8)
    );
    // After the first note two turns fit, so each note reports more dropped turns than the one before.
    let notes: Vec<&str> =
        done.err.lines().filter(|line| line.contains("no longer sees the oldest")).collect();
    let counts: Vec<usize> =
        notes.iter().map(|note| note.split(' ').find_map(|word| word.parse().ok()).unwrap_or(1)).collect();
    assert!(counts.len() > 1 && counts.is_sorted_by(|a, b| a < b), "{notes:?}");
}

/// Defaults are those that the model's authors recommend; the seed of an answer reproduces it.
#[test]
fn sampling_defaults_are_the_models_and_seeds_are_shown() {
    let dir = talking();
    let of = |args: &str| chat(dir.path(), &format!("--json -n 20 {args}"), "hi\n").answers().remove(0);
    let seeds = [of(""), of("")].map(|answer| answer["seed"].as_u64().unwrap());
    assert_ne!(seeds[0], seeds[1]);
    let (first, again) =
        (of("--temperature 2"), |seed: &Value| of(&format!("--temperature 2 --seed {seed}")));
    assert_eq!(again(&first["seed"])["ids"], first["ids"]);
    assert_ne!(again(&json!(first["seed"].as_u64().unwrap() + 1))["ids"], first["ids"]);
    let advise = |text: &str| std::fs::write(dir.path().join("artifacts/sampling.json"), text).unwrap();
    let greedy =
        json!(continuation(&ids("[u]hi[a]"), 20).into_iter().take_while(|&id| id != EOS).collect::<Vec<_>>());
    let without_end = |answer: Value| {
        answer["ids"].as_array().unwrap().iter().filter(|id| **id != EOS).cloned().collect::<Value>()
    };
    advise(r#"{"do_sample": false}"#);
    assert_eq!(without_end(of("")), greedy);
    assert_ne!(without_end(of("--temperature 2 --seed 1")), greedy);
    advise(r#"{"temperature": 2, "top_k": 1}"#);
    assert_eq!(without_end(of("")), greedy);
    assert_ne!(without_end(of("--top-k 0 --seed 1")), greedy);
    let shown = chat(dir.path(), "--seed 9", "");
    assert!(shown.err.contains("temperature 2, top_k 1; seed 9"), "{}", shown.err);
    advise("[]");
    let refused = chat(dir.path(), "", "hi\n");
    assert!(refused.status == 1 && refused.err.contains("sampling.json"), "{}", refused.err);
}

/// Every file is compared with its hash when it is read, whatever was checked before.
#[test]
fn changed_bundle_files_are_rejected_when_read() {
    let dir = talking();
    std::fs::write(dir.path().join("artifacts/sampling.json"), "{}").unwrap();
    let run = |files: &BundleReader, args: &str| {
        let front = Front { files: Some(files), ..moec_service::front(&[]) };
        let done = subcommand(&front, dir.path(), args, "hi\n");
        assert_eq!(done.status, 1, "{args}: {}", done.out);
        done.err
    };
    for (name, args) in [
        ("artifacts/sampling.json", "chat"),
        ("artifacts/chat_template.json", "chat"),
        ("artifacts/tokenizer.json", "chat"),
        ("artifacts/tokenizer.json", "generate --prompt a -n 1"),
        ("artifacts/tokenizer.json", "generate --ids 97 -n 1"),
        ("artifacts/tokenizer.json", "generate --ids 97 -n 1 --regex [ab]"),
        ("artifacts/tokenizer.json", "serve --port 0"),
        ("artifacts/sampling.json", "serve --port 0"),
    ] {
        let bytes = std::fs::metadata(dir.path().join(name)).unwrap().len();
        let listed = [FileRef { path: name.to_owned(), bytes, sha256: [0; 32] }];
        let err = run(&BundleReader::of_manifest(dir.path(), &listed, CheckLevel::Small), args);
        assert!(err.contains(name) && err.contains("was changed after the build"), "{args}: {err}");
    }
    let err = run(&BundleReader::of_manifest(dir.path(), &[], CheckLevel::All), "chat");
    assert!(err.contains("sampling.json` is not in the bundle's manifest"), "{err}");
}

#[test]
fn commands() {
    let dir = talking();
    let file = dir.path().join("talk.json");
    let script = format!(
        "/set temperature 2\n/set seed 3\nhi\n/regenerate\n/save {0}\n/reset\n/load {0}\n/system be brief\nhi\n/help\n/quit\nnever",
        file.display()
    );
    let done = chat(dir.path(), "--json -n 2 --regex [a-d]{2}", &script);
    assert_eq!(done.status, 0, "{}", done.err);
    let answers = done.answers();
    assert_eq!(answers.len(), 3);
    // A regenerated answer: the same prompt, cached except for its last token, with another seed.
    assert_eq!(answers[1]["kept_tokens"], 7);
    assert_eq!(answers[2]["prompt_tokens"], "[s]be brief[u]hi[a]".len());
    let saved: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(saved["messages"][0], json!({"role": "user", "content": "hi"}));
    assert_eq!(saved["messages"][1]["content"], answers[1]["text"]);
    assert!(
        done.err.contains("wrote 2 messages")
            && done.err.contains("read 2 messages")
            && done.err.contains("/regenerate")
    );
    for (line, words) in [
        ("/nothing", "no command `/nothing`"),
        ("/set temperature hot", "`hot` is not a value of temperature"),
        ("/set top_p 2", "top_p must be above 0, up to 1"),
        ("/set temperature 9", "temperature must be from 0 to 2"),
        ("/set nonsense", "`nonsense` cannot be set"),
        ("/set nonsense 3", "seed; variables of the chat template: shout\n"),
        ("/set", "`/set` takes a name and a value"),
        ("/set shout", "`/set shout` takes a value"),
        ("/load /nowhere", "cannot read a conversation from `/nowhere`"),
        ("/regenerate", "no answer yet"),
        ("/save", "the name of a file is missing"),
    ] {
        let done = chat(dir.path(), "", line);
        assert!(done.status != 0 && done.err.contains(words), "{line}: {}", done.err);
    }
}

/// Without a terminal, failing lines are reported by number, and the others are answered.
#[test]
fn invalid_script_lines_do_not_end_the_chat() {
    let dir = talking();
    let long = "x".repeat(80);
    let script = format!("hi\n/nothing\n{long}\n/set nonsense 3\n/set shout 1\n/reset\nho\n");
    let done = chat(dir.path(), "--json -n 2 --regex [a-d]{2}", &script);
    let answers = done.answers();
    assert_eq!((done.status, answers.len()), (1, 2), "{}", done.err);
    assert_eq!(answers[1]["prompt_tokens"], "![u]ho[a]".len(), "a variable of the template is set");
    for words in ["line 2: there is no command", "line 3: the prompt has", "line 4: `nonsense`", "3 lines of"]
    {
        assert!(done.err.contains(words), "{words}: {}", done.err);
    }
}

#[test]
fn the_same_answer_at_temperature_0_is_explained() {
    let dir = talking();
    let again = |args: &str| chat(dir.path(), &format!("-n 3 --quiet {args}"), "hi\n/regenerate\n");
    let done = again("--temperature 0");
    let answers: Vec<&str> = done.out.lines().collect();
    assert_eq!((done.status, answers[0]), (0, answers[1]));
    assert!(done.err.contains("`/set temperature 0.8`"), "{}", done.err);
    assert!(!again("--temperature 2").err.contains("/set temperature"));
}

#[test]
fn stop_strings_are_not_printed() {
    let dir = talking();
    let whole = chat(dir.path(), "-n 8 --quiet --regex [a-d]{8} --temperature 2 --seed 1", "hi\n").out;
    let stop = &whole[3..5];
    let at = whole.find(stop).unwrap();
    let done = chat(
        dir.path(),
        &format!("-n 8 --quiet --regex [a-d]{{8}} --temperature 2 --seed 1 --stop {stop}"),
        "hi\n",
    );
    assert_eq!(done.out, format!("{}\n", &whole[..at]));
    assert_eq!(done.err, "");
}

#[test]
fn constrained_answer_is_not_split_into_reasoning() {
    let dir = talking();
    let template = dir.path().join("template");
    std::fs::write(&template, "{{ messages[-1].content }}<think>{# </think> #}").unwrap();
    let schema = dir.path().join("schema");
    std::fs::write(&schema, r#"{"const": "<think>"}"#).unwrap();
    let of = |grammar: &str| {
        let done = chat(dir.path(), &format!("--json --template {} {grammar}", template.display()), "hi\n");
        let answer = done.answers().remove(0);
        (answer["reasoning"].clone(), answer["text"].clone())
    };
    assert_eq!(of(&format!("--json-schema {}", schema.display())), (Value::Null, json!("\"<think>\"")));
    assert_eq!(of("--regex ab"), (Value::Null, json!("ab")));
    // An answer that contains the closing tag ends the reasoning with it.
    assert_eq!(of("--regex ab</think>cd"), (json!("ab"), json!("cd")));
}

#[test]
fn only_the_template_can_insert_special_tokens() {
    let dir = talking();
    let template = dir.path().join("template");
    std::fs::write(&template, "{{ bos_token }}{{ messages[-1].content }}").unwrap();
    let of = |text: &str| {
        let done = chat(dir.path(), &format!("--json -n 1 --template {}", template.display()), text);
        done.answers()[0]["prompt_tokens"].as_u64().unwrap()
    };
    // One token, and five letters.
    assert_eq!(of("hello"), 1 + 5);
    // Text that looks like a special token is encoded as characters.
    assert_eq!(of("a<s>b</s>"), 1 + 9);
}

#[test]
fn impossible_chat_options_are_reported() {
    let dir = talking();
    std::fs::remove_file(dir.path().join("artifacts/chat_template.json")).unwrap();
    let done = chat(dir.path(), "", "hi\n");
    assert_eq!(done.status, 1);
    assert!(
        done.err.contains("no chat template") && done.err.contains("run generate --prompt TEXT"),
        "{}",
        done.err
    );
    let dir = talking();
    let done = chat(dir.path(), "", &"x".repeat(80));
    assert!(done.err.contains("the context holds 64") && done.err.contains("/reset"), "{}", done.err);
    let done = chat(dir.path(), "--regex (", "hi\n");
    assert!(done.err.contains("the regular expression cannot be used"), "{}", done.err);
    std::fs::write(dir.path().join("artifacts/chat_template.json"), "[]").unwrap();
    assert!(chat(dir.path(), "", "hi\n").err.contains("`templates` is not a table of texts"));
}

/// The process that [`chat_works_in_a_terminal`] starts.
#[test]
#[ignore = "is started by another test, in a terminal"]
fn child() {
    let bundle = std::env::var_os("MOEC_CHAT_BUNDLE").unwrap();
    let args = ["chat", "-n", "3", "--regex", "[a-d]{3}", "--quiet"].map(OsString::from);
    let status = moec_service::front(&[]).run(&program(&ENTRIES), Path::new(&bundle), args.into_iter());
    assert_eq!(status, 0);
}

/// In a pseudo-terminal: an answer, an interrupt at the prompt, an unknown command, another answer, the end.
/// The history is saved.
#[test]
#[cfg(unix)]
fn chat_works_in_a_terminal() {
    let dir = talking();
    let script = r#"
import os, pty, re, select, sys, time
exe, wanted = sys.argv[1], [(b"hi\r", rb"[a-d]{3}\r\n"), (b"\x03", rb"> "), (b"/nothing\r", rb"no command"), (b"ho\r", rb"[a-d]{3}\r\n")]
pid, fd = pty.fork()
if pid == 0:
    os.execv(exe, [exe, "--ignored", "--exact", "child", "--nocapture", "--test-threads", "1"])
seen = b""
def until(pattern, start):
    global seen
    end = time.time() + 60
    while not re.search(pattern, seen[start:]):
        if time.time() > end: sys.exit("no %r in %r" % (pattern, seen[start:]))
        if select.select([fd], [], [], 1)[0]:
            try: seen += os.read(fd, 4096)
            except OSError: sys.exit("it ended: %r" % seen)
until(rb"> ", 0)
for keys, pattern in wanted:
    start = len(seen)
    os.write(fd, keys)
    until(pattern, start)
    until(rb"> ", start)
os.write(fd, b"\x04")
end = time.time() + 60
while time.time() < end:
    try: seen += os.read(fd, 4096)
    except OSError: break
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"#;
    if !moec_testing::PYTHON.met_or_skip() {
        return;
    }
    let done = std::process::Command::new("python3")
        .args(["-c", script])
        .arg(std::env::current_exe().unwrap())
        .env("MOEC_CHAT_BUNDLE", dir.path())
        .env("XDG_STATE_HOME", dir.path())
        .env("TERM", "xterm")
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let history = std::fs::read_to_string(dir.path().join("moec/chat_history")).unwrap();
    assert!(history.contains("hi\n") && history.contains("ho\n"), "{history}");
}
