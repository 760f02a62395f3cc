//! A state of which every number decays by itself, by how long the row's step is: Mamba's selective scan.

use super::causal_conv::{check_places, numbers, slots_of};
use super::delta_rule::of_a_slot;
use super::*;

impl Operator for SelectiveScan {
    const NAMES: &'static [&'static str] = &["selective_scan"];
    const OPERANDS: &'static [Kind] = &[S, V, V, V, V, W, V, V];

    fn effect(&self) -> Effect {
        Effect::Updates
    }

    fn takes_state(&self, kind: StateKind) -> bool {
        kind == StateKind::Recurrent
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [_, heads, n, channels] = o.shape(0, "state", DType::F32)?;
        o.require(heads == 1, || format!("the state has {heads} heads, expected 1"))?;
        let [t, _] = o.matrix(1, "c")?;
        let (narrow, wide) = (f32(&[t, n]), f32(&[t, channels]));
        for (i, what, ty) in [(1, "c", &narrow), (2, "b", &narrow), (3, "x", &wide), (4, "dt", &wide)] {
            o.exact(i, what, ty)?;
        }
        o.exact(5, "rate", &f32(&[n, channels]))?;
        check_places(o, t)?;
        Ok(vec![wide])
    }

    fn multiply_adds(&self, state: &Type, _: f64) -> f64 {
        // Every number is decayed, changed and read.
        3.0 * of_a_slot(state)
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let ([slots, _, n, channels], state) = numbers(a)?;
        let [c, b, x, dt, rate] = [a.f32(0)?, a.f32(1)?, a.f32(2)?, a.f32(3)?, a.f32(4)?];
        let mut out = vec![0.0; x.len()];
        for (t, slot) in slots_of(a, slots)?.into_iter().enumerate() {
            let Some(slot) = slot else { continue };
            let s = &mut state[slot * n * channels..][..n * channels];
            for (j, y) in out[t * channels..][..channels].iter_mut().enumerate() {
                let [x, dt] = [x, dt].map(|of| f64::from(of[t * channels + j]));
                let mut sum = 0.0;
                for i in 0..n {
                    let [c, b] = [c, b].map(|of| f64::from(of[t * n + i]));
                    let value = &mut s[i * channels + j];
                    let new =
                        (f64::from(rate[i * channels + j]) * dt).exp() * f64::from(*value) + b * (dt * x);
                    *value = new as f32;
                    sum += c * new;
                }
                *y = sum as f32;
            }
        }
        Ok(one(out))
    }
}
