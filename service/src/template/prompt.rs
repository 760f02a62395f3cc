//! Prompts as token ids: special tokens come from the template, never from a message.

use super::{Render, Template};
use crate::error::Result;
use moec_runtime::Text;
use serde_json::{Map, Value};

/// Character that cuts a special token in a text into two. It occurs in no text, since it is a noncharacter
/// (Unicode, §23.7).
const CUT: char = '\u{fdd0}';

/// Prompt of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Text of the ids, for [`crate::tools::Parser::new`].
    pub text: String,
}

impl Template {
    /// The prompt for a conversation, in tokens. Special tokens in messages, tools, documents or variables
    /// are encoded as plain text.
    ///
    /// # Errors
    /// As [`Template::render`]; as [`Text::encode_parts`].
    pub fn prompt(&self, text: &Text, request: &Render<'_>) -> Result<Prompt> {
        let special: Vec<String> =
            text.special_tokens().into_iter().filter(|s| s.chars().count() > 1).collect();
        let list = |of: &[Value]| of.iter().map(|v| cut(v, &special)).collect::<Vec<_>>();
        let messages = list(request.messages);
        let (tools, documents) = (request.tools.map(list), request.documents.map(list));
        let more: Option<Map<String, Value>> =
            request.more.map(|m| m.iter().map(|(k, v)| (k.clone(), cut(v, &special))).collect());
        let rendered = self.render(&Render {
            messages: &messages,
            tools: tools.as_deref(),
            documents: documents.as_deref(),
            more: more.as_ref(),
            ..*request
        })?;
        let ids = text.encode_parts(rendered.split(CUT))?;
        Ok(Prompt { ids, text: rendered.replace(CUT, "") })
    }
}

/// JSON whose texts have every special token cut after its first character.
fn cut(value: &Value, special: &[String]) -> Value {
    match value {
        Value::String(text) => cut_text(text, special).into(),
        Value::Array(items) => items.iter().map(|v| cut(v, special)).collect(),
        Value::Object(map) => {
            Value::Object(map.iter().map(|(k, v)| (cut_text(k, special), cut(v, special))).collect())
        }
        other => other.clone(),
    }
}

fn cut_text(text: &str, special: &[String]) -> String {
    let mut text = text.replace(CUT, "");
    for token in special.iter().filter(|s| !s.is_empty()) {
        if text.contains(&**token) {
            let mut with = token.clone();
            with.insert(token.chars().next().map_or(0, char::len_utf8), CUT);
            text = text.replace(&**token, &with);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_tokens_in_user_text_are_broken_up() {
        let special = ["<|end|>".to_owned(), "<s>".to_owned(), "é>".to_owned()];
        assert_eq!(cut_text("a<|end|>é><s><s", &special), "a<\u{fdd0}|end|>é\u{fdd0}><\u{fdd0}s><s");
        // A cut character in the text itself hides no special token.
        assert_eq!(cut_text("<\u{fdd0}s>", &special), "<\u{fdd0}s>");
        let nested = serde_json::json!({"<s>": [{"a": "<s>"}, 3]});
        assert_eq!(cut(&nested, &special).to_string().matches(CUT).count(), 2);
    }
}
