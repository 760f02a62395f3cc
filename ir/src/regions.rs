//! Regions of a memory budget by entry point: artifacts of static graphs, and cache frames (PowerInfer-2,
//! §4.2).
//!
//! A compiled artifact holds its weights as long as it is loaded. So the hot region is the loaded artifacts,
//! and the cold region the frames; the rest of the budget is fixed.

use crate::op::{Attributes, attributes};
use crate::paging::Paging;
use crate::plan::{Builtin, Code, Entry, Plan};
use crate::text::ops::{Parsed, Reader, Word, Writer};
use bincode::{Decode, Encode};

attributes! {
    /// Weights of an artifact of static graphs.
    #[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
    pub struct ArtifactBytes as "artifact" {
        /// Path of the artifact, relative to the bundle.
        pub package: String,
        /// Bytes of its weights, in the formats of the Graph.
        pub bytes: u64,
    }
}

attributes! {
    /// Division of the memory while an entry point runs.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
    pub struct Regions as "regions" {
        /// Most bytes of artifacts that are loaded at once.
        pub graphs: u64,
        /// Frames of the cache.
        pub frames: u32,
    }
}

impl Plan {
    /// Graphs that the steps of an entry point run, each once, in their order.
    pub fn graphs_of(&self, entry: &Entry) -> Vec<u32> {
        let mut found = Vec::new();
        for step in &entry.steps {
            let graphs: Vec<u32> = match step.code {
                Code::Builtin(Builtin::Experts { set, .. }) => {
                    let set = self.expert_sets.get(set as usize);
                    set.iter().flat_map(|set| &set.groups).map(|group| group.graph).collect()
                }
                Code::Builtin(Builtin::Subgraph { subgraph }) => {
                    self.subgraphs.get(subgraph as usize).map_or(Vec::new(), |part| part.graphs.clone())
                }
                _ => continue,
            };
            for graph in graphs {
                if !found.contains(&graph) {
                    found.push(graph);
                }
            }
        }
        found
    }

    /// Artifacts of these graphs, each once, in the order in which an entry point first runs them.
    pub fn artifacts_of(&self, entry: &Entry) -> Vec<&str> {
        let mut found: Vec<&str> = Vec::new();
        for graph in self.graphs_of(entry) {
            let package = self.graphs.get(graph as usize).map(|graph| &*graph.package);
            found.extend(package.filter(|package| !found.contains(package)));
        }
        found
    }
}

impl Paging {
    /// Regions while the entry point with this index runs.
    pub fn regions_of(&self, entry: usize) -> Regions {
        self.regions.get(entry).copied().unwrap_or(Regions { graphs: 0, frames: self.frames })
    }

    /// Bytes of artifacts, all of them and those of any two neighbours: an entry point runs with no less than
    /// the latter, since one is loaded while the one before it computes. `None` on overflow, or for an
    /// artifact without bytes.
    pub fn artifact_bytes(&self, order: &[&str]) -> Option<(u64, u64)> {
        let bytes = |package: &&str| self.artifacts.iter().find(|a| a.package == **package).map(|a| a.bytes);
        let each: Vec<u64> = order.iter().map(bytes).collect::<Option<_>>()?;
        let all = each.iter().try_fold(0_u64, |sum, &bytes| sum.checked_add(bytes))?;
        // The last one is followed by the first of the next call.
        let next = each.iter().cycle().skip(1).take(each.len().saturating_sub(1));
        let pairs = each.iter().zip(next).map(|(a, b)| a.saturating_add(*b));
        Some((all, pairs.chain(each.iter().copied()).max().unwrap_or(0)))
    }
}
