//! Taking tensors out of a checkpoint: each one checked against the config, and remembered.

use super::checkpoint::Checkpoint;
use super::config::{Config, Size};
use super::encodings::{Encoding, Scales, squeezed};
use super::spec::{Norm, Projection};
use moec_base::error::{Error, Result};
use moec_ir::{Leaf, WeightExpr};
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

    /// Blocks of `n` that cover the extent.
    fn blocks(&self, n: usize) -> Self {
        match n {
            1 => self.clone(),
            n if self.n.is_multiple_of(n) => Self { n: self.n / n, why: format!("{} / {n}", self.why) },
            n => Self { n: self.n.div_ceil(n), why: format!("⌈{} / {n}⌉", self.why) },
        }
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

    /// Takes a tensor of the shape that the config asks for, in whatever encoding its type means.
    ///
    /// # Errors
    /// It is missing, has another shape, or is stored in a way that is not supported.
    pub fn take(&self, name: &str, want: &[&Dim]) -> Result<WeightExpr> {
        let tensor = self.checkpoint.tensor(name)?;
        let own = |e: &&&Encoding| e.suffix.is_empty() && e.dtype == tensor.dtype && e.takes(want.len());
        if let Some(encoding) = self.checkpoint.encodings().iter().find(own) {
            return self.take_as(encoding, name, want);
        }
        self.check(name, &tensor.shape, want)?;
        Err(self.checkpoint.unsupported(name, tensor))
    }

    /// As [`Self::take`], of a tensor that may have axes of 1 more, or fewer, than it is wanted with.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn take_squeezed(&self, name: &str, want: &[&Dim]) -> Result<WeightExpr> {
        let stored = self.checkpoint.tensor(name)?.shape.as_slice();
        let sizes: Vec<usize> = want.iter().map(|d| d.n).collect();
        if stored == sizes || squeezed(stored).count() != squeezed(&sizes).count() {
            return self.take(name, want);
        }
        let one = Dim::new(1, "an axis of one");
        let mut rest = want.iter().filter(|d| d.n != 1);
        let whole: Vec<&Dim> = stored
            .iter()
            .map(|&n| if n == 1 { &one } else { rest.next().copied().unwrap_or(&one) })
            .collect();
        match self.take(name, &whole)? {
            WeightExpr::Leaf(leaf) => Ok(WeightExpr::Leaf(Leaf { shape: sizes, ..leaf })),
            other => Ok(other),
        }
    }

    /// Takes a tensor if the config says that it is there.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn take_if(&self, there: bool, name: &str, want: &[&Dim]) -> Result<Option<WeightExpr>> {
        if there { self.take(name, want).map(Some) } else { Ok(None) }
    }

    /// Takes a tensor of this decoded shape in one encoding, whose suffixes the names of its tensors have.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn take_as(&self, encoding: &Encoding, name: &str, want: &[&Dim]) -> Result<WeightExpr> {
        let blocks = format!("{name}{}", encoding.suffix);
        let Some((cols, rows)) = want.split_last() else {
            return Err(Error::bug(format!("tensor `{blocks}` has no shape")));
        };
        let (title, block) = (encoding.title, encoding.block);
        if !cols.n.is_multiple_of(block) {
            return Err(Error::input(format!("tensor `{blocks}` cannot hold rows of {} numbers", cols.n))
                .because(format!("{title} stores blocks of {block}, and {} sets the rows", cols.why)));
        }
        let split = [cols.blocks(block), Dim::new(encoding.bytes, format!("{title}'s block"))];
        let stored: Vec<&Dim> =
            if encoding.by_block { rows.iter().copied().chain(&split).collect() } else { want.to_vec() };
        self.typed(&blocks, &stored, &[encoding.dtype])?;
        let scales = encoding.scales.map(|scales| self.scales(encoding, &scales, name, want)).transpose()?;
        let shape: Vec<usize> = want.iter().map(|d| d.n).collect();
        self.count(&blocks, shape.iter().map(|&d| d as u64).product());
        let encoding = (encoding.leaf)(scales.unwrap_or_default());
        let order = self.checkpoint.order(&blocks);
        let leaf = WeightExpr::Leaf(Leaf { tensor: blocks, shape, encoding });
        Ok(match order {
            Some(order) => WeightExpr::Arrange { order, of: Box::new(leaf) },
            None => leaf,
        })
    }

    /// Checks the scales of a tensor of this decoded shape, and gives their name.
    fn scales(&self, encoding: &Encoding, scales: &Scales, name: &str, want: &[&Dim]) -> Result<String> {
        let tensor = format!("{name}{}", scales.suffix);
        if !self.has(&tensor) {
            let (numbers, [rows, cols]) = (format!("{name}{}", encoding.suffix), scales.block);
            let (file, title) = (self.checkpoint.file_of(&numbers), encoding.title);
            return Err(Error::limit(format!(
                "tensor `{numbers}` in `{file}` is {title} without block factors"
            ))
            .because(format!("there is no tensor `{tensor}`"))
            .hint(format!("{title} is read with one factor per {rows}×{cols} block, {}", scales.known)));
        }
        let split = want.len().saturating_sub(2);
        let last = scales.block.iter().rev().zip(want[split..].iter().rev()).map(|(n, dim)| dim.blocks(*n));
        let mut last: Vec<Dim> = last.collect();
        last.reverse();
        let want: Vec<&Dim> = want[..split].iter().copied().chain(&last).collect();
        let dtypes: Vec<&str> = scales.of.iter().map(|of| of.dtype).collect();
        self.typed(&tensor, &want, &dtypes)?;
        self.skip(&tensor);
        Ok(tensor)
    }

    /// Checks that a tensor is there, of this stored shape and of one of the types.
    fn typed(&self, name: &str, want: &[&Dim], dtypes: &[&str]) -> Result<()> {
        let tensor = self.checkpoint.tensor(name)?;
        self.check(name, &tensor.shape, want)?;
        if dtypes.contains(&tensor.dtype.as_str()) {
            return Ok(());
        }
        let (file, dtypes) = (self.checkpoint.file_of(name), dtypes.join(" or "));
        Err(Error::input(format!(
            "tensor `{name}` in `{file}` is stored as {}, expected {dtypes}",
            tensor.dtype
        )))
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

/// Taps of a convolution that looks back, by the first of the keys that is there.
///
/// # Errors
/// Its absence, and a convolution that sees its own row alone.
pub fn taps(config: &Config, keys: &[&'static str]) -> Result<Dim> {
    let taps = config.size(keys)?;
    if taps.n < 2 {
        return Err(config.unsupported(taps.key, taps.n, &["2 and more"]));
    }
    Ok(taps.into())
}

/// Takes a convolution of each channel by itself, `[channels, 1, taps]`, as `[taps, channels]`.
///
/// # Errors
/// As [`Tensors::take`].
pub fn by_channel(t: &Tensors<'_>, name: &str, channels: &Dim, taps: &Dim) -> Result<WeightExpr> {
    Ok(WeightExpr::Transpose(Box::new(t.take_squeezed(name, &[channels, taps])?)))
}
