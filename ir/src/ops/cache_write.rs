//! Rows of keys or values, stored in a cache.

use super::*;
use crate::eval::Tensor;

/// Index of the first channel at (slot, head, position) of a state `[slots, heads, ctx, dim]`.
pub(super) fn place(state: &Tensor, slot: usize, head: usize, pos: usize) -> usize {
    let shape = &state.ty.shape;
    ((slot * shape[1] + head) * shape[2] + pos) * shape[3]
}

impl Operator for CacheWrite {
    const NAMES: &'static [&'static str] = &["cache_write"];
    const OPERANDS: &'static [Kind] = &[S, V, V, V];

    fn effect(&self) -> Effect {
        Effect::Writes
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [_, heads, _, dim] = o.shape(0, "state", DType::F32)?;
        let [t, width] = o.matrix(1, "x")?;
        let want = o.mul(heads, dim)?;
        o.require(width == want, || format!("x has {width} channels, the state's row {want}"))?;
        o.exact(2, "pos", &i32(&[t]))?;
        o.exact(3, "slot", &i32(&[t]))?;
        Ok(vec![o.get(0)?.clone()])
    }

    /// Position `p` goes to row `p mod ctx`.
    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let state = a.state()?;
        let (slots, heads, ctx, dim) =
            (state.ty.shape[0], state.ty.shape[1], state.ty.shape[2], state.ty.shape[3]);
        let (pos, slot) = (a.i32(1)?, a.i32(2)?);
        for (t, row) in a.f32(0)?.chunks_exact(heads * dim).enumerate() {
            let Ok(p) = usize::try_from(pos[t]) else { continue };
            let p = p % ctx;
            let s = a.index("slot", slot[t], slots)?;
            for (h, head) in row.chunks_exact(dim).enumerate() {
                let at = place(state, s, h, p);
                let Data::F32(data) = &mut state.data else {
                    return Err(a.error("the state holds integers"));
                };
                data[at..at + dim].copy_from_slice(head);
            }
        }
        Ok(Vec::new())
    }
}
