//! A line on standard error for each request, where that is wanted.

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
    /// Writer of the lines of the thread that it is the default of.
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

/// Standard error beside its lock, which the thread of the engine holds as long as it runs.
#[cfg(unix)]
fn stderr() -> io::Result<File> {
    use std::os::fd::AsFd as _;
    Ok(io::stderr().as_fd().try_clone_to_owned()?.into())
}

/// Standard error beside its lock, which the thread of the engine holds as long as it runs.
#[cfg(windows)]
fn stderr() -> io::Result<File> {
    use std::os::windows::io::AsHandle as _;
    Ok(io::stderr().as_handle().try_clone_to_owned()?.into())
}

/// Figures of a request, from its handler and from its answers.
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
    /// One more prompt.
    pub(super) fn prompt(&self, tokens: usize) {
        self.prompt_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// So many tokens of a prompt were in a slot already.
    pub(super) fn cached(&self, tokens: usize) {
        self.cached_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// One more token of an answer.
    pub(super) fn token(&self) {
        self.completion_tokens.fetch_add(1, Ordering::Relaxed);
        self.first_token.get_or_init(|| self.start.elapsed());
    }
}

/// Answers a request, and logs it when its answer has gone out.
pub(super) async fn log(mut request: Request, next: Next) -> Response {
    if !tracing::enabled!(Level::INFO) {
        return next.run(request).await;
    }
    let record = Arc::new(Record::default());
    request.extensions_mut().insert(Arc::clone(&record));
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let response = next.run(request).await;
    let status = response.status().as_u16();
    let line = Line { record, method, path, status };
    response.map(|body| Body::new(Logged { body, line }))
}

/// Fields that are logged with its end.
struct Line {
    record: Arc<Record>,
    method: Method,
    path: String,
    status: u16,
}

impl Line {
    fn write(&self, complete: bool) {
        let Self { record, method, path, status } = self;
        let ms = |time: Duration| (time.as_secs_f64() * 1e4).round() / 10.0;
        let prompt = record.prompt_tokens.load(Ordering::Relaxed);
        let cached = record.cached_tokens.load(Ordering::Relaxed);
        let completion = record.completion_tokens.load(Ordering::Relaxed);
        tracing::info!(
            %method,
            path,
            status,
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

/// The body of an answer. It is over when it is dropped: at its end, or where the client has gone away.
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
