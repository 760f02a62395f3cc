//! Bounds for the tokenizer of a model: for the growth of a text by its rules, and for the time of its
//! regular expressions.
//!
//! Rules that replace text by longer text multiply its length, one after another. The rules of a file are
//! checked when it is read; the growth of a text is checked before a rule runs. Time is checked between the
//! matches of a regular expression, each of which the expression's own limit of backtracking ends.

use super::charsmap;
use serde::Deserialize;
use std::cell::Cell;
use std::time::{Duration, Instant};
use tokenizers::decoders::strip::Strip;
use tokenizers::normalizer::Range;
use tokenizers::normalizers::Replace;
use tokenizers::pattern::{Invert, Pattern};
use tokenizers::utils::SysRegex;
use tokenizers::{
    Decoder, DecoderWrapper, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper, Offsets,
    PostProcessorWrapper, PreTokenizedString, PreTokenizer, PreTokenizerWrapper, TokenizerImpl,
};

/// Result of a rule, with the error of the crate `tokenizers`.
type Result<T, E = tokenizers::Error> = std::result::Result<T, E>;

/// A tokenizer whose rules are bounded.
pub(super) type Bounded =
    TokenizerImpl<ModelWrapper, Normalizers, PreTokenizers, PostProcessorWrapper, Decoders>;

/// Maximum growth of a text. Compatibility forms of Unicode make one character up to 11 times as long.
const GROWTH: usize = 64;
/// Bytes by which a text may always grow.
const ADDED: usize = 64 << 10;
/// Maximum length of a text that has grown, in bytes.
const LONGEST: usize = 256 << 20;
/// Maximum number of rules of a kind.
const RULES: usize = 256;
/// Maximum number of pre-tokenizers that rewrite a text (`ByteLevel`, `Metaspace`), each to up to 8 times its
/// length.
const REWRITES: usize = 2;
/// Time limit for the regular expressions of one text, against hanging.
const TIME: Duration = Duration::from_mins(1);

thread_local! {
    /// Deadline of the regular expressions for this thread's text.
    static END: Cell<Option<Instant>> = const { Cell::new(None) };
    /// Error of a normalizer; needed since the crate drops its errors, or assumes that there are none.
    static REFUSED: Cell<Option<String>> = const { Cell::new(None) };
}

/// Runs a tokenizer over one text.
pub(super) fn timed<T>(run: impl FnOnce() -> Result<T>) -> Result<T> {
    END.set(Instant::now().checked_add(TIME));
    REFUSED.set(None);
    let done = run();
    END.set(None);
    REFUSED.take().map_or(done, |why| Err(why.into()))
}

/// Fails if a text has become too long.
fn check(text: usize, length: usize) -> Result<()> {
    if length > text.saturating_mul(GROWTH).saturating_add(ADDED).min(LONGEST) {
        return Err(format!("its rules can make a text of {text} bytes {length} bytes long").into());
    }
    Ok(())
}

/// Fails if the rules of a file multiply the length of texts too much. `growths`: factor of each rule.
fn check_file(what: &str, growths: &[usize]) -> Result<(), String> {
    let all = growths.iter().fold(1usize, |all, &growth| all.saturating_mul(growth));
    if all > GROWTH {
        return Err(format!("its {what} can make a text {all} times as long; {GROWTH} times is the maximum"));
    }
    if growths.len() > RULES {
        return Err(format!("it has {} {what}; {RULES} is the maximum", growths.len()));
    }
    Ok(())
}

/// Matches of a regular expression, within the time limit.
struct Timed<'a>(&'a SysRegex);

impl Pattern for Timed<'_> {
    fn find_matches(&self, inside: &str) -> Result<Vec<(Offsets, bool)>> {
        if inside.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        let mut before = 0;
        let mut found = Vec::new();
        for (start, end) in self.0.find_iter(inside) {
            if END.get().is_some_and(|end| Instant::now() > end) {
                let seconds = TIME.as_secs();
                return Err(format!("its regular expressions take more than {seconds} s for a text").into());
            }
            if before != start {
                found.push(((before, start), false));
            }
            found.push(((start, end), true));
            before = end;
        }
        if before != inside.len() {
            found.push(((before, inside.len()), false));
        }
        Ok(found)
    }
}

/// A rule that replaces what matches.
#[derive(Debug)]
struct Replacement {
    regex: SysRegex,
    /// Length of the text that is replaced; `None` for a regular expression.
    literal: Option<usize>,
    /// Whether a match may be empty.
    empty: bool,
    content: String,
}

impl Replacement {
    fn new(rule: &Replace) -> Result<Self, String> {
        /// Characters with a meaning in regular expressions.
        const META: &str = r"\.+*?()|[]{}^$#&-~";
        // The pattern is private in the crate.
        let json = serde_json::to_value(rule).map_err(|e| e.to_string())?;
        let text = json["pattern"]["String"].as_str();
        let pattern = match (text, json["pattern"]["Regex"].as_str()) {
            (Some(text), _) => text
                .chars()
                .flat_map(|c| META.contains(c).then_some('\\').into_iter().chain([c]))
                .collect::<String>(),
            (None, Some(pattern)) => pattern.to_owned(),
            (None, None) => return Err("it has a rule that replaces, and does not say what".to_owned()),
        };
        let regex = SysRegex::new(&pattern).map_err(|e| e.to_string())?;
        let empty = regex.find_iter("").next().is_some();
        Ok(Self {
            regex,
            literal: text.map(str::len).filter(|&n| n > 0),
            empty,
            content: rule.content.clone(),
        })
    }

    /// Maximum length of the result for a text of this length.
    fn length(&self, text: usize) -> usize {
        let content = self.content.len();
        match self.literal {
            Some(literal) => {
                (text / literal).saturating_mul(content.saturating_sub(literal)).saturating_add(text)
            }
            None => text.saturating_add(1).saturating_mul(content).saturating_add(text),
        }
    }

    /// Maximum factor by which a text becomes longer, if no match is empty or the rule allows empty matches.
    fn growth(&self) -> usize {
        let content = self.content.len();
        match self.literal {
            Some(literal) => content.div_ceil(literal).max(1),
            None if self.empty => content + 1,
            None => content.max(1),
        }
    }

    fn replaced(&self, token: &str) -> Result<String> {
        let mut out = String::new();
        for ((start, end), matches) in Timed(&self.regex).find_matches(token)? {
            out.push_str(if matches { &self.content } else { &token[start..end] });
        }
        Ok(out)
    }
}

/// Normalizers, in their order.
#[derive(Debug, Deserialize)]
#[serde(try_from = "NormalizerWrapper")]
pub(super) struct Normalizers {
    steps: Vec<Normal>,
}

#[derive(Debug)]
enum Normal {
    Replace(Replacement),
    /// Any other normalizer, with the factor and the number of bytes by which it lengthens a text.
    Other(NormalizerWrapper, usize, usize),
}

impl Normal {
    fn all_of(wrapper: NormalizerWrapper, out: &mut Vec<Self>) -> Result<(), String> {
        let (growth, added) = match &wrapper {
            NormalizerWrapper::Sequence(_) => {
                let NormalizerWrapper::Sequence(sequence) = wrapper else { return Ok(()) };
                return sequence.into_iter().try_for_each(|step| Self::all_of(step, out));
            }
            NormalizerWrapper::Replace(rule) => {
                out.push(Self::Replace(Replacement::new(rule)?));
                return Ok(());
            }
            NormalizerWrapper::Prepend(rule) => (1, rule.prepend.len()),
            NormalizerWrapper::ByteLevel(_) => (2, 0),
            NormalizerWrapper::Lowercase(_) => (3, 0),
            NormalizerWrapper::NFC(_) | NormalizerWrapper::NFD(_) => (4, 0),
            NormalizerWrapper::NFKC(_)
            | NormalizerWrapper::NFKD(_)
            | NormalizerWrapper::BertNormalizer(_) => (12, 0),
            NormalizerWrapper::StripNormalizer(_)
            | NormalizerWrapper::StripAccents(_)
            | NormalizerWrapper::Nmt(_) => (1, 0),
            NormalizerWrapper::Precompiled(_) => (charsmap::longest(&wrapper)?, 0),
        };
        out.push(Self::Other(wrapper, growth, added));
        Ok(())
    }

    fn length(&self, text: usize) -> usize {
        match self {
            Self::Replace(rule) => rule.length(text),
            Self::Other(_, growth, added) => text.saturating_mul(*growth).saturating_add(*added),
        }
    }

    /// Factor by which a text becomes longer by the file's own rules; those of Unicode are bounded by
    /// definition.
    fn growth(&self) -> usize {
        match self {
            Self::Replace(rule) => rule.growth(),
            Self::Other(..) => 1,
        }
    }
}

impl TryFrom<NormalizerWrapper> for Normalizers {
    type Error = String;

    fn try_from(wrapper: NormalizerWrapper) -> Result<Self, String> {
        let mut steps = Vec::new();
        Normal::all_of(wrapper, &mut steps)?;
        check_file("normalizers", &steps.iter().map(Normal::growth).collect::<Vec<_>>())?;
        Ok(Self { steps })
    }
}

/// Fails if a rule has put text before the first character: the crate's rules for whole texts then index past
/// the end.
fn covered(normalized: &NormalizedString) -> Result<()> {
    let all = 0..normalized.len();
    if all.is_empty() || normalized.convert_offsets(Range::Original(..)) == Some(all) {
        return Ok(());
    }
    Err("one of its normalizers replaces nothing by text at the beginning of a text, and another follows"
        .into())
}

impl Normalizer for Normalizers {
    fn normalize(&self, normalized: &mut NormalizedString) -> Result<()> {
        let text = normalized.len_original();
        for step in &self.steps {
            let done = check(text, step.length(normalized.len())).and_then(|()| match step {
                Normal::Replace(rule) => normalized.replace(Timed(&rule.regex), &rule.content),
                Normal::Other(wrapper, ..) => {
                    covered(normalized)?;
                    wrapper.normalize(normalized)
                }
            });
            if let Err(e) = done {
                REFUSED.set(Some(e.to_string()));
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Pre-tokenizers, in their order.
#[derive(Debug, Deserialize)]
#[serde(try_from = "PreTokenizerWrapper")]
pub(super) struct PreTokenizers(Vec<PreTokenizerWrapper>);

impl TryFrom<PreTokenizerWrapper> for PreTokenizers {
    type Error = String;

    fn try_from(wrapper: PreTokenizerWrapper) -> Result<Self, String> {
        fn all_of(wrapper: PreTokenizerWrapper, out: &mut Vec<PreTokenizerWrapper>) {
            match wrapper {
                PreTokenizerWrapper::Sequence(sequence) => {
                    sequence.into_iter().for_each(|step| all_of(step, out));
                }
                step => out.push(step),
            }
        }
        let mut steps = Vec::new();
        all_of(wrapper, &mut steps);
        check_file("pre-tokenizers", &vec![1; steps.len()])?;
        let rewrites = |step: &&PreTokenizerWrapper| {
            matches!(step, PreTokenizerWrapper::ByteLevel(_) | PreTokenizerWrapper::Metaspace(_))
        };
        let rewrites = steps.iter().filter(rewrites).count();
        if rewrites > REWRITES {
            return Err(format!(
                "it has {rewrites} pre-tokenizers that rewrite a text; {REWRITES} is the maximum"
            ));
        }
        if steps.iter().any(|s| matches!(s, PreTokenizerWrapper::FixedLength(fixed) if fixed.length == 0)) {
            return Err("its pre-tokenizer cuts texts into pieces of no characters".to_owned());
        }
        Ok(Self(steps))
    }
}

impl PreTokenizer for PreTokenizers {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> Result<()> {
        for step in &self.0 {
            match step {
                PreTokenizerWrapper::Split(split) => text.split(|_, piece| {
                    let pattern = Timed(&split.regex);
                    if split.invert {
                        piece.split(Invert(pattern), split.behavior)
                    } else {
                        piece.split(pattern, split.behavior)
                    }
                })?,
                step => step.pre_tokenize(text)?,
            }
        }
        Ok(())
    }
}

/// Decoders, in their order.
#[derive(Debug, Deserialize)]
#[serde(try_from = "DecoderWrapper")]
pub(super) struct Decoders(Vec<Decode>);

#[derive(Debug)]
enum Decode {
    Replace(Replacement),
    Strip(Strip),
    Other(DecoderWrapper),
}

impl Decode {
    fn all_of(wrapper: DecoderWrapper, out: &mut Vec<Self>) -> Result<(), String> {
        match wrapper {
            DecoderWrapper::Sequence(sequence) => {
                return sequence.get_decoders().iter().cloned().try_for_each(|step| Self::all_of(step, out));
            }
            DecoderWrapper::Replace(rule) => out.push(Self::Replace(Replacement::new(&rule)?)),
            DecoderWrapper::Strip(strip) => out.push(Self::Strip(strip)),
            other => out.push(Self::Other(other)),
        }
        Ok(())
    }

    /// Maximum length of the result for tokens.
    fn length(&self, tokens: &[String]) -> usize {
        match self {
            Self::Replace(rule) => {
                tokens.iter().fold(0usize, |all, token| all.saturating_add(rule.length(token.len())))
            }
            Self::Strip(_) => total(tokens),
            // Invalid bytes become three bytes each, and a token gets a space.
            Self::Other(_) => total(tokens).saturating_mul(3).saturating_add(2 * tokens.len()),
        }
    }

    fn growth(&self) -> usize {
        match self {
            Self::Replace(rule) => rule.growth(),
            Self::Strip(_) | Self::Other(_) => 1,
        }
    }
}

impl TryFrom<DecoderWrapper> for Decoders {
    type Error = String;

    fn try_from(wrapper: DecoderWrapper) -> Result<Self, String> {
        let mut steps = Vec::new();
        Decode::all_of(wrapper, &mut steps)?;
        check_file("decoders", &steps.iter().map(Decode::growth).collect::<Vec<_>>())?;
        Ok(Self(steps))
    }
}

impl Decoder for Decoders {
    fn decode_chain(&self, mut tokens: Vec<String>) -> Result<Vec<String>> {
        let text = total(&tokens);
        for step in &self.0 {
            // Some decoders assume that there is a token.
            if tokens.is_empty() {
                break;
            }
            check(text, step.length(&tokens))?;
            tokens = match step {
                Decode::Replace(rule) => {
                    tokens.iter().map(|token| rule.replaced(token)).collect::<Result<_>>()?
                }
                Decode::Strip(strip) => tokens.iter().map(|token| stripped(token, strip)).collect(),
                Decode::Other(step) => step.decode_chain(tokens)?,
            };
        }
        Ok(tokens)
    }
}

fn total(tokens: &[String]) -> usize {
    tokens.iter().map(String::len).sum()
}

/// A token without a character at its ends. The crate's own version indexes before the start of a short
/// token.
fn stripped(token: &str, strip: &Strip) -> String {
    let is = |c: &char| *c == strip.content;
    let before = token.chars().take(strip.start).take_while(is).count();
    let after = token.chars().rev().take(strip.stop).take_while(is).count();
    let left = token.chars().count().saturating_sub(before + after);
    token.chars().skip(before).take(left).collect()
}
