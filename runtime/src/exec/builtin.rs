//! Builtins: functions of the runtime that steps call.

use crate::exec::unit::Launch;
use moec_ir::op::DispatchLayout;
use std::ops::Range;

/// Experts whose counts fit on the stack. Kimi-K2 has 384.
const FEW: usize = 1024;

/// A row of the scores of a `request_experts`: its own layer's for `i` = 0, else those of the `i`th layer
/// ahead. Empty if there are no scores.
///
/// # Safety
/// Every score of the step has a row of `experts` values per valid row, at the distances in `strides`. No
/// step writes them now.
pub(crate) unsafe fn scores<'a>(
    launch: &Launch<'_>,
    strides: &[u32],
    i: usize,
    row: usize,
    experts: usize,
) -> &'a [f32] {
    let scores = launch.args.split_last().map_or(&[][..], |(_table, scores)| scores);
    match (scores.get(i), strides.get(i)) {
        // SAFETY: the caller's promise.
        (Some(at), Some(&stride)) if row < launch.n => unsafe {
            std::slice::from_raw_parts(at.of::<f32>().add(row * stride as usize), experts)
        },
        _ => &[],
    }
}

/// Order of the active experts of a table: by unit, then by rank, then the busiest first.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertOrder<'a> {
    /// By expert: the unit that computes it. Empty: one unit computes all.
    pub units: &'a [u32],
    /// By expert: its rank among those of its unit. Empty: all ranks are equal.
    pub ranks: &'a [u64],
}

/// Groups the slots (token, choice) of the first `n` rows by expert, in this order. With `partial`, an id of
/// −1 has no slot: another unit serves the choice.
///
/// `ids` is `i32[rows, k]`, `out` is the table that [`DispatchLayout`] describes. Unused words of `out`
/// (experts and starts past the active ones, tokens and slots past the valid rows) are −1. So the table is a
/// function of the valid rows and the order alone.
///
/// # Errors
/// An id that is not an expert. The table is then empty.
///
/// # Panics
/// If `ids` or `out` is shorter than the layout says.
pub fn dispatch(
    layout: DispatchLayout,
    n: usize,
    partial: bool,
    order: ExpertOrder<'_>,
    ids: &[i32],
    out: &mut [i32],
) -> Result<(), i32> {
    let DispatchLayout { rows, k, experts } = layout;
    let slots = n.min(rows) * k;
    let ids = &ids[..slots];
    out[..layout.words()].fill(-1);
    out[..layout.expert()].fill(0);
    let left_out = |id: i32| partial && id == -1;
    let known = |id: i32| usize::try_from(id).is_ok_and(|id| id < experts);
    if let Some(&bad) = ids.iter().find(|&&id| !known(id) && !left_out(id)) {
        // No expert is active, and no slot points outside of its buffer: later steps stay in bounds.
        out[layout.slot()..layout.words()].fill(0);
        return Err(bad);
    }
    // Decoding calls this once per layer: no allocation unless a model has more than [`FEW`] experts.
    let (mut few, mut many) = ([0usize; FEW], Vec::new());
    let next = if let Some(few) = few.get_mut(..experts) {
        few
    } else {
        many.resize(experts, 0);
        &mut many[..]
    };
    for &id in ids.iter().filter(|&&id| !left_out(id)) {
        next[id as usize] += 1;
    }
    let mut active = 0;
    for e in (0..experts).filter(|&e| next[e] > 0) {
        out[layout.expert() + active] = e as i32;
        active += 1;
    }
    // Ties stay in the order of ids.
    let ranked = &mut out[layout.expert()..layout.expert() + active];
    let unit = |e: i32| order.units.get(e as usize).copied().unwrap_or(0);
    let rank = |e: i32| order.ranks.get(e as usize).copied().unwrap_or(0);
    ranked.sort_unstable_by_key(|&e| (unit(e), rank(e), std::cmp::Reverse(next[e as usize]), e));
    // Counts become the next free slot of each expert.
    let mut start = 0;
    for rank in 0..active {
        let e = out[layout.expert() + rank] as usize;
        out[layout.start() + rank] = start as i32;
        start += std::mem::replace(&mut next[e], start);
    }
    out[layout.start() + active] = start as i32;
    for (i, &id) in ids.iter().enumerate().filter(|&(_, &id)| !left_out(id)) {
        let slot = next[id as usize];
        next[id as usize] += 1;
        out[layout.token() + slot] = (i / k) as i32;
        out[layout.slot() + i] = slot as i32;
    }
    out[0] = active as i32;
    out[1] = slots as i32;
    Ok(())
}

/// The table of the experts of one unit: its experts of `table`, which [`dispatch`] has sorted by unit, with
/// their slots there.
///
/// # Panics
/// If a table is shorter than the layout says.
pub fn of_unit(layout: DispatchLayout, units: &[u32], unit: u32, table: &[i32], own: &mut [i32]) {
    let active = usize::try_from(table[0]).unwrap_or(0).min(layout.experts);
    let experts = &table[layout.expert()..][..active];
    let lives = |e: &&i32| usize::try_from(**e).ok().and_then(|e| units.get(e)) == Some(&unit);
    let first = experts.iter().position(|e| lives(&e)).unwrap_or(active);
    let count = experts[first..].iter().take_while(lives).count();
    of_range(layout, first..first + count, table, own);
}

/// The table of some experts, those at `range` among the active ones of `table`, with their slots there.
///
/// # Panics
/// If a table is shorter than the layout says, or if it has fewer active experts.
pub fn of_range(layout: DispatchLayout, range: Range<usize>, table: &[i32], own: &mut [i32]) {
    let (first, count) = (range.start, range.len());
    own[..layout.words()].copy_from_slice(&table[..layout.words()]);
    own[layout.expert()..layout.token()].fill(-1);
    own[0] = count as i32;
    own[layout.expert()..][..count].copy_from_slice(&table[layout.expert() + first..][..count]);
    own[layout.start()..][..=count].copy_from_slice(&table[layout.start() + first..][..=count]);
}

/// Cosines, then sines, of `pos · inv_freq`, times `scale`: one row `f32[2·half]`.
pub fn rope_angles(pos: i32, inv_freq: &[f32], scale: f32, row: &mut [f32]) {
    let (cos, sin) = row.split_at_mut(row.len() / 2);
    for ((&f, c), s) in inv_freq.iter().zip(cos).zip(sin) {
        let angle = pos as f32 * f;
        *c = angle.cos() * scale;
        *s = angle.sin() * scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The dispatch table by its definition, without optimisations.
    fn naive(layout: DispatchLayout, n: usize, ids: &[i32]) -> Vec<i32> {
        let DispatchLayout { rows: _, k, experts } = layout;
        let slots_of = |e: i32| (0..n * k).filter(move |&i| ids[i] == e).collect::<Vec<_>>();
        let mut lists: Vec<(i32, Vec<usize>)> = (0..experts as i32).map(|e| (e, slots_of(e))).collect();
        lists.retain(|(_, l)| !l.is_empty());
        lists.sort_by(|a, b| b.1.len().cmp(&a.1.len()).then(a.0.cmp(&b.0)));
        let mut out = vec![-1; layout.words()];
        out[..4].copy_from_slice(&[lists.len() as i32, (n * k) as i32, 0, 0]);
        let mut slot = 0;
        for (rank, (e, list)) in lists.iter().enumerate() {
            out[layout.expert() + rank] = *e;
            out[layout.start() + rank] = slot as i32;
            for &i in list {
                out[layout.token() + slot] = (i / k) as i32;
                out[layout.slot() + i] = slot as i32;
                slot += 1;
            }
        }
        out[layout.start() + lists.len()] = slot as i32;
        out
    }

    fn case() -> impl Strategy<Value = (DispatchLayout, usize, Vec<i32>)> {
        (1usize..20, 1usize..5, 1usize..12).prop_flat_map(|(rows, k, experts)| {
            let layout = DispatchLayout { rows, k, experts };
            (Just(layout), 0..=rows, prop::collection::vec(-1..experts as i32, rows * k))
        })
    }

    proptest! {
        #[test]
        fn dispatch_matches_the_naive_implementation((layout, n, ids) in case()) {
            let mut out = vec![77; layout.words()];
            // `partial` is off if every choice is served.
            let partial = ids[..n * layout.k].contains(&-1);
            dispatch(layout, n, partial, ExpertOrder::default(), &ids, &mut out).unwrap();
            prop_assert_eq!(out, naive(layout, n, &ids));
        }
    }

    #[test]
    fn busiest_first_ties_by_id() {
        let layout = DispatchLayout { rows: 4, k: 2, experts: 4 };
        let mut out = vec![0; layout.words()];
        dispatch(layout, 3, false, ExpertOrder::default(), &[3, 1, 1, 3, 2, 1, 0, 0], &mut out).unwrap();
        assert_eq!(out[..2], [3, 6]);
        assert_eq!(out[layout.expert()..layout.start()], [1, 3, 2, -1]);
        assert_eq!(out[layout.start()..layout.token()], [0, 3, 5, 6, -1]);
        assert_eq!(out[layout.token()..layout.slot()], [0, 1, 2, 0, 1, 2, -1, -1]);
        assert_eq!(out[layout.slot()..], [3, 0, 1, 4, 5, 2, -1, -1]);
    }

    /// A unit's experts go by rank, and a range of them has their slots.
    #[test]
    fn ranks_precede_loads_and_ranges_keep_slots() {
        let layout = DispatchLayout { rows: 4, k: 2, experts: 5 };
        let ids = [3, 1, 1, 3, 2, 1, 4, 2];
        let order = ExpertOrder { units: &[0, 1, 1, 1, 0], ranks: &[0, 9, 0, 0, 0] };
        let (mut out, mut own, mut part) =
            (vec![0; layout.words()], vec![0; layout.words()], vec![0; layout.words()]);
        dispatch(layout, 4, false, order, &ids, &mut out).unwrap();
        assert_eq!(out[layout.expert()..layout.start()], [4, 2, 3, 1, -1]);
        assert_eq!(out[layout.start()..layout.token()], [0, 1, 3, 5, 8, -1]);
        of_unit(layout, order.units, 1, &out, &mut own);
        assert_eq!((own[0], &own[layout.expert()..layout.start()]), (3, &[2, 3, 1, -1, -1][..]));
        of_range(layout, 1..3, &own, &mut part);
        assert_eq!((part[0], &part[layout.expert()..layout.start()]), (2, &[3, 1, -1, -1, -1][..]));
        assert_eq!(part[layout.start()..layout.token()], [3, 5, 8, -1, -1, -1]);
        assert_eq!(part[layout.token()..], out[layout.token()..]);
    }

    #[test]
    fn an_unknown_expert_is_refused() {
        let layout = DispatchLayout { rows: 1, k: 2, experts: 4 };
        for bad in [-1, 4, i32::MAX, i32::MIN] {
            let mut out = vec![9; layout.words()];
            let dispatched = dispatch(layout, 1, false, ExpertOrder::default(), &[0, bad], &mut out);
            assert_eq!(dispatched, Err(bad));
            assert_eq!(out[0], 0);
        }
    }

    #[test]
    fn angles() {
        let mut out = [0.0; 8];
        for (pos, row) in [0, 3].into_iter().zip(out.chunks_exact_mut(4)) {
            rope_angles(pos, &[1.0, 0.25], 2.0, row);
        }
        assert_eq!(out[..4], [2.0, 2.0, 0.0, 0.0]);
        assert_eq!(out[4..], [3f32.cos() * 2.0, 0.75f32.cos() * 2.0, 3f32.sin() * 2.0, 0.75f32.sin() * 2.0]);
    }
}
