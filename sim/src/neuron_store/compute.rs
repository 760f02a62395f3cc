//! Arithmetic of a step.

/// Cluster to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// The thread that computes it.
    pub thread: usize,
    /// Position of the matrix in [`NeuronStore::begin`](super::NeuronStore::begin).
    pub place: usize,
    /// The matrix.
    pub matrix: u32,
    /// Cluster of the matrix.
    pub cluster: u32,
}

/// A neuron with the bytes of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row<'a> {
    /// The neuron.
    pub neuron: u32,
    /// Its first part.
    pub gate: &'a [u8],
    /// Its second part; empty where a neuron is one read, and before it is read.
    pub up_down: &'a [u8],
}

/// The arithmetic of a step. Clusters are computed in parallel, each by one thread at a time.
pub trait NeuronCompute: Sync {
    /// Pred: removes neurons that cannot be active from `neurons`, which holds those of the cluster in order.
    fn predict(&self, work: Work, neurons: &mut Vec<u32>) {
        let _ = (work, neurons);
    }

    /// GC: gates of rows. Adds the active neurons to `active`, in order.
    fn gate(&self, work: Work, rows: &[Row<'_>], active: &mut Vec<u32>);

    /// UDC: up and down of active rows.
    fn up_down(&self, work: Work, rows: &[Row<'_>]);
}
