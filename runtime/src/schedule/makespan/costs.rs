//! What an expert costs on each unit, in microseconds (TriMoE, §4.2, equations 1 to 4).

use super::error::MakespanError;
use super::layout::Layout;

/// Time of computing one expert by its tokens (`f_calc` of TriMoE): straight lines between measured points.
///
/// Before the first point it is the first point's time, after the last it goes on as between the last two.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    points: Vec<(u32, f64)>,
}

impl Table {
    /// Of points (tokens, microseconds).
    ///
    /// # Errors
    /// [`MakespanError::NoPoints`], [`MakespanError::Order`] where tokens do not ascend, [`MakespanError::Time`]
    /// for a time that is negative or not a number. Infinite times are taken: such loads are never computed there.
    pub fn new(points: Vec<(u32, f64)>) -> Result<Self, MakespanError> {
        if points.is_empty() {
            return Err(MakespanError::NoPoints);
        }
        if let Some(w) = points.windows(2).find(|w| w[0].0 >= w[1].0) {
            return Err(MakespanError::Order { tokens: w[0].0, next: w[1].0 });
        }
        match points.iter().find(|p| p.1.is_nan() || p.1 < 0.0) {
            Some(&(_, value)) => Err(MakespanError::Time { what: "a time of a table of costs", value }),
            None => Ok(Self { points }),
        }
    }

    /// Its points: tokens, microseconds.
    pub fn points(&self) -> &[(u32, f64)] {
        &self.points
    }

    /// Microseconds for so many tokens, which need not be whole; never negative.
    pub fn at(&self, tokens: f64) -> f64 {
        let p = &self.points;
        let after = p.partition_point(|&(n, _)| f64::from(n) <= tokens);
        let Some(before) = after.checked_sub(1) else { return p[0].1 };
        let (n, us) = p[before];
        let step = tokens - f64::from(n);
        // At a point itself, its time: beside an infinite one the slope would say nothing.
        if step == 0.0 || p.len() == 1 {
            return us;
        }
        let from = before.min(p.len() - 2);
        let slope = (p[from + 1].1 - p[from].1) / f64::from(p[from + 1].0 - p[from].0);
        let line = us + step * slope;
        if line.is_nan() { f64::INFINITY } else { line.max(0.0) }
    }
}

/// How fast the host reads its memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dram {
    /// Of what is interleaved over all channels.
    pub striped_us_per_byte: f64,
    /// Of what lies on one DIMM, as the host sees it: over that DIMM's channel.
    pub localized_us_per_byte: f64,
}

/// What near-data units cost. All DIMMs have the same.
#[derive(Clone, Debug, PartialEq)]
pub struct NdpCosts {
    /// `f_calc_ndp`.
    pub table: Table,
    /// A byte of weights over the DIMM's private path.
    pub internal_us_per_byte: f64,
    /// A byte over one DIMM-Link.
    pub link_us_per_byte: f64,
}

/// What the experts of a layer cost; all layers have the same.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// `f_calc_gpu`; `None`: there is no GPU.
    pub gpu: Option<Table>,
    /// `f_calc_cpu`.
    pub cpu: Table,
    /// Near-data units; `None`: there are none.
    pub ndp: Option<NdpCosts>,
    /// A byte from the host to the GPU.
    pub pcie_us_per_byte: f64,
    /// The host's memory.
    pub dram: Dram,
    /// Bytes of one expert's weights.
    pub expert_bytes: u64,
    /// Bytes of one token's row to an expert and back: what moves where activations travel.
    pub token_bytes: u64,
}

impl Costs {
    /// `T_DRAM(W, M)`: the host reads an expert, in equations 2 and 3.
    pub fn t_dram(&self, layout: Layout) -> f64 {
        let rate = match layout {
            Layout::Striped => self.dram.striped_us_per_byte,
            Layout::Local(_) => self.dram.localized_us_per_byte,
        };
        self.expert_bytes as f64 * rate
    }

    /// `T_PCIe` of equation 2: an expert travels to the GPU.
    pub fn t_pcie(&self) -> f64 {
        self.expert_bytes as f64 * self.pcie_us_per_byte
    }

    /// Equation 1: the GPU computes an expert that it holds. Infinite without a GPU.
    pub fn t_gpu_hit(&self, tokens: f64) -> f64 {
        self.gpu.as_ref().map_or(f64::INFINITY, |t| t.at(tokens))
    }

    /// Equation 2: the GPU computes an expert that it reads as it goes.
    pub fn t_gpu_miss(&self, tokens: f64, layout: Layout) -> f64 {
        self.t_gpu_hit(tokens).max(self.t_pcie()).max(self.t_dram(layout))
    }

    /// Equation 3: the processor computes an expert.
    pub fn t_cpu(&self, tokens: f64, layout: Layout) -> f64 {
        self.cpu.at(tokens).max(self.t_dram(layout))
    }

    /// Equation 4: a DIMM computes an expert that lies on it. Infinite without near-data units.
    pub fn t_ndp(&self, tokens: f64) -> f64 {
        let bytes = self.expert_bytes as f64;
        self.ndp.as_ref().map_or(f64::INFINITY, |n| n.table.at(tokens).max(bytes * n.internal_us_per_byte))
    }

    /// The summand of `T_contention` in equation 6 that the paper leaves open: for how long a read of one expert by
    /// the host keeps a DIMM busy that holds it, of `dimms`.
    ///
    /// Of a striped expert every DIMM gives its share of bytes, at the rate at which the host reads one DIMM: DIMMs
    /// of one channel take turns on its bus, and each is busy in its own turns only. Of a localized one its DIMM
    /// gives all. That the unit that reads may be slower than the memory adds nothing: what counts are bytes.
    pub fn contention(&self, layout: Layout, dimms: usize) -> f64 {
        let whole = self.expert_bytes as f64 * self.dram.localized_us_per_byte;
        match layout {
            Layout::Striped => whole / dimms.max(1) as f64,
            Layout::Local(_) => whole,
        }
    }

    /// Whether every rate is one.
    ///
    /// # Errors
    /// [`MakespanError::Time`] names the first that is negative or not a number.
    pub fn check(&self) -> Result<(), MakespanError> {
        let ndp = self.ndp.as_ref();
        let rates = [
            ("a byte over PCIe", self.pcie_us_per_byte),
            ("a byte of striped memory", self.dram.striped_us_per_byte),
            ("a byte of one DIMM", self.dram.localized_us_per_byte),
            ("a byte inside of a DIMM", ndp.map_or(0.0, |n| n.internal_us_per_byte)),
            ("a byte over a DIMM-Link", ndp.map_or(0.0, |n| n.link_us_per_byte)),
        ];
        match rates.into_iter().find(|r| r.1.is_nan() || r.1 < 0.0) {
            Some((what, value)) => Err(MakespanError::Time { what, value }),
            None => Ok(()),
        }
    }
}
