//! Inputs of an attention's chunk graph beside its rows: the positions that each row sees, and the position
//! at which it is stored.
//!
//! A chunk graph has a fixed number of rows `T` and a state over `C` positions of one sequence. The Neural
//! Engine has no comparisons and no indexing (NPUMoE, Figure 4), so both inputs are computed here from the
//! rows' positions. Rows past the given ones are padding: they see nothing and are stored nowhere; their
//! results must not be read.
//!
//! The functions write all of `out` and allocate nothing.

use half::f16;

/// Value that a mask adds to a score that does not count. It is finite: with −∞ a row without other scores
/// would become NaN.
pub const MASKED: f32 = -1e4;

/// Mismatch of positions and lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// The output is not a whole number of rows, or has fewer rows than are given.
    #[error("{len} numbers do not hold {rows} rows of {width}")]
    Length {
        /// Numbers in the output.
        len: usize,
        /// Rows that are given.
        rows: usize,
        /// Numbers in a row.
        width: usize,
    },
    /// A position past the state's.
    #[error("position {position} in a state of {context}")]
    Position {
        /// The position.
        position: u32,
        /// Positions of the state.
        context: usize,
    },
}

/// Checks that `len` numbers are whole rows of `width`, at least one per position, and that positions are
/// below `context`. Returns the number of rows.
fn rows(len: usize, width: usize, positions: &[u32], context: usize) -> Result<usize, Misfit> {
    let total = len.checked_div(width).unwrap_or(0);
    if total * width != len || total < positions.len() {
        return Err(Misfit::Length { len, rows: positions.len(), width });
    }
    match positions.iter().find(|&&p| p as usize >= context) {
        Some(&position) => Err(Misfit::Position { position, context }),
        None => Ok(total),
    }
}

/// Fills `mask[T, C]`: 0 if a row sees a position, else [`MASKED`]. A row sees the positions up to its own,
/// the last `window` of them if set.
///
/// # Errors
/// [`Misfit`]; `out` is untouched then.
pub fn mask(out: &mut [f16], context: usize, positions: &[u32], window: Option<usize>) -> Result<(), Misfit> {
    rows(out.len(), context, positions, context)?;
    out.fill(f16::from_f32(MASKED));
    for (row, &position) in out.chunks_exact_mut(context.max(1)).zip(positions) {
        let end = position as usize + 1;
        let first = window.map_or(0, |w| end.saturating_sub(w));
        if let Some(seen) = row.get_mut(first..end) {
            seen.fill(f16::ZERO);
        }
    }
    Ok(())
}

/// Fills `write[C, T]`: 1 if a row's keys and values are stored at a position, else 0.
///
/// # Errors
/// [`Misfit`]; `out` is untouched then. Positions must be distinct: the state would hold the sum of two rows
/// of one position.
pub fn write(out: &mut [f16], context: usize, positions: &[u32]) -> Result<(), Misfit> {
    let total = rows(out.len(), context, positions, context)?;
    out.fill(f16::ZERO);
    for (t, &position) in positions.iter().enumerate() {
        if let Some(cell) = out.get_mut(position as usize * total + t) {
            *cell = f16::ONE;
        }
    }
    Ok(())
}

/// Fills `out[T, width]` with rows in f16, and zeros after them. A number past f16 becomes an infinity, which
/// graphs refuse.
///
/// # Errors
/// [`Misfit`]; `out` is untouched then.
pub fn pad(out: &mut [f16], width: usize, from: &[f32]) -> Result<(), Misfit> {
    let given = from.len().checked_div(width).unwrap_or(0);
    let whole = out.len().checked_rem(width) == Some(0) && given * width == from.len();
    if !whole || from.len() > out.len() {
        return Err(Misfit::Length { len: out.len(), rows: from.len().div_ceil(width.max(1)), width });
    }
    let (head, tail) = out.split_at_mut(from.len());
    head.iter_mut().zip(from).for_each(|(to, x)| *to = f16::from_f32(*x));
    tail.fill(f16::ZERO);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(x: &[f16]) -> Vec<f32> {
        x.iter().map(|x| x.to_f32()).collect()
    }

    #[test]
    fn mask_allows_earlier_positions_and_its_own() {
        const M: f32 = MASKED;
        let mut out = [f16::NAN; 12];
        mask(&mut out, 4, &[1, 2], None).unwrap();
        assert_eq!(floats(&out), [0.0, 0.0, M, M, 0.0, 0.0, 0.0, M, M, M, M, M]);
        mask(&mut out, 4, &[0, 3, 2], Some(2)).unwrap();
        assert_eq!(floats(&out), [0.0, M, M, M, M, M, 0.0, 0.0, M, 0.0, 0.0, M]);
        assert_eq!(f16::from_f32(MASKED).to_f32(), MASKED);
    }

    #[test]
    fn rows_are_stored_at_their_positions() {
        let mut out = [f16::NAN; 12];
        write(&mut out, 4, &[1, 2]).unwrap();
        assert_eq!(floats(&out), [0., 0., 0., 1., 0., 0., 0., 1., 0., 0., 0., 0.]);
        write(&mut out, 4, &[]).unwrap();
        assert_eq!(floats(&out), [0.0; 12]);
    }

    #[test]
    fn rows_are_padded_with_zeros() {
        let mut out = [f16::NAN; 6];
        pad(&mut out, 2, &[0.5, 0.1]).unwrap();
        assert_eq!(floats(&out), [0.5, 0.099_975_586, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn positions_and_lengths_out_of_range_are_rejected() {
        let mut out = [f16::ONE; 8];
        let past = Misfit::Position { position: 4, context: 4 };
        assert_eq!(mask(&mut out, 4, &[0, 4], None), Err(past));
        assert_eq!(write(&mut out, 4, &[4]), Err(past));
        let short = |rows, width| Err(Misfit::Length { len: 8, rows, width });
        assert_eq!(mask(&mut out, 4, &[0, 1, 2], None), short(3, 4));
        assert_eq!(write(&mut out, 3, &[0]), short(1, 3));
        assert_eq!(mask(&mut out, 0, &[], None), short(0, 0));
        assert_eq!(pad(&mut out, 3, &[0.0; 3]), short(1, 3));
        assert_eq!(pad(&mut out, 4, &[0.0; 12]), short(3, 4));
        assert_eq!(pad(&mut out, 4, &[0.0; 3]), short(1, 4));
        assert_eq!(out, [f16::ONE; 8]);
    }
}
