//! A projection as the HTP has it: one matrix of codes, or two of different widths side by side.
//!
//! There are no scales for groups of channels. Whole output channels for which 4 bits are too coarse are
//! stored in 8 (PowerInfer-2, §6 and §7.6). The channels of both widths are two matrices with concatenated
//! results, and an order gives the place of each channel. An order in the middle of a network is folded into
//! the next layer ([`super::Ffn`]); at its end a gathering undoes it.

use crate::net::{NetworkBuilder, NetworkError, Op, Tensor, TensorId};

/// A projection: `[T, K] → [T, N]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Projection {
    /// Matrices `[n, K]` whose results follow each other; one or two.
    pub matrices: Vec<Tensor>,
    /// Channel of each concatenated result; `None`: they are in order.
    pub order: Option<Vec<u32>>,
    /// `[N]`, in f32, in the order of the channels.
    pub bias: Option<Vec<f32>>,
}

impl Projection {
    /// One matrix without a bias.
    pub fn of(matrix: Tensor) -> Self {
        Self { matrices: vec![matrix], order: None, bias: None }
    }

    /// Channels that it gives.
    pub fn channels(&self) -> usize {
        self.matrices.iter().filter_map(|m| m.shape.first()).sum()
    }

    /// Channel of a concatenated result.
    pub fn channel(&self, at: usize) -> usize {
        self.order.as_ref().and_then(|o| o.get(at)).map_or(at, |c| *c as usize)
    }

    /// Appends it, its results in its own order; `name` is that of the result.
    ///
    /// # Errors
    /// Shapes that do not fit, or a bias of another size.
    pub(super) fn apply_unordered(
        &self,
        b: &mut NetworkBuilder,
        name: &str,
        x: TensorId,
    ) -> Result<TensorId, NetworkError> {
        let single = self.matrices.len() == 1;
        let mut first = 0;
        let mut parts = Vec::new();
        for (i, matrix) in self.matrices.iter().enumerate() {
            let n = matrix.shape.first().copied().unwrap_or(0);
            let weight = b.constant(matrix.clone())?;
            let mut operands = vec![x, weight];
            if let Some(bias) = &self.bias {
                let own: Vec<f32> = (first..first + n)
                    .map(|at| bias.get(self.channel(at)).copied().unwrap_or(f32::NAN))
                    .collect();
                operands.push(b.constant(Tensor::floats(format!("{}.bias", matrix.name), [n], &own))?);
            }
            let name = if single { name.to_owned() } else { format!("{name}.{i}") };
            parts.push(b.op(&name, Op::FullyConnected, &operands)?);
            first += n;
        }
        if single { Ok(parts[0]) } else { b.op(name, Op::Concat { axis: 1 }, &parts) }
    }

    /// Adds the projection, with results in the order of the channels.
    ///
    /// # Errors
    /// As [`Self::apply_unordered`].
    pub(super) fn apply(
        &self,
        b: &mut NetworkBuilder,
        name: &str,
        x: TensorId,
    ) -> Result<TensorId, NetworkError> {
        let Some(order) = &self.order else { return self.apply_unordered(b, name, x) };
        let mixed = self.apply_unordered(b, &format!("{name}.mixed"), x)?;
        let mut places = vec![0; order.len()];
        for (at, channel) in order.iter().enumerate() {
            if let Some(place) = places.get_mut(*channel as usize) {
                *place = at as i32;
            }
        }
        let weight = self.matrices.first().map_or("", |m| &m.name);
        let places = b.constant(Tensor::indices(format!("{weight}.places"), [places.len()], &places))?;
        b.op(name, Op::Gather { axis: 1 }, &[mixed, places])
    }
}
