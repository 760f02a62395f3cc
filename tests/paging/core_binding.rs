//! Cores of a run: one reads from disk and others compute, by the clocks that the operating system states.

use super::*;
use moec_ir::plan::CoreClass;
use moec_runtime::exec::unit::LayerPart;
use moec_runtime::offload::disk::{Read, ReadResult, Reader, Wake};
use moec_runtime::offload::paging::Hooks;
use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};

/// Cores that the calling thread may use, by proc(5).
fn allowed() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap();
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse::<usize>().unwrap()..=last.parse().unwrap()
    };
    list.trim().split(',').flat_map(range).collect()
}

/// Sets of cores that threads of a run may use.
#[derive(Debug, Default)]
struct Observed {
    reading: Mutex<BTreeSet<Vec<usize>>>,
    computing: Mutex<BTreeSet<Vec<usize>>>,
}

impl Hooks for Observed {
    fn requested(&self, _: usize, _: usize) {
        self.computing.lock().unwrap().insert(allowed());
    }

    fn computed(&self, _: LayerPart) {
        self.computing.lock().unwrap().insert(allowed());
    }
}

/// A reader that records the cores of the thread that starts reads.
struct Recording(Box<dyn Reader>, &'static Observed);

impl Reader for Recording {
    fn depth(&self) -> usize {
        self.0.depth()
    }

    unsafe fn submit(&mut self, reads: &[Read]) -> io::Result<()> {
        self.1.reading.lock().unwrap().insert(allowed());
        // SAFETY: the caller's guarantee is this call's.
        unsafe { self.0.submit(reads) }
    }

    fn wait(&mut self, done: &mut Vec<ReadResult>, at_most: Option<Duration>) -> io::Result<()> {
        self.0.wait(done, at_most)
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.0.waker()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }
}

/// A folder in the form of the kernel's, with a core of 3 GHz and others of `others` kHz.
fn kernel_folder(folder: &Path, fast: usize, others: &str) -> &'static str {
    for core in allowed() {
        let of = folder.join(format!("cpu{core}/cpufreq"));
        std::fs::create_dir_all(&of).unwrap();
        let khz = if core == fast { "3000000\n" } else { others };
        std::fs::write(of.join("cpuinfo_max_freq"), khz).unwrap();
    }
    Box::leak(folder.to_str().unwrap().to_owned().into_boxed_str())
}

fn kinds() -> Vec<CoreClass> {
    let class = |name: &str, reads| CoreClass { name: name.into(), count: 1, computes: true, reads };
    vec![class("big", true), class("little", false)]
}

/// Runs a prompt with these settings. Returns the logits, the number of threads, and the sets of cores.
fn observed(
    bundle: &Bundle,
    (threads, reader): (Option<usize>, Choice),
    cores: &'static str,
    prompt: &[u32],
) -> (Vec<u32>, usize, &'static Observed) {
    let seen: &'static Observed = Box::leak(Box::default());
    let wrap = Box::leak(Box::new(move |reader| Box::new(Recording(reader, seen)) as Box<dyn Reader>));
    let mut plan: Plan = bundle.plan.clone();
    let own = plan.paging.as_mut().unwrap();
    (own.frames, own.staging, own.cores) = (USUAL.frames, USUAL.staging, kinds());
    let unit = bundle.unit().unwrap();
    let program = Program::new(plan, &|s| unit.resolve(s)).unwrap();
    let settings = Paging { hooks: Some(seen), cores, ..paging(Case { reader, ..USUAL }, Some(Wrap(wrap))) };
    let options = Options { threads, paging: Some(settings), ..Options::default() };
    let mut engine = Engine::open(&program, &bundle.folder, options).unwrap();
    let found = logits(&mut engine, prompt).unwrap();
    (found, engine.threads(), seen)
}

#[test]
fn a_fast_core_reads_and_the_others_compute() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = Bundle::open(&build(&ferris(), folder.path(), "budget = \"1 GiB\"", "bf16")).unwrap();
    let prompt = &expected(&ferris()).ids[..24];
    let want = in_memory(&bundle, prompt);
    let all = allowed();
    let (fast, others) = (all[0], all[1..].to_vec());
    // With one core in all, nothing is left to compute, and threads that compute are not bound.
    let computing = if others.is_empty() { all.clone() } else { others.clone() };
    let phone = kernel_folder(&folder.path().join("phone"), fast, "1000000\n");
    let equal = kernel_folder(&folder.path().join("equal"), fast, "3000000\n");
    let only = |cores: &Vec<usize>| BTreeSet::from([cores.clone()]);
    for reader in [Choice::Threads, Choice::Auto] {
        let (found, threads, seen) = observed(&bundle, (None, reader), phone, prompt);
        assert!(found == want, "{reader:?}: other logits");
        assert_eq!(threads, others.len().clamp(1, 3));
        if !others.is_empty() {
            assert_eq!(*seen.reading.lock().unwrap(), only(&vec![fast]), "{reader:?}");
        }
        assert_eq!(*seen.computing.lock().unwrap(), only(&computing), "{reader:?}");
        // The thread that opened and called the engine has all cores again.
        assert_eq!(allowed(), all);
    }
    // The user's number of threads counts. More threads than cores that compute are not bound.
    let (found, threads, seen) = observed(&bundle, (Some(3), Choice::Auto), phone, prompt);
    assert!(found == want && threads == 3);
    let computing = if others.len() >= 3 { others } else { all.clone() };
    assert_eq!(*seen.computing.lock().unwrap(), only(&computing));
    // Where all cores are alike, threads are bound to none.
    let (found, threads, seen) = observed(&bundle, (Some(2), Choice::Auto), equal, prompt);
    assert!(found == want && threads == 2);
    assert_eq!(*seen.reading.lock().unwrap(), only(&all));
    assert_eq!(*seen.computing.lock().unwrap(), only(&all));
}

#[test]
fn device_file_gives_the_plan_its_cores_and_info_says_how_they_are_used() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = |name: &str, cores: u32, ghz: f64| {
        format!(
            "[[unit.cluster]]\nname = \"{name}\"\ncores = {cores}\nghz = {{ value = {ghz}, source = \"a test\" }}\n"
        )
    };
    let device = |reads_on: &str| {
        let path = folder.path().join("phone.toml");
        let text = format!(
            "name = \"phone\"\ndescription = \"this machine\"\nbackend = \"cpu\"\ntriple = \"native\"\n\
             cpu = \"native\"\n[[unit]]\nname = \"cpu\"\nkind = \"cpu\"\ncores = 8\nsource = \"a test\"\n{}{}{}\
             [[memory]]\nname = \"disk\"\nreads_on = {{ value = \"{reads_on}\", source = \"a test\" }}\n",
            cluster("big", 1, 3.3),
            cluster("middle", 5, 3.0),
            cluster("little", 2, 2.2),
        );
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let toml = folder.path().join("model.toml");
    let text = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 32\n[memory]\nbudget = \"1 GiB\"\n",
        ferris().display()
    );
    std::fs::write(&toml, text).unwrap();
    let path = folder.path().join("b");
    built(&toml, &["--target", &device("big")], &path);
    let paging = Bundle::open(&path).unwrap().plan.paging.unwrap();
    let kinds: Vec<_> = paging.cores.iter().map(|c| (&*c.name, c.count, c.computes, c.reads)).collect();
    let expected = [("big", 1, true, true), ("middle", 5, true, false), ("little", 2, false, false)];
    assert_eq!((kinds, paging.threads), (expected.to_vec(), 5));

    let info = |arguments: &[&str]| {
        let output = ok(moec().arg("run").arg(&path).arg("info").args(arguments));
        String::from_utf8(output.stdout).unwrap()
    };
    let json: serde_json::Value = serde_json::from_str(&info(&["--json"])).unwrap();
    let cores = json["paging"]["cores"].as_str().unwrap();
    // A machine that is such a phone binds its threads; another one has a reason.
    assert!(cores.starts_with("core ") || cores.starts_with("threads are not bound: "), "{cores}");
    assert!(info(&[]).contains(&format!("\ncores         {cores}\n")), "{cores}");

    let unknown = device("huge");
    let (_, stderr) = fails(moec().arg("build").arg(&toml).args(["--target", &unknown]));
    assert!(
        stderr.contains("no cluster of the CPU is named `huge`; it has `big`, `middle`, `little`"),
        "{stderr}"
    );
}
