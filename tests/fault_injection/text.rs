//! Damage to texts: numbers, keys and nesting of JSON and `model.toml`.

use super::case::CaseFolders;
use super::files;
use super::rng::Rng;
use std::fs;
use std::ops::Range;

/// Replacements of a value of JSON.
const WILD: [&str; 22] = [
    "0",
    "-1",
    "1",
    "3",
    "-0.0",
    "0.5",
    "2147483648",
    "4294967297",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "1e308",
    "-1e308",
    "1e999",
    "1e-320",
    "NaN",
    "null",
    "true",
    "\"8\"",
    "[]",
    "{}",
    "\"\\u0000\\ud800\"",
];

/// More levels of nesting than any stack has room for.
const DEEP: usize = 100_000;

fn wild(rng: &mut Rng) -> String {
    match rng.below(24) {
        0 => "[".repeat(DEEP) + &"]".repeat(DEEP),
        1 => "{\"a\":".repeat(DEEP) + "1" + &"}".repeat(DEEP),
        2 => "9".repeat(5000),
        3 => format!("\"{}\"", "x".repeat(100_000)),
        _ => (*rng.pick(&WILD)).to_owned(),
    }
}

/// Ranges of scalar values in a JSON text, and of its keys.
fn places(text: &str) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
    let (mut values, mut keys) = (Vec::new(), Vec::new());
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        if bytes[at] == b'"' {
            at += 1;
            while at < bytes.len() && bytes[at] != b'"' {
                at += if bytes[at] == b'\\' { 2 } else { 1 };
            }
            at = (at + 1).min(bytes.len());
            let key = text[at..].trim_start().starts_with(':');
            if key { keys.push(start..at) } else { values.push(start..at) }
        } else if bytes[at].is_ascii_alphanumeric() || bytes[at] == b'-' {
            let end = |b: &u8| matches!(b, b',' | b']' | b'}') || b.is_ascii_whitespace();
            at = bytes[at..].iter().position(end).map_or(bytes.len(), |n| at + n);
            values.push(start..at);
        } else {
            at += 1;
        }
    }
    (values, keys)
}

/// Changes a JSON text in one or two places.
pub(crate) fn change(rng: &mut Rng, text: &mut String) -> String {
    let mut changes = Vec::new();
    for _ in 0..=rng.below(2) {
        let (values, keys) = places(text);
        if values.is_empty() || keys.is_empty() {
            break;
        }
        let short = |s: &str| s.chars().take(40).collect::<String>();
        match rng.below(8) {
            0 => {
                // A key twice, first or last.
                let key = text[rng.pick(&keys).clone()].to_owned();
                let value = wild(rng);
                let open = text.find('{').unwrap_or(0) + 1;
                text.insert_str(open, &format!("{key}: {value},"));
                changes.push(format!("{} twice, the other {}", short(&key), short(&value)));
            }
            1 => {
                let range = rng.pick(&keys).clone();
                changes.push(format!("no {}", short(&text[range.clone()])));
                text.replace_range(range, "\"another\"");
            }
            _ => {
                let range = rng.pick(&values).clone();
                let value = wild(rng);
                let before: String =
                    text[..range.start].chars().rev().take(40).collect::<Vec<_>>().iter().rev().collect();
                changes.push(format!(
                    "{before:?} then {} in place of {}",
                    short(&value),
                    short(&text[range.clone()])
                ));
                text.replace_range(range, &value);
            }
        }
    }
    changes.join("; ")
}

pub(crate) fn json(rng: &mut Rng, place: &mut CaseFolders) -> String {
    let is_json = |p: &std::path::PathBuf| {
        p.extension().is_some_and(|e| e == "json") && !p.ends_with("reference_metrics.json")
    };
    let mut found: Vec<_> = files::all(place).into_iter().filter(is_json).collect();
    // The most important file.
    let main: Vec<_> = found
        .iter()
        .filter(|p| p.ends_with("config.json") || p.ends_with("manifest.json"))
        .cloned()
        .collect();
    found.extend(main.iter().cycle().take(2 * main.len()).cloned());
    let file = rng.pick(&found);
    let path = place.subject.join(file);
    let mut text = fs::read_to_string(&path).unwrap();
    let changes = change(rng, &mut text);
    fs::write(&path, text).unwrap();
    format!("`{}`: {changes}", file.display())
}

/// Replacements of a value of `model.toml`.
const VALUES: [&str; 32] = [
    "0",
    "1",
    "-1",
    "7",
    "4096",
    "1048576",
    "2147483648",
    "9223372036854775807",
    "99999999999999999999",
    "1e308",
    "nan",
    "-inf",
    "0.5",
    "true",
    "\"\"",
    "\"auto\"",
    "\"npu\"",
    "\"q4\"",
    "\"i8\"",
    "\"f32\"",
    "\"0 B\"",
    "\"1 B\"",
    "\"40 MiB\"",
    "\"99999999999 GiB\"",
    "\"/dev/zero\"",
    "[\"/dev/zero\"]",
    "[\"text.txt\"]",
    "\"../outside\"",
    "[]",
    "[0]",
    "[1, 1]",
    "[64, 63]",
];

pub(crate) fn toml(rng: &mut Rng, place: &mut CaseFolders) -> String {
    let mut lines: Vec<String> = place.template.lines().map(str::to_owned).collect();
    let keyed = |l: &&(usize, String)| !l.1.starts_with('#') && l.1.contains(" = ");
    let mut changes = Vec::new();
    for _ in 0..=rng.below(3) {
        let numbered: Vec<(usize, String)> = lines.iter().cloned().enumerate().collect();
        let keys: Vec<&(usize, String)> = numbered.iter().filter(keyed).collect();
        let (at, line) = *rng.pick(&keys);
        let key = line.split(" = ").next().unwrap_or_default().to_owned();
        let value = match rng.below(10) {
            0 => "[".repeat(DEEP) + &"]".repeat(DEEP),
            1 => format!("{key} = 1"),
            _ => (*rng.pick(&VALUES)).to_owned(),
        };
        changes.push(format!("{key} = {}", value.chars().take(40).collect::<String>()));
        match rng.below(10) {
            0 => lines.insert(*at, format!("{key} = {value}")),
            1 => lines.insert(*at, format!("[{key}]\n{value}")),
            _ => lines[*at] = format!("{key} = {value}"),
        }
    }
    fs::write(place.work.join("model.toml"), lines.join("\n")).unwrap();
    format!("`model.toml` with {}", changes.join("; "))
}
