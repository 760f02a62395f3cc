//! Parsing functions and their statements.

use super::Parsed;
use super::lex::{Token, Tokens};
use super::operand::instruction;
use super::variable::{linkage, registers, variable};
use crate::module::{Function, Limit, Line, Linkage, MAX_DEPTH, MAX_REGISTERS, Statement, Variable};
use crate::types::Space;

/// `.entry name(…) { … }` or `.func (…) name(…) { … }`, after its linkage.
pub(super) fn function(tokens: &mut Tokens<'_>, line: u32, linkage: Option<Linkage>) -> Parsed<Function> {
    let entry = tokens.peek() == Token::Word(".entry");
    tokens.advance();
    let returns = if !entry && tokens.peek() == Token::Mark('(') { params(tokens)? } else { Vec::new() };
    let name = tokens.name("the name of a function")?;
    let params = if tokens.peek() == Token::Mark('(') { params(tokens)? } else { Vec::new() };
    let limits = limits(tokens)?;
    let body = if tokens.eat(';') {
        None
    } else {
        tokens.mark('{', "a body is `{ … }`; a declaration ends with `;`")?;
        let mut left = MAX_REGISTERS;
        Some(block(tokens, 0, &mut left)?)
    };
    Ok(Function { line: Line(line), entry, linkage, returns, name, params, limits, body })
}

/// `(.param .b32 a, .param .b64 b)`
fn params(tokens: &mut Tokens<'_>) -> Parsed<Vec<Variable>> {
    let hint = "parameters are `(.param .b64 name, …)`";
    tokens.mark('(', hint)?;
    let mut found = Vec::new();
    if tokens.eat(')') {
        return Ok(found);
    }
    loop {
        let param = variable(tokens, None)?;
        if param.space != Space::Param {
            return Err(tokens.error(format!("`{}` is not a parameter", param.name), hint));
        }
        found.push(param);
        if !tokens.eat(',') {
            break;
        }
    }
    tokens.mark(')', hint)?;
    Ok(found)
}

/// `.reqntid 256, 1, 1`
fn limits(tokens: &mut Tokens<'_>) -> Parsed<Vec<(Limit, Vec<u32>)>> {
    let mut found = Vec::new();
    while let Token::Word(word) = tokens.peek() {
        let Some((_, limit, most)) = Limit::NAMES.iter().find(|(name, ..)| *name == word) else {
            let names: Vec<_> = Limit::NAMES.iter().map(|(name, ..)| *name).collect();
            return Err(tokens.expected("a limit or a body", format!("limits: {}", names.join(", "))));
        };
        tokens.advance();
        let mut numbers = Vec::new();
        while numbers.len() < *most && (numbers.is_empty() || tokens.eat(',')) {
            numbers.push(tokens.below("a limit", 1 << 31)?);
        }
        found.push((*limit, numbers));
    }
    Ok(found)
}

/// Statements up to a `}` that is taken.
fn block(tokens: &mut Tokens<'_>, depth: usize, left: &mut u64) -> Parsed<Vec<Statement>> {
    let mut found = Vec::new();
    while !tokens.eat('}') {
        if let Some(statement) = statement(tokens, depth, left)? {
            found.push(statement);
        }
    }
    Ok(found)
}

fn statement(tokens: &mut Tokens<'_>, depth: usize, left: &mut u64) -> Parsed<Option<Statement>> {
    let line = tokens.line();
    let word = match tokens.peek() {
        Token::Mark('{') if depth == MAX_DEPTH => {
            return Err(
                tokens.error("blocks are nested too deeply", format!("at most {MAX_DEPTH} are allowed"))
            );
        }
        Token::Mark('{') => {
            tokens.advance();
            return Ok(Some(Statement::Block(block(tokens, depth + 1, left)?)));
        }
        Token::Word(word) => word,
        _ => return instruction(tokens).map(|found| Some(Statement::Instruction(found))),
    };
    if tokens.second() == Token::Mark(':') {
        return label(tokens, line).map(Some);
    }
    match word {
        ".reg" => {
            tokens.advance();
            Ok(Some(Statement::Registers(registers(tokens, line, left)?)))
        }
        ".pragma" => {
            tokens.advance();
            let Token::Text(text) = tokens.peek() else {
                return Err(tokens.expected("a text", "`.pragma \"nounroll\";`"));
            };
            tokens.advance();
            tokens.mark(';', "`.pragma \"nounroll\";`")?;
            Ok(Some(Statement::Pragma(text.to_owned())))
        }
        ".loc" => {
            tokens.advance();
            for what in ["a file", "a line", "a column"] {
                tokens.unsigned(what)?;
            }
            Ok(None)
        }
        word if word.starts_with('.') => {
            let linkage = linkage(tokens);
            let found = variable(tokens, linkage)?;
            tokens.mark(';', "a variable ends with `;`")?;
            Ok(Some(Statement::Variable(found)))
        }
        _ => instruction(tokens).map(|found| Some(Statement::Instruction(found))),
    }
}

/// `NAME:`, or a list of labels with that name.
fn label(tokens: &mut Tokens<'_>, line: u32) -> Parsed<Statement> {
    let name = tokens.name("a label")?;
    tokens.advance();
    if !tokens.eat_word(".branchtargets") {
        return Ok(Statement::Label(Line(line), name));
    }
    let mut targets = vec![tokens.name("a label")?];
    while tokens.eat(',') {
        targets.push(tokens.name("a label")?);
    }
    tokens.mark(';', "`NAME: .branchtargets A, B;`")?;
    Ok(Statement::Targets(Line(line), name, targets))
}
