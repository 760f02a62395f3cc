//! Writes GGUF files, valid ones and ones with a chosen mistake.

/// Type codes of values.
pub(crate) const U8: u32 = 0;
pub(crate) const I8: u32 = 1;
pub(crate) const U32: u32 = 4;
pub(crate) const F32: u32 = 6;
pub(crate) const BOOL: u32 = 7;
pub(crate) const TEXT: u32 = 8;
pub(crate) const ARRAY: u32 = 9;
pub(crate) const U64: u32 = 10;

/// A file being written.
#[derive(Clone, Debug)]
pub(crate) struct Builder {
    pub(crate) version: u32,
    pub(crate) keys: Vec<Vec<u8>>,
    pub(crate) tensors: Vec<Vec<u8>>,
    pub(crate) alignment: usize,
    pub(crate) data: Vec<u8>,
}

impl Default for Builder {
    fn default() -> Self {
        Self { version: 3, keys: Vec::new(), tensors: Vec::new(), alignment: 32, data: Vec::new() }
    }
}

/// A text after its length.
pub(crate) fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Type and length of an array.
pub(crate) fn array(kind: u32, len: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &len.to_le_bytes()].concat()
}

impl Builder {
    /// Adds a key of this type, with the bytes of its value.
    pub(crate) fn key(mut self, name: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.push([&text(name)[..], &kind.to_le_bytes(), value].concat());
        self
    }

    /// Adds a row to the table of tensors; extents as in the file, the fastest first.
    pub(crate) fn entry(mut self, name: &str, extents: &[u64], kind: u32, offset: u64) -> Self {
        let mut row = text(name);
        row.extend((extents.len() as u32).to_le_bytes());
        row.extend(extents.iter().flat_map(|n| n.to_le_bytes()));
        row.extend(kind.to_le_bytes());
        row.extend(offset.to_le_bytes());
        self.tensors.push(row);
        self
    }

    /// Adds a tensor with its bytes, at the next aligned place.
    pub(crate) fn tensor(mut self, name: &str, extents: &[u64], kind: u32, bytes: &[u8]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        let offset = self.data.len() as u64;
        self.data.extend(bytes);
        self.entry(name, extents, kind, offset)
    }

    /// The bytes of the file.
    pub(crate) fn build(&self) -> Vec<u8> {
        self.build_of(self.tensors.len() as u64, self.keys.len() as u64)
    }

    /// The bytes of the file, with other counts in its header.
    pub(crate) fn build_of(&self, tensors: u64, keys: u64) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(tensors.to_le_bytes());
        out.extend(keys.to_le_bytes());
        self.keys.iter().chain(&self.tensors).for_each(|part| out.extend(part));
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }
}
