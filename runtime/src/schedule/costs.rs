//! Costs of an expert on each unit and on the links between them, in microseconds: the cost table of all
//! policies (TriMoE, §4.2, equations 1 to 4; HybriMoE, §IV-B).

use super::error::ScheduleError;
use super::scheduled::Layout;

/// Time of computing one expert by its tokens (`f_calc` of TriMoE): straight lines between measured points.
///
/// Before the first point it is the first point's time; after the last it continues the line through the last
/// two.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    points: Vec<(u32, f64)>,
}

impl Table {
    /// Creates a table of points (tokens, microseconds).
    ///
    /// # Errors
    /// [`ScheduleError::NoPoints`]; [`ScheduleError::Order`] if tokens do not ascend; [`ScheduleError::Time`]
    /// for a negative or NaN time. Infinite times are valid: such loads are never computed there.
    pub fn new(points: Vec<(u32, f64)>) -> Result<Self, ScheduleError> {
        if points.is_empty() {
            return Err(ScheduleError::NoPoints);
        }
        if let Some(w) = points.windows(2).find(|w| w[0].0 >= w[1].0) {
            return Err(ScheduleError::Order { tokens: w[0].0, next: w[1].0 });
        }
        match points.iter().find(|p| p.1.is_nan() || p.1 < 0.0) {
            Some(&(_, value)) => Err(ScheduleError::Time { what: "a time of a table of costs", value }),
            None => Ok(Self { points }),
        }
    }

    /// The table with every time multiplied by the factor for its tokens.
    pub(super) fn scaled(&self, factor: impl Fn(u32) -> f64) -> Self {
        Self { points: self.points.iter().map(|&(tokens, us)| (tokens, us * factor(tokens))).collect() }
    }

    /// Its points: tokens, microseconds.
    pub fn points(&self) -> &[(u32, f64)] {
        &self.points
    }

    /// Microseconds for this many tokens, which need not be whole; never negative.
    pub fn at(&self, tokens: f64) -> f64 {
        let p = &self.points;
        let after = p.partition_point(|&(n, _)| f64::from(n) <= tokens);
        let Some(before) = after.checked_sub(1) else { return p[0].1 };
        let (n, us) = p[before];
        let step = tokens - f64::from(n);
        // At a point, its own time: next to an infinite point the slope is meaningless.
        if step == 0.0 || p.len() == 1 {
            return us;
        }
        let from = before.min(p.len() - 2);
        let slope = (p[from + 1].1 - p[from].1) / f64::from(p[from + 1].0 - p[from].0);
        let line = us + step * slope;
        if line.is_nan() { f64::INFINITY } else { line.max(0.0) }
    }
}

/// A unit's times.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitCosts {
    /// Time of an expert by its tokens, once the unit is warm.
    pub table: Table,
    /// Extra time of the first expert of a layer, if experts are computed one after the other (HybriMoE,
    /// Figure 3e: the caches are cold). Sums of times omit it.
    pub first_us: f64,
}

impl From<Table> for UnitCosts {
    /// Costs of a unit whose first expert takes no extra time.
    fn from(table: Table) -> Self {
        Self { table, first_us: 0.0 }
    }
}

/// Costs of NDP units: units in the host's memories, all alike.
#[derive(Clone, Debug, PartialEq)]
pub struct NearCosts {
    /// `f_calc_ndp`.
    pub table: Table,
    /// Time of an NDP unit to read an expert of its own memory.
    pub internal_us: f64,
    /// Time of an expert over the link between two memories.
    pub link_us: f64,
}

/// Costs of a layer's experts, in microseconds; all layers have the same.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// `f_calc_gpu`: time of an expert that the GPU holds; `None`: there is no GPU.
    pub gpu: Option<UnitCosts>,
    /// `f_calc_cpu`: time of any expert.
    pub cpu: UnitCosts,
    /// NDP units; `None`: there are none.
    pub near: Option<NearCosts>,
    /// `T_PCIe` of equation 2: time of an expert's weights over the link to the GPU, independent of its
    /// tokens.
    pub bring_us: f64,
    /// Extra time of the first transfer of a layer, as [`UnitCosts::first_us`].
    pub first_bring_us: f64,
    /// Time of a launch on the GPU. Experts that it holds share one, which [`UnitCosts::first_us`] includes;
    /// an expert that arrives later has its own.
    pub launch_us: f64,
    /// Time of the host to read an expert that is interleaved over all of its memories.
    pub striped_us: f64,
    /// Time of the host to read an expert that is in one memory, over that memory's channel.
    pub localized_us: f64,
    /// Time of one token's row to an expert and back, if activations are moved instead of weights.
    pub row_us: f64,
}

impl Costs {
    /// Costs of a GPU with frames and a CPU, on a link that takes `bring_us` for an expert: there are no
    /// NDP units, and the CPU's table includes the host's reads.
    pub fn of_two(gpu: UnitCosts, cpu: UnitCosts, bring_us: f64) -> Self {
        Self {
            gpu: Some(gpu),
            cpu,
            near: None,
            bring_us,
            first_bring_us: 0.0,
            launch_us: 0.0,
            striped_us: 0.0,
            localized_us: 0.0,
            row_us: 0.0,
        }
    }

    /// `T_DRAM(W, M)`: time of the host to read an expert, in equations 2 and 3.
    pub fn t_dram(&self, layout: Layout) -> f64 {
        match layout {
            Layout::Striped => self.striped_us,
            Layout::Local(_) => self.localized_us,
        }
    }

    /// Equation 1: time of the GPU for an expert that it holds. Infinite without a GPU.
    pub fn t_gpu_hit(&self, tokens: f64) -> f64 {
        self.gpu.as_ref().map_or(f64::INFINITY, |u| u.table.at(tokens))
    }

    /// Equation 2: time of the GPU for an expert that it reads while computing.
    pub fn t_gpu_miss(&self, tokens: f64, layout: Layout) -> f64 {
        self.t_gpu_hit(tokens).max(self.bring_us).max(self.t_dram(layout))
    }

    /// Equation 3: time of the CPU for an expert.
    pub fn t_cpu(&self, tokens: f64, layout: Layout) -> f64 {
        self.cpu.table.at(tokens).max(self.t_dram(layout))
    }

    /// Equation 4: time of an NDP unit for an expert of its memory. Infinite without such units.
    pub fn t_near(&self, tokens: f64) -> f64 {
        self.near.as_ref().map_or(f64::INFINITY, |n| n.table.at(tokens).max(n.internal_us))
    }

    /// The summand of `T_contention` in equation 6 that the paper leaves open: the time for which the host's
    /// read of one expert keeps a memory that holds it busy, of `memories`.
    ///
    /// A read of a striped expert takes its share of bytes from every memory, at the host's rate for one
    /// memory. Memories of one channel take turns on its bus, and each is busy in its own turns only. A read
    /// of a localized expert takes all bytes from one memory. A reading unit that is slower than the memory
    /// adds nothing, since only bytes count.
    pub fn contention(&self, layout: Layout, memories: usize) -> f64 {
        match layout {
            Layout::Striped => self.localized_us / memories.max(1) as f64,
            Layout::Local(_) => self.localized_us,
        }
    }

    /// Fails if a time is negative or NaN, or, with `finite`, infinite. Times of tables are included.
    ///
    /// # Errors
    /// [`ScheduleError::Time`] names the first invalid time.
    pub fn check(&self, finite: bool) -> Result<(), ScheduleError> {
        let near = self.near.as_ref();
        let (gpu, cpu) = (self.gpu.as_ref(), &self.cpu);
        let times = [
            ("the first expert of the GPU", gpu.map_or(0.0, |u| u.first_us)),
            ("the first expert of the CPU", cpu.first_us),
            ("an expert on its way to the GPU", self.bring_us),
            ("the first expert on its way to the GPU", self.first_bring_us),
            ("a launch on the GPU", self.launch_us),
            ("a read of a striped expert", self.striped_us),
            ("a read of a localized expert", self.localized_us),
            ("a read inside of a memory", near.map_or(0.0, |n| n.internal_us)),
            ("an expert between two memories", near.map_or(0.0, |n| n.link_us)),
            ("a row", self.row_us),
        ];
        let tables = [gpu.map(|u| &u.table), Some(&cpu.table), near.map(|n| &n.table)];
        let points = tables.into_iter().flatten().flat_map(Table::points);
        let points = points.map(|p| ("a time of a table of costs", p.1));
        let wrong = |t: &(&str, f64)| t.1.is_nan() || t.1 < 0.0 || finite && t.1.is_infinite();
        match times.into_iter().chain(points).find(wrong) {
            Some((what, value)) => Err(ScheduleError::Time { what, value }),
            None => Ok(()),
        }
    }
}
