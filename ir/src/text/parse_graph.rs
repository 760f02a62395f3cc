//! Parsing modules.

use super::attrs::Attrs;
use super::cursor::{Cursor, MAX_DEPTH, Parsed};
use super::lex::Token;
use super::{expr, ops};
use crate::graph::{EntryKind, Graph, INPUTS, Module, Node, Operand, StateDecl, StateId, ValueId, WeightId};
use crate::scope::{MalformedScope, Scope};
use crate::state::StateKind;
use crate::types::{DType, Format, Type};
use crate::weights::{Weight, WeightClass};
use std::collections::HashMap;
use std::fmt::Display;
use std::str::FromStr;

/// A module, and the names declared so far.
#[derive(Default)]
struct Names {
    weights: HashMap<String, WeightId>,
    states: HashMap<String, StateId>,
}

pub(super) fn parse(text: &str) -> Parsed<Module> {
    let mut c = Cursor::new(text)?;
    let mut module = Module::default();
    let mut names = Names::default();
    while !c.at_end() {
        let at = c.at();
        match c.word("`weight`, `state` or `entry`")? {
            "weight" => {
                let weight = weight(&mut c)?;
                let id = WeightId(module.weights.len() as u32);
                if names.weights.insert(weight.name.clone(), id).is_some() {
                    return Err(c.error_at(at, format!("the weight {:?} is declared twice", weight.name)));
                }
                module.weights.push(weight);
            }
            "state" => {
                c.punct('$')?;
                let name = c.name("a state name")?;
                c.punct(':')?;
                let ty = ty(&mut c)?;
                let id = StateId(module.states.len() as u32);
                if names.states.insert(name.clone(), id).is_some() {
                    return Err(c.error_at(at, format!("the state {name:?} is declared twice")));
                }
                let kind = state_kind(&mut c)?.unwrap_or_default();
                module.states.push(StateDecl { name, ty, kind });
            }
            "entry" => module.entries.push(entry(&mut c, &names)?),
            other => {
                return Err(c.error_at(at, format!("expected `weight`, `state` or `entry`, found `{other}`")));
            }
        }
    }
    Ok(module)
}

/// The kind of a state, if it is given.
pub(super) fn state_kind(c: &mut Cursor<'_>) -> Parsed<Option<StateKind>> {
    for kind in [StateKind::Cache, StateKind::Recurrent, StateKind::Convolution] {
        if c.eat_word(kind.name())? {
            return Ok(Some(kind));
        }
    }
    if c.eat_word("ring")? {
        return Ok(Some(StateKind::Ring { window: c.int("a window")? }));
    }
    Ok(None)
}

fn weight(c: &mut Cursor<'_>) -> Parsed<Weight> {
    c.punct('@')?;
    let name = c.name("a weight name")?;
    c.punct(':')?;
    let format = format(c)?;
    let shape = c.ints("an extent")?;
    let at = c.at();
    let class = c.word("a weight class")?;
    let class = WeightClass::ALL.into_iter().find(|k| k.name() == class);
    let class = class
        .ok_or_else(|| c.error_at(at, "expected one of `experts`, `attention`, `embeddings`, `exact`"))?;
    c.punct('=')?;
    let expr = expr::read(c, MAX_DEPTH)?;
    Ok(Weight { name, shape, class, format, expr })
}

/// `bf16`
pub(super) fn format(c: &mut Cursor<'_>) -> Parsed<Format> {
    let found = match c.peek() {
        Token::Word(w) => Format::parse(w),
        _ => None,
    };
    let Some(format) = found else { return c.expected("a number format") };
    c.advance()?;
    Ok(format)
}

/// `f32`
pub(super) fn dtype(c: &mut Cursor<'_>) -> Parsed<DType> {
    if c.eat_word("f32")? {
        return Ok(DType::F32);
    }
    if c.eat_word("i32")? { Ok(DType::I32) } else { c.expected("`f32` or `i32`") }
}

fn ty(c: &mut Cursor<'_>) -> Parsed<Type> {
    Ok(Type { dtype: dtype(c)?, shape: c.ints("an extent")? })
}

/// `prefill[256]`
pub(super) fn kind(c: &mut Cursor<'_>) -> Parsed<EntryKind> {
    const KINDS: [fn(u32) -> EntryKind; 3] = [EntryKind::Prefill, EntryKind::Decode, EntryKind::Little];
    for kind in KINDS {
        if c.eat_word(kind(0).name())? {
            c.punct('[')?;
            let rows = c.int("a number of rows")?;
            c.punct(']')?;
            return Ok(kind(rows));
        }
    }
    c.expected("`prefill`, `decode` or `little`")
}

/// `layers.0.attn`, read as a name or as a string.
pub(super) fn scope<'t, L: Display + FromStr>(
    c: &mut Cursor<'t>,
    read: fn(&mut Cursor<'t>, &str) -> Parsed<String>,
) -> Parsed<Scope<L>> {
    let at = c.at();
    read(c, "a scope")?.parse().map_err(|e: MalformedScope| c.error_at(at, e.to_string()))
}

fn value(c: &mut Cursor<'_>) -> Parsed<ValueId> {
    c.punct('%')?;
    Ok(ValueId(c.int("the number of a value")?))
}

/// `%7: f32[256, 192], …`
fn typed_values(c: &mut Cursor<'_>) -> Parsed<Vec<(ValueId, Type, usize)>> {
    let mut values = Vec::new();
    loop {
        let at = c.at();
        let v = value(c)?;
        c.punct(':')?;
        values.push((v, ty(c)?, at));
        if !c.eat(',')? {
            return Ok(values);
        }
    }
}

fn operand(c: &mut Cursor<'_>, names: &Names) -> Parsed<Operand> {
    let at = c.at();
    if c.is_punct('%') {
        return Ok(value(c)?.into());
    }
    if c.eat('@')? {
        let name = c.name("a weight name")?;
        let id = names.weights.get(&name).copied().map(Operand::from);
        return id.ok_or_else(|| c.error_at(at, format!("no weight {name:?} is declared above")));
    }
    if c.eat('$')? {
        let name = c.name("a state name")?;
        let id = names.states.get(&name).copied().map(Operand::from);
        return id.ok_or_else(|| c.error_at(at, format!("no state {name:?} is declared above")));
    }
    c.expected("an operand")
}

fn node(c: &mut Cursor<'_>, names: &Names, outputs: Vec<ValueId>, scope: &Scope) -> Parsed<Node> {
    c.punct('=')?;
    let at = c.at();
    let name = c.word("an operator")?;
    let mut inputs = vec![operand(c, names)?];
    while c.eat(',')? {
        inputs.push(operand(c, names)?);
    }
    let attrs = Attrs::braces(c)?;
    let op = ops::read(c, name, at, attrs)?;
    Ok(Node { op, inputs, outputs, scope: scope.clone() })
}

fn entry(c: &mut Cursor<'_>, names: &Names) -> Parsed<Graph> {
    let kind = kind(c)?;
    c.punct('>')?;
    let output = value(c)?;
    c.punct('{')?;
    let at = c.at();
    c.keyword("inputs")?;
    let mut values = typed_values(c)?;
    if values.len() != INPUTS || values.iter().zip(0..).any(|((v, ..), i)| v.0 != i) {
        return Err(c.error_at(at, "expected the inputs %0, %1, %2 and %3"));
    }
    let mut scope = Scope::default();
    let mut nodes = Vec::new();
    while !c.eat('}')? {
        if c.eat_word("scope")? {
            scope = self::scope(c, Cursor::name)?;
        } else if c.is_punct('%') {
            let results = typed_values(c)?;
            let outputs = results.iter().map(|(v, ..)| *v).collect();
            nodes.push(node(c, names, outputs, &scope)?);
            values.extend(results);
        } else {
            return c.expected("a value, `scope` or `}`");
        }
    }
    // Values are numbered without gaps, so that their number is bounded by the text.
    let mut types: Vec<Option<Type>> = vec![None; values.len()];
    for (v, ty, at) in values {
        match types.get_mut(v.0 as usize) {
            Some(slot @ None) => *slot = Some(ty),
            Some(_) => return Err(c.error_at(at, format!("{v} is defined twice"))),
            None => return Err(c.error_at(at, format!("{v} leaves a gap in the numbers of the values"))),
        }
    }
    let values = types.into_iter().flatten().collect();
    Ok(Graph { kind, values, nodes, output })
}
