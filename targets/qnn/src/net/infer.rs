//! Shape rules of the operators.

use super::op::Op;

/// Extents of a result, or the reason that there is no result, for people.
pub(super) type Shaped = Result<Vec<usize>, String>;

/// Maximum number of axes of a tensor, which is the limit of QNN's HTP.
pub(crate) const MOST_AXES: usize = 5;

#[expect(clippy::unnecessary_wraps, reason = "a shape rule like the others")]
pub(super) fn same(_: &Op, x: &[&[usize]]) -> Shaped {
    Ok(x[0].to_vec())
}

pub(super) fn fully_connected(_: &Op, x: &[&[usize]]) -> Shaped {
    match (x[0], x[1], x.get(2)) {
        (&[t, k], &[n, k2], None) if k == k2 => Ok(vec![t, n]),
        (&[t, k], &[n, k2], Some(&&[b])) if k == k2 && b == n => Ok(vec![t, n]),
        _ => Err(format!("rows, weight and bias are {x:?}; expected [T, K], [N, K] and [N]")),
    }
}

pub(super) fn matmul(op: &Op, x: &[&[usize]]) -> Shaped {
    let wrong = || format!("{:?} and {:?} cannot be multiplied", x[0], x[1]);
    let ([a @ .., m, k], [b @ .., k2, n]) = (x[0], x[1]) else { return Err(wrong()) };
    if k != k2 {
        return Err(wrong());
    }
    let mut shape = broadcast(op, &[a, b]).map_err(|_| wrong())?;
    shape.extend([*m, *n]);
    Ok(shape)
}

/// Broadcasts as in NumPy: axes are matched from the last on, and an extent of 1 fits any other.
pub(super) fn broadcast(_: &Op, x: &[&[usize]]) -> Shaped {
    let axes = x[0].len().max(x[1].len());
    let at = |s: &[usize], i: usize| (i + s.len()).checked_sub(axes).map_or(1, |j| s[j]);
    let one = |i| match (at(x[0], i), at(x[1], i)) {
        (a, b) if a == b || b == 1 => Ok(a),
        (1, b) => Ok(b),
        _ => Err(format!("{:?} and {:?} do not match", x[0], x[1])),
    };
    (0..axes).map(one).collect()
}

pub(super) fn rms_norm(_: &Op, x: &[&[usize]]) -> Shaped {
    match (x[0].last(), x[1]) {
        (Some(c), &[g]) if *c == g => Ok(x[0].to_vec()),
        _ => Err(format!("a gain of {:?} does not fit rows of {:?}", x[1], x[0])),
    }
}

pub(super) fn concat(op: &Op, x: &[&[usize]]) -> Shaped {
    let Op::Concat { axis } = op else { return Err("it is not a concatenation".into()) };
    let mut shape = x[0].to_vec();
    if *axis >= shape.len() {
        return Err(format!("{shape:?} has no axis {axis}"));
    }
    for other in &x[1..] {
        let fits = other.len() == shape.len() && (0..shape.len()).all(|i| i == *axis || other[i] == shape[i]);
        let sum = fits.then(|| shape[*axis].checked_add(other[*axis])).flatten();
        shape[*axis] = sum.ok_or_else(|| format!("{other:?} does not fit {:?} along axis {axis}", x[0]))?;
    }
    Ok(shape)
}

pub(super) fn slice(op: &Op, x: &[&[usize]]) -> Shaped {
    let Op::StridedSlice { ranges } = op else { return Err("it is not a slice".into()) };
    if ranges.len() != x[0].len() {
        return Err(format!("{} ranges for {:?}", ranges.len(), x[0]));
    }
    let one = |(&[from, to, step], &n): (&[usize; 3], &usize)| {
        if from < to && to <= n && step > 0 {
            Ok((to - from).div_ceil(step))
        } else {
            Err(format!("entries {from} to {to} by {step} of an axis of {n}"))
        }
    };
    ranges.iter().zip(x[0]).map(one).collect()
}

pub(super) fn reshape(op: &Op, x: &[&[usize]]) -> Shaped {
    let Op::Reshape { shape } = op else { return Err("it is not a reshape".into()) };
    if super::elements(shape) == super::elements(x[0]) {
        Ok(shape.clone())
    } else {
        Err(format!("{:?} cannot become {shape:?}", x[0]))
    }
}

pub(super) fn transpose(op: &Op, x: &[&[usize]]) -> Shaped {
    let Op::Transpose { perm } = op else { return Err("it is not a transposition".into()) };
    let mut seen = perm.clone();
    seen.sort_unstable();
    if seen == (0..x[0].len()).collect::<Vec<_>>() {
        Ok(perm.iter().map(|&i| x[0][i]).collect())
    } else {
        Err(format!("{perm:?} does not order the axes of {:?}", x[0]))
    }
}

pub(super) fn gather(op: &Op, x: &[&[usize]]) -> Shaped {
    let Op::Gather { axis } = op else { return Err("it is not a gathering".into()) };
    let mut shape = x[0].to_vec();
    match (shape.get_mut(*axis), x[1]) {
        (Some(n), &[count]) => *n = count,
        _ => return Err(format!("indices {:?} do not fit axis {axis} of {:?}", x[1], x[0])),
    }
    Ok(shape)
}
