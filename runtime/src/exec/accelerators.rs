//! Memories of accelerators: their allocation, and the weights that are copied there.

use crate::bundle::BundleFiles;
use crate::bundle::program::Program;
use crate::error::{Error, Result};
use crate::exec::graphs::Graphs;
use crate::exec::unit::ComputeUnit;
use crate::platform::memory::Addr;
use crate::weights::store::{CheckLevel, MappedStore, Store};
use moec_ir::plan::{ALIGN, Resident};
use std::collections::BTreeSet;

/// Executor of the steps of an accelerator.
pub enum Executor {
    /// Static graphs, on rows in the CPU's memory.
    Graphs(Box<dyn Graphs>),
    /// Kernels and builtins, in a memory of its own or the CPU's.
    Unit(Box<dyn ComputeUnit>),
}

/// Weights in a memory: by segment, the address of its bytes, or of the table of its matrices.
#[derive(Debug, Default)]
pub(crate) struct Residents(Vec<Option<Addr>>);

impl Residents {
    /// Address of a segment, or of its table.
    pub(crate) fn of(&self, segment: u32) -> Option<Addr> {
        self.0.get(segment as usize).copied().flatten()
    }
}

/// Memories of the accelerators.
#[derive(Debug, Default)]
pub(crate) struct AcceleratorMemories {
    /// First byte of the arena of each memory but the first; `None` if no unit has a step.
    pub(crate) arenas: Vec<Option<Addr>>,
    /// Address of each state that is not in the CPU's memory.
    pub(crate) states: Vec<Option<Addr>>,
    /// Weights of each memory but the first.
    pub(crate) residents: Vec<Residents>,
    /// Scratch of each unit.
    pub(crate) scratch: Vec<Option<Addr>>,
    /// Bytes that were allocated in each memory but the first.
    pub(crate) bytes: Vec<u64>,
    /// Whether the CPU can read each of them in place.
    pub(crate) mapped: Vec<bool>,
}

/// Allocates the memories of a program's units, and copies the weights there that units read in them, of files
/// that are checked first. Segments that `stays` on disk have addresses and no bytes.
///
/// # Errors
/// Memory refused; a unit that lacks the memory of the plan; weight files that cannot be read.
pub(crate) fn open<'p>(
    program: &'p Program,
    units: &mut [Option<Box<dyn ComputeUnit + 'p>>],
    files: Option<&BundleFiles>,
    check: CheckLevel,
    stays: &dyn Fn(u32) -> bool,
) -> Result<AcceleratorMemories> {
    let count = program.memories.len();
    let mut accelerators = AcceleratorMemories {
        states: vec![None; program.states.len()],
        scratch: vec![None; program.units.len()],
        ..AcceleratorMemories::default()
    };
    // Weights of memories whose units bring them are not read here.
    let brings =
        |memory: u32| {
            program.units.iter().zip(units.iter()).any(|(of, unit)| {
                of.memory == memory && unit.as_ref().is_some_and(|unit| !unit.has_weights())
            })
        };
    let needed: BTreeSet<u32> = (0..)
        .zip(&program.memories)
        .filter(|(memory, _)| brings(*memory))
        .flat_map(|(_, m)| &m.residents)
        .map(|r| r.segment)
        .collect();
    let store = match files {
        Some(files) if !needed.is_empty() => {
            Some(MappedStore::of(program, files, check, &|i| needed.contains(&i) && !stays(i))?)
        }
        _ => None,
    };
    for index in 1..count as u32 {
        let owner = (0..units.len()).find(|&u| {
            program.units.get(u).is_some_and(|r| r.memory == index)
                && units.get(u).is_some_and(Option::is_some)
        });
        let Some(unit) = owner.and_then(|u| units.get_mut(u)).and_then(Option::as_mut) else {
            // No step runs there.
            accelerators.arenas.push(None);
            accelerators.residents.push(Residents::default());
            accelerators.bytes.push(0);
            accelerators.mapped.push(false);
            continue;
        };
        let (memory, mapped) = (&program.memories[index as usize], unit.is_mapped());
        let bytes = program.whole(index).ok_or_else(|| Error::plan("a memory past all addresses"))?;
        let base = unit.take(bytes)?.ok_or_else(|| {
            Error::plan(format!(
                "`{}` has no memory of its own, and the plan has `{}`",
                unit.name(),
                memory.name
            ))
        })?;
        // The sum of the following allocations, in this order, is the peak.
        let mut end = 0_u64;
        let mut place = |bytes: u64| {
            let at = base.plus(end as usize);
            end += bytes.next_multiple_of(ALIGN);
            at
        };
        accelerators.arenas.push(Some(place(memory.arena_bytes)));
        for (state, at) in
            program.states.iter().zip(&mut accelerators.states).filter(|(s, _)| s.memory == index)
        {
            *at = Some(place(state.bytes()));
        }
        let mut residents = vec![None; program.segments.len()];
        for resident in &memory.residents {
            let at = if unit.has_weights() || stays(resident.segment) {
                place_segment(program, resident, &mut place)
            } else {
                let store = store.as_ref().ok_or_else(|| {
                    Error::plan("weights of a memory beside the CPU's, and no bundle to read them from")
                })?;
                copy_segment(program, resident, store, unit.as_ref(), &mut place)
            };
            residents[resident.segment as usize] = Some(at?);
        }
        accelerators.residents.push(Residents(residents));
        let here = |u: usize| program.units[u].memory == index && units.get(u).is_some_and(Option::is_some);
        for u in (0..program.units.len()).filter(|&u| here(u)) {
            accelerators.scratch[u] = Some(place(program.scratch_bytes));
        }
        if end > bytes {
            return Err(Error::plan(format!("`{}` holds {end} bytes, past its {bytes}", memory.name)));
        }
        accelerators.bytes.push(bytes);
        accelerators.mapped.push(mapped);
    }
    Ok(accelerators)
}

/// The address that steps get of a segment, or of the table of some of its matrices, which its unit brings
/// itself. The places are those of [`copy_segment`].
fn place_segment(program: &Program, resident: &Resident, place: &mut dyn FnMut(u64) -> Addr) -> Result<Addr> {
    let missing = || Error::plan(format!("segment {} is not there", resident.segment));
    let segment = program.segments.get(resident.segment as usize).ok_or_else(missing)?;
    if resident.matrices.is_empty() {
        return Ok(place(segment.bytes));
    }
    let bytes = segment.matrix_bytes().ok_or_else(missing)?;
    let table = place(resident.table_bytes(segment));
    for _ in &resident.matrices {
        place(bytes);
    }
    Ok(table)
}

/// Copies a segment, or some of its matrices with their table, to `place`. Returns the address that steps
/// get.
fn copy_segment(
    program: &Program,
    resident: &Resident,
    store: &MappedStore,
    unit: &dyn ComputeUnit,
    place: &mut dyn FnMut(u64) -> Addr,
) -> Result<Addr> {
    let missing = || Error::plan(format!("segment {} is not there", resident.segment));
    let segment = program.segments.get(resident.segment as usize).ok_or_else(missing)?;
    if resident.matrices.is_empty() {
        let (from, to) = (store.segment(resident.segment).ok_or_else(missing)?, place(segment.bytes));
        // SAFETY: the store maps the segment's bytes; the destination has as many, which nothing else uses.
        unsafe { unit.copy(from, to, segment.bytes as usize) };
        forget(from, segment.bytes as usize);
        return Ok(to);
    }
    let bytes = segment.matrix_bytes().ok_or_else(missing)?;
    let entries = resident.table_entries(segment) as usize;
    let table = place(resident.table_bytes(segment));
    let all = store.matrices(resident.segment).ok_or_else(missing)?;
    let mut addresses: Vec<Option<Addr>> = vec![None; entries];
    for (matrix, index) in resident.indices(segment) {
        let to = place(bytes);
        // SAFETY: the table has an address for each matrix of the segment, whose bytes the store maps. The
        // destination has as many bytes, which nothing else uses.
        unsafe {
            let from = all.of::<Addr>().add(index as usize).read();
            unit.copy(from, to, bytes as usize);
            forget(from, bytes as usize);
        }
        if let Some(address) = addresses.get_mut(matrix as usize) {
            *address = Some(to);
        }
    }
    // A request for a matrix that is not here gets the address of another one, never an invalid address.
    let first = addresses.iter().flatten().next().copied().ok_or_else(missing)?;
    let addresses: Vec<Addr> = addresses.into_iter().map(|a| a.unwrap_or(first)).collect();
    // SAFETY: the table has room for an address of each matrix.
    unsafe { unit.copy(Addr::read_only(addresses.as_ptr().cast()), table, entries * size_of::<Addr>()) };
    Ok(table)
}

/// Releases the pages of a mapping that has been copied: a budget has no room for them. A hint.
#[cfg(target_os = "linux")]
pub(crate) fn forget(from: Addr, bytes: usize) {
    /// Largest page size of the supported systems.
    const PAGE: usize = 64 << 10;
    let (first, end) = (from.ptr().addr().next_multiple_of(PAGE), (from.ptr().addr() + bytes) / PAGE * PAGE);
    if first < end {
        let at = from.plus(first - from.ptr().addr());
        // SAFETY: whole pages inside of a read-only mapping of a file, which are read again if needed.
        unsafe { libc::madvise(at.ptr().cast(), end - first, libc::MADV_DONTNEED) };
    }
}

/// Does nothing on this system.
#[cfg(not(target_os = "linux"))]
pub(crate) fn forget(_from: Addr, _bytes: usize) {}
