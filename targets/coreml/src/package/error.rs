//! Errors of reading a package.

use std::fmt;
use std::path::PathBuf;

/// Reason that a package is not read.
#[derive(Debug, thiserror::Error)]
pub enum PackageError {
    /// A file of the package cannot be read.
    #[error(transparent)]
    Read(Box<moec_runtime::Error>),
    /// A file is larger than any that moec writes.
    #[error("`{}` has {bytes} bytes, more than {limit}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// Largest size that is read.
        limit: u64,
    },
    /// `Manifest.json` does not lead to a model.
    #[error("`{}`: {message}", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// The fault.
        message: String,
    },
    /// The model is not a protobuf message of Core ML.
    #[error("`{}` is not a Core ML model: {source}", path.display())]
    Decode {
        /// The model.
        path: PathBuf,
        /// The fault.
        source: prost::DecodeError,
    },
    /// Something in the model is not as it must be.
    #[error("`{}`: {place}: {flaw}", path.display())]
    Model {
        /// The model.
        path: PathBuf,
        /// Place: function, operation, value.
        place: Place,
        /// The fault.
        flaw: Box<Flaw>,
    },
}

impl PackageError {
    /// Remedy.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Read(_) => "give the path of the `.mlpackage` folder itself, copied whole",
            Self::TooLarge { .. } => {
                "constants of ten or more elements must be in `weights/weight.bin`, not in the model"
            }
            Self::Manifest { .. } | Self::Decode { .. } => "build the package again: it is damaged",
            Self::Model { flaw, .. } => flaw.hint(),
        }
    }
}

/// Place in a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The function, where it is in one.
    pub function: Option<String>,
    /// The operation, feature or value, as `type 'name'`.
    pub item: Option<String>,
}

impl Place {
    /// The model as a whole.
    pub fn model() -> Self {
        Self::default()
    }

    /// A function as a whole.
    pub fn function(name: &str) -> Self {
        Self { function: Some(name.into()), item: None }
    }

    /// Something in a function.
    pub fn item(function: &str, item: impl Into<String>) -> Self {
        Self { function: Some(function.into()), item: Some(item.into()) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.function, &self.item) {
            (None, None) => f.write_str("the model"),
            (None, Some(item)) => f.write_str(item),
            (Some(function), None) => write!(f, "function `{function}`"),
            (Some(function), Some(item)) => write!(f, "function `{function}`, {item}"),
        }
    }
}

/// Fault of a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Flaw {
    /// A shape is not fixed.
    #[error("a shape is not fixed")]
    Flexible,
    /// Part of the model has no valid meaning.
    #[error("{0}")]
    Invalid(String),
    /// Part of the model may be valid, but moec supports neither reading nor writing it.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// A name refers to nothing that was computed before.
    #[error("`{0}` is not defined before it is used")]
    Undefined(String),
    /// A name refers to two values.
    #[error("`{0}` is defined twice")]
    Twice(String),
    /// A weight is not at the place that the model gives.
    #[error("weight at offset {offset} of `{file}`: {message}")]
    Weight {
        /// The file, as the model names it.
        file: String,
        /// Offset of the metadata, in bytes.
        offset: u64,
        /// The fault.
        message: String,
    },
    /// There is more of something than any model needs.
    #[error("more than {limit} {what}")]
    TooMany {
        /// Kind of the items.
        what: &'static str,
        /// Number that is read.
        limit: usize,
    },
}

impl Flaw {
    /// Remedy.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Flexible => "export the model with fixed shapes, one function per capacity or length",
            Self::Invalid(_) | Self::Undefined(_) | Self::Twice(_) => {
                "build the package again: it is damaged, or was written by a faulty tool"
            }
            Self::Unsupported(_) => "moec reads ML programs of tensors and states, as it writes them itself",
            Self::Weight { .. } => "copy the package whole, model and weights together, or build it again",
            Self::TooMany { .. } => "split the model into several packages",
        }
    }
}
