//! Multi-head latent attention of DeepSeek (arXiv 2405.04434, section 2.1), in its absorbed form.
#![expect(clippy::cast_possible_truncation, reason = "models compute with their factors in f32")]

use super::common::Base;
use super::rope;
use super::spec::{Mla, Norm};
use super::tensors::Dim;
use moec_base::error::Result;
use moec_ir::{Axis, RopeStyle, WeightExpr};

/// Epsilon of the norms of latents, which the config does not set.
const LATENT_EPS: f32 = 1e-6;

impl Base<'_> {
    /// Latent attention of a layer.
    ///
    /// `kv_b_proj` holds, for each head, `nope` rows that expand the latent to a key and `v` rows that
    /// expand it to a value. Instead of expanding what is cached, the query is taken to the latent by
    /// the transpose of the first, and the attended latent to the output by the second.
    ///
    /// # Errors
    /// Keys or tensors that do not fit.
    pub fn mla(&self, layer: usize, style: RopeStyle) -> Result<Mla> {
        let (c, t, hidden) = (self.config, &self.tensors, &self.hidden);
        let at = format!("{}.self_attn", self.layer(layer));
        let heads = Dim::from(self.heads);
        let nope = Dim::from(c.size(&["qk_nope_head_dim"])?);
        let rotated = Dim::from(c.size(&["qk_rope_head_dim"])?);
        let value = Dim::from(c.size(&["v_head_dim"])?);
        let latent = Dim::from(c.size(&["kv_lora_rank"])?);
        let wide = heads.times(&nope.plus(&rotated));
        let bias = c.flag_or("attention_bias", false)?;
        let norm = |name: &str, width: &Dim| -> Result<Norm> {
            t.rms_norm(&format!("{at}.{name}"), width, LATENT_EPS)
        };
        let (q_down, q) = match c.opt_size(&["q_lora_rank"])? {
            None => (None, t.projection(&format!("{at}.q_proj"), &wide, hidden, false)?),
            Some(rank) => {
                let rank = Dim::from(rank);
                let down = t.projection(&format!("{at}.q_a_proj"), &rank, hidden, bias)?;
                let q = t.projection(&format!("{at}.q_b_proj"), &wide, &rank, false)?;
                (Some((down, norm("q_a_layernorm", &rank)?)), q)
            }
        };
        let (k_up, v_up) = self.expansions(&at, [&heads, &nope, &value, &latent])?;
        let scale = ((nope.n + rotated.n) as f64).powf(-0.5);
        let defaults = rope::Defaults::default();
        Ok(Mla {
            heads: heads.n,
            nope: nope.n,
            rotated: rotated.n,
            v_dim: value.n,
            latent: latent.n,
            q_down,
            q,
            kv_down: t.projection(
                &format!("{at}.kv_a_proj_with_mqa"),
                &latent.plus(&rotated),
                hidden,
                bias,
            )?,
            kv_norm: norm("kv_a_layernorm", &latent)?,
            k_up,
            v_up,
            o: t.projection(&format!("{at}.o_proj"), hidden, &heads.times(&value), bias)?,
            rope: rope::read(c, rotated.n, defaults)?,
            style,
            scale: (scale * rope::softmax_factor(c, defaults)?) as f32,
        })
    }

    /// What expands latents: `[heads, latent, nope]` to keys, as it meets queries, and `[heads, value, latent]` to values.
    /// Checkpoints have both in one matrix, or each by itself in this form.
    fn expansions(
        &self,
        at: &str,
        [heads, nope, value, latent]: [&Dim; 4],
    ) -> Result<(WeightExpr, WeightExpr)> {
        let t = &self.tensors;
        let apart = ["k_b_proj", "v_b_proj"].map(|name| format!("{at}.{name}.weight"));
        if t.has(&apart[0]) {
            return Ok((
                t.take(&apart[0], &[heads, latent, nope])?,
                t.take(&apart[1], &[heads, value, latent])?,
            ));
        }
        let up = t.take(&format!("{at}.kv_b_proj.weight"), &[&heads.times(&nope.plus(value)), latent])?;
        let up = WeightExpr::Split { heads: heads.n, of: Box::new(up) };
        let rows = |start, len| WeightExpr::Slice {
            axis: Axis::Rows,
            start,
            step: 1,
            len,
            of: Box::new(up.clone()),
        };
        Ok((WeightExpr::Transpose(Box::new(rows(0, nope.n))), rows(nope.n, value.n)))
    }
}
