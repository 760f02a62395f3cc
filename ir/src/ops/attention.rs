//! Attention over a cache.

use super::cache_write::place;
use super::math::dot;
use super::*;

attributes! {
    /// Attributes of [`Op::Attention`].
    #[derive(Clone, Debug, PartialEq)]
    pub struct AttentionDesc {
        /// Query heads.
        pub heads: usize,
        /// Key-value heads; divides `heads`.
        pub kv_heads: usize,
        /// Channels of a query and of a key.
        pub qk_dim: usize,
        /// Channels of a value.
        pub v_dim: usize,
        /// Factor on the scores.
        pub scale: f32,
        /// Sliding window in tokens, the query's own included.
        pub window: Option<usize>,
        /// Whether the window does not slide: positions are cut into chunks of `window` tokens, and a row
        /// sees those of its own chunk (Llama 4).
        pub chunked: bool,
        /// One extra softmax column per head that is dropped after normalisation (gpt-oss).
        pub sinks: bool,
        /// Values are the first `v_dim` channels of the keys (latent attention); no `v` operand.
        pub v_from_k: bool,
    }
}

impl Operator for AttentionDesc {
    const NAMES: &'static [&'static str] = &["attention"];
    const OPERANDS: &'static [Kind] = &[V, S, S, V, V];

    fn signature(&self) -> Vec<Kind> {
        let mut kinds = Self::OPERANDS.to_vec();
        if self.v_from_k {
            kinds.remove(2);
        }
        kinds.extend(self.sinks.then_some(W));
        kinds
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let d = self;
        o.require(d.qk_dim > 0 && d.v_dim > 0, || "a head without channels".to_owned())?;
        o.require(d.kv_heads > 0 && d.heads > 0 && d.heads.is_multiple_of(d.kv_heads), || {
            format!("{} query heads over {} key-value heads", d.heads, d.kv_heads)
        })?;
        o.require(d.window != Some(0), || "a window of 0 tokens".to_owned())?;
        o.require(!d.chunked || d.window.is_some(), || "chunks without a window".to_owned())?;
        let [t, width] = o.matrix(0, "q")?;
        let want = o.mul(d.heads, d.qk_dim)?;
        o.require(width == want, || format!("q has {width} channels, expected {want}"))?;
        let [slots, kv_heads, ctx, dim] = o.shape(1, "k", DType::F32)?;
        o.require(kv_heads == d.kv_heads && dim == d.qk_dim, || {
            let expected = format!("expected f32[_, {}, _, {}]", d.kv_heads, d.qk_dim);
            format!("k is f32{:?}, {expected}", [slots, kv_heads, ctx, dim])
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
        Ok(vec![f32(&[t, o.mul(d.heads, d.v_dim)?])])
    }

    fn multiply_adds(&self, _: &Type, context: f64) -> f64 {
        let seen = self.window.map_or(context, |window| context.min(window as f64));
        seen * (self.heads * (self.qk_dim + self.v_dim)) as f64
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let d = self;
        let (q, k) = (a.f32(0)?, a.get(1)?);
        let v = if d.v_from_k { k } else { a.get(2)? };
        let next = if d.v_from_k { 2 } else { 3 };
        let (pos, slot) = (a.i32(next)?, a.i32(next + 1)?);
        let sinks = a.weight(next + 2, d.sinks)?;
        let (slots, ctx) = (k.ty.shape[0], k.ty.shape[2]);
        let mut out = Vec::new();
        for (t, row) in q.chunks_exact(d.heads * d.qk_dim).enumerate() {
            if pos[t] < 0 {
                out.extend(std::iter::repeat_n(0.0, d.heads * d.v_dim));
                continue;
            }
            // Positions that a state of `ctx` rows holds, up to the last: all of them, or its window.
            let retained = if d.window.is_some_and(|w| w <= ctx) { usize::MAX } else { ctx };
            let last = a.index("position", pos[t], retained)?;
            let slot = a.index("slot", slot[t], slots)?;
            let first = match d.window {
                Some(chunk) if d.chunked => last / chunk * chunk,
                Some(window) => (last + 1).saturating_sub(window),
                None => 0,
            };
            for (h, query) in row.chunks_exact(d.qk_dim).enumerate() {
                let kv_head = h / (d.heads / d.kv_heads);
                let scores: Vec<f64> = (first..=last)
                    .map(|p| {
                        let at = place(k, slot, kv_head, p % ctx);
                        dot(query, &k.as_f32()[at..at + d.qk_dim]) * f64::from(d.scale)
                    })
                    .collect();
                let sink = sinks.map(|s| f64::from(s[h]));
                let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp()).sum();
                let mut sum = vec![0.0_f64; d.v_dim];
                for (p, s) in (first..=last).zip(&scores) {
                    let weight = (s - max).exp() / total;
                    let at = place(v, slot, kv_head, p % ctx);
                    for (y, &x) in sum.iter_mut().zip(&v.as_f32()[at..at + d.v_dim]) {
                        *y += weight * f64::from(x);
                    }
                }
                out.extend(sum.into_iter().map(|y| y as f32));
            }
        }
        Ok(one(out))
    }
}
