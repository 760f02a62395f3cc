//! Arguments that a kernel writes.

use bincode::{Decode, Encode};
use std::fmt;

/// Arguments that a step writes, of the first [`Results::MOST`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Encode, Decode)]
pub struct Results(u128);

impl Results {
    /// One more than the largest index.
    pub const MOST: usize = u128::BITS as usize;

    /// The results with these indices; `None` if one is too large.
    pub fn new(indices: impl IntoIterator<Item = usize>) -> Option<Self> {
        let bit = |i| u32::try_from(i).ok().and_then(|i| 1_u128.checked_shl(i));
        indices.into_iter().try_fold(0, |all, i| Some(all | bit(i)?)).map(Self)
    }

    /// The last `count` of this many arguments.
    pub fn last(count: usize, args: usize) -> Self {
        Self::new((args.saturating_sub(count)..args).take(Self::MOST)).unwrap_or_default()
    }

    /// Whether argument `i` is one of them.
    pub fn contains(self, i: usize) -> bool {
        i < Self::MOST && (self.0 >> i) & 1 == 1
    }

    /// Their indices, ascending.
    pub fn indices(self) -> impl Iterator<Item = usize> {
        (0..Self::MOST).filter(move |&i| self.contains(i))
    }

    /// Whether there are some, all of them among this many arguments.
    pub fn are_among(self, args: usize) -> bool {
        self.0 != 0 && Self::MOST - self.0.leading_zeros() as usize <= args
    }
}

impl fmt::Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.indices()).finish()
    }
}
