//! Tests of the tool-call output of each model family, split at every position.

use super::*;
use serde_json::json;

fn parsed(syntax: &'static Syntax, prompt: &str, text: &str, n: usize) -> Vec<Event> {
    pushed(Parser::new(syntax, prompt), text, n)
}

/// Parses the text in pieces of `n` characters; adjacent events of the same kind are joined.
fn pushed(mut parser: Parser, text: &str, n: usize) -> Vec<Event> {
    let chars: Vec<char> = text.chars().collect();
    let mut events: Vec<Event> = Vec::new();
    let pieces = chars.chunks(n).flat_map(|piece| parser.push(&piece.iter().collect::<String>()));
    let mut all: Vec<Event> = pieces.collect();
    all.extend(parser.finish());
    for event in all {
        match (events.last_mut(), event) {
            (Some(Event::Content(text)), Event::Content(more))
            | (Some(Event::Reasoning(text)), Event::Reasoning(more)) => text.push_str(&more),
            (_, event) => events.push(event),
        }
    }
    events
}

fn call(name: &str, arguments: &str) -> Event {
    Event::Call(ToolCall { name: name.to_owned(), arguments: arguments.to_owned(), id: None })
}

/// Like [`call`], with the id that the model gave.
fn called(id: &str, name: &str, arguments: &str) -> Event {
    Event::Call(ToolCall { name: name.to_owned(), arguments: arguments.to_owned(), id: Some(id.to_owned()) })
}

fn content(text: &str) -> Event {
    Event::Content(text.to_owned())
}

fn reasoning(text: &str) -> Event {
    Event::Reasoning(text.to_owned())
}

fn check(name: &str, prompt: &str, text: &str, expected: &[Event]) {
    let syntax = SYNTAXES.iter().find(|s| s.name == name).unwrap();
    for n in [1, 2, 3, 7, 1000] {
        assert_eq!(parsed(syntax, prompt, text, n), expected, "{name}, {n}: {text}");
    }
}

#[test]
fn qwen() {
    let text = "<think>\nhm\n</think>\n\nLook:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"<x>\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\"}\n</tool_call>";
    check(
        "Qwen",
        "",
        text,
        &[reasoning("hm\n"), content("Look:\n"), call("f", r#"{"a": "<x>"}"#), call("g", "{}")],
    );
    check("Qwen", "<think>\n", "so\n</think>\n\n4 < 5 <", &[reasoning("so\n"), content("4 < 5 <")]);
    check("Qwen", "", "<think>cut short", &[reasoning("cut short")]);
}

#[test]
fn mistral() {
    let list =
        "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": [1]}}, {\"name\": \"g\", \"arguments\": {}}]";
    check("Mistral", "", list, &[call("f", r#"{"a": [1]}"#), call("g", "{}")]);
    check(
        "Mistral",
        "",
        "[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g[ARGS]{}",
        &[call("f", r#"{"a": 1}"#), call("g", "{}")],
    );
    let named = r#"[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "a1b2c3d4e"}]"#;
    check("Mistral", "", named, &[called("a1b2c3d4e", "f", "{}")]);
    let with_id = "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{\"a\": 1}[TOOL_CALLS]g[CALL_ID]call_1[ARGS]{}";
    check("Mistral", "", with_id, &[called("a1b2c3d4e", "f", r#"{"a": 1}"#), call("g", "{}")]);
    check("Mistral", "", "[TOOL, [x]", &[content("[TOOL, [x]")]);
}

#[test]
fn deepseek() {
    let v3 = "ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check("DeepSeek", "", v3, &[content("ok"), call("f", r#"{"a": 1}"#)]);
    let v31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(
        "DeepSeek",
        "<think>",
        &format!("hm</think>{v31}"),
        &[reasoning("hm"), call("f", r#"{"a": 1}"#), call("g", "{}")],
    );
}

#[test]
fn glm() {
    let text = "<think>a</think>\n<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Bad Tölz</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>";
    check("GLM-4.5", "", text, &[reasoning("a"), call("f", r#"{"city":"Bad Tölz","n":3}"#)]);
    check("GLM-4.5", "", "<tool_call>now</tool_call>", &[call("now", "{}")]);
}

#[test]
fn qwen_coder() {
    let text = "Look:\n<tool_call>\n<function=f>\n<parameter=a>\n<x>\n\ny\n</parameter>\n<parameter=n>\n3\n</parameter>\n<parameter=yes>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>";
    check(
        "Qwen3-Coder",
        "",
        text,
        &[content("Look:\n"), call("f", r#"{"a":"<x>\n\ny","n":3,"yes":true}"#), call("g", "{}")],
    );
}

#[test]
fn string_arguments_of_declared_tools_stay_strings() {
    let parameters = json!({"properties": {"zip": {"type": "string"}, "n": {"type": "integer"}}});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let tools: Arc<[Value]> = [tool].into();
    let glm = |key: &str, value: &str| format!("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n");
    let coder = |key: &str, value: &str| format!("<parameter={key}>\n{value}\n</parameter>\n");
    let arguments =
        |of: &dyn Fn(&str, &str) -> String| [of("zip", "ZIP"), of("n", "3"), of("more", "4")].concat();
    let texts = [
        ("GLM-4.5", format!("<tool_call>NAME\n{}</tool_call>", arguments(&glm))),
        (
            "Qwen3-Coder",
            format!("<tool_call>\n<function=NAME>\n{}</function>\n</tool_call>", arguments(&coder)),
        ),
    ];
    for (family, text) in texts {
        let syntax = SYNTAXES.iter().find(|s| s.name == family).unwrap();
        for (name, zip, expected) in [
            ("f", "81247", r#"{"zip":"81247","n":3,"more":4}"#),
            ("f", "true", r#"{"zip":"true","n":3,"more":4}"#),
            // An argument that is not declared.
            ("g", "81247", r#"{"zip":81247,"n":3,"more":4}"#),
        ] {
            let mut parser = Parser::new(syntax, "").with_tools(Arc::clone(&tools));
            let text = text.replace("NAME", name).replace("ZIP", zip);
            assert_eq!(parser.push(&text), [call(name, expected)], "{family}: {text}");
        }
    }
}

#[test]
fn kimi() {
    let text = "So.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|><|tool_call_begin|>functions.a.b:11<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>";
    let calls = [called("functions.f:0", "f", r#"{"a": 1}"#), called("functions.a.b:11", "a.b", "{}")];
    check("Kimi-K2", "", text, &[&[content("So.")], &calls[..]].concat());
}

#[test]
fn call_ids_are_unique_and_follow_the_model_family() {
    let (f, own) = (call("f", "{}"), |id: &str| called(id, "f", "{}"));
    let list = |ids: &[&str]| {
        let calls = ids.iter().map(|id| json!({"name": "f", "arguments": {}, "id": id}));
        format!("[TOOL_CALLS] {}", calls.collect::<Value>())
    };
    let none = ["", "a1b2c3d4", "a1b2c3d4e5", "a1b2-3d4e", "a1b2c3dü"];
    check("Mistral", "", &list(&none), &none.map(|_| f.clone()));
    let twice = ["a1b2c3d4e", "a1b2c3d4f", "a1b2c3d4e"];
    check("Mistral", "", &list(&twice), &[own("a1b2c3d4e"), own("a1b2c3d4f"), f.clone()]);
    let kimi = |ids: &[&str]| {
        let call =
            |id: &&str| format!("<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>");
        ids.iter().map(call).collect::<Vec<_>>().concat()
    };
    let none = ["f", "f:0", "functions.f", "functions.f:", "functions.f:x"];
    check("Kimi-K2", "", &kimi(&none), &none.map(|_| f.clone()));
    let twice = ["functions.f:0", "functions.f:1", "functions.f:0"];
    check("Kimi-K2", "", &kimi(&twice), &[own("functions.f:0"), own("functions.f:1"), f.clone()]);
    // Qwen's calls have no ids.
    check("Qwen", "", r#"<tool_call>{"name": "f", "arguments": {}, "id": "a1b2c3d4e"}</tool_call>"#, &[f]);
}

#[test]
fn calls_without_allowed_tools_are_plain_text() {
    let qwen = "Look:<tool_call>{\"name\": \"f\"}</tool_call>";
    let mistral = "[TOOL_CALLS]f[ARGS]{}";
    let deepseek =
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let harmony = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>";
    for (name, text, expected) in [
        ("Qwen", format!("<think>hm</think>{qwen}"), vec![reasoning("hm"), content(qwen)]),
        ("Mistral", mistral.to_owned(), vec![content(mistral)]),
        ("DeepSeek", format!("<think>hm</think>{deepseek}"), vec![reasoning("hm"), content(deepseek)]),
        ("gpt-oss", harmony.to_owned(), vec![reasoning("hm"), content("{\"a\": 1}")]),
    ] {
        let syntax = SYNTAXES.iter().find(|s| s.name == name).unwrap();
        let parser = Parser::new(syntax, "").without_calls();
        assert_eq!(parser.is_text_alone(), name == "Mistral", "{name}");
        for n in [1, 2, 3, 7, 1000] {
            assert_eq!(pushed(parser.clone(), &text, n), expected, "{name}, {n}: {text}");
        }
    }
}

#[test]
fn harmony() {
    let text = "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>";
    check("gpt-oss", "<|start|>assistant", text, &[reasoning("think"), call("f", r#"{"a": 1}"#)]);
    // The end tokens are not part of the text.
    check(
        "gpt-oss",
        "",
        text.strip_suffix("<|call|>").unwrap(),
        &[reasoning("think"), call("f", r#"{"a": 1}"#)],
    );
    let text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>";
    check("gpt-oss", "", text, &[reasoning("hm"), content("Hello!")]);
    let to = "<|start|>assistant to=functions.g<|channel|>commentary<|message|>{}<|call|>";
    check("gpt-oss", "", to, &[call("g", "{}")]);
    // The prompt already contains the beginning of the header.
    let (header, rest) = to.split_at("<|start|>assistant".len());
    check("gpt-oss", header, rest, &[call("g", "{}")]);
    check("gpt-oss", header, " Tomorrow", &[content(" Tomorrow")]);
    check("gpt-oss", header, " t", &[content(" t")]);
}

#[test]
fn malformed_tool_calls_are_reported() {
    let broken = |name: &str, text: &str, words: &str| {
        let syntax = SYNTAXES.iter().find(|s| s.name == name).unwrap();
        for n in [1, 5, 1000] {
            match parsed(syntax, "", text, n).as_slice() {
                [Event::Broken { why, .. }] => assert!(why.contains(words), "{why}"),
                other => panic!("{other:?}"),
            }
        }
    };
    broken("Qwen", "<tool_call>{\"name\": \"f\", </tool_call>", "line 1 column");
    broken("Qwen", "<tool_call>{\"name\": 1}</tool_call>", "no name");
    broken("Qwen", "<tool_call>{\"name\": \"f\"", "no end");
    broken("Qwen", "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>", "not a JSON object");
    broken("Mistral", "[TOOL_CALLS] {\"name\": \"f\"}", "not a list");
    broken("DeepSeek", "<｜tool▁call▁begin｜>f {}<｜tool▁call▁end｜>", "tool▁sep");
    broken("GLM-4.5", "<tool_call>f<arg_key>a</arg_key>3</tool_call>", "<arg_value>");
    broken("Qwen3-Coder", "<tool_call><function=f><parameter=a>3</function></tool_call>", "</parameter>");
    broken("Qwen3-Coder", "<tool_call><function=>\n</function></tool_call>", "no name");
    broken("Kimi-K2", "<|tool_call_begin|>functions.f:0 {}<|tool_call_end|>", "argument_begin");
    broken("gpt-oss", "<|channel|>commentary to=functions.f<|message|>[]<|call|>", "not a JSON object");
}

#[test]
fn tool_calls_are_reported_while_arguments_stream() {
    let kimi = r#"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "b c"}<|tool_call_end|>"#;
    for (name, text, id, pieces) in [
        ("Qwen", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"b c\"} }\n</tool_call>", None, 9),
        (
            "DeepSeek",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": \"b c\"}\n```<｜tool▁call▁end｜>",
            None,
            9,
        ),
        ("Kimi-K2", kimi, Some("functions.f:0"), 9),
        (
            "GLM-4.5",
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
            None,
            2,
        ),
        (
            "Qwen3-Coder",
            "<tool_call><function=f>\n<parameter=a>\n1\n</parameter>\n</function></tool_call>",
            None,
            1,
        ),
        ("gpt-oss", r#"<|channel|>commentary to=functions.f<|message|>{"a": "b c"}<|call|>"#, None, 9),
        ("Mistral", r#"[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": "b c"}"#, Some("a1b2c3d4e"), 9),
        ("Mistral", r#"[TOOL_CALLS] [{"name": "f", "arguments": {"a": "b [c] "}}] Then"#, None, 9),
    ] {
        let mut parser = Parser::new(SYNTAXES.iter().find(|s| s.name == name).unwrap(), "");
        let (mut calls, mut events) = (Vec::new(), Vec::new());
        for c in text.chars() {
            events.extend(parser.push(&c.to_string()));
            calls.extend(parser.partial_call());
        }
        events.extend(parser.finish());
        let [Event::Call(whole)] = events.as_slice() else { panic!("{name}: {events:?}") };
        assert_eq!(whole.id.as_deref(), id, "{name}");
        calls.dedup();
        assert!(calls.len() >= pieces, "{name}: {calls:?}");
        for call in calls {
            let fits = call.name == whole.name && call.id == whole.id;
            assert!(fits && whole.arguments.starts_with(&call.arguments), "{name}: {call:?} of {whole:?}");
        }
    }
    // A text that contains an object is returned as a whole.
    let mut parser = Parser::new(SYNTAXES.iter().find(|s| s.name == "Qwen").unwrap(), "");
    parser.push(r#"<tool_call>{"name": "f", "arguments": "{\"a"#);
    assert_eq!(parser.partial_call(), None);
}

#[test]
fn mistral_calls_are_emitted_before_the_next_arrives() {
    let calls = [call("f", r#"{"a": 1}"#), call("g", "{}")];
    for text in [
        r#"[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}"#,
        r#"[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}} , {"name": "g", "arguments": {}}] and text"#,
    ] {
        let mut parser = Parser::new(SYNTAXES.iter().find(|s| s.name == "Mistral").unwrap(), "");
        let (mut events, mut first) = (Vec::new(), None);
        for (at, c) in text.char_indices() {
            events.extend(parser.push(&c.to_string()));
            first = first.or((!events.is_empty()).then_some(at));
        }
        events.extend(parser.finish());
        assert_eq!(events, calls, "{text}");
        assert!(first.unwrap() < text.rfind('g').unwrap(), "{text}");
    }
}

#[test]
fn truncated_calls_keep_their_partial_arguments() {
    for (name, text, expected) in [
        ("Qwen", r#"<tool_call>{"name": "f", "arguments": {"a": "b"#, call("f", r#"{"a": "b"#)),
        ("Qwen", r#"<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_"#, call("f", r#"{"a": 1}"#)),
        ("Qwen", r#"<tool_call>{"name": "f", "argu"#, call("f", "")),
        ("Mistral", r#"[TOOL_CALLS]f[ARGS]{"a"#, call("f", r#"{"a"#)),
        ("Mistral", r#"[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a"#, called("a1b2c3d4e", "f", r#"{"a"#)),
        ("Mistral", r#"[TOOL_CALLS] [{"name": "f", "arguments": {"a"#, call("f", r#"{"a"#)),
        ("DeepSeek", r#"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a"#, call("f", r#"{"a"#)),
        ("DeepSeek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{", call("f", "{")),
        (
            "Kimi-K2",
            r#"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a"#,
            called("functions.f:0", "f", r#"{"a"#),
        ),
        (
            "GLM-4.5",
            "<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b",
            call("f", r#"{"a":1"#),
        ),
        ("GLM-4.5", "<tool_call>f\n<arg_key>b", call("f", "{")),
        (
            "Qwen3-Coder",
            "<tool_call><function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>x",
            call("f", r#"{"a":1"#),
        ),
        ("gpt-oss", r#"<|channel|>commentary to=functions.f<|message|>{"a": [1"#, call("f", r#"{"a": [1"#)),
    ] {
        let syntax = SYNTAXES.iter().find(|s| s.name == name).unwrap();
        let mut parser = Parser::new(syntax, "");
        assert_eq!(parser.push(text), [], "{text}");
        assert_eq!(parser.finish_truncated(), [expected], "{text}");
    }
    // Without a name, the text is still returned as written.
    let mut parser = Parser::new(SYNTAXES.iter().find(|s| s.name == "Qwen").unwrap(), "");
    parser.push(r#"<tool_call>{"name": "f"#);
    assert!(matches!(parser.finish_truncated().as_slice(), [Event::Broken { .. }]));
}
