//! Taking tensors out of a checkpoint: each one checked against the config, and remembered.

use super::checkpoint::{Checkpoint, Dtype, float, missing};
use super::config::Size;
use super::formats::{fp8, mxfp4};
use super::spec::{Norm, Projection};
use crate::error::{Error, Result};
use moec_ir::{Encoding, Leaf, WeightExpr};
use std::cell::RefCell;
use std::collections::HashMap;

/// An extent that a tensor must have, with the config's reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dim {
    /// The extent.
    pub n: usize,
    /// Keys that set it, as a formula.
    pub why: String,
}

impl From<Size> for Dim {
    fn from(size: Size) -> Self {
        Self { n: size.n, why: format!("`{}`", size.key) }
    }
}

impl Dim {
    /// An extent that follows from the named keys.
    pub fn new(n: usize, why: impl Into<String>) -> Self {
        Self { n, why: why.into() }
    }

    /// The product of two extents. Sizes of the config are bounded so that it does not overflow.
    pub fn times(&self, other: &Self) -> Self {
        Self { n: self.n.saturating_mul(other.n), why: format!("{} · {}", self.why, other.why) }
    }

    /// The sum of two extents.
    pub fn plus(&self, other: &Self) -> Self {
        Self { n: self.n.saturating_add(other.n), why: format!("({} + {})", self.why, other.why) }
    }

    /// Twice the extent.
    pub fn twice(&self) -> Self {
        Self { n: self.n.saturating_mul(2), why: format!("2 · {}", self.why) }
    }
}

/// A checkpoint being read. What was taken is remembered, so that the rest can be reported.
pub struct Tensors<'a> {
    checkpoint: &'a Checkpoint,
    /// Number of parameters of each tensor that was taken.
    taken: RefCell<HashMap<String, u64>>,
}

impl<'a> Tensors<'a> {
    /// Starts reading.
    pub fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, taken: RefCell::default() }
    }

    /// The checkpoint.
    pub const fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// Whether the checkpoint has a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.checkpoint.get(name).is_some()
    }

    /// The stored shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&'a [usize]> {
        self.checkpoint.get(name).map(|t| t.shape.as_slice())
    }

    /// Counts a tensor as read without using it.
    pub fn skip(&self, name: &str) {
        self.taken.borrow_mut().insert(name.to_owned(), 0);
    }

    fn count(&self, name: &str, parameters: u64) {
        self.taken.borrow_mut().insert(name.to_owned(), parameters);
    }

    /// Parameters of the tensors that were taken.
    pub fn parameters(&self) -> u64 {
        self.taken.borrow().values().sum()
    }

    /// Names of the tensors that were not taken, in the order of the files.
    pub fn rest(&self) -> Vec<&'a str> {
        let taken = self.taken.borrow();
        self.checkpoint.tensors().map(|(name, _)| name).filter(|name| !taken.contains_key(*name)).collect()
    }

    /// Takes a tensor of the shape that the config asks for, stored plainly or as FP8 with block factors.
    ///
    /// # Errors
    /// It is missing, has another shape, or is stored in a way that is not supported.
    pub fn take(&self, name: &str, want: &[&Dim]) -> Result<WeightExpr> {
        let file = self.checkpoint.file_of(name);
        let tensor = self.checkpoint.get(name).ok_or_else(|| missing(file, name))?;
        self.check(name, &tensor.shape, want)?;
        let encoding = match tensor.dtype {
            dtype if float(dtype).is_some() => Encoding::Plain,
            Dtype::F8_E4M3 if want.len() >= 2 => self.fp8(name, want)?,
            dtype => {
                return Err(Error::limit(format!(
                    "tensor `{name}` in `{file}` is stored as {dtype}, which is not supported"
                ))
                .hint(
                    "a tensor may be F32, BF16 or F16; quantised ones MXFP4, or FP8 E4M3 with block factors",
                ));
            }
        };
        let shape = tensor.shape.clone();
        self.count(name, shape.iter().map(|&d| d as u64).product());
        Ok(WeightExpr::Leaf(Leaf { tensor: name.to_owned(), shape, encoding }))
    }

    /// Takes a tensor if the config says that it is there.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn take_if(&self, there: bool, name: &str, want: &[&Dim]) -> Result<Option<WeightExpr>> {
        if there { self.take(name, want).map(Some) } else { Ok(None) }
    }

    /// Takes a tensor of MXFP4 blocks, `{name}_blocks` with `{name}_scales`, of this decoded shape.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn take_mxfp4(&self, name: &str, want: &[&Dim]) -> Result<WeightExpr> {
        let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
        let Some((cols, rows)) = want.split_last() else {
            return Err(Error::bug(format!("tensor `{blocks}` has no shape")));
        };
        if cols.n % mxfp4::BLOCK != 0 {
            return Err(Error::input(format!("tensor `{blocks}` cannot hold rows of {} numbers", cols.n))
                .because(format!(
                    "MXFP4 stores blocks of {}, and {} sets the rows",
                    mxfp4::BLOCK,
                    cols.why
                )));
        }
        let per_row = Dim::new(cols.n / mxfp4::BLOCK, format!("{} / {}", cols.why, mxfp4::BLOCK));
        let bytes = Dim::new(mxfp4::BYTES, "MXFP4's block");
        for (name, last) in [(&scales, None), (&blocks, Some(&bytes))] {
            let file = self.checkpoint.file_of(name);
            let tensor = self.checkpoint.get(name).ok_or_else(|| missing(file, name))?;
            let want: Vec<&Dim> = rows.iter().copied().chain([&per_row]).chain(last).collect();
            self.check(name, &tensor.shape, &want)?;
            if tensor.dtype != Dtype::U8 {
                let message =
                    format!("tensor `{name}` in `{file}` is stored as {}, expected U8", tensor.dtype);
                return Err(Error::input(message));
            }
        }
        let shape: Vec<usize> = want.iter().map(|d| d.n).collect();
        self.skip(&scales);
        self.count(&blocks, shape.iter().map(|&d| d as u64).product());
        Ok(WeightExpr::Leaf(Leaf { tensor: blocks, shape, encoding: Encoding::Mxfp4 { scales } }))
    }

    fn fp8(&self, name: &str, want: &[&Dim]) -> Result<Encoding> {
        let scales = format!("{name}_scale_inv");
        let file = self.checkpoint.file_of(name);
        let Some(tensor) = self.checkpoint.get(&scales) else {
            return Err(Error::limit(format!("tensor `{name}` in `{file}` is FP8 without block factors"))
                .because(format!("there is no tensor `{scales}`"))
                .hint("FP8 is read with one factor per 128×128 block, as DeepSeek-V3 stores it"));
        };
        let split = want.len() - 2;
        let blocks = want[split..]
            .iter()
            .map(|d| Dim::new(d.n.div_ceil(fp8::BLOCK), format!("⌈{} / {}⌉", d.why, fp8::BLOCK)));
        let blocks: Vec<Dim> = blocks.collect();
        let want: Vec<&Dim> = want[..split].iter().copied().chain(&blocks).collect();
        self.check(&scales, &tensor.shape, &want)?;
        if float(tensor.dtype).is_none() {
            let (file, dtype) = (self.checkpoint.file_of(&scales), tensor.dtype);
            return Err(Error::input(format!(
                "tensor `{scales}` in `{file}` is stored as {dtype}, expected F32"
            )));
        }
        self.skip(&scales);
        Ok(Encoding::Fp8Block { scales })
    }

    fn check(&self, name: &str, found: &[usize], want: &[&Dim]) -> Result<()> {
        let sizes: Vec<usize> = want.iter().map(|d| d.n).collect();
        if found == sizes {
            return Ok(());
        }
        let file = self.checkpoint.file_of(name);
        let error = Error::input(format!(
            "tensor `{name}` in `{file}` has shape {found:?}, but `config.json` asks for {sizes:?}"
        ));
        let axis = found.iter().zip(want).position(|(f, w)| *f != w.n);
        Err(match axis.and_then(|a| Some((a, want.get(a)?))) {
            Some((axis, w)) if found.len() == want.len() => {
                error.because(format!("axis {axis} is {}, which {} sets to {}", found[axis], w.why, w.n))
            }
            _ => error.because(format!("it has {} axes, expected {}", found.len(), want.len())),
        }
        .hint("`config.json` and the weights may be of different models; download both again"))
    }

    /// Takes `{name}.weight`, and `{name}.bias` if the config says so.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn projection(&self, name: &str, out: &Dim, input: &Dim, bias: bool) -> Result<Projection> {
        Ok(Projection {
            weight: self.take(&format!("{name}.weight"), &[out, input])?,
            bias: self.take_if(bias, &format!("{name}.bias"), &[out])?,
        })
    }

    /// Takes the weight of a root-mean-square norm.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn rms_norm(&self, name: &str, width: &Dim, eps: f32) -> Result<Norm> {
        Ok(Norm::Rms { eps, weight: self.take(&format!("{name}.weight"), &[width])? })
    }

    /// Takes weight and bias of a layer norm.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn layer_norm(&self, name: &str, width: &Dim, eps: f32) -> Result<Norm> {
        let weight = self.take(&format!("{name}.weight"), &[width])?;
        Ok(Norm::Layer { eps, weight, bias: self.take(&format!("{name}.bias"), &[width])? })
    }
}
