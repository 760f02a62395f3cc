//! Conditions that a module must satisfy to be executed.
#![expect(
    clippy::cast_possible_truncation,
    reason = "bits are cut to their type; variables have a largest size"
)]

use crate::fault::{Fault, wrong};
use crate::module::{Literal, MAX_VARIABLE, Module, Variable};
use crate::resolve;
use crate::types::Type;

/// Checks a module: every name is declared once; every instruction has a known form, with operands of its
/// types; every label and called function exists; and no memory is larger than a block or a thread has.
///
/// # Errors
/// The first thing that is wrong, with its place.
pub fn verify(module: &Module) -> Result<(), Fault> {
    let mut all = 0_u64;
    for variable in module.variables() {
        values(variable)?;
        all = all.saturating_add(variable.bytes().unwrap_or(0));
        if all > MAX_VARIABLE {
            return wrong(
                "too large variables",
                format!("at most {MAX_VARIABLE} bytes are allowed in total"),
            )
            .map_err(|wrong| wrong.declared(&variable.name, variable.line.0));
        }
    }
    let mut names = std::collections::BTreeSet::new();
    for function in module.functions().filter(|function| function.body.is_some()) {
        if !names.insert(&function.name) {
            return wrong(
                format!("`{}` is defined twice", function.name),
                "give each function a unique name",
            )
            .map_err(|wrong| wrong.declared(&function.name, function.line.0));
        }
        resolve::kernel(module, function)?;
    }
    Ok(())
}

/// The first bytes that a variable of the module has at the start; zeros follow.
pub(crate) fn values(variable: &Variable) -> Result<Vec<u8>, Fault> {
    let declared = |wrong: crate::fault::Wrong| wrong.declared(&variable.name, variable.line.0);
    let size = variable.ty.bytes() as usize;
    let mut bytes = Vec::new();
    for value in &variable.values {
        let bits = match (value, variable.ty) {
            (Literal::Integer(value), ty) if !ty.is_float() => *value as u64,
            (Literal::F32(bits), Type::F32 | Type::B32) => u64::from(*bits),
            (Literal::F64(bits), Type::F64 | Type::B64) => *bits,
            (Literal::F64(bits), Type::F32) => u64::from((f64::from_bits(*bits) as f32).to_bits()),
            (value, ty) => {
                return wrong(
                    format!("`{value}` is not a value of .{}", ty.name()),
                    "write it as the type requires",
                )
                .map_err(declared);
            }
        };
        bytes.extend_from_slice(&bits.to_le_bytes()[..size]);
    }
    let all = variable.bytes().unwrap_or(0) as usize;
    if bytes.len() > all {
        return wrong(format!("{} bytes of values", bytes.len()), format!("the variable has {all}"))
            .map_err(declared);
    }
    Ok(bytes)
}
