//! Recurrent states (Qwen3-Next's, Kimi Linear's, Granite 4's). Prefixes of prompts are reused from
//! snapshots, by clients of a server, in conversations, and from files. Tokens are those of a run that
//! computes the whole prompt.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_bundle::read::Bundle;
use moec_runtime::serving::scheduler::{Setting, Sharing};
use moec_runtime::{Decoder, Engine, LogitRows, Request, Sampler, Sampling, generate};
use moec_testing::http::{get, post};
use moec_testing::server::Server;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Stdio;
use support::{
    Setup, WORDS, built, checkpoint, expected, json_of, list, moec, served, with_plan, with_words,
};
use tempfile::TempDir;

const CONTEXT: usize = 256;
const CHUNK: usize = 16;
/// Models with recurrent states: delta rules with one decay per head and per channel, and state-space models.
const HYBRIDS: [&str; 3] = ["qwen3_next", "kimi_linear", "granitemoehybrid"];

/// A chat template: a word for each role, and the text.
const TEMPLATE: &str = "{% for m in messages %}{{ {'system': 'w1', 'user': 'w2', 'assistant': 'w3'}[m.role] }} {{ m.content | trim }} \
                        {% endfor %}{% if add_generation_prompt %}w3{% endif %}";

/// A compiled tiny checkpoint with the words `w0` … `w319`.
struct Case {
    folder: TempDir,
}

impl Case {
    fn new(family: &str, batch: &[usize]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("hf");
        with_words(family, &source);
        fs::write(folder.path().join("words.jinja"), TEMPLATE).unwrap();
        let setup = Setup { format: "f32", chunk: CHUNK, batch, context: CONTEXT };
        let case = Self { folder };
        built(&setup.write(&source, case.folder.path()), &["--target", "native"], &case.bundle());
        case
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn bundle(&self) -> PathBuf {
        self.path("b")
    }

    /// Number of tokens between snapshots, from `info`.
    fn distance(&self) -> usize {
        let info = json_of(moec().arg("run").arg(self.bundle()).args(["info", "--json"]));
        let memory = &info["memory"];
        assert!(0 < memory["snapshot_bytes"].as_u64().unwrap());
        assert!(memory["snapshot_bytes"].as_u64() < memory["kv_bytes"].as_u64());
        memory["snapshot_distance"].as_u64().unwrap() as usize
    }

    fn with_engine<T>(
        &self,
        change: impl FnOnce(&mut moec_ir::plan::Plan),
        body: impl FnOnce(&mut Engine<'_>) -> T,
    ) -> T {
        with_plan(&Bundle::open(&self.bundle()).unwrap(), change, body)
    }
}

/// A prompt that no other test uses.
fn words(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| 10 + (i * i * 7 + i * 31 + seed * 97 + seed * seed * 13) % (WORDS - 10)).collect()
}

fn text(ids: &[u32]) -> String {
    ids.iter().fold(String::new(), |mut out, id| {
        write!(out, "{}w{id}", if out.is_empty() { "" } else { " " }).unwrap();
        out
    })
}

fn ids(text: &str) -> Vec<u32> {
    text.split_whitespace().map(|word| word.strip_prefix('w').unwrap().parse().unwrap()).collect()
}

/// Tokens of a run that computes its whole prompt.
fn cold(engine: &mut Engine<'_>, prompt: &[u32], n: usize) -> Vec<u32> {
    let request = Request { slot: 0, prompt, n, end: &[] };
    let mut sampler = Sampler::new(Sampling::default());
    generate(engine, &request, &mut Decoder::full(), &mut sampler, &mut |_| Ok(())).unwrap().ids
}

/// Bound on differences of logits that are caused by another order of sums; logits are about 1.
const ORDER: f32 = 1e-4;

/// A prompt gives the same bits in chunks, from a snapshot, and from a copy of one. Other splits change the
/// order of sums.
#[test]
fn chunks_and_snapshots_give_the_same_bits() {
    for family in HYBRIDS.into_iter().chain(["lfm2_moe"]) {
        let case = Case::new(family, &[1, 2]);
        let prompt = &expected(&checkpoint(family)).ids[..45];
        case.with_engine(
            |_| {},
            |engine| {
                let read = |engine: &mut Engine<'_>, slot: u32, ends: &[usize]| {
                    let mut last = Vec::new();
                    for &end in ends {
                        let start = engine.len(slot);
                        let sink = &mut |_: usize, logits: &[f32]| -> moec_runtime::Result<()> {
                            last = logits.to_vec();
                            Ok(())
                        };
                        engine.prefill(slot, start, &prompt[start..end], LogitRows::Last, sink).unwrap();
                        engine.snapshot(slot).unwrap();
                    }
                    last
                };
                let whole = read(engine, 0, &[45]);
                for ends in [&[16, 32, 45][..], &[16, 45], &[32, 45], &[7, 16, 45], &[1, 31, 45], &[23, 45]] {
                    let chunks = ends.iter().all(|&end| end % CHUNK == 0 || end == 45);
                    let same = |made: &[f32]| {
                        made.len() == whole.len()
                            && made.iter().zip(&whole).all(|(a, b)| {
                                if chunks { a.to_bits() == b.to_bits() } else { (a - b).abs() < ORDER }
                            })
                    };
                    engine.reset(1).unwrap();
                    assert!(same(&read(engine, 1, ends)), "{family}, {ends:?}");
                    for &from in &ends[..ends.len() - 1] {
                        engine.fork(1, 0, from).unwrap();
                        assert!(same(&read(engine, 0, &[45])), "{family}, a copy of {from} of {ends:?}");
                    }
                    engine.rewind(1, ends[0]).unwrap();
                    assert!(same(&read(engine, 1, &[45])), "{family}, back to {}", ends[0]);
                }
            },
        );
    }
}

/// With any contents of the slots and any room for snapshots, answers are those of a run without sharing, bit
/// for bit with `exact`. With the plan's room, less than one snapshot distance of each prompt is computed
/// again.
#[test]
fn prefix_sharing_changes_no_answer_under_eviction() {
    for family in HYBRIDS {
        let case = Case::new(family, &[1, 2]);
        let distance = case.distance();
        // Prefixes of one another, edited prompts, and unrelated ones, so that slots and snapshots are
        // evicted. Answers of one token decode nothing.
        let base = words(200, 1);
        let edits = [
            (90, 20),
            (64, 5),
            (150, 3),
            (33, 60),
            (150, 30),
            (12, 9),
            (199, 1),
            (90, 20),
            (120, 80),
            (47, 2),
        ];
        let prompts: Vec<Vec<u32>> = (0..)
            .zip(edits)
            .flat_map(|(i, (same, own))| {
                let edited = [&base[..same], &words(own, 50 + i)[..]].concat();
                [base[..20 * (i as usize + 1)].to_vec(), edited]
            })
            .collect();
        let none = Setting { sharing: Some(Sharing::None), ..Setting::default() };
        let alone = case.with_engine(|_| {}, |engine| served(engine, &none, &prompts, (1, 1)));
        for room in [None, Some(0), Some(1), Some(3)] {
            let few = |plan: &mut moec_ir::plan::Plan| {
                let folded = plan.states.iter_mut().filter(|s| s.kind.needs_snapshots());
                folded.for_each(|s| s.snapshots = room.unwrap_or(s.snapshots));
            };
            for exact in [false, true] {
                let setting = Setting { exact, ..Setting::default() };
                let made = case.with_engine(few, |engine| served(engine, &setting, &prompts, (1, 1)));
                for ((i, one), alone) in made.iter().enumerate().zip(&alone) {
                    let same = one.ids == alone.ids
                        && one.likely.iter().zip(&alone.likely).all(|(a, b)| {
                            if exact { a.to_bits() == b.to_bits() } else { (a - b).abs() < f64::from(ORDER) }
                        });
                    assert!(
                        same,
                        "{family}, prompt {i}, room {room:?}, exact {exact}, {} shared",
                        one.shared
                    );
                    if room.is_none() {
                        assert!(one.reread < distance as u64, "{family}, prompt {i}, exact {exact}: {one:?}");
                    }
                }
                if room.is_none() {
                    let shared: usize = made.iter().map(|one| one.shared).sum();
                    let all: usize = prompts.iter().map(Vec::len).sum();
                    assert!(2 * shared > all, "{family}: {shared} of {all}");
                }
                if room == Some(0) && !exact {
                    assert!(made.iter().any(|one| one.reread > 0), "{family}");
                }
            }
        }
    }
}

/// Reply of the server: its words, and the number of cached prompt tokens.
fn complete(server: &Server, prompt: &[u32], n: usize) -> (Vec<u32>, usize) {
    let body = json!({"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": true});
    let reply = post(server.address(), "/v1/completions", body).call().unwrap();
    let reply: Value = serde_json::from_str(&reply.body).unwrap();
    let usage = &reply["usage"];
    assert_eq!(usage["prompt_tokens"], prompt.len(), "{reply}");
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (ids(reply["choices"][0]["text"].as_str().unwrap()), cached as usize)
}

/// A figure of `/metrics`.
fn metric(server: &Server, name: &str) -> u64 {
    let text = get(server.address(), "/metrics").call().unwrap().body;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap().parse().unwrap()
}

/// Sixteen clients share a prefix, edit their requests, and continue after the answer. At most one snapshot
/// distance is computed again, and every answer is that of a single run.
#[test]
fn server_clients_share_a_prompt_prefix_and_edit_it() {
    const CLIENTS: u32 = 16;
    let system = words(101, 3);
    for (family, options) in [("qwen3_next", &[][..]), ("kimi_linear", &["--exact"])] {
        let case = Case::new(family, &[1, 4, 16]);
        let exact = !options.is_empty();
        let distance = case.distance();
        let most = |equal: usize| if exact { equal / CHUNK * CHUNK } else { equal }.saturating_sub(distance);
        let mut command = moec();
        command.arg("run").arg(case.bundle()).args(["serve", "--port", "0", "--threads", "1"]).args(options);
        let server = Server::start(&mut command).unwrap();
        let (_, nothing) = complete(&server, &[&system[..], &[7]].concat(), 2);
        assert_eq!(nothing, 0);
        let before =
            (metric(&server, "moec_prompt_tokens_total"), metric(&server, "moec_shared_tokens_total"));
        let client = |i: u32| {
            let mut seen = Vec::new();
            let extended = [&system[..], &words(20, 100 + i)].concat();
            let edited = [&extended[..112], &words(12, 200 + i)].concat();
            for (prompt, equal) in [(&extended, 101), (&edited, 112)] {
                let (answer, cached) = complete(&server, prompt, 12);
                seen.push((prompt.clone(), answer, cached, equal));
            }
            let answered = [&edited[..], &seen[1].1].concat();
            let next = [&answered[..], &words(9, 300 + i)].concat();
            // With `exact`, answers are not shared.
            let equal = if exact { edited.len() } else { answered.len() - 1 };
            let (answer, cached) = complete(&server, &next, 12);
            seen.push((next, answer, cached, equal));
            seen
        };
        let seen: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..CLIENTS).map(|i| scope.spawn(move || client(i))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        case.with_engine(
            |_| {},
            |engine| {
                for (prompt, answer, cached, equal) in &seen {
                    assert!(*cached >= most(*equal), "{family}: {cached} of {equal}");
                    assert_eq!(
                        *answer,
                        cold(engine, prompt, 12),
                        "{family}, {} tokens, {cached} cached",
                        prompt.len()
                    );
                }
            },
        );
        let (read, shared) = seen.iter().fold((0, 0), |(read, shared), (prompt, _, cached, _)| {
            (read + prompt.len() - cached, shared + cached)
        });
        let counted =
            (metric(&server, "moec_prompt_tokens_total"), metric(&server, "moec_shared_tokens_total"));
        assert_eq!((counted.0 - before.0, counted.1 - before.1), (read as u64, shared as u64));
        assert!(metric(&server, "moec_reread_tokens_total") < u64::from(3 * CLIENTS) * distance as u64);
        assert!(read * 3 < shared, "{read} tokens were read, {shared} shared");
    }
}

/// Answers of `chat` to these lines, one JSON object each.
fn chat(case: &Case, options: &[&str], lines: &[String]) -> Vec<Value> {
    let mut command = moec();
    command.arg("run").arg(case.bundle()).args([
        "chat",
        "--json",
        "-n",
        "12",
        "--temperature",
        "0",
        "--threads",
        "1",
    ]);
    command.arg("--template").arg(case.path("words.jinja")).args(options);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all((lines.join("\n") + "\n").as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success());
    String::from_utf8(done.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A regenerated turn, an answer that ended at a stop string, and the turn after it.
#[test]
fn conversations_resume_from_snapshots() {
    for family in HYBRIDS {
        let case = Case::new(family, &[1, 2]);
        let distance = case.distance();
        let (system, lines) = (text(&words(60, 5)), [words(15, 6), words(18, 7)].map(|ids| text(&ids)));
        let ids_of = |of: &Value| ids(of["text"].as_str().unwrap());
        let plain = chat(&case, &["--system", &system], &lines[..1]);
        // The answer ends before its fifth word.
        let stop = format!("w{}", ids_of(&plain[0])[4]);
        let again = [lines[0].clone(), "/regenerate".to_owned(), lines[1].clone()];
        for options in [&["--system", &system][..], &["--system", &system, "--stop", &stop]] {
            let turns = chat(&case, options, &again);
            let first = format!("w1 {system} w2 {} w3", lines[0]);
            let prompts = [
                first.clone(),
                first.clone(),
                format!("{first} {} w2 {} w3", text(&ids_of(&turns[1])), lines[1]),
            ]
            .map(|p| ids(&p));
            // Common prefix of each prompt with the conversation before it.
            let same = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
            let made = |i: usize| -> Vec<u32> {
                let of: Vec<u32> = serde_json::from_value(turns[i]["ids"].clone()).unwrap();
                [&prompts[i][..], &of[..of.len() - 1]].concat()
            };
            let equal = [0, prompts[1].len() - 1, same(&made(1), &prompts[2])];
            case.with_engine(
                |_| {},
                |engine| {
                    for (i, turn) in turns.iter().enumerate() {
                        let number = |key: &str| turn[key].as_u64().unwrap() as usize;
                        assert_eq!(number("prompt_tokens"), prompts[i].len());
                        assert!(
                            number("kept_tokens") >= equal[i].saturating_sub(distance),
                            "{family}, turn {i}: {turn}"
                        );
                        assert_eq!(number("prefilled_tokens"), prompts[i].len() - number("kept_tokens"));
                        let whole = cold(engine, &prompts[i], 12);
                        let ids: Vec<u32> = serde_json::from_value(turn["ids"].clone()).unwrap();
                        assert!(
                            !ids.is_empty() && whole.starts_with(&ids),
                            "{family}, turn {i}: {turn}, {whole:?}"
                        );
                    }
                },
            );
        }
    }
}

/// A saved prompt has its snapshots: a prompt that diverges from it continues from the last snapshot before
/// that position. Rejected draft tokens are taken back.
#[test]
fn saved_prompts_and_draft_tokens_resume_from_snapshots() {
    for family in HYBRIDS {
        let case = Case::new(family, &[1, 4]);
        let distance = case.distance();
        let run = |prompt: &[u32], more: &[&str]| {
            let mut run = moec();
            run.arg("run").arg(case.bundle()).args([
                "generate",
                "--ids",
                &list(prompt),
                "-n",
                "20",
                "--json",
                "--threads",
                "1",
            ]);
            json_of(run.args(more))
        };
        let base = words(120, 8);
        let saved = case.path("base.kv");
        let saved = saved.to_str().unwrap();
        run(&base, &["--save-prompt", saved]);
        for (same, own) in [(120, 10), (119, 1), (100, 30), (70, 4), (40, 0)] {
            let prompt = [&base[..same], &words(own, 9)].concat();
            let done = run(&prompt, &["--load-prompt", saved]);
            let equal = same.min(prompt.len() - 1);
            let loaded = done["loaded_tokens"].as_u64().unwrap() as usize;
            assert!(loaded <= equal && loaded + distance > equal, "{family}: {loaded} of {equal}");
            assert_eq!(done["prefilled_tokens"], prompt.len() - loaded);
            assert_eq!(done["ids"], run(&prompt, &[])["ids"], "{family}, {same} shared");
        }
        // A prompt that contains its own continuation.
        let quotes = |engine: &mut Engine<'_>| {
            (1..100).find_map(|seed| {
                let ends = words(32, seed);
                let quoted = cold(engine, &ends, 4);
                let prompt = [&ends[31..], &quoted[..], &ends[..]].concat();
                cold(engine, &prompt, 1).starts_with(&quoted[..1]).then_some(prompt)
            })
        };
        let prompt = case.with_engine(|_| {}, quotes).unwrap();
        let plain = run(&prompt, &[]);
        let speculated = run(&prompt, &["--speculate", "3"]);
        assert_eq!(speculated["ids"], plain["ids"], "{family}");
        assert!(speculated["speculation"]["calls_with_draft_tokens"].as_u64().unwrap() > 0, "{speculated}");
    }
}
