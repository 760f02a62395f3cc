//! A weight file of pseudorandom numbers, and descriptions of small parts of a model with these weights.

use half::f16;
use moec_coreml::emit::{Attention, Chunk, ExpertGroup, Head, Limits, Networks, Norm, Projection, Raw, Rope};
use moec_coreml::program::{Blocks, Counted, Rules, WeightRef};
use moec_ir::eval::Tensor;
use moec_ir::{Activation, Glu, RopeStyle};

pub(crate) const FILE: &str = "weights.bin";

/// Limits without a maximum number of bytes.
pub(crate) fn ane() -> Limits {
    Limits { rules: Rules::ANE, graph_bytes: u64::MAX, counted: Counted::Stored }
}

/// The same with a padded last axis, which is that of rows.
pub(crate) fn padded() -> Limits {
    Limits { rules: Rules { last_axis_bytes: 64, ..Rules::ANE }, ..ane() }
}

#[derive(Default)]
pub(crate) struct Store {
    pub(crate) data: Vec<f16>,
    seed: u64,
}

impl Store {
    /// A number between −1 and 1.
    pub(crate) fn number(&mut self) -> f32 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Random numbers that f16 represents exactly.
    pub(crate) fn rows(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| f16::from_f32(self.number()).to_f32()).collect()
    }

    /// A tensor of numbers between `middle − spread` and `middle + spread`.
    pub(crate) fn raw(&mut self, shape: &[usize], middle: f32, spread: f32) -> Raw {
        let offset = self.data.len() as u64 * 2;
        for _ in 0..shape.iter().product() {
            let x = middle + spread * self.number();
            self.data.push(f16::from_f32(x));
        }
        Raw { file: FILE.into(), offset, shape: shape.to_vec(), blocks: None }
    }

    /// A matrix whose products have about the magnitude of their input.
    pub(crate) fn matrix(&mut self, out: usize, channels: usize) -> Raw {
        self.raw(&[out, channels], 0.0, 1.5 / (channels as f32).sqrt())
    }

    /// The tensor for the reference evaluator.
    pub(crate) fn tensor(&self, raw: &Raw) -> Tensor {
        let start = raw.offset as usize / 2;
        let count: usize = raw.shape.iter().product();
        let data = self.data[start..start + count].iter().map(|x| x.to_f32()).collect();
        Tensor::f32(raw.shape.clone(), data)
    }

    /// A matrix as codes with one scale per 32 channels; and the same values in f16.
    pub(crate) fn blocks(&mut self, [out, channels]: [usize; 2], bits: u8) -> [Raw; 2] {
        let (most, count) = (f32::from((1_u8 << (bits - 1)) - 1), out * channels);
        let codes: Vec<i8> = (0..count).map(|_| (self.number() * most).round() as i8).collect();
        let scales: Vec<f16> = (0..count / 32)
            .map(|_| f16::from_f32((1.2 + self.number()) / most / (channels as f32).sqrt()))
            .collect();
        let offset = self.data.len() as u64 * 2;
        self.data
            .extend(codes.as_chunks::<2>().0.iter().map(|&[a, b]| f16::from_le_bytes([a as u8, b as u8])));
        let blocks = Some(Blocks { bits, size: 32, scales: self.data.len() as u64 * 2 });
        self.data.extend(&scales);
        let coded = Raw { file: FILE.into(), offset, shape: vec![out, channels], blocks };
        let offset = self.data.len() as u64 * 2;
        let value = |(i, code): (usize, &i8)| f16::from_f32(f32::from(*code) * scales[i / 32].to_f32());
        self.data.extend(codes.iter().enumerate().map(value));
        [coded, Raw { file: FILE.into(), offset, shape: vec![out, channels], blocks: None }]
    }

    /// Values of a weight, dequantised.
    pub(crate) fn values(&self, weight: &WeightRef) -> Vec<f64> {
        let (start, count) = (weight.offset as usize, weight.elements() as usize);
        let halves = |first: usize, n: usize| self.data[first / 2..first / 2 + n].iter().map(|x| x.to_f64());
        let Some(Blocks { size, scales, .. }) = weight.blocks else { return halves(start, count).collect() };
        let scales: Vec<f64> = halves(scales as usize, count / size).collect();
        let bytes = self.bytes();
        let code = |i: usize| f64::from(bytes[start + i] as i8);
        (0..count).map(|i| f16::from_f64(code(i) * scales[i / size]).to_f64()).collect()
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.data.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    /// Experts of 32 channels with 48 between.
    pub(crate) fn group(&mut self, experts: usize, glu: Glu, bias: bool) -> ExpertGroup {
        let (hidden, intermediate) = (32, 48);
        let weights = Networks {
            gate: self.matrix(experts * intermediate, hidden),
            up: self.matrix(experts * intermediate, hidden),
            down: self.matrix(experts * hidden, intermediate),
            gate_up_bias: bias.then(|| [0, 1].map(|_| self.raw(&[experts * intermediate], 0.0, 0.5))),
            down_bias: bias.then(|| self.raw(&[experts * hidden], 0.0, 0.5)),
        };
        ExpertGroup {
            name: "layer0.group0".into(),
            hidden,
            intermediate,
            glu,
            experts: (0..experts).map(|e| format!("expert{e}")).collect(),
            weights,
            capacities: vec![16, 32],
        }
    }

    /// The usual expert group: SwiGLU without biases.
    pub(crate) fn swiglu(&mut self, experts: usize) -> ExpertGroup {
        self.group(experts, Glu::Gated(Activation::Silu), false)
    }

    fn projection(&mut self, out: usize, channels: usize, bias: bool) -> Projection {
        let weight = self.matrix(out, channels);
        Projection { weight, bias: bias.then(|| self.raw(&[out], 0.0, 0.3)) }
    }

    /// Four query heads of 32 channels, two key-value heads, 64 positions, 16 rows at any position.
    pub(crate) fn attention(&mut self) -> Attention {
        self.attention_of([4, 2, 32, 32], false)
    }

    /// Attention with these query heads, key-value heads, channels of keys and of values; optionally with
    /// biases.
    pub(crate) fn attention_of(
        &mut self,
        [heads, kv_heads, qk_dim, v_dim]: [usize; 4],
        bias: bool,
    ) -> Attention {
        let hidden = 32;
        Attention {
            name: "layer0.attention".into(),
            hidden,
            heads,
            kv_heads,
            qk_dim,
            v_dim,
            scale: 1.0 / (qk_dim as f32).sqrt(),
            context: 64,
            q: self.projection(heads * qk_dim, hidden, bias),
            k: self.projection(kv_heads * qk_dim, hidden, bias),
            v: self.projection(kv_heads * v_dim, hidden, bias),
            o: self.projection(hidden, heads * v_dim, bias),
            clip_qkv: None,
            q_norm: None,
            k_norm: None,
            rope: Some(Rope { offset: 0, channels: qk_dim, style: RopeStyle::Half }),
            sinks: None,
            norm: None,
            chunks: vec![Chunk { rows: 16, start: None }],
        }
    }

    pub(crate) fn norm(&mut self, channels: usize) -> Norm {
        Norm { weight: Some(self.raw(&[channels], 1.0, 0.2)), bias: None, eps: 1e-6, center: false }
    }

    /// A head with a vocabulary of 100, in parts of 48.
    pub(crate) fn head(&mut self) -> Head {
        Head {
            name: "head".into(),
            hidden: 32,
            weight: self.matrix(100, 32),
            bias: None,
            entries: 0..100,
            split: 48,
            norm: None,
            rows: vec![16],
        }
    }
}
