//! The wire over MPI: nonblocking sends and receives, whose progress is asked for between other work.

use crate::launcher::end_later;
use crate::limits::{STARTING, passed, report, timeout, within};
use crate::wire::{Tag, Wire};
use moec_runtime::{Error, Result};
use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Longest message: MPI counts bytes by an `int`.
const MOST: usize = 1 << 30;
/// Share of the time so far that the pause between two questions takes.
const PAUSES: u32 = 16;
/// Shortest and longest pause while nothing arrives: a question takes some microseconds of a core.
const SHORTEST_PAUSE: Duration = Duration::from_micros(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// A transfer proceeds only while MPI is asked: time without a pause, and the longest pause after that.
const TRANSFER_SPIN: Duration = Duration::from_micros(200);
const TRANSFER_PAUSE: Duration = Duration::from_micros(50);

type Status = c_int;
type Handle = *mut c_void;

type BeginFn = unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status;
type SendFn = unsafe extern "C" fn(*const c_void, c_int, c_int, c_int, *mut Handle) -> Status;
type ReceiveFn = unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int, *mut Handle) -> Status;
type TestFn = unsafe extern "C" fn(*mut Handle, *mut c_int) -> Status;
type ProbeFn = unsafe extern "C" fn(c_int, c_int, *mut c_int) -> Status;
type AbortFn = unsafe extern "C" fn(c_int) -> Status;
type EndFn = unsafe extern "C" fn() -> Status;

/// The functions of `shim.c`.
struct Api {
    begin: BeginFn,
    send: SendFn,
    receive: ReceiveFn,
    test: TestFn,
    probe: ProbeFn,
    abort: AbortFn,
    end: EndFn,
}

/// The address of a function as a function.
macro_rules! function {
    ($handle:expr, $name:literal: $Type:ty) => {{
        // SAFETY: the handle is of `dlopen` and never closed, and the name ends in a zero byte.
        let at = unsafe { libc::dlsym($handle, $name.as_ptr()) };
        if at.is_null() {
            return Err(Error::machine(format!(
                "moec's library for MPI has no `{}`",
                $name.to_string_lossy()
            )));
        }
        // SAFETY: the library is compiled from `shim.c`, where the function has this type.
        unsafe { std::mem::transmute::<*mut c_void, $Type>(at) }
    }};
}

impl Api {
    fn load() -> Result<Self> {
        let path = crate::compile::library()?;
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| Error::machine("a path with a zero byte"))?;
        // SAFETY: the name ends in a zero byte. The library is this program's own; MPI, which it loads, is
        // trusted: its launcher started this process. Its plug-ins look for its names among the global ones.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            // SAFETY: the loader's text is null or ends in a zero byte, and stays until its next call.
            let why = unsafe {
                let text = libc::dlerror();
                (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            };
            return Err(Error::machine(format!("MPI cannot be loaded: {}", why.unwrap_or_default()))
                .with_hint("the MPI that compiled moec's library must be installed on every host"));
        }
        Ok(Self {
            begin: function!(handle, c"moec_mpi_begin": BeginFn),
            send: function!(handle, c"moec_mpi_send": SendFn),
            receive: function!(handle, c"moec_mpi_receive": ReceiveFn),
            test: function!(handle, c"moec_mpi_test": TestFn),
            probe: function!(handle, c"moec_mpi_probe": ProbeFn),
            abort: function!(handle, c"moec_mpi_abort": AbortFn),
            end: function!(handle, c"moec_mpi_end": EndFn),
        })
    }
}

/// This process among those that the launcher started.
pub struct Mpi {
    /// Threads call one at a time.
    api: Mutex<Api>,
    rank: usize,
    ranks: usize,
    /// Limit of waiting for the rest of a message, and for the others at the end.
    timeout: Duration,
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mpi").field("rank", &self.rank).field("ranks", &self.ranks).finish_non_exhaustive()
    }
}

/// MPI of this process, which begins at the first call.
///
/// # Errors
/// MPI that cannot be loaded, or does not begin.
pub fn mpi() -> Result<Arc<Mpi>> {
    static MPI: OnceLock<std::result::Result<Arc<Mpi>, String>> = OnceLock::new();
    let begun = MPI.get_or_init(|| Mpi::begin().map(Arc::new).map_err(|e| e.to_string()));
    begun.clone().map_err(Error::machine)
}

impl Mpi {
    fn begin() -> Result<Self> {
        let (api, timeout) = (Api::load()?, timeout()?);
        let (mut rank, mut ranks) = (0, 0);
        let begun = within(timeout * STARTING, "MPI waits for the processes of other hosts", || {
            // SAFETY: the function of `shim.c`, with two numbers to write.
            unsafe { (api.begin)(&raw mut rank, &raw mut ranks) }
        })?;
        done("begin", begun)?;
        Ok(Self { api: Mutex::new(api), rank: index(rank), ranks: index(ranks), timeout })
    }

    /// Ends MPI in this process; every process calls it once, as its last use of MPI.
    ///
    /// # Errors
    /// MPI's own.
    pub fn end(&self) -> Result<()> {
        let api = self.api();
        // SAFETY: the function of `shim.c`.
        let ended = within(self.timeout, "MPI waits for other hosts to end", || unsafe { (api.end)() });
        done("end", ended?)
    }

    fn api(&self) -> MutexGuard<'_, Api> {
        self.api.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ask` gives something, at most so long. It asks without a pause for a time, and then sleeps between
    /// questions: a thread that computes may have the same core, and a thread that yields gets it back late.
    fn poll<T>(
        wait: Duration,
        spin: Duration,
        longest: Duration,
        mut ask: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let begin = Instant::now();
        loop {
            if let Some(found) = ask()? {
                return Ok(Some(found));
            }
            match begin.elapsed() {
                waited if waited >= wait => return Ok(None),
                waited if waited < spin => std::hint::spin_loop(),
                waited => pause((waited / PAUSES).clamp(SHORTEST_PAUSE, longest)),
            }
        }
    }

    /// Waits for a request.
    fn finish(&self, mut request: Handle, wait: Duration) -> Result<bool> {
        let ended = Self::poll(wait, TRANSFER_SPIN, TRANSFER_PAUSE, || {
            let mut ended = 0;
            // SAFETY: the function of `shim.c`, with a request that has not ended.
            done("wait", unsafe { (self.api().test)(&raw mut request, &raw mut ended) })?;
            Ok((ended != 0).then_some(()))
        });
        Ok(ended?.is_some())
    }
}

impl Wire for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn hosts(&self) -> usize {
        self.ranks
    }

    fn send(&self, to: usize, tag: Tag, bytes: &[u8], wait: Duration) -> Result<()> {
        if bytes.len() > MOST {
            return Err(Error::plan(format!("a message of {} bytes", bytes.len())));
        }
        let mut request = std::ptr::null_mut();
        let (count, to_rank) = (bytes.len() as c_int, to as c_int);
        // SAFETY: the function of `shim.c`. The bytes stay until the request has ended, or the job is aborted.
        done("send", unsafe {
            (self.api().send)(bytes.as_ptr().cast(), count, to_rank, tag.number(), &raw mut request)
        })?;
        if !self.finish(request, wait)? {
            self.end_job(&passed(format!("host {to} takes no message for {} s", wait.as_secs())));
        }
        Ok(())
    }

    fn receive(&self, from: usize, tag: Tag, wait: Duration, message: &mut Vec<u8>) -> Result<bool> {
        let (from, tag) = (from as c_int, tag.number());
        let found = Self::poll(wait, Duration::ZERO, LONGEST_PAUSE, || {
            let mut bytes = -1;
            // SAFETY: the function of `shim.c`, with a number to write.
            done("ask", unsafe { (self.api().probe)(from, tag, &raw mut bytes) })?;
            Ok(usize::try_from(bytes).ok())
        })?;
        let Some(bytes) = found else { return Ok(false) };
        message.resize(bytes, 0);
        let mut request = std::ptr::null_mut();
        // SAFETY: the function of `shim.c`; the message has so many bytes, and stays until the request has ended,
        // or the job is aborted.
        done("receive", unsafe {
            (self.api().receive)(message.as_mut_ptr().cast(), bytes as c_int, from, tag, &raw mut request)
        })?;
        if !self.finish(request, self.timeout)? {
            self.end_job(&passed(format!("a message of host {from} does not arrive whole")));
        }
        Ok(true)
    }

    fn end_job(&self, why: &Error) -> ! {
        report(why);
        end_later();
        // SAFETY: the function of `shim.c`; it ends this process, too.
        let _ = unsafe { (self.api().abort)(1) };
        std::process::exit(1);
    }
}

/// Sleeps for a time, and ends on time: Linux adds 50 µs otherwise.
pub(crate) fn pause(time: Duration) {
    #[cfg(target_os = "linux")]
    // SAFETY: takes a number of nanoseconds, and touches no memory.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1);
    }
    std::thread::sleep(time);
}

fn index(number: c_int) -> usize {
    usize::try_from(number).unwrap_or(0)
}

fn done(what: &str, status: Status) -> Result<()> {
    match status {
        0 => Ok(()),
        status => Err(Error::machine(format!("MPI failed to {what}: status {status}"))),
    }
}
