//! Angles of rotary embeddings.

use super::*;

/// Threshold at which LongRoPE changes frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LongSwitch {
    /// Sequences of at most this many tokens use the short frequencies.
    pub after: usize,
    /// Attention factor of the long ones.
    pub long_scale: f32,
}

impl Word for LongSwitch {
    const EXPECTED: &'static str = "`long(…)`";

    fn word(&self, w: &mut Writer) {
        w.put("after", &self.after).put("scale", &self.long_scale).word("long");
    }

    fn of(word: &str, r: &mut Reader<'_, '_>) -> Parsed<Option<Self>> {
        let read = || Ok(Self { after: r.get("after")?, long_scale: r.get("scale")? });
        (word == "long").then(read).transpose()
    }
}

/// Angles are `pos · inv_freq` rounded to f32, as the models compute them. The long frequencies of LongRoPE
/// apply to a row whose sequence or prompt is longer than the threshold.
impl Operator for RopeAngles {
    const NAMES: &'static [&'static str] = &["rope_angles"];
    const OPERANDS: &'static [Kind] = &[V, W];

    fn weights(&self) -> usize {
        usize::from(self.switch.is_some())
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [t] = o.shape(0, "pos", DType::I32)?;
        let [half] = o.shape(1, "inv_freq", DType::F32)?;
        if self.switch.is_some() {
            o.exact(2, "inv_freq_long", &f32(&[half]))?;
        }
        Ok(vec![f32(&[t, o.mul(half, 2)?])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let short = a.f32(1)?;
        let mut out = Vec::new();
        for &pos in a.i32(0)? {
            let length = a.sequence.max(usize::try_from(pos).map_or(0, |pos| pos + 1));
            let (freqs, scale) = match self.switch.filter(|s| length > s.after) {
                Some(s) => (a.f32(2)?, s.long_scale),
                None => (short, self.scale),
            };
            let angles = || freqs.iter().map(|&f| f64::from(pos as f32 * f));
            out.extend(angles().map(|t| (t.cos() * f64::from(scale)) as f32));
            out.extend(angles().map(|t| (t.sin() * f64::from(scale)) as f32));
        }
        Ok(one(out))
    }
}
