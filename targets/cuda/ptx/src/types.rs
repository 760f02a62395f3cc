//! Types and spaces of memory.

/// Meaning of a number's bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Bits of any meaning.
    Bits,
    /// Two's complement.
    Signed,
    /// Without sign.
    Unsigned,
    /// Floating point.
    Float,
    /// True or false.
    Predicate,
}

macro_rules! types {
    ($($variant:ident $name:literal $class:ident $bits:literal $what:literal,)*) => {
        /// A fundamental type (PTX ISA, section 5.2).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Type {
            $(#[doc = $what] $variant,)*
        }

        impl Type {
            /// Every type.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Its name without the point.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Meaning of its bits.
            pub const fn class(self) -> Class {
                match self { $(Self::$variant => Class::$class,)* }
            }

            /// Its bits; 1 of a predicate.
            pub const fn bits(self) -> u32 {
                match self { $(Self::$variant => $bits,)* }
            }
        }
    };
}

types! {
    B8 "b8" Bits 8 "Eight bits.",
    B16 "b16" Bits 16 "Sixteen bits.",
    B32 "b32" Bits 32 "Thirty-two bits.",
    B64 "b64" Bits 64 "Sixty-four bits.",
    U8 "u8" Unsigned 8 "0 to 2^8 - 1.",
    U16 "u16" Unsigned 16 "0 to 2^16 - 1.",
    U32 "u32" Unsigned 32 "0 to 2^32 - 1.",
    U64 "u64" Unsigned 64 "0 to 2^64 - 1.",
    S8 "s8" Signed 8 "-2^7 to 2^7 - 1.",
    S16 "s16" Signed 16 "-2^15 to 2^15 - 1.",
    S32 "s32" Signed 32 "-2^31 to 2^31 - 1.",
    S64 "s64" Signed 64 "-2^63 to 2^63 - 1.",
    F16 "f16" Float 16 "IEEE half precision.",
    Bf16 "bf16" Float 16 "The upper half of an f32.",
    F32 "f32" Float 32 "IEEE single precision.",
    F64 "f64" Float 64 "IEEE double precision.",
    F16x2 "f16x2" Float 32 "Two halves.",
    Bf16x2 "bf16x2" Float 32 "Two upper halves of f32.",
    Tf32 "tf32" Float 32 "An f32 whose significand has ten bits.",
    Pred "pred" Predicate 1 "True or false.",
}

impl Type {
    /// The type with a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|ty| ty.name() == name)
    }

    /// Bytes in memory.
    pub const fn bytes(self) -> u32 {
        self.bits().div_ceil(8)
    }

    /// Whether it is an integer with sign.
    pub fn is_signed(self) -> bool {
        self.class() == Class::Signed
    }

    /// Whether it is a floating-point number.
    pub fn is_float(self) -> bool {
        self.class() == Class::Float
    }
}

/// State space of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Space {
    /// Memory that all blocks see.
    Global,
    /// Memory that the threads of a block share.
    Shared,
    /// A thread's own.
    Local,
    /// Constants of the module.
    Const,
    /// Parameters.
    Param,
}

impl Space {
    /// Every space, by name.
    pub const NAMES: [(&str, Self); 5] = [
        ("global", Self::Global),
        ("shared", Self::Shared),
        ("local", Self::Local),
        ("const", Self::Const),
        ("param", Self::Param),
    ];

    /// Its name without the point.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }

    /// The space with a name, without the point.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(of, _)| *of == name).map(|(_, space)| *space)
    }
}
