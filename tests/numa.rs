//! Slices over NUMA nodes of one machine: the bits of slices on one node, threads and memory bound to their nodes. A
//! machine with one node is divided: simulated nodes.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::hosts::{answers, build, run};
use crate::support::{built, checkpoint, clean, expected, fails, ferris, json_of, moec, ok};
use moec_device::Device;
use moec_ir::CpuList;
use moec_ir::plan::Plan;
use moec_runtime::platform::cpu::CoreSet;
use moec_runtime::platform::memory::Region;
use moec_runtime::platform::numa::Node;
use moec_testing::{MEMORY_POLICY, PREBUILT, TWO_CPUS};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Target of two nodes of this machine.
const TWO: &str = "native-numa2";

/// CPUs of the two nodes.
fn nodes() -> Option<[CpuList; 2]> {
    if !TWO_CPUS.met_or_skip() {
        return None;
    }
    let device = Device::find(TWO).unwrap();
    let cpus: Vec<CpuList> = device.units.iter().map(|u| u.cpus.clone().unwrap()).collect();
    Some(cpus.try_into().unwrap())
}

fn plan(bundle: &Path) -> Plan {
    Plan::decode(&fs::read(bundle.join("plan.bin")).unwrap()).unwrap()
}

/// Tokens after a prompt.
fn tokens(command: &mut Command) -> String {
    let args = ["generate", "--ids", "1,2,3,4", "-n", "8", "--quiet", "--threads", "1"];
    String::from_utf8(ok(command.args(args)).stdout).unwrap()
}

#[test]
fn nodes_give_the_bits_of_slices_on_one() {
    let Some(cpus) = nodes() else { return };
    for family in ["olmoe", "minimax_m2"] {
        let folder = tempfile::tempdir().unwrap();
        let prompt = &expected(&checkpoint(family)).ids;
        let one = build(family, folder.path(), "native", "slices = 2");
        let two = build(family, folder.path(), TWO, "");
        let plan = plan(&two);
        let units: Vec<_> = plan.units.iter().map(|u| (u.backend.as_str(), u.memory, &u.cpus)).collect();
        assert_eq!(units, [("cpu", 0, &cpus[0]), ("node", 1, &cpus[1])]);
        let slices: Vec<_> =
            plan.placement.ops.iter().filter_map(|op| Some((op.scope.part.slice()?, op.unit))).collect();
        assert!(slices.contains(&(0, 0)) && slices.contains(&(1, 1)) && slices.iter().all(|s| s.0 == s.1));
        assert!(!plan.memories[1].residents.is_empty() && two.join("weights/ram1.bin").is_file());
        // Plans have a text, which is read back.
        assert!(moec_ir::text::parse_plan(&plan.to_string()).unwrap() == plan, "{family}");
        assert_eq!(answers(&two, prompt, None), answers(&one, prompt, None), "{family}");
        let text = String::from_utf8(ok(moec().arg("explain").arg(&two)).stdout).unwrap();
        assert!(
            text.contains(&format!("CPUs {}; ", cpus[1])) && text.contains("slices of the experts"),
            "{text}"
        );
        let info = json_of(run(&two, None).args(["info", "--json"]));
        assert_eq!(info["target"]["runs_here"], true, "{info}");
    }
}

/// Stages have states on the second node, and owners whole experts: both are of the same units.
#[test]
fn other_divisions_work_over_nodes() {
    let Some(_) = nodes() else { return };
    let folder = tempfile::tempdir().unwrap();
    let prompt = &expected(&checkpoint("olmoe")).ids;
    let want = answers(&build("olmoe", folder.path(), "native", ""), prompt, None);
    for division in ["stages", "owners"] {
        let folder = tempfile::tempdir().unwrap();
        let two = build("olmoe", folder.path(), TWO, &format!("hosts = \"{division}\""));
        assert_eq!(answers(&two, prompt, None), want, "{division}");
    }
}

/// CPUs that each thread of a process may use, with the number of threads.
fn threads(process: u32) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    for task in fs::read_dir(format!("/proc/{process}/task")).unwrap().flatten() {
        // Threads that read weights end.
        let Ok(status) = fs::read_to_string(task.path().join("status")) else { continue };
        let cpus = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
        *found.entry(cpus.to_owned()).or_default() += 1;
    }
    found
}

/// Pages of a process whose memory is bound, by the kernel's nodes as proc(5) has them (`bind:0`); `None`: it does not
/// report them.
fn bound_pages(process: u32) -> Option<BTreeMap<String, u64>> {
    let mut found = BTreeMap::new();
    for line in fs::read_to_string(format!("/proc/{process}/numa_maps")).ok()?.lines() {
        let mut words = line.split_whitespace().skip(1);
        let policy = words.next().unwrap().to_owned();
        let pages = words.filter_map(|word| word.strip_prefix("anon=")?.parse::<u64>().ok()).sum::<u64>();
        *found.entry(policy).or_default() += pages;
    }
    Some(found)
}

#[test]
fn threads_and_memory_are_bound_to_their_nodes() {
    let Some(cpus) = nodes() else { return };
    let folder = tempfile::tempdir().unwrap();
    let bundle = build("olmoe", folder.path(), TWO, "");
    let mut command = run(&bundle, None);
    command.args(["bench", "--stdin", "--threads", "2"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    let mut line = String::new();
    writeln!(input, "8 4 1").unwrap();
    output.read_line(&mut line).unwrap();
    assert!(line.contains("decode_tokens_per_s"), "{line}");
    let (threads, pages) = (threads(child.id()), bound_pages(child.id()));
    drop(input);
    assert!(child.wait().unwrap().success());
    // On the first node one thread besides the main one, which is bound while it computes, and those that still read
    // weights; two on the second.
    let on = |node: usize| threads.get(&cpus[node].to_string()).copied().unwrap_or(0);
    assert!(on(0) >= 1 && on(1) == 2, "{threads:?}");
    let node = Node::new("second", &cpus[1]).unwrap();
    if !MEMORY_POLICY.holds_or_skip(node.hold(&Region::new("test", 1 << 12).unwrap())) {
        return;
    }
    let bound = pages.unwrap().into_iter().filter(|(policy, _)| policy.starts_with("bind:"));
    let bound: BTreeMap<String, u64> = bound.collect();
    let weights = fs::metadata(bundle.join("weights/ram1.bin")).unwrap().len();
    assert!(bound.values().sum::<u64>() * 4096 >= weights, "{bound:?} for {weights} bytes");
    let kernels = fs::read_dir("/sys/devices/system/node").unwrap().flatten();
    let kernels = kernels.filter(|e| e.path().join("cpulist").is_file()).count();
    assert!(bound.len() == kernels.min(2), "{bound:?} on {kernels} nodes");
}

/// Steps of the second node run while the first one's do.
#[test]
fn nodes_compute_at_the_same_time() {
    let Some(_) = nodes() else { return };
    let folder = tempfile::tempdir().unwrap();
    let toml = folder.path().join("model.toml");
    let text = format!("[model]\nsource = \"{}\"\n[placement]\nhosts = \"slices\"\n", ferris().display());
    fs::write(&toml, text).unwrap();
    let bundle = folder.path().join("out.moec");
    built(&toml, &["--target", TWO], &bundle);
    let timeline = folder.path().join("timeline.json");
    let mut command = run(&bundle, None);
    let args = ["generate", "--ids", "1,2,3", "-n", "32", "--ignore-eos", "--threads", "1", "--timeline"];
    ok(command.args(args).arg(&timeline));
    let events: Value = serde_json::from_slice(&fs::read(&timeline).unwrap()).unwrap();
    let events = events.as_array().or(events["traceEvents"].as_array()).unwrap();
    // Thread 0 is the first node's, thread 1 the second's.
    let of = |thread: u64| -> Vec<(f64, f64)> {
        let own = events.iter().filter(|e| e["ph"] == "X" && e["tid"] == thread);
        own.map(|e| (e["ts"].as_f64().unwrap(), e["ts"].as_f64().unwrap() + e["dur"].as_f64().unwrap()))
            .collect()
    };
    let (first, second) = (of(0), of(1));
    assert!(!first.is_empty() && !second.is_empty());
    let together = second.iter().filter(|b| first.iter().any(|a| a.0 < b.1 && b.0 < a.1)).count();
    assert!(together * 10 > second.len(), "{together} of {} steps", second.len());
}

#[test]
fn machines_without_the_cpus_are_refused_by_name() {
    let Some(cpus) = nodes() else { return };
    let folder = tempfile::tempdir().unwrap();
    let bundle = build("olmoe", folder.path(), TWO, "");
    let want = tokens(&mut run(&bundle, None));
    // On the CPUs of the first node.
    let first = || {
        let mut command = run(&bundle, None);
        let only: Vec<usize> = cpus[0].iter().map(|cpu| cpu as usize).collect();
        let only = CoreSet::of(&only);
        // SAFETY: a system call on the set, between fork and exec.
        unsafe {
            command.pre_exec(move || only.bind().then_some(()).ok_or_else(std::io::Error::last_os_error))
        };
        command
    };
    let (_, error) = fails(first().args(["generate", "--ids", "1", "-n", "1"]));
    let missing =
        format!("CPU {} of node `cpu1` is none that this process may use", cpus[1].iter().next().unwrap());
    assert!(error.contains(&missing) && error.contains("hint: ") && error.contains(TWO), "{error}");
    let info = json_of(first().args(["info", "--json"]));
    assert_eq!(info["target"]["missing_units"][0], "cpu1", "{info}");
    // An emulated node is in the memory of the first.
    let mut emulated = moec();
    emulated.args(["run", "--emulate"]).arg(&bundle);
    assert_eq!(tokens(&mut emulated), want);
    let (_, error) = fails(run(&bundle, None).args(["generate", "--ids", "1", "-n", "1", "--pin"]));
    assert!(
        error.contains("`--pin` binds threads to cores, and the bundle binds them to NUMA nodes"),
        "{error}"
    );
}

/// Prints this machine's nodes as a device file, with other CPUs.
fn device(folder: &Path, name: &str, change: &dyn Fn(&str) -> String) -> PathBuf {
    let text = String::from_utf8(ok(moec().args(["targets", TWO])).stdout).unwrap();
    let path = folder.join(name);
    fs::write(&path, change(&text)).unwrap();
    path
}

#[test]
fn wrong_nodes_of_a_device_file_are_refused_by_name() {
    let Some(cpus) = nodes() else { return };
    let folder = tempfile::tempdir().unwrap();
    let key = |cpus: &CpuList| format!("cpus = \"{cpus}\"");
    let second = |with: &str| {
        let (from, with) = (key(&cpus[1]), with.to_owned());
        move |text: &str| {
            assert!(text.contains(&from), "{text}");
            text.replace(&from, &with)
        }
    };
    let same = device(folder.path(), "same.toml", &|text| text.to_owned());
    ok(moec().arg("targets").arg(&same));
    for (with, why) in [
        ("cpus = \"1023\"", "`unit.cpus`: CPU 1023 of node `cpu1` is none that this process may use"),
        (&*key(&cpus[0]), "is of `cpu` and of `cpu1`: each is of one node"),
        ("cpus = \"\"", "`unit.cpus`: `cpu1` is a node without CPUs"),
        ("cpus = \"9-3\"", "expected CPUs such as `0-15,32`"),
        ("", "`cpu1` has none, and `cpu` has: every node names its CPUs"),
    ] {
        let wrong = device(folder.path(), "wrong.toml", &second(with));
        let (_, error) = fails(moec().arg("targets").arg(&wrong));
        assert!(error.contains(why) && error.contains("hint: "), "{error}");
    }
    let (_, error) = fails(moec().args(["targets", "native-numa64"]));
    let few = moec_runtime::platform::cpu::cores() < 64;
    assert!(!few || error.contains("fewer than 64 nodes") && error.contains("hint: "), "{error}");
}

/// A node's experts are in its memory: it reads no disk of its own.
#[test]
fn budgets_of_nodes_are_refused_by_name() {
    if nodes().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let toml = folder.path().join("model.toml");
    for division in ["slices", "owners", "stages"] {
        let text = format!(
            "[model]\nsource = \"{}\"\n[memory]\nbudget = \"1 GiB\"\n[placement]\nhosts = \"{division}\"\n",
            checkpoint("olmoe").display()
        );
        fs::write(&toml, text).unwrap();
        let (_, error) = fails(moec().arg("build").arg(&toml).args(["--target", TWO, "--no-run"]));
        assert!(error.contains("cannot be combined with `budget` under `[memory]` on NUMA nodes"), "{error}");
    }
}

/// The program of a bundle needs nothing else.
#[test]
fn linked_programs_run_on_nodes() {
    if nodes().is_none() || !PREBUILT.holds_or_skip(moec_bundle::link::is_prebuilt()) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let bundle = build("olmoe", folder.path(), TWO, "");
    let want = tokens(&mut run(&bundle, None));
    let linked = folder.path().join("linked.moec");
    ok(moec()
        .arg("build")
        .arg(folder.path().join(format!("{TWO}.toml")))
        .args(["--target", TWO, "-o"])
        .arg(&linked));
    assert_eq!(tokens(&mut clean(Command::new(linked.join("run")))), want);
}
