//! Functions that hardware approximates: computed in f64 and rounded once, within the errors that the PTX ISA
//! states.

use super::float::{of_single, single};
use super::form::{Form, Resolved};
use crate::code::Class::Special;
use crate::fault::wrong;
use crate::lanes::lift1;
use crate::number::{BF16, F16, Format, Rounding};
use crate::opcode::Opcode;
use crate::types::Type;

fn function(opcode: Opcode) -> fn(f64) -> f64 {
    match opcode {
        Opcode::Ex2 => f64::exp2,
        Opcode::Lg2 => f64::log2,
        Opcode::Sin => f64::sin,
        Opcode::Cos => f64::cos,
        Opcode::Tanh => f64::tanh,
        _ => |a| 1.0 / a.sqrt(),
    }
}

pub(super) fn resolve(form: &mut Form<'_, '_>) -> Resolved<()> {
    let opcode = form.opcode();
    form.need("`.approx`", &[("approx", ())])?;
    let flush = form.flag("ftz");
    let types: &[Type] = match opcode {
        Opcode::Ex2 | Opcode::Tanh => &[Type::F32, Type::F16, Type::Bf16, Type::F16x2, Type::Bf16x2],
        Opcode::Rsqrt => &[Type::F32, Type::F64],
        _ => &[Type::F32],
    };
    let ty = form.ty(types)?;
    if flush && matches!(ty, Type::F16 | Type::F16x2 | Type::F64) {
        return wrong(format!("`.ftz` of .{}", ty.name()), "it is of .f32, and of .bf16 in `ex2`");
    }
    form.end(2, 2)?;
    form.dst(0, ty)?;
    form.src(1, ty)?;
    let f = function(opcode);
    let half = move |format: Format| move |a: u64| format.round(f(format.value(a)), Rounding::Nearest);
    form.map(
        Special,
        1,
        match ty {
            Type::F64 => lift1(move |a| f(f64::from_bits(a)).to_bits()),
            Type::F16 => lift1(half(F16)),
            Type::Bf16 => lift1(half(BF16)),
            Type::F16x2 => lift1(move |a| half(F16)(a & 0xffff) | half(F16)(a >> 16) << 16),
            Type::Bf16x2 => lift1(move |a| half(BF16)(a & 0xffff) | half(BF16)(a >> 16) << 16),
            _ => lift1(move |a| of_single(f(f64::from(single(a, flush))) as f32, flush)),
        },
    );
    Ok(())
}
