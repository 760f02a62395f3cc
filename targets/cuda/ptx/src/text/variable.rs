//! Parsing variables, parameters and registers.

use super::Parsed;
use super::lex::{Token, Tokens};
use super::operand::literal;
use crate::module::{Line, Linkage, MAX_REGISTERS, MAX_VARIABLE, Pointer, Registers, Variable};
use crate::types::{Space, Type};

/// Most elements that a variable is given values of.
const MAX_VALUES: usize = 1 << 24;

/// `.visible` and the like.
pub(super) fn linkage(tokens: &mut Tokens<'_>) -> Option<Linkage> {
    let (_, found) = Linkage::NAMES.iter().find(|(name, _)| tokens.eat_word(name))?;
    Some(*found)
}

/// `.f32`
pub(super) fn ty(tokens: &mut Tokens<'_>) -> Parsed<Type> {
    let found = match tokens.peek() {
        Token::Word(word) => word.strip_prefix('.').and_then(Type::named),
        _ => None,
    };
    let found = found.ok_or_else(|| {
        let names: Vec<_> = Type::ALL.iter().map(|ty| format!(".{}", ty.name())).collect();
        tokens.expected("a type", format!("one of: {}", names.join(", ")))
    })?;
    tokens.advance();
    Ok(found)
}

/// `.align 16`
fn align(tokens: &mut Tokens<'_>) -> Parsed<Option<u32>> {
    if !tokens.eat_word(".align") {
        return Ok(None);
    }
    let bytes: u32 = tokens.below("an alignment", 4097)?;
    if !bytes.is_power_of_two() {
        return Err(tokens.error(format!("an alignment of {bytes}"), "it is a power of two"));
    }
    Ok(Some(bytes))
}

/// `.shared .align 16 .b8 name[1024]`, without what ends it.
pub(super) fn variable(tokens: &mut Tokens<'_>, linkage: Option<Linkage>) -> Parsed<Variable> {
    let line = Line(tokens.line());
    let space = match tokens.peek() {
        Token::Word(word) => word.strip_prefix('.').and_then(Space::named),
        _ => None,
    };
    let space = space
        .ok_or_else(|| tokens.expected("a space", "`.global`, `.shared`, `.local`, `.const`, `.param`"))?;
    tokens.advance();
    let align = align(tokens)?;
    let vector = match tokens.peek() {
        Token::Word(".v2") => 2,
        Token::Word(".v4") => 4,
        _ => 1,
    };
    if vector > 1 {
        tokens.advance();
    }
    let ty = ty(tokens)?;
    if ty == Type::Pred {
        return Err(tokens.error("a predicate in memory", "predicates are registers"));
    }
    let pointer = pointer(tokens)?;
    let name = tokens.name("the name of a variable")?;
    let mut array = Vec::new();
    while tokens.eat('[') {
        let first = array.is_empty();
        if first && tokens.eat(']') {
            array.push(0);
            continue;
        }
        let elements: u64 = tokens.below("the number of elements", MAX_VARIABLE + 1)?;
        if elements == 0 {
            return Err(tokens
                .error("an array without elements", "`[]` is an array whose size is given at the launch"));
        }
        array.push(elements);
        tokens.mark(']', "`name[16]`")?;
    }
    let mut found =
        Variable { line, linkage, space, align, vector, ty, pointer, name, array, values: Vec::new() };
    if tokens.eat('=') {
        values(tokens, &mut found)?;
    }
    if found.bytes().is_none() {
        return Err(tokens.error(
            format!("`{}` is too large", found.name),
            format!("at most {MAX_VARIABLE} bytes are allowed"),
        ));
    }
    Ok(found)
}

/// `.ptr .global .align 4`
fn pointer(tokens: &mut Tokens<'_>) -> Parsed<Option<Pointer>> {
    if !tokens.eat_word(".ptr") {
        return Ok(None);
    }
    let space = match tokens.peek() {
        Token::Word(word) => word.strip_prefix('.').and_then(Space::named),
        _ => None,
    };
    if space.is_some() {
        tokens.advance();
    }
    Ok(Some(Pointer { space, align: align(tokens)? }))
}

/// `{1, 2}`, nested as its dimensions are, or one number.
fn values(tokens: &mut Tokens<'_>, of: &mut Variable) -> Parsed<()> {
    if !tokens.eat('{') {
        of.values.push(literal(tokens)?);
        return Ok(());
    }
    let mut depth = 1;
    while depth > 0 {
        if tokens.eat('{') {
            depth += 1;
        } else if tokens.eat('}') {
            depth -= 1;
        } else if !tokens.eat(',') {
            if of.values.len() == MAX_VALUES {
                return Err(tokens.error("too many values", format!("at most {MAX_VALUES} are allowed")));
            }
            of.values.push(literal(tokens)?);
        }
    }
    Ok(())
}

/// `.reg .b32 %r<10>, %x;`, its first word being taken.
pub(super) fn registers(tokens: &mut Tokens<'_>, line: u32, left: &mut u64) -> Parsed<Registers> {
    let ty = ty(tokens)?;
    let mut names = Vec::new();
    loop {
        let name = tokens.name("the name of a register")?;
        let count = if tokens.eat('<') {
            let count = tokens.below("the number of registers", MAX_REGISTERS + 1)?;
            tokens.mark('>', "`%r<10>`")?;
            Some(count)
        } else {
            None
        };
        let taken = count.map_or(1, u64::from);
        *left = left.checked_sub(taken).ok_or_else(|| {
            tokens.error("too many registers", format!("a function has {MAX_REGISTERS} at most"))
        })?;
        names.push((name, count));
        if !tokens.eat(',') {
            break;
        }
    }
    tokens.mark(';', "registers end with `;`")?;
    Ok(Registers { line: Line(line), ty, names })
}
