//! Whole layers and whole experts on several hosts: the bits of one host, whatever is where.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::hosts::{LAUNCHERS, run};
use crate::support::{
    Setup, built, calibration, checkpoint, clean, distance, expected, fails, ferris, json_of, list,
    logits_file, moec, ok,
};
use moec_bundle::read::Bundle;
use moec_ir::plan::{Arg, Step};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A launcher, its options and a number of processes.
pub(crate) type Launched<'a> = Option<(&'a str, &'a [&'a str], usize)>;

/// Families of each kind of attention and router, with numbers of hosts for stages and for owners.
const FAMILIES: [(&str, usize, usize); 4] =
    [("olmoe", 2, 2), ("gpt_oss", 2, 3), ("qwen3_next", 3, 2), ("deepseek_v3", 3, 3)];

/// Writes a `model.toml` with these lines at its end, and builds it for a target.
pub(crate) fn build(source: &Path, folder: &Path, target: &str, more: &str) -> PathBuf {
    let folder = tempfile::Builder::new().tempdir_in(folder).unwrap().keep();
    let toml = Setup { format: "f32", chunk: 20, batch: &[1, 2, 4], context: 96 }.write(source, &folder);
    writeln!(fs::File::options().append(true).open(&toml).unwrap(), "{more}").unwrap();
    let bundle = folder.join("out.moec");
    built(&toml, &["--target", target], &bundle);
    bundle
}

/// The lines that divide a model between hosts in one way.
fn divided(division: &str) -> String {
    format!("[placement]\nhosts = \"{division}\"")
}

/// Logits of a prompt, to the bit, and tokens after it: of one sequence, and of the best of several.
pub(crate) fn answers(bundle: &Path, prompt: &[u32], launched: Launched<'_>) -> (Vec<u32>, [String; 2]) {
    let out = bundle.with_extension("safetensors");
    let common = ["--threads", "2", "--ids", &list(prompt)];
    ok(run(bundle, launched).arg("logits").args(common).arg("--out").arg(&out));
    let logits = logits_file(&out).1.into_iter().map(f32::to_bits).collect();
    let sampled = ["--best-of", "3", "--temperature", "0.8", "--seed", "5"];
    let tokens = [&[][..], &sampled].map(|more| {
        let out = ok(run(bundle, launched)
            .arg("generate")
            .args(common)
            .args(["-n", "24", "--quiet", "--ignore-eos"])
            .args(more));
        String::from_utf8(out.stdout).unwrap()
    });
    (logits, tokens)
}

/// Launchers that are here.
fn launchers() -> Vec<(&'static str, &'static [&'static str])> {
    LAUNCHERS
        .iter()
        .filter(|(need, ..)| need.met_or_skip())
        .map(|&(_, name, options)| (name, options))
        .collect()
}

#[test]
fn divisions_give_the_bits_of_one_host() {
    let launchers = launchers();
    for (family, stages, owners) in FAMILIES {
        let (folder, source) = (tempfile::tempdir().unwrap(), checkpoint(family));
        let golden = expected(&source);
        let alone = answers(&build(&source, folder.path(), "native", ""), &golden.ids, None);
        let logits: Vec<f32> = alone.0.iter().map(|&bits| f32::from_bits(bits)).collect();
        let worst = distance(&logits, &golden.logits);
        assert!(worst <= golden.tolerance(), "{family}: a logit is off by {worst}");
        for (division, hosts) in [("stages", stages), ("owners", owners)] {
            let target = format!("native-x{hosts}");
            let bundle = build(&source, folder.path(), &target, &divided(division));
            let same = |launched, by: &str| {
                let found = answers(&bundle, &golden.ids, launched);
                assert!(found == alone, "{family}, {division} on {hosts} hosts, {by}: other bits or tokens");
            };
            same(None, "one process");
            for &(launcher, options) in &launchers {
                same(Some((launcher, options, hosts)), launcher);
            }
        }
    }
}

/// The experts of one layer are whole on the first host, those of the others are cut: the bits of one host with such
/// slices.
#[test]
fn layers_have_slices_of_their_own() {
    let slices = "[placement]\nhosts = \"slices\"\nslices = [1, 2]";
    for family in ["olmoe", "gpt_oss"] {
        let (folder, source) = (tempfile::tempdir().unwrap(), checkpoint(family));
        let golden = expected(&source);
        let alone = build(&source, folder.path(), "native", "[placement]\nslices = [1, 2]");
        let alone = answers(&alone, &golden.ids, None);
        let bundle = build(&source, folder.path(), "native-x2", slices);
        let plan = Bundle::open(&bundle).unwrap().plan;
        let reads = |s: &Step, layer: u32| {
            let own = |i: u32| plan.segments[i as usize].name.starts_with(&format!("layers.{layer}."));
            s.args.iter().any(|arg| matches!(*arg, Arg::Segment(i) | Arg::Matrices(i) if own(i)))
        };
        let other = |layer| {
            let steps = plan.entries.iter().flat_map(|e| &e.steps).filter(|s| s.unit == 1);
            steps.filter(|s| reads(s, layer)).count()
        };
        assert!(other(0) == 0 && other(1) > 0, "{family}");
        let same = |launched, by: &str| {
            assert!(answers(&bundle, &golden.ids, launched) == alone, "{family}, {by}: other bits or tokens");
        };
        same(None, "one process");
        for (launcher, options) in launchers() {
            same(Some((launcher, options, 2)), launcher);
        }
    }
}

/// Hosts compute their slices at the same time: what is sent waits for no experts here, and experts here wait for
/// nothing of the other host.
#[test]
fn slices_are_computed_at_the_same_time() {
    for family in ["olmoe", "deepseek_v3"] {
        let folder = tempfile::tempdir().unwrap();
        let bundle = build(&checkpoint(family), folder.path(), "native-x2", &divided("slices"));
        let plan = Bundle::open(&bundle).unwrap().plan;
        let mut beside = 0;
        for entry in &plan.entries {
            let steps = &entry.steps;
            let computes = |s: &Step| s.unit == 0 && s.args.iter().any(|arg| matches!(arg, Arg::Matrices(_)));
            let comes_back = |s: &Step| match s.args.last() {
                Some(&Arg::Buffer(b, _)) => s.unit == 1 && entry.buffers[b as usize].memory == 0,
                _ => false,
            };
            let mut begin = 0;
            for at in (0..steps.len()).filter(|&at| comes_back(&steps[at])) {
                let waits = |s: &Step| s.unit == 0 && s.deps.contains(&u32::try_from(at).unwrap());
                let sum = (at..steps.len()).find(|&later| waits(&steps[later])).unwrap();
                assert!(!steps[begin..at].iter().any(computes), "{family}: step {at} is sent late");
                for step in steps[at..sum].iter().filter(|s| computes(s)) {
                    let other = |&dep: &u32| dep as usize >= begin && steps[dep as usize].unit == 1;
                    assert!(!step.deps.iter().any(other), "{family}: experts before step {sum} wait");
                    beside += 1;
                }
                begin = sum;
            }
        }
        assert!(beside > 0, "{family}: nothing is computed meanwhile");
    }
}

/// The shared expert of a layer is computed after the rows and the table of the layer have gone to the other host, and
/// before the first host waits for its sum.
#[test]
fn shared_experts_are_computed_meanwhile() {
    for family in ["deepseek_v3", "qwen2_moe", "glm4_moe"] {
        let folder = tempfile::tempdir().unwrap();
        let bundle = build(&checkpoint(family), folder.path(), "native-x2", &divided("slices"));
        let plan = Bundle::open(&bundle).unwrap().plan;
        let mut layers = 0;
        for entry in &plan.entries {
            let steps = &entry.steps;
            let reads = |at: &usize, unit: u32, begin: &str| {
                let named = |arg: &Arg| match *arg {
                    Arg::Segment(i) | Arg::Matrices(i) => plan.segments[i as usize].name.starts_with(begin),
                    _ => false,
                };
                steps[*at].unit == unit && steps[*at].args.iter().any(named)
            };
            for layer in 0..plan.model.layers {
                let shared = format!("layers.{layer}.shared.");
                let shared: Vec<usize> = (0..steps.len()).filter(|at| reads(at, 0, &shared)).collect();
                let (Some(&first), Some(&last)) = (shared.first(), shared.last()) else { continue };
                let experts = format!("layers.{layer}.");
                // The other host's first step on its experts: what it reads was sent before.
                let begins = (0..steps.len()).find(|at| reads(at, 1, &experts)).unwrap();
                let comes_back = |s: &Step| match s.args.last() {
                    Some(&Arg::Buffer(b, _)) => s.unit == 1 && entry.buffers[b as usize].memory == 0,
                    _ => false,
                };
                let begin = steps[..begins].iter().rposition(comes_back).map_or(0, |last| last + 1);
                let waits = |at: &usize| {
                    let other = |&dep: &u32| dep as usize >= begin && steps[dep as usize].unit == 1;
                    steps[*at].unit == 0 && steps[*at].deps.iter().any(other)
                };
                let sum = (begins..steps.len()).find(waits).unwrap();
                assert!(begins < first, "{family} {} {layer}: the message waits", entry.kind);
                assert!(last < sum, "{family} {} {layer}: it is computed after the wait", entry.kind);
                layers += 1;
            }
        }
        assert!(layers > 0, "{family} has no shared expert");
    }
}

/// Tokens that are decoded again: hosts take and restore snapshots of their recurrent states.
#[test]
fn hosts_keep_snapshots_of_their_states() {
    let (folder, source) = (tempfile::tempdir().unwrap(), checkpoint("qwen3_next"));
    let little = "[decode]\nbig_little = true\ngamma = 0.5";
    let ids = expected(&source).ids;
    let tokens = |bundle: &Path, launched| {
        let mut command = run(bundle, launched);
        command.args([
            "generate",
            "--ids",
            &list(&ids),
            "-n",
            "32",
            "--quiet",
            "--ignore-eos",
            "--threads",
            "1",
        ]);
        String::from_utf8(ok(&mut command).stdout).unwrap()
    };
    let alone = tokens(&build(&source, folder.path(), "native", little), None);
    let several = build(&source, folder.path(), "native-x2", &format!("{little}\n{}", divided("stages")));
    assert_eq!(tokens(&several, None), alone);
    for (launcher, options) in launchers() {
        assert_eq!(tokens(&several, Some((launcher, options, 2))), alone, "{launcher}");
    }
}

/// A token makes one round trip to each host of a later stage; with owners, at most one to each other host and
/// layer.
#[test]
fn stages_send_one_message_and_owners_one_for_each_layer() {
    let Some((launcher, options)) = launchers().into_iter().next() else { return };
    let (folder, source) = (tempfile::tempdir().unwrap(), ferris());
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(source.join("config.json")).unwrap()).unwrap();
    let layers = config["num_hidden_layers"].as_u64().unwrap();
    for (division, trips) in [("stages", 1), ("owners", layers)] {
        let bundle = build(&source, folder.path(), "native-x2", &divided(division));
        let count = |n: &str| {
            let mut command = run(&bundle, Some((launcher, options, 2)));
            command.args(["generate", "--ids", "1,2,3", "-n", n, "--ignore-eos", "--json", "--threads", "1"]);
            json_of(&mut command)["hosts"]["round_trips"].as_u64().unwrap()
        };
        let found = count("12") - count("2");
        // A host that has none of the chosen experts is not waited for.
        let least = if division == "stages" { 10 * trips } else { 5 * trips };
        assert!((least..=10 * trips).contains(&found), "{division}: {found} round trips");
    }
}

/// Each host reads its own file alone.
#[test]
fn hosts_need_no_weights_of_others() {
    let Some((launcher, options)) = launchers().into_iter().next() else { return };
    let (folder, source) = (tempfile::tempdir().unwrap(), checkpoint("gpt_oss"));
    let generate = ["generate", "--ids", "1,2,3,4", "-n", "8", "--quiet"];
    for division in ["stages", "owners"] {
        let whole = build(&source, folder.path(), "native-x2", &divided(division));
        let part = |name: &str, others: &[&str]| {
            let part = whole.with_file_name(name);
            ok(clean(Command::new("cp")).arg("-r").arg(&whole).arg(&part));
            for file in others {
                fs::remove_file(part.join("weights").join(file)).unwrap();
            }
            part
        };
        let (first, second) = (part("first", &["ram1.bin"]), part("second", &["dense.bin", "experts.bin"]));
        let want = ok(run(&whole, None).args(generate)).stdout;
        let mut command = run(&first, Some((launcher, options, 1)));
        command.args(generate).args([":", "-n", "1"]).arg(moec().get_program());
        assert_eq!(ok(command.arg("run").arg(&second).args(generate)).stdout, want, "{division}");
        // What the hosts store together is what one stores, and each has about half.
        let bytes = |file: &str| fs::metadata(whole.join("weights").join(file)).unwrap().len();
        let (others, own) = (bytes("ram1.bin"), bytes("experts.bin"));
        assert!(
            others > own / 2 && (division == "stages" || others < own * 3 / 2),
            "{division}: {others}, {own}"
        );
    }
}

/// Experts of several hosts are rounded as those of one, by what a calibration has recorded of each.
#[test]
fn experts_of_hosts_are_rounded_as_on_one() {
    let folder = tempfile::tempdir().unwrap();
    let logits = |target: &str, more: &str| {
        let toml = folder.path().join(format!("{target}.toml"));
        let text = format!(
            "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 96\nprefill_chunk = 20\n[weights]\nexperts = \"q4\"\n\
             [calibrate]\ntext = [\"{}\"]\ntokens = 4096\n{more}\n",
            ferris().display(),
            calibration()
        );
        fs::write(&toml, text).unwrap();
        let bundle = folder.path().join(format!("{target}.moec"));
        built(&toml, &["--target", target], &bundle);
        let out = bundle.with_extension("safetensors");
        ok(run(&bundle, None).args(["logits", "--ids", "1,2,3,4,5,6,7,8", "--out"]).arg(&out));
        logits_file(&out).1.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert!(logits("native", "") == logits("native-x3", &divided("owners")), "other codes");
}

/// With `alone` the first host has everything.
#[test]
fn one_of_several_hosts_can_have_everything() {
    let (folder, source) = (tempfile::tempdir().unwrap(), checkpoint("olmoe"));
    let ids = expected(&source).ids;
    let one = build(&source, folder.path(), "native", "");
    let bundle = build(&source, folder.path(), "native-x2", &divided("alone"));
    assert!(!bundle.join("weights/ram1.bin").exists());
    assert_eq!(answers(&bundle, &ids, None), answers(&one, &ids, None));
}

#[test]
fn divisions_that_are_impossible_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |family: &str, target: &str, more: &str| {
        let toml = folder.path().join("model.toml");
        fs::write(&toml, format!("[model]\nsource = \"{}\"\n{more}", checkpoint(family).display())).unwrap();
        fails(moec().arg("build").arg(&toml).args(["--target", target, "--no-run"])).1
    };
    let few = refused("olmoe", "native-x3", &divided("stages"));
    assert!(few.contains("2 layers cannot be divided into stages for 3 hosts"), "{few}");
    let few = refused("olmoe", "native-x9", &divided("owners"));
    assert!(few.contains("has 8 experts, which are too few for 9 hosts"), "{few}");
    for (division, more, named) in [
        ("stages", "slices = 2", "`slices` under `[placement]`"),
        ("owners", "attention = \"cpu1\"", "`attention` under `[placement]`"),
    ] {
        let error = refused("olmoe", "native-x2", &format!("{}\n{more}\n", divided(division)));
        let said =
            format!("`hosts` under `[placement]` is `{division}`, which cannot be combined with {named}");
        assert!(error.contains(&said), "{error}");
    }
}

/// `explain` and `inspect` say which host has which layers and experts, and `verify` executes all of them.
#[test]
fn reports_say_what_each_host_has() {
    let (folder, source) = (tempfile::tempdir().unwrap(), checkpoint("olmoe"));
    for (division, own, says) in [
        (
            "slices",
            "slices of the experts of layers 0 to 1",
            &["layer 1: 8 experts, a slice of each on cpu, cpu1"][..],
        ),
        (
            "stages",
            "of states: layers 1 to 1",
            &["layer 0 on `cpu`, layer 1 on `cpu1`", "layer 1: 8 experts", "cpu1     0,1,2,3,4,5,6,7"],
        ),
        (
            "owners",
            "experts of layers 0 to 1",
            &["0 to 3 on `cpu`, 4 to 7 on `cpu1`", "cpu      0,1,2,3", "cpu1     4,5,6,7"],
        ),
    ] {
        let bundle = build(&source, folder.path(), "native-x2", &divided(division));
        let text = String::from_utf8(ok(moec().arg("explain").arg(&bundle)).stdout).unwrap();
        for said in says {
            assert!(text.contains(said), "{division}: no `{said}` in {text}");
        }
        let parts = String::from_utf8(ok(moec().arg("inspect").arg(&bundle)).stdout).unwrap();
        let line = parts.lines().find(|line| line.starts_with("cpu1 ")).unwrap_or_default();
        assert!(line.contains(own), "{division}: {parts}");
        let verified = String::from_utf8(ok(moec().arg("verify").arg(&bundle)).stdout).unwrap();
        assert!(verified.contains("all within tolerance"), "{division}: {verified}");
        ok(moec().arg("verify").arg(&bundle).arg("--source").arg(&source));
    }
}
