//! Walking over tokens with one token of lookahead.

use super::ParseError;
use super::lex::{Lexer, Token, error_at};
use std::str::FromStr;

pub(crate) type Parsed<T> = Result<T, ParseError>;

/// Deepest nesting of expressions and attributes.
pub(super) const MAX_DEPTH: usize = 64;

pub(super) struct Cursor<'t> {
    text: &'t str,
    lexer: Lexer<'t>,
    token: Token<'t>,
    at: usize,
}

impl<'t> Cursor<'t> {
    pub(super) fn new(text: &'t str) -> Parsed<Self> {
        let mut lexer = Lexer::new(text);
        let (token, at) = lexer.next()?;
        Ok(Self { text, lexer, token, at })
    }

    /// The current token.
    pub(super) fn peek(&self) -> &Token<'t> {
        &self.token
    }

    /// Byte offset of the current token.
    pub(super) const fn at(&self) -> usize {
        self.at
    }

    /// Takes the current token.
    pub(super) fn advance(&mut self) -> Parsed<Token<'t>> {
        let (next, at) = self.lexer.next()?;
        self.at = at;
        Ok(std::mem::replace(&mut self.token, next))
    }

    /// An error at a byte offset.
    pub(super) fn error_at(&self, at: usize, message: impl Into<String>) -> ParseError {
        error_at(self.text, at, message.into())
    }

    /// An error at the current token.
    pub(super) fn expected<T>(&self, what: &str) -> Parsed<T> {
        let message = format!("expected {what}, found {}", self.token.describe());
        Err(error_at(self.text, self.at, message))
    }

    pub(super) fn at_end(&self) -> bool {
        self.token == Token::End
    }

    pub(super) fn is_punct(&self, c: char) -> bool {
        self.token == Token::Punct(c)
    }

    pub(super) fn is_word(&self, word: &str) -> bool {
        self.token == Token::Word(word)
    }

    /// Takes this punctuation if it is there.
    pub(super) fn eat(&mut self, c: char) -> Parsed<bool> {
        let there = self.is_punct(c);
        if there {
            self.advance()?;
        }
        Ok(there)
    }

    pub(super) fn punct(&mut self, c: char) -> Parsed<()> {
        if self.eat(c)? { Ok(()) } else { self.expected(&Token::Punct(c).describe()) }
    }

    /// Takes this word if it is there.
    pub(super) fn eat_word(&mut self, word: &str) -> Parsed<bool> {
        let there = self.is_word(word);
        if there {
            self.advance()?;
        }
        Ok(there)
    }

    pub(super) fn keyword(&mut self, word: &str) -> Parsed<()> {
        if self.eat_word(word)? { Ok(()) } else { self.expected(&format!("`{word}`")) }
    }

    /// Any word.
    pub(super) fn word(&mut self, what: &str) -> Parsed<&'t str> {
        match self.token {
            Token::Word(w) => {
                self.advance()?;
                Ok(w)
            }
            _ => self.expected(what),
        }
    }

    pub(super) fn string(&mut self, what: &str) -> Parsed<String> {
        match &mut self.token {
            Token::Str(s) => {
                let s = std::mem::take(s);
                self.advance()?;
                Ok(s)
            }
            _ => self.expected(what),
        }
    }

    /// A name: a word or a string.
    pub(super) fn name(&mut self, what: &str) -> Parsed<String> {
        match self.token {
            Token::Word(w) => {
                self.advance()?;
                Ok(w.to_owned())
            }
            _ => self.string(what),
        }
    }

    /// An integer of type `T`.
    pub(super) fn int<T: FromStr>(&mut self, what: &str) -> Parsed<T> {
        match self.token {
            Token::Number(n) => match n.parse() {
                Ok(value) => {
                    self.advance()?;
                    Ok(value)
                }
                Err(_) => self.expected(what),
            },
            _ => self.expected(what),
        }
    }

    /// A float, infinities included; NaN has no text form.
    pub(super) fn float(&mut self) -> Parsed<f32> {
        let value = match self.token {
            Token::Number(n) | Token::Word(n @ "inf") => n.parse::<f32>().ok().filter(|x| !x.is_nan()),
            _ => None,
        };
        match value {
            Some(value) => {
                self.advance()?;
                Ok(value)
            }
            None => self.expected("a number"),
        }
    }

    /// Items between brackets, separated by commas; a comma after the last is allowed.
    pub(super) fn list<T>(
        &mut self,
        open: char,
        close: char,
        mut item: impl FnMut(&mut Self) -> Parsed<T>,
    ) -> Parsed<Vec<T>> {
        self.punct(open)?;
        let mut items = Vec::new();
        while !self.eat(close)? {
            items.push(item(self)?);
            if !self.is_punct(close) {
                self.punct(',')?;
            }
        }
        Ok(items)
    }

    /// `[4, 8]`
    pub(super) fn ints<T: FromStr>(&mut self, what: &str) -> Parsed<Vec<T>> {
        self.list('[', ']', |c| c.int(what))
    }
}
