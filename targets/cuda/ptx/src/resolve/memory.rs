//! Loads, stores, atomic operations and copies (PTX ISA, sections 9.7.9 and 9.7.13).

use super::form::{Form, Resolved};
use crate::code::{Access, Action, Class, LOCAL_WINDOW, SHARED_WINDOW, Update, WINDOW};
use crate::fault::wrong;
use crate::lanes::{lift1, mask, signed};
use crate::number::{self, BF16, Format, Rounding, add_odd};
use crate::opcode::Opcode;
use crate::types::Space;
use crate::types::Type::{self, *};

/// Types that memory holds.
const STORED: [Type; 15] = [B8, B16, B32, B64, U8, U16, U32, U64, S8, S16, S32, S64, F32, F64, F16];

/// Words for the visibility of a change, or for caches. An interpreter has one order and no cache.
const ORDERS: [(&str, ()); 18] = [
    ("weak", ()),
    ("volatile", ()),
    ("relaxed", ()),
    ("acquire", ()),
    ("release", ()),
    ("acq_rel", ()),
    ("mmio", ()),
    ("cta", ()),
    ("cluster", ()),
    ("gpu", ()),
    ("sys", ()),
    ("ca", ()),
    ("cg", ()),
    ("cs", ()),
    ("cv", ()),
    ("lu", ()),
    ("wb", ()),
    ("wt", ()),
];

/// `.global`, `.shared::cta` and so on; none is any.
fn space(form: &mut Form<'_, '_>) -> Option<Space> {
    let word = form.peek()?;
    let found = Space::named(word.split("::").next()?)?;
    let rest = word.split_once("::").map(|(_, rest)| rest);
    if !matches!(rest, None | Some("cta" | "entry" | "func")) {
        return None;
    }
    form.advance();
    Some(found)
}

/// `.L1::no_allocate` and the like.
fn hints(form: &mut Form<'_, '_>) {
    while form.peek().is_some_and(|word| word.starts_with("L1::") || word.starts_with("L2::")) {
        form.advance();
    }
}

fn class(space: Option<Space>, store: bool) -> Class {
    match (space, store) {
        (Some(Space::Shared), _) => Class::Shared,
        (Some(Space::Local | Space::Param | Space::Const), _) => Class::Local,
        (_, false) => Class::GlobalLoad,
        (_, true) => Class::GlobalStore,
    }
}

pub(super) fn resolve(form: &mut Form<'_, '_>) -> Resolved<()> {
    match form.opcode() {
        Opcode::Ld | Opcode::Ldu | Opcode::St => move_words(form),
        Opcode::Atom | Opcode::Red => atomic(form),
        Opcode::Cp => copy(form),
        Opcode::Ldmatrix => matrices(form),
        Opcode::Cvta => to_and_from_generic(form),
        Opcode::Isspacep => which_space(form),
        _ => {
            space(form);
            form.need("a cache", &[("L1", ()), ("L2", ())])?;
            form.end(1, 1)?;
            form.address(0, None)?;
            form.emit(Action::Nothing, Class::Move, 0);
            Ok(())
        }
    }
}

fn move_words(form: &mut Form<'_, '_>) -> Resolved<()> {
    let store = form.opcode() == Opcode::St;
    while form.one_of(&ORDERS).is_some() {}
    let written = space(form);
    while form.one_of(&ORDERS).is_some() {}
    let constant = form.flag("nc");
    hints(form);
    let count = form.one_of(&[("v2", 2), ("v4", 4), ("v8", 8)]).unwrap_or(1);
    let ty = form.ty(&STORED)?;
    form.end(2, 2)?;
    if constant && (store || written != Some(Space::Global)) {
        return wrong("`.nc` without a load of global memory", "`ld.global.nc`");
    }
    if store && matches!(written, Some(Space::Const)) {
        return wrong("a store to constants", "constants are read only");
    }
    let (at, from) = if store { (0, 1) } else { (1, 0) };
    let (space, offset) = form.address(at, written)?;
    if store && space == Some(Space::Param) {
        return wrong("a store to a parameter of the kernel", "parameters of a kernel are read only");
    }
    let access = Access { space, offset, bytes: ty.bytes(), count: count as u32 };
    let class = class(space, store);
    if store {
        form.srcs(from, count, ty, true)?;
        form.emit(Action::Store(access), class, 0);
    } else {
        let to = form.dsts(from, count, ty, true)?;
        let sign = (ty.is_signed() && to.bits() > ty.bits()).then_some((ty.bits(), to.bits()));
        form.emit(Action::Load(access, sign), class, 0);
    }
    Ok(())
}

/// The sum of two numbers of 16 bits.
fn half_sum(format: Format, a: u64, b: u64) -> u64 {
    format.round(add_odd(format.value(a & 0xffff), format.value(b & 0xffff)), Rounding::Nearest)
}

/// Function of an atomic operation on a word.
fn update(name: &str, ty: Type) -> Option<Update> {
    let (bits, m) = (ty.bits(), mask(ty.bits()));
    let of = move |value: u64| {
        if ty.is_signed() { i128::from(signed(value, bits)) } else { i128::from(value & m) }
    };
    let float = ty.is_float();
    Some(match (name, ty) {
        ("add", F32) => Box::new(|old, b, _| {
            super::float::of_single(f32::from_bits(old as u32) + f32::from_bits(b as u32), false)
        }),
        ("add", F64) => Box::new(|old, b, _| (f64::from_bits(old) + f64::from_bits(b)).to_bits()),
        ("add", F16) => Box::new(|old, b, _| half_sum(number::F16, old, b)),
        ("add", Bf16) => Box::new(|old, b, _| half_sum(BF16, old, b)),
        ("add", F16x2) => Box::new(|old, b, _| {
            half_sum(number::F16, old, b) | half_sum(number::F16, old >> 16, b >> 16) << 16
        }),
        ("add", Bf16x2) => {
            Box::new(|old, b, _| half_sum(BF16, old, b) | half_sum(BF16, old >> 16, b >> 16) << 16)
        }
        _ if float => return None,
        ("add", U32 | S32 | U64) => Box::new(move |old, b, _| old.wrapping_add(b) & m),
        ("min", U32 | S32 | U64 | S64) => Box::new(move |old, b, _| if of(b) < of(old) { b } else { old }),
        ("max", U32 | S32 | U64 | S64) => Box::new(move |old, b, _| if of(b) > of(old) { b } else { old }),
        ("inc", U32) => Box::new(|old, b, _| if old >= b { 0 } else { old + 1 }),
        ("dec", U32) => Box::new(|old, b, _| if old == 0 || old > b { b } else { old - 1 }),
        ("and", B32 | B64) => Box::new(|old, b, _| old & b),
        ("or", B32 | B64) => Box::new(|old, b, _| old | b),
        ("xor", B32 | B64) => Box::new(|old, b, _| old ^ b),
        ("exch", B32 | B64) => Box::new(|_, b, _| b),
        ("cas", B16 | B32 | B64) => Box::new(|old, compare, new| if old == compare { new } else { old }),
        _ => return None,
    })
}

fn atomic(form: &mut Form<'_, '_>) -> Resolved<()> {
    let reduces = form.opcode() == Opcode::Red;
    while form.one_of(&ORDERS).is_some() {}
    let written = space(form);
    if !matches!(written, None | Some(Space::Global | Space::Shared)) {
        return wrong(
            "an atomic operation on memory that is not shared",
            "`.global` and `.shared` are shared",
        );
    }
    while form.one_of(&ORDERS).is_some() {}
    let names = ["add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"];
    let name = form.need("an operation", &names.map(|name| (name, name)))?;
    form.flag("noftz");
    let ty = form.ty(&[B16, B32, B64, U32, S32, U64, S64, F16, Bf16, F32, F64, F16x2, Bf16x2])?;
    let Some(update) = update(name, ty) else {
        return wrong(format!("`.{name}` of .{}", ty.name()), "the ISA has no such operation");
    };
    let first = usize::from(!reduces);
    let operands = if name == "cas" { 2 } else { 1 };
    form.end(first + 1 + operands, first + 1 + operands)?;
    if !reduces {
        form.dst(0, ty)?;
    }
    let (space, offset) = form.address(first, written)?;
    for i in 0..operands {
        form.src(first + 1 + i, ty)?;
    }
    let access = Access { space, offset, bytes: ty.bytes(), count: 1 };
    form.emit(Action::Atomic(access, update), Class::Atomic, 1);
    Ok(())
}

/// `cp.async`
fn copy(form: &mut Form<'_, '_>) -> Resolved<()> {
    form.need("`.async`", &[("async", ())])?;
    if form.flag("commit_group") {
        form.end(0, 0)?;
        form.emit(Action::CopyCommit, Class::Barrier, 0);
        return Ok(());
    }
    if form.flag("wait_all") {
        form.end(0, 0)?;
        form.emit(Action::CopyWait(None), Class::Barrier, 0);
        return Ok(());
    }
    if form.flag("wait_group") {
        form.end(1, 1)?;
        let groups = form.immediate(0, 1 << 16)?;
        form.emit(Action::CopyWait(Some(groups)), Class::Barrier, 0);
        return Ok(());
    }
    let whole = form.need("a cache", &[("ca", false), ("cg", true)])?;
    if space(form) != Some(Space::Shared) || space(form) != Some(Space::Global) {
        return wrong("a copy between other spaces", "`cp.async.ca.shared.global`");
    }
    hints(form);
    form.end(3, 4)?;
    let (_, to) = form.address(0, Some(Space::Shared))?;
    let (_, from) = form.address(1, Some(Space::Global))?;
    let bytes = form.immediate(2, 17)?;
    if !(if whole { &[16][..] } else { &[4, 8, 16] }).contains(&bytes) {
        return wrong(format!("a copy of {bytes} bytes"), "`.ca` copies 4, 8 or 16 bytes, `.cg` 16");
    }
    if form.count() == 4 {
        form.src(3, U32)?;
    }
    form.emit(Action::Copy { to, from, bytes }, Class::GlobalLoad, 0);
    Ok(())
}

/// `ldmatrix.sync.aligned.m8n8.x4.shared.b16`
fn matrices(form: &mut Form<'_, '_>) -> Resolved<()> {
    for (what, name) in [("`.sync`", "sync"), ("`.aligned`", "aligned"), ("`.m8n8`", "m8n8")] {
        form.need(what, &[(name, ())])?;
    }
    let count = form.need("how many", &[("x1", 1), ("x2", 2), ("x4", 4)])?;
    let transposed = form.flag("trans");
    let written = space(form);
    form.ty(&[B16])?;
    form.end(2, 2)?;
    form.dsts(0, count, B32, false)?;
    let (space, offset) = form.address(1, written)?;
    if !matches!(space, Some(Space::Shared)) {
        return wrong("matrices that are not in shared memory", "`ldmatrix….shared.b16`");
    }
    form.emit(Action::LoadMatrix { offset, count: count as u32, transposed }, Class::Shared, 0);
    Ok(())
}

fn window(space: Space) -> Resolved<u64> {
    match space {
        Space::Global | Space::Const => Ok(0),
        Space::Shared => Ok(SHARED_WINDOW),
        Space::Local => Ok(LOCAL_WINDOW),
        Space::Param => wrong("generic addresses of parameters", "parameters are loaded by `ld.param`"),
    }
}

fn to_and_from_generic(form: &mut Form<'_, '_>) -> Resolved<()> {
    let to = form.flag("to");
    let Some(space) = space(form) else {
        return form.missing("a space", "`cvta.to.global.u64`, `cvta.shared.u64`");
    };
    let ty = form.ty(&[U64])?;
    form.end(2, 2)?;
    form.dst(0, ty)?;
    match form.variable(1)? {
        Some((_, of)) if of != space => {
            return wrong(format!("the variable is in {}", of.name()), "name that space");
        }
        Some((reg, _)) => form.ins.push(reg),
        None => form.src(1, ty)?,
    }
    let base = window(space)?;
    form.map(Class::Move, 0, lift1(move |a| if to { a.wrapping_sub(base) } else { a.wrapping_add(base) }));
    Ok(())
}

fn which_space(form: &mut Form<'_, '_>) -> Resolved<()> {
    let Some(space) = space(form) else { return form.missing("a space", "`isspacep.shared`") };
    form.end(2, 2)?;
    form.dst(0, Pred)?;
    form.src(1, U64)?;
    let base = window(space)?;
    form.map(
        Class::Integer,
        1,
        lift1(move |a| {
            u64::from(match space {
                Space::Global | Space::Const => a >= LOCAL_WINDOW + WINDOW,
                _ => (base..base + WINDOW).contains(&a),
            })
        }),
    );
    Ok(())
}
