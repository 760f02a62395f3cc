//! `run serve` and `run chat` on several hosts: the answers of one process, and an end of all of them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::hosts::{LAUNCHERS, process, run};
use crate::support::{Setup, built, ferris, ok, root};
use moec_testing::SUPERVISOR;
use moec_testing::http::{get, post};
use moec_testing::server::Server;
use serde_json::{Value, json};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time in which all processes end.
const END: Duration = Duration::from_mins(1);

/// Lines under `[placement]` that cut experts between hosts, and attention by its heads, too.
const CUTS: [&str; 2] =
    ["hosts = \"slices\"\nattention_slices = 1", "hosts = \"slices\"\nattention_slices = 2"];

/// The demo model on two hosts.
fn bundle(folder: &Path) -> PathBuf {
    cut(folder, CUTS[0])
}

/// The demo model on two hosts, with these lines under `[placement]`.
fn cut(folder: &Path, placement: &str) -> PathBuf {
    let folder = &tempfile::Builder::new().tempdir_in(folder).unwrap().keep();
    let bundle = folder.join("ferris.moec");
    let setup = Setup { format: "bf16", chunk: 64, batch: &[1, 2, 4], context: 1024 };
    let toml = setup.write(&ferris(), folder);
    let mut more = fs::File::options().append(true).open(&toml).unwrap();
    writeln!(more, "[placement]\n{placement}").unwrap();
    built(&toml, &["--target", "native-x2"], &bundle);
    bundle
}

/// A subcommand on two hosts.
fn launched(bundle: &Path, of: &(&moec_testing::Need, &'static str, &'static [&'static str])) -> Command {
    run(bundle, Some((of.1, of.2, 2)))
}

/// Waits until no process of the bundle is left.
fn gone(bundle: &Path) {
    let begin = Instant::now();
    while (0..2).any(|rank| process(bundle, rank).is_some()) {
        assert!(begin.elapsed() < END, "a process goes on");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Several clients at once get the answers of one process; a signal to the first host lets it finish its answers, and
/// then all hosts end without an error.
#[test]
fn clients_of_several_hosts_get_the_answers_of_one() {
    let folder = tempfile::tempdir().unwrap();
    for placement in CUTS {
        clients(&cut(folder.path(), placement));
    }
}

/// Asks a server of this bundle, under each launcher.
fn clients(bundle: &Path) {
    let prompts = [
        "The borrow checker",
        "A trait is",
        "Each value in Rust has",
        "fn main() {",
        "The borrow checker says",
    ];
    let alone = prompts.map(|prompt| {
        let args = ["generate", "--prompt", prompt, "-n", "24", "--ignore-eos", "--json", "--threads", "1"];
        let out = ok(run(bundle, None).args(args)).stdout;
        serde_json::from_slice::<Value>(&out).unwrap()["text"].clone()
    });
    for of in LAUNCHERS.iter().filter(|(need, ..)| need.met_or_skip()) {
        let mut command = launched(bundle, of);
        let mut server =
            Server::start(command.args(["serve", "--port", "0", "--threads", "1", "--exact"])).unwrap();
        let body = |prompt: &str, n: usize, stream: bool| json!({"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": true, "stream": stream});
        let ask = |prompt: &str| {
            let reply = post(server.address(), "/v1/completions", body(prompt, 24, false)).call().unwrap();
            serde_json::from_str::<Value>(&reply.body).unwrap()["choices"][0]["text"].clone()
        };
        let answers = std::thread::scope(|scope| {
            let ask = &ask;
            let threads = prompts.map(|prompt| scope.spawn(move || ask(prompt)));
            threads.map(|thread| thread.join().unwrap())
        });
        assert_eq!(answers, alone, "{}", of.1);
        let figures = get(server.address(), "/metrics").call().unwrap().body;
        for name in ["sent_bytes", "received_bytes", "round_trips", "wait_seconds"] {
            let value = figures.lines().find_map(|l| l.strip_prefix(&format!("moec_host_{name}_total ")));
            assert!(value.is_some_and(|value| value.parse::<f64>().unwrap() > 0.0), "{name}: {figures}");
        }
        let mut last = post(server.address(), "/v1/completions", body(prompts[0], 400, true)).send().unwrap();
        assert!(last.event().unwrap().is_some());
        let first = process(bundle, 0).expect("the first host serves");
        // SAFETY: a signal to a process of this test.
        assert_eq!(unsafe { libc::kill(first, libc::SIGTERM) }, 0);
        let rest = last.whole().unwrap().body;
        assert!(rest.contains("data: [DONE]"), "{}: {rest}", of.1);
        assert_eq!(server.ended(END).unwrap().code(), Some(0), "{}", of.1);
        gone(bundle);
    }
}

/// A signal to the launcher ends all processes.
#[test]
fn launchers_end_servers_of_several_hosts() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path());
    for of in LAUNCHERS.iter().filter(|(need, ..)| need.met_or_skip()) {
        let mut command = launched(&bundle, of);
        let mut server = Server::start(command.args(["serve", "--port", "0", "--threads", "1"])).unwrap();
        server.signal("-TERM").unwrap();
        server.ended(END).unwrap();
        gone(&bundle);
    }
}

/// systemd, as `docs/deploy/moec.service` tells it, starts a server of several hosts again when one of them was killed.
/// The unit is that file but for its command, and for the protections that need a whole machine.
#[test]
fn supervisors_start_servers_of_several_hosts_again() {
    if !SUPERVISOR.met_or_skip() {
        return;
    }
    let Some((_, launcher, options)) = LAUNCHERS.iter().find(|(need, ..)| need.met_or_skip()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path());
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let mut command = run(&bundle, Some((launcher, options, 2)));
    command.args(["serve", "--port", &port, "--threads", "1", "--exact"]);
    let found = ok(Command::new("sh").args(["-c", &format!("command -v {launcher}")])).stdout;
    let mut words = vec![String::from_utf8(found).unwrap().trim().to_owned()];
    words.extend(command.get_args().map(|word| word.to_str().unwrap().to_owned()));
    let own = ["HOME", "PATH", "MOEC_CACHE"].map(|name| (OsStr::new(name), std::env::var_os(name)));
    let set = command.get_envs().map(|(name, value)| (name, value.map(OsStr::to_owned)));
    let line = |(name, value): (&OsStr, Option<OsString>)| {
        Some(format!("Environment=\"{}={}\"\n", name.to_str()?, value?.to_str()?))
    };
    let variables = own.into_iter().chain(set).filter_map(line);
    let kept = ["[Service]", "KillSignal=", "TimeoutStopSec=", "Restart=", "RestartSec="];
    let published = fs::read_to_string(root().join("docs/deploy/moec.service")).unwrap();
    let unit: Vec<&str> = published.lines().filter(|l| kept.iter().any(|key| l.starts_with(key))).collect();
    assert_eq!(unit.len(), kept.len(), "{published}");
    fs::write(
        folder.path().join("moec.service"),
        format!(
            "[Unit]\nDefaultDependencies=no\n{}\nWorkingDirectory={}\nExecStart={}\n{}",
            unit.join("\n"),
            folder.path().display(),
            words.join(" "),
            variables.collect::<String>()
        ),
    )
    .unwrap();
    let units = "mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system && cp moec.service /run/systemd/system \
                 && exec /usr/lib/systemd/systemd --system --unit=moec.service --log-target=console";
    let mut supervisor = Command::new("unshare");
    supervisor.args([
        "--pid",
        "--mount",
        "--cgroup",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        units,
    ]);
    supervisor.current_dir(folder.path()).env("container", "test");
    supervisor.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut supervisor = Ends(supervisor.spawn().unwrap());
    let address = format!("127.0.0.1:{port}");
    let body =
        json!({"prompt": "The borrow checker", "max_tokens": 12, "temperature": 0, "ignore_eos": true});
    let mut answers = Vec::new();
    for start in 0..2 {
        let begin = Instant::now();
        let answer = loop {
            match post(&address, "/v1/completions", body.clone()).call() {
                Ok(reply) => break serde_json::from_str::<Value>(&reply.body).unwrap(),
                Err(e) => assert!(begin.elapsed() < END, "start {start}: {e}"),
            }
            assert!(supervisor.0.try_wait().unwrap().is_none(), "systemd has ended");
            std::thread::sleep(Duration::from_millis(100));
        };
        answers.push(answer["choices"][0]["text"].clone());
        let other = process(&bundle, 1).expect("the other host serves");
        // SAFETY: a signal to a process of this test.
        assert_eq!(unsafe { libc::kill(other, libc::SIGKILL) }, 0);
        while process(&bundle, 1) == Some(other) {
            assert!(begin.elapsed() < END, "it goes on");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    assert!(
        answers[0].as_str().is_some_and(|text| !text.is_empty()) && answers[0] == answers[1],
        "{answers:?}"
    );
    drop(supervisor);
    gone(&bundle);
}

/// A process that ends with the test; the first of its namespace takes all others along.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A conversation through a pipe.
#[test]
fn chat_on_several_hosts_answers_as_on_one() {
    let folder = tempfile::tempdir().unwrap();
    let template = root().join("golden/plain.jinja");
    let turns = |mut command: Command| {
        command.args(["chat", "--json", "-n", "12", "--threads", "1", "--template"]).arg(&template);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let turns = b"The borrow checker\nWhat is a trait?\nAnd a lifetime?\n";
        child.stdin.take().unwrap().write_all(turns).unwrap();
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success());
        let texts = String::from_utf8(done.stdout).unwrap();
        let text = |line: &str| serde_json::from_str::<Value>(line).unwrap()["text"].clone();
        texts.lines().map(text).collect::<Vec<_>>()
    };
    for placement in CUTS {
        let bundle = cut(folder.path(), placement);
        let alone = turns(run(&bundle, None));
        assert_eq!(alone.len(), 3);
        for of in LAUNCHERS.iter().filter(|(need, ..)| need.met_or_skip()) {
            assert_eq!(turns(launched(&bundle, of)), alone, "{}: {placement}", of.1);
        }
    }
}

/// Statistics of messages are in the reports of `bench` and `generate`, and are those of the model's layers.
#[test]
fn reports_count_messages_to_hosts() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path());
    let Some(of) = LAUNCHERS.iter().find(|(need, ..)| need.met_or_skip()) else { return };
    let trips = |n: &str| {
        let args = ["generate", "--ids", "1,2,3", "-n", n, "--ignore-eos", "--json", "--threads", "1"];
        let report: Value = serde_json::from_slice(&ok(launched(&bundle, of).args(args)).stdout).unwrap();
        assert!(report["hosts"]["waited_s"].as_f64().unwrap() > 0.0, "{report}");
        report["hosts"]["round_trips"].as_u64().unwrap()
    };
    // A message and its answer for each layer of experts.
    let config: Value = serde_json::from_slice(&fs::read(ferris().join("config.json")).unwrap()).unwrap();
    assert_eq!(trips("12") - trips("2"), 10 * config["num_hidden_layers"].as_u64().unwrap());
    let bench = ok(launched(&bundle, of).args(["bench", "--prompt", "8", "--gen", "4", "--threads", "1"]));
    let text = String::from_utf8(bench.stdout).unwrap();
    assert!(
        text.lines().any(|line| line.starts_with("hosts: ") && line.contains(" round trips; ")),
        "{text}"
    );
    // The first host reads whole files of its own into memory, and needs no others.
    let args = ["bench", "--prompt", "8", "--gen", "4", "--threads", "1", "--json"];
    let report: Value = serde_json::from_slice(&ok(launched(&bundle, of).args(args)).stdout).unwrap();
    let files = fs::metadata(bundle.join("weights/dense.bin")).unwrap().len();
    let held = report["weights"]["bytes"].as_u64().unwrap();
    let most = files + fs::metadata(bundle.join("weights/experts.bin")).unwrap().len() + (16 << 20);
    assert!(report["weights"]["own"] == true && held >= files && held < most, "{report}");
    // One process has no messages.
    let alone = ok(run(&bundle, None).args(["bench", "--prompt", "8", "--gen", "4", "--json"]));
    assert!(serde_json::from_slice::<Value>(&alone.stdout).unwrap().get("hosts").is_none());
}
