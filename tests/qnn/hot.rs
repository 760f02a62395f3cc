//! Networks of hot neurons: built on request, verified, and executed in parallel to kernels of the cold
//! neurons.

use super::library::installed;
use super::{Case, PHONE, Tiny, ferris, files};
use crate::support::{checkpoint, distance, expected, fails, ferris_relu, list, ok};
use moec_base::progress::Progress;
use moec_bundle::read::Bundle;
use moec_ir::EntryKind;
use moec_ir::plan::{Builtin, Code, Paging};
use moec_measure::host_build::HostBuild;
use moec_passes::hot::HotShare;
use moec_runtime::CheckLevel;
use moec_runtime::LogitRows;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const EXPERTS: usize = 24;
const LAYERS: u64 = 4;

/// `ferris-relu` with its experts in few groups, for decoding one and four sequences.
fn relu() -> Case {
    let case =
        Case::of("ferris-relu", 64, "hot = \"npu\"\n[experts]\ngroup = 24\nsizes = 1\nskip = \"on\"\n");
    let text = fs::read_to_string(&case.toml).unwrap();
    fs::write(&case.toml, text.replace("decode_batch = [1]", "decode_batch = [1, 4]")).unwrap();
    case
}

#[test]
fn hot_neurons_by_batch_become_networks_that_share_weights_and_verify() {
    let case = relu();
    case.build(PHONE, "a.moec");
    let decisions = Bundle::open(&case.path("a.moec")).unwrap().decisions().unwrap().decisions;
    let shares: Vec<HotShare> = decisions.iter().filter_map(HotShare::of).collect();
    let of = |layer: u64, batch: u32| {
        let found = shares.iter().find(|s| u64::from(s.layer) == layer && s.batch == batch).unwrap();
        assert!(found.networks, "{found:?}");
        found.hot
    };
    assert!(shares.iter().all(|s| s.batch != 2 || !s.networks), "{shares:?}");
    for layer in 0..LAYERS {
        let [one, four] = [1, 4].map(|batch| of(layer, batch));
        assert!(one > 0 && one < four, "{one} and {four} hot neurons in layer {layer}");
        // Every expert has its own list of neurons; those of smaller batches come first.
        let file = case.path(&format!("a.moec/artifacts/layers.{layer}.hot.qnn/neurons.bin"));
        assert_eq!(fs::read(file).unwrap().len(), EXPERTS * four as usize * 4);
    }

    let report = case.json("verify", &[]);
    let mut found: BTreeMap<&str, usize> = BTreeMap::new();
    for f in report["packages"].as_array().unwrap() {
        let package = f["package"].as_str().unwrap();
        if package.ends_with(".hot.qnn") {
            *found.entry(package).or_default() += 1;
            let error = f["error"]["relative"].as_f64().unwrap();
            assert!(error > 0.0 && error < 0.03 && f["refused"] == false, "{f}");
            // Together with the CPU's neurons it is the whole expert; the worst expert is reported.
            let together = f["function"].as_str().unwrap().starts_with("hot and cold, batch ");
            assert_eq!(f["experts"], if together { EXPERTS } else { 1 }, "{f}");
        }
    }
    assert_eq!(found.len() as u64, LAYERS);
    assert!(found.values().all(|&n| n == 2 * EXPERTS + 2), "{found:?}");
    case.json("verify", &["--static"]);

    // Batches share the codes of their common weights, which are those of the largest batch.
    let report = case.json("inspect", &[]);
    for a in report["unit"]["artifacts"].as_array().unwrap() {
        let of = |key: &str| a[key].as_u64().unwrap();
        if a["package"].as_str().unwrap().ends_with(".hot.qnn") {
            assert!(of("functions") == 48 && of("unshared") > of("weights") * 5 / 4, "{a}");
        }
        assert!(of("largest") <= of("weights") && of("activations") > 0, "{a}");
    }
    assert_eq!(report["unit"]["tile_memory"], 8 << 20);

    // The plan executes the networks when decoding.
    assert_eq!(divided(&case.path("a.moec")), [4, 4]);
    let hot = &report["hot"];
    assert_eq!(hot["entries"].as_array().unwrap().len(), 2, "{hot}");
    let bytes = |of: &Value, key: &str| of[key].as_u64().unwrap();
    // Each batch has its own cold neurons, a larger batch fewer; prompts compute all neurons.
    let [one, four] = [0, 1].map(|i| bytes(&hot["entries"][i], "cold_bytes"));
    assert!(four < one && bytes(hot, "cold_bytes") == one + four, "{hot}");
    assert!(bytes(hot, "codes") > 0 && bytes(hot, "codes") < bytes(hot, "prompt_bytes"), "{hot}");
    let explained = ok(case.moec("explain").arg(case.path("a.moec"))).stdout;
    let explained = String::from_utf8(explained).unwrap();
    assert!(explained.contains("in networks, beside the CPU, which takes the others"), "{explained}");
    assert!(explained.contains("hot neurons: requested by `placement.hot`"), "{explained}");
    let inspected = String::from_utf8(ok(case.moec("inspect").arg(case.path("a.moec"))).stdout).unwrap();
    assert!(inspected.contains("held twice"), "{inspected}");
    let trace = case.path("a.trace").display().to_string();
    let simulated = case.json("simulate", &["--trace", &trace, "--decode", "4"]);
    assert_eq!(simulated["networks"]["functions"], 4 * 48);

    // Two builds give the same bytes.
    case.build(PHONE, "b.moec");
    let [a, b] = ["a.moec", "b.moec"].map(|name| files(&case.path(name).join("artifacts")));
    assert!(a == b, "two builds differ");

    // Lists of neurons that do not fit the codes are detected.
    let file = case.path("b.moec/artifacts/layers.0.hot.qnn/neurons.bin");
    let right = fs::read(&file).unwrap();
    let each = right.len() / EXPERTS;
    let mut swapped = right.clone();
    swapped[..2 * each].rotate_left(each);
    let mut twice = right.clone();
    twice.copy_within(0..4, 4);
    for (bytes, expected) in
        [(swapped.clone(), "is off by"), (twice, "duplicates"), (right[4..].to_vec(), "has fewer than")]
    {
        case.forge("b.moec", "artifacts/layers.0.hot.qnn/neurons.bin", &bytes);
        let (code, stderr) = fails(case.moec("verify").arg(case.path("b.moec")));
        assert!(code == 1 && stderr.contains(expected) && stderr.contains("layers.0.hot"), "{stderr}");
    }
    // Static verification detects them, too, since they do not complement the CPU's lists.
    case.forge("b.moec", "artifacts/layers.0.hot.qnn/neurons.bin", &swapped);
    let (code, stderr) = fails(case.moec("verify").arg("--static").arg(case.path("b.moec")));
    assert!(code == 1 && stderr.contains("differ in the CPU's neurons"), "{stderr}");
}

/// A row with few active hot neurons has a very small spread. So networks of one row are judged by the spread
/// of all rows.
#[test]
fn small_batch_networks_are_judged_by_the_spread_of_all_rows() {
    let Some(tools) = installed() else { return };
    let case = relu();
    let text = fs::read_to_string(&case.toml).unwrap();
    fs::write(&case.toml, text.replace("decode_batch = [1, 4]", "decode_batch = [1, 2, 4]")).unwrap();
    case.build(PHONE, "a.moec");
    let mut verify = case.moec("verify");
    verify.arg(case.path("a.moec")).arg("--json").envs(tools.iter().map(|(name, value)| (name, value)));
    let report: Value = serde_json::from_slice(&ok(&mut verify).stdout).unwrap();
    assert_eq!(report["verdict"], "right", "{}", report["failures"]);
    let packages = report["packages"].as_array().unwrap();
    let of_one = packages.iter().filter(|f| f["function"].as_str().unwrap().ends_with("_batch1"));
    let executed = of_one.filter(|f| f["checks"].as_array().is_some_and(|checks| !checks.is_empty()));
    assert!(executed.count() > EXPERTS, "{report}");
}

/// Number of layers with hot neurons, by decode entry point. A set of hot neurons is one step of the unit.
/// The CPU has steps in parallel, and waits for it before both results are added.
fn divided(bundle: &Path) -> Vec<usize> {
    let bundle = Bundle::open(bundle).unwrap();
    let decisions = bundle.decisions().unwrap().decisions;
    let shares: Vec<HotShare> = decisions.iter().filter_map(HotShare::of).collect();
    let plan = &bundle.plan;
    let mut layers = Vec::new();
    for entry in &plan.entries {
        let steps = entry.steps.iter().enumerate().filter_map(|(i, step)| match step.code {
            Code::Builtin(Builtin::Experts { set, .. }) => {
                let set = &plan.expert_sets[set as usize];
                set.hot.map(|_| (i, step, set.batch))
            }
            _ => None,
        });
        let hot: Vec<_> = steps.collect();
        let EntryKind::Decode(batch) = entry.kind else {
            assert!(hot.is_empty(), "{}", entry.kind);
            continue;
        };
        let shares = shares.iter().filter(|s| s.networks && s.batch == batch);
        assert_eq!(hot.len(), shares.count(), "{}", entry.kind);
        layers.push(hot.len());
        for (i, step, of) in hot {
            assert!(step.unit == 1 && of == Some(batch), "{step:?}");
            let waits = entry.steps.iter().position(|s| s.unit == 0 && s.deps.contains(&(i as u32))).unwrap();
            let parallel = entry.steps[i + 1..waits].iter().filter(|s| matches!(s.code, Code::Kernel(_)));
            assert!(parallel.count() >= 2, "{}: {i} to {waits}", entry.kind);
        }
    }
    layers
}

/// Logits of a prompt, then of two sequences that continue it token by token, alone and together in each
/// batch.
pub(super) fn logits(built: &Tiny) -> Vec<f32> {
    let ids: Vec<u32> = expected(&checkpoint(&built.model)).ids.iter().take(12).copied().collect();
    let bundle = Bundle::open(&built.bundle()).unwrap();
    let host_build = HostBuild::of(&bundle, &Progress::silent()).unwrap();
    let mut all = Vec::new();
    host_build
        .with_engine(Some(&bundle.files(CheckLevel::Small).unwrap()), |engine| {
            let mut keep = |_: usize, logits: &[f32]| {
                all.extend_from_slice(logits);
                Ok(())
            };
            for slot in 0..2 {
                engine
                    .prefill(slot, 0, &ids[..6], LogitRows::All, &mut keep)
                    .map_err(moec_base::Error::from)?;
            }
            for (i, &id) in ids[6..].iter().enumerate() {
                let rows = [(0, 6 + i, id), (1, 6 + i, ids[i])];
                let calls: &[&[(u32, usize, u32)]] = if i < 3 { &[&rows[..1], &rows[1..]] } else { &[&rows] };
                for rows in calls {
                    engine.decode(rows, &mut keep).map_err(moec_base::Error::from)?;
                }
            }
            Ok(())
        })
        .unwrap();
    all
}

/// Decoding with hot neurons in networks gives the same results as without, up to rounding.
#[test]
fn hot_and_cold_neurons_give_the_logits_of_whole_experts() {
    for model in ["smallthinker_4b", "turbosparse_mixtral", "bamboo", "prosparse"] {
        let hot = Tiny::new(model, &[1, 2], "[placement]\nhot = \"npu\"\n");
        let layers = divided(&hot.bundle());
        assert!(layers.len() == 2 && layers[0] > 0, "{model}: {layers:?}");
        let whole = Tiny::new(model, &[1, 2], "");
        let (hot, whole) = (logits(&hot), logits(&whole));
        // The prompt uses whole experts in both builds.
        assert!(hot[..hot.len() / 2] == whole[..hot.len() / 2], "{model}");
        let off = decoded_differences(&hot, &whole);
        let [least, .., most] = off.as_slice() else { panic!("{model}: no rows") };
        println!(
            "{model}: logits by hot and cold neurons are off by {least:.1e} to {most:.1e} of their spread"
        );
        // If two experts have nearly equal scores, rounding decides; this may affect one of twelve tokens.
        assert!(off[0] > 0.0 && off[10] < 5e-3 && off[11] < 0.1, "{model}: {off:?}");
    }
}

/// Logits of the decoded tokens of two bundles: shares of the spread by which rows differ, ascending.
pub(super) fn decoded_differences(found: &[f32], expected: &[f32]) -> Vec<f32> {
    assert_eq!(found.len(), expected.len());
    // Twelve of 24 rows belong to the prompt.
    let prompt = found.len() / 2;
    let (found, expected) = (&found[prompt..], &expected[prompt..]);
    let spread =
        expected.iter().fold(f32::MIN, |a, b| a.max(*b)) - expected.iter().fold(f32::MAX, |a, b| a.min(*b));
    let rows = found.chunks(found.len() / 12).zip(expected.chunks(found.len() / 12));
    let mut off: Vec<f32> = rows.map(|(found, expected)| distance(found, expected) / spread).collect();
    off.sort_by(f32::total_cmp);
    off
}

/// Cold neurons may stay on disk: every batch then passes over its own hot ones.
#[test]
fn cold_neurons_are_read_from_disk_beside_hot_networks() {
    for model in ["smallthinker_4b", "turbosparse_mixtral", "bamboo", "prosparse"] {
        let keys = "[placement]\nhot = \"npu\"\nexperts = \"cpu\"\n";
        let in_memory = Tiny::new(model, &[1, 2], keys);
        let on_disk = Tiny::new(model, &[1, 2], &format!("{keys}[memory]\nbudget = \"256 MiB\"\n"));
        let report = on_disk.verify();
        assert_eq!(report["verdict"], "right", "{report}");
        let layers = divided(&on_disk.bundle());
        assert!(layers.len() == 2 && layers[0] > 0, "{model}: {layers:?}");
        let plan = Bundle::open(&on_disk.bundle()).unwrap().plan;
        assert!(plan.paging.as_ref().is_some_and(Paging::by_neurons), "{model}");
        let off = decoded_differences(&logits(&on_disk), &logits(&in_memory));
        println!("{model}: cold neurons on disk are off by at most {:.1e} of the spread", off[11]);
        // Prompts are computed by neurons, and not by matrices: their KV cache may round otherwise.
        assert!(off[10] < 5e-3 && off[11] < 0.1, "{model}: {off:?}");
    }
}

/// The whole of PowerInfer-2 in one bundle: hot clusters on the NPU, cold neurons on the CPU, those that
/// memory lacks from flash. Tokens do not depend on the budget; reads do.
#[test]
fn hot_networks_and_cold_neurons_from_flash_run_under_a_budget() {
    let keys = |budget: u32| {
        format!(
            "hot = \"npu\"\n[experts]\ngroup = 24\nsizes = 1\nskip = \"on\"\n[memory]\n\
             budget = \"{budget} MiB\"\nthreads = 2\n"
        )
    };
    let case = Case::of("ferris-relu", 64, "");
    let with_experts =
        fs::read_to_string(&case.toml).unwrap().replace("experts = \"npu\"", "experts = \"cpu\"");
    let mut runs: Vec<(Vec<Value>, Value)> = Vec::new();
    for budget in [64, 30, 29] {
        fs::write(&case.toml, format!("{with_experts}{}", keys(budget))).unwrap();
        let name = format!("{budget}.moec");
        case.build(PHONE, &name);
        let bundle = Bundle::open(&case.path(&name)).unwrap();
        let paging = bundle.plan.paging.as_ref().unwrap();
        assert!(paging.by_neurons() && divided(&bundle.folder) == [LAYERS as usize], "{paging:?}");
        let held = u64::from(paging.frames + paging.staging) * paging.frame_bytes;
        assert!(paging.resident + paging.process + held <= u64::from(budget) << 20, "{paging:?}");
        let mut run = case.moec("run");
        run.arg("--emulate")
            .arg(&bundle.folder)
            .args(["generate", "--prompt", "fn main", "-n", "32", "--json"]);
        let report: Value = serde_json::from_slice(&ok(&mut run).stdout).unwrap();
        assert!(report["memory"]["frames"].as_u64().unwrap() <= held, "{report}");
        runs.push((report["ids"].as_array().unwrap().clone(), report));
    }
    let inspected = String::from_utf8(ok(case.moec("inspect").arg(case.path("30.moec"))).stdout).unwrap();
    assert!(inspected.contains("of all neurons, which decoding and prompts share"), "{inspected}");
    assert!(!inspected.contains("the others are 0 bytes"), "{inspected}");
    // The networks' weights count in the budget: two artifacts at least.
    fs::write(&case.toml, format!("{with_experts}{}", keys(24))).unwrap();
    let mut build = case.moec("build");
    build.arg(&case.toml).args(["--target", PHONE, "--no-run", "-o"]).arg(case.path("24.moec"));
    let (code, stderr) = fails(&mut build);
    assert!(code == 1 && stderr.contains("too small") && stderr.contains("graphs 972.0 KiB"), "{stderr}");
    let bytes: Vec<u64> = runs.iter().map(|(_, r)| r["disk"]["bytes"].as_u64().unwrap()).collect();
    let misses: Vec<u64> = runs.iter().map(|(_, r)| r["cache"]["misses"].as_u64().unwrap()).collect();
    assert!(runs.iter().all(|(ids, _)| ids.len() == 32 && *ids == runs[0].0), "{runs:?}");
    assert!(
        bytes[0] > 0 && bytes.is_sorted() && misses[0] < misses[1] && misses[1] < misses[2],
        "{bytes:?} {misses:?}"
    );
    println!("read with 64, 30 and 29 MiB: {bytes:?} bytes, {misses:?} units of neurons");

    // Simulated with the planner's own numbers of hot neurons, and the memory of the plan.
    let trace = case.path("a.trace").display().to_string();
    let simulated = |name: &str| {
        let mut simulate = case.moec("simulate");
        simulate.arg(case.path(name)).args(["--trace", &trace, "--decode", "8", "--json"]);
        serde_json::from_slice::<Value>(&ok(&mut simulate).stdout).unwrap()
    };
    let [all, least] = ["64.moec", "29.moec"].map(simulated);
    assert_eq!(all["disk_bytes"], 0.0, "{all}");
    assert!(least["disk_bytes"].as_f64().unwrap() > 0.0, "{least}");
    // Launches of such small networks take longer than all reads.
    assert!(least["tokens_per_s"].as_f64().unwrap() <= all["tokens_per_s"].as_f64().unwrap(), "{least}");
}

/// A dense model under a budget: hot neurons of its networks on the NPU, cold ones from flash where memory lacks
/// them. Tokens are those of the model in memory.
#[test]
fn dense_model_runs_with_hot_networks_and_flash_under_a_budget() {
    const KEYS: &str = "[placement]\nhot = \"npu\"\nattention = \"cpu\"\n";
    let in_memory = Tiny::new("bamboo", &[1], KEYS);
    let tokens = generated(&in_memory, "--emulate");
    let plan = |built: &Tiny| Bundle::open(&built.bundle()).unwrap().plan;
    let budget = |bytes: u64| {
        let built = Tiny::new("bamboo", &[1], &format!("{KEYS}[memory]\nbudget = \"{} KiB\"\n", bytes >> 10));
        let (report, plan) = (emulated(&built, 8), plan(&built));
        let paging = plan.paging.unwrap();
        assert!(paging.by_neurons() && paging.layers.iter().all(|l| l.experts == 1), "{paging:?}");
        assert_eq!(divided(&built.bundle()), [2], "both networks are divided");
        assert!(paging.peak().unwrap() <= paging.budget && paging.budget >> 10 == bytes >> 10, "{paging:?}");
        let ids: Vec<u64> = report["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
        assert_eq!(ids, tokens, "with {bytes} bytes");
        (paging, report["cache"]["misses"].as_u64().unwrap(), report["disk"]["bytes"].as_u64().unwrap())
    };
    let (all, once, bytes_once) = budget(64 << 20);
    // Room for ten frames beside everything else, of which two are for reads in flight.
    let networks = all.regions.iter().map(|regions| regions.graphs).max().unwrap_or(0);
    let little = all.resident + all.process + networks + 10 * all.frame_bytes;
    let (few, misses, bytes) = budget(little.next_multiple_of(1 << 10));
    assert!(few.frames < all.frames && few.resident == all.resident, "{few:?} {all:?}");
    assert!(0 < bytes_once && bytes_once < bytes && once < misses, "{bytes_once} {bytes}, {once} {misses}");
    println!(
        "{} and {} frames: {once} and {misses} misses, {bytes_once} and {bytes} bytes read, {} and {} bytes at most",
        all.frames,
        few.frames,
        all.peak().unwrap(),
        few.peak().unwrap()
    );
    // Networks of a layer, of one expert at one batch, verify as others do.
    let report = in_memory.verify();
    let hot = report["packages"].as_array().unwrap().iter();
    let hot: Vec<&Value> = hot.filter(|f| f["package"].as_str().unwrap().ends_with(".hot.qnn")).collect();
    assert!(hot.len() == 4 && hot.iter().all(|f| f["experts"] == 1 && f["refused"] == false), "{report}");
}

/// SiLU with thresholds: the mask is part of the networks, of prompts and of hot neurons.
#[test]
fn thresholds_are_applied_in_networks_as_on_the_cpu() {
    let keys = "hot = \"npu\"\n[experts]\ngroup = 24\nsizes = 1\nskip = \"on\"\nthreshold = \"50%\"\n";
    let case = Case::of("ferris", 64, keys);
    case.build(PHONE, "a.moec");
    assert_eq!(divided(&case.path("a.moec")), [LAYERS as usize]);
    let report = case.json("verify", &[]);
    assert_eq!(report["verdict"], "right", "{}", report["failures"]);
    let errors = |end: &str| -> Vec<f64> {
        let packages = report["packages"].as_array().unwrap().iter();
        let own = packages.filter(|f| f["package"].as_str().unwrap().ends_with(end));
        own.map(|f| f["error"]["relative"].as_f64().unwrap()).collect()
    };
    for end in [".hot.qnn", ".qnn"] {
        let errors = errors(end);
        let most = errors.iter().copied().fold(0.0, f64::max);
        println!("{} networks in `*{end}` are off by at most {most:.3}", errors.len());
        assert!(errors.len() > 4 && most > 0.0 && most < 0.1, "{errors:?}");
    }
    let masks = fs::read(case.path("a.moec/artifacts/layers.0.hot.qnn/expert0_batch1.onnx")).unwrap();
    assert!(masks.windows(4).any(|w| w == b"Sign"), "the network has no mask");

    // Decoding with the bundle's own tokens: those of neurons with the same thresholds on this machine.
    let eval = |more: &[&str]| {
        let text = ferris().join("eval/text.txt");
        let given = [&["--text", text.to_str().unwrap(), "--windows", "1", "--window", "100"], more].concat();
        case.json("eval", &given)["perplexity"].as_f64().unwrap()
    };
    let phone = eval(&[]);
    fs::remove_dir_all(case.path("a.moec")).unwrap();
    let text = fs::read_to_string(&case.toml).unwrap();
    let text = text.replace("experts = \"npu\"", "experts = \"cpu\"").replace("hot = \"npu\"\n", "");
    fs::write(&case.toml, text).unwrap();
    case.build("native", "a.moec");
    let cpu = eval(&[]);
    println!("perplexity {phone:.3} with networks, {cpu:.3} on the CPU");
    assert!((phone / cpu - 1.0).abs() < 0.02, "{phone} and {cpu}");
}

/// The report of a bundle that generates tokens in the emulator.
fn emulated(built: &Tiny, count: usize) -> Value {
    let ids: Vec<u32> = expected(&checkpoint(&built.model)).ids.iter().take(8).copied().collect();
    let mut run = built.moec("run");
    run.arg("--emulate").arg(built.bundle()).args(["generate", "--ids", &list(&ids), "--json"]);
    serde_json::from_slice(&ok(run.args(["-n", &count.to_string()])).stdout).unwrap()
}

/// Gates stay on flash beside hot networks, too: predictors name those of the cold neurons that are read.
#[test]
fn predicted_gates_of_cold_neurons_are_read_beside_hot_networks() {
    let case = Case::of("ferris-relu", 64, "");
    let keys = "hot = \"npu\"\n[experts]\ngroup = 24\nsizes = 1\nskip = \"on\"\npredict = \"low-rank\"\n\
                [memory]\nbudget = \"28 MiB\"\nthreads = 2\n";
    let text = fs::read_to_string(&case.toml).unwrap();
    let text = text.replace("experts = \"npu\"", "experts = \"cpu\"");
    fs::write(&case.toml, format!("{}{keys}", text.replace("decode_batch = [1]", "decode_batch = [1, 2]")))
        .unwrap();
    case.build(PHONE, "a.moec");
    let bundle = Bundle::open(&case.path("a.moec")).unwrap();
    let paging = bundle.plan.paging.as_ref().unwrap();
    assert!(paging.gates_on_disk() && divided(&bundle.folder) == [LAYERS as usize; 2], "{paging:?}");
    let source = ferris_relu().display().to_string();
    let report = case.json("verify", &["--source", &source]);
    assert_eq!(report["verdict"], "right", "{report}");
    let generated = |more: &[&str]| {
        let mut run = case.moec("run");
        run.arg("--emulate").arg(&bundle.folder);
        run.args(["generate", "--prompt", "fn main", "-n", "32", "--json"]).args(more);
        serde_json::from_slice::<Value>(&ok(&mut run).stdout).unwrap()
    };
    let (read, mapped) = (generated(&[]), generated(&["--no-budget"]));
    assert!(read["disk"]["gate_bytes"].as_u64() > Some(0), "{read}");
    assert!(read["ids"].as_array().unwrap().len() == 32 && read["ids"] == mapped["ids"], "{read} {mapped}");
}

/// Tokens that a bundle generates.
fn generated(built: &Tiny, emulate: &str) -> Vec<u64> {
    let ids: Vec<u32> = expected(&checkpoint(&built.model)).ids.iter().take(8).copied().collect();
    let mut run = built.moec("run");
    run.arg(emulate).arg(built.bundle()).args(["generate", "--ids", &list(&ids), "-n", "8", "--json"]);
    // The library writes other lines, too.
    let stdout = String::from_utf8(ok(&mut run).stdout).unwrap();
    let json = stdout.lines().find(|line| line.starts_with('{')).unwrap();
    let report: Value = serde_json::from_str(json).unwrap();
    report["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

/// Models whose gates have no zeros have no hot neurons, and some units have no graphs of them. Such builds
/// are refused with the reason.
#[test]
fn models_without_hot_neurons_are_refused_by_name() {
    for (model, target, more, expected) in [
        ("ferris", PHONE, "", "the profile shows no gates with zeros"),
        ("ferris-relu", "m2-max", "", "its graphs hold whole experts"),
        ("ferris-relu", PHONE, "[experts]\nskip = \"off\"\n", "with `skip = \"off\"`"),
    ] {
        let case = Case::of(model, 64, &format!("hot = \"npu\"\n{more}"));
        let mut build = case.moec("build");
        build.arg(&case.toml).args(["--target", target, "--no-run", "-o"]).arg(case.path("a.moec"));
        let (code, stderr) = fails(&mut build);
        assert!(code == 1 && stderr.contains(expected) && stderr.contains("hot"), "{target}: {stderr}");
    }
}

/// Compiled for the chip, with one context per layer, and executed.
#[test]
fn hot_neurons_compute_on_the_emulator() {
    let Some(tools) = installed() else { return };
    let built = Tiny::with("turbosparse_mixtral", &[1], "[placement]\nhot = \"npu\"\n", tools.to_vec());
    let report = built.verify();
    assert_eq!(report.get("unverified"), None, "{report}");
    let mut count = 0;
    for f in report["packages"].as_array().unwrap() {
        if !f["package"].as_str().unwrap().ends_with(".hot.qnn") {
            continue;
        }
        // The combined result of two units is not executed by the library or onnxruntime.
        let Some(checks) = f["checks"].as_array() else {
            let error = f["error"]["relative"].as_f64().unwrap();
            assert!(f["experts"] == 8 && error > 0.0 && error < 0.03, "{f}");
            continue;
        };
        count += 1;
        let names: Vec<&str> = checks.iter().map(|c| c["by"].as_str().unwrap()).collect();
        assert_eq!(names, ["onnxruntime", "QNN's emulator"], "{f}");
        for check in checks {
            let off = check["share_of_spread"].as_f64().unwrap();
            assert!(off > 0.0 && off < 0.02, "{f}");
        }
    }
    assert_eq!(count, 2 * 8);
    for layer in 0..2 {
        let folder = built.bundle().join(format!("artifacts/layers.{layer}.hot.qnn"));
        let dlc = |path: &Path| path.extension().is_some_and(|end| end == "dlc");
        assert!(folder.join("context.bin").is_file());
        assert!(!folder.read_dir().unwrap().any(|e| dlc(&e.unwrap().path())), "{}", folder.display());
    }
    // Evaluated by moec, by QNN's emulator, and by the unit of a phone's `run`.
    let [moec, library, device] =
        ["--emulate", "--emulate=library", "--emulate=device"].map(|emulate| generated(&built, emulate));
    assert!(moec.len() == 8 && moec == library && library == device, "{moec:?} {library:?} {device:?}");
    let whole = Tiny::new("turbosparse_mixtral", &[1], "");
    assert_eq!(moec, generated(&whole, "--emulate"), "greedy tokens are those of whole experts");
}
