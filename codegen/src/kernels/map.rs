//! Element-wise functions of one or two operands, as a table.

use super::{GpuKernel, Kernel, NO_GATE, ROWS, Rule};
use crate::dsl::{F, Kb, P};
use crate::machine::Isa;
use crate::spec::Symbol;
use moec_ir::op::{Activation, Glu};

/// Operation of [`Map`] on `a` and perhaps a second operand `b`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MapOp {
    /// `a + b`; with `broadcast_b`, `b` has one column.
    Add {
        /// Row distance of `b`.
        b_ld: usize,
        /// Whether `b` has a single column.
        broadcast_b: bool,
    },
    /// `a · b`; with `broadcast_b`, `b` has one column.
    Mul {
        /// Row distance of `b`.
        b_ld: usize,
        /// Whether `b` has a single column.
        broadcast_b: bool,
    },
    /// `a · b`, one `b` for every head of `a`.
    MulHeads {
        /// Heads.
        heads: usize,
        /// Row distance of `b`.
        b_ld: usize,
    },
    /// `glu(a, b)`.
    Glu {
        /// Function that joins them.
        glu: Glu,
        /// Row distance of `b`.
        b_ld: usize,
    },
    /// `a · b` with one `b` per channel, f32.
    ScaleCols,
    /// `factor · a`
    Scale {
        /// The factor.
        factor: f32,
    },
    /// `min(max(a, lo), hi)`
    Clamp {
        /// Lower bound.
        lo: f32,
        /// Upper bound.
        hi: f32,
    },
    /// `cap · tanh(a / cap)`
    SoftCap {
        /// Bound that no result reaches.
        cap: f32,
    },
    /// `a · (1 + beta · ln(1 + ⌊(b + offset) / every⌋))` with one position `b`, i32, per row; 0 where it is
    /// negative.
    ScaleByPosition {
        /// Slope over the logarithm.
        beta: f32,
        /// Positions that share a factor.
        every: usize,
        /// Added to the position.
        offset: usize,
    },
    /// `act(a)`
    Act(Activation),
    /// `ln(1 + e^a)`
    Softplus,
}

/// `[a, b?, out]`, element by element; `out` may be an operand of the same row distance.
#[derive(Clone, Debug, PartialEq)]
pub struct Map {
    /// The function.
    pub op: MapOp,
    /// Columns.
    pub cols: usize,
    /// Row distance of `a`.
    pub a_ld: usize,
    /// Row distance of `out`.
    pub out_ld: usize,
}

impl Kernel for Map {
    fn kind(&self) -> &'static str {
        "map"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        match self.op {
            MapOp::Add { b_ld, broadcast_b } => s.word("add").num("b", b_ld).flag("column", broadcast_b),
            MapOp::Mul { b_ld, broadcast_b } => s.word("mul").num("b", b_ld).flag("column", broadcast_b),
            MapOp::MulHeads { heads, b_ld } => s.word("mul_heads").num("h", heads).num("b", b_ld),
            MapOp::SoftCap { cap } => s.word("soft_cap").float("at", cap),
            MapOp::Glu { glu, b_ld } => s.glu(glu).num("b", b_ld),
            MapOp::ScaleCols => s.word("scale_cols"),
            MapOp::Scale { factor } => s.word("scale").float("by", factor),
            MapOp::Clamp { lo, hi } => s.word("clamp").float("lo", lo).float("hi", hi),
            MapOp::ScaleByPosition { beta, every, offset } => {
                s.word("by_position").float("beta", beta).num("every", every).num("from", offset)
            }
            MapOp::Act(act) => s.word("act").word(act.name()),
            MapOp::Softplus => s.word("softplus"),
        };
        s.num("c", self.cols).num("a", self.a_ld).num("o", self.out_ld);
    }

    fn args(&self) -> usize {
        match second(self.op) {
            Second::None => 2,
            _ => 3,
        }
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        let &Self { op, cols, a_ld, out_ld } = self;
        let whole = match op {
            // Positions are 32 bits, and so is their sum with the offset.
            MapOp::ScaleByPosition { every, offset, .. } => (1..1 << 31).contains(&every) && offset < 1 << 31,
            MapOp::MulHeads { heads, .. } => heads > 0 && cols.is_multiple_of(heads.max(1)),
            _ => true,
        };
        let joins = !matches!(op, MapOp::Glu { glu, .. } if !glu.is_gated());
        vec![
            (a_ld >= cols && out_ld >= cols, "rows overlap"),
            (whole, "heads of unequal width, or positions out of range"),
            (joins, NO_GATE),
        ]
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { op, cols, a_ld, out_ld } = self;
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
                    k.columns(each, |c, span| {
                        out.words(c).store_vec(a.words(c).load_vec(span) * factor, span);
                    });
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
}

/// Source of the second operand of a [`MapOp`].
enum Second {
    /// No second operand.
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
