//! Parsing plans.

use super::attrs::{Attrs, Value};
use super::cursor::{Cursor, Parsed};
use super::experts;
use super::items::{index, string, with_attrs};
use super::launches;
use super::ops::{get, read_braces};
use super::parse_graph::{dtype, format, kind, state_kind};
use super::parse_placement::part as placement;
use super::units;
use crate::experts::ExpertPlacement;
use crate::plan::{
    Arg, Buffer, BufferColumns, Builtin, CacheOrder, Code, Entry, FileRef, Grid, KernelRef, Layout,
    ModelInfo, Placement, Plan, RowSpace, Segment, Span, StateBuf, Step, TargetInfo,
};

pub(super) fn parse(text: &str) -> Parsed<Plan> {
    let mut cursor = Cursor::new(text)?;
    let c = &mut cursor;
    c.keyword("plan")?;
    let version = c.int("a version")?;
    let scratch_bytes = with_attrs(c, |c, a| a.int(c, "scratch_bytes"))?;
    let model = model(c)?;
    let target = target(c)?;
    let mut plan = Plan {
        version,
        model,
        target,
        units: Vec::new(),
        memories: Vec::new(),
        links: Vec::new(),
        scratch_bytes,
        files: Vec::new(),
        segments: Vec::new(),
        states: Vec::new(),
        experts: ExpertPlacement::default(),
        streams: Vec::new(),
        kernels: Vec::new(),
        launches: Vec::new(),
        graphs: Vec::new(),
        expert_sets: Vec::new(),
        subgraphs: Vec::new(),
        entries: Vec::new(),
        placement: Placement::default(),
        paging: None,
    };
    while !c.at_end() {
        if c.eat_word("unit")? {
            index(c, plan.units.len())?;
            plan.units.push(units::unit(c)?);
        } else if c.eat_word("memory")? {
            index(c, plan.memories.len())?;
            plan.memories.push(units::memory(c)?);
        } else if c.eat_word("link")? {
            index(c, plan.links.len())?;
            plan.links.push(read_braces(c)?);
        } else if c.eat_word("streams")? {
            index(c, plan.streams.len())?;
            plan.streams.push(read_braces(c)?);
        } else if c.eat_word("file")? {
            index(c, plan.files.len())?;
            plan.files.push(file(c)?);
        } else if c.eat_word("segment")? {
            index(c, plan.segments.len())?;
            plan.segments.push(segment(c)?);
        } else if c.eat_word("state")? {
            index(c, plan.states.len())?;
            plan.states.push(state(c)?);
        } else if c.eat_word("kernel")? {
            index(c, plan.kernels.len())?;
            let symbol = c.string("a symbol")?;
            plan.kernels.push(with_attrs(c, |c, a| {
                Ok(KernelRef { symbol, results: launches::read_results(c, a)? })
            })?);
        } else if c.eat_word("launch")? {
            index(c, plan.launches.len())?;
            plan.launches.push(launches::read(c)?);
        } else if c.eat_word("graph")? {
            index(c, plan.graphs.len())?;
            plan.graphs.push(read_braces(c)?);
        } else if c.eat_word("set")? {
            index(c, plan.expert_sets.len())?;
            plan.expert_sets.push(read_braces(c)?);
        } else if c.eat_word("part")? {
            index(c, plan.subgraphs.len())?;
            plan.subgraphs.push(read_braces(c)?);
        } else if plan.paging.is_none() && c.eat_word("paging")? {
            plan.paging = Some(read_braces(c)?);
        } else if plan.experts == ExpertPlacement::default() && c.eat_word("expert_placement")? {
            plan.experts = experts::read(c)?;
        } else if c.eat_word("entry")? {
            plan.entries.push(entry(c)?);
        } else if !placement(c, &mut plan.placement)? {
            return c.expected(
                "`unit`, `memory`, `link`, `file`, `segment`, `state`, `streams`, `kernel`, `launch`, `graph`, `set`, `part`, `paging`, `expert_placement`, `entry`, `placement`, `placed` or `experts`",
            );
        }
    }
    Ok(plan)
}

fn model(c: &mut Cursor<'_>) -> Parsed<ModelInfo> {
    c.keyword("model")?;
    let family = c.string("a model family")?;
    with_attrs(c, |c, a| {
        Ok(ModelInfo {
            family,
            vocab: a.int(c, "vocab")?,
            hidden: a.int(c, "hidden")?,
            layers: a.int(c, "layers")?,
            max_context: a.int(c, "max_context")?,
            slots: a.int(c, "slots")?,
            bos: a.optional_int(c, "bos")?,
            eos: a.list(c, "eos", "a list of ids", Value::number)?,
            parameters: a.int(c, "parameters")?,
            active_parameters: a.int(c, "active_parameters")?,
            big_little: get(c, a, "big_little")?,
            thresholded: a.optional_variant(c, "thresholded", "`percent(…)`", |word, args| match word {
                "percent" => Ok(Some(args.float(c, "of")?)),
                _ => Ok(None),
            })?,
        })
    })
}

fn target(c: &mut Cursor<'_>) -> Parsed<TargetInfo> {
    c.keyword("target")?;
    let name = c.string("a target name")?;
    with_attrs(c, |c, a| {
        Ok(TargetInfo {
            name,
            triple: a.string(c, "triple")?,
            cpu: a.string(c, "cpu")?,
            features: a.list(c, "features", "a list of strings", string)?,
        })
    })
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let digits: Option<Vec<u32>> = text.chars().map(|c| c.to_digit(16)).collect();
    let bytes: Vec<u8> = digits?.chunks(2).map(|d| d.iter().fold(0, |n, d| n * 16 + d) as u8).collect();
    if text.len() == 64 { bytes.try_into().ok() } else { None }
}

fn file(c: &mut Cursor<'_>) -> Parsed<FileRef> {
    let path = c.string("a path")?;
    with_attrs(c, |c, a| {
        let bytes = a.int(c, "bytes")?;
        let sha256 =
            a.required(c, "sha256", "64 hexadecimal digits", |v, _| Ok(string(v).and_then(|s| unhex(&s))))?;
        Ok(FileRef { path, bytes, sha256 })
    })
}

fn segment(c: &mut Cursor<'_>) -> Parsed<Segment> {
    let name = c.string("a weight name")?;
    let format = format(c)?;
    let shape = c.ints("an extent")?;
    let layout = if c.eat_word("rows")? {
        Layout::Rows
    } else if c.eat_word("panels")? {
        Layout::Panels { nr: c.int("a panel width")? }
    } else if c.eat_word("glu_panels")? {
        Layout::GluPanels { nr: c.int("a panel width")? }
    } else if c.eat_word("neurons")? {
        Layout::Neurons { gate_bound: false }
    } else if c.eat_word("bounded_neurons")? {
        Layout::Neurons { gate_bound: true }
    } else if c.eat_word("gates")? {
        Layout::Gates
    } else if c.eat_word("up_down")? {
        Layout::UpDown
    } else if c.eat_word("bundles")? {
        Layout::Bundles
    } else {
        return c.expected(
            "`rows`, `panels`, `glu_panels`, `neurons`, `bounded_neurons`, `gates`, `up_down` or `bundles`",
        );
    };
    with_attrs(c, |c, a| {
        let mut segment = Segment {
            name,
            file: a.int(c, "file")?,
            offset: a.int(c, "offset")?,
            bytes: a.int(c, "bytes")?,
            pitch: 0,
            shape,
            format,
            layout,
        };
        let pitch = a.optional_int(c, "pitch")?;
        segment.pitch = pitch.or_else(|| segment.matrix_bytes()).unwrap_or(0);
        Ok(segment)
    })
}

fn state(c: &mut Cursor<'_>) -> Parsed<StateBuf> {
    let name = c.string("a state name")?;
    let format = format(c)?;
    let at = c.at();
    let shape = c.ints("an extent")?.try_into().map_err(|_| c.error_at(at, "expected four extents"))?;
    let order = if c.eat_word("rows")? {
        CacheOrder::Rows
    } else if c.eat_word("keys")? {
        CacheOrder::Keys { nr: c.int("a panel width")? }
    } else if c.eat_word("values")? {
        CacheOrder::Values { nr: c.int("a panel width")?, block: c.int("a block")? }
    } else {
        return c.expected("`rows`, `keys` or `values`");
    };
    let rotated = if c.eat_word("rotated")? { c.int("the channels of a block")? } else { 1 };
    let memory = if c.eat_word("memory")? { c.int("the index of a memory")? } else { 0 };
    let kind = state_kind(c)?;
    let snapshots = match kind {
        Some(_) => with_attrs(c, |c, a| a.int(c, "snapshots"))?,
        None => 0,
    };
    Ok(StateBuf { name, memory, shape, format, order, rotated, kind: kind.unwrap_or_default(), snapshots })
}

fn entry(c: &mut Cursor<'_>) -> Parsed<Entry> {
    let kind = kind(c)?;
    let (out_rows, logits) = with_attrs(c, |c, a| Ok((a.int(c, "out_rows")?, a.int(c, "logits")?)))?;
    let mut entry =
        Entry { kind, out_rows, buffers: Vec::new(), logits, locations: Vec::new(), steps: Vec::new() };
    c.punct('{')?;
    while !c.eat('}')? {
        if c.eat_word("buffer")? {
            index(c, entry.buffers.len())?;
            entry.buffers.push(buffer(c)?);
        } else if c.eat_word("place")? {
            c.punct('%')?;
            index(c, entry.locations.len())?;
            entry.locations.push(place(c)?);
        } else if c.eat_word("step")? {
            index(c, entry.steps.len())?;
            entry.steps.push(step(c)?);
        } else {
            return c.expected("`buffer`, `place`, `step` or `}`");
        }
    }
    Ok(entry)
}

/// `[a, b]`
fn pair(c: &mut Cursor<'_>, what: &str) -> Parsed<[u32; 2]> {
    let at = c.at();
    c.ints("an integer")?.try_into().map_err(|_| c.error_at(at, format!("expected {what}")))
}

fn buffer(c: &mut Cursor<'_>) -> Parsed<Buffer> {
    let name = c.string("a buffer name")?;
    let dtype = dtype(c)?;
    let [rows, stride] = pair(c, "rows and stride")?;
    with_attrs(c, |c, a| {
        let (offset, bytes) = (a.int(c, "offset")?, a.int(c, "bytes")?);
        let memory = a.optional_int(c, "memory")?.unwrap_or(0);
        Ok(Buffer { name, memory, offset, bytes, dtype, rows, stride })
    })
}

fn place(c: &mut Cursor<'_>) -> Parsed<Option<BufferColumns>> {
    if c.eat_word("none")? {
        return Ok(None);
    }
    c.keyword("buffer")?;
    let buffer = c.int("the index of a buffer")?;
    let [column, cols] = pair(c, "first column and number of columns")?;
    Ok(Some(BufferColumns { buffer, column, cols }))
}

fn arg(c: &mut Cursor<'_>) -> Parsed<Arg> {
    if c.eat_word("buffer")? {
        let b = c.int("the index of a buffer")?;
        let offset = if c.eat('+')? { c.int("an offset in bytes")? } else { 0 };
        return Ok(Arg::Buffer(b, offset));
    }
    if c.eat_word("segment")? {
        return Ok(Arg::Segment(c.int("the index of a segment")?));
    }
    if c.eat_word("matrices")? {
        return Ok(Arg::Matrices(c.int("the index of a segment")?));
    }
    if c.eat_word("state")? {
        return Ok(Arg::State(c.int("the index of a state")?));
    }
    c.expected("`buffer`, `segment`, `matrices` or `state`")
}

/// The bits of a float, or `bits(of = …)` for those that are no number.
fn bits<'t>(c: &Cursor<'t>, a: &mut Attrs<'t>, key: &str) -> Parsed<u32> {
    a.required(c, key, "a number", |v, c| match v {
        Value::Word("bits", mut args) => {
            let of = args.int(c, "of")?;
            args.finish(c)?;
            Ok(Some(of))
        }
        v => Ok(v.float().map(f32::to_bits)),
    })
}

fn code(c: &mut Cursor<'_>) -> Parsed<Code> {
    if c.eat_word("kernel")? {
        return Ok(Code::Kernel(c.int("the index of a kernel")?));
    }
    let builtin = if c.eat_word("rope_angles")? {
        with_attrs(c, |c, a| {
            let half = a.int(c, "half")?;
            let scale = bits(c, a, "scale")?;
            let long = a.optional_variant(c, "long", "`long(…)`", |word, args| {
                if word != "long" {
                    return Ok(None);
                }
                Ok(Some((args.int(c, "after")?, bits(c, args, "scale")?)))
            })?;
            Ok(Builtin::RopeAngles { half, scale, long })
        })?
    } else if c.eat_word("dispatch")? {
        with_attrs(c, |c, a| {
            Ok(Builtin::Dispatch {
                rows: a.int(c, "rows")?,
                k: a.int(c, "k")?,
                experts: a.int(c, "experts")?,
                partial: a.flag(c, "partial")?,
                candidates: get(c, a, "candidates")?,
            })
        })?
    } else if c.eat_word("copy")? {
        with_attrs(c, |c, a| {
            let words = a.int(c, "words")?;
            let span = a.variant(c, "span", "`rows`, `whole` or `slots`", |word, args| {
                Ok(match word {
                    "rows" => Some(Span::Rows),
                    "whole" => Some(Span::Whole),
                    "slots" => Some(Span::Slots {
                        rows: args.int(c, "rows")?,
                        k: args.int(c, "k")?,
                        experts: args.int(c, "experts")?,
                    }),
                    _ => None,
                })
            })?;
            Ok(Builtin::Copy { words, span })
        })?
    } else if c.eat_word("request_experts")? {
        with_attrs(c, |c, a| {
            let (layer, rows, k) = (a.int(c, "layer")?, a.int(c, "rows")?, a.int(c, "k")?);
            let strides: Vec<u32> = a.list(c, "strides", "a list of strides", Value::number)?;
            let strides = strides.try_into().map_err(|_| c.error_at(c.at(), "expected four strides"))?;
            Ok(Builtin::RequestExperts { layer, rows, k, strides })
        })?
    } else if c.eat_word("request_neurons")? {
        with_attrs(c, |c, a| {
            Ok(Builtin::RequestNeurons {
                layer: a.int(c, "layer")?,
                rows: a.int(c, "rows")?,
                k: a.int(c, "k")?,
            })
        })?
    } else if c.eat_word("limit_capacity")? {
        with_attrs(c, |c, a| {
            Ok(Builtin::LimitCapacity {
                set: a.int(c, "set")?,
                k: a.int(c, "k")?,
                channels: a.int(c, "channels")?,
            })
        })?
    } else if c.eat_word("launch")? {
        with_attrs(c, |c, a| Ok(Builtin::Launch { kernel: a.int(c, "kernel")? }))?
    } else if c.eat_word("part_graphs")? {
        with_attrs(c, |c, a| Ok(Builtin::Subgraph { subgraph: a.int(c, "part")? }))?
    } else if c.eat_word("expert_streams")? {
        with_attrs(c, |c, a| {
            Ok(Builtin::Streams { set: a.int(c, "set")?, rows: a.int(c, "rows")?, k: a.int(c, "k")? })
        })?
    } else if c.eat_word("expert_graphs")? {
        with_attrs(c, |c, a| {
            Ok(Builtin::Experts {
                set: a.int(c, "set")?,
                rows: a.int(c, "rows")?,
                k: a.int(c, "k")?,
                hidden: a.int(c, "hidden")?,
            })
        })?
    } else {
        return c.expected("`kernel` or a built-in function");
    };
    Ok(Code::Builtin(builtin))
}

fn step(c: &mut Cursor<'_>) -> Parsed<Step> {
    let code = code(c)?;
    let args = c.list('(', ')', arg)?;
    with_attrs(c, |c, a| {
        Ok(Step {
            unit: a.int(c, "unit")?,
            code,
            args,
            rows: a.variant(c, "rows", "`tokens` or `outputs`", |word, _| {
                Ok(match word {
                    "tokens" => Some(RowSpace::Tokens),
                    "outputs" => Some(RowSpace::Outputs),
                    _ => None,
                })
            })?,
            grid: a.variant(c, "grid", "`one`, `tiles`, `experts` or `clusters`", |word, args| {
                Ok(match word {
                    "one" => Some(Grid::One),
                    "tiles" => Some(Grid::Tiles { rows: args.int(c, "rows")?, tiles: args.int(c, "tiles")? }),
                    "experts" => {
                        Some(Grid::Experts { table: args.int(c, "table")?, tiles: args.int(c, "tiles")? })
                    }
                    "clusters" => Some(Grid::Clusters {
                        table: args.int(c, "table")?,
                        blocks: args.int(c, "blocks")?,
                        columns: args.int(c, "columns")?,
                    }),
                    _ => None,
                })
            })?,
            barrier: a.flag(c, "barrier")?,
            deps: a.list(c, "deps", "a list of steps", Value::number)?,
            node: a.int(c, "node")?,
        })
    })
}
