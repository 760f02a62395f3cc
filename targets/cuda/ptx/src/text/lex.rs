//! Words, numbers and marks of a text, and the errors that point at them.

use super::{Parsed, SyntaxError};

/// A piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token<'t> {
    /// A name, a directive or an instruction with its modifiers.
    Word(&'t str),
    /// Literal that begins with a digit.
    Number(&'t str),
    /// Text between quotes.
    Text(&'t str),
    /// Any other character.
    Mark(char),
    /// End of the text.
    End,
}

/// A piece with its place.
#[derive(Clone, Copy, Debug)]
struct Placed<'t> {
    token: Token<'t>,
    line: u32,
    column: u32,
}

/// The pieces of a text, read one after another.
pub(super) struct Tokens<'t> {
    lines: Vec<&'t str>,
    pieces: Vec<Placed<'t>>,
    at: usize,
}

fn begins_word(c: char) -> bool {
    c.is_ascii_alphabetic() || matches!(c, '_' | '$' | '%' | '.')
}

fn in_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%' | '.')
}

/// Bytes of the word at the beginning of a text; `::` belongs to it, as in `.L1::no_allocate`.
fn word_length(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let mut end = 0;
    while end < bytes.len() {
        if in_word(char::from(bytes[end])) {
            end += 1;
        } else if bytes[end] == b':' && bytes.get(end + 1) == Some(&b':') {
            end += 2;
        } else {
            break;
        }
    }
    end
}

impl<'t> Tokens<'t> {
    /// Cuts a text; comments go.
    pub(super) fn new(text: &'t str) -> Parsed<Self> {
        let mut found = Self { lines: text.lines().collect(), pieces: Vec::new(), at: 0 };
        let (mut rest, mut line, mut column) = (text, 1u32, 1u32);
        while let Some(first) = rest.chars().next() {
            let length = if rest.starts_with("//") {
                rest.find('\n').unwrap_or(rest.len())
            } else if let Some(comment) = rest.strip_prefix("/*") {
                match comment.find("*/") {
                    Some(end) => end + 4,
                    None => return Err(found.at(line, column, "a comment without an end", "close it: `*/`")),
                }
            } else if first.is_whitespace() {
                first.len_utf8()
            } else {
                let (token, length) = match first {
                    '"' => match rest[1..].find('"') {
                        Some(end) => (Token::Text(&rest[1..=end]), end + 2),
                        None => {
                            return Err(found.at(line, column, "a text without an end", "close it: `\"`"));
                        }
                    },
                    c if c.is_ascii_digit() => {
                        let length = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '.'));
                        let length = length.unwrap_or(rest.len());
                        (Token::Number(&rest[..length]), length)
                    }
                    c if begins_word(c) => {
                        let length = word_length(rest);
                        (Token::Word(&rest[..length]), length)
                    }
                    c => (Token::Mark(c), c.len_utf8()),
                };
                found.pieces.push(Placed { token, line, column });
                length
            };
            for c in rest[..length].chars() {
                (line, column) = if c == '\n' { (line + 1, 1) } else { (line, column + 1) };
            }
            rest = &rest[length..];
        }
        found.pieces.push(Placed { token: Token::End, line, column });
        Ok(found)
    }

    /// An error at a place.
    fn at(&self, line: u32, column: u32, message: impl Into<String>, hint: impl Into<String>) -> SyntaxError {
        let text = self.lines.get(line as usize - 1).map_or("", |text| text.trim());
        let text = text.chars().take(200).collect();
        SyntaxError { line, column, message: message.into(), text, hint: hint.into() }
    }

    /// The next piece.
    pub(super) fn peek(&self) -> Token<'t> {
        self.pieces[self.at].token
    }

    /// The piece after the next one.
    pub(super) fn second(&self) -> Token<'t> {
        self.pieces.get(self.at + 1).map_or(Token::End, |placed| placed.token)
    }

    /// The line of the next piece.
    pub(super) fn line(&self) -> u32 {
        self.pieces[self.at].line
    }

    /// Advances to the next token.
    pub(super) fn advance(&mut self) {
        if self.at + 1 < self.pieces.len() {
            self.at += 1;
        }
    }

    /// An error at the next piece.
    pub(super) fn error(&self, message: impl Into<String>, hint: impl Into<String>) -> SyntaxError {
        let Placed { line, column, .. } = self.pieces[self.at];
        self.at(line, column, message, hint)
    }

    /// An error at the next piece: something else was expected.
    pub(super) fn expected(&self, what: &str, hint: impl Into<String>) -> SyntaxError {
        let found = match self.peek() {
            Token::Word(text) | Token::Number(text) => format!("`{text}`"),
            Token::Text(text) => format!("\"{text}\""),
            Token::Mark(c) => format!("`{c}`"),
            Token::End => "the end of the text".into(),
        };
        self.error(format!("expected {what}, found {found}"), hint)
    }

    /// Whether a mark came; it is taken.
    pub(super) fn eat(&mut self, mark: char) -> bool {
        let is = self.peek() == Token::Mark(mark);
        if is {
            self.advance();
        }
        is
    }

    /// Whether a word came; it is taken.
    pub(super) fn eat_word(&mut self, word: &str) -> bool {
        let is = self.peek() == Token::Word(word);
        if is {
            self.advance();
        }
        is
    }

    /// A mark that has to come.
    pub(super) fn mark(&mut self, mark: char, hint: &str) -> Parsed<()> {
        if self.eat(mark) { Ok(()) } else { Err(self.expected(&format!("`{mark}`"), hint)) }
    }

    /// A name that has to come.
    pub(super) fn name(&mut self, what: &str) -> Parsed<String> {
        match self.peek() {
            Token::Word(word) if !word.starts_with('.') && !word.contains("::") => {
                self.advance();
                Ok(word.to_owned())
            }
            _ => Err(self.expected(what, "a name has letters, digits, `_`, `$`, `%` and `.`")),
        }
    }

    /// An integer without sign: decimal, `0x…`, `0b…` or octal, with or without `U`.
    pub(super) fn unsigned(&mut self, what: &str) -> Parsed<u64> {
        let number = match self.peek() {
            Token::Number(text) => unsigned(text),
            _ => None,
        };
        let number = number.ok_or_else(|| self.expected(what, "an integer of at most 64 bits"))?;
        self.advance();
        Ok(number)
    }

    /// An integer below a limit.
    pub(super) fn below<T: TryFrom<u64>>(&mut self, what: &str, limit: u64) -> Parsed<T> {
        let before = self.at;
        let number = self.unsigned(what)?;
        if let (true, Ok(number)) = (number < limit, T::try_from(number)) {
            return Ok(number);
        }
        self.at = before;
        Err(self.error(format!("{what} is {number}"), format!("it must be below {limit}")))
    }
}

/// The integer that a text represents.
pub(super) fn unsigned(text: &str) -> Option<u64> {
    let text = text.strip_suffix('U').unwrap_or(text);
    let of = |digits: &str, radix| {
        let plain = digits.bytes().all(|b| b.is_ascii_alphanumeric());
        if plain { u64::from_str_radix(digits, radix).ok() } else { None }
    };
    match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => of(&text[2..], 16),
        [b'0', b'b' | b'B', ..] => of(&text[2..], 2),
        [b'0', _, ..] => of(&text[1..], 8),
        _ => of(text, 10),
    }
}
