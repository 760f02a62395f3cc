//! An instruction while it is resolved: its modifiers in order, its operands by type.

use super::build::Build;
use super::names::Named;
use crate::code::{Action, Class, Code, Constant, Reg};
pub(super) use crate::fault::Resolved;
use crate::fault::wrong;
use crate::lanes::{Map, mask};
use crate::module::{Instruction, Literal, Operand};
use crate::opcode::Opcode;
use crate::types::{self, Space, Type};

/// Allowed width of a register for a type.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fit {
    Exact,
    /// At least as wide: of loads, stores and conversions.
    Wide,
}

/// An instruction that is read part by part.
pub(super) struct Form<'b, 'm> {
    pub(super) build: &'b mut Build<'m>,
    instruction: &'m Instruction,
    source: u32,
    at: usize,
    pub(super) outs: Vec<Reg>,
    pub(super) ins: Vec<Reg>,
}

impl<'b, 'm> Form<'b, 'm> {
    pub(super) fn new(build: &'b mut Build<'m>, instruction: &'m Instruction, source: u32) -> Self {
        Self { build, instruction, source, at: 0, outs: Vec::new(), ins: Vec::new() }
    }

    pub(super) fn opcode(&self) -> Opcode {
        self.instruction.opcode
    }

    /// Whether the type after the last point is one of floating point.
    pub(super) fn last_is_float(&self) -> bool {
        let last = self.instruction.modifiers.last();
        last.and_then(|name| Type::named(name)).is_some_and(Type::is_float)
    }

    /// The next modifier.
    pub(super) fn peek(&self) -> Option<&'m str> {
        self.instruction.modifiers.get(self.at).map(String::as_str)
    }

    pub(super) fn advance(&mut self) {
        self.at += 1;
    }

    /// Whether a modifier comes; it is taken.
    pub(super) fn flag(&mut self, name: &str) -> bool {
        let is = self.peek() == Some(name);
        self.at += usize::from(is);
        is
    }

    /// Whether one of a table comes; it is taken.
    pub(super) fn one_of<T: Copy>(&mut self, table: &[(&str, T)]) -> Option<T> {
        let next = self.peek()?;
        let (_, found) = table.iter().find(|(name, _)| *name == next)?;
        self.at += 1;
        Some(*found)
    }

    /// An entry of a table, which is required.
    pub(super) fn need<T: Copy>(&mut self, what: &str, table: &[(&str, T)]) -> Resolved<T> {
        if let Some(found) = self.one_of(table) {
            return Ok(found);
        }
        let names: Vec<_> = table.iter().map(|(name, _)| format!(".{name}")).collect();
        self.missing(what, format!("one of: {}", names.join(", ")))
    }

    /// Error for a form without a required part.
    pub(super) fn missing<T>(&self, what: &str, hint: impl Into<String>) -> Resolved<T> {
        match self.peek() {
            Some(next) => wrong(format!("`.{next}`, expected {what}"), hint),
            None => wrong(format!("{what} is missing"), hint),
        }
    }

    /// A type, one of some.
    pub(super) fn ty(&mut self, of: &[Type]) -> Resolved<Type> {
        match self.peek().and_then(Type::named) {
            Some(ty) if of.contains(&ty) => {
                self.at += 1;
                Ok(ty)
            }
            _ => {
                let names: Vec<_> = of.iter().map(|ty| format!(".{}", ty.name())).collect();
                self.missing("a type", format!("one of: {}", names.join(", ")))
            }
        }
    }

    /// Checks that no modifiers are left, and that there are `least` to `most` operands.
    pub(super) fn end(&self, least: usize, most: usize) -> Resolved<()> {
        if let Some(left) = self.peek() {
            return wrong(
                format!("`.{left}` is not supported here"),
                "`docs/ptx.md` lists the forms of every instruction",
            );
        }
        let count = self.instruction.operands.len();
        if (least..=most).contains(&count) {
            return Ok(());
        }
        let takes = if least == most { least.to_string() } else { format!("{least} to {most}") };
        wrong(format!("{count} operands"), format!("`{}` takes {takes}", self.opcode().name()))
    }

    pub(super) fn count(&self) -> usize {
        self.instruction.operands.len()
    }

    pub(super) fn operand(&self, i: usize) -> Resolved<&'m Operand> {
        match self.instruction.operands.get(i) {
            Some(operand) => Ok(operand),
            None => wrong(format!("operand {} is missing", i + 1), "`docs/ptx.md` lists the forms"),
        }
    }

    fn register(&self, name: &str) -> Resolved<(Reg, Type)> {
        match self.build.scopes.find(name) {
            Some(Named::Register(reg, ty)) => Ok((reg, ty)),
            Some(_) => wrong(format!("`{name}` is a variable"), "a register is expected"),
            None => wrong(format!("`{name}` is not declared"), "registers are declared by `.reg`"),
        }
    }

    fn fits(name: &str, has: Type, ty: Type, fit: Fit) -> Resolved<()> {
        use types::Class::{Bits, Float, Predicate};
        let classes = match (has.class(), ty.class()) {
            (Predicate, of) | (of, Predicate) => of == Predicate && has.class() == Predicate,
            (Bits, _) | (_, Bits) | (Float, Float) => true,
            (Float, _) | (_, Float) => false,
            _ => true,
        };
        let widths = match fit {
            Fit::Exact => has.bits() == ty.bits(),
            Fit::Wide => has.bits() >= ty.bits(),
        };
        if classes && widths {
            return Ok(());
        }
        wrong(
            format!("`{name}` is a register of .{}, which .{} does not take", has.name(), ty.name()),
            "declare it with the type of the instruction, or with bits of its size",
        )
    }

    /// Operand `i` is written.
    pub(super) fn dst(&mut self, i: usize, ty: Type) -> Resolved<Type> {
        let operand = self.operand(i)?;
        self.dst_of(operand, ty, Fit::Exact)
    }

    /// Operand `i` is written, and may be wider; its type.
    pub(super) fn dst_wide(&mut self, i: usize, ty: Type) -> Resolved<Type> {
        let operand = self.operand(i)?;
        self.dst_of(operand, ty, Fit::Wide)
    }

    fn dst_of(&mut self, operand: &Operand, ty: Type, fit: Fit) -> Resolved<Type> {
        match operand {
            Operand::Name(name, 0) => {
                let (reg, has) = self.register(name)?;
                Self::fits(name, has, ty, fit)?;
                self.outs.push(reg);
                Ok(has)
            }
            Operand::Nothing => {
                let reg = self.build.register();
                self.outs.push(reg);
                Ok(ty)
            }
            _ => wrong(format!("`{operand}` is written"), "a register is expected"),
        }
    }

    /// Operands of `{a, b}`, or a single one.
    pub(super) fn elements(&self, i: usize, count: usize) -> Resolved<&'m [Operand]> {
        let operand = self.operand(i)?;
        let found = match operand {
            Operand::Vector(of) => &of[..],
            other => std::slice::from_ref(other),
        };
        if found.len() == count {
            return Ok(found);
        }
        wrong(format!("`{operand}` has {} elements", found.len()), format!("{count} are expected"))
    }

    /// The elements of operand `i` are written; the type of the last register.
    pub(super) fn dsts(&mut self, i: usize, count: usize, ty: Type, wide: bool) -> Resolved<Type> {
        let fit = if wide { Fit::Wide } else { Fit::Exact };
        let mut last = ty;
        for (n, operand) in self.elements(i, count)?.iter().enumerate() {
            let of = self.dst_of(operand, ty, fit)?;
            if n > 0 && of.bits() != last.bits() {
                return wrong("registers of several sizes in one vector", "declare them with one type");
            }
            last = of;
        }
        Ok(last)
    }

    /// The elements of operand `i` are read.
    pub(super) fn srcs(&mut self, i: usize, count: usize, ty: Type, wide: bool) -> Resolved<()> {
        let fit = if wide { Fit::Wide } else { Fit::Exact };
        for operand in self.elements(i, count)? {
            self.src_of(operand, ty, fit)?;
        }
        Ok(())
    }

    /// Operand `i` is read.
    pub(super) fn src(&mut self, i: usize, ty: Type) -> Resolved<()> {
        let operand = self.operand(i)?;
        self.src_of(operand, ty, Fit::Exact)
    }

    /// Operand `i` is read, and may be wider.
    pub(super) fn src_wide(&mut self, i: usize, ty: Type) -> Resolved<()> {
        let operand = self.operand(i)?;
        self.src_of(operand, ty, Fit::Wide)
    }

    fn src_of(&mut self, operand: &Operand, ty: Type, fit: Fit) -> Resolved<()> {
        let reg = match operand {
            Operand::Name(name, 0) => {
                if let Some((special, bits)) = self.build.special(name)? {
                    if bits != ty.bits() {
                        return wrong(format!("`{name}` has {bits} bits"), format!("take .u{bits}"));
                    }
                    special
                } else {
                    let (reg, has) = self.register(name)?;
                    Self::fits(name, has, ty, fit)?;
                    reg
                }
            }
            Operand::Literal(literal) => self.build.constant(Constant::Bits(bits(*literal, ty)?)),
            _ => return wrong(format!("`{operand}` is read"), "a register or a number is expected"),
        };
        self.ins.push(reg);
        Ok(())
    }

    /// Bits are read that are given here.
    pub(super) fn given(&mut self, bits: u64) {
        let reg = self.build.constant(Constant::Bits(bits));
        self.ins.push(reg);
    }

    /// A predicate is read, by name.
    pub(super) fn predicate(&mut self, name: &str) -> Resolved<()> {
        let (reg, has) = self.register(name)?;
        Self::fits(name, has, Type::Pred, Fit::Exact)?;
        self.ins.push(reg);
        Ok(())
    }

    /// A predicate is written, by name.
    pub(super) fn dst_predicate(&mut self, name: &str) -> Resolved<()> {
        self.dst_named(name, Type::Pred)
    }

    /// A register is written, by name.
    pub(super) fn dst_named(&mut self, name: &str, ty: Type) -> Resolved<()> {
        let (reg, has) = self.register(name)?;
        Self::fits(name, has, ty, Fit::Exact)?;
        self.outs.push(reg);
        Ok(())
    }

    /// A number that must be in the text, below a limit.
    pub(super) fn immediate(&self, i: usize, limit: i64) -> Resolved<u32> {
        match self.operand(i)? {
            Operand::Literal(Literal::Integer(value)) if (0..limit).contains(value) => Ok(*value as u32),
            other => wrong(format!("`{other}`"), format!("an integer from 0 to {} is expected", limit - 1)),
        }
    }

    /// The address of a variable, where operand `i` names one, in its own space.
    pub(super) fn variable(&mut self, i: usize) -> Resolved<Option<(Reg, Space)>> {
        let Operand::Name(name, offset) = self.operand(i)? else { return Ok(None) };
        Ok(match self.build.scopes.find(name) {
            Some(Named::Memory(space, first)) => {
                let address = first.wrapping_add(*offset as u64);
                Some((self.build.constant(Constant::Bits(address)), space))
            }
            Some(Named::Module(space, index)) => {
                Some((self.build.constant(Constant::Address(index, *offset)), space))
            }
            _ => None,
        })
    }

    /// Memory: its register is read; its space, where the name says it, and bytes to add.
    pub(super) fn address(&mut self, i: usize, written: Option<Space>) -> Resolved<(Option<Space>, i64)> {
        let operand = self.operand(i)?;
        let Operand::Address(base, offset) = operand else {
            return wrong(format!("`{operand}`"), "`[address]` is expected");
        };
        let Some(name) = base else {
            self.given(0);
            return Ok((written, *offset));
        };
        let (space, reg) = match self.build.scopes.find(name) {
            Some(Named::Register(reg, ty)) => {
                if ty.bits() < 32 || ty.is_float() {
                    return wrong(
                        format!("`{name}` is a register of .{}", ty.name()),
                        "an address has .b32 or .b64",
                    );
                }
                // In a function, parameters are in local memory.
                let own = written == Some(Space::Param) && !self.build.in_kernel();
                (if own { Some(Space::Local) } else { written }, reg)
            }
            Some(Named::Memory(space, first)) => {
                Self::agrees(name, written, space)?;
                (Some(space), self.build.constant(Constant::Bits(first)))
            }
            Some(Named::Module(space, index)) => {
                Self::agrees(name, written, space)?;
                (Some(space), self.build.constant(Constant::Address(index, 0)))
            }
            None => return wrong(format!("`{name}` is not declared"), "declare a register or a variable"),
        };
        self.ins.push(reg);
        Ok((space, *offset))
    }

    /// Whether an instruction may access a variable. Without a space addresses are generic: only those of
    /// global memory are.
    fn agrees(name: &str, written: Option<Space>, space: Space) -> Resolved<()> {
        let agrees = match written {
            None => matches!(space, Space::Global | Space::Const),
            Some(Space::Param) => matches!(space, Space::Param | Space::Local),
            Some(written) => written == space,
        };
        if agrees {
            return Ok(());
        }
        wrong(format!("`{name}` is in {}", space.name()), "name that space in the instruction")
    }

    /// A lane's function of the operands that were read.
    pub(super) fn map(&mut self, class: Class, operations: u32, map: Map) {
        self.emit(Action::Map(map), class, operations);
    }

    /// The instruction is complete.
    pub(super) fn emit(&mut self, action: Action, class: Class, operations: u32) {
        let code = Code {
            guard: self.build.guard,
            outs: std::mem::take(&mut self.outs).into(),
            ins: std::mem::take(&mut self.ins).into(),
            action,
            class,
            operations,
            source: self.source,
        };
        self.build.code.push(code);
    }
}

/// The bits of a number that is an operand of a type.
fn bits(literal: Literal, ty: Type) -> Resolved<u64> {
    let float = ty.is_float();
    match (literal, ty) {
        (Literal::Integer(value), _) if !float => Ok(value as u64 & mask(ty.bits())),
        (Literal::F32(bits), Type::F32 | Type::B32) => Ok(u64::from(bits)),
        (Literal::F64(bits), Type::F64 | Type::B64) => Ok(bits),
        (Literal::F64(bits), Type::F32) => Ok(u64::from((f64::from_bits(bits) as f32).to_bits())),
        (Literal::F32(bits), Type::F64) => Ok(f64::from(f32::from_bits(bits)).to_bits()),
        _ => wrong(format!("`{literal}` is not a number of .{}", ty.name()), "write it as the type requires"),
    }
}
