//! Costs of several hosts: predictions by shapes, the choice of a build by them, and the measurement of a network.
#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

use crate::hosts::{LAUNCHERS, run};
use crate::support::{Setup, built, clean, fails, ferris, json_of, moec, ok};
use moec_base::progress::Progress;
use moec_bundle::read::Bundle;
use moec_config::HostPlacement;
use moec_costs::hosts::shape::Experts;
use moec_costs::hosts::{Routing, Shape};
use moec_device::Device;
use moec_import::Config;
use moec_ir::Format;
use moec_pipeline::{Compilation, Inputs, Stops};
use moec_synth::Like;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Sizes of a published model by its `config.json`, changed, with experts of a format.
fn shape(like: Like, change: &dyn Fn(&mut Map<String, Value>), experts: &str) -> Shape {
    let mut config = like.config().unwrap().as_object().cloned().unwrap();
    change(&mut config);
    let source = Path::new("model");
    let (checkpoint, spec) = moec_import::shapes(source, Config::of("config.json", config)).unwrap();
    let text = format!("[model]\nsource = \"model\"\n[weights]\nexperts = \"{experts}\"\n");
    let config = moec_config::Config::parse(&text, Path::new("model.toml")).unwrap();
    let target = moec_targets::target("sapphire-rapids").unwrap();
    let mut compilation = Compilation::new(Inputs::new(&config, &checkpoint, &spec, &target));
    let stops = Stops { stop_after: Some("format"), ..Stops::default() };
    compilation.run(stops, &Progress::silent(), &mut |_| {}).unwrap();
    Shape::of(&compilation.module, Format::Bf16)
}

/// Figures that a survey of engines has computed by hand: megabytes of a layer's chosen experts, microseconds that two equal
/// slices save at 25, 80 and 200 GB/s, and the imbalance of whole experts on two, four and eight hosts.
#[test]
fn arithmetic_of_a_survey_follows_from_shapes() {
    type Row<'a> = (Like, &'a str, f64, f64, [f64; 3], [f64; 3]);
    let rows: [Row<'_>; 4] = [
        (Like::Olmoe, "q4", 4.5, 28.3, [566.0, 177.0, 71.0], [1.25, 1.71, 2.46]),
        (Like::Olmoe, "q8", 8.5, 53.5, [1070.0, 334.0, 134.0], [1.25, 1.71, 2.46]),
        (Like::Qwen3_6_35bA3b, "q4", 4.5, 14.2, [283.0, 88.0, 35.0], [1.27, 1.76, 2.57]),
        // Its scales have a byte for 32 numbers; stored here they have two.
        (Like::GptOss20b, "mxfp4", 4.25, 52.9, [1058.0, 330.0, 132.0], [1.37, 2.11, 3.23]),
    ];
    for (like, format, bits, megabytes, saved, imbalance) in rows {
        // gpt-oss-120b is gpt-oss-20b with more layers and experts.
        let large = |config: &mut Map<String, Value>| {
            config.insert("num_local_experts".to_owned(), json!(128));
            config.insert("num_hidden_layers".to_owned(), json!(36));
        };
        let same = |_: &mut Map<String, Value>| {};
        let shape = shape(like, if like == Like::GptOss20b { &large } else { &same }, format);
        let experts = shape.layers.iter().find_map(|l| l.experts.clone()).unwrap();
        let near = |found: f64, want: f64, part: f64| {
            assert!((found / want - 1.0).abs() < part, "{like:?} {format}: {found}, and {want} by hand");
        };
        let chosen = |e: &Experts| f64::from(e.k) * e.bytes as f64 / 1e6;
        let by_bits =
            Experts { bytes: (experts.numbers as f64 * bits / 8.0).round() as u64, ..experts.clone() };
        near(chosen(&by_bits), megabytes, 0.005);
        if format != "mxfp4" {
            // Biases, which stay f32, come in addition.
            near(chosen(&experts), megabytes, 0.01);
        }
        for (gb_per_s, want) in [25.0, 80.0, 200.0].into_iter().zip(saved) {
            near(by_bits.saved_us(2, gb_per_s), want, 0.015);
        }
        let routing = Routing::even(&shape);
        for (hosts, want) in [2_usize, 4, 8].into_iter().zip(imbalance) {
            let share = 1.0 / hosts as f64;
            let routed = routing.routed(0, 1, &vec![share; hosts]);
            // Both are means of drawn calls.
            near(routed.busiest.experts / routed.all.experts * hosts as f64, want, 0.03);
        }
    }
}

/// ferris with these lines at the end of its `model.toml`, for a target.
fn bundle(folder: &Path, target: &str, more: &str) -> PathBuf {
    let folder = tempfile::Builder::new().tempdir_in(folder).unwrap().keep();
    let toml = Setup { format: "f32", chunk: 20, batch: &[1, 4], context: 96 }.write(&ferris(), &folder);
    writeln!(fs::File::options().append(true).open(&toml).unwrap(), "{more}").unwrap();
    let bundle = folder.join("out.moec");
    built(&toml, &["--target", target], &bundle);
    bundle
}

/// A device file of two hosts like this machine, with this bandwidth of memory and this network. Capacities of their
/// memories are in bytes.
pub fn device(folder: &Path, gb_per_s: f64, network: (f64, f64), capacities: [Option<f64>; 2]) -> String {
    let mut text =
        "name = \"two\"\ndescription = \"two\"\nbackend = \"cpu\"\ntriple = \"native\"\ncpu = \"native\"\n\
         [[host]]\nname = \"other\"\n"
            .to_owned();
    for ((n, host), capacity) in [("", ""), ("1", "host = \"other\"\n")].into_iter().zip(capacities) {
        let capacity = capacity
            .map_or_else(String::new, |c| format!("capacity = {{ value = {c:?}, source = \"t\" }}\n"));
        write!(
            text,
            "[[unit]]\nname = \"cpu{n}\"\nkind = \"cpu\"\nmemory = \"ram{n}\"\n{host}\
             [[memory]]\nname = \"ram{n}\"\n{host}{capacity}\
             bandwidth = [{{ block_bytes = 64, gb_per_s = {gb_per_s:?}, source = \"t\" }}]\n"
        )
        .unwrap();
    }
    for (from, to) in [("ram", "ram1"), ("ram1", "ram")] {
        write!(
            text,
            "[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\ngb_per_s = {:?}\nlatency_us = {:?}\nsource = \"t\"\n",
            network.0, network.1
        )
        .unwrap();
    }
    let file = tempfile::Builder::new().suffix(".toml").tempfile_in(folder).unwrap();
    fs::write(&file, text).unwrap();
    file.keep().unwrap().1.to_str().unwrap().to_owned()
}

/// The decision of a build, of the whole bundle's.
fn decision(bundle: &Path) -> Value {
    let all = json_of(moec().arg("explain").arg(bundle).arg("--json"));
    let all = all["decisions"].as_array().unwrap().clone();
    all.into_iter().find(|d| d["pass"] == "hosts").unwrap()
}

/// Slow memories and fast networks are for slices, fast memories and slow networks for one host, small memories for
/// stages.
#[test]
fn hosts_are_chosen_by_cost() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let fast = device(folder, 0.01, (10.0, 1.0), [None; 2]);
    let slow = device(folder, 100.0, (0.01, 5000.0), [None; 2]);
    let chosen = |device: &str, more: &str| {
        let bundle = bundle(folder, device, more);
        let decision = decision(&bundle);
        (bundle, decision["chosen"].as_str().unwrap().to_owned(), decision)
    };
    let (sliced, name, decision) = chosen(&fast, "");
    assert_eq!(name, "slices");
    assert!(sliced.join("weights/ram1.bin").exists());
    let alternatives = decision["alternatives"].as_array().unwrap();
    let names: Vec<&str> = alternatives.iter().map(|a| a["what"].as_str().unwrap()).collect();
    assert_eq!(names, HostPlacement::ALL.map(HostPlacement::name));
    let rate = |i: usize| alternatives[i]["figures"]["decode_tokens_per_s"].as_f64().unwrap();
    assert!(rate(1) > rate(0) && rate(1) > rate(3) && rate(0) >= rate(2), "{decision}");
    let text = String::from_utf8(ok(moec().arg("explain").arg(&sliced)).stdout).unwrap();
    assert!(text.contains("division between hosts (hosts)") && text.contains("tokens/s"), "{text}");
    let (alone, name, decision) = chosen(&slow, "");
    assert_eq!(name, "alone", "{decision}");
    assert!(!alone.join("weights/ram1.bin").exists());
    let bytes = |i: usize| decision["alternatives"][i]["figures"]["fullest_host_bytes"].as_f64().unwrap();
    let (slices, stages) = (bytes(1), bytes(2));
    let small = device(folder, 100.0, (0.01, 5000.0), [Some(slices.min(stages)); 2]);
    let (_, name, decision) = chosen(&small, "");
    assert_eq!(name, if stages <= slices { "stages" } else { "slices" }, "{decision}");
    // What is requested stays, and what cannot be combined with others is not chosen.
    let (_, name, decision) = chosen(&fast, "[placement]\nhosts = \"owners\"");
    assert_eq!(
        (name.as_str(), decision["reason"].as_str().unwrap().starts_with("requested")),
        ("owners", true)
    );
    // With a budget, experts that have no room are read from disk.
    let (_, name, _) = chosen(&fast, "[memory]\nbudget = \"1 GiB\"");
    assert_eq!(name, "slices");
    // A device without a link is refused by name.
    let text = fs::read_to_string(&fast).unwrap();
    fs::write(&fast, text.split("[[link]]").next().unwrap()).unwrap();
    let (_, error) = fails(moec().args(["targets", &fast]));
    assert!(error.contains("`link`: there is none from `ram` to `ram1`, where `cpu1` works"), "{error}");
}

/// Predictions of messages are what runs count.
#[test]
fn predicted_messages_are_those_of_runs() {
    let Some((_, launcher, options)) = LAUNCHERS.iter().find(|(need, ..)| need.met_or_skip()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let heads = "attention_slices = 2";
    for (division, more) in [("slices", ""), ("slices", heads), ("stages", ""), ("owners", "")] {
        let lines = format!("[placement]\nhosts = \"{division}\"\n{more}");
        let bundle = bundle(folder.path(), "native-x2", &lines);
        let count = |n: &str| {
            let mut command = run(&bundle, Some((launcher, options, 2)));
            command.args(["generate", "--ids", "1,2,3", "-n", n, "--ignore-eos", "--json", "--threads", "1"]);
            let hosts = &json_of(&mut command)["hosts"];
            hosts["sent_bytes"].as_f64().unwrap() + hosts["received_bytes"].as_f64().unwrap()
        };
        let counted = (count("12") - count("2")) / 10.0;
        let decision = decision(&bundle);
        let all = decision["alternatives"].as_array().unwrap();
        let own = all.iter().find(|a| a["what"] == division).unwrap();
        let predicted = own["figures"]["link_per_token_bytes"].as_f64().unwrap();
        // Commands are not in the model, nor what all layers of a stage read: in so small a model, half of the bytes.
        let least = if division == "stages" { 0.4 } else { 0.8 };
        let ratio = predicted / counted;
        assert!((least..=1.05).contains(&ratio), "{division} {more}: {predicted} of {counted}");
    }
}

#[test]
fn clusters_are_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path(), "native", "");
    let simulate = |more: &[&str]| {
        let mut command = moec();
        command.arg("simulate").arg(&bundle).args(more);
        command
    };
    let (_, error) = fails(&mut simulate(&["--hosts", "8"]));
    assert!(
        error.contains("`native` has one host, and no network") && error.contains("--network"),
        "{error}"
    );
    let (code, error) = fails(&mut simulate(&["--hosts", "8", "--network", "fast"]));
    assert!(code == 2 && error.contains("10 Gb/s, 100 us"), "{error}");
    let rows = |network: &str| {
        let network = ["--hosts", "2,8,64", "--network", network, "--json"];
        json_of(&mut simulate(&network))
    };
    let (slow, fast) = (rows("1 Gb/s, 1 ms"), rows("10000 Gb/s, 0.001 us"));
    let wins =
        |of: &Value| of["rows"].as_array().unwrap().iter().map(|r| r["wins"].clone()).collect::<Vec<_>>();
    assert_eq!(wins(&slow), ["alone"; 3]);
    assert_eq!(wins(&fast), ["slices"; 3]);
    assert_eq!(slow["best"]["hosts"], 1);
    // Hosts that do not pay are replicas.
    assert_eq!(slow["rows"][1]["replicas"], 8);
    assert!(fast["best"]["hosts"].as_u64().unwrap() > 8, "{fast}");
    for row in slow["rows"].as_array().unwrap() {
        let (saved, cost) =
            (row["slices_save_us"].as_f64().unwrap(), row["slices_cost_us"].as_f64().unwrap());
        assert!(saved < cost, "{row}");
    }
    let text = String::from_utf8(ok(&mut simulate(&["--hosts", "8", "--network", "10 Gb/s, 100 us"])).stdout);
    let text = text.unwrap();
    for words in ["alone", "slices", "stages", "owners", "← wins", "replicas", "assumed: 20 GB/s for a core"]
    {
        assert!(text.contains(words), "{text}");
    }
}

/// Each host has the budget of the bundle: what one has no room for it reads from disk, and two hold all of it.
#[test]
fn clusters_with_experts_on_disk_are_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let budgeted =
        |bytes: u64| bundle(folder.path(), "native", &format!("[memory]\nbudget = \"{bytes}\"\nthreads = 1"));
    let roomy = budgeted(1 << 30);
    let paging = Bundle::open(&roomy).unwrap().plan.paging.unwrap();
    let experts: u64 = paging.layers.iter().map(|layer| u64::from(layer.experts)).sum();
    let frames = u64::from(paging.staging) + experts * 5 / 8;
    let tight = budgeted(paging.resident + paging.process + frames * paging.frame_bytes);
    let rates = |bundle: &Path| {
        let mut simulate = moec();
        simulate.arg("simulate").arg(bundle).args([
            "--hosts",
            "2",
            "--network",
            "10000 Gb/s, 0.001 us",
            "--json",
        ]);
        let report = json_of(&mut simulate);
        let all = report["rows"][0]["divisions"].as_array().unwrap().clone();
        ["alone", "owners"].map(|name| {
            let own = all.iter().find(|d| d["division"] == name).unwrap_or_else(|| panic!("{report}"));
            own["decode_tokens_per_s"].as_f64().unwrap()
        })
    };
    let ([alone, _], [reads, holds]) = (rates(&roomy), rates(&tight));
    assert!(reads < alone && holds > reads, "{reads} of {alone} tokens/s on one host, {holds} on two");
}

/// All hosts measure themselves, and the first the network: the file is a target.
#[test]
fn hosts_of_a_job_are_measured() {
    let (_, error) = fails(moec().args(["profile-device", "--hosts"]));
    assert!(error.contains("no launcher of MPI") && error.contains("mpirun -n 2"), "{error}");
    for (i, (_, launcher, options)) in LAUNCHERS.iter().filter(|(need, ..)| need.met_or_skip()).enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let hosts = 2 + i;
        let mut command = clean(Command::new(launcher));
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command.current_dir(&folder).args(*options).args(["-n", &hosts.to_string()]);
        command.arg(moec().get_program()).args([
            "profile-device",
            "--hosts",
            "--no-matmul",
            "--threads",
            "1",
        ]);
        let report = json_of(command.args(["--name", "several", "--json", "--quiet", "."]));
        let peers = report["hosts"].as_array().unwrap();
        assert_eq!(peers.len(), hosts - 1, "{report}");
        for peer in peers {
            for direction in ["to", "from"] {
                let trips = peer[direction].as_array().unwrap();
                let us: Vec<f64> = trips.iter().map(|t| t["round_trip_us"].as_f64().unwrap()).collect();
                assert!(us.len() > 4 && us[0] > 0.0 && us.last() > us.first(), "{report}");
                assert!(peer[format!("{direction}_gb_per_s")].as_f64().unwrap() > 0.0);
            }
        }
        let file = folder.path().join("several.toml");
        let device = Device::find(file.to_str().unwrap()).unwrap();
        assert_eq!((device.hosts.len(), device.links.len()), (hosts - 1, 2 * (hosts - 1)));
        assert!(device.units.iter().all(|unit| device.bandwidth_of(unit).is_some()));
        for memory in &device.memories {
            let alone = memory.bandwidth[0].gb_per_s;
            assert!(
                alone > 0.0 && memory.shared_gb_per_s.as_ref().is_none_or(|f| f.value < alone),
                "{memory:?}"
            );
        }
        let measured = bundle(folder.path(), file.to_str().unwrap(), "[placement]\nhosts = \"slices\"");
        let link = device.link("dram", "dram1").unwrap();
        assert!(
            decision(&measured)["figures"]["round_trip_us"].as_f64().unwrap() >= link.latency_us.unwrap()
        );
        ok(run(&measured, Some((launcher, options, hosts))).args(["generate", "--ids", "1,2", "-n", "2"]));
    }
}
