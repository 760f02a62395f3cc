//! A function, flattened: blocks opened, calls replaced by what they call, labels by numbers.

use super::build::{Build, FunctionScope};
use super::form::{Form, Resolved};
use super::names::Named;
use crate::code::{Action, Class, Code, Kernel};
use crate::fault::{Fault, Wrong, wrong};
use crate::module::{
    Function, Instruction, Limit, MAX_REGISTERS, Module, Operand, Registers, Statement, Variable,
};
use crate::types::Space;
use std::collections::BTreeMap;

/// Most instructions of a kernel with all that it calls.
const MAX_CODE: usize = 1 << 18;
/// Most calls inside of one another.
const MAX_CALLS: usize = 64;
/// Most registers of a kernel with all that it calls.
const MAX_ALL_REGISTERS: u64 = MAX_REGISTERS * 4;
/// Most bytes of parameters (PTX ISA, section 7.1).
const MAX_PARAMS: u64 = 32764;

/// Flattens a kernel, or a function as if it were one.
pub(crate) fn kernel(module: &Module, function: &Function) -> Result<Kernel, Fault> {
    let mut build = Build::new(module);
    build.globals()?;
    build.scopes.enter();
    let declared = |wrong: Wrong| wrong.declared(&function.name, function.line.0);
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
        return wrong(format!("{end} bytes of parameters"), format!("at most {MAX_PARAMS} are allowed"))
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
    /// The statements of a function, whose parameters have names already.
    fn function(&mut self, function: &'m Function) -> Result<(), Fault> {
        let end = self.labels.len() as u32;
        self.labels.push(None);
        self.function_scopes.push(FunctionScope {
            function,
            labels: BTreeMap::new(),
            tables: BTreeMap::new(),
            end,
        });
        self.scopes.enter();
        self.statements(function, function.body.as_deref().unwrap_or_default())?;
        self.scopes.leave();
        let declared = |wrong: Wrong| wrong.declared(&function.name, function.line.0);
        if let Some(function_scope) = self.function_scopes.pop() {
            let missing =
                function_scope.labels.iter().find(|(_, label)| self.labels[**label as usize].is_none());
            if let Some((name, _)) = missing {
                return wrong(
                    format!("there is no label `{name}`"),
                    format!("`{name}:` must be in the function"),
                )
                .map_err(declared);
            }
        }
        self.labels[end as usize] = Some(self.code.len() as u32);
        if self.function_scopes.is_empty() {
            // A lane that reaches the end of a kernel has ended.
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
                    if let Some(function_scope) = self.function_scopes.last_mut() {
                        function_scope.tables.insert(name, targets);
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

    /// A label is here.
    fn here(&mut self, name: &'m str) -> Resolved<()> {
        let label = self.label(name)? as usize;
        if self.labels[label].is_some() {
            return wrong(
                format!("the label `{name}` is defined twice"),
                "labels must be unique in their function",
            );
        }
        self.labels[label] = Some(self.code.len() as u32);
        Ok(())
    }

    fn registers(&mut self, registers: &Registers) -> Resolved<()> {
        for (name, count) in &registers.names {
            if u64::from(self.count) + u64::from(count.unwrap_or(1)) > MAX_ALL_REGISTERS {
                return wrong(
                    "too many registers",
                    format!("at most {MAX_ALL_REGISTERS} are allowed, with those of called functions"),
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
        let at = |wrong: Wrong| wrong.at(&function.name, instruction);
        if self.sources.len() >= MAX_CODE {
            return wrong(
                "too many instructions",
                format!("at most {MAX_CODE} are allowed, with those of called functions"),
            )
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

    /// Inlines the function that a call names.
    fn call(&mut self, function: &'m Function, instruction: &'m Instruction) -> Result<(), Fault> {
        let at = |wrong: Wrong| wrong.at(&function.name, instruction);
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
            let hint = "functions with a body are called by name; calls through registers are not supported";
            return wrong(format!("there is no function `{name}`"), hint).map_err(at);
        };
        if self.function_scopes.len() >= MAX_CALLS {
            return wrong("calls are nested too deeply", format!("at most {MAX_CALLS} are allowed"))
                .map_err(at);
        }
        if self.function_scopes.iter().any(|function_scope| std::ptr::eq(function_scope.function, called)) {
            let hint = "calls are inlined, so recursion is not allowed";
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
