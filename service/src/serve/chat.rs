//! `/v1/chat/completions`: conversations.

use super::Server;
use super::error::{Answer, ApiError};
use axum::response::Response;
use serde_json::Value;
use std::sync::Arc;

/// Whether the model has a template.
pub(super) fn is_ready(_server: &Server) -> bool {
    false
}

/// Answers a request.
///
/// # Errors
/// There is no template.
pub(super) async fn complete(_server: Arc<Server>, _body: &Value) -> Answer<Response> {
    let message = "this model has no chat template; hint: use `/v1/completions`";
    Err(ApiError::new(axum::http::StatusCode::BAD_REQUEST, message).code("no_chat_template"))
}
