#!/usr/bin/env python3
"""Writes numbers.gguf: blocks of every type that moec decodes, and what the gguf package decodes them to.

    pip install gguf==0.19.0 && python write.py

Blocks are random bytes, so that every code occurs; only the numbers of 16 bits in them are kept finite. Scales of MXFP4 go
through all of their values.
"""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

# Bytes at which numbers of 16 bits stand in a block.
HALVES = {
    Type.F16: [0], Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
}
NUMBERS = 1024


def blocks(kind: Type, rng: np.random.Generator) -> np.ndarray:
    """Rows of random blocks, as bytes."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if kind in (Type.F32, Type.BF16):
        numbers = rng.standard_normal(NUMBERS).astype(np.float32)
        return gguf.quantize(numbers, kind).view(np.uint8).reshape(1, -1)
    out = rng.integers(0, 256, (256 if kind is Type.MXFP4 else NUMBERS // block, size), dtype=np.uint8)
    for at in HALVES.get(kind, []):
        halves = (rng.standard_normal(len(out)) * 10.0 ** rng.integers(-6, 4, len(out))).astype(np.float16)
        out[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind is Type.MXFP4:
        out[:, 0] = np.arange(256)
    return out.reshape(1, -1)


def main() -> None:
    rng = np.random.default_rng(20)
    writer = gguf.GGUFWriter(Path(__file__).with_name("numbers.gguf"), "none")
    for kind in [Type.F32, Type.BF16, *HALVES, Type.MXFP4]:
        stored = blocks(kind, rng)
        with np.errstate(over="ignore"):
            decoded = gguf.dequantize(stored, kind)
        writer.add_tensor(kind.name, stored, raw_dtype=kind)
        writer.add_tensor(f"{kind.name}.decoded", decoded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
