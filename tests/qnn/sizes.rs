//! The table of sizes in docs/qnn-networks.md: `MOEC_BLESS=1` writes it.

use super::library::installed;
use super::{Case, PHONE};
use crate::support::{ok, root};
use moec_qnn::compose::compose;
use moec_qnn::onnx;
use moec_qnn_sys::worker::{Program, Worker};
use moec_qnn_sys::{Installation, SNAPDRAGON_8_GEN_3};
use moec_runtime::bundle::BundleReader;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const PAGE: &str = "docs/qnn-networks.md";
const MARKS: [&str; 2] = ["<!-- sizes -->", "<!-- /sizes -->"];
const EXPERTS: &str = "[experts]\ngroup = 8\nsizes = 2\n";

/// Bytes of a context with the networks of an artifact, each with its own weights.
fn separate_bytes(folder: &Path, library: &Path) -> u64 {
    let program = Program {
        path: env!("CARGO_BIN_EXE_moec").into(),
        arguments: ["worker", "qnn"].map(Into::into).to_vec(),
        limit: Duration::from_mins(10),
    };
    let installation = Installation::at(library).unwrap();
    let mut worker = Worker::start(&program, &installation, SNAPDRAGON_8_GEN_3, false).unwrap();
    let mut files: Vec<PathBuf> = folder.read_dir().unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    for file in files.iter().filter(|f| f.extension().is_some_and(|end| end == "onnx")) {
        let network = onnx::read(&fs::read(file).unwrap()).unwrap();
        worker.compose(&compose(&network, Some(&BundleReader::unchecked(folder))).unwrap()).unwrap();
    }
    worker.binary().unwrap().len() as u64
}

/// A row of the table: sizes of a bundle's artifacts of one kind.
fn row(name: &str, bundle: &Path, artifacts: &[&Value], library: &Path) -> String {
    let sum = |key: &str| artifacts.iter().map(|a| a[key].as_u64().unwrap()).sum::<u64>();
    let most = |key: &str| artifacts.iter().map(|a| a[key].as_u64().unwrap()).max().unwrap();
    let separate: u64 =
        artifacts.iter().map(|a| separate_bytes(&bundle.join(a["package"].as_str().unwrap()), library)).sum();
    assert!(sum("weights") < sum("unshared") && sum("context") < separate, "{name}: {artifacts:?}");
    assert!(most("context") < 4 << 30 && most("activations") < 8 << 20, "{name}: {artifacts:?}");
    let [graph, context] =
        [most("largest") as f64 / (2_u64 << 30) as f64, most("context") as f64 / (4_u64 << 30) as f64];
    format!(
        "| {name} | {} of {} | {} | {} | {} | {separate} | {:.3} % | {:.3} % | {:.2} % |\n",
        sum("functions"),
        artifacts.len(),
        sum("weights"),
        sum("unshared"),
        sum("context"),
        100.0 * graph,
        100.0 * context,
        100.0 * most("activations") as f64 / (8_u64 << 20) as f64,
    )
}

#[test]
fn size_and_limit_table_of_the_page_is_current() {
    let Some(tools) = installed() else { return };
    let mut table = String::from(
        "| bundle | networks of artifacts | codes, bytes | each with its own | contexts, bytes | apart | largest graph of 2 GiB | largest context of 4 GiB | widest node of 8 MiB of VTCM |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for (model, hot) in [("ferris", ""), ("ferris-relu", "hot = \"npu\"\n")] {
        let case = Case::of(model, 256, &format!("{hot}{EXPERTS}"));
        let text = fs::read_to_string(&case.toml).unwrap();
        fs::write(&case.toml, text.replace("decode_batch = [1]", "decode_batch = [1, 2, 3, 4]")).unwrap();
        let mut build = case.moec("build");
        build.envs(tools.iter().map(|(name, value)| (name, value)));
        build.arg(&case.toml).args(["--target", PHONE, "--no-run", "-o"]).arg(case.path("a.moec"));
        ok(&mut build);
        let report = case.json("inspect", &[]);
        assert_eq!(
            (&report["unit"]["graph_limit"], &report["unit"]["tile_memory"]),
            (&(2_u64 << 30).into(), &(8 << 20).into())
        );
        assert_eq!(report["unit"]["context_limit"], 4_u64 << 30);
        let all = report["unit"]["artifacts"].as_array().unwrap();
        let of = |end: &str| -> Vec<&Value> {
            all.iter().filter(|a| a["package"].as_str().unwrap().contains(end)).collect()
        };
        for (what, end) in [("experts", ".group."), ("head", "head"), ("hot neurons", ".hot.")] {
            let found = of(end);
            if !found.is_empty() {
                let name = format!("{model}, {what}");
                table += &row(&name, &case.path("a.moec"), &found, &tools[0].1);
            }
        }
    }
    assert_eq!(table.lines().count(), 2 + 5, "{table}");
    let page = root().join(PAGE);
    let text = fs::read_to_string(&page).unwrap();
    let (head, rest) = text.split_once(MARKS[0]).unwrap();
    let (old, tail) = rest.split_once(MARKS[1]).unwrap();
    if std::env::var_os("MOEC_BLESS").is_some() {
        fs::write(&page, format!("{head}{}\n{table}{}{tail}", MARKS[0], MARKS[1])).unwrap();
        return;
    }
    // Calibration on another CPU gives slightly different groups and shares.
    let near = |a: &str, b: &str| match (a.parse::<f64>(), b.parse::<f64>()) {
        (Ok(a), Ok(b)) => (a - b).abs() <= 0.1 * a.max(b) + 0.01,
        _ => a == b,
    };
    let words = |table: &str| table.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let (old, new) = (words(old), words(&table));
    let same = old.len() == new.len() && old.iter().zip(&new).all(|(a, b)| near(a, b));
    assert!(same, "{PAGE} is stale, MOEC_BLESS=1 writes it:\n{table}");
}
