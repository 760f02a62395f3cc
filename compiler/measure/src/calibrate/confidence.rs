//! Largest probabilities of the little pass of big-little decoding, from which a build chooses γ.
//!
//! A few tokens of windows spread over the texts are decoded one by one. The first half of a window is
//! prefilled. Each further position is decoded by the little pass, whose largest probability counts, then
//! with all experts. The latter replaces the states of the former. In a run, kept tokens keep the little
//! pass's states, but which these are depends on γ: this is an approximation.

use super::spread;
use super::texts::Window;
use crate::job::Job;
use moec_base::error::{Error, Result};
use moec_base::interrupt;
use moec_base::progress::Progress;
use moec_profile::Confidence;
use moec_runtime::serving::big_little::largest_probability;
use moec_runtime::{Engine, LogitRows};

/// Most tokens that are decoded; the share of fallbacks then has a standard error of about one percent.
const TOKENS: usize = 1024;
/// Fewest tokens that are decoded after a prefill, if the window has as many.
const PER_WINDOW: usize = 64;

/// Records the largest probabilities of a little pass with `experts` experts per token.
///
/// # Errors
/// Fails if a state cannot go back by a token, which decoding a token twice requires, or on an interrupt.
pub(super) fn record(
    engine: &mut Engine<'_>,
    experts: u32,
    windows: &[Window],
    job: Job<'_>,
    progress: &Progress,
) -> Result<Confidence> {
    let mut confidence = Confidence::new(experts);
    let parts = parts(&windows.iter().map(|w| w.ids.len()).collect::<Vec<_>>());
    let total: usize = parts.iter().map(|(_, range)| range.len()).sum();
    let bar = progress.items("Decoding", total as u64, "tokens with fewer experts");
    let of_part = |part: usize| {
        let (at, range) = parts[part].clone();
        let (ids, mut found) = (&windows[at].ids, Vec::with_capacity(range.len()));
        engine.reset(0).map_err(Error::from)?;
        let (start, whole) = (range.start, ids.len());
        let read = &ids[..start];
        engine.prefill_part(0, 0, read, whole, LogitRows::None, &mut |_, _| Ok(())).map_err(Error::from)?;
        for pos in range {
            interrupt::check()?;
            let batch = [(0, pos, ids[pos])];
            let count = &mut |_, logits: &[f32]| {
                found.push(largest_probability(logits));
                Ok(())
            };
            engine.decode_little(&batch, count).map_err(Error::from)?;
            engine.decode(&batch, &mut |_, _| Ok(())).map_err(Error::from)?;
            bar.add(1);
        }
        Ok(found)
    };
    let found = job.all(parts.len(), of_part, || ())?;
    found.into_iter().flatten().for_each(|probability| confidence.add(probability));
    bar.finish();
    Ok(confidence)
}

/// Positions to decode, by window: [`TOKENS`] of the second halves in all, in as many windows as
/// [`PER_WINDOW`] permits, spread evenly.
fn parts(lens: &[usize]) -> Vec<(usize, std::ops::Range<usize>)> {
    let each = TOKENS.div_ceil(lens.len().max(1)).max(PER_WINDOW);
    let mut left = TOKENS;
    let chosen = spread(lens.len(), TOKENS / each.min(TOKENS));
    let part = |at: usize| {
        let half = lens[at] / 2;
        let count = (lens[at] - half).min(each).min(left);
        left -= count;
        (at, half..half + count)
    };
    chosen.into_iter().map(part).filter(|(_, range)| range.start > 0 && !range.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoded_tokens_are_spread_over_the_windows() {
        let of = |lens: &[usize]| parts(lens);
        let total =
            |parts: &[(usize, std::ops::Range<usize>)]| parts.iter().map(|p| p.1.len()).sum::<usize>();
        // 16 windows of 128, the first half of each prefilled.
        let many = of(&[512; 128]);
        assert_eq!((many.len(), total(&many)), (16, TOKENS));
        assert_eq!((&many[0], &many[1]), (&(0, 256..320), &(8, 256..320)));
        // Few windows: more tokens of each, at most the second half.
        let few = of(&[512; 8]);
        assert_eq!((few.len(), total(&few), few[7].1.clone()), (8, TOKENS, 256..384));
        assert_eq!(of(&[512, 3]), [(0, 256..512), (1, 1..3)]);
        assert_eq!(of(&[2]), [(0, 1..2)]);
        assert_eq!(of(&[5000]), [(0, 2500..2500 + TOKENS)]);
        assert!(total(&of(&[300; 1000])) <= TOKENS);
        assert!(of(&[]).is_empty());
    }
}
