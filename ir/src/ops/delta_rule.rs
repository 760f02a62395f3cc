//! States of sums of outer products that decay: the gated delta rule, and state spaces.

use super::causal_conv::{check_places, numbers, slots_of};
use super::*;

/// Types of both, for heads of keys and of values.
fn infer(o: &Operands<'_>, [key_heads, heads]: [usize; 2]) -> Inferred {
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
    check_places(o, t)?;
    Ok(vec![values])
}

/// Numbers that a state keeps of a sequence.
pub(super) fn of_a_slot(state: &Type) -> f64 {
    state.elements() as f64 / state.rows().max(1) as f64
}

/// Meaning of both; with `corrects`, what the state says of a key is taken off the value.
fn eval(a: &Args<'_>, [key_heads, heads]: [usize; 2], corrects: bool) -> Evaluated {
    let ([slots, _, dk, dv], state) = numbers(a)?;
    let [q, k, v, decay, beta] = [a.f32(0)?, a.f32(1)?, a.f32(2)?, a.f32(3)?, a.f32(4)?];
    let decays = a.cols(3)? / heads;
    let mut out = vec![0.0; v.len()];
    for (t, slot) in slots_of(a, slots)?.into_iter().enumerate() {
        let Some(slot) = slot else { continue };
        for h in 0..heads {
            let of_key = t * key_heads + h / (heads / key_heads);
            let (q, k) = (&q[of_key * dk..][..dk], &k[of_key * dk..][..dk]);
            let at = t * heads + h;
            let decay = &decay[at * decays..][..decays];
            let s = &mut state[(slot * heads + h) * dk * dv..][..dk * dv];
            for (j, (&v, y)) in v[at * dv..].iter().zip(&mut out[at * dv..][..dv]).enumerate() {
                // Column `j` of the state, decayed.
                let mut column: Vec<f64> =
                    (0..dk).map(|i| f64::from(s[i * dv + j]) * f64::from(decay[i % decays]).exp()).collect();
                let dot = |with: &[f32], column: &[f64]| -> f64 {
                    with.iter().zip(column).map(|(&x, s)| f64::from(x) * s).sum()
                };
                let retrieved = if corrects { dot(k, &column) } else { 0.0 };
                let change = f64::from(beta[at]) * (f64::from(v) - retrieved);
                for (s, &k) in column.iter_mut().zip(k) {
                    *s += f64::from(k) * change;
                }
                *y = dot(q, &column) as f32;
                for (i, x) in column.into_iter().enumerate() {
                    s[i * dv + j] = x as f32;
                }
            }
        }
    }
    Ok(one(out))
}

impl Operator for DeltaRule {
    const NAMES: &'static [&'static str] = &["delta_rule"];
    const OPERANDS: &'static [Kind] = &[S, V, V, V, V, V, V, V];

    fn effect(&self) -> Effect {
        Effect::Updates
    }

    fn takes_state(&self, kind: StateKind) -> bool {
        kind == StateKind::Recurrent
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        infer(o, [self.key_heads, self.heads])
    }

    fn multiply_adds(&self, state: &Type, _: f64) -> f64 {
        // Every number is read for the key, changed, and read for the query.
        3.0 * of_a_slot(state)
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        eval(a, [self.key_heads, self.heads], true)
    }
}

impl Operator for Ssd {
    const NAMES: &'static [&'static str] = &["ssd"];
    const OPERANDS: &'static [Kind] = DeltaRule::OPERANDS;

    fn effect(&self) -> Effect {
        Effect::Updates
    }

    fn takes_state(&self, kind: StateKind) -> bool {
        kind == StateKind::Recurrent
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        infer(o, [self.groups, self.heads])
    }

    fn multiply_adds(&self, state: &Type, _: f64) -> f64 {
        // Every number is changed and read.
        2.0 * of_a_slot(state)
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        eval(a, [self.groups, self.heads], false)
    }
}
