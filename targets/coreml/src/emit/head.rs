//! The head: hidden states to logits, the vocabulary in parts.

use super::{EmitError, Limits, Norm, Raw, Result, check_rows, checked, within};
use crate::program::{FunctionBuilder, Program, blob_bytes};
use std::ops::Range;

/// Entries of a vocabulary, or all of them, as one graph.
#[derive(Clone, Debug)]
pub struct Head {
    /// Name of the graph.
    pub name: String,
    /// Channels of a token.
    pub hidden: usize,
    /// `[V, H]`.
    pub weight: Raw,
    /// `[V]`.
    pub bias: Option<Raw>,
    /// Entries of the vocabulary that this graph computes.
    pub entries: Range<usize>,
    /// Most channels of one result; the unit's largest extent bounds it, too.
    pub split: usize,
    /// Norm in front, where it is not done outside.
    pub norm: Option<Norm>,
    /// Rows of each function.
    pub rows: Vec<usize>,
}

impl Head {
    /// Ranges of the vocabulary that the results hold: `logits0`, `logits1`, …, from the first of [`Self::entries`].
    pub fn splits(&self, limits: &Limits) -> Vec<Range<usize>> {
        splits(&self.entries, self.split.min(limits.rules.extent))
    }

    /// Writes the program: a function `rows{T}` for each number of rows, with a result for each split.
    ///
    /// # Errors
    /// Weights of other shapes, entries outside of them, rows that the unit does not take, or more bytes than a
    /// graph may have: then with the number of entries that would fit.
    pub fn emit(&self, limits: &Limits) -> Result<Program> {
        check_rows(&self.name, "numbers of rows", &self.rows, limits)?;
        let vocabulary = self.weight.shape.first().copied().unwrap_or(0);
        self.weight.expect(&self.name, "head", &[vocabulary, self.hidden])?;
        if let Some(bias) = &self.bias {
            bias.expect(&self.name, "head_bias", &[vocabulary])?;
        }
        if let Some(norm) = &self.norm {
            norm.check(&self.name, "norm", self.hidden)?;
        }
        if self.entries.is_empty() || self.entries.end > vocabulary || self.split == 0 {
            return Err(EmitError::Description {
                graph: self.name.clone(),
                what: format!("entries {:?} of a vocabulary of {vocabulary}", self.entries),
            });
        }
        within(&self.name, limits, self.entries.len(), "vocabulary entries", |n| {
            let part = self.entries.start..self.entries.start + n;
            let splits = splits(&part, self.split.min(limits.rules.extent));
            let arrays = splits.into_iter().flat_map(|split| {
                let parts = std::iter::once(&self.weight).chain(&self.bias);
                parts.flat_map(move |raw| raw.rows(split.start, split.len()).arrays(limits.counted))
            });
            blob_bytes(arrays.chain(self.norm.iter().flat_map(|norm| norm.arrays(limits.counted))))
        })?;
        let (mut weights, layout) = (Vec::new(), limits.layout());
        let functions = self.rows.iter().map(|&rows| {
            let mut b = FunctionBuilder::new(format!("rows{rows}"), &mut weights);
            let x = b.input("x", &[rows, self.hidden, 1, 1]);
            let mut x = layout.enter(&mut b, x)?;
            if let Some(norm) = &self.norm {
                x = norm.whole(&mut b, x, "norm")?;
            }
            let parts = self.splits(limits).into_iter().enumerate().map(|(i, part)| {
                let weight = self.weight.rows(part.start, part.len()).conv(&format!("head{i}"));
                let bias = self.bias.as_ref();
                let bias = bias.map(|raw| {
                    raw.rows(part.start, part.len()).weight(&format!("head{i}_bias"), [part.len()])
                });
                let y = b.conv(x, &weight, bias.as_ref())?;
                Ok((format!("logits{i}"), layout.leave(&mut b, y)?))
            });
            let parts = parts.collect::<Result<Vec<_>>>()?;
            let outputs: Vec<_> = parts.iter().map(|(name, id)| (&**name, *id)).collect();
            Ok(b.finish(&outputs))
        });
        let functions = functions.collect::<Result<_>>()?;
        let description = format!(
            "Entries {} to {} of a vocabulary of {vocabulary}: hidden states to logits",
            self.entries.start,
            self.entries.end - 1
        );
        checked(Program { name: self.name.clone(), description, weights, functions }, limits)
    }
}

fn splits(entries: &Range<usize>, most: usize) -> Vec<Range<usize>> {
    let starts = entries.clone().step_by(most.max(1));
    starts.map(|start| start..entries.end.min(start.saturating_add(most))).collect()
}
