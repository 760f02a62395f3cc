//! Refused requests, and the hosts and origins that are answered.

use crate::clients::{CHAT, COMPLETIONS};
use crate::server::{POST, ReplyExt as _, complete, expected, send};
use moec_testing::http::{bare, get, post, raw, text};
use serde_json::{Value, json};
use std::net::TcpStream;

pub(crate) fn refusals(at: &str) {
    let of = |body: Value| {
        let reply = complete(at, &body);
        (reply.status, reply.json()["error"].clone())
    };
    let cases = [
        (json!({"prompt": "a", "temperature": "hot"}), 400, "temperature", "must be a number"),
        (
            json!({"prompt": "a", "temperature": 9}),
            400,
            "temperature",
            "temperature must be from 0 to 2, not 9",
        ),
        (json!({"prompt": "a", "top_p": 0}), 400, "top_p", "top_p must be above 0, up to 1"),
        (json!({"prompt": "a", "presence_penalty": 3}), 400, "presence_penalty", "from -2 to 2"),
        (json!({"prompt": "a", "frequency_penalty": -2.1}), 400, "frequency_penalty", "from -2 to 2"),
        (json!({"prompt": "a", "n": 4}), 400, "n", "from 1 to 3"),
        (json!({"prompt": "a", "stop": 3}), 400, "stop", "array of strings"),
        (json!({"prompt": "a", "stop": ["b", "é".repeat(129)]}), 400, "stop", "hint: each may have 256"),
        (json!({"prompt": "a", "echo": 1}), 400, "echo", "true or false"),
        (json!({"prompt": "a", "suffix": "b"}), 400, "suffix", "not supported"),
        (json!({"prompt": "a", "logprobs": 21}), 400, "logprobs", "from 0 to 20"),
        (json!({"prompt": "a", "logit_bias": {"x": 1}}), 400, "logit_bias", "token ids"),
        (json!({"prompt": "a", "stream_options": {}}), 400, "stream_options", "for streams"),
        (json!({"prompt": {"a": 1}}), 400, "prompt", "an object"),
        (json!({"prompt": [300]}), 400, "", "outside of the vocabulary"),
        (json!({"prompt": []}), 400, "", "the prompt is empty"),
        (json!({"prompt": "a".repeat(64), "max_tokens": 1}), 400, "", "the context holds 64"),
        (json!({}), 400, "prompt", "missing"),
        (json!([]), 400, "the body", "an object"),
        (json!({"prompt": "a", "model": "gpt-9"}), 404, "model", "this is `toy`"),
    ];
    for (body, status, param, says) in cases {
        let (found, error) = of(body.clone());
        assert_eq!(found, status, "{body} {error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{body} {error}");
        assert_eq!(error["param"].as_str().unwrap_or_default(), param, "{body} {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(!error["message"].as_str().unwrap().contains("`-"), "options are not for clients: {error}");
    }
    // Bodies with a malformed encoding, with invalid JSON, and with too many bytes.
    let chunked = |chunks: &str| {
        let request = format!("{POST}\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}\r\n");
        raw(TcpStream::connect(at).unwrap(), &request).unwrap()
    };
    let reply = chunked("no size");
    assert!(reply.status == 400 && reply.body.contains("cannot be read"), "{}", reply.body);
    assert_eq!(chunked(&format!("1388\r\n{}", "x".repeat(5000))).status, 413);
    let large = send(post(at, COMPLETIONS, "x".repeat(5000)));
    assert!(!large.body.contains("`-"), "{}", large.body);
    assert_eq!(send(post(at, COMPLETIONS, "{")).status, 400);
    assert_eq!(send(text(at, COMPLETIONS, "{}").header("Content-Type", "text/plain")).status, 415);
    assert_eq!(send(get(at, "/v1/completions")).status, 405);
    assert_eq!(send(get(at, "/v2")).status, 404);
    assert_eq!(send(post(at, COMPLETIONS, "x".repeat(5000))).status, 413);
    let chat = send(post(at, CHAT, r#"{"messages": [{"role": "user", "content": "hi"}]}"#));
    assert!(chat.status == 400 && chat.body.contains("template"), "{}", chat.body);
}

/// DNS rebinding: a page whose own name resolves to this machine sends that name as the host.
pub(crate) fn only_this_machine_is_answered(at: &str) {
    for (host, status) in [
        ("Host: localhost:1\r\n", 200),
        ("Host: [::1]\r\n", 200),
        ("Host: a.localhost.:1\r\n", 200),
        ("Host: host.docker.internal:1\r\n", 200),
        ("", 200),
        ("Host: a.example\r\n", 403),
        ("Host: localhost.a.example\r\n", 403),
        ("Host: 10.0.0.1:80\r\n", 403),
        ("Host: localhost\r\nHost: a.example\r\n", 400),
        ("Host: a.example\r\nHost: localhost\r\n", 400),
    ] {
        let stream = TcpStream::connect(at).unwrap();
        let reply = raw(stream, &format!("GET /v1/models HTTP/1.0\r\n{host}\r\n")).unwrap();
        assert_eq!(reply.status, status, "{host}: {}", reply.body);
        assert!(status == 200 || reply.body.contains("`Host`"), "{}", reply.body);
    }
}

pub(crate) fn keys_and_origins(at: &str) {
    let body = json!({"prompt": [1, 2], "max_tokens": 3, "temperature": 0});
    let request = || post(at, COMPLETIONS, &body);
    let with = |key: &str| request().header("Authorization", key);
    for request in [request(), with("Bearer wrong!"), with("secret"), with("Digest secret")] {
        let reply = send(request);
        assert_eq!(
            (reply.status, reply.json()["error"]["type"].as_str()),
            (401, Some("authentication_error"))
        );
    }
    let reply = send(with("Bearer secret"));
    assert_eq!(reply.json()["choices"][0]["text"], expected(&[1, 2], 3).0);
    assert!(reply.headers.contains("access-control-allow-origin: https://a.example"), "{}", reply.headers);
    // Schemes and media types are case-insensitive.
    let request = text(at, COMPLETIONS, &body.to_string()).header("Authorization", "bearer secret");
    let reply = send(request.header("Content-Type", "Application/JSON; charset=UTF-8"));
    assert_eq!(reply.status, 200, "{}", reply.body);
    for (origin, allows) in [
        ("", "authorization, content-type"),
        ("https://a.example", "x-stainless-os"),
        ("https://b.example", "authorization"),
    ] {
        let mut request = bare("OPTIONS", at, COMPLETIONS);
        if !origin.is_empty() {
            request =
                request.header("Origin", origin).header("Access-Control-Request-Headers", "x-stainless-os");
        }
        let reply = send(request);
        assert_eq!(reply.status, 204);
        let allowed = format!("access-control-allow-headers: {allows}");
        assert!(reply.headers.contains(&allowed), "{}", reply.headers);
    }
    // With a key any host is accepted, but the limits on bodies apply.
    let many = format!("{{\"prompt\": [{}0]}}", "0,".repeat(200_000));
    let reply = send(post(at, COMPLETIONS, many).header("Authorization", "Bearer secret"));
    assert!(reply.status == 400 && reply.body.contains("more than 200000 values"), "{}", reply.body);
    assert_eq!(send(get(at, "/health")).status, 200);
    assert_eq!(send(get(at, "/metrics")).status, 401);
}
