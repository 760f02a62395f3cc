//! What is written: LLVM kernels, packed weights, the Rust source of a baked plan.
