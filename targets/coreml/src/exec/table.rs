//! The operators: one row each.

use super::States;
use super::call::Call;
use super::error::Fault;
use super::ops::{constexpr, elementwise as each, layout, product, reduce, slice, state};
use super::tensor::Tensor;
use std::sync::Arc;

/// Results of an operator.
pub(super) type Results = Result<Vec<Arc<Tensor>>, Fault>;

/// A single result.
pub(super) fn one(tensor: Result<Tensor, Fault>) -> Results {
    Ok(vec![Arc::new(tensor?)])
}

/// Function of an operator.
#[derive(Clone, Copy)]
pub(super) enum OpFn {
    /// Computes results from arguments.
    Plain(fn(&Call<'_>) -> Results),
    /// Computes results from arguments and states.
    Stateful(fn(&Call<'_>, &mut States) -> Results),
    /// Computes results from constants, when the function is loaded.
    Load(fn(&Call<'_>) -> Results),
}

/// An operator.
pub(super) struct Row {
    /// Name.
    pub(super) name: &'static str,
    /// Parameters that it may have.
    pub(super) parameters: &'static [&'static str],
    /// Its function.
    pub(super) run: OpFn,
}

const fn row(name: &'static str, parameters: &'static [&'static str], run: fn(&Call<'_>) -> Results) -> Row {
    Row { name, parameters, run: OpFn::Plain(run) }
}

const X: &[&str] = &["x"];
const XY: &[&str] = &["x", "y"];
const REDUCE: &[&str] = &["x", "axes", "keep_dims"];
const CONV: &[&str] = &["x", "weight", "bias", "strides", "pad_type", "pad", "dilations", "groups"];
const SLICE: &[&str] = &["x", "begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask"];
const UPDATE: &[&str] = &["x", "update", "begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask"];

/// Every operator but `const`, which is read and not computed.
static TABLE: &[Row] = &[
    row("abs", X, |c| each::unary(c, f32::abs)),
    row("add", XY, |c| each::binary(c, |x, y| x + y)),
    row("cast", &["x", "dtype"], each::cast),
    row("clip", &["x", "alpha", "beta"], each::clip),
    row("concat", &["values", "axis", "interleave"], layout::concat),
    Row {
        name: "constexpr_affine_dequantize",
        parameters: &["quantized_data", "zero_point", "scale", "axis"],
        run: OpFn::Load(constexpr::affine),
    },
    Row {
        name: "constexpr_blockwise_shift_scale",
        parameters: &["data", "scale", "offset"],
        run: OpFn::Load(constexpr::blockwise),
    },
    Row {
        name: "constexpr_lut_to_dense",
        parameters: &["indices", "lut", "vector_axis"],
        run: OpFn::Load(constexpr::lut),
    },
    row("conv", CONV, product::conv),
    Row { name: "coreml_update_state", parameters: &["state", "value"], run: OpFn::Stateful(state::update) },
    row("exp", X, |c| each::unary(c, f32::exp)),
    row("expand_dims", &["x", "axes"], layout::expand_dims),
    row("gelu", &["x", "mode"], each::gelu),
    row("identity", X, layout::identity),
    row("layer_norm", &["x", "axes", "gamma", "beta", "epsilon"], reduce::layer_norm),
    row("linear", &["x", "weight", "bias"], product::linear),
    row("matmul", &["x", "y", "transpose_x", "transpose_y"], product::matmul),
    row("maximum", XY, |c| each::binary(c, f32::max)),
    row("minimum", XY, |c| each::binary(c, f32::min)),
    row("mul", XY, |c| each::binary(c, |x, y| x * y)),
    Row { name: "read_state", parameters: &["input"], run: OpFn::Stateful(|c, s| state::read(c, s)) },
    row("real_div", XY, |c| each::binary(c, |x, y| x / y)),
    row("reduce_max", REDUCE, |c| reduce::reduce(c, |v| v.iter().copied().fold(f32::NEG_INFINITY, f32::max))),
    row("reduce_mean", REDUCE, |c| reduce::reduce(c, |v| v.iter().sum::<f32>() / v.len() as f32)),
    row("reduce_sum", REDUCE, |c| reduce::reduce(c, |v| v.iter().sum())),
    row("relu", X, |c| each::unary(c, |x| x.max(0.0))),
    row("reshape", &["x", "shape"], layout::reshape),
    row("rsqrt", &["x", "epsilon"], each::rsqrt),
    row("sigmoid", X, |c| each::unary(c, each::sigmoid)),
    row("silu", X, |c| each::unary(c, |x| x * each::sigmoid(x))),
    row("slice_by_index", SLICE, slice::slice_by_index),
    row("slice_by_size", &["x", "begin", "size"], slice::slice_by_size),
    row("slice_update", UPDATE, slice::slice_update),
    row("softmax", &["x", "axis"], reduce::softmax),
    row("split", &["x", "num_splits", "split_sizes", "axis"], layout::split),
    row("sqrt", X, |c| each::unary(c, f32::sqrt)),
    row("square", X, |c| each::unary(c, |x| x * x)),
    row("squeeze", &["x", "axes"], layout::squeeze),
    row("sub", XY, |c| each::binary(c, |x, y| x - y)),
    row("tanh", X, |c| each::unary(c, f32::tanh)),
    row("tile", &["x", "reps"], layout::tile),
    row("transpose", &["x", "perm"], layout::transpose),
    Row { name: "write_state", parameters: &["input", "data"], run: OpFn::Stateful(state::write_state) },
];

/// Names of all operators, in order.
pub(super) fn names() -> Vec<&'static str> {
    TABLE.iter().map(|row| row.name).collect()
}

/// The operator of that name.
pub(super) fn find(name: &str) -> Option<&'static Row> {
    TABLE.binary_search_by_key(&name, |row| row.name).ok().and_then(|i| TABLE.get(i))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operator_is_found_by_its_name() {
        assert!(TABLE.is_sorted_by_key(|row| row.name));
        assert!(names().iter().all(|name| find(name).is_some_and(|row| row.name == *name)));
        assert!(find("topk").is_none());
    }
}
