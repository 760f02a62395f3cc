//! Conversations, with tools and reasoning.

use crate::clients::CHAT;
use crate::common::*;
use crate::server::{ReplyExt as _, expected, named, send};
use moec_testing::http::{get, post};
use serde_json::{Value, json};

pub(crate) fn conversations(at: &str) {
    let of = |body: &Value| send(post(at, CHAT, body));
    assert_eq!(send(get(at, "/v1/models")).json()["data"][0]["chat"], true);
    let parts = json!([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]);
    for content in [json!("hi"), parts] {
        let mut body = json!({"messages": [{"role": "user", "content": content}], "max_completion_tokens": 12, "temperature": 0,
            "logprobs": true, "top_logprobs": 2});
        let (text, finish) = expected(&[104, 105], 12);
        let value = of(&body).json();
        let choice = &value["choices"][0];
        assert_eq!(
            (&value["object"], &choice["message"]["content"]),
            (&json!("chat.completion"), &json!(text)),
            "{value}"
        );
        assert_eq!(choice["finish_reason"], finish);
        let of_token = &choice["logprobs"]["content"][0];
        assert_eq!(of_token["top_logprobs"].as_array().unwrap().len(), 2);
        let first = continuation(&[104, 105], 1)[0];
        assert_eq!(of_token["token"], named(first));
        assert!(first > 255 || of_token["bytes"] == json!([first]), "{of_token}");
        body["stream"] = json!(true);
        let events = of(&body).event_values();
        assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
        let joined: String =
            events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!((joined, &events.last().unwrap()["choices"][0]["finish_reason"]), (text, &json!(finish)));
    }
    // A JSON schema; tools that must be called; tools that are offered only.
    let messages = json!([{"role": "user", "content": "a"}]);
    let schema =
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab", "cd"]}}});
    let body =
        json!({"messages": messages, "response_format": schema, "temperature": 1.0, "seed": 4, "n": 3});
    let value = of(&body).json();
    for choice in 0..3 {
        let content =
            value["choices"][choice]["message"]["content"].as_str().unwrap_or_else(|| panic!("{value}"));
        assert!(["\"ab\"", "\"cd\""].contains(&content), "{value}");
    }
    let parameters =
        json!({"properties": {"p": {"enum": [7]}}, "required": ["p"], "additionalProperties": false});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let mut body = json!({"messages": messages, "tools": [tool], "tool_choice": "required", "temperature": 0,
        "logit_bias": {"9": -100, "10": -100, "13": -100, "32": -100}});
    let value = of(&body).json();
    let call = &value["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(call["function"], json!({"name": "f", "arguments": r#"{"p":7}"#}), "{value}");
    // Some templates accept only ids of this form.
    let id = call["id"].as_str().unwrap_or_else(|| panic!("{value}"));
    assert!(id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric()), "{id}");
    assert_eq!(value["choices"][0]["finish_reason"], "tool_calls");
    body["stream"] = json!(true);
    let events = of(&body).event_values();
    let deltas: Vec<&Value> = events.iter().map(|e| &e["choices"][0]["delta"]).collect();
    let calls: Vec<&Value> = deltas.iter().filter_map(|d| Some(&d.get("tool_calls")?[0])).collect();
    assert_eq!(calls[0]["function"]["name"], "f", "{events:?}");
    let arguments: String = calls.iter().filter_map(|c| c["function"]["arguments"].as_str()).collect();
    assert!(calls.len() > 3 && arguments == r#"{"p":7}"#, "{events:?}");
    // Only one event, the one with the finish reason, may have an empty delta.
    let empty = events.iter().filter(|e| e["choices"][0]["delta"] == json!({}));
    assert!(empty.clone().count() <= 1 && empty.clone().all(|e| !e["choices"][0]["finish_reason"].is_null()));
    // References in a tool's schema are resolved although that schema is nested in another.
    body["stream"] = json!(false);
    body["tool_choice"] = json!({"type": "function", "function": {"name": "g"}});
    let parameters = json!({"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"],
        "additionalProperties": false, "$defs": {"P": {"anyOf": [{"$ref": "#/$defs/Q"}]}, "Q": {"enum": [7]}}});
    let nested = json!({"type": "function", "function": {"name": "g", "parameters": parameters}});
    body["tools"] = json!([tool, nested]);
    let value = of(&body).json();
    let call = &value["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(call["function"], json!({"name": "g", "arguments": r#"{"p":7}"#}), "{value}");
    let body = json!({"messages": messages, "tools": [tool], "temperature": 0, "max_tokens": 5});
    assert_eq!(
        of(&body).json()["choices"][0]["message"]["content"],
        expected(b"aT".map(u32::from).as_slice(), 5).0
    );
    // Arguments are parsed as JSON, and the limit on values applies to the sum over all calls.
    let arguments = format!("[{}0]", "0,".repeat(120_000));
    let call =
        json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]});
    for (calls, status) in [(1, 200), (2, 400)] {
        let mut many = vec![json!({"role": "user", "content": "a"})];
        many.extend(std::iter::repeat_n(call.clone(), calls));
        let reply = of(&json!({"messages": many, "max_tokens": 1}));
        let refused = reply.body.contains("more than 200000 values");
        assert_eq!((reply.status, refused), (status, status == 400), "{}", reply.body);
    }
    let calls = |calls: Value| json!({"messages": [{"role": "assistant", "tool_calls": calls}]});
    for (body, says) in [
        (calls(json!(7)), "`messages[0]`: `tool_calls` must be an array, not 7"),
        (calls(json!(["x"])), "`messages[0].tool_calls[0]` must be an object"),
        (
            calls(json!([{}, {"function": 3}])),
            "`messages[0].tool_calls[1]`: `function` must be an object, not 3",
        ),
        (json!({}), "at least one"),
        (json!({"messages": [{"content": "a"}]}), "no `role`"),
        (json!({"messages": [{"role": "robot", "content": "a"}]}), "`messages[0].role` is `robot`"),
        (json!({"messages": messages, "tools": [tool], "parallel_tool_calls": 1}), "true or false"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "not text"),
        (json!({"messages": messages, "top_logprobs": 2}), "requires `logprobs`"),
        (json!({"messages": messages, "tools": [{"type": "x"}]}), "tools[0]"),
        (json!({"messages": messages, "tool_choice": "required"}), "no `tools`"),
        (json!({"messages": messages, "tool_choice": {"function": {"name": "g"}}}), "no function `g`"),
        (json!({"messages": messages, "response_format": {"type": "xml"}}), "json_object"),
        (
            json!({"messages": messages, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "q"}}}}),
            "schema",
        ),
        (
            json!({"messages": messages, "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}),
            "no text fits it",
        ),
    ] {
        let reply = of(&body);
        assert!(reply.status == 400 && reply.body.contains(says), "{body}: {}", reply.body);
    }
}

/// If the prompt begins the reasoning, a grammar constrains only the answer.
pub(crate) fn reasoning(at: &str) {
    let of = |body: &Value| send(post(at, CHAT, body)).json()["choices"][0]["message"].clone();
    let mut body = json!({"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 20, "ignore_eos": true});
    let message = of(&body);
    assert!(message["content"] == "" && message["reasoning_content"].is_string(), "{message}");
    body["ignore_eos"] = json!(false);
    body["response_format"] = json!({"type": "json_schema", "json_schema": {"schema": {"const": "<think>"}}});
    let message = of(&body);
    assert!(message["content"] == "\"<think>\"" && message["reasoning_content"].is_null(), "{message}");
}
