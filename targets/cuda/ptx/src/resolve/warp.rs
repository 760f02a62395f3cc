//! Operations of a warp or a block together (PTX ISA, sections 9.7.9.6, 9.7.13 and 9.7.15).

use super::form::{Form, Resolved};
use super::logic::predicate;
use crate::code::{Action, Class, Element, Matrix, Reduction, Shuffle, Vote};
use crate::fault::wrong;
use crate::module::Operand;
use crate::opcode::Opcode;
use crate::types::Type::{self, *};

pub(super) fn resolve(form: &mut Form<'_, '_>) -> Resolved<()> {
    match form.opcode() {
        Opcode::Shfl => shuffle(form),
        Opcode::Vote => vote(form),
        Opcode::Redux => reduce(form),
        Opcode::Mma => product(form),
        Opcode::Activemask => {
            form.ty(&[B32])?;
            form.end(1, 1)?;
            form.dst(0, B32)?;
            form.emit(Action::ActiveMask, Class::Warp, 0);
            Ok(())
        }
        _ => barrier(form),
    }
}

const SYNC: [(&str, ()); 1] = [("sync", ())];

fn shuffle(form: &mut Form<'_, '_>) -> Resolved<()> {
    form.need("`.sync`", &SYNC)?;
    let modes =
        [("up", Shuffle::Up), ("down", Shuffle::Down), ("bfly", Shuffle::Butterfly), ("idx", Shuffle::Index)];
    let mode = form.need("a mode", &modes)?;
    form.ty(&[B32])?;
    form.end(5, 5)?;
    if let Operand::Pair(value, valid) = form.operand(0)? {
        form.dst_named(value, B32)?;
        form.dst_predicate(valid)?;
    } else {
        form.dst(0, B32)?;
    }
    for i in 1..5 {
        form.src(i, B32)?;
    }
    form.emit(Action::Shuffle(mode), Class::Warp, 0);
    Ok(())
}

fn vote(form: &mut Form<'_, '_>) -> Resolved<()> {
    form.need("`.sync`", &SYNC)?;
    let votes = [("all", Vote::All), ("any", Vote::Any), ("uni", Vote::Uniform), ("ballot", Vote::Ballot)];
    let vote = form.need("a mode", &votes)?;
    let ty = form.ty(if vote == Vote::Ballot { &[B32] } else { &[Pred] })?;
    form.end(3, 3)?;
    form.dst(0, ty)?;
    let negated = predicate(form, 1)?;
    form.src(2, B32)?;
    form.emit(Action::Vote { vote, negated }, Class::Warp, 0);
    Ok(())
}

fn reduce(form: &mut Form<'_, '_>) -> Resolved<()> {
    form.need("`.sync`", &SYNC)?;
    let names = ["add", "min", "max", "and", "or", "xor"];
    let name = form.need("an operation", &names.map(|name| (name, name)))?;
    let ty = form.ty(&[U32, S32, B32])?;
    let reduction: Reduction = match (name, ty) {
        ("add", U32 | S32) => |a, b| u64::from((a as u32).wrapping_add(b as u32)),
        ("min", U32) => u64::min,
        ("max", U32) => u64::max,
        ("min", S32) => |a, b| u64::from((a as i32).min(b as i32) as u32),
        ("max", S32) => |a, b| u64::from((a as i32).max(b as i32) as u32),
        ("and", B32) => |a, b| a & b,
        ("or", B32) => |a, b| a | b,
        ("xor", B32) => |a, b| a ^ b,
        _ => {
            return wrong(
                format!("`.{name}` of .{}", ty.name()),
                "sums and extremes are of integers, logic of bits",
            );
        }
    };
    form.end(3, 3)?;
    form.dst(0, ty)?;
    form.src(1, ty)?;
    form.src(2, B32)?;
    form.emit(Action::Reduce(reduction), Class::Warp, 1);
    Ok(())
}

fn barrier(form: &mut Form<'_, '_>) -> Resolved<()> {
    let bar = form.opcode() == Opcode::Bar;
    if bar && form.flag("warp") {
        form.need("`.sync`", &SYNC)?;
        form.end(1, 1)?;
        form.src(0, B32)?;
        form.emit(Action::WarpBarrier, Class::Barrier, 0);
        return Ok(());
    }
    form.flag("cta");
    let arrive = form.need("what is done", &[("sync", false), ("arrive", true)])?;
    let aligned = form.flag("aligned") || bar;
    let least = if arrive { 2 } else { 1 };
    form.end(least, 2)?;
    for i in 0..form.count() {
        form.src(i, U32)?;
    }
    form.emit(Action::Barrier { aligned, arrive }, Class::Barrier, 0);
    Ok(())
}

/// Shapes, elements of the factors, and elements of the sum.
const PRODUCTS: [(&str, u32, &[Element], Type); 7] = [
    ("m16n8k16", 16, &[Element::F16, Element::Bf16], F32),
    ("m16n8k8", 8, &[Element::F16, Element::Bf16, Element::Tf32], F32),
    ("m16n8k4", 4, &[Element::Tf32], F32),
    ("m16n8k32", 32, &[Element::E4m3, Element::E5m2], F32),
    ("m16n8k16", 16, &[Element::E4m3, Element::E5m2], F32),
    ("m16n8k16", 16, &[Element::S8, Element::U8], S32),
    ("m16n8k32", 32, &[Element::S8, Element::U8], S32),
];

const ELEMENTS: [(&str, Element); 7] = [
    ("f16", Element::F16),
    ("bf16", Element::Bf16),
    ("tf32", Element::Tf32),
    ("e4m3", Element::E4m3),
    ("e5m2", Element::E5m2),
    ("s8", Element::S8),
    ("u8", Element::U8),
];

/// `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 d, a, b, c;`
fn product(form: &mut Form<'_, '_>) -> Resolved<()> {
    form.need("`.sync`", &SYNC)?;
    form.need("`.aligned`", &[("aligned", ())])?;
    let shapes = PRODUCTS.map(|(shape, ..)| (shape, shape));
    let shape = form.need("a shape", &shapes)?;
    form.need("`.row`", &[("row", ())])?;
    form.need("`.col`", &[("col", ())])?;
    let sum = form.ty(&[F32, S32])?;
    let a = form.need("elements of a", &ELEMENTS)?;
    let b = form.need("elements of b", &ELEMENTS)?;
    form.ty(&[sum])?;
    form.end(4, 4)?;
    let found = PRODUCTS.iter().find(|(of, _, elements, to)| {
        *of == shape && *to == sum && elements.contains(&a) && elements.contains(&b)
    });
    let mixed = a != b && a.per_register() < 4;
    let Some((_, depth, ..)) = found.filter(|_| !mixed) else {
        return wrong(
            "a product of these shapes and elements",
            "`docs/ptx.md` lists those that are supported",
        );
    };
    form.dsts(0, 4, sum, false)?;
    form.srcs(1, (16 * depth / 32 / a.per_register()) as usize, B32, false)?;
    form.srcs(2, (8 * depth / 32 / b.per_register()) as usize, B32, false)?;
    form.srcs(3, 4, sum, false)?;
    let matrix = Matrix { depth: *depth, a, b };
    form.emit(Action::Matrix(matrix), Class::Matrix, 2 * 16 * 8 * depth / 32);
    Ok(())
}
