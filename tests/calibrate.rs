//! Calibration as a user meets it, and against the evaluator: what a profile says is what the Graph means.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;
#[path = "calibrate/wide.rs"]
mod wide;

use moec::calibrate::{Request, calibrate, read_texts};
use moec::config::Config;
use moec::import::{self, ImportOptions};
use moec::pipeline::{Compilation, Stops};
use moec::profile::Profile;
use moec::progress::Progress;
use moec_ir::eval::{self, Arg, Evaluator, Tensor};
use moec_ir::{Graph, Module, Op, Operand, ValueId, WeightClass};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use support::{FAMILIES, Setup, checkpoint, fails, ferris, moec, ok};
use tempfile::TempDir;
use wide::Wide;

const CHUNK: usize = 16;
const WINDOW: usize = 24;
const VOCAB: usize = 320;

/// A checkpoint with a tokenizer, which the tiny ones lack: the words `w0` … `w319`.
struct Case {
    folder: TempDir,
    toml: PathBuf,
}

impl Case {
    fn new(family: &str) -> Self {
        Self::with(family, None)
    }

    fn with(family: &str, wide: Option<Wide>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("hf");
        fs::create_dir(&source).unwrap();
        match wide {
            Some(wide) => wide.write(&checkpoint(family), &source),
            None => {
                for file in fs::read_dir(checkpoint(family)).unwrap() {
                    let file = file.unwrap().path();
                    fs::copy(&file, source.join(file.file_name().unwrap())).unwrap();
                }
            }
        }
        let vocab: serde_json::Map<_, _> = (0..VOCAB).map(|i| (format!("w{i}"), i.into())).collect();
        let tokenizer = serde_json::json!({
            "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
        });
        fs::write(source.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let toml =
            Setup { format: "bf16", chunk: CHUNK, batch: &[1], context: 64 }.write(&source, folder.path());
        Self { folder, toml }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes words as a text.
    fn text(&self, name: &str, ids: &[u32]) -> PathBuf {
        let text = ids.iter().fold(String::new(), |mut s, id| {
            let _ = write!(s, "w{id} ");
            s
        });
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path
    }

    fn append(&self, text: &str) {
        let old = fs::read_to_string(&self.toml).unwrap();
        fs::write(&self.toml, format!("{old}{text}")).unwrap();
    }

    /// On one thread: on a busy machine, threads that wait for each other cost more than they give.
    fn calibrate(&self) -> Command {
        let mut command = moec();
        command.env("MOEC_THREADS", "1");
        command.env("MOEC_CACHE", self.path("cache")).arg("calibrate").arg(&self.toml).arg("--quiet");
        command
    }

    /// Nothing but what was there, and no model in the cache.
    fn nothing_left(&self, besides: &[&str]) {
        let names = |folder: &Path| -> Vec<String> {
            let entries = fs::read_dir(folder).into_iter().flatten();
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
        };
        let mut left = names(self.folder.path());
        left.retain(|n| {
            !["hf", "model.toml", "cache"].contains(&n.as_str()) && !besides.contains(&n.as_str())
        });
        assert!(left.is_empty(), "left behind: {left:?}");
        let mut cache = names(&self.path("cache"));
        cache.retain(|n| n != "profiles");
        assert!(cache.is_empty(), "left in the cache: {cache:?}");
    }
}

/// Ids that lie spread over the vocabulary.
fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i + 1).wrapping_mul(2_654_435_761) % VOCAB as u32).collect()
}

fn json(command: &mut Command) -> Value {
    serde_json::from_slice(&ok(command.arg("--json")).stdout).unwrap()
}

/// Sums of squares and counts per matrix of a weight, by its name.
type Sums = BTreeMap<String, (Vec<f64>, Vec<u64>)>;

/// What the evaluator's values are in one call of `n` rows from position `start`.
struct Call<'a> {
    module: &'a Module,
    graph: &'a Graph,
    values: HashMap<ValueId, Tensor>,
    n: usize,
}

impl Call<'_> {
    fn value(&self, operand: Operand) -> &Tensor {
        let Operand::Value(v) = operand else { panic!("a value is expected") };
        &self.values[&v]
    }

    fn row(&self, operand: Operand, i: usize) -> &[f32] {
        let t = self.value(operand);
        &t.as_f32()[i * t.ty.cols()..(i + 1) * t.ty.cols()]
    }

    /// Adds up what every matrix of the graph reads.
    fn add(&self, evaluator: &mut Evaluator<'_>, sums: &mut Sums) {
        for node in &self.graph.nodes {
            let weight = |i: usize| match node.inputs.get(i) {
                Some(Operand::Weight(w)) => Some((*w, self.module.weight(*w))),
                _ => None,
            };
            let mut add = |name: &str, leads: usize, lead: usize, x: &[f32]| {
                let new = || (vec![0.0; leads * x.len()], vec![0; leads]);
                let (squares, tokens) = sums.entry(name.to_owned()).or_insert_with(new);
                tokens[lead] += 1;
                let into = &mut squares[lead * x.len()..(lead + 1) * x.len()];
                into.iter_mut().zip(x).for_each(|(s, x)| *s += f64::from(*x).powi(2));
            };
            match &node.op {
                Op::Linear { .. } | Op::LinearGlu { .. } | Op::HeadLinear { .. } => {
                    let (_, w) = weight(1).unwrap();
                    if w.class == WeightClass::Exact {
                        continue;
                    }
                    for i in 0..self.n {
                        for (lead, x) in self.row(node.inputs[0], i).chunks_exact(w.cols()).enumerate() {
                            add(&w.name, w.lead(), lead, x);
                        }
                    }
                }
                &Op::ExpertFfn { glu, bias, .. } => {
                    let ((gate_up, up), (_, down)) = (weight(2).unwrap(), weight(3).unwrap());
                    let Operand::Value(table) = node.inputs[1] else { panic!("a table is expected") };
                    let dispatch = &self.graph.nodes[self.graph.def(table).unwrap().0 as usize];
                    let matrices = evaluator.weight(gate_up).unwrap();
                    let biases = weight(4).map(|(b, _)| evaluator.weight(b).unwrap());
                    let chosen = self.value(dispatch.inputs[0]);
                    let k = chosen.ty.cols();
                    for (slot, &expert) in chosen.as_i32()[..self.n * k].iter().enumerate() {
                        let (x, e) = (self.row(node.inputs[0], slot / k), expert as usize);
                        add(&up.name, up.lead(), e, x);
                        let part = |t: &Tensor, len: usize| t.as_f32()[e * len..(e + 1) * len].to_vec();
                        let (rows, cols) = (up.rows(), up.cols());
                        let x = Tensor::f32([1, cols], x.to_vec());
                        let w = Tensor::f32([rows, cols], part(&matrices, rows * cols));
                        let b = biases.as_ref().map(|b| Tensor::f32([rows], part(b, rows)));
                        let args = [&x, &w].into_iter().chain(&b).map(Arg::Tensor).collect();
                        let h = eval::op(&Op::LinearGlu { glu, bias }, args).unwrap();
                        add(&down.name, down.lead(), e, h[0].as_f32());
                    }
                }
                _ => {}
            }
        }
    }
}

/// What routers and attention did, layer by layer.
#[derive(Default)]
struct Behaviour {
    /// Experts of every token, chunk by chunk.
    chosen: BTreeMap<u32, Vec<Vec<Vec<usize>>>>,
    /// L2 norms of what attention adds, token by token.
    norms: BTreeMap<u32, Vec<f64>>,
}

impl Behaviour {
    fn add(&mut self, call: &Call<'_>) {
        for node in &call.graph.nodes {
            let layer = || node.scope.split('.').nth(1).unwrap().parse().unwrap();
            match &node.op {
                Op::Router(d) => {
                    let ids = call.values[&node.outputs[0]].as_i32()[..call.n * d.k].chunks_exact(d.k);
                    let ids = ids.map(|ids| ids.iter().map(|&e| e as usize).collect()).collect();
                    self.chosen.entry(layer()).or_default().push(ids);
                }
                // x + o, of which o is the attention's output.
                Op::Add if node.scope.split('.').nth(2) == Some("attn") => {
                    let norm =
                        |i| call.row(node.inputs[1], i).iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
                    self.norms.entry(layer()).or_default().extend((0..call.n).map(|i| norm(i).sqrt()));
                }
                _ => {}
            }
        }
    }

    fn check(&self, profile: &Profile, family: &str) {
        let chunks: Vec<_> = profile.trace.sequences.iter().flatten().collect();
        assert_eq!(chunks.iter().map(|c| c.tokens as usize).sum::<usize>(), WINDOW, "{family}");
        let mut first = 0;
        for layer in &profile.layers {
            let chosen = &self.chosen[&layer.layer];
            let mut together = vec![0; layer.together.len()];
            for (chunk, tokens) in chunks.iter().zip(chosen) {
                let mut loads = vec![0_u16; layer.chosen.len()];
                for experts in tokens {
                    for &e in experts {
                        loads[e] += 1;
                    }
                    for (i, &a) in experts.iter().enumerate() {
                        for &b in &experts[..i] {
                            together[layer.pair(a, b).unwrap()] += 1;
                        }
                    }
                }
                assert_eq!(chunk.loads[first..first + loads.len()], loads, "{family} layer {}", layer.layer);
            }
            assert_eq!(layer.together, together, "{family} layer {}", layer.layer);
            first += layer.chosen.len();
        }
        assert!(profile.saliency.iter().map(|s| s.layer).eq(self.norms.keys().copied()), "{family}");
        for saliency in &profile.saliency {
            let norms = &self.norms[&saliency.layer];
            let mean = norms.iter().sum::<f64>() / norms.len() as f64;
            assert_eq!(saliency.tokens(), norms.len() as u64, "{family}");
            let (got, most) = (saliency.mean(), norms.iter().copied().fold(0.0, f64::max));
            assert!((got - mean).abs() < 1e-3 * mean, "{family} layer {}: {got}, not {mean}", saliency.layer);
            let ratio = saliency.quantile(1.0) / most;
            assert!((0.9..1.1).contains(&ratio), "{family} layer {}: {ratio}", saliency.layer);
        }
    }
}

/// What the evaluator says of the texts' one window.
fn reference(module: &Module, source: &dyn moec_ir::Source, ids: &[u32]) -> (Sums, Behaviour) {
    let graph = &module.entries[0];
    let (rows, out) = (graph.kind.rows(), graph.ty(Graph::ROWS).rows());
    assert!(out == rows, "every row has logits");
    let mut evaluator = Evaluator::new(module, source);
    let (mut sums, mut behaviour) = (Sums::new(), Behaviour::default());
    for (c, ids) in ids.chunks(rows).enumerate() {
        let padded = |pad: i32, of: &dyn Fn(usize) -> i32| -> Vec<i32> {
            (0..rows).map(|i| if i < ids.len() { of(i) } else { pad }).collect()
        };
        let mut values = HashMap::new();
        evaluator
            .run_with(
                0,
                &padded(0, &|i| ids[i] as i32),
                &padded(-1, &|i| (c * rows + i) as i32),
                &padded(0, &|_| 0),
                &padded(-1, &|i| i as i32),
                &mut |id, results: &[&Tensor]| {
                    let node = &graph.nodes[id.0 as usize];
                    values.extend(node.outputs.iter().copied().zip(results.iter().map(|&t| t.clone())));
                },
            )
            .unwrap();
        let call = Call { module, graph, values, n: ids.len() };
        call.add(&mut evaluator, &mut sums);
        behaviour.add(&call);
    }
    (sums, behaviour)
}

#[test]
fn a_profile_says_what_the_evaluator_sees() {
    for family in FAMILIES {
        is_what_the_evaluator_sees(family, None);
    }
}

/// Rows that are whole pages apart are copied before a matrix reads them, perhaps long before, and the value itself is
/// dead from then on: a profile must say what the matrix multiplied, not what lies in the value's place by then.
#[test]
fn a_profile_of_rows_that_lie_pages_apart_says_what_the_evaluator_sees() {
    for family in FAMILIES {
        is_what_the_evaluator_sees(family, Some(Wide { hidden: 1024, inner: None }));
    }
    for (family, inner) in [("olmoe", 1024), ("phimoe", 1024), ("phimoe", 112)] {
        is_what_the_evaluator_sees(family, Some(Wide { hidden: 2048, inner: Some(inner) }));
    }
    // Neither a page nor a multiple of any vector.
    for family in FAMILIES {
        is_what_the_evaluator_sees(family, Some(Wide { hidden: 136, inner: None }));
    }
}

fn is_what_the_evaluator_sees(family: &str, wide: Option<Wide>) {
    let case = Case::with(family, wide);
    let ids = ids(WINDOW);
    let texts = read_texts(&[case.text("text.txt", &ids)]).unwrap();
    let config = Config::load(&case.toml).unwrap();
    let (checkpoint, spec) = import::open(&config.model.source, &ImportOptions::default()).unwrap();
    let request = Request { texts: &texts, tokens: 1000, window: WINDOW };
    let profile = calibrate(&config, &checkpoint, &spec, &request, &Progress::silent()).unwrap();
    assert_eq!(profile.reading.tokens(), WINDOW as u64, "{family}");
    assert_eq!(profile.reading.predicted, WINDOW as u64 - 1, "{family}");

    let device = moec::build::target("native").unwrap();
    let mut lowered = Compilation::new(&config, &checkpoint, &spec, &device);
    let stops = Stops { print_after: None, stop_after: Some("lower") };
    lowered.run(stops, &Progress::silent(), &mut |_| {}).unwrap();
    let (sums, behaviour) = reference(&lowered.module, &checkpoint, &ids);
    behaviour.check(&profile, family);
    assert!(profile.weights.keys().eq(sums.keys()), "{family}: other weights");
    for (name, (squares, tokens)) in &sums {
        let moments = &profile.weights[name];
        assert_eq!(&moments.tokens, tokens, "{family} {name}");
        for (lead, &n) in tokens.iter().enumerate() {
            let most = moments.of(lead).iter().copied().fold(0.0, f32::max);
            for (c, &got) in moments.of(lead).iter().enumerate() {
                let want = squares[lead * moments.cols + c] / n.max(1) as f64;
                let error = (f64::from(got) - want).abs();
                assert!(
                    error <= want * 2e-3 + 1e-9 + 1e-7 * f64::from(most),
                    "{family} {name} [{lead}, {c}]: {got}, not {want}"
                );
            }
        }
    }
    for layer in &profile.layers {
        let of_gate_up = &profile.weights[&format!("layers.{}.moe.gate_up", layer.layer)].tokens;
        assert_eq!(&layer.chosen, of_gate_up, "{family} layer {}", layer.layer);
        let weight: f64 = layer.weight.iter().sum();
        assert!(weight > 0.0, "{family} layer {}: no routing weights", layer.layer);
    }
}

#[test]
fn two_texts_are_what_their_profiles_merge_to() {
    let case = Case::new("qwen3_moe");
    let a = case.text("a.txt", &ids(40));
    let b = case.text("b.txt", &ids(100)[40..]);
    let take = |texts: &[&PathBuf], out: &str| {
        let mut command = case.calibrate();
        for text in texts {
            command.arg("--text").arg(text);
        }
        json(command.arg("--window").arg(WINDOW.to_string()).arg("-o").arg(case.path(out)))
    };
    take(&[&a], "a.trace");
    take(&[&b], "b.trace");
    let both = take(&[&a, &b], "ab.trace");
    assert_eq!((both["tokens"].as_u64(), both["texts"].as_array().map(Vec::len)), (Some(100), Some(2)));
    let merge = |first: &str, second: &str, out: &str| {
        let mut command = case.calibrate();
        command.arg("--merge").arg(case.path(first)).arg("--merge").arg(case.path(second));
        ok(command.arg("-o").arg(case.path(out)));
        fs::read(case.path(out)).unwrap()
    };
    let merged = merge("a.trace", "b.trace", "m.trace");
    assert!(merged == merge("b.trace", "a.trace", "n.trace"), "merging depends on the order");
    let (merged, both) = (Profile::decode(&merged).unwrap(), Profile::read(&case.path("ab.trace")).unwrap());
    assert_eq!(merged.reading.texts, both.reading.texts);
    for (a, b) in merged.layers.iter().zip(&both.layers) {
        assert_eq!((a.layer, &a.chosen, &a.together), (b.layer, &b.chosen, &b.together));
    }
    assert_eq!(merged.trace, both.trace);
    for (name, a) in &merged.weights {
        let b = &both.weights[name];
        assert_eq!(a.tokens, b.tokens, "{name}");
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= b * 2e-3;
        assert!((0..a.lead()).all(|l| a.of(l).iter().zip(b.of(l)).all(close)), "{name}");
    }
    // Reading and merging in one go.
    let mut command = case.calibrate();
    command.arg("--text").arg(&a).arg("--merge").arg(case.path("b.trace"));
    let read = json(command.args(["--window", "24", "-o"]).arg(case.path("o.trace")));
    assert_eq!(read["tokens"], 100);
    case.nothing_left(&["a.txt", "b.txt", "a.trace", "b.trace", "ab.trace", "m.trace", "n.trace", "o.trace"]);
}

#[test]
fn inspect_shows_a_profile() {
    let case = Case::new("olmoe");
    case.text("corpus.txt", &ids(200));
    case.append("[calibrate]\ntext = [\"corpus.txt\"]\nprofile = \"own.trace\"\ntokens = 96\n");
    ok(&mut case.calibrate());
    let said = json(moec().arg("inspect").arg(case.path("own.trace")));
    assert_eq!((&said["kind"], &said["model"]["family"]), (&"profile".into(), &"olmoe".into()));
    assert_eq!((&said["tokens"], &said["layers"][1]["layer"]), (&96.into(), &1.into()));
    let per_expert: Vec<u64> =
        serde_json::from_value(said["layers"][0]["tokens_per_expert"].clone()).unwrap();
    assert_eq!((per_expert.len(), per_expert.iter().sum::<u64>()), (8, 2 * 96));
    assert!(said["perplexity"].as_f64().unwrap() > 1.0);
    let text = ok(moec().arg("inspect").arg(case.path("own.trace"))).stdout;
    let text = String::from_utf8(text).unwrap();
    for words in ["olmoe, 2 layers", "96 tokens of 1 texts", "busiest / mean", "of 8"] {
        assert!(text.contains(words), "`{words}` is not in:\n{text}");
    }
    // The same input gives the same bytes, on any number of threads.
    let first = fs::read(case.path("own.trace")).unwrap();
    ok(case.calibrate().env("MOEC_THREADS", "3"));
    assert!(first == fs::read(case.path("own.trace")).unwrap(), "a profile depends on the number of threads");
}

#[test]
fn what_cannot_be_calibrated_is_said() {
    let case = Case::new("olmoe");
    let refused = |change: &dyn Fn(&mut Command), code: i32, words: &[&str]| {
        let mut command = case.calibrate();
        change(&mut command);
        let (found, said) = fails(&mut command);
        assert_eq!(found, code, "{said}");
        for word in words {
            assert!(said.contains(word), "`{word}` is not in:\n{said}");
        }
        assert!(said.contains("hint:"), "no hint in:\n{said}");
    };
    refused(&|_| {}, 2, &["no text", "--text"]);
    let text = case.text("t.txt", &ids(100));
    fs::write(case.path("empty.txt"), "").unwrap();
    fs::write(case.path("x.bin"), b"w1 \xff w2").unwrap();
    refused(
        &|c| {
            c.arg("--text").arg(case.path("empty.txt"));
        },
        1,
        &["nothing to read", "empty.txt"],
    );
    let mut command = case.calibrate();
    let (_, said) = fails(command.arg("--text").arg(case.path("x.bin")));
    assert!(said.contains("UTF-8") && said.contains("byte 3"), "{said}");
    let mut command = case.calibrate();
    let (_, said) = fails(command.arg("--text").arg(case.path("gone.txt")));
    assert!(said.contains("gone.txt"), "{said}");

    // A profile of another model, one that is damaged, and one that is not there.
    let other = Case::new("mixtral");
    let foreign = case.path("mixtral.trace");
    ok(other.calibrate().arg("--text").arg(&text).arg("-o").arg(&foreign));
    refused(
        &|c| {
            c.arg("--merge").arg(&foreign);
        },
        1,
        &["mixtral.trace", "another model", "olmoe"],
    );
    let mut bytes = fs::read(&foreign).unwrap();
    bytes.truncate(bytes.len() - 7);
    fs::write(&foreign, bytes).unwrap();
    refused(
        &|c| {
            c.arg("--merge").arg(&foreign);
        },
        1,
        &["mixtral.trace", "damaged"],
    );
    refused(
        &|c| {
            c.arg("--merge").arg(case.path("no.trace"));
        },
        1,
        &["no.trace"],
    );

    fs::remove_file(case.path("hf/tokenizer.json")).unwrap();
    refused(
        &|c| {
            c.arg("--text").arg(&text);
        },
        1,
        &["no tokenizer", "tokenizer.json"],
    );
    case.nothing_left(&["t.txt", "empty.txt", "x.bin", "mixtral.trace"]);
}

#[test]
fn a_build_refuses_a_profile_that_is_not_its_models() {
    let case = Case::new("olmoe");
    let other = Case::new("mixtral");
    let text = case.text("t.txt", &ids(50));
    ok(other.calibrate().arg("--text").arg(&text).arg("-o").arg(case.path("x.trace")));
    case.append("[calibrate]\nprofile = \"x.trace\"\n");
    let build = || {
        let mut command = moec();
        command.arg("build").arg(&case.toml).args(["--quiet", "--no-run", "-o"]).arg(case.path("out.moec"));
        fails(&mut command)
    };
    let (code, said) = build();
    assert!(code == 1 && said.contains("x.trace") && said.contains("another model"), "{said}");
    fs::write(case.path("x.trace"), "no profile").unwrap();
    let (code, said) = build();
    assert!(code == 1 && said.contains("x.trace") && said.contains("no profile"), "{said}");
    fs::remove_file(case.path("x.trace")).unwrap();
    let (code, said) = build();
    assert!(code == 1 && said.contains("x.trace") && said.contains("moec calibrate"), "{said}");
    case.nothing_left(&["t.txt"]);
}

/// A build with texts takes the profile itself, once; a build with the profile is the same build; and both
/// round q4 weights otherwise than a build without.
#[test]
fn a_build_rounds_with_its_profile() {
    let case = Case::new("qwen3_moe");
    case.text("t.txt", &ids(300));
    let toml = fs::read_to_string(&case.toml).unwrap().replace("attention = \"bf16\"", "attention = \"q4\"");
    let toml = toml.replace("experts = \"bf16\"", "experts = \"q4\"");
    let build = |calibrate: &str| {
        fs::write(&case.toml, format!("{toml}[calibrate]\n{calibrate}\n")).unwrap();
        let mut command = moec();
        command.env("MOEC_CACHE", case.path("cache")).env("MOEC_THREADS", "1");
        command.arg("build").arg(&case.toml).args(["--no-run", "-o"]).arg(case.path("out.moec"));
        let said = String::from_utf8(ok(&mut command).stderr).unwrap();
        (support::tree(&case.path("out.moec")), said)
    };
    let (plain, said) = build("");
    assert!(!said.contains("Reading 300"), "{said}");
    let (first, said) = build("text = [\"t.txt\"]");
    assert!(said.contains("Reading 300"), "{said}");
    // 600 choices of 16 experts: most saw fewer than 64 tokens, and that is said.
    assert!(said.contains("saw fewer than 64 tokens"), "{said}");
    let (again, said) = build("text = [\"t.txt\"]");
    assert!(said.contains("Calibrated") && !said.contains("Reading 300"), "{said}");
    assert!(first == again, "the cached profile gives another bundle");
    ok(case.calibrate().arg("-o").arg(case.path("t.trace")));
    let (given, said) = build("profile = \"t.trace\"");
    assert!(!said.contains("Reading 300"), "{said}");
    // The bundle says what it was rounded by; all else is the same.
    let entry = |tree: &[(String, Vec<u8>)]| -> Value {
        let manifest = tree.iter().find(|(name, _)| name == "manifest.json").unwrap();
        serde_json::from_slice::<Value>(&manifest.1).unwrap()["profile"].clone()
    };
    let hash =
        moec::bundle::hashing::hex(&moec::bundle::hashing::sha256(&fs::read(case.path("t.trace")).unwrap()));
    assert_eq!(entry(&plain), Value::Null);
    assert_eq!(entry(&first), serde_json::json!({"name": "t.txt", "sha256": hash}));
    assert_eq!(entry(&given), serde_json::json!({"name": "t.trace", "sha256": hash}));
    let others = |tree: &[(String, Vec<u8>)]| -> Vec<(String, Vec<u8>)> {
        tree.iter().filter(|(name, _)| name != "manifest.json").cloned().collect()
    };
    assert!(others(&first) == others(&given), "the written profile gives another bundle");
    let shown = ok(moec().arg("inspect").arg(case.path("out.moec"))).stdout;
    let shown = String::from_utf8(shown).unwrap();
    assert!(shown.contains(&format!("t.trace (sha256 {}…)", &hash[..12])), "{shown}");
    let shown = json(moec().arg("inspect").arg(case.path("out.moec")));
    assert_eq!(shown["profile"], entry(&given));
    let changed = |name: &str| {
        let of = |tree: &[(String, Vec<u8>)]| tree.iter().find(|(n, _)| n == name).map(|(_, b)| b.clone());
        of(&plain).unwrap() != of(&first).unwrap()
    };
    assert!(changed("weights/experts.bin") && changed("weights/dense.bin"), "importance changed nothing");
    assert!(!changed("artifacts/graph.moe"), "importance changes weights only");
    fs::remove_dir_all(case.path("out.moec")).unwrap();
    case.nothing_left(&["t.txt", "t.trace"]);
}

/// What importance is for: the rounding error that the calibrated inputs see gets smaller. On perplexity it
/// tells only over more text than a test should read; the README has those figures.
#[test]
fn importance_lowers_the_error_on_the_calibrated_inputs() {
    let case = Case::new("olmoe");
    case.text("t.txt", &ids(400));
    case.append("[calibrate]\ntext = [\"t.txt\"]\n");
    ok(case.calibrate().arg("-o").arg(case.path("t.trace")));
    let profile = Profile::read(&case.path("t.trace")).unwrap();
    let (name, moments) = profile.weights.iter().find(|(n, _)| n.ends_with("attn.q")).unwrap();
    let build = |calibrate: &str| {
        let text = format!(
            "[model]\nsource = \"hf\"\n[shapes]\nmax_context = 64\n[weights]\nattention = \"q4\"\nrounding = \"nearest\"\n{calibrate}"
        );
        fs::write(&case.toml, text).unwrap();
        ok(moec().arg("build").arg(&case.toml).args(["-q", "--no-run", "-o"]).arg(case.path("out.moec")));
        let bundle = moec::bundle::read::Bundle::open(&case.path("out.moec")).unwrap();
        let segment = bundle.plan.segments.iter().find(|s| s.name == *name).unwrap();
        let file = &bundle.plan.files[segment.file as usize].path;
        let all = fs::read(case.path("out.moec").join(file)).unwrap();
        let packed = &all[segment.offset as usize..(segment.offset + segment.bytes) as usize];
        let (_, rows, cols) = segment.extents();
        let (rows, cols) = (rows as usize, cols as usize);
        let mut stored = vec![0.0; rows * cols];
        moec_cpu::unpack(segment, packed, 0, 0..rows, 0..cols, &mut stored).unwrap();
        stored
    };
    let plain = build("");
    let weighted = build("[calibrate]\nprofile = \"t.trace\"\n");
    let (checkpoint, spec) = import::open(&case.path("hf"), &ImportOptions::default()).unwrap();
    let config = Config::load(&case.toml).unwrap();
    let device = moec::build::target("native").unwrap();
    let mut lowered = Compilation::new(&config, &checkpoint, &spec, &device);
    let stops = Stops { print_after: None, stop_after: Some("lower") };
    lowered.run(stops, &Progress::silent(), &mut |_| {}).unwrap();
    let id = lowered.module.weights.iter().position(|w| w.name == *name).unwrap();
    let exact = Evaluator::new(&lowered.module, &checkpoint).weight(moec_ir::WeightId(id as u32)).unwrap();
    let error = |stored: &[f32]| -> f64 {
        let squares = exact.as_f32().iter().zip(stored).map(|(a, b)| f64::from(a - b).powi(2));
        squares.enumerate().map(|(i, e)| e * f64::from(moments.of(0)[i % moments.cols])).sum()
    };
    let (plain, weighted) = (error(&plain), error(&weighted));
    assert!(weighted < plain, "the weighted error went from {plain} to {weighted}");
}

#[test]
fn an_interrupt_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let toml = Setup { format: "bf16", chunk: 4, batch: &[1], context: 512 }.write(&ferris(), folder.path());
    let (cache, out) = (folder.path().join("cache"), folder.path().join("x.trace"));
    let mut command = moec();
    command.env("MOEC_CACHE", &cache).env("MOEC_THREADS", "1").arg("calibrate").arg(&toml).arg("--quiet");
    command.arg("--text").arg(ferris().join("eval/calibration.txt")).args(["--tokens", "16777216"]);
    let child = command.arg("-o").arg(&out).stderr(Stdio::piped()).spawn().unwrap();
    let written = || {
        let mut entries = fs::read_dir(&cache).into_iter().flatten().flatten();
        entries.any(|e| e.path().join("model.moec/manifest.json").exists())
    };
    for _ in 0..1500 {
        if written() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(written(), "the run was over before it could be interrupted");
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let done = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.code() == Some(130) && said.contains("interrupted"), "{said}");
    assert!(!out.exists() && fs::read_dir(&cache).unwrap().next().is_none(), "something was left");
}

/// Routing is recorded token by token, in order: what was chosen leads the scores, and adds up to the totals.
#[test]
fn a_profile_records_the_routing_of_single_tokens() {
    let case = Case::new("olmoe");
    let take = |n: usize| {
        let text = case.text("t.txt", &ids(n));
        let texts = read_texts(&[text]).unwrap();
        let config = Config::load(&case.toml).unwrap();
        let (checkpoint, spec) = import::open(&config.model.source, &ImportOptions::default()).unwrap();
        let request = Request { texts: &texts, tokens: n, window: 40 };
        calibrate(&config, &checkpoint, &spec, &request, &Progress::silent()).unwrap()
    };
    let whole = take(100);
    let trace = whole.routes.trace(&whole.layers).unwrap();
    assert_eq!(trace.tokens(), 100);
    let mut chosen: Vec<Vec<u64>> = whole.layers.iter().map(|l| vec![0; l.chosen.len()]).collect();
    for (_, layer, step) in trace.steps() {
        let mut top: Vec<u16> = step.ranked[..step.chosen.len()].iter().map(|r| r.0).collect();
        let mut own = step.chosen.to_vec();
        for &e in &own {
            chosen[layer][usize::from(e)] += 1;
        }
        top.sort_unstable();
        own.sort_unstable();
        assert_eq!(own, top);
    }
    assert!(whole.layers.iter().zip(&chosen).all(|(l, own)| l.chosen == *own));
    // A shorter text is the beginning of it.
    let part = take(30);
    let short = part.routes.trace(&part.layers).unwrap();
    assert!(short.steps().zip(trace.steps()).all(|(a, b)| a == b) && short.tokens() == 30);
    let merged = whole.merge(&part).unwrap();
    assert_eq!(merged.routes.trace(&merged.layers).unwrap().tokens(), 130);
}

/// A real router, replayed: no policy passes the bound, and what is chosen is no worse than LRU.
#[test]
fn caches_are_compared_on_a_recorded_router() {
    let folder = tempfile::tempdir().unwrap();
    let toml = Setup { format: "bf16", chunk: 64, batch: &[1], context: 512 }.write(&ferris(), folder.path());
    let out = folder.path().join("ferris.trace");
    let mut command = moec();
    command
        .env("MOEC_CACHE", folder.path().join("cache"))
        .env("MOEC_THREADS", "1")
        .arg("calibrate")
        .arg(&toml);
    command.arg("--text").arg(ferris().join("eval/calibration.txt")).args(["--tokens", "2048", "--quiet"]);
    ok(command.arg("-o").arg(&out));
    let found = json(moec().arg("inspect").arg(&out).args(["--cache", "25%,50%,75%"]));
    assert_eq!((&found["tokens"], &found["experts"]), (&2048.into(), &96.into()));
    let rate = |v: &Value| v["hit_rate"].as_f64().unwrap();
    let caches = found["caches"].as_array().unwrap();
    assert_eq!(caches.iter().map(|c| c["experts"].as_u64().unwrap()).collect::<Vec<_>>(), [24, 48, 72]);
    for cache in caches {
        let settings = cache["settings"].as_array().unwrap();
        assert_eq!(settings[0]["setting"], "lru");
        assert!(settings.iter().all(|s| rate(s) <= rate(&cache["bound"])));
        assert!(cache["chosen_hit_rate"].as_f64().unwrap() >= rate(&settings[0]));
        if cache["beats_lru"] == true {
            assert!(rate(&cache["held_out"]) > rate(&cache["held_out_lru"]));
        }
    }
    assert!(caches.is_sorted_by_key(|c| (rate(&c["bound"]) * 1e6) as u64));
    let said =
        String::from_utf8(ok(moec().arg("inspect").arg(&out).args(["--cache", "50%"])).stdout).unwrap();
    for word in ["lru", "lfu", "mrs", "page-cache", "Belady (bound)", "held out"] {
        assert!(said.contains(word), "`{word}` is not in:\n{said}");
    }
    let (code, said) = fails(moec().arg("inspect").arg(&toml).args(["--cache", "50%"]));
    assert!(code == 2 && said.contains("is no profile"), "{said}");
    let (code, said) = fails(moec().arg("inspect").arg(&out).args(["--cache", "50"]));
    assert!(code == 2 && said.contains("25%"), "{said}");
}
