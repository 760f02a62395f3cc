//! Requests with known answers: those of a single process.

use crate::clients::{Answer, CHAT, COMPLETIONS, Case, GAP, Model, Random};
use crate::{Args, BODY};
use moec_testing::http::post;
use serde_json::{Value, json};
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Texts that are continued, and messages that are answered.
const TEXTS: usize = 24;
const MESSAGES: usize = 8;
/// Bytes from one beginning to the next in the text. Four neighbours share a beginning.
const STRIDE: usize = 900;
/// Tokens whose log-probabilities are requested at each place.
const TOP_LOGPROBS: usize = 5;
/// A request and its answer.
struct One {
    path: &'static str,
    body: Value,
    answer: Answer,
}

/// All of them.
pub(crate) struct Known {
    all: Arc<Vec<One>>,
    /// Whether answers must be the same to the bit.
    pub(crate) exact: bool,
    judged: Judged,
}

/// Judgements so far.
#[derive(Default)]
struct Judged {
    same: AtomicU64,
    tokens: AtomicU64,
    other: AtomicU64,
    /// The widest gap, in millionths of a nat.
    widest: AtomicU64,
}

impl Known {
    /// Queries an idle server, and compares its answers with those of `run generate` and `run chat`.
    pub(crate) fn of(args: &Args) -> Result<Self, String> {
        let server = args.serve(true)?;
        let text =
            std::fs::read_to_string(&args.text).map_err(|e| format!("`{}`: {e}", args.text.display()))?;
        let mut all = Vec::new();
        for i in 0..TEXTS + MESSAGES {
            let words = words(&text, i);
            let n = 8 + 7 * (i % 9);
            let (path, mut body) = if i < TEXTS {
                (
                    COMPLETIONS,
                    json!({"prompt": words, "max_tokens": n, "ignore_eos": true, "logprobs": TOP_LOGPROBS}),
                )
            } else {
                let messages = json!([{"role": "user", "content": words}]);
                let body = json!({"messages": messages, "max_tokens": n, "logprobs": true, "top_logprobs": TOP_LOGPROBS});
                (CHAT, body)
            };
            body["temperature"] = json!(0);
            let reply = post(server.address(), path, &body).call().map_err(|e| e.to_string())?;
            let answer = Answer::of(&reply, false)?;
            let alone = if i < TEXTS { generated(args, &words, n)? } else { chat_text(args, &words, n)? };
            if answer.text != alone {
                return Err(format!(
                    "{body}: a server with one client answers {:?} in place of {alone:?}",
                    answer.text
                ));
            }
            all.push(One { path, body, answer });
        }
        Ok(Self { all: Arc::new(all), exact: false, judged: Judged::default() })
    }

    /// The same for one half of the time, before any comparison. `exact`: whether answers must be the same to
    /// the bit.
    pub(crate) fn exact(&self, exact: bool) -> Self {
        Self { all: Arc::clone(&self.all), exact, judged: Judged::default() }
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn name(&self) -> &'static str {
        if self.exact { "with `--exact`" } else { "without `--exact`" }
    }

    /// Judgements, in words.
    pub(crate) fn summary(&self) -> String {
        let of = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let Judged { same, tokens, other, widest } = &self.judged;
        let (same, tokens, other) = (of(same), of(tokens), of(other));
        if self.exact {
            return format!("all {same} equal to the bit to those of single runs, {tokens} tokens");
        }
        format!(
            "{same} of {} equal to those of single runs, {tokens} tokens; the {other} others so up to the first token that led another by \
             less than {GAP} nats, {:.4} at most",
            same + other,
            of(widest) as f64 / 1e6,
        )
    }
}

impl Model for Known {
    fn case(&self, random: &mut Random) -> Case {
        let key = random.below(self.all.len() as u32) as usize;
        let One { path, body, .. } = &self.all[key];
        Case { path, body: body.clone(), key }
    }

    fn judge(&self, case: &Case, answer: &Answer) -> Result<(), String> {
        let alone = &self.all[case.key].answer;
        let Judged { same, tokens, other, widest } = &self.judged;
        let left = answer.leaves(alone)?;
        if self.exact && left.is_some() {
            return Err(format!("{:?} in place of {:?}", answer.text, alone.text));
        }
        let (count, equal) = match left {
            None => (same, alone.tokens.len()),
            Some((place, gap)) => {
                widest.fetch_max((gap * 1e6) as u64, Ordering::Relaxed);
                (other, place)
            }
        };
        count.fetch_add(1, Ordering::Relaxed);
        tokens.fetch_add(equal as u64, Ordering::Relaxed);
        Ok(())
    }

    fn long(&self) -> Value {
        // As many sequences as there are slots, each to the end of the context.
        json!({"prompt": "The borrow checker", "n": 8, "max_tokens": 1000, "temperature": 1.0, "stream": true, "ignore_eos": true})
    }

    fn too_large(&self) -> usize {
        BODY + 1
    }
}

/// A part of the text, on one line: four of them share a beginning and have different lengths.
fn words(text: &str, i: usize) -> String {
    let from = (i / 4) * STRIDE % text.len().max(1);
    let length = 20 + 90 * (i % 4);
    let part = text.chars().skip(from).take(length).collect::<String>();
    part.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Output of `run generate`.
fn generated(args: &Args, prompt: &str, n: usize) -> Result<String, String> {
    let mut command = args.subcommand("generate");
    command.args(["--json", "--ignore-eos", "--prompt", prompt, "-n", &n.to_string()]);
    text_of(&mut command, "")
}

/// Output of `run chat`.
fn chat_text(args: &Args, message: &str, n: usize) -> Result<String, String> {
    let mut command = args.subcommand("chat");
    command.args(["--json", "--temperature", "0", "-n", &n.to_string(), "--template"]).arg(&args.template);
    text_of(&mut command, message)
}

/// The `text` of the object that a command prints.
fn text_of(command: &mut Command, input: &str) -> Result<String, String> {
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let failed = |e: std::io::Error| format!("{command:?}: {e}");
    let mut child = child.map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes()).map_err(failed)?;
    }
    let done = child.wait_with_output().map_err(failed)?;
    let value: Value = serde_json::from_slice(&done.stdout).map_err(|e| format!("{command:?}: {e}"))?;
    value["text"].as_str().map(str::to_owned).ok_or_else(|| format!("{command:?} says no text"))
}
