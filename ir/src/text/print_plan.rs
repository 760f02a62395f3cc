//! Printing plans.

use super::experts;
use super::launches;
use super::lex::{quote, quoted};
use super::ops::{Item, braces};
use super::print_placement::write_placement;
use super::units;
use crate::plan::{
    Arg, BufferColumns, Builtin, CacheOrder, Code, Entry, FileRef, Grid, KernelRef, Layout, Plan, RowSpace,
    Span, StateKind, Step,
};
use std::fmt::{self, Write};

/// The bits of an f32, as a float where that keeps them.
struct Bits(u32);

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let x = f32::from_bits(self.0);
        if x.is_nan() { write!(f, "bits(of = {})", self.0) } else { write!(f, "{x:?}") }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, b| {
        // Writing to a string does not fail.
        let _ = write!(out, "{b:02x}");
        out
    })
}

fn layout(layout: Layout) -> String {
    match layout {
        Layout::Rows => "rows".into(),
        Layout::Panels { nr } => format!("panels {nr}"),
        Layout::GluPanels { nr } => format!("glu_panels {nr}"),
        Layout::Neurons { gate_bound: false } => "neurons".into(),
        Layout::Neurons { gate_bound: true } => "bounded_neurons".into(),
        Layout::Gates => "gates".into(),
        Layout::UpDown => "up_down".into(),
        Layout::Bundles => "bundles".into(),
    }
}

fn order(order: CacheOrder) -> String {
    match order {
        CacheOrder::Rows => "rows".into(),
        CacheOrder::Keys { nr } => format!("keys {nr}"),
        CacheOrder::Values { nr, block } => format!("values {nr} {block}"),
    }
}

/// The memory of a value outside of the CPU's.
fn elsewhere(memory: u32, word: &str) -> String {
    if memory == 0 { String::new() } else { format!("{word}{memory}") }
}

fn arg(arg: Arg) -> String {
    match arg {
        Arg::Buffer(b, 0) => format!("buffer {b}"),
        Arg::Buffer(b, offset) => format!("buffer {b} + {offset}"),
        Arg::Segment(s) => format!("segment {s}"),
        Arg::Matrices(s) => format!("matrices {s}"),
        Arg::State(s) => format!("state {s}"),
    }
}

impl fmt::Display for Builtin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::RopeAngles { half, scale, long } => {
                write!(f, "rope_angles {{half = {half}, scale = {}", Bits(scale))?;
                if let Some((after, scale)) = long {
                    write!(f, ", long = long(after = {after}, scale = {})", Bits(scale))?;
                }
                f.write_str("}")
            }
            Self::Dispatch { rows, k, experts, partial, candidates } => {
                let partial = if partial { ", partial = true" } else { "" };
                write!(f, "dispatch {{rows = {rows}, k = {k}, experts = {experts}{partial}")?;
                if let Some(candidates) = candidates {
                    write!(f, ", candidates = {}", candidates.text())?;
                }
                f.write_str("}")
            }
            Self::Copy { words, span } => {
                write!(f, "copy {{words = {words}, span = ")?;
                match span {
                    Span::Rows => f.write_str("rows")?,
                    Span::Whole => f.write_str("whole")?,
                    Span::Slots { rows, k, experts } => {
                        write!(f, "slots(rows = {rows}, k = {k}, experts = {experts})")?;
                    }
                }
                f.write_str("}")
            }
            Self::RequestExperts { layer, rows, k, strides } => {
                write!(
                    f,
                    "request_experts {{layer = {layer}, rows = {rows}, k = {k}, strides = {strides:?}}}"
                )
            }
            Self::RequestNeurons { layer, rows, k } => {
                write!(f, "request_neurons {{layer = {layer}, rows = {rows}, k = {k}}}")
            }
            Self::LimitCapacity { set, k, channels } => {
                write!(f, "limit_capacity {{set = {set}, k = {k}, channels = {channels}}}")
            }
            Self::Streams { set, rows, k } => {
                write!(f, "expert_streams {{set = {set}, rows = {rows}, k = {k}}}")
            }
            Self::Launch { kernel } => write!(f, "launch {{kernel = {kernel}}}"),
            Self::Subgraph { subgraph: part } => write!(f, "part_graphs {{part = {part}}}"),
            Self::Experts { set, rows, k, hidden } => {
                write!(f, "expert_graphs {{set = {set}, rows = {rows}, k = {k}, hidden = {hidden}}}")
            }
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(k) => write!(f, "kernel {k}"),
            Self::Builtin(b) => b.fmt(f),
        }
    }
}

impl fmt::Display for RowSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tokens => "tokens",
            Self::Outputs => "outputs",
        })
    }
}

impl fmt::Display for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One => f.write_str("one"),
            Self::Tiles { rows, tiles } => write!(f, "tiles(rows = {rows}, tiles = {tiles})"),
            Self::Experts { table, tiles } => write!(f, "experts(table = {table}, tiles = {tiles})"),
            Self::Clusters { table, blocks, columns } => {
                write!(f, "clusters(table = {table}, blocks = {blocks}, columns = {columns})")
            }
        }
    }
}

fn write_step(f: &mut fmt::Formatter<'_>, plan: &Plan, i: usize, step: &Step) -> fmt::Result {
    let args: Vec<_> = step.args.iter().map(|&a| arg(a)).collect();
    write!(f, "  step {i} {} ({}) {{unit = {}", step.code, args.join(", "), step.unit)?;
    write!(f, ", rows = {}, grid = {}", step.rows, step.grid)?;
    if step.barrier {
        f.write_str(", barrier = true")?;
    }
    write!(f, ", deps = {:?}, node = {}}}", step.deps, step.node)?;
    if let Code::Kernel(k) = step.code
        && let Some(kernel) = plan.kernels.get(k as usize)
    {
        // A comment must stay on its line, whatever the symbol.
        write!(f, "  ; {}", kernel.symbol.escape_default())?;
    }
    writeln!(f)
}

fn write_entry(f: &mut fmt::Formatter<'_>, plan: &Plan, entry: &Entry) -> fmt::Result {
    writeln!(f, "\nentry {} {{out_rows = {}, logits = {}}} {{", entry.kind, entry.out_rows, entry.logits)?;
    for (i, b) in entry.buffers.iter().enumerate() {
        writeln!(
            f,
            "  buffer {i} {} {}[{}, {}] {{offset = {}, bytes = {}{}}}",
            quote(&b.name),
            b.dtype,
            b.rows,
            b.stride,
            b.offset,
            b.bytes,
            elsewhere(b.memory, ", memory = ")
        )?;
    }
    for (i, place) in entry.locations.iter().enumerate() {
        match place {
            None => writeln!(f, "  place %{i} none")?,
            Some(BufferColumns { buffer, column, cols }) => {
                writeln!(f, "  place %{i} buffer {buffer} [{column}, {cols}]")?;
            }
        }
    }
    for (i, step) in entry.steps.iter().enumerate() {
        write_step(f, plan, i, step)?;
    }
    writeln!(f, "}}")
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = &self.model;
        let t = &self.target;
        writeln!(f, "plan {} {{scratch_bytes = {}}}", self.version, self.scratch_bytes)?;
        write!(
            f,
            "model {} {{vocab = {}, hidden = {}, layers = {}, max_context = {}, slots = {}",
            quote(&m.family),
            m.vocab,
            m.hidden,
            m.layers,
            m.max_context,
            m.slots
        )?;
        if let Some(bos) = m.bos {
            write!(f, ", bos = {bos}")?;
        }
        write!(
            f,
            ", eos = {:?}, parameters = {}, active_parameters = {}",
            m.eos, m.parameters, m.active_parameters
        )?;
        if let Some(little) = m.big_little {
            write!(f, ", big_little = {}", little.text())?;
        }
        if let Some(percent) = m.thresholded {
            write!(f, ", thresholded = percent(of = {percent:?})")?;
        }
        writeln!(f, "}}")?;
        writeln!(
            f,
            "target {} {{triple = {}, cpu = {}, features = {}}}\n",
            quote(&t.name),
            quote(&t.triple),
            quote(&t.cpu),
            quoted(&t.features)
        )?;
        units::write(f, self)?;
        for (i, file) in self.files.iter().enumerate() {
            let FileRef { path, bytes, sha256 } = file;
            writeln!(f, "file {i} {} {{bytes = {bytes}, sha256 = \"{}\"}}", quote(path), hex(sha256))?;
        }
        for (i, s) in self.segments.iter().enumerate() {
            write!(
                f,
                "segment {i} {} {}{:?} {} {{file = {}, offset = {}, bytes = {}",
                quote(&s.name),
                s.format,
                s.shape,
                layout(s.layout),
                s.file,
                s.offset,
                s.bytes
            )?;
            // Matrices that follow each other are not worth a word.
            if Some(s.pitch) != s.matrix_bytes() {
                write!(f, ", pitch = {}", s.pitch)?;
            }
            writeln!(f, "}}")?;
        }
        for (i, s) in self.states.iter().enumerate() {
            let memory = elsewhere(s.memory, " memory ");
            write!(f, "state {i} {} {}{:?} {}", quote(&s.name), s.format, s.shape, order(s.order))?;
            if s.rotated != 1 {
                write!(f, " rotated {}", s.rotated)?;
            }
            f.write_str(&memory)?;
            // A cache without snapshots, as all are, is not worth a word.
            if (s.kind, s.snapshots) != (StateKind::Cache, 0) {
                write!(f, " {} {{snapshots = {}}}", s.kind, s.snapshots)?;
            }
            writeln!(f)?;
        }
        for (i, k) in self.kernels.iter().enumerate() {
            let KernelRef { symbol, results } = k;
            writeln!(f, "kernel {i} {} {{results = {results}}}", quote(symbol))?;
        }
        launches::write(f, self)?;
        for (i, graph) in self.graphs.iter().enumerate() {
            writeln!(f, "graph {i}{}", braces(graph))?;
        }
        for (i, set) in self.expert_sets.iter().enumerate() {
            writeln!(f, "set {i}{}", braces(set))?;
        }
        for (i, part) in self.subgraphs.iter().enumerate() {
            writeln!(f, "part {i}{}", braces(part))?;
        }
        experts::write(f, self)?;
        if let Some(p) = &self.paging {
            writeln!(f, "paging{}", braces(p))?;
        }
        for entry in &self.entries {
            write_entry(f, self, entry)?;
        }
        write_placement(f, &self.placement)
    }
}
