//! `moec profile-device`: measures this machine and writes a device file.
#![expect(clippy::cast_possible_truncation, reason = "figures for readers, and indices of a plan")]

mod hosts;
mod npu;

use super::output;
use moec_backend::Peer;
use moec_base::progress::Progress;
use moec_base::{Error, Result, disk, human};
use moec_cpu::roofline::{self, GpuRates, Roofline};
use moec_cpu::{CpuTarget, DISK, TuneError};
use moec_device::{
    Bandwidth, CPU_BACKEND, Device, DeviceUnit, Figure, LegalOps, Link, MatmulTime, Memory, NATIVE, Peak,
    RangeBandwidth, UnitKind,
};
use moec_runtime::offload::disk::{Choice, Options};
use moec_runtime::platform::cpu;
use moec_sim::disk::measure::{DiskRates, Rate, Scratch, measure_rates, points};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Bytes that one access of the measured stream of reads takes.
const BLOCK: u64 = 64;

/// Fewest bytes of a file that is measured: an eighth of them must hold some of the smallest blocks.
const LEAST_FILE: u64 = 4 << 20;

/// Measure this machine and write a device file
///
/// Measures the peak rates of f32, bf16 and int8 arithmetic, memory bandwidth, caches, the cost of starting a
/// step, the time of a bf16 expert by its number of rows and, with `--disk`, the read rates of a disk. With
/// `--hosts`, it measures several machines and the network between them. The file can be used as `--target FILE`
/// on any machine. Takes about ten seconds; other programs disturb the measurement.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Folder to write `NAME.toml` to [default: print it to stdout]
    pub dir: Option<PathBuf>,
    /// Name of the device [default: LLVM's name of this CPU]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Threads [default: `MOEC_THREADS`, else one per core]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Also measure the NVIDIA GPU of this machine: launches, memory, the link in both directions, and the
    /// time of an expert by its number of rows
    #[arg(long)]
    pub gpu: bool,
    /// Also measure the NPU of this machine, which the file of this target describes: launches, the time of an
    /// expert by its number of rows, and bandwidth, alone and while the CPU reads. Limits and operators stay
    /// those of that file; so do all figures if the machine has no such NPU
    #[arg(long, value_name = "TARGET", conflicts_with = "no_matmul")]
    pub npu: Option<String>,
    /// Measure the hosts of this job and the network between them, started by a launcher of MPI: all measure
    /// themselves at the same time, then the first its connection with each: latency by size of messages, and
    /// bandwidth in both directions. With `--disk`, each measures its own, and the file has the slowest
    #[arg(long, conflicts_with_all = ["gpu", "npu"])]
    pub hosts: bool,
    /// Do not measure the time of an expert by its number of rows (`matmul`), which takes longest; costs are
    /// then estimated from peak rates and bandwidth
    #[arg(long)]
    pub no_matmul: bool,
    /// Also measure a disk: with a temporary file in a folder, or with an existing file such as a bundle's
    /// weights; `MOEC_DISK_READER` selects the reader (`io_uring`, `pread`)
    #[arg(long, value_name = "FOLDER|FILE")]
    pub disk: Option<PathBuf>,
    /// Size of the temporary file in MiB, which must exceed the drive's own cache
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u32).range(4..=65536))]
    pub disk_size: u32,
    /// Duration of each disk measurement in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=60000))]
    pub disk_time: u32,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Measures this machine and writes the device file.
///
/// # Errors
/// Fails if the file exists or cannot be written, or the name is invalid.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    let start = Instant::now();
    let links = args.hosts.then(moec_targets::backends::links).transpose()?;
    let silent = Progress::silent();
    let is_first = links.as_ref().is_none_or(|links| links.is_first());
    let progress = if is_first { progress } else { &silent };
    let threads = cpu::threads(args.threads).map_err(Error::from)?;
    let native = CpuTarget::new(&Device::find(NATIVE).map_err(|e| Error::bug(e.to_string()))?)
        .map_err(|e| Error::limit("moec cannot compile for this machine").because(e))?;
    let info = native.info();
    let name = args.name.clone().unwrap_or_else(|| info.cpu.clone());
    let path = args.dir.as_ref().map(|dir| dir.join(format!("{name}.toml")));
    if let Some(path) = path.as_ref().filter(|p| p.exists()) {
        return Err(Error::usage(format!("`{}` exists already", path.display()))
            .hint("give another `--name`, or remove it first"));
    }
    // A missing GPU is reported before the measurements, which take seconds.
    let gpu = args.gpu.then(moec_targets::backends::bench).transpose()?;
    let npu = args.npu.as_ref().map(|target| npu::measure(target, threads, progress)).transpose()?;
    let found = roofline::measure(threads, &mut |what| progress.stage("Measured", what))
        .map_err(|e| Error::environment("this machine cannot be measured").because(e))?;
    let mut memory = memory(&found);
    if let Some(links) = &links {
        hosts::read_memories(links.as_ref(), threads, &mut memory)?;
        progress.stage("Measured", &format!("the memories of {} hosts", links.hosts()));
    }
    let disk = args.disk.as_ref().map(|path| measure_disk(path, args, progress)).transpose()?;
    let mut tick = |what: &str| progress.stage("Measured", what);
    let gpu = gpu
        .map(|(backend, mut gpu)| {
            let rates = roofline::measure_gpu(gpu.as_mut(), &native, !args.no_matmul, &mut tick)?;
            Ok::<_, Error>((backend, rates))
        })
        .transpose()?;
    let mut device = Device {
        description: format!("{}, measured by `moec profile-device`", cpu_name()),
        backend: CPU_BACKEND.to_owned(),
        triple: info.triple,
        cpu: info.cpu,
        features: info.features.into_iter().filter(|f| cpu::missing(&[f]).is_empty()).collect(),
        legal_ops: LegalOps::All,
        hosts: Vec::new(),
        units: vec![unit(&found)],
        memories: [Some(memory), disk.as_ref().map(disk_memory)].into_iter().flatten().collect(),
        caches: moec_device::host_caches(),
        links: Vec::new(),
        power: None,
        name,
    };
    if !args.no_matmul {
        let table = measure_experts(&device, threads, progress)?;
        device.units.iter_mut().for_each(|unit| unit.matmul.clone_from(&table));
    }
    if let Some((backend, gpu)) = &gpu {
        add_gpu(&mut device, backend, gpu);
    }
    if let Some(npu) = &npu {
        npu::add(&mut device, npu, found.read_gb_per_s.all);
    }
    let mut peers = Vec::new();
    if let Some(links) = &links {
        let met = hosts::meet(links.as_ref(), &device)?;
        let Some(joined) = met else { return Ok(()) };
        (device, peers) = joined;
        progress.stage("Measured", &format!("the links of {} hosts", peers.len() + 1));
    }
    let text = toml::to_string(&device).map_err(|e| Error::bug("a device cannot be written").because(e))?;
    // The written text must parse: the name may be invalid.
    let device = Device::parse(&text, path.as_deref().unwrap_or(Path::new("stdout")))
        .map_err(|e| Error::usage(e.to_string()).hint("`--name` takes letters, digits, `-`, `_` and `.`"))?;
    if let Some(path) = &path {
        let failed = |e| Error::environment(format!("`{}` cannot be written", path.display())).because(e);
        path.parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| fs::write(path, &text))
            .map_err(failed)?;
        progress.finished(&format!("`{}`", path.display()), start);
    }
    match (args.json, path) {
        (true, path) => output::json(&report(
            &device,
            &found,
            (disk.as_ref(), gpu.as_ref().map(|(_, gpu)| gpu), npu.as_ref(), &peers),
            path.as_deref(),
        )),
        (false, None) => output::data(&text),
        (false, Some(_)) => Ok(()),
    }
}

/// Source of a measured figure.
fn source(what: &str, threads: usize, one: f64, unit: &str) -> String {
    format!("moec profile-device: {what}, {threads} threads; one thread: {one:.1} {unit}")
}

fn unit(found: &Roofline) -> DeviceUnit {
    let n = found.threads;
    let peak = |format: &str| {
        let p = found.best(format)?;
        let source = source(p.instruction, n, p.gops.one, "GOP/s");
        Some((format.to_owned(), Peak { gops: rounded(p.gops.all), source, achieved: None }))
    };
    DeviceUnit {
        name: "cpu".to_owned(),
        kind: UnitKind::Cpu,
        cores: Some(cpu::cores() as u32),
        source: Some("what the operating system lets this process use".to_owned()),
        dispatch_cost_us: Some(Figure {
            value: rounded(found.meeting_us),
            source: format!("moec profile-device: a barrier of {n} threads"),
        }),
        peak: ["f32", "bf16", "int8"].into_iter().filter_map(peak).collect(),
        ..DeviceUnit::default()
    }
}

fn memory(found: &Roofline) -> Memory {
    let read = found.read_gb_per_s;
    let what = "reading 128 MiB per thread, in order";
    Memory {
        name: "dram".to_owned(),
        capacity: memory_total()
            .map(|bytes| Figure { value: bytes as f64, source: "/proc/meminfo".to_owned() }),
        bandwidth: vec![Bandwidth {
            block_bytes: BLOCK,
            gb_per_s: rounded(read.all),
            source: source(what, found.threads, read.one, "GB/s"),
            achieved: None,
        }],
        ..Memory::default()
    }
}

/// Adds a GPU with its memory and its link to a device.
fn add_gpu(device: &mut Device, backend: &str, gpu: &GpuRates) {
    const NAMES: [&str; 2] = ["gpu", "vram"];
    let figure = |value: f64, what: &str| {
        Some(Figure { value: rounded(value), source: format!("moec profile-device: {what}, {}", gpu.name) })
    };
    let [unit, memory] = NAMES.map(str::to_owned);
    let own = device.memories.first().map(|m| m.name.clone());
    for cpu in &mut device.units {
        cpu.memory.clone_from(&own);
    }
    let best = gpu.experts.iter().max_by(|a, b| GpuRates::gops(a).total_cmp(&GpuRates::gops(b)));
    let peak = best.map(|t| {
        let source = format!("moec profile-device: experts of {} rows, {}", t.rows, gpu.name);
        ("bf16".to_owned(), Peak { gops: rounded(GpuRates::gops(t)), source, achieved: None })
    });
    device.description = format!("{}; with {}", device.description, gpu.name);
    device.units.push(DeviceUnit {
        name: unit,
        kind: UnitKind::Gpu,
        memory: Some(memory.clone()),
        backend: Some(backend.to_owned()),
        sm: Some(gpu.generation.to_owned()),
        source: Some("what the driver states".to_owned()),
        dispatch_cost_us: figure(gpu.launch_us, "a launch among others"),
        sync_cost_us: figure(gpu.wait_us, "what a wait adds to a launch"),
        peak: peak.into_iter().collect(),
        matmul: gpu.experts.iter().map(|t| MatmulTime { ms: rounded(t.ms), ..t.clone() }).collect(),
        ..DeviceUnit::default()
    });
    device.memories.push(Memory {
        name: memory.clone(),
        capacity: figure(gpu.capacity as f64, "what the driver states")
            .map(|f| Figure { value: gpu.capacity as f64, ..f }),
        bandwidth: vec![Bandwidth {
            block_bytes: BLOCK,
            gb_per_s: rounded(gpu.read_gb_per_s),
            source: format!("moec profile-device: one row is multiplied by a matrix of bf16, {}", gpu.name),
            achieved: None,
        }],
        ..Memory::default()
    });
    let ends = own.map(|own| [(own.clone(), memory.clone()), (memory, own)]);
    for ((from, to), gb_per_s) in ends.into_iter().flatten().zip(gpu.link_gb_per_s) {
        let source =
            format!("moec profile-device: copies of pinned memory, a small one with its wait, {}", gpu.name);
        let latency_us = Some(rounded(gpu.copy_us));
        device.links.push(Link { from, to, gb_per_s: rounded(gb_per_s), latency_us, source, achieved: None });
    }
}

/// Costs of an expert by its rows, with the kernels that a build for the device picks.
fn measure_experts(device: &Device, threads: usize, progress: &Progress) -> Result<Vec<MatmulTime>> {
    let failed = |e: TuneError| match e {
        TuneError::Threads(e) => Error::from(e),
        e => Error::bug("the kernels of an expert cannot be timed").because(e),
    };
    let target = CpuTarget::new(device).map_err(|e| failed(e.into()))?;
    let mut tick = |what: &str| progress.stage("Measured", what);
    let table = roofline::measure_experts(&target, threads, &mut tick).map_err(failed)?;
    Ok(table.into_iter().map(|t| MatmulTime { ms: rounded(t.ms), ..t }).collect())
}

/// Measures the disk of a folder, with a temporary file, or of an existing file.
fn measure_disk(path: &Path, args: &Args, progress: &Progress) -> Result<DiskRates> {
    let options = Options { reader: Choice::from_env().map_err(Error::from)?, ..Options::default() };
    let span = Duration::from_millis(args.disk_time.into());
    let mut tick = |r: &Rate| {
        let order = if r.point.random { "random" } else { "sequential" };
        let (block, depth) = (r.point.block_bytes >> 10, r.point.depth);
        progress.stage("Measured", &format!("{order} reads of {block} KiB, {depth} in flight"));
    };
    if let Some(file) = fs::metadata(path).ok().filter(fs::Metadata::is_file) {
        let (bytes, shown) = (file.len(), path.display());
        if bytes < LEAST_FILE {
            let least = human::bytes(LEAST_FILE);
            return Err(Error::input(format!("`{shown}` has {}: too small to measure", human::bytes(bytes)))
                .hint(format!("give a file of {least} or more, or a folder")));
        }
        return measure_rates(path, &points(bytes), &options, span, &mut tick).map_err(Error::from);
    }
    let mib = args.disk_size;
    let bytes = u64::from(mib) << 20;
    if disk::free_bytes(path).is_some_and(|free| free < bytes) {
        return Err(Error::environment(format!(
            "`{}` does not have {mib} MiB of free space",
            path.display()
        ))
        .hint("give another folder with `--disk`, or fewer MiB with `--disk-size`"));
    }
    let scratch = Scratch::create(path, bytes).map_err(Error::from)?;
    measure_rates(scratch.path(), &points(bytes), &options, span, &mut tick).map_err(Error::from)
}

fn disk_memory(disk: &DiskRates) -> Memory {
    let source = |r: &Rate| {
        let order = if r.point.random { "random" } else { "sequential" };
        format!(
            "moec profile-device: {order} reads within {} MiB, {} in flight; {}",
            r.point.range_bytes >> 20,
            r.point.depth,
            if disk.direct { "direct" } else { "through the page cache" },
        )
    };
    let figure = |r: Rate| Bandwidth {
        block_bytes: u64::from(r.point.block_bytes),
        gb_per_s: rounded(r.gb_per_s),
        achieved: None,
        source: source(&r),
    };
    let narrow = |r: &Rate| RangeBandwidth {
        range_bytes: r.point.range_bytes,
        block_bytes: u64::from(r.point.block_bytes),
        gb_per_s: rounded(r.gb_per_s),
        source: source(r),
    };
    Memory {
        name: DISK.to_owned(),
        bandwidth: disk.random().into_iter().map(figure).collect(),
        sequential: disk.sequential().into_iter().map(figure).collect(),
        ranges: disk.narrow().map(narrow).collect(),
        ..Memory::default()
    }
}

/// Rounds to three digits; measurements are less precise.
fn rounded(x: f64) -> f64 {
    let scale = 10_f64.powf(2.0 - x.abs().max(1e-9).log10().floor());
    (x * scale).round() / scale
}

fn memory_total() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Name of the CPU, or its architecture.
pub(super) fn cpu_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with("model name"));
    let name = line.and_then(|l| l.split_once(':')).map(|(_, n)| n.trim().to_owned());
    let name = name.or_else(mac).unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    memory_total().map_or(name.clone(), |m| format!("{name}, {} cores, {}", cpu::cores(), human::bytes(m)))
}

/// Name of this CPU in macOS.
fn mac() -> Option<String> {
    let output = cfg!(target_os = "macos")
        .then(|| Command::new("sysctl").args(["-n", "machdep.cpu.brand_string"]).output().ok());
    let out = output.flatten().filter(|out| out.status.success())?;
    Some(String::from_utf8_lossy(&out.stdout).trim().to_owned()).filter(|name| !name.is_empty())
}

/// All figures as JSON, including those of slower instructions.
fn report(
    device: &Device,
    found: &Roofline,
    (disk, gpu, npu, peers): (Option<&DiskRates>, Option<&GpuRates>, Option<&npu::Npu>, &[Peer]),
    path: Option<&Path>,
) -> Value {
    json!({
        "name": device.name,
        "description": device.description,
        "file": path,
        "triple": device.triple,
        "cpu": device.cpu,
        "features": device.features,
        "threads": found.threads,
        "peaks": found.peaks.iter().map(|p| json!({
            "format": p.format, "instruction": p.instruction,
            "gops_one_thread": p.gops.one, "gops": p.gops.all,
        })).collect::<Vec<_>>(),
        "read_gb_per_s_one_thread": found.read_gb_per_s.one,
        "read_gb_per_s": found.read_gb_per_s.all,
        "barrier_us": found.meeting_us,
        "matmul": device.units.iter().take(1).flat_map(|unit| &unit.matmul).collect::<Vec<_>>(),
        "caches": device.caches,
        "gpu": gpu.map(|gpu| json!({
            "name": gpu.name,
            "sm": gpu.generation,
            "memory_bytes": gpu.capacity,
            "launch_us": gpu.launch_us,
            "wait_us": gpu.wait_us,
            "read_gb_per_s": gpu.read_gb_per_s,
            "read_gb_per_s_stated": gpu.peaks.gb_per_s,
            "gops_stated": gpu.peaks.gops,
            "to_gb_per_s": gpu.link_gb_per_s[0],
            "from_gb_per_s": gpu.link_gb_per_s[1],
            "copy_us": gpu.copy_us,
            "expert": gpu.shape,
            "experts": gpu.experts.iter().map(|t| json!({
                "rows": t.rows, "ms": t.ms, "gops": GpuRates::gops(t), "gb_per_s": GpuRates::gb_per_s(t),
            })).collect::<Vec<_>>(),
        })),
        "npu": npu.map(npu::report),
        "hosts": (!peers.is_empty()).then(|| hosts::report(peers)),
        "disk": disk.map(|disk| json!({
            "reader": disk.reader,
            "direct": disk.direct,
            "rates": disk.rates.iter().map(|r| json!({
                "block_bytes": r.point.block_bytes,
                "depth": r.point.depth,
                "order": if r.point.random { "random" } else { "sequential" },
                "range_bytes": r.point.range_bytes,
                "gb_per_s": rounded(r.gb_per_s),
            })).collect::<Vec<_>>(),
        })),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_cpu::roofline::{PeakRate, Rates};

    #[test]
    fn figures_have_three_digits() {
        assert_eq!([rounded(1234.5), rounded(0.012_345), rounded(58.04)], [1230.0, 0.0123, 58.0]);
    }

    #[test]
    fn a_device_file_of_the_fastest_instructions() {
        let peak = |format, instruction, all| PeakRate { format, instruction, gops: Rates { one: 1.0, all } };
        let found = Roofline {
            threads: 2,
            peaks: vec![peak("f32", "slow", 2.0), peak("f32", "fast", 5.0), peak("int8", "dot", 9.0)],
            read_gb_per_s: Rates { one: 29.0, all: 58.0 },
            meeting_us: 0.25,
        };
        let unit = unit(&found);
        assert_eq!(unit.peak.keys().collect::<Vec<_>>(), ["f32", "int8"]);
        assert_eq!(unit.peak["f32"].gops, 5.0);
        assert!(unit.peak["f32"].source.contains("fast"));
        assert_eq!(memory(&found).bandwidth[0].gb_per_s, 58.0);
    }
}
