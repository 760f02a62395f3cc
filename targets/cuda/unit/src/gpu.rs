//! Compute unit of an NVIDIA GPU, through the CUDA driver.
//!
//! Kernels are launched in their order, those between two copies together. A step that needs their results
//! waits for them, and so do copies. Copies parallel to the steps wait for no kernel, and no kernel waits for
//! these copies: the code that requests them does. Machine code of the bundle is used if the GPU is of
//! its generation and the driver accepts it, else the text. Errors name what was refused, with a remedy.
#![expect(
    clippy::cast_possible_truncation,
    reason = "addresses of a device have 64 bits, as those of its host"
)]

use crate::BACKEND as NAME;
use crate::api::code;
use crate::device::{CopyStream as Copies, GpuDevice, Image, Kernel, Refusal};
use crate::text::{self, Artifact};
use moec_ir::plan::{Builtin, GpuKernel};
use moec_runtime::bundle::BundleReader;
use moec_runtime::bundle::program::{Code, Program};
use moec_runtime::exec::unit::{self, ComputeUnit, Launch, PoolThread, StepFault, UnknownStep};
use moec_runtime::platform::memory::Addr;
use moec_runtime::{Error, Result};
use std::ffi::CString;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// The longest that kernels may take before a thread waits for them: a display's driver kills them after
/// seconds.
pub(crate) const LIMIT: Duration = Duration::from_mins(1);
/// Message where nothing should go wrong.
const BUG: &str =
    "check the bundle with `moec verify`; if it passes, this is a bug of moec, or of the driver";
/// Remedy where the driver does not help.
const EMULATE: &str =
    "run the bundle on a machine with such a GPU, or emulate the unit with `moec run BUNDLE --emulate …`";

/// Opens the first GPU of this machine, for the unit named `unit`.
///
/// # Errors
/// [`Error::Machine`]: no driver, no GPU, a driver that does not start.
pub fn open(unit: &str) -> Result<GpuDevice> {
    let opened = GpuDevice::open().map_err(|why| {
        Error::unit(unit, format!("no NVIDIA driver found ({why})"))
            .with_hint(format!("install NVIDIA's driver; or {EMULATE}"))
    })?;
    opened.map_err(|refusal| not_open(unit, &refusal))
}

fn not_open(unit: &str, refusal: &Refusal) -> Error {
    let why = match refusal.status {
        code::NO_DEVICE => "NVIDIA's driver reports no GPU".to_owned(),
        _ => format!("NVIDIA's driver cannot be started: {refusal}"),
    };
    Error::unit(unit, why).with_hint(EMULATE)
}

/// A GPU of this machine.
pub struct Gpu {
    name: String,
    /// For copies parallel to the steps. It is released before the GPU.
    copies: Mutex<Copies>,
    device: Mutex<GpuDevice>,
    /// By index of the plan's launches.
    kernels: Vec<Option<(Kernel, GpuKernel)>>,
    limit: Duration,
    /// Whether the kernels are the bundle's machine code.
    assembled: bool,
    /// First error that could not be returned: in a copy between two steps, or in what it waited for.
    deferred_error: OnceLock<String>,
}

impl Gpu {
    /// Opens the first GPU of this machine, for the unit of that name.
    ///
    /// # Errors
    /// [`Error::Machine`]: no driver, or no GPU.
    pub fn open(unit: &str) -> Result<Self> {
        open(unit).and_then(|device| Self::of(device, unit, LIMIT))
    }

    #[cfg(test)]
    pub(crate) fn with(api: &crate::api::Api, unit: &str, limit: Duration) -> Result<Self> {
        let device = GpuDevice::with(api).map_err(|refusal| not_open(unit, &refusal));
        device.and_then(|device| Self::of(device, unit, limit))
    }

    fn of(device: GpuDevice, unit: &str, limit: Duration) -> Result<Self> {
        let copies = device.copy_stream().map_err(|refusal| not_open(unit, &refusal))?;
        Ok(Self {
            name: unit.to_owned(),
            copies: Mutex::new(copies),
            device: Mutex::new(device),
            kernels: Vec::new(),
            limit,
            assembled: false,
            deferred_error: OnceLock::new(),
        })
    }

    /// Name of the GPU, as its maker has it.
    pub fn device_name(&self) -> String {
        self.lock().name()
    }

    /// Whether its kernels are the bundle's machine code, not the driver's from the text.
    pub fn is_assembled(&self) -> bool {
        self.assembled
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, GpuDevice> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self, refusal: &Refusal, hint: &str) -> Error {
        Error::unit(&self.name, refusal).with_hint(hint.to_owned())
    }

    /// Error of a GPU with fewer than `bytes` free bytes.
    fn few(&self, device: &GpuDevice, bytes: u64, purpose: &str) -> Error {
        let (free, name) = (room(device), device.name());
        let why = format!("it needs {bytes} bytes of memory{purpose}, and {free} are free on `{name}`");
        Error::unit(&self.name, why)
            .with_hint("end other programs that use the GPU; or place fewer experts there under `[placement]`, and build again")
    }

    /// Error of a kernel, or a copy, that was waited for.
    fn stopped(&self, refusal: &Refusal, limit: Duration) -> Error {
        let named = |id| self.kernels.iter().flatten().find(|(kernel, _)| *kernel == id);
        if let Some((_, of)) = refusal.kernel.and_then(named) {
            return Error::kernel(&self.name, &of.symbol, refusal);
        }
        let why = match refusal.status {
            code::NOT_READY => format!("its kernels have not ended within {} s", limit.as_secs_f64()),
            _ if refusal.function.starts_with("cuMemcpy") => format!("a copy failed: {refusal}"),
            _ => format!("a kernel stopped: {refusal}"),
        };
        Error::unit(&self.name, why).with_hint(BUG)
    }

    /// Refuses a GPU that is older than the kernels. Gives the generations: the kernels', and the GPU's.
    fn check_generation(&self, device: &GpuDevice, artifact: &Artifact) -> Result<[u32; 2]> {
        let required = artifact.generation().and_then(|g| g.strip_prefix("sm_")?.parse::<u32>().ok());
        let required = required
            .ok_or_else(|| Error::plan(format!("`{}` does not name its generation", artifact.path)))?;
        let here = device.generation().map_err(|e| self.refused(&e, EMULATE))?;
        if required <= here {
            return Ok([required, here]);
        }
        Err(Error::unit(
            &self.name,
            format!("its kernels are for sm_{required}, but `{}` is of sm_{here}", device.name()),
        )
        .with_hint(format!("build for a device whose file has `sm = \"sm_{here}\"`, or an older one")))
    }

    /// Loads the kernels: machine code if the GPU and the driver accept it, else PTX. Returns whether it was
    /// machine code.
    fn load_kernels(&self, device: &mut GpuDevice, artifact: Artifact) -> Result<bool> {
        let [required, here] = self.check_generation(device, &artifact)?;
        let zero = |_| Error::plan("a zero byte in a text");
        let text = CString::new(artifact.text).map_err(zero)?;
        // Code runs on its generation, and on later ones of the same first digit.
        let code = artifact.code.filter(|code| required / 10 == here / 10 && text::is_whole(code));
        if code.is_some_and(|code| device.load(Image::Code(&code)).is_ok()) {
            return Ok(true);
        }
        device.load(Image::Text(&text)).map_err(|e| {
            let hint = match e.status {
                code::UNSUPPORTED_PTX_VERSION => "update NVIDIA's driver: kernels require CUDA 11.8 or newer",
                code::INVALID_PTX | code::NO_BINARY_FOR_GPU => {
                    "build the bundle again for the GPU's generation; if that does not help, this is a bug of moec"
                }
                _ => EMULATE,
            };
            self.refused(&e, hint)
        })?;
        Ok(false)
    }

    /// Fails if there is a deferred error.
    fn check_deferred_error(&self) -> Result<()> {
        self.deferred_error.get().map_or(Ok(()), |why| {
            let hint = "check the GPU with `nvidia-smi`".to_owned();
            Err(Error::unit(&self.name, format!("a copy failed: {why}")).with_hint(hint))
        })
    }

    fn launch(&self, index: u32, launch: &Launch<'_>) -> Result<()> {
        self.check_deferred_error()?;
        let missing = || Error::plan(format!("launch {index} is not of `{NAME}`"));
        let (kernel, of) = self.kernels.get(index as usize).and_then(Option::as_ref).ok_or_else(missing)?;
        let failed = |why: String| Error::kernel(&self.name, &of.symbol, why);
        let rows = u32::try_from(launch.n).unwrap_or(u32::MAX);
        let blocks = of.launch.blocks(rows).ok_or_else(|| failed(format!("no grid for {rows} rows")))?;
        let addresses: Vec<u64> = launch.args.iter().map(|at| at.ptr().addr() as u64).collect();
        let mut device = self.lock();
        if let Some(at) = addresses.iter().position(|&at| !device.holds(at, 1)) {
            return Err(failed(format!("operand {at} of step {} is outside of its memory", launch.step)));
        }
        // SAFETY: the plan is verified, and the kernel takes as many addresses, which are in the GPU's memory
        // as long as the unit has it.
        unsafe { device.queue(*kernel, blocks, of.launch.block, &addresses, rows) };
        Ok(())
    }
}

impl ComputeUnit for Gpu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn executes(&self, builtin: Builtin) -> bool {
        matches!(builtin, Builtin::Copy { .. } | Builtin::Launch { .. })
    }

    fn load(&mut self, program: &Program, index: u32, bundle: &BundleReader) -> Result<()> {
        let artifact = text::read(bundle, program, index)?;
        for of in program.launches.iter().filter(|of| of.unit == index) {
            let (unit, kernel) = (self.name.clone(), of.symbol.clone());
            artifact.check(of).map_err(|why| Error::kernel(unit, kernel, why))?;
        }
        let mut device = self.lock();
        let assembled = self.load_kernels(&mut device, artifact)?;
        let mut kernels = Vec::with_capacity(program.launches.len());
        for of in &program.launches {
            if of.unit != index {
                kernels.push(None);
                continue;
            }
            let symbol =
                CString::new(of.symbol.clone()).map_err(|_| Error::plan("a zero byte in a symbol"))?;
            let kernel = device.kernel(&symbol).map_err(|e| self.refused(&e, "build the bundle again"))?;
            kernels.push(Some((kernel, of.clone())));
        }
        drop(device);
        (self.kernels, self.assembled) = (kernels, assembled);
        Ok(())
    }

    fn take(&mut self, bytes: u64) -> Result<Option<Addr>> {
        let mut device = self.lock();
        if room(&device) < bytes {
            return Err(self.few(&device, bytes, ""));
        }
        let at = match device.take(usize::try_from(bytes).unwrap_or(usize::MAX).max(1)) {
            Err(e) if e.status == code::OUT_OF_MEMORY => {
                return Err(self.few(&device, bytes, " in one piece"));
            }
            taken => taken.map_err(|e| self.refused(&e, EMULATE))?,
        };
        // Copies parallel to the steps do not wait for the zeros.
        device.wait(self.limit).map_err(|e| self.refused(&e, EMULATE))?;
        Ok(Some(Addr::read_only(std::ptr::without_provenance(at as usize))))
    }

    fn is_timed(&self) -> bool {
        true
    }

    unsafe fn copy(&self, from: Addr, to: Addr, bytes: usize) {
        // SAFETY: the caller's promise.
        if let Err(e) = unsafe { self.copy_beside_kernels(from, to, bytes) } {
            // The next step reports the error.
            let _ = self.deferred_error.set(e.to_string());
        }
    }

    unsafe fn zero(&self, at: Addr, bytes: usize) {
        if let Err(e) = self.lock().zero(at.ptr().addr() as u64, bytes) {
            // The next step reports the error.
            let _ = self.deferred_error.set(self.stopped(&e, self.limit).to_string());
        }
    }

    unsafe fn submit(&self, launch: &Launch<'_>, _thread: PoolThread) {
        let done = match launch.code {
            Code::Builtin(Builtin::Launch { kernel }) => self.launch(kernel, launch),
            Code::Builtin(builtin) => {
                // SAFETY: the caller's promise; the unit has one thread.
                if unsafe { unit::copied(&Copier(self, launch), launch) } {
                    Ok(())
                } else {
                    return launch.fail(StepFault::Unknown(UnknownStep {
                        unit: NAME,
                        step: launch.step,
                        builtin,
                    }));
                }
            }
            Code::Kernel(_) => Err(Error::plan(format!("step {} gives `{NAME}` a CPU kernel", launch.step))),
        };
        if let Err(e) = done {
            launch.fail(StepFault::Unit(e));
        }
    }

    fn wait(&self, fault: &OnceLock<StepFault>) {
        let ended = self.lock().wait(self.limit).map_err(|e| self.stopped(&e, self.limit));
        if let Err(e) = ended.and_then(|()| self.check_deferred_error()) {
            let _ = fault.set(StepFault::Unit(e));
        }
    }
}

/// Direction of a copy.
enum Direction {
    To(u64),
    From(u64),
    Within([u64; 2]),
}

impl Gpu {
    /// Direction of a copy, which has one end in the GPU's memory at least.
    fn direction(&self, device: &GpuDevice, from: Addr, to: Addr, bytes: usize) -> Result<Direction> {
        // A place in a table that was not read is invalid.
        self.check_deferred_error()?;
        let [first, second] = [from, to].map(|at| at.ptr().addr() as u64);
        match [first, second].map(|at| device.holds(at, bytes)) {
            [false, true] => Ok(Direction::To(second)),
            [true, false] => Ok(Direction::From(first)),
            [true, true] => Ok(Direction::Within([first, second])),
            [false, false] => {
                let why = format!("a copy of {bytes} bytes has both ends outside of its memory");
                Err(Error::unit(&self.name, why).with_hint(BUG))
            }
        }
    }

    /// Copies as a step: after all before it, and before all after it.
    ///
    /// # Safety
    /// As [`ComputeUnit::copy`].
    unsafe fn copy_in_order(&self, from: Addr, to: Addr, bytes: usize) -> Result<()> {
        let mut device = self.lock();
        let limit = self.limit;
        let done = match self.direction(&device, from, to, bytes)? {
            // SAFETY: the caller's promise; one end is the GPU's.
            Direction::To(to) => unsafe { device.put(from.ptr(), to, bytes, limit) },
            // SAFETY: as above.
            Direction::From(from) => unsafe { device.get(from, to.ptr(), bytes, limit) },
            Direction::Within([from, to]) => device.copy_within(from, to, bytes),
        };
        done.map_err(|e| self.stopped(&e, limit))
    }

    /// Copies parallel to the steps, in no order with kernels. The copy has ended when this returns, and the
    /// GPU is free for other work meanwhile.
    ///
    /// # Safety
    /// As [`ComputeUnit::copy`].
    unsafe fn copy_beside_kernels(&self, from: Addr, to: Addr, bytes: usize) -> Result<()> {
        let limit = self.limit;
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let mut device = self.lock();
        let direction = self.direction(&device, from, to, bytes)?;
        let done = if let Direction::Within([from, to]) = direction {
            device.copy_within(from, to, bytes)
        } else {
            drop(device);
            match direction {
                Direction::To(to) => {
                    // SAFETY: the caller's promise; this end is the GPU's.
                    unsafe { copies.put(from.ptr(), to, bytes, limit) }.and_then(|()| copies.wait(limit))
                }
                // SAFETY: as above.
                Direction::From(from) => unsafe { copies.get(from, to.ptr(), bytes, limit) },
                Direction::Within(_) => Ok(()),
            }
        };
        done.map_err(|e| self.stopped(&e, limit))
    }
}

/// Bytes that are free on a GPU.
fn room(device: &GpuDevice) -> u64 {
    device.memory().map_or(0, |[free, _]| free) as u64
}

/// The unit for a copy, which records what went wrong.
struct Copier<'a>(&'a Gpu, &'a Launch<'a>);

impl ComputeUnit for Copier<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn executes(&self, builtin: Builtin) -> bool {
        self.0.executes(builtin)
    }

    unsafe fn copy(&self, from: Addr, to: Addr, bytes: usize) {
        // SAFETY: the caller's promise.
        if let Err(e) = unsafe { self.0.copy_in_order(from, to, bytes) } {
            self.1.fail(StepFault::Unit(e));
        }
    }

    unsafe fn submit(&self, launch: &Launch<'_>, thread: PoolThread) {
        // SAFETY: the caller's promise.
        unsafe { self.0.submit(launch, thread) };
    }
}
