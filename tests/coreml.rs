//! Core ML packages of whole models: the nine golden checkpoints built for a Mac with a Neural Engine, what stands in the
//! packages held against the checkpoint and the rules, and every function executed.
//!
//! Where coremltools is not installed these tests say so and pass.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails by panicking, and says what it skips"
)]

mod support;

use half::{bf16, f16};
use moec::bundle::read::Bundle;
use moec::config::Config;
use moec::coreml::emulate::Emulated;
use moec::coreml::parts::{self, Part};
use moec::import::{self, ImportOptions};
use moec::pipeline::{Compilation, Stops};
use moec::profile::{Chunk, Origin, Profile, Reading, Routes, Routing, Trace};
use moec::progress::Progress;
use moec::twin::Twin;
use moec_coreml::check;
use moec_coreml::package::{Dtype, Function, Origin as Made, Package};
use moec_coreml::program::Rules;
use moec_device::{Device, UnitKind};
use moec_ir::Op;
use moec_ir::plan::Plan;
use moec_runtime::overflow::Tally;
use moec_runtime::{Decoder, Engine, Request, Sampler, Sampling, Want, best_of, generate};
use safetensors::{Dtype as Stored, SafeTensors};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Setup, checkpoint, coreml, expected, fails, list, logits_file, moec, ok, tree};
use tempfile::TempDir;

/// Tokens of a prompt's chunk; 24 rows are filled up to 32.
const SETUP: Setup<'_> = Setup { format: "f16", chunk: 24, batch: &[1, 2], context: 80 };
const ON_NPU: &str = "[placement]\nexperts = \"npu\"\nattention = \"npu\"\n[experts]\noverflow = \"spill\"\n";

/// A profile in which tokens choose experts by turns, later ones more often.
fn profile(source: &Path) -> Profile {
    let (checkpoint, spec) = import::open(source, &ImportOptions::default()).unwrap();
    let mut trace = Trace::new(SETUP.chunk as u32);
    let mut layers = Vec::new();
    for (i, layer) in spec.layers.iter().enumerate() {
        if let import::spec::Ffn::Moe(moe) = &layer.ffn {
            layers.push(Routing::new(i as u32, moe.router.k as u32, moe.router.experts));
        }
    }
    trace.begin();
    for turn in 0..8 {
        let mut loads = Vec::new();
        for layer in &mut layers {
            let (n, k) = (layer.chosen.len(), layer.k as usize);
            let mut own = vec![0_u16; n];
            for token in 0..SETUP.chunk {
                let chosen: Vec<usize> = (0..k).map(|i| (turn + token * token + i) % n).collect();
                for (i, &a) in chosen.iter().enumerate() {
                    own[a] += 1;
                    layer.chosen[a] += 1;
                    for &b in &chosen[..i] {
                        let pair = layer.pair(a, b).unwrap();
                        layer.together[pair] += 1;
                    }
                }
            }
            layer.tokens += SETUP.chunk as u64;
            loads.extend(own);
        }
        trace.push(Chunk { tokens: SETUP.chunk as u32, loads });
    }
    Profile {
        origin: Origin::of(&checkpoint, &spec).unwrap(),
        reading: Reading::default(),
        layers,
        trace,
        saliency: Vec::new(),
        weights: BTreeMap::new(),
        routes: Routes::default(),
    }
}

/// A folder with a profile and a `model.toml` for `m2-ultra`.
struct Case {
    folder: TempDir,
    toml: PathBuf,
}

impl Case {
    fn new(family: &str, more: &str) -> Self {
        Self::with_chunk(family, more, SETUP.chunk)
    }

    fn with_chunk(family: &str, more: &str, chunk: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(family);
        let toml = Setup { chunk, ..SETUP }.write(&source, folder.path());
        profile(&source).write(&folder.path().join("p.trace")).unwrap();
        let text = fs::read_to_string(&toml).unwrap();
        fs::write(&toml, format!("{text}[calibrate]\nprofile = \"p.trace\"\n{more}")).unwrap();
        Self { folder, toml }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn build(&self, target: &str, out: &str) -> Command {
        let mut command = moec();
        command.env("MOEC_CACHE", self.path("cache")).env("MOEC_THREADS", "1").arg("build").arg(&self.toml);
        command.args(["--quiet", "--no-run", "--target", target, "-o"]).arg(self.path(out));
        command
    }

    fn plan(&self, out: &str) -> Plan {
        Plan::decode(&fs::read(self.path(out).join("plan.bin")).unwrap()).unwrap()
    }
}

/// A matrix `[rows, cols]` of a checkpoint, cast to f16.
#[derive(Clone)]
struct Matrix {
    rows: usize,
    cols: usize,
    data: Vec<f16>,
}

impl Matrix {
    fn at(&self, row: usize, col: usize) -> f16 {
        self.data[row * self.cols + col]
    }

    fn of(rows: usize, cols: usize, at: impl Fn(usize, usize) -> f16) -> Self {
        let data = (0..rows * cols).map(|i| at(i / cols, i % cols)).collect();
        Self { rows, cols, data }
    }

    fn part(&self, start: usize, rows: usize) -> Self {
        Self::of(rows, self.cols, |r, c| self.at(start + r, c))
    }

    fn transposed(&self) -> Self {
        Self::of(self.cols, self.rows, |r, c| self.at(c, r))
    }

    /// Every second row from `start`.
    fn second(&self, start: usize) -> Self {
        Self::of(self.rows / 2, self.cols, |r, c| self.at(2 * r + start, c))
    }

    fn bytes(&self) -> Vec<u8> {
        self.data.iter().flat_map(|x| x.to_le_bytes()).collect()
    }
}

/// A checkpoint, read with nothing of moec.
struct Weights {
    bytes: Vec<u8>,
    config: Value,
}

impl Weights {
    fn open(family: &str) -> Self {
        let folder = checkpoint(family);
        let config = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
        Self { bytes: fs::read(folder.join("model.safetensors")).unwrap(), config }
    }

    fn number(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    /// A tensor; matrices of experts that lie in one are entries of it.
    fn find(&self, name: &str, entry: Option<usize>) -> Option<Matrix> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = tensors.tensor(name).ok()?;
        assert_eq!(tensor.dtype(), Stored::BF16);
        let of_two = tensor.data().chunks_exact(2);
        let all = of_two.map(|b| f16::from_f32(bf16::from_le_bytes([b[0], b[1]]).to_f32()));
        let shape = tensor.shape();
        let cols = *shape.last().unwrap();
        let rows = shape.iter().rev().nth(1).copied().unwrap_or(1);
        let data = all.skip(entry.unwrap_or(0) * rows * cols).take(rows * cols).collect();
        Some(Matrix { rows, cols, data })
    }

    fn matrix(&self, name: &str) -> Matrix {
        self.find(name, None).unwrap_or_else(|| panic!("the checkpoint has no `{name}`"))
    }

    /// The matrices that a package must hold, and no others.
    fn expected(&self, package: &str, plan: &Plan) -> Vec<Matrix> {
        let words: Vec<&str> = package.split('.').collect();
        let ["layers", layer, part, ref rest @ ..] = *words.as_slice() else {
            assert_eq!(package, "head");
            return vec![self.matrix("lm_head.weight")];
        };
        let at = format!("model.layers.{layer}");
        match part {
            "attn" => self.attention(&format!("{at}.self_attn")),
            "ffn" => self.gated(&format!("{at}.mlp"), ["gate_proj", "up_proj", "down_proj"]).unwrap(),
            "shared" => {
                let of =
                    |name| self.gated(&format!("{at}.mlp.{name}"), ["gate_proj", "up_proj", "down_proj"]);
                of("shared_experts").or_else(|| of("shared_expert")).unwrap()
            }
            _ => {
                let layer: u32 = layer.parse().unwrap();
                let table = plan.placement.experts.iter().find(|t| t.layer == layer).unwrap();
                let group = &table.groups[rest[0].parse::<usize>().unwrap()];
                group.experts.iter().flat_map(|&e| self.expert(&at, e as usize)).collect()
            }
        }
    }

    fn gated(&self, at: &str, names: [&str; 3]) -> Option<Vec<Matrix>> {
        names.iter().map(|name| self.find(&format!("{at}.{name}.weight"), None)).collect()
    }

    fn expert(&self, at: &str, e: usize) -> Vec<Matrix> {
        let of_mlp = || self.gated(&format!("{at}.mlp.experts.{e}"), ["gate_proj", "up_proj", "down_proj"]);
        let of_moe = || self.gated(&format!("{at}.block_sparse_moe.experts.{e}"), ["w1", "w3", "w2"]);
        of_mlp().or_else(of_moe).unwrap_or_else(|| {
            // gpt-oss: transposed, gate and up by turns.
            let both = self.find(&format!("{at}.mlp.experts.gate_up_proj"), Some(e)).unwrap().transposed();
            let down = self.find(&format!("{at}.mlp.experts.down_proj"), Some(e)).unwrap().transposed();
            vec![both.second(0), both.second(1), down]
        })
    }

    fn attention(&self, at: &str) -> Vec<Matrix> {
        let matrix = |name: &str| self.matrix(&format!("{at}.{name}.weight"));
        if self.find(&format!("{at}.kv_b_proj.weight"), None).is_none() {
            return ["q_proj", "k_proj", "v_proj", "o_proj"].map(matrix).to_vec();
        }
        let mut all = match self.find(&format!("{at}.q_proj.weight"), None) {
            Some(q) => vec![q],
            None => vec![matrix("q_a_proj"), matrix("q_b_proj")],
        };
        all.extend([matrix("kv_a_proj_with_mqa"), matrix("o_proj")]);
        let (nope, v) = (self.number("qk_nope_head_dim"), self.number("v_head_dim"));
        let up = matrix("kv_b_proj");
        for head in 0..self.number("num_attention_heads") {
            let start = head * (nope + v);
            all.extend([up.part(start, nope).transposed(), up.part(start + nope, v)]);
        }
        all
    }
}

/// The structure of a function, tested from the file.
fn function(name: &str, f: &Function, package: &Package, attention: bool) -> BTreeSet<Vec<u8>> {
    let known: BTreeSet<&str> = Rules::ANE.ops.iter().map(|op| op.name()).collect();
    let mut weights = BTreeSet::new();
    for op in &f.ops {
        let kind = if op.kind == "coreml_update_state" { "write_state" } else { &op.kind };
        assert!(known.contains(kind), "{name}: the Neural Engine has no `{}`", op.kind);
        match kind {
            "conv" => {
                let id = op.arg("weight").unwrap();
                let constant = f.constant(id).unwrap_or_else(|| panic!("{name}: a weight that is computed"));
                assert!(matches!(constant.ty.shape[..], [_, _, 1, 1]), "{name}: {:?}", constant.ty.shape);
                weights.insert(constant.bytes(&package.weights).to_vec());
            }
            // Scores and values: no projection hides in a product.
            "matmul" => {
                assert!(["x", "y"].iter().all(|p| f.constant(op.arg(p).unwrap()).is_none()), "{name}");
            }
            _ => {}
        }
    }
    for value in f.values.iter().filter(|v| !matches!(v.origin, Made::Constant(_))) {
        assert_eq!(value.ty.dtype, Dtype::F16, "{name}: `{}`", value.name);
    }
    // The last number in a name is that of rows: `cap16`, `chunk32`, `rows16`.
    let rows: usize = name.trim_start_matches(char::is_alphabetic).parse().unwrap();
    assert!(rows.is_multiple_of(16), "{name}");
    assert_eq!(f.states.len(), usize::from(attention), "{name}");
    for &state in &f.states {
        let uses = |kind: &str| {
            f.ops.iter().any(|op| op.kind == kind && op.args.values().flatten().any(|id| *id == state))
        };
        assert!(uses("read_state") && (uses("write_state") || uses("coreml_update_state")), "{name}");
    }
    weights
}

/// Packages that a family has besides those of experts, without `layers.L.`.
fn parts(family: &str) -> (&'static [&'static str], &'static [&'static str]) {
    // Of the first layer, and of all others.
    match family {
        "deepseek_v2" | "deepseek_v3" | "glm4_moe" => (&["attn", "ffn"], &["attn", "shared"]),
        "qwen2_moe" => (&["attn", "shared"], &["attn", "shared"]),
        _ => (&["attn"], &["attn"]),
    }
}

fn golden(family: &str) {
    let Some(found) = coreml(family) else { return };
    let case = Case::new(family, ON_NPU);
    ok(case.build("m2-ultra", "out.moec").envs(found));
    let plan = case.plan("out.moec");

    // Everything that lives on the Neural Engine is there.
    let files = tree(&case.path("out.moec/artifacts"));
    let packages: BTreeSet<String> =
        files.iter().filter_map(|(name, _)| Some(name.split_once(".mlpackage")?.0.to_owned())).collect();
    let (first, others) = parts(family);
    let mut wanted = BTreeSet::from(["head".to_owned()]);
    for layer in 0..plan.model.layers {
        let of = if layer == 0 { first } else { others };
        wanted.extend(of.iter().map(|part| format!("layers.{layer}.{part}")));
    }
    for table in &plan.placement.experts {
        wanted.extend((0..table.groups.len()).map(|g| table.group_name(g)));
    }
    assert_eq!(packages, wanted);

    // Every function computes what the checkpoint says.
    let mut verify = moec();
    verify.arg("verify").arg("--quiet").arg("--json").arg("--source").arg(checkpoint(family));
    let report = ok(verify.arg(case.path("out.moec"))).stdout;
    let report: Value = serde_json::from_slice(&report).unwrap();
    let mut functions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for f in report["packages"].as_array().unwrap() {
        let error = f["error"]["relative"].as_f64().unwrap();
        assert!(error > 0.0 && error < 3e-3, "{f}");
        assert_eq!((&f["refused"], f["findings"].as_array().unwrap().len()), (&false.into(), 0), "{f}");
        let package = f["package"].as_str().unwrap().strip_prefix("artifacts/").unwrap();
        let package = package.strip_suffix(".mlpackage").unwrap().to_owned();
        functions.entry(package).or_default().insert(f["function"].as_str().unwrap().to_owned());
    }
    assert_eq!(functions.keys().cloned().collect::<BTreeSet<_>>(), wanted);

    // What the plan calls is found without executing anything, too.
    let mut verify = moec();
    verify.args(["verify", "--static", "--quiet", "--json"]).arg(case.path("out.moec"));
    let report: Value = serde_json::from_slice(&ok(&mut verify).stdout).unwrap();
    assert_eq!(report["functions"], plan.graphs.len());

    // The structure of the files, and the numbers in them.
    let weights = Weights::open(family);
    for (name, functions) in functions {
        let path = case.path(&format!("out.moec/artifacts/{name}.mlpackage"));
        let package = Package::open(&path).unwrap();
        assert_eq!(check::check(&package, &check::Limits::default()), [], "{name}");
        let own: BTreeSet<String> = package.program.functions.keys().cloned().collect();
        assert_eq!(own, functions, "{name}");
        let attention = name.split('.').any(|word| word == "attn");
        if !name.contains("group") {
            let word = if attention { "chunk" } else { "rows" };
            assert_eq!(own, BTreeSet::from([16, 32].map(|n| format!("{word}{n}"))), "{name}");
        }
        let expected: BTreeSet<Vec<u8>> = weights.expected(&name, &plan).iter().map(Matrix::bytes).collect();
        for (at, f) in &package.program.functions {
            assert!(function(at, f, &package, attention) == expected, "{name}: weights of `{at}`");
        }
    }
    emulated(family, &case);
}

/// The whole model with its Neural Engine emulated: what finds no room spills, so nothing but f16 is between its logits
/// and those of transformers.
fn emulated(family: &str, case: &Case) {
    let want = expected(&checkpoint(family));
    let out = case.path("logits.safetensors");
    let run = || {
        let mut command = moec();
        command.env("MOEC_CACHE", case.path("cache")).arg("--quiet").args(["run", "--emulate"]);
        command.arg(case.path("out.moec"));
        command
    };
    // Without, it is refused where there is no Neural Engine, with both ways out.
    if !cfg!(target_os = "macos") {
        let (code, said) = fails(moec().arg("run").arg(case.path("out.moec")).arg("info"));
        assert!(code == 1 && said.contains("--emulate") && said.contains("sh runner/build.sh"), "{said}");
    }
    ok(run().args(["logits", "--ids", &list(&want.ids), "--out"]).arg(&out));
    let (shape, logits) = logits_file(&out);
    assert_eq!(shape, [want.ids.len(), logits.len() / want.ids.len()]);
    let mean = want.logits.iter().map(|&x| f64::from(x)).sum::<f64>() / want.logits.len() as f64;
    let spread: f64 = want.logits.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum();
    let off: f64 = logits.iter().zip(&want.logits).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let relative = (off / spread).sqrt();
    assert!(relative > 0.0 && relative < 2e-2, "{family}: {relative}");
    // Prompt and decoding share one state.
    let (prompt, _) = want.greedy.split_at(want.greedy.len() - 24);
    let said = ok(run().args(["generate", "--ids", &list(prompt), "-n", "24", "--json"])).stdout;
    let said: Value = serde_json::from_slice(&said).unwrap();
    let ids: Vec<u32> = serde_json::from_value(said["ids"].clone()).unwrap();
    // Near ties of these untrained models may fall otherwise in f16, and then all that follows.
    assert_eq!(ids[..8], want.greedy[prompt.len()..][..8], "{family}");
}

/// Runs `body` with the engine of a bundle whose Neural Engine is emulated.
fn engine<T>(case: &Case, body: impl FnOnce(&mut Engine<'_>) -> T) -> T {
    let bundle = Bundle::open(&case.path("out.moec")).unwrap();
    let twin = Twin::of(&bundle, &Progress::silent()).unwrap();
    let unit = Box::new(Emulated::default());
    twin.with_engine(Some((unit, &bundle.folder)), |engine| Ok(body(engine))).unwrap()
}

#[test]
fn sequences_of_one_batch_keep_their_own_states() {
    let Some(found) = coreml("sequences_of_one_batch_keep_their_own_states") else { return };
    let case = Case::new("olmoe", ON_NPU);
    ok(case.build("m2-ultra", "out.moec").envs(found));
    let prompts = [vec![3_u32, 5, 8, 13], vec![21, 34, 55, 89, 144, 233]];
    engine(&case, |engine| {
        let prefill = |engine: &mut Engine<'_>, slot: usize, prompt: &[u32]| {
            engine.prefill(slot as u32, 0, prompt, Want::None, &mut |_, _| Ok(())).unwrap();
        };
        let decode = |engine: &mut Engine<'_>, batch: &[(u32, usize, u32)]| {
            let mut rows = Vec::new();
            let mut keep = |_, logits: &[f32]| {
                rows.push(logits.to_vec());
                Ok(())
            };
            engine.decode(batch, &mut keep).unwrap();
            rows
        };
        for (slot, prompt) in prompts.iter().enumerate() {
            prefill(engine, slot, prompt);
        }
        let both = decode(engine, &[(0, 4, 100), (1, 6, 200)]);
        // Alone, each in the other's slot.
        prefill(engine, 0, &prompts[1]);
        prefill(engine, 1, &prompts[0]);
        assert_eq!(decode(engine, &[(1, 4, 100)])[0], both[0]);
        assert_eq!(decode(engine, &[(0, 6, 200)])[0], both[1]);
        assert_ne!(both[0], both[1]);
    });
}

/// Positions that are decoded again replace what the unit's own states hold, and a prompt that nothing copies goes through
/// every slot.
#[test]
fn states_of_the_unit_follow_big_little_and_best_of() {
    let Some(found) = coreml("states_of_the_unit_follow_big_little_and_best_of") else { return };
    let case = Case::new("olmoe", &format!("{ON_NPU}[decode]\nbig_little = true\n"));
    ok(case.build("m2-ultra", "out.moec").envs(found));
    let prompt = [3_u32, 5, 8, 13, 21];
    engine(&case, |engine| {
        assert!(engine.program().graphs.iter().any(|g| g.stateful));
        let mut read = |again: bool| {
            engine.reset(0).unwrap();
            let mut rows = Vec::new();
            for (pos, &id) in prompt.iter().enumerate() {
                let mut last = Vec::new();
                let mut sink = |_: usize, logits: &[f32]| {
                    last = logits.to_vec();
                    Ok(())
                };
                if again {
                    engine.decode_little(&[(0, pos, id)], &mut sink).unwrap();
                }
                engine.decode(&[(0, pos, id)], &mut sink).unwrap();
                rows.push(last);
            }
            rows
        };
        assert!(read(false) == read(true), "something of the little pass is left");
        let how = Sampling { temperature: 1.0, seed: 4, ..Sampling::default() };
        let request = Request { slot: 0, prompt: &prompt, n: 8, end: &[] };
        for gamma in [0.05, 1.0] {
            let decoder = |e: &Engine<'_>| Decoder::big_little(e.program(), gamma).unwrap();
            let mut with = decoder(engine);
            let done = best_of(engine, &request, 2, &mut with, how).unwrap();
            for c in &done.candidates {
                let mut with = decoder(engine);
                let mut sampler = Sampler::new(Sampling { seed: c.seed, ..how });
                let alone = generate(engine, &request, &mut with, &mut sampler, &mut |_| Ok(())).unwrap();
                assert_eq!(c.ids, alone.ids, "gamma {gamma}");
            }
        }
    });
}

#[test]
fn rows_past_a_capacity_are_lost_or_spill() {
    let Some(found) = coreml("rows_past_a_capacity_are_lost_or_spill") else { return };
    let want = expected(&checkpoint("mixtral"));
    let mut off = Vec::new();
    for overflow in ["spill", "prune"] {
        // Half of the chunks of a profile whose loads are nearly alike: what the real router does is not covered.
        let more =
            format!("[placement]\nexperts = \"npu\"\n[experts]\ncoverage = 0.5\noverflow = \"{overflow}\"\n");
        let case = Case::with_chunk("mixtral", &more, 48);
        ok(case.build("m2-ultra", "out.moec").envs(found.clone()));
        let (logits, tallies) = engine(&case, |engine| {
            let mut all = Vec::new();
            let mut keep = |_, logits: &[f32]| {
                all.extend_from_slice(logits);
                Ok(())
            };
            engine.prefill(0, 0, &want.ids, Want::All, &mut keep).unwrap();
            (all, engine.tallies())
        });
        let layers = case.plan("out.moec").model.layers as usize;
        assert_eq!(tallies.len(), layers);
        let mut sum = Tally::default();
        for (_, t) in &tallies {
            sum.add(t);
        }
        let k = 2;
        assert_eq!(sum.routed as usize, want.ids.len() * k * layers);
        let lost = sum.pruned + sum.spilled;
        assert!(lost > 0, "nothing overflows: {sum:?}");
        assert_eq!(if overflow == "spill" { sum.pruned } else { sum.spilled }, 0);
        // Rows that graphs computed are the pairs that stayed, and padding.
        assert_eq!(sum.rows - sum.padding, sum.routed - lost);
        let square =
            |of: &dyn Fn(usize) -> f32| (0..logits.len()).map(|i| f64::from(of(i)).powi(2)).sum::<f64>();
        off.push((square(&|i| logits[i] - want.logits[i]) / square(&|i| want.logits[i])).sqrt());
    }
    assert!(off[0] < 5e-3 && off[1] > 4.0 * off[0], "{off:?}");
}

macro_rules! families {
    ($($family:ident)*) => {
        $(#[test]
        fn $family() {
            golden(stringify!($family));
        })*

        #[test]
        fn no_family_is_left_out() {
            assert_eq!([$(stringify!($family)),*], support::FAMILIES);
        }
    };
}

families! { deepseek_v2 deepseek_v3 glm4_moe gpt_oss mixtral olmoe phimoe qwen2_moe qwen3_moe }

#[test]
fn two_builds_write_the_same_packages() {
    let Some(found) = coreml("two_builds_write_the_same_packages") else { return };
    let trees = ["a", "b"].map(|_| {
        let case = Case::new("deepseek_v3", ON_NPU);
        ok(case.build("m2-ultra", "out.moec").envs(found.clone()));
        tree(&case.path("out.moec"))
    });
    let packages = trees[0].iter().filter(|(name, _)| name.contains(".mlpackage")).count();
    assert!(packages > 3 * 5, "{packages} files");
    let names = |i: usize| trees[i].iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(0), names(1));
    for ((name, one), (_, two)) in trees[0].iter().zip(&trees[1]) {
        assert!(one == two, "`{name}` differs between two builds");
    }
}

/// `m2-ultra` with another limit on the bytes of a graph.
fn small(case: &Case, bytes: u64) -> String {
    let text = fs::read_to_string(support::root().join("targets/devices/m2-ultra.toml")).unwrap();
    let old = "max_graph_bytes = { value = 1258291200";
    assert!(text.contains(old));
    let path = case.path("small.toml");
    fs::write(&path, text.replace(old, &format!("max_graph_bytes = {{ value = {bytes}"))).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn what_cannot_be_a_graph_stays_and_says_why_or_is_refused_by_name() {
    // A dense layer of deepseek_v2 has 37 KB of weights, an attention 35 KB.
    let wanted = |attention: &str| {
        let home = format!("[placement]\nexperts = \"cpu\"\nattention = \"{attention}\"\n");
        let case = Case::new("deepseek_v2", &home);
        let mut build = case.build(&small(&case, 36_500), "out.moec");
        build.args(["--stop-after", "reside", "--print-after", "reside"]);
        (case, build)
    };
    let (_case, mut build) = wanted("npu");
    let (code, said) = fails(&mut build);
    assert!(code == 1 && said.contains("`layers.0.ffn` cannot be a graph"), "{said}");
    assert!(said.contains("bytes of weights") && said.contains("attention = \"auto\""), "{said}");

    let (_case, mut build) = wanted("auto");
    let text = String::from_utf8(ok(&mut build).stdout).unwrap();
    let p = moec_ir::text::parse_placement(&text).unwrap();
    let of = |scope: &str, op: &str| {
        let mut found = p
            .ops
            .iter()
            .filter(|o| matches!(o.entry, moec_ir::EntryKind::Prefill(_)) && o.scope == scope && o.op == op);
        let row = found.next().unwrap().clone();
        (p.unit(row.unit).to_owned(), row.why)
    };
    let (unit, why) = of("layers.*.ffn", "linear_glu");
    assert!(
        unit == "cpu" && why.starts_with("cannot be a graph: graph `layers.0.ffn` has "),
        "{unit}: {why}"
    );
    // Decoding costs more there, and the cache is where attention is.
    let (unit, why) = of("layers.*.attn", "attention");
    assert!(unit == "cpu" && why.contains("the KV cache has one home"), "{unit}: {why}");
}

#[test]
fn the_package_of_another_layer_is_found_out() {
    let Some(found) = coreml("the_package_of_another_layer_is_found_out") else { return };
    let case = Case::new("gpt_oss", "[placement]\nexperts = \"cpu\"\nattention = \"npu\"\n");
    ok(case.build("m2-ultra", "out.moec").envs(found));
    // Two packages change places, and the manifest with them: the hashes are right, the numbers are not.
    let at = |layer: usize| case.path(&format!("out.moec/artifacts/layers.{layer}.attn.mlpackage"));
    fs::rename(at(0), case.path("kept")).unwrap();
    fs::rename(at(1), at(0)).unwrap();
    fs::rename(case.path("kept"), at(1)).unwrap();
    let path = case.path("out.moec/manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let files = manifest["files"].as_object_mut().unwrap();
    let own: Vec<String> = files.keys().filter(|k| k.contains("layers.0.attn")).cloned().collect();
    assert!(own.len() >= 3, "{own:?}");
    for name in own {
        let other = name.replace("layers.0", "layers.1");
        let (a, b) = (files[&name].take(), files[&other].take());
        (files[&name], files[&other]) = (b, a);
    }
    fs::write(&path, manifest.to_string()).unwrap();
    // What lives in packages alone is held against the checkpoint.
    let verify = || {
        let mut command = moec();
        command.arg("verify").arg("--quiet").arg(case.path("out.moec"));
        command
    };
    let (code, said) = fails(&mut verify());
    assert!(code == 1 && said.contains("--source"), "{said}");
    let (code, said) = fails(verify().arg("--source").arg(checkpoint("gpt_oss")));
    assert!(code == 1 && said.contains("`chunk32` of `artifacts/layers.0.attn.mlpackage` is off"), "{said}");
    assert!(said.contains("`chunk16` of `artifacts/layers.1.attn.mlpackage` is off"), "{said}");
    assert!(!said.contains("head"), "{said}");
}

#[test]
fn a_vocabulary_over_the_limit_becomes_several_packages() {
    let Some(found) = coreml("a_vocabulary_over_the_limit_becomes_several_packages") else { return };
    let case = Case::new("olmoe", "[placement]\nexperts = \"cpu\"\nattention = \"npu\"\n");
    // 320 entries of 64 channels are 41 KB, an attention is 33 KB.
    let device = small(&case, 36_000);
    ok(case.build(&device, "out.moec").envs(found));
    let files = tree(&case.path("out.moec/artifacts"));
    let heads: BTreeSet<&str> =
        files.iter().filter_map(|(n, _)| n.split_once(".mlpackage")).map(|(n, _)| n).collect();
    assert!(heads.is_superset(&BTreeSet::from(["head.0", "head.1"])) && !heads.contains("head"), "{heads:?}");
}

/// Parts are found without coremltools.
#[test]
fn parts_say_what_their_functions_take() {
    for family in support::FAMILIES {
        let folder = tempfile::tempdir().unwrap();
        let config = Config::load(&SETUP.write(&checkpoint(family), folder.path())).unwrap();
        let (checkpoint, spec) = import::open(&config.model.source, &ImportOptions::default()).unwrap();
        let device = Device::find("m2-ultra").unwrap();
        let target = moec_cpu::CpuTarget::new(&device).unwrap();
        let mut c = Compilation::new(&config, &checkpoint, &spec, &target);
        let stops = Stops { print_after: None, stop_after: Some("rewrite") };
        c.run(stops, &Progress::silent(), &mut |_| {}).unwrap();
        let limits = parts::limits(&device.units[device.unit_of(UnitKind::Npu).unwrap()]);
        for layer in 0..spec.layers.len() {
            let part = Part::find(&c.module, &format!("layers.{layer}.attn")).unwrap();
            part.check(&c.module, &limits).unwrap();
            // 80 positions are filled up to 96, 24 rows to 32; a decode call is one row of one sequence.
            assert_eq!((part.is_attention(), part.context(&limits)), (true, Some(96)));
            let graphs = part.graphs(&c.module, &limits).unwrap();
            let shape = |name: &str, at: usize| {
                let port = graphs[at].inputs.iter().find(|p| p.name == name).unwrap();
                port.shape.clone()
            };
            assert_eq!(graphs.len(), 3, "{family}");
            for (at, (name, rows)) in
                [("chunk32", 32), ("chunk16", 16), ("chunk16", 16)].into_iter().enumerate()
            {
                let g = &graphs[at];
                assert_eq!(
                    (&*g.function, g.rows, g.stateful, g.entry),
                    (name, rows, true, part.cuts[at].entry)
                );
                assert_eq!(g.package, format!("artifacts/layers.{layer}.attn.mlpackage"));
                assert_eq!(shape("x", at), [rows, 64, 1, 1]);
                assert_eq!(
                    (shape("mask", at), shape("write", at)),
                    (vec![1, 1, rows, 96], vec![1, 1, 96, rows])
                );
                let channels = c.module.entries[at].ty(part.cuts[at].angles.unwrap()).cols();
                assert_eq!(shape("angles", at), [rows, channels, 1, 1]);
                assert_eq!((g.inputs.len(), g.outputs.len(), &g.outputs[0].shape), (4, 1, &shape("x", at)));
            }
            for (cut, graph) in part.cuts.iter().zip(&c.module.entries) {
                // The part begins behind the norm and ends in front of the residual.
                let norm = &graph.nodes[graph.def(cut.x).unwrap().0 as usize].op;
                assert!(matches!(norm, Op::RmsNorm { .. } | Op::LayerNorm { .. }), "{family}");
                let residual = graph.nodes.iter().find(|n| n.inputs.contains(&cut.y.into())).unwrap();
                assert_eq!(residual.op, Op::Add, "{family}");
                assert_eq!(graph.ty(cut.x), graph.ty(cut.y), "{family}");
            }
        }
        let windows = (0..spec.layers.len())
            .map(|layer| Part::find(&c.module, &format!("layers.{layer}.attn")).unwrap().window());
        let windows: Vec<_> = windows.flatten().collect();
        assert_eq!(windows, if family == "gpt_oss" { vec![16] } else { vec![] }, "{family}");
        let e = Part::find(&c.module, "embed").unwrap_err();
        assert!(e.contains("no graph"), "{e}");
    }
}
