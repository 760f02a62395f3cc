//! Instructions' operations and operands.

use crate::geometry::Layout;
use std::ops::Range;

/// Engine of instructions: engines run at the same time, and each executes its own in program order, one
/// after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Engine {
    /// Moves lines between DRAM and the buffer.
    Mem,
    /// Multiplies weights, which it reads from DRAM, with vectors of the buffer.
    Gemv,
    /// Computes on vectors of the buffer, number by number.
    Act,
    /// Moves lines between DIMMs and between layouts.
    Link,
}

impl Engine {
    /// Every engine, in the order of [`Self::index`].
    pub const ALL: [Self; 4] = [Self::Mem, Self::Gemv, Self::Act, Self::Link];

    /// Name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mem => "MEM",
            Self::Gemv => "GEMV",
            Self::Act => "ACT",
            Self::Link => "LINK",
        }
    }

    /// Number, from 0.
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Storage of a slab's numbers, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Number {
    /// bf16: the upper half of an f32.
    B16,
    /// IEEE 754 binary32.
    F32,
}

impl Number {
    /// Both kinds.
    pub const ALL: [Self; 2] = [Self::B16, Self::F32];

    /// Name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::B16 => "b16",
            Self::F32 => "f32",
        }
    }

    /// Bytes of a number.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::B16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Vectors in the buffer, one per token of a block: that of token `t` begins at byte `base + t · stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slab {
    /// Storage of its numbers.
    pub number: Number,
    /// First byte of the first vector, a multiple of [`crate::ALIGN`].
    pub base: u32,
    /// Bytes from one vector to the next, a multiple of [`crate::ALIGN`]. With 0 all tokens share one vector,
    /// which can only be read.
    pub stride: u32,
}

/// A line of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lines {
    /// Index of the region in its stream.
    pub region: u16,
    /// Line, counted from the region's first.
    pub line: u64,
}

/// Functions of the activation unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x · sigmoid(x)`
    Silu,
    /// `x/2 · (1 + erf(x/√2))`
    Gelu,
    /// `x/2 · (1 + tanh(√(2/π)(x + 0.044715 x³)))`
    GeluTanh,
    /// `max(x, 0)`
    Relu,
    /// `1 / (1 + e^-x)`
    Sigmoid,
}

impl Activation {
    /// Every function.
    pub const ALL: [Self; 5] = [Self::Silu, Self::Gelu, Self::GeluTanh, Self::Relu, Self::Sigmoid];

    /// Name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_tanh",
            Self::Relu => "relu",
            Self::Sigmoid => "sigmoid",
        }
    }
}

/// Function that joins a gate `g` and an up projection `u`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Glu {
    /// `act(g) · u`
    Gated(Activation),
    /// `relu(g) · relu(u)` (arXiv 2406.05955, eq. 2)
    DRelu,
    /// gpt-oss: `g' = min(g, limit)`, `u' = clamp(u, ±limit)`, `(g' · sigmoid(alpha · g')) · (u' + 1)`.
    Clamped {
        /// Slope inside the sigmoid, finite.
        alpha: f32,
        /// Bound of both inputs, finite and above 0.
        limit: f32,
    },
}

impl Glu {
    /// Name in the text form, without parameters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gated(activation) => activation.name(),
            Self::DRelu => "drelu",
            Self::Clamped { .. } => "clamped",
        }
    }
}

/// Operation of an instruction. `docs/ndp-isa.md` says what each computes, bit by bit.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Begins the loop over blocks of tokens. No engine executes it, and it waits for all of them.
    Loop,
    /// Ends the loop. No engine executes it, and it waits for all of them.
    End,
    /// Waits until all engines are idle.
    Barrier,
    /// DRAM to buffer, for each token: `lines` lines from `src.line + r · stride`, where `r` is the token's
    /// row.
    Load {
        /// Destination.
        dst: Slab,
        /// Line of row 0.
        src: Lines,
        /// Lines from one row to the next; 0 gives every token the same.
        stride: u64,
        /// Lines of a token.
        lines: u32,
    },
    /// Buffer to DRAM, for each token: `lines` lines to `dst.line + r · stride`, where `r` is the token's
    /// row.
    Store {
        /// Source.
        src: Slab,
        /// Line of row 0.
        dst: Lines,
        /// Lines from one row to the next.
        stride: u64,
        /// Lines of a token.
        lines: u32,
    },
    /// `dst = 0`
    Init {
        /// In f32.
        dst: Slab,
        /// Numbers of a token.
        count: u32,
    },
    /// `acc += W · x`: `2·pairs` numbers of `x` by `32·panels` columns.
    Gemv {
        /// `32·panels` sums of a token, in f32.
        acc: Slab,
        /// `2·pairs` inputs of a token, in bf16.
        x: Slab,
        /// Panels of weights, one after the other: `[panels][pairs][32][2]` in bf16.
        weights: Lines,
        /// Panels of 32 columns.
        panels: u32,
        /// Pairs of input channels.
        pairs: u32,
    },
    /// `dst = kind(src)`
    Act {
        /// The function.
        kind: Activation,
        /// In either kind of number.
        dst: Slab,
        /// In f32.
        src: Slab,
        /// Numbers of a token.
        count: u32,
    },
    /// Joins gate and up, which alternate in groups of 16: `count` results.
    Glu {
        /// Function that joins them.
        kind: Glu,
        /// In either kind of number.
        dst: Slab,
        /// Sums of glu panels in f32: 16 of the gate, 16 of up, and so on; `32·⌈count/16⌉` of a token.
        src: Slab,
        /// Results of a token.
        count: u32,
    },
    /// `dst = a · b`
    Mul {
        /// In either kind of number.
        dst: Slab,
        /// In f32.
        a: Slab,
        /// In f32.
        b: Slab,
        /// Numbers of a token.
        count: u32,
    },
    /// `dst = src · factor`
    Scale {
        /// In either kind of number.
        dst: Slab,
        /// In f32.
        src: Slab,
        /// One f32 of a token.
        factor: Slab,
        /// Numbers of a token.
        count: u32,
    },
    /// `dst += src`
    Reduce {
        /// In f32.
        dst: Slab,
        /// In f32.
        src: Slab,
        /// Numbers of a token.
        count: u32,
    },
    /// `dst = src` in the other kind of number.
    Convert {
        /// In either kind of number.
        dst: Slab,
        /// In the other.
        src: Slab,
        /// Numbers of a token.
        count: u32,
    },
    /// Copies lines from one layout to the other.
    Relayout {
        /// First line that is read.
        src: Lines,
        /// First line that is written.
        dst: Lines,
        /// Lines.
        lines: u32,
        /// Layout of the region that is written; the other region has the other layout.
        to: Layout,
    },
    /// Copies lines of a localized region to row sets of another DIMM, where they are localized, too.
    Migrate {
        /// First line that is read.
        src: Lines,
        /// The other DIMM.
        dimm: u32,
        /// Row sets there; the first line goes to the beginning of the first.
        rows: Range<u32>,
        /// Lines.
        lines: u32,
    },
}

impl Op {
    /// Name in the text form.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Loop => "loop",
            Self::End => "end",
            Self::Barrier => "barrier",
            Self::Load { .. } => "load",
            Self::Store { .. } => "store",
            Self::Init { .. } => "init",
            Self::Gemv { .. } => "gemv",
            Self::Act { .. } => "act",
            Self::Glu { .. } => "glu",
            Self::Mul { .. } => "mul",
            Self::Scale { .. } => "scale",
            Self::Reduce { .. } => "reduce",
            Self::Convert { .. } => "convert",
            Self::Relayout { .. } => "relayout",
            Self::Migrate { .. } => "migrate",
        }
    }

    /// Engine that executes it. `loop`, `end` and `barrier` have no engine: they wait for all of them.
    pub const fn engine(&self) -> Option<Engine> {
        match self {
            Self::Loop | Self::End | Self::Barrier => None,
            Self::Load { .. } | Self::Store { .. } => Some(Engine::Mem),
            Self::Gemv { .. } => Some(Engine::Gemv),
            Self::Init { .. }
            | Self::Act { .. }
            | Self::Glu { .. }
            | Self::Mul { .. }
            | Self::Scale { .. }
            | Self::Reduce { .. }
            | Self::Convert { .. } => Some(Engine::Act),
            Self::Relayout { .. } | Self::Migrate { .. } => Some(Engine::Link),
        }
    }
}
