//! Where the experts of a layer are.

use super::error::MakespanError;

/// How an expert's weights lie in the host's memory (TriMoE, §4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Interleaved over all DIMMs: what the host reads fastest.
    Striped,
    /// Whole on one DIMM, whose near-data unit can compute it.
    Local(u16),
}

impl Layout {
    /// The DIMM that has all of it.
    pub fn dimm(self) -> Option<u16> {
        match self {
            Self::Striped => None,
            Self::Local(dimm) => Some(dimm),
        }
    }
}

/// Where one expert is: its home in the host's memory, and whether the GPU has a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// How it lies in the host's memory.
    pub layout: Layout,
    /// Whether it is resident in the GPU's memory.
    pub cached: bool,
}

/// Where the routed experts of one layer are. Shared experts are outside of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    places: Vec<Place>,
    frames: usize,
    cached: usize,
}

impl Placement {
    /// With a place for each expert.
    ///
    /// # Errors
    /// [`MakespanError::Dimm`] for one on a DIMM of none of `dimms`, [`MakespanError::Frames`] where more are
    /// cached than the GPU has frames for a layer.
    pub fn new(places: Vec<Place>, dimms: usize, frames: usize) -> Result<Self, MakespanError> {
        for (expert, place) in places.iter().enumerate() {
            if let Some(dimm) = place.layout.dimm().filter(|&d| usize::from(d) >= dimms) {
                return Err(MakespanError::Dimm { expert, dimm, dimms });
            }
        }
        let cached = places.iter().filter(|p| p.cached).count();
        if cached > frames {
            return Err(MakespanError::Frames { cached, frames });
        }
        Ok(Self { places, frames, cached })
    }

    /// All striped, none cached.
    pub fn striped(experts: usize, frames: usize) -> Self {
        let place = Place { layout: Layout::Striped, cached: false };
        Self { places: vec![place; experts], frames, cached: 0 }
    }

    /// Places by expert.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Frames of the GPU's memory for experts of this layer.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// How many experts are cached.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Gives an expert another layout.
    pub(super) fn relayout(&mut self, expert: usize, to: Layout) {
        self.places[expert].layout = to;
    }

    /// The GPU takes an expert, and drops another for it where it has no frame left.
    pub(super) fn prefetch(&mut self, expert: usize, evict: Option<usize>) {
        if let Some(evict) = evict {
            self.cached -= usize::from(self.places[evict].cached);
            self.places[evict].cached = false;
        }
        if self.cached < self.frames && !self.places[expert].cached {
            self.cached += 1;
            self.places[expert].cached = true;
        }
    }
}
