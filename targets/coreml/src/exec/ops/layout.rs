//! Operators that move elements and compute nothing.

use super::super::call::{Call, normal};
use super::super::error::Fault;
use super::super::table::{Results, one};
use super::super::tensor::{Data, Tensor, View, checked_elements, same_kind};
use crate::package::MAX_RANK;
use std::sync::Arc;

/// A shape that cannot be.
fn bad(parameter: &'static str, shape: &[impl std::fmt::Debug], from: &[usize]) -> Fault {
    Fault::argument(parameter, format!("{shape:?} for a tensor of shape {from:?}"))
}

/// `concat` of `values` along `axis`.
pub(in super::super) fn concat(call: &Call<'_>) -> Results {
    if call.flag("interleave")? {
        return Err(Fault::argument("interleave", "only false is supported"));
    }
    let parts = call.tensors("values")?;
    let first = parts.first().ok_or(Fault::Missing("values"))?;
    let mut shape = first.shape().to_vec();
    let axis = call.axis("axis", shape.len(), None)?;
    let others =
        |s: &[usize]| s.iter().enumerate().filter(|(i, _)| *i != axis).map(|(_, d)| *d).collect::<Vec<_>>();
    for part in &parts {
        if part.shape().len() != shape.len()
            || others(part.shape()) != others(&shape)
            || part.data().dtype() != first.data().dtype()
        {
            return Err(bad("values", part.shape(), first.shape()));
        }
    }
    let sizes: Vec<usize> = parts.iter().map(|p| p.shape()[axis]).collect();
    shape[axis] = sizes.iter().try_fold(0_usize, |sum, &d| sum.checked_add(d)).unwrap_or(0);
    checked_elements(&shape).ok_or_else(|| bad("values", &shape, first.shape()))?;
    let outer: usize = shape[..axis].iter().product();
    let inner: usize = shape[axis + 1..].iter().product();
    macro_rules! join {
        ($kind:ident) => {{
            let mut out = Vec::with_capacity(shape.iter().product());
            for i in 0..outer {
                for (part, size) in parts.iter().zip(&sizes) {
                    if let Data::$kind(v) = part.data() {
                        out.extend_from_slice(&v[i * size * inner..(i + 1) * size * inner]);
                    }
                }
            }
            Data::$kind(out)
        }};
    }
    let data = match first.data() {
        Data::F16(_) => join!(F16),
        Data::F32(_) => join!(F32),
        Data::I32(_) => join!(I32),
        Data::Bool(_) => join!(Bool),
    };
    one(Tensor::new(&shape, data).ok_or_else(|| bad("values", &shape, first.shape())))
}

/// `split` along `axis`, into `num_splits` equal parts or those of `split_sizes`.
pub(in super::super) fn split(call: &Call<'_>) -> Results {
    let x = call.tensor("x")?;
    let axis = call.axis("axis", x.shape().len(), None)?;
    let whole = x.shape()[axis];
    let sizes = match (call.integers("split_sizes")?, call.integer("num_splits")?) {
        (Some(sizes), _) => sizes,
        (None, Some(n)) if n > 0 && whole as i64 % n == 0 && n <= whole as i64 => {
            vec![whole as i64 / n; n as usize]
        }
        (None, n) => return Err(Fault::argument("num_splits", format!("{n:?} parts of {whole}"))),
    };
    let mut start = 0;
    let mut parts = Vec::new();
    for &size in &sizes {
        let size = usize::try_from(size).ok().filter(|&s| s > 0 && s <= whole - start);
        let size = size.ok_or_else(|| bad("split_sizes", &sizes, x.shape()))?;
        parts.push(Arc::new(x.view(&View::whole(x.shape()).part(axis, start, size, 1))));
        start += size;
    }
    if start != whole {
        return Err(bad("split_sizes", &sizes, x.shape()));
    }
    Ok(parts)
}

/// `transpose` by `perm`.
pub(in super::super) fn transpose(call: &Call<'_>) -> Results {
    let x = call.tensor("x")?;
    let rank = x.shape().len();
    let perm = call.integers("perm")?.ok_or(Fault::Missing("perm"))?;
    let perm: Vec<usize> = perm.iter().map(|&a| normal("perm", a, rank)).collect::<Result<_, _>>()?;
    if (0..rank).any(|a| !perm.contains(&a)) || perm.len() != rank {
        return Err(bad("perm", &perm, x.shape()));
    }
    one(Ok(x.view(&View::whole(x.shape()).permuted(&perm))))
}

/// `reshape` to `shape`, of which one dimension may be −1.
pub(in super::super) fn reshape(call: &Call<'_>) -> Results {
    let x = call.tensor("x")?;
    let requested = call.integers("shape")?.ok_or(Fault::Missing("shape"))?;
    let wrong = || bad("shape", &requested, x.shape());
    let known =
        requested.iter().filter(|&&d| d != -1).try_fold(1_i64, |n, &d| n.checked_mul(d)).ok_or_else(wrong)?;
    let open = requested.iter().filter(|&&d| d == -1).count();
    if known <= 0 || open > 1 || requested.len() > MAX_RANK {
        return Err(wrong());
    }
    let rest = x.data().len() as i64 / known;
    let shape = requested.iter().map(|&d| usize::try_from(if d == -1 { rest } else { d }));
    let shape = shape.collect::<Result<Vec<_>, _>>().map_err(|_| wrong())?;
    one(x.reshaped(shape).ok_or_else(wrong))
}

/// `expand_dims`: dimensions of size 1 at `axes` of the result.
pub(in super::super) fn expand_dims(call: &Call<'_>) -> Results {
    let x = call.tensor("x")?;
    let count = call.integers("axes")?.ok_or(Fault::Missing("axes"))?.len();
    let rank = x.shape().len() + count;
    if rank > MAX_RANK {
        return Err(Fault::argument("axes", format!("a result of rank {rank}")));
    }
    let axes = call.axes("axes", rank)?;
    let mut shape = x.shape().to_vec();
    for &axis in &axes {
        shape.insert(axis, 1);
    }
    one(x.reshaped(shape).ok_or(Fault::Missing("x")))
}

/// `squeeze`: without the dimensions `axes`, or all of size 1.
pub(in super::super) fn squeeze(call: &Call<'_>) -> Results {
    let x = call.tensor("x")?;
    let named = call.optional("axes")?.is_some();
    let axes = call.axes("axes", x.shape().len())?;
    let dims = x.shape().iter().enumerate();
    if named && axes.iter().any(|&a| x.shape()[a] != 1) {
        return Err(bad("axes", &axes, x.shape()));
    }
    let shape = dims.filter(|(i, d)| !(axes.contains(i) && **d == 1)).map(|(_, d)| *d).collect();
    one(x.reshaped(shape).ok_or(Fault::Missing("x")))
}

/// `tile`: repeated `reps` times along each dimension.
pub(in super::super) fn tile(call: &Call<'_>) -> Results {
    let x = call.tensor("x")?;
    let given = call.integers("reps")?.ok_or(Fault::Missing("reps"))?;
    let wrong = || bad("reps", &given, x.shape());
    let reps: Vec<usize> =
        given.iter().map(|&r| usize::try_from(r)).collect::<Result<_, _>>().map_err(|_| wrong())?;
    if reps.len() != x.shape().len() {
        return Err(wrong());
    }
    let shape: Option<Vec<usize>> = reps.iter().zip(x.shape()).map(|(r, d)| r.checked_mul(*d)).collect();
    let shape = shape.filter(|s| checked_elements(s).is_some()).ok_or_else(wrong)?;
    let whole = View::whole(x.shape());
    // Every dimension twice: which copy (a stride of 0), and which element.
    let twice = View {
        offset: 0,
        shape: reps.iter().zip(x.shape()).flat_map(|(&r, &d)| [r, d]).collect(),
        strides: whole.strides.iter().flat_map(|&s| [0, s]).collect(),
    };
    let data = same_kind!(x.data(), v => twice.take(v));
    one(Tensor::new(&shape, data).ok_or_else(wrong))
}

/// `identity`.
pub(in super::super) fn identity(call: &Call<'_>) -> Results {
    Ok(vec![call.tensor("x")?])
}
