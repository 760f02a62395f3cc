//! Attention cut by heads between hosts: the bits of one host with as many slices, and transformers' logits.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::host_costs::device;
use crate::host_placements::{answers, build};
use crate::hosts::{LAUNCHERS, run};
use crate::support::{built, checkpoint, distance, expected, fails, ferris, json_of, moec, ok};
use moec_bundle::read::Bundle;
use moec_ir::plan::{Plan, StateBuf};
use moec_testing::every_nth;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Families whose heads can be cut, with a number of hosts: biases, norms of heads, windows and sinks, rotations of
/// a part of a head, values that are keys.
const FAMILIES: [(&str, usize); 8] = [
    ("gpt_oss", 2),
    ("dots1", 3),
    ("mixtral", 2),
    ("qwen2_moe", 2),
    ("qwen3_moe", 2),
    ("glm4_moe", 2),
    ("phimoe", 2),
    ("gemma4", 2),
];

/// The lines that cut experts and attention into slices for hosts.
fn cut(hosts: usize) -> String {
    format!("[placement]\nhosts = \"slices\"\nattention_slices = {hosts}")
}

fn plan(bundle: &Path) -> Plan {
    Bundle::open(bundle).unwrap().plan
}

/// Bytes of the KV cache in each memory.
fn caches(plan: &Plan) -> Vec<u64> {
    let of =
        |memory: usize| plan.states.iter().filter(|s| s.memory as usize == memory).map(StateBuf::bytes).sum();
    (0..plan.memories.len()).map(of).collect()
}

#[test]
fn heads_of_hosts_give_the_bits_of_slices_on_one() {
    let launchers: Vec<_> = LAUNCHERS.iter().filter(|(need, ..)| need.met_or_skip()).collect();
    for (family, hosts) in every_nth(2, FAMILIES) {
        let (folder, source) = (tempfile::tempdir().unwrap(), checkpoint(family));
        let golden = expected(&source);
        let slices = format!("[placement]\nslices = {hosts}\nattention_slices = {hosts}");
        let one = build(&source, folder.path(), "native", &slices);
        let several = build(&source, folder.path(), &format!("native-x{hosts}"), &cut(hosts));
        let want = answers(&one, &golden.ids, None);
        let logits: Vec<f32> = want.0.iter().map(|&bits| f32::from_bits(bits)).collect();
        let worst = distance(&logits, &golden.logits);
        assert!(worst <= golden.tolerance(), "{family}: a logit is off by {worst}");
        let caches = caches(&plan(&several));
        assert!(caches.len() == hosts && caches.iter().all(|&bytes| bytes > 0), "{family}: {caches:?}");
        let same = |launched, by: &str| {
            let found = answers(&several, &golden.ids, launched);
            assert!(found == want, "{family} on {hosts} hosts, {by}: other bits or tokens");
        };
        same(None, "one process");
        for (_, launcher, options) in &launchers {
            same(Some((*launcher, *options, hosts)), launcher);
        }
    }
}

/// Caches of fewer bits, and quantised weights, are cut as they are on one host; the reference of `verify` agrees.
#[test]
fn quantised_heads_and_caches_are_those_of_one_host() {
    let (folder, source) = (tempfile::tempdir().unwrap(), ferris());
    let lines = "[weights]\nexperts = \"q4\"\nattention = \"q8\"\n[memory]\nkv_cache = \"q8\"\n[placement]\n";
    let build = |target: &str, more: &str| {
        let folder = tempfile::Builder::new().tempdir_in(folder.path()).unwrap().keep();
        let toml = folder.join("model.toml");
        let text = format!(
            "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 96\nprefill_chunk = 20\ndecode_batch = [1, 2, 4]\n{lines}{more}\n",
            source.display()
        );
        fs::write(&toml, text).unwrap();
        let bundle = folder.join("out.moec");
        built(&toml, &["--target", target], &bundle);
        bundle
    };
    let prompt = [5, 9, 2, 77, 31, 8, 100, 4];
    let one = build("native", "slices = 2\nattention_slices = 2");
    let two = build("native-x2", "hosts = \"slices\"\nattention_slices = 2");
    assert!(answers(&two, &prompt, None) == answers(&one, &prompt, None), "other bits or tokens");
    let verified = String::from_utf8(ok(moec().arg("verify").arg(&two)).stdout).unwrap();
    assert!(verified.contains("all within tolerance"), "{verified}");
    ok(moec().arg("verify").arg(&two).arg("--source").arg(&source));
}

/// Each host reads its own heads alone, and its memory and its budget count them.
#[test]
fn hosts_hold_their_heads_alone() {
    let (folder, source) = (tempfile::tempdir().unwrap(), checkpoint("qwen3_moe"));
    let first = build(&source, folder.path(), "native-x2", &cut(2).replace("= 2", "= 1"));
    let heads = build(&source, folder.path(), "native-x2", &cut(2));
    let [first, heads] = [&first, &heads].map(|bundle| plan(bundle));
    let [all, none] = caches(&first)[..] else { panic!("two memories") };
    assert_eq!((caches(&heads), none), (vec![all / 2, all / 2], 0));
    let dense = |plan: &Plan| plan.files[0].bytes;
    let attention: u64 = first.segments.iter().filter(|s| s.name.contains(".attn.")).map(|s| s.bytes).sum();
    assert!(dense(&heads) <= dense(&first) - attention / 3, "{} {}", dense(&heads), dense(&first));
    let budget = format!("[memory]\nbudget = \"1 GiB\"\nthreads = 2\n{}", cut(2));
    let paged = build(&source, folder.path(), "native-x2", &budget);
    let plan = plan(&paged);
    let resident = plan.paging_of(1).unwrap().resident;
    assert!(resident > caches(&plan)[1], "{resident}");
    let prompt = &expected(&source).ids;
    let slices = "[placement]\nslices = 2\nattention_slices = 2";
    let one = build(&source, folder.path(), "native", slices);
    assert!(answers(&paged, prompt, None) == answers(&one, prompt, None), "other bits or tokens");
    // What a sequence has on other hosts cannot be saved.
    let (_, error) = fails(
        run(&paged, None)
            .args(["generate", "--ids", "1,2,3", "--save-prompt"])
            .arg(folder.path().join("saved")),
    );
    assert!(error.contains("slice_1"), "{error}");
}

/// Decisions on attention: what was chosen, and why, by layer.
fn decisions(bundle: &Path) -> Vec<Value> {
    let all = json_of(moec().arg("explain").arg(bundle).arg("--json"));
    let all = all["decisions"].as_array().unwrap().clone();
    all.into_iter().filter(|d| d["subject"] == "attention between hosts").collect()
}

/// Attention whose heads are not apart stays on the first host, and `explain` says why.
#[test]
fn attention_that_cannot_be_cut_is_explained() {
    let wanted = [
        ("olmoe", 2, &["it has `rms_norm`, which takes all heads together"][..]),
        ("deepseek_v3", 2, &["it has one row of keys and values for all heads"]),
        ("qwen3_next", 2, &["it is a mixer with one state for all tokens", "requested in `model.toml`"]),
        ("mixtral", 3, &["its key-value heads are fewer than hosts: 2 of 3"]),
    ];
    for (family, hosts, reasons) in wanted {
        let (folder, source) = (tempfile::tempdir().unwrap(), checkpoint(family));
        let bundle = build(&source, folder.path(), &format!("native-x{hosts}"), &cut(hosts));
        let found: Vec<(String, String)> = decisions(&bundle)
            .iter()
            .map(|d| [&d["chosen"], &d["reason"]].map(|v| v.as_str().unwrap().to_owned()).into())
            .collect();
        for reason in reasons {
            assert!(found.iter().any(|(_, why)| why.contains(reason)), "{family}: {found:?}");
        }
        assert!(
            found.iter().all(|(chosen, why)| (chosen == "heads") == why.starts_with("requested")),
            "{family}: {found:?}"
        );
        let text = String::from_utf8(ok(moec().arg("explain").arg(&bundle)).stdout).unwrap();
        assert!(text.contains("attention between hosts (hosts)"), "{family}: {text}");
        let one = format!("[placement]\nslices = {hosts}\nattention_slices = {hosts}");
        let one = build(&source, folder.path(), "native", &one);
        let ids = expected(&source).ids;
        assert!(answers(&bundle, &ids, None) == answers(&one, &ids, None), "{family}: other bits or tokens");
    }
}

/// A layer that is cut makes a round trip for attention and one for its experts.
#[test]
fn a_cut_layer_makes_two_round_trips() {
    let Some((_, launcher, options)) = LAUNCHERS.iter().find(|(need, ..)| need.met_or_skip()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&ferris(), folder.path(), "native-x2", &cut(2));
    let count = |n: &str| {
        let mut command = run(&bundle, Some((launcher, options, 2)));
        command.args(["generate", "--ids", "1,2,3", "-n", n, "--ignore-eos", "--json", "--threads", "1"]);
        json_of(&mut command)["hosts"]["round_trips"].as_u64().unwrap()
    };
    assert_eq!(count("12") - count("2"), 10 * 2 * u64::from(plan(&bundle).model.layers));
}

/// Slow memories and fast networks cut heads, slow networks do not; a key overrides both.
#[test]
fn heads_are_cut_by_cost() {
    let folder = tempfile::tempdir().unwrap();
    let fast = device(folder.path(), 0.01, (10.0, 1.0), [None; 2]);
    let slow = device(folder.path(), 0.1, (0.01, 20_000.0), [None; 2]);
    let chosen = |target: &str, more: &str| {
        let more = format!("[placement]\nhosts = \"slices\"\n{more}");
        let bundle = build(&ferris(), folder.path(), target, &more);
        let text = String::from_utf8(ok(moec().arg("inspect").arg(&bundle)).stdout).unwrap();
        let line = text.lines().find(|line| line.starts_with("cpu1 ")).unwrap_or_default().to_owned();
        let chosen = decisions(&bundle).into_iter().map(|d| d["chosen"].as_str().unwrap().to_owned());
        (chosen.collect::<BTreeSet<_>>(), line)
    };
    let one = |name: &str| BTreeSet::from([name.to_owned()]);
    let (heads, line) = chosen(&fast, "");
    assert_eq!(heads, one("heads"));
    assert!(line.contains("slices of the experts and of attention of layers 0 to 3"), "{line}");
    let (first, line) = chosen(&slow, "");
    assert_eq!(first, one("first host"));
    assert!(line.contains("slices of the experts of layers 0 to 3"), "{line}");
    assert_eq!(chosen(&fast, "attention_slices = 1").0, one("first host"));
    assert_eq!(chosen(&slow, "attention_slices = 2").0, one("heads"));
    assert_eq!(chosen(&fast, "attention = \"cpu\"").0, one("first host"));
    // Other divisions have whole attention.
    let toml = folder.path().join("model.toml");
    let text = format!(
        "[model]\nsource = \"{}\"\n[placement]\nhosts = \"stages\"\nattention_slices = 2\n",
        ferris().display()
    );
    fs::write(&toml, text).unwrap();
    let (_, error) = fails(moec().arg("build").arg(&toml).args(["--target", &fast, "--no-run"]));
    assert!(error.contains("cannot be combined with `attention_slices` under `[placement]`"), "{error}");
}
