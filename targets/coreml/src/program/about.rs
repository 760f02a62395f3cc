//! Description of a package for people: Core ML's tools show it.

/// Author of every package.
pub const AUTHOR: &str = "moec, an ahead-of-time compiler for Mixture-of-Experts models";
/// License of every package. What its weights are under is not known from a checkpoint's files.
pub const LICENSE: &str =
    "the program: MIT OR Apache-2.0; its weights: the license of the checkpoint that they come from";
/// Version of every package: that of the compiler.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Meaning of a tensor at the boundary of a function, by its name: the beginning of the name, and a sentence.
const PORTS: &[(&str, &str)] = &[
    ("x", "hidden states, a token per row, channels in the second axis; rows without a token are zero"),
    ("angles", "cosines, then sines, of the rotary angles at each row's position"),
    ("mask", "added to the scores: 0 where a row may see a position of the cache, -10000 where not"),
    ("write", "1 where a row (last axis) is stored at a position of the cache (third axis), else 0"),
    ("y", "what the part adds to the residual stream, at the places of x"),
    (
        "logits",
        "unnormalised log-probabilities of consecutive entries of the vocabulary, in natural logarithms",
    ),
    ("kv", "cached keys and values of one sequence: parts, heads, positions, channels; zero at first"),
];

/// Meaning of a tensor of a name and a shape.
pub(crate) fn tensor(name: &str, shape: &[usize]) -> Option<String> {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let (_, about) = PORTS.iter().find(|(known, _)| *known == stem)?;
    Some(format!("{about}; f16 {shape:?}"))
}
