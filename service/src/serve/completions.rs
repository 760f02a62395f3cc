//! `/v1/completions`: continuations of texts.

use super::Server;
use super::answers::{Answers, Piece, encode};
use super::body::Body;
use super::error::{Answer, ApiError};
use super::fields::{Fields, wrong};
use super::names::{Names, name};
use super::request::Options;
use super::stream::{ResponseFormat, answer};
use axum::response::Response;
use moec_runtime::Text;
use moec_runtime::serving::sampler::{LogProbabilities, MAX_TOP_LOGPROBS};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Maximum number of prompts of a request.
const MAX_PROMPTS: usize = 64;

/// Answers a request.
///
/// # Errors
/// Invalid fields, or a prompt that does not fit.
pub(super) async fn complete(server: Arc<Server>, body: Body) -> Answer<Response> {
    let CompletionRequest { text, prompts, mut options } = read(&server, &body.value).await?;
    options.record = Arc::clone(&body.record);
    drop(body);
    let (id, seed) = (server.name("cmpl"), options.sampling.seed);
    let format = Completion { id, created: super::now(), model: server.model.clone(), seed };
    answer(server, text, prompts, options, Vec::new(), format).await
}

/// Parsed request.
pub(super) struct CompletionRequest {
    text: Arc<Text>,
    pub(super) prompts: Vec<Vec<u32>>,
    pub(super) options: Options,
}

/// Reads a request.
///
/// # Errors
/// Invalid fields, or a prompt that does not fit.
pub(super) async fn read(server: &Server, body: &Value) -> Answer<CompletionRequest> {
    let fields = Fields::of(body, "the body")?;
    let text = server.text()?;
    if fields.get("suffix").is_some_and(|v| *v != Value::String(String::new())) {
        let message = "`suffix` is not supported; hint: leave it out";
        return Err(ApiError::bad("suffix", message).code("unsupported_parameter"));
    }
    let mut options = Options::read(fields, server, fields.boolean("echo")?)?;
    options.sampling.log_probabilities = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)?;
    if let Some(best_of) = fields.integer("best_of", 1, server.slots)?
        && best_of != options.n
    {
        let message = "`best_of` must equal `n`; hint: leave it out";
        return Err(ApiError::bad("best_of", message).code("unsupported_parameter"));
    }
    // OpenAI's default for this endpoint.
    options.tokens = options.tokens.or(Some(16));
    // The model computes the prompt together with the choice of a token after it.
    options.prompt_only = options.tokens == Some(0);
    options.tokens = options.tokens.map(|n| n.max(1));
    options.continues_prompt = true;
    let prompts = prompts(fields, server, &text).await?;
    Ok(CompletionRequest { text, prompts, options })
}

/// The prompts: a text, ids, or several of either.
async fn prompts(fields: Fields<'_>, server: &Server, text: &Arc<Text>) -> Answer<Vec<Vec<u32>>> {
    let kind = "a string, an array of token ids, or an array of either";
    let value = fields.get("prompt").ok_or_else(|| ApiError::bad("prompt", "`prompt` is missing"))?;
    let single = |value: &Value| match value {
        Value::String(_) => true,
        Value::Array(ids) => ids.first().is_none_or(Value::is_number),
        _ => false,
    };
    let all: Vec<&Value> = match value {
        Value::Array(many) if !single(value) => many.iter().collect(),
        one => vec![one],
    };
    if all.len() > MAX_PROMPTS {
        return Err(ApiError::bad("prompt", format!("a request has at most {MAX_PROMPTS} prompts")));
    }
    let mut out = Vec::new();
    for value in all {
        out.push(match value {
            Value::String(one) => encode(server, text, one.clone()).await?,
            Value::Array(ids) => {
                let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
                let ids: Option<Vec<u32>> = ids.iter().map(id).collect();
                ids.ok_or_else(|| wrong("prompt", kind, value))?
            }
            other => return Err(wrong("prompt", kind, other)),
        });
    }
    match out.iter().flatten().find(|&&id| id >= server.vocab) {
        Some(&id) => Err(moec_runtime::Error::bad_id(id, server.vocab).into()),
        None => Ok(out),
    }
}

/// Format of its responses.
struct Completion {
    id: String,
    created: u64,
    model: String,
    seed: u64,
}

impl Completion {
    fn object(&self, choices: Vec<Value>) -> Value {
        json!({"id": self.id, "object": "text_completion", "created": self.created, "model": self.model, "seed": self.seed,
            "choices": choices})
    }
}

impl ResponseFormat for Completion {
    fn piece(&mut self, piece: &Piece, names: &Names) -> Option<Value> {
        let log_probabilities = of_piece(piece, names);
        let choice = json!({
            "index": piece.choice,
            "text": piece.text,
            "logprobs": log_probabilities,
            "finish_reason": piece.finish,
        });
        Some(self.object(vec![choice]))
    }

    fn whole(&mut self, pieces: Vec<Vec<Piece>>, answers: &Answers<'_>, names: &Names) -> Value {
        let choice = |(index, pieces): (usize, Vec<Piece>)| {
            let all: String = pieces.iter().map(|p| p.text.as_str()).collect();
            let mut lists: Option<Value> = None;
            for piece in &pieces {
                if let Some(lists_of) = of_piece(piece, names) {
                    join(lists.get_or_insert_with(|| json!({})), lists_of);
                }
            }
            let finish = pieces.last().and_then(|p| p.finish);
            json!({"index": index, "text": all, "logprobs": lists, "finish_reason": finish})
        };
        let choices = pieces.into_iter().enumerate().map(choice).collect();
        let mut object = self.object(choices);
        object["usage"] = answers.usage.json();
        object
    }

    fn last(&mut self, answers: &Answers<'_>) -> Value {
        let mut object = self.object(Vec::new());
        object["usage"] = answers.usage.json();
        object
    }
}

/// Log-probabilities at a piece's token, as lists with one entry. The first token of a prompt has none.
fn of_piece(piece: &Piece, names: &Names) -> Option<Value> {
    let first = |id: u32| json!({"tokens": [name(&names.bytes(id))], "token_logprobs": [null], "top_logprobs": [null], "text_offset": [piece.offset]});
    let token = piece.log_probabilities.as_ref().map(|l| of_token(l, piece.offset, names));
    token.or_else(|| piece.first.map(first))
}

/// Log-probabilities of a token, as lists with one entry.
fn of_token(l: &LogProbabilities, offset: usize, names: &Names) -> Value {
    let mut top = Map::new();
    for &(id, p) in &l.most_probable {
        let mut key = name(&names.bytes(id));
        if top.contains_key(&key) {
            // Several tokens may have the same text.
            key = format!("token_id:{id}");
        }
        top.insert(key, json!(p));
    }
    json!({
        "tokens": [name(&names.bytes(l.id))],
        "token_logprobs": [l.chosen],
        "top_logprobs": [top],
        "text_offset": [offset],
    })
}

/// Appends lists to the lists of the same names.
fn join(lists: &mut Value, more: Value) {
    let (Some(lists), Value::Object(more)) = (lists.as_object_mut(), more) else { return };
    for (name, mut list) in more {
        let to = lists.entry(name).or_insert_with(|| json!([]));
        if let (Some(to), Some(list)) = (to.as_array_mut(), list.as_array_mut()) {
            to.append(list);
        }
    }
}
