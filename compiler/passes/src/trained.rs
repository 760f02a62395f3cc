//! Numbers that a build computes, in addition to those of its checkpoint: separate leaves, named by their
//! contents.
//!
//! A leaf `trained:layers.3.predict_left#…` belongs to the weight of that name. A digest of the numbers
//! follows, so that different numbers have different names. The verification of a bundle against its
//! checkpoint takes them from the bundle.

use moec_base::hashing::{hex, sha256};
use moec_ir::{Encoding, Format, Leaf, Source, WeightExpr};
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::ops::Range;

/// Prefix of the names of such leaves.
const PREFIX: &str = "trained:";
/// Digits of the digest.
const DIGITS: usize = 16;

type Failed = Box<dyn Error + Send + Sync>;

/// Numbers by the names of their leaves.
#[derive(Clone, Default)]
pub struct TrainedTensors {
    tensors: BTreeMap<String, Vec<f32>>,
}

impl fmt::Debug for TrainedTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.tensors.keys()).finish()
    }
}

impl TrainedTensors {
    /// Adds the numbers of a weight, row-major, and returns the expression for them.
    pub fn add(&mut self, weight: &str, shape: Vec<usize>, numbers: Vec<f32>) -> WeightExpr {
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let digest = hex(&sha256(&bytes));
        let tensor = format!("{PREFIX}{weight}#{}", digest.get(..DIGITS).unwrap_or_default());
        self.tensors.insert(tensor.clone(), numbers);
        WeightExpr::Leaf(Leaf { tensor, shape, encoding: Encoding::Plain })
    }

    /// A source of these numbers, with all others from `rest`.
    pub fn over<'a>(&'a self, rest: &'a dyn Source) -> WithTrained<'a> {
        WithTrained { trained: self, rest }
    }
}

/// The weight that a leaf of this name belongs to; `None` if the leaf is the checkpoint's.
pub fn weight_of(tensor: &str) -> Option<&str> {
    tensor.strip_prefix(PREFIX)?.rsplit_once('#').map(|(weight, _)| weight)
}

/// A source of trained numbers and, for all other names, of another source.
#[derive(Clone, Copy)]
pub struct WithTrained<'a> {
    trained: &'a TrainedTensors,
    rest: &'a dyn Source,
}

impl WithTrained<'_> {
    fn own(
        &self,
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Failed> {
        let missing = || format!("`{}` was not trained", leaf.tensor);
        let all = self.trained.tensors.get(&leaf.tensor).ok_or_else(missing)?;
        let axis = |i: usize| leaf.shape.iter().rev().nth(i).copied().unwrap_or(1);
        let first = matrix * axis(1) + rows.start;
        for (row, out) in (first..first + rows.len()).zip(out.chunks_exact_mut(cols.len().max(1))) {
            let at = row * axis(0) + cols.start;
            out.copy_from_slice(all.get(at..at + cols.len()).ok_or_else(missing)?);
        }
        Ok(())
    }
}

impl Source for WithTrained<'_> {
    fn read(
        &self,
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Failed> {
        match weight_of(&leaf.tensor) {
            Some(_) => self.own(leaf, matrix, rows, cols, out),
            None => self.rest.read(leaf, matrix, rows, cols, out),
        }
    }

    fn stored(
        &self,
        leaf: &Leaf,
        format: Format,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [u8],
    ) -> Result<bool, Failed> {
        match weight_of(&leaf.tensor) {
            Some(_) => Ok(false),
            None => self.rest.stored(leaf, format, matrix, rows, cols, out),
        }
    }

    fn will_read(&self, leaf: &Leaf, matrix: usize, rows: Range<usize>, cols: Range<usize>) {
        if weight_of(&leaf.tensor).is_none() {
            self.rest.will_read(leaf, matrix, rows, cols);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number of the checkpoint is −1.
    struct Checkpoint;

    impl Source for Checkpoint {
        fn read(
            &self,
            _: &Leaf,
            _: usize,
            _: Range<usize>,
            _: Range<usize>,
            out: &mut [f32],
        ) -> Result<(), Failed> {
            out.fill(-1.0);
            Ok(())
        }
    }

    #[test]
    fn trained_tensors_are_read_alongside_the_checkpoint() {
        let mut trained = TrainedTensors::default();
        let own = trained.add("a.left", vec![2, 3, 2], (0..12).map(|i| i as f32).collect());
        let other = trained.add("a.left", vec![2, 3, 2], vec![0.0; 12]);
        assert_ne!(own, other, "other numbers have another name");
        let source = trained.over(&Checkpoint);
        let mut out = [0.0; 2];
        own.read(1, 1..3, 1..2, &source, &mut out).unwrap();
        assert_eq!(out, [9.0, 11.0]);
        let leaf = Leaf { tensor: "b".into(), shape: vec![2, 2], encoding: Encoding::Plain };
        WeightExpr::Leaf(leaf).read(0, 0..1, 0..2, &source, &mut out).unwrap();
        assert_eq!(out, [-1.0, -1.0]);
        assert!(own.read(0, 0..1, 0..2, &TrainedTensors::default().over(&Checkpoint), &mut out).is_err());
        let WeightExpr::Leaf(leaf) = own else { unreachable!() };
        assert_eq!((weight_of(&leaf.tensor), weight_of("a.left")), (Some("a.left"), None));
    }
}
