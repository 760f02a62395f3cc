//! Matrix products: `conv` of kernel 1, `linear`, `matmul`. Sums are f32 and rounded once.

use super::super::call::Call;
use super::super::error::Fault;
use super::super::gemm::{GemmRows, Panels, gemm};
use super::super::table::{Results, one};
use super::super::tensor::{Tensor, View, checked_elements};
use super::elementwise::common;

/// The bias of `m` rows: zeros without a bias.
fn bias(call: &Call<'_>, m: usize) -> Result<Vec<f32>, Fault> {
    if call.optional("bias")?.is_none() {
        return Ok(vec![0.0; m]);
    }
    let bias = call.floats("bias")?.values;
    match bias.len() {
        1 => Ok(vec![bias[0]; m]),
        n if n == m => Ok(bias),
        n => Err(Fault::argument("bias", format!("{n} elements for {m} outputs"))),
    }
}

/// Fault that never occurs, since the weight has as many elements as its type says.
fn short() -> Fault {
    Fault::argument("weight", "fewer elements than its shape")
}

/// `conv`: `x` is `[batch, channels, …]`, `weight` `[outputs, channels / groups, 1, …]`.
pub(in super::super) fn conv(call: &Call<'_>) -> Results {
    let x = call.floats("x")?;
    let weight = call.ty("weight")?;
    let wrong = |p, m: String| Err(Fault::argument(p, m));
    if x.shape.len() < 3 || weight.shape.len() != x.shape.len() {
        return wrong("weight", format!("{weight} for an input of shape {:?}", x.shape));
    }
    if weight.shape[2..].iter().any(|&d| d != 1) {
        return wrong("weight", format!("{weight} is not a 1×1 kernel"));
    }
    for (parameter, neutral) in [("strides", 1), ("dilations", 1), ("pad", 0)] {
        // Dilation of a kernel of one element means nothing, and `valid` or `same` then pad nothing.
        let counts = match parameter {
            "pad" => call.text("pad_type")?.as_deref() == Some("custom"),
            "strides" => true,
            _ => false,
        };
        if counts && call.integers(parameter)?.unwrap_or_default().iter().any(|&v| v != neutral) {
            return wrong(parameter, format!("only {neutral} is supported"));
        }
    }
    let groups = call.integer("groups")?.unwrap_or(1);
    let (batch, channels, outputs, k) = (x.shape[0], x.shape[1], weight.shape[0], weight.shape[1]);
    let groups = usize::try_from(groups)
        .ok()
        .filter(|&g| g > 0 && outputs.is_multiple_of(g) && k.checked_mul(g) == Some(channels));
    let Some(groups) = groups else {
        return wrong("groups", format!("{weight} for {channels} channels"));
    };
    let places: usize = x.shape[2..].iter().product();
    let (m, n) = (outputs / groups, batch * places);
    let bias = bias(call, outputs)?;
    let mut shape = x.shape.clone();
    shape[1] = outputs;
    let mut out =
        vec![0.0; checked_elements(&shape).ok_or_else(|| Fault::argument("weight", "a result that large"))?];
    call.with_rows("weight", |rows| {
        let mut part = vec![0.0; m * n];
        for g in 0..groups {
            let panels = Panels::pack(k, n, |i, j| {
                x.values[(j / places * channels + g * k + i) * places + j % places]
            });
            if !gemm(rows, g * m * k, &panels, &mut part, call.threads) {
                return Err(short());
            }
            for (i, row) in part.chunks(n).enumerate() {
                let o = g * m + i;
                for (b, row) in row.chunks(places).enumerate() {
                    let at = (b * outputs + o) * places;
                    out[at..at + places].iter_mut().zip(row).for_each(|(y, v)| *y = v + bias[o]);
                }
            }
        }
        Ok(())
    })?;
    one(Tensor::rounded(x.dtype, shape, out))
}

/// `linear`: `x` is `[…, inputs]`, `weight` `[outputs, inputs]`.
pub(in super::super) fn linear(call: &Call<'_>) -> Results {
    let x = call.floats("x")?;
    let weight = call.ty("weight")?;
    let (Some(&k), &[m, inputs]) = (x.shape.last(), weight.shape.as_slice()) else {
        return Err(Fault::argument("weight", format!("{weight} for an input of shape {:?}", x.shape)));
    };
    if inputs != k {
        return Err(Fault::argument("weight", format!("{weight} for {k} channels")));
    }
    let n = x.values.len() / k;
    let panels = Panels::pack(k, n, |i, j| x.values[j * k + i]);
    let bias = bias(call, m)?;
    let mut shape = x.shape.clone();
    shape.pop();
    shape.push(m);
    let mut out =
        vec![0.0; checked_elements(&shape).ok_or_else(|| Fault::argument("weight", "a result that large"))?];
    if !call.with_rows("weight", |rows| Ok(gemm(rows, 0, &panels, &mut out, call.threads)))? {
        return Err(short());
    }
    let transposed = View::whole(&[m, n]).permuted(&[1, 0]).take(&out);
    let values = transposed.iter().enumerate().map(|(i, v)| v + bias[i % m]).collect();
    one(Tensor::rounded(x.dtype, shape, values))
}

/// `matmul`: `x` is `[…, m, k]`, `y` `[…, k, n]`, each transposed where the flags say so.
pub(in super::super) fn matmul(call: &Call<'_>) -> Results {
    let (x, y) = (call.floats("x")?, call.floats("y")?);
    let wrong =
        || Err(Fault::argument("y", format!("{:?} is not to be multiplied with {:?}", y.shape, x.shape)));
    let (Some(a), Some(b)) = (x.shape.len().checked_sub(2), y.shape.len().checked_sub(2)) else {
        return wrong();
    };
    if x.dtype != y.dtype {
        return wrong();
    }
    let transposed = |shape: &[usize], yes: bool| {
        let mut perm: Vec<usize> = (0..shape.len()).collect();
        if yes {
            perm.swap(shape.len() - 2, shape.len() - 1);
        }
        View::whole(shape).permuted(&perm)
    };
    let left = transposed(&x.shape, call.flag("transpose_x")?);
    let right = transposed(&y.shape, call.flag("transpose_y")?);
    let (m, k, n) = (left.shape[a], left.shape[a + 1], right.shape[b + 1]);
    let batch = common(&left.shape[..a], &right.shape[..b]);
    let (Some(batch), true) = (batch, right.shape[b] == k) else { return wrong() };
    let with = |rows: usize, cols: usize| [&batch[..], &[rows, cols]].concat();
    let shape = with(m, n);
    let (Some(left), Some(right), Some(count)) =
        (left.broadcast(&with(m, k)), right.broadcast(&with(k, n)), checked_elements(&shape))
    else {
        return wrong();
    };
    let (left, right) = (left.take(&x.values), right.take(&y.values));
    let mut out = vec![0.0; count];
    for (i, out) in out.chunks_mut(m * n).enumerate() {
        let panels = Panels::pack(k, n, |r, c| right[(i * k + r) * n + c]);
        if !gemm(GemmRows::Single(&left), i * m * k, &panels, out, call.threads) {
            return wrong();
        }
    }
    one(Tensor::rounded(x.dtype, shape, out))
}
