//! Names that come near a misspelt one.
#![expect(clippy::cast_possible_truncation, reason = "a similarity is between 0 and 1")]

use std::cmp::Reverse;

/// The candidates that `name` may mean, nearest first, at most three.
///
/// A candidate is near if at most a third of its letters differ, or if one of the two begins with the other.
///
/// ```
/// assert_eq!(moec_device::nearest("max_contxt", ["max_context", "prefill_chunk"]), ["max_context"]);
/// assert!(moec_device::nearest("fish", ["max_context", "prefill_chunk"]).is_empty());
/// ```
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let name = name.to_lowercase();
    let mut near: Vec<_> = candidates
        .into_iter()
        .filter_map(|c| {
            let distance = strsim::damerau_levenshtein(&name, c);
            let prefix = name.len() >= 3 && (c.starts_with(&name) || name.starts_with(c));
            (prefix || distance * 3 <= c.chars().count().max(name.chars().count())).then_some((
                distance,
                Reverse((strsim::jaro_winkler(&name, c) * 1e6) as u64),
                c,
            ))
        })
        .collect();
    near.sort_unstable();
    near.into_iter().map(|(_, _, c)| c).take(3).collect()
}
