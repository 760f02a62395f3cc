//! A program as its package describes it: functions of typed values and operations.

use super::constant::Constant;
use super::types::TensorType;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A program: its functions, and the description of its interface for callers.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Functions by name.
    pub functions: BTreeMap<String, Arc<Function>>,
    /// The function that runs when none is named.
    pub default_function: String,
    /// Description of each function in the model.
    pub described: BTreeMap<String, Signature>,
}

/// Number of a value in [`Function::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub usize);

/// A function. Operations are in order: each reads values that were defined before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Operator set, `CoreML8` for iOS 18.
    pub opset: String,
    /// Inputs, in order.
    pub inputs: Vec<ValueId>,
    /// States, in order.
    pub states: Vec<ValueId>,
    /// Outputs, in order.
    pub outputs: Vec<ValueId>,
    /// Operations, constants excepted.
    pub ops: Vec<Op>,
    /// All values.
    pub values: Vec<Value>,
}

/// A value of a function.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Name; empty for a constant that is in the argument itself.
    pub name: String,
    /// Type; for a state, the type of its contents.
    pub ty: TensorType,
    /// Origin.
    pub origin: Origin,
}

/// Origin of a value.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// Input of the function.
    Input,
    /// State, which the caller keeps.
    State,
    /// Constant of the package.
    Constant(Constant),
    /// Result of the operation with this number.
    Op(usize),
}

/// An operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// Operator (`conv`).
    pub kind: String,
    /// Name; may be empty.
    pub name: String,
    /// Arguments by parameter. A parameter that takes several values has them in order.
    pub args: BTreeMap<String, Vec<ValueId>>,
    /// Results.
    pub results: Vec<ValueId>,
}

impl Op {
    /// The operation as messages name it.
    pub fn label(&self) -> String {
        format!("{} `{}`", self.kind, self.name)
    }

    /// The argument of that name, if it is a single value.
    pub fn arg(&self, name: &str) -> Option<ValueId> {
        match self.args.get(name).map(Vec::as_slice) {
            Some(&[id]) => Some(id),
            _ => None,
        }
    }
}

impl Function {
    /// A value. Numbers come from this function; another one's gives `None`.
    pub fn value(&self, id: ValueId) -> Option<&Value> {
        self.values.get(id.0)
    }

    /// The constant that a value is.
    pub fn constant(&self, id: ValueId) -> Option<&Constant> {
        match &self.value(id)?.origin {
            Origin::Constant(constant) => Some(constant),
            _ => None,
        }
    }

    /// The operation that computes a value.
    pub fn source(&self, id: ValueId) -> Option<&Op> {
        match self.value(id)?.origin {
            Origin::Op(op) => self.ops.get(op),
            _ => None,
        }
    }
}

/// Description of a function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Signature {
    /// Inputs, in order.
    pub inputs: Vec<Feature>,
    /// Outputs, in order.
    pub outputs: Vec<Feature>,
    /// States, in order.
    pub states: Vec<Feature>,
}

/// A described input, output or state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// Name.
    pub name: String,
    /// Description for people; empty if it has none.
    pub about: String,
    /// Type, where it is an array of one shape. Outputs may be described without a shape.
    pub ty: Option<TensorType>,
    /// Whether other shapes are allowed too.
    pub flexible: bool,
    /// Whether it may be absent.
    pub optional: bool,
}
