//! Constants of the simulator in addition to a device file.

/// Rates and shares that device files do not have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// 10⁹ bytes per second at which the CPU moves rows, reads and writes counted.
    pub copy_gb_per_s: f64,
    /// Factor on the table's time for attention and dense networks on the CPU. The table was measured with
    /// experts of few rows, and Core ML runs large products at another rate.
    pub attention_on_cpu: f64,
    /// 10⁹ bytes per second at which the weights of a graph that is not resident on the NPU are loaded.
    pub load_gb_per_s: f64,
    /// Share of the loading time during which the CPU works.
    pub load_on_cpu: f64,
    /// Share of the time of graphs of experts during which the CPU works for them: Core ML's own work.
    pub hosting: f64,
}

impl Constants {
    /// Constants of NPUMoE's machine, fitted to figures of its evaluation that `docs/npumoe.md` names. The
    /// crate `moec-papers` fits them (`papers/src/npumoe/fit.rs`), and its tests compare these numbers with
    /// the fit.
    pub const NPUMOE: Self = Self {
        copy_gb_per_s: 9.269_180_110_497_237,
        attention_on_cpu: 0.562_738_185_262_273_1,
        load_gb_per_s: 4.618_920_242_638_336,
        load_on_cpu: 0.224_467_314_636_245_92,
        hosting: 0.259_965_758_060_371_14,
    };

    /// Constants without effect: costs follow from the device file alone.
    pub const NONE: Self = Self {
        copy_gb_per_s: f64::INFINITY,
        attention_on_cpu: 1.0,
        load_gb_per_s: f64::INFINITY,
        load_on_cpu: 0.0,
        hosting: 0.0,
    };
}
