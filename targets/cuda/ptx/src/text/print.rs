//! Printing a module.

use crate::module::*;
use std::fmt::{Display, Formatter, Result};

/// Things with commas between them.
struct Commas<'a, T>(&'a [T]);

impl<T: Display> Display for Commas<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        for (i, thing) in self.0.iter().enumerate() {
            write!(f, "{}{thing}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// A number of bytes after a name.
struct Offset(i64);

impl Display for Offset {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        if self.0 == 0 { Ok(()) } else { write!(f, "+{}", self.0) }
    }
}

impl Display for Module {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        writeln!(f, ".version {}.{}", self.version.0, self.version.1)?;
        writeln!(f, ".target {}", Commas(&self.target))?;
        writeln!(f, ".address_size {}", self.address_size)?;
        for item in &self.items {
            match item {
                Item::Variable(variable) => writeln!(f, "{variable};")?,
                Item::Function(function) => write!(f, "{function}")?,
            }
        }
        Ok(())
    }
}

fn linkage(of: Option<Linkage>, f: &mut Formatter<'_>) -> Result {
    match Linkage::NAMES.iter().find(|(_, linkage)| Some(*linkage) == of) {
        Some((name, _)) => write!(f, "{name} "),
        None => Ok(()),
    }
}

fn align(of: Option<u32>, f: &mut Formatter<'_>) -> Result {
    of.map_or(Ok(()), |bytes| write!(f, " .align {bytes}"))
}

impl Display for Variable {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        linkage(self.linkage, f)?;
        write!(f, ".{}", self.space.name())?;
        align(self.align, f)?;
        if self.vector > 1 {
            write!(f, " .v{}", self.vector)?;
        }
        write!(f, " .{}", self.ty.name())?;
        if let Some(pointer) = self.pointer {
            write!(f, " .ptr")?;
            pointer.space.map_or(Ok(()), |space| write!(f, " .{}", space.name()))?;
            align(pointer.align, f)?;
        }
        write!(f, " {}", self.name)?;
        for n in &self.array {
            if *n == 0 { write!(f, "[]")? } else { write!(f, "[{n}]")? }
        }
        match &self.values[..] {
            [] => Ok(()),
            values => write!(f, " = {{{}}}", Commas(values)),
        }
    }
}

impl Display for Function {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        linkage(self.linkage, f)?;
        write!(f, "{} ", if self.entry { ".entry" } else { ".func" })?;
        if !self.returns.is_empty() {
            write!(f, "({}) ", Commas(&self.returns))?;
        }
        write!(f, "{}({})", self.name, Commas(&self.params))?;
        for (limit, numbers) in &self.limits {
            let name = Limit::NAMES.iter().find(|(_, of, _)| of == limit).map_or("", |(name, ..)| name);
            write!(f, " {name} {}", Commas(numbers))?;
        }
        let Some(body) = &self.body else { return writeln!(f, ";") };
        writeln!(f)?;
        block(body, 0, f)
    }
}

fn block(statements: &[Statement], depth: usize, f: &mut Formatter<'_>) -> Result {
    let indent = "\t".repeat(depth);
    writeln!(f, "{indent}{{")?;
    for statement in statements {
        match statement {
            Statement::Registers(registers) => writeln!(f, "{indent}\t{registers}")?,
            Statement::Variable(variable) => writeln!(f, "{indent}\t{variable};")?,
            Statement::Label(_, name) => writeln!(f, "{name}:")?,
            Statement::Targets(_, name, targets) => {
                writeln!(f, "{name}: .branchtargets {};", Commas(targets))?;
            }
            Statement::Pragma(text) => writeln!(f, "{indent}\t.pragma \"{text}\";")?,
            Statement::Instruction(instruction) => writeln!(f, "{indent}\t{instruction}")?,
            Statement::Block(inner) => block(inner, depth + 1, f)?,
        }
    }
    writeln!(f, "{indent}}}")
}

impl Display for Registers {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let name = |(name, count): &(String, Option<u32>)| match count {
            Some(count) => format!("{name}<{count}>"),
            None => name.clone(),
        };
        let names: Vec<_> = self.names.iter().map(name).collect();
        write!(f, ".reg .{} {};", self.ty.name(), names.join(", "))
    }
}

impl Display for Instruction {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        if let Some(guard) = &self.guard {
            write!(f, "@{}{} ", if guard.not { "!" } else { "" }, guard.name)?;
        }
        write!(f, "{}", self.opcode.name())?;
        for modifier in &self.modifiers {
            write!(f, ".{modifier}")?;
        }
        if !self.operands.is_empty() {
            write!(f, " {}", Commas(&self.operands))?;
        }
        write!(f, ";")
    }
}

impl Display for Operand {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Name(name, offset) => write!(f, "{name}{}", Offset(*offset)),
            Self::Not(name) => write!(f, "!{name}"),
            Self::Literal(literal) => write!(f, "{literal}"),
            Self::Address(Some(name), offset) => write!(f, "[{name}{}]", Offset(*offset)),
            Self::Address(None, offset) => write!(f, "[{offset}]"),
            Self::Vector(of) => write!(f, "{{{}}}", Commas(of)),
            Self::List(of) => write!(f, "({})", Commas(of)),
            Self::Pair(first, second) => write!(f, "{first}|{second}"),
            Self::Nothing => write!(f, "_"),
        }
    }
}

impl Display for Literal {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Integer(value) => write!(f, "{value}"),
            Self::F32(bits) => write!(f, "0f{bits:08X}"),
            Self::F64(bits) => write!(f, "0d{bits:016X}"),
        }
    }
}
