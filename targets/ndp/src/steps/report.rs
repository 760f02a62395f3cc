//! Times of a simulated step.

use super::error::StepsError;

/// Busy time of each resource, in microseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Busy {
    /// The GPU calculates.
    pub gpu: f64,
    /// The GPU calculates, or weights come to it: its time in equation 5 of TriMoE.
    pub gpu_domain: f64,
    /// The CPU has an expert.
    pub cpu: f64,
    /// The part of it that calculation alone would take; the rest it waits for memory.
    pub cpu_calc: f64,
    /// PCIe to the GPU, at its full rate.
    pub pcie: f64,
    /// NDP units have an expert, by DIMM.
    pub ndp: Vec<f64>,
    /// Memory of DIMMs, at its full rate, by DIMM.
    pub memory: Vec<f64>,
    /// DIMM-Links at their full rate, by DIMM.
    pub link: Vec<f64>,
    /// Channels of the host at their full rate, by channel.
    pub channel: Vec<f64>,
}

impl Busy {
    /// Adds the times of another.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in [
            (&mut self.gpu, other.gpu),
            (&mut self.gpu_domain, other.gpu_domain),
            (&mut self.cpu, other.cpu),
            (&mut self.cpu_calc, other.cpu_calc),
            (&mut self.pcie, other.pcie),
        ] {
            *mine += theirs;
        }
        for (mine, theirs) in [
            (&mut self.ndp, &other.ndp),
            (&mut self.memory, &other.memory),
            (&mut self.link, &other.link),
            (&mut self.channel, &other.channel),
        ] {
            mine.resize(mine.len().max(theirs.len()), 0.0);
            mine.iter_mut().zip(theirs).for_each(|(m, t)| *m += t);
        }
    }

    /// Mean time that NDP units are busy.
    pub fn ndp_mean(&self) -> f64 {
        self.ndp.iter().sum::<f64>() / self.ndp.len().max(1) as f64
    }
}

/// One step of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerReport {
    /// Its number among the layers with experts.
    pub layer: usize,
    /// Start, in microseconds of virtual time.
    pub begin_us: f64,
    /// Attention, dense layers and shared experts: the window of migration.
    pub before_us: f64,
    /// The routed experts, from the gate to the last of them.
    pub experts_us: f64,
    /// Rows from the GPU to the host before that, and back after it.
    pub rows_us: f64,
    /// The makespan of the scheduler's model (equation 7), to be held against `experts_us`.
    pub predicted_us: f64,
    /// Busy times while experts were computed.
    pub busy: Busy,
    /// Moves that were decided on for the layer's next step.
    pub moves: usize,
    /// For how long the step had nothing to do but to wait for moves, in microseconds.
    pub stalled_us: f64,
}

impl LayerReport {
    /// All of it.
    pub fn total_us(&self) -> f64 {
        self.before_us + self.rows_us + self.experts_us
    }

    /// Error of the scheduler's model, relative to the simulated time.
    pub fn error(&self) -> f64 {
        if self.experts_us > 0.0 { self.predicted_us / self.experts_us - 1.0 } else { 0.0 }
    }
}

/// One step of all layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// By layer.
    pub layers: Vec<LayerReport>,
}

impl StepReport {
    /// All of it.
    pub fn total_us(&self) -> f64 {
        self.layers.iter().map(LayerReport::total_us).sum()
    }

    /// The routed experts of all layers.
    pub fn experts_us(&self) -> f64 {
        self.layers.iter().map(|l| l.experts_us).sum()
    }
}

/// A number from 0 on.
pub(super) fn checked(what: &'static str, value: f64) -> Result<f64, StepsError> {
    if value.is_finite() && value >= 0.0 {
        Ok(value)
    } else {
        Err(StepsError::Number { what, from: "from 0 on", value })
    }
}
