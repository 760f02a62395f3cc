//! A graphics processor as its driver shows it: a context with two streams, one for kernels and one for copies.
//!
//! Copies to the processor's memory wait for the kernels in front of them, and kernels for copies that came before: each stream waits
//! for an event of the other. Bytes go through pinned buffers, so that what is copied from may be changed at once.

use super::api::{Api, Device, DevicePtr, Handle, Status, code};
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::ptr;
use std::time::{Duration, Instant};

/// Bytes of a pinned buffer.
const STAGED: usize = 4 << 20;
/// Bytes of what the assembler says.
const LOG: usize = 16 << 10;
/// Streams do not wait for the one that belongs to every context.
const NON_BLOCKING: c_uint = 1;
/// Events take no times.
const NO_TIMES: c_uint = 2;
/// Microseconds between two looks at a stream that is waited for.
const LOOK_US: u64 = 20;

/// What the driver refused: the function, and its error's number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) function: &'static str,
    pub(crate) status: Status,
    /// The name of the error, or what the assembler says.
    pub(crate) said: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} gives {}", self.function, self.said)
    }
}

type Result<T, E = Refusal> = std::result::Result<T, E>;

/// A card.
pub(crate) struct Card {
    api: Api,
    device: Device,
    context: Handle,
    compute: Handle,
    copies: Handle,
    event: Handle,
    module: Handle,
    memory: Option<(DevicePtr, usize)>,
    staged: *mut c_void,
    /// A kernel did not end: whatever waits for it would not either.
    hangs: bool,
}

// SAFETY: handles of the driver may be used by any thread that has made the context its own, which every function below does;
// whoever holds a card uses it alone.
unsafe impl Send for Card {}

impl Card {
    /// Opens the first card.
    ///
    /// # Errors
    /// What the driver refuses; [`code::NO_DEVICE`] where there is none.
    pub(crate) fn open(api: Api) -> Result<Self> {
        let (mut count, mut device) = (0, 0);
        // SAFETY: every address is of a variable that lives as long as the call.
        unsafe {
            check(&api, "cuInit", (api.init)(0))?;
            check(&api, "cuDeviceGetCount", (api.device_count)(&raw mut count))?;
            if count < 1 {
                check(&api, "cuDeviceGetCount", code::NO_DEVICE)?;
            }
            check(&api, "cuDeviceGet", (api.device_get)(&raw mut device, 0))?;
        }
        let mut card = Self {
            api,
            device,
            context: ptr::null_mut(),
            compute: ptr::null_mut(),
            copies: ptr::null_mut(),
            event: ptr::null_mut(),
            module: ptr::null_mut(),
            memory: None,
            staged: ptr::null_mut(),
            hangs: false,
        };
        // SAFETY: as above; the context is this card's until it is dropped.
        unsafe {
            check(&api, "cuDevicePrimaryCtxRetain", (api.context_retain)(&raw mut card.context, device))?;
            card.current()?;
            check(&api, "cuStreamCreate", (api.stream_create)(&raw mut card.compute, NON_BLOCKING))?;
            check(&api, "cuStreamCreate", (api.stream_create)(&raw mut card.copies, NON_BLOCKING))?;
            check(&api, "cuEventCreate", (api.event_create)(&raw mut card.event, NO_TIMES))?;
            check(&api, "cuMemHostAlloc", (api.host_alloc)(&raw mut card.staged, STAGED, 0))?;
        }
        Ok(card)
    }

    /// Makes the context that of the calling thread.
    fn current(&self) -> Result<()> {
        // SAFETY: the context is this card's own.
        check(&self.api, "cuCtxSetCurrent", unsafe { (self.api.context_set)(self.context) })
    }

    /// Name of the card.
    pub(crate) fn name(&self) -> String {
        let mut name = [0 as c_char; 128];
        // SAFETY: the buffer has as many bytes as are said.
        let status = unsafe { (self.api.device_name)(name.as_mut_ptr(), name.len() as i32, self.device) };
        let bytes: Vec<u8> = name.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect();
        if status == code::SUCCESS { String::from_utf8_lossy(&bytes).into_owned() } else { String::new() }
    }

    /// Its generation, as two digits: 90 of `sm_90`.
    pub(crate) fn generation(&self) -> Result<u32> {
        let mut numbers = [0; 2];
        for (number, attribute) in numbers.iter_mut().zip(code::CAPABILITY) {
            // SAFETY: the address is of a number.
            let status = unsafe { (self.api.device_attribute)(number, attribute, self.device) };
            check(&self.api, "cuDeviceGetAttribute", status)?;
        }
        Ok(numbers[0].cast_unsigned() * 10 + numbers[1].cast_unsigned())
    }

    /// Has the driver assemble a text.
    ///
    /// # Errors
    /// What its assembler says.
    pub(crate) fn load(&mut self, text: &CStr) -> Result<()> {
        self.current()?;
        let mut log = vec![0_u8; LOG];
        let mut options = [code::ERROR_LOG, code::ERROR_LOG_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(LOG)];
        // SAFETY: the text ends in a zero byte, both options have their values, and the log has as many bytes as is said.
        let status = unsafe {
            (self.api.module_load)(
                &raw mut self.module,
                text.as_ptr().cast(),
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        let said = log.split(|&b| b == 0).next().map(String::from_utf8_lossy).unwrap_or_default();
        check(&self.api, "cuModuleLoadDataEx", status).map_err(|refusal| match said.trim() {
            "" => refusal,
            said => Refusal { said: format!("{}: {said}", refusal.said), ..refusal },
        })
    }

    /// A kernel of the text.
    pub(crate) fn kernel(&self, symbol: &CStr) -> Result<Kernel> {
        let mut function = ptr::null_mut();
        self.current()?;
        // SAFETY: the module is loaded, and the name ends in a zero byte.
        let status = unsafe { (self.api.module_function)(&raw mut function, self.module, symbol.as_ptr()) };
        check(&self.api, "cuModuleGetFunction", status).map(|()| Kernel(function))
    }

    /// Bytes that are free.
    pub(crate) fn free(&self) -> Result<usize> {
        let (mut free, mut all) = (0, 0);
        self.current()?;
        // SAFETY: both addresses are of numbers.
        let status = unsafe { (self.api.memory_info)(&raw mut free, &raw mut all) };
        check(&self.api, "cuMemGetInfo", status).map(|()| free)
    }

    /// Takes a memory of zeros.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<DevicePtr> {
        let mut at = 0;
        self.current()?;
        // SAFETY: the address is of a number.
        check(&self.api, "cuMemAlloc", unsafe { (self.api.memory_alloc)(&raw mut at, bytes) })?;
        self.memory = Some((at, bytes));
        // SAFETY: the memory has so many bytes.
        let status = unsafe { (self.api.memory_zero)(at, 0, bytes, self.compute) };
        check(&self.api, "cuMemsetD8Async", status)?;
        Ok(at)
    }

    /// Where a place begins in the memory; `None` where it lies not inside.
    pub(crate) fn holds(&self, at: u64, bytes: usize) -> bool {
        let Some((base, all)) = self.memory else { return false };
        at.checked_sub(base).is_some_and(|offset| offset.saturating_add(bytes as u64) <= all as u64)
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// The addresses are those that it takes.
    pub(crate) unsafe fn launch(
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

    /// Has one stream wait for what the other has been given.
    fn behind(&self, later: Handle, earlier: Handle) -> Result<()> {
        // SAFETY: streams and event are this card's own.
        unsafe {
            check(&self.api, "cuEventRecord", (self.api.event_record)(self.event, earlier))?;
            check(&self.api, "cuStreamWaitEvent", (self.api.stream_wait_event)(later, self.event, 0))
        }
    }

    /// Copies to the card.
    ///
    /// # Safety
    /// So many bytes are at both ends, and nobody changes those that are read.
    pub(crate) unsafe fn put(
        &mut self,
        from: *const u8,
        to: DevicePtr,
        bytes: usize,
        limit: Duration,
    ) -> Result<()> {
        self.current()?;
        // What kernels still read there.
        self.behind(self.copies, self.compute)?;
        for at in (0..bytes).step_by(STAGED) {
            let count = STAGED.min(bytes - at);
            // SAFETY: the caller's promise; the pinned buffer has as many bytes, and the copy before has ended.
            let status = unsafe {
                ptr::copy_nonoverlapping(from.add(at), self.staged.cast(), count);
                (self.api.copy_in)(to + at as u64, self.staged, count, self.copies)
            };
            check(&self.api, "cuMemcpyHtoDAsync", status)?;
            self.ended(self.copies, limit)?;
        }
        Ok(())
    }

    /// Copies from the card, behind the kernels that were launched.
    ///
    /// # Safety
    /// So many bytes are at both ends, and nobody uses those that are written.
    pub(crate) unsafe fn get(
        &mut self,
        from: DevicePtr,
        to: *mut u8,
        bytes: usize,
        limit: Duration,
    ) -> Result<()> {
        self.current()?;
        self.behind(self.copies, self.compute)?;
        for at in (0..bytes).step_by(STAGED) {
            let count = STAGED.min(bytes - at);
            // SAFETY: the pinned buffer has as many bytes.
            let status = unsafe { (self.api.copy_out)(self.staged, from + at as u64, count, self.copies) };
            check(&self.api, "cuMemcpyDtoHAsync", status)?;
            self.ended(self.copies, limit)?;
            // SAFETY: the caller's promise; the copy has ended.
            unsafe { ptr::copy_nonoverlapping(self.staged.cast::<u8>(), to.add(at), count) };
        }
        Ok(())
    }

    /// Copies inside of the card's memory, in the order of its kernels.
    pub(crate) fn within(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<()> {
        self.current()?;
        // SAFETY: the driver checks both ends.
        let status = unsafe { (self.api.copy_within)(to, from, bytes, self.compute) };
        check(&self.api, "cuMemcpyDtoDAsync", status)
    }

    /// Waits until every kernel has ended.
    ///
    /// # Errors
    /// What stopped one; [`code::NOT_READY`] where one takes longer than `limit`.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<()> {
        self.current()?;
        self.ended(self.compute, limit)
    }

    fn ended(&mut self, stream: Handle, limit: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            // SAFETY: the stream is this card's own.
            let status = unsafe { (self.api.stream_query)(stream) };
            if status != code::NOT_READY {
                return check(&self.api, "cuStreamQuery", status);
            }
            if start.elapsed() > limit {
                self.hangs = true;
                return check(&self.api, "cuStreamQuery", status);
            }
            std::thread::sleep(Duration::from_micros(LOOK_US));
        }
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        // To free what a kernel uses waits for it.
        if self.hangs || self.context.is_null() || self.current().is_err() {
            return;
        }
        // SAFETY: everything is this card's own and used no more; what was not made is not given back.
        unsafe {
            for stream in [self.compute, self.copies] {
                if !stream.is_null() {
                    (self.api.stream_destroy)(stream);
                }
            }
            if !self.event.is_null() {
                (self.api.event_destroy)(self.event);
            }
            if !self.staged.is_null() {
                (self.api.host_free)(self.staged);
            }
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

/// A kernel of a card's module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel(Handle);

// SAFETY: a handle of the driver is a number; it is used under the card's context.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

fn check(api: &Api, function: &'static str, status: Status) -> Result<()> {
    if status == code::SUCCESS {
        return Ok(());
    }
    let mut name = ptr::null();
    // SAFETY: the address is of a pointer; names are texts of the driver's that stay.
    let said = unsafe {
        let found = (api.error_name)(status, &raw mut name) == code::SUCCESS && !name.is_null();
        found.then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    };
    Err(Refusal { function, status, said: said.unwrap_or_else(|| format!("error {status}")) })
}
