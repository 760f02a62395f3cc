//! Weight expressions: `concat rows(t"a"[4, 8], transpose(coded "fp8" 8"b" by [128, 128] scales"s" [8, 4]))`.

use super::cursor::{Cursor, MAX_DEPTH, Parsed};
use super::lex::quote;
use crate::weights::{Axis, Coded, Elementwise, Encoding, Leaf, WeightExpr};
use std::fmt;

impl Axis {
    /// Name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::Cols => "cols",
        }
    }
}

impl fmt::Display for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = quote(&self.tensor);
        match &self.encoding {
            Encoding::Plain => write!(f, "t{name}")?,
            Encoding::Coded(c) => {
                write!(
                    f,
                    "coded {} {}{name} by {:?} scales{}",
                    quote(&c.layout),
                    c.bits,
                    c.block,
                    quote(&c.scales)
                )?;
                for (word, tensor) in [("zeros", &c.zeros), ("factor", &c.factor), ("groups", &c.groups)] {
                    if let Some(tensor) = tensor {
                        write!(f, " {word}{}", quote(tensor))?;
                    }
                }
                f.write_str(" ")?;
            }
        }
        write!(f, "{:?}", self.shape)
    }
}

fn join(f: &mut fmt::Formatter<'_>, parts: &[WeightExpr]) -> fmt::Result {
    f.write_str("(")?;
    for (i, part) in parts.iter().enumerate() {
        let comma = if i == 0 { "" } else { ", " };
        write!(f, "{comma}{part}")?;
    }
    f.write_str(")")
}

impl fmt::Display for WeightExpr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leaf(leaf) => write!(f, "{leaf}"),
            Self::Const(values) => write!(f, "const {values:?}"),
            Self::Transpose(of) => write!(f, "transpose({of})"),
            Self::Slice { axis, start, step, len, of } => {
                write!(f, "slice {} {start}:{len}:{step} ({of})", axis.name())
            }
            Self::Concat { axis, of } => {
                write!(f, "concat {}", axis.name())?;
                join(f, of)
            }
            Self::Stack(of) => {
                f.write_str("stack")?;
                join(f, of)
            }
            Self::Split { heads, of } => write!(f, "split {heads}({of})"),
            Self::Join(of) => write!(f, "join({of})"),
            Self::ScaleMatrices { of, by } => write!(f, "scale_matrices({of}, {by})"),
            Self::Repeat { each, of } => write!(f, "repeat {each}({of})"),
            Self::Map { map, of } => write!(f, "{}({of})", map.name()),
            Self::Arrange { order, of } => write!(f, "arrange {order:?} ({of})"),
            Self::ScaleCols { of, by } => write!(f, "scale_cols({of}, {by})"),
        }
    }
}

/// A whole text that is one expression.
pub(super) fn parse(text: &str) -> Parsed<WeightExpr> {
    let mut c = Cursor::new(text)?;
    let expr = read(&mut c, MAX_DEPTH)?;
    if c.at_end() { Ok(expr) } else { c.expected("the end of the text") }
}

fn axis(c: &mut Cursor<'_>) -> Parsed<Axis> {
    if c.eat_word("rows")? {
        return Ok(Axis::Rows);
    }
    if c.eat_word("cols")? { Ok(Axis::Cols) } else { c.expected("`rows` or `cols`") }
}

/// The rest of a leaf after its name.
fn leaf(c: &mut Cursor<'_>, tensor: String, encoding: Encoding) -> Parsed<WeightExpr> {
    let shape = c.ints("an extent")?;
    Ok(WeightExpr::Leaf(Leaf { tensor, shape, encoding }))
}

const NAME: &str = "the name of a tensor";

fn coded(c: &mut Cursor<'_>) -> Parsed<WeightExpr> {
    let layout = c.string("the name of a layout")?;
    let bits = c.int("the bits of a code")?;
    let tensor = c.string(NAME)?;
    c.keyword("by")?;
    let at = c.at();
    let Ok(block) = <[usize; 2]>::try_from(c.ints("an extent")?) else {
        return Err(c.error_at(at, "a block has rows and columns"));
    };
    c.keyword("scales")?;
    let scales = c.string(NAME)?;
    let mut further = |word| if c.eat_word(word)? { c.string(NAME).map(Some) } else { Ok(None) };
    let (zeros, factor, groups) = (further("zeros")?, further("factor")?, further("groups")?);
    let coded = Coded { layout, bits, block, scales, zeros, factor, groups };
    leaf(c, tensor, Encoding::Coded(Box::new(coded)))
}

fn one(c: &mut Cursor<'_>, depth: usize) -> Parsed<Box<WeightExpr>> {
    c.punct('(')?;
    let expr = read(c, depth)?;
    c.punct(')')?;
    Ok(Box::new(expr))
}

/// Reads one expression, nested at most `depth` deep.
pub(super) fn read(c: &mut Cursor<'_>, depth: usize) -> Parsed<WeightExpr> {
    let at = c.at();
    let Some(depth) = depth.checked_sub(1) else {
        return Err(c.error_at(at, "the expression is nested too deeply"));
    };
    let word = c.word("a weight expression")?;
    Ok(match word {
        "t" => {
            let tensor = c.string(NAME)?;
            leaf(c, tensor, Encoding::Plain)?
        }
        "coded" => coded(c)?,
        "const" => WeightExpr::Const(c.list('[', ']', Cursor::float)?),
        "transpose" => WeightExpr::Transpose(one(c, depth)?),
        "slice" => {
            let axis = axis(c)?;
            let start = c.int("the first index")?;
            c.punct(':')?;
            let len = c.int("the number of indices")?;
            c.punct(':')?;
            let step = c.int("a step")?;
            WeightExpr::Slice { axis, start, step, len, of: one(c, depth)? }
        }
        "concat" => WeightExpr::Concat { axis: axis(c)?, of: c.list('(', ')', |c| read(c, depth))? },
        "stack" => WeightExpr::Stack(c.list('(', ')', |c| read(c, depth))?),
        "split" => WeightExpr::Split { heads: c.int("the number of heads")?, of: one(c, depth)? },
        "join" => WeightExpr::Join(one(c, depth)?),
        "arrange" => WeightExpr::Arrange { order: c.ints("a row")?, of: one(c, depth)? },
        "repeat" => WeightExpr::Repeat { each: c.int("how often")?, of: one(c, depth)? },
        "scale_cols" | "scale_matrices" => {
            c.punct('(')?;
            let of = Box::new(read(c, depth)?);
            c.punct(',')?;
            let by = Box::new(read(c, depth)?);
            c.punct(')')?;
            if word == "scale_cols" {
                WeightExpr::ScaleCols { of, by }
            } else {
                WeightExpr::ScaleMatrices { of, by }
            }
        }
        _ => match Elementwise::ALL.into_iter().find(|map| map.name() == word) {
            Some(map) => WeightExpr::Map { map, of: one(c, depth)? },
            None => return Err(c.error_at(at, format!("expected a weight expression, found `{word}`"))),
        },
    })
}
