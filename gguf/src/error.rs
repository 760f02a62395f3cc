//! Errors of files.

use crate::kind::Kind;

/// Reason that a file cannot be read. A message goes on after "the file cannot be read because".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The first four bytes are others.
    #[error("{}", magic(.0))]
    Magic(Vec<u8>),
    /// Its numbers have their highest byte first.
    #[error("its numbers are big-endian")]
    BigEndian,
    /// A version that is not read.
    #[error("it is of version {0}; versions 2 and 3 are read")]
    Version(u32),
    /// The file ends too early.
    #[error(
        "it ends inside {what}, which wants {wants} bytes from byte {at} on, of which the file has {has}"
    )]
    Cut {
        /// Item that was being read.
        what: String,
        /// Offset, in bytes.
        at: usize,
        /// Bytes that it takes at least.
        wants: u64,
        /// Bytes that there are.
        has: usize,
    },
    /// A text that is not UTF-8.
    #[error("{0} is not UTF-8")]
    Utf8(String),
    /// A type of values that the format does not have.
    #[error("{what} has values of type {kind}, which GGUF does not have")]
    Kind {
        /// The key that it belongs to.
        what: String,
        /// The number of the type.
        kind: u32,
    },
    /// A truth value that is neither 0 nor 1.
    #[error("{what} is a truth value of {byte}, neither 0 nor 1")]
    Bool {
        /// The key that it belongs to.
        what: String,
        /// The byte there.
        byte: u8,
    },
    /// Arrays in arrays in arrays.
    #[error("{what} nests arrays more than {most} deep")]
    Deep {
        /// The key that it belongs to.
        what: String,
        /// Most levels.
        most: usize,
    },
    /// A key that is there twice.
    #[error("key `{0}` is there twice")]
    KeyTwice(String),
    /// A tensor that is there twice.
    #[error("tensor `{0}` is there twice")]
    TensorTwice(String),
    /// A key or a tensor without a name.
    #[error("{0} has no name")]
    Nameless(String),
    /// An alignment that is not a power of two of at least 8.
    #[error("`general.alignment` is {0}, expected a power of two of at least 8")]
    Alignment(String),
    /// A value of another type than the format requires.
    #[error("`{key}` is {found}, expected {expected}")]
    Mistyped {
        /// The key.
        key: String,
        /// Found type.
        found: Kind,
        /// Expected type.
        expected: &'static str,
    },
    /// A tensor's shape that cannot be.
    #[error("tensor `{tensor}` {why}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// The fault, after its name.
        why: String,
    },
    /// A type of numbers that this version does not know, not even by size.
    #[error("tensor `{tensor}` is stored as type {id}, which is not known")]
    Type {
        /// The tensor.
        tensor: String,
        /// The number of the type.
        id: u32,
    },
    /// A tensor that does not begin at a multiple of the alignment.
    #[error("tensor `{tensor}` begins at byte {offset} of the data, not at a multiple of {alignment}")]
    Unaligned {
        /// The tensor.
        tensor: String,
        /// Offset, in bytes.
        offset: u64,
        /// The alignment.
        alignment: u64,
    },
    /// A tensor that ends after the file.
    #[error("tensor `{tensor}` ends at byte {end} of the data, of which the file has {has}")]
    Outside {
        /// The tensor.
        tensor: String,
        /// End, in bytes.
        end: u64,
        /// Bytes of data that the file has.
        has: u64,
    },
    /// Two tensors that share bytes.
    #[error("tensors `{0}` and `{1}` overlap")]
    Overlap(String, String),
    /// Bytes between tensors that are no padding.
    #[error("{bytes} bytes before tensor `{tensor}` belong to no tensor")]
    Gap {
        /// The tensor after them.
        tensor: String,
        /// Number of bytes.
        bytes: u64,
    },
}

impl Error {
    /// Remedy.
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Magic(_) => "give a GGUF file",
            Self::BigEndian => "convert the model for little-endian machines",
            Self::Version(_) => "convert the model with a current version of llama.cpp's converter",
            Self::Cut { .. } | Self::Outside { .. } => {
                "the download may have been cut short; download the file again"
            }
            Self::Type { .. } => "quantise the model to a type that is read, such as Q8_0 or Q4_K",
            _ => "the file is damaged; download it again",
        }
    }
}

/// First bytes of a file in place of `GGUF`.
fn magic(bytes: &[u8]) -> String {
    match bytes {
        [] => "it is empty".to_owned(),
        bytes => format!("it begins with `{}`, not with `GGUF`", bytes.escape_ascii()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_magic_is_printed_readably() {
        let of = |bytes: &[u8]| Error::Magic(bytes.to_vec()).to_string();
        assert_eq!(of(b""), "it is empty");
        assert_eq!(of(b"PK\x03\x04"), "it begins with `PK\\x03\\x04`, not with `GGUF`");
    }
}
