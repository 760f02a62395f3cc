//! Regions of a memory budget by entry point, where a run loads and frees artifacts of graphs (PowerInfer-2,
//! §4.1.1 and §4.2).
//!
//! Artifacts are used in every call, so they come first: an entry point has as many of them loaded as the
//! frames that it requires leave room for. Two are the least: one is read while the one before it computes.
//! The frames get the rest. So a batch with fewer hot neurons has a larger cache of cold ones.
//!
//! Frames of whole experts do not move. Graphs of prompts then stay beside a cache of all experts alone; with
//! less memory they pass through a window of two, and decoding has the cache.

use moec_base::error::{Error, Result};
use moec_ir::plan::{ArtifactBytes, Paging, Plan, Regions};

/// Artifacts that a run loads and frees.
#[derive(Debug, Default)]
pub(super) struct ArtifactRegions {
    artifacts: Vec<ArtifactBytes>,
    /// By entry point, bytes that are loaded at once.
    graphs: Vec<u64>,
}

impl ArtifactRegions {
    /// Divides `rest` bytes, of which frames should have `frames` bytes. With `moves` artifacts take what
    /// that leaves, else all or two of them. `artifacts` may name more than the plan runs.
    ///
    /// # Errors
    /// A bug of the compiler: an artifact without a size.
    pub(super) fn of(
        plan: &Plan,
        artifacts: &[ArtifactBytes],
        rest: u64,
        frames: u64,
        moves: bool,
    ) -> Result<Self> {
        let orders: Vec<Vec<&str>> = plan.entries.iter().map(|entry| plan.artifacts_of(entry)).collect();
        let used = |a: &&ArtifactBytes| orders.iter().flatten().any(|package| *package == a.package);
        let artifacts: Vec<ArtifactBytes> = artifacts.iter().filter(used).cloned().collect();
        if artifacts.is_empty() {
            return Ok(Self::default());
        }
        let sizes = Paging { artifacts, ..super::size_expert_cache::unlimited(Vec::new(), 0) };
        let graphs = orders.iter().map(|order| {
            let (all, window) =
                sizes.artifact_bytes(order).ok_or_else(|| Error::bug("an artifact without a size"))?;
            let room = rest.saturating_sub(frames);
            Ok(if moves || all <= room { room.clamp(window, all) } else { window })
        });
        Ok(Self { graphs: graphs.collect::<Result<_>>()?, artifacts: sizes.artifacts })
    }

    /// Most bytes of any entry point.
    pub(super) fn most(&self) -> u64 {
        self.graphs.iter().copied().max().unwrap_or(0)
    }

    /// Sets the regions of a plan; `frames` gives their number for bytes of artifacts.
    pub(super) fn set(self, paging: &mut Paging, frames: impl Fn(u64) -> u32) {
        let of = |graphs: u64| Regions { graphs, frames: frames(graphs) };
        paging.regions = self.graphs.into_iter().map(of).collect();
        paging.artifacts = self.artifacts;
        let most = paging.regions.iter().map(|r| r.frames).max();
        paging.frames = most.unwrap_or_else(|| frames(0));
    }
}
