//! JSON schemas of what tools take.

use serde_json::Value;

/// Keywords whose values are data.
const DATA: [&str; 4] = ["const", "enum", "default", "examples"];
/// Keywords whose values are schemas by name.
const NAMED: [&str; 5] = ["properties", "patternProperties", "dependentSchemas", "$defs", "definitions"];
/// Names that families write for null.
const NULLS: [&str; 2] = ["null", "None"];

/// The schema as it is inside of another one, at `place`, a JSON pointer: what its references name from its root, they name from
/// there.
pub(crate) fn moved(schema: &Value, place: &str) -> Value {
    let mut schema = schema.clone();
    move_to(&mut schema, place);
    schema
}

fn move_to(schema: &mut Value, place: &str) {
    match schema {
        Value::Array(all) => all.iter_mut().for_each(|schema| move_to(schema, place)),
        Value::Object(keywords) => {
            for (keyword, value) in keywords {
                match (keyword.as_str(), value) {
                    ("$ref", Value::String(reference)) => {
                        let inside = reference.strip_prefix('#');
                        if let Some(inside) = inside.filter(|at| at.is_empty() || at.starts_with('/')) {
                            *reference = format!("#{place}{inside}");
                        }
                    }
                    (keyword, _) if DATA.contains(&keyword) => {}
                    (keyword, Value::Object(named)) if NAMED.contains(&keyword) => {
                        named.values_mut().for_each(|schema| move_to(schema, place));
                    }
                    (_, value) => move_to(value, place),
                }
            }
        }
        _ => {}
    }
}

/// Whether a schema takes texts alone, so that `text` is one whatever it looks like. One that takes null, too, takes its name for
/// that.
pub(crate) fn takes_text(schema: &Value, text: &str) -> bool {
    let null = !NULLS.contains(&text);
    let kind = |kind: &Value| kind == "string" || null && kind == "null";
    let value = |value: &Value| value.is_string() || null && value.is_null();
    let all = |of: &Value, fits: &dyn Fn(&Value) -> bool| {
        of.as_array().is_some_and(|of| !of.is_empty() && of.iter().all(fits))
    };
    kind(&schema["type"])
        || all(&schema["type"], &kind)
        || all(&schema["enum"], &value)
        || ["anyOf", "oneOf"].iter().any(|of| all(&schema[of], &|schema| takes_text(schema, text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn references_move_and_data_do_not() {
        let schema = json!({
            "type": "object",
            "properties": {
                "self": {"$ref": "#"},
                "point": {"$ref": "#/$defs/Point"},
                "const": {"items": {"$ref": "#/definitions/Old"}},
                "$ref": {"anyOf": [{"$ref": "#/$defs/Point"}, {"const": {"$ref": "#"}}]},
                "other": {"$ref": "#name"},
            },
            "$defs": {"Point": {"default": {"$ref": "#"}}},
        });
        let expected = json!({
            "type": "object",
            "properties": {
                "self": {"$ref": "#/a/0"},
                "point": {"$ref": "#/a/0/$defs/Point"},
                "const": {"items": {"$ref": "#/a/0/definitions/Old"}},
                "$ref": {"anyOf": [{"$ref": "#/a/0/$defs/Point"}, {"const": {"$ref": "#"}}]},
                "other": {"$ref": "#name"},
            },
            "$defs": {"Point": {"default": {"$ref": "#"}}},
        });
        assert_eq!(moved(&schema, "/a/0"), expected);
    }

    #[test]
    fn texts_are_told_from_all_else() {
        for (schema, text, takes) in [
            (json!({"type": "string"}), "12", true),
            (json!({"type": "string"}), "null", true),
            (json!({"type": ["string", "null"]}), "12", true),
            (json!({"type": ["string", "null"]}), "null", false),
            (json!({"type": ["string", "integer"]}), "12", false),
            (json!({"enum": ["1", "2"]}), "1", true),
            (json!({"enum": ["1", 2]}), "1", false),
            (json!({"anyOf": [{"type": "string"}, {"type": "null"}]}), "true", true),
            (json!({"anyOf": [{"type": "string"}, {"type": "null"}]}), "None", false),
            (json!({"anyOf": [{"type": "string"}, {"type": "number"}]}), "1", false),
            (json!({"anyOf": []}), "1", false),
            (json!({}), "1", false),
            (Value::Null, "1", false),
            (json!(true), "1", false),
        ] {
            assert_eq!(takes_text(&schema, text), takes, "{schema}: {text}");
        }
    }
}
