//! Answers that conform to a grammar, a JSON schema or a regular expression: a constraint of the sampler, by
//! `llguidance`.
//!
//! The allowed tokens are computed before every token. The library's own limits do not bound all of this
//! work. So a server, whose grammars come from others, leaves it to a process that can be ended ([`remote`]).
//! `generate` and `chat` do it in their own process.

pub mod remote;
pub(crate) mod words;
pub(crate) mod worker;

use crate::error::{Error, Result};
use clap::{ArgMatches, Args as _, FromArgMatches as _};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use moec_runtime::bundle::BundleReader;
use moec_runtime::cli::{ConstraintOptions, Context, Failure, MakeConstraint};
use moec_runtime::error::Error as Failed;
use moec_runtime::platform::regular;
use moec_runtime::serving::text;
use moec_runtime::{Constraint, Program};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use words::Word;

/// Limit of a grammar's file: written by hand.
const FILE: regular::Limit = regular::Limit { what: "a grammar", bytes: 4 << 20 };

/// Grammar of an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Grammar {
    /// A grammar in llguidance's variant of Lark.
    Lark(String),
    /// JSON that fits a schema.
    Schema(serde_json::Value),
    /// All of it matches a regular expression, in the syntax of Rust's.
    Regex(String),
}

impl Grammar {
    /// Kind, for messages.
    fn kind(&self) -> &'static str {
        match self {
            Self::Lark(_) => "grammar",
            Self::Schema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
        }
    }
}

/// Options for a grammar.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Grammar")]
pub struct GrammarArgs {
    /// Constrain output to the grammar in this file, in llguidance's variant of Lark
    #[arg(long, value_name = "FILE", group = "held")]
    pub grammar: Option<std::path::PathBuf>,
    /// Constrain output to the JSON schema in this file
    #[arg(long, value_name = "FILE", group = "held")]
    pub json_schema: Option<std::path::PathBuf>,
    /// Constrain output to this regular expression
    #[arg(long, value_name = "REGEX", group = "held", allow_hyphen_values = true)]
    pub regex: Option<String>,
}

/// The options, for the runtime's `generate`.
pub(crate) const CONSTRAINT_OPTIONS: ConstraintOptions =
    ConstraintOptions { options: GrammarArgs::augment_args, read: forms };

fn forms(
    context: &Context<'_>,
    bundle: &BundleReader,
    matches: &ArgMatches,
) -> std::result::Result<Option<Box<MakeConstraint>>, Failure> {
    let args = GrammarArgs::from_arg_matches(matches).map_err(|e| Failure::Use {
        what: e.to_string(),
        hint: format!("see `{} help generate`", context.name),
    })?;
    let Some(grammar) = args.read()? else { return Ok(None) };
    let grammars = Grammars::open(bundle, context.program)?;
    // An invalid grammar is refused before weights are opened.
    grammars.constraint(&grammar)?;
    let make = move || grammars.constraint(&grammar).map_err(|e| Failed::constraint(e.what));
    Ok(Some(Box::new(make)))
}

impl GrammarArgs {
    /// The grammar that the options name, if any.
    ///
    /// # Errors
    /// A file that cannot be read, or a schema that is not JSON.
    pub fn read(&self) -> Result<Option<Grammar>> {
        let text = |path: &Path| {
            regular::read_text(path, FILE)
                .map_err(|e| Error::new(format!("cannot read `{}`: {e}", path.display())))
        };
        match (&self.grammar, &self.json_schema, &self.regex) {
            (Some(path), ..) => text(path).map(|lark| Some(Grammar::Lark(lark))),
            (_, Some(path), _) => {
                let schema = serde_json::from_str(&text(path)?);
                let schema =
                    schema.map_err(|e| Error::new(format!("`{}` is not valid JSON: {e}", path.display())))?;
                Ok(Some(Grammar::Schema(schema)))
            }
            (.., regex) => Ok(regex.clone().map(Grammar::Regex)),
        }
    }
}

/// Makes constraints for a vocabulary. It is built once, which takes some milliseconds for each thousand
/// tokens.
pub struct Grammars {
    factory: ParserFactory,
}

impl Grammars {
    /// Creates grammars for the vocabulary of a bundle.
    ///
    /// # Errors
    /// No tokenizer, one that was changed after the build, or one whose tokens have no known bytes; a model
    /// without an end token.
    pub fn open(bundle: &BundleReader, program: &Program) -> Result<Self> {
        let bytes = bundle.read(text::FILE, regular::TOKENIZER)?;
        Self::new(&bytes, program.model.vocab as usize, &program.model.eos)
    }

    /// Creates grammars for the vocabulary of a `tokenizer.json`. `vocab`: number of the model's logits;
    /// `ends`: its end tokens.
    ///
    /// # Errors
    /// As [`Grammars::open`].
    pub fn new(tokenizer: &[u8], vocab: usize, ends: &[u32]) -> Result<Self> {
        let unfit = |why: String| Error::new(format!("the tokenizer cannot be used with a grammar: {why}"));
        let json: serde_json::Value = serde_json::from_slice(tokenizer).map_err(|e| unfit(e.to_string()))?;
        let words: Vec<Vec<u8>> = words::words(&json, vocab)?.into_iter().map(marked).collect();
        let first = *ends.first().ok_or_else(|| unfit("the model has no end token".to_owned()))?;
        if ends.iter().any(|&id| id as usize >= vocab) {
            return Err(unfit("an end token is not in the vocabulary".to_owned()));
        }
        let vocab = u32::try_from(vocab).map_err(|e| unfit(e.to_string()))?;
        let trie = TokTrie::from(&TokRxInfo::new(vocab, first), &words).with_eos_tokens(ends);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(|e| unfit(e.to_string()))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(Self { factory })
    }

    /// A constraint for one answer.
    ///
    /// # Errors
    /// A grammar that cannot be read, or is too large.
    pub fn constraint(&self, grammar: &Grammar) -> Result<Box<dyn Constraint>> {
        self.matcher(grammar).map(|(matcher, _)| Box::new(GrammarMatcher(matcher)) as _)
    }

    /// Matcher of one answer, and its first mask.
    ///
    /// # Errors
    /// As [`Grammars::constraint`].
    fn matcher(&self, grammar: &Grammar) -> Result<(Matcher, Vec<u8>)> {
        let top = match grammar {
            Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
            Grammar::Schema(schema) => {
                let mut schema = schema.clone();
                // Small models get stuck in white space of unlimited length between tokens.
                if let Some(of) = schema.as_object_mut() {
                    of.entry("x-guidance")
                        .or_insert_with(|| serde_json::json!({"whitespace_flexible": false}));
                }
                TopLevelGrammar::from_json_schema(schema)
            }
            Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
        };
        let mut matcher = Matcher::new(self.factory.create_parser(top));
        let what = grammar.kind();
        let unusable = |why: &str| Error::new(format!("the {what} cannot be used: {}", reason(why.trim())));
        if let Some(why) = matcher.get_error() {
            return Err(unusable(&why));
        }
        // Errors of the grammar appear with the first mask.
        let mask = mask(&mut matcher).map_err(|why| unusable(&why))?;
        Ok((matcher, mask))
    }
}

/// Reason that a grammar cannot be used, if the library reports only the name of a state.
fn reason(why: &str) -> &str {
    match why {
        _ if why.contains("NoExtension") => {
            "no text fits it; a rule or a `$ref` that leads to itself alone has no end"
        }
        _ if why.contains("LexerTooComplex") => "its patterns are too complex",
        _ if why.contains("ParserTooComplex") => {
            "its rules are too complex, or have too many alternatives at a time"
        }
        why => why,
    }
}

/// The tokens that may come next, as a bit mask, the lowest bit of the first byte first.
fn mask(matcher: &mut Matcher) -> std::result::Result<Vec<u8>, String> {
    let mask = matcher.compute_mask_or_eos().map_err(|e| e.to_string())?;
    Ok(mask.as_slice().iter().flat_map(|word| word.to_le_bytes()).collect())
}

/// Sets the logits of tokens outside a [`mask`] to −∞.
fn apply(mask: &[u8], logits: &mut [f32]) {
    for (id, logit) in logits.iter_mut().enumerate() {
        if mask.get(id / 8).is_none_or(|byte| byte >> (id % 8) & 1 != 1) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// A token in the trie's format: special tokens have a prefix that no text has.
fn marked(word: Word) -> Vec<u8> {
    word.special.then_some(TokTrie::SPECIAL_TOKEN_MARKER).into_iter().chain(word.bytes).collect()
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").finish_non_exhaustive()
    }
}

/// Constraint of an answer by a grammar.
struct GrammarMatcher(Matcher);

impl Constraint for GrammarMatcher {
    fn mask(&mut self, logits: &mut [f32]) -> moec_runtime::Result<()> {
        apply(&mask(&mut self.0).map_err(Failed::constraint)?, logits);
        Ok(())
    }

    fn accept(&mut self, id: u32) -> moec_runtime::Result<()> {
        self.0.consume_token(id).map_err(Failed::constraint)
    }

    fn ended(&self) -> bool {
        self.0.is_stopped()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use moec_runtime::{Sampler, Sampling};
    use serde_json::json;

    /// Logits of a model of [`tokenizer`], and its end token.
    pub(crate) const VOCAB: usize = 130;
    pub(crate) const END: u32 = 128;

    /// A tokenizer of bytes, with `</s>` after them.
    pub(crate) fn tokenizer() -> String {
        let spelled = |b: u32| {
            char::from_u32(b).filter(char::is_ascii_graphic).map_or(format!("<0x{b:02X}>"), String::from)
        };
        let vocab: serde_json::Map<String, serde_json::Value> =
            (0..128u32).map(|b| (spelled(b), b.into())).collect();
        let end = json!({"id": END, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true});
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "ByteFallback"},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        });
        tokenizer.to_string()
    }

    fn bytes() -> (Grammars, u32) {
        (Grammars::new(tokenizer().as_bytes(), VOCAB, &[END]).unwrap(), END)
    }

    /// Text that is sampled from logits that prefer other tokens.
    fn sampled(grammar: &Grammar, seed: u64) -> String {
        let (grammars, end) = bytes();
        let sampling = Sampling { temperature: 1.0, seed, ..Sampling::GREEDY };
        let mut sampler = Sampler::new(sampling).constrained(grammars.constraint(grammar).unwrap());
        let mut text = String::new();
        while !sampler.ended() && text.len() < 400 {
            match sampler.sample(&[0.0; 130]).unwrap() {
                id if id == end => break,
                id => text.push(char::from_u32(id).unwrap()),
            }
        }
        text
    }

    #[test]
    fn constrained_answers_match_their_grammar() {
        for seed in 0..5 {
            let text = sampled(&Grammar::Regex("[a-c]{3}-[0-9]{2}".to_owned()), seed);
            assert!(text.len() == 6 && text.as_bytes()[3] == b'-', "{text}");
            let text = sampled(&Grammar::Lark("start: \"yes\" | \"no\"".to_owned()), seed);
            assert!(["yes", "no"].contains(&&*text), "{text}");
            let schema = json!({"type": "object", "properties": {"n": {"enum": [1, 20]}, "ok": {"type": "boolean"}},
                "required": ["n", "ok"], "additionalProperties": false});
            let text = sampled(&Grammar::Schema(schema), seed);
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert!(value["ok"].is_boolean() && [1, 20].contains(&value["n"].as_i64().unwrap()), "{text}");
        }
    }

    #[test]
    fn invalid_grammars_are_rejected() {
        let (grammars, _) = bytes();
        for (grammar, what) in [
            (Grammar::Regex("(".to_owned()), "regular expression"),
            (Grammar::Lark("start: nothing".to_owned()), "grammar"),
            (Grammar::Schema(json!({"type": "no such"})), "JSON schema"),
            (Grammar::Schema(json!({"$ref": "#"})), "no text fits it"),
            (Grammar::Lark("start: start".to_owned()), "no text fits it"),
        ] {
            let e = grammars.constraint(&grammar).err().unwrap();
            assert!(e.what.contains(what), "{e}");
        }
    }
}
