//! Packed weights of a plan: their places in their files, and their layouts.

use crate::bundle::{Bundle, DiskNeurons, PARTS};
use crate::plan::ALIGN;
use crate::types::Format;
use bincode::{Decode, Encode};

/// Layout of a packed weight in its file.
///
/// A panel holds `nr` output channels, its columns, in an order that follows the format:
/// * `f32`, `f16`: `[K][nr]`.
/// * `bf16`: pairs, `[⌈K/2⌉][nr][2]`: two consecutive input channels in one 32-bit word.
/// * `q8`: per group of 32 input channels `[8][nr][4]` codes (i8), then `nr` bf16 scales.
/// * `q4`: per group `[4][nr][4]` bytes, then `nr` bf16 scales. Byte `(i, column, j)` holds the codes of the
///   group's channels `4i + j` (low nibble) and `16 + 4i + j` (high nibble), each plus 8.
/// * `q8h`, `q4h`: as `q8` and `q4`, with scales of f16.
/// * `q4n`, `mxfp4`: as `q4`, with the index of a code in the format's grid.
/// * `q4c`: as `q4` without the groups' scales; after the last group, `nr` f32 scales.
/// * `q4o`: as `q4c`, where the codes of outliers, whole input channels, are 0. After a panel's scales, for
///   each outlier `nr` codes (i8), then `nr` f32 scales of these. After the last panel of a matrix the input
///   channels of its outliers (u32; [`u32::MAX`] with codes 0 where a matrix has fewer), zeros up to a multiple
///   of [`ALIGN`].
///
/// A row of a row-major grouped weight holds its codes in order (half a byte each: per group 16 bytes, byte
/// `j` the codes of `j` and `16 + j`), then its scales. What pads a panel, a pair or a group is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Layout {
    /// Row-major `[matrices, rows, cols]`.
    Rows,
    /// Panels of `nr` output channels: `[matrices][⌈N/nr⌉]` panels, zero-padded.
    Panels {
        /// Output channels per panel.
        nr: u32,
    },
    /// As `Panels`, but every panel holds `nr/2` gate channels, then the `nr/2` up channels of the same
    /// outputs: `[matrices][⌈I/(nr/2)⌉]` panels.
    GluPanels {
        /// Columns per panel.
        nr: u32,
    },
    /// Bundles of neurons, `[matrices, rows, 3H]`, a row after the other: [`Bundle`].
    Neurons {
        /// Whether every bundle begins with a bound of its gate.
        gate_bound: bool,
    },
    /// Gates of neurons by themselves, `[matrices, rows, H]`: as in a [`Bundle`], a row after the other.
    Gates,
    /// Up and down of neurons alone, `[matrices, rows, 2H]`: as in a [`Bundle`], [`Bundle::up_down_pitch`]
    /// bytes from one neuron to the next. Split scales ([`Bundle::has_split_scales`]) follow all neurons of a
    /// matrix: of up and of down of each, [`Bundle::up_down_scales_bytes`] bytes.
    UpDown,
    /// Neurons whose gates are read from disk, too, `[matrices, rows, 3H]`: unit after unit of [`DiskNeurons`].
    Bundles,
}

impl Layout {
    /// Rows of a matrix that are stored, those included that pad the last panel; `None` where the layout does
    /// not fit.
    pub const fn stored_rows(self, rows: u64) -> Option<u64> {
        match self {
            Self::Rows | Self::Neurons { .. } | Self::Gates | Self::UpDown | Self::Bundles => Some(rows),
            Self::Panels { nr } if nr > 0 => rows.div_ceil(nr as u64).checked_mul(nr as u64),
            Self::GluPanels { nr } if nr > 0 && nr % 2 == 0 && rows.is_multiple_of(2) => {
                (rows / 2).div_ceil(nr as u64 / 2).checked_mul(nr as u64)
            }
            Self::Panels { .. } | Self::GluPanels { .. } => None,
        }
    }

    /// Whether rows are contiguous, and not in panels.
    pub const fn is_by_rows(self) -> bool {
        matches!(self, Self::Rows | Self::Neurons { .. } | Self::Gates | Self::UpDown | Self::Bundles)
    }

    /// Parts of a row, each of which is stored as a row of its own.
    pub const fn parts(self) -> usize {
        match self {
            Self::Neurons { .. } | Self::Bundles => PARTS,
            Self::UpDown => PARTS - 1,
            Self::Rows | Self::Panels { .. } | Self::GluPanels { .. } | Self::Gates => 1,
        }
    }

    /// Bytes of a matrix, padding of the last panel and the table of outliers included; `None` where that
    /// overflows or the layout fits neither the rows nor the format.
    pub fn matrix_bytes(self, format: Format, rows: u64, cols: usize) -> Option<u64> {
        if format.is_by_channel() && self.is_by_rows() {
            return None;
        }
        if let Some(neurons) = self.on_disk(format, cols) {
            return neurons.matrix_bytes(rows);
        }
        let panels = self.stored_rows(rows)?.checked_mul(self.row_bytes(format, cols) as u64)?;
        panels.checked_add(Self::outlier_table_bytes(format, cols))
    }

    /// Bytes of the table of a matrix's outliers, after its panels: 0 if the format has none for so many
    /// columns.
    pub const fn outlier_table_bytes(format: Format, cols: usize) -> u64 {
        (format.outliers(cols) as u64 * 4).next_multiple_of(ALIGN)
    }

    /// Neurons of rows of `cols` numbers, in layouts that are read from disk neuron by neuron.
    pub const fn on_disk(self, format: Format, cols: usize) -> Option<DiskNeurons> {
        let gates = matches!(self, Self::Bundles);
        let bundle = Bundle { format, hidden: cols / self.parts(), gate_bound: false };
        if gates || matches!(self, Self::UpDown) { Some(DiskNeurons { bundle, gates }) } else { None }
    }

    /// Bytes of one stored row, separate scales and a row's share of padding included.
    pub const fn row_bytes(self, format: Format, cols: usize) -> usize {
        match self {
            Self::Rows => format.row_bytes(cols),
            Self::Panels { .. } | Self::GluPanels { .. } => format.column_bytes(cols),
            Self::Neurons { gate_bound } => Bundle { format, hidden: cols / PARTS, gate_bound }.bytes(),
            Self::Gates => Bundle { format, hidden: cols, gate_bound: false }.part_bytes(),
            Self::UpDown => {
                Bundle { format, hidden: cols / (PARTS - 1), gate_bound: false }.up_down_stored_bytes()
            }
            Self::Bundles => {
                let bundle = Bundle { format, hidden: cols / PARTS, gate_bound: false };
                let neurons = DiskNeurons { bundle, gates: true };
                neurons.unit_pitch() / neurons.together()
            }
        }
    }
}

/// A packed weight.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Segment {
    /// Name of the weight in the Graph.
    pub name: String,
    /// Index into [`crate::plan::Plan::files`].
    pub file: u32,
    /// Offset in the file, a multiple of [`ALIGN`].
    pub offset: u64,
    /// Size, without the padding between its matrices.
    pub bytes: u64,
    /// Bytes from one matrix (expert, head) to the next.
    pub pitch: u64,
    /// Shape of the weight in the Graph.
    pub shape: Vec<u32>,
    /// Number format.
    pub format: Format,
    /// Order of the numbers.
    pub layout: Layout,
}

impl Segment {
    /// Shape as `(matrices, rows, cols)`, 1 where absent.
    pub fn extents(&self) -> (u32, u32, u32) {
        let axis = |i: usize| self.shape.iter().rev().nth(i).copied().unwrap_or(1);
        (axis(2), axis(1), axis(0))
    }

    /// Bytes that shape, format and layout need, padding of the last panel included; `None` where that
    /// overflows or the layout does not fit the shape.
    pub fn packed_bytes(&self) -> Option<u64> {
        u64::from(self.extents().0).checked_mul(self.matrix_bytes()?)
    }

    /// As [`Segment::packed_bytes`], of one matrix.
    pub fn matrix_bytes(&self) -> Option<u64> {
        let (_, rows, cols) = self.extents();
        let whole = (cols as usize).is_multiple_of(self.layout.parts());
        self.layout.matrix_bytes(self.format, u64::from(rows), cols as usize).filter(|_| whole)
    }

    /// Its neurons, where its layout is one that is read from disk neuron by neuron.
    pub fn on_disk(&self) -> Option<DiskNeurons> {
        self.layout.on_disk(self.format, self.extents().2 as usize)
    }

    /// Start of matrix `i` in the file; `None` if there is no such matrix.
    pub fn matrix_offset(&self, i: u32) -> Option<u64> {
        let at = u64::from(i).checked_mul(self.pitch)?.checked_add(self.offset)?;
        (i < self.extents().0).then_some(at)
    }

    /// The end of its last matrix in the file; `None` where that overflows.
    pub fn end(&self) -> Option<u64> {
        self.matrix_offset(self.extents().0.checked_sub(1)?)?.checked_add(self.matrix_bytes()?)
    }
}
