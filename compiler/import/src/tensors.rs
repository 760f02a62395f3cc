//! Reading tensors of a checkpoint: each is checked against the config and recorded.

use super::checkpoint::Checkpoint;
use super::config::{Config, Size};
use super::encodings::squeezed;
use super::quantised::{self, LayoutSpec, named};
use super::spec::{Norm, Projection};
use moec_base::error::{Error, Result};
use moec_ir::{Axis, Elementwise, Encoding, Leaf, WeightExpr};
use std::cell::RefCell;
use std::collections::HashMap;

/// An extent that a tensor must have, with its origin in the config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dim {
    /// The extent.
    pub n: usize,
    /// Formula of the keys that determine it.
    pub why: String,
}

impl From<Size> for Dim {
    fn from(size: Size) -> Self {
        Self { n: size.n, why: format!("`{}`", size.key) }
    }
}

impl Dim {
    /// An extent that the named keys determine.
    pub fn new(n: usize, why: impl Into<String>) -> Self {
        Self { n, why: why.into() }
    }

    /// The product of two extents. Sizes of the config have limits, so it does not overflow.
    pub fn times(&self, other: &Self) -> Self {
        Self { n: self.n.saturating_mul(other.n), why: format!("{} · {}", self.why, other.why) }
    }

    /// The sum of two extents.
    pub fn plus(&self, other: &Self) -> Self {
        Self { n: self.n.saturating_add(other.n), why: format!("({} + {})", self.why, other.why) }
    }

    /// Blocks of `n` that cover the extent.
    pub(crate) fn blocks(&self, n: usize) -> Self {
        match n {
            1 => self.clone(),
            n if self.n.is_multiple_of(n) => Self { n: self.n / n, why: format!("{} / {n}", self.why) },
            n => Self { n: self.n.div_ceil(n), why: format!("⌈{} / {n}⌉", self.why) },
        }
    }

    /// Twice the extent.
    pub fn doubled(&self) -> Self {
        Self { n: self.n.saturating_mul(2), why: format!("2 · {}", self.why) }
    }
}

/// A checkpoint being read. The tensors that were read are recorded, so that the others can be reported.
pub struct Tensors<'a> {
    checkpoint: &'a Checkpoint,
    /// Possible quantisations of weights.
    layouts: Vec<LayoutSpec>,
    /// Number of parameters of each tensor that was read.
    read_parameters: RefCell<HashMap<String, u64>>,
}

impl<'a> Tensors<'a> {
    /// Starts to read. If the config of a part has no quantisation, that of the whole applies.
    ///
    /// # Errors
    /// Fails if a quantisation is not supported.
    pub fn new(config: &Config, checkpoint: &'a Checkpoint) -> Result<Self> {
        let of_part = quantised::layouts(config)?;
        let specs = if of_part.is_empty() { quantised::layouts(checkpoint.config())? } else { of_part };
        Ok(Self { checkpoint, layouts: specs, read_parameters: RefCell::default() })
    }

    /// The checkpoint.
    pub const fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// Whether the checkpoint has a tensor, plain or quantised.
    pub fn has(&self, name: &str) -> bool {
        if let Some(requested) = self.checkpoint.requested() {
            return requested.has(name);
        }
        self.checkpoint.get(name).is_some() || self.quantised(name).next().is_some()
    }

    /// The shape of a tensor; for a quantised one, the shape for which its words have room.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let Some((layout_spec, codes)) = self.quantised(name).next() else {
            return self.checkpoint.get(name).map(|t| t.shape.clone());
        };
        let mut shape = self.checkpoint.get(&codes)?.shape.clone();
        let (packing, axes) = (&layout_spec.layout.codes, shape.len());
        let axis = axes.checked_sub(if packing.by_rows() { 2 } else { 1 })?;
        let of = shape.get_mut(axis)?;
        *of = of.checked_mul(packing.codes(layout_spec.bits))?;
        if layout_spec.layout.transposed {
            shape.swap(axes.checked_sub(2)?, axes - 1);
        }
        Some(shape)
    }

    /// The layouts that fit the type of a weight's codes, each with the name of the codes.
    fn quantised(&self, name: &str) -> impl Iterator<Item = (&LayoutSpec, String)> {
        self.layouts.iter().filter_map(move |layout_spec| {
            let codes = named(name, layout_spec.layout.codes.suffix);
            let is = self.checkpoint.get(&codes)?.dtype == layout_spec.layout.codes.dtype;
            is.then_some((layout_spec, codes))
        })
    }

    /// Counts a tensor as read without using it.
    pub fn skip(&self, name: &str) {
        self.read_parameters.borrow_mut().insert(name.to_owned(), 0);
    }

    pub(crate) fn count(&self, name: &str, parameters: u64) {
        self.read_parameters.borrow_mut().insert(name.to_owned(), parameters);
    }

    /// Number of parameters of the tensors that were read.
    pub fn parameters(&self) -> u64 {
        self.read_parameters.borrow().values().sum()
    }

    /// Names of the tensors that were not read, in the order of the files.
    pub fn rest(&self) -> Vec<&'a str> {
        let taken = self.read_parameters.borrow();
        self.checkpoint.tensors().map(|(name, _)| name).filter(|name| !taken.contains_key(*name)).collect()
    }

    /// Reads a tensor with the shape that the config requires, plain or quantised.
    ///
    /// # Errors
    /// Fails if it is missing, has another shape, or is stored in a way that is not supported.
    pub fn take(&self, name: &str, want: &[&Dim]) -> Result<WeightExpr> {
        match self.checkpoint.mapped(name) {
            Some(map) => Err(Error::bug(format!("`{name}` is stored after {}", map.name()))),
            None => self.stored(name, want),
        }
    }

    /// Reads a tensor and applies a function to its numbers, unless that was done before they were stored. In
    /// that case the shape may differ from `want` by axes of 1.
    ///
    /// # Errors
    /// Those of [`Self::take`].
    pub fn take_mapped(&self, name: &str, want: &[&Dim], map: Elementwise) -> Result<WeightExpr> {
        match self.checkpoint.mapped(name) {
            None => Ok(WeightExpr::Map { map, of: Box::new(self.stored(name, want)?) }),
            Some(_) => self.take_mapped_squeezed(name, want, map),
        }
    }

    /// Like [`Self::take_mapped`], but the shape may always differ by axes of 1.
    ///
    /// # Errors
    /// Those of [`Self::take`].
    pub fn take_mapped_squeezed(&self, name: &str, want: &[&Dim], map: Elementwise) -> Result<WeightExpr> {
        let of = self.squeezed(name, want)?;
        match self.checkpoint.mapped(name) {
            None => Ok(WeightExpr::Map { map, of: Box::new(of) }),
            Some(done) if done == map => Ok(of),
            Some(other) => Err(Error::bug(format!("`{name}` is stored after {}", other.name()))),
        }
    }

    /// A tensor in its stored form, with rows and columns in the order of Hugging Face.
    fn stored(&self, name: &str, want: &[&Dim]) -> Result<WeightExpr> {
        let shape: Vec<usize> = want.iter().map(|d| d.n).collect();
        if let Some(requested) = self.checkpoint.requested() {
            requested.add(name, &shape);
            self.count(name, shape.iter().map(|&n| n as u64).product());
            return Ok(WeightExpr::Leaf(Leaf { tensor: name.to_owned(), shape, encoding: Encoding::Plain }));
        }
        let mut failed = None;
        for (layout_spec, codes) in self.quantised(name).filter(|_| want.len() > 1) {
            match self.take_quantised(layout_spec, name, codes, want) {
                Ok(weight) => return Ok(weight),
                Err(e) => failed = failed.or(Some(e)),
            }
        }
        if let Some(e) = failed {
            return Err(e);
        }
        let tensor = self.checkpoint.tensor(name)?;
        self.check(name, &tensor.shape, want)?;
        let Some(encoding) = self.checkpoint.encodings().iter().find(|e| e.dtype == tensor.dtype) else {
            let error = self.checkpoint.unsupported(name, tensor);
            let codes = quantised::LAYOUTS.iter().any(|layout| layout.codes.dtype == tensor.dtype);
            let missing = "no `quantization_config` defines the meaning of its codes";
            return Err(if codes && want.len() > 1 { error.because(missing) } else { error });
        };
        if let Some(cols) = want.last().filter(|cols| !cols.n.is_multiple_of(encoding.block)) {
            let (title, block) = (encoding.title, encoding.block);
            return Err(Error::input(format!("tensor `{name}` cannot hold rows of {} numbers", cols.n))
                .because(format!("{title} stores blocks of {block}, and {} sets the rows", cols.why)));
        }
        self.count(name, shape.iter().map(|&d| d as u64).product());
        let leaf = Leaf { tensor: name.to_owned(), shape, encoding: Encoding::Plain };
        let leaf = WeightExpr::Leaf(leaf);
        Ok(match self.checkpoint.order(name) {
            Some((Axis::Rows, order)) => WeightExpr::Arrange { order, of: Box::new(leaf) },
            Some((Axis::Cols, order)) => columns(&order, &leaf),
            None => leaf,
        })
    }

    /// Like [`Self::take`], but the shape may differ by axes of 1.
    ///
    /// # Errors
    /// Those of [`Self::take`].
    pub fn take_squeezed(&self, name: &str, want: &[&Dim]) -> Result<WeightExpr> {
        match self.checkpoint.mapped(name) {
            Some(_) => self.take(name, want),
            None => self.squeezed(name, want),
        }
    }

    /// Like [`Self::stored`], but the shape may differ by axes of 1.
    fn squeezed(&self, name: &str, want: &[&Dim]) -> Result<WeightExpr> {
        if self.checkpoint.requested().is_some() {
            return self.stored(name, want);
        }
        let stored = self.checkpoint.tensor(name)?.shape.as_slice();
        let sizes: Vec<usize> = want.iter().map(|d| d.n).collect();
        if stored == sizes || squeezed(stored).count() != squeezed(&sizes).count() {
            return self.stored(name, want);
        }
        let one = Dim::new(1, "an axis of one");
        let mut rest = want.iter().filter(|d| d.n != 1);
        let whole: Vec<&Dim> = stored
            .iter()
            .map(|&n| if n == 1 { &one } else { rest.next().copied().unwrap_or(&one) })
            .collect();
        Ok(shaped(self.stored(name, &whole)?, sizes))
    }

    /// Reads a tensor if the config says that it exists.
    ///
    /// # Errors
    /// Those of [`Self::take`].
    pub fn take_if(&self, there: bool, name: &str, want: &[&Dim]) -> Result<Option<WeightExpr>> {
        if there { self.take(name, want).map(Some) } else { Ok(None) }
    }

    /// Checks that a tensor exists with one of the types and with this stored shape, apart from axes of 1.
    pub(crate) fn typed(&self, name: &str, want: &[Dim], dtypes: &[&str]) -> Result<()> {
        let tensor = self.checkpoint.tensor(name)?;
        if !squeezed(&tensor.shape).eq(squeezed(&want.iter().map(|d| d.n).collect::<Vec<_>>())) {
            self.check(name, &tensor.shape, &want.iter().collect::<Vec<_>>())?;
        }
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
            "tensor `{name}` in `{file}` has shape {found:?}, but `config.json` requires {sizes:?}"
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

    /// Reads `{name}.weight`, and `{name}.bias` if the config says so.
    ///
    /// # Errors
    /// Those of [`Self::take`].
    pub fn projection(&self, name: &str, out: &Dim, input: &Dim, bias: bool) -> Result<Projection> {
        Ok(Projection {
            weight: self.take(&format!("{name}.weight"), &[out, input])?,
            bias: self.take_if(bias, &format!("{name}.bias"), &[out])?,
        })
    }

    /// Reads the weight of a root-mean-square norm.
    ///
    /// # Errors
    /// Those of [`Self::take`].
    pub fn rms_norm(&self, name: &str, width: &Dim, eps: f32) -> Result<Norm> {
        Ok(Norm::Rms { eps, weight: self.take(&format!("{name}.weight"), &[width])? })
    }

    /// Reads weight and bias of a layer norm.
    ///
    /// # Errors
    /// Those of [`Self::take`].
    pub fn layer_norm(&self, name: &str, width: &Dim, eps: f32) -> Result<Norm> {
        let weight = self.take(&format!("{name}.weight"), &[width])?;
        Ok(Norm::Layer { eps, weight, bias: self.take(&format!("{name}.bias"), &[width])? })
    }
}

/// The columns of a weight in another order; consecutive columns are read together.
fn columns(order: &[u32], of: &WeightExpr) -> WeightExpr {
    let run = |run: &[u32]| WeightExpr::Slice {
        axis: Axis::Cols,
        start: run.first().map_or(0, |&first| first as usize),
        step: 1,
        len: run.len(),
        of: Box::new(of.clone()),
    };
    let runs = order.chunk_by(|a, b| a.checked_add(1) == Some(*b)).map(run);
    WeightExpr::Concat { axis: Axis::Cols, of: runs.collect() }
}

/// Taps of a causal convolution, under the first of the keys that exists.
///
/// # Errors
/// Fails if there is no key, or if the convolution has only one tap.
pub fn taps(config: &Config, keys: &[&'static str]) -> Result<Dim> {
    let taps = config.size(keys)?;
    if taps.n < 2 {
        return Err(config.unsupported(taps.key, taps.n, &["2 and more"]));
    }
    Ok(taps.into())
}

/// A tensor in another shape of as many numbers.
fn shaped(weight: WeightExpr, shape: Vec<usize>) -> WeightExpr {
    match weight {
        WeightExpr::Leaf(leaf) => WeightExpr::Leaf(Leaf { shape, ..leaf }),
        other => other,
    }
}

/// Reads a depthwise convolution, `[channels, 1, taps]`, as `[taps, channels]`.
///
/// # Errors
/// Those of [`Tensors::take`].
pub fn by_channel(t: &Tensors<'_>, name: &str, channels: &Dim, taps: &Dim) -> Result<WeightExpr> {
    let weight = if t.checkpoint.requested().is_some() {
        let one = Dim::new(1, "an axis of one");
        shaped(t.take(name, &[channels, &one, taps])?, vec![channels.n, taps.n])
    } else {
        t.take_squeezed(name, &[channels, taps])?
    };
    Ok(WeightExpr::Transpose(Box::new(weight)))
}
