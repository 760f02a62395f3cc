//! Checks of a saved package for the Neural Engine, by the file.
//!
//! Core ML silently moves operations that the Neural Engine cannot run to another unit. So the structure of a
//! package is tested before it ships: rule by rule, one row of a table each. [`Package::open`] has checked
//! before that shapes are fixed, that weights are where the model says, and that there is no control flow.
#![expect(clippy::cast_possible_truncation, reason = "bytes of one element")]

mod function;
mod package;

use crate::package::{Function, Package, Place};
use crate::program::{Counted, ELEMENT};
use std::fmt;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The package runs, but perhaps slowly, or not on the Neural Engine.
    Warning,
    /// The package does not run on the Neural Engine, does not run at all, or computes something else.
    Error,
}

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its severity.
    pub severity: Severity,
    /// Rule that found it (`projections`).
    pub rule: &'static str,
    /// Place.
    pub place: Place,
    /// The fault.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        write!(f, "{severity} ({}): {}: {}", self.rule, self.place, self.message)
    }
}

/// Limits that depend on the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of weights that one function reads.
    pub graph_bytes: u64,
    /// Most states of a function.
    pub states: usize,
    /// Bytes that [`Self::graph_bytes`] counts.
    pub counted: Counted,
    /// Bytes that the last axis of a tensor is padded to; 2 where nothing is known.
    pub last_axis_bytes: usize,
    /// Bytes that rows of inputs, results and states are multiples of; 2 where nothing is known.
    pub row_bytes: usize,
}

/// Bytes of weights that no graph may have on any machine.
pub const HARD_GRAPH_BYTES: u64 = 2_147_483_648;

impl Default for Limits {
    /// 1.2 · 10⁹ bytes, which NPUMoE reports for the M2 Ultra, and two states.
    fn default() -> Self {
        Self {
            graph_bytes: 1_200_000_000,
            states: 2,
            counted: Counted::Stored,
            last_axis_bytes: ELEMENT as usize,
            row_bytes: ELEMENT as usize,
        }
    }
}

/// Context of a rule.
struct Scope<'a> {
    package: &'a Package,
    limits: &'a Limits,
    rule: &'static str,
    findings: Vec<Finding>,
}

impl Scope<'_> {
    fn find(&mut self, severity: Severity, place: Place, message: impl Into<String>) {
        self.findings.push(Finding { severity, rule: self.rule, place, message: message.into() });
    }

    fn error(&mut self, place: Place, message: impl Into<String>) {
        self.find(Severity::Error, place, message);
    }

    fn warning(&mut self, place: Place, message: impl Into<String>) {
        self.find(Severity::Warning, place, message);
    }
}

/// Part that a rule looks at.
enum Look {
    /// Checks a function, given with its name.
    Function(fn(&mut Scope<'_>, &str, &Function)),
    /// The package.
    Package(fn(&mut Scope<'_>)),
}

/// The rules: name, what it demands, test.
const RULES: &[(&str, &str, Look)] = &[
    ("operators", "the Neural Engine has every operator", Look::Function(function::operators)),
    ("projections", "a product with weights is a 1×1 convolution", Look::Function(function::projections)),
    (
        "types",
        "values are fp16; int32 is only an input, never computed with",
        Look::Function(function::types),
    ),
    ("ranks", "tensors have at most four dimensions", Look::Function(function::ranks)),
    ("slices", "slices begin and end at constants", Look::Function(function::slices)),
    ("capacities", "capacities are multiples of 16", Look::Function(function::capacities)),
    ("grouped", "a grouped convolution has fewer than 65536 outputs", Look::Function(function::grouped)),
    (
        "states",
        "states are few, read and written, with rows in multiples of 32",
        Look::Function(function::states),
    ),
    (
        "last_axis",
        "no tensor inside has a last axis of 1, where that is padded",
        Look::Function(function::last_axis),
    ),
    (
        "aligned",
        "rows of inputs, results and states are aligned, where the unit requires it",
        Look::Function(function::aligned),
    ),
    ("size", "the weights of a graph are within the limit", Look::Function(function::size)),
    ("signatures", "descriptions match the functions", Look::Package(package::signatures)),
    ("about", "package, inputs, states and results have descriptions", Look::Package(package::about)),
    ("finite", "constants are finite", Look::Package(package::finite)),
    (
        "shared",
        "equal weights are stored once, and every stored weight is read",
        Look::Package(package::shared),
    ),
];

/// Names of the rules, and what each demands.
pub fn rules() -> impl Iterator<Item = (&'static str, &'static str)> {
    RULES.iter().map(|&(name, demand, _)| (name, demand))
}

/// Tests a package by every rule. The findings are in the order of the rules; a package without any is fit.
///
/// All weights are read once.
pub fn check(package: &Package, limits: &Limits) -> Vec<Finding> {
    let mut scope = Scope { package, limits, rule: "", findings: Vec::new() };
    for (name, _, look) in RULES {
        scope.rule = name;
        match look {
            Look::Package(test) => test(&mut scope),
            Look::Function(test) => {
                package.program.functions.iter().for_each(|(name, f)| test(&mut scope, name, f));
            }
        }
    }
    scope.findings
}
