//! Units that execute the operations of static graphs, as the executor of the graphs reports them.
//!
//! A static graph is built for an NPU as a whole. Its executor may still run some operations on the CPU or a
//! GPU: Core ML does so where the Neural Engine does not support one. A report names the unit of every
//! operation; a summary counts them and finds those that do not run on the NPU.

use std::collections::BTreeMap;
use std::fmt;

/// Unit that executes an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OperationUnit {
    /// The NPU.
    Npu,
    /// The CPU.
    Cpu,
    /// A GPU.
    Gpu,
}

impl OperationUnit {
    /// Name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Npu => "npu",
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
        }
    }
}

impl fmt::Display for OperationUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Npu => "NPU",
            Self::Cpu => "CPU",
            Self::Gpu => "GPU",
        })
    }
}

/// An operation of a static graph. Constants are left out: they compute nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct GraphOperation {
    /// Operator: `conv`, `softmax`.
    pub operator: String,
    /// Unit; `None` if the executor does not report it.
    pub unit: Option<OperationUnit>,
    /// Estimated cost, relative to the other operations of the function; `None` if there is no estimate.
    pub cost: Option<f64>,
}

impl GraphOperation {
    /// The cost, if it is a valid one.
    fn valid_cost(&self) -> f64 {
        self.cost.filter(|cost| cost.is_finite() && *cost > 0.0).unwrap_or(0.0)
    }
}

/// Operations of a static graph.
#[derive(Clone, Debug, PartialEq)]
pub struct GraphOperations {
    /// Path of the package, relative to the bundle.
    pub package: String,
    /// Function in it.
    pub function: String,
    /// Operations, in the order of the function.
    pub operations: Vec<GraphOperation>,
}

/// Operations of one operator on one unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OperatorCount<'a> {
    /// Operator.
    pub operator: &'a str,
    /// Unit; `None` if it is not reported.
    pub unit: Option<OperationUnit>,
    /// Number of operations.
    pub count: usize,
    /// Share of the function's estimated cost; `None` if no operation of the function has a cost.
    pub cost: Option<f64>,
}

impl GraphOperations {
    /// Operations by operator and unit, sorted by both.
    pub fn counts(&self) -> Vec<OperatorCount<'_>> {
        let total = self.cost_of(|_| true);
        let mut counts: BTreeMap<(&str, Option<OperationUnit>), (usize, f64)> = BTreeMap::new();
        for operation in &self.operations {
            let (count, cost) = counts.entry((&operation.operator, operation.unit)).or_default();
            *count += 1;
            *cost += operation.valid_cost();
        }
        let row = |((operator, unit), (count, cost))| OperatorCount {
            operator,
            unit,
            count,
            cost: (total > 0.0).then_some(cost / total),
        };
        counts.into_iter().map(row).collect()
    }

    /// Sum of the costs of operations.
    fn cost_of(&self, of: impl Fn(&GraphOperation) -> bool) -> f64 {
        self.operations.iter().filter(|operation| of(operation)).map(GraphOperation::valid_cost).sum()
    }
}

/// Report of an executor.
#[derive(Clone, Debug, PartialEq)]
pub enum OperationReport {
    /// The units are not known, for this reason.
    Unknown(String),
    /// Operations of every static graph.
    Known(Vec<GraphOperations>),
}

/// Operations of one unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnitShare {
    /// Unit; `None` if it is not reported.
    pub unit: Option<OperationUnit>,
    /// Number of operations.
    pub operations: usize,
    /// Share of the estimated cost, the mean over the functions with an estimate; `None` if there are none.
    pub cost: Option<f64>,
}

/// Operations of a function that do not run on the NPU.
#[derive(Clone, Debug, PartialEq)]
pub struct OffNpu<'a> {
    /// Path of the package, relative to the bundle.
    pub package: &'a str,
    /// Function in it.
    pub function: &'a str,
    /// Operators and their units.
    pub operators: Vec<OperatorCount<'a>>,
    /// Share of the function's estimated cost; `None` if there is no estimate.
    pub cost: Option<f64>,
}

impl fmt::Display for OffNpu<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "function `{}` of `{}` does not run on the NPU alone: ", self.function, self.package)?;
        for (i, OperatorCount { operator, unit, count, .. }) in self.operators.iter().enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            let times = if *count > 1 { format!(" ({count} times)") } else { String::new() };
            write!(f, "{comma}`{operator}`{times}")?;
            if let Some(unit) = unit {
                write!(f, " on the {unit}")?;
            }
        }
        match self.cost {
            Some(cost) => write!(f, "; {:.1} % of its estimated cost", cost * 100.0),
            None => Ok(()),
        }
    }
}

/// Whether a unit is reported, and is not the NPU.
fn is_off_npu(unit: Option<OperationUnit>) -> bool {
    unit.is_some_and(|unit| unit != OperationUnit::Npu)
}

/// Summary of the operations of all static graphs.
#[derive(Clone, Debug, PartialEq)]
pub struct OperationSummary<'a> {
    /// Shares of the units that execute operations.
    pub units: Vec<UnitShare>,
    /// Functions with operations that do not run on the NPU, in the order of the report.
    pub off_npu: Vec<OffNpu<'a>>,
}

impl<'a> OperationSummary<'a> {
    /// Summary of a report.
    pub fn of(graphs: &'a [GraphOperations]) -> Self {
        let mut units: BTreeMap<Option<OperationUnit>, (usize, f64)> = BTreeMap::new();
        let mut with_costs = 0_u32;
        let mut off_npu = Vec::new();
        for graph in graphs {
            let total = graph.cost_of(|_| true);
            with_costs += u32::from(total > 0.0);
            for operation in &graph.operations {
                let (count, cost) = units.entry(operation.unit).or_default();
                *count += 1;
                *cost += if total > 0.0 { operation.valid_cost() / total } else { 0.0 };
            }
            let mut operators = graph.counts();
            operators.retain(|count| is_off_npu(count.unit));
            if !operators.is_empty() {
                let cost = graph.cost_of(|operation| is_off_npu(operation.unit));
                off_npu.push(OffNpu {
                    package: &graph.package,
                    function: &graph.function,
                    operators,
                    cost: (total > 0.0).then_some(cost / total),
                });
            }
        }
        let share = |(unit, (operations, cost))| UnitShare {
            unit,
            operations,
            cost: (with_costs > 0).then_some(cost / f64::from(with_costs)),
        };
        let mut units: Vec<UnitShare> = units.into_iter().map(share).collect();
        // Operations without a reported unit come last.
        units.sort_by_key(|share| (share.unit.is_none(), share.unit));
        Self { units, off_npu }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use OperationUnit::{Cpu, Gpu, Npu};

    fn graph(function: &str, operations: &[(&str, Option<OperationUnit>, Option<f64>)]) -> GraphOperations {
        let operations = operations.iter().map(|&(operator, unit, cost)| GraphOperation {
            operator: operator.to_owned(),
            unit,
            cost,
        });
        GraphOperations {
            package: "artifacts/layers.0.mlpackage".to_owned(),
            function: function.to_owned(),
            operations: operations.collect(),
        }
    }

    #[test]
    fn operations_off_the_npu_are_named_with_package_function_and_unit() {
        let graphs = [
            graph("cap16", &[("conv", Some(Npu), Some(0.9)), ("silu", Some(Npu), Some(0.1))]),
            graph(
                "cap32",
                &[
                    ("conv", Some(Npu), Some(0.6)),
                    ("softmax", Some(Cpu), Some(0.25)),
                    ("softmax", Some(Cpu), Some(0.05)),
                    ("matmul", Some(Gpu), Some(0.1)),
                    ("read_state", None, None),
                ],
            ),
        ];
        let summary = OperationSummary::of(&graphs);
        let counts: Vec<_> = summary.units.iter().map(|share| (share.unit, share.operations)).collect();
        assert_eq!(counts, [(Some(Npu), 3), (Some(Cpu), 2), (Some(Gpu), 1), (None, 1)]);
        // Functions weigh equally: (1 + 0.6) / 2.
        assert!((summary.units[0].cost.unwrap() - 0.8).abs() < 1e-12, "{summary:?}");
        assert!((summary.units[1].cost.unwrap() - 0.15).abs() < 1e-12, "{summary:?}");
        let warnings: Vec<String> = summary.off_npu.iter().map(ToString::to_string).collect();
        assert_eq!(
            warnings,
            ["function `cap32` of `artifacts/layers.0.mlpackage` does not run on the NPU alone: \
              `matmul` on the GPU, `softmax` (2 times) on the CPU; 40.0 % of its estimated cost"]
        );
    }

    /// Core ML estimates every cost as 0 if it runs a function on the CPU alone.
    #[test]
    fn operations_without_costs_are_counted() {
        let graphs = [graph("f", &[("conv", Some(Cpu), Some(0.0)), ("add", Some(Cpu), Some(f64::NAN))])];
        let summary = OperationSummary::of(&graphs);
        assert_eq!(summary.units, [UnitShare { unit: Some(Cpu), operations: 2, cost: None }]);
        let [off] = &*summary.off_npu else { panic!("{summary:?}") };
        assert!(off.operators.len() == 2 && off.cost.is_none(), "{off:?}");
        assert!(off.to_string().ends_with("`add` on the CPU, `conv` on the CPU"), "{off}");
    }

    #[test]
    fn graphs_on_the_npu_alone_give_no_warning() {
        let summary = OperationSummary::of(&[]);
        assert!(summary.units.is_empty() && summary.off_npu.is_empty());
        let graphs = [graph("f", &[("conv", Some(Npu), None), ("read_state", None, None)])];
        assert!(OperationSummary::of(&graphs).off_npu.is_empty());
    }
}
