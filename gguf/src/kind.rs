//! Types of values.

use std::fmt;

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Unsigned, with this many bytes.
    Unsigned(u8),
    /// Signed, with this many bytes.
    Signed(u8),
    /// IEEE, with this many bytes.
    Float(u8),
    /// A truth value.
    Bool,
    /// A text.
    Text,
    /// An array.
    Array,
}

/// By their numbers in the file.
const KINDS: [Kind; 13] = [
    Kind::Unsigned(1),
    Kind::Signed(1),
    Kind::Unsigned(2),
    Kind::Signed(2),
    Kind::Unsigned(4),
    Kind::Signed(4),
    Kind::Float(4),
    Kind::Bool,
    Kind::Text,
    Kind::Array,
    Kind::Unsigned(8),
    Kind::Signed(8),
    Kind::Float(8),
];

impl Kind {
    /// The type of a number in a file.
    pub(crate) fn of(number: u32) -> Option<Self> {
        KINDS.get(number as usize).copied()
    }

    /// Fewest bytes of a value.
    pub(crate) const fn least(self) -> u64 {
        match self {
            Self::Unsigned(n) | Self::Signed(n) | Self::Float(n) => n as u64,
            Self::Bool => 1,
            Self::Text => 8,
            Self::Array => 12,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsigned(n) => write!(f, "u{}", 8 * n),
            Self::Signed(n) => write!(f, "i{}", 8 * n),
            Self::Float(n) => write!(f, "f{}", 8 * n),
            Self::Bool => f.write_str("bool"),
            Self::Text => f.write_str("a text"),
            Self::Array => f.write_str("an array"),
        }
    }
}
