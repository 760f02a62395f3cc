//! Element-wise functions of one or two operands, as a table.

use crate::dsl::{F, Kb, P};
use crate::spec::{KernelSpec, MapOp, ROWS};

/// Where the second operand of a [`MapOp`] comes from.
enum Second {
    /// There is none.
    None,
    /// A row of the same width.
    Row(usize),
    /// One number per row.
    Column(usize),
    /// One number per head of a row: the heads, and the row distance.
    Heads(usize, usize),
    /// One number per channel.
    Channels,
    /// A factor by the position of a row: [`by_position`].
    Position(f32, usize, usize),
}

/// The factor of [`MapOp::ScaleByPosition`] for the row whose position is at `pos`.
pub(crate) fn by_position<'k>(
    k: &'k Kb<'k>,
    pos: P<'k>,
    (beta, every, offset): (f32, usize, usize),
) -> F<'k> {
    let steps = (pos.load_int().max(k.i(0)) + offset).div(k.i(every as i64)).narrow().to_float();
    (steps + 1.0).ln_above_one().fma(k.f(beta), k.f(1.0))
}

fn second(op: MapOp) -> Second {
    match op {
        MapOp::Add { b_ld, broadcast_b } | MapOp::Mul { b_ld, broadcast_b } => {
            if broadcast_b {
                Second::Column(b_ld)
            } else {
                Second::Row(b_ld)
            }
        }
        MapOp::MulHeads { heads, b_ld } => Second::Heads(heads, b_ld),
        MapOp::Glu { b_ld, .. } => Second::Row(b_ld),
        MapOp::ScaleCols => Second::Channels,
        MapOp::ScaleByPosition { beta, every, offset } => Second::Position(beta, every, offset),
        MapOp::Scale { .. }
        | MapOp::SoftCap { .. }
        | MapOp::Clamp { .. }
        | MapOp::Act(_)
        | MapOp::Softplus => Second::None,
    }
}

fn apply<'k>(op: MapOp, a: F<'k>, b: F<'k>) -> F<'k> {
    match op {
        MapOp::Add { .. } => a + b,
        MapOp::Mul { .. } | MapOp::MulHeads { .. } | MapOp::ScaleCols | MapOp::ScaleByPosition { .. } => {
            a * b
        }
        MapOp::Glu { glu, .. } => a.glu(b, glu),
        MapOp::Scale { factor } => a * factor,
        // tanh(x) = 2 sigmoid(2x) − 1
        MapOp::SoftCap { cap } => (a * (2.0 / cap)).sigmoid() * (2.0 * cap) - cap,
        MapOp::Clamp { lo, hi } => a.at_least(lo).at_most(hi),
        MapOp::Act(act) => a.activate(act),
        MapOp::Softplus => a.softplus(),
    }
}

pub(super) fn write<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::Map { op, cols, a_ld, out_ld } = *spec else {
        return k.fail("not a map");
    };
    let second = second(op);
    let a = k.arg(0);
    let (b, out) = match second {
        Second::None => (a, k.arg(1)),
        _ => (k.arg(1), k.arg(2)),
    };
    k.rows(ROWS, |row| {
        let (a, out) = (a.words(row * a_ld), out.words(row * out_ld));
        if let Second::Heads(heads, ld) = second {
            let each = cols / heads.max(1);
            return k.each(0, heads, 1, |head| {
                let (a, out) = (a.words(head * each), out.words(head * each));
                let factor = b.words(row * ld + head).load().splat();
                k.columns(each, |c, span| out.words(c).store_vec(a.words(c).load_vec(span) * factor, span));
            });
        }
        let (b, column) = match second {
            Second::Row(ld) => (b.words(row * ld), None),
            Second::Column(ld) => (b, Some(b.words(row * ld).load().splat())),
            Second::Position(beta, every, offset) => {
                (b, Some(by_position(k, b.words(row), (beta, every, offset)).splat()))
            }
            Second::None | Second::Channels | Second::Heads(..) => (b, None),
        };
        k.columns(cols, |c, span| {
            let x = a.words(c).load_vec(span);
            let y = match second {
                Second::None => x,
                _ => column.unwrap_or_else(|| b.words(c).load_vec(span)),
            };
            out.words(c).store_vec(apply(op, x, y), span);
        });
    });
}
