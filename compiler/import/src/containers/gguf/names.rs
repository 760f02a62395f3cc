//! Names of GGUF tensors in the spelling of Hugging Face, and changes of llama.cpp's converter that are
//! undone.

use crate::mixers::{PROJ, Parts};
use moec_gguf::Tensor;
use moec_ir::{Axis, Elementwise};
use std::collections::HashSet;
use std::ops::Range;

/// Pairs of a GGUF name and a Hugging Face name.
pub(super) type Table = [(&'static str, &'static str)];

/// Names outside the layers.
const WHOLE: [(&str, &str); 4] = [
    ("token_embd", "model.embed_tokens"),
    ("token_embd_norm", "model.embedding_norm"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];

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

/// Tensors of RoPE frequency factors. They become part of the configuration.
pub(super) const FACTORS: [&str; 3] =
    ["rope_factors_short.weight", "rope_factors_long.weight", "rope_freqs.weight"];

/// A change that llama.cpp's converter makes to a tensor. Reading undoes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Rows of each head permuted for interleaved RoPE.
    Paired {
        /// Whether the heads are those of keys and values, not of queries.
        kv: bool,
    },
    /// Function that the converter applied to the numbers, and that the family would apply. It is not undone;
    /// instead the family does not apply it again.
    Mapped(Elementwise),
    /// A vector that was reshaped to a matrix.
    Reshaped,
    /// Value heads of a delta rule in tiled order (first heads of all keys, then second heads), not grouped
    /// by key.
    Tiled {
        /// Axis of the heads.
        axis: Axis,
        /// Whether queries and keys come before the values.
        after_keys: bool,
        /// Whether a head has all its channels, not one number.
        wide: bool,
    },
}

/// Names of an architecture that differ from the usual ones, in the spelling of Hugging Face.
#[derive(Clone, Copy, Debug)]
pub(super) struct Naming {
    /// Names that override the shared ones.
    pub(super) own: &'static Table,
    /// Changes by the name of the tensor, without `.weight`.
    pub(super) changes: &'static [(&'static str, Change)],
    /// The router in a layer.
    pub(super) router: &'static str,
    /// The experts in a layer.
    pub(super) experts: &'static str,
    /// The parts of an expert.
    pub(super) parts: Parts,
    /// The network in a layer that all tokens use besides their experts.
    pub(super) shared: &'static str,
    /// The network of a layer without experts, and names of its parts.
    pub(super) dense: (&'static str, Parts),
}

/// Sizes that names and orders depend on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sizes {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    /// Experts of a layer. A tensor of all experts is split into this number; a tensor with another number is
    /// not split.
    pub(super) experts: usize,
    /// Key heads and value heads of a delta rule, and channels of a key head and of a value head.
    pub(super) delta: [usize; 4],
}

/// Names of the tensors of a model.
#[derive(Debug)]
pub(super) struct Names<'a> {
    pub(super) naming: Naming,
    pub(super) sizes: Sizes,
    /// Layers with gate and up of the experts in one tensor.
    pub(super) fused: HashSet<&'a str>,
}

/// A tensor, or one expert of a tensor, in the spelling of Hugging Face.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Range<usize>,
    /// Changes by the converter.
    pub(super) changes: Vec<Change>,
}

/// Name of the tensor with gate and up of all experts of a layer.
const FUSED: &str = "ffn_gate_up_exps.weight";

/// Layer, and name within the layer, if the tensor belongs to one.
fn of_layer(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("blk.").and_then(|name| name.split_once('.'))
}

impl<'a> Names<'a> {
    /// Creates the names of a model from its stored tensors.
    pub(super) fn new(naming: Naming, sizes: Sizes, tensors: impl Iterator<Item = &'a str>) -> Self {
        let fused = tensors.filter_map(of_layer).filter(|(_, rest)| *rest == FUSED);
        Self { naming, sizes, fused: fused.map(|(layer, _)| layer).collect() }
    }

    /// Returns the names for a stored tensor: one, or one for each expert. An unknown name is kept, after the
    /// name of its layer.
    pub(super) fn place(&self, tensor: &Tensor<'_>) -> Vec<Placed> {
        let whole = |name: String, rest: &str| {
            let stem = rest.strip_suffix(".weight").unwrap_or(rest);
            let done = self.naming.changes.iter().filter(|(of, _)| *of == stem);
            let changes: Vec<Change> = done.map(|(_, change)| *change).collect();
            let mut shape = tensor.shape.clone();
            if changes.contains(&Change::Reshaped) {
                shape = vec![shape.iter().product()];
            }
            Placed { name, shape, bytes: tensor.bytes.clone(), changes }
        };
        if FACTORS.contains(&tensor.name) {
            return Vec::new();
        }
        let Some((layer, rest)) = of_layer(tensor.name) else {
            let name = renamed(&WHOLE, tensor.name).unwrap_or_else(|| tensor.name.to_owned());
            return vec![whole(name, tensor.name)];
        };
        let at = format!("model.layers.{layer}");
        if self.fused.contains(layer)
            && let Some(i) = [FUSED, "ffn_down_exps.weight"].iter().position(|name| *name == rest)
        {
            let name = format!("{at}.{}.{}", self.naming.experts, self.naming.parts.stacks[i]);
            return vec![whole(name, rest)];
        }
        if let Some(experts) = self.experts(tensor, &at, rest) {
            return experts;
        }
        let name = renamed(self.naming.own, rest).or_else(|| renamed(&LAYER, rest));
        let name = name.or_else(|| self.feed_forward(rest));
        let mut placed = whole(format!("{at}.{}", name.as_deref().unwrap_or(rest)), rest);
        if rest == "ffn_gate_inp_shexp.weight" && placed.shape.len() == 1 {
            placed.shape.insert(0, 1);
        }
        vec![placed]
    }

    /// Returns the tensors of single experts in a tensor of all of them.
    fn experts(&self, tensor: &Tensor<'_>, at: &str, rest: &str) -> Option<Vec<Placed>> {
        let (part, suffix) = rest.rsplit_once('.')?;
        let part = part_of(part.strip_suffix("_exps")?, self.naming.parts)?;
        let (experts, shape) = tensor.shape.split_first().filter(|(n, _)| **n == self.sizes.experts)?;
        let size = tensor.bytes.len() / experts;
        let each = (0..*experts).map(|e| {
            let first = tensor.bytes.start + e * size;
            let name = format!("{at}.{}.{e}.{part}.{suffix}", self.naming.experts);
            Placed { name, shape: shape.to_vec(), bytes: first..first + size, changes: Vec::new() }
        });
        (!shape.is_empty()).then(|| each.collect())
    }

    /// Names of routers, of networks for all tokens, and of experts with separate tensors, which converters
    /// wrote before 2024.
    fn feed_forward(&self, rest: &str) -> Option<String> {
        let (name, suffix) = rest.rsplit_once('.')?;
        let name = match name {
            "ffn_gate_inp" => self.naming.router.to_owned(),
            "ffn_gate_inp_shexp" => format!("{}_gate", self.naming.shared),
            name => match (name.strip_suffix("_shexp"), name.split_once('.')) {
                (Some(part), _) => format!("{}.{}", self.naming.shared, part_of(part, PROJ)?),
                (_, Some((part, e))) if e.parse::<u32>().is_ok() => {
                    format!("{}.{e}.{}", self.naming.experts, part_of(part, self.naming.parts)?)
                }
                _ => {
                    let (dense, parts) = self.naming.dense;
                    format!("{dense}.{}", part_of(name, parts)?)
                }
            },
        };
        Some(format!("{name}.{suffix}"))
    }

    /// Axis and order that undo the changes of a tensor of this shape; `None` if its order is already that of
    /// Hugging Face.
    pub(super) fn order(&self, changes: &[Change], shape: &[usize]) -> Option<(Axis, Vec<u32>)> {
        let Sizes { heads, kv_heads, delta: [keys, values, key, value], .. } = self.sizes;
        changes.iter().find_map(|change| match *change {
            Change::Paired { kv } => {
                let heads = if kv { kv_heads } else { heads };
                Some((Axis::Rows, paired(heads, *shape.first()?)?))
            }
            Change::Tiled { axis, after_keys, wide } => {
                let n = if axis == Axis::Rows { shape.first() } else { shape.last() };
                let skip = if after_keys { keys.checked_mul(key)?.checked_mul(2)? } else { 0 };
                let order = tiled([keys, values], skip, if wide { value } else { 1 }, *n?)?;
                Some((axis, order))
            }
            Change::Mapped(_) | Change::Reshaped => None,
        })
    }
}

/// Name of `ffn_gate`, `ffn_up` or `ffn_down`.
fn part_of(name: &str, parts: Parts) -> Option<&'static str> {
    match name {
        "ffn_gate" => Some(parts.gate),
        "ffn_up" => Some(parts.up),
        "ffn_down" => Some(parts.down),
        _ => None,
    }
}

/// Looks a name up in a table, with or without its suffix.
fn renamed(table: &Table, name: &str) -> Option<String> {
    let find = |name: &str| table.iter().find(|(from, _)| *from == name).map(|(_, to)| *to);
    if let Some(whole) = find(name) {
        return Some(whole.to_owned());
    }
    let (stem, suffix) = name.rsplit_once('.')?;
    Some(format!("{}.{suffix}", find(stem)?))
}

/// Order that undoes the permutation for interleaved RoPE. llama.cpp stores channels of a pair next to each
/// other, Hugging Face half a head apart. `None` if the rows do not divide.
fn paired(heads: usize, rows: usize) -> Option<Vec<u32>> {
    let width = rows.checked_div(heads)?;
    if !rows.is_multiple_of(heads) || !width.is_multiple_of(2) {
        return None;
    }
    let half = width / 2;
    (0..rows).map(|r| u32::try_from(r / width * width + 2 * (r % half) + r % width / half).ok()).collect()
}

/// Order that undoes the tiling of value heads of `width` indices, which begin after `skip` others. Head `i`
/// of key `k` is stored as head `i · keys + k`. `None` if the heads do not divide, if they do not add up to
/// `n` indices, or if each key has one head.
fn tiled([keys, values]: [usize; 2], skip: usize, width: usize, n: usize) -> Option<Vec<u32>> {
    let each = values.checked_div(keys)?;
    if !values.is_multiple_of(keys) || each < 2 || values.checked_mul(width)?.checked_add(skip)? != n {
        return None;
    }
    let stored = |head: usize| head % each * keys + head / each;
    let heads = (0..values).flat_map(|head| (0..width).map(move |c| skip + stored(head) * width + c));
    (0..skip).chain(heads).map(|i| u32::try_from(i).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rope_halves_are_separated() {
        assert_eq!(paired(2, 12), Some(vec![0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]));
        assert_eq!((paired(0, 12), paired(5, 12), paired(4, 12)), (None, None, None));
    }

    #[test]
    fn value_heads_of_a_key_are_made_contiguous() {
        // Keys a and b with three heads each are stored as a0 b0 a1 b1 a2 b2.
        assert_eq!(tiled([2, 6], 0, 1, 6), Some(vec![0, 2, 4, 1, 3, 5]));
        assert_eq!(tiled([2, 4], 2, 2, 10), Some(vec![0, 1, 2, 3, 6, 7, 4, 5, 8, 9]));
        for (heads, n) in [([0, 4], 4), ([3, 4], 4), ([2, 4], 5), ([4, 4], 4)] {
            assert_eq!(tiled(heads, 0, 1, n), None, "{heads:?} {n}");
        }
    }
}
