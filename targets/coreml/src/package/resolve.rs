//! From messages to a [`Program`]: names become numbers, types are checked, weights are found.

use super::constant::Constant;
use super::error::{Flaw, Place};
use super::program::{Feature, Function, Op, Origin, Program, Signature, Value, ValueId};
use super::proto::{self, Bound, Elements, Kind, StoredValue};
use super::types::{Dtype, TensorType, elements};
use super::weights::Weights;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

/// Most functions of a program.
pub const MAX_FUNCTIONS: usize = 256;
/// Most operations of a function, constants among them.
pub const MAX_OPS: usize = 1 << 16;
/// Most arguments, and most results, of an operation.
pub const MAX_ARGS: usize = 4096;

type ResolveResult<T> = Result<T, (Place, Flaw)>;

/// Reads the program of a model.
pub(super) fn program(model: &proto::Model, weights: &mut Weights) -> ResolveResult<Program> {
    let at_model = |flaw| (Place::model(), flaw);
    let program = model.ml_program.as_ref();
    let program =
        program.ok_or_else(|| at_model(Flaw::Unsupported("a model that is not an ML program".into())))?;
    if program.functions.is_empty() {
        return Err(at_model(Flaw::Invalid("no functions".into())));
    }
    if program.functions.len() > MAX_FUNCTIONS {
        return Err(at_model(Flaw::TooMany { what: "functions", limit: MAX_FUNCTIONS }));
    }
    let functions = (program.functions.iter())
        .map(|(name, f)| Ok((name.clone(), Arc::new(function(name, f, weights)?))))
        .collect::<ResolveResult<BTreeMap<_, _>>>()?;
    let empty = proto::ModelDescription::default();
    let description = model.description.as_ref().unwrap_or(&empty);
    let named = &description.default_function_name;
    let default = if named.is_empty() { "main" } else { named };
    if !functions.contains_key(default) {
        let flaw = Flaw::Invalid(format!("the default function `{default}` does not exist"));
        return Err(at_model(flaw));
    }
    Ok(Program { described: described(description, default)?, default_function: default.into(), functions })
}

/// Description of each function.
fn described(model: &proto::ModelDescription, default: &str) -> ResolveResult<BTreeMap<String, Signature>> {
    let mut all = BTreeMap::new();
    if model.functions.is_empty() {
        let signature = signature(default, [&model.input, &model.output, &model.state])?;
        all.insert(default.to_owned(), signature);
    }
    for f in &model.functions {
        let signature = signature(&f.name, [&f.input, &f.output, &f.state])?;
        if all.insert(f.name.clone(), signature).is_some() {
            return Err((Place::model(), Flaw::Twice(f.name.clone())));
        }
    }
    Ok(all)
}

fn signature(
    function: &str,
    [inputs, outputs, states]: [&Vec<proto::FeatureDescription>; 3],
) -> ResolveResult<Signature> {
    let read = |features: &[proto::FeatureDescription]| {
        features.iter().map(|f| feature(function, f)).collect::<ResolveResult<Vec<_>>>()
    };
    Ok(Signature { inputs: read(inputs)?, outputs: read(outputs)?, states: read(states)? })
}

fn feature(function: &str, feature: &proto::FeatureDescription) -> ResolveResult<Feature> {
    let at = |flaw| (Place::item(function, format!("feature `{}`", feature.name)), flaw);
    let empty = proto::FeatureType::default();
    let ty = feature.r#type.as_ref().unwrap_or(&empty);
    let array = ty.multi_array.as_ref().or_else(|| ty.state.as_ref()?.array.as_ref());
    let array = array.ok_or_else(|| at(Flaw::Unsupported("a feature that is not an array".into())))?;
    let dtype = Dtype::from_feature(array.data_type)
        .ok_or_else(|| at(Flaw::Unsupported(format!("element type number {}", array.data_type))))?;
    let shape: Result<Vec<usize>, _> = array.shape.iter().map(|&d| usize::try_from(d)).collect();
    let shape = shape.ok().filter(|s| elements(s).is_some());
    let shape = shape.ok_or_else(|| at(Flaw::Invalid(format!("shape {:?}", array.shape))))?;
    let unknown = array.shape.is_empty();
    Ok(Feature {
        name: feature.name.clone(),
        about: feature.short_description.clone(),
        ty: (!unknown).then_some(TensorType { dtype, shape }),
        flexible: array.enumerated_shapes.is_some() || array.shape_range.is_some(),
        optional: ty.is_optional,
    })
}

/// A function that is being read.
struct Reader<'a> {
    weights: &'a mut Weights,
    values: Vec<Value>,
    by_name: BTreeMap<String, ValueId>,
    ops: Vec<Op>,
}

fn function(name: &str, function: &proto::Function, weights: &mut Weights) -> ResolveResult<Function> {
    let at = |flaw| (Place::function(name), flaw);
    let block = function.block_specializations.get(&function.opset);
    let block =
        block.ok_or_else(|| at(Flaw::Invalid(format!("no body for operator set `{}`", function.opset))))?;
    if block.operations.len() > MAX_OPS {
        return Err(at(Flaw::TooMany { what: "operations in a function", limit: MAX_OPS }));
    }
    if !block.inputs.is_empty() {
        return Err(at(Flaw::Invalid("a body with inputs of its own".into())));
    }
    let mut reader = Reader { weights, values: Vec::new(), by_name: BTreeMap::new(), ops: Vec::new() };
    let (mut inputs, mut states) = (Vec::new(), Vec::new());
    for input in &function.inputs {
        let at = |flaw| (Place::item(name, format!("input `{}`", input.name)), flaw);
        let (ty, is_state) = value_type(input.r#type.as_ref()).map_err(at)?;
        let (origin, list) =
            if is_state { (Origin::State, &mut states) } else { (Origin::Input, &mut inputs) };
        list.push(reader.define(&input.name, ty, origin).map_err(at)?);
    }
    for op in &block.operations {
        let label = || {
            let name = op.attributes.get("name").and_then(text);
            let result = op.outputs.first().map(|o| o.name.as_str());
            format!("{} `{}`", op.r#type, name.or(result).unwrap_or_default())
        };
        reader.operation(op).map_err(|flaw| (Place::item(name, label()), flaw))?;
    }
    let outputs =
        block.outputs.iter().map(|n| reader.lookup(n)).collect::<Result<Vec<_>, _>>().map_err(at)?;
    if outputs.is_empty() {
        return Err(at(Flaw::Invalid("no outputs".into())));
    }
    let Reader { values, ops, .. } = reader;
    Ok(Function { opset: function.opset.clone(), inputs, states, outputs, ops, values })
}

/// A string that the model itself holds.
fn text(value: &proto::Value) -> Option<&str> {
    match value.held.as_ref()? {
        StoredValue::Immediate(v) => match v.tensor.as_ref()?.elements.as_ref()? {
            Elements::Strings(s) => s.values.first().map(String::as_str),
            _ => None,
        },
        StoredValue::Blob(_) => None,
    }
}

/// Type of a value, and whether it is a state.
fn value_type(ty: Option<&proto::ValueType>) -> Result<(TensorType, bool), Flaw> {
    match ty.and_then(|t| t.kind.as_ref()) {
        Some(Kind::Tensor(ty)) => Ok((TensorType::read(ty)?, false)),
        Some(Kind::State(state)) => match state.wrapped.as_ref().and_then(|t| t.kind.as_ref()) {
            Some(Kind::Tensor(ty)) => Ok((TensorType::read(ty)?, true)),
            _ => Err(Flaw::Unsupported("a state that holds no tensor".into())),
        },
        Some(_) => Err(Flaw::Unsupported("a value that is neither a tensor nor a state".into())),
        None => Err(Flaw::Invalid("a value without a type".into())),
    }
}

impl Reader<'_> {
    fn define(&mut self, name: &str, ty: TensorType, origin: Origin) -> Result<ValueId, Flaw> {
        let id = ValueId(self.values.len());
        if !name.is_empty() {
            match self.by_name.entry(name.to_owned()) {
                Entry::Occupied(_) => return Err(Flaw::Twice(name.into())),
                Entry::Vacant(entry) => entry.insert(id),
            };
        }
        self.values.push(Value { name: name.into(), ty, origin });
        Ok(id)
    }

    fn lookup(&self, name: &str) -> Result<ValueId, Flaw> {
        self.by_name.get(name).copied().ok_or_else(|| Flaw::Undefined(name.into()))
    }

    /// A constant in an argument or an attribute.
    fn unnamed(&mut self, value: &proto::Value) -> Result<ValueId, Flaw> {
        let constant = Constant::read(value, self.weights)?;
        self.define("", constant.ty.clone(), Origin::Constant(constant))
    }

    fn operation(&mut self, op: &proto::Operation) -> Result<(), Flaw> {
        if !op.blocks.is_empty() {
            return Err(Flaw::Unsupported(format!("`{}`, control flow,", op.r#type)));
        }
        if op.r#type == "const" {
            return self.constant(op);
        }
        let arguments = op.inputs.values().map(|a| a.arguments.len()).sum::<usize>();
        if arguments > MAX_ARGS || op.outputs.len() > MAX_ARGS {
            return Err(Flaw::TooMany { what: "arguments or results of an operation", limit: MAX_ARGS });
        }
        let mut args = BTreeMap::new();
        for (parameter, argument) in &op.inputs {
            let ids = (argument.arguments.iter())
                .map(|binding| match &binding.binding {
                    Some(Bound::Name(name)) => self.lookup(name),
                    Some(Bound::Value(value)) => self.unnamed(value),
                    None => Err(Flaw::Invalid(format!("`{parameter}` is bound to nothing"))),
                })
                .collect::<Result<Vec<_>, _>>()?;
            args.insert(parameter.clone(), ids);
        }
        for (parameter, value) in op.attributes.iter().filter(|(name, _)| *name != "name") {
            let id = self.unnamed(value)?;
            if args.insert(parameter.clone(), vec![id]).is_some() {
                return Err(Flaw::Twice(parameter.clone()));
            }
        }
        let number = self.ops.len();
        let results = (op.outputs.iter())
            .map(|result| match value_type(result.r#type.as_ref())? {
                (ty, false) => self.define(&result.name, ty, Origin::Op(number)),
                (_, true) => Err(Flaw::Unsupported("a state as the result of an operation".into())),
            })
            .collect::<Result<Vec<_>, _>>()?;
        let name = op.attributes.get("name").and_then(text).unwrap_or_default().to_owned();
        self.ops.push(Op { kind: op.r#type.clone(), name, args, results });
        Ok(())
    }

    fn constant(&mut self, op: &proto::Operation) -> Result<(), Flaw> {
        let (Some(value), [result]) = (op.attributes.get("val"), op.outputs.as_slice()) else {
            return Err(Flaw::Invalid("a constant has one value and one result".into()));
        };
        let constant = Constant::read(value, self.weights)?;
        if value_type(result.r#type.as_ref())? != (constant.ty.clone(), false) {
            return Err(Flaw::Invalid(format!("the value is {}, the result of another type", constant.ty)));
        }
        self.define(&result.name, constant.ty.clone(), Origin::Constant(constant))?;
        Ok(())
    }
}
