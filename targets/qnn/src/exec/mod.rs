//! Executes a network on this machine: in f32, or in integers if its activations are codes.
//!
//! Arithmetic of codes: products are summed exactly, as integers. A sum, or the result of any other operator,
//! is scaled in f64 and rounded to the nearest code, ties to even. Numbers beyond the codes are clamped. They
//! are counted if that moves them by more than half a step: the range of that tensor *saturates*. ONNX's
//! `QuantizeLinear` rounds in the same way. The HTP rounds each operator in its own way (`docs/qnn.md`,
//! Numbers). For a gated network with weights of 8 bits its emulator's results are within 6 steps of these;
//! with weights of 4 bits, which it rounds down, within 90; for attention within 19. A step is a 65535th of
//! the spread.
#![expect(clippy::cast_possible_truncation, reason = "reals are rounded, codes are those of their type")]

mod error;
mod product;
mod values;

pub use error::ExecError;
pub use values::Values;

use crate::net::{Data, Meaning, Network, Node, Tensor, TensorId, strides};
use moec_runtime::bundle::BundleReader;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

type Result<T> = std::result::Result<T, ExecError>;

/// A network with its static numbers, ready to run.
#[derive(Clone, Debug)]
pub struct Executor {
    network: Arc<Network>,
    statics: Vec<Option<Arc<Values>>>,
}

/// Static numbers that were read from files, by name, with their folder and tensor.
#[derive(Debug, Default)]
pub struct Shared(BTreeMap<String, Vec<(PathBuf, Tensor, Arc<Values>)>>);

/// Outcome of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Results in the order of the network's, as reals.
    pub outputs: Vec<Vec<f32>>,
    /// Tensors whose codes saturated, with how many did and how many there are.
    pub saturated: Vec<Saturated>,
}

/// A range that was too narrow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saturated {
    /// The tensor.
    pub tensor: String,
    /// Numbers beyond its codes.
    pub count: u64,
    /// Numbers that it has.
    pub of: u64,
}

impl std::fmt::Display for Saturated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` saturates in {} of {} numbers", self.tensor, self.count, self.of)
    }
}

impl Executor {
    /// Reads the static numbers of a verified network; those in files, from the files of its artifact.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn new(network: Arc<Network>, files: Option<&BundleReader>) -> Result<Self> {
        Self::sharing(network, files, &mut Shared::default())
    }

    /// Like [`Self::new`], with shared access to files that were already read.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn sharing(network: Arc<Network>, files: Option<&BundleReader>, shared: &mut Shared) -> Result<Self> {
        let folder = files.map(BundleReader::folder);
        let mut load = |t: &Tensor| -> Result<Option<Arc<Values>>> {
            let Some(data) = &t.data else { return Ok(None) };
            let same =
                |(f, known, _): &&(PathBuf, Tensor, Arc<Values>)| Some(f) == folder.as_ref() && known == t;
            if let Some((_, _, values)) = shared.0.get(&t.name).into_iter().flatten().find(same) {
                return Ok(Some(Arc::clone(values)));
            }
            let values = Arc::new(load(t, data, files)?);
            if let (Data::File { .. }, Some(folder)) = (data, &folder) {
                let known = shared.0.entry(t.name.clone()).or_default();
                known.push((folder.clone(), t.clone(), Arc::clone(&values)));
            }
            Ok(Some(values))
        };
        let statics = network.tensors.iter().map(&mut load).collect::<Result<_>>()?;
        Ok(Self { network, statics })
    }

    /// The network.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Runs it on inputs in reals, row-major, in the order of the network's.
    ///
    /// # Errors
    /// Inputs that do not fit.
    pub fn run(&self, inputs: &[&[f32]]) -> Result<Outcome> {
        self.watch(inputs, &mut |_, _| ())
    }

    /// Like [`Self::run`]; `seen` gets every activation as soon as it is computed.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn watch(&self, inputs: &[&[f32]], seen: &mut dyn FnMut(&Tensor, &Values)) -> Result<Outcome> {
        let net = &*self.network;
        let wrong = |what: String| ExecError::Input { network: net.name.clone(), what };
        if inputs.len() != net.inputs.len() {
            return Err(wrong(format!("{} inputs, of {}", inputs.len(), net.inputs.len())));
        }
        let mut values: Vec<Option<Arc<Values>>> = self.statics.clone();
        let mut saturated = Vec::new();
        let mut keep = |id: TensorId, (now, out): (Values, u64), values: &mut Vec<Option<Arc<Values>>>| {
            let tensor = net.tensor(id);
            seen(tensor, &now);
            if out > 0 {
                saturated.push(Saturated { tensor: tensor.name.clone(), count: out, of: tensor.elements() });
            }
            values[id.index()] = Some(Arc::new(now));
        };
        for (id, given) in net.inputs.iter().zip(inputs) {
            let tensor = net.tensor(*id);
            if given.len() as u64 != tensor.elements() {
                return Err(wrong(format!(
                    "`{}` has {} numbers, not {}",
                    tensor.name,
                    tensor.elements(),
                    given.len()
                )));
            }
            keep(*id, Values::encode(tensor, given.iter().map(|x| f64::from(*x))), &mut values);
        }
        let last = self.last_reads();
        for (i, node) in net.nodes.iter().enumerate() {
            let operands: Vec<Arc<Values>> =
                node.inputs.iter().filter_map(|id| values[id.index()].clone()).collect();
            let operands: Vec<&Values> = operands.iter().map(|v| &**v).collect();
            keep(node.output, compute(net, node, &operands), &mut values);
            for id in node.inputs.iter().filter(|id| last[id.index()] == Some(i)) {
                values[id.index()] = None;
            }
        }
        let real = |id: &TensorId| values[id.index()].as_ref().map_or_else(Vec::new, |v| v.reals());
        let outputs = net.outputs.iter().map(|id| real(id).into_iter().map(|x| x as f32).collect()).collect();
        Ok(Outcome { outputs, saturated })
    }

    /// The last node that reads each activation; `None` for results.
    fn last_reads(&self) -> Vec<Option<usize>> {
        let mut last = vec![None; self.network.tensors.len()];
        for (i, node) in self.network.nodes.iter().enumerate() {
            node.inputs.iter().for_each(|id| last[id.index()] = Some(i));
        }
        self.network.outputs.iter().for_each(|id| last[id.index()] = None);
        last
    }
}

fn load(tensor: &Tensor, data: &Data, files: Option<&BundleReader>) -> Result<Values> {
    match data {
        Data::Here(bytes) => Ok(Values::decode(tensor, bytes)),
        Data::File { .. } => Ok(Values::decode(tensor, &static_bytes(tensor, files)?)),
    }
}

/// Bytes of a static tensor; `None` for another tensor.
///
/// # Errors
/// Fails if a file cannot be read, or ends too early.
pub(crate) fn static_bytes(tensor: &Tensor, files: Option<&BundleReader>) -> Result<Vec<u8>> {
    let (file, offset) = match &tensor.data {
        Some(Data::File { file, offset }) => (file, *offset),
        Some(Data::Here(bytes)) => return Ok(bytes.to_vec()),
        None => return Ok(Vec::new()),
    };
    let name = || tensor.name.clone();
    let files = files.ok_or_else(|| ExecError::NoFolder { tensor: name(), file: file.to_string() })?;
    let map = files.map(file).map_err(|source| ExecError::File { tensor: name(), source: source.into() })?;
    let end = offset.saturating_add(tensor.bytes());
    let range = usize::try_from(offset).ok().zip(usize::try_from(end).ok()).map(|(start, end)| start..end);
    let bytes = range.and_then(|range| map.get(range));
    bytes.map(<[u8]>::to_vec).ok_or_else(|| ExecError::Short { tensor: name(), file: file.to_string(), end })
}

/// Result of a verified network's node, and how many codes saturated.
fn compute(net: &Network, node: &Node, operands: &[&Values]) -> (Values, u64) {
    let out = net.tensor(node.output);
    let shapes: Vec<&[usize]> = node.inputs.iter().map(|id| &*net.tensor(*id).shape).collect();
    let reals = match node.op.row().meaning {
        Meaning::FullyConnected => {
            product::fully_connected(operands[0], operands[1], operands.get(2).copied(), shapes[0][1])
        }
        Meaning::MatMul => {
            let ([a @ .., m, k], [b @ .., _, n]) = (shapes[0], shapes[1]) else {
                return Values::encode(out, [].into_iter());
            };
            let outer = &out.shape[..out.shape.len() - 2];
            let (a, b) = (places(a, outer), places(b, outer));
            let places: Vec<_> = a.iter().zip(&b).map(|(a, b)| (a * m * k, b * k * n)).collect();
            product::matmul(operands[0], operands[1], [*m, *k, *n], &places)
        }
        Meaning::Pair(f) => {
            let (a, b) = (operands[0].reals(), operands[1].reals());
            let places = [0, 1].map(|i| places(shapes[i], &out.shape));
            places[0].iter().zip(&places[1]).map(|(i, j)| f(a[*i], b[*j])).collect()
        }
        Meaning::Each(f) => operands[0].reals().into_iter().map(f).collect(),
        Meaning::Row(f) => {
            let mut x = operands[0].reals();
            let second = operands.get(1).map_or_else(Vec::new, |v| v.reals());
            let last = shapes[0].last().copied().unwrap_or(1);
            x.chunks_exact_mut(last).for_each(|row| f(&node.op, row, &second));
            x
        }
        Meaning::Move(f) => {
            let indices: Vec<i64> = match operands.get(1) {
                Some(Values::Whole(x)) => x.iter().map(|i| i64::from(*i)).collect(),
                _ => Vec::new(),
            };
            return (Values::picked(operands, &f(&node.op, &shapes, &indices)), 0);
        }
    };
    Values::encode(out, reals.into_iter())
}

/// For every entry of `out`, in order, the place of the entry of `shape` that broadcasts to it.
fn places(shape: &[usize], out: &[usize]) -> Vec<usize> {
    let strides = strides(shape);
    let mut all = vec![0];
    for (axis, &n) in out.iter().enumerate() {
        let own = (axis + shape.len()).checked_sub(out.len());
        let stride = own.filter(|&i| shape[i] > 1).map_or(0, |i| strides[i]);
        all = all.iter().flat_map(|base| (0..n).map(move |i| base + i * stride)).collect();
    }
    all
}

/// Spread of a tensor: its largest number less its smallest, which its codes are divided over.
pub fn spread(values: &[f32]) -> f64 {
    let (least, most) =
        values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(a, b), x| (a.min(*x), b.max(*x)));
    f64::from(most) - f64::from(least)
}

/// Distance of results from a reference, as a share of the reference's spread.
pub fn share_of_spread(got: &[f32], want: &[f32]) -> f64 {
    share_of(spread(want), got, want)
}

/// Distance of results from a reference, as a share of a spread.
pub fn share_of(spread: f64, got: &[f32], want: &[f32]) -> f64 {
    let most = got.iter().zip(want).fold(0.0_f64, |most, (a, b)| {
        let d = (f64::from(*a) - f64::from(*b)).abs();
        if d.is_nan() || d > most { d } else { most }
    });
    match () {
        () if got.len() != want.len() => f64::INFINITY,
        () if spread > 0.0 => most / spread,
        () => most,
    }
}
