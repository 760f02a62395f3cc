//! Arithmetic of integers (PTX ISA, section 9.7.1).

use super::form::{Form, Resolved};
use crate::code::Class::Integer;
use crate::fault::wrong;
use crate::lanes::{lift1, lift2, lift3, mask, signed};
use crate::opcode::Opcode;
use crate::types::Type::{self, *};

const WORDS: &[Type] = &[U16, U32, U64, S16, S32, S64];
const SIGNED: &[Type] = &[S16, S32, S64];
const LONG: &[Type] = &[U32, U64, S32, S64];
const BITS: &[Type] = &[B32, B64];

/// Part of a product that is kept.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Low,
    High,
    Wide,
}

const PARTS: [(&str, Part); 3] = [("lo", Part::Low), ("hi", Part::High), ("wide", Part::Wide)];

/// A number of a type, wide enough for any product.
fn wide(value: u64, ty: Type) -> i128 {
    if ty.is_signed() { i128::from(signed(value, ty.bits())) } else { i128::from(value) }
}

pub(super) fn resolve(form: &mut Form<'_, '_>) -> Resolved<()> {
    match form.opcode() {
        Opcode::Add | Opcode::Sub => sum(form),
        Opcode::Mul => product(form),
        Opcode::Mad => product_and_sum(form),
        Opcode::Mul24 => product24(form),
        Opcode::Div | Opcode::Rem => quotient(form),
        Opcode::Min | Opcode::Max => extreme(form),
        Opcode::Abs | Opcode::Neg => sign(form),
        Opcode::Sad => distance(form),
        Opcode::Popc | Opcode::Clz | Opcode::Bfind => count(form),
        Opcode::Brev | Opcode::Cnot => invert_or_reverse(form),
        Opcode::Bfe | Opcode::Bfi => field(form),
        Opcode::Dp4a | Opcode::Dp2a => dot(form),
        other => {
            wrong(format!("`{}` is not one of integers", other.name()), "its type is one of floating point")
        }
    }
}

fn sum(form: &mut Form<'_, '_>) -> Resolved<()> {
    let negative = form.opcode() == Opcode::Sub;
    let saturates = form.flag("sat");
    let ty = form.ty(if saturates { &[S32] } else { WORDS })?;
    form.end(3, 3)?;
    form.dst(0, ty)?;
    form.src(1, ty)?;
    form.src(2, ty)?;
    let mask = mask(ty.bits());
    let map = match (saturates, negative) {
        (false, false) => lift2(move |a, b| a.wrapping_add(b) & mask),
        (false, true) => lift2(move |a, b| a.wrapping_sub(b) & mask),
        (true, false) => lift2(|a, b| u64::from((a as i32).saturating_add(b as i32) as u32)),
        (true, true) => lift2(|a, b| u64::from((a as i32).saturating_sub(b as i32) as u32)),
    };
    form.map(Integer, 1, map);
    Ok(())
}

/// The type of a product: as wide as its factors, or twice as wide.
fn doubled(ty: Type) -> Resolved<Type> {
    match ty {
        U16 => Ok(U32),
        S16 => Ok(S32),
        U32 => Ok(U64),
        S32 => Ok(S64),
        _ => {
            wrong(format!("a product of .{} that is twice as wide", ty.name()), "factors have 16 or 32 bits")
        }
    }
}

fn product(form: &mut Form<'_, '_>) -> Resolved<()> {
    let part = form.need("which part is kept", &PARTS)?;
    let ty = form.ty(WORDS)?;
    form.end(3, 3)?;
    let to = if part == Part::Wide { doubled(ty)? } else { ty };
    form.dst(0, to)?;
    form.src(1, ty)?;
    form.src(2, ty)?;
    let (bits, mask) = (ty.bits(), mask(to.bits()));
    let map = match part {
        Part::Low => lift2(move |a, b| a.wrapping_mul(b) & mask),
        Part::Wide => lift2(move |a, b| (wide(a, ty).wrapping_mul(wide(b, ty))) as u64 & mask),
        Part::High => lift2(move |a, b| high(a, b, ty, bits) & mask),
    };
    form.map(Integer, 1, map);
    Ok(())
}

/// The upper half of a product.
fn high(a: u64, b: u64, ty: Type, bits: u32) -> u64 {
    if ty == U64 {
        return ((u128::from(a) * u128::from(b)) >> 64) as u64;
    }
    (wide(a, ty).wrapping_mul(wide(b, ty)) >> bits) as u64
}

fn product_and_sum(form: &mut Form<'_, '_>) -> Resolved<()> {
    let part = form.need("which part is kept", &PARTS)?;
    let saturates = form.flag("sat");
    let ty = form.ty(if saturates { &[S32] } else { WORDS })?;
    if saturates && part != Part::High {
        return wrong("`.sat` of a part that is not `.hi`", "`mad.hi.sat.s32`");
    }
    form.end(4, 4)?;
    let to = if part == Part::Wide { doubled(ty)? } else { ty };
    form.dst(0, to)?;
    form.src(1, ty)?;
    form.src(2, ty)?;
    form.src(3, to)?;
    let (bits, mask) = (ty.bits(), mask(to.bits()));
    let map = match part {
        Part::Low => lift3(move |a, b, c| a.wrapping_mul(b).wrapping_add(c) & mask),
        Part::Wide => {
            lift3(move |a, b, c| (wide(a, ty).wrapping_mul(wide(b, ty)) as u64).wrapping_add(c) & mask)
        }
        Part::High if saturates => {
            lift3(move |a, b, c| u64::from((high(a, b, ty, bits) as i32).saturating_add(c as i32) as u32))
        }
        Part::High => lift3(move |a, b, c| high(a, b, ty, bits).wrapping_add(c) & mask),
    };
    form.map(Integer, 2, map);
    Ok(())
}

fn product24(form: &mut Form<'_, '_>) -> Resolved<()> {
    let high = form.need("which part is kept", &[("lo", false), ("hi", true)])?;
    let ty = form.ty(&[U32, S32])?;
    form.end(3, 3)?;
    form.dst(0, ty)?;
    form.src(1, ty)?;
    form.src(2, ty)?;
    let of = move |value: u64| if ty.is_signed() { signed(value, 24) } else { (value & mask(24)) as i64 };
    form.map(Integer, 1, lift2(move |a, b| ((of(a) * of(b)) >> if high { 16 } else { 0 }) as u64 & mask(32)));
    Ok(())
}

/// By zero a quotient is all ones and a remainder the dividend: PTX leaves both open, and this is what GPUs
/// do.
fn quotient(form: &mut Form<'_, '_>) -> Resolved<()> {
    let rest = form.opcode() == Opcode::Rem;
    let ty = form.ty(WORDS)?;
    form.end(3, 3)?;
    form.dst(0, ty)?;
    form.src(1, ty)?;
    form.src(2, ty)?;
    let mask = mask(ty.bits());
    form.map(
        Integer,
        1,
        lift2(move |a, b| {
            let (x, y) = (wide(a, ty), wide(b, ty));
            let found = match (y, rest) {
                (0, true) => x,
                (0, false) => -1,
                (_, true) => x % y,
                (_, false) => x / y,
            };
            found as u64 & mask
        }),
    );
    Ok(())
}

fn extreme(form: &mut Form<'_, '_>) -> Resolved<()> {
    let max = form.opcode() == Opcode::Max;
    let relu = form.flag("relu");
    let ty = form.ty(if relu { &[S32] } else { WORDS })?;
    form.end(3, 3)?;
    form.dst(0, ty)?;
    form.src(1, ty)?;
    form.src(2, ty)?;
    let mask = mask(ty.bits());
    form.map(
        Integer,
        1,
        lift2(move |a, b| {
            let (x, y) = (wide(a, ty), wide(b, ty));
            let found = if max { x.max(y) } else { x.min(y) };
            (if relu { found.max(0) } else { found }) as u64 & mask
        }),
    );
    Ok(())
}

fn sign(form: &mut Form<'_, '_>) -> Resolved<()> {
    let abs = form.opcode() == Opcode::Abs;
    let ty = form.ty(SIGNED)?;
    form.end(2, 2)?;
    form.dst(0, ty)?;
    form.src(1, ty)?;
    let mask = mask(ty.bits());
    form.map(
        Integer,
        1,
        lift1(move |a| {
            let value = wide(a, ty);
            (if abs { value.abs() } else { -value }) as u64 & mask
        }),
    );
    Ok(())
}

/// `sad`: a sum with the distance of two numbers.
fn distance(form: &mut Form<'_, '_>) -> Resolved<()> {
    let ty = form.ty(WORDS)?;
    form.end(4, 4)?;
    form.dst(0, ty)?;
    for i in 1..4 {
        form.src(i, ty)?;
    }
    let mask = mask(ty.bits());
    form.map(
        Integer,
        2,
        lift3(move |a, b, c| {
            let far = (wide(a, ty) - wide(b, ty)).unsigned_abs() as u64;
            c.wrapping_add(far) & mask
        }),
    );
    Ok(())
}

fn count(form: &mut Form<'_, '_>) -> Resolved<()> {
    let opcode = form.opcode();
    let amount = opcode == Opcode::Bfind && form.flag("shiftamt");
    let ty = form.ty(if opcode == Opcode::Bfind { LONG } else { BITS })?;
    form.end(2, 2)?;
    form.dst(0, U32)?;
    form.src(1, ty)?;
    let bits = ty.bits();
    form.map(
        Integer,
        1,
        match opcode {
            Opcode::Popc => lift1(|a| u64::from(a.count_ones())),
            Opcode::Clz => lift1(move |a| u64::from(a.leading_zeros() - (64 - bits))),
            _ => lift1(move |a| {
                let negative = ty.is_signed() && signed(a, bits) < 0;
                let value = if negative { !a & mask(bits) } else { a };
                match value.checked_ilog2() {
                    None => mask(32),
                    Some(top) if amount => u64::from(bits - 1 - top),
                    Some(top) => u64::from(top),
                }
            }),
        },
    );
    Ok(())
}

fn invert_or_reverse(form: &mut Form<'_, '_>) -> Resolved<()> {
    let reverse = form.opcode() == Opcode::Brev;
    let ty = form.ty(if reverse { BITS } else { &[B16, B32, B64] })?;
    form.end(2, 2)?;
    form.dst(0, ty)?;
    form.src(1, ty)?;
    let bits = ty.bits();
    let map =
        if reverse { lift1(move |a| a.reverse_bits() >> (64 - bits)) } else { lift1(|a| u64::from(a == 0)) };
    form.map(Integer, 1, map);
    Ok(())
}

fn field(form: &mut Form<'_, '_>) -> Resolved<()> {
    if form.opcode() == Opcode::Bfi {
        let ty = form.ty(BITS)?;
        form.end(5, 5)?;
        form.dst(0, ty)?;
        form.src(1, ty)?;
        form.src(2, ty)?;
        form.src(3, U32)?;
        form.src(4, U32)?;
        let bits = ty.bits();
        form.map(Integer, 1, crate::lanes::lift(move |ins, outs| outs[0] = insert(ins, bits)));
        return Ok(());
    }
    let ty = form.ty(LONG)?;
    form.end(4, 4)?;
    form.dst(0, ty)?;
    form.src(1, ty)?;
    form.src(2, U32)?;
    form.src(3, U32)?;
    form.map(Integer, 1, lift3(move |a, from, length| extract(a, from, length, ty)));
    Ok(())
}

/// `bfi`: `ins[3]` bits of `ins[0]` into `ins[1]` at `ins[2]`.
fn insert(ins: &[u64], bits: u32) -> u64 {
    let (from, length) = ((ins[2] & 0xff) as u32, (ins[3] & 0xff) as u32);
    let taken = if from >= bits { 0 } else { mask(length.min(bits - from)) << from };
    let moved = if from >= bits { 0 } else { ins[0] << from };
    (ins[1] & !taken) | (moved & taken)
}

/// `bfe`: the bits from one on; above them the sign, of a type that has one.
fn extract(a: u64, from: u64, length: u64, ty: Type) -> u64 {
    let bits = ty.bits();
    let (from, length) = ((from & 0xff) as u32, (length & 0xff) as u32);
    if length == 0 {
        return 0;
    }
    let sign_at = (from + length - 1).min(bits - 1);
    let negative = ty.is_signed() && a >> sign_at & 1 == 1;
    let kept = if from >= bits { 0 } else { length.min(bits - from) };
    let value = if kept == 0 { 0 } else { (a >> from) & mask(kept) };
    (if negative { value | !mask(kept) } else { value }) & mask(bits)
}

/// `dp4a` and `dp2a`: products of bytes, summed.
fn dot(form: &mut Form<'_, '_>) -> Resolved<()> {
    let pairs = form.opcode() == Opcode::Dp2a;
    let upper = pairs && form.need("which bytes", &[("lo", false), ("hi", true)])?;
    let types = [form.ty(&[U32, S32])?, form.ty(&[U32, S32])?];
    form.end(4, 4)?;
    let sum = if types.contains(&S32) { S32 } else { U32 };
    form.dst(0, sum)?;
    form.src(1, types[0])?;
    form.src(2, types[1])?;
    form.src(3, sum)?;
    let part = |value: u64, i: u32, bits: u32, ty: Type| {
        let value = value >> (i * bits) & mask(bits);
        if ty.is_signed() { signed(value, bits) } else { value as i64 }
    };
    form.map(
        Integer,
        if pairs { 4 } else { 8 },
        lift3(move |a, b, c| {
            let (count, bits, first) = if pairs { (2, 16, if upper { 2 } else { 0 }) } else { (4, 8, 0) };
            let products = (0..count).map(|i| part(a, i, bits, types[0]) * part(b, i + first, 8, types[1]));
            c.wrapping_add(products.sum::<i64>() as u64) & mask(32)
        }),
    );
    Ok(())
}
