//! A kernel as it is executed: flat, with registers by number and every instruction's meaning decided.

use crate::lanes::Map;
use crate::types::Space;

/// First generic address of shared memory.
pub(crate) const SHARED_WINDOW: u64 = 0x1000_0000;
/// First generic address of a thread's own memory.
pub(crate) const LOCAL_WINDOW: u64 = 0x2000_0000;
/// Bytes of either.
pub(crate) const WINDOW: u64 = 0x1000_0000;

/// Most bytes of shared memory of a block, as of sm_90.
pub(crate) const MAX_SHARED: u64 = 227 * 1024;

/// The number of a register.
pub(crate) type Reg = u32;

/// Class by which instructions are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Integers, logic and comparison of integers.
    Integer,
    /// Floating point, rounded as IEEE 754 says.
    Float,
    /// Functions that hardware approximates.
    Special,
    /// Products of small matrices by a whole warp.
    Matrix,
    /// Conversions of numbers.
    Convert,
    /// Moves and choices.
    Move,
    /// Branches, calls and ends.
    Control,
    /// Barriers and fences.
    Barrier,
    /// Shuffles, votes and reductions of a warp.
    Warp,
    /// Loads of global memory.
    GlobalLoad,
    /// Stores to global memory.
    GlobalStore,
    /// Atomic operations.
    Atomic,
    /// Shared memory.
    Shared,
    /// A thread's own memory, parameters and constants.
    Local,
}

impl Class {
    /// Every class, by name.
    pub const NAMES: [(&str, Self); 14] = [
        ("integer", Self::Integer),
        ("float", Self::Float),
        ("special", Self::Special),
        ("matrix", Self::Matrix),
        ("convert", Self::Convert),
        ("move", Self::Move),
        ("control", Self::Control),
        ("barrier", Self::Barrier),
        ("warp", Self::Warp),
        ("global load", Self::GlobalLoad),
        ("global store", Self::GlobalStore),
        ("atomic", Self::Atomic),
        ("shared", Self::Shared),
        ("local", Self::Local),
    ];
}

/// An instruction, decoded.
pub(crate) struct Code {
    /// Guard predicate of the instruction, and the value for which a lane executes it.
    pub(crate) guard: Option<(Reg, bool)>,
    /// Registers that are written.
    pub(crate) outs: Box<[Reg]>,
    /// Registers that are read.
    pub(crate) ins: Box<[Reg]>,
    /// Action.
    pub(crate) action: Action,
    /// Class by which it is counted.
    pub(crate) class: Class,
    /// Floating-point or integer operations of a lane: 2 of a multiply-add.
    pub(crate) operations: u32,
    /// Index of the instruction's line and text.
    pub(crate) source: u32,
}

/// An access of memory: register `ins[0]` plus bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    /// State space; `None` for generic addresses.
    pub(crate) space: Option<Space>,
    /// Bytes after the register.
    pub(crate) offset: i64,
    /// Bytes of an element.
    pub(crate) bytes: u32,
    /// Elements: 1, 2, 4 or 8.
    pub(crate) count: u32,
}

/// Function of a word of memory: from its old value and two operands.
pub(crate) type Update = Box<dyn Fn(u64, u64, u64) -> u64 + Send + Sync>;

/// Reduction of a warp.
pub(crate) type Reduction = fn(u64, u64) -> u64;

/// Action of an instruction.
pub(crate) enum Action {
    /// `outs` from `ins`, lane by lane.
    Map(Map),
    /// Loads `outs` from memory; with sign extension: the bits that are read, and those of the result.
    Load(Access, Option<(u32, u32)>),
    /// `ins[1..]` to memory.
    Store(Access),
    /// Changes a word in memory; `outs`, if present, is its old value.
    Atomic(Access, Update),
    /// Memory of a block from memory of all, until a wait; `ins[1]`, where given, is the bytes that are read.
    Copy { to: i64, from: i64, bytes: u32 },
    /// The copies so far are a group.
    CopyCommit,
    /// Waits until at most this many groups are pending; none is all of them, and copies without a group.
    CopyWait(Option<u32>),
    /// Matrices of 8 x 8 halves from shared memory.
    LoadMatrix { offset: i64, count: u32, transposed: bool },
    /// A product of small matrices.
    Matrix(Matrix),
    /// `outs[0]` from another lane, `outs[1]` whether that lane was in range; `ins` value, lane, clamp and
    /// mask.
    Shuffle(Shuffle),
    /// A vote on `ins[0]`, negated if `negated`; `ins[1]` is the mask.
    Vote { vote: Vote, negated: bool },
    /// A reduction of `ins[0]` over the lanes of the mask `ins[1]`.
    Reduce(Reduction),
    /// The lanes that are active.
    ActiveMask,
    /// A barrier of the block; `ins` its number and, where given, how many threads it has. `arrive` does not
    /// wait.
    Barrier { aligned: bool, arrive: bool },
    /// A barrier of the lanes of the mask `ins[0]`.
    WarpBarrier,
    /// Jumps to the instruction with this index.
    Branch(u32),
    /// Jumps to the instruction that `ins[0]` selects.
    BranchTable(Box<[u32]>),
    /// The end of the thread.
    Exit,
    /// The kernel gives up.
    Trap,
    /// Instructions without an effect in an interpreter: fences, hints.
    Nothing,
}

/// Rule by which a shuffle selects the lane that it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// Question of a vote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

/// A product of small matrices: `d = a * b + c`, of 16 rows and 8 columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    /// Columns of `a`.
    pub(crate) depth: u32,
    /// Elements of `a`.
    pub(crate) a: Element,
    /// Elements of `b`.
    pub(crate) b: Element,
}

/// Elements of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    Bf16,
    Tf32,
    E4m3,
    E5m2,
    S8,
    U8,
}

impl Element {
    /// Number that a register holds.
    pub(crate) fn per_register(self) -> u32 {
        match self {
            Self::Tf32 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 | Self::E5m2 | Self::S8 | Self::U8 => 4,
        }
    }

    /// Whether it is an integer.
    pub(crate) fn is_integer(self) -> bool {
        matches!(self, Self::S8 | Self::U8)
    }
}

/// A value that a register has from the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Constant {
    /// Bits.
    Bits(u64),
    /// The address of a variable of the module, by its index among them, and bytes to add.
    Address(u32, i64),
    /// Special register of a thread.
    Special(Special),
}

macro_rules! specials {
    ($($variant:ident $name:literal $bits:literal,)*) => {
        /// A special register (PTX ISA, chapter 10).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum Special { $($variant,)* }

        impl Special {
            /// All, by name, with their bits.
            pub(crate) const NAMES: &'static [(&'static str, Self, u32)] = &[$(($name, Self::$variant, $bits),)*];
        }
    };
}

specials! {
    ThreadX "%tid.x" 32,
    ThreadY "%tid.y" 32,
    ThreadZ "%tid.z" 32,
    ThreadsX "%ntid.x" 32,
    ThreadsY "%ntid.y" 32,
    ThreadsZ "%ntid.z" 32,
    BlockX "%ctaid.x" 32,
    BlockY "%ctaid.y" 32,
    BlockZ "%ctaid.z" 32,
    BlocksX "%nctaid.x" 32,
    BlocksY "%nctaid.y" 32,
    BlocksZ "%nctaid.z" 32,
    PoolThread "%laneid" 32,
    Warp "%warpid" 32,
    Warps "%nwarpid" 32,
    MaskEqual "%lanemask_eq" 32,
    MaskLess "%lanemask_lt" 32,
    MaskLessEqual "%lanemask_le" 32,
    MaskGreater "%lanemask_gt" 32,
    MaskGreaterEqual "%lanemask_ge" 32,
    DynamicShared "%dynamic_smem_size" 32,
    TotalShared "%total_smem_size" 32,
}

/// A kernel, ready to be executed.
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) code: Vec<Code>,
    /// Line and text of every instruction of the text.
    pub(crate) sources: Vec<(u32, String)>,
    /// The names of registers, by number and in its order.
    pub(crate) names: Vec<(Reg, String)>,
    /// Registers, constants among them.
    pub(crate) registers: usize,
    pub(crate) constants: Vec<(Reg, Constant)>,
    /// Parameters: name, first byte and bytes.
    pub(crate) params: Vec<(String, u32, u32)>,
    /// Bytes of all parameters.
    pub(crate) param_bytes: u32,
    /// Bytes of shared memory whose size is known; what a launch adds comes after it.
    pub(crate) shared: u32,
    /// Bytes that a thread has of its own.
    pub(crate) local: u32,
    /// Threads of a block that the kernel requires, and the most that it takes.
    pub(crate) threads: Option<[u32; 3]>,
    pub(crate) max_threads: Option<[u32; 3]>,
}

impl Kernel {
    /// The name of a register.
    pub(crate) fn register_name(&self, reg: Reg) -> &str {
        self.names.binary_search_by_key(&reg, |(of, _)| *of).map_or("_", |i| &self.names[i].1)
    }
}
