//! Weights of an artifact: codes with a scale for each output channel, in one file that its networks share.
#![expect(clippy::cast_possible_truncation, reason = "sizes of one layer, which the import bounds")]

use super::WEIGHTS;
use crate::emit::Projection;
use crate::net::{Data, Tensor};
use crate::quant::{Matrix, widths};
use moec_backend::error::{Error, Result, io_error};
use moec_backend::{Channels, Numbers};
use moec_ir::types::OUTLIERS;
use moec_ir::{Format, Weight};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// First bytes of tensors are multiples of this.
const ALIGN: u64 = 64;

/// Storage of a format's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WeightStorage {
    /// Eight bits.
    Eight,
    /// Four bits.
    Four,
    /// Four bits, and eight for the rows that four serve worst (PowerInfer-2, §6 and §7.6).
    Mixed,
}

impl WeightStorage {
    /// Bits for a format: a graph has 4 bits where the CPU has, except for published codes; all else is 8
    /// bits.
    pub(super) const fn of(format: Format) -> Self {
        let spec = format.spec();
        if spec.bits != 4 || spec.published {
            Self::Eight
        } else if format.is_by_channel() && spec.outliers.is_none() {
            Self::Four
        } else {
            Self::Mixed
        }
    }

    /// Rows of a matrix that have 8 bits.
    pub(super) const fn outliers(self, rows: usize) -> usize {
        match self {
            Self::Eight => rows,
            Self::Four => 0,
            Self::Mixed => Format::Q4o.outliers(rows),
        }
    }

    /// Bytes of this many numbers, without scales.
    pub(super) const fn bytes(self, numbers: u64) -> u64 {
        match self {
            Self::Eight => numbers,
            Self::Four => numbers.div_ceil(2),
            Self::Mixed => numbers / 2 + numbers.div_ceil(2 * OUTLIERS as u64),
        }
    }

    /// Largest relative error, as root mean square, that a product of three such matrices may have. Each
    /// scale covers a whole row: a step is a little larger than in groups of 32.
    pub(super) fn bound(self) -> f64 {
        match self {
            Self::Eight => 0.04,
            Self::Four | Self::Mixed => Format::Q4.distance(),
        }
    }
}

/// A rectangle of one matrix of a weight.
pub(super) struct MatrixSlice<'a> {
    pub(super) weight: &'a Weight,
    pub(super) matrix: usize,
    pub(super) rows: Range<usize>,
}

impl MatrixSlice<'_> {
    /// Its numbers, row by row. A bias is one row.
    pub(super) fn read(&self, numbers: &dyn Numbers) -> Result<Vec<f32>> {
        let cols = self.weight.cols();
        let mut out = vec![0.0; self.rows.len() * cols];
        numbers.read(self.weight, self.matrix, self.rows.clone(), 0..cols, &mut out)?;
        Ok(out)
    }

    /// Its numbers as codes: for whole matrices the CPU's codes. For a part, the rows with 8 bits are chosen
    /// among its own.
    ///
    /// # Errors
    /// A file that cannot be read; a number that no code holds.
    pub(super) fn rounded(&self, numbers: &dyn Numbers) -> Result<Channels> {
        let weight = self.weight;
        let outliers = WeightStorage::of(weight.format).outliers(self.rows.len());
        let made =
            numbers.rounding(weight, self.matrix).channels(&self.read(numbers)?, weight.cols(), outliers);
        made.map_err(|x| Error::input(format!("`{}` holds {x}, which no code represents", weight.name)))
    }
}

/// A whole matrix of a weight, rounded as the CPU rounds it.
///
/// # Errors
/// A file that cannot be read; a number that no code holds.
pub(super) fn rounded(numbers: &dyn Numbers, weight: &Weight, matrix: usize) -> Result<Channels> {
    MatrixSlice { weight, matrix, rows: 0..weight.rows() }.rounded(numbers)
}

/// Some rows of a rounded matrix of `cols` columns, in this order.
pub(super) fn rows_of(matrix: &Channels, cols: usize, rows: &[usize]) -> Channels {
    let mut out = Channels::default();
    for (at, &row) in rows.iter().enumerate() {
        // Rows of each width are contiguous.
        let before = matrix.outliers.partition_point(|&o| (o as usize) < row);
        let wide = matrix.outliers.get(before).is_some_and(|&o| o as usize == row);
        let (from, to, place) = if wide {
            out.outliers.push(at as u32);
            (&matrix.eight, &mut out.eight, before)
        } else {
            (&matrix.four, &mut out.four, row - before)
        };
        to.extend_from_slice(from.get(place * cols..(place + 1) * cols).unwrap_or_default());
        out.scales.extend(matrix.scales.get(row));
    }
    out
}

/// Some columns of a rounded matrix of `cols` columns, in this order.
pub(super) fn columns_of(matrix: &Channels, cols: usize, columns: &[usize]) -> Channels {
    let of = |codes: &[i8]| -> Vec<i8> {
        let rows = codes.chunks_exact(cols.max(1));
        rows.flat_map(|row| columns.iter().filter_map(|&c| row.get(c).copied())).collect()
    };
    Channels { four: of(&matrix.four), eight: of(&matrix.eight), ..matrix.clone() }
}

/// The file of codes while it is written.
pub(super) struct WeightFile {
    path: PathBuf,
    out: BufWriter<File>,
    offset: u64,
}

impl WeightFile {
    /// A new file in the folder of an artifact.
    pub(super) fn create(folder: &Path) -> Result<Self> {
        let path = folder.join(WEIGHTS);
        let file = File::create(&path).map_err(|e| io_error("write", &path, &e))?;
        Ok(Self { path, out: BufWriter::new(file), offset: 0 })
    }

    /// Appends rows of a rounded matrix of `cols` columns, in the order of the previous projection's results.
    ///
    /// # Errors
    /// A disk that is full.
    pub(super) fn projection(
        &mut self,
        name: &str,
        (channels, rows): (&Channels, Range<usize>),
        (cols, previous): (usize, Option<&Projection>),
        bias: Option<Vec<f32>>,
    ) -> Result<Projection> {
        let (both, order) = widths(channels, rows, cols);
        let whole = both.iter().any(|m| m.shape[0] == 0);
        let mut matrices = Vec::new();
        for (matrix, width) in both.into_iter().zip(["int4", "int8"]).filter(|(m, _)| m.shape[0] > 0) {
            let name = if whole { name.to_owned() } else { format!("{name}.{width}") };
            let matrix = match previous {
                Some(previous) if previous.order.is_some() => matrix.columns(|at| previous.channel(at)),
                _ => matrix,
            };
            matrices.push(self.put(name, &matrix)?);
        }
        Ok(Projection { matrices, order: (!whole).then_some(order), bias })
    }

    fn put(&mut self, name: String, codes: &Matrix) -> Result<Tensor> {
        let failed = |e| io_error("write", &self.path, &e);
        let bytes = codes.bytes();
        self.out.write_all(&bytes).map_err(failed)?;
        let next = (self.offset + bytes.len() as u64).next_multiple_of(ALIGN);
        let gap = next - self.offset - bytes.len() as u64;
        self.out.write_all(&[0; ALIGN as usize][..gap as usize]).map_err(failed)?;
        let data = Some(Data::File { file: WEIGHTS.into(), offset: self.offset });
        self.offset = next;
        Ok(Tensor { data, ..codes.tensor(name) })
    }

    /// Ends the file; gives its bytes.
    pub(super) fn finish(mut self) -> Result<u64> {
        self.out.flush().map_err(|e| io_error("write", &self.path, &e))?;
        Ok(self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selecting_rows_and_columns_keeps_the_codes() {
        let matrix = Channels {
            scales: vec![0.5, 1.0, 2.0, 4.0],
            outliers: vec![1, 2],
            four: vec![1, 2, 3, 4],
            eight: vec![100, -100, 50, -50],
        };
        let rows = rows_of(&matrix, 2, &[3, 1, 0]);
        let expected = Channels {
            scales: vec![4.0, 1.0, 0.5],
            outliers: vec![1],
            four: vec![3, 4, 1, 2],
            eight: vec![100, -100],
        };
        assert_eq!(rows, expected);
        let columns = columns_of(&matrix, 2, &[1]);
        assert_eq!(columns, Channels { four: vec![2, 4], eight: vec![-100, -50], ..matrix });
    }
}
