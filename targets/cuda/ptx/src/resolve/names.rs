//! Meanings of names.

use crate::code::Reg;
use crate::types::{Space, Type};
use std::collections::BTreeMap;

/// Meaning of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Named {
    /// A register.
    Register(Reg, Type),
    /// Memory: its space and its first byte there.
    Memory(Space, u64),
    /// A variable of the module in memory of all blocks: its space and its index.
    Module(Space, u32),
}

/// Names, those of inner blocks before those of outer ones.
#[derive(Default)]
pub(super) struct Scopes {
    stack: Vec<BTreeMap<String, Named>>,
}

impl Scopes {
    pub(super) fn enter(&mut self) {
        self.stack.push(BTreeMap::new());
    }

    pub(super) fn leave(&mut self) {
        self.stack.pop();
    }

    /// Defines a name; returns whether it was free in its block.
    pub(super) fn define(&mut self, name: String, named: Named) -> bool {
        self.stack.last_mut().is_some_and(|scope| scope.insert(name, named).is_none())
    }

    pub(super) fn find(&self, name: &str) -> Option<Named> {
        self.stack.iter().rev().find_map(|scope| scope.get(name).copied())
    }

    /// Hides every scope but the outermost, that of the module.
    pub(super) fn hide(&mut self) -> Self {
        Self { stack: self.stack.split_off(1) }
    }

    /// Restores the names that [`Scopes::hide`] took.
    pub(super) fn restore(&mut self, hidden: Self) {
        self.stack.truncate(1);
        self.stack.extend(hidden.stack);
    }
}
