//! Output of answers: as a whole, or as events.

use super::Server;
use super::answers::{Answers, Piece};
use super::error::Answer;
use super::names::Names;
use super::request::Options;
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use hyper::body::{Bytes, Frame};
use moec_runtime::{Constraint, Text};
use serde_json::Value;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Maximum number of events that wait for a slow client.
const EVENTS: usize = 64;

/// Header of a whole response: prompt tokens that were served from the KV cache.
const CACHED: &str = "x-moec-cached-tokens";

/// Format of an endpoint's responses.
pub(super) trait ResponseFormat: Send + 'static {
    /// An event before all others of an answer, if the format has one.
    fn first(&mut self, _choice: usize) -> Option<Value> {
        None
    }

    /// The event of a piece; `None` if the piece has no output yet.
    fn piece(&mut self, piece: &Piece, names: &Names) -> Option<Value>;

    /// Whether an answer is complete in this format, although the model goes on.
    fn is_over(&self, _choice: usize) -> bool {
        false
    }

    /// All answers in one response, from their pieces.
    fn whole(&mut self, pieces: Vec<Vec<Piece>>, answers: &Answers<'_>, names: &Names) -> Value;

    /// The event with the usage.
    fn last(&mut self, answers: &Answers<'_>) -> Value;
}

/// Answers prompts.
///
/// # Errors
/// As [`Answers::submit`]; without streaming, also later errors.
pub(super) async fn answer(
    server: Arc<Server>,
    text: Arc<Text>,
    prompts: Vec<Vec<u32>>,
    options: Options,
    constraints: Vec<Box<dyn Constraint>>,
    mut format: impl ResponseFormat,
) -> Answer<Response> {
    let choices = prompts.len() * options.n;
    let names = Names::of(&server, &text, options.sampling.log_probabilities.is_some()).await?;
    if !options.stream {
        let mut answers = Answers::submit(&server, &text, prompts, &options, constraints).await?;
        let mut pieces: Vec<Vec<Piece>> = (0..choices).map(|_| Vec::new()).collect();
        while let Some(piece) = answers.next().await? {
            pieces[piece.choice].push(piece);
        }
        let cached = [(CACHED, answers.usage.shared.to_string())];
        return Ok((cached, axum::Json(format.whole(pieces, &answers, &names))).into_response());
    }
    let (events, body) = channel(EVENTS);
    // A refused stream has its own status.
    let (taken, refused) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        let mut answers = match Answers::submit(&server, &text, prompts, &options, constraints).await {
            Ok(answers) => answers,
            Err(e) => return drop(taken.send(Err(e))),
        };
        if taken.send(Ok(())).is_err() {
            return;
        }
        tokio::select! {
            // A client that has disconnected waits for nothing: dropping the answers cancels them.
            () = events.closed() => {}
            _ = send(&events, &mut answers, &names, &mut format, choices, options.usage) => {}
        }
    });
    match refused.await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => return Err(e),
        Err(_) => {
            return Err(super::error::ApiError::new(
                axum::http::StatusCode::INTERNAL_SERVER_ERROR,
                "the answer was cancelled",
            ));
        }
    }
    let headers =
        [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
    Ok((headers, Body::new(Events(body))).into_response())
}

/// The client has gone.
struct ClientGone;

/// Sends all events of a stream.
async fn send(
    events: &Sender<Bytes>,
    answers: &mut Answers<'_>,
    names: &Names,
    format: &mut impl ResponseFormat,
    choices: usize,
    usage: bool,
) -> Result<(), ClientGone> {
    for choice in 0..choices {
        if let Some(first) = format.first(choice) {
            event(events, &first).await?;
        }
    }
    loop {
        match answers.next().await {
            Ok(Some(piece)) => {
                if let Some(value) = format.piece(&piece, names) {
                    event(events, &value).await?;
                }
                if format.is_over(piece.choice) {
                    answers.end(piece.choice);
                }
            }
            Ok(None) => break,
            // Its status was sent long before.
            Err(e) => return event(events, &e.json()).await,
        }
    }
    if usage {
        event(events, &format.last(answers)).await?;
    }
    events.send(Bytes::from_static(b"data: [DONE]\n\n")).await.map_err(|_| ClientGone)
}

async fn event(events: &Sender<Bytes>, value: &Value) -> Result<(), ClientGone> {
    events.send(format!("data: {value}\n\n").into()).await.map_err(|_| ClientGone)
}

/// A body of events.
struct Events(Receiver<Bytes>);

impl hyper::body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|event| event.map(|bytes| Ok(Frame::data(bytes))))
    }
}
