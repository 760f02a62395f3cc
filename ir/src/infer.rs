//! Type inference: the result types of an operator, or why its operands do not fit.

use crate::op::{AttentionDesc, DispatchLayout, GroupScore, Op, Predictor, RouterDesc, WeightFrom};
use crate::types::{DType, Type};
use thiserror::Error;

/// Why a node, weight or entry is ill-typed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{at}: {message}")]
pub struct TypeError {
    /// Mnemonic of the operator, or what else is at fault.
    pub at: String,
    /// What is wrong, with the types found and expected.
    pub message: String,
}

impl TypeError {
    /// An error at a place.
    pub fn new(at: impl Into<String>, message: impl Into<String>) -> Self {
        Self { at: at.into(), message: message.into() }
    }

    /// The same error with an outer place in front: `prefill[8] node 3 (add): …`.
    pub(crate) fn within(self, outer: &str) -> Self {
        Self { at: format!("{outer} ({})", self.at), message: self.message }
    }
}

/// Operands of one node, read with checks.
struct Operands<'a> {
    op: &'static str,
    types: &'a [&'a Type],
}

impl Operands<'_> {
    fn error(&self, message: impl Into<String>) -> TypeError {
        TypeError::new(self.op, message)
    }

    fn require(&self, holds: bool, message: impl FnOnce() -> String) -> Result<(), TypeError> {
        if holds { Ok(()) } else { Err(self.error(message())) }
    }

    fn get(&self, i: usize) -> Result<&Type, TypeError> {
        self.types.get(i).copied().ok_or_else(|| self.error(format!("operand {i} is missing")))
    }

    /// The shape of operand `i`, which must have this element type and `N` axes.
    fn shape<const N: usize>(&self, i: usize, what: &str, dtype: DType) -> Result<[usize; N], TypeError> {
        let ty = self.get(i)?;
        match <[usize; N]>::try_from(ty.shape.as_slice()) {
            Ok(shape) if ty.dtype == dtype => Ok(shape),
            _ => Err(self.error(format!("{what} is {ty}, expected {N} axes of {dtype}"))),
        }
    }

    fn matrix(&self, i: usize, what: &str) -> Result<[usize; 2], TypeError> {
        self.shape(i, what, DType::F32)
    }

    /// Rows of channels in either form.
    fn rows(&self, i: usize, what: &str) -> Result<RowShape, TypeError> {
        let ty = self.get(i)?;
        match (ty.dtype, ty.shape.as_slice()) {
            (DType::F32, &[rows, channels]) => Ok(RowShape { count: rows, channels, nchw: false }),
            (DType::F32, &[rows, channels, 1, 1]) => Ok(RowShape { count: rows, channels, nchw: true }),
            _ => {
                let wanted = "expected 2 axes of f32, or f32[rows, channels, 1, 1]";
                Err(self.error(format!("{what} is {ty}, {wanted}")))
            }
        }
    }

    /// Rows of channels, channels-first.
    fn nchw(&self, i: usize, what: &str) -> Result<RowShape, TypeError> {
        let ty = self.get(i)?;
        let rows = self.rows(i, what).ok().filter(|r| r.nchw);
        rows.ok_or_else(|| self.error(format!("{what} is {ty}, expected f32[rows, channels, 1, 1]")))
    }

    /// Operand `i` must have exactly this type.
    fn exact(&self, i: usize, what: &str, expected: &Type) -> Result<(), TypeError> {
        let ty = self.get(i)?;
        self.require(ty == expected, || format!("{what} is {ty}, expected {expected}"))
    }

    fn mul(&self, a: usize, b: usize) -> Result<usize, TypeError> {
        a.checked_mul(b).ok_or_else(|| self.error(format!("{a} · {b} overflows")))
    }

    /// `total / parts`, which must be whole.
    fn part(&self, total: usize, parts: usize, what: &str) -> Result<usize, TypeError> {
        self.require(parts > 0 && total > 0 && total.is_multiple_of(parts), || {
            format!("{total} channels do not divide into {parts} {what}")
        })?;
        Ok(total / parts)
    }
}

/// Rows of channels: `[rows, channels]`, or channels-first, `[rows, channels, 1, 1]`.
#[derive(Clone, Copy, PartialEq, Eq)]
struct RowShape {
    count: usize,
    channels: usize,
    nchw: bool,
}

impl RowShape {
    /// As many rows in the same form, of so many channels.
    fn of(self, channels: usize) -> Type {
        if self.nchw { f32(&[self.count, channels, 1, 1]) } else { f32(&[self.count, channels]) }
    }

    fn ty(self) -> Type {
        self.of(self.channels)
    }
}

fn f32(shape: &[usize]) -> Type {
    Type::f32(shape)
}

fn i32(shape: &[usize]) -> Type {
    Type::i32(shape)
}

impl Op {
    /// Whether this many operands are right.
    pub fn takes(&self, operands: usize) -> bool {
        let n = self.signature().len();
        operands == n || (matches!(self, Self::Concat { .. }) && operands > n)
    }

    /// Result types for operand types in the order of [`Op::signature`]. Weights count as `f32` of
    /// their shape, states by their declared type.
    ///
    /// # Errors
    /// A wrong number of operands, a wrong element type or shape, or attributes out of range.
    pub fn infer(&self, operands: &[&Type]) -> Result<Vec<Type>, TypeError> {
        let o = Operands { op: self.name(), types: operands };
        o.require(self.takes(operands.len()), || {
            format!("{} operands, expected {}", operands.len(), self.signature().len())
        })?;
        if let Some(empty) = operands.iter().find(|t| t.shape.contains(&0)) {
            return Err(o.error(format!("operand of type {empty} is empty")));
        }
        Ok(vec![match self {
            Self::Embed => {
                let [t] = o.shape(0, "ids", DType::I32)?;
                let [_, h] = o.matrix(1, "table")?;
                f32(&[t, h])
            }
            Self::RmsNorm { groups, weight, .. } => {
                let x = o.rows(0, "x")?;
                let c = o.part(x.channels, *groups, "groups")?;
                if *weight {
                    o.exact(1, "weight", &f32(&[c]))?;
                }
                x.ty()
            }
            Self::LayerNorm { .. } => {
                let [t, c] = o.matrix(0, "x")?;
                o.exact(1, "weight", &f32(&[c]))?;
                o.exact(2, "bias", &f32(&[c]))?;
                f32(&[t, c])
            }
            Self::Linear { bias } | Self::LinearGlu { bias, .. } => {
                let [t, k] = o.matrix(0, "x")?;
                let [n, wk] = o.matrix(1, "weight")?;
                o.require(k == wk, || format!("x has {k} channels, the weight takes {wk}"))?;
                if *bias {
                    o.exact(2, "bias", &f32(&[n]))?;
                }
                let out = if matches!(self, Self::Linear { .. }) { n } else { o.part(n, 2, "halves")? };
                f32(&[t, out])
            }
            Self::HeadLinear { heads } => {
                let [t, width] = o.matrix(0, "x")?;
                let k = o.part(width, *heads, "heads")?;
                let [wh, n, wk] = o.shape(1, "weight", DType::F32)?;
                o.require(wh == *heads && wk == k, || {
                    format!("weight is f32{:?}, expected f32[{heads}, _, {k}]", [wh, n, wk])
                })?;
                f32(&[t, o.mul(*heads, n)?])
            }
            Self::Conv1x1 { groups, bias } => conv1x1(&o, *groups, *bias)?,
            Self::ToNchw => {
                let [t, c] = o.matrix(0, "x")?;
                f32(&[t, c, 1, 1])
            }
            Self::FromNchw => {
                let x = o.nchw(0, "x")?;
                f32(&[x.count, x.channels])
            }
            Self::RopeAngles { switch, .. } => {
                let [t] = o.shape(0, "pos", DType::I32)?;
                let [half] = o.shape(1, "inv_freq", DType::F32)?;
                if switch.is_some() {
                    o.exact(2, "inv_freq_long", &f32(&[half]))?;
                }
                f32(&[t, o.mul(half, 2)?])
            }
            Self::Rope { heads, offset, .. } => {
                let [t, width] = o.matrix(0, "x")?;
                let dim = o.part(width, *heads, "heads")?;
                let [at, r] = o.matrix(1, "angles")?;
                o.require(at == t, || format!("x has {t} rows, angles {at}"))?;
                o.require(r % 2 == 0, || format!("{r} rotated channels are odd"))?;
                o.require(offset.checked_add(r).is_some_and(|end| end <= dim), || {
                    format!("channels {offset} .. {offset} + {r} exceed the head's {dim}")
                })?;
                f32(&[t, width])
            }
            Self::CacheWrite => {
                let [_, heads, _, dim] = o.shape(0, "state", DType::F32)?;
                let [t, width] = o.matrix(1, "x")?;
                let want = o.mul(heads, dim)?;
                o.require(width == want, || format!("x has {width} channels, the state's row {want}"))?;
                o.exact(2, "pos", &i32(&[t]))?;
                o.exact(3, "slot", &i32(&[t]))?;
                o.get(0)?.clone()
            }
            Self::Attention(d) => attention(&o, d)?,
            Self::CausalConv { bias, .. } => {
                let [_, one, before, c] = o.shape(0, "state", DType::F32)?;
                o.require(one == 1, || format!("the state has {one} heads, expected 1"))?;
                let [t, _] = o.matrix(1, "x")?;
                o.exact(1, "x", &f32(&[t, c]))?;
                o.exact(2, "weight", &f32(&[before + 1, c]))?;
                if *bias {
                    o.exact(3, "bias", &f32(&[c]))?;
                }
                positions(&o, t)?;
                f32(&[t, c])
            }
            Self::DeltaRule { key_heads, heads } | Self::Ssd { groups: key_heads, heads } => {
                delta_rule(&o, *key_heads, *heads)?
            }
            Self::Router(d) => return router(&o, d),
            Self::Admit(d) => {
                let [t, k] = o.shape(0, "ids", DType::I32)?;
                let [rows, _] = o.matrix(1, "added")?;
                o.require(rows == t, || format!("{rows} rows were added to, not {t}"))?;
                o.exact(2, "pos", &i32(&[t]))?;
                o.require(!d.capacities.is_empty(), || "no experts".to_owned())?;
                return Ok(vec![i32(&[t, k]), i32(&[t, k])]);
            }
            Self::Dispatch { experts, .. } => {
                let [rows, k] = o.shape(0, "ids", DType::I32)?;
                o.require(*experts > 0, || "no experts".to_owned())?;
                let words = DispatchLayout { rows, k, experts: *experts }.checked_words();
                i32(&[words.ok_or_else(|| o.error("dispatch table overflows"))?])
            }
            Self::Fetch { scores, .. } => {
                let [words] = o.shape(0, "dispatch", DType::I32)?;
                let most = crate::op::FETCHED;
                o.require((1..=most).contains(scores), || format!("{scores} scores, not 1 to {most}"))?;
                let [t, _] = o.matrix(1, "scores")?;
                for i in 2..=*scores {
                    let [rows, _] = o.matrix(i, "scores ahead")?;
                    o.require(rows == t, || format!("scores of {rows} rows ahead of {t}"))?;
                }
                i32(&[words])
            }
            Self::ExpertFfn { bias, .. } => {
                let [t, h] = o.matrix(0, "x")?;
                let [words] = o.shape(1, "dispatch", DType::I32)?;
                let [e, two_i, gh] = o.shape(2, "gate_up", DType::F32)?;
                o.require(gh == h, || format!("x has {h} channels, gate_up takes {gh}"))?;
                let i = o.part(two_i, 2, "halves")?;
                o.exact(3, "down", &f32(&[e, h, i]))?;
                if *bias {
                    o.exact(4, "gate_up_bias", &f32(&[e, two_i]))?;
                    o.exact(5, "down_bias", &f32(&[e, h]))?;
                }
                f32(&[slots_for(&o, words, t, e)?, h])
            }
            Self::NeuronFfn { glu, paged, predict } => {
                let [t, h] = o.matrix(0, "x")?;
                o.require(glu.skips(), || "this gate makes no neuron 0".to_owned())?;
                let [words] = o.shape(1, "dispatch", DType::I32)?;
                let [e, i, width] = o.shape(2, "neurons", DType::F32)?;
                let want = if paged.is_some() { h } else { o.mul(3, h)? };
                o.require(width == want, || {
                    format!("bundles of {width} numbers, expected gate, up and down of {h} each")
                })?;
                if paged.is_some() {
                    let both = o.mul(2, h)?;
                    o.exact(3, "rests", &f32(&[e, i, both]))?;
                    o.require(predict.is_none(), || "a predictor of neurons on flash".to_owned())?;
                }
                match predict {
                    None => {}
                    Some(Predictor::LowRank) => {
                        let [_, rank, _] = o.shape(3, "right", DType::F32)?;
                        o.exact(3, "right", &f32(&[e, rank, h]))?;
                        o.exact(4, "left", &f32(&[e, i, rank]))?;
                        o.exact(5, "margin", &f32(&[e, 1, i]))?;
                    }
                    Some(Predictor::Coarse) => {
                        o.exact(3, "codes", &f32(&[e, i, h]))?;
                        o.exact(4, "margin", &f32(&[e, 1, i]))?;
                    }
                }
                f32(&[slots_for(&o, words, t, e)?, h])
            }
            Self::Combine { .. } => {
                let [slots, h] = o.matrix(0, "y")?;
                let [words] = o.shape(1, "dispatch", DType::I32)?;
                let [t, k] = o.matrix(2, "weights")?;
                let want = o.mul(t, k)?;
                o.require(slots == want, || format!("y has {slots} rows, the weights {t} · {k}"))?;
                // The number of experts is not an operand: the table must fit for some number ≥ 1.
                let rest = slots.checked_mul(2).and_then(|s| words.checked_sub(s));
                o.require(rest.is_some_and(|r| r >= 7 && r % 2 == 1), || {
                    format!("dispatch of {words} words does not hold {slots} slots")
                })?;
                f32(&[t, h])
            }
            Self::Add | Self::Glu(_) => {
                let a = o.rows(0, "a")?;
                o.exact(1, "b", &a.ty())?;
                a.ty()
            }
            Self::Mul => {
                let (a, b) = (o.rows(0, "a")?, o.rows(1, "b")?);
                o.require(b == a || b == RowShape { channels: 1, ..a }, || {
                    format!("b is {}, expected {} or {}", b.ty(), a.ty(), a.of(1))
                })?;
                a.ty()
            }
            Self::MulHeads { heads } => {
                let [t, c] = o.matrix(0, "a")?;
                o.part(c, *heads, "heads")?;
                o.exact(1, "b", &f32(&[t, *heads]))?;
                f32(&[t, c])
            }
            Self::SoftCap { cap } => {
                o.require(*cap > 0.0, || format!("a cap of {cap:?}"))?;
                o.rows(0, "x")?.ty()
            }
            Self::ScaleCols => {
                let x = o.rows(0, "x")?;
                o.exact(1, "w", &f32(&[x.channels]))?;
                x.ty()
            }
            Self::Softmax => f32(&o.matrix(0, "x")?),
            Self::Scale { .. } | Self::Act(_) | Self::Softplus => o.rows(0, "x")?.ty(),
            Self::Clamp { lo, hi } => {
                o.require(lo <= hi, || format!("bounds {lo:?} .. {hi:?} are empty"))?;
                o.rows(0, "x")?.ty()
            }
            Self::Concat { heads } => {
                let first = o.rows(0, "operand 0")?;
                let mut width = first.channels;
                o.part(width, *heads, "heads")?;
                for i in 1..operands.len() {
                    let x = o.rows(i, &format!("operand {i}"))?;
                    o.require(x.count == first.count, || {
                        format!("operand {i} has {} rows, expected {}", x.count, first.count)
                    })?;
                    o.require(x.nchw == first.nchw, || {
                        format!("operand {i} is {}, in another form than operand 0", x.ty())
                    })?;
                    o.part(x.channels, *heads, "heads")?;
                    width = width.checked_add(x.channels).ok_or_else(|| o.error("width overflows"))?;
                }
                first.of(width)
            }
            Self::Slice { heads, start, len } => {
                let x = o.rows(0, "x")?;
                let c = o.part(x.channels, *heads, "heads")?;
                o.require(*len > 0 && start.checked_add(*len).is_some_and(|end| end <= c), || {
                    format!("channels {start} .. {start} + {len} of {c}")
                })?;
                x.of(o.mul(*heads, *len)?)
            }
            Self::GatherRows => {
                let [_, c] = o.matrix(0, "x")?;
                let [r] = o.shape(1, "rows", DType::I32)?;
                f32(&[r, c])
            }
        }])
    }
}

/// Slots `T·k` of a dispatch table of this many words.
fn slots_of(words: usize, experts: usize) -> Option<usize> {
    let head = DispatchLayout { rows: 0, k: 0, experts }.checked_words()?;
    let slots = words.checked_sub(head)?;
    (slots > 0 && slots.is_multiple_of(2)).then_some(slots / 2)
}

/// Slots of a dispatch table of this many words, for so many rows and experts.
fn slots_for(o: &Operands<'_>, words: usize, rows: usize, experts: usize) -> Result<usize, TypeError> {
    let slots = slots_of(words, experts).filter(|slots| slots % rows == 0);
    slots.ok_or_else(|| {
        o.error(format!("dispatch of {words} words fits no k for {rows} rows and {experts} experts"))
    })
}

fn conv1x1(o: &Operands<'_>, groups: usize, bias: bool) -> Result<Type, TypeError> {
    let x = o.nchw(0, "x")?;
    let k = o.part(x.channels, groups, "groups")?;
    let w = o.get(1)?;
    let n = match *w.shape.as_slice() {
        [n, wk] if groups == 1 && wk == k => n,
        [wg, n, wk] if wg == groups && wk == k => n,
        _ => return Err(o.error(format!("weight is {w}, expected f32[{groups}, _, {k}]"))),
    };
    let out = o.mul(groups, n)?;
    if bias {
        o.exact(2, "bias", &f32(&[out]))?;
    }
    Ok(x.of(out))
}

fn attention(o: &Operands<'_>, d: &AttentionDesc) -> Result<Type, TypeError> {
    o.require(d.qk_dim > 0 && d.v_dim > 0, || "a head without channels".to_owned())?;
    o.require(d.kv_heads > 0 && d.heads > 0 && d.heads.is_multiple_of(d.kv_heads), || {
        format!("{} query heads over {} key-value heads", d.heads, d.kv_heads)
    })?;
    o.require(d.window != Some(0), || "a window of 0 tokens".to_owned())?;
    let [t, width] = o.matrix(0, "q")?;
    let want = o.mul(d.heads, d.qk_dim)?;
    o.require(width == want, || format!("q has {width} channels, expected {want}"))?;
    let [slots, kv_heads, ctx, dim] = o.shape(1, "k", DType::F32)?;
    o.require(kv_heads == d.kv_heads && dim == d.qk_dim, || {
        format!("k is f32{:?}, expected f32[_, {}, _, {}]", [slots, kv_heads, ctx, dim], d.kv_heads, d.qk_dim)
    })?;
    let mut next = 2;
    if d.v_from_k {
        o.require(d.v_dim <= d.qk_dim, || {
            format!("{} value channels of {} key channels", d.v_dim, d.qk_dim)
        })?;
    } else {
        o.exact(next, "v", &f32(&[slots, kv_heads, ctx, d.v_dim]))?;
        next += 1;
    }
    o.exact(next, "pos", &i32(&[t]))?;
    o.exact(next + 1, "slot", &i32(&[t]))?;
    if d.sinks {
        o.exact(next + 2, "sinks", &f32(&[d.heads]))?;
    }
    Ok(f32(&[t, o.mul(d.heads, d.v_dim)?]))
}

/// The last two operands are positions and slots of `rows` rows.
fn positions(o: &Operands<'_>, rows: usize) -> Result<(), TypeError> {
    let last = o.types.len().saturating_sub(1);
    o.exact(last.saturating_sub(1), "pos", &i32(&[rows]))?;
    o.exact(last, "slot", &i32(&[rows]))
}

fn delta_rule(o: &Operands<'_>, key_heads: usize, heads: usize) -> Result<Type, TypeError> {
    o.require(key_heads > 0 && heads > 0 && heads.is_multiple_of(key_heads), || {
        format!("{heads} heads of values over {key_heads} of keys")
    })?;
    let [_, state_heads, k, v] = o.shape(0, "state", DType::F32)?;
    o.require(state_heads == heads, || format!("the state has {state_heads} heads, expected {heads}"))?;
    let [t, _] = o.matrix(1, "q")?;
    let (keys, values) = (f32(&[t, o.mul(key_heads, k)?]), f32(&[t, o.mul(heads, v)?]));
    o.exact(1, "q", &keys)?;
    o.exact(2, "k", &keys)?;
    o.exact(3, "v", &values)?;
    let [_, decays] = o.matrix(4, "decay")?;
    let each = if decays == heads { heads } else { o.mul(heads, k)? };
    o.exact(4, "decay", &f32(&[t, each]))?;
    o.exact(5, "beta", &f32(&[t, heads]))?;
    positions(o, t)?;
    Ok(values)
}

fn router(o: &Operands<'_>, d: &RouterDesc) -> Result<Vec<Type>, TypeError> {
    let [t, e] = o.matrix(0, "logits")?;
    o.require(e == d.experts, || format!("{e} logits for {} experts", d.experts))?;
    o.require((1..=e).contains(&d.k), || format!("{} of {e} experts per token", d.k))?;
    if d.select_bias {
        o.exact(1, "select_bias", &f32(&[e]))?;
    }
    if let Some(g) = &d.groups {
        let size = o.part(e, g.n, "groups")?;
        o.require((1..=g.n).contains(&g.keep), || format!("{} of {} groups kept", g.keep, g.n))?;
        o.require(d.k <= g.keep * size, || format!("{} experts out of {} groups of {size}", d.k, g.keep))?;
        o.require(g.score == GroupScore::Max || size >= 2, || format!("top2sum over groups of {size}"))?;
    }
    if matches!(d.weight_from, WeightFrom::SparseMixer { .. }) {
        o.require(d.k <= 2, || format!("sparsemixer with k = {}", d.k))?;
    }
    Ok(vec![i32(&[t, d.k]), f32(&[t, d.k])])
}
