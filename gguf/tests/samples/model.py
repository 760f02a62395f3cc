#!/usr/bin/env python3
"""Writes a small model in two GGUF files: matrices of random blocks, each of another type, and the same numbers in F32.

    cargo xtask gguf
    python model.py STORED.gguf DECODED.gguf [TYPE…]

TYPE… are those of the matrices, in the order of `main`; without them each has one of its own.
"""

import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from write import BYTES, random, scale

# Each of the matrices takes the next one.
TYPES = [
    Type.Q2_K, Type.Q3_K, Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S,
    Type.IQ4_NL, Type.IQ4_XS, Type.TQ1_0, Type.TQ2_0, Type.NVFP4, Type.MXFP4, Type.Q6_K,
]
LAYERS, WIDTH, HEAD, HEADS, KV, EXPERTS, VOCAB = 2, 256, 64, 4, 2, 4, 64
# Root mean square of weights.
SIZE = WIDTH**-0.5


def matrix(kind: Type, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A matrix as bytes, with numbers of about the same size in every type."""
    block = gguf.GGML_QUANT_SIZES[kind][0]
    out = random(kind, np.prod(shape) // block, rng)
    if kind in BYTES:
        # Powers from 2⁻⁸ to 2⁻⁵, and numbers from 2⁻⁶ to 2⁻⁵.
        out[:, : BYTES[kind]] %= 4
        out[:, : BYTES[kind]] += 119 if kind is Type.MXFP4 else 8
    else:
        scale(kind, out, np.ones)
        each = SIZE / np.sqrt(np.mean(gguf.dequantize(out, kind) ** 2))
        scale(kind, out, lambda n: each * rng.uniform(0.5, 1.5, n))
    return out.reshape(*shape[:-1], -1)


def main() -> None:
    rng = np.random.default_rng(21)
    kinds, tensors = iter([Type[name] for name in sys.argv[3:]] or TYPES), {}

    def add(name, *shape):
        kind = next(kinds)
        tensors[f"{name}.weight"] = (matrix(kind, shape, rng), kind)

    def plain(name, mean, deviation, *shape):
        tensors[f"{name}.weight"] = (rng.normal(mean, deviation, shape).astype(np.float32), Type.F32)

    add("token_embd", VOCAB, WIDTH)
    add("output", VOCAB, WIDTH)
    plain("output_norm", 1.0, 0.1, WIDTH)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_q", HEADS * HEAD, WIDTH)
        add(f"blk.{i}.attn_k", KV * HEAD, WIDTH)
        add(f"blk.{i}.attn_v", KV * HEAD, WIDTH)
        add(f"blk.{i}.attn_output", WIDTH, HEADS * HEAD)
        for part in ("gate", "up", "down"):
            add(f"blk.{i}.ffn_{part}_exps", EXPERTS, WIDTH, WIDTH)
        plain(f"blk.{i}.ffn_gate_inp", 0.0, SIZE, EXPERTS, WIDTH)
        for name, width in (("attn", WIDTH), ("ffn", WIDTH), ("attn_q", HEAD), ("attn_k", HEAD)):
            plain(f"blk.{i}.{name}_norm", 1.0, 0.1, width)
    for out, is_decoded in zip(sys.argv[1:3], (False, True)):
        writer = gguf.GGUFWriter(out, "qwen3moe")
        writer.add_type("model")
        writer.add_block_count(LAYERS)
        writer.add_context_length(256)
        writer.add_embedding_length(WIDTH)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV)
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_feed_forward_length(WIDTH)
        writer.add_expert_feed_forward_length(WIDTH)
        writer.add_vocab_size(VOCAB)
        for name, (stored, kind) in tensors.items():
            if is_decoded:
                writer.add_tensor(name, gguf.dequantize(stored, kind))
            else:
                writer.add_tensor(name, stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


main()
