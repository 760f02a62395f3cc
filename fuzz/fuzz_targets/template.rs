//! A chat template: what parses renders or says why not, and so does the parser of what a model says.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_service::template::Render;
use moec_service::template::engine::Engine;
use moec_service::tools::{Parser, SYNTAXES};
use serde_json::json;
use std::collections::BTreeMap;

fuzz_target!(|source: &str| {
    let messages = [json!({"role": "system", "content": "é"}), json!({"role": "user", "content": "a", "n": [1, 2.5, null]})];
    if let Ok(template) = Engine::new(source, &BTreeMap::new()) {
        let request = Render { messages: &messages, add_generation_prompt: true, ..Render::default() };
        let _ = template.render(&request);
    }
    for syntax in SYNTAXES {
        let mut parser = Parser::new(syntax, "");
        let at = source.char_indices().nth(source.chars().count() / 2).map_or(0, |(at, _)| at);
        for piece in [&source[..at], &source[at..]] {
            parser.push(piece);
        }
        parser.finish();
    }
});
