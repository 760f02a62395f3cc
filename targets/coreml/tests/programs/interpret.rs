//! Interprets a program in plain loops: in f64, or rounded to f16 after every operator.

use crate::store::Store;
use half::f16;
use moec_coreml::program::{Arg, Function, Mode, Op, OpKind, Program, ValueId};
use moec_ir::Activation;
use moec_ir::eval::{self, Tensor};
use std::collections::BTreeMap;

type Shape = Vec<usize>;
type Array = (Shape, Vec<f64>);

/// Whether results of operators are rounded.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Rounding {
    None,
    F16,
}

/// States by name; a missing state is zero.
pub(crate) type States = BTreeMap<String, Vec<f64>>;

/// Calls a function with named inputs; returns named results.
pub(crate) fn call(
    program: &Program,
    function: &str,
    store: &Store,
    inputs: &[(&str, &[f32])],
    states: &mut States,
    rounding: Rounding,
) -> BTreeMap<String, Vec<f64>> {
    let f = program.functions.iter().find(|f| f.name == function).unwrap();
    let mut env: BTreeMap<ValueId, Array> = BTreeMap::new();
    for &id in &f.inputs {
        let value = &f.values[id.index()];
        let (_, data) =
            inputs.iter().find(|(n, _)| *n == value.name).unwrap_or_else(|| panic!("{}", value.name));
        assert_eq!(data.len(), value.shape.iter().product::<usize>(), "input `{}`", value.name);
        env.insert(id, (value.shape.clone(), data.iter().map(|&x| f64::from(x)).collect()));
    }
    for op in &f.ops {
        let mut results = execute(op, f, program, store, &env, states);
        for (id, mut array) in op.results.iter().zip(results.drain(..)) {
            assert_eq!(array.0, f.values[id.index()].shape, "{op:?}");
            if rounding == Rounding::F16 {
                array.1.iter_mut().for_each(|x| *x = f16::from_f64(*x).to_f64());
            }
            env.insert(*id, array);
        }
    }
    f.outputs.iter().map(|id| (f.values[id.index()].name.clone(), env[id].1.clone())).collect()
}

fn execute(
    op: &Op,
    f: &Function,
    program: &Program,
    store: &Store,
    env: &BTreeMap<ValueId, Array>,
    states: &mut States,
) -> Vec<Array> {
    let id = |name: &str| match &op.args[name] {
        Arg::Value(id) => *id,
        other => panic!("{name}: {other:?}"),
    };
    let value = |name: &str| &env[&id(name)];
    let ints = |name: &str| match &op.args[name] {
        Arg::Ints(list) => list.clone(),
        Arg::Int(n) => vec![*n],
        other => panic!("{name}: {other:?}"),
    };
    let float = |name: &str| match &op.args[name] {
        Arg::Float(x) => f64::from(*x),
        other => panic!("{name}: {other:?}"),
    };
    let flag = |name: &str| op.args[name] == Arg::Bool(true);
    let map =
        |g: &dyn Fn(f64) -> f64| vec![(value("x").0.clone(), value("x").1.iter().map(|&x| g(x)).collect())];
    let zip = |g: &dyn Fn(f64, f64) -> f64| vec![broadcast(value("x"), value("y"), g)];
    // Element by element, by the Graph's evaluator.
    let act = |a: Activation| {
        map(&|x| {
            let x = Tensor::f32([1, 1], vec![x as f32]);
            f64::from(eval::op(&moec_ir::Op::Act(a), vec![eval::Arg::Tensor(&x)]).unwrap()[0].as_f32()[0])
        })
    };
    match op.op {
        OpKind::Const => match (op.weight(), op.splat()) {
            (Some(w), _) => {
                let weight = &program.weights[w];
                vec![(weight.shape.clone(), store.values(weight))]
            }
            (_, Some(x)) => {
                let shape = ints("shape");
                let count = shape.iter().product();
                vec![(shape, vec![f64::from(x); count])]
            }
            _ => panic!("{op:?}"),
        },
        OpKind::Conv => {
            let ((xs, x), (ws, w)) = (value("x"), value("weight"));
            let (plane, shape) = (xs[2] * xs[3], vec![xs[0], ws[0], xs[2], xs[3]]);
            let bias = op.args.get("bias").map(|_| &value("bias").1);
            let groups = op.args.get("groups").map_or(1, |_| ints("groups")[0]);
            let data = each(&[xs[0], ws[0], plane]).map(|i| {
                let first = i[1] / (ws[0] / groups) * ws[1];
                let at = |c: usize| x[(i[0] * xs[1] + first + c) * plane + i[2]];
                let sum: f64 = (0..ws[1]).map(|c| at(c) * w[i[1] * ws[1] + c]).sum();
                sum + bias.map_or(0.0, |b| b[i[1]])
            });
            vec![(shape, data.collect())]
        }
        OpKind::Matmul => vec![matmul(value("x"), value("y"), flag("transpose_x"), flag("transpose_y"))],
        OpKind::Silu => act(Activation::Silu),
        OpKind::Sigmoid => act(Activation::Sigmoid),
        OpKind::Relu => act(Activation::Relu),
        OpKind::Gelu => act(match &op.args["mode"] {
            Arg::Mode(Mode::Exact) => Activation::Gelu,
            _ => Activation::GeluTanh,
        }),
        OpKind::Clip => map(&|x| x.max(float("alpha")).min(float("beta"))),
        OpKind::Abs => map(&f64::abs),
        OpKind::Rsqrt => map(&|x| 1.0 / (x + float("epsilon")).sqrt()),
        OpKind::Add => zip(&|x, y| x + y),
        OpKind::Sub => zip(&|x, y| x - y),
        OpKind::Mul => zip(&|x, y| x * y),
        OpKind::RealDiv => zip(&|x, y| x / y),
        OpKind::Maximum => zip(&f64::max),
        OpKind::Minimum => zip(&f64::min),
        OpKind::ReduceMean => {
            let n = ints("axes").iter().map(|&a| value("x").0[a]).product::<usize>() as f64;
            vec![reduce(value("x"), &ints("axes"), 0.0, &|a, x| a + x / n)]
        }
        OpKind::ReduceMax => vec![reduce(value("x"), &ints("axes"), f64::NEG_INFINITY, &f64::max)],
        OpKind::ReduceSum => vec![reduce(value("x"), &ints("axes"), 0.0, &|a, x| a + x)],
        OpKind::Softmax => {
            let (x, axes) = (value("x"), ints("axis"));
            let max = reduce(x, &axes, f64::NEG_INFINITY, &f64::max);
            let e = broadcast(x, &max, &|x, m| (x - m).exp());
            let sum = reduce(&e, &axes, 0.0, &|a, x| a + x);
            vec![broadcast(&e, &sum, &|x, s| x / s)]
        }
        OpKind::Transpose => {
            let (x, perm) = (value("x"), ints("perm"));
            let shape: Shape = perm.iter().map(|&p| x.0[p]).collect();
            let data = each(&shape).map(|to| {
                let mut from = vec![0; perm.len()];
                perm.iter().zip(&to).for_each(|(&p, &i)| from[p] = i);
                x.1[place(&x.0, &from)]
            });
            vec![(shape.clone(), data.collect())]
        }
        OpKind::Reshape => vec![(ints("shape"), value("x").1.clone())],
        OpKind::ExpandDims | OpKind::Squeeze => {
            vec![(f.values[op.results[0].index()].shape.clone(), value("x").1.clone())]
        }
        OpKind::Tile => {
            let x = value("x");
            let shape: Shape = x.0.iter().zip(ints("reps")).map(|(d, r)| d * r).collect();
            let from = |to: Shape| to.iter().zip(&x.0).map(|(i, d)| i % d).collect::<Shape>();
            vec![(shape.clone(), each(&shape).map(|to| x.1[place(&x.0, &from(to))]).collect())]
        }
        OpKind::SliceBySize => vec![slice(value("x"), &ints("begin"), &ints("size"))],
        OpKind::SliceUpdate => {
            let (mut x, update, begin) = (value("x").clone(), value("update"), ints("begin"));
            for (i, u) in each(&update.0).zip(&update.1) {
                let to: Shape = i.iter().zip(&begin).map(|(i, b)| i + b).collect();
                let to = place(&x.0, &to);
                x.1[to] = *u;
            }
            vec![x]
        }
        OpKind::Concat => {
            let Arg::Values(values) = &op.args["values"] else { panic!("{op:?}") };
            let (shape, axis) = (f.values[op.results[0].index()].shape.clone(), ints("axis")[0]);
            let data = each(&shape).map(|mut i| {
                for part in values.iter().map(|v| &env[v]) {
                    if i[axis] < part.0[axis] {
                        return part.1[place(&part.0, &i)];
                    }
                    i[axis] -= part.0[axis];
                }
                panic!("{op:?}")
            });
            vec![(shape.clone(), data.collect())]
        }
        OpKind::Split => {
            let (x, axis, mut begin) = (value("x"), ints("axis")[0], vec![0; value("x").0.len()]);
            let parts = op.results.iter().map(|r| {
                let size = &f.values[r.index()].shape;
                let part = slice(x, &begin, size);
                begin[axis] += size[axis];
                part
            });
            parts.collect()
        }
        OpKind::ReadState => {
            let value = &f.values[id("state").index()];
            let zero = || vec![0.0; value.shape.iter().product()];
            vec![(value.shape.clone(), states.entry(value.name.clone()).or_insert_with(zero).clone())]
        }
        OpKind::WriteState => {
            states.insert(f.values[id("state").index()].name.clone(), value("value").1.clone());
            Vec::new()
        }
    }
}

/// Every index of a shape, in order.
fn each(shape: &[usize]) -> impl Iterator<Item = Shape> + use<> {
    let (shape, count) = (shape.to_vec(), shape.iter().product::<usize>());
    (0..count).map(move |mut n| {
        let mut index = vec![0; shape.len()];
        for (i, d) in index.iter_mut().zip(&shape).rev() {
            *i = n % d;
            n /= d;
        }
        index
    })
}

fn place(shape: &[usize], index: &[usize]) -> usize {
    shape.iter().zip(index).fold(0, |n, (d, i)| n * d + i)
}

fn broadcast(x: &Array, y: &Array, g: &dyn Fn(f64, f64) -> f64) -> Array {
    let rank = x.0.len().max(y.0.len());
    let padded = |s: &Shape| [vec![1; rank - s.len()], s.clone()].concat();
    let (xs, ys) = (padded(&x.0), padded(&y.0));
    let shape: Shape = xs.iter().zip(&ys).map(|(a, b)| *a.max(b)).collect();
    let at = |s: &Shape, i: &Shape| place(s, &s.iter().zip(i).map(|(d, i)| i % d).collect::<Shape>());
    let data = each(&shape).map(|i| g(x.1[at(&xs, &i)], y.1[at(&ys, &i)])).collect();
    (shape, data)
}

fn reduce(x: &Array, axes: &[usize], start: f64, g: &dyn Fn(f64, f64) -> f64) -> Array {
    let mut shape = x.0.clone();
    for &a in axes {
        shape[a] = 1;
    }
    let mut data = vec![start; shape.iter().product()];
    for (mut i, v) in each(&x.0).zip(&x.1) {
        for &a in axes {
            i[a] = 0;
        }
        let at = place(&shape, &i);
        data[at] = g(data[at], *v);
    }
    (shape, data)
}

fn slice(x: &Array, begin: &[usize], size: &[usize]) -> Array {
    let at = |i: Shape| place(&x.0, &i.iter().zip(begin).map(|(i, b)| i + b).collect::<Shape>());
    (size.to_vec(), each(size).map(|i| x.1[at(i)]).collect())
}

fn matmul(x: &Array, y: &Array, transpose_x: bool, transpose_y: bool) -> Array {
    let rank = x.0.len();
    let (n, k) = if transpose_x { (rank - 1, rank - 2) } else { (rank - 2, rank - 1) };
    let m = if transpose_y { rank - 2 } else { rank - 1 };
    let mut shape: Shape = x.0.iter().zip(&y.0).map(|(a, b)| *a.max(b)).collect();
    (shape[rank - 2], shape[rank - 1]) = (x.0[n], y.0[m]);
    let data = each(&shape).map(|i| {
        let batch = |s: &Shape| s.iter().zip(&i).map(|(d, i)| i % d).collect::<Shape>();
        let at = |a: &Array, row: usize, c: usize, transposed: bool| {
            let mut index = batch(&a.0);
            (index[rank - 2], index[rank - 1]) = if transposed { (c, row) } else { (row, c) };
            a.1[place(&a.0, &index)]
        };
        (0..x.0[k]).map(|c| at(x, i[rank - 2], c, transpose_x) * at(y, c, i[rank - 1], transpose_y)).sum()
    });
    (shape.clone(), data.collect())
}

/// Root of the mean squared difference over that of the reference.
pub(crate) fn difference(got: &[f64], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let want = || want.iter().map(|&x| f64::from(x));
    let error: f64 = got.iter().zip(want()).map(|(a, b)| (a - b).powi(2)).sum();
    (error / want().map(|x| x * x).sum::<f64>()).sqrt()
}
