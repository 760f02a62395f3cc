//! The NPU of a measured machine. Its limits and operators are published ones, from the file of a target; its
//! launches, products and bandwidth are measured if the machine has the unit.

use super::rounded;
use moec_base::error::Fault;
use moec_base::progress::Progress;
use moec_base::scratch::Scratch;
use moec_base::{Error, Result};
use moec_costs::units::Units;
use moec_device::{Device, DeviceUnit, Figure, MatmulTime};
use moec_measure::npu::{self, NpuRates, Observer, Shape};
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::exec::graphs::Graphs;
use moec_targets::backends;
use serde_json::{Value, json};
use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Numbers that each thread of the CPU reads: more than a cache holds.
const READ: usize = (128 << 20) / size_of::<u64>();
/// Numbers that a thread reads between two looks at the end of the measurement.
const BLOCK: usize = 1 << 16;
/// Room for the graphs and the raw weights of their packages.
const ROOM: u64 = 1 << 30;

/// An NPU.
pub(super) struct Npu {
    unit: DeviceUnit,
    target: String,
    rates: Option<NpuRates>,
}

/// The NPU that the file of `target` describes, measured if this machine has it. Without the unit, or without
/// the tools of its backend, a warning gives the reason, and the figures stay those of the file.
///
/// # Errors
/// A target without an NPU; a unit that fails while it is measured.
pub(super) fn measure(target: &str, threads: usize, progress: &Progress) -> Result<Npu> {
    let device = moec_targets::device(target)?;
    let units = Units::of(&device).ok_or_else(|| {
        Error::usage(format!("`--npu {target}`: `{}` has no NPU", device.name))
            .hint("`moec targets` lists targets with one, such as m2-ultra")
    })?;
    let backend = backends::of(units.npu, &device)?;
    let mut unit = units.npu.clone();
    unit.backend = Some(device.backend_of(units.npu).to_owned());
    unit.memory = None;
    let found = match backends::attached(backend.name(), &unit.name) {
        Some(Ok(Executor::Graphs(mut graphs))) => run(&units, graphs.as_mut(), threads, progress),
        Some(Ok(Executor::Unit(_))) => Err(Error::bug("an NPU that executes no static graphs")),
        Some(Err(e)) => Err(e),
        None => {
            let why = format!("this system has no driver of the backend `{}`", backend.name());
            Err(Error::environment(why))
        }
    };
    let rates = match found {
        Err(e) if e.fault == Fault::Environment => {
            let (name, of) = (&unit.name, &device.name);
            progress.warn(&format!(
                "`{name}` is not measured: {e}; its figures are the published ones of `{of}`"
            ));
            None
        }
        found => Some(found?),
    };
    Ok(Npu { unit, target: device.name.clone(), rates })
}

/// Writes graphs and measures them.
fn run(units: &Units<'_>, graphs: &mut dyn Graphs, threads: usize, progress: &Progress) -> Result<NpuRates> {
    let shape = Shape::of(units.npu);
    let scratch = Scratch::with_room("measure the NPU", ROOM)?;
    let written = npu::write(&shape, units.npu, units.graphs, scratch.path())?;
    progress.stage("Measured", "the writing of graphs");
    let mut observer = Wall { start: Instant::now(), threads };
    let rates = npu::measure(&shape, &written, scratch.path(), graphs, &mut observer, &units.device.name)?;
    progress.stage("Measured", "launches and experts of the NPU, alone and beside the CPU");
    Ok(rates)
}

/// The system's clock, and threads that read memory.
struct Wall {
    start: Instant,
    threads: usize,
}

impl Observer for Wall {
    fn now(&mut self) -> Duration {
        self.start.elapsed()
    }

    fn beside(&mut self, body: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<f64> {
        let (stop, ready) = (AtomicBool::new(false), Barrier::new(self.threads + 1));
        let read = || {
            let numbers = vec![1_u64; READ];
            ready.wait();
            let mut bytes = 0_u64;
            for block in numbers.chunks(BLOCK).cycle() {
                black_box(block.iter().fold(0, |sum: u64, x| sum.wrapping_add(*x)));
                bytes += size_of_val(block) as u64;
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
            bytes
        };
        thread::scope(|scope| {
            let readers: Vec<_> = (0..self.threads).map(|_| scope.spawn(read)).collect();
            ready.wait();
            let start = Instant::now();
            let done = body(self);
            stop.store(true, Ordering::Relaxed);
            let bytes: u64 = readers.into_iter().map(|r| r.join().unwrap_or(0)).sum();
            done.map(|()| bytes as f64 / start.elapsed().as_secs_f64() / 1e9)
        })
    }
}

/// Adds the NPU to a device, whose CPU reads `cpu_gb_per_s` alone.
pub(super) fn add(device: &mut Device, npu: &Npu, cpu_gb_per_s: f64) {
    let mut unit = npu.unit.clone();
    if let Some(rates) = &npu.rates {
        let figure = |value: f64, what: &str| {
            let source = format!("moec profile-device: {what}");
            Some(Figure { value: rounded(value), source })
        };
        unit.dispatch_cost_us = figure(rates.launch_us, "a launch of one expert and the wait for it");
        unit.sync_cost_us = None;
        unit.matmul = rates.experts.iter().map(|t| MatmulTime { ms: rounded(t.ms), ..t.clone() }).collect();
        unit.bandwidth_gb_per_s =
            figure(rates.gb_per_s, "weights of the experts with the fewest rows, alone");
        unit.achieved_bandwidth = None;
        let [of_npu, of_cpu] = rates.shared_gb_per_s.map(rounded);
        if let Some(cpu) = device.units.first_mut() {
            cpu.bandwidth_gb_per_s = figure(cpu_gb_per_s, "reading memory in order, alone");
        }
        let memory = device.memories.first_mut().and_then(|m| m.bandwidth.first_mut());
        if let Some(memory) = memory.filter(|m| m.gb_per_s < of_npu + of_cpu) {
            memory.gb_per_s = rounded(of_npu + of_cpu);
            memory.source = format!("moec profile-device: CPU and NPU together, {of_cpu} and {of_npu} GB/s");
        }
    }
    device.description = format!("{}; with the NPU of {}", device.description, npu.target);
    device.units.push(unit);
}

/// The figures as JSON.
pub(super) fn report(npu: &Npu) -> Value {
    json!({
        "target": npu.target,
        "measured": npu.rates.is_some(),
        "launch_us": npu.rates.as_ref().map(|r| r.launch_us),
        "read_gb_per_s": npu.rates.as_ref().map(|r| r.gb_per_s),
        "shared_npu_gb_per_s": npu.rates.as_ref().map(|r| r.shared_gb_per_s[0]),
        "shared_cpu_gb_per_s": npu.rates.as_ref().map(|r| r.shared_gb_per_s[1]),
        "experts": npu.rates.as_ref().map(|r| &r.experts),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn measured_figures_replace_published_ones() {
        let published = moec_targets::device("m2-ultra").unwrap();
        let unit = Units::of(&published).unwrap().npu.clone();
        let entry =
            MatmulTime { rows: 32, weights: 1000, ms: 1.23456, source: "measured by a test".to_owned() };
        let rates = NpuRates {
            launch_us: 1234.5,
            experts: vec![entry],
            gb_per_s: 40.04,
            shared_gb_per_s: [30.0, 600.0],
        };
        let mut npu = Npu { unit, target: "m2-ultra".to_owned(), rates: Some(rates) };
        let of = |npu: &Npu| {
            let mut device = published.clone();
            device.units.truncate(1);
            device.memories.first_mut().unwrap().bandwidth.first_mut().unwrap().gb_per_s = 500.0;
            add(&mut device, npu, 480.0);
            device
        };
        let device = of(&npu);
        let [cpu, measured] = device.units.as_slice() else { unreachable!("two units") };
        let value = |f: &Option<Figure>| f.as_ref().map(|f| f.value);
        assert_eq!((measured.launch_us(), value(&measured.sync_cost_us)), (1230.0, None));
        assert_eq!((measured.matmul.len(), measured.matmul[0].ms), (1, 1.23));
        assert_eq!(
            (value(&measured.bandwidth_gb_per_s), value(&cpu.bandwidth_gb_per_s)),
            (Some(40.0), Some(480.0))
        );
        assert_eq!(device.memories[0].bandwidth[0].gb_per_s, 630.0);
        // Limits and operators are the target's.
        assert_eq!(measured.max_graph_bytes, npu.unit.max_graph_bytes);
        assert_eq!(measured.legality, npu.unit.legality);
        npu.rates = None;
        assert_eq!(of(&npu).units[1], npu.unit);
        assert_eq!(report(&npu)["measured"], false);
    }

    #[test]
    fn cpu_reads_until_the_unit_is_done() {
        let mut wall = Wall { start: Instant::now(), threads: 2 };
        let mut ran = 0;
        let read = wall.beside(&mut |wall| {
            ran += 1;
            let start = wall.now();
            while wall.now().saturating_sub(start) < Duration::from_millis(50) {}
            Ok(())
        });
        assert!(ran == 1 && read.unwrap() > 0.0);
        let failed = wall.beside(&mut |_| Err(Error::environment("it broke")));
        assert!(failed.unwrap_err().to_string().contains("it broke"));
    }
}
