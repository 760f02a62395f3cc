//! Cosines, then sines, of every position times the frequencies of a rotation: a thread for every frequency
//! of a row.

use super::launch::Launch;
use super::map::{by_column, each_column};
use crate::dsl::Kb;

pub(super) fn launch(half: usize) -> Launch {
    by_column(half)
}

pub(super) fn write<'k>(k: &'k Kb<'k>, half: usize, scale: f32) {
    let (pos, freqs, out) = (k.arg(0), k.arg(1), k.arg(2));
    each_column(k, half, |row, i| {
        let angle = pos.words(row).load_word().to_float() * freqs.words(i).load();
        let [cos, sin] = angle.cos_sin();
        let out = out.words(row * (2 * half));
        out.words(i).store(cos * scale);
        out.words(half).words(i).store(sin * scale);
    });
}
