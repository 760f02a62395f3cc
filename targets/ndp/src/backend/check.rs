//! Artifacts read back: every stream verified, and executed against two references.
//!
//! A stream must give the bits of the backend's own evaluator ([`crate::evaluate`]), which shares no code
//! with the machine. Both must differ from the Graph's evaluator by no more than the rounding of bf16.

use super::dimm_config;
use crate::allocation::{Boxes, DimmConfig, DramLayout, RowAllocation, RowAllocator};
use crate::artifact::{self, Artifact};
use crate::evaluate;
use crate::image::{Packed, Shape};
use crate::machine::{Bus, Dimms, Program};
use moec_backend::error::{Error, Result};
use moec_backend::{BF16_BOUND, Distance, FunctionReport, StreamTrial};
use moec_dram::Options;
use moec_ir::eval::{self, Arg, Tensor};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{self, Builtin, Code, Plan, Segment, StreamSet};
use moec_ir::{Glu, Node, Op, Operand};
use moec_ndp_isa::{LINE, Stream};
use moec_runtime::bundle::BundleReader;

/// Rows that every expert is executed on.
const ROWS: usize = 3;

/// Like [`artifact::open`], with an error of the compiler's.
pub(super) fn read(bundle: &BundleReader, set: &StreamSet) -> Result<Artifact> {
    artifact::open(bundle, set).map_err(|why| {
        Error::input(format!(
            "`{}` contains no executable command streams",
            bundle.folder().join(&set.artifact).display()
        ))
        .because(why)
        .hint("build the bundle again")
    })
}

/// Executes every stream of a unit.
pub(super) fn verify(trial: &mut StreamTrial<'_, '_>) -> Result<Vec<FunctionReport>> {
    let mut reports = Vec::new();
    let unit = trial.unit;
    for (index, set) in trial.plan.streams.iter().enumerate().filter(|(_, s)| s.unit == unit) {
        (trial.next)(&format!("layer {}", set.layer))?;
        let artifact = read(trial.files, set)?;
        let (ours, _, timing) = dimm_config(trial.device).map_err(|flaw| Error::input(flaw.message))?;
        let bus = Bus::new(&ours, timing, Options::default());
        let first = &artifact.experts[0].stream;
        let (dimm_config, slots) =
            (DimmConfig { system: first.system, geometry: first.geometry }, first.slots);
        if dimm_config != ours {
            return Err(Error::input(format!("`{}` is for other DIMMs than the device's", set.artifact))
                .hint("build the bundle again"));
        }
        let (want, glu) = reference(trial, set)?;
        if let Glu::Clamped { alpha, limit } = glu
            && !(alpha.is_finite() && limit.is_finite() && limit > 0.0)
        {
            return Err(bad(set, &format!("experts clamped at {limit}")));
        }
        let shape = Shape { hidden: set.hidden, inner: set.inner, glu, bias: set.bias };
        let allocator = RowAllocator::new(dimm_config, shape, slots).map_err(|e| bad(set, &e))?;
        let scene = StreamExecution { set, shape, dimm_config, boxes: allocator.boxes().clone(), bus };
        let segments = segments(trial.plan, index)?;
        let (hidden, x) = (set.hidden as usize, rows(set.hidden as usize));
        for (expert, placed) in artifact.experts.iter().enumerate() {
            let parts = PackedExpert::read(trial, &segments, expert)?;
            let want = &want[expert * ROWS * hidden..][..ROWS * hidden];
            reports.push(scene.execute(&placed.stream, expert, &parts, &x, want)?);
        }
    }
    Ok(reports)
}

/// A set of streams that is executed.
struct StreamExecution<'a> {
    set: &'a StreamSet,
    shape: Shape,
    dimm_config: DimmConfig,
    boxes: Boxes,
    bus: Bus,
}

fn bad(set: &StreamSet, why: &dyn std::fmt::Display) -> Error {
    Error::input(format!("`{}` cannot be executed", set.artifact))
        .because(why.to_string())
        .hint("build the bundle again")
}

impl StreamExecution<'_> {
    /// Checks one expert on [`ROWS`] rows.
    fn execute(
        &self,
        stream: &Stream,
        expert: usize,
        parts: &PackedExpert,
        x: &[f32],
        want: &[f32],
    ) -> Result<FunctionReport> {
        let Self { set, shape, boxes, .. } = self;
        let bug = |e: &dyn std::fmt::Display| bad(set, &format!("expert {expert}: {e}"));
        let image = shape.pack(parts.packed()).map_err(|e| bug(&e))?;
        let mut dimms = Dimms::new(self.dimm_config, self.bus, true).map_err(|e| bug(&e))?;
        let here = |rows| RowAllocation { layout: DramLayout::Localized(stream.dimm), rows };
        let weights = stream.regions.first().map(|r| r.rows.clone()).unwrap_or_default();
        dimms.write(&here(weights), 0, &image).map_err(|e| bug(&e))?;
        let commands = Program::new(stream.clone()).map_err(|e| bug(&e))?;
        let hidden = shape.hidden as usize;
        let line = LINE as usize;
        let (input, output) = (shape.input_lines() as usize * line, shape.output_lines() as usize * line);
        let mut got = Vec::new();
        // A step of one token has one slot.
        let at_once = ROWS.min(stream.slots as usize);
        for block in x.chunks(at_once * hidden) {
            let n = block.len() / hidden;
            let mut bytes = vec![0; input * n];
            for (row, out) in block.chunks_exact(hidden).zip(bytes.chunks_exact_mut(input)) {
                for (&x, out) in row.iter().zip(out.chunks_exact_mut(2)) {
                    out.copy_from_slice(&half::bf16::from_f32(x).to_le_bytes());
                }
            }
            dimms.write(&here(boxes.inbox.clone()), 0, &bytes).map_err(|e| bug(&e))?;
            dimms.execute(&commands, 0, n as u32).map_err(|e| bug(&e))?;
            let mut bytes = vec![0; output * n];
            dimms.read(&here(boxes.outbox.clone()), 0, &mut bytes).map_err(|e| bug(&e))?;
            for row in bytes.chunks_exact(output) {
                let numbers = row.chunks_exact(4).take(hidden);
                got.extend(numbers.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
            }
        }
        let own = evaluate::expert(shape, &image, x, ROWS).map_err(|e| bug(&e))?;
        let same = got.len() == own.len() && got.iter().zip(&own).all(|(a, b)| a.to_bits() == b.to_bits());
        let mut findings = Vec::new();
        if !same {
            findings
                .push("the results of its stream differ from those of the backend's evaluator".to_owned());
        }
        let tensor = |data: Vec<f32>| Tensor::f32([ROWS, hidden], data);
        let error = Distance::of(&tensor(got), &tensor(want.to_vec()), ROWS * hidden);
        Ok(FunctionReport {
            package: set.artifact.clone(),
            function: format!("expert {expert}"),
            experts: 1,
            error,
            bound: BF16_BOUND,
            refused: !same,
            checks: Vec::new(),
            findings,
        })
    }
}

/// Results of the Graph's evaluator for every expert of a layer, `[experts][ROWS][hidden]`, and the function
/// that joins gate and up.
fn reference(trial: &mut StreamTrial<'_, '_>, set: &StreamSet) -> Result<(Vec<f32>, Glu)> {
    let of_layer =
        |n: &&Node| n.scope.layer == Some(set.layer) && matches!(n.op, Op::ExpertFfn { fixed: false, .. });
    let graph = trial.module.entries.first();
    let node = graph.and_then(|g| g.nodes.iter().find(of_layer));
    let node = node.ok_or_else(|| {
        Error::input(format!("the graph has no experts in layer {}", set.layer))
            .hint("build the bundle again")
    })?;
    let experts = set.experts as usize;
    let layout = DispatchLayout { rows: ROWS, k: experts, experts };
    let mut table = vec![0_i32; layout.words()];
    (table[0], table[1]) = (experts as i32, (ROWS * experts) as i32);
    for expert in 0..experts {
        table[layout.expert() + expert] = expert as i32;
        table[layout.start() + expert] = (expert * ROWS) as i32;
        for row in 0..ROWS {
            let slot = expert * ROWS + row;
            table[layout.token() + slot] = row as i32;
            table[layout.slot() + row * experts + expert] = slot as i32;
        }
    }
    table[layout.start() + experts] = (ROWS * experts) as i32;
    let hidden = set.hidden as usize;
    let x = Tensor::f32([ROWS, hidden], rows(hidden));
    let words = table.len();
    let table = Tensor::i32([words], table);
    let mut weights = Vec::new();
    for input in node.inputs.iter().skip(2) {
        let Operand::Weight(w) = input else { continue };
        weights.push(trial.evaluator.weight(*w).map_err(|e| Error::input("the reference").because(e))?);
    }
    let args = [&x, &table].into_iter().chain(weights.iter().map(|w| &**w)).map(Arg::Tensor).collect();
    let out =
        eval::op(&node.op, args).map_err(|e| Error::bug("the reference cannot be executed").because(e))?;
    let glu = node.op.expert_ffn().ok_or_else(|| Error::bug("a node that is not experts"))?;
    Ok((out.first().map(|t| t.as_f32().to_vec()).unwrap_or_default(), glu))
}

/// Rows that are the same everywhere: numbers of about 1, from a fixed sequence.
fn rows(hidden: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        // SplitMix64 (Steele, Lea and Flood 2014).
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    };
    (0..ROWS * hidden).map(|_| next()).collect()
}

/// Segments of the matrices and biases that the steps of a set read.
fn segments(plan: &Plan, set: usize) -> Result<Vec<&Segment>> {
    let of_set = |s: &&plan::Step| matches!(s.code, Code::Builtin(Builtin::Streams { set: s, .. }) if s as usize == set);
    let step = plan.entries.iter().flat_map(|e| &e.steps).find(of_set);
    let args = step.map_or(&[][..], |s| s.args.get(2..s.args.len() - 1).unwrap_or_default());
    let segment = |arg: &plan::Arg| match *arg {
        plan::Arg::Matrices(i) | plan::Arg::Segment(i) => plan.segments.get(i as usize),
        _ => None,
    };
    let found: Option<Vec<_>> = args.iter().map(segment).collect();
    found
        .filter(|s| s.len() >= 2)
        .ok_or_else(|| Error::input(format!("no step runs the streams {set}")).hint("build the bundle again"))
}

/// Packed weights of one expert in the bundle.
struct PackedExpert {
    matrices: [Vec<u8>; 2],
    biases: Option<[Vec<f32>; 2]>,
}

impl PackedExpert {
    fn read(trial: &StreamTrial<'_, '_>, segments: &[&Segment], expert: usize) -> Result<Self> {
        let bytes = |segment: &Segment| -> Result<Vec<u8>> {
            let (files, i) = (&trial.plan.files, expert as u32);
            let found =
                files.get(segment.file as usize).zip(segment.matrix_offset(i)).zip(segment.matrix_bytes());
            let ((file, offset), bytes) =
                found.ok_or_else(|| Error::input(format!("`{}` has no expert {expert}", segment.name)))?;
            let map = trial.files.map(&file.path)?;
            let range = offset as usize..offset.saturating_add(bytes) as usize;
            let truncated = || Error::input(format!("`{}` ends before its expert {expert}", file.path));
            Ok(map.get(range).ok_or_else(truncated)?.to_vec())
        };
        let row = |segment: &Segment| -> Result<Vec<f32>> {
            // A bias is a row of its segment.
            let (_, _, cols) = segment.extents();
            let of = Segment {
                shape: vec![segment.extents().1, 1, cols],
                pitch: u64::from(cols) * 4,
                ..segment.clone()
            };
            let bytes = bytes(&of)?;
            Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        };
        let biases = match segments {
            [_, _, a, b] => Some([row(a)?, row(b)?]),
            _ => None,
        };
        Ok(Self { matrices: [bytes(segments[0])?, bytes(segments[1])?], biases })
    }

    fn packed(&self) -> Packed<'_> {
        let [gate_up, down] = &self.matrices;
        let biases = self.biases.as_ref().map(|[a, b]| (a.as_slice(), b.as_slice()));
        Packed { gate_up, down, biases }
    }
}
