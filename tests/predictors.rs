//! Predictors of active neurons, from a user's view. A build's figures are recounted, kernels agree with the
//! evaluator, and the table of `docs/neurons.md` has their gains and costs.
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

/// Tokens that calibration reads, and windows for measuring perplexity.
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

/// A `model.toml` whose calls have few enough rows for a predictor.
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

/// Builds ferris-relu with a predictor. The folder must live as long as the bundle.
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

/// The numbers of a weight of a bundle, matrix by matrix; `None` if no weight has that name.
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

/// Weights of the norm before a layer's experts. In f32 they are folded into the experts' weights, so rows
/// come without them.
fn gain(layer: u32) -> Vec<f32> {
    let file = fs::read(ferris_relu().join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let gain = tensors.tensor(&format!("model.layers.{layer}.post_attention_layernorm.weight")).unwrap();
    assert_eq!(gain.dtype(), safetensors::Dtype::BF16);
    let wide = |b: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
    gain.data().chunks_exact(2).map(wide).collect()
}

/// Recall, and the shares of active neurons and of neurons predicted active. Computed by a separate loop over
/// every other row of the profile, with the bundle's weights.
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
            let projected: Vec<f32> = match &right {
                Some(right) => right.chunks_exact(hidden).map(|r| dot(r, x) as f32).collect(),
                None => x.to_vec(),
            };
            let predicted = left.chunks_exact(projected.len()).map(|l| dot(l, &projected)).zip(&margins[e]);
            let gates = neurons[e].chunks_exact(3 * hidden).map(|n| dot(&n[..hidden], x));
            for (gate, (score, margin)) in gates.zip(predicted) {
                let (active, take) = (gate > 0.0, score + f64::from(*margin) > 0.0);
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
    d.chosen_alternative().unwrap()
}

#[test]
fn reported_predictor_figures_equal_a_manual_count() {
    for predict in ["low-rank", "coarse"] {
        let (_folder, bundle) = build("f32", predict, "");
        let decisions = predictors(&bundle);
        assert_eq!(decisions.len(), 4);
        for d in &decisions {
            assert!(d.chosen.starts_with(predict), "{d:?}");
            let reported = &chosen(d).figures;
            let [recall, active, taken] = counted(&bundle, d.layer.unwrap());
            let near = |a: f64, b: f64| (a - b).abs() < 1e-4;
            assert!(
                near(reported["found_share"], recall)
                    && near(d.figures["active_share"], active)
                    && near(reported["taken_share"], taken),
                "{d:?}: {recall} found, {active} active, {taken} taken"
            );
            // The predictor was fitted to other rows, so recall is nearly the requested 99 %, and enough
            // neurons are skipped.
            assert!(reported["found_share"] > 0.95 && reported["taken_share"] < 0.8, "{reported:?}");
        }
        // Kernels give the evaluator's results, with the bundle's weights and with the checkpoint's.
        let folder = &bundle.folder;
        ok(moec().arg("verify").arg(folder).arg("--quiet"));
        ok(moec().arg("verify").arg(folder).arg("--source").arg(ferris_relu()).arg("--quiet"));
        ok(moec().args(["verify", "--static", "--source"]).arg(ferris_relu()).arg(folder).arg("--quiet"));
        let stdout = String::from_utf8(ok(moec().arg("explain").arg(folder)).stdout).unwrap();
        assert!(
            stdout.contains("predictors of neurons") && stdout.contains(&decisions[0].chosen),
            "{stdout}"
        );
    }
}

#[test]
fn predictor_is_used_for_few_rows_and_not_for_prompts() {
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
        let has_predictor = |o: &Op| matches!(o, Op::NeuronFfn { predict: Some(_), .. });
        let by_neurons = |o: &Op| matches!(o, Op::NeuronFfn { .. });
        let ops = || graph.nodes.iter().map(|n| &n.op).filter(|o| by_neurons(o));
        assert_eq!(ops().count(), 4);
        let rows = graph.ty(moec_ir::Graph::IDS).shape[0];
        assert_eq!(ops().filter(|o| has_predictor(o)).count(), if rows > 8 { 0 } else { 4 }, "{rows} rows");
    }
}

#[test]
fn auto_selects_the_cheapest_predictor_within_quality() {
    let why = |more: &str| {
        let (_folder, bundle) = build("bf16", "auto", more);
        let decisions = predictors(&bundle);
        let has_predictor = |n: &moec_ir::Node| matches!(n.op, Op::NeuronFfn { predict: Some(_), .. });
        let predicted_nodes = bundle
            .graph()
            .unwrap()
            .entries
            .iter()
            .flat_map(|g| &g.nodes)
            .filter(|n| has_predictor(n))
            .count();
        assert_eq!(predicted_nodes > 0, decisions.iter().any(|d| d.chosen != "off"));
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
fn impossible_predictor_settings_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |source: &Path, more: &str| {
        let toml = write(source, folder.path(), "bf16", more);
        fails(moec().arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(folder.path().join("b")))
            .1
    };
    let error = refused(&ferris_relu(), "[experts]\nskip = \"on\"\npredict = \"coarse\"\n");
    assert!(error.contains("needs a profile") && error.contains("hint:"), "{error}");
    let recorded = format!("[calibrate]\nprofile = \"{}\"\n", profile().display());
    let error =
        refused(&ferris_relu(), &format!("[experts]\nskip = \"off\"\npredict = \"low-rank\"\n{recorded}"));
    assert!(error.contains("nothing to predict") && error.contains("hint:"), "{error}");
    let error = refused(&checkpoint("olmoe"), &format!("[experts]\npredict = \"coarse\"\n{recorded}"));
    assert!(error.contains("hint:"), "{error}");
}

/// Perplexity on held-out text, decoded in calls of few rows.
fn perplexity(bundle: &Bundle) -> f64 {
    let mut eval = moec();
    eval.arg("eval").arg(&bundle.folder).args(["--windows", WINDOWS, "--json", "--text"]);
    let report: serde_json::Value =
        serde_json::from_slice(&ok(eval.arg(ferris().join("eval/text.txt"))).stdout).unwrap();
    report["perplexity"].as_f64().unwrap()
}

/// Rows of the table: experts, predictor, recall, predicted share, bytes of a token, perplexity and its
/// change from exact.
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
fn predictor_table_of_the_page_is_current() {
    const PAGE: &str = "docs/neurons.md";
    let rows = table();
    for (name, [found, taken, _, rise]) in &rows {
        assert!(*found > 95.0 && *taken < 80.0 && rise.abs() < 5.0, "{name}: {found} %, {taken} %, {rise} %");
    }
    let line = |(name, [found, taken, bytes, rise]): &(String, [f64; 4])| {
        format!("| {name} | {found:.1} % | {taken:.1} % | {bytes:.1} kB | {rise:+.2} % |\n")
    };
    let head = "| experts | who says | found | taken to be active | read | perplexity |\n|---|---|---|---|---|---|\n";
    let table: String =
        iter::once(format!("\n{head}")).chain(rows.iter().map(line)).chain(["\n".to_owned()]).collect();
    let page = fs::read_to_string(root().join(PAGE)).unwrap();
    let (before, rest) = page.split_once("--test end_to_end predictors::` -->\n").unwrap();
    let (written, after) = rest.split_once("<!-- /predict -->").unwrap();
    if std::env::var_os("MOEC_BLESS").is_some() {
        let page = format!("{before}--test end_to_end predictors::` -->\n{table}<!-- /predict -->{after}");
        return fs::write(root().join(PAGE), page).unwrap();
    }
    // Which neurons are active depends slightly on the machine's rounding.
    let numbers = |text: &str| -> Vec<f64> {
        text.split(|c: char| !(c.is_ascii_digit() || c == '.')).filter_map(|n| n.parse().ok()).collect()
    };
    let (stand, found) = (numbers(written), numbers(&table));
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 0.5 + 0.02 * b;
    assert!(
        stand.len() == found.len() && stand.iter().zip(&found).all(near),
        "{PAGE} says{written}and not{table}"
    );
}
