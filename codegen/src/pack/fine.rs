//! Groups of numbers with scales of two levels ([`Fine`]): codes and scales of published files.

use half::f16;
use moec_ir::types::{Codes, FINE_GROUP, FINE_STORED, Fine, Format, LARGEST};

/// Most runs of a group.
const RUNS: usize = FINE_GROUP / 16;

/// The nearest code of a grid in ascending order, or whole number in its range.
fn nearest_code(codes: &Codes, x: f32) -> i8 {
    if codes.grid.is_empty() {
        return x.round_ties_even().clamp(f32::from(codes.lowest), f32::from(codes.highest)) as i8;
    }
    let distance = |code: &i8| (f32::from(*code) - x).abs();
    let nearest = codes.grid.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)));
    nearest.copied().unwrap_or(codes.lowest)
}

/// A group as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FineGroup {
    /// Units of the scales and of the minima of runs, as f16.
    pub(super) units: [u16; 2],
    /// Scales of the runs, those past the last one 0.
    pub(super) scales: [i8; RUNS],
    /// Minima of the runs.
    pub(super) minima: [u8; RUNS],
    /// Codes.
    pub(super) codes: [i8; FINE_GROUP],
}

impl FineGroup {
    pub(super) const ZERO: Self =
        Self { units: [0; 2], scales: [0; RUNS], minima: [0; RUNS], codes: [0; FINE_GROUP] };

    /// The numbers that are stored.
    pub(super) fn values(&self, format: Format) -> [f32; FINE_GROUP] {
        let Some((codes, fine)) = parts(format) else { return [0.0; FINE_GROUP] };
        let lowest = if fine.minima { f32::from(codes.lowest) } else { 0.0 };
        let mut values = self.codes.map(|code| f32::from(code) - lowest);
        let [unit, least] = self.units.map(|bits| f16::from_bits(bits).to_f32());
        for (run, values) in values.chunks_mut(fine.run).enumerate() {
            let (scale, minimum) = (unit * f32::from(self.scales[run]), least * f32::from(self.minima[run]));
            for x in values {
                *x = scale * *x - minimum;
            }
        }
        values
    }

    /// A group that represents numbers, those past the last one 0: the largest step of a run is the
    /// largest whole number of the group's scale, and codes are the nearest ones. It is for rows that have no
    /// group of their own, and no search for the least error.
    fn nearest(format: Format, x: &[f32]) -> Self {
        let mut found = Self::ZERO;
        let Some((codes, fine)) = parts(format) else { return found };
        let (lowest, highest) = (f32::from(codes.lowest), f32::from(codes.highest));
        // Step and minimum of each run.
        let mut runs = [(0.0_f32, 0.0_f32); RUNS];
        for (run, x) in runs.iter_mut().zip(x.chunks(fine.run)) {
            let (least, most) = x.iter().fold((0.0_f32, 0.0_f32), |(a, b), &x| (a.min(x), b.max(x)));
            *run = if fine.minima {
                ((most - least) / (highest - lowest), -least)
            } else {
                (most.max(-least) / highest, 0.0)
            };
        }
        let unit = |of: fn(&(f32, f32)) -> f32, top: f32| {
            let bits = f16::from_f32(runs.iter().map(of).fold(0.0, f32::max) / top);
            (bits.to_bits(), bits.to_f32())
        };
        let top = f32::from(format.fine_most());
        let ((unit_bits, unit), (least_bits, least)) = (unit(|run| run.0, top), unit(|run| run.1, top));
        found.units = [unit_bits, least_bits];
        let whole = |x: f32, unit: f32| if unit > 0.0 { (x / unit).round_ties_even().min(top) } else { 0.0 };
        let rows = found.codes.chunks_mut(fine.run).zip(x.chunks(fine.run));
        for (run, (to, x)) in rows.enumerate() {
            let (scale, minimum) = (whole(runs[run].0, unit), whole(runs[run].1, least));
            (found.scales[run], found.minima[run]) = (scale as i8, minimum as u8);
            let (step, minimum) = (unit * scale, least * minimum);
            let offset = if fine.minima { lowest } else { 0.0 };
            for (code, x) in to.iter_mut().zip(x) {
                let near = if step > 0.0 { (x + minimum) / step } else { 0.0 };
                *code = nearest_code(&codes, near + offset);
            }
        }
        found
    }
}

/// Codes of a format with scales of two levels.
fn parts(format: Format) -> Option<(Codes, Fine)> {
    let codes = format.spec().codes?;
    Some((codes, codes.fine?))
}

/// The groups of a row ([`FineGroup::nearest`]), the last one filled up with zeros.
pub(super) fn quantised(format: Format, row: &[f32]) -> impl Iterator<Item = FineGroup> {
    row.chunks(FINE_GROUP).map(move |x| {
        let finite = x.iter().all(|x| x.abs() <= LARGEST);
        if finite { FineGroup::nearest(format, x) } else { FineGroup::ZERO }
    })
}

/// Groups of rows of `cols` numbers as a checkpoint has them, [`FINE_STORED`] bytes each. `None` where numbers
/// that share a scale here do not there.
pub(super) fn stored_groups(format: Format, cols: usize, stored: &[u8]) -> Option<Vec<FineGroup>> {
    let (_, Fine { run, .. }) = parts(format)?;
    let group = |numbers: &[[u8; FINE_STORED]]| {
        let mut found = FineGroup::ZERO;
        let &[[_, _, _, ref units @ ..], ..] = numbers else { return Some(found) };
        found.units = [u16::from_le_bytes([units[0], units[1]]), u16::from_le_bytes([units[2], units[3]])];
        for (r, numbers) in numbers.chunks(run).enumerate() {
            let &[[_, scale, minimum, ..], ..] = numbers else { continue };
            (found.scales[r], found.minima[r]) = (scale.cast_signed(), minimum);
            for (to, [code, fine @ .., a, b, c, d]) in found.codes[r * run..].iter_mut().zip(numbers) {
                if *fine != [scale, minimum] || [*a, *b, *c, *d] != *units {
                    return None;
                }
                *to = code.cast_signed();
            }
        }
        Some(found)
    };
    let numbers = stored.as_chunks::<FINE_STORED>().0;
    numbers.chunks(cols.max(1)).flat_map(|row| row.chunks(FINE_GROUP)).map(group).collect()
}

/// Whether rows of `cols` numbers, as a checkpoint has them, are groups of a format with scales of two levels.
pub fn are_fine_groups(format: Format, cols: usize, stored: &[u8]) -> bool {
    stored_groups(format, cols, stored).is_some()
}

/// Writes a group's numbers as a checkpoint has them; its runs have this many.
pub(super) fn as_stored(group: &FineGroup, run: usize, out: &mut [[u8; FINE_STORED]]) {
    let ([a, b], [c, d]) = (group.units[0].to_le_bytes(), group.units[1].to_le_bytes());
    for (i, (to, code)) in out.iter_mut().zip(&group.codes).enumerate() {
        let (scale, minimum) = (group.scales[i / run].cast_unsigned(), group.minima[i / run]);
        *to = [code.cast_unsigned(), scale, minimum, a, b, c, d];
    }
}
