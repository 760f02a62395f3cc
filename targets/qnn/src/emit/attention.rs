//! Attention over a chunk of rows with grouped queries, and a cache of keys and values that the caller keeps.
//!
//! A graph on the HTP has no state. Its inputs include the cache from before the chunk, and its outputs the
//! chunk's own keys and values; the executor of the graph writes them to their places
//! ([`moec_qnn_unit::attention`]). Inside, the chunk's keys follow those of the cache, so a mask of `[T, C +
//! T]` says which keys a row sees.
//!
//! A mask is usually added to the scores, and must reach far below them: codes of 16 bits over both could no
//! longer distinguish scores. Here the minimum of score and mask is taken. Where a row sees a key, the mask
//! is at least as large as any score. Elsewhere it is just low enough for a share of the softmax of 0, and
//! codes reach no further than that ([`fitted`]).

use super::projection::Projection;
use crate::net::{Network, NetworkBuilder, NetworkError, Op, Quant, Tensor, TensorId};
use crate::quant::{Range, Ranges};
use moec_ir::RopeStyle;

type Result<T> = std::result::Result<T, NetworkError>;

/// A rotation of channels by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope {
    /// First rotated channel in a head.
    pub offset: usize,
    /// Rotated channels `R`: cosines and sines are `[T, R/2]` each.
    pub channels: usize,
    /// Pairing of channels.
    pub style: RopeStyle,
}

/// Norm and rotation of queries or keys.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rotation {
    /// Weight `[dim]` of a norm over each head, or `[heads · dim]` of one over all heads; and the number that
    /// is added to the mean square.
    pub norm: Option<(Vec<f32>, f32)>,
    /// The rotation.
    pub rope: Option<Rope>,
}

/// Distance of the mask below every score where a row does not see: `exp(−16)` is 1.1e-7.
const BELOW: f32 = 16.0;
/// The mask in f32, where a row sees and where not: beyond all scores.
const VISIBLE: f32 = 1e4;

/// Values of a network's mask where a row does not see a key, and where it does.
pub fn mask(network: &Network) -> [f32; 2] {
    let mask = network.inputs.iter().map(|id| network.tensor(*id)).find(|t| t.name == "mask");
    match mask.map(|t| (&t.quant, t.ty.codes())) {
        // The ends of what codes reach.
        Some((Quant::Tensor(scale), (least, most))) => [least, most].map(|code| scale.real(code) as f32),
        _ => [-VISIBLE, VISIBLE],
    }
}

/// The same ranges with those of the mask, of shares and of angles as they must be: what is known needs no
/// headroom. `angles` is the largest cosine or sine.
pub fn fitted(mut ranges: Ranges, angles: f32) -> Ranges {
    let of = |ranges: &Ranges, name: &str| ranges.get(name).copied().unwrap_or_default();
    let scores = of(&ranges, "scores").and(of(&ranges, "scores.rows"));
    let masked = Range { least: scores.least - BELOW, most: scores.most };
    let rotated = Range { least: -angles, most: angles };
    let share = Range { least: 0.0, most: 1.0 };
    let known = [
        (masked, &["mask", "scores.masked"][..]),
        (share, &["shares", "shares.groups"]),
        (rotated, &["cos", "cos.row", "sin", "sin.row"]),
    ];
    for (range, names) in known {
        for name in names {
            if let Some(seen) = ranges.get_mut(*name) {
                *seen = range;
            }
        }
    }
    ranges
}

/// Attention of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Channels `H` of a row.
    pub hidden: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; divides `heads`.
    pub kv_heads: usize,
    /// Channels of a head of queries and keys.
    pub qk_dim: usize,
    /// Channels of a head of values.
    pub v_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Positions `C` of the cache.
    pub context: usize,
    /// Queries, keys, values, and what heads give.
    pub q: Projection,
    /// `[kv_heads · qk_dim, H]`
    pub k: Projection,
    /// `[kv_heads · v_dim, H]`
    pub v: Projection,
    /// `[H, heads · v_dim]`
    pub o: Projection,
    /// Rotation after the projection of queries.
    pub of_q: Rotation,
    /// Rotation after the projection of keys.
    pub of_k: Rotation,
    /// Queries, keys and values are clipped to plus or minus that.
    pub clip: Option<f32>,
}

/// Cosines and sines `[T, 1, R/2]`.
type Angles = [TensorId; 2];

impl Attention {
    /// The graph of a chunk: `x[T, H], keys[kv, C, qk], values[kv, C, v], mask[T, C + T], cos[T, R/2]?,
    /// sin[T, R/2]? → y[T, H], new_keys[kv, T, qk], new_values[kv, T, v]`.
    ///
    /// # Errors
    /// Weights of other shapes, or heads that do not divide.
    pub fn graph(&self, name: &str, rows: usize) -> Result<Network> {
        let (kv, dim) = (self.kv_heads, self.v_dim);
        if kv == 0 || !self.heads.is_multiple_of(kv) {
            return Err(NetworkError::whole(name, format!("{} heads share {kv} of keys", self.heads)));
        }
        let group = self.heads / kv;
        let seen = self.context + rows;
        let mut b = NetworkBuilder::new(name);
        let x = b.input("x", &[rows, self.hidden])?;
        let keys = b.input("keys", &[kv, self.context, self.qk_dim])?;
        let values = b.input("values", &[kv, self.context, dim])?;
        let mask = b.input("mask", &[rows, seen])?;
        let angles = self.of_q.rope.or(self.of_k.rope).map(|rope| {
            let of = |b: &mut NetworkBuilder, what: &str| -> Result<TensorId> {
                let flat = b.input(what, &[rows, rope.channels / 2])?;
                b.op(&format!("{what}.row"), Op::Reshape { shape: vec![rows, 1, rope.channels / 2] }, &[flat])
            };
            Ok::<Angles, NetworkError>([of(&mut b, "cos")?, of(&mut b, "sin")?])
        });
        let angles = angles.transpose()?;

        let q = self.q.apply(&mut b, "q", x)?;
        let q = self.of_q.apply(&mut b, "q", q, [rows, self.heads, self.qk_dim], (angles, self.clip))?;
        let factor = b.number("scale", self.scale)?;
        let q = b.op("q.scaled", Op::Multiply, &[q, factor])?;
        let q = b.op("q.heads", Op::Transpose { perm: vec![1, 0, 2] }, &[q])?;
        let q = b.op("q.groups", Op::Reshape { shape: vec![kv, group * rows, self.qk_dim] }, &[q])?;

        let k = self.k.apply(&mut b, "k", x)?;
        let k = self.of_k.apply(&mut b, "k", k, [rows, kv, self.qk_dim], (angles, self.clip))?;
        let k = b.op("new_keys", Op::Transpose { perm: vec![1, 0, 2] }, &[k])?;
        let v = self.v.apply(&mut b, "v", x)?;
        let v = Rotation::default().apply(&mut b, "v", v, [rows, kv, dim], (None, self.clip))?;
        let v = b.op("new_values", Op::Transpose { perm: vec![1, 0, 2] }, &[v])?;
        let all_k = b.op("k.all", Op::Concat { axis: 1 }, &[keys, k])?;
        let all_v = b.op("v.all", Op::Concat { axis: 1 }, &[values, v])?;

        let transposed = b.op("k.columns", Op::Transpose { perm: vec![0, 2, 1] }, &[all_k])?;
        let scores = b.op("scores", Op::MatMul, &[q, transposed])?;
        let scores = b.op("scores.rows", Op::Reshape { shape: vec![kv, group, rows, seen] }, &[scores])?;
        let scores = b.op("scores.masked", Op::Minimum, &[scores, mask])?;
        let shares = b.op("shares", Op::Softmax, &[scores])?;
        let shares = b.op("shares.groups", Op::Reshape { shape: vec![kv, group * rows, seen] }, &[shares])?;
        let mixed = b.op("mixed", Op::MatMul, &[shares, all_v])?;
        let mixed = b.op("mixed.heads", Op::Reshape { shape: vec![self.heads, rows, dim] }, &[mixed])?;
        let mixed = b.op("mixed.rows", Op::Transpose { perm: vec![1, 0, 2] }, &[mixed])?;
        let mixed = b.op("mixed.flat", Op::Reshape { shape: vec![rows, self.heads * dim] }, &[mixed])?;
        let y = self.o.apply(&mut b, "y", mixed)?;
        b.finish(&[y, k, v])
    }
}

impl Rotation {
    /// From `[T, heads · dim]` to `[T, heads, dim]`, normed and rotated.
    fn apply(
        &self,
        b: &mut NetworkBuilder,
        name: &str,
        x: TensorId,
        [rows, heads, dim]: [usize; 3],
        (angles, clip): (Option<Angles>, Option<f32>),
    ) -> Result<TensorId> {
        let at = |what: &str| format!("{name}.{what}");
        let split = Op::Reshape { shape: vec![rows, heads, dim] };
        let mut x = match &self.norm {
            Some((gain, eps)) => {
                let tensor = Tensor::floats(at("gain"), [gain.len()], gain);
                let (norm, gain) = (Op::RmsNorm { eps: *eps }, b.constant(tensor)?);
                if b.shape(gain) == [dim] {
                    let x = b.op(&at("split"), split, &[x])?;
                    b.op(&at("normed"), norm, &[x, gain])?
                } else {
                    let x = b.op(&at("normed"), norm, &[x, gain])?;
                    b.op(&at("split"), split, &[x])?
                }
            }
            None => b.op(&at("split"), split, &[x])?,
        };
        if let Some(limit) = clip {
            let (most, least) = (b.number("limit", limit)?, b.number("floor", -limit)?);
            x = b.op(&at("low"), Op::Minimum, &[x, most])?;
            x = b.op(&at("clipped"), Op::Maximum, &[x, least])?;
        }
        if let (Some(rope), Some(angles)) = (self.rope, angles) {
            x = rope.apply(b, name, x, angles)?;
        }
        Ok(x)
    }
}

impl Rope {
    /// Turns pairs `(a, b)` of channels of `[T, heads, dim]` to `(a cos − b sin, b cos + a sin)`.
    fn apply(self, b: &mut NetworkBuilder, name: &str, x: TensorId, [cos, sin]: Angles) -> Result<TensorId> {
        let at = |what: &str| format!("{name}.{what}");
        let (half, shape) = (self.channels / 2, b.shape(x).to_vec());
        let [rows, heads, dim] = *shape else { return Ok(x) };
        let cut = |b: &mut NetworkBuilder, what: &str, from: usize, to: usize, step: usize| {
            let ranges = vec![[0, rows, 1], [0, heads, 1], [from, to, step]];
            b.op(&at(what), Op::StridedSlice { ranges }, &[x])
        };
        let (start, end) = (self.offset, self.offset + self.channels);
        let (first, second) = match self.style {
            RopeStyle::Half => {
                (cut(b, "first", start, start + half, 1)?, cut(b, "second", start + half, end, 1)?)
            }
            RopeStyle::Interleaved => {
                (cut(b, "first", start, end - 1, 2)?, cut(b, "second", start + 1, end, 2)?)
            }
        };
        let times = |b: &mut NetworkBuilder, what: &str, x, y| b.op(&at(what), Op::Multiply, &[x, y]);
        let (fc, ss) = (times(b, "first_cos", first, cos)?, times(b, "second_sin", second, sin)?);
        let (sc, fs) = (times(b, "second_cos", second, cos)?, times(b, "first_sin", first, sin)?);
        let rotated = [
            b.op(&at("turned_first"), Op::Subtract, &[fc, ss])?,
            b.op(&at("turned_second"), Op::Add, &[sc, fs])?,
        ];
        let rotated = match self.style {
            RopeStyle::Half => b.op(&at("turned"), Op::Concat { axis: 2 }, &rotated)?,
            RopeStyle::Interleaved => {
                let mut pairs = Vec::new();
                for (i, half_id) in rotated.into_iter().enumerate() {
                    let shape = vec![rows, heads, half, 1];
                    pairs.push(b.op(&at(&format!("pair{i}")), Op::Reshape { shape }, &[half_id])?);
                }
                let pairs = b.op(&at("pairs"), Op::Concat { axis: 3 }, &pairs)?;
                b.op(&at("turned"), Op::Reshape { shape: vec![rows, heads, self.channels] }, &[pairs])?
            }
        };
        let mut parts = Vec::new();
        if start > 0 {
            parts.push(cut(b, "in_front", 0, start, 1)?);
        }
        parts.push(rotated);
        if end < dim {
            parts.push(cut(b, "behind", end, dim, 1)?);
        }
        if parts.len() == 1 { Ok(rotated) } else { b.op(&at("whole"), Op::Concat { axis: 2 }, &parts) }
    }
}
