//! Division of attention into work items, and the format and compute type of its cache.

use crate::select::{InputView, NodeView, Result, Role, Selection, Work};
use crate::{CpuTarget, Launch, Unsupported};
use moec_codegen::spec::{Attention, AttentionMerge, CacheWrite};
use moec_codegen::{ComputeType, delta_order, key_order, value_order};
use moec_ir::op::AttentionDesc;
use moec_ir::plan::CacheOrder;
use moec_ir::{Format, StateKind, Type};

/// Queries of a tile in prefill: a multiple of the microkernel's, and enough that tokens of the cache are
/// read seldom.
const QUERIES: usize = 96;
/// Work items that a row of decoding should give, for any number of threads to share.
const ITEMS: usize = 64;
/// Fewest tokens of a full cache that are worth a work item of their own.
const PART: usize = 256;

/// A tensor of the KV cache as selection sees it.
#[derive(Clone, Copy, Debug)]
pub struct CacheView<'a> {
    /// `[slots, heads, ctx, dim]`.
    pub shape: &'a [usize],
    /// Whether it is a ring.
    pub ring: bool,
    /// Storage.
    pub format: Format,
    /// Channels of a block of a head that is stored [rotated](moec_ir::state::rotate); 1: none.
    pub rotated: usize,
    /// Whether attention reads it as values.
    pub values: bool,
}

impl CpuTarget {
    /// Order in which a tensor of the KV cache is stored.
    pub fn cache_order(&self, values: bool) -> CacheOrder {
        if values { value_order(&self.isa) } else { key_order(&self.isa) }
    }

    /// Order in which a recurrent state of `rows` rows is stored.
    pub fn folded_order(&self, kind: StateKind, rows: usize) -> CacheOrder {
        match kind {
            StateKind::Recurrent => delta_order(&self.isa, rows),
            _ => CacheOrder::Rows,
        }
    }

    pub(crate) fn cache_write(s: &mut Selection, node: &NodeView<'_>) -> Result<()> {
        let (_, x_ld) = node.value(1)?;
        let (cache, [_, heads, ctx, dim]) = cache(node, 0)?;
        let (format, rotated, values, ring) = (cache.format, cache.rotated, cache.values, cache.ring);
        // A single row of decoding can be split over threads only by heads.
        let each = if node.one_row_per_sequence { 1 } else { heads };
        let (norm, rotation) = (None, None);
        let spec =
            CacheWrite { heads, dim, ctx, ring, cache: format, rotated, values, norm, rotation, each, x_ld };
        let work = Work::Kernel(spec.into());
        s.launches.push(Launch { work, args: (0..4).map(Role::In).collect() });
        Ok(())
    }

    pub(crate) fn attention(
        &self,
        s: &mut Selection,
        node: &NodeView<'_>,
        desc: &AttentionDesc,
    ) -> Result<()> {
        let (q, q_ld) = node.value(0)?;
        let (cached, [_, _, ctx, _]) = cache(node, 1)?;
        let (format, count) = (cached.format, q.rows());
        let values = if desc.v_from_k { cached } else { cache(node, 2)?.0 };
        let rotated = [cached.rotated, values.rotated];
        let heads = desc.heads;
        let rows =
            if node.one_row_per_sequence { 1 } else { (QUERIES / shared(desc)).clamp(1, count.max(1)) };
        let seen = desc.window.map_or(ctx, |w| w.min(ctx));
        let splits = if node.one_row_per_sequence { parts(desc, seen, count) } else { 1 };
        let compute = match format {
            Format::F32 => ComputeType::F32,
            // Threads widen what they read of the cache.
            _ if self.isa.is_thread() => ComputeType::F32,
            _ => self.compute(Format::Bf16, rows * shared(desc))?,
        };
        let desc = desc.clone();
        let args = |n: usize| (0..n).map(Role::In).collect::<Vec<_>>();
        let sinks = usize::from(desc.sinks);
        let n = node.inputs.len();
        let cols = node.out()?.cols();
        let (v_dim, has_sinks) = (desc.v_dim, desc.sinks);
        if splits == 1 {
            let spec =
                Attention { desc, cache: format, rotated, compute, ctx, rows, splits, q_ld, out_ld: cols };
            s.kernel(spec, args(n), 1);
            return Ok(());
        }
        let out_ld = heads * splits * (v_dim + 2);
        let parts = s.temp(Type::f32([count, out_ld]));
        let spec = Attention { desc, cache: format, rotated, compute, ctx, rows, splits, q_ld, out_ld };
        let mut first = args(n - sinks);
        first.push(parts);
        s.launches.push(Launch { work: Work::Kernel(spec.into()), args: first });
        let merge = AttentionMerge { heads, v_dim, splits, sinks: has_sinks, out_ld: cols };
        let mut then = vec![parts];
        then.extend((n - sinks..n).map(Role::In));
        s.kernel(merge, then, 1);
        Ok(())
    }
}

/// Query heads of a key-value head.
fn shared(desc: &AttentionDesc) -> usize {
    (desc.heads / desc.kv_heads.max(1)).max(1)
}

/// Number of parts into which the tokens of a cache are split, for `rows` rows of different sequences. A
/// part's result is small compared with its input.
fn parts(desc: &AttentionDesc, ctx: usize, rows: usize) -> usize {
    let results = 4 * shared(desc) * desc.v_dim;
    let token = 2 * if desc.v_from_k { desc.qk_dim } else { desc.qk_dim + desc.v_dim };
    let least = PART.max(8 * results / token.max(1));
    let part_count = ITEMS.div_ceil((desc.kv_heads * rows).max(1));
    part_count.min(ctx / least).max(1)
}

fn cache<'a>(node: &NodeView<'a>, i: usize) -> Result<(CacheView<'a>, [usize; 4])> {
    match node.inputs.get(i) {
        Some(&InputView::State(cache)) => match *cache.shape {
            [slots, heads, ctx, dim] => Ok((cache, [slots, heads, ctx, dim])),
            _ => Err(Unsupported("a state needs four axes".into())),
        },
        _ => Err(Unsupported(format!("operand {i} is not a state"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desc(heads: usize, kv_heads: usize, qk_dim: usize, v_dim: usize, v_from_k: bool) -> AttentionDesc {
        let (window, sinks) = (None, false);
        AttentionDesc { heads, kv_heads, qk_dim, v_dim, scale: 1.0, window, chunked: false, sinks, v_from_k }
    }

    #[test]
    fn decode_attention_is_split_across_threads() {
        let olmoe = desc(16, 16, 128, 128, false);
        let qwen = desc(32, 4, 128, 128, false);
        let deepseek = desc(16, 1, 576, 512, true);
        assert_eq!([1, 2, 4, 8].map(|rows| parts(&olmoe, 8192, rows)), [4, 2, 1, 1]);
        assert_eq!([300, 1024, 8192].map(|ctx| parts(&qwen, ctx, 1)), [1, 4, 16]);
        assert_eq!([300, 1024, 8192].map(|ctx| parts(&deepseek, ctx, 1)), [1, 4, 32]);
    }
}
