//! Weights as expressions over checkpoint tensors.
//!
//! A weight of the Graph is never held whole. It is an expression that can give any rectangle of its last two
//! axes. So packing walks a weight panel by panel, and its peak memory does not grow with the model.

use crate::infer::TypeError;
use crate::types::Format;
use std::error::Error;
use std::ops::Range;

/// Class of a weight by its use; `model.toml` chooses the storage format per class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WeightClass {
    /// Matrices of routed experts.
    Experts,
    /// Matrices of attention, dense and shared feed-forward networks.
    Attention,
    /// Embedding table and language-model head.
    Embeddings,
    /// Norms, biases, routers, frequencies: small, always f32.
    Exact,
}

/// Encoding of a leaf's numbers in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// One tensor, in the type that the checkpoint gives it: f32, bf16 or f16.
    Plain,
    /// Codes of few bits, and further tensors that make numbers of them.
    Coded(Box<Coded>),
}

/// Codes and what makes numbers of them: `(code − zero point) · scale`, the scale times a factor. A reader of
/// the leaf knows the layouts; the leaf's own name is that of the codes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Coded {
    /// Name of the layout: the packing of codes, and their meaning.
    pub layout: String,
    /// Bits of a code.
    pub bits: u32,
    /// Rows and columns that share a scale; blocks at the edges are smaller.
    pub block: [usize; 2],
    /// Tensor of the scales, one for each block.
    pub scales: String,
    /// Tensor of the zero points, one for each scale.
    pub zeros: Option<String>,
    /// Tensor of the factor that all scales of a matrix share.
    pub factor: Option<String>,
    /// Tensor of the group of each row or column, if those of a group are not contiguous.
    pub groups: Option<String>,
}

/// A tensor of the checkpoint, with the shape that it must have after decoding.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Leaf {
    /// Name in the checkpoint.
    pub tensor: String,
    /// Decoded shape, at most three axes.
    pub shape: Vec<usize>,
    /// Storage.
    pub encoding: Encoding,
}

/// One of the last two axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// The last but one.
    Rows,
    /// The last.
    Cols,
}

/// A weight as a function of checkpoint tensors. Shapes have one to three axes, `[matrices,] [rows,] cols`.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightExpr {
    /// A checkpoint tensor.
    Leaf(Leaf),
    /// Numbers computed at import (frequencies), one axis.
    Const(Vec<f32>),
    /// The last two axes exchanged.
    Transpose(Box<WeightExpr>),
    /// `len` indices of one axis from `start`, every `step`-th.
    Slice {
        /// Axis.
        axis: Axis,
        /// First index.
        start: usize,
        /// Distance between indices, at least 1.
        step: usize,
        /// Number of indices.
        len: usize,
        /// The expression that is sliced.
        of: Box<WeightExpr>,
    },
    /// Joined along one axis.
    Concat {
        /// Axis.
        axis: Axis,
        /// Parts in order.
        of: Vec<WeightExpr>,
    },
    /// Equal shapes under a new leading axis (rows for vectors).
    Stack(Vec<WeightExpr>),
    /// `[heads·R, C]` as `[heads, R, C]`.
    Split {
        /// Number of heads.
        heads: usize,
        /// The expression that is split.
        of: Box<WeightExpr>,
    },
    /// `[heads, R, C]` as `[heads·R, C]`.
    Join(Box<WeightExpr>),
    /// Rows in another order, that of every matrix by itself: row `r` of matrix `e` is row `order[e · rows +
    /// r]` of it.
    Arrange {
        /// For every matrix, each of its rows once.
        order: Vec<u32>,
        /// The expression that is arranged.
        of: Box<WeightExpr>,
    },
    /// Column `c` times `by[c]`.
    ScaleCols {
        /// The matrix.
        of: Box<WeightExpr>,
        /// One factor per column.
        by: Box<WeightExpr>,
    },
    /// Matrix `e` of several times `by[e]`.
    ScaleMatrices {
        /// The matrices.
        of: Box<WeightExpr>,
        /// One factor per matrix.
        by: Box<WeightExpr>,
    },
    /// Every number of a vector `each` times, one after the other.
    Repeat {
        /// Number of repetitions.
        each: usize,
        /// The vector.
        of: Box<WeightExpr>,
    },
    /// Every number of it through a function, in f32.
    Map {
        /// The function.
        map: Elementwise,
        /// The operand.
        of: Box<WeightExpr>,
    },
}

/// A function of one number of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elementwise {
    /// `1 + x`: weights of norms that are stored as what they differ from 1.
    PlusOne,
    /// `e^x`: factors that are stored as logarithms.
    Exp,
    /// `−e^x`: rates of decay that are stored as logarithms (Gu and Dao, *Mamba*, section 3.6).
    NegExp,
}

impl Elementwise {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::PlusOne, Self::Exp, Self::NegExp];

    /// Name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PlusOne => "plus_one",
            Self::Exp => "exp",
            Self::NegExp => "neg_exp",
        }
    }

    /// Its value.
    pub fn of(self, x: f32) -> f32 {
        match self {
            Self::PlusOne => 1.0 + x,
            // In f64 and rounded once, so that every host has the same.
            Self::Exp => f64::from(x).exp() as f32,
            Self::NegExp => -f64::from(x).exp() as f32,
        }
    }
}

/// A declared weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// Name, unique in the module; `layers.3.attn.q` style.
    pub name: String,
    /// Shape, equal to `expr.shape()`.
    pub shape: Vec<usize>,
    /// Class.
    pub class: WeightClass,
    /// Storage format in the bundle.
    pub format: Format,
    /// Value.
    pub expr: WeightExpr,
}

/// Source of checkpoint tensors. Several threads may read at a time.
pub trait Source: Sync {
    /// Decodes one rectangle of a leaf into `out`, row-major, as f32. Shapes of fewer than three axes
    /// have `matrix` 0, and a vector has the single row 0.
    ///
    /// # Errors
    /// Whatever keeps the numbers from being read, naming file and tensor.
    fn read(
        &self,
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Box<dyn Error + Send + Sync>>;

    /// Copies one rectangle of a leaf as it is stored into `out`, row-major and little-endian, if it is
    /// stored in `format` and every number is finite. Of formats with groups each number is its code, a
    /// signed byte in multiples of the scale, followed by the scale of its group, in the format of scales;
    /// with [`crate::types::Fine`] scales by those of its run and of its group
    /// ([`crate::types::FINE_STORED`]).
    /// Otherwise returns `false` and `out` is undefined; [`Source::read`] gives the numbers, or says what is
    /// wrong with them.
    ///
    /// # Errors
    /// As [`Source::read`].
    fn stored(
        &self,
        _leaf: &Leaf,
        _format: Format,
        _matrix: usize,
        _rows: Range<usize>,
        _cols: Range<usize>,
        _out: &mut [u8],
    ) -> Result<bool, Box<dyn Error + Send + Sync>> {
        Ok(false)
    }

    /// Hears that a rectangle of a leaf will be read soon, so that it can be fetched until then. Rectangles
    /// that do not exist are ignored.
    fn will_read(&self, _leaf: &Leaf, _matrix: usize, _rows: Range<usize>, _cols: Range<usize>) {}
}

impl WeightClass {
    /// Every class.
    pub const ALL: [Self; 4] = [Self::Experts, Self::Attention, Self::Embeddings, Self::Exact];

    /// Name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Experts => "experts",
            Self::Attention => "attention",
            Self::Embeddings => "embeddings",
            Self::Exact => "exact",
        }
    }
}

impl Weight {
    /// Checks that the declared shape is that of the expression.
    ///
    /// # Errors
    /// The expression has no shape, or another one.
    pub fn check(&self) -> Result<(), TypeError> {
        let at = || format!("weight {}", self.name);
        let shape = self.expr.shape().map_err(|e| e.within(&at()))?;
        if shape == self.shape {
            Ok(())
        } else {
            Err(TypeError::new(at(), format!("declared {:?}, but its expression is {shape:?}", self.shape)))
        }
    }

    fn axis_from_last(&self, i: usize) -> usize {
        self.shape.iter().rev().nth(i).copied().unwrap_or(1)
    }

    /// Extent of the leading axis; 1 where absent.
    pub fn matrices(&self) -> usize {
        self.axis_from_last(2)
    }

    /// Extent of the last axis but one; 1 where absent.
    pub fn rows(&self) -> usize {
        self.axis_from_last(1)
    }

    /// Extent of the last axis; 1 where absent.
    pub fn cols(&self) -> usize {
        self.axis_from_last(0)
    }
}
