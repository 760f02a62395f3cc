//! Several hosts give the bits of one: experts cut into slices, on units of other processes.
#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support::{built, checkpoint, expected, fails, finish, list, moec, ok};
use moec_testing::{MPICH, Need, OPEN_MPI};
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Launchers of MPI, each with the options for several processes on one machine.
pub const LAUNCHERS: [(&Need, &str, &[&str]); 2] =
    [(&OPEN_MPI, "mpirun.openmpi", &["--oversubscribe"]), (&MPICH, "mpirun.mpich", &[])];

/// Builds a family for a target, with these lines under `[placement]`; several hosts have slices without any.
pub fn build(family: &str, folder: &Path, target: &str, placement: &str) -> PathBuf {
    let slices = target != "native" && placement.is_empty();
    let placement = if slices { "hosts = \"slices\"" } else { placement };
    let toml = folder.join(format!("{target}.toml"));
    let text = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 96\nprefill_chunk = 20\ndecode_batch = [1, 2]\n\
         [placement]\n{placement}\n",
        checkpoint(family).display()
    );
    fs::write(&toml, text).unwrap();
    let bundle = folder.join(format!("{target}.moec"));
    built(&toml, &["--target", target], &bundle);
    bundle
}

/// `moec`, as a launcher starts it so many times; without a launcher, once.
pub fn start(launched: Option<(&str, &[&str], usize)>) -> Command {
    let mut command = moec();
    if let Some((launcher, options, processes)) = launched {
        let program = command.get_program().to_owned();
        command = crate::support::clean(Command::new(launcher));
        // A test may run as root, in a container.
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        // The transport of MPICH writes its own errors to standard output otherwise.
        command.env("UCX_LOG_FILE", "stderr");
        command.args(options).args(["-n", &processes.to_string()]).arg(program);
    }
    command
}

/// `moec run` of a bundle, as a launcher starts it so many times; without a launcher, once.
pub fn run(bundle: &Path, launched: Option<(&str, &[&str], usize)>) -> Command {
    let mut command = start(launched);
    command.arg("run").arg(bundle);
    command
}

/// Logits of a prompt, to the bit, and tokens after it.
pub fn answers(bundle: &Path, prompt: &[u32], launched: Option<(&str, &[&str], usize)>) -> (Vec<u8>, String) {
    let out = bundle.with_extension("safetensors");
    let common = ["--threads", "2", "--ids", &list(prompt)];
    ok(run(bundle, launched).arg("logits").args(common).arg("--out").arg(&out));
    let tokens = ok(run(bundle, launched).arg("generate").args(common).args(["-n", "12", "--quiet"]));
    (fs::read(&out).unwrap(), String::from_utf8(tokens.stdout).unwrap())
}

#[test]
fn hosts_give_the_bits_of_slices_on_one() {
    let launchers: Vec<_> = LAUNCHERS.iter().filter(|(need, ..)| need.met_or_skip()).collect();
    let families = [("olmoe", 2), ("gpt_oss", 3), ("qwen3_next", 2), ("deepseek_v3", 3)];
    for (family, hosts) in families {
        let folder = tempfile::tempdir().unwrap();
        let prompt = &expected(&checkpoint(family)).ids;
        let one = build(family, folder.path(), "native", &format!("slices = {hosts}"));
        let several = build(family, folder.path(), &format!("native-x{hosts}"), "");
        let want = answers(&one, prompt, None);
        assert_eq!(answers(&several, prompt, None), want, "{family}: {hosts} hosts in one process");
        for (_, launcher, options) in &launchers {
            let launched = Some((*launcher, *options, hosts));
            assert_eq!(answers(&several, prompt, launched), want, "{family}: {hosts} hosts by {launcher}");
        }
    }
}

/// A host has one slice of an expert on its disk.
#[test]
fn budgets_of_several_slices_on_a_host_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let toml = folder.path().join("model.toml");
    for (target, slices) in [("native", 2), ("native-x2", 3)] {
        let text = format!(
            "[model]\nsource = \"{}\"\n[memory]\nbudget = \"1 GiB\"\n[placement]\nslices = {slices}\n",
            checkpoint("olmoe").display()
        );
        fs::write(&toml, text).unwrap();
        let (_, error) = fails(moec().arg("build").arg(&toml).args(["--target", target, "--no-run"]));
        assert!(error.contains("cannot be combined with `budget` under `[memory]`"), "{target}: {error}");
    }
}

/// A host needs the bundle without the weights of others.
#[test]
fn hosts_read_their_own_weights() {
    let Some((_, launcher, options)) = LAUNCHERS.iter().find(|(need, ..)| need.met_or_skip()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let whole = build("olmoe", folder.path(), "native-x2", "");
    let parts = [("first", ["ram1.bin"].as_slice()), ("second", &["dense.bin", "experts.bin"])].map(
        |(name, others)| {
            let part = folder.path().join(name);
            ok(crate::support::clean(Command::new("cp")).arg("-r").arg(&whole).arg(&part));
            for file in others {
                fs::remove_file(part.join("weights").join(file)).unwrap();
            }
            part
        },
    );
    let generate = ["generate", "--ids", "1,2,3,4", "-n", "8", "--quiet"];
    let want = ok(run(&whole, None).args(generate)).stdout;
    let mut command = run(&parts[0], Some((launcher, options, 1)));
    command
        .args(generate)
        .args([":", "-n", "1"])
        .arg(moec().get_program())
        .arg("run")
        .arg(&parts[1])
        .args(generate);
    assert_eq!(ok(&mut command).stdout, want);
    // The parts exchanged: each lacks what it needs.
    let mut command = run(&parts[1], Some((launcher, options, 1)));
    command
        .args(generate)
        .args([":", "-n", "1"])
        .arg(moec().get_program())
        .arg("run")
        .arg(&parts[0])
        .args(generate);
    assert!(fails(&mut command).1.contains("is missing from the bundle"));
}

#[test]
fn too_few_processes_and_other_programs_are_refused_by_name() {
    let Some((_, launcher, options)) = LAUNCHERS.iter().find(|(need, ..)| need.met_or_skip()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let three = build("olmoe", folder.path(), "native-x3", "");
    let generate = ["generate", "--ids", "1,2,3", "-n", "2"];
    let (_, error) = fails(run(&three, Some((launcher, options, 2))).args(generate));
    assert!(error.contains("2 processes were started, and the program has more hosts"), "{error}");
    // Processes past the last host have nothing to do.
    ok(run(&three, Some((launcher, options, 4))).args(generate));
    // The second process runs another program.
    let other = build("qwen3_moe", folder.path(), "native-x2", "");
    let two = folder.path().join("two.moec");
    let toml = folder.path().join("native-x2.toml");
    let text = fs::read_to_string(&toml)
        .unwrap()
        .replace(&checkpoint("qwen3_moe").display().to_string(), &checkpoint("olmoe").display().to_string());
    fs::write(&toml, text).unwrap();
    built(&toml, &["--target", "native-x2"], &two);
    let mut command = run(&two, Some((launcher, options, 1)));
    command
        .args(generate)
        .args([":", "-n", "1"])
        .arg(moec().get_program())
        .arg("run")
        .arg(&other)
        .args(generate);
    let out = finish(&mut command);
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && error.contains("and the first host moec"), "{error}");
}

/// The process of this rank that has the bundle's path among its arguments; `None`: there is none, or no longer.
pub fn process(bundle: &Path, rank: usize) -> Option<i32> {
    let has = |file: PathBuf, text: &str| {
        fs::read(file).is_ok_and(|bytes| String::from_utf8_lossy(&bytes).split('\0').any(|word| word == text))
    };
    let ranks = [format!("OMPI_COMM_WORLD_RANK={rank}"), format!("PMI_RANK={rank}")];
    let own = |folder: &PathBuf| {
        ranks.iter().any(|rank| has(folder.join("environ"), rank))
            && has(folder.join("cmdline"), &bundle.display().to_string())
    };
    let all = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    all.into_iter().find(own)?.file_name()?.to_str()?.parse().ok()
}

/// A host that ends or stops does not leave the job waiting.
#[test]
fn jobs_end_with_a_host_that_ends_or_stops() {
    let Some((_, launcher, options)) = LAUNCHERS.iter().find(|(need, ..)| need.met_or_skip()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let bundle = build("olmoe", folder.path(), "native-x2", "");
    for (signal, says) in
        [(libc::SIGKILL, &[][..]), (libc::SIGSTOP, &["host 1 ", "hint: `MOEC_HOST_TIMEOUT`"])]
    {
        let mut command = run(&bundle, Some((launcher, options, 2)));
        command.args(["bench", "--stdin"]).env("MOEC_HOST_TIMEOUT", "2");
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (mut input, mut output) =
            (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut line = String::new();
        writeln!(input, "8 4 1").unwrap();
        output.read_line(&mut line).unwrap();
        assert!(line.contains("decode_tokens_per_s"), "{line}");
        let process = process(&bundle, 1).expect("the process runs");
        // SAFETY: a signal to a process of this test.
        assert_eq!(unsafe { libc::kill(process, signal) }, 0);
        // The job may have ended already.
        let _ = writeln!(input, "8 4 1");
        let begin = Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(begin.elapsed() < Duration::from_mins(1), "the job does not end");
            std::thread::sleep(Duration::from_millis(50));
        }
        let out = child.wait_with_output().unwrap();
        let error = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && says.iter().all(|words| error.contains(words)), "{error}");
    }
}
