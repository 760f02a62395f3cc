//! A GPU as its driver shows it: a context with a stream for kernels and others for copies.
//!
//! Copies of the steps wait for the kernels before them, and kernels for the copies before them: each stream
//! waits for an event of the other. Copies that run in parallel to the steps have a stream of their own
//! (`copies::CopyStream`), which waits for no kernel, and for which none waits.
#![expect(clippy::cast_possible_truncation, reason = "lengths of fixed arrays")]

mod copies;
mod graphs;

use crate::api::{self, Api, Device, DevicePtr, Handle, Status, code};
pub(crate) use copies::CopyStream;
use copies::{NO_TIMES, NON_BLOCKING};
use graphs::Graphs;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes of the assembler's message.
const LOG: usize = 16 << 10;
/// Time that a wait spins: most crossings of a decoded token are shorter, and to sleep takes longer than
/// that.
const AT_ONCE: Duration = Duration::from_micros(200);
/// Between two looks from then on.
const LOOK: Duration = Duration::from_micros(20);

/// Refusal of the driver: the function, and its error's number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Name of the function.
    pub function: &'static str,
    /// Its result.
    pub status: i32,
    /// The name of the error with the driver's message for it, and the assembler's message.
    pub message: String,
    /// The kernel that was to be launched.
    pub kernel: Option<Kernel>,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} gives {}", self.function, self.message)
    }
}

/// Result of the driver.
pub type Result<T, E = Refusal> = std::result::Result<T, E>;

/// A GPU.
pub struct GpuDevice {
    api: Api,
    device: Device,
    context: Handle,
    compute: Handle,
    copies: CopyStream,
    event: Handle,
    module: Handle,
    memory: Option<(DevicePtr, usize)>,
    graphs: Graphs,
    /// A kernel did not end: whatever waits for it would not either.
    hangs: Arc<AtomicBool>,
}

// SAFETY: handles of the driver may be used by any thread that has made the context its own, which every
// function below does; the owner of a GPU uses it alone.
unsafe impl Send for GpuDevice {}

impl GpuDevice {
    /// Opens the first GPU of this machine.
    ///
    /// # Errors
    /// A missing driver, with the loader's message; an error of the driver, which is `CUDA_ERROR_NO_DEVICE`
    /// without a GPU.
    pub fn open() -> Result<Result<Self>, String> {
        api::system().map(|api| Self::with(&api))
    }

    /// Opens the first GPU by a driver.
    ///
    /// # Errors
    /// Fails if the driver does; `CUDA_ERROR_NO_DEVICE` without a GPU.
    pub(crate) fn with(api: &Api) -> Result<Self> {
        let (mut count, mut device) = (0, 0);
        // SAFETY: every address is of a variable that lives as long as the call.
        unsafe {
            check(api, "cuInit", (api.init)(0))?;
            check(api, "cuDeviceGetCount", (api.device_count)(&raw mut count))?;
            if count < 1 {
                check(api, "cuDeviceGetCount", code::NO_DEVICE)?;
            }
            check(api, "cuDeviceGet", (api.device_get)(&raw mut device, 0))?;
        }
        let hangs = Arc::new(AtomicBool::new(false));
        let mut opened = Self {
            api: *api,
            device,
            context: ptr::null_mut(),
            compute: ptr::null_mut(),
            copies: CopyStream::closed(api, &hangs),
            event: ptr::null_mut(),
            module: ptr::null_mut(),
            memory: None,
            graphs: Graphs::of_environment(),
            hangs,
        };
        // SAFETY: as above; the context is this GPU's until it is dropped.
        unsafe {
            check(api, "cuDevicePrimaryCtxRetain", (api.context_retain)(&raw mut opened.context, device))?;
            opened.current()?;
            check(api, "cuStreamCreate", (api.stream_create)(&raw mut opened.compute, NON_BLOCKING))?;
            check(api, "cuEventCreate", (api.event_create)(&raw mut opened.event, NO_TIMES))?;
        }
        opened.copies.open(opened.context)?;
        Ok(opened)
    }

    /// Makes the context that of the calling thread.
    fn current(&self) -> Result<()> {
        // SAFETY: the context is this GPU's own.
        check(&self.api, "cuCtxSetCurrent", unsafe { (self.api.context_set)(self.context) })
    }

    /// Name of the GPU.
    pub fn name(&self) -> String {
        let mut name = [0 as c_char; 128];
        // SAFETY: the buffer has the given number of bytes.
        let status = unsafe { (self.api.device_name)(name.as_mut_ptr(), name.len() as i32, self.device) };
        let bytes: Vec<u8> = name.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect();
        if status == code::SUCCESS { String::from_utf8_lossy(&bytes).into_owned() } else { String::new() }
    }

    /// Its generation, as two digits: 90 of `sm_90`.
    ///
    /// # Errors
    /// Fails if the driver does.
    pub fn generation(&self) -> Result<u32> {
        let [major, minor] = code::CAPABILITY.map(|attribute| self.attribute(attribute));
        Ok(major? * 10 + minor?)
    }

    /// Bytes a second that its memory's clock and width allow, two transfers a clock, as the driver states
    /// both.
    ///
    /// # Errors
    /// Fails if the driver does.
    pub fn memory_peak(&self) -> Result<f64> {
        let [khz, bits] = code::MEMORY.map(|attribute| self.attribute(attribute));
        Ok(2e3 * f64::from(khz?) * f64::from(bits?) / 8.0)
    }

    /// Clocks a second of all its multiprocessors together, at the highest clock that the driver states.
    ///
    /// # Errors
    /// Fails if the driver does.
    pub fn clocks(&self) -> Result<f64> {
        let [count, khz] = code::MULTIPROCESSORS.map(|attribute| self.attribute(attribute));
        Ok(f64::from(count?) * f64::from(khz?) * 1e3)
    }

    fn attribute(&self, attribute: i32) -> Result<u32> {
        let mut number = 0;
        // SAFETY: the address is of a number.
        let status = unsafe { (self.api.device_attribute)(&raw mut number, attribute, self.device) };
        check(&self.api, "cuDeviceGetAttribute", status).map(|()| number.max(0).cast_unsigned())
    }

    /// Loads kernels: a text that the driver assembles, or machine code.
    ///
    /// # Errors
    /// Fails if the driver's assembler does.
    pub fn load(&mut self, image: Image<'_>) -> Result<()> {
        self.current()?;
        let mut log = vec![0_u8; LOG];
        let mut options = [code::ERROR_LOG, code::ERROR_LOG_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(LOG)];
        let at = match image {
            Image::Text(text) => text.as_ptr().cast(),
            Image::Code(code) => code.as_ptr().cast(),
        };
        if !self.module.is_null() {
            // SAFETY: no kernel of it is in use any more.
            unsafe { (self.api.module_unload)(self.module) };
            self.module = ptr::null_mut();
        }
        // SAFETY: a text ends in a zero byte, and code has its length in its head; both options have their
        // values, and the log has the given number of bytes.
        let status = unsafe {
            (self.api.module_load)(
                &raw mut self.module,
                at,
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        let log_text = log.split(|&b| b == 0).next().map(String::from_utf8_lossy).unwrap_or_default();
        check(&self.api, "cuModuleLoadDataEx", status).map_err(|refusal| match log_text.trim() {
            "" => refusal,
            log_text => Refusal { message: format!("{}: {log_text}", refusal.message), ..refusal },
        })
    }

    /// A kernel of the text or code that was loaded last.
    ///
    /// # Errors
    /// Fails if there is no kernel of that name.
    pub fn kernel(&self, symbol: &CStr) -> Result<Kernel> {
        let mut function = ptr::null_mut();
        self.current()?;
        // SAFETY: the module is loaded, and the name ends in a zero byte.
        let status = unsafe { (self.api.module_function)(&raw mut function, self.module, symbol.as_ptr()) };
        check(&self.api, "cuModuleGetFunction", status).map(|()| Kernel(function))
    }

    /// Bytes of its memory that are free, and all.
    ///
    /// # Errors
    /// Fails if the driver does.
    pub fn memory(&self) -> Result<[usize; 2]> {
        let (mut free, mut all) = (0, 0);
        self.current()?;
        // SAFETY: both addresses are of numbers.
        let status = unsafe { (self.api.memory_info)(&raw mut free, &raw mut all) };
        check(&self.api, "cuMemGetInfo", status).map(|()| [free, all])
    }

    /// Takes a memory of zeros, in the place of an earlier one, which is not used any more.
    ///
    /// # Errors
    /// Fails if the driver does.
    pub fn take(&mut self, bytes: usize) -> Result<DevicePtr> {
        let mut at = 0;
        self.current()?;
        if let Some((old, _)) = self.memory.take() {
            // SAFETY: it is this GPU's own.
            check(&self.api, "cuMemFree", unsafe { (self.api.memory_free)(old) })?;
        }
        // SAFETY: the address is of a number.
        check(&self.api, "cuMemAlloc", unsafe { (self.api.memory_alloc)(&raw mut at, bytes) })?;
        self.memory = Some((at, bytes));
        // SAFETY: the memory has this many bytes.
        let status = unsafe { (self.api.memory_zero)(at, 0, bytes, self.compute) };
        check(&self.api, "cuMemsetD8Async", status)?;
        Ok(at)
    }

    /// Whether a place is inside the memory.
    pub(crate) fn holds(&self, at: u64, bytes: usize) -> bool {
        let Some((base, all)) = self.memory else { return false };
        at.checked_sub(base).is_some_and(|offset| offset.saturating_add(bytes as u64) <= all as u64)
    }

    /// Launches a kernel at once.
    ///
    /// # Safety
    /// The kernel must take exactly these addresses.
    ///
    /// # Errors
    /// Fails if the driver does.
    pub unsafe fn launch(
        &mut self,
        kernel: Kernel,
        [x, y, z]: [u32; 3],
        block: u32,
        addresses: &[u64],
        rows: u32,
    ) -> Result<()> {
        self.current()?;
        let mut parameters: Vec<*mut c_void> =
            addresses.iter().map(|at| ptr::from_ref(at).cast_mut().cast()).collect();
        parameters.push(ptr::from_ref(&rows).cast_mut().cast());
        // SAFETY: the caller's promise; every parameter is read before the call returns.
        let status = unsafe {
            (self.api.launch)(
                kernel.0,
                x,
                y,
                z,
                block,
                1,
                1,
                0,
                self.compute,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check(&self.api, "cuLaunchKernel", status)
    }

    /// Makes one stream wait for the work that the other has been given.
    fn order_after(&self, later: Handle, earlier: Handle) -> Result<()> {
        // SAFETY: streams and event are this GPU's own.
        unsafe {
            check(&self.api, "cuEventRecord", (self.api.event_record)(self.event, earlier))?;
            check(&self.api, "cuStreamWaitEvent", (self.api.stream_wait_event)(later, self.event, 0))
        }
    }

    /// Zeroes a part of the GPU's memory, in the order of its kernels.
    ///
    /// # Errors
    /// Fails if the driver does.
    pub fn zero(&mut self, at: DevicePtr, bytes: usize) -> Result<()> {
        self.current()?;
        self.flush()?;
        // SAFETY: the driver checks the address.
        check(&self.api, "cuMemsetD8Async", unsafe { (self.api.memory_zero)(at, 0, bytes, self.compute) })
    }

    /// Copies inside of the GPU's memory, in the order of its kernels.
    ///
    /// # Errors
    /// Fails if the driver does.
    pub fn copy_within(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<()> {
        self.current()?;
        self.flush()?;
        // SAFETY: the driver checks both ends.
        let status = unsafe { (self.api.copy_within)(to, from, bytes, self.compute) };
        check(&self.api, "cuMemcpyDtoDAsync", status)
    }

    /// Waits until every kernel has ended, and every copy before it.
    ///
    /// # Errors
    /// The error that stopped one; `CUDA_ERROR_NOT_READY` if one takes longer than `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        self.current()?;
        self.flush()?;
        self.ended(self.compute, limit)
    }

    /// Waits for a stream.
    fn ended(&self, stream: Handle, limit: Duration) -> Result<()> {
        // SAFETY: the stream is this GPU's own.
        poll(&self.api, "cuStreamQuery", limit, &self.hangs, || unsafe { (self.api.stream_query)(stream) })
    }
}

/// Polls until something is there; `hangs` is set where that takes longer than `limit`.
fn poll(
    api: &Api,
    function: &'static str,
    limit: Duration,
    hangs: &AtomicBool,
    query: impl Fn() -> Status,
) -> Result<()> {
    let start = Instant::now();
    loop {
        let status = query();
        let waited = start.elapsed();
        if status == code::NOT_READY && waited <= limit {
            if waited < AT_ONCE {
                std::thread::yield_now();
            } else {
                std::thread::sleep(LOOK);
            }
            continue;
        }
        if status == code::NOT_READY {
            hangs.store(true, Ordering::Relaxed);
        }
        return check(api, function, status);
    }
}

impl Drop for GpuDevice {
    fn drop(&mut self) {
        // Freeing memory of a kernel waits for it.
        if self.hangs.load(Ordering::Relaxed) || self.context.is_null() || self.current().is_err() {
            return;
        }
        // SAFETY: everything is this GPU's own and used no more; objects that were not created are not
        // released.
        unsafe {
            self.graphs.free(&self.api);
            if !self.compute.is_null() {
                (self.api.stream_destroy)(self.compute);
            }
            if !self.event.is_null() {
                (self.api.event_destroy)(self.event);
            }
            self.copies.free();
            if let Some((at, _)) = self.memory {
                (self.api.memory_free)(at);
            }
            if !self.module.is_null() {
                (self.api.module_unload)(self.module);
            }
            (self.api.context_release)(self.device);
        }
    }
}

/// Image that a module is loaded from.
#[derive(Clone, Copy, Debug)]
pub enum Image<'a> {
    /// PTX.
    Text(&'a CStr),
    /// Machine code, an ELF file of NVIDIA's. A driver trusts its head: an assembler must have written it.
    Code(&'a [u8]),
}

/// A kernel of a GPU's module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(Handle);

// SAFETY: a handle of the driver is a number; it is used under the GPU's context.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

fn check(api: &Api, function: &'static str, status: Status) -> Result<()> {
    if status == code::SUCCESS {
        return Ok(());
    }
    let texts = [api.error_name, api.error_text].map(|query| {
        let mut text = ptr::null();
        // SAFETY: the address is of a pointer; texts are the driver's, and stay.
        unsafe {
            let found = query(status, &raw mut text) == code::SUCCESS && !text.is_null();
            found.then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    });
    let message = match texts {
        [Some(name), Some(text)] => format!("{name} ({text})"),
        [Some(one), None] | [None, Some(one)] => one,
        [None, None] => format!("error {status}"),
    };
    Err(Refusal { function, status, message, kernel: None })
}
