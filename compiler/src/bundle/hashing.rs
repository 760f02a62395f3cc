//! A file writer that counts, hashes, and stops at an interrupt.

use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Writes a file once, from front to back.
pub struct HashingWriter {
    file: BufWriter<File>,
    sha: Sha256,
    written: u64,
}

impl HashingWriter {
    /// Creates the file, which must not exist.
    ///
    /// # Errors
    /// As [`File::create_new`].
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = BufWriter::with_capacity(1 << 20, File::create_new(path)?);
        Ok(Self { file, sha: Sha256::new(), written: 0 })
    }

    /// Bytes written so far.
    pub fn position(&self) -> u64 {
        self.written
    }

    /// Zeros up to `offset`.
    ///
    /// # Errors
    /// As `write`.
    pub fn pad_to(&mut self, offset: u64) -> io::Result<()> {
        const ZEROS: [u8; 4096] = [0; 4096];
        while self.written < offset {
            let n = (offset - self.written).min(ZEROS.len() as u64);
            self.write_all(&ZEROS[..n as usize])?;
        }
        Ok(())
    }

    /// Flushes and gives size and SHA-256.
    ///
    /// # Errors
    /// A write that failed late, a full disk for instance.
    pub fn finish(mut self) -> io::Result<(u64, [u8; 32])> {
        self.file.flush()?;
        self.file.get_ref().sync_data()?;
        Ok((self.written, self.sha.finalize().into()))
    }
}

impl Write for HashingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if crate::interrupt::requested() {
            return Err(io::Error::other("interrupted"));
        }
        let n = self.file.write(bytes)?;
        self.sha.update(&bytes[..n]);
        self.written += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// SHA-256 of bytes.
pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}
