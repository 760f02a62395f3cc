//! Starting a kernel: its parameters, its blocks, and their execution.

use super::block::Block;
use super::error::{ExecutionError, LaunchError};
use super::report::Report;
use super::settings::Launch;
use super::warp_scheduler;
use crate::code::{Constant, Kernel, MAX_SHARED};
use crate::fault::{Fault, wrong};
use crate::memory::{Buffer, Memory};
use crate::module::Module;
use crate::resolve;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Most threads of a block.
const MAX_THREADS: u64 = 1024;

/// A parameter of a kernel, in its order.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// The address of a buffer.
    Buffer(Buffer),
    /// An address, or any other number of 64 bits.
    U64(u64),
    /// A number of 32 bits.
    U32(u32),
    /// A number of 32 bits with sign.
    S32(i32),
    /// A number of floating point.
    F32(f32),
    /// A structure.
    Bytes(Vec<u8>),
}

impl Argument {
    fn bytes(&self, memory: &Memory) -> Vec<u8> {
        match self {
            Self::Buffer(buffer) => memory.address(*buffer).to_le_bytes().into(),
            Self::U64(value) => value.to_le_bytes().into(),
            Self::U32(value) => value.to_le_bytes().into(),
            Self::S32(value) => value.to_le_bytes().into(),
            Self::F32(value) => value.to_le_bytes().into(),
            Self::Bytes(bytes) => bytes.clone(),
        }
    }
}

/// A kernel that can be started.
pub struct Program {
    kernel: Kernel,
    /// Names of the module's variables.
    variables: Vec<String>,
}

impl Program {
    /// Decodes a kernel of a module.
    ///
    /// # Errors
    /// The kernel does not exist, or [`crate::verify`] does not accept it.
    pub fn new(module: &Module, name: &str) -> Result<Self, Fault> {
        let Some(function) = module.function(name).filter(|function| function.entry) else {
            let names: Vec<_> = module.functions().filter(|f| f.entry).map(|f| f.name.clone()).collect();
            return wrong(format!("there is no kernel `{name}`"), format!("kernels: {}", names.join(", ")))
                .map_err(|wrong| wrong.declared(name, 1));
        };
        let kernel = resolve::kernel(module, function)?;
        Ok(Self { kernel, variables: module.variables().map(|v| v.name.clone()).collect() })
    }

    /// Bytes of shared memory that the kernel declares, without what a launch adds.
    pub fn shared_bytes(&self) -> u32 {
        self.kernel.shared
    }

    /// Bytes of a thread's own memory: what does not fit its registers.
    pub fn local_bytes(&self) -> u32 {
        self.kernel.local
    }

    /// The parameters: names and bytes, in their order.
    pub fn parameters(&self) -> impl Iterator<Item = (&str, u32)> {
        self.kernel.params.iter().map(|(name, _, bytes)| (name.as_str(), *bytes))
    }

    /// Executes every block.
    ///
    /// # Errors
    /// An error if the launch does not fit the kernel, or the error of the first of its blocks that stopped.
    pub fn launch(
        &self,
        memory: &Memory,
        arguments: &[Argument],
        launch: &Launch,
    ) -> Result<Report, LaunchError> {
        let start = |(message, hint): (String, String)| LaunchError::Start {
            kernel: self.kernel.name.clone(),
            message,
            hint,
        };
        self.fits(launch).map_err(start)?;
        let params = self.params(memory, arguments).map_err(start)?;
        let addresses = self.addresses(memory).map_err(start)?;
        let blocks: u64 = launch.grid.iter().map(|n| u64::from(*n)).product();
        let run = |index: u64| {
            let [x, y, _] = launch.grid.map(u64::from);
            let at = [index % x, index / x % y, index / x / y].map(|i| i as u32);
            warp_scheduler::run(Block::new(&self.kernel, launch, memory, &params, at), &addresses)
        };
        let execution = LaunchError::Execution;
        if launch.workers <= 1 {
            let mut report = Report::default();
            for index in 0..blocks {
                report.merge(&run(index).map_err(execution)?);
            }
            return Ok(report);
        }
        // Blocks are taken in order, so those before one that stops are all executed.
        let (next, stopped) = (AtomicU64::new(0), AtomicBool::new(false));
        let results = Mutex::new((Report::default(), None::<(u64, Box<ExecutionError>)>));
        std::thread::scope(|scope| {
            for _ in 0..launch.workers.min(256) {
                scope.spawn(|| {
                    while !stopped.load(Relaxed) {
                        let index = next.fetch_add(1, Relaxed);
                        if index >= blocks {
                            break;
                        }
                        let found = run(index);
                        let mut results = results.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                        match found {
                            Ok(report) => results.0.merge(&report),
                            Err(error) => {
                                stopped.store(true, Relaxed);
                                if results.1.as_ref().is_none_or(|(first, _)| index < *first) {
                                    results.1 = Some((index, error));
                                }
                            }
                        }
                    }
                });
            }
        });
        let (report, error) = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        error.map_or(Ok(report), |(_, error)| Err(execution(error)))
    }

    /// Checks that a launch fits the kernel; the error has what is wrong, and what would be right.
    fn fits(&self, launch: &Launch) -> Result<(), (String, String)> {
        let threads: u64 = launch.block.iter().map(|n| u64::from(*n)).product();
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err((
                format!("a block of {threads} threads"),
                format!("1 to {MAX_THREADS} are possible"),
            ));
        }
        if launch.grid.contains(&0) {
            return Err(("a grid without blocks".into(), "1 block or more in every dimension".into()));
        }
        if let Some(requested) = self.kernel.threads.filter(|requested| *requested != launch.block) {
            return Err((
                format!("a block of {:?} threads", launch.block),
                format!("it requires {requested:?}, `.reqntid`"),
            ));
        }
        if let Some(most) = self.kernel.max_threads
            && threads > most.iter().fold(1, |all: u64, n| all.saturating_mul((*n).into()))
        {
            return Err((
                format!("a block of {threads} threads"),
                format!("it takes {most:?} at most, `.maxntid`"),
            ));
        }
        let shared = u64::from(self.kernel.shared) + u64::from(launch.dynamic_shared);
        if shared > MAX_SHARED {
            return Err((
                format!("{shared} bytes of shared memory"),
                format!("a block has {MAX_SHARED} at most"),
            ));
        }
        Ok(())
    }

    /// The bytes of the parameters, where the kernel has them.
    fn params(&self, memory: &Memory, arguments: &[Argument]) -> Result<Vec<u8>, (String, String)> {
        let params_of_kernel = &self.kernel.params;
        if arguments.len() != params_of_kernel.len() {
            return Err((
                format!("{} arguments", arguments.len()),
                format!("it has {} parameters", params_of_kernel.len()),
            ));
        }
        let mut params = vec![0; self.kernel.param_bytes as usize];
        for ((name, first, bytes), argument) in params_of_kernel.iter().zip(arguments) {
            let given = argument.bytes(memory);
            if given.len() != *bytes as usize {
                return Err((format!("{} bytes for `{name}`", given.len()), format!("it has {bytes} bytes")));
            }
            params[*first as usize..(first + bytes) as usize].copy_from_slice(&given);
        }
        Ok(params)
    }

    /// Addresses of the constants that are variables of the module; 0 of others.
    fn addresses(&self, memory: &Memory) -> Result<Vec<u64>, (String, String)> {
        let address = |constant: &Constant| match constant {
            Constant::Address(index, _) => {
                let name = &self.variables[*index as usize];
                memory.variable_at(*index as usize, name).ok_or_else(|| {
                    (
                        format!("the memory has no variable `{name}`"),
                        "make it by `Memory::new` of the same module".into(),
                    )
                })
            }
            _ => Ok(0),
        };
        self.kernel.constants.iter().map(|(_, constant)| address(constant)).collect()
    }
}
