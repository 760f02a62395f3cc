//! Parts of tensors: `slice_by_index`, `slice_by_size`, `slice_update`.

use super::super::call::Call;
use super::super::error::Fault;
use super::super::table::{Results, one};
use super::super::tensor::{Data, Tensor, View};

/// Places of a tensor, and the shape of what they hold without the dimensions that `squeeze_mask` drops.
struct SlicedView {
    view: View,
    squeezed: Vec<usize>,
}

/// Elements that `begin`, `end`, `stride` and the masks choose, as in Python: negative indices count from the
/// end, and indices outside are clamped.
fn by_index(call: &Call<'_>, shape: &[usize]) -> Result<SlicedView, Fault> {
    let rank = shape.len();
    let list = |parameter| match call.integers(parameter)? {
        Some(v) if v.len() == rank => Ok(Some(v)),
        Some(v) => Err(Fault::argument(parameter, format!("{} entries for rank {rank}", v.len()))),
        None => Ok(None),
    };
    let begin = list("begin")?.ok_or(Fault::Missing("begin"))?;
    let end = list("end")?.ok_or(Fault::Missing("end"))?;
    let stride = list("stride")?.unwrap_or_else(|| vec![1; rank]);
    let mask = |parameter| Ok::<_, Fault>(list(parameter)?.unwrap_or_else(|| vec![0; rank]));
    let (no_begin, no_end, squeeze) = (mask("begin_mask")?, mask("end_mask")?, mask("squeeze_mask")?);
    let mut view = View::whole(shape);
    for (axis, &size) in shape.iter().enumerate() {
        let size = size as i64;
        let index = |i: i64| if i < 0 { i.saturating_add(size) } else { i };
        if squeeze[axis] != 0 {
            let at = index(begin[axis]);
            if !(0..size).contains(&at) {
                return Err(Fault::argument("begin", format!("{} of {size} along axis {axis}", begin[axis])));
            }
            view = view.part(axis, at as usize, 1, 1);
            continue;
        }
        let from = if no_begin[axis] != 0 { 0 } else { index(begin[axis]).clamp(0, size) };
        let to = if no_end[axis] != 0 { size } else { index(end[axis]).clamp(0, size) };
        if stride[axis] < 1 {
            return Err(Fault::argument(
                "stride",
                format!("{}: only positive ones are supported", stride[axis]),
            ));
        }
        if to <= from {
            return Err(Fault::argument("end", format!("nothing from {from} to {to} along axis {axis}")));
        }
        let len = (to - from - 1) / stride[axis] + 1;
        view = view.part(axis, from as usize, len as usize, if len == 1 { 1 } else { stride[axis] as usize });
    }
    let kept = view.shape.iter().zip(&squeeze).filter(|(_, s)| **s == 0);
    let squeezed = kept.map(|(d, _)| *d).collect();
    Ok(SlicedView { view, squeezed })
}

/// `slice_by_index`.
pub(in super::super) fn slice_by_index(call: &Call<'_>) -> Results {
    let x = call.tensor("x")?;
    let part = by_index(call, x.shape())?;
    one(x.view(&part.view).reshaped(part.squeezed).ok_or(Fault::Missing("x")))
}

/// `slice_by_size`: `size` places from `begin`; a size of −1 goes to the end.
pub(in super::super) fn slice_by_size(call: &Call<'_>) -> Results {
    let x = call.tensor("x")?;
    let begin = call.integers("begin")?.ok_or(Fault::Missing("begin"))?;
    let size = call.integers("size")?.ok_or(Fault::Missing("size"))?;
    let rank = x.shape().len();
    if begin.len() != rank || size.len() != rank {
        return Err(Fault::argument("size", format!("{} entries for rank {rank}", size.len())));
    }
    let mut view = View::whole(x.shape());
    for (axis, &whole) in x.shape().iter().enumerate() {
        let start = usize::try_from(begin[axis]).ok().filter(|&b| b < whole);
        let len = start.and_then(|start| match size[axis] {
            -1 => Some(whole - start),
            n => usize::try_from(n).ok().filter(|&n| n > 0 && n <= whole - start),
        });
        let (Some(start), Some(len)) = (start, len) else {
            let message = format!("{} from {} of {whole} along axis {axis}", size[axis], begin[axis]);
            return Err(Fault::argument("size", message));
        };
        view = view.part(axis, start, len, 1);
    }
    one(Ok(x.view(&view)))
}

/// `slice_update`: `x` with `update` in the places that `slice_by_index` would show.
pub(in super::super) fn slice_update(call: &Call<'_>) -> Results {
    let (x, update) = (call.tensor("x")?, call.tensor("update")?);
    let part = by_index(call, x.shape())?;
    if update.shape() != part.squeezed {
        let message = format!("{:?} for places of shape {:?}", update.shape(), part.squeezed);
        return Err(Fault::argument("update", message));
    }
    macro_rules! write {
        ($x:ident, $update:ident, $kind:ident) => {{
            let mut out = $x.clone();
            let (len, stride) = part.view.row();
            let mut rows = $update.chunks(len);
            part.view.rows(|at| {
                for (i, v) in rows.next().unwrap_or_default().iter().enumerate() {
                    out[at + i * stride] = *v;
                }
            });
            Data::$kind(out)
        }};
    }
    let data = match (x.data(), update.data()) {
        (Data::F16(x), Data::F16(u)) => write!(x, u, F16),
        (Data::F32(x), Data::F32(u)) => write!(x, u, F32),
        (Data::I32(x), Data::I32(u)) => write!(x, u, I32),
        (Data::Bool(x), Data::Bool(u)) => write!(x, u, Bool),
        _ => return Err(Fault::argument("update", "another element type than `x`")),
    };
    one(Tensor::new(x.shape(), data).ok_or(Fault::Missing("x")))
}
