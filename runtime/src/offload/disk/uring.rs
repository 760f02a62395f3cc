//! Reading with io_uring: one system call starts and awaits any number of reads.

use super::buffer::Buffers;
use super::files::Files;
use super::reader::{Read, ReadResult, Reader, Wake};
use io_uring::{IoUring, Probe, opcode, squeue, types};
use std::fs::File;
use std::io::{self, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Token of the poll for wake-ups.
const CALLED: u64 = u64::MAX;
/// Most bytes of memory that one registration takes.
const REGISTERED: usize = 1 << 30;
/// Most registrations that every kernel takes.
const REGISTRATIONS: usize = 1024;
/// Maximum time that `drop` waits for reads in flight.
const GRACE: Duration = Duration::from_secs(1);

/// An io_uring with its files and, as far as the kernel allows, its buffers registered.
pub struct Uring {
    ring: ManuallyDrop<IoUring>,
    files: ManuallyDrop<Arc<Files>>,
    /// Keeps the memory alive for every read.
    buffers: ManuallyDrop<Arc<Buffers>>,
    call: Arc<Call>,
    /// Whether the kernel polls the event counter.
    watching: bool,
    /// Registration of each buffer; empty if there are none.
    registered: Vec<Option<u16>>,
    /// Reason for which buffers are not registered.
    unregistered: Option<String>,
    files_registered: bool,
    in_flight: usize,
    depth: usize,
}

/// A kernel event counter (eventfd) that the ring polls.
struct Call(File);

impl Call {
    fn new() -> io::Result<Self> {
        // SAFETY: no pointers; the result is a descriptor without an owner, or −1.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and valid, and has no other owner.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }
}

impl Wake for Call {
    fn wake(&self) {
        // Fails only if the counter is full, and then the ring was woken already.
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }
}

impl Uring {
    /// Sets up a ring for `depth` reads in flight. `register`: whether buffers are registered with the
    /// kernel.
    ///
    /// # Errors
    /// The kernel has no io_uring, forbids it, or is too old (before 5.11).
    pub fn new(files: Arc<Files>, buffers: Arc<Buffers>, depth: u32, register: bool) -> io::Result<Self> {
        // One more for the poll for wake-ups.
        let ring = IoUring::new(depth.max(1) + 1)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let known = [opcode::Read::CODE, opcode::ReadFixed::CODE, opcode::PollAdd::CODE];
        if !ring.params().is_feature_ext_arg() || known.iter().any(|&code| !probe.is_supported(code)) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel is older than 5.11"));
        }
        let descriptors: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let files_registered = ring.submitter().register_files(&descriptors).is_ok();
        let (mut table, mut unregistered) = (Vec::new(), Some("as requested".to_owned()));
        if register {
            let (vectors, of_buffers) = registrations(&buffers);
            // SAFETY: the vectors are in the region of `buffers`, which outlives the ring (see `drop`).
            let refused = unsafe { ring.submitter().register_buffers(&vectors) }.err();
            unregistered = refused.map(|e| e.to_string());
            table = of_buffers;
        }
        Ok(Self {
            ring: ManuallyDrop::new(ring),
            files: ManuallyDrop::new(files),
            buffers: ManuallyDrop::new(buffers),
            call: Arc::new(Call::new()?),
            watching: false,
            registered: if unregistered.is_none() { table } else { Vec::new() },
            unregistered,
            files_registered,
            in_flight: 0,
            depth: depth.max(1) as usize,
        })
    }

    fn entry(&self, read: &Read) -> squeue::Entry {
        let at = read.at.ptr();
        let (fd, flags) = if self.files_registered {
            (i32::try_from(read.file).unwrap_or(-1), squeue::Flags::FIXED_FILE)
        } else {
            (self.files.get(read.file).map_or(-1, AsRawFd::as_raw_fd), squeue::Flags::empty())
        };
        // A file that does not exist ends in a result, too: EBADF.
        let fd = types::Fd(fd);
        let entry = match self.registered.get(read.buffer as usize) {
            Some(&Some(i)) => opcode::ReadFixed::new(fd, at, read.bytes, i).offset(read.offset).build(),
            _ => opcode::Read::new(fd, at, read.bytes).offset(read.offset).build(),
        };
        entry.flags(flags).user_data(read.token)
    }

    /// Makes the kernel poll the event counter, once.
    fn watch(&mut self) {
        if !self.watching {
            let fd = types::Fd(self.call.0.as_raw_fd());
            let poll = opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(CALLED);
            // SAFETY: the entry holds no pointers; the descriptor lives as long as the ring.
            self.watching = unsafe { self.ring.submission().push(&poll) }.is_ok();
        }
    }

    /// Takes results of reads that have ended. Returns whether there was any result, a wake-up included.
    fn take(&mut self, done: &mut Vec<ReadResult>) -> bool {
        let mut any = false;
        for entry in self.ring.completion() {
            any = true;
            if entry.user_data() == CALLED {
                self.watching = false;
                let mut count = [0; 8];
                let _ = io::Read::read(&mut &self.call.0, &mut count);
                continue;
            }
            self.in_flight = self.in_flight.saturating_sub(1);
            let result = u32::try_from(entry.result()).map_err(|_| -entry.result());
            done.push(ReadResult { token: entry.user_data(), result });
        }
        any
    }
}

/// Ranges of neighbouring buffers that can be registered together, and the registration of each buffer.
fn registrations(buffers: &Buffers) -> (Vec<libc::iovec>, Vec<Option<u16>>) {
    let mut vectors: Vec<libc::iovec> = Vec::new();
    let mut table = Vec::with_capacity(buffers.len());
    for (at, bytes) in buffers.places() {
        let joined = vectors.last_mut().filter(|v| v.iov_len + bytes <= REGISTERED);
        if let Some(v) = joined {
            v.iov_len += bytes;
        } else if bytes <= REGISTERED && vectors.len() < REGISTRATIONS {
            vectors.push(libc::iovec { iov_base: at.ptr().cast(), iov_len: bytes });
        } else {
            table.push(None);
            continue;
        }
        table.push(u16::try_from(vectors.len() - 1).ok());
    }
    (vectors, table)
}

/// Whether the system call is repeated after this error.
fn passing(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ETIME))
}

impl Reader for Uring {
    fn depth(&self) -> usize {
        self.depth
    }

    unsafe fn submit(&mut self, reads: &[Read]) -> io::Result<()> {
        for read in reads {
            let entry = self.entry(read);
            // SAFETY: the memory belongs to a buffer, which is held here; the caller keeps others from it.
            let pushed = unsafe { self.ring.submission().push(&entry) };
            pushed.map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "more reads than the depth"))?;
            self.in_flight += 1;
        }
        match self.ring.submit() {
            // The kernel takes the remaining entries in `wait`.
            Err(e) if !passing(&e) => Err(e),
            _ => Ok(()),
        }
    }

    fn wait(&mut self, done: &mut Vec<ReadResult>, at_most: Option<Duration>) -> io::Result<()> {
        if self.take(done) {
            return Ok(());
        }
        self.watch();
        let time = at_most.map(types::Timespec::from);
        let args = types::SubmitArgs::new();
        let waited = match &time {
            Some(_) if at_most == Some(Duration::ZERO) => self.ring.submit(),
            Some(time) => self.ring.submitter().submit_with_args(1, &args.timespec(time)),
            None => self.ring.submit_and_wait(1),
        };
        self.take(done);
        match waited {
            Err(e) if !passing(&e) => Err(e),
            _ => Ok(()),
        }
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::<Call>::clone(&self.call)
    }

    fn describe(&self) -> String {
        let buffers = match &self.unregistered {
            None => "registered buffers".to_owned(),
            Some(e) => format!("buffers not registered ({e})"),
        };
        let files = if self.files_registered { "registered files" } else { "files not registered" };
        format!("io_uring of depth {}, {}, {buffers}, {files}", self.depth, self.files.describe())
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let (mut done, start) = (Vec::new(), Instant::now());
        while self.in_flight > 0 && start.elapsed() < GRACE {
            if self.wait(&mut done, Some(GRACE)).is_err() {
                break;
            }
        }
        if self.in_flight == 0 {
            // SAFETY: each is dropped once, here, and the ring before the memory that it uses.
            unsafe {
                ManuallyDrop::drop(&mut self.ring);
                ManuallyDrop::drop(&mut self.files);
                ManuallyDrop::drop(&mut self.buffers);
            }
        }
        // Otherwise the kernel may still write: the memory is never freed.
    }
}
