//! Order of events: vector clocks of warps and lanes that meet at barriers.

/// For each party, its knowledge of the others' clocks. An event of `j` at its clock `c` precedes all later
/// actions of `i` if `i` knows a clock of `j` above `c`.
pub(super) struct Clocks {
    parties: usize,
    seen: Vec<u32>,
}

impl Clocks {
    pub(super) fn new(parties: usize) -> Self {
        Self { parties, seen: vec![0; parties * parties] }
    }

    /// A party's own clock.
    pub(super) fn now(&self, party: usize) -> u32 {
        self.seen[party * self.parties + party]
    }

    /// Whether a party knows of what another did at a clock.
    pub(super) fn knows(&self, party: usize, other: usize, clock: u32) -> bool {
        self.seen[party * self.parties + other] > clock
    }

    /// A party arrives at a barrier: the barrier's clock includes the party's.
    pub(super) fn arrive(&mut self, party: usize, barrier: &mut Vec<u32>) {
        let row = party * self.parties;
        self.seen[row + party] += 1;
        barrier.resize(self.parties, 0);
        for (known, seen) in barrier.iter_mut().zip(&self.seen[row..]) {
            *known = (*known).max(*seen);
        }
    }

    /// A party leaves a barrier: the party's clock includes the barrier's.
    pub(super) fn leave(&mut self, party: usize, barrier: &[u32]) {
        let row = party * self.parties;
        for (seen, known) in self.seen[row..].iter_mut().zip(barrier) {
            *seen = (*seen).max(*known);
        }
    }
}
