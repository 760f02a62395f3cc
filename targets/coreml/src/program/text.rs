//! The text form of a program, close to what Core ML's own compiler prints.

use super::{Arg, Blocks, Function, Op, OpKind, Program, ValueId, WeightRef};
use std::fmt::{self, Display, Formatter};

impl Display for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "program \"{}\" {{", self.name)?;
        for (i, weight) in self.weights.iter().enumerate() {
            let WeightRef { name, file, offset, shape, blocks } = weight;
            match blocks {
                None => writeln!(f, "  w{i} = \"{name}\" f16{shape:?} \"{file}\" +{offset}")?,
                Some(Blocks { bits, size, scales }) => writeln!(
                    f,
                    "  w{i} = \"{name}\" int{bits}{shape:?} \"{file}\" +{offset}, scales by {size} +{scales}"
                )?,
            }
        }
        for function in &self.functions {
            write_function(f, function)?;
        }
        writeln!(f, "}}")
    }
}

fn write_function(f: &mut Formatter<'_>, function: &Function) -> fmt::Result {
    let typed = |id: &ValueId| match function.values.get(id.index()) {
        Some(v) => format!("{}: f16{:?}", v.name, v.shape),
        None => format!("{id}"),
    };
    let inputs = function.inputs.iter().map(typed);
    let states = function.states.iter().map(|id| format!("state {}", typed(id)));
    writeln!(f, "  func {}({}) {{", function.name, inputs.chain(states).collect::<Vec<_>>().join(", "))?;
    for op in &function.ops {
        let results: Vec<String> = op.results.iter().map(typed).collect();
        let results = results.join(", ");
        let equals = if results.is_empty() { "" } else { " = " };
        writeln!(f, "    {results}{equals}{}({})", op.op.name(), arguments(function, op))?;
    }
    let outputs: Vec<_> = function.outputs.iter().map(|id| name(function, *id)).collect();
    writeln!(f, "  }} -> ({})", outputs.join(", "))
}

fn name(function: &Function, id: ValueId) -> String {
    function.values.get(id.index()).map_or_else(|| id.to_string(), |v| v.name.clone())
}

fn arguments(function: &Function, op: &Op) -> String {
    let shown = |parameter: &str, arg: &Arg| match arg {
        Arg::Int(w) if op.op == OpKind::Const => format!("w{w}"),
        Arg::Value(id) => format!("{parameter}={}", name(function, *id)),
        Arg::Values(list) => {
            let names: Vec<_> = list.iter().map(|id| name(function, *id)).collect();
            format!("{parameter}=({})", names.join(", "))
        }
        Arg::Bool(b) => format!("{parameter}={b}"),
        Arg::Int(n) => format!("{parameter}={n}"),
        Arg::Float(x) => format!("{parameter}={x}"),
        Arg::Ints(list) => format!("{parameter}={list:?}"),
        Arg::Mode(mode) => format!("{parameter}={mode:?}"),
    };
    let params = op.op.params().iter();
    let args = params.filter_map(|p| op.arg(p.name).map(|arg| shown(p.name, arg)));
    args.collect::<Vec<_>>().join(", ")
}
