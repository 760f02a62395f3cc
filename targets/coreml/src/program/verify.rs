//! Checks a program: it is well formed, and a unit may run it.

use super::infer::{self, Shapes};
use super::{Blocks, ELEMENT, Function, Op, OpKind, Program, ProgramError, Rules, ValueId, WeightRef};
use std::collections::BTreeSet;
use std::path::{Component, Path};

type Result<T> = std::result::Result<T, ProgramError>;

/// Largest finite f16.
const F16_MAX: f32 = 65504.0;

impl Program {
    /// Checks that every function is well formed and that shapes follow from operators. Also checks that
    /// numbers are finite in f16, and that the unit's rules are satisfied.
    ///
    /// # Errors
    /// The first fault, with its function and operator.
    pub fn verify(&self, rules: &Rules) -> Result<()> {
        let mut names = BTreeSet::new();
        if self.functions.is_empty() {
            return Err(ProgramError::function("", "there is no function").within(&self.name));
        }
        for weight in &self.weights {
            self::weight(weight).map_err(|what| ProgramError::function("", what).within(&self.name))?;
        }
        for function in &self.functions {
            let checked = if !names.insert(&*function.name) {
                Err(ProgramError::function(&function.name, "the name is a duplicate"))
            } else if !identifier(&function.name) {
                Err(ProgramError::function(&function.name, "its name is not an identifier"))
            } else {
                verify(function, &self.weights, rules)
            };
            checked.map_err(|e| e.within(&self.name))?;
        }
        Ok(())
    }
}

/// Letters, digits and underscores, no leading digit: what Core ML calls functions and values by.
fn identifier(name: &str) -> bool {
    !name.starts_with(|c: char| c.is_ascii_digit())
        && !name.is_empty()
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// A weight has a file below the folder of weights, at a place where an f16 can be.
fn weight(weight: &WeightRef) -> std::result::Result<(), String> {
    let inside = Path::new(&weight.file).components().all(|c| matches!(c, Component::Normal(_)));
    if !inside || weight.file.is_empty() {
        return Err(format!(
            "weight `{}` is in `{}`, outside of the weights folder",
            weight.name, weight.file
        ));
    }
    let size = weight.blocks.map_or(ELEMENT, |_| 1);
    let end = weight.offset.checked_add(weight.elements().saturating_mul(size));
    if weight.elements() == 0 || !weight.offset.is_multiple_of(size) || end.is_none_or(|e| e == u64::MAX) {
        return Err(format!("weight `{}` is {:?} at byte {}", weight.name, weight.shape, weight.offset));
    }
    match weight.blocks {
        Some(b) if !blocks_fit(&b, &weight.shape) => {
            Err(format!("weight `{}` is {:?}, which has no such blocks: {b:?}", weight.name, weight.shape))
        }
        _ => Ok(()),
    }
}

/// Codes are of 4 or 8 bits, and blocks of input channels are whole.
fn blocks_fit(blocks: &Blocks, shape: &[usize]) -> bool {
    let scales_end = blocks.scales.checked_add(super::elements(shape));
    matches!(blocks.bits, 4 | 8)
        && blocks.scales.is_multiple_of(ELEMENT)
        && scales_end.is_some()
        && matches!(*shape, [_, inputs, 1, 1] if blocks.size > 0 && inputs.is_multiple_of(blocks.size))
}

fn verify(function: &Function, weights: &[WeightRef], rules: &Rules) -> Result<()> {
    let fail = |what: String| Err(ProgramError::function(&function.name, what));
    let mut names = BTreeSet::new();
    for value in &function.values {
        if !identifier(&value.name) || !names.insert(&*value.name) {
            return fail(format!(
                "`{}` cannot be a value's name: it is not an identifier, or a duplicate",
                value.name
            ));
        }
        if value.shape.contains(&0) {
            return fail(format!("`{}` has no elements: {:?}", value.name, value.shape));
        }
    }
    let mut defined = vec![false; function.values.len()];
    for &id in function.inputs.iter().chain(&function.states) {
        define(&mut defined, id)
            .and_then(|()| extent(function, id, rules))
            .map_err(|what| ProgramError::function(&function.name, what))?;
    }
    states(function, rules).or_else(fail)?;
    for (i, op) in function.ops.iter().enumerate() {
        self::op(function, op, weights, rules, &mut defined)
            .map_err(|what| ProgramError::op(&function.name, i, op.op.name(), what))?;
    }
    if function.outputs.is_empty() {
        return fail("it has no result".into());
    }
    for id in &function.outputs {
        if !defined.get(id.index()).is_some_and(|d| *d) || function.states.contains(id) {
            return fail(format!("its result `{id}` is not defined"));
        }
    }
    Ok(())
}

fn define(defined: &mut [bool], id: ValueId) -> std::result::Result<(), String> {
    match defined.get_mut(id.index()) {
        Some(known) if !*known => {
            *known = true;
            Ok(())
        }
        Some(_) => Err(format!("`{id}` is defined twice")),
        None => Err(format!("there is no value `{id}`")),
    }
}

fn extent(function: &Function, id: ValueId, rules: &Rules) -> std::result::Result<(), String> {
    let value = &function.values[id.index()];
    match value.shape.iter().find(|&&d| d > rules.extent) {
        Some(d) => Err(format!(
            "`{}` has an extent of {d}; {} takes at most {}",
            value.name, rules.unit, rules.extent
        )),
        None => Ok(()),
    }
}

/// Checks that no tensor that a unit pads has a last axis of 1, but for what callers see.
fn last_axis(function: &Function, id: ValueId, rules: &Rules) -> std::result::Result<(), String> {
    let value = &function.values[id.index()];
    let narrow = value.shape.last() == Some(&1) && value.shape.iter().any(|&d| d > 1);
    if !rules.pads() || !narrow || function.outputs.contains(&id) {
        return Ok(());
    }
    Err(format!(
        "`{}` is {:?}: {} pads a last axis of 1 to {} bytes",
        value.name, value.shape, rules.unit, rules.last_axis_bytes
    ))
}

fn states(function: &Function, rules: &Rules) -> std::result::Result<(), String> {
    if function.states.len() > rules.states {
        return Err(format!(
            "it has {} states; {} takes {} in a graph",
            function.states.len(),
            rules.unit,
            rules.states
        ));
    }
    for id in &function.states {
        let value = &function.values[id.index()];
        let [.., rows, width] = *value.shape else {
            return Err(format!("state `{}` has no rows: {:?}", value.name, value.shape));
        };
        if rows % rules.state_multiple != 0 || width % rules.state_multiple != 0 {
            return Err(format!(
                "the last two extents of state `{}` are {rows} and {width}; for {} they must be multiples of {}",
                value.name, rules.unit, rules.state_multiple
            ));
        }
    }
    Ok(())
}

fn op(
    function: &Function,
    op: &Op,
    weights: &[WeightRef],
    rules: &Rules,
    defined: &mut [bool],
) -> std::result::Result<(), String> {
    if !rules.ops.contains(&op.op) {
        return Err(format!("{} does not run it", rules.unit));
    }
    let params = op.op.params();
    for param in params {
        match op.arg(param.name) {
            Some(arg) if !arg.is(param.kind) => {
                return Err(format!("`{}` takes {:?}, not {arg:?}", param.name, param.kind));
            }
            None if param.required => return Err(format!("there is no `{}`", param.name)),
            _ => {}
        }
        let is_state = |id: &ValueId| function.states.contains(id);
        if let Some(super::Arg::Value(id)) = op.arg(param.name)
            && is_state(id) != (param.kind == super::op::ArgKind::State)
        {
            return Err(format!("`{}` takes {:?}, not `{id}`", param.name, param.kind));
        }
    }
    if let Some(name) = op.args.keys().find(|name| !params.iter().any(|p| p.name == **name)) {
        return Err(format!("it has no parameter `{name}`"));
    }
    finite(op)?;
    let value = |id: ValueId| {
        let known = *defined.get(id.index())?;
        known.then(|| &*function.values[id.index()].shape)
    };
    let shapes = infer::results(op, &Shapes { value, weights })?;
    if shapes.len() != op.results.len() {
        return Err(format!("{} results are named, expected {}", op.results.len(), shapes.len()));
    }
    for (&id, shape) in op.results.iter().zip(&shapes) {
        define(defined, id)?;
        let stated = &function.values[id.index()].shape;
        if stated != shape {
            return Err(format!("`{id}` is {shape:?}, not {stated:?}"));
        }
        if op.op != OpKind::Const {
            extent(function, id, rules)?;
            last_axis(function, id, rules)?;
        }
    }
    Ok(())
}

/// Numbers in the program are finite in f16: an infinite mask makes NaN of a row that it covers whole.
fn finite(op: &Op) -> std::result::Result<(), String> {
    for (name, arg) in &op.args {
        if let super::Arg::Float(x) = arg
            && (x.is_nan() || x.abs() > F16_MAX)
        {
            return Err(format!("`{name}` is {x}, which f16 cannot hold"));
        }
    }
    Ok(())
}
