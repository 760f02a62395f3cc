//! Values of the metadata.

use crate::Error;
use crate::cursor::Cursor;
use crate::kind::Kind;

/// Most levels of arrays in arrays. Files that are published have none in another.
const DEPTH: usize = 4;

/// A value of the metadata. Texts and arrays stay in the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    /// Unsigned integer of 8 to 64 bits.
    Unsigned(u64),
    /// Signed integer of 8 to 64 bits.
    Signed(i64),
    /// Floating-point number of 32 or 64 bits.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(&'a str),
    /// An array.
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// A whole number of at least 0, whatever its type.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(n) => Some(*n),
            Self::Signed(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    /// A number, whatever its type.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Unsigned(n) => Some(*n as f64),
            Self::Signed(n) => Some(*n as f64),
            Self::Float(x) => Some(*x),
            _ => None,
        }
    }

    /// A truth value.
    pub const fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(b) => Some(*b),
            _ => None,
        }
    }

    /// A text.
    pub const fn as_text(&self) -> Option<&'a str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// An array.
    pub const fn as_array(&self) -> Option<&Array<'a>> {
        match self {
            Self::Array(array) => Some(array),
            _ => None,
        }
    }

    /// Type, for messages; sizes of numbers are not stored, and reported as 8 bytes.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Unsigned(_) => Kind::Unsigned(8),
            Self::Signed(_) => Kind::Signed(8),
            Self::Float(_) => Kind::Float(8),
            Self::Bool(_) => Kind::Bool,
            Self::Text(_) => Kind::Text,
            Self::Array(_) => Kind::Array,
        }
    }

    /// Reads a value after its type.
    pub(crate) fn read(at: &mut Cursor<'a>, what: &dyn Fn() -> String) -> Result<Self, Error> {
        let kind = read_kind(at, what)?;
        Self::of(kind, at, 0, what)
    }

    fn of(kind: Kind, at: &mut Cursor<'a>, depth: usize, what: &dyn Fn() -> String) -> Result<Self, Error> {
        Ok(match kind {
            Kind::Text => Self::Text(at.text(what)?),
            Kind::Array => Self::Array(Array::read(at, depth, what)?),
            Kind::Bool => match at.take(1, what)? {
                [0] => Self::Bool(false),
                [1] => Self::Bool(true),
                other => {
                    return Err(Error::Bool { what: what(), byte: other.first().copied().unwrap_or(0) });
                }
            },
            Kind::Unsigned(n) => Self::Unsigned(u64::from_le_bytes(wide(at.take(n.into(), what)?, 0))),
            Kind::Signed(n) => {
                let bytes = at.take(n.into(), what)?;
                let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
                Self::Signed(i64::from_le_bytes(wide(bytes, if negative { 0xff } else { 0 })))
            }
            Kind::Float(4) => Self::Float(f32::from_bits(at.u32(what)?).into()),
            Kind::Float(_) => Self::Float(f64::from_bits(at.u64(what)?)),
        })
    }
}

fn read_kind(at: &mut Cursor<'_>, what: &dyn Fn() -> String) -> Result<Kind, Error> {
    let kind = at.u32(what)?;
    Kind::of(kind).ok_or_else(|| Error::Kind { what: what(), kind })
}

/// Up to eight bytes as eight, with zeros after them.
fn wide(bytes: &[u8], fill: u8) -> [u8; 8] {
    let mut out = [fill; 8];
    out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = *byte);
    out
}

/// An array of the metadata: all of it was checked when the file was read, and every walk through it
/// decodes it again.
#[derive(Clone, Debug)]
pub struct Array<'a> {
    kind: Kind,
    len: usize,
    /// Its first value.
    first: Cursor<'a>,
    depth: usize,
}

impl PartialEq for Array<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind && self.len == other.len && self.iter().eq(other.iter())
    }
}

impl<'a> Array<'a> {
    /// Reads an array and goes through all of its values.
    fn read(at: &mut Cursor<'a>, depth: usize, what: &dyn Fn() -> String) -> Result<Self, Error> {
        if depth >= DEPTH {
            return Err(Error::Deep { what: what(), most: DEPTH });
        }
        let kind = read_kind(at, what)?;
        let len = at.u64(what)?;
        let values = at.has_all(len, kind.least(), what)?;
        let array = Self { kind, len: values, first: at.clone(), depth: depth + 1 };
        match kind {
            Kind::Unsigned(_) | Kind::Signed(_) | Kind::Float(_) => {
                at.take(len * kind.least(), what)?;
            }
            Kind::Bool | Kind::Text | Kind::Array => {
                for _ in 0..len {
                    Value::of(kind, at, depth + 1, what)?;
                }
            }
        }
        Ok(array)
    }

    /// The type of its values.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Number of its values.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its values in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (kind, depth, mut at) = (self.kind, self.depth, self.first.clone());
        // All were read before, so that none is missing.
        (0..self.len).map_while(move |_| Value::of(kind, &mut at, depth, &String::new).ok())
    }

    /// Its texts in order, if it has such.
    pub fn texts(&self) -> Option<impl Iterator<Item = &'a str> + use<'a>> {
        (self.kind == Kind::Text).then(|| self.iter().filter_map(|value| value.as_text()))
    }
}
