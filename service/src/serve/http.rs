//! Routes, and access checks.

use super::body::{self, Body};
use super::connections::{Connections, Limits, WriteTimeout};
use super::error::{Answer, ApiError};
use super::log::log;
use super::worker::Command;
use super::{Server, Signals};
use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use moec_runtime::cli::interrupt;
use serde_json::{Value, json};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::time::Instant;

/// Maximum bytes of a request's head, and of the parts of a body or an answer that a connection buffers.
const HEAD: usize = 64 << 10;
/// Names of this machine, in addition to those under `localhost` (RFC 6761, §6.3); Docker has one for
/// requests from a container. An attacker can register none of them.
const LOCAL: [&str; 2] = ["localhost", "host.docker.internal"];
/// Paths that need no key.
const OPEN: [&str; 4] = ["/", "/health", "/health/live", "/health/ready"];
/// The page to talk to the model.
const PAGE: &str = include_str!("page.html");
/// Sources that the page may load: nothing but itself.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
                           img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Serves until a signal comes, and for `drain` after it; then finishes the requests in progress, or stops at
/// another signal.
///
/// # Errors
/// The listener cannot be used.
pub(super) async fn serve(
    listener: std::net::TcpListener,
    server: Arc<Server>,
    limits: Limits,
    drain: Duration,
    mut signals: Signals,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let app = TowerToHyperService::new(routes(Arc::clone(&server)));
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(server.client_timeout).max_buf_size(HEAD);
    let graceful = GracefulShutdown::new();
    let connections = Connections::new(limits);
    let mut end = None;
    loop {
        let drained = async {
            match end {
                Some(end) => tokio::time::sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = drained => break,
            () = signals.next() => {
                if server.draining.swap(true, Ordering::Relaxed) || drain.is_zero() {
                    break;
                }
                end = Some(Instant::now() + drain);
                continue;
            }
        };
        let Ok((stream, from)) = accepted else {
            // For example too many open files: others may be closed meanwhile.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let admission = match connections.admit(from.ip()) {
            Ok(admission) => admission,
            Err(why) => {
                connections.refuse(stream, &why);
                continue;
            }
        };
        // Tokens are small and needed at once. If this fails, they still arrive.
        let _ = stream.set_nodelay(true);
        let stream = WriteTimeout::new(stream, server.client_timeout);
        let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), app.clone()));
        tokio::spawn(async move {
            // A client that breaks off does not concern others.
            let _ = connection.await;
            drop(admission);
        });
    }
    drop(listener);
    // Idle connections, such as those that browsers open ahead, are closed at once.
    // Every answer has its limit: a connection that stays open after it is one that no client reads.
    let limit = server.limit + 2 * server.client_timeout;
    tokio::select! {
        () = graceful.shutdown() => {}
        () = tokio::time::sleep(limit) => {}
        () = signals.next() => {
            interrupt::flag().store(true, Ordering::Relaxed);
            // It may wait for a command, or have ended by itself.
            let _ = server.worker.send(Command::End);
        }
    }
    Ok(())
}

fn routes(server: Arc<Server>) -> Router {
    let guarded = from_fn_with_state(Arc::clone(&server), guard);
    Router::new()
        .route("/", get(page))
        .route("/health", get(ready))
        .route("/health/ready", get(ready))
        .route("/health/live", get(|| async { axum::Json(json!({"status": "ok"})) }))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "unknown endpoint").code("unknown_url") })
        .method_not_allowed_fallback(|| async {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method not allowed")
        })
        .layer(guarded)
        .layer(from_fn(log))
        .with_state(server)
}

/// Refuses requests of clients without access, or from origins without access.
async fn guard(State(server): State<Arc<Server>>, request: Request, next: Next) -> Response {
    let is_preflight = request.method() == Method::OPTIONS && server.cors.is_some();
    let path = request.uri().path();
    let open = is_preflight || OPEN.contains(&path);
    let cors = server.cors.as_ref().and_then(|origin| cors_headers(origin, request.headers()));
    let mut response = if request.headers().get_all(header::HOST).iter().nth(1).is_some() {
        let message = "the request has more than one `Host`; hint: send one";
        ApiError::new(StatusCode::BAD_REQUEST, message).code("several_hosts").into_response()
    } else if server.local && !is_local(request.headers()) {
        let message = "a server at a loopback address answers only to `localhost`, names under it, `host.docker.internal` and loopback addresses, so that no \
                       page reaches it by a name of its own; hint: send one of these as `Host`";
        ApiError::new(StatusCode::FORBIDDEN, message).code("unknown_host").into_response()
    } else if !open && !is_allowed(&server, request.headers()) {
        let message = "missing or invalid API key; hint: send `Authorization: Bearer KEY`";
        ApiError::new(StatusCode::UNAUTHORIZED, message).code("invalid_api_key").into_response()
    } else if is_preflight {
        StatusCode::NO_CONTENT.into_response()
    } else {
        next.run(request).await
    };
    if server.draining.load(Ordering::Relaxed) {
        // The next request of this client comes by another connection, which a load balancer sends elsewhere.
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    if let Some(origin) = &server.cors {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
        let allowed = cors.unwrap_or(HeaderValue::from_static("authorization, content-type"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, allowed);
        let vary = HeaderValue::from_static("origin, access-control-request-headers");
        headers.insert(header::VARY, vary);
    }
    response
}

/// The headers that a page of `origin` asks to send in a preflight: clients have some of their own.
fn cors_headers(origin: &HeaderValue, headers: &HeaderMap) -> Option<HeaderValue> {
    let allowed = origin == "*" || headers.get(header::ORIGIN) == Some(origin);
    headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).filter(|_| allowed).cloned()
}

/// Whether a request names this machine. A page with a name that was made to resolve to this machine sends
/// that name; a request without a name is not from a browser.
fn is_local(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST) else { return true };
    let Ok(host) = Authority::try_from(host.as_bytes()) else { return false };
    let name = host.host().trim_matches(['[', ']']).to_ascii_lowercase();
    // A dot at the end marks a fully qualified name.
    let name = name.strip_suffix('.').unwrap_or(&name);
    let local = LOCAL.contains(&name) || name.ends_with(".localhost");
    local || name.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// Whether a request has the key, if one is required. The comparison takes the same time wherever the keys
/// differ. The scheme before the key is case-insensitive (RFC 9110, §11.1).
fn is_allowed(server: &Server, headers: &HeaderMap) -> bool {
    const SCHEME: &[u8] = b"Bearer ";
    let Some(key) = &server.key else { return true };
    let found = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let parts = found.and_then(|f| f.split_at_checked(SCHEME.len()));
    let Some((_, found)) = parts.filter(|(scheme, _)| scheme.eq_ignore_ascii_case(SCHEME)) else {
        return false;
    };
    let differ = found.iter().zip(key.bytes()).fold(0, |d, (a, b)| d | (a ^ b));
    found.len() == key.len() && differ == 0
}

async fn page() -> impl IntoResponse {
    ([(header::CONTENT_SECURITY_POLICY, PAGE_POLICY)], Html(PAGE))
}

/// Whether requests should come here: not to a server that ends soon.
async fn ready(State(server): State<Arc<Server>>) -> impl IntoResponse {
    let draining = server.draining.load(Ordering::Relaxed);
    let (status, word) =
        if draining { (StatusCode::SERVICE_UNAVAILABLE, "draining") } else { (StatusCode::OK, "ok") };
    (status, axum::Json(json!({"status": word})))
}

async fn metrics(State(server): State<Arc<Server>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], server.metrics.text())
}

async fn models(State(server): State<Arc<Server>>) -> axum::Json<Value> {
    axum::Json(json!({"object": "list", "data": [described(&server)]}))
}

async fn model(State(server): State<Arc<Server>>, Path(id): Path<String>) -> Answer<axum::Json<Value>> {
    if id == server.model {
        return Ok(axum::Json(described(&server)));
    }
    let message = format!("there is no model `{id}` here; hint: this is `{}`", server.model);
    Err(ApiError::new(StatusCode::NOT_FOUND, message).code("model_not_found"))
}

/// The model in the format of OpenAI's list, with vLLM's `max_model_len`.
fn described(server: &Server) -> Value {
    json!({
        "id": server.model,
        "object": "model",
        "created": server.started,
        "owned_by": "moec",
        "max_model_len": server.context,
        "chat": server.has_chat(),
    })
}

async fn completions(State(server): State<Arc<Server>>, request: Request) -> Answer<Response> {
    let body: Body = body::read(&server, request).await?;
    super::completions::complete(server, body).await
}

async fn chat(State(server): State<Arc<Server>>, request: Request) -> Answer<Response> {
    let body: Body = body::read(&server, request).await?;
    super::chat::complete(server, body).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_local_host_are_recognized() {
        let with = |host: &'static str| -> HeaderMap {
            [(header::HOST, HeaderValue::from_static(host))].into_iter().collect()
        };
        assert!(is_local(&HeaderMap::new()));
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "localhost.",
            "a.localhost",
            "a.b.LocalHost.:80",
            "host.docker.internal",
            "Host.Docker.Internal.:8080",
            "127.0.0.1",
            "127.8.0.1:80",
            "[::1]",
            "[::1]:8080",
        ] {
            assert!(is_local(&with(host)), "{host}");
        }
        for host in [
            "a.example:8080",
            "localhost.a.example",
            "notlocalhost",
            "localhost..",
            "a.host.docker.internal",
            "docker.internal",
            "127.0.0.1.a.example",
            "10.0.0.1",
            "",
            ".",
            "[::2]:1",
        ] {
            assert!(!is_local(&with(host)), "{host}");
        }
    }
}
