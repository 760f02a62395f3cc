//! Report of a kernel: instructions by class, and what it read and wrote.

use crate::code::{Class, Kernel};
use std::fmt::{Display, Formatter};

/// Bytes of a sector, the least that global memory moves.
const SECTOR: u64 = 32;

/// Instructions of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCount {
    /// Instructions, each once for a warp.
    pub warps: u64,
    /// Instructions, each once for every thread that executed it.
    pub threads: u64,
    /// Operations: one of an addition, two of a multiply-add, of every number of a vector.
    pub operations: u64,
}

/// Traffic to and from global memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Accesses, each once for a warp.
    pub requests: u64,
    /// Bytes that threads requested.
    pub bytes: u64,
    /// Sectors of 32 bytes that accesses touched, each once for every access of a warp.
    pub sectors: u64,
}

impl Traffic {
    /// Bytes requested by bytes moved: 1 if neighbours read neighbours, 1/8 if every f32 is in a sector of
    /// its own, above 1 if threads read the same data. 1 without traffic.
    pub fn coalescing(&self) -> f64 {
        if self.sectors == 0 { 1.0 } else { self.bytes as f64 / (self.sectors * SECTOR) as f64 }
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.sectors += other.sectors;
    }

    /// Counts the access of a warp: the address of each of its lanes, and bytes of each.
    pub(super) fn count(&mut self, addresses: &mut [u64], bytes: u64) {
        self.requests += 1;
        self.bytes += bytes * addresses.len() as u64;
        for address in &mut *addresses {
            *address /= SECTOR;
        }
        if !addresses.is_sorted() {
            addresses.sort_unstable();
        }
        let changes = addresses.windows(2).filter(|pair| pair[0] != pair[1]).count();
        self.sectors += changes as u64 + u64::from(!addresses.is_empty());
    }
}

/// Report of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Counts of [`Class`], in its order.
    pub classes: [ClassCount; Class::NAMES.len()],
    /// Loads of global memory, copies to shared memory among them.
    pub loads: Traffic,
    /// Stores to global memory.
    pub stores: Traffic,
    /// Atomic operations on global memory.
    pub atomics: Traffic,
}

impl Report {
    /// The counts of a class.
    pub fn class(&self, class: Class) -> ClassCount {
        self.classes[class as usize]
    }

    /// Instructions of every class.
    pub fn all(&self) -> ClassCount {
        self.classes.iter().fold(ClassCount::default(), |sum, of| ClassCount {
            warps: sum.warps + of.warps,
            threads: sum.threads + of.threads,
            operations: sum.operations + of.operations,
        })
    }

    /// Adds how often each instruction was executed: by warps and by threads.
    pub(super) fn add(&mut self, kernel: &Kernel, counts: &[(u64, u64)]) {
        for (code, (warps, threads)) in kernel.code.iter().zip(counts) {
            let class = &mut self.classes[code.class as usize];
            class.warps += warps;
            class.threads += threads;
            class.operations += threads * u64::from(code.operations);
        }
    }

    pub(super) fn merge(&mut self, other: &Self) {
        for (sum, of) in self.classes.iter_mut().zip(&other.classes) {
            sum.warps += of.warps;
            sum.threads += of.threads;
            sum.operations += of.operations;
        }
        self.loads.add(&other.loads);
        self.stores.add(&other.stores);
        self.atomics.add(&other.atomics);
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        for (name, class) in Class::NAMES {
            let of = self.class(class);
            if of.warps > 0 {
                writeln!(
                    f,
                    "{name}: {} of warps, {} of threads, {} operations",
                    of.warps, of.threads, of.operations
                )?;
            }
        }
        for (name, of) in [("loads", self.loads), ("stores", self.stores), ("atomics", self.atomics)] {
            if of.requests > 0 {
                let share = of.coalescing();
                writeln!(f, "{name}: {} bytes in {} sectors, coalesced {share:.3}", of.bytes, of.sectors)?;
            }
        }
        Ok(())
    }
}
