//! Experts on a modelled GPU, on the CPU, and on NDP DIMMs by command streams. The tokens are the
//! reference's, and every stream gives the bits of its backend's evaluator.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]
#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod moves;

use crate::support;
use moec_runtime::CheckLevel;
use moec_runtime::bundle::BundleReader;

use moec_bundle::read::Bundle;
use moec_ir::plan::{Builtin, Code};
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::exec::unit::ComputeUnit;
use moec_runtime::schedule::dispatch::Assigned;
use moec_runtime::{Decoder, Engine, LogitRows, Options, Program, Request, Sampler, Sampling};
use moec_targets::backends;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use support::{MIXTURES, built, checkpoint, distance, expected, fails, ferris, moec, ok, root, runs_here};

/// Largest difference of any logit where experts are rounded to bf16; the logits reach 4.
const ROUNDED: f32 = 5e-2;

/// Builds a model with bf16 experts; everything else is exact.
fn build(source: &Path, folder: &Path, name: &str, target: &str, placement: &str) -> Bundle {
    let toml = folder.join(format!("{name}.toml"));
    let text = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 96\nprefill_chunk = 20\ndecode_batch = [1, 2]\n[weights]\n\
         experts = \"bf16\"\nactivations = \"f32\"\n[placement]\n{placement}",
        source.display()
    );
    fs::write(&toml, text).unwrap();
    built(&toml, &["--target", target], &folder.join(name));
    Bundle::open(&folder.join(name)).unwrap()
}

/// Results of a bundle: logits of every token of the prompt, greedy tokens, and the units of its experts.
struct Computed {
    logits: Vec<f32>,
    ids: Vec<u32>,
    assigned: Option<Assigned>,
}

fn compute(bundle: &Bundle, prompt: &[u32], n: usize, threads: usize) -> Computed {
    compute_on(bundle, prompt, n, threads, &|_, unit| unit).unwrap()
}

/// Changes a unit, by its name.
type Wrap<'a> = &'a dyn Fn(&str, Box<dyn ComputeUnit>) -> Box<dyn ComputeUnit>;

/// Like [`compute`], with units that `wrap` changes.
fn compute_on(
    bundle: &Bundle,
    prompt: &[u32],
    n: usize,
    threads: usize,
    wrap: Wrap<'_>,
) -> Result<Computed, moec_runtime::Error> {
    let unit = bundle.emulated_unit(&moec_base::progress::Progress::silent()).unwrap();
    let program = Program::new(bundle.plan.clone(), &|s| unit.resolve(s)).unwrap().emulating(unit.emulated());
    let options = Options { threads: Some(threads), ..Options::default() };
    let host = &mut |unit: &moec_ir::plan::UnitRef| match backends::host(&unit.backend, &unit.name)? {
        Executor::Unit(of) => Some(Executor::Unit(wrap(&unit.name, of))),
        graphs @ Executor::Graphs(_) => Some(graphs),
    };
    let mut engine = Engine::with_units(
        &program,
        &bundle.folder,
        host,
        &bundle.files(CheckLevel::Small).unwrap(),
        options,
    )?;
    let mut logits = Vec::new();
    let mut keep = |_: usize, row: &[f32]| {
        logits.extend_from_slice(row);
        Ok(())
    };
    engine.prefill(0, 0, prompt, LogitRows::All, &mut keep)?;
    engine.reset(0)?;
    let request = Request { slot: 0, prompt: &prompt[..prompt.len().min(16)], n, end: &[] };
    let (mut decoder, mut sampler) = (Decoder::full(), Sampler::new(Sampling::default()));
    let made = moec_runtime::generate(&mut engine, &request, &mut decoder, &mut sampler, &mut |_| Ok(()));
    Ok(Computed { logits, ids: made?.ids, assigned: engine.assigned() })
}

/// Share of rows whose logits are near those of another run.
fn near(a: &[f32], b: &[f32], rows: usize) -> f64 {
    assert_eq!(a.len(), b.len());
    let width = a.len() / rows;
    let near = a.chunks(width).zip(b.chunks(width)).filter(|(a, b)| distance(a, b) <= ROUNDED).count();
    near as f64 / rows as f64
}

/// Whether this machine executes what [`emulated`] makes of a target.
fn emulates() -> bool {
    let here = is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vbmi2")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512bitalg")
        && is_x86_feature_detected!("avx512vpopcntdq");
    moec_testing::SAPPHIRE_RAPIDS.holds_or_skip(here)
}

/// A target with NDP DIMMs whose CPU needs no AVX-VNNI, which AMD's CPUs only have since Zen 5 and which is
/// not emulated.
fn emulated(folder: &Path, target: &str) -> PathBuf {
    let device = fs::read_to_string(root().join(format!("targets/devices/{target}.toml"))).unwrap();
    let name = format!("\"{target}\"");
    let changes = [(&*name, "\"own\""), ("\"sapphirerapids\"", "\"cooperlake\""), ("\"avxvnni\", ", "")];
    let device = changes.iter().fold(device, |text, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    });
    let path = folder.join("own.toml");
    fs::write(&path, device).unwrap();
    path
}

/// `moec eval --emulate` can measure on any machine a bundle whose CPU needs AMX and whose experts are on
/// DIMMs. It reports what it emulates.
#[test]
fn bundle_for_dimms_and_amx_is_evaluated_by_emulation() {
    if !emulates() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let target = emulated(folder.path(), "spr-ndp");
    let text = folder.path().join("text.txt");
    fs::write(&text, "The borrow checker reads what was lent, and says so at once. ".repeat(20)).unwrap();
    let eval = |bundle: &Bundle| {
        let mut eval = moec();
        eval.args(["eval", "--emulate", "--json", "--window", "64", "--windows", "2", "--text"]).arg(&text);
        let out = ok(eval.arg(&bundle.folder));
        let found: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        (found["perplexity"].as_f64().unwrap(), String::from_utf8(out.stderr).unwrap())
    };
    let dimms =
        build(&ferris(), folder.path(), "dimms.moec", target.to_str().unwrap(), "experts = \"ndp\"\n");
    assert!(!dimms.plan.streams.is_empty() && dimms.plan.target.features.iter().any(|f| f == "amx-tile"));
    let native = build(&ferris(), folder.path(), "native.moec", "native", "");
    let ((found, stderr), (want, _)) = (eval(&dimms), eval(&native));
    assert!((found / want - 1.0).abs() < 5e-3, "{found} in place of {want}");
    let amx = fs::read_to_string("/proc/cpuinfo").is_ok_and(|info| info.contains("amx_bf16"));
    assert!(stderr.contains("emulated") && (amx || stderr.contains("amx-tile")), "{stderr}");
}

/// The command stream of an expert without a DIMM says so; no two experts share rows.
#[test]
fn command_streams_of_experts_without_a_dimm_are_labelled() {
    let folder = tempfile::tempdir().unwrap();
    let toml = folder.path().join("m.toml");
    let text = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 64\nprefill_chunk = 16\n[weights]\nexperts = \"bf16\"\n\
         [placement]\ncached = 2\n",
        checkpoint("olmoe").display()
    );
    fs::write(&toml, text).unwrap();
    built(&toml, &["--target", "h100-spr-ndp"], &folder.path().join("b"));
    let bundle = Bundle::open(&folder.path().join("b")).unwrap();
    let placed = &bundle.plan.experts;
    let hot = placed.policy.hot().unwrap();
    assert!(!bundle.plan.streams.is_empty() && placed.layers.iter().any(|l| !l.on(hot).is_empty()));
    let mut places = BTreeSet::new();
    for (layer, set) in placed.layers.iter().zip(&bundle.plan.streams) {
        let out = ok(moec().arg("inspect").arg(bundle.folder.join(&set.artifact))).stdout;
        let text = format!("\n{}", String::from_utf8(out).unwrap());
        let streams: Vec<&str> = text.split("\nstream ").skip(1).collect();
        assert_eq!(streams.len(), layer.dimms.len());
        for (stream, &dimm) in streams.iter().zip(&layer.dimms) {
            let name = stream.lines().next().unwrap();
            assert_eq!(name.ends_with(".striped"), dimm < 0, "{name}");
            assert!(dimm < 0 || stream.contains(&format!("\ndimm {dimm}\n")), "{name}");
            let header_line =
                |key: &str| stream.lines().find(|line| line.starts_with(key)).unwrap().to_owned();
            let place = (header_line("dimm "), header_line("region expert"));
            assert!(
                dimm < 0 || places.insert(place.clone()),
                "{name} lies where another expert does: {place:?}"
            );
        }
        assert_eq!(text.matches("begins striped").count(), layer.dimms.iter().filter(|d| **d < 0).count());
    }
}

/// Every family: the schedule uses all three units, and the tokens are transformers'.
#[test]
fn cpu_gpu_and_dimms_give_the_reference_tokens() {
    if !runs_here("sapphire-rapids") {
        return;
    }
    let mut places = [0; 3];
    for family in MIXTURES {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(family);
        let want = expected(&source);
        let on_cpu = build(&source, folder.path(), "cpu", "sapphire-rapids", "");
        let on_cpu = compute(&on_cpu, &want.ids, 24, 2);
        // A launch costs more than computing an expert of this size on any unit.
        let device = fs::read_to_string(root().join("targets/devices/h100-spr-ndp.toml")).unwrap();
        let free = device.replace("dispatch_cost_us = { value = 5,", "dispatch_cost_us = { value = 0,");
        assert!(free != device);
        let device = folder.path().join("device.toml");
        fs::write(&device, free).unwrap();
        let bundle = build(&source, folder.path(), "three", device.to_str().unwrap(), "cached = 2\n");
        let streams = |s: &&moec_ir::plan::Step| matches!(s.code, Code::Builtin(Builtin::Streams { .. }));
        assert!(bundle.plan.entries.iter().all(|e| e.steps.iter().any(|s| streams(&s))), "{family}");
        let got = compute(&bundle, &want.ids, 24, 2);
        assert_eq!(got.ids, want.greedy[16..], "{family}: greedy tokens");
        assert_eq!(got.ids, on_cpu.ids, "{family}: as with the CPU alone");
        let near = near(&got.logits, &on_cpu.logits, want.ids.len());
        // A near tie in a router may send a row to another expert, which also affects later rows. With random
        // weights, that changes up to a quarter of the rows.
        assert!(near >= 0.75, "{family}: {near} of the rows are near those of the CPU");
        let assigned = got.assigned.unwrap();
        println!("{family}: {assigned:?}");
        for (sum, n) in places.iter_mut().zip(assigned.experts) {
            *sum += n;
        }
        // The same calls give the same bits, on any number of threads.
        let again = compute(&bundle, &want.ids, 24, 1);
        assert!(again.logits == got.logits && again.ids == got.ids, "{family}: not repeated");
        assert_eq!(again.assigned, got.assigned, "{family}");
        let mut verify = moec();
        ok(verify.arg("verify").arg(&bundle.folder).arg("--quiet"));
    }
    assert!(places.iter().all(|&n| n > 0), "experts on the units: {places:?}");
}

/// A trained model without a GPU: experts move at run time, and the results do not change.
#[test]
fn experts_move_between_dimms_while_a_model_runs() {
    if !runs_here("sapphire-rapids") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..40).map(|i| 3 + i * 29 % 400).collect();
    let on_cpu = build(&ferris(), folder.path(), "cpu", "sapphire-rapids", "");
    let on_cpu = compute(&on_cpu, &prompt, 32, 2);
    let mut ids = Vec::new();
    for (name, placement) in
        [("moves", "moves = true\n"), ("stays", "moves = false\n"), ("paper", "refine = \"bottleneck\"\n")]
    {
        let bundle = build(&ferris(), folder.path(), name, "spr-ndp", placement);
        let got = compute(&bundle, &prompt, 32, 2);
        assert!(near(&got.logits, &on_cpu.logits, prompt.len()) >= 0.9, "{name}");
        let did = got.assigned.unwrap();
        let [hot, cpu, cold] = did.experts;
        assert!(hot == 0 && cpu > 0 && cold > 0, "{name}: {did:?}");
        assert_eq!(did.moves.iter().sum::<u64>() > 0, name != "stays", "{name}: {did:?}");
        ids.push(got.ids);
    }
    assert!(ids.iter().all(|ids| *ids == on_cpu.ids), "{ids:?} instead of {:?}", on_cpu.ids);
}

/// With a configured share of the experts there is no schedule, but there are streams.
#[test]
fn configured_share_of_experts_is_in_dimms() {
    if !runs_here("sapphire-rapids") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = checkpoint("mixtral");
    let want = expected(&source);
    let bundle = build(&source, folder.path(), "half", "spr-ndp", "experts = \"dimms:50%\"\n");
    assert!(bundle.plan.experts.policy.is_fixed() && !bundle.plan.streams.is_empty());
    let got = compute(&bundle, &want.ids, 24, 2);
    assert_eq!(got.ids, want.greedy[16..]);
    assert!(got.assigned.is_none());
}

/// The text of a layer's streams.
#[test]
fn ndp_command_streams_are_printed() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&checkpoint("gpt_oss"), folder.path(), "b", "spr-ndp", "");
    let path = bundle.folder.join(&bundle.plan.streams[0].artifact);
    let inspected = ok(moec().arg("inspect").arg(&path));
    let text = String::from_utf8(inspected.stdout).unwrap();
    let first = text.split("\n\n").next().unwrap().to_owned();
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../golden/snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!("gpt_oss-spr-ndp@streams", first));
    fs::write(folder.path().join("x.streams"), b"moecdimm, or not").unwrap();
    let (_, stderr) = fails(moec().arg("inspect").arg(folder.path().join("x.streams")));
    assert!(stderr.contains("not a file of NDP command streams") && stderr.contains("version"), "{stderr}");
}

/// Invalid device files and artifacts are refused by name.
#[test]
fn invalid_dimm_settings_are_reported_by_key() {
    let folder = tempfile::tempdir().unwrap();
    let device = fs::read_to_string(root().join("targets/devices/spr-ndp.toml")).unwrap();
    let source = checkpoint("olmoe");
    let refused = |from: &str, to: &str, more: &str| {
        assert!(device.contains(from), "{from}");
        let (file, toml) = (folder.path().join("d.toml"), folder.path().join("model.toml"));
        fs::write(&file, device.replacen(from, to, 1)).unwrap();
        fs::write(&toml, format!("[model]\nsource = {source:?}\n[weights]\nexperts = \"bf16\"\n{more}"))
            .unwrap();
        let mut build = moec();
        build.arg("build").arg(&toml).arg("--target").arg(&file).args(["--quiet", "--no-run", "-o"]);
        fails(build.arg(folder.path().join("b"))).1
    };
    let assert_contains = |text: &str, words: &[&str]| {
        assert!(words.iter().all(|w| text.contains(w)), "{text}");
    };
    let links = device.lines().find(|l| l.starts_with("link_gb_per_s")).unwrap();
    assert_contains(&refused(links, "", ""), &["`unit.dimms.link_gb_per_s`", "16 DIMMs need links"]);
    let to_dimms = "[[link]]\nfrom = \"dram\"\nto = \"ndp_dimms\"";
    assert_contains(
        &refused(to_dimms, "[[link]]\nfrom = \"ndp_dimms\"\nto = \"dram\"", ""),
        &["`link`", "from `dram` to `ndp_dimms`"],
    );
    assert_contains(
        &refused("count = 16", "count = 15", ""),
        &["`unit.dimms.count`", "15 DIMMs", "8 channels"],
    );
    assert_contains(
        &refused("row_bytes = 4096", "row_bytes = 4000", ""),
        &["`unit.dimms.row_bytes`", "lines of 64"],
    );
    assert_contains(
        &refused("timing = \"trimoe\"", "timing = \"ddr4\"", ""),
        &["`unit.dimms.timing`", "`trimoe`"],
    );
    assert_contains(
        &refused("capacity = { value = 137438953472", "capacity = { value = 3145728", ""),
        &["`dimms` does not run the experts", "a DIMM has"],
    );
    assert_contains(&refused("value = 256,", "value = 512,", ""), &["`unit.dimms.gops`"]);
    assert_contains(
        &refused("count = 16", "count = 16", "[memory]\nbudget = \"1 GiB\"\n"),
        &["`budget`", "`dimms`"],
    );
    let narrow = "triple = \"x86_64-unknown-linux-gnu\"\ncpu = \"sapphirerapids\"";
    let features = device.find("features = [").unwrap();
    let list = &device[features..=features + device[features..].find(']').unwrap()];
    let avx2 =
        device.replacen(list, "features = [\"avx2\", \"fma\"]", 1).replacen("sapphirerapids", "haswell", 1);
    assert!(device.contains(narrow));
    let (file, toml) = (folder.path().join("d.toml"), folder.path().join("model.toml"));
    fs::write(&file, avx2).unwrap();
    let mut build = moec();
    build.arg("build").arg(&toml).arg("--target").arg(&file).args(["--quiet", "--no-run", "-o"]);
    fs::write(&toml, format!("[model]\nsource = {source:?}\n[weights]\nexperts = \"bf16\"\n")).unwrap();
    assert_contains(&fails(build.arg(folder.path().join("b"))).1, &["does not read weights", "nr: 16"]);
    fs::write(&toml, format!("[model]\nsource = {source:?}\n[weights]\nexperts = \"q8\"\n")).unwrap();
    let mut build = moec();
    build.arg("build").arg(&toml).args(["--target", "spr-ndp", "--quiet", "--no-run", "-o"]);
    assert_contains(&fails(build.arg(folder.path().join("b"))).1, &["q8", "multiply bf16"]);
    // No instruction is an activation of one projection alone.
    let ungated = checkpoint("nemotron_h");
    let more = "[weights]\nexperts = \"bf16\"\n[placement]\nexperts = \"ndp\"\n";
    fs::write(&toml, format!("[model]\nsource = {ungated:?}\n{more}")).unwrap();
    let mut build = moec();
    build.arg("build").arg(&toml).args(["--target", "spr-ndp", "--quiet", "--no-run", "-o"]);
    let error = fails(build.arg(folder.path().join("b"))).1;
    assert_contains(&error, &["`dimms` does not run `expert_ffn` of `layers.", "hint: keep it on the CPU"]);
}

/// A stream that reads outside of its rows does not run.
#[test]
fn command_stream_that_reads_out_of_bounds_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&checkpoint("olmoe"), folder.path(), "b", "spr-ndp", "");
    let set = &bundle.plan.streams[0];
    let path = bundle.folder.join(&set.artifact);
    let whole = fs::read(&path).unwrap();
    let mut artifact = moec_ndp::artifact::decode(&whole).unwrap();
    moec_ndp::artifact::open(&BundleReader::unchecked(&bundle.folder), set).unwrap();
    // A changed artifact is not even decoded.
    let checked = bundle.files(CheckLevel::All).unwrap();
    assert!(moec_ndp::artifact::open(&checked, set).is_ok());
    let mut changed = whole.clone();
    *changed.last_mut().unwrap() ^= 1;
    fs::write(&path, changed).unwrap();
    let error = moec_ndp::artifact::open(&checked, set).unwrap_err();
    assert!(error.contains(&set.artifact) && error.contains("was changed after the build"), "{error}");
    let rows = artifact.experts[1].stream.regions[0].rows.clone();
    artifact.experts[1].stream.regions[0].rows = rows.end..rows.end;
    let refused = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        moec_ndp::artifact::open(&BundleReader::unchecked(&bundle.folder), set).unwrap_err()
    };
    let error = refused(&moec_ndp::artifact::encode(&artifact).unwrap());
    assert!(error.contains("expert 1"), "{error}");
    let error = refused(&whole[..whole.len() - 5]);
    assert!(error.contains("cut off"), "{error}");
    artifact.experts.truncate(1);
    let error = refused(&moec_ndp::artifact::encode(&artifact).unwrap());
    assert!(error.contains("1 experts"), "{error}");
    let (_, stderr) = fails(moec().arg("verify").arg(&bundle.folder).arg("--static"));
    assert!(stderr.contains("streams"), "{stderr}");
}
