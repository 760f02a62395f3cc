//! Experts that are assigned while the plan runs, and streams: printing and parsing.

use super::attrs::{Attrs, Value};
use super::cursor::{Cursor, Parsed};
use super::items::{index, with_attrs};
use super::lex::quote;
use crate::op::Score;
use crate::plan::Plan;
use crate::schedule::{ExpertTimes, Hybrid, Refine, Schedule, ScheduledLayer, StreamSet};
use std::fmt;
use std::str::FromStr;

/// Writes streams, a line per layer.
pub(super) fn write_streams(f: &mut fmt::Formatter<'_>, plan: &Plan) -> fmt::Result {
    for (i, s) in plan.streams.iter().enumerate() {
        let StreamSet { layer, unit, artifact, experts, hidden, inner, bias } = s;
        write!(f, "streams {i} {} {{layer = {layer}, unit = {unit}", quote(artifact))?;
        writeln!(f, ", experts = {experts}, hidden = {hidden}, inner = {inner}, bias = {bias}}}")?;
    }
    Ok(())
}

/// Reads the streams of a layer, behind their index.
pub(super) fn streams(c: &mut Cursor<'_>) -> Parsed<StreamSet> {
    let artifact = c.string("a path")?;
    with_attrs(c, |c, a| {
        Ok(StreamSet {
            layer: a.int(c, "layer")?,
            unit: a.int(c, "unit")?,
            artifact,
            experts: a.int(c, "experts")?,
            hidden: a.int(c, "hidden")?,
            inner: a.int(c, "inner")?,
            bias: a.flag(c, "bias")?,
        })
    })
}

/// `[[rows, µs], …]`
fn curve(points: &[(u32, f64)]) -> String {
    let points: Vec<_> = points.iter().map(|(rows, us)| format!("[{rows}, {us:?}]")).collect();
    format!("[{}]", points.join(", "))
}

/// Writes how experts are assigned, a line per layer.
pub(super) fn write(f: &mut fmt::Formatter<'_>, s: &Schedule) -> fmt::Result {
    let t = &s.times;
    f.write_str("\nschedule {")?;
    for (name, unit) in [("hot", s.hot), ("cold", s.cold)] {
        if let Some(unit) = unit {
            write!(f, "{name} = {unit}, ")?;
        }
    }
    write!(f, "modules = {}, frames = {}, moves = {}", s.modules, s.frames, s.moves)?;
    write!(f, ", refine = {}, window_us = {:?}", s.refine.name(), s.window_us)?;
    if let Some(Hybrid { divides: [prompt, token], keeps, ahead, first_us, k, score, pinned }) = &s.hybrid {
        write!(f, ", divides = [{}, {}], keeps = {}", quote(prompt), quote(token), quote(keeps))?;
        write!(f, ", ahead = {ahead}, first_us = {first_us:?}, k = {k}, score = {}", score.name())?;
        let pinned: Vec<_> = pinned.iter().map(|(layer, expert)| format!("[{layer}, {expert}]")).collect();
        write!(f, ", pinned = [{}]", pinned.join(", "))?;
    }
    write!(f, ", expert_bytes = {}, row_bytes = {}", s.expert_bytes, s.row_bytes)?;
    write!(f, ", bring_us = {:?}, striped_us = {:?}", t.bring_us, t.striped_us)?;
    write!(f, ", localized_us = {:?}, internal_us = {:?}", t.localized_us, t.internal_us)?;
    write!(f, ", link_us = {:?}, hot_us = {}", t.link_us, curve(&t.hot))?;
    writeln!(f, ", processor_us = {}, cold_us = {}}} {{", curve(&t.processor), curve(&t.cold))?;
    for (i, ScheduledLayer { homes, segments, brought, modules, cached }) in s.layers.iter().enumerate() {
        write!(f, "  layer {i} {{homes = {homes}, segments = {segments:?}")?;
        if !brought.is_empty() {
            write!(f, ", brought = {brought:?}")?;
        }
        writeln!(f, ", modules = {modules:?}, cached = {cached:?}}}")?;
    }
    writeln!(f, "}}")
}

fn microseconds<'t>(c: &Cursor<'t>, a: &mut Attrs<'t>, key: &str) -> Parsed<f64> {
    a.required(c, key, "microseconds", |v, _| Ok(v.number()))
}

/// Two numbers.
fn two<A: FromStr, B: FromStr>(item: Value<'_>) -> Option<(A, B)> {
    let Value::List(two) = item else { return None };
    let mut two = two.into_iter();
    let both = (two.next()?.number()?, two.next()?.number()?);
    two.next().is_none().then_some(both)
}

fn points<'t>(c: &Cursor<'t>, a: &mut Attrs<'t>, key: &str) -> Parsed<Vec<(u32, f64)>> {
    a.list(c, key, "a list of `[rows, µs]`", two)
}

/// How a unit with frames and the processor divide experts, where a schedule says it.
fn hybrid<'t>(c: &Cursor<'t>, a: &mut Attrs<'t>) -> Parsed<Option<Hybrid>> {
    if !a.has("divides") {
        return Ok(None);
    }
    let text = |item: Value<'t>| if let Value::Str(text) = item { Some(text) } else { None };
    Ok(Some(Hybrid {
        divides: a.required(c, "divides", "the names of two policies", |v, _| {
            let Value::List(names) = v else { return Ok(None) };
            let names: Option<Vec<_>> = names.into_iter().map(text).collect();
            Ok(names.and_then(|names| names.try_into().ok()))
        })?,
        keeps: a.string(c, "keeps")?,
        ahead: a.int(c, "ahead")?,
        first_us: a.required(c, "first_us", "three times", |v, _| {
            let Value::List(times) = v else { return Ok(None) };
            let times: Option<Vec<f64>> = times.into_iter().map(Value::number).collect();
            Ok(times.and_then(|times| times.try_into().ok()))
        })?,
        k: a.int(c, "k")?,
        score: a.variant(c, "score", "`softmax`, `sigmoid` or `identity`", |word, _| {
            Ok(Score::ALL.into_iter().find(|s| s.name() == word))
        })?,
        pinned: a.list(c, "pinned", "a list of `[layer, expert]`", two)?,
    }))
}

/// Reads what [`write`] writes, from behind its first word.
pub(super) fn read(c: &mut Cursor<'_>) -> Parsed<Schedule> {
    let mut schedule = with_attrs(c, |c, a| {
        Ok(Schedule {
            hot: a.optional_int(c, "hot")?,
            cold: a.optional_int(c, "cold")?,
            modules: a.int(c, "modules")?,
            frames: a.int(c, "frames")?,
            moves: a.flag(c, "moves")?,
            refine: a.variant(c, "refine", "`none`, `bottleneck` or `full`", |word, _| {
                Ok(Refine::ALL.into_iter().find(|r| r.name() == word))
            })?,
            hybrid: hybrid(c, a)?,
            window_us: microseconds(c, a, "window_us")?,
            expert_bytes: a.int(c, "expert_bytes")?,
            row_bytes: a.int(c, "row_bytes")?,
            times: ExpertTimes {
                bring_us: microseconds(c, a, "bring_us")?,
                striped_us: microseconds(c, a, "striped_us")?,
                localized_us: microseconds(c, a, "localized_us")?,
                internal_us: microseconds(c, a, "internal_us")?,
                link_us: microseconds(c, a, "link_us")?,
                hot: points(c, a, "hot_us")?,
                processor: points(c, a, "processor_us")?,
                cold: points(c, a, "cold_us")?,
            },
            layers: Vec::new(),
        })
    })?;
    c.punct('{')?;
    while !c.eat('}')? {
        c.keyword("layer")?;
        index(c, schedule.layers.len())?;
        schedule.layers.push(with_attrs(c, |c, a| {
            Ok(ScheduledLayer {
                homes: a.int(c, "homes")?,
                segments: a.list(c, "segments", "a list of segments", Value::number)?,
                brought: if a.has("brought") {
                    a.list(c, "brought", "a list of segments", Value::number)?
                } else {
                    Vec::new()
                },
                modules: a.list(c, "modules", "a list of modules", Value::number)?,
                cached: a.list(c, "cached", "a list of experts", Value::number)?,
            })
        })?);
    }
    Ok(schedule)
}
