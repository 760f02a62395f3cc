//! Parsing a module.

use super::function::function;
use super::lex::{Token, Tokens};
use super::variable::{linkage, variable};
use super::{Parsed, SyntaxError};
use crate::module::{Item, Module};
use crate::types::Space;

/// Parses a text.
pub(super) fn module(text: &str) -> Parsed<Module> {
    let mut tokens = Tokens::new(text)?;
    let version = version(&mut tokens)?;
    let target = target(&mut tokens)?;
    let hint = "`.address_size 64`: kernels of moec have addresses of 64 bits";
    if !tokens.eat_word(".address_size") {
        return Err(tokens.expected("`.address_size`", hint));
    }
    if tokens.peek() != Token::Number("64") {
        return Err(tokens.expected("64", hint));
    }
    tokens.advance();
    let mut module = Module { version, target, address_size: 64, items: Vec::new() };
    while tokens.peek() != Token::End {
        if let Some(item) = item(&mut tokens)? {
            module.items.push(item);
        }
    }
    Ok(module)
}

/// `.version 8.3`
fn version(tokens: &mut Tokens<'_>) -> Parsed<(u32, u32)> {
    let hint = "a module begins with `.version 7.8`, or another from 6.0 to 9.9";
    if !tokens.eat_word(".version") {
        return Err(tokens.expected("`.version`", hint));
    }
    let number = match tokens.peek() {
        Token::Number(text) => text.split_once('.'),
        _ => None,
    };
    let number = number.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let number = number.ok_or_else(|| tokens.expected("a version", hint))?;
    if !(6..=9).contains(&number.0) {
        return Err(tokens.error(format!("version {}.{} is not supported", number.0, number.1), hint));
    }
    tokens.advance();
    Ok(number)
}

/// `.target sm_80`
fn target(tokens: &mut Tokens<'_>) -> Parsed<Vec<String>> {
    let hint = "`.target sm_80`";
    if !tokens.eat_word(".target") {
        return Err(tokens.expected("`.target`", hint));
    }
    let mut target = vec![tokens.name("a target")?];
    while tokens.eat(',') {
        target.push(tokens.name("a target")?);
    }
    if !target[0].starts_with("sm_") {
        return Err(tokens.error(format!("`{}` is not a target", target[0]), hint));
    }
    Ok(target)
}

/// A variable or a function; nothing where it is a file name of debugging.
fn item(tokens: &mut Tokens<'_>) -> Parsed<Option<Item>> {
    if tokens.eat_word(".file") {
        tokens.unsigned("the number of a file")?;
        match tokens.peek() {
            Token::Text(_) => tokens.advance(),
            _ => return Err(tokens.expected("the name of a file", "`.file 1 \"name\"`")),
        }
        return Ok(None);
    }
    let line = tokens.line();
    let linkage = linkage(tokens);
    let word = match tokens.peek() {
        Token::Word(word) => word,
        _ => "",
    };
    match (word, word.strip_prefix('.').and_then(Space::named)) {
        (".entry" | ".func", _) => Ok(Some(Item::Function(function(tokens, line, linkage)?))),
        (_, Some(Space::Global | Space::Shared | Space::Const)) => {
            let found = variable(tokens, linkage)?;
            tokens.mark(';', "a variable ends with `;`")?;
            Ok(Some(Item::Variable(found)))
        }
        _ => Err(unknown(tokens)),
    }
}

fn unknown(tokens: &Tokens<'_>) -> SyntaxError {
    tokens.expected(
        "a variable or a function",
        "`.entry`, `.func`, `.global`, `.shared` and `.const` are supported, with `.visible`, `.extern` and `.weak`",
    )
}
