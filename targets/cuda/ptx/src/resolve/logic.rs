//! Bits, comparisons, choices and moves (PTX ISA, sections 9.7.5 to 9.7.9).

use super::build::of_bits;
use super::float::single;
use super::form::{Form, Resolved};
use crate::code::{Class, Reg};
use crate::fault::wrong;
use crate::lanes::{lift, lift1, lift2, lift3, mask, signed};
use crate::module::Operand;
use crate::number;
use crate::opcode::Opcode;
use crate::types::Type::{self, *};
use std::cmp::Ordering;

/// `and` to `prmt`.
pub(super) fn bits(form: &mut Form<'_, '_>) -> Resolved<()> {
    match form.opcode() {
        Opcode::And | Opcode::Or | Opcode::Xor => combine(form),
        Opcode::Not => {
            let ty = form.ty(&[Pred, B16, B32, B64])?;
            form.end(2, 2)?;
            form.dst(0, ty)?;
            form.src(1, ty)?;
            let mask = mask(ty.bits());
            form.map(Class::Integer, 1, lift1(move |a| !a & mask));
            Ok(())
        }
        Opcode::Shl | Opcode::Shr => shift(form),
        Opcode::Shf => funnel(form),
        Opcode::Lop3 => {
            form.ty(&[B32])?;
            form.end(5, 5)?;
            form.dst(0, B32)?;
            for i in 1..4 {
                form.src(i, B32)?;
            }
            let table = form.immediate(4, 256)?;
            form.map(
                Class::Integer,
                1,
                lift3(move |a, b, c| {
                    let rows = (0..8).filter(|row| table >> row & 1 == 1);
                    let pick = |value: u64, set: u32| if set == 0 { !value } else { value };
                    rows.fold(0, |out, row| {
                        out | pick(a, row >> 2 & 1) & pick(b, row >> 1 & 1) & pick(c, row & 1)
                    }) & mask(32)
                }),
            );
            Ok(())
        }
        _ => permute(form),
    }
}

fn combine(form: &mut Form<'_, '_>) -> Resolved<()> {
    let opcode = form.opcode();
    let ty = form.ty(&[Pred, B16, B32, B64])?;
    form.end(3, 3)?;
    form.dst(0, ty)?;
    form.src(1, ty)?;
    form.src(2, ty)?;
    form.map(
        Class::Integer,
        1,
        match opcode {
            Opcode::And => lift2(|a, b| a & b),
            Opcode::Or => lift2(|a, b| a | b),
            _ => lift2(|a, b| a ^ b),
        },
    );
    Ok(())
}

fn shift(form: &mut Form<'_, '_>) -> Resolved<()> {
    let left = form.opcode() == Opcode::Shl;
    let all = [B16, B32, B64, U16, U32, U64, S16, S32, S64];
    let ty = form.ty(if left { &all[..3] } else { &all })?;
    form.end(3, 3)?;
    form.dst(0, ty)?;
    form.src(1, ty)?;
    form.src(2, U32)?;
    let bits = ty.bits();
    form.map(
        Class::Integer,
        1,
        match (left, ty.is_signed()) {
            (true, _) => lift2(move |a, by| if by >= u64::from(bits) { 0 } else { a << by & mask(bits) }),
            (false, false) => lift2(move |a, by| if by >= u64::from(bits) { 0 } else { a >> by }),
            (false, true) => {
                lift2(move |a, by| (signed(a, bits) >> by.min(u64::from(bits - 1))) as u64 & mask(bits))
            }
        },
    );
    Ok(())
}

fn funnel(form: &mut Form<'_, '_>) -> Resolved<()> {
    let left = form.need("a direction", &[("l", true), ("r", false)])?;
    let wrap = form.need("what happens past 32", &[("wrap", true), ("clamp", false)])?;
    form.ty(&[B32])?;
    form.end(4, 4)?;
    form.dst(0, B32)?;
    for i in 1..4 {
        form.src(i, B32)?;
    }
    form.map(
        Class::Integer,
        1,
        lift3(move |low, high, by| {
            let by = if wrap { by & 31 } else { by.min(32) };
            let both = high << 32 | low;
            (if left { both << by >> 32 } else { both >> by }) & mask(32)
        }),
    );
    Ok(())
}

/// `prmt`: bytes of two registers by a choice of four.
fn permute(form: &mut Form<'_, '_>) -> Resolved<()> {
    type Select = fn(u64, u64) -> u64;
    form.ty(&[B32])?;
    let mode: Select = form
        .one_of::<Select>(&[
            ("f4e", |s, i| i + (s & 3)),
            ("b4e", |s, i| (8 + (s & 3) - i) & 7),
            ("rc8", |s, _| s & 3),
            ("ecl", |s, i| i.max(s & 3)),
            ("ecr", |s, i| i.min(s & 3)),
            ("rc16", |s, i| (s & 1) * 2 + (i & 1)),
        ])
        .unwrap_or(|s, i| s >> (4 * i) & 15);
    form.end(4, 4)?;
    form.dst(0, B32)?;
    for i in 1..4 {
        form.src(i, B32)?;
    }
    form.map(
        Class::Integer,
        1,
        lift3(move |a, b, choice| {
            let both = b << 32 | a;
            (0..4).fold(0, |out, i| {
                let at = mode(choice, i);
                let byte = both >> (8 * (at & 7)) & 0xff;
                let byte = if at & 8 == 0 { byte } else { (byte >> 7) * 0xff };
                out | byte << (8 * i)
            })
        }),
    );
    Ok(())
}

/// `setp` to `mov`.
pub(super) fn choose(form: &mut Form<'_, '_>) -> Resolved<()> {
    match form.opcode() {
        Opcode::Setp | Opcode::Set => compare(form),
        Opcode::Selp => {
            let ty = form.ty(&[B16, B32, B64, U16, U32, U64, S16, S32, S64, F32, F64])?;
            form.end(4, 4)?;
            form.dst(0, ty)?;
            form.src(1, ty)?;
            form.src(2, ty)?;
            let not = predicate(form, 3)?;
            form.map(Class::Move, 0, lift3(move |a, b, p| if (p == 1) == not { b } else { a }));
            Ok(())
        }
        Opcode::Slct => {
            let ty = form.ty(&[B16, B32, B64, U16, U32, U64, S16, S32, S64, F32, F64])?;
            let by = form.ty(&[S32, F32])?;
            form.end(4, 4)?;
            form.dst(0, ty)?;
            form.src(1, ty)?;
            form.src(2, ty)?;
            form.src(3, by)?;
            form.map(
                Class::Move,
                0,
                lift3(move |a, b, c| {
                    let first = if by == S32 { signed(c, 32) >= 0 } else { single(c, false) >= 0.0 };
                    if first { a } else { b }
                }),
            );
            Ok(())
        }
        _ => mov(form),
    }
}

/// Reads a predicate, and whether it is negated.
pub(super) fn predicate(form: &mut Form<'_, '_>, i: usize) -> Resolved<bool> {
    match form.operand(i)? {
        Operand::Not(name) => form.predicate(name).map(|()| true),
        Operand::Name(name, 0) => form.predicate(name).map(|()| false),
        _ => form.src(i, Pred).map(|()| false),
    }
}

/// Test of two numbers' order; `None` where one is NaN.
type Test = fn(Option<Ordering>) -> bool;

const TESTS: [(&str, Test); 18] = [
    ("eq", |o| o == Some(Ordering::Equal)),
    ("ne", |o| matches!(o, Some(Ordering::Less | Ordering::Greater))),
    ("lt", |o| o == Some(Ordering::Less)),
    ("le", |o| matches!(o, Some(Ordering::Less | Ordering::Equal))),
    ("gt", |o| o == Some(Ordering::Greater)),
    ("ge", |o| matches!(o, Some(Ordering::Greater | Ordering::Equal))),
    ("lo", |o| o == Some(Ordering::Less)),
    ("ls", |o| matches!(o, Some(Ordering::Less | Ordering::Equal))),
    ("hi", |o| o == Some(Ordering::Greater)),
    ("hs", |o| matches!(o, Some(Ordering::Greater | Ordering::Equal))),
    ("equ", |o| o.is_none_or(|o| o == Ordering::Equal)),
    ("neu", |o| o != Some(Ordering::Equal)),
    ("ltu", |o| o.is_none_or(|o| o == Ordering::Less)),
    ("leu", |o| o != Some(Ordering::Greater)),
    ("gtu", |o| o.is_none_or(|o| o == Ordering::Greater)),
    ("geu", |o| o != Some(Ordering::Less)),
    ("num", |o| o.is_some()),
    ("nan", |o| o.is_none()),
];

/// Joins a comparison with a predicate.
type Join = fn(bool, bool) -> bool;

const JOINS: [(&str, Join); 3] = [("and", |a, b| a && b), ("or", |a, b| a || b), ("xor", |a, b| a != b)];

/// Order of numbers of a type.
fn order(ty: Type, flush: bool, a: u64, b: u64) -> Option<Ordering> {
    match ty {
        F32 => single(a, flush).partial_cmp(&single(b, flush)),
        F64 => f64::from_bits(a).partial_cmp(&f64::from_bits(b)),
        F16 | F16x2 => number::F16.value(a).partial_cmp(&number::F16.value(b)),
        Bf16 | Bf16x2 => number::BF16.value(a).partial_cmp(&number::BF16.value(b)),
        _ if ty.is_signed() => Some(signed(a, ty.bits()).cmp(&signed(b, ty.bits()))),
        _ => Some(a.cmp(&b)),
    }
}

const COMPARED: [Type; 15] =
    [B16, B32, B64, U16, U32, U64, S16, S32, S64, F32, F64, F16, Bf16, F16x2, Bf16x2];

fn compare(form: &mut Form<'_, '_>) -> Resolved<()> {
    let set = form.opcode() == Opcode::Set;
    let test = form.need("a comparison", &TESTS)?;
    let join = form.one_of(&JOINS);
    let flush = form.flag("ftz");
    let result = if set { form.ty(&[U32, S32, F32])? } else { Pred };
    let ty = form.ty(if set { &COMPARED[..13] } else { &COMPARED })?;
    let count = if join.is_some() { 4 } else { 3 };
    form.end(count, count)?;
    match form.operand(0)? {
        Operand::Pair(first, second) if !set => {
            form.dst_predicate(first)?;
            form.dst_predicate(second)?;
        }
        _ => {
            form.dst(0, result)?;
        }
    }
    form.src(1, ty)?;
    form.src(2, ty)?;
    let not = if join.is_some() { predicate(form, 3)? } else { false };
    let join = join.unwrap_or(|a, _| a);
    let class = if ty.is_float() { Class::Float } else { Class::Integer };
    let packed = matches!(ty, F16x2 | Bf16x2);
    if packed && form.outs.len() != 2 {
        return wrong("a comparison of two halves has two results", "`setp.lt.f16x2 %p1|%p2, a, b;`");
    }
    let yes = if result == F32 { u64::from(1f32.to_bits()) } else { mask(result.bits()) };
    let two = form.outs.len() == 2;
    let map = match (two, count, packed) {
        (false, 3, _) => lift2(move |a, b| if test(order(ty, flush, a, b)) { yes } else { 0 }),
        _ => lift(move |ins, outs| {
            let third = ins.get(2).is_some_and(|c| (*c == 1) != not);
            if packed {
                for (half, out) in outs.iter_mut().enumerate() {
                    let of = |value: u64| value >> (16 * half) & 0xffff;
                    *out = u64::from(join(test(order(ty, flush, of(ins[0]), of(ins[1]))), third));
                }
                return;
            }
            let found = test(order(ty, flush, ins[0], ins[1]));
            outs[0] = if join(found, third) { yes } else { 0 };
            if let Some(second) = outs.get_mut(1) {
                *second = u64::from(join(!found, third));
            }
        }),
    };
    form.map(class, 1, map);
    Ok(())
}

fn mov(form: &mut Form<'_, '_>) -> Resolved<()> {
    let ty = form.ty(&[Pred, B16, B32, B64, U16, U32, U64, S16, S32, S64, F32, F64])?;
    form.end(2, 2)?;
    match (form.operand(0)?, form.operand(1)?) {
        (Operand::Vector(to), _) => {
            let part = ty.bits() / to.len().max(1) as u32;
            if ![8, 16, 32].contains(&part) || part * to.len() as u32 != ty.bits() {
                return wrong(format!("{} parts of .{}", to.len(), ty.name()), "parts have 8, 16 or 32 bits");
            }
            form.dsts(0, to.len(), of_bits(part), false)?;
            form.src(1, ty)?;
            form.map(
                Class::Move,
                0,
                lift(move |ins, outs| {
                    for (i, out) in outs.iter_mut().enumerate() {
                        *out = ins[0] >> (part * i as u32) & mask(part);
                    }
                }),
            );
        }
        (_, Operand::Vector(from)) => {
            let part = ty.bits() / from.len().max(1) as u32;
            if ![8, 16, 32].contains(&part) || part * from.len() as u32 != ty.bits() {
                return wrong(
                    format!("{} parts of .{}", from.len(), ty.name()),
                    "parts have 8, 16 or 32 bits",
                );
            }
            form.dst(0, ty)?;
            form.srcs(1, from.len(), of_bits(part), false)?;
            form.map(
                Class::Move,
                0,
                lift(move |ins, outs| {
                    let parts = ins.iter().enumerate();
                    outs[0] = parts.fold(0, |out, (i, value)| out | value << (part * i as u32));
                }),
            );
        }
        _ => {
            form.dst(0, ty)?;
            let address: Option<(Reg, _)> = form.variable(1)?;
            match address {
                Some((reg, _)) => form.ins.push(reg),
                None => form.src(1, ty)?,
            }
            form.map(Class::Move, 0, lift1(|a| a));
        }
    }
    Ok(())
}
