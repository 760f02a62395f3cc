//! What PowerInfer-2's paper says, and nothing else: every number here is printed there, under the place that is named. Bars
//! and points of figures without a number are not read off.

use crate::printed::Printed::{self, Is, Over};

/// §4.1.3: part of the neurons that is the neural unit's, by batch: "about 50 %" at 1, "about 70 %" at large ones.
pub const HOT: [(usize, Printed); 2] = [(1, Is(0.5)), (4, Is(0.7))];
/// Table 2: LLMFlash with Mistral-7B in memory, tokens per second.
pub const MISTRAL_IN_MEMORY: Printed = Is(12.9);
/// §7.2.1: speedups over LLMFlash and llama.cpp, on average and at most, on the OnePlus 12.
pub const DECODE: [(Printed, Printed); 2] = [(Is(3.84), Is(4.63)), (Is(24.6), Is(27.8))];
/// §7.2.1: the same on average, on the Ace 2.
pub const DECODE_ACE: [Printed; 2] = [Is(2.93), Is(14.1)];
/// §7.2.1: speedup of LLMFlash over llama.cpp.
pub const LLMFLASH_OVER_LLAMA: Printed = Is(5.35);
/// §7.2.1: activated neurons that LLMFlash has to load.
pub const LLMFLASH_MISSES: Printed = Is(0.10);
/// §7.2.1: tokens per second of TurboSparse-Mixtral-47B.
pub const MIXTRAL: Printed = Is(9.96);
/// §7.2.1: Bamboo-7B over Llama-13B.
pub const LLAMA_SLOWER: Printed = Is(2.0);
/// Table 4: part of the time in I/O: PowerInfer-2, LLMFlash.
pub const IO: [Printed; 2] = [Is(0.137), Is(0.767)];
/// §7.2.2: prefill of 512 tokens over LLMFlash, llama.cpp and QNN on the OnePlus 12.
pub const PREFILL: [Printed; 3] = [Is(48.97), Is(44.23), Is(1.99)];
/// §7.2.2: the same over the first two on the Ace 2.
pub const PREFILL_ACE: [Printed; 2] = [Is(29.98), Is(16.67)];
/// §7.2.2: 128 tokens, at most, over LLMFlash.
pub const PREFILL_128: Printed = Is(22.47);
/// §7.2.2: sequential over random reads.
pub const SEQUENTIAL: Printed = Is(3.0);
/// §7.2.2: neurons of TurboSparse-Mixtral-47B that a batch of 128 activates, in percent.
pub const ACTIVE_128: Printed = Is(99.99);
/// §7.2.3: gigabytes of memory, and tokens per second.
pub const MEMORY: [(f64, Printed); 2] = [(7.0, Is(2.13)), (19.0, Is(11.68))];
/// §7.2.3: speedups over LLMFlash at these.
pub const MEMORY_OVER_LLMFLASH: [Printed; 2] = [Is(1.84), Is(3.12)];
/// §7.2.3: speedup over llama.cpp at 19 GB.
pub const MEMORY_OVER_LLAMA: Printed = Is(21.2);
/// §7.2.3: gigabytes that are taken before any neuron is cached, and what 400 MB then hold of the feed-forward weights.
pub const TAKEN_GB: f64 = 6.6;
/// The same.
pub const CACHED_AT_7: Printed = Is(0.018);
/// §7.2.4: tokens per second of every task.
pub const TASKS: Printed = Over(11.4);
/// Table 5: mean, P50, P90, P99 in milliseconds, of TurboSparse-Mixtral-47B and Bamboo-7B.
pub const LATENCY: [[f64; 4]; 2] = [[99.76, 97.42, 116.16, 140.56], [90.32, 86.88, 115.02, 162.02]];
/// §7.2.4: misses of TurboSparse-Mixtral-47B, mean and 99th percentile.
pub const MISSES: [Printed; 2] = [Is(0.035), Is(0.189)];
/// §7.5: hits of Bamboo-7B.
pub const HITS: Printed = Is(0.95);
/// Table 6: tokens per second of PowerInfer-2 and LLMFlash: Mistral(SiLU)-7B, Bamboo-7B.
pub const SPEEDS: [[f64; 2]; 2] = [[5.3, 2.18], [11.1, 2.4]];
/// §7.3: prefill in memory, tokens per second, and over the other frameworks.
pub const PREFILL_IN_MEMORY: Printed = Over(700.0);
/// §7.3: prefill over other frameworks.
pub const PREFILL_OVER_CPU: Printed = Is(32.0);
/// §7.3: prefill with half of the feed-forward weights on flash.
pub const PREFILL_HALF: Printed = Is(404.6);
/// §7.3: decode over llama.cpp, MLC-LLM and QNN.
pub const IN_MEMORY: [Printed; 3] = [Is(2.24), Is(2.48), Is(1.86)];
/// §7.3: gigabytes that half on flash saves.
pub const SAVED_GB: Printed = Is(1.5);
/// §7.4: over QNN and PowerInfer-2-CPUOnly, with 4 sequences and with 1.
pub const BEST_OF: [(usize, [Printed; 2]); 2] = [(4, [Is(1.84), Is(1.28)]), (1, [Is(1.77), Is(1.1)])];
/// §7.5: tokens per second, one more optimization each.
pub const ABLATION: [f64; 5] = [0.4, 1.1, 4.181, 9.60, 11.07];
/// §7.5: what the last three are said to add; the tokens per second say 3.80, 2.30 and 1.15.
pub const ADDED: [f64; 3] = [2.82, 1.29, 1.15];
/// Table 8: joules per token: PowerInfer-2, QNN, llama.cpp.
pub const ENERGY: [f64; 3] = [0.257, 0.373, 0.672];
/// Table 8: how much less PowerInfer-2's is than QNN's and llama.cpp's.
pub const ENERGY_SAVED: [f64; 2] = [0.311, 0.618];
/// Figure 2 with §2.2: neurons that are highly activated at batch 1 and 32.
pub const WHITE: [Printed; 2] = [Printed::Below(0.01), Is(0.75)];
