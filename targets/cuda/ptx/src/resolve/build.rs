//! A function, flattened: blocks opened, calls replaced by what they call, labels by numbers.

use super::form::{Form, Resolved};
use super::names::{Named, Scopes};
use crate::code::{Action, Class, Code, Constant, Kernel, Reg, Special};
use crate::fault::{Fault, wrong};
use crate::module::{
    Function, Instruction, Limit, MAX_REGISTERS, Module, Operand, Registers, Statement, Variable,
};
use crate::types::{Space, Type};
use std::collections::BTreeMap;

/// Most instructions of a kernel with all that it calls.
const MAX_CODE: usize = 1 << 18;
/// Most registers of a kernel with all that it calls.
const MAX_ALL_REGISTERS: u64 = MAX_REGISTERS * 4;
/// Most bytes of shared memory of a block, as of sm_90.
const MAX_SHARED: u64 = 227 * 1024;
/// Most bytes that a thread has of its own, as of every target.
const MAX_LOCAL: u64 = 512 * 1024;
/// Most bytes of parameters (PTX ISA, section 7.1).
const MAX_PARAMS: u64 = 32764;

/// The function that is being flattened.
struct Frame<'m> {
    function: &'m Function,
    labels: BTreeMap<&'m str, u32>,
    tables: BTreeMap<&'m str, &'m [String]>,
    end: u32,
}

/// What is known so far.
pub(super) struct Build<'m> {
    module: &'m Module,
    pub(super) scopes: Scopes,
    count: u32,
    names: Vec<(Reg, String)>,
    constants: BTreeMap<Constant, Reg>,
    pub(super) code: Vec<Code>,
    sources: Vec<(u32, String)>,
    /// Where labels stand, by number.
    labels: Vec<Option<u32>>,
    frames: Vec<Frame<'m>>,
    local: u64,
    shared: u64,
    /// Variables that live in shared memory: by function and line, as inlining meets them more than once.
    placed: BTreeMap<(&'m str, &'m str, u32), u64>,
    pub(super) guard: Option<(Reg, bool)>,
}

/// Flattens a kernel, or a function as if it were one.
pub(crate) fn kernel(module: &Module, function: &Function) -> Result<Kernel, Fault> {
    let mut build = Build {
        module,
        scopes: Scopes::default(),
        count: 0,
        names: Vec::new(),
        constants: BTreeMap::new(),
        code: Vec::new(),
        sources: Vec::new(),
        labels: Vec::new(),
        frames: Vec::new(),
        local: 0,
        shared: 0,
        placed: BTreeMap::new(),
        guard: None,
    };
    build.globals()?;
    build.scopes.enter();
    let declared = |wrong: crate::fault::Wrong| wrong.declared(&function.name, function.line.0);
    let mut params = Vec::new();
    let mut end = 0u64;
    for (variable, own) in
        function.params.iter().map(|p| (p, !function.entry)).chain(function.returns.iter().map(|r| (r, true)))
    {
        let named = if own {
            Named::Memory(Space::Local, build.own(variable).map_err(declared)?)
        } else {
            end = end.next_multiple_of(variable.alignment());
            let bytes = variable.bytes().unwrap_or(0);
            params.push((variable.name.clone(), end as u32, bytes as u32));
            end += bytes;
            Named::Memory(Space::Param, end - bytes)
        };
        build.define(&variable.name, named).map_err(declared)?;
    }
    if end > MAX_PARAMS {
        return wrong(format!("{end} bytes of parameters"), format!("{MAX_PARAMS} are the most"))
            .map_err(declared);
    }
    build.function(function)?;
    let (constants, shared) = build.place().map_err(declared)?;
    let labels = &build.labels;
    let target = |label: &u32| labels.get(*label as usize).copied().flatten().unwrap_or(0);
    for code in &mut build.code {
        match &mut code.action {
            Action::Branch(label) => *label = target(label),
            Action::BranchTable(of) => of.iter_mut().for_each(|label| *label = target(label)),
            _ => {}
        }
    }
    Ok(Kernel {
        name: function.name.clone(),
        code: build.code,
        sources: build.sources,
        names: build.names,
        registers: build.count as usize,
        constants,
        params,
        param_bytes: end as u32,
        shared: shared as u32,
        local: build.local.next_multiple_of(16) as u32,
        threads: function.dimensions(Limit::Threads),
        max_threads: function.dimensions(Limit::MaxThreads),
    })
}

impl<'m> Build<'m> {
    /// The variables of the module have names everywhere.
    fn globals(&mut self) -> Result<(), Fault> {
        self.scopes.enter();
        for (index, variable) in self.module.variables().enumerate() {
            let named = Named::Module(variable.space, index as u32);
            self.define(&variable.name, named)
                .map_err(|wrong| wrong.declared(&variable.name, variable.line.0))?;
        }
        Ok(())
    }

    fn define(&mut self, name: &str, named: Named) -> Resolved<()> {
        if self.scopes.define(name.to_owned(), named) {
            Ok(())
        } else {
            wrong(format!("`{name}` is declared twice"), "names are unique in their block")
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

    /// Whether what is flattened stands in the kernel itself.
    pub(super) fn in_kernel(&self) -> bool {
        self.frames.last().is_some_and(|frame| frame.function.entry)
    }

    /// Memory of a thread's own.
    fn own(&mut self, variable: &Variable) -> Resolved<u64> {
        let first = self.local.next_multiple_of(variable.alignment());
        self.local = first + variable.bytes().unwrap_or(0);
        if self.local > MAX_LOCAL {
            return wrong("too much memory of a thread's own", format!("{MAX_LOCAL} bytes are the most"));
        }
        Ok(first)
    }

    /// Shared memory for a variable.
    fn share(&mut self, variable: &Variable) -> Resolved<u64> {
        let first = self.shared.next_multiple_of(variable.alignment());
        self.shared = first + variable.bytes().unwrap_or(0);
        if self.shared > MAX_SHARED {
            return wrong(
                format!("{} bytes of shared memory", self.shared),
                format!("{MAX_SHARED} are the most of a block"),
            );
        }
        Ok(first)
    }

    /// Gives the shared variables of the module that the kernel names their place; dynamic ones begin behind the others.
    fn place(&mut self) -> Resolved<(Vec<(Reg, Constant)>, u64)> {
        let variables: Vec<_> = self.module.variables().collect();
        let used: Vec<_> = std::mem::take(&mut self.constants).into_iter().collect();
        let shared = |constant: &Constant| match constant {
            Constant::Address(index, _) if variables[*index as usize].space == Space::Shared => Some(*index),
            _ => None,
        };
        let mut places = BTreeMap::new();
        for dynamic in [false, true] {
            for index in used.iter().filter_map(|(constant, _)| shared(constant)) {
                let variable = variables[index as usize];
                if variable.array.contains(&0) == dynamic && !places.contains_key(&index) {
                    // All dynamic ones are the same memory.
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
        let Some(frame) = self.frames.last_mut() else {
            return wrong("a branch outside of a function", "statements stand in functions");
        };
        let label = *frame.labels.entry(name).or_insert(next);
        if label == next {
            self.labels.push(None);
        }
        Ok(label)
    }

    /// The end of the function that is flattened.
    pub(super) fn end(&self) -> u32 {
        self.frames.last().map_or(0, |frame| frame.end)
    }

    /// The labels of a list.
    pub(super) fn table(&self, name: &str) -> Resolved<&'m [String]> {
        match self.frames.last().and_then(|frame| frame.tables.get(name)) {
            Some(found) => Ok(found),
            None => {
                wrong(format!("`{name}` is no list of labels"), "`NAME: .branchtargets A, B;` stands before")
            }
        }
    }

    /// The statements of a function, whose parameters have names already.
    fn function(&mut self, function: &'m Function) -> Result<(), Fault> {
        let end = self.labels.len() as u32;
        self.labels.push(None);
        self.frames.push(Frame { function, labels: BTreeMap::new(), tables: BTreeMap::new(), end });
        self.scopes.enter();
        self.statements(function, function.body.as_deref().unwrap_or_default())?;
        self.scopes.leave();
        let declared = |wrong: crate::fault::Wrong| wrong.declared(&function.name, function.line.0);
        if let Some(frame) = self.frames.pop() {
            let missing = frame.labels.iter().find(|(_, label)| self.labels[**label as usize].is_none());
            if let Some((name, _)) = missing {
                return wrong(
                    format!("there is no label `{name}`"),
                    format!("`{name}:` stands in the function"),
                )
                .map_err(declared);
            }
        }
        self.labels[end as usize] = Some(self.code.len() as u32);
        if self.frames.is_empty() {
            // Who comes to the end of a kernel has ended.
            let source = self.sources.len() as u32;
            self.sources.push((function.line.0, "}".into()));
            self.code.push(Code {
                guard: None,
                outs: Box::new([]),
                ins: Box::new([]),
                action: Action::Exit,
                class: Class::Control,
                operations: 0,
                source,
            });
        }
        Ok(())
    }

    fn statements(&mut self, function: &'m Function, statements: &'m [Statement]) -> Result<(), Fault> {
        for statement in statements {
            match statement {
                Statement::Pragma(_) => {}
                Statement::Registers(registers) => self
                    .registers(registers)
                    .map_err(|wrong| wrong.declared(&function.name, registers.line.0))?,
                Statement::Variable(variable) => self
                    .variable(function, variable)
                    .map_err(|wrong| wrong.declared(&function.name, variable.line.0))?,
                Statement::Label(line, name) => {
                    self.here(name).map_err(|wrong| wrong.declared(&function.name, line.0))?;
                }
                Statement::Targets(_, name, targets) => {
                    if let Some(frame) = self.frames.last_mut() {
                        frame.tables.insert(name, targets);
                    }
                }
                Statement::Block(inner) => {
                    self.scopes.enter();
                    self.statements(function, inner)?;
                    self.scopes.leave();
                }
                Statement::Instruction(instruction) => self.instruction(function, instruction)?,
            }
        }
        Ok(())
    }

    /// A label stands here.
    fn here(&mut self, name: &'m str) -> Resolved<()> {
        let label = self.label(name)? as usize;
        if self.labels[label].is_some() {
            return wrong(format!("the label `{name}` stands twice"), "labels are unique in their function");
        }
        self.labels[label] = Some(self.code.len() as u32);
        Ok(())
    }

    fn registers(&mut self, registers: &Registers) -> Resolved<()> {
        for (name, count) in &registers.names {
            if u64::from(self.count) + u64::from(count.unwrap_or(1)) > MAX_ALL_REGISTERS {
                return wrong(
                    "too many registers",
                    format!("{MAX_ALL_REGISTERS} are the most, with those of calls"),
                );
            }
            let names = match count {
                Some(count) => (0..*count).map(|i| format!("{name}{i}")).collect(),
                None => vec![name.clone()],
            };
            for name in names {
                let reg = self.register();
                self.define(&name, Named::Register(reg, registers.ty))?;
                self.names.push((reg, name));
            }
        }
        Ok(())
    }

    fn variable(&mut self, function: &'m Function, variable: &'m Variable) -> Resolved<()> {
        let first = match variable.space {
            Space::Local | Space::Param => self.own(variable)?,
            Space::Shared if variable.array.contains(&0) => {
                return wrong(
                    "shared memory without a size in a function",
                    "declare it `.extern` in the module",
                );
            }
            Space::Shared => {
                let key = (function.name.as_str(), variable.name.as_str(), variable.line.0);
                if let Some(first) = self.placed.get(&key) {
                    *first
                } else {
                    let first = self.share(variable)?;
                    self.placed.insert(key, first);
                    first
                }
            }
            Space::Global | Space::Const => {
                return wrong(
                    format!("a variable of {} in a function", variable.space.name()),
                    "declare it in the module",
                );
            }
        };
        let space = if variable.space == Space::Param { Space::Local } else { variable.space };
        self.define(&variable.name, Named::Memory(space, first))
    }

    fn instruction(&mut self, function: &'m Function, instruction: &'m Instruction) -> Result<(), Fault> {
        let at = |wrong: crate::fault::Wrong| wrong.at(&function.name, instruction);
        if self.sources.len() >= MAX_CODE {
            return wrong("too many instructions", format!("{MAX_CODE} are the most, with those of calls"))
                .map_err(at);
        }
        let source = self.sources.len() as u32;
        self.sources.push((instruction.line.0, crate::text::instruction(instruction)));
        self.guard = None;
        if let Some(guard) = &instruction.guard {
            let mut form = Form::new(self, instruction, source);
            form.predicate(&guard.name).map_err(at)?;
            let reg = form.ins[0];
            self.guard = Some((reg, !guard.not));
        }
        super::resolve(&mut Form::new(self, instruction, source)).map_err(at)?;
        self.guard = None;
        if instruction.opcode == crate::Opcode::Call {
            self.call(function, instruction)?;
        }
        Ok(())
    }

    /// What a call calls, in its place.
    fn call(&mut self, function: &'m Function, instruction: &'m Instruction) -> Result<(), Fault> {
        let at = |wrong: crate::fault::Wrong| wrong.at(&function.name, instruction);
        let none = Vec::new();
        let (returns, name, params) = match &instruction.operands[..] {
            [Operand::Name(name, 0)] => (&none, name, &none),
            [Operand::Name(name, 0), Operand::List(params)] => (&none, name, params),
            [Operand::List(returns), Operand::Name(name, 0)] => (returns, name, &none),
            [Operand::List(returns), Operand::Name(name, 0), Operand::List(params)] => {
                (returns, name, params)
            }
            _ => return wrong("a call of this form", "`call (result), function, (parameter);`").map_err(at),
        };
        let Some(called) = self.module.function(name).filter(|called| !called.entry) else {
            let hint = "functions with a body are called by name; calls through registers are not known";
            return wrong(format!("there is no function `{name}`"), hint).map_err(at);
        };
        if self.frames.iter().any(|frame| std::ptr::eq(frame.function, called)) {
            let hint = "calls are replaced by what they call, so none may come back to itself";
            return wrong(format!("`{name}` calls itself"), hint).map_err(at);
        }
        if (returns.len(), params.len()) != (called.returns.len(), called.params.len()) {
            let (r, p) = (called.returns.len(), called.params.len());
            return wrong(
                format!("`{name}` is called with other lists"),
                format!("it has {r} results and {p} parameters"),
            )
            .map_err(at);
        }
        let mut names = Vec::new();
        for (given, variable) in returns.iter().chain(params).zip(called.returns.iter().chain(&called.params))
        {
            match given {
                Operand::Name(name, 0)
                    if matches!(self.scopes.find(name), Some(Named::Memory(Space::Local, _))) =>
                {
                    names.extend(self.scopes.find(name).map(|named| (variable.name.clone(), named)));
                }
                other => {
                    return wrong(format!("`{other}` is given"), "calls take variables of `.param`")
                        .map_err(at);
                }
            }
        }
        let hidden = self.scopes.hide();
        self.scopes.enter();
        for (name, named) in names {
            self.define(&name, named).map_err(at)?;
        }
        self.function(called)?;
        self.scopes.restore(hidden);
        Ok(())
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
