//! Chat templates of a checkpoint, in the form that a bundle has them in.

use super::Config;
use moec_base::error::Result;
use serde_json::{Map, Value, json};

/// Special tokens that a template may name, by their keys in `tokenizer_config.json`.
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// The key of the templates.
const KEY: &str = "chat_template";

/// Contents of `artifacts/chat_template.json`: the templates by name, and the texts of special tokens. `file`
/// is a template that replaces the configuration's one for conversations. `None` without a template.
///
/// # Errors
/// Fails if a value has the wrong type.
pub(super) fn templates(file: Option<String>, config: Option<&Config>) -> Result<Option<Vec<u8>>> {
    let mut templates = Map::new();
    if let Some(config) = config {
        read(config, &mut templates)?;
    }
    templates.extend(file.map(|source| ("default".to_owned(), source.into())));
    if templates.is_empty() {
        return Ok(None);
    }
    let mut tokens = Map::new();
    for (key, value) in TOKENS.iter().filter_map(|key| Some((key, config?.value(key)?))) {
        // A token is a text, or an object that has the text and attributes.
        if let Some(text) = value.as_str().or_else(|| value.get("content")?.as_str()) {
            tokens.insert((*key).to_owned(), text.into());
        }
    }
    let whole = json!({ "templates": templates, "tokens": tokens });
    Ok(Some(format!("{whole:#}\n").into_bytes()))
}

/// Adds the templates of a configuration to a table: one text, or a list of objects with name and text.
fn read(config: &Config, templates: &mut Map<String, Value>) -> Result<()> {
    let unfit = || config.unfit(KEY, "a text, or a list of objects with `name` and `template`");
    match config.value(KEY) {
        None => {}
        Some(Value::String(source)) => {
            templates.insert("default".to_owned(), source.as_str().into());
        }
        Some(Value::Array(list)) => {
            for item in list {
                let text = |key: &str| item.get(key).and_then(Value::as_str).ok_or_else(unfit);
                templates.insert(text("name")?.to_owned(), text("template")?.into());
            }
        }
        Some(_) => return Err(unfit()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(file: Option<&str>, config: &str) -> Result<Option<Value>> {
        let config = Config::parse("tokenizer_config.json", config.as_bytes())?;
        let bytes = templates(file.map(ToOwned::to_owned), Some(&config))?;
        Ok(bytes.map(|bytes| serde_json::from_slice(&bytes).unwrap()))
    }

    #[test]
    fn chat_template_is_read_from_text_list_or_file() {
        assert_eq!(of(None, "{}").unwrap(), None);
        let one = r#"{"chat_template": "a", "bos_token": "<s>", "eos_token": {"content": "</s>", "special": true}, "pad_token": null}"#;
        let tokens = json!({"bos_token": "<s>", "eos_token": "</s>"});
        assert_eq!(of(None, one).unwrap(), Some(json!({"templates": {"default": "a"}, "tokens": tokens})));
        assert_eq!(
            of(Some("b"), one).unwrap(),
            Some(json!({"templates": {"default": "b"}, "tokens": tokens}))
        );
        let two = r#"{"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "t"}]}"#;
        let expected = json!({"templates": {"default": "a", "tool_use": "t"}, "tokens": {}});
        assert_eq!(of(None, two).unwrap(), Some(expected));
        for bad in [r#"{"chat_template": 3}"#, r#"{"chat_template": [{"name": "default"}]}"#] {
            let e = of(None, bad).unwrap_err().to_string();
            assert!(e.contains("`chat_template` in `tokenizer_config.json`"), "{e}");
        }
    }
}
