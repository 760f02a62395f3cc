//! A projection as the HTP has it: a matrix of codes, and another one of wider codes for some inputs.
//!
//! There are no scales for groups of channels. The weights of input channels for which 4 bits are too coarse
//! are stored in 8 (PowerInfer-2, §6 and §7.6): these inputs are gathered, multiplied by a matrix of their
//! own, and the results are added. The matrix of 4 bits has codes of 0 for them.

use crate::net::{NetworkBuilder, NetworkError, Op, Tensor, TensorId};

/// A projection: `[T, K] → [T, N]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Projection {
    /// `[N, K]`
    pub matrix: Tensor,
    /// Weights `[N, n]` of some inputs, and which these are.
    pub outliers: Option<(Tensor, Vec<u32>)>,
    /// `[N]`, in f32.
    pub bias: Option<Vec<f32>>,
}

impl Projection {
    /// One matrix without a bias.
    pub const fn of(matrix: Tensor) -> Self {
        Self { matrix, outliers: None, bias: None }
    }

    /// Adds it; `name` is that of the result.
    ///
    /// # Errors
    /// Shapes that do not fit, or a bias of another size.
    pub(super) fn apply(
        &self,
        b: &mut NetworkBuilder,
        name: &str,
        x: TensorId,
    ) -> Result<TensorId, NetworkError> {
        let weight = &self.matrix.name;
        let mut operands = vec![x, b.constant(self.matrix.clone())?];
        if let Some(bias) = &self.bias {
            operands.push(b.constant(Tensor::floats(format!("{weight}.bias"), [bias.len()], bias))?);
        }
        let Some((matrix, inputs)) = &self.outliers else { return b.op(name, Op::FullyConnected, &operands) };
        let most = b.op(&format!("{name}.int4"), Op::FullyConnected, &operands)?;
        let inputs: Vec<i32> = inputs.iter().map(|&i| i32::try_from(i).unwrap_or(i32::MAX)).collect();
        let inputs =
            b.constant(Tensor::indices(format!("{}.inputs", matrix.name), [inputs.len()], &inputs))?;
        let gathered = b.op(&format!("{name}.inputs"), Op::Gather { axis: 1 }, &[x, inputs])?;
        let matrix = b.constant(matrix.clone())?;
        let few = b.op(&format!("{name}.int8"), Op::FullyConnected, &[gathered, matrix])?;
        b.op(name, Op::Add, &[most, few])
    }
}
