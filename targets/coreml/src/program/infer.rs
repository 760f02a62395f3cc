//! Shapes of results from shapes of operands.

use super::op::{Arg, Op, OpKind};
use super::{ValueId, WeightRef, elements};

/// Shapes of operands and weights.
pub(super) struct Shapes<'a, F> {
    /// Shape of a value that has been defined.
    pub(super) value: F,
    /// Weights of the program.
    pub(super) weights: &'a [WeightRef],
}

type Result<T> = std::result::Result<T, String>;

/// Typed access to the arguments of an operator.
struct Args<'a, F> {
    op: &'a Op,
    shapes: &'a Shapes<'a, F>,
}

impl<'a, F: Fn(ValueId) -> Option<&'a [usize]>> Args<'a, F> {
    fn get(&self, name: &str) -> Result<&'a Arg> {
        self.op.arg(name).ok_or_else(|| format!("there is no `{name}`"))
    }

    fn shape_of(&self, id: ValueId) -> Result<&'a [usize]> {
        (self.shapes.value)(id).ok_or_else(|| format!("`{id}` is not defined before it is used"))
    }

    fn shape(&self, name: &str) -> Result<&'a [usize]> {
        match self.get(name)? {
            Arg::Value(id) => self.shape_of(*id),
            _ => Err(format!("`{name}` is not a tensor")),
        }
    }

    fn ints(&self, name: &str) -> Result<&'a [usize]> {
        match self.get(name)? {
            Arg::Ints(list) => Ok(list),
            _ => Err(format!("`{name}` is not a list of whole numbers")),
        }
    }

    fn bool(&self, name: &str) -> Result<bool> {
        match self.get(name)? {
            Arg::Bool(b) => Ok(*b),
            _ => Err(format!("`{name}` is neither true nor false")),
        }
    }

    fn axis(&self, rank: usize) -> Result<usize> {
        match self.get("axis")? {
            Arg::Int(axis) if *axis < rank => Ok(*axis),
            other => Err(format!("axis {other:?} of a tensor of rank {rank}")),
        }
    }
}

/// Shapes of the results of an operator. The message of an error says what does not fit.
pub(super) fn results<'a, F>(op: &'a Op, shapes: &'a Shapes<'a, F>) -> Result<Vec<Vec<usize>>>
where
    F: Fn(ValueId) -> Option<&'a [usize]>,
{
    let args = Args { op, shapes };
    let one = |shape: Vec<usize>| Ok(vec![shape]);
    match op.op {
        OpKind::Const => match (op.weight(), op.splat()) {
            (Some(w), None) => {
                let found = shapes.weights.get(w);
                one(found.ok_or_else(|| format!("the program has no weight {w}"))?.shape.clone())
            }
            (None, Some(_)) => one(args.ints("shape")?.to_vec()),
            _ => Err("a constant is either a weight or filled with a number".into()),
        },
        OpKind::Conv => one(conv(&args)?),
        OpKind::Matmul => one(matmul(&args)?),
        OpKind::Silu
        | OpKind::Sigmoid
        | OpKind::Gelu
        | OpKind::Relu
        | OpKind::Clip
        | OpKind::Abs
        | OpKind::Rsqrt => one(args.shape("x")?.to_vec()),
        OpKind::Add | OpKind::Sub | OpKind::Mul | OpKind::RealDiv | OpKind::Maximum | OpKind::Minimum => {
            one(broadcast(args.shape("x")?, args.shape("y")?)?)
        }
        OpKind::ReduceMean | OpKind::ReduceMax | OpKind::ReduceSum => one(reduce(&args)?),
        OpKind::Softmax => {
            let x = args.shape("x")?;
            args.axis(x.len())?;
            one(x.to_vec())
        }
        OpKind::Transpose => one(transpose(args.shape("x")?, args.ints("perm")?)?),
        OpKind::Reshape => {
            let (x, to) = (args.shape("x")?, args.ints("shape")?);
            if elements(x) != elements(to) {
                return Err(format!("{x:?} has other elements than {to:?}"));
            }
            one(to.to_vec())
        }
        OpKind::ExpandDims => one(expand(args.shape("x")?, args.ints("axes")?)?),
        OpKind::Squeeze => one(squeeze(args.shape("x")?, args.ints("axes")?)?),
        OpKind::Tile => {
            let (x, reps) = (args.shape("x")?, args.ints("reps")?);
            if x.len() != reps.len() {
                return Err(format!("{} repetitions of a tensor of rank {}", reps.len(), x.len()));
            }
            one(x.iter().zip(reps).map(|(d, r)| d.saturating_mul(*r)).collect())
        }
        OpKind::SliceBySize => {
            let (x, begin, size) = (args.shape("x")?, args.ints("begin")?, args.ints("size")?);
            inside(x, begin, size)?;
            one(size.to_vec())
        }
        OpKind::SliceUpdate => {
            let (x, update) = (args.shape("x")?, args.shape("update")?);
            let (begin, end) = (args.ints("begin")?, args.ints("end")?);
            inside(x, begin, update)?;
            if !begin.iter().zip(update).map(|(b, n)| b + n).eq(end.iter().copied()) {
                return Err(format!("{update:?} does not fill {begin:?} .. {end:?}"));
            }
            one(x.to_vec())
        }
        OpKind::Concat => one(concat(&args)?),
        OpKind::Split => {
            let (x, sizes) = (args.shape("x")?, args.ints("split_sizes")?);
            let axis = args.axis(x.len())?;
            if sizes.iter().fold(0usize, |a, &b| a.saturating_add(b)) != x[axis] {
                return Err(format!("{sizes:?} do not add up to axis {axis} of {x:?}"));
            }
            let part = |&n: &usize| {
                let mut shape = x.to_vec();
                shape[axis] = n;
                shape
            };
            Ok(sizes.iter().map(part).collect())
        }
        OpKind::ReadState => one(args.shape("state")?.to_vec()),
        OpKind::WriteState => {
            let (state, value) = (args.shape("state")?, args.shape("value")?);
            if state != value {
                return Err(format!("a state of {state:?} cannot hold {value:?}"));
            }
            Ok(Vec::new())
        }
    }
}

fn conv<'a, F: Fn(ValueId) -> Option<&'a [usize]>>(args: &Args<'a, F>) -> Result<Vec<usize>> {
    let (x, weight) = (args.shape("x")?, args.shape("weight")?);
    let (&[n, c, h, w], &[out, c2, 1, 1]) = (x, weight) else {
        return Err(format!("a 1×1 convolution of {x:?} by {weight:?}"));
    };
    let groups = match args.op.arg("groups") {
        None => 1,
        Some(Arg::Int(groups)) if *groups > 0 && out.is_multiple_of(*groups) => *groups,
        Some(other) => return Err(format!("{out} outputs in groups of {other:?}")),
    };
    if c2.checked_mul(groups) != Some(c) {
        return Err(format!("{c} channels with a weight for {groups} times {c2}"));
    }
    if args.op.arg("bias").is_some() && args.shape("bias")? != [out] {
        return Err(format!("a bias of {:?} for {out} channels", args.shape("bias")?));
    }
    Ok(vec![n, out, h, w])
}

fn matmul<'a, F: Fn(ValueId) -> Option<&'a [usize]>>(args: &Args<'a, F>) -> Result<Vec<usize>> {
    let matrix = |name: &str, flag: &str| -> Result<(&'a [usize], usize, usize)> {
        let shape = args.shape(name)?;
        let &[ref batch @ .., r, c] = shape else {
            return Err(format!("`{name}` {shape:?} is not a matrix"));
        };
        Ok(if args.bool(flag)? { (batch, c, r) } else { (batch, r, c) })
    };
    let (batch_x, n, k) = matrix("x", "transpose_x")?;
    let (batch_y, k2, m) = matrix("y", "transpose_y")?;
    if k != k2 {
        return Err(format!("a product over {k} and {k2} channels"));
    }
    let mut shape = broadcast(batch_x, batch_y)?;
    shape.extend([n, m]);
    Ok(shape)
}

/// The shape of an element-wise result: axes are aligned at the end, and an extent of 1 repeats.
fn broadcast(a: &[usize], b: &[usize]) -> Result<Vec<usize>> {
    let rank = a.len().max(b.len());
    let at = |s: &[usize], i: usize| (i + s.len()).checked_sub(rank).map_or(1, |i| s[i]);
    let joined = (0..rank).map(|i| match (at(a, i), at(b, i)) {
        (x, y) if x == y => Ok(x),
        (1, y) => Ok(y),
        (x, 1) => Ok(x),
        _ => Err(format!("{a:?} and {b:?} do not broadcast")),
    });
    joined.collect()
}

fn reduce<'a, F: Fn(ValueId) -> Option<&'a [usize]>>(args: &Args<'a, F>) -> Result<Vec<usize>> {
    let (x, axes, keep) = (args.shape("x")?, args.ints("axes")?, args.bool("keep_dims")?);
    distinct(axes, x.len())?;
    let left = x.iter().enumerate().filter(|(i, _)| keep || !axes.contains(i));
    Ok(left.map(|(i, &d)| if axes.contains(&i) { 1 } else { d }).collect())
}

fn transpose(x: &[usize], perm: &[usize]) -> Result<Vec<usize>> {
    distinct(perm, x.len())?;
    if perm.len() != x.len() {
        return Err(format!("{perm:?} does not order the axes of {x:?}"));
    }
    Ok(perm.iter().map(|&i| x[i]).collect())
}

fn expand(x: &[usize], axes: &[usize]) -> Result<Vec<usize>> {
    let rank = x.len() + axes.len();
    distinct(axes, rank)?;
    let mut old = x.iter();
    Ok((0..rank).map(|i| if axes.contains(&i) { 1 } else { *old.next().unwrap_or(&1) }).collect())
}

fn squeeze(x: &[usize], axes: &[usize]) -> Result<Vec<usize>> {
    distinct(axes, x.len())?;
    if let Some(&axis) = axes.iter().find(|&&a| x[a] != 1) {
        return Err(format!("axis {axis} of {x:?} is not 1"));
    }
    Ok(x.iter().enumerate().filter(|(i, _)| !axes.contains(i)).map(|(_, &d)| d).collect())
}

fn concat<'a, F: Fn(ValueId) -> Option<&'a [usize]>>(args: &Args<'a, F>) -> Result<Vec<usize>> {
    let Arg::Values(values) = args.get("values")? else {
        return Err("`values` is not a list of tensors".into());
    };
    let (first, rest) = values.split_first().ok_or("nothing is joined")?;
    let mut shape = args.shape_of(*first)?.to_vec();
    let axis = args.axis(shape.len())?;
    for &value in rest {
        let other = args.shape_of(value)?;
        let same = other.len() == shape.len()
            && other.iter().zip(&shape).enumerate().all(|(i, (a, b))| i == axis || a == b);
        if !same {
            return Err(format!("{other:?} does not join {shape:?} along axis {axis}"));
        }
        shape[axis] = shape[axis].saturating_add(other[axis]);
    }
    Ok(shape)
}

/// Axes are of a tensor of that rank, each once.
fn distinct(axes: &[usize], rank: usize) -> Result<()> {
    let fine = axes.iter().enumerate().all(|(i, a)| *a < rank && !axes[..i].contains(a));
    if fine { Ok(()) } else { Err(format!("axes {axes:?} of a tensor of rank {rank}")) }
}

/// A box is inside a tensor.
fn inside(x: &[usize], begin: &[usize], size: &[usize]) -> Result<()> {
    let fine = begin.len() == x.len()
        && size.len() == x.len()
        && x.iter().zip(begin).zip(size).all(|((d, b), s)| b.checked_add(*s).is_some_and(|end| end <= *d));
    if fine { Ok(()) } else { Err(format!("{size:?} at {begin:?} is outside of {x:?}")) }
}
