#!/usr/bin/env python3
"""Writes blocks of every type that moec decodes, and what the gguf package decodes them to.

    pip install gguf==0.19.0 && python write.py                # numbers.gguf
    python write.py OUT.gguf --numbers N --any                 # more of them, with any number of 16 bits as a scale

Blocks are random bytes, so that every code occurs; without --any, numbers of 16 bits in them are finite, and scales of MXFP4 and
NVFP4 go through all of their values.
"""

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

# Bytes at which numbers of 16 bits stand in a block.
HALVES = {
    Type.F16: [0], Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
    Type.IQ1_S: [0], Type.IQ2_XXS: [0], Type.IQ2_XS: [0], Type.IQ2_S: [0], Type.IQ3_XXS: [0], Type.IQ3_S: [0],
    Type.IQ4_NL: [0], Type.IQ4_XS: [0], Type.TQ1_0: [52], Type.TQ2_0: [64],
}
# Numbers of bytes at the beginning of a block that are scales of 8 bits.
BYTES = {Type.MXFP4: 1, Type.NVFP4: 4}
# Numbers of 16 bits at the ends of their range, and past them.
ENDS = [np.inf, -np.inf, np.nan, 0.0, -0.0, 65504.0, -65504.0, 2.0**-24]
TYPES = [Type.F32, Type.BF16, *HALVES, Type.IQ1_M, *BYTES]


def scale(kind: Type, blocks: np.ndarray, draw) -> None:
    """Replaces the numbers of 16 bits of blocks by drawn ones. IQ1_M has them in four highest nibbles."""
    for at in HALVES.get(kind, []):
        blocks[:, at : at + 2] = draw(len(blocks)).astype(np.float16)[:, None].view(np.uint8)
    if kind is Type.IQ1_M:
        bits = draw(len(blocks)).astype(np.float16).view(np.uint16)
        for i in range(4):
            at = 49 + 2 * i
            blocks[:, at] = blocks[:, at] & 15 | (bits >> 4 * i & 15).astype(np.uint8) << 4


def random(kind: Type, blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks of random bytes, each a row."""
    return rng.integers(0, 256, (blocks, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)


def tame(kind: Type, numbers: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks whose numbers are finite."""
    if kind in (Type.F32, Type.BF16):
        return gguf.quantize(rng.standard_normal(numbers).astype(np.float32), kind).view(np.uint8)
    if kind in BYTES:
        out = random(kind, 256 // BYTES[kind], rng)
        out[:, : BYTES[kind]] = np.arange(256).reshape(len(out), -1)
        return out
    out = random(kind, numbers // gguf.GGML_QUANT_SIZES[kind][0], rng)
    scale(kind, out, lambda n: rng.standard_normal(n) * 10.0 ** rng.integers(-6, 4, n))
    return out


def wild(kind: Type, numbers: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks of any bytes, the first with scales at the ends of their range and past them."""
    out = random(kind, numbers // gguf.GGML_QUANT_SIZES[kind][0], rng)
    scale(kind, out[: len(ENDS)], lambda n: np.resize(ENDS, n))
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).with_name("numbers.gguf"))
    parser.add_argument("--numbers", type=int, default=1024)
    parser.add_argument("--any", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(20)
    writer = gguf.GGUFWriter(args.out, "none")
    for kind in TYPES:
        stored = (wild if args.any else tame)(kind, args.numbers, rng).reshape(1, -1)
        with np.errstate(all="ignore"):
            decoded = gguf.dequantize(stored, kind)
        writer.add_tensor(kind.name, stored, raw_dtype=kind)
        writer.add_tensor(f"{kind.name}.decoded", decoded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
