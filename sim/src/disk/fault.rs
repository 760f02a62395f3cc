//! A reader that fails as configured, for tests of this crate and its users.

use moec_runtime::offload::disk::{Read, ReadResult, Reader, Wake};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Fault of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injected {
    /// No fault.
    Nothing,
    /// An error with this number, without any bytes.
    Error(i32),
    /// At most this many bytes; the bytes after them are damaged.
    Short(u32),
    /// No bytes, as at the end of a file.
    End,
    /// One bit of one byte is flipped.
    Flip(u32),
    /// No result before [`Gate::open`].
    Stall,
    /// The result comes twice.
    Twice,
    /// The reader fails.
    Break,
}

/// Releases stalled reads.
#[derive(Clone, Default)]
pub struct Gate(Arc<State>);

#[derive(Default)]
struct State {
    open: AtomicBool,
    /// Wakers of threads that wait for readers with stalled reads.
    wakers: Mutex<Vec<Arc<dyn Wake>>>,
}

impl Gate {
    /// Releases stalled reads; later reads do not stall.
    pub fn open(&self) {
        self.0.open.store(true, Ordering::SeqCst);
        self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(|w| w.wake());
    }

    fn watch(&self, waker: Arc<dyn Wake>) {
        self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner).push(waker);
    }

    fn is_open(&self) -> bool {
        self.0.open.load(Ordering::SeqCst)
    }
}

/// A reader wrapped to inject faults.
pub struct Faulty {
    inner: Box<dyn Reader>,
    plan: Box<dyn FnMut(&Read) -> Injected + Send>,
    gate: Gate,
    /// Reads in flight whose result will be changed.
    changed: Vec<(Read, Injected)>,
    held: Vec<Read>,
    ready: Vec<ReadResult>,
}

impl Faulty {
    /// Queries `plan` about every read.
    pub fn new(
        inner: Box<dyn Reader>,
        gate: Gate,
        plan: impl FnMut(&Read) -> Injected + Send + 'static,
    ) -> Self {
        let plan = Box::new(plan);
        gate.watch(inner.waker());
        Self { inner, plan, gate, changed: Vec::new(), held: Vec::new(), ready: Vec::new() }
    }

    fn change(&mut self, done: &mut ReadResult) -> Option<ReadResult> {
        let i = self.changed.iter().position(|(read, _)| read.token == done.token)?;
        let (read, injected) = self.changed.swap_remove(i);
        let n = done.result.unwrap_or(0);
        match injected {
            Injected::Short(most) => {
                let n = n.min(most);
                // SAFETY: the bytes of a read are its own until its result was returned, which has not
                // happened yet.
                let bytes = unsafe { std::slice::from_raw_parts_mut(read.at.ptr(), read.bytes as usize) };
                bytes[n as usize..].fill(0xa5);
                done.result = done.result.map(|_| n);
                None
            }
            Injected::Flip(at) if n > 0 => {
                // SAFETY: as above.
                let bytes = unsafe { std::slice::from_raw_parts_mut(read.at.ptr(), n as usize) };
                bytes[(at % n) as usize] ^= 1 << (at % 8);
                None
            }
            Injected::Twice => Some(*done),
            _ => None,
        }
    }
}

impl Reader for Faulty {
    fn depth(&self) -> usize {
        self.inner.depth()
    }

    unsafe fn submit(&mut self, reads: &[Read]) -> io::Result<()> {
        let mut pass = Vec::with_capacity(reads.len());
        for read in reads {
            let answer = |result| ReadResult { token: read.token, result };
            match (self.plan)(read) {
                Injected::Error(errno) => self.ready.push(answer(Err(errno))),
                Injected::End => self.ready.push(answer(Ok(0))),
                Injected::Break => return Err(io::Error::from_raw_os_error(libc::EBADF)),
                Injected::Stall if !self.gate.is_open() => self.held.push(*read),
                Injected::Nothing | Injected::Stall => pass.push(*read),
                change => {
                    self.changed.push((*read, change));
                    pass.push(*read);
                }
            }
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.inner.submit(&pass) }
    }

    fn wait(&mut self, done: &mut Vec<ReadResult>, at_most: Option<Duration>) -> io::Result<()> {
        if self.gate.is_open() && !self.held.is_empty() {
            let held = std::mem::take(&mut self.held);
            // SAFETY: they were submitted and have no result yet.
            unsafe { self.inner.submit(&held) }?;
        }
        let (first, ready) = (done.len(), !self.ready.is_empty());
        self.inner.wait(done, if ready { Some(Duration::ZERO) } else { at_most })?;
        for i in first..done.len() {
            let second = self.change(&mut done[i]);
            done.extend(second);
        }
        done.append(&mut self.ready);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.inner.waker()
    }

    fn describe(&self) -> String {
        format!("{} with faults", self.inner.describe())
    }
}
