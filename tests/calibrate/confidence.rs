//! Confidences of the little pass of big-little decoding, and γ that a build chooses from them.

use super::case::{Case, ids};
use crate::support::{Setup, cache, calibration, fails, ferris, moec, ok, recorded};
use moec_bundle::read::Bundle;
use moec_profile::Profile;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Keys that request big-little decoding, with γ.
fn decode(gamma: &str) -> String {
    format!("[decode]\nbig_little = true\ngamma = {gamma}\n")
}

/// Ferris with a profile of a few thousand tokens.
struct Ferris(TempDir);

impl Ferris {
    /// Records the profile with these keys in `model.toml`.
    fn new(keys: &str) -> Self {
        let case = Self(tempfile::tempdir().unwrap());
        let args = ["--text", &calibration(), "--tokens", "16384"];
        recorded(&case.toml(keys), &args, &case.profile());
        case
    }

    fn profile(&self) -> PathBuf {
        self.0.path().join("t.trace")
    }

    fn toml(&self, keys: &str) -> PathBuf {
        let setup = Setup { format: "bf16", chunk: 128, batch: &[1], context: 512 };
        let path = setup.write(&ferris(), self.0.path());
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text + keys).unwrap();
        path
    }

    /// `moec build` with the profile and these keys.
    fn build(&self, keys: &str, bundle: &Path) -> std::process::Command {
        let toml = self.toml(&format!("[calibrate]\nprofile = \"{}\"\n{keys}", self.profile().display()));
        let mut command = moec();
        command.env("MOEC_CACHE", cache(self.0.path()));
        command.arg("build").arg(toml).args(["--no-run", "-o"]).arg(bundle);
        command
    }
}

#[test]
fn share_of_tokens_chooses_gamma() {
    let case = Ferris::new(&decode("0.7"));
    let recorded = Profile::read(&case.profile()).unwrap().confidence.unwrap();
    assert_eq!((recorded.experts, recorded.tokens()), (2, 1024));
    let bundle = case.0.path().join("b");
    let built = ok(&mut case.build(&decode("\"15%\""), &bundle));
    let stderr = String::from_utf8(built.stderr).unwrap();
    assert!(!stderr.contains("not expected to save time"), "{stderr}");

    let planned = Bundle::open(&bundle).unwrap().plan.model.big_little.unwrap();
    let gamma = recorded.quantile(0.15);
    assert_eq!(f64::from(planned.gamma), gamma);
    assert!(gamma > 0.0 && gamma < 0.5, "{gamma}");
    let decisions: Value =
        serde_json::from_str(&fs::read_to_string(bundle.join("decisions.json")).unwrap()).unwrap();
    let all = decisions["decisions"].as_array().unwrap();
    let of: Vec<_> = all.iter().filter(|d| d["pass"] == "gamma").collect();
    assert_eq!(of.len(), 1, "{decisions}");
    assert_eq!(of[0]["reason"], "15 % of 1024 calibration tokens fall back");
    assert_eq!(
        (&of[0]["figures"]["gamma"], &of[0]["figures"]["requested_share"]),
        (&gamma.into(), &0.15.into())
    );
    let explained = String::from_utf8(ok(moec().arg("explain").arg(&bundle)).stdout).unwrap();
    assert!(explained.contains("15 % of 1024 calibration tokens fall back"), "{explained}");

    // Text that calibration has read, where other tokens than those of the profile fall back in 15.8 % of
    // cases. The standard error of the profile's share is 1.1 %.
    let mut eval = moec();
    eval.arg("eval").arg(&bundle).args(["--big-little", "--json", "--windows", "12", "--window", "512"]);
    let report: Value = serde_json::from_slice(&ok(eval.arg("--text").arg(calibration())).stdout).unwrap();
    let ratio = report["gammas"][0]["fallback_ratio"].as_f64().unwrap();
    assert_eq!(report["gammas"][0]["gamma"], planned.gamma());
    assert!((ratio - 0.15).abs() < 0.03, "{report}");
}

#[test]
fn share_without_gain_is_a_warning() {
    let case = Ferris::new(&decode("0.7"));
    let built = ok(&mut case.build(&decode("\"60%\""), &case.0.path().join("b")));
    let stderr = String::from_utf8(built.stderr).unwrap();
    assert!(stderr.contains("not expected to save time if 60 % of the tokens are decoded again"), "{stderr}");
}

#[test]
fn share_requires_confidences_of_the_same_little_pass() {
    let refused = |case: &Ferris, keys: &str, words: &[&str]| {
        let (code, stderr) = fails(&mut case.build(keys, &case.0.path().join("b")));
        assert_eq!(code, 1, "{stderr}");
        for word in words {
            assert!(stderr.contains(word), "`{word}` is not in:\n{stderr}");
        }
        assert!(stderr.contains("hint:") && stderr.contains("set `gamma` to a number"), "{stderr}");
    };
    let without = Ferris::new("");
    assert_eq!(Profile::read(&without.profile()).unwrap().confidence, None);
    refused(&without, &decode("\"15%\""), &["`gamma` under `[decode]`", "no confidences", "moec calibrate"]);
    let other = Ferris::new(&decode("0.7"));
    let keys = format!("{}little = 1\n", decode("\"15%\""));
    refused(&other, &keys, &["2 experts per token", "`little` is 1", "moec calibrate"]);
    // Neither a profile nor a text.
    let toml = other.toml(&decode("\"15%\""));
    let (code, stderr) =
        fails(moec().arg("build").arg(toml).args(["--no-run", "-o"]).arg(other.0.path().join("b")));
    assert!(code == 1 && stderr.contains("needs a profile") && stderr.contains("`[calibrate]`"), "{stderr}");
    // A share is not used without `big_little`.
    ok(&mut without.build("[decode]\ngamma = \"15%\"\n", &without.0.path().join("b")));
}

/// Everything else in the profile is that of a calibration without little passes, and so it is for recurrent
/// states, which go back by a snapshot.
#[test]
fn little_pass_adds_only_confidences_to_a_profile() {
    for family in ["qwen3_moe", "qwen3_next"] {
        let case = Case::new(family);
        let text = case.text("t.txt", &ids(200));
        let take = |out: &str, threads: &str| {
            let mut command = case.calibrate();
            command.env("MOEC_THREADS", threads).arg("--text").arg(&text).arg("-o").arg(case.path(out));
            ok(&mut command);
            fs::read(case.path(out)).unwrap()
        };
        let without = take("without.trace", "1");
        case.append("[decode]\nbig_little = true\n");
        let with = take("with.trace", "1");
        assert!(with == take("again.trace", "3"), "{family}: a profile depends on the number of threads");
        let (without, with) = (Profile::decode(&without).unwrap(), Profile::decode(&with).unwrap());
        let recorded = with.confidence.clone().unwrap();
        assert!(recorded.tokens() > 60, "{family}: {}", recorded.tokens());
        assert_eq!(Profile { confidence: None, ..with.clone() }, without, "{family}");
        // Merged, both texts count.
        let merged = with.merge(&with).unwrap().confidence.unwrap();
        assert_eq!((merged.experts, merged.tokens()), (recorded.experts, 2 * recorded.tokens()));
        let shown = String::from_utf8(ok(moec().arg("inspect").arg(case.path("with.trace"))).stdout).unwrap();
        assert!(shown.contains("confidences") && shown.contains("for 15 %"), "{shown}");
    }
}
