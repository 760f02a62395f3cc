//! Prompts of published templates, compared byte for byte with transformers' (`golden/templates/write.py`).
//! Also parses the tool calls that the templates write.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

use chrono::{Local, NaiveDateTime, TimeZone as _};
use moec_service::template::Render;
use moec_service::template::engine::Engine;
use moec_service::tools::{Event, Parser, Syntax};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Fields of a conversation that are not passed on as variables of the template.
const OWN: [&str; 6] =
    ["name", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"];

/// Every template of the folder, and the syntax of its tool calls.
const PUBLISHED: [(&str, &str); 16] = [
    ("Qwen-Qwen2-57B-A14B-Instruct", TEXT),
    ("Qwen-Qwen3-30B-A3B", "Qwen"),
    ("Qwen-Qwen3-Coder-30B-A3B-Instruct", "Qwen3-Coder"),
    ("allenai-OLMoE-1B-7B-0125-Instruct", TEXT),
    ("allenai-OLMoE-1B-7B-0924-Instruct", TEXT),
    ("deepseek-ai-DeepSeek-V2-Lite-Chat", TEXT),
    ("deepseek-ai-DeepSeek-V3.1", "DeepSeek"),
    ("microsoft-Phi-3.5-MoE-instruct", TEXT),
    ("microsoft-Phi-tiny-MoE-instruct", TEXT),
    ("mistralai-Mistral-Nemo-Instruct-2407", "Mistral"),
    ("mistralai-Mixtral-8x22B-Instruct-v0.1", "Mistral"),
    ("mistralai-Mixtral-8x7B-Instruct-v0.1", TEXT),
    ("moonshotai-Kimi-K2-Instruct", KIMI),
    ("moonshotai-Moonlight-16B-A3B-Instruct", TEXT),
    ("openai-gpt-oss-120b", HARMONY),
    ("zai-org-GLM-4.5", "GLM-4.5"),
];
/// A template without tool calls.
const TEXT: &str = "text alone";
/// Templates that write ids of calls in place of function names.
const KIMI: &str = "Kimi-K2";
/// The template that writes only the first call of a message.
const HARMONY: &str = "gpt-oss";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/templates")
}

fn text(file: &str) -> String {
    fs::read_to_string(folder().join(file)).unwrap()
}

fn conversations() -> Vec<Value> {
    serde_json::from_str(&text("conversations.json")).unwrap()
}

/// A template, and its output by `write.py`.
struct Published {
    source: String,
    golden: Value,
    template: Engine,
}

impl Published {
    fn open(name: &str) -> Self {
        let golden: Value = serde_json::from_str(&text(&format!("{name}.json"))).unwrap();
        let tokens = serde_json::from_value(golden["tokens"].clone()).unwrap();
        let source = text(&format!("{name}.jinja"));
        Self { template: Engine::new(&source, &tokens).unwrap(), source, golden }
    }

    /// Renders these messages, with everything else as in the conversation.
    fn render(&self, conversation: &Value, messages: &[Value], begins: bool) -> moec_service::Result<String> {
        let of = conversation.as_object().unwrap();
        let more: Map<String, Value> = of
            .iter()
            .filter(|(k, _)| !OWN.contains(&k.as_str()))
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        let now: NaiveDateTime = self.golden["now"].as_str().unwrap().parse().unwrap();
        self.template.render(&Render {
            messages,
            tools: of.get("tools").map(|t| t.as_array().unwrap().as_slice()),
            documents: None,
            add_generation_prompt: begins,
            continue_final_message: flag(conversation, "continue_final_message"),
            more: Some(&more),
            now: Local.from_local_datetime(&now).single().map(|now| now.fixed_offset()),
        })
    }
}

fn flag(conversation: &Value, key: &str) -> bool {
    conversation.get(key).and_then(Value::as_bool).unwrap_or(false)
}

#[test]
fn every_template_is_listed() {
    let files = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|e| e == "jinja"));
    let found: BTreeSet<String> =
        files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    assert_eq!(found, PUBLISHED.iter().map(|(name, _)| (*name).to_owned()).collect());
}

#[test]
fn rendered_prompts_match_transformers() {
    let conversations = conversations();
    for (name, _) in PUBLISHED {
        let published = Published::open(name);
        let cases = published.golden["cases"].as_array().unwrap();
        assert_eq!(cases.len(), conversations.len());
        for (case, conversation) in cases.iter().zip(&conversations) {
            assert_eq!(case["name"], conversation["name"]);
            let messages = conversation["messages"].as_array().unwrap();
            let found = published.render(conversation, messages, flag(conversation, "add_generation_prompt"));
            let what = format!("{name}, {}", case["name"]);
            match (case["prompt"].as_str(), found) {
                (Some(prompt), found) => assert_eq!(prompt, found.unwrap(), "{what}"),
                (None, Err(e)) => {
                    // Errors that the template raises must be reported. Where Python itself fails, our
                    // message has its own words.
                    let raised = case["refused"].as_str().unwrap().strip_prefix("TemplateError: ");
                    assert!(raised.is_none_or(|raised| e.what.contains(raised)), "{what}: {e}");
                }
                (None, Ok(found)) => panic!("{what} was rendered: {found}"),
            }
        }
    }
}

#[test]
fn calls_parse_back_from_their_template_text() {
    let conversations = conversations();
    let called = ["a call and its result", "two calls"];
    for (name, family) in PUBLISHED {
        let published = Published::open(name);
        let syntax = Syntax::of(&published.source);
        assert_eq!(syntax.name, family, "{name}");
        for conversation in conversations.iter().filter(|c| called.contains(&c["name"].as_str().unwrap())) {
            if family == TEXT {
                continue;
            }
            let mut messages = conversation["messages"].as_array().unwrap()[..2].to_vec();
            let mut expected = Vec::new();
            for (i, call) in messages[1]["tool_calls"].as_array_mut().unwrap().iter_mut().enumerate() {
                let function = call["function"]["name"].as_str().unwrap().to_owned();
                if family == KIMI {
                    call["id"] = format!("functions.{function}:{i}").into();
                }
                expected.push((function, call["function"]["arguments"].clone()));
            }
            if family == HARMONY {
                expected.truncate(1);
            }
            let prompt = published.render(conversation, &messages[..1], true).unwrap();
            let whole = published.render(conversation, &messages, false).unwrap();
            // Some templates write the beginning of an answer differently once it is complete.
            let (prompt, answer) = whole.split_at(common(&prompt, &whole));
            let mut parser = Parser::new(syntax, prompt);
            let mut events = parser.push(answer);
            events.extend(parser.finish());
            let calls = events.iter().filter_map(|event| match event {
                Event::Call(call) => {
                    Some((call.name.clone(), serde_json::from_str(&call.arguments).unwrap()))
                }
                Event::Broken { text, why } => panic!("{name}: {why}: {text}"),
                Event::Content(_) | Event::Reasoning(_) => None,
            });
            assert_eq!(calls.collect::<Vec<(String, Value)>>(), expected, "{name}: {answer}");
        }
    }
}

/// Length of the common prefix in bytes.
fn common(a: &str, b: &str) -> usize {
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b);
    same.map(|(c, _)| c.len_utf8()).sum()
}
