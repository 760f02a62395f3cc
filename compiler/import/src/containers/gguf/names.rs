//! From the names of GGUF's tensors to those of Hugging Face.

use crate::mixers::Parts;
use moec_gguf::Tensor;
use std::ops::Range;

/// Names outside of the layers.
const WHOLE: [(&str, &str); 3] =
    [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// Names in a layer that all architectures share.
const LAYER: [(&str, &str); 19] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    ("attn_k_b", "self_attn.k_b_proj"),
    ("attn_v_b", "self_attn.v_b_proj"),
    ("attn_sinks.weight", "self_attn.sinks"),
    ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
];

/// Tensors that the configuration is read from.
pub(super) const FACTORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

/// Matrices whose rows llama.cpp pairs anew where it rotates neighbours.
const ROTATED: [(&str, bool); 2] = [("attn_q.weight", false), ("attn_k.weight", true)];

/// How an architecture calls what others call otherwise, in the spelling of Hugging Face.
#[derive(Clone, Copy, Debug)]
pub(super) struct Naming {
    /// Whether the rows of query and key are paired anew, for a rotation of neighbours.
    pub(super) paired: bool,
    /// The router in a layer.
    pub(super) router: &'static str,
    /// The experts in a layer.
    pub(super) experts: &'static str,
    /// The parts of an expert.
    pub(super) parts: Parts,
    /// The network in a layer that all tokens go through beside their experts.
    pub(super) shared: &'static str,
}

/// How the tensors of a model are called.
pub(super) struct Names {
    pub(super) naming: Naming,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    /// Experts of a layer: how many tensors one of all of them is. Any other number is not theirs.
    pub(super) experts: usize,
}

/// A tensor, or one expert of a tensor, in the spelling of Hugging Face.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Range<usize>,
    /// Heads, where rows are paired.
    pub(super) heads: Option<usize>,
}

impl Names {
    /// What a stored tensor is: one, or as many as it has experts. A name that is not known stays, after that of its layer.
    pub(super) fn place(&self, tensor: &Tensor<'_>) -> Vec<Placed> {
        let whole = |name: String| Placed {
            name,
            shape: tensor.shape.clone(),
            bytes: tensor.bytes.clone(),
            heads: None,
        };
        if FACTORS.contains(&tensor.name) {
            return Vec::new();
        }
        let Some((layer, rest)) = tensor.name.strip_prefix("blk.").and_then(|name| name.split_once('.'))
        else {
            return vec![whole(renamed(&WHOLE, tensor.name).unwrap_or_else(|| tensor.name.to_owned()))];
        };
        let at = format!("model.layers.{layer}");
        if let Some(experts) = self.experts(tensor, &at, rest) {
            return experts;
        }
        let name = renamed(&LAYER, rest).or_else(|| self.feed_forward(rest));
        let mut placed = whole(format!("{at}.{}", name.as_deref().unwrap_or(rest)));
        if rest == "ffn_gate_inp_shexp.weight" && placed.shape.len() == 1 {
            placed.shape.insert(0, 1);
        }
        if self.naming.paired {
            let of = ROTATED.iter().find(|(name, _)| *name == rest);
            placed.heads = of.map(|(_, kv)| if *kv { self.kv_heads } else { self.heads });
        }
        vec![placed]
    }

    /// The tensors of single experts that a tensor of all of them has.
    fn experts(&self, tensor: &Tensor<'_>, at: &str, rest: &str) -> Option<Vec<Placed>> {
        let (part, suffix) = rest.rsplit_once('.')?;
        let part = self.part(part.strip_suffix("_exps")?)?;
        let (experts, shape) = tensor.shape.split_first().filter(|(n, _)| **n == self.experts)?;
        let size = tensor.bytes.len() / experts;
        let each = (0..*experts).map(|e| {
            let first = tensor.bytes.start + e * size;
            let name = format!("{at}.{}.{e}.{part}.{suffix}", self.naming.experts);
            Placed { name, shape: shape.to_vec(), bytes: first..first + size, heads: None }
        });
        (!shape.is_empty()).then(|| each.collect())
    }

    /// What families call a part of an expert: `ffn_gate`, `ffn_up`, `ffn_down`.
    fn part(&self, name: &str) -> Option<&'static str> {
        let parts = self.naming.parts;
        match name {
            "ffn_gate" => Some(parts.gate),
            "ffn_up" => Some(parts.up),
            "ffn_down" => Some(parts.down),
            _ => None,
        }
    }

    /// Names of routers and of networks that every token goes through, and of experts with tensors of their own, which
    /// converters wrote before 2024.
    fn feed_forward(&self, rest: &str) -> Option<String> {
        let (name, suffix) = rest.rsplit_once('.')?;
        let proj = |name: &str| match name {
            "ffn_gate" => Some("gate_proj"),
            "ffn_up" => Some("up_proj"),
            "ffn_down" => Some("down_proj"),
            _ => None,
        };
        let name = match name {
            "ffn_gate_inp" => self.naming.router.to_owned(),
            "ffn_gate_inp_shexp" => format!("{}_gate", self.naming.shared),
            name => match (name.strip_suffix("_shexp"), name.split_once('.')) {
                (Some(part), _) => format!("{}.{}", self.naming.shared, proj(part)?),
                (_, Some((part, e))) if e.parse::<u32>().is_ok() => {
                    format!("{}.{e}.{}", self.naming.experts, self.part(part)?)
                }
                _ => format!("mlp.{}", proj(name)?),
            },
        };
        Some(format!("{name}.{suffix}"))
    }
}

/// A name by a table whose rows leave out the suffix, or have it.
fn renamed(table: &[(&str, &str)], name: &str) -> Option<String> {
    let find = |name: &str| table.iter().find(|(from, _)| *from == name).map(|(_, to)| *to);
    if let Some(whole) = find(name) {
        return Some(whole.to_owned());
    }
    let (stem, suffix) = name.rsplit_once('.')?;
    Some(format!("{}.{suffix}", find(stem)?))
}

/// The order that undoes the pairing of rows: of each head, llama.cpp has the channels that are rotated together after each
/// other, and Hugging Face half a head apart. `None` if the rows do not divide.
pub(super) fn order(heads: usize, rows: usize) -> Option<Vec<u32>> {
    let width = rows.checked_div(heads)?;
    if !rows.is_multiple_of(heads) || !width.is_multiple_of(2) {
        return None;
    }
    let half = width / 2;
    (0..rows).map(|r| u32::try_from(r / width * width + 2 * (r % half) + r % width / half).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_heads_come_apart() {
        assert_eq!(order(2, 12), Some(vec![0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]));
        assert_eq!((order(0, 12), order(5, 12), order(4, 12)), (None, None, None));
    }
}
