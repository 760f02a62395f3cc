//! Which processor features this machine has, by LLVM's names.

macro_rules! features {
    ($($llvm:literal => $rust:tt),* $(,)?) => {
        /// Features whose presence [`host_has`] can tell on an x86-64 machine, in LLVM's spelling.
        pub const KNOWN_FEATURES: &[&str] = &[$($llvm),*];

        /// Whether this machine has the feature of that LLVM name; `None` when it cannot be told, because
        /// the name is not known or belongs to another architecture.
        pub fn host_has(feature: &str) -> Option<bool> {
            #[cfg(target_arch = "x86_64")]
            match feature {
                $($llvm => return Some(std::arch::is_x86_feature_detected!($rust)),)*
                _ => {}
            }
            let _ = feature;
            None
        }
    };
}

features! {
    "sse3" => "sse3",
    "ssse3" => "ssse3",
    "sse4.1" => "sse4.1",
    "sse4.2" => "sse4.2",
    "cx16" => "cmpxchg16b",
    "popcnt" => "popcnt",
    "avx" => "avx",
    "avx2" => "avx2",
    "bmi" => "bmi1",
    "bmi2" => "bmi2",
    "f16c" => "f16c",
    "fma" => "fma",
    "lzcnt" => "lzcnt",
    "movbe" => "movbe",
    "avxvnni" => "avxvnni",
    "avx512f" => "avx512f",
    "avx512bw" => "avx512bw",
    "avx512cd" => "avx512cd",
    "avx512dq" => "avx512dq",
    "avx512vl" => "avx512vl",
    "avx512vnni" => "avx512vnni",
    "avx512bf16" => "avx512bf16",
    "avx512fp16" => "avx512fp16",
}
