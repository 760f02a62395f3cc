//! Printing a stream.

use crate::fields::{Fields, Separator, walk};
use crate::geometry::Layout;
use crate::op::{Activation, Glu, Lines, Op, Slab};
use crate::stream::{Instruction, Stream};
use std::fmt::{self, Display, Formatter, Write};
use std::ops::Range;

impl Display for Stream {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (g, s) = (&self.geometry, &self.system);
        writeln!(f, "stream {}", self.name)?;
        writeln!(f, "system channels {} dimms {}", s.channels, s.dimms)?;
        writeln!(f, "dimm {}", self.dimm)?;
        writeln!(
            f,
            "geometry subchannels {} ranks {} bank_groups {} banks {} rows {} lines {}",
            g.subchannels, g.ranks, g.bank_groups, g.banks, g.rows, g.lines
        )?;
        writeln!(f, "tokens {}", self.tokens)?;
        writeln!(f, "slots {}", self.slots)?;
        for region in &self.regions {
            let Range { start, end } = region.rows;
            let (layout, access) = (region.layout.name(), region.access.name());
            writeln!(f, "region {} rows {start}..{end} layout {layout} access {access}", region.name)?;
        }
        let mut inside = false;
        for i in &self.code {
            inside &= i.op != Op::End;
            writeln!(f, "{}{}", if inside { "  " } else { "" }, instruction(self, i))?;
            inside |= i.op == Op::Loop;
        }
        Ok(())
    }
}

/// One instruction without indentation.
pub(super) fn instruction(stream: &Stream, instruction: &Instruction) -> String {
    let mut printer = Printer { stream, text: instruction.op.name().to_owned(), separator: Separator::Space };
    // Writing to a string does not fail.
    let _ = walk(&mut instruction.op.clone(), &mut printer).and_then(|()| printer.events(instruction));
    printer.text
}

/// Appends operands.
struct Printer<'s> {
    stream: &'s Stream,
    text: String,
    separator: Separator,
}

impl Printer<'_> {
    fn operand(&mut self, operand: impl Display) -> fmt::Result {
        self.text += match std::mem::replace(&mut self.separator, Separator::Comma) {
            Separator::Space => " ",
            Separator::Comma => ", ",
            Separator::Arrow => " -> ",
        };
        write!(self.text, "{operand}")
    }

    fn events(&mut self, instruction: &Instruction) -> fmt::Result {
        for event in instruction.waits.iter() {
            write!(self.text, " wait e{event}")?;
        }
        instruction.signal.map_or(Ok(()), |event| write!(self.text, " signal e{event}"))
    }

    fn indexed(&mut self, name: &str, first: u64, by: char, stride: u64) -> fmt::Result {
        let stride = if stride == 0 { String::new() } else { format!(" + {by}*{stride}") };
        self.operand(format_args!("{name}[{first}{stride}]"))
    }
}

impl Fields for Printer<'_> {
    type Error = fmt::Error;

    fn slab(&mut self, slab: &mut Slab) -> fmt::Result {
        self.indexed(slab.number.name(), u64::from(slab.base), 't', u64::from(slab.stride))
    }

    fn lines(&mut self, lines: &mut Lines) -> fmt::Result {
        self.rows(lines, &mut 0)
    }

    fn rows(&mut self, lines: &mut Lines, stride: &mut u64) -> fmt::Result {
        let region = self.stream.regions.get(usize::from(lines.region));
        // Only a fault's message ever names a region that is not there.
        let name = region.map_or_else(|| format!("#{}", lines.region), |region| region.name.clone());
        self.indexed(&name, lines.line, 'r', *stride)
    }

    fn number(&mut self, label: &'static str, number: &mut u32) -> fmt::Result {
        self.operand(format_args!("{label} {number}"))
    }

    fn range(&mut self, label: &'static str, range: &mut Range<u32>) -> fmt::Result {
        self.operand(format_args!("{label} {}..{}", range.start, range.end))
    }

    fn activation(&mut self, kind: &mut Activation) -> fmt::Result {
        self.operand(kind.name())
    }

    fn glu(&mut self, kind: &mut Glu) -> fmt::Result {
        match kind {
            Glu::Clamped { alpha, limit } => self.operand(format_args!("clamped({alpha}, {limit})")),
            Glu::Gated(_) | Glu::DRelu => self.operand(kind.name()),
        }
    }

    fn layout(&mut self, label: &'static str, layout: &mut Layout) -> fmt::Result {
        self.operand(format_args!("{label} {}", layout.name()))
    }

    fn separator(&mut self, separator: Separator) -> fmt::Result {
        self.separator = separator;
        Ok(())
    }
}
