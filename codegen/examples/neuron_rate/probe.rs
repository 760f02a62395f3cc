//! Experts of OLMoE's shapes, whole and by neurons.

use crate::steps::{Arg, Builder, Path};
use crate::{GLU, HIDDEN, INTER, Outcome};
use moec_codegen::pack::Geometry;
use moec_codegen::spec::{ExpertDown, ExpertGateUp, NeuronDown, NeuronUp, Quantise};
use moec_codegen::{
    ByteDot, ComputeType, Isa, KernelSpec, Machine, RowFormat, Schedule, WeightOrder, active_list_words,
    neurons_multiply, packed_words, pad_row_stride,
};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::Layout;
use moec_ir::types::Format;

/// Normal numbers, near enough.
struct Normal(u64);

impl Normal {
    fn next(&mut self) -> f32 {
        let mut sum = -6.0;
        for _ in 0..12 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            sum += (self.0 >> 40) as f32 / (1 << 24) as f32;
        }
        sum
    }

    fn many(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.next() * scale).collect()
    }
}

/// An expert and a token.
pub(crate) struct Expert {
    x: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// By output channel, `[H, I]`.
    down: Vec<f32>,
}

impl Expert {
    pub(crate) fn new(zeros: f64) -> Self {
        let mut normal = Normal(11);
        let scale = 1.0 / (HIDDEN as f32).sqrt();
        let x = normal.many(HIDDEN, 1.0);
        let mut gate = normal.many(INTER * HIDDEN, scale);
        let (up, down) = (normal.many(INTER * HIDDEN, scale), normal.many(INTER * HIDDEN, scale));
        let dot = |row: &[f32]| row.iter().zip(&x).map(|(a, b)| a * b).sum::<f32>();
        let mut sums: Vec<f32> = gate.chunks_exact(HIDDEN).map(dot).collect();
        sums.sort_by(f32::total_cmp);
        // So that the wanted number of gates is below 0.
        let at = ((zeros * INTER as f64) as usize).min(INTER - 1);
        let below = if zeros > 0.0 { f32::midpoint(sums[at - 1], sums[at]) } else { sums[0] - 0.1 };
        let norm = x.iter().map(|x| x * x).sum::<f32>();
        for row in gate.chunks_exact_mut(HIDDEN) {
            row.iter_mut().zip(&x).for_each(|(w, x)| *w -= below * x / norm);
        }
        Self { x, gate, up, down }
    }

    fn bundles(&self) -> Vec<f32> {
        let mut all = Vec::with_capacity(3 * INTER * HIDDEN);
        for i in 0..INTER {
            let row = i * HIDDEN..(i + 1) * HIDDEN;
            all.extend_from_slice(&self.gate[row.clone()]);
            all.extend_from_slice(&self.up[row]);
            all.extend((0..HIDDEN).map(|c| self.down[c * INTER + i]));
        }
        all
    }
}
/// Rows for the first experts, the same number for each.
fn dispatch(layout: DispatchLayout, each: usize) -> Vec<i32> {
    let mut table = vec![0; layout.words()];
    let slots = layout.rows * layout.k;
    let active = slots / each;
    table[0] = active as i32;
    table[1] = slots as i32;
    for a in 0..active {
        table[layout.expert() + a] = a as i32;
        table[layout.start() + a + 1] = ((a + 1) * each) as i32;
    }
    for slot in 0..slots {
        table[layout.token() + slot] = (slot % layout.rows) as i32;
        table[layout.slot() + slot] = slot as i32;
    }
    table
}
/// Experts of `rows` tokens, `each` of whose slots an expert has: whole ones, and neurons.
pub(crate) struct Probe<'m> {
    pub(crate) machine: &'m Machine,
    pub(crate) isa: Isa,
    pub(crate) format: Format,
    pub(crate) rows: usize,
    pub(crate) k: usize,
    pub(crate) each: usize,
    pub(crate) copies: usize,
}

impl Probe<'_> {
    fn layout(&self) -> DispatchLayout {
        DispatchLayout { rows: self.rows, k: self.k, experts: self.copies }
    }

    fn active(&self) -> usize {
        self.rows * self.k / self.each
    }

    fn x(&self, e: &Expert) -> Vec<f32> {
        e.x.iter().copied().cycle().take(self.rows * HIDDEN).collect()
    }

    /// As `select` chooses for a format and number of rows.
    pub(crate) fn dense_compute(&self) -> ComputeType {
        match self.format.is_quantised() {
            true if self.isa.tiles && self.rows > 8 => ComputeType::Bf16,
            true if self.isa.bytes != ByteDot::None => ComputeType::I8,
            false if self.format == Format::Bf16 && self.isa.bf16 && self.rows > 8 => ComputeType::Bf16,
            _ => ComputeType::F32,
        }
    }

    /// Rows of tokens in a compute type, and the words from one to the next.
    fn rows(&self, b: &mut Builder<'_>, x: &[f32], compute: ComputeType) -> Outcome<(usize, usize)> {
        let x = b.words(&x.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        self.packed(b, x, [HIDDEN, 1], compute)
    }

    /// As [`Self::rows`], of rows in memory: `per_row` of `cols` numbers for each token.
    fn packed(
        &self,
        b: &mut Builder<'_>,
        x: usize,
        [cols, per_row]: [usize; 2],
        to: ComputeType,
    ) -> Outcome<(usize, usize)> {
        if to == ComputeType::F32 {
            return Ok((x, cols));
        }
        let out_ld = pad_row_stride(packed_words(cols, to));
        let rows = b.words(&vec![0; self.rows * per_row * out_ld]);
        let spec = KernelSpec::Quantise(Quantise { cols, groups: 1, per_row, x_ld: cols, out_ld, to });
        b.step(spec, vec![Arg::Memory(x), Arg::Memory(rows)])?;
        Ok((rows, out_ld))
    }

    /// Gate and up, and down, either after its rows in their format.
    pub(crate) fn matrices(&self, e: &Expert, order: WeightOrder, compute: ComputeType) -> Outcome<Path> {
        let (format, layout, schedule) = (self.format, self.layout(), Schedule::default());
        let mut b = Builder::new(self.machine, self.copies);
        let slots = self.rows * self.k;
        let table = dispatch(layout, self.each);
        let (rows, x_ld) = self.rows(&mut b, &self.x(e), compute)?;
        let h = b.words(&vec![0; slots * INTER]);
        let spec = KernelSpec::ExpertGateUp(ExpertGateUp {
            layout,
            hidden: HIDDEN,
            inter: INTER,
            format,
            compute,
            x_ld,
            glu: GLU,
            bias: false,
            out: RowFormat::f32(INTER),
            order,
            schedule,
        });
        let one = |spec: &KernelSpec, rows, cols| {
            let layout = spec.layout(&self.isa).unwrap_or(Layout::Rows);
            Geometry { layout, format, matrices: 1, rows, cols }
        };
        let neurons = order != WeightOrder::Panels;
        let (values, g) = if neurons {
            (e.bundles(), one(&spec, INTER, 3 * HIDDEN))
        } else {
            ([e.gate.as_slice(), &e.up].concat(), one(&spec, 2 * INTER, HIDDEN))
        };
        let args = vec![Arg::Memory(rows), Arg::Ints(&table), Arg::Matrices(&values, g), Arg::Memory(h)];
        // Bundles serve both halves.
        let weights = b.memory.len() + 2;
        b.step(spec, args)?;
        let (h_rows, h_ld) = self.packed(&mut b, h, [INTER, self.k], compute)?;
        let spec = KernelSpec::ExpertDown(ExpertDown {
            layout,
            inter: INTER,
            hidden: HIDDEN,
            format,
            compute,
            h_ld,
            bias: false,
            order,
            schedule,
        });
        let matrices =
            if neurons { Arg::Memory(weights) } else { Arg::Matrices(&e.down, one(&spec, HIDDEN, INTER)) };
        let args = vec![Arg::Memory(h_rows), Arg::Ints(&table), matrices, Arg::Words(slots * HIDDEN)];
        b.step(spec, args)?;
        if neurons {
            *b.tables.last_mut().ok_or("no step")? = Some(2);
        }
        b.finish(self.rows, self.active())
    }

    pub(crate) fn skipping(&self, e: &Expert, gate_bound: bool) -> Outcome<Path> {
        let (format, layout) = (self.format, self.layout());
        let (hidden, inter) = (HIDDEN, INTER);
        let mut b = Builder::new(self.machine, self.copies);
        let slots = self.rows * self.k;
        let table = dispatch(layout, self.each);
        let g = Geometry {
            layout: Layout::Neurons { gate_bound },
            format,
            matrices: 1,
            rows: INTER,
            cols: 3 * HIDDEN,
        };
        let h = b.words(&vec![0; slots * INTER]);
        let active_lists = b.words(&vec![0; active_list_words(layout, INTER)]);
        let usual = self.dense_compute();
        let compute =
            if neurons_multiply(&self.isa, format, hidden, usual) { usual } else { ComputeType::F32 };
        let (rows, x_ld) = self.rows(&mut b, &self.x(e), compute)?;
        let up = KernelSpec::NeuronUp(NeuronUp {
            layout,
            hidden,
            inter,
            format,
            compute,
            gate_bound,
            predicted: false,
            x_ld,
            glu: GLU,
        });
        let values = e.bundles();
        let weights = b.memory.len() + 2;
        let args = vec![
            Arg::Memory(rows),
            Arg::Ints(&table),
            Arg::Matrices(&values, g),
            Arg::Memory(h),
            Arg::Memory(active_lists),
        ];
        b.step(up, args)?;
        let down = KernelSpec::NeuronDown(NeuronDown { layout, hidden, inter, format, gate_bound });
        let args = vec![
            Arg::Memory(h),
            Arg::Ints(&table),
            Arg::Memory(weights),
            Arg::Memory(active_lists),
            Arg::Words(slots * HIDDEN),
        ];
        b.step(down, args)?;
        *b.tables.last_mut().ok_or("no step")? = Some(2);
        b.finish(self.rows, self.active())
    }
}
