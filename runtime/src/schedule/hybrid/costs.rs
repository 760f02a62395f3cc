//! What experts take on each unit and on the link.

use super::error::HybridError;
use crate::schedule::makespan::Table;

/// A unit's times.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitCosts {
    /// Microseconds of an expert by its tokens, once the unit is warm.
    pub table: Table,
    /// Microseconds that the first task of a layer takes more (Figure 3e: the caches are cold).
    pub first_us: f64,
}

/// What the experts of a layer cost; a warm-up or a device file says it.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// The GPU, of experts that it holds.
    pub gpu: UnitCosts,
    /// The processor, of any expert.
    pub cpu: UnitCosts,
    /// An expert's weights over the link, however many tokens it has.
    pub transfer_us: f64,
    /// What the first transfer of a layer takes more.
    pub first_transfer_us: f64,
}

impl Costs {
    /// Whether every time is one.
    ///
    /// # Errors
    /// [`HybridError::Time`] names the first that is negative, infinite or not a number.
    pub fn check(&self) -> Result<(), HybridError> {
        let points =
            |of: &'static str, unit: &UnitCosts| unit.table.points().iter().map(move |p| (of, p.1)).collect();
        let mut times: Vec<(&'static str, f64)> = vec![
            ("the first task of the GPU", self.gpu.first_us),
            ("the first task of the processor", self.cpu.first_us),
            ("a transfer", self.transfer_us),
            ("the first transfer", self.first_transfer_us),
        ];
        times.extend::<Vec<_>>(points("an expert on the GPU", &self.gpu));
        times.extend::<Vec<_>>(points("an expert on the processor", &self.cpu));
        match times.into_iter().find(|t| !t.1.is_finite() || t.1 < 0.0) {
            Some((what, value)) => Err(HybridError::Time { what, value }),
            None => Ok(()),
        }
    }
}
