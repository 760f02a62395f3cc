//! The machine of §IV and the costs of an expert on its units.
//!
//! The paper prints no rate and no time. Rates are those of the built-in target `rtx4080-i5`, whose file
//! names their sources. One constant is fitted to OLMoE's speedup without fallback: the time of a layer
//! without reading its weights.

use crate::hybrimoe::models::Model;
use moec_base::{Error, Result};
use moec_device::Device;
use moec_runtime::schedule::{Costs, Table, UnitCosts};

/// The target.
pub const TARGET: &str = "rtx4080-i5";
/// Bytes of a weight: the checkpoints are in bf16, and the paper names no other format.
pub const WEIGHT: f64 = 2.0;
/// Microseconds of a layer, and of the operators after the last one, without reading weights: launches,
/// norms, attention's cache, the framework. Fitted to 1.85, OLMoE with half of its experts (Table II).
pub const OVERHEAD_US: f64 = 281.0;

/// Rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Bytes a microsecond of the GPU's memory.
    pub gpu: f64,
    /// Bytes a microsecond of the CPU's memory, at which it computes an expert of one token.
    pub cpu: f64,
    /// Bytes a microsecond over the link.
    pub link: f64,
    /// Microseconds of a layer without reading its weights.
    pub overhead: f64,
}

impl Machine {
    /// As the target has it.
    ///
    /// # Errors
    /// A device file without a figure that is needed.
    pub fn new() -> Result<Self> {
        let device = Device::find(TARGET).map_err(|e| Error::input(e.to_string()))?;
        let rate = |name: &str| {
            let unit = device.units.iter().find(|u| u.name == name);
            let time = unit.and_then(|u| u.matmul.iter().find(|t| t.rows == 1));
            time.map(|t| t.weights as f64 * WEIGHT / (t.ms * 1e3))
        };
        let link = device.links.iter().find(|l| l.from == "dram").map(|l| l.rate() * 1e3);
        match (rate("gpu"), rate("cpu"), link) {
            (Some(gpu), Some(cpu), Some(link)) => Ok(Self { gpu, cpu, link, overhead: OVERHEAD_US }),
            _ => Err(Error::input(format!("`{TARGET}` lacks a rate"))),
        }
    }

    /// Costs of an expert with one token. More than one token is not requested.
    ///
    /// # Errors
    /// Our bug: a table that does not ascend.
    pub fn costs(&self, model: &Model) -> Result<Costs> {
        let bytes = model.expert() as f64 * WEIGHT;
        let unit = |rate: f64| {
            let table = Table::new(vec![(1, bytes / rate)]).map_err(|e| Error::input(e.to_string()))?;
            Ok::<_, Error>(UnitCosts::from(table))
        };
        Ok(Costs::of_two(unit(self.gpu)?, unit(self.cpu)?, bytes / self.link))
    }

    /// Microseconds of a part that reads so many weights on the GPU.
    pub fn dense(&self, weights: u64) -> f64 {
        self.overhead + weights as f64 * WEIGHT / self.gpu
    }
}
