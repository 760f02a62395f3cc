//! Conversions (PTX ISA, section 9.7.9.22).

use super::float::{of_single, single};
use super::form::{Form, Resolved};
use crate::code::Class::Convert;
use crate::fault::wrong;
use crate::lanes::{lift1, lift2, mask, signed};
use crate::number::{self, BF16, E4M3, E5M2, Format, Rounding, TF32};
use crate::types::Type::{self, *};

const SIMPLE: [Type; 12] = [U8, U16, U32, U64, S8, S16, S32, S64, F16, Bf16, F32, F64];

/// Options of a conversion other than rounding.
#[derive(Clone, Copy)]
struct ConversionOptions {
    rounding: Rounding,
    /// The rounding is to an integer.
    integral: bool,
    flush: bool,
    /// Into [0, 1], or to the nearest integer that there is.
    saturates: bool,
    /// Out-of-range numbers become the largest finite number.
    finite: bool,
    relu: bool,
}

fn format(ty: Type) -> Format {
    match ty {
        F16 | F16x2 => number::F16,
        Bf16 | Bf16x2 => BF16,
        Tf32 => TF32,
        F64 => number::F64,
        _ => number::F32,
    }
}

pub(super) fn resolve(form: &mut Form<'_, '_>) -> Resolved<()> {
    let integral = form.one_of(&Rounding::INTEGERS);
    let rounding = integral.or_else(|| form.one_of(&Rounding::NAMES));
    let mut options = ConversionOptions {
        rounding: rounding.unwrap_or(Rounding::Nearest),
        integral: integral.is_some(),
        flush: form.flag("ftz"),
        saturates: form.flag("sat"),
        finite: form.flag("satfinite"),
        relu: form.flag("relu"),
    };
    // Both orders are written.
    options.finite |= form.flag("satfinite");
    if let Some(to) = form.one_of(&[("e4m3x2", E4M3), ("e5m2x2", E5M2)]) {
        return bytes(form, to, options);
    }
    let to = match form.peek().and_then(Type::named) {
        Some(to) if SIMPLE.contains(&to) || matches!(to, F16x2 | Bf16x2 | Tf32) => to,
        _ => return form.missing("a type", "`cvt.to.from`"),
    };
    form.advance();
    if let (F16x2, Some(from)) = (to, form.one_of(&[("e4m3x2", E4M3), ("e5m2x2", E5M2)])) {
        return halves_of_bytes(form, from, options);
    }
    if matches!(to, F16x2 | Bf16x2) {
        return pair(form, to, options);
    }
    let from = form.ty(if to == Tf32 { &[F32] } else { &SIMPLE })?;
    form.end(2, 2)?;
    let narrows = to.is_float() && from.is_float() && to.bits() < from.bits();
    if rounding.is_none() && (narrows || to.is_float() != from.is_float() || to == Tf32) {
        return wrong("a rounding is missing", "for example `.rn` to floating point, `.rzi` to integers");
    }
    let kept = form.dst_wide(0, if to == Tf32 { B32 } else { to })?;
    form.src_wide(1, from)?;
    let kept = kept.bits();
    form.map(
        Convert,
        1,
        match (to.is_float(), from.is_float()) {
            (true, true) => lift1(move |a| float_to_float(a, from, to, options)),
            (true, false) => lift1(move |a| integer_to_float(a, from, to, options)),
            (false, true) => lift1(move |a| extended(float_to_integer(a, from, to, options), to, kept)),
            (false, false) => lift1(move |a| extended(integer_to_integer(a, from, to, options), to, kept)),
        },
    );
    Ok(())
}

/// The low half of the operand, or all of it.
fn number_of(bits: u64, ty: Type, flush: bool) -> f64 {
    match ty {
        F64 => f64::from_bits(bits),
        F32 => f64::from(single(bits, flush)),
        _ => format(ty).value(bits & 0xffff),
    }
}

/// The bits of a number, after what a conversion does to it.
fn finished(value: f64, to: Format, options: ConversionOptions) -> u64 {
    let value = match value {
        value if options.saturates => {
            if value > 0.0 {
                value.min(1.0)
            } else {
                0.0
            }
        }
        value if options.relu && value <= 0.0 => 0.0,
        value => value,
    };
    let value = if options.finite { to.saturated(value) } else { value };
    let bits = to.round(value, options.rounding);
    if options.finite && bits & !(1 << (to.bits() - 1)) > to.largest() && !value.is_nan() {
        return to.round(to.saturated(value), Rounding::Zero);
    }
    bits
}

fn integral(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest | Rounding::NearestAway => value.round_ties_even(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}

fn float_to_float(a: u64, from: Type, to: Type, options: ConversionOptions) -> u64 {
    let value = number_of(a, from, options.flush);
    let value = if options.integral { integral(value, options.rounding) } else { value };
    match to {
        F64 => {
            if value.is_nan() {
                number::F64.nan()
            } else {
                f64::from_bits(value.to_bits()).to_bits()
            }
        }
        Tf32 => finished(value, TF32, options) << 13,
        F32 => of_single(f32::from_bits(finished(value, number::F32, options) as u32), options.flush),
        _ => finished(value, format(to), options),
    }
}

fn integer_to_float(a: u64, from: Type, to: Type, options: ConversionOptions) -> u64 {
    let a = a & mask(from.bits());
    let value = if from.is_signed() { signed(a, from.bits()) } else { a as i64 };
    let negative = from.is_signed() && value < 0;
    let magnitude = if negative { value.unsigned_abs() } else { a };
    let bits = format(to).pack(negative, magnitude, 0, options.rounding);
    if options.saturates { finished(format(to).value(bits), format(to), options) } else { bits }
}

/// The least and the largest number of an integer type.
fn limits(ty: Type) -> (i128, i128) {
    if ty.is_signed() {
        (-(1i128 << (ty.bits() - 1)), (1i128 << (ty.bits() - 1)) - 1)
    } else {
        (0, (1i128 << ty.bits()) - 1)
    }
}

/// NaN becomes 0, and numbers out of range become the nearest integer.
fn float_to_integer(a: u64, from: Type, to: Type, options: ConversionOptions) -> u64 {
    let value = integral(number_of(a, from, options.flush), options.rounding);
    let (least, most) = limits(to);
    (value as i128).clamp(least, most) as u64 & mask(to.bits())
}

fn integer_to_integer(a: u64, from: Type, to: Type, options: ConversionOptions) -> u64 {
    let a = a & mask(from.bits());
    let value = if from.is_signed() { i128::from(signed(a, from.bits())) } else { i128::from(a) };
    let (least, most) = limits(to);
    (if options.saturates { value.clamp(least, most) } else { value }) as u64 & mask(to.bits())
}

/// A result in a register that may be wider.
fn extended(value: u64, ty: Type, kept: u32) -> u64 {
    if ty.is_signed() { signed(value, ty.bits()) as u64 & mask(kept) } else { value }
}

/// `cvt.rn.bf16x2.f32 d, a, b`: `a` above `b`.
fn pair(form: &mut Form<'_, '_>, to: Type, options: ConversionOptions) -> Resolved<()> {
    form.ty(&[F32])?;
    form.end(3, 3)?;
    form.dst(0, to)?;
    form.src(1, F32)?;
    form.src(2, F32)?;
    let of = move |a: u64| finished(number_of(a, F32, options.flush), format(to), options);
    form.map(Convert, 2, lift2(move |a, b| of(a) << 16 | of(b)));
    Ok(())
}

/// `cvt.rn.satfinite.e4m3x2.f32 d, a, b` and `….f16x2 d, a`.
fn bytes(form: &mut Form<'_, '_>, to: Format, mut options: ConversionOptions) -> Resolved<()> {
    if !options.finite {
        return wrong("a conversion to bytes without `.satfinite`", "`cvt.rn.satfinite.e4m3x2.f32`");
    }
    options.finite = true;
    let from = form.ty(&[F32, F16x2])?;
    let count = if from == F32 { 3 } else { 2 };
    form.end(count, count)?;
    form.dst(0, B16)?;
    for i in 1..count {
        form.src(i, from)?;
    }
    form.map(
        Convert,
        2,
        if from == F32 {
            let of = move |a: u64| finished(number_of(a, F32, false), to, options);
            lift2(move |a, b| of(a) << 8 | of(b))
        } else {
            let of = move |a: u64| finished(number_of(a, F16, false), to, options);
            lift1(move |a| of(a >> 16) << 8 | of(a))
        },
    );
    Ok(())
}

/// `cvt.rn.f16x2.e4m3x2 d, a`
fn halves_of_bytes(form: &mut Form<'_, '_>, from: Format, options: ConversionOptions) -> Resolved<()> {
    form.end(2, 2)?;
    form.dst(0, F16x2)?;
    form.src(1, B16)?;
    let of = move |a: u64| finished(from.value(a & 0xff), number::F16, options);
    form.map(Convert, 2, lift1(move |a| of(a >> 8) << 16 | of(a)));
    Ok(())
}
