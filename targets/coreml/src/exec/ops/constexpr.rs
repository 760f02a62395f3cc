//! Compressed weights, made dense when a function is loaded.

use super::super::call::{Call, Floats, normal};
use super::super::error::Fault;
use super::super::table::{Results, one};
use super::super::tensor::{Tensor, View, checked_elements};

/// Blocks of `data` share an entry of `scales`: both of the same rank, and each dimension divides.
/// Gives the entry of every element, in order.
fn spread<T: Copy>(scales: &[T], scale_shape: &[usize], shape: &[usize]) -> Option<Vec<T>> {
    if scale_shape.len() != shape.len() || shape.iter().zip(scale_shape).any(|(d, s)| !d.is_multiple_of(*s)) {
        return None;
    }
    // Every dimension twice: which block, and which element of it (a stride of 0).
    let own = View::whole(scale_shape);
    let view = View {
        offset: 0,
        shape: shape.iter().zip(scale_shape).flat_map(|(d, s)| [*s, d / s]).collect(),
        strides: own.strides.iter().flat_map(|&s| [s, 0]).collect(),
    };
    Some(view.take(scales))
}

/// `scale · (data − offset)`, rounded to the type of the scale.
fn dequantised(data: Floats, scale: &Floats, scales: &[f32], offsets: &[f32]) -> Results {
    let values = data.values.iter().zip(offsets).zip(scales).map(|((d, o), s)| s * (d - o)).collect();
    one(Tensor::rounded(scale.dtype, data.shape, values))
}

/// `constexpr_blockwise_shift_scale`: `data`, with `scale` and `offset` per block.
pub(in super::super) fn blockwise(call: &Call<'_>) -> Results {
    let (data, scale) = (call.numbers("data")?, call.floats("scale")?);
    let wrong =
        |p, shape: &[usize]| Fault::argument(p, format!("{shape:?} for data of shape {:?}", data.shape));
    let scales =
        spread(&scale.values, &scale.shape, &data.shape).ok_or_else(|| wrong("scale", &scale.shape))?;
    let offsets = if call.optional("offset")?.is_some() {
        let offset = call.numbers("offset")?;
        spread(&offset.values, &offset.shape, &data.shape).ok_or_else(|| wrong("offset", &offset.shape))?
    } else {
        vec![0.0; data.values.len()]
    };
    dequantised(data, &scale, &scales, &offsets)
}

/// `constexpr_affine_dequantize`: `quantized_data`, with `scale` and `zero_point` per place of `axis`, or
/// one.
pub(in super::super) fn affine(call: &Call<'_>) -> Results {
    let (data, scale) = (call.numbers("quantized_data")?, call.floats("scale")?);
    let zero = call.numbers("zero_point")?;
    let axis = call.axis("axis", data.shape.len(), None)?;
    let along = |parameter, given: &Floats| {
        let mut shape = vec![1; data.shape.len()];
        shape[axis] = given.values.len();
        let spread = if given.shape.len() < 2 { spread(&given.values, &shape, &data.shape) } else { None };
        spread.ok_or_else(|| Fault::argument(parameter, format!("{:?} along axis {axis}", given.shape)))
    };
    let (scales, offsets) = (along("scale", &scale)?, along("zero_point", &zero)?);
    dequantised(data, &scale, &scales, &offsets)
}

/// `constexpr_lut_to_dense`: every index selects a vector of the table of its block, placed along
/// `vector_axis`.
///
/// `lut` is `[blocks…, entries, vector]`, with as many block dimensions as `indices` has.
pub(in super::super) fn lut(call: &Call<'_>) -> Results {
    let (indices, lut) = (call.numbers("indices")?, call.floats("lut")?);
    let rank = indices.shape.len();
    let wrong =
        || Fault::argument("lut", format!("{:?} for indices of shape {:?}", lut.shape, indices.shape));
    if lut.shape.len() != rank + 2 || rank == 0 {
        return Err(wrong());
    }
    let (blocks, entries, len) = (&lut.shape[..rank], lut.shape[rank], lut.shape[rank + 1]);
    let count: usize = blocks.iter().product();
    let numbers: Vec<usize> = (0..count).collect();
    let tables = spread(&numbers, blocks, &indices.shape).ok_or_else(wrong)?;
    let axis = match call.integer("vector_axis")? {
        Some(axis) => normal("vector_axis", axis, rank)?,
        None if len == 1 => rank - 1,
        None => return Err(Fault::Missing("vector_axis")),
    };
    let mut shape = indices.shape.clone();
    shape[axis] = shape[axis].checked_mul(len).ok_or_else(wrong)?;
    checked_elements(&shape).ok_or_else(wrong)?;
    let mut dense = Vec::with_capacity(indices.values.len() * len);
    for (&index, &table) in indices.values.iter().zip(&tables) {
        if index < 0.0 || index as usize >= entries {
            return Err(Fault::argument("indices", format!("{index} of {entries} entries")));
        }
        let start = (table * entries + index as usize) * len;
        dense.extend_from_slice(&lut.values[start..start + len]);
    }
    // The vectors are innermost; their elements belong after `axis`.
    let stored = [&indices.shape[..], &[len]].concat();
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.insert(axis + 1, rank);
    let dense = View::whole(&stored).permuted(&perm).take(&dense);
    one(Tensor::rounded(lut.dtype, shape, dense))
}
