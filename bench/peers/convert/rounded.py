"""A checkpoint whose matrices are rounded by an engine's own code, and written in f32.

    rounded.py CHECKPOINT MOMENTS OUT LIBRARY TYPE experts|all

`MOMENTS` is what `moec inspect PROFILE --moments` writes: the importance of input channels, as an engine's imatrix has it.
`LIBRARY` is the engine's `libggml`, `TYPE` one of its types (`q4_K`). `experts` leaves attention and embeddings alone.
Prints the bits per weight.

Blocks of these types have 256 numbers of one row. Rows of small models are shorter: several rows, one after the other, are
then a row of the type, with as many bits; only the scale of a whole block has more than one row.
"""

import argparse
import ctypes
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from to_gguf import Checkpoint  # noqa: E402

BLOCK = 256
ENOUGH = 64
"""Tokens below which an expert's importance is the mean of all experts, as in moec."""
TYPES = 512
"""No engine numbers its types higher."""


class Traits(ctypes.Structure):
    """The first fields of ggml's description of a type."""

    _fields_ = [
        ("name", ctypes.c_char_p), ("block", ctypes.c_int64), ("interleaved", ctypes.c_int64), ("bytes", ctypes.c_size_t),
        ("quantised", ctypes.c_bool), ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


class Library:
    """An engine's quantiser."""

    def __init__(self, path):
        self.ggml = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        self.ggml.ggml_type_name.restype = ctypes.c_char_p
        self.ggml.ggml_row_size.restype, self.ggml.ggml_row_size.argtypes = ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]
        self.ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.ggml.ggml_quantize_chunk.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
        ]
        # Tables of half-precision numbers are filled when a context is made.
        self.ggml.ggml_init.restype = ctypes.c_void_p
        self.ggml.ggml_init.argtypes = [type("Params", (ctypes.Structure,), {
            "_fields_": [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]})]
        self.ggml.ggml_init(self.ggml.ggml_init.argtypes[0](1 << 16, None, True))

    def type(self, name):
        """The number of a type."""
        for kind in range(TYPES):
            traits = self.traits(kind)
            if traits and traits.bytes and (traits.name or b"").decode() == name:
                return kind
        raise SystemExit(f"error: the library has no type {name}")

    def traits(self, kind):
        if hasattr(self.ggml, "ggml_get_type_traits"):
            get = self.ggml.ggml_get_type_traits
            get.restype = ctypes.POINTER(Traits)
        else:
            # ik_llama.cpp's returns a copy, through a pointer that the caller gives (it is larger than two registers).
            get = self.ggml.ggml_internal_get_type_traits
            room = ctypes.create_string_buffer(256)
            get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int]
            get(room, kind)
            self.kept = room
            return Traits.from_buffer(room)
        limit = getattr(self, "limit", None)
        if limit is None:
            # Past the last type is other memory: the number of types is that of the first without a known block.
            limit = self.limit = next(i for i in range(TYPES) if not 0 <= get(i).contents.block <= BLOCK or get(i).contents.bytes > 4096)
        return get(kind).contents if kind < limit else None

    def rounded(self, kind, matrix, importance):
        """The numbers of a matrix `[rows, channels]` as they come back from the type, and its bytes."""
        rows, channels = matrix.shape
        width = math.lcm(channels, BLOCK)
        if matrix.size % width:
            raise SystemExit(f"error: {rows}×{channels} numbers are no whole rows of {width}")
        count, size = matrix.size // width, self.ggml.ggml_row_size(kind, width)
        flat = np.ascontiguousarray(matrix, np.float32)
        weights = np.ascontiguousarray(np.tile(importance, width // channels), np.float32)
        codes, back = np.zeros(count * size, np.uint8), np.empty(matrix.shape, np.float32)
        self.ggml.ggml_quantize_chunk(kind, flat.ctypes.data, codes.ctypes.data, 0, count, width, weights.ctypes.data)
        to_float = self.traits(kind).to_float
        for row in range(count):
            to_float(codes.ctypes.data + row * size, back.ctypes.data + 4 * row * width, width)
        return back, codes.size


def importance(moments, name):
    """Mean squares of the input channels of a tensor of a checkpoint like Qwen3-MoE's; None: it is not rounded."""
    words = name.split(".")
    if words[-1] != "weight" or words[1] != "layers":
        return None
    layer, part, matrix = words[2], words[3], words[-2]
    if part == "mlp" and words[4] == "experts":
        of = moments[f"layers.{layer}.moe.{'down' if matrix == 'down_proj' else 'gate_up'}"]
        tokens, rows = np.array(of["tokens"], float), np.array(of["mean_square"])
        mean = (tokens[:, None] * rows).sum(0) / max(tokens.sum(), 1)
        expert = int(words[5])
        return rows[expert] if tokens[expert] >= ENOUGH else mean
    if part == "self_attn" and matrix.endswith("_proj"):
        return np.array(moments[f"layers.{layer}.attn.{matrix[0]}"]["mean_square"][0])
    return None


def main():
    p = argparse.ArgumentParser()
    p.add_argument("checkpoint", type=Path)
    p.add_argument("moments", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("library")
    p.add_argument("type")
    p.add_argument("scope", choices=["experts", "all"])
    args = p.parse_args()
    source, library = Checkpoint(args.checkpoint), Library(args.library)
    moments, kind = json.loads(args.moments.read_text()), library.type(args.type)
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    for path in args.checkpoint.iterdir():
        if path.is_file() and path.suffix == ".json":
            shutil.copy(path, args.out)
    tensors, size, numbers = {}, 0, 0
    for name in source.tensors:
        matrix = source.f32(name)
        channels = importance(moments, name) if args.scope == "all" or ".experts." in name else None
        if channels is not None:
            matrix, taken = library.rounded(kind, matrix, channels)
            size, numbers = size + taken, numbers + matrix.size
        tensors[name] = np.ascontiguousarray(matrix)
    header, at = {}, 0
    for name, matrix in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(matrix.shape), "data_offsets": [at, at + matrix.nbytes]}
        at += matrix.nbytes
    text = json.dumps(header).encode()
    with open(args.out / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for matrix in tensors.values():
            file.write(matrix.tobytes())
    print(json.dumps({"bits": 8 * size / numbers}))


if __name__ == "__main__":
    main()
