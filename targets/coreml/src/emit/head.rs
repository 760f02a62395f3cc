//! The head: hidden states to logits, the vocabulary in parts.

use super::write::Writer;
use super::{EmitError, Limits, Norm, Raw, Result, check_rows, checked, legal, within};
use crate::legalise::language::{Attr, Form};
use crate::legalise::{Legal, Term};
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
    /// Norm of the input, if it is part of the graph.
    pub norm: Option<Norm>,
    /// Rows of each function.
    pub rows: Vec<usize>,
}

impl Head {
    /// Ranges of the vocabulary that the results hold: `logits0`, `logits1`, …, from the first of
    /// [`Self::entries`].
    pub fn splits(&self, limits: &Limits) -> Vec<Range<usize>> {
        splits(&self.entries, self.split.min(limits.rules.extent))
    }

    /// Writes the program: a function `rows{T}` for each number of rows, with a result for each split.
    ///
    /// # Errors
    /// Weights of other shapes, entries outside of them, rows that the unit does not take, or more bytes than
    /// a graph may have: then with the number of entries that would fit.
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
        let (mut weights, layout, legal) = (Vec::new(), limits.layout(), self.legal(limits)?);
        let functions = self.rows.iter().map(|&rows| {
            let mut b = FunctionBuilder::new(format!("rows{rows}"), &mut weights);
            let x = b.input("x", &[rows, self.hidden, 1, 1]);
            let results = Writer::new(&legal, &mut b, (layout, limits), (rows, x)).results()?;
            let names: Vec<_> = (0..results.len()).map(|i| format!("logits{i}")).collect();
            let outputs: Vec<_> = names.iter().map(|name| &**name).zip(results).collect();
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

    /// Its computation on the unit.
    ///
    /// # Errors
    /// No form of it is one that the unit runs.
    pub fn legal(&self, limits: &Limits) -> Result<Legal> {
        let mut t = Term::new();
        let mut x = t.input(self.hidden);
        if let Some(norm) = &self.norm {
            let attr = t.attr(Attr::Norm("norm", norm.clone(), None));
            x = t.add(Form::Norm([attr, x]));
        }
        for (i, part) in self.splits(limits).into_iter().enumerate() {
            let cut = |raw: &Raw| raw.rows(part.start, part.len());
            let y =
                t.linear(x, &format!("head{i}"), &cut(&self.weight), self.bias.as_ref().map(cut).as_ref());
            t.result(y);
        }
        legal(&self.name, &t, limits.layout())
    }
}

fn splits(entries: &Range<usize>, most: usize) -> Vec<Range<usize>> {
    let starts = entries.clone().step_by(most.max(1));
    starts.map(|start| start..entries.end.min(start.saturating_add(most))).collect()
}
