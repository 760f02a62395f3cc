//! Parsing a stream.

use super::lex::{Integer, Line, Token};
use super::{Parsed, SyntaxError};
use crate::fields::{BLANKS, Fields, GLUS, Separator, walk};
use crate::geometry::{Geometry, Layout, System};
use crate::op::{Activation, Glu, Lines, Number, Op, Slab};
use crate::stream::{Access, Events, Instruction, Region, Stream, is_name};
use crate::{EVENTS, MAX_CODE, MAX_LINES, MAX_NAME, MAX_REGIONS};
use std::ops::Range;

const SLAB: &str = "a slab is `b16[base + t*stride]` or `f32[base + t*stride]`, both in bytes";
const REGION: &str = "`region NAME rows FIRST..END layout localized|striped access read|write`";

/// Parses a text.
pub(super) fn stream(text: &str) -> Parsed<Stream> {
    let mut lines = text
        .lines()
        .enumerate()
        .map(|(i, text)| Line::new(text, i + 1))
        .filter(|line| line.peek() != Token::End);
    let after = text.lines().count() + 1;
    let mut statement = |word: &str, hint: &str| -> Parsed<Line<'_>> {
        let mut line = lines.next().unwrap_or_else(|| Line::new("", after));
        line.keyword(word, hint)?;
        Ok(line)
    };

    let mut line = statement("stream", "a stream begins with `stream NAME`")?;
    let name = new_name(&mut line, "the name of the stream")?;
    end(&line)?;
    let hint = "`system channels N dimms N`: the DIMMs of each channel";
    let mut line = statement("system", hint)?;
    let system = System {
        channels: labelled(&mut line, "channels", hint)?,
        dimms: labelled(&mut line, "dimms", hint)?,
    };
    end(&line)?;
    let mut line = statement("dimm", "`dimm N`: the DIMM that executes the stream")?;
    let dimm = line.u32("the number of the DIMM")?;
    end(&line)?;
    let hint = "`geometry subchannels N ranks N bank_groups N banks N rows N lines N`";
    let mut line = statement("geometry", hint)?;
    let mut of = |label| labelled(&mut line, label, hint);
    let geometry = Geometry {
        subchannels: of("subchannels")?,
        ranks: of("ranks")?,
        bank_groups: of("bank_groups")?,
        banks: of("banks")?,
        rows: of("rows")?,
        lines: of("lines")?,
    };
    end(&line)?;
    let mut line = statement("tokens", "`tokens N`: the most tokens of a block")?;
    let tokens = line.u32("the tokens of a block")?;
    end(&line)?;
    let mut line = statement("slots", "`slots N`: the most slots of inbox and outbox")?;
    let slots = line.u32("the number of slots")?;
    end(&line)?;

    let mut stream =
        Stream { name, system, dimm, geometry, tokens, slots, regions: Vec::new(), code: Vec::new() };
    for mut line in lines {
        if line.peek() == Token::Word("region") {
            region(&mut line, &mut stream)?;
        } else {
            let instruction = instruction(&mut line, &stream.regions, stream.code.len())?;
            stream.code.push(instruction);
        }
    }
    Ok(stream)
}

/// Fails if there is more on this line.
fn end(line: &Line<'_>) -> Parsed<()> {
    match line.peek() {
        Token::End => Ok(()),
        _ => Err(line.expected("the end of the line", "one statement a line; `;` starts a comment")),
    }
}

/// `ranks 4`
fn labelled(line: &mut Line<'_>, label: &'static str, hint: &str) -> Parsed<u32> {
    line.keyword(label, hint)?;
    line.u32(&format!("the number of {label}"))
}

/// `0..4`
fn range(line: &mut Line<'_>, hint: &str) -> Parsed<Range<u32>> {
    let start = line.u32("the first row")?;
    line.punct("..", hint)?;
    Ok(start..line.u32("the row after the last")?)
}

/// A name that is defined here.
fn new_name(line: &mut Line<'_>, what: &str) -> Parsed<String> {
    match line.peek() {
        Token::Word(word) if is_name(word) => {
            line.advance();
            Ok(word.to_owned())
        }
        _ => {
            let hint = format!("at most {MAX_NAME} letters, digits, `_` and `.`, a letter or `_` first");
            Err(line.expected(what, hint))
        }
    }
}

fn region(line: &mut Line<'_>, stream: &mut Stream) -> Parsed<()> {
    if !stream.code.is_empty() {
        return Err(line.error("a region after instructions", "regions must be before the first instruction"));
    }
    if stream.regions.len() == MAX_REGIONS {
        return Err(line.error("too many regions", format!("at most {MAX_REGIONS} are allowed")));
    }
    line.advance();
    let twice = match line.peek() {
        Token::Word(word) => stream.regions.iter().any(|region| region.name == word),
        _ => false,
    };
    if twice {
        return Err(line.error("another region has this name", "give each region a unique name"));
    }
    let name = new_name(line, "the name of the region")?;
    line.keyword("rows", REGION)?;
    let rows = range(line, REGION)?;
    line.keyword("layout", REGION)?;
    let layout = line.one_of("a layout", &Layout::ALL, Layout::name)?;
    line.keyword("access", REGION)?;
    let access = line.one_of("what may be done with the region", &Access::ALL, Access::name)?;
    end(line)?;
    stream.regions.push(Region { name, rows, layout, access });
    Ok(())
}

fn instruction(line: &mut Line<'_>, regions: &[Region], before: usize) -> Parsed<Instruction> {
    if before == MAX_CODE {
        return Err(line.error("too many instructions", format!("at most {MAX_CODE} are allowed")));
    }
    let blank = match line.peek() {
        Token::Word(word) => BLANKS.iter().find(|op| op.name() == word),
        _ => None,
    };
    let Some(blank) = blank else {
        let names: Vec<_> = BLANKS.iter().map(Op::name).collect();
        return Err(line.expected("an instruction", format!("one of: {}", names.join(", "))));
    };
    line.advance();
    let mut op = blank.clone();
    walk(&mut op, &mut Parser { line, regions, separator: Separator::Space })?;
    let mut waits = Events::default();
    while line.eat_word("wait") {
        waits.insert(event(line)?);
    }
    let signal = if line.eat_word("signal") { Some(event(line)?) } else { None };
    if line.peek() != Token::End {
        let hint = "after the operands come `wait eN`, any number of them, and at most one `signal eN`";
        return Err(line.expected("the end of the line", hint));
    }
    Ok(Instruction { op, waits, signal })
}

/// `e3`
fn event(line: &mut Line<'_>) -> Parsed<u8> {
    let number = match line.peek() {
        Token::Word(word) => {
            word.strip_prefix('e').filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))
        }
        _ => None,
    };
    let event = number.and_then(|digits| digits.parse().ok()).filter(|&event: &u8| event < EVENTS);
    let event =
        event.ok_or_else(|| line.expected("an event", format!("events are e0 to e{}", EVENTS - 1)))?;
    line.advance();
    Ok(event)
}

/// Reads operands.
struct Parser<'p, 't> {
    line: &'p mut Line<'t>,
    regions: &'p [Region],
    separator: Separator,
}

impl Parser<'_, '_> {
    /// Reads the separator before an operand.
    fn begin(&mut self) -> Parsed<()> {
        match std::mem::replace(&mut self.separator, Separator::Comma) {
            Separator::Space => Ok(()),
            Separator::Comma => self.line.punct(",", "operands are separated by commas"),
            Separator::Arrow => self.line.punct("->", "its destination is after `->`"),
        }
    }

    /// `[first + by*stride]`
    fn index<T: Integer>(&mut self, most: T, by: Option<&str>, hint: &str) -> Parsed<(T, T)> {
        self.line.punct("[", hint)?;
        let first = self.line.integer("a number", most)?;
        let mut stride = T::default();
        if let Some(by) = by
            && self.line.eat("+")
        {
            self.line.keyword(by, hint)?;
            self.line.punct("*", hint)?;
            stride = self.line.integer("a stride", most)?;
        }
        self.line.punct("]", hint)?;
        Ok((first, stride))
    }

    fn memory(&mut self, lines: &mut Lines, by: Option<&str>, hint: &str) -> Parsed<u64> {
        self.begin()?;
        let found = match self.line.peek() {
            Token::Word(word) => self.regions.iter().position(|region| region.name == word),
            _ => None,
        };
        let Some(region) = found.and_then(|region| u16::try_from(region).ok()) else {
            let names: Vec<_> = self.regions.iter().map(|region| region.name.as_str()).collect();
            return Err(self
                .line
                .expected("a region", format!("regions of this stream: {}", names.join(", "))));
        };
        self.line.advance();
        let (line, stride) = self.index(MAX_LINES - 1, by, hint)?;
        *lines = Lines { region, line };
        Ok(stride)
    }
}

impl Fields for Parser<'_, '_> {
    type Error = SyntaxError;

    fn slab(&mut self, slab: &mut Slab) -> Parsed<()> {
        self.begin()?;
        let found = match self.line.peek() {
            Token::Word(word) => Number::ALL.into_iter().find(|number| number.name() == word),
            _ => None,
        };
        let Some(number) = found else { return Err(self.line.expected("a slab", SLAB)) };
        self.line.advance();
        let (base, stride) = self.index(u32::MAX, Some("t"), SLAB)?;
        *slab = Slab { number, base, stride };
        Ok(())
    }

    fn lines(&mut self, lines: &mut Lines) -> Parsed<()> {
        self.memory(lines, None, "a place in memory is `REGION[line]`").map(drop)
    }

    fn rows(&mut self, lines: &mut Lines, stride: &mut u64) -> Parsed<()> {
        *stride =
            self.memory(lines, Some("r"), "rows in memory are `REGION[line + r*stride]`, both in lines")?;
        Ok(())
    }

    fn number(&mut self, label: &'static str, number: &mut u32) -> Parsed<()> {
        self.begin()?;
        *number = labelled(self.line, label, &format!("`{label} N`"))?;
        Ok(())
    }

    fn range(&mut self, label: &'static str, rows: &mut Range<u32>) -> Parsed<()> {
        self.begin()?;
        let hint = format!("`{label} FIRST..END`");
        self.line.keyword(label, &hint)?;
        *rows = range(self.line, &hint)?;
        Ok(())
    }

    fn activation(&mut self, kind: &mut Activation) -> Parsed<()> {
        self.begin()?;
        *kind = self.line.one_of("a function", &Activation::ALL, Activation::name)?;
        Ok(())
    }

    fn glu(&mut self, kind: &mut Glu) -> Parsed<()> {
        self.begin()?;
        *kind = self.line.one_of("an activation", &GLUS, Glu::name)?;
        if let Glu::Clamped { alpha, limit } = kind {
            let hint = "`clamped(ALPHA, LIMIT)`";
            self.line.punct("(", hint)?;
            *alpha = self.line.float("alpha")?;
            self.line.punct(",", hint)?;
            *limit = self.line.float("a limit")?;
            self.line.punct(")", hint)?;
        }
        Ok(())
    }

    fn layout(&mut self, label: &'static str, layout: &mut Layout) -> Parsed<()> {
        self.begin()?;
        self.line.keyword(label, "`to striped` or `to localized`")?;
        *layout = self.line.one_of("a layout", &Layout::ALL, Layout::name)?;
        Ok(())
    }

    fn separator(&mut self, separator: Separator) -> Parsed<()> {
        self.separator = separator;
        Ok(())
    }
}
