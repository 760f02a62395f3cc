//! Prompts of published templates, byte for byte those of transformers (`golden/templates/write.py`).
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

use chrono::{Local, NaiveDateTime, TimeZone as _};
use moec_service::template::{Render, Template};
use serde_json::{Map, Value};
use std::fs;
use std::path::Path;

/// Options of a conversation that are not variables of the template's own.
const OWN: [&str; 6] =
    ["name", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"];

#[test]
fn prompts_are_those_of_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/templates");
    let json = |path: &Path| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
    let conversations = json(&folder.join("conversations.json"));
    let conversations = conversations.as_array().unwrap();
    let mut seen = 0;
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "jinja") {
            continue;
        }
        let golden = json(&path.with_extension("json"));
        let tokens = serde_json::from_value(golden["tokens"].clone()).unwrap();
        let now: NaiveDateTime = golden["now"].as_str().unwrap().parse().unwrap();
        let template = Template::new(&fs::read_to_string(&path).unwrap(), &tokens).unwrap();
        let cases = golden["cases"].as_array().unwrap();
        assert_eq!(cases.len(), conversations.len());
        for (case, conversation) in cases.iter().zip(conversations) {
            assert_eq!(case["name"], conversation["name"]);
            let of = conversation.as_object().unwrap();
            let more: Map<String, Value> = of
                .iter()
                .filter(|(k, _)| !OWN.contains(&k.as_str()))
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect();
            let flag = |key: &str| of.get(key).and_then(Value::as_bool).unwrap_or(false);
            let found = template.render(&Render {
                messages: of["messages"].as_array().unwrap(),
                tools: of.get("tools").map(|t| t.as_array().unwrap().as_slice()),
                documents: None,
                add_generation_prompt: flag("add_generation_prompt"),
                continue_final_message: flag("continue_final_message"),
                more: Some(&more),
                now: Local.from_local_datetime(&now).single(),
            });
            let what = format!("{}, {}", path.display(), case["name"]);
            match (case.get("prompt"), found) {
                (Some(prompt), found) => assert_eq!(prompt.as_str().unwrap(), found.unwrap(), "{what}"),
                (None, Err(e)) => {
                    // What the template raises is what it says of the messages.
                    let refused = case["refused"].as_str().unwrap();
                    assert!(e.what.contains(refused.split_once(": ").unwrap().1), "{what}: {e} | {refused}");
                }
                (None, Ok(found)) => panic!("{what} was rendered: {found}"),
            }
            seen += 1;
        }
    }
    assert!(seen > 100);
}
