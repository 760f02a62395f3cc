//! `cargo xtask words`: phrases that have a plainer word, and docstrings that begin with a question word.
//!
//! Phrases are sought in comments, messages and pages, not in code: [`TABLE`] has the replacements. None may
//! be left. Docstrings that begin with a word of [`QUESTIONS`] are counted by crate and compared with
//! `words.txt`, whose rows may only fall.

use crate::shell::{Failed, root};
use crate::size;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// The file that holds the most docstrings with a question word, by crate.
const FILE: &str = "words.txt";
/// First lines of [`FILE`].
const HEAD: &str = "# Docstrings that begin with a question word, by crate, that `cargo xtask words` allows. A row may only fall:\n\
                    # `cargo xtask words --lower` writes what is left.\n";
/// Names of files with prose.
const ENDINGS: &[&str] = &["rs", "md", "html", "toml"];
/// Folders and files that are not prose of this project, or name the phrases themselves.
const LEFT_OUT: &[&str] = &["golden", "bench/results", "xtask/src/words.rs"];
/// Words that a docstring does not begin with: it says what the item is, or what it does.
const QUESTIONS: &[&str] =
    &["What", "How", "Where", "Who", "When", "Which", "Why", "Whose", "Whom", "Whoever"];
/// Words before or after a phrase, in its clause, among which an exception is sought.
const NEAR: usize = 4;

/// A phrase, what to write in its place, and words near it that excuse it: it then has another sense.
struct Row(&'static str, &'static str, &'static [&'static str]);

/// Every phrase. A word matches in lower case and with a capital; each form is a row of its own.
const TABLE: &[Row] = &[
    Row("processor", "CPU", &["tensor", "logits"]),
    Row("processors", "CPUs", &["tensor", "logits"]),
    Row("graphics unit", "GPU", &[]),
    Row("neural unit", "NPU", &[]),
    Row("GPU of nvidia's", "NVIDIA GPU", &[]),
    Row("gpus of nvidia's", "NVIDIA GPUs", &[]),
    Row("kernel of threads", "GPU kernel", &[]),
    Row("kernels of threads", "GPU kernels", &[]),
    Row("shapes as they come", "dynamic shapes", &[]),
    Row("stream of commands", "NDP command stream", &[]),
    Row("streams of commands", "NDP command streams", &[]),
    Row("memory modules", "NDP DIMMs", &[]),
    Row("memory that computes", "NDP DIMMs", &[]),
    Row("dimms that compute", "NDP DIMMs", &[]),
    Row("awake", "active", &[]),
    Row("asleep", "inactive", &["fall", "falls"]),
    Row("most_probable", "most probable", &[]),
    Row(
        "behind",
        "after, past, below",
        &[
            "leave",
            "leaves",
            "leaving",
            "left",
            "stay",
            "stays",
            "hide",
            "hides", // idioms
            "proxy",
            "trait",
            "link",
            "channel",
            "controller",
            "controllers",
            "bus",
            "queue", // in hardware and design
            "PCI",
            "reader",
            "device",
        ],
    ),
    Row("in front", "before", &["proxy"]),
    Row("nobody", "no step, no thread, no caller", &[]),
    Row("nobody's", "free, unowned", &[]),
    Row("somebody", "a caller, a user, a thread", &[]),
    Row("anybody", "any caller", &[]),
    Row("everybody", "all of them, by name", &[]),
    Row("whoever", "the caller, the first, any step", &[]),
    Row("whom", "which", &[]),
    Row("verb", "subcommand", &["phrase", "subject", "operation"]),
    Row("verbs", "subcommands", &[]),
    Row("foresee", "predict", &[]),
    Row("foresees", "predicts", &[]),
    Row("foreseen", "predicted", &[]),
    Row("twin", "host build", &[]),
    Row("twins", "host builds", &[]),
    Row("guess", "draft token, prediction", &[]),
    Row("guesses", "draft tokens, predictions", &["nothing"]),
    Row("that is none", "invalid, NaN", &[]),
    Row("that are none", "invalid, NaN", &[]),
];

/// Options, and what they do.
const OPTIONS: [(&str, &str); 2] = [
    ("--count", "print the docstrings that begin with a question word, by crate, and where they are"),
    ("--lower", "write rows of `words.txt` that have fallen"),
];

/// Runs the command with its options.
pub(crate) fn run(words: &[String]) -> Result<(), Failed> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match *words {
        [] => check(),
        ["--help" | "-h"] => {
            println!("Usage: cargo xtask words [OPTION]\n");
            println!("Seeks phrases that have a plainer word, in comments, messages and pages.\n");
            for (name, what) in OPTIONS {
                println!("  {name:<7} {what}");
            }
            Ok(())
        }
        ["--count"] => {
            let found = seek(&root())?;
            let mut text = String::new();
            for (at, of) in found.questions.values().flatten() {
                let _ = writeln!(text, "{at}: {of}");
            }
            for (row, of) in &found.questions {
                let _ = writeln!(text, "{:>8}  {row}", of.len());
            }
            let all: usize = found.questions.values().map(Vec::len).sum();
            println!("{text}{all:>8}  all together");
            Ok(())
        }
        ["--lower"] => {
            let found = counts(&seek(&root())?);
            let held = size::rows(&root(), FILE)?;
            let rows = held.iter().filter_map(|(row, &most)| {
                let now = found.get(row).copied().unwrap_or_default();
                (now > 0).then(|| format!("{:>8}  {row}\n", now.min(most)))
            });
            let text = rows.fold(HEAD.to_owned(), |text, row| text + &row);
            fs::write(root().join(FILE), text).map_err(|e| Failed::new(format!("`{FILE}`: {e}")))
        }
        _ => Err(Failed::new(format!("there is no option `{}`", words.join(" ")))
            .hint("`cargo xtask words --help` lists them")),
    }
}

/// Fails if the tree has a phrase of the table, or more docstrings with a question word than `words.txt`
/// allows.
pub(crate) fn check() -> Result<(), Failed> {
    let found = seek(&root())?;
    let mut wrong = found.phrases.clone();
    wrong.extend(risen(&counts(&found), &size::rows(&root(), FILE)?));
    if wrong.is_empty() {
        return Ok(());
    }
    Err(Failed::new(wrong.join("\n")).hint(
        "write the plainer word by its meaning; `cargo xtask words --count` lists docstrings with a question word",
    ))
}

/// Rows with more docstrings than allowed.
fn risen(found: &BTreeMap<String, usize>, held: &BTreeMap<String, usize>) -> Vec<String> {
    let risen = found.iter().filter_map(|(row, &count)| {
        let most = held.get(row).copied().unwrap_or_default();
        let what = "docstrings that begin with a question word";
        (count > most).then(|| format!("{row} has {count} {what}, and `{FILE}` allows {most}"))
    });
    risen.collect()
}

/// Result of a search.
#[derive(Default)]
struct SearchResult {
    /// `file:line: phrase: what to write`.
    phrases: Vec<String>,
    /// By crate: `file:line`, and the docstring's first line.
    questions: BTreeMap<String, Vec<(String, String)>>,
}

fn counts(found: &SearchResult) -> BTreeMap<String, usize> {
    found.questions.iter().map(|(row, of)| (row.clone(), of.len())).collect()
}

/// Looks through all tracked files with prose.
fn seek(root: &Path) -> Result<SearchResult, Failed> {
    let mut found = SearchResult::default();
    for name in size::tracked(root)? {
        let path = Path::new(&name);
        let ending = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        if !ENDINGS.contains(&ending) || LEFT_OUT.iter().any(|out| path.starts_with(out)) {
            continue;
        }
        // A file that was deleted and is tracked yet has no words.
        let Ok(text) = fs::read_to_string(root.join(path)) else { continue };
        let prose = if ending == "rs" { prose_of_rust(&text) } else { prose_of_page(&text, ending == "md") };
        found.phrases.extend(phrases(&prose).into_iter().map(|(at, row)| {
            let line = prose[..at].split(|&b| b == b'\n').count();
            format!("{name}:{line}: \"{}\": write {}", row.0, row.1)
        }));
        if ending == "rs" {
            let of = questions(&text);
            if !of.is_empty() {
                let row = found.questions.entry(size::row_of(root, &name)).or_default();
                row.extend(of.into_iter().map(|(line, text)| (format!("{name}:{line}"), text)));
            }
        }
    }
    Ok(found)
}

/// First lines of docstrings that begin with a question word, with their line numbers from 1.
fn questions(text: &str) -> Vec<(usize, String)> {
    let mark = |line: &str| ["///", "//!"].into_iter().find(|mark| line.trim_start().starts_with(mark));
    let mut found = Vec::new();
    let mut before = None;
    for (i, line) in text.lines().enumerate() {
        let now = mark(line);
        if now.is_some() && now != before {
            let comment = line.trim_start()[3..].trim();
            if comment.split([' ', ',', ':']).next().is_some_and(|word| QUESTIONS.contains(&word)) {
                found.push((i + 1, comment.to_owned()));
            }
        }
        before = now;
    }
    found
}

/// Code is replaced by this byte, which no phrase crosses.
const CODE: u8 = 0;

/// The text with everything but comments and messages masked. A string without a blank is a name, not a
/// message.
fn prose_of_rust(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut out: Vec<u8> = bytes.iter().map(|&b| if b.is_ascii_whitespace() { b } else { CODE }).collect();
    let (mut i, mut commented) = (0, false);
    while i < bytes.len() {
        let rest = &bytes[i..];
        let end = if rest.starts_with(b"//") {
            let end = i + rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len());
            let from = i + rest.iter().take_while(|&&b| b == b'/' || b == b'!').count();
            out[from..end].copy_from_slice(&bytes[from..end]);
            // A phrase may cross lines of one comment.
            if commented {
                out[i..from].fill(b' ');
            }
            commented = true;
            end
        } else if rest[0] == b'"' {
            let end = i + string(rest);
            keep_string(&bytes[i + 1..end - 1], &mut out[i + 1..end - 1]);
            end
        } else if let Some(hashes) = raw(bytes, i) {
            let close = [&b"\""[..], &b"#".repeat(hashes)].concat();
            let from = i + hashes + 2;
            let len = bytes[from..].windows(close.len()).position(|w| w == close).unwrap_or(0);
            keep_string(&bytes[from..from + len], &mut out[from..from + len]);
            from + len + close.len()
        } else if rest[0] == b'\'' {
            i + character(rest)
        } else {
            commented &= rest[0].is_ascii_whitespace();
            i + 1
        };
        i = end.max(i + 1);
    }
    mask_code(&mut out);
    out
}

/// Bytes of a string with its quotes.
fn string(from: &[u8]) -> usize {
    let mut i = 1;
    while i < from.len() && from[i] != b'"' {
        i += if from[i] == b'\\' { 2 } else { 1 };
    }
    (i + 1).min(from.len()).max(2)
}

/// Number of `#` of a raw string that begins at `i`.
fn raw(bytes: &[u8], i: usize) -> Option<usize> {
    let name = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_';
    let begins = bytes[i] == b'r' && !bytes[..i].last().is_some_and(|b| *b != b'b' && name(b));
    let hashes = bytes[i + 1..].iter().take_while(|&&b| b == b'#').count();
    (begins && bytes.get(i + 1 + hashes) == Some(&b'"')).then_some(hashes)
}

/// Bytes of a character with its quotes; 1 for a lifetime.
fn character(from: &[u8]) -> usize {
    let escaped = from.get(1) == Some(&b'\\');
    let close = from.iter().skip(if escaped { 3 } else { 2 }).take(10).position(|&b| b == b'\'');
    match close {
        Some(at) if escaped => at + 4,
        // One character has at most four bytes.
        Some(at) if at < 4 && std::str::from_utf8(&from[1..at + 2]).is_ok_and(|s| s.chars().count() == 1) => {
            at + 3
        }
        _ => 1,
    }
}

/// Copies a message; what is inserted into it is code.
fn keep_string(of: &[u8], out: &mut [u8]) {
    if !of.trim_ascii().contains(&b' ') {
        return;
    }
    out.copy_from_slice(of);
    let mut depth = 0_usize;
    for i in 0..of.len() {
        match of[i] {
            b'{' => depth += 1,
            b'}' => depth = depth.saturating_sub(1),
            b'\\' if i + 1 < of.len() => {
                out[i] = b' ';
                // `\n` ends a piece of text; the end of a line does not.
                if of[i + 1] != b'\n' {
                    out[i + 1] = CODE;
                }
                continue;
            }
            _ if depth == 0 => continue,
            _ => {}
        }
        out[i] = CODE;
    }
}

/// A page, without blocks of code and targets of links where it is Markdown.
fn prose_of_page(text: &str, markdown: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut fenced = false;
    for line in text.split_inclusive('\n') {
        let fence = markdown && line.trim_start().starts_with("```");
        fenced ^= fence;
        if fence || fenced {
            out.extend(line.bytes().map(|b| if b == b'\n' { b } else { CODE }));
        } else {
            out.extend_from_slice(line.as_bytes());
        }
    }
    if markdown {
        let mut i = 0;
        while let Some(at) = out[i..].windows(2).position(|w| w == b"](") {
            let from = i + at + 1;
            let end =
                out[from..].iter().position(|&b| b == b')' || b == b'\n').map_or(out.len(), |n| from + n);
            out[from..end].fill(CODE);
            i = end;
        }
    }
    mask_code(&mut out);
    out
}

/// Masks spans of code in backticks, which end on their own line.
fn mask_code(out: &mut [u8]) {
    let mut open = None;
    for i in 0..out.len() {
        match (out[i], open) {
            (b'`', None) => open = Some(i),
            (b'`', Some(from)) => {
                out[from..=i].fill(CODE);
                open = None;
            }
            (b'\n', _) => open = None,
            _ => {}
        }
    }
}

/// A word of a text: its place, itself in lower case unless it is all capitals, and whether only blanks part
/// it from the word before.
struct Word {
    at: usize,
    text: String,
    joined: bool,
}

fn words(prose: &[u8]) -> Vec<Word> {
    let letter = |b: u8| b.is_ascii_alphanumeric() || b == b'\'' || b == b'_' || b == b'/' || b >= 0x80;
    // A path is one word.
    let part = |at: usize| {
        letter(prose[at]) || prose[at] == b'.' && prose.get(at + 1).is_some_and(|&next| letter(next))
    };
    let mut found: Vec<Word> = Vec::new();
    let (mut i, mut joined) = (0, false);
    while i < prose.len() {
        if part(i) {
            let end = (i..prose.len()).find(|&at| !part(at)).unwrap_or(prose.len());
            let text = String::from_utf8_lossy(&prose[i..end]).trim_matches('\'').to_owned();
            // Capitals alone are a placeholder (`VERB`) or an abbreviation.
            let capitals = text.len() > 1 && !text.contains(|c: char| c.is_ascii_lowercase());
            let text = if capitals { text } else { text.to_ascii_lowercase() };
            found.push(Word { at: i, text, joined });
            (i, joined) = (end, true);
        } else {
            joined &= prose[i].is_ascii_whitespace();
            i += 1;
        }
    }
    found
}

/// Places of the table's phrases.
fn phrases(prose: &[u8]) -> Vec<(usize, &'static Row)> {
    let words = words(prose);
    let mut found = Vec::new();
    for (i, word) in words.iter().enumerate() {
        for row in TABLE {
            let mut of = row.0.split(' ');
            if of.next() != Some(&word.text) {
                continue;
            }
            let len = row.0.split(' ').count();
            let rest = words.get(i + 1..i + len).unwrap_or_default();
            if rest.len() + 1 != len || !rest.iter().zip(of).all(|(w, of)| w.joined && w.text == of) {
                continue;
            }
            let before = (i.saturating_sub(NEAR)..i).rev().take_while(|&at| words[at + 1].joined);
            let after = (i + len..(i + len + NEAR).min(words.len())).take_while(|&at| words[at].joined);
            if !before.chain(after).any(|at| row.2.contains(&&*words[at].text)) {
                found.push((word.at, row));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(prose: &[u8]) -> Vec<&'static str> {
        phrases(prose).into_iter().map(|(_, row)| row.0).collect()
    }

    #[test]
    fn phrases_are_searched_in_comments_and_messages() {
        let text = r##"
/// The processor, in
/// front of `nobody` else.
fn nobody(c: char, s: &'static str) -> &str {
    let quote = '"'; // somebody
    let name = "whoever";
    format!("for {whoever} \"that is\nnone\" asks whom \
             {}", r#"a "processor" more"#)
}
"##;
        let mut all = found(&prose_of_rust(text));
        all.sort_unstable();
        assert_eq!(all, ["in front", "processor", "processor", "somebody", "whom"]);
    }

    #[test]
    fn code_and_links_of_pages_are_ignored() {
        let text = "Nobody's [exec/processor.rs](behind.md) and `whom`.\n```\nwhoever\n```\nThat is\nnone; behind a proxy. But behind it.\n";
        assert_eq!(found(&prose_of_page(text, true)), ["nobody's", "that is none", "behind"]);
    }

    #[test]
    fn phrase_line_is_its_first_line() {
        let prose = prose_of_rust("//! A\n//! b in\n//! front\n");
        let at = phrases(&prose)[0].0;
        assert_eq!(prose[..at].split(|&b| b == b'\n').count(), 2);
    }

    #[test]
    fn docstrings_count_by_their_first_word() {
        let text = "//! What it is.\n//! How.\n\n/// Whether so.\n/// Where.\nfn f() {}\n/// Why, then.\nfn g() {}\n// Who\n";
        let lines: Vec<_> = questions(text).into_iter().map(|(line, _)| line).collect();
        assert_eq!(lines, [1, 7]);
    }

    #[test]
    fn phrase_counts_may_only_decrease() {
        let rows = |of: &[(&str, usize)]| of.iter().map(|&(row, n)| (row.to_owned(), n)).collect();
        let held = rows(&[("ir", 3), ("gguf", 1)]);
        assert!(risen(&rows(&[("ir", 3)]), &held).is_empty());
        let risen = risen(&rows(&[("ir", 4), ("new", 1)]), &held);
        assert_eq!(risen.len(), 2, "{risen:?}");
        assert!(risen[0].contains("ir has 4") && risen[1].contains("new has 1"), "{risen:?}");
    }
}
