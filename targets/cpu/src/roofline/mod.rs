//! Peaks of this machine: multiply-adds per second by number format, and bytes read from memory.
//!
//! Loops are written in assembly, so that they measure the instruction and not a compiler. Each runs on one
//! thread and on all, several times, and the fastest counts: other work on the machine can only slow a loop
//! down. The times of an expert's kernels complete these limits (`experts`).
#![expect(clippy::cast_possible_truncation, reason = "measurements: counts of calls and of rows")]

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod experts;
mod gpu;
mod shares;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
use aarch64::{LOOPS, READS};
#[cfg(target_arch = "x86_64")]
use x86::{LOOPS, READS};

pub use experts::measure_experts;
pub use gpu::{GpuRates, measure_gpu};
pub use shares::{Share, decode_share};

use crate::tune::in_huge_pages;
use moec_runtime::platform::cpu;
use moec_runtime::sync::pool::{Binding, Pool};
use std::ops::Range;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// A loop of one instruction.
struct Loop {
    /// Number format, as device files name it.
    format: &'static str,
    /// The instruction, for people.
    instruction: &'static str,
    /// Features that the CPU must have, in LLVM's names.
    features: &'static [&'static str],
    /// Operations of one turn; a multiply-add counts as two.
    operations: u64,
    /// Runs this many iterations, at least one.
    run: unsafe fn(u64),
}

/// A loop that reads memory.
struct Read {
    features: &'static [&'static str],
    /// Reads that many bytes, a multiple of [`LOOP_BYTES`], from there.
    run: unsafe fn(*const u8, usize),
}

/// Bytes that one turn of a reading loop takes.
const LOOP_BYTES: usize = 512;
/// Bytes of a thread's buffer, and those of it that one round reads. They are far more than a cache holds, so
/// that lines are evicted before they are read again.
const BUFFER: usize = 256 << 20;
const PART: usize = 128 << 20;
/// Number of times that each figure is taken.
const ROUNDS: usize = 16;
/// Length of a measured loop, in seconds: short enough that some round is not interrupted.
const SPAN: f64 = 0.01;

/// A figure with one thread and with all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Rate of one thread.
    pub one: f64,
    /// All threads together.
    pub all: f64,
}

/// Throughput of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub struct PeakRate {
    /// Number format (`f32`, `bf16`, `int8`).
    pub format: &'static str,
    /// Instruction.
    pub instruction: &'static str,
    /// 10⁹ operations per second; a multiply-add counts as two.
    pub gops: Rates,
}

/// Measured peaks.
#[derive(Clone, Debug, PartialEq)]
pub struct Roofline {
    /// Number of threads that "all" means.
    pub threads: usize,
    /// Instructions that this CPU has.
    pub peaks: Vec<PeakRate>,
    /// 10⁹ bytes per second read from memory, one after the other.
    pub read_gb_per_s: Rates,
    /// Microseconds that a barrier of all threads takes, which is the cost of starting a step.
    pub meeting_us: f64,
}

impl Roofline {
    /// The fastest instruction of a format.
    pub fn best(&self, format: &str) -> Option<&PeakRate> {
        let of_format = self.peaks.iter().filter(|p| p.format == format);
        of_format.max_by(|a, b| a.gops.all.total_cmp(&b.gops.all))
    }
}

/// Measures this machine with `threads` threads. `tick` is called after every figure.
///
/// Takes a few seconds, and 256 MiB of memory per thread.
///
/// # Errors
/// The operating system starts no threads.
pub fn measure(threads: usize, tick: &mut dyn FnMut(&str)) -> moec_runtime::Result<Roofline> {
    let threads = threads.max(1);
    let has = |features: &[&str]| cpu::missing(features).is_empty();
    let mut peaks = Vec::new();
    for l in LOOPS.iter().filter(|l| has(l.features)) {
        let gops = |threads| {
            // SAFETY: the features were detected, and the loop touches nothing but registers.
            let turns = |n| unsafe { (l.run)(n) };
            (l.operations * threads as u64) as f64 * turns_per_second(threads, &turns) / 1e9
        };
        let gops = Rates { one: gops(1), all: gops(threads) };
        peaks.push(PeakRate { format: l.format, instruction: l.instruction, gops });
        tick(l.instruction);
    }
    let memory = buffers(threads);
    let read = |memory: &[Vec<u8>]| {
        let rates = reads().map(|read| {
            let seconds = fastest(memory.len(), &|i, round| part(read, &memory[i], round));
            (PART * memory.len()) as f64 / seconds / 1e9
        });
        rates.fold(0.0, f64::max)
    };
    let read_gb_per_s = Rates { one: read(&memory[..1]), all: read(&memory) };
    tick("reading memory");
    drop(memory);
    Ok(Roofline { threads, peaks, read_gb_per_s, meeting_us: meeting(threads)? })
}

/// 10⁹ bytes per second that so many threads read from memory, each with every loop of this CPU for a span of time.
pub fn reading_gb_per_s(threads: usize, span: Duration) -> f64 {
    let memory = buffers(threads.max(1));
    let rate = |memory: &Vec<u8>| {
        let rates = reads().map(|read| {
            let start = Instant::now();
            let mut rounds = 0;
            while rounds == 0 || start.elapsed() < span {
                part(read, memory, rounds);
                rounds += 1;
            }
            (rounds * PART) as f64 / start.elapsed().as_secs_f64() / 1e9
        });
        rates.fold(0.0, f64::max)
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = memory[1..].iter().map(|m| scope.spawn(move || rate(m))).collect();
        rate(&memory[0]) + others.into_iter().filter_map(|t| t.join().ok()).sum::<f64>()
    })
}

/// Seconds in which all threads read a part of their buffers once, by the fastest loop.
fn fastest_read(memory: &[Vec<u8>], turn: usize) -> f64 {
    let spans = |read| spans(memory.len(), turn..turn + 1, &|i, round| part(read, &memory[i], round));
    reads().flat_map(spans).fold(f64::INFINITY, f64::min)
}

/// A buffer for each thread, in huge pages as weights are. Every page gets a frame of its own: the operating system
/// shares pages that were never written.
fn buffers(threads: usize) -> Vec<Vec<u8>> {
    let buffer = |_| {
        let mut memory = Vec::with_capacity(BUFFER);
        in_huge_pages(&mut memory);
        memory.resize(BUFFER, 1);
        memory
    };
    (0..threads).map(buffer).collect()
}

/// The reading loops that this CPU has.
fn reads() -> impl Iterator<Item = &'static Read> {
    READS.iter().filter(|read| cpu::missing(read.features).is_empty())
}

/// Reads a part of a thread's buffer, by turns.
fn part(read: &Read, memory: &[u8], round: usize) {
    let part = &memory[round * PART % BUFFER..][..PART];
    // SAFETY: the features were detected ([`reads`]); the slice has that many bytes.
    unsafe { (read.run)(part.as_ptr(), part.len()) }
}

/// Turns per second of one thread while `threads` threads run.
fn turns_per_second(threads: usize, turns: &(dyn Fn(u64) + Sync)) -> f64 {
    let mut n = 1 << 14;
    loop {
        let start = Instant::now();
        turns(n);
        let seconds = start.elapsed().as_secs_f64();
        if seconds > SPAN / 8.0 {
            n = (n as f64 * SPAN / seconds) as u64;
            break;
        }
        n *= 2;
    }
    n.max(1) as f64 / fastest(threads, &|_, _| turns(n.max(1)))
}

/// Seconds that threads take from their common start to the end of the last, in the fastest of [`ROUNDS`].
fn fastest(threads: usize, work: &(dyn Fn(usize, usize) + Sync)) -> f64 {
    spans(threads, 0..ROUNDS, work).into_iter().fold(f64::INFINITY, f64::min)
}

/// Seconds of each round. `work` gets the thread's index and the round's.
fn spans(threads: usize, rounds: Range<usize>, work: &(dyn Fn(usize, usize) + Sync)) -> Vec<f64> {
    let start_line = Barrier::new(threads);
    let times = |i: usize| -> Vec<(Instant, Instant)> {
        let round = |round| {
            start_line.wait();
            let start = Instant::now();
            work(i, round);
            (start, Instant::now())
        };
        rounds.clone().map(round).collect()
    };
    let all: Vec<_> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|i| scope.spawn(move || times(i))).collect();
        let mut all = vec![times(0)];
        all.extend(others.into_iter().filter_map(|t| t.join().ok()));
        all
    });
    let span = |round: usize| {
        let start = all.iter().map(|t| t[round].0).min();
        let end = all.iter().map(|t| t[round].1).max();
        end.zip(start).map_or(f64::INFINITY, |(end, start)| (end - start).as_secs_f64())
    };
    (0..rounds.len()).map(span).collect()
}

/// Microseconds from one meeting of all threads of a pool to the next.
fn meeting(threads: usize) -> moec_runtime::Result<f64> {
    const MEETINGS: usize = 2000;
    let mut pool = Pool::new(threads, 0, Binding::None)?;
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        pool.run(&|_, barrier| (0..MEETINGS).for_each(|_| barrier.wait()));
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best / MEETINGS as f64 * 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times are not tested, but every loop that this CPU supports must run and end.
    #[test]
    fn every_roofline_loop_runs() {
        let mut formats = Vec::new();
        for l in LOOPS.iter().filter(|l| cpu::missing(l.features).is_empty()) {
            // SAFETY: the features were detected.
            unsafe { (l.run)(3) };
            assert!(cpu::unknown(l.features).is_empty() && l.operations > 0);
            formats.push(l.format);
        }
        assert!(formats.contains(&"f32"), "{formats:?}");
        let memory = vec![1_u8; 8 * LOOP_BYTES];
        for r in READS.iter().filter(|r| cpu::missing(r.features).is_empty()) {
            // SAFETY: the features were detected; the buffer has that many bytes.
            unsafe { (r.run)(memory.as_ptr(), memory.len()) };
        }
    }

    #[test]
    fn peak_rate_is_that_of_the_fastest_instruction() {
        let peak = |instruction, all| PeakRate { format: "f32", instruction, gops: Rates { one: 1.0, all } };
        let read_gb_per_s = Rates { one: 1.0, all: 1.0 };
        let peaks = vec![peak("a", 2.0), peak("b", 3.0), peak("c", 1.0)];
        let r = Roofline { threads: 2, peaks, read_gb_per_s, meeting_us: 1.0 };
        assert_eq!(r.best("f32").map(|p| p.instruction), Some("b"));
        assert_eq!(r.best("int8"), None);
    }

    #[test]
    fn thread_barrier_time_is_positive() {
        assert!(meeting(2).unwrap() > 0.0);
    }
}
