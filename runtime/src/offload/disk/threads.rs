//! Reading with `pread` on threads, on any Unix.

use super::buffer::Buffers;
use super::files::Files;
use super::reader::{Read, ReadResult, Reader, Wake};
use crate::error::{Error, Result};
use crate::platform::cpu::CoreSet;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Maximum number of threads: more would only wait for the same queue of the drive.
const MOST: usize = 32;
/// Maximum number of threads that are bound to one core: the storage of a device with such cores has one
/// queue of commands (PowerInfer-2, §2.3.2), which a few threads keep filled.
const MOST_ON_CORE: usize = 4;
/// Stack of a thread, in bytes.
const STACK: usize = 64 << 10;

#[derive(Default)]
struct State {
    waiting: VecDeque<Read>,
    ended: VecDeque<ReadResult>,
    /// Reads that were submitted and whose results were not yet fetched.
    in_flight: usize,
    woken: bool,
    stop: bool,
}

struct Shared {
    state: Mutex<State>,
    /// Signals that there is a read to do, or that the reader ends.
    work: Condvar,
    /// Signals that a read has ended, or that [`Wake::wake`] was called.
    changed: Condvar,
    files: Arc<Files>,
    /// Keeps the memory alive for a read that takes longer than its reader lives.
    _buffers: Arc<Buffers>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Shared {
    fn wake(&self) {
        self.lock().woken = true;
        self.changed.notify_one();
    }
}

/// Threads that call `pread`.
pub struct Threads {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    why: Option<String>,
}

impl Threads {
    /// Starts `depth` threads, 32 at most; on one core 4 at most. `why` is the reason for their use, for
    /// users.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn new(
        files: Arc<Files>,
        buffers: Arc<Buffers>,
        depth: usize,
        core: Option<usize>,
        why: Option<String>,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            work: Condvar::new(),
            changed: Condvar::new(),
            files,
            _buffers: buffers,
        });
        let mut reader = Self { shared, handles: Vec::new(), why };
        let depth = depth.clamp(1, core.map_or(MOST, |_| MOST_ON_CORE));
        let mut state = reader.shared.lock();
        state.waiting.reserve(depth);
        state.ended.reserve(depth);
        drop(state);
        for i in 0..depth {
            let shared = Arc::clone(&reader.shared);
            let thread = std::thread::Builder::new().name(format!("moec-read-{i}")).stack_size(STACK);
            // Threads that run already end when the reader is dropped.
            reader.handles.push(thread.spawn(move || work(&shared, core)).map_err(Error::thread)?);
        }
        Ok(reader)
    }
}

fn work(shared: &Shared, core: Option<usize>) {
    if let Some(core) = core {
        CoreSet::of(&[core]).bind();
    }
    let mut state = shared.lock();
    loop {
        if state.stop {
            return;
        }
        let Some(read) = state.waiting.pop_front() else {
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(state);
        let result = perform(&shared.files, &read);
        state = shared.lock();
        state.ended.push_back(ReadResult { token: read.token, result });
        shared.changed.notify_one();
    }
}

fn perform(files: &Files, read: &Read) -> Result<u32, i32> {
    let file = files.get(read.file).ok_or(libc::EBADF)?;
    let offset = libc::off_t::try_from(read.offset).map_err(|_| libc::EINVAL)?;
    // SAFETY: the descriptor is open as long as `files`. The submitter of the read guarantees that the bytes
    // belong to a buffer and that nothing else uses them.
    let n = unsafe { libc::pread(file.as_raw_fd(), read.at.ptr().cast(), read.bytes as usize, offset) };
    u32::try_from(n).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

impl Reader for Threads {
    fn depth(&self) -> usize {
        self.handles.len()
    }

    unsafe fn submit(&mut self, reads: &[Read]) -> io::Result<()> {
        let mut state = self.shared.lock();
        state.waiting.extend(reads);
        state.in_flight += reads.len();
        drop(state);
        match reads.len() {
            1 => self.shared.work.notify_one(),
            _ => self.shared.work.notify_all(),
        }
        Ok(())
    }

    fn wait(&mut self, done: &mut Vec<ReadResult>, at_most: Option<Duration>) -> io::Result<()> {
        let mut state = self.shared.lock();
        if state.ended.is_empty() && !state.woken && at_most != Some(Duration::ZERO) {
            state = match at_most {
                None => self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(time) => {
                    self.shared.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        state.woken = false;
        state.in_flight -= state.ended.len();
        done.extend(state.ended.drain(..));
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::<Shared>::clone(&self.shared)
    }

    fn describe(&self) -> String {
        let (n, files) = (self.handles.len(), self.shared.files.describe());
        let why = self.why.as_ref().map(|why| format!("; {why}")).unwrap_or_default();
        format!("pread on {n} threads, {files}{why}")
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stop = true;
        state.waiting.clear();
        // A thread that hangs in a read cannot be waited for. It keeps its buffer alive, and ends by itself.
        let hangs = state.in_flight > state.ended.len();
        drop(state);
        self.shared.work.notify_all();
        if !hangs {
            for thread in self.handles.drain(..) {
                drop(thread.join());
            }
        }
    }
}
