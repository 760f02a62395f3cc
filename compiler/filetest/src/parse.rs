//! The text of a filetest: a header, the inputs, the expected output.

use moec_base::error::{Error, Result};
use std::fmt::Write as _;
use std::path::Path;

/// Prefix of lines that are not of a text form, to which they are comments.
const HEADER_PREFIX: &str = ";!";

/// Inputs, by the names of the sections.
const INPUTS: [&str; 7] = ["graph", "placement", "loads", "thresholds", "hot", "config", "tensors"];
/// Own keys of the header.
const KEYS: [&str; 4] = ["pass", "from", "target", "show"];

/// A text with its sections. Each keeps the lines before it as empty ones, so that messages name lines of the
/// file.
#[derive(Clone, Debug, Default)]
pub(super) struct Sections {
    /// Keys of the header with their values.
    keys: Vec<(usize, String, String)>,
    /// The header's keys of `model.toml`.
    pub(super) settings: String,
    inputs: Vec<(String, String)>,
    /// Whether an error is expected, and the text.
    pub(super) expect: Option<(bool, String)>,
    /// The text before what is expected.
    pub(super) front: String,
}

impl Sections {
    /// Splits a text into sections. A text without sections is a Graph.
    ///
    /// # Errors
    /// Fails if a line is invalid, with its place.
    pub(super) fn parse(text: &str, path: &Path) -> Result<Self> {
        let mut found = Self::default();
        let plain = !text.lines().any(|l| section(l).is_some());
        let mut now = if plain { Some("graph".to_owned()) } else { None };
        found.inputs.extend(now.clone().map(|name| (name, String::new())));
        for (i, line) in text.lines().enumerate() {
            let wrong = |what: String| Error::input(format!("`{}:{}`: {what}", path.display(), i + 1));
            if let Some((_, expected)) = &mut found.expect {
                let _ = writeln!(expected, "{line}");
                continue;
            }
            if let Some(name) = section(line) {
                if let Some(error) = name.strip_prefix("expect") {
                    found.expect = Some((!error.is_empty(), String::new()));
                    continue;
                }
                if found.inputs.iter().any(|(n, _)| n == name) {
                    return Err(wrong(format!("there is a section `{name}` already")));
                }
                found.inputs.push((name.to_owned(), "\n".repeat(i + 1)));
                now = Some(name.to_owned());
            } else if let Some(directive) = line.strip_prefix(HEADER_PREFIX) {
                if now.is_some() && !plain {
                    return Err(wrong(format!("there is no section `{}`", directive.trim()))
                        .hint(format!("sections are {}, expect, expect error", INPUTS.join(", "))));
                }
                found.header(directive, i, &wrong)?;
            } else if let Some((_, text)) = found.inputs.last_mut().filter(|_| now.is_some()) {
                let _ = writeln!(text, "{line}");
            } else if !(line.trim().is_empty() || line.starts_with(';')) {
                return Err(wrong("expected a comment or a section".into())
                    .hint(format!("a section begins with a line `{HEADER_PREFIX} graph`")));
            }
            let _ = writeln!(found.front, "{line}");
        }
        Ok(found)
    }

    /// A line of the header: a key of its own, or one of `model.toml`.
    fn header(&mut self, directive: &str, line: usize, wrong: &dyn Fn(String) -> Error) -> Result<()> {
        let own = directive.split_once(':').filter(|(key, _)| !key.contains('='));
        if let Some((key, value)) = own.map(|(k, v)| (k.trim(), v.trim())) {
            if !KEYS.contains(&key) {
                return Err(wrong(format!("there is no key `{key}`")).hint(format!(
                    "keys are {}; options of passes are those of `model.toml`",
                    KEYS.join(", ")
                )));
            }
            if key == "show" && value != "changes" {
                return Err(wrong(format!("`{value}` is not a value of `show`"))
                    .hint("write `show: changes`, or leave it out to show the whole output"));
            }
            if self.key(key).is_some() {
                return Err(wrong(format!("`{key}` is given twice")));
            }
            self.keys.push((line, key.to_owned(), value.to_owned()));
        } else if directive.contains('=') {
            let filled = self.settings.matches('\n').count();
            self.settings += &"\n".repeat(line.saturating_sub(filled));
            let _ = writeln!(self.settings, "{}{directive}", " ".repeat(HEADER_PREFIX.len()));
        } else {
            return Err(wrong(format!("expected `key: value`, found `{}`", directive.trim()))
                .hint("options of passes are those of `model.toml`: `memory.prefetch = 1`"));
        }
        Ok(())
    }

    /// Value of one of the header's own keys.
    pub(super) fn key(&self, key: &str) -> Option<&str> {
        self.keys.iter().find(|(_, k, _)| k == key).map(|(_, _, value)| value.as_str())
    }

    /// The pass that a key of the header names.
    ///
    /// # Errors
    /// There is no such pass.
    pub(super) fn pass(&self, key: &str, path: &Path) -> Result<Option<&'static moec_pipeline::Pass>> {
        let Some((line, _, name)) = self.keys.iter().find(|(_, k, _)| k == key) else { return Ok(None) };
        let at = |e: Error| Error::input(format!("`{}:{}`: {}", path.display(), line + 1, e.message));
        moec_pipeline::find(name).map(Some).map_err(at)
    }

    /// An input section.
    pub(super) fn input(&self, name: &str) -> Option<&str> {
        self.inputs.iter().find(|(n, _)| n == name).map(|(_, text)| text.as_str())
    }
}

/// The name of the section that a line begins.
fn section(line: &str) -> Option<&str> {
    let name = line.strip_prefix(HEADER_PREFIX)?.trim();
    (INPUTS.contains(&name) || ["expect", "expect error"].contains(&name)).then_some(name)
}

/// The file with another expectation.
pub(super) fn with_expectation(front: &str, output: &Result<String, String>) -> String {
    let (word, text) = match output {
        Ok(text) => ("expect", text),
        Err(text) => ("expect error", text),
    };
    format!("{front}{HEADER_PREFIX} {word}\n{}\n", text.trim_matches('\n').trim_end())
}
