//! State of the fake driver: a memory, a module, and the calls.

use moec_ptx::{Argument, Buffer, Launch, Memory, Module, Program};
use std::ffi::c_int;
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

/// The first address of the GPU's memory: no process has its own there.
const FIRST: u64 = 0x2_0000_0000;
/// Between two memories.
const GAP: u64 = 1 << 20;

/// All of it.
pub(crate) struct State {
    /// First address and length of each allocation, and the buffer that holds it.
    taken: Vec<(u64, usize, Buffer)>,
    next: u64,
    memory: Option<Memory>,
    kernels: Vec<(String, Program)>,
    module: Option<Module>,
    /// Launches of the capture that has begun, and those of every graph.
    capture: Option<Vec<Launched>>,
    graphs: Vec<Vec<Launched>>,
}

/// A launch with the values of its parameters.
#[derive(Clone)]
pub(crate) struct Launched {
    kernel: usize,
    grid: [u32; 3],
    block: [u32; 3],
    arguments: Vec<Argument>,
}

static STATE: Mutex<State> = Mutex::new(State {
    taken: Vec::new(),
    next: FIRST,
    memory: None,
    kernels: Vec::new(),
    module: None,
    capture: None,
    graphs: Vec::new(),
});

/// Uses it.
pub(crate) fn with<T>(work: impl FnOnce(&mut State) -> T) -> T {
    work(&mut STATE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The number that a variable has.
pub(crate) fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().and_then(|v| v.parse().ok()).unwrap_or(otherwise)
}

/// Writes down the call. Gives the error that this function is to give, 0 for none.
pub(crate) fn note(function: &str, what: &str) -> c_int {
    if let Some(path) = std::env::var_os("MOEC_FAKE_LOG")
        && let Ok(mut log) = std::fs::OpenOptions::new().create(true).append(true).open(path)
    {
        let _ = log.write_all(format!("{function} {what}").trim_end().as_bytes());
        let _ = log.write_all(b"\n");
    }
    let refuses = std::env::var("MOEC_FAKE_REFUSE").unwrap_or_default();
    let of = refuses.split_once('=').filter(|(of, _)| *of == function);
    of.and_then(|(_, status)| status.parse().ok()).unwrap_or(0)
}

impl State {
    /// Allocates this many bytes of zeros.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<u64> {
        let empty = || moec_ptx::parse(".version 7.8\n.target sm_80\n.address_size 64\n").ok();
        if self.memory.is_none() {
            self.memory = Memory::new(&empty()?).ok();
        }
        let at = self.next;
        let buffer = self.memory.as_mut()?.add_at("the GPU's memory", at, bytes)?;
        self.taken.push((at, bytes, buffer));
        self.next = (at + bytes as u64 + GAP).next_multiple_of(GAP);
        Some(at)
    }

    /// The memory that has these bytes, and where they begin in it.
    fn place(&self, at: u64, bytes: usize) -> Option<(Buffer, u64)> {
        self.taken.iter().find_map(|&(first, all, buffer)| {
            let offset = at.checked_sub(first)?;
            (offset.checked_add(bytes as u64)? <= all as u64).then_some((buffer, offset))
        })
    }

    pub(crate) fn write(&mut self, at: u64, bytes: &[u8]) -> Option<()> {
        let (buffer, offset) = self.place(at, bytes.len())?;
        self.memory.as_ref()?.write(buffer, offset, bytes)
    }

    pub(crate) fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
        let (buffer, offset) = self.place(at, bytes.len())?;
        self.memory.as_ref()?.read(buffer, offset, bytes)
    }

    /// Loads a text; allocations remain.
    pub(crate) fn load(&mut self, text: &str) -> Result<(), String> {
        let module = moec_ptx::parse(text).map_err(|e| e.to_string())?;
        moec_ptx::verify(&module).map_err(|e| e.to_string())?;
        let mut memory = Memory::new(&module).map_err(|e| e.to_string())?;
        for (at, bytes, held) in &mut self.taken {
            let mut copy = vec![0; *bytes];
            let old = self.memory.as_ref().and_then(|m| m.read(*held, 0, &mut copy));
            let new = memory.add_at("the GPU's memory", *at, *bytes).filter(|_| old.is_some());
            *held = new.ok_or("the memory is lost")?;
            memory.write(*held, 0, &copy);
        }
        (self.memory, self.module, self.kernels) = (Some(memory), Some(module), Vec::new());
        Ok(())
    }

    /// Number of a kernel.
    pub(crate) fn kernel(&mut self, name: &str) -> Option<usize> {
        let program = Program::new(self.module.as_ref()?, name).ok()?;
        self.kernels.push((name.to_owned(), program));
        Some(self.kernels.len() - 1)
    }

    pub(crate) fn name(&mut self, kernel: usize) -> Option<String> {
        self.kernels.get(kernel).map(|(name, _)| name.clone())
    }

    /// A launch of a kernel; `parameter` gives one with this many bytes.
    pub(crate) fn parameters(
        &mut self,
        kernel: usize,
        grid: [u32; 3],
        block: [u32; 3],
        parameter: impl Fn(usize, u32) -> u64,
    ) -> Option<Launched> {
        let (_, program) = self.kernels.get(kernel)?;
        let sizes = program.parameters().map(|(_, bytes)| bytes);
        let arguments = sizes.enumerate().map(|(i, bytes)| match parameter(i, bytes) {
            x if bytes == 8 => Argument::U64(x),
            x => Argument::U32(x as u32),
        });
        Some(Launched { kernel, grid, block, arguments: arguments.collect() })
    }

    /// Executes a launch, or writes it down where a capture has begun.
    pub(crate) fn captured(&mut self, launch: Launched) -> Option<()> {
        if let Some(capture) = &mut self.capture {
            capture.push(launch);
            return Some(());
        }
        self.launch(&launch)
    }

    fn launch(&self, of: &Launched) -> Option<()> {
        let (_, program) = self.kernels.get(of.kernel)?;
        let launch = Launch { unwritten: true, ..Launch::new(of.grid, of.block) };
        let done = program.launch(self.memory.as_ref()?, &of.arguments, &launch);
        done.inspect_err(|e| {
            note("stopped", &e.to_string());
        })
        .ok()
        .map(|_| ())
    }

    /// Begins a capture; there is one at a time.
    pub(crate) fn begin(&mut self) -> Option<()> {
        self.capture.replace(Vec::new()).is_none().then_some(())
    }

    /// Ends it. Gives the number of the graph.
    pub(crate) fn end(&mut self) -> Option<usize> {
        let graph = self.capture.take()?;
        self.graphs.push(graph);
        Some(self.graphs.len() - 1)
    }

    /// Executes the launches of a graph.
    pub(crate) fn replay(&mut self, graph: usize) -> Option<()> {
        let launches = self.graphs.get(graph)?.clone();
        launches.iter().try_for_each(|launch| self.launch(launch))
    }
}
