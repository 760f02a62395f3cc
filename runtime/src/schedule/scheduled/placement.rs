//! Placement of the experts of a layer.

use super::schedule::Action;
use crate::schedule::error::ScheduleError;

/// Layout of an expert's weights in the host's memory (TriMoE, §4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Interleaved over all memories: the fastest layout for reads of the host.
    Striped,
    /// Whole in one memory, whose NDP unit can compute it.
    Local(u16),
}

impl Layout {
    /// The memory that holds all of it, if there is one.
    pub fn memory(self) -> Option<u16> {
        match self {
            Self::Striped => None,
            Self::Local(memory) => Some(memory),
        }
    }
}

/// Placement of one expert: its layout in the host's memory, and whether the GPU has a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Layout in the host's memory.
    pub layout: Layout,
    /// Whether it is resident in the GPU's memory.
    pub cached: bool,
}

/// Placements of the routed experts of one layer. Shared experts are not included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    places: Vec<Place>,
    frames: usize,
    cached: usize,
}

impl Placement {
    /// Creates a placement from one for each expert.
    ///
    /// # Errors
    /// [`ScheduleError::Memory`] for a memory that is not below `memories`; [`ScheduleError::Frames`] if more
    /// are cached than the GPU has frames for a layer.
    pub fn new(places: Vec<Place>, memories: usize, frames: usize) -> Result<Self, ScheduleError> {
        for (expert, place) in places.iter().enumerate() {
            if let Some(memory) = place.layout.memory().filter(|&d| usize::from(d) >= memories) {
                return Err(ScheduleError::Memory { expert, memory, memories });
            }
        }
        let cached = places.iter().filter(|p| p.cached).count();
        if cached > frames {
            return Err(ScheduleError::Frames { cached, frames });
        }
        Ok(Self { places, frames, cached })
    }

    /// All experts striped, none cached.
    pub fn striped(experts: usize, frames: usize) -> Self {
        let place = Place { layout: Layout::Striped, cached: false };
        Self { places: vec![place; experts], frames, cached: 0 }
    }

    /// Placements by expert.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Frames of the GPU's memory for experts of this layer.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Removes the free frames.
    pub(crate) fn remove_free_frames(&mut self) {
        self.frames = self.cached;
    }

    /// Number of cached experts.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Changes the layout of an expert.
    pub(crate) fn relayout(&mut self, expert: usize, to: Layout) {
        self.places[expert].layout = to;
    }

    /// Sets the place of an expert.
    pub(crate) fn set(&mut self, expert: usize, place: Place) {
        self.cached = self.cached + usize::from(place.cached) - usize::from(self.places[expert].cached);
        self.places[expert] = place;
    }

    /// An expert is at the end of its move.
    pub(crate) fn arrive(&mut self, action: Action) {
        match action {
            Action::Prefetch { expert, .. } => self.prefetch(expert.into(), None),
            Action::Relayout { expert, to } => self.relayout(expert.into(), to),
            Action::Rebalance { expert, to, .. } => self.relayout(expert.into(), Layout::Local(to)),
        }
    }

    /// Caches an expert on the GPU; if there is no free frame, evicts another one for it.
    pub(crate) fn prefetch(&mut self, expert: usize, evict: Option<usize>) {
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
