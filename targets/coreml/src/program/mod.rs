//! Programs in Core ML's model intermediate language (MIL), as data.
//!
//! A [`Program`] is what one `.mlpackage` holds: functions of final operators over fixed shapes in f16, and
//! references to raw f16 files for their weights. Functions of a program share weights, so a group of experts
//! at three capacities is stored once. Nothing here reads or writes a file: [`crate::emit`] makes programs,
//! [`Program::verify`] checks them, [`crate::helper`] turns them into packages.
//!
//! | | |
//! |---|---|
//! | [`op`] | the operators, one row of a table each |
//! | [`builder`] | appends operators, inferring shapes |
//! | [`rules`] | what a unit allows |
//! | [`verify`](Program::verify) | shapes, operators, states and constants are right |
//! | text | `Display` of a program, for people and snapshots |
//! | JSON | `serde`, for the helper |

pub mod builder;
mod error;
mod infer;
pub mod op;
pub mod rules;
mod text;
mod verify;

pub use builder::FunctionBuilder;
pub use error::ProgramError;
pub use op::{Arg, Mode, Op, OpKind};
pub use rules::Rules;

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Bytes of one f16.
pub const ELEMENT: u64 = 2;
/// Alignment of data, and size of the header and of every entry's metadata, in a package's weight file.
const BLOB_ALIGN: u64 = 64;
/// Arrays with fewer elements stay in the program instead of the weight file.
const INLINE_BELOW: u64 = 10;

/// Everything in one package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// Name of the graph, unique in a bundle.
    pub name: String,
    /// Weights that functions refer to by index.
    pub weights: Vec<WeightRef>,
    /// Functions; the first is the package's default.
    pub functions: Vec<Function>,
}

/// One entry point with fixed shapes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Function {
    /// Name, unique in the program.
    pub name: String,
    /// Every value, inputs and states included.
    pub values: Vec<Value>,
    /// Inputs in the order in which they are described to callers.
    pub inputs: Vec<ValueId>,
    /// States: memory that outlives a call, zero at first.
    pub states: Vec<ValueId>,
    /// Operators, each after its operands.
    pub ops: Vec<Op>,
    /// Results.
    pub outputs: Vec<ValueId>,
}

/// A tensor of f16.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Value {
    /// Name, unique in the function.
    pub name: String,
    /// Extents; empty for a scalar.
    pub shape: Vec<usize>,
}

/// Index of a value in [`Function::values`]. `%3` in text and JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ValueId(pub u32);

impl ValueId {
    /// As an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

impl From<ValueId> for String {
    fn from(id: ValueId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for ValueId {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let number = text.strip_prefix('%').and_then(|n| n.parse().ok());
        number.map(Self).ok_or_else(|| format!("`{text}` is no value (`%` and a number)"))
    }
}

/// Where the values of a constant stand: row-major little-endian f16 in a raw file.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightRef {
    /// Name, for people.
    pub name: String,
    /// File, relative to the folder of weights that the helper is given.
    pub file: String,
    /// First byte.
    pub offset: u64,
    /// Extents.
    pub shape: Vec<usize>,
}

impl WeightRef {
    /// Number of elements; saturates, so that an absurd shape is over every limit.
    pub fn elements(&self) -> u64 {
        elements(&self.shape)
    }
}

/// Product of extents, saturating.
pub(crate) fn elements(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |n, &d| n.saturating_mul(d as u64))
}

impl Program {
    /// Bytes of the package's weight file: what Core ML maps, and what a unit's limit on graphs is about.
    ///
    /// Weights and filled constants count once, in however many functions they stand.
    pub fn weight_bytes(&self) -> u64 {
        let ops = || self.functions.iter().flat_map(|f| f.ops.iter().map(move |op| (f, op)));
        let weights: BTreeSet<usize> = ops().filter_map(|(_, op)| op.weight()).collect();
        let splats: BTreeSet<(u32, &[usize])> = ops()
            .filter_map(|(f, op)| {
                let value = f.values.get(op.results.first()?.index())?;
                Some((op.splat()?.to_bits(), &*value.shape))
            })
            .collect();
        let weights = weights.iter().filter_map(|&w| Some(self.weights.get(w)?.elements()));
        blob_bytes(weights.chain(splats.iter().map(|(_, shape)| elements(shape))))
    }
}

/// Size of a weight file with arrays of these numbers of elements: a header, then metadata and aligned data of
/// each array that is not inline.
pub fn blob_bytes(arrays: impl IntoIterator<Item = u64>) -> u64 {
    let stored = arrays.into_iter().filter(|&n| n >= INLINE_BELOW).map(|n| {
        let data = n.saturating_mul(ELEMENT);
        data.checked_next_multiple_of(BLOB_ALIGN).unwrap_or(u64::MAX).saturating_add(BLOB_ALIGN)
    });
    let all = stored.fold(0, u64::saturating_add);
    if all == 0 { 0 } else { all.saturating_add(BLOB_ALIGN) }
}
