//! Splitting text into tokens.

use super::ParseError;
use std::iter::Peekable;
use std::str::CharIndices;

/// A token; words and numbers borrow the text.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token<'t> {
    /// `layers.0.attn`, `rms_norm`, `inf`
    Word(&'t str),
    /// `12`, `-1e-6`, `-inf`
    Number(&'t str),
    /// `"…"`, unescaped.
    Str(String),
    /// One of `@ $ % { } [ ] ( ) , : = +`, or `>` for the arrow `->`.
    Punct(char),
    /// The end of the text.
    End,
}

impl Token<'_> {
    /// Name of the token in messages.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Word(w) => format!("`{w}`"),
            Self::Number(n) => format!("`{n}`"),
            Self::Str(s) => format!("{s:?}"),
            Self::Punct('>') => "`->`".into(),
            Self::Punct(c) => format!("`{c}`"),
            Self::End => "the end of the text".into(),
        }
    }
}

/// Whether a name prints as it is. Others are quoted.
pub(super) fn is_word(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_') && bytes.all(is_word_byte)
}

fn is_word_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.')
}

/// A list of strings in quotes.
pub(super) fn quoted(items: &[String]) -> String {
    let items: Vec<_> = items.iter().map(|s| quote(s)).collect();
    format!("[{}]", items.join(", "))
}

/// A string in quotes that the lexer reads back.
pub(super) fn quote(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if c.is_control() => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Line and column of a byte offset, from 1.
pub(super) fn error_at(text: &str, offset: usize, message: String) -> ParseError {
    let before = text.get(..offset).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |i| i + 1);
    ParseError {
        line: before.matches('\n').count() + 1,
        column: before[line_start..].chars().count() + 1,
        message,
    }
}

/// Reads tokens one after the other.
pub(super) struct Lexer<'t> {
    text: &'t str,
    chars: Peekable<CharIndices<'t>>,
}

impl<'t> Lexer<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        Self { text, chars: text.char_indices().peekable() }
    }

    fn offset(&mut self) -> usize {
        self.chars.peek().map_or(self.text.len(), |&(i, _)| i)
    }

    /// The next token and its byte offset.
    pub(super) fn next(&mut self) -> Result<(Token<'t>, usize), ParseError> {
        loop {
            let Some(&(at, c)) = self.chars.peek() else {
                return Ok((Token::End, self.text.len()));
            };
            let token = match c {
                ';' => {
                    while self.chars.next_if(|&(_, c)| c != '\n').is_some() {}
                    continue;
                }
                c if c.is_whitespace() => {
                    self.chars.next();
                    continue;
                }
                '"' => Token::Str(self.string(at)?),
                '-' if self.text[at..].starts_with("->") => {
                    self.chars.next();
                    self.chars.next();
                    Token::Punct('>')
                }
                '0'..='9' | '-' => Token::Number(self.number(at)),
                '@' | '$' | '%' | '{' | '}' | '[' | ']' | '(' | ')' | ',' | ':' | '=' | '+' => {
                    self.chars.next();
                    Token::Punct(c)
                }
                c if c.is_ascii_alphabetic() || c == '_' => {
                    while self.chars.next_if(|&(_, c)| c.is_ascii() && is_word_byte(c as u8)).is_some() {}
                    let end = self.offset();
                    Token::Word(&self.text[at..end])
                }
                c => return Err(error_at(self.text, at, format!("the character {c:?} has no meaning here"))),
            };
            return Ok((token, at));
        }
    }

    /// Digits, letters, points, and signs after an exponent. A caller that wants a number checks it.
    fn number(&mut self, at: usize) -> &'t str {
        let mut last = ' ';
        self.chars.next_if(|&(_, c)| c == '-');
        while let Some((_, c)) = self.chars.next_if(|&(_, c)| {
            c.is_ascii_alphanumeric() || c == '.' || (matches!(last, 'e' | 'E') && matches!(c, '-' | '+'))
        }) {
            last = c;
        }
        let end = self.offset();
        &self.text[at..end]
    }

    fn string(&mut self, at: usize) -> Result<String, ParseError> {
        let text = self.text;
        let bad = |at: usize, what: &str| error_at(text, at, what.to_owned());
        let mut out = String::new();
        self.chars.next();
        loop {
            match self.chars.next() {
                None => return Err(bad(at, "the string has no end")),
                Some((_, '"')) => return Ok(out),
                Some((_, '\\')) => {
                    let (place, escaped) =
                        self.chars.next().ok_or_else(|| bad(at, "the string has no end"))?;
                    out.push(match escaped {
                        'n' => '\n',
                        't' => '\t',
                        '"' | '\\' => escaped,
                        'u' => self
                            .unicode()
                            .ok_or_else(|| bad(place, "expected \\u{…} with a hexadecimal character"))?,
                        _ => return Err(bad(place, "expected one of \\n \\t \\\" \\\\ \\u{…}")),
                    });
                }
                Some((_, c)) => out.push(c),
            }
        }
    }

    fn unicode(&mut self) -> Option<char> {
        self.chars.next_if(|&(_, c)| c == '{')?;
        let mut code = 0_u32;
        while let Some((_, c)) = self.chars.next_if(|&(_, c)| c.is_ascii_hexdigit()) {
            code = code.checked_mul(16)?.checked_add(c.to_digit(16)?)?;
        }
        self.chars.next_if(|&(_, c)| c == '}')?;
        char::from_u32(code)
    }
}
