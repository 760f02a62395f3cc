//! Errors in the format of OpenAI's clients: a status, and an object `error` with message, type, parameter
//! and code.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use moec_runtime::{Error, Fault, Limit};
use serde_json::{Value, json};

/// Seconds after which a refused client may try again.
const RETRY_AFTER: &str = "1";

/// An error response.
#[derive(Debug)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    pub(super) message: String,
    /// The field of the request that it is about.
    pub(super) param: Option<String>,
    pub(super) code: Option<&'static str>,
}

/// Message of an error response, for the log.
#[derive(Clone, Debug)]
pub(super) struct Reason(pub(super) String);

/// Result of a request.
pub(super) type Answer<T> = Result<T, ApiError>;

impl ApiError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// An invalid request; `param` is the field.
    pub(super) fn bad(param: &str, message: impl Into<String>) -> Self {
        Self { param: Some(param.to_owned()), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// Prefixes the field with the place of its object.
    pub(super) fn at(self, place: &str) -> Self {
        let param = self.param.map(|param| format!("{place}.{param}"));
        Self { message: format!("`{place}`: {}", self.message), param, ..self }
    }

    pub(super) fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// Whether the client may try again soon.
    fn is_passing(&self) -> bool {
        matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
    }

    /// The raw HTTP response for a connection whose request is not read.
    pub(super) fn http1(&self) -> String {
        let (status, body) = (self.status, self.json().to_string());
        let retry = if self.is_passing() { format!("retry-after: {RETRY_AFTER}\r\n") } else { String::new() };
        let length = body.len();
        format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{retry}content-length: {length}\r\nconnection: close\r\n\r\n{body}"
        )
    }

    /// The object in a body, or in an event of a stream.
    pub(super) fn json(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            s if s.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

/// Remedy for a client, in terms of request fields. Hints that name command-line options are left out.
pub(super) fn hint(own: Option<String>) -> String {
    own.filter(|hint| !hint.contains("`-")).map_or_else(String::new, |hint| format!("; hint: {hint}"))
}

impl From<Error> for ApiError {
    fn from(e: Error) -> Self {
        let hint = hint(match &e {
            Error::Limit { limit: Limit::Context, .. } => Some("shorten `prompt` or `messages`".to_owned()),
            Error::Limit { limit: Limit::Sequences, most, .. } => Some(format!("`n` may be {most} at most")),
            Error::Limit { limit: Limit::Queue, .. } => Some("try again soon".to_owned()),
            e => e.hint(),
        });
        let (status, code) = match &e {
            Error::Limit { limit: Limit::Queue, .. } => (StatusCode::TOO_MANY_REQUESTS, Some("queue_full")),
            Error::Interrupted => (StatusCode::SERVICE_UNAVAILABLE, None),
            Error::Limit { limit: Limit::Context, .. } => {
                (StatusCode::BAD_REQUEST, Some("context_length_exceeded"))
            }
            e if e.fault() == Fault::Request => (StatusCode::BAD_REQUEST, None),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, None),
        };
        Self { code, ..Self::new(status, format!("{e}{hint}")) }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.json())).into_response();
        response.extensions_mut().insert(Reason(self.message.clone()));
        if self.is_passing() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
        }
        response
    }
}
