//! Reader of requests as in the server, without an engine: for fuzzing.

use super::constraints::Constraints;
use super::error::Answer;
use super::metrics::Metrics;
use super::{Server, body, chat, completions, cores};
use crate::grammar::remote::Workers;
use crate::template::Templates;
use moec_runtime::{Memory, Sampling, Text};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A server's reader of requests.
pub struct Requests {
    server: Arc<Server>,
    runtime: tokio::runtime::Runtime,
}

/// Work of the engine for a request: prompts in tokens, and the number of tokens that may follow each.
pub type RequestPrompts = Vec<(Vec<u32>, usize)>;

impl Requests {
    /// Creates a reader for a model with this vocabulary and context, with a tokenizer (`tokenizer.json`) and
    /// a chat template.
    ///
    /// # Errors
    /// The tokenizer cannot be used.
    pub fn new(tokenizer: &[u8], template: &str, vocab: u32, context: usize) -> Result<Self, String> {
        let text = Text::parse(tokenizer, None)?.at_most(context, vocab);
        let templates = Templates::new([("default".to_owned(), template.to_owned())].into(), BTreeMap::new());
        let tokenizer: Arc<[u8]> = tokenizer.into();
        let workers =
            Workers::new(Arc::clone(&tokenizer), vocab as usize, Vec::new()).map_err(|e| e.to_string())?;
        let constraints = Constraints::new(workers, 4, 0);
        let server = Server {
            model: "model".to_owned(),
            started: 0,
            context,
            slots: 4,
            vocab,
            eos: Vec::new(),
            sampling: Sampling { temperature: 1.0, ..Sampling::GREEDY },
            text: Ok(Arc::new(text)),
            tokenizer,
            constraints: Arc::new(constraints),
            words: OnceLock::new(),
            templates: Ok(Some(templates)),
            worker: channel().0,
            metrics: Arc::new(Metrics::new(Memory::default())),
            tickets: AtomicU64::new(0),
            key: None,
            cors: None,
            local: false,
            body: 4 << 20,
            limit: Duration::from_mins(1),
            client_timeout: Duration::from_mins(1),
            draining: false.into(),
            large_bodies: body::large_bodies(),
            cores: cores(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        Ok(Self { server: Arc::new(server), runtime: runtime.map_err(|e| e.to_string())? })
    }

    /// Reads the body of a request for a conversation, or for a continuation of a text.
    ///
    /// # Errors
    /// Status and message of the answer that refuses it.
    pub fn read(&self, conversation: bool, bytes: &[u8]) -> Result<RequestPrompts, (u16, String)> {
        let read = async {
            let body = body::parse(bytes)?;
            let (prompts, options) = if conversation {
                let request = chat::read(&self.server, &body).await?;
                (vec![request.ids], request.options)
            } else {
                let request = completions::read(&self.server, &body).await?;
                (request.prompts, request.options)
            };
            let room = |prompt: Vec<u32>| {
                let n = options.room(prompt.len(), self.server.context)?;
                Ok((prompt, n))
            };
            prompts.into_iter().map(room).collect::<Answer<RequestPrompts>>()
        };
        self.runtime.block_on(read).map_err(|e| (e.status.as_u16(), e.message))
    }
}
