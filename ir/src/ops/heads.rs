//! Operators by heads: which compute the channels of every head by themselves.

use super::{AttentionDesc, Op};

impl Op {
    /// Attention over a cache.
    pub const fn attention(&self) -> Option<&AttentionDesc> {
        match self {
            Self::Attention(desc) => Some(desc),
            _ => None,
        }
    }

    /// Whether it multiplies whole rows by one matrix: its channels are of heads before it or after it.
    pub const fn is_projection(&self) -> bool {
        matches!(self, Self::Linear { .. })
    }

    /// The operator for `len` of `count` key-value heads; `None` for one that does not compute heads by themselves.
    /// A projection is the same for any heads.
    pub fn of_heads(&self, len: usize, count: usize) -> Option<Self> {
        let of = |n: usize| n.is_multiple_of(count).then(|| n / count * len);
        Some(match self {
            Self::RmsNorm { eps, groups, weight } => {
                Self::RmsNorm { eps: *eps, groups: of(*groups)?, weight: *weight }
            }
            Self::Rope { heads, offset, style } => {
                Self::Rope { heads: of(*heads)?, offset: *offset, style: *style }
            }
            Self::MulHeads { heads } => Self::MulHeads { heads: of(*heads)? },
            Self::Attention(desc) if !desc.v_from_k => {
                Self::Attention(AttentionDesc { heads: of(desc.heads)?, kv_heads: len, ..desc.clone() })
            }
            Self::Linear { .. }
            | Self::CacheWrite
            | Self::Add
            | Self::Mul
            | Self::SoftCap { .. }
            | Self::Scale { .. }
            | Self::ScaleByPosition { .. }
            | Self::Clamp { .. }
            | Self::Act(_)
            | Self::Softplus => self.clone(),
            _ => return None,
        })
    }

    /// Operands with a range of channels, or a part of a state, for each head, of an operator that
    /// [computes heads by themselves](Self::of_heads). A projection reads whole rows.
    pub const fn head_operands(&self) -> &'static [usize] {
        match self {
            Self::Linear { .. } => &[],
            Self::CacheWrite => &[1],
            Self::Add | Self::Mul | Self::MulHeads { .. } => &[0, 1],
            Self::Attention(_) => &[0, 1, 2],
            _ => &[0],
        }
    }
}
