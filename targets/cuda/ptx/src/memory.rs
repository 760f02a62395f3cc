//! The memory that all blocks see: buffers, with nothing between them.
#![expect(clippy::cast_possible_truncation, reason = "a word is cut to its bytes; places lie in a buffer")]

use crate::fault::Fault;
use crate::module::Module;
use crate::types::Space;
use crate::verify::values;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The first address. Below it are the windows of generic addresses.
const FIRST: u64 = 0x1_0000_0000;
/// Alignment of a buffer's address, as `cudaMalloc` has it.
const ALIGN: u64 = 256;
/// Bytes between buffers that belong to none.
const GAP: u64 = 4096;

/// A buffer of a [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer(usize);

/// A buffer's bytes, in words that threads change one by one.
pub(crate) struct BufferBytes {
    pub(crate) name: String,
    pub(crate) first: u64,
    pub(crate) bytes: u64,
    pub(crate) read_only: bool,
    words: Box<[AtomicU32]>,
}

/// Memory that all blocks see, over several kernels: buffers, and the variables of a module.
///
/// Every buffer begins at a multiple of 256, with at least 4096 bytes before it that belong to none.
pub struct Memory {
    held: Vec<BufferBytes>,
    /// Buffers of the module's variables, by index; `None` for shared ones.
    variables: Vec<(String, Option<Buffer>)>,
    next: u64,
    /// Held where a change takes two words.
    both: Mutex<()>,
}

impl Memory {
    /// A memory that holds the `.global` and `.const` variables of a module.
    ///
    /// # Errors
    /// A variable whose values do not fit its type or size.
    pub fn new(module: &Module) -> Result<Self, Fault> {
        let mut memory = Self { held: Vec::new(), variables: Vec::new(), next: FIRST, both: Mutex::new(()) };
        for variable in module.variables() {
            let buffer = if variable.space == Space::Shared {
                None
            } else {
                let mut bytes = values(variable)?;
                bytes.resize(variable.bytes().unwrap_or(0) as usize, 0);
                Some(memory.hold(&variable.name, &bytes, variable.space == Space::Const))
            };
            memory.variables.push((variable.name.clone(), buffer));
        }
        Ok(memory)
    }

    fn hold(&mut self, name: &str, bytes: &[u8], read_only: bool) -> Buffer {
        let words = bytes.chunks(4).map(|chunk| {
            let mut word = [0; 4];
            word[..chunk.len()].copy_from_slice(chunk);
            AtomicU32::new(u32::from_le_bytes(word))
        });
        let words = words.collect();
        let (first, length) = (self.next, bytes.len() as u64);
        self.held.push(BufferBytes { name: name.to_owned(), first, bytes: length, read_only, words });
        self.next = (first + length + GAP).next_multiple_of(ALIGN);
        Buffer(self.held.len() - 1)
    }

    /// A new buffer with these bytes.
    pub fn add(&mut self, name: &str, bytes: &[u8]) -> Buffer {
        self.hold(name, bytes, false)
    }

    /// A new buffer that kernels may only read.
    pub fn add_read_only(&mut self, name: &str, bytes: &[u8]) -> Buffer {
        self.hold(name, bytes, true)
    }

    /// A new buffer with this many zeros that begins at an address, a multiple of 256 after all buffers so
    /// far; `None` for another address.
    pub fn add_at(&mut self, name: &str, address: u64, bytes: usize) -> Option<Buffer> {
        let end = address.checked_add(bytes as u64)?.checked_add(GAP + ALIGN);
        if address < self.next || !address.is_multiple_of(ALIGN) || end.is_none() {
            return None;
        }
        self.next = address;
        Some(self.hold(name, &vec![0; bytes], false))
    }

    /// Writes bytes from byte `at` of a buffer on; `None` where they do not fit.
    pub fn write(&self, buffer: Buffer, at: u64, bytes: &[u8]) -> Option<()> {
        let held = self.range(buffer, at, bytes.len())?;
        let head = bytes.len().min((4 - at as usize % 4) % 4);
        let (head, rest) = bytes.split_at(head);
        let body = at + head.len() as u64;
        let (words, tail) = rest.as_chunks::<4>();
        head.iter().zip(at..).for_each(|(&byte, at)| held.store(at, 1, byte.into()));
        for (&word, to) in words.iter().zip(held.words.get(body as usize / 4..).unwrap_or_default()) {
            to.store(u32::from_le_bytes(word), Relaxed);
        }
        let end = body + 4 * words.len() as u64;
        tail.iter().zip(end..).for_each(|(&byte, at)| held.store(at, 1, byte.into()));
        Some(())
    }

    /// Reads bytes of a buffer from byte `at` on; `None` if there are not that many.
    pub fn read(&self, buffer: Buffer, at: u64, bytes: &mut [u8]) -> Option<()> {
        let held = self.range(buffer, at, bytes.len())?;
        let head = bytes.len().min((4 - at as usize % 4) % 4);
        let (head, rest) = bytes.split_at_mut(head);
        let body = at + head.len() as u64;
        let (words, tail) = rest.as_chunks_mut::<4>();
        head.iter_mut().zip(at..).for_each(|(byte, at)| *byte = held.load(at, 1) as u8);
        let end = body + 4 * words.len() as u64;
        for (word, from) in words.iter_mut().zip(held.words.get(body as usize / 4..).unwrap_or_default()) {
            *word = from.load(Relaxed).to_le_bytes();
        }
        tail.iter_mut().zip(end..).for_each(|(byte, at)| *byte = held.load(at, 1) as u8);
        Some(())
    }

    /// A buffer with this many bytes from byte `at` on.
    fn range(&self, buffer: Buffer, at: u64, bytes: usize) -> Option<&BufferBytes> {
        let held = self.held.get(buffer.0)?;
        at.checked_add(bytes as u64).filter(|&end| end <= held.bytes)?;
        Some(held)
    }

    /// The buffer of a variable of the module, `.global` or `.const`.
    pub fn variable(&self, name: &str) -> Option<Buffer> {
        self.variables.iter().find(|(of, _)| of == name).and_then(|(_, buffer)| *buffer)
    }

    /// The address where a variable of the module begins, by its index and name.
    pub(crate) fn variable_at(&self, index: usize, name: &str) -> Option<u64> {
        let (of, buffer) = self.variables.get(index)?;
        if of == name { buffer.map(|buffer| self.address(buffer)) } else { None }
    }

    /// The address where a buffer begins.
    pub fn address(&self, buffer: Buffer) -> u64 {
        self.held[buffer.0].first
    }

    /// A buffer's bytes as they are now.
    pub fn bytes(&self, buffer: Buffer) -> Vec<u8> {
        let held = &self.held[buffer.0];
        let mut bytes: Vec<u8> =
            held.words.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
        bytes.truncate(held.bytes as usize);
        bytes
    }

    /// The buffer that holds an address, `last` first, and the nearest one before it where none does.
    pub(crate) fn find(
        &self,
        address: u64,
        bytes: u64,
        last: &mut usize,
    ) -> Result<(&BufferBytes, u64), Option<&BufferBytes>> {
        if let Some(held) = self.held.get(*last)
            && address >= held.first
            && address - held.first < held.bytes
        {
            let at = address - held.first;
            return if at + bytes <= held.bytes { Ok((held, at)) } else { Err(Some(held)) };
        }
        let index = self.held.partition_point(|held| held.first <= address);
        let Some(held) = index.checked_sub(1).map(|i| &self.held[i]) else { return Err(None) };
        *last = index - 1;
        let at = address - held.first;
        if at.saturating_add(bytes) <= held.bytes { Ok((held, at)) } else { Err(Some(held)) }
    }

    /// Atomically changes a word of 2, 4 or 8 bytes; returns the old value.
    pub(crate) fn change(&self, held: &BufferBytes, at: u64, bytes: u32, f: impl Fn(u64) -> u64) -> u64 {
        if bytes == 4 {
            let word = &held.words[at as usize / 4];
            let found = word.fetch_update(Relaxed, Relaxed, |old| Some(f(u64::from(old)) as u32));
            return u64::from(found.unwrap_or_default());
        }
        let guard = self.both.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let old = held.load(at, bytes);
        held.store(at, bytes, f(old));
        drop(guard);
        old
    }
}

impl BufferBytes {
    /// Up to eight bytes, aligned.
    pub(crate) fn load(&self, at: u64, bytes: u32) -> u64 {
        let word = |i: usize| u64::from(self.words[i].load(Relaxed));
        let i = at as usize / 4;
        match bytes {
            4 => word(i),
            8 => word(i) | word(i + 1) << 32,
            _ => word(i) >> (8 * (at & 3)) & crate::lanes::mask(8 * bytes),
        }
    }

    /// Up to eight bytes, aligned.
    pub(crate) fn store(&self, at: u64, bytes: u32, value: u64) {
        let i = at as usize / 4;
        match bytes {
            4 => self.words[i].store(value as u32, Relaxed),
            8 => {
                self.words[i].store(value as u32, Relaxed);
                self.words[i + 1].store((value >> 32) as u32, Relaxed);
            }
            _ => {
                let (shift, mask) = (8 * (at & 3), crate::lanes::mask(8 * bytes) as u32);
                let put = |old: u32| Some((old & !(mask << shift)) | ((value as u32 & mask) << shift));
                // It never fails: the closure always has a value.
                let _ = self.words[i].fetch_update(Relaxed, Relaxed, put);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Memory {
        let text = ".version 7.8\n.target sm_80\n.address_size 64\n";
        Memory::new(&crate::parse(text).unwrap()).unwrap()
    }

    /// Bytes that are written at any address are read back, and no other bytes change.
    #[test]
    fn bytes_read_back_from_their_written_address() {
        let mut memory = memory();
        let buffer = memory.add("b", &[7; 23]);
        for at in 0..23_usize {
            for count in 0..=23 - at {
                memory.write(buffer, 0, &[7; 23]).unwrap();
                let bytes: Vec<u8> = (0..count as u8).map(|i| 100 + i).collect();
                memory.write(buffer, at as u64, &bytes).unwrap();
                let mut whole = vec![7; 23];
                whole[at..at + count].copy_from_slice(&bytes);
                assert_eq!(memory.bytes(buffer), whole, "{count} at {at}");
                let mut back = vec![0; count];
                memory.read(buffer, at as u64, &mut back).unwrap();
                assert_eq!(back, bytes, "{count} at {at}");
            }
        }
        let mut two = [0; 2];
        assert!(
            memory.read(buffer, 22, &mut two).is_none() && memory.write(buffer, u64::MAX, &two).is_none()
        );
    }

    #[test]
    fn buffer_is_placed_at_the_requested_address() {
        let mut memory = memory();
        let first = memory.add("a", &[1; 10]);
        let buffer = memory.add_at("b", 1 << 40, 300).unwrap();
        assert_eq!((memory.address(buffer), memory.bytes(buffer)), (1 << 40, vec![0; 300]));
        for wrong in [memory.address(first), (1 << 40) + 256, (1 << 41) + 1, u64::MAX - 255] {
            assert!(memory.add_at("c", wrong, 300).is_none(), "{wrong:x}");
        }
    }
}
