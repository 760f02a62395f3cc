//! The command line from a user's view: the real binary, its stdout, stderr and exit code.
//!
//! Snapshots are in `tests/snapshots`; `INSTA_UPDATE=always cargo test -p moec --test cli` updates them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const FERRIS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/models/ferris");

/// Runs moec in a folder, without the caller's environment variables that change its output.
fn moec(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moec"));
    for variable in ["NO_COLOR", "CLICOLOR_FORCE", "CLICOLOR", "MOEC_CACHE", "COLUMNS"] {
        command.env_remove(variable);
    }
    command.env("MOEC_CACHE", dir.join("cache")).current_dir(dir).args(args).output().expect("moec starts")
}

/// Stdout, stderr and exit code as one text.
fn shown(dir: &Path, args: &[&str]) -> String {
    let out = moec(dir, args);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    let code = out.status.code().expect("an exit code");
    format!("exit {code}\n--- stdout\n{}--- stderr\n{}", text(&out.stdout), text(&out.stderr))
}

/// An empty folder.
fn empty() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

/// A folder with this text as its `model.toml`.
fn with_model(text: &str) -> tempfile::TempDir {
    let dir = empty();
    fs::write(dir.path().join("model.toml"), text).expect("a file");
    dir
}

/// Compares moec's output with a snapshot, without the parts that differ between machines.
macro_rules! check {
    ($name:literal, $dir:expr, $args:expr) => {{
        let dir = $dir;
        let mut settings = insta::Settings::clone_current();
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        settings.add_filter(&regex_escape(&dir.path().to_string_lossy()), "DIR");
        settings.add_filter(&regex_escape(FERRIS), "FERRIS");
        settings.add_filter(r"\d+\.\d+s\b", "TIME");
        settings.bind(|| insta::assert_snapshot!($name, shown(dir.path(), &$args)));
    }};
}

/// Escapes a text for a regular expression.
fn regex_escape(text: &str) -> String {
    text.chars().flat_map(|c| c.is_ascii_punctuation().then_some('\\').into_iter().chain([c])).collect()
}

#[test]
fn no_subcommand() {
    check!("no_subcommand", empty(), [] as [&str; 0]);
    check!("help", empty(), ["--help"]);
}

#[test]
fn help_of_every_subcommand() {
    use clap::CommandFactory as _;
    let program = moec::Cli::command();
    // `synth` is hidden in the help, but users need it, too.
    let shown_in_help = program.get_subcommands().filter(|c| !c.is_hide_set() || c.get_name() == "synth");
    for subcommand in shown_in_help.map(clap::Command::get_name) {
        let dir = empty();
        let mut settings = insta::Settings::clone_current();
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        settings.bind(|| {
            insta::assert_snapshot!(format!("help_{subcommand}"), shown(dir.path(), &[subcommand, "--help"]));
        });
    }
}

/// Long help of a bundle's own program, and of one of its subcommands.
#[test]
fn help_of_a_bundles_program() {
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| {
        let mut program = moec_service::front(&[]).command().term_width(100);
        insta::assert_snapshot!("run_help", program.render_long_help());
        let generate = program.find_subcommand_mut("generate").expect("`generate`");
        insta::assert_snapshot!("run_help_generate", generate.render_long_help());
    });
}

/// Subcommands keep their own description, and a heading applies to the options of its own group only.
/// Flattened groups would set both.
#[test]
fn flattened_options_keep_description_and_heading_to_themselves() {
    use clap::{Args as _, Command, CommandFactory as _};
    let groups = [
        moec_runtime::cli::args::Common::augment_args(Command::new("group")),
        moec_runtime::cli::args::SamplingArgs::augment_args(Command::new("group")),
        moec_service::grammar::GrammarArgs::augment_args(Command::new("group")),
    ];
    let of_bundles = moec_service::front(&[]).command();
    for (root, groups) in [(moec::Cli::command(), &groups[..0]), (of_bundles, &groups[..])] {
        let heading_of = |id: &clap::Id| {
            let mut all = groups.iter().flat_map(Command::get_arguments);
            all.find(|a| a.get_id() == id).and_then(|a| a.get_help_heading())
        };
        for option in root.get_arguments().filter(|a| !a.is_positional()) {
            assert_eq!(option.get_help_heading(), Some("Global options"), "{}", option.get_id());
        }
        for command in root.get_subcommands().filter(|c| !c.is_hide_set()) {
            let name = command.get_name();
            let about = command.get_about().map(ToString::to_string).expect(name);
            for group in groups {
                assert_ne!(group.get_about().map(ToString::to_string).as_ref(), Some(&about), "{name}");
            }
            for option in command.get_arguments().filter(|a| !a.is_positional()) {
                let (id, found) = (option.get_id(), option.get_help_heading());
                assert_eq!(found, heading_of(id), "{name} --{id}");
            }
        }
    }
}

/// Every subcommand that prints a result can print it as JSON.
#[test]
fn subcommands_that_print_results_have_json() {
    use clap::CommandFactory as _;
    // These pass arguments on, print a script, or run until they are stopped.
    let none = ["run", "completions", "serve"];
    for root in [moec::Cli::command(), moec_service::front(&[]).command()] {
        for command in root.get_subcommands().filter(|c| !c.is_hide_set()) {
            let json = command.get_arguments().any(|a| a.get_long() == Some("json"));
            assert_eq!(json, !none.contains(&command.get_name()), "{}", command.get_name());
        }
    }
    let dir = empty();
    for args in [
        &["init", FERRIS, "--json"][..],
        &["inspect", "model.toml", "--json"],
        &["targets", "x86-64-v3", "--json"],
        &["passes", "--json"],
    ] {
        let out = moec(dir.path(), args);
        let value = serde_json::from_slice::<serde_json::Value>(&out.stdout);
        assert!(out.status.success() && value.is_ok_and(|v| v.is_object()), "{args:?}");
    }
}

/// Exit code 2: invalid command line, nothing was done; 1: the work failed.
#[test]
fn exit_codes_follow_one_rule() {
    let dir = with_model("[model]\nsource = \"gone\"\n");
    fs::create_dir(dir.path().join("folder")).unwrap();
    for (args, code) in [
        (&["--help"][..], 0),
        (&["targets"], 0),
        (&[], 2),
        (&["fly"], 2),
        (&["build", "--wings"], 2),
        (&["build", "model.toml", "--gpu-experts", "101%"], 2),
        (&["build", "model.toml", "--gpu-experts", "50%"], 2),
        (&["build", "model.toml", "--target", "abacus"], 2),
        (&["build", "gone.toml"], 1),
        (&["build", "model.toml"], 1),
        (&["build", "model.toml", "--target", "gone.toml"], 1),
        (&["init", FERRIS, "-o", "model.toml"], 2),
        (&["init", "folder"], 1),
        (&["synth", "folder", "--like", "olmoe"], 2),
        (&["inspect", "gone"], 1),
        (&["inspect", "folder"], 1),
        (&["inspect", "model.toml", "--cache", "50%"], 2),
        (&["verify", "folder"], 1),
        (&["verify", "folder", "--bound", "nan"], 2),
        (&["report", "gone"], 1),
        (&["eval", "folder"], 2),
        (&["run", "gone", "info"], 1),
        (&["completions", "tcl"], 2),
    ] {
        let out = moec(dir.path(), args);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    }
}

#[test]
fn the_passes_of_the_compiler() {
    check!("passes", empty(), ["passes"]);
}

#[test]
fn a_pass_on_a_file() {
    let graph = "\
weight @embed: f32[4, 8] embeddings = t\"embed\"[4, 8]
entry prefill[1] -> %6 {
  inputs %0: i32[1], %1: i32[1], %2: i32[1], %3: i32[1]
  %4: f32[1, 8] = embed %0, @embed
  %5: f32[1, 8] = gather_rows %4, %3
  %6: f32[1, 4] = linear %5, @embed
}
";
    let folder = || {
        let dir = empty();
        fs::write(dir.path().join("graph.moe"), graph).expect("a file");
        dir
    };
    check!("pass", folder(), ["pass", "format", "graph.moe"]);
    check!("pass_not_here", folder(), ["pass", "tier", "graph.moe"]);
    check!("pass_unknown", folder(), ["pass", "magic", "graph.moe"]);
    check!("pass_no_file", folder(), ["pass", "format", "absent.moe"]);
}

#[test]
fn bad_use_is_exit_2() {
    check!("unknown_verb", empty(), ["biuld"]);
    check!("unknown_option", empty(), ["build", "model.toml", "--traget", "native"]);
    check!("missing_argument", empty(), ["build"]);
    check!("wrong_number", empty(), ["eval", "b", "--text", "t", "--window", "1"]);
    check!("eval_of_nothing", empty(), ["eval", "b"]);
    check!("wrong_bound", empty(), ["verify", "b", "--bound", "nan"]);
}

#[test]
fn targets() {
    check!("unknown_target", empty(), ["targets", "x86-64-v5"]);
    check!("unknown_target_far", empty(), ["targets", "abacus"]);
    check!("missing_device_file", empty(), ["targets", "no/such.toml"]);
    check!("target_file", empty(), ["targets", "x86-64-v3"]);
    let dir = empty();
    fs::write(dir.path().join("box.toml"), "name = \"box\"\nfamly = \"cpu\"\n").unwrap();
    check!("wrong_device_file", dir, ["targets", "box.toml"]);
    let list = moec(empty().path(), &["targets", "--json"]);
    let list: serde_json::Value = serde_json::from_slice(&list.stdout).unwrap();
    assert_eq!(list[0]["name"], "native");
    assert_eq!(list[0]["runs_here"], true);
    assert_eq!(list[1]["legal_ops"], "all");
    let evidence = |name: &str| {
        let all = list.as_array().unwrap();
        all.iter().find(|d| d["name"] == name).unwrap()["evidence"].as_str().unwrap().to_owned()
    };
    let found = ["native", "x86-64-v4", "neoverse-v2", "m2-ultra", "h100-x86", "spr-ndp"].map(evidence);
    assert_eq!(found, ["measured", "tested", "emulated", "emulated", "measured", "modelled"]);
    assert_eq!(list[0]["measured"][0]["when"], "2026-11");
}

#[test]
fn model_toml_is_checked() {
    let inspect = ["inspect", "model.toml"];
    check!("model_toml_missing", empty(), inspect);
    check!("inspect_of_nothing", empty(), ["inspect", "nope"]);
    check!("model_toml_is_a_folder", empty(), ["inspect", "."]);
    check!("source_missing", with_model("[model]\nsource = \"hf\"\n"), inspect);
    check!("source_is_no_checkpoint", with_model("[model]\nsource = \".\"\n"), inspect);
    check!("unknown_key", with_model("[shapes]\nmax_contxt = 64\n"), inspect);
    check!("unknown_section", with_model("[weight]\nexperts = \"bf16\"\n"), inspect);
    check!("wrong_coverage", with_model("[experts]\ncoverage = 2.0\n"), inspect);
    check!("out_of_range", with_model("[shapes]\nprefill_chunk = 100000\n"), inspect);
    check!("wrong_type", with_model("[shapes]\ndecode_batch = 1\n"), inspect);
    check!("format_of_a_table", with_model("[weights]\nembeddings = \"q4o\"\n"), inspect);
    check!("no_toml", with_model("[shapes\n"), inspect);
    let long = format!("[model]\nsource = '{FERRIS}'\n[shapes]\nmax_context = 4096\n");
    check!("longer_than_the_model", with_model(&long), inspect);
}

#[test]
fn init_writes_the_defaults() {
    let dir = empty();
    check!("init", dir, ["init", FERRIS]);
    let dir = empty();
    assert!(moec(dir.path(), &["init", FERRIS]).status.success());
    let text = fs::read_to_string(dir.path().join("model.toml")).unwrap();
    insta::with_settings!({ prepend_module_to_snapshot => false, omit_expression => true,
        filters => vec![(r#"source = ".*""#, r#"source = "FERRIS""#)] }, {
        insta::assert_snapshot!("init_model_toml", text);
    });
    assert!(moec(dir.path(), &["inspect", "model.toml"]).status.success());
    check!("init_again", dir, ["init", FERRIS]);
    let dir = empty();
    check!("init_of_nothing", dir, ["init", "nowhere"]);
    let quiet = moec(empty().path(), &["--quiet", "init", FERRIS]);
    assert!(quiet.status.success() && quiet.stdout.is_empty() && quiet.stderr.is_empty());
    let forced = empty();
    fs::write(forced.path().join("m.toml"), "x".repeat(100_000)).unwrap();
    assert!(moec(forced.path(), &["init", FERRIS, "-o", "m.toml", "--force"]).status.success());
    assert_eq!(
        fs::read_to_string(forced.path().join("m.toml")).unwrap().lines().count(),
        text.lines().count()
    );
}

#[test]
fn inspect_of_the_committed_model() {
    check!("inspect_model_toml", empty(), ["inspect", &format!("{FERRIS}/model.toml")]);
    check!("inspect_model_toml_json", empty(), ["inspect", &format!("{FERRIS}/model.toml"), "--json"]);
    check!("inspect_checkpoint", empty(), ["inspect", FERRIS]);
}

#[test]
fn estimates_count_every_parameter_once() {
    let tiny = Path::new(FERRIS).join("../../hf");
    let folders = tiny.read_dir().unwrap().map(|f| f.unwrap().path()).filter(|p| p.is_dir());
    for folder in folders.chain([FERRIS.into()]) {
        let out = moec(empty().path(), &["inspect", folder.to_str().unwrap(), "--json"]);
        let model = &serde_json::from_slice::<serde_json::Value>(&out.stdout).unwrap()["model"];
        let classes = model["parameters_by_class"].as_object().unwrap();
        let sum: u64 = classes.values().filter_map(serde_json::Value::as_u64).sum();
        assert_eq!(Some(sum), model["parameters"].as_u64(), "{}", folder.display());
    }
}

#[test]
fn output_is_coloured_only_on_request() {
    let escape = |args: &[&str]| moec(empty().path(), args).stderr.contains(&0x1b);
    assert!(!escape(&["targets", "abacus"]));
    assert!(escape(&["--color", "always", "targets", "abacus"]));
    assert!(!escape(&["--color", "never", "targets", "abacus"]));
}

#[test]
fn doctor_checks_the_requirements_of_a_build() {
    let out = moec(empty().path(), &["doctor", "--json"]);
    let found: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(found["ok"].as_bool(), Some(out.status.success()));
    let names: Vec<_> =
        found["checks"].as_array().unwrap().iter().filter_map(|c| c["name"].as_str()).collect();
    let always = ["moec", "llvm", "cpu", "rustc", "cargo", "linker", "cache", "disk"];
    assert_eq!(names[..always.len()], always);
    // The cache folder cannot be created, since a file has its name.
    let dir = with_model("");
    let out = Command::new(env!("CARGO_BIN_EXE_moec"))
        .env("MOEC_CACHE", dir.path().join("model.toml/cache"))
        .args(["doctor"])
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stdout).contains("cache: set `MOEC_CACHE`"));
}

#[test]
fn completions_name_the_subcommands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let out = moec(empty().path(), &["completions", shell]);
        assert!(out.status.success() && String::from_utf8_lossy(&out.stdout).contains("inspect"), "{shell}");
    }
}

#[test]
fn a_synthetic_checkpoint_is_a_checkpoint() {
    let dir = empty();
    let out = moec(dir.path(), &["synth", "--like", "phi-tiny", "--layers", "1", "--vocab", "64", "phi"]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let out = moec(dir.path(), &["inspect", "phi", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!(report["model"]["family"], "phimoe");
    assert_eq!(report["model"]["experts"], 16);
    check!("synth_again", dir, ["synth", "--like", "phi-tiny", "phi"]);
}

/// An interrupt leaves no files behind.
#[cfg(unix)]
#[test]
fn an_interrupt_cleans_up() {
    let dir = empty();
    let started = dir.path().join("olmoe/config.json");
    let mut child = Command::new(env!("CARGO_BIN_EXE_moec"))
        .current_dir(dir.path())
        .args(["synth", "--like", "olmoe", "--layers", "2", "olmoe"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    while !started.exists() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let out = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(130), "{stderr}");
    assert!(stderr.ends_with("error: interrupted\n"), "{stderr}");
    assert!(!dir.path().join("olmoe").exists());
}

#[test]
fn generated_pages_are_fresh() {
    let pages = moec(empty().path(), &["docs"]);
    let docs = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs"));
    for page in String::from_utf8(pages.stdout).unwrap().lines() {
        let fresh = moec(empty().path(), &["docs", page]).stdout;
        let stored = fs::read(docs.join(page)).unwrap_or_default();
        assert!(fresh == stored, "`docs/{page}` is stale\nhint: cargo xtask docs");
    }
}
