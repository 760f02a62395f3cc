//! Networks of hot neurons: built where they are asked for, verified, and beside a plan that keeps whole experts.

use super::library::installed;
use super::{Case, PHONE, Tiny, files};
use crate::support::{fails, ok};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const EXPERTS: usize = 24;
const LAYERS: u64 = 4;

/// `ferris-relu` with its experts in few groups, for decoding one and four sequences.
fn relu() -> Case {
    let case = Case::of("ferris-relu", 64, "hot = \"npu\"\n[experts]\ngroup = 24\nsizes = 1\n");
    let text = fs::read_to_string(&case.toml).unwrap();
    fs::write(&case.toml, text.replace("decode_batch = [1]", "decode_batch = [1, 4]")).unwrap();
    case
}

#[test]
fn hot_neurons_by_batch_become_networks_that_share_weights_and_verify() {
    let case = relu();
    case.build(PHONE, "a.moec");
    let decisions = fs::read(case.path("a.moec/decisions.json")).unwrap();
    let decisions: Value = serde_json::from_slice(&decisions).unwrap();
    let shares = decisions["hot"].as_array().unwrap();
    let of = |layer: u64, batch: u64| {
        let found = shares.iter().find(|s| s["layer"] == layer && s["batch"] == batch).unwrap();
        assert_eq!(found["networks"], true, "{found}");
        found["hot"].as_u64().unwrap()
    };
    assert!(shares.iter().all(|s| s["batch"] != 2 || s.get("networks").is_none()), "{decisions}");
    for layer in 0..LAYERS {
        let [one, four] = [1, 4].map(|batch| of(layer, batch));
        assert!(one > 0 && one < four, "{one} and {four} hot neurons in layer {layer}");
        // Every expert has neurons of its own, of which those of a smaller batch come first.
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
            assert!(error > 0.0 && error < 0.03 && f["refused"] == false && f["experts"] == 1, "{f}");
        }
    }
    assert_eq!(found.len() as u64, LAYERS);
    assert!(found.values().all(|&n| n == 2 * EXPERTS), "{found:?}");
    case.json("verify", &["--static"]);

    // Batches share what they have in common: the codes are those of the larger one.
    let report = case.json("inspect", &[]);
    for a in report["unit"]["artifacts"].as_array().unwrap() {
        let of = |key: &str| a[key].as_u64().unwrap();
        if a["package"].as_str().unwrap().ends_with(".hot.qnn") {
            assert!(of("functions") == 48 && of("unshared") > of("weights") * 5 / 4, "{a}");
        }
        assert!(of("largest") <= of("weights") && of("activations") > 0, "{a}");
    }
    assert_eq!(report["unit"]["tile_memory"], 8 << 20);

    // The plan keeps whole experts, and says so.
    let explained = ok(case.moec("explain").arg(case.path("a.moec"))).stdout;
    let explained = String::from_utf8(explained).unwrap();
    assert!(explained.contains("`run` does not call"), "{explained}");
    let trace = case.path("a.trace").display().to_string();
    let simulated = case.json("simulate", &["--trace", &trace, "--decode", "4"]);
    assert_eq!(simulated["networks"]["functions"], 4 * 48);

    // Two builds give the same bytes.
    case.build(PHONE, "b.moec");
    let [a, b] = ["a.moec", "b.moec"].map(|name| files(&case.path(name).join("artifacts")));
    assert!(a == b, "two builds differ");

    // Other neurons than those that the codes are of are found.
    let file = case.path("b.moec/artifacts/layers.0.hot.qnn/neurons.bin");
    let right = fs::read(&file).unwrap();
    let each = right.len() / EXPERTS;
    let mut swapped = right.clone();
    swapped[..2 * each].rotate_left(each);
    let mut twice = right.clone();
    twice.copy_within(0..4, 4);
    for (bytes, expected) in [(swapped, "is off by"), (twice, "some twice"), (right[4..].to_vec(), "has not")]
    {
        case.forge("b.moec", "artifacts/layers.0.hot.qnn/neurons.bin", &bytes);
        let (code, said) = fails(case.moec("verify").arg(case.path("b.moec")));
        assert!(code == 1 && said.contains(expected) && said.contains("layers.0.hot"), "{said}");
    }
}

/// Gates that leave no zeros have no hot neurons, and not every unit has graphs of them.
#[test]
fn what_has_no_hot_neurons_is_refused_by_name() {
    for (model, target, expected) in [
        ("ferris", PHONE, "the profile saw no gates that leave zeros"),
        ("ferris-relu", "m2-max", "no hot neurons pay for a batch that this build decodes"),
    ] {
        let case = Case::of(model, 64, "hot = \"npu\"\n");
        let mut build = case.moec("build");
        build.arg(&case.toml).args(["--target", target, "--no-run", "-o"]).arg(case.path("a.moec"));
        let (code, said) = fails(&mut build);
        assert!(code == 1 && said.contains(expected) && said.contains("hot"), "{target}: {said}");
    }
}

/// Compiled for the chip in one context for each layer, and executed.
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
        count += 1;
        let checks = f["checks"].as_array().unwrap();
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
}
