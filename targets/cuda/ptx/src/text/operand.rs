//! Parsing instructions and their operands.

use super::Parsed;
use super::lex::{Token, Tokens, unsigned};
use crate::module::{Guard, Instruction, Line, Literal, Operand};
use crate::opcode::Opcode;

/// Most operands of an instruction, and most elements of one operand.
const MAX_OPERANDS: usize = 256;

/// An instruction with its `;`.
pub(super) fn instruction(tokens: &mut Tokens<'_>) -> Parsed<Instruction> {
    let line = Line(tokens.line());
    let guard = if tokens.eat('@') {
        let not = tokens.eat('!');
        Some(Guard { not, name: tokens.name("a predicate")? })
    } else {
        None
    };
    let word = match tokens.peek() {
        Token::Word(word) if !word.starts_with('.') => word,
        _ => return Err(tokens.expected("an instruction", "a statement is an instruction or a declaration")),
    };
    let mut parts = word.split('.');
    let Some(opcode) = parts.next().and_then(Opcode::named) else {
        let hint = "`docs/ptx.md` lists the supported instructions";
        return Err(tokens.error(format!("unknown instruction `{word}`"), hint));
    };
    let modifiers: Vec<_> = parts.map(str::to_owned).collect();
    if modifiers.iter().any(String::is_empty) {
        return Err(tokens.error(format!("`{word}` has a modifier without a name"), "`add.f32`"));
    }
    tokens.advance();
    let mut operands = Vec::new();
    if !tokens.eat(';') {
        operands = list(tokens, ';')?;
    }
    Ok(Instruction { line, guard, opcode, modifiers, operands })
}

/// Operands with commas between them, up to a mark that is taken.
fn list(tokens: &mut Tokens<'_>, end: char) -> Parsed<Vec<Operand>> {
    let mut found = Vec::new();
    loop {
        if found.len() == MAX_OPERANDS {
            return Err(tokens.error("too many operands", format!("at most {MAX_OPERANDS} are allowed")));
        }
        found.push(operand(tokens, end == ';')?);
        if !tokens.eat(',') {
            break;
        }
    }
    tokens.mark(end, "operands are separated by commas")?;
    Ok(found)
}

fn operand(tokens: &mut Tokens<'_>, nested: bool) -> Parsed<Operand> {
    match tokens.peek() {
        Token::Mark('{') if nested => {
            tokens.advance();
            Ok(Operand::Vector(list(tokens, '}')?))
        }
        Token::Mark('(') if nested => {
            tokens.advance();
            Ok(Operand::List(if tokens.eat(')') { Vec::new() } else { list(tokens, ')')? }))
        }
        Token::Mark('[') => {
            tokens.advance();
            address(tokens)
        }
        Token::Mark('!') => {
            tokens.advance();
            Ok(Operand::Not(tokens.name("a predicate")?))
        }
        Token::Word("_") => {
            tokens.advance();
            Ok(Operand::Nothing)
        }
        Token::Word(_) => {
            let name = tokens.name("an operand")?;
            if tokens.eat('|') {
                return Ok(Operand::Pair(name, tokens.name("the second result")?));
            }
            Ok(Operand::Name(name, offset(tokens)?))
        }
        Token::Number(_) | Token::Mark('-') => Ok(Operand::Literal(literal(tokens)?)),
        _ => Err(tokens.expected("an operand", "a register, a number, `[address]` or `{a, b}`")),
    }
}

/// `+16`, `+-16`, `-16` or nothing.
fn offset(tokens: &mut Tokens<'_>) -> Parsed<i64> {
    let plus = tokens.eat('+');
    let minus = tokens.eat('-');
    if !plus && !minus {
        return Ok(0);
    }
    let bytes: i64 = tokens.below("an offset", 1 << 62)?;
    Ok(if minus { -bytes } else { bytes })
}

/// Parses the address after `[`.
fn address(tokens: &mut Tokens<'_>) -> Parsed<Operand> {
    let base = match tokens.peek() {
        Token::Word(_) => Some(tokens.name("an address")?),
        _ => None,
    };
    let offset = match base {
        Some(_) => offset(tokens)?,
        None => tokens.below("an address", 1 << 62)?,
    };
    tokens.mark(']', "an address is `[register+bytes]`, `[variable+bytes]` or `[bytes]`")?;
    Ok(Operand::Address(base, offset))
}

/// A number.
pub(super) fn literal(tokens: &mut Tokens<'_>) -> Parsed<Literal> {
    let minus = tokens.eat('-');
    let found = match tokens.peek() {
        Token::Number(text) => number(text, minus),
        _ => None,
    };
    let hint = "an integer, `0f` with 8 hexadecimal digits, `0d` with 16, or a decimal fraction";
    let found = found.ok_or_else(|| tokens.expected("a number", hint))?;
    tokens.advance();
    Ok(found)
}

fn number(text: &str, minus: bool) -> Option<Literal> {
    let bits = |digits: &str, length| {
        let right = digits.len() == length && digits.bytes().all(|b| b.is_ascii_hexdigit());
        if right { u64::from_str_radix(digits, 16).ok() } else { None }
    };
    match text.as_bytes() {
        [b'0', b'f' | b'F', ..] if !minus => {
            bits(&text[2..], 8).and_then(|bits| u32::try_from(bits).ok()).map(Literal::F32)
        }
        [b'0', b'd' | b'D', ..] if !minus => bits(&text[2..], 16).map(Literal::F64),
        _ if text.contains('.') => {
            let value = text.parse::<f64>().ok()?;
            Some(Literal::F64(if minus { -value } else { value }.to_bits()))
        }
        _ => {
            let value = unsigned(text)?;
            match minus {
                false => Some(Literal::Integer(value as i64)),
                true if value <= 1 << 63 => Some(Literal::Integer((value as i64).wrapping_neg())),
                true => None,
            }
        }
    }
}
