//! The unit of another host, as the first host sees it.

use crate::limits::{passed, timeout};
use crate::message::{Command, Message, answered, reads_of};
use crate::mpi::pause;
use crate::serve::{name_of, units_of_hosts};
use crate::wire::{Tag, Wire};
use moec_ir::plan::Builtin;
use moec_runtime::bundle::BundleReader;
use moec_runtime::bundle::program::{Code, Program};
use moec_runtime::exec::traffic::{HostReads, HostTraffic};
use moec_runtime::exec::unit::{self, ComputeUnit, Launch, PoolThread, StepFault, UnknownStep};
use moec_runtime::platform::memory::{Addr, Region};
use moec_runtime::{Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Longest wait before the signs of a host are looked for.
const LOOK: Duration = Duration::from_millis(100);
/// Answers whose times the next one is expected by.
const TIMES: usize = 4;

/// A place of the host's memory that is read, and where its bytes belong.
#[derive(Debug)]
struct PendingRead {
    to: Addr,
    bytes: usize,
}

/// Commands that were not sent yet.
#[derive(Debug, Default)]
struct Pending {
    message: Message,
    reads: Vec<PendingRead>,
    /// Bytes and round trips so far.
    traffic: HostTraffic,
    /// The last answer; its room is used again.
    answer: Vec<u8>,
    times: AnswerTimes,
}

/// Steps of a call: its entry point and its rows.
type Call = (usize, usize);

/// Times of answers, by which the next one of as much work is expected.
#[derive(Debug, Default)]
struct AnswerTimes {
    /// Call of the steps that were sent, or will be, since the last answer; `None`: there are none.
    next: Option<Call>,
    /// Time of the last sending of commands.
    sent: Option<Instant>,
    /// Call of the last answers.
    of: Option<Call>,
    /// Their times from the sending of commands on, in turn.
    last: [Duration; TIMES],
    answers: usize,
}

impl AnswerTimes {
    /// Time until the next answer is to be looked for: a part of the least of the last times. Each look takes some
    /// microseconds of a core on which a thread may compute its own part meanwhile.
    fn quiet(&self, now: Instant) -> Duration {
        let least = self.last.iter().min().copied().filter(|_| self.next == self.of).unwrap_or_default();
        let waited = self.sent.map_or(Duration::MAX, |sent| now - sent);
        (least * 3 / 4).min(LOOK).saturating_sub(waited)
    }

    /// An answer has arrived.
    fn answered(&mut self, now: Instant) {
        let (Some(call), Some(sent)) = (self.next.take(), self.sent) else { return };
        if self.of != Some(call) {
            (self.of, self.last) = (Some(call), Default::default());
        }
        self.last[self.answers % TIMES] = now - sent;
        self.answers += 1;
    }
}

/// The CPU of another host. Its memory has addresses here, but no bytes: what is copied there goes into a
/// message, with the steps to execute, and what is copied from there is in the answer.
#[derive(Debug)]
pub struct Remote {
    wire: Arc<dyn Wire>,
    /// Known when the program is loaded.
    rank: usize,
    /// Name in errors, with that of its machine once this is known.
    name: String,
    memory: Option<Region>,
    /// Whether experts stay on its disk.
    pages: bool,
    pending: Mutex<Pending>,
    entry: AtomicUsize,
    timeout: Duration,
}

impl Remote {
    /// A unit of another host.
    ///
    /// # Errors
    /// A timeout in the environment that is no number of seconds.
    pub fn new(wire: Arc<dyn Wire>) -> Result<Self> {
        Ok(Self {
            wire,
            rank: 0,
            name: String::new(),
            memory: None,
            pages: false,
            pending: Mutex::default(),
            entry: AtomicUsize::new(0),
            timeout: timeout()?,
        })
    }

    /// Offset in the host's memory; `None` for an address elsewhere.
    fn offset(&self, at: Addr) -> Option<u64> {
        let memory = self.memory.as_ref()?;
        let offset = at.ptr().addr().checked_sub(memory.base().ptr().addr())?;
        (offset < memory.bytes()).then_some(offset as u64)
    }

    /// An error of the host.
    fn failed(&self, why: impl std::fmt::Display) -> Error {
        Error::machine(format!("{}: {why}", self.name))
    }

    fn pending(&self) -> std::sync::MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the commands so far; bytes of their answer.
    fn send(&self, pending: &mut Pending) -> Result<u64> {
        if pending.message.is_empty() {
            return Ok(0);
        }
        self.wire.send(self.rank, Tag::Commands, pending.message.bytes(), self.timeout)?;
        pending.times.sent = Some(Instant::now());
        pending.traffic.sent += pending.message.bytes().len() as u64;
        let expected = pending.message.answer();
        pending.message.clear();
        Ok(expected)
    }

    /// Sends the commands so far, and puts what was asked for where it belongs.
    fn flush(&self) -> Result<()> {
        let mut pending = self.pending();
        let pending = &mut *pending;
        let expected = self.send(pending)?;
        let reads = std::mem::take(&mut pending.reads);
        if reads.is_empty() {
            return Ok(());
        }
        pause(pending.times.quiet(Instant::now()));
        self.await_answer(&mut pending.answer)?;
        pending.times.answered(Instant::now());
        pending.traffic.received += pending.answer.len() as u64;
        pending.traffic.round_trips += 1;
        let mut data = answered(&pending.answer).map_err(|why| self.failed(why))?;
        if data.len() as u64 != expected {
            return Err(self.failed("an answer of another length"));
        }
        for PendingRead { to, bytes } in reads {
            let (own, rest) = data.split_at(bytes);
            // SAFETY: the step that copies promised so many bytes there, which nothing else uses until it ends.
            unsafe { std::ptr::copy_nonoverlapping(own.as_ptr(), to.ptr(), bytes) };
            data = rest;
        }
        Ok(())
    }

    /// Waits for an answer.
    fn await_answer(&self, answer: &mut Vec<u8>) -> Result<()> {
        await_answer(self.wire.as_ref(), self.rank, &self.name, self.timeout, answer)
    }

    /// Asks the host what it has read from its disk.
    fn ask_reads(&self) -> Result<HostReads> {
        self.flush()?;
        let mut message = Message::default();
        message.add(Command::Disk);
        self.wire.send(self.rank, Tag::Commands, message.bytes(), self.timeout)?;
        let mut answer = Vec::new();
        self.await_answer(&mut answer)?;
        let data = answered(&answer).map_err(|why| self.failed(why))?;
        reads_of(data).ok_or_else(|| self.failed("an answer of another length"))
    }
}

/// Waits for an answer of a host, as long as it shows that it works; `host`: its name in errors.
///
/// # Errors
/// No sign of it for too long; a host that cannot be reached.
pub fn await_answer(
    wire: &dyn Wire,
    rank: usize,
    host: &str,
    timeout: Duration,
    answer: &mut Vec<u8>,
) -> Result<()> {
    let mut sign = Instant::now();
    while !wire.receive(rank, Tag::Answer, LOOK, answer)? {
        while wire.receive(rank, Tag::Alive, Duration::ZERO, &mut Vec::new())? {
            sign = Instant::now();
        }
        if sign.elapsed() > timeout {
            return Err(passed(format!("{host} has given no sign for {} s", timeout.as_secs())));
        }
    }
    Ok(())
}

impl ComputeUnit for Remote {
    fn name(&self) -> &'static str {
        "host"
    }

    fn executes(&self, builtin: Builtin) -> bool {
        matches!(builtin, Builtin::Copy { .. }) || unit::computes(builtin)
    }

    fn load(&mut self, program: &Program, index: u32, _bundle: &BundleReader) -> Result<()> {
        let name = program.units.get(index as usize).map_or("?", |u| &u.name);
        let rank = units_of_hosts(program).position(|unit| unit == index);
        self.pages = program.paging_of(program.memory_of(index)).is_some();
        self.rank = 1 + rank.ok_or_else(|| Error::unit(name, "it is of no other host"))?;
        self.name = format!("host {}", self.rank);
        if self.rank >= self.wire.hosts() {
            let what =
                format!("{} processes were started, and the program has more hosts", self.wire.hosts());
            return Err(Error::machine(what)
                .with_hint("start as many as the target has hosts: `mpirun -n 2` for `native-x2`"));
        }
        let program = name_of(program);
        self.pending().message.add(Command::Greet { program: program.as_bytes() });
        let mut pending = self.pending();
        self.wire.send(self.rank, Tag::Commands, pending.message.bytes(), self.timeout)?;
        pending.message.clear();
        drop(pending);
        // A host that does not answer now would not answer at the end either.
        let mut answer = Vec::new();
        self.await_answer(&mut answer).unwrap_or_else(|e| self.wire.end_job(&e));
        let machine = answered(&answer).map_err(|why| self.failed(why))?;
        self.name = format!("host {} (`{}`)", self.rank, String::from_utf8_lossy(machine));
        Ok(())
    }

    fn take(&mut self, bytes: u64) -> Result<Option<Addr>> {
        // The system gives pages for what is written there, which is nothing.
        let region = Region::new("addresses of a host's memory", bytes)?;
        let base = region.base();
        self.memory = Some(region);
        Ok(Some(base))
    }

    fn has_weights(&self) -> bool {
        true
    }

    fn prepare(&self, entry: usize, _memory: Option<u64>) {
        self.entry.store(entry, Ordering::Relaxed);
    }

    fn traffic(&self) -> Option<HostTraffic> {
        Some(self.pending().traffic)
    }

    fn reads(&self) -> Option<HostReads> {
        self.pages.then(|| self.ask_reads().unwrap_or_else(|e| self.wire.end_job(&e)))
    }

    unsafe fn copy(&self, from: Addr, to: Addr, bytes: usize) {
        let mut pending = self.pending();
        match (self.offset(from), self.offset(to)) {
            (Some(from), Some(to)) => {
                pending.message.add(Command::Copy { from, to, bytes: bytes as u64 });
            }
            (None, Some(offset)) => {
                // SAFETY: the caller's promise; the bytes go into the message at once.
                let data = unsafe { std::slice::from_raw_parts(from.ptr(), bytes) };
                pending.message.add(Command::Write { offset, data });
            }
            (Some(offset), None) => {
                pending.message.add(Command::Read { offset, bytes: bytes as u64 });
                pending.reads.push(PendingRead { to, bytes });
            }
            (None, None) => {}
        }
    }

    unsafe fn zero(&self, at: Addr, bytes: usize) {
        if let Some(offset) = self.offset(at) {
            self.pending().message.add(Command::Zero { offset, bytes: bytes as u64 });
        }
    }

    unsafe fn submit(&self, launch: &Launch<'_>, _thread: PoolThread) {
        let execute = || {
            let (entry, mut pending) = (self.entry.load(Ordering::Relaxed), self.pending());
            pending.times.next.get_or_insert((entry, launch.n));
            pending.message.add(Command::Execute {
                entry: entry as u32,
                step: launch.step as u32,
                rows: launch.n as u64,
                seq_len: launch.seq_len as u64,
            });
        };
        match launch.code {
            Code::Kernel(_) => execute(),
            Code::Builtin(builtin) if unit::computes(builtin) => execute(),
            Code::Builtin(builtin) => {
                // SAFETY: the caller's promise; the unit has one thread.
                if !unsafe { unit::copied(self, launch) } {
                    let unknown = UnknownStep { unit: "host", step: launch.step, builtin };
                    launch.fail(StepFault::Unknown(unknown));
                }
            }
        }
    }

    fn begin(&self) {
        let mut pending = self.pending();
        // What is asked for is waited for soon.
        if pending.reads.is_empty()
            && let Err(e) = self.send(&mut pending)
        {
            self.wire.end_job(&e);
        }
    }

    fn wait(&self, _fault: &OnceLock<StepFault>) {
        // A host that does not answer would leave the others waiting.
        if let Err(e) = self.flush() {
            self.wire.end_job(&e);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::TIMEOUT_VARIABLE;
    use std::sync::atomic::{AtomicBool, AtomicU32};

    /// A host that answers when it was looked at so many times, and gives signs until then if it works.
    #[derive(Debug)]
    struct Slow {
        looks: AtomicU32,
        works: bool,
        sign: AtomicBool,
    }

    impl Wire for Slow {
        fn rank(&self) -> usize {
            0
        }

        fn hosts(&self) -> usize {
            2
        }

        fn send(&self, _to: usize, _tag: Tag, _bytes: &[u8], _wait: Duration) -> Result<()> {
            Ok(())
        }

        fn receive(&self, _from: usize, tag: Tag, wait: Duration, _message: &mut Vec<u8>) -> Result<bool> {
            std::thread::sleep(wait);
            Ok(match tag {
                Tag::Answer => {
                    self.sign.store(self.works, Ordering::Relaxed);
                    self.looks.fetch_add(1, Ordering::Relaxed) > 5
                }
                _ => self.sign.swap(false, Ordering::Relaxed),
            })
        }

        fn end_job(&self, why: &Error) -> ! {
            panic!("{why}")
        }
    }

    fn waits(works: bool) -> Result<()> {
        let wire = Slow { looks: AtomicU32::new(0), works, sign: AtomicBool::new(false) };
        await_answer(&wire, 1, "host 1 (`two`)", LOOK * 2, &mut Vec::new())
    }

    #[test]
    fn no_answer_is_looked_for_before_a_part_of_the_least_of_the_last_times() {
        let sent = Instant::now();
        let mut times = AnswerTimes { sent: Some(sent), ..AnswerTimes::default() };
        let answered = |times: &mut AnswerTimes, call, after| {
            times.next = call;
            times.answered(sent + after);
        };
        let quiet = |times: &mut AnswerTimes, call, ms| {
            times.next = call;
            times.quiet(sent + Duration::from_millis(ms)).as_millis()
        };
        let (decoding, prompt) = (Some((0, 1)), Some((1, 512)));
        for ms in [8, 8, 20, 12] {
            assert_eq!(quiet(&mut times, decoding, 0), 0);
            answered(&mut times, decoding, Duration::from_millis(ms));
        }
        assert_eq!([0, 5, 6, 7].map(|ms| quiet(&mut times, decoding, ms)), [6, 1, 0, 0]);
        // The oldest ones are forgotten.
        answered(&mut times, decoding, LOOK * 4);
        answered(&mut times, decoding, LOOK * 4);
        assert_eq!(quiet(&mut times, decoding, 0), 9);
        (0..TIMES).for_each(|_| answered(&mut times, decoding, LOOK * 4));
        assert_eq!(quiet(&mut times, decoding, 0), LOOK.as_millis());
        // Other work takes other times; answers without work say nothing of it.
        answered(&mut times, None, Duration::ZERO);
        assert_eq!(
            [prompt, Some((0, 2)), None, decoding].map(|call| quiet(&mut times, call, 0)),
            [0, 0, 0, 100]
        );
        answered(&mut times, prompt, LOOK);
        assert_eq!([prompt, decoding].map(|call| quiet(&mut times, call, 0)), [0, 0]);
    }

    #[test]
    fn slow_host_is_waited_for_while_it_gives_signs() {
        waits(true).unwrap();
        let error = waits(false).unwrap_err();
        assert!(error.to_string().contains("host 1 "), "{error}");
        assert!(error.hint().unwrap().contains(TIMEOUT_VARIABLE), "{error}");
    }
}
