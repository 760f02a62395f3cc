//! Every command in the README, `docs/` and CONTRIBUTING.md works as written, and every link is valid. Every
//! page is in the book, and ARCHITECTURE.md names functions that exist.
//!
//! Commands are the lines after `$ ` and command lines in backticks. Placeholders are replaced by existing
//! files ([`NAMES`], [`ROWS`]), and all commands run in order in one folder. Commands that are not run have a
//! reason ([`ELSEWHERE`]), and are compared with their `--help`. Any other command fails the test.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails by panicking, and says what it runs"
)]

use crate::support;

use moec_testing::PYTHON;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use support::{clean, root, runs_here};

/// Placeholders and their replacements.
const NAMES: &[(&str, &str)] = &[
    ("HF_DIR", "path/to/checkpoint"),
    ("BUNDLE", "demo.moec"),
    ("BUNDLE/run", "demo.moec/run"),
    ("ferris.moec", "demo.moec"),
    ("PATH", "model.toml"),
    ("NAME", "x86-64-v3"),
    ("DIR", "dir.moec"),
    ("[DIR]", "profiled"),
    ("SHELL", "bash"),
    ("F", "held-out.txt"),
    ("F.jsonl", "golden/models/ferris/eval/needle.jsonl"),
    ("SUBCOMMAND", "info"),
    ("…", "info"),
    ("~/.local/share/bash-completion/completions/moec", "completions"),
    // The shapes of a real model would take gigabytes, so a small model replaces it.
    ("/tmp/olmoe8", "olmoe8"),
    ("/tmp/olmoe8.toml", "olmoe8.toml"),
    ("/tmp/olmoe8.moec", "olmoe8.moec"),
    ("/tmp/olmoe8.moec/run", "olmoe8.moec/run"),
];

/// Chat with the demo model, which has no chat template of its own; and a server that ends by itself.
const CHAT: &str = "demo.moec/run chat --template golden/plain.jinja -n 16 --quiet";
const SERVE: &str = "sh -c 'demo.moec/run serve --port 0 & sleep 2; kill -TERM $!; wait $!'";

/// Commands that lack an argument or need other files than their neighbours: as written, and as run.
const ROWS: &[(&str, &str)] = &[
    ("moec SUBCOMMAND --help", "moec build --help"),
    ("BUNDLE/run SUBCOMMAND …", "demo.moec/run info"),
    ("BUNDLE/run SUBCOMMAND …", "demo.moec/run info"),
    ("BUNDLE/run SUBCOMMAND --help", "demo.moec/run info --help"),
    ("model.moec/run chat", CHAT),
    ("BUNDLE/run chat -n 16 --quiet", CHAT),
    ("model.moec/run serve --port 8080", SERVE),
    ("moec inspect PROFILE", "moec inspect ferris.trace"),
    ("moec compare A B", "moec compare demo.moec demo.moec"),
    ("moec inspect A --against B", "moec inspect my.trace --against ferris.trace"),
    (
        "moec eval --big-little --gamma 0,0.7,1",
        "moec eval little.moec --text held-out.txt --big-little --gamma 0,0.7,1",
    ),
    ("moec sign BUNDLE --key F", "moec sign demo.moec --key demo.key"),
    ("moec simulate BUNDLE", "moec simulate --help"),
    ("BUNDLE/run serve --port 8080", SERVE),
    ("run bench --json --no-verify-reads", "moec run budget.moec bench --json --no-verify-reads"),
    (
        "moec build model.toml --target native-x2 -o model.moec",
        "moec build hosts.toml --target native-x2 -o hosts.moec",
    ),
    (
        "moec build model.toml --target native-numa2 -o model.moec",
        "moec build hosts.toml --target native-numa2 -o nodes.moec",
    ),
    (
        "moec simulate model.moec --hosts 8,16,32,64 --network \"10 Gb/s, 100 us\"",
        "moec simulate hosts.moec --hosts 8,16,32,64 --network \"10 Gb/s, 100 us\"",
    ),
    ("moec synth --like NAME", "moec synth --help"),
    ("moec fit --profile", "moec fit --help"),
    ("moec calibrate --losses", "moec calibrate --help"),
    ("run generate --budget 3GiB", "moec run budget.moec generate --budget 3GiB -n 8"),
];

/// Commands that are not run here, by their first words, and why. Their options must be in the help of the
/// same command.
const ELSEWHERE: &[(&str, &str)] = &[
    ("curl", "queries a server; tests/serve.rs does"),
    ("lm_eval", "queries a server; tests/serve.rs makes the requests of one"),
    ("cargo xtask", "installs, measures or builds for minutes to hours"),
    ("cargo run", "compiles everything once more"),
    ("cargo check", "compiles everything once more"),
    ("cargo clippy", "compiles everything once more"),
    ("cargo fmt", "formats the tree"),
    ("cargo test", "a test of its own"),
    ("cargo install", "compiles everything once more"),
    ("rustup", "installs"),
    ("mpirun", "starts processes; tests/hosts.rs does"),
    ("rsync", "copies to another machine; tests/hosts.rs does without one"),
    ("apt-get", "installs"),
    ("dpkg", "installs"),
    ("sh runner/build.sh", "needs a Mac"),
    ("moec synth --like olmoe --layers 8", "writes seven gigabytes"),
    ("moec run --emulate", "an option, without a bundle"),
    ("moec profile-device --gpu", "wants an NVIDIA GPU; a test of its own plays one"),
    ("moec profile-device --hosts", "wants a launcher; tests/host_costs.rs has two"),
    ("moec init allenai/OLMoE-1B-7B-0924", "queries a hub; a test of its own plays one"),
    ("moec init model.gguf", "wants a file that Python writes; a test of its own does the same"),
];

/// Subcommands of `cargo xtask` that `moec-papers` executes.
const PAPERS: [&str; 5] = ["npumoe", "trimoe", "powerinfer2", "hybrimoe", "mobile"];

/// Commands after which `model.toml` is changed: as the page describes, and so that parts of so small a model
/// run on the Neural Engine.
const THEN: &[(&str, &str, &str)] = &[
    ("moec calibrate model.toml --text my.txt -o my.trace", "profile = \"\"", "profile = \"my.trace\""),
    (
        "moec calibrate model.toml --text my.txt -o my.trace",
        "experts = \"auto\"",
        "attention = \"npu\"\nexperts = \"auto\"",
    ),
];

/// A bundle that needs coremltools.
const PACKAGED: &str = "m2.moec";

/// A bundle whose CPU needs AVX-512 and more; only AMX can be emulated.
const OF_SAPPHIRE_RAPIDS: &str = "run --emulate dimms.moec";

/// Contents of the folder before the first command.
fn prepare(folder: &Path) {
    let ferris = root().join("golden/models/ferris");
    symlink(root().join("golden"), folder.join("golden")).unwrap();
    symlink(root().join("targets"), folder.join("targets")).unwrap();
    fs::create_dir_all(folder.join("path/to")).unwrap();
    symlink(&ferris, folder.join("path/to/checkpoint")).unwrap();
    symlink(&ferris, folder.join("olmoe8")).unwrap();
    for (name, from, bytes) in [("my.txt", "calibration.txt", 16_000), ("held-out.txt", "text.txt", 6_000)] {
        let text = fs::read_to_string(ferris.join("eval").join(from)).unwrap();
        fs::write(folder.join(name), text.chars().take(bytes).collect::<String>()).unwrap();
    }
    let model = "[model]\nsource = \"path/to/checkpoint\"\n[shapes]\nmax_context = 512\n";
    fs::write(folder.join("little.toml"), format!("{model}[decode]\nbig_little = true\n")).unwrap();
    fs::write(folder.join("hosts.toml"), model).unwrap();
    fs::write(folder.join("budget.toml"), format!("{model}[memory]\nbudget = \"1 GiB\"\n")).unwrap();
}

/// Commands that prepare files which the pages assume; the first is the bundle of `cargo xtask demo`.
const BEFORE: [&str; 4] = [
    "moec build golden/models/ferris/model.toml -o demo.moec",
    "moec build little.toml -o little.moec --no-run",
    "moec build budget.toml -o budget.moec --no-run",
    "moec sign --new-key demo.key",
];

/// Whether a file is a documentation page.
fn is_page(name: &Path) -> bool {
    name.extension().is_some_and(|e| e == "md")
}

/// The list of the book's pages.
const SUMMARY: &str = "SUMMARY.md";

/// The README, the pages of `docs/` in the order in which the README links to them, and CONTRIBUTING.md. A
/// page may use files that an earlier one builds.
fn in_reading_order() -> Vec<PathBuf> {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let docs =
        fs::read_dir(root().join("docs")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut docs: Vec<_> = docs
        .filter(|name| is_page(name.as_ref()) && name != SUMMARY)
        .map(|name| {
            let link = readme.rfind(&format!("](docs/{name})"));
            (link.unwrap_or_else(|| panic!("the README has no link to `docs/{name}`")), name)
        })
        .collect();
    docs.sort();
    let docs = docs.into_iter().map(|(_, name)| root().join("docs").join(name));
    [root().join("README.md")].into_iter().chain(docs).chain([root().join("CONTRIBUTING.md")]).collect()
}

/// Whether text in backticks is a command.
fn is_command(text: &str) -> bool {
    let Some((first, rest)) = text.split_once(' ') else { return false };
    let known = ["moec", "run", "cargo", "rustup", "dpkg", "apt-get", "sh", "python3"];
    !rest.is_empty() && (known.contains(&first) || first.ends_with("/run"))
}

/// Commands of a page, in order; those after `$ ` and the examples in help texts come first.
fn commands(page: &str) -> Vec<String> {
    let (mut shown, mut prose) = (Vec::new(), String::new());
    let mut fence: Option<&str> = None;
    for line in page.lines() {
        if let Some(kind) = line.strip_prefix("```") {
            fence = if fence.is_some() { None } else { Some(kind) };
            prose.push('\n');
            continue;
        }
        match fence {
            Some("console") => {
                let command = line.strip_prefix("$ ").map(|c| c.split("  #").next().unwrap_or(c));
                shown.extend(command.map(|c| c.trim().to_owned()));
            }
            Some("text") => {
                // Examples in a help text have their description after two spaces.
                let example = line.strip_prefix("  ").filter(|l| is_command(l) && !l.starts_with("run "));
                shown.extend(example.map(|e| e.split("  ").next().unwrap_or(e).trim().to_owned()));
                prose += line;
                prose.push('\n');
            }
            Some(_) => {}
            None => {
                prose += line;
                prose.push('\n');
            }
        }
    }
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    // A code span does not cross paragraphs.
    for paragraph in prose.split("\n\n") {
        shown.extend(paragraph.split('`').skip(1).step_by(2).map(words).filter(|s| is_command(s)));
    }
    shown
}

/// The command to run for a command of a page.
fn runnable(command: &str) -> String {
    if let Some((_, run)) = ROWS.iter().find(|(from, _)| *from == command) {
        return (*run).to_owned();
    }
    let words: Vec<&str> = command
        .split(' ')
        .map(|w| NAMES.iter().find(|(from, _)| *from == w).map_or(w, |(_, to)| *to))
        .collect();
    let run = words.join(" ");
    let run = run.strip_prefix("run ").map_or(run.clone(), |rest| format!("demo.moec/run {rest}"));
    // A subcommand without arguments is only a name, so its help is run.
    let whole = ["moec targets", "moec doctor"];
    if words.len() == 2 && !whole.contains(&run.as_str()) { format!("{run} --help") } else { run }
}

/// Runs a shell line in a folder, with a text on standard input.
fn sh(folder: &Path, line: &str) -> Result<String, String> {
    let moec = Path::new(env!("CARGO_BIN_EXE_moec")).parent().unwrap();
    let path = format!("{}:{}", moec.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = clean(Command::new("sh"));
    command
        .args(["-c", &format!("echo 'The borrow checker' | {line}")])
        .current_dir(folder)
        .env("PATH", path);
    let out = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if out.status.success() { Ok(text(&out.stdout)) } else { Err(text(&out.stderr)) }
}

/// Compares a command that is not run with its `--help`.
fn parses(folder: &Path, command: &str) -> Result<(), String> {
    let words: Vec<&str> = command.split(' ').collect();
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let is_there = |path: String| {
        if root().join(&path).exists() { Ok(()) } else { Err(format!("there is no `{path}`")) }
    };
    let word_after = |word: &str| words.iter().skip_while(|w| **w != word).nth(1).copied().unwrap_or("");
    let help = match words.as_slice() {
        ["cargo", "xtask", name, rest @ ..] => {
            let list = sh(&root(), &format!("{cargo} xtask help"))?;
            if !list.lines().any(|l| l.split_whitespace().next() == Some(name)) {
                return Err(format!("`cargo xtask help` has no `{name}`"));
            }
            if rest.is_empty() {
                return Ok(());
            }
            if !PYTHON.met_or_skip() {
                return Ok(());
            }
            let papers = Path::new(env!("CARGO_BIN_EXE_moec")).with_file_name("moec-papers");
            if PAPERS.contains(name) && papers.exists() {
                // The binary that `cargo xtask` would compile again.
                sh(folder, &format!("{} {name} --help", papers.display()))?
            } else {
                sh(&root(), &format!("{cargo} xtask {name} --help"))?
            }
        }
        ["cargo", "run", ..] => {
            let name = word_after("-p").trim_start_matches("moec-");
            let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
            let member = |path: &&str| path.rsplit('/').next() == Some(name);
            let folder = manifest.split('"').find(member).unwrap_or(name);
            return match word_after("--example") {
                "" => is_there(format!("{folder}/src/main.rs")),
                example => is_there(format!("{folder}/examples/{example}.rs")),
            };
        }
        ["cargo", "test", ..] => return is_there(format!("tests/{}.rs", word_after("--test"))),
        ["cargo", "install", ..] => return is_there(format!("{}/Cargo.toml", word_after("--path"))),
        ["sh", script] => {
            let bundle = folder.join(PACKAGED);
            let there = !bundle.exists() || bundle.join(script).exists();
            return if there { Ok(()) } else { Err(format!("a bundle has no `{script}`")) };
        }
        ["moec", subcommand, ..] => sh(folder, &format!("moec {subcommand} --help"))?,
        _ => return Ok(()),
    };
    let known = |option: &str| help.split(|c: char| !c.is_alphanumeric() && c != '-').any(|w| w == option);
    match words.iter().find(|w| w.starts_with("--") && !known(w)) {
        Some(option) => Err(format!("its help does not know `{option}`")),
        None => Ok(()),
    }
}

#[test]
fn every_documented_command_works_as_written() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path();
    prepare(folder);
    for line in BEFORE {
        sh(folder, line).unwrap_or_else(|output| panic!("`{line}`:\n{output}"));
    }
    let packages = support::coreml().is_some();
    let (mut done, mut wrong) = (BTreeSet::new(), Vec::new());
    for page in in_reading_order() {
        for command in commands(&fs::read_to_string(&page).unwrap()) {
            let elsewhere = ELSEWHERE.iter().find(|(words, _)| {
                command.strip_prefix(words).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
            });
            // `moec run --emulate` without a bundle is an option's name; with a bundle it is a command.
            let elsewhere =
                elsewhere.filter(|(words, _)| *words != "moec run --emulate" || *words == command);
            let line = if elsewhere.is_some() { command.clone() } else { runnable(&command) };
            if !done.insert(line.clone()) {
                continue;
            }
            if line.contains(PACKAGED) && !packages {
                println!("         {line} is skipped: nothing here writes Core ML packages");
                continue;
            }
            if line.contains(OF_SAPPHIRE_RAPIDS) && !runs_here("sapphire-rapids") {
                println!("         {line} is skipped: this CPU lacks what is not emulated");
                continue;
            }
            let start = Instant::now();
            let result = match elsewhere {
                Some(_) => parses(folder, &line),
                None => sh(folder, &line).map(|_| ()),
            };
            let note = elsewhere.map_or(String::new(), |(_, why)| format!(" (not run: {why})"));
            println!("{:6.1} s  {line}{note}", start.elapsed().as_secs_f64());
            if let Err(output) = result {
                let page = page.strip_prefix(root()).unwrap().display();
                wrong.push(format!("{page}: `{command}`, run as `{line}`:\n{output}"));
            }
            for (after, from, to) in THEN.iter().filter(|(after, ..)| *after == command) {
                let toml = folder.join("model.toml");
                let text = fs::read_to_string(&toml).unwrap();
                assert!(text.contains(from), "`model.toml` has no `{from}` after `{after}`");
                fs::write(&toml, text.replace(from, to)).unwrap();
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{}\nhint: mend the page; a command that needs other files has a row in NAMES or ROWS, one that cannot be run here \
         has one in ELSEWHERE",
        wrong.join("\n")
    );
    assert!(done.len() > 50, "only {} commands were found", done.len());
}

#[test]
fn commands_are_found_in_blocks_tables_and_text() {
    let page = "a `moec\nsteps X` b\n\n| `run info` | x |\n\n```console\n$ moec init HF_DIR -o a.toml   # writes it\nout\n$ sh a # b\n```\n\n\
                ```text\nUsage: moec\n\n  moec build a.toml  compiles it\n      says `moec targets` more\n```\n\n```toml\n$ no\n```\n";
    let expected = [
        "moec init HF_DIR -o a.toml",
        "sh a # b",
        "moec build a.toml",
        "moec steps X",
        "run info",
        "moec targets",
    ];
    assert_eq!(commands(page), expected);
    let runs = ["moec init path/to/checkpoint -o a.toml", "moec build a.toml", "demo.moec/run info --help"];
    assert_eq!([expected[0], expected[2], expected[4]].map(runnable), runs);
}

#[test]
fn commands_that_are_not_run_are_checked_against_help() {
    let folder = tempfile::tempdir().unwrap();
    let parses = |line: &str| parses(folder.path(), line);
    assert!(parses("moec synth --like olmoe --layers 8 x").is_ok());
    assert!(parses("moec synth --alike olmoe").unwrap_err().contains("--alike"));
    assert!(parses("cargo xtask demo").is_ok());
    assert!(parses("cargo xtask demolish").unwrap_err().contains("demolish"));
    assert!(parses("cargo test -p moec --test end_to_end documents::").is_ok());
    assert!(parses("cargo test -p moec --test document").is_err());
}

/// The lines of a page outside of code fences.
fn unfenced(page: &str) -> Vec<&str> {
    let mut fenced = false;
    let mut text = Vec::new();
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            text.push(line);
        }
    }
    text
}

/// Targets of a page's links and images, except in backticks.
fn links(page: &str) -> Vec<String> {
    let text = unfenced(page).join("\n");
    // Every second piece is inside of backticks.
    let prose: String =
        text.split('`').enumerate().map(|(i, piece)| if i % 2 == 0 { piece } else { "code" }).collect();
    prose.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_owned())).collect()
}

/// Anchors that GitHub gives the headings of a page.
fn anchors(page: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for line in unfenced(page) {
        let Some((_, title)) =
            line.split_once(' ').filter(|(marks, _)| !marks.is_empty() && marks.bytes().all(|b| b == b'#'))
        else {
            continue;
        };
        let kept = title.trim().to_lowercase();
        let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        let name: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let same = (1..).map(|n| format!("{name}-{n}"));
        anchors.insert([name.clone()].into_iter().chain(same).find(|a| !anchors.contains(a)).unwrap());
    }
    anchors
}

/// Resolves `.` and `..` in a path; `None` if it leaves its first folder.
fn resolved(path: &Path) -> Option<PathBuf> {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => out.push(name),
            Component::CurDir => {}
            Component::ParentDir if out.pop() => {}
            _ => return None,
        }
    }
    Some(out)
}

/// Every `.md` file below a folder, except in hidden, generated and external folders.
fn markdown(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root().join(folder)).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        let path = folder.join(&name);
        if entry.file_type().unwrap().is_dir() {
            if !name.starts_with('.') && !["target", "corpus", "artifacts"].contains(&name.as_str()) {
                markdown(&path, found);
            }
        } else if is_page(name.as_ref()) {
            found.push(path);
        }
    }
}

#[test]
fn every_link_of_every_page_has_a_target() {
    let mut pages = Vec::new();
    markdown(Path::new(""), &mut pages);
    let (mut followed, mut wrong) = (0, Vec::new());
    for page in &pages {
        let text = fs::read_to_string(root().join(page)).unwrap();
        for link in links(&text).iter().filter(|link| !link.contains("://")) {
            followed += 1;
            let (path, anchor) =
                link.split_once('#').map_or((link.as_str(), None), |(path, a)| (path, Some(a)));
            let target = if path.is_empty() { page.clone() } else { page.with_file_name(path) };
            let Some(target) = resolved(&target).filter(|t| root().join(t).exists()) else {
                wrong.push(format!("{}: there is no `{link}`", page.display()));
                continue;
            };
            let Some(anchor) = anchor else { continue };
            if !anchors(&fs::read_to_string(root().join(target)).unwrap()).contains(anchor) {
                wrong.push(format!("{}: `{link}` has no such heading", page.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(followed > 50, "only {followed} links were found in {} pages", pages.len());
}

/// Files that a page links to, as paths from the root.
fn linked(page: &str) -> BTreeSet<PathBuf> {
    let text = fs::read_to_string(root().join(page)).unwrap();
    let paths = links(&text).into_iter().filter(|link| !link.contains("://"));
    paths.filter_map(|link| resolved(&Path::new(page).with_file_name(link.split('#').next()?))).collect()
}

#[test]
fn every_page_is_in_the_book() {
    let mut pages = Vec::new();
    markdown(Path::new("docs"), &mut pages);
    pages.retain(|page| !page.ends_with(SUMMARY));
    pages.extend(["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(PathBuf::from));
    let listed = linked("docs/SUMMARY.md");
    let missing: Vec<_> = pages.iter().filter(|page| !listed.contains(*page)).collect();
    assert!(missing.is_empty(), "docs/SUMMARY.md lacks {missing:?}");
    assert_eq!(listed.len(), pages.len(), "docs/SUMMARY.md lists what is not a page of the book");
}

#[test]
fn architecture_page_names_existing_items() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    assert!(
        text.len() <= 20 * 1024,
        "ARCHITECTURE.md has {} bytes: records go to docs/decisions",
        text.len()
    );
    let (_, rest) = text.split_once("## Where is").unwrap();
    let (tables, _) = rest.split_once("## Glossary").unwrap();
    let (mut rows, mut wrong) = (0, Vec::new());
    for row in tables.lines().filter(|line| line.starts_with("| ") && line.contains("](")) {
        rows += 1;
        let files = links(row);
        // In one table the names follow the links, in the other they precede the words: the first code in the
        // last cell.
        let cell = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        let Some(name) = cell.split('`').nth(1) else {
            wrong.push(format!("`{row}` names nothing"));
            continue;
        };
        for file in files {
            let source = fs::read_to_string(root().join(&file)).unwrap_or_default();
            let words =
                |line: &str| line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == name);
            if !source.lines().any(words) {
                wrong.push(format!("`{file}` has no `{name}`"));
            }
        }
    }
    assert!(wrong.is_empty(), "ARCHITECTURE.md:\n{}", wrong.join("\n"));
    assert!(rows > 30, "only {rows} rows were found");
}

/// Rows of the README's table of systems: their cells.
fn systems(readme: &str) -> Vec<Vec<&str>> {
    let (_, rest) = readme.split_once("## Five systems").unwrap();
    let (table, _) = rest.split_once("\n## ").unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| ") && line.contains("]("));
    rows.map(|row| row.trim_matches(['|', ' ']).split(" | ").collect()).collect()
}

#[test]
fn the_table_of_systems_names_passes_and_results_that_exist() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let passes = sh(&root(), "moec passes").unwrap();
    let passes: BTreeSet<&str> = passes.lines().filter_map(|l| l.split_whitespace().next()).collect();
    let rows = systems(&readme);
    assert_eq!(rows.len(), 5);
    let mut wrong = Vec::new();
    for cells in rows {
        let [system, mechanism, .., result] = cells.as_slice() else { panic!("{cells:?}") };
        let named = mechanism.split(';').next().filter(|part| part.starts_with("pass")).unwrap_or_default();
        for pass in named.split('`').skip(1).step_by(2).filter(|pass| !passes.contains(pass)) {
            wrong.push(format!("{system}: `moec passes` has no `{pass}`"));
        }
        let [page]: [String; 1] = links(system).try_into().unwrap();
        let page = fs::read_to_string(root().join(page)).unwrap();
        let numbers = |text: &str| -> BTreeSet<String> {
            let parts = text.split(|c: char| !c.is_ascii_digit() && c != '.').map(|n| n.trim_matches('.'));
            parts.filter(|n| !n.is_empty()).map(str::to_owned).collect()
        };
        let stand = numbers(&page);
        for number in numbers(result).difference(&stand) {
            wrong.push(format!("{system}: its page has no {number}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let first_screen = readme.lines().take(40).collect::<String>();
    for paper in ["NPUMoE", "PowerInfer", "HybriMoE", "TriMoE", "MoBiLE"] {
        assert!(!first_screen.contains(paper), "the first screen of the README names {paper}");
    }
}

#[test]
fn links_and_anchors_are_found() {
    let page = "# A `b` c, d\n[x](y.md#z) `[no](no.md)` ![i](i.svg)\n```text\n# no\n[no](no.md)\n```\n## E-f (g)\n### E-f (g)\n#no\n";
    assert_eq!(links(page), ["y.md#z", "i.svg"]);
    assert_eq!(anchors(page).into_iter().collect::<Vec<_>>(), ["a-b-c-d", "e-f-g", "e-f-g-1"]);
    assert_eq!(resolved(Path::new("docs/../bench/./a.md")), Some("bench/a.md".into()));
    assert_eq!(resolved(Path::new("docs/../../a.md")), None);
}
