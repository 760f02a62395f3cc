//! Numbers, their stored forms, and small graphs for them.

use moec_qnn_sys::worker::{Program, Worker};
use moec_qnn_sys::{
    Backend, DType, Data, Device, GraphSpec, Installation, Node, Quant, SNAPDRAGON_8_GEN_3, Soc, TensorId,
};
use moec_testing::QNN;
use std::rc::Rc;
use std::time::Duration;

/// The library; without it, the calling test reports that and is skipped.
pub(crate) fn installation() -> Option<Installation> {
    QNN.ok_or_skip(Installation::find(&moec_testing::cache().unwrap_or_default()))
}

/// The chip of most tests; a process can use one chip at a time.
pub(crate) fn newest(installation: &Installation) -> Rc<Device> {
    Device::new(&Backend::htp(installation).unwrap(), SNAPDRAGON_8_GEN_3).unwrap()
}

/// Numbers in −1 .. 1 that depend only on `seed`.
pub(crate) fn numbers(seed: u64, n: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Smallest and largest number, with zero included.
pub(crate) fn range(of: &[f64]) -> (f32, f32) {
    let fold = |of: &[f64], pick: fn(f64, f64) -> f64| of.iter().copied().fold(0.0, pick) as f32;
    (fold(of, f64::min), fold(of, f64::max))
}

/// Quantisation of a type that covers these numbers.
pub(crate) fn covering(dtype: DType, of: &[f64]) -> Quant {
    let (low, high) = range(of);
    dtype.bits().map_or(Quant::None, |bits| Quant::covering(low, high, bits))
}

/// Like [`covering`], with zero in the middle of the range.
pub(crate) fn centred(dtype: DType, of: &[f64]) -> Quant {
    let (low, high) = range(of);
    // The largest code is one less than half of all codes, so the range needs 1 % of room.
    dtype.bits().map_or(Quant::None, |bits| Quant::symmetric(high.max(-low) * 1.01, bits))
}

/// Stored bytes of numbers.
pub(crate) fn store(values: &[f64], dtype: DType, quant: &Quant) -> Vec<u8> {
    let stored = |v: f64| match quant {
        Quant::Tensor { scale, offset } => (v / f64::from(*scale)).round() - f64::from(*offset),
        _ => v,
    };
    let each = |v: &f64| -> Vec<u8> {
        let q = stored(*v);
        match dtype {
            DType::F32 => (*v as f32).to_le_bytes().to_vec(),
            DType::F16 => half::f16::from_f64(*v).to_le_bytes().to_vec(),
            DType::I32 | DType::S32 => (q as i32).to_le_bytes().to_vec(),
            DType::U32 => (q as u32).to_le_bytes().to_vec(),
            DType::S8 => (q as i8).to_le_bytes().to_vec(),
            DType::U8 | DType::Bool => vec![q as u8],
            DType::S16 => (q as i16).to_le_bytes().to_vec(),
            DType::U16 => (q as u16).to_le_bytes().to_vec(),
        }
    };
    values.iter().flat_map(each).collect()
}

/// Numbers of stored bytes.
pub(crate) fn load(bytes: &[u8], dtype: DType, quant: &Quant) -> Vec<f64> {
    let real = |q: f64| match quant {
        Quant::Tensor { scale, offset } => (q + f64::from(*offset)) * f64::from(*scale),
        _ => q,
    };
    let each = |b: &[u8]| match dtype {
        DType::F32 => f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f64(),
        DType::I32 | DType::S32 => f64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::U32 => f64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::S8 => f64::from(b[0] as i8),
        DType::U8 | DType::Bool => f64::from(b[0]),
        DType::S16 => f64::from(i16::from_le_bytes([b[0], b[1]])),
        DType::U16 => f64::from(u16::from_le_bytes([b[0], b[1]])),
    };
    bytes.chunks_exact(dtype.bytes()).map(|b| real(each(b))).collect()
}

/// Numbers after rounding to their stored form.
pub(crate) fn rounded(values: &[f64], dtype: DType, quant: &Quant) -> Vec<f64> {
    load(&store(values, dtype, quant), dtype, quant)
}

/// Root of the mean squared difference, relative to the reference's root mean square.
pub(crate) fn relative(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let squares = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>();
    let off = squares(&mut got.iter().zip(want).map(|(a, b)| a - b));
    (off / squares(&mut want.iter().copied()).max(1e-30)).sqrt()
}

/// A matrix of weights `[rows, columns]`, quantised by row.
pub(crate) struct Weights {
    pub(crate) quant: Quant,
    pub(crate) bytes: Vec<u8>,
    /// Values of the stored numbers.
    pub(crate) real: Vec<f64>,
}

impl Weights {
    /// Symmetric codes of `bits` (4 or 8), with one scale per row.
    pub(crate) fn by_row(values: &[f64], columns: usize, bits: u32) -> Self {
        let top = f64::from((1i32 << (bits - 1)) - 1);
        let (mut scales, mut bytes, mut real) = (Vec::new(), Vec::new(), Vec::new());
        for row in values.chunks_exact(columns) {
            let scale = (row.iter().fold(1e-6, |a: f64, b| a.max(b.abs())) / top) as f32;
            scales.push(scale);
            for v in row {
                let q = (v / f64::from(scale)).round().clamp(-top, top);
                let mask = if bits == 4 { 0xF } else { 0xFF };
                bytes.push((q as i8 as u8) & mask);
                real.push(q * f64::from(scale));
            }
        }
        Self { quant: Quant::Channels { axis: 0, bits, scales }, bytes, real }
    }
}

/// `x · wᵀ`, row by row.
pub(crate) fn product(x: &[f64], w: &[f64], inner: usize) -> Vec<f64> {
    let rows = x.chunks_exact(inner);
    rows.flat_map(|x| w.chunks_exact(inner).map(move |w| x.iter().zip(w).map(|(a, b)| a * b).sum())).collect()
}

/// A linear layer: input `x` of `[batch, inner]`, output `y` of `[batch, outer]`, weights drawn from `seed`.
pub(crate) struct Linear {
    pub(crate) spec: GraphSpec,
    /// Stored input.
    pub(crate) x: Vec<u8>,
    /// Expected output.
    pub(crate) y: Vec<f64>,
    /// Values of the output's stored numbers.
    pub(crate) quant: Quant,
}

/// Builds a [`Linear`] layer. The output's range is the exact one times `margin`.
pub(crate) fn linear(
    name: &str,
    batch: u32,
    inner: u32,
    outer: u32,
    bits: u32,
    seed: u64,
    margin: f64,
) -> Linear {
    let mut spec = GraphSpec::new(name);
    let x = numbers(seed + 1, (batch * inner) as usize);
    let w = Weights::by_row(&numbers(seed, (inner * outer) as usize), inner as usize, bits);
    let xq = Quant::covering(-1.0, 1.0, 16);
    let x_real = rounded(&x, DType::U16, &xq);
    let y = product(&x_real, &w.real, inner as usize);
    let (low, high) = range(&y);
    let quant = Quant::covering(low * margin as f32, high * margin as f32, 16);
    let x_id = spec.input("x", DType::U16, &[batch, inner], xq.clone()).unwrap();
    let w_id = spec.constant("w", DType::S8, &[outer, inner], w.quant, Data::Bytes(w.bytes)).unwrap();
    let y_id = spec.output("y", DType::U16, &[batch, outer], quant.clone()).unwrap();
    spec.node(Node::new("FullyConnected", &[x_id, w_id], &[y_id])).unwrap();
    Linear { spec, x: store(&x, DType::U16, &xq), y, quant }
}

/// A graph with one operator, and one type for all tensors.
pub(crate) struct Single {
    pub(crate) spec: GraphSpec,
    pub(crate) dtype: DType,
    pub(crate) inputs: Vec<Vec<u8>>,
    outputs: Vec<(Vec<f64>, Quant)>,
}

impl Single {
    /// Creates a graph without an operator.
    pub(crate) fn new(dtype: DType) -> Self {
        Self { spec: GraphSpec::new("single"), dtype, inputs: Vec::new(), outputs: Vec::new() }
    }

    /// Adds an input with these numbers; also returns them as stored.
    pub(crate) fn input(&mut self, dims: &[u32], values: &[f64]) -> (TensorId, Vec<f64>) {
        let quant = covering(self.dtype, values);
        let name = format!("in{}", self.inputs.len());
        let id = self.spec.input(&name, self.dtype, dims, quant.clone()).unwrap();
        self.inputs.push(store(values, self.dtype, &quant));
        (id, rounded(values, self.dtype, &quant))
    }

    /// Like [`Self::input`], with zero in the middle of the range, which some operators require.
    pub(crate) fn centred(&mut self, dims: &[u32], values: &[f64]) -> (TensorId, Vec<f64>) {
        let quant = centred(self.dtype, values);
        let name = format!("in{}", self.inputs.len());
        let id = self.spec.input(&name, self.dtype, dims, quant.clone()).unwrap();
        self.inputs.push(store(values, self.dtype, &quant));
        (id, rounded(values, self.dtype, &quant))
    }

    /// Adds a constant with these numbers; also returns them as stored.
    pub(crate) fn constant(&mut self, name: &str, dims: &[u32], values: &[f64]) -> (TensorId, Vec<f64>) {
        let quant =
            if self.dtype == DType::U16 { centred(self.dtype, values) } else { covering(self.dtype, values) };
        let bytes = store(values, self.dtype, &quant);
        let id = self.spec.constant(name, self.dtype, dims, quant.clone(), Data::Bytes(bytes)).unwrap();
        (id, rounded(values, self.dtype, &quant))
    }

    /// Adds an output that is expected to have these numbers.
    pub(crate) fn output(&mut self, dims: &[u32], values: Vec<f64>) -> TensorId {
        let quant = covering(self.dtype, &values);
        self.output_as(dims, values, quant)
    }

    /// Like [`Self::output`], with this quantisation.
    pub(crate) fn output_as(&mut self, dims: &[u32], values: Vec<f64>, quant: Quant) -> TensorId {
        let name = format!("out{}", self.outputs.len());
        let id = self.spec.output(&name, self.dtype, dims, quant.clone()).unwrap();
        self.outputs.push((values, quant));
        id
    }

    /// Compiles and executes the graph in a worker process; returns the largest relative error of an output.
    ///
    /// # Errors
    /// Returns the library's errors.
    pub(crate) fn error(self, worker: &mut Worker) -> moec_qnn_sys::Result<f64> {
        let graph = worker.compose(&self.spec)?;
        let outputs = worker.execute(graph, self.inputs)?;
        let errors = outputs
            .iter()
            .zip(&self.outputs)
            .map(|(got, (want, quant))| relative(&load(got, self.dtype, quant), want));
        Ok(errors.fold(0.0, f64::max))
    }
}

/// Starts the library in a worker process.
pub(crate) fn worker(installation: &Installation, soc: Soc, share: bool) -> Worker {
    let path = env!("CARGO_BIN_EXE_moec-qnn-exec").into();
    let program = Program { path, arguments: Vec::new(), limit: Duration::from_mins(10) };
    Worker::start(&program, installation, soc, share).unwrap()
}
