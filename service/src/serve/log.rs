//! A line on standard error for each request, if requested.

use super::error::Reason;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use clap::ValueEnum;
use hyper::body::{Body as _, Frame, SizeHint};
use std::fs::File;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tracing::{Dispatch, Level};

/// Format of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// For people.
    Text,
    /// An object of JSON each.
    Json,
}

impl LogFormat {
    /// Creates the writer of lines for threads on which it is the default.
    ///
    /// # Errors
    /// There is no standard error.
    pub(super) fn dispatch(self) -> io::Result<Dispatch> {
        let lines = tracing_subscriber::fmt().with_writer(Mutex::new(stderr()?)).with_target(false);
        Ok(match self {
            Self::Text => lines.into(),
            Self::Json => lines.json().flatten_event(true).with_current_span(false).into(),
        })
    }
}

/// Standard error without its lock, which the engine's thread holds as long as it runs.
#[cfg(unix)]
fn stderr() -> io::Result<File> {
    use std::os::fd::AsFd as _;
    Ok(io::stderr().as_fd().try_clone_to_owned()?.into())
}

/// Standard error without its lock, which the engine's thread holds as long as it runs.
#[cfg(windows)]
fn stderr() -> io::Result<File> {
    use std::os::windows::io::AsHandle as _;
    Ok(io::stderr().as_handle().try_clone_to_owned()?.into())
}

/// Statistics of a request, from its handler and from its answers.
#[derive(Debug)]
pub(super) struct Record {
    start: Instant,
    prompt_tokens: AtomicUsize,
    cached_tokens: AtomicUsize,
    completion_tokens: AtomicUsize,
    first_token: OnceLock<Duration>,
}

impl Default for Record {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            prompt_tokens: AtomicUsize::new(0),
            cached_tokens: AtomicUsize::new(0),
            completion_tokens: AtomicUsize::new(0),
            first_token: OnceLock::new(),
        }
    }
}

impl Record {
    /// Counts a prompt.
    pub(super) fn prompt(&self, tokens: usize) {
        self.prompt_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Counts tokens of a prompt that were in a slot already.
    pub(super) fn cached(&self, tokens: usize) {
        self.cached_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Counts a token of an answer.
    pub(super) fn token(&self) {
        self.completion_tokens.fetch_add(1, Ordering::Relaxed);
        self.first_token.get_or_init(|| self.start.elapsed());
    }
}

/// Answers a request, and logs it after its answer was sent.
pub(super) async fn log(mut request: Request, next: Next) -> Response {
    if !tracing::enabled!(Level::INFO) {
        return next.run(request).await;
    }
    let record = Arc::new(Record::default());
    request.extensions_mut().insert(Arc::clone(&record));
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let response = next.run(request).await;
    let status = response.status().as_u16();
    let error = reason(&response);
    let line = Line { record, method, path, status, error };
    response.map(|body| Body::new(Logged { body, line }))
}

/// Message of an error response.
fn reason(response: &Response) -> Option<String> {
    response.extensions().get().map(|Reason(message)| message.clone())
}

/// Fields that are logged at the end of a request.
struct Line {
    record: Arc<Record>,
    method: Method,
    path: String,
    status: u16,
    /// Message of an error response.
    error: Option<String>,
}

impl Line {
    fn write(&self, complete: bool) {
        let Self { record, method, path, status, error } = self;
        let ms = |time: Duration| (time.as_secs_f64() * 1e4).round() / 10.0;
        let prompt = record.prompt_tokens.load(Ordering::Relaxed);
        let cached = record.cached_tokens.load(Ordering::Relaxed);
        let completion = record.completion_tokens.load(Ordering::Relaxed);
        tracing::info!(
            %method,
            path,
            status,
            error = error.as_deref(),
            prompt_tokens = (prompt > 0).then_some(prompt),
            cached_tokens = (prompt > 0).then_some(cached),
            completion_tokens = (prompt > 0).then_some(completion),
            first_token_ms = record.first_token.get().copied().map(ms),
            total_ms = ms(record.start.elapsed()),
            complete,
            "request"
        );
    }
}

/// The body of an answer. Its request ends when it is dropped: at the end, or if the client has disconnected.
struct Logged {
    body: Body,
    line: Line,
}

impl Drop for Logged {
    fn drop(&mut self) {
        self.line.write(self.body.is_end_stream());
    }
}

impl hyper::body::Body for Logged {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if matches!(frame, Poll::Ready(None)) {
            // It says so from here on.
            self.body = Body::empty();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::super::error::ApiError;
    use super::*;
    use axum::response::IntoResponse as _;
    use std::io::{Read as _, Seek as _};

    #[test]
    fn a_refused_request_is_logged_with_its_reason() {
        for (json, expected) in [(false, r#"error="`n` is wrong""#), (true, r#""error":"`n` is wrong""#)] {
            let mut file = tempfile::tempfile().unwrap();
            let lines = tracing_subscriber::fmt().with_writer(Mutex::new(file.try_clone().unwrap()));
            let dispatch: Dispatch =
                if json { lines.json().flatten_event(true).into() } else { lines.with_ansi(false).into() };
            let refused = ApiError::bad("n", "`n` is wrong").into_response();
            let write = |response: &Response| {
                let (record, method, path) = (Arc::default(), Method::POST, "/v1".to_owned());
                let status = response.status().as_u16();
                Line { record, method, path, status, error: reason(response) }.write(true);
            };
            tracing::dispatcher::with_default(&dispatch, || {
                write(&refused);
                write(&"fine".into_response());
            });
            let mut text = String::new();
            file.rewind().unwrap();
            file.read_to_string(&mut text).unwrap();
            let lines: Vec<&str> = text.lines().collect();
            assert!(lines.len() == 2 && lines[0].contains(expected) && !lines[1].contains("error"), "{text}");
        }
    }
}
