//! Loads of the experts, chunk by chunk.
//!
//! The layers' totals do not show how an expert's load deviates from its mean, which experts are busy
//! together, or the order of chunks. Simulations take these from the trace.

use super::{MOST, ProfileFault, Routing};
use bincode::{Decode, Encode};

/// Limit of the numbers in a trace. Past it no chunks are added; the totals still count everything.
const MOST_LOADS: usize = 1 << 26;

/// Loads of every chunk that was read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct Trace {
    /// Tokens of a whole chunk; 0: nothing was recorded.
    pub chunk: u32,
    /// Texts that were each read as one sequence. Their order has no meaning.
    pub sequences: Vec<Vec<Chunk>>,
}

/// Loads of one chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub struct Chunk {
    /// Tokens; the last chunk of a sequence may have fewer than a whole one.
    pub tokens: u32,
    /// Tokens that chose each expert, layer after layer.
    pub loads: Vec<u16>,
}

impl Trace {
    /// An empty trace of chunks of `chunk` tokens.
    pub fn new(chunk: u32) -> Self {
        Self { chunk, sequences: Vec::new() }
    }

    /// Starts a sequence.
    pub fn begin(&mut self) {
        self.sequences.push(Vec::new());
    }

    /// Adds a chunk to the current sequence.
    pub fn push(&mut self, chunk: Chunk) {
        let held: usize = self.sequences.iter().map(Vec::len).sum::<usize>() * chunk.loads.len();
        if held + chunk.loads.len() <= MOST_LOADS
            && let Some(last) = self.sequences.last_mut()
        {
            last.push(chunk);
        }
    }

    /// Number of all chunks.
    pub fn chunks(&self) -> usize {
        self.sequences.iter().map(Vec::len).sum()
    }

    /// Merges two. Sequences are sorted, so that the order of the traces does not matter. `None` if chunk
    /// sizes differ.
    pub(super) fn merge(&self, other: &Self) -> Option<Self> {
        let chunk = match (self.chunk, other.chunk) {
            (0, c) | (c, 0) => c,
            (a, b) if a == b => a,
            _ => return None,
        };
        let mut sequences: Vec<_> = self.sequences.iter().chain(&other.sequences).cloned().collect();
        sequences.sort();
        Some(Self { chunk, sequences })
    }

    /// Checks a trace against the layers that it belongs to.
    pub(super) fn check(&self, layers: &[Routing]) -> Result<(), ProfileFault> {
        if self.sequences.len() > MOST || self.chunk > u32::from(u16::MAX) {
            return Err(format!("{} sequences of chunks of {} tokens", self.sequences.len(), self.chunk));
        }
        let width: usize = layers.iter().map(|l| l.chosen.len()).sum();
        let mut sums = vec![0_u64; width];
        for chunk in self.sequences.iter().flatten() {
            if chunk.tokens == 0 || chunk.tokens > self.chunk || chunk.loads.len() != width {
                return Err(format!("a chunk of {} tokens with {} loads", chunk.tokens, chunk.loads.len()));
            }
            let mut rest = chunk.loads.as_slice();
            for layer in layers {
                let (own, further) = rest.split_at(layer.chosen.len());
                rest = further;
                let sum: u64 = own.iter().map(|&n| u64::from(n)).sum();
                if sum != u64::from(chunk.tokens) * u64::from(layer.k) {
                    return Err(format!("layer {}: {sum} choices in a chunk", layer.layer));
                }
            }
            sums.iter_mut().zip(&chunk.loads).for_each(|(s, &n)| *s += u64::from(n));
        }
        let chosen = layers.iter().flat_map(|l| &l.chosen);
        if sums.iter().zip(chosen).all(|(s, c)| s <= c) {
            Ok(())
        } else {
            Err("its chunks hold more choices than its layers".to_owned())
        }
    }
}
