//! A module as it is written: variables, functions and their statements.

use crate::opcode::Opcode;
use crate::types::{Space, Type};

/// Most registers of a function.
pub const MAX_REGISTERS: u64 = 1 << 16;
/// Most bytes of a variable.
pub const MAX_VARIABLE: u64 = 1 << 30;
/// Most blocks inside of each other.
pub const MAX_DEPTH: usize = 32;

/// A line of the text, from 1. It is not part of a module's meaning: all lines are equal.
#[derive(Clone, Copy, Debug, Default)]
pub struct Line(pub u32);

impl PartialEq for Line {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Line {}

/// A module of PTX.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Version of the language: 8 and 3 of `.version 8.3`.
    pub version: (u32, u32),
    /// The words of `.target`: `sm_80`, and `debug` or texture modes.
    pub target: Vec<String>,
    /// Bits of an address: 64.
    pub address_size: u32,
    /// Variables and functions in their order.
    pub items: Vec<Item>,
}

/// Item of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// A variable of the whole module.
    Variable(Variable),
    /// A kernel or a function.
    Function(Function),
}

impl Module {
    /// The functions and kernels.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.items.iter().filter_map(|item| match item {
            Item::Function(function) => Some(function),
            Item::Variable(_) => None,
        })
    }

    /// The variables of the whole module.
    pub fn variables(&self) -> impl Iterator<Item = &Variable> {
        self.items.iter().filter_map(|item| match item {
            Item::Variable(variable) => Some(variable),
            Item::Function(_) => None,
        })
    }

    /// A function or kernel that has a body.
    pub fn function(&self, name: &str) -> Option<&Function> {
        self.functions().find(|function| function.name == name && function.body.is_some())
    }
}

/// Visibility of a name outside of its module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linkage {
    /// `.visible`: all modules.
    Visible,
    /// `.extern`: it is defined elsewhere, or when a kernel starts.
    Extern,
    /// `.weak`: all modules, and another definition may replace it.
    Weak,
    /// `.common`: as weak, without a value.
    Common,
}

impl Linkage {
    /// All, by name.
    pub const NAMES: [(&str, Self); 4] = [
        (".visible", Self::Visible),
        (".extern", Self::Extern),
        (".weak", Self::Weak),
        (".common", Self::Common),
    ];
}

/// Target of a pointer parameter, from `.ptr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// Space of the memory that it points to; `None`: any.
    pub space: Option<Space>,
    /// Alignment of its address, in bytes.
    pub align: Option<u32>,
}

/// A variable or a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Line of its declaration.
    pub line: Line,
    /// Visibility outside of the module.
    pub linkage: Option<Linkage>,
    /// State space.
    pub space: Space,
    /// Alignment of its address, in bytes; `None`: its type's size.
    pub align: Option<u32>,
    /// Elements of a vector: 2 or 4, 1 of none.
    pub vector: u32,
    /// Type of an element.
    pub ty: Type,
    /// Target of the pointer, of a parameter.
    pub pointer: Option<Pointer>,
    /// Its name.
    pub name: String,
    /// Dimensions of an array; 0 is `[]`, whose size is given when the kernel starts.
    pub array: Vec<u64>,
    /// Values in order, of as many elements as are given; the rest is zero.
    pub values: Vec<Literal>,
}

impl Variable {
    /// Bytes; 0 of an array without a size, none where that is more than [`MAX_VARIABLE`].
    pub fn bytes(&self) -> Option<u64> {
        let element = u64::from(self.ty.bytes() * self.vector);
        let count = self.array.iter().try_fold(1u64, |product, n| product.checked_mul(*n));
        count.and_then(|n| n.checked_mul(element)).filter(|&bytes| bytes <= MAX_VARIABLE)
    }

    /// Alignment of its address, in bytes.
    pub fn alignment(&self) -> u64 {
        u64::from(self.align.unwrap_or(self.ty.bytes() * self.vector)).max(1)
    }
}

/// A kernel or a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Line of its declaration.
    pub line: Line,
    /// Whether it is a kernel, `.entry`.
    pub entry: bool,
    /// Visibility outside of the module.
    pub linkage: Option<Linkage>,
    /// Results.
    pub returns: Vec<Variable>,
    /// Its name.
    pub name: String,
    /// Its parameters.
    pub params: Vec<Variable>,
    /// Its limits: `.reqntid 256, 1, 1` and the like.
    pub limits: Vec<(Limit, Vec<u32>)>,
    /// Its statements; none is a declaration.
    pub body: Option<Vec<Statement>>,
}

impl Function {
    /// A limit in the three dimensions of a block; missing ones are 1.
    pub fn dimensions(&self, of: Limit) -> Option<[u32; 3]> {
        let (_, found) = self.limits.iter().find(|(limit, _)| *limit == of)?;
        Some([0, 1, 2].map(|i| found.get(i).copied().unwrap_or(1)))
    }
}

/// Launch limit of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// `.maxntid`: most threads of a block, by dimension.
    MaxThreads,
    /// `.reqntid`: threads of a block, by dimension.
    Threads,
    /// `.minnctapersm`: blocks that share a multiprocessor.
    MinBlocks,
    /// `.maxnreg`: most registers of a thread.
    MaxRegisters,
    /// `.noreturn`: the function never returns.
    NoReturn,
}

impl Limit {
    /// All, by name, with the most numbers after it.
    pub const NAMES: [(&str, Self, usize); 5] = [
        (".maxntid", Self::MaxThreads, 3),
        (".reqntid", Self::Threads, 3),
        (".minnctapersm", Self::MinBlocks, 1),
        (".maxnreg", Self::MaxRegisters, 1),
        (".noreturn", Self::NoReturn, 0),
    ];
}

/// Statement of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Statement {
    /// `.reg .b32 %r<10>;`
    Registers(Registers),
    /// A variable of the function.
    Variable(Variable),
    /// `NAME:`
    Label(Line, String),
    /// `NAME: .branchtargets A, B;`
    Targets(Line, String, Vec<String>),
    /// `.pragma "nounroll";`
    Pragma(String),
    /// An instruction.
    Instruction(Instruction),
    /// `{ … }`, with names of its own.
    Block(Vec<Self>),
}

/// Registers of one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Line of their declaration.
    pub line: Line,
    /// Their type.
    pub ty: Type,
    /// Their names, and how many there are of `%r<10>`: `%r0` to `%r9`.
    pub names: Vec<(String, Option<u32>)>,
}

/// An instruction as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Line of the instruction.
    pub line: Line,
    /// Guard that decides which threads execute it.
    pub guard: Option<Guard>,
    /// Operation.
    pub opcode: Opcode,
    /// Modifiers after the points, in order: `rn` and `f32` of `add.rn.f32`.
    pub modifiers: Vec<String>,
    /// Operands.
    pub operands: Vec<Operand>,
}

/// `@%p` or `@!%p`: the threads that execute an instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    /// Whether it selects lanes whose register is false.
    pub not: bool,
    /// The register.
    pub name: String,
}

/// An operand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operand {
    /// A register, a variable, a label or a function; after it bytes to add, of a variable.
    Name(String, i64),
    /// A negated predicate register: `!%p`.
    Not(String),
    /// A number.
    Literal(Literal),
    /// `[%rd1+16]`, `[name]`: memory.
    Address(Option<String>, i64),
    /// `{%r1, %r2}`
    Vector(Vec<Self>),
    /// `(a, b)`: arguments or results of a call.
    List(Vec<Self>),
    /// `%p1|%p2`: two results.
    Pair(String, String),
    /// `_`: discarded.
    Nothing,
}

/// A number in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Literal {
    /// An integer; above 2^63 - 1 its bits.
    Integer(i64),
    /// Bits of an f32: `0f3F800000`.
    F32(u32),
    /// Bits of an f64: `0d3FF0000000000000` or `1.5`.
    F64(u64),
}
