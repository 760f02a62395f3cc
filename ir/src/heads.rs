//! Attention by key-value heads: the nodes of a layer that compute every head by itself.
//!
//! They begin with the projections of the layer's rows, and end with the projection of attention's result, whose
//! columns are those of the heads. Between the two, a query head meets its own key-value head alone. So a part of
//! the heads is computed with the rows of their projections, with their part of the KV cache, and with their columns
//! of the last projection; the sum of all parts is the whole (Narayanan et al., *Efficient Large-Scale Language
//! Model Training on GPU Clusters Using Megatron-LM*, section 2.3).

use crate::graph::{Graph, NodeId, Operand, StateId, ValueId};
use crate::op::{AttentionDesc, Effect, Op};
use crate::scope::Role;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Nodes of a layer that compute every key-value head by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Key-value heads.
    pub count: usize,
    /// The nodes, in their order; the last one is the [projection](Op::is_projection) of the result.
    pub nodes: Vec<NodeId>,
    /// States that they write and read.
    pub states: Vec<StateId>,
}

impl Heads {
    /// The projection of attention's result.
    pub fn out(&self) -> NodeId {
        self.nodes.last().copied().unwrap_or(NodeId(0))
    }

    /// Heads of every layer that mixes tokens. An error is the reason why they cannot be separated, in words that
    /// follow "attention".
    pub fn by_layer(graph: &Graph) -> BTreeMap<u32, Result<Self, String>> {
        let uses = Uses::of(graph);
        let mut found: BTreeMap<u32, Result<Self, String>> = BTreeMap::new();
        for (at, node) in graph.nodes.iter().enumerate() {
            let Some(layer) = node.scope.layer.filter(|_| node.scope.role().mixes_tokens()) else { continue };
            if let Some(desc) = node.op.attention() {
                let several = || Err("is not the only mixer of its layer".to_owned());
                let heads = if found.contains_key(&layer) { several() } else { uses.heads(at, desc) };
                found.insert(layer, heads);
            } else if node.scope.role() == Role::Mixer {
                let folded = || Err("is a mixer with one state for all tokens".to_owned());
                found.entry(layer).or_insert_with(folded);
            }
        }
        found
    }
}

/// Definitions and readers of a graph's values.
struct Uses<'g> {
    graph: &'g Graph,
    defined: HashMap<ValueId, usize>,
    readers: HashMap<ValueId, Vec<usize>>,
}

impl<'g> Uses<'g> {
    fn of(graph: &'g Graph) -> Self {
        let (mut defined, mut readers) = (HashMap::new(), HashMap::<ValueId, Vec<usize>>::new());
        for (at, node) in graph.nodes.iter().enumerate() {
            defined.extend(node.outputs.iter().map(|&v| (v, at)));
            for input in &node.inputs {
                if let Operand::Value(v) = *input {
                    readers.entry(v).or_default().push(at);
                }
            }
        }
        Self { graph, defined, readers }
    }

    /// Heads of the attention node `at`: all that its operands and its result are connected with, up to projections.
    fn heads(&self, at: usize, desc: &AttentionDesc) -> Result<Heads, String> {
        let (graph, count) = (self.graph, desc.kv_heads);
        let layer = graph.nodes[at].scope.layer;
        let together = |op: &Op| format!("has `{}`, which takes all heads together", op.name());
        if desc.v_from_k {
            return Err("has one row of keys and values for all heads".to_owned());
        }
        let (mut nodes, mut states) = (BTreeSet::new(), BTreeSet::new());
        let (mut out, mut seen) = (None, BTreeSet::new());
        let mut open = vec![at];
        while let Some(at) = open.pop() {
            if !nodes.insert(at) {
                continue;
            }
            let node = &graph.nodes[at];
            node.op.of_heads(1, count).ok_or_else(|| together(&node.op))?;
            if node.scope.layer != layer {
                return Err("shares keys or values with another layer".to_owned());
            }
            let mut values = if out == Some(at) { Vec::new() } else { node.outputs.clone() };
            for &input in node.op.head_operands() {
                match node.inputs.get(input) {
                    Some(&Operand::Value(v)) => values.push(v),
                    _ => return Err("shares keys or values with another layer".to_owned()),
                }
            }
            if let (Effect::Writes, Some(&Operand::State(s))) = (node.op.effect(), node.inputs.first()) {
                states.insert(s);
            }
            for v in values.into_iter().filter(|v| seen.insert(*v)) {
                let ty = graph.ty(v);
                let channels = if ty.shape.len() == 2 { ty.cols() } else { count };
                if !channels.is_multiple_of(count) || v == graph.output {
                    return Err(together(&node.op));
                }
                open.push(*self.defined.get(&v).ok_or_else(|| together(&node.op))?);
                for &reader in self.readers.get(&v).into_iter().flatten() {
                    let by = &graph.nodes[reader];
                    let operands = (0..).zip(&by.inputs).filter(|(_, o)| **o == Operand::Value(v));
                    let mut operands = operands.map(|(i, _)| i);
                    let is_out = by.op.is_projection();
                    if is_out && *out.get_or_insert(reader) != reader {
                        return Err("has several projections of its result".to_owned());
                    }
                    if !is_out && !operands.all(|i| by.op.head_operands().contains(&i)) {
                        return Err(together(&by.op));
                    }
                    open.push(reader);
                }
            }
        }
        let reads = |s: &StateId| {
            let of = |n: &usize| graph.nodes[*n].inputs.contains(&Operand::State(*s));
            (0..graph.nodes.len()).filter(of).all(|n| nodes.contains(&n))
        };
        if !states.iter().all(reads) {
            return Err("shares keys or values with another layer".to_owned());
        }
        let last = nodes.last().copied();
        if out.is_none() || out != last {
            return Err("has no projection of its result after all others".to_owned());
        }
        let nodes = nodes.into_iter().map(|n| NodeId(n as u32)).collect();
        Ok(Heads { count, nodes, states: states.into_iter().collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse_module;

    /// A layer with these nodes between its projections and its end, and attention with these attributes.
    fn of(nodes: &str) -> Result<Heads, String> {
        let text = format!(
            "weight @e: f32[16, 32] embeddings = t\"e\"[16, 32]\nweight @w: f32[32, 32] attention = t\"w\"[32, 32]\n\
             state $k: f32[1, 2, 32, 16]\nstate $v: f32[1, 2, 32, 16]\n\
             entry prefill[4] -> %14 {{\n  inputs %0: i32[4], %1: i32[4], %2: i32[4], %3: i32[4]\n  scope embed\n  \
             %4: f32[4, 32] = embed %0, @e\n  scope layers.0.attn\n{nodes}  scope head\n  \
             %13: f32[4, 32] = gather_rows %12, %3\n  %14: f32[4, 16] = linear %13, @e\n}}\n"
        );
        let module = parse_module(&text).unwrap();
        Heads::by_layer(&module.entries[0]).remove(&0).unwrap()
    }

    const ATTENTION: &str = "{heads = 2, kv_heads = 2, qk_dim = 16, v_dim = 16, scale = 0.25}";

    fn plain(query: &str, value: &str, out: &str) -> String {
        format!(
            "  %5: f32[4, 32] = linear %4, @w\n  {query}\n  %7: f32[4, 32] = linear %4, @w\n  \
             %8: f32[1, 2, 32, 16] = cache_write $k, %7, %1, %2\n  {value}\n  \
             %10: f32[1, 2, 32, 16] = cache_write $v, %9, %1, %2\n  \
             %11: f32[4, 32] = attention %6, %8, %10, %1, %2 {ATTENTION}\n  {out}\n"
        )
    }

    const VALUE: &str = "%9: f32[4, 32] = linear %4, @w";
    const OUT: &str = "%12: f32[4, 32] = linear %11, @w";

    #[test]
    fn heads_are_from_projection_to_projection() {
        let norm = "%6: f32[4, 32] = rms_norm %5 {eps = 1e-5, groups = 2}";
        let heads = of(&plain(norm, VALUE, OUT)).unwrap();
        assert_eq!((heads.count, heads.states.len(), heads.out()), (2, 2, NodeId(8)));
        assert_eq!(heads.nodes, (1..9).map(NodeId).collect::<Vec<_>>());
    }

    #[test]
    fn operators_over_all_heads_are_named() {
        let norm = "%6: f32[4, 32] = rms_norm %5 {eps = 1e-5, groups = 1}";
        let wrong = |nodes: &str| of(nodes).unwrap_err();
        let together = "has `rms_norm`, which takes all heads together";
        assert_eq!(wrong(&plain(norm, VALUE, OUT)), together);
        let scale = "%6: f32[4, 32] = scale %5 {factor = 2.0}";
        let added = "%12: f32[4, 32] = add %11, %4";
        assert_eq!(wrong(&plain(scale, VALUE, added)), "has several projections of its result");
        assert!(of(&plain(scale, "%9: f32[4, 32] = scale %7 {factor = 0.5}", OUT)).is_ok());
    }
}
