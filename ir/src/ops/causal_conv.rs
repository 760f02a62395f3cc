//! Each channel's own convolution over the last rows of its sequence.

use super::*;

/// The slot of each row with a position, which must be one of `slots`; `None` for padding. Positions and
/// slots are the last operands.
pub(super) fn slots_of(a: &Args<'_>, slots: usize) -> Result<Vec<Option<usize>>, EvalError> {
    let last = a.list.len().saturating_sub(1);
    let rows = a.i32(last.saturating_sub(1))?.iter().zip(a.i32(last)?);
    rows.map(|(&p, &s)| if p < 0 { Ok(None) } else { a.index("slot", s, slots).map(Some) }).collect()
}

/// Checks that the last two operands are positions and slots of `rows` rows.
pub(super) fn check_places(o: &Operands<'_>, rows: usize) -> Result<(), TypeError> {
    let last = o.types.len().saturating_sub(1);
    o.exact(last.saturating_sub(1), "pos", &i32(&[rows]))?;
    o.exact(last, "slot", &i32(&[rows]))
}

/// The extents of the state, and its numbers.
pub(super) fn numbers<'a>(a: &Args<'a>) -> Result<([usize; 4], &'a mut [f32]), EvalError> {
    let state = a.state()?;
    let shape =
        <[usize; 4]>::try_from(state.ty.shape.as_slice()).map_err(|_| a.error("a state needs four axes"))?;
    match &mut state.data {
        Data::F32(data) => Ok((shape, data)),
        Data::I32(_) => Err(a.error("the state holds integers")),
    }
}

impl Operator for CausalConv {
    const NAMES: &'static [&'static str] = &["causal_conv"];
    const OPERANDS: &'static [Kind] = &[S, V, W, V, V];

    fn signature(&self) -> Vec<Kind> {
        let mut kinds = Self::OPERANDS.to_vec();
        if self.bias {
            kinds.insert(3, W);
        }
        kinds
    }

    fn effect(&self) -> Effect {
        Effect::Updates
    }

    fn takes_state(&self, kind: StateKind) -> bool {
        kind == StateKind::Convolution
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [_, heads, before, c] = o.shape(0, "state", DType::F32)?;
        o.require(heads == 1, || format!("the state has {heads} heads, expected 1"))?;
        let [t, _] = o.matrix(1, "x")?;
        o.exact(1, "x", &f32(&[t, c]))?;
        o.exact(2, "weight", &f32(&[before + 1, c]))?;
        if self.bias {
            o.exact(3, "bias", &f32(&[c]))?;
        }
        check_places(o, t)?;
        Ok(vec![f32(&[t, c])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let ([slots, _, before, c], state) = numbers(a)?;
        let (x, w, bias) = (a.f32(0)?, a.f32(1)?, a.weight(2, self.bias)?);
        let mut out = vec![0.0; x.len()];
        for ((row, y), slot) in x.chunks_exact(c).zip(out.chunks_exact_mut(c)).zip(slots_of(a, slots)?) {
            let Some(slot) = slot else { continue };
            let window = &mut state[slot * before * c..(slot + 1) * before * c];
            for (i, y) in y.iter_mut().enumerate() {
                let taps = window.iter().skip(i).step_by(c).chain([&row[i]]);
                let sum: f64 =
                    taps.zip(w.iter().skip(i).step_by(c)).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
                let sum = (sum + bias.map_or(0.0, |b| f64::from(b[i]))) as f32;
                *y = self.act.map_or(sum, |act| act.at(sum));
            }
            // The oldest row goes, this one is the last.
            if before > 0 {
                window.copy_within(c.., 0);
                window[(before - 1) * c..].copy_from_slice(row);
            }
        }
        Ok(one(out))
    }
}
