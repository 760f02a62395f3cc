//! A Program built from a decoded Plan, for running a bundle in process.

use crate::abi::KernelFn;
use crate::error::{Error, Result};
use crate::program::{
    BufferRef, Code, EntryRef, FileInfo, GraphRef, GroupRef, ModelRef, PagingRef, PartRef, PortRef, Program,
    SegmentRef, SetRef, StateRef, Step, TargetRef,
};
use crate::validate;
use moec_ir::plan::{self, Plan};

/// A Plan with the addresses of its kernels.
#[derive(Clone, Debug)]
pub struct LoadedProgram {
    plan: Plan,
    kernels: Vec<KernelFn>,
}

impl LoadedProgram {
    /// Checks a plan and finds its kernels.
    ///
    /// The code that `resolve` returns must stay in memory as long as the result (and every engine opened
    /// on it) is used.
    ///
    /// # Errors
    /// [`Error::Plan`] for a plan of another version or one that is not valid, [`Error::NoKernel`] for a
    /// symbol that `resolve` does not know.
    pub fn from_plan(plan: &Plan, resolve: &dyn Fn(&str) -> Option<KernelFn>) -> Result<Self> {
        if plan.version != plan::PLAN_VERSION {
            let (found, ours) = (plan.version, plan::PLAN_VERSION);
            return Err(Error::Plan(format!("it has version {found}, this runtime reads {ours}")));
        }
        moec_ir::verify::plan(plan).map_err(|e| Error::Plan(e.to_string()))?;
        let find = |k: &plan::KernelRef| resolve(&k.symbol).ok_or_else(|| Error::NoKernel(k.symbol.clone()));
        let kernels = plan.kernels.iter().map(find).collect::<Result<Vec<_>>>()?;
        let loaded = Self { plan: plan.clone(), kernels };
        loaded.with(validate::program)?;
        Ok(loaded)
    }

    /// The same program without these features among what it asks of the processor, because somebody in
    /// this process executes their instructions.
    #[must_use]
    pub fn emulating(mut self, features: &[String]) -> Self {
        self.plan.target.features.retain(|f| !features.contains(f));
        self
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Lends the program.
    pub fn with<R>(&self, f: impl FnOnce(&Program<'_>) -> R) -> R {
        let Plan { model, target, .. } = &self.plan;
        let features: Vec<&str> = target.features.iter().map(String::as_str).collect();
        let files: Vec<_> = self.plan.files.iter().map(file).collect();
        let segments: Vec<_> = self.plan.segments.iter().map(segment).collect();
        let states: Vec<_> = self.plan.states.iter().map(state).collect();
        let buffers: Vec<Vec<BufferRef>> =
            self.plan.entries.iter().map(|e| e.buffers.iter().map(buffer).collect()).collect();
        let steps: Vec<Vec<Step<'_>>> =
            self.plan.entries.iter().map(|e| e.steps.iter().map(|s| self.step(s)).collect()).collect();
        let entries: Vec<EntryRef<'_>> = (self.plan.entries.iter().zip(&buffers).zip(&steps))
            .map(|((e, buffers), steps)| EntryRef {
                kind: e.kind,
                out_rows: e.out_rows,
                buffers,
                logits: e.logits,
                logits_stride: e.buffers.get(e.logits as usize).map_or(0, |b| b.stride),
                steps,
            })
            .collect();
        let ports: Vec<[Vec<PortRef<'_>>; 2]> = self
            .plan
            .graphs
            .iter()
            .map(|g| [&g.inputs, &g.outputs].map(|list| list.iter().map(port).collect()))
            .collect();
        let graphs: Vec<GraphRef<'_>> = (self.plan.graphs.iter().zip(&ports))
            .map(|(g, [inputs, outputs])| GraphRef {
                package: &g.package,
                function: &g.function,
                inputs,
                outputs,
                stateful: g.stateful,
            })
            .collect();
        let groups: Vec<Vec<GroupRef<'_>>> =
            self.plan.sets.iter().map(|s| s.groups.iter().map(group).collect()).collect();
        let sets: Vec<SetRef<'_>> = (self.plan.sets.iter().zip(&groups))
            .map(|(s, groups)| SetRef {
                layer: s.layer,
                overflow: s.overflow,
                capacities: &s.capacities,
                groups,
            })
            .collect();
        let parts: Vec<PartRef<'_>> = self.plan.parts.iter().map(part).collect();
        f(&Program {
            model: ModelRef {
                family: &model.family,
                vocab: model.vocab,
                hidden: model.hidden,
                layers: model.layers,
                max_context: model.max_context,
                slots: model.slots,
                bos: model.bos,
                eos: &model.eos,
                parameters: model.parameters,
                active_parameters: model.active_parameters,
                big_little: model.big_little,
            },
            target: TargetRef {
                name: &target.name,
                triple: &target.triple,
                cpu: &target.cpu,
                features: &features,
            },
            arena_bytes: self.plan.arena_bytes,
            scratch_bytes: self.plan.scratch_bytes,
            files: &files,
            segments: &segments,
            states: &states,
            graphs: &graphs,
            sets: &sets,
            parts: &parts,
            entries: &entries,
            paging: self.plan.paging.as_ref().map(paging),
        })
    }

    fn step<'a>(&'a self, s: &'a plan::Step) -> Step<'a> {
        Step {
            code: match s.code {
                // The verifier has checked the index.
                plan::Code::Kernel(k) => Code::Kernel(self.kernels[k as usize]),
                plan::Code::Builtin(b) => Code::Builtin(b),
            },
            args: &s.args,
            rows: s.rows,
            grid: s.grid,
            barrier: s.barrier,
            node: s.node,
        }
    }
}

fn file(f: &plan::FileRef) -> FileInfo<'_> {
    FileInfo { path: &f.path, bytes: f.bytes, sha256: f.sha256 }
}

fn segment(s: &plan::Segment) -> SegmentRef {
    SegmentRef { file: s.file, offset: s.offset, bytes: s.bytes, matrices: s.extents().0, pitch: s.pitch }
}

fn paging(p: &plan::Paging) -> PagingRef<'_> {
    PagingRef {
        budget: p.budget,
        threads: p.threads,
        resident: p.resident,
        process: p.process,
        frame_bytes: p.frame_bytes,
        frames: p.frames,
        spare: p.spare,
        block_bytes: p.block_bytes,
        policy: &p.policy,
        pinned: &p.pinned,
        layers: &p.layers,
        checksums: &p.checksums,
        uses: &p.uses,
    }
}

fn state(s: &plan::StateBuf) -> StateRef {
    StateRef { bytes: s.bytes(), format: s.format, shape: s.shape, order: s.order }
}

fn port(p: &plan::Port) -> PortRef<'_> {
    PortRef { name: &p.name, shape: p.shape }
}

fn part(p: &plan::GraphPart) -> PartRef<'_> {
    PartRef { graphs: &p.graphs, inputs: p.inputs, outputs: p.outputs, attention: p.attention }
}

fn group(g: &plan::GraphGroup) -> GroupRef<'_> {
    GroupRef { graph: g.graph, capacity: g.capacity, experts: &g.experts }
}

fn buffer(b: &plan::Buffer) -> BufferRef {
    BufferRef { offset: b.offset, bytes: b.bytes }
}
