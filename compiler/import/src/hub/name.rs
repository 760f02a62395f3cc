//! Names of models on a hub: `owner/name`, `owner/name@revision`, `owner/name:file.gguf`.

use std::fmt;

/// Default revision.
const MAIN: &str = "main";

/// A requested model. No part leads out of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// Its owner.
    pub owner: String,
    /// Its name.
    pub model: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// One file of it, instead of the whole checkpoint.
    pub file: Option<String>,
}

impl Name {
    /// Parses a name; `None` if the text does not have the form of one.
    pub fn parse(text: &str) -> Option<Self> {
        let (text, file) = text.split_once(':').map_or((text, None), |(rest, file)| (rest, Some(file)));
        let (text, revision) = text.split_once('@').unwrap_or((text, MAIN));
        let (owner, model) = text.split_once('/')?;
        let good = is_plain(owner)
            && is_plain(model)
            && is_path(revision)
            && file.is_none_or(|f| is_path(f) && is_gguf(f));
        let owned = str::to_owned;
        good.then(|| Self {
            owner: owned(owner),
            model: owned(model),
            revision: owned(revision),
            file: file.map(owned),
        })
    }

    /// Its folder in the cache.
    pub(super) fn folder(&self) -> String {
        format!("models--{}--{}", self.owner, self.model)
    }

    /// Owner and name.
    pub(super) fn id(&self) -> String {
        format!("{}/{}", self.owner, self.model)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.id())?;
        if self.revision != MAIN {
            write!(f, "@{}", self.revision)?;
        }
        self.file.iter().try_for_each(|file| write!(f, ":{file}"))
    }
}

/// Whether a word can be the name of a file: letters, digits, `.`, `_` and `-`, and no leading dot.
pub(super) fn is_plain(word: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !word.is_empty() && word.len() <= 200 && !word.starts_with('.') && word.chars().all(known)
}

/// Whether a text is a path of plain names, downwards.
pub(super) fn is_path(text: &str) -> bool {
    text.split('/').count() <= 8 && text.split('/').all(is_plain)
}

/// Whether a file name is that of a GGUF file.
pub(super) fn is_gguf(file: &str) -> bool {
    std::path::Path::new(file).extension().is_some_and(|e| e == "gguf")
}

/// Whether a text is a hexadecimal hash with so many digits.
pub(super) fn is_hash(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        let name = Name::parse("allenai/OLMoE-1B-7B-0924").unwrap();
        assert_eq!((&*name.owner, &*name.model, &*name.revision), ("allenai", "OLMoE-1B-7B-0924", "main"));
        for text in ["a/b", "a/b@v1.0", "a/b@refs/pr/1", "a/b:x-Q4_K_M.gguf", "a/b@main2:sub/x.gguf"] {
            assert_eq!(Name::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Name::parse("a/b@main").unwrap().to_string(), "a/b");
    }

    #[test]
    fn invalid_hub_names_are_refused() {
        for text in [
            "",
            "a",
            "a/",
            "/a",
            "a/b/c",
            "../b",
            "a/..",
            "./b",
            "a/.b",
            "a/b@",
            "a/b@../x",
            "a/b@/x",
            "a/b:",
            "a/b:x.bin",
            "a/b:../x.gguf",
            "a/b:/x.gguf",
            "a\\b/c",
            "a b/c",
            "a/b?x",
            "a/b#c",
            "a/b%2e",
            "ä/b",
        ] {
            assert_eq!(Name::parse(text), None, "{text}");
        }
    }
}
