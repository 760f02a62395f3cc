//! `moec report`, `moec compare` and `moec self-test` from a user's view.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Setup, built, checkpoint, fails, ferris, moec, ok};

/// A tiny bundle for a target; `more` is added to its `model.toml`.
fn bundle(folder: &Path, name: &str, target: &str, more: &str) -> PathBuf {
    let own = folder.join(name);
    fs::create_dir(&own).unwrap();
    let toml =
        Setup { format: "bf16", chunk: 16, batch: &[1, 2], context: 64 }.write(&checkpoint("olmoe"), &own);
    let text = fs::read_to_string(&toml).unwrap();
    fs::write(&toml, format!("{text}{more}")).unwrap();
    let out = own.join("out.moec");
    built(&toml, &["--target", target], &out);
    out
}

/// Text of a page without its tags, which must be balanced.
fn text_of(page: &str) -> String {
    let mut open: Vec<String> = Vec::new();
    let mut text = String::new();
    let mut rest = page;
    while let Some(at) = rest.find('<') {
        text += &rest[..at];
        let end = at + rest[at..].find('>').expect("a tag ends");
        let tag = &rest[at + 1..end];
        rest = &rest[end + 1..];
        let name: String =
            tag.trim_start_matches('/').chars().take_while(char::is_ascii_alphanumeric).collect();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "before {rest:.60}");
        } else if !tag.starts_with('!') && !tag.ends_with('/') && name != "meta" {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?} are not closed");
    text + rest
}

#[test]
fn report_pages_describe_the_bundle() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        ("cpu", "x86-64-v3", "", &["cpu", "attention", "Expected speed", "barriers"][..]),
        ("disk", "x86-64-v3", "[memory]\nbudget = \"40 MiB\"\n", &["disk", "frames for experts on disk"]),
        ("little", "x86-64-v3", "[decode]\nbig_little = true\n", &["big-little", "experts per token first"]),
        ("ndp", "spr-ndp", "", &["assigned in every step"]),
    ];
    for (name, target, more, words) in cases {
        let bundle = bundle(folder.path(), name, target, more);
        let page = folder.path().join(format!("{name}.html"));
        ok(moec().arg("report").arg(&bundle).arg("-o").arg(&page));
        let html = fs::read_to_string(&page).unwrap();
        // The page has no scripts and no external links.
        assert!(!html.contains("<script") && !html.contains("http"), "{name}");
        let page_text = text_of(&html);
        for word in words.iter().chain(&["Placement", "Memory", "Formats of weights", "Decisions", "Files"]) {
            assert!(page_text.contains(word), "{name}: `{word}` is not in:\n{page_text}");
        }
        assert!(!html.contains("NaN") && !html.contains("=\"-"), "{name}: an invalid coordinate");
        assert!(!page_text.contains('`'), "{name}: code that is not marked up");
    }
    // A page does not replace a folder.
    let (code, stderr) = fails(moec().arg("report").arg(folder.path()));
    assert!(code == 1 && stderr.contains("hint"), "{stderr}");
}

/// A page shows the profile that rounded the weights, and modelled rates in the unit of `run bench`.
#[test]
fn a_page_shows_the_profile_and_modelled_rates() {
    let folder = tempfile::tempdir().unwrap();
    let text = "The borrow checker reads what was lent, and says so at once. ".repeat(40);
    let corpus = folder.path().join("corpus.txt");
    fs::write(&corpus, text).unwrap();
    let setup = Setup { format: "q8", chunk: 16, batch: &[1], context: 64 };
    let toml = setup.write(&ferris(), folder.path());
    let config = fs::read_to_string(&toml).unwrap();
    fs::write(&toml, format!("{config}[calibrate]\ntext = [{corpus:?}]\ntokens = 256\n")).unwrap();
    let bundle = folder.path().join("out.moec");
    built(&toml, &["--target", "x86-64-v3"], &bundle);
    let page = folder.path().join("page.html");
    let out = ok(moec().arg("report").arg(&bundle).arg("-o").arg(&page).arg("--json")).stdout;
    let json: Value = serde_json::from_slice(&out).unwrap();
    let html = fs::read_to_string(&page).unwrap();
    assert_eq!(json["bytes"].as_u64(), Some(html.len() as u64));
    let page_text = text_of(&html);
    for words in [
        "Tokens that chose an expert in calibration",
        "corpus.txt",
        "Modelled, not measured",
        "chunk of a prompt",
        "decode step",
    ] {
        assert!(page_text.contains(words), "`{words}` is not in:\n{page_text}");
    }
    assert!(
        page_text.contains("tokens/s")
            && !page_text.contains("rows per second")
            && !page_text.contains("no profile"),
        "{page_text}"
    );
    // Every part of a memory is in the bar, at any width.
    let bars: Vec<&str> =
        html.split("<div class=\"stack\"").skip(1).map(|bar| bar.split("</div>").next().unwrap()).collect();
    let parts: usize = bars.iter().map(|bar| bar.matches("<span class=\"c").count()).sum();
    let table = html.split("<tr><th>memory</th>").nth(1).unwrap().split("</table>").next().unwrap();
    assert!(parts > 3 && parts == table.matches("</tr>").count() - 1, "{parts}: {table}");
}

/// A device file: two cores of x86-64-v3 with these rates.
fn device_file(folder: &Path, name: &str, gb_per_s: f64, barrier_us: f64) -> PathBuf {
    let path = folder.join(format!("{name}.toml"));
    let text = format!(
        "name = \"{name}\"\ndescription = \"a test\"\nfamily = \"cpu\"\ntriple = \"x86_64-unknown-linux-gnu\"\n\
         cpu = \"x86-64-v3\"\nfeatures = [\"avx2\", \"fma\", \"f16c\"]\n\
         [[unit]]\nname = \"cpu\"\nkind = \"cpu\"\ncores = 2\n\
         dispatch_cost_us = {{ value = {barrier_us:?}, source = \"a test\" }}\n\
         peak.f32 = {{ gops = 100, source = \"a test\" }}\n\
         [[memory]]\nname = \"dram\"\n\
         bandwidth = [{{ block_bytes = 64, gb_per_s = {gb_per_s:?}, source = \"a test\" }}]\n"
    );
    fs::write(&path, text).unwrap();
    path
}

/// Expected speed of each entry point in `moec report`, on the machine of a device file.
fn expected_speed(bundle: &Path, device: &Path) -> Vec<Value> {
    let page = device.with_extension("html");
    let mut report = moec();
    report.arg("report").arg(bundle).arg("--device").arg(device).arg("-o").arg(&page).arg("--json");
    let json: Value = serde_json::from_slice(&ok(&mut report).stdout).unwrap();
    json["expected"].as_array().unwrap().clone()
}

/// Seconds of a part of a call.
fn seconds(entry: &Value, part: &str) -> f64 {
    entry[part].as_f64().unwrap_or_else(|| panic!("`{part}` is missing in {entry}"))
}

#[test]
fn expected_speed_has_every_step_and_respects_the_bandwidth() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path(), "a", "x86-64-v3", "");
    let slow = device_file(folder.path(), "slow", 0.05, 0.0);
    let waiting = device_file(folder.path(), "waiting", 0.05, 100.0);
    let fast = device_file(folder.path(), "fast", 5000.0, 0.0);
    let [slow, waiting, fast] = [slow, waiting, fast].map(|device| expected_speed(&bundle, &device));
    let plan = moec_bundle::read::Bundle::open(&bundle).unwrap().plan;
    assert_eq!(slow.len(), plan.entries.len());
    for (i, entry) in plan.entries.iter().enumerate() {
        let (slow, waiting, fast) = (&slow[i], &waiting[i], &fast[i]);
        assert_eq!(slow["entry"], entry.kind.to_string());
        let parts = ["matrices", "attention", "barriers", "others"]
            .map(|p| seconds(waiting, &format!("{p}_seconds")));
        assert!(parts.iter().all(|&s| s > 0.0), "{waiting}");
        assert!((parts.iter().sum::<f64>() / seconds(waiting, "seconds") - 1.0).abs() < 1e-9, "{waiting}");
        // Each barrier costs what the device file says.
        let barriers = entry.steps.iter().filter(|s| s.barrier).count();
        let more = seconds(waiting, "seconds") - seconds(slow, "seconds");
        assert!(
            barriers > 0 && (more / (100e-6 * barriers as f64) - 1.0).abs() < 1e-6,
            "{more} for {barriers}"
        );
        let rate = |e: &Value| e["tokens_per_s"].as_f64().unwrap();
        assert!((rate(slow) * seconds(slow, "seconds") / entry.kind.rows() as f64 - 1.0).abs() < 1e-9);
        // With a slow memory, reading limits matrices; with a fast one, arithmetic does.
        assert!(seconds(slow, "reading_seconds") > 0.9 * seconds(slow, "matrices_seconds"), "{slow}");
        assert!(seconds(fast, "reading_seconds") < 0.5 * seconds(fast, "matrices_seconds"), "{fast}");
        assert!(rate(fast) > 2.0 * rate(slow), "{fast} {slow}");
    }
    // A token cannot be decoded faster than its weights are read.
    if support::runs_here("x86-64-v3") {
        let mut bench = moec();
        bench.arg("run").arg(&bundle).args(["bench", "--prompt", "8", "--gen", "8", "--json"]);
        let bench: Value = serde_json::from_slice(&ok(&mut bench).stdout).unwrap();
        let bytes = bench["bytes_per_decoded_token"].as_f64().unwrap();
        let decode = slow.iter().find(|e| e["entry"] == "decode[1]").unwrap();
        let rate = decode["tokens_per_s"].as_f64().unwrap();
        assert!(rate > 0.0 && rate <= 1.05 * 0.05e9 / bytes, "{rate} tokens/s of {bytes} bytes each");
    }
}

/// A model with more layers takes longer. Two sequences in a decode call take longer than one, but less than
/// twice as long.
#[test]
fn expected_speed_follows_layers_and_sequences() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("fewer");
    fs::create_dir(&source).unwrap();
    for file in fs::read_dir(checkpoint("olmoe")).unwrap() {
        let path = file.unwrap().path();
        if path.is_file() {
            fs::copy(&path, source.join(path.file_name().unwrap())).unwrap();
        }
    }
    let config = source.join("config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    let layers = json["num_hidden_layers"].as_u64().unwrap();
    json["num_hidden_layers"] = (layers - 1).into();
    fs::write(&config, json.to_string()).unwrap();
    let all = bundle(folder.path(), "all", "x86-64-v3", "");
    let fewer = folder.path().join("fewer.moec");
    let setup = Setup { format: "bf16", chunk: 16, batch: &[1, 2], context: 64 };
    let toml = setup.write(&source, folder.path());
    built(&toml, &["--target", "x86-64-v3"], &fewer);
    let device = device_file(folder.path(), "device", 20.0, 1.0);
    let [all, fewer] = [&all, &fewer].map(|bundle| expected_speed(bundle, &device));
    for (all, fewer) in all.iter().zip(&fewer) {
        assert_eq!(all["entry"], fewer["entry"]);
        let more = |part: &str| seconds(all, part) / seconds(fewer, part);
        for part in ["seconds", "matrices_seconds", "attention_seconds", "barriers_seconds"] {
            assert!(more(part) > 1.1, "{part}: {all} {fewer}");
        }
        // Attention scales with the number of layers.
        assert!((more("attention_seconds") / (layers as f64 / (layers - 1) as f64) - 1.0).abs() < 1e-6);
    }
    let of = |name: &str| all.iter().find(|e| e["entry"] == name).map(|e| seconds(e, "seconds")).unwrap();
    let (one, two) = (of("decode[1]"), of("decode[2]"));
    assert!(one < two && two < 2.0 * one, "{one} {two}");
}

#[test]
fn compare_shows_two_bundles_side_by_side() {
    let folder = tempfile::tempdir().unwrap();
    let a = bundle(folder.path(), "a", "x86-64-v3", "");
    let b = bundle(folder.path(), "b", "x86-64-v3", "[memory]\nkv_cache = \"q8\"\n");
    let compare = |args: &[&Path], more: &[&str]| ok(moec().arg("compare").args(args).args(more));
    let json: Value = serde_json::from_slice(&compare(&[&a, &b], &["--json"]).stdout).unwrap();
    let row =
        |what: &str| json["rows"].as_array().unwrap().iter().find(|r| r["what"] == what).unwrap().clone();
    let cache = row("KV cache");
    assert_eq!(
        (cache["a"].as_str(), cache["b"].as_str(), cache["same"].as_bool()),
        (Some("f32"), Some("q8"), Some(false))
    );
    assert_eq!(row("family")["same"].as_bool(), Some(true));
    let text = String::from_utf8(compare(&[&a, &b], &[]).stdout).unwrap();
    assert!(text.contains("* KV cache") && text.contains("  family"), "{text}");
    let few = String::from_utf8(compare(&[&a, &b], &["--different"]).stdout).unwrap();
    assert!(few.contains("* KV cache") && !few.contains("family"), "{few}");
    let same = String::from_utf8(compare(&[&a, &a], &["--different"]).stdout).unwrap();
    assert!(same.contains("the bundles do not differ"), "{same}");
    let same: Value = serde_json::from_slice(&compare(&[&a, &a], &["--json"]).stdout).unwrap();
    assert_eq!(same["different"].as_u64(), Some(0));
}

#[test]
fn self_test_passes() {
    let out = ok(moec().args(["self-test", "--json", "--quiet"]));
    let json: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((json["verdict"].as_str(), json["tokens"]["same"].as_u64()), (Some("ok"), Some(64)), "{json}");
    assert!(json["largest_distance_of_a_logit"].as_f64().unwrap() <= 2e-3);
    assert!(json["decode_tokens_per_s"].as_f64().unwrap() > 0.0);
}

/// Every string below a value, with the keys of objects.
fn strings<'v>(value: &'v Value, all: &mut Vec<&'v str>) {
    match value {
        Value::String(text) => all.push(text),
        Value::Array(values) => values.iter().for_each(|value| strings(value, all)),
        Value::Object(map) => map.iter().for_each(|(key, value)| {
            all.push(key);
            strings(value, all);
        }),
        _ => {}
    }
}

/// One command tests and times every unit, and its report does not identify the machine's owner.
#[test]
fn shared_report_has_every_unit_and_no_private_data() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join("mara-home");
    fs::create_dir(&home).unwrap();
    let report = folder.path().join("report.json");
    let mut test = moec();
    test.env("HOME", &home).env("USER", "mara").env("LOGNAME", "mara").env("MOEC_CACHE", home.join("cache"));
    let stdout = ok(test.args(["self-test", "--quiet", "--report"]).arg(&report)).stdout;
    assert!(String::from_utf8(stdout).unwrap().contains(": ok, 64 of 64 tokens"));
    let text = fs::read_to_string(&report).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();

    let unit = |name: &str| {
        json["units"]
            .as_array()
            .unwrap()
            .iter()
            .find(|u| u["unit"] == name)
            .unwrap_or_else(|| panic!("{name}: {json}"))
    };
    let cpu = unit("cpu");
    assert_eq!(
        (cpu["state"].as_str(), cpu["verify"]["verdict"].as_str()),
        (Some("ok"), Some("right")),
        "{cpu}"
    );
    assert!(cpu["verify"]["files"].as_u64() > Some(0) && cpu["tokens"]["same"] == 64, "{cpu}");
    for rate in ["prefill_tokens_per_s", "decode_tokens_per_s"] {
        assert!(cpu["bench"][rate].as_f64() > Some(0.0), "{cpu}");
    }
    // Without static graphs there are no operations to report.
    assert_eq!(cpu.get("operations"), Some(&Value::Null), "{cpu}");
    // Most machines have neither a GPU nor an NPU.
    for unit in ["gpu", "npu"].map(unit) {
        let why = unit["why"].as_str().unwrap_or_default();
        assert!(unit["state"] == "ok" || unit["state"] == "missing" && !why.is_empty(), "{unit}");
    }
    assert!(json["figures"]["read_gb_per_s"].as_f64() > Some(0.0) && !json["figures"]["matmul"].is_null());
    assert!(json["cpu"].as_str().is_some_and(|name| name.contains("cores")));

    let mut all = Vec::new();
    strings(&json, &mut all);
    let host = String::from_utf8(ok(Command::new("uname").arg("-n")).stdout).unwrap();
    for private in ["mara", folder.path().to_str().unwrap()] {
        assert!(!text.contains(private), "`{private}` is in the report:\n{text}");
    }
    let mut words = all.iter().flat_map(|text| text.split(|c: char| !c.is_alphanumeric() && c != '-'));
    assert!(words.all(|word| word != host.trim()), "the host's name is in the report:\n{text}");
    // Sources of figures may name files of the Linux kernel.
    let mut words = all.iter().flat_map(|text| text.split([' ', '`', '"', '\'']));
    let path = words.find(|word| word.starts_with('/') && !word.starts_with("/sys/"));
    assert!(path.is_none(), "the report has a path: {path:?}");

    // If the report cannot be written, no test is started.
    let (code, stderr) = fails(moec().args(["self-test", "--report"]).arg(folder.path()));
    assert!(code == 1 && stderr.contains("cannot write"), "{stderr}");
}
