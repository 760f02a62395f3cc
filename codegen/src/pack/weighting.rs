//! Weighting of a matrix's errors, and its rounding where numbers are not rounded each group by itself.

use super::quantise::Group;
use super::{Feedback, feedback, order};
use moec_ir::types::{Format, GROUP};

/// Weighting of a matrix's errors.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weighting<'a> {
    /// Weight of each column's errors: finite and not negative, and only their proportions count. `None`: all
    /// the same.
    pub importance: Option<&'a [f32]>,
    /// Feedback from one column's errors to others, where it is known; it has as many columns. Then
    /// formats for which [`feedback::uses_feedback`] is true are rounded only by it.
    pub feedback: Option<&'a Feedback>,
    /// The numbers were read back from codes and scales, and become these again.
    pub stored: bool,
    /// Columns that are stored as INT8 where others are INT4, in ascending order: at most as many as
    /// [`Format::outliers`] says.
    pub outliers: Option<&'a [u32]>,
}

impl<'a> Weighting<'a> {
    /// By the importance of columns alone.
    pub const fn of(importance: Option<&'a [f32]>) -> Self {
        Self { importance, feedback: None, stored: false, outliers: None }
    }

    /// Groups of whole rows where they are not rounded each by itself.
    pub(super) fn rounded(self, format: Format, cols: usize, rows: &[f32]) -> Option<Vec<Group>> {
        if self.stored && format.is_grouped() && !format.has_fine_scales() {
            let mut groups = Vec::with_capacity(rows.len().div_ceil(GROUP));
            rows.chunks(cols.max(1)).for_each(|row| order::recovered(format, row, |g| groups.push(g)));
            return Some(groups);
        }
        self.feedback(format, cols).map(|f| f.round(format, rows))
    }

    /// Feedback for rows of `cols` numbers of a format, if there is any.
    fn feedback(self, format: Format, cols: usize) -> Option<&'a Feedback> {
        self.feedback.filter(|f| feedback::uses_feedback(format) && f.cols() == cols)
    }
}

/// Weighting of each matrix by its number in the weight.
pub type Importance<'a> = dyn Fn(usize) -> Weighting<'a> + 'a;
