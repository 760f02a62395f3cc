//! `moec fit`: sizes and memory are predicted within 1 %, losses by the model's own profile; what is chosen is
//! built, measured and corrected; what is missing is named.
#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    clippy::unnecessary_debug_formatting,
    reason = "a test fails by panicking; paths are quoted as in TOML"
)]

use crate::support::{calibration, checkpoint, fails, ferris, ferris_relu, json_of, moec, ok};
use moec_synth::Like;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const HUGE_PAGE: u64 = 2 << 20;

/// `moec fit` of a source with these options, without a build.
fn predict(source: &Path, toml: &Path, options: &[&str]) -> Command {
    let mut fit = moec();
    fit.arg("fit").arg(source).args(["--force", "--no-build", "--toml"]).arg(toml).args(options);
    fit
}

/// The same of ferris.
fn fit(toml: &Path, options: &[&str]) -> Command {
    predict(&ferris(), toml, options)
}

fn number(of: &Value, key: &str) -> u64 {
    of[key].as_u64().unwrap_or_else(|| panic!("no `{key}` in {of}"))
}

#[test]
fn the_first_candidate_that_fits_is_built_to_the_predicted_size() {
    let dir = tempfile::tempdir().unwrap();
    let (toml, bundle) = (dir.path().join("model.toml"), dir.path().join("b"));
    let report = json_of(fit(&toml, &["--memory", "20MiB", "--json"]).args(["--quiet"]));
    let (candidates, chosen) = (report["candidates"].as_array().unwrap(), &report["chosen"]);
    let memory = |of: &Value| number(of, "memory_bytes");
    let first = candidates.iter().find(|c| memory(c) <= 20 << 20).unwrap();
    assert_eq!(memory(first), memory(chosen));
    assert_eq!(first["breaks"], Value::Null);
    assert!(memory(&candidates[0]) > 20 << 20, "bf16 is the first, and too large: {report}");
    assert!(candidates[0]["breaks"].as_str().unwrap().starts_with("needs "), "{report}");

    ok(moec().arg("build").arg(&toml).args(["--quiet", "-o"]).arg(&bundle));
    let info = json_of(moec().arg("run").arg(&bundle).args(["info", "--json"]));
    let files: Vec<u64> = bundle
        .join("weights")
        .read_dir()
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().len())
        .collect();
    let (size, written) = (number(chosen, "size_bytes"), files.iter().sum::<u64>());
    assert!(size.abs_diff(written) * 100 <= written, "{size} bytes predicted, {written} written");
    let of = |key: &str| number(&info["memory"], key);
    let weights: u64 = files.iter().map(|bytes| bytes.next_multiple_of(HUGE_PAGE)).sum();
    let threads = std::thread::available_parallelism().unwrap().get() as u64;
    let takes = weights + of("arena_bytes") + of("kv_bytes") + threads * of("scratch_bytes_per_thread");
    assert!(memory(chosen).abs_diff(takes) * 100 <= takes, "{chosen}: {takes} bytes are taken");
}

#[test]
fn experts_stay_on_disk_if_memory_is_too_small() {
    let dir = tempfile::tempdir().unwrap();
    let (toml, bundle) = (dir.path().join("model.toml"), dir.path().join("b"));
    // With the whole context, the resident data alone would exceed the limit.
    let options = ["--memory", "40MiB", "--disk", "--context", "256", "--json", "--tokens-per-s", "1"];
    let report = json_of(&mut fit(&toml, &options));
    let candidates = report["candidates"].as_array().unwrap();
    let on_disk: Vec<_> = candidates.iter().filter(|c| c["disk"] == true).collect();
    assert!(!on_disk.is_empty(), "{report}");
    // Of one format, the experts that are read cost time.
    for c in on_disk {
        let same = |other: &&Value| {
            other["disk"] == false && ["experts", "rest", "kv_cache"].iter().all(|key| other[key] == c[key])
        };
        let whole = candidates.iter().find(same).unwrap();
        let rate = |of: &Value| of["decode_tokens_per_s"].as_f64().unwrap();
        assert!(rate(c) <= rate(whole), "{c} {whole}");
    }
    assert!(number(&report["chosen"], "memory_bytes") <= 40 << 20, "{report}");
    ok(moec().arg("build").arg(&toml).args(["--quiet", "--no-run", "-o"]).arg(&bundle));
}

#[test]
fn missing_memory_is_reported_if_nothing_fits() {
    let dir = tempfile::tempdir().unwrap();
    let toml = dir.path().join("model.toml");
    let (code, stderr) = fails(&mut fit(&toml, &["--memory", "5MiB", "--context", "256"]));
    assert_eq!(code, 1);
    assert!(stderr.contains("no format fits into 5.0 MiB:") && stderr.contains("`--disk`"), "{stderr}");
    // A shorter context makes room.
    let (_, stderr) = fails(&mut fit(&toml, &["--memory", "7MiB", "--context", "1024"]));
    assert!(stderr.contains("`--context 512` fits"), "{stderr}");
    let (_, stderr) = fails(&mut fit(&toml, &["--tokens-per-s", "1e12"]));
    assert!(stderr.contains("no format that fits decodes 1000000000000 tokens per second"), "{stderr}");
    let (code, stderr) = fails(&mut fit(&toml, &["--memory", "much"]));
    assert_eq!(code, 2);
    assert!(stderr.contains("expected a size such as `16GiB`"), "{stderr}");
    assert!(!toml.exists(), "nothing is written where nothing fits");
}

#[test]
fn losses_of_other_models_are_shown_by_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let (toml, page) = (dir.path().join("model.toml"), dir.path().join("fit.html"));
    let out = ok(fit(&toml, &["--memory", "20MiB", "--page"]).arg(&page));
    let shown = String::from_utf8(out.stdout).unwrap();
    assert!(shown.contains("loss of ferris") && shown.contains("loss of ferris-relu"), "{shown}");
    assert!(shown.contains("not of this model") && shown.contains("decode speed over size"), "{shown}");
    let why = String::from_utf8(out.stderr).unwrap();
    assert!(why.contains("the first in the table that keeps the limits"), "{why}");
    let html = fs::read_to_string(page).unwrap();
    let is_row = |line: &&str| line.ends_with("  fits") || line.ends_with(" more");
    let points = shown.lines().filter(is_row).count();
    assert!(points >= 12 && html.matches("<circle").count() == 2 * points, "{points} candidates: {html}");
    assert!(!html.contains("NaN") && !html.contains("inf"), "{html}");

    // A limit of loss needs losses of this model.
    let (code, stderr) = fails(&mut fit(&toml, &["--max-loss", "2%"]));
    assert!(code == 2 && stderr.contains("`--max-loss` needs losses of this model"), "{stderr}");
    let (code, stderr) = fails(&mut fit(&toml, &["--max-loss", "2"]));
    assert!(code == 2 && stderr.contains("expected a share such as `2%`"), "{stderr}");
}

/// The two halves of a text that calibration does not read.
fn halves(folder: &Path) -> [PathBuf; 2] {
    let text = fs::read_to_string(ferris().join("eval/text.txt")).unwrap();
    let middle = (text.len() / 2..text.len()).find(|&i| text.is_char_boundary(i)).unwrap();
    let (first, second) = text.split_at(middle);
    [("first.txt", first), ("second.txt", second)].map(|(name, half)| {
        fs::write(folder.join(name), half).unwrap();
        folder.join(name)
    })
}

/// A profile of ferris, with losses on the first half of that text if options say so.
fn recorded(folder: &Path, options: &[&str]) -> (PathBuf, Value) {
    let (toml, trace) = (folder.join("calibrate.toml"), folder.join("ferris.trace"));
    let [first, _] = halves(folder);
    let text = format!(
        "[model]\nsource = {:?}\n[shapes]\nmax_context = 512\n[quality]\ntext = [{first:?}]\n",
        ferris(),
    );
    fs::write(&toml, text).unwrap();
    let mut calibrate = moec();
    calibrate.arg("calibrate").arg(&toml).args(["--text", &calibration(), "--json", "-o"]).arg(&trace);
    (trace.clone(), json_of(calibrate.args(options)))
}

/// End to end: losses are recorded, a limit of loss is kept by the prediction and by the measurement on text that
/// neither calibration nor the losses have read, and the bundle is that of `moec build`.
#[test]
fn limit_of_loss_is_kept_on_held_out_text() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (trace, calibrated) = recorded(dir.path(), &["--losses", "--tokens", "8192"]);
    let losses = calibrated["losses"].as_array().unwrap();
    assert_eq!(losses.len(), 17, "{calibrated}");
    // The file that moec carries has the same losses of ferris, measured on more text.
    let carried: Value = serde_json::from_str(include_str!("../compiler/cli/src/fit/losses.json")).unwrap();
    for l in losses {
        let same = |of: &&Value| of["key"] == l["key"] && of["format"] == l["format"];
        let of = |l: &Value| l["nats_per_token"].as_f64().unwrap();
        let (own, other) = (of(l), of(carried["ferris"].as_array().unwrap().iter().find(same).unwrap()));
        assert!((own - other).abs() <= 0.3 * other.abs() + 4e-3, "{l}: {other} is carried");
    }

    let [_, held_out] = halves(dir.path());
    let (toml, bundle) = (at("model.toml"), at("fit.moec"));
    let mut fit = moec();
    fit.arg("fit").arg(ferris()).args([
        "--context",
        "512",
        "--max-loss",
        "6%",
        "--memory",
        "15MiB",
        "--json",
    ]);
    fit.arg("--profile")
        .arg(&trace)
        .arg("--text")
        .arg(&held_out)
        .arg("--toml")
        .arg(&toml)
        .arg("-o")
        .arg(&bundle);
    let report = json_of(&mut fit);
    let loss = |of: &Value| of["loss_share"].as_f64().unwrap();
    let chosen = &report["chosen"];
    assert!(loss(chosen) <= 0.06 && chosen["measured"] == true, "{report}");
    let builds = report["builds"].as_array().unwrap();
    let (predicted, measured) = (&builds[0]["predicted"], &builds[0]["measured"]);
    let (p, m) = (loss(predicted), loss(measured));
    assert!((p - m).abs() <= m / 3.0 + 2e-3, "a loss of {p} was predicted, {m} measured");
    assert!(measured["decode_tokens_per_s"].as_f64().unwrap() > 0.0, "{report}");
    // Other candidates are corrected by the same factors.
    let others = report["candidates"].as_array().unwrap();
    assert!(others.iter().any(|c| c["measured"] == false && c["breaks"].is_string()), "{report}");
    assert!(fs::read_to_string(&toml).unwrap().contains("profile = \"ferris.trace\""));

    let again =
        json_of(moec().arg("build").arg(&toml).args(["--json", "--quiet", "-o"]).arg(at("again.moec")));
    let manifest = json_of(moec().arg("inspect").arg(&bundle).arg("--json"));
    assert_eq!(again["manifest_sha256"], manifest["manifest_sha256"], "`fit` and `build` differ");

    // Bad input is named.
    let refused = |source: &Path, options: &[&str]| {
        let mut fit = predict(source, &at("no.toml"), options);
        let (code, stderr) = fails(fit.arg("--profile").arg(&trace));
        assert!(!at("no.toml").exists());
        (code, stderr)
    };
    let (code, stderr) = refused(&ferris_relu(), &[]);
    assert!(code == 1 && stderr.contains("ferris.trace` was taken from another model"), "{stderr}");
    let (code, stderr) = refused(&ferris(), &["--max-loss", "0.01%", "--memory", "8MiB", "--context", "512"]);
    assert!(code == 1 && stderr.contains("no format that fits loses at most 0.01 %"), "{stderr}");
    let (trace, _) = recorded(dir.path(), &["--tokens", "1024"]);
    let mut fit = predict(&ferris(), &at("no.toml"), &["--max-loss", "2%"]);
    let (code, stderr) = fails(fit.arg("--profile").arg(&trace));
    assert!(code == 2 && stderr.contains("has no losses of formats"), "{stderr}");
}

/// Five published models by their `config.json` alone: the bytes of the weights are those of the arithmetic by hand.
#[test]
fn shapes_of_published_models_are_predicted_from_their_configuration() {
    // Layers with experts × experts × hidden, the parameters of routers, which stay f32; of each, gate, up and down of
    // an expert have three times its inner size; and the parameters of all.
    let models: [(Like, u64, u64, f64); 5] = [
        (Like::Olmoe, 16 * 64 * 2048, 1024, 6.92e9),
        (Like::GptOss20b, 24 * 32 * 2880, 2880, 20.91e9),
        (Like::Qwen3_6_35bA3b, 40 * 256 * 2048, 512, 34.66e9),
        (Like::Glm45Air, 45 * 128 * 4096, 1408, 106.85e9),
        (Like::DeepseekV3, 58 * 256 * 7168, 2048, 671.03e9),
    ];
    // Bits with the scales of groups of 32 in f16, of 64 in a byte for q2s.
    let bits = |format: &Value| match format.as_str().unwrap() {
        "bf16" => 16.0,
        "q2s" => 2.125,
        "q4n" => 4.5,
        name => f64::from(name.strip_prefix('q').unwrap().parse::<u32>().unwrap()) + 0.5,
    };
    let dir = tempfile::tempdir().unwrap();
    for (like, routers, inner, parameters) in models {
        let source = dir.path().join(format!("{like:?}"));
        fs::create_dir(&source).unwrap();
        fs::write(source.join("config.json"), like.config().unwrap().to_string()).unwrap();
        let options = ["--memory", "2TiB", "--target", "sapphire-rapids", "--json", "--context", "4096"];
        let report = json_of(&mut predict(&source, &dir.path().join("model.toml"), &options));
        let candidates = report["candidates"].as_array().unwrap();
        assert!(candidates.len() >= 12, "{report}");
        for c in candidates {
            let (experts, routers) = ((3 * routers * inner) as f64, routers as f64);
            let rest = parameters - experts - routers;
            let bits = experts * bits(&c["experts"]) + rest * bits(&c["rest"]) + routers * 32.0;
            let by_hand = bits / 8.0;
            let size = number(c, "size_bytes") as f64;
            // Norms and projections of few channels stay f32, too: where experts have the fewest bits, they show.
            let most = match c["experts"].as_str() {
                Some("q2s") => 0.02,
                Some("q2") => 0.015,
                _ => 0.01,
            };
            assert!((size / by_hand - 1.0).abs() < most, "{like:?}: {size} of {by_hand}: {c}");
            assert!(number(c, "memory_bytes") as f64 > size, "{c}");
        }
        // Nothing can be built from that.
        let (code, stderr) =
            fails(moec().arg("fit").arg(&source).arg("--toml").arg(dir.path().join("n.toml")));
        assert!(code == 2 && stderr.contains("` has no weights"), "{stderr}");
    }
}

/// Kernels of a model that no cache holds are timed, if the target is this machine.
#[test]
fn speeds_on_this_machine_come_from_its_kernels() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), Like::Olmoe.config().unwrap().to_string()).unwrap();
    for (target, timed) in [("native", true), ("sapphire-rapids", false)] {
        let options = ["--memory", "2TiB", "--target", target];
        let why = ok(&mut predict(dir.path(), &dir.path().join("model.toml"), &options)).stderr;
        let why = String::from_utf8(why).unwrap();
        assert_eq!(why.contains("kernels on this machine, for the speeds"), timed, "{why}");
    }
}

#[test]
fn configuration_that_is_not_supported_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let toml = dir.path().join("model.toml");
    let config = json!({"architectures": ["NoSuchForCausalLM"], "model_type": "none"});
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let (code, stderr) = fails(&mut predict(dir.path(), &toml, &["--memory", "1GiB"]));
    assert!(code == 1 && stderr.contains("NoSuchForCausalLM"), "{stderr}");
    // Static graphs have no formats in planes of bits, and the others need a profile: both are named.
    let source = checkpoint("olmoe");
    let mut fit = predict(&source, &toml, &["--memory", "1GiB", "--target", "m2-ultra", "--verbose"]);
    let (code, stderr) = fails(&mut fit);
    assert!(code == 1 && stderr.contains("cannot be q6 on a target with static graphs"), "{stderr}");
    assert!(stderr.contains("static capacities require the loads of a calibration"), "{stderr}");
}
