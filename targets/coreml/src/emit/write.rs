//! Writes a legal term as operators of a function.
//!
//! Each node of the term becomes its operators at the place where it is first read. A channels-first value is
//! `[1, channels, 1, rows]`, or `[1, heads, channels of a head, rows]` where its operator works head by head:
//! the same numbers in the same order. Where the unit does not pad the last axis, it is `[rows, channels, 1,
//! 1]`, as at the border.
#![expect(clippy::cast_possible_truncation, reason = "elements of one tensor")]

use super::ffn::join;
use super::layout::Layout;
use super::rope::Angles;
use super::{EmitError, Limits, Projection, Result, Rope};
use crate::legalise::Legal;
use crate::legalise::language::{Attr, Form, Leaf, Weight};
use crate::program::{FunctionBuilder, OpKind, ValueId, elements};
use egg::Id;
use std::collections::BTreeMap;

/// Writes the operators between queries, keys and values and the heads' results.
pub(super) trait Attend {
    /// Writes it for operands that [`Writer::heads`] gives; its result is `[1, heads, rows, channels of a
    /// head]`.
    fn attend(&self, w: &mut Writer<'_, '_, '_>, operands: &[Id]) -> Result<ValueId>;
}

/// A function into which a legal term is written.
pub(super) struct Writer<'t, 'b, 'w> {
    /// The function.
    pub(super) b: &'b mut FunctionBuilder<'w>,
    legal: &'t Legal,
    layout: Layout,
    /// Largest extent of a tensor.
    extent: usize,
    rows: usize,
    /// The first input of the term, `[rows, channels, 1, 1]`.
    x: ValueId,
    /// Its second input, which rotations read.
    angles: Option<Angles>,
    attention: Option<&'t dyn Attend>,
    /// Channels-first values that are written.
    known: BTreeMap<Id, ValueId>,
}

/// Queries of a latent attention, ahead of their concatenation: a part without position that goes through a
/// matrix per head, and a rotated one.
struct Absorbed {
    x: Id,
    q: Projection,
    name: String,
    heads: usize,
    nope: usize,
    rotated: usize,
    rope: Rope,
    up: Weight,
}

impl<'t, 'b, 'w> Writer<'t, 'b, 'w> {
    /// Begins to write a term for this many rows.
    pub(super) fn new(
        legal: &'t Legal,
        b: &'b mut FunctionBuilder<'w>,
        (layout, limits): (Layout, &Limits),
        (rows, x): (usize, ValueId),
    ) -> Self {
        let extent = limits.rules.extent;
        Self { b, legal, layout, extent, rows, x, angles: None, attention: None, known: BTreeMap::new() }
    }

    /// Adds an attention and its angles.
    pub(super) fn attending(self, attention: &'t dyn Attend, angles: Option<Angles>) -> Self {
        Self { attention: Some(attention), angles, ..self }
    }

    /// Writes every result of the term, as `[rows, channels, 1, 1]`; gives them in order.
    pub(super) fn results(mut self) -> Result<Vec<ValueId>> {
        let legal = self.legal;
        let result = |&root: &Id| match legal.node(root) {
            Some(Form::FromNchw(x)) => {
                let y = self.flat(*x)?;
                self.layout.leave(self.b, y)
            }
            _ => Err(self.fault(root)),
        };
        legal.roots().iter().map(result).collect()
    }

    /// Writes rows as attention takes them: `[1, heads, rows, channels of a head]`.
    pub(super) fn heads(&mut self, id: Id) -> Result<ValueId> {
        let Some(Form::FromNchw(x)) = self.legal.node(id) else { return Err(self.fault(id)) };
        let x = self.nchw(*x)?;
        Ok(self.b.transpose(x, &[0, 1, 3, 2])?)
    }

    fn fault(&self, id: Id) -> EmitError {
        EmitError::Form(self.legal.node(id).map_or_else(String::new, ToString::to_string))
    }

    fn attr(&self, id: Id) -> Result<&'t Attr> {
        self.legal.attr(id).ok_or_else(|| self.fault(id))
    }

    fn weight(&self, id: Id) -> Result<&'t Weight> {
        self.legal.weight(id).ok_or_else(|| self.fault(id))
    }

    fn heads_of(&self, id: Id) -> Result<usize> {
        match self.attr(id)? {
            Attr::Heads(heads) => Ok(*heads),
            _ => Err(self.fault(id)),
        }
    }

    fn shape(&self, x: ValueId) -> Vec<usize> {
        self.b.shape(x).to_vec()
    }

    /// `x` with the channels of each of `heads` heads on an axis of their own.
    fn by_head(&mut self, x: ValueId, heads: usize) -> Result<ValueId> {
        let each = elements(self.b.shape(x)) as usize / (heads * self.rows).max(1);
        Ok(self.b.reshape(x, &[1, heads, each, self.rows])?)
    }

    /// A channels-first value with its channels on one axis.
    fn flat(&mut self, id: Id) -> Result<ValueId> {
        let x = self.nchw(id)?;
        match self.layout {
            Layout::Rows => Ok(x),
            Layout::Columns => {
                let channels = elements(self.b.shape(x)) as usize / self.rows.max(1);
                Ok(self.b.reshape(x, &[1, channels, 1, self.rows])?)
            }
        }
    }

    /// A channels-first value.
    fn nchw(&mut self, id: Id) -> Result<ValueId> {
        if let Some(&known) = self.known.get(&id) {
            return Ok(known);
        }
        let written = self.write(id)?;
        self.known.insert(id, written);
        Ok(written)
    }

    fn write(&mut self, id: Id) -> Result<ValueId> {
        let node = self.legal.node(id).ok_or_else(|| self.fault(id))?;
        Ok(match node {
            Form::ToNchw(rows) => self.enter(*rows)?,
            Form::Conv1x1([x, w]) => {
                let (x, w) = (self.flat(*x)?, self.weight(*w)?);
                self.b.conv(x, &w.raw.conv(&w.name), None)?
            }
            Form::Conv1x1Bias([x, w, bias]) => {
                let (x, w, bias) = (self.flat(*x)?, self.weight(*w)?, self.weight(*bias)?);
                let bias = bias.raw.weight(&bias.name, bias.raw.shape.clone());
                self.b.conv(x, &w.raw.conv(&w.name), Some(&bias))?
            }
            Form::Conv1x1Groups([heads, x, w]) => {
                let (heads, x, w) = (self.heads_of(*heads)?, self.nchw(*x)?, self.weight(*w)?);
                let x = self.by_head(x, heads)?;
                let each = self.shape(x).get(2).copied().unwrap_or(0);
                let parts = (0..heads).map(|h| {
                    let x = self.b.slice(x, 1, h, 1)?;
                    let x = self.b.reshape(x, &[1, each, 1, self.rows])?;
                    Ok(self.b.conv(x, &w.raw.at(h).conv(&format!("{}{h}", w.name)), None)?)
                });
                let parts = parts.collect::<Result<Vec<_>>>()?;
                self.b.concat(&parts, 1)?
            }
            Form::ByHead([heads, x]) => {
                let (heads, x) = (self.heads_of(*heads)?, self.nchw(*x)?);
                self.by_head(x, heads)?
            }
            Form::Norm([attr, x]) => {
                let Attr::Norm(name, norm, groups) = self.attr(*attr)? else { return Err(self.fault(id)) };
                if let Some(groups) = groups {
                    let x = self.nchw(*x)?;
                    let shape = self.shape(x);
                    let x = self.by_head(x, *groups)?;
                    let y = norm.grouped(self.b, x, name)?;
                    self.b.reshape(y, &shape)?
                } else {
                    let x = self.flat(*x)?;
                    norm.whole(self.b, x, name)?
                }
            }
            Form::Clamp([attr, x]) => {
                let Attr::Bound(bound) = self.attr(*attr)? else { return Err(self.fault(id)) };
                let x = self.nchw(*x)?;
                self.b.clip(x, -bound, *bound)?
            }
            Form::Rope([attr, x, angles]) => {
                let Attr::Rope(rope, heads) = self.attr(*attr)? else { return Err(self.fault(id)) };
                self.check_angles(*angles)?;
                let x = self.nchw(*x)?;
                let x = self.by_head(x, *heads)?;
                let angles = self.angles.as_ref().ok_or_else(|| EmitError::Form("angles".into()))?;
                rope.apply(self.b, x, angles)?
            }
            Form::Slice([attr, x]) => {
                let &Attr::Slice { heads, start, len } = self.attr(*attr)? else {
                    return Err(self.fault(id));
                };
                if heads == 1 {
                    let x = self.flat(*x)?;
                    self.b.slice(x, 1, start, len)?
                } else {
                    let x = self.nchw(*x)?;
                    let x = self.by_head(x, heads)?;
                    self.b.slice(x, 2, start, len)?
                }
            }
            Form::Concat([heads, first, second]) => {
                let heads = self.heads_of(*heads)?;
                if let Some(queries) = self.absorbed(*first, *second)? {
                    return self.write_absorbed(&queries);
                }
                let parts = [first, second].map(|part| {
                    let part = self.nchw(*part)?;
                    self.by_head(part, heads)
                });
                let [first, second] = parts;
                self.b.concat(&[first?, second?], 2)?
            }
            Form::Glu([attr, gate, up]) => {
                let Attr::Glu(glu) = self.attr(*attr)? else { return Err(self.fault(id)) };
                let (gate, up) = (self.nchw(*gate)?, self.nchw(*up)?);
                join(self.b, *glu, gate, up)?
            }
            Form::Sigmoid(x) => {
                let x = self.nchw(*x)?;
                self.b.unary(OpKind::Sigmoid, x)?
            }
            Form::Mul([a, b]) => {
                let (a, b) = (self.nchw(*a)?, self.nchw(*b)?);
                self.b.binary(OpKind::Mul, a, b)?
            }
            Form::Linear(_)
            | Form::LinearBias(_)
            | Form::HeadLinear(_)
            | Form::Attention(_)
            | Form::FromNchw(_)
            | Form::Leaf(_) => return Err(self.fault(id)),
        })
    }

    /// Rows become channels-first: those of the border, or what attention gives.
    fn enter(&mut self, rows: Id) -> Result<ValueId> {
        match self.legal.node(rows) {
            Some(Form::Leaf(Leaf::Input(0))) => self.layout.enter(self.b, self.x),
            Some(Form::Attention(of)) => {
                let attention = self.attention.ok_or_else(|| self.fault(rows))?;
                let y = attention.attend(self, of.get(1..).unwrap_or_default())?;
                Ok(self.b.transpose(y, &[0, 1, 3, 2])?)
            }
            _ => Err(self.fault(rows)),
        }
    }

    /// Fails if the angles are not the second input, which is converted to channels-first at the function's
    /// beginning.
    fn check_angles(&self, angles: Id) -> Result<()> {
        let Some(Form::ToNchw(rows)) = self.legal.node(angles) else { return Err(self.fault(angles)) };
        match self.legal.node(*rows) {
            Some(Form::Leaf(Leaf::Input(1))) => Ok(()),
            _ => Err(self.fault(angles)),
        }
    }

    /// Finds queries of a latent attention in the operands of a concatenation.
    fn absorbed(&self, first: Id, second: Id) -> Result<Option<Absorbed>> {
        let node = |id: Id| self.legal.node(id);
        let (Some(Form::Conv1x1Groups([_, plain, up])), Some(Form::Rope([rope, rotary, angles]))) =
            (node(first), node(second))
        else {
            return Ok(None);
        };
        let (Some(Form::Slice([plain, of])), Some(Form::Slice([rotary, also]))) =
            (node(*plain), node(*rotary))
        else {
            return Ok(None);
        };
        let Some(Form::ByHead([heads, q])) = node(*of).filter(|_| of == also) else { return Ok(None) };
        let (x, w, bias) = match node(*q) {
            Some(Form::Conv1x1([x, w])) => (*x, *w, None),
            Some(Form::Conv1x1Bias([x, w, bias])) => (*x, *w, Some(*bias)),
            _ => return Ok(None),
        };
        let (
            Attr::Slice { start: 0, len: nope, .. },
            Attr::Slice { start, len: rotated, .. },
            Attr::Rope(rope, _),
        ) = (self.attr(*plain)?, self.attr(*rotary)?, self.attr(*rope)?)
        else {
            return Ok(None);
        };
        if start != nope {
            return Ok(None);
        }
        self.check_angles(*angles)?;
        let w = self.weight(w)?;
        let bias = bias.map(|bias| self.weight(bias)).transpose()?;
        Ok(Some(Absorbed {
            x,
            q: Projection { weight: w.raw.clone(), bias: bias.map(|bias| bias.raw.clone()) },
            name: w.name.clone(),
            heads: self.heads_of(*heads)?,
            nope: *nope,
            rotated: *rotated,
            rope: *rope,
            up: self.weight(*up)?.clone(),
        }))
    }

    /// Writes the queries, for as many heads at once as the unit's largest extent permits.
    fn write_absorbed(&mut self, queries: &Absorbed) -> Result<ValueId> {
        let Absorbed { x, q, name, heads: all, nope, rotated, rope, up } = queries;
        let (all, rows, dim) = (*all, self.rows, nope + rotated);
        let x = self.flat(*x)?;
        let angles = self.angles.as_ref().ok_or_else(|| EmitError::Form("angles".into()))?;
        let latent = up.raw.shape.get(1).copied().unwrap_or(0);
        let b = &mut *self.b;
        let most = (self.extent / dim).clamp(1, all);
        let mut parts = Vec::new();
        for first in (0..all).step_by(most) {
            let heads = most.min(all - first);
            let cut = |raw: &super::Raw| raw.rows(first * dim, heads * dim);
            let part = Projection { weight: cut(&q.weight), bias: q.bias.as_ref().map(cut) };
            let name = if most == all { name.clone() } else { format!("{name}{first}") };
            let q = part.apply(b, x, &name)?;
            let q = b.reshape(q, &[1, heads, dim, rows])?;
            let rotary = b.slice(q, 2, *nope, *rotated)?;
            let rotary = rope.apply(b, rotary, angles)?;
            let plain = (0..heads).map(|h| {
                let q = b.slice(q, 1, h, 1)?;
                let q = b.slice(q, 2, 0, *nope)?;
                let q = b.reshape(q, &[1, *nope, 1, rows])?;
                let head = first + h;
                let q = b.conv(q, &up.raw.at(head).conv(&format!("{}{head}", up.name)), None)?;
                Ok(b.reshape(q, &[1, 1, latent, rows])?)
            });
            let plain = plain.collect::<Result<Vec<_>>>()?;
            let plain = b.concat(&plain, 1)?;
            parts.push(b.concat(&[plain, rotary], 2)?);
        }
        Ok(b.concat(&parts, 1)?)
    }
}
