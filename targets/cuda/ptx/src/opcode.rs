//! The instructions that are known.

macro_rules! opcodes {
    ($($variant:ident $name:literal,)*) => {
        /// The first word of an instruction.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "their names say which instruction of PTX they are")]
        pub enum Opcode {
            $($variant,)*
        }

        impl Opcode {
            /// Every instruction.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

opcodes! {
    Abs "abs",
    Activemask "activemask",
    Add "add",
    And "and",
    Atom "atom",
    Bar "bar",
    Barrier "barrier",
    Bfe "bfe",
    Bfi "bfi",
    Bfind "bfind",
    Bra "bra",
    Brev "brev",
    Brx "brx",
    Call "call",
    Clz "clz",
    Cnot "cnot",
    Copysign "copysign",
    Cos "cos",
    Cp "cp",
    Cvt "cvt",
    Cvta "cvta",
    Div "div",
    Dp2a "dp2a",
    Dp4a "dp4a",
    Ex2 "ex2",
    Exit "exit",
    Fence "fence",
    Fma "fma",
    Isspacep "isspacep",
    Ld "ld",
    Ldmatrix "ldmatrix",
    Ldu "ldu",
    Lg2 "lg2",
    Lop3 "lop3",
    Mad "mad",
    Max "max",
    Membar "membar",
    Min "min",
    Mma "mma",
    Mov "mov",
    Mul "mul",
    Mul24 "mul24",
    Nanosleep "nanosleep",
    Neg "neg",
    Not "not",
    Or "or",
    Popc "popc",
    Prefetch "prefetch",
    Prmt "prmt",
    Rcp "rcp",
    Red "red",
    Redux "redux",
    Rem "rem",
    Ret "ret",
    Rsqrt "rsqrt",
    Sad "sad",
    Selp "selp",
    Set "set",
    Setp "setp",
    Shf "shf",
    Shfl "shfl",
    Shl "shl",
    Shr "shr",
    Sin "sin",
    Slct "slct",
    Sqrt "sqrt",
    St "st",
    Sub "sub",
    Tanh "tanh",
    Testp "testp",
    Trap "trap",
    Vote "vote",
    Xor "xor",
}

impl Opcode {
    /// The instruction with a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|opcode| opcode.name() == name)
    }
}
