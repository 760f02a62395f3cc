//! Experts in a group: one graph, one launch (NPUMoE, §4.2).

use super::{Expert, Layout, Limits, Result, check_rows, checked, within};
use crate::program::{FunctionBuilder, Program, blob_bytes};
use moec_ir::Glu;

/// `G` experts of a layer.
#[derive(Clone, Debug)]
pub struct ExpertGroup {
    /// Name of the graph.
    pub name: String,
    /// Channels `H` of a token.
    pub hidden: usize,
    /// Channels `I` between up and down.
    pub intermediate: usize,
    /// How gate and up join.
    pub glu: Glu,
    /// The experts, in the order of their slices.
    pub experts: Vec<Expert>,
    /// Capacities `C`: rows of a slice. Each becomes a function; all share the weights.
    pub capacities: Vec<usize>,
    /// Layout inside.
    pub layout: Layout,
}

impl ExpertGroup {
    /// Writes the program: a function `cap{C}` for each capacity, `x[(G·C), H, 1, 1] → y[(G·C), H, 1, 1]`.
    ///
    /// Slice `g` of `x` holds the tokens of expert `g` in front and zeros behind; `y` has their results at the same
    /// places. What a padded row gives is not zero where there are biases: it is not to be read.
    ///
    /// # Errors
    /// Weights of other shapes, capacities that the unit does not take, or more bytes than a graph may have: then
    /// with the number of experts that would fit.
    pub fn emit(&self, limits: &Limits) -> Result<Program> {
        check_rows(&self.name, "capacities", &self.capacities, limits)?;
        for expert in &self.experts {
            expert.check(&self.name, self.hidden, self.intermediate)?;
        }
        within(&self.name, limits, self.experts.len(), "experts", |n| {
            blob_bytes(self.experts.iter().take(n).flat_map(Expert::arrays))
        })?;
        let mut weights = Vec::new();
        let functions = self.capacities.iter().map(|&capacity| {
            let mut b = FunctionBuilder::new(format!("cap{capacity}"), &mut weights);
            let x = b.input("x", &[self.experts.len() * capacity, self.hidden, 1, 1]);
            let slices = self.experts.iter().enumerate().map(|(g, expert)| {
                let slice = b.slice(x, 0, g * capacity, capacity)?;
                let slice = self.layout.enter(&mut b, slice)?;
                let y = expert.apply(&mut b, slice, self.glu)?;
                self.layout.leave(&mut b, y)
            });
            let slices = slices.collect::<Result<Vec<_>>>()?;
            let y = b.concat(&slices, 0)?;
            Ok(b.finish(&[("y", y)]))
        });
        let functions = functions.collect::<Result<_>>()?;
        checked(Program { name: self.name.clone(), weights, functions }, limits)
    }
}
