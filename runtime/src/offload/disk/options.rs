//! Options of reads from disk.

use crate::error::{Error, Result};
use std::time::Duration;

/// Smallest block, in bytes: direct reads require it of offsets, lengths and addresses.
pub const SMALLEST_BLOCK: u32 = 4 << 10;
/// Largest block, in bytes: the last of the table that a device is measured by (PowerInfer-2, §2.3.2).
pub const LARGEST_BLOCK: u32 = 512 << 10;

/// Choice of a reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// io_uring if the kernel has it, else threads.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// Threads that call `pread`.
    Threads,
}

/// Names of the choices.
const CHOICES: [(&str, Choice); 3] =
    [("auto", Choice::Auto), ("io_uring", Choice::Uring), ("pread", Choice::Threads)];

impl Choice {
    /// Reads `auto`, `io_uring` or `pread`.
    ///
    /// # Errors
    /// [`Error::Usage`] for another name; `what` names the source of the name.
    pub fn parse(what: &'static str, name: &str) -> Result<Self> {
        let found = CHOICES.iter().find(|(known, _)| *known == name).map(|(_, choice)| *choice);
        let range = "`auto`, `io_uring` or `pread`";
        found.ok_or_else(|| Error::range(what, range, format!("`{name}`")))
    }

    /// Choice by `MOEC_DISK_READER`; [`Choice::Auto`] if it is not set.
    ///
    /// # Errors
    /// As [`Choice::parse`].
    pub fn from_env() -> Result<Self> {
        match std::env::var("MOEC_DISK_READER") {
            Ok(name) if !name.is_empty() => Self::parse("`MOEC_DISK_READER`", &name),
            _ => Ok(Self::Auto),
        }
    }
}

/// Options of reads from disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Reader.
    pub reader: Choice,
    /// Whether reads bypass the kernel's page cache where the file system allows it.
    pub direct: bool,
    /// Most bytes of one read: a multiple of 4096 between [`SMALLEST_BLOCK`] and [`LARGEST_BLOCK`].
    pub block_bytes: u32,
    /// Most reads in flight, 1 to 1024.
    pub depth: u32,
    /// Whether the checksum of every extent is compared before it is handed out. Otherwise only extents with
    /// a failed read are checked.
    pub verify_reads: bool,
    /// Whether the memory of all buffers is registered with the kernel beforehand, if possible. Registered
    /// memory is allocated at once: not useful for buffers that are filled one by one, and only once.
    pub register: bool,
    /// Maximum number of repeated reads: of a block after a device error or without progress, and of an
    /// extent with a wrong checksum.
    pub retries: u32,
    /// Maximum number of repeated reads of a block at the kernel's request (`EINTR`, `EAGAIN`).
    pub interruptions: u32,
    /// Longest time that a read may take.
    pub time_limit: Duration,
    /// Core that the threads that read are bound to, if the operating system supports it; `None`: any.
    pub core: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            reader: Choice::Auto,
            direct: true,
            block_bytes: LARGEST_BLOCK,
            depth: 32,
            verify_reads: true,
            register: true,
            retries: 3,
            interruptions: 1000,
            time_limit: Duration::from_secs(30),
            core: None,
        }
    }
}

impl Options {
    /// Fails if a value is out of its range.
    ///
    /// # Errors
    /// [`Error::Usage`].
    pub fn check(&self) -> Result<()> {
        let range = |what, range, found: u32| Err(Error::range(what, range, found.to_string()));
        if !(SMALLEST_BLOCK..=LARGEST_BLOCK).contains(&self.block_bytes)
            || !self.block_bytes.is_multiple_of(SMALLEST_BLOCK)
        {
            return range(
                "the block size of the disk",
                "a multiple of 4096 between 4096 and 524288",
                self.block_bytes,
            );
        }
        if !(1..=1024).contains(&self.depth) {
            return range("the queue depth of the disk", "1 to 1024", self.depth);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_have_names() {
        assert_eq!(Choice::parse("x", "pread").unwrap(), Choice::Threads);
        assert_eq!(Choice::parse("x", "io_uring").unwrap(), Choice::Uring);
        let error = Choice::parse("`--disk-reader`", "aio").unwrap_err().to_string();
        assert!(error.contains("--disk-reader") && error.contains("aio"), "{error}");
    }

    #[test]
    fn sizes_have_ranges() {
        let check = |block_bytes, depth| Options { block_bytes, depth, ..Options::default() }.check().is_ok();
        assert!(Options::default().check().is_ok());
        assert!(check(4096, 1) && check(12 << 10, 1024));
        assert!(!check(0, 1) && !check(2048, 1) && !check(5000, 1) && !check(1 << 20, 1));
        assert!(!check(4096, 0) && !check(4096, 1025));
    }
}
