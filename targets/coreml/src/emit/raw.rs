//! Tensors in raw files.

use super::{EmitError, Result};
use crate::program::{Array, Blocks, Counted, ELEMENT, WeightRef, elements, weight_arrays};

/// A tensor in a raw file, row-major: little-endian f16, or codes with scales, see [`WeightRef`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Raw {
    /// File, relative to the folder of weights.
    pub file: String,
    /// First byte.
    pub offset: u64,
    /// Extents.
    pub shape: Vec<usize>,
    /// Set if it is codes: blocks are along the last axis.
    pub blocks: Option<Blocks>,
}

impl Raw {
    /// A tensor at the start of a file.
    pub fn new(file: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self { file: file.into(), offset: 0, shape: shape.into(), blocks: None }
    }

    /// Entries `start .. start + len` of the first axis.
    #[must_use]
    pub fn rows(&self, start: usize, len: usize) -> Self {
        let mut shape = self.shape.clone();
        let before = elements(shape.get(1..).unwrap_or_default()).saturating_mul(start as u64);
        if let Some(first) = shape.first_mut() {
            *first = len;
        }
        let blocks = self.blocks.map(|b| {
            let scales = (before / (b.size as u64).max(1)).saturating_mul(ELEMENT);
            Blocks { scales: b.scales.saturating_add(scales), ..b }
        });
        let size = if blocks.is_some() { 1 } else { ELEMENT };
        let offset = self.offset.saturating_add(before.saturating_mul(size));
        Self { file: self.file.clone(), offset, shape, blocks }
    }

    /// Entry `index` of the first axis, without that axis.
    #[must_use]
    pub fn at(&self, index: usize) -> Self {
        let mut one = self.rows(index, 1);
        if !one.shape.is_empty() {
            one.shape.remove(0);
        }
        one
    }

    /// The same elements as a constant of a shape.
    pub(super) fn weight(&self, name: &str, shape: impl Into<Vec<usize>>) -> WeightRef {
        WeightRef {
            name: name.to_owned(),
            file: self.file.clone(),
            offset: self.offset,
            shape: shape.into(),
            blocks: self.blocks,
        }
    }

    /// The arrays that it becomes.
    pub(super) fn arrays(&self, counted: Counted) -> impl Iterator<Item = Array> + use<> {
        weight_arrays(elements(&self.shape), self.blocks.as_ref(), counted)
    }

    /// A matrix `[out, in]` as the weight of a 1×1 convolution.
    pub(super) fn conv(&self, name: &str) -> WeightRef {
        let mut shape = self.shape.clone();
        shape.extend([1, 1]);
        self.weight(name, shape)
    }

    /// Refuses a tensor of another shape.
    pub(super) fn expect(&self, graph: &str, tensor: &str, shape: &[usize]) -> Result<()> {
        if self.shape == shape {
            return Ok(());
        }
        Err(EmitError::Shape {
            graph: graph.to_owned(),
            tensor: tensor.to_owned(),
            found: self.shape.clone(),
            expected: shape.to_vec(),
        })
    }
}
