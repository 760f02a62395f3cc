//! Reading forward through a file whose length bounds everything.

use crate::Error;

/// A place in the file.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) const fn new(file: &'a [u8], at: usize) -> Self {
        Self { file, at }
    }

    /// Position, in bytes.
    pub(crate) const fn at(&self) -> usize {
        self.at
    }

    /// Bytes from here to the end.
    pub(crate) fn left(&self) -> usize {
        self.file.len().saturating_sub(self.at)
    }

    /// The next `n` bytes.
    pub(crate) fn take(&mut self, n: u64, what: &dyn Fn() -> String) -> Result<&'a [u8], Error> {
        let end = self.at + self.has(n, what)?;
        let bytes = self.file.get(self.at..end).unwrap_or_default();
        self.at = end;
        Ok(bytes)
    }

    /// `n` as a length. Fails if fewer bytes are left.
    pub(crate) fn has(&self, n: u64, what: &dyn Fn() -> String) -> Result<usize, Error> {
        let has = self.left();
        let cut = || Error::Cut { what: what(), at: self.at, wants: n, has };
        usize::try_from(n).ok().filter(|&n| n <= has).ok_or_else(cut)
    }

    /// `n` as a length. Fails if fewer things of at least `each` bytes can be left, `each` being one or more.
    pub(crate) fn has_all(&self, n: u64, each: u64, what: &dyn Fn() -> String) -> Result<usize, Error> {
        self.has(n.saturating_mul(each), what)?;
        self.has(n, what)
    }

    fn array<const N: usize>(&mut self, what: &dyn Fn() -> String) -> Result<[u8; N], Error> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    pub(crate) fn u32(&mut self, what: &dyn Fn() -> String) -> Result<u32, Error> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &dyn Fn() -> String) -> Result<u64, Error> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A text after its length.
    pub(crate) fn text(&mut self, what: &dyn Fn() -> String) -> Result<&'a str, Error> {
        let len = self.u64(what)?;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes).map_err(|_| Error::Utf8(what()))
    }
}
