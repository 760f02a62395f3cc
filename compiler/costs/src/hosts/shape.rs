//! Sizes of a model, as far as hosts divide it: bytes of weights in their formats, and of messages.

use moec_ir::heads::Heads;
use moec_ir::{EntryKind, Format, Graph, Module, Operand, StateDecl, Type, ValueId, Weight};
use std::collections::BTreeSet;

/// Weights that rows are multiplied by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Product {
    /// Bytes that a call reads.
    pub bytes: u64,
    /// Numbers.
    pub numbers: u64,
}

impl Product {
    /// The rest of it without a part.
    #[must_use]
    pub fn without(self, part: Self) -> Self {
        let Self { bytes, numbers } = self;
        Self { bytes: bytes.saturating_sub(part.bytes), numbers: numbers.saturating_sub(part.numbers) }
    }
}

/// A model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shape {
    /// Layers, in order.
    pub layers: Vec<Layer>,
    /// Weights outside of layers that every call reads: those of the head.
    pub rest: Product,
    /// Bytes in memory outside of layers, with the table of embeddings.
    pub rest_stored: u64,
    /// Bytes of a row of the residual stream.
    pub row_bytes: u64,
}

/// A layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layer {
    /// Weights that every call reads: all but those of routed experts.
    pub own: Product,
    /// Bytes of these and of its states.
    pub stored: u64,
    /// Its routed experts.
    pub experts: Option<Experts>,
    /// Its attention, or why that cannot be cut by heads ([`Heads::by_layer`]); none without a mixer of tokens.
    pub attention: Option<Result<Attention, String>>,
}

/// Attention of a layer that can be cut by heads, and what is sent for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attention {
    /// Key-value heads.
    pub heads: usize,
    /// Weights of its projections, which every call reads.
    pub product: Product,
    /// Bytes of these and of its states.
    pub stored: u64,
    /// Bytes of a row.
    pub row: u64,
    /// Bytes of its result for a row.
    pub result: u64,
}

impl Attention {
    /// The largest part of a number that one of so many hosts has: that of the most heads.
    pub fn share(&self, of: u64, hosts: usize) -> u64 {
        let heads = self.heads.max(1);
        of * heads.div_ceil(hosts.max(1)) as u64 / heads as u64
    }

    /// Its weights on such a host.
    pub fn product_share(&self, hosts: usize) -> Product {
        let Product { bytes, numbers } = self.product;
        Product { bytes: self.share(bytes, hosts), numbers: self.share(numbers, hosts) }
    }

    /// Bytes to a host with some of the heads and from it, for so many rows.
    pub fn message(&self, rows: f64) -> [f64; 2] {
        [rows * self.row as f64, rows * self.result as f64]
    }
}

/// Routed experts of a layer, and what is sent for them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Experts {
    /// Experts.
    pub count: usize,
    /// Experts per token.
    pub k: u32,
    /// Bytes of one.
    pub bytes: u64,
    /// Numbers of one.
    pub numbers: u64,
    /// Bytes of a row.
    pub row: u64,
    /// Bytes of the weights of a row's experts.
    pub weights: u64,
    /// Bytes of the result of a row, of one expert or of the sum of several.
    pub result: u64,
    /// Bytes of the table of choices of one row.
    pub table: u64,
}

impl Experts {
    /// Bytes to a host with a slice of the experts and from it, for so many rows: it sums its own results.
    pub fn slice_message(&self, rows: f64) -> [f64; 2] {
        [rows * (self.row + self.weights) as f64 + self.table as f64, rows * self.result as f64]
    }

    /// The same for a host with one of so many equal shares of whole experts: the first host sums the results, in the
    /// order of the router's choices.
    pub fn owner_message(&self, rows: f64, hosts: usize) -> [f64; 2] {
        let results = rows * f64::from(self.k) / hosts.max(1) as f64;
        [rows * self.row as f64 + self.table as f64, results * self.result as f64]
    }

    /// Microseconds less to read the experts of a token, if each of so many hosts reads a slice of them at
    /// `gb_per_s` 10⁹ bytes per second.
    pub fn saved_us(&self, hosts: usize, gb_per_s: f64) -> f64 {
        let bytes = f64::from(self.k) * self.bytes as f64;
        bytes * (1.0 - 1.0 / hosts.max(1) as f64) / (gb_per_s * 1e3)
    }
}

impl Shape {
    /// Sizes of a Graph whose weights have their formats: those of the entry point that decodes fewest sequences.
    /// `cache` is the format of states that are cached rows.
    pub fn of(module: &Module, cache: Format) -> Self {
        let decodes = |g: &&Graph| matches!(g.kind, EntryKind::Decode(_));
        let fewest = module.entries.iter().filter(decodes).min_by_key(|g| g.kind.rows());
        let Some(graph) = fewest else { return Self::default() };
        let mut shape = Self::default();
        let layers =
            graph.nodes.iter().filter_map(|n| n.scope.layer).max().map_or(0, |last| last as usize + 1);
        shape.layers.resize(layers, Layer::default());
        let (mut read, mut stored, mut states) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let rows = graph.kind.rows().max(1) as u64;
        for node in &graph.nodes {
            let layer = node.scope.layer.and_then(|at| shape.layers.get_mut(at as usize));
            let ffn = node.op.expert_ffn().is_some();
            let mut own = Product::default();
            let mut kept = 0;
            let mut experts = None;
            for input in &node.inputs {
                match *input {
                    Operand::Weight(id) => {
                        let weight = module.weight(id);
                        let product = product(weight);
                        if ffn {
                            let sum: &mut Product = experts.get_or_insert_default();
                            if stored.insert(id) {
                                *sum = Product {
                                    bytes: sum.bytes + product.bytes,
                                    numbers: sum.numbers + product.numbers,
                                };
                            }
                            continue;
                        }
                        kept += if stored.insert(id) { product.bytes } else { 0 };
                        if !node.op.is_embedding() && read.insert(id) {
                            own.bytes += product.bytes;
                            own.numbers += product.numbers;
                        }
                    }
                    Operand::State(id) if states.insert(id) => kept += state_bytes(module.state(id), cache),
                    Operand::State(_) | Operand::Value(_) => {}
                }
            }
            if node.op.is_embedding() {
                let row = node.outputs.first().map_or(0, |&v| type_bytes(graph.ty(v)));
                shape.row_bytes = row / rows;
            }
            let Some(layer) = layer else {
                shape.rest = sum(shape.rest, own);
                shape.rest_stored += kept;
                continue;
            };
            layer.own = sum(layer.own, own);
            layer.stored += kept;
            if let Some(router) = node.op.router() {
                let experts = layer.experts.get_or_insert_default();
                (experts.count, experts.k) = (router.experts, router.k as u32);
            }
            if let (Some(of), Some(experts)) = (experts, &mut layer.experts) {
                let count = experts.count.max(1) as u64;
                experts.bytes += of.bytes / count;
                experts.numbers += of.numbers / count;
                let [row, table, weights, result] = messages(graph, &node.inputs, &node.outputs);
                (experts.row, experts.table) = (row / rows, table);
                (experts.weights, experts.result) = (weights / rows, result / rows);
            }
        }
        // Routers whose experts are not computed as whole matrices have no slices and no owners.
        shape.layers.iter_mut().for_each(|l| l.experts = l.experts.take().filter(|e| e.bytes > 0));
        for (layer, heads) in Heads::by_layer(graph) {
            if let Some(of) = shape.layers.get_mut(layer as usize) {
                of.attention = Some(heads.map(|heads| attention(module, graph, &heads, cache)));
            }
        }
        shape
    }
}

/// Attention of these heads.
fn attention(module: &Module, graph: &Graph, heads: &Heads, cache: Format) -> Attention {
    let rows = graph.kind.rows().max(1) as u64;
    let of_row = |v: Option<&ValueId>| v.map_or(0, |&v| type_bytes(graph.ty(v)) / rows);
    let mut own = Attention { heads: heads.count, ..Attention::default() };
    let nodes = heads.nodes.iter().filter_map(|id| graph.nodes.get(id.0 as usize));
    for node in nodes.filter(|n| n.op.is_projection()) {
        let weights = node.inputs.iter().filter_map(|input| match *input {
            Operand::Weight(id) => Some(product(module.weight(id))),
            Operand::Value(_) | Operand::State(_) => None,
        });
        own.product = weights.fold(own.product, sum);
        if let (0, Some(&Operand::Value(x))) = (own.row, node.inputs.first()) {
            own.row = of_row(Some(&x));
        }
        own.result = of_row(node.outputs.first());
    }
    let states: u64 = heads.states.iter().map(|&s| state_bytes(module.state(s), cache)).sum();
    Attention { stored: own.product.bytes + states, ..own }
}

/// Bytes of the rows, of the table, of the weights of choices, and of the sums of experts with these operands.
fn messages(graph: &Graph, inputs: &[Operand], outputs: &[ValueId]) -> [u64; 4] {
    let bytes = |operand: Option<&Operand>| match operand {
        Some(&Operand::Value(v)) => type_bytes(graph.ty(v)),
        _ => 0,
    };
    // What adds the experts' results reads them, the table, and the weights.
    let slots = outputs.first().map(|&v| Operand::Value(v));
    let combine = graph.nodes.iter().find(|n| slots.is_some() && n.inputs.first() == slots.as_ref());
    let weights = combine.map_or(0, |n| bytes(n.inputs.get(2)));
    let sums = combine.and_then(|n| n.outputs.first()).map_or(0, |&v| type_bytes(graph.ty(v)));
    [bytes(inputs.first()), bytes(inputs.get(1)), weights, sums]
}

fn sum(a: Product, b: Product) -> Product {
    Product { bytes: a.bytes + b.bytes, numbers: a.numbers + b.numbers }
}

/// Bytes of a weight in its format, without padding.
fn product(weight: &Weight) -> Product {
    let numbers: u64 = weight.shape.iter().map(|&d| d as u64).product();
    let cols = weight.shape.last().copied().unwrap_or(0);
    let rows = if cols == 0 { 0 } else { numbers / cols as u64 };
    Product { bytes: rows * weight.format.row_bytes(cols) as u64, numbers }
}

/// Bytes of a state: cached rows have a format, what accumulates is of f32.
fn state_bytes(state: &StateDecl, cache: Format) -> u64 {
    let numbers: u64 = state.ty.shape.iter().map(|&d| d as u64).product();
    let dim = state.ty.shape.last().copied().unwrap_or(0);
    if dim == 0 || state.kind.needs_snapshots() {
        return type_bytes(&state.ty);
    }
    numbers / dim as u64 * cache.row_bytes(dim) as u64
}

fn type_bytes(ty: &Type) -> u64 {
    ty.shape.iter().map(|&d| d as u64).product::<u64>() * ty.dtype.bytes() as u64
}
