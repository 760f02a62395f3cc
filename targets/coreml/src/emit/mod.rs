//! Writes the programs of a model's parts.
//!
//! | part | function | inputs → results |
//! |---|---|---|
//! | [`ExpertGroup`] | `cap{C}` | `x[(G·C), H, 1, 1]` → `y` of the same shape |
//! | [`Attention`] | `chunk{T}`, `chunk{T}_at{P}` | `x[T, H, 1, 1]`, angles, mask, where to write → `y[T, H, 1, 1]`; state `kv` |
//! | [`LatentAttention`] | the same | the same |
//! | [`Dense`] | `rows{T}` | `x[T, H, 1, 1]` → `y` of the same shape |
//! | [`Head`] | `rows{T}` | `x[T, H, 1, 1]` → `logits0[T, n, 1, 1]`, `logits1`, … |
//!
//! At every boundary a row is a token and its channels are contiguous, as in the rest of moec: inputs are
//! rows in f16, and nothing is transposed outside. Inside, rows are the last axis if the unit pads that one
//! ([`Rules::last_axis_bytes`]), as in Apple's and ANEMLL's models. Linear layers are 1×1 convolutions
//! (NPUMoE, §3 and §4.2). Functions of one program differ in rows only, and share weights.
//!
//! All but [`ExpertGroup`] are described in linear layers, and [`crate::legalise`] makes convolutions of
//! these; a program has the transpositions that the legalised term has.
//!
//! The bytes of a graph are known before it is written. A graph over the limit of its unit is an error with
//! its name, its bytes, and the part of it that would fit.

mod attention;
mod cache;
mod error;
mod ffn;
mod group;
mod head;
mod latent;
pub(crate) mod layout;
mod norm;
mod raw;
mod rope;
mod write;

pub use attention::{Attention, Projection};
pub use cache::{Chunk, MASKED};
pub use error::EmitError;
pub use ffn::{Dense, Gate, Networks};
pub use group::ExpertGroup;
pub use head::Head;
pub use latent::LatentAttention;
pub use norm::Norm;
pub use raw::Raw;
pub use rope::Rope;

use crate::legalise::{Legal, Term};
use crate::program::{Counted, Program, Rules, about};
use layout::Layout;

type Result<T> = std::result::Result<T, EmitError>;

/// Limits of a unit.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Operators, states, extents.
    pub rules: Rules,
    /// Most bytes of weights in a graph. Over it, NPUMoE (§4.2) saw graphs of an M2 Ultra fall back to the
    /// CPU at about 1.2 GB.
    pub graph_bytes: u64,
    /// Bytes that this limit counts.
    pub counted: Counted,
}

impl Limits {
    /// Place of rows between the boundaries of a graph.
    fn layout(&self) -> Layout {
        if self.rules.pads() { Layout::Columns } else { Layout::Rows }
    }
}

/// The form of a part that the unit runs.
fn legal(graph: &str, term: &Term, layout: Layout) -> Result<Legal> {
    term.legalise(layout).ok_or_else(|| EmitError::Description {
        graph: graph.to_owned(),
        what: "no rewrite leads to a form that the unit runs".to_owned(),
    })
}

/// Refuses a graph that is over the limit. `bytes(n)` is what `n` of its `parts` take; it grows with `n`.
fn within(
    graph: &str,
    limits: &Limits,
    parts: usize,
    unit: &'static str,
    bytes: impl Fn(usize) -> u64,
) -> Result<()> {
    if bytes(parts) <= limits.graph_bytes {
        return Ok(());
    }
    // The largest number that fits is where bytes cross the limit.
    let (mut fits, mut over) = (0, parts);
    while over - fits > 1 {
        let middle = fits + (over - fits) / 2;
        if bytes(middle) <= limits.graph_bytes { fits = middle } else { over = middle }
    }
    Err(EmitError::TooLarge {
        graph: graph.to_owned(),
        bytes: bytes(parts),
        limit: limits.graph_bytes,
        parts,
        unit,
        fits,
    })
}

/// Rows of a function must fill the unit's alignment, and none may come twice.
fn check_rows(graph: &str, what: &'static str, rows: &[usize], limits: &Limits) -> Result<()> {
    let multiple = limits.rules.rows_multiple;
    let fault = |value| EmitError::Rows { graph: graph.to_owned(), what, value, multiple };
    if rows.is_empty() {
        return Err(fault(None));
    }
    let twice = |i: usize| rows[..i].contains(&rows[i]);
    match (0..rows.len()).find(|&i| rows[i] == 0 || !rows[i].is_multiple_of(multiple) || twice(i)) {
        Some(i) => Err(fault(Some(rows[i]))),
        None => Ok(()),
    }
}

/// A finished program that the unit may run, with descriptions of its inputs, states and results.
fn checked(mut program: Program, limits: &Limits) -> Result<Program> {
    for function in &mut program.functions {
        for id in function.inputs.iter().chain(&function.states).chain(&function.outputs) {
            if let Some(value) = function.values.get_mut(id.index()) {
                value.about = about::tensor(&value.name, &value.shape);
            }
        }
    }
    program.verify(&limits.rules)?;
    Ok(program)
}
