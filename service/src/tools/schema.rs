//! JSON schemas of tools' arguments.

use serde_json::{Value, json};

/// Keywords whose values are data.
const DATA: [&str; 4] = ["const", "enum", "default", "examples"];
/// Keywords whose values are schemas by name.
const NAMED: [&str; 5] = ["properties", "patternProperties", "dependentSchemas", "$defs", "definitions"];
/// Spellings of null by model families.
const NULLS: [&str; 2] = ["null", "None"];

/// The schema for use inside of another one, at `place`, a JSON pointer: its references from its own root
/// become references from there.
pub(crate) fn moved(schema: &Value, place: &str) -> Value {
    let mut schema = schema.clone();
    move_to(&mut schema, place);
    schema
}

/// The schema of a function's arguments inside of another schema, at `place` as of [`moved`]. `parameters`:
/// as the function declares them; none: it takes none. `None` where they cannot be those of an object, which
/// arguments are.
pub(crate) fn of_arguments(parameters: &Value, place: &str) -> Option<Value> {
    let mut schema = match parameters {
        Value::Null => json!({"properties": {}, "additionalProperties": false}),
        Value::Object(_) => moved(parameters, place),
        _ => return None,
    };
    let object = |kind: &Value| kind == "object";
    let fits = match &schema["type"] {
        Value::Array(kinds) => kinds.iter().any(object),
        kind => kind.is_null() || object(kind),
    };
    schema["type"] = json!("object");
    fits.then_some(schema)
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

/// Whether a schema accepts only texts, so that `text` is one, even if it looks like JSON. If the schema also
/// accepts null, a spelling of null is not a text.
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

    #[test]
    fn schema_references_are_rebased_but_data_is_not() {
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
    fn tool_argument_schemas_are_objects() {
        let none = json!({"properties": {}, "additionalProperties": false, "type": "object"});
        let point = json!({"$ref": "#/a/$defs/P", "$defs": {"P": {"properties": {}}}, "type": "object"});
        for (parameters, expected) in [
            (Value::Null, Some(none)),
            (json!({}), Some(json!({"type": "object"}))),
            (json!({"type": ["null", "object"]}), Some(json!({"type": "object"}))),
            (json!({"$ref": "#/$defs/P", "$defs": {"P": {"properties": {}}}}), Some(point)),
            (json!({"type": "string"}), None),
            (json!({"type": ["string", "null"]}), None),
            (json!(true), None),
            (json!([]), None),
        ] {
            assert_eq!(of_arguments(&parameters, "/a"), expected, "{parameters}");
        }
    }

    #[test]
    fn string_arguments_are_distinguished_by_schema() {
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
