//! Programs in Core ML's model intermediate language (MIL), as data.
//!
//! A [`Program`] is the content of one `.mlpackage`: functions of final operators over fixed shapes in f16,
//! and references to raw f16 files for their weights. Functions of a program share weights, so a group of
//! experts at three capacities is stored once. Nothing here reads or writes a file: [`crate::emit`] makes
//! programs, [`Program::verify`] checks them, [`crate::helper`] turns them into packages.
//!
//! | | |
//! |---|---|
//! | [`op`] | the operators, one row of a table each |
//! | [`builder`] | appends operators, inferring shapes |
//! | [`rules`] | what a unit allows |
//! | [`verify`](Program::verify) | shapes, operators, states and constants are right |
//! | text | `Display` of a program, for people and snapshots |
//! | [`about`] | what people are told of a package |
//! | JSON | `serde`, for the helper |

pub mod about;
pub mod builder;
mod error;
mod infer;
pub mod op;
pub mod rules;
mod text;
mod verify;
mod weight;

pub use builder::FunctionBuilder;
pub use error::ProgramError;
pub use op::{Arg, Mode, Op, OpKind};
pub use rules::{Counted, Rules};
pub(crate) use weight::arrays as weight_arrays;
pub use weight::{Array, Blocks, WeightRef, blob_bytes};

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Bytes of one f16.
pub const ELEMENT: u64 = 2;

/// Everything in one package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// Name of the graph, unique in a bundle.
    pub name: String,
    /// Description, in a sentence.
    pub description: String,
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
    /// Description, in a sentence: of inputs, states and results.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
}

/// Index of a value in [`Function::values`]. `%3` in text and JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ValueId(pub u32);

impl ValueId {
    /// The id as an index.
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
        number.map(Self).ok_or_else(|| format!("`{text}` is not a value (`%` and a number)"))
    }
}

/// Product of extents, saturating.
pub(crate) fn elements(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |n, &d| n.saturating_mul(d as u64))
}

impl Program {
    /// Bytes of the package's weight file: what Core ML maps.
    ///
    /// Weights and filled constants count once, however many functions use them.
    pub fn weight_bytes(&self) -> u64 {
        self.counted_bytes(Counted::Stored)
    }

    /// Bytes that a unit's limit on graphs is about.
    pub fn counted_bytes(&self, counted: Counted) -> u64 {
        let ops = || self.functions.iter().flat_map(|f| f.ops.iter().map(move |op| (f, op)));
        let weights: BTreeSet<usize> = ops().filter_map(|(_, op)| op.weight()).collect();
        let splats: BTreeSet<(u32, &[usize])> = ops()
            .filter_map(|(f, op)| {
                let value = f.values.get(op.results.first()?.index())?;
                Some((op.splat()?.to_bits(), &*value.shape))
            })
            .collect();
        let weights = weights.iter().filter_map(|&w| self.weights.get(w)).flat_map(|w| w.arrays(counted));
        blob_bytes(weights.chain(splats.iter().map(|(_, shape)| Array::halves(elements(shape)))))
    }
}
