//! Check of a tokenizer's templates (`TemplateProcessing`), before the crate `tokenizers` reads them. The
//! crate panics if a template refers to something that does not exist, and copies the text as often as the
//! template says.

use serde_json::{Map, Value};

/// Maximum number of pieces of a template; published ones have three.
const PIECES: usize = 256;

/// Checks all templates in the rules of `post_processor`.
///
/// # Errors
/// The reason that a template cannot be used.
pub(super) fn check(rules: &Value) -> Result<(), String> {
    let mut left = vec![rules];
    while let Some(value) = left.pop() {
        match value {
            Value::Object(map) => {
                check_template(map)?;
                left.extend(map.values());
            }
            Value::Array(values) => left.extend(values),
            _ => {}
        }
    }
    Ok(())
}

/// Checks the template for one text (`single`) of a rule that has one. The crate looks at the keys of a rule,
/// not at its `type`.
fn check_template(rule: &Map<String, Value>) -> Result<(), String> {
    let Some(Value::Array(pieces)) = rule.get("single") else { return Ok(()) };
    if pieces.len() > PIECES {
        return Err(format!("its template has {} pieces; {PIECES} is the maximum", pieces.len()));
    }
    let mut texts = 0;
    for piece in pieces {
        if let Some(id) = piece["SpecialToken"]["id"].as_str()
            && rule.get("special_tokens").and_then(|tokens| tokens.get(id)).is_none()
        {
            return Err(format!("its template names `{id}`, which is not a key of its `special_tokens`"));
        }
        match piece["Sequence"]["id"].as_str() {
            Some("B") => return Err("its template for one text has a second one (`B`)".into()),
            Some(_) => texts += 1,
            None => {}
        }
    }
    if texts > 1 {
        return Err(format!("its template has the text {texts} times; once is the maximum"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::serving::text::Text;
    use serde_json::{Value, json};

    fn tokenizer(single: &Value) -> Result<Text, String> {
        let special = json!({"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}});
        let template =
            json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special});
        let rules = json!({"type": "Sequence", "processors": [template]});
        let model =
            json!({"type": "Unigram", "unk_id": 0, "vocab": [["?", -9.0], ["a", -1.0], ["<s>", -1.0]]});
        Text::parse(json!({"post_processor": rules, "model": model}).to_string().as_bytes(), None)
    }

    #[test]
    fn templates_with_unknown_names_are_rejected() {
        let token = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
        let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        assert_eq!(tokenizer(&json!([token("<s>"), text("A")])).unwrap().encode("a").unwrap(), [2, 1]);
        for (single, why) in [
            (json!([token(">s>"), text("A")]), "`>s>`"),
            (json!([text("A"), text("B")]), "a second one"),
            (json!([text("A"), text("A")]), "2 times"),
            (json!(vec![token("<s>"); 257]), "257 pieces"),
        ] {
            let refused = tokenizer(&single).err().unwrap();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
