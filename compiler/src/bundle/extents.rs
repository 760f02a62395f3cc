//! Where experts lie when each of them is one aligned extent of the weight file.
//!
//! A packed weight of experts, `[experts, rows, cols]`, lies matrix by matrix: the gate and up matrices of
//! all experts of a layer, then all their down matrices. What is read together are the matrices of *one*
//! expert (PowerInfer-2, §4.4). Here they lie side by side, gate and up before down, each part at a multiple
//! of [`BLOCK`], so that one direct read fetches an expert, and its first half can be used before the second
//! is there.

use crate::error::{Error, Result};
use moec_ir::plan::{Arg, Builtin, Code, Grid, Plan, Segment};
use moec_runtime::flash::BLOCK;

/// Weights whose matrices are read together, expert by expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Index of the layer's table in [`moec_ir::plan::Placement::experts`].
    pub table: u32,
    /// Experts: matrices of each weight.
    pub experts: u32,
    /// Segments, in the order in which a step reads them.
    pub segments: Vec<u32>,
}

/// One matrix of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Group.
    pub group: u32,
    /// Expert.
    pub expert: u32,
    /// Segment that it is a matrix of; its number there is `expert`.
    pub segment: u32,
    /// Offset in the file, a multiple of [`BLOCK`].
    pub offset: u64,
    /// Size.
    pub bytes: u64,
}

/// A weight file of experts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertLayout {
    /// All parts by group, expert and offset.
    pub parts: Vec<Part>,
    /// Size of the file.
    pub bytes: u64,
}

impl ExpertLayout {
    /// The parts of an expert, which are neighbours in the file.
    pub fn expert(&self, group: u32, expert: u32) -> &[Part] {
        let first = self.parts.partition_point(|p| (p.group, p.expert) < (group, expert));
        let end = self.parts.partition_point(|p| (p.group, p.expert) <= (group, expert));
        &self.parts[first..end]
    }
}

/// Which segments hold the experts of each layer: those that steps over active experts read, in the order of
/// the first entry point. Biases and other weights that are not matrices of experts stay where they are.
///
/// # Errors
/// A plan whose steps name segments that it does not have.
pub fn groups(plan: &Plan) -> Result<Vec<Group>> {
    let mut groups: Vec<Group> = Vec::new();
    let Some(entry) = plan.entries.first() else { return Ok(groups) };
    for step in &entry.steps {
        // A layer begins with its dispatch table, and the layers run one after the other.
        if let Code::Builtin(Builtin::Dispatch { experts, .. }) = step.code {
            groups.push(Group { table: groups.len() as u32, experts, segments: Vec::new() });
        }
        let (Grid::Experts { .. }, Some(group)) = (step.grid, groups.last_mut()) else { continue };
        for arg in &step.args {
            let Arg::Segment(index) = *arg else { continue };
            let segment = (plan.segments.get(index as usize))
                .ok_or_else(|| Error::bug(format!("a step reads segment {index}, which does not exist")))?;
            let is_matrices = segment.shape.len() == 3 && segment.extents().0 == group.experts;
            if is_matrices && !group.segments.contains(&index) {
                group.segments.push(index);
            }
        }
    }
    groups.retain(|g| !g.segments.is_empty());
    Ok(groups)
}

/// Lays out the experts of all groups in one file, group by group, in the order of `order(group, expert)`: what
/// it gives least comes first, and among equals the lower number.
///
/// # Errors
/// A group that names a segment which is not there or does not consist of as many matrices of equal size, or
/// a file past what an offset can say.
pub fn layout(
    segments: &[Segment],
    groups: &[Group],
    order: &dyn Fn(u32, u32) -> u64,
) -> Result<ExpertLayout> {
    let too_large = || Error::limit("the experts are past what one file can hold");
    let (mut parts, mut end) = (Vec::new(), 0_u64);
    for (g, group) in groups.iter().enumerate() {
        let g = g as u32;
        let matrices = group.segments.iter().map(|&s| {
            let bytes = segments.get(s as usize).and_then(|segment| matrix_bytes(segment, group.experts));
            let bytes = bytes.ok_or_else(|| {
                Error::bug(format!("segment {s} does not consist of {} matrices", group.experts))
            })?;
            Ok((s, bytes))
        });
        let matrices = matrices.collect::<Result<Vec<_>>>()?;
        let mut experts: Vec<u32> = (0..group.experts).collect();
        experts.sort_by_key(|&e| (order(g, e), e));
        for expert in experts {
            for &(segment, bytes) in &matrices {
                let offset = end.checked_next_multiple_of(BLOCK).ok_or_else(too_large)?;
                end = offset.checked_add(bytes).ok_or_else(too_large)?;
                parts.push(Part { group: g, expert, segment, offset, bytes });
            }
        }
    }
    // Stable: the parts of an expert stay in the order in which they are read.
    parts.sort_by_key(|p| (p.group, p.expert));
    Ok(ExpertLayout { parts, bytes: end })
}

/// Bytes of each of the matrices that a segment consists of.
fn matrix_bytes(segment: &Segment, matrices: u32) -> Option<u64> {
    let n = u64::from(matrices);
    let fits = matrices > 0 && segment.extents().0 == matrices && segment.bytes.is_multiple_of(n);
    fits.then(|| segment.bytes / n).filter(|&bytes| bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_ir::Format;
    use moec_ir::plan::Layout;

    fn segment(experts: u32, bytes: u64) -> Segment {
        Segment {
            name: "w".to_owned(),
            file: 1,
            offset: 0,
            bytes,
            shape: vec![experts, 1, (bytes / u64::from(experts) / 4) as u32],
            format: Format::F32,
            layout: Layout::Rows,
        }
    }

    fn group(table: u32, experts: u32, segments: &[u32]) -> Group {
        Group { table, experts, segments: segments.to_vec() }
    }

    #[test]
    fn an_expert_is_one_aligned_piece() {
        let segments = [segment(3, 3 * 5000), segment(3, 3 * 4096), segment(2, 2 * 64)];
        let groups = [group(0, 3, &[0, 1]), group(1, 2, &[2])];
        let found = layout(&segments, &groups, &|_, _| 0).unwrap();
        let places: Vec<_> = found.parts.iter().map(|p| (p.group, p.expert, p.segment, p.offset)).collect();
        let expected = [
            (0, 0, 0, 0),
            (0, 0, 1, 8192),
            (0, 1, 0, 12_288),
            (0, 1, 1, 20_480),
            (0, 2, 0, 24_576),
            (0, 2, 1, 32_768),
            (1, 0, 2, 36_864),
            (1, 1, 2, 40_960),
        ];
        assert_eq!(places, expected);
        assert_eq!(found.bytes, 40_960 + 64);
        assert_eq!(found.expert(0, 1), &found.parts[2..4]);
        assert_eq!(found.expert(1, 1), &found.parts[7..]);
        assert!(found.expert(1, 2).is_empty());
    }

    #[test]
    fn experts_lie_in_the_order_that_is_asked_for() {
        let found = layout(&[segment(3, 3 * 4096)], &[group(0, 3, &[0])], &|_, e| u64::from(e == 0)).unwrap();
        let offsets: Vec<_> = (0..3).map(|e| found.expert(0, e)[0].offset / 4096).collect();
        assert_eq!(offsets, [2, 0, 1]);
    }

    #[test]
    fn what_is_no_set_of_matrices_is_refused() {
        let try_one = |segment: Segment, experts| layout(&[segment], &[group(0, experts, &[0])], &|_, _| 0);
        assert!(try_one(segment(3, 300), 3).is_ok());
        assert!(try_one(segment(3, 300), 2).is_err());
        assert!(try_one(segment(3, 300), 0).is_err());
        assert!(try_one(Segment { bytes: 301, ..segment(3, 300) }, 3).is_err());
        assert!(try_one(Segment { bytes: u64::MAX, ..segment(3, 300) }, 3).is_err());
        assert!(layout(&[], &[group(0, 1, &[0])], &|_, _| 0).is_err());
        assert_eq!(layout(&[], &[], &|_, _| 0).unwrap(), ExpertLayout::default());
    }
}
