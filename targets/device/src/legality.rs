//! Operators that a unit may run, row by row, by a published table of its operations.

use crate::{Device, DeviceUnit, UnitKind};
use serde::{Deserialize, Serialize};

/// A row of a table of operations: the name of a kind of operation there, whether the unit has it, and the
/// operators of the Graph of that kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Legality {
    /// The operation, as the source names it.
    pub operation: String,
    /// Whether the unit runs it.
    pub legal: bool,
    /// Operators of the Graph, by their text-form names (`expert_ffn`), or of the unit's backend (`conv1x1`).
    #[serde(default)]
    pub ops: Vec<String>,
    /// The operator to which the backend converts these, if the unit runs them only in that form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub form: Option<String>,
    /// Source.
    pub source: String,
}

impl DeviceUnit {
    /// Row of an operator; `None`: the unit is not known to run it.
    pub fn row(&self, op: &str) -> Option<&Legality> {
        self.legality.iter().find(|row| row.ops.iter().any(|o| o == op))
    }

    /// The operator that another must be rewritten to before the unit runs it; none: it runs it as it is, or
    /// not at all.
    pub fn form(&self, op: &str) -> Option<&str> {
        self.row(op).filter(|row| row.legal)?.form.as_deref()
    }

    /// Whether the unit runs an operator as it is.
    pub fn runs(&self, op: &str) -> bool {
        self.is_legal(op) && self.form(op).is_none()
    }

    /// Whether the unit may run an operator, by its name in the Graph, possibly in another form. A unit
    /// without a table runs everything; one with a table only the operators of its legal rows.
    pub fn is_legal(&self, op: &str) -> bool {
        self.legality.is_empty() || self.row(op).is_some_and(|row| row.legal)
    }
}

impl Device {
    /// Index of the first unit of a kind.
    pub fn unit_of(&self, kind: UnitKind) -> Option<usize> {
        self.units.iter().position(|u| u.kind == kind)
    }
}
