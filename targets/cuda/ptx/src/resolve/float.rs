//! Arithmetic of floating point that is rounded as IEEE 754 says (PTX ISA, sections 9.7.3 and 9.7.4).

use super::form::{Form, Resolved};
use crate::code::Class::{Float, Special};
use crate::fault::wrong;
use crate::lanes::{Map, lift1, lift2};
use crate::number::{self, BF16, F16, Format, Rounding, add_odd, div_odd, fma_odd, sqrt_odd};
use crate::opcode::Opcode;
use crate::types::Type;

/// Every type that numbers of floating point are computed in.
pub(super) const FLOATS: &[Type] = &[Type::F32, Type::F64, Type::F16, Type::Bf16, Type::F16x2, Type::Bf16x2];

/// Changes of operands and results in addition to the arithmetic.
#[derive(Clone, Copy, Default)]
struct Around {
    /// Subnormal numbers are zero.
    flush: bool,
    /// Results are in [0, 1], and NaN is 0.
    unit: bool,
    /// Negative results are 0.
    relu: bool,
    /// A NaN among the operands is the result, of minima and maxima.
    nan: bool,
}

/// f32 as bits: flushed where requested.
pub(super) fn single(bits: u64, flush: bool) -> f32 {
    let value = f32::from_bits(bits as u32);
    if flush && value.is_subnormal() { 0f32.copysign(value) } else { value }
}

/// The bits of an f32 that arithmetic results in.
pub(super) fn of_single(value: f32, flush: bool) -> u64 {
    if value.is_nan() {
        return 0x7fff_ffff;
    }
    let value = if flush && value.is_subnormal() { 0f32.copysign(value) } else { value };
    u64::from(value.to_bits())
}

/// A format's number, flushed where requested; f64 and f32 too.
fn value(format: Format, bits: u64, flush: bool) -> f64 {
    if format == number::F64 {
        return f64::from_bits(bits);
    }
    if format == number::F32 {
        return f64::from(single(bits, flush));
    }
    format.value(bits)
}

fn bits_of(format: Format, found: f64, rounding: Rounding, around: Around) -> u64 {
    let found = if around.unit { if found.is_nan() { 0.0 } else { found.clamp(0.0, 1.0) } } else { found };
    let found = if around.relu && found < 0.0 { 0.0 } else { found };
    let found = if found == 0.0 && around.unit { 0.0 } else { found };
    if format == number::F64 {
        return if found.is_nan() { format.nan() } else { found.to_bits() };
    }
    let bits = format.round(found, rounding);
    if format == number::F32 && around.flush { of_single(f32::from_bits(bits as u32), true) } else { bits }
}

fn format(ty: Type) -> Format {
    match ty {
        Type::F16 | Type::F16x2 => F16,
        Type::Bf16 | Type::Bf16x2 => BF16,
        Type::F64 => number::F64,
        _ => number::F32,
    }
}

/// Both halves of a register.
fn halves(f: impl Fn(&[u64]) -> u64 + Send + Sync + 'static) -> Map {
    crate::lanes::lift(move |ins, outs| {
        let (mut low, mut high) = ([0; 8], [0; 8]);
        for (i, value) in ins.iter().enumerate() {
            (low[i], high[i]) = (value & 0xffff, value >> 16);
        }
        outs[0] = f(&low[..ins.len()]) | f(&high[..ins.len()]) << 16;
    })
}

/// Arithmetic with this many operands in a type, or in both halves of a register.
fn general(ty: Type, f: impl Fn(&[u64]) -> u64 + Send + Sync + 'static) -> Map {
    if matches!(ty, Type::F16x2 | Type::Bf16x2) {
        return halves(f);
    }
    crate::lanes::lift(move |ins, outs| outs[0] = f(ins))
}

pub(super) fn resolve(form: &mut Form<'_, '_>) -> Resolved<()> {
    match form.opcode() {
        Opcode::Add | Opcode::Sub | Opcode::Mul | Opcode::Fma | Opcode::Mad => arithmetic(form),
        Opcode::Div | Opcode::Rcp | Opcode::Sqrt => quotient(form),
        Opcode::Min | Opcode::Max => extreme(form),
        Opcode::Abs | Opcode::Neg | Opcode::Copysign => sign(form),
        Opcode::Testp => test(form),
        other => wrong(format!("`{}` is not one of floating point", other.name()), "its type is an integer"),
    }
}

fn arithmetic(form: &mut Form<'_, '_>) -> Resolved<()> {
    let opcode = form.opcode();
    let rounding = form.one_of(&Rounding::NAMES).unwrap_or(Rounding::Nearest);
    let mut around = Around { flush: form.flag("ftz"), ..Around::default() };
    around.unit = form.flag("sat");
    around.relu = form.flag("relu");
    let ty = form.ty(FLOATS)?;
    let three = matches!(opcode, Opcode::Fma | Opcode::Mad);
    let count = if three { 4 } else { 3 };
    form.end(count, count)?;
    if ty == Type::F64 && rounding != Rounding::Nearest {
        return wrong("f64 with a rounding other than to nearest", "only `.rn` is supported for .f64");
    }
    form.dst(0, ty)?;
    for i in 1..count {
        form.src(i, ty)?;
    }
    let operations = u32::from(three) + 1;
    let operations = if matches!(ty, Type::F16x2 | Type::Bf16x2) { 2 * operations } else { operations };
    let map = if ty == Type::F32 && rounding == Rounding::Nearest && !around.unit && !around.relu {
        plain(opcode, around.flush)
    } else {
        let of = format(ty);
        general(ty, move |ins| {
            let at = |i: usize| value(of, ins[i], around.flush);
            let found = exact(opcode, at, of == number::F64);
            bits_of(of, found, rounding, around)
        })
    };
    form.map(Float, operations, map);
    Ok(())
}

/// A result that rounding once more makes right; of f64 the result itself.
fn exact(opcode: Opcode, at: impl Fn(usize) -> f64, double: bool) -> f64 {
    match (opcode, double) {
        (Opcode::Add, true) => at(0) + at(1),
        (Opcode::Add, false) => add_odd(at(0), at(1)),
        (Opcode::Sub, true) => at(0) - at(1),
        (Opcode::Sub, false) => add_odd(at(0), -at(1)),
        (Opcode::Mul, _) => at(0) * at(1),
        (_, true) => at(0).mul_add(at(1), at(2)),
        (_, false) => fma_odd(at(0), at(1), at(2)),
    }
}

/// f32 as most programs have it.
fn plain(opcode: Opcode, flush: bool) -> Map {
    fn two(flush: bool, f: impl Fn(f32, f32) -> f32 + Send + Sync + 'static) -> Map {
        if flush {
            return lift2(move |a, b| of_single(f(single(a, true), single(b, true)), true));
        }
        lift2(move |a, b| of_single(f(f32::from_bits(a as u32), f32::from_bits(b as u32)), false))
    }
    match opcode {
        Opcode::Add => two(flush, |a, b| a + b),
        Opcode::Sub => two(flush, |a, b| a - b),
        Opcode::Mul => two(flush, |a, b| a * b),
        _ if flush => multiply_add(|bits| single(bits, true), true),
        _ => multiply_add(|bits| f32::from_bits(bits as u32), false),
    }
}

/// `a * b + c` of f32. The product is exact in f64. So the f64 sum, rounded again, is correct unless it is
/// halfway between two f32 numbers or below the normal ones. Then every lane is computed again with rounding
/// to odd.
fn multiply_add(value: impl Fn(u64) -> f32 + Copy + Send + Sync + 'static, flush: bool) -> Map {
    const BELOW: u64 = (1 << 29) - 1;
    const MIDDLE: u64 = 1 << 28;
    Box::new(move |ins, outs| {
        let of = |i: usize, lane: usize| f64::from(value(ins[i][lane]));
        let out = &mut outs[0];
        let mut again = false;
        for (lane, place) in out.iter_mut().enumerate() {
            let sum = of(0, lane) * of(1, lane) + of(2, lane);
            let small = sum.abs() < f64::from(f32::MIN_POSITIVE) && sum != 0.0;
            again |= small | (sum.to_bits() & BELOW == MIDDLE);
            *place = of_single(sum as f32, flush);
        }
        if again {
            for (lane, place) in out.iter_mut().enumerate() {
                *place = of_single(fma_odd(of(0, lane), of(1, lane), of(2, lane)) as f32, flush);
            }
        }
    })
}

/// `div`, `rcp` and `sqrt`. What hardware approximates is rounded as if it were exact.
fn quotient(form: &mut Form<'_, '_>) -> Resolved<()> {
    let opcode = form.opcode();
    let approximate = form.one_of(&[("approx", ()), ("full", ())]).is_some();
    let rounding = if approximate { None } else { Some(form.need("a rounding", &Rounding::NAMES)?) };
    let rounding = rounding.unwrap_or(Rounding::Nearest);
    let around = Around { flush: form.flag("ftz"), ..Around::default() };
    let ty = form.ty(&[Type::F32, Type::F64])?;
    if ty == Type::F64 && (rounding != Rounding::Nearest || approximate) {
        return wrong("f64 with a rounding other than to nearest", "only `.rn` is supported for .f64");
    }
    let count = if opcode == Opcode::Div { 3 } else { 2 };
    form.end(count, count)?;
    form.dst(0, ty)?;
    for i in 1..count {
        form.src(i, ty)?;
    }
    let of = format(ty);
    let double = ty == Type::F64;
    form.map(
        if approximate { Special } else { Float },
        1,
        general(ty, move |ins| {
            let a = value(of, ins[0], around.flush);
            let found = match (opcode, double) {
                (Opcode::Sqrt, true) => a.sqrt(),
                (Opcode::Sqrt, false) => sqrt_odd(a),
                (Opcode::Rcp, true) => 1.0 / a,
                (Opcode::Rcp, false) => div_odd(1.0, a),
                (_, true) => a / value(of, ins[1], false),
                (_, false) => div_odd(a, value(of, ins[1], around.flush)),
            };
            bits_of(of, found, rounding, around)
        }),
    );
    Ok(())
}

fn extreme(form: &mut Form<'_, '_>) -> Resolved<()> {
    let max = form.opcode() == Opcode::Max;
    let mut around = Around { flush: form.flag("ftz"), ..Around::default() };
    around.nan = form.flag("NaN");
    let ty = form.ty(FLOATS)?;
    form.end(3, 4)?;
    form.dst(0, ty)?;
    for i in 1..form.count() {
        form.src(i, ty)?;
    }
    let of = format(ty);
    let pick = move |a: f64, b: f64| match (a.is_nan(), b.is_nan()) {
        (true, true) => f64::NAN,
        (true, false) | (false, true) if around.nan => f64::NAN,
        (true, false) => b,
        (false, true) => a,
        // -0 is less than +0.
        _ if a == b => {
            if a.is_sign_negative() == max {
                b
            } else {
                a
            }
        }
        _ => {
            if (a > b) == max {
                a
            } else {
                b
            }
        }
    };
    form.map(
        Float,
        1,
        general(ty, move |ins| {
            let first = value(of, ins[0], around.flush);
            let found =
                ins[1..].iter().fold(first, |found, bits| pick(found, value(of, *bits, around.flush)));
            bits_of(of, found, Rounding::Nearest, around)
        }),
    );
    Ok(())
}

/// `abs`, `neg` and `copysign` change the sign alone.
fn sign(form: &mut Form<'_, '_>) -> Resolved<()> {
    let opcode = form.opcode();
    let flush = form.flag("ftz");
    let ty = form.ty(FLOATS)?;
    let signs = match ty {
        Type::F16 | Type::Bf16 => 0x8000,
        Type::F16x2 | Type::Bf16x2 => 0x8000_8000,
        Type::F64 => 1 << 63,
        _ => 0x8000_0000u64,
    };
    let count = if opcode == Opcode::Copysign { 3 } else { 2 };
    form.end(count, count)?;
    form.dst(0, ty)?;
    for i in 1..count {
        form.src(i, ty)?;
    }
    let clean = move |a: u64| match ty {
        Type::F32 if flush => u64::from(single(a, true).to_bits()),
        _ => a,
    };
    form.map(
        Float,
        1,
        match opcode {
            Opcode::Abs => lift1(move |a| clean(a) & !signs),
            Opcode::Neg => lift1(move |a| clean(a) ^ signs),
            _ => lift2(move |a, b| (b & !signs) | (a & signs)),
        },
    );
    Ok(())
}

fn test(form: &mut Form<'_, '_>) -> Resolved<()> {
    type Test = fn(f64, bool) -> bool;
    let tests: [(&str, Test); 6] = [
        ("finite", |a, _| a.is_finite()),
        ("infinite", |a, _| a.is_infinite()),
        ("number", |a, _| !a.is_nan()),
        ("notanumber", |a, _| a.is_nan()),
        ("normal", |a, subnormal| a.is_finite() && a != 0.0 && !subnormal),
        ("subnormal", |_, subnormal| subnormal),
    ];
    let test = form.need("a question", &tests)?;
    let ty = form.ty(&[Type::F32, Type::F64])?;
    form.end(2, 2)?;
    form.dst(0, Type::Pred)?;
    form.src(1, ty)?;
    form.map(
        Float,
        1,
        lift1(move |a| {
            u64::from(match ty {
                Type::F64 => test(f64::from_bits(a), f64::from_bits(a).is_subnormal()),
                _ => test(f64::from(single(a, false)), single(a, false).is_subnormal()),
            })
        }),
    );
    Ok(())
}
