//! Gated feed-forward networks by clusters of neurons, and groups of them.
//!
//! A neuron is a row of gate and up with its column of down. Neurons are sorted, the hottest first, and a
//! cluster is a run of them. A graph of batch size `b` computes the first few clusters (PowerInfer-2, §4.1.2:
//! the share of the NPU grows with the batch). Its result is a part of the layer's: the CPU adds the
//! remaining neurons. So graphs of all batch sizes share the weights of their common clusters, and down,
//! whose columns are neurons, is cut at cluster ends.

use super::glu::join;
use super::projection::Projection;
use crate::net::{Network, NetworkBuilder, NetworkError, Op, TensorId};
use moec_ir::Glu;

type Result<T> = std::result::Result<T, NetworkError>;

/// A run of neurons.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// Begins the names of its tensors.
    pub name: String,
    /// `[n, H]`
    pub gate: Projection,
    /// `[n, H]`
    pub up: Projection,
    /// `[H, n]`
    pub down: Projection,
}

/// A gated network.
#[derive(Clone, Debug, PartialEq)]
pub struct Ffn {
    /// Channels `H` of a row.
    pub hidden: usize,
    /// Function that joins gate and up.
    pub glu: Glu,
    /// Its neurons, hot to cold.
    pub clusters: Vec<Cluster>,
}

impl Cluster {
    /// Appends `down(glu(gate(x), up(x)))`.
    fn apply(&self, b: &mut NetworkBuilder, glu: Glu, x: TensorId) -> Result<TensorId> {
        let at = |what: &str| format!("{}.{what}", self.name);
        let gate = self.gate.apply(b, &at("gate"), x)?;
        let up = self.up.apply(b, &at("up"), x)?;
        let h = join(b, &self.name, glu, gate, up)?;
        self.down.apply(b, &at("down"), h)
    }
}

impl Ffn {
    /// The sum of its first `clusters` clusters.
    fn apply(&self, b: &mut NetworkBuilder, name: &str, clusters: usize, x: TensorId) -> Result<TensorId> {
        let mut sum: Option<TensorId> = None;
        for (i, cluster) in self.clusters.iter().take(clusters).enumerate() {
            let y = cluster.apply(b, self.glu, x)?;
            sum = Some(match sum {
                Some(before) => b.op(&format!("{name}.to{i}"), Op::Add, &[before, y])?,
                None => y,
            });
        }
        sum.ok_or_else(|| NetworkError::whole(name, "it has no cluster of neurons"))
    }

    /// The graph of a number of rows: `x[rows, H] → y[rows, H]`, what the first `clusters` clusters add.
    ///
    /// # Errors
    /// Weights of other shapes, or no cluster.
    pub fn graph(&self, name: &str, rows: usize, clusters: usize) -> Result<Network> {
        let mut b = NetworkBuilder::new(name);
        let x = b.input("x", &[rows, self.hidden])?;
        let y = self.apply(&mut b, "sum", clusters, x)?;
        b.finish(&[y])
    }
}

/// Experts of a layer, each with rows of its own: one launch (NPUMoE, §4.2).
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// The experts.
    pub experts: Vec<Ffn>,
}

impl Group {
    /// The graph for a number of rows for each expert: `x[experts · rows, H] → y`, of the same shape. Rows of
    /// an expert are contiguous.
    ///
    /// # Errors
    /// Weights of other shapes, or no expert.
    pub fn graph(&self, name: &str, rows: usize) -> Result<Network> {
        let none = || NetworkError::whole(name, "it has no experts");
        let hidden = self.experts.first().ok_or_else(none)?.hidden;
        let mut b = NetworkBuilder::new(name);
        let x = b.input("x", &[self.experts.len() * rows, hidden])?;
        let mut parts = Vec::new();
        for (e, expert) in self.experts.iter().enumerate() {
            let own = match self.experts.len() {
                1 => x,
                _ => b.part(&format!("x{e}"), x, 0, e * rows, rows)?,
            };
            parts.push(expert.apply(&mut b, &format!("sum{e}"), usize::MAX, own)?);
        }
        let y = match *parts {
            [one] => one,
            _ => b.op("y", Op::Concat { axis: 0 }, &parts)?,
        };
        b.finish(&[y])
    }
}
