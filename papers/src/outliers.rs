//! Number of input channels whose weights should have 8 bits where the others have 4 (PowerInfer-2, §6 and
//! §7.6): relative error of the experts of a checkpoint by the share of such channels. `cargo xtask accuracy` writes
//! docs/qnn-networks.md with it.

use moec_base::{Error, Result};
use moec_cpu::{Q4o, Weighting, quantise_q4o};
use moec_import::{Checkpoint, ImportOptions};
use moec_ir::{Encoding, Leaf, Source as _};
use std::fmt::Write as _;
use std::path::Path;

/// One channel in so many has 8 bits; 0: none, 1: every one.
pub const SHARES: [usize; 6] = [0, 64, 32, 16, 8, 1];

/// Cost and gain of a share.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Row {
    /// One channel in so many has 8 bits.
    pub share: usize,
    /// Bits for a number, scales included.
    pub bits: f64,
    /// Root mean square of the error, relative to that of the numbers.
    pub error: f64,
}

/// One row for each share, over all matrices of the experts of a checkpoint, rounded to the nearest codes.
///
/// # Errors
/// A checkpoint that cannot be read, or without plain matrices of experts.
pub fn rows(path: &Path) -> Result<Vec<Row>> {
    let (checkpoint, _) = moec_import::open(path, &ImportOptions::default())?;
    let matrices = matrices(&checkpoint)?;
    if matrices.is_empty() {
        return Err(Error::input(format!("`{}` has no expert weights", path.display()))
            .hint("name an MoE checkpoint with one tensor for each matrix"));
    }
    SHARES.into_iter().map(|share| row(share, &matrices)).collect()
}

/// The rows as Markdown.
pub fn table(rows: &[Row]) -> String {
    let mut out = String::from("| channels of 8 bits | bits per weight | relative error |\n|---|---|---|\n");
    for row in rows {
        let share = match row.share {
            0 => "none".to_owned(),
            1 => "all".to_owned(),
            share => format!("1 in {share}"),
        };
        // Writing to a string does not fail.
        let _ = writeln!(out, "| {share} | {:.2} | {:.2} % |", row.bits, 100.0 * row.error);
    }
    out
}

type Matrix = ([usize; 2], Vec<f32>);

fn matrices(checkpoint: &Checkpoint) -> Result<Vec<Matrix>> {
    let mut found = Vec::new();
    let names: Vec<_> = checkpoint.tensors().map(|(name, t)| (name.to_owned(), t.shape.clone())).collect();
    for (tensor, shape) in names {
        let (true, &[rows, cols]) = (tensor.contains(".experts."), &*shape) else { continue };
        let mut numbers = vec![0.0; rows * cols];
        let leaf = Leaf { tensor, shape, encoding: Encoding::Plain };
        checkpoint
            .read(&leaf, 0, 0..rows, 0..cols, &mut numbers)
            .map_err(|e| Error::input(format!("`{}` cannot be read", leaf.tensor)).because(e))?;
        found.push(([rows, cols], numbers));
    }
    Ok(found)
}

fn row(share: usize, matrices: &[Matrix]) -> Result<Row> {
    let (mut missed, mut energy, mut bits, mut count) = (0.0, 0.0, 0.0, 0.0);
    for ([rows, cols], numbers) in matrices {
        let outliers = cols.checked_div(share).unwrap_or(0);
        let made = rounded([*rows, *cols], numbers, outliers)?;
        let squares = |x: f64| x * x;
        let pairs = numbers.iter().zip(made.dequantise());
        missed += pairs.map(|(a, b)| squares(f64::from(*a) - f64::from(b))).sum::<f64>();
        energy += numbers.iter().map(|a| squares(f64::from(*a))).sum::<f64>();
        bits += made.bits() * numbers.len() as f64;
        count += numbers.len() as f64;
    }
    Ok(Row { share, bits: bits / count, error: (missed / energy).sqrt() })
}

fn rounded([rows, cols]: [usize; 2], numbers: &[f32], outliers: usize) -> Result<Q4o> {
    quantise_q4o([rows, cols], outliers, Weighting::default(), |range, out| {
        let own = numbers.get(range.start * cols..range.end * cols);
        own.map(|own| out.copy_from_slice(own)).ok_or_else(|| Error::bug("a matrix of fewer rows"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ferris() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/models/ferris")
    }

    #[test]
    fn more_channels_of_eight_bits_lose_less_and_take_more() {
        let rows = rows(&ferris()).unwrap();
        assert_eq!(rows.iter().map(|r| r.share).collect::<Vec<_>>(), SHARES);
        assert!(rows.is_sorted_by(|a, b| a.bits < b.bits && a.error > b.error), "{rows:?}");
        let (first, last) = (rows[0], rows[SHARES.len() - 1]);
        assert!(first.error < 0.2 && last.error < 0.01 && last.bits > 8.0, "{rows:?}");
        assert!(table(&rows).lines().count() == SHARES.len() + 2);
    }

    #[test]
    fn a_checkpoint_without_experts_is_refused() {
        let dense = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/hf/prosparse");
        let error = rows(&dense).unwrap_err();
        assert!(error.to_string().contains("has no expert weights") && error.hint.is_some(), "{error}");
    }
}
