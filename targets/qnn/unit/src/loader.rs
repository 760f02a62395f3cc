//! Artifacts of a chip: which are loaded, which is read next, and which are freed for it.
//!
//! A call names its graphs in order, and runs repeatedly. So an artifact that the call does not use is freed
//! first, the one used longest ago, then the one that the call uses last from here (PowerInfer-2, §4.2). For
//! an artifact that is read ahead none of the call's is freed unless it is the next one: so no more is read
//! again than the memory lacks.

use moec_ir::plan::{ArtifactBytes, GraphDecl};
use moec_runtime::exec::graphs::LoadCounts;

/// State of an artifact.
#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Absent,
    /// It was read ahead and failed. It is not read ahead again before the next announcement.
    Failed,
    Reading,
    /// With the time of its last use.
    Loaded(u64),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Loader {
    /// Artifact of each graph.
    of: Vec<usize>,
    /// Bytes of each.
    bytes: Vec<u64>,
    /// Most bytes that are loaded at once.
    memory: u64,
    /// Artifacts of the call, in order.
    order: Vec<usize>,
    /// Place in it of the artifact whose graph was executed last.
    at: usize,
    states: Vec<State>,
    clock: u64,
    counts: LoadCounts,
}

/// Artifacts of a plan's graphs, in the order in which they are first named, and that of each graph.
pub fn artifacts(graphs: &[GraphDecl]) -> (Vec<&str>, Vec<usize>) {
    let (mut names, mut of): (Vec<&str>, Vec<usize>) = (Vec::new(), Vec::new());
    for graph in graphs {
        let known = names.iter().position(|name| *name == graph.package);
        of.push(known.unwrap_or(names.len()));
        if known.is_none() {
            names.push(&graph.package);
        }
    }
    (names, of)
}

impl Loader {
    /// Nothing is loaded. Artifacts without a row in `sizes` take no bytes.
    pub(crate) fn new(graphs: &[GraphDecl], sizes: &[ArtifactBytes]) -> Self {
        let (names, of) = artifacts(graphs);
        let size = |name: &&str| sizes.iter().find(|a| a.package == **name).map_or(0, |a| a.bytes);
        Self {
            bytes: names.iter().map(size).collect(),
            states: vec![State::Absent; names.len()],
            of,
            memory: u64::MAX,
            order: Vec::new(),
            at: 0,
            clock: 0,
            counts: LoadCounts::default(),
        }
    }

    pub(crate) fn counts(&self) -> LoadCounts {
        self.counts
    }

    /// Number of artifacts.
    pub(crate) fn len(&self) -> usize {
        self.states.len()
    }

    /// Artifact of a graph.
    pub(crate) fn of(&self, graph: usize) -> Option<usize> {
        self.of.get(graph).copied()
    }

    /// The graphs of the next calls, in order, and the most bytes for them.
    pub(crate) fn announce(&mut self, graphs: &[usize], memory: u64) {
        self.order.clear();
        for artifact in graphs.iter().filter_map(|&graph| self.of(graph)).collect::<Vec<_>>() {
            if !self.order.contains(&artifact) {
                self.order.push(artifact);
            }
        }
        (self.at, self.memory) = (0, memory);
        self.states.iter_mut().filter(|s| **s == State::Failed).for_each(|s| *s = State::Absent);
    }

    pub(crate) fn is_loaded(&self, artifact: usize) -> bool {
        matches!(self.states.get(artifact), Some(State::Loaded(_)))
    }

    /// Whether an artifact is being read.
    pub(crate) fn is_reading(&self) -> bool {
        self.states.contains(&State::Reading)
    }

    /// Whether reading an artifact has failed.
    pub(crate) fn has_failed(&self, artifact: usize) -> bool {
        self.states.get(artifact) == Some(&State::Failed)
    }

    /// Whether more bytes are loaded than the call may have.
    pub(crate) fn is_over(&self) -> bool {
        self.counts.held > self.memory
    }

    /// Records that a graph was executed.
    pub(crate) fn executed(&mut self, graph: usize) {
        let Some(artifact) = self.of(graph) else { return };
        self.clock += 1;
        if let Some(State::Loaded(used)) = self.states.get_mut(artifact) {
            *used = self.clock;
        }
        if let Some(at) = self.order.iter().position(|&a| a == artifact) {
            self.at = at;
        }
    }

    /// The artifact to be read ahead, and those to be freed for it.
    pub(crate) fn ahead(&self) -> Option<(usize, Vec<usize>)> {
        let (before, from) = self.order.split_at(self.at.min(self.order.len()));
        let mut next = from.iter().chain(before);
        let next = *next.find(|&&artifact| self.states.get(artifact) == Some(&State::Absent))?;
        let freed = self.room(next, true)?;
        Some((next, freed))
    }

    /// Artifacts to be freed for one that is to be executed; `None` if it has no room even then.
    pub(crate) fn demanded(&self, artifact: usize) -> Option<Vec<usize>> {
        self.room(artifact, false)
    }

    /// The next artifact to be freed if more is loaded than the call may have.
    pub(crate) fn excess(&self) -> Option<usize> {
        if self.is_over() { self.candidates().first().copied() } else { None }
    }

    /// Artifacts to be freed for another; if it is read ahead, none that the call uses before it. `None` if
    /// that is too little.
    fn room(&self, artifact: usize, ahead: bool) -> Option<Vec<usize>> {
        let bytes = self.bytes.get(artifact)?;
        let (mut held, mut freed) = (self.counts.held, Vec::new());
        let mut candidates = self.candidates().into_iter().filter(|&other| other != artifact);
        while held.checked_add(*bytes)? > self.memory {
            let other = candidates.next()?;
            let next = self.distance(artifact).is_some_and(|own| own <= 1);
            let may_go = self.distance(other).is_none_or(|places| next && places > 1);
            if ahead && !may_go {
                return None;
            }
            held -= self.bytes.get(other)?;
            freed.push(other);
        }
        Some(freed)
    }

    /// Loaded artifacts, those first that are to be freed first.
    fn candidates(&self) -> Vec<usize> {
        let loaded = self.states.iter().enumerate().filter_map(|(artifact, state)| match *state {
            State::Loaded(used) => Some((artifact, used)),
            State::Absent | State::Failed | State::Reading => None,
        });
        let mut loaded: Vec<_> = loaded.map(|(a, used)| (self.distance(a), used, a)).collect();
        // Without a distance first; then by descending distance.
        loaded.sort_by(|a, b| a.0.is_some().cmp(&b.0.is_some()).then(b.0.cmp(&a.0)).then(a.1.cmp(&b.1)));
        loaded.into_iter().map(|(_, _, artifact)| artifact).collect()
    }

    /// Places from the artifact that was executed last to the next use of another; `None` if the call does
    /// not use it.
    fn distance(&self, artifact: usize) -> Option<usize> {
        let (place, count) = (self.order.iter().position(|&a| a == artifact)?, self.order.len());
        Some((place + count - self.at) % count)
    }

    /// Records that an artifact is being read: a step waits for it, or none does yet.
    pub(crate) fn begin(&mut self, artifact: usize, waits: bool) {
        let (Some(state), Some(bytes)) = (self.states.get_mut(artifact), self.bytes.get(artifact)) else {
            return;
        };
        *state = State::Reading;
        *(if waits { &mut self.counts.waited } else { &mut self.counts.ahead }) += 1;
        self.counts.bytes += bytes;
        self.counts.held += bytes;
        self.counts.peak = self.counts.peak.max(self.counts.held);
    }

    /// Records the end of a read, or that an artifact was loaded before.
    pub(crate) fn ended(&mut self, artifact: usize, loaded: bool) {
        let (Some(state), Some(bytes)) = (self.states.get_mut(artifact), self.bytes.get(artifact)) else {
            return;
        };
        match (*state, loaded) {
            (State::Reading, false) => self.counts.held -= bytes,
            (State::Reading, true) => {}
            _ => self.counts.held += bytes,
        }
        self.clock += 1;
        *state = if loaded { State::Loaded(self.clock) } else { State::Failed };
    }

    /// Records that an artifact is freed.
    pub(crate) fn freed(&mut self, artifact: usize) {
        if let (Some(state @ State::Loaded(_)), Some(bytes)) =
            (self.states.get_mut(artifact), self.bytes.get(artifact))
        {
            *state = State::Absent;
            self.counts.freed += 1;
            self.counts.held -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loader(bytes: &[u64]) -> Loader {
        let name = |i: usize| format!("artifacts/{i}.qnn");
        let graphs: Vec<GraphDecl> = (0..bytes.len())
            .map(|i| GraphDecl {
                package: name(i),
                function: "f".into(),
                inputs: Vec::new(),
                outputs: Vec::new(),
                stateful: false,
            })
            .collect();
        let sizes: Vec<_> =
            (0..).zip(bytes).map(|(i, &bytes)| ArtifactBytes { package: name(i), bytes }).collect();
        Loader::new(&graphs, &sizes)
    }

    /// Loads what the loader wants ahead, as long as it wants something. Returns it.
    fn read_ahead(loader: &mut Loader) -> Vec<usize> {
        let mut all = Vec::new();
        while let Some((next, freed)) = loader.ahead() {
            for artifact in freed {
                loader.freed(artifact);
            }
            loader.begin(next, false);
            assert!(!loader.is_over(), "{loader:?}");
            loader.ended(next, true);
            all.push(next);
        }
        all
    }

    /// Executes a graph; loads it first if it is absent.
    fn execute(loader: &mut Loader, graph: usize) {
        if !loader.is_loaded(graph) {
            loader.demanded(graph).unwrap().into_iter().for_each(|a| loader.freed(a));
            loader.begin(graph, true);
            assert!(!loader.is_over());
            loader.ended(graph, true);
        }
        loader.executed(graph);
    }

    /// With room for two, each layer is read while the one before it is executed, and none is waited for.
    #[test]
    fn window_of_two_artifacts_is_read_in_order() {
        let mut loader = loader(&[10; 5]);
        loader.announce(&[0, 1, 2, 3, 4], 20);
        assert_eq!(read_ahead(&mut loader), [0, 1]);
        for call in 0..2 {
            for graph in 0..5 {
                assert!(loader.is_loaded(graph), "{call} {graph}");
                execute(&mut loader, graph);
                let next = if graph == 0 { vec![] } else { vec![(graph + 1) % 5] };
                assert_eq!(read_ahead(&mut loader), next, "{call} {graph}");
            }
            assert_eq!(loader.counts().waited, 0);
            execute(&mut loader, 0);
            assert_eq!(read_ahead(&mut loader), [1]);
        }
        assert_eq!(loader.counts().peak, 20);
    }

    /// With more room, what a call uses last from here is freed: the first layers stay from call to call.
    #[test]
    fn artifacts_that_are_used_soonest_stay() {
        let mut loader = loader(&[10; 5]);
        loader.announce(&[0, 1, 2, 3, 4], 40);
        let mut calls = Vec::new();
        for _ in 0..4 {
            let before = loader.counts().bytes;
            for graph in 0..5 {
                execute(&mut loader, graph);
                read_ahead(&mut loader);
            }
            calls.push((loader.counts().bytes - before) / 10);
        }
        // An LRU would read all five in every call.
        assert!(calls[1..].iter().all(|&reads| reads <= 2), "{calls:?}");
    }

    /// A smaller batch frees the cluster of the larger one, and not its own; the larger one reads it again.
    #[test]
    fn clusters_of_other_batches_are_freed_first() {
        let mut loader = loader(&[10, 10, 5, 5]);
        loader.announce(&[0, 2, 1, 3], 30);
        read_ahead(&mut loader);
        for graph in [0, 2, 1, 3] {
            execute(&mut loader, graph);
        }
        loader.announce(&[0, 1], 20);
        while let Some(artifact) = loader.excess() {
            loader.freed(artifact);
        }
        let loaded: Vec<bool> = (0..4).map(|a| loader.is_loaded(a)).collect();
        assert_eq!(loaded, [true, true, false, false]);
        assert!(loader.ahead().is_none());
        loader.announce(&[0, 2, 1, 3], 30);
        assert_eq!(read_ahead(&mut loader), [2, 3]);
        assert_eq!(loader.counts().freed, 2);
    }

    #[test]
    fn failed_reads_are_not_repeated_ahead() {
        let mut loader = loader(&[10, 10]);
        loader.announce(&[0, 1], 20);
        loader.begin(0, false);
        loader.ended(0, false);
        assert_eq!((loader.ahead(), loader.counts().held), (Some((1, vec![])), 0));
        loader.announce(&[0, 1], 20);
        assert_eq!(loader.ahead(), Some((0, vec![])));
        // An artifact that is larger than the memory has no room.
        loader.announce(&[0], 9);
        assert_eq!((loader.ahead(), loader.demanded(0)), (None, None));
    }
}
