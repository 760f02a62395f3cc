//! Experts that stay on disk: their places in the files of the hosts that have them.

use super::entry::Builder;
use crate::size_expert_cache::{self, Routed};
use moec_base::error::{Error, Result};
use moec_ir::plan::{ALIGN, PagedLayer, Paging};
use moec_ir::{Graph, Op};
use std::collections::{BTreeMap, BTreeSet};

impl Builder<'_> {
    /// Lays out experts that stay on disk, by memory: those of the CPU's, and of each other host's; none if all weights
    /// are mapped.
    pub(super) fn page(&mut self) -> Result<BTreeMap<u32, Paging>> {
        // Where static graphs have the dense networks of prompts, decoding alone reads the disk.
        let reads = |g: &&Graph| g.nodes.iter().any(|n| n.op.reads_disk());
        let Some(graph) = self.module.entries.iter().find(reads) else { return Ok(BTreeMap::new()) };
        let by_neurons = graph.nodes.iter().any(|n| n.op.pages_neurons());
        let routers = size_expert_cache::routers(graph);
        let requests =
            |g: &Graph| g.nodes.iter().filter(|n| matches!(n.op, Op::RequestExperts { .. })).count();
        let requests = self.module.entries.iter().map(requests).max().unwrap_or(0);
        let memories: BTreeSet<u32> = self.experts.keys().map(|&(memory, _)| memory).collect();
        let mut all = BTreeMap::new();
        for memory in memories {
            let own = self.experts.range((memory, 0)..=(memory, u32::MAX));
            let layers = own.map(|(&(_, layer), &[gate_up, down])| {
                let router = routers.iter().find(|r| r.layer == Some(layer));
                let &Routed { experts, k, score, .. } =
                    router.ok_or_else(|| Error::bug("experts on disk of a layer without a router"))?;
                Ok(PagedLayer { layer, experts, k, gate_up, down, score })
            });
            let layers: Vec<PagedLayer> = layers.collect::<Result<_>>()?;
            // Requests name layers by their order on disk.
            if memory == 0 && layers.len() != if by_neurons { routers.len() } else { requests } {
                return Err(Error::bug("experts on disk that no layer reads"));
            }
            all.insert(memory, self.page_layers(memory, layers, by_neurons)?);
        }
        Ok(all)
    }

    /// Lays out the experts of a memory's host in its file, after the host's other weights.
    fn page_layers(&mut self, memory: u32, layers: Vec<PagedLayer>, by_neurons: bool) -> Result<Paging> {
        if by_neurons {
            let (bytes, frame) = size_expert_cache::lay_out_neurons(&mut self.segments, &layers)?;
            self.ends[1] = bytes;
            let unlimited = size_expert_cache::unlimited(layers, frame.bytes);
            let (neurons, frames) = (frame.neurons, frame.least);
            return Ok(Paging { neurons, frames, checksums: Vec::new(), ..unlimited });
        }
        let file = if memory > 0 { self.files.iter().position(|&(_, of)| of == memory) } else { Some(1) };
        let file = file.ok_or_else(|| Error::bug("experts of a host without a file"))?;
        let on_disk: BTreeSet<u32> = layers.iter().flat_map(|l| [l.gate_up, l.down]).collect();
        let mut end = 0;
        let rest =
            (0..).zip(&mut self.segments).filter(|(i, s)| s.file as usize == file && !on_disk.contains(i));
        for (_, segment) in rest {
            // Only weights of several hosts share a file with experts.
            if memory == 0 {
                return Err(Error::bug("experts on disk that no layer reads"));
            }
            segment.offset = end;
            end = (end + segment.bytes).next_multiple_of(ALIGN);
        }
        self.ends[file] = size_expert_cache::lay_out(&mut self.segments, &layers, end)?;
        let frame = size_expert_cache::frame_bytes(&self.segments, &layers);
        Ok(size_expert_cache::unlimited(layers, frame))
    }
}
