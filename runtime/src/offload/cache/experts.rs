//! Cacheable experts: the routed experts of every layer, with their sizes.

use super::error::CacheError;
use super::policy::Id;

/// The routed experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedLayer {
    /// Experts.
    pub experts: usize,
    /// Experts per token.
    pub k: usize,
    /// Bytes of one expert.
    pub bytes: u64,
}

/// One expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Layer, counted over those with routed experts.
    pub layer: u16,
    /// Expert.
    pub expert: u16,
}

/// All routed experts of a model. Policies number them consecutively, layer after layer ([`Id`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertIndex {
    layers: Vec<CachedLayer>,
    /// Number of the first expert of every layer, and of all.
    first: Vec<Id>,
}

/// Most experts; far past any model.
const MOST: usize = 1 << 20;

impl ExpertIndex {
    /// The experts of these layers.
    ///
    /// # Errors
    /// [`CacheError::Experts`] for no layers, layers without experts or bytes, more experts per token than
    /// there are, or more than 2²⁰ in all.
    pub fn new(layers: &[CachedLayer]) -> Result<Self, CacheError> {
        let wrong = |what: String| Err(CacheError::Experts(what));
        let mut first = vec![0];
        let mut all = 0_usize;
        for (i, l) in layers.iter().enumerate() {
            if l.k == 0 || l.k > l.experts || l.experts > usize::from(u16::MAX) || l.bytes == 0 {
                let CachedLayer { experts, k, bytes } = l;
                return wrong(format!(
                    "layer {i} cannot have {experts} experts of {bytes} bytes, {k} per token"
                ));
            }
            all += l.experts;
            if all > MOST {
                return wrong(format!("more than {MOST} experts"));
            }
            first.push(all as Id);
        }
        let total =
            layers.iter().try_fold(0_u64, |sum, l| sum.checked_add(l.bytes.checked_mul(l.experts as u64)?));
        if layers.is_empty() || layers.len() > usize::from(u16::MAX) || total.is_none() {
            return wrong(format!("{} layers with routed experts, or sizes past 64 bits", layers.len()));
        }
        Ok(Self { layers: layers.to_vec(), first })
    }

    /// `layers` equal layers.
    ///
    /// # Errors
    /// As [`ExpertIndex::new`].
    pub fn uniform(layers: usize, layer: CachedLayer) -> Result<Self, CacheError> {
        Self::new(&vec![layer; layers.min(MOST)])
    }

    /// Layers.
    pub fn layers(&self) -> &[CachedLayer] {
        &self.layers
    }

    /// Experts of all layers.
    pub fn count(&self) -> usize {
        self.first.last().map_or(0, |&n| n as usize)
    }

    /// Bytes of all experts.
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(|l| l.bytes * l.experts as u64).sum()
    }

    /// Bytes of an expert, if all have the same.
    pub fn slot(&self) -> Option<u64> {
        let bytes = self.layers.first()?.bytes;
        self.layers.iter().all(|l| l.bytes == bytes).then_some(bytes)
    }

    /// Number of an expert.
    ///
    /// # Errors
    /// [`CacheError::NoExpert`].
    pub fn id(&self, layer: usize, expert: usize) -> Result<Id, CacheError> {
        match self.layers.get(layer) {
            Some(l) if expert < l.experts => Ok(self.first[layer] + expert as Id),
            _ => Err(CacheError::NoExpert { layer, expert }),
        }
    }

    /// Index of one layer alone, as if it were the whole model.
    pub(super) fn only(&self, layer: usize) -> Self {
        let of = self.layers[layer];
        Self { layers: vec![of], first: vec![0, of.experts as Id] }
    }

    /// Numbers of the experts of a layer.
    pub fn ids(&self, layer: usize) -> std::ops::Range<Id> {
        self.first[layer]..self.first[layer + 1]
    }
}
