//! Constants of the simulator beside a device file.

/// Rates and shares that no device file has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// 10⁹ bytes per second that the CPU reads and writes when it moves rows.
    pub copy_gb_per_s: f64,
    /// Time of attention and dense networks on the CPU over what the device's table says: Core ML runs large
    /// products at another rate than experts of few rows, from which the table is.
    pub attention_on_cpu: f64,
    /// 10⁹ bytes of weights per second at which a graph reaches the NPU that is not resident there.
    pub load_gb_per_s: f64,
    /// Share of that time during which the CPU works.
    pub load_on_cpu: f64,
    /// Share of the time of graphs of experts during which the CPU works for them: what Core ML does at its side.
    pub hosting: f64,
}

impl Constants {
    /// Those of NPUMoE's machine, found from figures of its evaluation that are named in `docs/npumoe.md`: the crate
    /// `moec-papers` finds them (`papers/src/npumoe/fit.rs`), and its tests hold these numbers to what it finds.
    pub const NPUMOE: Self = Self {
        copy_gb_per_s: 9.269_180_110_497_237,
        attention_on_cpu: 0.562_738_185_262_273_1,
        load_gb_per_s: 4.618_920_242_638_336,
        load_on_cpu: 0.224_467_314_636_245_92,
        hosting: 0.259_965_758_060_371_14,
    };

    /// Nothing but the device file.
    pub const NONE: Self = Self {
        copy_gb_per_s: f64::INFINITY,
        attention_on_cpu: 1.0,
        load_gb_per_s: f64::INFINITY,
        load_on_cpu: 0.0,
        hosting: 0.0,
    };
}
