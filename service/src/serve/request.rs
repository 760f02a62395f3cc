//! Common fields of requests of all endpoints: sampling options, number of tokens, and stop conditions.

use super::Server;
use super::error::{Answer, ApiError};
use super::fields::{Fields, wrong};
use super::log::Record;
use crate::sampling::random_seed;
use moec_runtime::Sampling;
use std::sync::Arc;

/// Maximum number of stop strings.
const MAX_STOPS: usize = 16;
/// Maximum bytes of each.
const MAX_STOP_BYTES: usize = 256;
/// Maximum number of tokens with a bias.
const MAX_BIASES: usize = 1024;

/// Options of answers.
#[derive(Clone, Debug)]
pub(super) struct Options {
    pub(super) sampling: Sampling,
    /// Maximum number of tokens of an answer; `None`: as many as the context leaves.
    pub(super) tokens: Option<usize>,
    /// Number of answers to each prompt.
    pub(super) n: usize,
    /// Strings that end an answer.
    pub(super) stop: Vec<String>,
    /// Whether end tokens do not end an answer.
    pub(super) ignore_eos: bool,
    /// Whether special tokens are written out in texts.
    pub(super) special: bool,
    /// Whether texts continue their prompts, so that a first word has its space; else each is a text of its
    /// own.
    pub(super) continues_prompt: bool,
    /// Whether an answer begins with its prompt.
    pub(super) echo: bool,
    /// Whether it is the prompt alone.
    pub(super) prompt_only: bool,
    pub(super) stream: bool,
    /// Whether the last event of a stream has the usage.
    pub(super) usage: bool,
    /// Log record of the request.
    pub(super) record: Arc<Record>,
}

/// Getter of a number of [`Sampling`], with its name in requests, OpenAI's first.
type Number = (&'static str, fn(&mut Sampling) -> &mut f32);
const NUMBERS: [Number; 7] = [
    ("temperature", |s| &mut s.temperature),
    ("top_p", |s| &mut s.top_p),
    ("presence_penalty", |s| &mut s.presence_penalty),
    ("frequency_penalty", |s| &mut s.frequency_penalty),
    ("min_p", |s| &mut s.min_p),
    ("typical_p", |s| &mut s.typical_p),
    ("repetition_penalty", |s| &mut s.repetition_penalty),
];

impl Options {
    /// Reads the options. `echo`: answers begin with their prompts, and may be these alone.
    ///
    /// # Errors
    /// Values of a wrong type, or out of range.
    pub(super) fn read(fields: Fields<'_>, server: &Server, echo: bool) -> Answer<Self> {
        if let Some(model) = fields.string("model")?.filter(|m| *m != server.model) {
            let message = format!("there is no model `{model}` here; hint: this is `{}`", server.model);
            let mut e = ApiError::new(axum::http::StatusCode::NOT_FOUND, message).code("model_not_found");
            e.param = Some("model".to_owned());
            return Err(e);
        }
        let mut sampling = server.sampling.clone();
        for (name, of) in NUMBERS {
            if let Some(x) = fields.number(name)? {
                *of(&mut sampling) = x;
                sampling.check().map_err(|e| ApiError { param: Some(name.to_owned()), ..e.into() })?;
            }
        }
        sampling.top_k = fields.integer("top_k", 0, u32::MAX as usize)?.unwrap_or(sampling.top_k);
        sampling.bias = biases(fields)?;
        sampling.seed = fields.bits("seed")?.unwrap_or_else(random_seed);
        sampling.check()?;
        sampling.check_ids(server.vocab)?;
        let n = fields.integer("n", 1, server.slots)?.unwrap_or(1);
        let stop = fields.strings("stop")?;
        if stop.len() > MAX_STOPS || stop.iter().any(String::is_empty) {
            let message = format!("`stop` must be at most {MAX_STOPS} strings, none of them empty");
            return Err(ApiError::bad("stop", message));
        }
        if let Some(long) = stop.iter().map(String::len).find(|&bytes| bytes > MAX_STOP_BYTES) {
            let message =
                format!("a string of `stop` has {long} bytes; hint: each may have {MAX_STOP_BYTES} at most");
            return Err(ApiError::bad("stop", message));
        }
        let tokens = |name| fields.integer(name, usize::from(!echo), u32::MAX as usize);
        let tokens = tokens("max_completion_tokens")?.or(tokens("max_tokens")?);
        let stream = fields.boolean("stream")?;
        let of_stream = fields.object("stream_options")?;
        if of_stream.is_some() && !stream {
            let message = "`stream_options` is for streams; hint: set `stream` to true";
            return Err(ApiError::bad("stream_options", message));
        }
        let usage = of_stream.map_or(Ok(false), |o| o.boolean("include_usage"))?;
        let ignore_eos = fields.boolean("ignore_eos")?;
        Ok(Self {
            sampling,
            tokens,
            n,
            stop,
            ignore_eos,
            special: false,
            continues_prompt: false,
            echo,
            prompt_only: false,
            stream,
            usage,
            record: Arc::default(),
        })
    }

    /// Number of the most probable tokens that are requested at each token of the prompt.
    pub(super) fn scores(&self) -> Option<usize> {
        self.sampling.log_probabilities.filter(|_| self.echo)
    }

    /// Number of tokens that may follow a prompt: as many as requested, at most what the context leaves.
    ///
    /// # Errors
    /// There is no room for one.
    pub(super) fn room(&self, prompt: usize, context: usize) -> Answer<usize> {
        if prompt == 0 {
            let message = "the prompt is empty; hint: give a text in `prompt` or `messages`";
            return Err(ApiError::new(axum::http::StatusCode::BAD_REQUEST, message));
        }
        moec_runtime::serving::generate::check_context(prompt, 1, context)?;
        let left = context - prompt;
        Ok(self.tokens.map_or(left, |n| n.min(left)))
    }
}

/// `logit_bias`: from token ids, as strings, to −100 … 100. −100 forbids a token, as in OpenAI's API.
#[expect(clippy::cast_possible_truncation, reason = "logits are f32, and a bias is between -100 and 100")]
fn biases(fields: Fields<'_>) -> Answer<Vec<(u32, f32)>> {
    let name = "logit_bias";
    let Some(biases) = fields.object(name)? else { return Ok(Vec::new()) };
    let mut out = Vec::new();
    for (id, value) in biases.entries() {
        let kind = "an object from token ids to numbers from -100 to 100";
        let bias = value.as_f64().filter(|b| (-100.0..=100.0).contains(b));
        let (Ok(id), Some(bias)) = (id.parse(), bias) else { return Err(wrong(name, kind, value)) };
        out.push((id, if bias <= -100.0 { f32::NEG_INFINITY } else { bias as f32 }));
    }
    if out.len() > MAX_BIASES {
        return Err(ApiError::bad(name, format!("`{name}` may name at most {MAX_BIASES} tokens")));
    }
    Ok(out)
}
