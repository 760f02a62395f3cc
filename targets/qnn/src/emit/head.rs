//! The head: rows to logits, the vocabulary in parts where a graph does not hold it whole.

use super::projection::Projection;
use crate::net::{Network, NetworkBuilder, NetworkError};

/// A part of the head.
#[derive(Clone, Debug, PartialEq)]
pub struct Head {
    /// Channels of a row.
    pub hidden: usize,
    /// Entries of the vocabulary, in parts; each gives a result of its own.
    pub parts: Vec<Projection>,
}

impl Head {
    /// The graph of a number of rows: `x[rows, H] → logits0[rows, n], …`.
    ///
    /// # Errors
    /// Weights of other shapes, or no part.
    pub fn graph(&self, name: &str, rows: usize) -> Result<Network, NetworkError> {
        let mut b = NetworkBuilder::new(name);
        let x = b.input("x", &[rows, self.hidden])?;
        let parts = self.parts.iter().enumerate();
        let logits =
            parts.map(|(i, p)| p.apply(&mut b, &format!("logits{i}"), x)).collect::<Result<Vec<_>, _>>()?;
        b.finish(&logits)
    }
}
