//! Two hosts whose connection is cut: network namespaces of this machine, with a cable between them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::host_faults::{ANSWER, bundle, numbers};
use crate::hosts::{process, run};
use crate::support::{clean, ok};
use moec_testing::{NAMESPACES, OPEN_MPI};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use wait_timeout::ChildExt as _;

/// Time that a job has to end: its own limit, and that of Open MPI's launcher and daemon, on a machine with other tests.
const PATIENCE: Duration = Duration::from_secs(40);
/// Setting of a host with which a connection ends 6 s after bytes that are not confirmed. Keep-alive is for connections
/// that wait for nothing.
const RETRIES: (&str, &str) = ("/proc/sys/net/ipv4/tcp_retries2", "4");
/// Options with which a daemon of Open MPI soon finds that its launcher is gone.
const KEEP_ALIVE: [&str; 9] = [
    "--mca",
    "oob_tcp_keepalive_time",
    "2",
    "--mca",
    "oob_tcp_keepalive_intvl",
    "1",
    "--mca",
    "oob_tcp_keepalive_probes",
    "2",
];

/// Two hosts with a cable.
struct Cable {
    names: [String; 2],
    ends: [String; 2],
}

const ADDRESSES: [&str; 2] = ["10.213.78.1", "10.213.78.2"];

fn ip(words: &[&str]) {
    ok(clean(Command::new("ip")).args(words));
}

impl Cable {
    fn new() -> Self {
        let id = std::process::id();
        let cable = Self {
            names: [0, 1].map(|i| format!("moec{id}-{i}")),
            ends: [0, 1].map(|i| format!("m{id}-{i}")),
        };
        let ([first, second], [one, other]) = (&cable.names, &cable.ends);
        ip(&["netns", "add", first]);
        ip(&["netns", "add", second]);
        ip(&["link", "add", one, "netns", first, "type", "veth", "peer", "name", other, "netns", second]);
        for ((name, end), address) in cable.names.iter().zip(&cable.ends).zip(ADDRESSES) {
            ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", end]);
            ip(&["-n", name, "link", "set", "lo", "up"]);
            ip(&["-n", name, "link", "set", end, "up"]);
            let (setting, value) = RETRIES;
            ip(&["netns", "exec", name, "sh", "-c", &format!("echo {value} > {setting}")]);
        }
        cable
    }

    fn set(&self, state: &str) {
        ip(&["-n", &self.names[1], "link", "set", &self.ends[1], state]);
    }

    /// A command of MPI's launcher on the first host, which starts a process on each. `folder` gets a program in place of
    /// ssh, since both are this machine.
    fn launched(&self, folder: &Path, command: &Command) -> Command {
        let [first, second] = &self.names;
        let shell = folder.join("remote-shell");
        let named = |name: &str, rest: &str| format!("hostname {name}; exec {rest}");
        let inside = named(second, "sh -c \"$0\"");
        let text =
            format!("#!/bin/sh\nshift\nexec ip netns exec {second} unshare --uts sh -c '{inside}' \"$*\"\n");
        fs::write(&shell, text).unwrap();
        fs::set_permissions(&shell, fs::Permissions::from_mode(0o755)).unwrap();
        let mut mpirun = clean(Command::new("ip"));
        mpirun.args(["netns", "exec", first, "unshare", "--uts", "sh", "-c", &named(first, "\"$0\" \"$@\"")]);
        mpirun.args(["mpirun.openmpi", "--mca", "plm_rsh_agent"]).arg(&shell).args(KEEP_ALIVE);
        mpirun.args(["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "10.213.78.0/24"]);
        mpirun.args([
            "--bind-to",
            "none",
            "--host",
            &ADDRESSES.map(|a| format!("{a}:1")).join(","),
            "-n",
            "2",
        ]);
        mpirun.args(["-x", "MOEC_HOST_TIMEOUT"]).arg(command.get_program()).args(command.get_args());
        mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        mpirun.env("MOEC_HOST_TIMEOUT", "1");
        mpirun
    }

    /// Ends everything on both hosts: a daemon of MPI may wait for ever.
    fn end_processes(&self) {
        for name in &self.names {
            let pids = Command::new("ip").args(["netns", "pids", name]).output().unwrap().stdout;
            for pid in String::from_utf8_lossy(&pids).lines().filter_map(|pid| pid.parse().ok()) {
                // SAFETY: a signal to a process that this test has started.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
        }
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.end_processes();
        // A namespace takes its end of the cable along.
        for name in &self.names {
            drop(Command::new("ip").args(["netns", "del", name]).status());
        }
    }
}

/// Whatever the moment: the job ends, its processes, too, and it has printed the begin of the right answer.
#[test]
fn jobs_end_when_their_connection_is_cut() {
    if !(OPEN_MPI.met_or_skip() && NAMESPACES.met_or_skip()) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path());
    let right = ok(run(&bundle, None).args(ANSWER)).stdout;
    let cable = Cable::new();
    let mut command = run(&bundle, None);
    command.args(ANSWER);
    // The first start compiles the library.
    ok(&mut cable.launched(folder.path(), &command));
    let begin = Instant::now();
    assert_eq!(ok(&mut cable.launched(folder.path(), &command)).stdout, right);
    let whole = begin.elapsed();
    let mut hits = 0;
    for share in numbers().take(if moec_testing::all() { 12 } else { 3 }) {
        let (out, errors) = (folder.path().join("out"), folder.path().join("errors"));
        let mut job = cable.launched(folder.path(), &command);
        // A daemon of MPI may hold the ends of pipes.
        job.stdin(Stdio::null())
            .stdout(fs::File::create(&out).unwrap())
            .stderr(fs::File::create(&errors).unwrap());
        let mut job = job.spawn().unwrap();
        let after = whole.mul_f64(share);
        std::thread::sleep(after);
        cable.set("down");
        let ended = job.wait_timeout(PATIENCE).unwrap();
        let (printed, errors) = (fs::read_to_string(&out).unwrap(), fs::read_to_string(&errors).unwrap());
        // Open MPI's daemon on a host without a connection says so there, too.
        let printed = printed.split("----").next().unwrap();
        let what = format!("cut after {after:?}: {errors}");
        let status = ended.unwrap_or_else(|| panic!("the job does not end, {what}"));
        assert!(right.starts_with(printed.trim_end().as_bytes()), "{what}\n{printed}");
        assert!(!errors.contains("panicked"), "{what}");
        if status.success() {
            assert_eq!(printed.as_bytes(), right, "{what}");
        } else {
            hits += 1;
            let by_launcher = ["ORTE has lost communication", "unable to reliably start", "lost connection"];
            let named = errors.contains("error: host 1 ") || errors.contains("error: MPI waits for");
            assert!(named || by_launcher.iter().any(|text| errors.contains(text)), "{what}");
        }
        let begin = Instant::now();
        while (0..2).any(|rank| process(&bundle, rank).is_some()) {
            assert!(begin.elapsed() < PATIENCE, "a process goes on, {what}");
            std::thread::sleep(Duration::from_millis(50));
        }
        cable.end_processes();
        cable.set("up");
    }
    assert!(hits > 0, "no cut came in time");
}
