//! Faults of a stream, and the invariants of every form of a stream.

use crate::op::{Glu, Op};
use crate::stream::{Instruction, Stream, is_name};
use crate::{EVENTS, MAX_CODE, MAX_LINES, MAX_NAME, MAX_REGIONS, text};
use std::collections::BTreeSet;

/// Fault of a stream, and its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {message}")]
pub struct Fault {
    /// Index of the instruction, where it is one that is wrong.
    pub instruction: Option<usize>,
    /// Place: the header, a region, or an instruction with its number and text.
    pub at: String,
    /// The fault, and the remedy.
    pub message: String,
}

impl Fault {
    pub(crate) fn header(message: impl Into<String>) -> Self {
        Self { instruction: None, at: "header".into(), message: message.into() }
    }

    pub(crate) fn region(name: &str, message: impl Into<String>) -> Self {
        Self { instruction: None, at: format!("region `{name}`"), message: message.into() }
    }

    pub(crate) fn instruction(stream: &Stream, index: usize, message: impl Into<String>) -> Self {
        Self { instruction: Some(index), at: named(stream, index), message: message.into() }
    }
}

/// An instruction's number and text.
pub(crate) fn named(stream: &Stream, index: usize) -> String {
    let text = stream.code.get(index).map(|i| text::instruction(stream, i)).unwrap_or_default();
    format!("instruction {index}, `{text}`")
}

/// Checks what both the text form and the binary form take for granted: names, references and limits.
pub(crate) fn check_form(stream: &Stream) -> Result<(), Fault> {
    let name = |name: &str| {
        format!(
            "`{name}` is not a name: take at most {MAX_NAME} letters, digits, `_` and `.`, a letter or `_` first"
        )
    };
    if !is_name(&stream.name) {
        return Err(Fault::header(name(&stream.name)));
    }
    if stream.regions.len() > MAX_REGIONS || stream.code.len() > MAX_CODE {
        return Err(Fault::header(format!(
            "{} regions and {} instructions: {MAX_REGIONS} and at most {MAX_CODE} are allowed",
            stream.regions.len(),
            stream.code.len()
        )));
    }
    let mut names = BTreeSet::new();
    for region in &stream.regions {
        if !is_name(&region.name) {
            return Err(Fault::region(&region.name, name(&region.name)));
        }
        if !names.insert(&region.name) {
            return Err(Fault::region(&region.name, "another region has this name: give each its own"));
        }
    }
    for (index, instruction) in stream.code.iter().enumerate() {
        if let Some(message) = malformed(stream, instruction) {
            return Err(Fault::instruction(stream, index, message));
        }
    }
    Ok(())
}

/// Part of an instruction that has no text form.
fn malformed(stream: &Stream, instruction: &Instruction) -> Option<String> {
    if let Some(event) = instruction.signal.filter(|&event| event >= EVENTS) {
        return Some(format!("there is no event e{event}: the last is e{}", EVENTS - 1));
    }
    if let Op::Glu { kind: Glu::Clamped { alpha, limit }, .. } = instruction.op
        && !(alpha.is_finite() && limit.is_finite())
    {
        return Some("alpha and limit are finite numbers".into());
    }
    for operand in instruction.op.lines() {
        let (region, regions) = (operand.lines.region, stream.regions.len());
        if usize::from(region) >= regions {
            return Some(format!("there is no region {region}: the stream has {regions}"));
        }
        if operand.lines.line >= MAX_LINES || operand.stride >= MAX_LINES {
            return Some(format!("lines and strides are below {MAX_LINES}"));
        }
    }
    None
}
