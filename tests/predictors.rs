//! Predictors of active neurons, built as a user would: what a build says of them is counted once more by
//! hand, kernels agree with the evaluator, and the table of `docs/neurons.md` says what they gain and cost.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_bundle::read::Bundle;
use moec_ir::Op;
use moec_passes::decisions::{Alternative, Decision};
use moec_profile::Profile;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{fs, iter};
use support::{calibration, checkpoint, fails, ferris, ferris_relu, moec, ok, recorded, root};

/// Tokens that calibration reads, and windows that perplexity is measured on.
const CALIBRATED: &str = "8192";
const WINDOWS: &str = "12";

/// Profile of ferris-relu.
fn profile() -> &'static Path {
    static PLACE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = PLACE.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let toml = write(&ferris_relu(), folder.path(), "bf16", "");
        let out = folder.path().join("ferris-relu.profile");
        recorded(&toml, &["--text", &calibration(), "--tokens", CALIBRATED], &out);
        (folder, out)
    });
    path
}

/// A `model.toml` whose chunks have as few rows as a predictor is requested.
fn write(source: &Path, folder: &Path, format: &str, more: &str) -> PathBuf {
    let toml = folder.join("model.toml");
    let text = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 512\nprefill_chunk = 8\ndecode_batch = [1, 3]\n\
         [weights]\nexperts = \"{format}\"\nattention = \"f32\"\nembeddings = \"f32\"\nactivations = \"f32\"\n{more}\n",
        source.display(),
    );
    fs::write(&toml, text).unwrap();
    toml
}

/// A build of ferris-relu with a predictor; the folder lives as long as the bundle.
fn build(format: &str, predict: &str, more: &str) -> (tempfile::TempDir, Bundle) {
    let folder = tempfile::tempdir().unwrap();
    let more = format!(
        "[experts]\nskip = \"on\"\npredict = \"{predict}\"\n[calibrate]\nprofile = \"{}\"\n{more}",
        profile().display()
    );
    let toml = write(&ferris_relu(), folder.path(), format, &more);
    let path = folder.path().join("b");
    ok(moec().arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(&path));
    (folder, Bundle::open(&path).unwrap())
}

/// The numbers of a weight of a bundle, matrix by matrix; `None` where there is none of that name.
fn numbers(bundle: &Bundle, name: &str) -> Option<Vec<Vec<f32>>> {
    let segment = bundle.plan.segments.iter().find(|s| s.name == name)?;
    let file = fs::read(bundle.folder.join(&bundle.plan.files[segment.file as usize].path)).unwrap();
    let packed = &file[segment.offset as usize..][..segment.bytes as usize];
    let shape: Vec<usize> = segment.shape.iter().map(|&n| n as usize).collect();
    let &[matrices, rows, cols] = shape.as_slice() else { panic!("{shape:?}") };
    let matrix = |e: usize| {
        let mut out = vec![0.0; rows * cols];
        moec_cpu::unpack(segment, packed, e, 0..rows, 0..cols, &mut out).unwrap();
        out
    };
    Some((0..matrices).map(matrix).collect())
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// The gain of the norm before a layer's experts, which weights of f32 have taken in: their rows come without
/// it.
fn gain(layer: u32) -> Vec<f32> {
    let file = fs::read(ferris_relu().join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let gain = tensors.tensor(&format!("model.layers.{layer}.post_attention_layernorm.weight")).unwrap();
    assert_eq!(gain.dtype(), safetensors::Dtype::BF16);
    let wide = |b: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
    gain.data().chunks_exact(2).map(wide).collect()
}

/// Recall, and the shares of neurons that are active and that are taken to be, of every other row of the
/// profile: by a loop of its own over what the bundle holds.
fn counted(bundle: &Bundle, layer: u32) -> [f64; 3] {
    let profile = Profile::read(profile()).unwrap();
    let of_layer = format!("layers.{layer}.");
    let reads = |r: &String| r.starts_with(&of_layer) && r.ends_with("gate_up");
    let sample = profile.samples.iter().find(|s| s.readers.iter().any(reads)).unwrap();
    let gain = gain(layer);
    let rows: Vec<f32> = sample.rows().iter().zip(gain.iter().cycle()).map(|(x, g)| x / g).collect();
    let stem = bundle.plan.segments.iter().map(|s| s.name.clone());
    let stem =
        stem.filter(|n| n.starts_with(&of_layer)).find_map(|n| n.strip_suffix("neurons").map(str::to_owned));
    let named = |what: &str| numbers(bundle, &format!("{}{what}", stem.as_ref().unwrap()));
    let (neurons, margins) = (named("neurons").unwrap(), named("predict_margin").unwrap());
    let hidden = sample.cols;
    let (mut active_count, mut found, mut taken, mut all) = (0, 0, 0, 0);
    for e in 0..neurons.len() {
        let right = named("predict_right").map(|r| r[e].clone());
        let left = named("predict_left").or_else(|| named("predict_codes")).unwrap()[e].clone();
        for x in rows.chunks_exact(hidden).skip(1).step_by(2) {
            let met: Vec<f32> = match &right {
                Some(right) => right.chunks_exact(hidden).map(|r| dot(r, x) as f32).collect(),
                None => x.to_vec(),
            };
            let said = left.chunks_exact(met.len()).map(|l| dot(l, &met)).zip(&margins[e]);
            let gates = neurons[e].chunks_exact(3 * hidden).map(|n| dot(&n[..hidden], x));
            for (gate, (said, margin)) in gates.zip(said) {
                let (active, take) = (gate > 0.0, said + f64::from(*margin) > 0.0);
                active_count += usize::from(active);
                found += usize::from(active && take);
                taken += usize::from(take);
                all += 1;
            }
        }
    }
    [found as f64 / active_count as f64, active_count as f64 / all as f64, taken as f64 / all as f64]
}

/// Decisions about predictors, by layer.
fn predictors(bundle: &Bundle) -> Vec<Decision> {
    let all = bundle.decisions().unwrap().decisions;
    all.into_iter().filter(|d| d.subject == "predictors of neurons").collect()
}

fn chosen(d: &Decision) -> &Alternative {
    d.taken().unwrap()
}

#[test]
fn what_a_build_says_is_what_a_count_by_hand_gives() {
    for predict in ["low-rank", "coarse"] {
        let (_folder, bundle) = build("f32", predict, "");
        let decisions = predictors(&bundle);
        assert_eq!(decisions.len(), 4);
        for d in &decisions {
            assert!(d.chosen.starts_with(predict), "{d:?}");
            let said = &chosen(d).figures;
            let [recall, active, taken] = counted(&bundle, d.layer.unwrap());
            let near = |a: f64, b: f64| (a - b).abs() < 1e-4;
            assert!(
                near(said["found_share"], recall)
                    && near(d.figures["active_share"], active)
                    && near(said["taken_share"], taken),
                "{d:?}: {recall} found, {active} active, {taken} taken"
            );
            // Fitted to others, a requested recall of 99 % holds nearly; and who is passed over is worth the
            // while.
            assert!(said["found_share"] > 0.95 && said["taken_share"] < 0.8, "{said:?}");
        }
        // Kernels compute what the evaluator computes, by the bundle's weights and by the checkpoint's.
        let folder = &bundle.folder;
        ok(moec().arg("verify").arg(folder).arg("--quiet"));
        ok(moec().arg("verify").arg(folder).arg("--source").arg(ferris_relu()).arg("--quiet"));
        ok(moec().args(["verify", "--static", "--source"]).arg(ferris_relu()).arg(folder).arg("--quiet"));
        let said = String::from_utf8(ok(moec().arg("explain").arg(folder)).stdout).unwrap();
        assert!(said.contains("predictors of neurons") && said.contains(&decisions[0].chosen), "{said}");
    }
}

#[test]
fn few_rows_ask_a_predictor_and_a_prompt_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let more = format!(
        "[experts]\nskip = \"on\"\npredict = \"coarse\"\n[calibrate]\nprofile = \"{}\"\n",
        profile().display()
    );
    let toml = write(&ferris_relu(), folder.path(), "bf16", &more);
    let text = fs::read_to_string(&toml).unwrap().replace("prefill_chunk = 8", "prefill_chunk = 32");
    fs::write(&toml, text).unwrap();
    let path = folder.path().join("b");
    ok(moec().arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(&path));
    let module = Bundle::open(&path).unwrap().graph().unwrap();
    for graph in &module.entries {
        let asks = |o: &Op| matches!(o, Op::NeuronFfn { predict: Some(_), .. });
        let by_neurons = |o: &Op| matches!(o, Op::NeuronFfn { .. });
        let ops = || graph.nodes.iter().map(|n| &n.op).filter(|o| by_neurons(o));
        assert_eq!(ops().count(), 4);
        let rows = graph.ty(moec_ir::Graph::IDS).shape[0];
        assert_eq!(ops().filter(|o| asks(o)).count(), if rows > 8 { 0 } else { 4 }, "{rows} rows");
    }
}

#[test]
fn auto_takes_what_reads_less_and_quality_allows() {
    let why = |more: &str| {
        let (_folder, bundle) = build("bf16", "auto", more);
        let decisions = predictors(&bundle);
        let asks = |n: &moec_ir::Node| matches!(n.op, Op::NeuronFfn { predict: Some(_), .. });
        let asked = bundle.graph().unwrap().entries.iter().flat_map(|g| &g.nodes).filter(|n| asks(n)).count();
        assert_eq!(asked > 0, decisions.iter().any(|d| d.chosen != "off"));
        decisions
    };
    let silent = why("");
    assert!(
        silent.iter().all(|d| d.chosen == "off" && d.reason.contains("no loss is allowed")),
        "{silent:?}"
    );
    let folder = tempfile::tempdir().unwrap();
    let (text, few) =
        (fs::read_to_string(ferris().join("eval/text.txt")).unwrap(), folder.path().join("text.txt"));
    fs::write(&few, text.chars().take(12_000).collect::<String>()).unwrap();
    let budget = |share: &str| {
        why(&format!("[quality]\nmax_perplexity_increase = \"{share}\"\ntext = [\"{}\"]\n", few.display()))
    };
    let allowed = budget("50%");
    let increase = allowed[0].figure("perplexity_increase_share").unwrap();
    assert!(increase.abs() < 0.1, "{increase}");
    for d in &allowed {
        let bytes = |a: &Alternative| a.figures["token_bytes"];
        let (off, tried) = d.alternatives.split_first().unwrap();
        let least = tried.iter().map(bytes).fold(f64::INFINITY, f64::min);
        if least < bytes(off) {
            assert_eq!((bytes(chosen(d)), d.reason.as_str()), (least, "reads less than gate bounds"));
        } else {
            assert_eq!((d.chosen.as_str(), d.reason.as_str()), ("off", "gate bounds read no more"));
        }
    }
    assert!(allowed.iter().any(|d| d.chosen != "off"), "{allowed:?}");
    if increase > 0.0 {
        let strict = budget("0%");
        assert!(strict.iter().all(|d| d.chosen == "off" && d.reason.contains("would rise")), "{strict:?}");
    }
}

#[test]
fn what_cannot_be_predicted_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |source: &Path, more: &str| {
        let toml = write(source, folder.path(), "bf16", more);
        fails(moec().arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(folder.path().join("b")))
            .1
    };
    let said = refused(&ferris_relu(), "[experts]\nskip = \"on\"\npredict = \"coarse\"\n");
    assert!(said.contains("needs a profile") && said.contains("hint:"), "{said}");
    let recorded = format!("[calibrate]\nprofile = \"{}\"\n", profile().display());
    let said =
        refused(&ferris_relu(), &format!("[experts]\nskip = \"off\"\npredict = \"low-rank\"\n{recorded}"));
    assert!(said.contains("nothing to predict") && said.contains("hint:"), "{said}");
    let said = refused(&checkpoint("olmoe"), &format!("[experts]\npredict = \"coarse\"\n{recorded}"));
    assert!(said.contains("hint:"), "{said}");
}

/// Perplexity of held-out text, decoded in calls of few rows.
fn perplexity(bundle: &Bundle) -> f64 {
    let mut eval = moec();
    eval.arg("eval").arg(&bundle.folder).args(["--windows", WINDOWS, "--json", "--text"]);
    let said: serde_json::Value =
        serde_json::from_slice(&ok(eval.arg(ferris().join("eval/text.txt"))).stdout).unwrap();
    said["perplexity"].as_f64().unwrap()
}

/// Rows of the table: experts, predictor, found, taken, bytes of a token, perplexity and what that is beside
/// exact.
fn table() -> Vec<(String, [f64; 4])> {
    let mut rows = Vec::new();
    for format in ["bf16", "q8", "q4"] {
        let (_folder, exact) = build(format, "off", "");
        let alone = perplexity(&exact);
        let mut first = true;
        for predict in ["low-rank", "coarse"] {
            let (_folder, bundle) = build(format, predict, "");
            let all = predictors(&bundle);
            let mean = |of: &dyn Fn(&Decision) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
            if std::mem::take(&mut first) {
                let way = if format == "bf16" { "gate bounds" } else { "gates" };
                let bytes = mean(&|d| d.alternatives[0].figures["token_bytes"] / 1e3);
                rows.push((
                    format!("{format} | {way}"),
                    [100.0, 100.0 * mean(&|d| d.figures["active_share"]), bytes, 0.0],
                ));
            }
            let rise = 100.0 * (perplexity(&bundle) / alone - 1.0);
            let kinds: Vec<&str> = all.iter().map(|d| d.chosen.as_str()).collect();
            let kind = if kinds.windows(2).all(|k| k[0] == k[1]) { kinds[0] } else { predict };
            let of = |name: &'static str| mean(&move |d| chosen(d).figures[name]);
            let numbers =
                [100.0 * of("found_share"), 100.0 * of("taken_share"), of("token_bytes") / 1e3, rise];
            rows.push((format!("{format} | {kind}"), numbers));
        }
    }
    rows
}

#[test]
fn the_page_says_what_predictors_gain_and_cost() {
    const PAGE: &str = "docs/neurons.md";
    let rows = table();
    for (who, [found, taken, _, rise]) in &rows {
        assert!(*found > 95.0 && *taken < 80.0 && rise.abs() < 5.0, "{who}: {found} %, {taken} %, {rise} %");
    }
    let line = |(who, [found, taken, bytes, rise]): &(String, [f64; 4])| {
        format!("| {who} | {found:.1} % | {taken:.1} % | {bytes:.1} kB | {rise:+.2} % |\n")
    };
    let head = "| experts | who says | found | taken to be active | read | perplexity |\n|---|---|---|---|---|---|\n";
    let table: String =
        iter::once(format!("\n{head}")).chain(rows.iter().map(line)).chain(["\n".to_owned()]).collect();
    let page = fs::read_to_string(root().join(PAGE)).unwrap();
    let (before, rest) = page.split_once("--test end_to_end predictors::` -->\n").unwrap();
    let (stands, behind) = rest.split_once("<!-- /predict -->").unwrap();
    if std::env::var_os("MOEC_BLESS").is_some() {
        let page = format!("{before}--test end_to_end predictors::` -->\n{table}<!-- /predict -->{behind}");
        return fs::write(root().join(PAGE), page).unwrap();
    }
    // Which neurons are active may depend on how a machine rounds, a little.
    let numbers = |text: &str| -> Vec<f64> {
        text.split(|c: char| !(c.is_ascii_digit() || c == '.')).filter_map(|n| n.parse().ok()).collect()
    };
    let (stand, found) = (numbers(stands), numbers(&table));
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 0.5 + 0.02 * b;
    assert!(
        stand.len() == found.len() && stand.iter().zip(&found).all(near),
        "{PAGE} says{stands}and not{table}"
    );
}
