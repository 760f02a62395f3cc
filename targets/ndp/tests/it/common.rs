//! Experts of random numbers, and a modelled machine that holds them.

use half::bf16;
use moec_ir::{Activation, Glu};
use moec_ndp::allocation::{DimmConfig, DramLayout, Expert, RowAllocation, RowAllocator};
use moec_ndp::emit::{Output, emit};
use moec_ndp::image::{Packed, Shape};
use moec_ndp::machine::{Bus, Dimms, Program, Report};
use moec_ndp_isa::{Geometry, Stream, System};

pub(crate) const GLUS: [Glu; 7] = [
    Glu::Gated(Activation::Silu),
    Glu::Gated(Activation::Gelu),
    Glu::Gated(Activation::GeluTanh),
    Glu::Gated(Activation::Relu),
    Glu::Gated(Activation::Sigmoid),
    Glu::DRelu,
    Glu::Clamped { alpha: 1.702, limit: 7.0 },
];

/// Pseudorandom numbers: the upper bits of a linear congruential generator (Knuth's MMIX).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// Uniform in −1 .. 1.
    pub(crate) fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) as f32 / (1 << 23) as f32) - 1.0
    }

    pub(crate) fn numbers(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.next() * scale).collect()
    }
}

/// An expert as in the Graph: row-major, with numbers that bf16 represents exactly.
pub(crate) struct Weights {
    pub(crate) shape: Shape,
    pub(crate) gate_up: Vec<f32>,
    pub(crate) down: Vec<f32>,
    pub(crate) biases: Option<(Vec<f32>, Vec<f32>)>,
}

impl Weights {
    pub(crate) fn random(shape: Shape, seed: u64) -> Self {
        let mut random = Random(seed);
        let (hidden, inner) = (shape.hidden as usize, shape.inner as usize);
        let mut matrix = |rows: usize, columns: usize, gain: f32| {
            let mut numbers = random.numbers(rows * columns, gain / (columns as f32).sqrt());
            for x in &mut numbers {
                *x = bf16::from_f32(*x).to_f32();
            }
            numbers
        };
        let (gate_up, down) = (matrix(2 * inner, hidden, 6.0), matrix(hidden, inner, 3.0));
        let biases = shape.bias.then(|| (random.numbers(2 * inner, 2.0), random.numbers(hidden, 2.0)));
        Self { shape, gate_up, down, biases }
    }

    /// The expert's image, packed number by number.
    pub(crate) fn image(&self) -> Vec<u8> {
        let (hidden, inner) = (self.shape.hidden as usize, self.shape.inner as usize);
        let glu: Vec<Option<usize>> = (0..inner.div_ceil(16) * 32)
            .map(|column| {
                let output = column / 32 * 16 + column % 16;
                (output < inner).then_some(if column % 32 < 16 { output } else { inner + output })
            })
            .collect();
        let plain: Vec<Option<usize>> =
            (0..hidden.div_ceil(32) * 32).map(|column| (column < hidden).then_some(column)).collect();
        let gate_up = panels(&self.gate_up, hidden, &glu);
        let down = panels(&self.down, inner, &plain);
        let biases = self.biases.as_ref().map(|(gate_up, down)| (gate_up.as_slice(), down.as_slice()));
        self.shape.pack(Packed { gate_up: &gate_up, down: &down, biases }).expect("an image")
    }
}

/// Packs panels of 32 columns; `columns` has the matrix row of each column.
fn panels(matrix: &[f32], inputs: usize, columns: &[Option<usize>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for panel in columns.chunks_exact(32) {
        for pair in 0..inputs.div_ceil(2) {
            for column in panel {
                for input in [2 * pair, 2 * pair + 1] {
                    let number =
                        column.filter(|_| input < inputs).map_or(0.0, |row| matrix[row * inputs + input]);
                    bytes.extend(bf16::from_f32(number).to_le_bytes());
                }
            }
        }
    }
    bytes
}

/// Four DIMMs with row sets of 64 KB.
pub(crate) fn small() -> DimmConfig {
    DimmConfig {
        system: System { channels: 2, dimms: 2 },
        geometry: Geometry { subchannels: 2, ranks: 2, bank_groups: 2, banks: 2, rows: 4096, lines: 64 },
    }
}

pub(crate) const EXPERT: Expert = Expert { layer: 0, number: 0 };

/// A machine with one expert on DIMM 1, and the expert's stream.
pub(crate) struct Bench {
    pub(crate) allocator: RowAllocator,
    pub(crate) dimms: Dimms,
    pub(crate) stream: Stream,
    pub(crate) image: Vec<u8>,
}

impl Bench {
    pub(crate) fn new(weights: &Weights, slots: u32, output: Output) -> Self {
        let dimm_config = small();
        let mut allocator = RowAllocator::new(dimm_config, weights.shape, slots).expect("an allocator");
        let allocation = allocator.allocate(EXPERT, DramLayout::Localized(1)).expect("room").clone();
        let stream =
            emit(&weights.shape, &dimm_config, 1, allocation.rows.clone(), allocator.boxes(), output);
        let mut dimms = Dimms::new(dimm_config, Bus::plain(153.6), true).expect("DIMMs");
        let image = weights.image();
        dimms.write(&allocation, 0, &image).expect("it fits");
        Self { allocator, dimms, stream: stream.expect("a stream"), image }
    }

    /// Runs the stream on DIMM `dimm` for the rows of `x`, which start at slot `first`; `factors` has a
    /// routing weight for each row.
    pub(crate) fn run(&mut self, dimm: u32, x: &[f32], factors: &[f32], first: u32) -> (Vec<f32>, Report) {
        let (shape, boxes) = (*self.allocator.shape(), self.allocator.boxes().clone());
        let hidden = shape.hidden as usize;
        let part = |rows: &std::ops::Range<u32>| RowAllocation {
            layout: DramLayout::Localized(dimm),
            rows: rows.clone(),
        };
        let n = (x.len() / hidden) as u32;
        for ((x, factor), slot) in x.chunks_exact(hidden).zip(factors).zip(u64::from(first)..) {
            let mut bytes: Vec<u8> = x.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
            bytes.resize(shape.input_lines() as usize * 64, 0);
            self.dimms.write(&part(&boxes.inbox), slot * shape.input_lines(), &bytes).expect("inside");
            let mut line = [0; 64];
            line[..4].copy_from_slice(&factor.to_le_bytes());
            self.dimms.write(&part(&boxes.factors), slot, &line).expect("inside");
        }
        let program = Program::new(self.stream.clone()).expect("it is verified");
        let report = self.dimms.run(&program, first, n).expect("no fault");
        let mut results = Vec::new();
        for slot in u64::from(first)..u64::from(first + n) {
            let mut bytes = vec![0; shape.output_lines() as usize * 64];
            let from = slot * shape.output_lines();
            self.dimms.read(&part(&boxes.outbox), from, &mut bytes).expect("they were written");
            let numbers = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            results.extend(numbers.take(hidden));
        }
        (results, report)
    }
}

pub(crate) fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}
