//! The unit of another host, as the first host sees it.

use crate::message::{Command, Message, answered};
use crate::serve::{name_of, units_of_hosts};
use crate::wire::{Tag, Wire};
use moec_ir::plan::Builtin;
use moec_runtime::bundle::BundleReader;
use moec_runtime::bundle::program::{Code, Program};
use moec_runtime::exec::unit::{self, ComputeUnit, Launch, PoolThread, StepFault, UnknownStep};
use moec_runtime::platform::memory::{Addr, Region};
use moec_runtime::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Seconds without a sign of a host after which the job ends.
const TIMEOUT: u64 = 60;
/// Variable that sets them.
pub const TIMEOUT_VARIABLE: &str = "MOEC_HOST_TIMEOUT";
/// Longest wait before the signs of a host are looked for.
const LOOK: Duration = Duration::from_millis(100);

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
}

/// The CPU of another host. Its memory has addresses here, but no bytes: what is copied there goes into a
/// message, with the steps to execute, and what is copied from there is in the answer.
#[derive(Debug)]
pub struct Remote {
    wire: Arc<dyn Wire>,
    /// Known when the program is loaded.
    rank: usize,
    name: String,
    memory: Option<Region>,
    pending: Mutex<Pending>,
    entry: AtomicUsize,
    /// Whether a call has begun. Before that, copies are of weights, which the host reads itself.
    begun: AtomicBool,
    timeout: Duration,
}

impl Remote {
    /// A unit of another host.
    ///
    /// # Errors
    /// A timeout in the environment that is no number of seconds.
    pub fn new(wire: Arc<dyn Wire>) -> Result<Self> {
        let given = std::env::var(TIMEOUT_VARIABLE).ok();
        let seconds = match given.as_deref().map(str::parse) {
            None => TIMEOUT,
            Some(Ok(seconds)) if seconds > 0 => seconds,
            Some(_) => {
                let given = given.unwrap_or_default();
                return Err(Error::range(TIMEOUT_VARIABLE, "a number of seconds above 0", given));
            }
        };
        Ok(Self {
            wire,
            rank: 0,
            name: String::new(),
            memory: None,
            pending: Mutex::default(),
            entry: AtomicUsize::new(0),
            begun: AtomicBool::new(false),
            timeout: Duration::from_secs(seconds),
        })
    }

    /// Offset in the host's memory; `None` for an address elsewhere.
    fn offset(&self, at: Addr) -> Option<u64> {
        let memory = self.memory.as_ref()?;
        let offset = at.ptr().addr().checked_sub(memory.base().ptr().addr())?;
        (offset < memory.bytes()).then_some(offset as u64)
    }

    fn pending(&self) -> std::sync::MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the commands so far, and puts what was asked for where it belongs.
    fn flush(&self) -> Result<()> {
        let mut pending = self.pending();
        if pending.message.is_empty() {
            return Ok(());
        }
        self.wire.send(self.rank, Tag::Commands, pending.message.bytes(), self.timeout)?;
        let expected = pending.message.answer();
        pending.message.clear();
        let reads = std::mem::take(&mut pending.reads);
        if reads.is_empty() {
            return Ok(());
        }
        let answer = self.answer()?;
        let mut data = answered(&answer).map_err(|why| Error::unit(&self.name, why))?;
        if data.len() as u64 != expected {
            return Err(Error::unit(&self.name, "an answer of another length"));
        }
        for PendingRead { to, bytes } in reads {
            let (own, rest) = data.split_at(bytes);
            // SAFETY: the step that copies promised so many bytes there, which nothing else uses until it ends.
            unsafe { std::ptr::copy_nonoverlapping(own.as_ptr(), to.ptr(), bytes) };
            data = rest;
        }
        Ok(())
    }

    /// Waits for an answer, as long as the host shows that it works.
    fn answer(&self) -> Result<Vec<u8>> {
        let mut sign = Instant::now();
        loop {
            if let Some(answer) = self.wire.receive(self.rank, Tag::Answer, LOOK)? {
                return Ok(answer);
            }
            while self.wire.receive(self.rank, Tag::Alive, Duration::ZERO)?.is_some() {
                sign = Instant::now();
            }
            if sign.elapsed() > self.timeout {
                let (name, seconds) = (&self.name, self.timeout.as_secs());
                return Err(Error::unit(
                    name,
                    format!("host {} has given no sign for {seconds} s", self.rank),
                )
                .with_hint(format!("`{TIMEOUT_VARIABLE}` sets another time")));
            }
        }
    }
}

impl ComputeUnit for Remote {
    fn name(&self) -> &'static str {
        "host"
    }

    fn executes(&self, builtin: Builtin) -> bool {
        matches!(builtin, Builtin::Copy { .. })
    }

    fn load(&mut self, program: &Program, index: u32, _bundle: &BundleReader) -> Result<()> {
        let name = program.units.get(index as usize).map_or("?", |u| &u.name);
        name.clone_into(&mut self.name);
        let rank = units_of_hosts(program).position(|unit| unit == index);
        self.rank = 1 + rank.ok_or_else(|| Error::unit(name, "it is of no other host"))?;
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
        let answer = self.answer()?;
        answered(&answer).map(drop).map_err(|why| Error::unit(&self.name, why))
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

    unsafe fn copy(&self, from: Addr, to: Addr, bytes: usize) {
        if !self.begun.load(Ordering::Relaxed) {
            return;
        }
        let mut pending = self.pending();
        if let Some(offset) = self.offset(to) {
            // SAFETY: the caller's promise; the bytes go into the message at once.
            let data = unsafe { std::slice::from_raw_parts(from.ptr(), bytes) };
            pending.message.add(Command::Write { offset, data });
        } else if let Some(offset) = self.offset(from) {
            pending.message.add(Command::Read { offset, bytes: bytes as u64 });
            pending.reads.push(PendingRead { to, bytes });
        }
    }

    unsafe fn submit(&self, launch: &Launch<'_>, _thread: PoolThread) {
        self.begun.store(true, Ordering::Relaxed);
        match launch.code {
            Code::Kernel(_) => self.pending().message.add(Command::Execute {
                entry: self.entry.load(Ordering::Relaxed) as u32,
                step: launch.step as u32,
                rows: launch.n as u64,
                seq_len: launch.seq_len as u64,
            }),
            Code::Builtin(builtin) => {
                // SAFETY: the caller's promise; the unit has one thread.
                if !unsafe { unit::copied(self, launch) } {
                    let unknown = UnknownStep { unit: "host", step: launch.step, builtin };
                    launch.fail(StepFault::Unknown(unknown));
                }
            }
        }
    }

    fn wait(&self, _fault: &OnceLock<StepFault>) {
        // A host that does not answer would leave the others waiting.
        if let Err(e) = self.flush() {
            self.wire.end_job(&e.to_string());
        }
    }
}
