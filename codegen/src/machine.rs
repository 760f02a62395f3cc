//! Target machine of kernels, as LLVM names it, and the vector shape that follows.

use crate::error::{Error, Result};
use inkwell::targets::TargetMachine;

/// A CPU in LLVM's words.
///
/// Kernels use exactly the instructions of [`Machine::all_features`]; `cpu` only tunes their scheduling.
/// So what a runtime checks before it starts is all that it has to check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// LLVM triple (`x86_64-unknown-linux-gnu`).
    pub triple: String,
    /// LLVM CPU name (`znver4`). The x86-64 levels `x86-64-v2` … `x86-64-v4` imply their features.
    pub cpu: String,
    /// LLVM names of features, without `+`.
    pub features: Vec<String>,
}

/// Features that kernels may use: LLVM's name, and the name that Rust's feature detection knows it by.
pub const FEATURES: [(&str, &str); 38] = [
    ("sse3", "sse3"),
    ("ssse3", "ssse3"),
    ("sse4.1", "sse4.1"),
    ("sse4.2", "sse4.2"),
    ("popcnt", "popcnt"),
    ("avx", "avx"),
    ("avx2", "avx2"),
    ("fma", "fma"),
    ("f16c", "f16c"),
    ("bmi", "bmi1"),
    ("bmi2", "bmi2"),
    ("lzcnt", "lzcnt"),
    ("movbe", "movbe"),
    ("avx512f", "avx512f"),
    ("avx512cd", "avx512cd"),
    ("avx512bw", "avx512bw"),
    ("avx512dq", "avx512dq"),
    ("avx512vl", "avx512vl"),
    ("avx512vbmi", "avx512vbmi"),
    ("avx512vbmi2", "avx512vbmi2"),
    ("avx512vnni", "avx512vnni"),
    ("avx512bitalg", "avx512bitalg"),
    ("avx512vpopcntdq", "avx512vpopcntdq"),
    ("avx512bf16", "avx512bf16"),
    ("avx512fp16", "avx512fp16"),
    ("avxvnni", "avxvnni"),
    ("amx-tile", "amx-tile"),
    ("amx-bf16", "amx-bf16"),
    ("amx-int8", "amx-int8"),
    ("gfni", "gfni"),
    ("vaes", "vaes"),
    ("vpclmulqdq", "vpclmulqdq"),
    ("neon", "neon"),
    ("fullfp16", "fp16"),
    ("dotprod", "dotprod"),
    ("bf16", "bf16"),
    ("i8mm", "i8mm"),
    ("lse", "lse"),
];

const X86_64_V2: [&str; 5] = ["popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"];
const X86_64_V3: [&str; 8] = ["avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"];
const X86_64_V4: [&str; 5] = ["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"];

/// Vector shape of a machine, and the register tile of its matrix kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Isa {
    /// f32 lanes of a vector: 16 with AVX-512, 8 with AVX2 and FMA, else 4.
    pub lanes: usize,
    /// Output channels per weight panel: two vectors.
    pub nr: usize,
    /// Most rows that a matrix kernel holds in registers.
    pub mr: usize,
    /// Whether there are dot products of bf16 pairs (AVX512-BF16, NEON with BF16).
    pub bf16: bool,
    /// Multiplication of bytes.
    pub bytes: ByteDot,
    /// Whether there are tile registers that multiply pairs of bf16 (AMX-BF16), beside AVX-512.
    pub tiles: bool,
    /// Whether one instruction moves any byte of a vector anywhere (AVX512-VBMI), and another rounds two
    /// vectors to bf16 (AVX512-BF16).
    pub permutes: bool,
}

/// Instruction by which a machine multiplies four bytes at a time and adds them to a 32-bit lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ByteDot {
    /// Not at all.
    None,
    /// `vpdpbusd`: unsigned by signed, one instruction (AVX512-VNNI, AVX-VNNI).
    Vnni,
    /// `vpmaddubsw` and `vpmaddwd` (AVX2).
    Maddubs,
    /// `sdot`: signed by signed (NEON with dot products).
    Sdot,
    /// `sdot` for one row, `smmla` for two at a time: eight bytes of two columns each (NEON with I8MM).
    Smmla,
}

impl Isa {
    /// Whether it is that of a thread of a GPU.
    pub fn is_thread(&self) -> bool {
        *self == Self::GPU
    }

    /// Whether there are products of two rows and two columns of bf16 (`bfmmla`, with every `bfdot` of NEON).
    pub(crate) fn squares(&self) -> bool {
        self.bf16 && self.lanes == 4
    }

    const AVX512: Self =
        Self { lanes: 16, nr: 32, mr: 12, bf16: false, bytes: ByteDot::None, tiles: false, permutes: false };
    const AVX2: Self =
        Self { lanes: 8, nr: 16, mr: 6, bf16: false, bytes: ByteDot::Maddubs, tiles: false, permutes: false };
    const NEON: Self =
        Self { lanes: 4, nr: 8, mr: 8, bf16: false, bytes: ByteDot::None, tiles: false, permutes: false };
    /// A thread of a GPU.
    pub const GPU: Self =
        Self { lanes: 1, nr: 1, mr: 8, bf16: true, bytes: ByteDot::Sdot, tiles: false, permutes: false };
    const SSE2: Self =
        Self { lanes: 4, nr: 8, mr: 4, bf16: false, bytes: ByteDot::None, tiles: false, permutes: false };
}

impl Machine {
    /// A machine of the x86-64 level `2`, `3` or `4` (anything else: the baseline), under Linux.
    pub fn x86_64_level(level: u8) -> Self {
        let cpu = match level {
            2..=4 => format!("x86-64-v{level}"),
            _ => "x86-64".to_string(),
        };
        Self { triple: "x86_64-unknown-linux-gnu".to_string(), cpu, features: Vec::new() }
    }

    /// This host: its CPU name, and those of its features that are in [`FEATURES`].
    ///
    /// # Errors
    /// [`Error::Target`] on an architecture that kernels are not generated for.
    pub fn host() -> Result<Self> {
        let triple = TargetMachine::get_default_triple().as_str().to_string_lossy().into_owned();
        let cpu = TargetMachine::get_host_cpu_name().to_string();
        let all = TargetMachine::get_host_cpu_features().to_string();
        let mut features: Vec<String> = all
            .split(',')
            .filter_map(|f| f.strip_prefix('+'))
            .filter(|f| FEATURES.iter().any(|(llvm, _)| llvm == f))
            .map(str::to_string)
            .collect();
        features.sort();
        let machine = Self { triple, cpu, features };
        if machine.is_x86() || machine.is_aarch64() { Ok(machine) } else { Err(machine.unsupported()) }
    }

    /// Every feature that kernels may use, sorted: the listed ones and those of the CPU's level.
    pub fn all_features(&self) -> Vec<String> {
        let levels: &[&[&str]] = match self.cpu.as_str() {
            "x86-64-v2" => &[&X86_64_V2],
            "x86-64-v3" => &[&X86_64_V2, &X86_64_V3],
            "x86-64-v4" => &[&X86_64_V2, &X86_64_V3, &X86_64_V4],
            _ => &[],
        };
        let mut all: Vec<String> = levels.iter().flat_map(|l| l.iter()).map(|f| (*f).to_string()).collect();
        all.extend(self.features.iter().cloned());
        if self.is_aarch64() {
            all.push("neon".to_string());
        }
        all.sort();
        all.dedup();
        all
    }

    /// Vector shape.
    pub fn isa(&self) -> Isa {
        let features = self.all_features();
        let has = |f: &str| features.iter().any(|g| g == f);
        let bytes = |feature, dot, otherwise| if has(feature) { dot } else { otherwise };
        if self.is_aarch64() {
            let bytes = match (has("dotprod"), has("i8mm")) {
                (true, true) => ByteDot::Smmla,
                (true, false) => ByteDot::Sdot,
                _ => ByteDot::None,
            };
            Isa { bf16: has("bf16"), bytes, ..Isa::NEON }
        } else if has("avx512f") {
            let bytes = bytes("avx512vnni", ByteDot::Vnni, ByteDot::None);
            let tiles = has("amx-tile") && has("amx-bf16");
            let bf16 = has("avx512bf16");
            Isa { bf16, bytes, tiles, permutes: bf16 && has("avx512vbmi"), ..Isa::AVX512 }
        } else if has("avx2") && has("fma") {
            Isa { bytes: bytes("avxvnni", ByteDot::Vnni, ByteDot::Maddubs), ..Isa::AVX2 }
        } else {
            Isa::SSE2
        }
    }

    /// Whether the CPU converts binary16 by itself.
    pub(crate) fn converts_f16(&self) -> bool {
        self.is_aarch64() || self.all_features().iter().any(|f| f == "f16c" || f == "avx512f")
    }

    /// Features as LLVM's attributes spell them.
    pub(crate) fn feature_string(&self) -> String {
        let plus: Vec<String> = self.all_features().iter().map(|f| format!("+{f}")).collect();
        plus.join(",")
    }

    pub(crate) fn is_x86(&self) -> bool {
        self.triple.starts_with("x86_64")
    }

    /// Whether its objects are ELF; those of Apple's systems are Mach-O.
    pub(crate) fn is_elf(&self) -> bool {
        !self.triple.contains("-apple-")
    }

    pub(crate) fn is_aarch64(&self) -> bool {
        self.triple.starts_with("aarch64") || self.triple.starts_with("arm64")
    }

    pub(crate) fn unsupported(&self) -> Error {
        Error::Target {
            what: format!("no kernels are generated for `{}`", self.triple),
            hint: "choose a target whose triple begins with x86_64, aarch64 or arm64".to_string(),
        }
    }
}
