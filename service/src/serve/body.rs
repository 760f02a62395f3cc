//! Request bodies: JSON, with limits on bytes, values and time. Only a few large ones are read and answered
//! at a time.

use super::Server;
use super::error::{Answer, ApiError};
use super::log::Record;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use hyper::body::Body as _;
use moec_runtime::platform::memory;
use serde_json::Value;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Maximum number of JSON values in a body, including those in arguments of calls; each takes many times its
/// bytes.
const VALUES: usize = 200_000;
/// Number of bytes from which on a body is large.
const LARGE: u64 = 64 << 10;
/// Maximum number of large bodies at a time; each takes many times its bytes until its prompts are encoded.
const LARGE_AT_ONCE: usize = 8;

/// Permits for large bodies.
pub(super) fn large_bodies() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(LARGE_AT_ONCE))
}

/// A body, until its prompts are encoded.
pub(super) struct Body {
    pub(super) value: Value,
    /// Log record of its request.
    pub(super) record: Arc<Record>,
    // Dropped after the value, so that its memory is free by then.
    _large: Option<LargeBody>,
}

/// Permit for a large body. When it is dropped, the memory of the body is released.
struct LargeBody(Option<OwnedSemaphorePermit>);

impl Drop for LargeBody {
    fn drop(&mut self) {
        let permit = self.0.take();
        let give_back = move || {
            memory::give_back_freed();
            drop(permit);
        };
        // It takes some milliseconds, for which connections do not wait.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(give_back)),
            Err(_) => give_back(),
        }
    }
}

/// Reads a JSON body. A content type that a page of another origin can send without a preflight is not JSON.
pub(super) async fn read(server: &Server, request: Request) -> Answer<Body> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|t| t.to_str().ok()).unwrap_or_default();
    if !kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json") {
        let message = "the body must be JSON; hint: send `Content-Type: application/json`";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    let large = || {
        let message = format!("the body is larger than {} bytes, the limit of this server", server.body);
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    let record = request.extensions().get::<Arc<Record>>().cloned().unwrap_or_default();
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|l| l.to_str().ok());
    let length: Option<u64> = length.and_then(|l| l.parse().ok());
    if length.is_some_and(|l| l > server.body as u64) {
        return Err(large());
    }
    // A body without a stated length may be large.
    let large_body = if length.is_none_or(|length| length > LARGE) {
        let permit = timeout(server.client_timeout, Arc::clone(&server.large_bodies).acquire_owned()).await;
        let busy = || {
            let message = format!(
                "{LARGE_AT_ONCE} other requests of more than {LARGE} bytes are being read; hint: try again soon"
            );
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).code("busy")
        };
        Some(LargeBody(Some(permit.ok().and_then(Result::ok).ok_or_else(busy)?)))
    } else {
        None
    };
    let late = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body was not received in time");
    let read = bytes(request.into_body(), server.body, large);
    let bytes = timeout(server.client_timeout, read).await.map_err(late)??;
    let value =
        if large_body.is_some() { server.on_core(move || parse(&bytes)).await?? } else { parse(&bytes)? };
    Ok(Body { value, record, _large: large_body })
}

/// The bytes of a body.
///
/// # Errors
/// `large()` for more than `most`; a body whose transfer breaks off, or is malformed.
async fn bytes(mut body: axum::body::Body, most: usize, large: impl Fn() -> ApiError) -> Answer<Vec<u8>> {
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let frame = frame
            .map_err(|e| ApiError::new(StatusCode::BAD_REQUEST, format!("the body cannot be read: {e}")))?;
        // Trailers are not needed.
        let Ok(data) = frame.into_data() else { continue };
        if data.len() > most - bytes.len() {
            return Err(large());
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

/// The JSON of a body. `serde_json` bounds its depth: 127 arrays or objects in each other.
///
/// # Errors
/// Invalid JSON, or too many values.
pub(super) fn parse(bytes: &[u8]) -> Answer<Value> {
    let mut count = values(bytes);
    fits(count)?;
    let body: Value = serde_json::from_slice(bytes).map_err(|e| {
        ApiError::new(StatusCode::BAD_REQUEST, format!("the request body is not valid JSON: {e}"))
            .code("invalid_json")
    })?;
    // Text that is parsed as JSON later counts before.
    count += arguments(&body).map(|text| values(text.as_bytes())).sum::<usize>();
    fits(count)?;
    Ok(body)
}

/// Arguments of calls that are texts: they are parsed as JSON, too.
fn arguments(body: &Value) -> impl Iterator<Item = &str> {
    let messages = body["messages"].as_array().into_iter().flatten();
    let calls = messages.flat_map(|message| message["tool_calls"].as_array().into_iter().flatten());
    calls.filter_map(|call| call["function"]["arguments"].as_str())
}

/// Fails if a body has too many values.
fn fits(values: usize) -> Answer<()> {
    if values <= VALUES {
        return Ok(());
    }
    let message = format!("the body has more than {VALUES} values; hint: split it into several requests");
    Err(ApiError::new(StatusCode::BAD_REQUEST, message).code("too_many_values"))
}

/// Approximate number of values and keys in a JSON document: counts opening and separating characters outside
/// of strings.
fn values(json: &[u8]) -> usize {
    let (mut count, mut text, mut escaped) = (1, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if text => escaped = true,
            b'"' => text = !text,
            b'[' | b'{' | b',' | b':' if !text => count += 1,
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn string_arguments_in_a_body_are_found() {
        let call = |arguments: Value| json!({"function": {"name": "f", "arguments": arguments}});
        let body = json!({"messages": [
            {"content": "a", "tool_calls": [call(json!("[1]")), call(json!({"b": 2})), 3]},
            {"tool_calls": {"function": {"arguments": "no list"}}},
            "no message",
            {"tool_calls": [call(json!("{}"))]},
        ]});
        assert_eq!(arguments(&body).collect::<Vec<_>>(), ["[1]", "{}"]);
        assert_eq!(arguments(&json!([])).count(), 0);
    }

    #[test]
    fn deeply_nested_bodies_are_rejected() {
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        assert!(parse(nested(127).as_bytes()).is_ok());
        for depth in [128, 90_000] {
            let refused = parse(nested(depth).as_bytes()).err().unwrap();
            assert!(format!("{refused:?}").contains("recursion limit exceeded"), "{depth}: {refused:?}");
        }
    }

    #[test]
    fn json_values_are_counted_outside_strings() {
        for (json, count) in
            [(r"7", 1), (r"[1, 2]", 3), (r#"{"a,[{:": "b\",,,", "c\\": []}"#, 6), (r#"["\\\"", "[["]"#, 3)]
        {
            assert_eq!(values(json.as_bytes()), count, "{json}");
        }
    }
}
