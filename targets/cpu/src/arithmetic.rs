//! Compute types of matrix kernels: the meaning of `activations` of `model.toml` on a machine.

use crate::select::{Result, Role, Selection};
use crate::{CpuTarget, Unsupported};
use moec_codegen::{ByteDot, ComputeType, gpu};
use moec_ir::{FEW_ROWS, Format};

/// Option of the user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activations {
    /// The best compute type of the machine: bf16 if it multiplies pairs of bf16, int8 for codes if it
    /// multiplies bytes, otherwise f32. Tile registers multiply bf16 so fast that they are used for many rows
    /// in every format.
    #[default]
    Auto,
    /// Exact: f32 everywhere.
    F32,
    /// bf16 for weights of bf16 and codes.
    Bf16,
    /// Bytes for weights of codes, bf16 for bf16 weights.
    I8,
}

/// Conversion of rows to the compute type of a matrix kernel.
#[derive(Clone, Copy)]
pub(crate) struct RowConversion {
    /// Columns of a group.
    pub(crate) cols: usize,
    /// Groups of a row.
    pub(crate) groups: usize,
    /// Rows per valid row.
    pub(crate) per_row: usize,
    /// Words from row to row.
    pub(crate) ld: usize,
    /// Compute type.
    pub(crate) to: ComputeType,
}

impl Activations {
    /// Every one, in the order that messages list them.
    pub const ALL: [Self; 4] = [Self::Auto, Self::F32, Self::Bf16, Self::I8];

    /// Name in `model.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::I8 => "i8",
        }
    }

    /// The one of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|a| a.name() == name)
    }
}

impl CpuTarget {
    /// Compute type of `rows` rows with a weight of a format whose rows have `depth` numbers. On a GPU few
    /// rows ([`gpu::FEW_ROWS`]) wait for the weights, and so are not rounded. Many rows are multiplied on
    /// tensor cores in bf16. Exceptions are exact activations, weights of f32 or with a scale for each row,
    /// and rows that tensor cores do not take.
    pub(crate) fn compute_type(&self, format: Format, rows: usize, depth: usize) -> Result<ComputeType> {
        if !self.isa.is_thread() {
            return self.compute(format, rows);
        }
        let many = rows > gpu::FEW_ROWS && gpu::on_tensor_cores(format, depth);
        let rounds = self.activations != Activations::F32 && format != Format::F32 && !format.is_by_channel();
        Ok(if many && rounds { ComputeType::Bf16 } else { ComputeType::F32 })
    }

    /// Rows that a matrix of experts multiplies at once, of `rows` tokens with a choice of `slots`. A CPU
    /// kernel is chosen for the maximum, since all of them may choose one expert. A GPU kernel is chosen for
    /// the average, since each expert's rows are a block's.
    pub(crate) fn rows_of_expert(&self, rows: usize, slots: usize, experts: usize) -> usize {
        if self.isa.is_thread() { slots.div_ceil(experts.max(1)) } else { rows }
    }

    /// Rows in the compute type of a matrix, as [`Selection::rows`]. GPU kernels read rows of f32 wherever
    /// they are.
    pub(crate) fn rows_for(
        &self,
        s: &mut Selection,
        x: Role,
        rows: usize,
        conversion: RowConversion,
    ) -> (Role, usize) {
        if self.isa.is_thread() && conversion.to == ComputeType::F32 {
            (x, conversion.ld)
        } else {
            s.rows(x, rows, conversion)
        }
    }

    /// Compute type of `rows` rows with weights of a format.
    pub(crate) fn compute(&self, format: Format, rows: usize) -> Result<ComputeType> {
        use Activations::{Auto, Bf16, I8};
        let quantised = format.is_quantised();
        let (pairs, bytes) = (self.isa.bf16, self.isa.bytes != ByteDot::None);
        let lacks = |what: &str, requested: &str| {
            Err(Unsupported(format!(
                "`{}` has no dot products of {what}, which `activations = \"{requested}\"` requests; \
                 `auto` takes what the target has",
                self.name
            )))
        };
        match (self.activations, quantised) {
            (Auto, true) if self.isa.tiles && rows > FEW_ROWS => Ok(ComputeType::Bf16),
            (Auto | I8, true) if bytes => Ok(ComputeType::I8),
            (I8, true) => lacks("bytes", "i8"),
            (Bf16, _) if !pairs => lacks("bf16", "bf16"),
            (Bf16, true) => Ok(ComputeType::Bf16),
            (Auto | Bf16 | I8, false) if format == Format::Bf16 && pairs && rows > FEW_ROWS => {
                Ok(ComputeType::Bf16)
            }
            _ => Ok(ComputeType::F32),
        }
    }

    /// Reason for a compute type of `rows` rows with weights of a format, for readers.
    pub fn why(&self, format: Format, compute: ComputeType, rows: usize) -> String {
        use Activations::{Auto, F32};
        let requested = format!("`activations = \"{}\"` requests it", self.activations.name());
        match (compute, format) {
            (ComputeType::F32, _) if self.activations == F32 => requested,
            (ComputeType::F32, Format::F32 | Format::F16) => {
                format!("weights of {format} are multiplied by rows of f32")
            }
            (ComputeType::F32, Format::Bf16) if self.isa.bf16 && rows <= FEW_ROWS => {
                "with so few rows, reading weights takes longer: f32 costs no time and rounds nothing"
                    .to_owned()
            }
            (ComputeType::F32, Format::Bf16) => "the target has no dot products of bf16".to_owned(),
            (ComputeType::F32, _) => "the target has no dot products of bytes".to_owned(),
            (ComputeType::Bf16 | ComputeType::I8, _) if self.activations != Auto => requested,
            (ComputeType::Bf16, _) => "the target multiplies pairs of bf16 faster than f32".to_owned(),
            (ComputeType::I8, _) => "the target multiplies four bytes at a time".to_owned(),
        }
    }
}
