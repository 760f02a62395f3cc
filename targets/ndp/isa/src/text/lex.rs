//! Splitting a line into tokens, and walking over them.

use super::{Parsed, SyntaxError};
use std::fmt::Display;
use std::str::FromStr;

/// An unsigned integer that can be read.
pub(super) trait Integer: Copy + Default + PartialOrd + FromStr + Display {}

impl Integer for u32 {}
impl Integer for u64 {}

/// A token of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token<'t> {
    /// `weights`, `gelu_tanh`, `layers.0`
    Word(&'t str),
    /// `12`, `-1.5e-7`
    Number(&'t str),
    /// One of `[ ] ( ) , + *`, `..` or `->`.
    Punct(&'t str),
    /// A character that no token begins with.
    Other(char),
    /// The end of the line, or a comment.
    End,
}

impl Token<'_> {
    fn describe(self) -> String {
        match self {
            Self::Word(t) | Self::Number(t) | Self::Punct(t) => format!("`{t}`"),
            Self::Other(c) => format!("the character {c:?}"),
            Self::End => "the end of the line".into(),
        }
    }
}

const PUNCTUATION: [&str; 9] = ["->", "..", "[", "]", "(", ")", ",", "+", "*"];

/// The tokens of one line, one of them ahead.
pub(super) struct Line<'t> {
    text: &'t str,
    number: usize,
    token: Token<'t>,
    /// Offset of the token, and of the search for the next one.
    at: usize,
    next: usize,
}

impl<'t> Line<'t> {
    /// Line `number` of a text, counted from 1.
    pub(super) fn new(text: &'t str, number: usize) -> Self {
        let mut line = Self { text, number, token: Token::End, at: 0, next: 0 };
        line.advance();
        line
    }

    /// The current token.
    pub(super) const fn peek(&self) -> Token<'t> {
        self.token
    }

    /// Takes the current token.
    pub(super) fn advance(&mut self) -> Token<'t> {
        let taken = self.token;
        let rest = self.text.get(self.next..).unwrap_or_default();
        let trimmed = rest.trim_start();
        self.at = self.next + (rest.len() - trimmed.len());
        let (token, length) = token(trimmed);
        self.token = token;
        self.next = self.at + length;
        taken
    }

    /// An error at the current token.
    pub(super) fn error(&self, message: impl Into<String>, hint: impl Into<String>) -> SyntaxError {
        let before = self.text.get(..self.at).unwrap_or(self.text);
        let column = before.chars().count() + 1;
        SyntaxError { line: self.number, column, message: message.into(), hint: hint.into() }
    }

    /// An error that names what is at the current place.
    pub(super) fn expected(&self, what: &str, hint: impl Into<String>) -> SyntaxError {
        self.error(format!("expected {what}, found {}", self.token.describe()), hint)
    }

    /// Takes this punctuation if it is there.
    pub(super) fn eat(&mut self, punctuation: &str) -> bool {
        let there = self.token == Token::Punct(punctuation);
        if there {
            self.advance();
        }
        there
    }

    /// Takes this punctuation.
    pub(super) fn punct(&mut self, punctuation: &str, hint: &str) -> Parsed<()> {
        if self.eat(punctuation) { Ok(()) } else { Err(self.expected(&format!("`{punctuation}`"), hint)) }
    }

    /// Takes this word if it is there.
    pub(super) fn eat_word(&mut self, word: &str) -> bool {
        let there = self.token == Token::Word(word);
        if there {
            self.advance();
        }
        there
    }

    /// Takes this word.
    pub(super) fn keyword(&mut self, word: &str, hint: &str) -> Parsed<()> {
        if self.eat_word(word) { Ok(()) } else { Err(self.expected(&format!("`{word}`"), hint)) }
    }

    /// Takes an integer from 0 to `most`.
    pub(super) fn integer<T: Integer>(&mut self, what: &str, most: T) -> Parsed<T> {
        let hint = format!("a number from 0 to {most}, in decimal digits");
        let Token::Number(digits) = self.token else { return Err(self.expected(what, hint)) };
        let plain = digits.bytes().all(|b| b.is_ascii_digit());
        match T::from_str(digits) {
            Ok(value) if plain && value <= most => {
                self.advance();
                Ok(value)
            }
            _ => Err(self.expected(what, hint)),
        }
    }

    /// Takes an integer of 32 bits.
    pub(super) fn u32(&mut self, what: &str) -> Parsed<u32> {
        self.integer(what, u32::MAX)
    }

    /// Takes a finite number.
    pub(super) fn float(&mut self, what: &str) -> Parsed<f32> {
        let value = match self.token {
            Token::Number(n) => f32::from_str(n).ok().filter(|x| x.is_finite()),
            _ => None,
        };
        let value =
            value.ok_or_else(|| self.expected(what, "a finite number in decimal, such as 1.702 or 5e-3"))?;
        self.advance();
        Ok(value)
    }

    /// Takes one of some named things.
    pub(super) fn one_of<T: Copy>(
        &mut self,
        what: &str,
        all: &[T],
        name: fn(T) -> &'static str,
    ) -> Parsed<T> {
        let found = match self.token {
            Token::Word(word) => all.iter().copied().find(|&t| name(t) == word),
            _ => None,
        };
        let names: Vec<_> = all.iter().map(|&t| name(t)).collect();
        let found = found.ok_or_else(|| self.expected(what, format!("one of: {}", names.join(", "))))?;
        self.advance();
        Ok(found)
    }
}

/// The token that a text without leading blanks begins with, and its bytes.
fn token(text: &str) -> (Token<'_>, usize) {
    let Some(first) = text.chars().next().filter(|&c| c != ';') else { return (Token::End, 0) };
    if let Some(punctuation) = PUNCTUATION.iter().find(|p| text.starts_with(**p)) {
        return (Token::Punct(punctuation), punctuation.len());
    }
    let length = match first {
        '0'..='9' | '-' => number(text.as_bytes()),
        'a'..='z' | 'A'..='Z' | '_' => {
            text.bytes().take_while(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.')).count()
        }
        other => return (Token::Other(other), other.len_utf8()),
    };
    let word = text.get(..length).unwrap_or_default();
    (
        if first.is_ascii_alphabetic() || first == '_' { Token::Word(word) } else { Token::Number(word) },
        length,
    )
}

/// Bytes of a number: digits, letters, single points, and signs after an exponent. A caller that wants a
/// number checks it.
fn number(text: &[u8]) -> usize {
    let mut length = 1;
    while let Some(&byte) = text.get(length) {
        let previous = text.get(length - 1);
        let part = match byte {
            b'.' => text.get(length + 1) != Some(&b'.'),
            b'+' | b'-' => matches!(previous, Some(b'e' | b'E')),
            _ => byte.is_ascii_alphanumeric(),
        };
        if !part {
            break;
        }
        length += 1;
    }
    length
}
