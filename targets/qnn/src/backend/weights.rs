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
    /// Four bits, and eight for the input channels that four serve worst (PowerInfer-2, §6 and §7.6).
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

    /// Columns of a matrix that have 8 bits.
    pub(super) const fn outliers(self, cols: usize) -> usize {
        match self {
            Self::Eight => cols,
            Self::Four => 0,
            Self::Mixed => Format::Q4o.outliers(cols),
        }
    }

    /// Bytes of this many numbers, without scales.
    pub(super) const fn bytes(self, numbers: u64) -> u64 {
        match self {
            Self::Eight => numbers,
            Self::Four => numbers.div_ceil(2),
            Self::Mixed => numbers.div_ceil(2) + numbers.div_ceil(OUTLIERS as u64),
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

    /// Its numbers as codes: for whole matrices the CPU's codes. For a part, the columns with 8 bits are chosen
    /// by its own rows.
    ///
    /// # Errors
    /// A file that cannot be read; a number that no code holds.
    pub(super) fn rounded(&self, numbers: &dyn Numbers) -> Result<Channels> {
        let weight = self.weight;
        let outliers = WeightStorage::of(weight.format).outliers(weight.cols());
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
    let codes = |of: &[i8], width: usize| -> Vec<i8> {
        let row = |&row: &usize| of.get(row * width..(row + 1) * width).unwrap_or_default().iter().copied();
        rows.iter().flat_map(row).collect()
    };
    let scales = |of: &[f32]| rows.iter().filter_map(|&row| of.get(row).copied()).collect();
    Channels {
        outliers: matrix.outliers.clone(),
        four: codes(&matrix.four, cols),
        scales: scales(&matrix.scales),
        eight: codes(&matrix.eight, matrix.outliers.len()),
        eight_scales: scales(&matrix.eight_scales),
    }
}

/// Some columns of a rounded matrix of `cols` columns, in this order.
pub(super) fn columns_of(matrix: &Channels, cols: usize, columns: &[usize]) -> Channels {
    let codes = |of: &[i8], width: usize, columns: &[usize]| -> Vec<i8> {
        let rows = of.chunks_exact(width.max(1));
        rows.flat_map(|row| columns.iter().filter_map(|&c| row.get(c).copied())).collect()
    };
    let place = |column: usize| matrix.outliers.iter().position(|&o| o as usize == column);
    // Places of the outliers among the chosen columns, and in the matrix.
    let own = columns.iter().zip(0..).filter_map(|(&column, at)| Some((at, place(column)?)));
    let (outliers, places): (Vec<u32>, Vec<usize>) = own.unzip();
    Channels {
        four: codes(&matrix.four, cols, columns),
        eight: codes(&matrix.eight, matrix.outliers.len(), &places),
        outliers,
        ..matrix.clone()
    }
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

    /// Appends rows of a rounded matrix of `cols` columns.
    ///
    /// # Errors
    /// A disk that is full.
    pub(super) fn projection(
        &mut self,
        name: &str,
        (channels, rows): (&Channels, Range<usize>),
        cols: usize,
        bias: Option<Vec<f32>>,
    ) -> Result<Projection> {
        let [four, eight] = widths(channels, rows, cols);
        let whole = four.is_none() || eight.is_none();
        let mut put = |(matrix, width): (Option<Matrix>, &str)| {
            let name = if whole { name.to_owned() } else { format!("{name}.{width}") };
            matrix.map(|matrix| self.put(name, &matrix))
        };
        let mut made = [(four, "int4"), (eight, "int8")].into_iter().filter_map(&mut put);
        let matrix = made.next().transpose()?.ok_or_else(|| Error::bug(format!("`{name}` has no codes")))?;
        let wide = made.next().transpose()?;
        Ok(Projection { matrix, outliers: wide.map(|wide| (wide, channels.outliers.clone())), bias })
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
            outliers: vec![1],
            four: vec![1, 0, 2, 0, 3, 0, 4, 0],
            scales: vec![0.5, 1.0, 2.0, 4.0],
            eight: vec![100, -100, 50, -50],
            eight_scales: vec![0.1, 0.2, 0.3, 0.4],
        };
        let rows = rows_of(&matrix, 2, &[3, 1, 0]);
        let expected = Channels {
            outliers: vec![1],
            four: vec![4, 0, 2, 0, 1, 0],
            scales: vec![4.0, 1.0, 0.5],
            eight: vec![-50, -100, 100],
            eight_scales: vec![0.4, 0.2, 0.1],
        };
        assert_eq!(rows, expected);
        let swapped = columns_of(&matrix, 2, &[1, 0]);
        let four = vec![0, 1, 0, 2, 0, 3, 0, 4];
        assert_eq!(swapped, Channels { outliers: vec![0], four, ..matrix.clone() });
        let without = columns_of(&matrix, 2, &[0]);
        let (outliers, four, eight) = (vec![], vec![1, 2, 3, 4], vec![]);
        assert_eq!(without, Channels { outliers, four, eight, ..matrix });
    }
}
