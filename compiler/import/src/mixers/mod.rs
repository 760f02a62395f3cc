//! Mixers of tokens or channels, `[T, hidden]` to `[T, hidden]`. Each has one file with its description, its
//! tensors in a checkpoint, and its nodes.

mod delta;
mod gqa;
mod mla;
mod mlp;
mod moe;
mod normed;
mod parts;
mod selective_scan;
mod short_conv;
mod state_space;

pub use delta::{GatedDelta, KdaSizes};
pub use gqa::{Gated, Gating, Gqa, GqaOptions, OutputGate, QkNorm, QkNormKind, Temperature};
pub use mla::{Mla, MlaOptions};
pub use mlp::Mlp;
pub use moe::{
    ExpertWeights, Fused, Mixture, Moe, MoeNames, PROJ, Parts, RouterInput, STACKS, Shared, W123,
    dense_first, plain_router, renorm, sparse_layers,
};

pub use normed::Normed;
pub use selective_scan::{ScanSizes, SelectiveScan};
pub use short_conv::ShortConv;
pub use state_space::{StateSpace, StateSpaceSizes};

use crate::lower::{LowerResult, Lowering, Rows};
use crate::spec::{Projection, Rope};
use moec_ir::{Part, WeightClass, WeightExpr};

/// Common interface of mixers.
pub trait Mix {
    /// Its part of the layer, which prefixes the names of nodes, weights and states.
    fn part(&self) -> Part;

    /// Its weights, each with its class.
    fn weights(&self) -> Vec<(WeightClass, &WeightExpr)>;

    /// State of a sequence.
    fn state_size(&self) -> StateSize {
        StateSize::default()
    }

    /// Its rotation, if it has one.
    fn rope(&self) -> Option<&Rope> {
        None
    }

    /// Adds its nodes. `at` is the layer, the prefix of its names.
    ///
    /// # Errors
    /// Fails if parts do not fit each other, which is a bug of the import.
    fn lower<'a>(&'a self, l: &mut Lowering<'a, '_>, at: &str, rows: Rows) -> LowerResult;
}

/// Size of a mixer's state of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateSize {
    /// Elements for each token.
    pub per_token: u64,
    /// Window in tokens; `None` if it looks back to the first token.
    pub window: Option<usize>,
    /// Elements of constant size, for all tokens together.
    pub folded: u64,
}

/// A mixer.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Multi-head, grouped-query, multi-query attention.
    Gqa(Box<Gqa>),
    /// Multi-head latent attention.
    Mla(Box<Mla>),
    /// The gated delta rule.
    GatedDelta(Box<GatedDelta>),
    /// A state space with scalar decay.
    StateSpace(Box<StateSpace>),
    /// A selective state space.
    SelectiveScan(Box<SelectiveScan>),
    /// A short convolution between two gates.
    ShortConv(Box<ShortConv>),
    /// One network for all tokens.
    Dense(Box<Mlp>),
    /// A mixture of experts.
    Moe(Box<Moe>),
    /// A mixer between two norms of its own.
    Normed(Box<Normed>),
}

impl Mixer {
    /// The mixture of experts in this mixer, directly or between norms.
    pub fn moe(&self) -> Option<&Moe> {
        match self {
            Self::Moe(moe) => Some(moe),
            Self::Normed(normed) => normed.mixer.moe(),
            _ => None,
        }
    }

    /// Its implementation of the common interface.
    pub fn of(&self) -> &dyn Mix {
        match self {
            Self::Gqa(m) => &**m,
            Self::Mla(m) => &**m,
            Self::GatedDelta(m) => &**m,
            Self::StateSpace(m) => &**m,
            Self::SelectiveScan(m) => &**m,
            Self::ShortConv(m) => &**m,
            Self::Dense(m) => &**m,
            Self::Moe(m) => &**m,
            Self::Normed(m) => &**m,
        }
    }
}

/// A mixer of each kind, boxed.
macro_rules! boxed {
    ($($kind:ident($of:ident)),*) => {$(
        impl From<$of> for Mixer {
            fn from(mixer: $of) -> Self {
                Self::$kind(Box::new(mixer))
            }
        }
    )*};
}

boxed!(
    Gqa(Gqa),
    Mla(Mla),
    GatedDelta(GatedDelta),
    SelectiveScan(SelectiveScan),
    ShortConv(ShortConv),
    Dense(Mlp),
    Moe(Moe),
    Normed(Normed),
    StateSpace(StateSpace)
);

/// Matrices of projections, and their biases.
fn projections<'a>(
    all: impl IntoIterator<Item = &'a Projection>,
) -> impl Iterator<Item = (WeightClass, &'a WeightExpr)> {
    all.into_iter().flat_map(|p| [(WeightClass::Attention, &p.weight)].into_iter().chain(exact(&p.bias)))
}

/// Weights that are small and stay f32.
fn exact<'a>(
    all: impl IntoIterator<Item = &'a WeightExpr>,
) -> impl Iterator<Item = (WeightClass, &'a WeightExpr)> {
    all.into_iter().map(|w| (WeightClass::Exact, w))
}
