//! State while a function is flattened: names, registers, constants, labels and memory.

use super::names::{Named, Scopes};
use crate::code::{Code, Constant, MAX_SHARED, Reg, Special};
use crate::fault::{Fault, Resolved, wrong};
use crate::module::{Function, Module, Variable};
use crate::types::{Space, Type};
use std::collections::BTreeMap;

/// Maximum bytes of a thread's local memory, which is the same for every target.
const MAX_LOCAL: u64 = 512 * 1024;

/// The function that is being flattened.
pub(super) struct FunctionScope<'m> {
    pub(super) function: &'m Function,
    pub(super) labels: BTreeMap<&'m str, u32>,
    pub(super) tables: BTreeMap<&'m str, &'m [String]>,
    pub(super) end: u32,
}

/// State so far.
pub(super) struct Build<'m> {
    pub(super) module: &'m Module,
    pub(super) scopes: Scopes,
    pub(super) count: u32,
    pub(super) names: Vec<(Reg, String)>,
    constants: BTreeMap<Constant, Reg>,
    pub(super) code: Vec<Code>,
    pub(super) sources: Vec<(u32, String)>,
    /// Positions of labels, by number.
    pub(super) labels: Vec<Option<u32>>,
    pub(super) function_scopes: Vec<FunctionScope<'m>>,
    pub(super) local: u64,
    shared: u64,
    /// Shared variables by function and line, since inlining may meet them more than once.
    pub(super) placed: BTreeMap<(&'m str, &'m str, u32), u64>,
    pub(super) guard: Option<(Reg, bool)>,
}

impl<'m> Build<'m> {
    /// An empty state for a module.
    pub(super) fn new(module: &'m Module) -> Self {
        Self {
            module,
            scopes: Scopes::default(),
            count: 0,
            names: Vec::new(),
            constants: BTreeMap::new(),
            code: Vec::new(),
            sources: Vec::new(),
            labels: Vec::new(),
            function_scopes: Vec::new(),
            local: 0,
            shared: 0,
            placed: BTreeMap::new(),
            guard: None,
        }
    }

    /// The variables of the module have names everywhere.
    pub(super) fn globals(&mut self) -> Result<(), Fault> {
        self.scopes.enter();
        for (index, variable) in self.module.variables().enumerate() {
            let named = Named::Module(variable.space, index as u32);
            self.define(&variable.name, named)
                .map_err(|wrong| wrong.declared(&variable.name, variable.line.0))?;
        }
        Ok(())
    }

    pub(super) fn define(&mut self, name: &str, named: Named) -> Resolved<()> {
        if self.scopes.define(name.to_owned(), named) {
            Ok(())
        } else {
            wrong(format!("`{name}` is declared twice"), "names must be unique in their block")
        }
    }

    /// A new register.
    pub(super) fn register(&mut self) -> Reg {
        self.count += 1;
        self.count - 1
    }

    /// A register that has a value from the start.
    pub(super) fn constant(&mut self, constant: Constant) -> Reg {
        if let Some(reg) = self.constants.get(&constant) {
            return *reg;
        }
        let reg = self.register();
        self.constants.insert(constant, reg);
        reg
    }

    /// A special register and its bits, where a name is one.
    pub(super) fn special(&mut self, name: &str) -> Resolved<Option<(Reg, u32)>> {
        if let Some((_, special, bits)) = Special::NAMES.iter().find(|(of, ..)| *of == name) {
            return Ok(Some((self.constant(Constant::Special(*special)), *bits)));
        }
        if ["%clock", "%globaltimer", "%smid", "%nsmid", "%gridid", "%pm"]
            .iter()
            .any(|of| name.starts_with(of))
        {
            return wrong(
                format!("`{name}` depends on the machine"),
                "an interpreter has no clock and no multiprocessors",
            );
        }
        Ok(None)
    }

    /// Whether the flattened code is in the kernel itself.
    pub(super) fn in_kernel(&self) -> bool {
        self.function_scopes.last().is_some_and(|function_scope| function_scope.function.entry)
    }

    /// Memory of a thread's own.
    pub(super) fn own(&mut self, variable: &Variable) -> Resolved<u64> {
        let first = self.local.next_multiple_of(variable.alignment());
        self.local = first + variable.bytes().unwrap_or(0);
        if self.local > MAX_LOCAL {
            return wrong("too much local memory", format!("at most {MAX_LOCAL} bytes are allowed"));
        }
        Ok(first)
    }

    /// Shared memory for a variable.
    pub(super) fn share(&mut self, variable: &Variable) -> Resolved<u64> {
        let first = self.shared.next_multiple_of(variable.alignment());
        self.shared = first + variable.bytes().unwrap_or(0);
        if self.shared > MAX_SHARED {
            return wrong(
                format!("{} bytes of shared memory", self.shared),
                format!("at most {MAX_SHARED} are allowed in a block"),
            );
        }
        Ok(first)
    }

    /// Gives the shared variables of the module that the kernel names their place; dynamic ones begin after
    /// the others.
    pub(super) fn place(&mut self) -> Resolved<(Vec<(Reg, Constant)>, u64)> {
        let variables: Vec<_> = self.module.variables().collect();
        let used: Vec<_> = std::mem::take(&mut self.constants).into_iter().collect();
        let shared = |constant: &Constant| match constant {
            Constant::Address(index, _) if variables[*index as usize].space == Space::Shared => Some(*index),
            _ => None,
        };
        let mut places = BTreeMap::new();
        for dynamic in [false, true] {
            if dynamic {
                // All dynamic ones begin at the same byte.
                let begins = used.iter().filter_map(|(constant, _)| shared(constant));
                let begins = begins.map(|index| variables[index as usize]).filter(|v| v.array.contains(&0));
                let align = begins.map(Variable::alignment).max().unwrap_or(1);
                self.shared = self.shared.next_multiple_of(align);
            }
            for index in used.iter().filter_map(|(constant, _)| shared(constant)) {
                let variable = variables[index as usize];
                if variable.array.contains(&0) == dynamic && !places.contains_key(&index) {
                    places.insert(index, self.share(variable)?);
                }
            }
        }
        let found = used.into_iter().map(|(constant, reg)| match (shared(&constant), constant) {
            (Some(index), Constant::Address(_, offset)) => {
                (reg, Constant::Bits(places[&index].wrapping_add(offset as u64)))
            }
            _ => (reg, constant),
        });
        let found = found.collect();
        Ok((found, self.shared))
    }

    /// A label's number.
    pub(super) fn label(&mut self, name: &'m str) -> Resolved<u32> {
        let next = self.labels.len() as u32;
        let Some(function_scope) = self.function_scopes.last_mut() else {
            return wrong("a branch outside of a function", "statements must be in functions");
        };
        let label = *function_scope.labels.entry(name).or_insert(next);
        if label == next {
            self.labels.push(None);
        }
        Ok(label)
    }

    /// The end of the function that is flattened.
    pub(super) fn end(&self) -> u32 {
        self.function_scopes.last().map_or(0, |function_scope| function_scope.end)
    }

    /// The labels of a list.
    pub(super) fn table(&self, name: &str) -> Resolved<&'m [String]> {
        match self.function_scopes.last().and_then(|function_scope| function_scope.tables.get(name)) {
            Some(found) => Ok(found),
            None => wrong(
                format!("`{name}` is not a list of labels"),
                "`NAME: .branchtargets A, B;` must be before it",
            ),
        }
    }
}

/// Types of a size.
pub(super) const fn of_bits(bits: u32) -> Type {
    match bits {
        8 => Type::B8,
        16 => Type::B16,
        32 => Type::B32,
        _ => Type::B64,
    }
}
