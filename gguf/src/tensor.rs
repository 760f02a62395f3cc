//! Tensors of a file.

use crate::types::Type;
use std::ops::Range;

/// A tensor as the file has it. Its bytes are inside of the file and belong to no other tensor.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    /// Name.
    pub name: &'a str,
    /// Storage format of its numbers.
    pub kind: &'static Type,
    /// Extents, the slowest first: the other way round than in the file.
    pub shape: Vec<usize>,
    /// Its bytes in the file.
    pub bytes: Range<usize>,
}

/// A tensor of the table before its place is checked.
pub(crate) struct Entry<'a> {
    pub(crate) name: &'a str,
    pub(crate) kind: &'static Type,
    pub(crate) shape: Vec<usize>,
    /// Bytes that it takes.
    pub(crate) size: u64,
    /// Offset in the data, in bytes.
    pub(crate) offset: u64,
}
