//! Experts in a group: one graph, one launch (NPUMoE, §4.2).
//!
//! If rows are the last axis, experts are adjacent in the channel axis, `[1, G·H, 1, C]`. A grouped
//! convolution computes as many of them as the unit's largest extent permits. One convolution for each of 16
//! experts was measured to be slower than a grouped one (Anemll-PhiMoe-exp, on an M2). There a grouped one
//! needs fewer than 65536 channels. If rows are the first axis, every expert has its slice of them and its
//! own convolutions.

use super::{Layout, Limits, Networks, Result, check_rows, checked, within};
use crate::program::{FunctionBuilder, Program, ValueId, blob_bytes};
use moec_ir::Glu;
use std::ops::Range;

/// `G` experts of a layer.
#[derive(Clone, Debug)]
pub struct ExpertGroup {
    /// Name of the graph.
    pub name: String,
    /// Channels `H` of a token.
    pub hidden: usize,
    /// Channels `I` between up and down.
    pub intermediate: usize,
    /// Function that joins gate and up.
    pub glu: Glu,
    /// Names of the experts, in the order of their slices.
    pub experts: Vec<String>,
    /// Their weights, in that order.
    pub weights: Networks,
    /// Capacities `C`: rows of a slice. Each becomes a function; all share the weights.
    pub capacities: Vec<usize>,
}

impl ExpertGroup {
    /// Writes the program: a function `cap{C}` for each capacity, `x[(G·C), H, 1, 1] → y[(G·C), H, 1, 1]`.
    ///
    /// Slice `g` of `x` holds the tokens of expert `g` first and zeros after them; `y` has their results at
    /// the same places. What a padded row gives is not zero where there are biases: it is not to be read.
    ///
    /// # Errors
    /// Weights of other shapes, capacities that the unit does not take, or more bytes than a graph may have:
    /// then with the number of experts that would fit.
    pub fn emit(&self, limits: &Limits) -> Result<Program> {
        check_rows(&self.name, "capacities", &self.capacities, limits)?;
        let count = self.experts.len();
        self.weights.check(&self.name, count, self.hidden, self.intermediate)?;
        within(&self.name, limits, count, "experts", |n| {
            let parts = self.batches(n, limits).into_iter();
            let parts = parts.map(|part| self.weights.part(part.start, part.len(), count));
            let arrays = parts.flat_map(|part| part.arrays(limits.counted).collect::<Vec<_>>());
            blob_bytes(arrays)
        })?;
        let mut weights = Vec::new();
        let functions = self.capacities.iter().map(|&capacity| {
            let mut b = FunctionBuilder::new(format!("cap{capacity}"), &mut weights);
            let x = b.input("x", &[count * capacity, self.hidden, 1, 1]);
            let y = match limits.layout() {
                Layout::Rows => self.by_rows(&mut b, x, capacity)?,
                Layout::Columns => self.by_columns(&mut b, x, capacity, limits)?,
            };
            Ok(b.finish(&[("y", y)]))
        });
        let functions = functions.collect::<Result<_>>()?;
        let description = format!("Group `{}`: {}", self.name, self.experts.join(", "));
        checked(Program { name: self.name.clone(), description, weights, functions }, limits)
    }

    /// The first `count` experts in as many as one convolution takes.
    fn batches(&self, count: usize, limits: &Limits) -> Vec<Range<usize>> {
        let most = match limits.layout() {
            Layout::Rows => 1,
            Layout::Columns => limits.rules.extent / self.hidden.max(self.intermediate).max(1),
        };
        let most = most.clamp(1, count.max(1));
        (0..count).step_by(most).map(|first| first..count.min(first + most)).collect()
    }

    fn by_rows(&self, b: &mut FunctionBuilder, x: ValueId, capacity: usize) -> Result<ValueId> {
        let count = self.experts.len();
        let slices = (0..count).map(|g| {
            let slice = b.slice(x, 0, g * capacity, capacity)?;
            let own = self.weights.part(g, 1, count);
            own.apply(b, slice, self.glu, 1, &format!(" {}", self.experts[g]))
        });
        let slices = slices.collect::<Result<Vec<_>>>()?;
        Ok(b.concat(&slices, 0)?)
    }

    fn by_columns(
        &self,
        b: &mut FunctionBuilder,
        x: ValueId,
        capacity: usize,
        limits: &Limits,
    ) -> Result<ValueId> {
        let (count, hidden) = (self.experts.len(), self.hidden);
        let x = b.reshape(x, &[1, count, capacity, hidden])?;
        let x = b.transpose(x, &[0, 1, 3, 2])?;
        let parts = self.batches(count, limits).into_iter().map(|part| {
            let (first, len) = (part.start, part.len());
            let slice = b.slice(x, 1, first, len)?;
            let slice = b.reshape(slice, &[1, len * hidden, 1, capacity])?;
            let at = match &self.experts[part] {
                [one] => format!(" {one}"),
                [one, .., last] => format!(" {one} to {last}"),
                [] => String::new(),
            };
            let y = self.weights.part(first, len, count).apply(b, slice, self.glu, len, &at)?;
            Ok(b.reshape(y, &[1, len, hidden, capacity])?)
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let y = b.concat(&parts, 1)?;
        let y = b.transpose(y, &[0, 1, 3, 2])?;
        Ok(b.reshape(y, &[count * capacity, hidden, 1, 1])?)
    }
}
