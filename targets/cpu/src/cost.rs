//! Expected time of a matrix kernel on a machine, and the schedule that should take least.
//!
//! The time of a kernel is the longer of two: its arithmetic at the peak of its compute type, and its
//! weights, rows and results at the bandwidth of memory. Both are those of one core. The effects of a
//! schedule are counted in rows, each as much arithmetic as a row of the matrix takes:
//!
//! * a group of rows in registers costs [`PER_GROUP`] more than it has, for loading the weights; twice that
//!   where its panel and its rows do not fit into the second-level cache together;
//! * a block of byte sums costs [`PER_BLOCK`] more, for unpacking the weights, and an eighth of its rows
//!   where its sums are more than three quarters of the first-level cache;
//! * a panel of codes that is unpacked to f32 or bf16 costs as much as [`PER_UNPACKING`] rows of f32;
//! * a block of rows on tiles costs [`PER_BLOCK_OF_TILES`] more, and a quarter of its rows where they fill
//!   more than half of the second-level cache;
//! * work items that do not come out even between cores leave some of them waiting.
//!
//! Effects outside of the model (prefetching, unrolling) are left unchanged; `moec build --tune` measures
//! them.

use crate::{CpuTarget, KernelSpec};
use moec_codegen::spec::Product;
use moec_codegen::{ByteDot, ComputeType, Isa, Knob, Schedule, WeightOrder, evenly_from, least};
use moec_device::Device;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::Grid;
use moec_ir::types::{Coding, Format};

/// Rows that a register group, or a block of tiles, costs beside its own.
const PER_GROUP: f64 = 1.0;
/// Rows that unpacking the weights of a block of byte sums costs: q8, and q4 with its nibbles.
const PER_BLOCK: [f64; 2] = [1.0, 2.0];
/// Rows that a block of rows on tiles costs: its panels come once more, from the last-level cache.
const PER_BLOCK_OF_TILES: f64 = 8.0;
/// Rows of f32 that unpacking a panel costs: shift, shift, convert, multiply, store beside one multiply-add.
const PER_UNPACKING: f64 = 5.0;
/// Loads of experts as multiples of the mean load. In OLMoE with 64 experts, the busiest reach these.
const UNEVEN: [usize; 4] = [1, 2, 4, 8];
/// Rows of a block of tiles.
const TILES: usize = 32;
/// Cycles per second where the device file gives no rate.
const CLOCK: f64 = 3e9;
/// Bytes per second that a core reads where the device file gives no figure.
const READ: f64 = 20e9;
/// The most that one core reads, however many channels the machine has.
const READ_MOST: f64 = 40e9;
/// Caches where the device file gives none: the smallest of today's.
const CACHES: [u64; 2] = [32 << 10, 256 << 10];
/// Cores where the device file gives none.
const CORES: u32 = 8;

/// A figure and its source.
#[derive(Clone, Debug, PartialEq)]
pub struct Rate {
    /// Per second: operations (a multiply-add is two), or bytes.
    pub value: f64,
    /// Source in the device file, or the assumption.
    pub source: String,
}

/// Figures of one core of a machine in the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Figures {
    /// Bytes of the first-level and the second-level cache.
    pub caches: [u64; 2],
    /// Bytes of the last-level cache, where it is known.
    pub last_cache: Option<u64>,
    /// Cores that share work.
    pub cores: u32,
    /// Operations per second in f32.
    pub f32: Rate,
    /// Operations per second in bf16.
    pub bf16: Rate,
    /// Operations per second in bytes.
    pub bytes: Rate,
    /// Bytes read from memory per second.
    pub read: Rate,
}

impl Figures {
    /// Figures of a device file, completed by what its instructions promise. `has` reports its features.
    pub(crate) fn of(device: &Device, isa: &Isa, has: &dyn Fn(&str) -> bool) -> Self {
        let unit = device.units.first();
        // A unit of one core is a unit of measurement, not a machine.
        let cores = unit.and_then(|u| u.cores).filter(|n| *n > 1).unwrap_or(CORES);
        let stated = |name: &str| {
            let p = unit?.peak.get(name)?;
            let value = p.rate() * 1e9 / f64::from(unit?.cores.unwrap_or(1).max(1));
            (value > 0.0).then(|| Rate { value, source: p.source.clone() })
        };
        let lanes = isa.lanes as f64;
        let f32 = stated("f32").unwrap_or_else(|| Rate {
            value: 4.0 * lanes * CLOCK,
            source: format!("assumed: two multiply-adds of {lanes} lanes per cycle at 3 GHz"),
        });
        let times = |by: f64, what: &str| Rate {
            value: by * f32.value,
            source: format!("assumed: {by} times f32, by {what}"),
        };
        let bf16 = if isa.bf16 {
            // Kernels of pairs run on tiles where there are some, an order of magnitude faster than on
            // vectors.
            let tiles = || moec_device::tiles("bf16").filter(|_| isa.tiles);
            let tiles = || tiles().map(|p| Rate { value: p.gops * 1e9, source: p.source });
            stated("bf16").or_else(tiles).unwrap_or_else(|| times(2.0, "dot products of pairs"))
        } else {
            times(1.0, "widening")
        };
        // The figure of a machine with tiles is theirs; kernels of bytes run on vectors, whose scales come by
        // 32 channels.
        let stated_bytes = stated("int8").filter(|_| !has("amx-int8"));
        let bytes = match isa.bytes {
            ByteDot::None => times(1.0, "widening"),
            dot => stated_bytes.unwrap_or_else(|| {
                let by = match dot {
                    ByteDot::None => 1.0,
                    ByteDot::Maddubs => 2.0,
                    ByteDot::Vnni | ByteDot::Sdot => 4.0,
                    ByteDot::Smmla => 8.0,
                };
                let tiles = if has("amx-int8") { " on vectors, not tiles" } else { "" };
                times(by, &format!("dot products of bytes{tiles}"))
            }),
        };
        let own = device.cpu_memory();
        let own = device.memories.iter().find(|m| Some(m.name.as_str()) == own);
        let read = own.and_then(|m| m.bandwidth.last()).filter(|b| b.gb_per_s > 0.0);
        let read = read.map_or_else(
            || Rate { value: READ, source: "assumed: 20 GB/s for a core".to_owned() },
            |b| {
                let share = b.rate() * 1e9 / f64::from(unit.and_then(|u| u.cores).unwrap_or(1).max(1));
                Rate { value: share.min(READ_MOST), source: b.source.clone() }
            },
        );
        let cache = |level: u8, otherwise| device.cache_bytes(level).unwrap_or(otherwise);
        let caches = [cache(1, CACHES[0]), cache(2, CACHES[1])];
        Self { caches, last_cache: device.cache_bytes(3), cores, f32, bf16, bytes, read }
    }

    /// The rate of a compute type.
    pub fn rate(&self, compute: ComputeType) -> &Rate {
        match compute {
            ComputeType::F32 => &self.f32,
            ComputeType::Bf16 => &self.bf16,
            ComputeType::I8 => &self.bytes,
        }
    }
}

/// Load of a matrix kernel's call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Load {
    /// Matrices that are multiplied by: groups, or the experts that are active.
    pub matrices: usize,
    /// Rows that are multiplied by each of them. Experts: as many as an even routing gives.
    pub rows: usize,
    /// Input channels.
    pub k: usize,
    /// Output channels.
    pub n: usize,
}

/// Bound of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Its arithmetic.
    Arithmetic,
    /// Reading and writing memory.
    Memory,
}

impl Bound {
    /// For readers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Arithmetic => "arithmetic",
            Self::Memory => "memory",
        }
    }
}

/// Estimate for a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Operations; a multiply-add is two.
    pub operations: f64,
    /// Bytes of weights, rows and results, each counted once.
    pub bytes: f64,
    /// Seconds of arithmetic on one core, including the effects of the schedule.
    pub arithmetic: f64,
    /// Seconds of reading and writing on one core.
    pub memory: f64,
    /// Arithmetic with the effects of the schedule, relative to arithmetic without them; at least 1.
    pub overhead: f64,
    /// Factor by which all cores take longer than an even split would; at least 1.
    pub waiting: f64,
}

impl Estimate {
    /// Seconds on one core.
    pub fn seconds(&self) -> f64 {
        self.arithmetic.max(self.memory)
    }

    /// Bound that limits it.
    pub fn bound(&self) -> Bound {
        if self.arithmetic >= self.memory { Bound::Arithmetic } else { Bound::Memory }
    }
}

impl CpuTarget {
    /// Figures of the target in the cost model.
    pub fn figures(&self) -> &Figures {
        &self.figures
    }

    /// Load of a call with `n` valid rows; `None` if the kernel multiplies by no matrix, or by one that is
    /// stored by neurons.
    pub fn load(&self, spec: &KernelSpec, n: usize) -> Option<Load> {
        let Product { k, n: outputs, groups, experts, order, .. } = spec.product()?;
        // The cost of neurons is that of the active ones.
        if order != WeightOrder::Panels {
            return None;
        }
        let (matrices, rows) = experts.map_or((groups, n.max(1)), |DispatchLayout { k, experts, .. }| {
            let slots = n.max(1) * k;
            let matrices = experts.min(slots).max(1);
            (matrices, (slots + matrices / 2) / matrices)
        });
        Some(Load { matrices, rows, k, n: outputs })
    }

    /// Estimate for a kernel with its schedule, called with `n` valid rows; `None`: no matrix.
    pub fn estimate(&self, spec: &KernelSpec, n: usize) -> Option<Estimate> {
        self.estimate_of(spec, self.load(spec, n)?)
    }

    /// Like [`Self::estimate`], for this load.
    fn estimate_of(&self, spec: &KernelSpec, load: Load) -> Option<Estimate> {
        let Product { format, compute, experts, schedule, .. } = spec.product()?;
        let layout = spec.layout(&self.isa)?;
        let Load { matrices, rows, k, n: outputs } = load;
        let products = (matrices * rows * k) as f64 * outputs as f64;
        let weights = crate::packed_bytes(layout, format, &[1, outputs, k])? as f64;
        let row_bytes = 4 * moec_codegen::packed_words(k, compute);
        let (gated, panels) = (matches!(layout, moec_ir::plan::Layout::GluPanels { .. }), self.panels(spec));
        let results = if gated { outputs / 2 } else { outputs };
        let bytes = matrices as f64 * (weights + (rows * (row_bytes + 4 * results)) as f64);

        // Work items take even shares of the rows.
        let tiles = self.isa.tiles && compute == ComputeType::Bf16;
        let most = if tiles || experts.is_none() { schedule.rows } else { rows };
        let panel_bytes = weights / panels.max(1) as f64;
        let item = |r: usize| self.rows_vector_work(format, compute, schedule, r, panel_bytes, row_bytes);
        let blocks = rows.div_ceil(most);
        let larger = rows % blocks;
        let mut vector_work = (blocks - larger) as f64 * item(rows / blocks)
            + if larger > 0 { larger as f64 * item(rows / blocks + 1) } else { 0.0 };
        let peak = self.figures.rate(compute).value;
        if format.is_quantised() && compute != ComputeType::I8 {
            // Work items of one panel follow each other, and the later ones find it unpacked. Blocks of tiles
            // do not.
            let times = if tiles { blocks as f64 } else { 1.0 };
            vector_work += times * PER_UNPACKING * peak / self.figures.f32.value;
        }
        let overhead = 1.0 + vector_work / rows as f64;

        let items = spec.grid(&self.isa).items(rows, matrices);
        let cores = self.figures.cores as usize;
        let waiting = (items.div_ceil(cores) * cores) as f64 / items.max(1) as f64;
        let operations = 2.0 * products;
        Some(Estimate {
            operations,
            bytes,
            arithmetic: operations * overhead / peak,
            memory: bytes / self.figures.read.value,
            overhead,
            waiting,
        })
    }

    /// Rows' worth of arithmetic that a work item of `rows` rows takes beside its own.
    fn rows_vector_work(
        &self,
        format: Format,
        compute: ComputeType,
        schedule: Schedule,
        rows: usize,
        panel_bytes: f64,
        row_bytes: usize,
    ) -> f64 {
        let [l1, l2] = self.figures.caches.map(|b| b as f64);
        if compute == ComputeType::I8 {
            let block = schedule.block.min(rows);
            // Sums of a row, and the cache line of it that a group of weights is multiplied by.
            let held = (block * (4 * self.isa.nr + 64)) as f64;
            let spilt = if held > 0.75 * l1 { rows as f64 / 8.0 } else { 0.0 };
            return rows.div_ceil(schedule.block) as f64
                * PER_BLOCK[usize::from(format.coding() != Some(Coding::Bytes))]
                + spilt;
        }
        if compute == ComputeType::Bf16 && self.isa.tiles {
            // Data that the second-level cache does not keep in addition to panels are read from further away
            // for each panel.
            let far = if (rows * row_bytes) as f64 > l2 / 2.0 { rows as f64 / 4.0 } else { 0.0 };
            return PER_BLOCK_OF_TILES + rows.div_ceil(TILES) as f64 * PER_GROUP + far;
        }
        let mr = self.isa.mr;
        let evenly = rows.div_ceil(mr);
        let groups = if rows >= evenly_from(mr) || rows <= mr && rows >= least(mr) {
            evenly
        } else {
            rows / mr + usize::try_from((rows % mr).count_ones()).unwrap_or(0)
        };
        let fits = panel_bytes + (mr * row_bytes) as f64 <= l2;
        groups as f64 * PER_GROUP * if fits { 1.0 } else { 2.0 }
    }

    /// Loads that a schedule has to serve: those of experts on tiles are uneven, and the busiest of them take
    /// most of the time.
    fn loads(&self, spec: &KernelSpec, n: usize) -> Vec<Load> {
        let Some(load) = self.load(spec, n) else { return Vec::new() };
        let is_of_experts = spec.product().is_some_and(|p| p.experts.is_some());
        if !is_of_experts || !self.on_tiles(spec) {
            return vec![load];
        }
        // An expert gets each token at most once.
        let rows = UNEVEN.map(|times| (times * load.rows).min(n.max(load.rows)));
        rows.into_iter().map(|rows| Load { rows, ..load }).collect()
    }

    /// Whether a kernel multiplies on tile registers.
    fn on_tiles(&self, spec: &KernelSpec) -> bool {
        self.isa.tiles && spec.compute() == Some(ComputeType::Bf16)
    }

    /// Panels of a kernel's matrix.
    pub(crate) fn panels(&self, spec: &KernelSpec) -> usize {
        match spec.grid(&self.isa) {
            Grid::One => 1,
            Grid::Tiles { tiles, .. } => tiles as usize / spec.product().map_or(1, |p| p.groups.max(1)),
            grid @ (Grid::Experts { .. } | Grid::Clusters { .. }) => grid.items_of_expert(),
        }
    }

    /// Schedules to consider for a kernel that is called with `n` valid rows: the usual one first, then
    /// others that differ in one field.
    pub fn candidates(&self, spec: &KernelSpec, n: usize) -> Vec<Schedule> {
        let Some(most) = self.loads(spec, n).iter().map(|l| l.rows).max() else { return Vec::new() };
        let usual = Schedule::default();
        // Blocks of tiles are to fill a share of the second-level cache, which is a power of two.
        let rows: &[(usize, usize)] = if self.on_tiles(spec) {
            &[(48, 49), (192, 97), (256, 193), (384, 193), (512, 385), (768, 385)]
        } else {
            &[(48, 49), (192, 97), (384, 193), (768, 385)]
        };
        // Values of each field, and from how many rows on they mean something.
        let values: [(Knob, &[(usize, usize)]); 4] = [
            (Knob::Rows, rows),
            (Knob::Unroll, &[(8, 1)]),
            (Knob::Block, &[(64, 65), (256, 129)]),
            (Knob::Ahead, &[(0, 1), (2560, 1), (12288, 1)]),
        ];
        let mut all = vec![usual];
        for (knob, values) in values.into_iter().filter(|(knob, _)| knob.applies_to(spec, &self.isa)) {
            let meant = values.iter().filter(|(_, from)| most >= *from);
            all.extend(meant.map(|&(value, _)| usual.with(knob, value)));
        }
        all.retain(|s| s.fits(&self.isa));
        let mut seen = Vec::new();
        all.retain(|s| {
            !seen.contains(s) && {
                seen.push(*s);
                true
            }
        });
        all
    }

    /// The schedule that the model chooses: of the candidates that which takes least, and the usual one where
    /// others take no less. `None`: no matrix.
    pub fn cheapest(&self, spec: &KernelSpec, n: usize) -> Option<Schedule> {
        let loads = self.loads(spec, n);
        let cost = |s: &Schedule| {
            let spec = spec.with_schedule(*s);
            let each = loads.iter().map(|load| self.estimate_of(&spec, *load));
            each.map(|e| e.map(|e| e.seconds() * e.waiting))
                .sum::<Option<f64>>()
                .filter(|_| !loads.is_empty())
        };
        let mut best: Option<(Schedule, f64)> = None;
        for schedule in self.candidates(spec, n) {
            let cost = cost(&schedule)?;
            if best.is_none_or(|(_, least)| cost < least) {
                best = Some((schedule, cost));
            }
        }
        best.map(|(schedule, _)| schedule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_codegen::RowFormat;
    use moec_codegen::spec::{ExpertGateUp, Linear, Softmax};
    use moec_ir::op::{Activation, Glu};

    fn target(name: &str) -> CpuTarget {
        CpuTarget::new(&Device::find(name).unwrap()).unwrap()
    }

    fn linear(k: usize, n: usize, format: Format, compute: ComputeType) -> KernelSpec {
        KernelSpec::Linear(Linear {
            k,
            n,
            format,
            compute,
            groups: 1,
            x_ld: moec_codegen::packed_words(k, compute),
            out_ld: n,
            bias: false,
            residual_ld: None,
            glu: None,
            schedule: Schedule::default(),
        })
    }

    #[test]
    fn one_row_is_bound_by_memory_and_many_by_arithmetic() {
        let t = target("x86-64-v4");
        let spec = linear(2048, 2048, Format::Bf16, ComputeType::F32);
        let (one, many) = (t.estimate(&spec, 1).unwrap(), t.estimate(&spec, 512).unwrap());
        assert_eq!([one.bound(), many.bound()], [Bound::Memory, Bound::Arithmetic]);
        // 8 MiB of weights at 20 GB/s.
        assert!((one.seconds() - (2048.0 * 2048.0 * 2.0 + 16384.0) / 20e9).abs() < 1e-6, "{one:?}");
        assert_eq!(many.operations, 2.0 * 512.0 * 2048.0 * 2048.0);
        // At most twelve rows per group, with one more row each: six items of 85 and 86 rows.
        let groups = 6.0 * 8.0;
        assert!((many.overhead - (1.0 + groups / 512.0)).abs() < 1e-9, "{}", many.overhead);
    }

    #[test]
    fn expert_row_estimate_assumes_even_routing() {
        let t = target("x86-64-v4");
        let spec = |k, experts| {
            KernelSpec::ExpertGateUp(ExpertGateUp {
                layout: DispatchLayout { rows: 512, k, experts },
                hidden: 2048,
                inter: 1024,
                format: Format::Q8,
                compute: ComputeType::F32,
                x_ld: 2048,
                glu: Glu::Gated(Activation::Silu),
                bias: false,
                out: RowFormat::f32(1024),
                order: WeightOrder::Panels,
                schedule: Schedule::default(),
            })
        };
        let of = |n, k, experts| t.load(&spec(k, experts), n).map(|l| (l.matrices, l.rows)).unwrap();
        assert_eq!(
            [of(512, 8, 64), of(1, 8, 64), of(4, 2, 8), of(3, 2, 4)],
            [(64, 64), (8, 1), (8, 1), (4, 2)]
        );
        assert_eq!(t.load(&KernelSpec::Softmax(Softmax { cols: 8, x_ld: 8, out_ld: 8 }), 4), None);
    }

    #[test]
    fn cost_model_changes_the_default_schedule() {
        let t = target("sapphire-rapids");
        let chosen = |k, n, format, compute, rows| t.cheapest(&linear(k, n, format, compute), rows).unwrap();
        // Blocks of byte sums end at work items, so larger items have fewer blocks.
        assert_eq!(chosen(2048, 8192, Format::Q8, ComputeType::I8, 512).rows, 384);
        // If the panels are enough work for all cores, each is multiplied by all rows at once. For one row,
        // no schedule is better than the default.
        assert_eq!(chosen(2048, 8192, Format::Bf16, ComputeType::F32, 512).rows, 768);
        assert_eq!(chosen(2048, 8192, Format::Q8, ComputeType::F32, 1), Schedule::default());
        // A matrix of one panel is split between cores by rows.
        let eight = target("x86-64-v4");
        let small = eight.cheapest(&linear(64, 32, Format::F32, ComputeType::F32), 100).unwrap();
        assert_eq!(small.rows, 48);
    }

    #[test]
    fn unpacking_costs_once_per_block_and_more_on_tiles() {
        let t = target("sapphire-rapids");
        let overhead =
            |format, compute, n| t.estimate(&linear(2048, 2048, format, compute), n).unwrap().overhead;
        // Two rows: one group of two.
        assert_eq!(overhead(Format::Bf16, ComputeType::F32, 2), 1.5);
        assert_eq!(overhead(Format::Q8, ComputeType::F32, 2), 1.5 + PER_UNPACKING / 2.0);
        let tiles = t.figures().bf16.value / t.figures().f32.value;
        // Four blocks of 80 rows, with three groups of tiles each.
        let block = PER_BLOCK_OF_TILES + 3.0 + PER_UNPACKING * tiles;
        assert!((overhead(Format::Q8, ComputeType::Bf16, 320) - (1.0 + 4.0 * block / 320.0)).abs() < 1e-9);
        // A build takes fewer rows: as many of 4 KiB as fit into the second-level cache beside the panels.
        let chosen = |k| t.cheapest(&linear(k, 2048, Format::Bf16, ComputeType::Bf16), 512).map(|s| s.rows);
        assert_eq!([chosen(2048), chosen(1024)], [Some(256), Some(512)]);
    }

    #[test]
    fn kernel_choice_is_a_candidate_and_deterministic() {
        for name in ["x86-64-v3", "x86-64-v4", "neoverse-v2", "sapphire-rapids", "native"] {
            let t = target(name);
            for (format, compute) in [
                (Format::Bf16, ComputeType::F32),
                (Format::Q4, ComputeType::F32),
                (Format::Q8, ComputeType::I8),
            ] {
                for n in [1, 7, 100, 512, 2048] {
                    let spec = linear(200, 300, format, compute);
                    let all = t.candidates(&spec, n);
                    let chosen = t.cheapest(&spec, n).unwrap();
                    assert!(all.contains(&chosen) && all.iter().all(|s| s.fits(&t.isa)), "{name} {n}");
                    assert_eq!(
                        (all.first(), t.cheapest(&spec, n)),
                        (Some(&Schedule::default()), Some(chosen))
                    );
                    let e = t.estimate(&spec.with_schedule(chosen), n).unwrap();
                    assert!(e.overhead >= 1.0 && e.waiting >= 1.0 && e.seconds() > 0.0, "{name} {n} {e:?}");
                }
            }
        }
    }

    /// A machine with tiles and no device file, like `native`: its assumed rates, and the schedules that
    /// follow from them.
    #[test]
    fn tiles_are_scheduled_by_their_own_rate() {
        let text = |features: &str| {
            format!(
                "name = \"bare\"\ndescription = \"no figures\"\nfamily = \"cpu\"\ntriple = \"x86_64-unknown-linux-gnu\"\n\
                 cpu = \"sapphirerapids\"\nfeatures = [\"avx2\", \"fma\", \"f16c\", \"avx512f\", \"avx512bw\", \"avx512dq\", \
                 \"avx512vl\", \"avx512vnni\", \"avx512bf16\"{features}]\n"
            )
        };
        let bare = |features: &str| {
            let device = Device::parse(&text(features), std::path::Path::new("bare.toml")).unwrap();
            CpuTarget::new(&device).unwrap()
        };
        let tiles = bare(", \"amx-tile\", \"amx-bf16\", \"amx-int8\"");
        let (known, rates) = (target("sapphire-rapids"), tiles.figures());
        assert_eq!(rates.bf16.value, known.figures().bf16.value);
        assert!(rates.bf16.source.contains("sapphire-rapids") && rates.bf16.value > 10.0 * rates.f32.value);
        // Bytes are multiplied by vector instructions, which the output states.
        assert_eq!(rates.bytes.value, 4.0 * rates.f32.value);
        assert!(rates.bytes.source.contains("not tiles"), "{}", rates.bytes.source);

        // For an expert with 64 rows, arithmetic limits vector instructions, and reading the weights limits
        // tiles.
        let spec = linear(2048, 2048, Format::Bf16, ComputeType::Bf16);
        let (fast, slow) = (tiles.estimate(&spec, 64).unwrap(), times_of(&bare(""), &spec, 64));
        assert_eq!((fast.bound(), slow.bound()), (Bound::Memory, Bound::Arithmetic));
        assert!(slow.seconds() > 1.5 * fast.seconds(), "{slow:?} {fast:?}");
        // Unpacking codes uses vector instructions, so relative to tiles its cost grows with their speed.
        let packed = linear(2048, 2048, Format::Q8, ComputeType::Bf16);
        let overhead = |t: &CpuTarget| times_of(t, &packed, 320).overhead - 1.0;
        assert!(overhead(&tiles) > 2.0 * overhead(&bare("")), "{} {}", overhead(&tiles), overhead(&bare("")));
    }

    fn times_of(target: &CpuTarget, spec: &KernelSpec, n: usize) -> Estimate {
        target.estimate(spec, n).unwrap()
    }

    #[test]
    fn cost_figures_are_per_core_values_of_the_device_file() {
        let t = target("sapphire-rapids");
        assert_eq!((t.figures().f32.value, t.figures().caches[1]), (160e9, 2 << 20));
        assert!(t.figures().f32.source.starts_with("measured"));
        // 307 GB/s are those of a socket, which a core cannot reach.
        assert_eq!(t.figures().read.value, READ_MOST);
        // The int8 rate of the file is that of tiles.
        assert_eq!(t.figures().bytes.value, 4.0 * 160e9);
        let v3 = target("x86-64-v3");
        assert!(v3.figures().f32.source.starts_with("assumed") && v3.figures().f32.value == 96e9);
        assert_eq!(v3.figures().caches, [32 << 10, 256 << 10]);
    }
}
