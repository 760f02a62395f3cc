//! Importance of errors in a table of rows, from the matrices that read the rows.
//!
//! A row `x` of an embedding table is normalised, scaled by the norm's weight `γ`, and multiplied by the
//! matrices `W` of the first layer. An error `e` of the row becomes `e H eᵀ` there, with
//! `H = Σ diag(γ) Wᵀ W diag(γ)`, up to a factor of the row. The residual stream is small in the first layer
//! and grows with the layers. So the first layer determines nearly all of the error. No text is needed for
//! this.

use super::correlations::{WIDEST, blocks};
use moec_base::error::{Error, Result};
use moec_cpu::Feedback;
use moec_ir::{Module, Node, Op, Operand, Source, ValueId, Weight};
use std::sync::Arc;

/// Share of the diagonal's mean that is added to it: the effect of every channel on later layers.
const DAMPING: f64 = 0.05;
/// Rows that are read at once.
const STRIP: usize = 64;

/// The embedding table of a graph.
pub(super) fn table(module: &Module) -> Option<&Weight> {
    let nodes = &module.entries.first()?.nodes;
    nodes.iter().find(|n| matches!(n.op, Op::Embed)).and_then(|n| weight(module, n, 1))
}

/// Error feedback between the table's channels; `None` if no matrix reads its normalised rows.
///
/// # Errors
/// Fails if `source` fails.
pub(super) fn feedback(lowered: &Module, source: &dyn Source) -> Result<Option<Arc<Feedback>>> {
    let Some(cols) = table(lowered).map(Weight::cols) else { return Ok(None) };
    let nodes = lowered.entries.first().map_or(&[][..], |g| &g.nodes);
    let reads = |node: &Node, x: ValueId| node.inputs.first() == Some(&Operand::Value(x));
    let from = |found: &dyn Fn(&Node) -> bool| -> Vec<&Node> { nodes.iter().filter(|n| found(n)).collect() };
    let mut sums: Vec<Vec<f64>> = blocks(cols, WIDEST).map(|b| vec![0.0; triangle(b.len())]).collect();
    let mut any = false;
    for rows in from(&|n| matches!(n.op, Op::Embed)).iter().flat_map(|n| &n.outputs) {
        let normed = |n: &Node| {
            matches!(n.op, Op::RmsNorm { weight: true, .. } | Op::LayerNorm { .. }) && reads(n, *rows)
        };
        for norm in from(&normed) {
            let Some(by) = weight(lowered, norm, 1).filter(|w| w.cols() == cols) else { continue };
            let mut scale = vec![0.0; cols];
            read(by, 0..1, source, &mut scale)?;
            let linear =
                |n: &Node| matches!(n.op, Op::Linear { .. }) && norm.outputs.iter().any(|x| reads(n, *x));
            for matrix in from(&linear).iter().filter_map(|n| weight(lowered, n, 1)) {
                if matrix.cols() == cols {
                    add(matrix, &scale, source, &mut sums)?;
                    any = true;
                }
            }
        }
    }
    let mean = trace(&sums, cols) / cols as f64;
    if !any || !mean.is_normal() {
        return Ok(None);
    }
    let damped = blocks(cols, WIDEST).zip(sums).map(|(range, mut moments)| {
        for x in &mut moments {
            *x /= mean;
        }
        (0..range.len()).for_each(|i| moments[triangle(i) + i] += DAMPING);
        (range, moments)
    });
    Ok(Feedback::new(damped).map(Arc::new))
}

/// Numbers of the lower triangle of `n` rows.
const fn triangle(n: usize) -> usize {
    n * (n + 1) / 2
}

fn trace(sums: &[Vec<f64>], cols: usize) -> f64 {
    let of = |(moments, n): (&Vec<f64>, usize)| (0..n).map(|i| moments[triangle(i) + i]).sum::<f64>();
    sums.iter().zip(blocks(cols, WIDEST).map(|b| b.len())).map(of).sum()
}

/// Adds `diag(scale) Wᵀ W diag(scale)`, in lower triangles of blocks.
fn add(matrix: &Weight, scale: &[f32], source: &dyn Source, sums: &mut [Vec<f64>]) -> Result<()> {
    let cols = scale.len();
    let mut rows = vec![0.0; STRIP * cols];
    let mut part = vec![0.0_f32; WIDEST];
    for first in (0..matrix.rows()).step_by(STRIP) {
        moec_base::interrupt::check()?;
        let strip = first..(first + STRIP).min(matrix.rows());
        rows.resize(strip.len() * cols, 0.0);
        read(matrix, strip, source, &mut rows)?;
        rows.chunks_exact_mut(cols).for_each(|row| row.iter_mut().zip(scale).for_each(|(x, by)| *x *= by));
        for (block, sums) in blocks(cols, WIDEST).zip(&mut *sums) {
            for i in 0..block.len() {
                let part = &mut part[..=i];
                part.fill(0.0);
                for row in rows.chunks_exact(cols) {
                    let row = &row[block.clone()];
                    part.iter_mut().zip(row).for_each(|(sum, x)| *sum += row[i] * x);
                }
                let own = &mut sums[triangle(i)..=triangle(i) + i];
                own.iter_mut().zip(&*part).for_each(|(sum, x)| *sum += f64::from(*x));
            }
        }
    }
    Ok(())
}

fn read(weight: &Weight, rows: std::ops::Range<usize>, source: &dyn Source, out: &mut [f32]) -> Result<()> {
    let read = weight.expr.read(0, rows, 0..weight.cols(), source, out);
    read.map_err(|e| Error::input(format!("`{}` cannot be read", weight.name)).because(e))
}

fn weight<'m>(module: &'m Module, node: &Node, input: usize) -> Option<&'m Weight> {
    match node.inputs.get(input) {
        Some(&Operand::Weight(id)) => Some(module.weight(id)),
        _ => None,
    }
}
